"""Compares two runs: which op's inputs agree while its outputs do not."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from bi_kernels.audit.localiser.cause import BACKWARD, FORWARD, PARAMETER, UNSEEN, Cause, End, Pair, matches
from bi_kernels.audit.localiser.watched.digest import Digest
from bi_kernels.audit.localiser.watched.events import OUTPUT, At, Event, Slot, Wrote
from bi_kernels.audit.localiser.watched.step import Run


class Comparison:
    """Two runs side by side; `causes` judges them."""

    def __init__(self, a: Run, b: Run):
        if a.tokens != b.tokens:
            raise ValueError(
                f"the two runs hold samples of {list(a.tokens.lengths)[:8]} and {list(b.tokens.lengths)[:8]} tokens, "
                "expected the same batch"
            )
        self.runs, self.count = (a, b), len(a.tokens.lengths)
        self.samples = a.tokens.samples()
        canonical = (a if len(a.events) <= len(b.events) else b).events[0]
        self.canonical = canonical
        self.number = [[matches(canonical, events) for events in run.events] for run in self.runs]
        self.places: list[dict[int, dict[int, int]]] = []  # of each run: canonical event → {call: event}
        for run in self.number:
            found: dict[int, dict[int, int]] = {}
            for call, match in enumerate(run):
                for i, c in match.items():
                    found.setdefault(c, {})[call] = i
            self.places.append(found)
        self.single = len(a.events) == len(b.events) == 1
        self.pairs: dict[tuple[int, str, int], Pair | None] = {}
        self.unaligned: Counter[str] = Counter()  # outputs without tokens that could be found, by op
        for c, e in enumerate(canonical):
            for io, slots in (("in", e.inputs), ("out", e.outputs)):
                for k in range(len(slots)):
                    self.pairs[c, io, k] = self._pair(c, io, k)

    def _slots(self, run: int, c: int, io: str, k: int) -> dict[int, Slot]:
        found = {}
        for call, i in self.places[run].get(c, {}).items():
            e = self.runs[run].events[call][i]
            slots = e.inputs if io == "in" else e.outputs
            if k < len(slots):
                found[call] = slots[k]
        return found

    def _pair(self, c: int, io: str, k: int) -> Pair | None:
        """Compares a tensor of an op over the calls of both runs; None where it cannot be."""
        slots = [self._slots(run, c, io, k) for run in (0, 1)]
        if not all(slots) or any(s.parameter for s in slots[0].values()):
            return None
        readable = [(run, call, s) for run in (0, 1) for call, s in slots[run].items()]
        if any(s.digests is None for *_, s in readable):
            if any(s.digests is None and s.floating for *_, s in readable):
                self._miss(c, io, k)
            return None
        sets = [
            {(kind, d.features, d.keys) for d in s.digests for kind in self._kinds(run, call, d)}
            for run, call, s in readable
        ]
        common = set.intersection(*sets)
        if self.canonical[c].phase == BACKWARD or not self.single:
            common = {x for x in common if x[0] != "n"}
        best = None
        for kind, features, keys in sorted(common, key=lambda x: "tpsn".index(x[0])):
            chosen: tuple[dict, dict] = ({}, {})
            for run, call, s in readable:
                chosen[run][call] = next(
                    d
                    for d in s.digests
                    if (d.features, d.keys) == (features, keys) and kind in self._kinds(run, call, d)
                )
            pair = self._compared(chosen, kind)
            if pair.compared and (best is None or pair.differs.sum() < best.differs.sum()):
                best = pair
        if best is not None and best.moved and self.canonical[c].op != OUTPUT:
            best = None  # its rows lie in an order of its own, in which no token can be found
        if best is None:
            self._miss(c, io, k)
        # what holds a sample as a whole may hold padding of the model's own: only that it is equal says something
        doubtful = best is not None and best.kind != "t" and best.differs.any() and self.canonical[c].op != OUTPUT
        return None if doubtful else best

    def _miss(self, c: int, io: str, k: int) -> None:
        """Counts an output without tokens, unless a launch only read it in every call."""
        places = [(run, call, i) for run in (0, 1) for call, i in self.places[run][c].items()]
        if io == "out" and not all(self._left(self.runs[run].at((call, i)), k) for run, call, i in places):
            self.unaligned[self.canonical[c].op] += 1

    def _kinds(self, run: int, call: int, d: Digest) -> str:
        return self.runs[run].geometries[call].kinds(d.form)

    def _compared(self, chosen: tuple[dict, dict], kind: str) -> Pair:
        vectors, there = [], []
        for run in (0, 1):
            vector, known = np.zeros(len(self.samples), np.int64), np.zeros(len(self.samples), bool)
            for call, d in chosen[run].items():
                tokens, rows = self.runs[run].geometries[call].places(d.form)
                vector[tokens], known[tokens] = d.rows[rows], True
            vectors.append(vector)
            there.append(known)
        both = there[0] & there[1]
        differs = (vectors[0] != vectors[1]) & both
        moved = bool(differs.any()) and np.array_equal(*(np.sort(v[both]) for v in vectors))
        return Pair(differs, int(both.sum()), chosen, kind, moved)

    def outputs(self) -> list[Pair | None]:
        """Returns the pairs of what the model returned."""
        ends = [(c, e) for c, e in enumerate(self.canonical) if e.op == OUTPUT and e.phase == FORWARD]
        return [self.pairs[c, "in", k] for c, e in ends for k in range(len(e.inputs))]

    def by_sample(self, pair: Pair) -> np.ndarray:
        return np.bincount(self.samples[pair.differs], minlength=self.count) > 0

    def _writers(self, run: int, slot: Slot) -> list[Wrote]:
        """Returns what wrote a tensor; a launch did not write what it left as it was."""
        return [w for w in slot.writers if not self._left(self.runs[run].at(w[:2]), w[2])]

    @staticmethod
    def _left(e: Event, k: int) -> bool:
        if not e.launch or not e.inputs[k].digests or not e.outputs[k].digests:
            return False
        pairs = zip(e.inputs[k].digests, e.outputs[k].digests)
        return all(np.array_equal(before.rows, after.rows) for before, after in pairs)

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
                        for w in self._writers(run, s):
                            dirty |= wrote[w]
                read[call, i] = dirty
                for k in range(len(e.outputs)):
                    pair = self.pairs.get((c, "out", k))
                    wrote[call, i, k] = dirty if pair is None else self.by_sample(pair)
        return read, wrote

    def causes(self) -> list[Cause]:
        """Lists the ops that drift by themselves, in the order in which they ran."""
        self.read, self.wrote = zip(*(self._dirt(run) for run in (0, 1)))
        self._find_readers()
        found: dict[tuple, Cause] = {}
        for c, e in enumerate(self.canonical):
            for cause in (*self._before(c, e), *self._at(c, e)):
                found.setdefault(cause.key, cause)
        for cause in self._of_parameters():
            found.setdefault(cause.key, cause)
        return list(found.values())

    def _clean(self, c: int) -> np.ndarray:
        """Returns the samples in which nothing that the op read follows a drift, in either run."""
        dirty = np.zeros(self.count, bool)
        for run in (0, 1):
            for call, i in self.places[run].get(c, {}).items():
                held = self.runs[run].geometries[call].held
                dirty[held] |= self.read[run][call, i][held]
        return ~dirty

    def _healed(self, c: int) -> bool:
        """Returns whether everything that read what the op wrote came out the same: what differs was masked there."""
        readers = self.readers.get(c, ())
        pairs = [
            self.pairs[d, "out", k] for d in readers if d is not None for k in range(len(self.canonical[d].outputs))
        ]
        return (
            bool(readers)
            and None not in readers
            and bool(pairs)
            and all(p is not None and not p.differs.any() for p in pairs)
        )

    def _find_readers(self) -> None:
        """Finds for each op those that read what it wrote: None where one is not the same in both runs."""
        self.readers: dict[int, set[int | None]] = {}
        for run in (0, 1):
            for call, events in enumerate(self.runs[run].events):
                for i, e in enumerate(events):
                    mine = self.number[run][call].get(i)
                    for s in e.inputs:
                        for w in s.writers:
                            wrote = self.number[run][w[0]].get(w[1])
                            if wrote is not None and (wrote != mine):
                                end = mine is None or not self.canonical[mine].outputs
                                self.readers.setdefault(wrote, set()).add(None if end else mine)

    def _at(self, c: int, e: Event) -> Iterator[Cause]:
        pairs = {k: p for k in range(len(e.outputs)) if (p := self.pairs[c, "out", k]) is not None}
        clean = self._clean(c)
        if self._healed(c):
            return
        mine = {k: p for k, p in pairs.items() if (self.by_sample(p) & clean).any()}
        if not mine:
            return
        chain = [self.chain(run, [*self.places[run][c].items()]) for run in (0, 1)]
        ends = [self._end("out", k, c, p) for k, p in sorted(pairs.items(), key=lambda kp: kp[0] not in mine)]
        yield self._cause(e, chain, [*mine.values()], clean, ends)

    def _before(self, c: int, e: Event) -> Iterator[Cause]:
        """Yields what changed an input without an op between that is the same in both runs."""
        for k in range(len(e.inputs)):
            pair = self.pairs[c, "in", k]
            if pair is None or not pair.differs.any():
                continue
            dirty, writers, told = np.zeros(self.count, bool), [(), ()], [False, False]
            for run in (0, 1):
                for call, i in self.places[run][c].items():
                    held = self.runs[run].geometries[call].held
                    for w in self._writers(run, self.runs[run].events[call][i].inputs[k]):
                        dirty[held] |= self.wrote[run][w][held]
                        told[run] = told[run] or self._told(run, w)
                        writers[run] += () if self._told(run, w) else (w,)
            mine = self.by_sample(pair) & ~dirty
            if all(told) and not any(writers) or not mine.any():
                continue
            chain = [self.chain(run, [w[:2] for w in writers[run]]) for run in (0, 1)]
            last = next((self.runs[r].at(writers[r][-1][:2]) for r in (0, 1) if writers[r]), None)
            last = last or Event(e.phase, e.path, UNSEEN, e.source, e.node, [])
            yield self._cause(last, chain, [pair], ~dirty, [self._end("in", k, c, pair)])

    def _told(self, run: int, w: Wrote) -> bool:
        """Returns whether what an event wrote was compared, so that it has been judged."""
        return self.pairs.get((self.number[run][w[0]].get(w[1]), "out", w[2])) is not None

    def untold(self, run: int, slot: Slot) -> list[At]:
        """Returns the events that wrote a tensor and were not judged by what they wrote."""
        return [w[:2] for w in self._writers(run, slot) if not self._told(run, w)]

    def chain(self, run: int, ends: list[At]) -> tuple[At, ...]:
        """Returns the events that made something, back to what was compared."""
        found, todo = set(), list(ends)
        while todo:
            at = todo.pop()
            if at in found:
                continue
            found.add(at)
            c = self.number[run][at[0]].get(at[1])
            for k, s in enumerate(self.runs[run].at(at).inputs):
                if self.pairs.get((c, "in", k)) is None and not s.parameter and s.floating:
                    todo += self.untold(run, s)
        return tuple(sorted(found))

    def _end(self, io: str, k: int, c: int, pair: Pair) -> End:
        events = tuple({call: (call, i) for call, i in self.places[run][c].items()} for run in (0, 1))
        return End(io, k, events, pair.digests)

    def _cause(self, e: Event, chain: list, pairs: list[Pair], clean: np.ndarray, ends: list[End]) -> Cause:
        a, b = self.runs
        ops = [list(dict.fromkeys(self.runs[run].at(at).op for at in chain[run])) for run in (0, 1)]
        short = [" → ".join(o[:5] + ["…"] * (len(o) > 5)) or UNSEEN for o in ops]
        both = [f"{o} in {run.layout}" for o, run in zip(short, self.runs) if o != UNSEEN]
        name = short[0] if ops[0] == ops[1] else ", ".join(both)
        differs = np.any([p.differs for p in pairs], 0) if pairs else np.ones(len(self.samples), bool)
        compared = max((p.compared for p in pairs), default=len(differs))
        first = pairs[0].differs & clean[self.samples] if pairs else differs
        return Cause(
            e.path,
            name,
            e.source,
            e.phase,
            e.node,
            "",
            (a.layout, b.layout),
            int(differs.sum()),
            compared,
            int(first.argmax()),
            tuple(chain),
            tuple(ends),
        )

    def _of_parameters(self) -> Iterator[Cause]:
        a, b = self.runs
        for name in [n for n in a.gradients if n in b.gradients]:
            if a.gradients[name][0] == b.gradients[name][0]:
                continue
            writers = [run.gradients[name][1] for run in self.runs]
            if any(self.wrote[run][w].any() for run in (0, 1) for w in writers[run]):
                continue
            chain = [self.chain(run, [w[:2] for w in writers[run]]) for run in (0, 1)]
            e = next((self.runs[0].at(w) for w in chain[0] if self.runs[0].at(w).path), None)
            owner = name.rpartition(".")[0]
            cause = self._cause(
                e or Event(BACKWARD, owner, UNSEEN, "", "", []), chain, [], np.ones(self.count, bool), []
            )
            cause.path, cause.direction, cause.parameter = owner, PARAMETER, name
            yield cause
