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


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _ids(vocab: int) -> torch.Tensor:
    return (torch.rand(16384, device="cuda") ** 6 * vocab).long()


def _prompts(sequences: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    return _normal(sequences, queries, 32, 128), *(_normal(sequences, keys, 8, 128) for _ in range(2))


CASES: dict[str, Callable[[], tuple]] = {  # an op and its inputs
    "linear, 1 × 128 × 8192": lambda: (bi_kernels.linear, _normal(1, 8192), _normal(128, 8192)),
    "linear, 135 × 320 × 28728": lambda: (bi_kernels.linear, _normal(135, 28728), _normal(320, 28728)),
    "linear, 128 × 1280 × 8192": lambda: (bi_kernels.linear, _normal(128, 8192), _normal(1280, 8192)),
    "linear, backward, 2048 × 12288 × 4096": lambda: (bi_kernels.linear, _normal(2048, 4096), _normal(12288, 4096)),
    "attention, forward, 16 × 1024": lambda: (bi_kernels.attention, *_prompts(16, 1024, 1024)),
    "attention, forward, 1 × 16384": lambda: (bi_kernels.attention, *_prompts(1, 16384, 16384)),
    "decode, B 1, 4096 keys": lambda: (bi_kernels.attention, *_prompts(1, 1, 4096)),
    "rms_norm, forward, width 1024": lambda: (bi_kernels.rms_norm, _normal(16384, 1024), _normal(1024)),
    "rms_norm, forward, width 8192": lambda: (bi_kernels.rms_norm, _normal(16384, 8192), _normal(8192)),
    "rms_norm, backward, width 1024": lambda: (bi_kernels.rms_norm, _normal(16384, 1024), _normal(1024)),
    "embedding, backward, ids drawn unevenly": lambda: (bi_kernels.embedding, _ids(151936), _normal(151936, 4096)),
}


def _call(case: str) -> Callable[[], object]:
    """Returns a call of a case: forward, backward into main_grad, or the replay of a graph of a decode step."""
    op, *inputs = CASES[case]()
    call = lambda: op(*inputs)
    if "backward" in case:
        leaves = [t.requires_grad_() for t in inputs if t.is_floating_point()]
        leaves[-1].main_grad = torch.zeros_like(leaves[-1], dtype=torch.float32)
        y = call()
        dy = _normal(*y.shape)
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True, allow_unused=True)
    if "decode" in case:  # few sequences are computed in steps in a graph alone
        for _ in range(3):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()
        return lambda: (graph.replay(), kept)
    return call


def _profile() -> None:
    """Calls every case once while the profiler looks, after calls in which it does not."""
    for case in CASES:
        call = _call(case)
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
