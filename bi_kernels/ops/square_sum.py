"""The sum of squares of many numbers, by a tree that follows from where each stands: 1024 at a time, and those sums
again. However the numbers are shared over buffers or ranks that begin at multiples of 1024, it is the same tree."""

import torch
import triton
import triton.language as tl

from bi_kernels.checks import aligned
from bi_kernels.launch import jit

BLOCK, ROWS, WARPS = 1024, 4, 4  # numbers that are added at a time; as often by a program


@jit(do_not_specialize=["count"])
def _sums_kernel(x, out, count, SQUARED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + at, mask=at < count, other=0.0)
    if SQUARED:
        value *= value
    tl.store(out + row, tl.sum(value, 1), mask=row * BLOCK < count)


def block_sums(x: torch.Tensor, squared: bool = False) -> torch.Tensor:
    """Returns the sum of every 1024 of x, fp32, or of their squares."""
    x = aligned(x.reshape(-1))
    count = triton.cdiv(len(x), BLOCK)
    out = x.new_empty(count)
    if count:
        options = {"SQUARED": squared, "BLOCK": BLOCK, "ROWS": ROWS, "num_warps": WARPS, "enable_fp_fusion": False}
        _sums_kernel[(triton.cdiv(count, ROWS),)](x, out, len(x), **options)
    return out


def total(sums: torch.Tensor) -> torch.Tensor:
    """Returns the sum of what `block_sums` returned, of all numbers in their order: a scalar."""
    while len(sums) > 1:
        sums = block_sums(sums)
    return sums[0] if len(sums) else sums.new_zeros(())
