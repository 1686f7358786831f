"""Holds results of the fuzz against the fp64 references and the contract's bounds."""

import inspect
import math
from itertools import pairwise

import torch
from torch import Tensor

import bi_kernels as bi
from bi_kernels import contract, reference

ROWS = {"matmul": "linear", "qk_norm": "rms_norm"}  # of the contract, where it is not the op's name
LARGEST = 1e4  # of an input; beyond it, fp32 sums may overflow


def inexact(op: str, given: tuple, named: dict, found: list[Tensor]) -> str:
    """Says what is beyond the contract's bound, where the inputs are moderate and the op has a reference."""
    if not hasattr(reference, op):
        return ""
    bound = inspect.signature(getattr(bi, op)).bind(*given, **named)
    bound.apply_defaults()
    arguments = {k: v.detach() if isinstance(v, Tensor) else v for k, v in bound.arguments.items()}
    floats = [t for t in arguments.values() if isinstance(t, Tensor) and t.is_floating_point()]
    if not all(t.numel() < 10**6 and bool((t.abs() < LARGEST).all()) for t in floats):
        return ""
    exact = OF.get(op, getattr(reference, op))(**arguments)
    row = f"{op}_tanh" if arguments.get("approximate") == "tanh" else ROWS.get(op, op)
    for y, (y64, magnitude) in zip(found, [exact] if exact and isinstance(exact[0], Tensor) else exact):
        if y.shape != y64.shape:
            return f"the plain call gives {tuple(y.shape)}, the reference {tuple(y64.shape)}"
        limit = contract.bound(row, y.dtype, y64, magnitude, floats[0].shape[-1] if floats[0].dim() else 1)
        good = ((y.double() - y64).abs() <= limit) | ((y64 != y64) & (y != y)) | (y.double() == y64)
        good |= (y64.abs() + limit >= torch.finfo(y.dtype).max) & (y == y64.sign() * math.inf)
        if not bool(good.all()):
            return f"the plain call gives {y}, the reference {y64}"
    return ""


def _rope(x: Tensor, table: bi.RopeTable, positions: Tensor, cu_seqlens: Tensor, interleaved: bool):
    """The rotation, NaN by positions that the table does not hold, and by its NaN; another table has no reference."""
    if positions is None:
        positions = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
    if not all(map(torch.equal, table, bi.rope_table(len(table.cos), 2 * table.cos.shape[-1]))):
        return []
    y, magnitude = reference.rope(x, table, positions, interleaved)
    unknown = ((positions < 0) | (positions >= len(table.cos)))[..., None, None]
    return y.masked_fill(unknown, math.nan), magnitude


def _attention(q, k, v, cu_seqlens, cu_seqlens_q, cu_seqlens_k, lengths_q, lengths_k, left_padded, block_table, **how):
    """Attention of the sequences one after another, and back to where they lie."""
    ends = cu_seqlens if cu_seqlens_q is None else cu_seqlens_q

    def rows(t: Tensor, ends: Tensor | None, lengths: Tensor | None) -> list[Tensor]:
        if ends is not None:
            return [torch.arange(a, b) for a, b in pairwise(ends.tolist())]
        count, width = t.shape[:2]
        lengths = [width] * count if lengths is None else lengths.tolist()
        return [i * width + (width - n if left_padded else 0) + torch.arange(n) for i, n in enumerate(lengths)]

    of_q = rows(q, ends, lengths_q)
    if block_table is None:
        of_k = rows(k, ends if cu_seqlens_k is None else cu_seqlens_k, lengths_k)
    else:
        at = [torch.arange(n) for n in lengths_k.tolist()]
        of_k = [pages[j // k.shape[1]] * k.shape[1] + j % k.shape[1] for pages, j in zip(block_table, at)]
    how["window"] = how["window"] and min(how["window"], 2**30)
    flat = [t.flatten(0, -3)[torch.cat(of)] for t, of in ((q, of_q), (k, of_k), (v, of_k))]
    found = reference.attention(*flat, lengths=[(len(a), len(b)) for a, b in zip(of_q, of_k)], **how)
    (out, of_out), (lse, of_lse) = found
    empty = lambda t, fill: torch.full((q.shape[:-2].numel(), *t.shape[1:]), fill, dtype=torch.float64)
    shaped = lambda t, fill: empty(t, fill).index_copy(0, torch.cat(of_q), t).view(*q.shape[:-2], *t.shape[1:])
    return (shaped(out, 0.0), shaped(of_out, 0.0)), (shaped(lse, -math.inf), shaped(of_lse, 0.0))


OF = {
    "rope": _rope,
    "attention": _attention,
    "scale": lambda x, factor: reference.scale(x, torch.tensor(factor, dtype=torch.float32).item()),
    "mask_fill": lambda x, mask, value: reference.mask_fill(x, mask, float(value)),
    "lm_head_logprob": lambda keep_bytes, **given: reference.lm_head_logprob(**given),
}
