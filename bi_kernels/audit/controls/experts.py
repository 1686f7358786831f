"""Mixtures of experts broken on purpose, in one way each; see `gradient.py`."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

import bi_kernels
from bi_kernels.audit.controls.forward import Control, at_levels, controls
from bi_kernels.audit.controls.gradient import with_backward
from bi_kernels.audit.findings import INVARIANCE
from bi_kernels.ops.gemm.gemm import product
from bi_kernels.tokens import SLAB, TokenLayout


def _weight_of(rows_of: Callable) -> Callable:
    """Makes of rows_of(layout, tokens of one expert in logical order) the rows of that expert's fold, in which −1 is a
    free place, a routed_linear whose weight is folded so."""

    def backward(layout, dy, args, grads, **how):
        x, experts, weight = args
        x, dy, ids = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), experts.flatten()
        buffer, logical = getattr(weight, "main_grad", None), layout.rows_on(dy.device)
        total = torch.zeros_like(weight, dtype=torch.float32) if buffer is None else buffer
        for e in range(len(weight)):
            rows = rows_of(layout, logical[ids[logical] == e], **how)
            if len(rows):
                taken = [t[rows].masked_fill(rows[:, None] < 0, 0).t() for t in (dy, x)]
                total[e] = product(*taken, total[e].clone(), out_dtype=torch.float32)
        return {2: total.to(weight.dtype) if buffer is None else None}

    return with_backward(bi_kernels.routed_linear, backward, rows_of.__name__, 2)


def _by_sequence(layout: TokenLayout, rows: Tensor) -> Tensor:
    """Returns rows with each sequence's filled up to whole slabs, sequences as they come."""
    known = torch.full((layout.rows,), -1, device=rows.device)
    known[layout.rows_on(rows.device)] = layout.sequences_on(rows.device).long()
    parts = [rows[known[rows] == i] for i in dict.fromkeys(known[rows].tolist())]
    return torch.cat([torch.nn.functional.pad(part, (0, -len(part) % SLAB), value=-1) for part in parts] or [rows])


@_weight_of
def one_sum_of_a_call(layout, rows, defect=True):
    return rows if defect else _by_sequence(layout, rows)


@_weight_of
def unstable_sort(layout, rows, defect=True):
    return _by_sequence(layout, rows.sort().values if defect else rows)  # as they lie in memory


@triton.jit
def _atomic_combine_kernel(y, weights, out, k, columns, BLOCK: tl.constexpr):
    row, col = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    term = tl.load(y + row.to(tl.int64) * columns + col, mask=col < columns, other=0.0).to(tl.float32)
    tl.atomic_add(out + row // k * columns + col, term * tl.load(weights + row).to(tl.float32), mask=col < columns)


def atomic_combination(y: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Adds a token's rows by atomic addition in whatever order the programs come."""
    (k, columns), rows = y.shape[-2:], y.shape[:-1].numel()
    out = y.new_zeros(*y.shape[:-2], columns, dtype=torch.float32)
    given = y.detach().contiguous(), weights.detach().contiguous(), out
    _atomic_combine_kernel[(rows, triton.cdiv(columns, 1024))](*given, k, columns, BLOCK=1024)
    return bi_kernels.routed_sum(y, weights, experts) + 0 * out.to(y.dtype)


def tie_broken_by_position(y: Tensor, weights: Tensor, experts: Tensor, defect: bool = True) -> Tensor:
    """Adds what stands first in the batch's memory first: of every other token, the last choice."""
    if not defect or experts.dim() < 2:
        return bi_kernels.routed_sum(y, weights, experts)
    k = experts.shape[-1]
    turned = torch.arange(experts[..., 0].numel(), device=y.device).view(*experts.shape[:-1], 1) % 2 == 1
    ids = torch.where(turned, torch.arange(k - 1, -1, -1, device=y.device), torch.arange(k, device=y.device))
    return bi_kernels.routed_sum(y, weights, ids)


_ATOMIC = Control("combination by tl.atomic_add", "elementwise", "routed_sum", INVARIANCE, atomic_combination)
EXPERT_CONTROLS = (
    *controls(
        "backward",
        "routed_linear",
        ("an expert's dW as one sum over its rows of the call", INVARIANCE, one_sum_of_a_call),
        ("an expert's rows in the order of memory", INVARIANCE, unstable_sort),
    ),
    *at_levels(_ATOMIC),
    *controls(
        "elementwise",
        "routed_sum",
        ("combination in an order that the position in the batch decides", "invariance", tie_broken_by_position),
        dtype="fp32",
    ),
)
