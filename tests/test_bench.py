"""bi-audit bench: which cells it has, how it times, what it makes of goals, and what is left of a run that is cut."""

import json
import math
import os
import re
import time
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
from IPython.display import Markdown

from benchmarks import attention, cases, linear, measure, profiler, rows, tables
from benchmarks.session import MEASURES
from bi_kernels.audit import parameters, start, timing, worker
from bi_kernels.audit.index import goals
from bi_kernels.audit.runs.runner import audits
from bi_kernels.contract import CONTRACT

BENCH = CONTRACT["benchmark"]
TINY = cases.settings("tiny")
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "audits/nvidia-h200-qwen3-8b/bench"


class Clock(timing.OperatorCounter):
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


def test_a_shape_is_there_once_and_says_every_layer_that_has_it():
    found = cases.layers(BENCH["gemm"])
    shapes = [(layer.n, layer.k) for layer in found]
    assert len(set(shapes)) == len(shapes)
    named = {name: layer for layer in found for name in layer.names}
    dense = [f for f, sizes in BENCH["gemm"]["families"].items() if "heads" in sizes]
    experts = len(BENCH["gemm"]["families"]) - len(dense)
    assert len(named) == len(dense) * 7 * 4 + experts * 3 == sum(len(layer.names) for layer in found)
    o, q = (named["Qwen3-8B", layer, 1] for layer in "oq")
    assert o is q and o[:2] == (4096, 4096), "o and q of the same sizes are one shape"


@pytest.mark.parametrize(
    "family, layer, shard, shape",
    [
        ("Qwen3-0.6B", "k", 8, (128, 1024)),
        ("Qwen3-8B", "qkv", 1, (6144, 4096)),
        ("Qwen3-8B", "gate_up", 4, (6144, 4096)),
        ("Qwen3-32B", "o", 1, (5120, 8192)),
        ("Llama-3 70B", "down", 8, (8192, 3584)),
        ("experts of DeepSeek-V3", "gate_up", 1, (4096, 7168)),
    ],
)
def test_layers_and_shards_have_their_models_shapes(family, layer, shard, shape):
    assert [tuple(x[:2]) for x in cases.layers(BENCH["gemm"]) if (family, layer, shard) in x.names] == [shape]


def test_rows_begin_at_one_and_end_where_the_goals_do():
    assert (min(BENCH["gemm"]["rows"]), max(BENCH["gemm"]["rows"])) == (1, 16384)
    assert (min(BENCH["gradients"]["tokens"]), max(BENCH["gradients"]["tokens"])) == (256, 16384)
    assert {x.names[0][2] for x in cases.layers(BENCH["gemm"], shards=False)} == {1}


def test_drawn_shapes_follow_the_seed_and_stay_in_their_ranges():
    table = BENCH["drawn"]
    first, again, other = (cases.drawn(table, seed) for seed in (3, 3, 4))
    assert first == again and len(set(first)) == table["count"] == 200
    assert len(set(first) & set(other)) < 10
    for name, values in zip("MNK", zip(*first)):
        low, high = table[name]
        assert low <= min(values) and max(values) <= high
        logs = [math.log(v / low) / math.log(high / low) for v in values]
        assert 0.4 < sum(logs) / len(logs) < 0.6 and min(logs) < 0.05 and max(logs) > 0.95, f"{name} is log-uniform"
    assert all(n % 8 == k % 8 == 0 for _, n, k in first) and any(m % 8 for m, _, _ in first)


def test_decode_has_the_whole_grid_but_for_caches_that_are_too_large():
    every = list(cases.decode(BENCH["decode"]))
    assert len(every) == len(set(every)) == 5 * 4 * 3 * 2
    largest = max(every, key=lambda cell: cell.bytes)
    assert (largest.batch, largest.keys, largest.grouping, largest.head_dim) == (64, 65536, "MHA", 128)
    assert largest.bytes == 64 * 65536 * 32 * 128 * 2 * 2 > BENCH["decode"]["largest"]
    assert cases.expected("decode", "", 0) == 2 * sum(cell.bytes <= BENCH["decode"]["largest"] for cell in every)
    assert all(cell.keys % BENCH["decode"]["page"] == 0 for cell in every)


@pytest.mark.slow
def test_every_goal_is_of_something_that_is_measured():
    """Run with a clock that gives every call a millisecond, each goal but those of large cells finds measurements."""
    made = bench(clock=Clock())
    made.limits = {"TB/s": 1.0, "TFLOP/s": 1.0}
    for group in MEASURES.values():
        group(made)
    assert not [r for r in made.records if "error" in r]
    found = goals.evaluate(made.records, BENCH["goals"])
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


def test_a_spread_is_the_median_and_the_quartiles():
    assert timing.spread([5.0, 1.0, 4.0, 2.0, 3.0]) == (3.0, 2.0, 4.0)
    assert timing.spread([7.0]) == (7.0, 7.0, 7.0)


HOW = {"rounds": 5, "round_ms": 3.0, "most_calls": 24}


def test_calls_take_turns_and_never_meet_the_inputs_of_the_one_before():
    first, second = (lambda i: None), (lambda i: None)
    clock = Clock(lambda call: 0.5)
    timing.time_in_turns({"a": first, "b": second}, clock, **HOW, walls=0)
    order = [call for call, _, count in clock.seen if count == 6]  # 3 ms of half a millisecond each
    assert order == [first, second] * 5
    given = [set(range(at, at + count)) for _, at, count in clock.seen if count == 6]
    assert not any(a & b for a, b in zip(given, given[1:]))


def test_medians_forget_a_round_that_was_disturbed():
    taken = iter([1.0, 1.0, 1.0, 1.0, 99.0, 1.2, 1.1])
    found = timing.time_in_turns({"a": lambda i: None}, Clock(lambda call: next(taken)), **HOW, walls=0)["a"]
    assert found.device == (1.1, 1.0, 1.2) and found.wall is None


@pytest.mark.parametrize("ms, count", [(100.0, 1), (1.0, 3), (0.001, 24), (0.0, 24)])
def test_a_short_call_is_repeated_and_a_long_one_is_not(ms, count):
    clock = Clock(lambda call: ms)
    timing.time_in_turns({"a": lambda i: None}, clock, **HOW)
    assert {c for _, _, c in clock.seen[2:]} == {count}


def test_a_graph_holds_every_set_of_inputs_and_its_time_is_divided_by_its_calls():
    class Graphs(Clock):
        def captured(self, call, count):
            self.count = count
            return lambda i: self.replays.append(count)

    clock = Graphs(lambda call: 8.0)
    clock.replays = []
    found = timing.time_in_turns({"a": lambda i: None}, clock, **HOW, sets=16, graphs=True, walls=0)["a"]
    assert clock.replays == [16] * 5 and found.device.median == 0.5


@pytest.mark.parametrize(
    "woke, given", [([False], [0, 1, 2]), ([True, False], [0, 1, 2, 3, 4, 5]), ([True] * 9, [*range(9)])]
)
def test_the_device_sleeps_until_a_round_is_queued(woke, given, monkeypatch):
    """Where it woke before, the round is queued again, with other inputs and a longer sleep; at most three times."""
    answers, slept, seen = iter(woke), [], []
    event = SimpleNamespace(record=lambda: None, query=lambda: next(answers), elapsed_time=lambda end: 6.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = timing.DeviceClock()
    call = lambda i: (seen.append(i), time.perf_counter())
    clock.queued_us[call] = 50.0
    assert clock.device(call, 0, 3) == 2.0 and seen == given
    assert slept[0] == int(timing.CYCLES * (50 + 1.5 * 3 * 50)) and len(slept) == len(given) / 3


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
    of = lambda ms: timing.Timing(timing.spread([ms]), None)
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
        assert {r["error"] for r in made.records} == {"StopIteration: "}
    made = bench()
    for op in rows.ops(made):
        with pytest.raises(StopIteration):
            rows._op(made, op)
    assert {"cuBLAS", "FA2", "torch", "bi_kernels, paged"} <= set(compared)


def test_a_weight_gradient_that_goes_on_adds_what_torch_adds():
    g = torch.Generator().manual_seed(0)
    dy, x = (torch.randint(-1, 2, (32, 16), generator=g).bfloat16() for _ in range(2))  # whose sums are exact
    ours, theirs = torch.ones(16, 16), torch.ones(16, 16)
    linear.product(dy.t(), x.t(), ours, ours, torch.float32)
    linear._accumulate(CPU)(theirs, dy, x)
    assert torch.equal(ours, theirs) and not torch.equal(ours, torch.ones(16, 16))


def test_the_starved_process_has_the_environment_that_the_contract_says():
    names = list(BENCH["gemm"]["environment"])
    assert names == ["CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"]
    for name, value in BENCH["gemm"]["environment"].items():
        assert worker.call("os:getenv", name, environment=BENCH["gemm"]["environment"]) == value != os.getenv(name)


# Goals


GOAL = {"what": "w", "of": {"group": "gemm"}, "value": "ratio"}


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
    (found,) = goals.evaluate(records + other, [GOAL | goal])
    assert found["met"] is met and found["reached"] == reached
    (line,) = goals.lines([found])
    assert line[""] == {True: "✔", False: "✘", None: "–"}[met] and line["measurements"] == len(values)
    if values:
        worst = min(values) if "least" in goal else max(values)
        assert line["the worst of them"] == f"linear, case {worst}, M 1"


def test_the_sentence_counts_goals_of_each_outcome():
    made = lambda *mets: [{"met": met} for met in mets]
    assert goals.summary(made(True, True)) == "✔ 2 of 2 goals met, none missed."
    assert goals.summary(made(True, False)) == "✔ 1 of 2 goals met, ✘ 1 missed."
    assert goals.summary(made(True, False, None)).endswith("✘ 1 missed, 1 not measured in this run.")
    assert "needs a CUDA GPU" in goals.summary(made(None, None))


def test_the_sentence_says_how_far_the_worst_goal_is_missed():
    goal = lambda what, reached, **bound: {"what": what, "goal": bound, "reached": reached, "met": False}
    found = [
        goal("gemm", 0.5, least=0.75),
        goal("decode", 3.62, most=1.15),
        {"met": True, "reached": 9, "what": "best"},
    ]
    assert goals.summary(found).endswith("Farthest from its goal: decode, 3.620 (goal ≤ 1.15).")


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


@pytest.mark.parametrize(
    "groups, folder", [((), "fake-gpu-qwen3-8b"), (("rows", "calls"), "fake-gpu-qwen3-8b-rows-calls")]
)
def test_some_groups_do_not_take_the_place_of_the_whole(groups, folder, monkeypatch):
    from bi_kernels.audit import commands
    from bi_kernels.audit.runs import given

    ran = []
    for module in (commands, given):
        monkeypatch.setattr(module, "choose", lambda device, shapes="": torch.device("cuda"))
    monkeypatch.setattr(given, "device_name", lambda device: "Fake GPU")
    monkeypatch.setattr(given, "writable", lambda option, file: None)
    monkeypatch.setattr(commands, "run", lambda **told: ran.append(told))
    commands.bench(groups, "auto", seed=5, tiny=False, out=None, publish=True)
    (told,) = ran
    assert (told["names"], told["out"], told["seed"], told["publish"]) == (("bench",), None, 5, True)
    assert told["extra"] == ([("groups", "rows;calls")] if groups else [])
    read = {"groups": "", "shapes": told["shapes"], "device": "auto"} | dict(told["extra"])
    place, narrowed = given.place("bench", read, None, publish=True, quick=False)
    assert place == Path("audits", folder) and bool(narrowed) == bool(groups)


def test_the_goals_that_are_missed_are_said_when_the_command_ends(tmp_path, capsys):
    from bi_kernels.audit.runs.command import say_goals

    say_goals(["bench"], tmp_path)
    assert capsys.readouterr().out == "", "its notebook stopped before"
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / goals.FILE).write_text(json.dumps([{"met": True}, {"met": False}]))
    say_goals(["gemm"], tmp_path)
    assert capsys.readouterr().out == "", "that of an earlier run"
    say_goals(["bench"], tmp_path)
    assert capsys.readouterr().out == "✔ 1 of 2 goals met, ✘ 1 missed.\n"


def test_the_session_says_the_command_that_repeats_it():
    session = start("bench", groups="gemm;rows", seed=3)
    assert session.command == "bi-audit run bench -p groups 'gemm;rows' --seed 3"
    session.parameters["shapes"] = "qwen3-8b"
    assert session.command == "bi-audit bench gemm rows --seed 3"
    session.parameters |= {"groups": "", "seed": 0}
    assert session.command == "bi-audit bench"


# The notebook's tables and figures, which only a GPU fills


@pytest.mark.slow(but=["calls"])
@pytest.mark.parametrize("groups", ["", *cases.GROUPS])
def test_the_notebook_draws_what_a_gpu_measures(groups, monkeypatch):
    """Its cells run with a clock that makes times up, for all groups and for one alone; titles say what was found."""
    session = start("bench", groups=groups)
    taken = cycle([1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.3])
    session.bench.clock = Clock(lambda call: next(taken))
    small = {"copy_bytes": 2**16, "products": [[32, 32, 32]], "cold_bytes": 1e4}
    session.bench.settings = session.bench.settings | small
    shown = []
    scope = {"run": session, "display": shown.append, "seed": 0}
    notebook = nbformat.read(audits()["bench"].notebook, as_version=4)
    setup = next(c.source for c in notebook.cells if "setup" in c.metadata.get("tags", []))
    imports = ("from benchmarks", "from bi_kernels.audit.")
    exec("\n".join(line for line in setup.splitlines() if line.startswith(imports)), scope)
    scope["records"] = session.measure()
    assert not session.failures
    silent = []
    for cell in (c.source for c in notebook.cells if "gpu" in c.metadata.get("tags", [])):
        before = len(shown)
        exec(cell, scope)
        silent += [cell] * (len(shown) == before)
    assert bool(silent) == bool(groups), silent
    titles = [ax.get_title(loc="left") for n in plt.get_fignums() for ax in plt.figure(n).axes]
    plt.close("all")
    found = {
        "gemm": "of cuBLAS on average",
        "decode": "times as long",
        "rows": "of ours reach",
        "calls": "than their goal",
    }
    for group, words in found.items():
        assert any(words in title for title in titles) == (
            groups in ("", group) or group == "gemm" and groups in ("drawn", "gradients")
        ), titles
    assert all(isinstance(x, Markdown) for x in shown)


NCU_COLUMNS = [
    "ID",
    "Host Name",
    "Kernel Name",
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
]
NCU_LINES = [
    ["", "", "", "ns", "%", "inst", "inst"],
    ["0", "somewhere", "scores_kernel", "1,250", "12.5", "3", "1"],
    ["1", "somewhere", "values_kernel", "2000", "3.7", "n/a", "2"],
    ["2", "somewhere", "spin_kernel", "900", "0", "0", "0"],
    ["3", "somewhere", "_rms_norm_kernel", "150000", "40", "0.5", "1.5"],
]
NCU = "==PROF== Connected to process 7\n"
NCU += "\n".join(",".join(f'"{word}"' for word in line) for line in (NCU_COLUMNS, *NCU_LINES))


def test_counters_are_read_by_case_and_name_no_host():
    first, second = list(profiler.CASES)[:2]
    found = list(profiler.read(NCU))
    assert [(line["case"], line["kernel"]) for line in found] == [
        (first, "scores_kernel"),
        (first, "values_kernel"),
        (second, "_rms_norm_kernel"),
    ]
    assert found[0]["µs"] == 1.25 and found[0]["waits for"] == "barrier 75%" and found[1]["waits for"] == "wait 100%"
    assert found[2]["SM %"] == 40 and found[2]["DRAM %"] is None
    assert "somewhere" not in str(found)
    assert tables.counters([{"group": "counters"} | line for line in found])[2]["DRAM %"] == goals.UNKNOWN


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
