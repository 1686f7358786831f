"""Attention's forward kernels: a tile of queries against its keys, and the merge of splits computed apart.

A query's keys are taken in blocks of 64, counted from the first key of its sequence: an online softmax in fp32, whose
blocks are added in ascending order, in splits of 4096 keys that are merged in ascending order. Where the splits are
computed, one after another in one program (prefill) or each in its own (decode), and how many queries share a tile
changes no bit; a key that a query does not see adds exact nothing, where v is finite. The heads of a group lie beside
each other in a tile. Rounding points: the scores stay fp32; exp2((score − maximum) · scale) is rounded to the storage
dtype for the product with V and is summed unrounded; the output is rounded once.

A sink, a logit of a head without a value, joins the state of all splits, after the last merge: whatever the splits.
With a cap the scores are their tanh, from −1 to 1, and the cap is part of `scale`.
"""

import triton
import triton.language as tl

from bi_kernels.launch import jit
from bi_kernels.ops.attention.schedule import capped, first_row, length_of, seen, sequence_of


@triton.jit
def _key_rows(key, first, pages, last_page, length, PAGE: tl.constexpr):
    """Returns the rows of k that hold some keys of a sequence, whose keys start in row `first`, or lie in `pages`."""
    if PAGE:
        page = tl.load(pages + key // PAGE, mask=key < length, other=0)
        page = tl.minimum(tl.maximum(page.to(tl.int64), 0), last_page)  # in a captured graph nobody has checked them
        return page * PAGE + key % PAGE
    return first + key


@triton.jit
def _block_rows(start, first, pages, last_page, length, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns what `_key_rows` does of BLOCK keys from `start` on: of the first alone, if the others follow it."""
    key = start if PAGE % BLOCK == 0 else start + tl.arange(0, BLOCK)
    return _key_rows(key, first, pages, last_page, length, PAGE)


@triton.jit
def _block_at(t, rows, stride, d, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns where columns d of BLOCK keys lie in t, which are in such rows."""
    if PAGE % BLOCK == 0:
        at = t + rows * stride + (tl.arange(0, BLOCK).to(tl.int64)[:, None] * stride + d[None, :])
    else:
        at = t + rows[:, None] * stride + d[None, :]
    return at


@triton.jit
def _add_block(
    q,
    state,
    cache,
    start,
    rows,
    where,
    scale,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    EVEN_V: tl.constexpr,
):
    """Returns the online softmax's state (m, l, acc) after the next block of keys, in such `rows`."""
    m, l, acc = state
    position, length, window, width, width_v, steep = where
    k, v, k_tma, v_tma, head, stride_k, stride_v = cache
    key = start + tl.arange(0, BLOCK)
    if TMA:
        at = rows.to(tl.int32)
        kt = k_tma.load([at, head * D])
    else:
        d = tl.arange(0, D)
        there = (d < width)[None, :] | EVEN
        if MASKED:
            there &= (key < length)[:, None]
        kt = tl.load(_block_at(k, rows, stride_k, d, PAGE, BLOCK), mask=there, other=0.0)
    s = tl.dot(q, kt.T, input_precision="ieee")
    if steep is not None:
        s = capped(s, steep)
    if MASKED:
        s = tl.where(seen(key, position, length, window, CAUSAL, WINDOW), s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == -float("inf"), 0.0, top)
    p = tl.math.exp2((s - base[:, None]) * scale)  # of the largest score exactly 1, however large that is
    alpha = tl.math.exp2((m - base) * scale)
    l = l * alpha + tl.sum(p, 1)
    if TMA:
        vt = v_tma.load([at, head * DV])
    else:
        if width_v is not None:
            d = tl.arange(0, DV)
            there = (d < width_v)[None, :] | EVEN_V
            if MASKED:
                there &= (key < length)[:, None]
        vt = tl.load(_block_at(v, rows, stride_v, d, PAGE, BLOCK), mask=there, other=0.0)
    acc = tl.dot(p.to(vt.dtype), vt, acc * alpha[:, None], input_precision="ieee")
    return top, l, acc


@triton.jit
def _merge(m, l, acc, m_next, l_next, acc_next, scale):
    """Returns the state of some splits, and then of the next one."""
    top = tl.maximum(m, m_next)
    base = tl.where(top == -float("inf"), 0.0, top)
    a, b = tl.math.exp2((m - base) * scale), tl.math.exp2((m_next - base) * scale)
    return top, l * a + l_next * b, acc * a[:, None] + acc_next * b[:, None]


@triton.jit
def _with_sink(m, l, acc, scale, sink):
    """Returns the state of all keys with m times `scale`, and then of each row's sink, a logit."""
    own, sink = m * scale, sink.to(tl.float32) * 1.4426950408889634
    top = tl.maximum(own, sink)
    base = tl.where(top == -float("inf"), 0.0, top)
    a, b = tl.math.exp2(own - base), tl.math.exp2(sink - base)
    return top, l * a + b, acc * a[:, None]


@triton.jit
def _store_result(out, lse, sinks, at, m, l, acc, scale, rows, d, width, inside, HEADS: tl.constexpr, stores_lse=True):
    """Stores the normalised output and the natural logarithm of the sum; 0 and −inf for a query that saw no key."""
    none = (l == 0.0) & (m == -float("inf"))
    if sinks is not None:
        m, l, acc = _with_sink(m, l, acc, scale, tl.load(sinks + at % HEADS, mask=rows, other=0.0))
        scale = 1.0
    y = (acc + 0.0) / tl.where(none, 1.0, l)[:, None]
    tl.store(out + at[:, None] * width + d[None, :], y.to(out.dtype.element_ty), mask=inside)
    log_sum = tl.where(none, -float("inf"), (m * scale + tl.math.log2(l)) * 0.6931471805599453)
    tl.store(lse + at, log_sum, mask=rows & stores_lse)


@jit(do_not_specialize=["sequences", "width_q", "width_k", "window", "rows_total", "pages_stride", "last_page"])
def attention_kernel(
    q,
    k,
    v,
    k_tma,
    v_tma,
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
    stride_k,
    stride_v,
    head_k,
    head_v,
    rows_total,
    scale,
    steep,
    window,
    width,
    width_v,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    D: tl.constexpr,
    EVEN: tl.constexpr,
    DV: tl.constexpr,
    EVEN_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    LEFT: tl.constexpr,
    MANY: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Computes one tile of queries against all of their keys, or with PARTIAL against one split of them."""
    # the heads side by side, whose keys lie beside each other in memory
    tile, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    sequence, before, last = sequence_of(tile, length_q, sequences, GROUP, BLOCK_M, COUNT, width_q)
    tile = last - tile  # the last of a causal sequence takes longest, and so begins
    known = sequence < sequences
    queries = length_of(length_q, sequence, known, width_q)
    length = length_of(length_k, sequence, known, width_k)
    token_q = first_row(first_q, sequence, known, queries, width_q, LEFT)
    row_k = first_row(first_k, sequence, known, length, width_k, LEFT)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # token by token, the heads of the group beside each other
    token = row // GROUP
    inside = token < queries
    position = token + length - queries
    d = tl.arange(0, D)
    at = (token_q + token) * (HEADS * GROUP) + head * GROUP + row % GROUP
    there = inside[:, None] & ((d < width)[None, :] | EVEN)
    qt = tl.load(q + at[:, None] * width + d[None, :], mask=there, other=0.0)
    wide = width
    if width_v is not None:
        wide, d = width_v, tl.arange(0, DV)
        there = inside[:, None] & ((d < wide)[None, :] | EVEN_V)
    k += head.to(tl.int64) * head_k
    v += head.to(tl.int64) * head_v
    if PAGE:
        pages += sequence.to(tl.int64) * pages_stride
    cache = k, v, k_tma, v_tma, head, stride_k, stride_v
    where = position, length, window, width, width_v, steep

    first = tile * BLOCK_M // GROUP + length - queries  # positions of the tile's first and last query
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, queries * GROUP - 1) // GROUP + length - queries
    begin, end, whole = 0, length, length // BLOCK * BLOCK  # keys that some query sees; from `whole` on, not all do
    if CAUSAL:
        end = tl.minimum(end, last + 1)
        whole = tl.minimum(whole, (first + 1) // BLOCK * BLOCK)
    if WINDOW == 2:  # of the chunk of the tile's first query
        begin = tl.maximum(first, 0) // window * window // BLOCK * BLOCK
        whole = begin
    elif WINDOW:
        begin = tl.maximum(first - window + 1, 0) // BLOCK * BLOCK
        whole = begin
    m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, DV), dtype=tl.float32)
    split, splits = begin // SPLIT, tl.cdiv(end, SPLIT)
    if PARTIAL:
        split = tl.program_id(1)
        splits = tl.minimum(split + 1, splits)
    for n in range(split, splits):
        lo, hi = tl.maximum(n * SPLIT, begin), tl.minimum((n + 1) * SPLIT, end)
        middle = tl.maximum(tl.minimum(hi, whole), lo)
        m_own = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
        l_own = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc_own = tl.zeros((BLOCK_M, DV), dtype=tl.float32)
        after = _block_rows(lo, row_k, pages, last_page, length, PAGE, BLOCK)  # a block ahead: no copy waits for it
        for start in range(lo, middle, BLOCK):
            rows, after = after, _block_rows(start + BLOCK, row_k, pages, last_page, length, PAGE, BLOCK)
            own = m_own, l_own, acc_own
            m_own, l_own, acc_own = _add_block(
                qt,
                own,
                cache,
                start,
                rows,
                where,
                scale,
                CAUSAL,
                WINDOW,
                PAGE,
                False,
                k_tma is not None,
                EVEN,
                BLOCK,
                D,
                DV,
                EVEN_V,
            )
        for start in range(middle, hi, BLOCK):
            rows, after = after, _block_rows(start + BLOCK, row_k, pages, last_page, length, PAGE, BLOCK)
            own = m_own, l_own, acc_own
            m_own, l_own, acc_own = _add_block(
                qt, own, cache, start, rows, where, scale, CAUSAL, WINDOW, PAGE, True, False, EVEN, BLOCK, D, DV, EVEN_V
            )
        if MANY:
            m, l, acc = _merge(m, l, acc, m_own, l_own, acc_own, scale)
        else:
            m, l, acc = m_own, l_own, acc_own
    if PARTIAL:
        part, parts_m = tl.program_id(1).to(tl.int64) * rows_total + at, tl.num_programs(1).to(tl.int64) * rows_total
        tl.store(parts + parts_m * wide + part, m, mask=inside)
        tl.store(parts + parts_m * (wide + 1) + part, l, mask=inside)
        if split < splits:
            tl.store(parts + part[:, None] * wide + d[None, :], acc, mask=there)
    else:
        _store_result(out, lse, sinks, at, m, l, acc, scale, inside, d, wide, there, HEADS * GROUP)


@jit(do_not_specialize=["rows_total", "splits"])
def merge_kernel(
    parts, out, lse, sinks, rows_total, splits, scale, width, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):
    """Merges the splits of a query, in ascending order: of each the product with V, then the maxima, then the sums."""
    parts_m = parts + tl.cast(splits, tl.int64) * rows_total * width
    parts_l = parts_m + tl.cast(splits, tl.int64) * rows_total
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    inside = row < rows_total
    there = inside[:, None] & (d < width)[None, :]
    m = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    l = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, D), dtype=tl.float32)
    at = row  # of the first split; the next one is `rows_total` further
    for _ in range(splits):
        m_next = tl.load(parts_m + at, mask=inside, other=-float("inf"))
        l_next = tl.load(parts_l + at, mask=inside, other=0.0)
        some = there & (m_next > -float("inf"))[:, None]
        acc_next = tl.load(parts + at[:, None] * width + d[None, :], mask=some, other=0.0)
        m, l, acc = _merge(m, l, acc, m_next, l_next, acc_next, scale)
        at += rows_total
    _store_result(out, lse, sinks, row, m, l, acc, scale, inside, d, width, there, HEADS)
