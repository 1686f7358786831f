"""What a reproducer computes: the candidate's results and gradients under one of the layouts in which it was judged.

A script names the layout and passes the candidate; inputs, layouts and what fresh memory holds are the audit's own.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import bi_kernels.checks  # noqa: F401  (mends Triton's interpreter before a candidate defines a kernel)
from bi_kernels.audit.callables.demand import STEPS
from bi_kernels.audit.callables.memory import called, laid, places
from bi_kernels.audit.callables.modes import modes
from bi_kernels.audit.callables.relations import filled, output_names, plan, samples_of
from bi_kernels.audit.callables.sharper import SHARP, gradient_layouts
from bi_kernels.audit.callables.sharper import layouts as layouts_of_more
from bi_kernels.audit.callables.step import Step as CallableStep
from bi_kernels.audit.callables.target import Layout, Target, module_of
from bi_kernels.audit.problem.call_layouts import VIEWS, layouts
from bi_kernels.audit.problem.problem import Problem
from bi_kernels.audit.problem.registry import OPS
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.relations.gradient import UNTRAINED
from bi_kernels.audit.relations.step import Step
from bi_kernels.audit.relations.uses import AXES, ONCE, again
from bi_kernels.audit.relations.views import ALIGNED, VIEWED, in_place, placed
from bi_kernels.contract import DTYPES

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of a dtype's size in bytes
WHOLE = "the whole batch"
ROWS = re.compile(r"the first (\d+) of (\d+) rows( in one call)?")
USED = re.compile(rf"({'|'.join(AXES)}): (.+?)(, as {ONCE})?")  # see relations.uses
FIRST = re.compile(r"(.+), the first (\d+)( of all)?")  # samples, in a mode
Parts = list[torch.Tensor]


class Operator:
    """An op of the registry at one shape, dtype and device, with the inputs on which audits judge it."""

    def __init__(self, op: str, case: str, dtype: str, shapes: str, device: str, seed: int = 0, threads: int = 1):
        torch.set_num_threads(threads)
        self.problem = Problem(OPS[op], case, DTYPES[dtype], shapes, torch.device(device), seed)

    def result(self, fn: Callable, layout: str, inputs: str, tensor: str, memory: str) -> Parts:
        """Returns fn's outputs, or the gradient `tensor`, in logical order, computed in `layout` on a family of
        `inputs`; memory: what torch.empty holds in the first call, 0 or 1, and then by turns."""
        s = Subject(self.problem, fn, "", "")
        s.calls = int(memory)
        with torch.enable_grad():
            if used := USED.fullmatch(layout):
                return again(s, used[1], used[2], once=bool(used[3]))
            out = self._gradients(s, layout, inputs, tensor) if tensor else self._outputs(s, layout, inputs)
        return [t.detach() for t in _each(out)]

    def _outputs(self, s: Subject, layout: str, inputs: str):
        if named := ROWS.fullmatch(layout):
            m, n, leaky = int(named[1]), int(named[2]), inputs == "nonfinite"
            at = torch.arange(n, device=s.problem.device)
            tokens, shared = s.problem.inputs(inputs, n, at >= m if leaky else None)
            if named[3]:
                return s.call({k: t[:m] for k, t in tokens.items()}, shared, (m,), at[:m])
            apart = (0, m, n) if leaky and s.problem.op.cache and m < n else None
            out = s.call(tokens, shared, (n,), at, apart)
            return out[:m] if isinstance(out, torch.Tensor) else tuple(t[:m] for t in out)
        place, _, view = layout.partition(": ")
        if view in VIEWED:
            return (in_place if place == ALIGNED else placed)(s, view, inputs)
        return s.compute(layouts(s.lengths, s.problem.seed)[layout], inputs)

    def _gradients(self, s: Subject, layout: str, inputs: str, tensor: str):
        step = Step(s, inputs)
        if layout == UNTRAINED:
            return tuple(step.without_gradients())
        view = {"view": VIEWS[layout]} if layout in VIEWS else {}
        name = tensor.removeprefix("d").removesuffix(".grad")
        calls = "packed" if view else layout
        found = step.gradients(calls, main_grad=not tensor.endswith(".grad"), **view)
        if tensor == TRAINED:
            return tuple(step.outputs)
        return found[name][~step.poisoned] if inputs == "nonfinite" and name in step.tokens else found[name]


TRAINED = "outputs of a call that trains"


def _each(out: torch.Tensor | Sequence) -> Iterator[torch.Tensor]:
    """Yields the tensors of what an op returned, or of several calls of it."""
    if isinstance(out, torch.Tensor):
        yield out
    else:
        for part in out:
            yield from _each(part)


class Arguments(Target):
    """A callable's arguments as they were judged, and which of them, and of its outputs, count samples."""

    weights: dict | None  # of a module, as it was judged

    def __init__(self, held: Path):
        state = torch.load(held, weights_only=False)
        torch.set_num_threads(state.pop("threads"))
        vars(self).update(state)

    def result(self, fn: Callable, layout: str, inputs: str, tensor: str, memory: str) -> Parts:
        """Returns what fn's output `tensor`, or that gradient, holds of each sample, computed in `layout` on `inputs`
        (given, or made of those: see `drawn`); "the whole batch: X" is one call, and of it the samples of X;
        memory: what torch.empty holds in the first call, 0 or 1, and then by turns."""
        self.function, self.module = fn, module_of(fn)
        if self.module is not None:
            self.module.load_state_dict(self.weights)
        if self.compiled:
            torch.compiler.reset()  # what is compiled depends on the calls before
        self.calls = int(memory)
        if few := FIRST.fullmatch(layout):
            samples = self.every if few[3] else self.every[: int(few[2])]
            out = self.rows(modes(self)[few[1]](self, samples), len(samples))
            return [out[output_names(self).index(tensor)][: int(few[2])]]
        whole = layout.startswith(WHOLE)
        if layout == "no_grad" or layout in modes(self):
            out = self.whole() if layout == "no_grad" else self.rows(modes(self)[layout](self, self.every), self.count)
            return [out[output_names(self).index(tensor)]]
        if layout in places(self):
            return [called(self, laid(self, places(self)[layout]))[output_names(self).index(tensor)]]
        if layout in STEPS:
            return [STEPS[layout](self).gradients([self.every])[tensor]]
        calls, filler = self.calls_of(layout.partition(": ")[2] if whole else layout, inputs, tensor)
        made, filler = ([self.every], "stale") if whole else (calls, filler)
        if tensor in output_names(self):
            out = filled(made, filler, lambda f: self.compute(made, f, inputs))[output_names(self).index(tensor)]
            return [out[samples_of(calls)] if whole else out]
        out = filled(made, filler, lambda f: CallableStep(self, inputs).gradients(made, f))[tensor]
        return [out[samples_of(calls)] if whole and tensor.removeprefix("d") in self.batched else out]

    def calls_of(self, layout: str, inputs: str, tensor: str) -> tuple[Layout, str]:
        """Returns a layout's calls, each the numbers of its samples, and what fills a place without one."""
        forward = tensor in output_names(self)
        every = {"": ([self.every], "stale"), "micro_batches:each": ([[i] for i in self.every], "stale")}
        every |= plan(self.count, self.seed)
        if inputs in ("resampled", *SHARP):
            every |= layouts_of_more(self, inputs) if forward else gradient_layouts(self)
        calls, filler = every[layout]
        return (calls if forward or filler != "nonfinite" else calls[:1]), filler


def keep(t: Target, held: Path) -> None:
    """Writes what `Arguments` reads."""
    state: dict[str, Any] = {k: v for k, v in vars(t).items() if k not in ("function", "module", "eager")}
    state["weights"] = t.module.state_dict() if t.module is not None else None  # which an import may draw anew
    torch.save(state | {"deadline": float("inf"), "threads": torch.get_num_threads()}, held)
