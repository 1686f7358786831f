"""Writes the script that reproduces one cause alone: its ops, recorded as they run, on their inputs in both layouts."""

import contextlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bi_kernels import checks
from bi_kernels.audit.localiser.compare import Cause
from bi_kernels.audit.localiser.tracing.events import At, tensors_in
from bi_kernels.audit.localiser.tracing.geometry import Reading
from bi_kernels.audit.report import escape
from bi_kernels.audit.reproduce.imports import beside, reach
from bi_kernels.audit.reproduce.script import OWN, render

TAKEN = re.compile(r"[ab]\d*|t|_|" + "|".join(OWN))  # a script's own names
PLAIN = bool, int, str, type(None)


class View(NamedTuple):
    """A tensor, as a view of a piece of memory."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class ScriptContext:
    """What both programs of a script share. held: the values that it loads as t; kernels: each one's name in it, by
    module and name; modules: the file of each that defines a kernel or custom op."""

    held: list = field(default_factory=list)
    kernels: dict[tuple[str, str], str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    random: bool = False

    def hold(self, value) -> str:
        self.held.append(value)
        return f"t[{len(self.held) - 1}]"

    def kernel(self, fn: Callable) -> str:
        key = fn.__module__, fn.__qualname__
        taken = TAKEN.fullmatch(key[1]) or key[1] in self.kernels.values()
        self.modules[key[0]] = inspect.getsourcefile(fn) or ""
        return self.kernels.setdefault(key, f"{key[1]}_kernel_{len(self.kernels)}" if taken else key[1])

    def imports(self, folder: Path) -> list[str]:
        """Returns the lines that define the kernels and custom ops, in a script in `folder`."""
        lines = []
        for name, file in self.modules.items():
            if name == "__main__" or name.startswith("candidate_"):
                lines.append(f"spec = importlib.util.spec_from_file_location({name!r}, {beside(file, folder)})")
                lines.append(f"sys.modules[{name!r}] = importlib.util.module_from_spec(spec)")
                lines.append(f"spec.loader.exec_module(sys.modules[{name!r}])")
            else:
                lines += reach(name, folder).split("\n\n")
            own = {k: said for (module, k), said in self.kernels.items() if module == name}
            mine = [k if k == said else f"{k} as {said}" for k, said in own.items()]
            lines.append(f"from {name} import {', '.join(mine)}" if mine else f"import {name}  # defines the op")
        return [line.rstrip() for line in lines if line]


class Program:
    """Python of some ops of one run. result: the tensor that is compared; rows: those of it that are, None for all;
    keys: of scores, those that both runs have, and seen: by which rows."""

    def __init__(self, events: Iterable[At], script: ScriptContext, letter: str):
        self.events, self.script, self.letter = set(events), script, letter
        self.lines: list[str] = []
        self.count = 0
        self.result: View | None = None
        self.rows: torch.Tensor | None = None
        self.reading = Reading("n", ())
        self.keys: torch.Tensor | None = None
        self.seen: torch.Tensor | None = None
        self._names: dict[View, str] = {}
        self._pieces: list[tuple[str, View]] = []  # the first tensor that there was of each piece of memory
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}

    def _view(self, t: torch.Tensor, made: bool = False) -> View:
        """Returns which tensor it is; what no op of the program made is kept as it is now."""
        storage = t.untyped_storage()
        known = self._memory.get(storage._cdata)
        new = known is None or known[0].expired()
        if new:
            known = self._memory[storage._cdata] = StorageWeakRef(storage), len(self._pieces)
        view = View(known[1], t.dtype, tuple(t.shape), t.stride(), t.storage_offset())
        if made:
            self.count += 1
            self._names[view] = f"{self.letter}{self.count}"
        elif new:
            held = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage).clone().untyped_storage()
            t = torch.empty(0, dtype=t.dtype, device=t.device).set_(held, view.offset, view.size, view.stride)
            self._names[view] = self.script.hold(t)
        if new:
            self._pieces.append((self._names[view], view))
        return view

    def ends_in(self, t: torch.Tensor) -> None:
        """Names the tensor that the program's results are compared by."""
        self.result = self._view(t)

    def _tensor(self, v: View) -> str:
        if v in self._names:
            return self._names[v]
        name, first = self._pieces[v.memory]
        if v.dtype == first.dtype:
            return f"{name}.as_strided({v.size}, {v.stride}, {v.offset})"
        seen = f"{v.offset}, {v.size}, {v.stride}"
        return f"{name}.new_empty(0, dtype={v.dtype}).set_({name}.untyped_storage(), {seen})"

    def _text(self, value) -> str:
        """Returns Python for an argument; what it cannot spell is kept."""
        if isinstance(value, torch.Tensor):
            return self._tensor(self._view(value))
        if hasattr(value, "block_shape"):  # a TMA descriptor, of Triton or of Gluon
            rest, base = copy(value), self._text(value.base)
            rest.base = None
            return f"replace({self.script.hold(rest)}, base={base})"
        match value:
            case torch.dtype() | torch.memory_format() | torch.layout():
                return str(value)
            case torch.device():
                return f"torch.device({str(value)!r})"
            case tuple():
                return f"({''.join(f'{self._text(v)}, ' for v in value).rstrip()})"
            case list():
                return f"[{', '.join(map(self._text, value))}]"
        if type(value) is float:
            return repr(value) if isfinite(value) else f"float({str(value)!r})"
        return repr(value) if type(value) in PLAIN else self.script.hold(value)

    def record(self, target, args: tuple, kwargs: dict) -> Callable[[object], None]:
        """Writes the call of an op or kernel; returns what adds it, given its results."""
        given = [*tensors_in(args), *tensors_in(kwargs)]
        if isinstance(target, JITFunction | InterpretedFunction):
            grid = kwargs["grid"]
            if callable(grid):
                grid = grid({**dict(zip(inspect.signature(target.fn).parameters, args)), **kwargs})
            kwargs = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
            called = f"{self.script.kernel(target.fn)}[{tuple(grid)}]"
        else:
            called = "torch.ops." + ".".join((*target._schema.name.split("::"), target._overloadname))
            self.script.random |= torch.Tag.nondeterministic_seeded in target.tags
            if defined := torch._library.custom_ops.OPDEFS.get(target._schema.name):
                module = defined._init_fn.__module__
                self.script.modules[module] = getattr(sys.modules.get(module), "__file__", "") or ""
        call = f"{called}({', '.join([*map(self._text, args), *(f'{k}={self._text(v)}' for k, v in kwargs.items())])})"

        def name(t: object) -> str:
            new = isinstance(t, torch.Tensor) and all(t is not g for g in given)
            return self._names[self._view(t, made=True)] if new else "_"

        def add(out: object) -> None:
            several = isinstance(out, list | tuple)
            names = [*map(name, out if several else [out])]
            made = ", ".join(names) if {*names} - {"_"} else ""
            self.lines.append(f"{f'[{made}]' if made and several else made}{' = ' * bool(made)}{call}")

        return add

    def compared(self) -> str:
        """Returns Python for the rows of the result that ought not to depend on the batch, (rows, features)."""
        y = self._tensor(self.result)
        if self.rows is None:
            return y
        dims, rows, first = self.reading.dims, self.rows.tolist(), self.rows[0].item()
        size = len(self.result.size) + 1 - len(dims)
        if self.reading.split > 1:
            y, size = f"{y}.unflatten({dims[0]}, (-1, {self.reading.split}))", size + 1
        if dims != tuple(range(len(dims))):
            y = f"{y}.movedim({dims}, {tuple(range(len(dims)))})"
        y = f"{y}.flatten(0, {len(dims) - 1})" if len(dims) > 1 else y if dims else f"{y}[None]"
        run = rows == [*range(first, first + len(rows))]
        y += f"[{first}:{first + len(rows)}]" if run else f"[{self.script.hold(self.rows)}]"
        if self.keys is not None:
            seen = self.seen.to(self.result.dtype).unflatten(0, (-1, *[1] * (size - 2)))
            y = f"({y}[..., {self.script.hold(self.keys)}] * {self.script.hold(seen)}.to({y}.device))"
        return f"{y}.reshape({len(rows)}, -1)"


def write(cause: Cause, script: ScriptContext, programs: Sequence[Program], folder: Path, number: int) -> None:
    """Writes the script and what it loads, and names it in the cause if it shows the drift here."""
    if any(p.result is None for p in programs) or not any(p.lines for p in programs):
        return
    if not all(own.isidentifier() for _, own in script.kernels):  # a closure's, which cannot be imported
        return
    folder.mkdir(parents=True, exist_ok=True)
    words = re.sub(r"\W+", "-", f"{cause.path}-{cause.parameter.rpartition('.')[2]}-{cause.op}").strip("-")
    path = folder / f"{number:02}-{words[:60]}.py"
    cast = ".double()" * (programs[0].result.dtype != programs[1].result.dtype)
    setup = [f"t = torch.load(Path(__file__).with_name({path.with_suffix('.pt').name!r}), weights_only=False)"]
    setup += ["torch.manual_seed(0)"] * script.random
    results = [
        [f"# {escape.line(layout)}", *program.lines, f"{variable} = {program.compared()}{cast}"]
        for layout, program, variable in zip(cause.layouts, programs, ("whole", "other"))
    ]
    interpreted = checks.INTERPRETED and bool(script.kernels)
    title = f"{cause.op} in {cause.path or 'the model'}, {cause.direction}: {' and '.join(cause.layouts)} differ."
    said, needs = "The op alone, on what it was given in both layouts.", "bi_kernels" if interpreted else "torch"
    text = render(title, said, needs, [script.imports(folder), setup, *results], interpreted)
    torch.save(script.held, path.with_suffix(".pt"))
    path.write_text(text, encoding="utf-8")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, str(path), "exec"), {"__file__": str(path), "__name__": "reproducer"})
    except SystemExit as end:
        cause.script = path if end.code else None
    except Exception:  # the report is worth more than its script
        cause.script = None
