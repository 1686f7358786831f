"""Launches a Triton kernel that has run before through its compiled form.

`kernel[grid](...)` binds its arguments, and works out by each what the kernel is specialised for, on every call. That
takes the CPU several times as long as the launch itself, which a model in eager mode waits for. Kernels made by `jit`
tell calls apart by what Triton compiles by, and ask Triton once for each.

An op that is called often keeps a `Launch` for each shape, in a `remembered` function, and a call only names tensors.
"""

import warnings
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, lru_cache
from inspect import getclosurevars, isfunction
from itertools import count
from operator import itemgetter
from typing import NamedTuple

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.checks import INTERPRETED
from bi_kernels.contract import CONTRACT

_RUN = JITFunction.run  # whoever records launches replaces it, and is shown every one
# these versions' CompiledKernel has `run`, which takes a grid, a stream, `function`, `packed_metadata`, what hooks are
# told, two hooks, and the arguments, a pointer as an address if need be
_TESTED = CONTRACT["triton"]["compiled"]
KNOWN = not INTERPRETED and triton.__version__.startswith(tuple([f"{version}." for version in _TESTED]))
if not (INTERPRETED or KNOWN):
    warnings.warn(
        f"bi_kernels: Triton is {triton.__version__}, expected {' or '.join(_TESTED)}; kernels that another version "
        "compiles are not tested, and no bits of theirs are promised: audit them with `bi-audit run`",
        stacklevel=2,
    )

_HEAD = 13  # what 3.6 passes its compiled launcher before the kernel's arguments; 3.7 passes these in one tuple

cached = lru_cache(maxsize=4096)  # what a launch needs but its tensors, by what that follows from


def is_recorded() -> bool:
    """Tells whether somebody records what Triton launches, as the static audit does."""
    return JITFunction.run is not _RUN


def _direct() -> bool:
    """Tells whether a launch may pass Triton by: nobody records it, or wants to be called then, as a profiler does."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return KNOWN and not (is_recorded() or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch_compiled(compiled: CompiledKernel, device: int, grid: tuple[int, int, int], values: Sequence) -> None:
    """Launches what Triton compiled on a device's current stream, where that is `_direct`."""
    stream, run = torch._C._cuda_getCurrentRawStream(device), _launcher(compiled)
    run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


@cached
def _launcher(compiled: CompiledKernel) -> Callable:
    """Returns Triton's launcher of a kernel; of one that takes TMA descriptors, a copy that keeps the maps which it has
    encoded, where Triton's encodes two or more in each launch."""
    return keeping_maps(compiled.run)


def keeping_maps(run: Callable) -> Callable:
    """Returns a launcher like Triton's `run`, which encodes the map of a descriptor once for an address."""
    encoding = getattr(run, "launch", None)
    seen = getclosurevars(encoding) if isfunction(encoding) else None
    if seen is None or not {"launcher", "tensordesc_indices", "tensordesc_meta"} <= seen.nonlocals.keys():
        return run
    launcher, places, told = (seen.nonlocals[n] for n in ("launcher", "tensordesc_indices", "tensordesc_meta"))
    encode, packed = seen.globals["make_tensordesc_arg"], hasattr(run, "kernel_signature")
    told = [(at, meta, meta and _intern_id(repr(meta))) for at, meta in zip(sorted(places), told)]

    def launch(*given):
        head, values = (given[:-1], given[-1]) if packed else (given[:_HEAD], given[_HEAD:])
        expanded, done = [], 0
        for at, meta, number in told:
            blocks = values[at]
            key = vars(blocks).get("number"), number, blocks.base.data_ptr()
            arguments = None if None in key else _maps.get(key)
            if arguments is None:
                arguments = encode(blocks, meta)
                if len(_maps) >= 8192:
                    _maps.clear()
                if None not in key:
                    _maps[key] = arguments
            expanded += values[done:at]
            expanded += arguments
            done = at + 1
        expanded += values[done:]
        launcher(*head, expanded) if packed else launcher(*head, *expanded)

    kept = copy(run)
    kept.launch = launch
    return kept


def _kind(value, specialised: bool):
    """Returns what Triton compiles by of an argument: calls whose arguments are of one kind share a binary."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        size = -(2**31) <= value < 2**31, value < 2**63
        return (*size, value % 16 == 0, value == 1) if specialised else size
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return None if value is None else type(value)


class _Call(NamedTuple):
    """How arguments are passed: some in order, the others by name."""

    positions: list[tuple[int, bool]]  # of those whose kind matters, and whether Triton looks at their values
    constants: Callable  # those by whose values Triton compiles, and its options, of the named
    following: Callable  # the named in the order of the parameters


class Kernel(JITFunction):
    """A kernel that keeps what was compiled of it, by the kinds of its arguments. Its options are constants of their
    launcher."""

    @cached_property
    def _calls(self) -> dict[tuple, _Call]:
        return {}

    @cached_property
    def _compiled(self) -> dict:
        return {}

    def _call(self, count: int, names: tuple[str, ...]) -> _Call:
        values = [*range(count), *[i for i, p in enumerate(self.params) if i >= count and p.name in names]]
        kinds = [(i, not self.params[i].do_not_specialize) for i in values if not self.params[i].is_constexpr]
        named = [self.params[i].name for i in values[count:]]
        changing = {self.params[i].name for i, _ in kinds}
        return _Call(kinds, _itemgetter_for([n for n in names if n not in changing]), _itemgetter_for(named))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        """Returns what launches a program for each place in the grid; all arguments are given, those whose values are
        compiled in, and Triton's options (num_warps, …), by name, tensors on the current device."""
        if is_recorded():
            return super().__getitem__(grid)

        def launch(*args, **named) -> CompiledKernel:
            passed = len(args), *named
            call = self._calls.get(passed)
            if call is None:
                call = self._calls[passed] = self._call(len(args), tuple(named))
            values = args + call.following(named)
            kinds = [_kind(values[i], specialised) for i, specialised in call.positions]
            device = torch.cuda.current_device()
            key = device, passed, *call.constants(named), *kinds
            compiled = self._compiled.get(key)
            if compiled is None:
                options = {n: v for n, v in named.items() if n not in self.arg_names}
                compiled = self._compiled[key] = self.run(*values, grid=grid, warmup=False, **options)
            elif _direct():
                launch_compiled(compiled, device, (*grid, 1, 1)[:3], values)
            else:
                compiled[*grid, 1, 1](*values)
            return compiled

        return launch


def _itemgetter_for(names: Sequence[str]) -> Callable[[dict], tuple]:
    """Returns what picks the values of these names."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda named: tuple([named[n] for n in names])


_blocks: dict[tuple, dict] = {}
_numbers: dict = {}
_count = count()
_maps: dict[tuple, list] = {}  # what a launcher is given, by the numbers of a descriptor's kind and layout, and address


def _intern_id(kind) -> int:
    """Returns a number of its own for each kind."""
    return _numbers.setdefault(kind, next(_count))


def descriptor(
    t: torch.Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int], kind=TensorDescriptor, *layout
) -> TensorDescriptor:
    """Returns a TMA descriptor of t, whose base is a multiple of 16 bytes; Triton checks the rest once of each kind:
    its own, or Gluon's with a layout."""
    key = t.dtype, kind, *shape, *strides, *block
    fields = _blocks.get(key)
    if fields is None:
        made = kind(t, [*shape], [*strides], [*block], *layout)
        if len(_blocks) >= 4096:
            _blocks.clear()
            _numbers.clear()
        fields = _blocks[key] = {**vars(made), "base": None, "number": _intern_id(key)}
    made = kind.__new__(kind)
    vars(made).update(fields, base=t)
    return made


class Launch:
    """A launch but for the tensors, and floats, that are the kernel's first parameters: the number of its device, which
    is the current one, its grid, the parameters that follow, and Triton's options. What was compiled is told apart by
    dtypes, alignment, and where None is given."""

    def __init__(self, kernel: JITFunction, device: int, grid: tuple[int, ...], *numbers, **named):
        self._kernel, self._grid, self._numbers, self._named = kernel, grid, numbers, named
        self._device, self._whole_grid = device, (*grid, 1, 1)[:3]
        self._tail = *numbers, *[named[n] for n in kernel.arg_names if n in named]
        self._compiled: dict[tuple, CompiledKernel] = {}

    def __call__(self, *given) -> None:
        if not _direct():
            self._kernel[self._grid](*given, *self._numbers, **self._named)
            return
        values, kinds, low = [], [], 0
        for a in given:
            if isinstance(a, torch.Tensor):
                kinds.append(a.dtype)
                a = a.data_ptr()
                low |= a
            elif type(a) is not float:  # None, or a descriptor
                kinds.append(a and a.base.dtype)
            values.append(a)
        if low % 16:
            kinds += [type(a) is int and a % 16 == 0 for a in values]
        key = tuple(kinds)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[self._grid](*given, *self._numbers, **self._named)
        else:
            launch_compiled(compiled, self._device, self._whole_grid, (*values, *self._tail))


def jit(fn: Callable | None = None, **options) -> Callable:
    """Makes a kernel of a function, as `triton.jit` does: one that is launched faster, or an interpreted one."""
    if fn is None:
        return lambda fn: jit(fn, **options)
    return triton.jit(fn, **options) if INTERPRETED else Kernel(fn, **options)
