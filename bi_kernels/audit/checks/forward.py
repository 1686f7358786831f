"""The four relations of a forward op, each judged on its own: invariance, determinism, accuracy, parity."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from bi_kernels import contract
from bi_kernels.audit.axes import Kind
from bi_kernels.audit.checks.memory import by_view
from bi_kernels.audit.compare import Drift, Tensors, compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.inputs import INTEGERS, KINDS
from bi_kernels.audit.layouts import Call, layouts, of_each_token, random_layout, shapes_launched
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest, each, refusal
from bi_kernels.contract import SWEEP, VARIANT

PARITIES = (("decode", "chunked:16"), ("packed", "batch"), ("decode", "packed"))
ACCURATE_ROWS = 512  # tokens that are held against fp64


def supported(subject: OpUnderTest) -> Row | None:
    """Returns None if the candidate computes at all; else the one row that says what it raised."""
    _, raised = subject.computed(
        "invariance", "packed", lambda: subject.layout("packed"), lambda error: refusal(subject, error)
    )
    return raised[0] if raised else None


def by_layout(subject: OpUnderTest, only: Sequence[str] = ()) -> Iterator[Row]:
    """Compares every layout's bits with those of `packed`, and those of `packed` with each sample alone.

    Every layout meets the sharpest inputs where there is a sum to reorder, else the finite families by turns; and
    where a call holds more than one sample, one that is not finite beside the others.
    """
    only = only or (VARIANT["layouts"] if subject.problem.brief else ())
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


def first_rows(subject: OpUnderTest, count: int, of: int, inputs: str) -> Tensors:
    """Returns the results of the first `count` tokens in a call of the first `of`; of `nonfinite` inputs all other
    tokens are not finite."""
    n, leaky = subject.largest, inputs == "nonfinite"
    at = torch.arange(n, device=subject.problem.device)
    tokens, shared = subject.problem.inputs(inputs, n, at >= count) if leaky else subject.inputs(inputs, n)
    apart = (0, count, of) if leaky and subject.problem.op.cache and count < of else None  # else they are a later part
    own = {k: t[:of] for k, t in tokens.items()}
    made = lambda: each(torch.clone, subject.call(own, shared, (of,), at[:of], apart))
    found = subject.once(("rows", inputs, of, count if leaky else 0), made) if count < of else made()
    return each(lambda t: t[:count], found)


def by_row_count(subject: OpUnderTest) -> Iterator[Row]:
    """Compares the first M rows in a call of their own with the same rows in the largest call, M over the contract's
    sweep. The families of inputs take turns; where there is a sum to reorder, every M meets the sharpest one, too."""
    n, always = subject.largest, {CANCELLING} if subject.problem.reduction > 1 else set()

    def row(m: int, kind: str) -> Row:
        expected = first_rows(subject, m, n, kind)
        drift = compare(first_rows(subject, m, m, kind), expected)
        leaks = {"axes": [Kind.NEIGHBOURS]} if kind == "nonfinite" and drift.max_abs == float("inf") else {}
        return subject.row("invariance", "rows", drift, **said(m, kind) | leaks)

    said = lambda m, kind: {"against": f"{n} rows", "inputs": kind, "rows": m}
    for number, m in enumerate(VARIANT["rows"] if subject.problem.brief else contract.rows(n)):
        for kind in sorted(always | {KINDS[number % len(KINDS)]}):
            yield from subject.attempt("invariance", "rows", lambda: row(m, kind), **said(m, kind))


def random_layouts(subject: OpUnderTest, examples: int = 10) -> Row:
    """Judges layouts drawn by the seed, in inference mode, up to the first that drifts."""
    said = {"against": "packed", "inputs": CANCELLING, "rows": sum(subject.lengths)}

    def drawn() -> Row:
        rng, seen = np.random.default_rng(subject.problem.seed), 0
        for _ in range(examples):
            calls, packed = random_layout(subject.lengths, rng), subject.layout("packed")
            with torch.inference_mode():
                drift = compare(subject.compute(calls), packed)
            if drift.mismatches:
                return subject.row("invariance", "random", drift, **said, detail=shapes_launched(calls))
            seen += drift.elements
        return subject.row("invariance", "random", Drift(0, seen), **said, detail=f"{examples} layouts")

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


def accuracy(subject: OpUnderTest, kind: str = "normal") -> Row:
    """Measures the error against the fp64 reference as a share of the contract's bound, elementwise; above 1 needs a
    fix. Of several outputs, the one with the larger share."""
    p = subject.problem
    n = min(subject.largest, ACCURATE_ROWS)
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
        said = {"inputs": kind, "rows": n, "detail": f"reduction length {p.reduction}", "tensor": name}
        rows.append(subject.against_bound("accuracy", found, exact, limit, dtype, **said))
    return max(rows, key=lambda r: float("inf" if r.threshold_share is None else r.threshold_share))


def parity(subject: OpUnderTest) -> list[Row]:
    """Compares layout with layout, bitwise: decode and chunked prefill, packed and padded, rollout and rescoring."""
    said = {"inputs": CANCELLING, "rows": sum(subject.lengths)}
    drift = lambda a, b: lambda: compare(subject.layout(a), subject.layout(b))
    return [r for a, b in PARITIES for r in subject.attempt("parity", f"{a}={b}", drift(a, b), against=b, **said)]


def judge(subject: OpUnderTest, examples: int = 5) -> list[Row]:
    """Judges every relation that a forward op is held to."""
    if refused := supported(subject):
        return [refused]
    rows = [*by_layout(subject), *parity(subject)]
    rows += [] if subject.problem.brief else [random_layouts(subject, examples)]  # drawn cases have some
    rows += [determinism(subject), *by_view(subject)]
    subject.forget()
    rows += by_row_count(subject)
    subject.forget()
    for kind in subject.problem.accurate_on:
        rows += subject.attempt("accuracy", "rows", lambda: accuracy(subject, kind), against="fp64", inputs=kind)
    subject.forget()
    return rows
