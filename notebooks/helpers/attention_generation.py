"""Judges long and uneven sequences in several calls: generation against a cache, uneven samples, places to begin."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch

from bi_kernels import contract, reference
from bi_kernels.audit.checks import gradient as gradients
from bi_kernels.audit.compare import Drift, Tensors, compare
from bi_kernels.audit.controls import attention as controls
from bi_kernels.audit.findings import Row
from bi_kernels.audit.layouts import Call, pack, pad, shapes_launched, spans
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.ops.attention.schedule import SCHEDULE, Tiling
from helpers.common import is_ours

PAGE = 16
GENERATED = {
    True: [(4200, 256, (1, 7, 16, 64, 100, 1000)), (32768, 256, (1, 1000))],  # tokens, of which last, in chunks of
    False: [(132, 6, (1, 4))],
}
LAST = 16  # queries of a long sequence that are held against fp64
SCORES = {"": 1, ", large scores": 8}  # factors: with 1, splits that weigh too little do not show in a long mean
UNEVENLY = ("packed", "permuted", "batch", "left_padded")
UNEVEN = {True: (16384, 1, 700, 15, 5000, 129, 2, 64), False: (130, 1, 70, 15, 2)}
STARTS = {True: range(1, 65), False: (1, 31, 62, 63, 64)}  # of the queries; a block has 64 keys
FROM = {True: 1100, False: 40}  # queries, enough for prefill
# for the interpreter: its short sequences have several splits and are prefill, in programs that are few
SMALL = replace(SCHEDULE, split=64, few=4, decode=Tiling(128, 64, 4, 4), merge_rows=256)
SCHEDULES = {True: SCHEDULE, False: SMALL}


def later_splits_weigh_more(q, k, v, defect=True, schedule=SCHEDULE, **told):
    """Gives them a quarter more, as if their maximum were too small."""
    attention, split = controls.in_schedule(schedule), schedule.split
    near = attention(q, k, v, **told)
    if not defect:
        return near
    far = attention(q, k, v, lengths_k=torch.full((len(k),), split, device=k.device), causal=False)
    share = (far[1] - near[1]).exp()[..., None] if k.shape[1] > split else torch.ones_like(near[1])[..., None]
    rest = (near[0].float() - share * far[0].float()) * 1.25
    return (share * far[0].float() + rest).div(share + 1.25 * (1 - share)).to(q.dtype), near[1]


def scheduled(session, s: OpUnderTest, **changed) -> OpUnderTest:
    """Returns the subject in another schedule, if it is this package's, on the interpreter one of small splits."""
    schedule = replace(SCHEDULES[session.on_gpu], **changed)
    return replace(s, function=controls.in_schedule(schedule)) if is_ours(session) else s


class Way(NamedTuple):
    """Names a way to compute a long sequence."""

    name: str
    tokens: int
    tail: int  # tokens that are not in the first call
    size: int  # of the chunks that these are in
    page: int = 0  # keys of a page, or 0
    changed: Mapping = {}  # of the schedule


def ways(session, s: OpUnderTest) -> list[Way]:
    """Returns the ways to compute the long sequences; of the op with a window, at the first length, decode and the
    longest chunks alone."""
    found, windowed = [], bool(s.problem.op.constants)
    for n, tail, sizes in GENERATED[session.on_gpu][: 1 if windowed else None]:
        if s.problem.dtype == torch.float32 and n > 10_000:  # no tensor core: it would take minutes
            continue
        ends = sizes[0], sizes[-1]
        for size in ends if windowed else sizes:
            name, last = "decode" if size == 1 else f"chunked:{size}", min(n - 1, max(tail, 4 * size))
            found.append(Way(f"{name}, cache of {n}", n, last, size))
            if is_ours(session) and size in ends:
                found.append(Way(f"{name}, pages of {PAGE} of {n}", n, last, size, PAGE))
        if is_ours(session):
            found.append(Way(f"decode, splits in one program, cache of {n}", n, LAST, 1, changed={"most": 0}))
    return found


def parts(n: int, tail: int, size: int) -> list[Call]:
    """Returns a sequence's calls: all but its tail in one, and then the chunks."""
    starts = range(n - tail, n, size)
    return [Call(np.arange(*at)[None]) for at in pairwise([0, *starts, n])]


def generation(session, number: int) -> list[Row]:
    """Judges a long sequence in one call against the same tokens decoded one by one and in chunks, against a cache that
    lies in one piece or in shuffled pages; its last queries against fp64, and again."""
    subject, rows = session.make()[number], []
    for n, mine in groupby(ways(session, subject), lambda way: way.tokens):
        s = scheduled(session, replace(subject, own_lengths=(n,), memo={}))
        whole = cache(lambda: s.compute([pack(spans((n,)))]))
        for way in mine:
            other = scheduled(session, s, **way.changed)
            rows += against_one_call(other, way.name, parts(n, way.tail, way.size), whole, page=way.page)
        rows += last_queries(s)
    return rows


def later_splits(session, _) -> list[Row]:
    """Judges the control whose later splits weigh more."""
    function = partial(later_splits_weigh_more, schedule=SCHEDULES[session.on_gpu])
    s = session.subject("attention", session.dtypes[0], function, "later splits weigh more")
    return [as_control(last_queries(replace(s, own_lengths=GENERATED[session.on_gpu][-1][:1])))]


def last_of(tokens: int, suffix: str) -> str:
    """Returns the layout of the last queries of a sequence."""
    return f"last {LAST} of {tokens}{suffix}"


def last_queries(s: OpUnderTest) -> list[Row]:
    """Judges the last queries of a long sequence, of several splits, in one call: against fp64, and ten times."""
    (n,), constants, rows = s.lengths, s.problem.op.constants, []
    q, k, v = s.inputs("normal", n)[0].values()
    for suffix, large in SCORES.items():
        last, layout, runs = q[n - LAST :] * large, last_of(n, suffix), contract.SWEEP["runs"]

        def judged() -> list[Row]:
            ours = lambda: s.called(last[None], k[None], v[None], **constants)
            found, exact = ours(), reference.attention(last, k, v, lengths=[(LAST, n)], **constants)
            again = (compare(ours(), found) for _ in range(runs - 1))
            drift = next((d for d in again if d.mismatches), compare(found, found))
            row = s.row("determinism", layout, drift, "itself", "normal", LAST, detail=f"{runs} runs")
            return [*bounded_outputs(s, [y[0] for y in found], exact, layout), row]

        rows += s.attempt("accuracy", layout, judged, against="fp64", rows=LAST)
    return rows


def bounded_outputs(s: OpUnderTest, found: Iterable[torch.Tensor], exact: Iterable[tuple], layout: str) -> list[Row]:
    """Returns a row for each output, held against its (y64, S)."""
    outputs = zip(s.problem.returned.items(), found, exact, strict=True)
    return [bounded(s, y, e, dtype, layout, name) for (name, dtype), y, e in outputs]


def bounded(
    s: OpUnderTest, y: torch.Tensor, exact: tuple, dtype: torch.dtype, layout: str, tensor: str, of: str | None = None
) -> Row:
    """Returns the row that holds y against (y64, S), and the length of the sum where it is not the op's; of: the input
    whose gradient y is."""
    y64, magnitude, *n = exact
    p, relation = s.problem, gradients.ACCURACY if of else "accuracy"
    limit = contract.bound("attention", dtype, y64, magnitude, *(n or [p.reduction]), gradient=of, inputs=p.dtype)
    said = {"rows": len(y), "detail": layout, "tensor": tensor}
    return replace(s.against_bound(relation, y, y64, limit, dtype, **said), layout=layout)


def as_control(rows: list[Row]) -> Row:
    """Returns the row that drifts most, as a control's."""
    return max(rows, key=lambda r: r.mismatches or 0).as_control()


def uneven_layouts(session) -> list[str]:
    """Returns the names of the layouts of uneven samples."""
    return [f"{name}, lengths 1 to {max(UNEVEN[session.on_gpu])}" for name in UNEVENLY]


def uneven(session, number: int) -> list[Row]:
    """Judges very uneven samples in one call, padded too, against each alone; then with one of them not finite."""
    lengths, rows = UNEVEN[session.on_gpu], []
    s, samples = scheduled(session, replace(session.make()[number], own_lengths=lengths)), spans(lengths)
    every = pack(samples), pack(samples[::-1]), pad(samples), pad(samples, left=True)
    for kind in (CANCELLING, "nonfinite"):
        alone = cache(lambda: s.compute([Call(x[None]) for x in samples], kind))
        for name, call in zip(uneven_layouts(session), every):
            rows += against_one_call(s, name, [call], alone, kind)
    return rows


def against_one_call(
    s: OpUnderTest, name: str, calls: list[Call], expected: Callable[[], Tensors], kind: str = CANCELLING, page: int = 0
) -> list[Row]:
    """Compares what calls give with what is expected; page: of a cache in pages."""
    said = {"against": "one call", "inputs": kind, "rows": sum(s.lengths), "detail": shapes_launched(calls)}
    return s.attempt("invariance", name, lambda: compare(s.compute(calls, kind, page=page), expected()), **said)


def places(session) -> str:
    """Returns the layout of `starts`."""
    at = STARTS[session.on_gpu]
    return f"prefill from {at[0]} to {at[-1]}"


def starts(session, number: int) -> list[Row]:
    """Judges the last queries of a sequence in a call of their own, from each place in a block of keys on, against one
    call; and their dq."""
    at, name = STARTS[session.on_gpu], places(session)
    n = FROM[session.on_gpu] + at[-1]
    s = scheduled(session, replace(session.make()[number], own_lengths=(n,)), few=0)
    step = Step(s, CANCELLING, (n,))
    q, k, v = step.tokens.values()

    def run(start: int) -> tuple[tuple, torch.Tensor | None]:
        last = q[start:].clone().requires_grad_()
        found = s.called(last[None], k[None], v[None], **s.problem.op.constants)
        if not start:
            step.draw([t[0] for t in found])
        trained = {t: dy[None, start:] for t, dy in zip(found, step.dy) if t.requires_grad}
        dq = torch.autograd.grad([*trained], last, [*trained.values()])[0] if trained else None
        return tuple(t[0].detach() for t in found), dq

    def judged() -> list[Row]:
        whole, found = run(0), {i: run(i) for i in at}
        drift = _first_drift(compare(found[i][0], tuple(t[i:] for t in whole[0])) for i in at)
        rows = [s.row("invariance", name, drift, "one call", CANCELLING, n, detail=f"{len(at)} places")]
        if whole[1] is not None:
            drift = _first_drift(compare(found[i][1], whole[1][i:]) for i in at)
            rows.append(s.row(gradients.INVARIANCE, name, drift, "one call", CANCELLING, n, tensor="dq"))
        return rows

    return s.attempt("invariance", name, judged, against="one call", inputs=CANCELLING, rows=n)


def _first_drift(drifts: Iterable[Drift]) -> Drift:
    """Returns the first drift, or how many elements had none."""
    seen = 0
    for drift in drifts:
        seen += drift.elements
        if drift.mismatches:
            return drift
    return Drift(0, seen)
