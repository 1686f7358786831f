"""What the PTX and SASS of every variant launched show. Not seen: kernels that CUDA C++ or torch.compile's generated
code launch."""

import contextlib
import hashlib
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.cache import get_cache_manager
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bi_kernels.audit import worker
from bi_kernels.audit.static.finding import ATOMIC, CHOOSERS, PTX, Finding
from bi_kernels.audit.static.launches import Launches, Request, Variant
from bi_kernels.audit.static.source import source

SASS = re.compile(r"^\s*/\*\w+\*/\s+(?:@!?\w+\s+)?((?:ATOM[A-Z]*|(?:U[A-Z]+)?RED(?!UX)[A-Z]*)\b[^;\n]*)", re.MULTILINE)


def examined(launches: Launches, only_compiled: bool = False) -> dict:
    """Returns {key in launches.variants: Variant}: registers, spills and shared memory, and what AST, PTX and SASS
    hold.

    What the interpreter ran, left out with only_compiled, is compiled for sm_90 in a process of its own, which needs
    no GPU but must be able to import the kernel's module; where it cannot (a notebook's cell, a function's kernel),
    the variant says "AST only". A variant that was examined before stays as it is.
    """
    known = {k: v for k, v in launches.variants.items() if isinstance(v, Variant)}
    compiled = {k: v for k, v in launches.variants.items() if isinstance(v, CompiledKernel)}
    requests = {k: v for k, v in launches.variants.items() if isinstance(v, Request) and not only_compiled}
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
    return known | {k: variant for k, (_, variant) in found.items()}


def binaries(launches: Launches) -> list[Variant]:
    """Returns every variant that was recorded, once."""
    return distinct(examined(launches).values())


def distinct(variants: Iterable[Variant]) -> list[Variant]:
    return list({(v.kernel, v.configuration, v.level): v for v in variants}.values())


def _examined(kernel: CompiledKernel) -> Variant:
    """Returns what the assembly of a compiled kernel says."""
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
    """Returns the last line of an error, without paths and addresses."""
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
