"""Runs an audit's notebook in this process, by IPython's shell, and writes its report from what it left."""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import nbformat
from IPython.core.displayhook import CapturingDisplayHook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from nbformat import NotebookNode, from_dict
from nbformat.v4 import new_code_cell, new_output
from traitlets.config import Config

from bi_kernels.audit.faults import CannotJudge
from bi_kernels.audit.findings import late, needs_fix, read_rows, write_rows
from bi_kernels.audit.index import report
from bi_kernels.audit.runs import folder

SETUP = "setup"  # tag of the cell that begins an audit
OURS = "ours"  # tag of cells that are about this package's kernels, whoever else is judged
GRACE = 10  # seconds that a cell has to end once it took too long


class TookTooLong(KeyboardInterrupt):
    """Raised in a cell at its time limit; no handler of a candidate's errors catches it."""


class Shell(InteractiveShell):
    """IPython's shell, which keeps what a cell raised instead of printing it."""

    raised: NotebookNode | None = None

    def _showtraceback(self, etype, evalue, stb) -> None:
        self.raised = new_output("error", ename=etype.__name__, evalue=str(evalue), traceback=stb)

    def enable_gui(self, gui=None) -> None:
        """Does nothing: figures are part of the notebook."""

    def run(self, source: str) -> list[NotebookNode]:
        """Runs a cell; returns its outputs: what it printed, then what it showed, then what it raised."""
        self.raised, printed, shown = None, StringIO(), CapturingDisplayPublisher()
        self.display_pub, self.display_trap.hook = shown, CapturingDisplayHook(shell=self, outputs=shown.outputs)
        with redirect_stdout(printed), redirect_stderr(StringIO()):  # a report has nothing of stderr
            self.run_cell(source, store_history=True)
        outputs = [new_output("stream", name="stdout", text=printed.getvalue())] * bool(printed.getvalue())
        outputs += [new_output("display_data", data=o["data"], metadata=o["metadata"] or {}) for o in shown.outputs]
        return [*outputs, *[self.raised] * (self.raised is not None)]


def parameterized(path: Path, parameters: dict) -> NotebookNode:
    """Returns a notebook with a cell that sets its parameters, without the cells that are about this package's kernels
    where another candidate is judged."""
    notebook = nbformat.read(path, as_version=4)
    tagged = lambda cell, tag: tag in cell.metadata.get("tags", [])
    if parameters.get("candidate", "bi_kernels") != "bi_kernels":
        notebook.cells = [cell for cell in notebook.cells if not tagged(cell, OURS)]
    at = next(i for i, cell in enumerate(notebook.cells) if tagged(cell, "parameters"))
    told = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    notebook.cells.insert(at + 1, new_code_cell(told, id="injected", metadata={"tags": ["injected-parameters"]}))
    return notebook


@contextlib.contextmanager
def limited(seconds: float, why: str) -> Iterator[None]:
    """Raises TookTooLong after so many seconds, and ends this process later where that does not help; 0: no limit."""

    def late(*_) -> None:
        raise TookTooLong(why)

    if seconds:
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def execute(path: Path, parameters: dict, built: Path, limits: tuple[float, float] = (0, 0)) -> tuple[str, bool]:
    """Runs the cells of a notebook up to the first that raises, and leaves in `built` what it records and the notebook.

    Prints lines for `runner.Board` as it goes. limits: seconds that a cell and the audit may take. Returns what the
    notebook raised, and whether it refused what it was told before anything was judged.
    """
    tell = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")  # the cells' own prints are part of the notebook
    os.environ |= {"BI_AUDIT_OUT": str(built.resolve()), "BI_AUDIT_TELL": str(tell.fileno())}
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (as long as this process)
    shell = Shell.instance(config=Config(HistoryManager={"enabled": False}))
    shell.display_formatter.active_types = shell.display_formatter.format_types  # not text alone, as in a terminal
    notebook, (of_cell, of_audit), began = parameterized(path, parameters), limits, time.monotonic()
    for index, cell in enumerate(notebook.cells):
        tell.write(f"cell {index} {len(notebook.cells)}\n")
        if cell.cell_type == "code":
            left = of_audit and max(of_audit - (time.monotonic() - began), 0.01)
            whole = left and not (of_cell and of_cell < left)
            why = f"the audit took longer than the {of_audit:g} s of --timeout"
            why = why if whole else f"a cell took longer than the {of_cell:g} s of --cell-timeout"
            with limited(left if whole else of_cell, why):
                cell.outputs = shell.run(cell.source)
            cell.execution_count = index + 1
        nbformat.write(notebook, built / report.NOTEBOOK)  # kept where the process ends
        setup = SETUP in cell.metadata.get("tags", [])
        if cell.cell_type == "code" and (failed := shell.raised):
            refused = failed.ename == CannotJudge.__name__ or failed.ename == "ValueError" and setup
            late = failed.ename == TookTooLong.__name__
            return (failed.evalue if refused or late else f"{failed.ename}: {failed.evalue}"), refused
        if setup:
            tell.write("begun\n")
    return "", False


def clean(notebook: NotebookNode) -> None:
    """Drops paths of this machine from the outputs."""
    roots = {str(Path.cwd()), str(Path.home()), sys.prefix, str(Path(__file__).parents[3])}
    for cell in notebook.cells:
        text = json.dumps(cell.get("outputs", []))
        for root in sorted(roots, key=len, reverse=True):
            text = text.replace(json.dumps(root)[1:-1], "…")
        if "outputs" in cell:
            cell.outputs = [from_dict(o) for o in json.loads(text)]


def write(built: Path, place: Path, title: str, parameters: dict, error: str = "") -> None:
    """Writes the report of what a notebook left in `built`, as far as it came; it will stand in `place`.

    error: what ended it; in its last cell, which asserts what the verdict says, that is no news.
    """
    body, whole, rows, file = f"# {title}", not error, read_rows(built), built / report.NOTEBOOK
    if file.exists():
        notebook = nbformat.read(file, as_version=4)
        clean(notebook)
        nbformat.write(notebook, file)
        whole = whole or report.raised(notebook.cells[-1]) and bool(needs_fix(rows) or late(rows))
        try:
            body, figures = report.markdown(notebook, place.name)
        except Exception as why:  # what was recorded is worth more than how it looks
            body, figures = report.plain(title, rows, why), {}
        for name, data in figures.items():
            (built / name).write_bytes(data)
    if not whole:
        folder.check_room(built)
        first = (error.strip().splitlines() or [error])[0]
        rows.append(folder.stopped(place.name, f"{report.STOPPED}{first}", parameters.get("candidate", "")))
    write_rows(built / "verdicts.json", rows)
    (built / report.PAGE).write_text(report.page(body, built, rows, place), encoding="utf-8")


def make(path: Path, title: str, parameters: dict, built: Path, place: Path, limits: tuple[float, float]) -> str:
    """Runs a notebook and writes its report. Returns why it refused its parameters, '' where it did not."""
    error, refused = execute(path, parameters, built, limits)
    if not refused:
        write(built, place, title, parameters, error)
    return error * refused
