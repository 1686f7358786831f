"""Scripts that show the drifts of any callable, one for each of its relations, on the arguments that were judged."""

import contextlib
import importlib
from itertools import product
from pathlib import Path

import cloudpickle

from bi_kernels.audit.callables.demand import IN_MEMORY, STEPS
from bi_kernels.audit.callables.memory import places
from bi_kernels.audit.callables.modes import FEW, modes
from bi_kernels.audit.callables.relations import RANDOM, plan
from bi_kernels.audit.callables.sharper import SHARP, layouts
from bi_kernels.audit.callables.target import Target
from bi_kernels.audit.evidence.verdicts import Row, grouped, sentence
from bi_kernels.audit.relations.gradient import DETERMINISM, INVARIANCE
from bi_kernels.audit.reproduce.imports import import_of_spec, reach
from bi_kernels.audit.reproduce.replay import WHOLE, keep
from bi_kernels.audit.reproduce.script import Script, settle, unscripted


def _import(t: Target, imports: str, path: Path) -> str:
    """Returns the lines that make `fn`: by its name where it has one, else `imports`, else a pickle beside it."""
    function, again = t.eager, "\nfn = torch.compile(fn)" * t.compiled
    home, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    for module, attribute in ((home, name), *product(("torch.nn.functional", "torch"), [name.rpartition(".")[2]])):
        with contextlib.suppress(Exception):  # what a callable says of itself need not be so
            if module != "__main__" and getattr(importlib.import_module(module), attribute) is function:
                return f"{reach(module, path.parent)}from {module} import {attribute} as fn{again}"
    if imports:
        return imports
    pickled = path.with_suffix(".pkl")
    pickled.write_bytes(cloudpickle.dumps(function))
    beside = f"Path(__file__).with_name({pickled.name!r})"
    reached = reach(home or type(function).__module__, path.parent)  # a pickle names what it is made of
    return f"{reached}import cloudpickle\n\nfn = cloudpickle.loads({beside}.read_bytes()){again}"


def words(t: Target, r: Row) -> tuple[str, str, str, str] | None:
    """Returns a row's two layouts, inputs and tensor, as a script is told them; None for what is no layout."""
    if r.layout in ("whole batch", "backward") and r.against == "itself":
        return WHOLE, WHOLE, r.inputs, r.tensor
    if r.against == "no_grad" and r.layout in modes(t):
        return r.layout, "no_grad", r.inputs, r.tensor
    if r.layout in places(t):
        return r.layout, "no_grad", r.inputs, r.tensor
    if r.layout in STEPS:
        return r.layout, IN_MEMORY if r.against == IN_MEMORY else WHOLE, r.inputs, r.tensor
    if r.layout.endswith(FEW):
        few = f"{r.against}, the first {r.rows}"
        return few, f"{few} of all", r.inputs, r.tensor
    more = layouts(t, r.inputs) if r.inputs in ("resampled", *SHARP) else ()
    if r.layout in ("micro_batches:each", *plan(t.count, t.seed), *more):
        return r.layout, f"{WHOLE}: {r.layout}", r.inputs, r.tensor
    return None


def export(t: Target, rows: list[Row], candidate: str, imports: str, folder: Path, more: str = "") -> Path | None:
    """Writes the scripts of what drifts, and names those that reproduce in its rows; returns the first, if any.

    more: what their names end in.
    """
    drifting = [r for r in rows if r.mismatches and r.relation in ("invariance", INVARIANCE, DETERMINISM)]
    told = []
    for r in drifting:
        if r.detail == RANDOM:
            unscripted([r], "what it draws, it draws anew in every process")
        elif w := words(t, r):
            told.append((w, r))
        else:
            why = (
                "what drifts is the same call after others" if r.layout == "at the end" else "no script has this layout"
            )
            unscripted([r], why)
    if not told:
        return None
    told.sort(key=lambda x: (x[1].relation != "invariance", x[1].rows))
    name = "".join(c if c.isalnum() else "_" for c in t.name) + more
    held, path = folder / f"{name}.pt", folder / f"{name}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        keep(t, held)
        lines = import_of_spec(candidate, folder) if candidate else _import(t, imports, path)
    except Exception as error:  # what cannot be pickled says so in its own way
        unscripted([r for _, r in told], f"it cannot be brought into another process ({sentence(error)})")
        held.unlink(missing_ok=True)
        return None
    made, scripts = f"Arguments(Path(__file__).with_name({held.name!r}))", []
    suffix = lambda r: (
        "mode" if r.against in ("no_grad", *modes(t)) else {"invariance": ""}.get(r.relation, r.relation.split()[0])
    )
    for kind, mine in grouped(told, lambda x: suffix(x[1])).items():
        (one, other, _, tensor), _ = mine[0]
        title = f"{t.name}, along dimension {t.batch}: {tensor} in {one} against {other}."
        file = folder / f"{'-'.join(filter(None, (name, kind)))}.py"
        scripts.append(Script(file, title, lines, made, str(t.device), mine))
    shown = settle(scripts)
    if not shown:
        held.unlink(missing_ok=True)
        path.with_suffix(".pkl").unlink(missing_ok=True)
    return next(iter(shown), None)
