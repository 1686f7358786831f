"""docs/add-an-op.md and the README are executed: what they say is what happens."""

import copy
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import click
import papermill
import pytest
import torch
import transformers
import triton
import triton.language as tl
from transformers import BatchEncoding, Qwen3Config, Qwen3ForCausalLM

import bi_kernels
from bi_kernels.audit.cli import cli
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX
from bi_kernels.audit.mutants import command as mutants
from bi_kernels.audit.runs import quick, runner

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r'^```(\w*)(?: title="([^"\n]*)")?(?: in="([^"\n]*)")?\n(.*?)^```$', re.M | re.S)


def blocks(name: str) -> list[tuple[str, str, str, str]]:
    """(language, title, what it goes into, text) of every fenced block."""
    return FENCE.findall((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_an_op_is_added_as_the_document_says(tmp_path):
    """In a copy of the package, by nothing but the document's blocks."""
    for folder in ("bi_kernels", "notebooks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    written, commands, files = 0, [], set()
    for language, title, place, text in blocks("docs/add-an-op.md"):
        if language == "bash":
            commands += text.splitlines()
            continue
        path = tmp_path / title
        files.add(title)
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = old.splitlines(keepends=True)
        at = next(i for i, line in enumerate(lines) if line.startswith(place)) + 1 if place else len(lines)
        gap = "" if place or not old else "\n\n"
        path.write_text("".join(lines[:at]) + gap + text + "".join(lines[at:]), encoding="utf-8")
        written += len([line for line in text.splitlines() if line.strip()])
    assert written < 60 and len(files) <= 4, f"{written} lines in {len(files)} files are not a short example"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    twice = "from bi_kernels import squared_relu as f; import bi_kernels as b, torch; b.squared_relu(f(torch.ones(2)))"
    subprocess.run([sys.executable, "-c", twice], cwd=tmp_path, env=environment, check=True)
    for command in commands:
        arguments = command.split()
        assert arguments[0] == "bi-audit"
        done = subprocess.run(
            [sys.executable, "-m", "bi_kernels.audit.cli", *arguments[1:], "--dtype", "bf16", "--out", "out"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and "0 need a fix" in done.stdout, (
            command + done.stdout[-3000:] + done.stderr[-2000:]
        )


PYTHON = [text for language, _, _, text in blocks("README.md") if language == "python"]
DEMO, MINE, MODEL, USE, TRAIN, RANKS, TENSOR, AUDIT, LOCATE = PYTHON
COMMANDS = [
    line.split("#")[0].strip()
    for language, _, _, text in blocks("README.md")
    if not language
    for line in text.splitlines()
]


def test_the_readme_uses_a_model(monkeypatch):
    """It is given ours, generates, is scored, makes a step, and is given its own back."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, pad_token_id=0, eos_token_id=None)).bfloat16()
    before, kind = [p.detach().clone() for p in model.parameters()], type(model)
    model.generation_config.suppress_tokens = [0]  # nothing ends, so nothing is padded
    tokens = BatchEncoding({"input_ids": torch.arange(1, 7).view(2, 3), "attention_mask": torch.ones(2, 3).long()})
    tokenizer = Mock(return_value=tokens, pad_token_id=0)
    # what stands on a server: the checkpoint, and its tokenizer
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, dtype: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, padding_side: tokenizer)
    small = (
        MODEL.replace("max_new_tokens=64", "max_new_tokens=6").replace('"cuda"', '"cpu"').replace("lr=1e-6", "lr=0.1")
    )
    exec(small, scope := {})
    assert scope["completions"].shape == scope["logprob"].shape == (2, 9) and scope["entropy"].requires_grad
    assert scope["mask"].all() and scope["logprob"][:, :-1].all() and not scope["logprob"][:, -1].any()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert type(model) is kind and all(p.grad.any() for p in model.parameters())


def test_the_readme_uses_the_kernels():
    exec(USE, names := {})
    assert names["logprob"].shape == names["entropy"].shape == (6,)
    assert names["out"].shape == (6, 2, 64) and names["lse"].shape == (6, 2) and names["one"].shape == (2, 1, 2, 64)


POLICY, LOOP = TRAIN.split("\ngrads = ")
LOOP = "grads = " + LOOP


def trained(splits: list[list[int]], loop: str = LOOP) -> tuple[list[torch.Tensor], torch.nn.Module]:
    """The weights after two steps of a loop of the README, and a model as it was; splits: the sequences of each
    micro-batch, or group."""
    exec(POLICY, scope := {"torch": torch})
    lengths = [5, 17, 9]
    batches = [scope["batch"](*(lengths[i] for i in split)) for split in splits]
    groups = [[batch] for batch in batches] + [[]] * (8 - len(batches))
    step = SimpleNamespace(micro_batches=batches, groups=groups, active_tokens=sum(lengths))
    torch.manual_seed(0)
    model = scope["Policy"]()
    fresh = copy.deepcopy(model)
    exec(loop, scope | {"model": model, "steps": [step, step]})
    return [p.detach() for p in model.parameters()], fresh


def test_the_readme_trains_and_the_split_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(TRAIN, {})  # as it stands
    (tmp_path / "step.pt").unlink()
    (whole, _), (cut, resumed) = trained([[0, 1, 2]]), trained([[0], [1, 2]])
    assert all(torch.equal(a, b) for a, b in zip(whole, cut))
    assert not any(torch.equal(a, b.detach()) for a, b in zip(whole, resumed.parameters()))
    grads = bi_kernels.MainGrads(resumed.parameters(), tied=[resumed.embedding.weight])
    grads.load_state_dict(torch.load("step.pt")["grads"])
    assert all(torch.equal(a, b.detach()) for a, b in zip(whole, resumed.parameters()))


def test_the_readme_trains_on_ranks(tmp_path):
    """Of which there is one; tests/test_parallel.py has more."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        loops = RANKS, RANKS.replace("world=world", "world=world, sharded=True")
        found = [trained([[0], [1, 2]], loop)[0] for loop in loops]
    finally:
        torch.distributed.destroy_process_group()
    alone, fresh = trained([[0], [1, 2]], RANKS.replace("torch.distributed.group.WORLD", "None"))
    assert all(torch.equal(a, b) for weights in found for a, b in zip(weights, alone))
    assert not any(torch.equal(a, b.detach()) for a, b in zip(alone, fresh.parameters()))


def test_the_readme_cuts_weights_over_ranks(tmp_path):
    """Of which there is one; tests/test_tensor_parallel.py has more."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    small = TENSOR.replace('"cuda"', '"cpu"').replace("(2, 4)", "(1, 1)").replace("qwen3-8b", "tiny")
    try:
        exec(small, scope := {"bi": bi_kernels, "torch": torch})
    finally:
        torch.distributed.destroy_process_group()
    assert len(scope["grads"].masters) == len([*scope["model"].parameters()])


@triton.jit
def _double_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2.0 * tl.load(x + at, mask=at < n), mask=at < n)


def doubled(x, out):
    _double_kernel[(triton.cdiv(x.numel(), 64),)](x.contiguous(), out, x.numel(), BLOCK=64)


class OnlyTokens(torch.nn.Module):
    """A model whose logits hang on their own token alone."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(9, 4))

    def forward(self, input_ids, attention_mask=None):
        return bi_kernels.embedding(input_ids, self.table)


@pytest.mark.slow
def test_the_readme_audits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    scope = {
        "my_module": torch.nn.Tanh(),
        "my_model": OnlyTokens(),
        "input_ids": torch.randint(0, 9, (8, 6)),
        "attention_mask": torch.ones(8, 6, dtype=torch.int64),
        "my_op": lambda x, weight: x * weight,
        "my_launcher": doubled,
        "exact": torch.tanh,
    }
    exec(re.sub(r"^audit\((.*)\)(\s+#.*)$", r"said.append(audit(\1))", AUDIT, flags=re.M), scope | {"said": said})
    op, *others = said
    assert len(others) == 4 and not [r for report in others for r in report.rows if r.verdict == NEEDS_FIX]
    assert {r.tensor for r in op.rows if r.verdict == NEEDS_FIX} == {"dweight"}, "torch adds that up by the split"


@pytest.mark.slow
def test_the_readme_locates():
    said = []
    exec(re.sub(r"^locate\((.*)\)(\s+#.*)$", r"said.append(locate(\1))", LOCATE, flags=re.M), {"said": said})
    assert len(said) == 2 and all(report.passed for report in said)


@pytest.mark.slow(but=["gemm"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_commands_are_right(command, tmp_path, monkeypatch):
    """What they would run is looked at; the tests run the same elsewhere."""
    program, *arguments = shlex.split(command)
    if program in (".", "export", "python"):  # tests/test_first_hour.py runs them
        return
    if program == "make":
        assert f"\n{arguments[0]}: " in (ROOT / "Makefile").read_text()
        return
    assert program == "bi-audit"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def my_op(x, weight):\n    return x\n\n\nlinear = f = attention = my_scores = mended = my_op\n"
    )
    started = []
    monkeypatch.setattr(runner, "run", lambda names, parameters, *rest: started.append((names, parameters)))
    monkeypatch.setattr(quick, "run", lambda of_each, *rest: started.append(of_each) or {})
    monkeypatch.setattr(mutants, "run", lambda names, sample, *rest: (started.append((names, sample)) or "", []))
    (tmp_path / "audits").mkdir()
    with pytest.raises((SystemExit, click.UsageError)) as end:
        cli.main(arguments, standalone_mode=False)
        raise SystemExit
    refused = isinstance(end.value, click.UsageError)
    assert refused == ("qwen3-8b" in arguments) and (not refused or "needs a CUDA device" in str(end.value))
    assert bool(started) == (arguments[0] in ("run", "mutate") and not refused)


def test_papermill_runs_a_notebook_as_the_readme_says():
    notebook, parameter = re.search(r"`papermill (\S+) \S+ -p (\w+) bf16`", (ROOT / "README.md").read_text()).groups()
    assert parameter in papermill.inspect_notebook(str(ROOT / notebook))


def test_the_figure_of_the_fold_is_true():
    tool = runpy.run_path(str(ROOT / "tools" / "draw_fold.py"), run_name="tool")
    different = {name: len(set(tool["orders"](op).values())) for name, op in tool["OPS"].items()}
    assert different == {"bi_kernels": 1, "torch": 2}
    assert all((ROOT / "docs" / f"fold_{name}.png").is_file() for name in different)
