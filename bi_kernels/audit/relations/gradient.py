"""The relations of gradients: the same bits over layouts and micro-batch splits, and fp64's values."""

from collections.abc import Callable, Iterator, Sequence

from bi_kernels import contract
from bi_kernels.audit.evidence import coverage
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, UNSUPPORTED, Row, sentence
from bi_kernels.audit.problem.call_layouts import VIEWS, shapes_launched
from bi_kernels.audit.problem.subject import SHARPEST, Subject, refusal
from bi_kernels.audit.relations.forward import against_bound
from bi_kernels.audit.relations.step import NAN_PADDING, Step, gradient_lengths
from bi_kernels.audit.static.verdict import LEVELS, STATIC
from bi_kernels.contract import SWEEP, dtype_name
from bi_kernels.reference_gradients import gradient

LAYOUTS = tuple(SWEEP["gradient_layouts"])
ALONE = ("batch", "left_padded:16", "permuted")  # where parameters without main_grad are asked, too
BESIDE = ("batch", "left_padded:16", "permuted", "neighbours")  # where a sample that is not finite has company
PADDED = ("batch", "left_padded:16")  # where padding that holds NaN must reach no gradient of a parameter
ACCURATE = ("normal", "wide", SHARPEST)  # inputs on which gradients are held against fp64
ACCURATE_TOKENS = 300
INVARIANCE, ACCURACY, DETERMINISM = "gradient invariance", "gradient accuracy", "determinism"

Gradients = dict  # {input: its gradient}


def judge_gradients(subject: Subject) -> list[Row]:
    """Judges invariance and determinism of every gradient; see `by_split`."""
    return list(by_split(subject))


def by_split(subject: Subject) -> Iterator[Row]:
    """Judges invariance over layouts and splits, `.grad` without a main_grad, and determinism, tensor by tensor."""
    kinds = {SHARPEST: LAYOUTS, "nonfinite": BESIDE} | ({NAN_PADDING: PADDED} if subject.problem.op.shared else {})
    for kind, names in kinds.items():
        refused = yield from _over_layouts(Step(subject, kind), names)
        if refused:
            return


def _over_layouts(step: Step, names: Sequence[str]) -> Iterator[Row]:
    """Judges a step of one family of inputs under some layouts; returns whether the candidate could not compute it."""
    subject, said = step.subject, {"inputs": step.kind, "rows": step.count}
    try:
        base = step.gradients(step.layouts["packed"])
    except Exception as error:
        said |= {"verdict": refusal(subject, error), "detail": sentence(error)}
        yield subject.row(INVARIANCE, "packed", None, "singles", **said)
        return True
    for name in names:
        expected = lambda: base if name != "packed" else step.gradients(step.layouts["singles"])
        yield from compared(
            subject,
            INVARIANCE,
            name,
            lambda: _judged(step, step.gradients(step.layouts[name])),
            lambda: _judged(step, expected()),
            against="singles" if name == "packed" else "packed",
            detail=shapes_launched(step.layouts[name]),
            **said,
        )
    if step.kind == SHARPEST:
        yield from _by_view(step, base, said)
        yield from _without_main_grad(step, said)
        yield from _again(step, base, said)
    return False


def _judged(step: Step, gradients: Gradients) -> Gradients:
    """Returns what a sample that is not finite must leave alone: the gradients of the others' tokens."""
    if step.kind != "nonfinite":
        return gradients
    return {k: t[~step.poisoned] for k, t in gradients.items() if k in step.tokens}


def _by_view(step: Step, base: Gradients, said: dict) -> Iterator[Row]:
    for name, view in VIEWS.items():
        made = lambda: step.gradients(step.layouts["packed"], view=view)
        detail = "tokens and upstream gradient"
        yield from compared(step.subject, INVARIANCE, name, made, lambda: base, against="packed", detail=detail, **said)


def _without_main_grad(step: Step, said: dict) -> Iterator[Row]:
    own: Gradients = {}
    alone = lambda: own or own.update(step.gradients(step.layouts["packed"], main_grad=False)) or own
    for name in ALONE if step.subject.problem.op.shared else ():
        made = lambda: step.gradients(step.layouts[name], main_grad=False)
        more = said | {"against": "packed", "detail": "without main_grad"}
        yield from compared(step.subject, INVARIANCE, name, made, alone, left_in=".grad", **more)


def _again(step: Step, base: Gradients, said: dict) -> list[Row]:
    runs = SWEEP["interpreter_gradient_runs" if step.subject.problem.device.type == "cpu" else "runs"]
    made = lambda: step.gradients(step.layouts["packed"])
    more = said | {"against": "itself", "detail": f"backward, {runs} runs"}
    for _ in range(runs - 1):
        found = compared(step.subject, DETERMINISM, "packed", made, lambda: base, **more)
        if any(r.verdict == NEEDS_FIX for r in found):
            break
    return found


def compared(
    subject: Subject,
    relation: str,
    layout: str,
    make: Callable[[], Gradients],
    expected: Callable[[], Gradients],
    left_in: str = "",
    **said,
) -> list[Row]:
    """Compares gradients tensor by tensor; one row that says so where either raises."""

    def rows() -> list[Row]:
        found, wanted = make(), expected()
        return [
            subject.row(relation, layout, compare(found[k], wanted[k]), tensor=f"d{k}{left_in}", **said) for k in wanted
        ]

    return subject.attempt(relation, layout, rows, **said)


def judge_gradient_accuracy(subject: Subject) -> list[Row]:
    """Judges every gradient against fp64, on each family of inputs."""
    return [
        row
        for kind in ACCURATE
        for row in subject.attempt(
            ACCURACY, "rows", lambda: gradient_accuracy(subject, kind), against="fp64", inputs=kind
        )
    ]


def gradient_accuracy(subject: Subject, kind: str) -> list[Row]:
    """Measures every gradient's error against fp64 as a share of the contract's bound: of tokens in their dtype, of
    parameters in fp32; of `normal` inputs also what a parameter without main_grad has in `.grad`."""
    lengths, left = [], ACCURATE_TOKENS
    for n in gradient_lengths(subject):
        lengths.append(min(n, left))
        left -= lengths[-1]
        if not left:
            break
    step = Step(subject, kind, lengths)
    found = {f"d{k}": (k, y) for k, y in step.gradients(step.layouts["packed"]).items()}
    if kind == "normal" and step.shared:
        own = step.gradients(step.layouts["packed"], main_grad=False)
        found |= {f"d{k}.grad": (k, own[k]) for k in step.shared}
    p = subject.problem
    constants = dict(subject.constants()) | ({"positions": step.at} if p.op.positions else {})
    exact = gradient(p.op.function or p.op.name, step.tokens | step.shared, constants, step.dy, lengths)
    rows = []
    for tensor, (k, y) in found.items():
        e, dtype = exact[k], y.dtype
        limit = contract.bound(p.contract_row, dtype, e.exact, e.magnitude, e.n, gradient=k, inputs=p.dtype)
        detail = dtype_name(dtype)
        rows.append(against_bound(subject, ACCURACY, y, e.exact, limit, dtype, kind, step.count, detail, tensor))
    return rows


def missing(rows: Sequence[Row], subjects: Sequence[Subject]) -> list[Row]:
    """Returns a row that needs a fix for every gradient, layout and relation that is required and was not run."""
    found = []
    for s in subjects:
        if not _refused(rows, s):
            found += coverage.missing(rows, s, _required(s))
    return found


def _refused(rows: Sequence[Row], s: Subject) -> bool:
    mine = s.problem.op.name, s.problem.case, dtype_name(s.problem.dtype)
    refusals = (r for r in rows if r.verdict == UNSUPPORTED and r.relation != STATIC and not r.control)
    return any((r.op, r.case, r.dtype) == mine for r in refusals)


def _required(s: Subject) -> Iterator[dict]:
    row = lambda relation, layout, tensor, inputs: {
        "relation": relation,
        "layout": layout,
        "tensor": tensor,
        "inputs": inputs,
    }
    op = s.problem.op
    yield row(STATIC, LEVELS, "out", "")
    for k, dims in (op.tokens | op.shared).items():
        if dims.endswith((":id", ":bool")):
            continue
        yield from (row(INVARIANCE, layout, f"d{k}", SHARPEST) for layout in (*LAYOUTS, *VIEWS))
        yield row(DETERMINISM, "packed", f"d{k}", SHARPEST)
        yield from (row(ACCURACY, "rows", f"d{k}", kind) for kind in ACCURATE)
        if k in op.tokens:
            yield from (row(INVARIANCE, layout, f"d{k}", "nonfinite") for layout in BESIDE)
        if op.shared:
            yield from (row(INVARIANCE, layout, f"d{k}.grad", SHARPEST) for layout in ALONE)
            yield from (row(INVARIANCE, layout, f"d{k}", NAN_PADDING) for layout in PADDED)
        if k in op.shared:
            yield row(ACCURACY, "rows", f"d{k}.grad", "normal")
