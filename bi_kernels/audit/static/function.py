"""Functions as syntax trees whose names are resolved to objects, and the functions that they reach."""

import ast
import contextlib
import inspect
import textwrap
from functools import lru_cache
from types import FunctionType, ModuleType

from triton.runtime.autotuner import Autotuner, Heuristics

from bi_kernels.audit.static.finding import CHOOSERS, KERNELS, RUN_TIME, UNREADABLE, Finding

WRAPPED = ("__wrapped__", "__func__", "fget", "func", "_init_fn")  # where decorators keep a function


def unwrap(obj):
    """Returns the plain function behind decorators and descriptors; a class, a module or anything else as it is."""
    for _ in range(20):
        if isinstance(obj, (type, ModuleType, str, int, float, type(None))):
            break
        names = ("fn",) if isinstance(obj, KERNELS + CHOOSERS) else WRAPPED
        name = next((n for n in names if inspect.getattr_static(obj, n, None) is not None), None)
        if name is None:
            break
        obj = getattr(obj, name)
    return obj


def without_choosers(kernel):
    """Returns the kernel that an autotuner or heuristics launch."""
    while isinstance(kernel, CHOOSERS):
        kernel = kernel.fn
    return kernel


def package_of(obj) -> str:
    return (obj.__name__ if isinstance(obj, ModuleType) else getattr(obj, "__module__", None) or "").partition(".")[0]


def nodes(tree: ast.AST, *kinds: type) -> list:
    return [n for n in ast.walk(tree) if isinstance(n, kinds)]


@lru_cache(2**16)
def names_in(tree: ast.AST, context: type = ast.Load) -> list[str]:
    return [n.id for n in nodes(tree, ast.Name) if isinstance(n.ctx, context)]


@lru_cache(2**18)
def parts_of(e: ast.AST) -> list[ast.AST]:
    """Returns the expressions and named arguments right below a node."""
    return [c for c in ast.iter_child_nodes(e) if isinstance(c, (ast.expr, ast.keyword))]


def targets(s: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) -> list[ast.expr]:
    return s.targets if isinstance(s, ast.Assign) else [s.target]


class Function:
    """A function's syntax tree; `objects` resolves its names."""

    def __init__(self, fn: FunctionType, kernel: bool):
        self.fn, self.kernel, self.parameters = fn, kernel, list(inspect.signature(fn).parameters)
        self.lines, self.first = inspect.getsourcelines(fn)
        try:
            tree = ast.parse(textwrap.dedent("".join(self.lines)))
        except SyntaxError:  # a lambda inside an expression: take the lambdas of its line from the whole file
            self.lines, self.first = inspect.findsource(fn)[0], 1
            every = nodes(ast.parse("".join(self.lines)), ast.Lambda)
            tree = ast.Tuple([n for n in every if n.lineno == fn.__code__.co_firstlineno], ast.Load())
            if fn.__name__ != "<lambda>" or not tree.elts:
                raise
        self.node = next((n for n in nodes(tree, ast.FunctionDef) if n.name == fn.__name__), tree)
        self.outer = dict(fn.__globals__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            with contextlib.suppress(ValueError):  # not assigned yet
                self.outer[name] = cell.cell_contents
        self.values = {name: [] for name in names_in(self.node, ast.Store)}  # what is assigned to each local name
        for n in nodes(self.node, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr):
            for target in targets(n):
                for name in names_in(target, ast.Store):
                    self.values[name].append(n.value)
        self.returns = len(nodes(self.node, ast.Return))
        self.resolved: dict[ast.AST, list] = {}

    def objects(self, e: ast.AST | None) -> list:
        """Returns the objects that an expression made of names and attributes may stand for."""
        if e not in self.resolved:
            self.resolved[e] = self._objects(e, 8)
        return self.resolved[e]

    def _objects(self, e: ast.AST | None, depth: int) -> list:
        among = lambda *parts: [o for part in parts for o in self._objects(part, depth - 1)] if depth else []
        match e:
            case ast.IfExp():
                return among(e.body, e.orelse)
            case ast.Attribute():
                owners = [o for o in among(e.value) if isinstance(o, (ModuleType, type))]
                with contextlib.suppress(Exception):  # a module may load what it is asked for
                    return [getattr(o, e.attr) for o in owners]
            case ast.Name() if e.id in self.values or e.id in self.parameters:
                return among(*self.values.get(e.id, ()))
            case ast.Name() if depth and e.id in self.outer:
                return [self.outer[e.id]]
        return []

    def called(self, e: ast.expr) -> str:
        """Returns the name under which a callee was defined, or else the name by which it is called."""
        known = [getattr(unwrap(o), "__name__", "") for o in self.objects(e)[:1]]
        return known[0] if known else getattr(e, "attr", getattr(e, "id", ""))

    def finding(self, kind: str, node: ast.AST, op: str = "") -> Finding:
        code = self.lines[node.lineno - 1].strip()
        return Finding(kind, self.fn.__qualname__, self.first + node.lineno - 1, code, "AST", op)


def run_time(chooser: Autotuner | Heuristics, level: str) -> Finding:
    fn = unwrap(chooser)
    return Finding(RUN_TIME, fn.__qualname__, fn.__code__.co_firstlineno, type(chooser).__name__, level)


def reachable(subjects: tuple) -> tuple[list[Function], list[Finding]]:
    """Returns the subjects and what they name: functions of their own packages, and kernels of any."""
    packages = {package_of(unwrap(s)) for s in subjects} - {"torch", "triton"}
    found, findings, queue, held = {}, [], list(subjects), []
    while queue:
        obj = queue.pop()
        inner = unwrap(obj)
        if isinstance(obj, CHOOSERS):
            findings.append(run_time(obj, "AST"))
        if not isinstance(inner, (FunctionType, ModuleType, type)) or inner in found:
            continue
        if not isinstance(inner, FunctionType) and package_of(type(inner)) in packages and inner not in held:
            held.append(inner)  # an object of the package, as an op is: what it holds
            queue += vars(inner).values() if hasattr(inner, "__dict__") else ()
        kernel = isinstance(obj, KERNELS + CHOOSERS)
        ours = not isinstance(inner, ModuleType) and package_of(inner) in packages
        if not (ours or inner in subjects or obj in subjects or kernel and package_of(inner) != "triton"):
            continue
        found[inner] = None
        if not isinstance(inner, FunctionType):
            home = inner.__name__ if isinstance(inner, ModuleType) else inner.__module__
            queue += [v for v in vars(inner).values() if getattr(unwrap(v), "__module__", None) == home]
            continue
        try:
            f = found[inner] = Function(inner, kernel)
            queue += [o for n in ast.walk(f.node) for o in f.objects(n) if not isinstance(o, ModuleType)]
        except (OSError, SyntaxError):
            if not (inner.__name__.startswith("__") and inner.__code__.co_filename == "<string>"):  # a dataclass's
                findings.append(Finding(UNREADABLE, inner.__qualname__, 0, "", "AST"))
    return [f for f in found.values() if f], findings
