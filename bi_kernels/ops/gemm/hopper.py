"""The GEMM on sm_90 in Gluon: the fold of kernel.py, by another program, for what waits for memory or for itself.

Four warps bring x and w through a ring of TMA stages; one or two more groups of four compute a tile each. Two take
turns: while the products of one tile are added, the other's result leaves, and what its next one goes on from (a
weight's `main_grad`) arrives where the tensor core adds. Narrow tiles are for products of few rows and columns: their
sum over K is one chain of instructions, which takes the longer the wider they are. Of few rows, a stage holds no more
than there are, and as much of k as keeps the chain from waiting between stages.
"""

from collections.abc import Callable
from functools import partial

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bi_kernels.checks import ensure_cuda_context, multiprocessors
from bi_kernels.compat import descriptor
from bi_kernels.launch import Launch, cached
from bi_kernels.ops.gemm.cost import PipelineConfig
from bi_kernels.ops.gemm.kernel import check_out, tma_ready
from bi_kernels.ops.gemm.launch_cache import kind_of, remember

COPIED = 256  # the most of k that TMA copies at once


@gluon.jit
def _place(tile, M, N, ROWS: gl.constexpr, COLS: gl.constexpr, GROUP_M: gl.constexpr):
    """Returns the first row and column of a tile."""
    tiles_m, tiles_n = gl.cdiv(M, ROWS), gl.cdiv(N, COLS)
    width = GROUP_M * tiles_n
    first_m = tile // width * GROUP_M
    rows = gl.minimum(tiles_m - first_m, GROUP_M)
    return (first_m + tile % width % rows) * ROWS, tile % width // rows * COLS


@gluon.jit
def _produce(x, w, ring, M, N, K, ROWS: gl.constexpr, COLS: gl.constexpr, GROUP_M: gl.constexpr, T: gl.constexpr):
    """Copies blocks of x and w into the ring, stage after stage, tile after tile."""
    xs, ws, full, free, turns = ring
    STAGES: gl.constexpr = full.shape[0]
    PARTS: gl.constexpr = ws.shape[0] // STAGES
    PART: gl.constexpr = xs.shape[1] if T[0] else xs.shape[2]
    BLOCK: gl.constexpr = x.block_shape[0] if T[0] else x.block_shape[1]
    COPIES: gl.constexpr = PARTS * PART // BLOCK
    copied = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, ROWS) * gl.cdiv(N, COLS), gl.num_programs(0)):
        m, n = _place(tile, M, N, ROWS, COLS, GROUP_M)
        for first in range(0, K, PARTS * PART):
            stage = copied % STAGES
            mbarrier.wait(free.index(stage), copied // STAGES - 1 & 1, pred=copied >= STAGES)
            bar = full.index(stage)
            mbarrier.expect(bar, COPIES * (x.block_type.nbytes + w.block_type.nbytes))
            for copy in gl.static_range(COPIES):
                k, part = first + copy * BLOCK, stage * PARTS + copy * (BLOCK // PART)
                x_to, w_to = xs.index(part), ws.index(part)
                if BLOCK > PART:  # parts lie one after the other, as a wider block has them
                    x_to = x_to._reinterpret(x.dtype, x.block_shape, x.layout)
                    w_to = w_to._reinterpret(w.dtype, w.block_shape, w.layout)
                tma.async_copy_global_to_shared(x, [k, m] if T[0] else [m, k], bar, x_to)
                tma.async_copy_global_to_shared(w, [k, n] if T[1] else [n, k], bar, w_to)
            copied += 1


@gluon.jit
def _consume(
    given,
    ring,
    M,
    N,
    K,
    stride,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    GROUP_M: gl.constexpr,
    GROUPS: gl.constexpr,
    T: gl.constexpr,
    ME: gl.constexpr,
):
    """Computes every tile of the program, or every other one."""
    start, bias, out = given
    xs, ws, full, free, turns = ring
    STAGES: gl.constexpr = full.shape[0]
    PARTS: gl.constexpr = ws.shape[0] // STAGES
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    PART: gl.constexpr = xs.shape[1] if T[0] else xs.shape[2]
    HELD: gl.constexpr = max(64, ROWS)  # the tensor core's rows, those of nobody among them
    step, slabs = gl.num_programs(0), gl.cdiv(K, PARTS * PART)
    taken, turn = ME * slabs, 0
    for tile in range(gl.program_id(0) + ME * step, gl.cdiv(M, ROWS) * gl.cdiv(N, COLS), GROUPS * step):
        m, n = _place(tile, M, N, ROWS, COLS, GROUP_M)
        row, col = m + gl.arange(0, HELD, gl.SliceLayout(1, O)), n + gl.arange(0, COLS, gl.SliceLayout(0, O))
        inside = (row < gl.minimum(M, m + ROWS))[:, None] & (col < N)[None, :]
        at = row.to(gl.int64)[:, None] * stride + col[None, :]
        if start is not None:
            acc = gl.load(start + at, mask=inside, other=0.0)
        else:
            acc = gl.zeros([HELD, COLS], gl.float32, O)
        if GROUPS == 2:  # a wait may be one round ahead of a barrier, not two
            mbarrier.wait(turns.index(ME), turn + ME - 1 & 1, pred=turn + ME > 0)
            turn += 1
        if PARTS > 1:
            mbarrier.wait(full.index(taken % STAGES), taken // STAGES & 1)
        for i in range(slabs):
            stage = taken % STAGES
            if PARTS == 1:
                mbarrier.wait(full.index(stage), taken // STAGES & 1)
            for part in gl.static_range(PARTS):
                xt, wt = xs.index(stage * PARTS + part), ws.index(stage * PARTS + part)
                if ROWS < HELD:  # what follows in the ring, whatever it is, stands for the rows of nobody
                    xt = xt._reinterpret(xt.dtype, [HELD, PART], xs.layout)
                if T[0]:
                    xt = xt.permute((1, 0))
                if not T[1]:
                    wt = wt.permute((1, 0))
                acc = warpgroup_mma(xt, wt, acc, is_async=True)
                if part == 0:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    mbarrier.arrive(free.index((taken - 1) % STAGES), pred=i > 0)
                if part == PARTS - 2:  # while the tensor core, which is told little ahead, has something to do
                    mbarrier.wait(full.index((taken + 1) % STAGES), (taken + 1) // STAGES & 1, pred=i + 1 < slabs)
            if PARTS > 1:
                acc = warpgroup_mma_wait(PARTS, deps=[acc])  # for none
            taken += 1
        if GROUPS == 2:
            mbarrier.arrive(turns.index(1 - ME))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((taken - 1) % STAGES))
        taken += (GROUPS - 1) * slabs
        acc += 0.0  # +0, as kernel.py has it
        if bias is not None:
            acc += gl.load(bias + col, mask=col < N, other=0.0).to(gl.float32)[None, :]
        gl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["M", "N", "K", "stride"])
def _hopper_gemm_kernel(
    x,
    w,
    start,
    bias,
    out,
    M,
    N,
    K,
    stride,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    PART: gl.constexpr,
    GROUP_M: gl.constexpr,
    GROUPS: gl.constexpr,
    X_T: gl.constexpr,
    W_T: gl.constexpr,
    UNIT: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Computes tiles of start + x wᵀ + bias; N and stride count units of columns, stored side by side."""
    N, stride = N * UNIT, stride * UNIT
    ROWS: gl.constexpr = x.block_shape[1] if X_T else x.block_shape[0]
    COLS: gl.constexpr = w.block_shape[1] if W_T else w.block_shape[0]
    T: gl.constexpr = (X_T, W_T)
    BEYOND: gl.constexpr = max(64 // ROWS, 1) - 1  # parts that the tensor core reads beside the last one's few rows
    X: gl.constexpr = [PART, ROWS] if X_T else [ROWS, PART]
    W: gl.constexpr = [PART, COLS] if W_T else [COLS, PART]
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * PARTS + BEYOND, X[0], X[1]], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES * PARTS, W[0], W[1]], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(free.index(i), 1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), 1)
    fence_async_shared()
    ring, given = (xs, ws, full, free, turns), (start, bias, out)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_produce, (x, w, ring, M, N, K, ROWS, COLS, GROUP_M, T)),
                (_consume, (given, ring, M, N, K, stride, ROWS, COLS, GROUP_M, GROUPS, T, 0)),
                (_consume, (given, ring, M, N, K, stride, ROWS, COLS, GROUP_M, GROUPS, T, 1)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_produce, (x, w, ring, M, N, K, ROWS, COLS, GROUP_M, T)),
                (_consume, (given, ring, M, N, K, stride, ROWS, COLS, GROUP_M, GROUPS, T, 0)),
            ],
            [4],
            [REGISTERS],
        )


def _descriptor(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns blocks of t (rows, columns), or of its transpose where it is stored transposed."""
    shape, strides, block = t.shape, t.stride(), [rows, columns]
    if strides[1] != 1:
        shape, strides, block = shape[::-1], strides[::-1], block[::-1]
    return descriptor(ensure_cuda_context(t), shape, strides, block, TensorDescriptor, _layout(*block, t.dtype))


@cached
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


@cached
def _launch_for(
    sizes: tuple[int, int, int],
    stride: int,
    ring: PipelineConfig,
    device: torch.device,
    transposed: tuple[bool, bool],
    dtypes: tuple[torch.dtype | None, ...],
) -> Launch:
    """Returns the launch; dtypes: of x, start, bias and y."""
    M, N, K = sizes
    tiles = -(-M // ring.rows) * -(-N // ring.columns)
    held = 65536 // ((1 + ring.groups) * 128 * ring.resident) // 8 * 8  # registers of a thread, if all have as many
    more = {"maxnreg": held} if ring.resident > 1 else {}
    unit = next(unit for unit in (16, 8, 1) if not (N % unit or stride % unit))
    more |= {"REGISTERS": min(240, held + (held - 24) // ring.groups // 8 * 8), "UNIT": unit, "num_warps": 4}
    more |= {"STAGES": ring.stages, "PARTS": ring.k // ring.part, "PART": ring.part}
    more |= {"GROUP_M": ring.group, "GROUPS": ring.groups, "X_T": transposed[0], "W_T": transposed[1]}
    grid = (min(tiles, multiprocessors(device) * ring.resident),)
    return Launch(_hopper_gemm_kernel, device.index, grid, M, N // unit, K, stride // unit, **more)


def launch(x, w, bias, ring: PipelineConfig, out_dtype: torch.dtype | None = None, start=None, out=None) -> Tensor:
    """y (M, N) = start (M, N) + x (M, K) wᵀ (N, K) + bias (N,), as `kernel.launch` has it, of x and w in 16 bits;
    the columns of `out` are contiguous, and start, fp32, has its stride."""
    given, kind = (x, w), kind_of(x, w, bias, out_dtype)
    x, w, bias = tma_ready(x), tma_ready(w), None if bias is None else bias.contiguous()
    (M, K), N = x.shape, w.shape[0]
    check_out(out, M, N)
    y = x.new_empty((M, N), dtype=out_dtype or x.dtype) if out is None else out
    transposed = x.stride(1) != 1, w.stride(1) != 1
    dtypes = x.dtype, None if start is None else start.dtype, None if bias is None else bias.dtype, y.dtype
    run = partial(_run, _launch_for((M, N, K), y.stride(0), ring, x.device, transposed, dtypes), ring)
    if start is None and out is None and x is given[0] and w is given[1]:
        remember(kind, partial(_straight, run, (M, N), y.dtype))
    return run(x, w, start, bias, y)


def _run(launched: Launch, ring: PipelineConfig, x, w, start, bias, y) -> Tensor:
    k = min(ring.k, COPIED)
    launched(_descriptor(x, ring.rows, k), _descriptor(w, ring.columns, k), start, bias, y)
    return y


def _straight(run: Callable, shape: tuple[int, int], dtype: torch.dtype, x, w, bias) -> Tensor:
    """Computes a product of which nothing has to be copied."""
    return run(x, w, None, bias, x.new_empty(shape, dtype=dtype))
