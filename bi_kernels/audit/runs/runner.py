"""Runs audits, each in a process of its own, and puts the report that it leaves in its place."""

import ast
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn

from bi_kernels.audit import executor
from bi_kernels.audit.faults import CannotJudge, UsageError
from bi_kernels.audit.findings import NEEDS_FIX, Row, needs_fix, read_rows, write_rows
from bi_kernels.audit.index import report
from bi_kernels.audit.runs import folder, notebooks

# Seconds that each takes on the interpreter, beside one other on two cores. Those that take longest start first where
# nobody says in which order: two processes end sooner so.
SECONDS = {
    "attention": 580,
    "random": 320,
    "vocabulary": 260,
    "backward": 185,
    "chain": 155,
    "elementwise": 115,
    "transformers": 115,
    "rms_norm": 95,
    "training": 80,
    "gemm": 65,
    "dtype": 30,
}
SAYS = "any"  # the audit that says itself what it will ask, how far it is and what it finds
LOOK, COUNTED = 0.2, 10  # seconds between two looks at the clock; looks between two at what has been recorded
GRACE = 10  # seconds that an interrupted notebook has to end


@dataclass(frozen=True)
class Audit:
    name: str
    notebook: Path
    title: str
    parameters: tuple[str, ...]  # of the notebook
    only_named: bool = False  # not among those that run when none is named


def audits() -> dict[str, Audit]:
    """Returns the audits by name, in reading order: `3_gemm.ipynb` is the audit `gemm`."""
    place = notebooks.folder()
    if not place:
        raise UsageError("the notebooks of bi_kernels are missing; install the package again")
    found = {}
    for path in sorted(place.glob("[0-9]*_*.ipynb"), key=lambda path: int(path.stem.split("_", 1)[0])):
        notebook, name = json.loads(path.read_text(encoding="utf-8")), path.stem.split("_", 1)[1]
        text = lambda cell: "".join(cell["source"])
        told = next(text(c) for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", []))
        found[name] = Audit(
            name,
            path,
            text(notebook["cells"][0]).splitlines()[0].lstrip("# "),
            tuple(line.target.id for line in ast.parse(told).body),
            notebook["metadata"].get("bi_audit", {}).get("only_named", False),
        )
    return found


def show(_given) -> None:
    """Prints the audits, their notebooks and their parameters."""
    for audit in audits().values():
        print(f"{audit.name:12} {audit.title}")
        print(f"{'':12} notebooks/{audit.notebook.name}; parameters: {', '.join(audit.parameters)}")


def longest_first(names: list[str]) -> list[str]:
    """Returns names in the order of SECONDS, the others behind in theirs."""
    return sorted(names, key=lambda name: (*SECONDS, name).index(name))


def estimate(names: list[str], out: Path, jobs: int, interpreted: bool) -> str:
    """Says how long audits take: as they did here the last time, else, on the interpreter, as SECONDS has it."""
    known = {name: folder.finished(out / name).get("seconds") for name in names}
    usual = {name: SECONDS.get(name) if interpreted else None for name in names}
    each = [known[name] or usual[name] for name in names]
    if None in each:
        return "their first run here, so no estimate"
    free = [0.0] * jobs
    for seconds in each:
        free[free.index(min(free))] += seconds
    whose = "as they did here before" if all(known.values()) else "as on two cores"
    return f"about {max(free) / 60:.0f} minutes, {whose}" if max(free) >= 90 else f"about {max(free):.0f} s, {whose}"


def stopped(audit: str, why: str, candidate: str = "") -> dict:
    """Returns the row of an audit that did not run to its end; it names neither an op nor a relation."""
    return Row(audit, "", "", candidate, "", "", "", "", "", "", 0, NEEDS_FIX, detail=why).json()


def publish(
    audit: Audit, parameters: dict, out: Path, body: str, error: str = "", finished: bool = False, seconds: float = 0.0
) -> bool:
    """Moves the document that was built into its place; returns whether the audit passed.

    error: what the notebook raised; finished: in its last cell, which asserts what the verdict says.
    """
    built = folder.building(out, audit.name)
    rows = read_rows(built)
    error = (error.strip().splitlines() or [error])[0]
    whole = not error or finished and bool(needs_fix(rows))
    if not whole:
        rows.append(stopped(audit.name, f"{report.STOPPED}{error}", parameters.get("candidate", "")))
    write_rows(built / "verdicts.json", rows)
    (built / report.PAGE).write_text(report.page(body, built, rows, out / audit.name), encoding="utf-8")
    folder.place(built, out / audit.name, folder.fingerprint(audit.notebook, parameters) if whole else "", seconds)
    return not error and not needs_fix(rows)


class Board:
    """Shows a line an audit: its clock, the cells that it has run and the verdicts that it has recorded."""

    def __init__(
        self, names: list[str], out: Path, console: Console, plan: str = "", limits: tuple[float, float] = (0.0, 0.0)
    ):
        self.out, self.console, self.plan, self.limits = out, console, plan, limits
        self.late: dict[str, str] = {}  # which limit an audit exceeded
        self.cell: dict[str, float] = {}  # when its cell began
        self.counted: dict[str, int] = {}
        name, word = TextColumn("{task.description:14}"), TextColumn("{task.fields[word]}")
        self.progress = Progress(name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), word, console=console)
        self.tasks = {n: self.progress.add_task(n, start=False, total=None, word="waiting") for n in names}

    def task(self, name: str) -> Task:
        return self.progress.tasks[self.tasks[name]]

    def begin(self, name: str) -> None:
        self.progress.start_task(self.tasks[name])
        self.progress.update(self.tasks[name], word="starting")
        self.cell[name] = 0.0

    def line(self, name: str, line: str) -> None:
        """Takes a line that the audit's process printed: one of `documents` or `progress`, or anything."""
        word, _, rest = line.partition(" ")
        if word == "cell":
            self.cell[name] = self.task(name).elapsed or 0.0
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

    def hide(self) -> None:
        """Leaves no line of the board: a command that is refused is told one sentence."""
        self.progress.live.transient = True
        self.console.quiet = not self.console.is_terminal  # where nothing was drawn that must go

    def count(self, name: str) -> None:
        """Reads what an audit has recorded so far; its first verdicts are worth a line of their own."""
        rows = read_rows(folder.building(self.out, name))
        wrong = len(needs_fix(rows))
        said = f"{len(rows)} check{'s' * (len(rows) != 1)}, {wrong} need{'s' * (wrong == 1)} a fix"
        if rows and name not in self.counted and name != SAYS:
            self.say(f"{name}: {said} after {self.task(name).elapsed:.0f} s")
        if len(rows) > self.counted.get(name, 0):
            self.counted[name] = len(rows)
            self.progress.update(self.tasks[name], word=said)

    def watch(self, running: dict[str, executor.Process], over: threading.Event) -> None:
        """Counts what is recorded; interrupts an audit that exceeds a limit, and ends it if that does not help."""
        ticks = 0
        while not over.wait(LOOK):
            ticks += 1
            for name, process in [*running.items()]:
                elapsed, (cell, audit) = self.task(name).elapsed or 0.0, self.limits
                if ticks % COUNTED == 0:
                    self.count(name)
                if name not in self.late:
                    if audit and elapsed > audit:
                        self.late[name] = f"the audit took longer than the {audit:g} s of --timeout"
                    elif cell and elapsed - self.cell[name] > cell:
                        self.late[name] = f"a cell took longer than the {cell:g} s of --cell-timeout"
                    else:
                        continue
                    self.cell[name] = elapsed
                    process.interrupt()
                elif elapsed - self.cell[name] > GRACE:
                    process.stop()

    def short(self, name: str, beside: int) -> None:
        """Says of how many checks nothing is known, for the memory that others took: that is no drift."""
        rows = read_rows(self.out / name)
        if beside and (count := sum("OutOfMemoryError" in (row.get("detail") or "") for row in rows)):
            self.say(
                f"{name}: {count} check{'s' * (count != 1)} ran out of memory beside other audits; "
                "run it again with fewer --jobs"
            )

    def end(self, name: str, passed: bool) -> float:
        """Returns how many seconds the audit took."""
        total = self.task(name).total or 1
        word = "[green]pass[/]" if passed else "[red]needs-fix[/]"
        self.progress.update(self.tasks[name], completed=total, total=total, word=word)
        return self.task(name).elapsed


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
    """Runs audits in the order named, `jobs` at a time, each in a process of its own.

    parameters: of each audit; seconds: gets how long each took as it finishes, so that a caller that is interrupted
    knows which did; limits: seconds that a cell and an audit may take, 0 for any number; plan: is said once the first
    audit has begun. Raises CannotJudge, and leaves `out` as it was, where the only audit refuses its parameters.
    """
    every, board, over = audits(), Board(names, out, console, plan, limits), threading.Event()
    folder.clear(out)
    running: dict[str, executor.Process] = {}
    starting = threading.Lock()
    os.environ["BI_AUDIT_JOBS"] = str(jobs)  # on a GPU, whose memory they share, each takes fewer processes

    def one(name: str) -> None:
        audit, built = every[name], folder.building(out, name)
        with starting:
            if over.is_set():
                return
            built.mkdir(parents=True)
            given = name, audit.notebook, audit.title, parameters[name], built
            board.begin(name)
            running[name] = executor.begin("bi_kernels.audit.runs.documents:made", *given)
        refused = ""
        try:
            body, error, finished, refused = running[name].result(lambda line: board.line(name, line))
        except executor.Died as died:
            if over.is_set():  # it was stopped
                return
            folder.check_room(out)
            error = board.late.get(name) or f"the process ended with status {died.status}"
            spec = parameters[name].get("candidate", "")
            begun = (built / "provenance.json").exists()
            if ":" in spec and name not in board.late and not (read_rows(built) if name == "any" else begun):
                what = "call on the inputs as given" if begun else "import"
                refused = f"candidate is {spec!r}, whose {what} ended its process with status {died.status}"
            elif name not in board.late:
                board.say("\n".join(died.said[-15:]))
            try:
                body, finished = executor.call("bi_kernels.audit.runs.documents:written", name, built, audit.title)
            except executor.Died as why:  # what was recorded is worth more than how it looks
                board.say(f"{name}: its report could not be written ({why})")
                body, finished = f"# {audit.title}", False
        finally:
            running.pop(name)
        error = board.late.get(name) or error
        if refused and len(names) == 1:
            board.hide()
            raise CannotJudge(refused)
        board.count(name)
        if error:
            folder.check_room(out)
        passed = publish(audit, parameters[name], out, body, error, finished, board.task(name).elapsed)
        board.short(name, min(jobs, len(names)) - 1)
        seconds[name] = board.end(name, passed)

    with board.progress, ThreadPoolExecutor(jobs) as pool:
        threading.Thread(target=board.watch, args=(running, over), daemon=True).start()
        try:
            list(pool.map(one, names))
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
