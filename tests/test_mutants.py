"""Mutants: what the operators make, that a sample of them is killed, and that nobody is explained away who is not."""

import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bi_kernels
from bi_kernels.audit import load
from bi_kernels.audit.checks.memory import VIEWED
from bi_kernels.audit.executor import Died
from bi_kernels.audit.index import page
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.targets.model import layout_rows
from bi_kernels.ops.gemm.kernel import INTERPRETED, launch
from bi_kernels.tokens import TokenLayout
from mutation import adapter, document, functions, models, operators, plan, questions, run, sm_90
from mutation.judge import PASSED, STUCK, Patience
from mutation.reach import ALL, LARGE, SM_90, SOME, on_hopper, ops_for, package, sources
from mutation.run import SEEDS, Copy, copies, judged

TOY = '''
BLOCK = 32


def kernel(x, y, n, stride, BLOCK):
    """Adds 1."""
    if n < 0:
        raise ValueError(f"n is {n}, expected 1")
    if stride > 8:
        allowed = n // 2
        raise ValueError(allowed)
    part_n = n // 3
    at = program * BLOCK
    total = 0.0
    for first in range(0, n, BLOCK):
        v = load(x + at * stride, mask=(at < n) & (first >= 0), other=0.0).to(float32)
        total += v
    total = total + 0.0
    if n == 1 and stride:
        total = -total
    store(y + at, total.contiguous(), mask=at < n)
    launch(num_warps=4)


class Op:
    @staticmethod
    def backward(ctx, dy):
        if dy.numel():
            return torch.zeros_like(dy)
        return dy
'''

GLUON = """
def kernel(x, bar, free, ring):
    full = allocate(int64, [2, 1], MBarrierLayout())
    S: constexpr = NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    if not equal(x, ring):
        return
    mbarrier.wait(free.index(0), x // 2 & 1, pred=x >= 3)
    mbarrier.expect(bar, x.nbytes)
    tma.async_copy_global_to_shared(x, [m, k], bar, ring)
    mbarrier.init(free.index(ME), 1)
    fence_async_shared()
    acc = warpgroup_mma(x, ring.permute((1, 0)))
    acc = warpgroup_mma_wait(1, deps=[acc])
"""

LIBRARY = """
def chosen(x, m, n):
    if failed or kind not in (66, 67):
        raise LookupError
    if m > 3:
        raise ValueError(m)
    more = {"num_warps": 4, "REGISTERS": min(240, held), "STAGES": 7}
    return descriptor(x, (m, n), (n, 1), [64, 8])
"""


def made(text: str = TOY) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for m in operators.mutants("toy.py", text):
        found.setdefault(m.operator, []).append(m.text)
    return found


def test_every_operator_makes_what_it_is_called():
    found = made()
    assert found["comparison"] == ["(at) <= (n)", "(first) > (0)", "(n) != (1)", "(at) <= (n)"]
    assert found["mask dropped"] == ["load(x + at * stride)", "store(y + at, total.contiguous())"]
    assert found["other by one"] == ["(0.0) + 1"]
    assert [t.startswith("load(") for t in found["cast dropped"]] == [True] and "bfloat16" in found["cast to bf16"][0]
    assert found["first round dropped"] == ["range((0) + (BLOCK), n, BLOCK)"]
    assert found["last round dropped"] == ["range(0, (n) - (BLOCK), BLOCK)"]
    assert found["+ 0.0 dropped"] == ["total"] and found["update dropped"] == ["pass"]
    assert found["stride by one"] == ["(at) * ((stride) + 1)"] and found["factor dropped"] == ["(program)"]
    assert sorted(found["half of a mask dropped"]) == ["(at < n)", "(first >= 0)"]
    assert found["condition dropped"] == ["(stride)", "(n == 1)"]
    assert found["branch turned"] == ["(not (n == 1 and stride))", "(not (dy.numel()))"]
    assert found["copy dropped"] == ["total"] and found["memory not cleared"] == ["torch.empty_like"]
    assert "another result for more than 64 rows" in found and "the first result of a shape again" in found


def test_a_cast_to_what_is_stored_is_left_alone_and_what_it_casts_is_not():
    text = "def k(y, at, total):\n    tl.store(y + at, (total + 0.0).to({}.dtype.element_ty))\n"
    assert {*made(text.format("y"))} == {"+ 0.0 dropped", "sign"}
    assert {*made(text.format("x"))} == {"+ 0.0 dropped", "sign", "cast dropped"}, "of another tensor"


def test_operators_break_a_pipeline_in_gluon():
    found = made(GLUON)
    assert found["wait dropped"] == ["pass", "pass"] and found["phase by one"] == ["(x // 2 & 1) ^ 1"]
    assert found["bytes of half a copy"] == ["(x.nbytes) // 2"] and found["copy one off"] == ["(m) + 1", "(k) + 1"]
    assert found["another stage"] == ["(0) ^ 1"], "of a wait, not of what begins each barrier"
    assert found["transpose dropped"] == ["ring"] and found["always equal"] == ["True"]
    assert "(x) > (3)" in found["comparison"] and "2" in found["constant by one"], "a stage, and a product, too early"
    every = operators.mutants("toy.py", GLUON)
    assert not [m for m in every if "NVMMA" in m.before], "no layout"


def test_a_wrong_algorithm_is_accepted_and_a_descriptor_has_another_box():
    found = made(LIBRARY)
    assert found["branch turned"] == ["(not (failed or kind not in (66, 67)))"]
    assert found["condition dropped"] == ["(kind not in (66, 67))", "(failed)"]
    assert found["descriptor's bounds by one"] == ["[n - 1 for n in (m, n)]"]
    assert found["half of a descriptor's box"] == ["[([64, 8])[0] // 2, *([64, 8])[1:]]"]
    assert not {"5", "241", "8"} & {*found["constant by one"]}, "neither warps, nor registers, nor stages"


def test_an_edit_moves_no_line_behind_it():
    text = "def f(x):\n    y = load(\n        x, mask=x > 0\n    )\n    total += 1\n\n\ndef g():\n    pass\n"
    lines = {m.operator: m.applied(text).splitlines() for m in operators.mutants("toy.py", text)}
    assert {"mask dropped", "partial sum in bf16"} <= {*lines}
    assert {found.index("def g():") for found in lines.values()} == {7}


def test_what_is_free_or_only_checks_is_left_alone():
    every = [m.before for m in operators.mutants("toy.py", TOY)]
    assert not [
        b for b in every if "raise" in b or "num_warps" in b or "BLOCK = 32" in b or "Adds" in b or "n < 0" in b
    ]
    assert not [b for b in every if "stride > 8" in b or "n // 2" in b or "part_n" in b]


def test_what_is_free_is_there():
    text = "\n".join(path.read_text() for path in sources())
    assert not [name for name in operators.FREE if not re.search(rf"\b(def|class) {name}\b|\b{name}\b.* = ", text)]


def test_what_an_operator_makes_of_results_stands_in_the_last_return():
    returned = [m for m in operators.mutants("toy.py", TOY) if m.operator.startswith("another result")]
    assert returned and {m.before for m in returned} == {"return dy"}


def test_an_entry_of_one_device_explains_nothing_on_another(every):
    mine = [e for e in plan.equivalents() if e.device == "cpu"]
    mutant = next(m for m in every if any(e.holds(m) for e in mine))
    assert plan.explained(mutant, mine, "cpu") and not plan.explained(mutant, mine, "cuda")


def test_a_mutant_keeps_its_name_when_lines_come_before_it():
    ids = lambda text: [m.id for m in operators.mutants("toy.py", text)]
    assert ids(TOY) == ids("import this\n" + TOY) and len(set(ids(TOY))) == len(ids(TOY))


@pytest.fixture(scope="module")
def every():
    return plan.every()


def test_the_package_has_thousands_and_hand_made_ones_stand_once(every):
    assert len(every) > 2000 and len({m.id for m in every}) == len(every)
    assert sum(m.operator.startswith(plan.HAND_MADE) for m in every) >= 18
    assert all(ops_for(m.file, m.function) for m in every)
    assert {*plan.hand_made()} <= {*every}, "each is judged by some op"


def test_each_hand_made_mutant_compiles():
    for m in plan.hand_made():
        text = (package() / m.file).read_text()
        assert m.applied(text) != text
        compile(m.applied(text), m.file, "exec")


def test_what_sm_90_alone_runs_is_planned_for_a_gpu_alone(every):
    on_a_gpu, on_a_cpu = (plan.of_device(every, device) for device in ("cuda", "cpu"))
    assert on_a_gpu == every
    left = {*every} - {*on_a_cpu}
    assert left == {m for m in every if on_hopper(m.file) or m.device == "cuda"}
    by_hand = [m.file for m in left if m.operator.startswith(plan.HAND_MADE)]
    assert {"ops/gemm/gemm.py", "ops/grouped/grouped_linear.py", "ops/attention/decode_kernels.py"} <= {*by_hand}
    assert {m.file for m in left if on_hopper(m.file)} <= {*by_hand}, "each of sm_90's files is broken by hand too"
    pipeline = {"wait dropped", "phase by one", "copy one off", "transpose dropped", "bytes of half a copy"}
    assert pipeline <= {m.operator for m in left}
    for m in (m for m in left if on_hopper(m.file)):
        assert {*ops_for(m.file, m.function)} <= {*LARGE}, "tiny sizes do not reach it"
        assert {ask[1:] for ask in run.asks_of(m)} == {("bf16", SM_90)}


@pytest.mark.parametrize(
    "pattern, name", [("ops/grouped/*", "experts"), ("mode/*", "mode"), ("integrations/transformers/*", "transformers")]
)
def test_what_no_op_reaches_is_judged_by_a_model(pattern, name, every):
    found = plan.of_files(every, pattern)
    assert found and all(ops_for(m.file, m.function)[-1] == name for m in found)
    assert plan.of_audits(found, [name]) == found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [models.Experts, models.Routed])
def test_a_model_passes_and_is_caught_where_its_layout_is_forgotten(kind, monkeypatch):
    target = kind("bf16", "cpu", 0)
    target.layouts = {name: target.layouts[name] for name in ("packed", "singles")}
    assert {row.verdict for row in target.rows()} == {"pass"}
    monkeypatch.setattr(models, "layout_of", lambda call: TokenLayout.packed([0, call.index.size]))  # one sequence
    wrong = {row.relation for row in layout_rows(target, ["singles"]) if row.verdict == "needs-fix"}
    assert wrong == {"gradient invariance"}


@pytest.mark.slow
def test_attention_is_asked_at_sizes_of_its_own_and_products_are_held_to_tritons(monkeypatch):
    """At sizes that an interpreter can compute, with what a GPU alone has in place of others."""
    small = {"heads": 2, "kv_heads": 1, "head_dim": 16}, ((40, 50), (2, 9), (1, 1)), "normal"
    monkeypatch.setattr(sm_90, "KINDS", {"long": small})
    monkeypatch.setattr(sm_90, "PAGES", (16,))
    given = {"dtype": "bf16", "device": "cpu", "shapes": "tiny"}
    (of,) = questions.load("attention", given | {"op": "attention"}).make()[:1]
    asked = lambda: [*sm_90.attention(of, "attention", ["long"])]
    assert {(r.relation, r.layout, r.verdict) for r in asked()} >= {
        ("invariance", "rollout:drawn", "pass"),
        ("invariance", "pages of 16", "pass"),
    }
    whole = bi_kernels.attention
    told = lambda q, k, v, **more: whole(q, k, v * (1 + 0.02 * (len(q) > 40)), **more)
    monkeypatch.setattr(bi_kernels, "attention", told)
    assert {r.layout for r in asked() if r.verdict != "pass"} >= {"singles", "rollout:drawn"}

    for name in ("NARROW", "WIDE", "ROUND"):
        monkeypatch.setattr(sm_90, name, (20, 33, 24))
    monkeypatch.setattr(sm_90, "TOP", (20, 30, 30))
    monkeypatch.setattr(sm_90, "LIBRARYS", 6)
    subject = questions.load("gemm", given | {"op": "linear"}).make()[0]
    right = lambda x, w, bias=None, out_dtype=None, out=None, start=None: launch(
        x, w, bias, INTERPRETED, out_dtype, start, out
    )
    by_ring = lambda x, w, bias, ring, **told: found(x, w, bias, **told)
    monkeypatch.setitem(sys.modules, "bi_kernels.ops.gemm.hopper", SimpleNamespace(launch=by_ring))
    monkeypatch.setattr(sm_90, "launch_library", lambda *of, **told: found(*of, **told))
    for found, verdict in ((right, "pass"), (lambda x, w, bias, **told: right(x, w, None, **told), "needs-fix")):
        for rows in (sm_90.by_ring(subject), sm_90.by_library(subject)):
            assert verdict in {r.verdict for r in rows} <= {"pass", verdict}

    monkeypatch.setattr(sm_90, "library_expected", lambda device: True)
    for found, unserved in ((right, []), (lambda *of, **told: None, ["cuBLASLt serves no product"])):
        assert [r.detail for r in sm_90.by_library(subject) if r.verdict == "needs-fix"] == unserved


@pytest.mark.slow
def test_functions_of_the_mode_and_classes_of_the_adapter_pass_and_are_caught(monkeypatch):
    monkeypatch.setattr(models.Routed, "rows", lambda self: iter(()))
    wrong = lambda rows: {r.tensor for r in rows if r.verdict != "pass"}
    experts = models.Experts("fp32", "cpu", 0)
    assert not wrong(models.mode("fp32", "cpu", 0)) and not wrong(adapter._classified(experts))
    by_rows, none = {"by rows": lambda x, w: (x @ w) * (1 + (len(x) > 1))}, {}
    for name, asked in {"FUNCTIONS": by_rows, "COMPUTED": none, "UNTRAINED": set(), "SAME": none}.items():
        monkeypatch.setattr(functions, name, asked)
    monkeypatch.setattr(functions, "AUTOCAST", ("by rows",))
    monkeypatch.setattr(functions, "REFUSED", {"nothing": lambda x, w: x @ w})
    assert {"nothing", "by rows"} <= wrong(models.mode("fp32", "cpu", 0))
    classify = importlib.import_module("bi_kernels.integrations.transformers.classify")
    monkeypatch.setattr(classify, "classify", lambda module: (None, ""))
    assert len(wrong(adapter._classified(experts))) > 20


def test_files_that_match_nothing_are_refused(every):
    with pytest.raises(ValueError, match="matches no file"):
        plan.of_files(every, "ops/gemm/*,ops/none.py")


def test_a_sample_spans_every_file_and_a_larger_one_holds_it(every):
    small, large = plan.sampled(every, 160, 0), plan.sampled(every, 800, 0)
    assert large[:160] == small and {m.file for m in large} == {m.file for m in every}


def test_every_entry_of_the_file_of_equivalents_has_a_mutant_and_a_reason(every):
    entries = plan.equivalents()
    assert not plan.stale(every, entries)
    assert all(len(e.reason) > 20 for e in entries)


def test_the_file_of_equivalents_is_short_and_what_a_pattern_explains_is_alike(every):
    entries = plan.equivalents()
    assert len(entries) <= 150
    patterns = [e for e in entries if ("*" in e.file or e.taken) and not e.line]
    assert patterns
    for e in patterns:  # a cast of offsets that a kernel computes, not of what it loads, whose dtype is a caller's
        held = [m for m in every if e.holds(m)]
        assert (e.operator, e.device) == ("cast dropped", "cpu") and len(held) > 20
        assert all(m.taken == f"{m.text}.to({m.taken[-9:]}" and m.taken.endswith("l.int64)") for m in held)
        assert not [m for m in held if "load(" in m.taken]
        both = [torch.arange(2**31 - 9, 2**31 - 1, dtype=dtype) for dtype in (torch.int32, torch.int64)]
        assert both[0].tolist() == both[1].tolist() and int(both[0][-1:] + 2) < 0, "the same below 2^31"
    for e in entries:  # of several places by name, each of which the next test asks
        assert not e.line or e.operator and 1 < len([m for m in every if e.holds(m)]) <= MOST, e


PARTS, MOST = 8, 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_what_an_entry_explains_survives_what_kills_most(part, every):
    """Each entry's first mutant that an interpreter can judge, or all of an entry of several places, by the values and
    layouts of the first op."""
    here = plan.of_device(every, "cpu")
    asked = lambda e: [m for m in here if e.device != "cuda" and e.holds(m)][: MOST if e.line else 1]
    found = {}
    with copies(1, "cpu") as call:
        for m in itertools.chain.from_iterable(map(asked, plan.equivalents()[part::PARTS])):
            asks = [ask for ask in run.asks_of(m) if ask[0] in OPS][:1]
            found[m.id] = call(Copy.judge, m, asks, (600, 600), [0], math.inf, ["values", "layouts"])
    assert len(found) > 5 and not {id: f for id, f in found.items() if f["verdict"] != "survived"}


COMMITTED = sorted((Path(bi_kernels.__file__).parents[1] / "audits").glob("*/mutants"))


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.parent.name)
def test_no_entry_of_the_file_of_equivalents_is_killed_in_a_committed_report(folder, every):
    of = {m.id: m for m in every}
    found = [f for f in json.loads((folder / "mutants.json").read_text()) if f["id"] in of]
    device = "cpu" if folder.parent.name.startswith("interpreter") else "cuda"
    assert not [
        line for line in document.check_equivalents(found, plan.equivalents(), of, device) if document.BUT in line
    ]


def verdict(m: operators.Mutant, verdict: str, **more) -> dict:
    return run.said(m) | {"id": m.id, "verdict": verdict, "relation": "parity", "layout": "packed"} | more


def test_what_the_file_of_equivalents_explains_follows_it(every):
    one, two, three, four = every[:4]
    of = {m.id: m for m in (one, two, three, four)}
    entry = lambda m: plan.Equivalent("planted", m.file, m.function, m.before, m.text, m.operator, m.number)
    found = [
        verdict(one, "survived"),
        verdict(two, "survived"),
        verdict(three, "killed", op="silu"),
        verdict(four, "survived", detail="killed with seed 0, but by nothing with seed 1"),
    ]
    wrong = document.check_equivalents(found, [entry(m) for m in (one, three, four)], of, "cpu")
    assert [(f["verdict"], f.get("reason", "")) for f in found] == [
        ("explained", "planted"),
        ("survived", ""),
        ("killed", ""),
        ("survived", ""),
    ]
    assert ["survived" if line.endswith("survived") else line.partition(document.BUT)[2] for line in wrong] == [
        "survived",
        " killed by parity packed of silu",
        " killed with seed 0, but by nothing with seed 1",
    ]


def test_the_report_is_written_from_what_the_run_left_alone(every, tmp_path, monkeypatch):
    some = [m for m in plan.of_audits(every, ["rms_norm"]) if not on_hopper(m.file)][:2]
    found = [verdict(some[0], "killed", op="rms_norm", seconds=1), verdict(some[1], "survived", seconds=1)]
    made = {"device": "interpreter", "commit": "0123456789ab"}
    document.record(tmp_path / "gpu" / "mutants", found, {m.id: m for m in some}, made, document.population(some, []))
    evidence = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    monkeypatch.setattr(plan, "every", lambda: pytest.fail("the kernels here may be others"))
    page.write_anew(tmp_path)
    text = (tmp_path / "gpu" / "mutants" / "README.md").read_text()
    sentence = document.of_kind(found, "hand-made", document.population(some, []))
    assert sentence in (tmp_path / "README.md").read_text(), "the index quotes it"
    assert "```diff\n---" in text and f"line {some[1].line}" in text and len(evidence) == 3
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == evidence


@pytest.mark.slow
def test_a_models_sizes_are_asked_in_layouts_splits_and_views(monkeypatch):
    monkeypatch.setitem(questions.LARGE, "rms_norm", ({"sizes": {"hidden": 48}}, True))  # sizes that an interpreter can
    given = {"dtype": "bf16", "device": "cpu", "op": "rms_norm", "shapes": "tiny", "seed": 0}
    subjects = questions.load("rms_norm", given).make()
    rows = list(questions._large(subjects, "rms_norm"))
    assert {"accuracy", "invariance", "gradient invariance", "determinism"} <= {r.relation for r in rows}
    assert {*questions.QUICK, *VIEWED, "micro_batches:each"} <= {r.layout for r in rows}
    assert not [r for r in rows if r.verdict != "pass"]
    other = lambda x, weight, eps: bi_kernels.rms_norm(x, weight, eps) * (1.015625 if len(x) > 64 else 1)
    found = questions._large([replace(subjects[0], function=other)], "rms_norm")
    assert "needs-fix" in {r.verdict for r in found}


def test_every_op_but_variants_of_attention_is_asked_beyond_32_bits_on_a_gpu(monkeypatch):
    for stage in ("_values", "_quick", "_drawn", "_large", "_rest"):
        monkeypatch.setattr(questions, stage, lambda *_: iter(()))
    monkeypatch.setattr(questions.single_call, "by_use", lambda s, only=(): iter(()))
    monkeypatch.setattr(questions.sm_90, "attention", lambda s, op, kinds: ["sizes"])
    monkeypatch.setattr(questions, "MORE", {})
    monkeypatch.setattr(questions, "IN_16_BITS", {op: lambda _: ["in 16 bits"] for op in questions.IN_16_BITS})
    monkeypatch.setattr(
        questions, "load", lambda audit, given: load(audit, given | {"device": "cpu", "shapes": "tiny"})
    )
    monkeypatch.setattr(questions.attention_edges, "apart", lambda s: ["heads apart"])
    monkeypatch.setattr(questions.limits, "judge", lambda s, backward: [s.problem.op.name])
    monkeypatch.setattr(questions.long_sequences, "judge", lambda s: ["a long sequence"])
    on = lambda device, op: [
        row
        for dtype in run.DTYPE_ORDER
        for row in questions.asked(op, dtype, device, ALL if dtype == run.DTYPE_ORDER[0] or op == "attention" else SOME)
    ]
    for op in OPS:
        long = {"sizes"} if OPS[op].cache else {op, "a long sequence"}
        more = {"in 16 bits"} if op in questions.IN_16_BITS else set()
        more |= {op, "heads apart"} if op == "attention" else set()
        assert {*on("cuda", op)} == long | more
        assert not on("cpu", op)


def test_a_window_is_asked_what_is_asked_of_attention_but_for_other_widths(monkeypatch):
    given = {"dtype": "fp32", "device": "cpu", "op": "attention_window", "shapes": "tiny", "seed": 0}
    session, run_one, names = questions.load("attention", given), questions.attention._run, []

    def some(session, item):
        names.append(questions.attention.EXPERIMENTS[item[0]].name)
        return [] if names[-1] in ("generation", "edges") else run_one(session, item)  # those take long

    monkeypatch.setattr(questions.attention, "_run", some)
    monkeypatch.setattr(questions.gradient, "by_split", lambda s: iter(s.problem.dims and ()))
    rows = list(questions._experiments(session))
    assert {*names} == {"generation", "starts", "edges"}
    assert {r.verdict for r in rows} == {"pass"}


def test_what_judges_mutants_has_each_gpu_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    made = []
    monkeypatch.setattr(run, "Copy", lambda device, environment, server: made.append(environment))
    with copies(3, "cuda"):
        pass
    assert [env["CUDA_VISIBLE_DEVICES"] for env in made] == ["2", "5", "2"]
    assert made[0]["TMPDIR"] == made[2]["TMPDIR"] != made[1]["TMPDIR"], "where those of a GPU wait for its memory"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(run.torch.cuda, "device_count", lambda: 4)
    assert run.visible() == ["0", "1", "2", "3"]


def mutate(tmp_path: Path, known: str) -> subprocess.CompletedProcess:
    """Judges one mutant of rms_norm's; known: the file of equivalents."""
    (tmp_path / "equivalents.toml").write_text(known)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bi_kernels.audit.cli", "mutate", "rms_norm", "--device", "cpu", "--sample", "1"]
    command += ["--out", str(tmp_path / "out"), "--equivalents", str(tmp_path / "equivalents.toml")]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("lucky, verdict", [((0,), "survived"), ((0, 1), "survived"), ((0, 1, 2), "killed")])
def test_a_mutant_counts_as_killed_where_every_seed_kills_it(lucky, verdict, monkeypatch):
    asked = []

    def stages(op, dtype, device, depth, seed, first):
        asked.append((op, dtype, seed, first))
        bad = op == "silu" and dtype == "bf16" and seed in lucky
        said = {"relation": "invariance", "layout": "rows", "detail": ""}
        yield "layouts", [SimpleNamespace(verdict="needs-fix" if bad else "pass", **said)]
        asked.append((op, "more"))
        yield "more", []

    monkeypatch.setattr(questions, "stages", stages)
    asks = [(op, dtype, ALL if dtype == "fp32" else SOME) for dtype in ("fp32", "bf16") for op in ("gelu", "silu")]
    found = questions.killer(asks, SEEDS, "cpu", NO_END)
    assert found["verdict"] == verdict
    every = [("gelu", "fp32", 0), ("silu", "fp32", 0), ("gelu", "bf16", 0), ("silu", "bf16", 0)]
    assert asked[:4] == [(*of, "") for of in every]
    assert asked[4] == ("silu", "bf16", 1, "layouts"), "what killed comes first"
    if verdict == "survived":
        assert found["detail"] == (
            f"killed by invariance rows of silu, bf16, with seed 0, but by nothing with seed {len(lucky)}"
        )
    assert (("gelu", "more") in asked) == (verdict == "survived"), "every op's first stage comes before a second"
    alone = {
        seed: questions.killer(asks, [seed], "cpu", NO_END)["verdict"] for seed in SEEDS
    }  # as the package itself is
    assert alone == {seed: "killed" if seed in lucky else "survived" for seed in SEEDS}


def test_what_a_mutant_has_passed_is_told_and_not_asked_again(monkeypatch, capsys):
    row = SimpleNamespace(verdict="pass")
    monkeypatch.setattr(questions, "stages", lambda *_: iter([("values", [row]), ("rest", [row, row])]))
    told = lambda: [json.loads(line.removeprefix(PASSED)) for line in capsys.readouterr().out.splitlines()]
    stage = lambda name, checks: {"op": "silu", "dtype": "fp32", "stage": name, "checks": checks, "seconds": 0.0}
    values, rest = stage("values", 1), stage("rest", 2)
    for known, printed in (((), [values, rest]), ([values], [rest]), ([values, rest], [])):
        found = questions.killer([SILU], [0], "cpu", NO_END, (), known)
        assert (found["checks"], len(found["took"]), told()) == (3, 2, printed)


def test_what_killed_a_mutant_before_is_asked_first(monkeypatch):
    asked = []
    monkeypatch.setattr(questions, "stages", lambda *of: asked.append((of[0], of[-1])) or iter(()))
    likely = {"op": "gelu", "dtype": "fp32", "stage": "rest"}
    questions.killer([SILU, ("gelu", "fp32", ALL)], [0], "cpu", NO_END, likely=likely)
    assert asked == [("gelu", "rest"), ("silu", "")]


NOTEBOOKS = "IPython", "papermill", "nbformat", "nbclient", "nbconvert", "ipykernel", "junitparser", "elftools"


@pytest.mark.slow
def test_mutants_are_judged_without_what_notebooks_need():
    """A machine with a GPU may have torch and Triton alone, beside what draws and prints."""
    code = f"""
import sys
sys.modules |= dict.fromkeys({NOTEBOOKS!r})
from bi_kernels.audit.parameters import choose, find_helpers
choose("cpu"); find_helpers()
import bi_kernels.audit.cli, bi_kernels.audit.commands, mutation.command
from mutation.questions import asked
print({{row.verdict for row in asked("silu", "fp32", "cpu", "some")}})
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout == "{'pass'}\n", ended.stderr


def waits_for(done, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.1)
    return bool(done())


@pytest.mark.parametrize("killed, judged, low, high", [(0, 1, 0, 0.7935), (1, 1, 0.2065, 1), (81, 263, 0.2553, 0.3662)])
def test_the_interval_is_wilsons(killed, judged, low, high):
    """The last as in R. G. Newcombe, Statistics in Medicine 17 (1998), 857-872, table I."""
    assert [round(end, 4) for end in document.interval(killed, judged)] == [low, high]


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "State:\tZ"


def planted(m: operators.Mutant) -> str:
    said = {"file": m.file, "function": m.function, "before": m.before, "text": m.text, "reason": "planted by a test"}
    return "[[equivalent]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in said.items())


@pytest.mark.slow
def test_a_mutant_is_killed_and_a_planted_entry_that_is_killed_fails(every, tmp_path):
    few = plan.sampled(plan.of_audits([m for m in every if not on_hopper(m.file)], ["rms_norm"]), 1, 0)
    ended = mutate(tmp_path, planted(few[0]))
    assert ended.returncode == 1 and "in the file of equivalents, but killed by" in ended.stdout, ended
    found = json.loads((tmp_path / "out" / "mutants.json").read_text())
    assert [f["verdict"] for f in found] == ["killed"] and document.rate(found) == 1
    assert "1 killed" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_an_entry_that_no_mutant_answers_to_is_one_line(tmp_path):
    entry = operators.Mutant("ops/norm.py", "_launch", "x", 1, 0, 0, "", before="nothing")
    ended = mutate(tmp_path, planted(entry))
    assert ended.returncode == 2 and "no mutant of ops/norm.py" in ended.stderr and "Traceback" not in ended.stderr


def test_what_was_judged_of_these_sources_is_not_judged_again(every, tmp_path, monkeypatch):
    def judge(self, mutant, asks, limits, seeds=SEEDS, until=math.inf, only=(), passed=(), likely=None):
        if until < 0:
            return {"verdict": "open", "passed": [*passed, values]}
        resumed.append((passed, likely))
        asked.append((mutant.id if mutant else "", tuple(asks), tuple(seeds), tuple(only)))
        by = {str(seed): [*asks[0], "layouts"] for seed in seeds}
        return {"verdict": "killed" if mutant else "survived", "checks": 1, "seconds": 0.1, "by": by} | told

    resumed: list = []
    told = {"op": "silu", "dtype": "fp32", "stage": "layouts"}
    values = {"op": "silu", "dtype": "fp32", "stage": "values", "checks": 2, "seconds": 1.0}
    monkeypatch.setattr(Copy, "__init__", lambda self, *of: None)
    monkeypatch.setattr(Copy, "judge", judge)
    one, two = [m for m in every if ops_for(m.file, m.function) == ["silu"]][:2]
    # the unbroken package in two dtypes, and later in what killed; two mutants
    for asked, expected in (([], 2 + 2 + len(SEEDS[1:])), ([], 0)):
        found, missing = judged([one, two], "cpu", 2, tmp_path / "kept", lambda found, left: None)
        assert (
            not missing
            and [f["verdict"] for f in found] == ["killed"] * 2
            and len(set(asked)) == len(asked) == expected
        )
        assert {(seeds, only) for m, _, seeds, only in asked[-2:] if not m} <= {((s,), ("layouts",)) for s in SEEDS[1:]}
    with (tmp_path / "kept").open() as file:
        lines = file.readlines()
    (tmp_path / "kept").write_text("".join(line for line in lines if json.loads(line).get("id") != two.id))
    asked = []
    ended, missing = judged([one, two], "cpu", 2, tmp_path / "kept", lambda found, left: None, until=-1)
    assert [f["id"] for f in ended] == [one.id] and missing == 1 and not asked, "what has no time is left out"
    resumed.clear()
    judged([one, two], "cpu", 2, tmp_path / "kept", lambda found, left: None)
    assert [a[0] for a in asked] == [two.id] and resumed == [([values], None)], "and goes on where it was"
    resumed.clear()
    judged([one], "cpu", 2, tmp_path / "kept", lambda found, left: None, seeds=SEEDS[:1])  # all are judged anew
    assert ((), told) in resumed, "by what killed it first"


SILU = "silu", "fp32", ALL
NO_END = Patience(0, False)


def body(text: str) -> operators.Mutant:
    return operators.Mutant("ops/activations.py", "silu", "x", 1, 0, 0, "", "", more=text)


def test_what_judges_a_mutant_ends_with_its_server(tmp_path):
    said = f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    hangs = body(f"import os, pathlib\n{said}\nwhile True:\n    pass\n")
    with ThreadPoolExecutor(1) as pool:
        with copies(1, "cpu") as call:
            pending = pool.submit(call, Copy.judge, hangs, [SILU], (600, 600))
            assert waits_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 120)
            pid = int((tmp_path / "pid").read_text())
        assert isinstance(pending.exception(60), Died), "and it is no verdict"
    assert waits_for(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in status(pid), 30)


@pytest.mark.slow
def test_a_mutant_that_hangs_or_ends_its_process_is_killed():
    later = "\n\n_silu, _calls = silu, []\n\n\ndef silu(x):\n    _calls.append(1)\n"
    later += "    while len(_calls) > 40:\n        pass\n    return _silu(x)\n"
    hanging = "\n\ndef silu(x):\n    while True:\n        pass\n"
    with copies(1, "cpu") as call:
        judge = lambda *of: call(Copy.judge, *of)
        hangs = judge(body("\nwhile True:\n    pass\n"), [SILU], (20, 20))
        silent = judge(body(hanging), [SILU], (120, 5))
        cut = judge(body(later), [SILU], (600, 600), [0], time.monotonic() + 45)
        ends = judge(body("\nimport os\nos.abort()\n"), [SILU], (60, 60))
        fine = judge(None, [("add", "fp32", ALL)], (600, 100), [0])
    assert (hangs["relation"], ends["relation"], fine["verdict"]) == ("time", "crashed", "survived")
    assert cut["verdict"] == "open" and (cut["passed"][0]["stage"], cut["passed"][0]["checks"]) == ("values", 2)
    assert (silent["relation"], silent["detail"]) == ("time", "an answer took more than 5 s")
    assert 0 < fine["longest"] <= fine["seconds"]


@pytest.mark.parametrize("stuck", [False, True])
def test_who_still_gets_answers_from_a_shared_gpu_is_not_ended(stuck):
    waits = "mutex = ctypes.create_string_buffer(64)\nlock = ctypes.CDLL(None).pthread_mutex_lock\n"
    waits += "lock(mutex)\nlock(mutex)" if stuck else "time.sleep(4)"  # of the two only a sleep lets a handler run
    begun = "from mutation import judge\njudge.GRACE = 1\npatience = judge.Patience(1, True)\npatience.begin()\n"
    script = f"import ctypes, time\n{begun}{waits}\npatience.end()\nprint('answered')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == ((-STUCK, "") if stuck else (0, "answered\n")), done.stderr


def test_a_verdict_on_an_op_outlives_a_change_of_what_judges_models_alone(monkeypatch):
    digests = lambda: (run.made_of.cache_clear(), [run.made_of(by_model) for by_model in (False, True)])[1]
    before, read = digests(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "functions.py"))
    ops, models = digests()
    monkeypatch.undo()
    assert ops == before[0] and models != before[1] and digests() == before
