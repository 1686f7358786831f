"""Steps through one program of a kernel: every line with the tiles that it makes, and what it reads and writes.

An interpreted kernel is a Python function, so `sys.settrace` reports each of its lines. Nothing else is traced, and the
previous trace function is restored.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from bi_kernels.audit.kernel_error import kernel_error
from bi_kernels.audit.static.binary import copied
from bi_kernels.checks import integers_of
from bi_kernels.interpreter.builder import Builder
from bi_kernels.interpreter.formats import numbers
from bi_kernels.workbench.places import Place, places, where
from bi_kernels.workbench.run import arguments, interpreted, launched
from bi_kernels.workbench.steps import Access, Line, Loop, Steps
from bi_kernels.workbench.tiles import Tile

LOOPS = (ast.For, ast.While)
ACCESSES = {  # methods of the interpreter's builder: how they access memory, and their pointers, mask and value
    "create_masked_load": ("reads", lambda ptrs, mask, *_, **__: (ptrs, mask.data)),
    "create_masked_store": ("writes", lambda ptrs, value, mask, *_: (ptrs, mask.data, value)),
    "create_atomic_rmw": ("changes atomically", lambda op, ptr, value, mask, *_: (ptr, mask.data, value)),
    "create_atomic_cas": ("changes atomically", lambda ptr, cmp, value, *_: (ptr, True, value)),
    "create_descriptor_load": ("reads", lambda desc, indices, *_: _described(desc, indices)),
    "create_descriptor_store": ("writes", lambda desc, value, indices: (*_described(desc, indices), value)),
}


def step(
    kernel, grid: tuple[int, ...], *args, program: int | tuple[int, ...] = 0, rounds: Sequence[int] = (0, -1), **options
) -> Steps:
    """Runs one program of an interpreted kernel on copies of its arguments; returns its lines with their tiles.

    program: its index in the grid. rounds: the rounds of every loop to keep, the first and the last by default.
    options: constexprs and launch options. The result is HTML in Jupyter and text elsewhere; `steps["name"]` is the
    last value of a name, `steps.error` the kernel's error. Raises TypeError or ValueError for a program outside of the
    grid, for an argument that no launch takes, and unless the kernel was made under TRITON_INTERPRET=1.
    """
    kernel = interpreted("step", kernel)
    grid, given = arguments("step", kernel, grid, args, options)
    given, size = copied(given), (*grid, 1, 1)[:3]
    place = (*integers_of("step", "program", program if isinstance(program, Sequence) else (program,)), 0, 0)
    if any(place[3:]) or not all(0 <= i < n for i, n in zip(place, size)):
        raise ValueError(f"step: program is {program}, expected one of the grid {size}")
    place = place[:3]
    recorder = Recorder(kernel.fn, places(given), integers_of("step", "rounds", rounds))

    def only(fn: Callable) -> Callable:
        @wraps(fn)
        def call(**values):
            if stock.interpreter_builder.grid_idx == place:
                with recorder.accesses(), recorder.lines(fn.__code__):
                    fn(**values)

        return call

    error = None
    try:
        launched(kernel, grid, given, only)
    except Exception as raised:
        error = kernel_error(raised)
        if error is None:
            raise
    named = {k: v for k, v in given.items() if k in kernel.arg_names}
    for loop in recorder.loops:
        loop.end(bool(error))
    return Steps(kernel.fn.__name__, place, size, named, recorder.root, error)


class Recorder:
    """Records the statements of one kernel as they run."""

    def __init__(self, fn: Callable, known: list[Place], rounds: Sequence[int]):
        text, first = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(text)))
        ast.increment_lineno(tree, first - 1)
        self.code = {first + i: line.rstrip() for i, line in enumerate(text)}
        self.at: dict[int, tuple[ast.stmt, list[ast.stmt]]] = {}  # by line: the statement there, and the loops around
        self._index(next(n for n in tree.body if isinstance(n, ast.FunctionDef)).body, [])
        self.places, self.rounds = known, rounds
        self.root: list[Line | Loop] = []
        self.loops: list[Loop] = []
        self.stack: list[tuple[ast.stmt, Loop]] = []
        self.now: Line | None = None
        self.statement: ast.stmt | None = None

    def _index(self, body: list[ast.stmt], loops: list[ast.stmt]) -> None:
        for node in body:
            inner = [b for name in ("body", "orelse") for b in getattr(node, name, [])]
            end = inner[0].lineno - 1 if inner else node.end_lineno
            for line in range(node.lineno, max(end, node.lineno) + 1):
                self.at[line] = node, loops
            self._index(inner, [*loops, node] if isinstance(node, LOOPS) else loops)

    @contextmanager
    def lines(self, code) -> Iterator[None]:
        """Follows the frame that runs `code`."""

        def follow(frame, event, arg):
            if event == "line":
                self._line(frame)
            elif event == "return":
                self._finish(frame)
            elif self.now:  # an exception: the line assigns nothing
                self.now.done = True
            return follow

        before = sys.gettrace()
        sys.settrace(lambda frame, event, arg: follow if frame.f_code is code else None)
        try:
            yield
        finally:
            sys.settrace(before)

    @contextmanager
    def accesses(self) -> Iterator[None]:
        """Records what is read and written."""

        def noting(method: str, kind: str, read: Callable) -> Callable:
            def call(builder, *args, **named):
                self._access(kind, *read(*args, **named))
                return getattr(Builder, method)(builder, *args, **named)

            return call

        before = stock.interpreter_builder.__class__
        methods = {method: noting(method, *how) for method, how in ACCESSES.items()}
        stock.interpreter_builder.__class__ = type("Noting", (Builder,), methods)
        try:
            yield
        finally:
            stock.interpreter_builder.__class__ = before

    def _line(self, frame) -> None:
        node, loops = self.at.get(frame.f_lineno, (None, []))
        if node is None or node is self.statement:
            return
        self._finish(frame)
        begins = bool(loops) and self.statement is loops[-1]  # a round: the loop's header came before
        while self.stack and self.stack[-1][0] not in [*loops, node]:
            self.stack.pop()
        if begins:
            names = _names(getattr(loops[-1], "target", None))
            self.stack[-1][1].begin([self._tile(name, frame.f_locals.get(name)) for name in names])
        if isinstance(node, LOOPS):
            self.now = None
            if not self.stack or self.stack[-1][0] is not node:
                loop = Loop(node.lineno, self._text(node), self.rounds)
                self._sink().append(loop)
                self.loops.append(loop)
                self.stack.append((node, loop))
        else:
            self.now = Line(node.lineno, self._text(node))
            self._sink().append(self.now)
        self.statement = node

    def _sink(self) -> list:
        return self.stack[-1][1].body if self.stack else self.root

    def _text(self, node: ast.stmt) -> str:
        """Returns a statement's source, only the header of a compound one."""
        end = node.body[0].lineno - 1 if getattr(node, "body", None) else node.end_lineno
        lines = [self.code[i] for i in range(node.lineno, max(end, node.lineno) + 1)]
        return textwrap.dedent("\n".join(lines))

    def _finish(self, frame) -> None:
        """Takes the values that the statement gave its names."""
        if self.now and not self.now.done:
            node = self.statement
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = dict.fromkeys(name for target in targets for name in _names(target))
            self.now.tiles += [self._tile(name, frame.f_locals[name]) for name in names if name in frame.f_locals]
            self.now.done = True

    def _tile(self, name: str, value) -> Tile:
        value = getattr(value, "value", value)  # a constexpr's
        if type(value) in (bool, int, float):
            return Tile(name, values=np.array(value))
        if not isinstance(value, tl.tensor):
            return Tile(name, note=repr(value))
        data = numbers(value.handle)
        data = np.array(data if value.type.is_block() else data.reshape(-1)[0])
        if value.dtype.is_ptr():
            size = max(1, value.dtype.element_ty.primitive_bitwidth // 8)
            return Tile(name, "pointer", note=f"to {where(self.places, data.reshape(-1), size)}")
        live = None
        if self.now and not self.now.done and _is_load(getattr(self.statement, "value", None)):
            masks = [a.live for a in self.now.accesses if a.kind == "reads"]
            live = masks[0] if len(masks) == 1 and masks[0].shape == data.shape and not masks[0].all() else None
        return Tile(name, value.dtype.name, data, live)

    def _access(self, kind: str, ptrs, mask, value=None) -> None:
        if not self.now or self.now.done:
            return
        live = np.broadcast_to(np.asarray(mask, bool), ptrs.data.shape).copy()
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        tile = None
        if value is not None:
            data = np.array(np.broadcast_to(numbers(value), live.shape))
            data = data.reshape(()) if data.size == 1 else data
            tile = Tile("", value.dtype.scalar.name, data, None if live.all() else live)
        self.now.accesses.append(Access(kind, where(self.places, ptrs.data[live], size), live, tile))


def _is_load(node: ast.expr | None) -> bool:
    """Tells whether a value is a load's, possibly cast: its masked lanes hold no number of memory."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
        node = node.func.value
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "load"


def _described(desc, indices):
    ptrs, mask = desc.materialize_pointers(indices)
    return ptrs, mask.data


def _names(target: ast.expr | None) -> list[str]:
    return [n.id for n in ast.walk(target) if isinstance(n, ast.Name)] if target else []
