"""Runs two layouts again around the ops that drift: keeps what they were given, and repairs what they returned."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bi_kernels.audit.compare import compare
from bi_kernels.audit.localiser.compare import Cause, Comparison, Key
from bi_kernels.audit.localiser.script import Program, ScriptContext, write
from bi_kernels.audit.localiser.tracing.events import At, Edit
from bi_kernels.audit.localiser.tracing.geometry import flat_rows, write_rows
from bi_kernels.audit.localiser.tracing.run import Run, freeze

MOST = 12  # causes of one round that get a script


class Rows:
    """The rows of every token of a tensor in one run; known: the tokens that there are."""

    def __init__(self, comparison: Comparison, run: int, key: Key):
        self.geometries, self.digests = comparison.runs[run].geometries, comparison.pairs[key].digests[run]
        self.rows: torch.Tensor | None = None
        self.known = np.zeros(len(comparison.samples), bool)

    def keep(self, call: int, t: torch.Tensor) -> None:
        digest = self.digests[call]
        tokens, row = self.geometries[call].places_on(digest.form, t.device)
        flat = flat_rows(t, digest.reading)
        if len(flat) != len(digest.rows):  # the repair of an op before this one led tokens to other experts
            return
        if self.rows is None:
            self.rows = flat.new_zeros(len(self.known), flat.shape[1])
        if self.rows.shape[1] == flat.shape[1]:
            self.known[tokens.cpu().numpy()] = True
            self.rows[tokens] = flat[row]

    def overwrite(self, other: "Rows", call: int, t: torch.Tensor) -> None:
        """Writes the rows of the other run over those of a tensor of this one."""
        digest = self.digests[call]
        fits = other.rows is not None and len(flat_rows(t, digest.reading)) == len(digest.rows)
        if fits and not digest.keys:  # of as many keys as the call has
            tokens, row = self.geometries[call].places_on(digest.form, t.device)
            write_rows(t, digest.reading, row, other.rows[tokens])


def _program(comparison: Comparison, cause: Cause, run: int, script: ScriptContext) -> tuple[Program, At | None]:
    """Returns what records the ops, and the event whose tensor, the first of the cause's ends, is their result."""
    letter = "ab"[run]
    if not cause.ends:
        return Program(cause.chain[run], script, letter), None
    c, io, k = cause.ends[0]
    samples, sample = comparison.samples, comparison.samples[cause.token]
    digests = comparison.pairs[c, io, k].digests
    places = lambda r, call: comparison.runs[r].geometries[call].places(digests[r][call].form)
    calls = [next(call for call in digests[r] if cause.token in places(r, call)[0]) for r in (0, 1)]
    at, reading = comparison.places[run][c][calls[run]], digests[run][calls[run]].reading
    made = [at] if io == "out" else comparison.unjudged(run, comparison.runs[run].at(at).inputs[k])
    program = Program(comparison.chain(run, made), script, letter)
    both = np.intersect1d(*(places(r, calls[r])[0] for r in (0, 1)))
    own = both[samples[both] == sample]  # the sample's tokens that both calls hold
    tokens, row = places(run, calls[run])
    chosen = np.isin(tokens, own)
    program.rows, program.reading = torch.from_numpy(row[chosen]), reading
    if reading.keys is not None:
        grids = [comparison.runs[r].geometries[calls[r]].keys for r in (0, 1)]
        keys = [next(r for r in grid if sample in samples[r[r >= 0]]) for grid in grids]
        keys = [np.where((row >= 0) & (samples[np.maximum(row, 0)] == sample), row, -1) for row in keys]
        shared = np.intersect1d(*(row[row >= 0] for row in keys))
        program.keys = torch.from_numpy(np.array([int(np.flatnonzero(keys[run] == t)[0]) for t in shared]))
        program.seen = torch.from_numpy(tokens[chosen][:, None] >= shared[None])
    return program, at


def look_into(
    comparison: Comparison, causes: Sequence[Cause], go: Callable, plans: tuple, repairs: dict, folder, before: int
) -> Run:
    """Runs both layouts again and returns the second, in which the causes, and those of `repairs`, are repaired; the
    causes get their drift, and a script in `folder`."""
    scripts = [ScriptContext() for _ in causes[:MOST]]
    kept: list[dict[Key, Rows]] = []
    programs: list[list[Program]] = []
    gradients: list[dict[str, torch.Tensor]] = []
    for run in (0, 1):
        edits: dict[At, list[Edit]] = defaultdict(list)
        kept.append({key: Rows(comparison, run, key) for cause in causes for key in cause.ends})
        programs.append([])
        for cause, script in zip(causes, scripts):
            program, at = _program(comparison, cause, run, script)
            programs[run].append(program)
            if at is not None:
                _, io, k = cause.ends[0]
                edits[at].append(Edit(io, k, program.ends_in))
        tensors = [(key, call, at) for key in kept[run] for call, at in comparison.places[run][key[0]].items()]
        for key, call, at in tensors:
            edits[at].append(Edit(*key[1:], partial(kept[run][key].keep, call)))
        if run:
            for key, call, at in tensors:
                mend = partial(kept[1][key].overwrite, kept[0][key], call)
                repairs.setdefault(at, []).append(Edit(*key[1:], mend))
            for at, mends in repairs.items():  # after all that looks at what they write over
                edits[at] += mends
        parameters = [cause.parameter for cause in causes if cause.parameter]
        result = go(plans[run], edits=edits, programs=programs[run], keep=parameters)
        gradients.append(result.kept)
        for cause, program in zip(causes, programs[run]):
            if cause.parameter:
                program.ends_in(result.kept[cause.parameter])
    for n, cause in enumerate(causes):
        if cause.parameter:
            a, b = (of[cause.parameter] for of in gradients)
        else:
            one, other = (of[cause.ends[0]] for of in kept)
            a, b = one.rows, other.rows
            if a is not None and b is not None:
                both = torch.from_numpy(one.known & other.known).to(a.device)
                a, b = a[both], b[both]
        if a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype:
            drift = compare(b, a)
            cause.again = drift.mismatches > 0
            cause.drift = drift if cause.again else None
        if folder is not None and n < MOST and cause.again is not False:
            write(cause, scripts[n], [p[n] for p in programs], Path(folder), before + n)
    return freeze(result)
