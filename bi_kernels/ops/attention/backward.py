"""Launches attention's backward: Σ out dout, then dK and dV, and dQ.

On sm_90 hopper/keys.py has a faster dK and dV of the same bits, and hopper/queries.py a dQ.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from bi_kernels.checks import aligned
from bi_kernels.op import writes
from bi_kernels.ops.attention.backward_kernels import (
    delta_kernel,
    keys_backward_kernel,
    queries_backward_kernel,
    sinks_backward_kernel,
)
from bi_kernels.ops.attention.schedule import (
    current_schedule,
    fits_hopper,
    max_tiles,
    round_up_sequences,
    scales,
    shape_of,
)
from bi_kernels.ops.fold import fold_partials
from bi_kernels.tokens import SLAB, layout_of


@writes("dq", "dk", "dv", "delta")
def attention_backward(
    d_out,
    d_lse,
    q,
    k,
    v,
    out,
    lse,
    where: Sequence[Tensor],
    causal: bool,
    scale: float,
    window: int,
    dq,
    dk,
    dv,
    delta=None,
    soft_cap: float = 0.0,
    chunk: int = 0,
) -> None:
    """Writes dq, and dk and dv, each where it is given, of sequences without pages; rows of none are left as they are.
    d_lse: None for zeros; where: first_q, length_q, first_k, length_k; delta: like lse, written where it is given."""
    schedule = current_schedule()
    d_out, d_lse = aligned(d_out), None if d_lse is None else d_lse.contiguous()
    (tokens, heads, _), wide, count = q.shape, v.shape[-1], len(where[0])
    shape = shape_of(q.shape, k.shape, k.stride(), v.stride(), wide)
    if not q.numel() or not k.numel():
        for t in (dq, dk, dv, delta):
            if t is not None:
                t.zero_()
        return
    delta = torch.empty_like(lse) if delta is None else delta
    rows, options = schedule.merge_rows, {"num_warps": 4, "enable_fp_fusion": False}
    of_rows = {"HAS_LSE": d_lse is not None, "ROWS": rows, "D": shape["DV"]}
    grid = (triton.cdiv(tokens * heads, rows),)
    delta_kernel[grid](out, d_out, d_lse, delta, tokens * heads, wide, **of_rows, **options)
    if dq is None and dk is None:
        return
    inputs, room, (log2_scale, steep) = (q, k, v, d_out, lse, delta), round_up_sequences(count), scales(scale, soft_cap)
    named = {"scale": log2_scale, "steep": steep, "factor": scale, "window": chunk or window, "CAUSAL": causal, **shape}
    named["WINDOW"] = 2 if chunk else window > 0

    def run(kernel, tiling, rows, size, *grads) -> None:
        """Launches a kernel whose tiles hold `size` of so many rows."""
        blocks = {"BLOCK_M": tiling.rows, "BLOCK_N": tiling.columns, "COUNT": room}
        tiles = max_tiles(rows, count, size), shape["HEADS"]
        kernel[tiles](
            *inputs, *grads, *where, count, num_warps=tiling.warps, num_stages=tiling.stages, **blocks, **named
        )

    wide = (
        schedule.fp32
        if q.dtype == torch.float32
        else schedule.wide_backward
        if max(shape["D"], shape["DV"]) > 128
        else None
    )
    keys, queries = wide or schedule.keys, wide or schedule.queries
    hopper = schedule.hopper and not (window or chunk) and fits_hopper(q, k, v) and d_out.data_ptr() % 16 == 0
    told = where, causal, log2_scale, scale
    if dk is not None and hopper:
        from bi_kernels.ops.attention.hopper.keys import keys_backward  # noqa: PLC0415  (the interpreter knows no Gluon)

        keys_backward(*inputs, dk, dv, *told, max_tiles(len(k), count, 128), room, steep)
    elif dk is not None:
        run(keys_backward_kernel, keys, len(k), keys.columns, dk, dv)
    if dq is not None and hopper:
        from bi_kernels.ops.attention.hopper.queries import queries_backward  # noqa: PLC0415  (as above)

        queries_backward(*inputs, dq, *told, max_tiles(tokens * shape["GROUP"], count, 128), room, steep)
    elif dq is not None:
        run(queries_backward_kernel, queries, tokens * shape["GROUP"], queries.rows, dq)


@writes("d_sinks")
def sinks_gradient(lse, delta, sinks, layout, d_sinks, continues: bool) -> None:
    """Writes the gradient of sinks (heads,), which goes on from what is there if it `continues`; lse, delta: (tokens,
    heads), as `attention_backward` wrote it."""
    layout = layout_of(layout)
    slots = None if layout.identity else layout.slots_on(lse.device)
    (tokens, heads), slabs = lse.shape, len(layout.slots) // SLAB
    partial = lse.new_empty(slabs, heads)
    if slabs:
        block = triton.next_power_of_2(heads)
        options = {"SLAB": SLAB, "BLOCK": block, "num_warps": 4, "enable_fp_fusion": False}
        sinks_backward_kernel[(slabs,)](lse, delta, sinks.contiguous(), slots, partial, tokens, heads, **options)
    fold_partials(partial, d_sinks if continues else None, d_sinks)
