"""Log-probabilities of given logits: log-softmax, and the selected token's logprob with the entropy.

Both reduce the vocabulary in fixed blocks, folded in ascending order (see vocabulary.py).
"""

import torch
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import aligned, can_wait, check, check_shape, widened
from bi_kernels.launch import jit
from bi_kernels.op import Op, writes
from bi_kernels.ops.embedding import check_ids
from bi_kernels.ops.rows import check_out_dtype
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
        upstream = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        y = upstream - tl.exp(y) * tl.load(total + row, mask=mine, other=0.0)[:, None]
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
        value = tl.load(x + row[:, None] * columns + col[None, :], mask=inside, other=0.0)
        total += tl.sum(value.to(tl.float32), 1)
    tl.store(out + row, total, mask=mine)


def _launch(logits, targets, inv_temperature: float, ignore_index: int) -> list[Tensor]:
    """logprob, entropy and lse of every row, fp32."""
    logits = logits.contiguous()
    stats = Statistics(*logits.shape, logits.device, targets, inv_temperature)
    stats.add(logits, 0)
    return [*stats.merge().results(ignore_index), stats.lse]


def _fake(logits, targets, inv_temperature, ignore_index):
    return [logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3)]


@writes("out")
def _gradient(
    logits, targets, lse, entropy, d_logprob, d_entropy, inv_temperature: float, ignore_index: int, out
) -> None:
    logits, d_entropy = logits.contiguous(), None if d_entropy is None else d_entropy.contiguous()
    given = targets, lse, entropy, d_logprob.contiguous(), d_entropy
    dlogits(logits, 0, logits.shape[1], *given, inv_temperature, ignore_index, out)


def _save(ctx, inputs, outputs):
    logits, targets, *ctx.constants = inputs
    _, entropy, lse = outputs
    ctx.save_for_backward(logits, targets, lse, entropy)
    ctx.mark_non_differentiable(lse)


def _backward(ctx, d_logprob, d_entropy, _):
    logits, targets, lse, entropy = ctx.saved_tensors
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    d_logprob = torch.zeros_like(lse) if d_logprob is None else d_logprob
    _gradient(logits, targets, lse, entropy, d_logprob, d_entropy, *ctx.constants, out)
    return out, None, None, None


_token_logprob = Op("token_logprob", _launch, _backward, _fake, _save)


def _launch_log_softmax(logits, dtype: torch.dtype) -> list[Tensor]:
    """log_softmax of every row in a dtype, and lse, fp32."""
    logits = logits.contiguous()
    (rows, columns), out = logits.shape, torch.empty_like(logits, dtype=dtype)
    stats, blocks = Statistics(rows, columns, logits.device, None, 1.0), blocks_of(columns)
    stats.add(logits, 0)
    lse, grid = stats.merge().lse, grid_of(rows, columns, blocks)
    _log_softmax_kernel[grid](logits, lse, None, None, out, rows, columns, BACKWARD=False, **blocks)
    return [out, lse]


def _fake_log_softmax(logits, dtype):
    return [logits.new_empty(logits.shape, dtype=dtype), logits.new_empty(len(logits), dtype=torch.float32)]


@writes("out")
def _log_softmax_gradient(logits, lse, dy, out) -> None:
    logits, dy, total = logits.contiguous(), aligned(dy), torch.empty_like(lse)
    sizes, blocks = logits.shape, blocks_of(logits.shape[1])
    grid = grid_of(*sizes, blocks)
    _row_sum_kernel[grid[:1]](dy, total, *sizes, **blocks)
    _log_softmax_kernel[grid](logits, lse, dy, total, out, *sizes, BACKWARD=True, **blocks)


def _save_log_softmax(ctx, inputs, outputs):
    ctx.save_for_backward(inputs[0], outputs[1])
    ctx.mark_non_differentiable(outputs[1])


def _backward_log_softmax(ctx, dy, _):
    logits, lse = ctx.saved_tensors
    _log_softmax_gradient(logits, lse, dy, out := torch.empty_like(logits, memory_format=torch.contiguous_format))
    return out, None


_log_softmax = Op("log_softmax_rows", _launch_log_softmax, _backward_log_softmax, _fake_log_softmax, _save_log_softmax)


def checked_targets(
    op: str, targets: Tensor, lead: tuple[int, ...], vocab: int, temperature: float, ignore_index: int, trains: bool
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
    logits: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy) of softmax(logits / temperature), fp32: logits (..., V), targets (...); as
    lm_head_logprob."""
    op = "token_logprob"
    check(op, logits=logits)
    check(op, same_dtype=False, logits=logits, targets=targets)
    if logits.dim() == 0 or not logits.shape[-1]:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}, expected (..., V)")
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    inv_temperature = checked_targets(op, targets, lead, vocab, temperature, ignore_index, logits.requires_grad)
    targets = widened(targets).reshape(-1).contiguous()
    logprob, entropy, _ = _token_logprob(logits.reshape(-1, vocab), targets, inv_temperature, ignore_index)
    return logprob.reshape(lead), entropy.reshape(lead)


def log_softmax(logits: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """logits − log Σ exp(logits) over the last dimension, in fp32, rounded once to `out_dtype`: logits (..., V)."""
    check("log_softmax", logits=logits)
    if logits.dim() == 0 or not logits.shape[-1]:
        raise ValueError(f"log_softmax: logits has shape {tuple(logits.shape)}, expected (..., V)")
    check_out_dtype("log_softmax", out_dtype)
    if not logits.numel():
        return logits.new_empty(logits.shape, dtype=out_dtype)
    return _log_softmax(logits.reshape(-1, logits.shape[-1]), out_dtype)[0].reshape(logits.shape)
