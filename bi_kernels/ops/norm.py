"""RMSNorm (Zhang and Sennrich, 2019), alone, over heads (QK-norm), and after a residual addition.

y = x · rstd · weight, rstd = 1 / √(mean(x²) + eps), in fp32, rounded once. A row's sums are fixed trees: one block
shape for a row width, whatever the number of rows. dx = rstd (dy·weight − x̂ · mean(dy·weight·x̂)) with x̂ = x · rstd.
dweight = Σ dy·x̂: each slab of 16 tokens is one partial sum, and the partials are folded from left to right in the
order of the token layout, on from `main_grad` where the weight has one. Contraction is off. Triton compiles by the
alignment of what it is given, and the layout of a sum follows: hence what is not aligned is copied.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from bi_kernels.checks import aligned, apply, check, check_shape, once
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.ops.fold import fold_partials
from bi_kernels.scalars import check_fp32, check_number
from bi_kernels.tokens import SLAB, TokenLayout, layout_for, main_grad

# of a block, by the width of a row: (at most, elements, warps); fixed for a width, since a row's sum follows the layout
BLOCKS = ((1024, 2048, 4), (4096, 4096, 8), (32768, 0, 16))
WIDEST = BLOCKS[-1][0]  # a row is held in registers
STAGES = 4  # rounds of a backward whose rows are on their way, at most
SHARED = 160 * 1024  # bytes of shared memory that they may take


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
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    tl.store(y + at, (value * scale[:, None] * w[None, :]).to(y.dtype.element_ty), mask=inside)


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
    w = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
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


def _blocks(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    elements, warps = next((elements, warps) for most, elements, warps in BLOCKS if width <= most)
    return {"BLOCK_R": max(1, elements // columns), "BLOCK_H": columns, "num_warps": warps}


def _stages(blocks: dict[str, int], *loaded: torch.Tensor | None) -> int:
    """Returns as many stages of a loop as shared memory holds, whose rounds load a block of each tensor."""
    size = sum(x.element_size() for x in loaded if x is not None) * blocks["BLOCK_R"] * blocks["BLOCK_H"]
    return max(1, min(STAGES, SHARED // size + 1))


@cached
def _launch_for(rows: int, width: int, dtype: torch.dtype, device: int, residual: bool, trains: bool) -> Launch:
    blocks = _blocks(width)
    grid = (triton.cdiv(rows, blocks["BLOCK_R"]),)
    sizes = rows, width, float(width)
    return Launch(_rms_norm_kernel, device, grid, *sizes, HAS_RESIDUAL=residual, enable_fp_fusion=False, **blocks)


def norm_forward(x, residual: torch.Tensor | None, weight, eps: float, trains: bool = False) -> list[torch.Tensor]:
    """y, h = x + residual where a residual is given, both like x, and where a gradient is wanted rstd of every row."""
    x, weight = aligned(x), aligned(weight)
    residual = None if residual is None else aligned(residual)
    width = x.shape[-1]
    rows = x.numel() // width
    y, h = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    rstd = x.new_empty(rows, dtype=torch.float32) if trains else None
    if rows:
        launch = _launch_for(rows, width, x.dtype, x.get_device(), residual is not None, trains)
        launch(x, residual, weight, h, y, rstd, eps)
    return [t for t in (y, None if residual is None else h, rstd) if t is not None]


def norm_backward(
    op: str,
    x,
    weight,
    rstd,
    dy,
    dh,
    layout: TokenLayout,
    heads: int,
    needs_dx: bool,
    needs_dw: bool,
    parameter: torch.Tensor | None = None,
):
    """(dx, dweight), each where asked for; dweight is None too where it went into the parameter's main_grad."""
    dx = dw = None
    if needs_dx:
        dx = torch.zeros_like(x) if layout.padding else torch.empty_like(x)
    slots = None if layout.identity else layout.slots_on(x.device)
    partial = slab_sums(x, weight, rstd, dy, dh, slots, len(layout.slots) // SLAB, heads, dx, needs_dw)
    if needs_dw:
        dw = fold_slabs(op, partial, weight if parameter is None else parameter)
    return dx, dw


def slab_sums(x, weight, rstd, dy, dh, slots, slabs: int, heads: int, dx, needs_dw: bool) -> torch.Tensor:
    """The partial sum of dweight of each slab, where they are asked for; dx besides, into what is given for it.

    slots: the token of each place in the slabs, −1 for none; None: the tokens of x as they are."""
    width = x.shape[-1]
    slabs *= heads > 0
    partial = x.new_empty(slabs if needs_dw else 0, width, dtype=torch.float32)
    shape = _blocks(width)
    if slabs and width:
        _rms_norm_backward_kernel[(slabs,)](
            x,
            aligned(weight),
            rstd,
            aligned(dy),
            None if dh is None else aligned(dh),
            slots,
            dx,
            partial,
            x.numel() // (width * heads),
            width,
            float(width),
            HEADS=heads,
            HAS_DH=dh is not None,
            NEEDS_DX=dx is not None,
            NEEDS_DW=needs_dw,
            SLAB=SLAB,
            STAGES=_stages(shape, x, dy, dh),
            enable_fp_fusion=False,
            **shape,
        )
    return partial


def fold_slabs(op: str, partial: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """dweight of the slabs' partial sums: into weight.main_grad, or returned where it has none."""
    buffer = main_grad(op, weight)
    out = torch.empty_like(weight) if buffer is None else buffer
    fold_partials(partial, buffer, out)
    return out if buffer is None else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, layout, heads, x, residual, weight, eps):
        if weight.requires_grad:
            main_grad(op, weight)
        y, *h, rstd = norm_forward(x, residual, weight, eps, trains=True)
        ctx.op, ctx.layout, ctx.heads, ctx.parameter = op, layout, heads, weight  # see _Linear
        ctx.save_for_backward(h[0] if h else aligned(x), weight, rstd)
        return (y, *h) if h else y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh=None):
        needs_x, needs_residual, needs_weight = ctx.needs_input_grad[3:6]
        dx, dw = norm_backward(
            ctx.op,
            *ctx.saved_tensors,
            dy,
            dh,
            ctx.layout,
            ctx.heads,
            needs_x or needs_residual,
            needs_weight,
            ctx.parameter,
        )
        return None, None, None, dx if needs_x else None, dx if needs_residual else None, dw, None


@torch.library.custom_op("bi_kernels::rms_norm", mutates_args=())
def _opaque(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> list[torch.Tensor]:
    return norm_forward(x, residual, weight, eps)


@_opaque.register_fake
def _(x, residual, weight, eps):
    like = lambda: torch.empty_like(x, memory_format=torch.contiguous_format)
    return [like(), *([] if residual is None else [like()])]


@once
def _checked(op: str, x, residual, weight, eps, heads: bool) -> float:
    """Returns eps, a float."""
    check(op, optional=() if op == "add_rms_norm" else ("residual",), x=x, residual=residual, weight=weight)
    if x.dim() < 1 + heads:
        expected = "(..., heads, head_dim)" if heads else "(..., hidden)"
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected {expected}")
    if residual is not None:
        check_shape(op, "residual", residual, x.shape, "that of x")
    check_shape(op, "weight", weight, x.shape[-1:], "the last dimension of x")
    if not 0 < x.shape[-1] <= WIDEST:
        raise ValueError(f"{op}: the last dimension of x is {x.shape[-1]}, expected 1 to {WIDEST}")
    if not 0 <= check_number(op, "eps", eps) < float("inf"):
        raise ValueError(f"{op}: eps is {eps}, expected a number from 0 on")
    return check_fp32(op, "eps", float(eps))


def _apply(op: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, heads: bool):
    eps = _checked(op, x, residual, weight, eps, heads)

    def differentiable(*args):
        lead, each = (x.shape[:-2], x.shape[-2]) if heads else (x.shape[:-1], 1)
        return _RMSNorm.apply(op, layout_for(op, lead, weight.requires_grad), each, *args)

    out = apply(norm_forward, _opaque, differentiable, x, residual, weight, eps)
    return out if isinstance(out, torch.Tensor) else out[0] if residual is None else tuple(out)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension: x (..., hidden), weight (hidden,), fp32, rounded once."""
    return _apply("rms_norm", x, None, weight, eps, heads=False)


def qk_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm of every head of queries or keys: x (..., length, heads, head_dim), weight (head_dim,)."""
    return _apply("qk_norm", x, None, weight, eps, heads=True)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(h), h) with h = x + residual, summed in fp32 and rounded once to x's dtype; x, residual (...,
    hidden)."""
    return _apply("add_rms_norm", x, residual, weight, eps, heads=False)
