"""The audit of Transformers' models: what it needs, that it leaves the library as it was, and what its bound is of."""

import importlib.util

import pytest
import torch
from transformers.utils import logging

from bi_kernels.audit import start
from bi_kernels.audit.targets.transformers import TransformersTarget, quiet
from bi_kernels.contract import CONTRACT


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
