"""Moves rows between tokens and experts: `dispatch` copies a token's row to each of its experts, `combine` adds what
they return, weighted, in ascending expert id, in fp32, rounded once.

Rows are sorted by expert, so the order of a token's rows is that of its experts. The gradients are the same two
kernels the other way round. The gradient of a routing weight is Σ of a row of dout · y: 1024 features at a time, added
from left to right, and then one tree.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import aligned, check, check_plain
from bi_kernels.contract import check_dtype
from bi_kernels.launch import jit
from bi_kernels.op import Op, writes
from bi_kernels.ops.grouped.groups import Groups
from bi_kernels.scalars import truncated_repr

ELEMENTS, WARPS = 2048, 4  # that one program copies or adds
DOT_ROWS, DOT_BLOCK = 1, 1024  # of a gradient's sum, for every call the same
FAR = tl.constexpr(2**31 - 1)


@jit(do_not_specialize=["count"])
def _gather_kernel(
    x, index, end, y, count, width, stride, DIVISOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """y[i] = x[index[i] // DIVISOR], zeros where index is negative; rows beyond `end` are left."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = i < count
    if end is not None:
        mine &= i < tl.load(end)
    at = tl.load(index + i, mask=mine, other=-1)
    row = tl.where(at < 0, 0, at).to(tl.int64) // DIVISOR
    inside = mine[:, None] & (col < width)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], mask=inside & (at >= 0)[:, None], other=0.0)
    tl.store(y + i[:, None] * width + col[None, :], value, mask=inside)


@jit(do_not_specialize=["tokens"])
def _combine_kernel(
    y,
    weights,
    rows,
    out,
    tokens,
    width,
    CHOICES: tl.constexpr,
    ROOM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = Σ weights[t, j] · y[rows[t, j]], in the order of the rows; a choice of row −1 adds nothing."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, ROOM)
    there = (token < tokens)[:, None] & (choice < CHOICES)[None, :]
    at = token[:, None] * CHOICES + choice[None, :]
    row = tl.load(rows + at, mask=there, other=-1)
    if weights is not None:
        weight = tl.load(weights + at, mask=there, other=0.0).to(tl.float32)
    last = tl.full((ROWS,), -1, tl.int32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for _ in tl.static_range(CHOICES):
        following = tl.min(tl.where(row > last[:, None], row, FAR), 1)
        found = following < FAR
        inside = found[:, None] & (col < width)[None, :]
        place = tl.where(found, following, 0).to(tl.int64)
        value = tl.load(y + place[:, None] * width + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.sum(tl.where(row == following[:, None], weight, 0.0), 1)[:, None]
        total += tl.where(inside, value, 0.0)
        last = following
    store = (token < tokens)[:, None] & (col < width)[None, :]
    tl.store(out + token[:, None] * width + col[None, :], total.to(out.dtype.element_ty), mask=store)


@jit(do_not_specialize=["count"])
def _combine_backward_kernel(
    dout, y, weights, source, dy, dweights, count, width, CHOICES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """dy[r] = weights[source[r]] · dout of its token, zeros of a free row; dweights[source[r]] = Σ dout · y[r]."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mine = r < count
    at = tl.load(source + r, mask=mine, other=-1)
    routed = at >= 0
    place = tl.where(routed, at, 0).to(tl.int64)
    weight = tl.load(weights + place, mask=routed, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        col = first + tl.arange(0, BLOCK)
        inside = routed[:, None] & (col < width)[None, :]
        into = r[:, None] * width + col[None, :]
        d = tl.load(dout + (place // CHOICES)[:, None] * width + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if dweights is not None:
            total += d * tl.load(y + into, mask=inside, other=0.0).to(tl.float32)
        if dy is not None:
            given = tl.where(inside, d * weight[:, None], 0.0)
            tl.store(dy + into, given.to(dy.dtype.element_ty), mask=mine[:, None] & (col < width)[None, :])
    if dweights is not None:
        tl.store(dweights + place, (tl.sum(total, 1) + 0.0).to(dweights.dtype.element_ty), mask=routed)


def blocks_of(count: int, width: int) -> tuple[tuple[int, int], dict]:
    """Returns the grid, rows and columns of programs that treat each element alone."""
    block = min(1024, triton.next_power_of_2(width))
    rows = max(1, min(ELEMENTS // block, triton.next_power_of_2(count)))
    return (triton.cdiv(count, rows), triton.cdiv(width, block)), {"ROWS": rows, "BLOCK": block, "num_warps": WARPS}


def gather_rows(x: Tensor, index: Tensor, divisor: int = 1, end: Tensor | None = None) -> Tensor:
    """Returns x[index // divisor] of x (rows, columns), zeros where index is negative; end (1,): how many of them are
    asked for, on the device; those beyond hold anything."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = x.new_empty(len(index), x.shape[1])
    if y.numel():
        grid, options = blocks_of(*y.shape)
        _gather_kernel[grid](x, index, end, y, *y.shape, x.stride(0), DIVISOR=divisor, **options)
    return y


def _summed(y, weights, rows) -> Tensor:
    tokens = len(rows)
    out = y.new_empty(tokens, y.shape[1])
    if out.numel():
        y, weights = y.contiguous(), None if weights is None else weights.contiguous()
        grid, options = blocks_of(tokens, y.shape[1])
        _combine_kernel[grid](
            y,
            weights,
            rows,
            out,
            tokens,
            y.shape[1],
            CHOICES=rows.shape[1],
            ROOM=triton.next_power_of_2(rows.shape[1]),
            enable_fp_fusion=False,
            **options,
        )
    return out


def _dispatch(x, rows, source, divisor: int) -> Tensor:
    return gather_rows(x, source, divisor)


def _save_dispatch(ctx, inputs, output):
    ctx.divisor = inputs[3]
    ctx.save_for_backward(inputs[1])


def _dispatch_backward(ctx, dy):
    (rows,) = ctx.saved_tensors
    choices = rows.shape[1]
    dx = _combine.raw(dy, None, rows if ctx.divisor == choices else rows.reshape(-1, 1), None)
    return dx, None, None, None


def _fake_dispatch(x, rows, source, divisor):
    return x.new_empty(len(source), x.shape[1])


_dispatch_op = Op("dispatch", _dispatch, _dispatch_backward, _fake_dispatch, _save_dispatch)


def combined(y, weights, rows, source) -> Tensor:
    """Returns Σ_j weights[t, j] · y[rows[t, j]] in ascending row, weights 1 where they are None; source is for the
    backward."""
    if weights is None and rows.shape[1] == 1:
        return gather_rows(y, rows.view(-1))  # a copy, −0 too
    return _summed(y, weights, rows)


def _fake_combined(y, weights, rows, source):
    return y.new_empty(len(rows), y.shape[1])


@writes("dy", "dweights")
def combine_gradients(dout, y, weights, source, dy, dweights, choices: int) -> None:
    if len(source) and dout.shape[1]:
        _combine_backward_kernel[(triton.cdiv(len(source), DOT_ROWS),)](
            aligned(dout),
            aligned(y),
            weights.contiguous(),
            source,
            dy,
            dweights,
            len(source),
            dout.shape[1],
            CHOICES=choices,
            ROWS=DOT_ROWS,
            BLOCK=DOT_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _combine_backward(ctx, dout):
    y, weights, rows, source = ctx.saved_tensors if ctx.weighted else (None, None, *ctx.saved_tensors)
    if weights is None:
        return _dispatch_op.raw(dout.contiguous(), rows, source, rows.shape[1]), None, None, None
    dy = torch.empty_like(y, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
    dweights = weights.new_zeros(weights.shape) if ctx.needs_input_grad[1] else None
    combine_gradients(dout, y, weights, source, dy, dweights, rows.shape[1])
    return dy, dweights, None, None


def _save_combined(ctx, inputs, output):
    y, weights, rows, source = inputs
    ctx.weighted = weights is not None
    ctx.save_for_backward(*((y, weights) if ctx.weighted else ()), rows, source)


_combine = Op("combine", combined, _combine_backward, _fake_combined, _save_combined)


def _check_groups(op: str, groups: Groups) -> Groups:
    if not isinstance(groups, Groups):
        raise TypeError(f"{op}: groups is {truncated_repr(groups)}, expected what group_by_expert returns")
    return groups


def check_dispatch(x: Tensor, groups: Groups) -> bool:
    """Tells whether x has a row for each choice of a token, and not one for all. Raises ValueError for other shapes."""
    _check_groups("dispatch", groups)
    check("dispatch", x=x)
    tokens, choices = groups.rows.shape
    each = x.shape[:-1] == (tokens, choices)
    if x.dim() < 2 or not each and x.shape[:-1].numel() != tokens:
        raise ValueError(
            f"dispatch: x has shape {tuple(x.shape)}, expected ({tokens}, features) or ({tokens}, {choices}, features)"
        )
    return each


def check_combine(y: Tensor, weights: Tensor | None, groups: Groups) -> None:
    """Raises TypeError and ValueError for what does not match groups."""
    _check_groups("combine", groups)
    check("combine", y=y)
    rows = len(groups.source)
    if y.dim() != 2 or len(y) != rows:
        raise ValueError(
            f"combine: y has shape {tuple(y.shape)}, expected ({rows}, features), a row for each of groups"
        )
    if weights is not None:
        check_plain("combine", "weights", weights)
        check_dtype("combine", "weights", weights)
        tokens, choices = groups.rows.shape
        alike = weights.shape[-1:] == (choices,) and weights.shape[:-1].numel() == tokens
        if not alike or weights.device != y.device:
            raise ValueError(
                f"combine: weights has shape {tuple(weights.shape)} on {weights.device}, expected "
                f"{tuple(groups.rows.shape)} on {y.device}"
            )


def dispatch(x: Tensor, groups: Groups) -> Tensor:
    """Returns the rows of the experts' inputs, (rows, features), in x's dtype; zeros where a row is free.

    x: a row for each token, (..., features), or for each of its choices, (tokens, k, features). The gradient of a
    token's row is the sum of those of its experts in ascending expert id, in fp32, rounded once.
    """
    each = check_dispatch(x, groups)
    return _dispatch_op(x.reshape(-1, x.shape[-1]), groups.rows, groups.source, 1 if each else groups.rows.shape[1])


def combine(y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
    """Σ_j weights[t, j] · y[row of choice j] of each token, in ascending expert id: (..., features) in y's dtype.

    y: (rows, features), bf16, fp16 or fp32, as the experts return them. weights: (..., k) of all tokens, bf16, fp16 or
    fp32, or None for ones, which gives (tokens, features). Products and sums are fp32, each rounded, and the result
    once to y's dtype. A choice that is routed nowhere adds nothing. Free rows get the gradient 0.
    """
    check_combine(y, weights, groups)
    if weights is None:
        return _combine(y, None, groups.rows, groups.source)
    out = _combine(y, weights.reshape(groups.rows.shape), groups.rows, groups.source)
    return out.view(*weights.shape[:-1], y.shape[1])
