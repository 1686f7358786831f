"""Checks the arguments of attention, and finds the sequences of a call."""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bi_kernels.checks import can_wait, check, check_shape, integers, mark_validated, needs_validation, once, widened
from bi_kernels.ops.attention.forward import rows
from bi_kernels.ops.attention.padded import check_values
from bi_kernels.ops.attention.schedule import Batch, Sequences
from bi_kernels.scalars import check_flag, check_fp32, check_integer, check_number, check_positive, truncated_repr

WIDEST = 2**30  # keys; a wider window is none
MOST_HEADS = 128  # that models have; more of them are tokens, most likely


def _with_strides(t: Tensor) -> Tensor:
    """Returns (…, heads, D) of which D is contiguous and rows have one stride."""
    return t if t.stride(-1) == 1 and (t.dim() == 3 or t.stride(0) == t.shape[1] * t.stride(1)) else rows(t)


def _ends(op: str, name: str, cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Returns (first rows, lengths) of packed sequences."""
    if needs_validation(("ends", rows), cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != rows or ends != sorted(ends):
            raise ValueError(
                f"{op}: {name} is {truncated_repr(ends)}, expected it to start at 0, never decrease, and end at "
                f"{rows}, the number of rows"
            )
        mark_validated(("ends", rows), cu_seqlens)
    ends = cu_seqlens.to(torch.int32).clamp(0, rows).cummax(0).values.to(torch.int32)
    if can_wait(cu_seqlens):  # every row is somebody's, whatever was written behind the check
        ends = pad(pad(ends[1:-1], (1, 0)), (0, 1), value=rows)
    return ends[:-1].contiguous(), ends.diff()


class Arguments(NamedTuple):
    """Holds checked arguments."""

    q: Tensor  # (…, heads, D), contiguous
    k: Tensor  # (…, key heads, D), of which D is contiguous and rows have one stride; v alike
    v: Tensor
    sequences: Sequences
    causal: bool
    scale: float
    window: int  # 0: none
    shape: torch.Size  # of q as it was given
    sinks: Tensor | None  # (heads of q,), contiguous
    soft_cap: float  # 0: none
    chunk: int  # 0: none


@once
def _checked(*args) -> tuple[float, int, int, float, bool]:
    """Checks what can be, but for values. Returns the scale, the window, the chunk, the cap, and whether tokens and
    heads are exchanged by all appearances: a batch has more heads than models have, or more queries than keys, which
    are key heads then."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, lengths_q, lengths_k, left_padded, block_table, *constants = args
    causal, scale, window, sinks, chunk, soft_cap = constants
    op = "attention"
    check(op, q=q, k=k, v=v)
    for name, flag in (("causal", causal), ("left_padded", left_padded)):
        check_flag(op, name, flag)
    packed = cu_seqlens_q is not None
    dims, words = (3, "(tokens, heads, D)") if packed else (4, "(batch, length, heads, D)")
    if q.dim() != dims:
        raise ValueError(
            f"{op}: q has shape {tuple(q.shape)}, expected {words} {'with' if packed else 'without'} cu_seqlens_q"
        )
    kv_dims = 4 if block_table is not None else dims
    if k.dim() != kv_dims or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{op}: k has shape {tuple(k.shape)} and v {tuple(v.shape)}, expected both of {kv_dims} dimensions "
            "and equal but for the last"
        )
    heads, width = q.shape[-2:]
    if k.shape[-1] != width or not heads or not k.shape[-2] or heads % k.shape[-2]:
        raise ValueError(
            f"{op}: q has {heads} heads of {width} and k {k.shape[-2]} of {k.shape[-1]}, expected equal "
            "widths and a multiple of k's heads"
        )
    if not 1 <= width <= 256:
        raise ValueError(f"{op}: q has heads of width {width}, expected 1 to 256")
    if not 1 <= v.shape[-1] <= 256:
        raise ValueError(f"{op}: v has heads of width {v.shape[-1]}, expected 1 to 256")
    if sinks is not None:
        check(op, same_dtype=getattr(sinks, "dtype", None) != torch.float32, q=q, sinks=sinks)
        check_shape(op, "sinks", sinks, q.shape[-2:-1], "a logit for each of q's heads")
    if window is not None and (check_integer(op, "window", window) < 1 or not causal):
        raise ValueError(
            f"{op}: window is {truncated_repr(window)} and causal is {causal}, expected at least 1, and causal"
        )
    if chunk is not None and (check_integer(op, "chunk", chunk) < 1 or not causal or window is not None):
        raise ValueError(
            f"{op}: chunk is {truncated_repr(chunk)}, causal is {causal} and window is {truncated_repr(window)}, "
            "expected at least 1, causal, and no window"
        )
    soft_cap = 0.0 if soft_cap is None else check_positive(op, "soft_cap", soft_cap)
    if scale is not None and not check_fp32(op, "scale", check_number(op, "scale", scale)) > 0:
        raise ValueError(f"{op}: scale is {scale}, expected a positive number")
    if packed and (lengths_q is not None or left_padded or lengths_k is not None and block_table is None):
        raise ValueError(
            f"{op}: lengths_q, lengths_k or left_padded is given with cu_seqlens_q, expected cu_seqlens_k, "
            "or a block_table"
        )
    if cu_seqlens_k is not None and (not packed or block_table is not None):
        raise ValueError(f"{op}: cu_seqlens_k is given without cu_seqlens_q or with a block_table, expected lengths_k")
    ends = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths = {"lengths_q": lengths_q, "lengths_k": lengths_k}
    where = {**ends, **lengths, "block_table": block_table}
    check(op, same_dtype=False, optional=tuple(where), q=q, **where)
    for name, t in ends.items():
        if t is not None and (t.dim() != 1 or len(t) < 2 or not integers(t)):
            raise ValueError(
                f"{op}: {name} has shape {tuple(t.shape)} and dtype {t.dtype}, expected (sequences + 1,) integers"
            )
    count = len(cu_seqlens_q) - 1 if packed else len(q)
    if block_table is not None and (
        block_table.dim() != 2 or len(block_table) != count or not integers(block_table) or lengths_k is None
    ):
        raise ValueError(
            f"{op}: block_table has shape {tuple(block_table.shape)}, expected ({count}, pages) integers, "
            "and lengths_k with it"
        )
    if not packed and block_table is None and len(k) != count:
        raise ValueError(f"{op}: k holds {len(k)} sequences, expected {count}, as q")
    for name, t in lengths.items():
        if t is not None and (tuple(t.shape) != (count,) or not integers(t)):
            raise ValueError(
                f"{op}: {name} has shape {tuple(t.shape)} and dtype {t.dtype}, expected ({count},) integers"
            )
    if packed and block_table is None and cu_seqlens_k is None and len(k) != len(q):
        raise ValueError(f"{op}: k has {len(k)} rows and q {len(q)}, expected as many, or cu_seqlens_k")
    if cu_seqlens_k is not None and len(cu_seqlens_k) != count + 1:
        raise ValueError(f"{op}: cu_seqlens_k has {len(cu_seqlens_k)} entries, expected {count + 1}, as cu_seqlens_q")
    exchanged = False
    if not packed and block_table is None:
        exchanged = q.shape[2] > MOST_HEADS or causal and q.shape[2] == k.shape[2] and 0 < k.shape[1] < q.shape[1]
    spans = min(window or 0, WIDEST), min(chunk or 0, WIDEST)
    return width**-0.5 if scale is None else float(scale), *spans, soft_cap, exchanged


def _check_pages(block_table: Tensor, lengths: Tensor, k: Tensor) -> None:
    question = "pages", k.shape[:2]
    if needs_validation(question, block_table, lengths):
        used = torch.arange(block_table.shape[1], device=k.device) * k.shape[1] < widened(lengths)[:, None]
        pages = widened(block_table)
        if bool((used & ((pages < 0) | (pages >= len(k)))).any()):
            raise ValueError(
                f"attention: block_table holds {int(pages.min())} to {int(pages.max())}, expected 0 to {len(k) - 1}"
            )
        mark_validated(question, block_table, lengths)


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lengths_q: Tensor | None = None,
    lengths_k: Tensor | None = None,
    left_padded: bool = False,
    block_table: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
) -> Arguments:
    """Checks the arguments of `attention` and finds the sequences of the call. Raises what `attention` does."""
    where = cu_seqlens_q, cu_seqlens_k, lengths_q, lengths_k
    constants = causal, scale, window, sinks, chunk, soft_cap
    scale, window, chunk, soft_cap, exchanged = _checked(q, k, v, *where, left_padded, block_table, *constants)
    if exchanged and not torch.compiler.is_compiling():
        warnings.warn(
            f"attention: q has shape {tuple(q.shape)} and k {tuple(k.shape)}, which is {q.shape[1]} queries of "
            f"{q.shape[2]} heads on {k.shape[1]} keys; expected (batch, length, heads, D): for (batch, heads, length, "
            "D) pass q.transpose(1, 2), k and v alike",
            stacklevel=3,
        )
    packed, paged, batch = cu_seqlens_q is not None, block_table is not None, None
    page, longest = 0, k.shape[0] if packed else k.shape[1]
    if paged:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sinks)):
            raise ValueError(
                "attention: block_table has no backward, expected inputs that require no gradient, or torch.no_grad()"
            )
        page, longest = k.shape[1], block_table.shape[1] * k.shape[1]
    if packed:
        first_q, length_q = _ends("attention", "cu_seqlens_q", cu_seqlens_q, len(q))
        first_k, length_k = first_q, length_q
        if cu_seqlens_k is not None:
            first_k, length_k = _ends("attention", "cu_seqlens_k", cu_seqlens_k, len(k))
    else:
        check_values("attention", "lengths_q", lengths_q, q.shape[1])
        if lengths_q is not None and lengths_k is None:
            raise ValueError("attention: lengths_q is given and lengths_k is not, expected both")
        first_q, length_q = None, None if lengths_q is None else lengths_q.contiguous()
    if not packed or paged:
        batch = Batch(len(first_q) if packed else q.shape[0], None if packed else q.shape[1], longest, left_padded)
        check_values("attention", "lengths_k", lengths_k, longest)
        first_k, length_k = None, None if lengths_k is None else lengths_k.contiguous()
    if paged:
        _check_pages(block_table, lengths_k, k)
        block_table = widened(block_table).contiguous()
    full_q = can_wait(q) if packed else lengths_q is None
    full_k = packed and can_wait(q) if packed or paged else lengths_k is None
    sequences = Sequences(first_q, length_q, first_k, length_k, block_table, page, longest, full_q, full_k, batch)
    q, k, v = q.contiguous(), _with_strides(k), _with_strides(v)
    return Arguments(q, k, v, sequences, causal, scale, window, q.shape, sinks, soft_cap, chunk)
