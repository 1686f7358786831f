"""Shrinks a drift of any callable: one sample in two calls, or a gradient of all samples in one call and in several."""

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import cloudpickle
import torch

from bi_kernels.audit.callables.relations import plan, samples_of
from bi_kernels.audit.callables.step import gradients_kept
from bi_kernels.audit.callables.target import Target, tensors
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.relations.gradient import INVARIANCE
from bi_kernels.audit.reproduce.imports import import_of_spec, reach
from bi_kernels.audit.reproduce.inputs import Drawn
from bi_kernels.audit.reproduce.script import Recipe, first, write
from bi_kernels.contract import rows as row_counts

KINDS = {"drawn": "random", "drawn, with spread exponents": "spread"}  # by the script; else it loads the user's own
Calls = tuple[tuple[int, ...], ...]  # each the numbers of its samples, −1 for a place without one


@dataclass(frozen=True)
class Pair(Recipe):
    """One sample in two calls, or, for the gradient `tensor`, all samples in the calls of `a` and in those of `b`."""

    a: Calls
    b: Calls
    sample: int
    filler: str
    inputs: str
    output: int = 0  # the number of the output, forward
    tensor: str = ""

    template = "callable.py.jinja"

    @property
    def fills(self) -> bool:
        """Returns True where a call has a place without a sample."""
        return any(i < 0 for c in self.a + self.b for i in c)

    @property
    def says(self) -> str:
        if self.tensor:
            return f"the gradient {self.tensor} of {len(self.a[0])} samples in one call and in {len(self.b)}."
        return f"sample {self.sample} in calls of {len(self.a[0])} and {len(self.b[0])}."

    def values(self, t: Target) -> dict:
        taken = [f"taken[{name!r}]" for name in t.values]
        named = [f"{name}={value}" for name, value in zip(t.values, taken)]
        return {
            "t": t,
            "device": repr(str(t.device)),
            "seeded": self.inputs in KINDS,
            "values": {name: self._argument(t, name, value) for name, value in t.values.items()},
            "arguments": ", ".join(taken[: t.positional] + named[t.positional :]),
            "leaf": self.tensor.removeprefix("d"),
            "calls": tuple(map(_python, (self.a, self.b) if self.tensor else (self.a[0], self.b[0]))),
        }

    def _argument(self, t: Target, name: str, value) -> str:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        if self.inputs not in KINDS:
            return f"given[{name!r}]"
        drawn = Drawn(tuple(value.shape), value.dtype)
        if value.dtype == torch.bool:
            drawn = replace(drawn, share=float(value.double().mean()))
        elif not value.is_floating_point():
            drawn = replace(drawn, low=int(value.min()), high=int(value.max()) + 1)
        return f"{drawn.line(kind=KINDS[self.inputs] if name in t.batched else 'random')}.to({str(t.device)!r})"

    def drifts(self, t: Target, given: dict | None = None) -> bool:
        if t.compiled:
            torch.compiler.reset()  # as in a new process: what is compiled depends on the calls before
        with gradients_kept(t.module):
            return super().drifts(t, given=given or t.given(self.inputs))


def _python(calls: Calls | tuple[int, ...]) -> str:
    """Returns Python for calls, or for the samples of one: runs of samples as ranges."""
    if len(calls) > 2 and calls == tuple((i,) for i in range(len(calls))):
        return f"[[i] for i in range({len(calls)})]"
    if isinstance(calls[0], tuple):
        return f"[{', '.join(map(_python, calls))}]"
    run = len(calls) > 2 and calls == tuple(range(calls[0], calls[-1] + 1))
    return f"list(range({calls[0]}, {calls[-1] + 1}))" if run else str(list(calls))


def _import(t: Target, imports: str, path: Path) -> str:
    """Returns the lines that make `fn`: by its name where it has one, else `imports`, else a pickle beside it."""
    function, again = t.eager, "\nfn = torch.compile(fn)" * t.compiled
    home, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    for module, attribute in ((home, name), *product(("torch.nn.functional", "torch"), [name.rpartition(".")[2]])):
        with contextlib.suppress(Exception):  # what a callable says of itself need not be so
            if module != "__main__" and getattr(importlib.import_module(module), attribute) is function:
                return f"{reach(module, path.parent)}from {module} import {attribute} as fn{again}"
    if imports:
        return imports
    pickled = path.with_suffix(".pkl")
    pickled.write_bytes(cloudpickle.dumps(function))
    beside = f"Path(__file__).with_name({pickled.name!r})"
    reached = reach(home or type(function).__module__, path.parent)  # a pickle names what it is made of
    return f"{reached}import cloudpickle\n\nfn = cloudpickle.loads({beside}.read_bytes()){again}"


def _pairs(t: Target, rows: list[Row]) -> Iterator[Pair]:
    """Yields the pairs that the rows say may drift, on drawn inputs and on those that were judged."""
    layouts, every = plan(t.count, t.seed), tuple(range(t.count))
    drifting = (r for r in rows if r.mismatches and r.relation in ("invariance", INVARIANCE))
    for r in sorted(drifting, key=lambda r: (r.relation != "invariance", r.rows))[:12]:
        calls, filler = layouts.get(r.layout, ([[i] for i in every], "stale"))
        calls = tuple(map(tuple, calls))
        if r.relation == INVARIANCE:
            pairs = [Pair((every,), calls, 0, filler, "", tensor=r.tensor)]
        else:
            output = next((i for i in t.judged if f"[{i}]" in r.tensor), t.judged[0])
            samples = samples_of(calls)
            some = dict.fromkeys((samples[r.first_index[0]] if r.inputs == "given" else samples[0], *samples[:8]))
            pairs = [Pair((next(c for c in calls if i in c),), (every,), i, filler, "", output) for i in some]
        yield from (replace(pair, inputs=inputs) for pair, inputs in product(pairs, (*KINDS, r.inputs)))


def _smaller(t: Target, pair: Pair) -> Pair:
    """Returns the sample alone, and the fewest others beside it, as far as it still drifts."""
    pair = first([replace(pair, a=((pair.sample,),))], t) or pair
    others = [i for i in range(t.count) if i != pair.sample]
    fewer = (replace(pair, b=((pair.sample, *others[: m - 1]),)) for m in row_counts(t.count))
    return first((p for p in fewer if p.b != p.a), t) or pair


def _cut(t: Target, pair: Pair) -> tuple[Pair, dict]:
    """Returns the pair with inputs that hold its own samples alone, if it still drifts there; else with all of them."""
    used = sorted(set(samples_of(pair.a + pair.b)))
    number = {-1: -1} | {i: n for n, i in enumerate(used)}
    a, b = (tuple(tuple(number[i] for i in c) for c in calls) for calls in (pair.a, pair.b))
    fewer = replace(pair, a=a, b=b, sample=number[pair.sample])
    at = torch.tensor(used, device=t.device)
    given = t.given(pair.inputs)
    held = given | {k: given[k].index_select(t.batch, at) for k in t.batched}
    return (fewer, held) if fewer.drifts(t, held) else (pair, given)


def export(t: Target, rows: list[Row], candidate: str, imports: str, folder: Path) -> Path | None:
    """Writes the script and what it loads, and names it in the rows that drift; None where no pair was found."""
    pair = first(dict.fromkeys(_pairs(t, rows)), t)
    if pair is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path, loads = folder / f"{''.join(c if c.isalnum() else '_' for c in t.name)}.py", {}
    pair = pair if pair.tensor else _smaller(t, pair)
    if pair.inputs not in KINDS:
        pair, given = (pair, t.given(pair.inputs)) if pair.tensor else _cut(t, pair)
        held = path.with_suffix(".pt")
        torch.save(tensors(given), held)
        loads = {"load": held.name}
    fn = import_of_spec(candidate, folder) if candidate else _import(t, imports, path)
    shown = [r for r in rows if r.mismatches and r.against != "no_grad"]  # the script runs in one mode
    return write(pair, t, f"{t.name}, along dimension {t.batch}", fn, path, shown, **loads)
