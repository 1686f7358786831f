"""Number formats as the GPU has them and NumPy does not: bf16, the one NaN, rounding toward zero and to odd."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle

FP32_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
FP16_NAN = np.uint16(0x7FFF).view(np.float16)
BELOW = 0x1FFFFFFF  # the bits of an fp64's fraction that an fp32 has no room for
_NP_DTYPES: dict = {}  # by a dtype's name


def canonical(x: np.ndarray) -> np.ndarray:
    """Makes every NaN of fp32 or fp16 the one that the GPU makes."""
    nan = np.isnan(x) if x.dtype in (np.float32, np.float16) else np.False_
    return np.where(nan, FP32_NAN if x.dtype == np.float32 else FP16_NAN, x) if np.count_nonzero(nan) else x


def to_fp32_toward_zero(x: np.ndarray) -> np.ndarray:
    """Converts fp64 to fp32 toward zero, gradual underflow kept; only from 2^128 on does it overflow, to Inf."""
    x = (x.view(np.int64) & ~BELOW).view(np.float64)
    tiny = np.abs(x) < 2.0**-126
    if tiny.any():
        x = np.where(tiny, np.trunc(x * 2.0**149) * 2.0**-149, x)
    return x.astype(np.float32)


def add_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns x + y in fp64, rounded to odd: rounding that once more, to half the bits, is as good as rounding once."""
    total = x + y
    from_y = total - x
    error = (x - (total - from_y)) + (y - from_y)
    bits = total.view(np.int64)
    inexact_even = (np.abs(error) > 0) & ((bits & 1) == 0)
    return (bits + inexact_even * np.where((error > 0) == (total > 0), 1, -1)).view(np.float64)


def numpy_dtype(dtype, find=stock._get_np_dtype):
    name = dtype.scalar.name
    if name not in _NP_DTYPES:
        _NP_DTYPES[name] = find(dtype)
    return _NP_DTYPES[name]


def refuse(what: str):
    raise NotImplementedError(f"{what} is not supported in the interpreter: cast to fp32 first")


def refuse_bf16(handle: TensorHandle, what: str):
    if handle.get_element_ty() == tl.bfloat16:
        refuse(f"{what} bf16")


def numbers(handle: TensorHandle) -> np.ndarray:
    """Returns the numbers that a handle holds: bf16 as fp32."""
    dtype = handle.dtype.scalar
    if dtype.is_fp8():
        refuse(f"{dtype}")
    if dtype == tl.bfloat16 and handle.data.dtype == np.uint16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def handle_of(data: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """Makes what arithmetic computed a `dtype`."""
    return TensorHandle(to_bf16(data) if dtype == tl.bfloat16 else canonical(data), dtype)


def to_bf16(x: np.ndarray, toward_zero: bool = False) -> np.ndarray:
    """Converts any number to the bits of a bf16, rounded once (int64 from 2^53 on twice), to even or `toward_zero`."""
    if x.dtype == np.float32:
        bits = x.view(np.uint32)
    else:
        x = x.astype(np.float64)
        odd = to_fp32_toward_zero(x)
        # A sticky last bit lets the second rounding see that the first was inexact.
        bits = odd.view(np.uint32) | (np.isfinite(odd) & (odd != x))
    if not toward_zero:
        bits = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return np.where(np.isnan(x), 0x7FFF, bits >> 16).astype(np.uint16)


def to_fp16_toward_zero(x: np.ndarray) -> np.ndarray:
    nearest = x.astype(np.float16)
    return np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float16(0)), nearest)


def maximum(x: np.ndarray, y: np.ndarray, pick=np.fmax) -> np.ndarray:
    """Puts +0 above -0 like the GPU; np.fmax keeps the number beside a NaN, np.maximum the NaN."""
    return np.where((x == 0) & (y == 0), x + y, pick(x, y))


def minimum(x: np.ndarray, y: np.ndarray, pick=np.fmax) -> np.ndarray:
    return -maximum(-x, -y, pick)
