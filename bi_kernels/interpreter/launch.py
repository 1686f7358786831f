"""A launch: `triton.language` is the interpreter's meanwhile, and arguments on a CPU stay in place."""

import inspect
import threading
from contextlib import contextmanager
from functools import cache, wraps

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import _normalize_ty
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.interpreter import lockstep
from bi_kernels.interpreter.builder import Unknown
from bi_kernels.interpreter.formats import numbers
from bi_kernels.interpreter.memory import Memory
from bi_kernels.interpreter.tensors import OPERATORS, Semantic, decided, index, short_operator, side

LOCK = threading.RLock()  # the interpreter is one for all threads


def builtin(member):
    """Returns an operation that, in an interpreted kernel, is given the interpreter's semantic by itself."""
    operation = getattr(member, "__wrapped__", member)

    @wraps(member)
    def call(*args, **kwargs):
        if Launch.semantic is not None:
            kwargs["_semantic"] = Launch.semantic
        elif kwargs.get("_semantic") is None:
            return member(*args, **kwargs)  # says that a kernel is needed
        return operation(*args, **kwargs)

    call.__wrapped__ = operation  # which Gluon takes
    return call


@cache
def _patches() -> list[tuple]:
    """Returns (object, name, value outside, value inside) of what differs in `triton.language` while a kernel runs."""
    scope = stock._LangPatchScope()
    stock._patch_lang_tensor(tl.tensor, scope)
    for language in (tl, tl.core):
        stock._patch_lang_core(language, scope)
    inside = {(owner, name): inspect.getattr_static(owner, name) for owner, name, _ in scope._changes}
    scope.restore()
    inside |= {(tl.tensor, "__repr__"): _shown, (tl.tensor, "__str__"): _shown}
    inside |= {(tl, "range"): Semantic.loop, (tl.core, "range"): Semantic.loop}
    inside |= {(tl.tensor, "__bool__"): _truth, (tl.tensor, "T"): property(lambda t: tl.trans(t))}
    inside[tl.tensor, "__index__"] = lambda t: decided(t, int)
    inside[tl.tensor, "__getitem__"] = index(tl.tensor.__getitem__)
    for name, (compute, names) in OPERATORS.items():
        inside[tl.tensor, name] = short_operator(getattr(tl.tensor, name), compute, names)
    return [(owner, name, vars(owner).get(name, stock._MISSING), value) for (owner, name), value in inside.items()]


@contextmanager
def _language():
    """Makes `triton.language` the interpreter's."""
    for owner, name, _, value in _patches():
        setattr(owner, name, value)
    Launch.semantic = stock.interpreter_semantic
    try:
        with np.errstate(all="ignore"):  # infinities and NaN are results like any other
            yield
    finally:
        Launch.semantic = None
        for owner, name, value, _ in _patches():
            delattr(owner, name) if value is stock._MISSING else setattr(owner, name, value)


def _shown(t: tl.tensor) -> str:
    """Shows a tile in a debugger and `print`: the numbers of a bf16, which NumPy knows as raw bits only."""
    if side():
        raise Unknown
    handle = t.handle
    return f"{numbers(handle)} {t.dtype}" if handle.dtype.scalar.is_bf16() else repr(handle.data)


def _truth(t: tl.tensor) -> bool:
    return t.numel.value > 1 or decided(t, bool)


@cache
def _signature(fn) -> tuple[inspect.Signature, frozenset[str]]:
    """Returns a kernel's signature and which of its parameters are constexpr."""
    signature = inspect.signature(fn)
    constexprs = [n for n, p in signature.parameters.items() if _normalize_ty(p.annotation) == "constexpr"]
    return signature, frozenset(constexprs)


def _on_cpu(value) -> bool:
    if isinstance(value, TensorDescriptor):
        value = value.base
    return value.device.type == "cpu" if isinstance(value, torch.Tensor) else not hasattr(value, "data_ptr")


class Launch(stock.GridExecutor):
    """Launches a kernel like stock, whose patches, copies and inspections are made once or, on the CPU, never."""

    semantic = None  # the interpreter's, while a kernel runs
    calls = staticmethod(lockstep.run)  # of a kernel with its arguments, for each place of its grid

    def __init__(self, fn, arg_names, grid, pre_run_hooks=()):
        self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
        self.signature, self.constexprs = _signature(fn)

    def _init_args_hst(self, args, kwargs):
        in_place = not any(isinstance(value, tuple) or not _on_cpu(value) for value in (*args, *kwargs.values()))
        return (args, kwargs) if in_place else super()._init_args_hst(args, kwargs)

    def _restore_args_dev(self, args, host_args, kwargs, host_kwargs):
        if host_args is not args:
            super()._restore_args_dev(args, host_args, kwargs, host_kwargs)

    def __call__(self, *args, **kwargs):
        with LOCK:
            self._run(args, kwargs)

    def _run(self, args, kwargs):
        kwargs = {name: value for name, value in kwargs.items() if name in self.signature.parameters}
        host_args, host_kwargs = self._init_args_hst(args, kwargs)
        for hook in self.pre_run_hooks:
            hook(*host_args, **host_kwargs)
        with _language():
            bound = self.signature.bind(*host_args, **host_kwargs)
            bound.apply_defaults()
            values = {n: v if n in self.constexprs else stock._implicit_cvt(v) for n, v in bound.arguments.items()}
            grid = self.grid(values) if callable(self.grid) else self.grid
            grid = (*grid, 1, 1, 1)[: max(3, len(grid))]
            stock.interpreter_builder.set_grid_dim(*grid)
            stock.interpreter_builder.memory = Memory(bound.arguments)
            try:
                self.calls(self.fn, values, [*np.ndindex(*grid)])
            except Exception as e:
                if triton.knobs.compilation.front_end_debugging:
                    raise
                raise InterpreterError(repr(e)) from e
            finally:
                stock.interpreter_builder.memory = None
        self._restore_args_dev(args, host_args, kwargs, host_kwargs)
