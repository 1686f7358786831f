"""Threads and tasks: a layout is entered in each alone, and the interpreter computes for one at a time."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import assert_same_bits

import bi_kernels as bi
from bi_kernels.tokens import layout_for


def test_one_layout_is_entered_from_two_threads():
    """Which leave in the order in which they entered."""
    layout, other = bi.TokenLayout.packed([0, 3, 8]), bi.TokenLayout.packed([0, 8])
    entered, left = threading.Event(), threading.Event()

    def first() -> list[bool]:
        with other:
            with layout:
                entered.wait(60)
                inner = layout_for("linear", (8,)) is layout
            left.set()
            return [inner, layout_for("linear", (8,)) is other]

    def second() -> list[bool]:
        with layout:
            entered.set()
            left.wait(60)
            return [layout_for("linear", (8,)) is layout]

    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(first), threads.submit(second)]
        assert [job.result() for job in jobs] == [[True, True], [True]]
    with pytest.raises(ValueError, match="but the token layout has 8 rows"), layout:
        layout_for("linear", (5,))


def test_one_layout_is_entered_from_two_tasks():
    layout, other = bi.TokenLayout.packed([0, 3, 8]), bi.TokenLayout.packed([0, 8])

    async def work(mine: bi.TokenLayout) -> bool:
        with layout:
            await asyncio.sleep(0)
            with mine:
                await asyncio.sleep(0)
                inner = layout_for("linear", (8,)) is mine
            await asyncio.sleep(0)
            return inner and layout_for("linear", (8,)) is layout

    async def both() -> list[bool]:
        return await asyncio.gather(work(layout), work(other))

    assert asyncio.run(both()) == [True, True]


def test_threads_get_the_bits_of_one():
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(5, 32, generator=g).bfloat16() for _ in range(24)]
    weight = torch.randn(32, generator=g).bfloat16()
    expected = [bi.rms_norm(x, weight) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda x: bi.rms_norm(x, weight), inputs))
    for number, (mine, theirs) in enumerate(zip(found, expected)):
        assert_same_bits(mine, theirs, number)
