"""`bi-audit run`: audits and their reports, or the quick run, and what is written and printed of either."""

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from bi_kernels.audit import executor
from bi_kernels.audit.digests import file as digest_file
from bi_kernels.audit.faults import CannotJudge
from bi_kernels.audit.findings import needs_fix, read_rows, write_rows
from bi_kernels.audit.index import goals, page
from bi_kernels.audit.parameters import accepted, choose, read
from bi_kernels.audit.runs import ci, folder, quick, runner
from bi_kernels.audit.runs.checked import checked, place, refused, writable
from bi_kernels.audit.runs.summary import summary as job_summary

DIGESTS = "bi_kernels.audit.digests.candidate:compute"  # in a process of its own: it imports triton
FORWARD_ALONE = "gemm", "elementwise"  # audits of which `backward` judges the rest


def run(given) -> None:
    """Runs audits and writes their reports; ends the process with the status of `--fail-on`."""
    said = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    seconds, judged, rows, warnings = {}, {}, [], None
    jobs = given.jobs or (2 if given.quick else 1)
    with contextlib.ExitStack() as held:
        with refused(given.junit):
            writable("--junit", given.junit)
            writable("--summary", given.summary)
            dtype = given.dtype or (quick.DTYPE if given.quick else None)
            names, parameters = checked(replace(given, dtype=dtype), judges_one=not given.quick)
            names = quick.audited(names) if given.quick else names
            of_each = {name: accepted(name, parameters) for name in names}
            told = asdict(read(names[0], of_each[names[0]]))
            whole, narrowed = place(names[0], told, given.out, given.publish, given.quick)
            out = whole if given.out or not given.quick else whole.with_name(f"{whole.name}-quick")
            folder.refuse_foreign(out, [] if given.quick else names)
            indexed = () if given.quick else (out, out.parent) if given.publish and not narrowed else (out,)
            for path in indexed:
                page.report(path)  # what it cannot read is found before anything runs
            expected = digest_file.read(given.digests) if given.digests else None
            held.enter_context(folder.locked(out))
        candidate = told.get("candidate", names[0])
        last = lambda todo, out: runner.estimate(todo, out, jobs, choose(told["device"]).type == "cpu")
        judges = True  # unless the audit refuses its parameters
        try:
            if given.quick:
                rest = f"about a minute on two cores; their whole audits, without --quick: {last(names, whole)}"
                said.print(f"a few questions about the ops of {', '.join(names)}: {rest}")
                judged |= quick.run(of_each, jobs, said.print)
                seconds |= dict.fromkeys(names, 0.0)
            else:
                todo = [n for n in names if not (given.resume and _stands(n, of_each[n], out, seconds, said))]
                todo = todo if given.names or jobs == 1 else runner.longest_first(todo)
                plan = f"{len(todo)} audit{'s' * (len(todo) > 1)} into {out}: {last(todo, out)}" if todo else ""
                runner.run(todo, of_each, out, jobs, said, seconds, (given.cell_timeout, given.timeout), plan)
                folder.collect(out)
                page.write(indexed[-1])
                if given.publish and narrowed:
                    said.print(f"{out.parent}/README.md stays as it is: this run asked {narrowed} alone")
            if given.digests:
                warnings = _digests(names, parameters, expected, given.digests)
        except CannotJudge as refusal:
            judges = False
            with refused(given.junit):
                raise refusal from None
        finally:  # interrupted or not, what is known is written
            for name in names if judges else ():
                unfinished = runner.stopped(name, "the audit was interrupted", candidate)
                rows += judged.get(name) or (read_rows(out / name) if name in seconds else [unfinished])
            if given.quick and judges:
                write_rows(out / "verdicts.json", rows)
            if given.junit and judges:
                text = ci.junit(rows, out, seconds, names, warnings, given.fail_on)
                given.junit.write_text(text, encoding="utf-8")
            if given.summary and judges:
                with given.summary.open("a", encoding="utf-8") as file:
                    file.write(job_summary(rows, out, given.summary, names, warnings or [], given.fail_on))
    _say(rows, out, warnings or [], given.quick)
    say_goals(names, out)
    if alone := [name for name in names if name in FORWARD_ALONE and "backward" not in names and not given.quick]:
        op = f" -p op {told['op']}" if told.get("op") else ""
        other = f" --candidate {shlex.quote(candidate)}" if candidate != "bi_kernels" else ""
        print(
            f"{' and '.join(alone)}: no gradient was asked about, nor all that a model does around a call (modes, "
            f"memory, earlier calls); `bi-audit run backward{other}{op}` asks"
        )
    sys.exit(ci.fails(rows, warnings or [], given.fail_on))


def _stands(name: str, parameters: dict, out: Path, seconds: dict, said: Console) -> bool:
    """Tells whether a report is of these sources and parameters, and says that it is not made again."""
    made_of = folder.fingerprint(runner.audits()[name].notebook, parameters)
    if folder.finished(out / name).get("made_of") != made_of:
        return False
    seconds[name] = 0.0
    said.print(f"{name}: stands as it is, of the same sources and parameters")
    return True


def _digests(names: list[str], parameters: dict, expected: list[dict], file: Path) -> list[str]:
    try:
        found, problems = executor.call(DIGESTS, names, parameters)
    except executor.Died as died:
        found, problems = [], [f"digests: could not be computed ({(died.said or ['killed'])[-1].strip()})"]
    return digest_file.changes(expected, found, problems, file)


def _say(rows: list[dict], out: Path, warnings: Sequence[str], hurried: bool) -> None:
    failing = needs_fix([r for r in rows if not r["control"]])
    controls = [r for r in rows if r["control"]]
    judged = len(rows) - len(controls)
    for line in ci.lines(rows, out):
        print(line)
    for warning in warnings:
        warn(warning)
    print(
        f"{judged} check{'s' * (judged != 1)}, {len(failing)} need{'s' * (len(failing) == 1)} a fix; controls caught: "
        f"{sum(bool(r['caught']) for r in controls)} of {len(controls)}; "
        + (f"verdicts in {out / 'verdicts.json'}" if hurried else f"documents in {out}")
    )


def say_goals(names: Sequence[str], out: Path) -> None:
    """Prints how many goals of the benchmark are met, where its notebook came so far."""
    if (file := out / "bench" / goals.FILE).is_file() and "bench" in names:
        print(goals.summary(json.loads(file.read_text(encoding="utf-8"))))


def warn(text: str) -> None:
    """Prints a line on stderr, or an annotation of the job where GitHub runs this."""
    on_github = os.environ.get("GITHUB_ACTIONS") == "true"
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")) if on_github else ():
        text = text.replace(sign, code)  # which would end the annotation, and begin another command
    line = f"::warning title=bi-audit::{text}" if on_github else f"bi-audit: warning: {text}"
    print(line, file=sys.stdout if on_github else sys.stderr)
