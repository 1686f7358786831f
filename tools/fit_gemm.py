"""Measures a GEMM's launch configurations on this GPU and fits the model of bi_kernels/ops/gemm/cost.py to them.

    python tools/fit_gemm.py measure OUT.jsonl [--seconds 120]     # on the GPU; every configuration's bits are compared
    python tools/fit_gemm.py fit OUT.jsonl [MORE.jsonl …]          # anywhere, needs scipy; writes cost.toml

The numbers there were fitted to gemm_times_h100.jsonl, which `measure` wrote on an H100 (torch 2.11, Triton 3.6), but
for `peak`, which is from NVIDIA's data sheet of it: 3.35 TB/s.

The second prints what the choice by the model costs beside the best choice of what was measured.
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import torch

from bi_kernels.checks import is_hopper, memory_peak
from bi_kernels.ops.gemm import cost as model
from bi_kernels.ops.gemm.cost import Cost, PipelineConfig, Tile, library_us, predicted_us

HERE = Path(model.__file__).with_name("cost.toml")
RINGS = [
    *(
        PipelineConfig(*few, 1)
        for few in ((8, 8, 512, 12), (8, 8, 1024, 6), (8, 16, 512, 8), (16, 8, 512, 8), (16, 16, 512, 6))
    ),
    *(PipelineConfig(*few, 1) for few in ((32, 16, 512, 4), (8, 32, 256, 10), (16, 32, 256, 8), (32, 32, 256, 6))),
    *(PipelineConfig(*few, 1) for few in ((64, 8, 256, 5), (64, 16, 256, 5), (64, 32, 128, 8))),
    PipelineConfig(64, 64, 128, 6, 1),
    PipelineConfig(64, 64, 64, 6, 1, 2),
    PipelineConfig(64, 64, 64, 4, 1, 3),
    PipelineConfig(64, 128, 128, 4, 1),
    PipelineConfig(64, 128, 64, 4, 1, 2),
    PipelineConfig(64, 128, 64, 8, 2),
    PipelineConfig(64, 256, 64, 5, 2),
]
TILES = [
    Tile(16, 64, 256, 4, 4, swap=True),
    Tile(64, 32, 256, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 64, 128, 4, 5),
    Tile(64, 64, 128, 4, 6, swap=True),
    Tile(64, 128, 64, 4, 3),
    Tile(64, 128, 128, 4, 3),
    Tile(64, 128, 128, 4, 4),
    Tile(128, 64, 64, 4, 8),
    Tile(128, 128, 32, 4, 4),
    Tile(128, 128, 64, 4, 3),
    Tile(128, 128, 64, 8, 4, extra_n=64, group=2),
    Tile(128, 128, 64, 8, 5, persistent=1),
    Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 64, 8, 4, persistent=1, halves=True),
]
USES = {"forward": "rows", "dx": "rows", "dw": "columns", "fold": "fold"}  # how a product is used in a step
STORED = {"forward": (False, False), "dx": (False, True), "dw": (True, True), "fold": (True, True)}  # by columns
LAYERS = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 4096), (2048, 4096), (1024, 8192)]
LAYERS += [(2560, 9728), (5120, 5120), (5120, 25600), (512, 12288), (3072, 1024), (768, 2048), (8192, 28672)]
LONG = [(128, 8192), (256, 8192), (512, 8192), (640, 5120), (1280, 8192)]  # shards: few columns, and a long sum
FIXED = Tile(128, 128, 64, 8, 3)  # whose bits all must have
POOL = 2**30  # 16-bit numbers from which operands are cut
ALIGNED = 256  # numbers, as torch allocates; a copy by TMA is slower from a place that is no multiple of 128 bytes
MOST = 48  # sets of operands: three times what the L2 cache holds, unless a set has less than 3 MB
REACHED = 0.9  # of a copy's bandwidth, by products
TABLES = {"tile": "(", "ring": "["}  # how a configuration's name begins
L2, PORT, CROOKED = (8, 10, 12, 15), (0.09, 0.11, 0.13), (0.2, 0.4, 0.7, 1.0)  # TB/s, and how much slower: tried


def takes(way, kind: str) -> bool:
    """Tells whether a configuration is for a kind of product: its operands' strides."""
    if isinstance(way, Tile):
        return not (way.swap and kind in ("dw", "fold"))
    return (way.rows >= 64 or kind in ("forward", "dx")) and (way.columns >= 16 or kind == "forward")


def drawn(seed: int) -> list[tuple[str, int, int, int]]:
    """Returns products (kind, M, N, K) in random order: layers of models, and others drawn log-uniformly."""
    rng = random.Random(seed)
    size = lambda low, high, by=8: max(by, int(math.exp(rng.uniform(math.log(low), math.log(high)))) // by * by)
    rows = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
    found = [("forward", m, *layer) for layer in LAYERS + LONG for m in rows]
    found += [("forward", size(1, 8192, 1), size(256, 32768), size(128, 28672)) for _ in range(80)]
    found += [("forward", size(1, 1024, 1), size(128, 3072), size(2048, 32768)) for _ in range(60)]
    found += [("dx", m, k, n) for n, k in LAYERS for m in (128, 256, 1024, 4096)]
    found += [(kind, *layer, t) for layer in LAYERS for t in (256, 512, 1024, 4096, 16384) for kind in ("dw", "fold")]
    for _ in range(25):
        found.append(("dx", size(64, 8192, 1), size(256, 16384), size(256, 16384)))
        found += [(kind, size(256, 16384), size(256, 16384), size(16, 16384, 1)) for kind in ("dw", "fold")]
    rng.shuffle(found)
    return [("fold", 151936, 4096, 4096), *(f for f in found if f[1] * f[2] * f[3] < 10**12)]  # an LM head's


class Bench:
    """Calls configurations on this GPU."""

    def __init__(self):
        from bi_kernels.ops.gemm import hopper, hopper_cublaslt, kernel  # noqa: PLC0415  (needs a GPU)

        self.kernel, self.library, self.rings = kernel, hopper_cublaslt, hopper
        self.pool = torch.randn(POOL, device="cuda", dtype=torch.bfloat16)

    def device(self) -> dict:
        """Returns what the model asks of a GPU: multiprocessors, and the TB/s of a copy and of its memory's clock."""
        a, b = self.pool.chunk(2)
        calls = [lambda: torch.add(a, 1, out=b) for _ in range(4)]
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        calls[0]()
        begun.record()
        for call in calls:
            call()
        ended.record()
        ended.synchronize()
        copied = 2 * a.numel() * a.element_size() * len(calls) / begun.elapsed_time(ended) / 1e9
        count = torch.cuda.get_device_properties(0).multi_processor_count
        peak = memory_peak(torch.device("cuda", 0))
        return {"multiprocessors": count, "dram": float(f"{REACHED * copied:.3g}"), "peak": float(f"{peak:.3g}")}

    def operands(self, kind: str, M: int, N: int, K: int, at: int):
        """Returns x, w and y of a product, cut from the pool at multiples of ALIGNED."""
        a, b = self.pool[at : at + M * K], self.pool[at + -(-M * K // ALIGNED) * ALIGNED :][: N * K]
        x = a.view(K, M).t() if USES[kind] != "rows" else a.view(M, K)
        w = b.view(N, K) if kind == "forward" else b.view(K, N).t()
        y = torch.zeros(M, N, device="cuda", dtype=torch.bfloat16 if USES[kind] == "rows" else torch.float32)
        return x, w, y

    def waves(self, x, w, y_dtype):
        sizes, strides = (len(x), len(w), x.shape[1]), (x.stride(), w.stride())
        return self.library.waves(sizes, strides, (x.dtype, y_dtype), x.device)

    def call(self, way, kind: str, x, w, y):
        start = y if kind == "fold" else None
        if isinstance(way, PipelineConfig):
            return self.rings.launch(x, w, None, way, y.dtype, start, y)
        if isinstance(way, Tile):
            return self.kernel.launch(x, w, None, way, y.dtype, start, y)
        if way == "library":
            return self.library.launch(x, w, None, y.dtype, y)
        if kind == "fold":
            return torch.addmm(y, x, w.t(), out_dtype=torch.float32, out=y)
        return torch.mm(x, w.t(), out_dtype=y.dtype, out=y) if y.dtype != x.dtype else torch.mm(x, w.t(), out=y)

    def same(self, way, kind: str) -> bool:
        """Tells whether a configuration has the bits of FIXED; also compiles it."""
        x, w, y = self.operands(kind, 520, 264, 200, 0)
        y.normal_()
        expected = y.clone()
        self.call(FIXED, kind, x, w, expected)
        self.call(way, kind, x, w, y)
        return torch.equal(y.view(torch.uint8), expected.view(torch.uint8))

    def times_us(self, kind: str, M: int, N: int, K: int, ways: dict) -> dict[str, float]:
        """Returns the median µs of each way on the device, in turns, over operands that the L2 cache does not hold."""
        room = 2 * (M * K + N * K) + 4 * M * N
        sets = max(1, min(MOST, int(1.5e8 / room)))
        step = min(M * K + N * K, (POOL - M * K - N * K - ALIGNED) // sets) // ALIGNED * ALIGNED
        given = [self.operands(kind, M, N, K, i * step) for i in range(sets)]
        graphs = {}
        for name, way in ways.items():
            if self.call(way, kind, *given[0]) is None:  # the library has no program for it
                continue
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=torch.cuda.current_stream()):
                for one in given * max(1, 3 // sets):
                    self.call(way, kind, *one)
        calls, found = sets * max(1, 3 // sets), {name: [] for name in graphs}
        replays = 3 if M * N * K < 2 * 10**11 else 1
        for _ in range(4):
            for name, graph in graphs.items():
                begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun.record()
                for _ in range(replays):
                    graph.replay()
                ended.record()
                ended.synchronize()
                found[name].append(begun.elapsed_time(ended) * 1000 / calls / replays)
        return {name: statistics.median(times[1:]) for name, times in found.items()}


def measure(out: Path, seconds: float, seed: int, few: bool, part: str | None) -> None:
    """Writes {kind, M, N, K, waves, us: {way: µs}} a line, until the time is over; few: of rings of few rows alone."""
    torch.cuda.set_stream(torch.cuda.Stream())
    ways = [*(RINGS if is_hopper(torch.device("cuda", 0)) else ()), *TILES]
    if few:
        ways = [way for way in ways if isinstance(way, PipelineConfig) and way.rows < 64]
    jobs = [(kind, way) for kind in USES for way in ways if takes(way, kind)]
    if part is not None:  # a process of many that compile
        bench, (mine, of) = Bench(), map(int, part.split("/"))
        wrong = [(kind, way) for kind, way in jobs[mine::of] if not bench.same(way, kind)]
        sys.exit("other bits: " + "; ".join(map(str, wrong)) if wrong else 0)
    each = [[sys.executable, __file__, "measure", str(out), "--part", f"{i}/12"] for i in range(12)]
    each = [command + ["--few"] * few for command in each]
    ended = [process.wait() for process in [subprocess.Popen(command) for command in each]]
    if any(ended):
        sys.exit("configurations of other bits are no choice; nothing was measured")
    bench, begun, done = Bench(), time.monotonic(), 0
    with out.open("a") as file:
        print(json.dumps({"device": bench.device()}), file=file)
        for kind, M, N, K in drawn(seed):
            if time.monotonic() - begun > seconds:
                break
            tried = {"cublas": "cublas"} | ({} if kind == "fold" else {"library": "library"})
            for way in ways:
                m, n = way.size
                tiles = math.ceil(M / m) * math.ceil(N / n)
                if (
                    takes(way, kind)
                    and (tiles < 5280 or m * n >= 2**14)
                    and not (m > 8 and m >= 2 * M)
                    and not (m < 64 and 8 * m < M)
                ):
                    tried[str(tuple(way)) if isinstance(way, Tile) else str([*way])] = way
            if not any(isinstance(way, Tile | PipelineConfig) for way in tried.values()):
                continue
            done += 1
            us = bench.times_us(kind, M, N, K, tried)
            x, w, y = bench.operands(kind, M, N, K, 0)
            line = {"kind": kind, "M": M, "N": N, "K": K, "waves": bench.waves(x, w, y.dtype), "us": us}
            print(json.dumps(line), file=file, flush=True)
        print(f"{done} products in {time.monotonic() - begun:.0f} s")


def _way(name: str) -> Tile | PipelineConfig:
    return PipelineConfig(*json.loads(name)) if name.startswith("[") else Tile(*eval(name, {}))


def fit(files: list[Path]) -> None:
    """Fits the costs, writes them, and prints what the choice by them costs."""
    import numpy as np  # noqa: PLC0415  (scipy is not among the dependencies)
    from scipy.optimize import least_squares  # noqa: PLC0415

    robust, bounds = {"loss": "soft_l1", "f_scale": 0.1}, np.log([[0.5, 1, 0.02], [8, 2000, 200]])
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    model.DEVICE.update(next((line["device"] for line in lines if "device" in line), {}))
    lines = [line for line in lines if "us" in line]
    seen: dict[tuple, list] = {}
    for line in lines:
        for name, us in line["us"].items():
            if name not in ("cublas", "library"):
                size = line["M"], line["N"], line["K"]
                seen.setdefault((name, USES[line["kind"]]), []).append((*size, STORED[line["kind"]], us))

    def fitted() -> tuple[dict[str, dict], dict[str, float]]:
        """Returns the costs, by the numbers of the device that are tried, and how far off they are, by kind of way."""
        costs, far = {}, dict.fromkeys(TABLES, 0.0)
        for (name, use), points in seen.items():
            if len(points) < 5:
                continue
            way = _way(name)

            def gaps(theta, way=way, use=use, points=points):
                cost = Cost(*np.exp(theta))
                return [math.log(predicted_us(way, cost, *size, use, how) / us) for *size, how, us in points]

            tried = [least_squares(gaps, np.log([2, step, 1]), bounds=bounds, **robust) for step in (15, 40, 90)]
            best = min(tried, key=lambda one: one.cost)
            costs.setdefault(name, {})[use] = [float(f"{v:.3g}") for v in np.exp(best.x)]
            far["tile" if isinstance(way, Tile) else "ring"] += best.cost
        return costs, far

    found = {}
    for rates, crooked in product(product(L2, PORT), CROOKED):
        model.DEVICE |= dict(zip(("l2", "port"), rates)) | {f"crooked_{table}": crooked for table in TABLES}
        found[rates, crooked] = fitted()
    nearest = lambda rates, table: min(CROOKED, key=lambda crooked: found[rates, crooked][1][table])
    rates = min(product(L2, PORT), key=lambda r: sum(found[r, nearest(r, table)][1][table] for table in TABLES))
    model.DEVICE |= dict(zip(("l2", "port"), rates)) | {f"crooked_{table}": nearest(rates, table) for table in TABLES}
    (costs, _), names = fitted(), ("start", "rate", "step", "slow")
    prices = _prices(lines, costs)
    served = [line for line in lines if "library" in line["us"] and line["kind"] != "fold" and line["waves"]]

    def library_gaps(theta):
        model.LIBRARY.update(zip(names, np.exp(theta)))
        us = [
            library_us(line["M"], line["N"], line["K"], STORED[line["kind"]], line["waves"], USES[line["kind"]])
            for line in served
        ]
        return [math.log(u / line["us"]["library"]) for u, line in zip(us, served)]

    if served:
        best = np.exp(least_squares(library_gaps, np.log([3, 5, 20, 3]), **robust).x)
        model.LIBRARY.update(zip(names, (float(f"{v:.3g}") for v in best)))
    _write(costs)
    for (table, kind), mine in sorted(prices.items()):
        mean, worst = statistics.geometric_mean(mine), max(mine)
        print(f"{table:5}{kind:8} {len(mine):4} products: {mean:.3f} of the best choice's time, worst {worst:.2f}")


def _write(costs: dict[str, dict]) -> None:
    crooked = "of one multiprocessor. crooked: by how much slower, of rows that begin within a line"
    text = [
        HEAD,
        f"[device]  # TB/s: dram, what products reach of peak, which the memory's clock allows; l2; port, {crooked}",
        *(f"{k} = {v}" for k, v in model.DEVICE.items()),
    ]
    text += ["\n[library]  # µs, TFLOP/s of a multiprocessor, ns for 16 of k"]
    text += [f"{k} = {v}" for k, v in model.LIBRARY.items()]
    for table, ways in (("tile", TILES), ("ring", RINGS)):
        for way in ways:
            found = costs.get(str(tuple(way)) if table == "tile" else str([*way]))
            if found:
                usual = way._field_defaults
                fields = [f"{k} = {str(v).lower()}" for k, v in way._asdict().items() if usual.get(k) != v]
                text += [f"\n[[{table}]]", *fields, *(f"cost.{use} = {numbers}" for use, numbers in found.items())]
    HERE.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"wrote {HERE.name}")


HEAD = """# Written by tools/fit_gemm.py; read by cost.py. cost.USE = [µs before the first tile, ns for 16 of k, µs for
# a tile's result], of products whose operands are stored by rows (forward, dX), by columns (dW), or that go on (fold).
"""


def _prices(lines: list[dict], costs: dict[str, dict]) -> dict[tuple[str, str], list[float]]:
    """Returns the times of the choice over those of the best configuration measured, by kind of configuration and of
    product."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        use, size, how = USES[line["kind"]], (line["M"], line["N"], line["K"]), STORED[line["kind"]]
        for table, begins in TABLES.items():
            names = [n for n in line["us"] if n.startswith(begins) and use in costs.get(n, {})]
            us = {n: predicted_us(_way(n), Cost(*costs[n][use]), *size, use, how) for n in names}
            if us:
                price = line["us"][min(us, key=us.get)] / min(line["us"][n] for n in us)
                found.setdefault((table, line["kind"]), []).append(price)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("out", type=Path)
    one.add_argument("--seconds", type=float, default=120)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--few", action="store_true")
    one.add_argument("--part")
    commands.add_parser("fit").add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.out, given.seconds, given.seed, given.few, given.part)
    else:
        fit(given.files)
