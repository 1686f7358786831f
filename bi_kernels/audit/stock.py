"""Holds the candidate `torch`: stock PyTorch under the names and signatures of `bi_kernels`."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bi_kernels.ops.rope import RopeTable, packed_positions

silu = F.silu
gelu = F.gelu
linear = F.linear
matmul = torch.matmul
add = torch.add
bias_add = torch.add
mask_fill = torch.masked_fill
cast = Tensor.to

_read = WeakIdKeyDictionary()  # (version, values) of tensors that say where sequences end


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + offset) * (gate * torch.sigmoid(gate * alpha))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


def rope(
    x: Tensor,
    table: RopeTable,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotates as Hugging Face's Llama does: cos and sin rounded to x's dtype, x cos + rotate_half(x) sin in it."""
    if positions is None:
        positions = packed_positions(cu_seqlens, x.shape[0])
    cos, sin = (t[positions].to(x.dtype)[..., None, :] for t in table)
    x, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    x1, x2 = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    if weight is None or not offset and weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return (F.rms_norm(x.float(), weight.shape, None, eps) * (offset + weight.float())).to(x.dtype)  # as Gemma's


qk_norm = rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, eps), h


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, heads: bool = False
) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def scaled(x: Tensor, weight: Tensor, features: int | None = None) -> Tensor:
    return x * weight


def shifted(x: Tensor, weight: Tensor, features: int | None = None) -> Tensor:
    return x + weight


def embedding(ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
    if weight.is_cuda and not weight.shape[1]:
        raise NotImplementedError("torch's gradient of (vocab, 0) reads address 0 on a GPU: pytorch#189668")
    return F.embedding(ids, weight, padding_id)


def routed_linear(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies the tokens of each expert, one expert after the other."""
    rows, ids = x.reshape(-1, x.shape[-1]), experts.flatten()
    y = rows.new_zeros(len(rows), weight.shape[1])
    for e in range(len(weight)):
        at = (ids == e).nonzero().flatten()
        y = y.index_put((at,), F.linear(rows[at], weight[e], None if bias is None else bias[e]))
    return y.view(*x.shape[:-1], weight.shape[1])


def routed_sum(y: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    return (y * weights[..., None]).sum(-2)


def token_logprob(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    logp = F.log_softmax(logits.float() / temperature, -1)
    ignored = targets == ignore_index
    chosen = logp.gather(-1, targets.masked_fill(ignored, 0)[..., None])[..., 0]
    return chosen.masked_fill(ignored, 0), -(logp.exp() * logp).sum(-1).masked_fill(ignored, 0)


def lm_head_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    return token_logprob(F.linear(hidden, weight), targets, temperature, ignore_index)


def visible(
    q: Tensor,
    k: Tensor,
    lengths_q: Tensor | None = None,
    lengths_k: Tensor | None = None,
    left_padded: bool = False,
    window: int | None = None,
) -> Tensor:
    """Returns which keys each query of a padded batch sees: (B, 1, L, keys) bool."""
    L, S, device = q.shape[1], k.shape[1], q.device
    length = lambda lengths, width: torch.full((len(q),), width, device=device) if lengths is None else lengths
    length_q, length_k = length(lengths_q, L)[:, None, None], length(lengths_k, S)[:, None, None]
    query, key = torch.arange(L, device=device)[:, None], torch.arange(S, device=device)
    if left_padded:
        query, key = query - (L - length_q), key - (S - length_k)
    position = query + length_k - length_q
    seen = (key >= 0) & (key < length_k) & (query >= 0) & (query < length_q) & (key <= position)
    if window:
        seen &= key > position - window
    return seen[:, None]


def _numbers(t: Tensor) -> list[int]:
    """Returns a tensor's values, read once: while a CUDA graph is captured nothing can be."""
    if t.is_inference():
        return t.tolist()
    if _read.get(t, (-1,))[0] != t._version:
        _read[t] = t._version, t.tolist()
    return _read[t][1]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q=None, cu_seqlens_k=None, window: int | None = None, **where
) -> tuple[Tensor, Tensor]:
    """Attends to packed sequences one by one, and to a padded batch in one call, with a mask; where: see `visible`.

    The LSE is a product and a logsumexp of its own.
    """
    if cu_seqlens_q is not None:
        ends = _numbers(cu_seqlens_q)
        of_keys = ends if cu_seqlens_k is None else _numbers(cu_seqlens_k)
        each = zip(ends, ends[1:], of_keys, of_keys[1:])
        parts = [attention(q[None, a:b], k[None, c:d], v[None, c:d], window=window) for a, b, c, d in each if a < b]
        return tuple(torch.cat([p[i][0] for p in parts]) for i in (0, 1))
    L, S = q.shape[1], k.shape[1]
    seen = visible(q, k, window=window, **where)
    heads = lambda t: t.transpose(1, 2)
    how = {"attn_mask": seen} if where or window or L not in (1, S) else {"is_causal": L > 1}
    out = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), enable_gqa=True, **how)
    wide = heads(k).float().repeat_interleave(q.shape[2] // k.shape[2], 1).mT
    lse = [
        (some @ wide * q.shape[-1] ** -0.5).masked_fill(~there, -torch.inf).logsumexp(-1)
        for some, there in zip(heads(q).float().split(512, 2), seen.split(512, 2))
    ]  # else their scores fill the memory
    return heads(out.masked_fill(~seen.any(-1)[..., None], 0)), heads(torch.cat(lse, -1))


def log_softmax(logits: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    return F.log_softmax(logits.float(), -1).to(out_dtype)


def softmax(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return F.softmax(x, -1, dtype=out_dtype)


def row_sum(x: Tensor, scale: float = 1.0, out_dtype: torch.dtype | None = None) -> Tensor:
    return (x.float().sum(-1) * scale).to(out_dtype or x.dtype)
