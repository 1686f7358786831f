"""Names the tensor elements that a kernel's pointers address."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

MOST = 4  # index ranges that are listed


@dataclass(frozen=True)
class Place:
    """The addresses of a tensor among a launch's arguments."""

    name: str
    start: int  # the address of its first element
    first: int  # its storage, in bytes
    last: int
    size: int  # bytes of an element
    strides: tuple[int, ...]

    def touched(self, pointers: np.ndarray) -> str:
        """Returns the elements at these addresses as index ranges, as in x[0, 0:48]; indices may lie beyond."""
        offsets = np.unique((pointers.astype(np.int64) - self.start) // self.size)
        order = sorted((d for d, stride in enumerate(self.strides) if stride), key=lambda d: -self.strides[d])
        points, rest = np.zeros((len(offsets), max(1, len(self.strides))), np.int64), offsets
        for d in order:
            points[:, d], rest = rest // self.strides[d], rest % self.strides[d]
        if rest.any() or not order:
            return f"{self.name}.flat[{_range(offsets)}]"
        found = [f"{self.name}[{box}]" for box in _boxes(points)]
        if len(found) <= MOST:
            return ", ".join(found)
        ends = ", ".join(_range(np.arange(points[:, d].min(), points[:, d].max() + 1)) for d in range(points.shape[1]))
        return f"{len(offsets)} elements in {self.name}[{ends}]"


def places(arguments: dict) -> list[Place]:
    """Returns the tensors of a launch's arguments, those of descriptors too."""
    found = []
    for name, value in arguments.items():
        t = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(t, torch.Tensor) and t.numel():
            first = t.untyped_storage().data_ptr()
            last = first + t.untyped_storage().nbytes()
            found.append(Place(name, t.data_ptr(), first, last, t.element_size(), tuple(t.stride())))
    return found


def where(known: Iterable[Place], pointers: np.ndarray, size: int) -> str:
    """Returns the elements at these addresses; those that no tensor holds count from the nearest one."""
    if not pointers.size:
        return "nothing: all lanes are masked"
    at = int(pointers.flat[0])
    away = lambda p: (max(p.first - at, at + size - p.last, 0), p.size != size, at < p.start, abs(at - p.start))
    nearest = min(known, key=away, default=None)
    return nearest.touched(pointers) if nearest else "memory that is no argument's"


def _range(numbers: np.ndarray) -> str:
    """Returns '3', '0:16', '0:64:8', or '0, 5, 9' and how many more."""
    first, last, steps = int(numbers[0]), int(numbers[-1]), np.unique(np.diff(numbers))
    if len(numbers) == 1:
        return f"{first}"
    if len(steps) == 1:
        return f"{first}:{last + 1}" + f":{steps[0]}" * int(steps[0] > 1)
    listed = ", ".join(map(str, numbers[:MOST]))
    return f"({listed}{', …' * (len(numbers) > MOST)})"


def _boxes(points: np.ndarray) -> list[str]:
    """Returns index ranges that together hold all points, one a row; neighbours of equal ranges are one."""
    if points.shape[1] == 1:
        return [_range(np.unique(points[:, 0]))]
    inner: dict[tuple[str, ...], list[int]] = {}
    points = points[np.argsort(points[:, 0], kind="stable")]
    values, starts = np.unique(points[:, 0], return_index=True)
    for value, part in zip(values, np.split(points, starts[1:])):
        inner.setdefault(tuple(_boxes(part[:, 1:])), []).append(int(value))
    return [f"{_range(np.array(outer))}, {box}" for boxes, outer in inner.items() for box in boxes]
