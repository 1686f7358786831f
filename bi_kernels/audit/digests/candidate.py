"""Computes digests of a candidate's bits, forward and backward, on inputs that every version of torch draws alike."""

import hashlib
import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import bi_kernels
from bi_kernels.audit.digests.file import KEY, VERSIONS, spoken
from bi_kernels.audit.digests.golden import draw_exact, rng, sha
from bi_kernels.audit.findings import sentence
from bi_kernels.audit.inputs import cancel
from bi_kernels.audit.layouts import Call
from bi_kernels.audit.parameters import OTHERS, accepted
from bi_kernels.audit.report.provenance import architecture, provenance
from bi_kernels.audit.session import start
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import dtype_name, evaluate

KINDS = ("normal", "wide", "cancelling")
BLOCK = 2**20 - 3  # numbers drawn; a larger tensor repeats them, and the odd count makes its rows differ


def draw(g: np.random.Generator, kind: str, shape: tuple[int, ...], like: torch.Tensor, shared: bool = False):
    """Draws as `inputs.draw` does from the families in KINDS, with the dtype and the device of `like`."""
    count = math.prod(shape)
    block = draw_exact(g, (min(count, BLOCK),), kind, like.dtype).to(like.device)
    x = block.repeat(-(-count // max(1, len(block))))[:count].reshape(shape)
    if kind == "cancelling" and shape:
        cancel(x, shared)
    return x


@dataclass(frozen=True)
class ExactProblem(OpConfig):
    def inputs(self, kind: str, tokens: int, poisoned: torch.Tensor | None = None) -> tuple[dict, dict]:
        g = rng(self.op.name, self.case, self.dtype, kind, self.seed)
        like = torch.empty(0, dtype=self.input_dtype, device=self.device)

        def make(dims: str, *lead: int) -> torch.Tensor:
            shape = self._shape(dims)
            if dims.endswith(":bool"):
                return torch.from_numpy(g.integers(0, 10, lead + shape) < 3).to(self.device)
            if dims.endswith(":id"):
                return torch.from_numpy(g.integers(0, shape[-1], lead + shape[:-1])).to(self.device)
            x = draw(g, kind, lead + shape, like, shared=not lead)
            if not lead and self.op.scale != "1":
                x *= evaluate(self.op.scale, **self.dims)
            if dims.endswith(":fp32"):
                x = x.float()
            return x.t().contiguous() if dims.endswith(":t") else x

        given = {k: make(v, tokens) for k, v in self.op.tokens.items()}
        return given, {k: make(v) for k, v in self.op.shared.items()}


class ExactStep(Step):
    def draw(self, outputs: Sequence[torch.Tensor], call: Call | None = None) -> None:
        p, lead = self.subject.problem, call.index.ndim if call else 1
        g = rng("upstream", p.op.name, p.case, p.dtype, self.kind, p.seed)
        self.dy = self.dy or [draw(g, "wide", (self.count, *y.shape[lead:]), y) for y in outputs]


def _hash(*files: Path) -> str:
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:8]


def _digest(s: OpUnderTest, what: str) -> str:
    s.memo.clear()
    if what == "gradient":
        return sha(*dict(sorted(ExactStep(s, KINDS[-1], s.lengths).gradients().items())).values())
    outputs = [s.layout("packed", kind) for kind in KINDS]
    return sha(*(t for y in outputs for t in (y if isinstance(y, tuple) else [y])))


def compute(names: list[str], parameters: dict) -> tuple[list[dict], list[str]]:
    """Returns (digests, problems) of every op of these audits, each op once; a problem says why there is no digest.

    Audits of callables outside the registry have none. Raises ValueError for a wrong parameter.
    """
    sessions = [start(name, accepted(name, parameters)) for name in names if name not in OTHERS]
    package = Path(bi_kernels.__file__).parent
    ours = f"{version('bi-kernels')} ({_hash(*sorted([*package.glob('*.py'), *(package / 'ops').rglob('*.py')]))})"
    found, problems, seen = [], [], set()
    for session in sessions:
        versions = provenance(session.device, session.parameters) | {"bi-kernels": ours}
        versions = {k: versions[k] for k in VERSIONS if k in versions}
        for s in session.make():
            p = s.problem
            label = (p.op.name, p.case, dtype_name(p.dtype))
            if label in seen:
                continue
            seen.add(label)
            s.problem = ExactProblem(**vars(p))
            code = ""
            with suppress(TypeError, OSError):  # a function without a file
                code = _hash(Path(inspect.getsourcefile(inspect.unwrap(s.function))))
            for what in ("forward", "gradient"):
                try:
                    digest, again = _digest(s, what), _digest(s, what)
                except Exception as error:
                    if what == "forward":
                        problems.append(f"{spoken(*label)}: no digest ({sentence(error)})")
                    break  # without a forward, or a backward of its own
                if digest != again:
                    refusal = f"no digest of its {what}, which gave other bits when called again"
                    problems.append(f"{spoken(*label)}: {refusal}")
                    continue
                key = (architecture(session.device), s.candidate, p.shapes, *label, what, p.seed)
                found.append(dict(zip(KEY, key)) | {"sha256": digest} | versions | {"candidate's code": code})
            s.forget()
    return found, problems
