"""A corpus of third-party ops, to audit the auditor by.

torch's functionals and modules, what torch.compile makes of them, attention backends, Hugging Face's modules, and ops of Liger, FlagGems and
torchao where they are installed.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import bi_kernels

SMALL = dict(rows=20, hidden=64, mlp=96, vocab=200, heads=4, head_dim=16, length=24, batch=4)
LARGE = dict(rows=300, hidden=4096, mlp=12288, vocab=32000, heads=16, head_dim=128, length=256, batch=8)


@dataclass
class Entry:
    """A callable, its inputs, and options of `audit`."""

    function: Callable
    inputs: tuple
    options: dict = field(default_factory=dict)


class Part(torch.nn.Module):
    """Returns the part of what a module returns that is judged."""

    def __init__(self, module: torch.nn.Module, part: Callable):
        super().__init__()
        self.module, self.part = module, part

    def forward(self, *inputs):
        return self.part(self.module(*inputs))


def attention(backend: SDPBackend) -> Callable:
    def scaled_dot_product_attention(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return scaled_dot_product_attention


def corpus(device: torch.device, size: dict) -> Iterator[tuple[str, Callable[[], Entry]]]:
    """Yields (name, what makes it) of every callable; making one raises where its package is missing."""
    g = torch.Generator(device).manual_seed(0)
    fp32 = torch.float32
    rows, hidden, mlp, vocab, heads, dim, length, batch = size.values()

    # An input is drawn when its callable is made.
    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Callable[[], torch.Tensor]:
        return lambda: torch.randn(shape, generator=g, device=device).to(dtype) * scale

    integers = lambda top, *shape: lambda: torch.randint(0, top, shape, generator=g, device=device)
    weight = lambda n, k, **of: draw(n, k, scale=k**-0.5, **of)
    module = lambda m, dtype=torch.bfloat16: m.to(device=device, dtype=dtype)

    def loaded(name: str, package: str, build: Callable, *inputs: Callable, **options):
        """Returns the callable that `build` makes of a module that may not be installed."""
        return name, lambda: Entry(build(importlib.import_module(package)), tuple(i() for i in inputs), options)

    def plain(name: str, function: Callable, *inputs: Callable):
        return name, lambda: Entry(function, tuple(i() for i in inputs))

    x, square, scales = draw(rows, hidden), weight(hidden, hidden), draw(hidden)
    x32, stack, states = draw(rows, hidden, dtype=fp32), draw(batch, length, hidden), draw(batch, length, heads * dim)
    rms_norm = lambda x, w: F.rms_norm(x, w.shape, w)
    yield plain("F.linear, square, bf16", F.linear, x, square)
    yield plain("F.linear, down, bf16", F.linear, draw(rows, mlp), weight(hidden, mlp))
    yield plain("F.linear, up, bf16", F.linear, x, weight(2 * mlp, hidden))
    yield plain("F.linear, square, fp32", F.linear, x32, weight(hidden, hidden, dtype=fp32))
    yield plain("torch.matmul of a stack", torch.matmul, stack, square)
    yield plain("torch.bmm", torch.bmm, draw(batch, length, dim), draw(batch, dim, length))
    einsum = lambda x, w: torch.einsum("bshd,hde->bshe", x, w)
    yield plain("torch.einsum over heads", einsum, draw(batch, length, heads, dim), draw(heads, dim, dim))
    for f in (F.silu, F.gelu, F.relu, F.softplus):
        yield plain(f"F.{f.__name__}", f, x)
    for f in (F.softmax, F.log_softmax):
        yield plain(f"F.{f.__name__}", lambda x, f=f: f(x, -1), x)
    yield plain("torch.logsumexp", lambda x: torch.logsumexp(x, -1), draw(rows, vocab, dtype=fp32))
    yield plain("torch.sum", lambda x: x.sum(-1), x)
    yield plain("torch.cumsum", lambda x: x.cumsum(-1), x32)
    yield plain("torch.topk", lambda x: x.topk(8, -1).values, x)
    yield plain("F.layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b), x, scales, scales)
    yield plain("F.rms_norm", rms_norm, x, scales)
    yield plain("F.group_norm", lambda x: F.group_norm(x, 8), x)
    yield plain("F.embedding", F.embedding, integers(vocab, rows), draw(vocab, hidden))
    cross_entropy = lambda x, t: F.cross_entropy(x.float(), t, reduction="none")
    yield plain("F.cross_entropy", cross_entropy, draw(rows, vocab), integers(vocab, rows))
    yield plain("F.conv1d", F.conv1d, draw(batch, dim, length), draw(dim, dim, 4))
    yield plain("sampling by softmax", lambda x: torch.multinomial(x.float().softmax(-1), 1), x)
    yield plain("a batch's mean taken off", lambda x: x - x.mean(0), x)
    yield plain("nn.BatchNorm1d, training", module(torch.nn.BatchNorm1d(hidden)), x)
    yield plain("nn.BatchNorm1d, eval", module(torch.nn.BatchNorm1d(hidden)).eval(), x)
    yield plain("nn.Dropout, training", torch.nn.Dropout(0.1), x)
    yield plain("nn.Linear", module(torch.nn.Linear(hidden, hidden)), x)
    lstm = Part(module(torch.nn.LSTM(dim, dim, batch_first=True), fp32), lambda y: y[0])
    yield plain("nn.LSTM", lstm, draw(batch, length, dim, dtype=fp32))
    layer = torch.nn.TransformerEncoderLayer(heads * dim, heads, 4 * heads * dim, batch_first=True)
    yield plain("nn.TransformerEncoderLayer, eval", module(layer).eval(), states)
    backends = {"math": SDPBackend.MATH}
    if device.type == "cuda":
        backends["flash"] = SDPBackend.FLASH_ATTENTION
        backends["efficient"] = SDPBackend.EFFICIENT_ATTENTION
        backends["cuDNN"] = SDPBackend.CUDNN_ATTENTION
    for name, backend in backends.items():
        yield plain(f"SDPA, {name}", attention(backend), *[draw(batch, heads, length, dim)] * 3)
    yield plain("torch.compile: F.rms_norm", torch.compile(rms_norm), x, scales)
    yield plain("torch.compile: softmax(x) x", torch.compile(lambda x: x.float().softmax(-1) * x), x)
    yield plain("torch.compile: linear and silu", torch.compile(lambda x, w: F.silu(F.linear(x, w))), x, square)

    def quantised(torchao) -> torch.nn.Module:
        linear = module(torch.nn.Sequential(torch.nn.Linear(hidden, hidden)))
        torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
        return linear

    yield loaded("torchao int8 weight-only Linear", "torchao.quantization", quantised, x, backward=False)
    yield plain("bi_kernels.linear", bi_kernels.linear, x, square)
    yield plain("bi_kernels.rms_norm", bi_kernels.rms_norm, x, scales)

    def flag(name: str, call: Callable, *inputs: Callable):
        return loaded(f"FlagGems {name}", "flag_gems", lambda gems: partial(call, gems), *inputs)

    def liger(name: str, build: Callable, *inputs: Callable):
        return loaded(f"Liger {name}", "liger_kernel.transformers", build, *inputs)

    if device.type == "cuda":
        yield flag("mm", lambda gems, x, w: gems.mm(x, w), x, square)
        yield flag("softmax", lambda gems, x: gems.softmax(x, -1), x)
        yield flag("rms_norm", lambda gems, x, w: gems.rms_norm(x, w.shape, w), x, scales)
        config = type("Config", (), dict(hidden_size=hidden, intermediate_size=mlp, hidden_act="silu"))
        yield liger("RMSNorm", lambda k: module(k.LigerRMSNorm(hidden)), x)
        yield liger("LayerNorm", lambda k: module(k.LigerLayerNorm(hidden)), x)
        yield liger("SwiGLU MLP", lambda k: module(k.LigerSwiGLUMLP(config)), stack)
        losses = lambda k: k.LigerCrossEntropyLoss(reduction="none")
        yield liger("cross entropy", losses, draw(rows, vocab), integers(vocab, rows))

    def llama(name: str, build: Callable, inputs: Callable):
        def built(models):
            config = models.LlamaConfig(
                hidden_size=heads * dim,
                intermediate_size=4 * dim,
                num_attention_heads=heads,
                head_dim=dim,
                num_key_value_heads=heads // 2,
                num_hidden_layers=1,
                vocab_size=vocab,
                attn_implementation="sdpa",
            )
            return build(models, config)

        return loaded(f"Hugging Face {name}", "transformers.models.llama.modeling_llama", built, inputs)

    yield llama("LlamaRMSNorm", lambda m, c: module(m.LlamaRMSNorm(c.hidden_size)), states)
    yield llama("LlamaMLP", lambda m, c: module(m.LlamaMLP(c)), states)
    model = lambda m, c: Part(module(m.LlamaModel(c)).eval(), lambda y: y.last_hidden_state)
    yield llama("LlamaModel, one layer", model, integers(vocab, batch, length))


def function(name: str, device: str) -> Callable:
    """Returns the callable of that name, for the scripts that show its drift."""
    makers = corpus(torch.device(device), LARGE if device == "cuda" else SMALL)
    return next(make for known, make in makers if known == name)().function
