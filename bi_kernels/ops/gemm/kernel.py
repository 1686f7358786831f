"""The kernel of a GEMM, and its launch.

The sum over K is a left fold over slabs of 16 in ascending order, in one accumulator that starts at +0: no split-K,
no atomics, no run-time autotune. On sm_90 the bits of that fold do not depend on the tile, the grid, the number of
warps or the operand that sits on the tensor core's M side, so cost.py picks them for speed alone.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.checks import ensure_cuda_context, multiprocessors
from bi_kernels.compat import descriptor
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.ops.gemm.cost import TILES, Tile

SHARED = 227 * 1024 - 512  # bytes that a program on sm_90 may have, but for barriers
FP32_TILE = Tile(64, 64, 32, 4, 3)
INTERPRETED = Tile(64, 64, 64, 4, 4)  # on a CPU


@triton.jit
def _load_tile(start, m, n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART_N: tl.constexpr):
    """An fp32 tile of a row-major (M, N) matrix, PART_N columns at a time: each passes through shared memory."""
    if BLOCK_N > PART_N:
        left = _load_tile(start, m, n, M, N, BLOCK_M, BLOCK_N // 2, PART_N)
        right = _load_tile(start, m, n + BLOCK_N // 2, M, N, BLOCK_M, BLOCK_N // 2, PART_N)
        return tl.join(left, right).permute(0, 2, 1).reshape(BLOCK_M, BLOCK_N)
    rows, cols = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    return tl.load(start + at, mask=(rows < M)[:, None] & (cols < N)[None, :], other=0.0)


@triton.jit
def _store_tile(y, tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART_N: tl.constexpr):
    if BLOCK_N > PART_N:
        left, right = tile.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        _store_tile(y, left, m, n, BLOCK_M, BLOCK_N // 2, PART_N)
        _store_tile(y, right, m, n + BLOCK_N // 2, BLOCK_M, BLOCK_N // 2, PART_N)
    else:
        y.store([m, n], tile.to(y.dtype))


@jit(do_not_specialize=["M", "K"])  # else each of another divisibility, and K = 1, is compiled anew
def _gemm_kernel(
    x,
    w,
    w_extra,
    y,
    bias,
    start,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXTRA_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    X_T: tl.constexpr,
    W_T: tl.constexpr,
    SWAP: tl.constexpr,
    PART_N: tl.constexpr,
    FLATTEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CONTINUES: tl.constexpr,
):
    TILE_N: tl.constexpr = BLOCK_N + EXTRA_N
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, TILE_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        width = GROUP_M * tiles_n
        first_m = tile // width * GROUP_M
        rows = tl.minimum(tiles_m - first_m, GROUP_M)
        m = (first_m + tile % width % rows) * BLOCK_M
        n = tile % width // rows * TILE_N
        if CONTINUES:  # the fold goes on from what an earlier call left
            acc = _load_tile(start, m, n, M, N, BLOCK_M, BLOCK_N, PART_N)
            if SWAP:
                acc = acc.T
        elif SWAP:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if EXTRA_N > 0:
            if CONTINUES:
                acc_extra = _load_tile(start, m, n + BLOCK_N, M, N, BLOCK_M, EXTRA_N, PART_N)
            else:
                acc_extra = tl.zeros((BLOCK_M, EXTRA_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            if X_T:
                x_tile = x.load([k, m]).T
            else:
                x_tile = x.load([m, k])
            if W_T:
                w_tile = w.load([k, n])
            else:
                w_tile = w.load([n, k]).T
            if SWAP:
                acc = tl.dot(w_tile.T, x_tile.T, acc, input_precision="ieee")
            else:
                acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
            if EXTRA_N > 0:
                if W_T:
                    e_tile = w_extra.load([k, n + BLOCK_N])
                else:
                    e_tile = w_extra.load([n + BLOCK_N, k]).T
                acc_extra = tl.dot(x_tile, e_tile, acc_extra, input_precision="ieee")
        if SWAP:
            acc = acc.T
        acc += 0.0  # fp32 products may underflow to -0, which a slab more of zeros, or a cut of the fold, turns into +0
        if EXTRA_N > 0:
            acc_extra += 0.0
        if HAS_BIAS:
            cols = n + tl.arange(0, BLOCK_N)
            acc += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        _store_tile(y, acc, m, n, BLOCK_M, BLOCK_N, PART_N)
        if EXTRA_N > 0:
            if HAS_BIAS:
                extra_cols = n + BLOCK_N + tl.arange(0, EXTRA_N)
                acc_extra += tl.load(bias + extra_cols, mask=extra_cols < N, other=0.0).to(tl.float32)[None, :]
            _store_tile(y, acc_extra, m, n + BLOCK_N, BLOCK_M, EXTRA_N, PART_N)


def _descriptor(t: torch.Tensor, rows: int, cols: int, transposed: bool = False) -> TensorDescriptor:
    """Returns a descriptor that yields rows×cols blocks of `t`, or their transposes where `t` is stored transposed."""
    shape, stride, block = t.shape, t.stride(), [rows, cols]
    if transposed:
        shape, stride, block = shape[::-1], stride[::-1], block[::-1]
    return descriptor(ensure_cuda_context(t), shape, stride, block)


def tma_ready(t: torch.Tensor) -> torch.Tensor:
    """`t` itself, or a copy, such that one stride is 1, the other a multiple of 16 bytes, the base 16-byte aligned."""
    unit = 16 // t.element_size()
    (rows, cols), (slow, fast) = t.shape, t.stride()
    if t.data_ptr() % 16 == 0 and (
        fast == 1 and slow % unit == 0 and slow >= cols or slow == 1 and fast % unit == 0 and fast >= rows
    ):
        return t
    return _padded(t)


def by_rows(t: torch.Tensor) -> torch.Tensor:
    """`t` as `tma_ready` has it, or a copy, such that the last stride is 1."""
    return tma_ready(t) if t.stride(1) == 1 else _padded(t)


def _padded(t: torch.Tensor) -> torch.Tensor:
    (rows, cols), unit = t.shape, 16 // t.element_size()
    return t.new_empty(rows, -(-cols // unit) * unit)[:, :cols].copy_(t)


def check_out(out: torch.Tensor | None, M: int, N: int) -> None:
    """Raises ValueError where y does not have the shape of `out`: a descriptor would clip what does not fit."""
    if out is not None and out.shape != (M, N):
        raise ValueError(f"out has shape {tuple(out.shape)}, expected {(M, N)}")


def prepared(x, w, out_dtype: torch.dtype, out) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns x and w such that blocks of them can be copied, and where y goes: `out`, or rows that begin at multiples
    of 16 bytes."""
    M, N = len(x), len(w)
    check_out(out, M, N)
    unit = 16 // out_dtype.itemsize
    if out is not None and out.data_ptr() % 16 == 0 and out.stride(0) % unit == 0:
        y = out
    else:
        y = x.new_empty((M, -(-N // unit) * unit), dtype=out_dtype)
    return tma_ready(x), tma_ready(w), y


def finished(y, N: int, out) -> torch.Tensor:
    """Returns the N columns of what `prepared` gave for y, in `out` where there is one."""
    if out is not None:
        return out if y is out else out.copy_(y[:, :N])
    return y if y.shape[1] == N else y[:, :N].contiguous()


@cached
def _launch_for(
    sizes: tuple[int, int, int],
    tile: Tile,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    transposed: tuple[bool, bool],
    bias: torch.dtype | None,
    continues: bool,
) -> tuple[Launch, int]:
    """Returns the launch, and how many columns of y are stored at a time."""
    (M, N, K), (dtype, out_dtype) = sizes, dtypes
    part_n = tile.n // 2 if tile.halves or tile.extra_n else tile.n
    if continues:
        part_n = min(part_n, 4096 // tile.m)
    pipeline = tile.stages * (tile.m + tile.n + tile.extra_n) * tile.k * dtype.itemsize
    while pipeline + tile.m * part_n * out_dtype.itemsize > SHARED and part_n > 16:
        part_n //= 2  # fp32 leaves through shared memory twice as wide
    grid = triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n + tile.extra_n)
    persistent = 0 if continues else tile.persistent  # a first tile that is loaded breaks the pipeline across tiles
    if persistent:
        grid = min(grid, tile.persistent * multiprocessors(device))
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "EXTRA_N": tile.extra_n, "BLOCK_K": tile.k, "PART_N": part_n}
    how = {"GROUP_M": tile.group, "SWAP": tile.swap, "FLATTEN": persistent > 0, "CONTINUES": continues}
    how |= {"X_T": transposed[0], "W_T": transposed[1], "HAS_BIAS": bias is not None}
    how |= {"num_warps": tile.warps, "num_stages": tile.stages}
    return Launch(_gemm_kernel, device.index, (grid,), M, N, K, **blocks, **how), part_n


def launch(x, w, bias, tile: Tile, out_dtype: torch.dtype | None = None, start=None, out=None) -> torch.Tensor:
    """y (M, N) = start (M, N) + x (M, K) wᵀ (N, K) + bias (N,), with the given tile; y in the dtype of x unless
    out_dtype is given, or in `out`. start: fp32; may be `out`."""
    (M, K), N = x.shape, w.shape[0]
    out_dtype = out_dtype or x.dtype
    x, w, y = prepared(x, w, out_dtype, out)
    start = None if start is None else start.contiguous()
    x_t, w_t = x.stride(1) != 1, w.stride(1) != 1
    kinds, kind = (x.dtype, out_dtype), None if bias is None else bias.dtype
    fold, part_n = _launch_for((M, N, K), tile, kinds, x.device, (x_t, w_t), kind, start is not None)
    fold(
        _descriptor(x, tile.m, tile.k, x_t),
        _descriptor(w, tile.n, tile.k, w_t),
        _descriptor(w, tile.extra_n, tile.k, w_t) if tile.extra_n else None,
        _descriptor(y, tile.m, part_n),
        None if bias is None else bias.contiguous(),
        start,
    )
    return finished(y, N, out)


def tiles(dtype: torch.dtype) -> list[Tile]:
    """Returns every tile that a product of a dtype may have."""
    return [FP32_TILE] if dtype == torch.float32 else list(dict.fromkeys(tile for use in TILES for tile in TILES[use]))
