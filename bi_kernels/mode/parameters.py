"""Parameters and broadcasting under the mode: whose gradient is summed, in which order."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bi_kernels.ops.parameter_fold import fold_elementwise
from bi_kernels.ops.rows import row_sums
from bi_kernels.tokens import TokenLayout, current_layout, dense

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
    """Makes t a leaf that leads to a parameter's main_grad, also where PyTorch computes its gradient."""
    t.requires_grad_()
    t.main_grad = main_grad
    t.register_post_accumulate_grad_hook(_into_main_grad)
    return t


def _into_main_grad(t: Tensor) -> None:
    if t.grad is not None:
        t.main_grad.add_(t.grad)
        t.grad = None


def left(mode: TorchFunctionMode, func: Callable, given: tuple, out: object) -> None:
    """Tells the mode where PyTorch computes a parameter's gradient: of a function that is not routed."""
    out = given[0] if out is None and given else out  # of an assignment
    out = out[0] if isinstance(out, (tuple, list)) and out else out
    if not isinstance(out, Tensor) or not out.requires_grad:
        return
    for t in given:
        for part in t if isinstance(t, (tuple, list)) else (t,):
            folds = is_parameter(part) and (mode.in_trial or getattr(part, "main_grad", None) is not None)
            if folds and part is not out and torch.is_grad_enabled():
                mode.meets_unknown(f"the gradient of {func.__name__}")
                return


def computed(mode: TorchFunctionMode, *weights: object) -> None:
    """Tells the mode of weights that are no parameters, but have a gradient: their makers see a sum over one call."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in weights):
        mode.meets_unknown("the gradient of a computed weight")


def view(mode: TorchFunctionMode, func: Callable, p: object, /, *args, **kwargs):
    """A view of a parameter, whose main_grad is the same view of the parameter's."""
    if not adopted(mode, p) or getattr(p, "main_grad", None) is None:
        return NotImplemented
    out = func(p.detach(), *args, **kwargs)
    grads = func(p.main_grad, *args, **kwargs)
    pairs = [*zip(*((t,) if isinstance(t, Tensor) else t for t in (out, grads)))]
    if not all(_is_folded_into(grad, p.main_grad) for _, grad in pairs):
        mode.meets_unknown(f"the gradient of {func.__name__} of a parameter")
        return NotImplemented
    for part, grad in pairs:
        with_grad(part, grad)
    return out


def _is_folded_into(grad: Tensor, main_grad: Tensor) -> bool:
    """Tells whether ops may fold into a view of a main_grad: it lies in one piece, perhaps transposed."""
    whole = grad.is_contiguous() or grad.dim() == 2 and grad.t().is_contiguous()
    return whole and grad.untyped_storage().data_ptr() == main_grad.untyped_storage().data_ptr()


def cast(mode: TorchFunctionMode, func: Callable, p: object, /, *args, **kwargs):
    """A parameter in another dtype, whose main_grad is the parameter's."""
    if not is_parameter(p) or not torch.is_grad_enabled():
        return NotImplemented
    out = func(p.detach(), *args, **kwargs)
    if out.dtype == p.dtype or not adopted(mode, p) or getattr(p, "main_grad", None) is None:
        return NotImplemented
    return with_grad(out, p.main_grad)


COMPLEX = ("mul", "__mul__", "multiply", "__rmul__")  # whose products a CPU fuses, but not at the end of a tensor


def elementwise(mode: TorchFunctionMode, func: Callable, /, *args, **kwargs):
    tensors = [t for t in args if isinstance(t, Tensor)]
    if func.__name__ in COMPLEX and any(t.dtype == torch.complex64 and t.device.type == "cpu" for t in tensors):
        double = [t.to(torch.complex128) if isinstance(t, Tensor) and t.is_complex() else t for t in args]
        return func(*double, **kwargs).to(torch.complex64)
    if len(tensors) < 2:
        return _shifted(mode, func, *args) if tensors and not kwargs else NotImplemented
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return NotImplemented
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    apart = lambda t: t.requires_grad and (t.shape != shape or is_parameter(t))
    if not any(apart(t) for t in tensors):
        return NotImplemented
    given = [expanded(mode, a, shape) if isinstance(a, Tensor) and apart(a) else a for a in args]
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
    """Returns a tensor that needs a gradient, expanded to a shape."""
    if adopted(mode, t):
        return Expanded.apply(t, shape, True, current_layout(OP))
    if shape and len(shape) <= 4 and (len(shape) > t.dim() or t.shape[0] < shape[0]):
        mode.meets_unknown("the gradient of a value broadcast over tokens")
    return Expanded.apply(t, shape, False, None)


def expand(mode: TorchFunctionMode, func: Callable, t: Tensor, *sizes, **kwargs):
    if not t.requires_grad or not torch.is_grad_enabled():
        return NotImplemented
    shape = func(t.detach(), *sizes, **kwargs).shape
    return NotImplemented if shape == t.shape and not is_parameter(t) else expanded(mode, t, shape)


class Expanded(torch.autograd.Function):
    """A tensor expanded to a shape, whose gradient our ops sum; a parameter's is folded over tokens."""

    @staticmethod
    def forward(ctx, t, shape, is_folded, layout):
        ctx.shape, ctx.parameter, ctx.layout = t.shape, t if is_folded else None, layout
        return t.expand(shape)

    @staticmethod
    def backward(ctx, grad):
        if ctx.parameter is not None:
            folded = _folded(grad, ctx.parameter, ctx.layout)
            return None if folded is None else folded.view(ctx.shape), None, None, None
        wanted = (1,) * (grad.dim() - len(ctx.shape)) + tuple(ctx.shape)
        summed = [at for at in range(grad.dim()) if wanted[at] == 1 and grad.shape[at] != 1]
        return (total_of(grad, summed, grad.dtype) if summed else grad).reshape(ctx.shape), None, None, None


def _folded(grad: Tensor, parameter: Tensor, layout: TokenLayout | None) -> Tensor | None:
    """Returns the gradient of a parameter that was broadcast to grad's shape, or adds it to its main_grad: summed over
    features within a token, then folded over tokens in the layout's order.

    Tokens are grad's first dimension or first two, over which the parameter is broadcast; one that has a number for
    each place of a sequence is folded over sequences."""
    shape = (1,) * (grad.dim() - parameter.dim()) + tuple(parameter.shape)
    rows = None if layout is None else layout.rows
    if grad.dim() == 4 and shape[2] == 1 and grad.shape[0] * grad.shape[1] != rows == grad.shape[0] * grad.shape[2]:
        grad, shape = grad.transpose(1, 2), (shape[0], shape[2], shape[1], shape[3])  # (batch, heads, length, D)
    lead = min(next((at for at, n in enumerate(shape) if n != 1), len(shape)), 2)
    buffer = getattr(parameter, "main_grad", None)
    if not lead:  # a number for each of grad's
        if buffer is None:
            return grad.to(parameter.dtype)
        buffer.add_(grad)
        return None
    tokens = grad.shape[:lead]
    if tokens.numel() != rows:  # not the call's tokens
        of_places = lead == 1 and grad.dim() > 2
        layout = dense(tokens[0], tokens[1] if lead == 2 else 1) if lead == 2 or of_places else dense(1, tokens[0])
    owner = parameter.detach().view(shape[lead:])
    if buffer is not None:
        owner.main_grad = buffer.view(shape[lead:])
    return fold_elementwise(OP, grad.flatten(0, lead - 1), owner, layout, name="a parameter")


def total_of(x: Tensor, dims: list[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Sums dimensions of x, kept with size 1, times scale: in fp32, rounded once to dtype; without autograd."""
    kept, count = [d for d in range(x.dim()) if d not in dims], torch.Size(x.shape[d] for d in dims).numel()
    total = row_sums(x.permute(*kept, *dims).reshape(-1, count), scale, dtype)
    return total.view([1 if d in dims else x.shape[d] for d in range(x.dim())])
