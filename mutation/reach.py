"""Finds which ops of the registry reach a function: a graph of the names that each function mentions."""

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath

import bi_kernels
from bi_kernels.audit.registry import OPS

# An op's own file is judged first; of what many ops reach, these say most and take least.
FIRST = ("rms_norm", "linear_bias", "embedding", "token_logprob", "lm_head_logprob", "matmul", "qk_norm", "attention")
MOST = 4  # ops that a mutant outside of their own files is judged by
# Asked at a model's sizes besides, on a GPU: tiny ones hardly reach the programs for sm_90. What replaces a problem's
# fields, and whether values are held against fp64, which the logits of a whole vocabulary leave no memory for
LARGE: dict[str, tuple[dict, bool]] = {
    "linear": ({}, True),
    "linear_bias": ({}, True),
    "routed_linear": ({}, True),  # `torch._grouped_mm` among the programs
    "rms_norm": ({"sizes": {"hidden": 24_576}}, True),  # a block of so wide a row fills shared memory
    "attention": ({}, True),
    "attention_soft_cap": ({}, True),
    "attention_sinks": ({"op": replace(OPS["attention_sinks"], constants={})}, True),  # sm_90's kernels have no chunks
    "token_logprob": ({}, False),  # views of rows that are no multiple of 16
    "lm_head_logprob": ({}, False),
}
# what no op of the registry reaches, or not all of it, and the name of what is asked: see questions.MODELS
MODELS = {"ops/grouped/": "experts", "mode/": "mode", "integrations/transformers/": "transformers"}
ALL, SOME, SM_90 = "all", "some", "sm_90"  # how much an op is asked; see `questions.asked`
# only checks or says something; or needs several processes
LEFT = "check.py", "report.py", "ranks.py", "data_parallel.py", "__init__.py"


def package() -> Path:
    return Path(bi_kernels.__file__).parent


def sources() -> list[Path]:
    """Returns the files whose code is mutated: not the one that chooses configurations, which are free."""
    ops = [f for f in sorted((package() / "ops").rglob("*.py")) if f.name not in ("__init__.py", "cost.py")]
    models = (sorted((package() / folder).glob("*.py")) for folder in ("mode", "integrations/transformers"))
    return [*ops, package() / "tokens.py", *(f for found in models for f in found if f.name not in LEFT)]


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
    """Returns what a mutant of a function is judged by, in its order: ops of the registry, and names of MODELS."""
    every = [op for op in OPS if (file, function) in reached(op)]
    first = lambda op: FIRST.index(op) if op in FIRST else len(FIRST)
    if on_hopper(file):
        return sorted((op for op in every if op in LARGE), key=first)
    home = lambda op: f"{bi_kernels._MODULE[OPS[op].function or op].replace('.', '/')}.py"
    mine = [op for op in every if home(op) == file]
    rest = sorted((op for op in every if op not in mine), key=first)
    models = [name for folder, name in MODELS.items() if file.startswith(folder)]
    return [*mine, *rest[: max(0, MOST - len(mine))], *models]
