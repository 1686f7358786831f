"""Every variant of this package's kernels that a run on a GPU launched, by whichever experiment, in whichever process.

Triton keeps what it compiled beside each kernel, so nothing has to be recorded, and launches take the way that a user's
take: recording turns it off.
"""

import sys
from collections.abc import Collection

from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, Row
from bi_kernels.audit.static.binary import distinct, examined
from bi_kernels.audit.static.launches import Launches, Variant
from bi_kernels.audit.static.verdict import LEVELS, STATIC
from bi_kernels.contract import DTYPES

PACKAGE = "bi_kernels."
AUDITOR = f"{PACKAGE}audit."
EVERY = "every kernel"  # whose row it is, in place of an op


def compiled(known: Collection[str] = ()) -> dict[str, Variant]:
    """Returns {hash: Variant} of this package's kernels, as this process compiled them, but those known."""
    modules = [m for name, m in [*sys.modules.items()] if name.startswith(PACKAGE) and not name.startswith(AUDITOR)]
    kernels = {kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, JITFunction)}
    caches = [cache for kernel in kernels for cache, *_ in kernel.device_caches.values()]
    held = {k.hash: k for cache in caches for k in cache.values() if isinstance(k, CompiledKernel)}
    return examined(Launches({name: k for name, k in held.items() if name not in known}), only_compiled=True)


def judge(session) -> list[Row]:
    """Judges all that a session's run has launched of this package so far, on a GPU; returns the row, and shows the
    variants as the session's. On the interpreter nothing is compiled, and what judging launched is what there is."""
    if not session.on_gpu or session.candidate.spec != "bi_kernels":
        return []
    session.launched |= compiled(session.launched)
    session.variants = distinct(session.launched.values())
    wrong = [v for v in session.variants if v.findings]
    names = ", ".join(sorted({v.kernel for v in session.variants}))
    detail = f"{len(session.variants)} variants compiled in the whole run, of {names or 'no kernel'}"
    if wrong:
        detail = "; ".join(dict.fromkeys(str(f) for v in wrong for f in v.findings[:3]))
    dtype = "all" if session.dtypes == [*DTYPES] else session.dtypes[0]
    said = (session.audit, EVERY, "", "bi_kernels", dtype, session.device_name, STATIC, LEVELS, "", "", 0)
    verdict = PASS if session.variants and not wrong else NEEDS_FIX
    return [
        Row(
            *said,
            verdict=verdict,
            mismatches=len(wrong),
            elements=len(session.variants),
            first_failing_op=wrong[0].kernel if wrong else None,
            detail=detail,
            repro=session.command,
        )
    ]
