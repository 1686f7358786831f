"""The memory that a launch was given: what a kernel reads or writes beyond it raises, also what no result holds."""

import numpy as np
import torch
from triton.runtime import interpreter as stock
from triton.tools.tensor_descriptor import TensorDescriptor


def _tensors(value) -> list:
    """Returns the tensors of a kernel's argument, as Triton takes them: itself, in a tuple, of a descriptor."""
    if isinstance(value, tuple):
        return [t for part in value for t in _tensors(part)]
    value = value.base if isinstance(value, TensorDescriptor) else value
    return [stock._unwrap_tensor(value)] if hasattr(value, "data_ptr") else []


class Memory:
    """The storages of a launch's tensors, of which a view may be a part."""

    def __init__(self, arguments: dict[str, object]):
        tensors = [(name, t) for name, value in arguments.items() for t in _tensors(value)]
        self.spans, self.known = [], all(isinstance(t, torch.Tensor) for _, t in tensors)
        for name, t in tensors if self.known else ():
            if (storage := t.untyped_storage()).nbytes():
                self.spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name))

    def check(self, first: int, last: int, size: int, pointers: np.ndarray | None = None) -> None:
        """Raises IndexError unless the `size` bytes at each of `pointers`, which are from `first` to `last`, are a
        tensor's; without them, unless all between are."""
        if not self.known or any(start <= first and last + size <= end for start, end, _ in self.spans):
            return
        if pointers is not None:
            beyond = np.ones(pointers.shape, bool)
            for start, end, _ in self.spans:
                beyond &= (pointers < start) | (pointers > max(end - size, 0))
            if not beyond.any():
                return
            first, last = int(pointers[beyond].min()), int(pointers[beyond].max())
        raise IndexError(max(self._nearest(at, size) for at in (first, last))[1])

    def _nearest(self, at: int, size: int) -> tuple[int, str]:
        """Returns how far an address is from the nearest tensor, in bytes, and says so."""
        if not self.spans:
            return 0, "the kernel reads or writes memory and was given no tensor"
        away, start, name = min((max(start - at, at + size - end), start, name) for start, end, name in self.spans)
        side = "before the start" if at < start else "beyond the end"
        return away, f"the kernel reads or writes {away} bytes {side} of the memory of {name}, the nearest tensor"
