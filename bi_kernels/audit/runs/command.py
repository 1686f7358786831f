"""`bi-audit run`: audits and their documents, or the quick run, and what is written and printed of either."""

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from bi_kernels.audit import worker
from bi_kernels.audit.digests import file as digest_file
from bi_kernels.audit.evidence.verdicts import needs_fix, read_rows, write_rows
from bi_kernels.audit.faults import CannotJudge
from bi_kernels.audit.index import goals, page
from bi_kernels.audit.parameters import accepted, choose, read
from bi_kernels.audit.runs import ci, folder, quick, runner
from bi_kernels.audit.runs.given import checked, place, recorded, writable
from bi_kernels.audit.runs.summary import summary as job_summary

DIGESTS = "bi_kernels.audit.digests.candidate:compute"  # in a process of its own: it imports triton
FORWARD_ALONE = "gemm", "elementwise"  # audits of which `backward` judges the rest


def run(
    *, names, out, extra, jobs=None, junit=None, summary=None, digests=None, level="needs-fix", publish=False,
    resume=False, hurried=False, timeout=0.0, cell_timeout=0.0, **options,
) -> None:  # fmt: skip
    """Runs audits and writes their documents; ends the process with the status of `--fail-on`."""
    named, said, seconds, judged = bool(names), Console(stderr=True, soft_wrap=True), {}, {}
    jobs = jobs or (2 if hurried else 1)
    with contextlib.ExitStack() as held:
        with _refused(junit):
            for option, file in (("--junit", junit), ("--summary", summary)):
                if file:
                    writable(option, file)
            if hurried:
                options["dtype"] = options.get("dtype") or quick.DTYPE
            names, parameters = checked(names, extra, options, judges_one=not hurried)
            names = quick.audited(names) if hurried else names
            told = asdict(read(names[0], accepted(names[0], parameters)))
            whole, narrowed = place(names[0], told, out, publish, hurried)
            out = whole if out or not hurried else whole.with_name(f"{whole.name}-quick")
            folder.refuse_foreign(out, [] if hurried else names)
            indexed = () if hurried else (out, out.parent) if publish and not narrowed else (out,)
            for place_ in indexed:
                page.report(place_)  # as it stands: what it cannot read is found before anything runs
            expected = recorded(digests) if digests else None
            held.enter_context(folder.locked(out))
        candidate, of_each = told.get("candidate", names[0]), {name: accepted(name, parameters) for name in names}
        warnings: list[str] | None = None
        told_so = False  # the audit refused what it was told, and nothing was judged
        interpreted = choose(told["device"]).type == "cpu"
        try:
            if hurried:
                _ask_quickly(of_each, jobs, judged, seconds, said, runner.estimate(names, whole, jobs, interpreted))
            else:
                order = names if named or jobs == 1 else runner.longest_first(names)
                todo = [name for name in order if not (resume and _stands(name, of_each[name], out, seconds, said))]
                many = f"{len(todo)} audit{'s' * (len(todo) > 1)} into {out}"
                plan = f"{many}: {runner.estimate(todo, out, jobs, interpreted)}" if todo else ""
                runner.run(todo, of_each, out, jobs, said, seconds, (cell_timeout, timeout), plan)
                folder.collect(out)
                page.write(indexed[-1])
                if publish and narrowed:
                    said.print(f"{out.parent}/README.md stays as it is: this run asked {narrowed} alone")
            if digests:
                warnings = _digests(names, parameters, expected, digests)
        except CannotJudge as refused:
            told_so = True
            with _refused(junit):
                raise refused from None
        finally:  # interrupted or not, what is known is written
            rows = []
            for name in () if told_so else names:
                unfinished = runner.stopped(name, "the audit was interrupted", candidate)
                rows += judged.get(name) or (read_rows(out / name) if name in seconds else [unfinished])
            if hurried:
                write_rows(out / "verdicts.json", rows)
            if junit and not told_so:
                junit.write_text(ci.junit(rows, out, seconds, names, warnings, level), encoding="utf-8")
            if summary and not told_so:
                with summary.open("a", encoding="utf-8") as file:
                    file.write(job_summary(rows, out, summary, names, warnings or [], level))
    _say(rows, out, warnings or [], hurried)
    say_goals(names, out)
    if alone := [name for name in names if name in FORWARD_ALONE and "backward" not in names and not hurried]:
        op = f" -p op {told['op']}" if told.get("op") else ""
        other = f" --candidate {shlex.quote(candidate)}" if candidate != "bi_kernels" else ""
        click.echo(
            f"{' and '.join(alone)}: no gradient was asked about, nor all that a model does around a call (modes, "
            f"memory, earlier calls); `bi-audit run backward{other}{op}` asks"
        )
    sys.exit(ci.fails(rows, warnings or [], level))


@contextlib.contextmanager
def _refused(junit: Path | None) -> Iterator[None]:
    """Turns what is wrong with a command into a usage error, which the JUnit file has as well."""
    try:
        yield
    except (click.UsageError, ValueError, OSError) as error:
        said = error.format_message() if isinstance(error, click.UsageError) else str(error)
        if junit:
            with contextlib.suppress(OSError):
                junit.write_text(ci.refused(said), encoding="utf-8")
        raise click.UsageError(said) from None


def _stands(name: str, parameters: dict, out: Path, seconds: dict, said: Console) -> bool:
    """Tells whether a document is of these sources and parameters, and says that it is not made again."""
    made_of = folder.fingerprint(runner.audits()[name].notebook, parameters)
    if folder.finished(out / name).get("made_of") != made_of:
        return False
    seconds[name] = 0.0
    said.print(f"{name}: stands as it is, of the same sources and parameters", highlight=False)
    return True


def _ask_quickly(of_each: dict, jobs: int, judged: dict, seconds: dict, said: Console, whole: str) -> None:
    """Runs the quick run, a line an op. whole: how long the whole audits take."""
    ops = " and ".join(filter(None, [", ".join([*of_each][:-1]), [*of_each][-1]]))
    said.print(
        f"a few questions about the ops of {ops}: about a minute on two cores; their whole audits, without --quick: "
        + whole,
        highlight=False,
    )

    def done(name: str, rows: Sequence) -> None:
        bad = needs_fix(rows)
        of_control = "missed" if bad else "caught"
        word = of_control if rows[0].control else f"{len(bad)} need a fix" if bad else "pass"
        said.print(f"  {name:24} {len(rows):3} check{'s' * (len(rows) > 1):1}  {word}", highlight=False)

    judged |= quick.run(of_each, jobs, done)
    seconds |= dict.fromkeys(of_each, 0.0)


def _digests(names: list[str], parameters: dict, expected: list[dict], file: Path) -> list[str]:
    try:
        found, problems = worker.call(DIGESTS, names, parameters)
    except worker.Died as died:
        found, problems = [], [f"digests: could not be computed ({(died.said or ['killed'])[-1].strip()})"]
    return digest_file.changes(expected, found, problems, file)


def _say(rows: list[dict], out: Path, warnings: Sequence[str], hurried: bool) -> None:
    failing = needs_fix([r for r in rows if not r["control"]])
    controls = [r for r in rows if r["control"]]
    judged = len(rows) - len(controls)
    for line in ci.lines(rows, out):
        click.echo(line)
    for warning in warnings:
        warn(warning)
    click.echo(
        f"{judged} check{'s' * (judged != 1)}, {len(failing)} need{'s' * (len(failing) == 1)} a fix; controls caught: "
        f"{sum(bool(r['caught']) for r in controls)} of {len(controls)}; "
        + (f"verdicts in {out / 'verdicts.json'}" if hurried else f"documents in {out}")
    )


def say_goals(names: Sequence[str], out: Path) -> None:
    """Prints how many goals of the benchmark are met, where its notebook came so far."""
    if (file := out / "bench" / goals.FILE).is_file() and "bench" in names:
        click.echo(goals.summary(json.loads(file.read_text(encoding="utf-8"))))


def warn(text: str) -> None:
    """Prints a line on stderr, or an annotation of the job where GitHub runs this."""
    on_github = os.environ.get("GITHUB_ACTIONS") == "true"
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")) if on_github else ():
        text = text.replace(sign, code)  # which would end the annotation, and begin another command
    click.echo(f"::warning title=bi-audit::{text}" if on_github else f"bi-audit: warning: {text}", err=not on_github)
