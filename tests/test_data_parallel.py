"""DDP, FSDP2, Accelerate and Trainer over two ranks: one hash for every split, that of one rank in two groups."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks_sharded import TRAINERS, VARIANTS
from transformers import TrainingArguments

from bi_kernels.integrations.transformers import StepSampler

SCRIPT = Path(__file__).with_name("ranks_sharded.py")
STOCK, ROUNDED = ("stock ddp", "stock ddp, split"), ("fsdp, bf16", "ddp, autocast")  # by what is not fp32
SCORED = "ddp of logprobs", "fsdp of logprobs"
QUICK = "ddp, views, checkpoints", "fsdp, every micro-batch summed", *STOCK


def found(folder: Path, names) -> dict[str, str]:
    """Returns the digests of variants over two ranks, and of their families on one."""
    for name, run in (("one", []), ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])):
        command = [sys.executable, *run, str(SCRIPT), str(folder / f"{name}.json"), *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return {name: sha for file in folder.glob("*.json") for name, sha in json.loads(file.read_text()).items()}


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[str, str]:
    return found(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[str, str]:
    return found(tmp_path_factory.mktemp("others"), [*[name for name in VARIANTS if name not in QUICK], TRAINERS])


def cases(names) -> list:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("variant", cases(n for n in VARIANTS if not n.startswith((*STOCK, *ROUNDED, *SCORED))))
def test_two_ranks_have_the_bits_of_one(variant, request):
    digests = request.getfixturevalue("quick" if variant in QUICK else "others")
    assert digests[variant] == digests[VARIANTS[variant][0]]


@pytest.mark.slow
@pytest.mark.parametrize("of", ROUNDED)
def test_a_lower_precision_does_not_depend_on_the_split(of, others):
    assert others[of] == others[f"{of}, split"] != others["qwen3"]


@pytest.mark.slow
def test_logprobs_in_a_wrapped_module_are_summed_over_ranks(others):
    assert len({others[f"{of}{split}"] for of in SCORED for split in ("", ", split")}) == 1


def test_the_control_of_stock_ddp(quick):
    assert len({quick[name] for name in STOCK}) == 2


@pytest.mark.slow
def test_trainer_keeps_its_bits_where_a_rank_keeps_its_sequences(others):
    assert others["trainer (4, 1)"] == others["trainer (2, 2)"]
    turns = "trainer, dealt out in turn"
    assert others[f"{turns} (4, 1)"] != others[f"{turns} (2, 2)"], "the control"


@pytest.mark.parametrize("batch, accumulated", [(4, 1), (2, 2), (1, 4)])
def test_the_sampler_gives_a_rank_the_same_sequences(batch, accumulated, tmp_path):
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated, use_cpu=True
    )
    args.__dict__["_n_gpu"] = 1
    dealt = [*StepSampler(range(19), args, ranks=2)]
    assert sorted(dealt) == [*range(19)]
    blocks = [dealt[i : i + batch] for i in range(0, 16, batch)]
    for rank in range(2):
        mine = [i for number, block in enumerate(blocks) if number % 2 == rank for i in block]
        assert mine == [*range(4 * rank, 4 * rank + 4), *range(8 + 4 * rank, 12 + 4 * rank)]
