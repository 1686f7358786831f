"""What a callable returned: its tensors, and its numbers as tensors, in lists, dicts and dataclasses, nested too."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

NUMBERS = bool, int, float, complex, np.generic


def leaves(y, samples: int = 0) -> list:
    """Returns the tensors in y, in order, and whatever else it holds. A number, an array, and a list of numbers is one
    tensor each; with `samples`, so is a list of one entry for each of so many samples."""
    if isinstance(y, torch.Tensor):
        return [y]
    if isinstance(y, (np.ndarray, *NUMBERS)):
        return [_tensor(y)]
    if isinstance(y, Mapping):
        return _joined(y.values(), samples)
    if dataclasses.is_dataclass(y) and not isinstance(y, type):
        return _joined([getattr(y, f.name) for f in dataclasses.fields(y)], samples)
    if not isinstance(y, (list, tuple)):
        found = [] if y is None else tree_leaves(y)
        return found if len(found) == 1 and found[0] is y else _joined(found, samples)
    if y and all(isinstance(v, (list, tuple, *NUMBERS)) for v in y):
        try:
            return [_tensor(y)]
        except (TypeError, ValueError, RuntimeError):  # ragged, or tensors within
            pass
    if samples and len(y) == samples and isinstance(y, list):
        return _stacked([leaves(v) for v in y])
    return _joined(y, samples)


def _tensor(y) -> torch.Tensor | object:
    array = np.asarray(y)
    return torch.from_numpy(array.copy()) if array.dtype.kind in "biufc" else y


def _joined(parts, samples: int) -> list:
    return [leaf for part in parts for leaf in leaves(part, samples)]


def _stacked(entries: Sequence[list]) -> list:
    """Returns a tensor for each place of the samples' entries. Raises ValueError where these are not alike."""
    kinds = {tuple((v.shape, v.dtype) if isinstance(v, torch.Tensor) else type(v) for v in entry) for entry in entries}
    if len(kinds) > 1:
        raise ValueError("it returns a list of one entry a sample, whose shapes differ; expected equal shapes")
    return [torch.stack(column) if isinstance(column[0], torch.Tensor) else column[0] for column in zip(*entries)]
