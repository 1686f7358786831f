"""Reductions of a row of any width: its sum, and softmax.

A row of at most 4096 numbers is one tree. A wider one is cut into blocks of 4096, which are added from left to right
number by number; what that leaves is one tree. Both follow from the width alone. Contraction is off.

softmax: y = exp(x − m) / s, m the row's maximum and s = Σ exp(x − m), in fp32, rounded once; dx = y (dy − Σ y dy), with
y in fp32 from x, m and s. The row sum's dx is scale · dy everywhere.
"""

import torch
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import aligned, check, once
from bi_kernels.contract import DTYPES
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.op import Op, writes
from bi_kernels.ops.vocabulary import blocks_of, grid_of
from bi_kernels.scalars import check_fp32, check_number, truncated_repr

STAGES = 3  # blocks of a wide row that are on their way


@jit(do_not_specialize=["rows"])
def _row_sum_kernel(
    x, y, scale, rows, columns, WIDE: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mine, col, at = (row < rows)[:, None], tl.arange(0, BLOCK)[None, :], (row * columns)[:, None]
    if WIDE:
        value = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for first in tl.range(0, columns, BLOCK, num_stages=STAGES):
            inside = mine & (first + col < columns)
            value += tl.load(x + at + (first + col), mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + at + col, mask=mine & (col < columns), other=0.0).to(tl.float32)
    tl.store(y + row, (tl.sum(value, 1) * scale).to(y.dtype.element_ty), mask=row < rows)


@jit(do_not_specialize=["rows"])
def _softmax_kernel(
    x, y, top, total, rows, columns, WIDE: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mine, col, at = (row < rows)[:, None], tl.arange(0, BLOCK)[None, :], (row * columns)[:, None]
    if WIDE:
        e = tl.full((ROWS, BLOCK), -float("inf"), dtype=tl.float32)
        for first in tl.range(0, columns, BLOCK, num_stages=STAGES):  # tl.maximum drops a NaN; s brings it back
            inside = mine & (first + col < columns)
            e = tl.maximum(e, tl.load(x + at + (first + col), mask=inside, other=-float("inf")).to(tl.float32))
        m = tl.max(e, 1)
        e = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for first in tl.range(0, columns, BLOCK, num_stages=STAGES):
            inside = mine & (first + col < columns)
            z = tl.load(x + at + (first + col), mask=inside, other=-float("inf")).to(tl.float32)
            e += tl.exp(z - m[:, None])
        s = tl.sum(e, 1)
        for first in tl.range(0, columns, BLOCK, num_stages=STAGES):
            inside = mine & (first + col < columns)
            z = tl.load(x + at + (first + col), mask=inside, other=-float("inf")).to(tl.float32)
            p = tl.div_rn(tl.exp(z - m[:, None]), s[:, None])
            tl.store(y + at + (first + col), p.to(y.dtype.element_ty), mask=inside)
    else:
        inside = mine & (col < columns)
        z = tl.load(x + at + col, mask=inside, other=-float("inf")).to(tl.float32)
        m = tl.max(z, 1)
        e = tl.exp(z - m[:, None])
        s = tl.sum(e, 1)
        tl.store(y + at + col, tl.div_rn(e, s[:, None]).to(y.dtype.element_ty), mask=inside)
    if top is not None:
        tl.store(top + row, m, mask=row < rows)
        tl.store(total + row, s, mask=row < rows)


@jit(do_not_specialize=["rows"])
def _softmax_backward_kernel(
    x,
    top,
    total,
    dy,
    dx,
    rows,
    columns,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mine, col, at = (row < rows)[:, None], tl.arange(0, BLOCK)[None, :], (row * columns)[:, None]
    m = tl.load(top + row, mask=row < rows, other=0.0)[:, None]
    s = tl.load(total + row, mask=row < rows, other=1.0)[:, None]
    if WIDE:
        p = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for first in tl.range(0, columns, BLOCK, num_stages=STAGES):
            inside = mine & (first + col < columns)
            z = tl.load(x + at + (first + col), mask=inside, other=-float("inf")).to(tl.float32)
            g = tl.load(dy + at + (first + col), mask=inside, other=0.0).to(tl.float32)
            p += tl.div_rn(tl.exp(z - m), s) * g
        t = tl.sum(p, 1)
        for first in tl.range(0, columns, BLOCK, num_stages=STAGES):
            inside = mine & (first + col < columns)
            z = tl.load(x + at + (first + col), mask=inside, other=-float("inf")).to(tl.float32)
            g = tl.load(dy + at + (first + col), mask=inside, other=0.0).to(tl.float32)
            z = tl.div_rn(tl.exp(z - m), s) * (g - t[:, None])
            tl.store(dx + at + (first + col), z.to(dx.dtype.element_ty), mask=inside)
    else:
        inside = mine & (col < columns)
        z = tl.load(x + at + col, mask=inside, other=-float("inf")).to(tl.float32)
        g = tl.load(dy + at + col, mask=inside, other=0.0).to(tl.float32)
        p = tl.div_rn(tl.exp(z - m), s)
        t = tl.sum(p * g, 1)
        tl.store(dx + at + col, (p * (g - t[:, None])).to(dx.dtype.element_ty), mask=inside)


@cached
def _launch_for(kernel: object, rows: int, columns: int, device: int) -> Launch:
    blocks = blocks_of(columns)
    wide = columns > blocks["BLOCK"]
    flags = {"WIDE": wide, "STAGES": STAGES if wide else 1}
    return Launch(kernel, device, grid_of(rows, columns, blocks)[:1], rows, columns, **flags, **blocks)


def _launch(kernel: object, x: Tensor, *given) -> None:
    """Launches a kernel over the rows of x (rows, columns), of which there are some."""
    if x.numel():
        _launch_for(kernel, *x.shape, x.get_device())(x, *given)


def row_sums(x, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns scale · Σ of every row of x (rows, columns), in a dtype."""
    y = x.new_empty(len(x), dtype=dtype)
    if not x.shape[1]:
        return y.zero_()
    _launch(_row_sum_kernel, aligned(x), y, scale)
    return y


def _fake_sums(x, scale, dtype):
    return x.new_empty(len(x), dtype=dtype)


def _save_sums(ctx, inputs, y):
    x, ctx.scale, _ = inputs
    ctx.dtype, ctx.shape = x.dtype, x.shape


def _sums_backward(ctx, dy):
    return (dy.float() * ctx.scale).to(ctx.dtype)[:, None].expand(ctx.shape), None, None


_row_sum = Op("row_sum", row_sums, _sums_backward, _fake_sums, _save_sums)


def _launch_softmax(x, dtype: torch.dtype, trains: bool = False) -> list[Tensor]:
    """softmax of every row of x (rows, columns); with `trains`, its maximum and its sum of exponentials too, fp32."""
    x, y = aligned(x), torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    top, total = (x.new_empty(len(x), dtype=torch.float32) if trains else None for _ in range(2))
    _launch(_softmax_kernel, x, y, top, total)
    return [y, top, total] if trains else [y]


def _fake_softmax(x, dtype, trains):
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return [y, *[x.new_empty(len(x), dtype=torch.float32) for _ in range(2 * trains)]]


@writes("dx")
def _softmax_gradient(x, top, total, dy, dx) -> None:
    _launch(_softmax_backward_kernel, aligned(x), top, total, aligned(dy), dx)


def _save_softmax(ctx, inputs, outputs):
    _, top, total = outputs
    ctx.save_for_backward(inputs[0], top, total)
    ctx.mark_non_differentiable(top, total)


def _softmax_backward(ctx, dy, *_):
    x, top, total = ctx.saved_tensors
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    _softmax_gradient(x, top, total, dy, dx)
    return dx, None, None


_softmax = Op("softmax", _launch_softmax, _softmax_backward, _fake_softmax, _save_softmax)


def check_out_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise TypeError(f"{op}: out_dtype is {truncated_repr(dtype)}; supported are {', '.join(DTYPES)}")
    return dtype


@once
def _checked(op: str, x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the output: that of x unless another is named."""
    check(op, x=x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected (..., n)")
    return x.dtype if out_dtype is None else check_out_dtype(op, out_dtype)


def row_sum(x: Tensor, scale: float = 1.0, out_dtype: torch.dtype | None = None) -> Tensor:
    """scale · Σ x over the last dimension, in fp32, rounded once: x (..., n) to (...), in `out_dtype` or x's dtype.

    scale: rounded to fp32; 1 / n gives the mean. The sum of no numbers is 0. Raises TypeError for another dtype,
    ValueError for an x without dimensions.
    """
    dtype = _checked("row_sum", x, out_dtype)
    scale = check_fp32("row_sum", "scale", check_number("row_sum", "scale", scale))
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return _row_sum(rows, scale, dtype).reshape(x.shape[:-1])


def softmax(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """exp(x − max x) / Σ exp(x − max x) over the last dimension, in fp32, rounded once: x (..., n), any n.

    The result has x's shape, in `out_dtype` or x's dtype. A row that holds NaN or +Inf, or -Inf alone, is NaN. Raises
    TypeError for another dtype, ValueError for an x without dimensions.
    """
    dtype = _checked("softmax", x, out_dtype)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return _softmax(rows, dtype, training=lambda: (True,))[0].reshape(x.shape)
