"""dQ of attention on sm_90, in Gluon: the summation order of backward_kernels.py, the product of one block of keys
under the exponentials of the next.

A program for each multiprocessor goes from tile to tile, as in forward.py: four warps bring K and V, two more
groups of four have 64 query rows each. The bits are those of `queries_backward_kernel`: the same operations in the same
order for each row.
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
    capped,
    descriptor,
    operand,
    places,
    release,
    scores,
    sloped,
    uniform,
    wait,
)
from bi_kernels.ops.attention.hopper.tiles import WORDS, barriers, fetch, items_of, order, produce, tile_of

ROWS = 64  # queries of a group of warps


@gluon.jit
def _hidden(x, start, masks, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """Returns x with 0 for the keys that a query does not see."""
    if MASKED:
        position, length = masks
        key = start + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        visible = (key < length)[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= position[:, None])
        x = gl.where(visible, x, 0.0)
    return x


@gluon.jit
def _step(
    j,
    last,
    before,
    tiles,
    bars,
    acc,
    ds,
    rows,
    masks,
    scale,
    steep,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    S: gl.constexpr,
):
    """Adds the product with K of a tile's block j, under the scores and exponentials of the next one, whose K and V
    are there; before: blocks before the tile's."""
    qt, dot, ks, vs = tiles
    k_full, v_full, free = bars
    less, log_sum = rows
    STAGES: gl.constexpr = vs.shape[0]
    i, start, more = before + j, (j + 1) * ks.shape[1], j + 2 <= last
    s = scores(qt, ks, i + 1, S)
    dp = scores(dot, vs, i + 1, S)
    acc = warpgroup_mma(operand(ds, acc, ks.dtype), ks.index(i % STAGES), acc, is_async=True)
    s = warpgroup_mma_wait(2, deps=[s])
    t = capped(s, steep)
    p = sloped(gl.exp2(gl.minimum(gl.fma(t, scale, -log_sum[:, None]), 0.0)), t, steep)
    # here and below, for ptxas moves the next wait above the exponentials unless a branch is between
    wait(k_full, i + 2, more)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = _hidden(p * (dp - less[:, None]), start, masks, CAUSAL, MASKED)
    wait(v_full, i + 2, more)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(free, i)
    return acc, ds


@gluon.jit
def _rows(
    x, tile, there, S: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, ME: gl.constexpr
):
    """Returns a number of each row of a group of warps, of x (tokens, heads)."""
    base, row0, head, queries, length, whole, end, before = tile
    row0 += ME * ROWS
    at, inside = places(base.to(gl.int64), row0, head, queries, gl.SliceLayout(1, S), ROWS, GROUP, HEADS)
    return gl.load(x + at, mask=inside & there, other=0.0)


@gluon.jit
def _consume(
    given,
    tiles,
    bars,
    info,
    where,
    scale,
    steep,
    factor,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    COUNT: gl.constexpr,
    CAUSAL: gl.constexpr,
    ME: gl.constexpr,
):
    """Computes the rows of one group of warps, of tile after tile."""
    q, d_out, lse, delta, dq = given
    qs, dos, ks, vs = tiles
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
    qt, dot, there = qs.index(ME), dos.index(ME), gl.program_id(0) < items
    here, bars = (qt, dot, ks, vs), (k_full, v_full, free)
    tile = tile_of(info, told, 0, there)
    fetch(q, qt, tile, there, ROWS, GROUP, HEADS, ME)
    fetch(d_out, dot, tile, there, ROWS, GROUP, HEADS, ME)
    async_copy.commit_group()
    log_sum = _rows(lse, tile, there, S, ROWS, GROUP, HEADS, ME)
    less = _rows(delta, tile, there, S, ROWS, GROUP, HEADS, ME)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        base, row0, head, queries, length, whole, end, before = tile
        whole = uniform(whole)  # as in forward.py
        row0 += ME * ROWS
        async_copy.wait_group(0)
        fence_async_shared()
        position = (row0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP + length - queries
        rows, masks = (less, log_sum * 1.4426950408889634), (position, length)
        acc, ds = gl.zeros([ROWS, D], gl.float32, O), gl.zeros([ROWS, BLOCK], gl.float32, S)
        if end > 0:
            last = gl.cdiv(end, BLOCK) - 1
            middle = gl.maximum(gl.minimum(last, whole // BLOCK - 1), 0)
            wait(k_full, before)
            started = scores(qt, ks, before, S)
            wait(v_full, before)
            s, dp = warpgroup_mma_wait(0, deps=[started, scores(dot, vs, before, S)])
            t = capped(s, steep)
            p = sloped(gl.exp2(gl.minimum(gl.fma(t, scale, -rows[1][:, None]), 0.0)), t, steep)
            ds = _hidden(p * (dp - rows[0][:, None]), 0, masks, CAUSAL, True)
            wait(k_full, before + 1, last > 0)
            wait(v_full, before + 1, last > 0)
            for j in range(middle):
                acc, ds = _step(j, last, before, here, bars, acc, ds, rows, masks, scale, steep, CAUSAL, False, S)
            for j in range(middle, last):
                acc, ds = _step(j, last, before, here, bars, acc, ds, rows, masks, scale, steep, CAUSAL, True, S)
            kt = ks.index((before + last) % STAGES)
            if last * BLOCK + BLOCK > length:  # rows of a neighbour
                key = last * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
                kt.store(gl.where((key < length)[:, None], kt.load(WIDE), 0.0))
                fence_async_shared()
            acc = warpgroup_mma(operand(ds, acc, ks.dtype), kt, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            release(free, before + last)
        there = item + gl.num_programs(0) < items
        tile = tile_of(info, told, item // gl.num_programs(0) + 1, there)
        fetch(q, qt, tile, there, ROWS, GROUP, HEADS, ME)
        fetch(d_out, dot, tile, there, ROWS, GROUP, HEADS, ME)
        async_copy.commit_group()
        log_sum = _rows(lse, tile, there, S, ROWS, GROUP, HEADS, ME)
        less = _rows(delta, tile, there, S, ROWS, GROUP, HEADS, ME)
        y = (acc * factor + 0.0).to(dq.dtype.element_ty)
        # lest the offsets above stay alive
        row0 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [row0], gl.int32, False, 1)
        offset, inside = places(base.to(gl.int64), row0, head, queries, gl.SliceLayout(1, WIDE), ROWS, GROUP, HEADS)
        offset = offset[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
        gl.store(dq + offset, gl.convert_layout(y, WIDE), mask=inside[:, None])


@gluon.jit(do_not_specialize=["sequences"])
def _hopper_queries_kernel(
    q,
    d_out,
    k_tma,
    v_tma,
    lse,
    delta,
    dq,
    table,
    first_q,
    length_q,
    first_k,
    length_k,
    sequences,
    scale,
    steep,
    factor,
    COUNT: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    WORDS: gl.constexpr,
    PAUSE: gl.constexpr,
):
    """Computes dQ of tiles of queries: over their keys in ascending order."""
    BLOCK: gl.constexpr = k_tma.block_shape[0]
    D: gl.constexpr = k_tma.block_shape[1]
    ks = gl.allocate_shared_memory(k_tma.dtype, [STAGES, BLOCK, D], k_tma.layout)
    vs = gl.allocate_shared_memory(k_tma.dtype, [STAGES, BLOCK, D], k_tma.layout)
    qs = gl.allocate_shared_memory(k_tma.dtype, [2, ROWS, D], k_tma.layout)
    dos = gl.allocate_shared_memory(k_tma.dtype, [2, ROWS, D], k_tma.layout)
    info = gl.allocate_shared_memory(gl.int32, [WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars, where = barriers(STAGES), (first_q, length_q, first_k, length_k, sequences)
    tiles, given = (qs, dos, ks, vs), (q, d_out, lse, delta, dq)
    gl.warp_specialize(
        [
            (produce, (None, k_tma, v_tma, ks, vs, bars, info, table, where, GROUP, HEADS, 2 * ROWS, COUNT, PAUSE)),
            (_consume, (given, tiles, bars, info, where, scale, steep, factor, GROUP, HEADS, COUNT, CAUSAL, 0)),
            (_consume, (given, tiles, bars, info, where, scale, steep, factor, GROUP, HEADS, COUNT, CAUSAL, 1)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def queries_backward(
    q, k, v, d_out, lse, delta, dq, where, causal: bool, scale: float, factor: float, tiles: int, room: int, steep=None
) -> None:
    """Computes dq of q (tokens, heads, D), D 64 or 128, 16-bit, contiguous as d_out; k and v (rows, heads, D).

    lse, delta: (tokens, heads); where: first_q, length_q, first_k, length_k; scale: times log2(e); factor: of dq;
    steep: of a cap, or None; tiles: at least as many of 128 rows of a key head's group as there are; room: for the
    sequences, a power of two.
    """
    heads = k.shape[1]
    table = order(where, tiles, room, q.shape[1] // heads, heads, 2 * ROWS, BLOCK, causal)
    grid = (min(multiprocessors(q.device), tiles * heads),)
    given = q, d_out, descriptor(k), descriptor(v), lse, delta, dq, table, *where, len(where[0]), scale, steep, factor
    sizes = {"COUNT": room, "GROUP": q.shape[1] // heads, "HEADS": heads, "ROWS": ROWS, "WORDS": WORDS}
    how = {"CAUSAL": causal, "STAGES": STAGES, "REGISTERS": REGISTERS, "PAUSE": common.PAUSE}
    _hopper_queries_kernel[grid](*given, num_warps=4, enable_fp_fusion=False, **sizes, **how)
