"""Shrinks a drift of attention: one query of one sequence, in two calls that hold other queries or sequences."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from bi_kernels.audit.problem.call_layouts import Call, of_each_token
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.reproduce.inputs import call
from bi_kernels.audit.reproduce.script import Recipe, first
from bi_kernels.contract import SWEEP


@dataclass(frozen=True)
class Part:
    """A call of `sequences` equal sequences: the queries from `first` up to `last`, against all keys up to there;
    padded on the right with `room` rows, or packed."""

    sequences: int
    first: int
    last: int
    room: int = 0
    packed: bool = False

    def __str__(self) -> str:
        """Returns the arguments of the script's function."""
        return f"{self.sequences}, {self.first}, {self.last}, {self.room}, {self.packed}"

    @property
    def says(self) -> str:
        of = f"{self.sequences} sequence{'s' * (self.sequences > 1)}"
        return (
            f"queries {self.first} to {self.last - 1} of {of}{', padded' * bool(self.room)}{', packed' * self.packed}"
        )


@dataclass(frozen=True)
class OneQuery(Recipe):
    """One query's result in two calls."""

    a: Part
    b: Part
    token: int
    seed: int = 0
    cancel: bool = False  # the sum grows and then nearly vanishes: another order shows in the last bits

    template = "attention.py.jinja"

    @property
    def says(self) -> str:
        return f"query {self.token} of one sequence, computed in a call of {self.a.says} and in one of {self.b.says}."

    def values(self, s: Subject) -> dict:
        p = s.problem
        return {
            "dtype": p.dtype,
            "device": repr(p.device.type),
            "shapes": [p._shape(dims) for dims in p.op.tokens.values()],
            "longest": max(self.a.last, self.b.last),
            "half": (self.token + 1) // 2,
            "arguments": call(p, dict(zip(p.op.tokens, "QKV")), "**told"),
        }


def _part(call: Call, token: int, lengths: list[int]) -> tuple[Part, int]:
    """Returns what of the token's sample the call holds, beside how many others; and the token's place in it."""
    sample, position = of_each_token(lengths)
    held = np.unique(call.index[call.index >= 0])
    mine = position[held[sample[held] == sample[token]]]
    room = call.index.shape[1] - len(mine) if call.index.ndim == 2 else 0
    count = len(np.unique(sample[held]))
    return Part(count, int(mine[0]), int(mine[-1]) + 1, room, call.cu_seqlens is not None), int(position[token])


def shrink(s: Subject, token: int, lengths: list[int], calls: list[Call]) -> OneQuery | None:
    """Returns a small recipe that drifts: these two calls, then one query against its whole sequence; or None."""
    (a, at), (b, _) = (_part(c, token, lengths) for c in calls)
    longest = max(a.last, b.last, 17)
    guesses = [
        OneQuery(a, b, at),
        OneQuery(a, b, min(a.last, b.last) - 1),
        *(OneQuery(Part(n, longest - 1, longest), Part(1, 0, longest), longest - 1) for n in (1, 4)),
        *(OneQuery(Part(4, 0, longest, room), Part(1, 0, longest), longest - 1) for room in (0, 3)),
    ]
    ways = product(guesses, (False, True), (0, 2, 4))
    found = first((replace(guess, seed=seed, cancel=cancel) for guess, cancel, seed in ways), s)
    if found is None:
        return None
    sizes = {"sequences": (1, 2, 3), "last": [n for n in SWEEP["rows"] if n > found.token]}
    for side, (name, values) in product("ab", sizes.items()):
        part = getattr(found, side)
        smaller = (replace(found, **{side: replace(part, **{name: n})}) for n in values if n < getattr(part, name))
        found = first(smaller, s) or found
    return found
