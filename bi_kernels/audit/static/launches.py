"""What Triton launches and torch dispatches while something runs, recorded."""

import contextlib
import inspect
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import FunctionType

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
    """One form in which a kernel was launched, with what was found in its AST and in its binary."""

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
    """A launch on the interpreter, as a process without it may repeat it for the compiler."""

    fn: FunctionType
    arguments: dict
    options: dict

    def variant(self) -> Variant:
        words = [f"{k}={_word(v)}" for k, v in (self.arguments | self.options).items()]
        return Variant(self.fn.__qualname__, ", ".join(words))

    def message(self) -> bytes | None:
        """None where no other process could import the kernel."""
        if self.fn.__module__ == "__main__" or "<locals>" in self.fn.__qualname__:
            return None
        where = inspect.getsourcefile(self.fn), self.fn.__qualname__, self.fn.__code__.co_firstlineno
        with contextlib.suppress(Exception):
            return pickle.dumps(((self.fn.__module__, *where), self.arguments, self.options))


@dataclass
class Launches:
    """The variants that `recorded` saw; findings among the operators that torch ran and in how kernels were chosen."""

    variants: dict = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    def compiled(self, kernel) -> None:
        if isinstance(kernel, CompiledKernel):
            self.variants.setdefault(kernel.hash, kernel)

    def interpreted(self, fn: FunctionType, args: tuple, kwargs: dict, plain: Sequence = ()) -> None:
        """Records a launch; plain: names or numbers of the parameters that the kernel is not specialised by."""
        constant = _constexprs(fn)
        given = dict(zip(constant, args)) | {k: v for k, v in kwargs.items() if k in constant}
        for i, name in enumerate(constant):
            if type(given.get(name)) is int and not constant[name] and {i, name} & {*plain}:
                given[name] = 3
        kinds = tuple((k, v if constant[k] else _kind(v)) for k, v in given.items())
        options = {k: v for k, v in kwargs.items() if k not in constant}
        key = fn, str(kinds), str(options)
        if key not in self.variants:
            stands = {k: v if constant[k] else _stand_in(v) for k, v in given.items()}
            self.variants[key] = Request(fn, stands, options)


@cache
def _constexprs(fn: FunctionType) -> dict[str, bool]:
    """Returns whether each parameter of a kernel is a constexpr."""
    parameters = inspect.signature(fn).parameters
    return {name: KernelParam(i, p, False, False).is_constexpr for i, (name, p) in enumerate(parameters.items())}


def _kind(value):
    """Returns what Triton compiles by of an argument: as `_stand_in`, in words."""
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return tuple(map(_kind, value)) if type(value) is tuple else _stand_in(value)


def _stand_in(value):
    """Leaves of an argument what Triton compiles by: dtype, alignment, block; 1, a multiple of 16, 64 bits."""
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


def _word(value) -> str:
    if isinstance(value, TensorDescriptor):
        return f"{value.base.dtype}{value.block_shape}"
    return str(getattr(value, "dtype", value))


@cache
def _dispatched(beside_dynamo: bool) -> type[TorchDispatchMode]:
    """Makes the mode that notes scatters by the operator that runs, backward included, whatever Python called it.

    beside_dynamo: torch.compile may be at work, and must leave the mode alone; to say so loads torch._dynamo, which
    takes as long as torch itself.
    """

    class Dispatched(TorchDispatchMode):
        _should_skip_dynamo = classmethod(lambda cls: beside_dynamo)

        def __init__(self, launches: Launches):
            super().__init__()
            self.launches = launches

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if name := _suspect(func):
                given = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
                wants = any(given.get(a) is not None and given[a] is not False for a in ACCUMULATES)
                if (wants or SCATTERS.fullmatch(name)) and not _apart(name, given):
                    self.launches.add(Finding(SCATTER, name, 0, str(func), "torch"))
            return func(*args, **kwargs)

    return Dispatched


@cache
def _suspect(func) -> str:
    """Returns the name of an operator that scatters, or can be asked to accumulate."""
    name = func._schema.name.partition("::")[2].strip("_").removesuffix("_impl")
    return name if SCATTERS.fullmatch(name) or name in ACCUMULATING else ""


def _apart(name: str, given: dict) -> bool:
    """Tells whether no two elements of a scatter can meet, whatever its index holds: it has one along the dimension, as
    the backward of a logprob's gather, or counts the rows beside, as that of x[torch.arange(len(x)), last]."""
    if name == "index_put":
        return any(i is not None and _counts(i) for i in given["indices"])
    index = given.get("index")
    along = isinstance(index, torch.Tensor) and index.dim() and name in ("scatter", "scatter_add", "scatter_reduce")
    return bool(along) and index.shape[given["dim"]] == 1


def _counts(index: torch.Tensor) -> bool:
    return index.dim() == 1 and index.dtype == torch.int64 and index.tolist() == list(range(len(index)))


@contextlib.contextmanager
def recorded(run: bool = True) -> Iterator[Launches]:
    """Records every kernel that Triton launches, anybody's, compiled or interpreted. run=False: without running any, so
    that shapes too large for the interpreter show what they would launch."""
    launches = Launches()

    def compiled(self, *args, warmup, **kwargs):
        kernel = stock[JITFunction](self, *args, warmup=warmup or not run, **kwargs)
        launches.compiled(kernel)
        return kernel

    def interpreted(self, *args, grid, warmup, **kwargs):
        launches.interpreted(self.fn, args, kwargs, self.kwargs.get("do_not_specialize") or ())
        return stock[InterpretedFunction](self, *args, grid=grid, warmup=warmup or not run, **kwargs)

    def again(self, grid):
        launches.compiled(self)
        return stock[CompiledKernel](self, grid)

    def chosen(kind):
        def choose(self, *args, **kwargs):
            launches.add(run_time(self, "launch"))
            return stock[kind](self, *args, **kwargs)

        return choose

    places = {
        JITFunction: ("run", compiled),
        InterpretedFunction: ("run", interpreted),
        CompiledKernel: ("__getitem__", again),
        **{kind: ("run", chosen(kind)) for kind in CHOOSERS},
    }
    stock = {owner: getattr(owner, name) for owner, (name, _) in places.items()}
    with contextlib.ExitStack() as undo:
        for owner, (name, ours) in places.items():
            undo.callback(setattr, owner, name, stock[owner])
            setattr(owner, name, ours)
        undo.enter_context(_dispatched("torch._dynamo" in sys.modules)(launches))
        yield launches
