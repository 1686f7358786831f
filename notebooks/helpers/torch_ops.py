"""PyTorch's own ops under the names of this package's, as a model of PyTorch is written: the fast calls, and nothing
that only an audit needs."""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from bi_kernels.audit.stock import add_rms_norm, embedding, linear, qk_norm, rms_norm, rope, swiglu, visible

__all__ = ["add_rms_norm", "embedding", "linear", "qk_norm", "rms_norm", "rope", "swiglu"]
__all__ += ["attention", "lm_head_logprob", "token_logprob"]
__all__ += ["combine", "dispatch", "gated", "group_by_expert", "grouped_linear", "softmax", "top_k"]
_TAKES = inspect.signature(varlen_attn).parameters
CAUSAL = {"is_causal": True} if "is_causal" in _TAKES else {"window_size": (-1, 0)}
GROUPED = {"enable_gqa": True} if "enable_gqa" in _TAKES else {}


def softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    return F.softmax(x, -1, dtype=dtype)


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return scores.topk(k, -1)


def gated(gate_up: Tensor) -> Tensor:
    return swiglu(*gate_up.chunk(2, -1))


def group_by_expert(ids: Tensor, experts: int, layout: object = None) -> tuple[Tensor, Tensor, int]:
    """Returns the choices sorted by expert, the end of each expert's, and the choices of a token."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=ids.device)
    return order, torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True), ids.shape[-1]


def dispatch(x: Tensor, groups: tuple) -> Tensor:
    order, _, k = groups
    return x.flatten(0, -2)[order // k]


def grouped_linear(x: Tensor, weight: Tensor, groups: tuple) -> Tensor:
    return torch._grouped_mm(x, weight.mT, offs=groups[1])


def combine(y: Tensor, weights: Tensor, groups: tuple) -> Tensor:
    """Returns the weighted sums by an index_add, as stock mixtures compute them."""
    order, _, k = groups
    out = y.new_zeros(weights.shape[:-1].numel(), y.shape[1])
    out.index_add_(0, order // k, y * weights.flatten()[order, None])
    return out.view(*weights.shape[:-1], -1)


def token_logprob(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, None]:
    """Returns the logprob by F.cross_entropy in fp32, and no entropy."""
    rows = logits.flatten(0, -2).float()
    loss = F.cross_entropy(rows if temperature == 1 else rows / temperature, targets.flatten(), reduction="none")
    return -loss.view(targets.shape), None


def lm_head_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, None]:
    return token_logprob(F.linear(hidden, weight), targets, temperature)


def attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, **where) -> tuple[Tensor, None]:
    """Returns causal attention: SDPA of packed sequences one by one, or of a batch, with a mask where lengths are
    given; flash attention of all packed sequences at once where `longest` is given."""
    if longest := where.get("longest"):
        group = 1 if GROUPED else q.shape[-2] // k.shape[-2]
        k, v = (t.repeat_interleave(group, -2) if group > 1 else t for t in (k, v))
        ends = where["cu_seqlens_q"]
        return varlen_attn(q, k, v, ends, ends, longest, longest, **CAUSAL, **GROUPED), None
    if (ends := where.get("cu_seqlens_q")) is not None:
        ends = ends.tolist()
        parts = (t[None, a:b] for a, b in zip(ends, ends[1:]) if a < b for t in (q, k, v))
        return torch.cat([attention(*qkv, window=window)[0][0] for qkv in zip(*[parts] * 3)]), None
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    if not where and window is None:
        out = F.scaled_dot_product_attention(*heads, is_causal=q.shape[1] > 1, enable_gqa=True)
        return out.transpose(1, 2), None
    mask = visible(q, k, window=window, **where)
    blind = ~mask.any(-1, keepdim=True)  # padding: of no key, SDPA's gradient is NaN
    out = F.scaled_dot_product_attention(*heads, attn_mask=mask | blind, enable_gqa=True)
    return out.masked_fill(blind, 0).transpose(1, 2), None
