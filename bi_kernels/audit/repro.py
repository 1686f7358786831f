"""Minimal reproducers: a standalone script of a few lines that shows a drift, shrunk in rows and inputs.

A token that drifts between two layouts drifts between two calls. The script computes that one token in both, with
nothing else but filler in the other rows; the search makes the calls as small as the drift allows.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bi_kernels.audit.candidates import Candidate
from bi_kernels.audit.drift import compare
from bi_kernels.audit.judge import Row, Subject
from bi_kernels.audit.layouts import Call, layouts
from bi_kernels.contract import SWEEP, dtype_name

FILLERS = {"zeros": "torch.zeros(rows, {dims})", "random": "torch.randn(rows, {dims})",
           "NaN": "torch.full((rows, {dims}), float('nan'))"}


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

    def results(self, s: Subject) -> tuple[torch.Tensor, torch.Tensor]:
        """The token's result in both calls, exactly as the script computes it."""
        p = s.problem
        torch.manual_seed(self.seed)
        make = lambda *shape: torch.randn(*shape)
        token = {k: make(*p._shape(v)) > 0.5 if v.endswith(":bool") else make(*p._shape(v)).to(p.input_dtype)
                 for k, v in p.op.tokens.items()}
        shared = {k: make(*p._shape(v)).to(p.dtype).to(p.device) for k, v in p.op.shared.items()}
        if self.cancel:
            half = p.reduction // 2
            for t in token.values():
                t[half:2 * half], t[half - 1], t[-1] = -t[:half], 0, 2**-12
            for t in shared.values():
                if t.dim() == 2:
                    t[:, half:2 * half] = t[:, :half]
        shared = {k: t.t().contiguous() if p.op.shared[k].endswith(":t") else t for k, t in shared.items()}
        out = []
        for place in (self.a, self.b):
            torch.manual_seed(self.seed + 1)
            tokens = {}
            for k, t in token.items():
                if t.dtype == torch.bool:
                    x = torch.zeros(place.rows, *t.shape, dtype=torch.bool)
                else:
                    x = {"zeros": torch.zeros, "random": torch.randn,
                         "NaN": lambda *n: torch.full(n, float("nan"))}[self.filler](place.rows, *t.shape).to(t.dtype)
                x[place.at] = t
                tokens[k] = x.to(p.device)
            positions = torch.full((place.rows, ), self.position, device=p.device)
            out.append(s.call(tokens, shared, place.lead, positions)[place.at])
        return out[0], out[1]

    def drifts(self, s: Subject) -> bool:
        try:
            a, b = self.results(s)
        except Exception:
            return False
        return bool(compare(a, b).mismatches)


def _places(s: Subject, row: Row) -> tuple[Place, Place, int] | None:
    """Two calls that give the row's first differing token different bits."""
    token = row.first_index[0]
    if row.layout == "rows":
        return Place((row.rows, ), token), Place((s.largest, ), token), token
    if ":" not in row.layout and row.layout not in layouts(s.lengths, s.problem.seed):
        return None
    every = layouts(s.lengths, s.problem.seed)
    position = int(np.concatenate([np.arange(n) for n in s.lengths])[token])

    def place(calls: list[Call]) -> Place:
        call = next(c for c in calls if (c.index == token).any())
        return Place(call.index.shape, int(np.flatnonzero(call.index.reshape(-1) == token)[0]))

    return place(every[row.layout]), place(every[row.against]), position


def shrink(s: Subject, row: Row) -> Recipe | None:
    """The smallest recipe found that still drifts, or None."""
    found = _places(s, row) if row.first_index and row.layout in ("rows", *layouts(s.lengths, s.problem.seed)) else None
    if found is None:
        return None
    a, b, position = found
    sums = (False, True) if s.problem.reduction > 1 else (False, )
    recipe = next((r for filler in FILLERS for cancel in sums for seed in (0, 2, 4)
                   for r in (Recipe(a, b, filler, seed, position, cancel), ) if r.drifts(s)), None)
    if recipe is None:
        return None
    for side in ("a", "b"):
        place = getattr(recipe, side)
        for n in [n for n in SWEEP["rows"] if n <= place.rows]:
            smaller = next((r for at in dict.fromkeys((0, min(place.at, n - 1), n - 1))
                            for r in (replace(recipe, **{side: Place((n, ), at)}), ) if r.drifts(s)), None)
            if smaller:
                recipe = smaller
                break
    simple = replace(recipe, position=0)
    return simple if simple.drifts(s) else recipe


def script(s: Subject, candidate: Candidate, recipe: Recipe) -> str:
    """The text of the standalone script."""
    p, op = s.problem, s.problem.op
    dtype, device = str(p.dtype), f'"{p.device.type}"'
    interpret = ["import os", "", 'os.environ["TRITON_INTERPRET"] = "1"', ""] if p.device.type == "cpu" else []
    lines = [f"# {op.name}{' ' + p.case if p.case else ''}, {dtype_name(p.dtype)}: one token, computed in a call of "
             f"{recipe.a.lead} and in one of {recipe.b.lead}; the other rows hold {recipe.filler}.", *interpret,
             "import torch", candidate.imports(op), *["from bi_kernels import rope_table"] * op.positions, "",
             f"torch.manual_seed({recipe.seed})"]
    dims = {k: ", ".join(map(str, p._shape(v))) for k, v in (op.tokens | op.shared).items()}
    for k, v in op.tokens.items():
        lines.append(f"{k} = torch.randn({dims[k]})" + (" > 0.5" if v.endswith(":bool") else f".to({p.input_dtype})"))
    if recipe.cancel:
        half = p.reduction // 2
        lines += ["# the sum grows over the first half of k and vanishes over the second, but for the last term",
                  *(f"{k}[{half}:{2 * half}], {k}[{half - 1}], {k}[-1] = -{k}[:{half}], 0, 2**-12" for k in op.tokens)]
    for k, v in op.shared.items():
        lines.append(f"{k} = torch.randn({dims[k]}).to({dtype}).to({device})")
        if recipe.cancel and len(p._shape(v)) == 2:
            lines.append(f"{k}[:, {half}:{2 * half}] = {k}[:, :{half}]")
        if v.endswith(":t"):
            lines.append(f"{k} = {k}.t().contiguous()")
    arguments = [*op.shared, *(f"{k}={v!r}" for k, v in op.constants.items())]
    if op.casts:
        arguments.append(f"dtype={dtype}")
    if op.positions:
        arguments.append(f"table=rope_table({max(SWEEP['rows'])}, {p.dims['head_dim']}, device={device})")
        arguments.append(f"positions=torch.full(lead, {recipe.position}, device={device})")
    lines += ["", "", "def result(lead, at):", "    rows = torch.Size(lead).numel()",
              f"    torch.manual_seed({recipe.seed + 1})"]
    for k, v in op.tokens.items():
        filler = (f"torch.zeros(rows, {dims[k]}, dtype=torch.bool)" if v.endswith(":bool") else
                  FILLERS[recipe.filler].format(dims=dims[k]) + f".to({p.input_dtype})")
        lines += [f"    {k}_rows = {filler}", f"    {k}_rows[at] = {k}"]
    calls = [f"{k}_rows.to({device}).reshape(*lead, {dims[k]})" for k in op.tokens]
    lines += [f"    return fn({', '.join(calls + arguments)}).flatten(0, len(lead) - 1)[at]", "", "",
              f"a, b = result({recipe.a.lead}, {recipe.a.at}), result({recipe.b.lead}, {recipe.b.at})",
              f"bits = torch.int{torch.finfo(p.dtype).bits}",
              "differ = a.view(bits) != b.view(bits)",
              'print(f"{int(differ.sum())} of {a.numel()} elements differ; max abs {(a - b).abs().max().item():.3g}")',
              "raise SystemExit(bool(differ.any()))", ""]
    return "\n".join(lines)


def export(s: Subject, candidate: Candidate, rows: list[Row], folder: Path) -> Path | None:
    """Writes the reproducer of the first drift among `rows` (all of one subject) and names it in each of them."""
    drifting = sorted((r for r in rows if r.verdict != "pass" and r.relation == "invariance" and r.mismatches),
                      key=lambda r: (r.layout != "rows", r.rows))
    for row in drifting[:4]:
        recipe = shrink(s, row)
        if recipe is None:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(filter(None, (s.problem.op.name, s.problem.case, dtype_name(s.problem.dtype))))
        path = folder / f"{name}.py"
        path.write_text(script(s, candidate, recipe), encoding="utf-8")
        for r in drifting:
            r.repro = f"python {folder.name}/{path.name}"
        return path
    return None
