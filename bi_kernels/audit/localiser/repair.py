"""Runs two layouts again around the ops that drift: keeps what they were given, and repairs what they returned."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bi_kernels.audit.compare import compare
from bi_kernels.audit.localiser.cause import Cause, End
from bi_kernels.audit.localiser.compare import Comparison
from bi_kernels.audit.localiser.script import write
from bi_kernels.audit.localiser.tracing.digest import Digest
from bi_kernels.audit.localiser.tracing.events import At, Edit
from bi_kernels.audit.localiser.tracing.geometry import by_rows
from bi_kernels.audit.localiser.tracing.run import Run, freeze
from bi_kernels.audit.localiser.tracing.tape import Program, Tape

MOST = 12  # causes of one round that get a script


class Ends:
    """The rows of every token of the tensors that one cause is compared by, in one run. known: the tokens of the first
    of them that there are."""

    def __init__(self, comparison: Comparison, run: int, cause: Cause):
        self.comparison, self.run, self.cause = comparison, run, cause
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        self.known = np.zeros(len(comparison.samples), bool)

    def _places(self, run: int, call: int, digest: Digest, device) -> list[torch.Tensor]:
        places = self.comparison.runs[run].geometries[call].places(digest.form)
        return [torch.from_numpy(at).to(device) for at in places]

    def keep(self, end: End, call: int, t: torch.Tensor) -> None:
        digest = end.digests[self.run][call]
        tokens, row = self._places(self.run, call, digest, t.device)
        flat = _flat(by_rows(t, digest.reading), digest)
        held = self.rows.setdefault((end.io, end.slot), flat.new_zeros(len(self.known), flat.shape[1]))
        if held.shape[1] == flat.shape[1]:
            self.known[tokens.cpu().numpy()] |= end is self.cause.ends[0]
            held[tokens] = flat[row]

    def overwrite(self, end: End, call: int, t: torch.Tensor) -> None:
        """Writes the first run's rows over those of a tensor of the second run."""
        digest = end.digests[1][call]
        if digest.keys:  # of as many keys as the call has
            return
        tokens, row = self._places(1, call, digest, t.device)
        view = by_rows(t, digest.reading)
        flat = _flat(view, digest).clone()
        flat[row] = self.rows[end.io, end.slot][tokens].to(t.dtype)
        flat = flat.view(view.shape)
        for d, stride in enumerate(view.stride()):  # what is expanded has one place in memory
            if not stride:
                view, flat = view.narrow(d, 0, 1), flat.narrow(d, 0, 1)
        view.copy_(flat)


def _flat(view: torch.Tensor, digest: Digest) -> torch.Tensor:
    """Returns (rows, features) of a tensor whose first dimensions are those of rows."""
    return view.reshape(view.shape[: len(digest.reading.dims)].numel(), -1)


def _program(comparison: Comparison, cause: Cause, run: int) -> tuple[Program, tuple[End, At] | None]:
    """Returns the ops to keep, and which tensor of which event is their result."""
    if not cause.ends:
        return Program(cause.chain[run]), None
    end, samples, sample = cause.ends[0], comparison.samples, comparison.samples[cause.token]
    places = lambda r, c: comparison.runs[r].geometries[c].places(end.digests[r][c].form)
    calls = [next(c for c in end.digests[r] if cause.token in places(r, c)[0]) for r in (0, 1)]
    at, digest = end.events[run][calls[run]], end.digests[run][calls[run]]
    made = [at] if end.io == "out" else comparison.unjudged(run, comparison.runs[run].at(at).inputs[end.slot])
    program = Program(comparison.chain(run, made))
    both = np.intersect1d(*(places(r, calls[r])[0] for r in (0, 1)))
    own = both[samples[both] == sample]  # the sample's tokens that both calls hold
    tokens, row = places(run, calls[run])
    chosen = np.isin(tokens, own)
    program.rows, program.reading = torch.from_numpy(row[chosen]), digest.reading
    if digest.reading.keys is not None:
        geometries = [comparison.runs[r].geometries[calls[r]] for r in (0, 1)]
        grids = [g.grid if g.cached is None else g.cached for g in geometries]
        keys = [next(r for r in grid if sample in samples[r[r >= 0]]) for grid in grids]
        keys = [np.where((k >= 0) & (samples[np.maximum(k, 0)] == sample), k, -1) for k in keys]
        shared = np.intersect1d(*(k[k >= 0] for k in keys))
        program.keys = torch.from_numpy(np.array([int(np.flatnonzero(keys[run] == t)[0]) for t in shared]))
        program.seen = torch.from_numpy(tokens[chosen][:, None] >= shared[None])
    return program, (end, at)


def look_into(
    comparison: Comparison, causes: Sequence[Cause], go: Callable, plans: tuple, repairs: dict, folder, before: int
) -> Run:
    """Runs both layouts again and returns the second, in which the causes, and those of `repairs`, are repaired; the
    causes get their drift, and a script in `folder`."""
    found: list[list[Ends]] = []
    programs: list[list[Program]] = []
    gradients: list[dict[str, torch.Tensor]] = []
    for run in (0, 1):
        edits = {at: list(held) for at, held in repairs.items()} if run else {}
        kept = [Ends(comparison, run, cause) for cause in causes]
        mine: list[Program] = []
        mends: list[tuple[At, Edit]] = []  # after all that looks at what they write over
        look = lambda end, change: Edit("in" if end.io == "in" else "keep", end.slot, change)
        for cause in causes[:MOST]:
            program, result = _program(comparison, cause, run)
            mine.append(program)
            if result is not None:
                edits.setdefault(result[1], []).insert(0, look(result[0], program.ends_in))
        for n, cause in enumerate(causes):
            for end in cause.ends:
                for call, at in end.events[run].items():
                    edits.setdefault(at, []).append(look(end, partial(kept[n].keep, end, call)))
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
        gradients.append(held)
    for n, cause in enumerate(causes):
        if cause.parameter:
            a, b = (g[cause.parameter] for g in gradients)
        else:
            a, b = (of[n].rows.get((cause.ends[0].io, cause.ends[0].slot)) for of in found)
            if a is not None and b is not None:
                both = torch.from_numpy(found[0][n].known & found[1][n].known).to(a.device)
                a, b = a[both], b[both]
        if a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype:
            drift = compare(b, a)
            cause.again = drift.mismatches > 0
            cause.drift = drift if cause.again else None
        if folder is not None and n < MOST and cause.again is not False:
            write(cause, [p[n] for p in programs], Path(folder), before + n)
    return freeze(result)
