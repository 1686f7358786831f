"""The relations of any callable, between calls on parts of its batch, in layouts that need no knowledge of the op."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bi_kernels import contract
from bi_kernels.audit.axes import Kind
from bi_kernels.audit.checks.requests import AGAINST, MOST, gradient_requests
from bi_kernels.audit.compare import compare, raw
from bi_kernels.audit.findings import ACCURACY, DETERMINISM, INVARIANCE, UNSUPPORTED, Row, grouped, needs_fix, sentence
from bi_kernels.audit.step import NoBackward, Results
from bi_kernels.audit.targets.any_callable import REFUSALS, SAMPLE, WHOLE, CallableTarget, Layout, tensors
from bi_kernels.audit.targets.callable_step import Step
from bi_kernels.contract import CONTRACT, dtype_name

UNBUFFERED, KEPT = "no main_grad, the batch in reverse", "the upstream gradient is kept"
SINGLES = 16  # samples that are computed alone, spread over the batch
RANDOM = "random: equal once torch.manual_seed is called before each call; nothing else was judged"
UNSTEADY = "not deterministic, whatever the seed; nothing else was judged"


def plan(count: int, seed: int = 0) -> dict[str, Layout]:
    """Returns the layouts of `count` samples by name; behind "neighbours:" that says what fills other samples'
    places."""
    every = list(range(count))
    some = torch.linspace(0, count - 1, min(count, SINGLES), dtype=torch.float64, device="cpu").round().int().tolist()
    third, pad = max(1, count // 3), -count % 16 or 16
    order = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()
    order = order if order != every else every[::-1]
    beside = [[i if i % 2 == parity else -1 for i in every] for parity in (0, 1)]
    return {  # those that tell most come first, should the time run out
        "singles": [[i] for i in some],
        "permuted": [order],
        "padded": [every + [-1] * pad],
        "left_padded": [[-1] * pad + every],
        "micro_batches:ragged": [every[:third], every[third:]],
        "neighbours": beside,
        "neighbours:nonfinite": beside,
        "neighbours:largest": beside,
        **{f"rows:{m}": [every[:m]] for m in contract.rows(count) if m < count},
    }


def filler_of(layout: str) -> str:
    """Returns what a layout fills places without a sample with."""
    return layout.partition(":")[2] if layout.startswith("neighbours:") else "stale"


class Refused(Exception):
    """Raised where a callable does not take NaN, or the largest number, beside its samples."""


def filled(name: str, layout: Layout, make: Callable):
    """Returns what `make` makes with a layout's filler; one of the samples fills what a callable refuses to take filled
    otherwise. Raises Refused where it refuses NaN or the largest number."""
    try:
        return make(filler_of(name))
    except NoBackward:
        raise
    except REFUSALS as error:
        if filler_of(name) != "stale":
            raise Refused(sentence(error)) from None
        if all(i >= 0 for call in layout for i in call):
            raise
        return make(SAMPLE)


def samples_of(layout: Layout) -> list[int]:
    """Returns the samples of a layout, in their order: it may leave some out."""
    return sorted(i for call in layout for i in call if i >= 0)


def determinism(t: CallableTarget, runs: int) -> list[Row]:
    """Repeats the same call; where it differs, finds out whether a seed makes it the same."""
    first = t.whole()
    said = {"against": "itself", "rows": t.count, "detail": f"{runs} runs"}
    for _ in range(runs - 1):
        rows = t.compared(DETERMINISM, "whole batch", t.whole(), first, **said)
        if needs_fix(rows):
            seeded = []
            for _ in range(2):
                torch.manual_seed(t.seed)
                seeded.append(tuple(t.whole()))
            why = UNSTEADY if compare(*seeded).mismatches else RANDOM
            rows = [replace(r, detail=why) for r in rows]
            break
    return rows


def invariance(t: CallableTarget, name: str, layout: Layout, whole: dict) -> list[Row]:
    """Compares every sample's bits under a layout with those of the whole batch."""
    samples = samples_of(layout)
    sizes = ", ".join(map(str, sorted({len(call) for call in layout})))
    said = {"rows": max(map(len, layout)), "detail": f"{len(layout)} call{'s' * (len(layout) > 1)} of {sizes}"}

    def rows(kind: str) -> list[Row]:
        wanted = [w[samples] for w in whole[kind]]
        try:
            found = filled(name, layout, lambda filler: t.compute(layout, filler, kind))
        except Refused as error:
            return [t.row("invariance", name, inputs=kind, verdict=UNSUPPORTED, rows=said["rows"], detail=str(error))]
        out = t.compared("invariance", name, found, wanted, inputs=kind, **said)
        for number, row in enumerate(out):
            if row.mismatches:
                at = row.first_index[0]
                said_of = {name: found[number][at], WHOLE: wanted[number][at]}
                out[number] = replace(row, detail=f"{row.detail}; {blame(t, samples[at], number, said_of, kind)}")
        return out

    return [row for kind in whole for row in t.attempt("invariance", name, lambda: rows(kind), inputs=kind, **said)]


def blame(t: CallableTarget, sample: int, number: int, said: dict[str, torch.Tensor], kind: str) -> str:
    """Says which calls make something else of a sample than most: it is computed again alone, and in a half and in a
    third of the batch, of `said`, what each of two calls made of it."""
    if (sample, kind) not in t.votes:
        parts = {"alone": [sample]}
        for share, many in (("a half", 2), ("a third", 3)):
            size = -(-t.count // many)
            start = min(sample // size * size, t.count - size)
            parts[share] = list(range(start, start + size))
        made = t.votes[sample, kind] = {}
        for what, part in parts.items():
            with contextlib.suppress(Exception):  # a call that it refuses has no vote
                made[what] = [y[part.index(sample)] for y in t.compute([part], kind=kind)]
    votes = {what: ys[number] for what, ys in t.votes[sample, kind].items()}
    votes = {what: y for what, y in votes.items() if (what == "alone") <= ("singles" not in said)} | said
    alike = grouped(votes, lambda what: (votes[what].dtype, tuple(raw(votes[what]).flatten().tolist())))
    most, *others = sorted(alike.values(), key=len, reverse=True)
    if others and len(others[0]) == len(most):
        return f"sample {sample}: no result in most calls, {' | '.join(', '.join(group) for group in alike.values())}"
    return f"sample {sample}: {', '.join(what for group in others for what in group)} against {', '.join(most)}"


def requests(t: CallableTarget, step: Step) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges each way to ask for a backward of the whole batch."""
    said = {"against": "all gradients wanted", "rows": t.count, "axes": [Kind.DEMAND]}

    def unbuffered() -> tuple[Results, Results]:
        found = step.gradients([t.every[::-1]], main_grad=False)
        wanted = step.gradients([t.every], main_grad=False)
        return found, {k: v for k, v in wanted.items() if k[1:] not in t.batched}

    def kept() -> list[Row]:
        seen, before = [], []

        def upstream(number: int, dy: torch.Tensor) -> torch.Tensor:
            seen.append(dy)
            before.append(dy.clone())
            return dy

        step.made(upstream=upstream)
        told = said | {"against": "itself before", "tensor": "upstream", "detail": "backward writes into it"}
        return [t.row(INVARIANCE, KEPT, compare(a, b), **told) for a, b in zip(seen, before)]

    asked = gradient_requests(step, exact=False)
    if (count := len(step.folded) - len(step.trained)) > MOST:
        t.refused["each gradient alone"] = f"there are {count}, of which the first {MOST} were asked"
    of_zeros = lambda name: "zeros of the others" if name.startswith("output ") else said["against"]
    row = lambda name, variant, **more: partial(t.gradient_rows, name, variant, **said | more)
    out = {name: row(name, variant, against=AGAINST.get(name, of_zeros(name))) for name, variant in asked.items()}
    in_order = row(UNBUFFERED, unbuffered, against="the whole batch, in its order", axes=[Kind.PLACE])
    return out | {UNBUFFERED: in_order, KEPT: kept}


def gradients(t: CallableTarget, step: Step, name: str, layout: Layout, whole: dict) -> list[Row]:
    """Compares what backward left under a layout with what it left for the whole batch."""
    said, samples = {"rows": max(map(len, layout)), "inputs": step.kind}, samples_of(layout)

    def rows() -> list[Row]:
        try:
            found = filled(name, layout, lambda filler: step.gradients(layout, filler))
        except Refused as error:
            return [t.row(INVARIANCE, name, verdict=UNSUPPORTED, detail=str(error), **said)]
        # NaN beside a sample is in the sum over samples, and one that is left out is not
        summed = filler_of(name) == "stale" and len(samples) == t.count
        batched = {k: k.removeprefix("d") in t.batched for k in whole}
        wanted = {k: v[samples] if batched[k] else v for k, v in whole.items() if batched[k] or summed}
        return t.differences(INVARIANCE, name, found, wanted, **said)

    return t.attempt(INVARIANCE, name, rows, **said)


def _limit(low: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what a result may be off: so many times the reference's own error in the inputs' dtype, and one
    rounding."""
    u, tiny = contract.rounding(dtype)
    error = (low.double() - exact).abs()
    own = max(error[error.isfinite()].tolist(), default=0.0)  # where both have a number
    return (CONTRACT["any"]["accuracy"] * own + u * exact.abs() + tiny).expand_as(exact)


def _errors(
    t: CallableTarget, relation: str, found: dict, made: Callable[[dict, torch.dtype | None], dict]
) -> list[Row]:
    """Measures the error of what was found against what `made` makes of the arguments in fp64: at most twice that of
    what it makes of them as given, and one rounding (the criterion of FlashAttention's tests)."""
    raised = t.values | {k: v.double() for k, v in tensors(t.values).items() if v.is_floating_point()}
    low, exact = made(t.values, None), made(raised, torch.float64)
    said = {"inputs": "given", "rows": t.count, "detail": f"twice the reference's own error in {dtype_name(t.dtype)}"}
    limit = lambda k, y: _limit(low[k], exact[k], y.dtype)
    return [
        t.against_bound(relation, y, exact[k].double(), limit(k, y), y.dtype, tensor=k, **said)
        for k, y in found.items()
        if k in exact
    ]


def gradient_accuracy(t: CallableTarget, step: Step, whole: dict, reference: Callable) -> list[Row]:
    """Measures the error of the inputs' gradients against those of `reference`."""

    def made(values: dict, dtype: torch.dtype | None) -> dict:
        other = copy.copy(t)
        other.function, other.module, other.values, other.drawn, other.compiled = reference, None, values, {}, False
        of = Step(other)
        of.dy = [dy.to(dtype or dy.dtype) for dy in step.dy]
        return of.gradients()

    return _errors(t, ACCURACY, whole, made)


def accuracy(t: CallableTarget, reference: Callable) -> list[Row]:
    """Measures the error of results against those of `reference`."""
    judged = lambda found: {name: found[i] for i, name in zip(t.judged, t.output_names())}

    def made(values: dict, dtype: torch.dtype | None) -> dict:
        found = t.found_in(t.returned(reference, values), t.count)
        if len(found) != len(t.dims):
            raise ValueError(f"the reference returned {len(found)} tensors, expected {len(t.dims)}, as {t.name} does")
        return judged(found)

    return _errors(t, "accuracy", judged(t.call(t.every)), made)
