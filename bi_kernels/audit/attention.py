"""The experiments of the attention audit: generation against a long cache, uneven samples, edges, widths, CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import torch

import bi_kernels
from bi_kernels import contract, reference
from bi_kernels.audit import attention_controls, gradients, judge
from bi_kernels.audit.drift import Drift, compare
from bi_kernels.audit.judge import NEEDS_FIX, SHARPEST, Row, Subject, against_bound, sentence, shapes_launched
from bi_kernels.audit.layouts import Call, pack, pad, spans
from bi_kernels.contract import DTYPES

PAGE = 16
GENERATED = {True: [(4096, 256, (1, 7, 16, 64, 100, 1000)), (32768, 256, (1, 1000))],  # tokens, of which last, in chunks of
             False: [(150, 6, (1, 4))]}
UNEVENLY = ("packed", "permuted", "batch", "left_padded")
WIDTHS = {True: (64, 96, 256), False: (96, )}
WIDE_LAYOUTS = ("singles", "left_padded", "chunked:100", "decode of the last two", "micro_batches:each", "batch")  # two of gradients
UNEVEN = {True: (16384, 1, 700, 15, 5000, 129, 2, 64), False: (130, 1, 70, 15, 2)}


def _fold_in_small(session):
    """On the interpreter, whose sequences are short, splits of 64 keys, so that there are several."""
    return nullcontext() if session.on_gpu else attention_controls.fold(SPLIT=64)


def _parts(n: int, tail: int, size: int) -> list[Call]:
    """A sequence of n tokens: all but `tail` of them in one call, and then chunks of `size`."""
    every = np.arange(n)[None]
    return [Call(every[:, :n - tail])] + [Call(every[:, at:min(at + size, n)]) for at in range(n - tail, n, size)]


def _ways(session, dtype: torch.dtype) -> list[tuple[int, int, int, int, str]]:
    """(tokens, how many of them last, in chunks of, page, name) of the ways to compute a long sequence."""
    return [(n, min(n - 1, max(tail, 4 * size)), size, page,
             f"{'decode' if size == 1 else f'chunked:{size}'}, {f'pages of {page}' if page else 'cache'} of {n}")
            for n, tail, sizes in GENERATED[session.on_gpu] for size in sizes
            for page in ((0, PAGE) if size in (sizes[0], sizes[-1]) else (0, ))
            if dtype != torch.float32 or n < 10_000]  # no tensor core: it would take minutes


def generation(session) -> list[Row]:
    """A long sequence in one call against the same tokens decoded one by one and in chunks, against a cache that lies in one
    piece or in shuffled pages."""
    rows = []
    for s in _subjects(session, "attention"):
        whole = cache(lambda: s.compute([pack(spans(s.lengths))]))
        for n, tail, size, page, name in _ways(session, s.problem.dtype):
            if s.lengths != (n, ):
                s.forget()
                whole.cache_clear()
                s.own_lengths = (n, )
            with _fold_in_small(session):
                calls = _parts(n, tail, size)
                rows.append(_row(s, name, calls, lambda: compare(s.compute(calls, page=page), whole()), n))
    return rows


def stock_generation(session) -> dict[str, float]:
    """{layout: elements of out that differ} where torch's flash attention decodes the last tokens, against its own prefill."""
    line, dtype = {}, DTYPES["bf16" if "bf16" in session.dtypes else session.dtypes[0]]
    for n, tail, _ in GENERATED[session.on_gpu]:
        if dtype == torch.float32 and session.on_gpu:  # it has none
            continue
        (q, k, v), _ = (list(x.values()) for x in session.subject("attention", contract.dtype_name(dtype)).problem.inputs("normal", n))
        whole = attention_controls.flash_decode(q[None], k[None], v[None])[0]
        parts = [attention_controls.flash_decode(*(t[None] for t in (q[i:i + 1], k[:i + 1], v[:i + 1])))[0] for i in range(n - tail, n)]
        line[f"decode, cache of {n}"] = compare(torch.cat(parts, 1), whole[:, n - tail:]).mismatches
    return line


def uneven(session) -> list[Row]:
    """Very uneven samples in one call, padded too, against each alone."""
    lengths, rows = UNEVEN[session.on_gpu], []
    for s in _subjects(session, "attention"):
        s.own_lengths, samples = lengths, spans(lengths)
        with _fold_in_small(session):
            alone = cache(lambda: s.compute([Call(x[None]) for x in samples]))
            for name, call in zip(UNEVENLY, (pack(samples), pack(samples[::-1]), pad(samples), pad(samples, left=True))):
                rows.append(_row(s, f"{name}, lengths 1 to {max(lengths)}", [call], lambda: compare(s.compute([call]), alone()),
                                 sum(lengths)))
        s.forget()
    return rows


def _subjects(session, op: str) -> Iterator[Subject]:
    for s in session.make():
        if s.problem.op.name == op:
            yield replace(s, memo={})


def _row(s: Subject, name: str, calls: list[Call], drift: Callable[[], Drift], tokens: int) -> Row:
    try:
        return s.row("invariance", name, drift(), "one call", SHARPEST, tokens, detail=shapes_launched(calls))
    except Exception as error:
        return s.row("invariance", name, None, "one call", SHARPEST, tokens, detail=f"{shapes_launched(calls)}; {sentence(error)}")


def widths(session) -> list[Row]:
    """Heads of other widths, in the first dtype: layouts, decode, gradients, and both against fp64."""
    rows, dtype, n = [], session.dtypes[0], 1500 if session.on_gpu else 70
    for width in WIDTHS[session.on_gpu]:
        first = next(s for s in session.make() if s.problem.op.name == "attention" and contract.dtype_name(s.problem.dtype) == dtype)
        case = f"{width} wide"
        op = replace(first.problem.op, cases=lambda shapes, w=width, c=case: {c: {"head_dim": w}})
        s = replace(first, problem=replace(first.problem, op=op, case=case), own_lengths=(n, 1, n // 11), memo={})
        rows += judge.invariance(s, only=WIDE_LAYOUTS[:3])
        tokens = np.arange(n)[None]
        calls = [Call(tokens[:, :n - 2]), *(Call(tokens[:, i:i + 1]) for i in (n - 2, n - 1)), *(Call(x[None]) for x in spans(s.lengths)[1:])]
        rows.append(_row(s, WIDE_LAYOUTS[3], calls, lambda: compare(s.compute(calls), s.layout("packed")), sum(s.lengths)))
        step = gradients.Step(s, SHARPEST, s.lengths)
        whole = step.gradients(step.layouts["packed"])
        for name in WIDE_LAYOUTS[4:]:
            found = step.gradients(step.layouts[name])
            rows += [s.row(gradients.INVARIANCE, name, compare(found[k], whole[k]), "packed", SHARPEST, step.count, tensor=f"d{k}")
                     for k in whole]
        rows += [judge.accuracy(s, "normal"), *gradients.gradient_accuracy(s, "normal")]
    return rows


EDGES = [(n, n) for n in (0, 1, 15, 16, 17, 127, 128, 129)] + [(5, 0), (40, 9), (9, 40), (0, 7)]  # queries, keys


def edges(session) -> list[Row]:
    """Sequences of no tokens, of no keys, of more queries than keys, and lengths around the tile, in one packed call, against
    fp64; with the control that answers NaN where there is no key."""
    rows, control = [], attention_controls.nan_without_keys
    for s in _subjects(session, "attention"):
        rows += _edges(s)
    broken = replace(session.subject("attention", "bf16", control, "−inf rows giving NaN"), memo={})
    found = max(_edges(broken), key=lambda r: r.mismatches or 0)
    found.control, found.caught = True, found.verdict == NEEDS_FIX and bool(found.mismatches)
    return [*rows, found]


def _edges(s: Subject) -> list[Row]:
    p, (queries, keys) = s.problem, map(sum, zip(*EDGES))
    tokens, _ = p.inputs("normal", max(queries, keys))
    q, k, v = tokens["q"][:queries], tokens["k"][:keys], tokens["v"][:keys]
    ends = {f"cu_seqlens_{name}": torch.tensor([0, *np.cumsum(column)], device=p.device) for name, column in zip("qk", zip(*EDGES))}
    try:
        found = s.function(q, k, v, **ends)
        exact = reference.attention(q, k, v, lengths=EDGES)
    except Exception as error:
        return [s.row("accuracy", "edges", None, "fp64", "normal", queries, detail=sentence(error))]
    rows = []
    for name, y, (y64, magnitude), dtype in zip(("out", "lse"), found, exact, (p.dtype, torch.float32)):
        limit = contract.bound("attention", dtype, y64, magnitude, p.reduction, inputs=p.dtype)
        row = against_bound(s, "accuracy", y, y64, limit, dtype, "normal", queries, "(queries, keys): "
                            + ", ".join(map(str, EDGES)), name)
        row.layout = "edges"
        rows.append(row)
    return rows


def captured(session) -> list[Row]:
    """Prefill, a chunk and decode under a CUDA graph and under torch.compile, at lengths that the capture did not see; in
    the first dtype. GPU only."""
    rows = []
    compiled = torch.compile(lambda q, k, v, n: bi_kernels.attention(q, k, v, lengths_k=n), fullgraph=True, dynamic=True)
    for s in _subjects(session, "attention"):
        n = 9000
        if contract.dtype_name(s.problem.dtype) != session.dtypes[0]:
            continue
        (q, k, v), _ = (list(x.values()) for x in s.inputs(SHARPEST, n))
        whole = bi_kernels.attention(q[None], k[None], v[None])
        for queries, length in ((1, n), (1, 4097), (1, 300), (100, 8200), (n, n)):
            at = slice(length - queries, length)
            given, lengths = [torch.zeros_like(t)[None] for t in (q[at], k, v)], torch.ones(1, dtype=torch.int32, device=s.problem.device)
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
                rows.append(s.row("invariance", name, compare(tuple(y), expected), "eager, one call", SHARPEST, queries,
                                  detail=f"{queries} queries, {length} of {n} keys"))
    return rows


def missing(session) -> list[Row]:
    """A needs-fix row for every experiment that is not in the rows."""
    out, first = [], DTYPES[session.dtypes[0]]
    met = {(r.op, r.case, r.dtype, r.layout) for r in session.rows if not r.control}
    for s in _subjects(session, "attention"):
        p, required = s.problem, {"edges", *(f"{name}, lengths 1 to {max(UNEVEN[session.on_gpu])}" for name in UNEVENLY)}
        required |= {name for *_, name in _ways(session, p.dtype)}
        if p.dtype == first and session.on_gpu:
            required |= {"cuda_graph", "torch.compile"}
        wanted = [(p.case, layout) for layout in sorted(required)]
        wanted += [(f"{w} wide", layout) for w in WIDTHS[session.on_gpu] for layout in (*WIDE_LAYOUTS, "rows") if p.dtype == first]
        out += [s.row("invariance", layout, None, detail=f"{case}: required, not run") for case, layout in wanted
                if ("attention", case, contract.dtype_name(p.dtype), layout) not in met]
    return out


def by_layout(rows: list[Row]) -> dict[str, dict[str, float]]:
    """{case and dtype: {layout: elements that differ}}; NaN where it raised."""
    out: dict[str, dict[str, float]] = {}
    for r in rows:
        out.setdefault(f"{r.case} {r.dtype}", {})[r.layout] = float("nan") if r.mismatches is None else r.mismatches
    return out
