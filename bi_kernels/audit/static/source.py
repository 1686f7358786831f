"""The AST half of the static audit: what the source of kernels, and of the Python around them, shows.

Names are looked up as objects, so an alias of `tl.atomic_add` hides nothing, and what a launch passes is followed into the
kernel through assignments, calls and fields. A reduction is a loop that hands on a value made of loaded data. It is found
where its range depends on `num_programs`, on the number of multiprocessors, or on a number that the rows chose: one compared
with them, looked up or divided by them, or a share of them times a program id. The rows themselves may end a range, and the
tile of a pure `acc = tl.dot(a, b, acc)` chain may be chosen freely: on sm_90 it changes no bit. Every size of a tensor that
is not known to be a later one counts as rows.

Not decided, and left to the invariance audit: a sum that Python cuts by slicing or by choosing between two launches;
bounds and accumulators in memory; num_warps or the block of a `tl.sum` chosen by rows; torch's own matmul and sum. Not
followed: what passes through a function given as an argument.
"""

import ast
import contextlib
import copy
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType

import triton
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

ATOMIC, SCATTER, RUN_TIME, UNREADABLE = "atomic", "unordered scatter", "run-time choice", "source not readable"
GRID_STRIDE, BY_DEVICE, BY_ROWS = REDUCTIONS = (
    "grid-stride reduction",
    "reduction cut by multiprocessors",
    "reduction cut by rows",
)

# An instruction follows a line's start, a brace, a semicolon or a guard: bar.red and redux.sync are none of these.
PTX = re.compile(
    r"(?:^|[;{}])\s*(?:@!?%?\w+\s+)?((?:atom|red|multimem\.red|multimem\.ld_reduce|cp\.reduce)\."
    r"[a-z][^;\n]*)",
    re.MULTILINE,
)
SCATTERS = re.compile(r"(index_add|index_reduce|scatter_add|scatter_reduce)_?")
ACCUMULATING, ACCUMULATES = ("index_put", "put", "bincount", "scatter"), ("accumulate", "weights", "reduce")
DEVICE = re.compile(r"multi_?processor_?count|num_sms?|sm_count", re.IGNORECASE)
KERNELS, CHOOSERS = (JITFunction, InterpretedFunction), (Autotuner, Heuristics)
WRAPPED = ("__wrapped__", "__func__", "fget", "func", "_init_fn")  # where decorators keep a function
# What a value may depend on: the program's place, the grid, the device, the row count, a part of it, a choice by it;
# or loaded data.
PID, PROGRAMS, DEVICES, ROWS, SHARE, CHOSEN, DATA = "pid", "programs", "devices", "rows", "share", "chosen", "data"
COUNTS = ("min", "max", "int", "ceil", "floor", "tuple", "list", "range", "enumerate", "zip")  # of rows give rows


@dataclass(frozen=True)
class Finding:
    kind: str
    function: str
    line: int  # in the function's source file; 0 where the level does not know
    code: str
    level: str  # AST, PTX or SASS; torch: seen when dispatched; launch: when launched

    def __str__(self) -> str:
        return f"{self.kind} in {self.function}{f', line {self.line}' if self.line else ''} ({self.level}): {self.code}"


def source(*subjects, parameters: tuple[str, ...] = ()) -> list[Finding]:
    """What the AST shows of functions, kernels, classes or whole modules, of all that they name in their own package,
    and of every kernel that they name in any. The sizes of what is called one of `parameters` are no rows."""
    functions, findings = _reachable(subjects)
    for f in functions:
        findings += _forbidden(f)
    flow = _Flow(functions, parameters)
    reductions = [x for f in flow.calls.values() if f.kernel for x in flow.reductions(f)]
    reductions.sort(key=lambda x: REDUCTIONS.index(x.kind), reverse=True)
    findings += {(x.function, x.line): x for x in reductions}.values()  # of every loop the first kind that fits
    return sorted(set(findings), key=lambda x: (x.function, x.line, x.kind))


def _unwrap(obj):
    """The plain function behind decorators and descriptors; a class, a module or anything else as it is."""
    for _ in range(20):
        if isinstance(obj, (type, ModuleType, str, int, float, type(None))):
            break
        names = ("fn",) if isinstance(obj, KERNELS + CHOOSERS) else WRAPPED
        name = next((n for n in names if inspect.getattr_static(obj, n, None) is not None), None)
        if name is None:
            break
        obj = getattr(obj, name)
    return obj


def _package(obj) -> str:
    return (obj.__name__ if isinstance(obj, ModuleType) else getattr(obj, "__module__", None) or "").partition(".")[0]


def _names(node: ast.AST, context: type = ast.Load) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)]


class _Function:
    """A function's syntax tree, and what the names in it stand for."""

    def __init__(self, fn: FunctionType, kernel: bool):
        self.fn, self.kernel, self.parameters = fn, kernel, list(inspect.signature(fn).parameters)
        self.lines, self.first = inspect.getsourcelines(fn)
        try:
            tree = ast.parse(textwrap.dedent("".join(self.lines)))
        except SyntaxError:  # of a lambda inside an expression: the lambdas of its line, as the whole file has them
            self.lines, self.first = inspect.findsource(fn)[0], 1
            every = [n for n in ast.walk(ast.parse("".join(self.lines))) if isinstance(n, ast.Lambda)]
            tree = ast.Tuple([n for n in every if n.lineno == fn.__code__.co_firstlineno], ast.Load())
            if fn.__name__ != "<lambda>" or not tree.elts:
                raise
        self.node = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == fn.__name__), tree)
        self.outer = dict(fn.__globals__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            with contextlib.suppress(ValueError):  # not assigned yet
                self.outer[name] = cell.cell_contents
        self.values = {name: [] for name in _names(self.node, ast.Store)}  # what is assigned to each local name
        for n in ast.walk(self.node):
            if isinstance(n, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                for target in n.targets if isinstance(n, ast.Assign) else [n.target]:
                    for name in _names(target, ast.Store):
                        self.values[name].append(n.value)
        self.returns = sum(isinstance(n, ast.Return) for n in ast.walk(self.node))
        self.found: dict[ast.AST, list] = {}  # by `objects`, which is asked the same again and again
        self.names: dict[ast.AST, str] = {}  # likewise by `called`

    def objects(self, e: ast.AST | None) -> list:
        """What an expression made of names and attributes may stand for."""
        if e not in self.found:
            self.found[e] = self._objects(e, 8)
        return self.found[e]

    def _objects(self, e: ast.AST | None, depth: int) -> list:
        if depth and isinstance(e, ast.IfExp):
            return self._objects(e.body, depth - 1) + self._objects(e.orelse, depth - 1)
        if depth and isinstance(e, ast.Attribute):
            owners = [o for o in self._objects(e.value, depth - 1) if isinstance(o, (ModuleType, type))]
            with contextlib.suppress(Exception):  # a module may load what it is asked for
                return [getattr(o, e.attr) for o in owners]
            return []
        if not depth or not isinstance(e, ast.Name):
            return []
        if e.id in self.values or e.id in self.parameters:
            return [o for v in self.values.get(e.id, ()) for o in self._objects(v, depth - 1)]
        return [self.outer[e.id]] if e.id in self.outer else []

    def called(self, e: ast.expr) -> str:
        """The name under which a callee was defined; of a method of who knows what, the method's."""
        if e not in self.names:
            known = self.objects(e)
            self.names[e] = (
                getattr(_unwrap(known[0]), "__name__", "") if known else getattr(e, "attr", getattr(e, "id", ""))
            )
        return self.names[e]

    def finding(self, kind: str, node: ast.AST) -> Finding:
        code = self.lines[node.lineno - 1].strip()
        return Finding(kind, self.fn.__qualname__, self.first + node.lineno - 1, code, "AST")


def run_time(chooser: Autotuner | Heuristics, level: str) -> Finding:
    fn = _unwrap(chooser)
    return Finding(RUN_TIME, fn.__qualname__, fn.__code__.co_firstlineno, type(chooser).__name__, level)


def _reachable(subjects: tuple) -> tuple[list[_Function], list[Finding]]:
    packages = {_package(_unwrap(s)) for s in subjects} - {"torch", "triton"}
    found, findings, queue = {}, [], list(subjects)
    while queue:
        obj = queue.pop()
        inner = _unwrap(obj)
        if isinstance(obj, CHOOSERS):
            findings.append(run_time(obj, "AST"))
        if isinstance(inner, (ModuleType, type)):
            if inner not in found and (inner in subjects or isinstance(inner, type) and _package(inner) in packages):
                found[inner] = None
                home = inner.__name__ if isinstance(inner, ModuleType) else inner.__module__
                queue += [v for v in vars(inner).values() if getattr(_unwrap(v), "__module__", None) == home]
            continue
        kernel = isinstance(obj, KERNELS + CHOOSERS)
        if (
            isinstance(inner, FunctionType)
            and inner not in found
            and _package(inner) != "triton"
            and (kernel or obj in subjects or _package(inner) in packages)
        ):
            found[inner] = None
            try:
                f = found[inner] = _Function(inner, kernel)
                queue += [o for n in ast.walk(f.node) for o in f.objects(n) if not isinstance(o, ModuleType)]
            except (OSError, SyntaxError):
                if not (inner.__name__.startswith("__") and inner.__code__.co_filename == "<string>"):  # a dataclass's
                    findings.append(Finding(UNREADABLE, inner.__qualname__, 0, "", "AST"))
    return [f for f in found.values() if f], findings


def _forbidden(f: _Function) -> Iterator[Finding]:
    """Atomics, unordered scatters and autotuners, by what they are; by name where the owner is not known."""
    for n in ast.walk(f.node):
        if isinstance(n, (ast.Name, ast.Attribute, ast.Constant)):
            known = [n.value] if isinstance(n, ast.Constant) else f.objects(n)
            for o in known or [getattr(n, "attr", None)]:
                text = o.value if isinstance(o, triton.language.constexpr) else o
                own = isinstance(_unwrap(o), FunctionType) and _package(_unwrap(o)) not in ("triton", "torch")
                name = text if isinstance(text, str) else "" if own else getattr(_unwrap(o), "__name__", "")
                if re.fullmatch(r"atomic_\w+", name) or f.kernel and PTX.search(name):
                    yield f.finding(ATOMIC, n)
                elif SCATTERS.fullmatch(name):
                    yield f.finding(SCATTER, n)
                elif any(o is chooser for chooser in (triton.autotune, triton.heuristics, *CHOOSERS)):
                    yield f.finding(RUN_TIME, n)
        elif isinstance(n, ast.Call) and f.called(n.func).strip("_") in ACCUMULATING:
            given = [k.value for k in n.keywords if k.arg in ACCUMULATES]
            if any(not isinstance(a, ast.Constant) or a.value for a in given) or any(
                isinstance(a, ast.Constant) and a.value is True for a in n.args
            ):
                yield f.finding(SCATTER, n)


def _chosen(labels: set) -> set:
    """What depends on `labels` through a choice: a comparison, an index, a divisor, an unknown function."""
    return {CHOSEN if x in (ROWS, SHARE) else x for x in labels}


def _item(f: _Function, labels: set) -> set:
    """What a kernel's loop variable depends on: which program takes a work item says nothing about the item."""
    return labels - {PROGRAMS, DEVICES} | {PID} if f.kernel and labels & {PROGRAMS, DEVICES} else labels


def _divided(a: set, b: set) -> set:
    return {SHARE if x == ROWS else x for x in a} | _chosen(b)


def _leading(index: ast.expr) -> bool:
    """Whether an index into a shape may pick a size before the last."""
    try:
        return ast.literal_eval((index.lower or ast.Constant(0)) if isinstance(index, ast.Slice) else index) == 0
    except ValueError:
        return True


class _Flow:
    """What every name may depend on, in every function and for every kind of arguments that it is called with; the
    order of statements is ignored."""

    def __init__(self, functions: list[_Function], parameters: tuple[str, ...]):
        self.parameters = parameters
        self.of = {f.fn: f for f in functions}
        self.known = defaultdict(set)  # by (function, name), by field, and by function: its result
        self.free: set[str] = set()  # names that may be chosen
        self.calls = {(f,): f for f in functions}
        size = -1
        while size != (size := len(self.calls) + sum(map(len, self.known.values()))):
            for f in list(self.calls.values()):
                self.block(f, getattr(f.node, "body", []), set())

    def block(self, f: _Function, body: list, control: set) -> None:
        """`control`: what decides whether `body` runs; it counts where a name has more than one value to get."""
        for s in body:
            if isinstance(s, ast.Assign):
                for target in s.targets:
                    self.bind(f, target, s.value, control)
            elif isinstance(s, ast.AugAssign):
                self.store(f, s.target, _item(f, self.labels(f, s.value)), control)
            elif isinstance(s, ast.AnnAssign) and s.value:
                self.bind(f, s.target, s.value, control)
            elif isinstance(s, ast.Return) and s.value:
                self.known[f] |= self.labels(f, s.value) | (control if f.returns > 1 else set())
            elif isinstance(s, ast.For):
                self.store(f, s.target, _item(f, self.labels(f, s.iter)), control)
            else:
                self.union(f, *(e for e in ast.iter_child_nodes(s) if isinstance(e, ast.expr)))
            inner = control | _chosen(self.labels(f, s.test)) if isinstance(s, ast.If) else control
            for name in ("body", "orelse", "handlers", "finalbody", "cases"):
                self.block(f, getattr(s, name, []), inner)

    def bind(self, f: _Function, target: ast.expr, value: ast.expr, control: set) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            for t, v in zip(target.elts, value.elts):
                self.bind(f, t, v, control)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Attribute) and value.attr == "shape":
            for t in target.elts:
                self.store(f, t, self.labels(f, value) - ({ROWS} if t is target.elts[-1] else set()), control)
        else:
            labels = self.labels(f, value)
            counts = isinstance(value, ast.BinOp) and getattr(target, "id", "") in _names(value)
            self.store(f, target, _item(f, labels) if counts else labels, control)

    def store(self, f: _Function, target: ast.expr, labels: set, control: set) -> None:
        if isinstance(target, ast.Attribute):
            self.known[target.attr] |= labels
        for name in _names(target, ast.Store):
            self.known[f, name] |= labels | (control if len(f.values[name]) > 1 else set())

    def union(self, f: _Function, *nodes: ast.AST) -> set:
        return set().union(*(self.labels(f, n) for n in nodes))

    def labels(self, f: _Function, e: ast.AST) -> set:
        match e:
            case ast.Name():
                return self.known[f, e.id] - ({CHOSEN, DEVICES} if e.id in self.free else set())
            case ast.Constant():
                return {DEVICES} if isinstance(e.value, str) and DEVICE.search(e.value) else set()
            case ast.Attribute(attr="shape"):
                return self.size(f, e.value)
            case ast.Attribute():
                return {DEVICES} if DEVICE.search(e.attr) else self.labels(f, e.value) | self.known[e.attr]
            case ast.Subscript(value=ast.Attribute(attr="shape")):
                return self.labels(f, e.value) - (set() if _leading(e.slice) else {ROWS})
            case ast.Subscript():
                return self.labels(f, e.value) | _chosen(self.labels(f, e.slice))
            case ast.Compare():
                return _chosen(self.union(f, e.left, *e.comparators))
            case ast.IfExp():
                return _chosen(self.labels(f, e.test)) | self.union(f, e.body, e.orelse)
            case ast.BinOp(op=ast.FloorDiv() | ast.Div()):
                return _divided(self.labels(f, e.left), self.labels(f, e.right))
            case ast.BinOp(op=ast.Mod() | ast.Pow() | ast.LShift() | ast.RShift()):
                return _chosen(self.union(f, e.left, e.right))
            case ast.Call():
                return self.call(f, e)
            case ast.NamedExpr():
                self.bind(f, e.target, e.value, set())
        chosen = set()
        for g in getattr(e, "generators", []):
            chosen |= _chosen(self.union(f, *g.ifs))
            self.store(f, g.target, _item(f, self.labels(f, g.iter)) | chosen, set())
        return chosen | self.union(f, *(c for c in ast.iter_child_nodes(e) if isinstance(c, (ast.expr, ast.keyword))))

    def size(self, f: _Function, e: ast.expr) -> set:
        rows = not f.kernel and getattr(e, "id", "") not in self.parameters
        return self.labels(f, e) & {DEVICES} | ({ROWS} if rows else set())

    def call(self, f: _Function, e: ast.Call) -> set:
        name, inputs, owner = f.called(e.func), self.union(f, *e.args, *e.keywords), getattr(e.func, "value", None)
        method = getattr(e.func, "attr", "")
        callees = [
            (o.__init__, 1) if isinstance(o, type) else (o, 0)
            for o in f.objects(owner if isinstance(e.func, ast.Subscript) else e.func)
        ]
        if method in ("run", "warmup", "apply"):  # of a kernel, or of an autograd function with its ctx
            callees = [
                (getattr(o, "forward", o), int(method == "apply" and "setup_context" not in vars(o)))
                for o in f.objects(owner)
            ]
        elif method and not callees:
            callees = [(fn, 1) for fn in self.of if fn.__qualname__.endswith(f".{method}")]
        results, own = set(), False
        for o, skip in callees:
            inner = _unwrap(o)
            if isinstance(inner, FunctionType) and inner in self.of:
                results, own = results | self.known[self.callee(f, e, self.of[inner], skip)], True
        if own and not method:
            return results
        if name in ("program_id", "num_programs"):
            return {PID if name == "program_id" else PROGRAMS}
        if name == "cdiv" and len(e.args) == 2:
            return _divided(self.labels(f, e.args[0]), self.labels(f, e.args[1]))
        if f.kernel:
            loaded = "load" in name or name == "gather"
            return {DATA} | inputs & {DEVICES} if loaded else inputs | self.labels(f, e.func)
        if DEVICE.search(name):
            return {DEVICES}
        if name in ("numel", "len", "size"):
            size = self.size(f, e.args[0] if name == "len" and e.args else owner or e.func)
            return size - (set() if name != "size" or not e.args or _leading(e.args[0]) else {ROWS})
        return results | self.labels(f, e.func) | (inputs if name in COUNTS else _chosen(inputs))

    def callee(self, f: _Function, e: ast.Call, callee: _Function, skip: int) -> _Function:
        """The callee for arguments like these. Starred ones fill the parameters that the others leave."""
        parameters = callee.parameters[skip:]
        pairs = [(k.arg, k.value) for k in e.keywords if k.arg in parameters]
        rest = [p for p in parameters if p not in dict(pairs)]
        stars = [i for i, a in enumerate(e.args) if isinstance(a, ast.Starred)] or [len(e.args)]
        tail = e.args[stars[-1] + 1 :]
        last = len(rest) - len(tail)
        pairs += [*zip(rest[: stars[0]], e.args), *zip(rest[last:], tail)]
        starred = e.args[stars[0] : stars[-1] + 1] + [k.value for k in e.keywords if k.arg is None]
        pairs += [(p, a) for p in rest[stars[0] : last] for a in starred]
        given = {p: set() for p in callee.parameters}
        for p, value in pairs:
            shape = isinstance(value, ast.Starred) and getattr(value.value, "attr", "") == "shape"
            given[p] |= self.labels(f, value) - ({ROWS} if shape and p == rest[last - 1] else set())
        callee = self.calls.setdefault((callee, *map(frozenset, given.values())), copy.copy(callee))
        for p, labels in given.items():
            self.known[callee, p] |= labels
        return callee

    def reductions(self, f: _Function) -> Iterator[Finding]:
        for loop in ast.walk(f.node):
            carried = _carried(f, loop) if isinstance(loop, (ast.For, ast.While)) else {}
            carried = {name: chain for name, chain in carried.items() if DATA in self.known[f, name]}
            if not carried:
                continue
            if isinstance(loop, ast.While):  # it ends by what its test reads, and steps by what moves that
                start, stop, tested = [], [loop.test], {*_names(loop.test)}
                step = [
                    n.value
                    for n in ast.walk(loop)
                    if isinstance(n, (ast.Assign, ast.AugAssign)) and tested & {*_names(n, ast.Store)}
                ]
            else:
                given = getattr(loop.iter, "args", [loop.iter])
                start, stop, step = given[:1] if len(given) > 1 else [], given[:2][-1:], given[2:]
                step = step + [k.value for k in getattr(loop.iter, "keywords", []) if k.arg == "step"]
                if all(carried.values()) and PID not in self.union(f, *start):
                    blocks = [n for n in ast.walk(f.node) if isinstance(n, ast.Call) and f.called(n.func) == "arange"]
                    self.free = {x for n in blocks for x in _names(n)} | {n.id for n in step if isinstance(n, ast.Name)}
            starts, steps = self.union(f, *start), self.union(f, *step)
            every = starts | steps | self.union(f, *stop)
            self.free = set()
            if PROGRAMS in every:
                yield f.finding(GRID_STRIDE, loop)
            elif DEVICES in every:
                yield f.finding(BY_DEVICE, loop)
            elif CHOSEN in every or PID in starts and SHARE in starts | steps:
                yield f.finding(BY_ROWS, loop)


def _carried(f: _Function, loop: ast.For | ast.While) -> dict[str, bool]:
    """The names that an iteration makes of what the one before left in them: whether by `x = tl.dot(a, b, x)` alone.

    One that every iteration also makes anew is not among them; a test of what the loop does not change counts as held.
    """
    changed, updates = {*_names(loop, ast.Store)}, defaultdict(list)

    def visit(body: list, always: bool) -> None:
        for s in body:
            if isinstance(s, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                for name in _names(s, ast.Store):
                    own = {name} if isinstance(s, ast.AugAssign) else set()
                    updates[name].append((s.value, {*_names(s)} | own, always))
            for part in ("body", "orelse"):
                visit(getattr(s, part, []), always and not (isinstance(s, ast.If) and changed & {*_names(s.test)}))

    visit(loop.body, True)
    reads = {name: set().union(*(r for _, r, _ in found)) for name, found in updates.items()}
    for _ in updates:
        reads = {name: r.union(*(reads.get(x, ()) for x in r)) for name, r in reads.items()}

    def chain(name: str, e: ast.expr | None) -> bool:
        if not isinstance(e, ast.Call) or not any(o is triton.language.dot for o in f.objects(e.func)):
            return False
        acc = [*e.args[2:3], *(k.value for k in e.keywords if k.arg == "acc")]
        return [getattr(a, "id", "") for a in acc] == [name]

    carried = {}
    for name, found in updates.items():
        own = [any(name == x or name in reads.get(x, ()) for x in direct) for _, direct, _ in found]
        if any(own) and not any(always and not o for (*_, always), o in zip(found, own)):
            carried[name] = all(chain(name, e) or not o for (e, *_), o in zip(found, own))
    return carried
