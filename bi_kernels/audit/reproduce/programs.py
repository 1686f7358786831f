"""Writes what a script of a callable computes: its call on the whole batch, and the calls whose results differ."""

import keyword
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from bi_kernels.audit.callables.relations import samples_of
from bi_kernels.audit.callables.target import Target, filling, tensors
from bi_kernels.audit.checks.memory import COLUMNS, GIVEN
from bi_kernels.audit.checks.modes import AUTOCAST, FEW, WANTED
from bi_kernels.audit.evidence.verdicts import Row

HELPERS = "take", "in_order", "over_used_memory", "of_samples", "in_larger", "with_strides"
TAKEN = {*HELPERS, "torch", "Path", "os", "sys", "judged", "call", "calls", "rows", "parts", "part", "y", "gradient"}
TAKEN |= {"whole", "other", "differ", "gap", "used", "bi_kernels", "len", "range", "print", "module_of", "upstream"}
INTEGER = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # of a dtype's size in bytes
_EACH = "[CALL for rows in calls]"
ENTERED = {WANTED: "torch.enable_grad()", "inference_mode": "torch.inference_mode()"}  # the context of a mode


@dataclass
class Program:
    """The lines of a script, which compute `whole` and `other`, and in words what these are."""

    what: str
    lines: list[str]
    bits: str  # the integers as which both are compared


def literal(value) -> str:
    """Returns Python for a constant, '' for one that has to be loaded."""
    plain = value is None or isinstance(value, (bool, int, str)) or isinstance(value, float) and math.isfinite(value)
    return repr(value) if plain else ""


def numbers(call: Sequence[int]) -> str:
    """Returns Python for the numbers of a call's samples, −1 for a place without one."""
    call, n, runs, at = list(call), len(call), [], 0
    for parity in (0, 1):
        if n > 4 and call == [i if i % 2 == parity else -1 for i in range(n)]:
            return f"[i if i % 2 == {parity} else -1 for i in range({n})]"
    while at < n:
        end, step = at + 1, int(call[at] >= 0)
        while end < n and call[end] == call[at] + step * (end - at):
            end += 1
        run = f"range({call[at]}, {call[at] + end - at})" if step else f"[-1] * {end - at}"
        if (at, end) == (0, n) and n > 1:
            return run.replace("range(0, ", "range(")
        runs.append(f"*{run}" if end - at > 2 else ", ".join(map(str, call[at:end])))
        at = end
    return f"[{', '.join(runs)}]"


def several(calls: Sequence[Sequence[int]]) -> str:
    """Returns Python for a list of calls."""
    size, starts = len(calls[0]), [call[0] for call in calls]
    if len(calls) <= 4 and size == 1:
        return f"[{', '.join(map(str, map(list, calls)))}]"
    alike = all(list(call) == list(range(call[0], call[0] + size)) and call[0] >= 0 for call in calls)
    if len(calls) > 2 and alike and size == 1:
        return f"[[i] for i in {numbers(starts)}]"
    if len(calls) > 2 and alike and starts == list(range(0, size * len(calls), size)):
        return f"[range(i, i + {size}) for i in range(0, {size * len(calls)}, {size})]"
    return f"[{', '.join(map(numbers, calls))}]"


class Writer:
    """Writes the programs of one target, on one kind of its inputs.

    function: its name in the script; memory: what torch.empty holds in the first call of each of the two results, "0"
    ones and "1" zeros, and then by turns; "" leaves memory alone.
    """

    def __init__(self, t: Target, kind: str, function: str, memory: str = ""):
        self.t, self.kind, self.function, self.memory = t, kind, function, memory
        usable = lambda k: k.isidentifier() and not keyword.iskeyword(k) and k not in {*TAKEN, function}
        self.names = {k: k if usable(k) else f"given{i}" for i, k in enumerate(t.values)}
        self.written = {*t.outputs, *t.changed}  # inputs that it writes into
        with torch.no_grad(), t.layout(t.every):
            arguments = t.take(t.every, kind=kind)
            leaves, _ = tree_flatten_with_path(t.returned(t.function, arguments))
        found = [(keystr(path), y) for path, y in leaves if isinstance(y, torch.Tensor)]
        found = [("", arguments[k]) for k in t.outputs] or found
        self.where, self.made = zip(*found)  # where in what it returns each output is, and the outputs

    def load(self, names: Sequence[str], more: Sequence[str] = ()) -> list[str]:
        """Returns the lines that load inputs, and what else a script needs."""
        listed = [k for k in names if not literal(self.t.values[k])]
        pairs = [(self.names[k], k) for k in listed] + [(k, k) for k in more]
        return [f"{', '.join(n for n, _ in pairs)} = {', '.join(f'judged[{k!r}]' for _, k in pairs)}"]

    def is_plain(self, number: int) -> bool:
        """Tells whether the callable returns this output alone, a row a sample."""
        d = self.t.dims[number]
        return not self.t.outputs and not self.where[number] and d == 0 and self.made[number].shape[0] == self.t.count

    def bits(self, number: int) -> str:
        return INTEGER[self.made[number].element_size()]

    def arguments(self, batched: Callable[[str], str], shared: Callable[[str], str] | None = None) -> str:
        """Returns the arguments of a call, its batched tensors and its shared ones as these write them."""
        shared, listed = shared or self.whole, []
        for number, (k, v) in enumerate(self.t.values.items()):
            text = literal(v) or self.names[k]
            if isinstance(v, torch.Tensor):
                text = (batched if k in self.t.batched else shared)(k)
            listed.append(text if number < self.t.positional else f"{k}={text}")
        return ", ".join(listed)

    def whole(self, k: str) -> str:
        return f"{self.names[k]}{'.clone()' * (k in self.written)}"

    def some(self, calls: Sequence[Sequence[int]], filler: str = "stale") -> Callable[[str], str]:
        """Returns what writes `rows` of an input, a list of numbers of `calls`, −1 among them or not."""
        empty = any(i < 0 for call in calls for i in call)

        def write(k: str) -> str:
            if not self.t.batch and not empty:
                return f"{self.names[k]}[rows]"
            value = filling(filler, self.t.values[k].dtype) if empty else None
            text = 'float("nan")' if value != value else f"torch.finfo({self.names[k]}.dtype).max"
            text = f", empty={value if value is not None and abs(value) < 100 else text}" * (value is not None)
            return f"take({self.names[k]}, rows{f', dim={self.t.batch}' * bool(self.t.batch)}{text})"

        return write

    def head(self, number: int) -> tuple[str, list[str]]:
        """Returns the name by which a script calls the callable for one output, a row a sample, and the lines that
        define it where the callable returns something else."""
        if self.is_plain(number):
            return self.function, []
        t, d = self.t, self.t.dims[number]
        k = self.made[number].shape[d] // t.count
        rows = f".unflatten({d}, (-1, {k}))" * (k > 1) + f".movedim({d}, 0)" * bool(d)
        called = f"{self.function}({self.arguments(self.names.get, self.names.get)})"
        made = [f"    {called}", f"    return {self.names[t.outputs[number]]}{rows}"]
        made = made if t.outputs else [f"    return {called}{self.where[number]}{rows}"]
        given = [(literal(v) or self.names[k], self.names[k]) for k, v in t.values.items()]
        listed = ", ".join(name for text, name in given if text == name)
        return "call", [f"def call({listed}):", '    """What it computes, a row a sample."""', *made, "", ""]

    def results(self, number: int, one: "Call", other: "Call", before: str = "") -> list[str]:
        """Returns the lines that compute `whole` and `other`, of the output `number`; before: a line between both."""
        name, lines = self.head(number)
        said = "torch.empty holds ones in one call and zeros in the next"
        for i, (variable, call) in enumerate((("whole", one), ("other", other))):
            lines += [before] if i and before else []
            if self.memory:
                lines.append(f"used = over_used_memory({name}, first={self.memory[i]})  # {said}")
            called = f"{'used' if self.memory else name}({call.arguments})"
            line = f"{variable} = {call.around.replace('CALL', called)}"
            lines += [f"with {call.within}:", f"    {line}"] if call.within else [line]
        return lines


@dataclass
class Call:
    """A call in a script: its arguments, the text around it and the context that it is in."""

    arguments: str
    around: str = "CALL"
    within: str = ""


def forward(w: Writer, r: Row, calls: Sequence[Sequence[int]], filler: str) -> Program:
    """Returns the program of a layout: the same samples in one call of all, and in the calls of the layout."""
    t, number = w.t, output(w.t, r)
    samples = samples_of(calls)
    part = f"[:{len(samples)}]" if samples == list(range(len(samples))) else f"[{numbers(samples)}]"
    whole = Call(w.arguments(w.whole), f"CALL{part * (samples != t.every)}")
    lines = w.load(t.values)
    if [samples] == [list(call) for call in calls] and samples == t.every[: len(samples)] and not t.batch:
        few = lambda k: f"{w.names[k]}[:{len(samples)}]{'.clone()' * (k in w.written)}"
        lines += w.results(number, whole, Call(w.arguments(few)))
    else:
        lines.append(f"calls = {several(calls)}  # the samples in each{', -1 for none' * has_empty(calls)}")
        joined = f"torch.cat({_EACH})" if ascending(calls) else f"in_order(calls, {_EACH})"
        lines += w.results(number, whole, Call(w.arguments(w.some(calls, filler)), joined))
    return Program(layout(r, t, calls), lines, w.bits(number))


def output(t: Target, r: Row) -> int:
    """Returns the number of the output that a row compares."""
    return t.judged[t.output_names().index(r.tensor)]


def has_empty(calls: Sequence[Sequence[int]]) -> bool:
    return any(i < 0 for call in calls for i in call)


def ascending(calls: Sequence[Sequence[int]]) -> bool:
    held = [i for call in calls for i in call]
    return held == sorted(held) and held[0] >= 0


def layout(r: Row, t: Target, calls: Sequence[Sequence[int]]) -> str:
    """Names a layout and what it is compared with."""
    batch = f"the batch of {t.count}"
    if all(len(call) == 1 for call in calls):
        return f"samples alone and in {batch}"
    if r.layout.startswith("rows"):
        few = f"the first {len(calls[0])} samples" if len(calls) == 1 else f"calls of {len(calls[0])} samples"
        return f"{few} and {batch}"
    return f"{batch} in one call and in the layout {r.layout}"


def same_call(w: Writer, r: Row) -> Program:
    number, both = output(w.t, r), Call(w.arguments(w.whole))
    return Program("two calls that are the same", w.load(w.t.values) + w.results(number, both, both), w.bits(number))


def mode(w: Writer, r: Row) -> Program:
    """Returns the program of a mode: the whole batch in it and without gradients, or few samples and all, in it."""
    t, number, few = w.t, output(w.t, r), r.layout.endswith(FEW)
    name, part = r.against if few else r.layout, f"[:{r.rows}]" * few
    floats = {k for k, v in tensors(t.values).items() if v.is_floating_point() and k not in t.outputs}
    wanted = lambda text, k: f"{text}.requires_grad_().clone()" if name == WANTED and k in floats else text
    every = lambda k: wanted(f"{w.names[k]}.clone()", k)
    sliced = lambda k: f"{w.names[k]}[{':, ' * t.batch}:{r.rows}].clone()"
    some = lambda k: wanted(sliced(k), k)
    autocast = f'torch.autocast("{t.device.type}", torch.bfloat16)'
    within = autocast if name == AUTOCAST else ENTERED.get(name, "")
    switch = {"deterministic algorithms": "torch.use_deterministic_algorithms(True, warn_only=True)"}
    switch |= {f"{m}()": f"module_of({w.function}).{m}()" for m in ("train", "eval")}
    one = Call(w.arguments(every, every), f"CALL{part}.detach()", within) if few else Call(w.arguments(w.whole))
    other = Call(w.arguments(some if few else every, every), "CALL.detach()", within)
    before = switch.get(name, "")
    lines = w.load(t.values) + [before] * (few and bool(before))
    lines += w.results(number, one, other, "" if few else before)
    what = f"the first {r.rows} samples and all, both" if few else "the batch without gradients and"
    return Program(f"{what} with {name}", lines, w.bits(number))


def place(w: Writer, r: Row) -> Program:
    """Returns the program of a place in memory: the whole batch lying there, and in memory of its own."""
    t, number = w.t, output(w.t, r)

    def moved(k: str) -> str:
        if k in t.outputs:
            return w.whole(k)
        if r.layout == GIVEN:
            return f"with_strides({w.names[k]}, {tuple(t.values[k].stride())})"
        dims = sorted({t.batch, *[t.values[k].dim() - 1] * (r.layout == COLUMNS)})
        return f"in_larger({w.names[k]}, dims={dims})" if k in t.batched else f"{w.names[k]}.clone()"

    lines = w.load(t.values) + w.results(number, Call(w.arguments(w.whole)), Call(w.arguments(moved, moved)))
    return Program(f"inputs in one piece and as {r.layout}", lines, w.bits(number))
