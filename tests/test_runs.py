"""Runs of audits under bad weather: locked folders, foreign files, crashes, time limits, full disks, and what is not
made again."""

import json
import os
import resource
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_cli import ROW, by_itself

from bi_kernels.audit.runs import folder, notebooks, quick, runner
from bi_kernels.audit.runs.command import warn

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
    assert done.returncode == 2 and "name another" in done.err, done
    assert theirs.read_text() == "theirs" and not [*tmp_path.rglob("*verdicts*")]
    if name == "README.md":
        assert bi_audit("report", ".").returncode == 2 and theirs.read_text() == "theirs"


def test_a_folder_is_one_runs_at_a_time(tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr(runner, "run", lambda names, *_: ran.append(bi_audit("run", "dtype", "--out", "out")))
    held, again = folder.locked(tmp_path / "out"), folder.locked(tmp_path / "out")
    with held, pytest.raises(ValueError, match="another bi-audit is writing"), again:
        pass
    bi_audit("run", "dtype", "--out", "out")
    (inner,) = ran
    assert inner.returncode == 2 and "--out is 'out', which another bi-audit is writing" in inner.err


def test_without_notebooks_is_one_sentence(tmp_path, monkeypatch, bi_audit):
    monkeypatch.setattr(notebooks, "PACKAGE", tmp_path / "bi_kernels")
    for command in (["list"], ["run", "gemm"]):
        done = bi_audit(*command)
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
        pytest.param(["dtype", "--candidate", "leaves.py:scale"], ["leaves.py:scale"], marks=pytest.mark.slow),
        (["any", "--candidate", "mine.py:scale", "--inputs", "x:bf16[999999999,999999999,9]"], ["inputs", "x:bf16["]),
        pytest.param(
            ["any", "--candidate", "mine.py:scale", "--inputs", "x:bf16[99999999999999999999]"],
            ["inputs", "x:bf16["],
            marks=pytest.mark.slow,
        ),
        (["any", "--candidate", "mine.py:scale", "--inputs", "x:int8[4]<999"], ["inputs", "x:int8[4]<999"]),
        (["chain", "--quick"], ["--quick", "chain"]),
        (["gemm", "--publish", "--out", "x"], ["--publish", "--out"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_what_is_wrong_is_one_sentence_and_in_the_junit_file(arguments, words, tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCALE)
    (tmp_path / "exits.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit('bye')\n")
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


def of_session(child: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(child.pid).children(recursive=True)


WAITS = "import time\n\n\ndef scale(x, factor):\n    time.sleep(600)\n"


def test_a_killed_run_leaves_no_process_and_the_next_one_its_place(tmp_path):
    (tmp_path / "mine.py").write_text(WAITS)
    child = started(*ARGUMENTS, cwd=tmp_path)
    record = tmp_path / "out" / f".dtype.{child.pid}.partial" / "provenance.json"
    while not record.exists():
        time.sleep(0.1)
        assert child.poll() is None, child.communicate()
    mine = of_session(child)
    assert mine, "the document's process"
    child.kill()
    child.wait()
    alive = psutil.wait_procs(mine, timeout=30)[1]
    assert not alive, [p.cmdline() for p in alive]
    folder.clear(tmp_path / "out")  # as the next run does
    with folder.locked(tmp_path / "out"):
        assert [p.name for p in (tmp_path / "out").iterdir()] == [".lock"]


@pytest.mark.parametrize("option", ["--timeout", pytest.param("--cell-timeout", marks=pytest.mark.slow)])
def test_an_audit_that_takes_too_long_keeps_what_it_had(option, tmp_path):
    (tmp_path / "mine.py").write_text(WAITS)
    child = started(*ARGUMENTS, option, "12", "--junit", "j.xml", cwd=tmp_path)
    said, errors = child.communicate(timeout=120)
    assert child.returncode == 1 and "Traceback" not in errors, errors
    assert f"than the 12 s of {option}" in said
    assert (tmp_path / "out" / "dtype" / "provenance.json").exists()
    assert "stopped here" in (tmp_path / "out" / "dtype" / "README.md").read_text()
    assert option in ET.parse(tmp_path / "j.xml").find(".//error").get("message")
    assert not folder.finished(tmp_path / "out" / "dtype")


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


@pytest.mark.slow
def test_a_finished_audit_of_unchanged_sources_stands(tmp_path, monkeypatch, bi_audit):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from bi_kernels import scale\n")
    again = [*ARGUMENTS, "--resume"]
    assert bi_audit(*ARGUMENTS).returncode == 0
    file = tmp_path / "out" / "dtype" / "README.md"
    made = file.stat().st_mtime_ns
    done = bi_audit(*again)
    assert done.returncode == 0 and "dtype: stands as it is" in done.err and "0 need a fix" in done.out
    assert file.stat().st_mtime_ns == made
    ran = []
    monkeypatch.setattr(runner, "run", lambda names, *_: ran.append(list(names)))
    bi_audit(*again)
    bi_audit(*ARGUMENTS)
    (tmp_path / "mine.py").write_text("from bi_kernels import scale  # changed\n")
    bi_audit(*again)
    assert ran == [[], ["dtype"], ["dtype"]]


def test_a_fingerprint_is_of_the_package_and_the_candidate(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise ValueError('imported')\n")
    (tmp_path / "pack" / "ops.py").write_text(SCALE)
    notebook = tmp_path / "n.ipynb"
    notebook.write_text("{}")
    of = lambda spec: folder.fingerprint(notebook, {"candidate": spec})
    before = [of("bi_kernels"), of("pack.ops:scale"), of(f"{tmp_path}/pack/ops.py:scale")]
    assert len(set(before)) == 3
    (tmp_path / "pack" / "ops.py").write_text(SCALE * 2)
    after = [of("bi_kernels"), of("pack.ops:scale"), of(f"{tmp_path}/pack/ops.py:scale")]
    assert [a == b for a, b in zip(before, after)] == [True, False, False]
    notebook.write_text("{ }")
    assert of("bi_kernels") != before[0]
    monkeypatch.setattr(folder, "PACKAGE", tmp_path / "pack")
    assert (changed := of("bi_kernels")) != before[0]
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "cases.py").write_text("")
    assert of("bi_kernels") != changed, "a checkout's benchmarks are part of it"


def test_an_estimate_is_of_the_last_run_here_or_of_the_interpreter(tmp_path):
    assert "minutes, as on two cores" in runner.estimate(["gemm", "attention", "vocabulary"], tmp_path, 2, True)
    assert "no estimate" in runner.estimate(["gemm"], tmp_path, 2, False)
    (document(tmp_path) / folder.FINISHED).write_text(json.dumps({"made_of": "x", "seconds": 61.0}))
    assert runner.estimate(["gemm"], tmp_path, 1, False) == "about 61 s, as they did here before"


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


# The quick run


@pytest.mark.slow
def test_the_quick_run_judges_each_op_and_a_control(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\n\n\ndef scale(x, factor):\n    return x * factor * len(x)\n")
    done = by_itself("run", "--quick", "rms_norm", "--junit", str(tmp_path / "j.xml"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0 and "0 need a fix; controls caught: 1 of 1" in done.stdout, done
    rows = json.loads((tmp_path / "out" / "verdicts.json").read_text())
    assert {r["op"] for r in rows if not r["control"]} == {"rms_norm", "qk_norm", "add_rms_norm"}
    assert {r["relation"] for r in rows} >= {"invariance", "gradient invariance", "accuracy", "gradient accuracy"}
    assert {r["dtype"] for r in rows if not r["control"]} == {quick.DTYPE}
    assert "about a minute" in done.stderr and "without --quick" in done.stderr
    mine = f"{tmp_path}/mine.py:scale"
    done = by_itself(
        "run", "--quick", "elementwise", "--candidate", mine, "-p", "op", "scale", "--out", str(tmp_path / "o")
    )
    assert done.returncode == 1 and "needs-fix  scale" in done.stdout, done


@pytest.mark.slow
def test_the_quick_run_says_that_a_process_died(tmp_path):
    (tmp_path / "mine.py").write_text("import os\n\n\ndef scale(x, factor):\n    os._exit(5)\n")
    mine = ["--candidate", f"{tmp_path}/mine.py:scale", "-p", "op", "scale", "--out", str(tmp_path / "out")]
    done = by_itself("run", "--quick", "elementwise", *mine)
    assert done.returncode == 1 and "scale: its process died" in done.stdout, done
    assert "Traceback" not in done.stderr
