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
    """Each launch compiled for sm_90 by a process in which Triton's interpreter is off; or why it was not."""
    if not messages:
        return []
    serve = "import sys; from bi_kernels.audit.static import binary; binary._serve(*sys.argv[1:])"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder, "request"), Path(folder, "reply")
        request.write_bytes(pickle.dumps(messages))
        command = [sys.executable, "-c", serve, request, reply]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return pickle.loads(reply.read_bytes()) if reply.is_file() else [_refusal(done.stderr)] * len(messages)


def _refusal(error: str) -> str:
    """The last line of an error, without paths and addresses."""
    last = (error.strip().splitlines() or ["no reason given"])[-1]
    return f"not compiled, AST only: {re.sub(r'(/[^/ ]+)+/| at 0x[0-9a-f]+', '', last)}"


def _attempt(step, *args):
    try:
        return step(*args)
    except (Exception, SystemExit) as error:
        return _refusal(f"{type(error).__name__}: {error}")


def _serve(request: str, reply: str) -> None:
    """Answers `_elsewhere`. Triton compiles for the GPU that its driver names; none needs to be there."""
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )

    def answer(kernel, launch):
        _, arguments, options = launch
        return (
            kernel
            if isinstance(kernel, str)
            else _attempt(lambda: _examined(kernel.run(grid=(1,), warmup=True, **arguments, **options)))
        )

    asked = [pickle.loads(message) for message in pickle.loads(Path(request).read_bytes())]
    kernels = [_attempt(_kernel, *where) for where, _, _ in asked]  # they import, so one after the other
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        Path(reply).write_bytes(pickle.dumps(list(pool.map(answer, kernels, asked))))


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
