"""A decoder of this package's ops, to read and to copy: a token has the same logprob, and a step the same gradients,
however its sequences are laid out, cut into micro-batches, prefilled in chunks or decoded.

    model = Decoder(CONFIGS["tiny"], device="cuda")
    rows = packed(lengths, device)                      # or padded(lengths, width, device)
    logprob, entropy = model.logprobs(ids, targets, rows)
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bi_kernels as bi
from bi_kernels.contract import CONTRACT, EPS, SHAPES
from bi_kernels.model.cache import Cache, Rows


@dataclass(frozen=True)
class Config:
    """A decoder's sizes. heads, kv_heads: of queries and of keys; mlp: features between gate and down.

    experts: of a mixture, of which a router gives each token experts_per_token, with expert_mlp features each, and no
    mlp. norm_topk: a token's weights are divided by their sum, as in Qwen3-MoE. Raises ValueError for other sizes."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int = 0
    theta: float = 1e6  # of RoPE
    eps: float = EPS  # of every norm
    qk_norm: bool = True
    qkv_bias: bool = False
    tied: bool = False  # the LM head's weight is the embedding's
    window: int | None = None  # keys that a query sees, itself included
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp: int = 0
    norm_topk: bool = True

    def __post_init__(self):
        if self.experts and not (1 <= self.experts_per_token <= self.experts and self.expert_mlp):
            raise ValueError(
                f"Config: experts_per_token is {self.experts_per_token} and expert_mlp {self.expert_mlp}, expected 1 "
                f"to {self.experts}, the experts, and at least 1"
            )
        if bool(self.experts) == bool(self.mlp):
            raise ValueError(
                f"Config: mlp is {self.mlp} and experts {self.experts}, expected one of them, and 0 of the other"
            )


def _config(shapes: str = "", **sizes) -> Config:
    named = (
        {k: SHAPES[shapes][k] for k in ("vocab", "hidden", "heads", "kv_heads", "head_dim", "mlp")} if shapes else {}
    )
    return Config(**named, **sizes)


CONFIGS = {name: _config(**sizes) for name, sizes in CONTRACT["models"].items()}


def _normed(ops, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the RMSNorm of x + residual, and x + residual; of the residual alone where there is no x yet."""
    return (ops.rms_norm(residual, weight, eps), residual) if x is None else ops.add_rms_norm(x, residual, weight, eps)


class Layer(nn.Module):
    """Attention, and SwiGLU or a mixture of experts, each behind an RMSNorm and beside a residual."""

    def __init__(self, config: Config, make: Callable[..., nn.Parameter], ops):
        super().__init__()
        self.config, self.ops, c = config, ops, config
        width, kv_width, D = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.head_dim
        self.norm, self.mlp_norm = make(c.hidden), make(c.hidden)
        self.q = make(width, c.hidden, cut=D)
        self.k, self.v = (make(kv_width, c.hidden, cut=D, keys=True) for _ in range(2))
        self.q_bias = make(width, cut=D) if c.qkv_bias else None
        self.k_bias, self.v_bias = (make(kv_width, cut=D, keys=True) if c.qkv_bias else None for _ in range(2))
        self.q_norm, self.k_norm = (make(D), make(D)) if c.qk_norm else (None, None)
        self.o = make(c.hidden, width, cut=1)
        if c.experts:
            self.router = make(c.experts, c.hidden)
            self.gate_up = make(c.experts, 2 * c.expert_mlp, c.hidden, cut=1)
            self.down = make(c.experts, c.hidden, c.expert_mlp, cut=1)
        else:
            self.gate, self.up = make(c.mlp, c.hidden, cut=1), make(c.mlp, c.hidden, cut=1)
            self.down = make(c.hidden, c.mlp, cut=1)

    def forward(
        self, x: Tensor | None, residual: Tensor, table: bi.RopeTable, rows: Rows, cache: Cache | None, number: int
    ):
        """Adds x, what the layer before left to add, to the residual; returns what is to be added next, and that."""
        c, ops = self.config, self.ops
        keys = ops.keys(c.kv_heads) if hasattr(ops, "keys") else ops
        enter = getattr(ops, "enter", lambda h: h)  # of what products alone are given
        h, residual = _normed(ops, x, residual, self.norm, c.eps)
        h = enter(h)
        q, k, v = (
            of.linear(h, weight, bias).unflatten(-1, (-1, c.head_dim))
            for of, weight, bias in (
                (ops, self.q, self.q_bias),
                (keys, self.k, self.k_bias),
                (keys, self.v, self.v_bias),
            )
        )
        if c.qk_norm:
            q, k = ops.qk_norm(q, self.q_norm, c.eps), keys.qk_norm(k, self.k_norm, c.eps)
        q, k = ops.rope(q, table, rows.positions), ops.rope(k, table, rows.positions)
        if cache is not None:
            k, v = cache.put(number, k, v, rows)
        out, _ = keys.attention(q, k, v, window=c.window, **rows.attend)
        h, residual = _normed(ops, ops.linear(out.flatten(-2), self.o), residual, self.mlp_norm, c.eps)
        h = enter(h)
        if c.experts:
            return self.mixture(h, rows), residual
        return ops.linear(ops.swiglu(ops.linear(h, self.gate), ops.linear(h, self.up)), self.down), residual

    def mixture(self, h: Tensor, rows: Rows) -> Tensor:
        """Returns the weighted sum of the experts that the router gives each token of h."""
        c, ops = self.config, self.ops
        scores = ops.linear(h, self.router)
        if c.norm_topk:  # the softmax of all, divided by its sum over the chosen, is the softmax of these
            scores, ids = ops.top_k(scores, c.experts_per_token)
            weights = ops.softmax(scores, torch.float32)
        else:
            weights, ids = ops.top_k(ops.softmax(scores, torch.float32), c.experts_per_token)
        groups = ops.group_by_expert(ids, c.experts, rows.layout if torch.is_grad_enabled() else None)
        up = ops.grouped_linear(ops.dispatch(h, groups), self.gate_up, groups)
        y = ops.grouped_linear(ops.gated(up), self.down, groups)
        return ops.combine(y, weights.to(y.dtype), groups)


class Decoder(nn.Module):
    """A decoder with random weights of a seed. longest: positions that RoPE's table holds; checkpointing: layers are
    computed again in the backward; keep_bytes: of logits that are kept for it; neither changes a bit. ops: bi_kernels,
    or whatever has ops of these names; a TensorParallel or ExpertParallel, which takes this rank's rows of weights."""

    def __init__(
        self,
        config: Config,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        longest: int = 4096,
        checkpointing: bool = False,
        keep_bytes: float = 0,
        ops=bi,
    ):
        super().__init__()
        generator = torch.Generator(device).manual_seed(seed)
        share = getattr(ops, "share", lambda weight, together, keys: nn.Parameter(weight))
        if agree := getattr(ops, "agree", None):
            agree({"config": config, "dtype": dtype, "seed": seed})

        def make(*shape: int, cut: int | None = 0, keys: bool = False) -> nn.Parameter:
            """cut: rows that stay together where ranks share a weight; 0: every rank has it, None: a vocabulary; keys:
            heads that may be fewer than the ranks."""
            w = torch.randn(shape, generator=generator, device=device)
            w = (w * shape[-1] ** -0.5 if len(shape) > 1 else 1 + w / 10).to(dtype)
            return nn.Parameter(w) if cut == 0 else share(w, cut, keys)

        self.config, self.checkpointing, self.ops = config, checkpointing, ops
        self.kept = {"keep_bytes": keep_bytes} if keep_bytes else {}
        self.embedding = make(config.vocab, config.hidden, cut=None)
        self.layers = nn.ModuleList(Layer(config, make, ops) for _ in range(config.layers))
        self.last_norm = make(config.hidden)
        self.lm_head = self.embedding if config.tied else make(config.vocab, config.hidden, cut=None)
        self.table = bi.rope_table(longest, config.head_dim, config.theta, device)

    @property
    def tied(self) -> list[nn.Parameter]:
        """Lists the parameters that MainGrads is told are tied."""
        return [self.embedding] if self.config.tied else []

    @property
    def key_heads(self) -> int:
        """Tells how many key heads a cache of this rank holds."""
        return getattr(self.ops, "key_heads", lambda heads: heads)(self.config.kv_heads)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits (…, vocab) of what `forward` returned."""
        return getattr(self.ops, "logits", self.ops.linear)(hidden, self.lm_head)

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
            cache.advance(rows)
        leave = getattr(self.ops, "leave", lambda h: h)
        return leave(_normed(self.ops, x, residual, self.last_norm, self.config.eps)[0])

    def logprobs(
        self, ids: Tensor, targets: Tensor, rows: Rows, cache: Cache | None = None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Returns each target's logprob, and the entropy, (…) fp32 both; a target of -100, as padding's must be, has 0.

        The ops keep rows.layout for their backward, which may be called anywhere."""
        with rows.layout or nullcontext():
            return self.ops.lm_head_logprob(self(ids, rows, cache), self.lm_head, targets, temperature, **self.kept)
