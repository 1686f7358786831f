"""Runs two layouts again around the ops that drift: to keep what they were given, and to mend what they returned."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.localiser.cause import Cause, End
from bi_kernels.audit.localiser.compare import Comparison
from bi_kernels.audit.localiser.replay import Program, Tape
from bi_kernels.audit.localiser.script import write
from bi_kernels.audit.localiser.watched.events import At, Edit
from bi_kernels.audit.localiser.watched.geometry import by_rows
from bi_kernels.audit.localiser.watched.step import Run, freeze

MOST = 12  # causes of one round that are looked into


class Ends:
    """What one cause left in one run: every token's rows of the tensors that it is compared by."""

    def __init__(self, comparison: Comparison, run: int, cause: Cause):
        self.comparison, self.run, self.cause = comparison, run, cause
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        self.known = np.zeros(len(comparison.samples), bool)  # the tokens of the first end that there are

    def keep(self, end: End, call: int, t: torch.Tensor) -> None:
        digest = end.digests[self.run][call]
        tokens, row = self.comparison.runs[self.run].geometries[call].places(digest.form)
        view = by_rows(t, digest.reading)
        flat = view.reshape(view.shape[: len(digest.reading.dims)].numel(), -1)
        held = self.rows.setdefault((end.io, end.slot), flat.new_zeros(len(self.comparison.samples), flat.shape[1]))
        if held.shape[1] == flat.shape[1]:
            self.known[tokens] |= end is self.cause.ends[0]
            held[torch.from_numpy(tokens).to(t.device)] = flat[torch.from_numpy(row).to(t.device)]

    def overwrite(self, end: End, call: int, t: torch.Tensor) -> None:
        """Writes the first run's rows over those of a tensor of the second run."""
        digest = end.digests[1][call]
        if digest.keys:  # of as many keys as the call has
            return
        tokens, row = self.comparison.runs[1].geometries[call].places(digest.form)
        view, values = by_rows(t, digest.reading), self.rows[end.io, end.slot]
        flat = view.reshape(view.shape[: len(digest.reading.dims)].numel(), -1).clone()
        flat[torch.from_numpy(row).to(t.device)] = values[torch.from_numpy(tokens).to(t.device)].to(t.dtype)
        flat = flat.view(view.shape)
        for d, stride in enumerate(view.stride()):  # what is expanded has one place in memory
            if not stride:
                view, flat = view.narrow(d, 0, 1), flat.narrow(d, 0, 1)
        view.copy_(flat)


def _program(comparison: Comparison, cause: Cause, run: int) -> tuple[Program, tuple[End, At] | None]:
    """Returns the ops to keep, and which tensor of which event is their result."""
    if not cause.ends:
        return Program(cause.chain[run]), None
    end = cause.ends[0]
    places = comparison.runs[run].geometries
    of = {
        r: next(
            c for c, d in end.digests[r].items() if cause.token in comparison.runs[r].geometries[c].places(d.form)[0]
        )
        for r in (0, 1)
    }
    at, digest = end.events[run][of[run]], end.digests[run][of[run]]
    event = comparison.runs[run].at(at)
    program = Program(
        comparison.chain(run, [at] if end.io == "out" else comparison.untold(run, event.inputs[end.slot]))
    )
    own = comparison.samples == comparison.samples[cause.token]
    for r in (0, 1):
        there = np.zeros(len(own), bool)
        there[comparison.runs[r].geometries[of[r]].places(end.digests[r][of[r]].form)[0]] = True
        own &= there
    tokens, row = places[of[run]].places(digest.form)
    chosen = own[tokens]
    program.rows, program.reading = torch.from_numpy(row[chosen]), digest.reading
    if digest.reading.keys is not None:
        grids = [
            g.grid if g.cached is None else g.cached for g in (comparison.runs[r].geometries[of[r]] for r in (0, 1))
        ]
        sample = comparison.samples[cause.token]
        keys = [next(r for r in grid if sample in comparison.samples[r[r >= 0]]) for grid in grids]
        keys = [np.where((k >= 0) & (comparison.samples[np.maximum(k, 0)] == sample), k, -1) for k in keys]
        both = np.intersect1d(*(k[k >= 0] for k in keys))
        program.keys = torch.from_numpy(np.array([int(np.flatnonzero(keys[run] == t)[0]) for t in both]))
        program.seen = torch.from_numpy(tokens[chosen][:, None] >= both[None])
    return program, (end, at)


def look_into(
    comparison: Comparison, causes: Sequence[Cause], go: Callable, plans: tuple, repairs: dict, folder, before: int
) -> Run:
    """Runs both layouts again and returns the second, in which the causes, and those of `repairs`, are mended; the
    causes get their drift, and a script in `folder`."""
    found: list[list[Ends]] = []
    programs: list[list[Program]] = []
    grads: list[dict[str, torch.Tensor]] = []
    for run in (0, 1):
        edits = {at: list(held) for at, held in repairs.items()} if run else {}
        kept = [Ends(comparison, run, cause) for cause in causes]
        mine: list[Program] = []
        mends: list[tuple[At, Edit]] = []  # after every look at what they write over
        for cause in causes[:MOST]:
            program, result = _program(comparison, cause, run)
            mine.append(program)
            if result is not None:
                end, at = result
                edits.setdefault(at, []).insert(0, Edit("in" if end.io == "in" else "keep", end.slot, program.ends_in))
        for n, cause in enumerate(causes):
            for end in cause.ends:
                for call, at in end.events[run].items():
                    edits.setdefault(at, []).append(
                        Edit("in" if end.io == "in" else "keep", end.slot, partial(kept[n].keep, end, call))
                    )
                    if run:
                        mends.append((at, Edit(end.io, end.slot, partial(found[0][n].overwrite, end, call))))
        for at, mend in mends:
            edits[at].append(mend)
            repairs.setdefault(at, []).append(mend)
        held: dict[str, torch.Tensor] = {}

        def ended(gradients: dict[str, torch.Tensor]) -> None:
            for n, cause in enumerate(causes):
                if cause.parameter:
                    held[cause.parameter] = gradients[cause.parameter].clone()
                    if n < MOST:
                        mine[n].ends_in(gradients[cause.parameter])

        result = go(plans[run](), edits=edits, tape=Tape(mine), ended=ended)
        found.append(kept)
        programs.append(mine)
        grads.append(held)
    for n, cause in enumerate(causes):
        if cause.parameter:
            a, b = (g[cause.parameter] for g in grads)
        else:
            end = cause.ends[0]
            a, b = (of[n].rows.get((end.io, end.slot)) for of in found)
            both = found[0][n].known & found[1][n].known
            if a is not None and b is not None:
                there = torch.from_numpy(both).to(a.device)
                a, b = a[there], b[there]
        if a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype:
            drift = compare(b, a)
            cause.again = drift.mismatches > 0
            cause.drift = drift if cause.again else None
        if folder is not None and n < MOST and cause.again is not False:
            write(cause, [p[n] for p in programs], Path(folder), before + n)
    return freeze(result)
