"""Forward ops: within the contract's bound, the same bits however they are called, one clear sentence on bad input."""

import math
import os
import re
import subprocess
import sys
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, assert_within
from hypothesis import given
from hypothesis import strategies as st

import bi_kernels as bi
from bi_kernels import contract, reference
from bi_kernels.audit.compare import compare
from bi_kernels.audit.inputs import draw, generator
from bi_kernels.contract import DTYPES
from bi_kernels.ops.gemm.cost import WRITES, best_cut, library_us, ring_for, tile_for, way_for
from bi_kernels.ops.gemm.kernel import launch, tiles
from bi_kernels.ops.rope_scaling import frequencies

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
FINITE_KINDS = ("normal", "wide", "cancelling", "signed_zeros", "subnormal")
TABLE = bi.rope_table(512, 16)
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 511, 7, 63, 64])


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, kind: str = "normal", seed: object = 0) -> torch.Tensor:
    return draw(kind, shape, dtype, generator("cpu", seed, *shape, dtype, kind))


def every_finite(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a 16-bit dtype; of fp32, those of bf16 and many more, of every exponent."""
    if dtype != torch.float32:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    else:
        g = generator("cpu", "every finite")
        random = torch.randint(-(2**31), 2**31, (2**18,), generator=g).int().view(dtype)
        x = torch.cat((every_finite(torch.bfloat16).float(), random, torch.linspace(-110, 110, 50_001)))
    return x[x.isfinite()]


# name: (function, {argument: shape}); the mask of mask_fill, the table and the positions of rope are given
CALLS = {
    "silu": (bi.silu, {"x": (10, 48)}),
    "gelu": (bi.gelu, {"x": (10, 48)}),
    "gelu_tanh": (lambda x: bi.gelu(x, "tanh"), {"x": (10, 48)}),
    "swiglu": (bi.swiglu, {"gate": (10, 48), "up": (10, 48)}),
    "geglu": (bi.geglu, {"gate": (10, 48), "up": (10, 48)}),
    "geglu_tanh": (lambda gate, up: bi.geglu(gate, up, "tanh"), {"gate": (10, 48), "up": (10, 48)}),
    "clamped_swiglu": (bi.clamped_swiglu, {"gate": (10, 48), "up": (10, 48)}),
    "soft_cap": (lambda x: bi.soft_cap(x, 30.0), {"x": (10, 48)}),
    "add": (bi.add, {"x": (10, 48), "residual": (10, 48)}),
    "scale": (lambda x: bi.scale(x, 0.3), {"x": (10, 48)}),
    "bias_add": (bi.bias_add, {"x": (10, 48), "bias": (48,)}),
    "mask_fill": (lambda x: bi.mask_fill(x, torch.arange(48) % 3 == 0, -1e4), {"x": (10, 48)}),
    "cast": (lambda x: bi.cast(x, torch.bfloat16), {"x": (10, 48)}),
    "rope": (lambda x: bi.rope(x, TABLE, POSITIONS), {"x": (10, 2, 16)}),
    "rope_interleaved": (lambda x: bi.rope(x, TABLE, POSITIONS, interleaved=True), {"x": (10, 2, 16)}),
    "rope_partial": (lambda x: bi.rope(x, TABLE, POSITIONS), {"x": (10, 2, 40)}),
    "linear": (bi.linear, {"x": (10, 48), "weight": (24, 48)}),
    "linear_bias": (bi.linear, {"x": (10, 48), "weight": (24, 48), "bias": (24,)}),
    "matmul": (bi.matmul, {"a": (10, 48), "b": (48, 24)}),
}
EVERY_OP = pytest.mark.parametrize("name", CALLS)


def arguments(name: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {k: numbers(*shape, dtype=dtype, seed=k) for k, shape in CALLS[name][1].items()}


# Accuracy


@EVERY_DTYPE
@pytest.mark.parametrize(
    "name, fn, exact",
    [
        ("silu", bi.silu, reference.silu),
        ("gelu", bi.gelu, reference.gelu),
        ("gelu_tanh", lambda x: bi.gelu(x, "tanh"), lambda x: reference.gelu(x, "tanh")),
        ("soft_cap", lambda x: bi.soft_cap(x, 30.0), lambda x: reference.soft_cap(x, 30.0)),
        ("soft_cap", lambda x: bi.soft_cap(x, 2.0**-126), lambda x: reference.soft_cap(x, 2.0**-126)),
        ("soft_cap", lambda x: bi.soft_cap(x, 2.0**127), lambda x: reference.soft_cap(x, 2.0**127)),
        ("clamped_swiglu", lambda x: bi.clamped_swiglu(x, x), lambda x: reference.clamped_swiglu(x, x)),
        ("scale", lambda x: bi.scale(x, 0.3), lambda x: reference.scale(x, 0.3)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_unary_ops_are_within_the_bound_for_every_finite_number(name, fn, exact, dtype):
    x = every_finite(dtype)
    assert_within(name, fn(x), exact(x))


@EVERY_DTYPE
@pytest.mark.parametrize("kind", FINITE_KINDS)
@pytest.mark.parametrize(
    "name, fn, exact, other",
    [
        ("swiglu", bi.swiglu, reference.swiglu, (70, 96)),
        ("geglu", bi.geglu, reference.geglu, (70, 96)),
        ("geglu_tanh", *(partial(of.geglu, approximate="tanh") for of in (bi, reference)), (70, 96)),
        ("clamped_swiglu", bi.clamped_swiglu, reference.clamped_swiglu, (70, 96)),
        ("add", bi.add, reference.add, (70, 96)),
        ("bias_add", bi.bias_add, reference.bias_add, (96,)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_binary_ops_are_within_the_bound(name, fn, exact, other, kind, dtype):
    x, y = numbers(70, 96, dtype=dtype, kind=kind), numbers(*other, dtype=dtype, kind=kind, seed=1)
    assert_within(name, fn(x, y), exact(x, y))


@EVERY_DTYPE
@pytest.mark.parametrize("kind", FINITE_KINDS)
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (3, 5, 7), (17, 24, 48), (16, 33, 100), (65, 40, 256), (130, 7, 30)])
def test_linear_is_within_the_bound(m, n, k, kind, dtype):
    x, w, b = numbers(m, k, dtype=dtype, kind=kind), numbers(n, k, dtype=dtype, seed=1), numbers(n, dtype=dtype, seed=2)
    assert_within("linear", bi.linear(x, w), reference.linear(x, w), k)
    assert_within("linear", bi.linear(x, w, b), reference.linear(x, w, b), k)


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


@EVERY_DTYPE
@pytest.mark.parametrize(
    "name, exact",
    [
        ("silu", reference.silu),
        ("gelu", reference.gelu),
        ("gelu_tanh", lambda x: reference.gelu(x, "tanh")),
        ("swiglu", reference.swiglu),
        ("geglu", reference.geglu),
        ("geglu_tanh", lambda gate, up: reference.geglu(gate, up, "tanh")),
        ("clamped_swiglu", reference.clamped_swiglu),
        ("soft_cap", lambda x: reference.soft_cap(x, 30.0)),
        ("add", reference.add),
        ("scale", lambda x: reference.scale(x, 0.3)),
        ("bias_add", reference.bias_add),
        ("linear", reference.linear),
        ("linear_bias", reference.linear),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_nonfinite_inputs_give_what_fp64_gives(name, exact, dtype):
    given, infinity = arguments(name, dtype), float("inf")
    specials, first = torch.tensor([infinity, -infinity, float("nan"), 0.0, -0.0, 1.0], dtype=dtype), next(iter(given))
    for k in given:  # every special of the first argument meets every special of the others
        given[k].view(-1)[:36] = specials.repeat_interleave(6) if k == first else specials.repeat(6)[: given[k].numel()]
    y, (y64, _) = CALLS[name][0](**given), exact(**given)
    special = lambda t: torch.where(t.isfinite(), 0.0, t.double().nan_to_num(nan=9.0, posinf=1.0, neginf=-1.0))
    wrong = [tuple(at) for at in (special(y) != special(y64)).nonzero().tolist()]
    assert not wrong, f"{len(wrong)} differ, first {y[wrong[0]]} instead of {y64[wrong[0]]} at {wrong[0]}"


@EVERY_DTYPE
def test_an_empty_sum_is_a_sum_of_zeros(dtype):
    bias = torch.tensor([1.5, -2.0, -0.0, float("inf")], dtype=dtype)
    for b in (None, bias):
        empty, zeros = (bi.linear(bias.new_zeros(3, k), bias.new_zeros(4, k), b) for k in (0, 16))
        assert_same_bits(empty, zeros, f"bias {b}")


# Linear: what may not change a bit


@EVERY_DTYPE
def test_a_row_of_linear_has_the_same_bits_at_every_row_count(dtype):
    largest = contract.SWEEP["interpreter_rows"]
    x, w = numbers(largest, 72, dtype=dtype, kind="cancelling"), numbers(40, 72, dtype=dtype)
    poisoned = x.clone()
    poisoned[1::2] = float("nan")
    whole, beside_nan = bi.linear(x, w), bi.linear(poisoned, w)
    for m in contract.rows(largest):
        assert_same_bits(bi.linear(x[:m], w), whole[:m], f"M = {m}")
    assert_same_bits(beside_nan[::2], whole[::2], "between rows of NaN")


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


# Every op: what may not change a bit

VIEWS = {
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t.flip(0),
    "strided": lambda t: torch.stack((t, torch.full_like(t, float("nan"))), -1)[..., 0],
    "rows apart": lambda t: torch.cat((t, torch.full_like(t[..., :3], float("nan"))), -1)[..., :-3],
    "misaligned": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
    "expanded": lambda t: t[:1].expand_as(t),
    "expanded columns": lambda t: t[..., :1].expand_as(t),
}


@EVERY_DTYPE
@EVERY_OP
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_gives_the_bits_of_its_copy(view, name, dtype):
    given = arguments(name, dtype)
    for argument in given:
        t = VIEWS[view](given[argument])
        copy = t.clone(memory_format=torch.contiguous_format)
        expected = CALLS[name][0](**given | {argument: copy})
        assert_same_bits(CALLS[name][0](**given | {argument: t}), expected, f"{argument} {view}")


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("rope")])
def test_the_rank_of_the_batch_does_not_matter(name):
    fn, shapes = CALLS[name]
    given = arguments(name)
    per_token = [k for k in shapes if k not in ("weight", "bias", "b")]
    expected = fn(**given)
    for lead in ((2, 5), (1, 5, 2)):
        y = fn(**given | {k: given[k].reshape(*lead, -1) for k in per_token})
        assert_same_bits(y, expected.reshape(*lead, -1), lead)


@pytest.fixture
def compiler():
    """torch.compile without what earlier tests left in its caches."""
    torch.compiler.reset()
    return torch.compile


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_ops_give_the_bits_of_eager_ones(backend, compiler):
    every = {name: arguments(name) for name in CALLS}

    def step(every):
        return {name: CALLS[name][0](**given) for name, given in every.items()}

    compiled = compiler(step, fullgraph=True, backend=backend)(every)
    for name, y in step(every).items():
        assert_same_bits(compiled[name], y, name)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_compiled_linear_keeps_its_bits_at_other_row_counts(dynamic, compiler):
    compiled = compiler(bi.linear, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x, w = numbers(200, 64, kind="cancelling"), numbers(40, 64)
    whole = bi.linear(x, w)
    for m in (5, 200, 17, 100):
        assert_same_bits(compiled(x[:m], w), whole[:m], f"M = {m}")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_rope_takes_cu_seqlens(backend, compiler):
    x, cu_seqlens = numbers(10, 2, 16), torch.tensor([0, 3, 10])
    compiled = compiler(lambda x, c: bi.rope(x, TABLE, cu_seqlens=c), fullgraph=True, backend=backend)
    assert_same_bits(compiled(x, cu_seqlens), bi.rope(x, TABLE, cu_seqlens=cu_seqlens))


# Copies and casts


@EVERY_DTYPE
def test_mask_fill_copies_bits(dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)  # NaN payloads, −0, subnormals
    x = (bits.int() * 65537 if dtype == torch.float32 else bits).view(dtype)
    mask = torch.arange(2**16) % 2 == 0
    y = bi.mask_fill(x, mask, -1e4)
    assert_same_bits(y[~mask], x[~mask], "kept")
    assert_same_bits(y[mask], torch.full_like(x, -1e4)[mask], "filled")


@EVERY_DTYPE
@pytest.mark.parametrize("value", [-0.0, 0.0, float("-inf"), 1 / 3, 65519.9, 2.0**-133 / 3, 3.4e38])
def test_the_numbers_of_mask_fill_and_scale_are_rounded_to_fp32_first(value, dtype):
    fp32 = torch.tensor(value, dtype=torch.float32)
    x = torch.tensor([1.0, -3.0, 6e4, -0.125]).to(dtype)
    assert_same_bits(bi.mask_fill(x, torch.ones(4, dtype=torch.bool), value), fp32.to(dtype).expand(4), "mask_fill")
    assert_same_bits(bi.scale(x, value), (x.float() * fp32).to(dtype), "scale")


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


# RoPE


@EVERY_DTYPE
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [2, 16, 96, 128])
def test_rope_is_within_the_bound(dim, interleaved, dtype):
    table, positions = bi.rope_table(5000, dim), torch.tensor([0, 1, 17, 4095, 4999, 3, 2])
    x = numbers(7, 3, dim, dtype=dtype)
    y = bi.rope(x, table, positions, interleaved=interleaved)
    assert_within("rope", y, reference.rope(x, table, positions, interleaved))


@EVERY_DTYPE
@pytest.mark.parametrize("dim", [16, 96])
def test_interleaved_rope_is_half_rotated_rope_of_reordered_features(dim, dtype):
    table, x = bi.rope_table(64, dim), numbers(40, 2, dim, dtype=dtype)
    pairs = torch.arange(dim).reshape(-1, 2).t().flatten()  # 0, 2, 4, …, 1, 3, 5, …
    half = bi.rope(x[..., pairs], table, torch.arange(40))
    assert_same_bits(bi.rope(x, table, torch.arange(40), interleaved=True)[..., pairs], half)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_packed_rope_restarts_at_every_sequence(integer, lengths):
    x = numbers(sum(lengths), 2, 16, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=integer)
    positions = torch.tensor([p for n in lengths for p in range(n)], dtype=integer)
    packed = bi.rope(x, TABLE, cu_seqlens=cu_seqlens)
    assert_same_bits(packed, bi.rope(x, TABLE, positions), f"lengths {lengths}")
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        assert_same_bits(packed[start:end], bi.rope(x[start:end], TABLE, torch.arange(end - start)), "alone")


def test_rope_positions_broadcast():
    x = numbers(3, 10, 2, 16)
    expected = torch.stack([bi.rope(sample, TABLE, POSITIONS) for sample in x])
    assert_same_bits(bi.rope(x, TABLE, POSITIONS), expected, "(10,)")
    assert_same_bits(bi.rope(x, TABLE, POSITIONS.expand(3, 10)), expected, "(3, 10)")


def test_a_position_outside_the_table_gives_nan_and_only_there():
    x, table = numbers(5, 2, 16), bi.rope_table(8, 16)
    positions = torch.tensor([0, 8, 7, -1, 2**40])
    y = bi.rope(x, table, positions)
    inside = torch.tensor([0, 2])
    assert y[[1, 3, 4]].isnan().all(), y
    assert_same_bits(y[inside], bi.rope(x[inside], table, positions[inside]))


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
@pytest.mark.parametrize("turned, dim", [(2, 4), (8, 16), (16, 22), (24, 96), (32, 128)])
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


@EVERY_DTYPE
@pytest.mark.parametrize("scaling", [None, {"rope_type": "ntk", "factor": 4}, *SCALINGS.values()])
def test_rope_by_a_scaled_table_is_within_the_bound(scaling, dtype):
    if scaling and scaling.keys() & {"beta_fast", "truncate"}:
        scaling = YARN  # of its defaults alone there is a reference
    x, positions = numbers(7, 3, 96, dtype=dtype), torch.tensor([0, 1, 17, 4095, 4999, 3, 2])
    y = bi.rope(x, bi.rope_table(5000, 96, scaling=scaling), positions)
    assert_within("rope", y, reference.rope(x, bi.rope_table(1, 96), positions, scaling=scaling))


# Bad input: one sentence that names the op, the argument, its value and what is allowed

X, W, BIAS, Q, MASK = (
    numbers(5, 32),
    numbers(24, 32),
    numbers(24),
    numbers(6, 2, 16),
    torch.zeros(5, 32, dtype=torch.bool),
)
COS, SIN = TABLE
P = torch.arange(6)


def rope(x=Q, table=TABLE, positions=None, **more):
    return bi.rope(x, table, P if positions is None and "cu_seqlens" not in more else positions, **more)


BAD_INPUT = [
    *[
        (
            lambda fn=fn, name=name, dtype=dtype: fn(**{k: t.to(dtype) for k, t in arguments(name).items()}),
            TypeError,
            " … ".join(["has dtype", str(dtype).removeprefix("torch."), "supported are bf16, fp16, fp32"]),
        )
        for name, (fn, _) in CALLS.items()
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.complex64, torch.float64, torch.bool)
    ],
    (
        lambda: bi.cast(X, torch.float8_e4m3fn),
        TypeError,
        "cast: dtype is torch.float8_e4m3fn … supported are bf16, fp16, fp32",
    ),
    (lambda: bi.cast(X, "bf16"), TypeError, "cast: dtype is … supported are"),
    (
        lambda: bi.linear(X, W.half()),
        TypeError,
        "linear: weight has dtype torch.float16 … x has torch.bfloat16 … equal",
    ),
    (lambda: bi.linear(X, W, BIAS.float()), TypeError, "linear: bias … torch.float32 … torch.bfloat16"),
    (lambda: bi.matmul(X, W.t().float()), TypeError, "matmul: b … torch.float32 … torch.bfloat16"),
    (lambda: bi.add(X, X.float()), TypeError, "add: residual … torch.float32 … torch.bfloat16"),
    (lambda: bi.swiglu(X, X.half()), TypeError, "swiglu: up … torch.float16 … torch.bfloat16"),
    (lambda: bi.bias_add(X, W[0].half()), TypeError, "bias_add: bias … torch.float16 … torch.bfloat16"),
    (lambda: bi.linear(X, W.to("meta")), ValueError, "linear: weight is on meta … x is on cpu … one device"),
    (lambda: bi.linear(X, W, BIAS.to("meta")), ValueError, "linear: bias is on meta … cpu"),
    (lambda: bi.add(X, X.to("meta")), ValueError, "add: residual is on meta … cpu"),
    (lambda: bi.mask_fill(X, MASK.to("meta"), 0.0), ValueError, "mask_fill: mask is on meta … cpu"),
    (lambda: rope(positions=P.to("meta")), ValueError, "rope: positions is on meta … cpu"),
    (lambda: rope(table=bi.RopeTable(COS.to("meta"), SIN)), ValueError, "rope: … cos is on meta … cpu"),
    (lambda: bi.silu(X.to("meta")), ValueError, "silu: x is on meta … supported are cuda, and cpu"),
    (lambda: bi.linear(X[:, :4], W), ValueError, "linear: x has shape (5, 4) … (..., 32) … (24, 32)"),
    (lambda: bi.linear(X, W[0]), ValueError, "linear: weight has shape (32,) … (N, K)"),
    (lambda: bi.linear(X[0, 0], W), ValueError, "linear: x has shape () … (..., 32)"),
    (lambda: bi.linear(X, W, BIAS[:3]), ValueError, "linear: bias has shape (3,) … (24,)"),
    (lambda: bi.matmul(X, W), ValueError, "matmul: … (5, 32) … (24, 32) … (K, N)"),
    (lambda: bi.matmul(X[0], W.t()), ValueError, "matmul: a has shape (32,) … (..., M, K)"),
    (lambda: bi.add(X, X[0]), ValueError, "add: residual has shape (32,) … (5, 32)"),
    (lambda: bi.swiglu(X, X[:, :8]), ValueError, "swiglu: up has shape (5, 8) … (5, 32)"),
    (lambda: bi.bias_add(X, BIAS), ValueError, "bias_add: bias has shape (24,) … (32,)"),
    (lambda: bi.mask_fill(X, MASK[:3], 0.0), ValueError, "mask_fill: mask has shape (3, 32) … (5, 32)"),
    (lambda: bi.mask_fill(X, MASK.int(), 0.0), TypeError, "mask_fill: mask … torch.int32 … torch.bool"),
    (lambda: bi.silu([1.0]), TypeError, "silu: x is a list … torch.Tensor"),
    (lambda: bi.add(X, 1.0), TypeError, "add: residual is a float … torch.Tensor"),
    (lambda: bi.linear(X, None), TypeError, "linear: weight is … None … torch.Tensor"),
    (lambda: bi.add(X, None), TypeError, "add: residual is … None … torch.Tensor"),
    (lambda: bi.silu(None), TypeError, "silu: x is … None … torch.Tensor"),
    (lambda: bi.mask_fill(X, None, 0.0), TypeError, "mask_fill: mask is … None … torch.Tensor"),
    (lambda: bi.scale(X, "a"), (TypeError, ValueError), "scale: factor … 'a'"),
    (lambda: bi.mask_fill(X, MASK, None), (TypeError, ValueError), "mask_fill: value … None"),
    (lambda: bi.geglu(X, X[:, :8]), ValueError, "geglu: up has shape (5, 8) … (5, 32)"),
    *[
        (call, error, f"{name} is {value!r} … expected a … number")
        for name, value, error, call in (
            ("soft_cap: cap", 0, ValueError, lambda: bi.soft_cap(X, 0)),
            ("soft_cap: cap", -1.0, ValueError, lambda: bi.soft_cap(X, -1.0)),
            ("soft_cap: cap", math.inf, ValueError, lambda: bi.soft_cap(X, math.inf)),
            ("soft_cap: cap", math.nan, ValueError, lambda: bi.soft_cap(X, math.nan)),
            ("soft_cap: cap", "30", TypeError, lambda: bi.soft_cap(X, "30")),
            ("clamped_swiglu: limit", 0.0, ValueError, lambda: bi.clamped_swiglu(X, X, 0.0)),
            ("clamped_swiglu: alpha", 2.0**200, ValueError, lambda: bi.clamped_swiglu(X, X, alpha=2.0**200)),
            ("clamped_swiglu: offset", math.nan, ValueError, lambda: bi.clamped_swiglu(X, X, offset=math.nan)),
            ("clamped_swiglu: offset", None, TypeError, lambda: bi.clamped_swiglu(X, X, offset=None)),
        )
    ],
    (lambda: bi.geglu(X, X, "erf"), ValueError, "geglu: approximate is 'erf' … 'none' or 'tanh'"),
    (lambda: bi.gelu(X, "tan"), ValueError, "gelu: approximate is 'tan' … 'none' or 'tanh'"),
    (lambda: rope(Q[0, 0]), ValueError, "rope: x has shape (16,) … (..., heads, head_dim)"),
    (lambda: rope(numbers(6, 2, 17)), ValueError, "rope: … 17 … even"),
    (lambda: bi.rope(Q, TABLE), ValueError, "rope: … positions … cu_seqlens"),
    (lambda: rope(positions=P, cu_seqlens=torch.tensor([0, 6])), ValueError, "rope: … positions … cu_seqlens"),
    (lambda: rope(positions=P.float()), TypeError, "rope: positions … torch.float32 … integers"),
    (lambda: rope(positions=P > 0), TypeError, "rope: positions … torch.bool … integers"),
    (lambda: rope(positions=P[:5]), ValueError, "rope: positions has shape (5,) … (6,)"),
    (lambda: rope(positions=P.expand(2, 6)), ValueError, "rope: positions has shape (2, 6) … (6,)"),
    (lambda: rope(positions=[0, 1]), TypeError, "rope: positions is a list … torch.Tensor"),
    *[
        (
            lambda cu=cu: rope(cu_seqlens=torch.tensor(cu)),
            (TypeError, ValueError),
            " … ".join(["rope:", "cu_seqlens", allowed]),
        )
        for cu, allowed in (
            ([0, 2, 5], "end at 6"),
            ([1, 6], "start at 0"),
            ([0, 4, 2, 6], "never decrease"),
            ([], "integers"),
            ([[0, 6]], "one dimension"),
            ([0.0, 6.0], "integers"),
            ([False, True], "integers"),
        )
    ],
    (
        lambda: rope(Q[None], cu_seqlens=torch.tensor([0, 6])),
        ValueError,
        "rope: x has shape (1, 6, 2, 16) … (tokens, heads, head_dim)",
    ),
    (lambda: rope(table=None), TypeError, "rope: table is … None … RopeTable"),
    (lambda: rope(table=COS), TypeError, "rope: table is … Tensor … RopeTable"),
    (lambda: rope(table=bi.RopeTable(COS, None)), TypeError, "rope: … sin … None … torch.Tensor"),
    (
        lambda: rope(table=bi.RopeTable(COS.double(), SIN.double())),
        TypeError,
        "rope: table.cos … torch.float64 … torch.float32",
    ),
    (lambda: rope(table=bi.rope_table(8, 32)), ValueError, "rope: table.cos has shape (8, 16) … (8, 8)"),
    (lambda: rope(table=bi.RopeTable(COS, SIN[:9])), ValueError, "rope: table.sin has shape (9, 8) … (512, 8)"),
    (lambda: rope(table=bi.RopeTable(COS[0, 0], SIN[0, 0])), ValueError, "rope: table.cos has shape () … 8"),
    (lambda: bi.rope_table(0, 8), ValueError, "rope_table: positions is 0 … at least 1"),
    *[
        (partial(bi.rope_table, 4, 16, scaling=of), error, " … ".join(["rope_table: ", *said]))
        for n, (of, error, *said) in enumerate(
            (
                ("yarn", TypeError, "scaling is 'yarn'", "a dict with a rope_type"),
                ({}, ValueError, "scaling's rope_type is None", "linear, ntk, yarn, llama3"),
                ({"rope_type": "dynamic"}, ValueError, "scaling's rope_type is 'dynamic'", "linear, ntk, yarn, llama3"),
                ({"rope_type": "linear"}, ValueError, "of rope_type 'linear' has no factor", "expected factor"),
                (YARN | {"low_freq_factor": 1}, ValueError, "of rope_type 'yarn' has 'low_freq_factor'", "beta_fast"),
                ({"rope_type": "linear", "factor": 0}, ValueError, "scaling's factor is 0", "a positive number"),
                ({"rope_type": "linear", "factor": "8"}, TypeError, "scaling's factor is '8'", "expected a number"),
                (YARN | {"truncate": 1}, TypeError, "scaling's truncate is 1", "True or False"),
                (YARN | {"rope_theta": 1e6}, ValueError, "scaling's rope_theta is 1000000.0", "theta, which is 10000"),
                (YARN | {"beta_fast": 1}, ValueError, "scaling's beta_slow is 1", "less than beta_fast"),
                (LLAMA3 | {"low_freq_factor": 4.0}, ValueError, "scaling's low_freq_factor is 4.0", "high_freq_factor"),
            )
        )
    ],
    (lambda: bi.rope_table(4, 16, 1.0, scaling=YARN), ValueError, "rope_table: theta is 1.0 … more than 1"),
    (
        lambda: rope(table=bi.RopeTable(COS[:, :0], SIN[:, :0])),
        ValueError,
        "rope: table.cos has shape (512, 0) … (512, 8) … or fewer columns",
    ),
    (lambda: bi.rope_table(4, 7), ValueError, "rope_table: head_dim is 7 … even"),
]


@pytest.mark.parametrize("call, error, words", BAD_INPUT, ids=[row[-1] for row in BAD_INPUT])
def test_bad_input_is_one_clear_sentence(call, error, words):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 250, message
    assert all(word in message for word in words.split(" … ")), message


def test_an_op_names_itself_in_every_dtype_error():
    for name, (fn, _) in CALLS.items():
        with pytest.raises(TypeError, match=f"^{re.sub('_(bias|tanh|interleaved|partial)$', '', name)}: "):
            fn(**{k: t.double() for k, t in arguments(name).items()})


def test_a_cpu_tensor_without_the_interpreter_says_what_to_set():
    code = "import torch, bi_kernels\nbi_kernels.linear(torch.ones(2, 16), torch.ones(3, 16))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: linear: x is on cpu and Triton's interpreter is off; set TRITON_INTERPRET=1 before Python "
        "starts, or move it to a CUDA device"
    )
