"""The four relations, each judged on its own: invariance, determinism, accuracy, parity. One row of evidence a claim."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from bi_kernels import contract
from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.problem.call_layouts import VIEWS, Call, layouts, random_layout, shapes_launched
from bi_kernels.audit.problem.inputs import KINDS
from bi_kernels.audit.problem.registry import joined
from bi_kernels.audit.problem.subject import SHARPEST, UNSUPPORTED, Row, Subject, each, refusal, sentence
from bi_kernels.contract import SWEEP, dtype_name

PARITIES = (("decode", "chunked:16"), ("packed", "batch"), ("decode", "packed"))


def supported(subject: Subject) -> Row | None:
    """None if the candidate computes at all; else the one row that says what it raised."""
    try:
        subject.layout("packed")
        return None
    except Exception as error:
        return subject.row("invariance", "packed", verdict=refusal(subject, error), detail=sentence(error))


def invariance(subject: Subject, only: Sequence[str] = ()) -> list[Row]:
    return list(by_layout(subject, only))


def by_layout(subject: Subject, only: Sequence[str] = ()) -> Iterator[Row]:
    """Every layout's bits against those of `packed`, and those of `packed` against each sample alone.

    Every layout meets the sharpest inputs where there is a sum to reorder, else the finite families by turns; and where a
    call holds more than one sample, one that is not finite beside the others.
    """
    every = layouts(subject.lengths, subject.problem.seed)
    finite = [SHARPEST] if subject.problem.reduction > 1 else [k for k in KINDS if k != "nonfinite"]
    for number, (name, calls) in enumerate(every.items()):
        if only and name not in only:
            continue
        against = "singles" if name == "packed" else "packed"
        launched = shapes_launched(calls)
        for kind in (finite[number % len(finite)], *["nonfinite"] * _has_company(calls, subject.lengths)):
            try:
                drift = compare(subject.layout(name, kind), subject.layout(against, kind))
                yield subject.row("invariance", name, drift, against, kind, sum(subject.lengths), detail=launched)
            except Exception as error:
                yield subject.row(
                    "invariance",
                    name,
                    None,
                    against,
                    kind,
                    sum(subject.lengths),
                    detail=f"{launched}; {sentence(error)}",
                )


def _has_company(calls: Sequence[Call], lengths: Sequence[int]) -> bool:
    sample = np.repeat(np.arange(len(lengths)), lengths)
    return any(len(np.unique(sample[call.index[call.index >= 0]])) > 1 for call in calls)


def row_counts(subject: Subject) -> list[Row]:
    return list(by_row_count(subject))


def by_row_count(subject: Subject) -> Iterator[Row]:
    """The first M rows in a call of their own against the same rows in the largest call, M over the contract's sweep.

    The families of inputs take turns; where there is a sum to reorder, every M meets the sharpest one besides. With
    `nonfinite` inputs the first M rows are finite and all others are not.
    """
    n = subject.largest
    at = torch.arange(n, device=subject.problem.device)
    always = {SHARPEST} if subject.problem.reduction > 1 else set()
    for number, m in enumerate(contract.rows(n)):
        for kind in sorted(always | {KINDS[number % len(KINDS)]}):
            try:
                leaky = kind == "nonfinite"
                tokens, shared = subject.problem.inputs(kind, n, at >= m) if leaky else subject.inputs(kind, n)
                key = ("all rows", kind, m if leaky else 0)
                if key not in subject.memo:
                    apart = (
                        (0, m, n) if leaky and subject.problem.op.cache and m < n else None
                    )  # else they are a later part
                    subject.memo[key] = each(torch.clone, subject.call(tokens, shared, (n,), at, apart))
                part = subject.call({k: t[:m] for k, t in tokens.items()}, shared, (m,), at[:m])
                whole = each(lambda t, m=m: t[:m], subject.memo[key])
                yield subject.row("invariance", "rows", compare(part, whole), f"{n} rows", kind, m)
            except Exception as error:
                yield subject.row("invariance", "rows", None, f"{n} rows", kind, m, detail=sentence(error))


def by_view(subject: Subject, kind: str = SHARPEST) -> Iterator[Row]:
    """The same values in views that lie otherwise in memory: a kernel compiled for those may add otherwise."""
    m = min(2049, subject.largest) if subject.problem.op.cache else 65  # attention chooses its schedule by their number
    tokens, shared = subject.inputs(kind, m)
    at = torch.arange(m, device=subject.problem.device)
    for name, view in VIEWS.items():
        try:
            moved = ({k: view(t) for k, t in given.items()} for given in (tokens, shared))
            y = joined(subject.forward(*moved, (m,), at))
            yield subject.row(
                "invariance", name, compare(y, subject.call(tokens, shared, (m,), at)), "aligned", kind, m
            )
        except Exception as error:
            yield subject.row("invariance", name, None, "aligned", kind, m, detail=sentence(error))


class _Drifted(Exception):
    """What a random layout raises; an error of the candidate's own is something else."""


def random_layouts(subject: Subject, examples: int = 10, kind: str = SHARPEST) -> Row:
    """Layouts that hypothesis draws; on a drift, the smallest that it finds is the evidence."""
    worst: dict = {}
    seen: list[int] = []

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
        drift = compare(subject.compute(calls, kind), subject.layout("packed", kind))
        seen.append(drift.elements)
        if drift.mismatches:
            worst.update(drift=drift, calls=calls)
            raise _Drifted

    try:
        same_bits()
    except _Drifted:
        return subject.row(
            "invariance",
            "random",
            worst["drift"],
            "packed",
            kind,
            sum(subject.lengths),
            detail=shapes_launched(worst["calls"]),
        )
    except Exception as error:
        return subject.row("invariance", "random", None, "packed", kind, sum(subject.lengths), detail=sentence(error))
    return subject.row(
        "invariance", "random", Drift(0, sum(seen)), "packed", kind, sum(subject.lengths), detail=f"{len(seen)} layouts"
    )


def determinism(subject: Subject, kind: str = SHARPEST) -> Row:
    """The same call ten times, over memory filled with ones and with zeros by turns: an unwritten element differs."""
    calls = layouts(subject.lengths)["packed"]
    drift, first = None, None
    for _ in range(SWEEP["runs"]):
        try:
            out = subject.compute(calls, kind)
        except Exception as error:
            return subject.row("determinism", "packed", None, "itself", kind, detail=sentence(error))
        first = out if first is None else first
        drift = compare(out, first)
        if drift.mismatches:
            break
    return subject.row(
        "determinism", "packed", drift, "itself", kind, sum(subject.lengths), detail=f"{SWEEP['runs']} runs"
    )


def accuracy(subject: Subject, kind: str = "normal", tokens: int = 0) -> Row:
    """The error against the fp64 reference as a share of the contract's bound, elementwise; above 1 needs a fix. Of several
    outputs, the one with the larger share."""
    p = subject.problem
    n = tokens or min(subject.largest, 512)
    at = torch.arange(n, device=p.device)
    lengths = [n - n // 3, n // 3] if p.op.cache else [n]
    inputs, shared = p.inputs(kind, n, at >= lengths[0] if p.op.cache else at % 5 == 3)
    y = subject.call(inputs, shared, (n,), at, (0, lengths[0], n) if p.op.cache else None)
    exact, magnitude = p.reference(inputs, shared, {k: v for k, v in subject.constants().items()}, at, lengths)
    rows = []
    for (name, dtype), *parts in zip(
        p.returned.items(), *((t,) if isinstance(t, torch.Tensor) else t for t in (y, exact, magnitude))
    ):
        limit = contract.bound(p.contract_row, dtype, *parts[1:], p.reduction, inputs=p.dtype)
        rows.append(
            against_bound(
                subject, "accuracy", *parts[:2], limit, dtype, kind, n, f"reduction length {p.reduction}", name
            )
        )
    return max(rows, key=lambda r: float("inf" if r.threshold_share is None else r.threshold_share))


def against_bound(
    subject: Subject,
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
    """The row that says how much of the bound `limit` the error of y takes; elements above it are its mismatches."""
    largest = torch.finfo(dtype).max
    if y.dtype != dtype or y.shape != exact.shape:
        return subject.row(
            relation,
            "rows",
            Drift(exact.numel(), exact.numel(), float("inf")),
            "fp64",
            kind,
            n,
            tensor=tensor,
            detail=f"returned {y.dtype} {tuple(y.shape)}, expected {dtype} {tuple(exact.shape)}",
        )
    share = (y.double() - exact).abs() / limit
    # NaN answers NaN, Inf answers Inf, and so it may where the bound reaches beyond the dtype's range
    infinite = (exact.abs() + limit >= largest) & (y.double() == exact.sign() * torch.inf)
    right = torch.where(exact.isnan(), y.isnan(), infinite)
    finite = exact.isfinite() & y.isfinite()
    share = torch.where(right, 0.0, torch.where(finite, share, torch.inf))
    over = int((share > 1).sum())
    worst = float(share.max()) if share.numel() else 0.0
    gap = (y.double() - exact).abs()[finite]
    first = [int(i) for i in torch.unravel_index((share > 1).flatten().to(torch.uint8).argmax(), share.shape)]
    row = subject.row(
        relation,
        "rows",
        Drift(over, share.numel(), float(gap.max()) if gap.numel() else 0.0),
        "fp64",
        kind,
        n,
        tensor=tensor,
        detail=detail,
    )
    relative = gap / exact[finite].abs().clamp(min=torch.finfo(torch.float64).tiny)
    row.max_rel = float(relative.max()) if relative.numel() else 0.0
    row.max_ulp = None
    row.threshold_share = worst if worst != float("inf") else "inf"
    if over:
        at = tuple(first)
        row.first_index = first
        row.detail += f"; first {float(y[at]):.9g}, exactly {float(exact[at]):.9g}, allowed ± {float(limit[at]):.3g}"
    return row


def parity(subject: Subject) -> list[Row]:
    """Layout against layout, bitwise: decode and chunked prefill, packed and padded, rollout and rescoring."""
    rows = []
    for a, b in PARITIES:
        try:
            rows.append(
                subject.row(
                    "parity",
                    f"{a}={b}",
                    compare(subject.layout(a), subject.layout(b)),
                    b,
                    SHARPEST,
                    sum(subject.lengths),
                )
            )
        except Exception as error:
            rows.append(
                subject.row("parity", f"{a}={b}", None, b, SHARPEST, sum(subject.lengths), detail=sentence(error))
            )
    return rows


def judge(subject: Subject, examples: int = 5) -> list[Row]:
    """Every relation that a forward op is held to."""
    refused = supported(subject)
    if refused:
        return [refused]
    rows = (
        invariance(subject)
        + parity(subject)
        + [random_layouts(subject, examples), determinism(subject), *by_view(subject)]
    )
    subject.forget()
    rows += row_counts(subject)
    subject.forget()
    for kind in KINDS:
        try:
            rows.append(accuracy(subject, kind))
        except Exception as error:
            rows.append(subject.row("accuracy", "rows", None, "fp64", kind, detail=sentence(error)))
    subject.forget()
    return rows


def coverage(rows: Sequence[Row], subjects: Sequence[Subject]) -> list[Row]:
    """A needs-fix row for everything that the contract requires of an op and dtype and that `rows` does not hold."""
    missing = []
    for s in subjects:
        mine = [
            r
            for r in rows
            if not r.control
            and (r.op, r.case, r.dtype) == (s.problem.op.name, s.problem.case, dtype_name(s.problem.dtype))
        ]
        if any(r.verdict == UNSUPPORTED for r in mine):
            continue
        names = layouts(s.lengths, s.problem.seed)
        assert {name.split(":")[0] for name in names} == set(SWEEP["layouts"])
        required = {("invariance", layout, None, None) for layout in (*names, "random", *VIEWS)}
        required |= {("invariance", "rows", m, None) for m in contract.rows(s.largest)}
        required |= {("invariance", "rows", None, kind) for kind in KINDS} | {
            ("accuracy", "rows", None, k) for k in KINDS
        }
        required |= {("determinism", "packed", None, None)} | {("parity", f"{a}={b}", None, None) for a, b in PARITIES}
        for relation, layout, m, kind in sorted(required, key=str):
            if not any(
                (r.relation, r.layout) == (relation, layout) and m in (None, r.rows) and kind in (None, r.inputs)
                for r in mine
            ):
                missing.append(
                    s.row(
                        relation,
                        layout,
                        None,
                        inputs=kind or "",
                        rows=m or 0,
                        detail="required by the contract, not run",
                    )
                )
    return missing
