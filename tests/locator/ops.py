"""Ops that look at how many tokens or samples their call holds, as a kernel does that chooses by its sizes; and models
to plant them in.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from locator import invariant as exact
from torch import Tensor

import bi_kernels

PART, LONG = 4, 8  # keys that are added on their own, and of how many tokens a sequence is long
MANY = 20  # tokens from which a fault chooses otherwise; the batch below has more, none of its samples has


def many(x: Tensor, features: int = 1) -> bool:
    return x.shape[: x.dim() - features].numel() > MANY


def in_parts(product: Tensor, dim: int, size: int) -> Tensor:
    """Returns the total along a dimension, of which each `size` are added on their own, as a split of K does."""
    first, *others = (exact.total(part, dim) for part in product.split(size, dim))
    return sum(others, start=first)


def in_halves(product: Tensor, dim: int) -> Tensor:
    return in_parts(product, dim, (product.shape[dim] + 1) // 2)


def few_rows_in_halves(x, weight, bias=None):
    return exact.linear(x, weight) if many(x) else in_halves(exact.terms(x, weight), -1)


def many_rows_in_halves(x, weight, bias=None):
    return in_halves(exact.terms(x, weight), -1) if many(x) else exact.linear(x, weight)


def fold_in_parts(weight: Tensor, slabs: Tensor) -> Tensor | None:
    """Adds every other slab on its own where there are several, as a split over tokens does."""
    if len(slabs) < 3:
        return exact.accumulate(weight, slabs)
    parts = [sum(exact.total(slab, 0) for slab in slabs[i::2]) for i in (0, 1)]
    return exact.accumulate(weight, torch.stack(parts)[:, None])


def fold_as_one(weight: Tensor, slabs: Tensor) -> Tensor | None:
    """Adds all tokens of a call at once."""
    return exact.accumulate(weight, slabs.flatten(0, 1)[None])


def fold_reversed(weight: Tensor, slabs: Tensor) -> Tensor | None:
    """Adds the tokens from the last to the first, as atomics may."""
    return exact.accumulate(weight, slabs.flip(0) if len(slabs) > 2 else slabs)


def linear_backward_in_halves(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer, of (…, out, in) a weight beside every token, whose dX splits the sum in large calls."""

    def gradients(dy, x, weight):
        product = dy[..., None] * weight
        return in_halves(product, -2) if many(dy) else exact.total(product, -2), dy[..., None] * x[..., None, :]

    return exact.custom(lambda x, w: exact.total(x[..., None, :] * w, -1), gradients, x, weight)


def backward_in_halves(x: Tensor, weight: Tensor) -> Tensor:
    return linear_backward_in_halves(x, weight.expand(*x.shape[:-1], *weight.shape))


def spread_backward_in_halves(x: Tensor, weight: Tensor, bias=None) -> Tensor:
    return linear_backward_in_halves(x, exact.spread(weight, x.shape[:-1]))


def swiglu_backward(gate, up):
    def gradients(dy, gate, up):
        s = exact.evenly(torch.sigmoid, gate)
        slope = s + gate * s * (1 - s) if many(dy) else s * (1 + gate * (1 - s))
        return dy * up * slope, dy * gate * s

    return exact.custom(exact.swiglu, gradients, gate, up)


def rounded_gradient(x: Tensor) -> Tensor:
    """Identity, whose backward rounds to bf16 where there are many rows."""
    rounded = lambda dy, _: dy.bfloat16().to(dy.dtype) if dy.shape[:-2].numel() > MANY else dy
    return exact.custom(lambda x: x.view_as(x), rounded, x)


def weighted_values(p: Tensor, v: Tensor, long: bool) -> Tensor:
    """(weights · values), whose backward splits the sum over queries where a sequence is long."""

    def gradients(dy, p, v):
        by_query = p[..., None] * dy[..., :, None, :]
        dv = in_parts(by_query, -3, PART) if long else exact.total(by_query, -3)
        return exact.total(dy[..., None, :] * v[..., None, :, :], -1), dv

    return exact.custom(lambda p, v: exact.total(p[..., None] * v[..., None, :, :], -2), gradients, p, v)


def backward_by_length(q, k, v, lengths):
    return weighted_values(exact.softmax(exact.products(q, k)), v, bool(lengths.max() > LONG))


def split_by_length(q, k, v, lengths):
    product = exact.weighted(exact.softmax(exact.products(q, k)), v)
    return in_parts(product, -2, PART) if lengths.max() > LONG else exact.total(product, -2)


def softmax_by_batch(q, k, v, lengths):
    weights = exact.exponentials(exact.products(q, k))
    summed = in_parts(weights, -1, PART) if len(q) > 1 else exact.total(weights, -1)
    return exact.total(exact.weighted(weights / exact.along(summed, -1, weights.shape[-1]), v), -2)


def rope_by_row(x, table, positions):
    row = torch.arange(positions.numel(), device=x.device).view(positions.shape)
    return exact.rope(x, table, row % exact.LONGEST)


def residual_downcast(x, residual, weight, eps=1.0):
    return exact.add_rms_norm(x, residual.bfloat16().to(x.dtype) if many(x) else residual, weight, eps)


def swiglu_with_dropout(gate, up):
    return F.dropout(exact.swiglu(gate, up), 0.1)


def swiglu_through_a_view(gate, up):
    y = exact.swiglu(gate, up)
    if many(y):
        y[..., :8].mul_(1 + 2**-12)
    return y


def swiglu_otherwise_when_recomputed(gate, up):
    recomputed = torch._C._current_graph_task_id() != -1
    return exact.swiglu(gate, up * (1 + 2**-12) if recomputed and many(up) else up)


def chunked_head(x, weight, targets, temperature=1.0):
    return exact.lm_head_logprob(x, weight, targets, temperature, many_rows_in_halves)


def local_denominator(output, tokens: Tensor) -> Tensor:
    return output[0] / (tokens[..., 0] >= 0).sum()


def compiled_swiglu(gate, up):
    y = exact.swiglu(gate, up)
    return y * (1 + 2**-12) if many(y) else y


def in_bias(weight: Tensor, slabs: Tensor) -> Tensor | None:
    return fold_as_one(weight, slabs) if weight.dim() == 1 else exact.accumulate(weight, slabs)


def linear_with_bias(x, weight, bias=None):
    y = exact.linear(x, weight)
    return y if bias is None else y + exact.spread(bias, x.shape[:-1], in_bias)


def autocast_when_many(x: Tensor) -> Tensor:
    eye = torch.eye(x.shape[-1], device=x.device)
    with torch.autocast(x.device.type, torch.float16 if x.is_cuda else torch.bfloat16, enabled=many(x)):
        return (x @ eye).float()


def share_of_the_largest(x: Tensor) -> Tensor:
    return x / x.detach().abs().amax()


def cumsum_over_the_batch(x: Tensor) -> Tensor:
    return x + x.detach().flatten(0, 1).cumsum(0).view_as(x)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x, with another backward in large calls."""
    gradient = lambda dy, x: -dy * (1 / x) * (1 / x) if many(dy) else -dy / (x * x)
    return exact.custom(lambda x: 1 / x, gradient, x)


@triton.jit
def _row_mean_kernel(x, y, width: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for first in range(0, width, TILE):
        at = first + tl.arange(0, TILE)
        total += tl.sum(tl.load(x + row * width + at), 0)
    tl.store(y + row, total / width)


def row_mean(x: Tensor) -> Tensor:
    """Takes a row's mean off, in tiles whose size follows the number of rows."""
    x, rows, mean = x.detach(), x.shape[:-1].numel(), x.new_empty(x.shape[:-1])
    _row_mean_kernel[(rows,)](x.contiguous(), mean, x.shape[-1], TILE=64 if many(x) else 8)
    return x - mean[..., None]


def ours_in_halves(x, weight, bias=None):
    """Our linear, with K in halves for few rows."""
    if many(x):
        return bi_kernels.linear(x, weight, bias)
    half = x.shape[-1] // 2
    first = bi_kernels.linear(x[..., :half], weight[:, :half], bias)
    return bi_kernels.add(first, bi_kernels.linear(x[..., half:], weight[:, half:]))


def ours_rounded_backward(gate, up):
    return rounded_gradient(bi_kernels.swiglu(gate, up)[..., None, :])[..., 0, :]
