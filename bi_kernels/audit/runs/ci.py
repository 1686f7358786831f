"""Says what a CI reads of a run: the exit status by level, and JUnit XML."""

import json
import re
import shlex
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from bi_kernels.audit.axes import BITS
from bi_kernels.audit.findings import LOCALISER, UNSUPPORTED, grouped, late, needs_fix
from bi_kernels.audit.options import LEVELS
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.groups import group_rows, terminal, where, wrapped
from bi_kernels.audit.report.sentences import answer
from bi_kernels.audit.report.sizes import size

# relations; "": it did not run to its end
DRIFT = (*BITS, LOCALISER, "atomics-free", "")
LAYOUTS = 6  # named in one line
INDENT, LONGEST = "    ", 160  # characters of what comes from outside


def fails(rows: list[dict], warnings: Sequence[str], level: str) -> bool:
    """Tells whether `rows` or `warnings` fail a run at a level of LEVELS."""
    rank = LEVELS.index(level)
    wrong = [r for r in needs_fix(rows) if rank >= 2 or r["control"] or r["relation"] in DRIFT]
    return bool(rank >= 1 and wrong or rank >= 2 and late(rows) or rank >= 3 and warnings)


def cases(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Groups rows by (audit, op, case, dtype, relation), those of a control by themselves: one test case each."""
    case = itemgetter("audit", "op", "case", "dtype", "relation")
    return grouped(rows, lambda r: (*case(r), r["candidate"] if r["control"] else ""))


def first(rows: list[dict]) -> dict:
    """Returns the row to look at first: one that a script shows, the fewest tokens in a call."""
    return min(rows, key=lambda r: (not r["repro"].startswith("python "), r["layout"] != "rows", r["rows"]))


def reproducer(row: dict, out: Path) -> str:
    """Returns the command that shows a row's drift, to be run where `bi-audit run --out OUT` was."""
    if not row["repro"].startswith("python repro/"):
        return row["repro"]
    python, script, *words = shlex.split(row["repro"])
    return shlex.join([python, (out / row["audit"] / script).as_posix(), *words])


def evidence(bad: list[dict], out: Path) -> list[str]:
    """Returns the lines of a terminal that show rows which need a fix: what differs, where first, and by which
    command."""
    shown = first(bad)
    lines = terminal(group_rows(bad), f" in {(out / shown['audit'] / 'verdicts.json').as_posix()}").splitlines()
    index = f"first at {shown['first_index']}" if shown["first_index"] is not None else ""
    said = "; ".join(filter(None, (index, escape.line(shown["detail"])[:LONGEST])))
    command = ["Reproduce with", INDENT + reproducer(shown, out)] * bool(shown["repro"])
    return [*lines, *[wrapped(said)] * bool(said), *command]


def lines(rows: list[dict], out: Path) -> list[str]:
    """Says of each op, shape and dtype that needs a fix what its rows show, and by which command."""
    found = []
    whose = itemgetter("audit", "op", "case", "dtype")
    for (_, op, case, dtype), mine in grouped((r for r in rows if not r["control"]), whose).items():
        bad = needs_fix(mine)
        if not op:
            found += [wrapped(escape.line(f"needs-fix  {r['detail']}"), INDENT) for r in bad]
        elif bad:
            named = " ".join(filter(None, (op, case, dtype)))
            found.append(wrapped(escape.line(f"needs-fix  {named}: {answer(mine)}."), INDENT))
            found += evidence(bad, out)
    return found


def _text(text: str) -> str:
    """Replaces the control characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]", "�", text)


def _case(folder: str, name: str, kind: type | None, message: str, text: str = "", seconds: float = 0.0):
    """Returns one test case. kind: what it is unless it passes."""
    case = TestCase(_text(name), _text(folder), seconds)
    if kind:
        found = kind(_text(message), kind._tag)
        found.text = _text(text) or None
        case.result = found
    return case


def _judged(found: tuple, mine: list[dict], out: Path) -> TestCase:
    """Returns the test case of the rows of one op, shape, dtype and relation, or of one control."""
    audit, op, case, dtype, relation, control = found
    label, bad = f"{op}[{case}]" if case else op, needs_fix(mine)
    if control:
        title, missed = (
            f"{control} ({label} {dtype}, {relation})",
            "a control was missed: the audit cannot see this fault",
        )
        return _case(f"{audit}.controls", title, Failure if bad else None, missed)
    refused, kind, message, text = [r["detail"] for r in mine if r["verdict"] == UNSUPPORTED], None, "", ""
    if bad:
        kind, far = Failure, f"{len(bad)} of {len(mine)} checks need a fix, at most {size(bad)}"
        message, text = f"{answer(mine)}; {far}: {where(bad, LAYOUTS)}", "\n".join(evidence(bad, out))
    elif refused:
        kind, message = Skipped, refused[0]
    return _case(f"{audit}.{label}", f"{relation} {dtype}".strip(), kind, message, text)


def junit(
    rows: list[dict],
    out: Path,
    seconds: dict[str, float],
    names: Sequence[str],
    digests: Sequence[str] | None = None,
    level: str = "needs-fix",
) -> JUnitXml:
    """Returns JUnit XML: a suite an audit, a case an op × shape × dtype × relation, and one a control.

    A case that needs a fix is a failure with the drift report of its first rows, an unsupported one is skipped, and an
    audit that did not run to its end is an error. digests: their warnings, a suite of their own; a warning is skipped,
    or a failure where `level` says so.
    """
    suites = []
    for name in names:
        suites.append(suite := TestSuite(name))
        made = out / name / "provenance.json"
        if name in seconds and made.exists():
            for k, v in json.loads(made.read_text(encoding="utf-8")).items():
                suite.add_property(k, _text(v))
        own = [r for r in rows if r["audit"] == name]
        end = next((r["detail"] for r in own if not r["relation"]), None)
        suite.append(
            _case(name, "runs to its end", None if end is None else Error, end or "", "", seconds.get(name, 0))
        )
        suite.extend(_judged(*found, out) for found in cases(r for r in own if r["relation"]).items())
    if digests is not None:
        suites.append(suite := TestSuite("digests"))
        kind = Failure if level == "warning" else Skipped
        suite.extend(_case("digests", warning.split(":")[0], kind, warning) for warning in digests)
        if not digests:
            suite.append(_case("digests", "the bits are those recorded", None, ""))
    return _whole(suites)


def refused(why: str) -> JUnitXml:
    """Returns JUnit XML of a command that was refused, as one error."""
    suite = TestSuite("bi-audit")
    suite.append(_case("bi-audit", "the command is right", Error, why))
    return _whole([suite])


def _whole(suites: Sequence[TestSuite]) -> JUnitXml:
    whole = JUnitXml("bi-audit")
    whole.extend(suites)
    whole.update_statistics()
    return whole
