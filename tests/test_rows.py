"""Norms, row reductions and parameter folds beyond what the registry has of them: parts that are missing or of fp32,
heads, wide rows, other output dtypes, every shape of a parameter, and PyTorch's own bits."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same_bits, assert_within

import bi_kernels as bi
from bi_kernels import contract, reference
from bi_kernels.audit.inputs import draw, generator
from bi_kernels.contract import DTYPES
from bi_kernels.ops.norm import WIDEST
from bi_kernels.ops.parameter_fold import fold_elementwise
from bi_kernels.ops.vocabulary import BLOCK
from bi_kernels.reference_gradients import gradient
from bi_kernels.tokens import TokenLayout, layout_for

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
PARTS = [*product((False, True), repeat=2)]  # whether there is a weight, and a bias
WIDE = 2 * BLOCK + 24  # a row of three blocks


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, kind: str = "normal", seed: object = 0) -> torch.Tensor:
    return draw(kind, shape, dtype, generator("cpu", "rows", seed, *shape, dtype, kind))


def called(function, given: dict, dy: torch.Tensor | None = None, **more) -> tuple[torch.Tensor, dict, torch.Tensor]:
    """Returns a result, the gradient of every tensor given, and what came from upstream."""
    leaves = {k: t.detach().clone().requires_grad_() for k, t in given.items() if t is not None}
    y = function(**{k: leaves.get(k) for k in given}, **more)
    dy = numbers(*y.shape, dtype=y.dtype, seed="dy") if dy is None else dy
    y.backward(dy)
    return y.detach(), {k: t.grad for k, t in leaves.items()}, dy


# Norms


@pytest.mark.parametrize("weight", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["rms_norm", "qk_norm", "add_rms_norm"])
def test_a_norm_takes_no_weight_one_of_its_dtype_or_of_fp32(op, weight):
    shape = (5, 3, 40) if op == "qk_norm" else (5, 40)
    given = {"x": numbers(*shape)} | ({"residual": numbers(*shape, seed=1)} if op == "add_rms_norm" else {})
    given["weight"] = None if weight is None else numbers(40, dtype=torch.float32).to(weight)
    function = (lambda **told: bi.add_rms_norm(**told)[0]) if op == "add_rms_norm" else getattr(bi, op)
    y, grads, dy = called(function, given)
    upstream = (dy, None) if op == "add_rms_norm" else dy
    exact = getattr(reference, op)(**given)
    assert y.dtype == torch.bfloat16
    assert_within("rms_norm", y, exact[0] if op == "add_rms_norm" else exact, 40)
    for k, expected in gradient(op, given, {"weight": None} if weight is None else {}, upstream).items():
        assert grads[k].dtype == given[k].dtype
        assert_within("rms_norm", grads[k], expected, gradient="x" if k == "residual" else k, inputs=torch.bfloat16)


@EVERY_DTYPE
def test_a_weight_of_ones_and_an_offset_of_one_over_zeros_are_no_weight(dtype):
    x, ones = numbers(5, 40, dtype=dtype), torch.ones(40, dtype=dtype)
    expected = called(bi.rms_norm, {"x": x, "weight": None})
    for weight, offset in ((ones, 0.0), (ones - 1, 1.0), ((ones - 1).float(), 1.0), (ones.float(), 0.0)):
        y, grads, _ = called(bi.rms_norm, {"x": x, "weight": weight}, expected[2], offset=offset)
        assert_same_bits(y, expected[0])
        assert_same_bits(grads["x"], expected[1]["x"])


def test_the_gradient_of_a_weight_does_not_depend_on_the_offset():
    given = {"x": numbers(21, 40), "weight": numbers(40, dtype=torch.float32)}
    grads = [called(bi.rms_norm, given, numbers(21, 40, seed="dy"), offset=o)[1]["weight"] for o in (0.0, 1.0, -0.5)]
    assert all(g.equal(grads[0]) and g.dtype == torch.float32 for g in grads)


@pytest.mark.parametrize("width", [1, 3, 40, 1025])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_layer_norm_with_and_without_its_parts_is_within_the_bound(parts, width, dtype=torch.float32):
    rows = 3 if width > 1000 else 21
    given = {"x": 3 + numbers(rows, width, dtype=dtype)}
    given |= {k: numbers(width, dtype=dtype, seed=k) if there else None for k, there in zip(("weight", "bias"), parts)}
    y, grads, dy = called(bi.layer_norm, given)
    assert_within("layer_norm", y, reference.layer_norm(**given), width)
    exact = gradient("layer_norm", given, {k: None for k, t in given.items() if t is None}, dy)
    assert exact.keys() == grads.keys()
    for k, expected in exact.items():
        assert_within("layer_norm", grads[k], expected, gradient=k)


@pytest.mark.parametrize(
    "parts", [*PARTS[::3], *(pytest.param(p, marks=pytest.mark.slow) for p in PARTS[1:3])], ids=str
)
def test_layer_norm_of_the_widest_rows_is_within_the_bound(parts):
    test_layer_norm_with_and_without_its_parts_is_within_the_bound(parts, WIDEST)


@pytest.mark.parametrize("far", [1e2, 1e4, 1e6])
def test_layer_norm_of_rows_far_from_zero_is_within_the_bound(far):
    given = {"x": far + numbers(9, 64, dtype=torch.float32), "weight": numbers(64, dtype=torch.float32)}
    y, grads, dy = called(bi.layer_norm, given)
    assert_within("layer_norm", y, reference.layer_norm(**given), 64)
    for k, expected in gradient("layer_norm", given, {}, dy).items():
        assert_within("layer_norm", grads[k], expected, gradient=k)


def test_the_bound_of_layer_norm_bites_near_zero():
    """A variance from the mean of squares, and a mean in bf16, are beyond it."""
    x, w = 3 + numbers(64, 64, dtype=torch.float32), torch.ones(64)
    exact, magnitude = reference.layer_norm(x, w)
    limit = contract.bound("layer_norm", torch.float32, exact, magnitude, 64)
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + torch.nn.LayerNorm(1).eps).rsqrt()
    share = lambda y: float(((y.double() - exact).abs() / limit).max())
    assert share((x - mean) * rstd) <= 1 < share((x - mean.bfloat16().float()) * rstd)


@EVERY_DTYPE
def test_heads_are_rows_of_layer_norm_and_of_one_token(dtype):
    given = {"x": numbers(21, 3, 40, dtype=dtype), "weight": numbers(40, dtype=dtype), "bias": numbers(40, dtype=dtype)}
    with TokenLayout.packed([0, 5, 21]):
        y, grads, dy = called(bi.layer_norm, given, heads=True)
    flat = {k: t.flatten(0, -2) if k == "x" else t for k, t in given.items()}
    alone, of_rows, _ = called(bi.layer_norm, flat, dy.flatten(0, 1))
    assert_same_bits(y.flatten(0, 1), alone)
    assert_same_bits(grads["x"].flatten(0, 1), of_rows["x"])
    for k, expected in gradient("layer_norm", given, {}, dy, [63]).items():
        n = expected.n | {"heads": 3} if k != "x" else expected.n
        assert_within("layer_norm", grads[k], (*expected[:2], n), gradient=k)


# Rows


@EVERY_DTYPE
@pytest.mark.parametrize("n", [1, 2, 7, 200, BLOCK, WIDE])
def test_softmax_and_its_gradient_are_within_the_bound_at_any_width(n, dtype):
    x = numbers(3, n, dtype=dtype, kind="wide" if n > 1 else "normal") if n != 7 else 30 * numbers(3, n, dtype=dtype)
    y, grads, dy = called(bi.softmax, {"x": x})
    assert_within("softmax", y, reference.softmax(x))
    assert_within("softmax", grads["x"], gradient("softmax", {"x": x}, {}, dy)["x"], gradient="x")
    alone = bi.softmax(x[1:2])
    assert_same_bits(alone[0], y[1])


@EVERY_DTYPE
@pytest.mark.parametrize("n", [0, 1, 7, BLOCK, WIDE])
def test_row_sums_and_means_are_within_the_bound_at_any_width(n, dtype):
    x = numbers(2, 3, n, dtype=dtype)
    for scale in (1.0, 1 / max(n, 1)):
        y, grads, _ = called(bi.row_sum, {"x": x}, scale=scale)
        assert y.shape == (2, 3) and grads["x"].shape == x.shape
        assert_within("row_sum", y, reference.row_sum(x, scale), n)
        assert_same_bits(bi.row_sum(x[1, 2], scale), y[1, 2])


@EVERY_DTYPE
def test_a_row_has_the_bits_of_fp32_before_it_is_rounded(dtype):
    x = numbers(4, 200, dtype=dtype)
    for op in (bi.softmax, bi.row_sum, bi.log_softmax):
        every = op(x.float())
        assert every.dtype == torch.float32
        for out in DTYPES.values():
            assert_same_bits(op(x, out_dtype=out), every.to(out), op.__name__)


def test_softmax_gives_nan_where_pytorch_does():
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[1, inf, 0], [1, nan, 0], [-inf, -inf, -inf], [-inf, 2, -inf], [inf, -inf, nan]])
    for wide in (x, F.pad(x, (0, WIDE), value=-inf)):
        y = bi.softmax(wide)
        assert y.isnan().equal(F.softmax(wide, -1).isnan()) and y[3, 1] == 1 and not y[3, 2:].any()


@EVERY_DTYPE
def test_log_softmax_in_the_storage_dtype_has_a_gradient_from_the_numbers_in_fp32(dtype):
    x = numbers(4, 200, dtype=dtype)
    y, grads, dy = called(bi.log_softmax, {"logits": x}, out_dtype=dtype)
    assert y.dtype == dtype
    assert_within("log_softmax", y, reference.log_softmax(x), 200)
    assert_within(
        "log_softmax", grads["logits"], gradient("log_softmax", {"logits": x}, {}, dy)["logits"], gradient="logits"
    )


def test_rows_take_any_strides():
    x = numbers(6, 40).t()
    for op in (bi.softmax, bi.row_sum):
        expected = called(op, {"x": x.contiguous()})
        leaf = x.detach().requires_grad_()
        y = op(leaf)
        assert_same_bits(y, expected[0])
        assert_same_bits(torch.autograd.grad(y, leaf, expected[2])[0], expected[1]["x"])


# Parameters used elementwise

SHAPES = [(), (1,), (40,), (3, 1), (3, 40), (1, 40), (1, 1, 40), (1, 3, 1)]
LAYOUT = TokenLayout.packed([0, 5, 22, 38])


@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "fp32 weight"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op, torch_op", [("scaled", torch.mul), ("shifted", torch.add)])
def test_a_parameter_has_pytorch_s_result_and_a_folded_gradient(op, torch_op, shape, mixed):
    dtype = torch.float32 if mixed else torch.bfloat16
    x, w = numbers(2, 19, 3, 40), numbers(*shape, dtype=torch.float32).to(dtype)
    y, grads, dy = called(getattr(bi, op), {"x": x, "weight": w}, features=2)
    theirs, their_grads, _ = called(lambda x, weight: torch_op(x, weight), {"x": x, "weight": w}, dy)
    assert_same_bits(y, theirs)
    assert_same_bits(grads["x"], their_grads["x"])
    assert grads["weight"].dtype == dtype
    terms = dy.double() * x.double() if op == "scaled" else dy.double()
    exact, magnitude = (t.sum_to_size(shape) if shape else t.sum() for t in (terms, terms.abs()))
    lengths = {"n": 2 * 32, "features": 3 * 40 // max(w.numel(), 1)}
    assert_within(op, grads["weight"], (exact, magnitude, lengths), gradient="weight", inputs=torch.bfloat16)


def test_the_fold_of_a_parameter_is_token_by_token_in_slabs():
    x, dy, w = numbers(38, 40, dtype=torch.float32), numbers(38, 40, dtype=torch.float32, seed=1), torch.ones(40)
    w.requires_grad_()
    start = numbers(40, dtype=torch.float32, seed=2)
    w.main_grad = expected = start.clone()
    with LAYOUT:
        bi.scaled(x, w).backward(dy)
    expected = start.clone()
    for a, b in ((0, 5), (5, 21), (21, 22), (22, 38)):
        slab = torch.zeros(40)
        for t in range(a, b):
            slab += dy[t] * x[t]
        expected += slab
    assert_same_bits(w.main_grad, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fold_elementwise_takes_what_each_token_adds(shape):
    g, w = numbers(38, 3, 40, dtype=torch.float32), numbers(*shape, dtype=torch.float32).requires_grad_()
    found = fold_elementwise("test", g, w, LAYOUT)
    with LAYOUT:
        bi.shifted(numbers(38, 3, 40, dtype=torch.float32), w, 2).backward(g)
    assert_same_bits(found, w.grad)
    w.main_grad = torch.zeros(shape)
    assert fold_elementwise("test", g, w, LAYOUT) is None
    assert_same_bits(w.main_grad, found)
    factor = numbers(38, 3, 40, seed=1)
    w.main_grad = None
    products = fold_elementwise("test", g * factor.float(), w, LAYOUT)
    assert_same_bits(fold_elementwise("test", g, w, LAYOUT, factor=factor), products)


def test_no_tokens_leave_a_parameter_s_gradient_as_it_was():
    w = numbers(40, dtype=torch.float32).requires_grad_()
    w.main_grad = torch.ones(40)
    bi.scaled(torch.zeros(0, 40), w).sum().backward()
    assert w.main_grad.equal(torch.ones(40))
    assert not fold_elementwise(
        "test", torch.zeros(0, 40), numbers(40).requires_grad_(), layout_for("test", (0,))
    ).any()
