"""Compares two captures: the same tokens by (sample, position), their logprobs bit by bit and as PPO would see them."""

from dataclasses import dataclass, field

import numpy as np

from bi_kernels.audit.certificate.capture import capture
from bi_kernels.audit.certificate.hints import Hint, probable_causes
from bi_kernels.audit.certificate.pairs import CLIP, Finding, Pairs, Sides, aligned, axes, compared

WORST = 10  # tokens listed


@dataclass(frozen=True)
class Group:
    """Tokens from `first` to `last` of what they are grouped by, and how their logprobs differ."""

    first: int
    last: int
    tokens: int
    share_differ: float
    max_abs: float
    mean_abs: float
    k3: float
    clipped: float


@dataclass(frozen=True)
class Token:
    sample: int
    position: int
    token: int
    rollout: float
    training: float

    @property
    def delta(self) -> float:
        return self.training - self.rollout


@dataclass(frozen=True)
class Certificate:
    """How two captures agree. Shows itself as text, and as Markdown in Jupyter.

    tokens: those compared: of one id at one place, finite on both sides; equal: those with equal bits. Δ is training −
    rollout, in fp64. k1 and k3: Schulman's estimators of KL(rollout ‖ training), if the rollout sampled its tokens:
    mean −Δ, and mean exp(Δ) − 1 − Δ. clipped: share of tokens whose ratio exp(Δ) is outside 1 ± 0.2; ratios: the
    smallest and the largest. groups: by "position", "length" and batch size. hints: probable causes.
    """

    sides: Sides = field(repr=False)
    pairs: Pairs = field(repr=False)
    tokens: int
    equal: int
    max_abs: float
    mean_abs: float
    k1: float
    k3: float
    clipped: float
    ratios: tuple[float, float]
    findings: tuple[Finding, ...]
    hints: tuple[Hint, ...]
    groups: dict[str, list[Group]]
    worst: list[Token]

    @property
    def passed(self) -> bool:
        """Tells whether every token is in both captures with the same logprob, bit by bit, and nothing else."""
        return not self.findings and 0 < self.tokens == self.equal

    def text(self) -> str:
        from bi_kernels.audit.certificate import page  # noqa: PLC0415 (an engine that records needs no pages)

        return page.text(self)

    __repr__ = __str__ = text

    def _repr_markdown_(self) -> str:
        from bi_kernels.audit.certificate import page  # noqa: PLC0415 (as above)

        return page.markdown(self)

    def write(self, folder) -> None:
        """Writes README.md, two figures and, where the bits differ, the first such sample's ids into a folder."""
        from bi_kernels.audit.certificate import page  # noqa: PLC0415 (as above)

        page.write(self, folder)


def certify(rollout, training) -> Certificate:
    """Compares the logprobs that a rollout engine and a trainer recorded for the same tokens.

    rollout, training: a path (.safetensors, .parquet, .jsonl), a Recorder, or a mapping of columns: sample, position,
    token, logprob and, optionally, batch_size. Needs no GPU. Raises ValueError: one sentence on what cannot be read.
    """
    sides = aligned(capture(rollout, "rollout"), capture(training, "training"))
    findings, pairs = compared(sides)
    d = pairs.delta
    differ = pairs.differ
    with np.errstate(over="ignore"):
        ratios = np.exp(d)
        k3 = np.expm1(d) - d
    mean = lambda values: float(values.mean()) if len(values) else 0.0
    outside = np.abs(ratios - 1) > CLIP
    order = np.argsort(-np.abs(d), kind="stable")[:WORST]
    columns = (pairs.sample, pairs.position, pairs.token, pairs.rollout, pairs.training)
    return Certificate(
        sides=sides,
        pairs=pairs,
        tokens=len(d),
        equal=int((~differ).sum()),
        max_abs=float(np.abs(d).max(initial=0)),
        mean_abs=mean(np.abs(d)),
        k1=mean(-d),
        k3=mean(k3),
        clipped=mean(outside),
        ratios=(float(ratios.min()), float(ratios.max())) if len(d) else (1.0, 1.0),
        findings=tuple(findings),
        hints=tuple(probable_causes(sides, pairs)),
        groups={name: _groups(by, differ, np.abs(d), k3, outside) for name, by in axes(pairs).items()},
        worst=[Token(*(column[i].item() for column in columns)) for i in order if differ[i]],
    )


def _groups(by: np.ndarray, differ, size, k3, clipped) -> list[Group]:
    """Returns the tokens grouped by the values of `by`: each by itself if they are few, else by powers of two."""
    values = np.unique(by)
    few = len(values) <= 8
    label = by if few else np.frexp(by.astype(np.float64))[1]  # 0, 1, 2–3, 4–7, …
    found = []
    for group in values if few else np.unique(label):
        rows = label == group
        share, mean_abs, kl, outside = (float(v[rows].mean()) for v in (differ, size, k3, clipped))
        first, last = int(by[rows].min()), int(by[rows].max())
        found.append(Group(first, last, int(rows.sum()), share, float(size[rows].max()), mean_abs, kl, outside))
    return found
