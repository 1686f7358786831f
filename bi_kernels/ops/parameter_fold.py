"""Products and sums with a parameter, elementwise: PyTorch's bits forward, the parameter's gradient folded over tokens.

y = x · weight or x + weight, and dx, are what PyTorch gives. A token's part of dweight is dy · x, or dy, in fp32,
summed first over the features that share a number of the weight, in the order of ops/rows.py. Then each slab of 16
tokens is added token by token, and the slabs' sums from left to right in the order of the token layout, on from
`main_grad` where the weight has one. No order hangs on a tile, so the tile is free.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import aligned, check, once
from bi_kernels.contract import check_dtype
from bi_kernels.launch import jit
from bi_kernels.op import Op, writes
from bi_kernels.ops.fold import fold_partials
from bi_kernels.ops.rows import row_sums
from bi_kernels.scalars import check_integer
from bi_kernels.tokens import SLAB, TokenLayout, gradient_of, layout_of, training_arguments

COLUMNS, WARPS = 512, 4  # of a program


@jit(do_not_specialize=["tokens"])
def _slab_sums_kernel(g, factor, slots, partial, tokens, width, SLAB: tl.constexpr, BLOCK: tl.constexpr):
    """Σ g, or Σ g · factor, over the 16 tokens of a slab, from the first to the last."""
    slab, col = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(SLAB):
        row = slab * SLAB + i
        if slots is None:
            row = tl.where(row < tokens, row, -1)
        else:
            row = tl.load(slots + row)
        at, inside = row.to(tl.int64) * width + col, (col < width) & (row >= 0)
        value = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        if factor is not None:
            value *= tl.load(factor + at, mask=inside, other=0.0).to(tl.float32)
        total += value
    tl.store(partial + slab.to(tl.int64) * width + col, total, mask=col < width)


def _summed(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns (tokens, numbers of the weight): what a token has of `t` (tokens, features …), fp32, summed over the
    features over which a weight of this shape is broadcast."""
    kept = [1 + i for i, n in enumerate(shape) if n != 1]
    shared = [1 + i for i, n in enumerate(shape) if n == 1]
    own, count = (torch.Size([t.shape[i] for i in dims]).numel() for dims in (kept, shared))
    rows = t.permute(0, *kept, *shared).reshape(len(t) * own, count)
    return row_sums(rows, 1.0, torch.float32).view(len(t), own)


@writes("out")
def _fold(g, factor, layout, out, continues: bool) -> None:
    """out = Σ_t g[t] · factor[t], over tokens in the layout's order, on from what is there if it `continues`."""
    layout, features = layout_of(layout), g.shape[1:]
    shape = (*[1] * (len(features) - out.dim()), *out.shape[max(out.dim() - len(features), 0) :])
    if shape != tuple(features):
        g, factor = _summed(g.float() if factor is None else g.float() * factor.float(), shape), None
    width, slabs = out.numel(), len(layout.slots) // SLAB
    g, factor = (None if t is None else aligned(t.reshape(len(t), width)) for t in (g, factor))
    partial = g.new_empty(slabs, width, dtype=torch.float32)
    if width and slabs:
        slots = None if layout.identity else layout.slots_on(g.device)
        block = min(COLUMNS, triton.next_power_of_2(width))
        given = g, factor, slots, partial, len(g), width
        _slab_sums_kernel[slabs, triton.cdiv(width, block)](
            *given, SLAB=SLAB, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False
        )
    if width:
        flat = out.view(-1)
        fold_partials(partial, flat if continues else None, flat)


def fold_elementwise(
    op: str,
    g: Tensor,
    weight: Tensor,
    layout: TokenLayout,
    buffer: Tensor | None = None,
    name: str = "weight",
    factor: Tensor | None = None,
) -> Tensor | None:
    """Folds what each token adds to the gradient of a weight that its features are multiplied with, or added to.

    g (tokens, features …): the part of each feature, in any dtype; with `factor`, of the same shape, it is their
    product in fp32. weight: broadcast to the features. Writes into weight.main_grad and returns None, or returns the
    gradient in weight's dtype where there is none. layout, buffer: as `tokens.training_arguments` returns them.
    """
    out, continues = gradient_of(op, weight, name, buffer)
    _fold(g, factor, layout, out, continues)
    return None if continues else out


def _launch(op: str, x, weight, features: int, layout=None, buffer=None) -> Tensor:
    """features: dimensions of x that a token has; layout, buffer: for the backward."""
    return x * weight if op == "scaled" else x + weight


def _fake(op, x, weight, features, layout, buffer):
    return _launch(op, x, weight, features)


def _save(ctx, inputs, y):
    ctx.op, x, weight, ctx.features, ctx.layout, ctx.buffer = inputs
    ctx.dtype, ctx.parameter = x.dtype, weight  # a saved tensor may come back without main_grad, as under checkpointing
    ctx.save_for_backward(*((x, weight) if ctx.op == "scaled" else ()))


def _backward(ctx, dy):
    x, weight = ctx.saved_tensors or (None, None)
    needs_x, needs_weight = ctx.needs_input_grad[1:3]
    dx = (dy if weight is None else dy * weight).to(ctx.dtype) if needs_x else None
    of_tokens = lambda t: t.reshape(t.shape[: t.dim() - ctx.features].numel(), *t.shape[t.dim() - ctx.features :])
    dw = None
    if needs_weight:
        factor = None if x is None else of_tokens(x)
        dw = fold_elementwise(ctx.op, of_tokens(dy), ctx.parameter, ctx.layout, ctx.buffer, factor=factor)
    return None, dx, dw, None, None, None


_with_parameter = Op("with_parameter", _launch, _backward, _fake, _save)


@once
def _checked(op: str, x: Tensor, weight: Tensor, features: int | None) -> int:
    """Returns how many of x's dimensions are features."""
    check(op, same_dtype=False, x=x, weight=weight)
    check_dtype(op, "x", x)
    check_dtype(op, "weight", weight)
    shape = tuple(weight.shape)
    if weight.dim() > x.dim() or any(w not in (1, n) for w, n in zip(shape[::-1], tuple(x.shape)[::-1])):
        raise ValueError(f"{op}: weight has shape {shape}, which does not broadcast to x's {tuple(x.shape)}")
    while shape and shape[0] == 1:
        shape = shape[1:]
    least = max(1, len(shape))
    if features is None:
        features = min(least, x.dim())
    if not min(least, x.dim()) <= check_integer(op, "features", features) <= x.dim():
        raise ValueError(
            f"{op}: features is {features}, expected {least} to {x.dim()}, the dimensions of x that a token has"
        )
    return features


def _apply(op: str, x: Tensor, weight: Tensor, features: int | None) -> Tensor:
    features = _checked(op, x, weight, features)
    return _with_parameter(op, x, weight, features, training=lambda: training_arguments(op, x, features, weight=weight))


def scaled(x: Tensor, weight: Tensor, features: int | None = None) -> Tensor:
    """x * weight, PyTorch's bits; the gradient of weight is folded over tokens in the layout's order.

    x (..., features), weight of any shape that broadcasts to x's last dimensions, as (features,), (heads, 1) or ().
    features: how many dimensions of x a token has; those of weight unless given, at least one. Raises TypeError for a
    dtype other than bf16, fp16 and fp32, ValueError for a weight that does not broadcast.
    """
    return _apply("scaled", x, weight, features)


def shifted(x: Tensor, weight: Tensor, features: int | None = None) -> Tensor:
    """x + weight, PyTorch's bits; otherwise as `scaled`."""
    return _apply("shifted", x, weight, features)
