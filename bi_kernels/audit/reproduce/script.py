"""Writes scripts that show drifts, and runs each in a process of its own before anyone is told of it."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bi_kernels import checks
from bi_kernels.audit.evidence.verdicts import Row, grouped
from bi_kernels.audit.memory import SHORT

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    auto_reload=False,
)
MOST = 6  # scripts of an audit: each is run, which takes seconds
ROWS = 64  # that a script shows
NO_SCRIPT = "no script: "  # before the reason, last in a row's detail
LONGEST = 120  # seconds that a script may take
SHOWN = re.compile(r"^(\d+) of (\d+) elements differ; max abs (\S+)", re.M)
OTHERWISE = re.compile(r"in a fresh process (\d+) of (\d+) elements differ")  # what it showed, not a row's numbers
PARITIES = ("00", "10", "01", "11")  # what fresh memory may hold in the first call of both layouts


@dataclass
class Script:
    """A script of one op and relation, and the rows that it is to show."""

    path: Path
    title: str
    imports: str  # the lines that make `fn`
    made: str  # what is replayed
    device: str
    rows: list[tuple[tuple[str, str, str, str], Row]]  # (two layouts, inputs, tensor) of each
    beside: Sequence[Path] = ()  # what it loads
    words: dict[int, list[str]] = field(default_factory=dict)  # of each row that it showed
    others: dict[int, str] = field(default_factory=dict)  # what it showed instead of a row's numbers
    why: str = ""  # it did not run to its end

    def text(self, default: list[str], said: str) -> str:
        return TEMPLATES.get_template("compare.py.jinja").render(
            title=" ".join(self.title.split()),
            said=said,
            interpreted=checks.INTERPRETED,
            imports=self.imports.removeprefix("import sys\n\n"),
            made=self.made,
            default=default,
        )

    def write(self, default: list[str], said: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.text(default, said), encoding="utf-8")

    def run(self) -> None:
        """Finds out which rows it shows, in a process that knows nothing of this one."""
        self.write([*self.rows[0][0], PARITIES[0]], "Not run yet.")
        asked = [(i, [*words, PARITIES[0]]) for i, (words, _) in enumerate(self.rows)]
        self._shown(asked)
        left = [i for i in range(len(self.rows)) if i not in self.words]
        if left and not self.why:  # perhaps what fresh memory held
            self._shown([(i, [*self.rows[i][0], memory]) for i in left for memory in PARITIES[1:]])

    def _shown(self, asked: list[tuple[int, list[str]]]) -> None:
        """Runs it on what is asked, and keeps the words that show a row's own numbers."""
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("BI_AUDIT")}
        command = [sys.executable, f"{self.path.parent.name}/{self.path.name}", *(w for _, ws in asked for w in ws)]
        where = self.path.parent.resolve().parent
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=where, env=environment, timeout=LONGEST, check=False
            )
            printed, failed = done.stdout, done.returncode not in (0, 1) or done.stderr
            said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:200]
        except subprocess.TimeoutExpired as late:
            printed, failed, said = (late.stdout or b"").decode(), True, f"took over {LONGEST} s"
        found = SHOWN.findall(printed)
        for (i, words), (count, of, most) in zip(asked, found):
            if i not in self.words and agrees(self.rows[i][1], int(count), int(of), float(most)):
                self.words[i] = words
        if failed and len(found) < len(asked):
            self.why = f"it raised, in a fresh process: {said}" if "took" not in said else f"it {said}"
        for (i, _), (n, of, most) in zip(asked, found):
            self.others.setdefault(i, f"in a fresh process {n} of {of} elements differ, by up to {most}")

    def settle(self) -> bool:
        """Names it in the rows that it showed, and says in the others why not; leaves no script that shows none."""
        for i, (_, row) in enumerate(self.rows):
            if i in self.words:
                first = i == min(self.words)
                row.repro = shlex.join(["python", self.name, *([] if first else self.words[i])])
            else:
                unscripted([row], self.others.get(i, self.why))
        if not self.words:
            for path in (self.path, *self.beside):
                path.unlink(missing_ok=True)
            return False
        i = min(self.words)
        r = self.rows[i][1]
        more = f"; {len(self.words) - 1} more rows of the report, by the words in their commands" * (
            len(self.words) > 1
        )
        where = f"{self.device}, Triton's interpreter as bi_kernels mends it" if checks.INTERPRETED else self.device
        said = f"Run in a fresh process ({where}): {r.mismatches} of {r.elements} elements differ, as reported{more}."
        self.write(self.words[i], said)
        return True

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"


def agrees(row: Row, count: int, of: int, most: float) -> bool:
    """Tells whether a script printed a row's own numbers."""
    return (count, of, most) == (row.mismatches, row.elements, float(f"{float(row.max_abs or 0):.9g}"))


def unscripted(rows: Sequence[Row], why: str) -> None:
    """Says in rows why no script shows them."""
    for r in rows:
        r.detail = "; ".join(filter(None, (r.detail, f"{NO_SCRIPT}{why}")))


def settle(scripts: Sequence[Script]) -> list[Path]:
    """Runs the scripts, a few at a time, and names those that reproduce. Returns their paths, in the order given."""
    first = [
        group[0] for group in grouped(scripts, lambda s: s.rows[0][1].op + s.path.stem.rpartition("-")[2]).values()
    ]
    order = sorted(scripts, key=lambda s: not any(s is f for f in first))
    for s in order:
        unscripted([r for _, r in s.rows[ROWS:]], f"one shows {ROWS} rows at most")
        del s.rows[ROWS:]
    for s in order[MOST:]:
        unscripted([r for _, r in s.rows], f"{MOST} of this audit were run, the most")
        for path in s.beside:
            path.unlink(missing_ok=True)
    with ThreadPoolExecutor(max(1, min(4, len(os.sched_getaffinity(0)) // 2))) as pool:
        [*pool.map(Script.run, order[:MOST])]
    for s in order[:MOST]:
        if SHORT in s.why:  # of memory, beside the others
            s.why = ""
            s.run()
    shown = [s for s in order[:MOST] if s.settle()]
    return [s.path for s in scripts if any(s is x for x in shown)]
