"""Judges controls: each by the relation that must flag it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, groupby

from bi_kernels.audit import parallel
from bi_kernels.audit.axes import NO_GRAD_NEEDED
from bi_kernels.audit.checks import forward, gradient, gradient_dtypes, limits, single_call
from bi_kernels.audit.checks.long_sequences import LONG, LONG_SEQUENCES, by_layout
from bi_kernels.audit.controls.attention import ATTENTION_CONTROLS
from bi_kernels.audit.controls.forward import CONTROLS, Control
from bi_kernels.audit.controls.gradient import GRADIENT_CONTROLS
from bi_kernels.audit.controls.usage import DRAWN, TRAINED, USE_CONTROLS
from bi_kernels.audit.findings import Row, needs_fix, sentence, up_to_a_drift
from bi_kernels.audit.fuzz import checks as fuzz
from bi_kernels.audit.fuzz.cases import draw
from bi_kernels.audit.inputs import INTEGERS
from bi_kernels.audit.memory import patiently
from bi_kernels.audit.static.launches import recorded
from bi_kernels.audit.static.verdict import STATIC, atomics_free
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_step import Step

EVERY = (*CONTROLS, *GRADIENT_CONTROLS, *ATTENTION_CONTROLS, *USE_CONTROLS)
ACCURATE = ("normal", "wide")  # inputs on which some control shows
DRAWS = 32  # cases in which a control shows
CONTROL_LAYOUTS = ("singles", "batch", "neighbours", "permuted", "decode")  # layouts in which some control shows


def judge_controls(session) -> list[Row]:
    """Judges every control of a session's audit; records and returns their rows."""
    rows = [row for found in parallel.each(session, judge_control, groups(session)) for row in found]
    session.add(rows)
    return rows


def groups(session) -> list[list[int]]:
    """Returns the controls of a session's audit, by their places in EVERY; those of the static audit that share a
    function are together, for what it launches is examined once for all levels."""
    full = session.on_gpu and session.parameters["shapes"] != "tiny"
    mine = [i for i, c in enumerate(EVERY) if c.audit == session.audit and (full or not c.gpu)]
    if session.quick:  # one of each relation; the static audit compiles
        mine = [*{EVERY[i].relation: i for i in reversed(mine) if EVERY[i].relation != STATIC}.values()]
    return [list(g) for _, g in groupby(mine, lambda i: EVERY[i].function if EVERY[i].relation == STATIC else i)]


def judge_control(session, numbers: list[int]) -> list[Row]:
    """Returns the rows of one control, or of those of the static audit that share a function."""
    controls = [EVERY[i] for i in numbers]
    first = controls[0]
    problem = session.problem(first.op, first.case, first.dtype)
    s = OpUnderTest(problem, first.function, first.name, session.device_name)
    try:
        rows = patiently(lambda: _BY_RELATION[first.relation](s, controls))
    except Exception as error:
        rows = [s.row(first.relation, "", detail=sentence(error))] * len(controls)
    return [replace(row, candidate=control.name).as_control() for row, control in zip(rows, controls)]


def _accurate(s: OpUnderTest) -> tuple[str, ...]:
    return (INTEGERS, *ACCURATE) if s.problem.op.integers else ACCURATE  # by those first whose bound is the tightest


def _first(found: list[Row]) -> list[Row]:
    """Returns the row that flags the control, or the first."""
    return (needs_fix(found) or found)[:1]


def _static(s: OpUnderTest, controls: list[Control]) -> list[Row]:
    with recorded() as launches:
        step = Step(s, "normal", [5, 17])
        step.gradients(step.layouts["packed"])
    return atomics_free([(s, launches)], [c.level for c in controls])[0]


def _invariance(s: OpUnderTest, _: list[Control]) -> list[Row]:
    by = [forward.by_row_count(s), forward.by_layout(s, only=CONTROL_LAYOUTS)]
    return _first(up_to_a_drift(chain(*(reversed(by) if s.problem.op.cache else by))))  # where it shows sooner


def _used(axis: str, s: OpUnderTest, _: list[Control]) -> list[Row]:
    return _first(up_to_a_drift(single_call.by_use(s, [axis])))


def _drawn(s: OpUnderTest, _: list[Control]) -> list[Row]:
    p = s.problem
    cases = (
        draw(p.op, s.function, number, p.dtype, p.device, p.seed, s.candidate, s.device) for number in range(DRAWS)
    )
    return _first(up_to_a_drift(row for case in cases for row in fuzz.judge(case)))


_BY_RELATION: dict[str, Callable[[OpUnderTest, list[Control]], list[Row]]] = {
    "invariance": _invariance,
    "parity": lambda s, _: _first([r for r in forward.parity(s) if r.layout == "decode=packed"]),
    "determinism": lambda s, _: [forward.determinism(s)],
    "accuracy": lambda s, _: _first([forward.accuracy(s, kind) for kind in _accurate(s)]),
    gradient.INVARIANCE: lambda s, _: _first(
        up_to_a_drift(r for r in gradient.by_split(s) if r.relation == gradient.INVARIANCE)
    ),
    gradient.ACCURACY: lambda s, _: _first([r for kind in ACCURATE for r in gradient.gradient_accuracy(s, kind)]),
    STATIC: _static,
    **{axis: partial(_used, axis) for axis in single_call.AXES},
    DRAWN: _drawn,
    gradient_dtypes.RELATION: lambda s, _: _first(gradient_dtypes.judge(s)),
    limits.OFFSETS: lambda s, _: _first(up_to_a_drift(limits.by_call(s))),
    LONG_SEQUENCES: lambda s, _: _first(up_to_a_drift(by_layout(s, LONG["lengths"]))),
    TRAINED: lambda s, _: _first(up_to_a_drift(r for r in gradient.by_split(s) if r.against == NO_GRAD_NEEDED)),
}
