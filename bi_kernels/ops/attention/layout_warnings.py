"""Warnings of sequences that attention is told of, and the token layout is not."""

import warnings
from collections.abc import Callable

import torch

from bi_kernels import checks
from bi_kernels.tokens import TokenLayout, current_layout, inferred_any


def warn_on_mismatch(op: str, name: str, value: torch.Tensor, spans: Callable[[], list[tuple[int, int]]], *how) -> None:
    """Warns where attention is told of other sequences than those of the layout that is entered. spans:
    where each starts, and its length, as `value` says and `how`; asked once for them and a layout."""
    layout = current_layout(op)
    if not isinstance(layout, TokenLayout) or not checks.needs_validation(question := ("layout", layout, *how), value):
        return
    told = [span for span in spans() if span[1]]
    if told != layout.spans:
        lengths = [[length for _, length in of][:8] for of in (told, layout.spans)]
        said = "in other places" if lengths[0] == lengths[1] else f"of lengths {lengths[1]}"
        warnings.warn(
            f"{op}: {name} holds sequences of lengths {lengths[0]}, but the token layout has sequences {said}, by "
            "which parameters' gradients are added; expected the layout of this very call",
            stacklevel=3,
        )
    checks.mark_validated(question, value)


def warn_if_no_layout(op: str, sequences: int) -> None:
    """Warns of sequences that attention is told of, in a forward that trains, while other ops fold parameters'
    gradients by the shapes that they see."""
    if inferred_any.get() and current_layout(op) is None:
        warnings.warn(
            f"{op}: {sequences} packed or padded sequences, but no token layout is entered, so parameters' gradients "
            "depend on the batch; expected the forward inside `with TokenLayout.packed(...)` or `.padded(...)`",
            stacklevel=3,
        )
