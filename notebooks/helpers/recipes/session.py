"""The session of the audit of recipes: ours is judged, and what others do is found out beside it, each in a process of
its own."""

import json
import re
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from bi_kernels.audit.axes import Side
from bi_kernels.audit.compare import Drift
from bi_kernels.audit.executor import Died, Process, begin
from bi_kernels.audit.findings import NEEDS_FIX, PASS, Row, needs_fix, up_to_a_drift
from bi_kernels.audit.parameters import choose, read
from bi_kernels.audit.session import Session
from bi_kernels.audit.targets.base import Target
from bi_kernels.audit.targets.candidates import Candidate
from bi_kernels.audit.targets.op import CANCELLING
from bi_kernels.audit.timing import GPU
from helpers.recipes import script, summary
from helpers.recipes.products import BROKEN, DIRECTIONS, ON_A_CPU, OURS, PLAIN, THEIRS, Recipe, cells, settings

RELATION = {"forward": "invariance", "dX": "gradient invariance"}
TENSOR = {"forward": "out", "dX": "dx"}
REPRODUCER = "reproducer"


def start(audit: str, given: dict) -> "RecipesSession":
    """Begins the audit of recipes with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    return RecipesSession(audit, asdict(p), choose(p.device, p.shapes), Candidate("bi_kernels", {}))


class Linear(Target):
    """A linear layer of one shape, whose rows are about `bi_kernels`, or about a control."""

    sides = {Side.INPUT: ("x",)}

    def __init__(self, case: str, dtype: str, device: str, command: str):
        self.whose, self.command = ("recipes", "linear", case, "bi_kernels", dtype, device), command


@dataclass
class RecipesSession(Session):
    """A session that judges ours as any audit does. Of the recipes it says where they drift, which fails nothing: that
    plain cuBLAS does, at shapes that are not tiny, is a control."""

    found: dict[str, list[dict]] = field(default_factory=dict)  # cells, by recipe
    why: dict[str, str] = field(default_factory=dict)  # of a recipe whose process left nothing
    scripts: dict[str, dict] = field(default_factory=dict)  # by recipe: the script that shows its drift, what it said

    @cached_property
    def told(self) -> dict:
        """Returns what a process is told: see `products.cells`."""
        p = self.parameters
        return settings(p["shapes"]) | {"device": self.device.type, "dtype": p["dtype"], "seed": p["seed"]}

    @property
    def full(self) -> bool:
        """Tells whether the recipes are what they are called: on a GPU, at shapes at which cuBLAS is known to split."""
        return self.on_gpu and self.parameters["shapes"] != "tiny"

    @property
    def theirs(self) -> tuple[Recipe, ...]:
        """Returns the recipes that are asked; without a GPU there is no cuBLAS that one could reach."""
        return THEIRS if self.on_gpu else (ON_A_CPU,)

    def judge(self) -> list[Row]:
        """Runs ours and every recipe; returns the rows of ours, and one of each recipe that left nothing, which it
        records."""
        recipes = OURS, *self.theirs
        measure = lambda recipe: begin(
            f"{cells.__module__}:measured", recipe, self.told, environment=recipe.environment
        )
        if self.on_gpu:
            with GPU.alone():  # one at a time, for they are timed
                for recipe in recipes:
                    self._take(recipe, measure(recipe))
        else:
            for recipe, worker in [(recipe, measure(recipe)) for recipe in recipes]:
                self._take(recipe, worker)
        rows = [*self._rows(OURS.name, self.told["shapes"], DIRECTIONS), *self._unmeasured()]
        self.add(rows)
        return rows

    def _take(self, recipe: Recipe, worker: Process) -> None:
        try:
            self.found[recipe.name] = worker.result()
        except Died as died:
            self.found[recipe.name], self.why[recipe.name] = [], str(died).partition(": ")[2]

    def _who(self, case: str) -> Linear:
        return Linear(case, self.parameters["dtype"], self.device_label, self.command)

    def _rows(self, name: str, cases: Collection[str], directions: Collection[str]) -> Iterator[Row]:
        """Yields a row of every shape, direction and M: what was found there, or that nothing was."""
        key = lambda cell: (cell["case"], cell["direction"], cell["M"])
        drifts: dict[tuple, Drift] = {key(c): c["drift"] for c in self.found.get(name, ()) if "drift" in c}
        raised = {(c["case"], c["direction"]): c["why"] for c in self.found.get(name, ()) if "why" in c}
        for case in cases:
            for direction in directions:
                why = raised.get((case, direction)) or self.why.get(name) or "was not run"
                for m in self.told["rows"]:
                    drift = drifts.get((case, direction, m))
                    about = {"tensor": TENSOR[direction], "detail": "" if drift else why}
                    said = {"against": f"{self.told['largest']} rows", "inputs": CANCELLING, "rows": m} | about
                    yield self._who(case).row(RELATION[direction], "rows", drift, **said)

    def _unmeasured(self) -> Iterator[Row]:
        """Yields a row of every recipe of which something was not measured: the document is less than it says."""
        for recipe in self.theirs:
            parts = [self.why.get(recipe.name), *(c["why"] for c in self.found[recipe.name] if "why" in c)]
            if said := [part for part in parts if part]:
                yield self._who("").row(REPRODUCER, recipe.name, None, detail=f"not measured: {said[0]}")

    def controls(self) -> list[Row]:
        """Judges what has to drift, forward and in dX: a linear that is broken on purpose, and, where the recipes are
        what they are called, plain cuBLAS."""
        first = next(iter(self.told["shapes"].items()))
        self.found[BROKEN.name] = [*cells(BROKEN, self.told | {"shapes": dict([first]), "timed": []})]
        asked = {BROKEN.name: [first[0]]} | ({PLAIN.name: [*self.told["shapes"]]} if self.full else {})
        rows = []
        for name, cases in asked.items():
            for direction in DIRECTIONS:
                mine = up_to_a_drift(self._rows(name, cases, [direction]))
                shown = next((r for r in reversed(mine) if r.mismatches), (needs_fix(mine) or mine)[0])
                rows.append(replace(shown, candidate=name, repro="").as_control())
        self.add(rows)
        return rows

    def reproduce(self) -> list[Row]:
        """Writes a script of each recipe's largest drift, and runs it in a process of its own; records whether it
        shows one. Nothing where the recipes are not what they are called."""
        rows = []
        torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory() as scratch:
            for recipe in THEIRS if self.full else ():
                drifting = [c for c in self.found[recipe.name] if "drift" in c and c["drift"].mismatches]
                if not drifting:
                    continue
                share = lambda c: c["drift"].mismatches / c["drift"].elements
                worst = max(drifting, key=lambda c: (share(c), -c["drift"].elements))
                path = Path(self.out or scratch, "repro", re.sub(r"\W+", "_", recipe.name) + ".py")
                path.parent.mkdir(exist_ok=True)
                shape = worst["M"], *self.told["shapes"][worst["case"]]
                path.write_text(script.text(recipe, worst["direction"], shape, self.told), encoding="utf-8")
                shows, last = script.run(path)
                name = f"{path.parent.name}/{path.name}"
                self.scripts[recipe.name] = {"script": name, "shown": last}
                row = self._who(worst["case"]).row(REPRODUCER, recipe.name, None, verdict=PASS if shows else NEEDS_FIX)
                more = {"rows": worst["M"], "inputs": CANCELLING, "detail": last, "repro": f"python {name}"}
                rows.append(replace(row, **more))
        self.add(rows)
        return rows

    def document(self) -> dict:
        """Returns what was found of ours and of every recipe; leaves it in a file, and in another the report's first
        sentence."""
        names = "largest", "rows", "shapes"
        found = {"device": self.device_name, "torch": torch.__version__, "dtype": self.parameters["dtype"]}
        found |= {name: self.told[name] for name in names} | {"recipes": {}}
        for recipe in (*self.theirs, OURS):
            of = {"what": recipe.what} | summary.collected(self.found[recipe.name])
            of["why"] += [self.why[recipe.name]] if recipe.name in self.why else []
            found["recipes"][recipe.name] = of | self.scripts.get(recipe.name, {})
        if self.out:
            text = json.dumps(found, indent=1, ensure_ascii=False)
            flat = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
            (self.out / summary.FILE).write_text(flat + "\n", encoding="utf-8")
        self.conclude(summary.finding(found))
        return found
