"""Parameters and broadcasting under the mode: whose gradient is summed, in which order."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bi_kernels.ops.parameter_fold import fold_elementwise
from bi_kernels.ops.rows import row_sums
from bi_kernels.tokens import TokenLayout, current_layout, dense, layout_for

OP = "batch_invariant_mode"
FLOATS = torch.bfloat16, torch.float16, torch.float32


def unknown(mode: TorchFunctionMode, func: Callable, /, *args, **kwargs):
    mode.meets_unknown(func.__name__)
    return NotImplemented


def is_parameter(t: object) -> bool:
    """Tells whether a tensor is a parameter, or a view or cast of one that leads to its main_grad."""
    if not isinstance(t, Tensor) or not t.requires_grad or not t.is_leaf:
        return False
    return isinstance(t, nn.Parameter) or getattr(t, "main_grad", None) is not None


def adopted(mode: TorchFunctionMode, t: object, embedding: bool = False) -> bool:
    """Tells whether a tensor is a parameter whose gradient is wanted; tells the mode of it."""
    if not is_parameter(t) or not torch.is_grad_enabled():
        return False
    if isinstance(t, nn.Parameter):
        mode.adopt(t, embedding)
    return True


def with_grad(t: Tensor, main_grad: Tensor) -> Tensor:
    t.requires_grad_()
    t.main_grad = main_grad
    return t


def view(mode: TorchFunctionMode, func: Callable, p: object, /, *args, **kwargs):
    """A view of a parameter, whose main_grad is the same view of the parameter's."""
    if not adopted(mode, p) or getattr(p, "main_grad", None) is None:
        return NotImplemented
    out = func(p.detach(), *args, **kwargs)
    grads = func(p.main_grad, *args, **kwargs)
    for part, grad in zip(*((t,) if isinstance(t, Tensor) else t for t in (out, grads))):
        if grad.untyped_storage().data_ptr() != p.main_grad.untyped_storage().data_ptr():
            return unknown(mode, func)
        with_grad(part, grad)
    return out


def cast(mode: TorchFunctionMode, func: Callable, p: object, /, *args, **kwargs):
    """A parameter in another dtype, whose main_grad is the parameter's."""
    if (
        not is_parameter(p)
        or not torch.is_grad_enabled()
        or (out := func(p.detach(), *args, **kwargs)).dtype == p.dtype
    ):
        return NotImplemented
    if not adopted(mode, p) or getattr(p, "main_grad", None) is None:
        return NotImplemented
    return with_grad(out, p.main_grad)


def elementwise(mode: TorchFunctionMode, func: Callable, /, *args, **kwargs):
    tensors = [t for t in args if isinstance(t, Tensor)]
    if len(tensors) < 2:
        return _shifted(mode, func, *args) if tensors and not kwargs else NotImplemented
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return NotImplemented
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    if all(t.shape == shape or not t.requires_grad for t in tensors):
        return NotImplemented
    given = [
        expanded(mode, a, shape) if isinstance(a, Tensor) and a.requires_grad and a.shape != shape else a for a in args
    ]
    return func(*given, **kwargs)


def _shifted(mode: TorchFunctionMode, func: Callable, *args):
    """A parameter plus or minus a number, whose main_grad is the parameter's."""
    p = args[0] if isinstance(args[0], Tensor) else args[1]
    if not is_parameter(p) or not torch.is_grad_enabled():
        return NotImplemented
    if func.__name__ in ("add", "__add__", "__radd__") or func.__name__ in ("sub", "__sub__") and args[0] is p:
        if adopted(mode, p) and getattr(p, "main_grad", None) is not None:
            return with_grad(func(*(a.detach() if a is p else a for a in args)), p.main_grad)
        return NotImplemented
    return unknown(mode, func)


def expanded(mode: TorchFunctionMode, t: Tensor, shape: torch.Size) -> Tensor:
    if adopted(mode, t):
        features = min(t.dim(), len(shape) - 1)
        layout = current_layout(OP) or layout_for(OP, shape[: len(shape) - features])
        if t.dim() == len(shape) > 2 and t.shape[:2].numel() > 1 and shape[:2].numel() == layout.rows:
            mode.meets_unknown("the gradient of a parameter of places")
            return Expanded.apply(t, shape, None)
        return Expanded.apply(t, shape, layout)
    if shape and len(shape) <= 4 and (len(shape) > t.dim() or t.shape[0] < shape[0]):
        mode.meets_unknown("the gradient of a value broadcast over tokens")
    return Expanded.apply(t, shape, None)


def expand(mode: TorchFunctionMode, func: Callable, t: Tensor, *sizes, **kwargs):
    if not t.requires_grad or not torch.is_grad_enabled():
        return NotImplemented
    shape = func(t.detach(), *sizes, **kwargs).shape
    return NotImplemented if shape == t.shape else expanded(mode, t, shape)


class Expanded(torch.autograd.Function):
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
        return (total_of(grad, summed, grad.dtype) if summed else grad).reshape(ctx.shape), None, None


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


def total_of(x: Tensor, dims: list[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Sums dimensions of x, kept with size 1, times scale: in fp32, rounded once to dtype; without autograd."""
    kept, count = [d for d in range(x.dim()) if d not in dims], torch.Size(x.shape[d] for d in dims).numel()
    total = row_sums(x.permute(*kept, *dims).reshape(-1, count), scale, dtype)
    return total.view([1 if d in dims else x.shape[d] for d in range(x.dim())])
