"""The candidate `torch`: stock PyTorch under the names and signatures of `bi_kernels`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bi_kernels.rotary import RopeTable, packed_positions

silu = F.silu
gelu = F.gelu
linear = F.linear
matmul = torch.matmul
add = torch.add
bias_add = torch.add


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


def mask_fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return x.masked_fill(mask, value)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def rope(x: Tensor, table: RopeTable, positions: Tensor | None = None, cu_seqlens: Tensor | None = None,
         interleaved: bool = False) -> Tensor:
    """As Hugging Face's Llama does it: cos and sin rounded to x's dtype, x cos + rotate_half(x) sin in that dtype."""
    if positions is None:
        positions = packed_positions(cu_seqlens, x.shape[0])
    cos, sin = (t[positions].to(x.dtype)[..., None, :] for t in table)
    if interleaved:
        x1, x2 = x[..., ::2], x[..., 1::2]
        return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


qk_norm = rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, eps), h


def embedding(ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
    return F.embedding(ids, weight, padding_id)


def token_logprob(logits: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    logp = F.log_softmax(logits.float() / temperature, -1)
    ignored = targets == ignore_index
    chosen = logp.gather(-1, targets.masked_fill(ignored, 0)[..., None])[..., 0]
    return chosen.masked_fill(ignored, 0), -(logp.exp() * logp).sum(-1).masked_fill(ignored, 0)


def lm_head_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100
                    ) -> tuple[Tensor, Tensor]:
    return token_logprob(F.linear(hidden, weight), targets, temperature, ignore_index)


def log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(logits.float(), -1)
