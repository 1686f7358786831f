"""Left folds: rows added one after another, which no tree of a reduction does."""

import triton
import triton.language as tl

from bi_kernels.launch import jit

# a program's columns and the slabs of a round; narrow, since the additions of a column wait for each other and their
# latency is all that counts: the slabs are transposed on the way from shared memory to the registers
FOLD = {"BLOCK": 16, "SLABS": 32, "STAGES": 8, "num_warps": 1}


@triton.jit
def add_rows(total, rows, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """total + rows[:, 0] + rows[:, 1] + …, from the left; rows is (BLOCK, COUNT)."""
    if COUNT == 1:
        total += tl.reshape(rows, (BLOCK,)).to(tl.float32)
    else:
        before, after = tl.split(tl.permute(tl.reshape(rows, (BLOCK, 2, COUNT // 2)), (0, 2, 1)))
        total = add_rows(add_rows(total, before, BLOCK, COUNT // 2), after, BLOCK, COUNT // 2)
    return total


@jit(do_not_specialize=["slabs"])
def _fold_partials_kernel(
    partial,
    start,
    out,
    slabs,
    width,
    BLOCK: tl.constexpr,
    SLABS: tl.constexpr,
    STAGES: tl.constexpr,
    CONTINUES: tl.constexpr,
):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if CONTINUES:
        total = tl.load(start + col, mask=inside, other=0.0)
    for first in tl.range(0, slabs, SLABS, num_stages=STAGES):
        slab = first + tl.arange(0, SLABS)
        at = slab.to(tl.int64)[:, None] * width + col[None, :]
        values = tl.load(partial + at, mask=(slab < slabs)[:, None] & inside[None, :], other=0.0)
        total = add_rows(total, tl.trans(values), BLOCK, SLABS)
    tl.store(out + col, (total + 0.0).to(out.dtype.element_ty), mask=inside)  # a zero sum is +0, however many zeros


def fold_partials(partial, start, out) -> None:
    """out = start, or else 0, + partial[0] + partial[1] + …: partial (slabs, width) fp32, start fp32."""
    slabs, width = partial.shape
    grid, continues = (triton.cdiv(width, FOLD["BLOCK"]),), start is not None
    _fold_partials_kernel[grid](partial, start, out, slabs, width, CONTINUES=continues, enable_fp_fusion=False, **FOLD)
