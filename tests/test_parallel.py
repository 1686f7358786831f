"""Data parallelism by a fixed tree: the same gradients and weights at every world size, and what must not pass."""

import json

import pytest
import ranks_data
import torch
from conftest import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from bi_kernels.grads import MainGrads
from bi_kernels.parallel.tree import GroupTree, added, middle, whole

GROUPS = 8


class Term:
    """A sum that remembers in what order it was added."""

    def __init__(self, text: str):
        self.text = text

    def __add__(self, other: "Term") -> "Term":
        self.text = f"({self.text}+{other.text})"
        return self


def expected(first: int, end: int) -> str:
    if end - first == 1:
        return str(first)
    at = middle(first, end)
    return f"({expected(first, at)}+{expected(at, end)})"


@given(groups=st.integers(1, 40), ranks=st.integers(1, 12))
def test_every_world_adds_in_the_order_of_the_one_tree(groups, ranks):
    found = {}
    for rank in range(ranks):
        held = range(rank * groups // ranks, (rank + 1) * groups // ranks)
        nodes = [*whole(held.start, held.stop, groups)]
        assert [g for node in nodes for g in range(*node)] == [*held]
        for node in nodes:
            found[node] = Term(added({(g, g + 1): Term(str(g)) for g in held}, node).text)
    assert added(found, (0, groups)).text == expected(0, groups)


def test_the_tree_is_what_the_contract_says():
    assert expected(0, 8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert expected(0, 6) == "(((0+1)+(2+3))+(4+5))" and expected(0, 3) == "((0+1)+2)"


@given(groups=st.integers(1, 20))
def test_a_rank_keeps_few_buffers_and_adds_as_the_tree_does(groups):
    tree = GroupTree(4, groups, None, torch.device("cpu"))
    g = torch.Generator().manual_seed(groups)
    folds, most = [torch.randn(4, generator=g) * 10.0**i for i, _ in enumerate(range(groups))], 0
    for number, fold in enumerate(folds):
        tree.flat[:4].copy_(fold)
        others = tree.close(number)
        most = max(most, len(tree.waiting))
        assert others == (number + 1 < groups) and others == (not tree.flat.any())
    (found,) = tree.join()
    assert found[:4].equal(added({(i, i + 1): fold.clone() for i, fold in enumerate(folds)}, (0, groups)))
    assert most <= max(1, groups.bit_length())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What tests/ranks_data.py found in one process, and in three; the notebook `world` asks two and four."""
    files = [tmp_path_factory.mktemp("found") / f"{ranks}.json" for ranks in (1, 3)]
    ranks_data.main(files[0], GROUPS)
    run_ranks(3, "ranks_data:main", files[1], GROUPS)
    return [json.loads(file.read_text()) for file in files]


def test_gradients_and_weights_are_the_same_at_every_world_size_whole_or_sharded(found):
    one, three = found
    assert three["tree"] == one["tree"] and three["sharded"][1] == one["tree"][1]
    assert three["clipped"] == three["clipped, sharded"] == three["resumed, sharded"] == one["clipped"]


def test_what_does_not_agree_is_one_sentence(found):
    three = found[1]
    assert three["groups"] == "MainGrads: rank 1 has groups 5, expected 4 as rank 0"
    assert three["too early"] == "MainGrads: join was called before group 0 of rank 0 was closed"
    assert three["another's"] == "MainGrads: close was called for group 1, expected group 0; rank 0 has group 0"


def test_one_group_is_the_fold_that_it_was():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    grads = MainGrads([weight])
    assert [*grads.mine] == [0]
    weight.main_grad += 1
    grads.close(0)
    assert weight.main_grad.eq(1).all(), "the step's fold goes on"
    with pytest.raises(ValueError, match="close was called for group 1, expected 0"):
        grads.close(1)


@pytest.mark.parametrize("groups", [0, -1, True, 2.0, "8"])
def test_groups_are_a_positive_integer(groups):
    with pytest.raises(ValueError, match="groups is .*, expected a positive integer"):
        MainGrads([torch.nn.Parameter(torch.ones(1))], groups=groups)


def test_shares_need_a_world():
    with pytest.raises(ValueError, match="sharded is True, expected a world"):
        MainGrads([torch.nn.Parameter(torch.ones(1))], sharded=True)
