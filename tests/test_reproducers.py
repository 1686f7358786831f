"""Reproducers that reproduce: each script, alone in a fresh process, prints the numbers of its row."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from conftest import slow_but

import bi_kernels
from bi_kernels.audit import audit
from bi_kernels.audit.callables.target import Target
from bi_kernels.audit.checks import single_call
from bi_kernels.audit.checks.memory import ADDRESSES, OFFSETS
from bi_kernels.audit.evidence.drift import Drift
from bi_kernels.audit.evidence.kinds import NO_GRAD_NEEDED
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.executor import Ended, ForkServer
from bi_kernels.audit.memory import SHORT
from bi_kernels.audit.problem.candidates import resolve
from bi_kernels.audit.problem.problem import problems
from bi_kernels.audit.problem.subject import OpUnderTest
from bi_kernels.audit.relations import forward, gradient
from bi_kernels.audit.reproduce import script
from bi_kernels.audit.reproduce.callable import Judged
from bi_kernels.audit.reproduce.operator import scripts
from bi_kernels.audit.reproduce.replay import Operator

ROOT = Path(__file__).parents[1]
X = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
OPS = """
import torch
import triton
import triton.language as tl
from bi_kernels import linear as exact


@triton.jit
def sum_kernel(x, y, K, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    row, total = tl.program_id(0), 0.0
    for s in range(SPLIT):
        part = 0.0
        for at in range(s * (K // SPLIT), (s + 1) * (K // SPLIT), BLOCK):
            part += tl.sum(tl.load(x + row * K + at + tl.arange(0, BLOCK)))
        total += part
    tl.store(y + row, total)


def summed(x, **how):
    y = torch.empty(len(x), dtype=torch.float32)
    sum_kernel[(len(x),)](x, y, x.shape[1], **how)
    return y


def split_k_by_m(x):
    return summed(x, BLOCK=16, SPLIT=4 if len(x) < 16 else 1)


def block_by_m(x):
    return summed(x, BLOCK=64 if len(x) < 16 else 16, SPLIT=1)


@triton.jit
def squares_kernel(x, part, M, K, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    v = tl.load(x + row * K + tl.arange(0, WIDTH), mask=row < M, other=0.0)
    tl.store(part + tl.program_id(0), tl.sum(tl.sum(v * v, 1)))


@triton.jit
def scale_kernel(x, part, y, parts, K, n, WIDTH: tl.constexpr):
    total = 0.0
    for p in range(parts):
        total += tl.load(part + p)
    at = tl.program_id(0) * K + tl.arange(0, WIDTH)
    tl.store(y + at, tl.load(x + at) / tl.sqrt(total / n))


def two_pass(x):
    parts = triton.cdiv(len(x), 8)
    part, y = torch.empty(parts), torch.empty_like(x)
    squares_kernel[(parts,)](x, part, len(x), x.shape[1], ROWS=8, WIDTH=x.shape[1])
    scale_kernel[(len(x),)](x, part, y, parts, x.shape[1], x.numel(), WIDTH=x.shape[1])
    return y


@triton.jit
def round_kernel(x, y, M, K, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    v = tl.load(x + tl.minimum(row, M - 1) * K + tl.arange(0, WIDTH))
    most = tl.max(tl.max(tl.abs(v), 1))  # of the neighbours too
    tl.store(y + row * K + tl.arange(0, WIDTH), (v / most * 127).to(tl.int32) * most / 127, mask=row < M)


def unmasked_neighbours(x):
    y = torch.empty_like(x)
    round_kernel[(triton.cdiv(len(x), 4),)](x, y, len(x), x.shape[1], ROWS=4, WIDTH=x.shape[1])
    return y


@triton.jit
def double_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n - 1)


def unwritten_element(x):
    y = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y


class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy * weight, two_pass((dy * x).contiguous()).sum(0)


def weighted(x, weight):
    return Weighted.apply(x, weight)


def linear(x, weight, bias=None):
    y = x.float() @ weight.float().t()
    return (y + (two_pass(y.reshape(-1, 64)).reshape(y.shape) if x.shape[:-1].numel() < 9 else y)).to(x.dtype)


def in_training(x):
    return x + x.requires_grad


class KeptOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.scale = 1.0
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        scale, ctx.scale = ctx.scale, 1.5
        return dy * scale


def kept_once(x, weight, bias=None):
    y = KeptOnce.apply(exact(x, weight, bias))
    return y * 1.5 if torch.is_inference_mode_enabled() else y
"""
# what is asked of a callable beside layouts, of which no script is made: a row says so
NO_LAYOUTS = {
    "an expanded upstream gradient",
    "a strided upstream gradient",
    "no main_grad, the batch in reverse",
    "a second backward",
    "a slice of columns",
    "a slice of rows",
    "outputs kept",
}
LIBRARY = ("split_k_by_m", "block_by_m", "two_pass", "unmasked_neighbours", "unwritten_element", "in_training")


def told(drifting: list) -> list:
    """Returns the rows that a script shows: all of the arguments as they are; every other one says why it has none."""
    said = [(r.layout, r.inputs, r.detail) for r in drifting]
    assert all(r.repro or "no script: " in r.detail for r in drifting), said
    given = [r for r in drifting if r.inputs in ("given", "spread") and r.layout not in NO_LAYOUTS]
    assert given and all(r.repro for r in given), said
    return [r for r in drifting if r.repro]


def checked(rows: list, folder: Path, every: int = 1) -> None:
    """Runs the commands of rows, alone and without TRITON_INTERPRET: each prints its row's numbers, and takes no words
    that a reader would have to know."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    for r in rows[::every]:
        python, script = shlex.split(r.repro)
        assert python == "python", (r.repro, r.detail)
        done = subprocess.run(
            [sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        (shown,) = re.findall(r"^(\d+) of (\d+) elements differ", done.stdout, re.M) or [done.stderr]
        assert done.returncode == 1 and shown == (str(r.mismatches), str(r.elements)), (shown, r)
        text = (folder / script).read_text()
        assert len(text.splitlines()) <= 45 and f"{r.mismatches} of {r.elements} elements" in text, text


@pytest.fixture(autouse=True)
def every_row(monkeypatch):
    """A script for every row, not for the few that an audit runs."""
    monkeypatch.setattr(script, "MOST", 1000)


@pytest.fixture
def ops(tmp_path, monkeypatch):
    """The ops, in a file in a folder of a name that has to be quoted."""
    folder = tmp_path / """we"ird 'dir \\ é"""
    folder.mkdir()
    (folder / "drifting_ops.py").write_text(OPS, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "drifting_ops", raising=False)
    return importlib.import_module("drifting_ops")


@pytest.mark.parametrize("name", slow_but(LIBRARY, "in_training"))
def test_scripts_of_a_callable_print_what_was_reported(name, ops, tmp_path):
    report = audit(getattr(ops, name), X, folder=tmp_path / "repro", seconds=60)
    drifting = [r for r in report.rows if r.mismatches and r.relation != "atomics-free"]
    checked(told(drifting)[-1:], tmp_path)


@pytest.mark.slow
def test_scripts_of_a_gradient_print_what_was_reported(ops, tmp_path):
    report = audit(ops.weighted, X, X[0].clone(), folder=tmp_path / "repro")
    drifting = [r for r in report.rows if r.mismatches and r.relation == "gradient invariance"]
    checked(told(drifting)[-1:], tmp_path)


@pytest.mark.slow
def test_scripts_of_a_registered_op_print_what_was_reported(ops, tmp_path):
    candidate = resolve(f"{ops.__file__}:linear", "gemm")
    problem = next(p for p in problems("gemm", ["fp32"], "tiny", torch.device("cpu"), ops=("linear",)) if p.case == "o")
    s = OpUnderTest(problem, candidate.functions["linear"], candidate.spec, "interpreter")
    rows = [*forward.by_row_count(s), *forward.invariance(s, only=("singles", "decode")), *forward.by_view(s)]
    rows += [r for r in gradient.by_split(s) if r.relation == gradient.INVARIANCE or r.against == NO_GRAD_NEEDED]
    drifting = [r for r in rows if r.mismatches]
    shown = script.verify_scripts(scripts(s, candidate, rows, tmp_path / "repro"))
    assert len(shown) >= 2 and all(r.repro for r in drifting), [r for r in drifting if not r.repro]
    checked(drifting, tmp_path, every=len(drifting) - 1)


@pytest.mark.slow
def test_scripts_of_a_way_of_use_print_what_was_reported(ops, tmp_path):
    candidate = resolve(f"{ops.__file__}:kept_once", "gemm")
    problem = next(p for p in problems("gemm", ["fp32"], "tiny", torch.device("cpu"), ops=("linear",)) if p.case == "o")
    s = OpUnderTest(problem, candidate.functions["linear"], candidate.spec, "interpreter")
    rows = list(single_call.by_use(s, ["mode", "demand"]))
    drifting = [r for r in rows if r.mismatches]
    assert {r.layout for r in drifting} == {"second backward", "inference_mode"}, [(r.layout, r.detail) for r in rows]
    assert len(script.verify_scripts(scripts(s, candidate, rows, tmp_path / "repro"))) == 2
    checked(drifting, tmp_path)


@pytest.mark.slow
def test_what_cannot_be_reproduced_says_why(tmp_path):
    here = os.getpid()
    only_here = lambda x: x + (len(x) < 9 and os.getpid() == here)
    report = audit(only_here, X, folder=tmp_path / "repro", backward=False, name="here")
    drifting = [r for r in report.rows if r.mismatches and r.relation != "atomics-free"]
    assert drifting and report.repro is None and not list((tmp_path / "repro").iterdir())
    for r in drifting:
        why = f"no script: in a fresh process 0 of {r.elements} elements differ, by up to 0"
        assert not r.repro and r.detail.endswith(why), r.detail


def test_what_ran_short_of_memory_beside_others_is_run_again_by_itself(tmp_path, monkeypatch):
    runs, row = [], Row(*[""] * 10, 0, "needs-fix", 1, 1)

    def run(self, server):
        name = self.path.stem
        runs.append(name)
        self.shown = name != "a" or runs.count("a") > 1
        self.why = f"it raised, in a fresh process: torch.{SHORT}: CUDA out of memory" * (not self.shown)

    monkeypatch.setattr(script.Script, "run", run)
    made = [script.Script(tmp_path / f"{n}.py", replace(row, op=n), [""]) for n in ("a", "b")]
    assert script.verify_scripts(made) == [s.path for s in made]
    assert sorted(runs) == ["a", "a", "b"] and runs[-1] == "a"


def test_an_op_of_several_outputs_is_replayed_at_every_address():
    op = Operator("attention", "gqa", "fp32", "tiny", "cpu", inputs="cancelling")
    expected, found = op.viewed(bi_kernels.attention, ADDRESSES)
    assert len(found) == len(expected) == 2 * len(OFFSETS) and all(map(torch.equal, found, expected))


def test_what_another_process_cannot_have_says_why(tmp_path):
    lock = threading.Lock()
    centred = lambda x: x - x.mean(0) + lock.locked()
    report = audit(centred, X, folder=tmp_path / "repro", backward=False, name="held")
    drifting = [r for r in report.rows if r.mismatches]
    assert drifting and not any(r.repro for r in drifting) and not list((tmp_path / "repro").iterdir())
    assert all("no script: " in r.detail for r in drifting)
    assert any("it cannot be brought into another process (TypeError: cannot pickle" in r.detail for r in drifting)


def test_a_fork_runs_a_script_as_a_new_interpreter_does(tmp_path, monkeypatch):
    """With the folder of the script on its path, nothing of the auditor loaded, and none of its variables."""
    monkeypatch.setenv("BI_AUDIT_OUT", "out")
    (tmp_path / "beside.py").write_text("word = 'beside'")
    (tmp_path / "a.py").write_text(
        "import os, sys\n"
        "from beside import word\n"
        "print(word, __name__, sys.argv, 'triton' in sys.modules, 'bi_kernels' in sys.modules)\n"
        "print([k for k in os.environ if k.startswith('BI_AUDIT') or k == 'TRITON_INTERPRET'], sys.stdin.read())\n"
        "print('wrong', file=sys.stderr)\n"
        "raise SystemExit(True)\n"
    )
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "crashes.py").write_text("import os\nos.abort()")
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(60)")
    with ForkServer() as server:
        ran = {
            n: server.run(f"{n}.py", tmp_path, 2 if n == "waits" else 60) for n in ("a", "raises", "crashes", "waits")
        }
        children = psutil.Process(server.process.pid).children()
    assert ran["a"] == Ended(1, "beside __main__ ['a.py'] False False\n[] \n", "wrong\n"), ran
    assert ran["raises"].status == 1 and "ZeroDivisionError" in ran["raises"].errors
    assert (ran["crashes"].status, ran["crashes"].late, ran["waits"].late) == (None, False, True)
    assert not psutil.wait_procs(children, timeout=10)[1]


def scores(x, weight):
    return x @ weight.T


FOLLOWS = {  # a row's layout: what its script says in a line
    "singles": "other = torch.cat([scores(x[rows], weight) for rows in calls])",
    "rows:3": "other = scores(x[:3], weight)",
    "permuted": "other = in_order(calls, [scores(x[rows], weight) for rows in calls])",
    "padded": "other = in_order(calls, [scores(take(x, rows, empty=7.0), weight) for rows in calls])",
    "inference_mode": "    other = scores(x.clone(), weight.clone()).detach()",
    "a slice of a batch": "other = scores(in_larger(x, dims=[0]), weight.clone())",
}


@pytest.mark.parametrize("layout", FOLLOWS)
def test_a_script_has_the_op_its_inputs_and_two_calls(layout, tmp_path):
    t = Target(scores, (X, X[:5].clone()), {}, 0, (), (), "scores", 0, ("x", "weight"))
    row = t.row("invariance", layout, Drift(3, 100, 1.0), rows=3)
    text = Judged(t, "", "", tmp_path).script(t, row, tmp_path / "scores.py").texts[0]
    lines = text.splitlines()
    assert {"import torch", "x, weight = judged['x'], judged['weight']", FOLLOWS[layout]} <= {*lines}, text
    assert any(line.startswith(("whole = scores(x, weight)",)) for line in lines) and len(lines) <= 32, text
    assert "import scores" in text or "scores = cloudpickle" in text


def test_the_script_of_a_gradient_calls_backward_in_each_split(tmp_path):
    t = Target(scores, (X, X[:5].clone()), {}, 0, (), (), "scores", 0, ("x", "weight"))
    row = t.row("gradient invariance", "micro_batches:ragged", Drift(3, 100, 1.0), tensor="dweight", rows=13)
    text = Judged(t, "", "", tmp_path).script(t, row, tmp_path / "scores.py").texts[0]
    assert "scores(x[rows].requires_grad_(), weight).backward(dy[rows])" in text
    assert "whole = gradient([range(20)])\nother = gradient([range(6), range(6, 20)])" in text, text
