"""Finds which arguments a Triton kernel only reads, from its source. In doubt, an argument is written."""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import NamedTuple

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bi_kernels.audit.static.function import Function, nodes, targets

PLAIN = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.While, ast.If, ast.Expr, ast.Return, ast.Pass)
PLAIN += (ast.Break, ast.Continue, ast.Assert)
ODD = (ast.Lambda, ast.comprehension, ast.Await, ast.Yield, ast.YieldFrom)
PURE = (  # of triton.language: they write nothing
    "arange broadcast_to cast cdiv div_rn dot exp exp2 expand_dims fma full log log2 max max_contiguous maximum min "
    "minimum multiple_of program_id range sqrt sqrt_rn static_range sum trans where zeros"
)


class Flow(NamedTuple):
    """The parameters that a function may write through, and those that its result may point into."""

    written: frozenset[str]
    returned: frozenset[str]


def only_read(kernel: JITFunction | InterpretedFunction) -> frozenset[str]:
    """Returns the names of the parameters that a kernel writes nothing through."""
    return frozenset(kernel.arg_names) - _flow_of(kernel).written


def _flow_of(kernel: JITFunction | InterpretedFunction, callers: tuple[FunctionType, ...] = ()) -> Flow:
    return _flow(kernel.fn, getattr(kernel, "src", ""), callers)


@cache
def _flow(fn: FunctionType, source: str, callers: tuple[FunctionType, ...]) -> Flow:
    every = frozenset(fn.__code__.co_varnames)
    try:
        f = Pointers(fn, callers)
        known = source.strip() in textwrap.dedent("".join(f.lines))  # it may have been replaced, or the file edited
        return f.flow() if known and fn not in callers and f.simple() else Flow(every, every)
    except (OSError, SyntaxError, TypeError):
        return Flow(every, every)


def _assigned(n: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields (target, value), part by part where both are tuples."""
    values = [(n.target, n.iter)] if isinstance(n, ast.For) else [(t, n.value) for t in targets(n) if n.value]
    while values:
        target, value = values.pop()
        parts = [e.elts if isinstance(e, ast.Tuple) else [] for e in (target, value)]
        if parts[0] and len(parts[0]) == len(parts[1]) and not any(isinstance(e, ast.Starred) for e in sum(parts, [])):
            values += zip(*parts)
        else:
            yield target, value


class Pointers(Function):
    """A kernel or its helper: which names may point where its parameters do, whatever the order of its statements."""

    def __init__(self, fn: FunctionType, callers: tuple[FunctionType, ...]):
        super().__init__(fn, True)
        self.callers = *callers, fn
        self.body = [n for s in self.node.body for n in ast.walk(s)]
        self.pure = [getattr(m, name, tl.load) for m in (tl, tl.math) for name in PURE.split()]

    def simple(self) -> bool:
        """Returns whether all statements are of a kind that is followed."""
        return not any(
            isinstance(n, ODD)
            or isinstance(n, ast.stmt)
            and not isinstance(n, PLAIN)
            or isinstance(n, ast.Attribute | ast.Subscript)
            and not isinstance(n.ctx, ast.Load)
            for n in self.body
        )

    def flow(self) -> Flow:
        """Returns which parameters are written through and returned."""
        sources: dict[str, set[str]] = {}
        for n in self.body:
            if isinstance(n, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For):
                for target, value in _assigned(n):
                    for name in nodes(target, ast.Name):
                        sources.setdefault(name.id, set()).update(self.held(value))

        def behind(names: Iterable[str]) -> frozenset[str]:
            found, todo = set(), list(names)
            while todo:
                if (name := todo.pop()) not in found:
                    found.add(name)
                    todo += sources.get(name, ())
            return frozenset(found & {*self.parameters})

        written = (name for n in self.body if isinstance(n, ast.Call) for e in self.handed(n) for name in self.held(e))
        returned = (name for n in self.body if isinstance(n, ast.Return) and n.value for name in self.held(n.value))
        return Flow(behind(written), behind(returned))

    def held(self, e: ast.AST) -> set[str]:
        """Returns the names that a value may point with: not what is loaded, compared or a type."""
        match e:
            case ast.Name():
                return {e.id}
            case ast.Compare() | ast.Attribute(attr="dtype" | "shape" | "type"):
                return set()
            case ast.Call() if self.loads(e):
                return set()
            case ast.Call() if (helper := self.helper(e)) is not None:
                parts = self.given(e, helper, _flow_of(helper, self.callers).returned)
            case _:
                parts = ast.iter_child_nodes(e)
        return set().union(*map(self.held, parts))

    def handed(self, e: ast.Call) -> list[ast.AST]:
        """Lists what a call may write through."""
        rest, callee = [*e.args, *e.keywords], self.callee(e)
        if callee is tl.store:
            return rest if isinstance(rest[0], ast.Starred | ast.keyword) else rest[:1]
        if callee is tl.load or any(callee is p for p in self.pure):
            return []
        if (helper := self.helper(e)) is not None:
            return self.given(e, helper, _flow_of(helper, self.callers).written)
        return rest if self.method(e) in ("load", "to") else [e.func, *rest]

    def callee(self, e: ast.Call):
        """Returns what is called, if a global name says it; else what no comparison finds."""
        return next(iter(self.objects(e.func)), self) if self.method(e) is None else self

    def method(self, e: ast.Call) -> str | None:
        """Returns the name of a method of a value of the kernel's own; None for what a global name says."""
        root = e.func
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id not in self.values and root.id not in self.parameters:
            return None
        return getattr(e.func, "attr", "")

    def loads(self, e: ast.Call) -> bool:
        return self.callee(e) is tl.load or self.method(e) == "load"

    def helper(self, e: ast.Call) -> JITFunction | InterpretedFunction | None:
        callee = self.callee(e)
        own = isinstance(callee, JITFunction | InterpretedFunction) and not any(callee is p for p in self.pure)
        return callee if own else None

    @staticmethod
    def given(e: ast.Call, helper: JITFunction | InterpretedFunction, names: frozenset[str]) -> list[ast.AST]:
        """Lists the arguments of a helper's parameters."""
        spread = any(isinstance(a, ast.Starred) for a in e.args) or any(k.arg is None for k in e.keywords)
        kinds = {p.kind for p in inspect.signature(helper.fn).parameters.values()}
        if spread or kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            return [*e.args, *e.keywords] if names else []
        pairs = *zip(helper.arg_names, e.args), *((k.arg, k.value) for k in e.keywords)
        return [a for name, a in pairs if name in names]
