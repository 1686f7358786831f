"""Computes what a model of any library asks of PyTorch with this package's ops.

    with batch_invariant_mode() as mode:
        loss = model(x)
        loss.backward()
    print(mode.report())

The mode sees the functions of PyTorch that a model calls. A reduction goes to an op of ours, whose result for a row
depends on that row alone: products, sums and means, softmax, norms, embedding, attention, cross-entropy, top-k.
Elementwise functions stay PyTorch's; where one broadcasts an operand that needs a gradient, that gradient is summed by
our ops: over features row by row, and for a parameter over the tokens in the order of the token layout. A parameter
with a `main_grad` keeps it through views and casts. What is neither is left to PyTorch, and `report` names it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import bi_kernels as bi
from bi_kernels.ops.gemm.gemm import _apply as gemm
from bi_kernels.ops.parameter_fold import fold_elementwise
from bi_kernels.ops.rows import row_sums
from bi_kernels.tokens import TokenLayout, current_layout, dense, layout_for

OP = "batch_invariant_mode"
FLOATS = torch.bfloat16, torch.float16, torch.float32


class batch_invariant_mode(TorchFunctionMode):  # noqa: N801  (a context manager, named like torch's)
    """Routes PyTorch's reductions to this package's ops in this thread, until it is left.

    strict: raises ValueError at a function whose result for a token may depend on the batch and which has no route.
    """

    in_trial = False  # whether dropout counts that only training has

    def __init__(self, strict: bool = False):
        super().__init__()
        self.strict = strict
        self.routed: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        route = ROUTES.get(func, _unknown)
        if route is None or func.__name__ == "__get__":
            return func(*args, **(kwargs or {}))
        out = route(self, func, *args, **(kwargs or {}))
        if out is NotImplemented:
            return func(*args, **(kwargs or {}))
        self.meets_routed(func.__name__)
        return out

    def adopt(self, parameter: nn.Parameter, embedding: bool = False) -> None:
        """Is told of each parameter that a routed function is to read and whose gradient is wanted."""

    def meets_routed(self, name: str) -> None:
        """Counts a function that our ops computed."""
        self.routed[name] += 1

    def meets_unknown(self, name: str) -> None:
        """Counts a function that is left to PyTorch. Raises ValueError if strict."""
        if self.strict:
            raise ValueError(f"{OP}: strict is True, and {name} has no batch-invariant form here")
        self.unknown[name] += 1

    def report(self) -> str:
        """Names the functions that went to our ops, and those that were left to PyTorch."""
        listed = lambda counts: ", ".join(f"{name} ×{n}" for name, n in counts.most_common()) or "nothing"
        lines = [f"Routed: {listed(self.routed)}"]
        if self.unknown:
            lines.append(f"Left to PyTorch, and perhaps not batch-invariant: {listed(self.unknown)}")
        return "\n".join(lines)


def _unknown(mode: batch_invariant_mode, func: Callable, *args, **kwargs):
    if func.__name__ != "__get__":
        mode.meets_unknown(func.__name__)
    return NotImplemented


# Parameters: leaves whose gradient is folded over tokens.


def is_parameter(t: object) -> bool:
    """Tells whether a tensor is a parameter, or a view or cast of one that leads to its main_grad."""
    if not isinstance(t, Tensor) or not t.requires_grad or not t.is_leaf:
        return False
    return isinstance(t, nn.Parameter) or getattr(t, "main_grad", None) is not None


def _adopted(mode: batch_invariant_mode, t: object, embedding: bool = False) -> bool:
    """Tells whether a tensor is a parameter whose gradient is wanted; tells the mode of it."""
    if not is_parameter(t) or not torch.is_grad_enabled():
        return False
    if isinstance(t, nn.Parameter):
        mode.adopt(t, embedding)
    return True


def _with_grad(t: Tensor, main_grad: Tensor) -> Tensor:
    t.requires_grad_()
    t.main_grad = main_grad
    return t


def _view(mode: batch_invariant_mode, func: Callable, p: object, *args, **kwargs):
    """A view of a parameter, whose main_grad is the same view of the parameter's."""
    if not _adopted(mode, p) or getattr(p, "main_grad", None) is None:
        return NotImplemented
    out = func(p.detach(), *args, **kwargs)
    grads = func(p.main_grad, *args, **kwargs)
    for part, grad in zip(*((t,) if isinstance(t, Tensor) else t for t in (out, grads))):
        if grad.untyped_storage().data_ptr() != p.main_grad.untyped_storage().data_ptr():
            return _unknown(mode, func)
        _with_grad(part, grad)
    return out


def _cast(mode: batch_invariant_mode, func: Callable, p: object, *args, **kwargs):
    """A parameter in another dtype, whose main_grad is the parameter's."""
    if not _adopted(mode, p) or getattr(p, "main_grad", None) is None:
        return NotImplemented
    out = func(p.detach(), *args, **kwargs)
    return p if out.dtype == p.dtype else _with_grad(out, p.main_grad)


def _item(mode: batch_invariant_mode, func: Callable, t: Tensor, at: object):
    if not is_parameter(t):
        picks = [i for i in (at if isinstance(at, tuple) else (at,)) if isinstance(i, Tensor) and i.dim()]
        return _copied(mode, func, t) if any(i.dtype != torch.bool for i in picks) else NotImplemented
    if isinstance(at, Tensor) and not at.is_floating_point() and at.dtype != torch.bool and t.dim() == 2:
        return _embedding(mode, func, at, t)
    return _view(mode, func, t, at)


# Elementwise functions that broadcast.


def _elementwise(mode: batch_invariant_mode, func: Callable, *args, **kwargs):
    tensors = [t for t in args if isinstance(t, Tensor)]
    if len(tensors) < 2:
        return _shifted(mode, func, *args) if tensors and not kwargs else NotImplemented
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return NotImplemented
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    if all(t.shape == shape or not t.requires_grad for t in tensors):
        return NotImplemented
    given = [
        _expanded(mode, a, shape) if isinstance(a, Tensor) and a.requires_grad and a.shape != shape else a for a in args
    ]
    return func(*given, **kwargs)


def _shifted(mode: batch_invariant_mode, func: Callable, *args):
    """A parameter plus or minus a number, whose main_grad is the parameter's."""
    p = args[0] if isinstance(args[0], Tensor) else args[1]
    if not is_parameter(p) or not torch.is_grad_enabled():
        return NotImplemented
    if func.__name__ in ("add", "__add__", "__radd__") or func.__name__ in ("sub", "__sub__") and args[0] is p:
        if _adopted(mode, p) and getattr(p, "main_grad", None) is not None:
            return _with_grad(func(*(a.detach() if a is p else a for a in args)), p.main_grad)
        return NotImplemented
    return _unknown(mode, func)


def _expanded(mode: batch_invariant_mode, t: Tensor, shape: torch.Size) -> Tensor:
    if _adopted(mode, t):
        features = min(t.dim(), len(shape) - 1)
        layout = current_layout(OP) or layout_for(OP, shape[: len(shape) - features])
        if t.dim() == len(shape) > 2 and t.shape[:2].numel() > 1 and shape[:2].numel() == layout.rows:
            mode.meets_unknown("the gradient of a parameter of places")
            return _Expanded.apply(t, shape, None)
        return _Expanded.apply(t, shape, layout)
    if shape and (len(shape) > t.dim() or t.shape[0] < shape[0]):
        mode.meets_unknown("the gradient of a value broadcast over tokens")
    return _Expanded.apply(t, shape, None)


def _expand(mode: batch_invariant_mode, func: Callable, t: Tensor, *sizes, **kwargs):
    if not t.requires_grad or not torch.is_grad_enabled():
        return NotImplemented
    shape = func(t.detach(), *sizes, **kwargs).shape
    return NotImplemented if shape == t.shape else _expanded(mode, t, shape)


class _Expanded(torch.autograd.Function):
    """A tensor expanded to a shape, whose gradient our ops sum; a parameter's (with a layout) is folded over tokens."""

    @staticmethod
    def forward(ctx, t, shape, layout):
        ctx.shape, ctx.parameter, ctx.layout = t.shape, None if layout is None else t, layout
        return t.expand(shape)

    @staticmethod
    def backward(ctx, grad):
        if ctx.parameter is not None:
            folded = _folded(grad, ctx.parameter, ctx.layout)
            return None if folded is None else folded.view(ctx.shape), None, None
        wanted = (1,) * (grad.dim() - len(ctx.shape)) + tuple(ctx.shape)
        summed = [at for at in range(grad.dim()) if wanted[at] == 1 and grad.shape[at] != 1]
        return (_total(grad, summed, grad.dtype) if summed else grad).reshape(ctx.shape), None, None


def _folded(grad: Tensor, parameter: Tensor, layout: TokenLayout) -> Tensor | None:
    """Returns the gradient of a parameter that was broadcast to grad's shape, or adds it to its main_grad: summed over
    features within a token, then folded over tokens in the layout's order."""
    lead = leading(grad.shape, layout.rows)
    if lead is None and grad.dim() > 3 and grad.shape[0] * grad.shape[2] == layout.rows:  # (batch, heads, length, D)
        grad, lead = grad.transpose(1, 2), 2
        parameter = parameter if parameter.dim() < 3 else _without(parameter, -2)
    if lead is None:  # rows that are not the call's tokens
        lead = grad.dim() - parameter.dim()
        layout = dense(1, grad.shape[:lead].numel())
    return fold_elementwise(OP, grad.flatten(0, lead - 1), parameter, layout, name="a parameter")


def _without(parameter: Tensor, dim: int) -> Tensor:
    """Returns a parameter, whose gradient is to be folded, without a dimension of size 1."""
    out = parameter.detach().squeeze(dim)
    if (main_grad := getattr(parameter, "main_grad", None)) is not None:
        out.main_grad = main_grad.squeeze(dim)
    return out


def leading(shape: torch.Size, rows: int) -> int | None:
    """Returns how many leading dimensions are the tokens of a layout; None if they are not."""
    for lead in range(1, len(shape) + 1):
        if shape[:lead].numel() == rows:
            return lead
    return None


# Sums.


def _total(x: Tensor, dims: list[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Sums dimensions of x, kept with size 1, times scale: in fp32, rounded once to dtype; without autograd."""
    kept, count = [d for d in range(x.dim()) if d not in dims], torch.Size(x.shape[d] for d in dims).numel()
    total = row_sums(x.permute(*kept, *dims).reshape(-1, count), scale, dtype)
    return total.view([1 if d in dims else x.shape[d] for d in range(x.dim())])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dims, dtype, scale):
        ctx.shape, ctx.dtype, ctx.scale = x.shape, x.dtype, scale
        return _total(x, dims, dtype, scale)

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.scale if ctx.scale != 1.0 else grad).to(ctx.dtype).expand(ctx.shape), None, None, None


def _reduce(mean: bool) -> Callable:
    def route(mode, func, x, dim=None, keepdim=False, *, dtype=None, out=None):
        if x.dtype not in FLOATS or dtype not in (None, *FLOATS):
            return NotImplemented
        if dim is None or out is not None or x.dim() == 0:
            return _unknown(mode, func) if x.dim() else NotImplemented
        dims = sorted({d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim or range(x.dim()))})
        count = torch.Size(x.shape[d] for d in dims).numel()
        y = _Sum.apply(x, dims, dtype or x.dtype, 1.0 / max(count, 1) if mean else 1.0)
        return y if keepdim else y.squeeze(dims)

    return route


def _norm(mode, func, x, p=2, dim=None, keepdim=False, dtype=None, out=None):
    x = x if isinstance(p, int | float) and p == 2 and dim is not None and out is None and dtype is None else None
    if x is None or x.dtype not in FLOATS:
        return _unknown(mode, func)
    dims = sorted({d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim)})
    y = _Sum.apply(x.float() * x.float(), dims, torch.float32, 1.0).sqrt().to(x.dtype)
    return y if keepdim else y.squeeze(dims)


def _normalize(mode, func, x, p=2.0, dim=1, eps=1e-12, out=None):
    norm = _norm(mode, func, x, p, dim, True, out=out)
    if norm is NotImplemented:
        return norm
    return x / _Expanded.apply(norm.clamp_min(eps), x.shape, None)


def _softmax(name: str) -> Callable:
    op = getattr(bi, name)

    def route(mode, func, x, dim=None, _stacklevel=3, dtype=None):
        if not isinstance(dim, int) or x.dim() == 0:
            return _unknown(mode, func)
        dtype = _stacklevel if isinstance(_stacklevel, torch.dtype) else dtype  # torch.softmax(x, dim, dtype)
        x = x if dtype is None else x.to(dtype)
        if x.dtype not in FLOATS:
            return _unknown(mode, func)
        return op(x.movedim(dim, -1)).movedim(-1, dim)

    return route


# Products.


def _rows(lead: torch.Size):
    """Enters the layout of an input whose rows are not the entered layout's tokens."""
    layout = current_layout(OP)
    if not isinstance(layout, TokenLayout) or layout.rows == lead.numel():
        return nullcontext()
    return dense(lead[:-1].numel(), lead[-1] if lead else 1)


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    cast = lambda t: t if t is None or t.dtype == dtype else t.to(dtype)
    keep = lambda t, c: _with_grad(c.detach(), t.main_grad) if is_parameter(t) and hasattr(t, "main_grad") else c
    return [t if cast(t) is t else keep(t, cast(t)) for t in tensors]


def _product(mode: batch_invariant_mode, x: Tensor, w: Tensor, bias: Tensor | None, across: bool):
    """x (..., K) times w (N, K), or (K, N) if `across`; NotImplemented for what is no such product."""
    for t in (x, w, bias):
        _adopted(mode, t)
    x, w, bias = _autocast(x, w, bias)
    if x.dtype not in FLOATS or w.dtype != x.dtype or w.dim() != 2 or x.dim() < 1:
        return NotImplemented
    grad = getattr(w, "main_grad", None)
    if grad is not None and not grad.is_contiguous() and grad.t().is_contiguous():  # a parameter's transposed view
        w, across = _with_grad(w.detach().t(), grad.t()), not across
    if x.dim() == 1:
        return _product(mode, x[None], w, bias, across)[0]
    is_folded = is_parameter(w) or not w.requires_grad
    with _rows(x.shape[:-1]) if is_folded else dense(1, x.shape[:-1].numel()):
        return gemm("matmul" if across else "linear", "b" if across else "weight", x, w, bias, across=across)


def _linear(mode, func, x, weight, bias=None):
    out = _product(mode, x, weight, bias, across=False)
    return _unknown(mode, func) if out is NotImplemented else out


def _matmul(mode, func, a, b, out=None):
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if out is not None or a.dtype not in FLOATS:
        return _unknown(mode, func)
    if b.dim() >= 2 and a.dim() >= 2 and a.shape[-1] == b.shape[-2] == 1:
        product_of = _elementwise(mode, torch.mul, a, b)
        return a * b if product_of is NotImplemented else product_of
    if b.dim() == 1:
        y = _product(mode, a, b[None], None, across=False)
        return _unknown(mode, func) if y is NotImplemented else y[..., 0]
    y = _product(mode, a, b, None, across=True) if b.dim() == 2 else _batched(a, b)
    return _unknown(mode, func) if y is NotImplemented else y


def _batched(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies matrices (..., M, K) and (..., K, N) one by one."""
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    pairs = zip(*(_split(t, lead) for t in _autocast(a, b)))
    with dense(1, a.shape[-2]):
        parts = [bi.matmul(x, y) for x, y in pairs]
    return torch.stack(parts).view(*lead, a.shape[-2], b.shape[-1]) if parts else a @ b


def _split(t: Tensor, lead: torch.Size) -> Iterable[Tensor]:
    shape = lead + t.shape[-2:]
    t = _Expanded.apply(t, shape, None) if t.requires_grad and t.shape != shape else t.expand(shape)
    return t.reshape(-1, *t.shape[-2:]).unbind(0)


def _addmm(mode, func, given, a, b, *, beta=1, alpha=1, out=None):
    if out is not None or given.dtype not in FLOATS:
        return _unknown(mode, func)
    if beta == alpha == 1 and given.dim() == 1 and b.dim() == 2:
        y = _product(mode, a, b, given, across=True)
        return _unknown(mode, func) if y is NotImplemented else y
    y = _matmul(mode, func, a, b)
    if y is NotImplemented:
        return y
    y, given = y if alpha == 1 else y * alpha, given if beta == 1 else given * beta
    total = _elementwise(mode, torch.add, given, y)
    return given + y if total is NotImplemented else total


# Norms, embedding, attention, loss, order.


def _layer_norm(mode, func, x, normalized_shape, weight=None, bias=None, eps=1e-5, **_):
    if len(normalized_shape) != 1 or x.dtype not in FLOATS:
        return _unknown(mode, func)
    for t in (weight, bias):
        _adopted(mode, t)
    with _rows(x.shape[:-1]):
        return bi.layer_norm(x, weight, bias, eps)


def _rms_norm(mode, func, x, normalized_shape, weight=None, eps=None):
    if len(normalized_shape) != 1 or x.dtype not in FLOATS:
        return _unknown(mode, func)
    _adopted(mode, weight)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    with _rows(x.shape[:-1]):
        return bi.rms_norm(x, weight, eps)


def _embedding(
    mode, func, ids, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False
):
    if max_norm is not None or scale_grad_by_freq or sparse or weight.dtype not in FLOATS:
        return _unknown(mode, func)
    _adopted(mode, weight, embedding=True)
    with _rows(ids.shape):
        return bi.embedding(ids, weight, padding_idx)


def _attention(mode, func, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    known = attn_mask is None and not dropout_p and q.dim() == 4 and (not is_causal or q.shape[2] == k.shape[2])
    if not known or q.dtype not in FLOATS or max(q.shape[-1], v.shape[-1]) > 256:
        return _unknown(mode, func)
    q, k, v = (t.transpose(1, 2) for t in _autocast(q, k, v))
    with _rows(q.shape[:2]):
        return bi.attention(q, k, v, causal=is_causal, scale=scale).transpose(1, 2)


def _cross_entropy(
    mode, func, x, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0,
):  # fmt: skip
    plain = weight is None and size_average is None and reduce is None and not label_smoothing and x.dim() == 2
    if not plain or target.is_floating_point() or x.dtype not in FLOATS:
        return _unknown(mode, func)
    loss = -bi.token_logprob(x, target, ignore_index=ignore_index)[0]
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != ignore_index).sum()


def _sort(mode, func, x, dim=-1, descending=False, stable=False):
    return func(x, dim=dim, descending=descending, stable=True)


def _topk(mode, func, x, k, dim=-1, largest=True, sorted=True):
    """The k largest in a total order: by value, then by index."""
    values, at = torch.sort(x, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), at.narrow(dim, 0, k)))


def _exact(mode, func, x, *args, **kwargs):
    """A sum or scan that is exact for integers alone."""
    return _unknown(mode, func) if x.is_floating_point() else NotImplemented


def _copied(mode, func, x, *args, **kwargs):
    """What may copy an element several times, whose gradients PyTorch adds up."""
    return _unknown(mode, func) if x.requires_grad and torch.is_grad_enabled() else NotImplemented


def _dropout(mode, func, x, p=0.5, training=True, inplace=False):
    return _unknown(mode, func) if p and (training or mode.in_trial) else NotImplemented


_BY_NAME: dict[str, Callable | None] = {
    "linear": _linear, "matmul": _matmul, "__matmul__": _matmul, "__rmatmul__": _matmul, "mm": _matmul, "bmm": _matmul,
    "addmm": _addmm, "baddbmm": _addmm, "sum": _reduce(False), "mean": _reduce(True), "norm": _norm,
    "vector_norm": _norm, "normalize": _normalize, "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"), "layer_norm": _layer_norm, "rms_norm": _rms_norm, "embedding": _embedding,
    "scaled_dot_product_attention": _attention, "cross_entropy": _cross_entropy, "sort": _sort, "argsort": _sort,
    "topk": _topk, "dropout": _dropout, "__getitem__": _item, "expand": _expand, "expand_as": _expand,
    "broadcast_to": _expand, "cumsum": _exact, "prod": _exact, "cumprod": _exact, "index_add": _exact,
    "index_add_": _exact, "repeat": _copied, "repeat_interleave": _copied, "index_select": _copied, "scatter_add": _exact, "scatter_add_": _exact,
}  # fmt: skip
_VIEWS = "view reshape unsqueeze squeeze t transpose permute flatten unflatten chunk split unbind narrow select view_as"
_CASTS = "to float half bfloat16 type type_as contiguous"
_BROADCAST = """
add sub mul div true_divide floor_divide pow maximum minimum where addcmul addcdiv lerp clamp fmod remainder atan2
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__
__pow__ __rpow__ __ipow__ add_ sub_ mul_ div_ pow_ rsub masked_fill masked_fill_
"""
# elementwise, views, creation, and what is exact in any order
_PASSED = """
abs neg __neg__ exp expm1 log log1p log2 log10 sqrt rsqrt square sin cos tan tanh sigmoid relu relu6 silu gelu mish selu
elu softplus leaky_relu hardswish hardsigmoid hardtanh logsigmoid softsign tanh_ relu_ silu_ sigmoid_ exp_ erf sign
reciprocal floor ceil round trunc clamp_min clamp_max clip clamp_ clamp_min_ nan_to_num __abs__ threshold glu
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ eq ne lt le gt ge greater less logical_and logical_or logical_not logical_xor
__and__ __or__ __xor__ __invert__ __rand__ __ror__ bitwise_and bitwise_or bitwise_not isnan isinf isfinite
__floordiv__ __rfloordiv__ __mod__ __lshift__ __rshift__ isin
cat concat stack hstack vstack tensor_split split_with_sizes movedim moveaxis swapaxes swapdims mT tile roll flip rot90
pad tril triu tril_ triu_ diagonal diag
clone detach contiguous_ copy_ fill_ zero_ zeros_like ones_like empty_like full_like rand_like new_zeros new_ones
new_empty new_full new_tensor zeros ones empty full arange tensor as_tensor linspace scalar_tensor from_numpy
any all max min amax amin argmax argmin nonzero one_hot histc bincount searchsorted bucketize unique_consecutive count_nonzero
cpu cuda int long bool double numpy item tolist __len__ __bool__ __int__ __float__ __index__ __contains__ __hash__
__repr__ __format__ __str__ __iter__ size stride dim ndimension numel nelement element_size storage_offset data_ptr
is_floating_point is_complex is_contiguous is_floating get_device is_pinned is_inference requires_grad_ has_names
register_hook retain_grad backward is_same_size is_tensor is_storage untyped_storage storage __setattr__ __delattr__
__setitem__ gather take_along_dim broadcast_tensors meshgrid outer polar view_as_complex view_as_real
scatter scatter_ masked_scatter complex real imag equal allclose cumsum_ result_type promote_types finfo
is_grad_enabled set_grad_enabled _set_grad_enabled no_grad enable_grad is_autocast_enabled _assert_async _assert
"""
_NAMESPACES = torch, torch.Tensor, torch._C, F, torch._C._nn, torch.linalg, torch.special
ROUTES: dict[Callable, Callable | None] = {}
for _names, _route in ((_PASSED, None), (_BROADCAST, _elementwise), (_VIEWS, _view), (_CASTS, _cast)):
    _BY_NAME |= dict.fromkeys(set(_names.split()) - _BY_NAME.keys(), _route)
for _namespace in _NAMESPACES:
    for _key, _route in _BY_NAME.items():
        if callable(_found := getattr(_namespace, _key, None)):
            ROUTES[_found] = _route
