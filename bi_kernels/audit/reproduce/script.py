"""Writes scripts that reproduce a drift: an op, its inputs, two calls, a comparison; runs each before it is named."""

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

from bi_kernels.audit.axes import by_kind
from bi_kernels.audit.executor import ForkServer
from bi_kernels.audit.findings import Row, grouped
from bi_kernels.audit.memory import SHORT
from bi_kernels.audit.report import escape

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
OTHERWISE = re.compile(r"in a fresh process (\d+) of (\d+) elements differ ")  # what it showed, not a row's numbers
HELPERS = {  # what scripts import, and from where in the auditor
    "reproduce.replay": "registered training_step trained_outputs in_layout flat",
    "checks.single_call": "again",
    "checks.memory": "run_contiguous run_on_view placed",
    "checks.modes": "in_mode",
    "checks.forward": "first_rows",
    "layouts": "VIEWS",
    "targets.callable_step": "Step",
    "checks.requests": "one_number in_memory strided",
    "targets.any_callable": "CallableTarget module_of",
}
OWN = """torch Path os sys bi_kernels importlib spec replace len float int print range
op target step saved rows whole other bits differ a b gap share far relative"""
OWN = {word for words in (OWN, *HELPERS.values()) for word in words.split()}  # names that a script has already
WORD = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
MEMORIES = ((), (0, 0), (0, 1), (1, 0), (1, 1))  # calls counted before each result: fresh memory differs by turns


@dataclass
class Calls:
    """Python of two results that should have equal bits, and of what both need. subject: the variable that counts
    calls, over which fresh memory holds ones and zeros by turns; none in plain torch."""

    setup: list[str]
    whole: str
    other: str
    subject: str = ""


@dataclass
class Script:
    """A script that is to show one row. texts: ways to write it, the plainest first; data: the file that it loads; why:
    it does not show the row."""

    path: Path
    row: Row
    texts: Sequence[str]
    data: Path | None = None
    shown: bool = False
    why: str = ""

    def run(self, server: ForkServer) -> None:
        """Finds the text that prints the row's own numbers, each in a new process."""
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
        """Names it in its row if it shows that; else says there why not, and leaves no script."""
        if self.shown:
            self.row.repro = shlex.join(["python", named(self.path)])
        else:
            unscripted([self.row], self.why)
            self.path.unlink(missing_ok=True)
        return self.shown


def named(path: Path) -> str:
    """Returns a script's path as its reader types it: from the report that `bi-audit` writes, else from here."""
    report = os.environ.get("BI_AUDIT_OUT")
    if report and path.resolve().is_relative_to(Path(report).resolve()):
        return path.resolve().relative_to(Path(report).resolve()).as_posix()
    return str(path)


def render(title: str, said: str, needs: str, blocks: Sequence[Sequence[str]], interpreted: bool) -> str:
    """Returns the text of a script; blocks: its lines of Python, which end in `whole` and `other`."""
    docstring = lambda text: escape.line(text).replace("\\", "/").replace('"', "'")
    used = {word for block in blocks[1:] for line in block for word in WORD.findall(line.partition("# ")[0])}
    wanted = {home: [name for name in names.split() if name in used] for home, names in HELPERS.items()}
    helpers = [f"from bi_kernels.audit.{home} import {', '.join(names)}" for home, names in wanted.items() if names]
    body = "\n\n".join(["\n".join([*helpers, *blocks[0]]), *("\n".join(block) for block in blocks[1:] if block)])
    return TEMPLATES.get_template("script.py.jinja").render(
        title=docstring(title), said=docstring(said), needs=needs, body=body, interpreted=interpreted
    )


def text(name: str, r: Row, imports: str, calls: Calls, where: object, interpreted: bool, memory=()) -> str:
    """Returns the script of a row; memory: how many calls the subject has counted before each of the two."""
    few = f"{r.rows} {'row' if r.rows == 1 else 'rows'}" if r.layout == "rows" else r.layout
    between = f"between {r.against} and {few}" if r.against not in ("itself", few) else "between two runs"
    where = f"{where}, Triton's interpreter" if interpreted else where
    said = f"In a fresh process ({where}) "
    said += f"{r.mismatches} of {r.elements} elements of {r.tensor} differ, as reported. Inputs: {r.inputs}."
    one, other = ("once", "again") if between == "between two runs" else (r.against, few)
    results = [f"# {one}", f"whole = {calls.whole}", f"# {other}", f"other = {calls.other}"]
    for at, count in zip((1, 4), memory):
        results.insert(
            at, f"{calls.subject}.calls = {count}  # fresh memory holds ones in odd calls, zeros in even ones"
        )
    needs = "bi_kernels[audit]" if calls.subject else "bi_kernels" if interpreted else "torch"
    blocks = [imports.splitlines(), calls.setup, results]
    return render(f"{name}: {r.tensor} differs {between}.", said, needs, blocks, interpreted)


def fn_name(function: str, imports: str) -> tuple[str, str]:
    """Returns the name of a callable in a script and the lines that import it: another one where a script has that."""
    return ("fn", f"{imports}\nfn = {function}") if function in OWN else (function, imports)


def unused(parts: Sequence[str], names: set[str]) -> str:
    """Returns a file name made of words, and adds it to `names`, in which it is not yet."""
    name = "-".join(re.sub(r"[^\w.]+", "-", part).strip("-") for part in parts if part)
    names.add(name := next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(names) + 3))) if n not in names))
    return name


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
    """Returns rows such that those of each op and finding come by turns: the user's own inputs before others, and the
    row of which most differs first."""
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
            if not s.shown and SHORT in s.why:  # of memory, while others ran
                s.run(run_by)
    unscripted([s.row for s in left], f"{MOST} of this audit are shown, the most")
    shown = [s for s in tried if s.verify()]
    for path in {s.data for s in scripts if s.data} - {s.data for s in shown}:
        path.unlink(missing_ok=True)
    return [s.path for s in shown]
