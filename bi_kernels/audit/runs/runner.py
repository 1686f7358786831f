"""Runs audits, each in a process of its own, and puts the report that it leaves in its place."""

import json
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bi_kernels.audit import executor
from bi_kernels.audit.faults import CannotJudge, UsageError
from bi_kernels.audit.findings import needs_fix, read_rows
from bi_kernels.audit.memory import SHORT
from bi_kernels.audit.parameters import defaults, notebooks
from bi_kernels.audit.runs import folder

# Seconds that each takes on the interpreter, beside one other on two cores. Those that take longest start first where
# nobody says in which order: two processes end sooner so.
SECONDS = {
    "attention": 355,
    "backward": 294,
    "random": 246,
    "vocabulary": 233,
    "elementwise": 154,
    "rms_norm": 145,
    "chain": 117,
    "gemm": 108,
    "families": 100,
    "transformers": 77,
    "training": 47,
    "dtype": 43,
}
SAYS = "any"  # the audit that says itself what it will ask, how far it is and what it finds


@dataclass(frozen=True)
class Audit:
    name: str
    notebook: Path
    title: str
    only_named: bool = False  # not among those that run when none is named


def audits() -> dict[str, Audit]:
    """Returns the audits by name, in reading order: `3_gemm.ipynb` is the audit `gemm`."""
    place = notebooks()
    if not place:
        raise UsageError("the notebooks of bi_kernels are missing; install the package again")
    found = {}
    for path in sorted(place.glob("[0-9]*_*.ipynb"), key=lambda path: int(path.stem.split("_", 1)[0])):
        notebook, name = json.loads(path.read_text(encoding="utf-8")), path.stem.split("_", 1)[1]
        found[name] = Audit(
            name,
            path,
            "".join(notebook["cells"][0]["source"]).splitlines()[0].lstrip("# "),
            notebook["metadata"].get("bi_audit", {}).get("only_named", False),
        )
    return found


def show(_given) -> None:
    """Prints the audits, their notebooks and their parameters."""
    for audit in audits().values():
        print(f"{audit.name:12} {audit.title}")
        print(f"{'':12} notebooks/{audit.notebook.name}; parameters: {', '.join(defaults(audit.name))}")


def longest_first(names: list[str]) -> list[str]:
    """Returns names in the order of SECONDS, the others behind in theirs."""
    return sorted(names, key=lambda name: (*SECONDS, name).index(name))


class Board:
    """Shows a line for each audit: its clock, and how many of its cells or steps are done."""

    def __init__(self, names: Sequence[str], console: Console, plan: str = ""):
        self.console, self.plan = console, plan
        name, word = TextColumn("{task.description:14}"), TextColumn("{task.fields[word]}")
        self.progress = Progress(name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), word, console=console)
        self.tasks = {n: self.progress.add_task(n, start=False, total=None, word="waiting") for n in names}

    def begin(self, name: str) -> None:
        self.progress.reset(self.tasks[name], word="running")  # begun before or not, its clock starts here

    def line(self, name: str, line: str) -> None:
        """Takes a line that the audit's process printed: one of `notebook` or `progress`, or anything."""
        word, _, rest = line.partition(" ")
        if word == "say" or word == "begun" and name != SAYS:
            self.say(self.plan)
            self.plan = ""
            self.say(f"{name}: {rest}" if rest else "")
        counts = word == "asked" or word == "cell" and name != SAYS
        if counts and (found := re.fullmatch(r"(\d+) (\d+)", rest)):
            self.progress.update(self.tasks[name], completed=int(found[1]), total=int(found[2]))

    def say(self, text: str) -> None:
        if text:
            self.console.print(text, highlight=False, markup=False)

    def end(self, name: str, rows: list[dict]) -> float:
        """Says what an audit found; returns how many seconds it took."""
        task, wrong = self.progress.tasks[self.tasks[name]], len(needs_fix(rows))
        word = f"[red]{wrong} to fix[/]" if wrong else "[green]pass[/]"
        self.progress.update(task.id, completed=task.total or 1, total=task.total or 1, word=word)
        self.say(f"{name}: {len(rows)} checks, {wrong} need a fix, after {task.elapsed:.0f} s")
        return task.elapsed


def run(
    names: list[str],
    parameters: dict[str, dict],
    out: Path,
    jobs: int,
    console: Console,
    seconds: dict[str, float],
    limits: tuple[float, float] = (0.0, 0.0),
    plan: str = "",
) -> None:
    """Runs audits in the order named, `jobs` at a time, each in a process of its own. One that found too little memory
    beside others runs again alone.

    parameters: of each audit; seconds: gets how long each took as it finishes, so that a caller that is interrupted
    knows which did; limits: seconds that a cell and an audit may take, 0 for any number; plan: is said once the first
    audit has begun. Raises CannotJudge, and leaves `out` as it was, where every audit refuses its parameters.
    """
    every, board, over = audits(), Board(names, console, plan), threading.Event()
    folder.clear(out)
    running: dict[str, executor.Process] = {}
    refusals: dict[str, str] = {}
    starting = threading.Lock()
    os.environ["BI_AUDIT_JOBS"] = str(jobs)  # on a GPU, whose memory they share, each takes fewer processes

    def one(name: str) -> None:
        audit, built, place = every[name], folder.building(out, name), out / name
        with starting:
            if over.is_set():
                return
            built.mkdir(parents=True)
            given = audit.notebook, audit.title, parameters[name], built, place, limits
            board.begin(name)
            running[name] = executor.begin("bi_kernels.audit.runs.notebook:make", *given)
        error = refused = ""
        try:
            refused = running[name].result(lambda line: board.line(name, line))
        except executor.Died as died:
            if over.is_set():  # it was stopped
                return
            folder.check_room(out)
            error, refused = _ended(died, parameters[name].get("candidate", ""), built, name)
            board.say("" if refused else "\n".join(died.said[-15:]))
        finally:
            running.pop(name)
        if refused:
            refusals[name] = refused
        else:
            finish(name, error)

    def finish(name: str, error: str) -> None:
        """Puts a report in its place, and writes it first where its process did not."""
        built, place = folder.building(out, name), out / name
        if error:
            from bi_kernels.audit.runs import notebook  # noqa: PLC0415 (what it needs takes seconds to load)

            notebook.write(built, place, every[name].title, parameters[name], error)
        folder.place(built, place)
        seconds[name] = board.end(name, read_rows(place))

    with board.progress, ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(one, names))
            for name in [name for name in seconds if jobs > 1 and _ran_short(out / name)]:
                board.say(f"{name}: found too little memory beside others, and runs again alone")
                one(name)
            if names and len(refusals) == len(names):
                board.progress.live.transient = True  # the command is told one sentence
                console.quiet = not console.is_terminal  # where nothing was drawn that must go
                raise CannotJudge(next(iter(refusals.values())))
            for name, why in refusals.items():
                finish(name, why)
        except KeyboardInterrupt:
            with starting:
                over.set()
            for process in [*running.values()]:
                process.stop()
            pool.shutdown(cancel_futures=True)
            for name in names:
                if kept := folder.keep(folder.building(out, name), out / name):
                    board.say(f"{name}: what it had recorded is in {kept}")
            raise
        finally:
            over.set()
            folder.clear(out)


def _ran_short(place: Path) -> bool:
    return any(SHORT in row["detail"] for row in needs_fix(read_rows(place)))


def _ended(died: executor.Died, candidate: str, built: Path, name: str) -> tuple[str, str]:
    """Says how an audit's process ended, and why that is a refusal: where its candidate's import, or its first call in
    the audit `any`, did it."""
    if any(line.startswith("Timeout (") for line in died.said):  # see notebook.limited
        return "a cell took longer than --timeout or --cell-timeout allow, and did not end when interrupted", ""
    begun = (built / "provenance.json").exists()
    if ":" not in candidate or (read_rows(built) if name == SAYS else begun):
        return f"the process ended with status {died.status}", ""
    what = "call on the inputs as given" if begun else "import"
    return "", f"candidate is {candidate!r}, whose {what} ended its process with status {died.status}"
