"""The calls of a layout: what a model is given, and where the logical tokens lie in it."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from bi_kernels.audit.localiser.watched.geometry import Geometry, Tokens
from bi_kernels.audit.localiser.watched.plans import (
    Call,
    Plan,
    grid_of,
    of_a_function,
    of_any,
    parts_of,
    samples_of,
    width_of,
)
from bi_kernels.grads import MainGrads
from bi_kernels.model import Cache, Decoder, packed, padded

LAYOUTS = ("batch", "singles", "left_padded", "packed", "permuted", "micro_batches", "chunked", "decode")
PACKS = ("sdpa", "eager", "flex_attention", "bi_kernels")  # attention that tells sequences by position ids; flash, too
IGNORED = -100


def _laid(flat: torch.Tensor, grid: np.ndarray, fill: int, device) -> torch.Tensor:
    at = torch.from_numpy(grid)
    return flat[at.clamp(min=0)].masked_fill(at < 0, fill).to(device)


def plan(model, batch, layout: str, calls: Callable | None = None) -> Plan:
    """Returns the calls of a layout. Raises ValueError: a layout that the model does not support, a batch that is not
    what the model takes."""
    if not isinstance(layout, str):
        raise ValueError(f"layouts holds {layout!r}, expected names of layouts")
    if calls is not None:
        return of_a_function(model, batch, layout, calls)
    name, _, size = layout.partition(":")
    if name not in LAYOUTS or size and (name != "chunked" or not size.isdecimal() or not int(size)):
        raise ValueError(f"layouts holds {layout!r}, expected {', '.join(LAYOUTS)} or chunked:SIZE")
    if isinstance(model, Decoder):
        return _of_decoder(model, batch, layout)
    if any(c.__name__ == "PreTrainedModel" for c in type(model).__mro__):
        return _of_transformers(model, batch, layout)
    return of_any(model, batch, layout)


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
        for part in parts_of(name, tokens):
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
        kept = [
            (p, {k: p.__dict__.pop(k, None) for k in ("main_grad", "embedding_main_grad")}) for p in model.parameters()
        ]
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
    if name == "packed" and "flash" not in attention and attention not in PACKS:
        raise ValueError(f"layouts holds 'packed', which attention of Transformers' {attention!r} does not support")

    def logprob(ids, targets, **more):
        logits = model(input_ids=ids, **more).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return -loss.view(targets.shape)

    def whole() -> Iterator[Call]:
        for part in parts_of(name.split()[0], tokens):
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
