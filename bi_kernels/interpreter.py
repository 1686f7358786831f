"""Makes Triton's CPU interpreter right for bf16 and bit-exact for sm_90; over 300 lines, as all that it mends is here.

- bf16 stays uint16 in memory; every cast, comparison and arithmetic operation on it goes through fp32.
- `tl.dot` on bf16 and fp16 gives the bits that an H200 gave, through mma.sync and wgmma alike; on fp32 it is the chain
  of FMAs that Triton compiles for input_precision="ieee".
- A NaN that arithmetic or tl.sum makes is the GPU's: 0x7fffffff in fp32, 0x7fff in fp16 and bf16.
- What is not right raises. Not made equal, because the GPU's own result depends on the layout or is an approximation:
  fp32 sums and scans, the sign of a zero from `tl.max`, `/` (but `tl.div_rn` is), exp, log, rsqrt and their like.
  Nor is what the compiler rewrites: it fuses a * b + c unless told not to, and acc + tl.dot(a, b) into
  tl.dot(a, b, acc), so write the latter; a NaN that it clamps between a constant and its negative may become either.
"""

import ctypes
import inspect
import operator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial, wraps

import numpy as np
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.runtime.jit import _normalize_ty, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.tensor_core import _add_to_odd, _canonical, _to_fp32_toward_zero, fma_dot, mma

CHECKED_TRITON = ("3.7.1",)
GATHER = 256  # elements from which on a gather in NumPy is faster than Triton's loop over the pointers
WHOLE = slice(None)
_NP_DTYPES, _SIZES, _BLOCK_TYPES = {}, {}, {}  # by a dtype's name: the NumPy dtype, the bytes, and by a shape the block


def interpreting() -> bool:
    """Tells whether kernels run in the interpreter: TRITON_INTERPRET=1 before the first `import triton`."""
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
    stock.interpreter_builder.__class__, stock.interpreter_semantic.__class__ = Builder, Semantic
    # as compiled kernels have it; the check of every integer addition costs a quarter of the time
    stock.interpreter_builder.options = replace(stock.interpreter_builder.options, sanitize_overflow=False)
    stock.ReduceOps, stock.ScanOps, stock.GridExecutor = Reduce, Scan, Launch
    stock._patch_lang = lambda fn: stock._LangPatchScope()
    stock._implicit_cvt, stock._get_np_dtype, TensorHandle.__init__ = _argument, _get_np_dtype, _tensor_handle
    tl.tensor.__init__, tl.block_type.__init__ = _tensor, _block_type
    tl.core._unwrap_if_constexpr, tl.dtype.__eq__ = _unwrap_if_constexpr, _same_dtype
    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(owner, tl.core.is_builtin):
            setattr(owner, name, _builtin(member))


def _builtin(member):
    """Returns an operation that, in an interpreted kernel, is given the interpreter's semantic by itself."""
    operation = getattr(member, "__wrapped__", member)

    @wraps(member)
    def call(*args, **kwargs):
        if Launch.semantic is not None:
            kwargs["_semantic"] = Launch.semantic
        elif kwargs.get("_semantic") is None:
            return member(*args, **kwargs)  # says that a kernel is needed
        return operation(*args, **kwargs)

    call.__wrapped__ = operation  # which Gluon takes
    return call


def _argument(value, convert=stock._implicit_cvt):
    """Converts a kernel's argument; a Python float is an fp32 value, as on the GPU: stock keeps the Python number."""
    if type(value) is int and -(2**31) <= value < 2**31:
        return _int_constant(value, "int32")
    if type(value) is float:
        return tl.tensor(TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    if isinstance(value, torch.Tensor):
        pointer = _pointer(value.dtype)
        return tl.tensor(TensorHandle(np.array([value.data_ptr()], dtype=np.uint64), pointer), pointer)
    return convert(value)


# What follows, down to the dtypes, is Triton's own, made once instead of for every operation: half of the time.


@cache
def _shape(shape: tuple[int, ...]) -> tuple:
    """Returns a shape as a tensor has it, as a block's type has it, its number of elements, and its text."""
    numel = tl.core.validate_block_shape(shape)
    return (
        tl.core.tuple([tl.constexpr(n) for n in shape]),
        tl.core.tuple(shape),
        tl.constexpr(numel),
        str(tl.core.tuple(shape)),
    )


NO_BLOCK = _shape(())


def _tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, _, self.numel, _ = type.parts if type.is_block() else NO_BLOCK


def _block_type(self, element_ty, shape):
    shape = tuple([n.value if type(n) is tl.constexpr else n for n in shape])
    if not shape:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.parts = _, self.shape, numel, text = _shape(shape)
    self.numel, self.name = numel.value, f"<{text}, {element_ty.name}>"


def _unwrap_if_constexpr(value, nested=tl.core._unwrap_if_constexpr):
    if type(value) is tl.constexpr:
        return value.value
    return nested(value) if isinstance(value, (list, tuple, tl.core.tuple)) else value


def _same_dtype(self, other, equal=tl.dtype.__eq__):
    return self is other or equal(self, other)


@cache
def _pointer(dtype: torch.dtype) -> tl.pointer_type:
    return tl.str_to_ty(mangle_type(torch.empty(0, dtype=dtype)), None)


@lru_cache(4096)
def _int_constant(value: int, dtype: str) -> tl.tensor:
    return tl.tensor(TensorHandle(np.array([value], dtype=dtype), getattr(tl, dtype)), getattr(tl, dtype))


LIMITS = {"int32": 2**31, "int64": 2**63}
NUMBERS, BITS = frozenset({"int32", "int64", "fp32"}), frozenset({"int1", "int32", "int64"})
OPERATORS = {
    f"__{name}__": (getattr(operator, f"__{name}__"), NUMBERS)
    for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")
} | {f"__{name}__": (getattr(operator, f"__{name}__"), BITS) for name in ("and", "or")}


def _block(dtype: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
    """Returns the one type that a block of this dtype and shape has."""
    key = dtype.name, shape
    if key not in _BLOCK_TYPES:
        _BLOCK_TYPES[key] = tl.block_type(dtype, shape)
    return _BLOCK_TYPES[key]


def _made(data: np.ndarray, dtype: tl.dtype, kind) -> tl.tensor:
    """Returns what `tl.tensor(TensorHandle(data, dtype), kind)` returns, in half the time."""
    handle, made = object.__new__(TensorHandle), object.__new__(tl.tensor)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    made.handle, made.type, made.dtype = handle, kind, dtype
    made.shape, _, made.numel, _ = kind.parts if kind is not dtype else NO_BLOCK
    return made


def _operator(general, compute, names: frozenset[str]):
    """Returns an operator that leaves the dtypes of `names` to NumPy, which promotes and spreads as Triton does where
    they are equal, and a pointer's sum with integers; the rest to the `general` one."""

    def operate(self, other):
        mine = self.dtype.name
        if type(other) is not tl.tensor:
            other = _constant(other, mine)
        if type(other) is not tl.tensor:
            return general(self, other)
        blocks, theirs = (self.type.is_block(), other.type.is_block()), other.dtype.name
        kept = theirs == mine in names or (theirs in LIMITS and mine in LIMITS)
        if all(blocks) and len(self.shape) != len(other.shape):
            return general(self, other)
        try:
            if kept:
                data = compute(self.handle.data, other.handle.data)
                dtype = tl.int1 if data.dtype.kind == "b" else self.dtype if data.itemsize < 8 else tl.int64
            elif theirs in LIMITS and compute is operator.add and self.dtype.is_ptr():
                data = stock.interpreter_builder.create_addptr(self.handle, other.handle).data
                dtype = self.dtype
            else:
                return general(self, other)
        except ValueError:  # of shapes, which Triton names
            return general(self, other)
        if data.dtype.kind == "f":
            data = _canonical(data)
        return _made(data, dtype, _block(dtype, data.shape) if any(blocks) else dtype)

    return operate


def _constant(value, dtype: str):
    """Returns a number of Python's beside a tensor of a dtype as a tensor of that dtype, if it is one of such."""
    if type(value) is int and dtype in LIMITS:
        return _int_constant(value, dtype) if -LIMITS[dtype] <= value < LIMITS[dtype] else value
    normal = type(value) is float and (not value or abs(value) == np.inf or 2.0**-126 <= abs(value) < 2.0**127)
    if (type(value) is bool and dtype == "int1") or (normal and dtype == "fp32"):
        kind = tl.float32 if normal else tl.int1
        return _made(np.array([value or 0], _get_np_dtype(kind)), kind, kind)  # Triton takes −0 for +0
    return value


def _index(general):
    """Returns the operator x[:, None], which inserts dimensions at once."""

    def insert(self, slices):
        known = type(slices) is tuple and all(s is None or s == WHOLE for s in slices)
        if not (known and self.type.is_block() and len(slices) - slices.count(None) <= len(self.shape)):
            return general(self, slices)
        data = self.handle.data[slices]
        return _made(data, self.dtype, _block(self.dtype, data.shape))

    return insert


class Semantic(TritonSemantic):
    """Gives Triton's semantic a short way where the dtypes are equal or an operand is an integer constant."""

    def scalar_constant(self, value, dtype):
        if type(value) is int and dtype.name in LIMITS:
            return _int_constant(value, dtype.name)
        return super().scalar_constant(value, dtype)

    def binary_op_type_checking_impl(self, lhs, rhs, allow_lhs_ptr=False, *how, **more):
        if type(lhs) is tl.tensor and type(rhs) is int:
            rhs = _constant(rhs, lhs.dtype.name)
        if type(rhs) is tl.tensor and type(lhs) is int:
            lhs = _constant(lhs, rhs.dtype.name)
        if type(lhs) is type(rhs) is tl.tensor:
            same = lhs.dtype.name == rhs.dtype.name in NUMBERS
            if same or (allow_lhs_ptr and lhs.dtype.is_ptr() and rhs.dtype.name in LIMITS):
                return self.broadcast_impl_value(lhs, rhs)
        return super().binary_op_type_checking_impl(lhs, rhs, allow_lhs_ptr, *how, **more)

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not rhs.type.is_block():
            return lhs, self._spread(rhs, lhs.type)
        return super().broadcast_impl_value(lhs, rhs) if lhs.type.is_block() else (self._spread(lhs, rhs.type), rhs)

    def _spread(self, scalar, block):
        block = _block(scalar.dtype, tuple(block.shape))
        return tl.tensor(self.builder.create_splat(block, scalar.handle), block)

    def cast(self, input, dst_ty, *rounding, **more):
        return input if input.dtype.name == dst_ty.scalar.name else super().cast(input, dst_ty, *rounding, **more)

    def _load_legacy(self, ptr, mask, other, *how):
        if not (ptr.type.is_block() and ptr.dtype.is_ptr()):
            return super()._load_legacy(ptr, mask, other, *how)
        element = ptr.dtype.element_ty
        if other is not None and not other.type.is_block():  # cast before it is spread
            other = self._spread(self.cast(other, element), ptr.type)
        if mask is None or mask.shape is not ptr.shape or element.name == "int1" or any(how[:2]):
            return super()._load_legacy(ptr, mask, other, *how)
        instead = None if other is None else other.handle
        found = self.builder.create_masked_load(ptr.handle, mask.handle, instead, *how[2:])
        return _made(found.data, element, _block(element, found.data.shape))


def _get_np_dtype(dtype, find=stock._get_np_dtype):
    name = dtype.scalar.name
    if name not in _NP_DTYPES:
        _NP_DTYPES[name] = find(dtype)
    return _NP_DTYPES[name]


def _tensor_handle(self, data, dtype, attr=None):
    self.data, self.dtype, self.attr = data, dtype, attr or {}
    if dtype.name not in _SIZES:
        _SIZES[dtype.name] = 8 if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
    if data.itemsize > _SIZES[dtype.name]:
        raise ValueError(f"an array of {data.dtype} does not fit {dtype}")


def _refuse(what: str):
    raise NotImplementedError(f"{what} is not supported in the interpreter: cast to fp32 first")


def _refuse_bf16(handle: TensorHandle, what: str):
    if handle.get_element_ty() == tl.bfloat16:
        _refuse(f"{what} bf16")


def _values(handle: TensorHandle) -> np.ndarray:
    """Returns the numbers that a handle holds: bf16 as fp32."""
    dtype = handle.dtype.scalar
    if dtype.is_fp8():
        _refuse(f"{dtype}")
    if dtype == tl.bfloat16 and handle.data.dtype == np.uint16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _handle(data: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """Makes what arithmetic computed a `dtype`."""
    return TensorHandle(_to_bf16(data) if dtype == tl.bfloat16 else _canonical(data), dtype)


def _to_bf16(x: np.ndarray, toward_zero: bool = False) -> np.ndarray:
    """Converts any number to the bits of a bf16, rounded once (int64 from 2^53 on twice), to even or `toward_zero`."""
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


def _maximum(x: np.ndarray, y: np.ndarray, pick=np.fmax) -> np.ndarray:
    """Puts +0 above -0 like the GPU; np.fmax keeps the number beside a NaN, np.maximum the NaN."""
    return np.where((x == 0) & (y == 0), x + y, pick(x, y))


def _minimum(x: np.ndarray, y: np.ndarray, pick=np.fmax) -> np.ndarray:
    return -_maximum(-x, -y, pick)


def _at(address: int, size: int) -> ctypes.Array:
    """Returns `size` bytes of this process's memory."""
    return (ctypes.c_char * size).from_address(address)


def _gathered(pointers: np.ndarray, mask: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns memory and the indices of `pointers` in it (0 where masked), or None: no element, or not all aligned."""
    if mask.all():
        first, last = int(pointers.min()), int(pointers.max())
    elif mask.any():
        pointers = np.where(mask, pointers, first := pointers[mask].min())
        first, last = int(pointers.min()), int(pointers.max())
    else:
        return None
    offsets = (pointers - np.uint64(first)).view(np.int64)
    if (offsets & (dtype.itemsize - 1)).any():
        return None
    return np.frombuffer(_at(first, last - first + dtype.itemsize), dtype), offsets >> (dtype.itemsize.bit_length() - 1)


def _window(desc, indices, dtype: np.dtype) -> tuple[np.ndarray | None, tuple[slice, ...]]:
    """Returns the part of a descriptor's block that is within the tensor, as memory, and where in the block it is."""
    offsets, strides = [int(i.data.item()) for i in indices], [int(s.data.item()) for s in desc.strides]
    assert offsets[-1] * dtype.itemsize % 16 == 0, "block offset start must be 16-byte aligned"
    first = [max(0, -at) for at in offsets]
    last = [min(n, int(size.data.item()) - at) for n, size, at in zip(desc.block_shape, desc.shape, offsets)]
    sizes = [end - start for start, end in zip(first, last)]
    inside = tuple(map(slice, first, last))
    if min(sizes) <= 0:
        return None, inside
    steps = [dtype.itemsize * stride for stride in strides]
    start = int(desc.base.data.item()) + sum((at + skip) * step for at, skip, step in zip(offsets, first, steps))
    span = sum((size - 1) * step for size, step in zip(sizes, steps)) + dtype.itemsize
    return np.ndarray(sizes, dtype, _at(start, span), strides=steps), inside


class Builder(InterpreterBuilder):
    """Replaces the operations of Triton's InterpreterBuilder that are wrong for bf16 or differ from sm_90's."""

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

    def get_block_ty(self, dtype, shape):
        return _block(dtype, tuple(shape))

    def create_splat(self, ret_ty, arg):
        if arg.data.size != 1:
            return super().create_splat(ret_ty, arg)
        data = np.ndarray(tuple(ret_ty.shape), arg.data.dtype, arg.data, strides=(0,) * len(ret_ty.shape))
        data.flags.writeable = False
        return TensorHandle(data, arg.dtype.scalar)

    def binary_op(self, lhs, rhs, op):
        dtype = lhs.dtype.scalar
        if not dtype.is_floating():
            return super().binary_op(lhs, rhs, op)
        out = op(_values(lhs), _values(rhs))
        return TensorHandle(out, tl.int1) if out.dtype == bool else _handle(out, dtype)

    def create_masked_load(self, ptrs, mask, other, *rest):
        pointers, masked = ptrs.data, mask.data
        dtype = ptrs.get_element_ty()
        element = stock._get_np_dtype(dtype)
        found = _gathered(pointers, masked, element) if pointers.size >= GATHER else None
        if found is None:
            return super().create_masked_load(ptrs, mask, other, *rest)
        memory, index = found
        data = memory.take(index)
        if not masked.all():
            data = np.where(masked, data, np.zeros((), element) if other is None else other.data)
        return TensorHandle(data, dtype)

    def create_masked_store(self, ptrs, value, mask, *rest):
        pointers, masked, data = ptrs.data, mask.data, value.data
        found = _gathered(pointers, masked, data.dtype) if pointers.size >= GATHER else None
        if found is None:
            return super().create_masked_store(ptrs, value, mask, *rest)
        memory, index = found
        if masked.all():
            memory[index] = data
        else:
            memory[index[masked]] = np.broadcast_to(data, index.shape)[masked]
        return None

    def create_descriptor_load(self, desc, indices, *rest):
        if desc.padding != ir.PADDING_OPTION.PAD_ZERO:
            return super().create_descriptor_load(desc, indices, *rest)
        dtype = desc.base.get_element_ty()
        tile = np.zeros(desc.block_shape, stock._get_np_dtype(dtype))
        memory, inside = _window(desc, indices, tile.dtype)
        if memory is not None:
            tile[inside] = memory
        return TensorHandle(tile, dtype)

    def create_descriptor_store(self, desc, value, indices):
        memory, inside = _window(desc, indices, value.data.dtype)
        if memory is not None:
            memory[...] = value.data[inside]

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


@cache
def _patches() -> list[tuple]:
    """Returns (object, name, value outside, value inside) of what differs in `triton.language` while a kernel runs."""
    scope = stock._LangPatchScope()
    stock._patch_lang_tensor(tl.tensor, scope)
    for language in (tl, tl.core):
        stock._patch_lang_core(language, scope)
    inside = {(owner, name): inspect.getattr_static(owner, name) for owner, name, _ in scope._changes}
    scope.restore()
    inside |= {(tl.tensor, "__repr__"): _shown, (tl.tensor, "__str__"): _shown}
    inside[tl.tensor, "__getitem__"] = _index(tl.tensor.__getitem__)
    for name, (compute, names) in OPERATORS.items():
        inside[tl.tensor, name] = _operator(getattr(tl.tensor, name), compute, names)
    return [(owner, name, vars(owner).get(name, stock._MISSING), value) for (owner, name), value in inside.items()]


@contextmanager
def _language():
    """Makes `triton.language` the interpreter's."""
    for owner, name, _, value in _patches():
        setattr(owner, name, value)
    Launch.semantic = stock.interpreter_semantic
    try:
        with np.errstate(all="ignore"):  # infinities and NaN are results like any other
            yield
    finally:
        Launch.semantic = None
        for owner, name, value, _ in _patches():
            delattr(owner, name) if value is stock._MISSING else setattr(owner, name, value)


def _shown(t: tl.tensor) -> str:
    """Shows a tile in a debugger and `print`: the numbers of a bf16, which NumPy knows as raw bits only."""
    handle = t.handle
    return f"{_values(handle)} {t.dtype}" if handle.dtype.scalar.is_bf16() else repr(handle.data)


@cache
def _signature(fn) -> tuple[inspect.Signature, frozenset[str]]:
    """Returns a kernel's signature and which of its parameters are constexpr."""
    signature = inspect.signature(fn)
    constexprs = [n for n, p in signature.parameters.items() if _normalize_ty(p.annotation) == "constexpr"]
    return signature, frozenset(constexprs)


def _on_cpu(value) -> bool:
    if isinstance(value, TensorDescriptor):
        value = value.base
    return value.device.type == "cpu" if isinstance(value, torch.Tensor) else not hasattr(value, "data_ptr")


class Launch(stock.GridExecutor):
    """Launches a kernel like stock, whose patches, copies and inspections are made once or, on the CPU, never."""

    semantic = None  # the interpreter's, while a kernel runs

    def __init__(self, fn, arg_names, grid, pre_run_hooks=()):
        self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
        self.signature, self.constexprs = _signature(fn)

    def _init_args_hst(self, args, kwargs):
        in_place = not any(isinstance(value, tuple) or not _on_cpu(value) for value in (*args, *kwargs.values()))
        return (args, kwargs) if in_place else super()._init_args_hst(args, kwargs)

    def _restore_args_dev(self, args, host_args, kwargs, host_kwargs):
        if host_args is not args:
            super()._restore_args_dev(args, host_args, kwargs, host_kwargs)

    def __call__(self, *args, **kwargs):
        kwargs = {name: value for name, value in kwargs.items() if name in self.signature.parameters}
        host_args, host_kwargs = self._init_args_hst(args, kwargs)
        for hook in self.pre_run_hooks:
            hook(*host_args, **host_kwargs)
        with _language():
            bound = self.signature.bind(*host_args, **host_kwargs)
            bound.apply_defaults()
            values = {n: v if n in self.constexprs else stock._implicit_cvt(v) for n, v in bound.arguments.items()}
            grid = self.grid(values) if callable(self.grid) else self.grid
            grid = (*grid, 1, 1, 1)[: max(3, len(grid))]
            stock.interpreter_builder.set_grid_dim(*grid)
            try:
                for at in np.ndindex(*grid):
                    stock.interpreter_builder.set_grid_idx(*at)
                    self.fn(**values)
            except Exception as e:
                if triton.knobs.compilation.front_end_debugging:
                    raise
                raise InterpreterError(repr(e)) from e
        self._restore_args_dev(args, host_args, kwargs, host_kwargs)
