"""A layout of a batch as calls, and those of a module or function that nothing else is known of."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn

from bi_kernels.audit.localiser.watched.geometry import Geometry, Tokens

MASK = "attention_mask"


@dataclass
class Call:
    """One call of the model: run() returns its output."""

    geometry: Geometry
    run: Callable[[], object]
    leaves: list[torch.Tensor] = field(default_factory=list)  # floating inputs, whose gradients are compared


@dataclass
class Plan:
    """A layout of a batch: calls() yields its calls in order, each to be run before the next is asked for."""

    layout: str
    tokens: Tokens
    calls: Callable[[], Iterator[Call]]
    trains: bool = True
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # yields what ends a step, if any
    other_padding: Callable[[], Iterator[Call]] | None = None  # the calls with other numbers in the padding, if any
    masks: tuple[str, ...] = ()  # arguments that are masks, by name


def samples_of(what: str, batch) -> list[torch.Tensor]:
    """Returns the token ids of each sample; ValueError for anything else."""
    samples = list(batch) if isinstance(batch, list | tuple | torch.Tensor) else []
    if not samples or not all(
        isinstance(s, torch.Tensor) and s.dim() == 1 and len(s) and not s.is_floating_point() for s in samples
    ):
        raise ValueError(f"batch is a {type(batch).__name__}, expected for {what} a list of 1-D tensors of token ids")
    return samples


def parts_of(name: str, tokens: Tokens) -> list[list[int]]:
    """Returns the samples of each call of a layout without a cache."""
    every = list(range(len(tokens.lengths)))
    third = max(1, len(every) // 3)
    if name == "permuted":
        return [every[1::2][::-1] + every[::2]]
    if name == "micro_batches":
        return [p for p in (every[:third], every[third:]) if p]
    return [[i] for i in every] if name == "singles" else [every]


def width_of(model, tokens: Tokens) -> int:
    """Returns a width to pad to that no size of the model equals, and by whose places none can be divided."""
    shapes = [p.shape for p in model.parameters()] + [b.shape for b in model.buffers()] if _is_module(model) else []
    config = getattr(model, "config", None)
    sizes = (
        {n for shape in shapes for n in shape} | {v for v in vars(config).values() if type(v) is int}
        if config
        else {n for shape in shapes for n in shape}
    )
    width, count = max(tokens.lengths) + 1, len(tokens.lengths)
    while width in sizes or width == count or any(n % (width * count) == 0 for n in sizes if n > 0):
        width += 1
    return width


def grid_of(tokens: Tokens, samples: Sequence[int], width: int, left: bool) -> np.ndarray:
    grid = np.full((len(samples), width), -1)
    for row, s in zip(grid, samples):
        own = tokens.of(s)
        row[slice(width - len(own), width) if left else slice(len(own))] = own
    return grid


def _is_module(model) -> bool:
    return isinstance(model, nn.Module)


def of_any(model, batch, layout: str) -> Plan:
    supported = ("batch", "singles", "permuted", "left_padded", "micro_batches")
    kind = type(model).__name__ if _is_module(model) else getattr(model, "__name__", type(model).__name__)
    if layout not in supported:
        raise ValueError(
            f"layouts holds {layout!r}, which {kind} does not support; without calls= there are {', '.join(supported)}"
        )
    given = batch if isinstance(batch, dict) else {"": batch}
    first = next((v for v in given.values() if isinstance(v, list | torch.Tensor)), None)
    if first is None or len(first) < 1 or not all(isinstance(v, torch.Tensor) for v in first):
        raise ValueError(f"batch is a {type(batch).__name__}, expected a tensor, a list of tensors, or a dict of such")
    count = len(first)
    split = {
        k: [*v]
        for k, v in given.items()
        if isinstance(v, list) or isinstance(v, torch.Tensor) and v.dim() and len(v) == count
    }
    if any(len(v) != count for v in split.values()):
        raise ValueError(f"batch holds {sorted({len(v) for v in split.values()})} samples, expected one number of them")
    placed = lambda t: t.dim() >= (2 if t.is_floating_point() else 1)
    tokens = Tokens(tuple(len(t) if placed(t) else 1 for t in first))
    ragged = len(set(tokens.lengths)) > 1

    masks = tuple(k for k in split if "mask" in k)

    def calls(filled: int = 0) -> Iterator[Call]:
        for part in parts_of(layout, tokens):
            alone, left = layout == "singles", layout == "left_padded"
            width = tokens.lengths[part[0]] if alone or not ragged else width_of(model, tokens)

            def laid(values: list[torch.Tensor], fill: int) -> torch.Tensor:
                rows = []
                for i in part:
                    t, n = values[i], tokens.lengths[i]
                    if ragged and t.dim() and len(t) == n:
                        hole = t.new_full((width - n, *t.shape[1:]), fill)
                        t = torch.cat((hole, t) if left else (t, hole))
                    rows.append(t)
                return torch.stack(rows)

            named = {k: laid(split[k], filled * (k not in masks)) if k in split else v for k, v in given.items()}
            leaves = []
            for k in split:
                if torch.is_grad_enabled() and named[k].is_floating_point():
                    leaves.append(named[k].requires_grad_())
                    named[k] = named[k].clone()  # so that it may be written into
            positional = [named.pop("")] if "" in named else []
            geometry = Geometry(grid_of(tokens, part, width, left), tokens)
            yield Call(geometry, lambda: model(*positional, **named), leaves)

    other = partial(calls, 1) if ragged and layout != "singles" else None
    return Plan(layout, tokens, calls, other_padding=other, masks=masks)


def of_a_function(model, batch, layout: str, calls: Callable) -> Plan:
    made = list(calls(batch, layout))
    pairs = []
    for one in made:
        if (
            not isinstance(one, tuple)
            or len(one) != 3
            or not isinstance(one[2], torch.Tensor)
            or one[2].shape[-1:] != (2,)
        ):
            raise ValueError("calls returned something else than (args, kwargs, tokens), tokens of shape (…, 2)")
        pairs.append(one[2].reshape(-1, 2).cpu())
    every = torch.cat(pairs)
    every = every[every[:, 0] >= 0]
    lengths = torch.zeros(int(every[:, 0].max()) + 1, dtype=torch.long).scatter_reduce_(
        0, every[:, 0], every[:, 1] + 1, "amax"
    )
    tokens = Tokens(tuple(lengths.tolist()))
    if len(torch.unique(every, dim=0)) != tokens.count:
        raise ValueError(f"calls: layout {layout!r} holds {len(every)} tokens, expected {tokens.count} different ones")
    starts = torch.tensor([0, *tokens.lengths]).cumsum(0)

    def run() -> Iterator[Call]:
        for args, kwargs, at in made:
            at = at.cpu()
            number = torch.where(at[..., 0] >= 0, starts[at[..., 0].clamp(min=0)] + at[..., 1], -1)
            grid = number.numpy().reshape(-1, number.shape[-1] if number.dim() else 1)
            yield Call(Geometry(grid, tokens), lambda: model(*args, **kwargs))

    return Plan(layout, tokens, run)
