"""Digests of rows on a GPU: one launch a tensor, which reads it where it lies and keeps nothing but the sums."""

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl

GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)  # of splitmix64, as signed integers
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64), tl.constexpr(0x94D049BB133111EB - 2**64)
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
SPLIT = 2**16  # elements of a row that one program adds
SIZES = ["count", "features", "rows_1", "row_0", "row_1", "features_1", "feature_0", "feature_1", "split"]


@triton.jit
def _weight(word):
    z = (word.to(tl.int64) + 1) * GAMMA
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * FIRST
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * SECOND
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1


@triton.jit(do_not_specialize=SIZES)
def _digest_kernel(
    x,
    y,
    count,
    features,
    rows_1,
    row_0,
    row_1,
    features_1,
    feature_0,
    feature_1,
    split,
    FLAT: tl.constexpr,
    BITS: tl.constexpr,
    PER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if FLAT:
        start = row.to(tl.int64) * row_1
    else:
        start = (row // rows_1).to(tl.int64) * row_0 + (row % rows_1).to(tl.int64) * row_1
    first = tl.program_id(1) * split
    total = tl.zeros((ROWS, COLUMNS), tl.int64)
    for at in range(first, tl.minimum(first + split, features), COLUMNS):
        k = at + tl.arange(0, COLUMNS)
        if FLAT:
            place = k.to(tl.int64)
        else:
            place = (k // features_1).to(tl.int64) * feature_0 + (k % features_1).to(tl.int64) * feature_1
        inside = (row < count)[:, None] & (k < features)[None, :]
        value = tl.load(x + start[:, None] + place[None, :], inside, other=0).to(tl.int64)
        weight = _weight(k // PER)
        if PER > 1:  # of a word of PER elements all but the last are without a sign
            part = k % PER
            value = tl.where((part < PER - 1)[None, :], value & ((1 << BITS) - 1), value)
            weight = weight << (part * BITS).to(tl.int64)
        total += value * weight[None, :]
    tl.store(y + tl.program_id(1).to(tl.int64) * count + row, tl.sum(total, 1), row < count)


class MemoryLayout(NamedTuple):
    """Where the rows of a tensor lie, and the features of each: (size, stride) of the fewest dimensions of both."""

    rows: tuple[tuple[int, int], ...]
    features: tuple[tuple[int, int], ...]


class Launch(NamedTuple):
    """How a layout is digested: words: (sizes, strides) of a view of whole words; parts: of a row, one program each."""

    dtype: torch.dtype
    words: tuple[tuple[int, int], tuple[int, int]] | None
    parts: int
    count: int
    grid: tuple[int, int]
    sizes: tuple[int, ...]
    options: dict[str, int]


def _merged(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns (size, stride) of the fewest dimensions that hold the same elements in the same order."""
    found: list[tuple[int, int]] = []
    for size, step in zip(shape, stride):
        if size == 1:
            continue
        if found and found[-1][1] == size * step:
            found[-1] = found[-1][0] * size, step
        else:
            found.append((size, step))
    return tuple(found)


def memory_layout(shape: tuple[int, ...], stride: tuple[int, ...], dims: int) -> MemoryLayout:
    """Returns the layout of a tensor whose first `dims` dimensions are rows."""
    return MemoryLayout(_merged(shape[:dims], stride[:dims]), _merged(shape[dims:], stride[dims:]))


@lru_cache(4096)
def _launch(laid: MemoryLayout, size: int, aligned: bool) -> Launch:
    """Returns how elements of `size` bytes are digested; aligned: the first begins a word."""
    count, features = (prod(n for n, _ in d) for d in laid)
    per = 4 // size if features * size % 4 == 0 else 1
    (_, row_0), (rows_1, row_1) = [(1, 0)] * (2 - len(laid.rows)) + [*laid.rows]
    (_, feature_0), (features_1, feature_1) = [(1, 0)] * (2 - len(laid.features)) + [*laid.features]
    flat = max(map(len, laid)) < 2 and feature_1 in (0, 1) and (features == 1 or feature_1 == 1)
    dtype, bits, words = torch.uint8 if size == per == 1 else WORDS[size], 8 * size, None
    if flat and per > 1 and aligned and not row_1 % per:
        words = (count, features), (row_1, 1)
        features, row_1, per = features // per, row_1 // per, 1
    rows, columns = (16, 128) if count >= 16 else (1, 1024)
    parts = -(-features // SPLIT)
    sizes = count, features, rows_1, row_0, row_1, features_1, feature_0, feature_1, SPLIT
    options = {"FLAT": flat, "BITS": bits, "PER": per, "ROWS": rows, "COLUMNS": columns}
    return Launch(dtype, words, parts, count, (-(-count // rows), parts), sizes, options)


def digest_rows(t: torch.Tensor, laid: MemoryLayout) -> torch.Tensor:
    """Returns (rows,) int64 of a tensor's memory: what `digest.rows` returns.

    Elements of 1, 2 or 4 bytes, any strides; of a dimension or a row fewer than 2**31 elements.
    """
    size = t.element_size()
    if max(map(len, laid)) > 2:
        count, features = (prod(n for n, _ in d) for d in laid)
        t = t.as_strided(*zip(*laid.rows, *laid.features)).contiguous()
        laid = memory_layout((count, features), (features, 1), 1)
    how = _launch(laid, size, not (t.storage_offset() * size % 4 or t.data_ptr() % 4))
    t = t.as_strided(*how.words).view(torch.int32) if how.words else t.view(how.dtype)
    y = torch.empty(how.parts * how.count, dtype=torch.int64, device=t.device)
    with torch.cuda.device_of(t):
        _digest_kernel[how.grid](t, y, *how.sizes, **how.options)
    return y if how.parts == 1 else y.view(how.parts, how.count).sum(0)
