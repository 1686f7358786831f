"""Compares two runs: which op's inputs agree while its outputs do not."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from bi_kernels.audit.compare import Drift
from bi_kernels.audit.localiser.tracing.digest import Digest
from bi_kernels.audit.localiser.tracing.events import OUTPUT, At, Event, Slot, Wrote
from bi_kernels.audit.localiser.tracing.run import Run

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


def matches(first: list[Event], other: list[Event]) -> dict[int, int]:
    """Returns which event of `first` each event of `other` is: by module, op and features of a token, in order, where
    both have as many of a kind; else by order between two events that are known."""
    a, b = [e.signature for e in first], [e.signature for e in other]
    if a == b:
        return {i: i for i in range(len(a))}
    found: dict[int, int] = {}

    def pair_up(here: range, there: range) -> None:
        of: tuple[dict, dict] = defaultdict(list), defaultdict(list)
        for held, signatures, span in ((of[0], a, here), (of[1], b, there)):
            for i in span:
                held[signatures[i]].append(i)
        for signature, mine in of[0].items():
            if len(others := of[1].get(signature, ())) == len(mine):
                found.update(zip(others, mine))

    pair_up(range(len(a)), range(len(b)))
    here, there = sorted(found.values()), sorted(found)
    blocks = SequenceMatcher(None, here, [found[i] for i in there], autojunk=False).get_matching_blocks()
    found = {there[j + n]: here[i + n] for i, j, count in blocks for n in range(count)}  # what keeps its order
    known = [(-1, -1), *sorted(found.items())]
    for (i, c), (j, d) in zip(known, [*known[1:], (len(b), len(a))]):
        if j - i > 1 and d - c > 1:
            pair_up(range(c + 1, d), range(i + 1, j))
    return found


class Comparison:
    """Two runs side by side. Their events are numbered by those of one call, the canonical ones."""

    def __init__(self, a: Run, b: Run):
        if a.tokens != b.tokens:
            lengths = " and ".join(str(list(run.tokens.lengths)[:8]) for run in (a, b))
            raise ValueError(f"the two runs hold samples of {lengths} tokens, expected the same batch")
        self.runs, self.count = (a, b), len(a.tokens.lengths)
        self.samples = a.tokens.samples()
        self.canonical = (a if len(a.events) <= len(b.events) else b).events[0]
        self.number = [[matches(self.canonical, events) for events in run.events] for run in self.runs]
        self.places: list[dict[int, dict[int, At]]] = []  # of each run: canonical event → {call: event}
        for run in self.number:
            found: dict[int, dict[int, At]] = defaultdict(dict)
            for call, match in enumerate(run):
                for i, c in match.items():
                    found[c][call] = call, i
            self.places.append(found)
        self.single = len(a.events) == len(b.events) == 1
        self.unaligned: Counter[str] = Counter()  # outputs without tokens that could be found, by op
        tensors = [(c, io, k) for c, e in enumerate(self.canonical) for io in ("in", "out") for k in _range(e, io)]
        self.pairs: dict[Key, Pair | None] = {tensor: self._pair(*tensor) for tensor in tensors}
        self.read, self.wrote = zip(*(self._dirt(run) for run in (0, 1)))

    def everywhere(self, c: int) -> list[tuple[int, int, At]]:
        """Lists the (run, call, event) of a canonical event."""
        return [(run, call, at) for run in (0, 1) for call, at in self.places[run].get(c, {}).items()]

    def number_of(self, run: int, at: At) -> int | None:
        """Returns the number of an event's canonical one, None for one that has none."""
        return self.number[run][at[0]].get(at[1])

    def _pair(self, c: int, io: str, k: int) -> Pair | None:
        """Compares a tensor of an op over the calls of both runs; None where it cannot be."""
        of = [(run, call, _slots(self.runs[run].at(at), io)[k:]) for run, call, at in self.everywhere(c)]
        slots = [(run, call, s[0]) for run, call, s in of if s]
        if {run for run, *_ in slots} != {0, 1} or any(s.parameter for run, _, s in slots if not run):
            return None
        if any(s.digests is None for *_, s in slots):
            if any(s.digests is None and s.floating for *_, s in slots):
                self._miss(c, io, k)
            return None
        kinds = lambda run, call, d: self.runs[run].geometries[call].kinds(d.form)
        ways = [  # (kind of rows, features, whether keys are among them) → the digest that is read so
            {(kind, d.features, d.keys): d for d in reversed(s.digests) for kind in kinds(run, call, d)}
            for run, call, s in slots
        ]
        common = set(ways[0]).intersection(*ways)
        if self.canonical[c].phase == BACKWARD or not self.single:
            common = {x for x in common if x[0] != "n"}
        best = None
        for way in sorted(common, key=lambda x: "tpsn".index(x[0])):
            chosen: tuple[dict, dict] = ({}, {})
            for (run, call, _), held in zip(slots, ways):
                chosen[run][call] = held[way]
            pair = self._compared(chosen, way[0])
            if pair.compared and (best is None or pair.differs.sum() < best.differs.sum()):
                best = pair
        output = self.canonical[c].op == OUTPUT
        if best is not None and best.moved and not output:
            best = None  # its rows lie in an order of its own, in which no token can be found
        if best is None:
            self._miss(c, io, k)
        # what holds a sample as a whole may hold padding of the model's own: only that it is equal says something
        doubtful = best is not None and best.kind != "t" and best.differs.any() and not output
        return None if doubtful else best

    def _miss(self, c: int, io: str, k: int) -> None:
        """Counts an output without tokens, unless a launch only read it in every call."""
        if io == "out" and not all(self.runs[run].at(at).left(k) for run, _, at in self.everywhere(c)):
            self.unaligned[self.canonical[c].op] += 1

    def _compared(self, chosen: tuple[dict[int, Digest], dict[int, Digest]], kind: str) -> Pair:
        rows, there = np.zeros((2, len(self.samples)), np.int64), np.zeros((2, len(self.samples)), bool)
        for run in (0, 1):
            for call, d in chosen[run].items():
                tokens, at = self.runs[run].geometries[call].places(d.form)
                rows[run, tokens], there[run, tokens] = d.rows[at], True
        both = there.all(0)
        differs = (rows[0] != rows[1]) & both
        moved = bool(differs.any()) and np.array_equal(*np.sort(rows[:, both]))
        return Pair(differs, int(both.sum()), chosen, kind, moved)

    def outputs(self) -> list[Pair | None]:
        """Returns the pairs of what the model returned."""
        ends = [(c, e) for c, e in enumerate(self.canonical) if e.op == OUTPUT and e.phase == FORWARD]
        return [self.pairs[c, "in", k] for c, e in ends for k in _range(e, "in")]

    def by_sample(self, pair: Pair) -> np.ndarray:
        """Returns which samples differ."""
        return np.bincount(self.samples[pair.differs], minlength=self.count) > 0

    def _dirt(self, run: int) -> tuple[dict[At, np.ndarray], dict[Wrote, np.ndarray]]:
        """Returns for each event of a run the samples in which what it read follows a drift; and what it wrote."""
        read: dict[At, np.ndarray] = {}
        wrote: dict[Wrote, np.ndarray] = {}
        for call, events in enumerate(self.runs[run].events):
            for i, e in enumerate(events):
                c, dirty = self.number[run][call].get(i), np.zeros(self.count, bool)
                for k, s in enumerate(e.inputs):
                    pair = self.pairs.get((c, "in", k))
                    if pair is not None:
                        dirty |= self.by_sample(pair)
                    elif not s.parameter:
                        for w in s.writers:
                            dirty |= wrote[w]
                read[call, i] = dirty
                for k in _range(e, "out"):
                    pair = self.pairs.get((c, "out", k))
                    wrote[call, i, k] = dirty if pair is None else self.by_sample(pair)
        return read, wrote

    def causes(self) -> list[Cause]:
        """Lists the ops that drift by themselves, in the order in which they ran."""
        readers, found = self._readers(), {}
        for c, e in enumerate(self.canonical):
            for cause in (*self._before(c, e), *self._at(c, e, readers.get(c, set()))):
                found.setdefault(cause.key, cause)
        for cause in self._of_parameters():
            found.setdefault(cause.key, cause)
        return list(found.values())

    def _readers(self) -> dict[int, set[int | None]]:
        """Returns for each op those that read what it wrote: None for one that is not the same in both runs."""
        found: dict[int, set[int | None]] = defaultdict(set)
        for run in (0, 1):
            for call, events in enumerate(self.runs[run].events):
                for i, e in enumerate(events):
                    mine = self.number[run][call].get(i)
                    for w in (w for s in e.inputs for w in s.writers):
                        wrote = self.number_of(run, w[:2])
                        if wrote is not None and wrote != mine:
                            found[wrote].add(None if mine is None or not self.canonical[mine].outputs else mine)
        return found

    def _masked(self, readers: set[int | None]) -> bool:
        """Tells whether all that read what an op wrote came out the same: what differs was masked there."""
        if not readers or None in readers:
            return False
        pairs = [self.pairs[d, "out", k] for d in readers for k in _range(self.canonical[d], "out")]
        return bool(pairs) and all(p is not None and not p.differs.any() for p in pairs)

    def _at(self, c: int, e: Event, readers: set[int | None]) -> Iterator[Cause]:
        """Yields an op whose outputs differ in samples in which nothing that it read follows a drift."""
        clean = np.ones(self.count, bool)
        for run, call, at in self.everywhere(c):
            held = self.runs[run].geometries[call].held
            clean[held] &= ~self.read[run][at][held]
        pairs = {k: p for k in _range(e, "out") if (p := self.pairs[c, "out", k]) is not None}
        mine = {k: p for k, p in pairs.items() if (self.by_sample(p) & clean).any()}
        if not mine or self._masked(readers):
            return
        chain = [self.chain(run, [*self.places[run][c].values()]) for run in (0, 1)]
        ends = [(c, "out", k) for k in sorted(pairs, key=lambda k: k not in mine)]
        yield self._cause(e, chain, [*mine.values()], clean, ends)

    def _before(self, c: int, e: Event) -> Iterator[Cause]:
        """Yields what changed an input without an op between that is the same in both runs."""
        for k in _range(e, "in"):
            pair = self.pairs[c, "in", k]
            if pair is None or not pair.differs.any():
                continue
            dirty, unjudged, judged = np.zeros(self.count, bool), [[], []], [False, False]
            for run, call, at in self.everywhere(c):
                held = self.runs[run].geometries[call].held
                for w in self.runs[run].at(at).inputs[k].writers:
                    dirty[held] |= self.wrote[run][w][held]
                    if self._judged(run, w):
                        judged[run] = True
                    else:
                        unjudged[run].append(w[:2])
            if all(judged) and not any(unjudged) or not (self.by_sample(pair) & ~dirty).any():
                continue
            chain = [self.chain(run, unjudged[run]) for run in (0, 1)]
            last = next((self.runs[run].at(unjudged[run][-1]) for run in (0, 1) if unjudged[run]), None)
            last = last or Event(e.phase, e.path, UNSEEN, e.source, e.node, [])
            yield self._cause(last, chain, [pair], ~dirty, [(c, "in", k)])

    def _judged(self, run: int, w: Wrote) -> bool:
        """Tells whether what an event wrote was compared."""
        return self.pairs.get((self.number_of(run, w[:2]), "out", w[2])) is not None

    def unjudged(self, run: int, slot: Slot) -> list[At]:
        """Returns the events that wrote a tensor and were not compared by that."""
        return [w[:2] for w in slot.writers if not self._judged(run, w)]

    def chain(self, run: int, ends: list[At]) -> tuple[At, ...]:
        """Returns the events that made something, back to what was compared."""
        found, todo = set(), list(ends)
        while todo:
            at = todo.pop()
            if at in found:
                continue
            found.add(at)
            c = self.number_of(run, at)
            for k, s in enumerate(self.runs[run].at(at).inputs):
                if self.pairs.get((c, "in", k)) is None and not s.parameter and s.floating:
                    todo += self.unjudged(run, s)
        return tuple(sorted(found))

    def _cause(self, e: Event, chain: list, pairs: list[Pair], clean: np.ndarray, ends: list[Key]) -> Cause:
        ops = [list(dict.fromkeys(run.at(at).op for at in of)) for run, of in zip(self.runs, chain)]
        short = [" → ".join(o[:5] + ["…"] * (len(o) > 5)) or UNSEEN for o in ops]
        both = [f"{o} in {run.layout}" for o, run in zip(short, self.runs) if o != UNSEEN]
        name = short[0] if ops[0] == ops[1] else ", ".join(both)
        differs = np.any([p.differs for p in pairs], 0) if pairs else np.ones(len(self.samples), bool)
        compared = max((p.compared for p in pairs), default=len(differs))
        first = pairs[0].differs & clean[self.samples] if pairs else differs
        layouts, counts = tuple(run.layout for run in self.runs), (int(differs.sum()), compared, int(first.argmax()))
        return Cause(e.path, name, e.source, e.phase, "", layouts, *counts, chain, ends)

    def _of_parameters(self) -> Iterator[Cause]:
        """Yields parameters whose gradients differ though nothing that wrote them follows a drift."""
        a, b = self.runs
        for name in [n for n in a.gradients if n in b.gradients]:
            writers = [run.gradients[name][1] for run in self.runs]
            dirty = any(self.wrote[run][w].any() for run in (0, 1) for w in writers[run])
            if dirty or a.gradients[name][0] == b.gradients[name][0]:
                continue
            chain, owner = [self.chain(run, [w[:2] for w in writers[run]]) for run in (0, 1)], name.rpartition(".")[0]
            e = next((a.at(w) for w in chain[0] if a.at(w).path), Event(BACKWARD, owner, UNSEEN, "", "", []))
            cause = self._cause(e, chain, [], np.ones(self.count, bool), [])
            cause.path, cause.direction, cause.parameter = owner, PARAMETER, name
            yield cause


def _slots(e: Event, io: str) -> list[Slot]:
    return e.inputs if io == "in" else e.outputs


def _range(e: Event, io: str) -> range:
    return range(len(_slots(e, io)))
