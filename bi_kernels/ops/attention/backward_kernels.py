"""Attention's backward kernels, without atomics: the probabilities again from the saved LSE.

dK and dV are summed over the queries of each head of the group, head after head, in slabs of 16 from the sequence's
first query; dQ over the keys in slabs of 16. So every tile is free. Rounding points: the probabilities, and
dS = P (dP − Σ out dout), with a cap times the slope of tanh, are rounded to the storage dtype for their products; each
gradient once. A sink has a probability, too, and a dP of 0: its gradient is folded over the tokens of the layout.
"""

import triton
import triton.language as tl

from bi_kernels.launch import jit
from bi_kernels.ops.attention.schedule import capped, seen, sequence_of
from bi_kernels.ops.fold import add_rows


@jit(do_not_specialize=["rows_total"])
def delta_kernel(
    out, d_out, d_lse, delta, rows_total, width, HAS_LSE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):
    """Computes Σ out · dout of every row, less the gradient of its lse."""
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
def _probability(score, scale, log_sum):
    """Returns exp2(score · scale − log_sum), never above 1, however large the scores and so their roundings are."""
    return tl.math.exp2(tl.minimum(tl.fma(score, scale, -log_sum), 0.0))


@triton.jit
def _probabilities(score, scale, steep, log_sum):
    """Returns the probabilities, and those times the slope of a cap."""
    if steep is not None:
        score = capped(score, steep)
    p = _probability(score, scale, log_sum)
    weight = p
    if steep is not None:
        weight = p * (1.0 - score * score)
    return p, weight


@triton.jit
def _keys_step(
    sums,
    given,
    cache,
    row,
    token,
    scale,
    steep,
    window,
    width,
    width_v,
    HEADS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    EVEN: tl.constexpr,
    D: tl.constexpr,
    EVEN_V: tl.constexpr,
    DV: tl.constexpr,
):
    """Adds what some queries of one head give to dK and dV of a tile of keys."""
    dk, dv = sums
    q, d_out, lse, delta, queries = given
    k_tile, v_tile, key, length = cache
    d = tl.arange(0, D)
    at = row + token.to(tl.int64) * HEADS
    inside = token < queries  # beyond them dout is 0, and so is what it adds
    there = inside[:, None] & ((d < width)[None, :] | EVEN)
    qt = tl.load(q + at[:, None] * width + d[None, :], mask=there, other=0.0)
    wide = width
    if width_v is not None:
        wide, d = width_v, tl.arange(0, DV)
        there = inside[:, None] & ((d < wide)[None, :] | EVEN_V)
    do = tl.load(d_out + at[:, None] * wide + d[None, :], mask=there, other=0.0)
    log_sum = tl.load(lse + at, mask=inside, other=0.0) * 1.4426950408889634
    less = tl.load(delta + at, mask=inside, other=0.0)
    p, weight = _probabilities(tl.dot(k_tile, qt.T, input_precision="ieee"), scale, steep, log_sum[None, :])
    ds = weight * (tl.dot(v_tile, do.T, input_precision="ieee") - less[None, :])
    if MASKED:
        visible = seen(key, token + length - queries, length, window, CAUSAL, WINDOW)
        p, ds = tl.where(visible.T, p, 0.0), tl.where(visible.T, ds, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    dk = tl.dot(ds.to(qt.dtype), qt, dk, input_precision="ieee")
    return dk, dv


@jit(do_not_specialize=["sequences", "window"])
def keys_backward_kernel(
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
    steep,
    factor,
    window,
    width,
    width_v,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    EVEN: tl.constexpr,
    DV: tl.constexpr,
    EVEN_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Computes dK and dV of a tile of keys: over the group's heads, and the queries of each, in ascending order."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, before, last = sequence_of(tile, length_k, sequences, 1, BLOCK_N, COUNT)
    tile -= before
    known = sequence < sequences
    queries = tl.load(length_q + sequence, mask=known, other=0)
    length = tl.load(length_k + sequence, mask=known, other=0)
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    row_k = tl.load(first_k + sequence, mask=known, other=0).to(tl.int64) + key
    there = (key < length)[:, None] & ((d < width)[None, :] | EVEN)
    k_tile = tl.load(k + head.to(tl.int64) * head_k + row_k[:, None] * stride_k + d[None, :], mask=there, other=0.0)
    wide, dv_col, there_v = width, d, there
    if width_v is not None:
        wide, dv_col = width_v, tl.arange(0, DV)
        there_v = (key < length)[:, None] & ((dv_col < wide)[None, :] | EVEN_V)
    v_at = v + head.to(tl.int64) * head_v + row_k[:, None] * stride_v + dv_col[None, :]
    v_tile = tl.load(v_at, mask=there_v, other=0.0)
    begin, middle, end = 0, 0, queries  # queries that see some key; from `middle` on, all of them see all
    if CAUSAL:
        begin = tl.maximum(tile * BLOCK_N + queries - length, 0) // BLOCK_M * BLOCK_M
        middle = tl.cdiv(tl.maximum(tile * BLOCK_N + BLOCK_N - 1 + queries - length, 0), BLOCK_M) * BLOCK_M
    if WINDOW == 2:  # the chunk of the tile's last key
        last = ((tile * BLOCK_N + BLOCK_N - 1) // window + 1) * window
        end = tl.minimum(end, tl.maximum(last + queries - length, 0))
        middle = end
    elif WINDOW:
        end = tl.minimum(end, tl.maximum(tile * BLOCK_N + BLOCK_N - 1 + window + queries - length, 0))
        middle = end
    middle = tl.minimum(tl.maximum(middle, begin), tl.maximum(end, begin))
    dk_tile = tl.zeros((BLOCK_N, D), dtype=tl.float32)
    dv_tile = tl.zeros((BLOCK_N, DV), dtype=tl.float32)
    given, cache = (q, d_out, lse, delta, queries), (k_tile, v_tile, key, length)
    for member in range(GROUP):
        row = tl.load(first_q + sequence, mask=known, other=0).to(tl.int64) * (HEADS * GROUP) + head * GROUP + member
        for start in range(begin, middle, BLOCK_M):
            token = start + tl.arange(0, BLOCK_M)
            sums = dk_tile, dv_tile
            dk_tile, dv_tile = _keys_step(
                sums,
                given,
                cache,
                row,
                token,
                scale,
                steep,
                window,
                width,
                width_v,
                HEADS * GROUP,
                CAUSAL,
                WINDOW,
                True,
                EVEN,
                D,
                EVEN_V,
                DV,
            )
        for start in range(middle, end, BLOCK_M):
            token = start + tl.arange(0, BLOCK_M)
            sums = dk_tile, dv_tile
            dk_tile, dv_tile = _keys_step(
                sums,
                given,
                cache,
                row,
                token,
                scale,
                steep,
                window,
                width,
                width_v,
                HEADS * GROUP,
                CAUSAL,
                WINDOW,
                False,
                EVEN,
                D,
                EVEN_V,
                DV,
            )
    at = (row_k[:, None] * HEADS + head) * width + d[None, :]
    tl.store(dk + at, (dk_tile * factor + 0.0).to(dk.dtype.element_ty), mask=there)
    if width_v is not None:
        at = (row_k[:, None] * HEADS + head) * wide + dv_col[None, :]
    tl.store(dv + at, (dv_tile + 0.0).to(dv.dtype.element_ty), mask=there_v)


@triton.jit
def _queries_step(
    dq,
    given,
    cache,
    start,
    scale,
    steep,
    window,
    width,
    width_v,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    EVEN_V: tl.constexpr,
    DV: tl.constexpr,
):
    """Adds what a block of keys gives to dQ of a tile of queries."""
    qt, do, log_sum, less, position = given
    k, v, row_k, length, stride_k, stride_v = cache
    key = start + tl.arange(0, BLOCK)
    kv = row_k + key
    d = tl.arange(0, D)
    there = (d < width)[None, :] | EVEN
    if MASKED:
        there &= (key < length)[:, None]
    kt = tl.load(k + kv[:, None] * stride_k + d[None, :], mask=there, other=0.0)
    if width_v is not None:
        d = tl.arange(0, DV)
        there = (d < width_v)[None, :] | EVEN_V
        if MASKED:
            there &= (key < length)[:, None]
    vt = tl.load(v + kv[:, None] * stride_v + d[None, :], mask=there, other=0.0)
    _, weight = _probabilities(tl.dot(qt, kt.T, input_precision="ieee"), scale, steep, log_sum[:, None])
    ds = weight * (tl.dot(do, vt.T, input_precision="ieee") - less[:, None])
    if MASKED:
        ds = tl.where(seen(key, position, length, window, CAUSAL, WINDOW), ds, 0.0)
    return tl.dot(ds.to(kt.dtype), kt, dq, input_precision="ieee")


@jit(do_not_specialize=["sequences", "window"])
def queries_backward_kernel(
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
    steep,
    factor,
    window,
    width,
    width_v,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    EVEN: tl.constexpr,
    DV: tl.constexpr,
    EVEN_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Computes dQ of a tile of queries: over their keys in ascending order."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, before, last = sequence_of(tile, length_q, sequences, GROUP, BLOCK_M, COUNT)
    tile = last - tile
    known = sequence < sequences
    queries = tl.load(length_q + sequence, mask=known, other=0)
    length = tl.load(length_k + sequence, mask=known, other=0)
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
    wide, dv_col, there_v = width, d, there
    if width_v is not None:
        wide, dv_col = width_v, tl.arange(0, DV)
        there_v = inside[:, None] & ((dv_col < wide)[None, :] | EVEN_V)
    do = tl.load(d_out + at[:, None] * wide + dv_col[None, :], mask=there_v, other=0.0)
    log_sum = tl.load(lse + at, mask=inside, other=0.0) * 1.4426950408889634
    less = tl.load(delta + at, mask=inside, other=0.0)
    k += head.to(tl.int64) * head_k
    v += head.to(tl.int64) * head_v
    row_k = tl.load(first_k + sequence, mask=known, other=0).to(tl.int64)
    first = tile * BLOCK_M // GROUP + length - queries
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, queries * GROUP - 1) // GROUP + length - queries
    begin, end, whole = 0, length, length // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(end, last + 1)
        whole = tl.minimum(whole, (first + 1) // BLOCK_N * BLOCK_N)
    if WINDOW == 2:  # of the chunk of the tile's first query
        begin = tl.maximum(first, 0) // window * window // BLOCK_N * BLOCK_N
        whole = begin
    elif WINDOW:
        begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
        whole = begin
    whole = tl.maximum(whole, begin)
    given, cache = (qt, do, log_sum, less, position), (k, v, row_k, length, stride_k, stride_v)
    dq_tile = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(begin, whole, BLOCK_N):
        dq_tile = _queries_step(
            dq_tile,
            given,
            cache,
            start,
            scale,
            steep,
            window,
            width,
            width_v,
            CAUSAL,
            WINDOW,
            False,
            EVEN,
            BLOCK_N,
            D,
            EVEN_V,
            DV,
        )
    for start in range(whole, end, BLOCK_N):
        dq_tile = _queries_step(
            dq_tile,
            given,
            cache,
            start,
            scale,
            steep,
            window,
            width,
            width_v,
            CAUSAL,
            WINDOW,
            True,
            EVEN,
            BLOCK_N,
            D,
            EVEN_V,
            DV,
        )
    tl.store(dq + at[:, None] * width + d[None, :], (dq_tile * factor + 0.0).to(dq.dtype.element_ty), mask=there)


@jit(do_not_specialize=["tokens"])
def sinks_backward_kernel(lse, delta, sinks, slots, partial, tokens, heads, SLAB: tl.constexpr, BLOCK: tl.constexpr):
    """Computes −Σ p delta over the tokens of a slab, from the first, with p = exp(sink − lse) of each head."""
    slab = tl.program_id(0)
    token, head = slab * SLAB + tl.arange(0, SLAB), tl.arange(0, BLOCK)
    if slots is None:
        token = tl.where(token < tokens, token, -1)
    else:
        token = tl.load(slots + token)
    at = token.to(tl.int64)[:, None] * heads + head[None, :]
    inside = (token >= 0)[:, None] & (head < heads)[None, :]
    log_sum = tl.load(lse + at, mask=inside, other=-float("inf"))
    less = tl.load(delta + at, mask=inside, other=0.0)
    sink = tl.load(sinks + head, mask=head < heads, other=0.0).to(tl.float32)
    p = tl.math.exp2(tl.minimum((sink[None, :] - log_sum) * 1.4426950408889634, 0.0))
    each = tl.where(log_sum == -float("inf"), 0.0, p * less)  # a query that sees no key has no sink either
    total = add_rows(tl.zeros((BLOCK,), dtype=tl.float32), tl.trans(each), BLOCK, SLAB)
    tl.store(partial + slab.to(tl.int64) * heads + head, -total, mask=head < heads)
