"""Finds the first op that drifts: between two layouts or modes of a model, or between two recorded runs."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import NoneType

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bi_kernels.audit.findings import sentence
from bi_kernels.audit.localiser import recording
from bi_kernels.audit.localiser.compare import BACKWARD, PARAMETER, Cause, Comparison
from bi_kernels.audit.localiser.repair import look_into
from bi_kernels.audit.localiser.report import Report
from bi_kernels.audit.localiser.tracing.layouts import MASK, Plan, name_of, plan
from bi_kernels.audit.localiser.tracing.run import Run, freeze, step
from bi_kernels.audit.module_modes import GIVEN, OF_GRADIENTS, copied, read_mode
from bi_kernels.checks import check_numbers
from bi_kernels.scalars import check_flag, check_type, integer_of, strings_of, truncated_repr

ROUNDS = 6
LAYOUTS = "batch", "singles"


def locate(
    model: nn.Module | Callable,
    batch,
    layouts: Sequence[str] = (),
    loss: Callable | None = None,
    backward: bool = True,
    calls: Callable | None = None,
    seed: int = 0,
    rounds: int = ROUNDS,
    folder: str | Path | None = None,
    measure: bool = False,
    modes: Sequence[str] = (),
) -> Report:
    """Runs a model in two or more layouts, or modes, and returns a report of the ops whose inputs agree and outputs
    differ.

    model: a bi_kernels.model.Decoder, a Transformers causal LM, any other module, or a function.
    batch: token ids, a 1-D tensor a sample, for the first two; else a tensor whose dimension 0 counts samples and, of
        (B, L, F) floating or (B, L) integers, dimension 1 positions; or a list, a tensor a sample; or a
        dict of these, by the names of arguments.
    layouts: of which each is compared with the first, ("batch", "singles") unless given; docs/locate.md says which
        model supports which.
    loss: loss(output, tokens), a value a token, where tokens is (rows, width, 2), the sample and position of each
        place, −1 for padding. Without it, logprobs of language models and any other output are weighed by random
        numbers, each token's own, and divided by the number of tokens of the step.
    calls: calls(batch, layout), for a packing of your own: a list of (args, kwargs, tokens), tokens as above.
    rounds: after each, the drifting ops' outputs are repaired, and others looked for.
    folder: where a reproducer of each cause is written; measure: time a plain step too, once it is warm.
    modes: in place of several layouts, ways to call a module in one of them, each compared with the first: "given",
        "grad", "no_grad", "inference_mode", "train", "eval", "hooks", "no_hooks", "no_patches", "call:40".

    Raises ValueError: a layout or mode that the model does not support, a batch that it does not take, a model on two
    devices.
    """
    layouts, modes = _checked(model, layouts, modes)
    if isinstance(batch, torch.Tensor):
        check_numbers("locate", "batch", batch)
        if not batch.dim() or batch.grad_fn is not None:
            said = f"shape {tuple(batch.shape)} and grad_fn {batch.grad_fn}"
            raise ValueError(f"locate: batch has {said}, expected samples along a dimension, and batch.detach()")
    check_flag("locate", "backward", backward)
    check_flag("locate", "measure", measure)
    integer_of("locate", "seed", seed)
    if integer_of("locate", "rounds", rounds) < 1:
        raise ValueError(f"locate: rounds is {rounds}, expected at least 1")
    check_type("locate", "folder", folder, (str, Path, NoneType), "a path")
    for label, given in (("loss", loss), ("calls", calls)):
        check_type("locate", label, given, (Callable, NoneType), "a callable")
    plans = {name: plan(model, batch, name, calls) for name in layouts}
    backward = backward and all(p.trains for p in plans.values()) and not OF_GRADIENTS.keys() & {*modes}
    first, *others = modes or layouts
    report = Report(name_of(model), (first, *others), tokens=plans[layouts[0]].tokens.count)
    go = partial(step, model, loss=loss, backward=backward, seed=seed)
    if modes:
        go = partial(_in_mode, model, partial(plan, batch=batch, layout=layouts[0], calls=calls), report, go.keywords)
        plans = {mode: mode for mode in modes}
    plain = {}
    for layout, one in () if modes else plans.items():  # a mode's first call is the one that is traced
        for _ in range(1 + measure):  # the first of two compiles
            plain[layout] = go(one, traced=False).seconds
    runs = {layout: freeze(go(one)) for layout, one in plans.items()}
    report.overhead = max((runs[k].seconds / plain[k] for k in plain), default=float("nan"))
    report.digest_share = max(r.digest_bytes / r.activation_bytes if r.activation_bytes else 0.0 for r in runs.values())
    for other in others:
        _pair(report, go, (plans[first], plans[other]), runs[first], runs[other], rounds, folder)
    if report.causes and not modes and (said := _padding(model, [*plans.values()], seed)):
        report.warnings.append(said)
    return report


def _checked(model, layouts: Sequence[str], modes: Sequence[str]) -> tuple[list[str], list[str]]:
    if not callable(model):
        raise ValueError(f"model is a {type(model).__name__}, expected an nn.Module or a function")
    layouts = layouts if isinstance(layouts, str) else layouts or LAYOUTS[: 1 if modes else None]
    given = {"layouts": layouts, "modes": modes} if modes else {"layouts": layouts}
    for name, values in given.items():
        least = 1 if modes and name == "layouts" else 2
        different = () if isinstance(values, str) else dict.fromkeys(strings_of("locate", name, values))
        if len(different) < least or least == 1 < len(different):
            expected = f"one layout, of which {len(modes)} modes are compared" if least == 1 else f"different {name}"
            raise ValueError(f"{name} is {truncated_repr(values)}, expected {'two or more ' * (least == 2)}{expected}")
    for mode in modes:
        if not isinstance(model, nn.Module) and read_mode(mode)[0] not in (GIVEN, *OF_GRADIENTS):
            raise ValueError(f"modes holds {mode!r}, which needs an nn.Module, and model is {name_of(model)}")
    check_one_device(model)
    return list(dict.fromkeys(layouts)), list(dict.fromkeys(modes))


def _in_mode(model, plan_of: Callable, report: Report, options: dict, mode: str, **how) -> Run:
    """Runs a copy of a model in a mode: what one run leaves in it must not be there in the next."""
    try:
        subject = copied(model) if isinstance(model, nn.Module) else model
    except Exception as error:
        subject, said = model, f"{report.model} cannot be copied, so each run begins where the last ended"
        if (note := f"{said}: {sentence(error)}.") not in report.notes:
            report.notes.append(note)
    made = plan_of(subject)
    made.layout = mode
    return step(subject, made, mode=mode, **options, **how)


def check_one_device(model) -> None:
    """Raises ValueError for a model on several devices."""
    devices = sorted({str(p.device) for p in model.parameters()}) if isinstance(model, nn.Module) else []
    if len(devices) > 1:
        raise ValueError(f"model is on {' and '.join(devices)}, expected all of it on one device")


def _padding(model: nn.Module | Callable, plans: Sequence[Plan], seed: int) -> str:
    """Returns the sentence on a model that is given no mask, whose results of real tokens change with the numbers in
    the padding; "" for any other."""
    padded = [one for one in plans if one.other_padding]
    if not padded or padded[0].masks:
        return ""
    one = padded[0]
    runs = [step(model, p, None, False, seed) for p in (one, Plan(one.layout, one.tokens, one.other_padding))]
    if not any(pair is not None and pair.differs.any() for pair in Comparison(*map(freeze, runs)).outputs()):
        return ""
    takes = ()
    with contextlib.suppress(TypeError, ValueError):  # not a Python function
        takes = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters
    mask = next((k for k in takes if "mask" in k), "")
    why = f"the batch holds no {mask}, which {name_of(model)} takes" if mask else f"it takes no argument such as {MASK}"
    layouts = f"layout{'s' * (len(padded) > 1)} {' and '.join(one.layout for one in padded)}"
    return f"{name_of(model)} reads padding because {why}: drift in {layouts} is the caller's."


def _noted(report: Report, a: Run, b: Run) -> Comparison:
    """Compares two runs and notes how much of them. Raises ValueError where nothing could be compared."""
    comparison = Comparison(a, b)
    if moved := [k for k, digest in a.buffers.items() if b.buffers.get(k, digest) != digest]:
        listed = ", ".join(moved[:5]) + " …" * (len(moved) > 5)
        report.notes.append(f"Buffers that differ before the call between {a.layout} and {b.layout}: {listed}.")
    report.events = len(comparison.canonical)
    report.compared += sum(p is not None for p in comparison.pairs.values())
    report.by_op += comparison.unaligned
    outputs = comparison.outputs()
    report.output &= any(pair is not None for pair in outputs)
    names = next((run.outputs for run in (a, b) if len(run.outputs) == len(outputs) > 1), ())
    for said, which in (
        ("differ", [p is not None and p.differs.any() for p in outputs]),
        ("are not compared", [p is None for p in outputs]),
    ):
        if found := [name for name, one in zip(names, which) if one]:
            listed = ", ".join(found[:5]) + " …" * (len(found) > 5)
            report.notes.append(f"Outputs that {said} between {a.layout} and {b.layout}: {listed}.")
    if not report.compared:
        raise ValueError(f"{report.model}: no tensor of it could be compared, expected some of (samples, tokens, …)")
    return comparison


def _pair(report: Report, go: Callable, plans: tuple, a: Run, b: Run, rounds: int, folder) -> None:
    """Finds the causes between two layouts; after each round the known ones are repaired."""
    known: dict[tuple, Cause] = {}
    repairs: dict = {}
    comparison = _noted(report, a, b)
    for turn in range(rounds + 1):
        new = [c for c in comparison.causes() if c.key not in known]
        if not new:
            break
        if turn == rounds:
            report.complete = False
            break
        known |= {c.key: c for c in new}
        b = look_into(comparison, new, go, plans, repairs, folder, len(known) - len(new))
        if all(c.direction == PARAMETER for c in new):
            break
        comparison = Comparison(a, b)
    for c in [c for c in known.values() if c.again is False]:
        where = f"{c.op} in {c.path or 'the model'}, {c.direction}"
        report.notes.append(f"Agreed when run again, the other ops repaired: {where}.")
        if any(other.again for other in known.values()):
            del known[c.key]
    report.causes += sorted(known.values(), key=lambda c: (c.direction == PARAMETER, c.direction == BACKWARD))


def record(model: nn.Module | Callable, batch, layout: str, folder: str | Path, **options) -> Run:
    """Runs a layout and writes what `against` compares another run with: no tensors, but their digests by token.

    options: loss, backward, calls and seed, as of `locate`. Raises ValueError as `locate` does."""
    run = _run(model, batch, layout, **options)
    recording.save(run, _hash(batch), Path(folder))
    return run


def against(model: nn.Module | Callable, batch, layout: str, folder: str | Path, **options) -> Report:
    """Runs a layout and compares it with a run that `record` wrote, of another process, layout or machine.

    Only digests are known of that one: causes have no drift, no script, and none is repaired. options: as of `record`.
    Raises ValueError for a recording of another batch or format, and as `locate` does.
    """
    other = recording.load(Path(folder), _hash(batch))
    run = _run(model, batch, layout, **options)
    run.layout, other.layout = f"{layout} here", f"{other.layout} in {Path(folder).name}"
    report = Report(type(model).__name__, (other.layout, run.layout), tokens=run.tokens.count)
    changed = [n for n, d in run.weights.items() if other.weights.get(n) != d]
    if changed or len(run.weights) != len(other.weights):
        which = f"{len(changed)}, {', '.join(changed[:3])}{' …' * (len(changed) > 3)}" if changed else "their names"
        report.warnings.append(f"The weights differ ({which}), and so does what follows from them.")
    report.causes = _noted(report, other, run).causes()
    if report.causes:
        report.notes.append("Of recorded runs no cause is repaired, so one may hide what drifts behind it.")
    return report


def _run(model, batch, layout: str, loss=None, backward: bool = True, calls=None, seed: int = 0) -> Run:
    check_one_device(model)
    made = plan(model, batch, layout, calls)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())} if isinstance(model, nn.Module) else {}
    return freeze(step(model, made, loss, backward, seed), held)


def _hash(batch) -> str:
    return recording.hash_of(t for t in tree_leaves(batch) if isinstance(t, torch.Tensor))
