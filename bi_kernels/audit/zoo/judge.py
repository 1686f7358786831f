"""Judges the callables of the zoo, and says whether the auditor was right about them."""

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from rich.progress import track

from bi_kernels.audit.callables.audit import audit
from bi_kernels.audit.callables.report import Report
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, UNSUPPORTED, Row, sentence
from bi_kernels.audit.zoo.animals import zoo

# What is known without the auditor. Elementwise functions of one element cannot see the batch, and this package's ops
# are judged by audits of their own; the drifting ones see the batch by what they are.
INVARIANT = ("F.silu", "F.gelu", "F.relu", "F.softplus", "bi_kernels.linear", "bi_kernels.rms_norm")
DRIFTING = ("a batch's mean taken off", "nn.BatchNorm1d, training", "sampling by softmax", "nn.Dropout, training")
IMPORTS = "from bi_kernels.audit import zoo\n\nfn = zoo.function({name!r}, {device!r})"
LONGEST = 300  # seconds that a reproducer may take
FEW = (
    "F.silu",
    "F.linear, square, fp32",
    "F.rms_norm",
    "a batch's mean taken off",
    "nn.Dropout, training",
    "bi_kernels.rms_norm",
)
RELATIONS = ("invariance", "gradient invariance", "determinism", "atomics-free")


def judge(
    device: torch.device,
    size: dict,
    folder: Path | None,
    seconds: float = 60.0,
    only: Sequence[str] = (),
    seed: int = 0,
) -> list[dict]:
    """Returns a line an animal: verdicts, how much drifts, and whether its reproducer, run by itself, reproduces."""
    lines, reports = [], []
    every = [(name, make) for name, make in zoo(device, size) if not only or name in only]
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in track(every, description="zoo", transient=True, disable=not sys.stderr.isatty()):
            lines.append({"callable": name})
            started, report = time.monotonic(), None
            try:
                animal = make()
                report = audit(
                    animal.function,
                    *animal.inputs,
                    seconds=seconds,
                    seed=seed,
                    folder=folder or scratch,
                    name=name,
                    imports=IMPORTS.format(name=name, device=device.type),
                    **animal.options,
                )
                report.target = None  # the tensors
                lines[-1] |= summary(report) | {"seconds": round(time.monotonic() - started)}
            except Exception as error:
                traceback.clear_frames(error.__traceback__)
                lines[-1] |= {"verdict": UNSUPPORTED, "detail": f"not judged: {sentence(error)}"}
            reports.append(report)
        with ThreadPoolExecutor(os.cpu_count() // 2 or 1) as pool:
            for line, said in zip(lines, pool.map(lambda r: r and reproduced(r), reports)):
                line["reproducer"] = said or "–"
    return lines


def rows(lines: Sequence[dict], device: str) -> list[Row]:
    """Says whether the auditor was right: a script shows the drift that it reports, and what is known is found."""
    out = []
    for line in lines:
        name, found = line["callable"], line["verdict"]
        make = lambda relation, verdict, detail="", candidate="zoo", **more: Row(
            "zoo", name, "", candidate, "", device, relation, "", "", "given", 0, verdict, detail=detail, **more
        )
        if line["reproducer"] != "–":
            out.append(make("reproducer", PASS if line["reproducer"] == "drifts" else NEEDS_FIX, line["reproducer"]))
        elif found != PASS and name not in DRIFTING:  # not judged, or something that no script shows
            out.append(make("reproducer", UNSUPPORTED, line["detail"]))
        if name in INVARIANT:
            out.append(make("no false alarm", PASS if found == PASS else NEEDS_FIX, found))
        if name in DRIFTING:
            worst = line.get("worst") or Row(*[""] * 10, 0, found)
            out.append(
                replace(worst, audit="zoo", op=name, candidate=name, control=True, caught=bool(worst.mismatches))
            )
    return out


def table(lines: Sequence[dict]) -> list[dict]:
    """Returns a table for people: what drifts first, and how it is known."""
    order = (NEEDS_FIX, PASS, UNSUPPORTED)

    def known(line: dict) -> str:
        name = line["callable"]
        return (
            "its reproducer"
            if line["reproducer"] == "drifts"
            else "its own audits"
            if name.startswith("bi_kernels")
            else "elementwise"
            if name in INVARIANT
            else "random, or of the batch, by its nature"
            if name in DRIFTING
            else ""
        )

    return [
        {
            "callable": f"`{line['callable']}`",
            "verdict": line["verdict"],
            **{k: line.get(k, "–") for k in RELATIONS},
            "reproducer": line["reproducer"],
            "established by": known(line),
            "seconds": line.get("seconds", "–"),
        }
        for line in sorted(lines, key=lambda line: order.index(line["verdict"]))
    ]


def shares(lines: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Returns {callable: {relation: the largest share of elements that differ, in percent}} of those judged."""
    return {line["callable"]: {k: line["shares"][k] for k in RELATIONS[:2]} for line in lines if "shares" in line}


def summary(report: Report) -> dict:
    """Returns each relation's worst drift: elements, and the largest ULP."""
    drifts = [r for r in report.rows if r.verdict == NEEDS_FIX and r.mismatches and r.relation in RELATIONS[:3]]
    shown = lambda r: r.relation.endswith("invariance") and r.mismatches  # in columns of their own
    why = dict.fromkeys(
        f"{r.relation}: {r.detail}" for r in report.rows if r.verdict == NEEDS_FIX and r.detail and not shown(r)
    )
    line = {
        "verdict": report.verdict,
        "detail": "; ".join(why),
        "shares": {},
        "worst": max(drifts, key=lambda r: r.mismatches, default=None),
    }
    for relation in RELATIONS:
        mine = [r for r in report.rows if r.relation == relation]
        bad = [r for r in mine if r.verdict == NEEDS_FIX]
        most = max(bad, key=lambda r: (r.mismatches or 0) / max(r.elements or 1, 1), default=None)
        counted = most is None or bool(most.mismatches and most.max_ulp is not None)  # else it raised, or time was up
        share = 100 * most.mismatches / most.elements if most and counted else 0.0
        line["shares"][relation] = share if mine and counted else float("nan")
        line[relation] = (
            "–"
            if not mine
            else mine[0].verdict
            if most is None
            else most.detail
            if not counted
            else f"{share:.1f}% of {most.tensor}, {most.max_ulp} ULP ({most.layout})"
        )
    return line


def reproduced(report: Report) -> str:
    """Runs the standalone script by itself: 'drifts', 'does not', or '–' where nothing drifts."""
    drifts = [r for r in report.rows if r.verdict == NEEDS_FIX and r.mismatches and r.relation.endswith("invariance")]
    if not drifts:
        return "–"
    if report.repro is None:
        return "none found"
    done = subprocess.run(
        [sys.executable, report.repro.name], cwd=report.repro.parent, capture_output=True, text=True, timeout=LONGEST
    )
    return (
        "drifts"
        if done.returncode == 1 and "elements differ" in done.stdout
        else f"does not: {done.stderr.strip()[-80:]}"
    )
