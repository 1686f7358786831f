"""In which dtype a real backward leaves every gradient, with a `main_grad` and without."""

import torch

from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import Row
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import dtype_name

RELATION = "contract"
IN_GRAD, BUFFERED = WAYS = "gradients, in .grad", "gradients, with main_grad"


def judge(subject: OpUnderTest) -> list[Row]:
    """Judges a token's gradient to be of the token's dtype, a parameter's of its own in `.grad`, or, where it has a
    `main_grad`, in that fp32 buffer alone."""
    ways = WAYS if subject.problem.op.shared else WAYS[:1]
    return [row for way in ways for row in subject.attempt(RELATION, way, lambda: _left(subject, way))]


def _left(subject: OpUnderTest, way: str) -> list[Row]:
    p, rows, step = subject.problem, [], Step(subject, "normal", [5, 3])
    for k, y in step.gradients(main_grad=way == BUFFERED).items():
        buffered = way == BUFFERED and k in p.op.shared
        wanted = torch.float32 if buffered else p.input_dtype
        beside = buffered and k in step.in_grad
        other = y.dtype != wanted or beside
        place = f"{dtype_name(y.dtype)}{' in .grad' * beside}"
        said = place + f", expected {dtype_name(wanted)}{' in main_grad' * buffered}" * other
        rows.append(subject.row(RELATION, way, Drift(int(other), 1), tensor=f"d{k}", detail=said))
    return rows
