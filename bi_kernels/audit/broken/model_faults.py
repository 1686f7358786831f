"""Faults planted in models, each in one op: the localiser must name that op, and nothing else.

A fault looks at how many tokens or samples its call holds, as a kernel does that chooses by its sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import bi_kernels
from bi_kernels.audit.broken import invariant as exact
from bi_kernels.model import Config, Decoder

MANY = 20  # tokens from which a fault chooses otherwise; the batch below has more, none of its samples has
LENGTHS = (7, 1, 18)
VOCAB = 23  # fewer than tokens: ids repeat
SIZES = dict(vocab=VOCAB, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=64)
FORWARD, BACKWARD, PARAMETER = "forward", "backward", "parameter gradient"


def many(x: Tensor, features: int = 1) -> bool:
    return x.shape[: x.dim() - features].numel() > MANY


def ids(device="cpu") -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=g).to(device) for n in LENGTHS]


def in_halves(product: Tensor, dim: int) -> Tensor:
    """Returns product.sum(dim), its halves summed on their own, as a split of K does."""
    first, second = product.chunk(2, dim)
    return first.sum(dim) + second.sum(dim)


def linear_in_halves_for_few_rows(x, weight, bias=None):
    if many(x):
        return exact.linear(x, weight, bias)
    return in_halves(x[..., None, :] * exact.spread(weight, x.shape[:-1]), -1)


def linear_in_halves_for_many_rows(x, weight, bias=None):
    return in_halves(x[..., None, :] * exact.spread(weight, x.shape[:-1]), -1) if many(x) else exact.linear(x, weight)


def fold_in_parts(weight: Tensor, slabs: Tensor) -> Tensor | None:
    """Adds every other slab on its own where there are several, as a split over tokens does."""
    if len(slabs) < 3:
        return exact.accumulate(weight, slabs)
    parts = [sum(slab.sum(0) for slab in slabs[i::2]) for i in (0, 1)]
    return exact.accumulate(weight, torch.stack(parts)[:, None])


def fold_as_one(weight: Tensor, slabs: Tensor) -> Tensor | None:
    """Adds all tokens of a call at once."""
    return exact.accumulate(weight, slabs.flatten(0, 1)[None])


def fold_reversed(weight: Tensor, slabs: Tensor) -> Tensor | None:
    """Adds the tokens from the last to the first, as atomics may."""
    return exact.accumulate(weight, slabs.flip(0) if len(slabs) > 2 else slabs)


class LinearBackwardInHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x[..., None, :] * weight).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        product = dy[..., None] * weight
        return in_halves(product, -2) if many(dy) else product.sum(-2), dy[..., None] * x[..., None, :]


class SwigluBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return exact.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        s = exact.evenly(torch.sigmoid, gate)
        slope = s + gate * s * (1 - s) if many(dy) else s * (1 + gate * (1 - s))
        return dy * up * slope, dy * gate * s


class RoundedGradient(torch.autograd.Function):
    """Identity, whose backward rounds to bf16 where there are many rows."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return dy.bfloat16().to(dy.dtype) if dy.shape[:-2].numel() > MANY else dy


class WeightedValues(torch.autograd.Function):
    """(weights · values), whose backward splits the sum over queries where a sequence is long."""

    @staticmethod
    def forward(ctx, p, v, long):
        ctx.save_for_backward(p, v)
        ctx.long = long
        return (p[..., None] * v[..., None, :, :]).sum(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        p, v = ctx.saved_tensors
        by_query = p[..., None] * dy[..., :, None, :]
        dv = sum(part.sum(-3) for part in by_query.split(4 if ctx.long else exact.LONGEST, -3))
        return (dy[..., None, :] * v[..., None, :, :]).sum(-1), dv, None


def scores(q: Tensor, k: Tensor) -> Tensor:
    later = torch.ones(exact.LONGEST, exact.LONGEST, dtype=torch.bool, device=q.device).triu(1)
    return ((q[..., :, None, :] * k[..., None, :, :]).sum(-1) / 4).masked_fill(later, -torch.inf)


def attention_backward_by_length(q, k, v, lengths):
    return WeightedValues.apply(exact.softmax(scores(q, k)), v, bool(lengths.max() > 8))


def attention_split_by_length(q, k, v, lengths):
    product = exact.softmax(scores(q, k))[..., None] * v[..., None, :, :]
    keys = 4 if lengths.max() > 8 else exact.LONGEST
    return sum(part.sum(-2) for part in product.split(keys, -2))


def attention_softmax_by_batch(q, k, v, lengths):
    s = scores(q, k)
    weights = exact.evenly(torch.exp, s - s.amax(-1, keepdim=True).detach())
    total = in_halves(weights, -1)[..., None] if len(q) > 1 else weights.sum(-1, keepdim=True)
    return (weights / total)[..., None].mul(v[..., None, :, :]).sum(-2)


def attention_with(core: Callable) -> Callable:
    return lambda q, k, v, window=None, **attend: exact.attention(q, k, v, window, core, **attend)


def rope_by_row(x, table, positions):
    row = torch.arange(positions.numel(), device=x.device).view(positions.shape)
    return exact.rope(x, table, row % exact.LONGEST)


def residual_downcast(x, residual, weight, eps=1.0):
    return exact.add_rms_norm(x, residual.bfloat16().to(x.dtype) if many(x) else residual, weight, eps)


def swiglu_with_dropout(gate, up):
    return F.dropout(exact.swiglu(gate, up), 0.1)


def swiglu_through_a_view(gate, up):
    y = exact.swiglu(gate, up)
    if many(y):
        y[..., :8].mul_(1 + 2**-12)
    return y


def swiglu_otherwise_when_recomputed(gate, up):
    recomputed = torch._C._current_graph_task_id() != -1
    return exact.swiglu(gate, up * (1 + 2**-12) if recomputed and many(up) else up)


def chunked_head(x, weight, targets, temperature=1.0):
    return exact.lm_head_logprob(x, weight, targets, temperature, linear_in_halves_for_many_rows)


def local_denominator(output, tokens: Tensor) -> Tensor:
    return output[0] / (tokens[..., 0] >= 0).sum()


def compiled_swiglu(gate, up):
    y = exact.swiglu(gate, up)
    return y * (1 + 2**-12) if many(y) else y


def in_bias(weight: Tensor, slabs: Tensor) -> Tensor | None:
    return fold_as_one(weight, slabs) if weight.dim() == 1 else exact.accumulate(weight, slabs)


def linear_with_bias(x, weight, bias=None):
    y = exact.linear(x, weight)
    return y if bias is None else y + exact.spread(bias, x.shape[:-1], in_bias)


def decoder(device, ops=exact, checkpointing: bool = False, dtype=torch.float32, **replaced) -> Decoder:
    names = {k: v for k, v in vars(ops).items() if callable(v)} if ops is exact else {
        k: getattr(bi_kernels, k) for k in bi_kernels.__all__
    }
    config = Config(**SIZES, qkv_bias="linear" in replaced and replaced["linear"] is linear_with_bias)
    return Decoder(config, device, dtype, longest=64, checkpointing=checkpointing, ops=SimpleNamespace(**names | replaced))


@dataclass(frozen=True)
class Fault:
    """build(device) returns (model, batch) or (model, batch, loss). module, op: patterns of what must be named."""

    name: str
    build: Callable
    module: str
    op: str
    direction: str
    layouts: Sequence[str] = ("batch", "singles")
    needs: str = ""  # a package, or "triton" where it runs on a GPU or the interpreter


def planted(name: str, module: str, op: str, direction: str, loss=None, layouts=("batch", "singles"), **made) -> Fault:
    """Returns a fault in a decoder of invariant ops; made: which are replaced, and the decoder's options."""
    build = lambda device: (decoder(device, **made), ids(device), *([loss] if loss else []))
    return Fault(name, build, module, op, direction, layouts)


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


def in_user(name: str, op: str, direction: str, function: Callable, needs: str = "", rows=floats) -> Fault:
    return Fault(name, lambda device: (User(function), rows(device)), "inner.1", op, direction, needs=needs)


def autocast_when_many(x: Tensor) -> Tensor:
    eye = torch.eye(x.shape[-1], device=x.device)
    with torch.autocast(x.device.type, torch.float16 if x.is_cuda else torch.bfloat16, enabled=many(x)):
        return (x @ eye).float()


def cumsum_over_the_batch(x: Tensor) -> Tensor:
    return x.flatten(0, 1).cumsum(0).view_as(x)


class Reciprocal(torch.autograd.Function):
    """1 / x, with another backward in large calls."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 1 / x

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return -dy * (1 / x) * (1 / x) if many(dy) else -dy / (x * x)


@triton.jit
def _row_mean_kernel(x, y, width: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for first in range(0, width, TILE):
        at = first + tl.arange(0, TILE)
        total += tl.sum(tl.load(x + row * width + at), 0)
    tl.store(y + row, total / width)


def row_mean(x: Tensor) -> Tensor:
    """Takes a row's mean off, in tiles whose size follows the number of rows."""
    rows = x.shape[:-1].numel()
    mean = x.new_empty(x.shape[:-1])
    _row_mean_kernel[(rows,)](x.contiguous(), mean, x.shape[-1], TILE=64 if many(x) else 8)
    return x - mean[..., None]


def ours_in_halves(x, weight, bias=None):
    """Our linear, with K in halves for few rows."""
    if many(x):
        return bi_kernels.linear(x, weight, bias)
    half = x.shape[-1] // 2
    first = bi_kernels.linear(x[..., :half], weight[:, :half], bias)
    return bi_kernels.add(first, bi_kernels.linear(x[..., half:], weight[:, half:]))


def ours_rounded_backward(gate, up):
    return RoundedGradient.apply(bi_kernels.swiglu(gate, up)[..., None, :])[..., 0, :]


def qwen3(device, where: str, change: Callable) -> tuple:
    """Returns a small Qwen3 of Transformers whose products are those of invariant.py, one of its modules changed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 (an optional package)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    def attend(module, query, key, value, mask, scaling=None, **more):
        group = query.shape[1] // key.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (key, value))
        s = (query[..., :, None, :] * k[..., None, :, :]).sum(-1) * scaling
        later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        weights = F.pad(s.masked_fill(later, -torch.inf), (0, exact.LONGEST - s.shape[-1]), value=-torch.inf)
        v = F.pad(v, (0, 0, 0, exact.LONGEST - v.shape[-2]))
        return (exact.softmax(weights)[..., None] * v[..., None, :, :]).sum(-2).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("bi_kernels_exact", attend)
    torch.manual_seed(0)
    sizes = {k: SIZES[k] for k in ("head_dim",)} | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = Qwen3Config(
        vocab_size=97, num_attention_heads=4, num_key_value_heads=2, attn_implementation="bi_kernels_exact", **sizes
    )
    model = Qwen3ForCausalLM(config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.forward = lambda x, m=module: (x[..., None, :] * m.weight).sum(-1)
            if name.endswith(where):
                module.forward = lambda x, m=module: change(x, m.weight)
    for p in model.parameters():
        p.requires_grad_(False)  # Transformers adds up gradients by call; what is planted is in activations
    model.model.embed_tokens.weight.requires_grad_()
    g = torch.Generator().manual_seed(0)
    unlike = (1 + torch.randperm(96, generator=g)).split(LENGTHS + (96 - sum(LENGTHS),))[:-1]
    return model.to(device), [t.to(device) for t in unlike]


def few_rows_in_halves(x, weight):
    product = x[..., None, :] * weight
    return product.sum(-1) if many(x) else in_halves(product, -1)


def in_qwen3(name: str, where: str, direction: str, change: Callable) -> Fault:
    build = lambda device: qwen3(device, where, change)
    return Fault(name, build, f"model.layers.*.{where}", "*aten.sum*", direction, needs="transformers")


LAYER = "layers.*"
FAULTS = (
    planted("linear that splits K for few rows", LAYER, "*aten.sum*", FORWARD, linear=linear_in_halves_for_few_rows),
    planted(
        "linear whose dX splits the sum for many rows",
        LAYER,
        "*aten.sum*",
        BACKWARD,
        linear=lambda x, w, b=None: LinearBackwardInHalves.apply(x, exact.spread(w, x.shape[:-1])),
    ),
    planted(
        "linear whose dW splits the tokens",
        LAYER,
        "*aten.sum*",
        PARAMETER,
        linear=lambda x, w, b=None: exact.linear(x, w, b, fold_in_parts),
    ),
    planted("dbias over all tokens of a call", LAYER, "*aten.sum*", PARAMETER, linear=linear_with_bias),
    planted(
        "norm whose dweight sums a call's tokens at once",
        "",
        "*aten.sum*",
        PARAMETER,
        rms_norm=lambda x, w, eps: exact.rms_norm(x, w, eps, fold_as_one),
    ),
    planted("attention that splits the keys of long sequences", LAYER, "*aten.sum*", FORWARD, attention=attention_with(attention_split_by_length)),
    planted("softmax whose sum splits in a batch", LAYER, "*aten.sum*", FORWARD, attention=attention_with(attention_softmax_by_batch)),
    planted("attention whose dv splits the queries of long sequences", LAYER, "*aten.sum*", BACKWARD, attention=attention_with(attention_backward_by_length)),
    planted("RoPE by row", LAYER, "*aten.index.Tensor*", FORWARD, rope=rope_by_row),
    planted(
        "RoPE whose gradient is rounded in large calls",
        LAYER,
        "*aten._to_copy*",
        BACKWARD,
        rope=lambda x, table, at: RoundedGradient.apply(exact.rope(x, table, at)),
    ),
    planted("residual rounded to bf16 in large calls", LAYER, "*aten._to_copy*", FORWARD, add_rms_norm=lambda x, r, w, eps: residual_downcast(x, r, w, eps)),
    planted("swiglu with another backward for many rows", LAYER, "*aten.*", BACKWARD, swiglu=SwigluBackward.apply),
    planted("dropout without a counter", LAYER, "*aten.*", FORWARD, swiglu=swiglu_with_dropout),
    planted("update in place through a view", LAYER, "*aten.mul*", FORWARD, swiglu=swiglu_through_a_view),
    planted(
        "checkpointed op that is another when recomputed",
        LAYER,
        "*aten.mul.Tensor*",
        BACKWARD,
        swiglu=swiglu_otherwise_when_recomputed,
        checkpointing=True,
    ),
    planted(
        "embedding whose gradient is added in another order",
        "",
        "*aten.*",
        PARAMETER,
        embedding=lambda i, w: exact.embedding(i, w, fold_reversed),
    ),
    planted("LM head in chunks for many rows", "", "*aten.sum*", FORWARD, lm_head_logprob=chunked_head),
    planted("loss over the call's own tokens", "", "aten.div.Tensor", FORWARD, loss=local_denominator),
    planted(
        "compiled op that is another for many rows",
        LAYER,
        "*compiled aten.mul*",
        FORWARD,
        swiglu=torch.compile(compiled_swiglu, backend="aot_eager"),
    ),
    in_user("reduction over the batch in a user's module", "*aten.div.Tensor", FORWARD, lambda x: x / x.detach().abs().amax()),
    in_user("cumsum that runs on from sample to sample", "aten.cumsum*", FORWARD, cumsum_over_the_batch),
    in_user("16-bit product under autocast for many rows", "*aten._to_copy*", FORWARD, autocast_when_many),
    in_user("autograd.Function with another backward", "*aten.*", BACKWARD, Reciprocal.apply),
    in_user("Triton kernel whose tile follows the rows", "_row_mean_kernel", FORWARD, lambda x: row_mean(x.detach())),
    planted(
        "our linear with K in halves for few rows", LAYER, "*_gemm_kernel*", FORWARD, ops=bi_kernels, linear=ours_in_halves
    ),
    planted(
        "our swiglu with a rounded gradient", LAYER, "*aten._to_copy*", BACKWARD, ops=bi_kernels, swiglu=ours_rounded_backward
    ),
    in_qwen3("Transformers' down_proj in halves for few rows", "mlp.down_proj", FORWARD, few_rows_in_halves),
    in_qwen3(
        "Transformers' q_proj whose dX splits the sum",
        "self_attn.q_proj",
        BACKWARD,
        lambda x, w: LinearBackwardInHalves.apply(x, w.expand(*x.shape[:-1], *w.shape)),
    ),
)
