"""The GEMM of cuBLASLt on sm_90, where it is one left fold over K: the bits of kernel.py, by another program.

A product that may be split over K, or added up by atomics, has other bits: so no reduction scheme and no workspace is
allowed, and only the family of kernels that the audit has swept is taken, from a version that it has swept. Whatever
else is asked, `launch` returns None, and Triton's kernel serves. Nothing of the process's is set: a handle, descriptors
and preferences of our own.

Source: the cuBLAS library user guide, "Using the cuBLASLt API".
"""

import ctypes
import os
import threading
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from functools import cache, partial

import torch

from bi_kernels.checks import aligned, is_hopper
from bi_kernels.compat import current_stream
from bi_kernels.ops.gemm.kernel import finished, prepared
from bi_kernels.ops.gemm.launch_cache import kind_of, remember

LIBRARY = "cuBLASLt"
VERSIONS = (130100,)  # cublasLtGetVersion() of what the audit has swept
FAMILY = 66  # its kernels for wgmma, "nvjet"; an algorithm's CUBLASLT_ALGO_CONFIG_ID
OFF = os.environ.get("BI_KERNELS_CUBLASLT") == "0"
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
COMPUTE_32F = 68
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8  # of a product, cublasLtMatmulDescAttributes_t
EPILOGUE_BIAS = 4
REDUCTIONS_ALLOWED, ALIGNMENTS = 3, (5, 6, 7, 8)  # of a preference; no workspace is its default
CONFIG_ID, CONFIG_SPLIT, CONFIG_REDUCTION = 0, 2, 3  # of an algorithm
PLANS = 4096  # kept by a thread
ZEROS = 2**20  # bytes
_ONE, _ZERO = c_float(1.0), c_float(0.0)  # what the product, and what stands where y goes, are scaled by
_AT_ONE, _AT_ZERO = byref(_ONE), byref(_ZERO)


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@cache
def _library() -> ctypes.CDLL | None:
    """Returns the library that PyTorch has loaded, if it is one that the audit has swept."""
    if OFF or torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
        library.cublasLtGetVersion.restype = c_size_t
        if library.cublasLtGetVersion() not in VERSIONS:
            return None
    except (OSError, AttributeError):
        return None
    library.cublasLtMatmulDescSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    return library


@cache
def serves(device: torch.device) -> bool:
    """Tells whether a GPU's products may go to the library."""
    return _library() is not None and is_hopper(device)


class _Thread(threading.local):
    """What a thread has made of the library: a handle a GPU, and how each product is computed."""

    def __init__(self):
        self.handles: dict[int, c_void_p] = {}
        self.plans: dict[tuple, _Plan | None] = {}


_thread = _Thread()
_zeros: dict[int, list[torch.Tensor]] = {}  # of a GPU, the last one the widest; a captured graph may read any


class _Plan:
    """A product's descriptors and the algorithm for it; raises LookupError where none is a fold over K."""

    def __init__(self, handle: c_void_p, types: tuple[int, int], sizes: tuple, strides: tuple, transposed: tuple):
        (M, N, K), (ldx, ldw, ldy), (x_t, w_t), (kind, out) = sizes, strides, transposed, types
        self.library, self.handle, self.made = _library(), handle, []
        self.product = self._new("MatmulDesc", c_int(COMPUTE_32F), c_int(TYPES[torch.float32]))
        self.bias, self.row = c_void_p(), N * (4 if out == TYPES[torch.float32] else 2)  # bytes
        # the library's matrices are stored by columns: yᵀ (N, M) = w (N, K) xᵀ (K, M)
        for what, value in ((TRANSA, not w_t), (TRANSB, x_t), (EPILOGUE, EPILOGUE_BIAS)):
            self._set("MatmulDesc", self.product, what, c_int32(value))
        layout = lambda kind, rows, columns, stride: self._new(
            "MatrixLayout", c_int(kind), c_uint64(rows), c_uint64(columns), c_int64(stride)
        )
        self.w = layout(kind, *((N, K) if w_t else (K, N)), ldw)
        self.x = layout(kind, *((M, K) if x_t else (K, M)), ldx)
        self.y = layout(out, N, M, ldy)
        self.algorithm = self._chosen()
        self.at_w, self.at_x, self.at_y, self.stream = (c_void_p() for _ in range(4))  # of a call
        y = self.at_y, self.y
        self.given = self.handle, self.product, _AT_ONE, self.at_w, self.w, self.at_x, self.x, _AT_ZERO, *y, *y
        self.given += byref(self.algorithm), c_void_p(), c_size_t(), self.stream

    def _chosen(self) -> ctypes.Array:
        preference = self._new("MatmulPreference")
        self._set("MatmulPreference", preference, REDUCTIONS_ALLOWED, c_uint32(0))
        for what in ALIGNMENTS:
            self._set("MatmulPreference", preference, what, c_uint32(16))
        found, count = _Found(), c_int()
        of = self.handle, self.product, self.w, self.x, self.y, self.y, preference
        status = self.library.cublasLtMatmulAlgoGetHeuristic(*of, c_int(1), byref(found), byref(count))
        config = [self._config(found, what) for what in (CONFIG_ID, CONFIG_SPLIT, CONFIG_REDUCTION)]
        failed = status or not count.value or found.state or found.workspace
        if failed or config not in ([FAMILY, 0, 0], [FAMILY, 1, 0]):
            raise LookupError
        self.waves = found.waves  # of the GPU's multiprocessors, by the library's reckoning
        return found.algorithm

    def _config(self, found: _Found, what: int) -> int:
        value, written = c_int32(-1), c_size_t()
        self.library.cublasLtMatmulAlgoConfigGetAttribute(
            byref(found.algorithm), c_int(what), byref(value), c_size_t(4), byref(written)
        )
        return value.value

    def _new(self, what: str, *values) -> c_void_p:
        made = c_void_p()
        if getattr(self.library, f"cublasLt{what}Create")(byref(made), *values):
            raise LookupError
        self.made.append((what, made))
        return made

    def _set(self, what: str, of: c_void_p, attribute: int, value) -> None:
        set_attribute = getattr(self.library, f"cublasLt{what}SetAttribute")
        if set_attribute(of, c_int(attribute), byref(value), c_size_t(sizeof(value))):
            raise LookupError

    def __del__(self):
        for what, made in self.made:
            getattr(self.library, f"cublasLt{what}Destroy")(made)

    def run(self, x, w, bias: int, y, stream: int) -> bool:
        """Launches the product; bias: an address. Tells whether the library did."""
        if bias != self.bias.value:
            self.bias.value = bias
            self._set("MatmulDesc", self.product, BIAS_POINTER, self.bias)
        self.at_w.value, self.at_x.value, self.at_y.value = w.data_ptr(), x.data_ptr(), y.data_ptr()
        self.stream.value = stream
        return not self.library.cublasLtMatmul(*self.given)


def _plan(
    device: int, kinds: tuple, sizes: tuple, strides: tuple, transposed: tuple, kept: bool = True
) -> _Plan | None:
    """Returns how a product is computed, None where the library has no fold for it; remembers either, if `kept`."""
    key = device, kinds, sizes, strides, transposed
    if key in _thread.plans:
        return _thread.plans[key]
    if device not in _thread.handles:
        handle = c_void_p()
        if torch.cuda.is_current_stream_capturing() or _library().cublasLtCreate(byref(handle)):
            return None
        _thread.handles[device] = handle
    try:
        plan = _Plan(_thread.handles[device], (TYPES[kinds[0]], TYPES[kinds[1]]), sizes, strides, transposed)
    except LookupError:
        plan = None
    if kept:
        if len(_thread.plans) >= PLANS:
            _thread.plans.clear()
        _thread.plans[key] = plan
    return plan


def _bias_at(bias: torch.Tensor | None, device: int, size: int) -> int | None:
    """Returns the address of what is added to each row, `size` bytes: of zeros where there is no bias, since a sum of
    products that underflow to -0 is +0 then, as `+ 0.0` makes it in kernel.py. None while a CUDA graph is captured, and
    no zeros are there."""
    if bias is not None:
        return bias.data_ptr()
    there = _zeros.setdefault(device, [])
    if not there or there[-1].numel() < size:
        if torch.cuda.is_current_stream_capturing():
            return None
        there.append(torch.zeros(max(size, ZEROS), dtype=torch.int8, device=device))
        torch.cuda.current_stream().synchronize()  # other streams will read them
    return there[-1].data_ptr()


def waves(
    sizes: tuple[int, int, int], strides: tuple, dtypes: tuple, device: torch.device, kept: bool = True
) -> float | None:
    """Returns how often the tiles of the library's program for a product x wᵀ of (M, N, K) fill the multiprocessors,
    None where it has none; strides of x and w, dtypes of x and y; kept: for a launch that follows. Raises LookupError
    where it cannot be asked now, as in the first call of a device within a CUDA graph."""
    if not serves(device) or dtypes[0] == torch.float32:
        return None
    if device.index not in _thread.handles and torch.cuda.is_current_stream_capturing():
        raise LookupError
    transposed = strides[0][1] != 1, strides[1][1] != 1
    slow = [s[1 if t else 0] for s, t in zip(strides, transposed)]
    ready = [-(-n // 8) * 8 for n in (*slow, sizes[1])]  # as `prepared` leaves them
    plan = _plan(device.index, dtypes, sizes, tuple(ready), transposed, kept)
    return None if plan is None else plan.waves


def _straight(plan: _Plan, device: int, N: int, out_dtype: torch.dtype, x, w, bias) -> torch.Tensor | None:
    """Computes a product of which nothing has to be copied."""
    y, stream = x.new_empty((*x.shape[:-1], N), dtype=out_dtype), current_stream(device)
    at = _bias_at(bias, device, N * out_dtype.itemsize)
    return None if at is None or not plan.run(x, w, at, y, stream) else y


def launch(x, w, bias=None, out_dtype: torch.dtype | None = None, out=None) -> torch.Tensor | None:
    """y (…, N) = x (…, K) wᵀ (N, K) + bias (N,), as `kernel.launch` has it, on the current device; None where the
    library does not serve."""
    out_dtype, device = out_dtype or x.dtype, x.device.index
    if not serves(x.device) or x.dtype == torch.float32:
        return None
    if out_dtype not in (x.dtype, torch.float32) or bias is not None and bias.dtype != out_dtype:
        return None
    (N, K), lead, given, kind = w.shape, x.shape[:-1], (x.data_ptr(), w.data_ptr()), kind_of(x, w, bias, out_dtype)
    x, w, y = prepared(x if x.dim() == 2 else x.reshape(-1, K), w, out_dtype, out)
    M = len(x)
    x_t, w_t = x.stride(1) != 1, w.stride(1) != 1
    strides = x.stride(1 if x_t else 0), w.stride(1 if w_t else 0), y.stride(0)
    plan = _plan(device, (x.dtype, out_dtype), (M, N, K), strides, (x_t, w_t))
    bias = None if bias is None else aligned(bias)
    at = _bias_at(bias, device, N * out_dtype.itemsize)
    stream = current_stream(device)
    if plan is None or at is None or not plan.run(x, w, at, y, stream):
        return None
    if out is None and given == (x.data_ptr(), w.data_ptr()) and y.shape[1] == N:
        remember(kind, partial(_straight, plan, device, N, out_dtype))
    y = finished(y, N, out)
    return y if len(lead) == 1 else y.view(*lead, N)
