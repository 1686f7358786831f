"""Judges a session's ops by every relation: forward, gradients, and the static audit of all that was launched; or by a
few that kill most mutants."""

import importlib
from collections.abc import Callable
from contextlib import nullcontext, suppress

from bi_kernels.audit import parallel
from bi_kernels.audit.checks import forward, gradient, limits, long_sequences, single_call
from bi_kernels.audit.findings import ACCURACY, INVARIANCE, UNSUPPORTED, Row
from bi_kernels.audit.reproduce.operator import scripts
from bi_kernels.audit.reproduce.script import verify_scripts
from bi_kernels.audit.static.binary import examined
from bi_kernels.audit.static.launches import Launches, recorded
from bi_kernels.audit.static.verdict import atomics_free
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import VARIANT

QUICK = ("singles", "batch", "left_padded:16", "chunked:7", "decode")  # layouts of a quick audit
QUICK_ATTENTION = ("batch", "chunked:7", "decode")  # whose calls are many; the last not of its variants
QUICK_GRADIENTS = ("singles", "batch", "permuted")


def judge_subject(session, number: int, wants_forward: bool, wants_backward: bool) -> tuple[list[Row], Launches | None]:
    """Judges one of the session's subjects: its rows, and, where gradients were judged, what was launched, of which the
    static audit is left to who has seen all subjects."""
    subject = session.make()[number]
    refused = lambda rows: any(r.verdict == UNSUPPORTED and r.against != single_call.SINGLE_CALL for r in rows)
    if wants_backward:
        importlib.import_module("torch._dynamo")  # one use is compiled: what records must know before
    brief = subject.problem.brief
    with recorded() if wants_backward and not brief else nullcontext() as launches:
        rows = forward.judge(subject) if wants_forward else []
        subject.forget()
        if wants_backward and not refused(rows):
            rows += gradient.judge_gradients(subject)
    if refused(rows):
        return rows, None
    if wants_forward:
        subject.forget()
        rows += limits.judge(subject, wants_backward)
    if not wants_backward:
        return rows, None
    if brief:  # else of every layout, view and use
        with recorded() as launches, suppress(Exception):  # a row says what it raises
            for layout in VARIANT["compiled"]:
                Step(subject, CANCELLING).gradients(layout)
    rows += gradient.judge_gradient_accuracy(subject) + long_sequences.judge(subject)
    launches.variants = launches.variants | examined(launches, only_compiled=True)
    return rows, launches


def judge(session, wants_forward: bool, wants_backward: bool, meanwhile: Callable = lambda session: None) -> list[Row]:
    """Judges every relation of every op of a session's audit; drifts leave a reproducer. Records and returns the rows;
    the variants that were launched become the session's."""
    subjects, added, launched, made = session.make(), [], [], []
    other = single_call.begin_otherwise(session) if wants_backward else None
    judged = parallel.each(session, judge_subject, range(len(subjects)), wants_forward, wants_backward)
    meanwhile(session)
    for subject, (rows, launches) in zip(subjects, judged):
        if launches is not None:
            launched.append((subject, launches))
        if session.out:
            made += scripts(subject, session.candidate, rows, session.out / "repro")
        subject.forget()
        session.add(rows)
        added += rows
    verify_scripts(made)
    rest: list[Row] = []
    if wants_backward:
        rest, session.variants = atomics_free(launched)
        if launched:  # not all are refused
            rest += single_call.by_first_call(session, other)
    session.add(rest)
    return added + rest


def quick(subject: OpUnderTest, wants_forward: bool = True, wants_backward: bool = False) -> list[Row]:
    """Returns the rows of an op at one case: a few layouts, and accuracy, of its results, its gradients or both."""
    if refused := forward.supported(subject):
        return [refused]
    rows: list[Row] = []
    if wants_forward:
        of_attention = QUICK_ATTENTION[: -1 if subject.problem.brief else None]
        rows += forward.by_layout(subject, of_attention if subject.problem.op.cache else QUICK)
        rows += subject.attempt("accuracy", "rows", lambda: forward.accuracy(subject), against="fp64")
    if wants_backward:
        step = Step(subject, CANCELLING)
        packed, said = step.gradients(), {"against": "packed", "inputs": CANCELLING, "rows": step.count}
        for layout in QUICK_GRADIENTS:
            made = lambda: step.gradients(layout)
            rows += gradient.compared(subject, INVARIANCE, layout, made, lambda: packed, **said)
        made = lambda: gradient.gradient_accuracy(subject, "normal")
        rows += subject.attempt(ACCURACY, "rows", made, against="fp64", inputs="normal")
    return rows
