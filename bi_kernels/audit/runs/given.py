"""What a command of bi-audit is given, checked before anything runs: each mistake is one sentence."""

import re
import shlex
from dataclasses import asdict
from pathlib import Path

import click

from bi_kernels.audit import load, worker
from bi_kernels.audit.digests import file as digest_file
from bi_kernels.audit.parameters import accepted, choose, defaults, device_name, read
from bi_kernels.audit.runs import folder, runner
from bi_kernels.audit.runs.notebooks import find_helpers

OURS = "bi_kernels", ""  # what `candidate` says where nobody else's is meant
PARTS = "op", "checks", "dtype", "groups", "callables", "first"  # parameters by which a run asks less than an audit is


def checked(
    names: tuple[str, ...], extra: list[tuple[str, str]], options: dict, judges_one: bool = False
) -> tuple[list[str], dict]:
    """Returns the audits named (all that need no naming if none is) and what they are told, checked. judges_one: of a
    single audit, whether it takes its candidate is found out by the process that judges it."""
    every = runner.audits()
    for name in names:
        if name not in every:
            raise click.UsageError(f"unknown audit {name!r}, expected {', '.join(every)}")
    names = list(dict.fromkeys(names)) or [name for name, audit in every.items() if not audit.only_named]
    parameters = {k: v for k, v in options.items() if v is not None}
    for name, value in extra:
        if name not in defaults(names[0]):
            raise click.UsageError(f"unknown parameter {name!r}, expected one of {', '.join(defaults(names[0]))}")
        if name in parameters:
            raise click.UsageError(f"{name} is given twice, {parameters[name]!r} and {value!r}; give it once")
        parameters[name] = int(value) if re.fullmatch(r"-?\d{1,30}", value) else value
    try:
        for k in parameters:
            if not any({k, "dtype"} & defaults(name).keys() for name in names):
                raise ValueError(f"{', '.join(names)} has no parameter {k!r}")
        if "nproc" in parameters and "world" not in names:
            raise ValueError(f"--nproc is of the audit world, not of {', '.join(names)}")
        if "inputs" in parameters and names != ["any"]:
            raise ValueError(f"--inputs is of the audit any, not of {', '.join(names)}")
        of_each = {name: read(name, accepted(name, parameters)) for name in names}
        for name, given in of_each.items():
            choose(given.device, getattr(given, "shapes", "tiny"))
            find_helpers(name)
        if len(names) > 1 or not judges_one:
            _importable({name: asdict(given) for name, given in of_each.items()})
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return names, parameters


def _importable(of_each: dict[str, dict]) -> None:
    """Raises ValueError where a candidate cannot be loaded: in a process of its own, which may crash."""
    mine = {k: v for k, v in of_each.items() if ":" in v.get("candidate", "")}
    for name, given in of_each.items():
        # to load a session takes as long as torch itself, and of ours nothing but the name of an op can go wrong
        if name not in mine and (given.get("op") or given.get("candidate", "") not in OURS):
            load(name, given)
    if not mine:
        return
    try:
        if said := worker.call("bi_kernels.audit.runs.given:refusal", mine):
            raise ValueError(said)
    except worker.Died as died:
        spec, last = next(iter(mine.values()))["candidate"], (died.said or [""])[-1].strip()
        why = f"ended its process with status {died.status}" + f" ({last})" * bool(last)
        raise ValueError(f"candidate is {spec!r}, whose import {why}") from None


def refusal(of_each: dict[str, dict]) -> str:
    """Returns why the session of an audit refuses what it is told; '' where none does."""
    try:
        for name, given in of_each.items():
            load(name, given)
    except ValueError as error:
        return str(error)
    return ""


def place(name: str, told: dict, out: Path | None, publish: bool, quick: bool) -> tuple[Path, str]:
    """Returns the folder of a run's documents, and by which parameters it is less than whole audits, '' if it is none.
    name: of its first audit; told: that is told this."""
    if publish and (out or quick):
        raise click.UsageError(f"--publish is given with --{'out' if out else 'quick'}; give one of them")
    usual, parts = defaults(name), [re.sub(r"[^a-z0-9]+", "-", device_name(choose(told["device"])).lower())]
    parts.append(told.get("shapes", "any"))
    candidate = told.get("candidate", "bi_kernels" if "shapes" in told else name)
    narrowed = {k: str(told[k]) for k in PARTS if k in told and told[k] != usual[k] and not (quick and k == "dtype")}
    parts += [] if candidate == "bi_kernels" else [re.sub(r"\W+", "-", candidate)]
    parts += [re.sub(r"\W+", "-", v) for v in narrowed.values()]
    out = out or Path(folder.PUBLISHED if publish else folder.ignored(), "-".join(parts))
    writable("--out", out / ".writable")
    return out, " ".join(f"{k} {shlex.quote(v)}" for k, v in narrowed.items())


def writable(option: str, file: Path) -> None:
    """Makes the folder of a file; a usage error if the file cannot be written there. Leaves no new file."""
    new = not file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        where = file.parent if option == "--out" else file
        raise click.UsageError(f"{option} is {str(where)!r}, which cannot be written ({error.strerror})") from None


def recorded(file: Path) -> list[dict]:
    """Returns the digests in a file of `bi-audit digest`; a usage error if it holds something else."""
    try:
        return digest_file.read(file)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
