"""Scans the source of kernels, and of the Python around them, for atomics, scatters, autotuners and unsafe reductions.

Names are resolved to objects, so an alias of `tl.atomic_add` hides nothing; a launch's arguments are followed into the
kernel through assignments, calls and fields. A reduction is a loop that carries a value made of loaded data. It is
reported where its range depends on `num_programs`, on the number of multiprocessors, or on a number that the row count
chose: by a comparison, a lookup or a division, or as a share of the rows times a program id. The row count itself may
end a range. The tile of a pure `acc = tl.dot(a, b, acc)` chain may depend on rows: on sm_90 it changes no bit. Every
tensor size that is not known to be a later dimension counts as rows.

Left to the invariance audit: a sum that Python cuts by slicing or by choosing between two launches; bounds and
accumulators in memory; num_warps or the block of a `tl.sum` chosen by rows; torch's own matmul and sum; functions
passed as arguments.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from types import FunctionType

import triton

from bi_kernels.audit.static.finding import (
    ACCUMULATES,
    ACCUMULATING,
    ATOMIC,
    BY_DEVICE,
    BY_ROWS,
    CHOOSERS,
    DEVICE,
    GRID_STRIDE,
    PTX,
    REDUCTIONS,
    RUN_TIME,
    SCATTER,
    SCATTERS,
    Finding,
)
from bi_kernels.audit.static.function import Function, names_in, nodes, package_of, parts_of, reachable, targets, unwrap


def source(*subjects, parameters: tuple[str, ...] = ()) -> list[Finding]:
    """Returns the findings in functions, kernels, classes or modules, in all that they name in their package, and in
    every kernel that they name. The sizes of tensors named in `parameters` are no row counts."""
    functions, findings = reachable(subjects)
    findings += (x for f in functions for x in _forbidden(f))
    flow = Flow(functions, parameters)
    reductions = [x for f in flow.calls.values() if f.kernel for x in f.reductions()]
    reductions.sort(key=lambda x: REDUCTIONS.index(x.kind), reverse=True)
    findings += {(x.function, x.line): x for x in reductions}.values()  # the first kind that fits, a loop
    return sorted(set(findings), key=lambda x: (x.function, x.line, x.kind, x.code, x.level))


def _forbidden(f: Function) -> Iterator[Finding]:
    """Yields atomics, unordered scatters and autotuners, by object, or by name where the owner is not known."""
    for n in ast.walk(f.node):
        if isinstance(n, (ast.Name, ast.Attribute, ast.Constant)):
            known = [n.value] if isinstance(n, ast.Constant) else f.objects(n)
            for o in known or [getattr(n, "attr", None)]:
                inner = o.value if isinstance(o, triton.language.constexpr) else unwrap(o)
                own = isinstance(inner, FunctionType) and package_of(inner) not in ("triton", "torch")
                name = inner if isinstance(inner, str) else "" if own else getattr(inner, "__name__", "")
                if re.fullmatch(r"atomic_\w+", name) or f.kernel and PTX.search(name):
                    yield f.finding(ATOMIC, n)
                elif SCATTERS.fullmatch(name):
                    yield f.finding(SCATTER, n, name.strip("_"))
                elif any(o is chooser for chooser in (triton.autotune, triton.heuristics, *CHOOSERS)):
                    yield f.finding(RUN_TIME, n)
        elif isinstance(n, ast.Call) and f.called(n.func).strip("_") in ACCUMULATING:
            constant = lambda e, other: e.value if isinstance(e, ast.Constant) else other
            named = any(constant(k.value, True) for k in n.keywords if k.arg in ACCUMULATES)
            if named or any(constant(a, None) is True for a in n.args):
                yield f.finding(SCATTER, n, f.called(n.func).strip("_"))


# Labels, what a value may depend on: the program id, the grid, the device, the row count, a share or a choice by it, or
# loaded data. The first two are named as in triton.language.
PID, PROGRAMS, DEVICES, ROWS = "program_id", "num_programs", "devices", "rows"
SHARE, CHOSEN, DATA = "share", "chosen", "data"
COUNTS = ("min", "max", "int", "ceil", "floor", "tuple", "list", "range", "enumerate", "zip")  # keep the label of rows


def _chosen(labels: set) -> set:
    """Returns the labels of a choice by `labels`: a comparison, an index, a divisor, an unknown function."""
    return {CHOSEN if x in (ROWS, SHARE) else x for x in labels}


def _divided(a: set, b: set) -> set:
    return {SHARE if x == ROWS else x for x in a} | _chosen(b)


def _later(index: ast.expr) -> set:
    """Returns {ROWS} if an index into a shape can only pick dimensions after the first."""
    try:
        first = ast.literal_eval((index.lower or ast.Constant(0)) if isinstance(index, ast.Slice) else index)
        return set() if first == 0 else {ROWS}
    except ValueError:
        return set()


class Known(defaultdict):
    """Sets of labels, which only grow, and which of them the function at hand has read, at what size."""

    read: dict

    def __getitem__(self, key):
        labels = super().__getitem__(key)
        self.read.setdefault(key, len(labels))
        return labels

    def add(self, key, labels: set) -> None:
        self.setdefault(key, set()).update(labels)

    def grew(self, read: dict | None) -> bool:
        """Tells whether one of the sets grew since it was read. None: nothing was read yet."""
        return read is None or any(len(self.get(key, ())) > size for key, size in read.items())


class Flow:
    """The labels of every name, in each function for each kind of arguments that it is called with, to a fixed point.

    The order of statements is ignored.
    """

    def __init__(self, functions: list[Function], parameters: tuple[str, ...]):
        self.parameters = parameters
        self.of = {f.fn: f for f in functions}
        self.methods = defaultdict(list)
        for fn in self.of:
            owner, _, name = fn.__qualname__.rpartition(".")
            self.methods[name] += [fn] * bool(owner)
        self.known = Known(set)  # by (function, name), by field, and by function: its result
        self.called = {}  # {call node: (name, functions that it may reach)}
        self.calls = {(f,): Specialised(f, self) for f in functions}
        while behind := [f for f in self.calls.values() if self.known.grew(f.read)]:
            for f in behind:
                f.read = self.known.read = {}
                f.block(getattr(f.node, "body", []), set())


class Specialised(Function):
    """A function for arguments of one kind, with the labels of its values."""

    def __init__(self, f: Function, flow: Flow):
        vars(self).update(vars(f))
        self.flow, self.known = flow, flow.known
        self.free: set[str] = set()  # names that may be chosen
        self.read: dict | None = None  # what its labels were made of, when they last were

    def block(self, body: list, control: set) -> None:
        """Labels the names that `body` assigns. `control`: what decides whether it runs; it labels reassigned names."""
        for s in body:
            match s:
                case ast.Assign() | ast.AnnAssign(value=ast.expr()):
                    for target in targets(s):
                        self.bind(target, s.value, control)
                case ast.AugAssign(target=target, value=value) | ast.For(target=target, iter=value):
                    self.store(target, self.item(self.labels(value)), control)
                case ast.Return(value=ast.expr()):
                    self.known.add(self, self.labels(s.value) | (control if self.returns > 1 else set()))
                case _:
                    self.below(s)
            inner = control | _chosen(self.labels(s.test)) if isinstance(s, ast.If) else control
            for name in ("body", "orelse", "handlers", "finalbody", "cases"):
                self.block(getattr(s, name, []), inner)

    def bind(self, target: ast.expr, value: ast.expr, control: set) -> None:
        match target, value:
            case ast.Tuple(elts=parts), ast.Tuple(elts=values) if len(parts) == len(values):
                for t, v in zip(parts, values):
                    self.bind(t, v, control)
            case ast.Tuple(elts=parts), ast.Attribute(attr="shape"):
                for t in parts:
                    self.store(t, self.labels(value) - ({ROWS} if t is parts[-1] else set()), control)
            case _:
                labels = self.labels(value)
                counts = isinstance(value, ast.BinOp) and getattr(target, "id", "") in names_in(value)
                self.store(target, self.item(labels) if counts else labels, control)

    def store(self, target: ast.expr, labels: set, control: set) -> None:
        if isinstance(target, ast.Attribute):
            self.known.add(target.attr, labels)
        for name in names_in(target, ast.Store):
            self.known.add((self, name), labels | (control if len(self.values[name]) > 1 else set()))

    def item(self, labels: set) -> set:
        """Returns the labels of a kernel's loop variable: which program takes a work item does not change the item."""
        by_program = {PROGRAMS, DEVICES} if self.kernel else set()
        return labels - by_program | {PID} if labels & by_program else labels

    def union(self, *parts: ast.AST) -> set:
        return set().union(*map(self.labels, parts))

    def below(self, e: ast.AST) -> set:
        return self.union(*parts_of(e))

    def labels(self, e: ast.AST) -> set:
        match e:
            case ast.Name():
                return self.known[self, e.id] - ({CHOSEN, DEVICES} if e.id in self.free else set())
            case ast.Constant():
                return {DEVICES} if isinstance(e.value, str) and DEVICE.search(e.value) else set()
            case ast.Attribute(attr="shape"):
                return self.size(e.value)
            case ast.Attribute():
                return {DEVICES} if DEVICE.search(e.attr) else self.labels(e.value) | self.known[e.attr]
            case ast.Subscript(value=ast.Attribute(attr="shape")):
                return self.labels(e.value) - _later(e.slice)
            case ast.Subscript():
                return self.labels(e.value) | _chosen(self.labels(e.slice))
            case ast.IfExp():
                return _chosen(self.labels(e.test)) | self.union(e.body, e.orelse)
            case ast.BinOp(op=ast.FloorDiv() | ast.Div()):
                return _divided(self.labels(e.left), self.labels(e.right))
            case ast.Compare() | ast.BinOp(op=ast.Mod() | ast.Pow() | ast.LShift() | ast.RShift()):
                return _chosen(self.below(e))
            case ast.Call():
                return self.call(e)
            case ast.NamedExpr():
                self.bind(e.target, e.value, set())
        chosen = set()
        for g in getattr(e, "generators", []):
            chosen |= _chosen(self.union(*g.ifs))
            self.store(g.target, self.item(self.labels(g.iter)) | chosen, set())
        return chosen | self.below(e)

    def size(self, e: ast.expr) -> set:
        rows = not self.kernel and getattr(e, "id", "") not in self.flow.parameters
        return self.labels(e) & {DEVICES} | ({ROWS} if rows else set())

    def call(self, e: ast.Call) -> set:
        if e not in self.flow.called:  # the same whatever the arguments are
            self.flow.called[e] = self.called(e.func), self.callees(e)
        name, callees = self.flow.called[e]
        inputs, owner = self.union(*e.args, *e.keywords), getattr(e.func, "value", None)
        own = [self.callee(e, f, skip) for f, skip in callees]
        results = set().union(*(self.known[f] for f in own))
        if own and not isinstance(e.func, ast.Attribute):
            return results
        if name in (PID, PROGRAMS):
            return {name}
        if name == "cdiv" and len(e.args) == 2:
            return _divided(*map(self.labels, e.args))
        if self.kernel:
            loaded = "load" in name or name == "gather"
            return {DATA} | inputs & {DEVICES} if loaded else inputs | self.labels(e.func)
        if DEVICE.search(name):
            return {DEVICES}
        if name in ("numel", "len", "size"):
            size = self.size(e.args[0] if name == "len" and e.args else owner or e.func)
            return size - _later(e.args[0]) if name == "size" and e.args else size
        return results | self.labels(e.func) | (inputs if name in COUNTS else _chosen(inputs))

    def callees(self, e: ast.Call) -> list[tuple[Function, int]]:
        """Returns (function, number of first parameters that the call does not pass) for each that a call may reach."""
        known, owner, method = self.flow.of, getattr(e.func, "value", None), getattr(e.func, "attr", "")
        reached = [
            (o.__init__, 1) if isinstance(o, type) else (o, 0)
            for o in self.objects(owner if isinstance(e.func, ast.Subscript) else e.func)
        ]
        if method in ("run", "warmup", "apply"):  # of a kernel, or of an autograd function with its ctx
            reached = [
                (getattr(o, "forward", o), int(method == "apply" and "setup_context" not in vars(o)))
                for o in self.objects(owner)
            ]
        elif method and not reached:
            reached = [(fn, 1) for fn in self.flow.methods[method]]
        plain = [(unwrap(o), skip) for o, skip in reached]
        return [(known[o], skip) for o, skip in plain if isinstance(o, FunctionType) and o in known]

    def callee(self, e: ast.Call, f: Function, skip: int) -> "Specialised":
        """Returns the callee for arguments like these. Starred ones may fill any parameter that the others leave."""
        named = {k.arg: self.labels(k.value) for k in e.keywords if k.arg in f.parameters[skip:]}
        rest = [p for p in f.parameters[skip:] if p not in named]
        stars = [i for i, a in enumerate(e.args) if isinstance(a, ast.Starred)] or [len(e.args)]
        first, last = e.args[: stars[0]], e.args[stars[-1] + 1 :]
        starred = self.union(*e.args[stars[0] : stars[-1] + 1], *(k.value for k in e.keywords if k.arg is None))
        plain = {p: self.labels(a) for p, a in [*zip(rest, first), *zip(reversed(rest), reversed(last))]}
        given = dict.fromkeys(f.parameters, set()) | dict.fromkeys(rest, starred) | plain | named
        kind = f, *map(frozenset, given.values())
        if kind not in self.flow.calls:
            self.flow.calls[kind] = Specialised(f, self.flow)
        callee = self.flow.calls[kind]
        for p, labels in given.items():
            self.known.add((callee, p), labels)
        return callee

    def reductions(self) -> Iterator[Finding]:
        for loop in nodes(self.node, ast.For, ast.While):
            chains = [chain for name, chain in self.carried(loop) if DATA in self.known[self, name]]
            if not chains:
                continue
            if isinstance(loop, ast.While):  # it ends by what its test reads, and steps by what moves that
                start, stop, tested = [], [loop.test], {*names_in(loop.test)}
                moved = nodes(loop, ast.Assign, ast.AugAssign)
                step = [n.value for n in moved if tested & {*names_in(n, ast.Store)}]
            else:
                given = getattr(loop.iter, "args", [loop.iter])
                start, stop = given[:2][:-1], given[:2][-1:]
                step = given[2:] + [k.value for k in getattr(loop.iter, "keywords", []) if k.arg == "step"]
                if all(chains) and PID not in self.union(*start):
                    blocks = [n for n in nodes(self.node, ast.Call) if self.called(n.func) == "arange"]
                    self.free = {x for n in blocks for x in names_in(n)} | {
                        n.id for n in step if isinstance(n, ast.Name)
                    }
            starts, steps = self.union(*start), self.union(*step)
            every = starts | steps | self.union(*stop)
            self.free = set()
            if PROGRAMS in every:
                yield self.finding(GRID_STRIDE, loop)
            elif DEVICES in every:
                yield self.finding(BY_DEVICE, loop)
            elif CHOSEN in every or PID in starts and SHARE in starts | steps:
                yield self.finding(BY_ROWS, loop)

    def carried(self, loop: ast.For | ast.While) -> Iterator[tuple[str, bool]]:
        """Yields (name, whether only `x = tl.dot(a, b, x)` updates it) for the values that a loop carries.

        A name that every iteration resets is not carried. A condition that the loop does not change counts as true.
        """
        changed, updates = {*names_in(loop, ast.Store)}, defaultdict(list)

        def visit(body: list, always: bool) -> None:
            for s in body:
                if isinstance(s, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                    for name in names_in(s, ast.Store):
                        own = {name} if isinstance(s, ast.AugAssign) else set()
                        updates[name].append((s.value, {*names_in(s)} | own, always))
                held = always and not (isinstance(s, ast.If) and changed & {*names_in(s.test)})
                for part in ("body", "orelse"):
                    visit(getattr(s, part, []), held)

        def chain(name: str, e: ast.expr | None) -> bool:
            dot = any(o is triton.language.dot for o in self.objects(getattr(e, "func", None)))
            acc = dot and [*e.args[2:3], *(k.value for k in e.keywords if k.arg == "acc")]
            return dot and [getattr(a, "id", "") for a in acc] == [name]

        def exact(name: str, e: ast.expr) -> bool:
            """Tells whether an update gives one result in any order: a maximum, or one of integers."""
            if isinstance(e, ast.Call) and self.called(e.func) in ("maximum", "minimum"):
                return any(getattr(a, "id", "") == name for a in e.args)
            made = [n for n in self.values[name] if isinstance(n, ast.Call)]
            made = [n for n in made if self.called(n.func) in ("zeros", "full")]
            given = [a for n in made for a in (*n.args, *(k.value for k in n.keywords))]
            return any(re.fullmatch(r"u?int\d+", getattr(o, "name", "")) for a in given for o in self.objects(a))

        visit(loop.body, True)
        behind = {name: set().union(*(inputs for _, inputs, _ in found)) for name, found in updates.items()}
        for _ in updates:
            behind = {name: known.union(*(behind.get(x, ()) for x in known)) for name, known in behind.items()}
        for name, found in updates.items():
            goes_on = lambda inputs: any(name == x or name in behind.get(x, ()) for x in inputs)
            values = [e for e, inputs, _ in found if goes_on(inputs)]
            reset = any(always and not goes_on(inputs) for _, inputs, always in found)
            if values and not reset and not all(exact(name, e) for e in values):
                yield name, all(chain(name, e) for e in values)
