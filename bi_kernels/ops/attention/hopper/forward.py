"""Attention's prefill on sm_90, in Gluon: the summation order of forward_kernels.py, the products of one block of keys
under the softmax of the next.

A program for each multiprocessor goes from tile to tile. Four warps bring K and V through a ring of TMA stages, ahead
into the next tile; two more groups of four have 64 query rows each, and store a tile under the first scores of the next
one. The bits are those of `attention_kernel`: the same operations in the same order for each row, but for products by
1, and the row sums of the same layout.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from bi_kernels.checks import multiprocessors
from bi_kernels.ops.attention.hopper import common
from bi_kernels.ops.attention.hopper.common import (
    BLOCK,
    REGISTERS,
    STAGES,
    descriptor,
    over,
    place,
    places,
    release,
    scores,
    uniform,
    wait,
)
from bi_kernels.ops.attention.hopper.rows import merge, paired, rescaled, softmax, weights, with_sink
from bi_kernels.ops.attention.hopper.tiles import WORDS, barriers, fetch, items_of, order, produce, tile_of

ROWS = 64  # queries of a group of warps


@gluon.jit
def _step(
    j,
    last,
    before,
    tiles,
    bars,
    state,
    bound,
    scale,
    steep,
    MASKED: gl.constexpr,
    S: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """Computes the product with V of a tile's block j, under the scores and the softmax of the next one, whose K is
    there; before: blocks before the tile's."""
    qt, ks, vs = tiles
    k_full, v_full, free = bars
    m, l, acc, alpha, p = state
    i, start = before + j, (j + 1) * ks.shape[1]
    s = scores(qt, ks, i + 1, S)
    acc = rescaled(acc, alpha)
    p = weights(p, ks.dtype, ks.shape[2])
    wait(v_full, i)
    acc = warpgroup_mma(p, vs.index(place(i, vs.shape[0])), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    m, l, alpha, p = softmax(s, m, l, start, bound, scale, steep, MASKED)
    # here, for ptxas moves the wait below above the softmax unless a branch is between
    wait(k_full, i + 2, j + 2 <= last)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(free, i)
    if PAIRED:  # not while the product reads the last ones: it would have to end first
        p = paired(p, ks.dtype)
    return m, l, acc, alpha, p


@gluon.jit
def _last(last, before, vs, bars, state, length, WIDE: gl.constexpr):
    """Starts the product with V of the last block of a tile's split."""
    k_full, v_full, free = bars
    m, l, acc, alpha, p = state
    BLOCK: gl.constexpr = vs.shape[1]
    acc = rescaled(acc, alpha)
    p = weights(p, vs.dtype, vs.shape[2])
    vt = vs.index(place(before + last, vs.shape[0]))
    wait(v_full, before + last)
    if last * BLOCK + BLOCK > length:  # rows of a neighbour
        key = last * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
        vt.store(gl.where((key < length)[:, None], vt.load(WIDE), 0.0))
        fence_async_shared()
    return warpgroup_mma(p, vt, acc, is_async=True)


@gluon.jit
def _blocks(
    i, last, s, extent, tiles, bars, bound, scale, steep, WIDE: gl.constexpr, S: gl.constexpr, PAIRED: gl.constexpr
):
    """Computes blocks i to `last` of a split from the scores of the first one; returns (m, l, acc), to which the last
    product is still added."""
    length, whole, before = extent
    qt, ks, vs = tiles
    k_full, v_full, free = bars
    ROWS: gl.constexpr = qt.shape[0]
    BLOCK: gl.constexpr = ks.shape[1]
    D: gl.constexpr = ks.shape[2]
    middle = gl.maximum(gl.minimum(last, whole // BLOCK - 1), i)
    lowest = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S))
    zero = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    none = gl.zeros([ROWS, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16]))
    m, l, alpha, p = softmax(s, lowest, zero, i * BLOCK, bound, scale, steep, True)
    if PAIRED:
        p = paired(p, ks.dtype)
    own = m, l, none, alpha, p
    wait(k_full, before + i + 1, i < last)
    for j in range(i, middle):
        own = _step(j, last, before, tiles, bars, own, bound, scale, steep, False, S, PAIRED)
    for j in range(middle, last):
        own = _step(j, last, before, tiles, bars, own, bound, scale, steep, True, S, PAIRED)
    m, l, acc, alpha, p = own
    return m, l, _last(last, before, vs, bars, own, length, WIDE)


@gluon.jit
def _next(q, qt, info, told, turn, there, GROUP: gl.constexpr, HEADS: gl.constexpr, ME: gl.constexpr):
    """Returns what the next tile is of, and starts to copy its rows of q."""
    tile = tile_of(info, told, turn, there)
    fetch(q, qt, tile, there, qt.shape[0], GROUP, HEADS, ME)
    async_copy.commit_group()
    return tile


@gluon.jit
def _consume(
    results,
    tiles,
    bars,
    info,
    where,
    scale,
    steep,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    COUNT: gl.constexpr,
    SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr,
    MANY: gl.constexpr,
    ME: gl.constexpr,
):
    """Computes the rows of one group of warps, of tile after tile."""
    q, out, lse, sinks = results
    qs, ks, vs = tiles
    k_full, v_full, free, told = bars
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
    tile = _next(q, qt, info, told, 0, there, GROUP, HEADS, ME)
    async_copy.wait_group(0)
    fence_async_shared()
    if not MANY:
        wait(k_full, tile[7], there & (tile[6] > 0))
        s = warpgroup_mma_wait(0, deps=[scores(qt, ks, tile[7], S)])  # of nothing, where there is none
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        base, row0, head, queries, length, whole, end, before = tile
        # Triton takes the first tile's where a number only bounds loops in this loop
        whole, end, before = uniform(whole), uniform(end), uniform(before)
        extent = length, whole, before
        row0 += ME * ROWS
        bound = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, S)) + length
        if CAUSAL:
            position = (row0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP + length - queries
            bound = gl.minimum(bound, position + 1)
        m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        acc = gl.zeros([ROWS, D], gl.float32, O)
        turn = item // gl.num_programs(0) + 1
        there = item + gl.num_programs(0) < items
        if MANY:
            for n in range(gl.cdiv(end, SPLIT)):
                i, last = n * (SPLIT // BLOCK), gl.cdiv(gl.minimum((n + 1) * SPLIT, end), BLOCK) - 1
                wait(k_full, before + i)
                first = warpgroup_mma_wait(0, deps=[scores(qt, ks, before + i, S)])
                m_next, l_next, acc_next = _blocks(
                    i, last, first, extent, here, bars, bound, scale, steep, WIDE, S, True
                )
                acc_next = warpgroup_mma_wait(0, deps=[acc_next])
                release(free, before + last)
                m, l, acc = merge(m, l, acc, m_next, l_next, acc_next, scale)
            tile = _next(q, qt, info, told, turn, there, GROUP, HEADS, ME)
        elif end > 0:
            last = gl.cdiv(end, BLOCK) - 1
            m, l, acc = _blocks(0, last, s, extent, here, bars, bound, scale, steep, WIDE, S, False)
            tile = _next(q, qt, info, told, turn, there, GROUP, HEADS, ME)
            acc = warpgroup_mma_wait(0, deps=[acc])
            release(free, before + last)
        else:
            tile = _next(q, qt, info, told, turn, there, GROUP, HEADS, ME)
        none = (l == 0.0) & (m == -float("inf"))
        unit = scale
        if sinks is not None:
            member = (row0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))) % GROUP
            m, l, acc = with_sink(m, l, acc, scale, gl.load(sinks + head * GROUP + member))
            unit = 1.0
        y = ((acc + 0.0) / over(gl.where(none, 1.0, l), acc)).to(out.dtype.element_ty)
        async_copy.wait_group(0)
        fence_async_shared()
        if not MANY:  # whose registers have no room for it
            wait(k_full, tile[7], there & (tile[6] > 0))
            s = scores(qt, ks, tile[7], S)
        # lest the offsets above stay alive
        row0 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [row0], gl.int32, False, 1)
        offset, inside = places(base.to(gl.int64), row0, head, queries, gl.SliceLayout(1, WIDE), ROWS, GROUP, HEADS)
        offset = offset[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
        gl.store(out + offset, gl.convert_layout(y, WIDE), mask=inside[:, None])
        at, inside = places(base.to(gl.int64), row0, head, queries, gl.SliceLayout(1, S), ROWS, GROUP, HEADS)
        gl.store(lse + at, gl.where(none, -float("inf"), (m * unit + gl.log2(l)) * 0.6931471805599453), mask=inside)
        if not MANY:
            s = warpgroup_mma_wait(0, deps=[s])


@gluon.jit(do_not_specialize=["sequences"])
def _hopper_prefill_kernel(
    q,
    k_tma,
    v_tma,
    out,
    lse,
    sinks,
    table,
    first_q,
    length_q,
    first_k,
    length_k,
    sequences,
    scale,
    steep,
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
    tiles, results = (qs, ks, vs), (q, out, lse, sinks)
    gl.warp_specialize(
        [
            (produce, (q, k_tma, v_tma, ks, vs, bars, info, table, where, GROUP, HEADS, 2 * ROWS, COUNT, PAUSE)),
            (_consume, (results, tiles, bars, info, where, scale, steep, GROUP, HEADS, COUNT, SPLIT, CAUSAL, MANY, 0)),
            (_consume, (results, tiles, bars, info, where, scale, steep, GROUP, HEADS, COUNT, SPLIT, CAUSAL, MANY, 1)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def prefill(
    q,
    k,
    v,
    out,
    lse,
    where,
    causal: bool,
    scale: float,
    split: int,
    many: bool,
    tiles: int,
    room: int,
    sinks=None,
    steep: float | None = None,
) -> None:
    """Computes out and lse of q (tokens, heads, D) on k, v (rows, heads, D), D 64 or 128, 16-bit.

    where: first_q, length_q, first_k, length_k; scale: times log2(e); split: its keys; many: there are several in a
    sequence; tiles: at least as many of 128 rows of a key head's group as there are; room: for the sequences, a power
    of two; sinks (heads,) and `steep` of a cap: None without.
    """
    heads = k.shape[1]
    table = order(where, tiles, room, q.shape[1] // heads, heads, 2 * ROWS, BLOCK, causal)
    grid = (min(multiprocessors(q.device), tiles * heads),)
    given = q, descriptor(k), descriptor(v), out, lse, sinks, table, *where, len(where[0]), scale, steep
    sizes = {"COUNT": room, "GROUP": q.shape[1] // heads, "HEADS": heads, "ROWS": ROWS, "SPLIT": split, "WORDS": WORDS}
    how = {"CAUSAL": causal, "MANY": many, "STAGES": STAGES, "REGISTERS": REGISTERS, "PAUSE": common.PAUSE}
    _hopper_prefill_kernel[grid](*given, num_warps=4, enable_fp_fusion=False, **sizes, **how)
