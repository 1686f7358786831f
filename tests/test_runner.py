"""Audits run one after another, each in a process of its own: how these end, and what a run keeps of them."""

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from bi_kernels.audit import executor
from bi_kernels.audit.executor import Died
from bi_kernels.audit.runs import folder, runner
from bi_kernels.audit.runs.runner import Audit

ROOT = Path(__file__).parents[1]
NAMES = ["dtype", "gemm", "rms_norm"]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Runs NAMES with processes that `begin` makes, one at a time; what happened, in order."""

    def call(begin) -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which xdist's processes ignore
        monkeypatch.setenv("BI_AUDIT_JOBS", "1")
        monkeypatch.setattr(runner.executor, "begin", begin)
        (notebook := tmp_path / "notebook.ipynb").write_text('{"cells": []}')
        monkeypatch.setattr(runner, "audits", lambda: {n: Audit(n, notebook, n, ()) for n in NAMES})
        try:
            runner.run(NAMES, dict.fromkeys(NAMES, {}), tmp_path / "out", 1, Console(quiet=True), {})
        finally:
            signal.signal(signal.SIGINT, before)

    return call


def test_an_interrupt_stops_what_runs_and_begins_nothing(runs, tmp_path):
    said, stopped = [], threading.Event()

    def begin(function, name, *given):
        def result(progress):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert stopped.wait(10)
            raise Died("stub", -signal.SIGKILL, [])

        said.append(name)
        return SimpleNamespace(result=result, stop=stopped.set)

    with pytest.raises(KeyboardInterrupt):
        runs(begin)
    assert said == NAMES[:1] and not list((tmp_path / "out").glob(".*")), "what recorded nothing leaves nothing"


def test_a_report_that_cannot_be_written_loses_no_evidence(tmp_path, monkeypatch):
    """As where nbconvert finds no templates: neither the audit's process nor the one after it ends well."""

    def begin(function, name, *given):
        if function.endswith(":made"):
            (folder.building(tmp_path / "out", name) / "evidence.txt").write_text("kept")
        return SimpleNamespace(result=fails)

    def fails(*_):
        raise Died("documents", 1, ["ValueError: no template"])

    monkeypatch.setattr(runner.executor, "begin", begin)
    (notebook := tmp_path / "notebook.ipynb").write_text('{"cells": []}')
    monkeypatch.setattr(runner, "audits", lambda: {"gemm": Audit("gemm", notebook, "GEMM", ())})
    console = Console(file=io.StringIO(), width=200)
    runner.run(["gemm"], {"gemm": {}}, tmp_path / "out", 1, console, {})
    assert (tmp_path / "out" / "gemm" / "evidence.txt").read_text() == "kept"
    assert "stopped here" in (tmp_path / "out" / "gemm" / "README.md").read_text()
    assert "its report could not be written (documents: ValueError: no template)" in console.file.getvalue()


def test_a_process_that_ends_without_a_reply_says_its_last_line():
    with pytest.raises(Died, match="runner:nothing: AttributeError: .* has no attribute 'nothing'") as died:
        executor.call("bi_kernels.audit.runs.runner:nothing")
    assert died.value.status == 1


def test_a_pool_replaces_a_process_that_died_and_no_other():
    with executor.Pool(1, "builtins:print", "first") as pool:
        first = pool.call("os:getpid")
        assert pool.submit("os:getpid").result() == first != os.getpid()
        with pytest.raises(Died, match="ZeroDivisionError"):
            pool.call("operator:floordiv", 1, 0)
        assert pool.call("os:getpid") not in (first, os.getpid())


def test_a_pool_that_is_interrupted_kills_what_runs_and_begins_nothing():
    with pytest.raises(KeyboardInterrupt), executor.Pool(2) as pool:
        pool.call("os:getpid")
        parts = [pool.submit("time:sleep", 600) for _ in range(4)]
        while not parts[1].running():
            pass
        raise KeyboardInterrupt
    assert [p.cancelled() or p.exception().status for p in parts] == [-signal.SIGKILL] * 2 + [True] * 2


def test_a_process_has_its_own_environment_and_prints_its_progress():
    assert executor.call("os:getenv", "TOLD", environment={"TOLD": "too"}) == "too"
    lines = []
    assert executor.begin("builtins:print", "one").result(lines.append) is None and lines == ["one"]
    with pytest.raises(Died) as late:
        executor.Process().call("time:sleep", 60, seconds=0.2)
    assert late.value.late and late.value.status == -signal.SIGKILL
    assert len(executor.call("builtins:bytes", 10**7)) == 10**7


def test_a_board_shows_what_an_audit_says_and_how_far_it_is(tmp_path):
    said = Console(file=io.StringIO(), width=200)
    board = runner.Board(["any"], tmp_path, said, "1 audit into out")
    for line in ("begun", "cell 3 12", "say f: 16 samples", "asked 7 49", "asked nonsense"):
        board.line("any", line)
    assert said.file.getvalue().splitlines() == ["1 audit into out", "any: f: 16 samples"], "nothing before it is asked"
    (task,) = board.progress.tasks
    assert (task.completed, task.total) == (7, 49)


SHELL = """
from bi_kernels.audit.runs.engine import InProcess, Shell
from types import SimpleNamespace
from nbformat.v4 import new_code_cell, new_notebook
cells = {cells!r}
note = lambda *given: None
notebook = new_notebook(cells=[new_code_cell(c) for c in cells])
InProcess.execute_managed_notebook(
    SimpleNamespace(nb=notebook, cell_start=note, cell_exception=note, cell_complete=note), "python3", started=note
)
shown = lambda o: (o.output_type, sorted(o.get("data", [])) or o.get("text", o.get("evalue")))
print([list(map(shown, cell.outputs)) for cell in notebook.cells])
"""
CELLS = {
    "print(1); import sys; print(2, file=sys.stderr)": [("stream", "1\n")],
    "from IPython.display import Markdown\nMarkdown('x')": [("display_data", ["text/markdown", "text/plain"])],
    "import matplotlib.pyplot as plt\n_ = plt.plot([1])": [("display_data", ["image/png", "text/plain"])],
    "x = 3": [],
    "x / 0": [("error", "division by zero")],
    "print('never')": [],
}


def test_a_notebook_runs_in_one_process_up_to_the_cell_that_raises():
    code = SHELL.format(cells=list(CELLS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{list(CELLS.values())}\n", done.stdout + done.stderr
