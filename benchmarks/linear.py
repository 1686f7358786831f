"""Measures products next to cuBLAS: the families' layers, random shapes, and the gradients of a linear layer."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

import bi_kernels
from benchmarks import cases
from benchmarks.clock import DeviceClock, Timing, time_in_turns
from benchmarks.measure import OURS, Bench, Numbers, rotated
from bi_kernels.audit import executor
from bi_kernels.ops.gemm.cost import PipelineConfig
from bi_kernels.ops.gemm.gemm import cheapest, product
from bi_kernels.ops.gemm.hopper_cublaslt import LIBRARY

CUBLAS, STARVED, FP32 = "cuBLAS", "cuBLAS, starved", "cuBLAS, added up in fp32"
INTO = "dW into main_grad"
FIRST = f"{INTO}, the first"


def path(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype | None = None, continues: bool = False) -> str:
    """Names what computes x wᵀ: cuBLASLt, sm_90's kernel or Triton's with its tile; both parts of a split product."""
    sizes, dtypes = (len(x), len(w), x.shape[1]), (x.dtype, out_dtype or x.dtype)
    way, cut = cheapest(sizes, (x.stride(), w.stride()), continues, dtypes, x.device)
    if cut:
        parts = dict.fromkeys(path(x, part, out_dtype, continues) for part in (w[:cut], w[cut:]))
        return " and ".join(parts) + f", in two at {cut}"
    kind = "Gluon " if isinstance(way, PipelineConfig) else "Triton "
    return way if way is LIBRARY else kind + "×".join(map(str, (*way.size, way.k)))


def _bytes(*sizes: tuple[int, int], itemsize: int = 2) -> int:
    return itemsize * sum(map(math.prod, sizes))


def _forward(bench: Bench, group: str, case: str, weights: list[torch.Tensor], m: int, starved: dict, more: dict):
    """Measures x wᵀ of m rows. starved: timings of cuBLAS in another process, by shape."""
    n, k = weights[0].shape
    size = _bytes((m, k), (n, k), (m, n))
    xs = [bench.numbers.take(m, k) for _ in range(min(bench.sets(size), len(weights)))]
    calls = rotated({OURS: bi_kernels.linear, CUBLAS: F.linear}, [*zip(xs, weights)])
    timings, errors = bench.timed(calls, sets=len(xs))
    timings |= {STARVED: starved[m, n, k]} if (m, n, k) in starved else {}
    line = {"direction": "forward", "case": case, "M": m, "N": n, "K": k, "path": path(xs[0], weights[0])} | more
    bench.add(group, "linear", (timings, errors), CUBLAS, line, flops=2 * m * n * k, size=size)


def _products(bench: Bench, group: str, case: str, n: int, k: int, rows: Sequence[int], starved: dict, **more) -> None:
    """Measures products of one weight's shape at some numbers of rows."""
    weights = [bench.numbers.take(n, k) for _ in range(bench.sets(_bytes((n, k))))]
    for m in rows:
        bench.cell(group, f"{case}, M {m}", _forward, group, case, weights, m, starved, more)


@torch.no_grad()
def gemm(bench: Bench) -> None:
    """Measures every layer of the families, and of their shards, at every number of rows."""
    table = bench.settings["gemm"]
    layers, rows = cases.layers(table), table["rows"]
    own = [layer for layer in layers if table["starved"] in layer.families]
    starved = _starved(bench, [(m, layer.n, layer.k) for layer in own for m in rows])
    for layer in layers:
        more = {"families": layer.families, "shards": sorted({shard for *_, shard in layer.names})}
        _products(bench, "gemm", layer.name, layer.n, layer.k, rows, starved, **more)


@torch.no_grad()
def drawn(bench: Bench) -> None:
    """Measures the shapes that the run's seed draws."""
    for m, n, k in cases.drawn(bench.settings["drawn"], bench.seed):
        _products(bench, "drawn", f"{m}×{n}×{k}", n, k, [m], {})


def _accumulate(buffer: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Adds dyᵀ x to a buffer in fp32: on a GPU in one call."""
    if dy.is_cuda:
        return torch.addmm(buffer, dy.t(), x, out_dtype=torch.float32, out=buffer)
    return buffer.add_(dy.t() @ x)


def _gradients(bench: Bench, layer: cases.Layer, tokens: int) -> None:
    n, k = layer.n, layer.k
    dx_size, dw_size = _bytes((tokens, n), (n, k), (tokens, k)), _bytes((tokens, n), (tokens, k), (n, k))
    into_size = _bytes((tokens, n), (tokens, k)) + _bytes((n, k), (n, k), itemsize=4)
    count = bench.sets(dx_size)
    sets = bench.numbers.sets(count, (tokens, n), (tokens, k), (n, k))
    sets = [(*inputs, torch.zeros(n, k, device=bench.device)) for inputs in sets]
    fold = lambda dy, x, into, out: product(dy.t(), x.t(), into, out, torch.float32)
    fields = {"tokens": tokens, "N": n, "K": k, "families": layer.families, "flops": 2 * tokens * n * k}
    dy, x, w, _ = sets[0]

    calls = {OURS: lambda dy, x, w, _: product(dy, w.t()), CUBLAS: lambda dy, x, w, _: dy @ w}
    measured = bench.timed(rotated(calls, sets), sets=count)
    line = {"direction": "dX", "case": layer.name, "size": dx_size, "path": path(dy, w.t())}
    bench.add("gradients", "linear", measured, CUBLAS, line, **fields)

    calls = {
        OURS: lambda dy, x, w, _: product(dy.t(), x.t()),
        INTO: lambda dy, x, w, buffer: fold(dy, x, buffer, buffer),
        FIRST: lambda dy, x, w, buffer: fold(dy, x, None, buffer),
        CUBLAS: lambda dy, x, w, _: dy.t() @ x,
        FP32: lambda dy, x, w, buffer: _accumulate(buffer, dy, x),
    }
    measured = bench.timed(rotated(calls, sets), sets=count)
    lines = [
        {"direction": direction, "case": layer.name, "ours": ours, "against": peer, "size": size, "path": taken}
        for direction, ours, peer, size, taken in (
            ("dW", OURS, CUBLAS, dw_size, path(dy.t(), x.t())),
            (INTO, INTO, FP32, into_size, path(dy.t(), x.t(), torch.float32, True)),
            (FIRST, FIRST, CUBLAS, dw_size, path(dy.t(), x.t(), torch.float32)),
        )
    ]
    bench.add("gradients", "linear", measured, CUBLAS, *lines, **fields)


@torch.no_grad()
def gradients(bench: Bench) -> None:
    """Measures dX, dW, and dW into main_grad: a fold that continues, and the first of a step."""
    for layer in cases.layers(bench.settings["gemm"], shards=False):
        for tokens in bench.settings["gradients"]["tokens"]:
            bench.cell("gradients", f"{layer.name}, {tokens} tokens", _gradients, layer, tokens)


def _starved(bench: Bench, shapes: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], Timing]:
    """Returns timings of F.linear in a process whose cuBLAS has the workspace that vLLM leaves it; none without a
    GPU."""
    if not bench.on_gpu:
        return {}
    bench.free_cache()
    given = shapes, bench.seed, bench.settings["cold_bytes"], bench.rounds
    try:
        with bench.alone():
            return executor.call(f"{__name__}:linears", *given, environment=bench.settings["gemm"]["environment"])
    except executor.Died as died:
        bench.keep({"group": "gemm", "case": STARVED, "errors": {STARVED: str(died)}})
        return {}


@torch.no_grad()
def linears(shapes: list[tuple[int, int, int]], seed: int, cold_bytes: float, rounds: dict) -> dict:
    """Times F.linear in this process, by (M, N, K)."""
    numbers, found = Numbers(torch.device("cuda"), seed), {}
    for m, n, k in shapes:
        count = max(1, math.ceil(cold_bytes / _bytes((m, k), (n, k), (m, n))))
        call = rotated({STARVED: F.linear}, numbers.sets(count, (m, k), (n, k)))
        found[m, n, k] = time_in_turns(call, DeviceClock(), sets=count, **rounds)[STARVED]
    return found
