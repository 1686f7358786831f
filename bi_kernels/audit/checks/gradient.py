"""The relations of gradients: the same bits over layouts and micro-batch splits, fp64's values, and the right dtype."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np
import torch

from bi_kernels import contract
from bi_kernels.audit.axes import NO_GRAD_NEEDED, Kind, axes_of
from bi_kernels.audit.checks import memory, single_call
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import ACCURACY, DETERMINISM, INVARIANCE, Row, needs_fix
from bi_kernels.audit.layouts import VIEWS, shapes_launched
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest, refusal
from bi_kernels.audit.targets.op_step import NAN_PADDING, Step, gradient_lengths
from bi_kernels.contract import SWEEP, VARIANT, dtype_name
from bi_kernels.reference_gradients import gradient

LAYOUTS = tuple(SWEEP["gradient_layouts"])
ALONE = ("batch", "left_padded:16", "permuted")  # where parameters without main_grad are asked, too
UNALIGNED, unaligned = next(iter(VIEWS.items()))
WITH_NEIGHBOURS = ("batch", "left_padded:16", "permuted", "neighbours")  # where a sample that is not finite has company
PADDED = ("batch", "left_padded:16")  # where padding that holds NaN must reach no gradient of a parameter
ACCURATE = ("normal", "wide", CANCELLING)  # inputs on which gradients are held against fp64
ACCURATE_TOKENS = 300
LEFT = ".grad"  # where a parameter without main_grad has its gradient
DTYPES = "contract"  # relation of the rows that say in which dtype a gradient is left
IN_GRAD, BUFFERED = "gradients, in .grad", "gradients, with main_grad"

Gradients = dict  # {input: its gradient}
Made = Callable[[], Gradients]


def judge_gradients(subject: OpUnderTest) -> list[Row]:
    """Judges invariance and determinism of every gradient, and how the op is used; see `by_split` and
    `single_call`."""
    rows = list(by_split(subject))
    computes = rows[0].mismatches is not None  # else that row says what it raised
    return [*rows, *single_call.by_use(subject)] if computes else rows


def by_split(subject: OpUnderTest) -> Iterator[Row]:
    """Judges invariance over layouts and splits, `.grad` without a main_grad, and determinism, tensor by tensor."""
    layouts = tuple(VARIANT["gradient_layouts"]) if subject.problem.brief else LAYOUTS
    kinds = {CANCELLING: layouts, "nonfinite": WITH_NEIGHBOURS}
    for kind, names in (kinds | ({NAN_PADDING: PADDED} if subject.problem.op.shared else {})).items():
        step = Step(subject, kind)
        said = {"inputs": kind, "rows": step.count}
        compute = lambda: (step.gradients(), tuple(step.rolled().values()))
        first, raised = subject.computed(
            INVARIANCE, "packed", compute, partial(refusal, subject), against="singles", **said
        )
        if raised:
            yield from raised
            return
        base, rolled = first
        for name, made, expected, left_in, more in _asked(step, names, base):
            told = said | {"axes": axes_of(INVARIANCE, name, kind)} | more
            outputs: list = []  # of `made`, before `expected` makes others

            def making() -> Gradients:
                found = made()
                outputs[:] = step.outputs
                return found

            def asked() -> list[Row]:
                if name in VIEWS and (why := memory.layout_refusal(subject, made)):
                    refused = partial(subject.row, drift=Drift(0, 0), **told | {"against": "packed", "detail": why})
                    rows = [refused(INVARIANCE, name, tensor=f"d{k}{left_in}") for k in base]
                    return [*rows, refused("invariance", name, against=NO_GRAD_NEEDED)]
                outputs.clear()
                return _drifts(subject, INVARIANCE, name, making(), expected(), left_in, **told)

            if _judged(step, base):
                yield from subject.attempt(INVARIANCE, name, asked, **told)
            else:  # embedding has gradients of its parameter alone
                yield from subject.computed(INVARIANCE, name, making, **told)[1]
            if not left_in and outputs:  # else it raised, or was refused, as a row says
                axes = [Kind.MODE] if name == "packed" else [*told["axes"], Kind.MODE]
                untrained = told | {"against": NO_GRAD_NEEDED, "axes": axes}
                yield from subject.attempt("invariance", name, lambda: compare(tuple(outputs), rolled), **untrained)
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
    said = {"against": "packed", "detail": "tokens and upstream gradient", "axes": [Kind.MEMORY]}
    for name, view in {} if step.subject.problem.brief else VIEWS.items():
        yield name, lambda: step.gradients(view=view), lambda: base, "", said
    if step.shared:
        alone, said = (
            cache(lambda: step.gradients(main_grad=False)),
            {"against": "packed", "detail": "without main_grad"},
        )
        made = lambda: step.gradients(main_grad=False, view=unaligned)
        yield UNALIGNED, made, alone, LEFT, said | {"axes": [Kind.MEMORY]}
        for name in ALONE:
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


def compared(subject: OpUnderTest, relation: str, layout: str, make: Made, expected: Made, **said) -> list[Row]:
    """Compares gradients tensor by tensor; one row that says so where either raises."""
    rows = lambda: _drifts(subject, relation, layout, make(), expected(), **said)
    return subject.attempt(relation, layout, rows, **said)


def _drifts(
    subject: OpUnderTest, relation: str, layout: str, found: Gradients, wanted: Gradients, left_in: str = "", **said
) -> list[Row]:
    row = partial(subject.row, relation, layout)
    return [row(compare(found[k], t), tensor=f"d{k}{left_in}", **said) for k, t in wanted.items()]


def judge_gradient_accuracy(subject: OpUnderTest) -> list[Row]:
    """Judges every gradient against fp64, on each family of inputs."""
    judged = lambda kind: subject.attempt(
        ACCURACY, "rows", partial(gradient_accuracy, subject, kind), against="fp64", inputs=kind
    )
    return [row for kind in ACCURATE for row in judged(kind)]


def gradient_accuracy(subject: OpUnderTest, kind: str) -> list[Row]:
    """Measures every gradient's error against fp64 as a share of the contract's bound: of tokens in their dtype, of
    parameters in fp32; of `normal` inputs also what a parameter without main_grad has in `.grad`."""
    ends = np.minimum(np.cumsum([0, *gradient_lengths(subject)]), ACCURATE_TOKENS)
    step = Step(subject, kind, [n for n in np.diff(ends).tolist() if n])
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
        said = {"inputs": step.kind, "rows": step.count, "detail": dtype_name(dtype), "tensor": tensor}
        rows.append(step.subject.against_bound(ACCURACY, y, e.exact, limit, dtype, **said))
    return rows


def judge_dtypes(subject: OpUnderTest) -> list[Row]:
    """Judges a token's gradient to be of the token's dtype, a parameter's of its own in `.grad`, or, where it has a
    `main_grad`, in that fp32 buffer alone."""
    ways = (IN_GRAD, BUFFERED) if subject.problem.op.shared else (IN_GRAD,)
    return [row for way in ways for row in subject.attempt(DTYPES, way, lambda: _dtypes(subject, way))]


def _dtypes(subject: OpUnderTest, way: str) -> list[Row]:
    p, rows, step = subject.problem, [], Step(subject, "normal", [5, 3])
    for k, y in step.gradients(main_grad=way == BUFFERED).items():
        buffered = way == BUFFERED and k in p.op.shared
        wanted = torch.float32 if buffered else (step.tokens | step.shared)[k].dtype
        beside = buffered and k in step.in_grad
        other = y.dtype != wanted or beside
        place = f"{dtype_name(y.dtype)}{' in .grad' * beside}"
        said = place + f", expected {dtype_name(wanted)}{' in main_grad' * buffered}" * other
        rows.append(subject.row(DTYPES, way, Drift(int(other), 1), tensor=f"d{k}", detail=said))
    return rows
