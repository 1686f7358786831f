"""Writes the Markdown of a CI job's summary."""

import os
from collections.abc import Sequence
from pathlib import Path

from bi_kernels.audit.findings import grouped, needs_fix, verdict_of
from bi_kernels.audit.index.matrix import matrix
from bi_kernels.audit.index.report import counted
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.groups import differ, where
from bi_kernels.audit.report.markdown import MARK, table
from bi_kernels.audit.report.sentences import answer, headline
from bi_kernels.audit.report.sizes import size
from bi_kernels.audit.runs import ci

LISTED, ANSWERS = 40, 8  # lines of a table, and sentences; GitHub cuts a summary off at 1 MiB


def summary(rows: list[dict], out: Path, file: Path, names: Sequence[str], warnings: Sequence[str], level: str) -> str:
    """Returns verdict, a sentence an op that needs a fix, status matrix, what needs a fix, and links to the reports;
    `file`: where it will stand."""
    mine, bad = [r for r in rows if not r["control"]], needs_fix(rows)
    word = "needs-fix" if bad else verdict_of(rows)
    distinct = lambda name: ", ".join(dict.fromkeys(r[name] for r in mine if r[name]))
    note = "; no statement about a GPU" if "interpreter" in distinct("device") else ""
    fails = "fails" if ci.fails(rows, warnings, level) else "does not fail"
    parts = [
        f"## {MARK[word]} bi-audit: {word}",
        _answers(mine),
        f"{escape.code(distinct('candidate'))} on {distinct('device') or 'no device'}{note}. {counted(rows)}; "
        f"warnings: {len(warnings)}. The run {fails} at `--fail-on {level}`.",
        matrix(mine),
    ]
    listed = []
    for (audit, op, case, dtype, relation, control), found in ci.cases(bad).items():
        row = ci.first(found)
        command = ci.reproducer(row, out)
        line = {
            "op": escape.text(" ".join(filter(None, (op, case, dtype)))) or audit,
            "relation": relation or "did not run to its end",
            "where": escape.text(f"control missed: {control}" if control else where(found, ci.LAYOUTS)) or "–",
            "at most": size(found),
            "differ": escape.text(differ(found) or row["detail"]),
            "reproduce": escape.code(command) if command else "–",
        }
        listed.append(line)
    if listed:
        more = f"\n\n{len(listed) - LISTED} more in {out.as_posix()}/verdicts.json." if len(listed) > LISTED else ""
        parts.append("### What needs a fix\n\n" + table(listed[:LISTED]) + more)
    if warnings:
        parts.append("### Warnings\n\n" + "\n".join(f"- ⚠️ {escape.text(w)}" for w in warnings[:LISTED]))
    parts.append("### Reports\n\n" + _links(out, file, names))
    return "\n\n".join(filter(None, parts)) + "\n\n"


def _answers(rows: list[dict]) -> str:
    """Returns what the rows of each op that needs a fix show, of a few; of a run that passes, what was asked."""
    ops = grouped((r for r in rows if r["op"]), lambda r: (r["op"], r["case"], r["dtype"]))
    bad = {op: mine for op, mine in ops.items() if needs_fix(mine)}
    said = [f"- {escape.text(' '.join(filter(None, op)))}: {escape.text(answer(bad[op]))}" for op in [*bad][:ANSWERS]]
    said += [f"- and {len(bad) - ANSWERS} more"] * (len(bad) > ANSWERS)
    return "\n".join(said) or (f"{escape.text(headline(rows))}." if ops and not needs_fix(rows) else "")


def _links(out: Path, file: Path, names: Sequence[str]) -> str:
    """Returns links to the reports; a job's summary on GitHub has no files beside it, but the run's artifacts."""
    server, repository, number = (os.environ.get(f"GITHUB_{k}") for k in ("SERVER_URL", "REPOSITORY", "RUN_ID"))
    found = [d for d in (out / name / "README.md" for name in names) if d.exists()]
    if server and repository and number:
        listed = ", ".join(escape.code(d.as_posix()) for d in found)
        return f"In the [artifacts of this run]({server}/{repository}/actions/runs/{number}#artifacts): {listed}"
    relative = lambda d: Path(os.path.relpath(d, file.parent)).as_posix()
    return "\n".join(f"- {escape.link(d.parent.name, relative(d))}" for d in (*found, out / "README.md"))
