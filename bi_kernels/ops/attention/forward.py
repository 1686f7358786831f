"""Attention's forward: prefill, chunks and decode over a contiguous or paged cache, with one fold.

A query's keys are taken in blocks of 64, counted from the first key of its sequence: an online softmax in fp32, whose
blocks are added in ascending order, in splits of 4096 keys that are merged in ascending order. Where the splits are
computed, one after another in one program (prefill) or each in its own (decode), and how many queries share a tile changes
no bit; a key that a query does not see adds exact nothing, where v is finite. The heads of a group lie beside each other in a tile.
Rounding points: the scores stay fp32; exp2((score − maximum) · scale) is rounded to the storage dtype for the product with V
and is summed unrounded; the output is rounded once. On sm_90 hopper_forward.py has a faster prefill of the same bits.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels import checks  # noqa: F401  (mends the interpreter before a kernel is defined)

BLOCK, SPLIT = 64, 4096  # keys; both are part of the fold
MERGE_ROWS = 16
LOG2E = math.log2(math.e)


class Tiling(NamedTuple):
    """Launch configurations, free of any bit: the warps of a tile lie along its rows, so a row's sum keeps its order."""

    rows: int  # queries
    columns: int  # keys
    warps: int
    stages: int


PREFILL, DECODE, FP32 = Tiling(128, BLOCK, 8, 3), Tiling(64, BLOCK, 4, 4), Tiling(32, 32, 4, 2)
WIDE = {
    "PREFILL": Tiling(128, BLOCK, 8, 2),
    "DECODE": Tiling(64, BLOCK, 4, 2),
}  # of heads wider than 128: shared memory
MOST = 4096  # programs of a launch in which each split has its own
FEW = 256  # tiles below which each split is a program of its own


@triton.jit
def sequence_of(tile, lengths, sequences, ROWS: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """(sequence, the first of its tiles, the last of them) of a tile, where tiles hold SIZE rows and a token has ROWS;
    sequence COUNT for a tile of none."""
    i = tl.arange(0, COUNT)
    ends = tl.cumsum(tl.cdiv(tl.load(lengths + i, mask=i < sequences, other=0) * ROWS, SIZE), 0)
    before = tl.max(tl.where(ends <= tile, ends, 0), 0)
    after = tl.min(tl.where(ends > tile, ends, tl.maximum(tl.max(ends, 0), tile + 1)), 0)
    return tl.sum((ends <= tile).to(tl.int32), 0), before, after - 1


@triton.jit
def _key_rows(key, first, pages, length, PAGE: tl.constexpr):
    """The rows of k that hold some keys of a sequence, whose keys start in row `first`, or lie in `pages`."""
    if PAGE:
        page = tl.load(pages + key // PAGE, mask=key < length, other=0)
        return page.to(tl.int64) * PAGE + key % PAGE
    return first + key


@triton.jit
def seen(key, position, length, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the query at `position` sees `key`."""
    visible = (key < length)[None, :]
    if CAUSAL:
        visible &= key[None, :] <= position[:, None]
    if WINDOW:
        visible &= key[None, :] > position[:, None] - window
    return visible


@triton.jit
def _add_block(
    q,
    m,
    l,
    acc,
    k,
    v,
    k_tma,
    v_tma,
    head,
    row_k,
    pages,
    stride_k,
    stride_v,
    start,
    position,
    length,
    scale,
    window,
    width,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
):
    """The online softmax's next block of keys."""
    key = start + tl.arange(0, BLOCK)
    if TMA:
        at = (row_k + start).to(tl.int32)
        kt = k_tma.load([at, head * D])
    else:
        d = tl.arange(0, D)
        rows = _key_rows(key, row_k, pages, length, PAGE)
        there = (d < width)[None, :] | EVEN
        if MASKED:
            there &= (key < length)[:, None]
        kt = tl.load(k + rows[:, None] * stride_k + d[None, :], mask=there, other=0.0)
    s = tl.dot(q, kt.T, input_precision="ieee")
    if MASKED:
        s = tl.where(seen(key, position, length, window, CAUSAL, WINDOW), s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == -float("inf"), 0.0, top)
    p = tl.math.exp2((s - base[:, None]) * scale)  # of the largest score exactly 1, however large that is
    alpha = tl.math.exp2((m - base) * scale)
    l = l * alpha + tl.sum(p, 1)
    if TMA:
        vt = v_tma.load([at, head * D])
    else:
        vt = tl.load(v + rows[:, None] * stride_v + d[None, :], mask=there, other=0.0)
    acc = tl.dot(p.to(vt.dtype), vt, acc * alpha[:, None], input_precision="ieee")
    return top, l, acc


@triton.jit
def _merge(m, l, acc, m_next, l_next, acc_next, scale):
    """The state of some splits, and then that of the next one."""
    top = tl.maximum(m, m_next)
    base = tl.where(top == -float("inf"), 0.0, top)
    a, b = tl.math.exp2((m - base) * scale), tl.math.exp2((m_next - base) * scale)
    return top, l * a + l_next * b, acc * a[:, None] + acc_next * b[:, None]


@triton.jit
def _store_result(out, lse, at, m, l, acc, scale, rows, d, width, inside):
    """The normalised output and the natural logarithm of the sum; 0 and −inf for a query that saw no key."""
    none = (l == 0.0) & (m == -float("inf"))
    y = (acc + 0.0) / tl.where(none, 1.0, l)[:, None]
    tl.store(out + at[:, None] * width + d[None, :], y.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + at, tl.where(none, -float("inf"), (m * scale + tl.math.log2(l)) * 0.6931471805599453), mask=rows)


@triton.jit(do_not_specialize=["sequences", "window", "rows_total", "pages_stride"])
def _attention_kernel(
    q,
    k,
    v,
    k_tma,
    v_tma,
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
    pages_stride,
    sequences,
    stride_k,
    stride_v,
    head_k,
    head_v,
    rows_total,
    scale,
    window,
    width,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    D: tl.constexpr,
    EVEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    MANY: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """One tile of queries against all of their keys, or with PARTIAL against one split of them."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, before, last = sequence_of(tile, length_q, sequences, GROUP, BLOCK_M, COUNT)
    tile = last - tile  # the last of a causal sequence takes longest, and so begins
    known = sequence < sequences
    queries, length = (
        tl.load(length_q + sequence, mask=known, other=0),
        tl.load(length_k + sequence, mask=known, other=0),
    )
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # token by token, the heads of the group beside each other
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
    k += head * head_k
    v += head * head_v
    row_k = tl.load(first_k + sequence, mask=known, other=0).to(tl.int64)
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
    m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    split, splits = begin // SPLIT, tl.cdiv(end, SPLIT)
    if PARTIAL:
        split = tl.program_id(2)
        splits = tl.minimum(split + 1, splits)
    for n in range(split, splits):
        lo, hi = tl.maximum(n * SPLIT, begin), tl.minimum((n + 1) * SPLIT, end)
        middle = tl.maximum(tl.minimum(hi, whole), lo)
        m_own = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
        l_own = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc_own = tl.zeros((BLOCK_M, D), dtype=tl.float32)
        for start in range(lo, middle, BLOCK):
            m_own, l_own, acc_own = _add_block(
                qt,
                m_own,
                l_own,
                acc_own,
                k,
                v,
                k_tma,
                v_tma,
                head,
                row_k,
                pages,
                stride_k,
                stride_v,
                start,
                position,
                length,
                scale,
                window,
                width,
                CAUSAL,
                WINDOW,
                PAGE,
                False,
                k_tma is not None,
                EVEN,
                BLOCK,
                D,
            )
        for start in range(middle, hi, BLOCK):
            m_own, l_own, acc_own = _add_block(
                qt,
                m_own,
                l_own,
                acc_own,
                k,
                v,
                k_tma,
                v_tma,
                head,
                row_k,
                pages,
                stride_k,
                stride_v,
                start,
                position,
                length,
                scale,
                window,
                width,
                CAUSAL,
                WINDOW,
                PAGE,
                True,
                False,
                EVEN,
                BLOCK,
                D,
            )
        if MANY:
            m, l, acc = _merge(m, l, acc, m_own, l_own, acc_own, scale)
        else:
            m, l, acc = m_own, l_own, acc_own
    if PARTIAL:
        part = tl.program_id(2).to(tl.int64) * rows_total + at
        tl.store(part_m + part, m, mask=inside)
        tl.store(part_l + part, l, mask=inside)
        if split < splits:
            tl.store(part_acc + part[:, None] * width + d[None, :], acc, mask=there)
    else:
        _store_result(out, lse, at, m, l, acc, scale, inside, d, width, there)


@triton.jit(do_not_specialize=["rows_total", "splits"])
def _merge_kernel(
    part_m, part_l, part_acc, out, lse, rows_total, splits, scale, width, ROWS: tl.constexpr, D: tl.constexpr
):
    """The splits of a query, in ascending order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    inside = row < rows_total
    there = inside[:, None] & (d < width)[None, :]
    m = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    l = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, D), dtype=tl.float32)
    at = row  # of the first split; the next one is `rows_total` further
    for _ in range(splits):
        m_next = tl.load(part_m + at, mask=inside, other=-float("inf"))
        l_next = tl.load(part_l + at, mask=inside, other=0.0)
        some = there & (m_next > -float("inf"))[:, None]
        acc_next = tl.load(part_acc + at[:, None] * width + d[None, :], mask=some, other=0.0)
        m, l, acc = _merge(m, l, acc, m_next, l_next, acc_next, scale)
        at += rows_total
    _store_result(out, lse, row, m, l, acc, scale, inside, d, width, there)


def _descriptor(t: torch.Tensor) -> TensorDescriptor:
    """Blocks of keys of one head, of (rows, heads, D)."""
    rows, heads, width = t.shape
    return TensorDescriptor(t, [rows, heads * width], [t.stride(0), 1], [BLOCK, width])


def _tma_ready(t: torch.Tensor) -> bool:
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(1) == t.shape[2]


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def fits_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernels for sm_90 can take q, k and v."""
    return (
        q.dtype != torch.float32
        and q.shape[-1] in (64, 128)
        and q.data_ptr() % 16 == 0
        and _tma_ready(k)
        and _tma_ready(v)
        and is_hopper(q.device)
    )


def room_for(sequences: int) -> int:
    """How many a kernel looks through, so that few variants of it are compiled."""
    return max(16, triton.next_power_of_2(sequences))


def most_tiles(tokens: int, sequences: int, rows: int) -> int:
    """At least as many as there are, however `tokens` are spread over the sequences."""
    return tokens // rows + min(sequences, tokens)


def shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict:
    width, group = q.shape[-1], q.shape[-2] // k.shape[-2]
    block = max(16, triton.next_power_of_2(width))
    return {
        "stride_k": k.stride(-3),
        "stride_v": v.stride(-3),
        "head_k": k.stride(-2),
        "head_v": v.stride(-2),
        "width": width,
        "GROUP": group,
        "HEADS": k.shape[-2],
        "D": block,
        "EVEN": block == width,
        "enable_fp_fusion": False,
    }


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_q: torch.Tensor,
    length_q: torch.Tensor,
    first_k: torch.Tensor,
    length_k: torch.Tensor,
    pages: torch.Tensor | None,
    page: int,
    longest: int,
    full_q: bool,
    full_k: bool,
    causal: bool,
    scale: float,
    window: int,
) -> list[torch.Tensor]:
    """[out, lse] of q (tokens, heads, D) on k, v (rows, heads, D).

    pages (sequences, pages of the longest) of `page` keys, or 0; longest: keys that a sequence has at most; full_q, full_k:
    every row of q, of k, is of some sequence.
    """
    if not full_q or not k.numel():
        out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    else:
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    if not q.numel() or not k.numel():
        return [out, lse]
    splits, where = max(1, triton.cdiv(longest, SPLIT)), (first_q, length_q, first_k, length_k, pages)
    given = {
        "PAGE": page,
        "CAUSAL": causal,
        "scale": scale * LOG2E,
        "window": window,
        "WINDOW": window > 0,
        **shape_of(q, k, v),
    }
    tiles = most_tiles(len(q) * given["GROUP"], len(length_q), PREFILL.rows) * given["HEADS"]
    prefill, decode = (PREFILL, DECODE) if given["D"] <= 128 else (WIDE["PREFILL"], WIDE["DECODE"])
    nothing = None, None, None
    if q.dtype == torch.float32:
        _launch(q, k, v, None, None, out, lse, *nothing, where, FP32, 1, splits, PARTIAL=False, **given)
    elif tiles >= FEW and not page and not window and BLOCK == 64 and fits_hopper(q, k, v):
        from bi_kernels.ops.attention.hopper_forward import (
            prefill as hopper_prefill,
        )  # Gluon, which the interpreter does not know

        hopper_prefill(
            q,
            k,
            v,
            out,
            lse,
            where[:4],
            causal,
            given["scale"],
            SPLIT,
            splits > 1,
            most_tiles(len(q) * given["GROUP"], len(length_q), 128),
            room_for(len(length_q)),
        )
    elif tiles >= FEW and not page and given["EVEN"] and _tma_ready(k) and _tma_ready(v):
        _launch(
            q,
            k,
            v,
            _descriptor(k),
            _descriptor(v),
            out,
            lse,
            *nothing,
            where,
            prefill,
            1,
            splits,
            PARTIAL=False,
            **given,
        )
    elif tiles >= FEW:
        _launch(q, k, v, None, None, out, lse, *nothing, where, prefill, 1, splits, PARTIAL=False, **given)
    elif splits == 1 or tiles * splits > MOST:
        _launch(q, k, v, None, None, out, lse, *nothing, where, decode, 1, splits, PARTIAL=False, **given)
    else:
        part_m, part_l, part_acc = (
            lse.new_empty(splits, *lse.shape),
            lse.new_empty(splits, *lse.shape),
            lse.new_empty(splits, *q.shape),
        )
        if not full_q:  # padding keeps these
            part_m.fill_(-math.inf)
            part_l.zero_()
        _launch(
            q,
            k,
            v,
            None,
            None,
            out,
            lse,
            part_m,
            part_l,
            part_acc,
            where,
            decode,
            splits,
            splits,
            PARTIAL=True,
            **given,
        )
        _merge_kernel[(triton.cdiv(lse.numel(), MERGE_ROWS),)](
            part_m,
            part_l,
            part_acc,
            out,
            lse,
            lse.numel(),
            splits,
            given["scale"],
            given["width"],
            ROWS=MERGE_ROWS,
            D=given["D"],
            num_warps=4,
            enable_fp_fusion=False,
        )
    return [out, lse]


def _launch(
    q, k, v, k_tma, v_tma, out, lse, part_m, part_l, part_acc, where, tiling: Tiling, grid: int, splits: int, **given
) -> None:
    first_q, length_q, first_k, length_k, pages = where
    sequences = len(length_q)
    total = most_tiles(len(q) * given["GROUP"], sequences, tiling.rows)
    _attention_kernel[(total, given["HEADS"], grid)](
        q,
        k,
        v,
        k_tma,
        v_tma,
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
        sequences,
        rows_total=lse.numel(),
        COUNT=room_for(sequences),
        BLOCK_M=tiling.rows,
        BLOCK=BLOCK,
        SPLIT=SPLIT,
        MANY=splits > 1,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **given,
    )
