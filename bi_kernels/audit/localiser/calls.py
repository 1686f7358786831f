"""The calls of a layout: what a model is given, and where the logical tokens lie in it."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from bi_kernels.audit.localiser.geometry import Geometry, Tokens
from bi_kernels.grads import MainGrads
from bi_kernels.model import Cache, Decoder, packed, padded

LAYOUTS = ("batch", "singles", "left_padded", "packed", "permuted", "micro_batches", "chunked", "decode")
IGNORED = -100


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


def samples_of(what: str, batch) -> list[torch.Tensor]:
    """Returns the token ids of each sample; ValueError for anything else."""
    samples = list(batch) if isinstance(batch, list | tuple | torch.Tensor) else []
    if not samples or not all(
        isinstance(s, torch.Tensor) and s.dim() == 1 and len(s) and not s.is_floating_point() for s in samples
    ):
        raise ValueError(f"batch is a {type(batch).__name__}, expected for {what} a list of 1-D tensors of token ids")
    return samples


def _parts(name: str, tokens: Tokens) -> list[list[int]]:
    """Returns the samples of each call of a layout without a cache."""
    every = list(range(len(tokens.lengths)))
    third = max(1, len(every) // 3)
    if name == "permuted":
        return [every[1::2][::-1] + every[::2]]
    if name == "micro_batches":
        return [p for p in (every[:third], every[third:]) if p]
    return [[i] for i in every] if name == "singles" else [every]


def width_of(model, tokens: Tokens) -> int:
    """Returns a width to pad to that no size of the model could be mistaken for."""
    shapes = [p.shape for p in model.parameters()] + [b.shape for b in model.buffers()] if _is_module(model) else []
    config = getattr(model, "config", None)
    sizes = {n for shape in shapes for n in shape} | {v for v in vars(config).values() if type(v) is int} if config else {
        n for shape in shapes for n in shape
    }
    width, count = max(tokens.lengths) + 1, len(tokens.lengths)
    while width in sizes or width == count or width * count in sizes:
        width += 1
    return width


def grid_of(tokens: Tokens, samples: Sequence[int], width: int, left: bool) -> np.ndarray:
    grid = np.full((len(samples), width), -1)
    for row, s in zip(grid, samples):
        own = tokens.of(s)
        row[slice(width - len(own), width) if left else slice(len(own))] = own
    return grid


def _laid(flat: torch.Tensor, grid: np.ndarray, fill: int, device) -> torch.Tensor:
    at = torch.from_numpy(grid)
    return flat[at.clamp(min=0)].masked_fill(at < 0, fill).to(device)


def plan(model, batch, layout: str, calls: Callable | None = None) -> Plan:
    """Returns the calls of a layout. Raises ValueError: a layout that the model does not support, a batch that is not
    what the model takes."""
    if not isinstance(layout, str):
        raise ValueError(f"layouts holds {layout!r}, expected names of layouts")
    if calls is not None:
        return _of_a_function(model, batch, layout, calls)
    name, _, size = layout.partition(":")
    if name not in LAYOUTS or size and (name != "chunked" or not size.isdecimal() or not int(size)):
        raise ValueError(f"layouts holds {layout!r}, expected {', '.join(LAYOUTS)} or chunked:SIZE")
    if isinstance(model, Decoder):
        return _of_decoder(model, batch, layout)
    if any(c.__name__ == "PreTrainedModel" for c in type(model).__mro__):
        return _of_transformers(model, batch, layout)
    return _of_any(model, batch, layout)


def _of_ids(model, batch, layout: str, device, vocab: int):
    samples = samples_of(type(model).__name__, batch)
    if any(int(s.min()) < 0 or int(s.max()) >= vocab for s in samples):
        raise ValueError(f"batch holds token ids outside 0 to {vocab - 1}, the model's vocabulary")
    tokens = Tokens(tuple(map(len, samples)))
    ids = torch.cat(samples).cpu()
    following = torch.cat([s.roll(-1) for s in samples]).cpu()  # every token has a target, that of a single one too
    lay = lambda grid: (_laid(ids, grid, 0, device), _laid(following, grid, IGNORED, device))
    size = int(layout.partition(":")[2] or 7) if layout.startswith("chunked") else 1
    return tokens, lay, size


def _chunks(tokens: Tokens, size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (sample, the tokens of its next chunk, its tokens so far)."""
    for s in range(len(tokens.lengths)):
        own = tokens.of(s)
        for at in range(0, len(own), size):
            yield s, own[at : at + size], own[: at + size]


def _of_decoder(model: Decoder, batch, layout: str) -> Plan:
    device, name = model.embedding.device, layout.partition(":")[0]
    tokens, lay, size = _of_ids(model, batch, layout, device, model.config.vocab)

    def whole() -> Iterator[Call]:
        for part in _parts(name, tokens):
            lengths = [tokens.lengths[i] for i in part]
            if name in ("batch", "left_padded", "micro_batches"):
                width = width_of(model, tokens)
                grid = grid_of(tokens, part, width, name == "left_padded")
                rows, shape = padded(lengths, width, device, name == "left_padded", part), grid
            else:
                grid = np.concatenate([tokens.of(i) for i in part])[None]
                rows, shape = packed(lengths, device, part), grid[0]
            ids, targets = lay(shape)
            yield Call(Geometry(grid, tokens), lambda: model.logprobs(ids, targets, rows))

    def cached() -> Iterator[Call]:
        for s, chunk, so_far in _chunks(tokens, size):
            if len(so_far) == len(chunk):
                cache = Cache(model.config, 1, tokens.lengths[s], model.embedding)
            keys = np.full(cache.capacity + 1, -1)
            keys[: len(so_far)] = so_far
            ids, targets = lay(chunk[None])
            run = lambda: model.logprobs(ids, targets, cache.rows(len(chunk)), cache)
            yield Call(Geometry(chunk[None], tokens, keys[None]), run)

    @contextlib.contextmanager
    def around():
        kept = [(p, {k: p.__dict__.pop(k, None) for k in ("main_grad", "embedding_main_grad")}) for p in model.parameters()]
        try:
            grads = MainGrads(model.parameters(), model.tied)
            yield grads.join
        finally:
            for p, attributes in kept:
                for k, v in attributes.items():
                    p.__dict__.pop(k, None)
                    if v is not None:
                        setattr(p, k, v)

    if name in ("chunked", "decode"):
        return Plan(layout, tokens, cached, trains=False)
    return Plan(layout, tokens, whole, around=around)


def _of_transformers(model, batch, layout: str) -> Plan:
    device, name = model.device, layout.partition(":")[0]
    tokens, lay, size = _of_ids(model, batch, layout, device, model.config.vocab_size)
    if name == "permuted":
        name = "permuted batch"
    attention = getattr(model.config, "_attn_implementation", "")
    if name == "packed" and "flash" not in attention and attention not in ("sdpa", "eager", "flex_attention"):
        raise ValueError(f"layouts holds 'packed', which attention of Transformers' {attention!r} does not support")

    def logprob(ids, targets, **more):
        logits = model(input_ids=ids, **more).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return -loss.view(targets.shape)

    def whole() -> Iterator[Call]:
        for part in _parts(name.split()[0], tokens):
            if name == "packed":
                grid = np.concatenate([tokens.of(i) for i in part])[None]
                at = torch.from_numpy(tokens.positions()[grid]).to(device)
                more = {"position_ids": at, "use_cache": False}
            elif name == "singles":
                grid, more = tokens.of(part[0])[None], {"use_cache": False}
            else:
                grid = grid_of(tokens, part, width_of(model, tokens), name == "left_padded")
                mask = torch.from_numpy(grid >= 0).long().to(device)
                more = {"attention_mask": mask, "use_cache": False}
                if name == "left_padded":
                    more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
            ids, targets = lay(grid)
            yield Call(Geometry(grid, tokens), lambda: logprob(ids, targets, **more))

    def cached() -> Iterator[Call]:
        from transformers import DynamicCache  # noqa: PLC0415 (the user's model has loaded it)

        for _, chunk, so_far in _chunks(tokens, size):
            if len(so_far) == len(chunk):
                cache = DynamicCache(config=model.config)
            ids, targets = lay(chunk[None])
            at = torch.arange(len(so_far) - len(chunk), len(so_far), device=device)[None]
            more = {"position_ids": at, "past_key_values": cache, "use_cache": True}
            run = lambda: logprob(ids, targets, **more)
            yield Call(Geometry(chunk[None], tokens, so_far[None]), run)

    if name in ("chunked", "decode"):
        return Plan(layout, tokens, cached, trains=False)
    return Plan(layout, tokens, whole)


def _is_module(model) -> bool:
    return isinstance(model, nn.Module)


def _of_any(model, batch, layout: str) -> Plan:
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

    def calls() -> Iterator[Call]:
        for part in _parts(layout, tokens):
            alone, left = layout == "singles", layout == "left_padded"
            width = tokens.lengths[part[0]] if alone or not ragged else width_of(model, tokens)

            def laid(values: list[torch.Tensor]) -> torch.Tensor:
                rows = []
                for i in part:
                    t, n = values[i], tokens.lengths[i]
                    if ragged and t.dim() and len(t) == n:
                        hole = t.new_zeros(width - n, *t.shape[1:])
                        t = torch.cat((hole, t) if left else (t, hole))
                    rows.append(t)
                return torch.stack(rows)

            named = {k: laid(split[k]) if k in split else v for k, v in given.items()}
            leaves = []
            for k in split:
                if torch.is_grad_enabled() and named[k].is_floating_point():
                    leaves.append(named[k].requires_grad_())
                    named[k] = named[k].clone()  # so that it may be written into
            positional = [named.pop("")] if "" in named else []
            geometry = Geometry(grid_of(tokens, part, width, left), tokens)
            yield Call(geometry, lambda: model(*positional, **named), leaves)

    return Plan(layout, tokens, calls)


def _of_a_function(model, batch, layout: str, calls: Callable) -> Plan:
    made = list(calls(batch, layout))
    pairs = []
    for one in made:
        if not isinstance(one, tuple) or len(one) != 3 or not isinstance(one[2], torch.Tensor) or one[2].shape[-1:] != (2,):
            raise ValueError("calls returned something else than (args, kwargs, tokens), tokens of shape (…, 2)")
        pairs.append(one[2].reshape(-1, 2).cpu())
    every = torch.cat(pairs)
    every = every[every[:, 0] >= 0]
    lengths = torch.zeros(int(every[:, 0].max()) + 1, dtype=torch.long).scatter_reduce_(0, every[:, 0], every[:, 1] + 1, "amax")
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
