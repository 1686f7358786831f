"""The session of the audit `any`, of a callable in no registry on inputs that its user names."""

import copy
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor
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
from bi_kernels.audit.controls.usage import halved_again, one_buffer, trains_otherwise
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
        t, rows = copy.copy(self.report.target), []
        for name, (asked, fault) in CONTROLS.items():
            if t.values[t.first].is_floating_point() or name not in OF_GRADIENTS:
                rows.append(control_row(name, asked(self._broken(fault))))
        if not any(k.startswith("whole sequences") for k in t.refused) and "right_padded" in sequences(t):
            t.function = _wider_otherwise(t)
            rows.append(control_row("another result for a wider batch of sequences", sequences(t)["right_padded"]()))
        self.add(rows)
        return rows

    def _broken(self, fault: Callable[[CallableTarget], Callable]) -> CallableTarget:
        """Returns twice the first input, broken on purpose."""
        t = copy.copy(self.report.target)
        t.dims, t.outputs, t.votes, t.module = [t.batch], [], {}, None
        function = fault(t)
        t.results = lambda arguments: [function(arguments[t.first])]
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
            self.add([control_row(WRAPPED, beyond(self._broken(wrapped)))])
        return rows

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(r.dtype for r in self.rows))


def _double(x: Tensor) -> Tensor:
    return 2.0 * x


def _laid_out(t: CallableTarget) -> list[Row]:
    whole = {"given": t.whole()}
    plan = {k: v for k, v in relations.plan(t.count, t.seed).items() if not k.startswith("rows:")}
    return [r for layout, calls in plan.items() for r in relations.invariance(t, layout, calls, whole)]


def _referred(t: CallableTarget) -> list[Row]:
    return relations.accuracy(t, lambda *given, **told: 2.0 * [*given, *told.values()][list(t.values).index(t.first)])


def _wider_otherwise(t: CallableTarget) -> Callable:
    """Returns a model that is another where a call is wider than the one given."""
    whole = t.values[IDS].shape[1]
    change = lambda y: y * 1.5 if isinstance(y, Tensor) and y.is_floating_point() else y

    def model(*given, **told):
        out = t.eager(*given, **told)
        return tree_map(change, out) if told[IDS].shape[1] > whole else out

    return model


def _one_ulp(t: CallableTarget) -> Callable:
    """Flips the last bit of the last element, if the batch holds more than one sample."""

    def op(x: Tensor) -> Tensor:
        y = (2.0 * x).contiguous()
        raw(y).view(-1)[-1] ^= x.shape[t.batch] > 1
        return y

    return op


def _leaks(t: CallableTarget) -> Callable:
    """Adds 0 times the sum of the inputs, which is not 0 beside a NaN; of integers, the number of samples."""
    return lambda x: 2.0 * x + (0 * x.sum() if x.is_floating_point() else x.shape[t.batch])


def _late(t: CallableTarget) -> Callable:
    """Returns the results of the call before."""
    held: dict = {}

    def op(x: Tensor) -> Tensor:
        before = held.get(x.shape, 2.0 * x)
        held[x.shape] = 2.0 * x
        return before

    return op


CONTROLS = {  # what asks, and how twice the first input is broken
    "one ULP in one element of a batch of more than one": (_laid_out, _one_ulp),
    "a neighbour that leaks, NaN above all": (_laid_out, _leaks),
    "random noise": (lambda t: relations.determinism(t, 3), lambda t: lambda x: 2.0 * x + torch.rand_like(2.0 * x)),
    "another result where a gradient is wanted": (
        lambda t: modes.judged(t, modes.WANTED, t.whole()),
        lambda t: trains_otherwise(_double),
    ),
    "a second backward of half the first": (
        lambda t: relations.requests(t, Step(t))[TWICE](),
        lambda t: halved_again(_double),
    ),
    "one buffer for the results of all calls": (lambda t: memory(t, t.whole())[LATER](), lambda t: one_buffer(_double)),
    "the results of the call before": (lambda t: history(t, t.whole())["after another order"](), _late),
    "results that are off by the largest": (_referred, lambda t: lambda x: 2.0 * x + (2.0 * x).abs().max()),
}
OF_GRADIENTS = {"another result where a gradient is wanted", "a second backward of half the first"}
