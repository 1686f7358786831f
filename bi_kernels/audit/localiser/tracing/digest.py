"""64-bit digests of a tensor's bits, one a token: integer arithmetic on the device, without waiting for it."""

from functools import cache, lru_cache
from typing import NamedTuple

import torch

from bi_kernels.audit.localiser.tracing import digest_kernel
from bi_kernels.audit.localiser.tracing.digest_kernel import WORDS, MemoryLayout, digest_rows, memory_layout
from bi_kernels.audit.localiser.tracing.geometry import Geometry, Reading, by_rows

VERSION = "1: sum over words w of the features, in order, of w * (splitmix64(i) | 1), modulo 2**64"
LARGEST = 2**24  # bytes of a tensor without tokens that is digested
AT_ONCE = 2**25  # words that are widened to 64 bits at a time
_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


@cache
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Returns odd 64-bit integers that look random: splitmix64 (Steele et al., OOPSLA 2014) of 1, 2, 3, …"""
    z = torch.arange(1, count + 1, device=device) * digest_kernel.GAMMA.value
    for shift, factor in ((30, digest_kernel.FIRST), (27, digest_kernel.SECOND)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor.value
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) | 1


def weights(count: int, device: torch.device) -> torch.Tensor:
    """Returns the first `count` of these weights."""
    return _weights(max(1024, 1 << (count - 1).bit_length()), device)[:count]


class Digest(NamedTuple):
    """The digests of one way to read a tensor: rows, int64, of so many features; keys: whether keys are among them."""

    form: str
    features: int
    keys: bool
    rows: torch.Tensor
    reading: Reading


def _words(t: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a (rows, features) tensor as integers of at most 32 bits."""
    t = t.contiguous()
    size = t.element_size()
    if size < 4 and t.shape[1] * size % 4 == 0:
        return (t.clone() if t.storage_offset() * size % 4 else t).view(torch.int32)
    return t.view(_WORD[size])


def rows(t: torch.Tensor, count: int, dims: int = 1) -> torch.Tensor:
    """Returns (count,) int64 of a tensor whose first `dims` dimensions are `count` rows."""
    if t.is_cuda and t.element_size() in WORDS:
        return digest_rows(t, memory_layout(t.shape, t.stride(), dims))
    words = _words(t.reshape(count, -1))
    w = weights(words.shape[1], t.device)
    if words.numel() <= AT_ONCE:
        return (words * w).sum(1)
    step = max(1, AT_ONCE // words.shape[1])
    return torch.cat([(part * w).sum(1) for part in words.split(step)])


def _of_keys(t: torch.Tensor, reading: Reading, geometry: Geometry) -> torch.Tensor:
    """Digests scores: of the keys of the query's own sample, up to the query, weighed by their positions."""
    on = lambda a: torch.from_numpy(a).to(t.device)
    keys = geometry.grid if geometry.cached is None else geometry.cached
    samples, positions = on(geometry.tokens.samples()), on(geometry.tokens.positions())
    queries, keys = on(geometry.grid), on(keys)
    shape = geometry.rows, geometry.width, -1, keys.shape[1]
    words = by_rows(t, reading).reshape(shape).contiguous().view(_WORD[t.element_size()])
    words = words.unflatten(-1, (keys.shape[1], -1))
    of_query, of_key = (positions[at.clamp(min=0)] for at in (queries, keys))
    seen = (queries >= 0)[:, :, None] & (keys >= 0)[:, None, :] & (of_query[:, :, None] >= of_key[:, None, :])
    seen &= samples[queries.clamp(min=0)][:, :, None] == samples[keys.clamp(min=0)][:, None, :]
    by_key = weights(geometry.tokens.count, t.device)[of_key]
    of = weights(words.shape[2] * words.shape[4], t.device).view(1, words.shape[2], 1, words.shape[4])
    rows = [((words[i] * of).sum(-1) * by_key[i] * seen[i][:, None, :]).sum((1, 2)) for i in range(geometry.rows)]
    return torch.cat(rows)


def whole(t: torch.Tensor) -> torch.Tensor:
    """Returns (1,) int64 of a tensor of any size."""
    words = _words(t.detach().reshape(1, -1)).view(-1)
    even = len(words) // 4096 * 4096
    blocks = [part for part in (words[:even].view(-1, 4096), words[even:].view(1, -1)) if part.numel()]
    sums = torch.cat([rows(block, len(block)) for block in blocks])
    return (sums * weights(len(sums), t.device)).sum(0, keepdim=True)


@lru_cache(4096)
def _laid(shape: tuple[int, ...], stride: tuple[int, ...], reading: Reading) -> tuple[int, int, MemoryLayout]:
    """Returns (rows, features of a row, where both lie) of one way to read a tensor."""
    view = by_rows(torch.empty_strided(shape, stride, device="meta"), reading)
    count, dims = view.shape[: len(reading.dims)].numel(), len(reading.dims)
    return count, view.numel() // count, memory_layout(view.shape, view.stride(), dims)


def digests(t: torch.Tensor, geometry: Geometry, known: dict) -> tuple[Digest, ...]:
    """Returns the digests of every way to read a tensor; none for a large one without tokens. known: gets the rows of
    views of the same memory."""
    if t.is_complex() or t.is_neg():
        t, known = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t, {}
    numel, size, shape, stride, found = t.numel(), t.element_size(), t.shape, t.stride(), []
    if not numel:
        return ()
    at = t.storage_offset() * size
    for reading in geometry.readings(shape):
        if reading.form == "n" and reading.keys is None and numel * size > LARGEST and geometry.width > 1:
            continue
        count, features, laid = _laid(shape, stride, reading)
        if reading.keys is not None:
            features //= t.shape[reading.keys]
            found.append(Digest(reading.form, features, True, _of_keys(t, reading, geometry), reading))
            continue
        key = at, size, laid
        if key not in known:
            there = t.is_cuda and size in WORDS
            known[key] = digest_rows(t, laid) if there else rows(by_rows(t, reading), count, len(reading.dims))
        found.append(Digest(reading.form, features, False, known[key], reading))
    return tuple(found)
