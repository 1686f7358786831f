"""Writes a standalone script that shows a drift, from a recipe and its template.

The search for a small recipe runs the script's own lines, so what is written has drifted here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bi_kernels import checks
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.problem.call_layouts import Call, layouts
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.reproduce.imports import import_of
from bi_kernels.contract import dtype_name

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    auto_reload=False,
)
TEMPLATES.filters["repr"] = repr


@dataclass(frozen=True)
class Recipe:
    """Two computations that ought to give the same bits, which a template writes out as the lines of a script."""

    template: ClassVar[str]

    @property
    def says(self) -> str:
        """Says in half a sentence what the two results, `a` and `b`, are."""
        raise NotImplementedError

    def values(self, s) -> dict:
        """Returns what the template needs of the subject `s`, beside the recipe itself."""
        raise NotImplementedError

    def render(self, s, **script) -> str:
        """Returns the lines that leave the results in `a` and `b`; given the candidate's import, all of the script."""
        return TEMPLATES.get_template(self.template).render(recipe=self, **self.values(s), **script)

    def results(self, s, **given) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the script's own lines in this process; given: further names that they see."""
        scope = {"fn": s.function, "torch": torch} | given
        exec(self.render(s), scope)
        return scope["a"].detach(), scope["b"].detach()

    def drifts(self, s, **given) -> bool:
        """Returns True where the results differ in a bit; False where they do not, and where the lines raise."""
        try:
            return bool(compare(*self.results(s, **given)).mismatches)
        except Exception:
            return False


def calls_of(s: Subject, row: Row) -> tuple[int, list[int], list[Call]] | None:
    """Returns the row's first differing token, the lengths of the samples, and the two calls that give the token
    different bits; None for a layout that is not among those by name."""
    every, token = layouts(s.lengths, s.problem.seed), row.first_index[0]
    if row.layout == "rows":
        return token, [s.largest], [Call(np.arange(m), (0, m)) for m in (row.rows, s.largest)]
    if row.layout not in every:
        return None
    names = row.layout, row.against
    return token, list(s.lengths), [next(c for c in every[name] if (c.index == token).any()) for name in names]


Found = TypeVar("Found", bound=Recipe)


def first(recipes: Iterable[Found], *subject) -> Found | None:
    """Returns the first recipe that drifts. They come smallest first: each trial runs kernels, so there are few."""
    return next((r for r in recipes if r.drifts(*subject)), None)


def write(recipe: Recipe, s, title: str, candidate: str, path: Path, rows: Sequence[Row], **values) -> Path:
    """Writes the script and names it in `rows`; candidate: the lines that import it as `fn`."""
    title = " ".join(f"{title}: {recipe.says}".split())
    path.parent.mkdir(parents=True, exist_ok=True)
    text = recipe.render(s, title=title, interpreted=checks.INTERPRETED, candidate=candidate, **values)
    path.write_text(text, encoding="utf-8")
    for r in rows:
        r.repro = f"python {path.parent.name}/{path.name}"
    return path


def write_op(
    recipe: Recipe, s: Subject, candidate: Candidate, folder: Path, rows: Sequence[Row], suffix: str = ""
) -> Path:
    """Writes the script of an op's candidate, named after op, case and dtype."""
    p = s.problem
    path = folder / ("-".join(filter(None, (p.op.name, p.case, dtype_name(p.dtype), suffix))) + ".py")
    title = f"{' '.join(filter(None, (p.op.name, p.case)))}, {dtype_name(p.dtype)}"
    return write(recipe, s, title, import_of(candidate, p.op, folder), path, rows)
