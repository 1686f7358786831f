"""fp64 references: name(...) returns (y, S), the exact result and the sum of magnitudes that the contract's bound uses.

Inputs are the op's own inputs, already rounded to their dtype, upcast to fp64 here.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu as _gelu


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x, w, b = x.double(), weight.double(), 0.0 if bias is None else bias.double()
    return x @ w.T + b, x.abs() @ w.abs().T + (b.abs() if bias is not None else 0.0)


def matmul(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return linear(a, b.T)


def rope(x: Tensor, table, positions: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """From the angles themselves, at rope_table's default theta; the rounded values of `table` are not used."""
    dim = x.shape[-1]
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angle = positions.double()[..., None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    x = x.double()
    x1, x2 = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    join = (lambda a, b: torch.stack((a, b), -1).flatten(-2)) if interleaved else (lambda a, b: torch.cat((a, b), -1))
    cos_, sin_ = cos.abs(), sin.abs()
    return (join(x1 * cos - x2 * sin, x2 * cos + x1 * sin),
            join(x1.abs() * cos_ + x2.abs() * sin_, x2.abs() * cos_ + x1.abs() * sin_))


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.double()
    y = x * torch.sigmoid(x)
    return y, y.abs() * (4 + x.abs()) + 2.0**-103 * x.abs()


def swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    g, up = gate.double(), up.double()
    y = g * torch.sigmoid(g) * up
    return y, y.abs() * (4 + g.abs()) + 2.0**-103 * (g * up).abs()


def gelu(x: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    x = x.double()
    if approximate == "tanh":
        y = x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    else:
        y = _gelu(x)
    return y, x.abs()


def add(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return x.double() + residual.double(), x.double().abs() + residual.double().abs()


def scale(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    y = x.double() * factor
    return y, y.abs()


def bias_add(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return add(x, bias)


def mask_fill(x: Tensor, mask: Tensor, value: float) -> tuple[Tensor, Tensor]:
    y = x.double().masked_fill(mask, value)
    return y, torch.zeros_like(y)


def cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.double(), torch.zeros_like(x, dtype=torch.float64)
