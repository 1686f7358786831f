"""Puts two captures side by side: which tokens stand at the same place, and what is no difference of two logprobs."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from bi_kernels.audit.certificate.capture import Capture

CLIP = 0.2  # PPO's
ROOM = 64  # places between the codes of two samples, for shifts


class Kind(StrEnum):
    """What else than a logprob can disagree."""

    MISSING = "missing tokens"  # of the rollout, that training lacks
    ADDITIONAL = "additional tokens"  # of training
    TOKEN_IDS = "token ids"  # another id at the same place
    DUPLICATES = "duplicates"  # a place that occurs twice in one capture
    NOT_FINITE = "not finite"  # NaN or an infinity in place of a logprob


@dataclass(frozen=True)
class Finding:
    """Something that is no difference of two logprobs; first: (sample, position)."""

    kind: Kind
    count: int
    first: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Sides:
    """Both captures sorted by (sample, position), each place once, and which rows stand at the same place.

    code: one integer for each row and place, that grows with (sample, position); both: rows of each with a partner;
    dropped: the duplicates, sorted too, kept for counting.
    """

    rollout: Capture
    training: Capture
    codes: tuple[np.ndarray, np.ndarray]
    both: tuple[np.ndarray, np.ndarray]
    dropped: tuple[Capture, Capture]

    def alone(self, side: int) -> np.ndarray:
        """Returns a mask of the rows of a side (0 the rollout, 1 training) without a partner."""
        mask = np.ones(len(self.codes[side]), bool)
        mask[self.both[side]] = False
        return mask


@dataclass(frozen=True)
class Pairs:
    """The tokens that both sides have, of the same id and with finite logprobs; arrays of one length, sorted.

    rollout, training: logprobs; delta: training − rollout; rank: the token's place among its sample's recorded ones;
    length: how many of these the rollout has; clean: every token before it in its sample has the same id.
    """

    sample: np.ndarray
    position: np.ndarray
    token: np.ndarray
    rollout: np.ndarray
    training: np.ndarray
    rank: np.ndarray
    length: np.ndarray
    clean: np.ndarray
    batch_sizes: dict[str, np.ndarray]

    @property
    def delta(self) -> np.ndarray:
        return self.training - self.rollout

    @property
    def differ(self) -> np.ndarray:
        return self.rollout.view(np.int64) != self.training.view(np.int64)

    def take(self, rows: np.ndarray) -> "Pairs":
        told = {k: v[rows] for k, v in vars(self).items() if k != "batch_sizes"}
        return Pairs(**told, batch_sizes={k: v[rows] for k, v in self.batch_sizes.items()})


def axes(pairs: Pairs) -> dict[str, np.ndarray]:
    """Returns what tokens are grouped by."""
    return {"position": pairs.position, "length": pairs.length, **pairs.batch_sizes}


def aligned(*captures: Capture) -> Sides:
    """Sorts both captures, takes duplicates out (the first of each stays) and finds the rows at one place."""
    known = np.unique(np.concatenate([c.sample for c in captures]))
    span = 1 + ROOM + max(int(c.position.max()) for c in captures)
    kept, dropped, codes = [], [], []
    for c in captures:
        code = np.searchsorted(known, c.sample) * span + c.position
        order = np.argsort(code, kind="stable")
        again = np.diff(code[order], prepend=-1) == 0
        kept.append(c.take(order[~again]))
        dropped.append(c.take(order[again]))
        codes.append(code[order[~again]])
    _, *both = np.intersect1d(*codes, assume_unique=True, return_indices=True)
    return Sides(*kept, tuple(codes), tuple(both), tuple(dropped))


def compared(sides: Sides) -> tuple[list[Finding], Pairs]:
    """Returns what is no difference of two logprobs, and the tokens whose logprobs can be compared."""
    findings = []

    def note(kind: Kind, rows: Capture, text: str) -> None:
        if count := len(rows):
            first = int(rows.sample[0]), int(rows.position[0])
            what = f"{count:,} token{'s' * (count != 1)} {text}, first at sample {first[0]}, position {first[1]}."
            findings.append(Finding(kind, count, first, what))

    r, t = sides.rollout.take(sides.both[0]), sides.training.take(sides.both[1])
    note(Kind.MISSING, sides.rollout.take(sides.alone(0)), "of the rollout missing in training")
    note(Kind.ADDITIONAL, sides.training.take(sides.alone(1)), "in training that the rollout lacks")
    same, finite = r.token == t.token, np.isfinite(r.logprob) & np.isfinite(t.logprob)
    note(Kind.TOKEN_IDS, r.take(~same), "with another id in training")
    for rows, name in zip(sides.dropped, ("the rollout", "training")):
        note(Kind.DUPLICATES, rows, f"recorded again in {name}")
    for side, name in ((r, "the rollout"), (t, "training")):
        for found, what in ((np.isnan(side.logprob), "NaN"), (np.isinf(side.logprob), "infinite")):
            note(Kind.NOT_FINITE, side.take(found), f"{what} in {name}")

    starts, lengths = runs(sides.rollout.sample)
    rank = np.arange(len(sides.rollout)) - np.repeat(starts, lengths)
    begun, counts = runs(r.sample)
    before = np.cumsum(~same) - ~same
    clean = before == np.repeat(before[begun], counts)
    sizes = {f"{name} batch size": c.batch_size for name, c in (("rollout", r), ("training", t))}
    pairs = Pairs(
        *(r.sample, r.position, r.token, r.logprob, t.logprob),
        *(rank[sides.both[0]], np.repeat(lengths, lengths)[sides.both[0]], clean),
        {name: size for name, size in sizes.items() if size is not None},
    )
    return findings, pairs.take(same & finite)


def runs(sorted_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where each id's run starts, and how long it is."""
    _, starts, counts = np.unique(sorted_ids, return_index=True, return_counts=True)
    return starts, counts
