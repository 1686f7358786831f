"""Log-probabilities of given logits: log-softmax, and the selected token's logprob with the entropy.

Both reduce the vocabulary in fixed blocks, folded in ascending order (see vocabulary.py).
"""

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from bi_kernels.checks import aligned, apply, can_wait, check, check_shape, widened
from bi_kernels.launch import jit
from bi_kernels.ops.embedding import check_ids
from bi_kernels.ops.vocabulary import Statistics, blocks_of, dlogits, grid_of
from bi_kernels.scalars import check_fp32, check_integer, check_number, truncated_repr


@jit(do_not_specialize=["rows"])
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


@jit(do_not_specialize=["rows"])
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
    blocks, total = blocks_of(columns), None
    if dy is None:
        stats = Statistics(rows, columns, logits.device, None, 1.0)
        stats.add(logits, 0)
        lse = stats.merge().lse
        out = torch.empty_like(logits, dtype=torch.float32)
    else:
        dy, out = aligned(dy), torch.empty_like(logits)
        total = torch.empty_like(lse)
        _row_sum_kernel[grid_of(rows, columns, blocks)[:1]](dy, total, rows, columns, **blocks)
    _log_softmax_kernel[grid_of(rows, columns, blocks)](
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
    return [logits.new_empty(logits.shape, dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.float32)]


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
    if not -(2**63) <= check_integer(op, "ignore_index", ignore_index) < 2**63:
        raise ValueError(f"{op}: ignore_index is {truncated_repr(ignore_index)}, expected an integer of 64 bits")
    check_ids(op, "targets", targets, vocab, ignore_index)
    if trains and torch.is_grad_enabled() and can_wait(targets) and bool((targets == ignore_index).all()):
        raise ValueError(
            f"{op}: targets holds nothing but ignore_index {ignore_index}, expected at least one token to train on"
        )
    if not check_number(op, "temperature", temperature) > 0:
        raise ValueError(f"{op}: temperature is {temperature}, expected a positive number")
    return check_fp32(op, "1 / temperature", 1.0 / float(temperature))


def token_logprob(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(target), entropy) of softmax(logits / temperature), fp32: logits (..., V), targets (...); as
    lm_head_logprob."""
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
        widened(targets).reshape(-1).contiguous(),
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
