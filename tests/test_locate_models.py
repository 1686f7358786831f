"""The localiser on other people's models: outputs of any structure, patched forwards, fused kernels, a rollout."""

import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import nn

from bi_kernels.audit import locate
from bi_kernels.audit.localiser.tracing.events import named_tensors
from bi_kernels.audit.localiser.tracing.geometry import Tokens
from bi_kernels.audit.localiser.tracing.layouts import grids

X = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(0))


def shows_alone(script) -> bool:
    """Tells whether a script shows a drift in a process of its own."""
    alone = subprocess.run([sys.executable, script.name], cwd=script.parent, capture_output=True, text=True)
    return alone.returncode == 1 and "elements differ" in alone.stdout


class Pair(NamedTuple):
    good: object
    bad: object = None


@dataclass
class Output:
    good: object
    bad: object = None
    loss: object = None


OUTPUTS = {
    "out.bad": Output,
    "out.good.bad": lambda good, bad: Output(Pair(good, bad)),
    "out['bad'][1]": lambda good, bad: {"good": good, "bad": [None, bad]},
    "out.bad['x'].bad": lambda good, bad: SimpleNamespace(good=good, bad={"x": Output(None, bad)}),
}


@pytest.mark.parametrize("drifts", [True, False])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_compared_leaf_by_leaf(name, drifts):
    report = locate(lambda x: OUTPUTS[name](x * 2, x / (len(x) if drifts else 3)), X, backward=False)
    assert report.output and report.passed != drifts
    assert report.notes == [f"Outputs that differ between batch and singles: {name}."] * drifts, report


def test_gradients_go_through_a_dataclass_and_what_is_not_compared_is_named():
    report = locate(lambda x: Output(x * 3, x * 2, x.mean()), X)
    assert "Outputs that are not compared between batch and singles: out.loss." in report.notes, report
    rounds = lambda grad: grad * (1 + 2**-10) if len(grad) > 1 else grad

    def model(x):
        y = x * 2
        y.requires_grad and y.register_hook(rounds)
        return Output(y * 3)

    assert [c.direction for c in locate(model, X).causes] == ["backward"]


def test_an_object_behind_a_plain_object_is_not_opened():
    """Such as the layers of a cache, which are no output."""
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=X)], sums=X)
    assert [name for name, _ in named_tensors({"cache": cache, "ids": X.long()})] == ["out['cache'].sums"]


class Same(nn.Module):
    def forward(self, x):
        return x


def own(self, x):
    return x / len(x)


def patched(where: str) -> nn.Module:
    """Returns a model of which something is patched, so that its last module divides by the size of the batch."""
    model = nn.Sequential(nn.Tanh(), type("Theirs", (Same,), {})())
    last = model[1]
    match where:
        case "instance":
            model.forward = MethodType(lambda self, x: own(self, self[0](x)), model)
        case "submodule":
            last.forward = MethodType(own, last)
        case "class":
            type(last).forward = own
        case "partial":
            last.forward = partial(own, last)
        case "hook":
            last.register_forward_hook(lambda module, args, out: own(module, out))
        case "compiled":
            last.forward = torch.compile(MethodType(own, last), backend="aot_eager")
    return model


@pytest.mark.parametrize("where", ["instance", "submodule", "class", "partial", "hook", "compiled", "none"])
def test_a_patched_forward_is_named_by_its_module_and_line(where, tmp_path):
    report = locate(patched(where), X, backward=False, folder=tmp_path)
    if where == "none":
        assert report.passed
        return
    (cause,) = report.causes
    file, _, line = cause.source.rpartition(":")
    assert cause.op == "compiled " * (where == "compiled") + "aten.div.Tensor" and file == "tests/test_locate_models.py"
    assert cause.path == ("" if where == "instance" else "1") and cause.script
    assert where == "compiled" or int(line) == own.__code__.co_firstlineno + 1


class If(nn.Module):
    """Multiplies, by a little more where its condition holds."""

    def __init__(self, condition):
        super().__init__()
        self.condition, self.calls = condition, 0
        self.register_buffer("ticks", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.ticks += 1
        return x * (1 + 2**-10 * bool(self.condition(self)))


def doubled(x):
    return x * 2


def only_hooked():
    model = nn.Sequential(nn.Tanh(), Same())
    model[1].register_forward_hook(lambda module, given, out: doubled(out))
    return model


def only_patched():
    model = nn.Sequential(nn.Tanh(), Same())
    model[1].forward = doubled
    return model


host = lambda condition: nn.Sequential(nn.Tanh(), If(condition))
MODES = {  # a pair of modes, and a model that no other pair catches
    ("no_grad", "grad"): host(lambda m: torch.is_grad_enabled()),
    ("no_grad", "inference_mode"): host(lambda m: torch.is_inference_mode_enabled()),
    ("eval", "train"): host(lambda m: m.training),
    ("given", "hooks"): host(lambda m: m._forward_hooks or m._forward_pre_hooks),
    ("given", "no_hooks"): only_hooked(),
    ("given", "no_patches"): only_patched(),
    ("call:1", "call:40"): host(lambda m: m.calls > 30),
}


@pytest.mark.parametrize("modes", MODES, ids=" and ".join)
def test_a_drift_between_two_modes_is_named_and_no_other_pair_sees_it(modes, tmp_path):
    model, grad = MODES[modes].train(), modes[1] not in ("grad", "no_hooks", "no_patches")
    hooks, forward, state = dict(model[1]._forward_hooks), model[1].__dict__.get("forward"), dict(vars(model[1]))
    report = locate(model, X, modes=modes, backward=False, folder=tmp_path)
    assert vars(model[1]) == state, "each run has a copy"
    assert [c.path for c in report.causes] == ["1"] and "aten.mul.Tensor" in report.first.op, report
    assert report.first.source.startswith("tests/test_locate_models.py:") and report.layouts == modes
    assert not grad or report.first.script and report.first.drift.mismatches
    others = [("batch", "singles"), *(pair for pair in MODES if pair != modes)]
    for pair in others:
        told = {"modes": pair} if pair in MODES else {"layouts": pair}
        assert (found := locate(model, X, backward=False, **told)).passed, (pair, found)
    assert model.training and dict(model[1]._forward_hooks) == hooks and model[1].__dict__.get("forward") is forward


def test_a_late_call_says_which_buffers_differ_and_compares_the_backward():
    report = locate(MODES["call:1", "call:40"], X, modes=("call:1", "call:40"))
    assert {c.direction for c in report.causes} == {"forward", "backward"}
    assert report.notes == ["Buffers that differ before the call between call:1 and call:40: 1.ticks."]


def test_what_is_no_mode_is_one_sentence():
    for model, told, said in (
        (nn.Tanh(), {"modes": ("train", "test")}, "modes holds 'test', expected given, grad, .* or call:NUMBER"),
        (nn.Tanh(), {"modes": ("call:0", "call:1")}, "modes holds 'call:0'"),
        (nn.Tanh(), {"modes": ("train",)}, "modes is .'train',., expected two or more different modes"),
        (nn.Tanh(), {"modes": ("train", "eval"), "layouts": ("batch", "singles")}, "expected one layout"),
        (torch.tanh, {"modes": ("train", "eval")}, "modes holds 'train', which needs an nn.Module"),
    ):
        with pytest.raises(ValueError, match=said):
            locate(model, X, **told)


def test_a_model_that_cannot_be_copied_says_so():
    model, modes = host(lambda m: m.calls > 2), ("call:1", "call:3")
    model.lock = threading.Lock()  # which a copy shares
    report = locate(model, X, modes=modes, backward=False)
    assert report.first.op == "aten.mul.Tensor" and len(report.notes) == 1 and not model[1].calls, report
    model[1].__class__ = type("Single", (If,), {"__deepcopy__": lambda self, memo: 1 / 0})
    report = locate(model, X, modes=modes[:1] + ("given",), backward=False)
    assert report.passed and report.notes[0].startswith("Sequential cannot be copied, so each run begins"), report


def test_bi_audit_locates_between_modes(bi_audit, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def build():\n    return nn.Sequential(nn.Tanh(), nn.Dropout()), torch.ones(3, 4, 8)\n"
    )
    command = "locate", "--candidate", f"{tmp_path / 'mine.py'}:build", "--forward", "--modes"
    done = bi_audit(*command, "eval,train")
    assert done.returncode == 1 and "eval against train" in done.out, done
    assert bi_audit(*command, "eval,no_grad").returncode == 1 and bi_audit(*command, "eval,eval").returncode == 2


@triton.jit
def norm_residual_kernel(x, residual, y, F, T: tl.constexpr, C: tl.constexpr):
    """Adds x to the residual, in place, and writes its norm; the sum of squares is taken by T columns."""
    at, total = tl.program_id(0) * F, 0.0
    for first in range(0, F, T):
        k = at + first + tl.arange(0, T)
        h = tl.load(x + k) + tl.load(residual + k)
        tl.store(residual + k, h)
        total += tl.sum(h * h, 0)
    k = at + tl.arange(0, C)
    tl.store(y + k, tl.load(residual + k) / tl.sqrt(total / F))


def in_triton(x, width: int):
    x, residual, y = x.contiguous(), x * 0.5, torch.empty_like(x)
    norm_residual_kernel[(x.numel() // 64,)](x, residual, y, 64, T=width, C=64)
    return {"y": y, "residual": residual}


@torch.library.custom_op("test_locate_models::norm_residual", mutates_args={"residual"})
def norm_residual(x: torch.Tensor, residual: torch.Tensor, width: int) -> list[torch.Tensor]:
    residual.add_(x)
    squares = residual.square().unflatten(-1, (-1, width)).sum(-1)
    return [x * 2, residual * (sum(squares.unbind(-1))[..., None] + 1).rsqrt()]


def in_custom_op(x, width: int):
    residual = x * 0.5
    double, y = norm_residual(x * 1, residual, width)
    return {"double": double, "y": y, "residual": residual}


FUSED = {"norm_residual_kernel": in_triton, "test_locate_models.norm_residual": in_custom_op}


@pytest.mark.parametrize("drifts", [True, False])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel_is_named_with_the_output_that_drifts(name, drifts, tmp_path):
    report = locate(lambda x: FUSED[name](x, 8 if len(x) > 1 and drifts else 64), X, backward=False, folder=tmp_path)
    assert [c.op for c in report.causes] == [name] * drifts, report
    if drifts:
        assert "Outputs that differ between batch and singles: out['y']." in report.notes
        assert report.first.drift.mismatches and shows_alone(report.first.script)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return in_triton(grad, ctx.factor)["y"], None


@pytest.mark.parametrize("drifts", [True, False])
def test_a_kernel_in_the_backward_of_a_function_is_named(drifts):
    report = locate(lambda x: Scaled.apply(x, 8 if len(x) > 1 and drifts else 64), X)
    assert [(c.op, c.direction) for c in report.causes] == [("norm_residual_kernel", "backward")] * drifts, report


def test_a_prefill_comes_before_the_decode():
    widths = lambda layout: [grid.size for _, grid, _ in grids(layout, Tokens((11, 8, 3)))]
    assert widths("decode:8") == [8, 1, 1, 1, 8, 3] and widths("decode") == [1] * 22
    assert widths("chunked:8") == [8, 3, 8, 3] and widths("chunked") == [7, 4, 7, 1, 3]


@pytest.mark.parametrize("size", ["0", "-1", "x"])
def test_a_wrong_prefill_is_one_sentence(size):
    with pytest.raises(ValueError, match=f"layouts holds 'decode:{size}', expected .* or decode:PREFILL"):
        locate(nn.Tanh(), X, ("batch", f"decode:{size}"))


def test_a_call_against_prefill_and_decode_names_the_product(tmp_path):
    """The case that RL-Kernel published: 17 tokens of a Qwen3 in one call, against a prefill of 8, then one by one."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hf.Qwen3Config(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    model, ids = hf.Qwen3ForCausalLM(config), [torch.randint(160, (17,))]
    report = locate(model, ids, ("singles", "decode:8"), rounds=1, folder=tmp_path)
    first = report.first
    assert first.direction == "forward" and first.path.startswith("model.layers.0.") and "mm" in first.op, report
    assert first.source.startswith("models/qwen3/modeling_qwen3.py:") and shows_alone(first.script)
    same = locate(model, ids, ("singles", "decode:17"))
    assert same.passed and same.compared, same


@pytest.mark.parametrize("drifts", [True, False])
def test_experts_on_sorted_rows_are_one_cause_or_none(drifts):
    """As Transformers' grouped_mm: two rows a token, sorted by expert, and put back."""
    weights = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0))

    def model(x):
        tokens = x.flatten(0, -2)
        _, perm = torch.sort(
            (tokens[:, :2] > 0).long().sum(1, keepdim=True).add(torch.arange(2)).remainder(3).flatten()
        )
        y = tokens[perm // 2] * weights.diagonal(dim1=1, dim2=2)[0]
        back = torch.empty_like(perm)
        back[perm] = torch.arange(len(perm))
        y = y / (len(x) if drifts else 3)
        return y[back].view(len(tokens), 2, 64).sum(1).view_as(x)

    report = locate(model, X, backward=False)
    named = "aten.index.Tensor → aten.mul.Tensor → aten.div.Tensor"
    assert [c.op for c in report.causes] == [named] * drifts and report.output, report
