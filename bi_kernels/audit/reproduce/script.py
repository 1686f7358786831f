"""Writes scripts that show drifts, and runs each in a process of its own before anyone is told of it."""

import os
import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bi_kernels.audit.evidence.kinds import by_kind
from bi_kernels.audit.evidence.verdicts import Row, grouped
from bi_kernels.audit.executor import ForkServer
from bi_kernels.audit.memory import SHORT

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    auto_reload=False,
)
MOST = 6  # scripts of an audit: each is run, which takes a second
NO_SCRIPT = "no script: "  # before the reason, last in a row's detail
LONGEST = 120  # seconds that a script may take
SHOWN = re.compile(r"^(\d+) of (\d+) elements differ, by up to ([^\s,]+)", re.M)
OTHERWISE = re.compile(r"in a fresh process (\d+) of (\d+) elements differ")  # what it showed, not a row's numbers


@dataclass
class Script:
    """A script that is to show one row."""

    path: Path
    row: Row
    texts: Sequence[str]  # it in several ways, the plainest first
    beside: Path | None = None  # the file that it loads, which others may load too
    shown: bool = False
    why: str = ""  # it does not show the row

    def run(self, server: ForkServer) -> None:
        """Finds out in which way it prints the row's own numbers, in a process that knows nothing of this one."""
        for text in self.texts:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text, encoding="utf-8")
            folder = self.path.parent.resolve()
            done = server.run(f"{folder.name}/{self.path.name}", folder.parent, LONGEST)
            found = SHOWN.search(done.printed)
            if found and done.status == 1 and agrees(self.row, *found.groups()):
                self.shown = True
                return
            if found:
                count, of, most = found.groups()
                self.why = f"in a fresh process {count} of {of} elements differ, by up to {most}"
            elif not self.why:
                last = (done.errors.strip().splitlines() or [f"status {done.status}"])[-1][:200]
                late = f"it took over {LONGEST} s"
                self.why = late if done.late else f"it raised, in a fresh process: {last}"

    def verify(self) -> bool:
        """Names it in its row if it shows that, and otherwise says there why not, and leaves no script."""
        if self.shown:
            self.row.repro = shlex.join(["python", named(self.path)])
        else:
            unscripted([self.row], self.why)
            self.path.unlink(missing_ok=True)
        return self.shown


def named(path: Path) -> str:
    """Returns a script's path as its reader types it: from the document that `bi-audit` writes, else from here."""
    document = os.environ.get("BI_AUDIT_OUT")
    if document and path.resolve().is_relative_to(Path(document).resolve()):
        return path.resolve().relative_to(Path(document).resolve()).as_posix()
    return str(path)


def render(**given) -> str:
    """Returns the text of a script."""
    return TEMPLATES.get_template("compare.py.jinja").render(**given)


def agrees(row: Row, count: str, of: str, most: str) -> bool:
    """Tells whether a script printed a row's own numbers."""
    far = float(row.max_abs or 0)
    same = most == f"{far:.3g}" or far == float("inf") and most in ("inf", "nan")
    return (int(count), int(of)) == (row.mismatches, row.elements) and same


def unscripted(rows: Sequence[Row], why: str) -> None:
    """Says in rows why no script shows them."""
    for r in rows:
        r.detail = "; ".join(filter(None, (r.detail, f"{NO_SCRIPT}{why}")))


def in_turn(rows: Sequence[Row]) -> list[Row]:
    """Returns rows such that those of each op and finding come by turns: of the user's own inputs before others, and
    the row of which most differs first."""
    rank = lambda r: (r.inputs not in ("given", "normal"), -(r.mismatches or 0) / (r.elements or 1))
    of_dict = {id(vars(r)): r for r in rows}
    findings = [found for mine in grouped(rows, lambda r: r.op).values() for found in by_kind(mine).values()]
    turns = zip_longest(*(sorted((of_dict[id(said)] for said in found), key=rank) for found in findings))
    return [r for r in chain(*turns) if r is not None]


def verify_scripts(scripts: Sequence[Script], server: ForkServer | None = None) -> list[Path]:
    """Runs scripts until MOST show their rows, a few at a time, and names those that do. Returns their paths."""
    of_row = {id(s.row): s for s in scripts}
    left, tried = [of_row[id(r)] for r in in_turn([s.row for s in scripts])], []
    at_a_time = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
    with nullcontext(server) if server else ForkServer() as run_by, ThreadPoolExecutor(at_a_time) as pool:
        while left and (room := MOST - sum(s.shown for s in tried)) > 0 and len(tried) < 2 * MOST:
            wave, left = left[:room], left[room:]
            [*pool.map(lambda s: s.run(run_by), wave)]
            tried += wave
        for s in tried:
            if not s.shown and SHORT in s.why:  # of memory, beside the others
                s.run(run_by)
    unscripted([s.row for s in left], f"{MOST} of this audit are shown, the most")
    shown = [s for s in tried if s.verify()]
    held = {s.beside for s in shown}
    for path in {s.beside for s in scripts if s.beside} - held:
        path.unlink(missing_ok=True)
    return [s.path for s in shown]
