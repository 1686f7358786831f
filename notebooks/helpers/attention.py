"""Runs the experiments of the attention audit, several at a time on a GPU, and says which of them are missing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from bi_kernels.audit import parallel
from bi_kernels.audit.checks import gradient as gradients
from bi_kernels.audit.compare import compare
from bi_kernels.audit.controls import attention as controls
from bi_kernels.audit.controls.run import groups, judge_control
from bi_kernels.audit.findings import Row
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from helpers import attention_edges as edges
from helpers import attention_generation as generation
from helpers import attention_on_gpu as on_gpu
from helpers import coverage
from helpers.common import Counts, differing, is_ours, sixteen_bits


def _every(session) -> Iterable[int]:
    return range(len(session.make()))


def _of_this_package(session) -> Iterable[int]:
    return _every(session) if is_ours(session) else ()


def _without_window(session) -> list[int]:
    return [i for i, s in enumerate(session.make()) if s.problem.op.name == "attention"]


def _captured(session) -> list[int]:
    return edges.in_first_dtype(session) if session.on_gpu and is_ours(session) else []


def _widths(session) -> Sequence[str]:
    return edges.WIDTHS[session.on_gpu] if is_ours(session) else ()


def _crowded(session) -> list[int]:
    return edges.in_first_dtype(session)[:1] if is_ours(session) else []


def _far(session) -> list[int]:
    full = session.on_gpu and session.parameters["shapes"] != "tiny" and is_ours(session)
    return edges.in_first_dtype(session)[:1] if full and session.dtypes[0] != "fp32" else []


def _late(session) -> list[int]:
    if not (is_ours(session) and on_gpu.applies(session)):
        return []
    subjects = session.make()
    return [i for i in _without_window(session) if subjects[i].problem.dtype.itemsize == 2]


class Experiment(NamedTuple):
    name: str
    function: Callable[..., list[Row]]  # of a session and one of the numbers
    numbers: Callable[..., Iterable[int | str]]  # of a session: its subjects' places, or cases of heads


EXPERIMENTS = (  # on a GPU those that compile most come first, lest a process be left alone with one of them at the end
    Experiment("widths", edges.widths, _widths),
    Experiment("captured", on_gpu.captured, _captured),
    Experiment("captured", on_gpu.of_nobody, lambda session: _captured(session)[:1]),
    Experiment("generation", generation.generation, _every),
    Experiment("starts", generation.starts, _every),
    Experiment("edges", edges.edges, _of_this_package),
    Experiment("uneven", generation.uneven, _without_window),
    Experiment("late copies", on_gpu.late, _late),
    Experiment("generation", generation.later_splits, lambda session: [0]),
    Experiment("edges", edges.far_heads, _far),
    Experiment("edges", edges.wrapped_heads, _far),
    Experiment("edges", edges.nan_without_keys, lambda session: [0]),
    Experiment("edges", edges.crowd, _crowded),
    Experiment("edges", edges.forgotten, _crowded),
    Experiment("late copies", on_gpu.unwaited, lambda session: _late(session)[:1]),
)


QUICK = "starts", "generation", "uneven"


def run(session, only: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Runs every experiment, or those named in `only`, of every subject; in the quick form a few, of the first subject.
    Records their rows; returns them by name."""
    items = _items(session, only)
    found: dict[str, list[Row]] = {e.name: [] for e in EXPERIMENTS}
    for (i, _), rows in zip(items, parallel.each(session, _run, items)):
        session.add(rows)
        found[EXPERIMENTS[i].name] += rows
    return found


def begin(session) -> None:
    """Begins, on a GPU, every experiment and control, while the relations are judged."""
    parallel.ahead(session, _run, _items(session))
    parallel.ahead(session, judge_control, groups(session))


def _items(session, only: Sequence[str] = ()) -> list[tuple[int, int]]:
    only = only or QUICK * session.quick
    chosen = [i for i, e in enumerate(EXPERIMENTS) if not only or e.name in only]
    count = 1 if session.quick else None
    return [(i, number) for i in chosen for number in [*EXPERIMENTS[i].numbers(session)][:count]]


def _run(session, item: tuple[int, int]) -> list[Row]:
    experiment, number = item
    return EXPERIMENTS[experiment].function(session, number)


def missing(session) -> list[Row]:
    """Returns a row that needs a fix for every experiment that is not in the session's rows; the quick form promises
    none."""
    return (
        []
        if session.quick
        else [
            row
            for number, s in enumerate(session.make())
            for row in coverage.missing(session.rows, s, _required(session, s, number))
        ]
    )


def _required(session, s: OpUnderTest, number: int) -> Iterator[dict]:
    def rows(relation: str, layouts: Iterable[str], tensors: Sequence[str] = (), **more) -> Iterator[dict]:
        for layout in layouts:
            for tensor in tensors or [None]:
                yield {"relation": relation, "layout": layout} | more | ({"tensor": tensor} if tensor else {})

    returned, trained, ways = list(s.problem.returned), ("dq", "dk", "dv"), generation.ways(session, s)
    last = sorted({generation.last_of(way.tokens, suffix) for way in ways for suffix in generation.SCORES})
    places, late = [generation.places(session)], [on_gpu.LAYOUT]
    yield from rows("invariance", [way.name for way in ways] + places)
    yield from rows("accuracy", [*last, *edges.LAYOUTS], returned)
    yield from rows("determinism", last)
    yield from rows(gradients.INVARIANCE, places, ["dq"])
    yield from rows(gradients.ACCURACY, edges.TRAINED, trained)
    if number in _without_window(session):
        for kind in (CANCELLING, "nonfinite"):
            yield from rows("invariance", generation.uneven_layouts(session), inputs=kind)
    if number in _far(session):
        yield from rows("invariance", [edges.FAR])
    if number in _crowded(session):
        yield from rows("invariance", [edges.CROWDED])
        yield from rows(gradients.INVARIANCE, [edges.CROWDED], trained)
    if number in _captured(session):
        yield from rows("invariance", ("cuda_graph", on_gpu.UNALIGNED, "torch.compile"))
        yield from rows("invariance", on_gpu.ENDS, ("out", "lse"))
        yield from rows(gradients.INVARIANCE, on_gpu.ENDS, trained)
    if number in _late(session):
        yield from rows("invariance", late)
        yield from rows(gradients.INVARIANCE, late, trained)
    for case in _widths(session) if number == edges.in_first_dtype(session)[0] else ():
        yield from rows("invariance", edges.WIDE_LAYOUTS, case=case)
        yield from rows(gradients.INVARIANCE, edges.WIDE_GRADIENTS, trained, case=case)
        yield from rows("accuracy", ["rows"], case=case)
        yield from rows(gradients.ACCURACY, ["rows"], trained, case=case)


def stock_generation(session) -> dict[str, float]:
    """Returns {layout: elements of out that differ} where torch's flash attention decodes the last tokens, against its
    own prefill."""
    line, dtype = {}, sixteen_bits(session)
    if dtype == "fp32" and session.on_gpu:  # it has none
        return line
    s = session.subject("attention", dtype)
    for n, tail, _ in generation.GENERATED[session.on_gpu]:
        q, k, v = (t[None] for t in s.problem.inputs("normal", n)[0].values())
        flash = lambda first, end: controls.flash_decode(q[:, first:end], k[:, :end], v[:, :end])[0]
        parts = [flash(i, i + 1) for i in range(n - tail, n)]
        line[f"decode, cache of {n}"] = compare(torch.cat(parts, 1), flash(0, n)[:, n - tail :]).mismatches
    return line


def by_layout(rows: Iterable[Row]) -> Counts:
    """Returns {case and dtype: {layout: elements that differ}}; NaN where it raised."""
    out: Counts = {}
    for r in rows:
        if r.relation == "invariance":
            line = out.setdefault(f"{r.case or r.op} {r.dtype}", {})
            line[r.layout] = differing(r)
    return out


def title(rows: Iterable[Row]) -> str:
    """Returns what a generation's rows say, in one line."""
    ways = [r for r in rows if r.relation == "invariance" and not r.control]
    whose = ", ".join(dict.fromkeys(r.candidate for r in ways))
    failed = sum(r.mismatches is None for r in ways)
    said = f"{len({r.layout for r in ways})} ways to compute a sequence, compared {len(ways)} times"
    return (
        f"{whose}, {said}: {sum(r.mismatches or 0 for r in ways)} elements differ"
        + f", {failed} could not be computed" * (failed > 0)
    )
