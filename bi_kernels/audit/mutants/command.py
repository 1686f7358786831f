"""What `bi-audit mutate` runs."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bi_kernels.audit.evidence.provenance import provenance
from bi_kernels.audit.mutants import document, plan
from bi_kernels.audit.mutants.operators import Mutant
from bi_kernels.audit.mutants.rates import told
from bi_kernels.audit.mutants.reach import on_hopper
from bi_kernels.audit.mutants.run import judged
from bi_kernels.audit.parameters import choose


def chosen(names: Sequence[str], sample: int, seed: int, on_gpu: bool, equivalents: Path) -> tuple[list[Mutant], list]:
    """Returns the mutants of a run and the entries of the file of equivalents. Raises ValueError for an entry that no
    mutant answers to."""
    every = plan.every(hopper=True)
    entries = plan.equivalents(equivalents)
    for entry in plan.stale(every, entries):
        raise ValueError(f"{equivalents.name}: no mutant of {entry.file}, {entry.function}, has {entry.before!r}")
    mine = [m for m in every if on_gpu or not on_hopper(m.file)]
    return plan.sampled(plan.of_audits(mine, names), sample, seed), entries


def run(
    names: Sequence[str], sample: int, seed: int, device: str, jobs: int, out: Path, equivalents: Path, command: str
) -> tuple[str, list[str]]:
    """Judges mutants and writes their document; returns what is said of them, and what is wrong."""
    where = choose(device)
    mutants, entries = chosen(names, sample, seed, where.type == "cuda", equivalents)
    out.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("mutants"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[word]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(mutants), word="judging the package as it is")
        number = {"killed": 0, "survived": 0}

        def tell(found: dict, left: int) -> None:
            number[found["verdict"]] += 1
            progress.update(task, completed=len(mutants) - left, word=", ".join(f"{n} {k}" for k, n in number.items()))

        found = judged(mutants, where.type, jobs, out / ".mutants.jsonl", tell)
    of = {m.id: m for m in mutants}
    wrong = document.settle(found, entries, of, where.type)
    parameters = {"audits": " ".join(names) or "all", "sample": sample or "all", "seed": seed}
    made = provenance(where, parameters) | {"command": f"`{command}`"}
    every = plan.of_audits(plan.every(where.type == "cuda"), names)
    document.record(out, found, of, made, document.population(every, names))
    document.write(out)
    (out / ".mutants.jsonl").unlink()
    return told(out, found), wrong


def failed(wrong: Sequence[str], said: str) -> bool:
    """Tells whether a run fails: an entry of the file of equivalents that is killed, or a rate below the goal."""
    return "not met" in said or any(document.BUT in line for line in wrong)
