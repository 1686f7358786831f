"""The calls of a layout: what a model is given, and where the logical tokens lie in it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn

from bi_kernels.audit.layouts import spans
from bi_kernels.audit.localiser.tracing.geometry import Geometry, Tokens
from bi_kernels.model import Cache, Decoder, packed, padded

LAYOUTS = ("batch", "singles", "left_padded", "packed", "permuted", "micro_batches", "chunked", "decode")
CACHED = ("chunked", "decode")
OF_ANY = ("batch", "singles", "permuted", "left_padded", "micro_batches")  # of any other model
PACKS = ("sdpa", "eager", "flex_attention", "bi_kernels")  # attention that tells sequences by position ids; flash, too
IGNORED = -100
MASK = "attention_mask"


@dataclass
class Call:
    """One call of the model. run() returns its output; leaves: floating inputs, whose gradients are compared."""

    geometry: Geometry
    run: Callable[[], object]
    leaves: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Plan:
    """A layout of a batch. calls() yields its calls, each to be run before the next is asked for; other_padding: calls
    with other numbers in the padding; masks: names of masks in the batch."""

    layout: str
    tokens: Tokens
    calls: Callable[[], Iterator[Call]]
    trains: bool = True
    other_padding: Callable[[], Iterator[Call]] | None = None
    masks: tuple[str, ...] = ()


def name_of(model: nn.Module | Callable) -> str:
    kind = type(model).__name__
    return kind if isinstance(model, nn.Module) else getattr(model, "__name__", kind)


def plan(model, batch, layout: str, calls: Callable | None = None) -> Plan:
    """Returns the calls of a layout. Raises ValueError: a layout that the model does not support, a batch that is not
    what the model takes."""
    if not isinstance(layout, str):
        raise ValueError(f"layouts holds {layout!r}, expected names of layouts")
    if calls is not None:
        return _of_calls(model, batch, layout, calls)
    name, _, size = layout.partition(":")
    if name not in LAYOUTS or size and (name not in CACHED or not size.isdecimal() or not int(size)):
        raise ValueError(f"layouts holds {layout!r}, expected {', '.join(LAYOUTS)}, chunked:SIZE or decode:PREFILL")
    if isinstance(model, Decoder):
        return _of_decoder(model, batch, layout)
    if any(c.__name__ == "PreTrainedModel" for c in type(model).__mro__):
        return _of_transformers(model, batch, layout)
    return _of_any(model, batch, layout)


def grids(layout: str, tokens: Tokens, width: int = 0) -> Iterator[tuple[list[int], np.ndarray, np.ndarray | None]]:
    """Yields for each call its samples, the grid of its tokens and, in a layout with a cache, the tokens in that, this
    call's included. width: to which samples are padded; 0 packs them in one row."""
    name, _, size = layout.partition(":")
    own = spans(tokens.lengths)
    every, third = [*range(len(own))], max(1, len(own) // 3)
    if name in CACHED:
        first, more = (int(size or 1), 1) if name == "decode" else (int(size or 7),) * 2
        for i, s in enumerate(own):
            ends = [*range(first, len(s), more), len(s)]
            yield from (([i], s[None, at:end], s[None, :end]) for at, end in zip([0, *ends], ends))
        return
    split = {"permuted": [every[1::2][::-1] + every[::2]], "singles": [[i] for i in every]}
    split["micro_batches"] = [every[:third], every[third:]]
    for samples in filter(None, split.get(name, [every])):
        grid = np.full((len(samples), width), -1) if width else np.concatenate([own[i] for i in samples])[None]
        for row, i in zip(grid, samples if width else ()):
            n = tokens.lengths[i]
            row[slice(width - n, width) if name == "left_padded" else slice(n)] = own[i]
        yield samples, grid, None


def width_of(model, tokens: Tokens) -> int:
    """Returns a width to pad to that no size of the model equals, and by whose places none can be divided."""
    held = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    config = getattr(model, "config", None)
    sizes = {n for t in held for n in t.shape}
    sizes |= {v for v in (vars(config).values() if config else ()) if type(v) is int}
    width, count = max(tokens.lengths) + 1, len(tokens.lengths)
    while width in sizes or width == count or any(n % (width * count) == 0 for n in sizes if n > 0):
        width += 1
    return width


def _token_ids(model, batch, vocab: int, device) -> tuple[Tokens, Callable]:
    """Returns the tokens of a batch of ids, and what lays (ids, targets) out on a grid."""
    samples = list(batch) if isinstance(batch, list | tuple | torch.Tensor) else []
    right = lambda s: isinstance(s, torch.Tensor) and s.dim() == 1 and len(s) and not s.is_floating_point()
    if not samples or not all(map(right, samples)):
        expected = f"expected for {type(model).__name__} a list of 1-D tensors of token ids"
        raise ValueError(f"batch is a {type(batch).__name__}, {expected}")
    if any(int(s.min()) < 0 or int(s.max()) >= vocab for s in samples):
        raise ValueError(f"batch holds token ids outside 0 to {vocab - 1}, the model's vocabulary")
    ids = torch.cat(samples).cpu()
    following = torch.cat([s.roll(-1) for s in samples]).cpu()  # every token has a target, that of a single one too

    def lay(grid: np.ndarray) -> tuple[torch.Tensor, ...]:
        at = torch.from_numpy(grid)
        of = ((ids, 0), (following, IGNORED))
        return tuple(flat[at.clamp(min=0)].masked_fill(at < 0, fill).to(device) for flat, fill in of)

    return Tokens(tuple(map(len, samples))), lay


def _of_decoder(model: Decoder, batch, layout: str) -> Plan:
    device, name = model.embedding.device, layout.partition(":")[0]
    tokens, lay = _token_ids(model, batch, model.config.vocab, device)
    pads = name in ("batch", "left_padded", "micro_batches")

    def calls() -> Iterator[Call]:
        for samples, grid, cached in grids(layout, tokens, width_of(model, tokens) if pads else 0):
            lengths, cache = [tokens.lengths[i] for i in samples], ()
            ids, targets = lay(grid if pads or cached is not None else grid[0])
            if cached is not None:
                if cached.size == grid.size:
                    held = Cache(model.config, 1, lengths[0], model.embedding)
                rows, cache = held.rows(grid.size), (held,)
                cached = np.pad(cached, ((0, 0), (0, held.capacity + 1 - cached.size)), constant_values=-1)
            elif pads:
                rows = padded(lengths, grid.shape[1], device, name == "left_padded", samples)
            else:
                rows = packed(lengths, device, samples)
            yield Call(Geometry(grid, tokens, cached), partial(model.logprobs, ids, targets, rows, *cache))

    return Plan(layout, tokens, calls, trains=name not in CACHED)


def _of_transformers(model, batch, layout: str) -> Plan:
    device, name = model.device, layout.partition(":")[0]
    tokens, lay = _token_ids(model, batch, model.config.vocab_size, device)
    attention = getattr(model.config, "_attn_implementation", "")
    if name == "packed" and "flash" not in attention and attention not in PACKS:
        raise ValueError(f"layouts holds 'packed', which attention of Transformers' {attention!r} does not support")
    pads = name not in ("packed", "singles")

    def logprob(ids, targets, **more):
        logits = model(input_ids=ids, **more).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return -loss.view(targets.shape)

    def calls() -> Iterator[Call]:
        for _, grid, cached in grids(layout, tokens, width_of(model, tokens) if pads else 0):
            more = {"use_cache": cached is not None}
            if cached is not None:
                from transformers import DynamicCache  # noqa: PLC0415 (the user's model has loaded it)

                if cached.size == grid.size:
                    held = DynamicCache(config=model.config)
                more["past_key_values"] = held
            elif pads:
                more[MASK] = torch.from_numpy(grid >= 0).long().to(device)
                if name == "left_padded":
                    more["position_ids"] = (more[MASK].cumsum(1) - 1).clamp(min=0)
            if name == "packed" or cached is not None:
                more["position_ids"] = torch.from_numpy(tokens.positions()[grid]).to(device)
            yield Call(Geometry(grid, tokens, cached), partial(logprob, *lay(grid), **more))

    return Plan(layout, tokens, calls, trains=name not in CACHED)


def _of_any(model, batch, layout: str) -> Plan:
    if layout not in OF_ANY:
        said = f"layouts holds {layout!r}, which {name_of(model)} does not support"
        raise ValueError(f"{said}; without calls= there are {', '.join(OF_ANY)}")
    given = batch if isinstance(batch, dict) else {"": batch}
    first = next((v for v in given.values() if isinstance(v, list | torch.Tensor)), None)
    if first is None or len(first) < 1 or not all(isinstance(v, torch.Tensor) for v in first):
        raise ValueError(f"batch is a {type(batch).__name__}, expected a tensor, a list of tensors, or a dict of such")
    sampled = lambda v: isinstance(v, list) or isinstance(v, torch.Tensor) and v.dim() and len(v) == len(first)
    split = {k: [*v] for k, v in given.items() if sampled(v)}
    if any(len(v) != len(first) for v in split.values()):
        raise ValueError(f"batch holds {sorted({len(v) for v in split.values()})} samples, expected one number of them")
    tokens = Tokens(tuple(len(t) if t.dim() >= (2 if t.is_floating_point() else 1) else 1 for t in first))
    ragged, masks = len(set(tokens.lengths)) > 1, tuple(k for k in split if "mask" in k)

    def calls(filled: int = 0) -> Iterator[Call]:
        width = 0 if layout == "singles" else width_of(model, tokens) if ragged else tokens.lengths[0]
        for samples, grid, _ in grids(layout, tokens, width):

            def laid(values: list[torch.Tensor], fill: int) -> torch.Tensor:
                rows = []
                for i in samples:
                    t, n = values[i], tokens.lengths[i]
                    if ragged and t.dim() and len(t) == n:
                        hole = grid.shape[1] - n
                        ends = [hole, 0] if layout == "left_padded" else [0, hole]
                        t = nn.functional.pad(t, [0, 0] * (t.dim() - 1) + ends, value=fill)
                    rows.append(t)
                return torch.stack(rows)

            named = {k: laid(split[k], filled * (k not in masks)) if k in split else v for k, v in given.items()}
            leaves = []
            for k in split:
                if torch.is_grad_enabled() and named[k].is_floating_point():
                    leaves.append(named[k].requires_grad_())
                    named[k] = named[k].clone()  # so that it may be written into
            positional = [named.pop("")] if "" in named else []
            yield Call(Geometry(grid, tokens), partial(model, *positional, **named), leaves)

    other = partial(calls, 1) if ragged and layout != "singles" else None
    return Plan(layout, tokens, calls, other_padding=other, masks=masks)


def _of_calls(model, batch, layout: str, calls: Callable) -> Plan:
    """Returns the plan of a packing of the user's own."""
    made = list(calls(batch, layout))
    right = lambda call: isinstance(call, tuple) and len(call) == 3 and isinstance(call[2], torch.Tensor)
    if not all(right(call) and call[2].shape[-1:] == (2,) for call in made):
        raise ValueError("calls returned something else than (args, kwargs, tokens), tokens of shape (…, 2)")
    every = torch.cat([at.reshape(-1, 2).cpu() for *_, at in made])
    sample, position = every[every[:, 0] >= 0].unbind(1)
    lengths = torch.zeros(int(sample.max()) + 1, dtype=torch.long).scatter_reduce_(0, sample, position + 1, "amax")
    tokens = Tokens(tuple(lengths.tolist()))
    if len(set(zip(sample.tolist(), position.tolist()))) != tokens.count:
        raise ValueError(f"calls: layout {layout!r} holds {len(sample)} tokens, expected {tokens.count} different ones")
    starts = torch.tensor([0, *tokens.lengths]).cumsum(0)

    def run() -> Iterator[Call]:
        for args, kwargs, at in calls(batch, layout):
            sample, position = at.cpu().unbind(-1)
            number = torch.where(sample >= 0, starts[sample.clamp(min=0)] + position, -1).numpy()
            grid = number.reshape(-1, number.shape[-1] if number.ndim else 1)
            yield Call(Geometry(grid, tokens), partial(model, *args, **kwargs))

    return Plan(layout, tokens, run)
