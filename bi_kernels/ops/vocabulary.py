"""Reductions over a vocabulary: what its blocks say of every row of logits, and the gradient of the logits.

The vocabulary is reduced in fixed blocks of 4096: each gives its maximum m, Σ exp(z − m) and Σ exp(z − m) z in fp32, by
one fixed tree, and the blocks are folded in ascending order. z = logit / temperature, the factor rounded to fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.launch import jit

BLOCK, WARPS = 4096, 4  # of the vocabulary
MERGE_ROWS = 32


@jit(do_not_specialize=["rows", "columns", "first", "vocab"])
def _block_kernel(
    logits,
    targets,
    m,
    s,
    u,
    selected,
    rows,
    columns,
    stride,
    first,
    vocab,
    inv_temperature,
    HAS_TARGETS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of each row: max, Σ exp(z − max), Σ exp(z − max) z, and z of the row's target where it is here; NaN of
    a target that the vocabulary does not hold.

    Whatever `columns` is, the loads reach to a multiple of 16: they are as wide as can be, and the trees always the
    same.
    """
    row, block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    col = block * BLOCK + tl.arange(0, BLOCK)
    mine = row < rows
    held = mine[:, None] & (col < tl.cdiv(columns, 16) * 16)[None, :]
    z = tl.load(logits + row[:, None] * stride + col[None, :], mask=held, other=0.0).to(tl.float32) * inv_temperature
    z = tl.where((col < columns)[None, :], z, -float("inf"))
    top = tl.max(z, 1)
    base = tl.where(top == -float("inf"), 0.0, top)  # a block of -inf alone adds nothing
    e = tl.exp(z - base[:, None])
    at = (first // BLOCK + block).to(tl.int64) * rows + row
    tl.store(m + at, top, mask=mine)
    tl.store(s + at, tl.sum(e, 1), mask=mine)
    tl.store(u + at, tl.sum(tl.where(e > 0, e * z, 0.0), 1), mask=mine)  # 0 · -inf is no term
    if HAS_TARGETS:
        target = tl.load(targets + row, mask=mine, other=-1) - first
        here = mine & (target >= block * BLOCK) & (target < tl.minimum((block + 1) * BLOCK, columns))
        tl.store(
            selected + row,
            tl.load(logits + row * stride + target, mask=here, other=0.0).to(tl.float32) * inv_temperature,
            mask=here,
        )
        lost = mine & ((target + first < 0) | (target + first >= vocab)) & (first + block == 0)
        tl.store(selected + row, tl.full((ROWS,), float("nan"), tl.float32), mask=lost)


@jit(do_not_specialize=["rows"])
def _merge_kernel(m, s, u, lse, entropy, rows, blocks, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    top = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    at = row  # of block 0; the next block is `rows` further
    for _ in range(blocks):  # tl.maximum drops a NaN; s brings it back
        top = tl.maximum(top, tl.load(m + at, mask=inside, other=0.0))
        at += rows
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    weighted = tl.zeros((ROWS,), dtype=tl.float32)
    at = row
    for _ in range(blocks):
        own = tl.load(m + at, mask=inside, other=0.0)
        factor = tl.exp(tl.where(own == -float("inf"), base, own) - base)
        total += tl.load(s + at, mask=inside, other=1.0) * factor
        weighted += tl.load(u + at, mask=inside, other=0.0) * factor
        at += rows
    value = base + tl.log(total)
    tl.store(lse + row, value, mask=inside)
    tl.store(entropy + row, value - tl.div_rn(weighted, total), mask=inside)


@jit(do_not_specialize=["rows"])
def _dlogits_kernel(
    logits,
    targets,
    lse,
    entropy,
    d_logprob,
    d_entropy,
    out,
    rows,
    columns,
    stride,
    first,
    inv_temperature,
    HAS_ENTROPY: tl.constexpr,
    IGNORE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = row < rows
    inside = mine[:, None] & (col < columns)[None, :]
    target = tl.load(targets + row, mask=mine, other=IGNORE)[:, None]
    z = tl.load(logits + row[:, None] * stride + col[None, :], mask=inside & (target != IGNORE), other=0.0).to(
        tl.float32
    )
    logp = z * inv_temperature - tl.load(lse + row, mask=mine, other=0.0)[:, None]
    p = tl.exp(logp)
    grad = tl.load(d_logprob + row, mask=mine, other=0.0)[:, None] * (
        tl.where(col[None, :] + first == target, 1.0, 0.0) - p
    )
    if HAS_ENTROPY:
        v = logp + tl.load(entropy + row, mask=mine, other=0.0)[:, None]
        grad -= tl.where(p > 0, tl.load(d_entropy + row, mask=mine, other=0.0)[:, None] * p * v, 0.0)
    grad = tl.where(target != IGNORE, grad * inv_temperature, 0.0)
    tl.store(out + row[:, None] * stride + col[None, :], grad.to(out.dtype.element_ty), mask=inside)


def blocks_of(vocab: int) -> dict[str, int]:
    """Fixed for a vocabulary: blocks of BLOCK, or one of a small vocabulary and several rows a program."""
    block = min(BLOCK, triton.next_power_of_2(vocab))
    return {"ROWS": BLOCK // block, "BLOCK": block, "num_warps": WARPS, "enable_fp_fusion": False}


def grid_of(rows: int, columns: int, blocks: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(rows, blocks["ROWS"]), triton.cdiv(columns, blocks["BLOCK"])


def padded(logits: Tensor) -> Tensor:
    """`logits`, or a copy whose rows all start at multiples of 16 bytes and of 16 elements: Triton compiles by that,
    and the layout of a sum follows. What fills a row to a multiple of 16 is read, and not used."""
    if logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0 and logits.stride(1) == 1:
        return logits
    rows, columns = logits.shape
    return logits.new_empty(rows, triton.cdiv(columns, 16) * 16)[:, :columns].copy_(logits)


class Statistics:
    """What the blocks of the vocabulary say of every row, and the merged lse, entropy and selected z."""

    def __init__(self, rows: int, vocab: int, device: torch.device, targets: Tensor | None, inv_temperature: float):
        self.rows, self.targets, self.inv_temperature = rows, targets, inv_temperature
        self.vocab, self.blocks, self.shape = vocab, triton.cdiv(vocab, BLOCK), blocks_of(vocab)
        make = lambda *shape: torch.empty(shape, dtype=torch.float32, device=device)
        self.parts = [make(self.blocks, rows) for _ in range(3)]
        self.selected, self.lse, self.entropy = make(rows), make(rows), make(rows)

    def add(self, logits: Tensor, first: int) -> None:
        """Columns `first` and on; `first` and, but for the last, their number are multiples of BLOCK."""
        logits = padded(logits)
        columns, grid = logits.shape[1], grid_of(self.rows, logits.shape[1], self.shape)
        given = logits, self.targets, *self.parts, self.selected
        sizes = self.rows, columns, logits.stride(0), first, self.vocab, self.inv_temperature
        _block_kernel[grid](*given, *sizes, HAS_TARGETS=self.targets is not None, **self.shape)

    def merge(self) -> "Statistics":
        grid, merged = (triton.cdiv(self.rows, MERGE_ROWS),), (self.lse, self.entropy)
        _merge_kernel[grid](
            *self.parts, *merged, self.rows, self.blocks, ROWS=MERGE_ROWS, num_warps=1, enable_fp_fusion=False
        )
        return self

    def results(self, ignore_index: int) -> tuple[Tensor, Tensor]:
        ignored = self.targets == ignore_index
        return (self.selected - self.lse).masked_fill_(ignored, 0.0), self.entropy.masked_fill(ignored, 0.0)


def dlogits(
    logits,
    first: int,
    vocab: int,
    targets,
    lse,
    entropy,
    d_logprob,
    d_entropy,
    inv_temperature: float,
    ignore_index: int,
    out,
) -> Tensor:
    """Returns the gradient of columns `first` and on of a vocabulary of `vocab`; out may be logits."""
    blocks, given = blocks_of(vocab), (logits, targets, lse, entropy, d_logprob, d_entropy, out)
    sizes, flags = (*logits.shape, logits.stride(0), first), {"HAS_ENTROPY": d_entropy is not None}
    grid = grid_of(*logits.shape, blocks)
    _dlogits_kernel[grid](*given, *sizes, inv_temperature, **flags, IGNORE=ignore_index, **blocks)
    return out
