"""Launches attention's backward: Σ out dout, then dK and dV, and dQ.

On sm_90 hopper/keys.py has a faster dK and dV of the same bits, and hopper/queries.py a dQ.
"""

import torch
import triton
from torch import Tensor

from bi_kernels.ops.attention.backward_kernels import delta_kernel, keys_backward_kernel, queries_backward_kernel
from bi_kernels.ops.attention.schedule import (
    LOG2E,
    SCHEDULE,
    Schedule,
    Sequences,
    fits_hopper,
    max_tiles,
    round_up_sequences,
    shape_of,
)


def attention_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    causal: bool,
    scale: float,
    window: int,
    needs_q: bool,
    needs_kv: bool,
    schedule: Schedule = SCHEDULE,
) -> list[Tensor | None]:
    """Returns [dq, dk, dv] of sequences without pages, None for what is not needed."""
    (tokens, heads, width), count = q.shape, len(sequences.length_q)
    shape = shape_of(q.shape, k.shape, k.stride(), v.stride())
    dq, dk, dv = (
        (torch.empty_like if full else torch.zeros_like)(t, memory_format=torch.contiguous_format) if needed else None
        for t, needed, full in (
            (q, needs_q, sequences.full_q),
            (k, needs_kv, sequences.full_k),
            (v, needs_kv, sequences.full_k),
        )
    )
    if not q.numel() or not k.numel():
        return [t if t is None else t.zero_() for t in (dq, dk, dv)]
    delta, rows = torch.empty_like(lse), schedule.merge_rows
    delta_kernel[(triton.cdiv(tokens * heads, rows),)](
        out,
        d_out,
        d_lse,
        delta,
        tokens * heads,
        width,
        HAS_LSE=d_lse is not None,
        ROWS=rows,
        D=shape["D"],
        num_warps=4,
        enable_fp_fusion=False,
    )
    inputs, where, log2_scale = (q, k, v, d_out, lse, delta), sequences[:4], scale * LOG2E

    def launch(kernel, tiling, rows, size, *grads) -> None:
        """Launches a kernel whose tiles hold `size` of so many rows."""
        kernel[(max_tiles(rows, count, size), shape["HEADS"])](
            *inputs,
            *grads,
            *where,
            count,
            scale=log2_scale,
            factor=scale,
            window=window,
            CAUSAL=causal,
            WINDOW=window > 0,
            COUNT=round_up_sequences(count),
            BLOCK_M=tiling.rows,
            BLOCK_N=tiling.columns,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **shape,
        )

    wide = schedule.fp32 if q.dtype == torch.float32 else schedule.wide_backward if shape["D"] > 128 else None
    keys, queries = wide or schedule.keys, wide or schedule.queries
    hopper = not window and fits_hopper(q, k, v) and d_out.data_ptr() % 16 == 0
    told = where, causal, log2_scale, scale
    if dk is not None and schedule.hopper_keys and hopper:
        total = max_tiles(len(k), count, 128)
        schedule.hopper_keys(*inputs, dk, dv, *told, total, round_up_sequences(count), schedule.pause)
    elif dk is not None:
        launch(keys_backward_kernel, keys, len(k), keys.columns, dk, dv)
    if dq is not None and schedule.hopper_queries and hopper:
        total = max_tiles(tokens * shape["GROUP"], count, 128)
        schedule.hopper_queries(*inputs, dq, *told, total, round_up_sequences(count), schedule.pause)
    elif dq is not None:
        launch(queries_backward_kernel, queries, tokens * shape["GROUP"], queries.rows, dq)
    return [dq, dk, dv]
