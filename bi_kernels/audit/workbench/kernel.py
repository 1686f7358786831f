"""Runs a kernel of a notebook's cell, interpreted and compiled, reads its assembly by line, audits it, writes it out.

The cells run on Triton's interpreter, where a debugger can stop in a kernel. No other process can import a cell; so
what a kernel or an op of the cells is made of is collected into a module, and that is compiled, audited and written.
"""

import ast
import importlib
import inspect
import linecache
import re
import symtable
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from bi_kernels.audit import worker
from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.problem.candidates import resolve
from bi_kernels.audit.problem.problem import Problem
from bi_kernels.audit.problem.registry import OPS
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.relations import gradient as gradients
from bi_kernels.audit.relations.forward import judge
from bi_kernels.audit.static import binary
from bi_kernels.audit.static.finding import KERNELS
from bi_kernels.audit.static.launches import Launches, Variant, recorded
from bi_kernels.audit.static.source import source as findings
from bi_kernels.audit.static.verdict import atomics_free
from bi_kernels.contract import DTYPES

CELL = "cell.py"  # the name under which assembly knows the kernel's file
PLAIN = (int, float, str, bool, tuple, type(None))


@dataclass
class Compiled:
    """Holds what the compiler made of a kernel: registers, spills, shared memory, and its assembly."""

    variant: Variant
    ptx: str
    sass: str
    source: list[str]  # of the file in which the kernel stands
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # after the launch, where there was a GPU


@dataclass(repr=False)
class Run:
    kernel: str
    tensors: dict[str, torch.Tensor]  # as the interpreter left them
    compiled: Compiled | None
    refusal: str = ""

    @property
    def drift(self) -> dict[str, Drift]:
        """Compares compiled with interpreted, by tensor; empty without a GPU."""
        return {k: compare(t, self.tensors[k]) for k, t in (self.compiled.tensors if self.compiled else {}).items()}

    def _repr_markdown_(self) -> str:
        said = {"interpreted": ", ".join(f"`{k}` {tuple(t.shape)}" for k, t in self.tensors.items())}
        if self.compiled is None:
            said["compiled"] = self.refusal
        else:
            v = self.compiled.variant
            same = "; ".join(f"`{k}` {d}" for k, d in self.drift.items())
            said |= {
                f"compiled for {v.level}": same or "not run: no CUDA device here",
                "registers a thread": v.registers,
                "spilled bytes a thread": v.spills,
                "shared bytes a program": v.shared,
                "atomics": "; ".join(map(str, v.findings)) or "none in PTX and SASS",
            }
        return "\n".join([f"`{self.kernel}`\n\n| | |\n|:--|:--|", *(f"| {k} | {x} |" for k, x in said.items())])

    __repr__ = _repr_markdown_


def run(kernel, grid: tuple[int, ...], *args, **options) -> Run:
    """Runs a @triton.jit kernel of a cell on copies of its arguments: interpreted and, on a CUDA device, compiled.

    Without a device it is compiled for sm_90 all the same. options: what follows the positional arguments, constexprs,
    num_warps and their like. Raises TypeError unless the kernel was made under TRITON_INTERPRET=1.
    """
    if not isinstance(kernel, InterpretedFunction):
        raise TypeError(
            f"run: kernel is a {type(kernel).__name__}, expected one that @triton.jit made under TRITON_INTERPRET=1"
        )
    given = dict(zip(inspect.signature(kernel.fn).parameters, args)) | options
    host = {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    name = kernel.fn.__name__
    # its arguments go there before the launch here writes into them
    compiling = worker.Worker(f"{__name__}:compiled", name, source(kernel), grid, host, interpreter=False)
    kernel[grid](**host)
    tensors = {k: t for k, t in host.items() if isinstance(t, torch.Tensor)}
    try:
        return Run(name, tensors, compiling.result())
    except worker.Died as died:
        return Run(name, tensors, None, binary._refusal("\n".join(died.said)))


def compiled(name: str, text: str, grid: tuple[int, ...], given: dict) -> Compiled:
    """Compiles the kernel `name` of a file that holds `text`, in a process without the interpreter.

    Runs it on `given`, where there is a CUDA device.
    """
    gpu = torch.cuda.is_available()
    if not gpu:
        binary.without_gpu()
    tensors = {k: v.cuda() for k, v in given.items() if gpu and isinstance(v, torch.Tensor)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CELL).write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        kernel = getattr(importlib.import_module(CELL.removesuffix(".py")), name)
        made = kernel.run(grid=grid, warmup=not gpu, **given | tensors)
        sass = binary._told("nvdisasm", made.asm["cubin"], "-g", "-c")
        kept = {k: t.cpu() for k, t in tensors.items()}
        return Compiled(binary.read([made])[0], made.asm["ptx"], sass, text.splitlines(), kept)


def lines(run: Run, code: str) -> dict[str, list[str]]:
    """Returns {"PTX": …, "SASS": …}: the instructions that the compiler made of the kernel's lines that hold `code`.

    SASS names a line of Triton's own library without saying from where it was inlined: it is listed for each line of
    the kernel that uses it. Raises ValueError if no line holds `code`.
    """
    wanted = {i for i, line in enumerate(run.compiled.source, 1) if code in line}
    if not wanted:
        raise ValueError(f"lines: code is {code!r}, expected a part of a line of {run.kernel}")
    found, users, here = {"PTX": [], "SASS": []}, {}, False
    for text in run.compiled.ptx.splitlines():
        if text.lstrip().startswith(".loc"):
            places = re.findall(r"([\w.]+):(\d+):\d+", text)
            here = int(places[-1][1]) in wanted and places[-1][0] == CELL
            users.setdefault(places[0], set()).add(int(places[-1][1]))
        elif here and re.match(r"\s+[@a-z]", text):
            found["PTX"].append(" ".join(text.split()))
    for text in run.compiled.sass.splitlines():
        place = re.search(r'//## File ".*?([^/"]+)", line (\d+)', text)
        if place:
            here = bool(users.get(place.groups(), set()) & wanted)
        elif here and "/*0" in text:
            found["SASS"].append(" ".join(re.sub(r"/\*\w+\*/", "", text).split()))
    return found


def source(subject) -> str:
    """Returns a module that holds a kernel, function or class and all that it names, what is named first on top.

    What stands in another module is imported from there. Raises ValueError for a name that stands for neither that nor
    a plain constant.
    """
    home = _plain(subject).__module__
    known, seen = vars(sys.modules[home]), set()
    imports, constants, definitions = {}, [], []

    def visit(name: str, obj) -> None:
        seen.add(name)
        inner = _plain(obj)
        own = getattr(inner, "__name__", "")
        renamed = f" as {name}" if name != own else ""
        if isinstance(obj, ModuleType):
            imports[name] = f"import {own}{renamed}"
        elif isinstance(inner, (FunctionType, type)) and inner.__module__ == home:
            text = _text(inner)
            for used in _globals(text):
                if used in known and used not in seen:
                    visit(used, known[used])
            definitions.append(f"\n\n{text}")
        elif isinstance(obj, triton.language.constexpr):
            imports["tl"] = "import triton.language as tl"
            constants.append(f"{name} = tl.constexpr({obj.value!r})\n")
        elif isinstance(obj, PLAIN):
            constants.append(f"{name} = {obj!r}\n")
        elif getattr(sys.modules.get(getattr(inner, "__module__", None)), own, None) is not None:
            imports[name] = f"from {inner.__module__} import {own}{renamed}"
        else:
            raise ValueError(
                f"source: {name} is a {type(obj).__name__}, expected a function, a class, a module or a constant"
            )

    visit(_plain(subject).__name__, subject)
    head = sorted(imports.values(), key=lambda line: (line.startswith("from"), line))
    return "".join([*(f"{line}\n" for line in head), "\n" if constants else "", *constants, *definitions])


def _globals(text: str) -> list[str]:
    """Returns the names that a definition looks up outside of itself, in the order in which it does."""
    tables, found = [symtable.symtable(text, CELL, "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {s.get_name() for s in table.get_symbols() if s.is_global() or table.get_type() == "module"}
    names = dict.fromkeys(n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name))
    return [name for name in names if name in found]


def _plain(obj):
    return obj.fn if isinstance(obj, KERNELS) else obj


def _text(obj: FunctionType | type) -> str:
    if isinstance(obj, FunctionType):
        return textwrap.dedent(inspect.getsource(obj))
    # inspect finds no class of a cell, but its methods know their file
    method = next(f for f in map(inspect.unwrap, (getattr(obj, k) for k in vars(obj))) if isinstance(f, FunctionType))
    text = linecache.getlines(method.__code__.co_filename)
    node = next(n for n in ast.walk(ast.parse("".join(text))) if isinstance(n, ast.ClassDef) and n.name == obj.__name__)
    return "".join(text[min(d.lineno for d in [node, *node.decorator_list]) - 1 : node.end_lineno])


def write_op(path: Path | str, function: Callable, about: str = "") -> Path:
    """Writes an op of the cells as a file of its own, `about` its docstring.

    Kernels, launchers, autograd.Function, and the public function last, in the order in which they need each other.
    """
    path = Path(path)
    head = f'"""{about}"""\n\n' if about else ""
    path.write_text(f"{head}{source(function)}", encoding="utf-8")
    return path


def audit(function: Callable, op: str, dtype: str = "bf16", seed: int = 0, forward: bool = True) -> list:
    """Judges an op of the cells, as the file that `write_op` makes of it, on the interpreter at the smallest shapes.

    By every relation of the registered op that it stands for, or those of its backward alone; the static audit sees
    what one step launches. The rows are those of verdicts.json.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = write_op(Path(folder, f"{function.__name__}.py"), function)
        loaded = resolve(f"{path}:{function.__name__}", OPS[op].audit, op).functions[op]
        problem = Problem(OPS[op], "", DTYPES[dtype], "tiny", torch.device("cpu"), seed)
        command = f"bi-audit run {OPS[op].audit} --candidate {path.name}:{function.__name__} -p op {op}"
        subject = Subject(problem, loaded, function.__name__, "interpreter", command)
        rows = (judge(subject) if forward else []) + gradients.judge_gradients(subject)
        with recorded() as launches:
            rows += gradients.judge_gradient_accuracy(subject)
        if findings(loaded):  # what the source shows needs no binary
            launches = Launches()
        return rows + atomics_free([(subject, launches)])[0]
