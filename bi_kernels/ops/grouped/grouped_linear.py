"""A linear layer of each expert: `grouped_linear`, bf16, fp16 and fp32, fp32 accumulation, with the bits of `linear`.

y and dX are one left fold over K in slabs of 16 (see ops/gemm). On sm_90 `torch._grouped_mm` computes the same fold; it
serves where a comparison at first use shows that it does. Rounding points: the fp32 sum, the fp32 sum plus bias, then
once to the output dtype.

dW and dbias of an expert are left folds over slabs of 16 of its rows, counted per (sequence, expert), which continue
from `main_grad` where the parameter has one.
"""

import threading
import warnings

import torch
from torch import Tensor

from bi_kernels.checks import can_wait, check, check_shape, is_hopper, once
from bi_kernels.compat import is_recorded
from bi_kernels.contract import check_dtype
from bi_kernels.op import Op
from bi_kernels.ops.gemm.hopper_cublaslt import OFF
from bi_kernels.ops.grouped.fold import fold_weight
from bi_kernels.ops.grouped.groups import Groups, group_by_expert
from bi_kernels.ops.grouped.kernel import clear_rest, launch
from bi_kernels.ops.grouped.rows import combine, dispatch
from bi_kernels.scalars import check_flag
from bi_kernels.tokens import SLAB, continues_step, gradient_of, layout_for, main_grad

OP = "grouped_linear"
_agrees: dict[tuple, bool] = {}  # whether torch's program has our bits, by kinds of products
_lock = threading.Lock()


def _by_torch(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w.mT, offs=ends)


def _fits_torch(x: Tensor, w: Tensor) -> bool:
    """Tells whether torch's program takes a product, and is one that may have our bits."""
    if x.dtype != torch.bfloat16 or OFF or not is_hopper(x.device) or is_recorded() or x.stride(1) != 1:
        return False
    unit = (x.stride(0) | w.stride(0) | max(w.stride()[1:])) % 8 == 0 and (x.data_ptr() | w.data_ptr()) % 16 == 0
    return unit and 1 in w.stride()[1:] and w.shape[1] % 8 == 0 and hasattr(torch, "_grouped_mm")


def _served(x: Tensor, w: Tensor, ends: Tensor) -> bool:
    """Tells whether torch's program has our bits, by comparing random rows once for each kind of products."""
    kind = x.device, tuple(w.shape), w.stride(), x.stride(0), len(x).bit_length()
    if kind not in _agrees:
        if not can_wait(x):
            return False
        with _lock, torch.no_grad():
            drawn = torch.empty_like(x).normal_(generator=torch.Generator(x.device).manual_seed(0))
            ours, theirs = (
                f(drawn, w, *rest)[: int(ends[-1])] for f, rest in ((launch, (None, ends)), (_by_torch, (ends,)))
            )
            if not bool((ours != 0).any()):
                return False  # which shows nothing, now
            _agrees[kind] = torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    return _agrees[kind]


def _product(x: Tensor, w: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Returns x (rows, K) times w[e]ᵀ, w (experts, N, K), plus bias[e], by the cheapest program."""
    if bias is None and _fits_torch(x, w) and _served(x, w, ends):
        return _by_torch(x, w, ends)
    return launch(x, w, bias, ends)


def _launch(
    x,
    weight,
    ends,
    bias,
    transposed: bool,
    clear: bool,
    slots=None,
    slot_ends=None,
    weight_buffer=None,
    bias_buffer=None,
) -> Tensor:
    """What follows `clear` is for the backward."""
    w = weight.mT if transposed else weight
    (experts, N, K), rows = w.shape, len(x)
    if not rows or not N:
        return x.new_empty(rows, N)
    if not K:
        y = x.new_zeros(rows, N)
        if bias is not None:
            expert = torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)
            y += bias[expert.clamp(max=experts - 1)]
        return clear_rest(y, ends)
    y = _product(x, w, bias, ends)
    return clear_rest(y, ends) if clear else y


def _fake(x, weight, ends, bias, transposed, *_):
    return x.new_empty(len(x), weight.shape[2 if transposed else 1])


def _save(ctx, inputs, y):
    x, weight, ends, bias, ctx.transposed, ctx.clear, slots, slot_ends, *ctx.buffers = inputs
    ctx.parameters = weight, bias  # a saved tensor may come back without main_grad, as under checkpointing
    ctx.save_for_backward(x, weight, ends, slots, slot_ends)


def _backward(ctx, dy):
    x, weight, ends, slots, slot_ends = ctx.saved_tensors
    needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
    dy = dy.contiguous()
    dx = _grouped.raw(dy, weight, ends, None, not ctx.transposed, ctx.clear) if needs_x else None
    grads = []
    for needed, name, parameter, buffer in zip(
        (needs_weight, needs_bias), ("weight", "bias"), ctx.parameters, ctx.buffers
    ):
        if not needed:
            grads.append(None)
            continue
        out, continues = gradient_of(OP, parameter, name, buffer)
        pair = (dy, None) if name == "bias" else (x, dy) if ctx.transposed else (dy, x)
        fold_weight(*pair, slots, slot_ends, out, continues)
        grads.append(None if continues else out)
    return dx, grads[0], None, grads[1], *[None] * 6


_grouped = Op("grouped_linear", _launch, _backward, _fake, _save)


@once
def _checked(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> None:
    check(OP, optional=("bias",), x=x, weight=weight, bias=bias)
    check(OP, same_dtype=False, x=x, offsets=offsets)
    check_flag(OP, "transposed", transposed)
    order = "(experts, K, N)" if transposed else "(experts, N, K)"
    if weight.dim() != 3 or not len(weight):
        raise ValueError(f"{OP}: weight has shape {tuple(weight.shape)}, expected {order}, at least one expert")
    experts, N, K = (weight.mT if transposed else weight).shape
    if x.dim() != 2 or x.shape[1] != K:
        raise ValueError(
            f"{OP}: x has shape {tuple(x.shape)}, expected (rows, {K}) to match weight {tuple(weight.shape)}, {order}"
        )
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (experts,):
        raise ValueError(
            f"{OP}: offsets is {offsets.dtype} of shape {tuple(offsets.shape)}, expected torch.int32 ({experts},), the "
            "end of each expert's rows"
        )
    if bias is not None:
        check_shape(OP, "bias", bias, (experts, N), "the experts and rows of weight")


def _sequence_of_all(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Returns slots and their ends where nobody said which rows are whose: an expert's are one sequence."""
    begin = torch.nn.functional.pad(offsets[:-1], (1, 0))
    filled = (offsets - begin + (SLAB - 1)) // SLAB * SLAB
    ends = filled.cumsum(0).to(torch.int32)
    at = torch.arange(-(-(rows + (SLAB - 1) * min(rows, len(offsets))) // SLAB) * SLAB, device=offsets.device)
    expert = torch.searchsorted(ends, at, right=True).clamp(max=len(offsets) - 1)
    row = at - (ends - filled)[expert] + begin[expert]
    return torch.where(row < offsets[expert], row, -1).to(torch.int32), ends


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor | Groups, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """Each expert's rows of x (rows, K) times its weightᵀ, plus its bias: (rows, N) in the dtype of x.

    weight: (experts, N, K), or (experts, K, N) if `transposed`; bias: (experts, N). offsets: the end of each expert's
    rows, (experts,) int32, as torch._grouped_mm takes them, or what `group_by_expert` returned. Rows that follow the
    last expert's get zeros; with Groups, they may hold anything.

    A row of y and of dx has the bits of `linear(row, weight[e], bias[e])`. dW and dbias follow the sequences of Groups;
    without them an expert's rows are one sequence, so they depend on the split. bf16, fp16 or fp32, any strides.
    Raises TypeError and ValueError for dtypes, shapes or devices that do not match.
    """
    groups = offsets if isinstance(offsets, Groups) else None
    ends = offsets if groups is None else groups.offsets
    _checked(x, weight, ends, bias, transposed)
    if groups is not None and len(x) != len(groups.source):
        raise ValueError(f"{OP}: x has {len(x)} rows, expected {len(groups.source)}, those of the groups")

    def training() -> tuple:
        pairs = [(n, p) for n, p in (("weight", weight), ("bias", bias))]
        trained = [p is not None and p.requires_grad for _, p in pairs]
        if torch.compiler.is_compiling():
            buffers = [getattr(p, "main_grad", None) if t else None for (_, p), t in zip(pairs, trained)]
        else:
            for (name, p), t in zip(pairs, trained):
                _ = main_grad(OP, p, name) if t else None  # checked now
            buffers = [None, None]
        if not any(trained):
            return None, None, *buffers
        if groups is not None and groups.slot_offsets is not None:
            return groups.slots, groups.slot_offsets, *buffers
        if not torch.compiler.is_compiling() and continues_step(*[p for (_, p), t in zip(pairs, trained) if t]):
            warnings.warn(
                f"{OP}: another micro-batch without sequences: an expert's rows are taken for one, and gradients "
                "depend on the split; expected what group_by_expert(expert_ids, experts, layout) returns",
                stacklevel=3,
            )
        return *_sequence_of_all(ends, len(x)), *buffers

    return _grouped(x, weight, ends, bias, transposed, groups is None, training=training)


def routed_linear(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(x[t], weight[experts[t]], bias[experts[t]]) of each token: x (..., K), experts (...) integers, weight
    (experts, N, K), bias (experts, N); (..., N).

    Its gradients follow the token layout, as those of `linear` do. A token that names no expert, or is padding where
    the weight trains, gets zeros.
    """
    check("routed_linear", optional=("bias",), x=x, weight=weight, bias=bias)
    check("routed_linear", same_dtype=False, x=x, experts=experts)
    if weight.dim() != 3 or x.dim() < 1 or experts.shape != x.shape[:-1]:
        raise ValueError(
            f"routed_linear: x has shape {tuple(x.shape)}, experts {tuple(experts.shape)} and weight "
            f"{tuple(weight.shape)}, expected (..., K), (...) and (experts, N, K)"
        )
    trains = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (weight, bias))
    layout = layout_for("routed_linear", x.shape[:-1], trains) if trains else None
    groups = group_by_expert(experts.reshape(-1, 1), len(weight), layout)
    y = grouped_linear(dispatch(x.reshape(-1, x.shape[-1]), groups), weight, groups, bias)
    return combine(y, None, groups).view(*x.shape[:-1], y.shape[1])


def routed_sum(y: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Σ_j weights[t, j] · y[t, j] of each token in ascending experts[t, j]: y (..., k, features), weights and experts
    (..., k); (..., features) in y's dtype. Equal experts are added in the order of j."""
    check("routed_sum", y=y)
    check("routed_sum", same_dtype=False, y=y, weights=weights, experts=experts)
    check_dtype("routed_sum", "weights", weights)
    if y.dim() < 2 or experts.shape != y.shape[:-1] or weights.shape != y.shape[:-1]:
        raise ValueError(
            f"routed_sum: y has shape {tuple(y.shape)}, weights {tuple(weights.shape)} and experts "
            f"{tuple(experts.shape)}, expected (..., k, features), (..., k) and (..., k)"
        )
    k, width = y.shape[-2:]
    rank = experts.reshape(-1, k).argsort(dim=-1, stable=True).argsort(dim=-1)
    groups = group_by_expert(rank, k)
    return combine(dispatch(y.reshape(-1, k, width), groups), weights.reshape(-1, k), groups).view(*y.shape[:-2], width)
