"""Attention as an op: what a call's sequences are, prefill, chunks and decode alike, and its gradient."""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from bi_kernels.checks import aligned, apply, can_wait, check, check_integer, check_number, integers, seen, unseen
from bi_kernels.ops.attention.backward import attention_backward
from bi_kernels.ops.attention.forward import attention_forward
from bi_kernels.ops.attention.padded import padded_spans
from bi_kernels.ops.attention.schedule import SCHEDULE, Schedule, Sequences
from bi_kernels.tokens import remind

WIDEST = 2**30  # keys; a wider window is none
MOST_HEADS = 128  # that models have; more of them are tokens, most likely


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sequences, causal, scale, window, schedule):
        out, lse = attention_forward(q, k, v, sequences, causal, scale, window, schedule)
        ctx.rest, ctx.constants, ctx.schedule = sequences[4:], (causal, scale, window), schedule
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *sequences[:4])
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse, *where = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else aligned(d_out)
        d_lse = None if d_lse is None else d_lse.contiguous()
        needs_q, needs_k, needs_v = ctx.needs_input_grad[:3]
        sequences, needed = Sequences(*where, *ctx.rest), (needs_q, needs_k or needs_v)
        grads = attention_backward(d_out, d_lse, q, k, v, out, lse, sequences, *ctx.constants, *needed, ctx.schedule)
        return *grads, *[None] * 5


@torch.library.custom_op("bi_kernels::attention", mutates_args=())
def _opaque(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_q: Tensor,
    length_q: Tensor,
    first_k: Tensor,
    length_k: Tensor,
    pages: Tensor | None,
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


@_opaque.register_fake
def _(q, k, v, *_):
    return [torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)]


def _compiled(q, k, v, sequences, causal, scale, window, schedule):
    """Calls the custom op, whose schema knows no tuples of tensors and numbers, and so the default schedule alone."""
    return _opaque(q, k, v, *sequences, causal, scale, window)


def _rows(t: Tensor) -> Tensor:
    """Returns (…, heads, D) as (rows, heads, D) of which D is contiguous; a copy where rows have no one stride."""
    t = t if t.stride(-1) == 1 else t.contiguous()
    return t.reshape(t.shape[:-2].numel(), *t.shape[-2:])


def _ends(op: str, name: str, cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Returns (first rows, lengths) of packed sequences."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not integers(cu_seqlens):
        raise ValueError(
            f"{op}: {name} has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, expected "
            "(sequences + 1,) integers"
        )
    if unseen(("ends", rows), cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != rows or ends != sorted(ends):
            raise ValueError(
                f"{op}: {name} is {ends}, expected it to start at 0, never decrease, and end at {rows}, "
                "the number of rows"
            )
        seen(("ends", rows), cu_seqlens)
    ends = cu_seqlens.to(torch.int32).clamp(0, rows).cummax(0).values.to(torch.int32)
    if can_wait(cu_seqlens):  # every row is somebody's, whatever was written behind the check
        ends = pad(pad(ends[1:-1], (1, 0)), (0, 1), value=rows)
    return ends[:-1].contiguous(), ends.diff()


def _remind(q: Tensor, k: Tensor, causal: bool) -> None:
    """Warns of a batch whose tokens and heads are exchanged by all appearances: it has more heads than models have, or
    more queries than keys, which are key heads then."""
    exchanged = q.shape[2] > MOST_HEADS or causal and q.shape[2] == k.shape[2] and 0 < k.shape[1] < q.shape[1]
    if exchanged and not torch.compiler.is_compiling():
        warnings.warn(
            f"attention: q has shape {tuple(q.shape)} and k {tuple(k.shape)}, which is {q.shape[1]} queries of "
            f"{q.shape[2]} heads on {k.shape[1]} keys; expected (batch, length, heads, D): for (batch, heads, length, "
            "D) pass q.transpose(1, 2), k and v alike",
            stacklevel=4,
        )


class Arguments(NamedTuple):
    """Holds checked arguments."""

    q: Tensor  # (tokens, heads, D), contiguous
    k: Tensor  # (rows, key heads, D), of which D is contiguous; v alike
    v: Tensor
    sequences: Sequences
    causal: bool
    scale: float
    window: int  # 0: none
    shape: torch.Size  # of q as it was given


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths_q: Tensor | None = None,
    lengths_k: Tensor | None = None,
    left_padded: bool = False,
    block_table: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
) -> Arguments:
    """Checks the arguments of `attention` and finds the sequences of the call. Raises what `attention` does."""
    op = "attention"
    check(op, q=q, k=k, v=v)
    packed = cu_seqlens_q is not None
    dims, words = (3, "(tokens, heads, D)") if packed else (4, "(batch, length, heads, D)")
    if q.dim() != dims:
        raise ValueError(
            f"{op}: q has shape {tuple(q.shape)}, expected {words} {'with' if packed else 'without'} cu_seqlens_q"
        )
    kv_dims = 4 if block_table is not None else dims
    if k.dim() != kv_dims or k.shape != v.shape:
        raise ValueError(
            f"{op}: k has shape {tuple(k.shape)} and v {tuple(v.shape)}, expected both of {kv_dims} dimensions "
            "and equal"
        )
    heads, width = q.shape[-2:]
    if k.shape[-1] != width or not heads or not k.shape[-2] or heads % k.shape[-2]:
        raise ValueError(
            f"{op}: q has {heads} heads of {width} and k {k.shape[-2]} of {k.shape[-1]}, expected equal "
            "widths and a multiple of k's heads"
        )
    if not 1 <= width <= 256:
        raise ValueError(f"{op}: the heads have width {width}, expected 1 to 256")
    if window is not None and (check_integer(op, "window", window) < 1 or not causal):
        raise ValueError(f"{op}: window is {window} and causal is {causal}, expected at least 1, and causal")
    if scale is not None and not 0 < check_number(op, "scale", scale) < float("inf"):
        raise ValueError(f"{op}: scale is {scale}, expected a positive number")
    if packed and (lengths_q is not None or left_padded or lengths_k is not None and block_table is None):
        raise ValueError(
            f"{op}: lengths_q, lengths_k or left_padded is given with cu_seqlens_q, expected cu_seqlens_k, "
            "or a block_table"
        )
    if cu_seqlens_k is not None and (not packed or block_table is not None):
        raise ValueError(f"{op}: cu_seqlens_k is given without cu_seqlens_q or with a block_table, expected lengths_k")
    where = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "lengths_q": lengths_q,
        "lengths_k": lengths_k,
        "block_table": block_table,
    }
    check(op, same_dtype=False, optional=tuple(where), q=q, **where)
    page, longest = 0, k.shape[0] if packed else k.shape[1]
    full_q, full_k = can_wait(q) if packed else lengths_q is None, packed and can_wait(q)
    if packed:
        first_q, length_q = _ends(op, "cu_seqlens_q", cu_seqlens_q, len(q))
    count, queries = len(length_q if packed else q), (lengths_q, 0 if packed else q.shape[1], left_padded)
    if block_table is not None:
        if block_table.dim() != 2 or len(block_table) != count or not integers(block_table) or lengths_k is None:
            raise ValueError(
                f"{op}: block_table has shape {tuple(block_table.shape)}, expected ({count}, pages) integers, "
                "and lengths_k with it"
            )
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise ValueError(
                f"{op}: block_table has no backward, expected inputs that require no gradient, or torch.no_grad()"
            )
        page, longest = k.shape[1], block_table.shape[1] * k.shape[1]
        *spans_q, first_k, length_k = padded_spans(op, count, queries, (lengths_k, longest, False), q.device)
        if not packed:
            first_q, length_q = spans_q
        known = block_table.to(torch.int32).clamp(0, max(len(k) - 1, 0)).contiguous()
        if can_wait(block_table):
            used = torch.arange(block_table.shape[1], device=q.device) * page < length_k[:, None]
            if bool((used & (known != block_table)).any()):
                raise ValueError(
                    f"{op}: block_table holds {int(block_table.min())} to {int(block_table.max())}, "
                    f"expected 0 to {len(k) - 1}"
                )
        block_table = known
    elif packed:
        if cu_seqlens_k is None and len(k) != len(q):
            raise ValueError(f"{op}: k has {len(k)} rows and q {len(q)}, expected as many, or cu_seqlens_k")
        first_k, length_k = (
            (first_q, length_q) if cu_seqlens_k is None else _ends(op, "cu_seqlens_k", cu_seqlens_k, len(k))
        )
        if len(length_k) != count:
            raise ValueError(
                f"{op}: cu_seqlens_k has {len(length_k) + 1} entries, expected {count + 1}, as cu_seqlens_q"
            )
    else:
        _remind(q, k, causal)
        if len(k) != count:
            raise ValueError(f"{op}: k holds {len(k)} sequences, expected {count}, as q")
        keys = lengths_k, k.shape[1], left_padded
        first_q, length_q, first_k, length_k = padded_spans(op, count, queries, keys, q.device)
        if lengths_q is not None and lengths_k is None:
            raise ValueError(f"{op}: lengths_q is given and lengths_k is not, expected both")
        full_k = lengths_k is None
    scale = width**-0.5 if scale is None else float(scale)
    sequences = Sequences(first_q, length_q, first_k, length_k, block_table, page, longest, full_q, full_k)
    return Arguments(
        _rows(q.contiguous()), _rows(k), _rows(v), sequences, causal, scale, min(window or 0, WIDEST), q.shape
    )


def attend(call: Arguments, schedule: Schedule = SCHEDULE) -> tuple[Tensor, Tensor]:
    """Returns what `attention` does, computed in a schedule; under torch.compile in the default one."""
    out, lse = apply(attention_forward, _compiled, _Attention.apply, *call[:7], schedule)
    return out.view(call.shape), lse.view(call.shape[:-1])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    cu_seqlens_k, the same unless given. A batch: q (B, L, query heads, D), k and v (B, capacity, key heads, D), of
    which lengths_q and lengths_k (B,) count, at the start of each row or, left_padded, at its end; so with a cache in
    k and v, its new keys included. Paged: k and v (pages, page size, key heads, D) and block_table (B, pages of the
    longest) integers; needs lengths_k; has no backward. Query heads are a multiple of key heads (GQA); D is at most
    256; scale is D ** -0.5 unless given.

    causal: the last query sees all keys, each one before it one less. window: a query sees itself and the window − 1
    keys before it. A query that sees no key gives 0 and −inf, and so does padding. Bits are promised for finite v: a
    NaN or Inf in it may reach queries of its own sequence that do not see it. Raises ValueError and TypeError with one
    sentence.
    """
    call = arguments(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        left_padded=left_padded,
        block_table=block_table,
        causal=causal,
        scale=scale,
        window=window,
    )
    told = cu_seqlens_q is not None and len(cu_seqlens_q) > 2 or lengths_q is not None
    if told and torch.is_grad_enabled() and q.requires_grad:
        remind("attention", len(call.sequences.length_q))
    return attend(call)
