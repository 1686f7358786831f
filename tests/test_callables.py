"""`audit` of callables that nobody wrote for it: what is invariant passes, what drifts is found with a reproducer that
shows it, and what cannot be judged gets one sentence."""

import importlib
import json
import os
import runpy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from conftest import slow_but

import bi_kernels
from bi_kernels.audit import audit, start
from bi_kernels.audit.checks import gradient
from bi_kernels.audit.checks.any_callable import plan
from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED, write_rows
from bi_kernels.audit.targets import any_callable as target

ROWS, WIDTH = 40, 64
G = torch.Generator().manual_seed(0)
X, Y, W = (torch.randn(*shape, generator=G) for shape in ((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH, WIDTH)))
IDS = torch.randint(0, WIDTH, (ROWS,), generator=G)


def in_need(report) -> list:
    return [r for r in report.rows if r.verdict == NEEDS_FIX]


@triton.jit
def _double_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def doubled(x, out):
    assert out.is_contiguous(), "out must be contiguous"
    _double_kernel[(triton.cdiv(x.numel(), 256),)](x.contiguous(), out, x.numel(), BLOCK=256)


def centred(x):
    return x - x.mean(0)


def block_by_rows(x):
    halves = x.unflatten(-1, (2, -1)).sum(-1)
    return halves.sum(-1) if len(x) > 8 else x.unflatten(-1, (-1, 2)).sum(-2).sum(-1)


def last_row_differs(x):
    y = 2 * x
    y[-1] += 2**-20
    return y


INVARIANT = {
    "silu": (F.silu, X),
    "gelu": (torch.nn.GELU(), X.bfloat16()),
    "softmax": (torch.nn.Softmax(-1), X),
    "two inputs": (torch.add, X, Y),
    "swiglu of a dict": (lambda x, y: {"out": F.silu(x) * y, "x": x}, X, Y),
    "integers": (lambda ids: ids + 1, IDS),
    "attention": (F.scaled_dot_product_attention, *torch.randn(3, 6, 2, 16, 8, generator=G)),
    "eval batch norm": (torch.nn.BatchNorm1d(WIDTH).eval().requires_grad_(False), X),
    "in place": (lambda x: x.relu_(), X),
    "rows of samples": (lambda x: x.reshape(-1, 8) * 2, X),
    "ours": (bi_kernels.linear, X[:18].bfloat16(), W.bfloat16()),
    "ours over sequences": (
        bi_kernels.rms_norm,
        torch.randn(3, 20, 32, generator=G).bfloat16(),
        torch.randn(32, generator=G).bfloat16(),
    ),
}
MODES = ("a gradient wanted", "inference_mode")
DRIFTING = {
    "centred": ((centred, X), "invariance"),
    "block by rows": ((block_by_rows, X), "invariance"),
    "neighbour": ((lambda x: x + 0 * x.roll(1, 0), X), "invariance"),
    "last row": ((last_row_differs, X), "invariance"),
    "batch norm": ((torch.nn.BatchNorm1d(WIDTH), X), "invariance"),
    "dweight": ((lambda x, weight: (x * weight).sum(-1), X.bfloat16(), W[0].bfloat16()), "gradient invariance"),
    "a module's weight": ((torch.nn.Linear(WIDTH, WIDTH), X), "gradient invariance"),
    "embedding": ((F.embedding, IDS % 3, W), "gradient invariance"),
}


@pytest.mark.parametrize("name", slow_but(INVARIANT, "ours over sequences"))
def test_what_is_invariant_passes(name):
    report = audit(*INVARIANT[name])
    assert report.passed and not in_need(report), report.markdown()
    assert {r.layout for r in report.rows if r.relation == "invariance"} >= {*plan(len(INVARIANT[name][1])), *MODES}


@pytest.mark.parametrize("name", slow_but(DRIFTING, "neighbour"))
def test_what_drifts_is_found_and_reproduced(name, tmp_path, capsys, monkeypatch):
    (function, *inputs), relation = DRIFTING[name]
    report = audit(function, *inputs, folder=tmp_path / "repro")
    layouts = (r for r in in_need(report) if r.against == target.WHOLE)  # what a script shows
    found = [r for r in layouts if r.relation == relation and r.mismatches]
    assert found and report.verdict == NEEDS_FIX and all(r.max_ulp and r.first_index and r.tensor for r in found), (
        report.markdown()
    )
    assert report.repro and all(r.repro or "no script: " in r.detail for r in found), report.markdown()
    assert any(r.repro for r in found) and f"python {report.repro}" in {r.repro for r in in_need(report)}
    with pytest.raises(SystemExit) as ended, monkeypatch.context() as m, torch.set_grad_enabled(True):
        m.setattr(sys, "argv", [str(report.repro)])
        runpy.run_path(str(report.repro))
    said = capsys.readouterr().out
    assert ended.value.code and "elements differ" in said and not said.startswith("0 of"), report.repro.read_text()


class If(torch.nn.Module):
    """Multiplies, by a little more where its condition holds."""

    def __init__(self, condition):
        super().__init__()
        self.condition, self.calls = condition, 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 2**-10 * bool(self.condition(self)))


ONLY = {  # what alone catches a module, and what that looks at
    "a gradient wanted": lambda m: torch.is_grad_enabled(),
    "inference_mode": lambda m: torch.is_inference_mode_enabled(),
    "hooks that change nothing": lambda m: m._forward_hooks or m._forward_pre_hooks,
    "eval()": lambda m: not m.training,
    "deterministic algorithms": lambda m: torch.are_deterministic_algorithms_enabled(),
}


@pytest.mark.parametrize("mode", slow_but(ONLY, "hooks that change nothing"))
def test_a_module_that_is_another_in_a_mode_is_caught_by_that_alone(mode):
    model = If(ONLY[mode])
    report = audit(model, X[:9], quiet=True)
    assert {r.layout for r in in_need(report)} == {mode}, report
    assert model.training and not model._forward_hooks


def test_a_module_that_is_another_from_the_fortieth_call_on_is_caught_at_the_end():
    report = audit(If(lambda m: m.calls >= 40), X[:9], quiet=True)
    assert "at the end" in {r.layout for r in in_need(report)} and not report.passed
    assert audit(If(lambda m: False), X[:9], quiet=True).passed


def test_a_launcher_is_judged_by_what_it_writes():
    report = audit(doubled, X, torch.empty_like(X), outputs=("out",))
    assert report.passed and next(r for r in report.rows if r.relation == "atomics-free").verdict == PASS, (
        report.markdown()
    )


def test_which_tensors_are_shared_is_found_out():
    square = torch.randn(8, 8, generator=G)
    assert "one row each: x; shared: weight" in audit(lambda x, weight: x @ weight.T, square, square.clone()).read
    ids, table = torch.arange(ROWS), torch.randn(ROWS, 8, generator=G)  # half of the table would do for half of the ids
    lookup = lambda ids, table: table[ids]
    assert "one row each: ids; shared: table" in audit(lookup, ids, table).read
    assert "one row each: x, y" in audit(lambda x, y: x + y, X, Y).read
    with pytest.raises(ValueError, match="shared names 'z', expected one of the tensors x, y"):
        audit(lambda x, y: x + y, X, Y, shared=("z",))


def test_the_batch_may_be_another_dimension():
    report = audit(centred, torch.randn(7, 3, 20, generator=G).double(), batch=-1, backward=False)
    assert report.passed and "20 samples along dimension 2" in report.read
    assert not audit(centred, torch.randn(7, 3, 20, generator=G)).passed


def test_one_element_that_is_no_number_does_not_widen_the_bound_of_others():
    x = torch.randn(16, 8, generator=G)
    unknown = x == x[0, 0]
    silu = lambda x: F.silu(x).masked_fill(unknown.to(x.device), float("nan")) if len(x) == 16 else F.silu(x)
    wrong = lambda x: (x * 123 + 5).masked_fill(unknown, float("nan")) if len(x) == 16 else x * 123 + 5
    (row,) = (r for r in audit(wrong, x, reference=silu, backward=False).rows if r.relation == "accuracy")
    assert row.verdict == NEEDS_FIX and row.mismatches == x.numel() - 1, row


def test_accuracy_is_held_against_a_reference():
    x, w = X.bfloat16(), W.bfloat16()
    exact = next(r for r in audit(F.linear, x, w, reference=F.linear).rows if r.relation == "accuracy")
    assert exact.verdict == PASS and 0 < exact.threshold_share < 1
    rounded = lambda x, w: sum((x[:, k : k + 8] @ w[:, k : k + 8].T for k in range(0, WIDTH, 8)), x.new_zeros(()))
    every = in_need(audit(rounded, x, w, reference=F.linear, backward=False))  # torch's own matmul may drift besides
    wrong = [r for r in every if r.relation == "accuracy"]
    assert wrong and ", exactly " in wrong[0].detail and ", allowed ± " in wrong[0].detail
    with pytest.raises(StopIteration):
        next(r for r in audit(F.silu, X).rows if r.relation == "accuracy")


def test_what_is_no_function_of_its_batch_is_said():
    random = audit(torch.nn.Dropout(), X)
    assert [r.relation for r in in_need(random)] == ["determinism"] and "random" in in_need(random)[0].detail
    assert random.verdict == NEEDS_FIX and not [r for r in random.rows if r.relation == "invariance"]
    assert "changes its input x in place" in audit(lambda x: x.mul_(2), X).notes[0]
    one = audit(refuses(lambda x: len(x) == 17, "no kernel for 17 rows"), X)
    assert {r.layout for r in in_need(one)} == {"rows:17"} and "no kernel for 17 rows" in in_need(one)[0].detail
    picky = audit(lambda x: x.reshape(-1, 8, WIDTH).mul(2).reshape(x.shape), X)
    assert picky.verdict == NEEDS_FIX and {"rows:8", "rows:16"}.isdisjoint(r.layout for r in in_need(picky))
    assert "outputs [1]" in audit(lambda x: (x * 2, x.sum()), X).notes[0]


def test_a_result_that_depends_on_the_calls_before_is_said():
    calls = iter(range(10**6))
    report = audit(lambda x: x * (1 + 2**-10 * (next(calls) > 40)), X)
    assert "at the end" in {r.layout for r in in_need(report)} and "depends on the calls before it" in report.notes[0]


class Raises(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 2 * x)

    @staticmethod
    def backward(ctx, dy):
        raise RuntimeError("boom")


def test_a_backward_that_raises_is_no_backward_that_is_missing():
    raised = audit(Raises.apply, X)
    assert [(r.relation, r.layout) for r in in_need(raised)] == [("gradient invariance", "whole batch")], (
        raised.markdown()
    )
    assert "boom" in in_need(raised)[0].detail
    none = audit(lambda x: x.detach() * 2, X)
    assert none.passed and "backward was not judged" in none.notes[0]
    assert not audit(lambda x: x.detach() * 2, X, backward=True).passed


def test_what_it_writes_into_shared_tensors_stays_there():
    state = torch.zeros(WIDTH)
    report = audit(lambda x, state: x + state.add_(1), X, state)
    assert report.passed and "changes its input state in place" in " ".join(report.notes) and not state.any()
    assert gradient.INVARIANCE in {r.relation for r in report.rows}, "and x has its gradient"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_buffer_that_a_module_writes_into_is_said(replaced):
    class Seen(torch.nn.BatchNorm1d):  # which counts, and normalises nothing
        def forward(self, x):
            self.running_mean = (
                self.running_mean.lerp_(x.detach().mean(0), 0.1).clone()
                if replaced
                else (self.running_mean.lerp_(x.detach().mean(0), 0.1))
            )
            return 2 * x

    report = audit(Seen(WIDTH), X)
    assert report.passed and "writes into its buffer running_mean, whose" in " ".join(report.notes), report.notes
    assert "buffer" not in " ".join(audit(torch.nn.Hardtanh(), X).notes)


@pytest.mark.slow
def test_what_a_user_has_in_grad_stays(tmp_path):
    module = torch.nn.Linear(WIDTH, WIDTH)
    module.weight.grad, module.weight.main_grad = torch.ones(WIDTH, WIDTH), torch.full((WIDTH, WIDTH), 2.0)
    audit(module, X, folder=tmp_path)
    weight = module.weight
    assert (weight.grad == 1).all() and (weight.main_grad == 2).all() and not hasattr(module.bias, "main_grad")


class LeftPadded(torch.autograd.Function):
    """A defect that only a sample which is not the first sees; the script must not show more than that."""

    @staticmethod
    def forward(ctx, x, weight, factor):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        late = bool((dy[0] == 0).all())
        return dy * weight, (dy * x).double().sum(0).to(x) * (ctx.factor if late else 1.0), None


@pytest.mark.parametrize("factor", slow_but([1.0, 1 + 2**-10], 1 + 2**-10))
def test_a_padded_gradient_is_reproduced_as_it_was_judged(factor, tmp_path):
    """A place without a sample has no upstream gradient in the script, as in the audit."""
    fn = lambda x, weight: LeftPadded.apply(x, weight, factor)
    rows = [r for r in audit(fn, X, W[0].clone(), name="left", folder=tmp_path).rows if r.layout == "left_padded"]
    assert [bool(r.repro) for r in rows if r.tensor == "dweight"] == [factor != 1.0], rows


@pytest.mark.slow
def test_inputs_that_no_draw_gives_are_loaded(tmp_path):
    x = torch.randn(200, 512, generator=G)
    x[3, 5] = 1e6  # no drawn input is as large
    report = audit(lambda x: x + (x.amax() > 1e5), x, folder=tmp_path, name="rare", backward=False)
    done = subprocess.run([sys.executable, report.repro.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "elements differ" in done.stdout, done.stderr


MINE = """
import torch


def drifts(x):
    return x - x.mean(0)


class Module(torch.nn.Module):
    def forward(self, x):
        return drifts(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda mine: mine.drifts, lambda mine: mine.Module()], ids=["function", "module"])
def test_a_script_finds_its_users_file(make, tmp_path, monkeypatch):
    """Wherever it is run from."""
    (tmp_path / "users_own.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    report = audit(make(importlib.import_module("users_own")), X, folder=tmp_path / "repro", backward=False)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, report.repro], cwd="/", capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "elements differ" in done.stdout, done.stderr


def test_the_budget_is_kept_and_said(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(target.time, "monotonic", lambda: clock[0])

    def slow(x):
        clock[0] += 2.0
        return 2 * x

    report = audit(slow, X, seconds=60.0)
    late = {r.relation: r.detail for r in report.rows if r.layout == "not run"}
    assert report.verdict == UNSUPPORTED and not in_need(report) and "the budget of 60 s" in report.answer
    assert 60 <= clock[0] <= 66 and set(late) >= {"invariance", "gradient invariance"}
    assert "rows:1, rows:2" in late["invariance"] or "permuted" in late["invariance"]
    assert "the budget of 60 s was spent, one call takes 2 s; raise the parameter seconds" in late["invariance"]


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: audit(lambda x: None, X), TypeError, ["returned NoneType", "the parameter outputs"]),
        (lambda: audit(lambda x: x @ W[:3], X), ValueError, ["raised on the inputs as given: RuntimeError"]),
        (lambda: audit(lambda x: x.sum(), X), ValueError, ["no output has a row", "parameter batch"]),
        (lambda: audit(F.silu, X[:1]), ValueError, ["holds 1 sample along dimension 0", "at least 2"]),
        (lambda: audit(F.silu, X, batch=2), ValueError, ["batch is 2", f"({ROWS}, {WIDTH})"]),
        (lambda: audit(F.silu, 3), ValueError, ["hold no tensor"]),
        (lambda: audit(3, X), TypeError, ["fn is 3", "callable"]),
        (lambda: audit(F.silu, X, outputs=("y",)), ValueError, ["outputs names 'y'", "input"]),
    ],
)
def test_bad_use_is_one_clear_sentence(call, error, words):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


# bi-audit run any

CANDIDATE = """
import torch

def centred(x, eps):
    return x - x.mean(0) + eps

def inputs():
    return {"x": torch.randn(9, 4), "eps": 1e-3}
"""


@pytest.mark.slow
def test_a_callable_is_judged_from_the_command_line(tmp_path, monkeypatch, bi_audit):
    (tmp_path / "mine.py").write_text(CANDIDATE)
    monkeypatch.chdir(tmp_path)
    done = bi_audit("run", "any", "--candidate", "mine.py:centred", "--inputs", "x:fp32[9,4] eps:1e-3", "--out", "out")
    assert done.returncode == 1 and "centred fp32: a row's result depends on the values of its" in done.out, done
    rows = json.loads((tmp_path / "out" / "any" / "verdicts.json").read_text())
    assert [r["caught"] for r in rows if r["control"]] and all(r["caught"] for r in rows if r["control"])
    assert "needs-fix" in (tmp_path / "out" / "any" / "README.md").read_text()
    shown = subprocess.run([sys.executable, "out/any/repro/centred.py"], cwd=tmp_path, text=True, capture_output=True)
    assert shown.returncode == 1 and "elements differ" in shown.stdout, shown.stderr


WRONG = """
import os, torch

def scores(x, weight, bias=None, eps=0.0):
    return x @ weight.T + eps

def raises():
    raise KeyError("no data")

def three():
    return 3

def dies(x):
    os._exit(7)
"""
GIVEN = "x:fp32[4,8] weight:fp32[5,8]"


@pytest.mark.parametrize(
    "told, words",
    [
        ({"inputs": "y:fp32[4,8] weight:fp32[5,8]"}, ["y, weight", "takes x, weight", "'x'"]),
        ({"inputs": "x:fp32[4,8]"}, ["takes x, weight", "missing", "'weight'"]),
        ({"inputs": f"{GIVEN} other:3"}, ["other", "takes x, weight"]),
        ({"inputs": "{file}:raises"}, ["raises", "KeyError: 'no data'"]),
        ({"inputs": "{file}:three"}, ["returned int", "a tuple or a dict"]),
        ({"inputs": GIVEN, "reference": "{file}:dies"}, ["reference", "takes x"]),
        ({"inputs": GIVEN, "seconds": 0}, ["seconds is 0", "from 1"]),
        ({"inputs": GIVEN, "batch": 2}, ["batch is 2", "(4, 8)"]),
        ({"inputs": GIVEN, "shared": "y"}, ["shared names 'y'", "x, weight"]),
    ],
    ids=lambda x: "" if isinstance(x, list) else " ".join(map(str, x.values())),
)
def test_what_a_callable_is_wrongly_told_is_refused_in_one_sentence(told, words, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    filled = {k: v.replace("{file}", f"{tmp_path}/wrong.py") if isinstance(v, str) else v for k, v in told.items()}
    with pytest.raises(ValueError) as caught:
        start("any", **{"candidate": f"{tmp_path}/wrong.py:scores", "device": "cpu"} | filled)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    "name, inputs, words",
    slow_but(
        [
            ("scores", "x:fp32[4,8] weight:fp32[5,7]", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
            ("scores", "y:fp32[4,8]", "takes x, weight"),
            ("dies", "x:fp32[4,8]", "ended its process with status 7"),
        ],
        "scores",
    ),
)
def test_a_wrong_call_leaves_the_run_before_it_byte_for_byte(name, inputs, words, tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "out" / "any").mkdir(parents=True)
    (tmp_path / "out" / ".lock").touch()
    write_rows(tmp_path / "out" / "any" / "verdicts.json", [])
    contents = lambda: {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    before = contents()
    done = bi_audit("run", "any", "--candidate", f"wrong.py:{name}", "--inputs", inputs, "--out", "out")
    assert done.returncode == 2 and len(done.err.splitlines()) == 1 and not done.out, done
    assert words in done.err and f"wrong.py:{name}" in done.err and contents() == before
    assert bi_audit("run", "any", "--candidate", f"wrong.py:{name}", "--inputs", inputs, "--out", "new").returncode == 2
    assert not (tmp_path / "new").exists()


def test_inputs_are_what_was_asked_for(tmp_path):
    from bi_kernels.audit.targets.user_inputs import read_inputs

    found = read_inputs("x:bf16[3, 4] ids:int64[3]<5 mask:bool[3] eps:0.5 mean:None", "cpu", 0)
    assert list(found) == ["x", "ids", "mask", "eps", "mean"] and found["eps"] == 0.5 and found["mean"] is None
    assert (found["x"].dtype, found["x"].shape) == (torch.bfloat16, (3, 4)) and int(found["ids"].max()) < 5
    assert found["mask"].dtype == torch.bool and torch.equal(found["x"], read_inputs("x:bf16[3,4]", "cpu", 0)["x"])
    (tmp_path / "mine.py").write_text(CANDIDATE)
    assert list(read_inputs(f"{tmp_path}/mine.py:inputs", "cpu", 0)) == ["x", "eps"]


class TrainsOtherwise(torch.nn.Linear):
    def forward(self, x):
        return x * self.weight[0] * (1.5 if self.training else 1)


@pytest.mark.parametrize(
    "function, mode",
    [(lambda x: x * (1.5 if x.requires_grad else 1), MODES[0]), (TrainsOtherwise(WIDTH, 1).eval(), "train()")],
)
def test_what_trains_otherwise_than_it_rolls_out_is_found(function, mode):
    report = audit(function, X)
    assert {r.layout for r in in_need(report) if r.relation == "invariance"} == {mode}, report.markdown()


def refuses(condition, words):
    """Returns twice x, refused where the condition holds."""

    def double(x):
        if condition(x):
            raise RuntimeError(words)
        return x * 2

    return double


def test_a_refusal_of_gradients_is_said_and_another_mode_must_work():
    report = audit(refuses(lambda x: x.requires_grad, "no backward of this one"), X, backward=False)
    (row,) = (r for r in report.rows if r.layout == MODES[0])
    assert report.passed and row.verdict == UNSUPPORTED and "no backward of this one" in row.detail
    report = audit(refuses(lambda x: torch.is_inference_mode_enabled(), "no inference mode"), X)
    assert [r.layout for r in in_need(report)] == [MODES[1]] and "no inference mode" in in_need(report)[0].detail


@pytest.mark.slow
@pytest.mark.parametrize(
    "candidate, inputs, count",
    [("torch:relu", "x:fp32[40,8]", 8), ("bi_kernels:embedding", "ids:int64[40]<50 weight:bf16[50,16]", 6)],
)
def test_every_control_of_any_is_caught(candidate, inputs, count):
    session = start("any", candidate=candidate, inputs=inputs, device="cpu")
    session.judge()
    assert [r.caught for r in session.controls()] == [True] * count  # ids have no gradient
