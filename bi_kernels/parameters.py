"""Which parameters a step trains, and who keeps their gradients."""

from collections.abc import Iterable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from bi_kernels.checks import check_numbers
from bi_kernels.compat import current_node, overlaps_itself
from bi_kernels.contract import DTYPES
from bi_kernels.scalars import one_line, truncated_repr

LIVE_MAIN_GRADS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # every MainGrads that is in use, by its number
IDS = count(1)


def trained(
    parameters: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
) -> tuple[list[str], list[torch.nn.Parameter]]:
    """Returns the names and the parameters that require a gradient, each once. Raises TypeError for what MainGrads
    cannot hold, ValueError for a parameter that another one has."""
    if isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable):
        kind = type(parameters).__name__
        raise TypeError(f"MainGrads: parameters is of type {kind}, expected what model.parameters() returns")
    if torch.is_inference_mode_enabled():
        raise ValueError("MainGrads: parameters were given in inference_mode, expected a call outside of it")
    found: dict[torch.nn.Parameter, str] = {}
    for number, entry in enumerate(parameters):
        named = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
        name, p = entry if named else (f"parameter {number}", entry)
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"MainGrads: {name} is of type {type(p).__name__}, expected a parameter")
        if not p.requires_grad or p in found:
            continue
        if p.dtype not in DTYPES.values() or p.is_meta:
            kind = "on the meta device" if p.is_meta else f"of dtype {p.dtype}"
            raise TypeError(f"MainGrads: {name} is {kind}, expected fp32, fp16 or bf16 on a device")
        check_numbers("MainGrads", name, p)
        if not p.is_leaf or p.is_inference() or overlaps_itself(p):
            raise ValueError(f"MainGrads: {name} cannot be written to in place, expected a module's parameter")
        if getattr(getattr(p, "main_grad", None), "of_step", None) in LIVE_MAIN_GRADS:
            raise ValueError(f"MainGrads: {name} has another MainGrads' main_grad, expected one that was released")
        found[p] = name
    return list(found.values()), list(found)


def tied_among(parameters: list[torch.nn.Parameter], tied: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Returns what is tied, each once. Raises TypeError for what are no parameters, ValueError for one that is not
    trained."""
    if isinstance(tied, torch.Tensor) or not isinstance(tied, Iterable):
        raise TypeError(f"MainGrads: tied is {truncated_repr(tied)}, expected a list of parameters")
    found: dict[torch.nn.Parameter, None] = {}
    for t in tied:
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"MainGrads: tied holds {truncated_repr(t)}, expected a parameter")
        if not t.requires_grad:
            raise ValueError("MainGrads: tied holds a parameter that requires no gradient, expected one that does")
        if all(t is not p for p in parameters):
            raise ValueError("MainGrads: tied holds a parameter that is not among the parameters given")
        found[t] = None
    return list(found)


def check_own(op: str, name: str, weight: torch.Tensor) -> None:
    """Raises ValueError for the copy of a parameter that a reentrant checkpoint passes on: what an op leaves there goes
    to the parameter's `.grad`, beside its main_grad."""
    if not weight.is_leaf or current_node() != "CheckpointFunctionBackward":
        return
    there = [p for owner in LIVE_MAIN_GRADS.values() for p in owner.parameters if p.data_ptr() == weight.data_ptr()]
    if weight.numel() and there and all(p is not weight for p in there):
        raise ValueError(
            f"{op}: {name} is a copy of a parameter, made by a reentrant checkpoint, and has no main_grad; let the "
            "checkpointed function hold the parameter, or set use_reentrant=False"
        )


def masters_of(state: dict, expected: dict, masters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the masters that a saved state holds. Raises ValueError for a state of another run than `expected`
    says."""
    state = state if isinstance(state, dict) else {}
    for name, mine in expected.items():
        theirs = state.get(name)
        if one_line(theirs) != one_line(mine):
            raise ValueError(
                f"MainGrads: the state's {name} is {truncated_repr(theirs)}, expected {truncated_repr(mine)}"
            )
    theirs, shapes = state.get("masters"), [m.shape for m in masters]
    whole = isinstance(theirs, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in theirs)
    if not whole or [t.shape for t in theirs] != shapes or any(t.dtype != torch.float32 for t in theirs):
        expected = [tuple(s) for s in shapes]
        raise ValueError(
            f"MainGrads: the state's masters are {truncated_repr(theirs)}, expected fp32 tensors of {expected}"
        )
    for t in theirs:
        check_numbers("MainGrads", "a master of the state", t)
    return theirs
