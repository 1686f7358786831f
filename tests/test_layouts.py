"""Layouts: every logical token computed, none invented, no layout the same call under another name."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, op_under_test, slow_but
from hypothesis import given, settings
from hypothesis import strategies as st

import bi_kernels
from bi_kernels.audit.layouts import Call, layouts, random_layout, spans, step_layouts
from bi_kernels.contract import SHAPES, SWEEP

LENGTHS = SHAPES["tiny"]["lengths"]
several = st.lists(st.integers(1, 40), min_size=2, max_size=7)


def launched(calls: list[Call]) -> list[tuple]:
    """What an op sees of a layout: the shapes of its calls and what stands where."""
    return [(call.index.shape, call.index.tobytes(), call.cu_seqlens) for call in calls]


def assert_sound(calls: list[Call], lengths: list[int]) -> None:
    tokens = np.concatenate([call.index.reshape(-1) for call in calls])
    assert sorted(set(tokens.tolist()) - {-1}) == list(range(sum(lengths))), "every logical token, and no other"
    position = np.concatenate([np.arange(n) for n in lengths])
    sample = np.repeat(np.arange(len(lengths)), lengths)
    for call in calls:
        if call.cu_seqlens is None:
            assert call.index.ndim == 2, "(batch, length)"
            for row in call.index:
                real = row[row >= 0]
                assert len(set(sample[real])) == 1 and (np.diff(real) == 1).all(), "one row, one sample, in order"
                assert (np.diff(np.flatnonzero(row >= 0)) == 1).all(), "padding on one side only"
            continue
        starts, ends = call.cu_seqlens[:-1], call.cu_seqlens[1:]
        assert call.cu_seqlens[0] == 0 and call.cu_seqlens[-1] == len(call.index) and (call.index >= 0).all()
        for start, end in zip(starts, ends):
            packed = call.index[start:end]
            assert (position[packed] == np.arange(end - start)).all(), "positions restart at every sequence"
            assert len(set(sample[packed])) == 1 and len(packed) == lengths[sample[packed[0]]], "whole sequences"


@given(lengths=several, seed=st.integers(0, 99))
def test_layouts_are_sound(lengths, seed):
    for calls in (*layouts(lengths, seed).values(), *step_layouts(lengths, seed).values()):
        assert_sound(calls, lengths)


@given(lengths=several, seed=st.integers(0, 999))
def test_random_layouts_are_sound(lengths, seed):
    assert_sound(random_layout(lengths, np.random.default_rng(seed)), lengths)


@given(lengths=several, seed=st.integers(0, 99))
def test_every_layout_but_packed_makes_other_calls_than_packed(lengths, seed):
    every = {name: launched(calls) for name, calls in layouts(lengths, seed).items()}
    packed = every.pop("packed")
    assert not [name for name, calls in every.items() if calls == packed]


@pytest.mark.parametrize("shapes", SHAPES)
def test_the_layouts_of_the_contract_are_what_their_names_say(shapes):
    lengths = SHAPES[shapes]["lengths"]
    every, s = layouts(lengths), spans(lengths)
    widths = lambda name: [call.index.shape for call in every[name]]
    assert widths("packed") == [(sum(lengths),)] and every["packed"][0].cu_seqlens == (0, *accumulate(lengths))
    assert widths("singles") == [(1, n) for n in lengths]
    assert widths("batch") == widths("left_padded") == [(len(lengths), max(lengths))]
    assert widths("batch:16") == widths("left_padded:16") == [(len(lengths), -(-max(lengths) // 16) * 16)]
    assert every["batch"][0].index[:, 0].tolist() == [x[0] for x in s] and (every["batch"][0].index[:, -1] == -1).any()
    assert every["left_padded"][0].index[:, -1].tolist() == [x[-1] for x in s]
    assert len(widths("decode")) == max(lengths) and all(width == 1 for _, width in widths("decode"))
    for size in SWEEP["chunks"]:
        assert widths(f"chunked:{size}") == [(1, min(size, n - at)) for n in lengths for at in range(0, n, size)]
    assert all(call.index.shape[0] <= 2 for name in ("neighbours", "neighbours:left") for call in every[name])
    assert len({tuple(launched(calls)) for calls in every.values()}) == len(every), "no two make the same calls"


@pytest.mark.parametrize("name", layouts(LENGTHS))
@pytest.mark.parametrize("kind", ["normal", "nonfinite"])
def test_results_come_back_in_logical_order(name, kind):
    s = op_under_test("silu", lambda x: x.clone(), "fp32")
    y = s.layout(name, kind)
    ((tokens, _),) = [value for key, value in s.memo.items() if key[0] == "inputs"]
    assert_same_bits(y, tokens["x"], name)


@pytest.mark.parametrize("name", layouts(LENGTHS))
def test_every_token_is_given_its_own_position(name):
    def position(x, table, positions=None, cu_seqlens=None):
        if positions is None:
            positions = bi_kernels.packed_positions(cu_seqlens, len(x))
        return positions[..., None, None].expand_as(x).float()

    expected = torch.cat([torch.arange(n) for n in LENGTHS]).float()[:, None, None].expand(-1, 4, 16)
    assert_same_bits(op_under_test("rope", position, "fp32").layout(name), expected, name)


@settings(max_examples=15)
@given(st.integers(0, 999))
@pytest.mark.parametrize(
    "op, dtype",
    slow_but([("linear", "bf16"), ("linear", "fp32"), ("rope", "bf16"), ("rope_interleaved", "fp32")], "linear"),
)
def test_any_layout_gives_the_bits_of_packed(op, dtype, seed):
    calls, s = random_layout(LENGTHS, np.random.default_rng(seed)), op_under_test(op, None, dtype)
    assert_same_bits(s.compute(calls), s.layout("packed"), [call.index.shape for call in calls])


@pytest.mark.parametrize("kind, stale", [("normal", 7.0), ("nonfinite", float("nan"))])
def test_padding_holds_numbers_that_no_token_may_see(kind, stale):
    seen = []
    op_under_test("silu", lambda x: seen.append(x) or x.clone(), "fp32").layout("left_padded", kind)
    padding = seen[0][torch.from_numpy(layouts(LENGTHS)["left_padded"][0].index < 0)]
    assert padding.numel()
    assert_same_bits(padding, torch.full_like(padding, stale), kind)
