"""Runs of audits under bad weather: locked folders, foreign files, crashes, time limits, full disks, and what is not
made again."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
import torch
from conftest import ROW
from nbformat.v4 import new_code_cell, new_notebook
from rich.console import Console
from test_cli import by_itself

from bi_kernels.audit import executor, parameters
from bi_kernels.audit.executor import Died
from bi_kernels.audit.findings import PACKED
from bi_kernels.audit.parameters import accepted
from bi_kernels.audit.report.provenance import provenance
from bi_kernels.audit.runs import folder, runner
from bi_kernels.audit.runs.command import warn
from bi_kernels.audit.runs.runner import Audit

ROOT = Path(__file__).parents[1]
SCALE = "def scale(x, factor):\n    return x * factor\n"
ARGUMENTS = ["run", "dtype", "--candidate", "mine.py:scale", "--dtype", "bf16", "--out", "out"]


def started(*arguments: str, cwd: Path, **how) -> subprocess.Popen:
    command = [sys.executable, "-m", "bi_kernels.audit.cli", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes, **how)


def document(place: Path, name: str = "gemm") -> Path:
    (place / name).mkdir(parents=True)
    (place / name / "verdicts.json").write_text(json.dumps([replace(ROW, audit=name).json()]))
    (place / name / "README.md").write_text("# a document")
    return place / name


# What stands where a run would write


BROKEN = {
    "cut short": '[{"audit": "ge',
    "other JSON": '{"a": 1}',
    "rows of something else": '[{"audit": "gemm"}]',
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("command", [["run", "dtype", "--out", "out", "--junit", "j.xml"], ["report", "out"]], ids=len)
def test_a_file_that_no_audit_wrote_is_one_sentence_and_no_verdict(command, text, tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    document(tmp_path / "out")
    file = tmp_path / "out" / "gemm" / "verdicts.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    done = bi_audit(*command)
    assert done.returncode == 2 and len(done.err.splitlines()) == 1, done
    assert "out/gemm/verdicts.json" in done.err and "expected the verdicts of an audit" in done.err
    if command[0] == "run":
        assert ET.parse("j.xml").find(".//error").get("message") in done.err


@pytest.mark.parametrize("file", ["provenance.json", "mutants.json"])
@pytest.mark.parametrize("command", ["report", "run dtype --out audits", "run dtype --publish"])
def test_a_broken_record_beside_good_verdicts_is_one_sentence_before_anything_runs(
    command, file, tmp_path, monkeypatch, bi_audit
):
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr(runner, "run", lambda *given: ran.append(given))
    (document(tmp_path / "audits") / file).write_text("{")
    done = bi_audit(*command.split())
    assert done.returncode == 2 and f"gemm/{file} is not what an audit wrote" in done.err, done
    assert len(done.err.splitlines()) == 1 and not ran


@pytest.mark.parametrize("name", ["README.md", "dtype/notes.txt", "dtype"])
def test_what_is_somebody_elses_stays(name, tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("theirs")
    done = bi_audit("run", "dtype", "--out", ".")
    assert done.returncode == 2 and "name another" in done.err and not [*tmp_path.rglob("*verdicts*")], done
    assert name != "README.md" or bi_audit("report", ".").returncode == 2
    assert theirs.read_text() == "theirs"


def test_a_folder_is_one_runs_at_a_time(tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr(runner, "run", lambda names, *_: ran.append(bi_audit("run", "dtype", "--out", "out")))
    bi_audit("run", "dtype", "--out", "out")
    (inner,) = ran
    assert inner.returncode == 2 and "--out is 'out', which another bi-audit is writing" in inner.err


def test_without_notebooks_is_one_sentence(tmp_path, monkeypatch, bi_audit):
    monkeypatch.setattr(parameters, "NOTEBOOKS", [tmp_path / "nowhere"])
    done = bi_audit("list")
    assert done.returncode == 2 and "notebooks of bi_kernels are missing" in done.err, done


# What a command is given


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["gemm", "-p", "candidate", "torch", "--candidate", "mine.py:f"], ["candidate is given twice", "mine.py:f"]),
        (["gemm", "-p", "seed", "1", "-p", "seed", "2"], ["seed is given twice"]),
        (["gemm", "--seed", str(2**70)], ["seed", "expected"]),
        (["dtype", "--candidate", "exits.py:scale"], ["exits.py:scale", "status 3"]),
        pytest.param(
            ["dtype", "--candidate", "crashes.py:scale"], ["crashes.py:scale", "status -11"], marks=pytest.mark.slow
        ),
        (["any", "--candidate", "mine.py:scale", "--inputs", "x:bf16[999999999,999999999,9]"], ["inputs", "x:bf16["]),
        (["any", "--candidate", "mine.py:scale", "--inputs", "x:int8[4]<999"], ["inputs", "x:int8[4]<999"]),
        (["any", "--quick"], ["any", "'checks'"]),
        (["gemm", "--publish", "--out", "x"], ["--publish", "--out"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_what_is_wrong_is_one_sentence_and_in_the_junit_file(arguments, words, tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCALE)
    (tmp_path / "exits.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "crashes.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    done = bi_audit("run", *arguments, "--junit", "j.xml")
    assert done.returncode == 2 and not done.out and len(done.err.splitlines()) == 1, done
    assert all(word in done.err for word in words), done.err
    assert ET.parse("j.xml").find(".//error").get("message") in done.err


def test_a_warning_is_one_annotation_whatever_it_says(monkeypatch, capsys):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    warn("50 %\n::error::no")
    assert capsys.readouterr().out == "::warning title=bi-audit::50 %25%0A::error::no\n"


# How a run ends


WAITS = "import time\n\n\ndef scale(x, factor):\n    time.sleep(600)\n"


def test_a_killed_run_leaves_no_process_and_the_next_one_its_place(tmp_path):
    (tmp_path / "mine.py").write_text(WAITS)
    child = started(*ARGUMENTS, cwd=tmp_path)
    record = tmp_path / "out" / f".dtype.{child.pid}.partial" / "provenance.json"
    while not record.exists():
        time.sleep(0.1)
        assert child.poll() is None, child.communicate()
    mine = psutil.Process(child.pid).children(recursive=True)
    assert mine, "the document's process"
    child.kill()
    child.wait()
    alive = psutil.wait_procs(mine, timeout=30)[1]
    assert not alive, [p.cmdline() for p in alive]
    folder.clear(tmp_path / "out")  # as the next run does
    with folder.locked(tmp_path / "out"):
        assert [p.name for p in (tmp_path / "out").iterdir()] == [".lock"]


# The limit of the run, brought forward once the candidate runs; without one it would wait.
LATE = """import signal
import time


def scale(x, factor):
    if 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(600)
"""


@pytest.mark.parametrize("option", ["--timeout", pytest.param("--cell-timeout", marks=pytest.mark.slow)])
def test_an_audit_that_takes_too_long_keeps_what_it_had(option, tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LATE)
    done = bi_audit(*ARGUMENTS, option, "500", "--junit", "j.xml")
    assert done.returncode == 1 and "Traceback" not in done.err, done
    assert f"than the 500 s of {option}" in done.out
    assert (tmp_path / "out" / "dtype" / "provenance.json").exists()
    assert option in ET.parse(tmp_path / "j.xml").find(".//error").get("message")


def test_a_full_disk_is_one_sentence_and_no_verdict(tmp_path):
    (tmp_path / "mine.py").write_text(SCALE)
    before = document(tmp_path / "out", "dtype").joinpath("README.md").read_text()

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    child = started(*ARGUMENTS, cwd=tmp_path, preexec_fn=small)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 2 and "Traceback" not in errors and "File too large" in errors, errors
    assert (tmp_path / "out" / "dtype" / "README.md").read_text() == before


# What is not made again


def test_a_finished_audit_of_the_same_kernels_versions_and_parameters_stands(tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    ran, mine = [], document(tmp_path / "out", "dtype")
    monkeypatch.setattr(runner, "run", lambda names, *_: ran.append(list(names)))
    every = accepted("dtype", {})
    made = provenance(torch.device("cpu"), every)
    for changed in ({}, {"kernels": "0"}, {"torch": "0"}, {"parameters": ""}):
        (mine / "provenance.json").write_text(json.dumps(made | changed))
        bi_audit("run", "dtype", "--out", "out", "--resume")
    assert ran == [[], ["dtype"], ["dtype"], ["dtype"]]
    (mine / "provenance.json").write_text(json.dumps(made))
    (mine / "verdicts.json").write_text(json.dumps([folder.stopped("dtype", "it died")]))
    assert not folder.stands(mine, every)


# Where documents go


def test_a_run_leaves_a_clone_clean_and_publishes_when_told(tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    git = lambda *arguments: subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout
    git("init", "-q")
    (tmp_path / "audits").mkdir()
    index = tmp_path / "audits" / "README.md"
    monkeypatch.setattr(runner, "run", lambda names, parameters, out, *_: document(out, names[0]))
    bi_audit("run", "gemm")
    assert (tmp_path / "runs" / "interpreter-tiny" / "gemm").is_dir() and git("status", "--porcelain") == ""
    bi_audit("run", "gemm", "--publish", "--dtype", "bf16")
    assert (tmp_path / "audits" / "interpreter-tiny-bf16" / "gemm").is_dir() and not index.exists()
    bi_audit("run", "gemm", "--publish")
    assert "interpreter-tiny/gemm" in index.read_text()
    names = {path.name for path in (tmp_path / "audits" / "interpreter-tiny" / "gemm").iterdir()}
    assert names == {"README.md", PACKED} and "verdicts.json" in {p.name for p in Path("runs").rglob("*.json")}


def test_an_interrupted_run_publishes_what_had_ended(tmp_path, monkeypatch, bi_audit):
    def run(names, parameters, out, jobs, said, seconds, *_):
        document(out, "gemm")
        seconds["gemm"] = 1.0
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "run", run)
    assert bi_audit("run", "gemm", "dtype", "--publish").returncode == 130
    assert "interpreter-tiny/gemm" in (tmp_path / "audits" / "README.md").read_text()
    assert (tmp_path / "audits" / "interpreter-tiny" / "gemm" / PACKED).is_file()


def test_an_interrupted_run_of_which_nothing_had_ended_leaves_nothing(tmp_path, monkeypatch, bi_audit):
    def run(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", run)
    assert bi_audit("run", "gemm", "--out", tmp_path / "out").returncode == 130
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_quick_run_finds_a_drift_of_a_single_op(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\n\n\ndef scale(x, factor):\n    return x * factor * len(x)\n")
    mine = ["--candidate", f"{tmp_path}/mine.py:scale", "-p", "op", "scale", "--out", str(tmp_path / "out")]
    done = by_itself("run", "--quick", "elementwise", *mine)
    rows = json.loads((tmp_path / "out" / "verdicts.json").read_text())
    assert done.returncode == 1 and {(r["op"], r["dtype"]) for r in rows if not r["control"]} == {("scale", "bf16")}


# Audits in processes of their own

NAMES = ["dtype", "gemm", "rms_norm"]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Runs audits with processes that `begin` makes; returns what the console shows."""

    def call(begin, names: list[str], jobs: int = 1) -> str:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which xdist's processes ignore
        monkeypatch.setenv("BI_AUDIT_JOBS", "1")
        monkeypatch.setattr(runner.executor, "begin", begin)
        (notebook := tmp_path / "notebook.ipynb").write_text('{"cells": []}')
        monkeypatch.setattr(runner, "audits", lambda: {n: Audit(n, notebook, n) for n in NAMES})
        console = Console(file=io.StringIO(), width=200)
        try:
            runner.run(names, dict.fromkeys(names, {}), tmp_path / "out", jobs, console, {})
        finally:
            signal.signal(signal.SIGINT, before)
        return console.file.getvalue()

    return call


def test_an_interrupt_stops_what_runs_and_begins_nothing(runs, tmp_path):
    said, stopped = [], threading.Event()

    def begin(function, notebook, name, *given):
        def result(progress):
            for _ in range(3):  # one that comes within a finaliser is lost
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                if stopped.wait(10):
                    break
            raise Died("stub", -signal.SIGKILL, [])

        said.append(name)
        return SimpleNamespace(result=result, stop=stopped.set)

    with pytest.raises(KeyboardInterrupt):
        runs(begin, NAMES)
    assert said == NAMES[:1] and not list((tmp_path / "out").glob(".*")), "what recorded nothing leaves nothing"


def test_a_process_that_ends_loses_no_evidence(runs, tmp_path):
    def begin(function, notebook, name, *given):
        (folder.building(tmp_path / "out", name) / "evidence.txt").write_text("kept")
        return SimpleNamespace(result=fails)

    def fails(*_):
        raise Died("notebook", 1, ["ValueError: no template"])

    said = runs(begin, ["gemm"])
    assert (tmp_path / "out" / "gemm" / "evidence.txt").read_text() == "kept" and "ValueError: no template" in said
    (row,) = json.loads((tmp_path / "out" / "gemm" / "verdicts.json").read_text())
    assert row["verdict"] == "needs-fix" and "status 1" in row["detail"]


@pytest.mark.parametrize("jobs, times", [(2, 2), (1, 1)])
def test_an_audit_that_found_too_little_memory_beside_others_runs_again_alone(jobs, times, runs, tmp_path):
    begun = []

    def begin(function, notebook, name, *given):
        again = name in begun
        begun.append(name)
        short = [folder.stopped(name, "the notebook stopped: OutOfMemoryError: CUDA out of memory")]
        place = folder.building(tmp_path / "out", name) / "verdicts.json"
        place.write_text(json.dumps(short if name == "gemm" and not again else []))
        return SimpleNamespace(result=lambda _: "")

    said = runs(begin, ["dtype", "gemm"], jobs)
    assert begun.count("gemm") == times and begun[-1] == "gemm" and begun.count("dtype") == 1
    assert ("gemm: found too little memory beside others, and runs again alone" in said) == (jobs > 1)


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
        time.sleep(1)  # until both sleep
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


CELLS = {
    "print(one); import sys; print(2, file=sys.stderr)": [("stream", "1\n")],
    "from IPython.display import Markdown\nMarkdown('x')": [("display_data", ["text/markdown", "text/plain"])],
    "import matplotlib.pyplot as plt\n_ = plt.plot([1])": [("display_data", ["image/png", "text/plain"])],
    "x = 3": [],
    "x / 0": [("error", "division by zero")],
    "print('never')": [],
}


def test_a_notebook_runs_in_one_process_up_to_the_cell_that_raises(tmp_path):
    cells = [new_code_cell("one = 0", metadata={"tags": ["parameters"]}), *map(new_code_cell, CELLS)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "n.ipynb")
    code = "import sys\nfrom pathlib import Path\nfrom bi_kernels.audit.runs.notebook import execute\n"
    code += "assert execute(Path('n.ipynb'), {'one': 1}, Path('.')) == ('ZeroDivisionError: division by zero', False)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    shown = lambda o: (o.output_type, sorted(o.get("data", [])) or o.get("text", o.get("evalue")))
    made = nbformat.read(tmp_path / "notebook.ipynb", as_version=4).cells[2:]
    assert [list(map(shown, cell.outputs)) for cell in made] == list(CELLS.values())
