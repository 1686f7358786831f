"""Tensor parallelism: the bits of one rank, and worlds that end badly. Notebook `world` judges whole worlds."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world_tensor import VARIANTS

from bi_kernels.audit.worlds.launch import launched
from bi_kernels.audit.worlds.ways import HERE
from bi_kernels.ops.vocabulary import BLOCK
from bi_kernels.parallel.vocabulary import share

SCRIPT = Path(__file__).with_name("world_tensor.py")
TRANSFORMERS = SCRIPT.with_name("world_transformers.py")
RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def of_one_and_two(script: Path, folder: Path) -> dict[int, dict]:
    """Returns everything that a script found, by the number of its processes."""
    both = {}
    for ranks, run in ((1, [sys.executable]), (2, [*RUN, "2"])):
        file = folder / f"{ranks}.json"
        done = subprocess.run([*run, str(script), str(file)], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        both[ranks] = json.loads(file.read_text())
    return both


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, dict]:
    return of_one_and_two(SCRIPT, tmp_path_factory.mktemp("tensor"))


@pytest.fixture(scope="module")
def applied(tmp_path_factory) -> dict[int, dict]:
    return of_one_and_two(TRANSFORMERS, tmp_path_factory.mktemp("transformers"))


@pytest.mark.parametrize("variant", [*VARIANTS, "generation"])
def test_two_ranks_have_the_bits_of_one(variant, found):
    one, two = found[1][variant], found[2][variant]
    assert [name for name in one if one[name] != two[name]] == []
    assert one.keys() == two.keys()


@pytest.mark.parametrize("model", ["qwen3, tied", "llama, biases"])
def test_a_transformers_model_over_two_ranks_has_the_bits_of_one(model, applied):
    one, two = applied[1][model], applied[2][model]
    assert one.keys() == two.keys() and len(one) > 30
    assert [name for name in one if one[name] != two[name]] == []


def test_a_transformers_model_that_cannot_be_cut_is_left_as_it_was(applied):
    said = applied[2]["refused"]
    assert said["heads"] == "apply: model.layers.0.self_attn has 1 heads, expected a multiple of 2 ranks"
    assert said["rows"] == "TensorParallel: a weight has shape (47, 32), expected multiples of 2 ranks"


def test_what_cannot_be_cut_is_one_sentence(found):
    said = found[2]["refused"]
    assert said["odd"] == "TensorParallel: a weight has shape (95, 64), expected multiples of 2 ranks"
    assert said["heads"] == "TensorParallel: 3 heads, expected a multiple or a divisor of 2 ranks"
    assert said["seed"] == "TensorParallel: rank 1 has seed 1, expected 0 as rank 0"


@given(rows=st.integers(1, 60 * BLOCK), ranks=st.integers(1, 16))
def test_ranks_share_whole_blocks_of_a_vocabulary_in_order(rows, ranks):
    cuts = [share(rows, rank, ranks) for rank in range(ranks)]
    assert cuts[0][0] == 0 and cuts[-1][1] == rows and cuts[0][1] > 0
    assert all(a[1] == b[0] for a, b in zip(cuts, cuts[1:]))
    assert all(first % BLOCK == 0 or first == rows for first, _ in cuts)
    sizes = [-(-(end - first) // BLOCK) for first, end in cuts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("way", "seconds", "expected"),
    [
        ("DIES", 120, "rank 1 ended with status 9; 1 of 2 jobs had ended on every rank"),
        ("HANGS", 25, "the ranks had not ended after 25 s; 1 of 2 jobs had ended on every rank"),
        ("RAISES", 120, "rank 1: ValueError: this rank has no luck; 1 of 2 jobs had ended on every rank"),
    ],
)
def test_a_rank_that_ends_badly_is_one_sentence_and_loses_nothing(way, seconds, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(SCRIPT.parent), os.getenv("PYTHONPATH")))))
    jobs = [{"way": f"{HERE}:EXCHANGED", "world": (2, 1)}, {"way": f"world_faults:{way}", "world": (2, 1)}]
    told, begun = {"shapes": "tiny", "dtype": "bf16", "seed": 0, "device": "cpu", "jobs": jobs}, time.monotonic()
    evidence, why = launched(tmp_path, told, 2, seconds)
    assert why == expected
    assert len(evidence) == 1 and len(evidence[0]) == 2 and evidence[0][0]["logprob"]
    assert time.monotonic() - begun < 120
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == "", "no process is left"
