"""What ranks exchange: whole tensors of every rank, byte for byte, so that no collective adds a number."""

from collections.abc import Callable
from functools import cache, lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bi_kernels.parallel.peers import Move, peers_for
from bi_kernels.tokens import SLAB

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.12 on


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


def _wide(t: Tensor, columns: int) -> Tensor:
    """Returns rows of so many numbers, or of multiples, as integers of 8 bytes if they can be: a strided copy takes
    its time by the number."""
    return t.view(torch.int64) if columns * t.element_size() % 8 == 0 else t


def exchange_async(group: dist.ProcessGroup, *moves: Move, kept: bool = False) -> Callable[[], list[Tensor]]:
    """Begins to exchange what was moved; returns what waits for it and returns what came of each. Unless it is kept,
    that is for what is launched next: see peers.py."""
    if peers := peers_for(group, moves[0].x):
        return peers.exchange(moves, kept)
    waits = [_collective(group, move) for move in moves]
    return lambda: [wait() for wait in waits]


def exchange(group: dist.ProcessGroup, move: Move, kept: bool = False) -> Tensor:
    """Returns what came of one."""
    return exchange_async(group, move, kept=kept)()[0]


def _collective(group: dist.ProcessGroup, move: Move) -> Callable[[], Tensor]:
    """Begins a move by collectives."""
    (rank, ranks), columns = rank_and_world_size(group), move.columns
    rows, width = move.rows[rank], columns * move.x.element_size()
    if move.all or columns == move.x.shape[1]:  # what is sent lies one after another
        x = move.x.contiguous()
    else:
        x = torch.cat([_wide(part, columns).flatten() for part in move.x.split(columns, 1)]).view(move.x.dtype)
    found, work = x.new_empty(ranks, rows, columns), None
    if x.numel() and move.all:
        work = all_gather(_bytes(found), _bytes(x), group=group, async_op=True)
    elif x.numel():
        counts = [rows * width] * ranks, [theirs * width for theirs in move.rows]
        work = dist.all_to_all_single(_bytes(found), _bytes(x), *counts, group=group, async_op=True)

    def wait(held: Tensor = x) -> Tensor:
        if work:
            work.wait()
        if not move.beside or not found.numel():
            return found.view(move.shape(rank))
        wide = _wide(found, columns).transpose(0, 1).contiguous()
        return wide.view(x.dtype).view(rows, ranks * columns)

    return wait


@cache
def rank_and_world_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Returns this rank in a group, and how many there are."""
    return dist.get_rank(group), dist.get_world_size(group)


def all_gather_rows(x: Tensor, group: dist.ProcessGroup, beside: bool = False) -> Move:
    """Moves x (rows, columns) of all ranks to all: (ranks, rows, columns), or beside: (rows, ranks · columns)."""
    ranks, (rows, columns) = rank_and_world_size(group)[1], x.shape
    return Move(_by_rows(x), (rows,) * ranks, (0,) * ranks, columns, beside, all=True)


def _by_rows(x: Tensor) -> Tensor:
    """Returns x (rows, columns), whose rows lie one after another, or apart."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def all_gather_columns(x: Tensor, group: dist.ProcessGroup) -> Move:
    """Moves x (rows, columns) of all ranks to all, beside each other: (rows, ranks · columns)."""
    return all_gather_rows(x, group, beside=True)


@lru_cache(maxsize=256)
def shards(tokens: int, group: dist.ProcessGroup, unit: int = SLAB) -> list[slice]:
    """Returns the tokens of each rank: whole slabs, as many each; the last ranks may have fewer, or none. unit: of what
    a rank has, 1 where slabs themselves are counted."""
    ranks = rank_and_world_size(group)[1]
    most = -(-tokens // (unit * ranks)) * unit
    return [slice(min(tokens, r * most), min(tokens, r * most + most)) for r in range(ranks)]


def all_to_all_tokens(x: Tensor, group: dist.ProcessGroup, cuts: list[slice]) -> Move:
    """Moves x (tokens, columns), all tokens of this rank's columns, so that each rank has its tokens of all columns:
    (its tokens, ranks · columns). cuts: the tokens of each rank."""
    x, columns = x.contiguous(), x.shape[1]
    rows, first = (tuple(cut.stop - cut.start for cut in cuts), tuple(cut.start * columns for cut in cuts))
    return Move(x, rows, first, columns, True)


def reshard(weight: Tensor, group: dist.ProcessGroup) -> Move:
    """Moves a weight, of which each rank has rows, so that each has all rows of its columns: (ranks, rows, columns of a
    rank)."""
    ranks, (rows, columns) = rank_and_world_size(group)[1], weight.shape
    return Move(_by_rows(weight), (rows,) * ranks, tuple(range(0, columns, columns // ranks)), columns // ranks, False)


def of_all(mine: Tensor, cuts: list[slice], group: dist.ProcessGroup) -> Tensor:
    """Returns (tokens, columns) of all ranks, of which each has its share."""
    most, tokens = max(cut.stop - cut.start for cut in cuts), cuts[-1].stop
    if len(mine) < most:
        mine = torch.cat([mine, mine.new_zeros(most - len(mine), mine.shape[1])])
    adjacent = all(cut.start == min(r * most, tokens) for r, cut in enumerate(cuts))
    found = exchange(group, all_gather_rows(mine, group), kept=adjacent)
    return found.flatten(0, 1)[:tokens] if adjacent else torch.cat([t[: c.stop - c.start] for t, c in zip(found, cuts)])


def merge(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns, in place of x, what the ranks wrote into it, of which every number is one rank's and 0 all others': a
    sum of the bits as integers."""
    whole = x.view(-1).view(torch.uint8)
    dist.all_reduce(whole.view(torch.int32) if whole.numel() % 4 == 0 else whole, group=group)
    return x


class Part(torch.autograd.Function):
    """This rank's columns of what every rank has whole, x (rows, columns). The gradient of the whole are the parts that
    the ranks found, beside each other; kept: which ranks' are wanted."""

    @staticmethod
    def forward(ctx, x: Tensor, columns: slice, group: dist.ProcessGroup, kept: slice) -> Tensor:
        ctx.group, ctx.kept = group, kept
        return x[:, columns]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        parts = exchange(ctx.group, all_gather_rows(dy, ctx.group))
        return torch.cat([*parts[ctx.kept]], 1), None, None, None


class Whole(torch.autograd.Function):
    """The columns of all ranks beside each other, of x (rows, columns); every rank has the gradient of the whole."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.columns = own(x.shape[1], group)
        return exchange(group, all_gather_columns(x, group), kept=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return dy[:, ctx.columns], None


def own(columns: int, group: dist.ProcessGroup) -> slice:
    """Returns where this rank's columns are in the whole, of which each rank has as many."""
    rank, _ = rank_and_world_size(group)
    return slice(rank * columns, (rank + 1) * columns)
