"""Runs `bi-audit mutate`."""

import math
import shlex
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bi_kernels.audit.parameters import choose
from bi_kernels.audit.report.provenance import provenance
from mutation import document, plan
from mutation.run import SEEDS, judged

KEPT = "judged.jsonl"  # every verdict as it comes, until the report is written


def run(given, out: Path) -> tuple[list[str], bool]:
    """Judges mutants and writes their report; returns the lines to print, and whether the run fails.

    It fails where the rate is below the goal, and where an entry of the file of equivalents is killed. Raises
    ValueError for an entry that no mutant answers to.
    """
    until = time.monotonic() + 60 * given.minutes if given.minutes else math.inf
    where, file = choose(given.device), given.equivalents or plan.EQUIVALENTS
    every, entries = plan.every(), plan.equivalents(file)
    for entry in plan.stale(every, entries):
        raise ValueError(f"{file.name}: no mutant of {entry.file}, {entry.function}, has {entry.before!r}")
    every = plan.of_files(plan.of_audits(plan.of_device(every, where.type), given.names), given.files)
    mutants = plan.sampled(every, given.sample or 0, given.seed)
    out.mkdir(parents=True, exist_ok=True)
    word = TextColumn("{task.fields[word]}")
    columns = TextColumn("mutants"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), word
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(mutants), word="judging the package as it is")
        number = {"killed": 0, "survived": 0}

        def tell(found: dict, left: int) -> None:
            number[found["verdict"]] += 1
            progress.update(task, completed=len(mutants) - left, word=", ".join(f"{n} {k}" for k, n in number.items()))

        found, missing = judged(mutants, where.type, given.jobs, out / KEPT, tell, range(given.seeds), until)
    if not found:
        return [f"no mutant is judged yet; the same command goes on with {out / KEPT}"], False
    of = {m.id: m for m in mutants}
    wrong = document.check_equivalents(found, entries, of, where.type)
    parameters = {"audits": " ".join(given.names) or "all", "sample": given.sample or "all", "seed": given.seed}
    parameters |= {"files": given.files or "all", "seeds": given.seeds}
    parameters |= {"open": f"{missing} of {len(mutants)}"} if missing else {}
    device = given.device if given.device != "auto" else None
    told = {"--sample": given.sample, "--files": given.files and shlex.quote(given.files) or None}
    told |= {"--seed": given.seed or None, "--seeds": given.seeds if given.seeds != len(SEEDS) else None}
    told["--device"] = device
    command = ["bi-audit mutate", *given.names, *(f"{k} {v}" for k, v in told.items() if v is not None)]
    made = provenance(where, parameters) | {"command": f"`{' '.join(command)}`"}
    there = document.population(every, given.names, given.files)
    document.record(out, found, of, made, there)
    document.write(out)
    (out / "survivors.txt").write_text(document.survivors(found), encoding="utf-8")
    if missing:
        wrong.append(
            f"{missing} of {len(mutants)} are not judged to the end; the same command goes on with {out / KEPT}"
        )
    else:
        (out / KEPT).unlink()
    failed = document.rate(found) < document.GOAL or any(document.BUT in line for line in wrong)
    return [*wrong, f"{document.summary(found, there)}; document in {out}"], failed
