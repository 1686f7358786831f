"""The grouped product y[r] = x[r] w[e]ᵀ + bias[e], r among the rows of expert e: the fold over K of ops/gemm, and so
its bits.

A program finds its tile from the ends of the experts' rows, on the device. Tiles never mix experts; those that no
expert needs do nothing. No tile size changes a bit, so they follow from how many rows an expert has on average.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import ensure_cuda_context
from bi_kernels.compat import descriptor
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.ops.gemm.cost import Tile
from bi_kernels.ops.gemm.kernel import FP32_TILE, INTERPRETED, by_rows

# by the most rows that an expert has on average; few rows sit on the tensor core's N side
TILES = {
    16: Tile(16, 128, 128, 4, 4, swap=True),
    32: Tile(32, 128, 128, 4, 4, swap=True),
    64: Tile(64, 128, 64, 4, 4),
    128: Tile(128, 128, 64, 8, 4),
}
MANY = Tile(128, 256, 64, 8, 3)


@jit(do_not_specialize=["rows", "K"])  # where K is 1, Triton would begin the only product at the bias
def _grouped_kernel(
    x,
    w,
    y,
    bias,
    ends,
    rows,
    N,
    K,
    experts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    W_T: tl.constexpr,
    SWAP: tl.constexpr,
):
    """x (rows, K); w (experts · N, K), or (experts · K, N) where W_T; y (rows, N); bias (experts, N)."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends + expert, mask=expert < experts, other=0)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    begin, end = tl.maximum(begin, 0), tl.minimum(end, rows)  # whatever stands there, no memory but x's is read
    tiles = tl.where(end > begin, tl.cdiv(end - begin, BLOCK_M), 0) * tiles_n
    until = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    if tile < tl.sum(tiles, 0):
        e = tl.sum((until <= tile).to(tl.int32), 0)
        mine = expert == e
        tile -= tl.sum(tl.where(mine, until - tiles, 0), 0)
        first, last = tl.sum(tl.where(mine, begin, 0), 0), tl.sum(tl.where(mine, end, 0), 0)
        tiles_m = tl.cdiv(last - first, BLOCK_M)
        width = GROUP_M * tiles_n
        first_m = tile // width * GROUP_M
        several = tl.minimum(tiles_m - first_m, GROUP_M)
        m = first + (first_m + tile % width % several) * BLOCK_M
        n = tile % width // several * BLOCK_N
        if SWAP:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            x_tile = x.load([m, k])
            if W_T:
                w_tile = w.load([e * K + k, n])
            else:
                w_tile = w.load([e * N + n, k]).T
            if SWAP:
                acc = tl.dot(w_tile.T, x_tile.T, acc, input_precision="ieee")
            else:
                acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        if SWAP:
            acc = acc.T
        acc += 0.0  # +0, as gemm/kernel.py has it
        row, col = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        if bias is not None:
            at = e.to(tl.int64) * N + col
            acc += tl.load(bias + at, mask=col < N, other=0.0).to(tl.float32)[None, :]
        inside = (row < last)[:, None] & (col < N)[None, :]
        tl.store(y + row.to(tl.int64)[:, None] * N + col[None, :], acc.to(y.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows"])
def _clear_kernel(y, ends, rows, N, experts, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros where rows follow those of the last expert."""
    end = tl.maximum(tl.load(ends + experts - 1), 0)
    first = tl.program_id(0) * ROWS
    if first + ROWS > end:
        row = first + tl.arange(0, ROWS)
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = ((row < rows) & (row >= end))[:, None] & (col < N)[None, :]
        zeros = tl.zeros((ROWS, BLOCK), dtype=y.dtype.element_ty)
        tl.store(y + row.to(tl.int64)[:, None] * N + col[None, :], zeros, mask=inside)


def tile_for(rows: int, experts: int, dtype: torch.dtype, device: torch.device) -> Tile:
    if dtype == torch.float32:
        return FP32_TILE
    if device.type == "cpu":
        return INTERPRETED
    return next((tile for most, tile in TILES.items() if rows <= most * experts), MANY)


def stacked(w: Tensor, block: int) -> tuple[Tensor, bool]:
    """Returns the matrices of w (experts, N, K) one below the other, and whether they are stored as (K, N), K being a
    multiple of the block then; a copy where w is stored in another way."""
    experts, N, K = w.shape
    if w.stride(2) != 1 and w.stride(1) == 1 and K % block == 0 and w.stride(0) == K * w.stride(2):
        return by_rows(w.mT.flatten(0, 1)), True
    return by_rows(w.flatten(0, 1)), False


@cached
def _launch_for(rows: int, sizes: tuple[int, int, int], tile: Tile, transposed: bool, device: torch.device) -> Launch:
    experts, N, K = sizes
    grid = (rows // tile.m + min(experts, rows)) * triton.cdiv(N, tile.n)
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": tile.group, "SWAP": tile.swap}
    how = {"EXPERTS": triton.next_power_of_2(experts), "W_T": transposed, "num_stages": tile.stages}
    return Launch(_grouped_kernel, device.index, (grid,), rows, N, K, experts, **blocks, **how, num_warps=tile.warps)


def launch(x: Tensor, w: Tensor, bias: Tensor | None, ends: Tensor, tile: Tile | None = None) -> Tensor:
    """Returns y (rows, N) for x (rows, K), w (experts, N, K), bias (experts, N) and ends (experts,) int32; rows beyond
    the last end hold anything. Sizes are not 0."""
    (rows, K), (experts, N, _) = x.shape, w.shape
    tile = tile or tile_for(rows, experts, x.dtype, x.device)
    (flat, transposed), x = stacked(w, tile.k), by_rows(x)
    y = x.new_empty(rows, N)
    block = (tile.k, tile.n) if transposed else (tile.n, tile.k)
    _launch_for(rows, (experts, N, K), tile, transposed, x.device)(
        descriptor(ensure_cuda_context(x), x.shape, x.stride(), (tile.m, tile.k)),
        descriptor(flat, flat.shape, flat.stride(), block),
        y,
        None if bias is None else bias.contiguous(),
        ends,
    )
    return y


def clear_rest(y: Tensor, ends: Tensor) -> Tensor:
    """Writes zeros to the rows of y that follow those of the last expert."""
    rows, N = y.shape
    if y.numel():
        options = {"ROWS": 64, "BLOCK": min(1024, triton.next_power_of_2(N)), "num_warps": 4}
        grid = triton.cdiv(rows, 64), triton.cdiv(N, options["BLOCK"])
        _clear_kernel[grid](y, ends, rows, N, len(ends), **options)
    return y
