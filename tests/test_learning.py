"""The learning run of the audit `training`: its reward, its faulty answers, and the row that a run without progress
fails."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bi_kernels.audit.findings import NEEDS_FIX, PASS, PRECONDITION
from bi_kernels.contract import CONTRACT
from bi_kernels.model import Generated
from helpers import decoder_training as training

REAL = CONTRACT["chain"]["training"]["real"]
SESSION = SimpleNamespace(
    parameters={"shapes": "qwen3-8b", "seed": 0}, device=torch.device("cpu"), device_label="cpu", command=""
)


@pytest.mark.parametrize("ids, right, near", [([1, 3, 4], 1, 1), ([1, 4, 4], 0, 0.75), ([1, 3, 13], 0, 0.25)])
def test_an_answer_is_right_where_every_digit_is(ids, right, near):
    one = Generated(0, [3, 1, 4, training.END], ids)
    assert (training.reward(one), training.reward(one, near=True)) == (right, near)


def test_the_warm_up_shows_answers_with_as_many_random_digits_as_the_contract_says(monkeypatch):
    shown = []
    run = training.Run(SESSION, "bi_kernels", "packed", "fp32")
    monkeypatch.setattr(run, "step", lambda optimizer, sequences: shown.extend(sequences))
    run.warm_up()
    assert len(shown) == REAL["warm_up"] * REAL["warm_up_problems"]
    wrong = np.concatenate([np.not_equal(one.ids, sorted(one.prompt[:-1])) for one in shown])
    expected = CONTRACT["chain"]["training"]["noise"] * (1 - 1 / training.END)  # a random digit may be the right one
    assert abs(wrong.mean() - expected) < 4 * (expected / len(wrong)) ** 0.5


def learned(begin: float, end: float) -> list[training.Trained]:
    """Returns a run of ours from one reward to another."""
    parity = {"tokens": 1, "logprobs that differ": 0, "max |Δ logprob|": 0.0, "KL": 0.0, "clipped": 0.0}
    run = training.Trained("bi_kernels", "packed", 1, tensors=1, parity=[parity], losses=[0.0], sha256="a")
    return [replace(run, rewards=[begin] + [end] * REAL["last"])]


@pytest.mark.parametrize("begin, end, verdict", [(0.2, 0.8, PASS), (0.21, 0.9, NEEDS_FIX), (0.1, 0.79, NEEDS_FIX)])
def test_a_run_that_does_not_learn_needs_a_fix(begin, end, verdict):
    rows = training.judge(SESSION, "bf16", learned(begin, end))
    assert [r.verdict for r in rows if r.relation == PRECONDITION and r.tensor == "reward"] == [verdict]


def test_every_layout_computes_each_token_once():
    samples = training.spans([5, 7, 9, 4, 6, 11, 5, 7, 9])
    for number, split in ((n, split) for n in range(9) for split in training.SPLITS.values()):
        found = np.concatenate([call.index[call.index >= 0] for call in split(samples, number)])
        assert np.array_equal(found, np.arange(sum(map(len, samples))))
