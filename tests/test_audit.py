"""The auditor flags what is broken, passes what is not, and calls nothing a pass that it did not run."""

import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_bits, slow_but
from conftest import op_under_test as subject

import bi_kernels
from bi_kernels.audit import load, parallel
from bi_kernels.audit.checks import forward as judge
from bi_kernels.audit.checks.memory import APART
from bi_kernels.audit.controls import run as broken
from bi_kernels.audit.controls.forward import CONTROLS, bf16_accumulation, half_of_k_in_bf16, tf32_inputs
from bi_kernels.audit.digests import golden
from bi_kernels.audit.findings import NEEDS_FIX, PASS
from bi_kernels.audit.inputs import KINDS
from bi_kernels.audit.layouts import VIEWS, layouts
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.reproduce import script
from bi_kernels.audit.reproduce.operator import scripts
from bi_kernels.audit.reproduce.script import verify_scripts
from bi_kernels.audit.session import start
from bi_kernels.audit.targets.candidates import resolve
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.audit.timing import GpuLock
from bi_kernels.contract import DTYPES, SHAPES, rows

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch):
    monkeypatch.delenv("BI_AUDIT_OUT", raising=False)


def unbroken(op: str):
    return getattr(bi_kernels, OPS[op].function or op)


def report(found: list[judge.Row]) -> str:
    return "\n".join(
        f"{r.op} {r.dtype} {r.relation} {r.layout} {r.inputs} M={r.rows}: {r.mismatches} of {r.elements} at "
        f"{r.first_index}; {r.detail}"
        for r in found
    )


def test_a_candidate_that_sees_how_its_tensors_lie_is_found():
    def verdicts(op, function, **more):
        return [r.verdict for r in judge.by_view(subject(op, function, **more)) if r.layout != APART]

    assert [name.split()[0] for name in VIEWS] == ["unaligned", "strided", "slice", "every", "transposed"]
    uneven = lambda x: bi_kernels.silu(x) * (1 + (not x.is_contiguous()))
    assert verdicts("silu", uneven) == [PASS, *[NEEDS_FIX] * 4, PASS]
    weight_first = lambda x, weight: bi_kernels.linear(x, weight) * (1 + (weight.stride(0) == 1))
    assert verdicts("linear", weight_first, case="o") == [PASS, PASS, PASS, PASS, NEEDS_FIX, PASS]
    bias_last = lambda x, bias: bi_kernels.bias_add(x, bias) * (1 + (bias.stride(0) != 1))
    assert verdicts("bias_add", bias_last) == [PASS, NEEDS_FIX, PASS, NEEDS_FIX, NEEDS_FIX, PASS]
    reads_what_lies_before = lambda x: bi_kernels.silu(x) + 0 * x.as_strided((1,), (1,), 0)
    assert verdicts("silu", reads_what_lies_before) == [PASS, PASS, NEEDS_FIX, PASS, PASS, PASS]
    by_address = lambda x: bi_kernels.silu(x) * (1 + (x.data_ptr() % 16 == 8))
    assert verdicts("silu", by_address) == [*[PASS] * 5, NEEDS_FIX]
    of_weight = lambda x, weight: (
        bi_kernels.linear(x, weight) * (1 + (x.data_ptr() % 16 == 8 and not weight.data_ptr() % 16))
    )
    assert verdicts("linear", of_weight, case="o") == [*[PASS] * 5, NEEDS_FIX]


# Controls


@pytest.mark.slow
def test_every_control_is_caught():
    session = start("elementwise", {})
    found = session.controls()
    assert len(found) == len([c for c in broken.EVERY if c.audit == "elementwise" and not c.gpu]) > 0
    assert not [r.candidate for r in found if not r.caught] and all(r.control for r in found)
    assert not session.failures and not session.passed, "controls alone are no verdict"
    session.add([replace(found[0], control=False, verdict=PASS)])
    assert session.passed
    session.add([replace(found[0], control=False, verdict=NEEDS_FIX)])
    assert session.failures == session.rows[-1:] and not session.passed
    session.rows = [replace(found[0], control=False, verdict=PASS)]
    assert not session.failures and not session.passed, "nor are checks without a control"


def test_the_same_experiments_pass_the_unbroken_op(monkeypatch):
    monkeypatch.setattr(broken, "EVERY", [replace(c, function=unbroken(c.op)) for c in CONTROLS if not c.gpu])
    session = start("elementwise", {})
    found = session.controls()
    assert found and not [r for r in found if r.caught], report([r for r in found if r.caught])
    session.add([replace(found[0], control=False, verdict=PASS)])
    assert session.failures == found and not session.passed, "a control that nobody caught fails the audit"


def test_a_control_that_raises_is_not_caught(monkeypatch):
    def raises(*tensors, **more):
        raise RuntimeError("boom")

    monkeypatch.setattr(broken, "EVERY", [replace(c, function=raises) for c in CONTROLS if c.audit == "elementwise"])
    assert not [r for r in start("elementwise", {}).controls() if r.caught]


def test_every_invariance_control_is_wrong_in_nothing_but_the_bits():
    """The defects that only invariance can see: their accuracy is within the bound, so no tolerance would show them."""
    for name in ("split-K chosen by M", "K order reversed for M ≤ 16", "one element off by one ULP at M = 17"):
        control = next(c for c in CONTROLS if c.name == name)
        found = judge.accuracy(subject(control.op, control.function, control.dtype, control.case))
        assert found.verdict == PASS, report([found])


# Judging one op


@pytest.fixture(scope="module")
def add_rows():
    return judge.judge(subject("add"), examples=3)


def test_an_op_of_this_package_passes_every_relation(add_rows):
    for found in (add_rows, judge.judge(subject("swiglu", dtype="fp16"), examples=1)):
        assert not (bad := [r for r in found if r.verdict != PASS]), report(bad)
        assert {r.relation for r in found} == {"invariance", "determinism", "accuracy", "parity"}
        assert all(r.elements for r in found)


@pytest.mark.parametrize(
    "function, dtype",
    [(half_of_k_in_bf16, "bf16"), (half_of_k_in_bf16, "fp16"), (bf16_accumulation, "bf16"), (tf32_inputs, "fp32")],
)
def test_whoever_rounds_on_the_way_is_far_beyond_the_bound_of_integers(function, dtype):
    """And a GEMM that does not is exact."""
    ours, wrong = (judge.accuracy(subject("linear", fn, dtype, "o"), "integers") for fn in (None, function))
    assert (ours.verdict, ours.mismatches, ours.threshold_share) == (PASS, 0, 0.0), report([ours])
    assert wrong.verdict == NEEDS_FIX and float(wrong.threshold_share) >= 4, report([wrong])


def test_what_the_contract_requires_is_run(add_rows):
    found = {(r.relation, r.layout) for r in add_rows}
    rows = [r for r in add_rows if (r.relation, r.layout) == ("invariance", "rows")]
    assert found >= {("invariance", layout) for layout in (*layouts(SHAPES["tiny"]["lengths"]), "random")}
    assert found >= {("determinism", "packed"), ("parity", "decode=chunked:16")}
    assert {r.rows for r in rows} >= {1, 17, 300} and {r.inputs for r in rows} == {*KINDS}
    assert {r.inputs for r in add_rows if r.relation == "accuracy"} == {*KINDS}


@pytest.mark.parametrize("layout", ["decode", "left_padded", "chunked:7"])
def test_an_error_in_one_layout_is_reported_there(layout):
    every = layouts(SHAPES["tiny"]["lengths"])
    shapes = {call.index.shape for call in every[layout]} - {call.index.shape for call in every["singles"]}

    def fails(x, residual):
        if tuple(x.shape[:-1]) in shapes:
            raise RuntimeError("boom\nand more")
        return bi_kernels.add(x, residual)

    found = {r.layout: r for r in judge.by_layout(subject("add", fails))}
    assert found[layout].verdict == NEEDS_FIX and "RuntimeError: boom" in found[layout].detail
    assert found["packed"].verdict == PASS, report([found["packed"]])
    assert "and more" not in found[layout].detail


@pytest.mark.parametrize(
    "broken, flags",
    {
        "nothing": (lambda y: None, ("NoneType",)),
        "a list": (lambda y: y.tolist(), ("list",)),
        "a row less": (lambda y: y[:-1], ("returned (", "expected")),
        "flat": (lambda y: y.flatten(), ("returned (", "expected")),
        "a column less": (lambda y: y[..., :-1], ("torch.bfloat16", "expected")),
        "fp32": (lambda y: y.float(), ("torch.float32", "expected torch.bfloat16")),
        "fp64": (lambda y: y.double(), ("torch.float64", "expected torch.bfloat16")),
    }.values(),
)
def test_a_result_of_the_wrong_kind_needs_a_fix(broken, flags):
    function = lambda x: broken(bi_kernels.silu(x))
    bad = [r for r in judge.judge(subject("silu", function), examples=1) if r.verdict == NEEDS_FIX]
    assert bad and all(word in report(bad) for word in flags), report(bad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 100.0])
def test_one_wrong_number_exceeds_the_bound(value):
    def spoiled(x):
        y = bi_kernels.silu(x)
        y[3, 5] = value
        return y

    found = judge.accuracy(subject("silu", spoiled))
    assert (found.verdict, found.mismatches, found.first_index) == (NEEDS_FIX, 1, [3, 5]), report([found])


@pytest.mark.parametrize(
    "dtype, error, verdict",
    [
        ("fp16", TypeError("x has dtype fp16; supported are bf16, fp32"), "unsupported"),
        ("fp32", NotImplementedError("no float32 path"), "unsupported"),
        ("fp16", RuntimeError("CUDA error: an illegal memory access"), "needs-fix"),
        ("fp16", TypeError("unsupported operand"), "needs-fix"),
        ("bf16", TypeError("x has dtype bf16; supported are fp16, fp32"), "needs-fix"),
        ("bf16", NotImplementedError("no bfloat16 path"), "needs-fix"),
    ],
)
def test_unsupported_is_a_clear_refusal_of_an_optional_dtype(dtype, error, verdict):
    def refuses(x):
        raise error

    s = subject("silu", refuses, dtype)
    found = judge.judge(s)
    assert [r.verdict for r in found] == [verdict] and str(error) in found[0].detail, report(found)


def test_a_candidate_that_is_not_deterministic_is_caught():
    calls = iter(range(10**6))
    found = judge.determinism(subject("add", lambda x, residual: bi_kernels.add(x, residual) + (next(calls) == 7)))
    assert found.verdict == NEEDS_FIX and found.mismatches


# Reproducers

FLIPPED = """
import bi_kernels


def linear(x, weight, bias=None):
    flip = x.shape[:-1].numel() {threshold}
    turned = lambda t: t.float().flip(-1) if flip else t.float()
    return bi_kernels.linear(turned(x), turned(weight))
"""


@pytest.mark.slow
def test_a_drift_leaves_a_script_that_shows_it(tmp_path):
    file = tmp_path / "candidate.py"
    file.write_text(FLIPPED.format(threshold="<= 16"))
    candidate = resolve(f"{file}:linear", "gemm")
    s = subject("linear", candidate.functions["linear"], "fp32", case="o")
    found = list(judge.by_row_count(s))
    drifts = [r for r in found if r.mismatches]
    assert {r.rows for r in drifts} == {m for m in rows(300) if m <= 16}, report(drifts)
    path, *more = verify_scripts(scripts(s, candidate, found, tmp_path / "repro"))
    assert len(more) == script.MOST - 1 and {r.repro for r in drifts} >= {f"python {p}" for p in (path, *more)}
    assert f"from {file.stem} import linear" in path.read_text()

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    by_itself = lambda: subprocess.run(
        [sys.executable, path], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    shown = by_itself()
    assert shown.returncode == 1 and "elements differ" in shown.stdout and not shown.stdout.startswith("0 "), shown
    file.write_text(FLIPPED.format(threshold="< 0"))
    gone = by_itself()
    assert gone.returncode == 0 and gone.stdout.startswith("0 of "), gone


TWICE_FOR_SMALL_M = """
import bi_kernels


def twice(*tensors, **named):
    y = bi_kernels.{name}(*tensors, **named)
    if len(tensors[0]) > {rows}:
        return y
    return y + y if not isinstance(y, tuple) else tuple(part + part for part in y)
"""


@pytest.mark.parametrize("op", slow_but(OPS, "linear", "rms_norm", "log_softmax", "silu", "embedding", "rope"))
def test_every_op_has_a_reproducer(op, tmp_path):
    """It gives in this process what the rows say; that a script does in one of its own is tested of one op."""
    file = tmp_path / "candidate.py"
    file.write_text(TWICE_FOR_SMALL_M.format(name=OPS[op].function or op, rows=16))
    candidate = resolve(f"{file}:twice", OPS[op].audit, op)
    s = subject(op, candidate.functions[op])
    rows = [*judge.by_row_count(s), *judge.by_layout(s, only=("decode",))]
    made = scripts(s, candidate, rows, tmp_path)
    assert {s.row.layout for s in made} == {"rows", "decode"}
    for one in (made[0], made[-1]):
        assert any(shows(text, one) for text in one.texts), one.texts[0]


def shows(text: str, one: script.Script) -> bool:
    """Whether a script in this text, run in this process, prints its row's numbers."""
    names = {"__file__": str(one.path), "__name__": "__main__"}
    with redirect_stdout(io.StringIO()) as printed, torch.set_grad_enabled(True), suppress(SystemExit, AttributeError):
        exec(compile(text, "", "exec"), names)
    found = script.SHOWN.search(printed.getvalue())
    return bool(found) and script.agrees(one.row, *found.groups())


# Golden digests


def test_the_interpreter_gives_the_digests_of_an_h200():
    found = golden.check("cpu")
    assert not [case for case, same in found.items() if not same] and set(found) == set(golden.recorded()["digests"])
    products = [c for c in golden.cases() if c.op in ("linear", "matmul") and c.dtype in ("bf16", "fp16")]
    assert len(products) >= 20 and len({c.k for c in products}) >= 4 and "H200" in golden.recorded()["device"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_another_order_of_the_sum_changes_the_digest(dtype, monkeypatch):
    linear = bi_kernels.linear
    monkeypatch.setattr(bi_kernels, "linear", lambda x, w, b=None: linear(x.flip(-1), w.flip(-1), b))
    sums = [c for c in golden.cases() if c.op == "linear" and c.dtype == dtype and c.inputs != "special"]
    assert sum(golden.digest(c, "cpu") != golden.recorded()["digests"][str(c)] for c in sums) >= 3


# Parameters


@pytest.mark.parametrize(
    "audit, given, words",
    [
        ("gemm", {"dtype": "bf61"}, ["dtype is 'bf61'", "all, bf16, fp16, fp32"]),
        ("gemm", {"dtype": 16}, ["dtype is 16", "bf16"]),
        ("gemm", {"checks": "some"}, ["checks is 'some'", "quick"]),
        ("gemm", {"dtpye": "bf16"}, ["unknown parameter 'dtpye'", "dtype"]),
        ("gemm", {"seed": "x"}, ["seed is 'x'", "integer"]),
        ("gemm", {"seed": -1}, ["seed is -1", "from 0 to"]),
        ("gemm", {"seed": 1.5}, ["seed is 1.5", "integer"]),
        ("gemm", {"shapes": "huge"}, ["shapes is 'huge'", "tiny", "qwen3-8b", "llama3-8b"]),
        ("gemm", {"shapes": "qwen3-8b"}, ["shapes is 'qwen3-8b'", "needs a CUDA device", "tiny"]),
        ("gemm", {"shapes": ["tiny"]}, ["shapes is ['tiny']", "tiny"]),
        ("gemm", {"device": "tpu"}, ["device is 'tpu'", "auto, cpu or cuda"]),
        ("gemm", {"device": "cuda"}, ["device is 'cuda'", "cpu"]),
        ("gemm", {"candidate": "nonsense"}, ["candidate is 'nonsense'", "torch, package.module:function"]),
        ("gemm", {"candidate": 5}, ["candidate is 5", "package.module:function"]),
        ("gemm", {"candidate": "nowhere:linear"}, ["candidate 'nowhere:linear'", "cannot import nowhere"]),
        ("gemm", {"candidate": ".relative:linear"}, ["candidate '.relative:linear'"]),
        ("gemm", {"candidate": "math:linear"}, ["candidate 'math:linear'", "no function linear"]),
        ("gemm", {"candidate": "math:pi"}, ["candidate 'math:pi'", "no function pi"]),
        ("gemm", {"candidate": "nowhere.py:linear"}, ["no file nowhere.py"]),
        ("elementwise", {"candidate": "math:sqrt"}, ["candidate 'math:sqrt'", "-p op NAME", "silu"]),
        ("gemm", {"op": "nonsense"}, ["op is 'nonsense'", "linear", "matmul", "gemm"]),
        ("gemm", {"op": "silu"}, ["op is 'silu'", "linear", "gemm"]),
        ("gemm", {"op": 5}, ["op is 5", "linear"]),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_one_clear_sentence(audit, given, words):
    with pytest.raises(ValueError) as caught:
        start(audit, given)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    "given, functions",
    [
        ({}, ["linear", "linear_bias", "routed_linear", "routed_linear_bias", "matmul"]),
        ({"candidate": "torch"}, ["linear", "linear_bias", "routed_linear", "routed_linear_bias", "matmul"]),
        ({"op": "matmul"}, ["matmul"]),
        ({"candidate": "torch:mm", "op": "matmul"}, ["matmul"]),
        ({"candidate": "torch.nn.functional:linear"}, ["linear"]),
        ({"candidate": "torch:addmm"}, ["linear"]),
    ],
    ids=str,
)
def test_which_ops_a_candidate_stands_for(given, functions):
    session = start("gemm", given | {"dtype": "fp16"})
    assert list(session.candidate.functions) == functions and session.dtypes == ["fp16"]
    assert {s.problem.op.name for s in session.make()} == set(functions)


def test_inputs_are_the_seeds_and_nothing_elses():
    same, other = (OpConfig(OPS["linear"], "o", DTYPES["bf16"], "tiny", torch.device("cpu"), seed) for seed in (0, 1))
    for kind in KINDS[:-1]:
        a, b, c = (p.inputs(kind, 20)[0]["x"] for p in (same, replace(same), other))
        assert_same_bits(a, b, kind)
        assert not torch.equal(a, c)


def test_a_part_that_runs_in_a_process_of_its_own_gives_the_same_rows():
    """On a GPU every audit's parts do; the interpreter can as well."""
    given = {"dtype": "bf16", "device": "cpu", "op": "scale"}
    alone, beside = load("elementwise", given), load("elementwise", given)
    beside.pool = parallel.begin("elementwise", given)
    with beside.pool:
        assert [vars(r) for r in beside.judge()] == [vars(r) for r in alone.judge()] and not beside.begun


def test_audits_that_share_a_gpu_take_turns_in_the_order_of_asking(tmp_path, monkeypatch):
    """One that times waits for those that run, and one that begins later for it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="of a test"))
    order, runs, times, later = [], GpuLock(), GpuLock(), GpuLock()

    def time_alone():
        with times.alone():
            time.sleep(0.3)
            order.append("timed")

    def begin_later():
        later.share()
        order.append("began")

    runs.share()
    threads = [threading.Thread(target=f, daemon=True) for f in (time_alone, begin_later)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)  # so that they ask in this order
    assert order == []
    for file in runs.files:  # as the end of its process closes them
        file.close()
    for thread in threads:
        thread.join(10)
    assert order == ["timed", "began"]
