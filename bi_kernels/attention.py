"""Attention: prefill, chunks and decode over a contiguous or paged cache, forward and backward, with one fold.

A query's keys are taken in blocks of 64, counted from the first key of its sequence: an online softmax in fp32, whose
blocks are added in ascending order, in splits of 4096 keys that are merged in ascending order. Where the splits are
computed, one after another in one program (prefill) or each in its own (decode), and how many queries share a tile changes
no bit; a key that a query does not see adds exact nothing. The heads of a group lie beside each other in a tile.
Rounding points: the scores stay fp32; exp2(score · scale − maximum) is rounded to the storage dtype for the product with V
and is summed unrounded; the output is rounded once.

Backward, without atomics: probabilities again from the saved LSE; dV and dK fold over a key block's queries, head after
head of the group, in slabs of 16 from the sequence's first query; dQ folds over the keys in slabs of 16.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from bi_kernels.checks import apply, check, check_integer, check_number
from bi_kernels.embed import can_wait

BLOCK, SPLIT = 64, 4096  # keys; both are part of the fold
MERGE_ROWS = 16
LOG2E = math.log2(math.e)


class Tiling(NamedTuple):
    """Launch configurations, free of any bit: the warps of a tile lie along its rows, so a row's sum keeps its order."""

    rows: int  # queries
    columns: int  # keys
    warps: int
    stages: int


PREFILL, DECODE, FP32 = Tiling(128, BLOCK, 8, 3), Tiling(64, BLOCK, 4, 3), Tiling(32, 32, 4, 2)
KEYS, QUERIES = Tiling(64, 128, 8, 2), Tiling(128, 64, 8, 2)  # of the backward
FEW = 256  # tiles below which each split is a program of its own


@triton.jit
def _sequence_of(tile, tiles, COUNT: tl.constexpr):
    """(sequence, tile of it) of a tile, from the number of tiles up to and with each sequence."""
    ends = tl.load(tiles + tl.arange(0, COUNT))
    sequence = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.max(tl.where(tl.arange(0, COUNT) < sequence, ends, 0), 0)
    return sequence, tile - before


@triton.jit
def _key_rows(key, first, pages, length, PAGE: tl.constexpr):
    """The rows of k that hold some keys of a sequence, whose keys start in row `first`, or lie in `pages`."""
    if PAGE:
        page = tl.load(pages + key // PAGE, mask=key < length, other=0)
        return page.to(tl.int64) * PAGE + key % PAGE
    else:
        return first + key


@triton.jit
def _seen(key, position, length, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the query at `position` sees `key`."""
    seen = (key < length)[None, :]
    if CAUSAL:
        seen &= key[None, :] <= position[:, None]
    if WINDOW:
        seen &= key[None, :] > position[:, None] - window
    return seen


@triton.jit
def _add_block(q, m, l, acc, k, v, kv_rows, stride_k, stride_v, key, position, length, scale, window, width,
               CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr):
    """The online softmax's next block of keys."""
    d = tl.arange(0, D)
    there = (d < width)[None, :] | EVEN
    if MASKED:
        there &= (key < length)[:, None]
    kt = tl.load(k + kv_rows[:, None] * stride_k + d[None, :], mask=there, other=0.0)
    s = tl.dot(q, kt.T, input_precision="ieee")
    if MASKED:
        s = tl.where(_seen(key, position, length, window, CAUSAL, WINDOW), s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1) * scale)
    base = tl.where(top == -float("inf"), 0.0, top)
    p = tl.math.exp2(tl.fma(s, scale, -base[:, None]))
    alpha = tl.math.exp2(m - base)
    l = l * alpha + tl.sum(p, 1)
    vt = tl.load(v + kv_rows[:, None] * stride_v + d[None, :], mask=there, other=0.0)
    acc = tl.dot(p.to(vt.dtype), vt, acc * alpha[:, None], input_precision="ieee")
    return top, l, acc


@triton.jit
def _merge(m, l, acc, m_next, l_next, acc_next):
    """The state of some splits, and then that of the next one."""
    top = tl.maximum(m, m_next)
    base = tl.where(top == -float("inf"), 0.0, top)
    a, b = tl.math.exp2(m - base), tl.math.exp2(m_next - base)
    return top, l * a + l_next * b, acc * a[:, None] + acc_next * b[:, None]


@triton.jit
def _store_result(out, lse, at, m, l, acc, rows, d, width, inside):
    """The normalised output and the natural logarithm of the sum; 0 and −inf for a query that saw no key."""
    none = l == 0.0
    y = (acc + 0.0) / tl.where(none, 1.0, l)[:, None]
    tl.store(out + at[:, None] * width + d[None, :], y.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + at, tl.where(none, -float("inf"), (m + tl.math.log2(l)) * 0.6931471805599453), mask=rows)


@triton.jit(do_not_specialize=["sequences", "tiles_total", "window", "rows_total"])
def _attention_kernel(q, k, v, out, lse, part_m, part_l, part_acc, tiles, first_q, length_q, first_k, length_k, pages,
                      pages_stride, sequences, tiles_total, stride_k, stride_v, head_k, head_v, rows_total, scale, window,
                      width, COUNT: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
                      WINDOW: tl.constexpr, PAGE: tl.constexpr, PARTIAL: tl.constexpr, MANY: tl.constexpr):
    """One tile of queries against all of their keys, or with PARTIAL against one split of them."""
    tile = tiles_total - 1 - tl.program_id(0)  # the last of a causal sequence take longest
    head = tl.program_id(1)
    sequence, tile = _sequence_of(tile, tiles, COUNT)
    if sequence < sequences:
        queries, length = tl.load(length_q + sequence), tl.load(length_k + sequence)
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # token by token, the heads of the group beside each other
        token = row // GROUP
        inside = token < queries
        position = token + length - queries
        d = tl.arange(0, D)
        at = (tl.load(first_q + sequence).to(tl.int64) + token) * (HEADS * GROUP) + head * GROUP + row % GROUP
        there = inside[:, None] & ((d < width)[None, :] | EVEN)
        qt = tl.load(q + at[:, None] * width + d[None, :], mask=there, other=0.0)
        k += head * head_k
        v += head * head_v
        row_k = tl.load(first_k + sequence).to(tl.int64)
        if PAGE:
            pages += sequence * pages_stride

        first = tile * BLOCK_M // GROUP + length - queries  # positions of the tile's first and last query
        last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, queries * GROUP - 1) // GROUP + length - queries
        begin, end, whole = 0, length, length // BLOCK * BLOCK  # keys that some query sees; from `whole` on, not all do
        if CAUSAL:
            end = tl.minimum(end, last + 1)
            whole = tl.minimum(whole, (first + 1) // BLOCK * BLOCK)
        if WINDOW:
            begin = tl.maximum(first - window + 1, 0) // BLOCK * BLOCK
            whole = begin
        m = tl.full((BLOCK_M, ), -float("inf"), dtype=tl.float32)
        l = tl.zeros((BLOCK_M, ), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
        split, splits = begin // SPLIT, tl.cdiv(end, SPLIT)
        if PARTIAL:
            split = tl.program_id(2)
            splits = tl.minimum(split + 1, splits)
        for n in range(split, splits):
            lo, hi = tl.maximum(n * SPLIT, begin), tl.minimum((n + 1) * SPLIT, end)
            middle = tl.maximum(tl.minimum(hi, whole), lo)
            m_own = tl.full((BLOCK_M, ), -float("inf"), dtype=tl.float32)
            l_own = tl.zeros((BLOCK_M, ), dtype=tl.float32)
            acc_own = tl.zeros((BLOCK_M, D), dtype=tl.float32)
            for start in range(lo, middle, BLOCK):
                key = start + tl.arange(0, BLOCK)
                kv = _key_rows(key, row_k, pages, length, PAGE)
                m_own, l_own, acc_own = _add_block(qt, m_own, l_own, acc_own, k, v, kv, stride_k, stride_v, key, position, length, scale,
                                                   window, width, CAUSAL, WINDOW, False, EVEN, D)
            for start in range(middle, hi, BLOCK):
                key = start + tl.arange(0, BLOCK)
                kv = _key_rows(key, row_k, pages, length, PAGE)
                m_own, l_own, acc_own = _add_block(qt, m_own, l_own, acc_own, k, v, kv, stride_k, stride_v, key, position, length, scale,
                                                   window, width, CAUSAL, WINDOW, True, EVEN, D)
            if MANY:
                m, l, acc = _merge(m, l, acc, m_own, l_own, acc_own)
            else:
                m, l, acc = m_own, l_own, acc_own
        if PARTIAL:
            part = tl.program_id(2).to(tl.int64) * rows_total + at
            tl.store(part_m + part, m, mask=inside)
            tl.store(part_l + part, l, mask=inside)
            if split < splits:
                tl.store(part_acc + part[:, None] * width + d[None, :], acc, mask=there)
        else:
            _store_result(out, lse, at, m, l, acc, inside, d, width, there)


@triton.jit
def _merge_kernel(part_m, part_l, part_acc, out, lse, rows_total, splits, width, ROWS: tl.constexpr, D: tl.constexpr):
    """The splits of a query, in ascending order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    inside = row < rows_total
    there = inside[:, None] & (d < width)[None, :]
    m = tl.full((ROWS, ), -float("inf"), dtype=tl.float32)
    l = tl.zeros((ROWS, ), dtype=tl.float32)
    acc = tl.zeros((ROWS, D), dtype=tl.float32)
    for split in range(0, splits):
        at = split.to(tl.int64) * rows_total + row
        m_next = tl.load(part_m + at, mask=inside, other=-float("inf"))
        l_next = tl.load(part_l + at, mask=inside, other=0.0)
        some = there & (m_next > -float("inf"))[:, None]
        acc_next = tl.load(part_acc + at[:, None] * width + d[None, :], mask=some, other=0.0)
        m, l, acc = _merge(m, l, acc, m_next, l_next, acc_next)
    _store_result(out, lse, row, m, l, acc, inside, d, width, there)


@triton.jit
def _delta_kernel(out, d_out, d_lse, delta, rows_total, width, HAS_LSE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Σ out · dout of every row, less the gradient of its lse."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    inside = row < rows_total
    at, there = row[:, None] * width + d[None, :], inside[:, None] & (d < width)[None, :]
    product = tl.load(out + at, mask=there, other=0.0).to(tl.float32) * tl.load(d_out + at, mask=there, other=0.0).to(tl.float32)
    total = tl.sum(product, 1)
    if HAS_LSE:
        total -= tl.load(d_lse + row, mask=inside, other=0.0)
    tl.store(delta + row, total, mask=inside)


@triton.jit
def _keys_step(k_tile, v_tile, dk, dv, q, d_out, lse, delta, row, token, queries, key, length, scale, window, width,
               HEADS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr,
               D: tl.constexpr):
    """What some queries of one head add to dK and dV of a tile of keys."""
    d = tl.arange(0, D)
    at = row + token.to(tl.int64) * HEADS
    inside = token < queries  # beyond them dout is 0, and so is what it adds
    there = inside[:, None] & ((d < width)[None, :] | EVEN)
    qt = tl.load(q + at[:, None] * width + d[None, :], mask=there, other=0.0)
    do = tl.load(d_out + at[:, None] * width + d[None, :], mask=there, other=0.0)
    log_sum = tl.load(lse + at, mask=inside, other=0.0) * 1.4426950408889634
    less = tl.load(delta + at, mask=inside, other=0.0)
    p = tl.math.exp2(tl.fma(tl.dot(k_tile, qt.T, input_precision="ieee"), scale, -log_sum[None, :]))
    ds = p * (tl.dot(v_tile, do.T, input_precision="ieee") - less[None, :])
    if MASKED:
        seen = _seen(key, token + length - queries, length, window, CAUSAL, WINDOW)
        p, ds = tl.where(seen.T, p, 0.0), tl.where(seen.T, ds, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    dk = tl.dot(ds.to(qt.dtype), qt, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["sequences", "tiles_total", "window"])
def _keys_backward_kernel(q, k, v, d_out, lse, delta, dk, dv, tiles, first_q, length_q, first_k, length_k, sequences, tiles_total, stride_k,
                          stride_v, head_k, head_v, scale, factor, window, width, COUNT: tl.constexpr, GROUP: tl.constexpr,
                          HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
                          EVEN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """dK and dV of a tile of keys: over the heads of the group, and the queries of each, in ascending order."""
    head = tl.program_id(1)
    sequence, tile = _sequence_of(tl.program_id(0), tiles, COUNT)
    if sequence < sequences:
        queries, length = tl.load(length_q + sequence), tl.load(length_k + sequence)
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        d = tl.arange(0, D)
        row_k = tl.load(first_k + sequence).to(tl.int64) + key
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
        for member in range(0, GROUP):
            row = tl.load(first_q + sequence).to(tl.int64) * (HEADS * GROUP) + head * GROUP + member
            for start in range(begin, middle, BLOCK_M):
                token = start + tl.arange(0, BLOCK_M)
                dk_tile, dv_tile = _keys_step(k_tile, v_tile, dk_tile, dv_tile, q, d_out, lse, delta, row, token, queries, key, length,
                                              scale, window, width, HEADS * GROUP, CAUSAL, WINDOW, True, EVEN, D)
            for start in range(middle, end, BLOCK_M):
                token = start + tl.arange(0, BLOCK_M)
                dk_tile, dv_tile = _keys_step(k_tile, v_tile, dk_tile, dv_tile, q, d_out, lse, delta, row, token, queries, key, length,
                                              scale, window, width, HEADS * GROUP, CAUSAL, WINDOW, False, EVEN, D)
        at = (row_k[:, None] * HEADS + head) * width + d[None, :]
        tl.store(dk + at, (dk_tile * factor + 0.0).to(dk.dtype.element_ty), mask=there)
        tl.store(dv + at, (dv_tile + 0.0).to(dv.dtype.element_ty), mask=there)


@triton.jit
def _queries_step(qt, do, dq, k, v, kv, stride_k, stride_v, log_sum, less, key, position, length, scale, window, width,
                  CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr):
    """What a block of keys adds to dQ of a tile of queries."""
    d = tl.arange(0, D)
    there = (d < width)[None, :] | EVEN
    if MASKED:
        there &= (key < length)[:, None]
    kt = tl.load(k + kv[:, None] * stride_k + d[None, :], mask=there, other=0.0)
    vt = tl.load(v + kv[:, None] * stride_v + d[None, :], mask=there, other=0.0)
    p = tl.math.exp2(tl.fma(tl.dot(qt, kt.T, input_precision="ieee"), scale, -log_sum[:, None]))
    ds = p * (tl.dot(do, vt.T, input_precision="ieee") - less[:, None])
    if MASKED:
        ds = tl.where(_seen(key, position, length, window, CAUSAL, WINDOW), ds, 0.0)
    return tl.dot(ds.to(kt.dtype), kt, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["sequences", "tiles_total", "window"])
def _queries_backward_kernel(q, k, v, d_out, lse, delta, dq, tiles, first_q, length_q, first_k, length_k, sequences, tiles_total, stride_k,
                             stride_v, head_k, head_v, scale, factor, window, width, COUNT: tl.constexpr, GROUP: tl.constexpr,
                             HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
                             EVEN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """dQ of a tile of queries: over their keys in ascending order."""
    head = tl.program_id(1)
    sequence, tile = _sequence_of(tiles_total - 1 - tl.program_id(0), tiles, COUNT)
    if sequence < sequences:
        queries, length = tl.load(length_q + sequence), tl.load(length_k + sequence)
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        token = row // GROUP
        inside = token < queries
        position = token + length - queries
        d = tl.arange(0, D)
        at = (tl.load(first_q + sequence).to(tl.int64) + token) * (HEADS * GROUP) + head * GROUP + row % GROUP
        there = inside[:, None] & ((d < width)[None, :] | EVEN)
        qt = tl.load(q + at[:, None] * width + d[None, :], mask=there, other=0.0)
        do = tl.load(d_out + at[:, None] * width + d[None, :], mask=there, other=0.0)
        log_sum = tl.load(lse + at, mask=inside, other=0.0) * 1.4426950408889634
        less = tl.load(delta + at, mask=inside, other=0.0)
        k += head * head_k
        v += head * head_v
        row_k = tl.load(first_k + sequence).to(tl.int64)
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
            dq_tile = _queries_step(qt, do, dq_tile, k, v, row_k + key, stride_k, stride_v, log_sum, less, key, position, length, scale,
                                    window, width, CAUSAL, WINDOW, False, EVEN, D)
        for start in range(whole, end, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            dq_tile = _queries_step(qt, do, dq_tile, k, v, row_k + key, stride_k, stride_v, log_sum, less, key, position, length, scale,
                                    window, width, CAUSAL, WINDOW, True, EVEN, D)
        tl.store(dq + at[:, None] * width + d[None, :], (dq_tile * factor + 0.0).to(dq.dtype.element_ty), mask=there)


def _tiles(lengths: torch.Tensor, rows: int) -> tuple[torch.Tensor, int]:
    """The number of tiles of `rows` rows up to and with each sequence, padded to a power of two, and that power."""
    count = triton.next_power_of_2(len(lengths))
    ends = lengths.new_full((count, ), 2**31 - 1, dtype=torch.int32)
    ends[:len(lengths)] = (-(-lengths // rows)).cumsum(0)
    return ends, count


def _most_tiles(tokens: int, sequences: int, rows: int) -> int:
    """At least as many as there are, however `tokens` are spread over the sequences."""
    return tokens // rows + min(sequences, tokens)


def _shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict:
    width, group = q.shape[-1], q.shape[-2] // k.shape[-2]
    block = max(16, triton.next_power_of_2(width))
    return {"stride_k": k.stride(-3), "stride_v": v.stride(-3), "head_k": k.stride(-2), "head_v": v.stride(-2), "width": width,
            "GROUP": group, "HEADS": k.shape[-2], "D": block, "EVEN": block == width, "enable_fp_fusion": False}


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_q: torch.Tensor, length_q: torch.Tensor,
               first_k: torch.Tensor, length_k: torch.Tensor, pages: torch.Tensor | None, page: int, longest: int, full: bool,
               causal: bool, scale: float, window: int) -> list[torch.Tensor]:
    """[out, lse] of q (tokens, heads, D) on k, v (rows, heads, D); full: every token is of some sequence."""
    tokens, heads, width = q.shape
    shape = _shape(q, k, v)
    out = q.new_empty(q.shape) if full else q.new_zeros(q.shape)
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if full else q.new_full((tokens, heads), -math.inf, dtype=torch.float32)
    if not q.numel():
        return [out, lse]
    group, splits = shape["GROUP"], max(1, triton.cdiv(longest, SPLIT))
    small = tokens * group // PREFILL.rows + min(len(length_q), tokens)
    few = small * k.shape[-2] < FEW
    tiling = FP32 if q.dtype == torch.float32 else DECODE if few else PREFILL
    tiles, count = _tiles(length_q * group, tiling.rows)
    total = _most_tiles(tokens * group, len(length_q), tiling.rows)
    partial = few and splits > 1
    parts = [q.new_empty(splits, tokens, heads, *last, dtype=torch.float32) if partial else None for last in ((), (), (width, ))]
    _attention_kernel[(total, k.shape[-2], splits if partial else 1)](
        q, k, v, out, lse, *parts, tiles, first_q, length_q, first_k, length_k, pages, 0 if pages is None else pages.stride(0), len(length_q), total,
        rows_total=tokens * heads, scale=scale * LOG2E, window=window, COUNT=count, BLOCK_M=tiling.rows, BLOCK=BLOCK, SPLIT=SPLIT,
        CAUSAL=causal, WINDOW=window > 0, PAGE=page, PARTIAL=partial, MANY=splits > 1 and not partial, num_warps=tiling.warps,
        num_stages=tiling.stages, **shape)
    if partial:
        _merge_kernel[(triton.cdiv(tokens * heads, MERGE_ROWS), )](*parts, out, lse, tokens * heads, splits, width, ROWS=MERGE_ROWS,
                                                            D=shape["D"], num_warps=4, enable_fp_fusion=False)
    return [out, lse]


class _Attention(torch.autograd.Function):

    @staticmethod
    def forward(ctx, q, k, v, first_q, length_q, first_k, length_k, pages, page, longest, full, causal, scale, window):
        out, lse = _attention(q, k, v, first_q, length_q, first_k, length_k, pages, page, longest, full, causal, scale, window)
        ctx.constants = full, causal, scale, window
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, first_q, length_q, first_k, length_k, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse):
        q, k, v, first_q, length_q, first_k, length_k, out, lse = ctx.saved_tensors
        full, causal, scale, window = ctx.constants
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
        (tokens, heads, width), shape = q.shape, _shape(q, k, v)
        make = torch.empty_like if full else torch.zeros_like
        grads = [make(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        delta = torch.empty_like(lse)
        if q.numel() and k.numel():
            _delta_kernel[(triton.cdiv(tokens * heads, MERGE_ROWS), )](
                out, d_out, None if d_lse is None else d_lse.contiguous(), delta, tokens * heads, width, HAS_LSE=d_lse is not None, ROWS=MERGE_ROWS,
                D=shape["D"], num_warps=4, enable_fp_fusion=False)
            given = {"scale": scale * LOG2E, "factor": scale, "window": window, "CAUSAL": causal, "WINDOW": window > 0, **shape}
            where = first_q, length_q, first_k, length_k
            keys, queries = (KEYS, QUERIES) if q.dtype != torch.float32 else (FP32, FP32)
            tiles, count = _tiles(length_k, keys.columns)
            total = _most_tiles(len(k), len(length_k), keys.columns)
            _keys_backward_kernel[(total, k.shape[-2])](q, k, v, d_out, lse, delta, *grads[1:], tiles, *where, len(length_q), total, COUNT=count,
                                                        BLOCK_M=keys.rows, BLOCK_N=keys.columns, num_warps=keys.warps, num_stages=keys.stages, **given)
            tiles, count = _tiles(length_q * shape["GROUP"], queries.rows)
            total = _most_tiles(tokens * shape["GROUP"], len(length_q), queries.rows)
            _queries_backward_kernel[(total, k.shape[-2])](q, k, v, d_out, lse, delta, grads[0], tiles, *where, len(length_q), total, COUNT=count,
                                                           BLOCK_M=queries.rows, BLOCK_N=queries.columns, num_warps=queries.warps, num_stages=queries.stages, **given)
        return *grads, *[None] * 11


_opaque = torch.library.custom_op("bi_kernels::attention", _attention, mutates_args=())


@_opaque.register_fake
def _(q, k, v, *_):
    return [torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)]


def _rows(t: torch.Tensor) -> torch.Tensor:
    """(…, heads, D) as (rows, heads, D) of which D is contiguous."""
    return t.contiguous().view(-1, *t.shape[-2:])


def _ends(op: str, name: str, cu_seqlens: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(first rows, lengths) of packed sequences."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise ValueError(f"{op}: {name} has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, expected (sequences + 1,) integers")
    if can_wait(cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != rows or ends != sorted(ends):
            raise ValueError(f"{op}: {name} is {ends}, expected it to start at 0, never decrease, and end at {rows}, the number of rows")
    ends = cu_seqlens.to(torch.int32)
    return ends[:-1].contiguous(), ends.diff()


def _spans(op: str, name: str, lengths: torch.Tensor | None, count: int, width: int, left: bool, device: torch.device
           ) -> tuple[torch.Tensor, torch.Tensor]:
    """(first rows, lengths) of the sequences of a padded batch."""
    if lengths is None:
        lengths = torch.full((count, ), width, dtype=torch.int32, device=device)
    elif tuple(lengths.shape) != (count, ) or lengths.is_floating_point():
        raise ValueError(f"{op}: {name} has shape {tuple(lengths.shape)} and dtype {lengths.dtype}, expected ({count},) integers")
    elif can_wait(lengths) and count and not 0 <= int(lengths.min()) <= int(lengths.max()) <= width:
        raise ValueError(f"{op}: {name} is {lengths.tolist()}, expected 0 to {width}")
    lengths = lengths.to(torch.int32)
    first = torch.arange(count, dtype=torch.int32, device=device) * width
    return first + (width - lengths if left else 0), lengths


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor | None = None,
              cu_seqlens_k: torch.Tensor | None = None, lengths_q: torch.Tensor | None = None, lengths_k: torch.Tensor | None = None,
              left_padded: bool = False, block_table: torch.Tensor | None = None, causal: bool = True, scale: float | None = None,
              window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v and its LSE: (out like q, lse (…, query heads) fp32, natural logarithm).

    Packed: q (tokens, query heads, D) with cu_seqlens_q (sequences + 1,), k and v (rows, key heads, D) with cu_seqlens_k, the
    same unless given. A batch: q (B, L, query heads, D), k and v (B, capacity, key heads, D), of which lengths_q and
    lengths_k (B,) count, at the start of each row or, left_padded, at its end; so with a cache in k and v, its new keys
    included. Paged: k and v (pages, page size, key heads, D) and block_table (B, pages of the longest) integers; needs
    lengths_k; has no backward. Query heads are a multiple of key heads (GQA); D is at most 256; scale is D ** -0.5 unless given.

    causal: the last query sees all keys, each one before it one less. window: a query sees itself and the window − 1 keys
    before it. A query that sees no key gives 0 and −inf, and so does padding. A NaN in v reaches every query of its
    sequence that shares its block of keys. Raises ValueError and TypeError with one sentence.
    """
    op = "attention"
    check(op, q=q, k=k, v=v)
    packed = cu_seqlens_q is not None
    dims, words = (3, "(tokens, heads, D)") if packed else (4, "(batch, length, heads, D)")
    if q.dim() != dims:
        raise ValueError(f"{op}: q has shape {tuple(q.shape)}, expected {words} {'with' if packed else 'without'} cu_seqlens_q")
    kv_dims = 4 if block_table is not None else dims
    if k.dim() != kv_dims or k.shape != v.shape:
        raise ValueError(f"{op}: k has shape {tuple(k.shape)} and v {tuple(v.shape)}, expected both of {kv_dims} dimensions and equal")
    heads, width = q.shape[-2:]
    if k.shape[-1] != width or not k.shape[-2] or heads % k.shape[-2]:
        raise ValueError(f"{op}: q has {heads} heads of {width} and k {k.shape[-2]} of {k.shape[-1]}, expected equal widths and a multiple "
                         "of k's heads")
    if not 1 <= width <= 256:
        raise ValueError(f"{op}: the heads have width {width}, expected 1 to 256")
    if window is not None and (check_integer(op, "window", window) < 1 or not causal):
        raise ValueError(f"{op}: window is {window} and causal is {causal}, expected at least 1, and causal")
    if scale is not None and not check_number(op, "scale", scale) > 0:
        raise ValueError(f"{op}: scale is {scale}, expected a positive number")
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("lengths_q", lengths_q), ("lengths_k", lengths_k),
                    ("block_table", block_table)):
        check(op, same_dtype=False, optional=(name, ), q=q, **{name: t})
    page, longest, full = 0, k.shape[0] if packed else k.shape[1], packed or lengths_q is None
    first_q, length_q = _ends(op, "cu_seqlens_q", cu_seqlens_q, len(q)) if packed else _spans(
        op, "lengths_q", lengths_q, q.shape[0], q.shape[1], left_padded, q.device)
    count = len(length_q)
    if block_table is not None:
        if block_table.dim() != 2 or len(block_table) != count or block_table.is_floating_point() or lengths_k is None:
            raise ValueError(f"{op}: block_table has shape {tuple(block_table.shape)}, expected ({count}, pages) integers, and lengths_k with it")
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise ValueError(f"{op}: block_table has no backward, expected inputs that require no gradient, or torch.no_grad()")
        page, longest = k.shape[1], block_table.shape[1] * k.shape[1]
        first_k, length_k = _spans(op, "lengths_k", lengths_k, count, longest, False, q.device)
        if can_wait(block_table) and block_table.numel() and not 0 <= int(block_table.min()) <= int(block_table.max()) < len(k):
            raise ValueError(f"{op}: block_table holds {int(block_table.min())} to {int(block_table.max())}, expected 0 to {len(k) - 1}")
        block_table = block_table.to(torch.int32).contiguous()
    elif packed:
        if cu_seqlens_k is None and len(k) != len(q):
            raise ValueError(f"{op}: k has {len(k)} rows and q {len(q)}, expected as many, or cu_seqlens_k")
        first_k, length_k = (first_q, length_q) if cu_seqlens_k is None else _ends(op, "cu_seqlens_k", cu_seqlens_k, len(k))
        if len(length_k) != count:
            raise ValueError(f"{op}: cu_seqlens_k has {len(length_k) + 1} entries, expected {count + 1}, as cu_seqlens_q")
    else:
        if len(k) != count:
            raise ValueError(f"{op}: k holds {len(k)} sequences, expected {count}, as q")
        if lengths_k is None and lengths_q is not None and k.shape[1] == q.shape[1]:
            lengths_k = lengths_q
        first_k, length_k = _spans(op, "lengths_k", lengths_k, count, k.shape[1], left_padded, q.device)
        full = full and lengths_k is None
    out, lse = apply(_attention, _opaque, _Attention.apply, _rows(q), _rows(k), _rows(v), first_q, length_q, first_k, length_k,
                     block_table, page, longest, full, causal, width ** -0.5 if scale is None else float(scale), window or 0)
    return out.view(q.shape), lse.view(q.shape[:-1])
