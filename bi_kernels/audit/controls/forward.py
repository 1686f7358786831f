"""Candidates broken on purpose. Every audit must flag each of them; one missed control fails the audit.

Each is built on the kernels of this package, so that nothing but the named defect can be what is seen.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import bi_kernels
from bi_kernels.audit.checks.limits import ELEMENTS, OFFSETS
from bi_kernels.audit.compare import raw


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


AS_COMPILED = {"in the source": "AST", "in the PTX": "PTX", "in the binary": "SASS"}


def controls(audit: str, op: str, *several: tuple[str, str, Callable], **more) -> list[Control]:
    """Returns controls of one op, of which each has a name, the relation that must flag it and a function; more: what
    is said of all."""
    return [Control(name, audit, op, relation, function, **more) for name, relation, function in several]


def at_levels(control: Control, levels: dict[str, str] = AS_COMPILED) -> list[Control]:
    """Returns what the static audit must flag of a control at every level, whose place ends the name."""
    static = replace(control, relation="atomics-free")
    return [replace(static, name=f"{control.name}, {where}", level=level) for where, level in levels.items()]


def row_count(x: Tensor) -> int:
    return x.shape[:-1].numel()


def split_k_by_m(x: Tensor, weight: Tensor) -> Tensor:
    a, w = x.float(), weight.float()
    if row_count(x) > 64:
        return bi_kernels.linear(a, w).to(x.dtype)
    first, second = map(bi_kernels.linear, a.chunk(2, -1), w.chunk(2, -1))
    return (first + second).to(x.dtype)


def bf16_accumulation(x: Tensor, weight: Tensor) -> Tensor:
    total = x.new_zeros(1, dtype=torch.bfloat16)
    for a, w in zip(x.split(16, -1), weight.split(16, -1)):
        total = (total + F.linear(a.float(), w.float())).bfloat16()
    return total.to(x.dtype)


def half_of_k_in_bf16(x: Tensor, weight: Tensor) -> Tensor:
    a, w = x.float(), weight.float()
    first, second = map(bi_kernels.linear, a.chunk(2, -1), w.chunk(2, -1))
    return (first.bfloat16() + second).to(x.dtype)


def tf32_inputs(x: Tensor, weight: Tensor) -> Tensor:
    shorten = lambda t: ((raw(t) + 0x1000) & ~0x1FFF).view(torch.float32)
    return bi_kernels.linear(shorten(x), shorten(weight))


def reversed_k_for_small_m(x: Tensor, weight: Tensor) -> Tensor:
    return bi_kernels.linear(*(t.flip(-1) if row_count(x) <= 16 else t for t in (x, weight)))


def one_ulp_in_one_element(x: Tensor, weight: Tensor) -> Tensor:
    y = bi_kernels.linear(x, weight)
    if row_count(x) == 17:
        raw(y).view(-1)[5] += 1
    return y


def leaves_one_element(x: Tensor, weight: Tensor) -> Tensor:
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


def downcast_for_large_m(x: Tensor, residual: Tensor) -> Tensor:
    if row_count(x) > 256:
        residual = residual.bfloat16().to(x.dtype)
    return bi_kernels.add(x, residual)


def by_m_in_place(x: Tensor, residual: Tensor) -> Tensor:
    y = bi_kernels.add(x, residual)
    return x.copy_(y * 1.5 if row_count(x) <= 16 else y)


def leaks_nan_neighbour(x: Tensor) -> Tensor:
    return bi_kernels.silu(x) + (0 * x.float()).sum().to(x.dtype)


def positive_zero(x: Tensor, factor: float) -> Tensor:
    y = bi_kernels.scale(x, factor)
    return y + 0.0 if row_count(x) <= 16 else y


def rope_bf16_positions(x, table, positions=None, cu_seqlens=None) -> Tensor:
    if positions is None:
        positions = bi_kernels.packed_positions(cu_seqlens, x.shape[0])
    return bi_kernels.rope(x, table, positions.bfloat16().long())


def rope_by_row(x, table, positions=None, cu_seqlens=None) -> Tensor:
    return bi_kernels.rope(x, table, torch.arange(x.shape[:-2].numel(), device=x.device).view(x.shape[:-2]))


def reads_wrapped_rows(x: Tensor, elements: int = ELEMENTS) -> Tensor:
    """silu of rows of which those that begin beyond so many elements are read from the first on."""
    n = elements // x.shape[-1]
    return bi_kernels.silu(torch.cat((x[:n], x[: len(x) - n])) if len(x) > n else x)


CONTROLS = (
    *controls(
        "dtype",
        "linear",
        ("GEMM that accumulates in bf16", "accuracy", bf16_accumulation),
        ("GEMM that rounds one of two halves to bf16", "accuracy", half_of_k_in_bf16),
        case="o",
    ),
    Control("fp32 GEMM on TF32 inputs", "dtype", "linear", "accuracy", tf32_inputs, "fp32", "o"),
    Control("cast that truncates", "dtype", "cast", "accuracy", truncating_cast),
    Control("activation that returns fp32 for bf16", "dtype", "silu", "accuracy", wrong_output_dtype),
    *controls(
        "elementwise",
        "silu",
        ("activation with a fused reduction over the batch", "invariance", batch_amax_activation),
        ("op that leaks a NaN neighbour", "invariance", leaks_nan_neighbour),
    ),
    *controls(
        "elementwise",
        "silu",
        ("rows beyond 2**31 elements read from the first on", OFFSETS, reads_wrapped_rows),
        gpu=True,
    ),
    Control("residual downcast only when M > 256", "elementwise", "add", "invariance", downcast_for_large_m, "fp32"),
    Control("op that works in place, and otherwise for M ≤ 16", "elementwise", "add", "invariance", by_m_in_place),
    Control("−0 turned into +0", "elementwise", "scale", "invariance", positive_zero),
    Control("RoPE with positions in bf16", "elementwise", "rope", "accuracy", rope_bf16_positions),
    Control("RoPE table indexed by row instead of position", "elementwise", "rope", "invariance", rope_by_row),
    *controls(
        "gemm",
        "linear",
        ("split-K chosen by M", "invariance", split_k_by_m),
        ("GEMM that accumulates in bf16", "accuracy", bf16_accumulation),
        ("K order reversed for M ≤ 16", "invariance", reversed_k_for_small_m),
        ("one element off by one ULP at M = 17", "invariance", one_ulp_in_one_element),
        ("one output element left unwritten", "determinism", leaves_one_element),
        case="o",
    ),
    *(
        Control(f"torch linear, {case}", "gemm", "linear", "invariance", F.linear, case=case, gpu=True)
        for case in ("o", "down")
    ),
)
