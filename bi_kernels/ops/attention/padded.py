"""Finds where the sequences of a padded batch lie, in one launch: a decode step asks in every layer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import apply, integers, seen, unseen
from bi_kernels.launch import jit

BLOCK = 256


@jit(do_not_specialize=["count", "room", "width_q", "width_k", "stride_q", "stride_k"])
def _spans_kernel(
    spans,
    lengths_q,
    lengths_k,
    count,
    room,
    width_q,
    width_k,
    stride_q,
    stride_k,
    LEFT_Q: tl.constexpr,
    LEFT_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    _span(spans, lengths_q, i, inside, room, width_q, stride_q, LEFT_Q)
    _span(spans + 2 * room, lengths_k, i, inside, room, width_k, stride_k, LEFT_K)


@triton.jit
def _span(spans, lengths, i, inside, room, width, stride, LEFT: tl.constexpr):
    first, length = i * tl.maximum(width, 1), tl.zeros_like(i) + width
    if lengths is not None:
        given = tl.load(lengths + i * stride, mask=inside, other=0).to(tl.int64)
        length = tl.minimum(tl.maximum(given, 0), width).to(tl.int32)
    if LEFT:
        first += width - length
    tl.store(spans + i, first, mask=inside)
    tl.store(spans + room + i, length, mask=inside)


def _launch(
    spans: Tensor,
    lengths_q: Tensor | None,
    lengths_k: Tensor | None,
    count: int,
    width_q: int,
    width_k: int,
    left_q: bool,
    left_k: bool,
) -> None:
    if count:
        strides = (1 if t is None else t.stride(0) for t in (lengths_q, lengths_k))
        given = spans, lengths_q, lengths_k, count, spans.shape[1], width_q, width_k, *strides
        _spans_kernel[(triton.cdiv(count, BLOCK),)](*given, LEFT_Q=left_q, LEFT_K=left_k, BLOCK=BLOCK, num_warps=1)


_opaque = torch.library.custom_op("bi_kernels::padded_spans", _launch, mutates_args=("spans",))


def _checked(op: str, name: str, lengths: Tensor | None, count: int, width: int) -> None:
    if lengths is None:
        return
    if tuple(lengths.shape) != (count,) or not integers(lengths):
        raise ValueError(
            f"{op}: {name} has shape {tuple(lengths.shape)} and dtype {lengths.dtype}, expected ({count},) integers"
        )
    if unseen(("lengths", width), lengths):
        counts = lengths.tolist()
        if not all(0 <= n <= width for n in counts):
            raise ValueError(f"{op}: {name} is {counts}, expected 0 to {width}")
        seen(("lengths", width), lengths)


def padded_spans(
    op: str,
    count: int,
    queries: tuple[Tensor | None, int, bool],
    keys: tuple[Tensor | None, int, bool],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the first rows and lengths of `count` sequences' queries and keys, (count,) int32 each.

    queries, keys: lengths (count,) integers or None for whole rows, the width of a row, and whether they lie at its
    end. Raises ValueError naming lengths_q or lengths_k.
    """
    (lengths_q, width_q, left_q), (lengths_k, width_k, left_k) = queries, keys
    _checked(op, "lengths_q", lengths_q, count, width_q)
    _checked(op, "lengths_k", lengths_k, count, width_k)
    room = triton.cdiv(count, 4) * 4  # each begins at a multiple of 16 bytes
    spans = torch.empty(4, room, dtype=torch.int32, device=device)
    apply(_launch, _opaque, _launch, spans, lengths_q, lengths_k, count, width_q, width_k, left_q, left_k)
    return tuple(row[:count] for row in spans)
