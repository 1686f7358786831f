"""Does what the commands of bi-audit do. The session module is loaded once a device is chosen: it imports triton."""

import json
import os
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from bi_kernels.audit import ci, load, runner, worker
from bi_kernels.audit.bench import goals
from bi_kernels.audit.digests import file as digest_file
from bi_kernels.audit.evidence.index import report as index
from bi_kernels.audit.evidence.verdicts import needs_fix, read_rows, write_rows
from bi_kernels.audit.parameters import accepted, choose, defaults, device_name, groups_of, read
from bi_kernels.audit.summary import summary as job_summary

AUDITED = ("elementwise", "gemm", "rms_norm", "vocabulary", "attention")  # whose ops mutants are judged by
DIGESTS = "bi_kernels.audit.digests.candidate:compute"  # in a process of its own: it imports triton


FORWARD_ALONE = "gemm", "elementwise"  # audits of which `backward` judges the rest


def run(names, out, extra, jobs, junit, summary, digests, level, **options) -> None:
    """Runs audits and writes their documents; ends the process with the status of `--fail-on`."""
    named = bool(names)
    names, parameters = _checked(names, extra, options)
    told = asdict(read(names[0], accepted(names[0], parameters)))
    candidate = told.get("candidate", names[0])
    if out is None:
        parts = [re.sub(r"[^a-z0-9]+", "-", device_name(choose(told["device"])).lower()), told.get("shapes", "any")]
        parts += [] if candidate == "bi_kernels" else [re.sub(r"\W+", "-", candidate)]
        usual = defaults(names[0])
        parts += [re.sub(r"\W+", "-", told[k]) for k in ("op", "dtype", "groups") if told.get(k) != usual.get(k)]
        out = Path("audits", "-".join(parts))
    for option, file in (("--out", out / ".writable"), ("--junit", junit), ("--summary", summary)):
        if file:
            _writable(option, file)
    recorded = digests and _recorded(digests)
    seconds: dict[str, float] = {}
    warnings: list[str] | None = None
    try:
        order = names if named or jobs == 1 else runner.longest_first(names)
        of_each = {name: accepted(name, parameters) for name in names}
        runner.run(order, of_each, out, jobs, Console(stderr=True), seconds)
        runner.collect(out)
        for folder in (out, out.parent) if out.parent.name == "audits" else (out,):
            (folder / "README.md").write_text(index(folder), encoding="utf-8")
        if digests:
            try:
                found, problems = worker.call(DIGESTS, names, parameters)
            except worker.Died as died:
                found, problems = [], [f"digests: could not be computed ({(died.said or ['killed'])[-1].strip()})"]
            warnings = digest_file.changes(recorded, found, problems, digests)
    finally:  # interrupted or not, what is known is written
        rows = []
        for name in names:
            unfinished = runner.stopped(name, "the audit was interrupted", candidate)
            rows += read_rows(out / name) if name in seconds else [unfinished]
        if junit:
            junit.write_text(ci.junit(rows, out, seconds, names, warnings, level), encoding="utf-8")
        if summary:
            with summary.open("a", encoding="utf-8") as file:
                file.write(job_summary(rows, out, summary, names, warnings or [], level))
    failing = needs_fix([r for r in rows if not r["control"]])
    controls = [r for r in rows if r["control"]]
    for line in ci.lines(rows, out):
        click.echo(line)
    for warning in warnings or []:
        _warn(warning)
    click.echo(
        f"{len(rows) - len(controls)} checks, {len(failing)} need a fix; controls caught: "
        f"{sum(bool(r['caught']) for r in controls)} of {len(controls)}; documents in {out}"
    )
    if alone := [name for name in names if name in FORWARD_ALONE and "backward" not in names]:
        op = f" -p op {told['op']}" if told.get("op") else ""
        other = f" --candidate {shlex.quote(candidate)}" if candidate != "bi_kernels" else ""
        click.echo(
            f"{' and '.join(alone)}: no gradient, other mode, memory or earlier call was asked about; "
            f"`bi-audit run backward{other}{op}` asks"
        )
    sys.exit(ci.fails(rows, warnings or [], level))


def bench(groups, device, seed, tiny, out) -> None:
    """Times groups of ops by the notebook `bench`; ends the process as `run` does."""
    try:
        groups_of(named := ";".join(groups))
        if (found := choose(device)).type == "cpu":
            raise ValueError("bench: no CUDA GPU is there, and nothing else is timed")
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    shapes, more = "tiny" if tiny else "qwen3-8b", [("groups", named)] if named else []
    label = re.sub(r"[^a-z0-9]+", "-", device_name(found).lower())
    out = out or Path("audits", "-".join([label, shapes, *(("bench", *groups) if groups else ())]))
    try:
        run(("bench",), out, more, 1, None, None, None, "needs-fix", shapes=shapes, device=device, seed=seed)
    except SystemExit:  # with its status
        if (file := out / "bench" / goals.FILE).is_file():  # not if the notebook stopped before
            click.echo(goals.sentence(json.loads(file.read_text(encoding="utf-8"))))
        raise


def digest(file, names, extra, check, **options) -> None:
    """Records the candidate's digests in `file`; check: compares them, and ends with 1 if one differs."""
    names, parameters = _checked(names, extra, options)
    recorded = _recorded(file) if check or file.exists() else []
    if not check:
        _writable("FILE", file)
    found, problems = worker.call(DIGESTS, names, parameters)
    if not found and not problems:
        raise click.UsageError(
            f"AUDIT is {', '.join(names)}, which judges no op of the registry; there is nothing to digest"
        )
    warnings = digest_file.changes(recorded, found, problems, file) if recorded or check else problems
    for warning in warnings:
        _warn(warning)
    if not check:
        write_rows(file, digest_file.merged(recorded, found))
        click.echo(f"recorded {len(found)} digests in {file}")
    elif not warnings:
        click.echo(f"{len(found)} digests are those recorded in {file}")
    sys.exit(bool(check and warnings))


def locate(candidate, layouts, forward, out, record, against, device, seed) -> None:
    """Names the ops of a candidate's model that drift; ends the process with 1 if one does, with 2 if what the model
    returned could not be compared."""
    names = [name for name in (layouts or "").split(",") if name]
    if record and against:
        raise click.UsageError("--record and --against are two runs; give one of them")
    if (record or against) and len(names) > 1:
        raise click.UsageError(f"--layouts is {layouts!r}, expected one layout with --record or --against")
    if record:
        _writable("--record", record / ".writable")
    try:
        choose(device)
        from bi_kernels.audit.localiser import command  # noqa: PLC0415 (imports triton: `choose` comes first)

        found = command.run(candidate, names, not forward, out, record, against, seed)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    click.echo(found if isinstance(found, str) else str(found))
    sys.exit(0 if isinstance(found, str) or found.passed else 1 if found.causes else 2)


def mutate(names, sample, seed, device, jobs, out, equivalents) -> None:
    """Judges mutants; ends the process with 1 where too many survive, or one that is explained does not."""
    for name in names:
        if name not in AUDITED:
            raise click.UsageError(f"unknown audit {name!r}, expected {', '.join(AUDITED)}")
    try:
        label = re.sub(r"[^a-z0-9]+", "-", device_name(choose(device)).lower())
        out = out or Path("audits", f"{label}-mutants", "mutants")
        _writable("--out", out / ".writable")
        from bi_kernels.audit.mutants import command, plan  # noqa: PLC0415 (imports triton: `choose` comes first)

        given = {"--sample": sample, "--seed": seed or None, "--device": device if device != "auto" else None}
        said = " ".join(["bi-audit mutate", *names, *(f"{k} {v}" for k, v in given.items() if v is not None)])
        known = equivalents or plan.HERE / "equivalents.toml"
        found, wrong = command.run(names, sample or 0, seed, device, jobs, out, known, said)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    for line in wrong:
        click.echo(line)
    click.echo(f"{found}; document in {out}")
    sys.exit(command.failed(wrong, found))


def report(folder: Path) -> None:
    """Writes the index of a folder of documents."""
    if not folder.is_dir():
        raise click.UsageError(f"DIR is {str(folder)!r}, which is not a folder")
    (folder / "README.md").write_text(index(folder), encoding="utf-8")
    click.echo(f"wrote {folder / 'README.md'}")


def _checked(names: tuple[str, ...], extra: list[tuple[str, str]], options: dict) -> tuple[list[str], dict]:
    """Returns the audits named (all of them if none is) and what they are told, checked, so that a wrong parameter is
    one line, at once."""
    every = runner.audits()
    for name in names:
        if name not in every:
            raise click.UsageError(f"unknown audit {name!r}, expected {', '.join(every)}")
    names = list(dict.fromkeys(names)) or [name for name, audit in every.items() if not audit.only_named]
    parameters = {k: v for k, v in options.items() if v is not None}
    for name, value in extra:
        if name not in defaults(names[0]):
            raise click.UsageError(f"unknown parameter {name!r}, expected one of {', '.join(defaults(names[0]))}")
        parameters[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
    try:
        for k in ("candidate", "shapes"):
            if k in parameters and not any(accepted(name, {k: 0}) for name in names):
                raise ValueError(f"{', '.join(names)} has no parameter {k!r}")
        if "nproc" in parameters and "world" not in names:
            raise ValueError(f"--nproc is of the audit world, not of {', '.join(names)}")
        if "inputs" in parameters and names != ["any"]:
            raise ValueError(f"--inputs is of the audit any, not of {', '.join(names)}")
        for name in names:
            given = read(name, accepted(name, parameters))
            choose(given.device, getattr(given, "shapes", "tiny"))
            # to load a session takes as long as torch itself, and only another candidate can go wrong there
            if getattr(given, "candidate", "") != "bi_kernels" or getattr(given, "op", ""):
                load(name, asdict(given))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
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
    """Returns the digests in a file of `bi-audit digest`; a usage error if it holds something else."""
    try:
        return digest_file.read(file)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _warn(text: str) -> None:
    """Prints a line on stderr, or an annotation of the job where GitHub runs this."""
    on_github = os.environ.get("GITHUB_ACTIONS") == "true"
    click.echo(f"::warning title=bi-audit::{text}" if on_github else f"bi-audit: warning: {text}", err=not on_github)
