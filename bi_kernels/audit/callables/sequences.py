"""Whole models: of a module that takes input_ids, a sample is a sequence with its mask, padded, packed or cached."""

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch.utils._pytree import tree_leaves

from bi_kernels.audit.callables.target import Target, alike
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import UNSUPPORTED, Row, sentence

PADDING = 7  # places without a token beside the longest sequence
DECODED, PREFILL = 3, 2  # sequences that are decoded token by token, and how many tokens the cache then holds
IDS, MASK, POSITIONS, CACHE = "input_ids", "attention_mask", "position_ids", "past_key_values"


def _takes(t: Target) -> set[str]:
    parameters = inspect.signature(getattr(t.eager, "forward", t.eager)).parameters
    return set(parameters)


def _tokens(t: Target) -> list[torch.Tensor]:
    """Returns each sequence's ids without its padding."""
    ids, mask = t.values[IDS], t.values.get(MASK)
    return [row if mask is None else row[mask[i].bool()] for i, row in enumerate(ids)]


def _called(t: Target, ids: torch.Tensor, **more) -> tuple[torch.Tensor, object]:
    """Returns what a module makes of each place of ids, and all that it returned."""
    own = {k: v for k, v in t.values.items() if k not in (IDS, MASK, POSITIONS, CACHE)}
    with torch.no_grad():
        found = t.function(**own | {IDS: ids} | more)
    per_token = (y for y in tree_leaves(found) if isinstance(y, torch.Tensor) and y.is_floating_point())
    return next(y for y in per_token if y.shape[:2] == ids.shape), found


def _padded(t: Target, left: bool, width: int = 0) -> list[torch.Tensor]:
    rows = _tokens(t)
    width = max(width, max(map(len, rows)) + PADDING)
    ids = rows[0].new_zeros(len(rows), width)
    mask = torch.zeros_like(ids, dtype=t.values[MASK].dtype if MASK in t.values else torch.long)
    place = [slice(width - len(r), width) if left else slice(len(r)) for r in rows]
    for i, (row, at) in enumerate(zip(rows, place)):
        ids[i, at], mask[i, at] = row, 1
    more = {POSITIONS: (mask.long().cumsum(1) - 1).clamp(min=0)} if POSITIONS in _takes(t) else {}
    y, _ = _called(t, ids, **{MASK: mask}, **more)
    return [y[i, at] for i, at in enumerate(place)]


def _alone(t: Target) -> list[torch.Tensor]:
    return [_called(t, row[None])[0][0] for row in _tokens(t)]


def _packed(t: Target) -> list[torch.Tensor]:
    rows = _tokens(t)
    positions = torch.cat([torch.arange(len(r), device=r.device) for r in rows])[None]
    uncached = (
        {"use_cache": False} if "use_cache" in _takes(t) else {}
    )  # beside a cache Transformers sees no packed row
    y, _ = _called(t, torch.cat(rows)[None], **{POSITIONS: positions}, **uncached)
    return list(y[0].split([len(r) for r in rows]))


def _decoded(t: Target) -> list[torch.Tensor]:
    out = []
    for row in _tokens(t)[:DECODED]:
        y, found = _called(t, row[None, :PREFILL], use_cache=True)
        parts = [y[0]]
        for at in range(PREFILL, len(row)):
            cache = found[CACHE] if isinstance(found, dict) else getattr(found, CACHE)
            y, found = _called(t, row[None, at : at + 1], use_cache=True, **{CACHE: cache})
            parts.append(y[0])
        out.append(torch.cat(parts))
    return out


def _judged(t: Target, layout: str, found: Callable[[Target], list[torch.Tensor]], whole: list) -> list[Row]:
    said = {"against": "padded as given"}
    try:
        rows = found(t)
    except (TypeError, ValueError, NotImplementedError, AssertionError) as error:  # it says that it does not take these
        return [t.row("invariance", layout, verdict=UNSUPPORTED, detail=sentence(error), **said)]
    a, b = torch.cat(rows), torch.cat(whole[: len(rows)])
    said["rows"] = len(rows)
    if layout == "packed" and not alike(a, b):  # its sequences see each other
        return [t.row("invariance", layout, verdict=UNSUPPORTED, detail="takes no packed row", **said)]
    return [t.row("invariance", layout, compare(a, b), **said)]


def sequences(t: Target) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges a module that takes input_ids on whole sequences; nothing of any other callable. What of it
    is asked follows what its forward takes: attention_mask, position_ids, past_key_values and use_cache."""
    ids = t.values.get(IDS)
    if not t.module or ids is None or ids.dim() != 2 or ids.is_floating_point() or t.batch:
        return {}
    takes = _takes(t)
    layouts = {"unpadded": _alone}
    if MASK in takes:
        layouts |= {"right_padded": partial(_padded, left=False)}
    if {MASK, POSITIONS} <= takes:
        layouts |= {"left_padded sequences": partial(_padded, left=True), "packed": _packed}
    if {CACHE, "use_cache"} <= takes:
        layouts |= {"decode": _decoded}
    given = {k: t.values[k] for k in (MASK, POSITIONS) if k in t.values}
    y, _ = _called(t, ids, **given)
    real = given[MASK].bool() if MASK in given else torch.ones_like(ids, dtype=torch.bool)
    whole = [row[at] for row, at in zip(y, real)]
    return {layout: partial(_judged, t, layout, found, whole) for layout, found in layouts.items()}
