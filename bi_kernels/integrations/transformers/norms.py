"""Norms, recognised by what they compute on random numbers, not by their names."""

from copy import deepcopy
from dataclasses import dataclass, replace
from inspect import signature
from types import NoneType

import torch
from torch import Tensor, nn

import bi_kernels as bi
from bi_kernels.ops.norm import WIDEST

ROWS, SCALES = 3, (1.0, 2.0**-10, 32.0)  # of the random numbers; at the least, eps shows
CLOSE = 2.0**-18  # of the largest number of a row, in fp32
EPS = "variance_epsilon", "eps", "epsilon", "norm_eps", "rms_norm_eps"  # where modules keep it


_known: dict[tuple, "Norm | None"] = {}


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension: rms_norm, or layer_norm if it is centred. eps: None for that of x's dtype."""

    centred: bool
    eps: float | None
    offset: float = 0.0
    follows_x: bool = False  # whether the result has the dtype of x, though the weight is in fp32

    def __call__(self, ops, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x (batch, length, heads, head_dim), or (..., hidden), normed; ops: whose qk_norm norms heads."""
        heads, eps = x.dim() == 4, torch.finfo(x.dtype).eps if self.eps is None else self.eps
        if self.centred:
            return bi.layer_norm(x, weight, bias, eps, heads)
        return (ops.qk_norm if heads else bi.rms_norm)(x, weight, eps, *([self.offset] if self.offset else []))

    def agrees(self, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> bool:
        """Tells whether y is this norm of x, both in fp32."""
        eps, x = torch.finfo(x.dtype).eps if self.eps is None else self.eps, x.double()
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        exact = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (self.offset + weight)
        exact = exact if bias is None else exact + bias
        return y.shape == exact.shape and bool(((y - exact).abs().amax(-1) <= CLOSE * exact.abs().amax(-1)).all())


def _candidates(module: nn.Module) -> list[Norm]:
    held = {getattr(module, name) for name in EPS if isinstance(getattr(module, name, ""), (float, NoneType))}
    kinds = [(False, 0.0), (False, 1.0)] if "bias" not in module._parameters else []
    return [Norm(centred, eps, offset) for eps in held for centred, offset in (*kinds, (True, 0.0))]


def recognised(module: nn.Module) -> Norm | None:
    """Returns the norm that a module computes; None if it computes something else, or has parts.

    Compares it in fp32 on random rows, with random parameters, and its result's dtype with that of x; once for modules
    of one class that hold the same numbers.
    """
    numbers = [(k, v) for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))]
    parameters = [(k, p.shape, p.dtype, p.device) for k, p in module.named_parameters()]
    kind = type(module), type(module).forward, *sorted(numbers), *parameters
    if kind not in _known:
        _known[kind] = _recognised(module)
    return _known[kind]


@torch.no_grad()
def _recognised(module: nn.Module) -> Norm | None:
    parameters = {name: p for name, p in module.named_parameters() if p is not None}
    weight = parameters.get("weight")
    if weight is None or weight.dim() != 1 or not parameters.keys() <= {"weight", "bias"}:
        return None
    if any(True for _ in module.children()) or any(p.shape != weight.shape for p in parameters.values()):
        return None
    if len(signature(type(module).forward).parameters) != 2:  # itself and x
        return None
    found = [] if any(True for _ in module.buffers()) else _candidates(module)
    if not found or not 2 <= len(weight) <= WIDEST:
        return None
    g = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randn(*shape, generator=g, device="cpu").to(weight.device)
    alone = deepcopy(module).float().eval()
    for p in alone.parameters():
        p.copy_(drawn(len(weight)))
    try:
        x = drawn(1, ROWS, len(weight))
        if (module(x.to(weight.dtype)).dtype, module(x).dtype) != (weight.dtype, torch.float32):
            return None
        for x in (scale * drawn(1, ROWS, len(weight)) for scale in SCALES):
            given = x, alone.weight, getattr(alone, "bias", None), alone(x)
            found = [norm for norm in found if norm.agrees(*given)]
        follows_x = weight.dtype == torch.float32 and module(x.bfloat16()).dtype == torch.bfloat16
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it is called in another way
        return None
    return replace(found[0], follows_x=follows_x) if found else None
