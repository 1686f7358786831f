"""Log-probabilities of given logits: log-softmax, and the selected token's logprob with the entropy.

The vocabulary is reduced in fixed blocks of 4096: each gives its maximum m, Σ exp(z − m) and Σ exp(z − m) z in fp32, by
one fixed tree, and the blocks are folded in ascending order. z = logit / temperature, the factor rounded to fp32.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from bi_kernels.checks import aligned, apply, check, check_integer, check_number, check_shape
from bi_kernels.ops.embedding import can_wait, check_ids

BLOCK, WARPS = 4096, 4  # of the vocabulary
MERGE_ROWS = 32


@triton.jit(do_not_specialize=["rows", "columns", "first"])
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
    inv_temperature,
    HAS_TARGETS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of each row: max, Σ exp(z − max), Σ exp(z − max) z, and z of the row's target where it is here.

    Whatever `columns` is, the loads reach to a multiple of 16: they are as wide as can be, and the trees always the same.
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


@triton.jit
def _merge_kernel(m, s, u, lse, entropy, rows, blocks, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    first = row.to(tl.int64)  # of block 0; the next block is `rows` further
    top = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    at = first
    for _ in range(blocks):  # tl.maximum drops a NaN; s brings it back
        top = tl.maximum(top, tl.load(m + at, mask=inside, other=0.0))
        at += rows
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    weighted = tl.zeros((ROWS,), dtype=tl.float32)
    at = first
    for _ in range(blocks):
        own = tl.load(m + at, mask=inside, other=0.0)
        factor = tl.exp(tl.where(own == -float("inf"), base, own) - base)
        total += tl.load(s + at, mask=inside, other=1.0) * factor
        weighted += tl.load(u + at, mask=inside, other=0.0) * factor
        at += rows
    value = base + tl.log(total)
    tl.store(lse + row, value, mask=inside)
    tl.store(entropy + row, value - tl.div_rn(weighted, total), mask=inside)


@triton.jit
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


@triton.jit
def _log_softmax_kernel(
    logits, lse, dy, total, out, rows, columns, BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """z − lse; backward dz = dy − exp(z − lse) Σ dy."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = row < rows
    inside = mine[:, None] & (col < columns)[None, :]
    at = row[:, None] * columns + col[None, :]
    y = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) - tl.load(lse + row, mask=mine, other=0.0)[:, None]
    if BACKWARD:
        y = tl.load(dy + at, mask=inside, other=0.0) - tl.exp(y) * tl.load(total + row, mask=mine, other=0.0)[:, None]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _row_sum_kernel(x, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Σ of a row: one tree a block, the blocks from left to right."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mine = row < rows
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        col = first + tl.arange(0, BLOCK)
        inside = mine[:, None] & (col < columns)[None, :]
        total += tl.sum(tl.load(x + row[:, None] * columns + col[None, :], mask=inside, other=0.0), 1)
    tl.store(out + row, total, mask=mine)


def _blocks(vocab: int) -> dict[str, int]:
    """Fixed for a vocabulary: blocks of BLOCK, or one of a small vocabulary and several rows a program."""
    block = min(BLOCK, triton.next_power_of_2(vocab))
    return {"ROWS": BLOCK // block, "BLOCK": block, "num_warps": WARPS, "enable_fp_fusion": False}


def _grid(rows: int, columns: int, blocks: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(rows, blocks["ROWS"]), triton.cdiv(columns, blocks["BLOCK"])


def padded(logits: torch.Tensor) -> torch.Tensor:
    """`logits`, or a copy whose rows all start at multiples of 16 bytes and of 16 elements: Triton compiles by that, and
    the layout of a sum follows. What fills a row to a multiple of 16 is read, and not used."""
    if logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0 and logits.stride(1) == 1:
        return logits
    rows, columns = logits.shape
    return logits.new_empty(rows, triton.cdiv(columns, 16) * 16)[:, :columns].copy_(logits)


class Statistics:
    """What the blocks of the vocabulary say of every row, and the merged lse, entropy and selected z."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device, targets: torch.Tensor | None, inv_temperature: float
    ):
        self.rows, self.targets, self.inv_temperature = rows, targets, inv_temperature
        self.blocks, self.shape = triton.cdiv(vocab, BLOCK), _blocks(vocab)
        make = lambda *shape: torch.empty(shape, dtype=torch.float32, device=device)
        self.parts = [make(self.blocks, rows) for _ in range(3)]
        self.selected, self.lse, self.entropy = make(rows), make(rows), make(rows)

    def add(self, logits: torch.Tensor, first: int) -> None:
        """Columns `first` and on; `first` and, but for the last, their number are multiples of BLOCK."""
        logits = padded(logits)
        _block_kernel[_grid(self.rows, logits.shape[1], self.shape)](
            logits,
            self.targets,
            *self.parts,
            self.selected,
            self.rows,
            logits.shape[1],
            logits.stride(0),
            first,
            self.inv_temperature,
            HAS_TARGETS=self.targets is not None,
            **self.shape,
        )

    def merge(self) -> "Statistics":
        _merge_kernel[(triton.cdiv(self.rows, MERGE_ROWS),)](
            *self.parts,
            self.lse,
            self.entropy,
            self.rows,
            self.blocks,
            ROWS=MERGE_ROWS,
            num_warps=1,
            enable_fp_fusion=False,
        )
        return self

    def results(self, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ignored = self.targets == ignore_index
        return (self.selected - self.lse).masked_fill_(ignored, 0.0), self.entropy.masked_fill(ignored, 0.0)


def dlogits(
    logits: torch.Tensor,
    first: int,
    vocab: int,
    targets,
    lse,
    entropy,
    d_logprob,
    d_entropy,
    inv_temperature: float,
    ignore_index: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """The gradient of columns `first` and on of a vocabulary of `vocab`; out may be logits."""
    blocks = _blocks(vocab)
    _dlogits_kernel[_grid(*logits.shape, blocks)](
        logits,
        targets,
        lse,
        entropy,
        d_logprob,
        d_entropy,
        out,
        *logits.shape,
        logits.stride(0),
        first,
        inv_temperature,
        HAS_ENTROPY=d_entropy is not None,
        IGNORE=ignore_index,
        **blocks,
    )
    return out


def _token_logprob(
    logits: torch.Tensor, targets: torch.Tensor, inv_temperature: float, ignore_index: int
) -> list[torch.Tensor]:
    """logprob, entropy and lse of every row, fp32."""
    logits = logits.contiguous()
    stats = Statistics(*logits.shape, logits.device, targets, inv_temperature)
    stats.add(logits, 0)
    return [*stats.merge().results(ignore_index), stats.lse]


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, inv_temperature, ignore_index):
        logprob, entropy, lse = _token_logprob(logits, targets, inv_temperature, ignore_index)
        ctx.constants = inv_temperature, ignore_index
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.mark_non_differentiable(lse)
        return logprob, entropy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprob, d_entropy, _):
        logits, targets, lse, entropy = ctx.saved_tensors
        logits = logits.contiguous()
        return (
            dlogits(
                logits,
                0,
                logits.shape[1],
                targets,
                lse,
                entropy,
                d_logprob.contiguous(),
                d_entropy.contiguous(),
                *ctx.constants,
                torch.empty_like(logits),
            ),
            None,
            None,
            None,
        )


def _log_softmax(
    logits: torch.Tensor, dy: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """[log_softmax, lse]; or with dy and lse [dlogits]."""
    logits = logits.contiguous()
    rows, columns = logits.shape
    blocks, total = _blocks(columns), None
    if dy is None:
        stats = Statistics(rows, columns, logits.device, None, 1.0)
        stats.add(logits, 0)
        lse = stats.merge().lse
        out = torch.empty_like(logits, dtype=torch.float32)
    else:
        dy, out = aligned(dy), torch.empty_like(logits)
        total = torch.empty_like(lse)
        _row_sum_kernel[_grid(rows, columns, blocks)[:1]](dy, total, rows, columns, **blocks)
    _log_softmax_kernel[_grid(rows, columns, blocks)](
        logits, lse, dy, total, out, rows, columns, BACKWARD=dy is not None, **blocks
    )
    return [out, lse] if dy is None else [out]


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, *_):
        y, lse = _log_softmax(logits)
        ctx.save_for_backward(logits, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        logits, lse = ctx.saved_tensors
        return _log_softmax(logits, dy, lse)[0], None, None


_opaque_token = torch.library.custom_op("bi_kernels::token_logprob", _token_logprob, mutates_args=())
_opaque_log_softmax = torch.library.custom_op("bi_kernels::log_softmax", _log_softmax, mutates_args=())


@_opaque_token.register_fake
def _(logits, targets, inv_temperature, ignore_index):
    return [logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3)]


@_opaque_log_softmax.register_fake
def _(logits, dy=None, lse=None):
    return [torch.empty_like(logits, dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.float32)]


def checked_targets(
    op: str,
    targets: torch.Tensor,
    lead: tuple[int, ...],
    vocab: int,
    temperature: float,
    ignore_index: int,
    trains: bool,
) -> float:
    """1 / temperature, once targets and temperature are known to be right. trains: a gradient is wanted."""
    check_shape(op, "targets", targets, lead, "one a token")
    if not targets.numel():
        raise ValueError(f"{op}: targets has shape {tuple(targets.shape)}, expected at least one token")
    check_ids(op, "targets", targets, vocab, check_integer(op, "ignore_index", ignore_index))
    if trains and torch.is_grad_enabled() and can_wait(targets) and bool((targets == ignore_index).all()):
        raise ValueError(
            f"{op}: targets holds nothing but ignore_index {ignore_index}, expected at least one token to train on"
        )
    if not check_number(op, "temperature", temperature) > 0:
        raise ValueError(f"{op}: temperature is {temperature}, expected a positive number")
    return 1.0 / temperature


def token_logprob(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(target), entropy) of softmax(logits / temperature), fp32: logits (..., V), targets (...); as lm_head_logprob."""
    op = "token_logprob"
    check(op, logits=logits)
    check(op, same_dtype=False, logits=logits, targets=targets)
    if logits.dim() == 0 or not logits.shape[-1]:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}, expected (..., V)")
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    inv_temperature = checked_targets(op, targets, lead, vocab, temperature, ignore_index, logits.requires_grad)
    logprob, entropy, *_ = apply(
        _token_logprob,
        _opaque_token,
        _TokenLogprob.apply,
        logits.reshape(-1, vocab),
        targets.reshape(-1).contiguous(),
        inv_temperature,
        ignore_index,
    )
    return logprob.reshape(lead), entropy.reshape(lead)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """logits − log Σ exp(logits) over the last dimension, fp32: logits (..., V)."""
    check("log_softmax", logits=logits)
    if logits.dim() == 0 or not logits.shape[-1]:
        raise ValueError(f"log_softmax: logits has shape {tuple(logits.shape)}, expected (..., V)")
    if not logits.numel():
        return logits.new_empty(logits.shape, dtype=torch.float32)
    out = apply(_log_softmax, _opaque_log_softmax, _LogSoftmax.apply, logits.reshape(-1, logits.shape[-1]))
    return (out if isinstance(out, torch.Tensor) else out[0]).reshape(logits.shape)
