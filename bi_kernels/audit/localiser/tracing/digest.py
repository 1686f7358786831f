"""64-bit digests of a tensor's bits, one a token: integer arithmetic on the device, without waiting for it."""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bi_kernels.audit.localiser.tracing.geometry import Geometry, Reading, by_rows

VERSION = "1: sum over words w of the features, in order, of w * (splitmix64(i) | 1), modulo 2**64"
LARGEST = 2**24  # bytes of a tensor without tokens that is digested
AT_ONCE = 2**25  # words that are widened to 64 bits at a time
SPLIT = 2**16  # words of a row that one program of the kernel adds
WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)  # of splitmix64 (Steele et al., OOPSLA 2014), as signed integers
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64), tl.constexpr(0x94D049BB133111EB - 2**64)


class Digest(NamedTuple):
    """The digests of one way to read a tensor: rows, int64, of so many features; keys: whether keys are among them."""

    form: str
    features: int
    keys: bool
    rows: torch.Tensor
    reading: Reading


@cache
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Returns odd 64-bit integers that look random: splitmix64 of 1, 2, 3, …"""
    z = torch.arange(1, count + 1, device=device) * GAMMA.value
    for shift, factor in ((30, FIRST), (27, SECOND)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor.value
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) | 1


def weights(count: int, device: torch.device) -> torch.Tensor:
    """Returns the first `count` of these weights."""
    return _weights(max(1024, 1 << (count - 1).bit_length()), device)[:count]


@triton.jit(do_not_specialize=["count", "features", "split"])
def _digest_kernel(words, sums, count, features, split, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * split
    total = tl.zeros((ROWS, COLUMNS), tl.int64)
    for at in range(first, tl.minimum(first + split, features), COLUMNS):
        k = at + tl.arange(0, COLUMNS)
        z = (k.to(tl.int64) + 1) * GAMMA
        z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * FIRST
        z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * SECOND
        z = (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1
        inside = (row < count)[:, None] & (k < features)[None, :]
        place = row.to(tl.int64)[:, None] * features + k[None, :]
        total += tl.load(words + place, inside, other=0).to(tl.int64) * z[None, :]
    tl.store(sums + tl.program_id(1).to(tl.int64) * count + row, tl.sum(total, 1), row < count)


def by_kernel(words: torch.Tensor) -> torch.Tensor:
    """Returns (rows,) int64 of contiguous words (rows, features), in one launch that keeps nothing but the sums."""
    count, features = words.shape
    rows, columns, parts = *((16, 128) if count >= 16 else (1, 1024)), triton.cdiv(features, SPLIT)
    sums = torch.empty(parts, count, dtype=torch.int64, device=words.device)
    with torch.cuda.device_of(words):
        _digest_kernel[(triton.cdiv(count, rows), parts)](words, sums, count, features, SPLIT, rows, columns)
    return sums[0] if parts == 1 else sums.sum(0)


def words_of(t: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a (rows, features) tensor as integers of at most 32 bits, contiguous."""
    t = t.contiguous()
    size = t.element_size()
    if size < 4 and t.shape[1] * size % 4 == 0:
        return (t.clone() if t.storage_offset() * size % 4 else t).view(torch.int32)
    return t.view(WORD[size])


def rows(t: torch.Tensor, count: int) -> torch.Tensor:
    """Returns (count,) int64 of a tensor whose first dimensions are `count` rows."""
    words = words_of(t.reshape(count, -1))
    if t.is_cuda:
        return by_kernel(words)
    w = weights(words.shape[1], t.device)
    parts = words.split(max(1, AT_ONCE // words.shape[1]))
    return torch.cat([(part * w).sum(1) for part in parts])


def whole(t: torch.Tensor) -> torch.Tensor:
    """Returns (1,) int64 of a tensor of any size."""
    words = words_of(t.detach().reshape(1, -1)).view(-1)
    even = len(words) // 4096 * 4096
    blocks = [part for part in (words[:even].view(-1, 4096), words[even:].view(1, -1)) if part.numel()]
    sums = torch.cat([rows(block, len(block)) for block in blocks])
    return (sums * weights(len(sums), t.device)).sum(0, keepdim=True)


def _of_keys(t: torch.Tensor, reading: Reading, geometry: Geometry) -> torch.Tensor:
    """Digests scores: of the keys of the query's own sample, up to the query, weighed by their positions."""
    on = lambda a: torch.from_numpy(a).to(t.device)
    samples, positions = on(geometry.tokens.samples()), on(geometry.tokens.positions())
    queries, keys = on(geometry.grid), on(geometry.keys)
    shape = geometry.rows, geometry.width, -1, keys.shape[1]
    words = by_rows(t, reading).reshape(shape).contiguous().view(WORD[t.element_size()])
    words = words.unflatten(-1, (keys.shape[1], -1))
    of_query, of_key = (positions[at.clamp(min=0)] for at in (queries, keys))
    seen = (queries >= 0)[:, :, None] & (keys >= 0)[:, None, :] & (of_query[:, :, None] >= of_key[:, None, :])
    seen &= samples[queries.clamp(min=0)][:, :, None] == samples[keys.clamp(min=0)][:, None, :]
    by_key = weights(geometry.tokens.count, t.device)[of_key]
    of = weights(words.shape[2] * words.shape[4], t.device).view(1, words.shape[2], 1, words.shape[4])
    rows = [((words[i] * of).sum(-1) * by_key[i] * seen[i][:, None, :]).sum((1, 2)) for i in range(geometry.rows)]
    return torch.cat(rows)


def digests(t: torch.Tensor, geometry: Geometry, known: dict) -> tuple[Digest, ...]:
    """Returns the digests of every way to read a tensor; none for a large one without tokens. known: gets the rows of
    contiguous views of the same memory."""
    if t.is_complex() or t.is_neg():
        t, known = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t, {}
    found, numel, size = [], t.numel(), t.element_size()
    for reading in geometry.readings(t.shape) if numel else ():
        if reading.form == "n" and reading.keys is None and numel * size > LARGEST and geometry.width > 1:
            continue
        view = by_rows(t, reading)
        count = view.shape[: len(reading.dims)].numel()
        if reading.keys is not None:
            features = numel // count // t.shape[reading.keys]
            found.append(Digest(reading.form, features, True, _of_keys(t, reading, geometry), reading))
            continue
        key = t.storage_offset() * size, size, count, numel
        if not view.is_contiguous():
            key += view.shape, view.stride()
        if key not in known:
            known[key] = rows(view, count)
        found.append(Digest(reading.form, numel // count, False, known[key], reading))
    return tuple(found)
