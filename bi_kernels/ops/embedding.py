"""Embedding: rows of a table. Forward copies; the gradient of a row is a left fold over the tokens that hold its id, in
the order of the token layout, one token at a time in fp32, on from `main_grad` where the table has one.

A weight that is also the LM head's has a second buffer for this path, `embedding_main_grad` (see bi_kernels.grads): two
folds that were interleaved would depend on the micro-batch split.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import check, integers, mark_validated, needs_validation, once, widened
from bi_kernels.launch import Launch, cached, jit
from bi_kernels.op import Op, writes
from bi_kernels.ops.fold import add_rows
from bi_kernels.scalars import check_integer, truncated_repr
from bi_kernels.tokens import gradient_of, layout_of, training_arguments

ELEMENTS, WARPS = 2048, 4  # that one program copies
MANY = 256
FEW = 4096  # ids that are copied to the host to be checked
LIGHT = {"BLOCK": 2048, "TOKENS": 4, "STAGES": 1, "num_warps": 4}
HEAVY = {"BLOCK": 32, "TOKENS": 64, "STAGES": 6, "num_warps": 1}


@jit(do_not_specialize=["tokens"])
def _embedding_kernel(ids, weight, y, tokens, vocab, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(ids + token, mask=token < tokens, other=0).to(tl.int64)
    known = (index >= 0) & (index < vocab)  # elsewhere NaN, not a stranger's row
    inside = (token < tokens)[:, None] & (col < width)[None, :]
    row = tl.load(weight + index[:, None] * width + col[None, :], mask=inside & known[:, None], other=float("nan"))
    tl.store(y + token[:, None] * width + col[None, :], row, mask=inside)


@jit
def _embedding_backward_kernel(
    dy,
    rows,
    ends,
    ids,
    out,
    vocab,
    width,
    padding_id,
    HEAVY: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    CONTINUES: tl.constexpr,
):
    """The tokens' rows of dy, sorted by id, and the last of the same id: one program folds all of an id's.

    An id of at least 2 · MANY tokens has a launch of its own (HEAVY), with narrower blocks and more loads in flight.
    Its run holds a multiple of MANY, and the first of those is its program's.
    """
    blocks = tl.cdiv(width, BLOCK)
    at = tl.program_id(0) // blocks * (MANY if HEAVY else 1)
    index = tl.load(ids + at)
    before = tl.load(ids + at - (MANY if HEAVY else 1), mask=at > 0, other=-2)
    line = tl.load(rows + at).to(tl.int64)
    end = tl.load(ends + at)
    first = at
    if HEAVY:
        near = at - MANY + tl.arange(0, MANY)
        first -= tl.sum((tl.load(ids + near, mask=near >= 0, other=-2) == index).to(tl.int32), 0)
    mine = (before != index) & ((end - first >= 2 * MANY) == HEAVY)
    if mine & (index >= 0) & (index < vocab) & (index != padding_id):
        col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = (col < width) | EVEN
        place = index.to(tl.int64) * width + col
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        if CONTINUES:
            total = tl.load(out + place, mask=inside, other=0.0)
        if HEAVY:
            for token in tl.range(first, end, TOKENS, num_stages=STAGES):
                some = token + tl.arange(0, TOKENS)
                row = tl.load(rows + some, mask=some < end, other=0).to(tl.int64)
                values = tl.load(
                    dy + row[:, None] * width + col[None, :], mask=(some < end)[:, None] & inside[None, :], other=0.0
                )
                total = add_rows(total, tl.trans(values), BLOCK, TOKENS)
        else:
            total += tl.load(dy + line * width + col, mask=inside, other=0.0).to(tl.float32)
            for token in tl.range(first + 1, end, TOKENS):
                for i in tl.static_range(TOKENS):  # the loads are all on their way before the first is added
                    line = tl.load(rows + token + i, mask=token + i < end, other=0).to(tl.int64)
                    value = tl.load(dy + line * width + col, mask=inside & (token + i < end), other=0.0)
                    total += value.to(tl.float32)
        tl.store(out + place, (total + 0.0).to(out.dtype.element_ty), mask=inside)


@cached
def _launch_for(tokens: int, vocab: int, width: int, device: int) -> Launch:
    block = min(ELEMENTS, triton.next_power_of_2(width))
    rows = ELEMENTS // block
    grid = triton.cdiv(tokens, rows), triton.cdiv(width, block)
    return Launch(_embedding_kernel, device, grid, tokens, vocab, width, ROWS=rows, BLOCK=block, num_warps=WARPS)


def look_up(ids, weight, padding_id: int | None = None, layout=None, buffer=None) -> Tensor:
    """padding_id and what follows are for the backward."""
    ids, weight = ids.contiguous(), weight.contiguous()
    vocab, width = weight.shape
    y = weight.new_empty(*ids.shape, width)
    if y.numel():
        _launch_for(ids.numel(), vocab, width, weight.get_device())(ids, weight, y)
    return y


def _fake(ids, weight, padding_id, layout, buffer):
    return weight.new_empty(*ids.shape, weight.shape[1])


@writes("out")
def fold_rows(dy, ids, layout, padding_id: int | None, out, continues: bool) -> None:
    """out (vocab, hidden) = Σ dy of the tokens that hold an id, in the layout's order, on from what is there if it
    `continues`."""
    layout, dy, width = layout_of(layout), dy.contiguous(), dy.shape[-1]
    ids = ids.reshape(-1)
    if not layout.identity:
        rows = layout.rows_on(ids.device)
        ids = ids[rows]
    ids = ids.long().clamp(-1, len(out))  # in a captured graph nobody has checked them
    ids, order = torch.sort(ids.to(torch.int32) if len(out) < 2**31 else ids, stable=True)
    rows = order if layout.identity else rows[order]
    ends = torch.searchsorted(ids, ids, right=True, out_int32=True)
    if not continues:
        out.zero_()
    for heavy, blocks in ((False, LIGHT), (True, HEAVY)):
        programs = triton.cdiv(len(ids), MANY) if heavy else len(ids)
        block = min(blocks["BLOCK"], triton.next_power_of_2(width))
        if programs and width:
            grid = (programs * triton.cdiv(width, block),)
            padding = -1 if padding_id is None else padding_id
            _embedding_backward_kernel[grid](
                dy,
                rows,
                ends,
                ids,
                out,
                len(out),
                width,
                padding,
                HEAVY=heavy,
                MANY=MANY,
                EVEN=width % block == 0,
                CONTINUES=continues,
                **{**blocks, "BLOCK": block},
            )


def _save(ctx, inputs, y):
    ids, ctx.parameter, ctx.padding_id, ctx.layout, ctx.buffer = inputs
    ctx.save_for_backward(ids)


def _backward(ctx, dy):
    dw, continues = gradient_of("embedding", ctx.parameter, buffer=ctx.buffer)
    fold_rows(dy, *ctx.saved_tensors, ctx.layout, ctx.padding_id, dw, continues)
    return None, None if continues else dw, None, None, None


_embedding = Op("embedding", look_up, _backward, _fake, _save)


def check_ids(op: str, name: str, ids: Tensor, largest: int, allowed: int | None = None) -> None:
    """Integers from 0 to `largest` − 1, or `allowed`; waits for the device, for the same ids once."""
    if not integers(ids):
        raise TypeError(f"{op}: {name} has dtype {ids.dtype}, expected integers")
    question = "ids", largest, allowed
    if not ids.numel() or not needs_validation(question, ids):
        return
    wide = widened(ids).cpu() if ids.numel() <= FEW else widened(ids)  # a copy takes less time than what follows
    wrong = (wide < 0) | (wide >= largest)
    if allowed is not None:
        wrong &= wide != allowed
    if bool(wrong.any()):
        at = int(wrong.flatten().to(torch.uint8).argmax())
        raise ValueError(
            f"{op}: {name} holds {int(wide.flatten()[at])} at flat index {at}, expected 0 to {largest - 1}"
            + (f" or {allowed}" if allowed is not None else "")
        )
    mark_validated(question, ids)


@once
def _checked(ids: Tensor, weight: Tensor, padding_id: int | None, vocab: int | None = None) -> None:
    """vocab: None where weight has all its rows."""
    check("embedding", weight=weight)
    check("embedding", same_dtype=False, ids=ids, weight=weight)
    if weight.dim() != 2:
        raise ValueError(f"embedding: weight has shape {tuple(weight.shape)}, expected two dimensions (vocab, hidden)")
    vocab = weight.shape[0] if vocab is None else vocab
    allowed = f"None or 0 to {vocab - 1}"
    if padding_id is not None and not 0 <= check_integer("embedding", "padding_id", padding_id, allowed) < vocab:
        raise ValueError(f"embedding: padding_id is {truncated_repr(padding_id)}, expected {allowed}")


def embedding(ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
    """weight[ids]: ids (...) integers, weight (vocab, hidden); (..., hidden), copied bit for bit.

    The row `padding_id` gets no gradient. Raises ValueError for an id outside the table; where nobody can tell, as
    in a captured CUDA graph or after a write that PyTorch does not see (`.data`), such a token gets NaN.
    """
    _checked(ids, weight, padding_id)
    check_ids("embedding", "ids", ids, weight.shape[0])
    training = lambda: (padding_id, *training_arguments("embedding", ids, 0, weight=weight))
    return _embedding(widened(ids), weight, training=training)
