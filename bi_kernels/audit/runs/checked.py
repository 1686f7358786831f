"""Checks what a command is given before anything runs: each mistake is one sentence."""

import contextlib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from bi_kernels.audit.faults import UsageError
from bi_kernels.audit.parameters import OPTIONS, accepted, choose, defaults, device_name, find_helpers, read
from bi_kernels.audit.runs import folder

PARTS = "op", "checks", "dtype", "groups", "callables", "first"  # parameters by which a run asks less than an audit is
QUICK = {"checks": "quick", "dtype": "bf16", "cases": 1}  # parameters of `--quick`, and its audits
QUICK_AUDITS = ["attention", "random", "vocabulary", "elementwise", "rms_norm", "gemm"]


@contextlib.contextmanager
def refused(junit: Path | None = None) -> Iterator[None]:
    """Turns what is wrong with a command into a usage error, which the JUnit file has as well."""
    try:
        yield
    except (ValueError, OSError) as error:
        if junit:
            from bi_kernels.audit.runs import ci  # noqa: PLC0415 (no other command needs what writes it)

            with contextlib.suppress(OSError):
                ci.refused(str(error)).write(str(junit), pretty=True)
        raise UsageError(str(error)) from None


def known(names: Sequence[str], every: Sequence[str]) -> None:
    for name in names:
        if name not in every:
            raise UsageError(f"unknown audit {name!r}, expected {', '.join(every)}")


def checked(given) -> tuple[list[str], dict]:
    """Returns the audits named (all that need no naming if none is) and their parameters. Whether an audit takes its
    candidate, the process that judges it finds out."""
    from bi_kernels.audit.runs import runner  # noqa: PLC0415 (`mutate` needs no notebooks)

    every, quick = runner.audits(), getattr(given, "quick", False)
    known(given.names, every)
    usual = QUICK_AUDITS if quick else [name for name, audit in every.items() if not audit.only_named]
    names = list(dict.fromkeys(given.names)) or usual
    parameters = {k: v for k in OPTIONS if (v := getattr(given, k)) is not None}
    for name, value in given.extra:
        if name not in defaults(names[0]):
            raise UsageError(f"unknown parameter {name!r}, expected one of {', '.join(defaults(names[0]))}")
        if name in parameters:
            raise UsageError(f"{name} is given twice, {parameters[name]!r} and {value!r}; give it once")
        parameters[name] = int(value) if re.fullmatch(r"-?\d{1,30}", value) else value
    for k in (*parameters, *["checks"] * quick):
        if not any(k in defaults(name) for name in names):
            raise UsageError(f"{', '.join(names)} has no parameter {k!r}")
    parameters = (QUICK if quick else {}) | parameters
    with refused():
        for name in names:
            told = read(name, accepted(name, parameters))
            choose(told.device, getattr(told, "shapes", "tiny"))
        find_helpers()
    return names, parameters


def place(name: str, told: dict, out: Path | None, publish: bool = False) -> tuple[Path, str]:
    """Returns the folder of a run's reports, and by which parameters it is less than whole audits, '' if it is none.
    name: of its first audit; told: that audit's parameters."""
    if publish and out:
        raise UsageError("--publish is given with --out; give one of them")
    narrowed = {k: str(told[k]) for k in PARTS if k in told and told[k] != defaults(name)[k]}
    candidate = told.get("candidate", "bi_kernels" if "shapes" in told else name)
    parts = [slug(device_name(choose(told["device"]))), told.get("shapes", "any")]
    parts += [re.sub(r"\W+", "-", v) for v in (*[candidate] * (candidate != "bi_kernels"), *narrowed.values())]
    out = out or Path(folder.PUBLISHED if publish else folder.ignored(), "-".join(parts))
    writable("--out", out / ".writable")
    return out, " ".join(f"{k} {shlex.quote(v)}" for k, v in narrowed.items())


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower())


def writable(option: str, file: Path | None) -> None:
    """Makes the folder of a file; a usage error if the file cannot be written there. Leaves no new file."""
    if file is None:
        return
    new = not file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        where = file.parent if option == "--out" else file
        raise UsageError(f"{option} is {str(where)!r}, which cannot be written ({error.strerror})") from None
