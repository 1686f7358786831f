"""Where results and inputs lie in memory: what a call returned outlives later calls, views give the same bits, and so
does a batch of which no offset of 32 bits reaches the end."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bi_kernels.audit.callables.relations import compared, left, output_names
from bi_kernels.audit.callables.step import NoBackward, Step, gradients_kept
from bi_kernels.audit.callables.target import OutOfTime, Target, by_sample, tensors
from bi_kernels.audit.evidence.drift import AT_ONCE, compare, joined
from bi_kernels.audit.evidence.kinds import Kind, Side
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, UNSUPPORTED, Row, sentence
from bi_kernels.audit.memory import in_turn
from bi_kernels.audit.problem.inputs import generator
from bi_kernels.audit.relations.offsets import ELEMENTS, LAST, OVER_INT32
from bi_kernels.audit.reproduce.samples import in_larger, with_strides

LOST = getattr(torch, "AcceleratorError", ())  # of an access to memory that is not there
WRAPPED = "samples beyond 2**31 elements read from the first on"
LATER, GIVEN, SLICE, COLUMNS = "kept: a later call", "strides as given", "a slice of a batch", "a slice of columns"
BACKWARD = "kept: a backward after a later call"


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
        axes=[Kind.KEPT],
    )


def _interrupted(step: Step, leaves: dict, shared: dict, outputs: list, upstream: list) -> None:
    """Calls the callable on other samples, in the same shapes, between forward and backward."""
    step.forward(step.t.every[::-1], "stale", shared)
    torch.autograd.backward(outputs, upstream)


def kept_for_backward(t: Target, whole: dict[str, torch.Tensor]) -> list[Row]:
    """What a forward saved must be its own when another has run before its backward."""
    found = Step(t, backward=_interrupted).gradients([t.every])
    return left(t, BACKWARD, found, whole, against="without the later call", rows=t.count, axes=[Kind.KEPT])


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
    sliced = lambda dims: lambda k, v: in_larger(v, dims(v)) if k in t.batched else v.clone()
    out = {SLICE: sliced(lambda v: {t.batch}), COLUMNS: sliced(lambda v: {t.batch, v.dim() - 1})}
    if any(not v.is_contiguous() for k, v in tensors(t.values).items() if k not in t.outputs):
        out[GIVEN] = lambda k, v: with_strides(v, v.stride())
    return out


def _placed(t: Target, layout: str, place: Callable, whole: list[torch.Tensor]) -> list[Row]:
    """Compares the whole batch, its inputs lying otherwise in memory, with the whole batch; a callable that refuses
    what does not lie in one piece, and says so, is not judged."""
    arguments = laid(t, place)
    said = {"against": "in one piece", "rows": t.count, "axes": [Kind.MEMORY]}
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


def applies(t: Target) -> bool:
    """Tells whether a batch beyond 2**31 elements is asked of a callable: on a GPU, in bf16."""
    return t.device.type == "cuda" and t.dtype == torch.bfloat16


def beyond(t: Target, elements: int = ELEMENTS, seconds: float = 120) -> list[Row]:
    """Compares the results and the gradients of a batch whose largest tensor has more than so many elements with those
    of two samples: the first one over and over, and the last one where no offset of 32 bits reaches. A callable that
    refuses so many samples, or for which memory is lacking, is not judged; one after which the GPU answers no more
    needs a fix."""
    clear = lambda error: NEEDS_FIX if isinstance(error, LOST) or "CUDA error" in str(error) else UNSUPPORTED
    made = partial(in_turn, partial(_beyond, t, elements))
    t.deadline = time.monotonic() + seconds
    try:
        return t.attempt("invariance", OVER_INT32, made, clear, against="two samples")
    except OutOfTime:
        return [t.row("invariance", OVER_INT32, verdict=UNSUPPORTED, detail=f"not made within {seconds:g} s")]
    finally:
        t.deadline = math.inf


def wrapped(y: torch.Tensor, x: torch.Tensor, t: Target, held: dict) -> torch.Tensor:
    """Gives the last samples of a large batch the results of the first: the control of `beyond`."""
    rows = y.movedim(t.batch, 0)
    return torch.cat((rows[:-LAST], rows[:LAST])).movedim(0, t.batch) if len(rows) > LAST else y


def _beyond(t: Target, elements: int) -> list[Row]:
    upstream: list[torch.Tensor] = []
    few = _repeated(t, 1, 1, upstream)
    held = [v.movedim(t.batch, 0) for k, v in tensors(t.values).items() if k in t.batched]
    width = max(v[0].numel() for v in (*held, *few.values()))
    count = -(-elements // width) + LAST
    many, rows = _repeated(t, count - LAST, LAST, upstream), []
    said = {"against": "two samples", "rows": count, "detail": f"{count * width} elements in the largest tensor"}
    for name, (first, last) in few.items():
        step = max(1, AT_ONCE // max(1, first.numel()))
        starts = [*range(0, count - LAST, step), count - LAST]
        parts = []
        for at, end in zip(starts, [*starts[1:], count]):
            part = many[name][at:end]
            drift = compare(part, (last if end == count else first).expand(part.shape))
            first_at = drift.first_index and (drift.first_index[0] + at, *drift.first_index[1:])
            parts.append(replace(drift, first_index=first_at))
        of_input = name not in output_names(t)
        told = said | ({"side": Side.INPUT} if of_input else {})
        relation = "gradient invariance" if of_input else "invariance"
        rows.append(t.row(relation, OVER_INT32, joined(parts), tensor=name, **told))
    return rows


def _repeated(t: Target, a: int, b: int, upstream: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns what a call on the first sample `a` times and the last one `b` times gives, a row a sample: results and,
    where there is a backward, gradients of inputs; upstream: of two samples, drawn where there is none."""
    arguments, leaves = dict(t.values), {}
    for k, v in tensors(t.values).items():
        arguments[k] = _spread(v, t.batch, a, b) if k in t.batched else v.clone()
        if k in t.batched and k not in t.outputs and f"d{k}" in t.trained:
            leaves[k] = arguments[k].requires_grad_()
            arguments[k] = leaves[k].clone()  # so that it may work in place
    with gradients_kept(t.module), torch.set_grad_enabled(bool(leaves)):
        for p in t.module.parameters() if t.module else ():
            vars(p).pop("main_grad", None)
        outputs = t.results(arguments)
        found = dict(zip(output_names(t), (y.detach() for y in t.rows(outputs, a + b))))
        trained = [(y, d) for y, d in zip(outputs, t.dims) if d is not None and y.requires_grad]
        if not leaves or not trained:
            return found
        if not upstream:
            g = generator(t.device, t.seed, OVER_INT32)
            made = (by_sample(y, d, 2) for y, d in trained)
            upstream += [torch.randn(y.shape, generator=g, device=t.device).to(y.dtype) for y in made]
        given = [_spread(dy, 0, a, b).movedim(0, d).flatten(d, d + 1) for dy, (_, d) in zip(upstream, trained)]
        grads = torch.autograd.grad([y for y, _ in trained], [*leaves.values()], given, allow_unused=True)
    return found | {f"d{k}": g.movedim(t.batch, 0) for k, g in zip(leaves, grads) if g is not None}


def _spread(v: torch.Tensor, batch: int, a: int, b: int) -> torch.Tensor:
    """Returns the first sample of a tensor `a` times, and then its last one `b` times."""
    shape = list(v.shape)
    shape[batch] = a + b
    whole = v.new_empty(shape)
    whole.narrow(batch, 0, a).copy_(v.narrow(batch, 0, 1))
    whole.narrow(batch, a, b).copy_(v.narrow(batch, v.shape[batch] - 1, 1))
    return whole
