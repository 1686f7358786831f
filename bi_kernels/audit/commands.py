"""Does what the commands of bi-audit do. The session module is loaded once a device is chosen: it imports triton."""

import re
import sys
from pathlib import Path

import click

from bi_kernels.audit import worker
from bi_kernels.audit.digests import file as digest_file
from bi_kernels.audit.evidence.verdicts import write_rows
from bi_kernels.audit.index import page
from bi_kernels.audit.parameters import BenchParameters, choose, device_name
from bi_kernels.audit.runs import command, folder
from bi_kernels.audit.runs.given import checked, recorded, writable

AUDITED = ("elementwise", "gemm", "rms_norm", "vocabulary", "attention")  # whose ops mutants are judged by
run = command.run


def bench(groups, device, seed, tiny, out, publish) -> None:
    """Times groups of ops by the notebook `bench`; ends the process as `run` does."""
    try:
        BenchParameters(groups=(named := ";".join(groups)))
        if choose(device).type == "cpu":
            raise ValueError("bench: no CUDA GPU is there, and nothing else is timed")
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    told = {"shapes": "tiny" if tiny else "qwen3-8b", "device": device, "seed": seed}
    run(names=("bench",), out=out, extra=[("groups", named)] if named else [], publish=publish, **told)


def digest(file, names, extra, check, **options) -> None:
    """Records the candidate's digests in `file`; check: compares them, and ends with 1 if one differs."""
    names, parameters = checked(names, extra, options)
    before = recorded(file) if check or file.exists() else []
    if not check:
        writable("FILE", file)
    found, problems = worker.call(command.DIGESTS, names, parameters)
    if not found and not problems:
        raise click.UsageError(
            f"AUDIT is {', '.join(names)}, which judges no op of the registry; there is nothing to digest"
        )
    warnings = digest_file.changes(before, found, problems, file) if before or check else problems
    for warning in warnings:
        command.warn(warning)
    if not check:
        write_rows(file, digest_file.merged(before, found))
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
        writable("--record", record / ".writable")
    try:
        choose(device)
        from bi_kernels.audit.localiser.command import run as located  # noqa: PLC0415 (triton: `choose` comes first)

        found = located(candidate, names, not forward, out, record, against, seed)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    click.echo(found if isinstance(found, str) else str(found))
    sys.exit(0 if isinstance(found, str) or found.passed else 1 if found.causes else 2)


def mutate(names, sample, seed, device, jobs, out, equivalents, publish) -> None:
    """Judges mutants; ends the process with 1 where too many survive, or one that is explained does not."""
    for name in names:
        if name not in AUDITED:
            raise click.UsageError(f"unknown audit {name!r}, expected {', '.join(AUDITED)}")
    try:
        label = re.sub(r"[^a-z0-9]+", "-", device_name(choose(device)).lower())
        out = out or Path(folder.PUBLISHED if publish else folder.ignored(), f"{label}-mutants", "mutants")
        writable("--out", out / ".writable")
        from bi_kernels.audit.mutants import command as judged  # noqa: PLC0415 (triton: `choose` comes first)
        from bi_kernels.audit.mutants import plan  # noqa: PLC0415 (likewise)

        given = {"--sample": sample, "--seed": seed or None, "--device": device if device != "auto" else None}
        said = " ".join(["bi-audit mutate", *names, *(f"{k} {v}" for k, v in given.items() if v is not None)])
        known = equivalents or plan.HERE / "equivalents.toml"
        found, wrong = judged.run(names, sample or 0, seed, device, jobs, out, known, said)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    for line in wrong:
        click.echo(line)
    click.echo(f"{found}; document in {out}")
    sys.exit(judged.failed(wrong, found))


def report(place: Path) -> None:
    """Writes the reports below a folder from their evidence, and the index."""
    if not place.is_dir():
        raise click.UsageError(f"DIR is {str(place)!r}, which is not a folder")
    try:
        folder.refuse_foreign(place, [], "DIR")
        page.write_anew(place)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    click.echo(f"wrote {place / page.PAGE}")
