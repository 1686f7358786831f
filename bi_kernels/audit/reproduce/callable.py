"""Scripts that reproduce the drifts of any callable, on the arguments of the audit."""

import contextlib
import importlib
import keyword
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from pathlib import Path

import cloudpickle
import torch

from bi_kernels import checks
from bi_kernels.audit.checks.adversarial import SHARP, gradient_layouts, layouts
from bi_kernels.audit.checks.any_callable import RANDOM, filler_of, plan, samples_of
from bi_kernels.audit.checks.memory import places
from bi_kernels.audit.checks.modes import FEW, modes
from bi_kernels.audit.checks.requests import EXPANDED, STRIDED, TWICE
from bi_kernels.audit.executor import ForkServer
from bi_kernels.audit.findings import DETERMINISM, INVARIANCE, Row, sentence
from bi_kernels.audit.reproduce import script
from bi_kernels.audit.reproduce.imports import import_of_spec, reach
from bi_kernels.audit.reproduce.samples import with_strides
from bi_kernels.audit.reproduce.script import (
    MEMORIES,
    OWN,
    Calls,
    Script,
    fn_name,
    in_turn,
    text,
    unscripted,
    unused,
    verify_scripts,
)
from bi_kernels.audit.targets.any_callable import SAMPLE, CallableTarget, Layout, tensors

REQUESTS = {  # how the whole batch is asked for its gradients
    EXPANDED: ("upstream=in_memory", "upstream=one_number"),
    STRIDED: ("", "upstream=strided"),
    TWICE: ("", "times=2"),
}
SHARPER = ("resampled", *SHARP)  # kinds of inputs with more samples than the user gave


class Writer:
    """Writes the scripts of one callable: how they import it, and the file that they load."""

    def __init__(self, t: CallableTarget, candidate: str, imports: str, folder: Path):
        self.t, self.folder = t, folder
        self.stem = "".join(c if c.isalnum() else "_" for c in t.name)
        self.data, self.pickled = folder / f"{self.stem}.pt", b""
        self.function, self.imports = fn_name(*self._import(candidate, imports))

    def _import(self, candidate: str, imports: str) -> tuple[str, str]:
        """Returns the callable's name in a script and the lines that make it: by its name where it has one, else
        `imports`, else a pickle among what it loads."""
        function, folder = self.t.eager, self.folder
        if candidate:
            return import_of_spec(candidate, folder)
        home, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
        for module, attribute in ((home, name), *product(("torch.nn.functional", "torch"), [name.rpartition(".")[2]])):
            with contextlib.suppress(Exception):  # a callable's own names need not be right
                if module != "__main__" and getattr(importlib.import_module(module), attribute) is function:
                    return attribute, f"{reach(module, folder)}from {module} import {attribute}"
        if imports:
            return "fn", imports
        self.pickled = cloudpickle.dumps(function)
        reached = reach(home or type(function).__module__, folder)  # a pickle names what it is made of
        own = self.stem if self.stem.isidentifier() and self.stem not in OWN else "fn"
        return own, f"{reached}import cloudpickle"

    def save(self) -> None:
        """Writes the file of the arguments, and of a module's weights."""
        t, names = self.t, list(self.t.values)
        held = t.values | {k: with_strides(v.detach(), v.stride()) for k, v in tensors(t.values).items()}
        inputs, constants = ([*held.values()][: t.positional], {k: held[k] for k in names[t.positional :]})
        given = {"inputs": inputs, "constants": constants, "batch": t.batch, "outputs": t.outputs}
        given |= {"shared": [k for k in tensors(held) if k not in t.batched], "name": t.name, "seed": t.seed}
        weights = {"weights": t.module.state_dict()} if t.module is not None else {}
        pickled = {"function": self.pickled} if self.pickled else {}
        torch.save(given | {"names": names[: t.positional]} | weights | pickled, self.data)

    def script(self, t: CallableTarget, r: Row, path: Path) -> Script:
        """Returns the script of a row of the callable, or of the target with more samples."""
        fn, setup = (
            self.function,
            [f"saved = torch.load(Path(__file__).with_name({self.data.name!r}), weights_only=False)"],
        )
        setup += [f'{fn} = cloudpickle.loads(saved.pop("function"))'] * bool(self.pickled)
        setup += [f"{fn} = torch.compile({fn})"] * t.compiled
        if t.device.type == "cpu":
            setup.append(f"torch.set_num_threads({torch.get_num_threads()})  # more may cut a sum elsewhere")
        if t.module is not None:
            setup.append(f'module_of({fn}).load_state_dict(saved.pop("weights"))')
        interpreted = checks.INTERPRETED and self.t.launches is not False
        written = lambda calls, memory=(): text(t.name, r, self.imports, calls, t.device, interpreted, memory)
        calls, more = two_calls(t, r), f".resampled({t.count})" * (t.count != self.t.count)
        target = f"target = CallableTarget({fn}, **saved){more}  # {t.read()}"
        calls.setup[:0], calls.subject = [*setup, target], "target"
        texts = [written(calls, memory) for memory in MEMORIES]
        if plain := self.plain_calls(t, r):
            plain.setup[:0] = setup
            texts.insert(0, written(plain))
        return Script(path, r, texts, self.data)

    @cached_property
    def takes_rows(self) -> bool:
        """Tells whether the callable takes tensors whose first dimension counts samples, and returns one such."""
        t, names = self.t, list(self.t.values)[: self.t.positional]
        shown = lambda k: k.isidentifier() and not keyword.iskeyword(k) and k not in OWN | {self.function}
        if t.batch or t.outputs or t.changed or not t.batched <= {*names} or not all(map(shown, names)):
            return False
        with torch.no_grad(), t.layout(t.every):
            y = t.returned(t.function, t.take(t.every))
        return isinstance(y, torch.Tensor) and y.shape[:1] == (t.count,)

    def plain_calls(self, t: CallableTarget, r: Row) -> Calls | None:
        """Returns two results in plain torch, of samples in their order; None where these do not show the row."""
        layout = r.tensor in t.output_names() and r.inputs == "given" and r.layout in plan(t.count, t.seed)
        if t is not self.t or not layout or not self.takes_rows:
            return None
        calls, _ = calls_of(t, r)
        held = [i for call in calls for i in call]
        if held != sorted(held) or held[0] < 0:
            return None
        names = list(t.values)[: t.positional]
        more = ', **saved["constants"]' * (t.positional < len(t.values))
        call = lambda rows: f"{self.function}({', '.join(k + rows * (k in t.batched) for k in names)}{more})"
        setup = [f"{', '.join(names)}{',' * (len(names) == 1)} = saved['inputs']", "torch.set_grad_enabled(False)"]
        return Calls(setup, call("") + part(t, calls), f"torch.cat([{call('[rows]')} for rows in {listed(calls)}])")


def two_calls(t: CallableTarget, r: Row) -> Calls:
    """Returns the two results that a row compares."""
    same = f", kind={r.inputs!r}" * (r.inputs != "given")
    if r.tensor not in t.output_names():
        step = [f"step = Step(target{same})"]
        gradient = lambda calls: f"step.gradients({calls})[{r.tensor!r}]"
        every = "[target.every]"
        if r.against == "itself":
            return Calls(step, gradient(every), gradient(every))
        if r.layout in REQUESTS:
            return Calls(step, *(f"step.made({how})[{r.tensor!r}]" for how in REQUESTS[r.layout]))
        calls, filler = calls_of(t, r)
        calls = calls[:1] if filler == "nonfinite" else calls
        some = part(t, calls) * (r.tensor.removeprefix("d") in t.batched)
        return Calls(step, gradient(every) + some, gradient(listed(calls) + f", {filler!r}" * (filler != "stale")))
    number = f"[{t.output_names().index(r.tensor)}]"
    whole = f"target.whole({same.removeprefix(', ')}){number}"
    if r.against == "itself":
        return Calls([], whole, whole)
    if r.layout in modes(t):
        return Calls([], whole, f"in_mode(target, {r.layout!r}, target.every){number}")
    if r.layout.endswith(FEW):
        mode = lambda samples: f"in_mode(target, {r.against!r}, {samples}){number}"
        return Calls([], f"{mode('target.every')}[:{r.rows}]", mode(f"target.every[:{r.rows}]"))
    if r.layout in places(t):
        return Calls([], whole, f"placed(target, {r.layout!r}){number}")
    calls, filler = calls_of(t, r)
    filled = f", filler={filler!r}" * (filler != "stale")
    return Calls([], whole + part(t, calls), f"target.compute({listed(calls)}{filled}{same}){number}")


def part(t: CallableTarget, calls: Layout) -> str:
    """Returns Python that picks the samples of these calls from those of the whole batch."""
    samples = samples_of(calls)
    some = f"[:{len(samples)}]" if samples == t.every[: len(samples)] else f"[{samples}]"
    return some * (samples != t.every)


def listed(calls: Layout) -> str:
    """Returns Python for the numbers of each call's samples."""

    def call(numbers: Sequence[int]) -> str:
        first, count = numbers[0], len(numbers)
        run = count > 3 and list(numbers) == list(range(first, first + count))
        return f"range({first}, {first + count})" if run else str(list(numbers))

    numbers = [c[0] for c in calls]
    if len(calls) > 3 and calls == [[i] for i in numbers]:
        return f"[[i] for i in {call(numbers)}]"
    return f"[{', '.join(map(call, calls))}]"


def planned(t: CallableTarget, r: Row) -> dict[str, Layout]:
    """Returns the calls of each layout in which a tensor of a row may be judged."""
    every = {"micro_batches:each": [[i] for i in t.every]} | plan(t.count, t.seed)
    if r.inputs in SHARPER:
        every |= layouts(t, r.inputs) if r.tensor in t.output_names() else gradient_layouts(t)
    return every


def calls_of(t: CallableTarget, r: Row) -> tuple[Layout, str]:
    """Returns the calls of a row's layout, each the numbers of its samples, and what fills a place without one."""
    calls, filler = planned(t, r)[r.layout], filler_of(r.layout)
    empty = [call for call in calls if min(call) < 0]
    if empty and filler == "stale":
        try:
            t.call(empty[0], filler, r.inputs)
        except (RuntimeError, TypeError, ValueError, AssertionError):  # as `filled` has it
            filler = SAMPLE
    return calls, filler


def reason(t: CallableTarget, r: Row) -> str:
    """Says why no script is written for a row, '' where one is."""
    if r.detail == RANDOM:
        return "it draws other random numbers in every process"
    if r.layout == "at the end":
        return "the same call drifts after others only"
    known = {"whole batch", "backward", *modes(t), *places(t), *REQUESTS, *planned(t, r)}
    return "" if r.layout in known or r.layout.endswith(FEW) else "no script has this layout"


def export(
    targets: Sequence[tuple[CallableTarget, list[Row]]], candidate: str, imports: str, folder: Path, server: ForkServer
) -> Path | None:
    """Writes scripts of what drifts, and names each in the row that it shows; returns the first, if any.

    targets: each with its rows; the first has the samples that the user gave.
    """
    compared = "invariance", INVARIANCE, DETERMINISM
    of_row: dict[int, CallableTarget] = {}
    drifting = [(t, r) for t, rows in targets for r in rows if r.mismatches and r.relation in compared]
    for t, r in drifting:
        if why := reason(t, r):
            unscripted([r], why)
        else:
            of_row[id(r)] = t
    rows = in_turn([r for _, r in drifting if id(r) in of_row])
    if not rows:
        return None
    scripts, names, writer = [], set(), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer = Writer(targets[0][0], candidate, imports, folder)
        for r in rows[: 2 * script.MOST]:
            tensor = "" if r.tensor in of_row[id(r)].output_names() else r.tensor
            more = (tensor, r.layout, r.inputs * (r.inputs != "given")) if names else ()
            path = folder / f"{unused((writer.stem, *more), names)}.py"
            scripts.append(writer.script(of_row[id(r)], r, path))
        writer.save()
    except Exception as error:  # what cannot be pickled says so in its own way
        unscripted(rows, f"it cannot be brought into another process ({sentence(error)})")
        if writer:
            writer.data.unlink(missing_ok=True)
        return None
    unscripted(rows[2 * script.MOST :], f"{script.MOST} of this audit are shown, the most")
    return next(iter(verify_scripts(scripts, server)), None)
