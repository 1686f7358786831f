"""README and docs are executed: every block of code runs from the wheel, and every command is one."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import papermill
import pytest

from bi_kernels.audit import Recorder, cli
from bi_kernels.audit.faults import UsageError
from bi_kernels.audit.localiser import command as localiser
from bi_kernels.audit.runs import runner
from mutation import command as mutants

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r'^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```$', re.M | re.S)


def blocks(name: str) -> list[tuple[str, str, str]]:
    """(language, title, text) of every fenced block."""
    return FENCE.findall((ROOT / name).read_text(encoding="utf-8"))


def test_the_tables_of_the_readme_say_what_the_reports_say():
    command = [sys.executable, str(ROOT / "tools" / "readme.py"), "--check", "models", "ops", "speed"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_an_op_is_added_as_the_document_says(tmp_path):
    """In a copy of the package, by nothing but the document's blocks."""
    for folder in ("bi_kernels", "notebooks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    every = blocks("docs/add-an-op.md")
    for language, title, text in every:
        if language != "bash":
            path = tmp_path / title
            old = path.read_text(encoding="utf-8") + "\n\n" if path.exists() else ""
            path.write_text(old + text, encoding="utf-8")
    first = every[: next(i for i, (language, *_) in enumerate(every) if language == "bash")]
    assert len(first) <= 3 and len([line for *_, text in first for line in text.splitlines() if line.strip()]) <= 55
    commands = [line for language, _, text in every if language == "bash" for line in text.splitlines()]
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


DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
ALONE = ("docs/add-an-op.md", "docs/ci.md", "docs/trl.md")  # whose blocks have tests of their own
PYTHON = {
    f"{name}:{i}": text
    for name in DOCUMENTS
    if name not in ALONE
    for i, text in enumerate(t for language, _, t in blocks(name) if language == "python")
}
COMMANDS = {
    line.split("#")[0].strip(): name
    for name in DOCUMENTS
    if name not in ALONE
    for language, _, text in blocks(name)
    if not language and "<!--" not in text
    for line in text.splitlines()
    if line.startswith(("bi-audit ", "make ", "papermill "))
}

SMALL = """
import torch, transformers
from transformers import BatchEncoding, Qwen3Config, Qwen3ForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "head_dim": 16}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
config = Qwen3Config(**sizes, **heads, pad_token_id=0, eos_token_id=None)

def from_pretrained(name, dtype):  # what stands on a server
    model = Qwen3ForCausalLM(config).to(getattr(torch, str(dtype).removeprefix("torch.")))
    model.generation_config.suppress_tokens = [0]  # nothing ends, so nothing is padded
    return model

class Tokenizer:
    pad_token_id = 0
    def __call__(self, texts, **how):
        return BatchEncoding({"input_ids": torch.arange(1, 7).view(2, 3), "attention_mask": torch.ones(2, 3).long()})

transformers.AutoModelForCausalLM.from_pretrained = from_pretrained
transformers.AutoTokenizer.from_pretrained = lambda name, padding_side: Tokenizer()
torch.nn.Module.to = lambda self, *to, original=torch.nn.Module.to: self if to == ("cuda",) else original(self, *to)
BatchEncoding.to = lambda self, device: self
"""
POLICY = PYTHON["docs/training.md:1"].split("\nmodel = ")[0]
GLOO = """
import os, torch
from types import SimpleNamespace
where = f"file://{os.path.abspath(os.urandom(4).hex())}"
torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
"""
ONE_RANK = f"""{GLOO}
{POLICY}
torch.manual_seed(0)
model = Policy()
before = [p.detach().clone() for p in model.parameters()]
steps = [SimpleNamespace(groups=[[packed(5, 17)], [packed(9)]] + [[]] * 6, active_tokens=31)] * 2
"""
TINY = """
import torch
from bi_kernels.model import CONFIGS, Decoder
model, batch = Decoder(CONFIGS["tiny"], "cpu"), [torch.randint(0, 64, (n,)) for n in (17, 9, 12)]
"""


@dataclass
class Case:
    """What a block is given, how it is made small, and what holds after it."""

    before: str = ""
    small: tuple[tuple[str, str], ...] = ()
    after: str = ""


LINEAR = "lambda x, weight: __import__('bi_kernels').linear(x, weight).softmax(-1)"
DRIFTING = "[r.tensor for r in said[0].rows if r.verdict == 'needs-fix']"
CASES = {
    "README.md:0": Case(SMALL, after="assert type(model).whole"),
    "README.md:1": Case(after=f"assert audit({LINEAR}, torch.randn(16, 512), torch.randn(64, 512)).passed"),
    "docs/training.md:0": Case(
        SMALL,
        (("max_new_tokens=64", "max_new_tokens=6"), ("lr=1e-6", "lr=0.1")),
        "assert completions.shape == logprob.shape == (2, 9)\n"
        "assert logprob[:, :-1].all() and not logprob[:, -1].any(), 'nothing follows the last token'\n"
        "assert all(p.grad.any() for p in model.parameters()) and type(model) is Qwen3ForCausalLM",
    ),
    "docs/training.md:1": Case(
        after="first = [p.clone() for p in model.parameters()]\n"
        "model = Policy()\n"
        "again = bi.MainGrads(model.parameters(), tied=[model.embedding.weight])\n"
        "again.load_state_dict(torch.load('step.pt')['grads'])\n"
        "assert all(torch.equal(a, b) for a, b in zip(first, model.parameters())), 'it continues'"
    ),
    "docs/training.md:2": Case(after="assert not mode.unknown and all(p.main_grad.any() for p in grads.parameters)"),
    "docs/training.md:3": Case(
        after="assert out.shape == (6, 2, 64) and new.shape == (2, 1, 2, 64) and mixed.shape == x.shape"
    ),
    "docs/parallel.md:0": Case(
        ONE_RANK,
        after="torch.distributed.destroy_process_group()\n"
        "assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))",
    ),
    "docs/parallel.md:1": Case(
        f"{SMALL}\n{GLOO}\nmesh = torch.distributed.init_device_mesh('cpu', (1,))\n"
        "model = from_pretrained('', 'float32').train()",
        (
            ("fully_shard(layer,", "fully_shard(layer, mesh=mesh,"),
            ("fully_shard(model,", "fully_shard(model, mesh=mesh,"),
        ),
        "ids = torch.arange(1, 7).view(2, 3)\n"
        "model(input_ids=ids, labels=ids).loss.backward()\n"
        "assert all(p.grad.full_tensor().any() for p in model.parameters())\n"
        "torch.distributed.destroy_process_group()",
    ),
    "docs/parallel.md:2": Case(
        GLOO,
        (('"cuda"', '"cpu"'), ("(2, 2)", "(1, 1)"), ("qwen3-8b", "tiny")),
        "torch.distributed.destroy_process_group()\nassert len(grads.masters) == len([*model.parameters()])",
    ),
    "docs/auditing.md:0": Case(
        "said = []",
        (("print(audit(", "said.append(audit("),),
        f"assert said[0].verdict == 'needs-fix' and {{*{DRIFTING}}} == {{'dweight'}}, 'PyTorch adds up by the split'",
    ),
    "docs/locate.md:0": Case(TINY, after="assert report.passed"),
    "docs/certify.md:0": Case(
        "completions = [([1, 2], [5, 6, 7], [-0.5, -1.5, -2.5], [-0.5, -1.5, -2.0])] * 9",
        after="assert not found.passed and found.tokens == 27 and found.equal == 18 and found.max_abs == 0.5",
    ),
    "docs/locate.md:1": Case(after="assert report.first.path.startswith('model.layers.0.') and report.first.script"),
    "docs/locate.md:2": Case(after="assert 'aten._transformer_encoder_layer_fwd in no_grad' in report.first.op"),
}
LONG = ("docs/auditing.md:0", "docs/locate.md:0")
DRIVER = """
import json, linecache, sys, traceback, bi_kernels
print(json.dumps(bi_kernels.__file__))
for name, code in json.load(sys.stdin).items():
    linecache.cache[name] = len(code), None, code.splitlines(True), name  # so that a function's source is found
    try:
        exec(compile(code, name, "exec"), {"__name__": "block"})
        print("\\n" + json.dumps([name, ""]), flush=True)
    except BaseException:
        print("\\n" + json.dumps([name, traceback.format_exc()]), flush=True)
"""


def ran(names: list[str], wheel: Path, folder: Path) -> dict[str, str]:
    """{block: what it raised} of some blocks, run one after the other by a process that has the wheel alone."""
    code = {}
    for name in names:
        case, text = CASES.get(name, Case()), PYTHON[name]
        for old, new in case.small:
            assert old in text, f"{name} no longer holds {old}"
            text = text.replace(old, new)
        code[name] = f"{case.before}\n{text}\n{case.after}\n"
    environment = os.environ | {"PYTHONPATH": str(wheel), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", DRIVER]
    done = subprocess.run(command, input=json.dumps(code), cwd=folder, env=environment, capture_output=True, text=True)
    home, *said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", '"'))]
    assert Path(home).is_relative_to(wheel), "the blocks run from the wheel"
    return dict(said)


@pytest.fixture(scope="module")
def outcome(installed, tmp_path_factory) -> dict[str, str]:
    return ran([name for name in PYTHON if name not in LONG], installed, tmp_path_factory.mktemp("blocks"))


@pytest.mark.parametrize("name", [name for name in PYTHON if name not in LONG])
def test_a_block_of_python_runs_from_the_wheel(name, outcome):
    assert not outcome[name], outcome[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_long_block_of_python_runs_from_the_wheel(name, installed, tmp_path):
    said = ran([name], installed, tmp_path)[name]
    assert not said, said


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_commands_are_right(command, tmp_path, monkeypatch):
    """What they would run is looked at; the tests run the same elsewhere."""
    program, *arguments = shlex.split(command)
    if program == "papermill":
        parameters = papermill.inspect_notebook(str(ROOT / arguments[0]))
        assert {a for a in arguments[arguments.index("-p") :: 3] if a != "-p"} <= {*parameters}
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
    monkeypatch.setattr(localiser, "run", lambda candidate, *rest: started.append(candidate) or "")
    monkeypatch.setattr(mutants, "run", lambda given, out: (started.append(given) or [], False))
    (tmp_path / "runs/interpreter-tiny").mkdir(parents=True)
    side = Recorder()
    side.add(0, 0, [1], [-0.5])
    for name in ("rollout", "training"):
        side.save(tmp_path / f"{name}.safetensors")
    with pytest.raises((SystemExit, UsageError)) as end:
        cli.run(arguments)
        raise SystemExit
    refused = isinstance(end.value, UsageError)
    on_gpu = not {"qwen3-8b", "cuda"}.isdisjoint(arguments)
    assert refused == on_gpu and (not refused or "CUDA device" in str(end.value))
    assert bool(started) == (arguments[0] in ("run", "mutate", "locate") and not refused)
