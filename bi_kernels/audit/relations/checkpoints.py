"""Activation checkpointing, as ways of one call: see `uses`. What is computed again in the backward changes no bit."""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from bi_kernels.audit.relations.one_call import BaselineCall, Outputs
from bi_kernels.audit.relations.step import token_layout
from bi_kernels.tokens import TokenLayout

CHECKPOINTED = "checkpointed"
FROZEN = "frozen parameters"
FROZEN_CHECKPOINTED = f"{FROZEN}, {CHECKPOINTED}"


def _again(u: BaselineCall, layout: TokenLayout | None = None) -> Callable:
    """Returns the candidate in a checkpoint, under a layout both times where there is one."""
    call = layout.within(u.subject.called) if layout else u.subject.called
    return partial(checkpoint, call, use_reentrant=False)


def checkpointed(u: BaselineCall) -> tuple[Outputs, Outputs]:
    """Compares all outputs and gradients of the call in a checkpoint, those that main_grad holds as well."""
    function = _again(u, token_layout(u.call, u.step.lengths))
    found, expected = u.made(function=function), dict(u.base)
    if parameters := trained_and_frozen(u)[1]:
        for into, way in ((found, function), (expected, None)):
            given = u.inputs()
            u.made(given=given, main_grad=True, function=way)
            into |= {f"main_grad of {k}": given[k].main_grad for k in parameters}  # not what is left in .grad
    return found, expected


def trained_and_frozen(u: BaselineCall) -> tuple[list[str], list[str]]:
    """Returns the names of the floating inputs, of tokens and of parameters."""
    return [k for k in u.floating if k in u.step.tokens], [k for k in u.floating if k in u.step.shared]


def frozen(u: BaselineCall, again: bool = False) -> tuple[Outputs, Outputs]:
    """Compares what the call gives where no parameter trains, and what their main_grad holds then; again: in a
    checkpoint. Whoever trains no parameter folds nothing, and so needs no layout."""
    tokens, parameters = trained_and_frozen(u)
    given = u.inputs()
    for k in parameters:
        given[k].main_grad = torch.zeros_like(given[k], dtype=torch.float32)
    u.step.says_layout = False
    try:
        with TokenLayout([0], [1], 1):  # of another call
            made = u.made(tokens, given=given, function=_again(u) if again else None)
    finally:
        u.step.says_layout = True
    held = {f"main_grad of a frozen {k}": given[k].main_grad for k in parameters}
    expected = u.results | {f"d{k}": u.base[f"d{k}"] for k in tokens}
    return made | held, expected | {k: torch.zeros_like(t) for k, t in held.items()}
