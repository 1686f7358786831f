"""bi-audit list | run | digest | report."""

import os
import re
import signal
import sys
from pathlib import Path

import click
from rich.console import Console

from bi_kernels.audit import ci


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Audits whether an op's result for a token depends on what else was in the batch."""


@cli.command("list")
def list_() -> None:
    """Names the audits, their notebooks and their parameters."""
    import papermill

    from bi_kernels.audit.runner import audits

    for audit in audits().values():
        parameters = papermill.inspect_notebook(str(audit.notebook))
        click.echo(f"{audit.name:12} {audit.title}")
        click.echo(f"{'':12} notebooks/{audit.notebook.name}; parameters: {', '.join(parameters)}")


def _of_a_run(command):
    """What every command that starts audits takes."""
    for option in reversed(
        (
            click.argument("names", nargs=-1, metavar="[AUDIT]..."),
            click.option(
                "--candidate", help="bi_kernels (default), torch, package.module:function or path/to/file.py:function."
            ),
            click.option("--dtype", help="bf16, fp16 or fp32; all of them unless given."),
            click.option("--shapes", help="tiny (default), qwen3-8b or llama3-8b; the interpreter runs tiny."),
            click.option(
                "--inputs", help="Of the audit any: 'x:bf16[300,64] ids:int64[300]<1000 eps:1e-6', or file.py:function."
            ),
            click.option("--device", help="auto (default), cpu or cuda."),
            click.option("--seed", type=int, help="Seed of the inputs, 0 unless given."),
            click.option(
                "-p",
                "extra",
                nargs=2,
                multiple=True,
                metavar="NAME VALUE",
                help="Any other parameter of the notebooks.",
            ),
        )
    ):
        command = option(command)
    return command


PATH = click.Path(path_type=Path)


@cli.command()
@_of_a_run
@click.option(
    "--out",
    type=PATH,
    help="Folder of the documents; audits/DEVICE-SHAPES unless given, with what else narrows the run.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Audits run at a time.")
@click.option("--junit", type=PATH, metavar="FILE", help="Writes JUnit XML: a case an op, shape, dtype and relation.")
@click.option("--summary", type=PATH, metavar="FILE", help="Appends Markdown, as to $GITHUB_STEP_SUMMARY.")
@click.option(
    "--digests", type=PATH, metavar="FILE", help="Warns where bits are not those that `bi-audit digest` recorded."
)
@click.option(
    "--fail-on",
    "level",
    type=click.Choice(ci.LEVELS),
    default="needs-fix",
    show_default=True,
    help="What makes the exit status 1. drift: bits that differ, atomics, missed controls, audits that stopped; "
    "needs-fix: accuracy and the contract besides; warning: digests besides.",
)
def run(names, out, extra, jobs, junit, summary, digests, level, **options) -> None:
    """Runs audits (all of them unless named) and writes their documents.

    Exit status: 0 all verdicts pass, 1 something needs a fix (see --fail-on), 2 the command was wrong.
    """
    from bi_kernels.audit.evidence.index import report as index
    from bi_kernels.audit.evidence.verdicts import read_rows
    from bi_kernels.audit.runner import collect, stopped
    from bi_kernels.audit.runner import run as run_audits

    names, parameters = _parameters(names, extra, options)
    sessions = _checked(names, parameters)
    first = sessions[0]
    if out is None:
        device = re.sub(r"[^a-z0-9]+", "-", _device_name(first).lower())
        candidate = "" if first.candidate.spec == "bi_kernels" else "-" + re.sub(r"\W+", "-", first.candidate.spec)
        part = "".join(
            f"-{first.parameters[k]}" for k in ("op", "dtype") if first.parameters.get(k, "all") not in ("", "all")
        )
        out = Path("audits") / f"{device}-{first.parameters.get('shapes', 'any')}{candidate}{part}"
    _writable("--out", out / ".writable")
    for option, file in (("--junit", junit), ("--summary", summary)):
        if file:
            _writable(option, file)
    recorded = _recorded(digests) if digests else None
    seconds: dict[str, float] = {}
    warnings: list[str] | None = None
    try:
        run_audits(names, parameters, out, jobs, Console(stderr=True), seconds)
        collect(out)
        for folder in (out, out.parent) if out.parent.name == "audits" else (out,):
            (folder / "README.md").write_text(index(folder), encoding="utf-8")
        if digests:
            from bi_kernels.audit.digests.candidate import changes, measure

            warnings = changes(recorded, *measure(names, parameters), digests)
    finally:  # interrupted or not, what is known is written
        candidate = first.candidate.spec
        rows = [
            r
            for name in names
            for r in (
                read_rows(out / name) if name in seconds else [stopped(name, "the audit was interrupted", candidate)]
            )
        ]
        if junit:
            junit.write_text(ci.junit(rows, out, seconds, names, warnings, level), encoding="utf-8")
        if summary:
            with summary.open("a", encoding="utf-8") as file:
                file.write(ci.summary(rows, out, summary, names, warnings or [], level))
    failing = [r for r in rows if not r["control"] and r["verdict"] == "needs-fix"]
    controls = [r for r in rows if r["control"]]
    for line in ci.lines(failing, out):
        click.echo(line)
    for warning in warnings or []:
        _warn(warning)
    click.echo(
        f"{len(rows) - len(controls)} checks, {len(failing)} need a fix; controls caught: "
        f"{sum(bool(r['caught']) for r in controls)} of {len(controls)}; documents in {out}"
    )
    sys.exit(ci.fails(rows, warnings or [], level))


@cli.command()
@click.argument("file", type=PATH)
@_of_a_run
@click.option("--check", is_flag=True, help="Only compares, and ends with 1 if a digest differs; FILE stays as it is.")
def digest(file, names, extra, check, **options) -> None:
    """Records SHA-256 digests of the candidate's output bits in FILE, with the versions that made them.

    `bi-audit run --digests FILE` warns where the bits are others, and names the versions that changed. One FILE holds any
    number of candidates and architectures.
    """
    from bi_kernels.audit.digests.candidate import changes, compute, merged

    names, parameters = _parameters(names, extra, options)
    _checked(names, parameters)
    recorded = _recorded(file) if check or file.exists() else []
    if not check:
        _writable("FILE", file)
    found, problems = compute(names, parameters)
    if not found and not problems:
        raise click.UsageError(
            f"AUDIT is {', '.join(names)}, which judges no op of the registry; there is nothing to digest"
        )
    warnings = changes(recorded, found, problems, file) if recorded or check else problems
    for warning in warnings:
        _warn(warning)
    if not check:
        from bi_kernels.audit.evidence.verdicts import write_rows

        write_rows(file, merged(recorded, found))
        click.echo(f"recorded {len(found)} digests in {file}")
    elif not warnings:
        click.echo(f"{len(found)} digests are those recorded in {file}")
    sys.exit(bool(check and warnings))


def _parameters(names: tuple[str, ...], extra: list[tuple[str, str]], options: dict) -> tuple[list[str], dict]:
    """The audits named (all of them if none is) and the parameters of their notebooks."""
    from bi_kernels.audit.runner import audits

    every = audits()
    for name in names:
        if name not in every:
            raise click.UsageError(f"unknown audit {name!r}, expected {', '.join(every)}")
    names = list(dict.fromkeys(names)) or [name for name, audit in every.items() if not audit.only_named]
    # a notebook by itself may look at bf16 alone
    parameters = {"dtype": "all"} | {k: v for k, v in options.items() if v is not None}
    for name, value in extra:
        import papermill

        known = papermill.inspect_notebook(str(every[names[0]].notebook))
        if name not in known:
            raise click.UsageError(f"unknown parameter {name!r}, expected one of {', '.join(known)}")
        parameters[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return names, parameters


def _writable(option: str, file: Path) -> None:
    """Makes the folder of a file; a usage error if the file cannot be written there. Leaves no new file."""
    new = not file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        place = file.parent if option == "--out" else file
        raise click.UsageError(f"{option} is {str(place)!r}, which cannot be written ({error.strerror})") from None


def _recorded(file: Path) -> list[dict]:
    """The digests in a file of `bi-audit digest`."""
    from bi_kernels.audit.digests.candidate import read

    try:
        return read(file)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _warn(text: str) -> None:
    """A line on stderr, or an annotation of the job where GitHub runs this."""
    on_github = os.environ.get("GITHUB_ACTIONS") == "true"
    click.echo(f"::warning title=bi-audit::{text}" if on_github else f"bi-audit: warning: {text}", err=not on_github)


def _checked(names: list[str], parameters: dict) -> list:
    """The sessions that the notebooks will start, made here first so that a wrong parameter is one line, at once."""
    from bi_kernels.audit.callables import session as anyones
    from bi_kernels.audit.runner import of_audit
    from bi_kernels.audit.session import start

    try:
        lost = [
            k
            for k in ("candidate", "shapes")
            if k in parameters and all(k not in of_audit(name, {k: 0}) for name in names)
        ]
        if lost:
            raise ValueError(f"{', '.join(names)} has no parameter {lost[0]!r}")
        if "inputs" in parameters and names != ["any"]:
            raise ValueError(f"--inputs is of the audit any, not of {', '.join(names)}")
        return [
            (anyones.start if name in anyones.PARAMETERS else start)(name, of_audit(name, parameters)) for name in names
        ]
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _device_name(session) -> str:
    from bi_kernels.audit.evidence.provenance import device_name

    return device_name(session.device)


@cli.command()
@click.argument("folder", default="audits", type=click.Path(path_type=Path), metavar="[DIR]")
def report(folder: Path) -> None:
    """Writes DIR/README.md, the index with the status matrix, from the verdicts below DIR (audits unless given)."""
    from bi_kernels.audit.evidence.index import report as index

    if not folder.is_dir():
        raise click.UsageError(f"DIR is {str(folder)!r}, which is not a folder")
    (folder / "README.md").write_text(index(folder), encoding="utf-8")
    click.echo(f"wrote {folder / 'README.md'}")


def main() -> None:
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # how a CI's timeout ends a job
    try:
        status = cli.main(standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"bi-audit: {error.format_message()}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("bi-audit: interrupted; finished documents are whole", err=True)
        sys.exit(130)
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
