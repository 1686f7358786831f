"""What every value of a function may depend on, and so the reductions whose order the rows or the device decide."""

import ast
import copy
from collections import defaultdict
from collections.abc import Iterator
from types import FunctionType

import triton

from bi_kernels.audit.static.finding import BY_DEVICE, BY_ROWS, DEVICE, GRID_STRIDE, Finding
from bi_kernels.audit.static.function import Function, names_in, unwrap

# What a value may depend on: the program's place, the grid, the device, the row count, a part of it, a choice by it;
# or loaded data.
PID, PROGRAMS, DEVICES, ROWS, SHARE, CHOSEN, DATA = "pid", "programs", "devices", "rows", "share", "chosen", "data"
COUNTS = ("min", "max", "int", "ceil", "floor", "tuple", "list", "range", "enumerate", "zip")  # of rows give rows


def _chosen(labels: set) -> set:
    """Returns what depends on `labels` through a choice: a comparison, an index, a divisor, an unknown function."""
    return {CHOSEN if x in (ROWS, SHARE) else x for x in labels}


def _item(f: Function, labels: set) -> set:
    """Returns what a kernel's loop variable depends on: which program takes a work item says nothing about the item."""
    return labels - {PROGRAMS, DEVICES} | {PID} if f.kernel and labels & {PROGRAMS, DEVICES} else labels


def _divided(a: set, b: set) -> set:
    return {SHARE if x == ROWS else x for x in a} | _chosen(b)


def _leading(index: ast.expr) -> bool:
    """Returns whether an index into a shape may pick a size before the last."""
    try:
        return ast.literal_eval((index.lower or ast.Constant(0)) if isinstance(index, ast.Slice) else index) == 0
    except ValueError:
        return True


class Flow:
    """What every name may depend on, in every function and for every kind of arguments that it is called with; the
    order of statements is ignored."""

    def __init__(self, functions: list[Function], parameters: tuple[str, ...]):
        self.parameters = parameters
        self.of = {f.fn: f for f in functions}
        self.known = defaultdict(set)  # by (function, name), by field, and by function: its result
        self.free: set[str] = set()  # names that may be chosen
        self.calls = {(f,): f for f in functions}
        size = -1
        while size != (size := len(self.calls) + sum(map(len, self.known.values()))):
            for f in list(self.calls.values()):
                self.block(f, getattr(f.node, "body", []), set())

    def block(self, f: Function, body: list, control: set) -> None:
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

    def bind(self, f: Function, target: ast.expr, value: ast.expr, control: set) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            for t, v in zip(target.elts, value.elts):
                self.bind(f, t, v, control)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Attribute) and value.attr == "shape":
            for t in target.elts:
                self.store(f, t, self.labels(f, value) - ({ROWS} if t is target.elts[-1] else set()), control)
        else:
            labels = self.labels(f, value)
            counts = isinstance(value, ast.BinOp) and getattr(target, "id", "") in names_in(value)
            self.store(f, target, _item(f, labels) if counts else labels, control)

    def store(self, f: Function, target: ast.expr, labels: set, control: set) -> None:
        if isinstance(target, ast.Attribute):
            self.known[target.attr] |= labels
        for name in names_in(target, ast.Store):
            self.known[f, name] |= labels | (control if len(f.values[name]) > 1 else set())

    def union(self, f: Function, *nodes: ast.AST) -> set:
        return set().union(*(self.labels(f, n) for n in nodes))

    def labels(self, f: Function, e: ast.AST) -> set:
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

    def size(self, f: Function, e: ast.expr) -> set:
        rows = not f.kernel and getattr(e, "id", "") not in self.parameters
        return self.labels(f, e) & {DEVICES} | ({ROWS} if rows else set())

    def call(self, f: Function, e: ast.Call) -> set:
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
            inner = unwrap(o)
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

    def callee(self, f: Function, e: ast.Call, callee: Function, skip: int) -> Function:
        """Returns the callee for arguments like these. Starred ones fill the parameters that the others leave."""
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

    def reductions(self, f: Function) -> Iterator[Finding]:
        for loop in ast.walk(f.node):
            carried = _carried(f, loop) if isinstance(loop, (ast.For, ast.While)) else {}
            carried = {name: chain for name, chain in carried.items() if DATA in self.known[f, name]}
            if not carried:
                continue
            if isinstance(loop, ast.While):  # it ends by what its test reads, and steps by what moves that
                start, stop, tested = [], [loop.test], {*names_in(loop.test)}
                step = [
                    n.value
                    for n in ast.walk(loop)
                    if isinstance(n, (ast.Assign, ast.AugAssign)) and tested & {*names_in(n, ast.Store)}
                ]
            else:
                given = getattr(loop.iter, "args", [loop.iter])
                start, stop, step = given[:1] if len(given) > 1 else [], given[:2][-1:], given[2:]
                step = step + [k.value for k in getattr(loop.iter, "keywords", []) if k.arg == "step"]
                if all(carried.values()) and PID not in self.union(f, *start):
                    blocks = [n for n in ast.walk(f.node) if isinstance(n, ast.Call) and f.called(n.func) == "arange"]
                    self.free = {x for n in blocks for x in names_in(n)} | {
                        n.id for n in step if isinstance(n, ast.Name)
                    }
            starts, steps = self.union(f, *start), self.union(f, *step)
            every = starts | steps | self.union(f, *stop)
            self.free = set()
            if PROGRAMS in every:
                yield f.finding(GRID_STRIDE, loop)
            elif DEVICES in every:
                yield f.finding(BY_DEVICE, loop)
            elif CHOSEN in every or PID in starts and SHARE in starts | steps:
                yield f.finding(BY_ROWS, loop)


def _carried(f: Function, loop: ast.For | ast.While) -> dict[str, bool]:
    """Returns the names that an iteration makes of what the one before left in them: whether by `x = tl.dot(a, b, x)`
    alone.

    One that every iteration also makes anew is not among them; a test of what the loop does not change counts as held.
    """
    changed, updates = {*names_in(loop, ast.Store)}, defaultdict(list)

    def visit(body: list, always: bool) -> None:
        for s in body:
            if isinstance(s, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                for name in names_in(s, ast.Store):
                    own = {name} if isinstance(s, ast.AugAssign) else set()
                    updates[name].append((s.value, {*names_in(s)} | own, always))
            for part in ("body", "orelse"):
                visit(getattr(s, part, []), always and not (isinstance(s, ast.If) and changed & {*names_in(s.test)}))

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
