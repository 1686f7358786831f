"""Makes Triton's CPU interpreter right for bf16 and bit-exact for the tensor core of sm_90.

- bf16 stays uint16 in memory; every cast, comparison and arithmetic operation on it goes through fp32.
- `tl.dot` on bf16 and fp16 gives the bits that an H200 gave, through mma.sync and wgmma alike; on fp32 it is the chain
  of FMAs that Triton compiles for input_precision="ieee".
- A NaN that arithmetic or tl.sum makes is the GPU's: 0x7fffffff in fp32, 0x7fff in fp16 and bf16.
- What is not right raises. Not made equal, because the GPU's own result depends on the layout or is an approximation:
  fp32 sums and scans, the sign of a zero from `tl.max`, `/` (but `tl.div_rn` is), exp, log, rsqrt and their like.
  Nor is what the compiler rewrites: it fuses a * b + c unless told not to, and acc + tl.dot(a, b) into
  tl.dot(a, b, acc), so write the latter; a NaN that it clamps between a constant and its negative may become either.
"""

import inspect
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

CHECKED_TRITON = ("3.7.1",)
FP32_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
FP16_NAN = np.uint16(0x7FFF).view(np.float16)
SLAB = 16
FRACTION = 25
LOWEST_E = -133  # found by recording: with -132, -134 or no limit, a few sums below 2^-149 come out wrong
ZERO = -10000  # exponent of a zero: it never wins a maximum, and two of them still fit an int16
BLOCK = 2**16  # products formed at a time, so that they stay in the L2 cache


def interpreting() -> bool:
    """Whether kernels run in the interpreter: TRITON_INTERPRET=1 before the first `import triton`."""
    return triton.knobs.runtime.interpret


def install() -> None:
    """Patches the interpreter of this process, once. RuntimeError on a Triton version it was not checked with."""
    if isinstance(stock.interpreter_builder, Builder):
        return
    if triton.__version__ not in CHECKED_TRITON:
        raise RuntimeError(
            f"bi_kernels patches Triton's interpreter and was checked with {', '.join(CHECKED_TRITON)}, "
            f"but this is Triton {triton.__version__}"
        )
    stock.interpreter_builder.__class__ = Builder
    # as compiled kernels have it; the check of every integer addition costs a quarter of the time
    stock.interpreter_builder.options = replace(stock.interpreter_builder.options, sanitize_overflow=False)
    stock.ReduceOps, stock.ScanOps, stock.GridExecutor = Reduce, Scan, Launch
    stock._patch_lang = lambda fn: stock._LangPatchScope()
    stock._patch_builtin = _patch_builtin
    stock._implicit_cvt = _argument
    stock._get_np_dtype, TritonSemantic.broadcast_impl_value = _get_np_dtype, _with_broadcast
    tl.tensor.__init__, tl.block_type.__init__ = _tensor, _block_type
    tl.core._unwrap_if_constexpr, tl.dtype.__eq__ = _unwrap_if_constexpr, _same_dtype


def _argument(value, convert=stock._implicit_cvt):
    """A kernel's argument; a Python float is an fp32 value, as on the GPU, where stock keeps the Python number."""
    if type(value) is float:
        return tl.tensor(TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    return convert(value)


# What follows, down to the dtypes, is Triton's own, made once instead of for every operation: half of the interpreter's time.


@cache
def _shape(shape: tuple[int, ...]) -> tuple:
    """A shape as a tensor has it, as a block's type has it, its number of elements, and its text."""
    numel = tl.core.validate_block_shape(shape)
    return (
        tl.core.tuple([tl.constexpr(n) for n in shape]),
        tl.core.tuple(shape),
        tl.constexpr(numel),
        str(tl.core.tuple(shape)),
    )


def _tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, _, self.numel, _ = _shape(tuple(type.shape.values) if type.is_block() else ())


def _block_type(self, element_ty, shape):
    shape = tuple(getattr(n, "value", n) for n in shape)
    if not shape:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    _, self.shape, numel, text = _shape(shape)
    self.numel, self.name = numel.value, f"<{text}, {element_ty}>"


def _unwrap_if_constexpr(value, nested=tl.core._unwrap_if_constexpr):
    if type(value) is tl.constexpr:
        return value.value
    return nested(value) if isinstance(value, (list, tuple, tl.core.tuple)) else value


def _same_dtype(self, other, equal=tl.dtype.__eq__):
    return self is other or equal(self, other)


def _with_broadcast(self, lhs, rhs, broadcast=TritonSemantic.broadcast_impl_value):
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
        return lhs, rhs
    return broadcast(self, lhs, rhs)


def _get_np_dtype(dtype, find=stock._get_np_dtype, found={}):
    name = dtype.scalar.name
    if name not in found:
        found[name] = find(dtype)
    return found[name]


def _refuse(what: str):
    raise NotImplementedError(f"{what} is not supported in the interpreter: cast to fp32 first")


def _refuse_bf16(handle: TensorHandle, what: str):
    if handle.get_element_ty() == tl.bfloat16:
        _refuse(f"{what} bf16")


def _values(handle: TensorHandle) -> np.ndarray:
    """The numbers that a handle holds: bf16 as fp32."""
    dtype = handle.dtype.scalar
    if dtype.is_fp8():
        _refuse(f"{dtype}")
    if dtype == tl.bfloat16 and handle.data.dtype == np.uint16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _handle(data: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """What arithmetic computed, as `dtype`."""
    return TensorHandle(_to_bf16(data) if dtype == tl.bfloat16 else _canonical(data), dtype)


def _canonical(x: np.ndarray) -> np.ndarray:
    nan = np.isnan(x) if x.dtype in (np.float32, np.float16) else np.False_
    return np.where(nan, FP32_NAN if x.dtype == np.float32 else FP16_NAN, x) if nan.any() else x


def _to_fp32_toward_zero(x: np.ndarray) -> np.ndarray:
    """fp64 to fp32 toward zero, gradual underflow kept; only from 2^128 on does it overflow, to Inf."""
    x = (x.view(np.int64) & ~0x1FFFFFFF).view(np.float64)
    tiny = np.abs(x) < 2.0**-126
    if tiny.any():
        x = np.where(tiny, np.trunc(x * 2.0**149) * 2.0**-149, x)
    return x.astype(np.float32)


def _to_bf16(x: np.ndarray, toward_zero: bool = False) -> np.ndarray:
    """Any number to the bits of a bf16, rounded once (an int64 beyond 2^53 twice), to even unless `toward_zero`."""
    if x.dtype == np.float32:
        bits = x.view(np.uint32)
    else:
        x = x.astype(np.float64)
        odd = _to_fp32_toward_zero(x)
        # A sticky last bit lets the second rounding see that the first was inexact.
        bits = odd.view(np.uint32) | (np.isfinite(odd) & (odd != x))
    if not toward_zero:
        bits = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return np.where(np.isnan(x), 0x7FFF, bits >> 16).astype(np.uint16)


def _to_fp16_toward_zero(x: np.ndarray) -> np.ndarray:
    nearest = x.astype(np.float16)
    return np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float16(0)), nearest)


def _add_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y in fp64, rounded to odd: rounding that once more, to half the bits, is as good as rounding once."""
    total = x + y
    from_y = total - x
    error = (x - (total - from_y)) + (y - from_y)
    bits = total.view(np.int64)
    inexact_even = (np.abs(error) > 0) & ((bits & 1) == 0)
    return (bits + inexact_even * np.where((error > 0) == (total > 0), 1, -1)).view(np.float64)


def _maximum(x: np.ndarray, y: np.ndarray, pick=np.fmax) -> np.ndarray:
    """Like the GPU's, +0 is above -0; np.fmax keeps the number beside a NaN, np.maximum the NaN."""
    return np.where((x == 0) & (y == 0), x + y, pick(x, y))


def _minimum(x: np.ndarray, y: np.ndarray, pick=np.fmax) -> np.ndarray:
    return -_maximum(-x, -y, pick)


def _exponents(x: np.ndarray, lowest: int) -> np.ndarray:
    """Exponents of fp32 numbers; what is subnormal in the operands' own format keeps that format's lowest."""
    exponent = ((x.view(np.int32) >> 23) & 0xFF) - 127
    return np.where(x == 0, ZERO, np.maximum(exponent, lowest)).astype(np.int16)


def _power_of_two(exponent: np.ndarray) -> np.ndarray:
    return ((exponent + 1023) << 52).view(np.float64)


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, lowest: int) -> np.ndarray:
    """a (M, K) b (K, N) + c (M, N), all fp32 arrays, as sm_90's tensor core does it for 16-bit operands.

    `lowest` is the smallest normal exponent of the operands' format. For every slab of 16 k, in ascending order:
    e = the largest of -133, exponent(c) and exponent(a) + exponent(b) of the nonzero products; every product and c are
    truncated toward zero to a multiple of 2^(e - 25), added exactly, and converted to fp32 toward zero, a zero to +0.
    No element that an H200 gave differs: tools/record_golden.py has the inputs, from normal to nonfinite.
    """
    pad = ((0, -a.shape[1] % SLAB), (0, 0))
    a_t, b_k = np.ascontiguousarray(np.pad(a.T, pad)), np.ascontiguousarray(np.pad(b, pad))
    exponent_a, exponent_b = _exponents(a_t, lowest), _exponents(b_k, lowest)
    finite = max(exponent_a.max(), exponent_b.max()) < 128
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
    low = exponent_a.min(where=nonzero_a, initial=128) + exponent_b.min(where=nonzero_b, initial=128)
    exact = np.float32 if finite and low >= -100 and exponent_a.max() + exponent_b.max() <= 120 else np.float64
    a_t, b_k = a_t.astype(exact), b_k.astype(exact)
    step = max(1, BLOCK // (SLAB * b.shape[1]))
    for row in range(0, len(out), step):
        rows = slice(row, row + step)
        for k in range(0, len(b_k), SLAB):
            ks = slice(k, k + SLAB)
            out[rows] = _mma_slab(a_t[ks, rows], b_k[ks], out[rows], exponent_a[ks, rows], exponent_b[ks], finite)
    return _canonical(out + np.float32(0))


def _mma_slab(a, b, c, exponent_a, exponent_b, finite):
    """One step of `mma`; a (16, M) and b (16, N) in a type in which their products are exact."""
    e = np.maximum((exponent_a[:, :, None] + exponent_b[:, None, :]).max(axis=0), _exponents(c, -126))
    e = np.maximum(e, LOWEST_E).astype(np.int64)
    scale = _power_of_two(FRACTION - e)
    products = np.einsum("km,kn->kmn", a, b)
    ieee = None if finite else products.sum(axis=0) + c
    # Only beside products that are all zero is the scale out of fp32's range: any number will do there.
    products *= np.minimum(scale, 2.0**125).astype(np.float32) if products.dtype == np.float32 else scale
    # 16 products below 4 in units of 2^-25 stay below 2^31; the conversion to an integer is the truncation.
    total = products.astype(np.int32).sum(axis=0, dtype=np.int32) + np.trunc(c * scale)
    out = _to_fp32_toward_zero(total * _power_of_two(e - FRACTION))
    return out if finite else np.where(np.isfinite(ieee), out, ieee).astype(np.float32)


def fma_dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a (M, K) b (K, N) + c (M, N) in fp32: one FMA for every k, ascending. Recorded on an H200: no bit differs."""
    a, b, out = a.astype(np.float64), b.astype(np.float64, order="C"), c.copy(order="C")
    step = max(1, BLOCK // 8 // b.shape[1])
    for row in range(0, len(out), step):
        rows = slice(row, row + step)
        for k in range(len(b)):
            product, acc = a[rows, k, None] * b[k], out[rows].astype(np.float64)
            total = product + acc
            tie = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
            tiny = (np.abs(total) < 2.0**-126) & (total != 0)
            if (tie | tiny).any():  # elsewhere rounding to fp64 and then to fp32 is rounding once
                total = _add_to_odd(product, acc)
            out[rows] = total
    return _canonical(out)


class Builder(InterpreterBuilder):
    """Triton's InterpreterBuilder with the operations replaced that are wrong for bf16 or differ from sm_90's."""

    def get_bf16(self, value):
        return _handle(np.array([value], dtype=np.float64), tl.bfloat16)

    def cast_impl(self, src, dst_type):
        dst = dst_type.scalar
        if dst.is_fp8():
            _refuse(f"a cast to {dst}")
        data = _values(src)
        # From fp64, and from bf16 to fp32, the GPU keeps a NaN's sign and as much of its payload as fits.
        keeps_nan = src.dtype.scalar in (tl.float64, tl.bfloat16)
        if dst == tl.bfloat16:
            bits = _to_bf16(data)
            if src.dtype.scalar == tl.float64:
                bits = np.where(np.isnan(data), data.astype(np.float32).view(np.uint32) >> 16, bits).astype(np.uint16)
            return TensorHandle(bits, dst)
        data = data.astype(stock._get_np_dtype(dst))
        return TensorHandle(data if keeps_nan else _canonical(data), dst)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        dst = dst_type.scalar
        if rounding_mode != ir.ROUNDING_MODE.RTZ:
            return self.cast_impl(src, dst_type)
        if src.dtype.scalar != tl.float32 or dst not in (tl.bfloat16, tl.float16):
            _refuse(f"a cast from {src.dtype.scalar} to {dst} toward zero")
        if dst == tl.bfloat16:
            return TensorHandle(_to_bf16(src.data, toward_zero=True), dst)
        return _handle(_to_fp16_toward_zero(src.data), dst)

    def binary_op(self, lhs, rhs, op):
        dtype = lhs.dtype.scalar
        if not dtype.is_floating():
            return super().binary_op(lhs, rhs, op)
        out = op(_values(lhs), _values(rhs))
        return TensorHandle(out, tl.int1) if out.dtype == bool else _handle(out, dtype)

    create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, _maximum)
    create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, _minimum)
    create_maximumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, partial(_maximum, pick=np.maximum))
    create_minimumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, partial(_minimum, pick=np.maximum))

    def create_clampf(self, arg, lo, hi, propagate_nans):
        if propagate_nans == ir.PROPAGATE_NAN.ALL:
            return self.create_minimumf(self.create_maximumf(arg, lo), hi)
        return self.create_minnumf(self.create_maxnumf(arg, lo), hi)

    def create_fma(self, x, y, z):
        if z.dtype.scalar == tl.float64:
            return super().create_fma(x, y, z)
        x, y, addend = (_values(t).astype(np.float64) for t in (x, y, z))
        dtype = z.dtype.scalar
        total = _add_to_odd(x * y, addend)
        return _handle(total if dtype == tl.bfloat16 else total.astype(stock._get_np_dtype(dtype)), dtype)

    def unary_op(self, arg, op):
        _refuse_bf16(arg, "a math function of")
        return _handle(op(_values(arg)), arg.dtype.scalar)

    create_rsqrt = lambda self, arg: self.unary_op(arg, lambda x: 1 / np.sqrt(x))

    def create_atomic_rmw(self, op, ptr, val, *rest):
        _refuse_bf16(val, "an atomic operation on")
        return super().create_atomic_rmw(op, ptr, val, *rest)

    def create_atomic_cas(self, ptr, cmp, val, *rest):
        _refuse_bf16(val, "an atomic operation on")
        return super().create_atomic_cas(ptr, cmp, val, *rest)

    def create_tensor_pointer_load(self, ptr, boundary_check, padding, *rest):
        if padding == ir.PADDING_OPTION.PAD_NAN:
            _refuse_bf16(ptr.base, "NaN padding of")
        return super().create_tensor_pointer_load(ptr, boundary_check, padding, *rest)

    def create_make_tensor_descriptor(self, base, shape, strides, tensor_shape, is_signed, padding="zero"):
        if padding == ir.PADDING_OPTION.PAD_NAN:
            _refuse_bf16(base, "NaN padding of")
        return super().create_make_tensor_descriptor(base, shape, strides, tensor_shape, is_signed, padding)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        dtype = a.dtype.scalar
        if dtype in (tl.bfloat16, tl.float16):
            if d.dtype.scalar != tl.float32:
                raise NotImplementedError(f"tl.dot in the interpreter accumulates in fp32, not in {d.dtype.scalar}")
            dot = partial(mma, lowest=-126 if dtype == tl.bfloat16 else -14)
        elif dtype == tl.float32:
            if input_precision != ir.INPUT_PRECISION.IEEE:
                raise NotImplementedError(
                    "tl.dot on fp32 uses TF32 unless told otherwise, and the interpreter has no "
                    'TF32: pass input_precision="ieee"'
                )
            dot = fma_dot
        elif dtype.is_fp8():
            _refuse(f"tl.dot on {dtype}")
        else:
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        a, b, c = (_values(t).astype(np.float32) for t in (a, b, d))
        return TensorHandle(dot(a, b, c) if a.ndim == 2 else np.stack([dot(*t) for t in zip(a, b, c)]), tl.float32)


class Checked:
    def check_tensor(self, inputs):
        if any(getattr(t, "dtype", None) == tl.bfloat16 for t in inputs):
            _refuse("a reduction or scan of bf16")
        super().check_tensor(inputs)


class Scan(Checked, stock.ScanOps):
    pass


class Reduce(Checked, stock.ReduceOps):
    def min_max(self, input, val_reduce_op, idx_reduce_op=None):
        quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}  # the others warn of a row of NaN
        return super().min_max(input, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    def sum(self, input):
        out = super().sum(input)
        if out.handle.data.size < input.handle.data.size:  # one element alone is not added to anything
            out.handle.data = _canonical(out.handle.data)
        return out


_patch_language = partial(stock._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


@cache
def _patches() -> list[tuple]:
    """(object, name, value) of all that is patched in `triton.language` while a kernel runs."""
    scope = _patch_language()
    found = [(owner, name, inspect.getattr_static(owner, name)) for owner, name, _ in scope._changes]
    scope.restore()
    return found + [(tl.tensor, "__repr__", _shown), (tl.tensor, "__str__", _shown)]


def _shown(t: tl.tensor) -> str:
    """A tile as a debugger and `print` show it: the numbers of a bf16, which NumPy knows as raw bits only."""
    handle = t.handle
    return f"{_values(handle)} {t.dtype}" if handle.dtype.scalar.is_bf16() else repr(handle.data)


class Launch(stock.GridExecutor):
    """Patches `triton.language` once a launch, with what it makes once; stock Triton makes and patches it again at every
    call from one jit function to another."""

    def __call__(self, *args, **kwargs):
        scope = stock._LangPatchScope()
        try:
            for patch in _patches():
                scope.set_attr(*patch)
            with np.errstate(all="ignore"):  # infinities and NaN are results like any other
                return super().__call__(*args, **kwargs)
        finally:
            scope.restore()


@cache
def _builtins(package) -> list:
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package, builder, scope):
    for name, member in _builtins(package):
        stock._patch_attr(package, name, member, builder, scope)
