"""The session of the audit `zoo`: audits a corpus of third-party ops, and checks what the auditor says of them."""

import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.progress import track

from bi_kernels.audit.callable_audit import audit
from bi_kernels.audit.callable_session import AnySession
from bi_kernels.audit.findings import LATE, NEEDS_FIX, PASS, UNSUPPORTED, Row, late, needs_fix, sentence
from bi_kernels.audit.memory import give_back, patiently
from bi_kernels.audit.parallel import each
from bi_kernels.audit.parameters import choose, read
from bi_kernels.audit.report.any_callable import Report
from bi_kernels.audit.report.sizes import size
from bi_kernels.audit.reproduce.imports import reach
from bi_kernels.audit.reproduce.script import NO_SCRIPT, OTHERWISE
from bi_kernels.audit.targets.candidates import Candidate
from helpers.corpus import LARGE, SMALL, Entry, corpus

# What is known without the auditor. Elementwise functions of one element cannot see the batch, and this package's ops
# are judged by audits of their own; the drifting ones see the batch by what they are.
INVARIANT = ("F.silu", "F.gelu", "F.relu", "F.softplus", "bi_kernels.linear", "bi_kernels.rms_norm")
DRIFTING = ("a batch's mean taken off", "nn.BatchNorm1d, training", "sampling by softmax", "nn.Dropout, training")
IMPORTS = "{reach}from helpers import corpus\n\nfn = corpus.function({name!r}, {device!r})"
LONGEST = 300  # seconds that a reproducer may take
NAME = 20  # characters of a tensor's name that a table has room for, its last ones
KEPT = 2**22  # bytes of arguments that a reproducer may keep beside it; with more it is run and not kept
FEW = (
    "F.silu",
    "F.linear, square, fp32",
    "F.rms_norm",
    "a batch's mean taken off",
    "nn.Dropout, training",
    "bi_kernels.rms_norm",
)
RELATIONS = ("invariance", "gradient invariance", "determinism", "atomics-free")


def start(audit: str, given: dict) -> "ThirdPartySession":
    """Begins the audit `zoo` with the parameters given. Raises ValueError with one sentence."""
    p = read(audit, given)
    session = ThirdPartySession(audit, asdict(p), choose(p.device), Candidate("zoo", {}))
    session.chosen()
    return session


class ThirdPartySession(AnySession):
    """A session whose subject is the auditor, on callables that nobody wrote for it."""

    @property
    def size(self) -> dict[str, int]:
        return LARGE if self.on_gpu else SMALL

    def chosen(self) -> list[str]:
        """Returns the names of the callables to audit, a control among them. Raises ValueError for an unknown one."""
        known, named = [name for name, _ in corpus(self.device, self.size)], self.parameters["callables"]
        chosen = {"": list(FEW), "all": known}.get(named) or [x.strip() for x in named.split(";")]
        for name in chosen:
            if name not in known:
                raise ValueError(f"callables holds {name!r}, expected all, or some of {'; '.join(known)}")
        return [*chosen, *DRIFTING[:1]]

    def judge(self) -> list[dict]:
        """Audits the callables; returns a line for each, and records whether the auditor was right about it."""
        lines = audit_all(self)
        self.add(rows(lines, self.device_label))
        return lines


def audit_all(session: ThirdPartySession) -> list[dict]:
    """Returns a line for each chosen callable: verdicts, how much drifts, and whether its reproducer, run in a process
    of its own, shows the drift."""
    folder = session.out and session.out / "repro"
    with tempfile.TemporaryDirectory() as scratch:
        names = list(dict.fromkeys(session.chosen()))
        found = each(session, audit_one, names, folder or Path(scratch))
        lines = list(track(found, "third-party ops", len(names), transient=True, disable=not sys.stderr.isatty()))
    if folder and folder.is_dir():  # else nothing drifts
        _lighten(folder, lines)
    return lines


def audit_one(session: ThirdPartySession, name: str, folder: Path) -> dict:
    """Returns the line of one callable."""
    started, device, p = time.monotonic(), session.device, session.parameters
    try:
        imports = IMPORTS.format(reach=reach(corpus.__module__, folder), name=name, device=device.type)
        how = {"seconds": p["seconds"], "seed": p["seed"], "folder": folder, "name": name, "imports": imports}
        report = patiently(lambda: _audited(dict(corpus(device, session.size))[name], how))
        line = summary(report) | {"seconds": round(time.monotonic() - started)}
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        report, line = None, {"verdict": UNSUPPORTED, "detail": f"not judged: {sentence(error)}"}
    give_back()
    return {"callable": name} | line | {"reproducer": reproduced(report)}


def _audited(make: Callable[[], Entry], how: dict) -> Report:
    entry = make()
    report = audit(entry.function, *entry.inputs, quiet=True, **how, **entry.options)
    report.target = None  # the tensors
    return report


def _lighten(folder: Path, lines: Sequence[dict]) -> None:
    """Removes the scripts whose arguments take more than KEPT bytes, and says in the lines what makes them again."""
    heavy = {held.stem.removesuffix("-more") for held in folder.glob("*.pt") if held.stat().st_size > KEPT}
    gone = [path for path in folder.iterdir() if path.stem.partition("-")[0] in heavy]
    for path in gone:
        path.unlink()
    for line in lines:
        worst = line.get("worst")
        if worst and any(f"repro/{path.name}" in worst.repro for path in gone):
            again = f"bi-audit run zoo -p callables {shlex.quote(line['callable'])}"
            line["worst"] = replace(worst, repro=again)


def rows(lines: Sequence[dict], device: str) -> list[Row]:
    """Says whether the auditor was right: a script shows the drift that it reports, and what is known is found."""
    out = []

    def add(relation: str, verdict: str, detail: str) -> None:
        out.append(Row("zoo", name, "", "zoo", "", device, relation, "", "", "given", 0, verdict, detail=detail))

    for line in lines:
        name, found, shown = line["callable"], line["verdict"], line["reproducer"]
        if shown != "–":
            add("reproducer", PASS if shown == "drifts" else NEEDS_FIX, shown)
        elif found != PASS and name not in DRIFTING:  # not judged, or something that no script shows
            add("reproducer", UNSUPPORTED, line["detail"])
        if name in INVARIANT:
            add("no false alarm", PASS if found == PASS else NEEDS_FIX, found)
        if name in DRIFTING:
            worst = line.get("worst") or Row(*[""] * 10, 0, found)
            out.append(
                replace(worst, audit="zoo", op=name, candidate=name, control=True, caught=bool(worst.mismatches))
            )
    return out


def table(lines: Sequence[dict]) -> list[dict]:
    """Returns a table for people: what drifts first, and how it is known."""

    def known(name: str, reproducer: str) -> str:
        if reproducer == "drifts":
            return "its script"
        if name.startswith("bi_kernels"):
            return "its own audits"
        if name in INVARIANT:
            return "elementwise"
        return "random, or of the batch, by its nature" if name in DRIFTING else ""

    return [
        {
            "callable": f"`{line['callable']}`",
            **{k: line.get(k, "–") for k in ("verdict", *RELATIONS)},
            "script": _script(line),
            "known from": known(line["callable"], line["reproducer"]),
            "seconds": line.get("seconds", "–"),
        }
        for line in sorted(lines, key=lambda line: (NEEDS_FIX, PASS, UNSUPPORTED).index(line["verdict"]))
    ]


def _script(line: dict) -> str:
    """Says what came of a line's script, or, of a drift that none was to show, why."""
    worst = line.get("worst")
    if line["reproducer"] == "–" and worst and NO_SCRIPT in worst.detail:
        return f"none: {worst.detail.rpartition(NO_SCRIPT)[2]}"
    return line["reproducer"].partition(":")[0]


def shares(lines: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Returns {callable: {relation: the largest share of elements that differ, in percent}} of what was asked."""
    asked = lambda line: {k: share for k, share in line["shares"].items() if k in RELATIONS[:2]}
    return {line["callable"]: asked(line) for line in lines if line.get("shares")}


def summary(report: Report) -> dict:
    """Returns each relation's worst drift: elements, and the largest ULP; as among the rows, it is unsupported where
    all that is wrong is that time was up."""
    bad = [*needs_fix(report.rows), *late(report.rows)]
    why = dict.fromkeys(f"{r.relation}: {r.detail}" for r in bad if r.detail and not _seen_as_drift(r))
    drifts = [r for r in bad if r.mismatches and r.relation in RELATIONS[:3]]
    worst = max(drifts, key=lambda r: r.mismatches, default=None)
    line = {"verdict": report.verdict, "detail": "; ".join(why), "shares": {}, "worst": worst}
    for relation in RELATIONS:
        mine = [r for r in report.rows if r.relation == relation and r.verdict != UNSUPPORTED]
        most = max(
            (r for r in bad if r.relation == relation),
            key=lambda r: (r.mismatches or 0) / max(r.elements or 1, 1),
            default=None,
        )
        share = 0.0
        if most is None:
            line[relation] = mine[0].verdict if mine else "–"
        elif most.mismatches and most.max_ulp is not None:
            share = 100 * most.mismatches / most.elements
            tensor = most.tensor if len(most.tensor) <= NAME else f"…{most.tensor[-NAME:]}"
            line[relation] = f"{share:.1f}% of {tensor}, {size([vars(most)])} ({most.layout})"
        else:  # it raised, or time was up
            listed = relation == "atomics-free"  # below the table, in whole lines of source
            word = "not judged" if most.layout == LATE else most.verdict
            share, line[relation] = float("nan"), word if listed else most.detail
        if mine:
            line["shares"][relation] = share
    return line


def _seen_as_drift(row: Row) -> bool:
    """Returns whether a row's drift has a column of its own, and a script that shows it."""
    return row.verdict == NEEDS_FIX and bool(row.mismatches) and row.relation.endswith("invariance")


def reproduced(report: Report | None) -> str:
    """Runs the standalone script by itself: 'drifts'; 'does not', and why; '–' where nothing drifts. Of no script, why:
    'other numbers than reported' or 'no drift' of what it showed, 'none found' where none could be made."""
    if report is None or not any(map(_seen_as_drift, report.rows)):
        return "–"
    if report.repro is None:
        details = [r.detail for r in report.rows if _seen_as_drift(r) and NO_SCRIPT in r.detail]
        whys = [d.rpartition(NO_SCRIPT)[2] for d in details]
        counts = {why: int(found[1]) for why in whys if (found := OTHERWISE.match(why))}
        why = max(counts, key=counts.get) if counts else "".join(whys[:1])
        word = "none found" if not counts else "other numbers than reported" if counts[why] else "no drift"
        return ": ".join(filter(None, (word, why)))
    done = subprocess.run(
        [sys.executable, report.repro.name], cwd=report.repro.parent, capture_output=True, text=True, timeout=LONGEST
    )
    if done.returncode == 1 and "elements differ" in done.stdout:
        return "drifts"
    return f"does not: {done.stderr.strip()[-80:]}"
