"""The experiments of the attention audit: generation against a long cache, edges, accuracy and speed beside others', the fold."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import bi_kernels
from bi_kernels import attention_forward, contract, reference
from bi_kernels.audit import attention_controls, gradients, judge
from bi_kernels.audit.drift import Drift, compare
from bi_kernels.audit.gemm import launch_us, times_ms
from bi_kernels.audit.judge import NEEDS_FIX, SHARPEST, Row, Subject, against_bound, sentence, shapes_launched
from bi_kernels.audit.layouts import Call, pack, pad, spans
from bi_kernels.contract import CONTRACT, DTYPES

PAGE = 16
GENERATED = {True: [(4096, 256, (1, 7, 16, 64, 100, 1000)), (32768, 256, (1, 1000))],  # tokens, of which last, in chunks of
             False: [(150, 6, (1, 4))]}
WIDTHS = {True: (64, 96, 256), False: (96, )}
UNEVEN = {True: (16384, 1, 700, 15, 5000, 129, 2, 64), False: (130, 1, 70, 15, 2)}
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}


def _fold_in_small(session):
    """On the interpreter, whose sequences are short, splits of 64 keys, so that there are several."""
    return nullcontext() if session.on_gpu else attention_controls.fold(SPLIT=64)


def _parts(n: int, tail: int, size: int) -> list[Call]:
    """A sequence of n tokens: all but `tail` of them in one call, and then chunks of `size`."""
    every = np.arange(n)[None]
    return [Call(every[:, :n - tail])] + [Call(every[:, at:min(at + size, n)]) for at in range(n - tail, n, size)]


def generation(session) -> list[Row]:
    """A long sequence in one call against the same tokens decoded one by one and in chunks, against a cache that lies in one
    piece or in shuffled pages."""
    rows = []
    for s in _subjects(session, "attention"):
        for n, tail, sizes in GENERATED[session.on_gpu]:
            if s.problem.dtype == torch.float32 and n > 10_000:  # no tensor core: it would take minutes
                continue
            s.own_lengths = (n, )
            with _fold_in_small(session):
                whole = cache(lambda n=n: s.compute([pack(spans((n, )))]))
                for size in sizes:
                    calls = _parts(n, min(n - 1, max(tail, 4 * size)), size)
                    for page in (0, PAGE) if size in (sizes[0], sizes[-1]) else (0, ):
                        name = f"{'decode' if size == 1 else f'chunked:{size}'}, {f'pages of {page}' if page else 'cache'} of {n}"
                        rows.append(_row(s, name, calls, lambda: compare(s.compute(calls, page=page), whole()), n))
            del whole
            s.forget()
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
            for name, call in {"packed": pack(samples), "permuted": pack(samples[::-1]), "batch": pad(samples),
                               "left_padded": pad(samples, left=True)}.items():
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
        rows += judge.invariance(s, only=("singles", "left_padded", "chunked:100"))
        tokens = np.arange(n)[None]
        calls = [Call(tokens[:, :n - 2]), *(Call(tokens[:, i:i + 1]) for i in (n - 2, n - 1)), *(Call(x[None]) for x in spans(s.lengths)[1:])]
        rows.append(_row(s, "decode of the last two", calls, lambda: compare(s.compute(calls), s.layout("packed")), sum(s.lengths)))
        step = gradients.Step(s, SHARPEST, s.lengths)
        whole = step.gradients(step.layouts["packed"])
        for name in ("micro_batches:each", "left_padded"):
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


# Beside others

def _qkv(session, batch: int, queries: int, keys: int, heads: tuple[int, int] | None = None, grad: bool = False) -> list[torch.Tensor]:
    shape = contract.SHAPES[session.parameters["shapes"]]
    h, kv = heads or (shape["heads"], shape["kv_heads"])
    g = torch.Generator(session.device).manual_seed(session.parameters["seed"])
    return [torch.randn(batch, n, count, shape["head_dim"], generator=g, device=session.device).bfloat16().requires_grad_(grad)
            for n, count in ((queries, h), (keys, kv), (keys, kv))]


def _sdpa(backend: SDPBackend, q, k, v, repeat: bool = False) -> torch.Tensor:
    """torch's attention by one backend, whose context the call leaves; its own order of dimensions is given back."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) if repeat else t for t in (k, v))
    with sdpa_kernel([backend]):
        return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=q.shape[1] > 1,
                                            enable_gqa=not repeat).transpose(1, 2)


def errors(session, length: int = 2048) -> list[dict]:
    """Errors against fp64 of what everybody gives on the same inputs, bf16, causal: root mean square and largest, as a share
    of the exact result's root mean square."""
    q, k, v = _qkv(session, 1, length, length)
    dy = torch.randn(q.shape, generator=torch.Generator(session.device).manual_seed(1), device=session.device).bfloat16()

    def results(function: Callable) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dy)]

    q64, k64, v64 = (t.detach().double().requires_grad_() for t in (q, k, v))
    wide = [t.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for t in (k64, v64)]
    s = q64.transpose(1, 2) @ wide[0].mT * q.shape[-1]**-0.5
    out = (s.masked_fill(~torch.ones_like(s[0, 0], dtype=torch.bool).tril(), -torch.inf).softmax(-1) @ wide[1]).transpose(1, 2)
    exact = [out.detach(), *torch.autograd.grad(out, (q64, k64, v64), dy.double())]
    lines = []
    for name, function in {"bi_kernels": lambda *x: bi_kernels.attention(*x)[0], **{
            peer: lambda *x, backend=backend: _sdpa(backend, *x) for peer, backend in PEERS.items()}}.items():
        for tensor, y, e in zip(("out", "dq", "dk", "dv"), results(function), exact):
            gap, scale = y.double() - e, e.square().mean().sqrt()
            lines.append({"who": name, "tensor": tensor, "rms": float(gap.square().mean().sqrt() / scale),
                          "largest": float(gap.abs().max() / scale)})
    return lines


def _deterministic(call: Callable) -> Callable:
    def wrapped():
        torch.use_deterministic_algorithms(True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)
    return wrapped


def speed(session) -> list[dict]:
    """Forward and backward, causal, bf16, the calls taking turns: TFLOP/s of the half of the square that is seen (backward
    2.5 times that), and the ratio to cuDNN."""
    lines = []
    for batch, length in ((16, 1024), (4, 4096), (1, 16384)):
        q, k, v = _qkv(session, batch, length, length, grad=True)
        flops = 2 * batch * q.shape[2] * length**2 * q.shape[3] / 1e9
        with torch.no_grad():
            names, calls = ["bi_kernels", *PEERS], [lambda: bi_kernels.attention(q, k, v)]
            calls += [lambda b=b: _sdpa(b, q, k, v) for b in PEERS.values()]
            line = dict(zip(names, (flops / ms for ms in times_ms(*calls))))
        lines.append({"pass": "forward", "length": length, "batch": batch} | line | {"ratio to cuDNN": line["bi_kernels"] / line["cuDNN"]})
        calls, names, dy = [], [], torch.randn_like(q)
        candidates = {"bi_kernels": lambda: bi_kernels.attention(q, k, v)[0]} | {
            name: lambda b=b: _sdpa(b, q, k, v) for name, b in PEERS.items()} | {
            f"{name}, deterministic": lambda b=b: _sdpa(b, q, k, v) for name, b in PEERS.items()}
        for name, make in candidates.items():
            y = make()
            call = lambda y=y: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
            call = _deterministic(call) if "deterministic" in name else call
            try:
                call()
            except RuntimeError:  # this backend has none for these inputs
                continue
            names.append(name)
            calls.append(call)
        line = dict(zip(names, (2.5 * flops / ms for ms in times_ms(*calls))))
        peer = line.get("cuDNN, deterministic", line["cuDNN"])
        lines.append({"pass": "backward", "length": length, "batch": batch} | line | {"ratio to cuDNN": line["bi_kernels"] / peer})
        del calls, candidates, y
    return lines


def decode_speed(session) -> list[dict]:
    """One query a sequence against a long cache, bf16: TB/s of the cache, and the time of SDPA's fastest backend over ours."""
    lines, backends = [], PEERS | {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    copied = torch.empty(2**30, dtype=torch.int8, device=session.device)
    copy_ms, = times_ms(lambda: copied[:2**29].copy_(copied[2**29:]))
    for batch, length in ((32, 4096), (8, 8192), (1, 65536)):
        q, k, v = _qkv(session, batch, 1, length)
        calls, names = [lambda: bi_kernels.attention(q, k, v)], ["bi_kernels"]
        for name, b in backends.items():
            try:
                _sdpa(b, q, k, v, name == "efficient")
            except RuntimeError:
                continue
            wide = [t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v)] if name == "efficient" else [k, v]
            calls.append(lambda b=b, wide=wide, name=name: _sdpa(b, q, *wide))
            names.append(name)
        with torch.no_grad():
            ms = dict(zip(names, times_ms(*calls)))
        best = min(t for name, t in ms.items() if name != "bi_kernels")
        lines.append({"batch": batch, "cache": length, **{f"{n} µs": t * 1e3 for n, t in ms.items()},
                      "TB/s": 2 * k.nbytes / ms["bi_kernels"] / 1e9,
                      "of a copy": 2 * k.nbytes / ms["bi_kernels"] / (2**30 / copy_ms), "ours / fastest SDPA": ms["bi_kernels"] / best,
                      "launch µs": launch_us(lambda: bi_kernels.attention(q, k, v), 50)})
    return lines


def bars(lines: list[dict], title: str) -> plt.Figure:
    """Root-mean-square errors by tensor, a bar each."""
    names, tensors = list(dict.fromkeys(x["who"] for x in lines)), list(dict.fromkeys(x["tensor"] for x in lines))
    figure, ax = plt.subplots(figsize=(7.5, 3.6))
    for i, (name, color) in enumerate(zip(names, ("#0072B2", "#E69F00", "#009E73"))):
        mine = {x["tensor"]: x for x in lines if x["who"] == name}
        at = np.arange(len(tensors)) + (i - (len(names) - 1) / 2) * 0.25
        ax.bar(at, [mine[t]["rms"] for t in tensors], 0.23, color=color, label=name)
    ax.set(xticks=range(len(tensors)), xticklabels=tensors, ylabel="RMS error / RMS of the exact result", title=title)
    ax.legend(edgecolor="none", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


def fold_figure(length: int = 11_000) -> plt.Figure:
    """The keys of one query, block by block and split by split, and which program of each schedule adds them."""
    block, split = attention_forward.BLOCK, attention_forward.SPLIT
    splits = math.ceil(length / split)
    schedules = {"prefill: a program for\na tile of queries": [0] * splits, "a long chunk:\nthe same": [0] * splits,
                 "decode, a short chunk:\na program a split": list(range(splits))}
    palette = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
    figure, ax = plt.subplots(figsize=(9, 3.3))
    for lane, programs in enumerate(schedules.values()):
        for n, program in enumerate(programs):
            lo, hi = n * split, min((n + 1) * split, length)
            starts = np.arange(lo, hi, block)
            ax.barh([lane] * len(starts), np.minimum(block, hi - starts), left=starts, height=0.42, color=palette[program % 5],
                    edgecolor="white", linewidth=0.25)
            ax.annotate("", (hi - block, lane + 0.32), (lo + block, lane + 0.32), arrowprops={"arrowstyle": "->", "color": "#333333"})
            ax.text((lo + hi) / 2, lane + 0.36, f"blocks {lo // block + 1} to {math.ceil(hi / block)}",
                    ha="center", va="top", fontsize=7.5)
            if n:
                ax.annotate(f"merge {n}", (lo, lane - 0.22), (lo, lane - 0.42), ha="center", fontsize=7.5, color="#D55E00",
                            arrowprops={"arrowstyle": "->", "color": "#D55E00"})
    ax.set(yticks=range(len(schedules)), yticklabels=list(schedules), xlabel=f"key, counted from its sequence's first; a cell is a block of {block}",
           title=f"One order of {length:,} keys, three schedules: blocks of {block} in splits of {split:,}",
           xlim=(0, length), ylim=(len(schedules) - 0.35, -0.6))
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    figure.tight_layout()
    return figure


def goals() -> dict:
    return CONTRACT["benchmark"]["attention"]


def by_layout(rows: list[Row]) -> dict[str, dict[str, float]]:
    """{case and dtype: {layout: elements that differ}}; NaN where it raised."""
    out: dict[str, dict[str, float]] = {}
    for r in rows:
        out.setdefault(f"{r.case} {r.dtype}", {})[r.layout] = float("nan") if r.mismatches is None else r.mismatches
    return out


def speed_text(goal: dict, speed: list[dict], decode: list[dict]) -> str:
    """What is met and what is not, in words."""
    word = lambda met: "met" if met else "**not met**"
    parts = []
    for name in ("forward", "backward"):
        least = min(x["ratio to cuDNN"] for x in speed if x["pass"] == name and x["length"] >= goal["length"])
        parts.append(f"{name} at least **{least:.2f}** of cuDNN from {goal['length']} tokens on (goal {goal[name]:.2f}): {word(least >= goal[name])}")
    many, one = decode[0], decode[-1]
    parts.append(f"decode of {many['batch']} sequences with {many['cache']} keys **{many['of a copy']:.2f}** of a copy's bandwidth (goal "
                 f"{goal['decode_bandwidth']}): {word(many['of a copy'] >= goal['decode_bandwidth'])}")
    parts.append(f"of one with {one['cache']} keys **{one['ours / fastest SDPA']:.2f}** times SDPA's fastest backend (goal at most "
                 f"{goal['decode_time']}): {word(one['ours / fastest SDPA'] <= goal['decode_time'])}")
    parts.append("what limits each, as we read the machine code and the times: forward, the exponentials, which run under the "
                 "products but not entirely; backward, q kᵀ and dout vᵀ, which are computed twice, for dq and for dk and dv; decode, "
                 "beside the bytes of the cache, the partial results and the second launch that merges them")
    return "## Speed\n\nbf16, causal, calls taking turns; times are the device's, as under a CUDA graph.\n\n" + "\n".join(f"- {p}" for p in parts)
