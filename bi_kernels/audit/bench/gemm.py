"""Measures products beside cuBLAS: the families' layers, drawn shapes, and the gradients of a linear layer."""

import contextlib
import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

import bi_kernels
from bi_kernels.audit import worker
from bi_kernels.audit.bench import cases
from bi_kernels.audit.bench.measure import OURS, Bench, Numbers
from bi_kernels.audit.bench.timing import DeviceClock, Timing, turns
from bi_kernels.ops.gemm.cost import PipelineConfig
from bi_kernels.ops.gemm.gemm import cheapest, product
from bi_kernels.ops.gemm.hopper_cublaslt import LIBRARY

CUBLAS, STARVED, FP32 = "cuBLAS", "cuBLAS, starved", "cuBLAS, added up in fp32"
INTO = "dW into main_grad"


def path(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype | None = None, continues: bool = False) -> str:
    """Returns what computes x wᵀ: cuBLASLt, sm_90's kernel, or Triton's, with its tile; of a product in two, each."""
    sizes, dtypes = (len(x), len(w), x.shape[1]), (x.dtype, out_dtype or x.dtype)
    way, cut = cheapest(sizes, (x.stride(), w.stride()), continues, dtypes, x.device)
    if cut:
        parts = dict.fromkeys(path(x, part, out_dtype, continues) for part in (w[:cut], w[cut:]))
        return " and ".join(parts) + f", in two at {cut}"
    kind = "Gluon " if isinstance(way, PipelineConfig) else "Triton "
    return way if way is LIBRARY else kind + "×".join(map(str, (*way.size, way.k)))


def _bytes(*sizes: tuple[int, int], itemsize: int = 2) -> int:
    return itemsize * sum(map(math.prod, sizes))


def _shape(m: int, n: int, k: int) -> dict:
    return {"M": m, "N": n, "K": k}


def _forward(bench: Bench, group: str, case: str, weights: list[torch.Tensor], m: int, more: dict, said: dict) -> None:
    """Measures x wᵀ of m rows; more: timings of peers that ran elsewhere."""
    n, k = weights[0].shape
    size = _bytes((m, k), (n, k), (m, n))
    sets = min(bench.sets(size), len(weights))
    xs = [bench.numbers.take(m, k) for _ in range(sets)]
    calls = {
        OURS: lambda i: bi_kernels.linear(xs[i % sets], weights[i % sets]),
        CUBLAS: lambda i: F.linear(xs[i % sets], weights[i % sets]),
    }
    timings, errors = bench.timed(calls, sets=sets)
    found = timings | {name: times[m, n, k] for name, times in more.items() if (m, n, k) in times}, errors
    said = _shape(m, n, k) | {"path": path(xs[0], weights[0])} | said
    bench.add(group, "linear", "forward", case, found, CUBLAS, flops=2 * m * n * k, size=size, **said)


@torch.no_grad()
def gemm(bench: Bench) -> None:
    """Measures every layer of the families, and of their shards, at every number of rows."""
    table = bench.settings["gemm"]
    found = cases.layers(table)
    mine = [layer for layer in found if table["starved"] in layer.families]
    more = {STARVED: starved(bench, [(m, layer.n, layer.k) for layer in mine for m in table["rows"]])}
    for layer in found:
        weights = [bench.numbers.take(layer.n, layer.k) for _ in range(bench.sets(_bytes((layer.n, layer.k))))]
        said = {"families": layer.families, "shards": sorted({shard for *_, shard in layer.names})}
        for m in table["rows"]:
            bench.cell(
                "gemm", f"{layer.name}, M {m}", lambda: _forward(bench, "gemm", layer.name, weights, m, more, said)
            )


@torch.no_grad()
def drawn(bench: Bench) -> None:
    """Measures the shapes that the run's seed draws."""
    for m, n, k in cases.drawn(bench.settings["drawn"], bench.seed):
        weights = [bench.numbers.take(n, k) for _ in range(bench.sets(_bytes((n, k))))]
        case = f"{m}×{n}×{k}"
        bench.cell("drawn", case, lambda: _forward(bench, "drawn", case, weights, m, {}, {}))


@cache
def _adds_up(device: torch.device) -> Callable:
    """Returns torch's way to add dyᵀ x, in fp32, to a buffer: one call where this torch has it."""

    def one(buffer, dy, x):
        return torch.addmm(buffer, dy.t(), x, out_dtype=torch.float32, out=buffer)

    def two(buffer, dy, x):
        return buffer.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))

    tried = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    for way in (one, two):
        with contextlib.suppress(RuntimeError, TypeError):
            way(tried.float(), tried, tried)
            return way
    return lambda buffer, dy, x: buffer.add_(dy.t() @ x)


def _gradients(bench: Bench, layer: cases.Layer, tokens: int) -> None:
    n, k = layer.n, layer.k
    size = {"dX": _bytes((tokens, n), (n, k), (tokens, k)), "dW": _bytes((tokens, n), (tokens, k), (n, k))}
    size[INTO] = _bytes((tokens, n), (tokens, k)) + _bytes((n, k), (n, k), itemsize=4)
    sets, add_up = bench.sets(size["dX"]), _adds_up(bench.device)
    dys, xs, ws = ([bench.numbers.take(*shape) for _ in range(sets)] for shape in ((tokens, n), (tokens, k), (n, k)))
    buffers = [torch.zeros(n, k, device=bench.device) for _ in range(sets)]
    of = lambda i: (dys[i % sets], xs[i % sets], ws[i % sets], buffers[i % sets])

    def fold(i: int, continues: bool) -> torch.Tensor:
        dy, x, _, buffer = of(i)
        return product(dy.t(), x.t(), buffer if continues else None, buffer, torch.float32)

    def dx(i: int) -> torch.Tensor:
        dy, _, w, _ = of(i)
        return product(dy, w.t())

    def dw(i: int) -> torch.Tensor:
        dy, x, _, _ = of(i)
        return product(dy.t(), x.t())

    def cublas_dx(i: int) -> torch.Tensor:
        dy, _, w, _ = of(i)
        return dy @ w

    def cublas_dw(i: int) -> torch.Tensor:
        dy, x, _, _ = of(i)
        return dy.t() @ x

    def cublas_into(i: int) -> torch.Tensor:
        dy, x, _, buffer = of(i)
        return add_up(buffer, dy, x)

    dy, x, w, _ = of(0)
    flops, columns = 2 * tokens * n * k, (dy.t(), x.t())
    said = {"tokens": tokens, "N": n, "K": k, "families": layer.families}
    found = bench.timed({OURS: dx, CUBLAS: cublas_dx}, sets=sets)
    first = size["dX"]
    bench.add(
        "gradients", "linear", "dX", layer.name, found, CUBLAS, flops=flops, size=first, path=path(dy, w.t()), **said
    )
    begins = f"{INTO}, the first"
    calls = {OURS: dw, INTO: lambda i: fold(i, True), begins: lambda i: fold(i, False)}
    timings, errors = bench.timed(calls | {CUBLAS: cublas_dw, FP32: cublas_into}, sets=sets)
    paths = {OURS: path(*columns), INTO: path(*columns, torch.float32, True), begins: path(*columns, torch.float32)}
    for ours, taken in paths.items():
        direction = "dW" if ours == OURS else ours
        kept = {name: t for name, t in timings.items() if name == ours or name not in paths}
        more = {"flops": flops, "size": size.get(direction, size["dW"]), "path": taken} | said
        peer = FP32 if ours == INTO else CUBLAS
        bench.add("gradients", "linear", direction, layer.name, (kept, errors), peer, ours, **more)


@torch.no_grad()
def gradients(bench: Bench) -> None:
    """Measures dX, dW, and dW into main_grad, a fold that goes on and one that begins."""
    for layer in cases.layers(bench.settings["gemm"], shards=False):
        for tokens in bench.settings["gradients"]["tokens"]:
            case = f"{layer.name}, {tokens} tokens"
            bench.cell("gradients", case, lambda: _gradients(bench, layer, tokens))


def starved(bench: Bench, shapes: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], Timing]:
    """Returns the timings of F.linear in a process whose cuBLAS has the workspace that vLLM leaves it; none without a
    GPU."""
    if not bench.on_gpu:
        return {}
    bench.empty()
    how = {k: bench.settings[k] for k in ("rounds", "round_ms", "most_calls")}
    environment = bench.settings["gemm"]["environment"]
    given = shapes, bench.seed, bench.settings["cold_bytes"], how
    try:
        with bench.alone():
            return worker.call(f"{__name__}:linears", *given, environment=environment)
    except worker.Died as died:
        bench.keep({"group": "gemm", "case": STARVED, "errors": {STARVED: str(died)}})
        return {}


@torch.no_grad()
def linears(shapes: list[tuple[int, int, int]], seed: int, cold_bytes: float, how: dict) -> dict:
    """Times F.linear in this process, by (M, N, K)."""
    numbers, found = Numbers(torch.device("cuda"), seed), {}
    for m, n, k in shapes:
        sets = max(1, math.ceil(cold_bytes / _bytes((m, k), (n, k), (m, n))))
        xs, ws = ([numbers.take(*shape) for _ in range(sets)] for shape in ((m, k), (n, k)))
        call = lambda i: F.linear(xs[i % sets], ws[i % sets])
        found[m, n, k] = turns({STARVED: call}, DeviceClock(), sets=sets, **how)[STARVED]
    return found
