"""Elementwise ops: load, to fp32, compute, one cast to the output dtype, store.

No element sees another, so a batch can only matter through the code path; there is one kernel, with one fixed block, for
every size. Contraction into fused multiply-adds is off: add, scale, bias_add, mask_fill and cast are IEEE operations only and
give the same bits on a CPU.
"""

import torch
import triton
import triton.language as tl

from bi_kernels.checks import apply, check, check_number, check_shape
from bi_kernels.contract import DTYPES

BLOCK, WARPS = 2048, 8  # eight elements a thread: one 16-byte access in bf16


@triton.jit
def _elementwise_kernel(x, other, y, n, cols, factor, OP: tl.constexpr, BLOCK: tl.constexpr):
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


def _launch(op: str, x: torch.Tensor, other: torch.Tensor | None, factor: float, dtype: torch.dtype) -> torch.Tensor:
    x, other = x.contiguous(), None if other is None else other.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    if x.numel():
        _elementwise_kernel[(triton.cdiv(x.numel(), BLOCK), )](
            x, other, y, x.numel(), x.shape[-1] if x.dim() else 1, factor, OP=op, BLOCK=BLOCK, num_warps=WARPS,
            enable_fp_fusion=False)
    return y


_opaque = torch.library.custom_op("bi_kernels::elementwise", _launch, mutates_args=())


@_opaque.register_fake
def _(op, x, other, factor, dtype):
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _apply(op: str, x: torch.Tensor, other: torch.Tensor | None = None, factor: float = 0.0,
           dtype: torch.dtype | None = None) -> torch.Tensor:
    return apply(op, _launch, _opaque, op, x, other, factor, dtype or x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)), in fp32, for x of any shape in bf16, fp16 or fp32; the same shape and dtype."""
    check("silu", x=x)
    return _apply("silu", x)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """GELU: x/2 (1 + erf(x/√2)), or with approximate="tanh" x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))), in fp32, the
    latter as x / (1 + exp(-2√(2/π) (x + 0.044715 x³)))."""
    check("gelu", x=x)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate is {approximate!r}, expected 'none' or 'tanh'")
    return _apply("gelu" if approximate == "none" else "gelu_tanh", x)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, in fp32, rounded once (Shazeer, 2020); gate and up of one shape and dtype."""
    check("swiglu", gate=gate, up=up)
    check_shape("swiglu", "up", up, gate.shape, "that of gate")
    return _apply("swiglu", gate, up)


def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """x + residual, summed in fp32 and rounded once; both of one shape and dtype."""
    check("add", x=x, residual=residual)
    check_shape("add", "residual", residual, x.shape, "that of x")
    return _apply("add", x, residual)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x · factor, the factor rounded to fp32, the product in fp32 and rounded once."""
    check("scale", x=x)
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
        raise ValueError(f"mask_fill: mask has shape {tuple(mask.shape)}, which does not broadcast to x's "
                         f"{tuple(x.shape)}") from None
    return _apply("mask_fill", x, mask, factor=check_number("mask_fill", "value", value))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in another dtype of the contract: one rounding to nearest even on the way down, exact on the way up."""
    check("cast", x=x)
    if dtype not in DTYPES.values():
        raise TypeError(f"cast: dtype is {dtype}; supported are {', '.join(DTYPES)}")
    return _apply("cast", x, dtype=dtype)
