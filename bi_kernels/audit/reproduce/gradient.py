"""Shrinks a drift of a gradient: the same samples in one call and in one call each."""

from dataclasses import dataclass
from pathlib import Path

from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.relations.gradient import INVARIANCE
from bi_kernels.audit.relations.step import gradient_lengths
from bi_kernels.audit.reproduce.inputs import call, inputs
from bi_kernels.audit.reproduce.script import Recipe, first, write_op

SAMPLES = ((1, 1), (3, 2), (5, 17), (17, 44), (129, 64), (300, 211))
IDS = 7  # so few that a token id comes again in another sample


@dataclass(frozen=True)
class Split(Recipe):
    """The gradient of `tensor`, of samples of these lengths, in one call and in one call each."""

    lengths: tuple[int, ...]
    seed: int
    tensor: str

    template = "gradient.py.jinja"

    @property
    def says(self) -> str:
        samples = f"samples of {list(self.lengths)} tokens"
        return f"the gradient of {self.tensor}, of {samples} in one call and in one call each."

    def values(self, s: Subject) -> dict:
        p, given = s.problem, inputs(s.problem, IDS)
        device = given["device"]
        leaves = {name: f"leaves[{name!r}][at : at + n]" for name in given["tokens"]}
        leaves |= {name: f"leaves[{name!r}]" for name in given["shared"]}
        positions = max(self.lengths), f"torch.cat([torch.arange(m, device={device}) for m in samples])"
        ends = (f"cu_seqlens_q=torch.tensor([*starts, n], device={device})",) * bool(p.op.cache)
        return given | {"arguments": call(p, leaves, *ends, positions=positions)}


def export_gradient(s: Subject, candidate: Candidate, rows: list[Row], folder: Path) -> Path | None:
    """Writes the reproducer of the first gradient that drifts and names it in each such row, or returns None."""
    drifting = [r for r in rows if r.relation == INVARIANCE and r.mismatches]
    tensors = list(dict.fromkeys(r.tensor.removeprefix("d").removesuffix(".grad") for r in drifting))
    # parameters first: a token's own gradient rarely needs the split
    tensors.sort(key=lambda k: k in s.problem.op.tokens)
    several = (*SAMPLES, tuple(gradient_lengths(s)[:4])) if tensors else ()
    split = first((Split(n, seed, tensor) for n in several for tensor in tensors for seed in (0, 1)), s)
    return split and write_op(split, s, candidate, folder, drifting, "gradient")
