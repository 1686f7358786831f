"""Decode's kernels for few sequences: the summation order of forward_kernels.py, what of it is no chain side by side.

`attention_kernel` walks the blocks of a split one after another, which leaves most of a GPU idle where there are few
splits. But only two things go from block to block: the running maximum, which is exact in any order, and the chains
l · alpha + sum and acc · alpha + p v, of which the latter is one for each column of v. So the scores of all blocks are
computed at once, then the weights p, their sums and the factors alpha, of all blocks at once, and last the chains, a
program for some columns. Each step is the expression of `_add_block`, so the bits are those of `attention_kernel`.
"""

import triton
import triton.language as tl

from bi_kernels.launch import jit
from bi_kernels.ops.attention.forward_kernels import _block_at, _block_rows, _store_result
from bi_kernels.ops.attention.schedule import capped, first_row, length_of, sequence_of


@triton.jit
def _tile_of(
    tile,
    first_q,
    length_q,
    length_k,
    sequences,
    width_q,
    width_k,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    LEFT: tl.constexpr,
):
    """Returns (sequence, tile of the sequence, its first row of q's tokens, queries, keys) of a tile of SIZE rows; no
    queries and no keys for a tile of none."""
    sequence, before, _ = sequence_of(tile, length_q, sequences, GROUP, SIZE, COUNT, width_q)
    known = sequence < sequences
    queries = length_of(length_q, sequence, known, width_q)
    length = length_of(length_k, sequence, known, width_k)
    token = first_row(first_q, sequence, known, queries, width_q, LEFT)
    return sequence, tile - before, token, queries, length


@triton.jit
def _keys_of(
    tile,
    queries,
    length,
    window,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Returns the keys that some query of a tile sees: from the beginning of a block, and up to where."""
    begin, end = 0, length
    if CAUSAL:
        last = tl.minimum(tile * TILE + TILE - 1, queries * GROUP - 1) // GROUP + length - queries
        end = tl.minimum(end, last + 1)
    if WINDOW == 2:
        first = tl.maximum(tile * TILE // GROUP + length - queries, 0)
        begin = first // window * window // BLOCK * BLOCK
    elif WINDOW:
        begin = tl.maximum(tile * TILE // GROUP + length - queries - window + 1, 0) // BLOCK * BLOCK
    return begin, end


@triton.jit
def _rows_of(row, token, queries, head, HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Returns where rows of a sequence's tiles lie among those of q, and whether they are there."""
    return (token + row // GROUP) * (HEADS * GROUP) + head * GROUP + row % GROUP, row // GROUP < queries


@jit(do_not_specialize=["sequences", "width_q", "width_k", "window", "pages_stride", "last_page"])
def scores_kernel(
    q,
    k,
    scores,
    first_q,
    length_q,
    first_k,
    length_k,
    pages,
    pages_stride,
    last_page,
    sequences,
    width_q,
    width_k,
    stride_k,
    head_k,
    room,
    window,
    width,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    RUN: tl.constexpr,
    D: tl.constexpr,
    EVEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    LEFT: tl.constexpr,
):
    """Computes the scores (rows of q, room) of a tile of queries and RUN keys, those between rounds that it sees."""
    tile, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    sequence, tile, token, queries, length = _tile_of(
        tile, first_q, length_q, length_k, sequences, width_q, width_k, GROUP, TILE, COUNT, LEFT
    )
    begin, end = _keys_of(tile, queries, length, window, GROUP, TILE, BLOCK, CAUSAL, WINDOW)
    lo, hi = tl.maximum(tl.program_id(1) * RUN, begin // KEYS * KEYS), tl.minimum(tl.program_id(1) * RUN + RUN, end)
    if lo < hi:
        row, d = tile * TILE + tl.arange(0, TILE), tl.arange(0, D)
        at, inside = _rows_of(row, token, queries, head, HEADS, GROUP)
        there = (d < width)[None, :] | EVEN
        qt = tl.load(q + at[:, None] * width + d[None, :], mask=inside[:, None] & there, other=0.0)
        k += head.to(tl.int64) * head_k
        row_k = first_row(first_k, sequence, sequence < sequences, length, width_k, LEFT)
        if PAGE:
            pages += sequence.to(tl.int64) * pages_stride
        after = _block_rows(lo, row_k, pages, last_page, length, PAGE, KEYS)
        for start in range(lo, hi, KEYS):
            key, rows = start + tl.arange(0, KEYS), after
            after = _block_rows(start + KEYS, row_k, pages, last_page, length, PAGE, KEYS)
            at_k = _block_at(k, rows, stride_k, d, PAGE, KEYS)
            kt = tl.load(at_k, mask=(key < hi)[:, None] & there, other=0.0)
            s = tl.dot(qt, kt.T, input_precision="ieee")
            tl.store(scores + at[:, None] * room + key[None, :], s, mask=inside[:, None] & (key < hi)[None, :])


@jit(do_not_specialize=["sequences", "width_q", "width_k", "window", "rows_total"])
def weights_kernel(
    scores,
    weights,
    factors,
    sums,
    parts,
    first_q,
    length_q,
    length_k,
    sequences,
    width_q,
    width_k,
    room,
    rows_total,
    scale,
    steep,
    window,
    wide,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    LEFT: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Computes p of one row of q and one split, rounded, and of each block the sum of p and the factor of what was.
    BLOCKS, at least those of a split, are the rows of a tile here."""
    row, head, split = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    _, row, token, queries, length = _tile_of(
        row, first_q, length_q, length_k, sequences, width_q, width_k, GROUP, 1, COUNT, LEFT
    )
    begin, end = _keys_of(row // TILE, queries, length, window, GROUP, TILE, BLOCK, CAUSAL, WINDOW)
    at, inside = _rows_of(row, token, queries, head, HEADS, GROUP)
    lo, hi = tl.maximum(split * SPLIT, begin), tl.minimum((split + 1) * SPLIT, end)
    if PARTIAL:  # the maxima lie behind the products with V
        parts += tl.num_programs(1).to(tl.int64) * rows_total * wide
    parts += split.to(tl.int64) * rows_total + at
    if inside:
        if lo < hi:
            block = tl.arange(0, BLOCKS)
            start, i = split * SPLIT + block * BLOCK, tl.arange(0, BLOCK)
            key = start[:, None] + i[None, :]
            position = row // GROUP + length - queries
            visible = key < hi
            if CAUSAL:
                visible &= key <= position
            if WINDOW == 2:
                visible &= key >= position // window * window
            elif WINDOW:
                visible &= key > position - window
            s = tl.load(scores + at * room + key, mask=visible, other=0.0)
            # a product of zeros: it lays the scores out as those of `attention_kernel`, and so orders the sum of p
            kind: tl.constexpr = weights.dtype.element_ty
            s = tl.dot(tl.zeros((BLOCKS, 16), kind), tl.zeros((16, BLOCK), kind), s)
            if steep is not None:
                s = capped(s, steep)
            s = tl.where(visible, s, -float("inf"))
            own = tl.maximum(tl.max(s, 1), -float("inf"))
            m = tl.max(tl.where(block[None, :] < block[:, None], own[None, :], -float("inf")), 1)  # of earlier blocks
            top = tl.maximum(m, own)
            base = tl.where(top == -float("inf"), 0.0, top)
            p = tl.math.exp2((s - base[:, None]) * scale)
            alpha = tl.math.exp2((m - base) * scale)
            used = (start >= lo) & (start < hi)
            tl.store(weights + at * room + key, p.to(weights.dtype.element_ty), mask=used[:, None])
            place = (start // BLOCK).to(tl.int64) * rows_total + at
            tl.store(factors + place, alpha, mask=used)
            tl.store(sums + place, tl.sum(p, 1), mask=used)
            tl.store(parts, tl.max(top, 0))
        else:
            tl.store(parts, -float("inf"))


@triton.jit
def _round_of(
    factors, sums, place, rows_total, inside, start, hi, where, PAGE: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr
):
    """Returns of each of a round's N blocks the factor, the sum (1 and 0 beyond the last), and its rows of v."""
    found = ()
    for j in tl.static_range(N):
        key = start + j * BLOCK
        used = inside & (key < hi)
        alpha = tl.load(factors + place + j * rows_total, mask=used, other=1.0)
        total = tl.load(sums + place + j * rows_total, mask=used, other=0.0)
        found = found + (alpha, total, _block_rows(key, where[0], where[1], where[2], hi, PAGE, BLOCK))
    return found


@jit(do_not_specialize=["sequences", "width_q", "width_k", "window", "pages_stride", "last_page", "rows_total"])
def values_kernel(
    weights,
    factors,
    sums,
    v,
    out,
    lse,
    parts,
    first_q,
    length_q,
    first_k,
    length_k,
    pages,
    sinks,
    pages_stride,
    last_page,
    sequences,
    width_q,
    width_k,
    stride_v,
    head_v,
    room,
    rows_total,
    scale,
    window,
    wide,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    TOGETHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    DV: tl.constexpr,
    EVEN_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    LEFT: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Computes some columns of the result of a tile of queries and one split, TOGETHER blocks a round."""
    slice, head = tl.program_id(0) % (DV // COLUMNS), tl.program_id(0) // (DV // COLUMNS) % HEADS
    tile, split = tl.program_id(0) // (DV // COLUMNS) // HEADS, tl.program_id(1)
    sequence, tile, token, queries, length = _tile_of(
        tile, first_q, length_q, length_k, sequences, width_q, width_k, GROUP, TILE, COUNT, LEFT
    )
    begin, end = _keys_of(tile, queries, length, window, GROUP, TILE, BLOCK, CAUSAL, WINDOW)
    lo, hi = tl.maximum(split * SPLIT, begin), tl.minimum((split + 1) * SPLIT, end)
    row, d, i = tile * TILE + tl.arange(0, TILE), slice * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    at, inside = _rows_of(row, token, queries, head, HEADS, GROUP)
    there = (d < wide)[None, :] | EVEN_V
    v += head.to(tl.int64) * head_v
    row_k = first_row(first_k, sequence, sequence < sequences, length, width_k, LEFT)
    if PAGE:
        pages += sequence.to(tl.int64) * pages_stride
    ps, where = weights + at[:, None] * room + i[None, :], (row_k, pages, last_page)
    l = tl.zeros((TILE,), dtype=tl.float32)
    acc = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
    place = (lo // BLOCK).to(tl.int64) * rows_total + at
    after = _round_of(factors, sums, place, rows_total, inside, lo, hi, where, PAGE, BLOCK, TOGETHER)
    for first in range(lo, hi, BLOCK * TOGETHER):
        known, next, place = after, first + BLOCK * TOGETHER, place + TOGETHER * rows_total
        after = _round_of(factors, sums, place, rows_total, inside, next, hi, where, PAGE, BLOCK, TOGETHER)
        for j in tl.static_range(TOGETHER):
            start = first + j * BLOCK
            alpha, rows = known[3 * j], known[3 * j + 2] if PAGE else row_k + start
            p = tl.load(ps + start, mask=(inside & (start < hi))[:, None], other=0.0)
            at_v = _block_at(v, rows, stride_v, d, PAGE, BLOCK)
            vt = tl.load(at_v, mask=(start + i < hi)[:, None] & there, other=0.0)
            l = l * alpha + known[3 * j + 1]
            acc = tl.dot(p, vt, acc * alpha[:, None], input_precision="ieee")
    part = split.to(tl.int64) * rows_total + at
    if PARTIAL:
        parts_l = tl.num_programs(1).to(tl.int64) * rows_total * (wide + 1)
        tl.store(parts + parts_l + part, l, mask=inside & (slice == 0))
        if lo < hi:
            tl.store(parts + part[:, None] * wide + d[None, :], acc, mask=inside[:, None] & there)
    else:
        m = tl.load(parts + part, mask=inside, other=-float("inf"))
        whole = inside[:, None] & there
        _store_result(out, lse, sinks, at, m, l, acc, scale, inside, d, wide, whole, HEADS * GROUP, slice == 0)
