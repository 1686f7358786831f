"""Judges what parameters without a main_grad have in `.grad`: what is added to one, rounded once to their dtype.

Most layouts and all splits are judged of main_grad, into which an op folds; `.grad` may come from other code. In fp32,
too, whatever the dtypes of the audit: 16 bits hide most of an order.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bi_kernels.audit import parallel
from bi_kernels.audit.checks.forward import supported
from bi_kernels.audit.checks.gradient import INVARIANCE, LEFT
from bi_kernels.audit.compare import compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import dtype_name
from helpers import coverage
from helpers.common import Found, is_ours

LAYOUT = "without main_grad"
NOT_ADDED = "not asked: nothing is added to main_grad"
BROKEN = "gradients rounded to bf16 without main_grad"


def judge(session) -> Found:
    """Returns the rows of every op with parameters of an audit, with a control, and a line of each op and dtype."""
    numbers = [i for i, s in enumerate(session.make()) if s.problem.op.shared]
    items = [(i, dtype) for i in numbers for dtype in ("", "fp32")[: 2 - ("fp32" in session.dtypes)]]
    rows, lines = [], []
    for found, line in parallel.each(session, _of, items):
        rows += found
        lines += line
    if numbers:
        own = session.subject(session.make()[numbers[0]].problem.op.name, "fp32")
        broken = of(replace(own, function=_rounded(own.function), candidate=BROKEN))
        rows.append(max(broken, key=lambda r: r.mismatches or 0).as_control())
    return rows, lines


def _of(session, item: tuple[int, str]) -> Found:
    """Returns the rows and lines of one subject, in its own dtype or another; what a candidate refuses has none."""
    number, dtype = item
    s = session.make()[number]
    if dtype:
        s = replace(s, problem=session.problem(s.problem.op.name, s.problem.case, dtype), memo={})
    if supported(s):
        return [], []
    rows = of(s)
    if is_ours(session):  # all of whose parameters fold into main_grad
        wanted = ({"relation": INVARIANCE, "layout": LAYOUT, "tensor": f"d{k}{LEFT}"} for k in s.problem.op.shared)
        rows += coverage.missing(rows, s, wanted)
    said = {"op": s.problem.op.name, "case": s.problem.case or "–", "dtype": dtype_name(s.problem.dtype)}
    differ = lambda r: r.detail if r.mismatches is None else f"{r.mismatches} of {r.elements}"
    lines = [said | {"tokens": r.rows, "gradient": r.tensor, "elements that differ": differ(r)} for r in rows]
    return rows, lines or [said | {"tokens": "–", "gradient": "–", "elements that differ": NOT_ADDED}]


def of(s: OpUnderTest) -> list[Row]:
    """Judges one op in its dtype; no rows where it adds to no main_grad, for then either step leaves the same."""
    step = Step(s, CANCELLING)
    said = {"against": "main_grad, rounded", "inputs": CANCELLING, "rows": step.count}

    def rows() -> list[Row]:
        whole = step.gradients()
        added = [k for k in s.problem.op.shared if k in whole and k not in step.in_grad]
        left = step.gradients(main_grad=False) if added else {}
        drift = lambda k: compare(left[k], whole[k].to(step.shared[k].dtype))
        return [s.row(INVARIANCE, LAYOUT, drift(k), tensor=f"d{k}{LEFT}", **said) for k in added]

    return s.attempt(INVARIANCE, LAYOUT, rows, **said)


def _rounded(function: Callable) -> Callable:
    """Returns an op that rounds the gradients of tensors without a main_grad."""

    def op(*given, **told):
        for t in given:
            if isinstance(t, Tensor) and t.is_leaf and t.requires_grad and not hasattr(t, "main_grad"):
                t.register_hook(lambda dy: dy.to(torch.bfloat16).to(dy.dtype))
        return function(*given, **told)

    return op
