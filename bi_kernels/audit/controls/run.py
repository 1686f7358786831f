"""Judges controls: each by the relation that must flag it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, groupby

from bi_kernels.audit import parallel
from bi_kernels.audit.axes import NO_GRAD_NEEDED
from bi_kernels.audit.checks import forward, gradient, limits, single_call
from bi_kernels.audit.checks.long_sequences import LONG, LONG_SEQUENCES, by_layout
from bi_kernels.audit.controls.attention import ATTENTION_CONTROLS
from bi_kernels.audit.controls.experts import EXPERT_CONTROLS
from bi_kernels.audit.controls.forward import CONTROLS, Control
from bi_kernels.audit.controls.gradient import GRADIENT_CONTROLS
from bi_kernels.audit.controls.rows import ROW_CONTROLS
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

EVERY = (*CONTROLS, *GRADIENT_CONTROLS, *ROW_CONTROLS, *ATTENTION_CONTROLS, *EXPERT_CONTROLS, *USE_CONTROLS)
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
        rows = patiently(lambda: _rows(s, controls))
    except Exception as error:
        rows = [s.row(first.relation, "", detail=sentence(error))] * len(controls)
    return [replace(row, candidate=control.name).as_control() for row, control in zip(rows, controls)]


def _first(found: Iterable[Row]) -> list[Row]:
    """Returns the row that flags the control, or the first."""
    found = up_to_a_drift(found)
    return (needs_fix(found) or found)[:1]


def _static(s: OpUnderTest, controls: list[Control]) -> list[Row]:
    with recorded() as launches:
        Step(s, "normal", [5, 17]).gradients()
    return atomics_free([(s, launches)], [c.level for c in controls])[0]


def _invariance(s: OpUnderTest) -> Iterable[Row]:
    by = [forward.by_row_count(s), forward.by_layout(s, only=CONTROL_LAYOUTS)]
    return chain(*(reversed(by) if s.problem.op.cache else by))  # where it shows sooner


def _accuracy(s: OpUnderTest) -> Iterable[Row]:
    kinds = (INTEGERS, *ACCURATE) if s.problem.op.integers else ACCURATE  # by those first whose bound is the tightest
    return (forward.accuracy(s, kind) for kind in kinds)


def _drawn(s: OpUnderTest) -> Iterable[Row]:
    p = s.problem
    given = p.dtype, p.device, p.seed, s.candidate, s.device
    draws = (draw(p.op, s.function, i, *given, full=True) for i in range(DRAWS))
    return (row for case in draws for row in fuzz.judge(case))


_BY_RELATION: dict[str, Callable[[OpUnderTest], Iterable[Row]]] = {
    "invariance": _invariance,
    "parity": lambda s: (r for r in forward.parity(s) if r.layout == "decode=packed"),
    "determinism": lambda s: [forward.determinism(s)],
    "accuracy": _accuracy,
    gradient.INVARIANCE: lambda s: (r for r in gradient.by_split(s) if r.relation == gradient.INVARIANCE),
    gradient.ACCURACY: lambda s: (r for kind in ACCURATE for r in gradient.gradient_accuracy(s, kind)),
    DRAWN: _drawn,
    gradient.DTYPES: gradient.judge_dtypes,
    limits.OFFSETS: limits.by_call,
    LONG_SEQUENCES: lambda s: by_layout(s, LONG["lengths"]),
    TRAINED: lambda s: (r for r in gradient.by_split(s) if r.against == NO_GRAD_NEEDED),
}


def _rows(s: OpUnderTest, controls: list[Control]) -> list[Row]:
    relation = controls[0].relation
    if relation == STATIC:
        return _static(s, controls)
    return _first(single_call.by_use(s, [relation]) if relation in single_call.AXES else _BY_RELATION[relation](s))
