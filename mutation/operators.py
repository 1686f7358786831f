"""Mutants: edits of one place of a source, made systematically from its syntax tree.

The libraries for this (cosmic-ray, mutmut) rewrite files in place, start a cold interpreter a mutant and know no word
of Triton; half of these operators are about loads, stores, casts and folds of a kernel, or about launchers.

Left alone is what the contract calls free or what no audit of bits is about: launch parameters (`num_warps`,
`num_stages`), constants of modules, tile tables and their choice, checks of arguments, texts, and annotations.
"""

import ast
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

HAND_MADE = "hand-made: "  # how the operator of a mutant from hand_made.toml begins
# which choose tiles, their order, grids, stages or how long a copy waits, all of which is free; or only check; or say
# what is traced
FREE = {
    *("pause", "_prefetch", "waves", "held", "lanes", "_rank", "_bands"),
    *("tiles", "cheapest", "part_n", "blocks_of", "grid_of", "max_tiles", "round_up_sequences"),
    *("_checked", "checked_targets", "check_row", "check_out_dtype", "fits_apart", "_kept_columns"),
    *("tile_for", "_tile_for", "stages_of", "continues_step"),
    *("_Unset", "_", "_fake", "_fake_log_softmax", "_fake_sums", "_fake_softmax"),
}
SAYS = re.compile(r"_?(check|warn)")  # likewise: how functions are called that check or warn, if they return nothing
LAUNCHED = re.compile(r"num_warps|num_stages|warps|stages|group|persistent|enable_fp_fusion|GROUP_M|FLATTEN|stacklevel")
# likewise, in a dict
CONSTANTS = re.compile(r"num_warps|num_stages|maxnreg|REGISTERS|STAGES|GROUP_M|PAUSE|enable_fp_fusion")
# how a kernel in Gluon lays out what it holds, how much room it asks for, and tiles: another layout changes nothing, or
# is refused by the compiler, and more room changes nothing
LAYOUT = re.compile(
    r"(NVMMA\w+|Blocked|Slice|DotOperand|SwizzledShared|MBarrier)Layout$|allocate_shared_memory$|Tiling$"
)
WAITS = "wait", "wait_group", "fence_async_shared"
STRIDE = re.compile(r"stride|columns|width|heads|cols|half|rows")
# launchers and backwards, whose results are tensors
TENSOR = re.compile(r"^(_?(launch|backward|forward|gradient)\w*|norm_forward|look_up|_gemm)$")


@dataclass(frozen=True)
class Mutant:
    """One edit of a source: the text from `start` to `end` becomes `text`, and `more` stands at the end."""

    file: str  # below the package
    function: str  # of the module's top level, or the class
    operator: str
    line: int
    start: int
    end: int
    text: str
    before: str  # the lines as they were, stripped
    number: int = 0  # among equal ones
    more: str = ""
    device: str = ""  # where alone it changes anything, "cuda": it needs sm_90
    taken: str = ""  # the text that it replaces

    @cached_property
    def id(self) -> str:
        """Names the mutant whatever else is in the file."""
        said = (self.file, self.function, self.operator, self.before, self.text, str(self.number))
        return hashlib.sha256("\0".join(said).encode()).hexdigest()[:10]

    def applied(self, source: str) -> str:
        """Returns the source with the edit. Lines that it takes away become empty ones behind it: Triton compiles a
        kernel anew that begins in another line."""
        missing = source.count("\n", self.start, self.end) - self.text.count("\n")
        line = source.find("\n", self.end) if missing > 0 else self.end
        behind = source[self.end : line] + "\n" * max(0, missing) + source[line:]
        return source[: self.start] + self.text + behind + self.more


class _Source:
    """A source, its tree, and where its nodes stand."""

    def __init__(self, text: str):
        self.text, self.tree = text, ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self.offsets = [0]
        for line in self.lines:
            self.offsets.append(self.offsets[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """Returns the offset of a column, which ast counts in bytes."""
        return self.offsets[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]


Edit = tuple[str, ast.AST, str]  # operator, what is replaced, by what


def _name(node: ast.AST) -> str:
    """Returns the last part of a dotted name, '' for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _comparisons(s: _Source, node: ast.AST) -> Iterator[Edit]:
    swaps = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in swaps:
        left, right = s.of(node.left), s.of(node.comparators[0])
        yield "comparison", node, f"({left}) {swaps[type(node.ops[0])]} ({right})"


def _constants(s: _Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant by one", node, str(node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is float and node.value not in (0.0, float("inf")):
        yield "constant by a little", node, repr(node.value * 1.01)


def _accesses(s: _Source, node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call) or _name(node.func) not in ("load", "store"):
        return
    given = {k.arg: k for k in node.keywords}
    kept = [s.of(a) for a in node.args]
    if "mask" in given:
        whole = [*kept, *(f"{k}={s.of(v.value)}" for k, v in given.items() if k not in ("mask", "other"))]
        yield "mask dropped", node, f"{s.of(node.func)}({', '.join(whole)})"
    if "other" in given:
        yield "other by one", given["other"].value, f"({s.of(given['other'].value)}) + 1"


def _casts(s: _Source, node: ast.AST) -> Iterator[Edit]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return
    if node.func.attr in ("float", "double", "to") and len(node.args) == (node.func.attr == "to"):
        value = s.of(node.func.value)
        yield "cast dropped", node, f"({value})" if isinstance(node.func.value, ast.BinOp) else value
        if node.func.attr == "to" and _name(node.args[0]) == "float32":
            yield (
                "cast to bf16",
                node,
                f"{s.of(node.func.value)}.to({s.of(node.args[0]).replace('float32', 'bfloat16')})",
            )


def _loops(s: _Source, node: ast.AST) -> Iterator[Edit]:
    if not (isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and _name(node.iter.func) == "range"):
        return
    call, given = s.of(node.iter.func), [s.of(a) for a in node.iter.args]
    first, end, step = {1: ("0", given[0], "1"), 2: (*given, "1"), 3: tuple(given)}[len(given)]
    more = "".join(f", {k.arg}={s.of(k.value)}" for k in node.iter.keywords)
    yield "first round dropped", node.iter, f"{call}(({first}) + ({step}), {end}, {step}{more})"
    yield "last round dropped", node.iter, f"{call}({first}, ({end}) - ({step}), {step}{more})"


def _arithmetic(s: _Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.AugAssign):
        zero = isinstance(node.value, ast.Constant) and node.value.value == 0.0
        yield "+ 0.0 dropped" if zero else "update dropped", node, "pass"
        if isinstance(node.op, ast.Add) and not zero and re.match(r"(acc|total|s|u|weighted)$", s.of(node.target)):
            yield "partial sum in bf16", node, f"{s.of(node)}; {_rounded(s.of(node.target))}"
    if not isinstance(node, ast.BinOp):
        return
    left, right = s.of(node.left), s.of(node.right)
    if isinstance(node.op, ast.Add) and isinstance(node.right, ast.Constant) and node.right.value == 0.0:
        yield "+ 0.0 dropped", node, left
    elif isinstance(node.op, (ast.Add, ast.Sub)):
        yield "sign", node, f"({left}) {'-' if isinstance(node.op, ast.Add) else '+'} ({right})"
    elif isinstance(node.op, ast.Mult) and STRIDE.search(_name(node.right)):
        yield "stride by one", node, f"({left}) * (({right}) + 1)"
    elif isinstance(node.op, ast.Mult):
        yield "factor dropped", node, f"({left})"
    elif isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        yield "half of a mask dropped", node, f"({left})"
        yield "half of a mask dropped", node, f"({right})"


def _rounded(target: str) -> str:
    return f"{target} = {target}.to(tl.bfloat16).to(tl.float32)"


def _branches(s: _Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, (ast.If, ast.IfExp)):
        yield "branch turned", node.test, f"(not ({s.of(node.test)}))"
    if isinstance(node, ast.BoolOp):
        for left_out in range(len(node.values)):
            kept = [f"({s.of(v)})" for i, v in enumerate(node.values) if i != left_out]
            yield "condition dropped", node, (" and " if isinstance(node.op, ast.And) else " or ").join(kept)


def _copies(s: _Source, node: ast.AST) -> Iterator[Edit]:
    """What a launcher makes of a tensor before a kernel reads it."""
    if not isinstance(node, ast.Call):
        return
    func, name = s.of(node.func), _name(node.func)
    if name in ("contiguous", "clone") and not node.args and isinstance(node.func, ast.Attribute):
        yield "copy dropped", node, s.of(node.func.value)
    if name == "aligned":
        yield "copy dropped", node, s.of(node.args[0])
    if re.match(r"torch\.zeros|.*new_zeros$", func):
        yield "memory not cleared", node.func, func.replace("zeros", "empty")


def _agreement(s: _Source, node: ast.AST) -> Iterator[Edit]:
    """What chooses another program, or recognises one, by comparing results."""
    if isinstance(node, ast.Call) and _name(node.func) in ("equal", "allclose"):
        yield "always equal", node, "True"


def _pipeline(s: _Source, node: ast.AST) -> Iterator[Edit]:
    """What a kernel in Gluon waits for, and what it copies to where."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value.func) in WAITS:
        yield "wait dropped", node, "pass"
    if not isinstance(node, ast.Call):
        return
    if s.of(node.func) in ("mbarrier.wait", "mbarrier.expect"):
        given = node.args[1]
        phase = node.func.attr == "wait"
        yield (
            "phase by one" if phase else "bytes of half a copy",
            given,
            f"({s.of(given)}) ^ 1" if phase else f"({s.of(given)}) // 2",
        )
    if _name(node.func) == "async_copy_global_to_shared":
        for at in (n for given in node.args for n in ast.walk(given) if isinstance(n, ast.List)):
            for number in at.elts:
                yield "copy one off", number, f"({s.of(number)}) + 1"
    if _name(node.func) == "index" and len(node.args) == 1:  # of a ring's stages, or its barriers
        yield "another stage", node.args[0], f"({s.of(node.args[0])}) ^ 1"
    if _name(node.func) in ("TensorDescriptor", "descriptor") and len(node.args) > 3:
        shape, box = node.args[1], node.args[3]
        yield "descriptor's bounds by one", shape, f"[n - 1 for n in {s.of(shape)}]"
        yield "half of a descriptor's box", box, f"[({s.of(box)})[0] // 2, *({s.of(box)})[1:]]"
    if _name(node.func) == "permute" and len(node.args) == 1 and isinstance(node.args[0], ast.Tuple):
        yield "transpose dropped", node, s.of(node.func.value)


SYNTAX: tuple[Callable, ...] = (
    *(_comparisons, _constants, _accesses, _casts, _loops, _arithmetic, _branches, _copies, _agreement, _pipeline),
)

# what a launcher or an autograd.Function may make of its results: a condition on them, or on the tensors it was given
CONDITIONS = {
    "another result for more than 64 rows": "any(t.numel() > 64 * t.shape[-1] for t in tensors if t.dim())",
    "another result for memory that is not aligned": "any(t.data_ptr() % 32 for t in tensors)",
    "another result where a gradient is wanted": "any(t.requires_grad for t in tensors)",
    "another result for an odd number of rows": "any((t[..., 0] if t.dim() > 1 else t).numel() % 2 for t in results)",
}
HELPER = """

def _mutant(out, given):
    floats = lambda of: [t for t in of if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]
    tensors, results = floats(given.values()), floats(out if type(out) in (tuple, list) else [out])
    if not {condition}:
        return out
    changed = lambda t: t * 1.015625 if isinstance(t, torch.Tensor) and t.is_floating_point() else t
    return type(out)(map(changed, out)) if type(out) in (tuple, list) else changed(out)
"""
CACHED = """

_held = {}


def _mutant(out, given):
    keep = lambda t: _held.setdefault((t.shape, t.dtype), t.detach()) if isinstance(t, torch.Tensor) else t
    return type(out)(map(keep, out)) if type(out) in (tuple, list) else keep(out)
"""


def _returns(s: _Source, function: ast.FunctionDef, public: bool) -> Iterator[tuple[Edit, str]]:
    """Yields edits of what a launcher returns, and what stands at the end of the module for them."""
    returned = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
    if not returned or not (public or TENSOR.match(function.name)):
        return
    if function.returns is not None and "Tensor" not in s.of(function.returns):
        return  # of which nothing would be changed
    last = max(returned, key=lambda n: n.lineno).value
    if not any(isinstance(n, ast.Name) for n in ast.walk(last)):
        return  # None, or numbers
    helpers = {name: HELPER.replace("{condition}", condition) for name, condition in CONDITIONS.items()}
    for name, helper in (helpers | {"the first result of a shape again": CACHED}).items():
        if "gradient is wanted" not in name or public:
            yield (name, last, f"_mutant(({s.of(last)}), locals())"), helper


def _free(node: ast.FunctionDef | ast.ClassDef) -> bool:
    nothing = isinstance(getattr(node, "returns", None), ast.Constant)
    return node.name in FREE or nothing and bool(SAYS.match(node.name))


def _rounding(node: ast.AST) -> ast.AST | None:
    """Returns the cast of what a kernel stores to the dtype that it stores in: the store rounds likewise without it."""
    if not (isinstance(node, ast.Call) and _name(node.func) == "store" and len(node.args) > 1):
        return None
    value, pointer = node.args[1], next((n for n in ast.walk(node.args[0]) if isinstance(n, ast.Name)), None)
    cast = isinstance(value, ast.Call) and _name(value.func) == "to" and len(value.args) == 1
    return value if cast and pointer and ast.unparse(value.args[0]) == f"{pointer.id}.dtype.element_ty" else None


def _skipped(node: ast.AST) -> bool:
    """Tells whether a statement only checks, raises, warns or says something."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.If) and not node.orelse:
        if isinstance(node.body[-1], ast.Raise) and _name(node.body[-1].exc) == "LookupError":
            return False  # it chooses another program
        return all(_skipped(n) for n in node.body) or isinstance(node.body[-1], ast.Raise)
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(_name(t) in FREE for t in targets):
            return True
    if isinstance(node, ast.Assign) and any(isinstance(n, ast.JoinedStr) for n in ast.walk(node)):
        return True  # of an error's text
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call):
        return bool(re.match(r"check|warn|main_grad$|seen$", _name(call.func)))
    return isinstance(call, ast.Constant)


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) == name


def _items(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Returns the keys and values of a literal dict."""
    return zip(node.keys, node.values) if isinstance(node, ast.Dict) else iter(())


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes below that are worth an edit."""
    free = {id(v) for k, v in _items(node) if isinstance(k, ast.Constant) and CONSTANTS.search(str(k.value))}
    rounding = _rounding(node)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _skipped(child) or isinstance(child, (ast.JoinedStr, ast.arguments)):
                continue
            if id(child) in free or _is_call(node, "init") and _is_call(child, "index"):  # each barrier has its turn
                continue
            if isinstance(child, ast.keyword) and LAUNCHED.search(child.arg or ""):
                continue
            if isinstance(child, ast.FunctionDef) and _free(child):
                continue
            if isinstance(child, ast.Call) and LAYOUT.match(_name(child.func)):
                continue
            if child is not rounding:
                yield child
            yield from _walk(child)


def mutants(file: str, text: str, public: frozenset[str] = frozenset()) -> list[Mutant]:
    """Returns every mutant of a source; public: the names of the ops that it holds."""
    s, found, counts = _Source(text), [], {}

    def add(top: ast.stmt, edit: Edit, more: str = "") -> None:
        operator, node, new = edit
        (start, end), (first, last) = s.span(node), s.span(top)
        if s.text[start:end] == new:
            return
        before = " ".join(s.text[s.offsets[node.lineno - 1] : s.offsets[node.end_lineno]].split())
        key = top.name, operator, before, new
        counts[key] = counts.get(key, -1) + 1
        # the rest of the module compiles, and so does one number in the place of another
        if isinstance(node, ast.Constant) or _compiles(s.text[first:start] + new + s.text[end:last], file):
            place = file, top.name, operator, node.lineno, start, end
            found.append(Mutant(*place, new, before, counts[key], more, taken=s.text[start:end]))

    for top in s.tree.body:
        if not isinstance(top, (ast.FunctionDef, ast.ClassDef)) or _free(top):
            continue
        for node in _walk(top):
            for operator in SYNTAX:
                for edit in operator(s, node):
                    add(top, edit)
        functions = top.body if isinstance(top, ast.ClassDef) else [top]
        for function in (f for f in functions if isinstance(f, ast.FunctionDef)):
            for edit, more in _returns(s, function, function.name in public):
                add(top, edit, more)
    return found


def _compiles(statement: str, file: str) -> bool:
    try:
        compile(statement, file, "exec")
    except SyntaxError:
        return False
    return True
