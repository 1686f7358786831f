"""Is this callable batch-invariant? `audit(fn, *inputs)` judges any function, nn.Module, compiled function or launcher.

The batch is one dimension of the first tensor; every sample along it is asked to keep its bits whatever stands beside it.
The relations are the audits' own (see judge.py); layouts are those that need no knowledge of the op.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.progress import track
from torch.utils._pytree import tree_leaves

from bi_kernels import contract
from bi_kernels.audit.callables.target import Layout, NoBackward, OutOfTime, Step, Target
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, UNSUPPORTED, Row, sentence
from bi_kernels.audit.relations.forward import against_bound
from bi_kernels.audit.relations.gradient import DETERMINISM, INVARIANCE
from bi_kernels.audit.static.finding import UNREADABLE
from bi_kernels.audit.static.launches import recorded
from bi_kernels.audit.static.source import source
from bi_kernels.audit.static.verdict import atomics_free
from bi_kernels.contract import CONTRACT, SWEEP, dtype_name

SINGLES = 16  # samples that are computed alone, spread over the batch
RECOMPILES = 256
TRAINED = ("permuted", "padded", "left_padded", "micro_batches:ragged", "neighbours:nonfinite")  # layouts of a backward
EACH = 64  # samples up to which each is a micro-batch of its own


def plan(count: int, seed: int = 0) -> dict[str, tuple[Layout, str]]:
    """{layout: (calls, what fills a place without a sample)} over `count` samples."""
    every = list(range(count))
    some = sorted({round(i * (count - 1) / max(1, min(count, SINGLES) - 1)) for i in range(min(count, SINGLES))})
    third, pad = max(1, count // 3), -count % 16 or 16
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    order = order if order != every else every[::-1]
    split = [every[:third], every[third:]]
    beside = [[i if i % 2 == parity else -1 for i in every] for parity in (0, 1)]
    return {  # those that tell most come first, should the time run out
        "singles": ([[i] for i in some], "stale"),
        "permuted": ([order], "stale"),
        "padded": ([every + [-1] * pad], "stale"),
        "left_padded": ([[-1] * pad + every], "stale"),
        "micro_batches:ragged": (split, "stale"),
        "neighbours": (beside, "stale"),
        "neighbours:nonfinite": (beside, "nonfinite"),
        **{f"rows:{m}": ([every[:m]], "stale") for m in contract.rows(count) if m < count},
    }


@dataclass
class Report:
    """The verdict of one callable with its evidence; shows itself as Markdown in Jupyter and as text elsewhere."""

    name: str
    rows: list[Row]
    read: str  # how the inputs were read
    notes: list[str] = field(default_factory=list)
    repro: Path | None = None
    target: Target | None = None

    @property
    def verdict(self) -> str:
        found = {r.verdict for r in self.rows}
        return NEEDS_FIX if NEEDS_FIX in found else PASS if PASS in found else UNSUPPORTED

    @property
    def passed(self) -> bool:
        return self.verdict == PASS

    def markdown(self) -> str:
        from bi_kernels.audit.evidence import tables as show

        parts = [f"### {self.name}: {show.MARK[self.verdict]}", self.read, *self.notes, show.by_op(self.rows).data]
        if not self.passed:
            parts.append(show.drifts(self.rows).data)
        if self.repro:
            parts.append(f"Reproduce with `python {self.repro}`.")
        return "\n\n".join(parts)

    _repr_markdown_ = markdown
    __repr__ = markdown


def _compared(
    t: Target,
    relation: str,
    layout: str,
    found: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    names: Sequence[str],
    **more,
) -> list[Row]:
    return [t.row(relation, layout, compare(a, b), tensor=name, **more) for name, a, b in zip(names, found, wanted)]


def _outputs(t: Target) -> list[str]:
    judged = [i for i, d in enumerate(t.dims) if d is not None]
    return [t.outputs[i] if t.outputs else "out" if len(t.dims) == 1 else f"out[{i}]" for i in judged]


def determinism(t: Target, runs: int) -> list[Row]:
    """The same call again; and, where it differs, whether a seed makes it the same."""
    every = [list(range(t.count))]
    first = t.compute(every)[1]
    for _ in range(runs - 1):
        rows = _compared(
            t,
            DETERMINISM,
            "whole batch",
            t.compute(every)[1],
            first,
            _outputs(t),
            against="itself",
            rows=t.count,
            detail=f"{runs} runs",
        )
        if any(r.verdict == NEEDS_FIX for r in rows):
            seeded = []
            for _ in range(2):
                torch.manual_seed(t.seed)
                seeded.append(t.compute(every)[1])
            random = all(not compare(a, b).mismatches for a, b in zip(*seeded))
            for r in rows:
                r.detail = (
                    "random: equal once torch.manual_seed is called before each call; nothing else was judged"
                    if random
                    else "not deterministic, whatever the seed; nothing else was judged"
                )
            break
    return rows


def invariance(t: Target, name: str, layout: Layout, filler: str, whole: dict) -> list[Row]:
    """Every sample's bits under a layout against those of the whole batch."""
    rows, calls = (
        [],
        f"{len(layout)} call{'s' * (len(layout) > 1)} of {', '.join(map(str, sorted({len(c) for c in layout})))}",
    )
    for kind in whole:
        try:
            samples, found = t.compute(layout, filler, kind)
            rows += _compared(
                t,
                "invariance",
                name,
                found,
                [w[samples] for w in whole[kind]],
                _outputs(t),
                inputs=kind,
                rows=max(map(len, layout)),
                detail=calls,
            )
        except OutOfTime:
            raise
        except Exception as error:
            rows.append(
                t.row(
                    "invariance",
                    name,
                    inputs=kind,
                    rows=max(map(len, layout)),
                    detail=f"{calls}; raised {sentence(error)}",
                )
            )
    return rows


def gradients(t: Target, step: Step, name: str, layout: Layout, filler: str, whole: dict) -> list[Row]:
    """What backward left under a layout against what it left for the whole batch."""
    try:
        found = step.gradients(layout, filler)
    except OutOfTime:
        raise
    except Exception as error:
        return [t.row(INVARIANCE, name, rows=max(map(len, layout)), detail=f"raised {sentence(error)}")]
    rows, samples = [], sorted(i for call in layout for i in call if i >= 0)  # a layout may leave some out
    for k, expected in whole.items():
        if filler == "nonfinite" and k.removeprefix("d") not in t.batched:
            continue  # NaN beside a sample is in the sum over samples
        if k not in found:
            rows.append(
                t.row(INVARIANCE, name, tensor=k, rows=max(map(len, layout)), detail="backward left no gradient")
            )
            continue
        expected = expected[samples] if k.removeprefix("d") in t.batched else expected
        rows += _compared(t, INVARIANCE, name, [found[k]], [expected], [k], rows=max(map(len, layout)))
    return rows


def accuracy(t: Target, reference: Callable) -> list[Row]:
    """The error against `reference` in fp64: at most twice that of the reference itself in the inputs' dtype, and one
    rounding (the criterion of FlashAttention's tests)."""

    def judged(values: dict) -> list[torch.Tensor]:
        found = tree_leaves(t.returned(reference, values))
        if len(found) != len(t.dims):
            raise ValueError(f"the reference returned {len(found)} tensors, expected {len(t.dims)}, as {t.name} does")
        return [y for y, d in zip(found, t.dims) if d is not None]

    raised = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in t.values.items()
    }
    ours = [y for y, d in zip(t.call(range(t.count)), t.dims) if d is not None]
    rows = []
    for name, y, low, exact in zip(_outputs(t), ours, judged(t.values), judged(raised)):
        u, tiny = contract.rounding(y.dtype)
        limit = CONTRACT["any"]["accuracy"] * (low.double() - exact).abs().max() + u * exact.abs() + tiny
        rows.append(
            against_bound(
                t,
                "accuracy",
                y,
                exact.double(),
                limit.expand_as(exact),
                y.dtype,
                "given",
                t.count,
                f"twice the reference's own error in {dtype_name(t.dtype)}",
                name,
            )
        )
    return rows


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
    **constants,
) -> Report:
    """Judges whether a sample's result, and every gradient, depends on what else is in the batch.

    fn(*inputs, **constants) is called on parts of the batch, in other orders, beside other samples and beside NaN; a
    callable may be a function, an nn.Module (its parameters' gradients are judged too), a compiled function or a Triton
    launcher (name what it writes into: outputs=("out",)). batch: the dimension of the first tensor that counts samples;
    which other tensors hold a row a sample is found out, or said with shared=("weight",). reference: an fp64-able
    callable of the same signature, for accuracy. backward: None judges gradients where there is a backward. seconds: the
    budget; what it did not reach needs a fix and says so. names: of the inputs, where fn's signature has none. candidate:
    how a reproducer imports fn, as in file.py:fn; imports: lines that make `fn` in it, instead of a pickle of what has no
    such name; folder: where it goes. What torch.compile made in this process, it makes again afterwards. Raises ValueError
    or TypeError with one sentence where fn cannot be judged at all.
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r:.80}, expected a callable")
    if "torch._dynamo" in sys.modules and torch._dynamo.config.recompile_limit < RECOMPILES:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):  # beyond it a compiled function runs in eager mode
            return audit(
                fn,
                *inputs,
                batch=batch,
                shared=shared,
                outputs=outputs,
                reference=reference,
                backward=backward,
                seconds=seconds,
                seed=seed,
                name=name,
                names=names,
                candidate=candidate,
                imports=imports,
                folder=folder,
                **constants,
            )
    started = time.monotonic()
    name = name or getattr(fn, "__name__", type(fn).__name__)
    t = Target(fn, inputs, constants, batch, shared, outputs, name, seed, names)
    rows, notes, every = determinism(t, 2), [], [list(range(t.count))]
    one_call = (time.monotonic() - started) / max(t.calls, 1)
    steady = all(r.verdict == PASS for r in rows)
    steps: list[tuple[str, str, Callable]] = []  # (relation, layout, what judges it)
    if steady:
        whole = {"given": t.compute(every)[1]}
        with contextlib.suppress(Exception):  # sharper inputs may be none that the callable takes
            found = t.compute(every, kind="spread")[1]
            if any(bool(y.isfinite().all()) for y in found if y.is_floating_point()):
                whole["spread"] = found
        steps.append((DETERMINISM, "whole batch", lambda: determinism(t, SWEEP["runs"])))
        for layout, (calls, filler) in plan(t.count, seed).items():
            steps.append(("invariance", layout, partial(invariance, t, layout, calls, filler, whole)))
        if backward is not False:
            step = Step(t)
            try:
                steps += _backward_steps(t, step, step.gradients(every))
            except NoBackward as error:
                notes.append(f"Its backward was not judged: {error}.")
                rows += [t.row(INVARIANCE, "whole batch", detail=f"raised {sentence(error)}")] if backward else []
            except Exception as error:
                rows.append(t.row(INVARIANCE, "whole batch", detail=f"raised {sentence(error)}"))
        if reference is not None:
            steps.append(("accuracy", "whole batch", partial(accuracy, t, reference)))
    steps.sort(key=lambda s: s[1].startswith("rows:"))  # the longest sweep last
    if steady:
        steps.append(
            (
                DETERMINISM,
                "at the end",
                lambda: _compared(
                    t,
                    DETERMINISM,
                    "at the end",
                    t.compute(every)[1],
                    whole["given"],
                    _outputs(t),
                    against="at the start",
                    rows=t.count,
                    detail="the same call before and after all others",
                ),
            )
        )
    steps.append(
        ("atomics-free", "source, PTX, SASS", partial(_static, t))
    )  # last: watched, a function is compiled anew
    shown = track(steps, description=name, transient=True, disable=not sys.stderr.isatty())
    late: dict[str, list[str]] = {}
    t.deadline = started + seconds
    for relation, layout, run in shown:
        try:
            rows += run()
        except OutOfTime:
            late.setdefault(relation, []).append(layout)
        except Exception as error:
            rows.append(t.row(relation, layout, detail=f"raised {sentence(error)}"))
    for relation, missing in late.items():
        rows.append(
            t.row(
                relation,
                "not run",
                detail=f"{', '.join(missing[:4])}{' …' * (len(missing) > 4)}: the budget of {seconds:g} "
                f"s was spent, one call takes {one_call:.2g} s; raise the parameter seconds",
            )
        )
    if t.changed:
        notes.append(f"It changes its input {', '.join(sorted(t.changed))} in place; every call here got copies.")
    if any(r.layout == "at the end" and r.verdict == NEEDS_FIX for r in rows):
        notes.append(
            "Its result depends on the calls before it, as of a function that is compiled anew for other shapes; what "
            "differs between layouts may come from that."
        )
    if any(d is None for d in t.dims):
        notes.append(
            f"Not judged, because nothing in them counts samples: outputs {[i for i, d in enumerate(t.dims) if d is None]}."
        )
    report = Report(name, rows, t.read(), notes, target=t)
    t.deadline = float("inf")
    if folder is not None and any(r.verdict == NEEDS_FIX and r.mismatches for r in rows):
        from bi_kernels.audit.reproduce.callable import export

        report.repro = export(t, rows, candidate, imports, Path(folder))
    return report


def _backward_steps(t: Target, step: Step, whole: dict) -> list[tuple[str, str, Callable]]:
    layouts = {k: v for k, v in plan(t.count, t.seed).items() if k in TRAINED}
    if t.count <= EACH:
        layouts["micro_batches:each"] = [[i] for i in range(t.count)], "stale"
    steps: list = [
        (
            INVARIANCE,
            layout,
            partial(gradients, t, step, layout, calls[:1] if filler == "nonfinite" else calls, filler, whole),
        )
        for layout, (calls, filler) in layouts.items()
    ]

    def again() -> list[Row]:
        found = step.gradients([list(range(t.count))])
        return [
            t.row(DETERMINISM, "backward", compare(found[k], whole[k]), tensor=k, against="itself", rows=t.count)
            for k in whole
        ]

    return [*steps, (DETERMINISM, "backward", again)]


def _static(t: Target) -> list[Row]:
    """Source, PTX and SASS of what one call, and its backward, launch."""
    with recorded() as launches:
        try:
            t.call(list(range(t.count)))
            Step(t).gradients([list(range(t.count))])
        except OutOfTime:
            raise
        except Exception:  # it is a row of its own
            pass
        finally:
            if "torch._dynamo" in sys.modules and torch._dynamo.utils.counters["stats"]:  # something is compiled
                torch.compiler.reset()  # else its user would be left with what was compiled to be watched
    function = type(t.module).forward if t.module is not None else t.function
    unread = [f for f in source(function) if f.kind == UNREADABLE]
    if unread and not launches.variants and not launches.findings:
        return [t.row("atomics-free", "source, PTX, SASS", verdict=UNSUPPORTED, inputs="", detail=str(unread[0]))]
    return atomics_free([(SimpleNamespace(function=function, row=t.row), launches)])[0]
