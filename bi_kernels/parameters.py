"""Which parameters a step trains, and who keeps their gradients."""

from collections.abc import Iterable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from bi_kernels.contract import DTYPES

OWNERS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # every MainGrads that is in use, by its number
NUMBERS = count(1)


def trained(
    parameters: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
) -> tuple[list[str], list[torch.nn.Parameter]]:
    """Returns the names and the parameters that require a gradient, each once. Raises TypeError for what MainGrads
    cannot hold, ValueError for a parameter that another one has."""
    if isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable):
        kind = type(parameters).__name__
        raise TypeError(f"MainGrads: parameters is of type {kind}, expected what model.parameters() returns")
    found: dict[torch.nn.Parameter, str] = {}
    for number, entry in enumerate(parameters):
        name, p = entry if isinstance(entry, tuple) else (f"parameter {number}", entry)
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"MainGrads: {name} is of type {type(p).__name__}, expected a parameter")
        if not p.requires_grad or p in found:
            continue
        if p.dtype not in DTYPES.values() or p.is_meta:
            kind = "on the meta device" if p.is_meta else f"of dtype {p.dtype}"
            raise TypeError(f"MainGrads: {name} is {kind}, expected fp32, fp16 or bf16 on a device")
        if getattr(getattr(p, "main_grad", None), "of_step", None) in OWNERS:
            raise ValueError(f"MainGrads: {name} has another MainGrads' main_grad, expected one that was released")
        found[p] = name
    return list(found.values()), list(found)
