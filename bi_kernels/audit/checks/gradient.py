"""The relations of gradients: the same bits over layouts and micro-batch splits, and fp64's values."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import torch

from bi_kernels import contract
from bi_kernels.audit.accuracy import against_bound
from bi_kernels.audit.axes import NO_GRAD_NEEDED, Kind, axes_of
from bi_kernels.audit.checks import memory, single_call
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import ACCURACY, DETERMINISM, INVARIANCE, Row, needs_fix
from bi_kernels.audit.layouts import VIEWS, shapes_launched
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest, refusal
from bi_kernels.audit.targets.op_step import NAN_PADDING, Step, gradient_lengths
from bi_kernels.contract import SWEEP, dtype_name
from bi_kernels.reference_gradients import gradient

LAYOUTS = tuple(SWEEP["gradient_layouts"])
ALONE = ("batch", "left_padded:16", "permuted")  # where parameters without main_grad are asked, too
UNALIGNED, unaligned = next(iter(VIEWS.items()))
WITH_NEIGHBOURS = ("batch", "left_padded:16", "permuted", "neighbours")  # where a sample that is not finite has company
PADDED = ("batch", "left_padded:16")  # where padding that holds NaN must reach no gradient of a parameter
ACCURATE = ("normal", "wide", CANCELLING)  # inputs on which gradients are held against fp64
ACCURATE_TOKENS = 300
LEFT = ".grad"  # where a parameter without main_grad has its gradient

Gradients = dict  # {input: its gradient}


def judge_gradients(subject: OpUnderTest) -> list[Row]:
    """Judges invariance and determinism of every gradient, and how the op is used; see `by_split` and
    `uses`."""
    rows = list(by_split(subject))
    computes = rows[0].mismatches is not None  # else that row says what it raised
    return [*rows, *single_call.by_use(subject)] if computes else rows


def by_split(subject: OpUnderTest) -> Iterator[Row]:
    """Judges invariance over layouts and splits, `.grad` without a main_grad, and determinism, tensor by tensor."""
    kinds = {CANCELLING: LAYOUTS, "nonfinite": WITH_NEIGHBOURS} | (
        {NAN_PADDING: PADDED} if subject.problem.op.shared else {}
    )
    for kind, names in kinds.items():
        step = Step(subject, kind)
        said = {"inputs": kind, "rows": step.count}
        compute = lambda: (step.gradients(), tuple(step.without_gradients()))
        verdict = lambda error: refusal(subject, error)
        first, raised = subject.computed(INVARIANCE, "packed", compute, verdict, against="singles", **said)
        if raised:
            yield from raised
            return
        base, rolled = first
        for name, made, expected, left_in, more in _asked(step, names, base):
            trained: list = []  # its outputs, before `expected` makes others
            told = said | {"axes": axes_of(INVARIANCE, name, kind)} | more

            def making() -> Gradients:
                found = made()
                trained[:] = step.outputs
                return found

            def asked() -> list[Row]:
                if name in VIEWS and (why := memory.layout_refusal(subject, making)):
                    refused = told | {"against": "packed", "detail": why}
                    rows = [
                        subject.row(INVARIANCE, name, Drift(0, 0), tensor=f"d{k}{left_in}", **refused) for k in base
                    ]
                    return [
                        *rows,
                        subject.row("invariance", name, Drift(0, 0), **refused | {"against": NO_GRAD_NEEDED}),
                    ]
                trained.clear()
                return _drifts(subject, INVARIANCE, name, making(), expected(), left_in, **told)

            if _judged(step, base):
                yield from subject.attempt(INVARIANCE, name, asked, **told)
            else:  # embedding has gradients of its parameter alone
                yield from subject.computed(INVARIANCE, name, making, **told)[1]
            if not left_in and trained:  # else it raised, or was refused, as a row says
                axes = [Kind.MODE] if name == "packed" else [*told["axes"], Kind.MODE]
                untrained = told | {"against": NO_GRAD_NEEDED, "axes": axes}
                yield from subject.attempt("invariance", name, lambda: compare(tuple(trained), rolled), **untrained)
        if kind == CANCELLING:
            yield from _again(step, base, said)


def _asked(step: Step, names: Sequence[str], base: Gradients) -> Iterator[tuple[str, Callable, Callable, str, dict]]:
    """Yields what invariance asks: a layout or view, what makes its gradients, what they are to be, in what they
    are left if not in a main_grad, and what is said."""
    for name in names:
        against = "singles" if name == "packed" else "packed"
        made = lambda: _judged(step, step.gradients(name))
        expected = lambda: _judged(step, base if against == "packed" else step.gradients(against))
        yield name, made, expected, "", {"against": against, "detail": shapes_launched(step.layouts[name])}
    if step.kind != CANCELLING:
        return
    for name, view in VIEWS.items():
        said = {"against": "packed", "detail": "tokens and upstream gradient", "axes": [Kind.MEMORY]}
        yield name, lambda: step.gradients(view=view), lambda: base, "", said
    alone = cache(lambda: step.gradients(main_grad=False))
    if step.shared:
        said = {"against": "packed", "detail": "without main_grad", "axes": [Kind.MEMORY]}
        yield UNALIGNED, lambda: step.gradients(main_grad=False, view=unaligned), alone, LEFT, said
    for name in ALONE if step.shared else ():
        said = {"against": "packed", "detail": "without main_grad"}
        yield name, lambda: step.gradients(name, main_grad=False), alone, LEFT, said


def _judged(step: Step, gradients: Gradients) -> Gradients:
    """Returns what a sample that is not finite must leave alone: the gradients of the others' tokens."""
    if step.kind != "nonfinite":
        return gradients
    return {k: t[~step.poisoned] for k, t in gradients.items() if k in step.tokens}


def _again(step: Step, base: Gradients, said: dict) -> list[Row]:
    runs = SWEEP["interpreter_gradient_runs" if step.subject.problem.device.type == "cpu" else "runs"]
    more = said | {"against": "itself", "detail": f"backward, {runs} runs"}
    for _ in range(runs - 1):
        found = compared(step.subject, DETERMINISM, "packed", step.gradients, lambda: base, **more)
        if needs_fix(found):
            break
    return found


def compared(
    subject: OpUnderTest,
    relation: str,
    layout: str,
    make: Callable[[], Gradients],
    expected: Callable[[], Gradients],
    **said,
) -> list[Row]:
    """Compares gradients tensor by tensor; one row that says so where either raises."""
    rows = lambda: _drifts(subject, relation, layout, make(), expected(), **said)
    return subject.attempt(relation, layout, rows, **said)


def _drifts(
    subject: OpUnderTest, relation: str, layout: str, found: Gradients, wanted: Gradients, left_in: str = "", **said
) -> list[Row]:
    drift = lambda k: compare(found[k], wanted[k])
    return [subject.row(relation, layout, drift(k), tensor=f"d{k}{left_in}", **said) for k in wanted]


def judge_gradient_accuracy(subject: OpUnderTest) -> list[Row]:
    """Judges every gradient against fp64, on each family of inputs."""
    return [
        row
        for kind in ACCURATE
        for row in subject.attempt(
            ACCURACY, "rows", lambda: gradient_accuracy(subject, kind), against="fp64", inputs=kind
        )
    ]


def gradient_accuracy(subject: OpUnderTest, kind: str) -> list[Row]:
    """Measures every gradient's error against fp64 as a share of the contract's bound: of tokens in their dtype, of
    parameters in fp32; of `normal` inputs also what a parameter without main_grad has in `.grad`."""
    ends = np.minimum(np.cumsum([0, *gradient_lengths(subject)]), ACCURATE_TOKENS)
    lengths = [n for n in np.diff(ends).tolist() if n]
    step = Step(subject, kind, lengths)
    found = {f"d{k}": (k, y) for k, y in step.gradients().items()}
    if kind == "normal" and step.shared:
        own = step.gradients(main_grad=False)
        found |= {f"d{k}.grad": (k, own[k]) for k in step.shared}
    return against_fp64(step, found)


def against_fp64(step: Step, found: dict[str, tuple[str, torch.Tensor]]) -> list[Row]:
    """Measures gradients of a step's packed call, {what a row says: (input, gradient)}, against fp64."""
    p = step.subject.problem
    constants = dict(step.subject.constants()) | p.where(step.at)
    exact = gradient(p.op.function or p.op.name, step.tokens | step.shared, constants, step.dy, step.lengths)
    rows = []
    for tensor, (k, y) in found.items():
        e, dtype = exact[k], y.dtype
        limit = contract.bound(p.contract_row, dtype, e.exact, e.magnitude, e.n, gradient=k, inputs=p.dtype)
        said = dtype, step.kind, step.count, dtype_name(dtype), tensor
        rows.append(against_bound(step.subject, ACCURACY, y, e.exact, limit, *said))
    return rows
