"""Stepping shows a program's lines with their tiles, its loops, its reads and its error, and leaves nothing behind."""

import inspect
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock

from bi_kernels import workbench as wb
from bi_kernels.interpreter.builder import Builder
from bi_kernels.workbench.tiles import Tile

X = torch.arange(40, dtype=torch.bfloat16).view(4, 10) / 8


@triton.jit
def square(value):
    value *= value  # a line that is not the kernel's
    return value


@triton.jit
def row_kernel(x, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    value = tl.load(
        x + row * width + col,  # a statement of several lines
        mask=col < width,
        other=0.0,
    ).to(tl.float32)
    squares = square(value)
    tl.store(y + row * width + col, squares, mask=col < width)


@triton.jit
def loops_kernel(x, y, N, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(N):
        for j in range(2):
            total += tl.load(at + (2 * i + j) * BLOCK)
        total += 0.0  # after the inner loop, in the same round
    count = 0
    while count < 2:
        count += 1
    tl.store(y + tl.arange(0, BLOCK), total)


@triton.jit
def beyond_kernel(x, y, N, BLOCK: tl.constexpr):
    total = 0.0
    for i in range(N):
        value = tl.load(x + i * BLOCK + tl.arange(0, BLOCK))
        total += tl.sum(value, 0)
    tl.store(y, total)


@triton.jit
def plain_kernel(x, y, stride, BLOCK: tl.constexpr):
    m = tl.arange(0, BLOCK)
    tile = tl.load(x + m[:, None] * stride + m[None, :])
    tl.atomic_add(y + m, tl.sum(tile, 1))


@triton.jit
def descriptor_kernel(x, y, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    tl.make_tensor_descriptor(y, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK]).store([0, 0], source.load([0, 0]))


def step_row(**options) -> wb.step:
    return wb.step(row_kernel, (4,), X, torch.zeros(4, 10), 10, BLOCK=16, **options)


def loop(steps, *rounds: int):
    """The loop that is found by going through the rounds."""
    found = next(x for x in steps.lines if hasattr(x, "rounds"))
    for r in rounds:
        found = next(x for x in found.kept[r][1] if hasattr(x, "rounds"))
    return found


# Tiles


def test_each_line_holds_the_tiles_that_it_assigns():
    steps = step_row(program=2)
    assert [[t.name for t in line.tiles] for line in steps.lines] == [["row"], ["col"], ["value"], ["squares"], []]
    assert steps["row"] == 2 and torch.equal(steps["col"], torch.arange(16, dtype=torch.int32))
    assert torch.equal(steps["value"][:10], X[2].float()) and not steps["value"][10:].any()
    assert torch.equal(steps["squares"][:10], X[2].float() ** 2)
    assert torch.equal(steps.arguments["y"][2], X[2].float() ** 2) and not steps.arguments["y"][:2].any()
    first = inspect.getsourcelines(row_kernel.fn)[1]
    assert [line.number - first for line in steps.lines] == [2, 3, 4, 9, 10]


def test_a_tile_shows_which_lanes_are_masked_and_a_line_what_it_reads_and_writes():
    lines = step_row(program=2).lines
    (value,) = lines[2].tiles
    assert value.live.tolist() == [True] * 10 + [False] * 6 and "· × 6" in value.text()[0]
    assert value.html().count('title="masked"') == 6
    (read,), (write,) = lines[2].accesses, lines[4].accesses
    assert str(read) == "reads x[2, 0:10] (6 of 16 lanes are masked)"
    assert str(write) == "writes y[2, 0:10] (6 of 16 lanes are masked)" and write.tile.live.sum() == 10


def test_numbers_of_bf16_are_shown_as_numbers():
    steps = wb.step(plain_kernel, (1,), torch.eye(4).bfloat16(), torch.zeros(4), 4, BLOCK=4)
    assert steps.lines[1].tiles[0].dtype == "bf16" and torch.equal(steps["tile"], torch.eye(4))


@pytest.mark.parametrize("stride, place", [(4, "x[0:4, 0:4]"), (8, "x[0:4, 0:4]"), (1, "x[0, 0:4], x[1, 0:3]")])
def test_an_access_names_the_tensors_indices(stride, place):
    x = torch.zeros(4, max(4, stride))[:, :4]
    read, write = wb.step(plain_kernel, (1,), x, torch.zeros(4), stride, BLOCK=4).lines[1:]
    assert str(read.accesses[0]) == f"reads {place}"
    assert [str(a) for a in write.accesses] == ["changes atomically y[0:4]"]


def test_descriptors_are_accesses_too():
    steps = wb.step(descriptor_kernel, (1,), torch.randn(16, 16), torch.zeros(16, 16), BLOCK=16)
    assert [str(a) for line in steps.lines for a in line.accesses] == ["reads x[0:16, 0:16]", "writes y[0:16, 0:16]"]


def test_a_pointer_shows_where_it_points_and_no_address():
    steps = wb.step(loops_kernel, (1,), torch.zeros(24), torch.zeros(4), 3, BLOCK=4)
    assert steps.lines[0].tiles[0].note == "to x[0:4]"
    address = str(steps.arguments["x"].data_ptr())
    assert address not in repr(steps) and address not in steps._repr_html_()


# Loops


KEPT = {(0, -1): [0, 3], (1,): [1], (-2, -1): [2, 3], (0, 1, 2, 9): [0, 1, 2]}


@pytest.mark.parametrize("rounds, kept", KEPT.items())
def test_a_loop_keeps_the_rounds_asked_for(rounds, kept):
    x = torch.arange(32.0)
    found = loop(wb.step(loops_kernel, (1,), x, torch.zeros(4), 4, BLOCK=4, rounds=rounds))
    assert found.count == 4 and sorted(found.kept) == kept
    assert [found.kept[r][0][0].values.item() for r in kept] == kept, "the loop's variable"


def test_a_loop_in_a_loop_has_rounds_of_its_own():
    steps = wb.step(loops_kernel, (1,), torch.arange(24.0), torch.zeros(4), 3, BLOCK=4)
    inner = loop(steps, 2)
    assert (inner.count, sorted(inner.kept)) == (2, [0, 1])
    assert [str(body[0].accesses[0]) for _, body in inner.kept.values()] == ["reads x[16:20]", "reads x[20:24]"]
    assert torch.equal(steps["total"], torch.arange(24.0).view(6, 4).sum(0)) and steps["count"] == 2


# Errors


def test_an_error_is_shown_at_its_line_with_the_tiles_up_to_it():
    steps = wb.step(beyond_kernel, (1,), torch.ones(12), torch.zeros(1), 5, BLOCK=4, rounds=(2,))
    assert (steps.error.kernel, steps.error.code.partition(" ")[0]) == ("beyond_kernel", "value")
    assert steps["total"] == 12, "after the round before"
    (_, last), found = loop(steps).kept[3], repr(steps)
    assert [str(a) for a in last[0].accesses] == ["reads x[12:16]"] and not last[0].tiles
    assert " ".join(found.split()).endswith(f"KernelError: {steps.error}") and "round 4: i  int32 = 3" in found
    assert max(map(len, found.splitlines())) <= 100, "a terminal's columns"
    assert str(steps.error).replace("`", "") in steps._repr_html_().replace("`", "").replace("&#x27;", "'")


@pytest.mark.parametrize("program", [4, (0, 1), -1])
def test_a_program_beyond_the_grid_is_one_sentence(program):
    with pytest.raises(ValueError, match=r"step: program is .*, expected one of the grid \(4, 1, 1\)") as error:
        step_row(program=program)
    assert error.value.__context__ is None


def test_what_is_no_kernel_and_a_name_that_is_no_tile():
    with pytest.raises(TypeError, match="step: kernel is a function, expected one that @triton.jit made under"):
        wb.step(step_row, (1,))
    with pytest.raises(TypeError, match="y is missing"):
        wb.step(row_kernel, (1,), X)
    with pytest.raises(KeyError, match="'rows' is no tile of row_kernel"):
        step_row()["rows"]


# Nothing left behind


def calls_of_a_launch() -> int:
    """How many functions Python calls for one launch: what makes it slow, and no matter of the clock."""
    counted = 0

    def count(frame, event, arg):
        nonlocal counted
        counted += event == "call"

    y, before = torch.zeros(4, 10), sys.getprofile()
    sys.setprofile(count)
    try:
        row_kernel[(4,)](X, y, 10, BLOCK=16)
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.parametrize("tracing", [None, lambda frame, event, arg: None], ids=["not traced", "traced before"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(tracing, fails):
    x, y = torch.ones(12), torch.zeros(1)
    calls = [calls_of_a_launch() for _ in range(2)][-1]
    before = sys.gettrace()
    sys.settrace(tracing)
    try:
        steps = wb.step(beyond_kernel, (1,), x, y, 5 if fails else 3, BLOCK=4)
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert after is tracing and bool(steps.error) == fails
    assert type(stock.interpreter_builder) is Builder and stock.interpreter_builder.memory is None
    assert calls_of_a_launch() == calls and not y.any(), "its arguments are copies"


# How a tile is drawn


@pytest.mark.parametrize(
    "values, text",
    [
        (np.arange(8), "t  fp32 [8]  0 1 … 7"),
        (np.zeros(8), "t  fp32 [8]  all 0"),
        (np.float32(1 / 3), "t  fp32 = 0.3333"),
        (np.array([1.5, np.nan, -np.inf, 0]), "t  fp32 [4]  1.5 nan -inf 0"),
        (np.array([True, False, True]), "t  fp32 [3]  yes no yes"),
    ],
)
def test_a_tile_in_a_terminal(values, text):
    assert Tile("t", "fp32", np.asarray(values)).text() == [text]


def test_a_large_tile_is_a_picture_with_a_line_of_text():
    values = np.linspace(-1, 1, 32 * 64).reshape(32, 64)
    tile = Tile("t", "fp32", values, np.broadcast_to(np.arange(64) < 40, values.shape))
    assert tile.html().count("<img") == 1 and 'alt="t: 32 × 64 numbers as colours"' in tile.html()
    assert len(tile.text()) == 7 and tile.text()[1].endswith("· × 24")
