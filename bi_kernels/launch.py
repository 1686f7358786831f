"""Launches kernels, without asking Triton again for arguments of a kind that it has compiled one for.

An op that is called often keeps a `Launch` for each shape, in a `cached` function; others call `launch`.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
from triton.runtime.jit import JITFunction

from bi_kernels import (
    checks,  # noqa: F401  (mends the interpreter before a kernel is defined)
    compat,
)

jit = triton.jit
cached = lru_cache(maxsize=4096)  # what a launch needs but its tensors, by what that follows from


class Launch:
    """A launch but for the tensors, and floats, that are the kernel's first parameters: the number of its device, which
    is the current one, its grid, the parameters that follow, and Triton's options. What was compiled is told apart by
    dtypes, alignment, and where None is given."""

    def __init__(self, kernel: JITFunction, device: int, grid: tuple[int, ...], *numbers, **named):
        self._kernel, self._grid, self._numbers, self._named = kernel, grid, numbers, named
        self._device, self._whole_grid = device, (*grid, 1, 1)[:3]
        self._tail = *numbers, *[named[n] for n in kernel.arg_names if n in named]
        self._compiled: dict[tuple, triton.compiler.CompiledKernel] = {}

    def __call__(self, *given) -> None:
        if not compat.is_direct():
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
            compat.launch_compiled(compiled, self._device, self._whole_grid, (*values, *self._tail))


_launch_of: Callable[..., Launch] = cached(Launch)


def launch(kernel: JITFunction, grid: tuple[int, ...], given: tuple, *numbers, **named) -> None:
    """Launches a kernel on the current device: given are the tensors, None and floats that are its first parameters,
    numbers those that follow, named the rest and Triton's options."""
    if compat.is_direct():
        _launch_of(kernel, torch.cuda.current_device(), grid, *numbers, **named)(*given)
    else:
        kernel[grid](*given, *numbers, **named)
