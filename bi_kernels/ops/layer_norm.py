"""LayerNorm (Ba, Kiros and Hinton, 2016): y = x̂ · weight + bias, x̂ = (x − mean(x)) · rstd, in fp32, rounded once.

rstd = 1 / √(mean((x − mean(x))²) + eps). As in norm.py, a row's sums are fixed trees, by its width alone. With
g = dy·weight, dx = rstd (g − mean(g) − x̂ · mean(g·x̂)). dweight = Σ dy·x̂ and dbias = Σ dy: a partial sum of each slab of
16 tokens, folded from left to right in the order of the token layout, on from `main_grad` where there is one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import aligned, check, once
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.op import Op, writes
from bi_kernels.ops.fold import fold_partials
from bi_kernels.ops.norm import blocks_of, check_features, check_row, load_features, stages_of
from bi_kernels.scalars import check_flag
from bi_kernels.tokens import SLAB, gradient_of, layout_of, training_arguments


@jit(do_not_specialize=["rows"])
def _layer_norm_kernel(
    x, weight, bias, y, mean, rstd, eps, rows, width, count, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_H)
    at = row[:, None] * width + col[None, :]
    inside = (row < rows)[:, None] & (col < width)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    center = tl.div_rn(tl.sum(value, 1), count)
    value = tl.where(inside, value - center[:, None], 0.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(value * value, 1), count) + eps))
    if mean is not None:
        tl.store(mean + row, center, mask=row < rows)
        tl.store(rstd + row, scale, mask=row < rows)
    z = value * scale[:, None]
    if weight is not None:
        z *= load_features(weight, col, width, 0.0)[None, :]
    if bias is not None:
        z += load_features(bias, col, width, 0.0)[None, :]
    tl.store(y + at, z.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["tokens"])
def _layer_norm_backward_kernel(
    x,
    weight,
    mean,
    rstd,
    dy,
    slots,
    dx,
    of_weight,
    of_bias,
    tokens,
    width,
    count,
    HEADS: tl.constexpr,
    SLAB: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One slab of 16 tokens, each of HEADS rows: their dx, and the slab's partial sums of dweight and dbias."""
    slab = tl.program_id(0)
    col = tl.arange(0, BLOCK_H)
    if weight is not None:
        w = load_features(weight, col, width, 0.0)
    dw = tl.zeros((BLOCK_R, BLOCK_H), dtype=tl.float32)
    db = tl.zeros((BLOCK_R, BLOCK_H), dtype=tl.float32)
    for first in tl.range(0, SLAB * HEADS, BLOCK_R, num_stages=STAGES):
        at_row = first + tl.arange(0, BLOCK_R)
        token = slab * SLAB + at_row // HEADS
        if slots is None:
            token = tl.where((at_row < SLAB * HEADS) & (token < tokens), token, -1)
        else:
            token = tl.load(slots + token, mask=at_row < SLAB * HEADS, other=-1)
        row = token.to(tl.int64) * HEADS + at_row % HEADS
        at = row[:, None] * width + col[None, :]
        inside = (token >= 0)[:, None] & (col < width)[None, :]
        center = tl.load(mean + row, mask=token >= 0, other=0.0)[:, None]
        scale = tl.load(rstd + row, mask=token >= 0, other=0.0)[:, None]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.where(inside, value - center, 0.0) * scale
        upstream = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if dx is not None:
            weighted = upstream
            if weight is not None:
                weighted = upstream * w[None, :]
            along = tl.div_rn(tl.sum(weighted * normed, 1), count)
            shift = tl.div_rn(tl.sum(weighted, 1), count)
            z = scale * (weighted - shift[:, None] - normed * along[:, None])
            tl.store(dx + at, z.to(dx.dtype.element_ty), mask=inside)
        if of_weight is not None:
            dw += upstream * normed
        if of_bias is not None:
            db += upstream
    at = slab.to(tl.int64) * width + col
    if of_weight is not None:
        tl.store(of_weight + at, tl.sum(dw, 0), mask=col < width)
    if of_bias is not None:
        tl.store(of_bias + at, tl.sum(db, 0), mask=col < width)


@cached
def _launch_for(rows: int, width: int, device: int) -> Launch:
    blocks = blocks_of(width)
    grid, sizes = (triton.cdiv(rows, blocks["BLOCK_R"]),), (rows, width, float(width))
    return Launch(_layer_norm_kernel, device, grid, *sizes, enable_fp_fusion=False, **blocks)


def _forward(
    x, weight, bias, eps: float, trains: bool = False, heads: int = 1, layout=None, of_weight=None, of_bias=None
) -> list[Tensor]:
    """Returns y, and with `trains` mean and rstd of every row; what follows is for the backward."""
    x, weight, bias = (None if t is None else aligned(t) for t in (x, weight, bias))
    width, y = x.shape[-1], torch.empty_like(x)
    rows = x.numel() // width
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) if trains else None for _ in range(2))
    if rows:
        _launch_for(rows, width, x.get_device())(x, weight, bias, y, mean, rstd, eps)
    return [y, mean, rstd] if trains else [y]


def _fake(x, weight, bias, eps, trains, heads, layout, of_weight, of_bias):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [y, *[x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32) for _ in range(2 * trains)]]


@writes("dx", "dw", "db")
def _gradient(x, weight, mean, rstd, dy, layout, heads: int, dx, dw, db, continues_w: bool, continues_b: bool) -> None:
    """Writes dx, dweight and dbias, each where it is given; a parameter's goes on from what is there if it
    `continues`."""
    layout, width = layout_of(layout), x.shape[-1]
    slabs = len(layout.slots) // SLAB if heads else 0
    if dx is not None and layout.padding:
        dx.zero_()
    x, dy, weight = aligned(x), aligned(dy), None if weight is None else aligned(weight)
    of_weight, of_bias = (None if t is None else x.new_empty(slabs, width, dtype=torch.float32) for t in (dw, db))
    if slabs:
        blocks, tokens = blocks_of(width), x.numel() // (width * heads)
        slots = None if layout.identity else layout.slots_on(x.device)
        _layer_norm_backward_kernel[(slabs,)](
            x,
            weight,
            mean,
            rstd,
            dy,
            slots,
            dx,
            of_weight,
            of_bias,
            tokens,
            width,
            float(width),
            HEADS=heads,
            SLAB=SLAB,
            STAGES=stages_of(blocks, x, dy),
            enable_fp_fusion=False,
            **blocks,
        )
    for partial, out, continues in ((of_weight, dw, continues_w), (of_bias, db, continues_b)):
        if out is not None:
            fold_partials(partial, out if continues else None, out)


def _save(ctx, inputs, outputs):
    x, weight, bias, _, _, ctx.heads, ctx.layout, *ctx.buffers = inputs
    _, mean, rstd = outputs
    ctx.parameters = weight, bias  # a saved tensor may come back without main_grad, as under checkpointing
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


def _backward(ctx, dy, *_):
    x, weight, mean, rstd = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    (dw, goes_on_w), (db, goes_on_b) = (
        gradient_of("layer_norm", parameter, name, buffer) if needed else (None, False)
        for parameter, name, buffer, needed in zip(
            ctx.parameters, ("weight", "bias"), ctx.buffers, (needs_weight, needs_bias)
        )
    )
    _gradient(x, weight, mean, rstd, dy, ctx.layout, ctx.heads, dx, dw, db, goes_on_w, goes_on_b)
    return dx, None if goes_on_w else dw, None if goes_on_b else db, *[None] * 6


_layer_norm = Op("layer_norm", _forward, _backward, _fake, _save)


@once
def _checked(x, weight, bias, eps, heads) -> float:
    """Returns eps, a float."""
    check("layer_norm", x=x)
    eps = check_row("layer_norm", x, eps, check_flag("layer_norm", "heads", heads))
    check_features("layer_norm", "weight", weight, x)
    check_features("layer_norm", "bias", bias, x)
    return eps


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, heads: bool = False
) -> Tensor:
    """(x − mean(x)) / √(var(x) + eps) · weight + bias over the last dimension, in fp32, rounded once to x's dtype.

    x (..., hidden); weight and bias (hidden,), each in the dtype of x or in fp32, or None. heads: x is (..., length,
    heads, head_dim), as queries are, and a token has several rows. Raises TypeError for other dtypes, ValueError for
    other shapes.
    """
    eps = _checked(x, weight, bias, eps, heads)

    def training() -> tuple:
        told = training_arguments("layer_norm", x, 1 + heads, weight=weight, bias=bias)
        return True, x.shape[-2] if heads else 1, *told

    return _layer_norm(x, weight, bias, eps, training=training)[0]
