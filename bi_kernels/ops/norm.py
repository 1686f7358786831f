"""RMSNorm (Zhang and Sennrich, 2019), alone, over heads (QK-norm), and after a residual addition.

y = x · rstd · w, rstd = 1 / √(mean(x²) + eps), in fp32, rounded once; w is offset + weight (Gemma's offset is 1), or 1
without a weight. A row's sums are fixed trees: one block shape for a row width, whatever the number of rows.
dx = rstd (dy·w − x̂ · mean(dy·w·x̂)) with x̂ = x · rstd. dweight = Σ dy·x̂: each slab of 16 tokens is one partial sum, and
the partials are folded from left to right in the order of the token layout, on from `main_grad` where the weight has
one. Contraction is off. Triton compiles by the alignment of what it is given, and the layout of a sum follows: hence
what is not aligned is copied.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import aligned, check, check_shape, once
from bi_kernels.contract import check_dtype
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.op import Op, writes
from bi_kernels.ops.fold import fold_partials
from bi_kernels.scalars import check_fp32, check_number
from bi_kernels.tokens import SLAB, gradient_of, layout_of, training_arguments

# of a block, by the width of a row: (at most, elements, warps); fixed for a width, since a row's sum follows the layout
BLOCKS = ((1024, 2048, 4), (4096, 4096, 8), (32768, 0, 16))
WIDEST = BLOCKS[-1][0]  # a row is held in registers
STAGES = 4  # rounds of a backward whose rows are on their way, at most
SHARED = 160 * 1024  # bytes of shared memory that they may take


@triton.jit
def load_features(parameter, col, width, OFFSET: tl.constexpr):
    """OFFSET + a parameter of the features, fp32."""
    w = tl.load(parameter + col, mask=col < width, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        w += OFFSET
    return w


@jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    h,
    y,
    rstd,
    eps,
    rows,
    width,
    count,
    HAS_RESIDUAL: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_H)
    at = row[:, None] * width + col[None, :]
    inside = (row < rows)[:, None] & (col < width)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:  # the sum is rounded to the storage dtype, and that is what is normalised
        rounded = (value + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(h.dtype.element_ty)
        tl.store(h + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(value * value, 1), count) + eps))
    if rstd is not None:
        tl.store(rstd + row, scale, mask=row < rows)
    if weight is None:
        z = value * scale[:, None]
    else:
        w = load_features(weight, col, width, OFFSET)
        z = value * scale[:, None] * w[None, :]
    tl.store(y + at, z.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["tokens"])
def _rms_norm_backward_kernel(
    x,
    weight,
    rstd,
    dy,
    dh,
    slots,
    dx,
    partial,
    tokens,
    width,
    count,
    HEADS: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_DH: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    SLAB: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One slab of 16 tokens, each of HEADS rows: their dx, and the slab's partial sum of dweight."""
    slab = tl.program_id(0)
    col = tl.arange(0, BLOCK_H)
    if weight is not None:
        w = load_features(weight, col, width, OFFSET)
    total = tl.zeros((BLOCK_R, BLOCK_H), dtype=tl.float32)
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
        scale = tl.load(rstd + row, mask=token >= 0, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        upstream = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if NEEDS_DX:
            weighted = upstream
            if weight is not None:
                weighted = upstream * w[None, :]
            mean = tl.div_rn(tl.sum(weighted * normed, 1), count)
            z = scale * (weighted - normed * mean[:, None])
            if HAS_DH:
                z += tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + at, z.to(dx.dtype.element_ty), mask=inside)
        if NEEDS_DW:
            total += upstream * normed
    if NEEDS_DW:
        tl.store(partial + slab.to(tl.int64) * width + col, tl.sum(total, 0), mask=col < width)


def blocks_of(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    elements, warps = next((elements, warps) for most, elements, warps in BLOCKS if width <= most)
    return {"BLOCK_R": max(1, elements // columns), "BLOCK_H": columns, "num_warps": warps}


def stages_of(blocks: dict[str, int], *loaded: Tensor | None) -> int:
    """Returns as many stages of a loop as shared memory holds, whose rounds load a block of each tensor."""
    size = sum(x.element_size() for x in loaded if x is not None) * blocks["BLOCK_R"] * blocks["BLOCK_H"]
    return max(1, min(STAGES, SHARED // size + 1))


@cached
def _launch_for(rows: int, width: int, device: int, residual: bool, offset: float) -> Launch:
    blocks = blocks_of(width)
    grid = (triton.cdiv(rows, blocks["BLOCK_R"]),)
    sizes = rows, width, float(width)
    flags = {"HAS_RESIDUAL": residual, "OFFSET": offset, "enable_fp_fusion": False}
    return Launch(_rms_norm_kernel, device, grid, *sizes, **flags, **blocks)


def norm_forward(
    x, residual, weight, eps: float, offset: float, trains: bool = False, heads: int = 1, layout=None, buffer=None
) -> list[Tensor]:
    """Returns y, h = x + residual where a residual is given, both like x, and with `trains` rstd of every row; what
    follows is for the backward."""
    x, weight = aligned(x), None if weight is None else aligned(weight)
    residual = None if residual is None else aligned(residual)
    width = x.shape[-1]
    rows = x.numel() // width
    y, h = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    rstd = x.new_empty(rows, dtype=torch.float32) if trains else None
    if rows:
        _launch_for(rows, width, x.get_device(), residual is not None, offset)(x, residual, weight, h, y, rstd, eps)
    return [t for t in (y, None if residual is None else h, rstd) if t is not None]


def _fake(x, residual, weight, eps, offset, trains, heads, layout, buffer):
    y = [torch.empty_like(x, memory_format=torch.contiguous_format) for t in (x, residual) if t is not None]
    return y + [x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)] * trains


def slab_sums(x, weight, rstd, dy, dh, slots, slabs: int, heads: int, dx, needs_dw: bool, offset: float) -> Tensor:
    """Returns the partial sum of dweight of each slab, where they are asked for; writes dx, where it is given.

    slots: the token of each place in the slabs, −1 for none; None: the tokens of x as they are."""
    x, dy, width = aligned(x), aligned(dy), x.shape[-1]
    slabs *= heads > 0
    partial = x.new_empty(slabs if needs_dw else 0, width, dtype=torch.float32)
    if slabs and width:
        blocks, tokens = blocks_of(width), x.numel() // (width * heads)
        weight, dh = (None if t is None else aligned(t) for t in (weight, dh))
        _rms_norm_backward_kernel[(slabs,)](
            x,
            weight,
            rstd,
            dy,
            dh,
            slots,
            dx,
            partial,
            tokens,
            width,
            float(width),
            HEADS=heads,
            OFFSET=offset,
            HAS_DH=dh is not None,
            NEEDS_DX=dx is not None,
            NEEDS_DW=needs_dw,
            SLAB=SLAB,
            STAGES=stages_of(blocks, x, dy, dh),
            enable_fp_fusion=False,
            **blocks,
        )
    return partial


@writes("dx", "dw")
def norm_gradient(x, weight, rstd, dy, dh, layout, heads: int, dx, dw, continues: bool, offset: float) -> None:
    """Writes dx and dweight, each where it is given; dweight goes on from what is there if it `continues`."""
    layout = layout_of(layout)
    if dx is not None and layout.padding:
        dx.zero_()
    slots = None if layout.identity else layout.slots_on(x.device)
    partial = slab_sums(x, weight, rstd, dy, dh, slots, len(layout.slots) // SLAB, heads, dx, dw is not None, offset)
    if dw is not None:
        fold_partials(partial, dw if continues else None, dw)


def _save(ctx, inputs, outputs):
    x, residual, weight, _, ctx.offset, _, ctx.heads, ctx.layout, ctx.buffer = inputs
    *ys, rstd = outputs
    ctx.parameter = weight  # see _Linear
    ctx.save_for_backward(x if residual is None else ys[1], weight, rstd)
    ctx.mark_non_differentiable(rstd)


def _backward(ctx, dy, *dh):
    x, weight, rstd = ctx.saved_tensors
    dh = dh[0] if len(dh) > 1 else None
    needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x or needs_residual else None
    dw, continues = gradient_of("rms_norm", ctx.parameter, buffer=ctx.buffer) if needs_weight else (None, False)
    dy = torch.zeros_like(x) if dy is None else dy
    norm_gradient(x, weight, rstd, dy, dh, ctx.layout, ctx.heads, dx, dw, continues, ctx.offset)
    return dx if needs_x else None, dx if needs_residual else None, None if continues else dw, *[None] * 6


_norm = Op("rms_norm", norm_forward, _backward, _fake, _save)


def check_features(op: str, name: str, parameter: Tensor | None, x: Tensor) -> None:
    """Raises what an op does for a parameter of x's last dimension, which has the dtype of x or fp32; None is fine."""
    if parameter is None:
        return
    check(op, same_dtype=False, x=x, **{name: parameter})
    check_dtype(op, name, parameter)
    if parameter.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"{op}: {name} has dtype {parameter.dtype} but x has {x.dtype}; they must be equal, or {name} torch.float32"
        )
    check_shape(op, name, parameter, x.shape[-1:], "the last dimension of x")


def check_row(op: str, x: Tensor, eps: float, heads: bool) -> float:
    """Returns eps, a float. Raises ValueError for an x or an eps that a norm cannot take."""
    if x.dim() < 1 + heads:
        expected = "(..., heads, head_dim)" if heads else "(..., hidden)"
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected {expected}")
    if not 0 < x.shape[-1] <= WIDEST:
        raise ValueError(f"{op}: the last dimension of x is {x.shape[-1]}, expected 1 to {WIDEST}")
    if not 0 <= check_number(op, "eps", eps) < float("inf"):
        raise ValueError(f"{op}: eps is {eps}, expected a number from 0 on")
    return check_fp32(op, "eps", float(eps))


@once
def _checked(op: str, x, residual, weight, eps, offset, heads: bool) -> tuple[float, float]:
    """Returns eps and offset, floats."""
    check(op, optional=() if op == "add_rms_norm" else ("residual",), x=x, residual=residual)
    if residual is not None:
        check_shape(op, "residual", residual, x.shape, "that of x")
    eps = check_row(op, x, eps, heads)
    check_features(op, "weight", weight, x)
    if check_number(op, "offset", offset) and weight is None:
        raise ValueError(f"{op}: offset is {offset} and weight is None, expected a weight that it is added to")
    return eps, check_fp32(op, "offset", float(offset))


def _apply(op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, heads: bool):
    eps, offset = _checked(op, x, residual, weight, eps, offset, heads)

    def training() -> tuple:
        return True, x.shape[-2] if heads else 1, *training_arguments(op, x, 1 + heads, weight=weight)

    y, *h = _norm(x, residual, weight, eps, offset, training=training)
    return y if residual is None else (y, h[0])


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x / √(mean(x²) + eps) · (offset + weight) over the last dimension, in fp32, rounded once to x's dtype.

    x (..., hidden); weight (hidden,) in the dtype of x or in fp32, or None: x / √(mean(x²) + eps). Raises TypeError for
    other dtypes, ValueError for other shapes and for an offset without a weight.
    """
    return _apply("rms_norm", x, None, weight, eps, offset, heads=False)


def qk_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """RMSNorm of every head of queries or keys: x (..., length, heads, head_dim), weight (head_dim,) or None."""
    return _apply("qk_norm", x, None, weight, eps, offset, heads=True)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) with h = x + residual, summed in fp32 and rounded once to x's dtype; x, residual (...,
    hidden)."""
    return _apply("add_rms_norm", x, residual, weight, eps, offset, heads=False)
