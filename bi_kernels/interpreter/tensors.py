"""Triton's own objects, made once instead of for every operation: arguments (a Python float as the fp32 that the GPU
takes), types, constants, and operators of equal dtypes."""

import ast
import operator
from functools import cache, lru_cache

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import mangle_type

from bi_kernels.interpreter.formats import canonical, numpy_dtype

WHOLE = slice(None)
_SIZES, _BLOCK_TYPES = {}, {}  # by a dtype's name: the bytes, and by a shape the block


def argument(value, convert=stock._implicit_cvt):
    """Converts a kernel's argument; a Python float is an fp32 value, as on the GPU: stock keeps the Python number."""
    if type(value) is int and -(2**31) <= value < 2**31:
        return _int_constant(value, "int32")
    if type(value) is float:
        return tl.tensor(TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    if isinstance(value, torch.Tensor):
        pointer = _pointer(value.dtype)
        return tl.tensor(TensorHandle(np.array([value.data_ptr()], dtype=np.uint64), pointer), pointer)
    return convert(value)


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


def init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, _, self.numel, _ = type.parts if type.is_block() else NO_BLOCK


def init_block_type(self, element_ty, shape):
    shape = tuple([n.value if type(n) is tl.constexpr else n for n in shape])
    if not shape:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.parts = _, self.shape, numel, text = _shape(shape)
    self.numel, self.name = numel.value, f"<{text}, {element_ty.name}>"


def unwrap(value, nested=tl.core._unwrap_if_constexpr):
    if type(value) is tl.constexpr:
        return value.value
    return nested(value) if isinstance(value, (list, tuple, tl.core.tuple)) else value


def same_dtype(self, other, equal=tl.dtype.__eq__):
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


def block_of(dtype: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
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


def short_operator(general, compute, names: frozenset[str]):
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
        a, b = _level(self, other) if side() and blocks[0] != blocks[1] else (self.handle, other.handle)
        try:
            if kept:
                data = compute(a.data, b.data)
                dtype = tl.int1 if data.dtype.kind == "b" else self.dtype if data.itemsize < 8 else tl.int64
            elif theirs in LIMITS and compute is operator.add and self.dtype.is_ptr():
                data = stock.interpreter_builder.create_addptr(a, b).data
                dtype = self.dtype
            else:
                return general(self, other)
        except ValueError:  # of shapes, which Triton names
            return general(self, other)
        if data.dtype.kind == "f":
            data = canonical(data)
        return _made(data, dtype, block_of(dtype, data.shape[side() :]) if any(blocks) else dtype)

    return operate


def side() -> int:
    """Returns how many dimensions of an array come before a tile's: one where programs run side by side."""
    return stock.interpreter_builder.side


def _level(*operands: tl.tensor) -> list[TensorHandle]:
    """Returns a scalar and a block, of several programs, with as many dimensions each."""
    ndim = max(t.handle.data.ndim for t in operands)
    return [
        t.handle if t.type.is_block() else TensorHandle(t.handle.data.reshape(-1, *(1,) * (ndim - 1)), t.handle.dtype)
        for t in operands
    ]


def _constant(value, dtype: str):
    """Returns a number of Python's beside a tensor of a dtype as a tensor of that dtype, if it is one of such."""
    if type(value) is int and dtype in LIMITS:
        return _int_constant(value, dtype) if -LIMITS[dtype] <= value < LIMITS[dtype] else value
    normal = type(value) is float and (not value or abs(value) == np.inf or 2.0**-126 <= abs(value) < 2.0**127)
    if (type(value) is bool and dtype == "int1") or (normal and dtype == "fp32"):
        kind = tl.float32 if normal else tl.int1
        return _made(np.array([value or 0], numpy_dtype(kind)), kind, kind)  # Triton takes −0 for +0
    return value


def index(general):
    """Returns the operator x[:, None], which inserts dimensions at once."""

    def insert(self, slices):
        known = type(slices) is tuple and all(s is None or s == WHOLE for s in slices)
        if not (known and self.type.is_block() and len(slices) - slices.count(None) <= len(self.shape)):
            return general(self, slices)
        data = self.handle.data[(WHOLE,) * side() + slices]
        return _made(data, self.dtype, block_of(self.dtype, data.shape[side() :]))

    return insert


class Parted(BaseException):
    """Programs side by side take different ways; values: by which, one of each program. No kernel catches it: it is no
    error."""

    def __init__(self, values: np.ndarray):
        self.values = values.tolist()


def decided(t: tl.tensor, convert: type):
    """Returns a scalar that all programs share as a number of Python's; raises Parted where they do not share it."""
    data = t.handle.data.reshape(-1).astype(convert)
    if (data != data[0]).any():
        raise Parted(data)
    return convert(data[0])


class Semantic(TritonSemantic):
    """Gives Triton's semantic a short way where the dtypes are equal or an operand is an integer constant."""

    @staticmethod
    def loop(arg1, arg2=None, step=None, **_):
        """Returns a `range`; of tensors where a bound is one, as compiled. Programs side by side may begin and end
        apart; Parted unless they go round as often."""
        begin, end = (0, arg1) if arg2 is None else (arg1, arg2)
        bounds = begin, end, 1 if step is None else step
        of = [t.handle for t in bounds if isinstance(t, tl.tensor)]
        if not of:
            return range(*bounds)
        kind = tl.int64 if any(h.dtype == tl.int64 for h in of) else tl.int32
        shape = max(h.data.shape for h in of)
        if shape in ((), (1,)):
            return (_int_constant(i, kind.name) for i in range(*bounds))
        begin, end, step = (np.int64(t.handle.data if isinstance(t, tl.tensor) else t) for t in bounds)
        rounds = np.broadcast_to(np.maximum(0, -(-(end - begin) // step)), shape).reshape(-1)
        if (rounds != rounds[0]).any():
            raise Parted(rounds)
        places = (np.atleast_1d(begin + i * step) for i in range(rounds[0]))
        return (_made(at.astype(numpy_dtype(kind)), kind, kind) for at in places)

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
        block = block_of(scalar.dtype, tuple(block.shape))
        return tl.tensor(self.builder.create_splat(block, scalar.handle), block)

    def cast(self, input, dst_ty, *rounding, **more):
        return input if input.dtype.name == dst_ty.scalar.name else super().cast(input, dst_ty, *rounding, **more)

    def _load_legacy(self, ptr, mask, other, *how):
        element = ptr.dtype.element_ty if ptr.dtype.is_ptr() else None
        scalars = side() and mask is not None and all(t is None or not t.type.is_block() for t in (ptr, mask, other))
        if scalars and element and element.name != "int1" and not any(how[:2]):  # each program has a mask of its own
            instead = None if other is None else self.cast(other, element).handle
            return _made(
                self.builder.create_masked_load(ptr.handle, mask.handle, instead, *how[2:]).data, element, element
            )
        if not (ptr.type.is_block() and ptr.dtype.is_ptr()):
            return super()._load_legacy(ptr, mask, other, *how)
        element = ptr.dtype.element_ty
        if other is not None and not other.type.is_block():  # cast before it is spread
            other = self._spread(self.cast(other, element), ptr.type)
        if mask is None or mask.shape is not ptr.shape or element.name == "int1" or any(how[:2]):
            return super()._load_legacy(ptr, mask, other, *how)
        instead = None if other is None else other.handle
        found = self.builder.create_masked_load(ptr.handle, mask.handle, instead, *how[2:])
        return _made(found.data, element, block_of(element, found.data.shape[side() :]))


def init_handle(self, data, dtype, attr=None):
    self.data, self.dtype, self.attr = data, dtype, attr or {}
    if dtype.name not in _SIZES:
        _SIZES[dtype.name] = 8 if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
    if data.itemsize > _SIZES[dtype.name]:
        raise ValueError(f"an array of {data.dtype} does not fit {dtype}")


class Loops(stock.ASTTransformer):
    """Rewrites a kernel as Triton does, and the `range` of a loop to Semantic.loop."""

    def visit_For(self, node):
        self.generic_visit(node)
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range":
            node.iter.func = ast.Attribute(ast.Name("interpreter_semantic", ast.Load()), "loop", ast.Load())
        return node
