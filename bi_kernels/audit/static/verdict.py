"""Verdicts of the static audit: no atomics and no order that the device decides, in source, PTX and SASS."""

import sys
from collections.abc import Collection, Sequence
from itertools import product

from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED, Row
from bi_kernels.audit.static.binary import distinct, examined
from bi_kernels.audit.static.finding import SCATTER, UNREADABLE
from bi_kernels.audit.static.launches import Launches, Variant
from bi_kernels.audit.static.source import source
from bi_kernels.audit.targets.base import Target
from bi_kernels.contract import DTYPES

STATIC, LEVELS = "atomics-free", "source, PTX, SASS"
PACKAGE = "bi_kernels."
AUDITOR = f"{PACKAGE}audit."
EVERY = "every kernel"  # stands for the op in a whole run's row


def atomics_free(
    judged: Sequence[tuple[Target, Launches]], levels: Sequence[str] = ("",), required: bool = True
) -> tuple[list[Row], list[Variant]]:
    """Checks each candidate's source and every variant that it launched; returns a row a subject, and all variants.

    levels: a row for each instead, of the findings at that level alone. required=False makes source that cannot be
    read, and a kernel that no other process can compile, unsupported instead of needs-fix.
    """
    unseen = NEEDS_FIX if required else UNSUPPORTED
    every = Launches()
    for _, launches in judged:
        every.variants.update(launches.variants)
    examined_variants = examined(every)
    sources = {function: source(function) for function in {s.function for s, _ in judged}}
    rows = []
    for (subject, launches), level in product(judged, levels):
        variants = [examined_variants[key] for key in launches.variants]
        at_level = lambda findings: [f for f in findings if level in ("", f.level)]
        met = lambda f: f.kind != SCATTER or launches.scatters.get(f.op, True)  # in source that names an op, in no call
        around = at_level([*filter(met, sources[subject.function]), *launches.findings])
        wrong = [v for v in variants if at_level(v.findings)]
        findings = list(dict.fromkeys([*around, *(f for v in wrong for f in at_level(v.findings))]))
        if findings:
            detail = "; ".join(map(str, findings[:3]))
            verdict = NEEDS_FIX if any(f.kind != UNREADABLE for f in findings) else unseen
        elif variants:
            compiled = sum(v.level != "AST only" for v in variants)
            kernels = ", ".join(dict.fromkeys(v.kernel for v in variants))
            detail = f"{compiled} of {len(variants)} variants compiled, of {kernels}"
            verdict = PASS if compiled == len(variants) else unseen
        else:
            detail, verdict = "no Triton kernel was recorded: its binary is not seen", UNSUPPORTED
        drift = Drift(len(wrong) + bool(around), len(variants) + bool(around))  # variants, and the code around them
        row = subject.row(STATIC, LEVELS, drift, verdict=verdict, inputs="", detail=detail)
        row.max_abs = row.max_rel = row.max_ulp = None
        rows.append(row)
    return rows, distinct(examined_variants.values())


def compiled_variants(known: Collection[str] = ()) -> dict[str, Variant]:
    """Returns {hash: Variant} of the package's kernels that this process compiled, except the known hashes.

    Reads the caches that Triton keeps on each kernel, since recording would turn the fast launch off.
    """
    modules = [m for name, m in [*sys.modules.items()] if name.startswith(PACKAGE) and not name.startswith(AUDITOR)]
    kernels = {kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, JITFunction)}
    caches = [cache for kernel in kernels for cache, *_ in kernel.device_caches.values()]
    compiled = {k.hash: k for cache in caches for k in cache.values() if isinstance(k, CompiledKernel)}
    return examined(Launches({name: k for name, k in compiled.items() if name not in known}), only_compiled=True)


def judge_whole_run(session) -> list[Row]:
    """Returns the row of every kernel variant that a session's run launched so far, in any process, and keeps the
    variants in the session. Returns no row on the interpreter, where nothing is compiled."""
    if not session.on_gpu or session.candidate.spec != "bi_kernels":
        return []
    session.launched |= compiled_variants(session.launched)
    session.variants = distinct(session.launched.values())
    wrong = [v for v in session.variants if v.findings]
    names = ", ".join(sorted({v.kernel for v in session.variants}))
    detail = f"{len(session.variants)} variants compiled in the whole run, of {names or 'no kernel'}"
    if wrong:
        detail = "; ".join(dict.fromkeys(str(f) for v in wrong for f in v.findings[:3]))
    dtype = "all" if session.dtypes == [*DTYPES] else session.dtypes[0]
    label = (session.audit, EVERY, "", "bi_kernels", dtype, session.device_name, STATIC, LEVELS, "", "", 0)
    row = Row(*label, verdict=PASS if session.variants and not wrong else NEEDS_FIX, detail=detail)
    row.mismatches, row.elements, row.repro = len(wrong), len(session.variants), session.command
    row.first_failing_op = wrong[0].kernel if wrong else None
    return [row]
