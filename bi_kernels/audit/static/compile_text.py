"""Compiles one kernel of a file's text, for a process without Triton's interpreter."""

import importlib
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.audit.kernel_error import KernelError, kernel_error
from bi_kernels.audit.static import binary
from bi_kernels.audit.static.function import without_choosers
from bi_kernels.audit.static.launches import Variant

CELL = "cell.py"  # the name under which assembly knows the kernel's file


@dataclass
class Compiled:
    """A compiled kernel: registers, spills, shared memory and assembly."""

    variant: Variant
    ptx: str
    sass: str
    source: list[str]  # of the file in which the kernel stands
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # after the launch, where there was a GPU


def compiled(name: str, text: str, grid: tuple[int, ...], given: dict) -> Compiled | KernelError:
    """Compiles the kernel `name` of a file that holds `text`, in a process without the interpreter.

    Runs it on `given`, where there is a CUDA device. Returns the compiler's error.
    """
    gpu = torch.cuda.is_available()
    if not gpu:
        binary.without_gpu()
    given = copied(given, "cuda") if gpu else given
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CELL).write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        kernel = without_choosers(getattr(importlib.import_module(CELL.removesuffix(".py")), name))
        try:
            made = kernel.run(grid=grid, warmup=not gpu, **given)
        except Exception as error:
            if found := kernel_error(error):
                return found
            raise
        sass = binary.run_tool("nvdisasm", made.asm["cubin"], "-g", "-c")
        tensors = {k: t.cpu() for k, t in given.items() if gpu and isinstance(t, torch.Tensor)}
        return Compiled(binary.read([made])[0], made.asm["ptx"], sass, text.splitlines(), tensors)


def copied(given: dict, device: str = "cpu") -> dict:
    """Returns arguments whose tensors are copies: views of one storage stay views of one."""
    storages: dict = {}

    def copy(value):
        if isinstance(value, tuple):
            return tuple(map(copy, value))
        if isinstance(value, TensorDescriptor):
            return replace(value, base=copy(value.base))
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            storages[storage.data_ptr()] = whole.clone().to(device).untyped_storage()
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=device).set_(storages[storage.data_ptr()], *place)

    return {k: copy(v) for k, v in given.items()}
