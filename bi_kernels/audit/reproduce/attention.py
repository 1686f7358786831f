"""Reproducers of attention's drift: one token of one sequence, computed in two calls that hold other queries or sequences."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from bi_kernels.audit.evidence.drift import script_drifts
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.problem.call_layouts import Call, layouts
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.contract import SWEEP


@dataclass(frozen=True)
class Part:
    """A call of `sequences` equal sequences: the queries from `first` up to `last`, against all keys up to there; padded on
    the right with `room` rows, or packed."""

    sequences: int
    first: int
    last: int
    room: int = 0
    packed: bool = False

    def __str__(self) -> str:
        return f"{self.sequences}, {self.first}, {self.last}, {self.room}, {self.packed}"


@dataclass(frozen=True)
class Recipe:
    a: Part
    b: Part
    token: int
    seed: int = 0
    cancel: bool = False  # the sum grows and then nearly vanishes: another order shows in the last bits

    def drifts(self, s: Subject) -> bool:
        """Whether the token's result differs in the two calls, computed by the script's own lines."""
        return script_drifts(body(s, self), s.function)

    @property
    def says(self) -> str:
        name = lambda p: (
            f"queries {p.first} to {p.last - 1} of {p.sequences} sequence{'s' * (p.sequences > 1)}{', padded' * bool(p.room)}{', packed' * p.packed}"
        )
        return f"query {self.token} of one sequence, computed in a call of {name(self.a)} and in one of {name(self.b)}."


def _part(call: Call, token: int, lengths: list[int]) -> tuple[Part, int]:
    """What of the token's sample the call holds, beside how many others; and the token's place in it."""
    ends = np.cumsum(lengths)
    sample = int(np.searchsorted(ends, token, side="right"))
    start = int(ends[sample]) - lengths[sample]
    held = np.unique(call.index[call.index >= 0])
    mine = held[(held >= start) & (held < ends[sample])] - start
    room = call.index.shape[1] - len(mine) if call.index.ndim == 2 else 0
    count = len(np.unique(np.searchsorted(ends, held, side="right")))
    return Part(count, int(mine[0]), int(mine[-1]) + 1, room, call.cu_seqlens is not None), token - start


def shrink(s: Subject, row: Row) -> Recipe | None:
    """A small recipe that still drifts: the row's own calls, then one query against its whole sequence; or None."""
    token, lengths = row.first_index[0], list(s.lengths)
    if row.layout == "rows":
        a, b, at = Part(1, 0, row.rows, packed=True), Part(1, 0, s.largest, packed=True), token
    else:
        every = layouts(s.lengths, s.problem.seed)
        if row.layout not in every:
            return None
        (a, at), (b, _) = (
            _part(next(c for c in every[name] if (c.index == token).any()), token, lengths)
            for name in (row.layout, row.against)
        )
    longest = max(a.last, b.last, 17)
    guesses = [
        Recipe(a, b, at),
        Recipe(a, b, min(a.last, b.last) - 1),
        *(Recipe(Part(n, longest - 1, longest), Part(1, 0, longest), longest - 1) for n in (1, 4)),
        *(Recipe(Part(4, 0, longest, room), Part(1, 0, longest), longest - 1) for room in (0, 3)),
    ]
    found = next(
        (
            r
            for guess, cancel, seed in product(guesses, (False, True), (0, 2, 4))
            for r in (replace(guess, seed=seed, cancel=cancel),)
            if r.drifts(s)
        ),
        None,
    )
    if found is None:
        return None
    for side, (name, values) in product(
        "ab", {"sequences": (1, 2, 3), "last": [n for n in SWEEP["rows"] if n > found.token]}.items()
    ):
        part = getattr(found, side)
        smaller = (replace(found, **{side: replace(part, **{name: n})}) for n in values if n < getattr(part, name))
        found = next((r for r in smaller if r.drifts(s)), found)
    return found


def body(s: Subject, recipe: Recipe) -> list[str]:
    """The lines that leave the token's result of both calls in `a` and `b`; they need `torch` and `fn`."""
    p = s.problem
    shapes = [p._shape(dims) for dims in p.op.tokens.values()]
    constants = "".join(f", {k}={v!r}" for k, v in p.op.constants.items())
    half = (recipe.token + 1) // 2
    cancel = [
        "# the sum grows over the first half of the keys and vanishes over the second",
        f"k[{half}:{2 * half}], v[{half}:{2 * half}] = k[:{half}], -v[:{half}]",
    ]
    return [
        f"torch.manual_seed({recipe.seed})",
        f"q, k, v = (torch.randn({max(recipe.a.last, recipe.b.last)}, *shape).to({p.dtype}) for shape in {shapes})",
        *cancel * recipe.cancel,
        "",
        "",
        "def result(sequences, first, last, room, packed):  # room: rows of padding, of which the candidate is told",
        "    torch.manual_seed(1)",
        "    Q, K, V = (torch.cat((t[None, :last], torch.randn(sequences - 1, last, *t.shape[1:]).to(t))) for t in (q, k, v))",
        "    Q, K, V = (torch.cat((t, torch.randn(sequences, room, *t.shape[2:]).to(t)), 1)"
        f'.to("{p.device.type}") for t in (Q[:, first:], K, V))',
        '    lengths = {name: torch.full((sequences,), n, device=Q.device) for name, n in (("lengths_q", last - first), ("lengths_k", last))}',
        "    told = lengths if room else {}",
        "    if packed:",
        '        told = {"cu_seqlens_q": torch.arange(sequences + 1, device=Q.device) * last}',
        "        Q, K, V = (t.flatten(0, 1) for t in (Q, K, V))",
        f"    out, lse = fn(Q, K, V{constants}, **told)",
        "    out, lse = (out, lse) if packed else (out[0], lse[0])",
        f"    return torch.cat((out[{recipe.token} - first].double(), lse[{recipe.token} - first, :, None].double()), -1)",
        "",
        "",
        f"a, b = result({recipe.a}), result({recipe.b})",
    ]
