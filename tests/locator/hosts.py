"""Models to plant a fault in: a decoder of invariant ops or of ours, a user's network, a Qwen3 of Transformers."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from locator import invariant as exact
from torch import Tensor, nn

from bi_kernels.model import Config, Decoder

LENGTHS = (7, 1, 18)
VOCAB = 23  # fewer than tokens: ids repeat
SIZES = dict(vocab=VOCAB, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=64)


def ids(device="cpu") -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=g).to(device) for n in LENGTHS]


def decoder(
    device, ops=exact, checkpointing: bool = False, biased: bool = False, dtype=torch.float32, **replaced
) -> Decoder:
    names = {k: getattr(ops, k) for k in getattr(ops, "__all__", vars(ops))}
    ops, config = SimpleNamespace(**names | replaced), Config(**SIZES, qkv_bias=biased)
    return Decoder(config, device, dtype, longest=64, checkpointing=checkpointing, ops=ops)


class Mixer(nn.Module):
    """A user's own module, in which op is one of the ops below."""

    def __init__(self, op: Callable):
        super().__init__()
        self.op = op

    def forward(self, x):
        return self.op(x)


class User(nn.Module):
    """A user's own network: nested modules, a dict of outputs, and parameters that nothing but a fault can move."""

    def __init__(self, op: Callable):
        super().__init__()
        self.first, self.inner = Mixer(lambda x: x * 2), nn.Sequential(Mixer(lambda x: x + 1), Mixer(op))

    def forward(self, x):
        return {"hidden": (self.inner(self.first(x)), None)}


def floats(device) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(n, 64, generator=g).to(device) for n in LENGTHS]


def qwen3(device, where: str, change: Callable) -> tuple:
    """Returns a small Qwen3 of Transformers whose sums are those of invariant.py, one of its modules changed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, mask, scaling=None, **more):
        heads, length = query.shape[1:3]
        keys, values = (exact.every_head(t, heads) for t in (key, value))
        q, k, v = (F.pad(t, (0, 0, 0, exact.LONGEST - length)) for t in (query, keys, values))
        return exact.softmax_attention(q, k, v, None)[:, :, :length].transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("bi_kernels_exact", attend)
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(attn_implementation="bi_kernels_exact", **sizes, **heads))
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.forward = lambda x, m=module: exact.rms_norm(x, m.weight)
        if isinstance(module, nn.Linear):
            module.forward = lambda x, m=module: exact.linear(x, m.weight)
            if name.endswith(where):
                module.forward = lambda x, m=module: change(x, m.weight)
    for p in model.parameters():
        p.requires_grad_(False)  # Transformers adds up gradients by call; what is planted is in activations
    model.model.embed_tokens.weight.requires_grad_()
    g = torch.Generator().manual_seed(0)
    unlike = (1 + torch.randperm(96, generator=g)).split(LENGTHS + (96 - sum(LENGTHS),))[:-1]
    return model.to(device), [t.to(device) for t in unlike]
