"""Parts of the localiser: digests that see every bit, readings of shapes, launches."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from bi_kernels.audit.localiser.tracing.digest import SPLIT, by_kernel, rows, whole, words_of
from bi_kernels.audit.localiser.tracing.geometry import Geometry, Tokens
from bi_kernels.audit.localiser.tracing.trace import Trace, tracing


def test_a_digest_sees_every_bit_and_the_place():
    x = torch.randn(3, 10).bfloat16()
    other = x.clone()
    other[1, 9] = -other[1, 9]
    other[1, 3] = -other[1, 3]  # signs alone
    swapped = x.flip(1)
    assert (rows(x, 3) == rows(other, 3)).tolist() == [True, False, True]
    assert not (rows(x, 3) == rows(swapped, 3)).any()
    assert rows(x[:1], 1)[0] == rows(x.float().bfloat16(), 3)[0]
    long = torch.randn(3 * 4096 + 5)
    changed = long.clone()
    changed[-1] += 1
    assert whole(long) != whole(changed) and whole(long) == whole(long.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.half, torch.int8, torch.uint8, torch.int32])
def test_the_kernel_of_digests_agrees_with_torch(dtype):
    drawn = lambda *shape: torch.randint(-128, 128, (shape[0], *shape[1:]), dtype=torch.int8).to(dtype)
    odd = drawn(3, 5, 8)
    views = [drawn(*shape) for shape in ((1, 1), (1, 2), (3, 10), (17, 7), (33, 130), (1, 5000), (40, 64))]
    views += [odd[:, 0, 1:5], odd[:, 1], odd.mT[0], odd[0, :, ::2], drawn(43)[1:].view(6, 7), drawn(41)[1:].view(5, 8)]
    long = drawn(2, SPLIT + 6)
    for x in (*views, long):
        assert torch.equal(rows(x, len(x)), by_kernel(words_of(x))), (x.shape, x.stride())
    assert not torch.equal(rows(long, 2), by_kernel(words_of(long.flip(1))))


def test_a_view_of_the_same_rows_is_digested_once_until_they_are_written():
    geometry, x = Geometry(np.arange(6)[None], Tokens((6,))), torch.randn(1, 6, 4, 8)
    trace = Trace({}, {}, {})
    trace.begin(geometry)
    of = lambda t: trace.slot(t, True).digests[0].rows
    first = of(x)
    assert (
        of(x.view(6, 32)) is first and of(x.transpose(1, 2)) is first and of(x.view(torch.int32).float()) is not first
    )
    assert of(x[..., 1:]) is not first and of(x.flatten(2).mT.mT) is first and of(x.transpose(2, 3)) is not first
    x[0, 2] = 0  # unseen, but it has another version
    assert (of(x.view(6, 32)) == first).tolist() == [True, True, False, True, True, True]
    second = of(x)
    trace.wrote(x, (0, 0, 0), False)
    assert of(x.flatten(2)) is not second and torch.equal(of(x), second)


def test_readings_say_which_dimensions_hold_tokens():
    tokens = Tokens((5, 2, 4))
    batch = Geometry(np.full((3, 7), 0), tokens)
    of = lambda *shape: batch.readings(shape)[0][:3]
    assert of(3, 7, 64) == ("bl", (0, 1), 1) and of(21, 64) == ("bl", (0,), 1) and of(7, 3, 64) == ("bl", (1, 0), 1)
    assert of(3, 4, 7, 16) == ("bl", (0, 2), 1) and of(12, 7, 16) == ("bl", (0, 1), 4) and of(1, 7, 16)[0] == "l"
    assert of(3, 64)[0] == "b" and of(64, 65)[0] == "n" and batch.readings((3, 4, 7, 7))[0].keys == 3


@triton.jit
def _put(where, x, index):
    at = tl.load(index)
    tl.store(where + at, tl.load(x + at))


def test_a_launch_has_not_written_what_is_as_it_was():
    trace, x, out, index = Trace({}, {}, {}), torch.randn(6, 4), torch.zeros(6, 4), torch.ones(1, dtype=torch.int32)
    trace.begin(Geometry(np.arange(6)[None], Tokens((6,))))
    with tracing(trace), trace.recording():
        _put[(1,)](out, x, index)
        _put[(1,)](index, index, torch.zeros_like(index))  # writes what is there
    (launch, _), equal = (
        trace.events[0],
        lambda k: launch.inputs[k].digests[0].rows.equal(launch.outputs[k].digests[0].rows),
    )
    assert not equal(0) and equal(1) and not trace.store(index).writers
