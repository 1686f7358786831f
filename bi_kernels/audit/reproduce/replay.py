"""What reproducers call: a registered op or a callable, run as the audit ran it."""

from collections.abc import Callable
from functools import partial

import torch

import bi_kernels.checks  # noqa: F401  (mends Triton's interpreter before a candidate defines a kernel)
from bi_kernels.audit.compare import Tensors
from bi_kernels.audit.layouts import VIEWS, layouts
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import DTYPES


def registered(
    function: Callable, op: str, case: str, dtype: str, shapes: str, device: str, seed: int = 0, brief: bool = False
) -> OpUnderTest:
    """Returns a function as the op of that name in the registry, which draws its inputs from the seed; brief: see
    OpConfig."""
    problem = OpConfig(OPS[op], case, DTYPES[dtype], shapes, torch.device(device), seed, brief=brief)
    return OpUnderTest(problem, function, "", "")


def training_step(op: OpUnderTest, inputs: str) -> Step:
    """Returns a training step of an op, with its inputs and upstream gradients."""
    return Step(op, inputs)


def flat(outputs: Tensors | list[torch.Tensor]) -> torch.Tensor:
    """Returns the numbers of all outputs in one row, in fp64, which holds them exactly."""
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return torch.cat([flat(y) if isinstance(y, (tuple, list)) else y.double().flatten() for y in outputs])


def in_layout(op: OpUnderTest, layout: str, inputs: str) -> Tensors:
    """Returns the results of all tokens in the calls of a layout, in logical order."""
    return op.compute(layouts(op.lengths, op.problem.seed)[layout], inputs)


def trained_outputs(step: Step, layout: str) -> list[torch.Tensor]:
    """Returns the outputs of a training step in a layout, or of one packed call on a view of its inputs."""
    run = partial(step.gradients, view=VIEWS[layout]) if layout in VIEWS else partial(step.gradients, layout)
    run()
    return step.outputs
