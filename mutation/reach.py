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


def sources() -> list[Path]:
    """Returns the files whose code is mutated: not the one that chooses configurations, which are free."""
    files = [f for f in sorted((package() / "ops").rglob("*.py")) if f.name not in ("__init__.py", "cost.py")]
    return [*files, package() / "tokens.py"]


def on_hopper(file: str) -> bool:
    """Tells whether a file below the package holds kernels for sm_90 alone, by its name or its folder's."""
    return any(part.startswith("hopper") for part in PurePosixPath(file).parts)


def defined(node: ast.stmt) -> list[str]:
    """Returns the names that a statement of a module's top level defines."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []


@cache
def graph() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Returns {(file, name of its top level): those that it mentions}."""
    found, imported = {}, {}
    for path in sources():
        file = path.relative_to(package()).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bi_kernels."):
                home = node.module.removeprefix("bi_kernels.").replace(".", "/") + ".py"
                imported |= {(file, a.asname or a.name): (home, a.name) for a in node.names}
        for node in tree.body:
            words = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node)}
            found |= {(file, name): {(file, word) for word in words} for name in defined(node)}
    return {own: {imported.get(end, end) for end in ends} & found.keys() - {own} for own, ends in found.items()}


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
