"""The localiser: it names nothing on what is invariant, and on what is broken the op that is."""

import contextlib
import dataclasses
import importlib
import io
import json
import subprocess
import sys

import pytest
import torch
from conftest import slow_but
from locator.faults import FAULTS
from locator.hosts import decoder, ids, qwen3
from locator.run import run_faults
from torch import nn

import bi_kernels
from bi_kernels.audit import locate
from bi_kernels.audit.localiser.locate import against, record
from bi_kernels.audit.targets.decoder_controls import with_ops
from bi_kernels.model import CONFIGS, Decoder


def shows(script) -> bool:
    """Tells whether a script, run in this process, shows a drift."""
    names = {"__file__": str(script), "__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as end:
        exec(compile(script.read_text(), str(script), "exec"), names)
    return end.value.code == 1 and "elements differ" in printed.getvalue()


OURS = {"prefill": (("packed", "singles", "left_padded"), 500), "decode": (("packed", "decode", "chunked:7"), 100)}


@pytest.mark.parametrize("name", slow_but(OURS, "decode"))
def test_nothing_is_named_on_our_decoder(name):
    layouts, least = OURS[name]
    dtype = torch.bfloat16 if name == "prefill" else torch.float32
    report = locate(decoder("cpu", ops=bi_kernels, dtype=dtype), ids(), layouts)
    assert report.passed and report.compared > least and report.events >= 60, report


@pytest.mark.parametrize(
    "lengths", [(5, 3), *(pytest.param(of, marks=pytest.mark.slow) for of in ((19, 3), (4, 11, 1, 1)))]
)
def test_nothing_is_named_where_few_tokens_divide_the_models_sizes(lengths):
    torch.manual_seed(0)
    model, batch = Decoder(CONFIGS["tiny"], "cpu"), [torch.randint(0, CONFIGS["tiny"].vocab, (n,)) for n in lengths]
    report = locate(model, batch, ("batch", "left_padded"))
    assert report.passed and report.compared > 100, report


def test_nothing_is_named_where_every_op_is_invariant():
    report = locate(decoder("cpu"), ids(), ("batch", "permuted", "singles"))
    assert report.passed and report.compared > 1000, report
    transformers = pytest.importorskip("transformers")
    assert transformers and locate(*qwen3("cpu", "no module", None), ("batch", "singles")).passed


# parts of the names of those in `make test`; and one of each direction, whose scripts are run
QUICK = "splits K", "autocast", "user's module", "tile follows", "q_proj", "residual rounded", "whose dX splits the sum"
SHOWN = "residual rounded to bf16", "linear whose dX splits the sum", "linear whose dW splits the tokens"


@pytest.mark.parametrize(
    "name", [pytest.param(f.name, marks=[pytest.mark.slow] * all(t not in f.name for t in QUICK)) for f in FAULTS]
)
def test_a_fault_is_named_and_its_script_shows_it_alone(name, tmp_path):
    if "Transformers" in name:
        pytest.importorskip("transformers")
    shown = name.startswith(SHOWN)
    (line,) = run_faults("cpu", [name], tmp_path if shown else None)
    assert line["right"], line["report"]
    assert not shown or line["report"].first.drift.mismatches and shows(line["scripts"][0])
    if name.startswith(SHOWN[-1]):  # in a process of its own, which knows nothing of the model
        script = line["scripts"][0]
        alone = subprocess.run([sys.executable, script.name], cwd=script.parent, capture_output=True, text=True)
        assert alone.returncode == 1 and "elements differ" in alone.stdout, alone.stderr


def two_causes(x):
    """The second op drifts by itself, behind one that drifts already."""
    h = x * (1 + 2**-10) if x.shape[0] > 1 else x
    h = h - 0.5
    return (h / h.shape[0]).exp2()


def test_independent_causes_are_told_from_what_follows():
    report = locate(two_causes, torch.randn(4, 6, 64), backward=False)
    assert [c.op for c in report.causes] == ["aten.mul.Tensor in batch", "aten.div.Tensor"], report
    one = locate(two_causes, torch.randn(4, 6, 64), backward=False, rounds=1)
    assert one.complete is False and one.verdict.startswith("At least 1 op drifts")


def odd(x, scale, flag):
    """Samples in dimension 1, nested outputs, None among them, an output of a sample as a whole."""
    h = (x.transpose(0, 1) * scale[:, 0, None]).contiguous()
    mean = h.sum(0) / h.shape[0]
    worse = mean * (1 + 2**-10) if flag and x.shape[0] > 1 else mean
    return {"all": (h, [None, {"worse": worse}]), "number": 3}


@pytest.mark.parametrize("flag, named", [(False, []), (True, ["aten.mul.Tensor in batch"])])
def test_a_users_odd_model(flag, named):
    batch = {"x": torch.randn(4, 6, 64), "scale": torch.rand(4, 64), "flag": flag}
    report = locate(odd, batch, ("batch", "singles", "permuted"), backward=False)
    assert [c.op for c in report.causes] == named, report


def test_a_packing_of_the_users_own():
    weight = torch.randn(64)

    def model(x):
        return x * weight if len(x) > 5 else x * weight * (1 + 2**-10)

    def calls(samples, layout):
        pairs = [torch.tensor([[s, p] for p in range(len(x))]) for s, x in enumerate(samples)]
        if layout == "mine":
            return [((torch.cat(samples),), {}, torch.cat(pairs))]
        return [((x,), {}, at) for x, at in zip(samples, pairs)]

    samples = [torch.randn(n, 64) for n in (4, 5)]
    assert len(locate(model, samples, ("mine", "each"), calls=calls, backward=False).causes) == 1
    assert locate(lambda x: x * weight, samples, ("mine", "each"), calls=calls, backward=False).passed


def test_two_recorded_runs(tmp_path):
    folder = tmp_path / "run"
    record(decoder("cpu"), ids(), "singles", folder)
    assert against(decoder("cpu"), ids(), "batch", folder).passed
    rounded = next(f for f in FAULTS if f.name.startswith(SHOWN[0])).build("cpu")[0]
    report = against(rounded, ids(), "batch", folder)
    assert report.first.path == "layers.0" and "_to_copy" in report.first.op, report
    with torch.no_grad():
        rounded.embedding[3] += 1
    assert "weights differ (1, embedding)" in str(against(rounded, ids(), "batch", folder))
    with pytest.raises(ValueError, match="recording of another batch, of samples of .7, 1, 18. tokens"):
        against(rounded, ids()[::-1], "batch", folder)
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"format": 99}))
    with pytest.raises(ValueError, match="is a recording of format 99 .*, expected format 1"):
        against(rounded, ids(), "batch", folder)
    with pytest.raises(ValueError, match="holds no recorded run"):
        against(rounded, ids(), "batch", tmp_path)


def test_a_layout_moves_no_gradient_of_the_users():
    model = decoder("cpu")
    model.embedding.grad = torch.ones_like(model.embedding)
    locate(model, ids())
    assert (
        (model.embedding.grad == 1).all() and model.last_norm.grad is None and not hasattr(model.lm_head, "main_grad")
    )


two_devices = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize(
    "model, batch, layouts, said",
    [
        (two_devices, torch.zeros(2, 2), ("batch", "singles"), "model is on cpu and meta, expected all of it on one"),
        (nn.Tanh(), torch.zeros(2, 2), ("batch",), "expected two or more different layouts"),
        (nn.Tanh(), torch.zeros(2, 2), ("batch", "sideways"), "layouts holds 'sideways', expected batch, singles"),
        (nn.Tanh(), torch.zeros(2, 2), ("batch", "decode"), "layouts holds 'decode', which Tanh does not support"),
        (nn.Tanh(), "text", ("batch", "singles"), "batch is a str, expected a tensor, a list of tensors"),
        (3, torch.zeros(2, 2), ("batch", "singles"), "model is a int, expected an nn.Module or a function"),
        (decoder("cpu"), torch.zeros(2, 2), ("batch", "singles"), "expected for Decoder a list of 1-D tensors"),
        (decoder("cpu"), [torch.tensor([99])], ("batch", "singles"), "batch holds token ids outside 0 to 22"),
    ],
)
def test_bad_input_is_one_sentence(model, batch, layouts, said):
    with pytest.raises(ValueError, match=said) as raised:
        locate(model, batch, layouts)
    assert "\n" not in str(raised.value)


def attends(x):
    """Attention over all places of a row, padding's too."""
    return (x @ x.transpose(1, 2)).softmax(-1) @ x


def attends_masked(x, key_mask=None):
    hidden = torch.zeros(()) if key_mask is None else (key_mask[:, None] == 0) * -1e9
    return (x @ x.transpose(1, 2) + hidden).softmax(-1) @ x


RAGGED = [torch.randn(n, 64) / 8 for n in (7, 4, 11)]  # so that no key has all of the weight
MASKS = [torch.ones(len(x), dtype=torch.int64) for x in RAGGED]


@pytest.mark.parametrize(
    "model, batch, named",
    [
        (attends, RAGGED, "attention_mask"),
        (attends_masked, RAGGED, "key_mask"),
        (attends_masked, {"x": RAGGED, "key_mask": MASKS}, ""),
        (lambda x: x / x.shape[0], RAGGED, ""),
        (attends, [torch.randn(7, 64) for _ in range(3)], ""),
    ],
    ids=["takes no mask", "is given no mask", "is given a mask", "reads no padding", "no padding"],
)
def test_drift_by_padding_that_no_mask_hides_is_said_to_be_the_callers(model, batch, named):
    report = locate(model, batch, ("singles", "batch"), backward=False)
    said = [sentence for sentence in report.warnings if "padding" in sentence]
    assert len(said) == bool(named), report
    assert not named or report.causes and named in said[0] and "caller" in said[0] and said[0] in report.markdown()


def test_a_report_begins_with_the_verdict_and_fits_a_terminal():
    report = locate(two_causes, torch.randn(4, 6, 64), backward=False)
    assert str(report).startswith("2 ops drift. First: aten.mul.Tensor in batch (forward), tests/test_locate.py:")
    assert report._repr_markdown_().startswith("###") and "| op |" in report._repr_markdown_()
    wide = dataclasses.replace(report, model="x" * 30, notes=["many words of a note " * 9])
    assert max(map(len, str(wide).splitlines())) <= 100


MINE = """
import torch

def good():
    return torch.nn.Tanh(), torch.randn(4, 6, 64)

def bad():
    return (lambda x: x / x.shape[0]), torch.randn(4, 6, 64)

def nothing():
    return 3

def raises():
    raise RuntimeError("no such weights")
"""


def test_bi_audit_locate(bi_audit, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    call = lambda name, *more: bi_audit("locate", "--candidate", f"{mine}:{name}", *more)
    assert call("good").returncode == 0
    found = call("bad", "--out", tmp_path / "out")
    assert found.returncode == 1 and "aten.div" in found.out and shows(next((tmp_path / "out").glob("*.py")))
    recorded = call("bad", "--record", tmp_path / "run", "--layouts", "batch")
    assert recorded.returncode == 0 and "recorded 24 tokens of batch" in recorded.out
    assert call("bad", "--against", tmp_path / "run", "--layouts", "singles").returncode == 1
    for name, more, said in (
        ("nothing", (), "returned int, expected (model, batch) or (model, batch, loss)"),
        ("raises", (), "raised RuntimeError: no such weights"),
        ("missing", (), "has no function missing"),
        ("good", ("--layouts", "batch,upside"), "layouts holds 'upside'"),
        ("good", ("--record", tmp_path, "--against", tmp_path), "give one of them"),
        ("good", ("--record", tmp_path, "--layouts", "batch,singles"), "expected one layout"),
        ("good", ("--against", tmp_path), "holds no recorded run"),
    ):
        done = call(name, *more)
        assert done.returncode == 2 and said in done.err and done.err.count("\n") == 1, done


def routed(x, late: bool = False):
    """Sorts tokens by expert, weighs them there, and puts them back; late: rounded where many lie beside them."""
    t = x.flatten(0, -2)
    expert = (t[:, 0] > 0).long()
    order = expert.argsort(stable=True)
    y = t[order] * torch.linspace(0.5, 2, 128).view(2, 64)[expert[order]]
    if late and len(t) > 8:
        y = y.bfloat16().float()
    return torch.zeros_like(t).index_copy(0, order, y).view_as(x)


@pytest.mark.parametrize("drifts", slow_but([False, True], True))
def test_rows_that_are_sorted_by_expert_are_nobodys_and_hide_nothing(drifts):
    def experts(x, weight, groups):
        y = bi_kernels.grouped_linear(x, weight, groups)
        return bi_kernels.scale(y, 1.125) if drifts and len(y) < 40 else y

    config = dataclasses.replace(CONFIGS["tiny-experts"], layers=1)
    model, batch = Decoder(config, ops=with_ops(grouped_linear=experts)), [torch.arange(n) for n in (5, 9)]
    for layouts, wrong in ((("batch", "micro_batches"), drifts), (("singles", "decode"), False)):
        found = locate(model, batch, layouts, rounds=1).causes
        assert ["_grouped_kernel" in cause.op for cause in found] == [True] * wrong


def test_tokens_that_are_only_moved_do_not_drift_and_hide_nothing():
    x = torch.randn(6, 5, 64)
    assert locate(routed, x, backward=False).passed
    report = locate(lambda x: routed(x, late=True), x, backward=False)
    assert report.first.op.startswith("aten.index.Tensor → aten.mul.Tensor → aten._to_copy → "), report
    assert not locate(lambda x: x.flip(0), x, ("batch", "permuted")).passed, "another order of the output itself"


def test_an_output_that_cannot_be_compared_is_no_pass():
    x = torch.randn(6, 5, 64)
    assert locate(lambda x: x.sum((0, 1)).expand(6, 64) * 1, x, backward=False).unaligned
    report = locate(lambda x: (x * 2).mean(), x, backward=False)
    assert not report.passed and not report.causes and "output, which was not compared" in str(report)
    with pytest.raises(ValueError, match="no tensor of it could be compared"):
        locate(lambda x: None, x)
    with pytest.raises(ValueError, match=r"loss returned shape \(\), expected a value a token"):
        locate(torch.nn.Tanh(), x, loss=lambda out, tokens: out.sum())
    with pytest.raises(ValueError, match="rounds is 0, expected at least 1"):
        locate(torch.nn.Tanh(), x, rounds=0)


def test_a_model_that_raises_is_told_from_one_that_drifts_and_is_left_as_it_was():
    model, x = nn.BatchNorm1d(5), torch.randn(6, 5, 64)
    mean, drawn = model.running_mean.clone(), torch.get_rng_state()
    assert not locate(model, x, ("batch", "permuted"), backward=False).causes
    assert torch.equal(model.running_mean, mean) and torch.equal(torch.get_rng_state(), drawn)

    def broken(x):
        return x + undefined  # noqa: F821

    with pytest.raises(ValueError, match=r"the model raised in layout 'batch', tests/test_locate.py:\d+: NameError"):
        locate(broken, x)


KERNEL = """
import triton, triton.language as tl

@triton.jit
def {name}(x, y, F, T: tl.constexpr):
    r, acc = tl.program_id(0), 0.0
    for at in range(0, F, T):
        k = at + tl.arange(0, T)
        acc += tl.sum(tl.load(x + r * F + k, mask=k < F, other=0.0), 0)
    tl.store(y + r, acc * {factor})
"""
NESTED = "def made():" + KERNEL.replace("\n", "\n    ") + "return {name}\n"


def kernel_of(folder, module: str, source: str, name: str, factor: float = 1.0):
    (folder / f"{module}.py").write_text(source.format(name=name, factor=factor))
    return importlib.import_module(module)


@pytest.mark.slow
def test_scripts_tell_kernels_of_one_name_apart_and_no_name_costs_the_report(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    x = torch.randn(3, 5, 33)

    def named_by(one, other, tile=16):
        def model(x):
            y = torch.empty(x.shape[:2])
            many = len(x) > 1
            (one if many else other)[(y.numel(),)](x.contiguous(), y, x.shape[2], T=64 if many else tile)
            return y

        return locate(model, x, backward=False, folder=tmp_path / "out", rounds=1).first

    one, other = (kernel_of(tmp_path, f"m{n}", KERNEL, "kernel", n).kernel for n in (1, 2))
    assert shows(named_by(one, other, 64).script)
    t = kernel_of(tmp_path, "m3", KERNEL, "t").t  # as a script calls what it loads
    assert shows(named_by(t, t).script)
    closure = kernel_of(tmp_path, "m4", NESTED, "kernel").made()
    assert named_by(closure, closure).script is None
