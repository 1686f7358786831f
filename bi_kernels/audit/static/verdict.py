"""The verdict of the static audit: what source, PTX and SASS show of all that a subject's judging launched."""

from collections.abc import Sequence
from itertools import product

from bi_kernels.audit.evidence.drift import Drift
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, UNSUPPORTED, Auditable, Row
from bi_kernels.audit.static.binary import distinct, examined
from bi_kernels.audit.static.finding import UNREADABLE
from bi_kernels.audit.static.launches import Launches, Variant
from bi_kernels.audit.static.source import source

STATIC, LEVELS = "atomics-free", "source, PTX, SASS"


def atomics_free(
    judged: Sequence[tuple[Auditable, Launches]], levels: Sequence[str] = ("",), required: bool = True
) -> tuple[list[Row], list[Variant]]:
    """Judges each candidate's source and every variant that its judging launched: a row a subject, and all variants,
    each of them once. levels: a row for each instead, of what is found at that level alone. required: False makes
    source that cannot be read, and a kernel that no other process can compile, unsupported instead of a needs-fix."""
    unseen = NEEDS_FIX if required else UNSUPPORTED
    every = Launches()
    for _, launches in judged:
        every.variants.update(launches.variants)
    found = examined(every)
    sources = {function: source(function) for function in {s.function for s, _ in judged}}
    rows = []
    for (subject, launches), level in product(judged, levels):
        variants = [found[key] for key in launches.variants]
        mine = lambda found: [f for f in found if level in ("", f.level)]
        around = mine([*sources[subject.function], *launches.findings])
        wrong = [v for v in variants if mine(v.findings)]
        findings = list(dict.fromkeys([*around, *(f for v in wrong for f in mine(v.findings))]))
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
    return rows, distinct(found.values())
