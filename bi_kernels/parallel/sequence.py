"""Sequence parallelism: norms and residuals of this rank's tokens alone, where gradients are wanted.

Tokens are cut between slabs (tokens.py), so that one rank has all of a slab's partial sum of a norm's gradient. The
partial sums of all ranks are gathered and folded in the order of the layout. The input of a product is gathered.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bi_kernels.checks import aligned
from bi_kernels.ops import norm
from bi_kernels.ops.fold import fold_partials
from bi_kernels.parallel.exchange import Mapped, gather_tokens, rank_and_world_size, shard_tokens
from bi_kernels.tokens import SLAB, TokenLayout, gradient_of, layout_for, main_grad


class Plan(NamedTuple):
    """The tokens and slabs of a layout that each rank has."""

    tokens: list[slice]
    slabs: list[slice]  # where the gathered partial sums of each rank lie
    slots: Tensor  # of this rank's slabs: the row among its own, −1 for none
    order: Tensor | None  # of the layout's slabs among those gathered; None: as they are
    padding: bool


class LocalShard(NamedTuple):
    """This rank's tokens (its tokens, hidden) of a tensor (*lead, hidden)."""

    mine: Tensor
    lead: torch.Size
    plan: Plan


@lru_cache(maxsize=16)
def plan_of(layout: TokenLayout, group: dist.ProcessGroup, device: torch.device) -> Plan:
    """Shares a layout's tokens among ranks, as evenly as cuts between slabs allow."""
    rank, ranks = rank_and_world_size(group)
    slabs = layout.slots.view(-1, SLAB).long()
    first, order = slabs[:, 0].sort()
    ends = first + (slabs >= 0).sum(1)[order]
    cuts = [0]
    for r in range(1, ranks):
        cut = r * layout.rows // ranks
        at = int(torch.searchsorted(first, cut, right=True)) - 1
        cuts.append(int(first[at]) if at >= 0 and cut < ends[at] else cut)
    tokens = [slice(*pair) for pair in zip(cuts, [*cuts[1:], layout.rows])]
    places = torch.searchsorted(first, torch.tensor([*cuts, layout.rows])).tolist()
    held = [slice(*pair) for pair in zip(places, places[1:])]
    mine = slabs[order[held[rank]]]
    slots = (mine - cuts[rank]).masked_fill_(mine < 0, -1).flatten().int()
    back = order.argsort()
    identity = back.equal(torch.arange(len(back)))
    there = lambda t: t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t  # waits for nothing
    return Plan(tokens, held, there(slots), None if identity else there(back), layout.padding)


class _Norm(torch.autograd.Function):
    """RMSNorm of this rank's tokens, after a residual addition if a residual is given."""

    @staticmethod
    def forward(ctx, op, group, plan, x, residual, weight, eps):
        if weight.requires_grad:
            main_grad(op, weight)
        y, *h, rstd = norm.norm_forward(x, residual, weight, eps, 0.0, trains=True)
        ctx.op, ctx.group, ctx.plan, ctx.parameter = op, group, plan, weight
        ctx.save_for_backward(h[0] if h else aligned(x), weight, rstd)
        return (y, *h) if h else y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh=None):
        (x, weight, rstd), plan = ctx.saved_tensors, ctx.plan
        needs_x, needs_residual, needs_weight = ctx.needs_input_grad[3:6]
        dx, dw = None, None
        if needs_x or needs_residual:
            dx = torch.zeros_like(x) if plan.padding else torch.empty_like(x)
        count = len(plan.slots) // SLAB
        partial = norm.slab_sums(x, weight, rstd, dy, dh, plan.slots, count, 1, dx, needs_weight, 0.0)
        if needs_weight:
            every = gather_tokens(partial, plan.slabs, ctx.group)
            every = every if plan.order is None else every[plan.order]
            dw, continues = gradient_of(ctx.op, ctx.parameter)
            fold_partials(every, dw if continues else None, dw)
            dw = None if continues else dw
        return None, None, None, dx if needs_x else None, dx if needs_residual else None, dw, None


def normed(op: str, group: dist.ProcessGroup, x: LocalShard, residual: LocalShard | None, weight: Tensor, eps: float):
    """Returns rms_norm, or add_rms_norm if a residual is given, of this rank's tokens."""
    found = _Norm.apply(op, group, x.plan, x.mine, None if residual is None else residual.mine, weight, eps)
    return x._replace(mine=found) if residual is None else tuple(x._replace(mine=t) for t in found)


def local_shard(x: Tensor, group: dist.ProcessGroup) -> LocalShard:
    """Returns this rank's tokens of x (…, hidden), which every rank has whole."""
    lead = x.shape[:-1]
    plan = plan_of(layout_for("sequence parallelism", lead), group, x.device)
    return LocalShard(shard_tokens(x.reshape(-1, x.shape[-1]), plan.tokens, group), lead, plan)


def all_tokens(x: LocalShard, group: dist.ProcessGroup) -> Tensor:
    """Returns the tokens of all ranks, (…, hidden)."""
    cuts = x.plan.tokens
    own = cuts[rank_and_world_size(group)[0]]
    return Mapped.apply(x.mine, lambda mine: gather_tokens(mine, cuts, group), lambda dy: dy[own]).view(*x.lead, -1)
