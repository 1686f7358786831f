"""Samples of a batch, taken from tensors and put back in order, and tensors in another memory layout."""

from collections.abc import Sequence

import torch


def take(t: torch.Tensor, numbers: Sequence[int], dim: int = 0, empty: float | None = None) -> torch.Tensor:
    """Returns a copy of a tensor's samples, by their numbers along `dim`. At −1 there is no sample: `empty` fills its
    place, 0 in a tensor of integers; None: sample 0 does."""
    index = torch.tensor(list(numbers), device=t.device)
    out = t.index_select(dim, index.clamp(min=0))
    if empty is not None and bool((index < 0).any()):
        out.index_fill_(dim, (index < 0).nonzero().flatten(), empty if t.dtype.is_floating_point else 0)
    return out


def in_order(calls: Sequence[Sequence[int]], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the results of several calls, a row a sample, in the order of the samples' numbers; without those of
    places that had none."""
    held = [i for call in calls for i in call]
    return torch.cat(list(parts))[sorted((at for at, i in enumerate(held) if i >= 0), key=held.__getitem__)]


def in_larger(t: torch.Tensor, dims: Sequence[int], beside: int = 16) -> torch.Tensor:
    """Returns the same numbers as a slice of a larger tensor, with `beside` more before and behind along each of
    `dims`, all NaN; in a tensor of integers they repeat its first."""
    shape, at = list(t.shape), [slice(None)] * t.dim()
    for d in dims:
        shape[d] += 2 * beside
        at[d] = slice(beside, beside + t.shape[d])
    holds_nan = t.is_floating_point() or t.is_complex()
    larger = t.new_full(shape, float("nan") if holds_nan else int(t.flatten()[0]))
    larger[tuple(at)] = t
    return larger[tuple(at)]


def with_strides(t: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Returns the same numbers in memory of their own, with these strides; along one of 0 they are held once."""
    if t.numel() == 0:
        return t.clone()
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, strides))
    out = t.new_empty(extent).as_strided(t.shape, strides)
    if any(s == 0 and n > 1 for n, s in zip(t.shape, strides)):
        narrow = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
        out[narrow] = t[narrow]
    else:
        out.copy_(t)
    return out
