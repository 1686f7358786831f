"""Nsight Compute's hardware counters for one call of each op that misses a goal: what limits the kernel.

`counters` runs `ncu … python -m benchmarks.profiler`, which calls each case and launches a marker kernel after it.
"""

import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

import bi_kernels
from bi_kernels.audit.parameters import CHECKOUT

MOST = 300  # seconds that ncu may take
MARKER = "spin_kernel"  # of torch.cuda._sleep
SECTIONS = ("SpeedOfLight", "WarpStateStats", "Occupancy", "LaunchStats")
STALLED = re.compile(r"smsp__average_warps?_issue_stalled_(\w+?)_per_issue_active\.ratio")
NUMBER = re.compile(r"-?[\d,]+\.?\d*(?:[eE][+-]?\d+)?")
SHOWN = {
    "µs": ("gpu__time_duration.sum", 1000),
    "SM %": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "DRAM %": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "L2 %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "L1 %": ("l1tex__throughput.avg.pct_of_peak_sustained_active", 1),
    "warps %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "programs": ("launch__grid_size", 1),
    "registers": ("launch__registers_per_thread", 1),
}


def _linear(m: int, n: int, k: int) -> Callable[[], object]:
    x, weight = _normal(m, k), _normal(n, k)
    return lambda: bi_kernels.linear(x, weight)


def _prefill(sequences: int, length: int) -> Callable[[], object]:
    q, k, v = _normal(sequences, length, 32, 128), *(_normal(sequences, length, 8, 128) for _ in range(2))
    return lambda: bi_kernels.attention(q, k, v)


def _decode(sequences: int, keys: int) -> Callable[[], object]:
    q, k, v = _normal(sequences, 1, 32, 128), *(_normal(sequences, keys, 8, 128) for _ in range(2))
    for _ in range(3):
        bi_kernels.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()  # in which few sequences are computed in steps
    with torch.cuda.graph(graph):
        kept = bi_kernels.attention(q, k, v)
    return lambda: (graph.replay(), kept)


def _norm(width: int) -> Callable[[], object]:
    x, weight = _normal(16384, width), _normal(width)
    return lambda: bi_kernels.rms_norm(x, weight)


def _norm_backward(width: int) -> Callable[[], object]:
    x, weight, dy = _normal(16384, width).requires_grad_(), _normal(width).requires_grad_(), _normal(16384, width)
    weight.main_grad = torch.zeros(width, device="cuda")
    y = bi_kernels.rms_norm(x, weight)
    return lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True, allow_unused=True)


def _embedding_backward(tokens: int, vocab: int, width: int) -> Callable[[], object]:
    weight, dy = _normal(vocab, width).requires_grad_(), _normal(tokens, width)
    weight.main_grad = torch.zeros(vocab, width, device="cuda")
    y = bi_kernels.embedding((torch.rand(tokens, device="cuda") ** 6 * vocab).long(), weight)
    return lambda: torch.autograd.grad(y, weight, dy, retain_graph=True, allow_unused=True)


CASES: dict[str, Callable[[], Callable[[], object]]] = {
    "linear, 1 × 128 × 8192": partial(_linear, 1, 128, 8192),
    "linear, 135 × 320 × 28728": partial(_linear, 135, 320, 28728),
    "attention, forward, 16 × 1024": partial(_prefill, 16, 1024),
    "attention, forward, 1 × 16384": partial(_prefill, 1, 16384),
    "decode, B 1, 4096 keys": partial(_decode, 1, 4096),
    "rms_norm, forward, width 1024": partial(_norm, 1024),
    "rms_norm, forward, width 8192": partial(_norm, 8192),
    "rms_norm, backward, width 1024": partial(_norm_backward, 1024),
    "embedding, backward, ids drawn unevenly": partial(_embedding_backward, 16384, 151936, 4096),
}


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _profile() -> None:
    """Calls every case once while the profiler looks, after calls in which it does not."""
    for make in CASES.values():
        call = make()
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del call
        torch.cuda.empty_cache()


def counters() -> list[dict]:
    """Returns {case, kernel, µs, …} of every kernel that the cases launch. Raises RuntimeError with one sentence where
    there are no counters to be had."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("Nsight Compute (`ncu`) is not on the PATH: no counters were read")
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", *(word for section in SECTIONS for word in ("--section", section))]
    command += [sys.executable, "-m", "benchmarks.profiler"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST, cwd=CHECKOUT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"`ncu` had not ended after {MOST} s: no counters were read") from None
    found = list(read(done.stdout))
    if not found:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==ERROR==")]
        raise RuntimeError(f"`ncu` read no counters: {said[0][10:].strip() if said else f'status {done.returncode}'}")
    return found


def read(text: str) -> Iterator[dict]:
    """Yields the kernels of ncu's table, each with its case, by the markers between the cases."""
    table = [line for line in text.splitlines() if line.startswith('"')]
    lines = csv.DictReader(io.StringIO("\n".join(table)))
    cases = iter(CASES)
    case = next(cases)
    for line in lines:
        if not line["ID"]:  # of units
            continue
        if MARKER in line["Kernel Name"]:
            case = next(cases, "")
            continue
        values = {name: float(v.replace(",", "")) for name, v in line.items() if name and NUMBER.fullmatch(v or "")}
        shown = {name: values[metric] / unit if metric in values else None for name, (metric, unit) in SHOWN.items()}
        stalls = {match[1]: v for name, v in values.items() if (match := STALLED.fullmatch(name))}
        worst = max(stalls, key=stalls.get, default="")
        share = f" {stalls[worst] / sum(stalls.values()):.0%}" if any(stalls.values()) else ""
        yield {"case": case, "kernel": line["Kernel Name"]} | shown | {"waits for": worst.replace("_", " ") + share}


if __name__ == "__main__":
    _profile()
