"""What no audit asks of elementwise ops, RoPE and products: every number of a dtype, specials, what is copied, any
shape, each tile, tables."""

import math
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, assert_within, under_test
from hypothesis import given
from hypothesis import strategies as st

import bi_kernels as bi
from bi_kernels import reference
from bi_kernels.audit.checks.gradient import gradient_accuracy
from bi_kernels.audit.checks.single_call import compared
from bi_kernels.audit.compare import compare
from bi_kernels.audit.findings import needs_fix
from bi_kernels.audit.inputs import draw, generator
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.targets.op import CANCELLING
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.checks import memory_peak
from bi_kernels.contract import DTYPES
from bi_kernels.ops.gemm.cost import WRITES, best_cut, library_us, memory_us, ring_for, tile_for, way_for
from bi_kernels.ops.gemm.kernel import launch, tiles
from bi_kernels.ops.rope_scaling import frequencies
from bi_kernels.reference_gradients import gradient

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, kind: str = "normal", seed: object = 0) -> torch.Tensor:
    return draw(kind, shape, dtype, generator("cpu", seed, *shape, dtype, kind))


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """2^16 numbers: NaN with their payloads, infinities, subnormals, both zeros."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    return (bits.int() * 65537 if dtype == torch.float32 else bits).view(dtype)


def every_finite(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a 16-bit dtype; of fp32, those of bf16 and many more, of every exponent."""
    x = every_pattern(dtype)
    if dtype == torch.float32:
        random = torch.randint(-(2**31), 2**31, (2**16,), generator=generator("cpu", "bits")).int().view(dtype)
        x = torch.cat((every_finite(torch.bfloat16).float(), random, torch.linspace(-110, 110, 50_001)))
    return x[x.isfinite()]


def called(name: str, given: dict[str, torch.Tensor], dy: torch.Tensor | None = None, **more) -> tuple:
    """Returns what an op of the registry makes of inputs, and the gradients that backward() leaves of each."""
    leaves = {k: t.detach().clone().requires_grad_() for k, t in given.items()}
    y = getattr(bi, OPS[name].function or name)(**leaves, **OPS[name].constants | more)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return y.detach(), {k: t.grad for k, t in leaves.items()}


# Accuracy

POINTWISE = ["silu", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "soft_cap", "scale"]


@EVERY_DTYPE
@pytest.mark.parametrize(
    "name, more",
    [*((name, {}) for name in POINTWISE), ("soft_cap", {"cap": 2.0**-126}), ("soft_cap", {"cap": 2.0**127})],
    ids=str,
)
def test_results_and_gradients_of_every_finite_number_are_within_the_bound(name, more, dtype):
    x, function, constants = every_finite(dtype), OPS[name].function or name, OPS[name].constants | more
    given = {k: x if i == 0 else numbers(len(x), dtype=dtype, seed=k) for i, k in enumerate(OPS[name].tokens)}
    dy = numbers(len(x), dtype=dtype, seed="dy")
    y, grads = called(name, given, dy, **more)
    assert_within(name, y, getattr(reference, function)(**given, **constants))
    for k, expected in gradient(function, given, constants, dy).items() if not more else ():
        assert_within(name, grads[k], expected, gradient=k)


@EVERY_DTYPE
def test_clamped_swiglu_is_within_the_bound_where_both_are_clamped(dtype):
    x = every_finite(dtype)
    assert_within("clamped_swiglu", bi.clamped_swiglu(x, x), reference.clamped_swiglu(x, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_gradients_of_zeros_and_subnormals_are_within_the_bound(name, dtype):
    for kind in ("signed_zeros", "subnormal"):  # audits ask the others
        wrong = needs_fix(gradient_accuracy(under_test(name, dtype), kind))
        assert not wrong, [(row.tensor, row.detail) for row in wrong]


SPECIALS = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0])


def special(t: torch.Tensor) -> torch.Tensor:
    """What is not finite, by kind: 1, −1 and 9; 0 elsewhere."""
    return torch.where(t.isfinite(), 0.0, t.double().nan_to_num(nan=9.0, posinf=1.0, neginf=-1.0))


@EVERY_DTYPE
@pytest.mark.parametrize("name", [*POINTWISE, "add", "bias_add", "linear_bias"])
def test_numbers_that_are_not_finite_give_what_fp64_gives(name, dtype):
    given = {k: numbers(10, 48, dtype=dtype, seed=k) for k in OPS[name].tokens}
    given |= {k: numbers(*((48, 48) if k == "weight" else (48,)), dtype=dtype, seed=k) for k in OPS[name].shared}
    function, constants, dy = OPS[name].function or name, OPS[name].constants, numbers(10, 48, dtype=dtype, seed="dy")
    every = {}
    for i, (k, t) in enumerate(given.items()):  # every special of the first argument meets every one of the others
        every[k] = t.clone()
        every[k].view(-1)[:36] = (SPECIALS.repeat(6) if i else SPECIALS.repeat_interleave(6)).to(dtype)
    exact, _ = getattr(reference, function)(**every, **constants)
    assert_same_bits(special(called(name, every)[0]), special(exact))
    exact_gradients = lambda given, dy: {k: g.exact for k, g in gradient(function, given, constants, dy).items()}
    for changed in (*given, "dy") if name != "linear_bias" else ():
        every = {k: t.clone() for k, t in (given | {"dy": dy}).items()}
        every[changed].view(-1)[:6] = SPECIALS.to(dtype)
        dy_there = every.pop("dy")
        found, expected = called(name, every, dy_there)[1], exact_gradients(every, dy_there)
        clamps = name == "clamped_swiglu"
        if changed == "dy" or changed == "up" and not clamps:
            # a factor of dx: autograd's inf · p + inf · q may be NaN where inf · (p + q) is not
            ones, factor = torch.ones_like(dy), dy_there if changed == "dy" else every["up"]
            unit = exact_gradients(every, ones) if changed == "dy" else exact_gradients(every | {"up": ones}, dy)
            expected |= {
                k: torch.where((g == 0) & clamps, expected[k], g * factor.double())
                for k, g in unit.items()
                if k not in (changed, "bias")
            }
        for k, y in found.items():
            assert_same_bits(special(y), special(expected[k]), f"{changed}: d{k}")


@EVERY_DTYPE
def test_clamped_swiglu_passes_gradients_through_where_torch_clamp_does(dtype):
    beyond = torch.finfo(dtype).eps
    at = torch.tensor([-7 - 8 * beyond, -7, -1, 0, 7, 7 + 8 * beyond, torch.inf, torch.nan], dtype=dtype)
    given = {"gate": at.repeat(8), "up": at.repeat_interleave(8)}
    found, grads = called("clamped_swiglu", given)
    gate, up = (t.double().requires_grad_() for t in given.values())
    y = (up.clamp(-7, 7) + 1) * (g := gate.clamp(max=7)) * torch.sigmoid(1.702 * g)
    y.sum().backward()
    assert found.isnan().equal(y.isnan())
    for ours, stock in zip(grads.values(), (gate.grad, up.grad)):
        assert (ours == 0).equal(stock == 0) and ours.isnan().equal(stock.isnan())


# What is copied, or is one IEEE operation, has the bits of it


@EVERY_DTYPE
def test_what_is_copied_keeps_every_bit(dtype):
    bits = every_pattern(dtype).view(256, 256)
    zeros = torch.zeros_like(bits)
    assert_same_bits(called("bias_add", {"x": zeros, "bias": zeros[0]}, bits)[1]["x"], bits, "dx of bias_add")
    for k, found in called("add", {"x": zeros, "residual": zeros}, bits)[1].items():
        assert_same_bits(found, bits, f"d{k} of add")
    for shape in ((256, 256), (1, 256), (256, 1), (256,)):
        mask = torch.rand(shape, generator=generator("cpu", "mask", shape)) < 0.5
        y, grads = called("mask_fill", {"x": bits}, bits, mask=mask)
        there = mask.expand_as(bits)
        assert_same_bits(y[~there], bits[~there], "kept")
        assert_same_bits(y[there], torch.full_like(bits, -1e4)[there], "filled")
        assert_same_bits(grads["x"][~there], bits[~there], "dx kept")
        assert_same_bits(grads["x"][there], zeros[there], "dx masked")


@EVERY_DTYPE
def test_the_numbers_of_mask_fill_and_scale_are_rounded_to_fp32_first(dtype):
    x = torch.tensor([1.0, -3.0, 6e4, -0.125]).to(dtype)
    for value in (0.3, -0.0, 0.0, -0.0, -torch.inf, 1 / 3, 65519.9, 2.0**-133 / 3, 3.4e38):  # −0 is another number
        fp32 = torch.tensor(value, dtype=torch.float32)
        y, grads = called("scale", {"x": x}, x, factor=value)
        assert_same_bits(bi.mask_fill(x, x == x, value), fp32.to(dtype).expand(4), f"mask_fill {value}")
        assert_same_bits(y, (x.float() * fp32).to(dtype), f"scale {value}")
        assert_same_bits(grads["x"], y, f"dx of scale {value}")


@pytest.mark.parametrize("source", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("target", DTYPES.values(), ids=DTYPES)
def test_cast_rounds_to_nearest_even(source, target):
    x = every_finite(source)
    if source.itemsize > target.itemsize:  # every tie, that with infinity too, and either side of it
        low = every_finite(target).double().sort().values
        low = torch.cat((low, 2 * low[-1:] - low[-2:-1]))
        ties = ((low[1:] + low[:-1]) / 2).float()
        x = torch.cat((x, *[(ties.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)]))
        x = x[x.isfinite()]
    assert_same_bits(bi.cast(x, target), x.to(target))
    dy = every_finite(target)
    assert_same_bits(called("cast", {"x": torch.zeros_like(dy, dtype=source)}, dy, dtype=target)[1]["x"], dy.to(source))


# Products


@given(
    lead=st.lists(st.integers(0, 5), max_size=3),
    n=st.integers(0, 70),
    k=st.integers(0, 70),
    bias=st.booleans(),
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_linear_takes_any_shape(lead, n, k, bias, dtype):
    x, w = numbers(*lead, k, dtype=dtype), numbers(n, k, dtype=dtype, seed=1)
    b = numbers(n, dtype=dtype, seed=2) if bias else None
    y = bi.linear(x, w, b)
    assert y.dtype == dtype
    assert_within("linear", y, reference.linear(x, w, b), k)
    if lead:
        assert_same_bits(bi.linear(x.flatten(0, -2), w, b).reshape(y.shape), y, "the same rows in two dimensions")
        assert_same_bits(bi.matmul(x[None], w.t()), bi.linear(x, w)[None], "matmul")
    if k == 0:
        assert_same_bits(y, bi.linear(x.new_zeros(*lead, 16), w.new_zeros(n, 16), b), "a sum of zeros")


@pytest.mark.parametrize("out", ["fp32", "rounded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 17, 130])
def test_every_tile_of_the_table_gives_the_same_bits(m, dtype, out):
    x, w = numbers(m, 80, dtype=dtype, kind="wide"), numbers(200, 80, dtype=dtype, seed=1)
    bias, out = numbers(200, dtype=dtype, seed=2), torch.float32 if out == "fp32" else dtype
    first, *others = tiles(dtype)
    assert len(others) >= 5
    expected = launch(x, w, bias, first, out)
    transposed = [t.t().contiguous().t() for t in (x, w)]
    for tile in others:
        assert_same_bits(launch(x, w, bias, tile, out), expected, tile)
        assert_same_bits(launch(*transposed, bias, tile, out), expected, f"transposed, {tile}")
    if out == torch.float32:
        backwards = compare(launch(x.flip(1), w.flip(1), bias, first, out), expected)
        assert backwards.mismatches > expected.numel() // 10, "these inputs hardly show another order of the sum"


@given(m=st.integers(1, 2**20), n=st.integers(1, 2**20), k=st.integers(1, 2**20), use=st.sampled_from(list(WRITES)))
def test_every_size_has_a_tile(m, n, k, use):
    assert tile_for(m, n, k, use) in tiles(torch.bfloat16)
    for transposed in product((False, True), repeat=2):
        found = ring_for(m, n, k, use, transposed)
        if found is not None:
            ring, us = found
            assert us > 0 and (ring.rows >= 64 or not transposed[0]) and (ring.columns >= 16 or not transposed[1])
    assert ring_for(64 * m, 64 * n, k, "fold", (True, True)), "a fold that goes on has a ring where its rows are whole"


def test_small_products_get_small_tiles():
    area = lambda m, n, k: math.prod(tile_for(m, n, k, "rows").size)
    assert area(1, 1024, 4096) < area(4096, 4096, 4096)
    wide, narrow = ring_for(4096, 4096, 4096, "fold", (True, True))[0], ring_for(512, 512, 512, "fold", (True, True))[0]
    assert math.prod(narrow.size) < math.prod(wide.size)


@pytest.mark.parametrize(
    "waves, cut",
    [
        (lambda n: n / 2400 if n > 2048 else n / 600, 4608),  # 2.13 waves, or 1.92 and one of smaller tiles
        (lambda n: n / 2560, 0),  # two whole waves as it stands
        (lambda n: None, 0),
        (lambda n: n / 2400 if n == 5120 else None, 0),
    ],
)
def test_a_product_of_the_library_is_cut_where_its_last_wave_would_be_nearly_empty(waves, cut):
    us = lambda columns: way_for(1024, columns, 8192, "rows", (False, False), False, waves(columns))[0]
    assert best_cut(5120, us) == cut and (us(5120) > 0) == (waves(5120) is not None)


def test_a_ring_is_taken_where_it_is_surely_faster_than_the_library():
    of = lambda m, waves, rings=True: way_for(m, 128, 8192, "rows", (False, False), rings, waves)
    us, ring = of(1, 0.03)
    assert ring == ring_for(1, 128, 8192, "rows", (False, False))[0] and 0 < us < of(1, 0.03, rings=False)[0]
    assert of(1, 0.03, rings=False)[1] is None and of(1, None, rings=False) == (0, None)
    slow, whole = library_us(1024, 5120, 8192, (False, True), 160 / 132, "rows"), (1024, 5120, 8192, (False, False))
    assert slow == library_us(*whole, 160 / 132, "rows"), "tiles of 256 columns"
    assert library_us(1024, 5120, 8192, (False, True), 256 / 132, "rows") > library_us(*whole, 256 / 132, "rows")


def test_a_faster_memory_leaves_fewer_products_to_a_ring():
    """3.35 TB/s as an H100 has them, 4.8 as an H200."""
    of = lambda peak: way_for(128, 8192, 2048, "rows", (False, False), True, 0.97, peak)
    assert of(3.35) == of(0) and of(0)[1] is not None and of(4.8)[1] is None and of(4.8)[0] < of(0)[0]
    assert memory_us(1, 8192, 8192, "rows", 2 * 3.35) == memory_us(1, 8192, 8192, "rows") / 2
    assert memory_peak(torch.device("cpu")) == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_product_that_is_cut_in_two_has_the_bits_of_the_whole(bias, start, given, monkeypatch):
    from bi_kernels.ops.gemm import gemm

    g, dtype = generator("cpu", 0), torch.float32 if start or given else None
    x, w = (draw("normal", shape, torch.bfloat16, g) for shape in ((33, 48), (72, 48)))
    added, begun = w[:, 0].clone() if bias else None, torch.randn(33, 72, generator=g) if start else None
    expected = gemm._launch(x, w, added, dtype, begun)
    out = (begun if start else torch.full((33, 72), float("nan"))) if given else None
    whole, asked = gemm.cheapest, []

    def cut(sizes, *rest):
        asked.append(sizes[1])
        return whole(sizes, *rest)[0], 24 if sizes[1] == 72 else 0

    monkeypatch.setattr(gemm, "cheapest", cut)
    found = gemm._launch(x, w, added, dtype, begun, out)
    assert asked == [72, 24, 48] and (found is out or not given)
    assert_same_bits(found, expected)


# Every op


def test_compiled_ops_are_one_graph_and_have_the_bits_of_eager_ones():
    torch.compiler.reset()
    x, table, ends = numbers(10, 48), bi.rope_table(512, 16), torch.tensor([0, 3, 10])

    def step(x, weight, ends):
        heads, ids = x.unflatten(-1, (3, 16)), torch.arange(10)
        return [
            *(bi.silu(x), bi.gelu(x, "tanh"), bi.swiglu(x, x), bi.geglu(x, x), bi.clamped_swiglu(x, x)),
            *(bi.soft_cap(x, 30.0), bi.add(x, x), bi.scale(x, 0.3), bi.bias_add(x, x[0]), bi.cast(x, torch.float32)),
            *(bi.mask_fill(x, x > 0, -1e4), bi.rope(heads, table, ids), bi.rope(heads, table, cu_seqlens=ends)),
            *(bi.linear(x, weight, weight[:, 0]), bi.matmul(x, weight.t()), bi.rms_norm(x, x[0]), bi.log_softmax(x)),
            *(*bi.add_rms_norm(x, x, x[0]), bi.embedding(ids, weight), *bi.lm_head_logprob(x, weight, ids)),
            *(*bi.token_logprob(x, ids), *bi.attention(heads, heads, heads, cu_seqlens=ends)),
        ]

    given = x, numbers(24, 48), ends
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    for number, (found, expected) in enumerate(zip(compiled, step(*given), strict=True)):
        assert_same_bits(found, expected, number)


@pytest.mark.parametrize("name", ["linear_bias", "matmul"])  # for the others' main_grad see test_compile.py
def test_a_compiled_product_leaves_its_parameters_gradients_in_main_grad(name):
    torch.compiler.reset()
    u = Step(under_test(name), CANCELLING, (5, 17))
    compiled = torch.compile(u.subject.function, fullgraph=True, backend="aot_eager")
    drift, tensor = compared(u.made(main_grad=True, function=compiled), u.folded)
    assert not drift.mismatches, (tensor, drift)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_compiled_linear_keeps_its_bits_at_other_row_counts(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(bi.linear, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x, w = numbers(200, 64, kind="cancelling"), numbers(40, 64)
    whole = bi.linear(x, w)
    for m in (5, 200, 17, 100):
        assert_same_bits(compiled(x[:m], w), whole[:m], f"M = {m}")


@pytest.mark.parametrize("name", OPS)
def test_an_expanded_input_gives_the_bits_of_its_copy(name):
    u = Step(under_test(name), CANCELLING, (5, 17))
    for k in u.floating:
        for t in (u.inputs()[k][:1], u.inputs()[k][..., :1]):
            wide = t.detach().expand_as(u.inputs()[k])
            found, expected = (u.made(u.inputs() | {k: x}) for x in (wide, wide.contiguous()))
            drift, tensor = compared(found, expected)
            assert not drift.mismatches, (k, t.shape, tensor, drift)


class NoGradient(torch.autograd.Function):
    """Passes a tensor on, and no gradient back."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


@pytest.mark.parametrize("name", OPS)
def test_an_op_without_an_upstream_gradient_gives_none(name):
    u = Step(under_test(name), CANCELLING, (5, 3))
    given = u.inputs()
    leaves = [given[k].requires_grad_() for k in u.floating]
    outputs = [NoGradient.apply(y) for y in u.outputs_of(given) if y.requires_grad]
    found = torch.autograd.grad(sum(y.sum() for y in outputs), leaves, allow_unused=True)
    assert found == (None,) * len(leaves)


@pytest.mark.parametrize("name", OPS)
def test_a_second_derivative_is_refused(name):
    u = Step(under_test(name), CANCELLING, (5, 3))
    given = u.inputs()
    leaves = [given[k].requires_grad_() for k in u.floating]
    outputs = [y for y in u.outputs_of(given) if y.requires_grad]
    dy = [torch.ones_like(y, requires_grad=True) for y in outputs]
    found = torch.autograd.grad(outputs, leaves, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable") as caught:
        found[0].sum().backward()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.row != "attention" and "log" not in name])
def test_no_rows_of_any_rank_give_no_rows_and_a_gradient_of_zeros(name):
    u = Step(under_test(name), CANCELLING, (5, 3))
    for lead in ((3, 0), (0, 3)):
        tokens, shared = (
            {k: t.clone().requires_grad_(k in u.floating) for k, t in p.items()} for p in u.parts(u.inputs())
        )
        none = {
            k: t.detach()[:0].reshape(*lead, *t.shape[1:]).requires_grad_(k in u.floating) for k, t in tokens.items()
        }
        outputs = u.subject.outputs(u.subject.forward(none, shared, lead, torch.zeros(lead, dtype=torch.long)))
        assert all(y.shape[:2] == lead for y in outputs)
        sum(y.float().sum() for y in outputs).backward()
        for k in u.floating:
            leaf = (none | shared)[k]
            assert_same_bits(leaf.grad, torch.zeros_like(leaf), f"{lead}: d{k}")


# RoPE


def test_rope_gives_no_gradient_to_its_table_and_nan_outside_it():
    x, table = numbers(5, 2, 16).requires_grad_(), bi.rope_table(8, 16)
    table.cos.requires_grad_()
    y = bi.rope(x, table, torch.tensor([0, 8, 7, -1, 2**40]))
    y.sum().backward()
    assert table.cos.grad is None
    for found in (y, x.grad):
        assert found[[1, 3, 4]].isnan().all() and found[[0, 2]].isfinite().all()
    inside = torch.tensor([0, 2])
    assert_same_bits(y.detach()[inside], bi.rope(x.detach()[inside], table, torch.tensor([0, 7])))
    bi.rope(x.detach(), table, torch.arange(5)).sum().backward()
    assert table.cos.grad is None


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("dim", [16, 96, 128])
def test_the_rope_table_is_fp64_rounded_once(dim, theta):
    angle = np.outer(np.arange(4096.0), np.power(theta, -np.arange(0, dim, 2) / dim))
    table = bi.rope_table(4096, dim, theta)
    assert_same_bits(table.cos, torch.from_numpy(np.cos(angle).astype(np.float32)), "cos")
    assert_same_bits(table.sin, torch.from_numpy(np.sin(angle).astype(np.float32)), "sin")
    assert compare(table.cos, torch.from_numpy(np.cos(angle.astype(np.float32)))).mismatches, (
        "fp32 angles would do as well"
    )


@EVERY_DTYPE
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned, dim", [(2, 4), (16, 22), (24, 96), (128, 128)])
def test_a_narrow_table_turns_the_first_features_and_copies_the_others(turned, dim, interleaved, dtype):
    table, bits = bi.rope_table(64, turned), torch.int32 if dtype == torch.float32 else torch.int16
    g = generator("cpu", "any bits", dim, dtype)
    every = torch.randint(-(2**31), 2**31, (40, 3, dim), generator=g)  # NaN with payloads, too
    x = every.to(bits).view(dtype).clone()
    y = bi.rope(x, table, torch.arange(40), interleaved=interleaved)
    assert y[..., turned:].view(bits).equal(x[..., turned:].view(bits))
    alone = bi.rope(x[..., :turned], table, torch.arange(40), interleaved=interleaved)
    assert_same_bits(y[..., :turned], alone, "the first features as heads of their own")
    exact = reference.rope(x := numbers(7, 3, dim, dtype=dtype), table, P7 := torch.arange(7), interleaved)
    assert_within("rope", bi.rope(x, table, P7, interleaved=interleaved), exact)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 2048}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "yarn": YARN,
    "yarn of DeepSeek": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16},
    "yarn untruncated": YARN | {"truncate": False, "attention_factor": 1.25, "beta_slow": 2},
    "yarn of a short context": YARN | {"original_max_position_embeddings": 16},
    "yarn of a long context": YARN | {"original_max_position_embeddings": 2**22},
    "llama3": LLAMA3,
}


def configured(parameters: dict, dim: int) -> SimpleNamespace:
    """What Transformers' functions read of a configuration."""
    sizes = {"head_dim": dim, "hidden_size": dim, "num_attention_heads": 1, "max_position_embeddings": 4096}
    return SimpleNamespace(rope_parameters=parameters, standardize_rope_params=lambda: None, **sizes)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("dim", [16, 96, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaled_table_is_that_of_transformers_in_fp64(name, dim, theta):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    parameters = SCALINGS[name] | {"rope_theta": theta}
    config = configured(parameters, dim)
    single, factor = utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    with patch.object(torch, "float", torch.float64), patch.object(torch, "float32", torch.float64):
        exact, _ = utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    assert exact.dtype == torch.float64 and single.dtype == torch.float32
    table = bi.rope_table(4096, dim, theta, scaling=parameters)
    angle = torch.arange(4096, dtype=torch.float64)[:, None] * exact
    for found, part in zip(table, (angle.cos(), angle.sin())):
        assert ((found.double() - part * factor).abs() <= 2.0**-24 * factor).all()
    ours, ours_factor = frequencies("rope_table", dim, theta, parameters)
    assert abs(ours_factor - factor) <= 2.0**-50 * factor
    assert ((ours - exact).abs() <= 2.0**-48 * exact).all()


def test_ntk_is_transformers_dynamic_rope_at_twice_the_length():
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = configured({"rope_theta": 1e4, "factor": 3.0}, 64)
    single, _ = utils.ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=8192)  # 3 · 2 − 2 = 4
    ours, factor = frequencies("rope_table", 64, 1e4, {"rope_type": "ntk", "factor": 4.0})
    assert factor == 1 and ((ours - single).abs() <= 2.0**-20 * ours).all()
    assert frequencies("rope_table", 2, 1e4, {"rope_type": "ntk", "factor": 4.0})[0].tolist() == [1.0]
