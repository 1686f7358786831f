"""Makes callables that nobody wrote for the auditor.

torch's, what torch.compile makes of them, attention backends, Hugging Face's modules, and ops of Liger, FlagGems and
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

SMALL = {"rows": 20, "hidden": 64, "mlp": 96, "vocab": 200, "heads": 4, "head_dim": 16, "length": 24, "batch": 4}
LARGE = {
    "rows": 300,
    "hidden": 4096,
    "mlp": 12288,
    "vocab": 32000,
    "heads": 16,
    "head_dim": 128,
    "length": 256,
    "batch": 8,
}


@dataclass
class Animal:
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


def zoo(device: torch.device, size: dict) -> Iterator[tuple[str, Callable[[], Animal]]]:
    """Yields (name, what makes it) of every animal; making one raises where its package is missing."""
    g = torch.Generator(device).manual_seed(0)
    bf16, fp32 = torch.bfloat16, torch.float32
    draw = lambda *shape, dtype=bf16: torch.randn(shape, generator=g, device=device).to(dtype)
    rows, hidden, mlp, vocab = (size[k] for k in ("rows", "hidden", "mlp", "vocab"))
    heads, dim, length, batch = (size[k] for k in ("heads", "head_dim", "length", "batch"))
    integers = lambda top, *shape: torch.randint(0, top, shape, generator=g, device=device)
    weight = lambda n, k, dtype=bf16: draw(n, k, dtype=dtype) * k**-0.5
    module = lambda m, dtype=bf16: m.to(device=device, dtype=dtype)

    def plain(name: str, function: Callable, *make: Callable, **options):
        return name, lambda: Animal(function, tuple(m() for m in make), options)

    x = lambda: draw(rows, hidden)
    yield plain("F.linear, square, bf16", F.linear, x, lambda: weight(hidden, hidden))
    yield plain("F.linear, down, bf16", F.linear, lambda: draw(rows, mlp), lambda: weight(hidden, mlp))
    yield plain("F.linear, up, bf16", F.linear, x, lambda: weight(2 * mlp, hidden))
    yield plain(
        "F.linear, square, fp32", F.linear, lambda: draw(rows, hidden, dtype=fp32), lambda: weight(hidden, hidden, fp32)
    )
    yield plain(
        "torch.matmul of a stack", torch.matmul, lambda: draw(batch, length, hidden), lambda: weight(hidden, hidden)
    )
    yield plain("torch.bmm", torch.bmm, lambda: draw(batch, length, dim), lambda: draw(batch, dim, length))
    yield plain(
        "torch.einsum over heads",
        lambda x, w: torch.einsum("bshd,hde->bshe", x, w),
        lambda: draw(batch, length, heads, dim),
        lambda: draw(heads, dim, dim),
    )
    for name in ("silu", "gelu", "relu", "softplus"):
        yield plain(f"F.{name}", getattr(F, name), x)
    for name in ("softmax", "log_softmax"):
        yield plain(f"F.{name}", lambda x, f=getattr(F, name): f(x, -1), x)  # noqa: B008 (bound in this round)
    yield plain("torch.logsumexp", lambda x: torch.logsumexp(x, -1), lambda: draw(rows, vocab, dtype=fp32))
    yield plain("torch.sum", lambda x: x.sum(-1), x)
    yield plain("torch.cumsum", lambda x: x.cumsum(-1), lambda: draw(rows, hidden, dtype=fp32))
    yield plain("torch.topk", lambda x: x.topk(8, -1).values, x)
    yield plain(
        "F.layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b), x, lambda: draw(hidden), lambda: draw(hidden)
    )
    yield plain("F.rms_norm", lambda x, w: F.rms_norm(x, w.shape, w), x, lambda: draw(hidden))
    yield plain("F.group_norm", lambda x: F.group_norm(x, 8), x)
    yield plain("F.embedding", F.embedding, lambda: integers(vocab, rows), lambda: draw(vocab, hidden))
    yield plain(
        "F.cross_entropy",
        lambda x, t: F.cross_entropy(x.float(), t, reduction="none"),
        lambda: draw(rows, vocab),
        lambda: integers(vocab, rows),
    )
    yield plain("F.conv1d", F.conv1d, lambda: draw(batch, dim, length), lambda: draw(dim, dim, 4))
    yield plain("sampling by softmax", lambda x: torch.multinomial(x.float().softmax(-1), 1), x)
    yield plain("a batch's mean taken off", lambda x: x - x.mean(0), x)
    yield plain("nn.BatchNorm1d, training", module(torch.nn.BatchNorm1d(hidden)), x)
    yield plain("nn.BatchNorm1d, eval", module(torch.nn.BatchNorm1d(hidden)).eval(), x)
    yield plain("nn.Dropout, training", torch.nn.Dropout(0.1), x)
    yield plain("nn.Linear", module(torch.nn.Linear(hidden, hidden)), x)
    yield plain(
        "nn.LSTM",
        Part(module(torch.nn.LSTM(dim, dim, batch_first=True), fp32), lambda y: y[0]),
        lambda: draw(batch, length, dim, dtype=fp32),
    )
    yield plain(
        "nn.TransformerEncoderLayer, eval",
        module(torch.nn.TransformerEncoderLayer(heads * dim, heads, 4 * heads * dim, batch_first=True)).eval(),
        lambda: draw(batch, length, heads * dim),
    )
    backends = {"math": SDPBackend.MATH} | (
        {
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cuDNN": SDPBackend.CUDNN_ATTENTION,
        }
        if device.type == "cuda"
        else {}
    )
    qkv = [lambda: draw(batch, heads, length, dim)] * 3
    for name, backend in backends.items():
        yield plain(f"SDPA, {name}", attention(backend), *qkv)
    for name, function, *make in (
        ("F.rms_norm", lambda x, w: F.rms_norm(x, w.shape, w), x, lambda: draw(hidden)),
        ("softmax(x) x", lambda x: x.float().softmax(-1) * x, x),
        ("linear and silu", lambda x, w: F.silu(F.linear(x, w)), x, lambda: weight(hidden, hidden)),
    ):
        yield plain(f"torch.compile: {name}", torch.compile(function), *make)

    def liger(name: str, make: Callable):
        return f"Liger {name}", lambda: Animal(*make(importlib.import_module("liger_kernel.transformers")))

    def flag(name: str, call: Callable, *make: Callable):
        return f"FlagGems {name}", lambda: Animal(
            partial(call, importlib.import_module("flag_gems")), tuple(m() for m in make)
        )

    def quantised():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415 (optional)

        linear = module(torch.nn.Sequential(torch.nn.Linear(hidden, hidden)))
        quantize_(linear, Int8WeightOnlyConfig())
        return Animal(linear, (x(),), {"backward": False})

    yield "torchao int8 weight-only Linear", quantised
    yield plain("bi_kernels.linear", bi_kernels.linear, x, lambda: weight(hidden, hidden))
    yield plain("bi_kernels.rms_norm", bi_kernels.rms_norm, x, lambda: draw(hidden))
    if device.type == "cuda":
        yield flag("mm", lambda gems, x, w: gems.mm(x, w), x, lambda: weight(hidden, hidden))
        yield flag("softmax", lambda gems, x: gems.softmax(x, -1), x)
        yield flag("rms_norm", lambda gems, x, w: gems.rms_norm(x, w.shape, w), x, lambda: draw(hidden))
        config = type("Config", (), {"hidden_size": hidden, "intermediate_size": mlp, "hidden_act": "silu"})
        yield liger("RMSNorm", lambda k: (module(k.LigerRMSNorm(hidden)), (x(),)))
        yield liger("LayerNorm", lambda k: (module(k.LigerLayerNorm(hidden)), (x(),)))
        yield liger("SwiGLU MLP", lambda k: (module(k.LigerSwiGLUMLP(config)), (draw(batch, length, hidden),)))
        yield liger(
            "cross entropy",
            lambda k: (k.LigerCrossEntropyLoss(reduction="none"), (draw(rows, vocab), integers(vocab, rows))),
        )

    def llama(name: str, make: Callable):
        def built():
            from transformers.models.llama import modeling_llama  # noqa: PLC0415 (optional)
            from transformers.models.llama.configuration_llama import LlamaConfig  # noqa: PLC0415

            config = LlamaConfig(
                hidden_size=heads * dim,
                intermediate_size=4 * dim,
                num_attention_heads=heads,
                head_dim=dim,
                num_key_value_heads=heads // 2,
                num_hidden_layers=1,
                vocab_size=vocab,
                attn_implementation="sdpa",
            )
            return Animal(*make(modeling_llama, config))

        return f"Hugging Face {name}", built

    states = lambda: draw(batch, length, heads * dim)
    yield llama("LlamaRMSNorm", lambda m, c: (module(m.LlamaRMSNorm(c.hidden_size)), (states(),)))
    yield llama("LlamaMLP", lambda m, c: (module(m.LlamaMLP(c)), (states(),)))
    yield llama(
        "LlamaModel, one layer",
        lambda m, c: (
            Part(module(m.LlamaModel(c)).eval(), lambda y: y.last_hidden_state),
            (integers(vocab, batch, length),),
        ),
    )


def function(name: str, device: str) -> Callable:
    """Returns the callable of that name, for the scripts that show its drift."""
    makers = zoo(torch.device(device), LARGE if device == "cuda" else SMALL)
    return next(make for known, make in makers if known == name)().function
