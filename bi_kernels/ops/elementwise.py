"""Elementwise ops of IEEE operations: load, to fp32, compute, one cast to the output dtype, store.

No element sees another, so a batch can only matter through the code path; there is one fixed block for every size. The
gradients of add, scale, mask_fill and cast are these very ops on dy; only bias_add's bias has a reduction, the fold
over tokens of `fold_bias`. Contraction into fused multiply-adds is off, so a CPU gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import check, check_alike, check_shape
from bi_kernels.contract import DTYPES
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.op import Op
from bi_kernels.ops.gemm.gemm import fold_bias
from bi_kernels.scalars import check_number, truncated_repr
from bi_kernels.tokens import training_arguments

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
        elif OP == "cast":
            z = a
    tl.store(y + at, z.to(y.dtype.element_ty), mask=inside)


@cached
def _launch_for(op: str, n: int, cols: int, device: int) -> Launch:
    grid, options = (triton.cdiv(n, BLOCK),), {"num_warps": WARPS, "enable_fp_fusion": False}
    return Launch(_elementwise_kernel, device, grid, n, cols, OP=op, BLOCK=BLOCK, **options)


def _launch(op: str, x, other, factor: float, dtype: torch.dtype, layout=None, buffer=None) -> Tensor:
    """layout, buffer: of a bias, for the backward."""
    x, other = x.contiguous(), None if other is None else other.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    n = x.numel()
    if n:
        cols = x.shape[-1] if x.dim() else 1
        _launch_for(op, n, cols, x.get_device())(x, other, y, factor)
    return y


def _fake(op, x, other, factor, dtype, layout, buffer):
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _save(ctx, inputs, y):
    ctx.op, x, other, ctx.factor, _, ctx.layout, ctx.buffer = inputs
    ctx.dtype = x.dtype
    if ctx.op == "mask_fill":
        ctx.save_for_backward(other)
    elif ctx.op == "bias_add":
        ctx.bias = other  # for its main_grad: its numbers are not needed


def _backward(ctx, dy):
    op, (needs_x, needs_other) = ctx.op, ctx.needs_input_grad[1:3]
    d_other = None
    if op in ("add", "bias_add"):
        dx = dy
        if needs_other:
            flat = lambda: dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])
            d_other = dy if op == "add" else fold_bias(op, flat(), ctx.bias, ctx.layout, "bias", ctx.buffer)
    elif op == "mask_fill":
        dx = _elementwise.raw(op, dy, *ctx.saved_tensors, 0.0, dy.dtype)
    else:
        dx = _elementwise.raw(op, dy, None, ctx.factor, ctx.dtype)
    return None, dx if needs_x else None, d_other, None, None, None, None


_elementwise = Op("elementwise", _launch, _backward, _fake, _save)


def add(x: Tensor, residual: Tensor) -> Tensor:
    """x + residual, summed in fp32 and rounded once; both of one shape and dtype."""
    check_alike("add", "x", x, "residual", residual)
    return _elementwise("add", x, residual, 0.0, x.dtype)


def scale(x: Tensor, factor: float) -> Tensor:
    """x · factor, the factor rounded to fp32, the product in fp32 and rounded once."""
    check_alike("scale", "x", x)
    return _elementwise("scale", x, None, check_number("scale", "factor", factor), x.dtype)


def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    """x (..., N) + bias (N,), summed in fp32 and rounded once."""
    check("bias_add", x=x, bias=bias)
    check_shape("bias_add", "bias", bias, x.shape[-1:], "the last dimension of x")
    training = lambda: training_arguments("bias_add", x, 1, bias=bias)
    return _elementwise("bias_add", x, bias, 0.0, x.dtype, training=training)


def mask_fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
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
    return _elementwise("mask_fill", x, mask, check_number("mask_fill", "value", value), x.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype of the contract: one rounding to nearest even on the way down, exact on the way up."""
    check("cast", x=x)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise TypeError(f"cast: dtype is {truncated_repr(dtype)}; supported are {', '.join(DTYPES)}")
    return _elementwise("cast", x, None, 0.0, dtype)
