"""Where results and inputs lie in memory: what a call returned outlives later calls, and views give the same bits."""

from collections.abc import Callable
from functools import partial

import torch

from bi_kernels.audit.callables.relations import compared, left
from bi_kernels.audit.callables.step import NoBackward, Step
from bi_kernels.audit.callables.target import Target, tensors
from bi_kernels.audit.evidence.verdicts import UNSUPPORTED, Row, sentence

LATER, GIVEN, SLICE, COLUMNS = "kept: a later call", "strides as given", "a slice of a batch", "a slice of columns"
BACKWARD = "kept: a backward after a later call"
BESIDE = 16  # rows, or columns, of others before a slice: what a kernel loads at once stays aligned


def _kept(t: Target) -> list[Row]:
    """Another call, on other samples in the same shapes, must leave alone what the first one returned."""
    with torch.no_grad(), t.layout(t.every):
        first = t.results(t.take(t.every))
        before = [y.clone() for y in first]
        t.results(t.take(t.every[::-1]))
    return compared(
        t,
        "invariance",
        LATER,
        t.rows(first, t.count),
        t.rows(before, t.count),
        against="itself before",
        rows=t.count,
        detail="a later call writes into what this one returned",
    )


class _Interrupted(Step):
    """A step between whose forward and backward the callable is called on other samples, in the same shapes."""

    def run(self, leaves: dict, shared: dict, outputs: list, upstream: list) -> None:
        super().forward(self.t.every[::-1], "stale", shared)
        torch.autograd.backward(outputs, upstream)


def kept_for_backward(t: Target, whole: dict[str, torch.Tensor]) -> list[Row]:
    """What a forward saved must be its own when another has run before its backward."""
    found, said = _Interrupted(t).gradients([t.every]), {"against": "without the later call", "rows": t.count}
    return left(t, BACKWARD, found, whole, **said)


def _neighboured(v: torch.Tensor, batch: int, columns: bool) -> torch.Tensor:
    """Returns a view of a larger tensor that holds NaN around it, and of numbers that are integers others of them."""
    shape, at = list(v.shape), [slice(None)] * v.dim()
    for d in {batch, v.dim() - 1} if columns else {batch}:
        shape[d] += 2 * BESIDE
        at[d] = slice(BESIDE, BESIDE + v.shape[d])
    holds_nan = v.is_floating_point() or v.is_complex()
    larger = v.new_full(shape, float("nan") if holds_nan else int(v.flatten()[0]))
    larger[tuple(at)] = v
    return larger[tuple(at)]


def _as_given(v: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the strides of the original."""
    if v.numel() == 0:
        return v.clone()
    extent = 1 + sum((n - 1) * s for n, s in zip(v.shape, v.stride()))
    copy = v.new_empty(extent).as_strided(v.shape, v.stride())
    if any(s == 0 and n > 1 for n, s in zip(v.shape, v.stride())):
        narrow = [slice(0, 1) if s == 0 else slice(None) for s in v.stride()]
        copy[tuple(narrow)] = v[tuple(narrow)]
    else:
        copy.copy_(v)
    return copy


def laid(t: Target, place: Callable) -> dict:
    """Returns the whole batch's arguments, its inputs lying where `place` puts them."""
    arguments = t.take(t.every)
    for k, v in tensors(t.values).items():
        if k not in t.outputs:
            arguments[k] = place(k, v)
    return arguments


def called(t: Target, arguments: dict) -> list[torch.Tensor]:
    """Returns the whole batch's outputs, a row a sample, of arguments so laid."""
    with torch.no_grad(), t.layout(t.every):
        return t.rows(t.results(arguments), t.count)


def places(t: Target) -> dict[str, Callable]:
    """Returns where else in memory inputs are asked to lie: what puts an input of that name there."""
    sliced = lambda columns: lambda k, v: _neighboured(v, t.batch, columns) if k in t.batched else v.clone()
    out = {SLICE: sliced(False), COLUMNS: sliced(True)}
    if any(not v.is_contiguous() for k, v in tensors(t.values).items() if k not in t.outputs):
        out[GIVEN] = lambda k, v: _as_given(v)
    return out


def _placed(t: Target, layout: str, place: Callable, whole: list[torch.Tensor]) -> list[Row]:
    """Compares the whole batch, its inputs lying otherwise in memory, with the whole batch; a callable that refuses
    what does not lie in one piece, and says so, is not judged."""
    arguments = laid(t, place)
    said = {"against": "in one piece", "rows": t.count}
    try:
        found = called(t, arguments)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        return [t.row("invariance", layout, verdict=UNSUPPORTED, detail=sentence(error), **said)]
    return compared(t, "invariance", layout, found, whole, **said)


def memory(t: Target, whole: list[torch.Tensor]) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges each place in memory against the whole batch."""
    out = {layout: partial(_placed, t, layout, place, whole) for layout, place in places(t).items()}
    return {LATER: partial(_kept, t)} | out


def backward_memory(t: Target, whole: dict[str, torch.Tensor]) -> dict[str, Callable[[], list[Row]]]:
    def run() -> list[Row]:
        try:
            return kept_for_backward(t, whole)
        except NoBackward:
            return []

    return {BACKWARD: run}
