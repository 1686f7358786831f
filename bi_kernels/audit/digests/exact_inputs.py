"""Inputs for digests: drawn from integers by exact arithmetic, so that no version of torch draws others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bi_kernels.audit.digests.golden import draw_exact, rng
from bi_kernels.audit.problem.inputs import cancel
from bi_kernels.audit.problem.problem import OpConfig
from bi_kernels.audit.relations.step import Step
from bi_kernels.contract import evaluate

BLOCK = 2**20 - 3  # numbers drawn; a larger tensor repeats them, and as they are odd in number its rows differ


def draw(
    g: np.random.Generator,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    shared: bool = False,
) -> torch.Tensor:
    """As inputs.draw, of the families normal, wide and cancelling."""
    count = math.prod(shape)
    block = draw_exact(g, (min(count, BLOCK),), kind, dtype).to(device)
    x = block.repeat(-(-count // max(1, len(block))))[:count].reshape(shape)
    if kind == "cancelling" and shape:
        cancel(x, shared)
    return x


@dataclass(frozen=True)
class ExactProblem(OpConfig):
    def inputs(self, kind: str, tokens: int, poisoned: torch.Tensor | None = None) -> tuple[dict, dict]:
        g = rng(self.op.name, self.case, self.dtype, kind, self.seed)
        integers = lambda top, shape: torch.from_numpy(g.integers(0, top, shape)).to(self.device)

        def make(dims: str, *lead: int) -> torch.Tensor:
            shape = self._shape(dims)
            if dims.endswith(":bool"):
                return integers(10, lead + shape) < 3
            if dims.endswith(":id"):
                return integers(shape[0], lead)
            x = draw(g, kind, lead + shape, self.input_dtype, self.device, shared=not lead)
            if not lead and self.op.scale != "1":
                x *= evaluate(self.op.scale, **self.dims)
            return x.t().contiguous() if dims.endswith(":t") else x

        given = {k: make(v, tokens) for k, v in self.op.tokens.items()}
        return given, {k: make(v) for k, v in self.op.shared.items()}


class ExactStep(Step):
    def upstream(self, outputs: Sequence[torch.Tensor], lead: int) -> None:
        p = self.subject.problem
        g = rng("upstream", p.op.name, p.case, p.dtype, self.kind, p.seed)
        self.dy = [draw(g, "wide", (self.count, *y.shape[lead:]), y.dtype, y.device) for y in outputs]
