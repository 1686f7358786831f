"""Computes `tl.dot` as sm_90 does: 16-bit operands bit for bit like its tensor core, fp32 as a chain of FMAs."""

import numba
import numpy as np
from numba.extending import intrinsic

from bi_kernels.interpreter.formats import BELOW, canonical

SLAB = 16
FRACTION = 25
LOWEST_E = -133  # found by recording: with -132, -134 or no limit, a few sums below 2^-149 come out wrong
ZERO = -10000  # exponent of a zero: it never wins a maximum
WIDE = 32  # columns from which on the last dimension is quick whichever it is


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, lowest: int) -> np.ndarray:
    """Returns a (M, K) b (K, N) + c (M, N), all fp32 arrays, as sm_90's tensor core does it for 16-bit operands.

    `lowest` is the smallest normal exponent of the operands' format. For every slab of 16 k, in ascending order:
    e = the largest of -133, exponent(c) and exponent(a) + exponent(b) of the nonzero products; every product and c are
    truncated toward zero to a multiple of 2^(e - 25), added exactly, and converted to fp32 toward zero, a zero to +0.
    No element that an H200 gave differs: tools/record_golden.py has the inputs, from normal to nonfinite.
    """
    if b.shape[1] < min(len(a), WIDE):
        return np.ascontiguousarray(mma(b.T, a.T, c.T, lowest).T)
    out = c.copy(order="C")
    _mma(np.ascontiguousarray(a), np.ascontiguousarray(b), out, lowest, SLAB, FRACTION, LOWEST_E, BELOW)
    return canonical(out + np.float32(0))


def fma_dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a (M, K) b (K, N) + c (M, N) in fp32, one FMA for every k, ascending: no bit differs from an H200's."""
    out = c.copy(order="C")
    _fmas(np.ascontiguousarray(a), np.ascontiguousarray(b), out)
    return canonical(out)


def _compiled(function):
    """Compiles a function, once for all processes where there is a folder to keep it in."""
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:  # numba found none
        return numba.njit(function)


@numba.njit
def _exponent(bits, lowest):
    """Returns the exponent of an fp32 number, given as its bits; a format's lowest if it is subnormal there."""
    return max(((bits >> 23) & 0xFF) - 127, lowest) if bits & 0x7FFFFFFF else ZERO


@_compiled
def _mma(a, b, out, lowest, slab, fraction, lowest_e, below):
    """Adds a b to out as `mma` says. Its last four arguments are the tensor core's numbers; a test gives it others."""
    (rows, depth), width = a.shape, b.shape[1]
    bits_a, bits_out, bits_b = a.view(np.int32), out.view(np.int32), b.view(np.int32)
    exponents = np.empty(b.shape, np.int32)
    for k in range(depth):
        for j in range(width):
            exponents[k, j] = _exponent(bits_b[k, j], lowest)
    finite = exponents.size == 0 or exponents.max() < 128
    e, scale, total = np.empty(width, np.int32), np.empty(width), np.empty(width)
    bits_scale, bits_total = scale.view(np.int64), total.view(np.int64)
    for i in range(rows):
        for first in range(0, depth, slab):
            ks = range(first, min(first + slab, depth))
            some = not finite  # else zeros times numbers leave the sum as it is
            for k in ks:
                some |= a[i, k] != 0
            if not some:
                continue
            for j in range(width):
                e[j] = max(_exponent(bits_out[i, j], -126), lowest_e)
            for k in ks:
                exponent = _exponent(bits_a[i, k], lowest)
                for j in range(width):
                    e[j] = max(e[j], exponent + exponents[k, j])
            for j in range(width):
                bits_scale[j] = np.int64(fraction - e[j] + 1023) << 52
                total[j] = np.trunc(out[i, j] * scale[j])
            for k in ks:
                x = np.float64(a[i, k])
                for j in range(width):
                    total[j] += np.trunc(x * b[k, j] * scale[j])
            for j in range(width):
                bits_scale[j] = np.int64(e[j] - fraction + 1023) << 52
                total[j] *= scale[j]
                bits_total[j] &= ~below
                tiny = np.abs(total[j]) < 2.0**-126
                out[i, j] = np.trunc(total[j] * 2.0**149) * 2.0**-149 if tiny else total[j]


@intrinsic
def _fma(_, x, y, z):
    return x(x, y, z), lambda context, builder, signature, given: builder.fma(*given)


@_compiled
def _fmas(a, b, out):
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            for j in range(b.shape[1]):
                out[i, j] = _fma(a[i, k], b[k, j], out[i, j])
