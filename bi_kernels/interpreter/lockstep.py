"""The programs of a launch side by side: what Python does for one serves all that take the same way.

A tile has one dimension more, the first: as many as there are programs, or 1 where all have the same. Where they would
take different ways, what they wrote is taken back, and those that go the same way start again. A launch with an
operation that is not known here, or that raises, is taken back whole, and its programs run one by one, in order.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle

from bi_kernels.interpreter.builder import Builder, Unknown, own_arrays
from bi_kernels.interpreter.tensors import Parted

MOST = 64  # programs at once
ELEMENTS = 2**18  # of all their tiles of one kind: more are slower, as no cache holds them
ALONE = (  # operations that are computed for one program at a time
    "advance", "assert", "assume", "atomic_cas", "atomic_rmw", "cat", "descriptor_gather", "descriptor_scatter",
    "extern_elementwise", "gather", "histogram", "inline_asm", "make_block_ptr", "make_tensor_descriptor", "print",
    "tensor_pointer_load", "tensor_pointer_store", "unsplat",
)  # fmt: skip
_room: WeakKeyDictionary[Callable, int] = WeakKeyDictionary()  # of a kernel: programs at once, where not MOST

Places = Sequence[tuple[int, ...]]


class TooMany(BaseException):
    """So many programs have tiles too large to be computed at once; elements: of all of them."""

    def __init__(self, elements: int):
        self.elements = elements


class Lockstep(Builder):
    """Builds tiles of several programs."""

    side = 1

    def create_get_program_id(self, axis):
        at = self.places[:, axis]
        return TensorHandle(at[:1] if (at == at[0]).all() else at, tl.int32)

    def create_make_range(self, ret_ty, start, stop):
        return TensorHandle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_splat(self, ret_ty, arg):
        shape = tuple(ret_ty.shape)
        data = arg.data.reshape(-1, *(1,) * len(shape))
        return TensorHandle(np.broadcast_to(data, (len(data), *shape)), arg.dtype.scalar)

    def create_broadcast(self, arg, shape):
        return TensorHandle(np.broadcast_to(arg.data, (len(arg.data), *shape)), arg.dtype.scalar)

    def create_expand_dims(self, arg, axis):
        return super().create_expand_dims(arg, axis + 1)

    def create_trans(self, arg, perm):
        return super().create_trans(arg, (0, *(p + 1 for p in perm)))

    def create_reshape(self, arg, shape, allow_reorder):
        return super().create_reshape(arg, (len(arg.data), *shape), allow_reorder)

    def create_masked_load(self, ptrs, mask, other, cache, eviction, is_volatile):
        if is_volatile:
            raise Unknown  # it may wait for what another program writes
        ptrs, mask, other = self._level(ptrs, mask, other)
        return super().create_masked_load(ptrs, mask, other, cache, eviction, is_volatile)

    def create_masked_store(self, ptrs, value, mask, *rest):
        ptrs, mask, value = self._level(ptrs, mask, value)
        if not mask.data.any():
            return
        before = super().create_masked_load(ptrs, mask, None, None, None, False).data
        self.undo.append(partial(stock._interpreter.store, *own_arrays(ptrs.data, before, mask.data)))
        super().create_masked_store(ptrs, value, mask, *rest)

    def _level(self, *handles: TensorHandle | None) -> list[TensorHandle | None]:
        """Returns tiles of as many programs each."""
        shapes = {h.data.shape for h in handles if h is not None}
        shape = np.broadcast_shapes(*shapes)
        self._fits(shape)
        if len(shapes) == 1:
            return handles
        return [None if h is None else TensorHandle(np.broadcast_to(h.data, shape), h.dtype.scalar) for h in handles]

    def _fits(self, shape: tuple[int, ...]) -> None:
        if len(self.places) > 1 and math.prod(shape) > ELEMENTS:
            raise TooMany(math.prod(shape))

    def create_dot(self, a, b, d, *how):
        if a.data.ndim != 3 or d.dtype.scalar != tl.float32:
            raise Unknown
        count = max(len(t.data) for t in (a, b, d))
        self._fits((count, max(t.data[0].size for t in (a, b, d))))
        every = (TensorHandle(np.broadcast_to(t.data, (count, *t.data.shape[1:])), t.dtype) for t in (a, b, d))
        return super().create_dot(*every, *how)

    def create_descriptor_load(self, desc, indices, *rest):
        if desc.padding != ir.PADDING_OPTION.PAD_ZERO:
            raise Unknown
        tiles = [super(Lockstep, self).create_descriptor_load(desc, at, *rest) for at in _of_each(indices)]
        return TensorHandle(np.stack([t.data for t in tiles]), tiles[0].dtype)

    def create_descriptor_store(self, desc, value, indices):
        places = _of_each(indices)
        if len(places) < len(value.data):
            raise Unknown  # programs that write to one place
        for at, data in zip(places, np.broadcast_to(value.data, (len(places), *value.data.shape[1:]))):
            memory, _ = self._window(desc, at, data.dtype)
            if memory is not None:
                self.undo.append(partial(np.copyto, memory, memory.copy()))
            super().create_descriptor_store(desc, TensorHandle(data, value.dtype), at)


def _of_each(indices: Sequence[TensorHandle]) -> list[list[TensorHandle]]:
    """Returns the place of a descriptor's block for each program."""
    return [[TensorHandle(i, tl.int32) for i in at] for at in zip(*np.broadcast_arrays(*(i.data for i in indices)))]


def _alone(*_, **__):
    raise Unknown


for _name in ALONE:
    setattr(Lockstep, f"create_{_name}", _alone)


def run(fn: Callable, values: dict, places: Places) -> None:
    """Calls a kernel for each of `places`, (x, y, z) in a grid, as many at once as go the same way."""
    if min(len(places), _room.get(fn, MOST)) < 2 or sys.gettrace() or "breakpoint" in fn.__code__.co_names:
        one_by_one(fn, values, places)  # or somebody looks at each of them
        return
    undo = []
    try:
        _in_groups(fn, values, places, undo)
    except (Exception, Unknown) as left:
        _take_back(undo)
        if isinstance(left, Unknown):
            _room[fn] = 0
        one_by_one(fn, values, places)


def one_by_one(fn: Callable, values: dict, places: Places) -> None:
    """Calls a kernel for each of `places`, in order."""
    for at in places:
        stock.interpreter_builder.set_grid_idx(*at)
        fn(**values)


def _in_groups(fn: Callable, values: dict, places: Places, undo: list[Callable[[], None]]) -> None:
    """Calls a kernel for each of `places`, and notes how to take back what it writes; raises what the kernel does."""
    groups = [places]
    while groups:
        group, room, done = groups.pop(), _room.get(fn, MOST), len(undo)
        if len(group) > room:
            groups += [group[at : at + room] for at in range(0, len(group), room)][::-1]
            continue
        try:
            _together(fn, values, group, undo)
            continue
        except Parted as parted:
            ways = {}
            for value, at in zip(parted.values, group):
                ways.setdefault(value, []).append(at)
            groups += [*ways.values()][::-1]
        except TooMany as most:
            _room[fn] = max(1, len(group) * ELEMENTS // most.elements)
            groups.append(group)
        _take_back(undo, done)


def _together(fn: Callable, values: dict, places: Places, undo: list[Callable[[], None]]) -> None:
    builder = stock.interpreter_builder
    before, builder.__class__ = builder.__class__, Lockstep
    builder.places, builder.undo = np.array(places, np.int32), undo
    try:
        fn(**values)
    finally:
        builder.__class__ = before
        del builder.places, builder.undo


def _take_back(undo: list[Callable[[], None]], done: int = 0) -> None:
    """Takes back what was written after the first `done` times, last first."""
    while len(undo) > done:
        undo.pop()()
