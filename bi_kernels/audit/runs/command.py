"""`bi-audit run`: audits and their reports, and what is written and printed of them."""

import contextlib
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bi_kernels.audit import executor
from bi_kernels.audit.digests import file as digest_file
from bi_kernels.audit.faults import CannotJudge
from bi_kernels.audit.findings import read_rows
from bi_kernels.audit.index import goals, page, report
from bi_kernels.audit.parameters import accepted, choose, read
from bi_kernels.audit.runs import ci, folder, runner
from bi_kernels.audit.runs.checked import checked, place, refused, writable
from bi_kernels.audit.runs.summary import summary as job_summary

DIGESTS = "bi_kernels.audit.digests.candidate:compute"  # in a process of its own: it imports triton


def run(given) -> None:
    """Runs audits and writes their reports; ends the process with the status of `--fail-on`."""
    said = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    seconds, rows, warnings = {}, [], None
    jobs = given.jobs or (2 if given.quick else 1)
    with contextlib.ExitStack() as held:
        with refused(given.junit):
            writable("--junit", given.junit)
            writable("--summary", given.summary)
            names, parameters = checked(given)
            of_each = {name: accepted(name, parameters) for name in names}
            told = asdict(read(names[0], of_each[names[0]]))
            out, narrowed = place(names[0], told, given.out, given.publish)
            folder.refuse_foreign(out, names)
            report.check_templates()
            indexed = (out, out.parent) if given.publish and not narrowed else (out,)
            for path in indexed:
                page.report(path)  # what it cannot read is found before anything runs
            expected = digest_file.read(given.digests) if given.digests else None
            held.enter_context(folder.locked(out))
        candidate = told.get("candidate", names[0])
        judges = True  # unless the audit refuses its parameters
        try:
            stand = [n for n in names if given.resume and folder.stands(out / n, of_each[n])]
            for name in stand:
                seconds[name] = 0.0
                said.print(f"{name}: stands as it is, of the same kernels, versions and parameters")
            todo = [name for name in names if name not in stand]
            todo = todo if given.names or jobs == 1 else runner.longest_first(todo)
            interpreted = choose(told["device"]).type == "cpu" and not narrowed
            plan = _plan(todo, out, jobs, interpreted) if todo else ""
            try:
                runner.run(todo, of_each, out, jobs, said, seconds, (given.cell_timeout, given.timeout), plan)
            except KeyboardInterrupt:
                if seconds:
                    _index([*seconds], out, indexed[-1], given.publish)
                raise
            _index(names, out, indexed[-1], given.publish)
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
                unfinished = folder.stopped(name, "the audit was interrupted", candidate)
                rows += read_rows(out / name) if name in seconds else [unfinished]
            if given.junit and judges:
                ci.junit(rows, out, seconds, names, warnings, given.fail_on).write(str(given.junit), pretty=True)
            if given.summary and judges:
                with given.summary.open("a", encoding="utf-8") as file:
                    file.write(job_summary(rows, out, given.summary, names, warnings or [], given.fail_on))
    for line in ci.lines(rows, out):
        print(line)
    for warning in warnings or ():
        warn(warning)
    print(f"{report.counted(rows)}; reports in {out}")
    if "bench" in names and (said := goals.summary(goals.read(out / "bench"))):
        print(said)
    sys.exit(ci.fails(rows, warnings or [], given.fail_on))


def _index(names: list[str], out: Path, place: Path, publish: bool) -> None:
    """Packs reports that are to be committed, and writes what is said of all of them."""
    for name in names if publish else ():
        report.publish(out / name)
    folder.collect(out)
    page.write(place)


def _plan(names: list[str], out: Path, jobs: int, interpreted: bool) -> str:
    """Says what will be run, and for whole audits on the interpreter about how long that takes."""
    known = interpreted and {*names} <= runner.SECONDS.keys()
    minutes = sum(map(runner.SECONDS.get, names)) / 60 / jobs if known else 0
    took = f": about {minutes:.0f} minutes on two cores" if minutes >= 2 else ""
    return f"{len(names)} audit{'s' * (len(names) > 1)} into {out}{took}"


def _digests(names: list[str], parameters: dict, expected: list[dict], file: Path) -> list[str]:
    try:
        found, problems = executor.call(DIGESTS, names, parameters)
    except executor.Died as died:
        found, problems = [], [f"digests: could not be computed ({(died.said or ['killed'])[-1].strip()})"]
    return digest_file.changes(expected, found, problems, file)


def warn(text: str) -> None:
    """Prints a line on stderr, or an annotation of the job where GitHub runs this."""
    on_github = os.environ.get("GITHUB_ACTIONS") == "true"
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")) if on_github else ():
        text = text.replace(sign, code)  # which would end the annotation, and begin another command
    line = f"::warning title=bi-audit::{text}" if on_github else f"bi-audit: warning: {text}"
    print(line, file=sys.stdout if on_github else sys.stderr)
