"""An op, from its launcher on: under autograd in eager mode, and as a custom op under torch.compile.

A custom op is opaque to the compiler, which sees no launch, and so cannot freeze the tile of the traced M; eager code
does not pay the dispatcher's 25 µs. Its gradient is one of custom ops too, so a step that trains has no graph break:

    @writes("dx")                                   # what the backward launches; it writes where it is told to
    def _scale_gradient(dy, factor: float, dx) -> None: ...

    def _save(ctx, inputs, y): ctx.factor = inputs[1]
    def _backward(ctx, dy):
        _scale_gradient(dy, ctx.factor, dx := torch.empty_like(dy))
        return dx, None                             # one of each input

    scale = Op("scale", _launch, _fake, _save, _backward)
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch.autograd.function import once_differentiable

from bi_kernels.checks import INFERENCE
from bi_kernels.compat import apply_of, is_fake, is_transformed


def custom_op(name: str, function: Callable, fake: Callable, mutates: Sequence[str] = ()) -> Callable:
    """Registers a custom op, which torch.compile does not look into. Arguments without annotation are tensors or
    None."""

    def call(*args):
        return function(*args)

    signature = inspect.signature(function)
    # autograd leaves out arguments that are their defaults
    required = [p.replace(default=p.empty) for p in signature.parameters.values()]
    typed = [p.replace(annotation=torch.Tensor | None) if p.annotation is p.empty else p for p in required]
    call.__signature__ = signature.replace(parameters=typed)
    made = torch.library.custom_op(f"bi_kernels::{name}", call, mutates_args=mutates)
    made.register_fake(fake)
    return made


def _is_traced(args: tuple) -> bool:
    """Tells whether torch.compile traces what is called with these; its first tracers do not say so in a backward."""
    return torch.compiler.is_compiling() or any(is_fake(a) for a in args if isinstance(a, torch.Tensor))


def writes(*outputs: str) -> Callable:
    """Decorates a launcher, which returns nothing and writes to the tensors of these names, so that torch.compile sees
    a custom op. Arguments without annotation are tensors or None."""

    def decorate(function: Callable) -> Callable:
        name = f"{function.__module__.rpartition('.')[2]}_{function.__name__.strip('_')}"
        opaque = custom_op(name, function, lambda *args: None, outputs)

        @wraps(function)
        def call(*args) -> None:
            (opaque if _is_traced(args) else function)(*args)

        return call

    return decorate


def _like_first(*args):
    first = next(a for a in args if isinstance(a, torch.Tensor))
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _save_tensors(ctx, inputs, output) -> None:
    ctx.save_for_backward(*[a for a in inputs if isinstance(a, torch.Tensor)])


def _without_gradients(backward: Callable) -> Callable:
    """Returns a backward that is skipped where every upstream gradient is None, as a function may return it."""

    def call(ctx, *grads):
        return backward(ctx, *grads) if any(g is not None for g in grads) else (None,) * len(ctx.needs_input_grad)

    return call


class Op:
    """A launcher that returns a tensor or a list of them. Its arguments without annotation are tensors or None.

    backward(ctx, *grads), save(ctx, inputs, outputs): as backward and setup_context of a torch.autograd.Function; a
    gradient may be None, and all tensors are saved unless `save` is given. fake: returns empty outputs for
    torch.compile; by default one like the first tensor. Arguments with defaults are what a call that trains alone is
    given, by `training`. direct: what an eager call without a gradient calls, if not the launcher; flat: returns the
    launcher's arguments from those.
    """

    def __init__(
        self,
        name: str,
        launch: Callable,
        backward: Callable,
        fake: Callable = _like_first,
        save: Callable = _save_tensors,
        direct: Callable | None = None,
        flat: Callable | None = None,
    ):
        self._direct, self._flat = direct or launch, flat or (lambda *args: args)
        self.backward = backward = _without_gradients(backward)
        self.launch, several = launch, inspect.signature(launch).return_annotation is not torch.Tensor
        self._opaque = custom_op(name, launch, fake)
        defaults = [p.default for p in inspect.signature(launch).parameters.values() if p.default is not p.empty]
        self._untrained = tuple(defaults)

        def saved(ctx, inputs, output) -> None:
            ctx.set_materialize_grads(False)
            save(ctx, inputs, output)

        def forward(ctx, *args):  # of a setup_context of its own PyTorch reads the signature in every call: 25 µs
            output = tuple(launch(*args)) if several else launch(*args)
            saved(ctx, args, output)
            return output

        methods = {"forward": forward, "backward": once_differentiable(backward)}
        function = type(name, (torch.autograd.Function,), {n: staticmethod(f) for n, f in methods.items()})
        self._differentiable = apply_of(function)
        of_list = lambda ctx, grads: backward(ctx, *grads)
        self._opaque.register_autograd(of_list if several else backward, setup_context=saved)

    def raw(self, *args):
        """Launches, within a backward."""
        return self._opaque(*args, *self._untrained) if _is_traced(args) else self.launch(*args)

    def __call__(self, *args, training: Callable[[], tuple] | None = None):
        """Calls the launcher: directly, under autograd where a gradient is wanted, or as a custom op. training: returns
        the last arguments of a call that trains."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        trains = torch.is_grad_enabled() and True in [t.requires_grad for t in tensors]
        if torch.compiler.is_compiling():
            more = training() if trains and training is not None else self._untrained
            return self._opaque(*self._flat(*args), *more)
        if is_transformed(tensors):
            raise NotImplementedError(
                "bi_kernels: torch.func transforms and forward-mode differentiation are not supported; "
                "call an op with plain tensors, and backward()"
            )
        if any(map(is_fake, tensors)):
            if trains:
                raise NotImplementedError(
                    "bi_kernels: an op was called with fake tensors that require a gradient, expected torch.no_grad()"
                )
            return self._opaque(*self._flat(*args), *self._untrained)
        device = tensors[0].get_device()  # −1 for a CPU
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton launches on the current device
                return self(*args, training=training)
        if not trains:
            return self._direct(*args)
        try:
            return self._differentiable(*self._flat(*args), *(training() if training is not None else self._untrained))
        except RuntimeError as error:
            if "Inference tensors cannot be saved" in str(error):
                raise TypeError(INFERENCE) from None
            raise
