"""Launches attention's forward: prefill, chunks and decode over a contiguous or paged cache, in one summation order.

On sm_90 hopper_forward.py has a faster prefill of the same bits.
"""

import math

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.ops.attention.forward_kernels import attention_kernel, merge_kernel
from bi_kernels.ops.attention.schedule import (
    LOG2E,
    SCHEDULE,
    Schedule,
    Sequences,
    fits_hopper,
    most_tiles,
    room_for,
    shape_of,
    tma_ready,
)

BLOCK, SPLIT = SCHEDULE.block, SCHEDULE.split  # keys: the summation order's, as the contract names them


def _descriptor(t: Tensor, block: int) -> TensorDescriptor:
    """Returns blocks of keys of one head, of (rows, heads, D)."""
    rows, heads, width = t.shape
    return TensorDescriptor(t, [rows, heads * width], [t.stride(0), 1], [block, width])


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
    if not sequences.full_q or not k.numel():
        out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    else:
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    if not q.numel() or not k.numel():
        return [out, lse]
    count, page, shape = len(sequences.length_q), sequences.page, shape_of(q, k, v)
    group, heads, log2_scale = shape["GROUP"], shape["HEADS"], scale * LOG2E
    splits = max(1, triton.cdiv(sequences.longest, schedule.split))
    tiles = most_tiles(len(q) * group, count, schedule.prefill.rows) * heads
    tiling, k_tma, v_tma, partial = schedule.fp32, None, None, (None, None, None)
    if q.dtype != torch.float32 and tiles < schedule.few:
        tiling = schedule.decode if shape["D"] <= 128 else schedule.wide_decode
        if splits > 1 and tiles * splits <= schedule.most:
            partial = _partials(splits, out, lse, sequences.full_q)
    elif q.dtype != torch.float32:
        if schedule.hopper_prefill and not page and not window and fits_hopper(q, k, v):
            total, room = most_tiles(len(q) * group, count, 128), room_for(count)
            told = causal, log2_scale, schedule.split, splits > 1, total, room, schedule.pause
            schedule.hopper_prefill(q, k, v, out, lse, sequences[:4], *told)
            return [out, lse]
        tiling = schedule.prefill if shape["D"] <= 128 else schedule.wide_prefill
        if not page and shape["EVEN"] and tma_ready(k) and tma_ready(v):
            k_tma, v_tma = _descriptor(k, schedule.block), _descriptor(v, schedule.block)
    grid = most_tiles(len(q) * group, count, tiling.rows), heads, 1 if partial[0] is None else splits
    attention_kernel[grid](
        q,
        k,
        v,
        k_tma,
        v_tma,
        out,
        lse,
        *partial,
        *sequences[:5],
        0 if sequences.pages is None else sequences.pages.stride(0),
        count,
        rows_total=lse.numel(),
        scale=log2_scale,
        window=window,
        COUNT=room_for(count),
        BLOCK_M=tiling.rows,
        BLOCK=schedule.block,
        SPLIT=schedule.split,
        CAUSAL=causal,
        WINDOW=window > 0,
        PAGE=page,
        MANY=splits > 1,
        PARTIAL=partial[0] is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **shape,
    )
    if partial[0] is not None:
        rows, d = schedule.merge_rows, shape["D"]
        merge_kernel[(triton.cdiv(lse.numel(), rows),)](
            *partial,
            out,
            lse,
            lse.numel(),
            splits,
            log2_scale,
            shape["width"],
            ROWS=rows,
            D=d,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return [out, lse]
