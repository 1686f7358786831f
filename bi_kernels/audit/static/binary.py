"""The static audit: no atomics, no unordered scatter, no reduction whose order the batch or the device decides.

`source` reads the AST (see syntax.py). `recorded` and `binaries` read the PTX and SASS of every variant launched, and the
scatters that torch dispatched. Not seen: kernels that CUDA C++ or torch.compile's generated code launch.
"""

import contextlib
import hashlib
import importlib.util
import inspect
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.cache import get_cache_manager
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelParam
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.audit import worker
from bi_kernels.audit.static.source import (
    ACCUMULATES,
    ACCUMULATING,
    ATOMIC,
    CHOOSERS,
    PTX,
    SCATTER,
    SCATTERS,
    Finding,
    run_time,
    source,
)

SASS = re.compile(r"^\s*/\*\w+\*/\s+(?:@!?\w+\s+)?((?:ATOM[A-Z]*|(?:U[A-Z]+)?RED(?!UX)[A-Z]*)\b[^;\n]*)", re.MULTILINE)


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
class _Request:
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
        """plain: names or numbers of the parameters that the kernel is not specialised by."""
        parameters = inspect.signature(fn).parameters
        given = dict(zip(parameters, args)) | {k: v for k, v in kwargs.items() if k in parameters}
        for i, (name, p) in enumerate(parameters.items()):
            if name in given and not KernelParam(i, p, False, False).is_constexpr:
                given[name] = _stand_in(3 if type(given[name]) is int and {i, name} & {*plain} else given[name])
        request = _Request(fn, given, {k: v for k, v in kwargs.items() if k not in parameters})
        self.variants.setdefault((fn, str(sorted(given.items())), str(request.options)), request)


def _stand_in(value):
    """What is left of an argument is what Triton compiles by: dtype, alignment, block; 1, a multiple of 16, 64 bits."""
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


class _Dispatched(TorchDispatchMode):
    """Notes scatters by the operator that runs, backward included, whatever Python called it."""

    def __init__(self, launches: Launches):
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if name := _suspect(func):
            given = dict(zip((a.name for a in func._schema.arguments), args)) | (kwargs or {})
            if SCATTERS.fullmatch(name) or any(given.get(a) is not None and given[a] is not False for a in ACCUMULATES):
                self.launches.add(Finding(SCATTER, name, 0, str(func), "torch"))
        return func(*args, **(kwargs or {}))


@cache
def _suspect(func) -> str:
    """The name of an operator that scatters, or can be asked to accumulate."""
    name = func._schema.name.partition("::")[2].strip("_").removesuffix("_impl")
    return name if SCATTERS.fullmatch(name) or name in ACCUMULATING else ""


@contextlib.contextmanager
def recorded(run: bool = True) -> Iterator[Launches]:
    """Records every kernel that Triton launches, anybody's, compiled or interpreted. run=False: without running any, so
    that shapes too large for the interpreter show what they would launch."""
    launches = Launches()

    def compiled(self, *args, grid, warmup, **kwargs):
        kernel = stock[JITFunction](self, *args, grid=grid, warmup=warmup or not run, **kwargs)
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
    for owner, (name, ours) in places.items():
        setattr(owner, name, ours)
    try:
        with _Dispatched(launches):
            yield launches
    finally:
        for owner, (name, _) in places.items():
            setattr(owner, name, stock[owner])


def examined(launches: Launches) -> dict:
    """{key in launches.variants: Variant}: registers, spills and shared memory, and what AST, PTX and SASS hold.

    What the interpreter ran is compiled for sm_90 in a process of its own, which needs no GPU but must be able to
    import the kernel's module; where it cannot (a notebook's cell, a function's kernel), the variant says "AST only".
    """
    compiled = {k: v for k, v in launches.variants.items() if isinstance(v, CompiledKernel)}
    requests = {k: v for k, v in launches.variants.items() if isinstance(v, _Request)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = {k: (v.src.fn, done) for (k, v), done in zip(compiled.items(), pool.map(_examined, compiled.values()))}
    messages = {k: r.message() for k, r in requests.items()}
    replies = iter(_elsewhere([m for m in messages.values() if m]))
    for k, r in requests.items():
        reply = next(replies) if messages[k] else "not importable: AST only"
        found[k] = r.fn, replace(r.variant(), detail=reply) if isinstance(reply, str) else reply
    seen: dict = {}
    for fn, variant in found.values():
        if fn not in seen:  # an interpreted kernel was recorded as the function in it
            seen[fn] = source(fn if isinstance(fn, JITFunction) else InterpretedFunction(fn))
        variant.findings = seen[fn] + variant.findings
    return {k: variant for k, (_, variant) in found.items()}


def binaries(launches: Launches) -> list[Variant]:
    """Every variant that was recorded, once."""
    return distinct(examined(launches).values())


def distinct(variants: Iterable[Variant]) -> list[Variant]:
    return list({(v.kernel, v.configuration, v.level): v for v in variants}.values())


def _examined(kernel: CompiledKernel) -> Variant:
    """What the assembly of a compiled kernel says."""
    built, options, ptx = kernel.src, kernel.metadata, kernel.asm.get("ptx", "")
    name, line, found = built.fn.fn.__qualname__, 0, {}
    for text in ptx.splitlines():
        code, _, place = text.partition("//")
        if code.lstrip().startswith(".loc"):  # the last place is that in the kernel, of what was inlined into it
            line = int((re.findall(r":(\d+):\d+", place) or code.split()[2:3])[-1])
        found |= dict.fromkeys(Finding(ATOMIC, name, line, m.strip(), "PTX") for m in PTX.findall(code))
    sass = _disassembled(kernel.asm["cubin"])
    if "tensormap.cp_fenceproxy" in ptx:  # a descriptor made on the device is published by an exchange
        sass = re.sub(r"ATOMG\S*\.EXCH\S* PT, RZ,", "", sass)
    found |= dict.fromkeys(Finding(ATOMIC, name, 0, m.strip(), "SASS") for m in SASS.findall(sass))
    words = [
        f"{n}={built.constants.get((i,), kind)}{' % 16' if built.attrs.get((i,)) else ''}"
        for i, (n, kind) in enumerate(built.signature.items())
    ]
    words += [f"{n}={getattr(options, n)}" for n in ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")]
    used = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", sass)}
    return Variant(
        name,
        ", ".join(words),
        f"sm_{options.target.arch}",
        used["REG"],
        used["STACK"] + used["LOCAL"],
        options.shared,
        list(found),
    )


def _disassembled(cubin: bytes) -> str:
    """SASS and resources. The disassembler starts slowly, so Triton's cache keeps what it said of the same bytes."""
    tool = triton.knobs.nvidia.cuobjdump
    cache = get_cache_manager(hashlib.sha256(cubin + str(tool.version).encode()).hexdigest())
    if kept := cache.get_file("sass"):
        return Path(kept).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cubin").write_bytes(cubin)
        command = [tool.path, "--dump-sass", "--dump-resource-usage", Path(folder, "cubin")]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    cache.put(sass, "sass", binary=False)
    return sass


def _elsewhere(messages: list[bytes]) -> list[Variant | str]:
    """Compiles each launch for sm_90, in a process in which Triton's interpreter is off; or says why it was not."""
    try:
        return worker.call(f"{__name__}:compiled_for_hopper", messages, interpreter=False) if messages else []
    except worker.Died as died:
        return [_refusal("\n".join(died.said))] * len(messages)


def _refusal(error: str) -> str:
    """The last line of an error, without paths and addresses."""
    last = (error.strip().splitlines() or ["no reason given"])[-1]
    return f"not compiled, AST only: {re.sub(r'(/[^/ ]+)+/| at 0x[0-9a-f]+', '', last)}"


def _attempt(step, *args):
    try:
        return step(*args)
    except (Exception, SystemExit) as error:
        return _refusal(f"{type(error).__name__}: {error}")


def without_gpu() -> None:
    """Lets Triton compile for sm_90 where there is no GPU: it asks its driver for the target alone."""
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )


def compiled_for_hopper(messages: list[bytes]) -> list[Variant | str]:
    """Answers `_elsewhere`, in a process without the interpreter; no GPU needs to be there."""
    without_gpu()

    def answer(kernel, launch):
        _, arguments, options = launch
        return (
            kernel
            if isinstance(kernel, str)
            else _attempt(lambda: _examined(kernel.run(grid=(1,), warmup=True, **arguments, **options)))
        )

    asked = [pickle.loads(message) for message in messages]
    kernels = [_attempt(_kernel, *where) for where, _, _ in asked]  # they import, so one after the other
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(answer, kernels, asked))


def _kernel(module: str, path: str, name: str, line: int) -> JITFunction:
    """A kernel by its module's name or, where that is another file or none, by its file."""
    loaded = sys.modules.get(module)
    with contextlib.suppress(ImportError):
        loaded = loaded or importlib.import_module(module)
    if loaded is None or not os.path.samefile(loaded.__file__, path):
        spec = importlib.util.spec_from_file_location(module, path)
        loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    for fn in vars(loaded).values():
        while isinstance(fn, CHOOSERS):
            fn = fn.fn
        if isinstance(fn, JITFunction) and (fn.fn.__qualname__, fn.fn.__code__.co_firstlineno) == (name, line):
            return fn
    raise LookupError(f"{module} does not hold {name}")
