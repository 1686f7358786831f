"""Scans the PTX and SASS of every variant launched. Kernels launched by CUDA C++ or by torch.compile's generated code
are not seen."""

import contextlib
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from bi_kernels.audit import executor
from bi_kernels.audit.kernel_error import KernelError, kernel_error
from bi_kernels.audit.static.finding import ATOMIC, PTX, SHARED, TOO_LARGE, Finding
from bi_kernels.audit.static.function import without_choosers
from bi_kernels.audit.static.launches import Launches, Request, Variant
from bi_kernels.audit.static.source import source

INSTRUCTION = re.compile(r"^\s*/\*(\w+)\*/\s+(.*)", re.MULTILINE)
CELL = "cell.py"  # the name under which assembly knows the kernel's file
SASS = re.compile(r"^(?:@!?\w+\s+)?((?:ATOM[A-Z]*|(?:U[A-Z]+)?RED(?!UX)[A-Z]*)\b[^;\n]*)", re.MULTILINE)


def examined(launches: Launches, only_compiled: bool = False) -> dict:
    """Returns {key in launches.variants: Variant}, each with what its source, PTX and SASS show.

    A subprocess without the interpreter compiles for sm_90 what the interpreter ran; no GPU is needed. A kernel that
    the subprocess cannot import (a notebook's cell, a function's kernel) stays "AST only". only_compiled leaves out
    what the interpreter ran. A variant that was examined before stays as it is.
    """
    of_kind = lambda kind: {k: v for k, v in launches.variants.items() if isinstance(v, kind)}
    compiled, requests = of_kind(CompiledKernel), {} if only_compiled else of_kind(Request)
    found = dict(zip(compiled, read([*compiled.values()])))
    messages = {k: r.message() for k, r in requests.items()}
    replies = iter(_compile_elsewhere([m for m in messages.values() if m]))
    for k, request in requests.items():
        reply = next(replies) if messages[k] else "not importable: AST only"
        found[k] = replace(request.variant(), detail=reply) if isinstance(reply, str) else reply
    kernels = {k: v.src.fn for k, v in compiled.items()}
    kernels |= {k: InterpretedFunction(r.fn) for k, r in requests.items()}
    in_source = {fn: source(kernel) for fn, kernel in {kernel.fn: kernel for kernel in kernels.values()}.items()}
    for k, variant in found.items():
        variant.findings = in_source[kernels[k].fn] + variant.findings
    return of_kind(Variant) | found


def distinct(variants: Iterable[Variant]) -> list[Variant]:
    return list({(v.kernel, v.configuration, v.level): v for v in variants}.values())


def read(kernels: Sequence[CompiledKernel]) -> list[Variant]:
    """Returns the registers, spills, shared memory and findings of compiled kernels."""
    return [_read(*both) for both in zip(kernels, _disassembled(kernels))]


def _read(kernel: CompiledKernel, sass: str) -> Variant:
    built, options, ptx = kernel.src, kernel.metadata, kernel.asm.get("ptx", "")
    name, line, found = built.fn.fn.__qualname__, 0, {}
    for text in ptx.splitlines():
        code, _, place = text.partition("//")
        if code.lstrip().startswith(".loc"):  # of inlined code the last place is the kernel's
            line = int((re.findall(r":(\d+):\d+", place) or code.split()[2:3])[-1])
        found |= dict.fromkeys(Finding(ATOMIC, name, line, m.strip(), "PTX") for m in PTX.findall(code))
    if "tensormap.cp_fenceproxy" in ptx:  # a descriptor made on the device is published by an exchange
        sass = re.sub(r"ATOMG\S*\.EXCH\S* PT, RZ,", "", sass)
    found |= dict.fromkeys(Finding(ATOMIC, name, 0, m.strip(), "SASS") for m in SASS.findall(sass))
    words = [
        f"{n}={built.constants.get((i,), kind)}{' % 16' if built.attrs.get((i,)) else ''}"
        for i, (n, kind) in enumerate(built.signature.items())
    ]
    words += [f"{n}={getattr(options, n)}" for n in ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")]
    usage = run_tool("cuobjdump", kernel.asm["cubin"], "--dump-resource-usage")
    used = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    level, spills = f"sm_{options.target.arch}", used["STACK"] + used["LOCAL"]
    if options.shared > SHARED:
        found[Finding(TOO_LARGE, name, 0, f"{options.shared} bytes, {SHARED} are there", "size")] = None
    return Variant(name, ", ".join(words), level, used["REG"], spills, options.shared, list(found))


def _disassembled(kernels: Sequence[CompiledKernel]) -> list[str]:
    """Returns the SASS of each kernel. The disassembler takes half a second to start, so all code goes to it as one
    piece; the addresses in its listing tell the kernels apart."""
    listings: list[list[str]] = [[] for _ in kernels]
    for arch in {k.metadata.target.arch for k in kernels}:
        mine = [i for i, k in enumerate(kernels) if k.metadata.target.arch == arch]
        codes = [_instructions(kernels[i].asm["cubin"]) for i in mine]
        starts = list(accumulate(map(len, codes), initial=0))
        listing = run_tool("nvdisasm", b"".join(codes), "--binary", f"SM{arch}{'a' * (arch >= 90)}")
        for address, line in INSTRUCTION.findall(listing):
            listings[mine[bisect_right(starts, int(address, 16)) - 1]].append(line)
    if not all(listings):
        raise LookupError("the disassembler listed no instruction of a kernel")
    return ["\n".join(lines) for lines in listings]


def _instructions(cubin: bytes) -> bytes:
    from elftools.elf.elffile import ELFFile  # noqa: PLC0415 (mutants are judged without it)

    sections = ELFFile(BytesIO(cubin)).iter_sections()
    return b"".join(s.data() for s in sections if s.name.startswith(".text."))  # one for each function not inlined


def run_tool(tool: str, binary: bytes, *options: str) -> str:
    """Returns what one of the CUDA tools that come with Triton prints about a binary."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(binary)
        file.flush()
        command = [getattr(triton.knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _compile_elsewhere(messages: list[bytes]) -> list[Variant | str]:
    """Compiles each launch for sm_90 in a process without the interpreter; a str says why it was not compiled."""
    try:
        return executor.call(f"{__name__}:compiled_for_hopper", messages, interpreter=False) if messages else []
    except executor.Died as died:
        return [_refusal("\n".join(died.said))] * len(messages)


def _refusal(error: str) -> str:
    """Returns the last line of an error, without paths and addresses."""
    last = (error.strip().splitlines() or ["no reason given"])[-1]
    return f"not compiled, AST only: {re.sub(r'(/[^/ ]+)+/| at 0x[0-9a-f]+', '', last)}"


def _attempt(step, *args, **more):
    try:
        return step(*args, **more)
    except (Exception, SystemExit) as error:
        return _refusal(f"{type(error).__name__}: {error}")


def without_gpu() -> None:
    """Lets Triton compile for sm_90 without a GPU: the compiler needs only the target from its driver."""
    zero, target = lambda *_: 0, GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_device=zero, get_current_stream=zero, get_current_target=lambda: target)
    )


def compiled_for_hopper(messages: list[bytes]) -> list[Variant | str]:
    """Answers `_compile_elsewhere`, in the process without the interpreter."""
    without_gpu()
    requests = [pickle.loads(message) for message in messages]
    kernels = [_attempt(_kernel, *where) for where, _, _ in requests]  # they import, so one after the other

    def compiled(kernel, request):
        _, arguments, options = request
        return kernel if isinstance(kernel, str) else kernel.run(grid=(1,), warmup=True, **arguments, **options)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        replies = list(pool.map(partial(_attempt, compiled), kernels, requests))
    good = [i for i, reply in enumerate(replies) if isinstance(reply, CompiledKernel)]
    variants = _attempt(read, [replies[i] for i in good])
    for n, i in enumerate(good):
        replies[i] = variants if isinstance(variants, str) else variants[n]
    return replies


def _kernel(module: str, path: str, name: str, line: int) -> JITFunction:
    """Returns a kernel by its module's name or, where that is another file or none, by its file."""
    loaded = sys.modules.get(module)
    with contextlib.suppress(ImportError):
        loaded = loaded or importlib.import_module(module)
    if loaded is None or not os.path.samefile(loaded.__file__, path):
        spec = importlib.util.spec_from_file_location(module, path)
        loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    for fn in vars(loaded).values():
        fn = without_choosers(fn)
        if isinstance(fn, JITFunction) and (fn.fn.__qualname__, fn.fn.__code__.co_firstlineno) == (name, line):
            return fn
    raise LookupError(f"{module} does not hold {name}")


@dataclass
class Compiled:
    """A compiled kernel: registers, spills, shared memory and assembly."""

    variant: Variant
    ptx: str
    sass: str
    source: list[str]  # of the file in which the kernel stands
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # after the launch, where there was a GPU


def compiled(name: str, text: str, grid: tuple[int, ...], given: dict) -> Compiled | KernelError:
    """Compiles the kernel `name` of a file that holds `text`, in a process without the interpreter.

    Runs it on `given`, where there is a CUDA device. Returns the compiler's error.
    """
    gpu = torch.cuda.is_available()
    if not gpu:
        without_gpu()
    given = copied(given, "cuda") if gpu else given
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CELL).write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        kernel = without_choosers(getattr(importlib.import_module(CELL.removesuffix(".py")), name))
        try:
            made = kernel.run(grid=grid, warmup=not gpu, **given)
        except Exception as error:
            if found := kernel_error(error):
                return found
            raise
        sass = run_tool("nvdisasm", made.asm["cubin"], "-g", "-c")
        tensors = {k: t.cpu() for k, t in given.items() if gpu and isinstance(t, torch.Tensor)}
        return Compiled(read([made])[0], made.asm["ptx"], sass, text.splitlines(), tensors)


def copied(given: dict, device: str = "cpu") -> dict:
    """Returns arguments whose tensors are copies: views of one storage stay views of one."""
    storages: dict = {}

    def copy(value):
        if isinstance(value, tuple):
            return tuple(map(copy, value))
        if isinstance(value, TensorDescriptor):
            return replace(value, base=copy(value.base))
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            storages[storage.data_ptr()] = whole.clone().to(device).untyped_storage()
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=device).set_(storages[storage.data_ptr()], *place)

    return {k: copy(v) for k, v in given.items()}
