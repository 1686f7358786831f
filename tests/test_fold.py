"""The order in which a callable adds is found from outside, whatever it is; what is no order is refused; and two orders
part where their partial sums do."""

from functools import reduce

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

import bi_kernels
from bi_kernels.workbench.summation_order import Tree, draw, first_divergence, order, over_k, over_tokens

FP16 = {"big": 2.0**15, "unit": 2.0**-24}


def left(values: torch.Tensor) -> torch.Tensor:
    return reduce(torch.add, values.unbind(1))


def pairwise(values: torch.Tensor) -> torch.Tensor:
    half = values.shape[1] // 2
    return values[:, 0] if not half else pairwise(values[:, :half]) + pairwise(values[:, half:])


def slabs(values: torch.Tensor) -> torch.Tensor:
    return left(torch.stack([left(part) for part in values.split(16, 1)], 1))


@triton.jit
def sum_kernel(x, y, N: tl.constexpr):
    row = tl.program_id(0)
    tl.store(y + row, tl.sum(tl.load(x + row * N + tl.arange(0, N)), 0))


def triton_sum(values: torch.Tensor) -> torch.Tensor:
    y = torch.empty(len(values))
    sum_kernel[(len(values),)](values.contiguous(), y, N=values.shape[1])
    return y


def numpy_sum(values: torch.Tensor) -> np.ndarray:
    return np.array([row.sum() for row in values.numpy()])  # a matrix's sum goes another way than a row's


def torch_sum(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.sum() for row in values])


EIGHT = "(((0 + 8) + (1 + 9)) + ((2 + 10) + (3 + 11))) + (((4 + 12) + (5 + 13)) + ((6 + 14) + (7 + 15)))"
ORDERS = {  # callable, number of terms: how the order reads
    (left, 1): "0",
    (left, 2): "0 + 1",
    (left, 64): "0 … 63",
    (lambda v: left(v.flip(1)), 20): "19 … 0",
    (lambda v: left(v[:, ::2]) + left(v[:, 1::2]), 16): "(0, 2 … 14) + (1, 3 … 15)",
    (lambda v: left(v[:, 10:]) + left(v[:, :10]), 26): "(0 … 9) + (10 … 25)",
    (pairwise, 8): "((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))",
    (slabs, 40): "(0 … 15) + (16 … 31) + (32 … 39)",
    (slabs, 160): "(0 … 15) + (16 … 31) + … + (144 … 159)",
    (numpy_sum, 16): EIGHT,
    (numpy_sum, 20): EIGHT + " + 16 … 19",
    (triton_sum, 16): EIGHT,
    (lambda v: left(v.double()), 12): "0 … 11",
}  # yapf: disable


@pytest.mark.parametrize("sums, n", ORDERS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_the_order_of_a_sum(sums, n):
    assert str(order(sums, n)) == ORDERS[sums, n]


@pytest.mark.parametrize("sums", [left, pairwise, slabs, numpy_sum, triton_sum, torch_sum], ids=lambda f: f.__name__)
def test_a_tree_replays_its_sum_and_another_tree_does_not(sums):
    terms = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    actual = np.asarray(sums(terms))
    tree, wrong = order(sums, 64), order(lambda v: left(v.flip(1)), 64)
    assert [t.partial_sums(row.numpy())[-1] for t in (tree,) for row in terms] == actual.tolist()
    assert tree != wrong and [wrong.partial_sums(row.numpy())[-1] for row in terms] != actual.tolist()


# Nodes of many terms

SLABS = Tree(64, (tuple(range(16)), (64, *range(16, 32)), (65, *range(32, 48)), (66, *range(48, 64))))


@pytest.mark.parametrize("dtype, probe", [(torch.bfloat16, {}), (torch.float16, FP16)], ids=["bf16", "fp16"])
def test_the_tensor_core_adds_a_slab_of_16_and_the_accumulator_in_one_step(dtype, probe):
    tree = order(over_k(bi_kernels.linear, dtype), 64, **probe)
    assert tree == SLABS and str(tree) == "[0 … 15] + [16 … 31] + [32 … 47] + [48 … 63]"
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    replayed = torch.tensor(np.array([tree.partial_sums(row)[-1] for row in x.float().numpy()])).to(dtype)
    assert torch.equal(replayed, bi_kernels.linear(x, torch.ones(1, 64, dtype=dtype))[:, 0])


def test_a_short_slab_fp32_and_an_m_that_does_not_swamp():
    assert str(order(over_k(bi_kernels.linear, torch.float32), 64)) == "0 … 63"
    assert str(order(over_k(bi_kernels.linear), 40)) == "[0 … 15] + [16 … 31] + [32 … 39]"
    with pytest.raises(ValueError, match="no tree|expected a count"):
        order(lambda v: left(v), 40, big=2.0**24)


@st.composite
def random_tree(draw) -> list[tuple[int, ...]]:
    """Steps over terms and earlier steps, in any order, of two or more operands."""
    n = draw(st.integers(2, 24))
    loose, steps = list(range(n)), []
    while len(loose) > 1:
        width = draw(st.sampled_from([2, 2, 2, min(5, len(loose))]))
        step = tuple(loose.pop(draw(st.integers(0, len(loose) - 1))) for _ in range(min(width, len(loose))))
        steps.append(step)
        loose.append(n + len(steps) - 1)
    return n, steps


def by_steps(n: int, steps: list[tuple[int, ...]]):
    def sums(values):
        nodes = list(values.numpy().T.copy())
        for step in steps:
            found = np.stack([nodes[k] for k in step])
            if len(step) > 2:  # aligned to the largest, as a multi-term adder does it
                found[np.abs(found) < np.abs(found).max(0) * 2.0**-25] = 0
            nodes.append(found.astype(np.float64).sum(0).astype(np.float32))
        return nodes[-1]

    return sums


def under(n: int, steps) -> set[frozenset]:
    nodes = [frozenset([i]) for i in range(n)]
    for step in steps:
        nodes.append(frozenset().union(*(nodes[k] for k in step)))
    return set(nodes)


@given(random_tree())
def test_any_tree_is_recovered(made):
    n, steps = made
    tree = order(by_steps(n, steps), n)
    assert under(n, tree.steps) == under(n, steps)
    assert under(n, tree.steps) == {frozenset(s.tolist()) for s in tree.spans()}


@given(random_tree(), st.integers(1, 40))
def test_how_many_probes_a_call_has_is_no_matter(made, at_once):
    n, steps = made
    shapes = []
    tree = order(lambda v: shapes.append(tuple(v.shape)) or by_steps(n, steps)(v), n, at_once=at_once)
    assert tree == order(by_steps(n, steps), n) and set(shapes) == {(at_once, n)}


# What is no tree


def by_parity(values):
    """Odd probes are summed from the right."""
    odd = torch.arange(len(values)) % 2 == 1
    return torch.where(odd, left(values.flip(1)), left(values))


# fmt: off
@pytest.mark.parametrize("sums, sentence", [
    (by_parity, r"\+M at 0 and −M at 1 lost 2 of 12 terms, which no tree does together with the other pairs"),
    (lambda v: left(v.half()), "left nan, expected a count of the other 10 terms"),
    (lambda v: left(v[:, :-1]), "12 ones gave 11, expected 12"),
    (lambda v: left(v) - v[:, -1] + 1, r"\+M at 0 and −M at 11 left 1.26765e\+30, expected a count"),
    (lambda v: left(v.square()), "left inf, expected a count"),
    (lambda v: left(v) * 0.3, "12 ones gave 3.6, expected 12"),
    (lambda v: left(v) * 0, "12 ones gave 0, expected 12"),
], ids=["order by row", "overflow", "a term is missing", "a term is not read", "squares", "scaled", "zero"])
# fmt: on
def test_what_no_tree_does_is_one_clear_sentence(sums, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        order(sums, 12)
    assert "\n" not in str(error.value) and str(error.value).startswith("order: ")


# The gradient of a weight, over a whole step

SPLITS = {"one call": [[20, 28]], "a call each": [[20], [28]]}


def test_our_dweight_is_one_fold_over_slabs_however_the_step_is_cut():
    found = {str(order(over_tokens(bi_kernels.rms_norm, calls, eps=0.0), 48, at_once=64)) for calls in SPLITS.values()}
    assert found == {"(0 … 15) + (16 … 19) + (20 … 35) + (36 … 47)"}


# Where two orders part


def test_the_first_sum_that_only_one_forms_and_the_ulp_at_the_end():
    a, b = order(slabs, 64), order(lambda v: slabs(v[:, :32]) + slabs(v[:, 32:]), 64)
    terms = np.repeat(np.float32([0, 1 / 16, 1 / 16, 1 / 16]), 16)
    terms[0] = 2**24  # beside it a 1 is lost and a 2 is not
    table = first_divergence(a, b, terms, ("whole", "split"))
    assert table["sum over"].tolist() == ["32 … 47", "0 … 47", "48 … 63", "32 … 63", "0 … 63"]
    assert table["split"].tolist()[1] == "–" == table["whole"].tolist()[3]
    assert table["ULP"].tolist()[:4] == [0, "–", 0, "–"]
    assert [float(table[c].iloc[-1]) for c in ("whole", "split")] == [2**24, 2**24 + 2] and table["ULP"].iloc[-1] == 1
    assert table["split adds"].iloc[-1] == "((0 … 15) + (16 … 31)) + ((32 … 47) + (48 … 63))"


@pytest.mark.parametrize("other, colors", [(slabs, 1), (left, 2)], ids=["equal", "another"])
def test_the_figure_shows_what_both_share_and_what_they_do_not(other, colors):
    figure = draw({"a": order(slabs, 40), "b": order(other, 40)}, "title", marks=[20])
    used = [{tuple(c) for c in ax.collections[0].get_colors()} for ax in figure.axes]
    assert [len(u) for u in used] == [colors, colors] and used[0] == used[1]
    assert len(figure.axes[0].collections[0].get_segments()) == 3 * 39
    plt.close(figure)
