"""Launches a Triton kernel that has run before through its compiled form.

`kernel[grid](...)` binds its arguments, and works out by each what the kernel is specialised for, on every call. That
takes the CPU several times as long as the launch itself, which a model in eager mode waits for. Kernels made by `jit`
tell calls apart by what Triton compiles by, and ask Triton once for each.
"""

from collections.abc import Callable
from functools import cached_property

import torch
import triton
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.checks import INTERPRETED

_RUN = JITFunction.run  # whoever watches launches replaces it, and is shown every one
CONSTANT, SPECIALISED, TYPE = range(3)  # what Triton compiles by: the value, what it is a multiple of, its type alone


def _kind(value, role: int):
    """Returns what Triton compiles by of an argument: calls whose arguments are of one kind share a binary."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if role == CONSTANT or value is None:
        return value
    if type(value) is int:
        size = -(2**31) <= value < 2**31, value < 2**63
        return size if role == TYPE else (*size, value % 16 == 0, value == 1)
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return type(value)


class Kernel(JITFunction):
    """A kernel that keeps what was compiled of it, by the kinds of its arguments. Its options are constants of their
    launcher."""

    @cached_property
    def _roles(self) -> list[int]:
        return [CONSTANT if p.is_constexpr else TYPE if p.do_not_specialize else SPECIALISED for p in self.params]

    @cached_property
    def _compiled(self) -> dict:
        return {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        """Returns what launches a program for each place in the grid; arguments in the order of the parameters, the
        last ones and Triton's options (num_warps, …) by name, tensors on the current device."""
        if JITFunction.run is not _RUN:
            return super().__getitem__(grid)

        def launch(*args, **named) -> None:
            values = *args, *[named.pop(name) for name in self.arg_names[len(args) :]]
            kinds = tuple([_kind(value, role) for value, role in zip(values, self._roles)])
            key = torch.cuda.current_device(), kinds, tuple(named.items())
            compiled = self._compiled.get(key)
            if compiled is None:
                self._compiled[key] = self.run(*values, grid=grid, warmup=False, **named)
            else:
                compiled[*grid, 1, 1](*values)

        return launch


def jit(fn: Callable | None = None, **options) -> Callable:
    """Makes a kernel of a function, as `triton.jit` does: one that is launched faster, or an interpreted one."""
    if fn is None:
        return lambda fn: jit(fn, **options)
    return triton.jit(fn, **options) if INTERPRETED else Kernel(fn, **options)
