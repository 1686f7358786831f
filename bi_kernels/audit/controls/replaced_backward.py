"""An op of this package with another backward, of which one gradient is broken."""

from collections.abc import Callable
from functools import partial

import torch

from bi_kernels.tokens import layout_for


class _Replaced(torch.autograd.Function):
    """Computes fn(*args); the gradients that `backward` returns by position take the place of fn's own.

    backward(layout, dy, args, grads) -> {position: gradient}; None leaves what it wrote into main_grad. fn's own are in
    `grads`, or went on from main_grad; that of the argument at `position` is not computed.
    """

    @staticmethod
    def forward(ctx, fn, backward, position, *args):
        ctx.fn, ctx.replace, ctx.position, ctx.args = fn, backward, position, args
        lead = args[0].shape[:-1] if args[0].is_floating_point() else args[0].shape
        ctx.layout = layout_for("control", lead, any(ctx.needs_input_grad[4:]))
        return fn(*(a.detach() for a in args))

    @staticmethod
    def backward(ctx, dy):
        wanted = ctx.needs_input_grad[3:]
        copies = [a.detach().requires_grad_(wanted[i] and i != ctx.position) for i, a in enumerate(ctx.args)]
        for a, copy in zip(ctx.args, copies):
            copy.main_grad = getattr(a, "main_grad", None)
        if any(copy.requires_grad for copy in copies):
            with torch.enable_grad(), ctx.layout:
                ctx.fn(*copies).backward(dy)
        grads = [copy.grad for copy in copies]
        if ctx.position is None or wanted[ctx.position]:
            for i, grad in ctx.replace(ctx.layout, dy, ctx.args, grads).items():
                grads[i] = grad
        return None, None, None, *grads


def with_backward(fn: Callable, backward: Callable, name: str, position: int | None = None) -> Callable:
    """Returns fn with another backward; position: of the parameter whose gradient only that one computes."""

    def control(*args, defect: bool = True, **constants):
        mended = {} if defect else {"defect": False}
        return _Replaced.apply(partial(fn, **constants), partial(backward, **constants, **mended), position, *args)

    control.__name__ = name
    return control
