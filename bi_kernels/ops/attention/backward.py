"""Attention's backward, without atomics: the probabilities again from the saved LSE.

dV and dK fold over the queries of each head of the group, head after head, in slabs of 16 from the sequence's first query;
dQ folds over the keys in slabs of 16. So every tile is free. Rounding points: the probabilities, and dS = P (dP − Σ out dout),
are rounded to the storage dtype for their products; each gradient once. On sm_90 hopper_backward.py has a
faster dK and dV of the same bits.
"""

import torch
import triton
import triton.language as tl

from bi_kernels.ops.attention.forward import (
    FP32,
    LOG2E,
    MERGE_ROWS,
    Tiling,
    fits_hopper,
    most_tiles,
    room_for,
    seen,
    sequence_of,
    shape_of,
)

KEYS, QUERIES, WIDE = (
    Tiling(64, 128, 8, 3),
    Tiling(128, 64, 8, 3),
    Tiling(64, 64, 8, 2),
)  # WIDE: of heads wider than 128


@triton.jit(do_not_specialize=["rows_total"])
def _delta_kernel(
    out, d_out, d_lse, delta, rows_total, width, HAS_LSE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):
    """Σ out · dout of every row, less the gradient of its lse."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    inside = row < rows_total
    at, there = row[:, None] * width + d[None, :], inside[:, None] & (d < width)[None, :]
    product = tl.load(out + at, mask=there, other=0.0).to(tl.float32) * tl.load(d_out + at, mask=there, other=0.0).to(
        tl.float32
    )
    total = tl.sum(product, 1)
    if HAS_LSE:
        total -= tl.load(d_lse + row, mask=inside, other=0.0)
    tl.store(delta + row, total, mask=inside)


@triton.jit
def probability(score, scale, log_sum):
    """None is above 1, however large the scores and so their roundings are."""
    return tl.math.exp2(tl.minimum(tl.fma(score, scale, -log_sum), 0.0))


@triton.jit
def _keys_step(
    k_tile,
    v_tile,
    dk,
    dv,
    q,
    d_out,
    lse,
    delta,
    row,
    token,
    queries,
    key,
    length,
    scale,
    window,
    width,
    HEADS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    EVEN: tl.constexpr,
    D: tl.constexpr,
):
    """What some queries of one head add to dK and dV of a tile of keys."""
    d = tl.arange(0, D)
    at = row + token.to(tl.int64) * HEADS
    inside = token < queries  # beyond them dout is 0, and so is what it adds
    there = inside[:, None] & ((d < width)[None, :] | EVEN)
    qt = tl.load(q + at[:, None] * width + d[None, :], mask=there, other=0.0)
    do = tl.load(d_out + at[:, None] * width + d[None, :], mask=there, other=0.0)
    log_sum = tl.load(lse + at, mask=inside, other=0.0) * 1.4426950408889634
    less = tl.load(delta + at, mask=inside, other=0.0)
    p = probability(tl.dot(k_tile, qt.T, input_precision="ieee"), scale, log_sum[None, :])
    ds = p * (tl.dot(v_tile, do.T, input_precision="ieee") - less[None, :])
    if MASKED:
        visible = seen(key, token + length - queries, length, window, CAUSAL, WINDOW)
        p, ds = tl.where(visible.T, p, 0.0), tl.where(visible.T, ds, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    dk = tl.dot(ds.to(qt.dtype), qt, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["sequences", "window"])
def _keys_backward_kernel(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    dk,
    dv,
    first_q,
    length_q,
    first_k,
    length_k,
    sequences,
    stride_k,
    stride_v,
    head_k,
    head_v,
    scale,
    factor,
    window,
    width,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    EVEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """dK and dV of a tile of keys: over the heads of the group, and the queries of each, in ascending order."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, before, last = sequence_of(tile, length_k, sequences, 1, BLOCK_N, COUNT)
    tile -= before
    known = sequence < sequences
    queries, length = (
        tl.load(length_q + sequence, mask=known, other=0),
        tl.load(length_k + sequence, mask=known, other=0),
    )
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    row_k = tl.load(first_k + sequence, mask=known, other=0).to(tl.int64) + key
    there = (key < length)[:, None] & ((d < width)[None, :] | EVEN)
    k_tile = tl.load(k + head * head_k + row_k[:, None] * stride_k + d[None, :], mask=there, other=0.0)
    v_tile = tl.load(v + head * head_v + row_k[:, None] * stride_v + d[None, :], mask=there, other=0.0)
    begin, middle, end = 0, 0, queries  # queries that see some key; from `middle` on, all of them see all
    if CAUSAL:
        begin = tl.maximum(tile * BLOCK_N + queries - length, 0) // BLOCK_M * BLOCK_M
        middle = tl.cdiv(tl.maximum(tile * BLOCK_N + BLOCK_N - 1 + queries - length, 0), BLOCK_M) * BLOCK_M
    if WINDOW:
        end = tl.minimum(end, tl.maximum(tile * BLOCK_N + BLOCK_N - 1 + window + queries - length, 0))
        middle = end
    middle = tl.minimum(tl.maximum(middle, begin), tl.maximum(end, begin))
    dk_tile = tl.zeros((BLOCK_N, D), dtype=tl.float32)
    dv_tile = tl.zeros((BLOCK_N, D), dtype=tl.float32)
    for member in range(GROUP):
        row = tl.load(first_q + sequence, mask=known, other=0).to(tl.int64) * (HEADS * GROUP) + head * GROUP + member
        for start in range(begin, middle, BLOCK_M):
            token = start + tl.arange(0, BLOCK_M)
            dk_tile, dv_tile = _keys_step(
                k_tile,
                v_tile,
                dk_tile,
                dv_tile,
                q,
                d_out,
                lse,
                delta,
                row,
                token,
                queries,
                key,
                length,
                scale,
                window,
                width,
                HEADS * GROUP,
                CAUSAL,
                WINDOW,
                True,
                EVEN,
                D,
            )
        for start in range(middle, end, BLOCK_M):
            token = start + tl.arange(0, BLOCK_M)
            dk_tile, dv_tile = _keys_step(
                k_tile,
                v_tile,
                dk_tile,
                dv_tile,
                q,
                d_out,
                lse,
                delta,
                row,
                token,
                queries,
                key,
                length,
                scale,
                window,
                width,
                HEADS * GROUP,
                CAUSAL,
                WINDOW,
                False,
                EVEN,
                D,
            )
    at = (row_k[:, None] * HEADS + head) * width + d[None, :]
    tl.store(dk + at, (dk_tile * factor + 0.0).to(dk.dtype.element_ty), mask=there)
    tl.store(dv + at, (dv_tile + 0.0).to(dv.dtype.element_ty), mask=there)


@triton.jit
def _queries_step(
    qt,
    do,
    dq,
    k,
    v,
    kv,
    stride_k,
    stride_v,
    log_sum,
    less,
    key,
    position,
    length,
    scale,
    window,
    width,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    EVEN: tl.constexpr,
    D: tl.constexpr,
):
    """What a block of keys adds to dQ of a tile of queries."""
    d = tl.arange(0, D)
    there = (d < width)[None, :] | EVEN
    if MASKED:
        there &= (key < length)[:, None]
    kt = tl.load(k + kv[:, None] * stride_k + d[None, :], mask=there, other=0.0)
    vt = tl.load(v + kv[:, None] * stride_v + d[None, :], mask=there, other=0.0)
    p = probability(tl.dot(qt, kt.T, input_precision="ieee"), scale, log_sum[:, None])
    ds = p * (tl.dot(do, vt.T, input_precision="ieee") - less[:, None])
    if MASKED:
        ds = tl.where(seen(key, position, length, window, CAUSAL, WINDOW), ds, 0.0)
    return tl.dot(ds.to(kt.dtype), kt, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["sequences", "window"])
def _queries_backward_kernel(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    dq,
    first_q,
    length_q,
    first_k,
    length_k,
    sequences,
    stride_k,
    stride_v,
    head_k,
    head_v,
    scale,
    factor,
    window,
    width,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    EVEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """dQ of a tile of queries: over their keys in ascending order."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, before, last = sequence_of(tile, length_q, sequences, GROUP, BLOCK_M, COUNT)
    tile = last - tile
    known = sequence < sequences
    queries, length = (
        tl.load(length_q + sequence, mask=known, other=0),
        tl.load(length_k + sequence, mask=known, other=0),
    )
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    inside = token < queries
    position = token + length - queries
    d = tl.arange(0, D)
    at = (
        (tl.load(first_q + sequence, mask=known, other=0).to(tl.int64) + token) * (HEADS * GROUP)
        + head * GROUP
        + row % GROUP
    )
    there = inside[:, None] & ((d < width)[None, :] | EVEN)
    qt = tl.load(q + at[:, None] * width + d[None, :], mask=there, other=0.0)
    do = tl.load(d_out + at[:, None] * width + d[None, :], mask=there, other=0.0)
    log_sum = tl.load(lse + at, mask=inside, other=0.0) * 1.4426950408889634
    less = tl.load(delta + at, mask=inside, other=0.0)
    k += head * head_k
    v += head * head_v
    row_k = tl.load(first_k + sequence, mask=known, other=0).to(tl.int64)
    first = tile * BLOCK_M // GROUP + length - queries
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, queries * GROUP - 1) // GROUP + length - queries
    begin, end, whole = 0, length, length // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(end, last + 1)
        whole = tl.minimum(whole, (first + 1) // BLOCK_N * BLOCK_N)
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
        whole = begin
    whole = tl.maximum(whole, begin)
    dq_tile = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(begin, whole, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        dq_tile = _queries_step(
            qt,
            do,
            dq_tile,
            k,
            v,
            row_k + key,
            stride_k,
            stride_v,
            log_sum,
            less,
            key,
            position,
            length,
            scale,
            window,
            width,
            CAUSAL,
            WINDOW,
            False,
            EVEN,
            D,
        )
    for start in range(whole, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        dq_tile = _queries_step(
            qt,
            do,
            dq_tile,
            k,
            v,
            row_k + key,
            stride_k,
            stride_v,
            log_sum,
            less,
            key,
            position,
            length,
            scale,
            window,
            width,
            CAUSAL,
            WINDOW,
            True,
            EVEN,
            D,
        )
    tl.store(dq + at[:, None] * width + d[None, :], (dq_tile * factor + 0.0).to(dq.dtype.element_ty), mask=there)


def attention_backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    where: tuple[torch.Tensor, ...],
    full_q: bool,
    full_k: bool,
    causal: bool,
    scale: float,
    window: int,
    needs_q: bool,
    needs_kv: bool,
) -> list[torch.Tensor | None]:
    """[dq, dk, dv], None for what is not needed; where: first_q, length_q, first_k, length_k of the sequences."""
    (tokens, heads, width), shape = q.shape, shape_of(q, k, v)
    dq, dk, dv = (
        (torch.empty_like if full else torch.zeros_like)(t, memory_format=torch.contiguous_format) if needed else None
        for t, needed, full in ((q, needs_q, full_q), (k, needs_kv, full_k), (v, needs_kv, full_k))
    )
    if not q.numel() or not k.numel():
        return [t if t is None else t.zero_() for t in (dq, dk, dv)]
    delta = torch.empty_like(lse)
    _delta_kernel[(triton.cdiv(tokens * heads, MERGE_ROWS),)](
        out,
        d_out,
        d_lse,
        delta,
        tokens * heads,
        width,
        HAS_LSE=d_lse is not None,
        ROWS=MERGE_ROWS,
        D=shape["D"],
        num_warps=4,
        enable_fp_fusion=False,
    )
    keys, queries = (FP32, FP32) if q.dtype == torch.float32 else (WIDE, WIDE) if shape["D"] > 128 else (KEYS, QUERIES)
    sequences = len(where[0])
    for kernel, tiling, total, grads in (
        (_keys_backward_kernel, keys, most_tiles(len(k), sequences, keys.columns), (dk, dv)),
        (_queries_backward_kernel, queries, most_tiles(tokens * shape["GROUP"], sequences, queries.rows), (dq,)),
    ):
        if grads[0] is None:
            continue
        if kernel is _keys_backward_kernel and not window and fits_hopper(q, k, v) and d_out.data_ptr() % 16 == 0:
            from bi_kernels.ops.attention.hopper_backward import (
                keys_backward,
            )  # Gluon, which the interpreter does not know

            keys_backward(q, k, v, d_out, lse, delta, dk, dv, where, causal, scale * LOG2E, scale)
            continue
        kernel[(total, k.shape[-2])](
            q,
            k,
            v,
            d_out,
            lse,
            delta,
            *grads,
            *where,
            sequences,
            scale=scale * LOG2E,
            factor=scale,
            window=window,
            CAUSAL=causal,
            WINDOW=window > 0,
            COUNT=room_for(sequences),
            BLOCK_M=tiling.rows,
            BLOCK_N=tiling.columns,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **shape,
        )
    return [dq, dk, dv]
