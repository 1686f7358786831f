"""What an interpreted kernel reads or writes beyond the tensors that it was given raises, though no result holds it."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels import interpreter

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="needs TRITON_INTERPRET=1")
interpreter.install()

SMALL, LARGE = 16, 512  # of a block: Triton's loop over the pointers, and NumPy's gather
APART = 1 << 14  # bytes


def apart(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns copies that lie far from each other, in this order, so that the nearest is known."""
    memory, found = np.zeros((len(tensors) + 2) * APART, np.uint8), []
    for number, t in enumerate(tensors, 1):
        mine = memory[number * APART : number * APART + t.nbytes]
        found.append(torch.from_numpy(mine.view(t.numpy().dtype)).view(t.shape))
        found[-1].copy_(t)
    return found


@triton.jit
def copy(x, y, first, n, stored, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + first + i, mask=i < n, other=0.0), mask=i < stored)


@triton.jit
def one(x, y, at):
    tl.store(y, tl.load(x + at))


@triton.jit
def either(x, y, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(tl.where(i % 2 == 0, x, y) + i))


@triton.jit
def pair(xs, y, at):
    tl.store(y, tl.load(xs[0] + at) + tl.load(xs[1]))


@triton.jit
def add(y, first, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(y + first + i, 1.0, mask=i < n)


@triton.jit
def add_all(y, v, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if KIND == "unmasked":
        tl.atomic_add(y + i, tl.load(v + i))
    elif KIND == "same":
        tl.atomic_add(y + i % 4, 1.0)
    elif KIND == "broadcast":
        tl.atomic_add(y + i[None, :] + 0 * i[:, None], tl.load(v + i)[:, None])
    else:
        tl.atomic_add(tl.trans(y + i[:, None] * BLOCK + i[None, :]), tl.load(v + i)[None, :], mask=(i < 3)[:, None])


@triton.jit
def swap(y, at):
    tl.atomic_cas(y + at, 1, 2)


@triton.jit
def swap_all(y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_cas(y + i, tl.full((BLOCK,), 1, tl.int32), tl.full((BLOCK,), 2, tl.int32))


@triton.jit
def addressed(table, y, n):
    tl.store(y, tl.load(tl.load(table).to(tl.pointer_type(tl.float32)) + n - 1))


@triton.jit
def described(x, y, first, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i[:, None] * BLOCK + i[None, :], x.load([first, 0]))


@triton.jit
def scattered(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    y.scatter(tl.load(x + i[:, None] * BLOCK + i[None, :]), BLOCK - 1 - i, 0)


@triton.jit
def blocks(x, y, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, CHECKED: tl.constexpr):
    of_x = tl.make_block_ptr(x, (M, N), (N, 1), (0, 0), (ROWS, COLS), (1, 0))
    of_y = tl.make_block_ptr(y, (M, N), (N, 1), (0, 0), (ROWS, COLS), (1, 0))
    if CHECKED:
        tl.store(of_y, tl.load(of_x, boundary_check=(0, 1), padding_option="zero"), boundary_check=(0, 1))
    else:
        tl.store(of_y, tl.load(of_x))


@triton.jit
def wide(x, y):
    tl.store(y, tl.load(x.to(tl.pointer_type(tl.int64))))


def refused(said: str):
    return pytest.raises(InterpreterError, match=said)


@pytest.mark.parametrize("block", [SMALL, LARGE])
def test_a_value_that_no_result_holds_is_read_within_the_tensor_all_the_same(block):
    x, y = apart(torch.arange(8.0), torch.zeros(8))
    copy[(1,)](x, y, 0, 8, 8, block)
    assert torch.equal(x, y)
    with refused("the kernel reads or writes 4 bytes beyond the end of the memory of x"):
        copy[(1,)](x, y, 0, 9, 8, block)
    with refused("the kernel reads or writes 12 bytes beyond the end of the memory of x"):
        copy[(1,)](x, y, 3, 8, 8, block)
    with refused("the kernel reads or writes 8 bytes before the start of the memory of x"):
        copy[(1,)](x, y, -2, 8, 8, block)
    with refused("the kernel reads or writes 4 bytes beyond the end of the memory of y"):
        copy[(1,)](x, y, 0, 8, 9, block)
    copy[(1,)](x, y, 10**9, 0, 0, block)  # all of it masked
    assert stock.interpreter_builder.memory is None, "of the launch that is over"


def test_of_one_element_too_and_of_a_part_of_it():
    x, y, z = apart(torch.arange(8.0), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    one[(1,)](x, y, 7)
    assert y == 7
    with refused("4 bytes beyond the end of the memory of x"):
        one[(1,)](x, y, 8)
    wide[(1,)](x[6:], z)
    with refused("4 bytes beyond the end of the memory of x"):
        wide[(1,)](x[7:], z)


def test_what_a_view_leaves_out_is_memory_that_was_given():
    x, y = apart(torch.arange(8.0), torch.zeros(8))
    copy[(1,)](x[:4], y, 0, 8, 8, SMALL)
    assert y[7] == 7
    with refused("beyond the end of the memory of x"):
        copy[(1,)](x[4:], y, 0, 5, 5, SMALL)


@pytest.mark.parametrize("block", [SMALL, LARGE])
def test_one_load_may_be_of_two_tensors(block):
    i = torch.arange(float(block))
    x, y, out = apart(i, -i, torch.zeros(block))
    either[(1,)](x, y, out, block)
    assert torch.equal(out[:4], torch.tensor([0.0, -1, 2, -3]))
    x, y, out = apart(i[: block // 2], -i, torch.zeros(block))
    with refused(f"{4 * (block // 2 - 1)} bytes beyond the end of the memory of x"):
        either[(1,)](x, y, out, block)


def test_of_tensors_in_a_tuple():
    x, y = apart(torch.arange(8.0), torch.zeros(1))
    pair[(1,)]((x, x), y, 7)
    assert y == 7
    with refused("beyond the end of the memory of xs"):
        pair[(1,)]((x, x), y, 8)


def test_of_an_atomic_operation():
    y, counts = apart(torch.ones(4), torch.ones(4, dtype=torch.int32))
    add[(1,)](y, 1, 3, SMALL)
    swap[(1,)](counts, 3)
    assert y.tolist() == [1, 2, 2, 2] and counts.tolist() == [1, 1, 1, 2]
    with refused("4 bytes beyond the end of the memory of y"):
        add[(1,)](y, 1, 4, SMALL)
    with refused("4 bytes beyond the end of the memory of y"):
        swap[(1,)](counts, 4)


@pytest.mark.parametrize("kind", ["unmasked", "same", "broadcast", "transposed"])
def test_an_atomic_operation_adds_each_element_once(kind):
    v = torch.arange(1.0, 9)
    y = torch.zeros(8, 8)
    add_all[(1,)](y, v, kind, 8)
    added = {
        "unmasked": (slice(0, 1), v),
        "same": ((0, slice(0, 4)), torch.full((4,), 2.0)),
        "broadcast": (slice(0, 1), v.sum().expand(1, 8)),
        "transposed": ((slice(0, 8), slice(0, 3)), v[:, None].expand(8, 3)),
    }
    expected = torch.zeros(8, 8)
    where, values = added[kind]
    expected[where] = values
    assert torch.equal(y, expected)


def test_an_atomic_exchange_of_a_whole_block():
    y = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    swap_all[(1,)](y, 4)
    assert y.tolist() == [2, 0, 2, 2]


def test_a_descriptor_of_more_than_there_is():
    x, y = apart(torch.arange(256.0).view(16, 16), torch.zeros(16, 16))
    described[(1,)](TensorDescriptor.from_tensor(x, [16, 16]), y, 0, 16)
    assert torch.equal(x, y)
    x, y = apart(torch.arange(240.0).view(15, 16), torch.zeros(16, 16))
    with refused("64 bytes beyond the end of the memory of x"):
        described[(1,)](TensorDescriptor(x, [16, 16], [16, 1], [16, 16]), y, 0, 16)


def test_a_descriptor_that_reaches_into_a_tensor_which_was_given():
    both = np.arange(512, dtype=np.float32)
    x, y = torch.from_numpy(both[:240]), torch.from_numpy(both[240:496])  # one behind the other
    described[(1,)](TensorDescriptor(x.view(15, 16), [16, 16], [16, 1], [16, 16]), y, 0, 16)
    assert y[0] == 0 and y[16] == 16


def test_a_descriptor_pads_with_nan_and_scatters():
    x, y = apart(torch.ones(16, 16), torch.zeros(16, 16))
    described[(1,)](TensorDescriptor.from_tensor(x, [16, 16], padding="nan"), y, 8, 16)
    assert y[:8].eq(1).all() and y[8:].isnan().all()
    x = torch.arange(256.0).view(16, 16)
    scattered[(1,)](x, TensorDescriptor.from_tensor(y, [1, 16]), 16)
    assert torch.equal(y, x.flip(0))


@pytest.mark.parametrize("rows, cols", [(8, 16), (32, 32)])
def test_a_block_pointer_reads_and_writes_what_is_inside(rows, cols):
    x, y = apart(torch.randn(rows, cols), torch.zeros(rows, cols))
    blocks[(1,)](x, y, rows, cols, rows, cols, False)
    assert torch.equal(x, y)
    x, y = apart(torch.randn(rows - 1, cols - 3), torch.zeros(rows - 1, cols - 3))
    blocks[(1,)](x, y, rows - 1, cols - 3, rows, cols, True)
    assert torch.equal(x, y)
    with refused("beyond the end of the memory of x"):
        blocks[(1,)](x, y, rows - 1, cols - 3, rows, cols, False)


def test_of_an_address_that_was_written_down_nothing_is_known():
    x, y = apart(torch.arange(8.0), torch.zeros(1))
    addressed[(1,)](torch.tensor([x.data_ptr()]), y, 8)
    assert y == 7
    with refused("beyond the end of the memory of x"):  # of the next launch it is
        one[(1,)](x, y, 8)


def test_what_has_no_memory_is_named():
    with refused("reads or writes memory, and was given none; without memory: x, y"):
        one[(1,)](torch.empty(0), torch.empty(0), 0)
    with refused("the nearest tensor; without memory: x"):
        one[(1,)](torch.empty(0), torch.zeros(1), 0)
