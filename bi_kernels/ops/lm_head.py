"""The LM head fused with the selected token's logprob and entropy: no (tokens, vocabulary) logits are held.

Logits are rounded to the storage dtype, and so is dlogits. Both are computed a chunk of the vocabulary at a time;
dhidden and dW go on from chunk to chunk in the order of their folds. So how many columns are kept for the backward,
and how many are computed at a time, changes no bit.
"""

import torch
import triton
from torch.autograd.function import once_differentiable

from bi_kernels.checks import apply, check, widened
from bi_kernels.ops.gemm.gemm import product
from bi_kernels.ops.logprob import checked_targets
from bi_kernels.ops.vocabulary import BLOCK, Statistics, dlogits
from bi_kernels.scalars import check_number
from bi_kernels.tokens import consume_zero_flag, layout_for, main_grad

SCRATCH = 2**28  # logits computed at a time where they are not kept


def _chunks(rows: int, vocab: int, kept: int) -> list[tuple[int, int]]:
    """(first, end) of the columns computed at a time: the kept ones, then what the scratch memory holds."""
    step = max(BLOCK, SCRATCH // max(rows, 1) // BLOCK * BLOCK)
    return [(0, kept)] * (kept > 0) + [(first, min(first + step, vocab)) for first in range(kept, vocab, step)]


def _lm_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    inv_temperature: float,
    ignore_index: int,
    kept: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """logprob, entropy and lse of every row; the logits of the first columns stay in `kept` (rows, columns)."""
    rows, vocab = len(hidden), len(weight)
    stats = Statistics(rows, vocab, hidden.device, targets, inv_temperature)
    scratch = None
    for first, end in _chunks(rows, vocab, 0 if kept is None else kept.shape[1]):
        if kept is not None and end <= kept.shape[1]:
            logits = kept
        else:
            if scratch is None:
                scratch = _scratch(hidden, end - first)
            logits = scratch[:, : end - first]
        product(hidden, weight[first:end], out=logits)
        stats.add(logits, first)
    return [*stats.merge().results(ignore_index), stats.lse]


def _scratch(hidden: torch.Tensor, columns: int) -> torch.Tensor:
    return hidden.new_empty(len(hidden), triton.cdiv(columns, 16) * 16)


class _LMHeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layout, keep_bytes, hidden, weight, targets, inv_temperature, ignore_index):
        ctx.set_materialize_grads(False)
        if weight.requires_grad:
            main_grad("lm_head_logprob", weight)
        column_bytes = len(hidden) * hidden.element_size()
        columns = (
            len(weight)
            if keep_bytes >= column_bytes * len(weight)
            else int(keep_bytes) // column_bytes // BLOCK * BLOCK
        )
        ctx.kept = _scratch(hidden, columns)[:, :columns] if columns else None
        logprob, entropy, lse = _lm_head(hidden, weight, targets, inv_temperature, ignore_index, ctx.kept)
        ctx.layout, ctx.columns, ctx.constants = layout, columns, (inv_temperature, ignore_index)
        ctx.parameter = weight  # see gemm._Linear
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprob, d_entropy):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        if d_logprob is None:
            d_logprob = torch.zeros_like(lse)
        d_entropy = None if d_entropy is None else d_entropy.contiguous()
        needs_hidden, needs_weight = ctx.needs_input_grad[2:4]
        kept, ctx.kept = ctx.kept, None  # dlogits take their place, so a second backward computes them again
        buffer = main_grad("lm_head_logprob", ctx.parameter) if needs_weight else None
        dw = torch.empty_like(weight) if needs_weight and buffer is None else None
        first_fold = buffer is not None and consume_zero_flag(buffer)
        folded = ctx.layout.gather(hidden).t() if needs_weight else None
        scratch = dhidden = None
        for first, end in _chunks(len(hidden), len(weight), 0 if kept is None else ctx.columns):
            if kept is not None and end <= ctx.columns:
                logits = kept
            else:
                if scratch is None:
                    scratch = _scratch(hidden, end - first)
                logits = product(hidden, weight[first:end], out=scratch[:, : end - first])
            dz = dlogits(
                logits,
                first,
                len(weight),
                targets,
                lse,
                entropy,
                d_logprob.contiguous(),
                d_entropy,
                *ctx.constants,
                logits,
            )
            if needs_hidden:  # the fold over the vocabulary goes on in fp32, and ends in the storage dtype
                last = end == len(weight)
                if dhidden is None and not last:
                    dhidden = torch.zeros_like(hidden, dtype=torch.float32, memory_format=torch.contiguous_format)
                    product(dz, weight[first:end].t(), out=dhidden, out_dtype=torch.float32)
                else:
                    dhidden = product(
                        dz,
                        weight[first:end].t(),
                        dhidden,
                        None if last else dhidden,
                        hidden.dtype if last else torch.float32,
                    )
            if buffer is not None:
                into = buffer[first:end]
                product(ctx.layout.gather(dz).t(), folded, None if first_fold else into, into, torch.float32)
            elif needs_weight:
                product(ctx.layout.gather(dz).t(), folded, out=dw[first:end])
        return None, None, dhidden, dw, None, None, None


def _lm_head_unkept(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, inv_temperature: float, ignore_index: int
) -> list[torch.Tensor]:
    return _lm_head(hidden, weight, targets, inv_temperature, ignore_index)


_opaque = torch.library.custom_op("bi_kernels::lm_head_logprob", _lm_head_unkept, mutates_args=())


@_opaque.register_fake
def _(hidden, weight, targets, inv_temperature, ignore_index):
    return [hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3)]


def checked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab: int | None,
    temperature: float,
    ignore_index: int,
    keep_bytes: float,
) -> float:
    """Returns 1 / temperature, once the arguments are known to be right. vocab: None where weight has all its rows."""
    op = "lm_head_logprob"
    check(op, hidden=hidden, weight=weight)
    check(op, same_dtype=False, hidden=hidden, targets=targets)
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}, expected (..., H) "
            "and (V, H)"
        )
    trains = hidden.requires_grad or weight.requires_grad
    if not check_number(op, "keep_bytes", keep_bytes) >= 0:
        raise ValueError(f"{op}: keep_bytes is {keep_bytes}, expected at least 0")
    vocab = len(weight) if vocab is None else vocab
    return checked_targets(op, targets, hidden.shape[:-1], vocab, temperature, ignore_index, trains)


def lm_head_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    keep_bytes: float = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(target), entropy) of softmax(hidden weightᵀ / temperature), fp32, 0 where the target is ignore_index.

    hidden (..., H), weight (V, H), targets (...) integers. No (tokens, V) logits are held, but for as many columns of
    them as `keep_bytes` allows the backward, which computes the others again: the same bits either way. Raises
    ValueError for a target outside the vocabulary (NaN where nobody can tell, see `embedding`), and where a gradient is
    wanted of nothing but ignored ones.
    """
    op = "lm_head_logprob"
    inv_temperature = checked(hidden, weight, targets, None, temperature, ignore_index, keep_bytes)
    lead = hidden.shape[:-1]
    differentiable = lambda *args: _LMHeadLogprob.apply(layout_for(op, lead, weight.requires_grad), keep_bytes, *args)
    logprob, entropy, *_ = apply(
        _lm_head,
        _opaque,
        differentiable,
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        widened(targets).reshape(-1).contiguous(),
        inv_temperature,
        ignore_index,
    )
    return logprob.reshape(lead), entropy.reshape(lead)
