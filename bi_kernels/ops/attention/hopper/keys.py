"""dK and dV of attention on sm_90, in Gluon: the summation order of backward_kernels.py, the products of one block of
queries under the exponentials of the next.

Four warps bring q and dout through a ring of TMA stages; two more groups of four have 64 keys each. The bits are those
of `keys_backward_kernel`: the same operations in the same order for each key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bi_kernels.ops.attention.hopper import common
from bi_kernels.ops.attention.hopper.common import REGISTERS, STAGES, capped, descriptor, key_tile, pause, sloped


@gluon.jit
def _scores(kt, ring, i, S: gl.constexpr, WHICH: gl.constexpr):
    """Starts k qᵀ (0) or v doutᵀ (1) of block i."""
    STAGES: gl.constexpr = ring[0].shape[0]
    KEYS: gl.constexpr = kt.shape[0]
    BLOCK: gl.constexpr = ring[0].shape[1]
    none = gl.zeros([KEYS, BLOCK], gl.float32, S)
    return warpgroup_mma(kt, ring[WHICH].index(i % STAGES).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _add(p, ring, i, acc, WHICH: gl.constexpr):
    """Starts acc + p q (0) or p dout (1) of block i; without acc for the first, and with a p of 0 before that."""
    STAGES: gl.constexpr = ring[0].shape[0]
    return warpgroup_mma(p, ring[WHICH].index(gl.maximum(i, 0) % STAGES), acc, use_acc=i > 0, is_async=True)


@gluon.jit
def _row(ring, i, S: gl.constexpr, WHICH: gl.constexpr):
    """Returns −lse (2) or delta (3) of block i."""
    STAGES: gl.constexpr = ring[0].shape[0]
    return ring[WHICH].index(i % STAGES).load(gl.SliceLayout(0, S))[None, :]


@gluon.jit
def _hidden(x, ring, start, middle, position):
    """Returns x with 0 for the queries before a key; position: of the keys, among the queries.

    Of not causal ones too, in a branch never taken: without it ptxas moves the next wait above the exponentials.
    """
    if start < middle:  # columns from memory, lest they stay in registers
        x = gl.where((position - start)[:, None] <= ring[5].load(gl.SliceLayout(0, x.type.layout))[None, :], x, 0.0)
    return x


@gluon.jit
def _consume(
    results,
    tiles,
    ring,
    free,
    k_full,
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
    """Computes the keys of one group of warps."""
    dk, dv = results
    ks, vs = tiles
    STAGES: gl.constexpr = ring[0].shape[0]
    BLOCK: gl.constexpr = ks.shape[1]
    D: gl.constexpr = ks.shape[2]
    dtype: gl.constexpr = ks.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    kt, vt = ks.index(ME), vs.index(ME)
    base, row_k, key, queries, length, begin, blocks = key_tile(where, 2 * BLOCK, COUNT, BLOCK, CAUSAL)
    key += ME * BLOCK
    middle = key + BLOCK - 1 + queries - length if CAUSAL else begin  # the first query that sees all
    position = key + gl.arange(0, BLOCK, gl.SliceLayout(1, S)) + queries - length
    total, start = blocks * GROUP, begin
    dk_tile, dv_tile = gl.zeros([BLOCK, D], gl.float32, O), gl.zeros([BLOCK, D], gl.float32, O)
    mbarrier.wait(k_full.index(0), 0)
    none = gl.zeros([BLOCK, BLOCK], gl.float32, S)
    p, ds = (
        gl.convert_layout(none.to(dtype), P, assert_trivial=True),
        gl.convert_layout(none.to(dtype), P, assert_trivial=True),
    )
    for i in range(total):  # k qᵀ, and dV and dK of the block before, under the exponentials; v doutᵀ
        mbarrier.wait(ring[4].index(i % STAGES), i // STAGES & 1)
        s = _scores(kt, ring, i, S, 0)
        dv_tile = _add(p, ring, i - 1, dv_tile, 1)
        dk_tile = _add(ds, ring, i - 1, dk_tile, 0)
        s = warpgroup_mma_wait(2, deps=[s])
        t = capped(s, steep)
        fresh = gl.exp2(gl.minimum(gl.fma(t, scale, _row(ring, i, S, 2)), 0.0))
        fresh = _hidden(fresh, ring, start, middle, position)
        weight = sloped(fresh, t, steep)
        dk_tile, dv_tile = warpgroup_mma_wait(0, deps=[dk_tile, dv_tile])
        mbarrier.arrive(free.index((i - 1) % STAGES), pred=i > 0)
        dp = warpgroup_mma_wait(0, deps=[_scores(vt, ring, i, S, 1)])
        slope = _hidden(weight * (dp - _row(ring, i, S, 3)), ring, start, middle, position)
        p = gl.convert_layout(fresh.to(dtype), P, assert_trivial=True)
        ds = gl.convert_layout(slope.to(dtype), P, assert_trivial=True)
        start = gl.where(start + BLOCK < queries, start + BLOCK, begin)
    if total > 0:
        dv_tile, dk_tile = _add(p, ring, total - 1, dv_tile, 1), _add(ds, ring, total - 1, dk_tile, 0)
        dk_tile, dv_tile = warpgroup_mma_wait(0, deps=[dk_tile, dv_tile])

    kt.store((dk_tile * factor + 0.0).to(dtype))
    vt.store((dv_tile + 0.0).to(dtype))
    key += gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
    at = ((row_k.to(gl.int64) + key) * HEADS + gl.program_id(1)) * D
    at = at[:, None] + gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(dk + at, kt.load(WIDE), mask=(key < length)[:, None])
    gl.store(dv + at, vt.load(WIDE), mask=(key < length)[:, None])


@gluon.jit
def _cut(x, start, queries):
    """Stores zeros for the rows beyond the queries."""
    BLOCK: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    inside = start + gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE)) < queries
    x.store(gl.where(inside[:, None], x.load(WIDE), 0.0))


@gluon.jit
def _produce(
    copied,
    lse,
    delta,
    tiles,
    ring,
    free,
    k_full,
    where,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    COUNT: gl.constexpr,
    CAUSAL: gl.constexpr,
    PAUSE: gl.constexpr,
):
    """Copies K and V once, and q and dout, block after block, into the ring."""
    q_tma, do_tma, k_tma, v_tma = copied
    ks, vs = tiles
    qs, dos, lses, deltas, full, columns = ring
    STAGES: gl.constexpr = qs.shape[0]
    BLOCK: gl.constexpr = qs.shape[1]
    D: gl.constexpr = qs.shape[2]
    base, row_k, key, queries, length, begin, blocks = key_tile(where, 2 * BLOCK, COUNT, BLOCK, CAUSAL)
    head = gl.program_id(1)
    pause(1, PAUSE)
    mbarrier.expect(k_full.index(0), 4 * k_tma.block_type.nbytes)
    for i in gl.static_range(2):
        at = [row_k + key + i * BLOCK, head * D]
        tma.async_copy_global_to_shared(k_tma, at, k_full.index(0), ks.index(i))
        tma.async_copy_global_to_shared(v_tma, at, k_full.index(0), vs.index(i))
    start, member = begin, head * GROUP
    for i in range(blocks * GROUP):
        token = start + gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        row = (base.to(gl.int64) + token) * (HEADS * GROUP) + member
        log_sum = -(gl.load(lse + row, mask=token < queries, other=0.0) * 1.4426950408889634)
        less = gl.load(delta + row, mask=token < queries, other=0.0)
        if i >= STAGES:
            mbarrier.wait(free.index(i % STAGES), i // STAGES - 1 & 1)
        pause(i, PAUSE)
        ragged = start + BLOCK > queries
        bar = full.index(gl.where(ragged, STAGES, i % STAGES))
        mbarrier.expect(bar, 2 * q_tma.block_type.nbytes)
        tma.async_copy_global_to_shared(q_tma, [base + start, member * D], bar, qs.index(i % STAGES))
        tma.async_copy_global_to_shared(do_tma, [base + start, member * D], bar, dos.index(i % STAGES))
        pause(i // 2, PAUSE)
        lses.index(i % STAGES).store(log_sum)
        deltas.index(i % STAGES).store(less)
        mbarrier.arrive(full.index(i % STAGES))
        if ragged:  # rows of a neighbour
            mbarrier.wait(full.index(STAGES), member & 1 ^ head * GROUP & 1)
            _cut(qs.index(i % STAGES), start, queries)
            _cut(dos.index(i % STAGES), start, queries)
            fence_async_shared()
            mbarrier.arrive(full.index(i % STAGES))
        member = gl.where(start + BLOCK < queries, member, member + 1)
        start = gl.where(start + BLOCK < queries, start + BLOCK, begin)


@gluon.jit(do_not_specialize=["sequences"])
def _hopper_keys_kernel(
    q_tma,
    do_tma,
    k_tma,
    v_tma,
    lse,
    delta,
    dk,
    dv,
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
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PAUSE: gl.constexpr,
):
    """Computes dK and dV of a tile of keys: over the group's heads, and the queries of each, in ascending order."""
    BLOCK: gl.constexpr = q_tma.block_shape[0]
    D: gl.constexpr = q_tma.block_shape[1]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qs = gl.allocate_shared_memory(q_tma.dtype, [STAGES, BLOCK, D], q_tma.layout)
    dos = gl.allocate_shared_memory(q_tma.dtype, [STAGES, BLOCK, D], q_tma.layout)
    ks = gl.allocate_shared_memory(q_tma.dtype, [2, BLOCK, D], q_tma.layout)
    vs = gl.allocate_shared_memory(q_tma.dtype, [2, BLOCK, D], q_tma.layout)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], FLAT)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], FLAT)
    columns = gl.allocate_shared_memory(gl.int32, [BLOCK], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    columns.store(gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.init(k_full.index(0), 1)
    mbarrier.init(full.index(STAGES), 1)  # a block with rows to cut
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 2)  # the copies, and the stores of lse and delta
        mbarrier.init(free.index(i), 2)
    fence_async_shared()
    where = (first_q, length_q, first_k, length_k, sequences)
    ring = (qs, dos, lses, deltas, full, columns)
    copied, tiles, results = (q_tma, do_tma, k_tma, v_tma), (ks, vs), (dk, dv)
    gl.warp_specialize(
        [
            (_produce, (copied, lse, delta, tiles, ring, free, k_full, where, GROUP, HEADS, COUNT, CAUSAL, PAUSE)),
            (
                _consume,
                (results, tiles, ring, free, k_full, where, scale, steep, factor, GROUP, HEADS, COUNT, CAUSAL, 0),
            ),
            (
                _consume,
                (results, tiles, ring, free, k_full, where, scale, steep, factor, GROUP, HEADS, COUNT, CAUSAL, 1),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def keys_backward(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    dk,
    dv,
    where,
    causal: bool,
    scale: float,
    factor: float,
    tiles: int,
    room: int,
    steep=None,
) -> None:
    """Computes dk and dv of k and v (rows, heads, D), D 64 or 128, 16-bit; q and d_out (tokens, heads, D), contiguous.

    lse, delta: (tokens, heads); where: first_q, length_q, first_k, length_k; scale: times log2(e); factor: of dk;
    steep: of a cap, or None; tiles: at least as many of 128 keys as there are; room: for the sequences, a power of two.
    """
    heads, descriptors = k.shape[1], [descriptor(t) for t in (q, d_out, k, v)]
    given = *descriptors, lse, delta, dk, dv, *where, len(where[0]), scale, steep, factor
    sizes = {"COUNT": room, "GROUP": q.shape[1] // heads, "HEADS": heads}
    how = {"CAUSAL": causal, "STAGES": STAGES, "REGISTERS": REGISTERS, "PAUSE": common.PAUSE}
    _hopper_keys_kernel[(tiles, heads)](*given, num_warps=4, enable_fp_fusion=False, **sizes, **how)
