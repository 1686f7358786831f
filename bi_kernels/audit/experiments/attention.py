"""The experiments of the attention audit: generation against a long cache, uneven samples, edges, widths, CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import bi_kernels
from bi_kernels import contract, reference
from bi_kernels.audit.broken import attention as attention_controls
from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.evidence.verdicts import Row, sentence
from bi_kernels.audit.experiments import late_copies as attention_late
from bi_kernels.audit.problem.call_layouts import Call, pack, pad, spans
from bi_kernels.audit.problem.subject import SHARPEST, Subject
from bi_kernels.audit.relations import forward as judge
from bi_kernels.audit.relations import gradient as gradients
from bi_kernels.audit.relations.forward import against_bound, shapes_launched
from bi_kernels.audit.relations.step import Step
from bi_kernels.contract import DTYPES
from bi_kernels.reference_gradients import gradient

PAGE = 16
GENERATED = {
    True: [(4200, 256, (1, 7, 16, 64, 100, 1000)), (32768, 256, (1, 1000))],  # tokens, of which last, in chunks of
    False: [(132, 6, (1, 4))],
}
LAST = 16  # queries of a long sequence that are held against fp64
SCORES = {
    "": 1,
    ", large scores": 8,
}  # their factors: with 1, a few splits weigh too little in a long mean for an error to show
UNEVENLY = ("packed", "permuted", "batch", "left_padded")
WIDTHS = {True: (64, 96, 256), False: (96,)}
WIDE_LAYOUTS = (
    "singles",
    "left_padded",
    "chunked:16",
    "decode of the last two",
    "micro_batches:each",
    "batch",
)  # two of gradients
UNEVEN = {True: (16384, 1, 700, 15, 5000, 129, 2, 64), False: (130, 1, 70, 15, 2)}


def _fold_in_small(session):
    """On the interpreter, whose sequences are short, splits of 64 keys, and a whole sequence is prefill."""
    return nullcontext() if session.on_gpu else attention_controls.fold(SPLIT=64, FEW=4)


def _parts(n: int, tail: int, size: int) -> list[Call]:
    """A sequence of n tokens: all but `tail` of them in one call, and then chunks of `size`."""
    every = np.arange(n)[None]
    return [Call(every[:, : n - tail])] + [Call(every[:, at : min(at + size, n)]) for at in range(n - tail, n, size)]


def _ways(session, s: Subject) -> list[tuple[int, int, int, int, dict, str]]:
    """(tokens, how many of them last, in chunks of, page, what of the fold is changed, name) of the ways to compute a long
    sequence; of the op with a window, at the first length, decode and the longest chunks alone."""
    ours, ways = session.candidate.spec == "bi_kernels", []
    for n, tail, sizes in GENERATED[session.on_gpu][: 1 if s.problem.op.constants else None]:
        if s.problem.dtype == torch.float32 and n > 10_000:  # no tensor core: it would take minutes
            continue
        for size in (sizes[0], sizes[-1]) if s.problem.op.constants else sizes:
            name, last = "decode" if size == 1 else f"chunked:{size}", min(n - 1, max(tail, 4 * size))
            ways.append((n, last, size, 0, {}, f"{name}, cache of {n}"))
            if ours and size in (sizes[0], sizes[-1]):
                ways.append((n, last, size, PAGE, {}, f"{name}, pages of {PAGE} of {n}"))
        if ours:
            ways.append((n, LAST, 1, 0, {"MOST": 0}, f"decode, splits in one program, cache of {n}"))
    return ways


def generation(session) -> list[Row]:
    """A long sequence in one call against the same tokens decoded one by one and in chunks, against a cache that lies in one
    piece or in shuffled pages; its last queries against fp64, and again."""
    rows = []
    for s in _subjects(session):
        whole = cache(lambda: s.compute([pack(spans(s.lengths))]))
        for n, tail, size, page, change, name in _ways(session, s):
            first = s.lengths != (n,)
            if first:
                s.forget()
                whole.cache_clear()
                s.own_lengths = (n,)
            with _fold_in_small(session), attention_controls.fold(**change):
                calls = _parts(n, tail, size)
                rows.append(_row(s, name, calls, lambda: compare(s.compute(calls, page=page), whole()), n))
                rows += last_queries(s) if first else []
    broken = session.subject(
        "attention", session.dtypes[0], attention_controls.later_splits_weigh_more, "later splits weigh more"
    )
    broken = replace(broken, own_lengths=GENERATED[session.on_gpu][-1][:1], memo={})
    with _fold_in_small(session):
        rows.append(_as_control(last_queries(broken)))
    return rows


def last_queries(s: Subject) -> list[Row]:
    """The last queries of a long sequence, of several splits, in one call: against fp64, and ten times."""
    (n,), p, rows = s.lengths, s.problem, []
    q, k, v = s.inputs("normal", n)[0].values()
    for suffix, large in SCORES.items():
        last, layout = q[n - LAST :] * large, f"last {LAST} of {n}{suffix}"
        ours = lambda last=last: s.called(last[None], k[None], v[None], **p.op.constants)
        try:
            found, exact = ours(), reference.attention(last, k, v, lengths=[(LAST, n)], **p.op.constants)
            rows += [
                _bounded(s, y[0], *e, dtype=dtype, layout=layout, tensor=name)
                for (name, dtype), y, e in zip(p.returned.items(), found, exact, strict=True)
            ]
            again = (compare(ours(), found) for _ in range(contract.SWEEP["runs"] - 1))
            drift = next((d for d in again if d.mismatches), compare(found, found))
            rows.append(
                s.row("determinism", layout, drift, "itself", "normal", LAST, detail=f"{contract.SWEEP['runs']} runs")
            )
        except Exception as error:
            rows.append(s.row("accuracy", layout, None, "fp64", "normal", LAST, detail=sentence(error)))
    return rows


def _bounded(
    s: Subject,
    y: torch.Tensor,
    exact: torch.Tensor,
    magnitude: torch.Tensor,
    n: int | None = None,
    *,
    dtype: torch.dtype,
    layout: str,
    tensor: str,
    of: str | None = None,
) -> Row:
    """of: the input whose gradient y is."""
    limit = contract.bound(
        "attention", dtype, exact, magnitude, n or s.problem.reduction, gradient=of, inputs=s.problem.dtype
    )
    relation = gradients.ACCURACY if of else "accuracy"
    return replace(against_bound(s, relation, y, exact, limit, dtype, "normal", len(y), layout, tensor), layout=layout)


def _as_control(rows: list[Row]) -> Row:
    return max(rows, key=lambda r: r.mismatches or 0).as_control()


def stock_generation(session) -> dict[str, float]:
    """{layout: elements of out that differ} where torch's flash attention decodes the last tokens, against its own prefill."""
    line, dtype = {}, DTYPES["bf16" if "bf16" in session.dtypes else session.dtypes[0]]
    for n, tail, _ in GENERATED[session.on_gpu]:
        if dtype == torch.float32 and session.on_gpu:  # it has none
            continue
        (q, k, v), _ = (
            list(x.values())
            for x in session.subject("attention", contract.dtype_name(dtype)).problem.inputs("normal", n)
        )
        whole = attention_controls.flash_decode(q[None], k[None], v[None])[0]
        parts = [
            attention_controls.flash_decode(*(t[None] for t in (q[i : i + 1], k[: i + 1], v[: i + 1])))[0]
            for i in range(n - tail, n)
        ]
        line[f"decode, cache of {n}"] = compare(torch.cat(parts, 1), whole[:, n - tail :]).mismatches
    return line


def uneven(session) -> list[Row]:
    """Very uneven samples in one call, padded too, against each alone; then with one of them not finite."""
    lengths, rows = UNEVEN[session.on_gpu], []
    for s in _subjects(session, "attention"):
        s.own_lengths, samples = lengths, spans(lengths)
        every = dict(
            zip(UNEVENLY, ([c] for c in (pack(samples), pack(samples[::-1]), pad(samples), pad(samples, left=True))))
        )
        with _fold_in_small(session):
            for kind in (SHARPEST, "nonfinite"):
                alone = cache(lambda kind=kind: s.compute([Call(x[None]) for x in samples], kind))
                for name, calls in every.items():
                    rows.append(
                        _row(
                            s,
                            f"{name}, lengths 1 to {max(lengths)}",
                            calls,
                            lambda: compare(s.compute(calls, kind), alone()),
                            sum(lengths),
                            kind,
                        )
                    )
        s.forget()
    return rows


def _subjects(session, op: str = "") -> Iterator[Subject]:
    for s in session.make():
        if s.problem.op.name == op or not op and s.problem.op.cache:
            yield replace(s, memo={})


def _row(
    s: Subject, name: str, calls: list[Call], drift: Callable[[], Drift], tokens: int, kind: str = SHARPEST
) -> Row:
    try:
        return s.row("invariance", name, drift(), "one call", kind, tokens, detail=shapes_launched(calls))
    except Exception as error:
        return s.row(
            "invariance", name, None, "one call", kind, tokens, detail=f"{shapes_launched(calls)}; {sentence(error)}"
        )


def widths(session) -> list[Row]:
    """Heads of other widths, in the first dtype: layouts, decode, gradients, and both against fp64."""
    rows, dtype, n = [], session.dtypes[0], 1500 if session.on_gpu else 70
    for width in WIDTHS[session.on_gpu]:
        first = next(
            s
            for s in session.make()
            if s.problem.op.name == "attention" and contract.dtype_name(s.problem.dtype) == dtype
        )
        case = f"{width} wide"
        op = replace(first.problem.op, cases=lambda shapes, w=width, c=case: {c: {"head_dim": w}})
        s = replace(first, problem=replace(first.problem, op=op, case=case), own_lengths=(n, 1, n // 11, 5), memo={})
        rows += judge.invariance(s, only=WIDE_LAYOUTS[:3])
        tokens = np.arange(n)[None]
        calls = [
            Call(tokens[:, : n - 2]),
            *(Call(tokens[:, i : i + 1]) for i in (n - 2, n - 1)),
            *(Call(x[None]) for x in spans(s.lengths)[1:]),
        ]
        rows.append(
            _row(s, WIDE_LAYOUTS[3], calls, lambda: compare(s.compute(calls), s.layout("packed")), sum(s.lengths))
        )
        step = Step(s, SHARPEST, s.lengths)
        whole = step.gradients(step.layouts["packed"])
        for name in WIDE_LAYOUTS[4:]:
            found = step.gradients(step.layouts[name])
            rows += [
                s.row(
                    gradients.INVARIANCE,
                    name,
                    compare(found[k], whole[k]),
                    "packed",
                    SHARPEST,
                    step.count,
                    tensor=f"d{k}",
                )
                for k in whole
            ]
        rows += [judge.accuracy(s, "normal"), *gradients.gradient_accuracy(s, "normal")]
    return rows


STARTS = {True: range(1, 65), False: (1, 31, 62, 63, 64)}  # of the queries; a block has 64 keys
FROM = {True: 1100, False: 40}  # queries, enough for prefill


def _from(session) -> str:
    places = STARTS[session.on_gpu]
    return f"prefill from {places[0]} to {places[-1]}"


def starts(session) -> list[Row]:
    """The last queries of a sequence in a call of their own, from each place in a block of keys on, against one call; and
    their dq."""
    rows, places = [], STARTS[session.on_gpu]
    for s in _subjects(session):
        n = FROM[session.on_gpu] + places[-1]
        s.own_lengths, name = (n,), _from(session)
        step = Step(s, SHARPEST, (n,))
        q, k, v = step.tokens.values()

        def run(start: int) -> tuple[tuple, torch.Tensor | None]:
            last = q[start:].clone().requires_grad_()
            found = s.called(last[None], k[None], v[None], **s.problem.op.constants)
            if not start:
                step.upstream(found, 2)
            trained = {t: dy[None, start:] for t, dy in zip(found, step.dy) if t.requires_grad}
            dq = torch.autograd.grad([*trained], last, [*trained.values()])[0] if trained else None
            return tuple(t[0].detach() for t in found), dq

        with _fold_in_small(session), attention_controls.fold(FEW=0):
            try:
                whole, found = run(0), {i: run(i) for i in places}
                drift = _first(compare(found[i][0], tuple(t[i:] for t in whole[0])) for i in places)
                rows.append(s.row("invariance", name, drift, "one call", SHARPEST, n, detail=f"{len(places)} places"))
                if whole[1] is not None:
                    drift = _first(compare(found[i][1], whole[1][i:]) for i in places)
                    rows.append(s.row(gradients.INVARIANCE, name, drift, "one call", SHARPEST, n, tensor="dq"))
            except Exception as error:
                rows.append(s.row("invariance", name, None, "one call", SHARPEST, n, detail=sentence(error)))
    return rows


def _first(drifts: Iterator[Drift]) -> Drift:
    """The first drift, or how many elements had none."""
    seen = 0
    for drift in drifts:
        seen += drift.elements
        if drift.mismatches:
            return drift
    return Drift(0, seen)


EDGES = [(n, n) for n in (0, 1, 15, 16, 17, 127, 128, 129)] + [
    (5, 0),
    (40, 9),
    (9, 40),
    (0, 7),
    (70, 132),
    (130, 161),
]  # queries, keys
HUGE = 2**13  # of q and of k: the roundings of such scores are large numbers, and a probability is still none above 1


def edges(session) -> list[Row]:
    """Sequences of no tokens, of no keys, of more queries than keys, and lengths around the tile, in one packed call, against
    fp64; with the control that answers NaN where there is no key."""
    rows = []
    for s in _subjects(session):
        if session.candidate.spec != "bi_kernels":  # others need not take all of their arguments
            break
        with attention_controls.fold(FEW=10**9, SPLIT=64):  # decode, several splits
            rows += _edges(s) + _edges(s, "edges, huge scores", HUGE) + _padded_edges(s, "edges, padded")
        with attention_controls.fold(FEW=0):
            rows += _edges(s, "edges, as prefill", backward=False) + _padded_edges(s, "edges, padded, as prefill")
        s.forget()
    broken = session.subject(
        "attention", session.dtypes[0], attention_controls.nan_without_keys, "−inf rows giving NaN"
    )
    return [*rows, _as_control(_edges(replace(broken, memo={})))]


def _edge_inputs(s: Subject, large: int = 1) -> tuple[dict, tuple]:
    """q, k and v of the edges, and what fp64 makes of them."""
    key = "edges", large
    if key not in s.memo:
        queries, keys = map(sum, zip(*EDGES))
        tokens, _ = s.problem.inputs("normal", max(queries, keys))
        given = {"q": tokens["q"][:queries] * large, "k": tokens["k"][:keys] * large, "v": tokens["v"][:keys]}
        s.memo[key] = given, reference.attention(*given.values(), lengths=EDGES, **s.problem.op.constants)
    return s.memo[key]


def _edges(s: Subject, layout: str = "edges", large: int = 1, backward: bool = True) -> list[Row]:
    p, constants = s.problem, s.problem.op.constants
    ends = {
        f"cu_seqlens_{name}": torch.tensor([0, *np.cumsum(column)], device=p.device)
        for name, column in zip("qk", zip(*EDGES))
    }
    try:
        inputs, exact = _edge_inputs(s, large)
        given = {name: t.clone().requires_grad_() for name, t in inputs.items()}
        found = s.called(*given.values(), **ends, **constants)
        rows = [
            _bounded(s, y.detach(), *e, dtype=dtype, layout=layout, tensor=name)
            for (name, dtype), y, e in zip(p.returned.items(), found, exact, strict=True)
        ]
        if backward:
            step = Step(s, "normal", (len(given["q"]),))
            step.upstream(found, 1)
            exact = gradient("attention", inputs, constants, step.dy, EDGES)
            for (name, e), y in zip(exact.items(), torch.autograd.grad(found, [*given.values()], step.dy)):
                rows.append(_bounded(s, y, *e, dtype=p.dtype, layout=layout, tensor=f"d{name}", of=name))
        return rows
    except Exception as error:
        return [s.row("accuracy", layout, None, "fp64", "normal", detail=sentence(error))]


def _padded_edges(s: Subject, layout: str) -> list[Row]:
    """The edges in a batch, whose padding gives 0 and −inf."""
    p, counts = s.problem, dict(zip("qk", zip(*EDGES)))
    try:
        given, exact = _edge_inputs(s)
        wide = [pad_sequence(t.split(counts["q" if name == "q" else "k"]), True, 7.0) for name, t in given.items()]
        found = s.called(
            *wide,
            **{f"lengths_{name}": torch.tensor(n, device=p.device) for name, n in counts.items()},
            **p.op.constants,
        )
        real = torch.arange(wide[0].shape[1], device=p.device) < torch.tensor(counts["q"], device=p.device)[:, None]
        rows = []
        for (name, dtype), y, parts, nothing in zip(p.returned.items(), found, exact, (0.0, -torch.inf), strict=True):
            every, size = torch.full_like(y, nothing, dtype=torch.float64), torch.zeros_like(y, dtype=torch.float64)
            every[real], size[real] = parts
            rows.append(_bounded(s, y, every, size, dtype=dtype, layout=layout, tensor=name))
        return rows
    except Exception as error:
        return [s.row("accuracy", layout, None, "fp64", "normal", detail=sentence(error))]


def captured(session) -> list[Row]:
    """Prefill, a chunk and decode under a CUDA graph and under torch.compile, captured with as many keys as queries; in
    the first dtype. GPU only."""
    rows = []
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(
        lambda q, k, v, n: bi_kernels.attention(q, k, v, lengths_k=n), fullgraph=True, dynamic=True
    )
    for s in _subjects(session, "attention"):
        n = 9000
        if contract.dtype_name(s.problem.dtype) != session.dtypes[0]:
            continue
        (q, k, v), _ = (list(x.values()) for x in s.inputs(SHARPEST, n))
        whole = bi_kernels.attention(q[None], k[None], v[None])
        for queries, length in ((1, n), (1, 4097), (1, 300), (100, 8200), (n, n)):
            at = slice(length - queries, length)
            given, lengths = (
                [torch.zeros_like(t)[None] for t in (q[at], k, v)],
                torch.ones(1, dtype=torch.int32, device=s.problem.device),
            )
            bi_kernels.attention(*given, lengths_k=lengths.fill_(queries))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = bi_kernels.attention(*given, lengths_k=lengths)
            for into, t in zip(given, (q[at], k, v)):  # the graph must read what is there when it runs
                into.copy_(t[None])
            lengths.fill_(length)
            graph.replay()
            expected = tuple(t[:, at] for t in whole)
            for name, y in {"cuda_graph": out, "torch.compile": compiled(*given, lengths)}.items():
                rows.append(
                    s.row(
                        "invariance",
                        name,
                        compare(tuple(y), expected),
                        "eager, one call",
                        SHARPEST,
                        queries,
                        detail=f"{queries} of {length} queries, in a cache of {n}",
                    )
                )
    return rows


def missing(session) -> list[Row]:
    """A needs-fix row for every experiment that is not in the rows."""
    out, first = [], DTYPES[session.dtypes[0]]
    met = {
        (r.op, r.case, r.dtype, r.layout, tensor) for r in session.rows if not r.control for tensor in ("", r.tensor)
    }
    for s in _subjects(session):
        p, ways = s.problem, _ways(session, s)
        required = {name for *_, name in ways} | {f"last {LAST} of {n}{x}" for n, *_ in ways for x in SCORES}
        required |= {
            _from(session),
            "edges, huge scores",
            *(f"edges{x}{y}" for x in ("", ", padded") for y in ("", ", as prefill")),
        }
        if p.op.name == "attention":
            required |= {f"{name}, lengths 1 to {max(UNEVEN[session.on_gpu])}" for name in UNEVENLY}
        if p.op.name == "attention" and p.dtype == first and session.on_gpu:
            required |= {"cuda_graph", "torch.compile"}
        if p.op.name == "attention" and p.dtype.itemsize == 2 and attention_late.applies(session):
            required |= {attention_late.LAYOUT}
        wanted = [(p.case, layout, "") for layout in sorted(required)]
        wanted += [
            (p.case, layout, f"d{k}")
            for layout in ("edges", "edges, huge scores", attention_late.LAYOUT, _from(session))
            if layout in required
            for k in ("q" if layout == _from(session) else "qkv")
        ]
        wanted += [
            (f"{w} wide", layout, "")
            for w in WIDTHS[session.on_gpu]
            for layout in (*WIDE_LAYOUTS, "rows")
            if p.op.name == "attention" and p.dtype == first
        ]
        out += [
            s.row("invariance", layout, None, detail=f"{case} {tensor}: required, not run")
            for case, layout, tensor in wanted
            if (p.op.name, case, contract.dtype_name(p.dtype), layout, tensor) not in met
        ]
    return out


def by_layout(rows: list[Row]) -> dict[str, dict[str, float]]:
    """{case and dtype: {layout: elements that differ}}; NaN where it raised."""
    out: dict[str, dict[str, float]] = {}
    for r in rows:
        if r.relation == "invariance":
            out.setdefault(f"{r.case or r.op} {r.dtype}", {})[r.layout] = (
                float("nan") if r.mismatches is None else r.mismatches
            )
    return out


def title(rows: list[Row]) -> str:
    ways = [r for r in rows if r.relation == "invariance" and not r.control]
    failed = sum(r.mismatches is None for r in ways)
    return (
        f"{len(ways)} ways to compute a sequence: {sum(r.mismatches or 0 for r in ways)} elements differ"
        + f", {failed} could not be computed" * (failed > 0)
    )
