"""Elementwise ops and their gradients: load, to fp32, compute, one cast to the output dtype, store.

No element sees another, so a batch can only matter through the code path; there is one fixed block for every size. The
gradients of add, scale, mask_fill and cast are these very ops on dy; only bias_add's bias has a reduction, the fold
over tokens of `fold_bias`. Contraction into fused multiply-adds is off: add, scale, bias_add, mask_fill and cast are
IEEE operations only and give the same bits on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from bi_kernels.checks import apply, check, check_shape, once
from bi_kernels.contract import DTYPES
from bi_kernels.launch import Launch, jit, remembered
from bi_kernels.ops.gemm.gemm import fold_bias
from bi_kernels.scalars import check_number, shown
from bi_kernels.tokens import layout_for, main_grad

BLOCK, WARPS = 1024, 4  # eight elements a thread: one 16-byte access in bf16


@jit
def _elementwise_kernel(x, other, y, factor, n, cols, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    raw = tl.load(x + at, mask=inside)
    if OP == "mask_fill":
        # copied, not computed: the payload of a NaN survives; and tl.full would turn a fill of -0 into +0
        filled = tl.load(other + at, mask=inside, other=0) != 0
        z = tl.where(filled, tl.where(filled, factor, 0.0).to(raw.dtype), raw)
    else:
        a = raw.to(tl.float32)
        if OP == "add":
            z = a + tl.load(other + at, mask=inside).to(tl.float32)
        elif OP == "bias_add":
            z = a + tl.load(other + at % cols, mask=inside).to(tl.float32)
        elif OP == "scale":
            z = a * factor
        elif OP == "silu":
            z = tl.div_rn(a, 1.0 + tl.exp(-a))
        elif OP == "swiglu":
            z = tl.div_rn(a, 1.0 + tl.exp(-a)) * tl.load(other + at, mask=inside).to(tl.float32)
        elif OP == "gelu":
            z = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
        elif OP == "gelu_tanh":
            z = tl.div_rn(a, 1.0 + tl.exp(-1.5957691216057308 * (a + 0.044715 * (a * a * a))))
        elif OP == "cast":
            z = a
    tl.store(y + at, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _reciprocal(d):
    """1 / d rounded to nearest, for d from 1 to 2: a Newton step from an approximation, cheaper than tl.div_rn."""
    r = 1.0 / d
    return tl.fma(tl.fma(-d, r, 1.0), r, r)


@jit
def _gradient_kernel(x, up, dy, dx, d_up, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    """dx = dy f'(x); for swiglu dx = dy silu'(x) up and d_up = dy silu(x), each where its pointer is given."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, mask=inside).to(tl.float32)
    g = tl.load(dy + at, mask=inside).to(tl.float32)
    if OP == "swiglu":  # asked for with the others, before the first store
        b = tl.load(up + at, mask=inside).to(tl.float32)
    if d_up is not None:
        tl.store(d_up + at, (tl.div_rn(a, 1.0 + tl.exp(-a)) * g).to(d_up.dtype.element_ty), mask=inside)
    if dx is not None:
        if OP == "gelu":  # Φ(x) + x φ(x)
            z = 0.5 * (1.0 + tl.erf(a * 0.7071067811865476)) + a * (tl.exp(-0.5 * (a * a)) * 0.3989422804014327)
        else:
            t = a
            if OP == "gelu_tanh":
                t = 1.5957691216057308 * (a + 0.044715 * (a * a * a))
            # q = 1 / (1 + exp(-t)) and 1 - q from exp(-|t|): neither overflows, neither cancels
            e = tl.exp(-tl.abs(t))
            r = _reciprocal(1.0 + e)
            q = tl.where(t >= 0, r, e * r)
            if OP == "gelu_tanh":  # q + x q (1 - q) t'(x); beyond 16 e is 0, and t' could overflow
                c = tl.minimum(tl.abs(a), 16.0)
                z = q + a * (e * r * r * (1.5957691216057308 + 0.21406444881780073 * (c * c)))
            else:  # q (1 + x (1 - q))
                z = q * (1.0 + a * tl.where(t >= 0, e * r, r))
        z = g * z
        if OP == "swiglu":
            z *= b
        tl.store(dx + at, z.to(dx.dtype.element_ty), mask=inside)


@remembered
def _launch_for(op: str, n: int, cols: int, dtypes: tuple, device: int) -> Launch:
    grid, options = (triton.cdiv(n, BLOCK),), {"num_warps": WARPS, "enable_fp_fusion": False}
    return Launch(_elementwise_kernel, device, grid, n, cols, OP=op, BLOCK=BLOCK, **options)


def _launch(op: str, x: torch.Tensor, other: torch.Tensor | None, factor: float, dtype: torch.dtype) -> torch.Tensor:
    x, other = x.contiguous(), None if other is None else other.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    n = x.numel()
    if n:
        cols = x.shape[-1] if x.dim() else 1
        _launch_for(op, n, cols, (x.dtype, dtype), x.get_device())(x, other, y, factor)
    return y


def _launch_gradient(
    op: str, x: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, needs_dx: bool, needs_d_up: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, d_up) of silu, gelu, gelu_tanh or swiglu, each None where it is not needed."""
    x, up, dy = x.contiguous(), None if up is None else up.contiguous(), dy.contiguous()
    dx, d_up = torch.empty_like(x) if needs_dx else None, torch.empty_like(x) if needs_d_up else None
    if x.numel():
        _gradient_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, up, dy, dx, d_up, x.numel(), OP=op, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False
        )
    return dx, d_up


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, x, other, factor, dtype):
        ctx.op, ctx.factor, ctx.dtype = op, factor, x.dtype
        if op == "mask_fill":
            ctx.save_for_backward(other)
        elif op not in ("add", "bias_add", "scale", "cast"):
            ctx.save_for_backward(x, other)
        elif op == "bias_add" and ctx.needs_input_grad[2]:
            ctx.layout = layout_for(op, x.shape[:-1])
            ctx.bias = other  # for its main_grad: its numbers are not needed
            main_grad(op, other, "bias")
        return _launch(op, x, other, factor, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        op, (needs_x, needs_other) = ctx.op, ctx.needs_input_grad[1:3]
        dx = d_other = None
        if op in ("add", "bias_add"):
            dx = dy if needs_x else None
            if needs_other:
                d_other = (
                    dy
                    if op == "add"
                    else fold_bias(op, dy.reshape(ctx.layout.rows, ctx.bias.numel()), ctx.bias, ctx.layout)
                )
        elif op == "mask_fill":
            dx = _launch(op, dy, *ctx.saved_tensors, 0.0, dy.dtype)
        elif op in ("scale", "cast"):
            dx = _launch(op, dy, None, ctx.factor, ctx.dtype)
        else:
            dx, d_other = _launch_gradient(op, *ctx.saved_tensors, dy, needs_x, needs_other)
        return None, dx, d_other, None, None


_opaque = torch.library.custom_op("bi_kernels::elementwise", _launch, mutates_args=())


@_opaque.register_fake
def _(op, x, other, factor, dtype):
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _apply(
    op: str, x: torch.Tensor, other: torch.Tensor | None = None, factor: float = 0.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return apply(_launch, _opaque, _Elementwise.apply, op, x, other, factor, dtype or x.dtype)


@once
def _checked(op: str, x: torch.Tensor) -> None:
    check(op, x=x)


@once
def _checked_both(op: str, name: str, x: torch.Tensor, name_other: str, other: torch.Tensor) -> None:
    check(op, **{name: x, name_other: other})
    check_shape(op, name_other, other, x.shape, f"that of {name}")


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)), in fp32, for x of any shape in bf16, fp16 or fp32; the same shape and dtype."""
    _checked("silu", x)
    return _apply("silu", x)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """GELU: x/2 (1 + erf(x/√2)), or with approximate="tanh" x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))), in fp32, the
    latter as x / (1 + exp(-2√(2/π) (x + 0.044715 x³)))."""
    _checked("gelu", x)
    if not isinstance(approximate, str) or approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate is {shown(approximate)}, expected 'none' or 'tanh'")
    return _apply("gelu" if approximate == "none" else "gelu_tanh", x)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, in fp32, rounded once (Shazeer, 2020); gate and up of one shape and dtype."""
    _checked_both("swiglu", "gate", gate, "up", up)
    return _apply("swiglu", gate, up)


def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """x + residual, summed in fp32 and rounded once; both of one shape and dtype."""
    _checked_both("add", "x", x, "residual", residual)
    return _apply("add", x, residual)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x · factor, the factor rounded to fp32, the product in fp32 and rounded once."""
    _checked("scale", x)
    return _apply("scale", x, factor=check_number("scale", "factor", factor))


def bias_add(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x (..., N) + bias (N,), summed in fp32 and rounded once."""
    check("bias_add", x=x, bias=bias)
    check_shape("bias_add", "bias", bias, x.shape[-1:], "the last dimension of x")
    return _apply("bias_add", x, bias)


def mask_fill(x: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    """`value`, rounded to x's dtype, where the boolean `mask` (broadcast to x) is true; elsewhere the bits of x."""
    check("mask_fill", x=x)
    check("mask_fill", same_dtype=False, x=x, mask=mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask_fill: mask has dtype {mask.dtype}, expected torch.bool")
    try:
        mask = mask.expand_as(x)
    except RuntimeError:
        raise ValueError(
            f"mask_fill: mask has shape {tuple(mask.shape)}, which does not broadcast to x's {tuple(x.shape)}"
        ) from None
    return _apply("mask_fill", x, mask, factor=check_number("mask_fill", "value", value))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in another dtype of the contract: one rounding to nearest even on the way down, exact on the way up."""
    check("cast", x=x)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise TypeError(f"cast: dtype is {shown(dtype)}; supported are {', '.join(DTYPES)}")
    return _apply("cast", x, dtype=dtype)
