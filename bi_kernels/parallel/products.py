"""Products and QK-norm of weights that are cut along their rows over ranks, forward and backward.

A rank's columns of a product are whole sums. dX = dY W sums over the columns of all ranks: so dY is gathered, and the
weight exchanged for all rows of the rank's columns of x. dW and dbias are the rank's own, and are computed meanwhile.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bi_kernels.checks import aligned
from bi_kernels.ops import norm
from bi_kernels.ops.gemm.gemm import fold_bias, fold_weight, linear, product
from bi_kernels.parallel.exchange import beside, gathering, own, recutting
from bi_kernels.tokens import main_grad

PIECE, PIECES = 1024, 4  # tokens that a product is cut at, the least and into how many: the next is on its way


class OfWhole(torch.autograd.Function):
    """This rank's columns of a product of x, whole; `part` is the rank's columns of x, whose gradient it is."""

    @staticmethod
    def forward(ctx, group, layout, part, x, weight, bias):
        _check_buffers(weight, bias)
        ctx.group, ctx.layout, ctx.parameters = group, layout, (weight, bias)
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, _, *needed = ctx.needs_input_grad[2:]
        if needs_x:
            dy_of_all, own_columns = gathering(dy, ctx.group), recutting(weight, ctx.group)
        grads = _folds(ctx, dy, x, needed)
        dx = product(beside(dy_of_all()), own_columns().t()) if needs_x else None
        return None, None, dx, None, *grads


class OfParts(torch.autograd.Function):
    """A product, whole, of x of which the ranks have some columns each."""

    @staticmethod
    def forward(ctx, group, layout, part, weight, bias):
        _check_buffers(weight, bias)
        ctx.group, ctx.layout, ctx.parameters = group, layout, (weight, bias)
        x, y = of_parts(group, part, weight, bias)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad[2:]
        if needs_x:
            own_columns = recutting(weight, ctx.group)
        grads = _folds(ctx, dy[:, own(len(weight), ctx.group)], x, needed)
        return None, None, product(dy, own_columns().t()) if needs_x else None, *grads


def _check_buffers(weight: Tensor, bias: Tensor | None) -> None:
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.requires_grad:
            main_grad("linear", parameter, name)


def _folds(ctx, dy: Tensor, x: Tensor, needed: list[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Returns dW and dbias of this rank's rows, None where they went into main_grad."""
    (weight, bias), layout = ctx.parameters, ctx.layout
    dw = fold_weight("linear", dy, x, weight, layout) if needed[0] else None
    return dw, fold_bias("linear", dy, bias, layout) if needed[1] else None


def of_parts(group: dist.ProcessGroup, part: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns x and y, whole. Tokens are cut in pieces, so that one is exchanged while another is computed."""
    rows, ranks = len(part), dist.get_world_size(group)
    x, y = part.new_empty(rows, weight.shape[1]), part.new_empty(rows, len(weight) * ranks)
    cuts = [slice(c[0], c[-1] + 1) for c in torch.arange(rows).tensor_split(max(1, min(PIECES, rows // PIECE)))]
    come = [gathering(part[cut], group) for cut in cuts]
    leave = []
    for cut, arrived in zip(cuts, come):
        leave.append(gathering(linear(beside(arrived(), x[cut]), weight, bias), group))
    for cut, arrived in zip(cuts, leave):
        beside(arrived(), y[cut])
    return x, y


class HeadNorm(torch.autograd.Function):
    """QK-norm of this rank's heads."""

    @staticmethod
    def forward(ctx, group, layout, heads, x, weight, eps):
        main_grad("qk_norm", weight)
        x = aligned(x)
        y, rstd = norm.norm_forward(x, None, weight, eps, trains=True)
        ctx.group, ctx.layout, ctx.heads, ctx.eps, ctx.parameter = group, layout, heads, eps, weight
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[3:5]
        heads, width = ctx.heads, x.shape[-1]
        if needs_weight:
            came = [gathering(t.reshape(-1, heads * width), ctx.group) for t in (x, dy)]
        dx, dw = norm.norm_backward("qk_norm", x, weight, rstd, dy, None, ctx.layout, heads, needs_x, False)
        if needs_weight:
            x, dy = (beside(arrived()).view(-1, width) for arrived in came)
            _, rstd = norm.norm_forward(x, None, weight, ctx.eps, trains=True)
            every = heads * dist.get_world_size(ctx.group)
            _, dw = norm.norm_backward(
                "qk_norm", x, weight, rstd, dy, None, ctx.layout, every, False, True, ctx.parameter
            )
        return None, None, None, dx, dw, None
