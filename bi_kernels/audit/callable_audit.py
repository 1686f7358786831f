"""Is this callable batch-invariant? `audit(fn, *inputs)` judges any function, nn.Module, compiled function or launcher.

The batch is one dimension of the first tensor; every sample along it is asked to keep its bits whatever stands beside
it. The relations are the audits' own.
"""

import contextlib
import copy
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, SimpleNamespace

import torch

from bi_kernels.audit.axes import Kind
from bi_kernels.audit.checks import adversarial as sharper
from bi_kernels.audit.checks.any_callable import (
    accuracy,
    determinism,
    filler_of,
    gradient_accuracy,
    gradients,
    invariance,
    plan,
    requests,
)
from bi_kernels.audit.checks.memory import backward_memory, memory
from bi_kernels.audit.checks.modes import WANTED, judged, modes, refuses
from bi_kernels.audit.checks.order import FIRST, FirstCall, history
from bi_kernels.audit.checks.sequences import sequence_gradients, sequences
from bi_kernels.audit.executor import ForkServer
from bi_kernels.audit.findings import (
    ACCURACY,
    DETERMINISM,
    INVARIANCE,
    LATE,
    NEEDS_FIX,
    UNSUPPORTED,
    Row,
    needs_fix,
    sentence,
)
from bi_kernels.audit.progress import Voice
from bi_kernels.audit.report.any_callable import Report
from bi_kernels.audit.reproduce.callable import export
from bi_kernels.audit.static.finding import KERNELS
from bi_kernels.audit.static.launches import recorded
from bi_kernels.audit.static.verdict import LEVELS, STATIC, atomics_free
from bi_kernels.audit.step import NoBackward
from bi_kernels.audit.targets.any_callable import CallableTarget, OutOfTime
from bi_kernels.audit.targets.callable_step import Step
from bi_kernels.audit.targets.candidates import signature_of
from bi_kernels.checks import INTERPRETED, check_numbers
from bi_kernels.contract import SWEEP
from bi_kernels.scalars import check_number, check_type, integer_of, strings_of, truncated_repr

RECOMPILES = 256
AT_END = "at the end"
TRAINED = ("permuted", "padded", "left_padded", "micro_batches:ragged", "neighbours:nonfinite")  # layouts of a backward
EACH = 64  # samples up to which each is a micro-batch of its own


@contextlib.contextmanager
def _many_shapes() -> Iterator[None]:
    """Has a compiled function compiled anew for every shape: beyond dynamo's own limit it would run in eager mode."""
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            config = torch._dynamo.config
            stack.enter_context(config.patch(recompile_limit=max(RECOMPILES, config.recompile_limit)))
        yield


@_many_shapes()
def audit(
    fn: Callable,
    *inputs,
    batch: int = 0,
    shared: Iterable[str] = (),
    outputs: Iterable[str] = (),
    reference: Callable | None = None,
    backward: bool | None = None,
    seconds: float = 120.0,
    seed: int = 0,
    name: str = "",
    names: Sequence[str] = (),
    candidate: str = "",
    imports: str = "",
    folder: str | Path | None = None,
    record: Callable[[list[Row]], object] | None = None,
    quiet: bool = False,
    **constants,
) -> Report:
    """Judges whether a sample's result, and every gradient, depends on what else is in the batch.

    fn(*inputs, **constants) is called on parts of the batch, in other orders, beside other samples and beside NaN; a
    callable may be a function, an nn.Module (its parameters' gradients are judged too), a compiled function or a Triton
    launcher (name what it fills: outputs=("out",); what it also reads it must return). batch: the dimension of the
    first tensor that counts samples; which other tensors hold a row a sample is found out, or said with
    shared=("weight",). reference: an fp64-able callable of the same signature, for accuracy. backward: None judges
    gradients where there is a backward. seconds: the budget; what it did not reach is unsupported, and the report does
    not pass. names: of the inputs, where fn's signature has none. candidate: how a reproducer imports fn, as in
    file.py:fn; imports: lines that make `fn` in it, instead of a pickle of what has no such name; folder: where it
    goes. What torch.compile made in this process, it makes again afterwards. It says on stderr what it asks and what it
    finds, as it goes, unless quiet; record: is called with all rows so far. Raises ValueError or TypeError with one
    sentence where fn cannot be judged at all.
    """
    if not callable(fn):
        raise TypeError(f"fn is {truncated_repr(fn)}, expected a callable")
    if isinstance(fn, KERNELS):
        raise TypeError(f"fn is the Triton kernel {fn.__name__}, expected the Python function that launches it")
    outputs, shared, names = (
        strings_of("audit", name, values)
        for name, values in (("outputs", outputs), ("shared", shared), ("names", names))
    )
    for i, given in enumerate(inputs):
        if isinstance(given, torch.Tensor):
            check_numbers("audit", f"inputs[{i}]", given)
    if not check_number("audit", "seconds", seconds) >= 0:
        raise ValueError(f"audit: seconds is {seconds}, expected 0 or more")
    integer_of("audit", "seed", seed)
    for label, text in (("name", name), ("candidate", candidate), ("imports", imports)):
        check_type("audit", label, text, str, "a string")
    check_type("audit", "backward", backward, (bool, NoneType), "True, False or None")
    check_type("audit", "folder", folder, (str, Path, NoneType), "a path")
    if folder is not None and Path(folder).is_file():
        raise ValueError(f"audit: folder is {truncated_repr(folder)}, which is a file, expected a folder")
    for label, given in (("reference", reference), ("record", record)):
        check_type("audit", label, given, (Callable, NoneType), "a callable")
    _check_constants(fn, constants)
    started = time.monotonic()
    name = name or getattr(fn, "__name__", type(fn).__name__)
    other = FirstCall()
    t = many = CallableTarget(fn, inputs, constants, batch, shared, outputs, name, seed, names, other.begin)
    other.call(t)
    rows, notes, record = determinism(t, 2), [], record or (lambda rows: None)
    record(rows)
    one_call = (time.monotonic() - started) / max(t.calls, 1)
    steps: list[tuple[str, str, Callable]] = []  # (relation, layout, what judges it)
    ask = lambda relation, checks: steps.extend((relation, layout, run) for layout, run in checks.items())
    if not needs_fix(rows):
        many, whole = sharper.more(t), {"given": t.whole()}
        try:
            found = t.whole("spread")
            if any(y.isfinite().all() for y in found if y.is_floating_point()):
                whole["spread"] = found
            else:
                t.refused["spread inputs"] = "its results are not finite"
        except Exception as error:  # sharper inputs may be none that the callable takes
            t.refused["spread inputs"] = sentence(error)
        ask(DETERMINISM, {"whole batch": lambda: determinism(t, SWEEP["runs"])})
        ask("invariance", {k: partial(invariance, t, k, calls, whole) for k, calls in plan(t.count, seed).items()})
        ask("invariance", {mode: partial(judged, t, mode, whole["given"]) for mode in modes(t)})
        ask("invariance", memory(t, whole["given"]) | _of_sequences(t, "invariance", sequences))
        kinds = ("resampled", *sharper.SHARP)[many is t :]
        ask("invariance", {f"{kind} inputs": partial(sharper.judged, many, kind) for kind in kinds})
        if backward is not False:
            try:
                ask(INVARIANCE, _backward(t, many))
                if reference is not None:
                    ask(ACCURACY, {"whole batch": partial(gradient_accuracy, t, t.step, t.trained, reference)})
                ask(DETERMINISM, {"backward": partial(_again, t)})
                ask(INVARIANCE, _of_sequences(t, INVARIANCE, sequence_gradients))
            except Exception as error:
                if missing := isinstance(error, NoBackward) or refuses(t, WANTED):
                    notes.append(f"Its backward was not judged: {str(error).rstrip('.')}.")
                if backward or not missing:
                    rows.append(t.row(INVARIANCE, "whole batch", detail=f"raised {sentence(error)}"))
        if reference is not None:
            ask("accuracy", {"whole batch": partial(accuracy, t, reference)})
        steps.sort(key=lambda s: s[1].startswith("rows:"))  # the longest sweep last
        ask("invariance", {FIRST: partial(other.rows, t)} | history(t, whole["given"]))  # may leave traces
        said = {"against": "at the start", "rows": t.count, "detail": "the same call before and after all others"}
        last = lambda: t.compared(DETERMINISM, AT_END, t.whole(), whole["given"], **said, axes=[Kind.BEFORE])
        ask(DETERMINISM, {AT_END: last})
    ask(STATIC, {LEVELS: partial(_static, t, backward is not False)})  # last: watched, a function is compiled anew
    t.deadline = many.deadline = started + seconds
    voice = Voice(name, len(steps), quiet)
    voice.say(f"{name}: {t.read()}; checks in {len(steps)} step{'s' * (len(steps) > 1)}, at most {seconds:g} s")
    voice.found(rows)
    spent = f"the budget of {seconds:g} s was spent, one call takes {one_call:.2g} s; raise the parameter seconds"
    with ForkServer() as server:
        for found in _rows(t, voice.steps(steps), spent):
            rows += found
            voice.found(found)
            record(rows)
            if folder is not None and any(r.mismatches for r in found):
                server.start()  # it is ready when scripts are
        t.deadline = float("inf")
        notes += _notes(t, rows)
        if reference is None:
            notes.append("Accuracy was not judged: no reference= was given.")
        if INTERPRETED and t.launches:
            notes.append("Its kernels ran on Triton's interpreter, which says nothing about a GPU, as of num_warps.")
        report = Report(name, rows, t.read(), notes, target=t)
        if folder is not None:
            drawn = [r for r in rows if many is not t and r.inputs in ("resampled", *sharper.SHARP)]
            given = [r for r in rows if not any(r is d for d in drawn)]
            report.repro = export([(t, given), (many, drawn)], candidate, imports, Path(folder), server)
    return report


def _check_constants(fn: Callable, constants: dict) -> None:
    """Raises TypeError for a keyword that neither `audit` nor fn takes; what has no signature takes any."""
    signature = signature_of(fn)
    takes = signature.parameters if signature else {}
    if signature is None or any(p.kind == p.VAR_KEYWORD for p in takes.values()):
        return
    for k, value in constants.items():
        if k not in takes:
            options = [p.name for p in inspect.signature(audit).parameters.values() if p.kind == p.KEYWORD_ONLY]
            raise TypeError(f"audit: {k} is {truncated_repr(value)}, expected one of {', '.join([*takes, *options])}")


def _rows(t: CallableTarget, steps: Iterable[tuple[str, str, Callable]], spent: str) -> Iterator[list[Row]]:
    """Yields the rows of each step, and those that say of what the budget left no time for that it was spent."""
    late: dict[str, list[str]] = {}
    for relation, layout, run in steps:
        try:
            yield t.attempt(relation, layout, run)
        except OutOfTime:
            late.setdefault(relation, []).append(layout)
    for relation, missing in late.items():
        listed = f"{', '.join(missing[:4])}{' …' * (len(missing) > 4)}"
        yield [t.row(relation, LATE, verdict=UNSUPPORTED, detail=f"{listed}: {spent}")]


def _notes(t: CallableTarget, rows: list[Row]) -> list[str]:
    """Returns what a reader must know beside the rows."""
    notes = [f"Not judged on {what}: {said}." for what, said in t.refused.items()]
    if t.changed:
        notes.append(f"It changes its input {', '.join(sorted(t.changed))} in place; every call here got copies.")
    if t.kept:
        named = ", ".join(sorted(t.kept))
        notes.append(f"It writes into its buffer {named}, whose value follows the batches before, and is not judged.")
    if any(r.layout == AT_END and r.verdict == NEEDS_FIX for r in rows):
        notes.append(
            "Its result depends on the calls before it, as of a function that is compiled anew for other shapes; what "
            "differs between layouts may come from that."
        )
    uncounted = [i for i, d in enumerate(t.dims) if d is None]
    if uncounted:
        notes.append(f"Not judged, because nothing in them counts samples: outputs {uncounted}.")
    if t.unread:
        notes.append(f"Not judged, because it holds neither tensors nor numbers: {', '.join(sorted(t.unread))}.")
    return notes


def _of_sequences(t: CallableTarget, relation: str, made: Callable) -> dict[str, Callable]:
    """Returns what judges a model on whole sequences."""
    try:
        return made(t)
    except Exception as error:  # a module whose arguments have these names and another meaning
        t.refused[f"whole sequences ({relation})"] = sentence(error)
        return {}


def _backward(t: CallableTarget, many: CallableTarget) -> dict[str, Callable]:
    """Returns what judges the backward under each layout, request and memory; raises what its backward raises."""
    t.step = step = Step(t)
    whole = t.trained = step.gradients()
    layouts = {k: v for k, v in plan(t.count, t.seed).items() if k in TRAINED}
    if t.count <= EACH:
        layouts["micro_batches:each"] = [[i] for i in t.every]
    some = lambda k, calls: calls[:1] if filler_of(k) == "nonfinite" else calls
    found = {k: partial(gradients, t, step, k, some(k, calls), whole) for k, calls in layouts.items()}
    found |= requests(t, step) | backward_memory(t, step)
    return found | {"cancelling inputs": partial(sharper.gradients_judged, many)}


def _again(t: CallableTarget) -> list[Row]:
    said = {"against": "itself", "rows": t.count, "axes": [Kind.RANDOM, Kind.BEFORE]}  # others came between
    return t.differences(DETERMINISM, "backward", t.step.gradients(), t.trained, **said)


def _static(t: CallableTarget, backward: bool) -> list[Row]:
    """Examines source, PTX and SASS of what two calls, and their backward, launch. In the second each sample stands
    twice, so that indices do not differ by chance."""
    pairs = copy.copy(t)
    pairs.values = t.take([i // 2 for i in t.every])
    with recorded() as launches:
        try:
            for made in (t, pairs):
                made.call(t.every)
                if backward:
                    Step(made).gradients()
        except Exception:  # it is a row of its own
            pass
        finally:
            t.launches = bool(launches.variants or launches.findings)
            if "torch._dynamo" in sys.modules and torch._dynamo.utils.counters["stats"]:  # something is compiled
                torch.compiler.reset()  # else its user would be left with what was compiled to be watched
    function = type(t.function).forward if isinstance(t.function, torch.nn.Module) else t.function
    return atomics_free([(SimpleNamespace(function=function, row=t.row), launches)], required=False)[0]
