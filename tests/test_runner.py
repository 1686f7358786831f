"""Audits run in the order named; the next one loads while another runs, and begins only at its turn."""

import io
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from bi_kernels.audit import worker
from bi_kernels.audit.runs import folder, runner
from bi_kernels.audit.runs.runner import Audit
from bi_kernels.audit.worker import Died, Worker, closed_gate, wait_at

ROOT = Path(__file__).parents[1]
NAMES = ["dtype", "gemm", "rms_norm"]


def test_a_gate_holds_up_until_it_is_closed_or_gone():
    gate, passed = closed_gate(), threading.Event()
    waiting = threading.Thread(target=lambda: (wait_at(gate.name), passed.set()), daemon=True)
    waiting.start()
    assert not passed.wait(0.3)
    gate.close()
    assert passed.wait(10)
    wait_at(gate.name)  # whose file is gone


class Stub:
    """A worker that notes when it was loaded, passed its gate, ended and was stopped."""

    def __init__(self, said: list, fails: str = ""):
        self.said, self.fails = said, fails

    def __call__(self, function, name, *given):
        stub = Stub(self.said, self.fails)
        stub.name, stub.began = name, threading.Event()
        self.said.append(f"load {name}")
        threading.Thread(target=stub.begin, args=(given[-1],), daemon=True).start()
        return stub

    def begin(self, gate):
        wait_at(gate)
        if f"stop {self.name}" not in self.said:  # else its process is no more
            self.said.append(f"begin {self.name}")
            self.began.set()

    def result(self, progress):
        assert self.began.wait(10)
        following = NAMES[NAMES.index(self.name) + 1 :][:1]
        self.wait_for(*(f"load {name}" for name in following))
        time.sleep(0.2)  # in which nobody else may begin
        if self.name == self.fails:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            self.wait_for(f"stop {self.name}")
            raise Died("stub", -signal.SIGTERM, [])
        self.said.append(f"end {self.name}")
        return f"# {self.name}", "", False, ""

    def wait_for(self, *words):
        deadline = time.monotonic() + 10
        while not {*words} <= {*self.said} and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self):
        self.said.append(f"stop {self.name}")


@pytest.fixture
def stubbed(tmp_path, monkeypatch):
    """Runs NAMES with stubs for workers, one at a time: what happened, in order."""

    def call(fails: str = "") -> list[str]:
        said: list[str] = []
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which xdist's processes ignore
        monkeypatch.setenv("BI_AUDIT_JOBS", "1")
        monkeypatch.setattr(runner, "Worker", Stub(said, fails))
        (notebook := tmp_path / "notebook.ipynb").write_text('{"cells": []}')
        monkeypatch.setattr(runner, "audits", lambda: {n: Audit(n, notebook, n, ()) for n in NAMES})
        try:
            runner.run(NAMES, dict.fromkeys(NAMES, {}), tmp_path / "out", 1, Console(quiet=True), {})
        except KeyboardInterrupt:
            said.append("interrupted")
        finally:
            signal.signal(signal.SIGINT, before)
        return said

    return call


def test_the_next_audit_loads_while_one_runs(stubbed):
    said = stubbed()
    assert [word for word in said if not word.startswith("load")] == [
        f"{what} {name}" for name in NAMES for what in ("begin", "end")
    ]
    for name, following in zip(NAMES, NAMES[1:]):
        assert said.index(f"load {following}") < said.index(f"end {name}"), said


def test_a_report_that_cannot_be_written_loses_no_evidence(tmp_path, monkeypatch):
    """As where nbconvert finds no templates: neither the audit's process nor the one after it ends well."""

    class Fails:
        def __init__(self, function, name, *given):
            if function.endswith(":made"):
                (folder.building(tmp_path / "out", name) / "evidence.txt").write_text("kept")

        def result(self, progress=None):
            raise Died("documents", 1, ["ValueError: no template"])

    monkeypatch.setattr(runner, "Worker", Fails)
    (notebook := tmp_path / "notebook.ipynb").write_text('{"cells": []}')
    monkeypatch.setattr(runner, "audits", lambda: {"gemm": Audit("gemm", notebook, "GEMM", ())})
    console = Console(file=io.StringIO(), width=200)
    runner.run(["gemm"], {"gemm": {}}, tmp_path / "out", 1, console, {})
    assert (tmp_path / "out" / "gemm" / "evidence.txt").read_text() == "kept"
    assert "stopped here" in (tmp_path / "out" / "gemm" / "README.md").read_text()
    assert "its report could not be written (documents: ValueError: no template)" in console.file.getvalue()


def test_an_interrupt_stops_what_is_loaded_and_begins_nothing(stubbed, tmp_path):
    said = stubbed(fails="dtype")
    assert said[-1] == "interrupted" and {"stop dtype", "stop gemm"} <= set(said), said
    assert "begin gemm" not in said and "load rms_norm" not in said, said
    assert not list((tmp_path / "out").glob(".*")), "a document that never began leaves nothing"


def test_a_worker_that_ends_without_a_reply_says_its_last_line():
    with pytest.raises(Died, match="runner:nothing: AttributeError: .* has no attribute 'nothing'") as died:
        Worker("bi_kernels.audit.runs.runner:nothing").result()
    assert died.value.status == 1


def test_a_board_shows_what_an_audit_says_and_how_far_it_is(tmp_path):
    said = Console(file=io.StringIO(), width=200)
    board = runner.Board(["any"], tmp_path, said, "1 audit into out")
    for line in ("begun", "cell 3 12", "say f: 16 samples", "asked 7 49", "asked nonsense", "late a limit"):
        board.line("any", line)
    assert said.file.getvalue().splitlines() == ["1 audit into out", "any: f: 16 samples"], "nothing before it is asked"
    (task,) = board.progress.tasks
    assert (task.completed, task.total, board.late) == (7, 49, {"any": "a limit"})


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


def test_a_worker_that_was_started_ahead_runs_as_any_other(monkeypatch):
    worker.warm()
    (ahead,) = worker._warm
    monkeypatch.setenv("SET_SINCE", "yes")
    made = Worker("os:getenv", "SET_SINCE")
    assert made.process is ahead and made.result() == "yes" and not worker._warm
    assert worker.call("os:getenv", "TOLD", environment={"TOLD": "too"}) == "too"
