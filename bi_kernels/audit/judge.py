"""The four relations, each judged on its own: invariance, determinism, accuracy, parity. One row of evidence a claim."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from bi_kernels import contract
from bi_kernels.audit.cache import Keys, keys
from bi_kernels.audit.drift import Drift, Tensors, compare
from bi_kernels.audit.inputs import KINDS
from bi_kernels.audit.layouts import VIEWS, Call, layouts, random_layout, shapes_launched
from bi_kernels.audit.ops import Problem, joined
from bi_kernels.contract import CONTRACT, SHAPES, SWEEP, dtype_name

PASS, NEEDS_FIX, UNSUPPORTED = "pass", "needs-fix", "unsupported"
SHARPEST = "cancelling"  # the inputs under which another order of a sum shows most
PARITIES = (("decode", "chunked:16"), ("packed", "batch"), ("decode", "packed"))


@dataclass
class Row:
    """One verdict with its evidence; the fields of verdicts.json."""

    audit: str
    op: str
    case: str
    candidate: str
    dtype: str
    device: str
    relation: str
    layout: str
    against: str
    inputs: str
    rows: int
    verdict: str
    mismatches: int | None = None
    elements: int | None = None
    max_abs: float | str | None = None
    max_rel: float | str | None = None
    max_ulp: int | str | None = None
    tensor: str = "out"
    first_index: list[int] | None = None
    first_failing_op: str | None = None
    threshold_share: float | str | None = None
    detail: str = ""
    repro: str = ""
    control: bool = False
    caught: bool | None = None

    def json(self) -> dict:
        return asdict(self)

    def as_control(self) -> "Row":
        """This row of a candidate that is broken on purpose: caught by drifting, not by an error."""
        return replace(self, control=True, caught=self.verdict == NEEDS_FIX and bool(self.mismatches))


@dataclass
class Subject:
    """A candidate's function for one problem."""

    problem: Problem
    function: Callable
    candidate: str
    device: str
    command: str = ""
    memo: dict = field(default_factory=dict, repr=False)
    calls: int = 0
    own_lengths: Sequence[int] = ()

    @property
    def lengths(self) -> Sequence[int]:
        return self.own_lengths or SHAPES[self.problem.shapes]["lengths"]

    @property
    def largest(self) -> int:
        return SWEEP["interpreter_rows"] if self.problem.device.type == "cpu" else max(SWEEP["rows"])

    def row(self, relation: str, layout: str, drift: Drift | None = None, against: str = "", inputs: str = "normal",
            rows: int = 0, verdict: str = "", **more) -> Row:
        p = self.problem
        verdict = verdict or (NEEDS_FIX if drift is None or drift.mismatches else PASS)
        evidence = {} if drift is None else drift.json()
        more = {"tensor": [*p.returned][drift.part if drift else 0]} | more
        return Row(p.op.audit, p.op.name, p.case, self.candidate, dtype_name(p.dtype), self.device, relation, layout,
                   against, inputs, rows, verdict, first_failing_op=p.op.name if verdict == NEEDS_FIX else None,
                   repro=self.command if verdict == NEEDS_FIX else "", **evidence, **more)

    def inputs(self, kind: str, count: int, poisoned: torch.Tensor | None = None) -> tuple[dict, dict]:
        key = ("inputs", kind, count, None if poisoned is None else tuple(poisoned.nonzero().flatten().tolist()))
        if key not in self.memo:
            self.memo[key] = self.problem.inputs(kind, count, poisoned)
        return self.memo[key]

    def constants(self) -> dict:
        if "constants" not in self.memo:
            self.memo["constants"] = self.problem.constants(max(*self.lengths, self.largest))
        return self.memo["constants"]

    def call(self, tokens: dict, shared: dict, lead: tuple[int, ...], positions: torch.Tensor | None = None,
             cu_seqlens: Sequence[int] | None = None, cached: Keys | None = None) -> Tensors:
        """What the candidate returns for tokens of the leading shape `lead`, a row a token.

        Tensors go by position, so a candidate may name them as it likes; constants and positions go by name. The tokens
        are copies, so a candidate may work in place; fresh memory holds ones and zeros by turns, so an element that it
        leaves unwritten differs from call to call.
        """
        tokens = {k: t.clone() for k, t in tokens.items()}
        out = self.forward(tokens, shared, lead, positions, cu_seqlens, cached)
        returned, expected = out if isinstance(out, (tuple, list)) else [out], list(self.problem.returned)
        if len(expected) > 1 and len(returned) != len(expected):
            raise ValueError(f"the candidate returned {len(returned)} of the outputs {', '.join(expected)}")
        for t in returned:
            if not isinstance(t, torch.Tensor) or tuple(t.shape[:len(lead)]) != tuple(lead):
                got = tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
                raise ValueError(f"the candidate returned {got}, expected a tensor of shape {tuple(lead)} + …")
        return each(lambda t: t.reshape(-1, *t.shape[len(lead):]), joined(out))

    def forward(self, tokens: dict, shared: dict, lead: tuple[int, ...], positions: torch.Tensor | None = None,
                cu_seqlens: Sequence[int] | None = None, cached: Keys | None = None):
        """What the candidate itself returns, on tokens of the leading shape `lead`."""
        arguments = dict(self.constants())
        if self.problem.op.cache:
            cached = cached or keys(Call(np.empty(lead), cu_seqlens and tuple(cu_seqlens)), self.lengths)
            arguments |= cached.arguments(self.problem.device)
        if self.problem.op.positions:
            if cu_seqlens is not None:
                arguments["cu_seqlens"] = torch.tensor(cu_seqlens, device=self.problem.device)
            else:
                arguments["positions"] = positions.reshape(lead)
        self.calls += 1
        with poisoned_memory(0xFF if self.calls % 2 else 0x00):
            return self.function(*self.problem.arguments(tokens, shared), **arguments)

    def compute(self, calls: Sequence[Call], kind: str = SHARPEST, poisoned_sample: int = 3, page: int = 0) -> Tensors:
        """Every logical token's result under a layout, gathered back to logical order; page: of a cache in pages."""
        device, lengths = self.problem.device, self.lengths
        count = sum(lengths)
        sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        tokens, shared = self.inputs(kind, count, sample == poisoned_sample)
        at = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device)
        result = None
        for call in calls:
            index = torch.from_numpy(call.index.reshape(-1)).to(device)
            real = index >= 0
            rows = index.clamp(min=0)
            cached = keys(call, lengths, page) if self.problem.op.cache else None
            gathered = {k: gather(t, cached.index if k in self.problem.op.cache else call.index, kind == "nonfinite")
                        for k, t in tokens.items()}
            out = self.call(gathered, shared, call.index.shape, at[rows], call.cu_seqlens, cached)
            if result is None:
                result = each(lambda y: y.new_zeros(count, *y.shape[1:]), out)
            each(lambda into, y, rows=rows, real=real: fill(into, rows, real, y), result, out)
        return result

    def layout(self, name: str, kind: str = SHARPEST) -> Tensors:
        key = ("layout", name, kind)
        if key not in self.memo:
            self.memo[key] = self.compute(layouts(self.lengths, self.problem.seed)[name], kind)
        return self.memo[key]

    def forget(self) -> None:
        self.memo.clear()


def each(function: Callable, *outputs: Tensors):
    """The function of a tensor, or of each of a tuple of them."""
    return function(*outputs) if isinstance(outputs[0], torch.Tensor) else tuple(map(function, *outputs))


def gather(t: torch.Tensor, index: np.ndarray, nonfinite: bool) -> torch.Tensor:
    """Tokens in the shape of `index`. What padding holds is nobody's business: stale numbers, or NaN beside others' NaN."""
    at = torch.from_numpy(index).to(t.device)
    found = t[at.clamp(min=0)]
    if (index < 0).any():
        found[at < 0] = (float("nan") if nonfinite else 7.0) if t.dtype.is_floating_point else 0
    return found


def fill(result: torch.Tensor, rows: torch.Tensor, real: torch.Tensor, out: torch.Tensor) -> None:
    if (out.dtype, out.shape[1:]) != (result.dtype, result.shape[1:]):
        raise ValueError(f"the candidate returned {out.dtype} {tuple(out.shape[1:])} a token after "
                         f"{result.dtype} {tuple(result.shape[1:])}")
    result[rows[real]] = out[real]


@contextlib.contextmanager
def poisoned_memory(byte: int) -> Iterator[None]:
    """Fills what torch.empty, empty_like and new_empty return, so that an element left unwritten is seen."""
    def wrap(make):
        def filled(*args, **kwargs):
            t = make(*args, **kwargs)
            if t.device.type != "meta" and t.is_contiguous():
                t.view(-1).view(torch.uint8).fill_(byte)
            return t
        return filled

    places = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals):
        setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals):
            setattr(owner, name, original)


def sentence(error: Exception) -> str:
    """The first line of an error, without object addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}".splitlines()[0])[:300]


def supported(subject: Subject) -> Row | None:
    """None if the candidate computes at all; else the one row that says what it raised."""
    try:
        subject.layout("packed")
        return None
    except Exception as error:
        return subject.row("invariance", "packed", verdict=refusal(subject, error), detail=sentence(error))


def refusal(subject: Subject, error: Exception) -> str:
    """The verdict on a candidate that raised: `unsupported` for a TypeError, ValueError or NotImplementedError that names
    the dtype, where the contract does not demand it; else it needs a fix."""
    name = dtype_name(subject.problem.dtype)
    said = re.search(rf"\b({name}|{str(subject.problem.dtype).removeprefix('torch.')})\b", str(error))
    clear = isinstance(error, (TypeError, ValueError, NotImplementedError)) and said
    return UNSUPPORTED if clear and name not in CONTRACT["dtypes"]["mandatory"] else NEEDS_FIX


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
                yield subject.row("invariance", name, None, against, kind, sum(subject.lengths),
                                  detail=f"{launched}; {sentence(error)}")


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
                    apart = (0, m, n) if leaky and subject.problem.op.cache and m < n else None  # else they are a later part
                    subject.memo[key] = each(torch.clone, subject.call(tokens, shared, (n, ), at, apart))
                part = subject.call({k: t[:m] for k, t in tokens.items()}, shared, (m, ), at[:m])
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
            y = joined(subject.forward(*moved, (m, ), at))
            yield subject.row("invariance", name, compare(y, subject.call(tokens, shared, (m, ), at)), "aligned", kind, m)
        except Exception as error:
            yield subject.row("invariance", name, None, "aligned", kind, m, detail=sentence(error))


class _Drifted(Exception):
    """What a random layout raises; an error of the candidate's own is something else."""


def random_layouts(subject: Subject, examples: int = 10, kind: str = SHARPEST) -> Row:
    """Layouts that hypothesis draws; on a drift, the smallest that it finds is the evidence."""
    worst: dict = {}
    seen: list[int] = []

    @hypothesis_seed(subject.problem.seed)
    @settings(max_examples=examples, deadline=None, database=None, derandomize=False, phases=(Phase.generate, Phase.shrink),
              suppress_health_check=list(HealthCheck))
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
        return subject.row("invariance", "random", worst["drift"], "packed", kind, sum(subject.lengths),
                           detail=shapes_launched(worst["calls"]))
    except Exception as error:
        return subject.row("invariance", "random", None, "packed", kind, sum(subject.lengths), detail=sentence(error))
    return subject.row("invariance", "random", Drift(0, sum(seen)), "packed", kind, sum(subject.lengths),
                       detail=f"{len(seen)} layouts")


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
    return subject.row("determinism", "packed", drift, "itself", kind, sum(subject.lengths), detail=f"{SWEEP['runs']} runs")


def accuracy(subject: Subject, kind: str = "normal", tokens: int = 0) -> Row:
    """The error against the fp64 reference as a share of the contract's bound, elementwise; above 1 needs a fix. Of several
    outputs, the one with the larger share."""
    p = subject.problem
    n = tokens or min(subject.largest, 512)
    at = torch.arange(n, device=p.device)
    lengths = [n - n // 3, n // 3] if p.op.cache else [n]
    inputs, shared = p.inputs(kind, n, at >= lengths[0] if p.op.cache else at % 5 == 3)
    y = subject.call(inputs, shared, (n, ), at, (0, lengths[0], n) if p.op.cache else None)
    exact, magnitude = p.reference(inputs, shared, {k: v for k, v in subject.constants().items()}, at, lengths)
    rows = []
    for (name, dtype), *parts in zip(p.returned.items(), *((t, ) if isinstance(t, torch.Tensor) else t for t in (y, exact, magnitude))):
        limit = contract.bound(p.contract_row, dtype, *parts[1:], p.reduction, inputs=p.dtype)
        rows.append(against_bound(subject, "accuracy", *parts[:2], limit, dtype, kind, n, f"reduction length {p.reduction}", name))
    return max(rows, key=lambda r: float("inf" if r.threshold_share is None else r.threshold_share))


def against_bound(subject: Subject, relation: str, y: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor,
                  dtype: torch.dtype, kind: str, n: int, detail: str, tensor: str = "out") -> Row:
    """The row that says how much of the bound `limit` the error of y takes; elements above it are its mismatches."""
    largest = torch.finfo(dtype).max
    if y.dtype != dtype or y.shape != exact.shape:
        return subject.row(relation, "rows", Drift(exact.numel(), exact.numel(), float("inf")), "fp64", kind, n, tensor=tensor,
                           detail=f"returned {y.dtype} {tuple(y.shape)}, expected {dtype} {tuple(exact.shape)}")
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
    row = subject.row(relation, "rows", Drift(over, share.numel(), float(gap.max()) if gap.numel() else 0.0),
                      "fp64", kind, n, tensor=tensor, detail=detail)
    relative = (gap / exact[finite].abs().clamp(min=torch.finfo(torch.float64).tiny))
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
            rows.append(subject.row("parity", f"{a}={b}", compare(subject.layout(a), subject.layout(b)), b, SHARPEST,
                                    sum(subject.lengths)))
        except Exception as error:
            rows.append(subject.row("parity", f"{a}={b}", None, b, SHARPEST, sum(subject.lengths), detail=sentence(error)))
    return rows


def judge(subject: Subject, examples: int = 5) -> list[Row]:
    """Every relation that a forward op is held to."""
    refused = supported(subject)
    if refused:
        return [refused]
    rows = invariance(subject) + parity(subject) + [random_layouts(subject, examples), determinism(subject), *by_view(subject)]
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
        mine = [r for r in rows if not r.control and (r.op, r.case, r.dtype) ==
                (s.problem.op.name, s.problem.case, dtype_name(s.problem.dtype))]
        if any(r.verdict == UNSUPPORTED for r in mine):
            continue
        names = layouts(s.lengths, s.problem.seed)
        assert {name.split(":")[0] for name in names} == set(SWEEP["layouts"])
        required = {("invariance", layout, None, None) for layout in (*names, "random", *VIEWS)}
        required |= {("invariance", "rows", m, None) for m in contract.rows(s.largest)}
        required |= {("invariance", "rows", None, kind) for kind in KINDS} | {("accuracy", "rows", None, k) for k in KINDS}
        required |= {("determinism", "packed", None, None)} | {("parity", f"{a}={b}", None, None) for a, b in PARITIES}
        for relation, layout, m, kind in sorted(required, key=str):
            if not any((r.relation, r.layout) == (relation, layout) and m in (None, r.rows) and kind in (None, r.inputs)
                       for r in mine):
                missing.append(s.row(relation, layout, None, inputs=kind or "", rows=m or 0,
                                     detail="required by the contract, not run"))
    return missing
