"""Runs a kernel of a notebook's cell, interpreted and compiled, and reads its assembly by line."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import wraps

import numpy as np
import torch
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import InterpretedFunction

from bi_kernels.audit import executor
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.kernel_error import KernelError, kernel_error
from bi_kernels.audit.report import markdown
from bi_kernels.audit.static import binary
from bi_kernels.audit.static.binary import CELL, Compiled, copied
from bi_kernels.audit.static.function import without_choosers
from bi_kernels.checks import integers_of
from bi_kernels.interpreter.launch import Launch
from bi_kernels.interpreter.lockstep import one_by_one
from bi_kernels.scalars import check_type, truncated_repr
from bi_kernels.workbench.source import line_in_cell, source

OPTIONS = {f.name for f in fields(CUDAOptions)}  # num_warps and its like, which a launch takes beside the arguments


@dataclass(repr=False)
class Run:
    """What a kernel left in its tensors, and what the compiler made of it; shows itself as a table in Jupyter."""

    kernel: str
    tensors: dict[str, torch.Tensor]  # as the interpreter left them
    compiled: Compiled | None
    refusal: str = ""
    reversed: dict[str, Drift] | None = None  # by tensor, after the programs ran from last to first

    @property
    def drift(self) -> dict[str, Drift]:
        """Compares compiled with interpreted, by tensor; empty without a GPU."""
        return {k: compare(t, self.tensors[k]) for k, t in (self.compiled.tensors if self.compiled else {}).items()}

    def _repr_markdown_(self) -> str:
        facts = {"interpreted": ", ".join(f"`{k}` {tuple(t.shape)}" for k, t in self.tensors.items())}
        if self.reversed is not None:
            moved = [f"`{k}` {d}" for k, d in self.reversed.items() if d.mismatches]
            facts["its programs from last to first"] = "; ".join(moved) or "the same bits"
        if self.compiled is None:
            facts["compiled"] = self.refusal
        else:
            v = self.compiled.variant
            same = "; ".join(f"`{k}` {d}" for k, d in self.drift.items())
            facts |= {
                f"compiled for {v.level}": same or "not run: no CUDA device here",
                "registers a thread": v.registers,
                "spilled bytes a thread": v.spills,
                "shared bytes a program": v.shared,
                "atomics": "; ".join(map(str, v.findings)) or "none in PTX and SASS",
            }
        return f"`{self.kernel}`\n\n{markdown.table([{'': k, 'value': x} for k, x in facts.items()])}"

    __repr__ = _repr_markdown_


def run(kernel, grid: tuple[int, ...], *args, **options) -> Run:
    """Runs a @triton.jit kernel of a cell on copies of its arguments: interpreted and, on a CUDA device, compiled.

    Without a device it is compiled for sm_90 all the same. The interpreter runs the programs twice, in order and from
    last to first, since no GPU promises an order. options: constexprs and launch options such as num_warps. Raises
    KernelError, one sentence with the kernel's line, where the interpreter or the compiler refuses it; TypeError or
    ValueError for an argument that no launch takes, and unless the kernel was made under TRITON_INTERPRET=1.
    """
    kernel = interpreted("run", kernel)
    grid, given = arguments("run", kernel, grid, args, options)
    text, name = source(kernel), kernel.fn.__name__
    # its arguments go there before the launch here writes into them
    compiling = executor.begin(f"{binary.__name__}:compiled", name, text, grid, copied(given), interpreter=False)
    try:
        with kernel_errors():
            tensors, backwards = launched(kernel, grid, copied(given)), None
            if not any(isinstance(node, ast.While) for node in ast.walk(ast.parse(text))):  # it may wait for a program
                again = launched(kernel, grid, copied(given), in_reverse)
                backwards = {k: compare(again[k], t) for k, t in tensors.items()}
    except Exception:
        compiling.stop()
        raise
    try:
        result, refusal = compiling.result(), ""
    except executor.Died as died:
        result, refusal = None, binary._refusal("\n".join(died.said))
    if isinstance(result, KernelError):
        line = line_in_cell(kernel, text, result.kernel, result.line)
        raise KernelError(result.kernel, line, result.code, result.message) from None
    for v in [result.variant] if result else []:
        v.findings = [replace(f, line=f.line and line_in_cell(kernel, text, f.function, f.line)) for f in v.findings]
    return Run(name, tensors, result, refusal, backwards)


@contextmanager
def kernel_errors() -> Iterator[None]:
    """Raises a kernel's error as one sentence, in place of Triton's traceback."""
    try:
        yield
    except Exception as error:
        if found := kernel_error(error):
            raise found from None
        raise


def interpreted(function: str, kernel) -> InterpretedFunction:
    """Returns a kernel that the interpreter runs, without its autotuner; raises TypeError for anything else."""
    kernel = without_choosers(kernel)
    if not isinstance(kernel, InterpretedFunction):
        raise TypeError(
            f"{function}: kernel is a {type(kernel).__name__}, expected one that @triton.jit made under "
            "TRITON_INTERPRET=1"
        )
    return kernel


def arguments(function: str, kernel: InterpretedFunction, grid, args: tuple, options: dict) -> tuple[tuple, dict]:
    """Returns a launch's grid, called if it is callable, and its arguments and options by name.

    Raises TypeError or ValueError, one sentence that begins with `function`, for what no launch takes.
    """
    parameters, name = inspect.signature(kernel.fn).parameters, kernel.fn.__name__
    takes = f"{name}'s parameters, {', '.join(parameters)}"
    if len(args) > len(parameters):
        raise TypeError(f"{function}: {len(args)} arguments follow the grid, expected at most {takes}")
    given = dict(zip(parameters, args))
    for k, value in options.items():
        said = truncated_repr(value)
        if k in given:
            raise TypeError(f"{function}: {k} is given twice, expected once: {truncated_repr(given[k])} and {said}")
        if k not in parameters and k not in OPTIONS:
            raise TypeError(f"{function}: {k} is {said}, expected one of {takes}, or num_warps or its like")
    given |= options
    for k, p in parameters.items():
        if k not in given and p.default is p.empty:
            raise TypeError(f"{function}: {k} is missing, expected all of {takes}")
        if isinstance(given.get(k), (list, np.ndarray)):
            raise TypeError(f"{function}: {k} is of type {type(given[k]).__name__}, expected a tensor or a number")
    if callable(grid):
        grid = grid({k: p.default for k, p in parameters.items()} | given)
    size = integers_of(function, "grid", grid)
    if not (1 <= len(size) <= 3 and min(size) > 0):
        raise ValueError(f"{function}: grid is {truncated_repr(grid)}, expected one to three positive integers")
    return tuple(size), given


def first_launch(kernel, function: Callable, *inputs) -> tuple[tuple[int, ...], tuple, dict]:
    """Returns (grid, arguments, options) of the kernel's first launch in function(*inputs), for `step` and `run`.

    Tensors are copies made before the launch. Raises ValueError if the function never launches the kernel, KernelError
    if a kernel cannot run.
    """
    kernel = interpreted("first_launch", kernel)
    parameters, launch, found = inspect.signature(kernel.fn).parameters, kernel.run, []

    def run(*args, grid, warmup, **options):
        if not found:
            size, given = arguments("first_launch", kernel, grid, args, options)
            given = copied(given)
            found.append((size, tuple(given.pop(k, p.default) for k, p in parameters.items()), given))
        return launch(*args, grid=grid, warmup=warmup, **options)

    kernel.run = run
    try:
        with kernel_errors():
            function(*inputs)
    finally:
        del kernel.run
    if not found:
        name = getattr(function, "__name__", "function")
        raise ValueError(f"first_launch: kernel is {kernel.fn.__name__}, expected one that {name} launches")
    return found[0]


def launched(kernel: InterpretedFunction, grid, given: dict, wrap: Callable = lambda fn: fn) -> dict[str, torch.Tensor]:
    """Launches an interpreted kernel whose function `wrap` may replace; returns its tensors by parameter."""
    launch = Launch(wrap(kernel.rewrite()), kernel.arg_names, grid, kernel.pre_run_hooks)
    launch.calls = one_by_one  # in order
    launch(**given)
    return {k: t for k, t in given.items() if isinstance(t, torch.Tensor)}


def in_reverse(fn: Callable) -> Callable:
    """Makes the last program run first, and so on."""

    @wraps(fn)
    def mirrored(**values):
        builder = stock.interpreter_builder
        builder.set_grid_idx(*(n - 1 - i for n, i in zip(builder.grid_dim, builder.grid_idx)))
        fn(**values)

    return mirrored


class Assembly(dict):
    """{"PTX": instructions, "SASS": instructions} of some lines; shows itself as a table in Jupyter."""

    def _repr_markdown_(self) -> str:
        joined = {level: "<br>".join(f"`{i}`" for i in found) or "none" for level, found in self.items()}
        return markdown.table([joined])


def asm(run: Run, code: str) -> Assembly:
    """Returns the instructions of the kernel's lines that hold `code`.

    SASS does not say from where a line of Triton's library was inlined, so it is listed for each line of the kernel
    that uses it. Raises ValueError if no line holds `code`, or if the kernel was not compiled.
    """
    check_type("asm", "run", run, Run, "what wb.run returned")
    check_type("asm", "code", code, str, "a part of one of the kernel's lines")
    if run.compiled is None:
        raise ValueError(f"asm: {run.kernel} has no assembly: {run.refusal}")
    wanted = {i for i, line in enumerate(run.compiled.source, 1) if code in line}
    if not wanted:
        raise ValueError(f"asm: code is {code!r}, expected a part of a line of {run.kernel}")
    found, users, here = Assembly(PTX=[], SASS=[]), {}, False
    for text in run.compiled.ptx.splitlines():
        if text.lstrip().startswith(".loc"):
            places = re.findall(r"([\w.]+):(\d+):\d+", text)
            here = int(places[-1][1]) in wanted and places[-1][0] == CELL
            users.setdefault(places[0], set()).add(int(places[-1][1]))
        elif here and re.match(r"\s+[@a-z]", text):
            found["PTX"].append(" ".join(text.split()))
    for text in run.compiled.sass.splitlines():
        if place := re.search(r'//## File ".*?([^/"]+)", line (\d+)', text):
            here = bool(users.get(place.groups(), set()) & wanted)
        elif here and "/*0" in text:
            found["SASS"].append(" ".join(re.sub(r"/\*\w+\*/", "", text).split()))
    return found
