"""Candidates broken on purpose. Every audit must flag each of them; one missed control fails the audit.

Each is built on the kernels of this package, so that nothing but the named defect can be what is seen.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import bi_kernels
from bi_kernels.audit.evidence.drift import raw


@dataclass(frozen=True)
class Control:
    name: str
    audit: str
    op: str
    relation: str  # the one that must flag it
    function: Callable
    dtype: str = "bf16"
    case: str = ""
    gpu: bool = False  # a stock op known to drift at full shapes on an H200 only
    level: str = ""  # of the static audit's findings, the one that must flag it


def _rows(x: Tensor) -> int:
    return x.shape[:-1].numel()


def split_k_by_m(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    a, w, half = x.float(), weight.float(), x.shape[-1] // 2
    if _rows(x) > 64:
        return bi_kernels.linear(a, w).to(x.dtype)
    parts = [bi_kernels.linear(a[..., s].contiguous(), w[:, s].contiguous()) for s in (slice(half), slice(half, None))]
    return (parts[0] + parts[1]).to(x.dtype)


def bf16_accumulation(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    total = None
    for k in range(0, x.shape[-1], 16):
        part = F.linear(x[..., k : k + 16].float(), weight[:, k : k + 16].float())
        total = part.bfloat16() if total is None else (total + part).bfloat16()
    return total.to(x.dtype)


def tf32_inputs(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    shorten = lambda t: ((raw(t) + 0x1000) & ~0x1FFF).view(torch.float32)
    return bi_kernels.linear(shorten(x), shorten(weight))


def reversed_k_for_small_m(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _rows(x) > 16:
        return bi_kernels.linear(x, weight)
    return bi_kernels.linear(x.flip(-1), weight.flip(-1))


def one_ulp_in_one_element(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = bi_kernels.linear(x, weight)
    if _rows(x) == 17:
        raw(y).view(-1)[5] += 1
    return y


def leaves_one_element(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = bi_kernels.linear(x, weight)
    out = torch.empty_like(y)
    out.view(-1)[:-1] = y.reshape(-1)[:-1]
    return out


def truncating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (raw(x.float()) & ~0xFFFF).view(torch.float32).to(dtype)


def wrong_output_dtype(x: Tensor) -> Tensor:
    return bi_kernels.silu(x).float()


def batch_amax_activation(x: Tensor) -> Tensor:
    largest = x.float().abs().nan_to_num(0.0, 0.0, 0.0).amax() / 448
    return bi_kernels.silu(((x.float() / largest).to(x.dtype) * largest).to(x.dtype))


def residual_downcast_for_large_m(x: Tensor, residual: Tensor) -> Tensor:
    if _rows(x) > 256:
        residual = residual.bfloat16().to(x.dtype)
    return bi_kernels.add(x, residual)


def in_place_for_small_m(x: Tensor, residual: Tensor) -> Tensor:
    y = bi_kernels.add(x, residual)
    return x.copy_(y * 1.5 if _rows(x) <= 16 else y)


def leaks_nan_neighbour(x: Tensor) -> Tensor:
    return bi_kernels.silu(x) + (0 * x.float()).sum().to(x.dtype)


def positive_zero(x: Tensor, factor: float) -> Tensor:
    y = bi_kernels.scale(x, factor)
    return y + 0.0 if _rows(x) <= 16 else y


def rope_bf16_positions(x, table, positions=None, cu_seqlens=None, interleaved=False) -> Tensor:
    if positions is None:
        positions = bi_kernels.packed_positions(cu_seqlens, x.shape[0])
    return bi_kernels.rope(x, table, positions.bfloat16().long(), interleaved=interleaved)


def rope_by_row(x, table, positions=None, cu_seqlens=None, interleaved=False) -> Tensor:
    rows = torch.arange(x.shape[:-2].numel(), device=x.device).reshape(x.shape[:-2])
    return bi_kernels.rope(x, table, rows, interleaved=interleaved)


CONTROLS = (
    Control("GEMM that accumulates in bf16", "dtype", "linear", "accuracy", bf16_accumulation, case="o"),
    Control("fp32 GEMM on TF32 inputs", "dtype", "linear", "accuracy", tf32_inputs, "fp32", "o"),
    Control("cast that truncates", "dtype", "cast", "accuracy", truncating_cast),
    Control("activation that returns fp32 for bf16", "dtype", "silu", "accuracy", wrong_output_dtype),
    Control(
        "activation with a fused reduction over the batch", "elementwise", "silu", "invariance", batch_amax_activation
    ),
    Control(
        "residual downcast only when M > 256", "elementwise", "add", "invariance", residual_downcast_for_large_m, "fp32"
    ),
    Control(
        "op that works in place, and otherwise for M ≤ 16", "elementwise", "add", "invariance", in_place_for_small_m
    ),
    Control("op that leaks a NaN neighbour", "elementwise", "silu", "invariance", leaks_nan_neighbour),
    Control("−0 turned into +0", "elementwise", "scale", "invariance", positive_zero),
    Control("RoPE with positions in bf16", "elementwise", "rope", "accuracy", rope_bf16_positions),
    Control("RoPE table indexed by row instead of position", "elementwise", "rope", "invariance", rope_by_row),
    Control("split-K chosen by M", "gemm", "linear", "invariance", split_k_by_m, case="o"),
    Control("GEMM that accumulates in bf16", "gemm", "linear", "accuracy", bf16_accumulation, case="o"),
    Control("K order reversed for M ≤ 16", "gemm", "linear", "invariance", reversed_k_for_small_m, case="o"),
    Control("one element off by one ULP at M = 17", "gemm", "linear", "invariance", one_ulp_in_one_element, case="o"),
    Control("one output element left unwritten", "gemm", "linear", "determinism", leaves_one_element, case="o"),
    Control("torch linear 4096→4096", "gemm", "linear", "invariance", F.linear, case="o", gpu=True),
    Control("torch linear 12288→4096", "gemm", "linear", "invariance", F.linear, case="down", gpu=True),
)
