"""Launches a Triton kernel that has run before through its compiled form.

`kernel[grid](...)` binds its arguments, and works out by each what the kernel is specialised for, on every call. That
takes the CPU several times as long as the launch itself, which a model in eager mode waits for. Kernels made by `jit`
tell calls apart by what Triton compiles by, and ask Triton once for each.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.checks import INTERPRETED

_RUN = JITFunction.run  # whoever records launches replaces it, and is shown every one


def watched() -> bool:
    """Tells whether somebody records what Triton launches, as the static audit does."""
    return JITFunction.run is not _RUN


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
        return _Call(kinds, _picked([n for n in names if n not in changing]), _picked(named))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        """Returns what launches a program for each place in the grid; all arguments are given, those whose values are
        compiled in, and Triton's options (num_warps, …), by name, tensors on the current device."""
        if watched():
            return super().__getitem__(grid)

        def launch(*args, **named) -> None:
            passed = len(args), *named
            call = self._calls.get(passed)
            if call is None:
                call = self._calls[passed] = self._call(len(args), tuple(named))
            values = args + call.following(named)
            kinds = [_kind(values[i], specialised) for i, specialised in call.positions]
            key = torch.cuda.current_device(), passed, *call.constants(named), *kinds
            compiled = self._compiled.get(key)
            if compiled is None:
                options = {n: v for n, v in named.items() if n not in self.arg_names}
                self._compiled[key] = self.run(*values, grid=grid, warmup=False, **options)
            else:
                compiled[*grid, 1, 1](*values)

        return launch


def _picked(names: Sequence[str]) -> Callable[[dict], tuple]:
    """Returns what picks the values of these names."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda named: tuple([named[n] for n in names])


def jit(fn: Callable | None = None, **options) -> Callable:
    """Makes a kernel of a function, as `triton.jit` does: one that is launched faster, or an interpreted one."""
    if fn is None:
        return lambda fn: jit(fn, **options)
    return triton.jit(fn, **options) if INTERPRETED else Kernel(fn, **options)
