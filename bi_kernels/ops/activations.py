"""Activations, gates and a soft cap, and their gradients: load, to fp32, compute, one cast to the output dtype, store.

Contraction into fused multiply-adds is off. What saturates is computed from exp(-|t|), which neither overflows nor
cancels; of a gate and its factor, both gradients come from one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import check_alike
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.op import Op, writes
from bi_kernels.scalars import check_flag, check_fp32, check_number, check_positive, truncated_repr

BLOCK, WARPS = 1024, 4  # as of the other elementwise ops


@triton.jit
def _activated(a, alpha, OP: tl.constexpr):
    """The activation, or that of an op's gate: x Φ(x), or x / (1 + exp(-t))."""
    if OP == "gelu" or OP == "geglu":
        z = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    elif OP == "gelu_tanh" or OP == "geglu_tanh":
        z = tl.div_rn(a, 1.0 + tl.exp(-1.5957691216057308 * (a + 0.044715 * (a * a * a))))
    elif OP == "clamped_swiglu":
        z = tl.div_rn(a, 1.0 + tl.exp(-alpha * a))
    else:
        z = tl.div_rn(a, 1.0 + tl.exp(-a))
    return z


@triton.jit
def _below(a, limit):
    return tl.where(a > limit, limit, a)  # a NaN stays one


@triton.jit
def _within(a, limit):
    return tl.where(a < -limit, -limit, _below(a, limit))


@triton.jit
def _place(at, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Where an element of a gate or of its factor stands, if both share rows of 2 · WIDTH; 0: they do not."""
    return at // WIDTH * (2 * WIDTH) + at % WIDTH * STEP if WIDTH > 0 else at


@jit
def _activation_kernel(
    x, up, y, limit, alpha, offset, n, OP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    place = _place(at, WIDTH, STEP)
    a = tl.load(x + place, mask=inside).to(tl.float32)
    if up is not None:
        b = tl.load(up + place, mask=inside).to(tl.float32)
    if OP == "soft_cap":
        # tanh(t) of t = |x| / cap, u = t²: Lambert's t (945 + 105 u + u²) / (945 + 420 u + 15 u²) below 3/4, from
        # there on (1 - e) / (1 + e) with e = exp(-2t): neither cancels
        t = tl.div_rn(tl.abs(a), limit)
        near, u, e = t < 0.75, t * t, tl.exp(-2.0 * t)
        over = tl.where(near, 945.0 + u * (105.0 + u), 1.0 - e)
        under = tl.where(near, 945.0 + u * (420.0 + 15.0 * u), 1.0 + e)
        z = tl.where(near, a, tl.where(a < 0, -limit, limit)) * tl.div_rn(over, under)
    else:
        if OP == "clamped_swiglu":
            a, b = _below(a, limit), _within(b, limit) + offset
        z = _activated(a, alpha, OP)
        if up is not None:
            z *= b
    tl.store(y + at, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _reciprocal(d):
    """1 / d rounded to nearest, for d from 1 to 2: a Newton step from an approximation, cheaper than tl.div_rn."""
    r = 1.0 / d
    return tl.fma(tl.fma(-d, r, 1.0), r, r)


@jit
def _gradient_kernel(
    x,
    up,
    dy,
    dx,
    d_up,
    limit,
    alpha,
    offset,
    n,
    OP: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    """dx = dy f'(x), times up where there is one, and d_up = dy f(x), each where its pointer is given."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    place = _place(at, WIDTH, STEP)
    a = tl.load(x + place, mask=inside).to(tl.float32)
    g = tl.load(dy + at, mask=inside).to(tl.float32)
    if up is not None:  # asked for with the others, before the first store
        b = tl.load(up + place, mask=inside).to(tl.float32)
    if OP == "clamped_swiglu":  # as torch.clamp: a limit itself is passed through, NaN is not
        a_free, b_free = a <= limit, tl.abs(b) <= limit
        a, b = _below(a, limit), _within(b, limit) + offset
    if d_up is not None:
        z = _activated(a, alpha, OP) * g
        if OP == "clamped_swiglu":
            z = tl.where(b_free, z, 0.0)
        tl.store(d_up + place, z.to(d_up.dtype.element_ty), mask=inside)
    if dx is not None:
        if OP == "gelu" or OP == "geglu":  # Φ(x) + x φ(x)
            z = 0.5 * (1.0 + tl.erf(a * 0.7071067811865476)) + a * (tl.exp(-0.5 * (a * a)) * 0.3989422804014327)
        else:
            t = a
            if OP == "gelu_tanh" or OP == "geglu_tanh":
                t = 1.5957691216057308 * (a + 0.044715 * (a * a * a))
            elif OP == "clamped_swiglu":
                t = alpha * a
            elif OP == "soft_cap":
                t = 2.0 * tl.div_rn(a, limit)
            # q = 1 / (1 + exp(-t)) and 1 - q from exp(-|t|): neither overflows, neither cancels
            e = tl.exp(-tl.abs(t))
            r = _reciprocal(1.0 + e)
            q = tl.where(t >= 0, r, e * r)
            if OP == "gelu_tanh" or OP == "geglu_tanh":
                # q + x q (1 - q) t'(x); beyond 16 e is 0, and t' could overflow
                c = tl.minimum(tl.abs(a), 16.0)
                z = q + a * (e * r * r * (1.5957691216057308 + 0.21406444881780073 * (c * c)))
            elif OP == "clamped_swiglu":  # q + x alpha q (1 - q), where t may overflow
                z = q + a * (alpha * (e * r * r))
            elif OP == "soft_cap":  # 1 - tanh²(t / 2) = 4 q (1 - q)
                z = 4.0 * (e * r * r)
            else:  # q (1 + x (1 - q))
                z = q * (1.0 + a * tl.where(t >= 0, e * r, r))
        z = g * z
        if up is not None:
            z *= b
        if OP == "clamped_swiglu":
            z = tl.where(a_free, z, 0.0)
        tl.store(dx + place, z.to(dx.dtype.element_ty), mask=inside)


OPTIONS = {"BLOCK": BLOCK, "num_warps": WARPS, "enable_fp_fusion": False}
APART = {"WIDTH": 0, "STEP": 1}  # gate and factor are two tensors


@cached
def _launch_for(op: str, n: int, device: int, width: int = 0, step: int = 1) -> Launch:
    grid = (triton.cdiv(n, BLOCK),)
    return Launch(_activation_kernel, device, grid, n, OP=op, WIDTH=width, STEP=step, **OPTIONS)


def _launch(op: str, x, up, limit: float, alpha: float, offset: float) -> Tensor:
    x, up = x.contiguous(), None if up is None else up.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _launch_for(op, x.numel(), x.get_device())(x, up, y, limit, alpha, offset)
    return y


@writes("dx", "d_up")
def _gradient(x, up, dy, dx, d_up, op: str, limit: float, alpha: float, offset: float) -> None:
    n, given = x.numel(), (x.contiguous(), None if up is None else up.contiguous(), dy.contiguous(), dx, d_up)
    if n:
        _gradient_kernel[(triton.cdiv(n, BLOCK),)](*given, limit, alpha, offset, n, OP=op, **APART, **OPTIONS)


def _save(ctx, inputs, y):
    ctx.op, x, up, *ctx.numbers = inputs
    ctx.save_for_backward(x, up)


def _backward(ctx, dy):
    x, up = ctx.saved_tensors
    new = lambda: torch.empty_like(x, memory_format=torch.contiguous_format)
    dx, d_up = (new() if needed else None for needed in ctx.needs_input_grad[1:3])
    _gradient(x, up, dy, dx, d_up, ctx.op, *ctx.numbers)
    return None, dx, d_up, None, None, None


_activation = Op("activation", _launch, _backward, save=_save)


def _halves(t: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Returns what begins at the gate, and at its factor, of rows that hold both."""
    return t, t.view(-1)[1 if step == 2 else t.shape[-1] // 2 :]


def _launch_packed(op: str, gate_up, step: int, limit: float, alpha: float, offset: float) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], width)
    if y.numel():
        run = _launch_for(op, y.numel(), y.get_device(), width, step)
        run(*_halves(gate_up, step), y, limit, alpha, offset)
    return y


@writes("d")
def _packed_gradient(gate_up, dy, d, op: str, step: int, limit: float, alpha: float, offset: float) -> None:
    n, given = dy.numel(), (*_halves(gate_up.contiguous(), step), dy.contiguous(), *_halves(d, step))
    if n:
        how = {"OP": op, "WIDTH": dy.shape[-1], "STEP": step, **OPTIONS}
        _gradient_kernel[(triton.cdiv(n, BLOCK),)](*given, limit, alpha, offset, n, **how)


def _save_packed(ctx, inputs, y):
    ctx.op, gate_up, *ctx.numbers = inputs
    ctx.save_for_backward(gate_up)


def _packed_backward(ctx, dy):
    (gate_up,) = ctx.saved_tensors
    d = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    _packed_gradient(gate_up, dy, d, ctx.op, *ctx.numbers)
    return None, d, *[None] * 4


def _fake_packed(op, gate_up, *_):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


_packed = Op("packed_activation", _launch_packed, _packed_backward, _fake_packed, _save_packed)


def _apply(op: str, x: Tensor, up: Tensor | None = None, limit=0.0, alpha=0.0, offset=0.0) -> Tensor:
    return _activation(op, x, up, limit, alpha, offset)


def _approximated(op: str, approximate: str) -> str:
    if not isinstance(approximate, str) or approximate not in ("none", "tanh"):
        raise ValueError(f"{op}: approximate is {truncated_repr(approximate)}, expected 'none' or 'tanh'")
    return op if approximate == "none" else f"{op}_tanh"


def _plain_gate(op: str, approximate: str = "none") -> tuple[str, float, float, float]:
    """Returns the name of a gate's kernel, and the numbers that it has no use for."""
    return _approximated(op, approximate), 0.0, 0.0, 0.0


def _clamp(op: str, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> tuple[str, float, float, float]:
    """Returns a clamped gate's name and numbers, checked."""
    alpha, offset = (check_fp32(op, k, check_number(op, k, v)) for k, v in (("alpha", alpha), ("offset", offset)))
    return op, check_positive(op, "limit", limit), alpha, offset


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), in fp32, for x of any shape in bf16, fp16 or fp32; the same shape and dtype."""
    check_alike("silu", "x", x)
    return _apply("silu", x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU: x/2 (1 + erf(x/√2)), or with approximate="tanh" x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))), in fp32, the
    latter as x / (1 + exp(-2√(2/π) (x + 0.044715 x³)))."""
    check_alike("gelu", "x", x)
    return _apply(_approximated("gelu", approximate), x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, in fp32, rounded once (Shazeer, 2020); gate and up of one shape and dtype."""
    check_alike("swiglu", "gate", gate, "up", up)
    return _apply("swiglu", gate, up)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate, approximate) · up, in fp32, rounded once (Shazeer, 2020); gate and up of one shape and dtype."""
    check_alike("geglu", "gate", gate, "up", up)
    return _apply(_approximated("geglu", approximate), gate, up)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Tensor:
    """g / (1 + exp(-alpha g)) · (u + offset), g = min(gate, limit), u = up within ±limit, as gpt-oss has it: in fp32,
    the numbers rounded to it, and rounded once. As of torch.clamp, a NaN stays one, and the gradient is 0 beyond a
    limit and at a NaN, not at the limit itself."""
    check_alike("clamped_swiglu", "gate", gate, "up", up)
    op, *numbers = _clamp("clamped_swiglu", limit, alpha, offset)
    return _apply(op, gate, up, *numbers)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap), as Gemma 2 caps its logits: in fp32, the cap rounded to it, and rounded once."""
    check_alike("soft_cap", "x", x)
    return _apply("soft_cap", x, limit=check_positive("soft_cap", "cap", cap))


GATES = ("swiglu", "geglu", "clamped_swiglu")


def gated(gate_up: Tensor, gate: str = "swiglu", *, interleaved: bool = False, **numbers: float | str) -> Tensor:
    """swiglu, geglu or clamped_swiglu of gate and up that share rows, (..., 2 · width), as experts store them:
    (..., width), with the bits of that op on gate_up's halves, or on every other column if `interleaved`.

    numbers: that op's own arguments; its name is `gate`. bf16, fp16 or fp32. Raises TypeError and ValueError as the op.
    """
    if gate not in GATES:
        raise ValueError(f"gated: gate is {truncated_repr(gate)}, expected one of {', '.join(GATES)}")
    check_alike("gated", "gate_up", gate_up)
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2:
        raise ValueError(f"gated: gate_up has shape {tuple(gate_up.shape)}, expected (..., 2 width)")
    op, limit, alpha, offset = {"swiglu": _plain_gate, "geglu": _plain_gate, "clamped_swiglu": _clamp}[gate](
        gate, **numbers
    )
    return _packed(op, gate_up, 2 if check_flag("gated", "interleaved", interleaved) else 1, limit, alpha, offset)
