"""Experts that are shared over ranks: each holds some of a mixture, whole, and computes their rows of all tokens.

A token's rows are sent to the rank that adds them, in ascending expert id, as on one rank. How many rows an expert gets
is known on the device alone. So ranks exchange a place for each choice of each token, whoever computes it, zeros where
it is another rank's: nothing waits for the device, nothing is dropped, and no number is added to another rank's.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bi_kernels.ops.grouped.groups import Groups, group_by_expert
from bi_kernels.ops.grouped.rows import combine_gradients, combined, gather_rows
from bi_kernels.parallel.exchange import (
    all_gather_columns,
    all_gather_rows,
    all_to_all_tokens,
    exchange,
    gather_tokens,
    own,
    rank_and_world_size,
)
from bi_kernels.tokens import TokenLayout


class SharedGroups(NamedTuple):
    """The rows of a call, sorted by this rank's experts; and of each token's choices, (tokens, k), where ranks exchange
    them."""

    mine: Groups  # the choices of other ranks' experts are routed nowhere
    order: Tensor  # int64: the choices in ascending expert id
    places: Tensor  # int32: of each choice, its rank · k + its place in that order; −1 if it is routed nowhere


def shared_groups(
    group: dist.ProcessGroup, expert_ids: Tensor, experts: int, layout: TokenLayout | None, padded: bool
) -> SharedGroups:
    """Groups tokens by this rank's experts, as `group_by_expert` does by all of them."""
    each, k = experts // rank_and_world_size(group)[1], expert_ids.shape[-1]
    here, ids = own(each, group), expert_ids.reshape(-1, k)
    mine = torch.where((ids >= here.start) & (ids < here.stop), ids - here.start, -1)
    groups = group_by_expert(mine.view(expert_ids.shape), each, layout, padded=padded)
    routed = (ids >= 0) & (ids < experts)
    if layout is not None and layout.padding:
        tokens = torch.zeros(len(ids), 1, dtype=torch.bool, device=ids.device)
        routed &= tokens.index_fill_(0, layout.rows_on(ids.device), True)
    order = ids.argsort(dim=1, stable=True)
    places = torch.where(routed, ids // each * k + order.argsort(1), -1)
    return SharedGroups(groups, order, places.to(torch.int32))


def _added(
    group: dist.ProcessGroup, groups: SharedGroups, cuts: list[slice] | None, y: Tensor, weights: Tensor | None
) -> Tensor:
    """Returns Σ weights · y of this rank's tokens by `cuts`, or of all where they are None: (its tokens, features)."""
    (rank, ranks), (tokens, k), width = rank_and_world_size(group), groups.places.shape, y.shape[1]
    sent = gather_rows(y, groups.mine.rows.gather(1, groups.order).flatten()).view(tokens, k * width)
    mine = cuts[rank] if cuts else slice(0, tokens)
    every = exchange(group, all_to_all_tokens(sent, group, cuts) if cuts else all_gather_columns(sent, group))
    places, first = groups.places[mine], ranks * k  # places of each token
    begin = torch.arange(len(places), dtype=torch.int32, device=y.device)[:, None] * first
    rows = torch.where(places < 0, -1, places + begin)
    return combined(every.view(len(places) * first, width), None if weights is None else weights[mine], rows, None)


class Dispatch(torch.autograd.Function):
    """This rank's experts' rows of x whole. The gradient is that of `part`, this rank's tokens of x by `cuts`."""

    @staticmethod
    def forward(ctx, group, groups, cuts, part, x):
        ctx.group, ctx.groups, ctx.cuts = group, groups, cuts
        return gather_rows(x, groups.mine.source, groups.places.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return None, None, None, _added(ctx.group, ctx.groups, ctx.cuts, dy, None), None


class Combine(torch.autograd.Function):
    """The weighted sum of each token's rows, of all tokens if `whole`, of this rank's by `cuts` if not. The gradient of
    a weight is computed by the rank that has the expert."""

    @staticmethod
    def forward(ctx, group, groups, cuts, whole, y, weights):
        ctx.group, ctx.groups, ctx.cuts = group, groups, None if whole else cuts
        ctx.save_for_backward(y, weights)
        out = _added(group, groups, cuts, y, weights)
        return gather_tokens(out, cuts, group) if whole and cuts else out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        (y, weights), (mine, _, places), k = ctx.saved_tensors, ctx.groups, ctx.groups.places.shape[1]
        if ctx.cuts:
            dout = gather_tokens(dout, ctx.cuts, ctx.group)
        needs_y, needs_weights = ctx.needs_input_grad[4:]
        dy = torch.empty_like(y, memory_format=torch.contiguous_format) if needs_y else None
        dweights = torch.zeros_like(weights, memory_format=torch.contiguous_format) if needs_weights else None
        combine_gradients(dout, y, weights, mine.source, dy, dweights, k)
        if needs_weights:
            every = exchange(ctx.group, all_gather_rows(dweights, ctx.group))
            dweights = every.gather(0, (places.clamp(min=0) // k).long()[None])[0]
        return None, None, None, None, dy, dweights
