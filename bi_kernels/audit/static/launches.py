"""Records the kernels that Triton launches and the scatters that torch dispatches."""

import contextlib
import inspect
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import FunctionType
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelParam
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.audit.static.finding import ACCUMULATES, ACCUMULATING, CHOOSERS, SCATTER, SCATTERS, Finding
from bi_kernels.audit.static.function import run_time


@dataclass
class Variant:
    """One form in which a kernel was launched, with the findings in its source and its binary."""

    kernel: str
    configuration: str
    level: str = "AST only"  # or the architecture it was compiled for, as sm_90
    registers: int | None = None
    spills: int | None = None  # bytes of local memory, a thread
    shared: int | None = None  # bytes, a program
    findings: list[Finding] = field(default_factory=list)
    detail: str = ""


@dataclass
class Request:
    """A launch on the interpreter, to be compiled by another process; its arguments are stand-ins."""

    fn: FunctionType
    arguments: dict
    options: dict

    def variant(self) -> Variant:
        words = [f"{k}={_describe(v)}" for k, v in (self.arguments | self.options).items()]
        return Variant(self.fn.__qualname__, ", ".join(words))

    def message(self) -> bytes | None:
        """Pickles the launch; None where no other process could import the kernel."""
        if self.fn.__module__ == "__main__" or "<locals>" in self.fn.__qualname__:
            return None
        where = inspect.getsourcefile(self.fn), self.fn.__qualname__, self.fn.__code__.co_firstlineno
        with contextlib.suppress(Exception):
            return pickle.dumps(((self.fn.__module__, *where), self.arguments, self.options))


@dataclass
class Launches:
    """What `recorded` saw: {key: CompiledKernel, Request or Variant}, and findings of torch's operators and of choices
    at run time; scatters: {torch's operator: whether two of its elements met in one place}."""

    variants: dict = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    scatters: dict[str, bool] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    def compiled(self, kernel) -> None:
        if isinstance(kernel, CompiledKernel):
            self.variants.setdefault(kernel.hash, kernel)

    def interpreted(self, fn: FunctionType, args: tuple, kwargs: dict, unspecialized: Sequence = ()) -> None:
        """Records a launch; unspecialized: names or numbers of the parameters in `do_not_specialize`."""
        constexprs = _parameters(fn)
        arguments = dict(zip(constexprs, args))
        arguments |= {k: v for k, v in kwargs.items() if k in constexprs}
        for i, (name, constexpr) in enumerate(constexprs.items()):
            if name in arguments and not constexpr:
                plain = type(arguments[name]) is int and {i, name} & {*unspecialized}
                arguments[name] = 3 if plain else _stand_in(arguments[name])
        options = {k: v for k, v in kwargs.items() if k not in constexprs}
        self.variants.setdefault((fn, repr(arguments), repr(options)), Request(fn, arguments, options))


@cache
def _parameters(fn: FunctionType) -> dict[str, bool]:
    """Returns {name: whether it is a constexpr} for a kernel's parameters."""
    parameters = inspect.signature(fn).parameters
    return {name: KernelParam(i, p, False, False).is_constexpr for i, (name, p) in enumerate(parameters.items())}


def _stand_in(value):
    """Reduces an argument to what Triton compiles by: dtype, 16-byte alignment, block; 1, a multiple of 16, 64 bits."""
    if isinstance(value, TensorDescriptor):
        block, strides = list(value.block_shape), [1]
        for n in block[:0:-1]:
            strides.insert(0, -(-n * strides[0] // 16) * 16)
        return replace(value, base=torch.zeros(0, dtype=value.base.dtype), shape=block, strides=strides)
    if isinstance(value, torch.Tensor):
        return torch.zeros(0 if value.data_ptr() % 16 == 0 else 2, dtype=value.dtype)[value.data_ptr() % 16 > 0 :]
    if type(value) is int and -(2**63) <= value < 2**63:
        return 1 if value == 1 else (16 if value % 16 == 0 else 3) + (0 if -(2**31) <= value < 2**31 else 2**40)
    return tuple(map(_stand_in, value)) if type(value) is tuple else 0.5 if type(value) is float else value


def _describe(value) -> str:
    if isinstance(value, TensorDescriptor):
        return f"{value.base.dtype}{value.block_shape}"
    return str(getattr(value, "dtype", value))


def _dispatch_mode(launches: Launches) -> TorchDispatchMode:
    """Makes the mode that records scatters by the operator that runs, backward included."""

    class DispatchMode(TorchDispatchMode):
        # torch.compile must leave the mode alone; to say so loads torch._dynamo, which takes as long as torch itself
        _should_skip_dynamo = classmethod(lambda cls: "torch._dynamo" in sys.modules)

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            name = _base_name(func)
            if (SCATTERS.fullmatch(name) or name in ACCUMULATING) and _adds(name, func, args, kwargs):
                met = _collides(name, func, args, kwargs)
                launches.scatters[name] = launches.scatters.get(name, False) or met
                if met:
                    launches.add(Finding(SCATTER, name, 0, str(func), "torch"))
            return func(*args, **kwargs)

    return DispatchMode()


@cache
def _base_name(func) -> str:
    return func._schema.name.partition("::")[2].strip("_").removesuffix("_impl")


def _given(func, args: tuple, kwargs: dict) -> dict:
    return dict(zip((a.name for a in func._schema.arguments), args)) | kwargs


def _adds(name: str, func, args: tuple, kwargs: dict) -> bool:
    """Tells whether a scatter adds to what is there."""
    given = _given(func, args, kwargs)
    return bool(SCATTERS.fullmatch(name)) or any(
        given.get(a) is not None and given[a] is not False for a in ACCUMULATES
    )


def _collides(name: str, func, args: tuple, kwargs: dict) -> bool:
    """Tells whether a scatter adds two elements to one place: not where its indices differ, as of a permutation."""
    given = _given(func, args, kwargs)
    if name == "index_put":
        shape, places = given["self"].shape, []
        for i in given["indices"]:
            masks = i is not None and i.dtype in (torch.bool, torch.uint8)
            places += i.nonzero(as_tuple=True) if masks else [i]
        numbers = torch.broadcast_tensors(*(i % n for i, n in zip(places, shape) if i is not None))
        return len(torch.stack([i.flatten() for i in numbers]).unique(dim=1)[0]) < numbers[0].numel()
    index = given["self" if name == "bincount" else "index"]
    if not index.numel():
        return False
    along = index.dim() > 0 and name in ("scatter", "scatter_add", "scatter_reduce")
    in_order = index.sort(given["dim"]).values if along else index.flatten().sort().values
    return bool((in_order.diff(dim=given["dim"] if along else 0) == 0).any())


@contextlib.contextmanager
def recorded(run: bool = True) -> Iterator[Launches]:
    """Records every kernel that Triton launches meanwhile, compiled or interpreted. run=False launches none, so that
    shapes too large for the interpreter show what they would launch."""
    launches = Launches()

    def compiled(stock):
        def launch(self, *args, warmup, **kwargs):
            kernel = stock(self, *args, warmup=warmup or not run, **kwargs)
            launches.compiled(kernel)
            return kernel

        return launch

    def interpreted(stock):
        def launch(self, *args, grid, warmup, **kwargs):
            launches.interpreted(self.fn, args, kwargs, self.kwargs.get("do_not_specialize") or ())
            return stock(self, *args, grid=grid, warmup=warmup or not run, **kwargs)

        return launch

    def calls(record):  # the original, after its owner was recorded
        return lambda stock: lambda self, *args, **kwargs: (record(self), stock(self, *args, **kwargs))[1]

    chosen = calls(lambda chooser: launches.add(run_time(chooser, "launch")))
    methods = [(JITFunction, "run", compiled), (InterpretedFunction, "run", interpreted)]
    methods += [(CompiledKernel, "__getitem__", calls(launches.compiled)), *((c, "run", chosen) for c in CHOOSERS)]
    with contextlib.ExitStack() as undo:
        for owner, name, wrap in methods:
            undo.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        undo.enter_context(_dispatch_mode(launches))
        yield launches
