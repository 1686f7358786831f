"""Attention's prefill on sm_90, in Gluon: the summation order of forward_kernels.py, the products of one block of keys
under the softmax of the next.

Four warps bring K and V through a ring of TMA stages; two more groups of four have 64 query rows each. The bits are
those of `attention_kernel`: the same operations in the same order for each row, and the row sums of the same layout.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bi_kernels.ops.attention.hopper import REGISTERS, STAGES, descriptor, pause, places, query_tile, release, wait

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
    return top, l * a + l_next * b, acc * _over(a, acc) + acc_next * _over(b, acc)


@gluon.jit
def _over(x, acc):
    """Returns a value per row, as a column beside acc."""
    return gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _operand(p, acc, dtype: gl.constexpr):
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def _scores(qt, ks, i, S: gl.constexpr):
    """Starts q kᵀ of block i."""
    STAGES: gl.constexpr = ks.shape[0]
    ROWS: gl.constexpr = qt.shape[0]
    BLOCK: gl.constexpr = ks.shape[1]
    none = gl.zeros([ROWS, BLOCK], gl.float32, S)
    return warpgroup_mma(qt, ks.index(i % STAGES).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _step(
    i, last, tiles, bars, state, alpha, p, masks, scale, CAUSAL: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr
):
    """Computes the product with V of block i, under the scores and the softmax of the next one, whose K is there."""
    qt, ks, vs = tiles
    k_full, v_full, free = bars
    m, l, acc = state
    position, length = masks
    STAGES: gl.constexpr = vs.shape[0]
    s = _scores(qt, ks, i + 1, S)
    acc = acc * _over(alpha, acc)
    wait(v_full, i)
    acc = warpgroup_mma(_operand(p, acc, ks.dtype), vs.index(i % STAGES), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    m, l, alpha, p = _softmax(s, m, l, (i + 1) * p.shape[1], position, length, scale, CAUSAL, MASKED)
    # here, for ptxas moves the wait below above the softmax unless a branch is between
    wait(k_full, i + 2, i + 2 <= last)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(free, i)
    return m, l, acc, alpha, p


@gluon.jit
def _consume(
    results,
    tiles,
    bars,
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
    """Computes the rows of one group of warps."""
    q, out, lse = results
    qs, ks, vs = tiles
    k_full, v_full, free = bars
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK: gl.constexpr = ks.shape[1]
    D: gl.constexpr = ks.shape[2]
    ROWS: gl.constexpr = qs.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    qt, head = qs.index(ME), gl.program_id(1)
    base, row0, row_k, queries, length, whole, end = query_tile(where, GROUP, 2 * ROWS, COUNT, BLOCK, CAUSAL)
    row0 += ME * ROWS
    offset, there = places(base, row0, head, queries, gl.SliceLayout(1, WIDE), ROWS, GROUP, HEADS)
    offset = offset[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
    qt.store(gl.load(q + offset, mask=there[:, None], other=0.0))
    fence_async_shared()
    position = (row0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP + length - queries
    tiles, masks = (qt, ks, vs), (position, length)
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([ROWS, D], gl.float32, O)
    for n in range(gl.cdiv(end, SPLIT)):
        i, last = n * (SPLIT // BLOCK), gl.cdiv(gl.minimum((n + 1) * SPLIT, end), BLOCK) - 1
        middle = gl.maximum(gl.minimum(last, whole // BLOCK - 1), i)
        wait(k_full, i)
        s = warpgroup_mma_wait(0, deps=[_scores(qt, ks, i, S)])
        m_own = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        l_own = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        acc_own = gl.zeros([ROWS, D], gl.float32, O)
        m_own, l_own, alpha, p = _softmax(s, m_own, l_own, i * BLOCK, position, length, scale, CAUSAL, True)
        wait(k_full, i + 1, i < last)
        for j in range(i, middle):
            m_own, l_own, acc_own, alpha, p = _step(
                j, last, tiles, bars, (m_own, l_own, acc_own), alpha, p, masks, scale, CAUSAL, False, S
            )
        for j in range(middle, last):
            m_own, l_own, acc_own, alpha, p = _step(
                j, last, tiles, bars, (m_own, l_own, acc_own), alpha, p, masks, scale, CAUSAL, True, S
            )
        acc_own = acc_own * _over(alpha, acc_own)
        vt = vs.index(last % STAGES)
        wait(v_full, last)
        if last * BLOCK + BLOCK > length:  # rows of a neighbour
            key = last * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
            vt.store(gl.where((key < length)[:, None], vt.load(WIDE), 0.0))
            fence_async_shared()
        acc_own = warpgroup_mma(_operand(p, acc_own, ks.dtype), vt, acc_own)
        release(free, last)
        if MANY:
            m, l, acc = _merge(m, l, acc, m_own, l_own, acc_own, scale)
        else:
            m, l, acc = m_own, l_own, acc_own

    none = (l == 0.0) & (m == -float("inf"))
    y = (acc + 0.0) / _over(gl.where(none, 1.0, l), acc)
    # lest the offsets above stay alive
    row0 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [row0], gl.int32, False, 1)
    offset, there = places(base, row0, head, queries, gl.SliceLayout(1, WIDE), ROWS, GROUP, HEADS)
    offset = offset[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(out + offset, gl.convert_layout(y.to(out.dtype.element_ty), WIDE), mask=there[:, None])
    at, there = places(base, row0, head, queries, gl.SliceLayout(1, S), ROWS, GROUP, HEADS)
    gl.store(lse + at, gl.where(none, -float("inf"), (m * scale + gl.log2(l)) * 0.6931471805599453), mask=there)


@gluon.jit
def _produce(
    k_tma,
    v_tma,
    ks,
    vs,
    bars,
    where,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    COUNT: gl.constexpr,
    CAUSAL: gl.constexpr,
    PAUSE: gl.constexpr,
):
    """Copies K and V, block after block, into the ring."""
    k_full, v_full, free = bars
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK: gl.constexpr = ks.shape[1]
    D: gl.constexpr = ks.shape[2]
    base, row0, row, queries, length, whole, end = query_tile(where, GROUP, SIZE, COUNT, BLOCK, CAUSAL)
    for i in range(gl.cdiv(end, BLOCK)):
        at = [row + i * BLOCK, gl.program_id(1) * D]
        wait(free, i - STAGES, i >= STAGES)
        pause(i // 2 + 1, PAUSE)
        mbarrier.expect(k_full.index(i % STAGES), k_tma.block_type.nbytes)
        tma.async_copy_global_to_shared(k_tma, at, k_full.index(i % STAGES), ks.index(i % STAGES))
        pause(i, PAUSE)
        mbarrier.expect(v_full.index(i % STAGES), v_tma.block_type.nbytes)
        tma.async_copy_global_to_shared(v_tma, at, v_full.index(i % STAGES), vs.index(i % STAGES))


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
    PAUSE: gl.constexpr,
):
    """Computes a tile of queries of one key head's group against all of their keys."""
    BLOCK: gl.constexpr = k_tma.block_shape[0]
    D: gl.constexpr = k_tma.block_shape[1]
    ks = gl.allocate_shared_memory(k_tma.dtype, [STAGES, BLOCK, D], k_tma.layout)
    vs = gl.allocate_shared_memory(k_tma.dtype, [STAGES, BLOCK, D], k_tma.layout)
    qs = gl.allocate_shared_memory(k_tma.dtype, [2, ROWS, D], k_tma.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(free.index(i), 2)
    fence_async_shared()
    bars, where = (k_full, v_full, free), (first_q, length_q, first_k, length_k, sequences)
    tiles, results = (qs, ks, vs), (q, out, lse)
    gl.warp_specialize(
        [
            (_produce, (k_tma, v_tma, ks, vs, bars, where, GROUP, 2 * ROWS, COUNT, CAUSAL, PAUSE)),
            (_consume, (results, tiles, bars, where, scale, GROUP, HEADS, COUNT, SPLIT, CAUSAL, MANY, 0)),
            (_consume, (results, tiles, bars, where, scale, GROUP, HEADS, COUNT, SPLIT, CAUSAL, MANY, 1)),
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
) -> None:
    """Computes out and lse of q (tokens, heads, D) on k, v (rows, heads, D), D 64 or 128, 16-bit.

    where: first_q, length_q, first_k, length_k; scale: times log2(e); split: its keys; many: there are several in a
    sequence; tiles: at least as many of 128 rows of a key head's group as there are; room: for the sequences, a power
    of two; late: nanoseconds by which some copies are, for an audit.
    """
    heads = k.shape[1]
    _hopper_prefill_kernel[(tiles, heads)](
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
        STAGES=STAGES,
        REGISTERS=REGISTERS,
        PAUSE=late,
        num_warps=4,
        enable_fp_fusion=False,
    )
