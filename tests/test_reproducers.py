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
from bi_kernels.audit.axes import NO_GRAD_NEEDED
from bi_kernels.audit.checks import forward, gradient, single_call
from bi_kernels.audit.checks.memory import ADDRESSES, OFFSETS, run_contiguous, run_on_view
from bi_kernels.audit.checks.placement import EXPANDED, SHIFTED
from bi_kernels.audit.compare import Drift
from bi_kernels.audit.executor import Ended, ForkServer
from bi_kernels.audit.findings import Row
from bi_kernels.audit.memory import SHORT
from bi_kernels.audit.reproduce import script
from bi_kernels.audit.reproduce.callable import Writer
from bi_kernels.audit.reproduce.operator import scripts
from bi_kernels.audit.reproduce.replay import registered
from bi_kernels.audit.targets.any_callable import CallableTarget
from bi_kernels.audit.targets.candidates import resolve
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import problems

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


def split_k_by_m(x):
    y = torch.empty(len(x), dtype=torch.float32)
    sum_kernel[(len(x),)](x, y, x.shape[1], BLOCK=16, SPLIT=4 if len(x) < 16 else 1)
    return y


def two_pass(x):
    return x / x.square().sum(1).mean().sqrt()  # the mean over all rows


def unwritten_element(x):
    y = torch.empty_like(x)
    y.view(-1)[:-1] = 2 * x.reshape(-1)[:-1]
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
# rows of a callable for which no script is written; each says so
NO_LAYOUTS = {
    "no main_grad, the batch in reverse",
    "a second backward",
    "a slice of rows",
    "outputs kept",
    EXPANDED,
    SHIFTED,
}
LIBRARY = ("split_k_by_m", "two_pass", "unwritten_element", "in_training")


def reproduced(drifting: list) -> list:
    """Returns the rows that a script reproduced, in a fork: all of the arguments as given; the others say why not."""
    said = [(r.layout, r.inputs, r.detail) for r in drifting]
    assert all(r.repro or "no script: " in r.detail for r in drifting), said
    given = [r for r in drifting if r.inputs in ("given", "spread") and r.layout not in NO_LAYOUTS]
    assert given and all(r.repro for r in given), said
    return [r for r in drifting if r.repro]


def run_alone(r: Row, folder: Path) -> None:
    """Runs the command of a row in a new interpreter, without TRITON_INTERPRET: it prints its row's numbers."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    python, path = shlex.split(r.repro)
    done = subprocess.run([sys.executable, path], cwd=folder, env=environment, capture_output=True, text=True)
    (shown,) = re.findall(r"^(\d+) of (\d+) elements differ", done.stdout, re.M) or [done.stderr]
    assert python == "python" and done.returncode == 1 and shown == (str(r.mismatches), str(r.elements)), (shown, r)
    assert f"{r.mismatches} of {r.elements} elements" in (folder / path).read_text()


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


def registered_op(ops, name: str) -> tuple:
    candidate = resolve(f"{ops.__file__}:{name}", "gemm")
    problem = next(p for p in problems("gemm", ["fp32"], "tiny", torch.device("cpu"), ops=("linear",)) if p.case == "o")
    return OpUnderTest(problem, candidate.functions["linear"], candidate.spec, "interpreter"), candidate


@pytest.mark.parametrize("name", slow_but(LIBRARY, "in_training"))
def test_every_drift_of_a_callable_is_reproduced(name, ops, tmp_path):
    report = audit(getattr(ops, name), X, folder=tmp_path / "repro", seconds=60)
    found = reproduced([r for r in report.rows if r.mismatches and r.relation != "atomics-free"])
    if name == LIBRARY[-1]:
        run_alone(found[-1], tmp_path)


@pytest.mark.slow
def test_every_drift_of_a_gradient_is_reproduced(ops, tmp_path):
    report = audit(ops.weighted, X, X[0].clone(), folder=tmp_path / "repro")
    drifting = [r for r in report.rows if r.mismatches and r.relation == "gradient invariance"]
    run_alone(reproduced(drifting)[-1], tmp_path)


@pytest.mark.slow
def test_every_drift_of_a_registered_op_is_reproduced(ops, tmp_path):
    s, candidate = registered_op(ops, "linear")
    rows = [*forward.by_row_count(s), *forward.by_layout(s, only=("singles", "decode")), *forward.by_view(s)]
    rows += [r for r in gradient.by_split(s) if r.relation == gradient.INVARIANCE or r.against == NO_GRAD_NEEDED]
    drifting = [r for r in rows if r.mismatches]
    shown = script.verify_scripts(scripts(s, candidate, rows, tmp_path / "repro"))
    assert len(shown) >= 2 and all(r.repro for r in drifting), [r for r in drifting if not r.repro]
    run_alone(drifting[0], tmp_path)


@pytest.mark.slow
def test_a_drift_between_modes_and_gradient_requests_is_reproduced(ops, tmp_path):
    s, candidate = registered_op(ops, "kept_once")
    rows = list(single_call.by_use(s, ["mode", "demand"]))
    drifting = [r for r in rows if r.mismatches]
    assert {r.layout for r in drifting} == {"a graph kept, backward twice", "inference_mode"}, [
        (r.layout, r.detail) for r in rows
    ]
    assert len(script.verify_scripts(scripts(s, candidate, rows, tmp_path / "repro"))) == 2


@pytest.mark.slow
def test_what_cannot_be_reproduced_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "MOST", 1)
    here = os.getpid()
    only_here = lambda x: x + (len(x) < 9 and os.getpid() == here)
    report = audit(only_here, X, folder=tmp_path / "repro", backward=False, name="here")
    drifting = [r for r in report.rows if r.mismatches and r.relation != "atomics-free"]
    assert drifting and report.repro is None and not list((tmp_path / "repro").iterdir())
    for r in drifting:
        why = (
            f"no script: in a fresh process 0 of {r.elements} elements differ, by up to 0",
            "1 of this audit are shown, the most",
        )
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
    op = registered(bi_kernels.attention, "attention", "gqa", "fp32", "tiny", "cpu")
    expected, found = (run(op, ADDRESSES, "cancelling") for run in (run_contiguous, run_on_view))
    assert len(found) == len(expected) == len(OFFSETS)
    assert all(torch.equal(a, b) for ones in zip(found, expected) for a, b in zip(*ones))


def test_what_another_process_cannot_have_says_why(tmp_path):
    lock = threading.Lock()
    centred = lambda x: x - x.mean(0) + lock.locked()
    report = audit(centred, X, folder=tmp_path / "repro", backward=False, name="held")
    drifting = [r for r in report.rows if r.mismatches]
    assert drifting and not any(r.repro for r in drifting) and not list((tmp_path / "repro").iterdir())
    assert all("no script: " in r.detail for r in drifting)
    assert any("it cannot be brought into another process (TypeError: cannot pickle" in r.detail for r in drifting)


@pytest.mark.slow
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


TEXTS = {  # of an output or a gradient, a row's layout: the line of its second call, in the plainest script
    "out singles": "torch.cat([scores(x[rows], weight) for rows in [[i] for i in [0, 1, 3, 4, 5, 6, 8, 9, 10, 11",
    "out rows:3": "torch.cat([scores(x[rows], weight) for rows in [[0, 1, 2]]])",
    "out micro_batches:ragged": "torch.cat([scores(x[rows], weight) for rows in [range(0, 6), range(6, 20)]])",
    "out padded": "target.compute([[0, 1, 2",
    "out inference_mode": "in_mode(target, 'inference_mode', target.every)[0]",
    "out a slice of a batch": "placed(target, 'a slice of a batch')[0]",
    "dweight micro_batches:ragged": "step.gradients([range(0, 6), range(6, 20)])['dweight']",
}


@pytest.mark.parametrize("what", TEXTS)
def test_a_script_has_the_op_its_inputs_and_two_calls(what, tmp_path):
    tensor, _, layout = what.partition(" ")
    t = CallableTarget(scores, (X, X[:5].clone()), {}, 0, (), (), "scores", 0, ("x", "weight"))
    more = {"tensor": tensor} if tensor == "dweight" else {}
    row = t.row("gradient invariance" if more else "invariance", layout, Drift(3, 100, 1.0), rows=3, **more)
    text = Writer(t, "", "", tmp_path).script(t, row, tmp_path / "scores.py").texts[0]
    assert f"\nother = {TEXTS[what]}" in text and len(text.splitlines()) <= 36, text
    assert "# the whole batch\nwhole = " in text and f"\n# {layout}\nother = " in text
    assert "import scores" in text or "scores = cloudpickle" in text
