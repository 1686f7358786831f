"""Minimal reproducers: a standalone script of a few lines that shows a drift, shrunk in rows and inputs.

A token that drifts between two layouts drifts between two calls. The script computes that one token in both, with
nothing else but filler in the other rows; the search, which runs the script's own lines, makes the calls as small as the
drift allows.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bi_kernels.audit.evidence.drift import script_drifts
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.problem.call_layouts import Call, layouts
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.reproduce import attention as attention_repro
from bi_kernels.contract import SWEEP, dtype_name, evaluate

FILLERS = ("zeros", "random", "NaN")
PRINTED = (
    "bits = {{1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}}[{a}.element_size()]",
    "differ = {a}.view(bits) != {b}.view(bits)",
    "most = ({a}.double() - {b}.double()).abs().max().item()",
    'print(f"{{int(differ.sum())}} of {{{a}.numel()}} elements differ; max abs {{most:.3g}}")',
    "raise SystemExit(bool(differ.any()))",
    "",
)


@dataclass(frozen=True)
class Place:
    """A call of leading shape `lead` in which the token stands at flat row `at`."""

    lead: tuple[int, ...]
    at: int

    @property
    def rows(self) -> int:
        return int(np.prod(self.lead))


@dataclass(frozen=True)
class Recipe:
    a: Place
    b: Place
    filler: str
    seed: int
    position: int = 0
    cancel: bool = False  # the token's sum grows and then nearly vanishes: another order shows in the last bits
    several: bool = False  # outputs, which are stacked

    @property
    def says(self) -> str:
        return f"one token, computed in a call of {self.a.lead} and in one of {self.b.lead}; the other rows hold {self.filler}."

    def drifts(self, s: Subject) -> bool:
        """Whether the token's result differs in the two calls, computed by the script's own lines."""
        return script_drifts(body(s, self), s.function)


def _places(s: Subject, row: Row) -> tuple[Place, Place, int] | None:
    """Two calls that give the row's first differing token different bits."""
    token = row.first_index[0]
    if row.layout == "rows":
        return Place((row.rows,), token), Place((s.largest,), token), token
    every = layouts(s.lengths, s.problem.seed)
    if row.layout not in every:
        return None
    position = int(np.concatenate([np.arange(n) for n in s.lengths])[token])

    def place(calls: list[Call]) -> Place:
        call = next(c for c in calls if (c.index == token).any())
        return Place(call.index.shape, int(np.flatnonzero(call.index.reshape(-1) == token)[0]))

    return place(every[row.layout]), place(every[row.against]), position


def shrink(s: Subject, row: Row) -> Recipe | None:
    """The smallest recipe found that still drifts, or None."""
    found = _places(s, row) if row.first_index else None
    if found is None:
        return None
    a, b, position = found
    tokens, shared = s.inputs("normal", 1)
    out = s.forward(tokens, shared, (1,), torch.zeros(1, dtype=torch.int64, device=s.problem.device))
    sums = (False, True) if s.problem.reduction > 1 else (False,)
    recipe = next(
        (
            r
            for filler in FILLERS
            for cancel in sums
            for seed in (0, 2, 4)
            for r in (Recipe(a, b, filler, seed, position, cancel, not isinstance(out, torch.Tensor)),)
            if r.drifts(s)
        ),
        None,
    )
    if recipe is None:
        return None
    for side in ("a", "b"):
        place = getattr(recipe, side)
        for n in [n for n in SWEEP["rows"] if n <= place.rows]:
            smaller = next(
                (
                    r
                    for at in dict.fromkeys((0, min(place.at, n - 1), n - 1))
                    for r in (replace(recipe, **{side: Place((n,), at)}),)
                    if r.drifts(s)
                ),
                None,
            )
            if smaller:
                recipe = smaller
                break
    simple = replace(recipe, position=0)
    return simple if simple.drifts(s) else recipe


def body(s: Subject, recipe: Recipe) -> list[str]:
    """The lines that leave the token's result of both calls in `a` and `b`; they need `torch` and `fn`."""
    p, op, device = s.problem, s.problem.op, f'"{s.problem.device.type}"'
    dims = {
        k: "" if v.endswith(":id") else ", ".join(map(str, p._shape(v))) for k, v in (op.tokens | op.shared).items()
    }

    def drawn(dims_of: str, shape: str, filler: str = "random") -> str:
        if dims_of.endswith(":id"):
            top = p._shape(dims_of)[0] if filler == "random" else 1
            return f"torch.randint({top}, ({shape}))"
        if dims_of.endswith(":bool"):
            return f"torch.randn({shape}) > {0.5 if filler == 'random' else 'torch.inf'}"
        make = {
            "zeros": f"torch.zeros({shape})",
            "random": f"torch.randn({shape})",
            "NaN": f"torch.full(({shape}), float('nan'))",
        }[filler]
        return make + f".to({p.input_dtype})"

    lines = ["from bi_kernels import rope_table", ""] * op.positions + [f"torch.manual_seed({recipe.seed})"]
    lines += [f"{k} = {drawn(v, dims[k])}" for k, v in op.tokens.items()]
    half = p.reduction // 2
    if recipe.cancel:
        lines += [
            "# the sum grows over the first half of k and vanishes over the second, but for the last term",
            *(
                f"{k}[{half}:{2 * half}], {k}[{half - 1}], {k}[-1] = -{k}[:{half}], 0, 2**-12"
                for k in op.tokens
                if dims[k]
            ),
        ]
    for k, v in op.shared.items():
        scaled = "" if op.scale == "1" else f".mul({float(evaluate(op.scale, **p.dims))})"
        lines.append(f"{k} = torch.randn({dims[k]}){scaled}.to({p.dtype}).to({device})")
        if recipe.cancel and len(p._shape(v)) == 2:
            lines.append(f"{k}[:, {half}:{2 * half}] = {k}[:, :{half}]")
        if v.endswith(":t"):
            lines.append(f"{k} = {k}.t().contiguous()")
    lines += [
        "",
        "",
        "def result(lead, at):",
        "    rows = torch.Size(lead).numel()",
        f"    torch.manual_seed({recipe.seed + 1})",
    ]
    for k, v in op.tokens.items():
        lines += [f"    {k}_rows = {drawn(v, f'rows, {dims[k]}', recipe.filler)}", f"    {k}_rows[at] = {k}"]
    given = {k: f"{k}_rows.to({device}).reshape(*lead, {dims[k]})" for k in op.tokens} | {k: k for k in op.shared}
    arguments = [given[k] for k in op.order or given] + [f"{k}={v!r}" for k, v in op.constants.items()]
    if op.casts:
        arguments.append(f"dtype={p.dtype}")
    if op.positions:
        arguments += [
            f"table=rope_table({max(SWEEP['rows'])}, {p.dims['head_dim']}, device={device})",
            f"positions=torch.full(lead, {recipe.position}, device={device})",
        ]
    lines.append(f"    y = fn({', '.join(arguments)})")
    if recipe.several:
        lines.append("    y = torch.stack(tuple(y), -1)")
    return [
        *lines,
        "    return y.flatten(0, len(lead) - 1)[at]",
        "",
        "",
        f"a, b = result({recipe.a.lead}, {recipe.a.at}), result({recipe.b.lead}, {recipe.b.at})",
    ]


def write(s: Subject, candidate: Candidate, what: str, lines: list[str], pair: tuple[str, str], path: Path) -> None:
    """Writes a script: a comment that says `what` it shows, the candidate as `fn`, the lines, and whether `pair` differs."""
    p = s.problem
    interpret = ["import os", "", 'os.environ["TRITON_INTERPRET"] = "1"', ""] if p.device.type == "cpu" else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join(
            [
                f"# {p.op.name}{' ' + p.case if p.case else ''}, {dtype_name(p.dtype)}: {what}",
                *interpret,
                "import torch",
                candidate.imports(p.op, path.parent),
                *lines,
                *(line.format(a=pair[0], b=pair[1]) for line in PRINTED),
            ]
        ),
        encoding="utf-8",
    )


def export(s: Subject, candidate: Candidate, rows: list[Row], folder: Path) -> Path | None:
    """Writes the reproducer of the first drift among `rows` (all of one subject) and names it in each of them."""
    drifting = sorted(
        (r for r in rows if r.verdict != "pass" and r.relation == "invariance" and r.mismatches),
        key=lambda r: (r.layout != "rows", r.rows),
    )
    for row in drifting[:4]:
        kind = attention_repro if s.problem.op.cache else sys.modules[__name__]
        recipe = kind.shrink(s, row)
        if recipe is None:
            continue
        path = folder / (
            "-".join(filter(None, (s.problem.op.name, s.problem.case, dtype_name(s.problem.dtype)))) + ".py"
        )
        write(s, candidate, recipe.says, kind.body(s, recipe), ("a", "b"), path)
        for r in drifting:
            r.repro = f"python {folder.name}/{path.name}"
        return path
    return None
