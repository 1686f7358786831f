"""Writes what a script of a callable's gradient computes: what backward leaves in one split and in another."""

from collections.abc import Sequence

import torch

from bi_kernels.audit.callables.relations import samples_of
from bi_kernels.audit.callables.step import Step
from bi_kernels.audit.checks.requests import EXPANDED, STRIDED, TWICE
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.reproduce.programs import INTEGER, Program, Writer, ascending, has_empty, layout, numbers, several

UPSTREAM = {  # what comes upstream of an output y whose gradient is dy, as both results have it
    EXPANDED: ("lambda y, dy: torch.full_like(y, 0.75)", "lambda y, dy: y.new_full((), 0.75).expand(y.shape)"),
    STRIDED: ("lambda y, dy: dy", "lambda y, dy: torch.cat((dy, dy), -1)[..., : dy.shape[-1]]"),
}


class Backward:
    """Writes the programs of one gradient of a target."""

    tensor = ""  # which

    def __init__(self, w: Writer):
        t = w.t
        self.w, self.t = w, t
        self.step = Step(t, w.kind)
        self.found = self.step.gradients()
        self.plain = len(self.step.trained) == 1 and w.is_plain(self.step.trained[0])
        self.dys = {f"dy{i}" if len(self.step.trained) > 1 else "dy": dy for i, dy in enumerate(self.step.dy)}

    def upstream(self) -> dict[str, torch.Tensor]:
        """Returns the upstream gradients that a script loads, a row a sample."""
        return {k: dy[:, 0] if self.plain else dy for k, dy in self.dys.items()}

    @property
    def key(self) -> str:
        return self.tensor.removeprefix("d")

    @property
    def of_input(self) -> bool:
        return self.key in self.t.batched

    def python(self, k: str) -> str:
        """Returns Python for an input or a module's parameter."""
        return self.w.names[k] if k in self.t.values else f"module_of({self.w.function}).get_parameter({k!r})"

    def _inputs(self, calls: Sequence[Sequence[int]], filler: str) -> tuple[list[str], str]:
        """Returns the line that makes the leaf whose gradient it is, where that is an input, and a call's arguments."""
        w, lines = self.w, []

        def batched(k: str) -> str:
            text, copied = w.some(calls, filler)(k), ".clone()" * (k in w.written)
            if k not in self.step.floating:
                return text
            if k != self.key:
                return f"{text}.requires_grad_(){copied}"
            lines.append(f"part = {text}.requires_grad_()")
            return f"part{copied}"

        return lines, w.arguments(batched)

    def _backward(self, calls: Sequence[Sequence[int]], arguments: str, more: str) -> list[str]:
        """Returns the lines of a call and its backward; more: as `function` has it."""
        w, t, empty = self.w, self.t, has_empty(calls)
        called, outputs, given = f"{w.function}({arguments})", [], []
        for number, name in zip(self.step.trained, self.dys):
            d = t.dims[number]
            dy = f"take({name}, rows, empty=0)" if empty else f"{name}[rows]"
            dy += "" if self.plain else f".movedim(0, {d}).flatten({d}, {d + 1})"
            outputs.append(w.names[t.outputs[number]] if t.outputs else f"y{w.where[number]}")
            given.append(f"upstream({outputs[-1]}, {dy})" if more == "upstream" else dy)
        if self.plain and not more:
            return [f"{called}.backward({given[0]})"]
        first, both = called if t.outputs else f"y = {called}", f"[{', '.join(outputs)}], [{', '.join(given)}]"
        if more != "times":
            return [first, f"torch.autograd.backward({both})"]
        zeroed = [f"    {line}" for line in (["part.grad = None"] * self.of_input + self._reset())]
        again = f"    torch.autograd.backward({both}, retain_graph=left > 0)"
        return [first, "for left in reversed(range(times)):", *zeroed, again]

    def function(self, calls: Sequence[Sequence[int]], filler: str = "stale", more: str = "") -> list[str]:
        """Returns the definition of `gradient(calls)`; more: its second argument, `upstream`, which makes of an output
        and its upstream gradient another one, or `times`, that the graph is gone through."""
        t, (leaves, arguments) = self.t, self._inputs(calls, filler)
        inner = leaves + self._backward(calls, arguments, more)
        if self.step.folded_names and not t.batch:
            x = t.values[t.first]
            length = x.shape[1 : -1 if x.is_floating_point() else None].numel()
            inner = [f"with of_samples(rows, {length}):", *(f"    {line}" for line in inner)]
        inner += [f"parts.append(part.grad{f'.movedim({t.batch}, 0)' * bool(t.batch)})"] * self.of_input
        body = [f'"""{self.tensor} that backward leaves when each of these calls is a micro-batch."""', *self._reset()]
        body += ["parts = []"] * self.of_input + ["for rows in calls:", *(f"    {line}" for line in inner)]
        joined = "torch.cat(parts)" if ascending(calls) else "in_order(calls, parts)"
        held = f"{self.python(self.key)}.{'main_grad' if self.tensor in self.step.folded_names else 'grad'}"
        body.append(f"return {joined if self.of_input else held}")
        return [f"def gradient(calls{f', {more}' * bool(more)}):", *(f"    {line}" for line in body), "", ""]

    def _reset(self) -> list[str]:
        """Returns the lines after which no backward has left anything."""
        folded = [self.python(tensor.removeprefix("d")) for tensor in sorted(self.step.folded_names)]
        lines = [] if self.of_input else [f"{self.python(self.key)}.grad = None"]
        return lines + [f"{p}.main_grad = torch.zeros_like({p}, dtype=torch.float32)" for p in folded]

    def program(self, what: str, *lines: str) -> Program:
        t = self.t
        wanted = [f"{self.w.names[k]}.requires_grad_()" for k in self.step.floating if k not in t.batched]
        every = [*self.w.load(t.values, list(self.dys)), *wanted, "", "", *lines]
        return Program(what, every, INTEGER[self.found[self.tensor].element_size()])


def split(b: Backward, r: Row, calls: Sequence[Sequence[int]], filler: str) -> Program:
    """Returns the program of a split: the gradient in one call, and in the calls of a layout."""
    t = b.t
    calls = calls[:1] if filler == "nonfinite" else calls
    samples = samples_of(calls)
    some = f"[:{len(samples)}]" if samples == t.every[: len(samples)] else f"[{numbers(samples)}]"
    some = some * (b.of_input and samples != t.every)
    made = f"whole = gradient([range({t.count})]){some}", f"other = gradient({several(calls)})"
    return b.program(layout(r, t, calls), *b.function(calls, filler), *made)


def demand(b: Backward, r: Row) -> Program:
    """Returns the program of what else may come upstream, or of a graph that is gone through twice."""
    every = f"[range({b.t.count})]"
    if r.layout == TWICE:
        said, more, (one, other) = "the first and the second backward through one graph", "times", ("1", "2")
    else:
        said, more, (one, other) = f"an upstream gradient in memory and {r.layout}", "upstream", UPSTREAM[r.layout]
    made = f"whole = gradient({every}, {one})", f"other = gradient({every}, {other})"
    return b.program(said, *b.function([b.t.every], more=more), *made)


def same_backward(b: Backward) -> Program:
    every = f"[range({b.t.count})]"
    made = f"whole = gradient({every})", f"other = gradient({every})"
    return b.program("two backwards that are the same", *b.function([b.t.every]), *made)
