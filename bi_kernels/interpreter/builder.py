"""The operations of Triton's interpreter that are wrong for bf16, differ from sm_90's, or loop over pointers."""

import ctypes
import importlib
from functools import partial

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from bi_kernels.interpreter.formats import (
    add_to_odd,
    canonical,
    handle_of,
    maximum,
    minimum,
    numbers,
    refuse,
    refuse_bf16,
    to_bf16,
    to_fp16_toward_zero,
)
from bi_kernels.interpreter.memory import Memory
from bi_kernels.interpreter.tensors import block_of, side

GATHER = 256  # elements from which on a gather in NumPy is faster than Triton's loop over the pointers


def _at(address: int, size: int) -> ctypes.Array:
    """Returns `size` bytes of this process's memory."""
    return (ctypes.c_char * size).from_address(address)


def _tensor_core():
    """Returns the module that computes `tl.dot`, loaded when a kernel first has one: numba takes a second."""
    return importlib.import_module("bi_kernels.interpreter.tensor_core")


def _whole(t: TensorHandle) -> TensorHandle:
    """Returns a tile whose elements lie one behind another, as Triton's atomic operations take them to."""
    return TensorHandle(np.array(t.data, order="C"), t.dtype)


def own_arrays(*arrays: np.ndarray) -> list[np.ndarray]:
    """Returns arrays that may be written to, as Triton's loop over pointers needs of all that it reads."""
    return [np.require(a, None, "W") for a in arrays]


def _gathered(pointers: np.ndarray, first: int, last: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns memory and the indices of `pointers` in it, or None where not all are aligned."""
    offsets = (pointers - np.uint64(first)).view(np.int64)
    if (offsets & (dtype.itemsize - 1)).any():
        return None
    return np.frombuffer(_at(first, last - first + dtype.itemsize), dtype), offsets >> (dtype.itemsize.bit_length() - 1)


def _clipped(desc, indices, dtype: np.dtype) -> tuple[int, int, list[int], list[int], tuple[slice, ...]]:
    """Returns where the part of a descriptor's block that is within its shape starts, how many bytes it spans (0: there
    is none), its sizes, its steps in bytes, and where in the block it is."""
    offsets, strides = [int(i.data.item()) for i in indices], [int(s.data.item()) for s in desc.strides]
    assert offsets[-1] * dtype.itemsize % 16 == 0, "block offset start must be 16-byte aligned"
    first = [max(0, -at) for at in offsets]
    last = [min(n, int(size.data.item()) - at) for n, size, at in zip(desc.block_shape, desc.shape, offsets)]
    sizes, steps = [end - start for start, end in zip(first, last)], [dtype.itemsize * stride for stride in strides]
    start = int(desc.base.data.item()) + sum((at + skip) * step for at, skip, step in zip(offsets, first, steps))
    span = sum((size - 1) * step for size, step in zip(sizes, steps)) + dtype.itemsize
    return start, span if min(sizes) > 0 else 0, sizes, steps, tuple(map(slice, first, last))


class Builder(InterpreterBuilder):
    """Replaces the operations of Triton's InterpreterBuilder that are wrong for bf16 or differ from sm_90's."""

    memory: Memory | None = None  # of the launch that runs
    side = 0  # dimensions of an array before a tile's own

    def get_bf16(self, value):
        return handle_of(np.array([value], dtype=np.float64), tl.bfloat16)

    def cast_impl(self, src, dst_type):
        dst = dst_type.scalar
        if dst.is_fp8():
            refuse(f"a cast to {dst}")
        data = numbers(src)
        # From fp64, and from bf16 to fp32, the GPU keeps a NaN's sign and as much of its payload as fits.
        keeps_nan = src.dtype.scalar in (tl.float64, tl.bfloat16)
        if dst == tl.bfloat16:
            bits = to_bf16(data)
            if src.dtype.scalar == tl.float64:
                bits = np.where(np.isnan(data), data.astype(np.float32).view(np.uint32) >> 16, bits).astype(np.uint16)
            return TensorHandle(bits, dst)
        data = data.astype(stock._get_np_dtype(dst))
        return TensorHandle(data if keeps_nan else canonical(data), dst)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        dst = dst_type.scalar
        if rounding_mode != ir.ROUNDING_MODE.RTZ:
            return self.cast_impl(src, dst_type)
        if src.dtype.scalar != tl.float32 or dst not in (tl.bfloat16, tl.float16):
            refuse(f"a cast from {src.dtype.scalar} to {dst} toward zero")
        if dst == tl.bfloat16:
            return TensorHandle(to_bf16(src.data, toward_zero=True), dst)
        return handle_of(to_fp16_toward_zero(src.data), dst)

    def get_block_ty(self, dtype, shape):
        return block_of(dtype, tuple(shape))

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
        out = op(numbers(lhs), numbers(rhs))
        return TensorHandle(out, tl.int1) if out.dtype == bool else handle_of(out, dtype)

    def _reach(self, pointers: np.ndarray, mask: np.ndarray, size: int) -> tuple[np.ndarray, int, int] | None:
        """Returns `pointers`, those masked as one that is not, the first and the last, or None where all are masked.
        IndexError where one has not as many bytes of the launch's memory."""
        if not mask.all():
            if not mask.any():
                return None
            pointers = np.where(mask, pointers, pointers[mask].min())
        first, last = int(pointers.min()), int(pointers.max())
        if self.memory and not self.memory.holds(first, last, size):
            self.memory.check(pointers, size)
        return pointers, first, last

    def _gather(self, pointers: np.ndarray, mask: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray] | None:
        reached = self._reach(pointers, mask, dtype.itemsize)
        return _gathered(*reached, dtype) if reached and pointers.size >= GATHER else None

    def _window(self, desc, indices, dtype: np.dtype) -> tuple[np.ndarray | None, tuple[slice, ...]]:
        """Returns the part of a descriptor's block that is within its shape, as memory, and where in the block."""
        start, span, sizes, steps, inside = _clipped(desc, indices, dtype)
        if not span:
            return None, inside
        if self.memory and not self.memory.holds(start, start + span - dtype.itemsize, dtype.itemsize):
            offsets = np.ix_(*(step * np.arange(size) for size, step in zip(sizes, steps)))
            self.memory.check((start + sum(offsets)).astype(np.uint64), dtype.itemsize)
        return np.ndarray(sizes, dtype, _at(start, span), strides=steps), inside

    def create_int_to_ptr(self, src, dst_type):
        if self.memory:
            self.memory.known = False  # the address of anything
        return super().create_int_to_ptr(src, dst_type)

    def create_masked_load(self, ptrs, mask, other, *rest, **named):
        pointers, masked = ptrs.data, np.asarray(mask.data)  # of a block pointer the mask is no handle
        dtype = ptrs.get_element_ty()
        element = stock._get_np_dtype(dtype)
        found = self._gather(pointers, masked, element)
        if found is None:
            return super().create_masked_load(ptrs, mask, other, *rest, **named)
        memory, index = found
        data = memory.take(index)
        if not masked.all():
            data = np.where(masked, data, np.zeros((), element) if other is None else other.data)
        return TensorHandle(data, dtype)

    def create_masked_store(self, ptrs, value, mask, *rest):
        pointers, masked, data = ptrs.data, np.asarray(mask.data), value.data
        found = self._gather(pointers, masked, data.dtype)
        if found is None:
            return stock._interpreter.store(*own_arrays(pointers, data, masked))
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
        memory, inside = self._window(desc, indices, tile.dtype)
        if memory is not None:
            tile[inside] = memory
        return TensorHandle(tile, dtype)

    def create_descriptor_store(self, desc, value, indices):
        memory, inside = self._window(desc, indices, value.data.dtype)
        if memory is not None:
            memory[...] = value.data.reshape(desc.block_shape)[inside]  # of a scatter, a row without its dimension of 1

    create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, maximum)
    create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, minimum)
    create_maximumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, partial(maximum, pick=np.maximum))
    create_minimumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, partial(minimum, pick=np.maximum))

    def create_clampf(self, arg, lo, hi, propagate_nans):
        if propagate_nans == ir.PROPAGATE_NAN.ALL:
            return self.create_minimumf(self.create_maximumf(arg, lo), hi)
        return self.create_minnumf(self.create_maxnumf(arg, lo), hi)

    def create_fma(self, x, y, z):
        if z.dtype.scalar == tl.float64:
            return super().create_fma(x, y, z)
        x, y, addend = (numbers(t).astype(np.float64) for t in (x, y, z))
        dtype = z.dtype.scalar
        total = add_to_odd(x * y, addend)
        return handle_of(total if dtype == tl.bfloat16 else total.astype(stock._get_np_dtype(dtype)), dtype)

    def unary_op(self, arg, op):
        refuse_bf16(arg, "a math function of")
        return handle_of(op(numbers(arg)), arg.dtype.scalar)

    create_rsqrt = lambda self, arg: self.unary_op(arg, lambda x: 1 / np.sqrt(x))

    def create_atomic_rmw(self, op, ptr, val, mask, *rest):
        refuse_bf16(val, "an atomic operation on")
        self._reach(ptr.data, mask.data, val.data.itemsize)
        return super().create_atomic_rmw(op, _whole(ptr), _whole(val), _whole(mask), *rest)

    def create_atomic_cas(self, ptr, cmp, val, *rest):
        refuse_bf16(val, "an atomic operation on")
        self._reach(ptr.data, np.True_, val.data.itemsize)
        return super().create_atomic_cas(_whole(ptr), _whole(cmp), _whole(val), *rest)

    def create_tensor_pointer_load(self, ptr, boundary_check, padding, *rest):
        if padding == ir.PADDING_OPTION.PAD_NAN:
            refuse_bf16(ptr.base, "NaN padding of")
        return super().create_tensor_pointer_load(ptr, boundary_check, padding, *rest)

    def create_make_tensor_descriptor(self, base, shape, strides, tensor_shape, is_signed, padding="zero"):
        if padding == ir.PADDING_OPTION.PAD_NAN:
            refuse_bf16(base, "NaN padding of")
        return super().create_make_tensor_descriptor(base, shape, strides, tensor_shape, is_signed, padding)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        dtype = a.dtype.scalar
        if dtype in (tl.bfloat16, tl.float16):
            if d.dtype.scalar != tl.float32:
                raise NotImplementedError(f"tl.dot in the interpreter accumulates in fp32, not in {d.dtype.scalar}")
            dot = partial(_tensor_core().mma, lowest=-126 if dtype == tl.bfloat16 else -14)
        elif dtype == tl.float32:
            if input_precision != ir.INPUT_PRECISION.IEEE:
                raise NotImplementedError(
                    "tl.dot on fp32 uses TF32 unless told otherwise, and the interpreter has no "
                    'TF32: pass input_precision="ieee"'
                )
            dot = _tensor_core().fma_dot
        elif dtype.is_fp8():
            refuse(f"tl.dot on {dtype}")
        else:
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        a, b, c = (numbers(t).astype(np.float32) for t in (a, b, d))
        return TensorHandle(dot(a, b, c) if a.ndim == 2 else np.stack([dot(*t) for t in zip(a, b, c)]), tl.float32)


class Unknown(BaseException):
    """A program does what is computed for one program at a time only. No kernel catches it, as no error."""


class Checked:
    def check_tensor(self, inputs):
        if any(getattr(t, "dtype", None) == tl.bfloat16 for t in inputs):
            refuse("a reduction or scan of bf16")
        super().check_tensor(inputs)
        if self.axis is not None and self.axis < 0:
            self.axis += len(inputs[0].shape)


class Scan(Checked, stock.ScanOps):
    def apply_impl(self, input):
        if side() and (self.reverse or self.combine_fn != tl.standard._sum_combine):
            raise Unknown
        return super().apply_impl(input)

    def cumsum(self, input):
        return [_tile(np.cumsum(input.handle.data, axis=self.axis + side()), input.dtype)]


QUIET = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}  # the former warn of a row of NaN


class Reduce(Checked, stock.ReduceOps):
    def min_max(self, input, val_reduce_op, idx_reduce_op=None):
        values = self._each(QUIET.get(val_reduce_op, val_reduce_op), input, input.dtype)
        return values if idx_reduce_op is None else (values, self._each(idx_reduce_op, input, tl.int32))

    def sum(self, input):
        out = self._each(np.sum, input, input.dtype)
        if out.handle.data.size < input.handle.data.size:  # one element alone is not added to anything
            out.handle.data = canonical(out.handle.data)
        return out

    def generic_reduce(self, input):
        if side():
            raise Unknown
        return super().generic_reduce(input)

    def _each(self, reduce, t: tl.tensor, dtype: tl.dtype) -> tl.tensor:
        """Reduces each program's tile alone, laid out in rows: NumPy's order of a sum hangs on layout and length."""
        tiles = np.ascontiguousarray(t.handle.data)
        how = {"axis": self.axis, "keepdims": self.keep_dims}
        return _tile(np.stack([reduce(x, **how) for x in tiles]) if side() else np.asarray(reduce(tiles, **how)), dtype)


def _tile(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """Returns an array as a tile, or as a scalar if it has no dimension of a tile."""
    shape, data = data.shape[side() :], data.astype(stock._get_np_dtype(dtype))
    return tl.tensor(
        TensorHandle(data if shape else data.reshape(-1), dtype), block_of(dtype, shape) if shape else dtype
    )
