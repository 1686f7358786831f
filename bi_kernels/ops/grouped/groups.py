"""Groups the tokens of a call by expert.

Rows are sorted by (expert, sequence, position), whatever the layout of the call. An expert's gradient is a left fold
over its rows in slabs of 16, counted per (sequence, expert), so it may be cut between sequences and nowhere else.
Everything is computed on the device: nothing waits for how many rows an expert got.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import check, integers, once, widened
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.op import custom_op, writes
from bi_kernels.scalars import check_flag, check_integer, truncated_repr
from bi_kernels.tokens import SLAB, TokenLayout, layout_of

OP = "group_by_expert"
BLOCK, WARPS = 256, 4  # rows that one program places
FEW, MINE = 1024, 32  # choices of a decode, which programs of so many group without a sort


class Groups(NamedTuple):
    """The rows of a call, sorted by expert; int32 tensors on its device.

    rows: (tokens, k), the row of each choice of a token; −1 where it has none. source: (rows,), the choice of each row,
    token · k + choice; −1 where a row is free. offsets: (experts,), the end of each expert's rows. slots: (slots,), the
    row of each place in the folds over tokens, −1 where a slab is not full; slot_offsets: (experts,), the end of each
    expert's places. Where slots is None and slot_offsets is not, rows themselves are places; where both are, nothing
    was said about sequences.
    """

    rows: Tensor
    source: Tensor
    offsets: Tensor
    slots: Tensor | None = None
    slot_offsets: Tensor | None = None


@jit(do_not_specialize=["count"])
def _segment_kernel(ids, perm, sequence, keys, count, choices, sequences, BLOCK: tl.constexpr):
    """The number of each sorted row's (expert, sequence)."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < count
    token = tl.load(perm + r, mask=inside, other=0) // choices
    of = tl.load(sequence + token, mask=inside, other=0)
    tl.store(keys + r, tl.load(ids + r, mask=inside, other=0).to(tl.int64) * sequences + of, mask=inside)


@jit(do_not_specialize=["count"])
def _place_kernel(
    ids,
    perm,
    tokens,
    keys,
    first,
    slot_first,
    rows,
    source,
    slots,
    count,
    choices,
    experts,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes which row each choice has, and the other way round; and which place each row has in the folds."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < count
    routed = inside & (tl.load(ids + r, mask=inside, other=0) < experts)
    at = tl.load(perm + r, mask=inside, other=0)
    choice = at
    if tokens is not None:
        choice = tl.load(tokens + at // choices, mask=inside, other=0) * choices + at % choices
    row = r
    if keys is not None:
        key = tl.load(keys + r, mask=routed, other=0)
        slot = tl.load(slot_first + key, mask=routed, other=0) + r - tl.load(first + key, mask=routed, other=0)
        if PADDED:
            row = slot
        else:
            tl.store(slots + slot, r, mask=routed)
    tl.store(rows + choice, row, mask=routed)
    if PADDED:
        tl.store(source + row, choice.to(tl.int32), mask=routed)
    else:
        tl.store(source + r, tl.where(routed, choice, -1).to(tl.int32), mask=inside)


@jit(do_not_specialize=["count", "experts"])
def _few_kernel(ids, rows, source, offsets, count, experts, MINE: tl.constexpr, ALL: tl.constexpr):
    """Groups a few choices: the row of each is how many come before it, an expert's end how many go up to it."""
    i, each = tl.program_id(0) * MINE + tl.arange(0, MINE), tl.arange(0, ALL)
    mine, others = (
        tl.load(ids + i, mask=i < count, other=experts),
        tl.load(ids + each, mask=each < count, other=experts),
    )
    mine = tl.where((mine < 0) | (mine > experts), experts, mine).to(tl.int32)[:, None]
    others = tl.where((others < 0) | (others > experts), experts, others).to(tl.int32)[None, :]
    before = (others < mine) | (others == mine) & (each[None, :] < i[:, None])
    row = tl.sum(before.to(tl.int32), axis=1)
    routed = tl.sum(mine, axis=1) < experts
    tl.store(rows + i, tl.where(routed, row, -1), mask=i < count)
    tl.store(source + row, tl.where(routed, i, -1), mask=i < count)
    tl.store(offsets + i, tl.sum((others <= i[:, None]).to(tl.int32), axis=1), mask=i < experts)


@cached
def _few_for(count: int, experts: int, device: int) -> Launch:
    blocks = {"MINE": MINE, "ALL": triton.next_power_of_2(max(count, 16)), "num_warps": 8}
    return Launch(_few_kernel, device, (triton.cdiv(max(count, experts), MINE),), count, experts, **blocks)


@writes("rows", "source", "offsets")
def _group_few(ids, rows, source, offsets) -> None:
    _few_for(ids.numel(), len(offsets), ids.get_device())(ids, rows, source, offsets)


@writes("keys")
def _segment(ids, perm, sequence, keys, choices: int, sequences: int) -> None:
    if len(ids):
        grid = (triton.cdiv(len(ids), BLOCK),)
        _segment_kernel[grid](ids, perm, sequence, keys, len(ids), choices, sequences, BLOCK=BLOCK, num_warps=WARPS)


@writes("rows", "source", "slots")
def _place(
    ids, perm, tokens, keys, first, slot_first, rows, source, slots, choices: int, experts: int, padded: bool
) -> None:
    if len(ids):
        grid, given = (triton.cdiv(len(ids), BLOCK),), (ids, perm, tokens, keys, first, slot_first, rows, source, slots)
        options = {"PADDED": padded, "BLOCK": BLOCK, "num_warps": WARPS}
        _place_kernel[grid](*given, len(ids), choices, experts, **options)


@once
def _check(expert_ids: Tensor, experts: int) -> None:
    check(OP, same_dtype=False, expert_ids=expert_ids)
    if not integers(expert_ids):
        raise TypeError(f"{OP}: expert_ids has dtype {expert_ids.dtype}, expected integers")
    if expert_ids.dim() < 1:
        raise ValueError(f"{OP}: expert_ids has shape {tuple(expert_ids.shape)}, expected (..., k)")
    if check_integer(OP, "experts", experts) < 1:
        raise ValueError(f"{OP}: experts is {truncated_repr(experts)}, expected at least 1")


def _laid_out(expert_ids, layout, experts: int, padded: bool) -> list[Tensor]:
    """What torch.compile sees of a grouping under a layout, whose stand-in it is given: as many rows as choices."""
    found = group_by_expert(expert_ids, experts, layout_of(layout), padded=padded)
    if not padded:
        free = found.rows.numel() - len(found.source)  # padding's
        found = found._replace(source=torch.nn.functional.pad(found.source, (0, free), value=-1))
    return [*(t for t in found[:-1] if t is not None), found.slot_offsets.clone()]  # each a tensor of its own


def _fake_laid_out(expert_ids, layout, experts, padded):
    room = torch.library.get_ctx().new_dynamic_size()
    empty = lambda *shape: expert_ids.new_empty(shape, dtype=torch.int32)
    ids = expert_ids.reshape(-1, expert_ids.shape[-1])
    places = [empty(experts)] if padded else [empty(room), empty(experts)]
    return [empty(*ids.shape), empty(room if padded else ids.numel()), empty(experts), *places]


_opaque = custom_op("group_by_expert", _laid_out, _fake_laid_out)


def group_by_expert(
    expert_ids: Tensor, experts: int, layout: TokenLayout | None = None, *, padded: bool = False
) -> Groups:
    """Groups tokens by the experts they chose: expert_ids (..., k), integers from 0 to experts − 1.

    A choice with another number is routed nowhere, as Transformers marks those of another rank. layout: the sequences
    of the tokens, which `grouped_linear` needs to train its weight; tokens of none of them are routed nowhere. padded:
    rows are the places of the folds, zeros where a slab is not full, so that no gradient has to gather them again.
    """
    _check(expert_ids, experts)
    choices, device, given = expert_ids.shape[-1], expert_ids.device, expert_ids.shape[:-1].numel()
    if layout is not None and not torch.compiler.is_compiling() and layout.rows != given:
        raise ValueError(
            f"{OP}: expert_ids has {given} tokens, shape {tuple(expert_ids.shape)}, but the token layout has "
            f"{layout.rows} rows"
        )
    if check_flag(OP, "padded", padded) and layout is None:
        raise ValueError(f"{OP}: padded is True and layout is None, expected the layout whose slabs are filled up")
    if layout is not None and torch.compiler.is_compiling():
        *found, slot_offsets = _opaque(expert_ids, layout.stand_in, experts, padded)
        return Groups(*found, *[None] * padded, slot_offsets)
    ids = expert_ids.reshape(given, choices)
    if layout is None and 0 < ids.numel() <= FEW:
        rows, source, offsets = (ids.new_empty(n, dtype=torch.int32) for n in (ids.shape, ids.numel(), experts))
        _group_few(widened(ids).contiguous(), rows, source, offsets)
        return Groups(rows, source, offsets)
    rows = torch.full_like(ids, -1, dtype=torch.int32, memory_format=torch.contiguous_format)
    tokens = None
    if layout is not None and not layout.in_order:
        tokens = layout.rows_on(device)
        ids = ids[tokens]
    flat = ids.reshape(-1)
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat).to(torch.int32)
    flat, perm = torch.sort(flat, stable=True)
    count, numbers = len(flat), torch.arange(experts, dtype=torch.int32, device=device)
    if layout is None:
        offsets = torch.searchsorted(flat, numbers, right=True, out_int32=True)
        source = rows.new_empty(count)
        _place(flat, perm, None, None, None, None, rows, source, None, choices, experts, False)
        return Groups(rows, source, offsets)
    sequences = max(len(layout.lengths), 1)
    keys = rows.new_empty(count, dtype=torch.int64)
    _segment(flat, perm, layout.sequences_on(device), keys, choices, sequences)
    first = torch.searchsorted(keys, torch.arange(experts * sequences + 1, device=device))
    filled = (first.diff() + (SLAB - 1)) // SLAB * SLAB
    ends = filled.cumsum(0)
    slot_offsets = ends[sequences - 1 :: sequences].to(torch.int32)
    room = -(-(count + (SLAB - 1) * min(count, experts * sequences)) // SLAB) * SLAB
    places = rows.new_full((room,), -1)
    source, slots = (places, None) if padded else (rows.new_empty(count), places)
    _place(flat, perm, tokens, keys, first, ends - filled, rows, source, slots, choices, experts, padded)
    if padded:
        return Groups(rows, source, slot_offsets, None, slot_offsets)
    return Groups(rows, source, first[sequences::sequences].to(torch.int32), places, slot_offsets)
