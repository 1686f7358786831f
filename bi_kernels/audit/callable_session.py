"""The session of the audit `any`, of a callable in no registry on inputs that its user names."""

import copy
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch.utils._pytree import tree_map

from bi_kernels.audit.callable_audit import audit as audit_callable
from bi_kernels.audit.checks import any_callable as relations
from bi_kernels.audit.checks import modes
from bi_kernels.audit.checks.limits import WRAPPED, applies_to, beyond, wrapped
from bi_kernels.audit.checks.memory import LATER, memory
from bi_kernels.audit.checks.order import history
from bi_kernels.audit.checks.requests import TWICE
from bi_kernels.audit.checks.sequences import IDS, sequences
from bi_kernels.audit.compare import raw
from bi_kernels.audit.faults import CannotJudge
from bi_kernels.audit.findings import PASS, Row, control_row, needs_fix
from bi_kernels.audit.parameters import choose, read
from bi_kernels.audit.report.any_callable import Report
from bi_kernels.audit.session import Session
from bi_kernels.audit.targets.any_callable import CallableTarget, first_and_batch
from bi_kernels.audit.targets.callable_step import Step
from bi_kernels.audit.targets.candidates import Candidate, load
from bi_kernels.audit.targets.user_inputs import bound, named, read_inputs

OFTEN = 2  # seconds between two records of what is known


def start(audit: str, given: dict) -> "AnySession":
    """Begins the audit `any` with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    device = choose(p.device)
    function = load(p.candidate)
    session = AnySession(audit, asdict(p), device, Candidate(p.candidate, {"fn": function}))
    session.inputs = read_inputs(p.inputs, device, p.seed)
    bound(f"candidate {p.candidate!r}", function, session.inputs)
    first_and_batch(session.inputs, p.batch, named(p.shared), named(p.outputs))
    if p.reference:
        bound(f"reference {p.reference!r}", load(p.reference, "reference"), session.inputs)
    return session


class AnySession(Session):
    """A session whose subject is one callable."""

    kept = 0.0  # when its rows were last recorded

    def judge(self) -> Report:
        """Runs the audit; the rows are this session's, and a drift leaves a reproducer."""
        p, fn = self.parameters, self.candidate.functions["fn"]
        given, told = bound(p["candidate"], fn, self.inputs)
        try:
            self.report = audit_callable(
                fn,
                *given,
                names=tuple(self.inputs)[: len(given)],
                shared=named(p["shared"]),
                outputs=named(p["outputs"]),
                reference=load(p["reference"]) if p["reference"] else None,
                folder=self.out and self.out / "repro",
                record=self._keep,
                **{k: p[k] for k in ("batch", "seconds", "seed", "candidate")},
                **told,
            )
        except (TypeError, ValueError) as error:  # it says in a sentence why it cannot judge
            raise CannotJudge(f"candidate is {p['candidate']!r}, inputs is {p['inputs']!r}: {error}") from None
        self.rows = []
        self.add(self.report.rows)
        return self.report

    def _keep(self, rows: list[Row]) -> None:
        """Records what is known so far, now and then."""
        if not self.rows or time.monotonic() - self.kept > OFTEN:
            self.rows, self.kept = [], time.monotonic()
            self.add(list(rows))

    def controls(self) -> list[Row]:
        """Judges twice the first input, broken on purpose, on the same inputs: each must be flagged by its relation."""
        rows = []
        for name, asked, change in CONTROLS:
            t = self._broken(change)
            if asked in (_demanded, _moded) and not t.values[t.first].is_floating_point():
                continue  # nothing of it has a gradient
            found = asked(t)
            rows.append(control_row(name, found))
        t = copy.copy(self.report.target)
        if not any(k.startswith("whole sequences") for k in t.refused) and "right_padded" in sequences(t):
            t.function = _wider_otherwise(t)
            (row,) = sequences(t)["right_padded"]()
            rows.append(control_row("another result for a wider batch of sequences", [row]))
        self.add(rows)
        return rows

    def _broken(self, change: Callable) -> CallableTarget:
        """Returns twice the first input, broken on purpose."""
        t, held = copy.copy(self.report.target), {}
        t.dims, t.outputs, t.votes, t.module = [t.batch], [], {}, None
        t.results = lambda arguments: [change(2.0 * arguments[t.first], arguments[t.first], t, held)]
        return t

    def beyond(self) -> list[Row]:
        """Judges a batch beyond 2**31 elements, on a GPU in bf16, where smaller ones agree, and the control. It comes
        last: after an access to memory that is not there a GPU answers no more."""
        t = self.report.target
        if not applies_to(t) or any(r.layout == "whole batch" for r in needs_fix(self.rows)):
            return []
        rows = beyond(t, seconds=self.parameters["seconds"])
        self.add(rows)
        if {r.verdict for r in rows} == {PASS}:
            found = beyond(self._broken(wrapped))
            self.add([control_row(WRAPPED, found)])
        return rows

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(r.dtype for r in self.rows))


def _repeated(t: CallableTarget) -> list[Row]:
    return relations.determinism(t, 3)


def _laid_out(t: CallableTarget) -> list[Row]:
    whole = {"given": t.whole()}
    return [
        r
        for layout, (calls, filler) in relations.plan(t.count, t.seed).items()
        if not layout.startswith("rows:")
        for r in relations.invariance(t, layout, calls, filler, whole)
    ]


def _moded(t: CallableTarget) -> list[Row]:
    return modes.judged(t, modes.WANTED, t.whole())


def _demanded(t: CallableTarget) -> list[Row]:
    return relations.requests(t, Step(t))[TWICE]()


def _kept(t: CallableTarget) -> list[Row]:
    return memory(t, t.whole())[LATER]()


def _followed(t: CallableTarget) -> list[Row]:
    return history(t, t.whole())["after another order"]()


def _referred(t: CallableTarget) -> list[Row]:
    return relations.accuracy(t, lambda *given, **told: 2.0 * [*given, *told.values()][list(t.values).index(t.first)])


def _wider_otherwise(t: CallableTarget) -> Callable:
    """Returns a model that is another where a call is wider than the one given."""
    whole = t.values[IDS].shape[1]
    change = lambda y: y * 1.5 if isinstance(y, torch.Tensor) and y.is_floating_point() else y

    def model(*given, **told):
        out = t.eager(*given, **told)
        return tree_map(change, out) if told[IDS].shape[1] > whole else out

    return model


def _one_ulp(y, x, t, held):
    """Flips the last bit of the last element, if the batch holds more than one sample."""
    y = y.contiguous()
    if x.shape[t.batch] > 1:
        raw(y).view(-1)[-1] ^= 1
    return y


def _leaks(y, x, t, held):
    """Adds 0 times the sum of the inputs, which is not 0 beside a NaN; of integers, the number of samples."""
    return y + 0 * x.sum() if x.is_floating_point() else y + x.shape[t.batch]


def _noise(y, x, t, held):
    return y + torch.rand_like(y)


def _trained(y, x, t, held):
    return y * 1.5 if x.requires_grad else y


class _Halved(torch.autograd.Function):
    """Returns y; its second backward gives half of the first."""

    @staticmethod
    def forward(ctx, y):
        ctx.times = 0
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.times += 1
        return dy / ctx.times


def _halved(y, x, t, held):
    return _Halved.apply(y)


def _buffered(y, x, t, held):
    return held.setdefault(y.shape, y).copy_(y)


def _late(y, x, t, held):
    before = held.get(y.shape, y)
    held[y.shape] = y.clone()
    return before


def _offset(y, x, t, held):
    return y + y.abs().max()


CONTROLS = (  # what it is called, what asks, how it is broken
    ("one ULP in one element of a batch of more than one", _laid_out, _one_ulp),
    ("a neighbour that leaks, NaN above all", _laid_out, _leaks),
    ("random noise", _repeated, _noise),
    ("another result where a gradient is wanted", _moded, _trained),
    ("a second backward of half the first", _demanded, _halved),
    ("one buffer for the results of all calls", _kept, _buffered),
    ("the results of the call before", _followed, _late),
    ("results that are off by the largest", _referred, _offset),
)
