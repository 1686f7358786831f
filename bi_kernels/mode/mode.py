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

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from bi_kernels.mode import functions, parameters
from bi_kernels.mode.parameters import OP, left, unknown
from bi_kernels.ops import logprob, rows
from bi_kernels.tokens import TokenLayout, current_layout, dense


class batch_invariant_mode(TorchFunctionMode):
    """Routes PyTorch's reductions to this package's ops in this thread, until it is left.

    strict: raises ValueError at a function whose result for a token may depend on the batch and which has no route.
    """

    in_trial = False  # whether dropout counts that only training has

    def __init__(self, strict: bool = False):
        super().__init__()
        self.strict = strict
        self.routed: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self._entered: list[int] = []  # how many checkpoints each entry is within

    def __enter__(self) -> "batch_invariant_mode":
        self._entered.append(_checkpoints())
        return super().__enter__()

    def __exit__(self, *error) -> None:
        self._entered.pop()
        super().__exit__(*error)

    def within(self, function: Callable) -> Callable:
        """`function` under this mode wherever it is called, as activation checkpointing does inside backward."""

        @wraps(function)
        def called(*args, **kwargs):
            if self not in _get_current_function_mode_stack():
                with self:
                    return function(*args, **kwargs)
            self._entered.append(_checkpoints())
            try:
                return function(*args, **kwargs)
            finally:
                self._entered.pop()

        return called

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None):
        route, kwargs = ROUTES.get(func, unknown), kwargs or {}
        if route is not None and (route is not unknown or func.__name__ not in ("__get__", "__set__")):
            first, named = _named(args, kwargs) if kwargs else (args, kwargs)
            out = route(self, func, *first, **named)
        else:
            out = NotImplemented
        if out is NotImplemented:
            out = func(*args, **kwargs)
            left(self, func, (*args, *kwargs.values()), out)
            return out
        self.meets_routed(func.__name__)
        return out

    def adopt(self, parameter: nn.Parameter, embedding: bool = False) -> None:
        """Is told of each parameter that a routed function is to read and whose gradient is wanted."""

    def rows(self, lead: torch.Size):
        """Enters the layout of an input whose rows are not the entered layout's tokens."""
        layout = current_layout(OP)
        if not isinstance(layout, TokenLayout) or layout.rows == lead.numel():
            return nullcontext()
        return dense(lead[:-1].numel(), lead[-1] if lead else 1)

    def takes(self, x: torch.Tensor, at: object) -> None:
        """Is told of each index, where gradients are wanted."""

    def meets_routed(self, name: str) -> None:
        """Counts a function that our ops computed. Raises ValueError for one that a checkpoint will compute again where
        the mode is not entered."""
        if not torch.compiler.is_compiling() and self._entered and _checkpoints() > self._entered[-1]:
            raise ValueError(
                f"{OP}: {name} is called in a checkpoint, which computes it again outside the mode; checkpoint "
                "mode.within(function) instead of function"
            )
        self.routed[name] += 1

    def meets_sum(self, *sizes: int) -> None:
        """Is told of the dimensions over which a routed function sums."""

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


def _checkpoints() -> int:
    """Returns how many activation checkpoints the caller's caller is within."""
    frame, count = sys._getframe(2), 0
    while frame is not None:
        count += frame.f_code.co_filename == checkpoint.__file__
        frame = frame.f_back
    return count


def _named(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns arguments with the names of torch's in the place of NumPy's, and the first two by place."""
    named = {ALIASES.get(name, name): value for name, value in kwargs.items()}
    for at, name in enumerate(("input", "other")):
        if name in named and len(args) == at:
            args = (*args, named.pop(name))
    return args, named


ALIASES = {"axis": "dim", "keepdims": "keepdim"}
# elementwise, views, creation, and what is exact in any order
_PASSED = """
abs absolute neg negative __neg__ sqrt rsqrt square relu relu6 leaky_relu hardswish hardsigmoid hardtanh relu_ sign
reciprocal floor ceil round trunc clamp_min clamp_max clip clamp_ clamp_min_ nan_to_num __abs__ threshold __eq__
__ne__ __lt__ __le__ __gt__ __ge__ eq ne lt le gt ge greater less greater_equal less_equal not_equal logical_and
logical_or logical_not logical_xor __and__ __or__ __xor__ __invert__ __rand__ __ror__ bitwise_and bitwise_or
bitwise_not isnan isinf isfinite __floordiv__ __rfloordiv__ __mod__ __lshift__ __rshift__ isin cat concat
concatenate stack hstack vstack tensor_split split_with_sizes movedim moveaxis swapaxes swapdims tile roll flip
rot90 pad tril triu tril_ triu_ diagonal diag clone detach copy_ fill_ zero_ zeros_like ones_like empty_like
full_like new_zeros new_ones new_empty new_full new_tensor zeros ones empty full arange tensor as_tensor
linspace scalar_tensor from_numpy any all max min amax amin argmax argmin nonzero one_hot histc bincount
searchsorted bucketize unique_consecutive count_nonzero cpu cuda int long bool double numpy item tolist __len__
__bool__ __int__ __float__ __index__ __contains__ __hash__ __repr__ __format__ __str__ __iter__ size stride dim
ndimension numel nelement element_size storage_offset data_ptr is_floating_point is_complex is_contiguous get_device
is_pinned is_inference is_neg is_conj requires_grad_ has_names register_hook retain_grad backward
is_same_size is_tensor is_storage
untyped_storage storage __setattr__ __delattr__ __setitem__ gather take_along_dim broadcast_tensors meshgrid outer
polar view_as_complex view_as_real scatter scatter_ masked_scatter complex real imag equal allclose cumsum_
result_type promote_types finfo is_grad_enabled set_grad_enabled _set_grad_enabled no_grad enable_grad
is_autocast_enabled _assert_async _assert
"""
_ROUTES: dict[Callable | None, str] = {
    functions.linear: "linear",
    functions.matmul: "matmul __matmul__ __rmatmul__ mm bmm",
    functions.addmm: "addmm baddbmm",
    functions.patches: "conv1d conv2d conv3d",
    functions.reduce(mean=False): "sum",
    functions.reduce(mean=True): "mean",
    functions.norm: "norm vector_norm",
    functions.normalize: "normalize",
    functions.softmax(rows.softmax): "softmax",
    functions.softmax(logprob.log_softmax): "log_softmax",
    functions.layer_norm: "layer_norm",
    functions.rms_norm: "rms_norm",
    functions.embedding: "embedding",
    functions.attention: "scaled_dot_product_attention",
    functions.cross_entropy: "cross_entropy",
    functions.sort: "sort argsort",
    functions.topk: "topk",
    functions.item: "__getitem__",
    functions.dropout: "dropout",
    functions.draws: "rand randn randint randperm normal bernoulli multinomial rand_like randn_like randint_like",
    functions.exact: "cumsum prod cumprod index_add index_add_ scatter_add scatter_add_",
    functions.repeat: "repeat",
    functions.repeat_interleave: "repeat_interleave",
    functions.copied: "index_select",
    functions.smooth: """
exp expm1 log log1p log2 log10 sin cos tan tanh sigmoid silu gelu mish selu elu softplus logsigmoid softsign erf
""",
    parameters.expand: "expand expand_as broadcast_to",
    parameters.view: """
view reshape unsqueeze squeeze t transpose permute flatten unflatten chunk split unbind narrow select view_as
""",
    parameters.cast: "to float half bfloat16 type type_as contiguous",
    parameters.elementwise: """
add sub mul div multiply subtract divide true_divide floor_divide pow maximum minimum where addcmul addcdiv lerp
clamp fmod remainder atan2 __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__
__rtruediv__ __itruediv__ __pow__ __rpow__ __ipow__ add_ sub_ mul_ div_ pow_ rsub masked_fill masked_fill_
""",
    None: _PASSED,
}
_NAMESPACES = torch, torch.Tensor, torch._C, F, torch._C._nn, torch.linalg, torch.special
ROUTES: dict[Callable, Callable | None] = {
    getattr(space, name): route
    for route, names in _ROUTES.items()
    for space in _NAMESPACES
    for name in names.split()
    if callable(getattr(space, name, None))
}
ROUTES |= {getattr(torch.Tensor, name).__get__: parameters.view for name in ("T", "mT")}
