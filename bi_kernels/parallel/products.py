"""Linear layers and QK-norm of weights cut along their rows over ranks, forward and backward.

No cut divides a sum: a rank computes its columns of a product, or its tokens with the whole weight. No cut changes a
bit, so each product uses the one that exchanges less. A rank computes its own dW and dbias during the exchange.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bi_kernels.checks import aligned
from bi_kernels.ops import norm
from bi_kernels.ops.fold import fold_partials
from bi_kernels.ops.gemm.gemm import fold_bias, fold_weight, linear, product
from bi_kernels.parallel.exchange import (
    all_gather_columns,
    all_gather_rows,
    all_to_all_tokens,
    exchange,
    exchange_async,
    gather_tokens,
    own,
    rank_and_world_size,
    reshard,
    shards,
)
from bi_kernels.tokens import SLAB, gradient_of, main_grad


class ColumnParallelLinear(torch.autograd.Function):
    """This rank's columns of x Wᵀ, of x whole. The gradient is that of `part`, this rank's tokens of x by `cuts`.

    dX = dY W sums over the columns of all ranks, so each rank is sent dY of its tokens, and the whole weight.
    """

    @staticmethod
    def forward(ctx, group, layout, cuts, part, x, weight, bias):
        _check_buffers(weight, bias)
        ctx.group, ctx.layout, ctx.cuts, ctx.parameters = group, layout, cuts, (weight, bias)
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, _, *needed = ctx.needs_input_grad[3:]
        if needs_x:
            arrived = exchange_async(
                ctx.group, all_to_all_tokens(dy, ctx.group, ctx.cuts), all_gather_rows(weight, ctx.group)
            )
        grads, dx = _folds(ctx, dy, x, needed), None
        if needs_x:
            of_mine, whole = arrived()
            dx = product(of_mine, whole.flatten(0, 1).t())
        return None, None, None, dx, None, *grads


class GatheredLinear(torch.autograd.Function):
    """x Wᵀ of x cut by columns over the ranks: whole, or this rank's tokens if `cuts` are given.

    dX of a rank's columns needs those columns of the whole weight, dW all columns of x.
    """

    @staticmethod
    def forward(ctx, group, layout, cuts, part, weight, bias):
        _check_buffers(weight, bias)
        ctx.group, ctx.layout, ctx.cuts, ctx.parameters = group, layout, cuts, (weight, bias)
        ctx.save_for_backward(part, weight)
        if cuts:
            return linear_of_tokens(group, part, weight, bias, cuts)
        return linear_of_parts(group, part, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        part, weight = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad[3:]
        if ctx.cuts:
            dy = gather_tokens(dy, ctx.cuts, ctx.group)
        if needs_x:
            own_columns = exchange_async(ctx.group, reshard(weight, ctx.group))
        x_of_all = exchange_async(ctx.group, all_gather_columns(part, ctx.group)) if needed[0] else None
        dx = product(dy, own_columns()[0].flatten(0, 1).t()) if needs_x else None
        x = x_of_all()[0] if needed[0] else None
        return None, None, None, dx, *_folds(ctx, dy[:, own(len(weight), ctx.group)], x, needed)


def _check_buffers(weight: Tensor, bias: Tensor | None) -> None:
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.requires_grad:
            main_grad("linear", parameter, name)


def _folds(ctx, dy: Tensor, x: Tensor, needed: list[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Returns dW and dbias of this rank's rows; None for one that went into main_grad."""
    (weight, bias), layout = ctx.parameters, ctx.layout
    dw = fold_weight("linear", dy, x, weight, layout) if needed[0] else None
    return dw, fold_bias("linear", dy, bias, layout) if needed[1] else None


def linear_of_parts(group: dist.ProcessGroup, part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns y (tokens, rows of all ranks) of part, this rank's columns of x.

    Gathers x and then y's columns, or, where that sends less, cuts by tokens and gathers the weight.
    """
    (tokens, _), rows, (_, ranks) = part.shape, len(weight), rank_and_world_size(group)
    if tokens * (ranks - 1) <= rows * ranks * ranks:
        y = linear(exchange(group, all_gather_columns(part, group)), weight, bias)
        return exchange(group, all_gather_columns(y, group), kept=True)
    cuts = shards(tokens, group)
    return gather_tokens(linear_of_tokens(group, part, weight, bias, cuts), cuts, group)


def linear_of_tokens(
    group: dist.ProcessGroup, part: Tensor, weight: Tensor, bias: Tensor | None, cuts: list[slice]
) -> Tensor:
    """Returns this rank's tokens of y, as `cuts` share them."""
    bias = None if bias is None else exchange(group, all_gather_columns(bias.view(1, -1), group)).flatten()
    of_mine, whole = exchange_async(group, all_to_all_tokens(part, group, cuts), all_gather_rows(weight, group))()
    return linear(of_mine, whole.flatten(0, 1), bias)


class HeadNorm(torch.autograd.Function):
    """QK-norm of this rank's heads."""

    @staticmethod
    def forward(ctx, group, layout, heads, x, weight, eps):
        main_grad("qk_norm", weight)
        x = aligned(x)
        y, rstd = norm.norm_forward(x, None, weight, eps, 0.0, trains=True)
        ctx.group, ctx.layout, ctx.heads, ctx.eps, ctx.parameter = group, layout, heads, eps, weight
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[3:5]
        heads, width = ctx.heads, x.shape[-1]
        if needs_weight:
            flat = [ctx.layout.gather(t.reshape(-1, heads * width)) for t in (x, dy)]
            cuts = shards(len(flat[0]), ctx.group)
            arrived = exchange_async(ctx.group, *(all_to_all_tokens(t, ctx.group, cuts) for t in flat))
        dx = torch.empty_like(x) if needs_x else None
        norm.norm_gradient(x, weight, rstd, dy, None, ctx.layout, heads, dx, None, False, 0.0)
        if not needs_weight:
            return None, None, None, dx, None, None
        x, dy = (t.view(-1, width) for t in arrived())
        _, rstd = norm.norm_forward(x, None, weight, ctx.eps, 0.0, trains=True)
        slabs, held = shards(len(ctx.layout.slots) // SLAB, ctx.group, 1), None
        (rank, ranks) = rank_and_world_size(ctx.group)
        mine = slabs[rank]
        if not ctx.layout.identity:  # this rank's tokens lie in the order of the fold now
            free = ctx.layout.slots_on(x.device)[mine.start * SLAB : mine.stop * SLAB] < 0
            held = torch.arange(len(free), device=x.device, dtype=torch.int32).masked_fill_(free, -1)
        count, every = mine.stop - mine.start, heads * ranks
        partial = norm.slab_sums(x, weight, rstd, dy, None, held, count, every, None, True, 0.0)
        dw, continues = gradient_of("qk_norm", ctx.parameter)
        fold_partials(gather_tokens(partial, slabs, ctx.group), dw if continues else None, dw)
        return None, None, None, dx, None if continues else dw, None
