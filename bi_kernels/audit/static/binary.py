"""What the PTX and SASS of every variant launched show. Not seen: kernels that CUDA C++ or torch.compile's generated
code launch."""

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
from dataclasses import replace
from io import BytesIO
from itertools import accumulate
from types import SimpleNamespace

import triton
from elftools.elf.elffile import ELFFile
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bi_kernels.audit import executor
from bi_kernels.audit.static.finding import ATOMIC, CHOOSERS, PTX, SHARED, TOO_LARGE, Finding
from bi_kernels.audit.static.launches import Launches, Request, Variant
from bi_kernels.audit.static.source import source

INSTRUCTION = re.compile(r"^\s*/\*(\w+)\*/\s+(.*)", re.MULTILINE)
SASS = re.compile(r"^(?:@!?\w+\s+)?((?:ATOM[A-Z]*|(?:U[A-Z]+)?RED(?!UX)[A-Z]*)\b[^;\n]*)", re.MULTILINE)


def examined(launches: Launches, only_compiled: bool = False) -> dict:
    """Returns {key in launches.variants: Variant}: registers, spills and shared memory, and what AST, PTX and SASS
    hold.

    What the interpreter ran, left out with only_compiled, is compiled for sm_90 in a process of its own, which needs
    no GPU but must be able to import the kernel's module; where it cannot (a notebook's cell, a function's kernel),
    the variant says "AST only". A variant that was examined before stays as it is.
    """
    every = lambda kind: {k: v for k, v in launches.variants.items() if isinstance(v, kind)}
    compiled, requests = every(CompiledKernel), {} if only_compiled else every(Request)
    found = {k: (v.src.fn, done) for (k, v), done in zip(compiled.items(), read([*compiled.values()]))}
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
    return every(Variant) | {k: variant for k, (_, variant) in found.items()}


def binaries(launches: Launches) -> list[Variant]:
    """Returns every variant that was recorded, once."""
    return distinct(examined(launches).values())


def distinct(variants: Iterable[Variant]) -> list[Variant]:
    return list({(v.kernel, v.configuration, v.level): v for v in variants}.values())


def read(kernels: Sequence[CompiledKernel]) -> list[Variant]:
    """Returns what the assembly of compiled kernels says."""
    return [_read(*both) for both in zip(kernels, _disassembled(kernels))]


def _read(kernel: CompiledKernel, sass: str) -> Variant:
    built, options, ptx = kernel.src, kernel.metadata, kernel.asm.get("ptx", "")
    name, line, found = built.fn.fn.__qualname__, 0, {}
    for text in ptx.splitlines():
        code, _, place = text.partition("//")
        if code.lstrip().startswith(".loc"):  # the last place is that in the kernel, of what was inlined into it
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
    usage = _told("cuobjdump", kernel.asm["cubin"], "--dump-resource-usage")
    used = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    level, spills = f"sm_{options.target.arch}", used["STACK"] + used["LOCAL"]
    if options.shared > SHARED:
        found[Finding(TOO_LARGE, name, 0, f"{options.shared} bytes, {SHARED} are there", "size")] = None
    return Variant(name, ", ".join(words), level, used["REG"], spills, options.shared, list(found))


def _disassembled(kernels: Sequence[CompiledKernel]) -> list[str]:
    """Returns the SASS of each kernel. The disassembler takes half a second to start, so their code goes to it as one
    piece, and the addresses in its listing say whose an instruction is."""
    every: list[list[str]] = [[] for _ in kernels]
    for arch in {k.metadata.target.arch for k in kernels}:
        mine = [i for i, k in enumerate(kernels) if k.metadata.target.arch == arch]
        codes = [_code(kernels[i].asm["cubin"]) for i in mine]
        starts = list(accumulate(map(len, codes), initial=0))
        listing = _told("nvdisasm", b"".join(codes), "--binary", f"SM{arch}{'a' * (arch >= 90)}")
        for address, line in INSTRUCTION.findall(listing):
            every[mine[bisect_right(starts, int(address, 16)) - 1]].append(line)
    if not all(every):
        raise LookupError("the disassembler listed no instruction of a kernel")
    return ["\n".join(lines) for lines in every]


def _code(cubin: bytes) -> bytes:
    """Returns a binary's instructions, those of functions that were not inlined among them."""
    sections = ELFFile(BytesIO(cubin)).iter_sections()
    return b"".join(s.data() for s in sections if s.name.startswith(".text."))


def _told(tool: str, binary: bytes, *options: str) -> str:
    """Returns what one of CUDA's tools that come with Triton prints about a binary."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(binary)
        file.flush()
        command = [getattr(triton.knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _elsewhere(messages: list[bytes]) -> list[Variant | str]:
    """Compiles each launch for sm_90, in a process in which Triton's interpreter is off; or says why it was not."""
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
    """Lets Triton compile for sm_90 where there is no GPU: it asks its driver for the target alone."""
    zero, target = lambda *_: 0, GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_device=zero, get_current_stream=zero, get_current_target=lambda: target)
    )


def compiled_for_hopper(messages: list[bytes]) -> list[Variant | str]:
    """Answers `_elsewhere`, in a process without the interpreter; no GPU needs to be there."""
    without_gpu()

    def answer(kernel, launch):
        if isinstance(kernel, str):
            return kernel
        _, arguments, options = launch
        return _attempt(kernel.run, grid=(1,), warmup=True, **arguments, **options)

    asked = [pickle.loads(message) for message in messages]
    kernels = [_attempt(_kernel, *where) for where, _, _ in asked]  # they import, so one after the other
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = list(pool.map(answer, kernels, asked))
    good = [k for k in made if isinstance(k, CompiledKernel)]
    said = _attempt(read, good)
    replies = iter([said] * len(good) if isinstance(said, str) else said)
    return [next(replies) if isinstance(k, CompiledKernel) else k for k in made]


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
        while isinstance(fn, CHOOSERS):
            fn = fn.fn
        if isinstance(fn, JITFunction) and (fn.fn.__qualname__, fn.fn.__code__.co_firstlineno) == (name, line):
            return fn
    raise LookupError(f"{module} does not hold {name}")
