"""Says what a CI reads of a run: the exit status by level, and JUnit XML."""

import json
import re
import shlex
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from bi_kernels.audit.axes import BITS
from bi_kernels.audit.findings import LOCALISER, UNSUPPORTED, grouped, needs_fix
from bi_kernels.audit.options import LEVELS
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.groups import where, wrapped
from bi_kernels.audit.report.sentences import answer
from bi_kernels.audit.report.sizes import number, size, steps

# relations; "": it did not run to its end
DRIFT = (*BITS, LOCALISER, "atomics-free", "")
LAYOUTS = 6  # named in one line
INDENT = "    "
SHOWN = 3  # rows of evidence in one test case


def fails(rows: list[dict], warnings: Sequence[str], level: str) -> bool:
    """Tells whether `rows` or `warnings` fail a run at a level of LEVELS."""
    rank = LEVELS.index(level)
    wrong = [r for r in needs_fix(rows) if rank >= 2 or r["control"] or r["relation"] in DRIFT]
    return bool(rank >= 1 and wrong or rank >= 3 and warnings)


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


def counted(r: dict) -> str:
    """Says how many of a row's elements are wrong, '' where none were compared."""
    if not r["elements"] or r["relation"] == "atomics-free":
        return ""
    off = "exceed the bound" if r["threshold_share"] is not None else "differ"
    return f"{r['mismatches']:,} of {r['elements']:,} elements of {r['tensor']} {off}"


def lines(rows: list[dict], out: Path) -> list[str]:
    """Says of each op, shape and dtype that needs a fix what its rows show, and of each relation where it is seen
    first, and by which command."""
    found = []
    whose = itemgetter("audit", "op", "case", "dtype")
    for (_, op, case, dtype), mine in grouped((r for r in rows if not r["control"]), whose).items():
        bad = needs_fix(mine)
        if not op:
            found += [wrapped(escape.line(f"needs-fix  {r['detail']}"), INDENT) for r in bad]
            continue
        if bad:
            named = " ".join(filter(None, (op, case, dtype)))
            found.append(wrapped(escape.line(f"needs-fix  {named}: {answer(mine)}."), INDENT))
        for relation, wrong in grouped(bad, itemgetter("relation")).items():
            r = first(wrong)
            at = f" at M = {r['rows']}, {r['inputs']}" if r["rows"] else ""
            at += f", index {r['first_index']}" if r["first_index"] is not None else ""
            said = "; ".join(filter(None, (counted(r), r["detail"])))
            told = f"{relation}: {where(wrong, LAYOUTS)}. First{at}: {said}"
            found.append(INDENT + wrapped(escape.line(told), 2 * INDENT, len(INDENT)))
            found += [2 * INDENT + reproducer(r, out)] * bool(r["repro"])
    return found


def drift(r: dict) -> str:
    """Reports one row's drift."""
    at = f"{r['layout']} against {r['against']}" if r["against"] and "=" not in r["layout"] else r["layout"]
    said = [f"{at}, M = {r['rows']}, {r['inputs']}"]
    if counted(r):
        said[0] += f": {counted(r)}"
        labels = {"max abs": "max_abs", "max relative": "max_rel", "share of the bound": "threshold_share"}
        said += [f"{label} {number([r], name):.3g}" for label, name in labels.items() if r[name] is not None]
        said += [f"max ULP {steps([r])}"] * bool(steps([r]))
    said += [f"first at index {r['first_index']}"] * (r["first_index"] is not None)
    said += [f"first failing op {r['first_failing_op']}"] * bool(r["first_failing_op"])
    return ", ".join(said) + (f" ({r['detail']})" if r["detail"] else "")


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
        return _case(f"{audit}.controls", title, Failure if bad else None, missed, "\n".join(map(drift, bad)))
    refused, kind, message, text = [r["detail"] for r in mine if r["verdict"] == UNSUPPORTED], None, "", ""
    if bad:
        shown = first(bad)
        kind, more = Failure, f"{len(bad)} of {len(mine)} checks need a fix, at most {size(bad)}"
        message = f"{answer(mine)}; {more}: {where(bad, LAYOUTS)}"
        chosen = [shown, *[r for r in bad if r is not shown][: SHOWN - 1]]
        more = [f"{len(bad) - SHOWN} more in {(out / audit / 'verdicts.json').as_posix()}"] * (len(bad) > SHOWN)
        text = "\n".join([*map(drift, chosen), *more, "Reproduce with", "    " + reproducer(shown, out)])
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
