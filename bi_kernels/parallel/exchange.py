"""What ranks exchange: whole tensors of every rank, byte for byte, so that no collective adds a number."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.12 on


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


def _wide(t: Tensor, columns: int) -> Tensor:
    """Returns rows of so many numbers, or of multiples, as integers of 8 bytes if they can be: a strided copy takes
    its time by the number."""
    return t.view(torch.int64) if columns * t.element_size() % 8 == 0 else t


def gathering(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begins to gather x of all ranks, of one shape; returns what waits for it and returns (ranks, *x.shape)."""
    x = x.contiguous()
    found = x.new_empty(dist.get_world_size(group), *x.shape)
    if not x.numel():
        return lambda: found
    work = all_gather(_bytes(found), _bytes(x), group=group, async_op=True)

    def wait(held: Tensor = x) -> Tensor:
        work.wait()
        return found

    return wait


def beside(parts: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the columns of all ranks beside each other: (rows, ranks · columns) of (ranks, rows, columns)."""
    ranks, rows, columns = parts.shape
    out = parts.new_empty(rows, ranks * columns) if out is None else out
    _wide(out, columns).view(rows, ranks, -1).copy_(_wide(parts, columns).transpose(0, 1))
    return out


def recutting(weight: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begins to cut a weight along its columns, of which each rank holds rows; returns what waits for it and returns
    all rows of this rank's columns."""
    ranks, (rows, columns) = dist.get_world_size(group), weight.shape
    sent = _wide(weight, columns // ranks).view(rows, ranks, -1).transpose(0, 1).contiguous()
    found = torch.empty_like(sent)
    work = dist.all_to_all_single(_bytes(found), _bytes(sent), group=group, async_op=True)

    def wait(held: Tensor = sent) -> Tensor:
        work.wait()
        return found.view(weight.dtype).view(ranks * rows, columns // ranks)

    return wait


def merge(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns, in place of x, what the ranks wrote into it, of which every number is one rank's and 0 all others': a
    sum of the bits as integers."""
    whole = x.view(-1).view(torch.uint8)
    dist.all_reduce(whole.view(torch.int32) if whole.numel() % 4 == 0 else whole, group=group)
    return x


class Part(torch.autograd.Function):
    """This rank's columns of what every rank has whole, x (rows, columns). The gradient of the whole are the parts that
    the ranks found, beside each other; kept: which ranks' are wanted, all unless given."""

    @staticmethod
    def forward(ctx, x: Tensor, columns: slice, group: dist.ProcessGroup, kept: slice = slice(None)) -> Tensor:
        ctx.group, ctx.kept = group, kept
        return x[:, columns]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return beside(gathering(dy, ctx.group)()[ctx.kept]), None, None, None


class Whole(torch.autograd.Function):
    """The columns of all ranks beside each other, of x (rows, columns); every rank has the gradient of the whole."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.columns = own(x.shape[1], group)
        return beside(gathering(x, group)())

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return dy[:, ctx.columns], None


def own(columns: int, group: dist.ProcessGroup) -> slice:
    """Returns where this rank's columns are in the whole, of which each rank has as many."""
    rank = dist.get_rank(group)
    return slice(rank * columns, (rank + 1) * columns)
