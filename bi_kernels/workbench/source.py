"""Writes a kernel or an op of a notebook's cells, with all that it names, as a file that other processes import."""

import ast
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType

import torch
import triton

from bi_kernels.audit import parameters
from bi_kernels.audit.kernel_error import line_of
from bi_kernels.audit.static.binary import CELL
from bi_kernels.audit.static.finding import KERNELS
from bi_kernels.audit.static.function import without_choosers
from bi_kernels.contract import dtype_name

PLAIN = (int, float, str, bool, tuple, type(None))


def source(subject) -> str:
    """Returns the text of a module with a kernel, function or class and, above it, all that it names.

    Names of other modules are imported. Raises ValueError for a name that is neither that nor a plain constant.
    """
    home = plain(subject).__module__
    known, seen = vars(sys.modules[home]), set()
    imports, constants, definitions = {}, [], []

    def visit(name: str, obj) -> None:
        seen.add(name)
        inner = plain(obj)
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

    visit(plain(subject).__name__, subject)
    head = sorted(imports.values(), key=lambda line: (line.startswith("from"), line))
    return "".join([*(f"{line}\n" for line in head), "\n" if constants else "", *constants, *definitions])


def _globals(text: str) -> list[str]:
    """Returns the global names that a definition uses, in order."""
    tables, found = [symtable.symtable(text, CELL, "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {s.get_name() for s in table.get_symbols() if s.is_global() or table.get_type() == "module"}
    names = dict.fromkeys(n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name))
    return [name for name in names if name in found]


def plain(obj):
    """Returns the Python function of a kernel, an autotuned one too; anything else as it is."""
    kernel = without_choosers(obj)
    return kernel.fn if isinstance(kernel, KERNELS) else kernel


def _text(obj: FunctionType | type) -> str:
    if isinstance(obj, FunctionType):
        return textwrap.dedent(inspect.getsource(obj))
    # inspect finds no class of a cell, but its methods know their file
    method = next(f for f in map(inspect.unwrap, (getattr(obj, k) for k in vars(obj))) if isinstance(f, FunctionType))
    text = linecache.getlines(method.__code__.co_filename)
    node = next(n for n in ast.walk(ast.parse("".join(text))) if isinstance(n, ast.ClassDef) and n.name == obj.__name__)
    return "".join(text[min(d.lineno for d in [node, *node.decorator_list]) - 1 : node.end_lineno])


def line_in_cell(subject, text: str, name: str, line: int) -> int:
    """Returns the line in its cell of a line of the file `text` that `source` made; 0 outside of function `name`."""
    above = text.splitlines()[:line]
    start = next((i for i in range(len(above), 0, -1) if above[i - 1].startswith(f"def {name}(")), 0)
    return line_of(plain(subject), name, line - start) if start else 0


def write_op(path: Path | str, function: Callable, about: str = "") -> Path:
    """Writes an op of the cells as a file with `about` as its docstring: what it names first, the op itself last."""
    head = f'"""{about}"""\n\n' if about else ""
    Path(path).write_text(f"{head}{source(function)}", encoding="utf-8")
    return Path(path)


def command(path: Path | str, function: Callable, *inputs, **options) -> str:
    """Returns the command that audits a written op on random inputs of these shapes and dtypes.

    options: parameters of the audit `any`, such as batch=1, shared=["w"] or seconds=60. Integers are drawn up to the
    largest of the input.
    """
    options = {k: ",".join(v) if isinstance(v, (list, tuple)) else v for k, v in options.items()}
    words = " ".join(f"{name}:{_word(value)}" for name, value in zip(inspect.signature(function).parameters, inputs))
    return parameters.command("any", {"candidate": f"{path}:{function.__name__}", "inputs": words} | options)


def _word(value) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    whole = not value.dtype.is_floating_point and value.dtype != torch.bool and value.numel()
    below = f"<{int(value.max()) + 1}" if whole else ""
    return f"{dtype_name(value.dtype)}[{','.join(map(str, value.shape))}]{below}"
