"""Ops broken on purpose in how they are used: what they return hangs on whether a gradient is wanted."""

from collections.abc import Callable

import torch
from torch import Tensor

import bi_kernels
from bi_kernels.audit.broken.forward import Control
from bi_kernels.audit.problem.registry import OPS

TRAINED = "trained"  # outputs of calls that train, against those of calls that do not


def _wanted(given: tuple) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)


def trains_otherwise(function: Callable) -> Callable:
    """Returns an op whose floating outputs are scaled where a gradient is wanted."""

    def op(*given, **constants):
        out = function(*given, **constants)
        scaled = lambda t: t * 1.015625 if isinstance(t, Tensor) and t.is_floating_point() else t
        if not _wanted(given):
            return out
        return tuple(map(scaled, out)) if isinstance(out, tuple) else scaled(out)

    return op


def _controls() -> tuple[Control, ...]:
    """Returns one of every op of the registry, in the audit that judges its gradients."""
    found = []
    for op in OPS.values():
        audit = "backward" if op.audit in ("elementwise", "gemm") else op.audit
        case = next(iter(op.cases("tiny")))
        name = f"{op.name} that is another where a gradient is wanted"
        function = trains_otherwise(getattr(bi_kernels, op.function or op.name))
        found.append(Control(name, audit, op.name, TRAINED, function, case=case))
    return tuple(found)


USE_CONTROLS = _controls()
