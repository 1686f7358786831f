"""The four relations of a forward op, each judged on its own: invariance, determinism, accuracy, parity."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from bi_kernels import contract
from bi_kernels.audit.evidence import coverage
from bi_kernels.audit.evidence.drift import Drift, Tensors, compare
from bi_kernels.audit.evidence.kinds import Kind
from bi_kernels.audit.evidence.verdicts import UNSUPPORTED, Auditable, Row
from bi_kernels.audit.memory import patiently
from bi_kernels.audit.problem.call_layouts import Call, layouts, of_each_token, random_layout, shapes_launched
from bi_kernels.audit.problem.inputs import INTEGERS, KINDS
from bi_kernels.audit.problem.subject import CANCELLING, OpUnderTest, each, refusal
from bi_kernels.audit.relations.views import VIEWED, by_view
from bi_kernels.contract import SWEEP

PARITIES = (("decode", "chunked:16"), ("packed", "batch"), ("decode", "packed"))
ACCURATE_ROWS = 512  # tokens that are held against fp64
PIECE = 2**25  # elements whose errors are computed at a time: a quarter of a gigabyte in fp64


def supported(subject: OpUnderTest) -> Row | None:
    """Returns None if the candidate computes at all; else the one row that says what it raised."""
    _, raised = subject.computed(
        "invariance", "packed", lambda: subject.layout("packed"), lambda error: refusal(subject, error)
    )
    return raised[0] if raised else None


def invariance(subject: OpUnderTest, only: Sequence[str] = ()) -> list[Row]:
    """Judges every layout, or those named in `only`; see `by_layout`."""
    return list(by_layout(subject, only))


def by_layout(subject: OpUnderTest, only: Sequence[str] = ()) -> Iterator[Row]:
    """Compares every layout's bits with those of `packed`, and those of `packed` with each sample alone.

    Every layout meets the sharpest inputs where there is a sum to reorder, else the finite families by turns; and
    where a call holds more than one sample, one that is not finite beside the others.
    """
    finite = [CANCELLING] if subject.problem.reduction > 1 else [k for k in KINDS if k != "nonfinite"]
    for number, (name, calls) in enumerate(layouts(subject.lengths, subject.problem.seed).items()):
        if only and name not in only:
            continue
        against = "singles" if name == "packed" else "packed"
        said = {"against": against, "rows": sum(subject.lengths), "detail": shapes_launched(calls)}
        for kind in (finite[number % len(finite)], *["nonfinite"] * _has_company(calls, subject.lengths)):
            yield from subject.attempt(
                "invariance",
                name,
                lambda: compare(subject.layout(name, kind), subject.layout(against, kind)),
                inputs=kind,
                **said,
            )


def _has_company(calls: Sequence[Call], lengths: Sequence[int]) -> bool:
    sample, _ = of_each_token(lengths)
    return any(len(np.unique(sample[call.index[call.index >= 0]])) > 1 for call in calls)


def by_row_count(subject: OpUnderTest) -> Iterator[Row]:
    """Compares the first M rows in a call of their own with the same rows in the largest call, M over the contract's
    sweep.

    The families of inputs take turns; where there is a sum to reorder, every M meets the sharpest one besides. With
    `nonfinite` inputs the first M rows are finite and all others are not.
    """
    n = subject.largest
    at = torch.arange(n, device=subject.problem.device)
    always = {CANCELLING} if subject.problem.reduction > 1 else set()

    def row(m: int, kind: str) -> Row:
        leaky = kind == "nonfinite"
        tokens, shared = subject.problem.inputs(kind, n, at >= m) if leaky else subject.inputs(kind, n)
        apart = (0, m, n) if leaky and subject.problem.op.cache and m < n else None  # else they are a later part
        whole = lambda: each(torch.clone, subject.call(tokens, shared, (n,), at, apart))
        expected = subject.once(("all rows", kind, m if leaky else 0), whole)
        part = subject.call({k: t[:m] for k, t in tokens.items()}, shared, (m,), at[:m])
        drift = compare(part, each(lambda t: t[:m], expected))
        leaks = {"axes": [Kind.NEIGHBOURS]} if leaky and drift.max_abs == float("inf") else {}
        return subject.row("invariance", "rows", drift, **said(m, kind) | leaks)

    said = lambda m, kind: {"against": f"{n} rows", "inputs": kind, "rows": m}
    for number, m in enumerate(contract.rows(n)):
        for kind in sorted(always | {KINDS[number % len(KINDS)]}):
            yield from subject.attempt("invariance", "rows", lambda: row(m, kind), **said(m, kind))


class _Drifted(Exception):
    """Raised by a random layout; an error of the candidate's own is something else."""


def random_layouts(subject: OpUnderTest, examples: int = 10, kind: str = CANCELLING) -> Row:
    """Judges layouts that hypothesis draws, in inference mode; on a drift, the smallest that it finds is the
    evidence."""
    worst: dict = {}
    seen: list[int] = []
    said = {"against": "packed", "inputs": kind, "rows": sum(subject.lengths)}

    @hypothesis_seed(subject.problem.seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(random_layout(subject.lengths))
    def same_bits(calls):
        packed = subject.layout("packed", kind)
        with torch.inference_mode():
            drift = patiently(lambda: compare(subject.compute(calls, kind), packed))
        seen.append(drift.elements)
        if drift.mismatches:
            worst.update(drift=drift, calls=calls)
            raise _Drifted

    def drawn() -> Row:
        seen.clear()  # what a try before it left
        worst.clear()
        try:
            same_bits()
        except _Drifted:
            detail = shapes_launched(worst["calls"])
            return subject.row("invariance", "random", worst["drift"], **said, detail=detail)
        return subject.row("invariance", "random", Drift(0, sum(seen)), **said, detail=f"{len(seen)} layouts")

    return subject.attempt("invariance", "random", drawn, **said)[0]


def determinism(subject: OpUnderTest, kind: str = CANCELLING) -> Row:
    """Repeats a call ten times, over memory filled with ones and with zeros by turns: an unwritten element differs."""

    def drift() -> Drift:
        calls = layouts(subject.lengths)["packed"]
        first = subject.compute(calls, kind)
        for _ in range(SWEEP["runs"] - 1):
            found = compare(subject.compute(calls, kind), first)
            if found.mismatches:
                break
        return found

    said = {"inputs": kind, "rows": sum(subject.lengths), "detail": f"{SWEEP['runs']} runs"}
    return subject.attempt("determinism", "packed", drift, against="itself", **said)[0]


def accuracy(subject: OpUnderTest, kind: str = "normal", tokens: int = 0) -> Row:
    """Measures the error against the fp64 reference as a share of the contract's bound, elementwise; above 1 needs a
    fix. Of several outputs, the one with the larger share."""
    p = subject.problem
    n = tokens or min(subject.largest, ACCURATE_ROWS)
    at = torch.arange(n, device=p.device)
    lengths = [n - n // 3, n // 3] if p.op.cache else [n]
    inputs, shared = p.inputs(kind, n, at >= lengths[0] if p.op.cache else at % 5 == 3)
    y = subject.call(inputs, shared, (n,), at, (0, lengths[0], n) if p.op.cache else None)
    return against_fp64(subject, y, inputs, shared, at, lengths, kind)


def against_fp64(
    subject: OpUnderTest, y: Tensors, inputs: dict, shared: dict, at: torch.Tensor, lengths: list[int], kind: str
) -> Row:
    """Measures the error of y, the outputs of one packed call; at: the position of each of its tokens."""
    p, n = subject.problem, len(at)
    exact, magnitude = p.reference(inputs, shared, dict(subject.constants()), at, lengths)
    parts = ((t,) if isinstance(t, torch.Tensor) else t for t in (y, exact, magnitude))
    rows = []
    for (name, dtype), found, exact, magnitude in zip(p.returned.items(), *parts):
        magnitude = torch.zeros_like(magnitude) if kind == INTEGERS else magnitude  # no sum rounds
        limit = contract.bound(p.contract_row, dtype, exact, magnitude, p.reduction, inputs=p.dtype)
        detail = f"reduction length {p.reduction}"
        rows.append(against_bound(subject, "accuracy", found, exact, limit, dtype, kind, n, detail, name))
    return max(rows, key=lambda r: float("inf" if r.threshold_share is None else r.threshold_share))


def against_bound(
    subject: Auditable,
    relation: str,
    y: torch.Tensor,
    exact: torch.Tensor,
    limit: torch.Tensor,
    dtype: torch.dtype,
    kind: str,
    n: int,
    detail: str,
    tensor: str = "out",
) -> Row:
    """Returns the row that says how much of the bound `limit` the error of y takes; elements above it are its
    mismatches."""
    said = {"against": "fp64", "inputs": kind, "rows": n, "tensor": tensor}
    if y.dtype != dtype or y.shape != exact.shape:
        detail = f"returned {y.dtype} {tuple(y.shape)}, expected {dtype} {tuple(exact.shape)}"
        drift = Drift(exact.numel(), exact.numel(), float("inf"))
        return subject.row(relation, "rows", drift, detail=detail, **said)
    parts = (t.reshape(-1).split(PIECE) for t in (y, exact, limit))
    wrongs, firsts, shares, gaps, relatives = zip(*map(_error, *parts))
    at = next((i * PIECE + first for i, first in enumerate(firsts) if first is not None), None)
    if at is not None:
        at = tuple(map(int, torch.unravel_index(torch.tensor(at), y.shape)))
        detail += f"; first {float(y[at]):.9g}, exactly {float(exact[at]):.9g}, allowed ± {float(limit[at]):.3g}"
    drift = Drift(sum(wrongs), y.numel(), max(gaps), max(relatives), first_index=at)
    worst = "inf" if max(shares) == float("inf") else max(shares)
    return subject.row(relation, "rows", drift, detail=detail, max_ulp=None, threshold_share=worst, **said)


def _error(y: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor) -> tuple:
    """(elements above the limit, the first of them, the largest share of it, largest error, largest relative one)."""
    gap = (y.double() - exact).abs()
    # NaN answers NaN, Inf answers Inf, and so it may where the bound reaches beyond the dtype's range
    infinite = (exact.abs() + limit >= torch.finfo(y.dtype).max) & (y.double() == exact.sign() * torch.inf)
    right = torch.where(exact.isnan(), y.isnan(), infinite)
    finite = exact.isfinite() & y.isfinite()
    share = torch.where(right, 0.0, torch.where(finite, gap / limit, torch.inf))
    relative = gap / exact.abs().clamp(min=torch.finfo(torch.float64).tiny)
    wrong, most = ~(share <= 1), lambda t: float(t.max()) if t.numel() else 0.0
    first = int(wrong.nonzero()[0]) if wrong.any() else None
    return int(wrong.sum()), first, most(share), most(gap[finite]), most(relative[finite])


def parity(subject: OpUnderTest) -> list[Row]:
    """Compares layout with layout, bitwise: decode and chunked prefill, packed and padded, rollout and rescoring."""
    said = {"inputs": CANCELLING, "rows": sum(subject.lengths)}
    return [
        row
        for a, b in PARITIES
        for row in subject.attempt(
            "parity", f"{a}={b}", lambda: compare(subject.layout(a), subject.layout(b)), against=b, **said
        )
    ]


def judge(subject: OpUnderTest, examples: int = 5) -> list[Row]:
    """Judges every relation that a forward op is held to."""
    if refused := supported(subject):
        return [refused]
    rows = invariance(subject) + parity(subject)
    rows += [random_layouts(subject, examples), determinism(subject), *by_view(subject)]
    subject.forget()
    rows += by_row_count(subject)
    subject.forget()
    for kind in subject.problem.accurate_on:
        rows += subject.attempt("accuracy", "rows", lambda: accuracy(subject, kind), against="fp64", inputs=kind)
    subject.forget()
    return rows


def _required(s: OpUnderTest) -> Iterator[dict]:
    names = layouts(s.lengths, s.problem.seed)
    assert {name.split(":")[0] for name in names} == set(SWEEP["layouts"])
    row = lambda relation, layout, **more: {"relation": relation, "layout": layout, **more}
    yield from (row("invariance", layout) for layout in (*names, "random", *VIEWED))
    yield from (row("invariance", "rows", rows=m) for m in contract.rows(s.largest))
    yield from (row("invariance", "rows", inputs=kind) for kind in KINDS)
    yield from (row("accuracy", "rows", inputs=kind) for kind in s.problem.accurate_on)
    yield row("determinism", "packed")
    yield from (row("parity", f"{a}={b}") for a, b in PARITIES)


def missing(
    rows: Sequence[Row], subjects: Sequence[OpUnderTest], required: Callable[[OpUnderTest], Iterable[dict]] = _required
) -> list[Row]:
    """Returns a row that needs a fix for everything that the contract requires of a forward op and that was not run."""
    whose = lambda row: (row.op, row.case, row.dtype)
    refused = {whose(r) for r in rows if r.verdict == UNSUPPORTED and r.layout == "packed" and not r.control}
    judged = [s for s in subjects if whose(s.row("", "")) not in refused]
    return [row for s in judged for row in coverage.missing(rows, s, required(s))]
