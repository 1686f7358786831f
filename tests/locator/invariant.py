"""A decoder's ops in plain torch, invariant by construction: elementwise steps, and sums in a fixed order.

Slow and small, to plant faults in: nothing but the fault drifts, on the CPU and on a GPU. `total` is the only sum and
`along` the only broadcast of what has a gradient, for torch's own sums choose their order by the size of the call.
Names and arguments are those of bi_kernels.
"""

import math
from collections.abc import Callable

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


@torch.library.custom_op("bi_kernels_audit::total", mutates_args=())
def total(t: Tensor, dim: int) -> Tensor:
    """Returns the sum along a dimension: the second half is added to the first until one element is left."""
    left = t.clone()
    while (count := left.shape[dim]) > 1:
        kept = (count + 1) // 2
        left.narrow(dim, 0, count - kept).add_(left.narrow(dim, kept, count - kept))
        left = left.narrow(dim, 0, kept)
    return left.squeeze(dim).clone()


def _keep_size(ctx, inputs, output):
    ctx.dim, ctx.count = inputs[1], inputs[0].shape[inputs[1]]


def repeated(x: Tensor, dim: int, count: int) -> Tensor:
    """Returns x along one more dimension."""
    at = dim % (x.dim() + 1)
    return x.unsqueeze(dim).expand(*x.shape[:at], count, *x.shape[at:])


total.register_autograd(lambda ctx, dy: (repeated(dy, ctx.dim, ctx.count), None), setup_context=_keep_size)


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, *tensors):
        ctx.gradients = backward
        ctx.save_for_backward(*tensors)
        return forward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        found = ctx.gradients(dy, *ctx.saved_tensors)
        return None, None, *(found if isinstance(found, tuple) else [found])


def custom(forward: Callable, backward: Callable, *tensors: Tensor) -> Tensor:
    """Returns forward(*tensors), whose gradients are backward(dy, *tensors)."""
    return Custom.apply(forward, backward, *tensors)


def along(x: Tensor, dim: int, count: int) -> Tensor:
    """Repeats x along a new dimension; the gradient is the total."""
    return custom(lambda x: repeated(x, dim, count), lambda dy, x: total(dy, dim), x)


def slabs_of(dy: Tensor, layout: TokenLayout) -> Tensor:
    """Returns (slabs, 16, …) of (tokens, …): the rows in the order of the fold, zeros in free slots."""
    slots = layout.slots_on(dy.device).long()
    held = dy[slots.clamp(min=0)] * (slots >= 0).to(dy.dtype).view(-1, *[1] * (dy.dim() - 1))
    return held.unflatten(0, (-1, SLAB))


def accumulate(weight: Tensor, slabs: Tensor) -> Tensor | None:
    """Adds slabs to a parameter's main_grad, one after another; returns their sum where it has none."""
    buffer = getattr(weight, "main_grad", None)
    summed = torch.zeros_like(weight) if buffer is None else buffer
    for slab in slabs:
        summed.add_(total(slab, 0))
    return summed if buffer is None else None


def spread(weight: Tensor, lead: torch.Size, fold=accumulate) -> Tensor:
    """Returns a parameter beside every token; its gradient is the fold over the tokens."""
    if not weight.requires_grad:
        return weight
    layout = layout_for("spread", lead)
    gradient = lambda dy, _: fold(weight, slabs_of(dy.reshape(-1, *weight.shape), layout))
    return custom(lambda w: w.expand(*lead, *w.shape).contiguous(), gradient, weight)


def terms(x: Tensor, weight: Tensor, fold=accumulate) -> Tensor:
    """Returns (…, out, in), whose total over `in` is a linear layer's output."""
    return along(x, -2, len(weight)) * spread(weight, x.shape[:-1], fold)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fold=accumulate) -> Tensor:
    y = total(terms(x, weight, fold), -1)
    return y if bias is None else y + spread(bias, x.shape[:-1])


def normed(x: Tensor, eps: float) -> Tensor:
    count = x.shape[-1]
    return x / along((total(x * x, -1) / count + eps).sqrt(), -1, count)


def rms_norm(x: Tensor, weight: Tensor, eps: float = EPS, fold=accumulate) -> Tensor:
    return normed(x, eps) * spread(weight, x.shape[:-1], fold)


def qk_norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return normed(x, eps) * along(spread(weight, x.shape[:-2]), -2, x.shape[-2])


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    h = x + residual
    return rms_norm(h, weight, eps), h


def rope(x: Tensor, table, positions: Tensor) -> Tensor:
    cos, sin = (t[positions].to(x.dtype)[..., None, :] for t in table)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * evenly(torch.sigmoid, gate) * up


def embedding(ids: Tensor, weight: Tensor, fold=accumulate) -> Tensor:
    layout = layout_for("embedding", ids.shape)

    def gradient(dy: Tensor, _) -> Tensor | None:
        row = torch.arange(len(weight), device=ids.device) == ids.reshape(-1, 1)
        return fold(weight, slabs_of(row[:, :, None].to(dy.dtype) * dy.reshape(-1, 1, dy.shape[-1]), layout))

    return custom(lambda w: w[ids], gradient, weight)


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


def lay(flat: Tensor, place: Tensor) -> Tensor:
    """Returns the rows of `flat` in the places of a grid, zeros where it has none."""
    inside = (place >= 0).view(*place.shape, *[1] * (flat.dim() - 1))
    return flat[place.clamp(min=0)].masked_fill(~inside, 0)


def collect(grid: Tensor, place: Tensor, count: int) -> Tensor:
    """Returns `count` rows from the places of a grid, zeros for those that it lacks."""
    inside = place >= 0
    return grid.new_zeros(count, *grid.shape[2:]).index_put((place[inside],), grid[inside])


def every_head(t: Tensor, heads: int) -> Tensor:
    """Returns (samples, heads, LONGEST, head_dim) of as many heads as keys have."""
    return along(t, 2, heads // t.shape[1]).flatten(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, core=None, **attend) -> tuple[Tensor, None]:
    """Causal attention of whole sequences, each laid out on its own grid of LONGEST keys."""
    lead, heads = q.shape[:-2], q.shape[-2]
    place = by_sample(lead[0], lead[-1], attend, q.device)
    to_grid, to_rows = (lambda t, _=None: lay(t, place)), (lambda t, _=None: collect(t, place, lead.numel()))
    grid = lambda t: custom(to_grid, to_rows, t.flatten(0, len(lead) - 1)).transpose(1, 2)
    keys, values = (every_head(grid(t), heads) for t in (k, v))
    out = (core or softmax_attention)(grid(q), keys, values, (place >= 0).sum(1)).transpose(1, 2)
    return custom(to_rows, to_grid, out).view(*lead, *out.shape[2:]), None


def products(q: Tensor, k: Tensor) -> Tensor:
    """Returns the causal scores (samples, heads, LONGEST, LONGEST)."""
    length = q.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = total(along(q, -2, length) * along(k, -3, length), -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(later, -torch.inf)


def exponentials(scores: Tensor) -> Tensor:
    return evenly(torch.exp, scores - scores.amax(-1, keepdim=True).detach())


def softmax(scores: Tensor) -> Tensor:
    weights = exponentials(scores)
    return weights / along(total(weights, -1), -1, weights.shape[-1])


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """Returns (samples, heads, queries, keys, head_dim), whose total over the keys is the attention's output."""
    return along(weights, -1, v.shape[-1]) * along(v, -3, weights.shape[-2])


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attends (samples, heads, LONGEST, head_dim)."""
    return total(weighted(softmax(products(q, k)), v), -2)


def lm_head_logprob(
    x: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, head=linear
) -> tuple[Tensor, Tensor]:
    logits = head(x, weight) / temperature
    shifted = logits - logits.amax(-1, keepdim=True).detach()
    logprobs = shifted - along(evenly(torch.log, total(evenly(torch.exp, shifted), -1)), -1, len(weight))
    target = torch.arange(len(weight), device=x.device) == targets[..., None]
    inside = targets >= 0
    return total(logprobs * target, -1), -total(evenly(torch.exp, logprobs) * logprobs, -1) * inside
