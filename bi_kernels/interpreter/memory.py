"""The memory that a launch was given: what a kernel reads or writes beyond it raises, also what no result holds."""

import numpy as np
from triton.runtime import interpreter as stock
from triton.tools.tensor_descriptor import TensorDescriptor


def _tensors(value) -> list:
    """Returns the tensors of a kernel's argument, as Triton takes them: itself, in a tuple, of a descriptor."""
    if isinstance(value, tuple):
        return [t for part in value for t in _tensors(part)]
    value = value.base if isinstance(value, TensorDescriptor) else value
    return [stock._unwrap_tensor(value)] if hasattr(value, "data_ptr") else []


class Memory:
    """The storages of a launch's tensors, of which a view may be a part; known: False where it has others too."""

    def __init__(self, arguments: dict[str, object]):
        self.spans, self.empty, self.known = [], [], True
        for name, t in ((name, t) for name, value in arguments.items() for t in _tensors(value)):
            try:
                storage = t.untyped_storage()
                start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            except RuntimeError:  # of a tensor that wraps another
                start = end = 0
            if start < end:
                self.spans.append((start, end, name))
            else:
                self.empty.append(name)
            self.known &= not t.numel() or start <= t.data_ptr() < end

    def holds(self, first: int, last: int, size: int) -> bool:
        """Tells whether all from `first` to `size` bytes at `last` is one tensor's, or nothing is known."""
        return not self.known or any(start <= first and last + size <= end for start, end, _ in self.spans)

    def check(self, pointers: np.ndarray, size: int) -> None:
        """Raises IndexError unless the `size` bytes at each of `pointers` are a tensor's."""
        beyond = np.ones(pointers.shape, bool)
        for start, end, _ in self.spans:
            beyond &= (pointers < start) | (pointers > end - size)
        if beyond.any():
            ends = int(pointers[beyond].min()), int(pointers[beyond].max())
            raise IndexError(max(self._nearest(at, size) for at in ends)[1])

    def _nearest(self, at: int, size: int) -> tuple[int, str]:
        """Returns how far an address is from the nearest tensor, in bytes, and says so."""
        without = f"; without memory: {', '.join(self.empty)}" if self.empty else ""
        if not self.spans:
            return 0, f"the kernel reads or writes memory, and was given none{without}"
        away, start, name = min((max(start - at, at + size - end), start, name) for start, end, name in self.spans)
        side = "before the start" if at < start else "beyond the end"
        place = f"{away} bytes {side} of the memory of {name}"
        return away, f"the kernel reads or writes {place}, the nearest tensor{without}"
