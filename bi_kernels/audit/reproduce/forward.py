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
from bi_kernels.audit.problem.call_layouts import Call, layouts
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.reproduce import attention
from bi_kernels.audit.reproduce.inputs import call, inputs
from bi_kernels.audit.reproduce.script import Recipe, first, write_op
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
        p, op, device = s.problem, s.problem.op, repr(s.problem.device.type)
        tokens, shared = inputs(p)
        at_positions = (
            f"table=rope_table({max(SWEEP['rows'])}, {p.dims['head_dim']}, device={device})",
            f"positions=torch.full(lead, {self.position}, device={device})",
        )
        rows = {name: f"{name}_rows.to({device}).unflatten(0, lead)" for name in tokens}
        return {
            "op": op,
            "device": device,
            "tokens": tokens,
            "shared": shared,
            "half": p.reduction // 2,
            "scale": float(evaluate(op.scale, **p.dims)),
            "arguments": call(p, rows | {name: name for name in shared}, *at_positions * op.positions),
        }


def _places(s: Subject, row: Row) -> tuple[Place, Place, int] | None:
    """Returns two calls that give the row's first differing token different bits, and the token's position."""
    token = row.first_index[0]
    if row.layout == "rows":
        return Place((row.rows,), token), Place((s.largest,), token), token
    every = layouts(s.lengths, s.problem.seed)
    if row.layout not in every:
        return None
    position = int(np.concatenate([np.arange(n) for n in s.lengths])[token])

    def place(calls: list[Call]) -> Place:
        call = next(c for c in calls if (c.index == token).any())
        return Place(call.index.shape, int(np.flatnonzero(call.index.reshape(-1) == token)[0]))

    return place(every[row.layout]), place(every[row.against]), position


def shrink(s: Subject, row: Row) -> TwoCalls | None:
    """Returns the smallest recipe found that still drifts, or None."""
    found = _places(s, row) if row.first_index else None
    if found is None:
        return None
    a, b, position = found
    out = s.forward(*s.inputs("normal", 1), (1,), torch.zeros(1, dtype=torch.int64, device=s.problem.device))
    several, sums = not isinstance(out, torch.Tensor), (False, True)[: 1 + (s.problem.reduction > 1)]
    recipe = first(
        (
            TwoCalls(a, b, how, seed, position, cancel, several)
            for how, cancel, seed in product(FILLERS, sums, (0, 2, 4))
        ),
        s,
    )
    if recipe is None:
        return None
    for side in ("a", "b"):
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
    drifting = sorted(
        (r for r in rows if r.verdict != "pass" and r.relation == "invariance" and r.mismatches),
        key=lambda r: (r.layout != "rows", r.rows),
    )
    find = attention.shrink if s.problem.op.cache else shrink
    recipe = next(filter(None, (find(s, row) for row in drifting[:4])), None)
    return recipe and write_op(recipe, s, candidate, folder, drifting)
