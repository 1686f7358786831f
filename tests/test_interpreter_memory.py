"""What an interpreted kernel reads or writes beyond the tensors that it was given raises, though no result holds it."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels import interpreter

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="needs TRITON_INTERPRET=1")
interpreter.install()

SMALL, LARGE = 16, 512  # of a block: Triton's loop over the pointers, and NumPy's gather


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
def add(y, at):
    tl.atomic_add(y + at, 1.0)


@triton.jit
def swap(y, at):
    tl.atomic_cas(y + at, 1, 2)


@triton.jit
def addressed(table, y, n):
    tl.store(y, tl.load(tl.load(table).to(tl.pointer_type(tl.float32)) + n - 1))


@triton.jit
def described(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tile = x.load([0, 0])
    tl.store(y + i[:, None] * BLOCK + i[None, :], tile)


def refused(said: str):
    return pytest.raises(InterpreterError, match=said)


@pytest.mark.parametrize("block", [SMALL, LARGE])
def test_a_value_that_no_result_holds_is_read_within_the_tensor_all_the_same(block):
    x, y = torch.arange(8.0), torch.zeros(8)
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


def test_of_one_element_too():
    x, y = torch.arange(8.0), torch.zeros(1)
    one[(1,)](x, y, 7)
    assert y == 7
    with refused("4 bytes beyond the end of the memory of x"):
        one[(1,)](x, y, 8)


def test_what_a_view_leaves_out_is_memory_that_was_given():
    y = torch.zeros(8)
    copy[(1,)](torch.arange(8.0)[:4], y, 0, 8, 8, SMALL)
    assert y[7] == 7
    with refused("beyond the end of the memory of x"):
        copy[(1,)](torch.arange(8.0)[4:], y, 0, 5, 5, SMALL)


@pytest.mark.parametrize("block", [SMALL, LARGE])
def test_one_load_may_be_of_two_tensors(block):
    x, y, out = torch.arange(float(block)), -torch.arange(float(block)), torch.zeros(block)
    either[(1,)](x, y, out, block)
    assert torch.equal(out[:4], torch.tensor([0.0, -1, 2, -3]))
    with refused(f"{4 * (block // 2 - 1)} bytes beyond the end of the memory of x"):
        either[(1,)](x[: block // 2].clone(), y, out, block)


def test_of_tensors_in_a_tuple():
    x, y = torch.arange(8.0), torch.zeros(1)
    pair[(1,)]((x, x), y, 7)
    assert y == 7
    with refused("beyond the end of the memory of xs"):
        pair[(1,)]((x, x), y, 8)


@pytest.mark.parametrize("kernel, dtype", [(add, torch.float32), (swap, torch.int32)])
def test_of_an_atomic_operation(kernel, dtype):
    y = torch.ones(4, dtype=dtype)
    kernel[(1,)](y, 3)
    assert y[3] == 2
    with refused("4 bytes beyond the end of the memory of y"):
        kernel[(1,)](y, 4)


def test_a_descriptor_of_more_than_there_is():
    x, y = torch.arange(256.0).view(16, 16), torch.zeros(16, 16)
    described[(1,)](TensorDescriptor.from_tensor(x, [16, 16]), y, 16)
    assert torch.equal(x, y)
    with refused("64 bytes beyond the end of the memory of x"):
        described[(1,)](TensorDescriptor(x[:15].clone(), [16, 16], [16, 1], [16, 16]), y, 16)


def test_of_an_address_that_was_written_down_nothing_is_known():
    x, y = torch.arange(8.0), torch.zeros(1)
    addressed[(1,)](torch.tensor([x.data_ptr()]), y, 8)
    assert y == 7
    with refused("beyond the end of the memory of x"):  # of the next launch it is
        one[(1,)](x, y, 8)


def test_a_kernel_without_tensors_has_no_memory():
    with refused("reads or writes memory and was given no tensor"):
        one[(1,)](torch.empty(0), torch.empty(0), 0)
