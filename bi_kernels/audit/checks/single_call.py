"""One packed call of an op with its backward, made again in every other way: none of it may change a bit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from bi_kernels.audit.axes import Kind, Side
from bi_kernels.audit.checks.edge_cases import NO_COLUMNS, ONE_TOKEN, begun, populations
from bi_kernels.audit.checks.memory import NO_ROWS, op_memory
from bi_kernels.audit.checks.modes import op_modes
from bi_kernels.audit.checks.order import op_order
from bi_kernels.audit.checks.requests import FROZEN, FROZEN_CHECKPOINTED, Variant, op_requests
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import UNSUPPORTED, Row, sentence
from bi_kernels.audit.step import Results
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import VARIANT

SINGLE_CALL = "one packed call"  # what the same call made in another way is compared with
AXES: dict[str, tuple[Kind, str, Callable[[Step], dict[str, Variant]]]] = {  # kind of what differs, relation, checks
    "mode": (Kind.MODE, "invariance", op_modes),
    "demand": (Kind.DEMAND, "gradient invariance", op_requests),
    "memory": (Kind.KEPT, "invariance", op_memory),
    "history": (Kind.BEFORE, "determinism", op_order),
    "population": (
        Kind.LAYOUT,
        "gradient invariance",
        lambda u: {name: partial(way, u) for name, way in populations(u.subject.problem.op).items()},
    ),
}
# what a refusal says of these, in any exception; of every other way it says the name, in one that means a refusal
REFUSALS = dict.fromkeys([NO_ROWS, *NO_COLUMNS.values()], ("(0,", ", 0)", " is 0", "0 elements"))
OF_NO_LAYOUT = FROZEN, FROZEN_CHECKPOINTED
REFUSALS |= {ONE_TOKEN: ("expected (..., M, K)",)}  # a product of matrices


def by_use(subject: OpUnderTest, only: Sequence[str] = ()) -> Iterator[Row]:
    """Judges the axes, or those named in `only`: a row a way, of all outputs and gradients together."""
    few = subject.problem.brief and not subject.problem.op.shared
    only = only or (VARIANT["uses"] if few else tuple(AXES))
    u, raised = subject.computed("invariance", SINGLE_CALL, lambda: begun(subject))
    if raised:
        yield from raised
        return
    for axis in only:
        kind, relation, checks = AXES[axis]
        said = {"against": SINGLE_CALL, "inputs": CANCELLING, "rows": u.count, "detail": axis}
        said |= {"axes": [kind], "side": Side.CALL}
        for name, asked in checks(u).items():
            yield from subject.attempt(relation, name, partial(judged, subject, relation, name, asked, **said), **said)


def judged(subject: OpUnderTest, relation: str, name: str, asked: Variant, **said) -> Row:
    """Returns the row of one way. Refused in a sentence that names it, or the shape without rows, it passes, and says
    so: nobody is given other bits. A mode that is refused is unsupported."""
    try:
        found, expected = asked()
    except Exception as error:
        if not _refuses(subject, name, error):
            raise
        verdict = UNSUPPORTED * (said["axes"] == [Kind.MODE] or name in OF_NO_LAYOUT)
        told = said | {"detail": f"refused: {sentence(error)}", "verdict": verdict}
        return subject.row(relation, name, Drift(0, 0), **told)
    drift, tensor = compared(found, expected)
    return subject.row(relation, name, drift, tensor=tensor, **said | {"side": subject.side(tensor) or Side.CALL})


def _refuses(subject: OpUnderTest, name: str, error: Exception) -> bool:
    """Tells whether what was raised is a refusal of a way. A candidate's may say what it likes where a token has no
    batch, or there are no rows or columns."""
    if name in (ONE_TOKEN, NO_ROWS, *NO_COLUMNS.values()) and subject.candidate != "bi_kernels":
        return hasattr(error, "of_candidate") and "CUDA error" not in str(error)
    if name in OF_NO_LAYOUT and subject.candidate != "bi_kernels":  # an op may ask for the layout, whatever trains
        return "layout" in str(error)
    clear = isinstance(error, (TypeError, ValueError, NotImplementedError))
    return any(word in str(error) for word in REFUSALS.get(name, [name] * clear))


def compared(found: Results, expected: Results) -> tuple[Drift, str]:
    """Returns the drift of all tensors together and the first that differs. Raises ValueError where one is missing."""
    for k, t in expected.items():
        if (found.get(k) is None) != (t is None):
            raise ValueError(f"{k} is {'wanted and missing' if t is not None else 'there, though nobody wants it'}")
    names = [k for k, t in expected.items() if t is not None]
    drift = compare(tuple(found[k] for k in names), tuple(expected[k] for k in names))
    return replace(drift, part=0), names[drift.part]


def again(subject: OpUnderTest, axis: str, name: str, once: bool) -> list[Tensor]:
    """Returns what a way of an axis gives, or, once, what it is compared with, without what is rightly not there."""
    found, expected = AXES[axis][2](begun(subject))[name]()
    return [(expected if once else found)[k] for k, t in expected.items() if t is not None]
