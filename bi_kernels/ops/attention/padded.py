"""Finds where the sequences of a padded batch lie, in one launch, for kernels that do not look themselves."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import mark_validated, needs_validation
from bi_kernels.launch import jit
from bi_kernels.op import writes
from bi_kernels.ops.attention.schedule import Sequences
from bi_kernels.scalars import truncated_repr

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


@writes("spans")
def find_spans(spans, lengths_q, lengths_k, count: int, width_q: int, width_k: int, left_q: bool, left_k: bool) -> None:
    if count:
        strides = [1 if t is None else t.stride(0) for t in (lengths_q, lengths_k)]
        sizes = count, spans.shape[1], width_q, width_k, *strides
        options = {"LEFT_Q": left_q, "LEFT_K": left_k, "BLOCK": BLOCK, "num_warps": 1}
        _spans_kernel[(triton.cdiv(count, BLOCK),)](spans, lengths_q, lengths_k, *sizes, **options)


def check_values(op: str, name: str, lengths: Tensor | None, width: int) -> None:
    """Raises ValueError for lengths that rows of `width` have no room for."""
    if lengths is not None and needs_validation(("lengths", width), lengths):
        counts = lengths.tolist()
        if not all(0 <= n <= width for n in counts):
            raise ValueError(f"{op}: {name} is {truncated_repr(counts)}, expected 0 to {width}")
        mark_validated(("lengths", width), lengths)


def materialize_offsets(sequences: Sequences, device: torch.device) -> Sequences:
    """Returns the sequences of a batch with first rows and lengths, (count,) int32 each; others as they are."""
    if sequences.batch is None:
        return sequences
    count, width_q, width_k, left = sequences.batch
    first_q, length_q, _, length_k = sequences[:4]
    room = triton.cdiv(count, 4) * 4  # each begins at a multiple of 16 bytes
    spans = torch.empty(4, room, dtype=torch.int32, device=device)
    find_spans(spans, length_q, length_k, count, width_q or 0, width_k, left, left and not sequences.page)
    queries, keys = [row[:count] for row in spans[:2]], [row[:count] for row in spans[2:]]
    return Sequences(*(queries if width_q is not None else (first_q, length_q)), *keys, *sequences[4:-1])
