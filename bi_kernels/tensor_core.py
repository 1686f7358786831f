"""Computes `tl.dot` as sm_90 does: 16-bit operands bit for bit like its tensor core, fp32 as a chain of FMAs."""

import math
import threading
from collections.abc import Callable
from functools import cache, partial

import numpy as np

FP32_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
FP16_NAN = np.uint16(0x7FFF).view(np.float16)
SLAB = 16
FRACTION = 25
LOWEST_E = -133  # found by recording: with -132, -134 or no limit, a few sums below 2^-149 come out wrong
ZERO = -10000  # exponent of a zero: it never wins a maximum, and two of them still fit an int16
LEAST, LEAST_BITS = -100, (127 - 100) << 23  # exponent, and the bits of its power of two, from which on fp32 will do
EXPONENT = np.uint32(0x7F800000)  # where an fp32 has it
FEW = 2**9  # sums of FMAs, whose rounding is looked at once they are all there
BLOCK = 2**16  # products formed at a time, so that they stay in the L2 cache


def _canonical(x: np.ndarray) -> np.ndarray:
    """Makes every NaN of fp32 or fp16 the one that the GPU makes."""
    nan = np.isnan(x) if x.dtype in (np.float32, np.float16) else np.False_
    return np.where(nan, FP32_NAN if x.dtype == np.float32 else FP16_NAN, x) if np.count_nonzero(nan) else x


def _to_24_bits(x: np.ndarray) -> np.ndarray:
    """Truncates fp64 toward zero to the bits of an fp32's fraction."""
    return (x.view(np.int64) & ~0x1FFFFFFF).view(np.float64)


def _to_fp32_toward_zero(x: np.ndarray) -> np.ndarray:
    """Converts fp64 to fp32 toward zero, gradual underflow kept; only from 2^128 on does it overflow, to Inf."""
    x = _to_24_bits(x)
    tiny = np.abs(x) < 2.0**-126
    if tiny.any():
        x = np.where(tiny, np.trunc(x * 2.0**149) * 2.0**-149, x)
    return x.astype(np.float32)


def _two_sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns x + y in fp64, and what rounding took from it."""
    total = x + y
    from_y = total - x
    return total, (x - (total - from_y)) + (y - from_y)


def _add_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns x + y in fp64, rounded to odd: rounding that once more, to half the bits, is as good as rounding once."""
    total, error = _two_sum(x, y)
    bits = total.view(np.int64)
    inexact_even = (np.abs(error) > 0) & ((bits & 1) == 0)
    return (bits + inexact_even * np.where((error > 0) == (total > 0), 1, -1)).view(np.float64)


def _exponents(x: np.ndarray, lowest: int) -> np.ndarray:
    """Returns fp32 numbers' exponents; what is subnormal in the operands' own format keeps that format's lowest."""
    exponent = ((x.view(np.int32) >> 23) & 0xFF) - 127
    return np.where(x == 0, ZERO, np.maximum(exponent, lowest)).astype(np.int16)


@cache
def _exponent_table(lowest: int) -> np.ndarray:
    """Returns `_exponents` of every upper half of an fp32; in it a number of 16 bits shows its own, and whether it is
    zero."""
    return _exponents((np.arange(2**16, dtype=np.uint32) << 16).view(np.float32), lowest)


def _power_of_two(exponent: np.ndarray) -> np.ndarray:
    return ((exponent + 1023) << 52).view(np.float64)


class _Room(threading.local):
    """Holds memory from call to call: to be given it anew takes as long as to fill it."""

    def __init__(self):
        self.held: dict = {}

    def of(self, shape: tuple[int, ...], *types) -> list[np.ndarray]:
        """Returns an array of each type, which is the caller's until the next call."""
        size = math.prod(shape)
        for t in types:
            if t not in self.held or len(self.held[t]) < size:
                self.held[t] = np.empty(size, t)
        return [self.held[t][:size].reshape(shape) for t in types]


_ROOM = _Room()


def _without_zeros(dot: Callable, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray | None:
    """Computes a dot without the rows of a and the columns of b that are all zeros, which leave c as it is: padding
    costs nothing. None where there are none, or beside what is not finite, or where c holds −0."""
    rows, cols = a.any(axis=1), b.any(axis=0)
    finite = not (rows.all() and cols.all()) and np.isfinite(a).all() and np.isfinite(b).all()
    if not finite or (np.signbit(c) & (c == 0)).any():
        return None
    out, inside = c.copy(order="C"), np.ix_(rows, cols)
    if rows.any() and cols.any():
        out[inside] = dot(a[rows], b[:, cols], c[inside])
    return _canonical(out)


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, lowest: int) -> np.ndarray:
    """Returns a (M, K) b (K, N) + c (M, N), all fp32 arrays, as sm_90's tensor core does it for 16-bit operands.

    `lowest` is the smallest normal exponent of the operands' format. For every slab of 16 k, in ascending order:
    e = the largest of -133, exponent(c) and exponent(a) + exponent(b) of the nonzero products; every product and c are
    truncated toward zero to a multiple of 2^(e - 25), added exactly, and converted to fp32 toward zero, a zero to +0.
    No element that an H200 gave differs: tools/record_golden.py has the inputs, from normal to nonfinite.
    """
    out = np.add(c, np.float32(0), order="C")
    if (dense := _without_zeros(partial(mma, lowest=lowest), a, b, out)) is not None:
        return dense
    if b.shape[1] < len(a):  # NumPy is quick along the last dimension
        return np.ascontiguousarray(mma(b.T, a.T, c.T, lowest).T)
    a_t, b_k = np.ascontiguousarray(a.T), np.ascontiguousarray(b)
    if a.shape[1] % SLAB:
        pad = ((0, -a.shape[1] % SLAB), (0, 0))
        a_t, b_k = np.pad(a_t, pad), np.pad(b_k, pad)
    table = _exponent_table(lowest)
    exponent_a, exponent_b = (table.take(x.view(np.uint32) >> 16) for x in (a_t, b_k))
    both = exponent_a, exponent_b
    highest, low = ([int(pick(x)) for x in both] for pick in (np.max, np.min))
    finite = max(highest) < 128
    slabs = lambda x: x.reshape(-1, SLAB, x.shape[1])
    live = slice(None)
    if min(low) == ZERO and finite:  # a slab of zeros, too, leaves c as it is
        nonzero = [x > ZERO for x in both]
        live = np.logical_and(*(slabs(x).any(axis=(1, 2)) for x in nonzero))
        low = [int(x.min(where=there, initial=128)) for x, there in zip(both, nonzero)]
    # Where no product can leave fp32's range, fp32 holds it exactly and is a third faster than fp64.
    exact = np.float32 if finite and sum(low) >= LEAST and sum(highest) <= 120 else np.float64
    a_t, b_k = (slabs(x)[live].astype(exact, copy=False) for x in (a_t, b_k))
    exponent_a, exponent_b = (slabs(x)[live] for x in both)
    # Nor then can a sum, unless c is as large: the powers of two need no look.
    top = int((out.view(np.uint32) & EXPONENT).max() >> 23) - 127
    calm = exact == np.float32 and max(top, sum(highest) + 8 + len(b_k).bit_length()) < 120
    step = min(len(out), max(1, BLOCK // (SLAB * b.shape[1])))
    several = max(1, min(len(b_k), BLOCK // (SLAB * b.shape[1] * step)))
    for row in range(0, len(out), step):
        rows, total = slice(row, row + step), out[row : row + step]
        for k in range(0, len(b_k), several):
            ks = slice(k, k + several)
            shape = len(b_k[ks]), SLAB, *total.shape
            exponents, products, integers = _ROOM.of(shape, np.int16, exact, np.int32)
            np.add(exponent_a[ks, :, rows, None], exponent_b[ks, :, None], out=exponents)
            np.multiply(a_t[ks, :, rows, None], b_k[ks, :, None], out=products)
            e = np.maximum.reduce(exponents, axis=1)
            compute, sums = partial(_mma_slab, finite=finite), total
            if calm and e.min() >= LEAST:
                compute, e = _scaled_slab, (e.astype(np.int32) + 127 << 23).view(np.uint32)
            for slab in zip(products, e, integers):
                sums = compute(*slab, sums)
            total[...] = sums
    return _canonical(out + np.float32(0))


def _mma_slab(products, e, integers, c, finite):
    """Computes one step of `mma`; products: exact, (16, M, N), which it overwrites; e: the highest of their exponents,
    (M, N); integers: room for the products, truncated."""
    if products.dtype == np.float32:  # every power of two within fp32's range, as nearly always
        # Nonzero products are above 2^-100 here. Of a c below, alone in its sum, the exponent would be too high.
        bits = np.maximum(e, LEAST).astype(np.uint32) + 127 << 23
        e_c = np.maximum(bits, c.view(np.uint32) & EXPONENT)
        tiny = e_c.min() == LEAST_BITS and ((e_c == LEAST_BITS) & (c != 0)).any()
        if not tiny and e_c.max() < EXPONENT:
            return _scaled_slab(products, bits, integers, c)
    e = np.maximum(np.maximum(e, _exponents(c, -126)), LOWEST_E).astype(np.int64)
    scale = _power_of_two(FRACTION - e)
    ieee = None if finite else products.sum(axis=0) + c
    # Only beside products that are all zero is the scale out of fp32's range: any number will do there.
    products *= np.minimum(scale, 2.0**125).astype(np.float32) if products.dtype == np.float32 else scale
    # 16 products below 4 in units of 2^-25 stay below 2^31; the conversion to an integer is the truncation.
    np.copyto(integers, products, casting="unsafe")
    total = np.add.reduce(integers, axis=0, dtype=np.int32) + np.trunc(c * scale)
    out = _to_fp32_toward_zero(total * _power_of_two(e - FRACTION))
    return out if finite else np.where(np.isfinite(ieee), out, ieee).astype(np.float32)


def _scaled_slab(products, e, integers, c):
    """Computes `_mma_slab` where e, as the bits of powers of two, and c's exponents are in fp32's range by far."""
    e = np.maximum(e, c.view(np.uint32) & EXPONENT)
    scale = (np.uint32(FRACTION + 254 << 23) - e).view(np.float32)
    products *= scale
    np.copyto(integers, products, casting="unsafe")
    total = np.add.reduce(integers, axis=0, dtype=np.int32) + np.trunc(c * scale)
    return _to_24_bits(total).astype(np.float32) * (e - np.uint32(FRACTION << 23)).view(np.float32)


def fma_dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a (M, K) b (K, N) + c (M, N) in fp32, one FMA for every k, ascending: no bit differs from an H200's."""
    if (dense := _without_zeros(fma_dot, a, b, c)) is not None:
        return dense
    a, b = a.astype(np.float64), b.astype(np.float64)
    # Every sum is a multiple of 2^unit: one that is not zero is no subnormal unless unit is below -126.
    unit = min(_lowest_bit(a) + _lowest_bit(b), _lowest_bit(c.astype(np.float64)))
    out = _few_fmas(a, b, c, unit) if c.size <= FEW else None
    return _canonical(_fmas(a, b, c, unit) if out is None else out)


def _few_fmas(a, b, c, unit) -> np.ndarray | None:
    """Computes `fma_dot`, looking at all sums at the end; None where one may have been rounded twice, by fp64 first."""
    out, wide = c.copy(order="C"), c.astype(np.float64)
    totals, before = _ROOM.of((len(b), *c.shape), np.float64, np.float32)
    np.multiply(a.T[..., None], b[:, None], out=totals)
    for total, start in zip(totals, before):
        start[...] = out
        np.add(total, wide, out=total)
        out[...] = total
        wide[...] = out
    doubtful = (totals.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    if unit < -126:
        doubtful |= (np.abs(totals) < 2.0**-126) & (totals != 0)
    k, i, j = np.nonzero(doubtful)
    inexact = len(k) and _two_sum(a[i, k] * b[k, j], before[k, i, j].astype(np.float64))[1].any()
    return None if inexact else out


def _fmas(a, b, c, unit) -> np.ndarray:
    """Computes `fma_dot`, looking at every sum."""
    out, acc = c.copy(order="C"), c.astype(np.float64, order="C")
    product, total, tail, tie = (np.empty(c.shape, dtype) for dtype in (np.float64, np.float64, np.int64, bool))
    for x, y in zip(np.asfortranarray(a).T[..., None], np.ascontiguousarray(b)):
        np.multiply(x, y, out=product)
        np.add(product, acc, out=total)
        np.equal(np.bitwise_and(total.view(np.int64), 0x1FFFFFFF, out=tail), 0x10000000, out=tie)
        # elsewhere rounding to fp64 and then to fp32 is rounding once
        if tie.any() or (unit < -126 and ((np.abs(total) < 2.0**-126) & (total != 0)).any()):
            total[:] = _add_to_odd(product, acc)
        out[...] = total
        acc[...] = out
    return out


def _lowest_bit(x: np.ndarray) -> int:
    """Returns the exponent of a power of two that every finite element of x, fp32 numbers in fp64, is a multiple of."""
    exponents = ((x.view(np.int64) >> 52) & 0x7FF) - 1023 - 23
    return int(exponents.min(where=x != 0, initial=128))
