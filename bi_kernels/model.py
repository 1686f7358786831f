"""A decoder of this package's ops, to read and to copy: a token has the same logprob, and a step the same gradients,
however its sequences are laid out, cut into micro-batches, prefilled in chunks or decoded.

    model = Decoder(CONFIGS["tiny"], device="cuda")
    rows = packed(lengths, device)                      # or padded(lengths, width, device)
    logprob, entropy = model.logprobs(ids, targets, rows)
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bi_kernels as bi
from bi_kernels.contract import CONTRACT, EPS, SHAPES
from bi_kernels.tokens import TokenLayout


@dataclass(frozen=True)
class Config:
    """A decoder's sizes. heads, kv_heads: of queries and of keys; mlp: features between gate and down."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    theta: float = 1e6  # of RoPE
    eps: float = EPS  # of every norm
    qk_norm: bool = True
    qkv_bias: bool = False
    tied: bool = False  # the LM head's weight is the embedding's
    window: int | None = None  # keys that a query sees, itself included


def _config(shapes: str = "", **sizes) -> Config:
    named = (
        {k: SHAPES[shapes][k] for k in ("vocab", "hidden", "heads", "kv_heads", "head_dim", "mlp")} if shapes else {}
    )
    return Config(**named, **sizes)


CONFIGS = {name: _config(**sizes) for name, sizes in CONTRACT["models"].items()}


class Rows(NamedTuple):
    """Where the sequences of a call lie: what its ops are told."""

    positions: Tensor  # like ids: of each token in its sequence
    layout: TokenLayout | None  # of the gradients; None where none is wanted
    attend: dict  # keyword arguments of attention


def packed(lengths: Sequence[int], device: torch.device | str, order: Sequence[int] | None = None) -> Rows:
    """Lays sequences one after another, ids (tokens,); order: the step's number of each, as TokenLayout has it."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    there = ends.to(device, torch.int32)
    return Rows(bi.packed_positions(there, int(ends[-1])), TokenLayout.packed(ends, order), {"cu_seqlens_q": there})


def padded(
    lengths: Sequence[int],
    width: int,
    device: torch.device | str,
    left: bool = False,
    order: Sequence[int] | None = None,
) -> Rows:
    """Lays each sequence at the start of its row of ids (sequences, width), or at its end."""
    layout, counts = TokenLayout.padded(lengths, width, left, order), torch.tensor(lengths, device=device)
    positions = torch.arange(width, device=device).expand(len(lengths), -1)
    positions = (positions - (width - counts)[:, None]).clamp(min=0) if left else positions
    attend = {"lengths_q": counts, "lengths_k": counts, "left_padded": left}
    return Rows(positions.contiguous(), layout, attend)


class Cache:
    """Keys and values of the tokens that were computed before, one row a sequence; its last place takes padding's."""

    def __init__(self, config: Config, sequences: int, capacity: int, like: Tensor):
        shape = config.layers, sequences, capacity + 1, config.kv_heads, config.head_dim
        self.k, self.v = like.new_zeros(shape), like.new_zeros(shape)
        self.lengths = torch.zeros(sequences, dtype=torch.int64, device=like.device)
        self.capacity = capacity

    def rows(self, width: int, counts: Tensor | None = None) -> Rows:
        """Says where the next tokens of each sequence lie: ids (sequences, width), of which counts (sequences,) are
        tokens, all unless given. Raises ValueError where the cache is too small."""
        counts = torch.full_like(self.lengths, width) if counts is None else counts
        if width and int((self.lengths + counts).max()) > self.capacity:
            raise ValueError(f"Cache: {int((self.lengths + counts).max())} tokens, expected at most {self.capacity}")
        positions = self.lengths[:, None] + torch.arange(width, device=counts.device)
        return Rows(positions, None, {"lengths_q": counts, "lengths_k": self.lengths + counts})

    def put(self, layer: int, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values; returns all of the layer's."""
        there = torch.arange(k.shape[1], device=k.device) < rows.attend["lengths_q"][:, None]
        at = torch.where(there, rows.positions, self.capacity)
        sequence = torch.arange(len(k), device=k.device)[:, None]
        self.k[layer][sequence, at], self.v[layer][sequence, at] = k, v
        return self.k[layer], self.v[layer]


def _normed(ops, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the RMSNorm of x + residual, and x + residual; of the residual alone where there is no x yet."""
    return (ops.rms_norm(residual, weight, eps), residual) if x is None else ops.add_rms_norm(x, residual, weight, eps)


class Layer(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and beside a residual."""

    def __init__(self, config: Config, make: Callable[..., nn.Parameter], ops):
        super().__init__()
        self.config, self.ops, c = config, ops, config
        width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.norm, self.mlp_norm = make(c.hidden), make(c.hidden)
        self.q, self.k, self.v = make(width, c.hidden), make(kv_width, c.hidden), make(kv_width, c.hidden)
        self.q_bias, self.k_bias, self.v_bias = (
            (make(width), make(kv_width), make(kv_width)) if c.qkv_bias else (None, None, None)
        )
        self.q_norm, self.k_norm = (make(c.head_dim), make(c.head_dim)) if c.qk_norm else (None, None)
        self.o = make(c.hidden, width)
        self.gate, self.up, self.down = make(c.mlp, c.hidden), make(c.mlp, c.hidden), make(c.hidden, c.mlp)

    def forward(
        self, x: Tensor | None, residual: Tensor, table: bi.RopeTable, rows: Rows, cache: Cache | None, number: int
    ):
        """Adds x, what the layer before left to add, to the residual; returns what is to be added next, and that."""
        c, ops = self.config, self.ops
        h, residual = _normed(ops, x, residual, self.norm, c.eps)
        q, k, v = (
            ops.linear(h, weight, bias).unflatten(-1, (-1, c.head_dim))
            for weight, bias in ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
        )
        if c.qk_norm:
            q, k = ops.qk_norm(q, self.q_norm, c.eps), ops.qk_norm(k, self.k_norm, c.eps)
        q, k = ops.rope(q, table, rows.positions), ops.rope(k, table, rows.positions)
        if cache is not None:
            k, v = cache.put(number, k, v, rows)
        out, _ = ops.attention(q, k, v, window=c.window, **rows.attend)
        h, residual = _normed(ops, ops.linear(out.flatten(-2), self.o), residual, self.mlp_norm, c.eps)
        return ops.linear(ops.swiglu(ops.linear(h, self.gate), ops.linear(h, self.up)), self.down), residual


class Decoder(nn.Module):
    """A decoder with random weights of a seed. longest: positions that RoPE's table holds; checkpointing: layers are
    computed again in the backward, which changes no bit; ops: bi_kernels, or whatever has ops of these names."""

    def __init__(
        self,
        config: Config,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        longest: int = 4096,
        checkpointing: bool = False,
        ops=bi,
    ):
        super().__init__()
        generator = torch.Generator(device).manual_seed(seed)

        def make(*shape: int) -> nn.Parameter:
            w = torch.randn(shape, generator=generator, device=device)
            return nn.Parameter((w * shape[-1] ** -0.5 if len(shape) > 1 else 1 + w / 10).to(dtype))

        self.config, self.checkpointing, self.ops = config, checkpointing, ops
        self.embedding = make(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, make, ops) for _ in range(config.layers))
        self.last_norm = make(config.hidden)
        self.lm_head = self.embedding if config.tied else make(config.vocab, config.hidden)
        self.table = bi.rope_table(longest, config.head_dim, config.theta, device)

    @property
    def tied(self) -> list[nn.Parameter]:
        """Lists the parameters that MainGrads is told are tied."""
        return [self.embedding] if self.config.tied else []

    def forward(self, ids: Tensor, rows: Rows, cache: Cache | None = None) -> Tensor:
        """Returns what the LM head is given, (…, hidden) of ids (…). With a cache, ids are each sequence's next."""
        x, residual = None, self.ops.embedding(ids, self.embedding)
        for number, layer in enumerate(self.layers):
            given = x, residual, self.table, rows, cache, number
            if self.checkpointing and torch.is_grad_enabled():
                x, residual = checkpoint(rows.layout.within(layer), *given, use_reentrant=False)
            else:
                x, residual = layer(*given)
        if cache is not None:
            cache.lengths += rows.attend["lengths_q"]
        return _normed(self.ops, x, residual, self.last_norm, self.config.eps)[0]

    def logprobs(
        self, ids: Tensor, targets: Tensor, rows: Rows, cache: Cache | None = None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Returns each target's logprob, and the entropy, (…) fp32 both; a target of -100, as padding's must be, has 0.

        The ops keep rows.layout for their backward, which may be called anywhere."""
        with rows.layout or nullcontext():
            return self.ops.lm_head_logprob(self(ids, rows, cache), self.lm_head, targets, temperature)


def policy_loss(
    logprob: Tensor, old: Tensor, advantages: Tensor, active: Tensor, denominator: int, clip: float = 0.2
) -> Tensor:
    """Returns GRPO's clipped loss of the tokens of one micro-batch; Shao et al., arXiv 2402.03300, without its KL term.

    logprob, old, advantages: (…) fp32 of each token, under the policy and under that which sampled it; active: (…)
    bool, the tokens that count; denominator: how many of them the whole step has, so that no split changes a weight.
    """
    ratio = (logprob - old).exp()
    gained = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -gained.masked_fill(~active, 0).sum() / denominator
