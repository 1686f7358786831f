"""Launches attention's forward: prefill, chunks and decode over a contiguous or paged cache, in one summation order.

On sm_90 hopper/forward.py has a faster prefill of the same bits, and decode.py a decode for CUDA graphs.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.checks import ensure_cuda_context, is_hopper, multiprocessors
from bi_kernels.compat import descriptor
from bi_kernels.launch import Launch, cached
from bi_kernels.ops.attention.decode import SplitDecode, fits_apart
from bi_kernels.ops.attention.forward_kernels import attention_kernel, merge_kernel
from bi_kernels.ops.attention.padded import materialize_offsets
from bi_kernels.ops.attention.schedule import (
    Batch,
    Schedule,
    Sequences,
    Tiling,
    current_schedule,
    fits_hopper,
    max_tiles,
    round_up_sequences,
    scales,
    shape_of,
    tma_ready,
)


def rows(t: Tensor) -> Tensor:
    """Returns (…, heads, D) as (rows, heads, D) of which D is contiguous; a copy where rows have no one stride."""
    t = t if t.stride(-1) == 1 else t.contiguous()
    return t.reshape(t.shape[:-2].numel(), *t.shape[-2:])


def _descriptor(t: Tensor, block: int) -> TensorDescriptor:
    """Returns blocks of keys of one head, of (rows, heads, D)."""
    rows, heads, width = t.shape
    return descriptor(ensure_cuda_context(t), (rows, heads * width), (t.stride(0), 1), (block, width))


class _Plan(NamedTuple):
    """Says how a forward is computed: what is launched, but for sm_90's prefill."""

    tma: bool  # of prefill: it may copy blocks of keys
    blocks: tuple | None  # of decode: so it does, and what describes them
    many: bool  # a sequence may have several splits
    attention: Launch
    attention_tma: Launch  # of keys that descriptors name
    steps: SplitDecode | None  # the same, where that is the faster on a GPU
    partial: int  # queries of all heads and splits, where each split has a program of its own, or 0
    merge: Launch


@cached
def _plan(
    shape_q: torch.Size,
    shape_k: torch.Size,
    strides_k: tuple[int, ...],
    strides_v: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    count: int,
    batch: Batch | None,
    integers: tuple[torch.dtype | None, ...],
    pages_stride: int,
    page: int,
    longest: int,
    causal: bool,
    scale: float,
    window: int,
    schedule: Schedule,
    wide: int,
    soft_cap: float,
    chunk: int,
    sinks: bool,
) -> _Plan:
    """integers: the dtypes of the lengths and pages that are given; wide: v's width."""
    shape = shape_of(shape_q, shape_k, strides_k, strides_v, wide)
    hopper = device >= 0 and is_hopper(torch.device("cuda", device))
    tokens, heads, narrow = shape_q[:-2].numel(), shape["HEADS"], max(shape["D"], shape["DV"]) <= 128
    scale, steep = scales(scale, soft_cap)
    total = tokens * shape["GROUP"]
    splits = max(1, triton.cdiv(longest, schedule.split))
    tiles, many = max_tiles(total, count, schedule.prefill.rows) * heads, splits > 1
    fp32 = dtype == torch.float32
    prefill = not fp32 and tiles >= schedule.few and total > schedule.decode.rows * count
    partial = not fp32 and many and tiles < schedule.few and tiles * splits <= schedule.most
    tiling = schedule.decode if narrow else schedule.wide_decode
    if fp32:
        tiling = schedule.fp32
    elif prefill:
        tiling = schedule.prefill if narrow else schedule.wide_prefill
    told = dict(
        shape,
        pages_stride=pages_stride,
        last_page=shape_k[:-2].numel() // page - 1 if page else 0,
        sequences=count,
        width_q=batch.width_q if batch else None,
        width_k=batch.width_k if batch else None,
        rows_total=total * heads,
        scale=scale,
        steep=steep,
        window=chunk or window,
        COUNT=round_up_sequences(count),
        BLOCK=schedule.block,
        SPLIT=schedule.split,
        CAUSAL=causal,
        WINDOW=2 if chunk else window > 0,
        PAGE=page,
        LEFT=batch is not None and batch.left,
        PARTIAL=partial,
    )

    def attention(tiling: Tiling) -> Launch:
        grid = (max_tiles(total, count, tiling.rows) * heads, splits if partial else 1)
        how = {"BLOCK_M": tiling.rows, "MANY": many, "num_warps": tiling.warps, "num_stages": tiling.stages}
        return Launch(attention_kernel, device, grid, **how, **told)

    steps = None
    if not (fp32 or prefill) and partial == many and fits_apart(device, total, count, heads, longest, schedule):
        steps = SplitDecode(device, dtype, integers, total, longest, schedule, told, sinks)
    grid = (triton.cdiv(total * heads, schedule.merge_rows),)
    how = {"ROWS": schedule.merge_rows, "D": shape["DV"], "num_warps": 4, "enable_fp_fusion": False}
    how["HEADS"] = shape_q[-2] if sinks else 1
    merge = Launch(merge_kernel, device, grid, total * heads, splits, scale, wide, **how)
    queries = total * heads * splits if partial else 0
    fits, programs = not fp32 and shape["EVEN"] and shape["EVEN_V"], count * heads * (splits if partial else 1)
    contiguous = wide == shape["width"] and strides_k == strides_v == torch.empty(shape_k, device="meta").stride()
    tma, blocks, by_tma = fits and prefill and not page, None, tiling
    # a launch with descriptors costs the CPU more, which few programs do not earn back
    if fits and not prefill and hopper and contiguous and programs > schedule.decode_tma and page % schedule.block == 0:
        width = shape_k[-2:].numel()
        blocks = (shape_k.numel() // width, width), (width, 1), (schedule.block, shape["D"])
        if shape["D"] == 128 and programs > multiprocessors(torch.device("cuda", device)):
            by_tma = schedule.many_decode
    return _Plan(tma, blocks, many, attention(tiling), attention(by_tma), steps, queries, merge)


def _partials(splits: int, out: Tensor, lse: Tensor, full: bool) -> Tensor:
    """Returns room for the product with V, the maximum and the sum of each split, in fp32."""
    width = out.shape[-1]
    parts = lse.new_empty(splits * (width + 2))
    if not full:  # padding keeps these
        parts[splits * width : splits * (width + 1)].fill_(-math.inf)
        parts[splits * (width + 1) :].zero_()
    return parts


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    causal: bool,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
    chunk: int = 0,
) -> list[Tensor]:
    """Returns [out, lse] of q (…, heads, D), contiguous, on k, v (…, heads, D or v's width), of whose rows each has its
    own stride, or their pages; sinks (heads of q,); window, soft_cap and chunk: 0 for none."""
    wide = v.shape[-1]
    out, lse = q.new_empty((*q.shape[:-1], wide)), q.new_empty(q.shape[:-1], dtype=torch.float32)
    if not q.numel() or not k.numel():
        return [out.zero_(), lse.fill_(-math.inf)]
    schedule, sinks = current_schedule(), None if sinks is None else sinks.contiguous()
    first_q, length_q, first_k, length_k, pages, page, longest, full_q, _, batch = sequences
    count, stride = len(first_q) if batch is None else batch.count, 0 if pages is None else pages.stride(0)
    integers = tuple([None if t is None else t.dtype for t in (length_q, length_k, pages)])
    shapes, kind = (q.shape, k.shape, k.stride(), v.stride()), (q.dtype, q.get_device())
    where, constants = (count, batch, integers, stride, page, longest), (causal, scale, window)
    plan = _plan(*shapes, *kind, *where, *constants, schedule, wide, soft_cap, chunk, sinks is not None)
    parts = _partials(plan.partial, out, lse, full_q) if plan.partial else None
    if not full_q and parts is None:  # padding keeps these; the merge of partial results writes every row
        out.zero_()
        lse.fill_(-math.inf)
    attention, k_tma, v_tma = plan.attention, None, None
    if plan.blocks and not (k.data_ptr() | v.data_ptr()) % 16:
        attention = plan.attention_tma
        k_tma, v_tma = descriptor(ensure_cuda_context(k), *plan.blocks), descriptor(v, *plan.blocks)
    elif plan.tma:
        k, v = rows(k), rows(v)
        if tma_ready(k) and tma_ready(v):
            if schedule.hopper and not (window or chunk) and fits_hopper(q, k, v):
                told = causal, scale, plan.many, schedule, sinks, soft_cap
                _launch_hopper(rows(q), k, v, out, lse, sequences, *told)
                return [out, lse]
            attention = plan.attention_tma
            k_tma, v_tma = _descriptor(k, schedule.block), _descriptor(v, schedule.block)
    given = out, lse, parts, first_q, length_q, first_k, length_k, pages, sinks
    if plan.steps is not None and plan.steps.should_use(q, k, v, *given):
        plan.steps(q, k, v, *given)
    else:
        attention(q, k, v, k_tma, v_tma, *given)
    if parts is not None:
        plan.merge(parts, out, lse, sinks)
    return [out, lse]


def _launch_hopper(q, k, v, out, lse, sequences, causal, scale, many, schedule, sinks, soft_cap) -> None:
    from bi_kernels.ops.attention.hopper.forward import prefill  # noqa: PLC0415  (the interpreter does not know Gluon)

    sequences = materialize_offsets(sequences, q.device)
    count, total = len(sequences.length_q), len(q) * (q.shape[1] // k.shape[1])
    (scale, steep), tiles = scales(scale, soft_cap), max_tiles(total, count, 128)
    told = causal, scale, schedule.split, many, tiles, round_up_sequences(count), sinks, steep
    prefill(q, k, v, out, lse, sequences[:4], *told)
