"""Shrinks a drift of an op's forward: a token that differs between two layouts differs between two calls.

The script computes that one token in both, with nothing else but filler in the other rows.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import torch

from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.problem.call_layouts import Call, of_each_token
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.reproduce import attention
from bi_kernels.audit.reproduce.inputs import call, inputs
from bi_kernels.audit.reproduce.script import Recipe, calls_of, first, write_op
from bi_kernels.contract import SWEEP, evaluate

FILLERS = ("zeros", "random", "NaN")


@dataclass(frozen=True)
class Place:
    """A call of leading shape `lead` in which the token stands at flat row `at`."""

    lead: tuple[int, ...]
    at: int


@dataclass(frozen=True)
class TwoCalls(Recipe):
    """One token's result in two calls."""

    a: Place
    b: Place
    filler: str
    seed: int
    position: int = 0
    cancel: bool = False  # the token's sum grows and then nearly vanishes: another order shows in the last bits
    several: bool = False  # outputs, which are stacked

    template = "forward.py.jinja"

    @property
    def says(self) -> str:
        calls = f"a call of {self.a.lead} and in one of {self.b.lead}"
        return f"one token, computed in {calls}; the other rows hold {self.filler}."

    def values(self, s: Subject) -> dict:
        p, given = s.problem, inputs(s.problem)
        device = given["device"]
        tensors = {name: f"{name}_rows.to({device}).unflatten(0, lead)" for name in given["tokens"]}
        tensors |= {name: name for name in given["shared"]}
        positions = max(SWEEP["rows"]), f"torch.full(lead, {self.position}, device={device})"
        return given | {
            "half": p.reduction // 2,
            "scale": float(evaluate(p.op.scale, **p.dims)),
            "arguments": call(p, tensors, positions=positions),
        }


def shrink(s: Subject, token: int, lengths: list[int], calls: list[Call]) -> TwoCalls | None:
    """Returns the smallest recipe found that still drifts, or None."""
    a, b = (Place(c.index.shape, int(np.flatnonzero(c.index == token)[0])) for c in calls)
    position = int(of_each_token(lengths)[1][token])
    out = s.forward(*s.inputs("normal", 1), (1,), torch.zeros(1, dtype=torch.int64, device=s.problem.device))
    several, sums = not isinstance(out, torch.Tensor), (False, True)[: 1 + (s.problem.reduction > 1)]
    ways = product(FILLERS, sums, (0, 2, 4))
    recipe = first((TwoCalls(a, b, how, seed, position, cancel, several) for how, cancel, seed in ways), s)
    if recipe is None:
        return None
    for side in "ab":
        place = getattr(recipe, side)
        smaller = (
            replace(recipe, **{side: Place((n,), at)})
            for n in SWEEP["rows"]
            if n <= prod(place.lead)
            for at in dict.fromkeys((0, min(place.at, n - 1), n - 1))
        )
        recipe = first(smaller, s) or recipe
    return first([replace(recipe, position=0)], s) or recipe


def export(s: Subject, candidate: Candidate, rows: list[Row], folder: Path) -> Path | None:
    """Writes the reproducer of the first drift among `rows` (all of one subject) and names it in each of them."""
    drifting = [r for r in rows if r.relation == "invariance" and r.mismatches]
    drifting.sort(key=lambda r: (r.layout != "rows", r.rows))
    find = attention.shrink if s.problem.op.cache else shrink
    found = filter(None, (calls_of(s, row) for row in drifting[:4]))
    recipe = next(filter(None, (find(s, *calls) for calls in found)), None)
    return recipe and write_op(recipe, s, candidate, folder, drifting)
