"""Attention as an op, prefill, chunks and decode alike, and its gradient."""

import warnings

import torch
from torch import Tensor

from bi_kernels.checks import mark_validated, needs_validation
from bi_kernels.op import Op
from bi_kernels.ops.attention.arguments import Arguments, arguments
from bi_kernels.ops.attention.backward import attention_backward, sinks_gradient
from bi_kernels.ops.attention.forward import attention_forward, rows
from bi_kernels.ops.attention.padded import materialize_offsets
from bi_kernels.ops.attention.schedule import SCHEDULE, Schedule, Sequences, current_schedule, using
from bi_kernels.tokens import TokenLayout, current_layout, gradient_of, inferred_any, training_arguments


def _launch(
    q,
    k,
    v,
    sinks,
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
    soft_cap: float,
    chunk: int,
    layout=None,
    buffer=None,
) -> list[Tensor]:
    sequences = Sequences(first_q, length_q, first_k, length_k, pages, page, longest, full_q, full_k)
    return attention_forward(q, k, v, sequences, causal, scale, window, sinks, soft_cap, chunk)


def _fake(q, k, v, *_):
    return [q.new_empty((*q.shape[:2], v.shape[-1])), q.new_empty(q.shape[:2], dtype=torch.float32)]


def _save(ctx, inputs, outputs):
    q, k, v, sinks, *where = inputs[:8]
    ctx.full, ctx.constants, ctx.schedule = inputs[11:13], inputs[13:18], current_schedule()
    ctx.layout, ctx.buffer = inputs[18:]
    ctx.parameter = sinks  # see _Linear
    ctx.save_for_backward(q, k, v, sinks, *outputs, *where)


def _backward(ctx, d_out, d_lse):
    q, k, v, sinks, out, lse, *where = ctx.saved_tensors
    (needs_q, needs_k, needs_v), (full_q, full_k) = ctx.needs_input_grad[:3], ctx.full
    needs = (q, needs_q, full_q), (k, needs_k or needs_v, full_k), (v, needs_k or needs_v, full_k)
    new = lambda full: torch.empty_like if full else torch.zeros_like
    grads = [new(full)(t, memory_format=torch.contiguous_format) if needed else None for t, needed, full in needs]
    d_out = torch.zeros_like(out) if d_out is None else d_out
    trains, d_sinks = ctx.needs_input_grad[3], None
    delta = torch.empty_like(lse) if trains else None
    *constants, soft_cap, chunk = ctx.constants
    with using(ctx.schedule):
        attention_backward(d_out, d_lse, q, k, v, out, lse, where, *constants, *grads, delta, soft_cap, chunk)
    if trains:
        d_sinks, continues = gradient_of("attention", ctx.parameter, "sinks", ctx.buffer)
        sinks_gradient(lse, delta, sinks, ctx.layout, d_sinks, continues)
        d_sinks = None if continues else d_sinks
    return *grads, d_sinks, *[None] * 16


def _flat(q, k, v, sequences: Sequences, causal, scale, window, sinks, *constants) -> tuple:
    """Returns the arguments of `_launch`."""
    where = materialize_offsets(sequences, q.device)[:-1]
    return rows(q), rows(k), rows(v), sinks, *where, causal, scale, window, *constants


_attention = Op("attention", _launch, _backward, _fake, _save, direct=attention_forward, flat=_flat)


def attend(call: Arguments, schedule: Schedule = SCHEDULE) -> tuple[Tensor, Tensor]:
    """Returns what `attention` does, computed in a schedule; under torch.compile in the default one."""
    given, sinks, lead = (*call[:7], *call[8:]), call.sinks, call.shape[:-1]
    training = lambda: (None, None)
    if sinks is not None:
        training = lambda: training_arguments("attention", call.q, 2, sinks=sinks)
    if schedule is SCHEDULE:
        out, lse = _attention(*given, training=training)
    else:
        with using(schedule):
            out, lse = _attention(*given, training=training)
    return (out, lse) if lse.shape == lead else (out.view(*lead, out.shape[-1]), lse.view(lead))


def _warn_of_layout(
    q: Tensor, cu_seqlens_q: Tensor | None, lengths_q: Tensor | None, left_padded: bool, folds: bool
) -> None:
    """Warns where a forward that trains is given other sequences than the token layout that is entered, or where none
    is and it, or another op, `folds` parameters' gradients by the shapes that they see."""
    layout, width = current_layout("attention"), q.shape[1]
    name, value, how = "lengths_q", lengths_q, (width, left_padded)
    if lengths_q is None:
        name, value, how = "cu_seqlens_q", cu_seqlens_q, ()
    if layout is None and (folds or inferred_any.get()):
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
    sinks: Tensor | None = None,
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
    chunk: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns softmax(q kᵀ · scale) v and its LSE: (out like q, lse (…, query heads) fp32, natural logarithm).

    Packed: q (tokens, query heads, D) with cu_seqlens_q (sequences + 1,), k and v (rows, key heads, D) with
    cu_seqlens_k, the same unless given; cu_seqlens stands for both. A batch: q (B, L, query heads, D), k and v (B,
    capacity, key heads, D), of which lengths_q and lengths_k (B,) count, at the start of each row or, left_padded, at
    its end; so with a cache in k and v, its new keys included. Paged: k and v (pages, page size, key heads, D) and
    block_table (B, pages of the longest) integers; needs lengths_k; has no backward. Query heads are a multiple of key
    heads (GQA); D is at most 256, and so is v's width, which out has; scale is D ** -0.5 unless given.

    soft_cap: scores are soft_cap · tanh(q kᵀ · scale / soft_cap), as in Gemma 2. sinks: one logit for each query head
    that joins the maximum and the sum, and has no value, as in gpt-oss; (query heads,) of q's dtype or fp32. Its
    gradient is folded over the tokens of the layout and goes on in `sinks.main_grad`. Neither has any part in a query
    that sees no key.

    causal: the last query sees all keys, each one before it one less. window: a query sees itself and the window − 1
    keys before it. chunk: a query sees keys of its own chunk of so many alone, counted from the sequence's first, as in
    Llama 4. A query that sees no key gives 0 and −inf, and so does padding. Bits are promised for finite v: a
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
    call = arguments(q, k, v, *where, causal, scale, window, sinks, chunk, soft_cap)
    told = cu_seqlens_q is not None and len(cu_seqlens_q) > 2 or lengths_q is not None
    if told and not torch.compiler.is_compiling() and torch.is_grad_enabled() and q.requires_grad:
        _warn_of_layout(q, cu_seqlens_q, lengths_q, left_padded, sinks is not None and sinks.requires_grad)
    return attend(call)
