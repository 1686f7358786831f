"""The LM head fused with the selected token's logprob and entropy: no (tokens, vocabulary) logits are held.

Logits are rounded to the storage dtype, and so is dlogits. Both are computed a chunk of the vocabulary at a time;
dhidden and dW go on from chunk to chunk in the order of their folds. So how many columns are kept for the backward,
and how many are computed at a time, changes no bit.
"""

import torch
import triton
from torch import Tensor

from bi_kernels.checks import check, widened
from bi_kernels.op import Op, writes
from bi_kernels.ops.gemm.gemm import product
from bi_kernels.ops.logprob import checked_targets
from bi_kernels.ops.vocabulary import BLOCK, Statistics, dlogits
from bi_kernels.scalars import check_number
from bi_kernels.tokens import consume_zero_flag, gradient_of, layout_of, training_arguments

SCRATCH = 2**28  # logits computed at a time where they are not kept


def _chunks(rows: int, vocab: int, kept: int) -> list[tuple[int, int]]:
    """(first, end) of the columns computed at a time: the kept ones, then what the scratch memory holds."""
    step = max(BLOCK, SCRATCH // max(rows, 1) // BLOCK * BLOCK)
    return [(0, kept)] * (kept > 0) + [(first, min(first + step, vocab)) for first in range(kept, vocab, step)]


def _kept_columns(hidden: Tensor, vocab: int, keep_bytes: float) -> int:
    """Returns how many columns of logits so many bytes hold: whole blocks."""
    column_bytes = len(hidden) * hidden.element_size()
    return vocab if keep_bytes >= column_bytes * vocab else int(keep_bytes) // column_bytes // BLOCK * BLOCK


def _launch(
    hidden, weight, targets, inv_temperature: float, ignore_index: int, keep_bytes: float = 0, layout=None, buffer=None
) -> list[Tensor]:
    """logprob, entropy and lse of every row, and the logits (rows, columns) that are kept for the backward; the rest
    is for that too."""
    rows, vocab = len(hidden), len(weight)
    columns = _kept_columns(hidden, vocab, keep_bytes)
    kept = _scratch(hidden, columns)[:, :columns]
    stats = Statistics(rows, vocab, hidden.device, targets, inv_temperature)
    scratch = None
    for first, end in _chunks(rows, vocab, columns):
        if end <= columns:
            logits = kept
        else:
            scratch = _scratch(hidden, end - first) if scratch is None else scratch
            logits = scratch[:, : end - first]
        product(hidden, weight[first:end], out=logits)
        stats.add(logits, first)
    return [*stats.merge().results(ignore_index), stats.lse, kept]


def _fake(hidden, weight, targets, inv_temperature, ignore_index, keep_bytes, layout, buffer):
    kept = _scratch(hidden, columns := _kept_columns(hidden, len(weight), keep_bytes))[:, :columns]
    return [*[hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3)], kept]


def _scratch(hidden: Tensor, columns: int) -> Tensor:
    return hidden.new_empty(len(hidden), triton.cdiv(columns, 16) * 16)


@writes("dhidden", "dw")
def _gradient(
    hidden,
    weight,
    targets,
    lse,
    entropy,
    kept,
    d_logprob,
    d_entropy,
    inv_temperature: float,
    ignore_index: int,
    layout,
    dhidden,
    dw,
    continues: bool,
) -> None:
    """Writes dhidden and dW, each where it is given; dW goes on from what is there if it `continues`. dlogits take the
    place of the logits in `kept`."""
    rows, vocab, columns = len(hidden), len(weight), 0 if kept is None else kept.shape[1]
    given = targets, lse, entropy, d_logprob.contiguous(), None if d_entropy is None else d_entropy.contiguous()
    layout = layout_of(layout)
    first_fold = not continues or consume_zero_flag(dw)
    folded = None if dw is None else layout.gather(hidden).t()
    scratch = total = None
    for first, end in _chunks(rows, vocab, columns):
        if end <= columns:
            logits = kept
        else:
            scratch = _scratch(hidden, end - first) if scratch is None else scratch
            logits = product(hidden, weight[first:end], out=scratch[:, : end - first])
        dz = dlogits(logits, first, vocab, *given, inv_temperature, ignore_index, logits)
        if dhidden is not None:  # the fold over the vocabulary goes on in fp32, and ends in the storage dtype
            if end == vocab:
                product(dz, weight[first:end].t(), total, dhidden, hidden.dtype)
            else:
                total = product(dz, weight[first:end].t(), total, total, torch.float32)
        if dw is not None:
            into = dw[first:end]
            product(layout.gather(dz).t(), folded, None if first_fold else into, into, dw.dtype)


def _save(ctx, inputs, outputs):
    hidden, weight, targets, *ctx.constants, _, ctx.layout, ctx.buffer = inputs
    _, entropy, lse, kept = outputs
    ctx.parameter, ctx.kept = weight, kept if kept.shape[1] else None  # see gemm._save
    ctx.save_for_backward(hidden, weight, targets, lse, entropy)
    ctx.mark_non_differentiable(lse, kept)


def _backward(ctx, d_logprob, d_entropy, *_):
    hidden, weight, targets, lse, entropy = ctx.saved_tensors
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    kept, ctx.kept = ctx.kept, None  # dlogits take their place, so a second backward computes them again
    d_logprob = torch.zeros_like(lse) if d_logprob is None else d_logprob
    dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
    dw, continues = None, False
    if needs_weight:
        dw, continues = gradient_of("lm_head_logprob", ctx.parameter, buffer=ctx.buffer)
    rest = kept, d_logprob, d_entropy, *ctx.constants, ctx.layout, dhidden, dw, continues
    _gradient(hidden, weight, targets, lse, entropy, *rest)
    return dhidden, None if continues else dw, *[None] * 6


_lm_head = Op("lm_head_logprob", _launch, _backward, _fake, _save)


def checked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
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
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    keep_bytes: float = 0,
) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy) of softmax(hidden weightᵀ / temperature), fp32, 0 where the target is ignore_index.

    hidden (..., H), weight (V, H), targets (...) integers. No (tokens, V) logits are held, but for as many columns of
    them as `keep_bytes` allows the backward, which computes the others again: the same bits either way. Raises
    ValueError for a target outside the vocabulary (NaN where nobody can tell, see `embedding`), and where a gradient is
    wanted of nothing but ignored ones.
    """
    op = "lm_head_logprob"
    inv_temperature = checked(hidden, weight, targets, None, temperature, ignore_index, keep_bytes)
    lead, rows = hidden.shape[:-1], hidden.reshape(-1, hidden.shape[-1])

    def training() -> tuple:
        kept = 0.0 if torch.compiler.is_compiling() else float(keep_bytes)  # dlogits take the place of what is kept
        return kept, *training_arguments(op, hidden, 1, weight=weight)

    targets = widened(targets).reshape(-1).contiguous()
    logprob, entropy, *_ = _lm_head(rows, weight, targets, inv_temperature, ignore_index, training=training)
    return logprob.reshape(lead), entropy.reshape(lead)
