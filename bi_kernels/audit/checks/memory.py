"""Memory: where inputs and results lie, what is written into, and whether a result outlives later calls."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bi_kernels.audit.axes import Kind
from bi_kernels.audit.checks.edge_cases import ALIKE, no_rows
from bi_kernels.audit.checks.modes import untrained
from bi_kernels.audit.checks.placement import EXPANDED, SHIFTED, apart, expanded, shifted
from bi_kernels.audit.checks.requests import Variant
from bi_kernels.audit.compare import Drift, Tensors, compare
from bi_kernels.audit.findings import UNSUPPORTED, Row, sentence
from bi_kernels.audit.layouts import VIEWS, unaligned
from bi_kernels.audit.reproduce.samples import in_larger, with_strides
from bi_kernels.audit.step import Results, Step
from bi_kernels.audit.targets import callable_step as callables
from bi_kernels.audit.targets import op_step as ops
from bi_kernels.audit.targets.any_callable import REFUSALS, CallableTarget, alike, tensors
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_config import joined
from bi_kernels.tokens import TokenLayout

VIEWED_ROWS, VIEWED_QUERIES = 65, 2049  # tokens given as views; attention chooses its schedule by their number
ALIGNED, ADDRESSES, APART = "aligned", "every address", "each tensor in other strides"
OFFSETS, FEW = range(1, 17), 5  # elements between an aligned address and a tensor; tokens of a call at each
VIEWED = (*VIEWS, APART, ADDRESSES)
NO_ROWS = "no rows"
FLAT = "main_grad in a flat buffer"
IN_COLUMNS = "weights in columns"
LATER, GIVEN, SLICE, COLUMNS = "kept: a later call", "strides as given", "a slice of a batch", "a slice of columns"
COLUMNS_OUT, AMONG = "an output that is a slice of columns", "an output among other numbers"
HELD, WRITTEN = "other numbers in an output before", "around an output"
SPREAD, INDICES = "indices in every other column", "indices of another width"
AROUND = 4096  # numbers on either side of an output
WIDTHS = {torch.int64: torch.int32, torch.int32: torch.int64}
BACKWARD = "kept: a backward after a later call"


def after_a_later_call(step: Step, main_grad: bool = False) -> tuple[Results, Results]:
    """Compares a backward before which the target was called on others: what its forward saved must be its own."""
    base = step.folded if main_grad else step.base
    between = lambda: step.made(step.others(), main_grad=main_grad)
    return step.made(main_grad=main_grad, between=between), base


# ops of the registry


def op_memory(u: ops.Step) -> dict[str, Variant]:
    """Returns what an op is asked of what it writes: inputs, what comes upstream, outputs that a caller keeps, and no
    rows at all."""

    def untouched() -> tuple[Results, Results]:
        given, seen = u.inputs(), {}

        def upstream(number: int, dy: Tensor) -> Tensor:
            seen[f"upstream[{number}]"] = dy
            return dy

        u.made(given, upstream=upstream)
        rolled = u.inputs()
        with torch.no_grad():
            u.outputs_of(rolled)
        expected = u.inputs() | {f"upstream[{i}]": dy for i, dy in enumerate(u.dy)}
        held = {k: t.detach() for k, t in given.items()} | seen
        return held | untrained(rolled), {k: expected[k] for k in held} | untrained(u.inputs())

    def kept() -> tuple[Results, Results]:
        with torch.no_grad():
            rolled = u.named(u.outputs_of(u.inputs()))
        made = u.made()
        u.made(u.others())
        u.rolled(u.others())
        return made | untrained(rolled), u.base | untrained(u.results)

    def shapes_alone() -> tuple[Results, Results]:
        """Compares gradients of samples of one length where a token layout says so and where shapes do."""
        step = ops.Step(u.subject, CANCELLING, [ALIKE] * 3)
        told = step.gradients("batch")
        with TokenLayout([0], [step.count], step.count):
            pass  # what was left again must not count
        step.says_layout = False
        named = lambda made: {f"d{k}": t for k, t in made.items()}
        return named(step.gradients("batch")), named(told)

    in_flat_buffer = {FLAT: lambda: (u.made(main_grad=True, offset=1), u.folded)} if u.parameters else {}
    return in_flat_buffer | {
        "no token layout": shapes_alone,
        "inputs and upstream": untouched,
        "outputs kept": kept,
        "backward after a later call": lambda: after_a_later_call(u),
        NO_ROWS: lambda: no_rows(u),
    }


def by_view(subject: OpUnderTest) -> Iterator[Row]:
    """Compares the same values in views that lie otherwise in memory."""
    for name in VIEWS if subject.problem.brief else VIEWED:
        said = {"against": ALIGNED, "inputs": CANCELLING, "rows": _viewed_rows(subject, name), "axes": [Kind.MEMORY]}

        def asked() -> Drift | Row:
            if why := layout_refusal(subject, lambda: run_on_view(subject, name, CANCELLING)):
                return subject.row("invariance", name, Drift(0, 0), detail=why, **said)
            expected = run_contiguous(subject, name, CANCELLING)  # first: what it remembers must not serve a view
            return compare(run_on_view(subject, name, CANCELLING), expected)

        yield from subject.attempt("invariance", name, asked, **said)


def _viewed_rows(subject: OpUnderTest, name: str) -> int:
    many = min(VIEWED_QUERIES, subject.largest) if subject.problem.op.cache else VIEWED_ROWS
    return FEW if name == ADDRESSES else many


def _given(subject: OpUnderTest, name: str, kind: str) -> tuple[dict, dict, tuple, Tensor]:
    m, (tokens, shared) = _viewed_rows(subject, name), subject.inputs(kind, _viewed_rows(subject, ALIGNED))
    return {k: t[:m] for k, t in tokens.items()}, shared, (m,), torch.arange(m, device=subject.problem.device)


def run_on_view(subject: OpUnderTest, name: str, kind: str) -> Tensors:
    """Returns what is made of the tensors in a view; of every address a tuple, one each."""
    tokens, shared, *rest = _given(subject, name, kind)

    def made(view: Callable, weights: bool = True) -> Tensors:
        moved = {k: view(t) for k, t in tokens.items()}
        return joined(subject.forward(moved, {k: view(t) if weights else t for k, t in shared.items()}, *rest))

    if name == APART:
        views = itertools.cycle((torch.clone, *reversed(VIEWS.values())))
        return made(lambda t: next(views)(t))
    if name == ADDRESSES:  # of the weights in every other call
        return tuple(made(lambda t: unaligned(t, n), bool(n % 2)) for n in OFFSETS)
    return made(VIEWS[name])


def run_contiguous(subject: OpUnderTest, name: str, kind: str) -> Tensors:
    """Returns what a view is compared with."""
    out = subject.call(*_given(subject, name, kind))
    return (out,) * len(OFFSETS) if name == ADDRESSES else out


def layout_refusal(subject: OpUnderTest, ask: Callable) -> str:
    """Returns in which words a candidate refuses how its inputs lie in memory, '' where it does not."""
    try:
        if subject.candidate != "bi_kernels":
            ask()
    except Exception as error:
        clear = isinstance(error, (TypeError, ValueError, NotImplementedError))
        if clear and any(word in str(error) for word in ("contiguous", "stride", "aligned")):
            return f"refused: {sentence(error)}"
    return ""


# any callable


def _kept(t: CallableTarget) -> list[Row]:
    """Another call, on other samples in the same shapes, must leave alone what the first one returned."""
    with torch.no_grad(), t.layout(t.every):
        first = t.results(t.take(t.every))
        before = [y.clone() for y in first]
        t.results(t.take(t.every[::-1]))
    said = {"against": "itself before", "rows": t.count, "axes": [Kind.KEPT]}
    said["detail"] = "a later call writes into what this one returned"
    return t.compared("invariance", LATER, t.rows(first, t.count), t.rows(before, t.count), **said)


def places(t: CallableTarget) -> dict[str, Callable]:
    """Returns where else in memory tensors are asked to lie: what puts the one of that name there."""

    def inputs(view: Callable) -> Callable:
        return lambda k, v: view(v) if k in t.batched and k not in t.outputs else v.clone()

    def outputs(view: Callable) -> Callable:
        return lambda k, v: view(v) if k in t.outputs else v.clone()

    columns = lambda v: in_larger(v, {t.batch, v.dim() - 1})
    out = {
        SLICE: inputs(lambda v: in_larger(v, {t.batch})),
        COLUMNS: inputs(columns),
        SHIFTED: inputs(lambda v: shifted(v, min(t.batch + 1, v.dim() - 1))),
    }
    if len(several := [k for k in tensors(t.values) if k in t.batched and k not in t.outputs]) > 1:
        out[APART] = lambda k, v: columns(v) if k in several[1::2] else v.clone()
    if any(not v.is_contiguous() for k, v in tensors(t.values).items() if k not in t.outputs):
        out[GIVEN] = lambda k, v: v.clone() if k in t.outputs else with_strides(v, v.stride())
    if indices := [k for k, v in tensors(t.values).items() if v.dtype in WIDTHS and v.dim() and k not in t.outputs]:
        out[INDICES] = lambda k, v: v.to(WIDTHS[v.dtype]) if k in indices else v.clone()
        out[SPREAD] = lambda k, v: apart(v) if k in indices else v.clone()
    if t.outputs:
        out |= {COLUMNS_OUT: outputs(columns), AMONG: outputs(_among_others)}
    if t.first not in t.outputs and t.outputs:  # else it reads what it writes into
        out[HELD] = outputs(lambda v: torch.full_like(v, float("nan")) if v.is_floating_point() else ~v)
    return out


def placed(t: CallableTarget, layout: str) -> list[Tensor]:
    """Returns the outputs of a call on all samples, whose tensors have another memory layout."""
    return t.called(_given_in(t, layout))


def _given_in(t: CallableTarget, layout: str) -> dict[str, Tensor]:
    place = places(t)[layout]
    return {k: place(k, v) for k, v in tensors(t.values).items()}


def _among_others(v: Tensor) -> Tensor:
    """Returns the same numbers in one piece, between others in memory."""
    return in_larger(v.flatten(), {0}, AROUND).view(v.shape)


def _around(t: Tensor) -> Tensor:
    """Returns what lies in a tensor's memory and is none of its numbers."""
    whole = t.new_empty(0).set_(t.untyped_storage())
    others = torch.ones_like(whole, dtype=torch.bool)
    others.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(False)
    return whole[others]


def _placed(t: CallableTarget, layout: str, whole: list[Tensor]) -> list[Row]:
    """Compares the whole batch, its tensors lying otherwise in memory, with the whole batch, and what lies around
    outputs with what lay there; a callable that refuses such tensors, and says so, is not judged, nor one that
    computes with its indices."""
    said = {"against": "in one piece", "rows": t.count, "axes": [Kind.MEMORY]}
    given = _given_in(t, layout)
    before = {k: _around(given[k]) for k in t.outputs}
    try:
        found = t.called(given)
    except REFUSALS as error:
        return [t.row("invariance", layout, verdict=UNSUPPORTED, detail=sentence(error), **said)]
    if layout == INDICES and any(a.dtype != b.dtype for a, b in zip(found, whole)):
        return [
            t.row(
                "invariance", layout, verdict=UNSUPPORTED, detail="its results have the dtype of its integers", **said
            )
        ]
    told = said | {"against": "itself before", "detail": f"{layout}: it writes around its output"}
    rows = [
        t.row("invariance", WRITTEN, compare(_around(given[k]), numbers), tensor=k, **told)
        for k, numbers in before.items()
        if len(numbers)
    ]
    return t.compared("invariance", layout, found, whole, **said) + rows


def _one_sample(t: CallableTarget) -> list[Row]:
    """Gives all samples the numbers of the first, which lie in memory once; against one place for each."""
    said = {"against": "a place in memory for each", "rows": t.count, "axes": [Kind.MEMORY]}
    inputs = {k: v for k, v in tensors(t.values).items() if k in t.batched and k not in t.outputs}
    given = {k: expanded(v.movedim(t.batch, 0)).movedim(0, t.batch) for k, v in inputs.items()}
    before = {k: v.clone() for k, v in given.items()}
    try:
        found = t.called(given)
        if any(compare(v, before[k]).mismatches for k, v in given.items()):
            raise ValueError("it writes into its inputs, which lie in memory once")
        found, wanted = [y.clone() for y in found], t.called(before)
    except REFUSALS as error:
        return [t.row("invariance", EXPANDED, verdict=UNSUPPORTED, detail=sentence(error), **said)]
    return t.compared("invariance", EXPANDED, found, wanted, **said)


def _in_columns(t: CallableTarget, weights: list[str], whole: list[Tensor]) -> list[Row]:
    """Lays the matrices that all samples share out by columns. That may change the order of a sum, but for all samples
    alike, and nothing more."""
    columns = {k: t.values[k].mT.clone(memory_format=torch.contiguous_format).mT for k in weights}
    said = {"against": IN_COLUMNS, "rows": max(2, t.count // 3), "axes": [Kind.COUNT]}
    few = t.every[: said["rows"]]
    try:
        found = t.called(columns)
        with torch.no_grad(), t.layout(few):
            own = t.rows(t.results(t.take(few) | columns), len(few))
    except REFUSALS as error:
        return [t.row("invariance", IN_COLUMNS, verdict=UNSUPPORTED, detail=sentence(error), **said)]
    rows = t.compared("invariance", IN_COLUMNS, own, [y[few] for y in found], **said)
    said = {"against": "by rows", "rows": t.count, "axes": [Kind.MEMORY], "detail": "not the same function"}
    return rows + [
        t.row("invariance", IN_COLUMNS, compare(y, wanted), tensor=name, **said)
        for name, y, wanted in zip(t.output_names(), found, whole)
        if not alike(wanted, y)
    ]


def memory(t: CallableTarget, whole: list[Tensor]) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges each place in memory against the whole batch."""
    shared = {k: v for k, v in tensors(t.values).items() if k not in t.batched and k not in t.outputs}
    weights = [k for k, v in shared.items() if v.dim() > 1 and v.is_floating_point() and min(v.shape) > 1]
    found = {LATER: partial(_kept, t)} | {layout: partial(_placed, t, layout, whole) for layout in places(t)}
    found[EXPANDED] = partial(_one_sample, t)
    return found | ({IN_COLUMNS: partial(_in_columns, t, weights, whole)} if weights else {})


def backward_memory(t: CallableTarget, step: callables.Step) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges a backward before which the callable was called again."""
    said = {"against": "without the later call", "rows": t.count, "axes": [Kind.KEPT]}
    return {BACKWARD: partial(t.gradient_rows, BACKWARD, partial(after_a_later_call, step, main_grad=True), **said)}
