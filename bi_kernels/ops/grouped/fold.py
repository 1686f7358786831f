"""The gradient of experts' weights: dW[e] = Σ dyᵀ x over the places of expert e, a left fold in slabs of 16 places that
goes on from what is there.

A program folds one tile of one expert. Blocks of BLOCK_T places come first, and what is left in slabs, so that nothing
of the next expert is read. An expert without places keeps what it has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import ensure_cuda_context
from bi_kernels.compat import descriptor
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.op import writes
from bi_kernels.ops.gemm.cost import Tile
from bi_kernels.ops.gemm.kernel import FP32_TILE, INTERPRETED, by_rows
from bi_kernels.ops.grouped.rows import gather_rows
from bi_kernels.tokens import SLAB, consume_zero_flag

FEW, MANY = Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 4, 3)  # by the width of the gradient


@jit
def _fold_kernel(
    a,
    b,
    a_slab,
    b_slab,
    out,
    ends,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP_M: tl.constexpr,
    SLAB: tl.constexpr,
    CONTINUES: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """out[e] (M, N) = Σ a[t]ᵀ b[t] over the places of expert e, on from what is there if it CONTINUES; KEEPS: out holds
    what an expert without places keeps."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    e = tl.program_id(0) // (tiles_m * tiles_n)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    width = GROUP_M * tiles_n
    first_m = tile // width * GROUP_M
    several = tl.minimum(tiles_m - first_m, GROUP_M)
    m = (first_m + tile % width % several) * BLOCK_M
    n = tile % width // several * BLOCK_N
    end = tl.load(ends + e)
    begin = tl.load(ends + e - 1, mask=e > 0, other=0)
    if KEEPS:
        wanted = begin < end
    else:
        wanted = begin <= end
    if wanted:
        row, col = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        inside = (row < M)[:, None] & (col < N)[None, :]
        into = out + e.to(tl.int64) * M * N + row.to(tl.int64)[:, None] * N + col[None, :]
        if CONTINUES:
            acc = tl.load(into, mask=inside, other=0.0)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        whole = begin + (end - begin) // BLOCK_T * BLOCK_T
        for t in range(begin, whole, BLOCK_T):
            acc = tl.dot(a.load([t, m]).T, b.load([t, n]), acc, input_precision="ieee")
        for t in range(whole, end, SLAB):
            acc = tl.dot(a_slab.load([t, m]).T, b_slab.load([t, n]), acc, input_precision="ieee")
        tl.store(into, (acc + 0.0).to(out.dtype.element_ty), mask=inside)


def _tile_for(M: int, dtype: torch.dtype, device: torch.device) -> Tile:
    if dtype == torch.float32:
        return FP32_TILE
    if device.type == "cpu":
        return INTERPRETED
    return FEW if M <= 64 else MANY


@cached
def _launch_for(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, continues: bool, keeps: bool
) -> tuple[Launch, Tile]:
    experts, M, N = sizes
    tile = _tile_for(M, dtype, device)
    grid = (experts * triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n),)
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_T": tile.k, "GROUP_M": tile.group, "SLAB": SLAB}
    how = {"CONTINUES": continues, "KEEPS": keeps, "num_warps": tile.warps, "num_stages": tile.stages}
    return Launch(_fold_kernel, device.index, grid, M, N, **blocks, **how), tile


def fold(a: Tensor, b: Tensor, ends: Tensor, out: Tensor, continues: bool, keeps: bool) -> None:
    """out (experts, M, N) = Σ a[t]ᵀ b[t], a (places, M), b (places, N), ends (experts,) int32, multiples of 16: the end
    of each expert's places. continues: on from what is there; keeps: out holds the result of no place."""
    experts, M, N = out.shape
    if not out.numel():
        return
    if not len(a):
        if not keeps:
            out.zero_()
        return
    run, tile = _launch_for((experts, M, N), a.dtype, a.device, continues, keeps)
    a, b = ensure_cuda_context(by_rows(a)), by_rows(b)
    blocks = lambda t, rows, columns: descriptor(t, t.shape, t.stride(), (rows, columns))
    whole, slab = ((blocks(a, rows, tile.m), blocks(b, rows, tile.n)) for rows in (tile.k, SLAB))
    run(*whole, *slab, out, ends)


@writes("out")
def fold_weight(dy, x, slots, ends, out, continues: bool) -> None:
    """out (experts, columns of dy, columns of x): of the rows that `slots` names, or of all where it is None. x: None
    for a column of ones."""
    start = continues and not consume_zero_flag(out)
    if slots is not None:
        dy, x = (None if t is None else gather_rows(t, slots, end=ends[-1:]) for t in (dy, x))
    if x is None:
        fold(dy.new_ones(len(dy), 1), dy, ends, out.unsqueeze(1), start, continues)
    else:
        fold(dy, x, ends, out, start, continues)
