"""Attention's prefill on sm_90, in Gluon: the summation order of forward_kernels.py, the products of one block of keys
under the softmax of the next.

A program for each multiprocessor goes from tile to tile. Four warps bring K and V through a ring of TMA stages, ahead
into the next tile; two more groups of four have 64 query rows each. The bits are those of `attention_kernel`: the same
operations in the same order for each row, and the row sums of the same layout.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from bi_kernels.checks import multiprocessors
from bi_kernels.ops.attention.hopper.common import (
    REGISTERS,
    STAGES,
    descriptor,
    operand,
    over,
    places,
    release,
    scores,
    uniform,
    wait,
)
from bi_kernels.ops.attention.hopper.tiles import WORDS, barriers, fetch, items_of, produce, tile_of

ROWS = 64  # queries of a group of warps


@gluon.jit
def _softmax(s, m, l, start, position, length, scale, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """Returns (maximum, sum, factor of what was, p) after a block of scores."""
    if MASKED:
        key = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        visible = (key < length)[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= position[:, None])
        s = gl.where(visible, s, -float("inf"))
    top = gl.maximum(m, gl.max(s, 1))
    base = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2((s - base[:, None]) * scale)
    alpha = gl.exp2((m - base) * scale)
    return top, l * alpha + gl.sum(p, 1), alpha, p


@gluon.jit
def _merge(m, l, acc, m_next, l_next, acc_next, scale):
    """Returns the state of some splits, and then of the next one."""
    top = gl.maximum(m, m_next)
    base = gl.where(top == -float("inf"), 0.0, top)
    a, b = gl.exp2((m - base) * scale), gl.exp2((m_next - base) * scale)
    return top, l * a + l_next * b, acc * over(a, acc) + acc_next * over(b, acc)


@gluon.jit
def _step(
    j, last, before, tiles, bars, state, masks, scale, CAUSAL: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr
):
    """Computes the product with V of a tile's block j, under the scores and the softmax of the next one, whose K is
    there; before: blocks before the tile's."""
    qt, ks, vs = tiles
    k_full, v_full, free = bars
    m, l, acc, alpha, p = state
    position, length = masks
    STAGES: gl.constexpr = vs.shape[0]
    i, start = before + j, (j + 1) * ks.shape[1]
    s = scores(qt, ks, i + 1, S)
    acc = acc * over(alpha, acc)
    wait(v_full, i)
    acc = warpgroup_mma(operand(p, acc, ks.dtype), vs.index(i % STAGES), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    m, l, alpha, p = _softmax(s, m, l, start, position, length, scale, CAUSAL, MASKED)
    # here, for ptxas moves the wait below above the softmax unless a branch is between
    wait(k_full, i + 2, j + 2 <= last)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(free, i)
    return m, l, acc, alpha, p


@gluon.jit
def _consume(
    results,
    tiles,
    bars,
    info,
    where,
    scale,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    COUNT: gl.constexpr,
    SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr,
    MANY: gl.constexpr,
    ME: gl.constexpr,
):
    """Computes the rows of one group of warps, of tile after tile."""
    q, out, lse = results
    qs, ks, vs = tiles
    k_full, v_full, free, told = bars
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK: gl.constexpr = ks.shape[1]
    D: gl.constexpr = ks.shape[2]
    ROWS: gl.constexpr = qs.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    items = items_of(where, GROUP, HEADS, 2 * ROWS, COUNT)
    qt, there = qs.index(ME), gl.program_id(0) < items
    here, bars = (qt, ks, vs), (k_full, v_full, free)
    tile = tile_of(info, told, 0, there)
    fetch(q, qt, tile, there, ROWS, GROUP, HEADS, ME)
    async_copy.commit_group()
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        base, row0, head, queries, length, whole, end, before = tile
        whole = uniform(whole)  # Triton takes the first tile's where a number only bounds loops in this loop
        row0 += ME * ROWS
        async_copy.wait_group(0)
        fence_async_shared()
        position = (row0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP + length - queries
        masks = position, length
        lowest = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        zero = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        m, l, acc = lowest, zero, gl.zeros([ROWS, D], gl.float32, O)
        for n in range(gl.cdiv(end, SPLIT)):
            i, last = n * (SPLIT // BLOCK), gl.cdiv(gl.minimum((n + 1) * SPLIT, end), BLOCK) - 1
            middle = gl.maximum(gl.minimum(last, whole // BLOCK - 1), i)
            wait(k_full, before + i)
            s = warpgroup_mma_wait(0, deps=[scores(qt, ks, before + i, S)])
            m_own, l_own, alpha, p = _softmax(s, lowest, zero, i * BLOCK, position, length, scale, CAUSAL, True)
            own = m_own, l_own, gl.zeros([ROWS, D], gl.float32, O), alpha, p
            wait(k_full, before + i + 1, i < last)
            for j in range(i, middle):
                own = _step(j, last, before, here, bars, own, masks, scale, CAUSAL, False, S)
            for j in range(middle, last):
                own = _step(j, last, before, here, bars, own, masks, scale, CAUSAL, True, S)
            m_next, l_next, acc_next, factor, weights = own
            acc_next = acc_next * over(factor, acc_next)
            vt = vs.index((before + last) % STAGES)
            wait(v_full, before + last)
            if last * BLOCK + BLOCK > length:  # rows of a neighbour
                key = last * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
                vt.store(gl.where((key < length)[:, None], vt.load(WIDE), 0.0))
                fence_async_shared()
            acc_next = warpgroup_mma(operand(weights, acc_next, ks.dtype), vt, acc_next, is_async=True)
            acc_next = warpgroup_mma_wait(0, deps=[acc_next])
            release(free, before + last)
            if MANY:
                m, l, acc = _merge(m, l, acc, m_next, l_next, acc_next, scale)
            else:
                m, l, acc = m_next, l_next, acc_next
        there = item + gl.num_programs(0) < items
        tile = tile_of(info, told, item // gl.num_programs(0) + 1, there)
        fetch(q, qt, tile, there, ROWS, GROUP, HEADS, ME)
        async_copy.commit_group()
        none = (l == 0.0) & (m == -float("inf"))
        y = (acc + 0.0) / over(gl.where(none, 1.0, l), acc)
        # lest the offsets above stay alive
        row0 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [row0], gl.int32, False, 1)
        offset, inside = places(base.to(gl.int64), row0, head, queries, gl.SliceLayout(1, WIDE), ROWS, GROUP, HEADS)
        offset = offset[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
        gl.store(out + offset, gl.convert_layout(y.to(out.dtype.element_ty), WIDE), mask=inside[:, None])
        at, inside = places(base.to(gl.int64), row0, head, queries, gl.SliceLayout(1, S), ROWS, GROUP, HEADS)
        gl.store(lse + at, gl.where(none, -float("inf"), (m * scale + gl.log2(l)) * 0.6931471805599453), mask=inside)


@gluon.jit(do_not_specialize=["sequences"])
def _hopper_prefill_kernel(
    q,
    k_tma,
    v_tma,
    out,
    lse,
    first_q,
    length_q,
    first_k,
    length_k,
    sequences,
    scale,
    COUNT: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr,
    MANY: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    WORDS: gl.constexpr,
    PAUSE: gl.constexpr,
):
    """Computes tiles of queries of one key head's group against all of their keys."""
    BLOCK: gl.constexpr = k_tma.block_shape[0]
    D: gl.constexpr = k_tma.block_shape[1]
    ks = gl.allocate_shared_memory(k_tma.dtype, [STAGES, BLOCK, D], k_tma.layout)
    vs = gl.allocate_shared_memory(k_tma.dtype, [STAGES, BLOCK, D], k_tma.layout)
    qs = gl.allocate_shared_memory(k_tma.dtype, [2, ROWS, D], k_tma.layout)
    info = gl.allocate_shared_memory(gl.int32, [WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars, where = barriers(STAGES), (first_q, length_q, first_k, length_k, sequences)
    tiles, results = (qs, ks, vs), (q, out, lse)
    gl.warp_specialize(
        [
            (produce, (k_tma, v_tma, ks, vs, bars, info, where, GROUP, HEADS, 2 * ROWS, COUNT, CAUSAL, PAUSE)),
            (_consume, (results, tiles, bars, info, where, scale, GROUP, HEADS, COUNT, SPLIT, CAUSAL, MANY, 0)),
            (_consume, (results, tiles, bars, info, where, scale, GROUP, HEADS, COUNT, SPLIT, CAUSAL, MANY, 1)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    where: tuple[Tensor, ...],
    causal: bool,
    scale: float,
    split: int,
    many: bool,
    tiles: int,
    room: int,
    late: int,
    stages: int = STAGES,
) -> None:
    """Computes out and lse of q (tokens, heads, D) on k, v (rows, heads, D), D 64 or 128, 16-bit.

    where: first_q, length_q, first_k, length_k; scale: times log2(e); split: its keys; many: there are several in a
    sequence; tiles: at least as many of 128 rows of a key head's group as there are; room: for the sequences, a power
    of two; late: nanoseconds by which some copies are, for an audit.
    """
    heads = k.shape[1]
    _hopper_prefill_kernel[(min(multiprocessors(q.device), tiles * heads),)](
        q,
        descriptor(k),
        descriptor(v),
        out,
        lse,
        *where,
        len(where[0]),
        scale,
        COUNT=room,
        GROUP=q.shape[1] // heads,
        HEADS=heads,
        ROWS=ROWS,
        SPLIT=split,
        CAUSAL=causal,
        MANY=many,
        STAGES=stages,
        REGISTERS=REGISTERS,
        WORDS=WORDS,
        PAUSE=late,
        num_warps=4,
        enable_fp_fusion=False,
    )
