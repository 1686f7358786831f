"""Finds which ops of the registry reach a function: a graph of the names that each function mentions."""

import ast
from functools import cache
from pathlib import Path, PurePosixPath

import bi_kernels
from bi_kernels.audit.registry import OPS

# An op's own file is judged first; of what many ops reach, these say most and take least.
FIRST = ("rms_norm", "linear_bias", "embedding", "token_logprob", "lm_head_logprob", "matmul", "qk_norm", "attention")
MOST = 4  # ops that a mutant outside of their own files is judged by


def package() -> Path:
    return Path(bi_kernels.__file__).parent


def sources(hopper: bool) -> list[Path]:
    """Returns the files whose code is mutated, but for what chooses configurations, which are free; those of sm_90
    alone where there is one."""
    files = [f for f in sorted((package() / "ops").rglob("*.py")) if f.name not in ("__init__.py", "cost.py")]
    kept = [f for f in files if hopper or not on_hopper(f.relative_to(package()).as_posix())]
    return [*kept, package() / "tokens.py"]


def on_hopper(file: str) -> bool:
    """Returns whether a file below the package is of kernels that run on sm_90 alone: so its name, or its folder's,
    begins."""
    return any(part.startswith("hopper") for part in PurePosixPath(file).parts)


@cache
def graph() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Returns {(file, name of its top level): those that it mentions}."""
    root, own, mentioned = package(), {}, {}
    for path in sources(hopper=True):
        file = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            for name in _defined(node):
                own[file, name] = node
        mentioned[file] = _imported(tree)
    found = {}
    for (file, name), node in own.items():
        words = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        words |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        ends = {mentioned[file].get(w, (file, w)) for w in words}
        found[file, name] = {end for end in ends if end in own and end != (file, name)}
    return found


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]


def _imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Returns {name: (file, name there)} of what a module takes from the package."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bi_kernels."):
            file = node.module.removeprefix("bi_kernels.").replace(".", "/") + ".py"
            found |= {a.asname or a.name: (file, a.name) for a in node.names}
    return found


@cache
def reached(op: str) -> frozenset[tuple[str, str]]:
    """Returns what an op reaches from its public function."""
    function = OPS[op].function or op
    file = f"{bi_kernels._MODULE.get(function, f'ops.{function}').replace('.', '/')}.py"
    seen, todo = set(), [(file, function)]
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            todo += graph().get(at, ())
    return frozenset(seen)


def ops_for(file: str, function: str) -> list[str]:
    """Returns the ops that a mutant of a function is judged by, in their order."""
    every = [op for op in OPS if (file, function) in reached(op)]
    home = lambda op: f"{bi_kernels._MODULE[OPS[op].function or op].replace('.', '/')}.py"
    mine = [op for op in every if home(op) == file]
    rest = sorted((op for op in every if op not in mine), key=lambda op: FIRST.index(op) if op in FIRST else len(FIRST))
    return [*mine, *rest[: max(0, MOST - len(mine))]]
