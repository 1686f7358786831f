"""Row reductions and parameter folds broken on purpose, in one way each: sums whose order follows the number of rows.

`defect=False` mends that one, so that a test can show that nothing else is what the audit sees.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import bi_kernels
from bi_kernels.audit.controls.forward import Control, controls, row_count
from bi_kernels.audit.controls.gradient import with_backward
from bi_kernels.audit.findings import INVARIANCE
from bi_kernels.tokens import SLAB

FEW = 16  # rows that a control takes for few


def _split_sum(x: Tensor, rows: int, defect: bool) -> Tensor:
    """Returns the sum of each row as two halves, or for few rows as its even and its odd numbers."""
    halves = (x[..., 0::2], x[..., 1::2]) if defect and rows <= FEW else x.tensor_split(2, -1)
    first, second = (half.sum(-1, keepdim=True) for half in halves)
    return first + second


def mean_by_rows(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, defect: bool = True
) -> Tensor:
    """layer_norm whose mean is added in another order for few rows."""
    rest = x.float() - _split_sum(x.float(), row_count(x), defect) / x.shape[-1]
    rstd = torch.rsqrt(_split_sum(rest.square(), row_count(x), False) / x.shape[-1] + eps)
    return (rest * rstd * weight.float() + bias.float()).to(x.dtype)


def sum_by_rows(x: Tensor, scale: float = 1.0, defect: bool = True) -> Tensor:
    """row_sum that splits the rows of a small call otherwise."""
    return (_split_sum(x.float(), row_count(x), defect)[..., 0] * scale).to(x.dtype)


def softmax_by_rows(x: Tensor, defect: bool = True) -> Tensor:
    """softmax whose exponentials are added in another order for few rows."""
    e = (x.float() - x.float().amax(-1, keepdim=True)).exp()
    return (e / _split_sum(e, row_count(x), defect)).to(x.dtype)


def offset_left_out(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, defect: bool = True) -> Tensor:
    """rms_norm that knows no offset."""
    return bi_kernels.rms_norm(x, weight, eps, 0.0 if defect else offset)


def _partials_by_m(op: Callable, name: str, position: int, terms: Callable[[Tensor, Tensor], Tensor]) -> Callable:
    """Returns an op one of whose parameters adds its gradient in eight parts of the call's rows."""

    def backward(layout, dy, args, grads, defect=True, **constants):
        parameter, rows = args[position], layout.slots_on(dy.device).long()
        buffer = getattr(parameter, "main_grad", None)
        sums = torch.zeros_like(parameter, dtype=torch.float32) if buffer is None else buffer
        flat = lambda t: t.reshape(-1, t.shape[-1])[rows].float()
        every = terms(flat(dy), flat(args[0])).masked_fill(rows[:, None] < 0, 0)
        for part in every.split(-(-len(every) // 8) if defect else SLAB):
            sums += part.sum(0)
        return {position: sums.to(parameter.dtype) if buffer is None else None}

    return with_backward(op, backward, name, position)


dbias_by_m = _partials_by_m(bi_kernels.layer_norm, "dbias_by_m", 2, lambda dy, x: dy)
dscale_by_m = _partials_by_m(bi_kernels.scaled, "dscale_by_m", 1, lambda dy, x: dy * x)
ROW_CONTROLS = (
    *controls(
        "rms_norm",
        "layer_norm",
        ("LayerNorm whose mean is added by the number of rows", "invariance", mean_by_rows),
        ("LayerNorm's dbias in parts of the call's rows", INVARIANCE, dbias_by_m),
        dtype="fp32",
    ),
    Control("row sum split by the number of rows", "rms_norm", "row_sum", "invariance", sum_by_rows, "fp32"),
    Control("RMSNorm without its offset", "rms_norm", "rms_norm_offset", "accuracy", offset_left_out),
    Control("softmax summed by the number of rows", "vocabulary", "softmax", "invariance", softmax_by_rows, "fp32"),
    Control("a scale's gradient in parts of the call's rows", "backward", "scaled", INVARIANCE, dscale_by_m),
)
