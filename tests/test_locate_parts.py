"""Parts of the localiser: digests that see every bit, readings of shapes, arguments that a kernel only reads."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from bi_kernels.audit.localiser.tracing import digest_kernel
from bi_kernels.audit.localiser.tracing.digest import rows, whole
from bi_kernels.audit.localiser.tracing.geometry import Geometry, Tokens
from bi_kernels.audit.localiser.tracing.read_only import only_read
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
    by_kernel = lambda t, dims: digest_kernel.digest_rows(t, digest_kernel.memory_layout(t.shape, t.stride(), dims))
    odd = drawn(3, 5, 8)
    views = [(drawn(*shape), 1) for shape in ((1, 1), (1, 2), (3, 10), (17, 7), (33, 130), (1, 5000), (40, 64))]
    views += [(odd.transpose(0, 1), 2), (odd.transpose(1, 2), 1), (odd[:, :, 1:5], 2), (odd[:, 1:, ::2], 1)]
    views += [(odd[..., None].expand(3, 5, 8, 3), 1), (odd[0, 0, 0], 0), (odd.view(3, 5, 2, 4).permute(2, 0, 3, 1), 2)]
    views += [(drawn(7), 1), (drawn(7)[::3], 1), (drawn(43)[1:].view(6, 7), 1), (drawn(41)[1:].view(5, 8), 1)]
    for x, dims in views:
        flat = x.reshape(x.shape[:dims].numel(), -1)
        assert torch.equal(rows(flat, len(flat)), by_kernel(x, dims)), (x.shape, x.stride(), dims)
    long = drawn(2, digest_kernel.SPLIT + 6)
    assert torch.equal(rows(long, 2), by_kernel(long, 1))
    assert not torch.equal(rows(long, 2), by_kernel(long.flip(1), 1))


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
def _put(where, x, at):
    tl.store(where + at, tl.load(x + at).to(where.dtype.element_ty))


@triton.jit
def _further(p, by):
    return p + by


@triton.jit
def _half(p, n):
    if n > 1:
        _half(p, n // 2)


@triton.jit
def _writing(x, alias, helped, moved, again, both, kept, chosen, added, named, far, rec, index, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    p = alias + tl.load(index + at)
    tl.store(p, tl.load(x + at), mask=at < n)
    _put(helped, x=x, at=at)
    moved += at
    tl.store(moved, 0.0)
    for _ in range(n):
        q = again + at
    tl.store(q, 0.0)
    left, (right, _) = both + at, (kept + at, at)
    tl.store(left, tl.load(right))
    tl.store(tl.where(at < n, chosen, x.to(chosen.dtype)) if BLOCK == 1 else chosen + at, 0.0)
    tl.atomic_add(added + at, 1.0)
    tl.store(pointer=named + at, value=0.0)
    tl.store(_further(far, at), tl.load(_further(p=kept, by=at)))
    _half(rec, n)


@triton.jit
def _reading(x, y, index, k, out, n, BLOCK: tl.constexpr):
    at = tl.load(index + tl.arange(0, BLOCK))
    given, more = (x, y), n
    left, right = given
    x += at
    total = tl.load(left + at) + tl.load(x) + tl.load(_further(k, at))
    if y is not None:
        total += tl.load(right + at).to(tl.float32)
    tl.store(out + at, (total * more).to(x.dtype.element_ty), mask=at < n)


@triton.jit
def _odd(x, out, n):
    values = [x + i for i in range(3)]
    tl.store(out, tl.load(values[0]))


@triton.jit
def _put_second(at, *to):
    tl.store(to[1] + at, 1.0)


@triton.jit
def _several(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    _put_second(at, x, out)


def test_what_a_helper_takes_several_of_may_be_written():
    assert not {"x", "out"} & only_read(_several)


def test_a_kernel_only_reads_what_no_name_writes_through():
    assert only_read(_writing) == {"kept", "index"}  # x may be chosen
    assert {"x", "y", "index", "k"} <= only_read(_reading) and "out" not in only_read(_reading)
    assert not {"x", "out"} & only_read(_odd) and only_read(_put) == {"x"}


def test_what_a_launch_only_reads_is_not_written_unless_it_shares_memory():
    trace, x, out, both = Trace({}, {}, {}), torch.randn(6, 4), torch.zeros(6, 4), torch.randn(12, 4)
    trace.begin(Geometry(np.arange(6)[None], Tokens((6,))))
    with tracing(trace):
        _put[(1,)](out, x, 0)
        _put[(1,)](both[:6], both[6:], 0)
    apart, shared = trace.events[0]
    assert apart.outputs[1].digests is apart.inputs[1].digests and not trace.store(x).writers
    assert apart.outputs[0].digests is not apart.inputs[0].digests and trace.store(out).writers == [(0, 0, 0)]
    assert shared.outputs[1].digests is not shared.inputs[1].digests and len(trace.store(both).writers) == 2
