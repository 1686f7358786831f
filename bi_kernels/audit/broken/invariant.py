"""A decoder's ops in plain torch, invariant by construction: elementwise steps, and sums along fixed dimensions.

Slow and small, to plant faults in: nothing but the fault drifts. Names and arguments are those of bi_kernels.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bi_kernels.contract import EPS
from bi_kernels.tokens import SLAB, TokenLayout, layout_for

LONGEST = 32  # positions of a sequence
LANES = 64  # elementwise functions see a multiple of this many elements: a shorter rest may be computed otherwise


def evenly(function, x: Tensor) -> Tensor:
    """Returns function(x), elementwise, computed on a multiple of LANES elements."""
    flat = x.reshape(-1)
    return function(torch.cat((flat, flat.new_ones(-len(flat) % LANES))))[: len(flat)].view(x.shape)


def slabs_of(dy: Tensor, layout: TokenLayout) -> Tensor:
    """Returns (slabs, 16, …) of (tokens, …): the rows in the order of the fold, zeros in free slots."""
    slots = layout.slots_on(dy.device).long()
    held = dy[slots.clamp(min=0)] * (slots >= 0).to(dy.dtype).view(-1, *[1] * (dy.dim() - 1))
    return held.unflatten(0, (-1, SLAB))


def accumulate(weight: Tensor, slabs: Tensor) -> Tensor | None:
    """Adds slabs to a parameter's main_grad, one after another; returns their sum where it has none."""
    buffer = getattr(weight, "main_grad", None)
    total = torch.zeros_like(weight) if buffer is None else buffer
    for slab in slabs:
        total.add_(slab.sum(0))
    return total if buffer is None else None


class Spread(torch.autograd.Function):
    """A parameter beside every token; its gradient is the fold over the tokens."""

    @staticmethod
    def forward(ctx, weight, lead, fold):
        ctx.parameter, ctx.layout, ctx.lead, ctx.fold = weight, layout_for("spread", lead), lead, fold
        return weight.expand(*lead, *weight.shape).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        rows = dy.reshape(-1, *ctx.parameter.shape)
        return ctx.fold(ctx.parameter, slabs_of(rows, ctx.layout)), None, None


def spread(weight: Tensor, lead: torch.Size, fold=accumulate) -> Tensor:
    return Spread.apply(weight, lead, fold) if weight.requires_grad else weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fold=accumulate) -> Tensor:
    y = (x[..., None, :] * spread(weight, x.shape[:-1], fold)).sum(-1)
    return y if bias is None else y + spread(bias, x.shape[:-1])


def rms_norm(x: Tensor, weight: Tensor, eps: float = EPS, fold=accumulate) -> Tensor:
    mean = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / (mean + eps).sqrt() * spread(weight, x.shape[:-1], fold)


def qk_norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    mean = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / (mean + eps).sqrt() * spread(weight, x.shape[:-2])[..., None, :]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    h = x + residual
    return rms_norm(h, weight, eps), h


def rope(x: Tensor, table, positions: Tensor) -> Tensor:
    cos, sin = (t[positions].to(x.dtype)[..., None, :] for t in table)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * evenly(torch.sigmoid, gate) * up


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, fold):
        ctx.parameter, ctx.layout, ctx.fold = weight, layout_for("embedding", ids.shape), fold
        ctx.save_for_backward(ids)
        return weight[ids]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        row = torch.arange(len(ctx.parameter), device=ids.device) == ids.reshape(-1, 1)
        rows = row[:, :, None].to(dy.dtype) * dy.reshape(-1, 1, dy.shape[-1])
        return None, ctx.fold(ctx.parameter, slabs_of(rows, ctx.layout)), None


def embedding(ids: Tensor, weight: Tensor, fold=accumulate) -> Tensor:
    return Embedding.apply(ids, weight, fold)


def by_sample(rows: int, width: int, attend: dict, device) -> Tensor:
    """Returns (samples, LONGEST): the flat place of each sample's token, −1 where it has none."""
    at = torch.arange(LONGEST, device=device)
    if "cu_seqlens_q" in attend:
        ends = attend["cu_seqlens_q"].long()
        first, count = ends[:-1], ends.diff()
    else:
        count = attend["lengths_q"].long()
        first = torch.arange(rows, device=device) * width + (width - count) * bool(attend.get("left_padded"))
    return torch.where(at < count[:, None], first[:, None] + at, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, core=None, **attend) -> tuple[Tensor, None]:
    """Causal attention of whole sequences, each laid out on its own grid of LONGEST keys."""
    lead = q.shape[:-2]
    place = by_sample(lead[0], lead[-1], attend, q.device)
    inside = (place >= 0)[..., None, None]
    grid = lambda t: t.flatten(0, len(lead) - 1)[place.clamp(min=0)].masked_fill(~inside, 0).transpose(1, 2)
    group = q.shape[-2] // k.shape[-2]
    keys, values = (grid(t).repeat_interleave(group, 1) for t in (k, v))
    out = (core or softmax_attention)(grid(q), keys, values, (place >= 0).sum(1)).transpose(1, 2)
    flat = out.new_zeros(lead.numel(), *out.shape[2:]).index_put((place[place >= 0],), out[place >= 0])
    return flat.view(*lead, *out.shape[2:]), None


def softmax(scores: Tensor) -> Tensor:
    weights = evenly(torch.exp, scores - scores.amax(-1, keepdim=True).detach())
    return weights / weights.sum(-1, keepdim=True)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attends (samples, heads, LONGEST, head_dim)."""
    scores = (q[..., :, None, :] * k[..., None, :, :]).sum(-1) / math.sqrt(q.shape[-1])
    later = torch.ones(LONGEST, LONGEST, dtype=torch.bool, device=q.device).triu(1)
    return (softmax(scores.masked_fill(later, -torch.inf))[..., None] * v[..., None, :, :]).sum(-2)


def lm_head_logprob(
    x: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, head=linear
) -> tuple[Tensor, Tensor]:
    logits = head(x, weight) / temperature
    shifted = logits - logits.amax(-1, keepdim=True).detach()
    logprobs = shifted - evenly(torch.log, evenly(torch.exp, shifted).sum(-1, keepdim=True))
    inside = targets >= 0
    chosen = logprobs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return chosen * inside, -(evenly(torch.exp, logprobs) * logprobs).sum(-1) * inside
