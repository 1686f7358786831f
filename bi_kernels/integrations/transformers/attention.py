"""Attention as Transformers calls it: dense, padded, packed, behind any of its caches, and in continuous batching."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from bi_kernels.checks import can_wait
from bi_kernels.integrations.transformers.layout import Call, current, trimmed
from bi_kernels.ops.attention.attention import Arguments, attend
from bi_kernels.ops.attention.schedule import Sequences

NAME = "bi_kernels"
REFUSED = "position_bias", "indices", "block_indices"  # arguments of attention that say more than we compute
CHUNK = "bi_kernels_chunk"  # of a mask: the tokens of a chunk
CHUNKED = "chunked_overlay.<locals>.inner_mask"
KNOWN_MASKS = {"causal_mask_function", "and_masks.<locals>.and_mask", CHUNKED} | {
    f"{name}.<locals>.inner_mask"
    for name in ("sliding_window_overlay", "packed_sequence_mask_function", "remap_positions_for_packed_sequence")
}
PAGED = "bi_kernels_flash"  # continuous batching makes no dense mask, and captures graphs, for names with "flash"


def padding_mask(
    batch_size: int = 1,
    *args,
    kv_length: int = 0,
    attention_mask: Tensor | None = None,
    mask_function: Callable | None = None,
    local_size: int | None = None,
    device: torch.device | None = None,
    **kwargs,
) -> Tensor | None:
    """Returns the padding mask unchanged, where Transformers would make a dense mask of it; one with chunks says so.
    Raises ValueError for a mask that is more than causal, of a window, of chunks and of padding."""
    parts = {part.__qualname__ for part in _parts(mask_function)}
    if unknown := sorted(parts - KNOWN_MASKS):
        raise ValueError(
            f"attention: its mask is made by {unknown[0]}, expected a causal one, of a window or of chunks"
        )
    if CHUNKED not in parts:
        return attention_mask
    mask = attention_mask
    mask = torch.ones(batch_size, kv_length, dtype=torch.long, device=device) if mask is None else mask.view_as(mask)
    setattr(mask, CHUNK, local_size)
    return mask


def _parts(function: object) -> Iterator[Callable]:
    """Yields a mask function and those of which it is made."""
    if inspect.isfunction(function):
        yield function
        for cell in function.__closure__ or ():
            made_of = cell.cell_contents
            for part in made_of if isinstance(made_of, (tuple, list)) else (made_of,):
                yield from _parts(part)


def _stored(t: Tensor) -> tuple[Tensor, int]:
    """Views a cache (batch, heads, stored, D) as (rows, heads, D); returns it and the rows between sequences.

    Rows of a sequence's later heads are counted too, and belong to none.
    """
    batch, heads, stored, width = t.shape
    if not t.is_contiguous():
        t = t.contiguous()
    rows = (batch - 1) * heads * stored + stored if batch else 0
    return t.as_strided((rows, heads, width), (width, stored * width, 1)), heads * stored


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Returns the output (tokens, heads, D of v) of q (tokens, heads, D)."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    constants = scale, window or 0, q.shape, sinks, soft_cap or 0.0, chunk or 0
    return attend(Arguments(q, k, v, sequences, True, *constants))[0]


def _autocast(*given: Tensor) -> list[Tensor]:
    device = given[0].device.type
    if torch.is_autocast_enabled(device):
        return [t.to(torch.get_autocast_dtype(device)) for t in given]
    return list(given)


def attention(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: Call, *, cache: object = None, **told) -> Tensor:
    """Returns the output (batch, length, heads, D) of new q, k and v of that shape, after an update of the cache."""
    new = k.transpose(1, 2), v.transpose(1, 2)
    stored = new if cache is None else cache.update(*new, layer.layer_idx)
    return _attend(layer, q, *(new if call.fresh else stored), call, **told)


def _attend(layer: nn.Module, q: Tensor, key: Tensor, value: Tensor, call: Call, **told) -> Tensor:
    """Returns the output (batch, length, heads, D) of q of that shape on key and value (batch, heads, stored, D), a
    cache's or the call's own."""
    q, key, value = _autocast(q, key, value)
    _check_tokens(layer, q, call)
    flat, stored = lambda t: t.reshape(-1, *t.shape[-2:]).contiguous(), key.shape[2]
    if call.fresh and stored == call.length:
        k, v, stride = flat(key.transpose(1, 2)), flat(value.transpose(1, 2)), stored
    else:
        refuse_training(q, key)
        (k, stride), (v, _) = _stored(key), _stored(value)
    sequences = call.sequences(stored, stride, q.device, told.get("chunk") or 1)
    return _run(flat(q), k, v, sequences, **told).view(*q.shape[:-1], v.shape[-1])


def _check_tokens(layer: nn.Module, q: Tensor, call: Call) -> None:
    """Raises ValueError for queries of other tokens than the call's."""
    if q.shape[:2] != (call.batch, call.length):
        raise ValueError(
            f"{type(layer).__name__}: attention is over {tuple(q.shape[:2])} tokens in a model's call of "
            f"{(call.batch, call.length)}, expected the call's"
        )


def refuse_training(q: Tensor, k: Tensor) -> None:
    """Raises ValueError for keys of a cache where a gradient is wanted."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise ValueError("attention: a gradient is wanted behind a cache, expected torch.no_grad() or no cache")


@functools.cache
def _takes_kwargs(kind: type) -> bool:
    return "kwargs" in inspect.signature(kind.update).parameters


def paged_attention(
    layer: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    *,
    cache: object,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    **given,
) -> Tensor:
    """Returns the output of a step of continuous batching for q, k and v (1, tokens, heads, D).

    The paged cache stores the new keys and returns those that each request sees, one request after another.
    """
    if given.get("block_table") is not None:
        raise ValueError("attention: a block_table is given, expected max_blocks_per_request=0")
    given = dict(given)
    ends_k, longest = given["cu_seq_lens_k"], given.get("max_length_k", given.get("max_seqlen_k"))
    if isinstance(ends_k, Mapping):
        kind = "sliding_attention" if window else "full_attention"
        ends_k, longest = ends_k[kind], longest[kind]
    new = k.transpose(1, 2), v.transpose(1, 2)
    if _takes_kwargs(type(cache)):
        k, v = (t[0].transpose(0, 1) for t in cache.update(*new, layer.layer_idx, kwargs=given))
    else:
        indices = {name: given[name] for name in ("read_index", "write_index")}
        k, v = cache.update(*new, layer.layer_idx, **indices)
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    ends_q = call.paged["cu_seq_lens_q"]
    key = (len(k), bool(window))
    if key not in call.paged.setdefault("known", {}):
        where = [ends_q[:-1].to(torch.int32).contiguous(), ends_q.diff().to(torch.int32)]
        where += [ends_k[:-1].to(torch.int32).contiguous(), ends_k.diff().to(torch.int32)]
        longest = longest if can_wait(q) else len(k)  # a captured graph meets longer ones later
        if window:
            seen = call.paged["position_ids"].flatten()[(ends_q[1:] - 1).clamp(min=0).long()] + 1
            sequences = trimmed(*where, (seen - where[3]).clamp(min=0), longest, False)
        else:
            sequences = Sequences(*where, None, 0, longest, False, False)
        call.paged["known"][key] = sequences
    constants = scale, window, soft_cap, sinks, chunk
    out = _run(q.reshape(-1, *q.shape[-2:]).contiguous(), k, v, call.paged["known"][key], *constants)
    return out.view(*q.shape[:-1], v.shape[-1])


def interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cache: object = None,
    **given,
) -> tuple[Tensor, None]:
    """Attention as Transformers' AttentionInterface has it: query, key and value (batch, heads, length, D), behind an
    update of the cache. Returns the output (batch, length, heads, D)."""
    call, kind = current(), type(module).__name__
    if call is None:
        raise ValueError(
            f"{NAME}: a {kind} got the configuration of an applied model, or is called outside its model; call apply "
            "on its own model, or set another attn_implementation"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refused = {name: given[name] for name in REFUSED if given.get(name) is not None}
    refused |= {"dropout": dropout} if dropout else {}
    refused |= {} if causal else {"is_causal": False}
    if refused:
        name, value = next(iter(refused.items()))
        said = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)
        raise ValueError(f"{kind}: attention's {name} is {said}, expected none: it has no batch-invariant form here")
    call.folds.use(s_aux)
    more = {"scale": scaling, "window": sliding_window, "soft_cap": softcap, "sinks": s_aux}
    more["chunk"] = getattr(attention_mask, CHUNK, None)
    call.attended += 1
    with torch._C.DisableTorchFunction():
        if call.paged is None:
            return _attend(module, query.transpose(1, 2), key, value, call, **more), None
        q, k, v = (t.transpose(1, 2) for t in _autocast(query, key, value))
        return paged_attention(module, q, k, v, call, cache=cache, **more, **given), None


AttentionInterface.register(NAME, interface)
AttentionInterface.register(PAGED, interface)
for name in (NAME, PAGED):
    AttentionMaskInterface.register(name, padding_mask)
