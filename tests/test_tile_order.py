"""Which tile of queries sm_90's kernels compute when: their own source, on a CPU, with torch in the place of Gluon."""

import types
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_kernels.ops.attention.hopper import tiles

SIZE, BLOCK = 128, 64


class Pointer:
    """Numbers that are read at places."""

    def __init__(self, numbers: list[int], at=0):
        self.numbers, self.at = numbers, at

    def __add__(self, more) -> "Pointer":
        return Pointer(self.numbers, self.at + more)

    def __sub__(self, less) -> "Pointer":
        return Pointer(self.numbers, self.at - less)


def load(pointer: Pointer, mask=None, other=0) -> torch.Tensor:
    at = torch.as_tensor(pointer.at)
    mask = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand_as(at)
    inside = (at >= 0) & (at < len(pointer.numbers))
    assert bool((inside | ~mask).all()), "a place is read that is not there"
    return torch.where(mask, torch.tensor([*pointer.numbers, 0])[torch.where(mask, at, -1)], other)


def both(function):
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


GLUON = SimpleNamespace(
    arange=lambda first, end, layout: torch.arange(first, end),
    BlockedLayout=lambda *given: None,
    num_warps=lambda: 1,
    num_programs=lambda axis: GLUON.programs,
    load=load,
    where=lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
    minimum=both(torch.minimum),
    maximum=both(torch.maximum),
    cdiv=lambda a, b: -(-a // b),
    sum=lambda x, axis: x.sum(axis),
    max=lambda x, axis: x.max(),
    min=lambda x, axis: x.min(),
    associative_scan=lambda x, axis, add: x.cumsum(axis),
    int32=torch.int64,
    int64=torch.int64,
)


def plain() -> SimpleNamespace:
    """Returns the functions of tiles.py as Python calls them."""
    scope = {"gl": GLUON, "uniform": lambda x: x, "_plus": None, "BAND": int(tiles.BAND)}
    for name in ("_sequences", "_rank", "_above", "_bands", "_nth", "_dealt"):
        raw = getattr(tiles, name).fn
        scope[name] = types.FunctionType(raw.__code__, scope, name)
    return SimpleNamespace(**scope)


CODE = plain()


def ordered(queries: list[int], keys: list[int], group: int, heads: int, causal: bool) -> list[tuple[int, ...]]:
    """Returns what every tile is, as _order_kernel writes it down."""
    first = lambda lengths: [sum(lengths[:i]) for i in range(len(lengths))]
    where = *map(Pointer, (first(queries), queries, first(keys), keys)), len(queries)
    count = 1 << (len(queries) - 1).bit_length() if len(queries) > 1 else 1
    seen = CODE._sequences(where, group, SIZE, count, causal)
    bands = CODE._bands(where, seen[1], group, heads, SIZE, count)
    total = int(seen[1].sum())
    return [
        tuple(int(x) for x in CODE._nth(torch.tensor(n), seen, bands, where, group, SIZE, BLOCK, causal))
        for n in range(total)
    ]


def expected(queries: list[int], keys: list[int], group: int, causal: bool) -> set[tuple[int, ...]]:
    found = set()
    for i, (q, k) in enumerate(zip(queries, keys)):
        for row in range(0, q * group, SIZE):
            last = min(row + SIZE, q * group) - 1
            end = max(0, min(k, last // group + k - q + 1)) if causal else k
            whole = min(k, row // group + k - q + 1) if causal else k
            found.add((sum(queries[:i]), row, q, k, whole // BLOCK * BLOCK, end, sum(keys[:i])))
    return found


LENGTHS = st.lists(st.integers(0, 300) | st.sampled_from([0, 1, 128, 256, 1000]), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(
    queries=LENGTHS,
    more=st.lists(st.integers(0, 700), min_size=9, max_size=9),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    heads=st.sampled_from([1, 8, 64]),
    causal=st.booleans(),
)
def test_every_tile_is_dealt_once(queries, more, group, heads, causal):
    keys = [q + n for q, n in zip(queries, more)]
    found = ordered(queries, keys, group, heads, causal)
    assert len(found) == len(set(found))
    assert set(found) == expected(queries, keys, group, causal)


@given(items=st.integers(1, 3000), programs=st.integers(1, 140))
def test_every_item_is_some_programs(items, programs):
    GLUON.programs = programs
    item = torch.arange(items)
    assert sorted(CODE._dealt(item, items).tolist()) == item.tolist()


@pytest.mark.parametrize("sequences", [4, 16, 33])
def test_bands_hold_neighbours_and_the_last_ends_with_the_shortest(sequences):
    queries, group, heads = [1024] * sequences, 4, 8
    found = ordered(queries, queries, group, heads, True)
    of = [first // 1024 for first, *_ in found]
    each = 4  # sequences: 256 tiles of a group of 4, of 8 heads of 32 tiles
    assert [i // each for i in of] == sorted(i // each for i in of), "band after band"
    ends = [end for *_, end, _ in found]
    last = ends[(sequences - 1) // each * each * 32 :]
    assert last == sorted(last, reverse=True), "the last band ends with what takes least"
    jumps = [abs(a - b) for a, b in zip(ends, ends[1:])]
    assert max(jumps) <= 32, "tiles that run together take as long"
