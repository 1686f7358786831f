"""Computes `tl.dot` as sm_90 does: 16-bit operands bit for bit like its tensor core, fp32 as a chain of FMAs."""

import numpy as np

FP32_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
FP16_NAN = np.uint16(0x7FFF).view(np.float16)
SLAB = 16
FRACTION = 25
LOWEST_E = -133  # found by recording: with -132, -134 or no limit, a few sums below 2^-149 come out wrong
ZERO = -10000  # exponent of a zero: it never wins a maximum, and two of them still fit an int16
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


def _add_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns x + y in fp64, rounded to odd: rounding that once more, to half the bits, is as good as rounding once."""
    total = x + y
    from_y = total - x
    error = (x - (total - from_y)) + (y - from_y)
    bits = total.view(np.int64)
    inexact_even = (np.abs(error) > 0) & ((bits & 1) == 0)
    return (bits + inexact_even * np.where((error > 0) == (total > 0), 1, -1)).view(np.float64)


def _exponents(x: np.ndarray, lowest: int) -> np.ndarray:
    """Returns fp32 numbers' exponents; what is subnormal in the operands' own format keeps that format's lowest."""
    exponent = ((x.view(np.int32) >> 23) & 0xFF) - 127
    return np.where(x == 0, ZERO, np.maximum(exponent, lowest)).astype(np.int16)


def _power_of_two(exponent: np.ndarray) -> np.ndarray:
    return ((exponent + 1023) << 52).view(np.float64)


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, lowest: int) -> np.ndarray:
    """Returns a (M, K) b (K, N) + c (M, N), all fp32 arrays, as sm_90's tensor core does it for 16-bit operands.

    `lowest` is the smallest normal exponent of the operands' format. For every slab of 16 k, in ascending order:
    e = the largest of -133, exponent(c) and exponent(a) + exponent(b) of the nonzero products; every product and c are
    truncated toward zero to a multiple of 2^(e - 25), added exactly, and converted to fp32 toward zero, a zero to +0.
    No element that an H200 gave differs: tools/record_golden.py has the inputs, from normal to nonfinite.
    """
    a_t, b_k = np.ascontiguousarray(a.T), np.ascontiguousarray(b)
    if a.shape[1] % SLAB:
        pad = ((0, -a.shape[1] % SLAB), (0, 0))
        a_t, b_k = np.pad(a_t, pad), np.pad(b_k, pad)
    exponent_a, exponent_b = _exponents(a_t, lowest), _exponents(b_k, lowest)
    highest = int(exponent_a.max()), int(exponent_b.max())
    finite = max(highest) < 128
    nonzero_a, nonzero_b = exponent_a > ZERO, exponent_b > ZERO
    out = np.add(c, np.float32(0), order="C")
    if finite:
        # A row of a or a column of b that is all zeros leaves c as it is: padding costs nothing.
        rows, cols = nonzero_a.any(axis=0), nonzero_b.any(axis=0)
        if not (rows.any() and cols.any()):
            return _canonical(out)
        if not (rows.all() and cols.all()):
            out[np.ix_(rows, cols)] = mma(a[rows], b[:, cols], c[np.ix_(rows, cols)], lowest)
            return _canonical(out)
    # Where no product can leave fp32's range, fp32 holds it exactly and is a third faster than fp64.
    low = int(exponent_a.min(where=nonzero_a, initial=128)) + int(exponent_b.min(where=nonzero_b, initial=128))
    exact = np.float32 if finite and low >= -100 and sum(highest) <= 120 else np.float64
    a_t, b_k = a_t.astype(exact, copy=False), b_k.astype(exact, copy=False)
    step = min(len(out), max(1, BLOCK // (SLAB * b.shape[1])))
    shape = SLAB, step, b.shape[1]
    scratch = np.empty(shape, np.int16), np.empty(shape, exact), np.empty(shape, np.int32)
    for row in range(0, len(out), step):
        rows = slice(row, row + step)
        for k in range(0, len(b_k), SLAB):
            ks = slice(k, k + SLAB)
            if finite and not (nonzero_a[ks, rows].any() and nonzero_b[ks].any()):
                continue
            out[rows] = _mma_slab(
                a_t[ks, rows], b_k[ks], out[rows], exponent_a[ks, rows], exponent_b[ks], finite, scratch
            )
    return _canonical(out + np.float32(0))


def _mma_slab(a, b, c, exponent_a, exponent_b, finite, scratch):
    """Computes one step of `mma`; a (16, M) and b (16, N) in a type in which their products are exact.

    scratch: room for the exponents, the products and the products as integers, (16, M or more, N) each.
    """
    exponents, products, integers = (s[:, : len(c)] for s in scratch)
    np.add(exponent_a[:, :, None], exponent_b[:, None, :], out=exponents)
    np.multiply(a[:, :, None], b[:, None, :], out=products)
    e = np.maximum.reduce(exponents, axis=0)
    if products.dtype == np.float32:  # every power of two within fp32's range, as nearly always
        # Nonzero products are above 2^-100 here. Of a c below, alone in its sum, the exponent would be too high.
        e_c = np.maximum(e, ((c.view(np.int32) >> 23) & 0xFF) - 127)
        tiny = e_c.min() < -100 and ((e_c < -100) & (c != 0)).any()
        if not tiny and e_c.max() < 128:
            e_c = np.maximum(e_c, -100, out=e_c) << 23
            scale = ((FRACTION + 127 << 23) - e_c).view(np.float32)
            products *= scale
            np.copyto(integers, products, casting="unsafe")
            total = np.add.reduce(integers, axis=0, dtype=np.int32) + np.trunc(c * scale)
            return _to_24_bits(total).astype(np.float32) * (e_c + (127 - FRACTION << 23)).view(np.float32)
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


def fma_dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a (M, K) b (K, N) + c (M, N) in fp32, one FMA for every k, ascending: no bit differs from an H200's."""
    a, b, out = np.asfortranarray(a, np.float64), b.astype(np.float64, order="C"), c.copy(order="C")
    step = min(len(out), max(1, BLOCK // 8 // b.shape[1]))
    # Every sum is a multiple of 2^unit: one that is not zero is no subnormal unless unit is below -126.
    unit = min(_lowest_bit(a) + _lowest_bit(b), _lowest_bit(c.astype(np.float64)))
    scratch = [np.empty((step, b.shape[1]), dtype) for dtype in (np.float64, np.float64, np.float64, np.int64, bool)]
    for row in range(0, len(out), step):
        rows = slice(row, row + step)
        product, acc, total, tail, tie = (s[: len(out[rows])] for s in scratch)
        acc[:] = out[rows]
        for k in range(len(b)):
            np.multiply(a[rows, k, None], b[k], out=product)
            np.add(product, acc, out=total)
            np.equal(np.bitwise_and(total.view(np.int64), 0x1FFFFFFF, out=tail), 0x10000000, out=tie)
            # elsewhere rounding to fp64 and then to fp32 is rounding once
            if tie.any() or (unit < -126 and ((np.abs(total) < 2.0**-126) & (total != 0)).any()):
                total[:] = _add_to_odd(product, acc)
            out[rows] = total
            acc[:] = out[rows]
    return _canonical(out)


def _lowest_bit(x: np.ndarray) -> int:
    """Returns the exponent of a power of two that every finite element of x, fp32 numbers in fp64, is a multiple of."""
    exponents = ((x.view(np.int64) >> 52) & 0x7FF) - 1023 - 23
    return int(exponents.min(where=x != 0, initial=128))
