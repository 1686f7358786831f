"""One packed call of an op with its backward, made again in every other way: none of it may change a bit."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bi_kernels.audit import parallel
from bi_kernels.audit.axes import Kind, Side
from bi_kernels.audit.checks.caches import op_caches
from bi_kernels.audit.checks.edge_cases import NO_COLUMNS, ONE_TOKEN, begun, populations
from bi_kernels.audit.checks.memory import NO_ROWS, op_memory
from bi_kernels.audit.checks.modes import AUTOCAST_FP16, DEVICE, PRECISION, op_modes, untrained
from bi_kernels.audit.checks.order import FIRST, op_order
from bi_kernels.audit.checks.placement import LATE, op_indices, op_placement
from bi_kernels.audit.checks.requests import FROZEN, FROZEN_CHECKPOINTED, Variant, op_requests
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.executor import Process, begin
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
    "placement": (Kind.MEMORY, "gradient invariance", op_placement),
    "indices": (Kind.LAYOUT, "gradient invariance", op_indices),
    "cache": (Kind.CACHE, "invariance", op_caches),
}
ONCE = "placement", "indices", "cache"  # axes on which neither the dtype nor the case of an op matters
# what a refusal says of these, in any exception; of every other way it says the name, in one that means a refusal
REFUSALS = dict.fromkeys([NO_ROWS, *NO_COLUMNS.values()], ("(0,", ", 0)", " is 0", "0 elements"))
REFUSALS |= {ONE_TOKEN: ("expected (..., M, K)",), LATE: ("expected it to start at 0",)}  # a product of matrices
REFUSALS |= {AUTOCAST_FP16: ("autocast",)}  # by torch as well, of bf16
NAMES = {PRECISION: "precision", DEVICE: "default device"}  # by which a refusal names a way
OF_NO_LAYOUT = FROZEN, FROZEN_CHECKPOINTED


def by_use(subject: OpUnderTest, only: Sequence[str] = ()) -> Iterator[Row]:
    """Judges the axes, or those named in `only`: a row a way, of all outputs and gradients together."""
    p = subject.problem
    few, first = p.brief and not p.op.shared, p.first and not p.brief
    only = only or (VARIANT["uses"] if few else [axis for axis in AXES if first or axis not in ONCE])
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
        if not _refuses(subject, said.get("detail", ""), name, error):
            raise
        verdict = UNSUPPORTED * (said["axes"] == [Kind.MODE] or name in OF_NO_LAYOUT)
        told = said | {"detail": f"refused: {sentence(error)}", "verdict": verdict}
        return subject.row(relation, name, Drift(0, 0), **told)
    drift, tensor = compared(found, expected)
    return subject.row(relation, name, drift, tensor=tensor, **said | {"side": subject.side(tensor) or Side.CALL})


def _refuses(subject: OpUnderTest, axis: str, name: str, error: Exception) -> bool:
    """Tells whether what was raised is a refusal of a way. A candidate's may say what it likes where a token has no
    batch, there are no rows or columns, or inputs are as production has them."""
    if (axis in ONCE or name in (ONE_TOKEN, NO_ROWS, *NO_COLUMNS.values())) and subject.candidate != "bi_kernels":
        return hasattr(error, "of_candidate") and "CUDA error" not in str(error)
    if name in OF_NO_LAYOUT and subject.candidate != "bi_kernels":  # an op may ask for the layout, whatever trains
        return "layout" in str(error)
    clear = isinstance(error, (TypeError, ValueError, NotImplementedError))
    return any(word in str(error) for word in REFUSALS.get(name, [NAMES.get(name, name)] * clear))


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


# a process that began with another call


SENT = 2**20  # elements of a tensor that a process sends, its first


def begin_otherwise(session) -> Process:
    """Begins a process in which the first call of each op is of one token."""
    return begin(f"{__name__}:_first_calls", session.audit, session.parameters)


def by_first_call(session, process: Process) -> Iterator[Row]:
    """Compares the packed call of each op with that of the other process."""
    said = {"against": SINGLE_CALL, "inputs": CANCELLING, "axes": [Kind.HISTORY], "side": Side.CALL}
    calls = pickle.loads(process.result())

    def row(subject: OpUnderTest, number: int) -> Row:
        if isinstance(found := calls[number], str):
            raise RuntimeError(f"in another process it raised {found}")
        drift, tensor = compared(found, _packed(subject))
        return subject.row(
            "invariance", FIRST, drift, tensor=tensor, **said | {"side": subject.side(tensor) or Side.CALL}
        )

    for number, subject in enumerate(_asked(session)):
        yield from subject.attempt("invariance", FIRST, partial(row, subject, number), **said)
        subject.forget()


def _asked(session) -> list[OpUnderTest]:
    """Returns each op at its first case, in bf16 if that is audited."""
    found: dict[str, OpUnderTest] = {}
    for s in session.make():
        if found.setdefault(s.problem.op.name, s).problem.dtype != s.problem.dtype == torch.bfloat16:
            found[s.problem.op.name] = s
    return [*found.values()]


def _packed(subject: OpUnderTest) -> Results:
    """Returns what a packed call and its backward give, on the host, and no more of a tensor than is sent."""
    u = begun(subject)
    made = u.base | untrained(u.rolled())
    return {k: t if t is None else t.detach().flatten()[:SENT].cpu() for k, t in made.items()}


def _first_calls(audit: str, parameters: dict) -> bytes:
    """Returns what the packed call of each op gives in this process after a call of one token, or what it raises."""
    found: list = []
    for subject in _asked(parallel.load(audit, parameters)):
        try:
            Step(subject, CANCELLING, [1]).made()
            found.append(_packed(subject))
        except Exception as error:
            found.append(sentence(error))
    return pickle.dumps(found)
