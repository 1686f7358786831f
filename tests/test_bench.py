"""bi-audit bench: which cells it has, how it times, what it makes of goals, and what is left of a run that is cut."""

import json
import math
import re
import sys
from itertools import cycle
from pathlib import Path
from types import ModuleType, SimpleNamespace

import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
from conftest import slow_but
from IPython.display import Markdown

import bi_kernels
from benchmarks import attention, cases, linear, measure, profiler, rows, tables
from benchmarks import clock as clock_module
from benchmarks.session import MEASURES
from bi_kernels.audit import parameters, start
from bi_kernels.audit.runs.runner import audits
from bi_kernels.contract import CONTRACT

BENCH = CONTRACT["benchmark"]
TINY = cases.settings("tiny")
CPU = torch.device("cpu")


class Clock(clock_module.OperatorCounter):
    """Gives each call the milliseconds that `ms` says, and notes who was timed with which inputs."""

    unit = "ms"

    def __init__(self, ms=lambda call: 1.0):
        self.ms, self.seen = ms, []

    def device(self, call, first, count):
        self.seen.append((call, first, count))
        for i in range(first, first + count):
            call(i)
        return self.ms(call)

    wall = cpu = device


def bench(tmp_path: Path | None = None, clock=None, **settings) -> measure.Bench:
    made = measure.Bench(CPU, TINY | {"cold_bytes": 1e4} | settings, 0, tmp_path and tmp_path / "benchmark.jsonl")
    made.clock = clock or made.clock
    return made


# Which cells


def test_drawn_shapes_follow_the_seed_and_stay_in_their_ranges():
    table = BENCH["drawn"]
    first, again, other = (cases.drawn(table, seed) for seed in (3, 3, 4))
    assert first == again and len(set(first)) == table["count"] == 200 and len(set(first) & set(other)) < 10
    for name, values in zip("MNK", zip(*first)):
        low, high = table[name]
        logs = [math.log(v / low) / math.log(high / low) for v in values]
        assert 0 <= min(logs) < 0.05 and 0.95 < max(logs) <= 1 and 0.4 < sum(logs) / len(logs) < 0.6, "log-uniform"
    assert all(n % 8 == k % 8 == 0 for _, n, k in first) and any(m % 8 for m, _, _ in first)


@pytest.mark.slow
def test_every_goal_is_of_something_that_is_measured():
    """Run with a clock that gives every call a millisecond, each goal but those of large cells finds measurements."""
    made = bench(clock=Clock())
    made.limits = {"TB/s": 1.0, "TFLOP/s": 1.0}
    for group in MEASURES.values():
        group(made)
    assert not [r for r in made.records if "error" in r]
    found = tables.evaluate(made.records, BENCH["goals"])
    unknown = [f["what"] for f in found if f["met"] is None]
    sizes = {f"{batch} × {length}" for batch, length in BENCH["attention"]["sizes"]}
    assert all(
        what.startswith("attention, ") and what.split(", ")[2] in sizes or "beyond 1 GiB" in what for what in unknown
    )
    assert len(unknown) == 6, "three sizes forward, two backward, and large caches"


@pytest.mark.parametrize("group", cases.GROUPS)
def test_a_group_measures_as_many_cells_as_it_is_to_have(group):
    made = bench()
    MEASURES[group](made)
    assert len([r for r in made.records if "op" in r]) == len(made.records) == cases.expected(group, "tiny", 0)


# How it times


HOW = {"rounds": 5, "round_ms": 3.0, "most_calls": 24}


def test_calls_take_turns_and_never_meet_the_inputs_of_the_one_before():
    first, second = (lambda i: None), (lambda i: None)
    clock = Clock(lambda call: 0.5)
    clock_module.time_in_turns({"a": first, "b": second}, clock, **HOW, walls=0)
    order = [call for call, _, count in clock.seen if count == 6]  # 3 ms of half a millisecond each
    assert order == [first, second] * 5
    given = [set(range(at, at + count)) for _, at, count in clock.seen if count == 6]
    assert not any(a & b for a, b in zip(given, given[1:]))


@pytest.mark.parametrize("ms, count", [(100.0, 1), (1.0, 3), (0.001, 24), (0.0, 24)])
def test_a_short_call_is_repeated_and_a_long_one_is_not(ms, count):
    clock = Clock(lambda call: ms)
    clock_module.time_in_turns({"a": lambda i: None}, clock, **HOW)
    assert {c for _, _, c in clock.seen[2:]} == {count}


def test_a_slower_candidate_is_found_slower_by_the_counter_and_by_the_clock():
    x = torch.ones(4)
    once, thrice = (lambda i: x + 1), (lambda i: [x + 1 for _ in range(3)])
    found, errors = bench().timed({"once": once, "thrice": thrice})
    assert not errors and found["thrice"].device.median == 3 * found["once"].device.median == 3
    session = start("bench", groups="calls")
    same, slow = session.controls()
    assert (same.verdict, same.mismatches, slow.control, slow.caught) == ("pass", 0, True, True)
    session.bench.clock = Clock()  # to which everything takes as long
    assert not session.controls()[1].caught and session.failures, "a stopwatch that sees nothing is found out"


def test_a_peer_that_cannot_is_said_and_ours_that_cannot_is_a_cell_without_a_measurement():
    def cannot(i):
        raise RuntimeError("no kernel")

    made = bench()
    found, errors = made.timed({"bi_kernels": lambda i: None, "peer": cannot})
    assert list(found) == ["bi_kernels"] and errors == {"peer": "RuntimeError: no kernel"}
    made.cell("gemm", "a case", measure.Bench.timed, {"bi_kernels": cannot})
    assert made.records == [{"group": "gemm", "case": "a case", "error": "RuntimeError: no kernel"}]
    session = start("bench", groups="lm_head")
    session.bench.records = made.records
    row = session._complete("gemm")
    assert row.verdict == "needs-fix" and "no kernel" in row.detail


def test_ratios_are_the_peers_time_over_ours_and_rates_are_of_ours():
    made = bench()
    made.clock, made.limits = Clock(), {"TB/s": 4.0}
    of = lambda ms: clock_module.Timing(clock_module.spread([ms]), None)
    found = {"bi_kernels": of(2.0), "slow": of(5.0), "fast": of(1.0)}, {}
    made.add("decode", "attention", found, measure.FASTEST, {"direction": "paged"}, flops=4e9, size=6e9)
    (said,) = made.records
    assert (said["against"], said["ratio"], said["times"]) == ("fast", 0.5, 2.0)
    assert (said["TFLOP/s"], said["TB/s"], said["of limit"]) == (2.0, 3.0, 0.75)


def test_no_number_of_a_cell_lies_in_two_of_its_tensors():
    numbers = measure.Numbers(CPU, 0, 1024)
    numbers.take(700)
    numbers.reserve(1024)
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (numbers.take(500), numbers.take(512))]
    assert spans[0][1] <= spans[1][0] and spans[0][0] == numbers.all.data_ptr()
    with pytest.raises(ValueError, match="count is 1025"):
        numbers.reserve(1025)
    for cell in cases.decode(BENCH["decode"]):
        taken = [cell.batch * cell.heads * cell.head_dim, *[cell.bytes // 4] * 2]
        assert attention._size(cell) == sum(map(measure.padded, taken))


# What it computes is what is compared


def test_ours_and_the_peers_compute_the_same(monkeypatch):
    """Every call that is timed beside ours gives what ours gives, about."""
    compared = []

    def timed(self, calls, **how):
        results = {}
        for name, call in calls.items():
            try:
                results[name] = call(0)
            except RuntimeError:
                assert "cuDNN" in name or name == "efficient", name
        ours = next(iter(results))
        parts = lambda found: [t for t in (found if isinstance(found, tuple | list) else [found]) if t is not None]
        for name, found in results.items():
            for a, b in zip(parts(results[ours]), parts(found)):
                close = (a.float() - b.float()).abs() <= CONTRACT["any"]["alike"] * b.float().abs().max()
                assert close.all(), (ours, name, a, b)
                compared.append(name)
        raise StopIteration

    monkeypatch.setattr(measure.Bench, "timed", timed)
    for group in (linear.drawn, attention.decode):
        group(made := bench())
        assert {r["error"] for r in made.records} == {"StopIteration"}
    made = bench()
    for op in rows.ops(made):
        with pytest.raises(StopIteration):
            rows._op(made, op)
    assert {"cuBLAS", "FA2", "torch", "bi_kernels, paged"} <= set(compared)


# Goals


GOAL = {"what": "w", "of": {"group": "gemm"}, "value": "ratio", "why": "a reason"}


@pytest.mark.parametrize(
    "goal, values, reached, met",
    [
        ({"take": "geometric mean", "least": 0.98}, [0.5, 2.0], 1.0, True),
        ({"take": "geometric mean", "least": 0.98}, [0.25, 1.0], 0.5, False),
        ({"take": "smallest", "least": 0.82}, [0.82, 3.0], 0.82, True),
        ({"take": "smallest", "least": 0.82}, [0.81, 3.0], 0.81, False),
        ({"take": "largest", "most": 1.15}, [1.15, 0.2], 1.15, True),
        ({"take": "largest", "most": 1.15}, [1.16, 0.2], 1.16, False),
        ({"take": "largest", "most": 1.15}, [], None, None),
    ],
)
def test_a_goal_is_met_missed_or_not_known(goal, values, reached, met):
    records = [{"group": "gemm", "op": "linear", "case": f"case {v}", "ratio": v, "M": 1} for v in values]
    other = [
        {"group": "drawn", "op": "linear", "case": "x", "ratio": 0.01},
        {"group": "gemm", "case": "x", "error": "e"},
    ]
    (found,) = tables.evaluate(records + other, [GOAL | goal])
    assert found["met"] is met and found["reached"] == reached
    (line,) = tables.of_goals([found])
    assert line[""] == {True: "✔", False: "✘", None: "–"}[met] and line["measurements"] == len(values)
    assert line["why"] == "a reason"
    if values:
        worst = min(values) if "least" in goal else max(values)
        assert line["the worst of them"] == f"linear, case {worst}, M 1"


def test_tiny_cells_are_held_against_no_goal():
    session = start("bench", groups="calls")
    session.bench.records.append({"group": "calls", "op": "linear", "cpu_us": 1.0, "case": "c"})
    assert not any(found["met"] for found in session.goals())


# What is left, and what is said


def test_a_run_that_is_cut_keeps_every_measurement_before(tmp_path):
    made = bench(tmp_path)

    def interrupted(*args):
        if len(made.records) == 3:
            raise KeyboardInterrupt
        return made.clock.__class__.device(made.clock, *args)

    made.clock.device = interrupted
    with pytest.raises(KeyboardInterrupt):
        MEASURES["gemm"](made)
    kept = [json.loads(line) for line in made.file.read_text(encoding="utf-8").splitlines()]
    assert len(kept) == 3 and [r["case"] for r in kept] == [r["case"] for r in made.records]


def test_without_a_gpu_bench_refuses_in_one_sentence(bi_audit):
    done = bi_audit("bench", "gemm")
    assert done.returncode == 2 and not done.out
    assert done.err == "bi-audit: bench: no CUDA GPU is there, and nothing else is timed\n"


@pytest.mark.parametrize("command", [["bench"], ["bench", "gemm"], ["run", "bench"]], ids=" ".join)
def test_an_installed_package_has_no_benchmarks(command, bi_audit, monkeypatch, tmp_path):
    monkeypatch.setattr(parameters, "CHECKOUT", tmp_path)
    done = bi_audit(*command)
    assert done.returncode == 2 and not done.out and "a checkout" in done.err and done.err.count("\n") == 1


def test_an_unknown_group_is_one_sentence(bi_audit):
    done = bi_audit("bench", "gem")
    assert done.returncode == 2 and done.err == f"bi-audit: unknown group 'gem', expected {', '.join(cases.GROUPS)}\n"
    assert all(re.search(rf"\b{group}\b", bi_audit("bench", "-h").out) for group in cases.GROUPS)


# The notebook's tables and figures, which only a GPU fills


@pytest.mark.parametrize("groups", slow_but(["", *cases.GROUPS], "calls"))
def test_the_notebook_draws_what_a_gpu_measures(groups, monkeypatch):
    """Its cells run with a clock that makes times up, for all groups and for one alone; FlashAttention 4 is ours."""
    fa4 = lambda q, k, v, causal, num_splits: (bi_kernels.attention(q, k, v, causal=causal)[0], None)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=fa4))
    session = start("bench", groups=groups)
    taken = cycle([1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.3])
    session.bench.clock = Clock(lambda call: next(taken))
    small = {"copy_bytes": 2**16, "products": [[32, 32, 32]], "cold_bytes": 1e4}
    session.bench.settings = session.bench.settings | small
    shown = []
    scope = {"run": session, "display": shown.append, "seed": 0}
    notebook = nbformat.read(audits()["bench"].notebook, as_version=4)
    setup = next(c.source for c in notebook.cells if "setup" in c.metadata.get("tags", []))
    imports = ("from benchmarks", "from bi_kernels.audit.", "from helpers")
    exec("\n".join(line for line in setup.splitlines() if line.startswith(imports)), scope)
    scope["records"] = session.measure()
    assert not session.failures
    silent = []
    for cell in (c.source for c in notebook.cells if "gpu" in c.metadata.get("tags", [])):
        before = len(shown)
        exec(cell, scope)
        silent += [cell] * (len(shown) == before)
    assert bool(silent) == bool(groups), silent
    plt.close("all")
    assert all(isinstance(x, Markdown) for x in shown)


STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
NCU = [
    ["ID", "Host Name", "Kernel Name", "gpu__time_duration.sum", SM, STALL.format("barrier"), STALL.format("wait")],
    ["", "", "", "ns", "%", "inst", "inst"],
    ["0", "somewhere", "scores_kernel", "1,250", "12.5", "3", "1"],
    ["1", "somewhere", "values_kernel", "2000", "3.7", "n/a", "2"],
    ["2", "somewhere", "spin_kernel", "900", "0", "0", "0"],
    ["3", "somewhere", "_rms_norm_kernel", "150000", "40", "0.5", "1.5"],
]


def test_counters_are_read_by_case_and_name_no_host():
    first, second = list(profiler.CASES)[:2]
    lines = [",".join(f'"{word}"' for word in line) for line in NCU]
    found = list(profiler.read("\n".join(["==PROF== Connected to process 7", *lines])))
    cases = [(first, "scores_kernel"), (first, "values_kernel"), (second, "_rms_norm_kernel")]
    assert [(line["case"], line["kernel"]) for line in found] == cases
    assert found[0]["µs"] == 1.25 and found[0]["waits for"] == "barrier 75%" and found[1]["waits for"] == "wait 100%"
    assert found[2]["SM %"] == 40 and found[2]["DRAM %"] is None
    assert "somewhere" not in str(found)
    assert tables.counters([{"group": "counters"} | line for line in found])[2]["DRAM %"] == tables.UNKNOWN


def test_without_a_profiler_a_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(profiler.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="not on the PATH"):
        profiler.counters()
    refusing = tmp_path / "ncu"
    refusing.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(profiler.shutil, "which", lambda name: str(refusing))
    with pytest.raises(RuntimeError, match="no counters: ERR_NVGPUCTRPERM"):
        profiler.counters()
    refusing.write_text("#!/bin/sh\nexec sleep 9\n")
    monkeypatch.setattr(profiler, "MOST", 0.2)
    with pytest.raises(RuntimeError, match="had not ended after 0.2 s"):
        profiler.counters()
