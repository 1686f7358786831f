"""Programs of a launch that run side by side leave the memory that they leave one after another."""

import math
import pdb
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels import interpreter
from bi_kernels.interpreter import lockstep

N, WIDE = 12, 16
interpreter.install()


@triton.jit
def adds(x, y, n, C: tl.constexpr):
    """Counts itself in memory, then goes a way of its own."""
    i, c = tl.program_id(0), tl.arange(0, C)
    tl.store(y + i * C + c, tl.load(y + i * C + c) + 1)
    if i % 3 == 1:
        tl.store(y + i * C + c, tl.load(y + i * C + c) * 2)


@triton.jit
def loops(x, y, n, C: tl.constexpr):
    """Goes round i % 4 times from a place of its own, and until a number of its own."""
    i, c, total = tl.program_id(0), tl.arange(0, C), 0.0
    for at in range(i, i + i % 4):
        total += tl.sum(tl.load(x + at % n * C + c)) * at
    for at in tl.range(0, n - i, 5):
        total += tl.max(tl.load(x + at * C + c), 0)
    while total > i:
        total = total / 2
    tl.store(y + i, total)


@triton.jit
def pages(x, y, n, C: tl.constexpr):
    """Loads scalars under masks of its own, and a tile in places that they tell."""
    i, c = tl.program_id(0), tl.arange(0, C)
    at = tl.load(x + i * C, mask=i % 2 == 0, other=2.0).to(tl.int32) + n
    rows = (at + tl.arange(0, 4)) % n
    tile = tl.load(x + rows[:, None] * C + c[None, :], mask=(rows < i)[:, None], other=-1.0)
    tl.store(y + i * C + c, tl.sum(tile, 0) + tl.sum(tl.trans(tile), 1) + tl.argmax(tile, 0) + tl.cumsum(c, 0))


@triton.jit
def tile_of(x, at, c, C: tl.constexpr):
    return tl.load(x + (at + tl.arange(0, C))[:, None] % 12 * C + c[None, :])


@triton.jit
def products(x, y, n, C: tl.constexpr):
    """Multiplies a tile that all share with one of its own."""
    i, c = tl.program_id(0), tl.arange(0, C)
    a = tile_of(x, 0, c, C)
    product = tl.dot(a, tile_of(x, i, c, C), input_precision="ieee")
    tl.store(y + i * C + c, tl.sum(tl.where(i % 2 == 0, product, tl.reshape(product, [C, C]).T), 0))


@triton.jit
def counts(x, y, n, C: tl.constexpr):
    """Adds to one number, atomically: computed for one program at a time."""
    i = tl.program_id(0)
    tl.store(y + 1 + i, tl.atomic_add(y, i + 1.0))


@triton.jit
def descriptors(x, y, n, C: tl.constexpr):
    i = tl.program_id(0)
    y.store([i, 0], x.load([n - 1 - i, 0]) * 2 + y.load([i, 0]))


@triton.jit
def strays(x, y, n, C: tl.constexpr):
    """Writes, and the sixth beyond its memory."""
    i, c = tl.program_id(0), tl.arange(0, C)
    tl.store(y + i * C + c, tl.load(x + i * C + c))
    tl.store(y + i * C + c + tl.where(i == 5, 1 << 20, 0), 1.0)


@triton.jit
def stops(x, y, n, C: tl.constexpr):
    breakpoint()
    tl.store(y + tl.program_id(0), 1.0)


@triton.jit
def waits(x, y, n, C: tl.constexpr):
    """Each waits until the one before it has counted itself, behind a branch that parts them."""
    i, step = tl.program_id(0), 1.0
    if i % 2 == 0:
        step = 2.0
    if i > 0:
        while tl.load(y + i - 1, volatile=True) < 100000.0:
            step += 0.0
    tl.store(y + i, 100000.0 + step)


@triton.jit
def constants(x, y, n, C: tl.constexpr):
    """Counts itself, writes what all share, and goes a way of its own."""
    i, c = tl.program_id(0), tl.arange(0, C)
    tl.store(y + i * C + c, tl.load(y + i * C + c) + 1, mask=c < n)
    tl.store(y + i * C, 0.0)
    if i % 2 == 0:
        tl.store(y + i * C + c, tl.load(y + i * C + c) * 2, mask=c < n)


@triton.jit
def last_axis(x, y, n, C: tl.constexpr):
    i, r, c = tl.program_id(0), tl.arange(0, 4), tl.arange(0, C)
    tile = tl.load(x + ((i + r) % n)[:, None] * C + c[None, :])
    tl.store(y + i * C + c, tl.sum(tl.cumsum(tile, -1), 0))


@triton.jit
def rounds(x, y, n, C: tl.constexpr):
    """A loop's variable is a tensor, as compiled: it is divided toward zero, and by steps given by name."""
    i, total = tl.program_id(0), 0
    for j in range(i - 5, i):
        total += j // 2 + j % 3
    for j in tl.range(n, step=5):
        total += j.to(tl.int32)
    tl.store(y + i, total.to(tl.float32))


ONE_BY_ONE = counts, waits
KERNELS = (adds, loops, pages, products, counts, descriptors, waits, constants, last_axis, rounds)


def launched(kernel, most: int, monkeypatch):
    """Returns what a kernel left where at most so many programs ran at once, how many did at each call, and what it
    raised. A call of 0 is of all, one by one."""
    monkeypatch.setattr(lockstep, "MOST", most)
    lockstep._room.clear()
    x = torch.randn(N, WIDE, generator=torch.Generator().manual_seed(1))
    y = torch.arange(N * WIDE, dtype=torch.float32).reshape(N, WIDE)
    given = [TensorDescriptor.from_tensor(t, [1, WIDE]) for t in (x, y)] if kernel is descriptors else (x, y)
    error, calls, together, alone = "", [], lockstep._together, lockstep.one_by_one
    monkeypatch.setattr(lockstep, "_together", lambda *given: calls.append(len(given[2])) or together(*given))
    monkeypatch.setattr(lockstep, "one_by_one", lambda *given: calls.append(0) or alone(*given))
    try:
        kernel[(N,)](*given, N, WIDE)
    except InterpreterError as e:
        error = str(e)
    monkeypatch.setattr(lockstep, "_together", together)
    monkeypatch.setattr(lockstep, "one_by_one", alone)
    assert type(stock.interpreter_builder) is not lockstep.Lockstep
    return y, calls, error


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_side_by_side_leaves_what_one_by_one_does(kernel, monkeypatch):
    expected, calls, error = launched(kernel, 1, monkeypatch)
    assert calls == [0] and not error
    for most in (64, 5):
        y, calls, _ = launched(kernel, most, monkeypatch)
        assert y.equal(expected) and max(calls) == min(most, N), (most, calls)
        assert (0 in calls) == (kernel in ONE_BY_ONE), "what fails side by side would have these bits, too"


def test_what_is_not_taken_back_is_seen(monkeypatch):
    """The control: programs that start again would count themselves twice."""
    expected, _, _ = launched(adds, 1, monkeypatch)
    store = stock._interpreter.store
    monkeypatch.setattr(lockstep, "partial", lambda function, *given: lambda: function is not store)
    assert not launched(adds, 64, monkeypatch)[0].equal(expected)


def test_an_error_is_that_of_one_program(monkeypatch):
    expected, _, said = launched(strays, 1, monkeypatch)
    y, calls, again = launched(strays, 64, monkeypatch)
    assert (
        max(calls) == N
        and calls[-1] == 0
        and y.equal(expected)
        and all("of the memory of" in text for text in (said, again))
    )


def test_large_tiles_run_fewer_at_once(monkeypatch):
    expected, _, _ = launched(products, 1, monkeypatch)
    monkeypatch.setattr(lockstep, "ELEMENTS", 3 * WIDE**2)
    y, calls, _ = launched(products, 64, monkeypatch)
    assert y.equal(expected) and calls == [N, 3, 3, 3, 3]


def test_who_looks_at_a_program_sees_one(monkeypatch):
    seen = []
    monkeypatch.setattr(pdb, "set_trace", lambda **_: seen.append(tuple(stock.interpreter_builder.grid_idx)))
    monkeypatch.setattr(sys, "breakpointhook", pdb.set_trace)
    launched(stops, 64, monkeypatch)
    assert seen == [(i, 0, 0) for i in range(N)]


def test_a_loops_variable_is_divided_as_compiled(monkeypatch):
    y, _, _ = launched(rounds, 64, monkeypatch)
    numbers = [sum(int(j / 2) + int(math.fmod(j, 3)) for j in range(i - 5, i)) + sum(range(0, N, 5)) for i in range(N)]
    assert y.flatten()[:N].tolist() == numbers


def test_a_grid_of_no_programs_runs_none():
    y = torch.zeros(N)
    rounds[(0,)](y, y, N, WIDE)
    assert not y.any()
