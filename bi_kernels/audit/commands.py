"""Does what the commands of bi-audit do. Sessions are loaded once a device is chosen: they import triton."""

import importlib
import sys
from pathlib import Path

from bi_kernels.audit import executor
from bi_kernels.audit.digests import file as digest_file
from bi_kernels.audit.faults import UsageError
from bi_kernels.audit.findings import write_rows
from bi_kernels.audit.options import Run
from bi_kernels.audit.parameters import BenchParameters, choose, device_name, in_checkout
from bi_kernels.audit.runs import folder
from bi_kernels.audit.runs.checked import checked, known, refused, slug, writable
from bi_kernels.extras import extra

# whose ops mutants are judged by, and what else judges them
AUDITED = ("elementwise", "gemm", "rms_norm", "vocabulary", "attention", "experts", "mode", "transformers")


def run(given) -> None:
    """Runs audits; ends the process with their status."""
    with extra("audit"):
        from bi_kernels.audit.runs import command  # noqa: PLC0415 (`mutate` needs no notebooks)
    command.run(given)


def bench(given) -> None:
    """Times groups of ops by the notebook `bench`; ends the process as `run` does."""
    with refused():
        BenchParameters(groups=(named := ";".join(given.groups)))
        if choose(given.device).type == "cpu":
            raise ValueError("bench: no CUDA GPU is there, and nothing else is timed")
    told = {"shapes": "tiny" if given.tiny else "qwen3-8b", "device": given.device, "seed": given.seed}
    groups = [("groups", named)] if named else []
    run(Run(names=("bench",), out=given.out, extra=groups, publish=given.publish, **told))


def digest(given) -> None:
    """Records the candidate's digests in a file; --check compares them, and ends with 1 if one differs."""
    names, parameters = checked(given)
    with extra("audit"):
        from bi_kernels.audit.runs import command  # noqa: PLC0415 (as above)

    with refused():
        before = digest_file.read(given.file) if given.check or given.file.exists() else []
    if not given.check:
        writable("FILE", given.file)
    try:
        found, problems = executor.call(command.DIGESTS, names, parameters)
    except executor.Died as died:
        raise UsageError((died.said or [str(died)])[-1].removeprefix("ValueError: ")) from None
    if not found and not problems:
        raise UsageError(f"AUDIT is {', '.join(names)}, which judges no op of the registry; there is nothing to digest")
    warnings = digest_file.changes(before, found, problems, given.file) if before or given.check else problems
    for warning in warnings:
        command.warn(warning)
    if not given.check:
        write_rows(given.file, digest_file.merged(before, found))
        print(f"recorded {len(found)} digests in {given.file}")
    elif not warnings:
        print(f"{len(found)} digests are those recorded in {given.file}")
    sys.exit(bool(given.check and warnings))


def locate(given) -> None:
    """Names the ops of a candidate's model that drift; ends the process with 1 if one does, with 2 if what the model
    returned could not be compared."""
    names, modes = ([name for name in told.split(",") if name] for told in (given.layouts, given.modes))
    if given.record and given.against:
        raise UsageError("--record and --against are two runs; give one of them")
    if (given.record or given.against) and len(names) > 1:
        raise UsageError(f"--layouts is {given.layouts!r}, expected one layout with --record or --against")
    if (given.record or given.against) and modes:
        raise UsageError(f"--modes is {given.modes!r}, expected none with --record or --against")
    writable("--record", given.record and given.record / ".writable")
    with refused():
        choose(given.device)
        from bi_kernels.audit.localiser.command import run as located  # noqa: PLC0415 (triton: `choose` comes first)

        told = given.candidate, names, modes, not given.forward, given.out, given.record, given.against, given.seed
        found = located(*told)
    print(found)
    sys.exit(0 if isinstance(found, str) or found.passed else 1 if found.causes else 2)


def certify(given) -> None:
    """Compares two captures; ends the process with 1 where they differ."""
    from bi_kernels.audit.certificate.certify import certify as compare  # noqa: PLC0415 (no other command needs it)

    writable("--out", given.out and given.out / ".writable")
    with refused():
        found = compare(given.rollout, given.training)
        print(found)
        if given.out:
            found.write(given.out)
            print(f"wrote {given.out / 'README.md'}")
    sys.exit(not found.passed)


def mutate(given) -> None:
    """Judges mutants; ends the process with 1 where too many survive, or one that is explained does not."""
    known(given.names, AUDITED)
    with refused():
        checkout = in_checkout("mutate", "mutation")
        label = slug(device_name(choose(given.device)))
        out = given.out or Path(folder.PUBLISHED if given.publish else folder.ignored(), f"{label}-mutants", "mutants")
        writable("--out", out / ".writable")
        sys.path.insert(0, str(checkout))  # nobody else's `mutation` comes first
        lines, failed = importlib.import_module("mutation.command").run(given, out)
    print(*lines, sep="\n")
    sys.exit(failed)


def report(given) -> None:
    """Writes the reports below a folder from their evidence, and the index."""
    with extra("audit"):
        from bi_kernels.audit.index import page  # noqa: PLC0415 (as above)

    if not given.place.is_dir():
        raise UsageError(f"DIR is {str(given.place)!r}, which is not a folder")
    with refused():
        folder.refuse_foreign(given.place, [], "DIR")
        page.write_anew(given.place)
    print(f"wrote {given.place / page.PAGE}")
