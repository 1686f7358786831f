"""The drift report: every differing bit counts, and its numbers say how far."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bi_kernels.audit import compare as drift
from bi_kernels.audit.compare import compare, ordered, raw
from bi_kernels.contract import DTYPES

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
INF, NAN = float("inf"), float("nan")


def changed(dtype: torch.dtype, value: float, other: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two (2, 3) tensors of ones, but for `value` and `other` at (1, 1)."""
    a, b = torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)
    a[1, 1], b[1, 1] = value, other
    return a, b


@EVERY_DTYPE
@pytest.mark.parametrize(
    "value, other, report",
    [
        (2.0, 1.0, (1.0, 0.5, "ulp of a binade")),
        (-1.0, 1.0, (2.0, 2.0, INF)),
        (-0.0, 0.0, (0.0, 0.0, 0)),
        (INF, 1.0, (INF, INF, INF)),
        (INF, -INF, (INF, INF, INF)),
        (NAN, 1.0, (INF, INF, INF)),
    ],
    ids=str,
)
def test_one_element_that_differs(dtype, value, other, report):
    steps = {"ulp of a binade": round(1 / torch.finfo(dtype).eps)}
    drift = compare(*changed(dtype, value, other))
    assert (drift.mismatches, drift.elements, drift.first_index) == (1, 6, (1, 1))
    assert (drift.max_abs, drift.max_rel, drift.max_ulp) == (*report[:2], steps.get(report[2], report[2])), drift


@EVERY_DTYPE
def test_equal_bits_are_no_drift(dtype):
    x = torch.tensor([1.0, -0.0, INF, -INF, NAN], dtype=dtype)
    assert compare(x, x.clone()) == compare(x.clone(), x) and not compare(x, x.clone()).mismatches
    assert str(compare(x, x.clone())) == "equal bits in 5 elements"


@EVERY_DTYPE
def test_a_nan_with_another_payload_is_a_drift(dtype):
    a, b = torch.full((2, 4), NAN, dtype=dtype)
    raw(b)[2] ^= 1
    drift = compare(a, b)
    assert b.isnan().all() and (drift.mismatches, drift.first_index, drift.max_ulp) == (1, (2,), INF), drift


@EVERY_DTYPE
@given(data=st.data())
def test_one_ulp(dtype, data):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    y, at = x.clone(), data.draw(st.tuples(st.integers(0, 4), st.integers(0, 6)))
    raw(y)[at] += data.draw(st.sampled_from((-1, 1)))
    drift = compare(y, x)
    assert (drift.mismatches, drift.max_ulp, drift.first_index) == (1, 1, at), drift
    assert 0 < drift.max_rel <= torch.finfo(dtype).eps and drift.max_abs == float((x.double() - y.double()).abs().max())


def test_the_first_index_is_first_in_logical_order_even_in_a_view():
    a = torch.zeros(3, 4).t()
    b = a.clone()
    b[1, 2], b[2, 0] = 1.0, 5.0
    drift = compare(a, b)
    assert (drift.first_index, drift.mismatches, drift.max_abs) == ((1, 2), 2, 5.0), drift


def test_masks_and_integers_are_compared_too():
    drift = compare(torch.tensor([3, 4, 9]), torch.tensor([3, 6, 9]))
    assert (drift.mismatches, drift.max_abs, drift.first_index) == (1, 2.0, (1,)), drift
    assert compare(torch.tensor([True, False]), torch.tensor([True, True])).first_index == (1,)
    assert compare(torch.ones(0, 3), torch.ones(0, 3)).mismatches == 0


@pytest.mark.parametrize("other", [torch.ones(2, 2), torch.ones(3, 2).bfloat16()])
def test_another_shape_or_dtype_is_an_error_not_a_drift(other):
    with pytest.raises(ValueError, match="cannot compare"):
        compare(torch.ones(3, 2), other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ordered_counts_the_floats_in_between(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = x[~x.isnan()]
    values, order = x.double().sort(stable=True)
    steps = ordered(x)[order].diff()
    assert torch.equal(steps, (values.diff() != 0).long()), "neighbours differ by 1, −0 and +0 by nothing"


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_ordered_is_monotone(x, y):
    a, b = ordered(torch.tensor([x, y])).tolist()
    assert (a < b) == (x < y) and (a == b) == (x == y)
    assert abs(a - int(ordered(torch.tensor([x]).nextafter(torch.tensor([y]))))) == (x != y)


@pytest.mark.parametrize("value", [2.0, INF, NAN])
def test_the_report_is_valid_json(value):
    drift = compare(*changed(torch.bfloat16, value, 1.0))
    report = json.loads(json.dumps(drift.json(), allow_nan=False))
    assert report["first_index"] == [1, 1] and report["mismatches"] == 1
    assert report["max_ulp"] == (128 if value == 2.0 else "inf")


def test_the_worst_of_every_piece_counts(monkeypatch):
    a = torch.zeros(10)
    b = a.clone()
    b[2], b[9] = 1.0, 3.0
    monkeypatch.setattr(drift, "AT_ONCE", 1)
    found = drift.compare(b, a)
    assert (found.mismatches, found.max_abs, found.first_index) == (2, 3.0, (2,))
