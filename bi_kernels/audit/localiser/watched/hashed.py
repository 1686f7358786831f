"""Digests of rows on a GPU: one launch a tensor, which reads it where it lies and keeps nothing but the sums."""

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


def _merged(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns (size, stride) of the fewest dimensions that hold the same elements in the same order."""
    found: list[tuple[int, int]] = []
    for size, step in zip(shape, stride):
        if size == 1:
            continue
        if found and found[-1][1] == size * step:
            found[-1] = found[-1][0] * size, step
        else:
            found.append((size, step))
    return found


def digest_rows(t: torch.Tensor, dims: int) -> torch.Tensor:
    """Returns (rows,) int64 of a tensor whose first `dims` dimensions are rows: what `digest.rows` returns.

    Elements of 1, 2 or 4 bytes, any strides; of a dimension or a row fewer than 2**31 elements.
    """
    size, count, features = t.element_size(), t.shape[:dims].numel(), t.shape[dims:].numel()
    per = 4 // size if features * size % 4 == 0 else 1
    t = t.view(torch.uint8 if size == per == 1 else WORDS[size])
    layout = [_merged(t.shape[:dims], t.stride()[:dims]), _merged(t.shape[dims:], t.stride()[dims:])]
    if max(map(len, layout)) > 2:
        t = t.contiguous()
        layout = [[(count, features)], [(features, 1)]]
    of_rows, of_features = ([(1, 0)] * (2 - len(d)) + d for d in layout)
    flat = (
        len(layout[0]) < 2
        and len(layout[1]) < 2
        and of_features[1][1] in (0, 1)
        and (features == 1 or of_features[1][1])
    )
    if flat and per > 1 and not (t.storage_offset() % per or of_rows[1][1] % per or t.data_ptr() % 4):
        t = t.as_strided((count, features), (of_rows[1][1], 1)).view(torch.int32)
        features, per, of_rows = features // per, 1, [(1, 0), (count, of_rows[1][1] // per)]
    rows, columns = (16, 128) if count >= 16 else (1, 1024)
    parts = triton.cdiv(features, SPLIT)
    y = torch.empty(parts, count, dtype=torch.int64, device=t.device)
    with torch.cuda.device_of(t):
        _digest_kernel[triton.cdiv(count, rows), parts](
            t,
            y,
            count,
            features,
            of_rows[1][0],
            of_rows[0][1],
            of_rows[1][1],
            of_features[1][0],
            of_features[0][1],
            of_features[1][1],
            SPLIT,
            FLAT=bool(flat),
            BITS=8 * size,
            PER=per,
            ROWS=rows,
            COLUMNS=columns,
        )
    return y[0] if parts == 1 else y.sum(0)
