"""Rotary position embedding (Su et al., 2021), half-rotated or interleaved.

The angles come from a table: cos and sin of position · theta^(-2i/D), computed in fp64 and rounded once to fp32, never
inline, so a position has one angle wherever its token lies. y1 = x1 cos − x2 sin and y2 = x2 cos + x1 sin in fp32, each
product rounded (contraction off: the same bits on a CPU), one cast at the end. Features beyond those of the table are
copied. The gradient is the rotation of dy by the opposite angle: the same kernel with −sin.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import can_wait, check, check_numbers, integers, once, widened
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.op import Op
from bi_kernels.ops.rope_scaling import frequencies
from bi_kernels.scalars import check_flag, check_number, integer_of, truncated_repr

BLOCK_R, WARPS = 16, 4


class RopeTable(NamedTuple):
    cos: Tensor  # (positions, head_dim / 2), fp32, or narrower, for the first features alone
    sin: Tensor


@jit(do_not_specialize=["rows", "table_rows"])
def _rope_kernel(
    x,
    cos,
    sin,
    positions,
    y,
    rows,
    dim,
    half,
    table_rows,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # (token, head), flattened
    i = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (i < half)[None, :]
    if INTERLEAVED:  # one contiguous access to both halves of every pair
        at = row[:, None] * dim + tl.arange(0, 2 * BLOCK_D)[None, :]
        held = (row < rows)[:, None] & (tl.arange(0, 2 * BLOCK_D) < 2 * half)[None, :]
        pairs = tl.load(x + at, mask=held, other=0.0)
    else:
        at = row[:, None] * dim + i[None, :]
        first = tl.load(x + at, mask=inside, other=0.0)
        second = tl.load(x + at + half, mask=inside, other=0.0)
    position = tl.load(positions + row // HEADS, mask=row < rows, other=0).to(tl.int64)
    # a position outside the table gives NaN, not the angle of a neighbour
    known = inside & ((position >= 0) & (position < table_rows))[:, None]
    angle = position[:, None] * half + i[None, :]
    c = tl.load(cos + angle, mask=known, other=float("nan"))
    s = tl.load(sin + angle, mask=known, other=float("nan"))
    if BACKWARD:
        s = -s
    if INTERLEAVED:
        x1, x2 = pairs.to(tl.float32).reshape(BLOCK_R, BLOCK_D, 2).split()
        z = tl.join(x1 * c - x2 * s, x2 * c + x1 * s).reshape(BLOCK_R, 2 * BLOCK_D)
        tl.store(y + at, z.to(y.dtype.element_ty), mask=held)
    else:
        x1, x2 = first.to(tl.float32), second.to(tl.float32)
        tl.store(y + at, (x1 * c - x2 * s).to(y.dtype.element_ty), mask=inside)
        tl.store(y + at + half, (x2 * c + x1 * s).to(y.dtype.element_ty), mask=inside)
    if BLOCK_REST > 0:  # copied bit by bit
        j = 2 * half + tl.arange(0, BLOCK_REST)
        at = row[:, None] * dim + j[None, :]
        beyond = (row < rows)[:, None] & (j < dim)[None, :]
        tl.store(y + at, tl.load(x + at, mask=beyond), mask=beyond)


@cached
def _launch_for(
    rows: int, heads: int, dim: int, table_rows: int, half: int, device: int, interleaved: bool, backward: bool
) -> Launch:
    return Launch(
        _rope_kernel,
        device,
        (triton.cdiv(rows, BLOCK_R),),
        *(rows, dim, half, table_rows),
        HEADS=heads,
        INTERLEAVED=interleaved,
        BACKWARD=backward,
        BLOCK_R=BLOCK_R,
        BLOCK_D=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(dim - 2 * half) if dim > 2 * half else 0,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def _launch(x, cos, sin, positions, interleaved: bool, backward: bool) -> Tensor:
    x, cos, sin, positions = x.contiguous(), cos.contiguous(), sin.contiguous(), positions.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        *_, heads, dim = x.shape
        sizes = positions.numel() * heads, heads, dim, *cos.shape
        _launch_for(*sizes, x.get_device(), interleaved, backward)(x, cos, sin, positions, y)
    return y


def _save(ctx, inputs, y):
    ctx.save_for_backward(*inputs[1:4])
    ctx.interleaved, ctx.turned_back = inputs[4:]


def _backward(ctx, dy):
    dx = None
    if ctx.needs_input_grad[0]:
        dx = _rope.raw(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.turned_back)
    return dx, None, None, None, None, None


_rope = Op("rope", _launch, _backward, save=_save)


def rope_table(
    positions: int,
    head_dim: int,
    theta: float = 10000.0,
    device: torch.device | str = "cpu",
    scaling: Mapping | None = None,
) -> RopeTable:
    """cos and sin of p · theta^(-2i/head_dim) for p < positions, i < head_dim/2: fp64, rounded once to fp32.

    Computed on the CPU whatever `device` is, so that every device holds the same table. For heads of which the first
    features alone turn, head_dim is their number. scaling: frequencies, and a factor of cos and sin, for long contexts,
    as Transformers' `rope_parameters` spell them: {"rope_type": "yarn", "factor": 4.0,
    "original_max_position_embeddings": 32768, …}, or linear, llama3, ntk (theta · factor^(d/(d-2)), d = head_dim).
    """
    op = "rope_table"
    positions, head_dim = integer_of(op, "positions", positions), integer_of(op, "head_dim", head_dim)
    if not 0 < head_dim <= 2**16 or head_dim % 2:
        raise ValueError(
            f"{op}: head_dim is {truncated_repr(head_dim)}, expected a positive even number, at most 2**16"
        )
    if not 0 < positions < 2**31:
        raise ValueError(f"{op}: positions is {truncated_repr(positions)}, expected at least 1, and below 2**31")
    if not 0 < check_number(op, "theta", theta) < float("inf"):
        raise ValueError(f"{op}: theta is {theta}, expected a positive number")
    try:
        device = torch.device(device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{op}: device is {truncated_repr(device)}, expected one of torch's") from None
    frequency, factor = frequencies(op, head_dim, theta, scaling)
    angle = torch.arange(positions, dtype=torch.float64, device="cpu")[:, None] * frequency
    return RopeTable(*((part * factor).float().to(device) for part in (angle.cos(), angle.sin())))


def packed_positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Returns the position of each of `tokens` packed tokens in its own sequence: cu_seqlens (sequences + 1,) int.

    Raises TypeError and ValueError."""
    op = "packed_positions"
    check_numbers(op, "cu_seqlens", cu_seqlens)
    if (tokens := integer_of(op, "tokens", tokens)) < 0:
        raise ValueError(f"{op}: tokens is {truncated_repr(tokens)}, expected at least 0")
    return positions_of(op, cu_seqlens, tokens)


def positions_of(op: str, cu_seqlens: Tensor, tokens: int) -> Tensor:
    if cu_seqlens.dim() != 1 or not integers(cu_seqlens) or not len(cu_seqlens):
        raise ValueError(
            f"{op}: cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, expected "
            "one dimension of integers, one more than there are sequences"
        )
    if cu_seqlens.device.type == "cpu" and can_wait(cu_seqlens):
        # elsewhere the check would wait for the device; a position that comes out wrong there gives NaN
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
            said = f"expected it to start at 0, never decrease and end at {truncated_repr(tokens)}"
            raise ValueError(f"{op}: cu_seqlens is {truncated_repr(ends)}, {said}")
    at, cu_seqlens = torch.arange(tokens, device=cu_seqlens.device), widened(cu_seqlens).contiguous()
    return at - cu_seqlens[torch.searchsorted(cu_seqlens, at, right=True) - 1]


@once
def _checked(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None) -> None:
    check("rope", x=x)
    optional = {"positions": positions, "cu_seqlens": cu_seqlens}
    check("rope", same_dtype=False, optional=tuple(optional), x=x, cos=cos, sin=sin, **optional)
    if x.dim() < 2 or x.shape[-1] % 2:
        raise ValueError(f"rope: x has shape {tuple(x.shape)}, expected (..., heads, head_dim) with an even head_dim")
    if (positions is None) == (cu_seqlens is None):
        raise ValueError("rope: give either positions or cu_seqlens, and not both")
    half = x.shape[-1] // 2
    for name, part in (("cos", cos), ("sin", sin)):
        if part.dtype != torch.float32:
            raise TypeError(f"rope: table.{name} has dtype {part.dtype}, expected torch.float32")
        if part.shape != cos.shape or part.dim() != 2 or not min(1, half) <= part.shape[-1] <= half:
            said = f"expected {(*cos.shape[:1], half)} (positions, head_dim/2)"
            said += ", or fewer columns for the first features alone, in both of its parts alike"
            raise ValueError(f"rope: table.{name} has shape {tuple(part.shape)}, {said}")
    if positions is None:
        if x.dim() != 3:
            raise ValueError(f"rope: x has shape {tuple(x.shape)}; with cu_seqlens expected (tokens, heads, head_dim)")
    elif not integers(positions):
        raise TypeError(f"rope: positions has dtype {positions.dtype}, expected integers")


def rope(
    x: Tensor,
    table: RopeTable,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotates x (..., heads, head_dim) by the angles of its positions (...), or of packed sequences (`cu_seqlens`).

    interleaved: pairs are (2i, 2i+1), as in GPT-J; else (i, i + head_dim/2), as in Llama. A position that the table
    does not hold gives NaN. A table for d < head_dim features turns the first d, as if they were the head, and the
    others are copied. Returns x's shape and dtype.
    """
    if not isinstance(table, RopeTable):
        check("rope", x=x)
        raise TypeError(f"rope: table is a {type(table).__name__}, expected a RopeTable, as rope_table returns it")
    check_flag("rope", "interleaved", interleaved)
    _checked(x, table.cos, table.sin, positions, cu_seqlens)
    if positions is None:
        positions = positions_of("rope", cu_seqlens, x.shape[0])
    if positions.shape != x.shape[:-2]:
        try:
            positions = positions.expand(x.shape[:-2])
        except RuntimeError:
            raise ValueError(
                f"rope: positions has shape {tuple(positions.shape)}, expected {tuple(x.shape[:-2])} or one "
                "that broadcasts to it"
            ) from None
    return _rope(x, table.cos, table.sin, positions, interleaved, False)
