"""Attention as an op, prefill, chunks and decode alike, and its gradient."""

import warnings

import torch
from torch import Tensor

from bi_kernels.checks import mark_validated, needs_validation
from bi_kernels.op import Op
from bi_kernels.ops.attention.arguments import Arguments, arguments
from bi_kernels.ops.attention.backward import attention_backward
from bi_kernels.ops.attention.forward import attention_forward, rows
from bi_kernels.ops.attention.padded import materialize_offsets
from bi_kernels.ops.attention.schedule import SCHEDULE, Schedule, Sequences, current_schedule, using
from bi_kernels.tokens import TokenLayout, current_layout, inferred_any


def _launch(
    q,
    k,
    v,
    first_q,
    length_q,
    first_k,
    length_k,
    pages,
    page: int,
    longest: int,
    full_q: bool,
    full_k: bool,
    causal: bool,
    scale: float,
    window: int,
) -> list[Tensor]:
    sequences = Sequences(first_q, length_q, first_k, length_k, pages, page, longest, full_q, full_k)
    return attention_forward(q, k, v, sequences, causal, scale, window)


def _fake(q, *_):
    return [torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)]


def _save(ctx, inputs, outputs):
    q, k, v, *where = inputs[:7]
    ctx.full, ctx.constants, ctx.schedule = inputs[10:12], inputs[12:], current_schedule()
    ctx.save_for_backward(q, k, v, *outputs, *where)


def _backward(ctx, d_out, d_lse):
    q, k, v, out, lse, *where = ctx.saved_tensors
    (needs_q, needs_k, needs_v), (full_q, full_k) = ctx.needs_input_grad[:3], ctx.full
    needs = (q, needs_q, full_q), (k, needs_k or needs_v, full_k), (v, needs_k or needs_v, full_k)
    new = lambda full: torch.empty_like if full else torch.zeros_like
    grads = [new(full)(t, memory_format=torch.contiguous_format) if needed else None for t, needed, full in needs]
    d_out = torch.zeros_like(out) if d_out is None else d_out
    with using(ctx.schedule):
        attention_backward(d_out, d_lse, q, k, v, out, lse, where, *ctx.constants, *grads)
    return *grads, *[None] * 12


def _flat(q, k, v, sequences: Sequences, *constants) -> tuple:
    """Returns the arguments of `_launch`."""
    return rows(q), rows(k), rows(v), *materialize_offsets(sequences, q.device)[:-1], *constants


_attention = Op("attention", _launch, _backward, _fake, _save, direct=attention_forward, flat=_flat)


def attend(call: Arguments, schedule: Schedule = SCHEDULE) -> tuple[Tensor, Tensor]:
    """Returns what `attention` does, computed in a schedule; under torch.compile in the default one."""
    if schedule is SCHEDULE:
        out, lse = _attention(*call[:7])
    else:
        with using(schedule):
            out, lse = _attention(*call[:7])
    return (out, lse) if out.shape == call.shape else (out.view(call.shape), lse.view(call.shape[:-1]))


def _warn_of_layout(q: Tensor, cu_seqlens_q: Tensor | None, lengths_q: Tensor | None, left_padded: bool) -> None:
    """Warns where a forward that trains is given other sequences than the token layout that is entered, or where none
    is and other ops fold parameters' gradients by the shapes that they see."""
    layout, width = current_layout("attention"), q.shape[1]
    name, value, how = "lengths_q", lengths_q, (width, left_padded)
    if lengths_q is None:
        name, value, how = "cu_seqlens_q", cu_seqlens_q, ()
    if layout is None and inferred_any.get():
        warnings.warn(
            f"attention: {len(value) - (lengths_q is None)} packed or padded sequences, but no token layout is "
            "entered, so parameters' gradients depend on the batch; expected the forward inside "
            "`with TokenLayout.packed(...)` or `.padded(...)`",
            stacklevel=3,
        )
    if not isinstance(layout, TokenLayout) or not needs_validation(question := ("layout", layout, *how), value):
        return
    numbers = value.tolist()
    if lengths_q is None:
        spans = [(start, end - start) for start, end in zip(numbers, numbers[1:])]
    else:
        spans = [(i * width + (width - n if left_padded else 0), n) for i, n in enumerate(numbers)]
    spans = [span for span in spans if span[1]]
    if spans != layout.spans:
        lengths = [[length for _, length in of][:8] for of in (spans, layout.spans)]
        found = "in other places" if lengths[0] == lengths[1] else f"of lengths {lengths[1]}"
        warnings.warn(
            f"attention: {name} holds sequences of lengths {lengths[0]}, but the token layout has sequences {found}, "
            "by which parameters' gradients are added; expected the layout of this very call",
            stacklevel=3,
        )
    mark_validated(question, value)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths_q: Tensor | None = None,
    lengths_k: Tensor | None = None,
    left_padded: bool = False,
    block_table: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns softmax(q kᵀ · scale) v and its LSE: (out like q, lse (…, query heads) fp32, natural logarithm).

    Packed: q (tokens, query heads, D) with cu_seqlens_q (sequences + 1,), k and v (rows, key heads, D) with
    cu_seqlens_k, the same unless given; cu_seqlens stands for both. A batch: q (B, L, query heads, D), k and v (B,
    capacity, key heads, D), of which lengths_q and lengths_k (B,) count, at the start of each row or, left_padded, at
    its end; so with a cache in k and v, its new keys included. Paged: k and v (pages, page size, key heads, D) and
    block_table (B, pages of the longest) integers; needs lengths_k; has no backward. Query heads are a multiple of key
    heads (GQA); D is at most 256; scale is D ** -0.5 unless given.

    causal: the last query sees all keys, each one before it one less. window: a query sees itself and the window − 1
    keys before it. A query that sees no key gives 0 and −inf, and so does padding. Bits are promised for finite v: a
    NaN or Inf in it may reach queries of its own sequence that do not see it. Raises ValueError and TypeError with one
    sentence.
    """
    if cu_seqlens is not None:
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise ValueError(
                "attention: cu_seqlens is given with cu_seqlens_q or cu_seqlens_k, expected it alone, for both"
            )
        cu_seqlens_q = cu_seqlens
    where = cu_seqlens_q, cu_seqlens_k, lengths_q, lengths_k, left_padded, block_table
    call = arguments(q, k, v, *where, causal, scale, window)
    told = cu_seqlens_q is not None and len(cu_seqlens_q) > 2 or lengths_q is not None
    if told and not torch.compiler.is_compiling() and torch.is_grad_enabled() and q.requires_grad:
        _warn_of_layout(q, cu_seqlens_q, lengths_q, left_padded)
    return attend(call)
