"""Scripts that show the drifts of any callable, on the arguments that were judged."""

import contextlib
import copy
import importlib
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import cloudpickle
import torch

from bi_kernels import checks
from bi_kernels.audit.callables.relations import RANDOM, plan
from bi_kernels.audit.callables.sharper import SHARP, gradient_layouts, layouts
from bi_kernels.audit.callables.target import SAMPLE, Layout, Target
from bi_kernels.audit.checks.memory import places
from bi_kernels.audit.checks.modes import FEW, modes
from bi_kernels.audit.checks.requests import EXPANDED, STRIDED, TWICE
from bi_kernels.audit.evidence.verdicts import DETERMINISM, INVARIANCE, Row, sentence
from bi_kernels.audit.executor import ForkServer
from bi_kernels.audit.reproduce import gradient_programs, programs, script
from bi_kernels.audit.reproduce.gradient_programs import Backward
from bi_kernels.audit.reproduce.imports import import_of_spec, reach
from bi_kernels.audit.reproduce.programs import HELPERS, Program, Writer, literal
from bi_kernels.audit.reproduce.script import Script, in_turn, render, unscripted, verify_scripts

STEPS = EXPANDED, STRIDED, TWICE  # of a backward
MEMORIES = "", "00", "10", "01", "11"  # what fresh memory may hold in the first call of both results


class Judged:
    """One callable in the scripts of an audit: how they import it, and the files that they load."""

    def __init__(self, t: Target, candidate: str, imports: str, folder: Path):
        self.t, self.folder = t, folder
        self.stem = "".join(c if c.isalnum() else "_" for c in t.name)
        self.held: dict[Path, dict] = {}  # what each file holds
        self.pickled = folder / f"{self.stem}.pkl"
        self.writers: dict[tuple, Writer] = {}  # by target and kind of its inputs
        self.backwards: dict[tuple, Backward] = {}
        self.function, self.imports = self._import(candidate, imports)
        if self.function in programs.TAKEN:
            self.imports, self.function = f"{self.imports}\nfn = {self.function}", "fn"
        if t.compiled:
            self.imports += f"\n{self.function} = torch.compile({self.function})"

    def _import(self, candidate: str, imports: str) -> tuple[str, str]:
        """Returns the callable's name in a script and the lines that make it: by its name where it has one, else
        `imports`, else a pickle beside the script."""
        function, folder = self.t.eager, self.folder
        if candidate:
            return import_of_spec(candidate, folder)
        home, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
        for module, attribute in ((home, name), *product(("torch.nn.functional", "torch"), [name.rpartition(".")[2]])):
            with contextlib.suppress(Exception):  # what a callable says of itself need not be so
                if module != "__main__" and getattr(importlib.import_module(module), attribute) is function:
                    return attribute, f"{reach(module, folder)}from {module} import {attribute}"
        if imports:
            return "fn", imports
        self.pickled.write_bytes(cloudpickle.dumps(function))
        reached = reach(home or type(function).__module__, folder)  # a pickle names what it is made of
        own = self.stem if self.stem.isidentifier() and self.stem not in programs.TAKEN else "fn"
        beside = f"Path(__file__).with_name({self.pickled.name!r})"
        return own, f"{reached}import cloudpickle\n\n{own} = cloudpickle.loads({beside}.read_bytes())"

    def file(self, t: Target, kind: str) -> Path:
        """Returns the file of one kind of inputs, which holds them once `write` was called."""
        given = (t.count == self.t.count) and kind == "given"
        path = self.folder / f"{self.stem}{'' if given else f'-{t.count}-{kind}'}.pt"
        if path not in self.held:
            weights = {} if t.module is None else {"weights": t.module.state_dict()}
            self.held[path] = {k: v for k, v in t.take(t.every, kind=kind).items() if not literal(v)} | weights
        return path

    def write(self) -> None:
        for path, held in self.held.items():
            torch.save(held, path)

    def script(self, t: Target, r: Row, path: Path) -> Script:
        """Returns the script of a row, in every way that may show it."""
        held, key = self.file(t, r.inputs), (t, r.inputs)
        if key not in self.writers:
            self.writers[key] = Writer(t, r.inputs, self.function)
        w = self.writers[key]
        if r.tensor in t.output_names():
            found = [forward(copy_with(w, memory=memory), r) for memory in MEMORIES]
        else:
            if key not in self.backwards:
                self.backwards[key] = Backward(w)
                self.held[held] |= self.backwards[key].upstream()
            found = [gradient(copy_with(self.backwards[key], tensor=r.tensor), r)]
        return Script(path, r, [self.text(t, r, program, held) for program in found], held)

    def text(self, t: Target, r: Row, p: Program, held: Path) -> str:
        simple = (torch.Tensor, bool, int, float, str, dict)
        safe = "" if all(type(v) in simple for v in self.held[held].values()) else ", weights_only=False"
        lines = [f"judged = torch.load(Path(__file__).with_name({held.name!r}){safe})  # what was judged"]
        if t.device.type == "cpu":
            lines.append(f"torch.set_num_threads({torch.get_num_threads()})  # more may cut a sum otherwise")
        if t.module is not None:
            lines.append(f'module_of({self.function}).load_state_dict(judged["weights"])  # an import may draw others')
        if not any("def gradient(" in line for line in p.lines):
            lines.append("torch.set_grad_enabled(False)  # as in a rollout")
        lines += p.lines
        used = [k for k in HELPERS if any(re.search(rf"\b{k}\(", line) for line in lines)]
        helpers = [f"from bi_kernels.audit.reproduce.samples import {', '.join(used)}"] * bool(used)
        if any("module_of(" in line for line in lines):
            helpers.append("from bi_kernels.audit.callables.target import module_of")
        interpreted = checks.INTERPRETED and self.t.launches is not False
        where = f"{t.device}, Triton's interpreter" if interpreted else t.device
        count = f"{r.mismatches} of {r.elements} elements of {r.tensor}"
        return render(
            title=f"{t.name}: {p.what} have different bits.",
            said=f"In a fresh process ({where}) {count} differ, as reported. Inputs: {r.inputs}.",
            imports=self.imports,
            helpers=helpers,
            lines=lines,
            bits=p.bits,
            interpreted=interpreted,
            mended=interpreted and not self.imports.startswith("from bi_kernels"),
        )


def copy_with(writer, **changed):
    """Returns a copy of a writer that differs in some attributes."""
    vars(other := copy.copy(writer)).update(changed)
    return other


def gradient(b: Backward, r: Row) -> Program:
    """Returns the program of a row of gradients."""
    if r.against == "itself":
        return gradient_programs.same_backward(b)
    return gradient_programs.demand(b, r) if r.layout in STEPS else gradient_programs.split(b, r, *calls_of(b.t, r))


def forward(w: Writer, r: Row) -> Program:
    """Returns the program of a row of results."""
    if r.against == "itself":
        return programs.same_call(w, r)
    if r.layout in modes(w.t) or r.layout.endswith(FEW):
        return programs.mode(w, r)
    return programs.place(w, r) if r.layout in places(w.t) else programs.forward(w, r, *calls_of(w.t, r))


def calls_of(t: Target, r: Row) -> tuple[Layout, str]:
    """Returns the calls of a row's layout, each the numbers of its samples, and what fills a place without one."""
    forward = r.tensor in t.output_names()
    every = {"micro_batches:each": ([[i] for i in t.every], "stale")} | plan(t.count, t.seed)
    if r.inputs in ("resampled", *SHARP):
        every |= layouts(t, r.inputs) if forward else gradient_layouts(t)
    calls, filler = every[r.layout]
    empty = [call for call in calls if min(call) < 0]
    if empty and filler == "stale":
        try:
            t.call(empty[0], filler, r.inputs)
        except (RuntimeError, TypeError, ValueError, AssertionError):  # as `filled` has it
            filler = SAMPLE
    return calls, filler


def reason(t: Target, r: Row) -> str:
    """Says why no script is written for a row, '' where one is."""
    if r.detail == RANDOM:
        return "what it draws, it draws anew in every process"
    if r.layout == "at the end":
        return "what drifts is the same call after others"
    known = {"whole batch", "backward", "micro_batches:each", *modes(t), *places(t), *STEPS, *plan(t.count, t.seed)}
    known |= {*layouts(t, r.inputs)} if r.inputs in ("resampled", *SHARP) else set()
    return "" if r.layout in known or r.layout.endswith(FEW) else "no script has this layout"


def export(
    targets: Sequence[tuple[Target, list[Row]]], candidate: str, imports: str, folder: Path, server: ForkServer
) -> Path | None:
    """Writes scripts of what drifts, and names each in the row that it shows; returns the first, if any.

    targets: each with the rows that were judged on its samples; the first with those that the user gave.
    """
    compared = "invariance", INVARIANCE, DETERMINISM
    drifting = [(t, r) for t, rows in targets for r in rows if r.mismatches and r.relation in compared]
    whys = [reason(t, r) for t, r in drifting]
    for (_, r), why in zip(drifting, whys):
        if why:
            unscripted([r], why)
    of_row = {id(r): (t, r) for (t, r), why in zip(drifting, whys) if not why}
    rows = in_turn([r for _, r in of_row.values()])
    if not rows:
        return None
    scripts, names = [], set()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        judged = Judged(targets[0][0], candidate, imports, folder)
        for r in rows[: 2 * script.MOST]:
            t, _ = of_row[id(r)]
            name = judged.stem if not names else unused(slug(judged.stem, t, r), names)
            names.add(name)
            scripts.append(judged.script(t, r, folder / f"{name}.py"))
        judged.write()
    except Exception as error:  # what cannot be pickled says so in its own way
        unscripted(rows, f"it cannot be brought into another process ({sentence(error)})")
        for path in (judged.pickled, *judged.held) if names else ():
            path.unlink(missing_ok=True)
        return None
    unscripted(rows[2 * script.MOST :], f"{script.MOST} of this audit are shown, the most")
    shown = verify_scripts(scripts, server)
    if not shown:
        judged.pickled.unlink(missing_ok=True)
    return next(iter(shown), None)


def slug(stem: str, t: Target, r: Row) -> str:
    """Names the script of a row by what it shows."""
    parts = stem, "" if r.tensor in t.output_names() else r.tensor, r.layout, r.inputs if r.inputs != "given" else ""
    return "-".join(re.sub(r"\W+", "-", part).strip("-") for part in parts if part)


def unused(name: str, names: set[str]) -> str:
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(names) + 3))) if n not in names)
