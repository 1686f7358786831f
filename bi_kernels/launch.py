"""Launches kernels, without asking Triton again for arguments of a kind that it has compiled one for.

An op that is called often keeps a `Launch` for each shape, in a `cached` function; others call `kernel[grid](...)`.
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
            self._kernel.run(*given, *self._numbers, grid=self._grid, warmup=False, **self._named)
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
            self._compiled[key] = self._kernel.run(*given, *self._numbers, grid=self._grid, warmup=False, **self._named)
        else:
            compat.launch_compiled(compiled, self._device, self._whole_grid, (*values, *self._tail))


_launch_of: Callable[..., Launch] = cached(Launch)


class Kernel(JITFunction):
    """A kernel whose first parameters are tensors, None and floats, and the numbers after them integers."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        if not compat.is_direct():
            return super().__getitem__(grid)

        def launch(*args, **named) -> None:
            count = next((i for i, a in enumerate(args) if type(a) is int), len(args))
            _launch_of(self, torch.cuda.current_device(), grid, *args[count:], **named)(*args[:count])

        return launch


def jit(fn: Callable | None = None, **options) -> Callable:
    """Makes a kernel of a function, as `triton.jit` does: one that is launched faster, or an interpreted one."""
    if fn is None:
        return lambda fn: jit(fn, **options)
    return triton.jit(fn, **options) if compat.INTERPRETED else Kernel(fn, **options)
