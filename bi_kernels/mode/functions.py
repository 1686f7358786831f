"""Reductions that PyTorch is asked for, by this package's ops; NotImplemented for what PyTorch may compute itself."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from bi_kernels.mode.parameters import (
    FLOATS,
    Expanded,
    adopted,
    computed,
    elementwise,
    expanded,
    is_parameter,
    left,
    total_of,
    unknown,
    view,
    with_grad,
)
from bi_kernels.ops import layer_norm as layer_norms
from bi_kernels.ops import logprob
from bi_kernels.ops import norm as norms
from bi_kernels.ops.attention import attention as attentions
from bi_kernels.ops.embedding import embedding as look_up
from bi_kernels.ops.gemm.gemm import _apply as gemm
from bi_kernels.ops.gemm.gemm import matmul as multiply
from bi_kernels.ops.grouped.top_k import MOST, top_k
from bi_kernels.tokens import dense

_widened: dict[tuple, torch.dtype] = {}


def _as_autocast(func: Callable, x: Tensor, *more: object) -> Tensor:
    """Returns x in the dtype in which autocast has PyTorch compute func(x, *more), which is asked once."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x
    key = func, kind, x.dtype, torch.get_autocast_dtype(kind)
    if key not in _widened:
        _widened[key] = func(x.new_zeros(1, 1), *more).dtype
    return x.to(_widened[key])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dims, dtype, scale):
        ctx.shape, ctx.dtype, ctx.scale = x.shape, x.dtype, scale
        return total_of(x, dims, dtype, scale)

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.scale if ctx.scale != 1.0 else grad).to(ctx.dtype).expand(ctx.shape), None, None, None


def reduce(mean: bool) -> Callable:
    def route(mode, func, x, dim=None, keepdim=False, *, dtype=None, out=None):
        if x.dtype not in FLOATS or dtype not in (None, *FLOATS):
            return unknown(mode, func) if x.dtype == torch.float64 or x.is_complex() else NotImplemented
        if dim is None and out is None:  # of all that a call has, as a loss
            return unknown(mode, func) if x.dim() and mode.in_trial else NotImplemented
        if out is not None or x.dim() == 0:
            return unknown(mode, func)
        x = x if dtype else _as_autocast(func, x, -1)
        dims = sorted({d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim or range(x.dim()))})
        mode.meets_sum(*(x.shape[d] for d in dims))
        count = torch.Size(x.shape[d] for d in dims).numel()
        given = x, dims, dtype or x.dtype, 1.0 / max(count, 1) if mean else 1.0
        y = _Sum.apply(*given) if x.requires_grad and torch.is_grad_enabled() else total_of(*given)
        return y if keepdim else y.squeeze(dims)

    return route


def norm(mode, func, x, p=2, dim=None, keepdim=False, dtype=None, out=None):
    x = x if isinstance(p, int | float) and p == 2 and dim is not None and out is None and dtype is None else None
    if x is None or x.dtype not in FLOATS:
        return unknown(mode, func)
    x = _as_autocast(torch.norm, x, 2, -1)
    dims = sorted({d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim)})
    y = _Sum.apply(x.float() * x.float(), dims, torch.float32, 1.0).sqrt().to(x.dtype)
    return y if keepdim else y.squeeze(dims)


def normalize(mode, func, x, p=2.0, dim=1, eps=1e-12, out=None):
    length = norm(mode, func, x, p, dim, True, out=out)
    return length if length is NotImplemented else x / Expanded.apply(length.clamp_min(eps), x.shape, False, None)


def softmax(op: Callable) -> Callable:
    """Returns the route of softmax or log_softmax, which an op of ours computes over the last dimension."""

    def route(mode, func, x, dim=None, _stacklevel=3, dtype=None):
        if not isinstance(dim, int) or x.dim() == 0:
            return unknown(mode, func)
        dtype = _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype  # torch.softmax(x, dim, dtype)
        x = _as_autocast(func, x, -1) if dtype is None else x.to(dtype)
        if x.dtype not in FLOATS:
            return unknown(mode, func)
        mode.meets_sum(x.shape[dim])
        return op(x.movedim(dim, -1)).to(x.dtype).movedim(-1, dim)

    return route


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [_cast(t, torch.get_autocast_dtype(device)) for t in tensors]


def _cast(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns t in a dtype; of a parameter, a leaf that leads to its main_grad."""
    if t is None or t.dtype == dtype:
        return t
    return with_grad(t.detach().to(dtype), t.main_grad) if is_parameter(t) and hasattr(t, "main_grad") else t.to(dtype)


def product(mode, x: Tensor, w: Tensor, bias: Tensor | None, across: bool):
    """x (..., K) times w (N, K), or (K, N) if `across`; NotImplemented for what is no such product."""
    if torch.is_grad_enabled():
        for t in (x, w, bias):
            adopted(mode, t)
        computed(mode, *((w, bias) if x.dim() > 2 or not across else ()))
    x, w, bias = _autocast(x, w, bias)
    if x.dtype not in FLOATS or w.dtype != x.dtype or w.dim() != 2 or x.dim() < 1:
        return NotImplemented
    grad = getattr(w, "main_grad", None)
    if grad is not None and not grad.is_contiguous() and grad.t().is_contiguous():  # a parameter's transposed view
        w, across = with_grad(w.detach().t(), grad.t()), not across
    if x.dim() == 1:
        return product(mode, x[None], w, bias, across)[0]
    is_folded = is_parameter(w) or not w.requires_grad
    with mode.rows(x.shape[:-1]) if is_folded else dense(1, x.shape[:-1].numel()):
        return gemm("matmul" if across else "linear", "b" if across else "weight", x, w, bias, across=across)


def linear(mode, func, x, weight, bias=None):
    mode.meets_sum(x.shape[-1])
    out = product(mode, x, weight, bias, across=False)
    return unknown(mode, func) if out is NotImplemented else out


def matmul(mode, func, a, b=None, out=None, *, mat2=None):
    b = mat2 if b is None else b
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if out is not None or a.dtype not in FLOATS:
        return unknown(mode, func)
    if b.dim() >= 2 and a.dim() >= 2 and a.shape[-1] == b.shape[-2] == 1:
        product_of = elementwise(mode, torch.mul, a, b)
        return a * b if product_of is NotImplemented else product_of
    if b.dim() == 1:
        y = product(mode, a, b[None], None, across=False)
        return unknown(mode, func) if y is NotImplemented else y[..., 0]
    mode.meets_sum(a.shape[-1])
    if a.dim() == 2 and b.dim() >= 2 and is_parameter(a) and not is_parameter(b):  # tokens are columns of b
        y = product(mode, b.mT, a, None, across=False)
        return unknown(mode, func) if y is NotImplemented else y.mT
    theirs = (a, *([b] if b.dim() > 2 else ()))  # a trial counts the parameters that no op of ours reads
    if torch.is_grad_enabled() and not mode.in_trial and any(map(is_parameter, theirs)):
        mode.meets_unknown(f"the gradient of a parameter in {func.__name__}")
    y = product(mode, a, b, None, across=True) if b.dim() == 2 else _batched(a, b)
    return unknown(mode, func) if y is NotImplemented else y


def patches(mode, func, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """A convolution whose windows do not overlap: a product of each window with the weight."""
    size, dims = weight.shape[2:], weight.dim() - 2
    each = lambda n: (n,) * dims if isinstance(n, int) else tuple(n)
    apart = each(stride) == tuple(size) and each(dilation) == (1,) * dims and groups == 1
    if not apart or padding not in (0, (0,) * dims, [0] * dims, "valid") or x.dim() != dims + 2:
        return unknown(mode, func)
    counts = [n // k for n, k in zip(x.shape[2:], size)]
    for at, (n, k) in enumerate(zip(counts, size)):
        x = x.narrow(2 + 2 * at, 0, n * k).unflatten(2 + 2 * at, (n, k))
    places, inner = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
    x = x.permute(0, *places, 1, *inner).flatten(1 + dims)
    flat = view(mode, torch.flatten, weight, 1)
    flat = weight.flatten(1) if flat is NotImplemented else flat
    y = product(mode, x.flatten(1, dims), flat, bias, across=False)
    return unknown(mode, func) if y is NotImplemented else y.mT.unflatten(2, counts)


def _batched(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies matrices (..., M, K) and (..., K, N) one by one."""
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    pairs = zip(*(_split(t, lead) for t in _autocast(a, b)))
    with dense(1, a.shape[-2]):
        parts = [multiply(x, y) for x, y in pairs]
    return torch.stack(parts).view(*lead, a.shape[-2], b.shape[-1]) if parts else a @ b


def _split(t: Tensor, lead: torch.Size) -> Iterable[Tensor]:
    shape = lead + t.shape[-2:]
    t = Expanded.apply(t, shape, False, None) if t.requires_grad and t.shape != shape else t.expand(shape)
    return t.reshape(-1, *t.shape[-2:]).unbind(0)


def addmm(mode, func, given, a=None, b=None, *, beta=1, alpha=1, out=None, **named):
    a, b = (named.get(f"mat{i}", named.get(f"batch{i}", t)) for i, t in ((1, a), (2, b)))
    if out is not None or given.dtype not in FLOATS:
        return unknown(mode, func)
    if beta == alpha == 1 and given.dim() == 1 and b.dim() == 2:
        y = product(mode, a, b, given, across=True)
        return unknown(mode, func) if y is NotImplemented else y
    y = matmul(mode, func, a, b)
    if y is NotImplemented:
        return y
    (given,) = _autocast(given)
    y, given = y if alpha == 1 else y * alpha, given if beta == 1 else given * beta
    total = elementwise(mode, torch.add, given, y)
    return given + y if total is NotImplemented else total


def item(mode, func: Callable, t: Tensor, at: object):
    if not is_parameter(t):
        if torch.is_grad_enabled():
            mode.takes(t, at)
        picks = [i for i in (at if isinstance(at, tuple) else (at,)) if isinstance(i, Tensor) and i.dim()]
        return copied(mode, func, t) if any(i.dtype != torch.bool for i in picks) else NotImplemented
    if isinstance(at, Tensor) and not at.is_floating_point() and at.dtype != torch.bool and t.dim() in (1, 2):
        if t.dim() == 2:
            return embedding(mode, func, at, t)
        column = view(mode, torch.unsqueeze, t, 1)
        return embedding(mode, func, at, t[:, None] if column is NotImplemented else column)[..., 0]
    return view(mode, func, t, at)


def layer_norm(mode, func, x, normalized_shape, weight=None, bias=None, eps=1e-5, **_):
    if len(normalized_shape) != 1 or x.dtype not in FLOATS:
        return unknown(mode, func)
    for t in (weight, bias):
        adopted(mode, t)
    computed(mode, weight, bias)
    x, weight, bias, dtype = _widest(func, x, weight, bias)
    with mode.rows(x.shape[:-1]):
        return layer_norms.layer_norm(x, weight, bias, eps).to(dtype)


def rms_norm(mode, func, x, normalized_shape, weight=None, eps=None):
    if len(normalized_shape) != 1 or x.dtype not in FLOATS:
        return unknown(mode, func)
    adopted(mode, weight)
    computed(mode, weight)
    x, weight, _, dtype = _widest(func, x, weight, None)
    eps = torch.finfo(dtype).eps if eps is None else eps
    with mode.rows(x.shape[:-1]):
        return norms.rms_norm(x, weight, eps).to(dtype)


def _widest(func: Callable, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple:
    """Returns a norm's arguments in their widest dtype, and the dtype of its result."""
    x = _as_autocast(func, x, (1,))
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    return *(_cast(t, dtype) for t in (x, weight, bias)), x.dtype


def embedding(
    mode, func, ids, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False
):
    if max_norm is not None or scale_grad_by_freq or sparse or weight.dtype not in FLOATS:
        return unknown(mode, func)
    adopted(mode, weight, embedding=True)
    computed(mode, weight)
    with mode.rows(ids.shape):
        return look_up(ids, weight, padding_idx)


def attention(
    mode, func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    q, k, v = query, key, value
    known = attn_mask is None and not dropout_p and q.dim() == 4 and (not is_causal or q.shape[2] == k.shape[2])
    if not known or q.dtype not in FLOATS or max(q.shape[-1], v.shape[-1]) > 256:
        return unknown(mode, func)
    q, k, v = (t.transpose(1, 2) for t in _autocast(q, k, v))
    with mode.rows(q.shape[:2]):
        return attentions.attention(q, k, v, causal=is_causal, scale=scale)[0].transpose(1, 2)


def cross_entropy(
    mode, func, x, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0,
):  # fmt: skip
    plain = weight is None and size_average is None and reduce is None and not label_smoothing and x.dim() == 2
    if not plain or target.is_floating_point() or x.dtype not in FLOATS:
        return unknown(mode, func)
    x = _as_autocast(func, x, target.new_zeros(1))
    loss = -logprob.token_logprob(x, target, ignore_index=ignore_index)[0].to(x.dtype)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != ignore_index).sum()


def sort(mode, func, x, dim=-1, descending=False, stable=False):
    return func(x, dim=dim, descending=descending, stable=True)


def topk(mode, func, x, k, dim=-1, largest=True, sorted=True):
    """The k largest in a total order: by value, then by index."""
    if largest and x.dtype in FLOATS and x.dim() and dim in (-1, x.dim() - 1) and 0 < k <= x.shape[-1] <= MOST:
        return torch.return_types.topk(top_k(x, k))
    values, at = torch.sort(x, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), at.narrow(dim, 0, k)))


def exact(mode, func, x, /, *args, **kwargs):
    """A sum or scan that is exact for integers alone."""
    return unknown(mode, func) if x.is_floating_point() else NotImplemented


def smooth(mode, func, x, /, *args, **kwargs):
    """A function that a CPU computes by other code at the end of a tensor, one ULP apart: in fp64, rounded once."""
    if x.device.type != "cpu" or x.dtype not in FLOATS or kwargs.get("out") is not None or kwargs.get("inplace"):
        return NotImplemented
    y = func(x.double(), *args, **{k: v for k, v in kwargs.items() if k != "inplace"}).to(x.dtype)
    left(mode, func, (x,), y)
    return y


def repeat(mode, func, x, *sizes):
    """Copies along dimensions, each an expansion whose gradients our ops sum."""
    sizes = [*sizes[0]] if len(sizes) == 1 and not isinstance(sizes[0], int) else [*sizes]
    if not x.requires_grad or not torch.is_grad_enabled():
        return NotImplemented
    shape = [1] * (len(sizes) - x.dim()) + [*x.shape]
    apart = [n for size in shape for n in (1, size)]
    wanted = torch.Size(n for pair in zip(sizes, shape) for n in pair)
    return expanded(mode, x.reshape(apart), wanted).reshape([r * n for r, n in zip(sizes, shape)])


def repeat_interleave(mode, func, x, repeats, dim=None, **kwargs):
    """Copies each element of a dimension, whose gradients our ops sum."""
    if not x.requires_grad or not torch.is_grad_enabled():
        return NotImplemented
    if not isinstance(repeats, int) or dim is None:
        return unknown(mode, func)
    dim %= x.dim()
    wanted = x.shape[: dim + 1] + (repeats,) + x.shape[dim + 1 :]
    return expanded(mode, x.unsqueeze(dim + 1), wanted).flatten(dim, dim + 1)


def copied(mode, func, x, /, *args, **kwargs):
    """What may copy an element several times, whose gradients PyTorch adds up."""
    if x.requires_grad and torch.is_grad_enabled():
        mode.meets_unknown(f"the gradient of {func.__name__}")
    return NotImplemented


def draws(mode, func, /, *args, **kwargs):
    """Random numbers, which a model draws by place in the batch."""
    return unknown(mode, func) if mode.in_trial else NotImplemented


def dropout(mode, func, x, p=0.5, training=True, inplace=False):
    return unknown(mode, func) if p and (training or mode.in_trial) else NotImplemented
