"""The result of a comparison of two runs: the ops that drift by themselves."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bi_kernels.audit.compare import Drift
from bi_kernels.audit.localiser.tracing.digest import Digest
from bi_kernels.audit.localiser.tracing.events import At

FORWARD, BACKWARD, PARAMETER, UNSEEN = "forward", "backward", "parameter gradient", "(not seen)"


Key = tuple[int, str, int]  # a tensor of an op: the canonical event, in or out, which of them


@dataclass
class Pair:
    """One tensor of an op in both runs: which tokens differ; digests: those that were compared, by run and call; moved:
    whether both runs hold the same rows in another order, as after a sort."""

    differs: np.ndarray
    compared: int
    digests: tuple[dict[int, Digest], dict[int, Digest]]
    kind: str
    moved: bool


@dataclass
class Cause:
    """An op that drifts by itself. path: the module; op: an aten or custom operator or a Triton kernel, or several
    joined by arrows where only the last leaves something that can be compared; direction: forward, backward or
    parameter gradient; tokens: how many differ, of the compared; token: one of them; chain: the ops of each run, in
    order; ends: the tensors that are compared, those that differ first; again: whether it drifted when the others were
    repaired, None if unknown; script: reproduces the drift."""

    path: str
    op: str
    source: str
    direction: str
    parameter: str
    layouts: tuple[str, str]
    tokens: int
    compared: int
    token: int
    chain: list[tuple[At, ...]]
    ends: list[Key]
    drift: Drift | None = None
    again: bool | None = None
    script: Path | None = None

    @property
    def key(self) -> tuple:
        return self.path, self.op, self.source, self.direction, self.parameter
