"""Launches attention's forward: prefill, chunks and decode over a contiguous or paged cache, in one summation order.

On sm_90 hopper_forward.py has a faster prefill of the same bits.
"""

import math

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.checks import described
from bi_kernels.ops.attention.forward_kernels import attention_kernel, merge_kernel
from bi_kernels.ops.attention.schedule import (
    LOG2E,
    SCHEDULE,
    Schedule,
    Sequences,
    Tiling,
    fits_hopper,
    most_tiles,
    room_for,
    shape_of,
    tma_ready,
)


def _descriptor(t: Tensor, block: int) -> TensorDescriptor:
    """Returns blocks of keys of one head, of (rows, heads, D)."""
    rows, heads, width = t.shape
    return TensorDescriptor(described(t), [rows, heads * width], [t.stride(0), 1], [block, width])


def _partials(splits: int, out: Tensor, lse: Tensor, full: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns room for the maximum, the sum and the product with V of each split, in fp32."""
    m, l = lse.new_empty(splits, *lse.shape), lse.new_empty(splits, *lse.shape)
    if not full:  # padding keeps these
        m.fill_(-math.inf)
        l.zero_()
    return m, l, lse.new_empty(splits, *out.shape)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    causal: bool,
    scale: float,
    window: int,
    schedule: Schedule = SCHEDULE,
) -> list[Tensor]:
    """Returns [out, lse] of q (tokens, heads, D) on k, v (rows, heads, D), or their pages; window: 0 for none."""
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    if not q.numel() or not k.numel():
        return [out.zero_(), lse.fill_(-math.inf)]
    given = {"CAUSAL": causal, "scale": scale * LOG2E, "window": window, "WINDOW": window > 0, **shape_of(q, k, v)}
    count, rows, heads, narrow = len(sequences.length_q), len(q) * given["GROUP"], given["HEADS"], given["D"] <= 128
    splits = max(1, triton.cdiv(sequences.longest, schedule.split))
    tiles, many = most_tiles(rows, count, schedule.prefill.rows) * heads, splits > 1
    partial = q.dtype != torch.float32 and many and tiles < schedule.few and tiles * splits <= schedule.most
    if not sequences.full_q and not partial:  # padding keeps these; the merge of partial results writes every row
        out.zero_()
        lse.fill_(-math.inf)
    prefill, decode = (schedule.prefill, schedule.decode) if narrow else (schedule.wide_prefill, schedule.wide_decode)
    if q.dtype == torch.float32:
        _launch(q, k, v, out, lse, sequences, schedule, schedule.fp32, many, PARTIAL=False, **given)
    elif tiles >= schedule.few:
        tma = not sequences.page and tma_ready(k) and tma_ready(v)
        if schedule.hopper_prefill and tma and not window and fits_hopper(q, k, v):
            told = causal, given["scale"], schedule.split, many, most_tiles(rows, count, 128), room_for(count)
            schedule.hopper_prefill(q, k, v, out, lse, sequences[:4], *told, schedule.pause)
        else:
            tma = tma and given["EVEN"]
            _launch(q, k, v, out, lse, sequences, schedule, prefill, many, tma=tma, PARTIAL=False, **given)
    elif not partial:
        _launch(q, k, v, out, lse, sequences, schedule, decode, many, PARTIAL=False, **given)
    else:
        m, l, acc = parts = _partials(splits, out, lse, sequences.full_q)
        _launch(q, k, v, out, lse, sequences, schedule, decode, many, splits, parts, PARTIAL=True, **given)
        merge_kernel[(triton.cdiv(lse.numel(), schedule.merge_rows),)](
            m,
            l,
            acc,
            out,
            lse,
            lse.numel(),
            splits,
            given["scale"],
            given["width"],
            ROWS=schedule.merge_rows,
            D=given["D"],
            num_warps=4,
            enable_fp_fusion=False,
        )
    return [out, lse]


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    schedule: Schedule,
    tiling: Tiling,
    many: bool,
    splits: int = 1,
    parts: tuple[Tensor | None, ...] = (None, None, None),
    tma: bool = False,
    **given,
) -> None:
    """Launches tiles of queries, with `parts` a program for each of `splits`; many: a sequence may have several."""
    first_q, length_q, first_k, length_k, pages = sequences[:5]
    part_m, part_l, part_acc = parts
    count = len(length_q)
    attention_kernel[(most_tiles(len(q) * given["GROUP"], count, tiling.rows), given["HEADS"], splits)](
        q,
        k,
        v,
        _descriptor(k, schedule.block) if tma else None,
        _descriptor(v, schedule.block) if tma else None,
        out,
        lse,
        part_m,
        part_l,
        part_acc,
        first_q,
        length_q,
        first_k,
        length_k,
        pages,
        0 if pages is None else pages.stride(0),
        count,
        rows_total=lse.numel(),
        COUNT=room_for(count),
        BLOCK_M=tiling.rows,
        BLOCK=schedule.block,
        SPLIT=schedule.split,
        PAGE=sequences.page,
        MANY=many,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **given,
    )
