"""A mixture's experts as Transformers' experts interface calls them, under the layout of the model's call."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

import bi_kernels as bi
from bi_kernels.integrations.transformers.gradients import Folds
from bi_kernels.integrations.transformers.layout import current
from bi_kernels.tokens import dense, layout_for

OP = "experts"
CLOSE = 2.0**-16  # of the largest number of a gate's result, in fp32
PAD_FROM = 128  # rows of an (expert, sequence) on average, from which on slabs are filled up once, before the products
_gates: dict[tuple, Callable | None] = {}  # what takes the place of a gate, by kinds of modules


def _refuse_trained_parts(module: nn.Module) -> None:
    """Raises ValueError for parameters between the experts' products: their gradients would be summed over rows that
    are sorted by expert."""
    for name, part in module.named_children():
        if any(p.requires_grad for p in part.parameters()):
            raise ValueError(
                f"experts: {type(module).__name__}.{name} has parameters that train, expected them frozen: their "
                "gradients would depend on the batch"
            )


def _activated(module: nn.Module, up: Tensor) -> Tensor:
    """Applies the module's gate, or its activation where it has none: by our op where one computes the same."""
    plain = module._apply_gate if getattr(module, "has_gate", True) else module.act_fn
    act = getattr(module, "act_fn", None)
    kind = type(module), type(act), getattr(getattr(act, "act", None), "__name__", ""), _numbers(module)
    if kind not in _gates:
        _gates[kind] = _recognised(module, plain, up.device)
    ours = _gates[kind]
    return plain(up) if ours is None else ours(up)


def _numbers(module: nn.Module) -> tuple[float, ...]:
    """Returns the numbers of a module that may be a gate's limit or its alpha."""
    return tuple(v for k, v in vars(module).items() if isinstance(v, float) and ("limit" in k or "alpha" in k))


def _candidates(gated: bool, numbers: tuple[float, ...]) -> Iterator[Callable]:
    """Yields what our ops make of an expert's first product."""
    if not gated:
        yield from (bi.silu, bi.gelu, partial(bi.gelu, approximate="tanh"))
        return
    gates = [{"gate": "swiglu"}, {"gate": "geglu"}, {"gate": "geglu", "approximate": "tanh"}]
    for limit, alpha, offset in product(numbers, (1.0, *numbers), (0.0, 1.0)):
        if limit > 0:
            gates.append({"gate": "clamped_swiglu", "limit": limit, "alpha": alpha, "offset": offset})
    for gate, interleaved in product(gates, (False, True)):
        yield partial(bi.gated, **gate, interleaved=interleaved)


def _recognised(module: nn.Module, plain: Callable, device: torch.device) -> Callable | None:
    """Returns our op that computes what the module's own code does on random numbers; None where none does."""
    up = 8 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            expected = plain(up)
        except (RuntimeError, TypeError):  # whatever it is, it takes none of these numbers
            return None
        for candidate in _candidates(getattr(module, "has_gate", True), _numbers(module)):
            found = candidate(up)
            if found.shape == expected.shape and (found - expected).abs().max() <= CLOSE * expected.abs().max():
                return candidate
    return None


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns the experts' weighted sum for each token: hidden_states (tokens, hidden), top_k_index and top_k_weights
    (tokens, k); (tokens, hidden) in the dtype of hidden_states.

    A choice outside 0 … num_experts − 1 adds nothing. Padding gets zeros where the experts train.
    """
    call = current()
    folds, alone = (Folds(), True) if call is None else (call.folds, False)
    up_name = "gate_up_proj" if getattr(self, "has_gate", True) else "up_proj"
    names, device = (up_name, "down_proj"), hidden_states.device.type
    dtype = getattr(self, up_name).dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    weights = [folds.cast(getattr(self, name), dtype) for name in names]
    biased = getattr(self, "has_bias", False)
    biases = [folds.cast(getattr(self, f"{name}_bias"), dtype) if biased else None for name in names]
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in (*weights, *biases) if p is not None)
    layout, tokens = None, len(hidden_states)
    if trains:
        _refuse_trained_parts(self)
        known = call is None or call.layout is None or call.layout.rows == tokens
        with nullcontext() if known else dense(1, tokens):
            layout = layout_for(OP, hidden_states.shape[:-1])
    how = {"transposed": getattr(self, "is_transposed", False)}
    segments = 0 if layout is None else min(self.num_experts * len(layout.lengths), top_k_index.numel())
    padded = layout is not None and PAD_FROM * segments <= top_k_index.numel()
    groups = bi.group_by_expert(top_k_index, self.num_experts, layout, padded=padded)
    x = bi.dispatch(hidden_states.to(dtype), groups)
    up = bi.grouped_linear(x, weights[0], groups, biases[0], **how)
    y = bi.grouped_linear(_activated(self, up).to(dtype), weights[1], groups, biases[1], **how)
    if getattr(self, "has_post_expert_norm", False):
        y = self.post_expert_norm(y)
    out = bi.combine(y, top_k_weights, groups).to(hidden_states.dtype)
    if alone:
        folds.attach(out)
    return out
