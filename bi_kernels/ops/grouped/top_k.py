"""The largest scores of each row in a total order: value descending, then expert id ascending.

Nothing is rounded, and a row's choice depends on that row alone, planted ties and NaN included. Routers are made of it
and of ops that treat each row alone: softmax or sigmoid before it, a bias that corrects the scores it compares, groups
whose scores it compares first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import check, once
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.op import Op, writes
from bi_kernels.scalars import check_integer, truncated_repr

OP = "top_k"
ELEMENTS, WARPS = 1024, 4  # scores that one program compares
MOST = 4096  # scores of a row


@jit(do_not_specialize=["rows"])
def _top_k_kernel(scores, values, ids, rows, experts, CHOICES: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, EXPERTS)[None, :]
    mine = row < rows
    left = mine[:, None] & (col < experts)
    score = tl.load(scores + row[:, None] * experts + col, mask=left, other=0.0).to(tl.float32)
    score = tl.where(score != score, float("inf"), score)  # NaN is as large as infinity
    for choice in range(CHOICES):
        best = tl.max(tl.where(left, score, float("-inf")), 1)
        at = tl.min(tl.where(left & (score == best[:, None]), col, EXPERTS), 1)
        left = left & (col != at[:, None])
        tl.store(ids + row * CHOICES + choice, at.to(tl.int64), mask=mine)
        value = tl.load(scores + row * experts + at, mask=mine, other=0.0)
        tl.store(values + row * CHOICES + choice, value, mask=mine)


@jit(do_not_specialize=["rows"])
def _top_k_backward_kernel(
    dvalues, ids, dscores, rows, experts, CHOICES: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, EXPERTS)[None, :]
    mine = row < rows
    found = tl.zeros((ROWS, EXPERTS), dtype=dscores.dtype.element_ty)
    for choice in range(CHOICES):
        at = tl.load(ids + row * CHOICES + choice, mask=mine, other=-1)
        given = tl.load(dvalues + row * CHOICES + choice, mask=mine, other=0.0)
        found = tl.where(col == at[:, None], given[:, None], found)
    tl.store(dscores + row[:, None] * experts + col, found, mask=mine[:, None] & (col < experts))


@cached
def _launch_for(kernel: object, rows: int, experts: int, k: int, device: int) -> Launch:
    room = triton.next_power_of_2(experts)
    several = max(1, ELEMENTS // room)
    options = {"CHOICES": k, "ROWS": several, "EXPERTS": room, "num_warps": WARPS}
    return Launch(kernel, device, (triton.cdiv(rows, several),), rows, experts, **options)


def _run(kernel: object, scores: Tensor, ids: Tensor, *given: Tensor) -> None:
    """Launches one of the kernels; scores (rows, experts), ids (rows, k)."""
    if ids.numel():
        _launch_for(kernel, *scores.shape, ids.shape[1], ids.get_device())(*given)


def _launch(scores, k: int) -> list[Tensor]:
    scores = scores.contiguous()
    values, ids = scores.new_empty(len(scores), k), scores.new_empty(len(scores), k, dtype=torch.int64)
    _run(_top_k_kernel, scores, ids, scores, values, ids)
    return [values, ids]


def _fake(scores, k):
    return [scores.new_empty(len(scores), k), scores.new_empty(len(scores), k, dtype=torch.int64)]


@writes("dscores")
def _gradient(dvalues, ids, dscores) -> None:
    dvalues = dvalues.contiguous()
    _run(_top_k_backward_kernel, dscores, ids, dvalues, ids, dscores)


def _save(ctx, inputs, outputs):
    ctx.experts = inputs[0].shape[1]
    ctx.save_for_backward(outputs[1])


def _backward(ctx, dvalues, dids):
    (ids,) = ctx.saved_tensors
    dscores = dvalues.new_empty(len(ids), ctx.experts)
    _gradient(dvalues, ids, dscores)
    return dscores, None


_top_k = Op(OP, _launch, _backward, _fake, _save)


@once
def _check(scores: Tensor, k: int) -> None:
    check(OP, scores=scores)
    experts = scores.shape[-1] if scores.dim() else 0
    if not 1 <= experts <= MOST:
        raise ValueError(f"{OP}: scores has shape {tuple(scores.shape)}, expected (..., experts), 1 to {MOST} experts")
    if not 1 <= check_integer(OP, "k", k) <= experts:
        raise ValueError(f"{OP}: k is {truncated_repr(k)}, expected 1 to {experts}, the number of experts")


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of scores (..., experts): values (..., k) in the dtype of scores, and their ids, int64.

    Sorted by value, descending, and by id where values are equal, ascending; −0 equals +0, and NaN infinity. The
    gradient of a value goes to its score. bf16, fp16 or fp32. Raises ValueError for k beyond the number of experts.
    """
    _check(scores, k)
    lead = scores.shape[:-1]
    values, ids = _top_k(scores.reshape(lead.numel(), scores.shape[-1]), k)
    return values.view(*lead, k), ids.view(*lead, k)
