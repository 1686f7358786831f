"""What is compared of two runs, and what is said of an op that drifts by itself; and which op is which in two runs."""

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bi_kernels.audit.evidence.drift import Drift
from bi_kernels.audit.localiser.watched.digest import Digest
from bi_kernels.audit.localiser.watched.events import At, Event

FORWARD, BACKWARD, PARAMETER, UNSEEN = "forward", "backward", "parameter gradient", "(not seen)"


@dataclass
class Cause:
    """An op that drifts by itself. path: the module; op: an aten or custom operator or a Triton kernel, or several
    joined by arrows where only the last leaves something that can be compared."""

    path: str
    op: str
    source: str
    direction: str  # forward, backward or parameter gradient
    node: str = ""  # of the autograd graph
    parameter: str = ""
    layouts: tuple[str, str] = ("", "")
    tokens: int = 0  # that differ
    compared: int = 0
    token: int = 0  # one of those that differ
    chain: tuple[tuple[At, ...], tuple[At, ...]] = ((), ())  # the ops of each run, in order
    ends: tuple["End", ...] = ()  # the tensors that are compared, those that differ first
    drift: Drift | None = None
    again: bool | None = None  # whether it drifted when the others were mended; None where that was not seen
    script: Path | None = None  # shows the drift by itself

    @property
    def key(self) -> tuple:
        return self.path, self.op, self.source, self.direction, self.parameter

    @property
    def share(self) -> float:
        """Returns the share of the tokens that differ."""
        return self.tokens / self.compared if self.compared else 1.0


@dataclass
class End:
    """A tensor that two runs are compared by: which event's, and where its tokens are; by run, then by call."""

    io: str  # in or out
    slot: int
    events: tuple[dict[int, At], dict[int, At]]
    digests: tuple[dict[int, Digest], dict[int, Digest]]


@dataclass
class Pair:
    """One tensor of an op in both runs: which tokens differ; digests: those that were compared, by run and call; moved:
    whether both runs hold the same rows, elsewhere, as after a sort."""

    differs: np.ndarray
    compared: int
    digests: tuple[dict[int, Digest], dict[int, Digest]]
    kind: str
    moved: bool


def matches(first: list[Event], other: list[Event]) -> dict[int, int]:
    """Returns which event of `first` each event of `other` is: by module, op and what a token of it holds, in order,
    where both have as many of a kind; else by order between two events that are known."""
    a, b = [e.signature for e in first], [e.signature for e in other]
    if a == b:
        return {i: i for i in range(len(a))}
    found: dict[int, int] = {}

    def pair_up(here: range, there: range) -> None:
        of: tuple[dict, dict] = {}, {}
        for held, signatures, span in ((of[0], a, here), (of[1], b, there)):
            for i in span:
                held.setdefault(signatures[i], []).append(i)
        for signature, mine in of[0].items():
            if len(others := of[1].get(signature, ())) == len(mine):
                found.update(zip(others, mine))

    pair_up(range(len(a)), range(len(b)))
    found = _in_order(found)  # what two runs do in another order is not matched
    known = [(-1, -1), *sorted(found.items())]
    for (i, c), (j, d) in zip(known, [*known[1:], (len(b), len(a))]):
        if j - i > 1 and d - c > 1:
            pair_up(range(c + 1, d), range(i + 1, j))
    return found


def _in_order(found: dict[int, int]) -> dict[int, int]:
    """Returns the most pairs that ascend in both numbers."""
    ends: list[int] = []
    last: list[int] = []  # of the best run of each length
    before: dict[int, int | None] = {}
    for i in sorted(found):
        at = bisect_left(ends, found[i])
        ends[at:] = [found[i], *ends[at + 1 :]]
        last[at:] = [i, *last[at + 1 :]]
        before[i] = last[at - 1] if at else None
    kept, i = {}, last[-1] if last else None
    while i is not None:
        kept[i], i = found[i], before[i]
    return kept
