"""The gradient of experts' weights on sm_90 in Gluon: the fold of fold.py, by the ring of gemm/hopper.py.

Four warps bring blocks of places through a ring of TMA stages; two groups of four compute a tile each, in turns: while
the products of one tile are added, the other's result leaves, and what its next one goes on from arrives where the
tensor core adds. An expert's last block may hold places of the next one, so only its own slabs are added.
"""

import torch
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

from bi_kernels.checks import multiprocessors
from bi_kernels.launch import Launch, cached
from bi_kernels.ops.gemm.hopper import _descriptor, _place
from bi_kernels.ops.gemm.kernel import tma_ready

ROWS, COLUMNS, PLACES, STAGES, GROUP_M, REGISTERS = 64, 256, 64, 5, 8, 240


@gluon.jit
def _work(ends, tile, M, N, ROWS: gl.constexpr, COLS: gl.constexpr, GROUP_M: gl.constexpr):
    """Returns the expert of a tile, its first row and column, and the first of the expert's places and their end."""
    each = gl.cdiv(M, ROWS) * gl.cdiv(N, COLS)
    e = tile // each
    m, n = _place(tile % each, M, N, ROWS, COLS, GROUP_M)
    return e, m, n, gl.load(ends + e - 1, mask=e > 0, other=0), gl.load(ends + e)


@gluon.jit
def _produce(a, b, ends, ring, M, N, tiles, ROWS: gl.constexpr, COLS: gl.constexpr, GROUP_M: gl.constexpr):
    """Copies blocks of places of a and b into the ring, stage after stage, tile after tile."""
    xs, ws, full, free, turns = ring
    STAGES: gl.constexpr = full.shape[0]
    PLACES: gl.constexpr = xs.shape[1]
    copied = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, m, n, begin, end = _work(ends, tile, M, N, ROWS, COLS, GROUP_M)
        for t in range(begin, end, PLACES):
            stage = copied % STAGES
            mbarrier.wait(free.index(stage), copied // STAGES - 1 & 1, pred=copied >= STAGES)
            bar = full.index(stage)
            mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes)
            tma.async_copy_global_to_shared(a, [t, m], bar, xs.index(stage))
            tma.async_copy_global_to_shared(b, [t, n], bar, ws.index(stage))
            copied += 1


@gluon.jit
def _consume(
    out,
    ends,
    ring,
    M,
    N,
    tiles,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    GROUP_M: gl.constexpr,
    CONTINUES: gl.constexpr,
    ME: gl.constexpr,
):
    """Computes every other tile of the program that has places."""
    xs, ws, full, free, turns = ring
    STAGES: gl.constexpr = full.shape[0]
    PLACES: gl.constexpr = xs.shape[1]
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    taken, turn, number = 0, 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e, m, n, begin, end = _work(ends, tile, M, N, ROWS, COLS, GROUP_M)
        blocks = gl.cdiv(end - begin, PLACES)
        if blocks > 0:
            if number % 2 == ME:
                row, col = m + gl.arange(0, ROWS, gl.SliceLayout(1, O)), n + gl.arange(0, COLS, gl.SliceLayout(0, O))
                inside = (row < M)[:, None] & (col < N)[None, :]
                at = (e.to(gl.int64) * M + row.to(gl.int64))[:, None] * N + col[None, :]
                if CONTINUES:
                    acc = gl.load(out + at, mask=inside, other=0.0)
                else:
                    acc = gl.zeros([ROWS, COLS], gl.float32, O)
                mbarrier.wait(turns.index(ME), turn + ME - 1 & 1, pred=turn + ME > 0)
                turn += 1
                whole = (end - begin) // PLACES
                for i in range(whole):
                    stage = (taken + i) % STAGES
                    mbarrier.wait(full.index(stage), (taken + i) // STAGES & 1)
                    acc = warpgroup_mma(xs.index(stage).permute((1, 0)), ws.index(stage), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    mbarrier.arrive(free.index((taken + i - 1) % STAGES), pred=i > 0)
                if whole == blocks:
                    mbarrier.arrive(turns.index(1 - ME))
                    acc = warpgroup_mma_wait(0, deps=[acc])
                else:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(free.index((taken + whole - 1) % STAGES), pred=whole > 0)
                    stage = (taken + whole) % STAGES
                    mbarrier.wait(full.index(stage), (taken + whole) // STAGES & 1)
                    slabs = (end - begin) % PLACES // 16
                    xt, wt = xs.index(stage), ws.index(stage)
                    if slabs == 1:
                        acc = warpgroup_mma(xt.slice(0, 16, 0).permute((1, 0)), wt.slice(0, 16, 0), acc)
                    if slabs >= 2:
                        acc = warpgroup_mma(xt.slice(0, 32, 0).permute((1, 0)), wt.slice(0, 32, 0), acc)
                    if slabs == 3:
                        acc = warpgroup_mma(xt.slice(32, 16, 0).permute((1, 0)), wt.slice(32, 16, 0), acc)
                    mbarrier.arrive(turns.index(1 - ME))
                mbarrier.arrive(free.index((taken + blocks - 1) % STAGES))
                gl.store(out + at, acc + 0.0, mask=inside)  # +0, as fold.py has it
            taken += blocks
            number += 1


@gluon.jit(do_not_specialize=["M", "N", "tiles"])
def _hopper_fold_kernel(
    a,
    b,
    out,
    ends,
    M,
    N,
    tiles,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    CONTINUES: gl.constexpr,
    UNIT: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """out[e] (M, N) goes on by Σ aᵀ b over the places of expert e, where it has any; N counts units of columns."""
    N = N * UNIT
    PLACES: gl.constexpr = a.block_shape[0]
    ROWS: gl.constexpr = a.block_shape[1]
    COLS: gl.constexpr = b.block_shape[1]
    xs = gl.allocate_shared_memory(a.dtype, [STAGES, PLACES, ROWS], a.layout)
    ws = gl.allocate_shared_memory(b.dtype, [STAGES, PLACES, COLS], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(free.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), 1)
    fence_async_shared()
    ring = (xs, ws, full, free, turns)
    gl.warp_specialize(
        [
            (_produce, (a, b, ends, ring, M, N, tiles, ROWS, COLS, GROUP_M)),
            (_consume, (out, ends, ring, M, N, tiles, ROWS, COLS, GROUP_M, CONTINUES, 0)),
            (_consume, (out, ends, ring, M, N, tiles, ROWS, COLS, GROUP_M, CONTINUES, 1)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


@cached
def _launch_for(sizes: tuple[int, int, int], device: torch.device, continues: bool) -> Launch:
    experts, M, N = sizes
    tiles = experts * -(-M // ROWS) * -(-N // COLUMNS)
    unit = next(unit for unit in (16, 8, 1) if not N % unit)
    how = {"STAGES": STAGES, "GROUP_M": GROUP_M, "CONTINUES": continues, "UNIT": unit, "REGISTERS": REGISTERS}
    grid = (min(tiles, multiprocessors(device)),)
    return Launch(_hopper_fold_kernel, device.index, grid, M, N // unit, tiles, **how, num_warps=4)


def fold(a: Tensor, b: Tensor, ends: Tensor, out: Tensor, continues: bool) -> None:
    """out (experts, M, N) fp32 = Σ a[t]ᵀ b[t] over the places of each expert that has any, on from what is there if it
    continues: a (places, M), b (places, N), bf16 or fp16; ends (experts,) int32, multiples of 16."""
    a, b = tma_ready(a), tma_ready(b)
    given = _descriptor(a, PLACES, ROWS), _descriptor(b, PLACES, COLUMNS), out, ends
    _launch_for(tuple(out.shape), a.device, continues)(*given)
