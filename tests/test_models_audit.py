"""The audit of Transformers' models: what it needs, that it leaves the library as it was, and what its bound is of."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import logging

from bi_kernels.audit import start
from bi_kernels.audit.targets.distributed.step import ParallelConfig
from bi_kernels.audit.targets.transformers import OURS, STOCK, TransformersTarget, quiet
from bi_kernels.contract import CONTRACT
from helpers import decoder_training, parallelism, transformers_trainer, whole_model


@pytest.fixture(scope="module")
def session():
    return start("transformers")


def test_without_the_library_one_sentence_names_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else find(name, *a)
    )
    with pytest.raises(ValueError) as error:
        start("transformers")
    assert str(error.value) == (
        "transformers is not installed, expected the extra: pip install bi-kernels[transformers]"
    )


def test_what_is_silenced_speaks_again():
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(ZeroDivisionError), quiet():
        assert logging.get_verbosity() == logging.ERROR and not logging.is_progress_bar_enabled()
        _ = 1 / 0
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("dtype", CONTRACT["dtypes"]["supported"])
@pytest.mark.parametrize("times, verdict", [(0.99, "pass"), (1.01, "needs-fix"), (float("nan"), "needs-fix")])
def test_the_bound_of_the_logits_is_the_contracts(dtype, times, verdict, session):
    target, stock = TransformersTarget(session, "llama", dtype, model=None), torch.ones(3, 5)
    _, line = target.accuracy_row(stock, stock)
    moved = stock.clone()
    moved[1, 2] += times * line["bound"]
    row, _ = target.accuracy_row(moved, stock)
    assert (row.verdict, bool(row.mismatches)) == (verdict, verdict != "pass")


def test_the_conclusions_of_reports_are_computed():
    line = {"candidate": "bi_kernels", "runs": 5, "SHA-256": 1, "share of logprobs that differ": 0.0}
    stock = line | {"candidate": "torch", "SHA-256": 5, "share of logprobs that differ": 0.008}
    assert decoder_training.conclusion([line, stock]) == (
        "5 layouts end in 1 set of weights, stock PyTorch's in 5 sets of weights. "
        "Between rollout and trainer none of the logprobs differ, in stock PyTorch 0.80%."
    )
    runs = [(OURS, "a"), (OURS, "a"), (STOCK, "b"), (STOCK, "c")]
    lines = [{"model": model, "trainer": "Trainer", "SHA-256": digest} for model, digest in runs]
    assert transformers_trainer.conclusion(lines) == (
        "2 splits of a step end in 1 set of weights under Trainer; stock Transformers' 2 in 2 sets of weights."
    )
    told = {"bi_kernels, bf16": (0, 1200), "bi_kernels, fp32": (1, 300), "stock PyTorch, bf16": (7, 9)}
    lines = [{"model": m, "logprobs that differ": n, "tokens": of} for m, (n, of) in told.items()]
    assert whole_model.rescored(lines) == (
        "Rescoring changes the logprobs of 1 of 1,500 generated tokens; in stock PyTorch of 7 of 9."
    )


@pytest.mark.parametrize("digest, same", [("a", 1), ("b", 0)])
def test_ranks_that_end_in_another_hash_are_counted(digest, same):
    of = lambda digest: SimpleNamespace(digest=lambda: digest)
    session = SimpleNamespace(evidence={ParallelConfig(): of("a"), ParallelConfig(2, 1): of(digest)})
    assert parallelism.conclusion(session).startswith(f"{same} of 1 ways to use up to 2 ranks end in the hash")
