"""Writes the script that reproduces one cause alone: its ops, on their inputs in both layouts."""

import contextlib
import io
import re
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import torch

from bi_kernels import checks
from bi_kernels.audit.localiser.cause import Cause
from bi_kernels.audit.localiser.tracing.tape import Descriptor, Op, Program, View
from bi_kernels.audit.report import escape
from bi_kernels.audit.reproduce.imports import beside, reach
from bi_kernels.audit.reproduce.script import OWN, render

TAKEN = re.compile(r"[ab]\d*|t|_|" + "|".join(OWN))  # a script's own names
PLAIN = bool, int, str, type(None)


class _Source:
    """Python of one program after the other; values that it cannot spell are kept in `held`, which it calls t."""

    def __init__(self, kernels: dict[tuple[str, str], str]):
        self.held, self.kernels = [], kernels

    def _hold(self, value) -> str:
        self.held.append(value)
        return f"t[{len(self.held) - 1}]"

    def of(self, program: Program, variable: str, cast: str) -> list[str]:
        """Returns the lines that run a program and name its result."""
        self.program, self.letter, self.count = program, {"whole": "a", "other": "b"}[variable], 0
        self.names: dict[View, str] = {}
        self.pieces: dict[int, tuple[str, View]] = {}  # the first tensor that there is of a piece of memory
        lines = [self._call(op) for op in program.ops]
        return [*lines, f"{variable} = {self._rows(self._tensor(program.result))}{cast}"]

    def _tensor(self, v: View) -> str:
        if v not in self.names and v.memory not in self.pieces:
            memory = self.program.memory[v.memory]
            t = torch.empty(0, dtype=v.dtype, device=memory.device)
            self._known(v, self._hold(t.set_(memory.untyped_storage(), v.offset, v.size, v.stride)))
        if v in self.names:
            return self.names[v]
        name, first = self.pieces[v.memory]
        if v.dtype == first.dtype:
            return f"{name}.as_strided({v.size}, {v.stride}, {v.offset})"
        seen = f"{v.offset}, {v.size}, {v.stride}"
        return f"{name}.new_empty(0, dtype={v.dtype}).set_({name}.untyped_storage(), {seen})"

    def _known(self, v: View, name: str) -> None:
        self.names[v] = name
        self.pieces.setdefault(v.memory, (name, v))

    def _made(self, v: View | None) -> str:
        if v is None:
            return "_"
        self.count += 1
        self._known(v, f"{self.letter}{self.count}")
        return self.names[v]

    def _text(self, value) -> str:
        match value:
            case View():
                return self._tensor(value)
            case Descriptor():
                return f"replace({self._hold(value.rest)}, base={self._tensor(value.of)})"
            case torch.dtype() | torch.memory_format() | torch.layout():
                return str(value)
            case torch.device():
                return f"torch.device({str(value)!r})"
            case list():
                return f"[{', '.join(map(self._text, value))}]"
            case tuple():
                return f"({''.join(f'{self._text(v)}, ' for v in value).rstrip()})"
        if type(value) is float:
            return repr(value) if isfinite(value) else f"float({str(value)!r})"
        return repr(value) if type(value) in PLAIN else self._hold(value)

    def _call(self, op: Op) -> str:
        called = f"torch.ops.{op.name}" if op.grid is None else f"{self.kernels[op.module, op.name]}[{op.grid}]"
        given = [*map(self._text, op.args), *(f"{k}={self._text(v)}" for k, v in op.kwargs.items())]
        several = isinstance(op.results, list)
        results = op.results if several else [op.results]
        made = ", ".join(map(self._made, results)) if any(results) else ""
        return f"{f'[{made}]' if made and several else made}{' = ' * bool(made)}{called}({', '.join(given)})"

    def _rows(self, y: str) -> str:
        """Returns the rows of a tensor that ought not to depend on the batch, (rows, features)."""
        p = self.program
        if p.rows is None:
            return y
        dims, rows, first = p.reading.dims, p.rows.tolist(), p.rows[0].item()
        size = len(p.result.size) + 1 - len(dims)
        if p.reading.split > 1:
            y, size = f"{y}.unflatten({dims[0]}, (-1, {p.reading.split}))", size + 1
        if dims != tuple(range(len(dims))):
            y = f"{y}.movedim({dims}, {tuple(range(len(dims)))})"
        y = f"{y}.flatten(0, {len(dims) - 1})" if len(dims) > 1 else y if dims else f"{y}[None]"
        run = rows == [*range(first, first + len(rows))]
        y += f"[{first}:{first + len(rows)}]" if run else f"[{self._hold(p.rows)}]"
        if p.keys is not None:
            seen = p.seen.to(p.result.dtype).unflatten(0, (-1, *[1] * (size - 2)))
            y = f"({y}[..., {self._hold(p.keys)}] * {self._hold(seen)}.to({y}.device))"
        return f"{y}.reshape({len(rows)}, -1)"


def _named(programs: Sequence[Program]) -> dict[tuple[str, str], str]:
    """Returns each kernel's name in a script, by module and name: its own, unless the script has that already."""
    found: dict[tuple[str, str], str] = {}
    for key in sorted({(op.module, op.name) for p in programs for op in p.ops if op.grid is not None}):
        own = key[1]
        found[key] = f"{own}_kernel_{len(found)}" if TAKEN.fullmatch(own) or own in found.values() else own
    return found


def _imports(programs: Sequence[Program], kernels: dict[tuple[str, str], str], folder: Path) -> list[str]:
    """Returns the lines that define the kernels and custom ops of programs, in a script in `folder`."""
    lines = []
    for name, file in {k: v for p in programs for k, v in p.modules.items()}.items():
        if name == "__main__" or name.startswith("candidate_"):
            lines.append(f"spec = importlib.util.spec_from_file_location({name!r}, {beside(file, folder)})")
            lines.append(f"sys.modules[{name!r}] = importlib.util.module_from_spec(spec)")
            lines.append(f"spec.loader.exec_module(sys.modules[{name!r}])")
        else:
            lines += reach(name, folder).split("\n\n")
        mine = [own if own == said else f"{own} as {said}" for (module, own), said in kernels.items() if module == name]
        lines.append(f"from {name} import {', '.join(mine)}" if mine else f"import {name}  # defines the op")
    return [line.rstrip() for line in lines if line]


def write(cause: Cause, programs: Sequence[Program], folder: Path, number: int) -> None:
    """Writes the script and what it loads, and names it in the cause if it shows the drift here."""
    if any(p.result is None for p in programs) or not any(p.ops for p in programs):
        return
    folder.mkdir(parents=True, exist_ok=True)
    words = re.sub(r"\W+", "-", f"{cause.path}-{cause.parameter.rpartition('.')[2]}-{cause.op}").strip("-")
    path = folder / f"{number:02}-{words[:60]}.py"
    kernels, ops = _named(programs), [op for p in programs for op in p.ops]
    if not all(own.isidentifier() for _, own in kernels):  # a closure's, which cannot be imported
        return
    source, cast = _Source(kernels), ".double()" * (programs[0].result.dtype != programs[1].result.dtype)
    setup = [f"t = torch.load(Path(__file__).with_name({path.with_suffix('.pt').name!r}), weights_only=False)"]
    setup += ["torch.manual_seed(0)"] * any(op.random for op in ops)
    results = [
        [f"# {escape.line(layout)}", *source.of(program, variable, cast)]
        for layout, program, variable in zip(cause.layouts, programs, ("whole", "other"))
    ]
    interpreted = checks.INTERPRETED and any(op.grid is not None for op in ops)
    title = f"{cause.op} in {cause.path or 'the model'}, {cause.direction}: {' and '.join(cause.layouts)} differ."
    said, needs = "The op alone, on what it was given in both layouts.", "bi_kernels" if interpreted else "torch"
    text = render(title, said, needs, [_imports(programs, kernels, folder), setup, *results], interpreted)
    torch.save(source.held, path.with_suffix(".pt"))
    path.write_text(text, encoding="utf-8")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, str(path), "exec"), {"__file__": str(path), "__name__": "reproducer"})
    except SystemExit as end:
        cause.script = path if end.code else None
    except Exception:  # the report is worth more than its script
        cause.script = None
