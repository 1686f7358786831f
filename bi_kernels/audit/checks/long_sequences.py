"""Gradients where one sequence is long: over several splits of attention's keys and a thousand slabs of a fold, against
other layouts and against fp64. On a GPU; an interpreter would take an hour for it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from bi_kernels.audit.checks import gradient
from bi_kernels.audit.findings import Row
from bi_kernels.audit.layouts import shapes_launched
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import SWEEP

LAYOUTS = ("singles", "left_padded:16", "micro_batches:each")
LONG = SWEEP["long"]
LONG_SEQUENCES = "gradients of long sequences"  # what flags a control that only they show


def applies(subject: OpUnderTest) -> bool:
    """Tells whether a subject is asked: the first case of its op, on a GPU and not at tiny shapes."""
    p = subject.problem
    return p.device.type == "cuda" and p.shapes != "tiny" and p.case == next(iter(p.op.cases(p.shapes)))


def judge(subject: OpUnderTest) -> list[Row]:
    """Judges a step's gradients by layout, and those of a shorter one against fp64."""
    return [*by_layout(subject, LONG["lengths"]), *accurate(subject, LONG["accurate"])] if applies(subject) else []


def _alike(subject: OpUnderTest, lengths: list[int]) -> OpUnderTest:
    """Returns the subject with samples of these lengths, in the sizes whose fp64 reference fits beside them."""
    problem = replace(subject.problem, sizes=subject.problem.sizes | LONG["sizes"])
    return replace(subject, problem=problem, memo={}, own_lengths=tuple(lengths))


def by_layout(subject: OpUnderTest, lengths: list[int]) -> Iterator[Row]:
    """Compares the gradients of every layout with those of one packed call."""
    step = Step(_alike(subject, lengths), CANCELLING, lengths)
    packed = cache(step.gradients)
    for name in LAYOUTS:
        said = {"against": "packed", "inputs": CANCELLING, "rows": step.count}
        said["detail"] = shapes_launched(step.layouts[name])
        yield from gradient.compared(subject, gradient.INVARIANCE, name, lambda: step.gradients(name), packed, **said)


def accurate(subject: OpUnderTest, lengths: list[int]) -> list[Row]:
    """Measures every gradient of a packed call against fp64, as a share of the contract's bound."""

    def rows() -> list[Row]:
        step = Step(_alike(subject, lengths), "normal", lengths)
        return gradient.against_fp64(step, {f"d{k}": (k, y) for k, y in step.gradients().items()})

    return subject.attempt(gradient.ACCURACY, "rows", rows, against="fp64", inputs="normal", rows=sum(lengths))
