"""Judges the gradients of parameters that have no main_grad: what would be added to one, rounded once to their dtype.

Layouts and splits are judged of main_grad, into which an op folds; what `.grad` holds may come from other code. In
fp32, too, whatever the dtypes of the audit: 16 bits hide most of an order.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from bi_kernels.audit import parallel
from bi_kernels.audit.broken.uses import _Gradient
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.experiments.common import Found
from bi_kernels.audit.problem.subject import SHARPEST, Subject
from bi_kernels.audit.relations.gradient import INVARIANCE, compared
from bi_kernels.audit.relations.step import Step

LAYOUT = "without main_grad"


def judge(session) -> Found:
    """Returns the rows of every op with parameters of an audit, and a control; and a line of each of the former."""
    numbers = [i for i, s in enumerate(session.make()) if s.problem.op.shared]
    items = [(i, dtype) for i in numbers for dtype in ("", "fp32")[: 2 - ("fp32" in session.dtypes)]]
    rows = [row for found in parallel.each(session, _of, items) for row in found]
    lines = [
        {"op": r.op, "case": r.case or "–", "dtype": r.dtype, "tokens": r.rows, "gradient": r.tensor}
        | {"elements that differ": f"{r.mismatches} of {r.elements}"}
        for r in rows
    ]
    if not numbers:
        return [], []
    own = session.make()[numbers[0]]
    broken = replace(own, function=_scaled(own.function), candidate="gradients scaled without main_grad")
    return [*rows, max(of(broken), key=lambda r: r.mismatches or 0).as_control()], lines


def _of(session, item: tuple[int, str]) -> list[Row]:
    number, dtype = item
    s = session.make()[number]
    p = s.problem
    return of(replace(s, problem=session.problem(p.op.name, p.case, dtype), memo={}) if dtype else s)


def of(s: Subject) -> list[Row]:
    """Judges one op in its dtype."""
    step = Step(s, SHARPEST)
    said = {"against": "main_grad, rounded", "inputs": SHARPEST, "rows": step.count}
    rounded = lambda: {k: t.to(s.problem.dtype) for k, t in step.gradients().items() if k in s.problem.op.shared}
    return compared(s, INVARIANCE, LAYOUT, lambda: step.gradients(main_grad=False), rounded, **said)


def _scaled(function: Callable) -> Callable:
    """Returns an op whose gradients of parameters without main_grad are others."""

    def op(*given, **told):
        scale = lambda t: _Gradient.apply(lambda dy: dy * 1.015625, t)
        bare = lambda t: isinstance(t, Tensor) and t.is_leaf and t.requires_grad and not hasattr(t, "main_grad")
        return function(*(scale(t) if bare(t) else t for t in given), **told)

    return op
