"""bi-audit: what it names, what it refuses, what it makes of verdicts."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROW
from rich.console import Console

from bi_kernels.audit import cli
from bi_kernels.audit.findings import Row
from bi_kernels.audit.options import COMMANDS
from bi_kernels.audit.parameters import defaults
from bi_kernels.audit.report import markdown
from bi_kernels.audit.runs.checked import QUICK_AUDITS
from bi_kernels.audit.runs.runner import SECONDS, Board, audits

ROOT = Path(__file__).parents[1]


def by_itself(*arguments: str) -> subprocess.CompletedProcess:
    """`bi-audit` with these arguments, in a process of its own."""
    command = [sys.executable, "-m", "bi_kernels.audit.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


def test_list_names_every_audit_with_its_parameters():
    done = by_itself("list")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert audits()
    for audit in audits().values():
        assert f"{audit.name} " in done.stdout and audit.title in done.stdout
        assert f"notebooks/{audit.notebook.name}; parameters: {', '.join(defaults(audit.name))}\n" in done.stdout


def test_the_names_of_the_command_line_are_fixed():
    assert {*COMMANDS} == {"list", "run", "report", "locate", "certify", "mutate", "bench", "digest"}
    options = {"--candidate", "--dtype", "--shapes", "--device", "--seed", "--out", "-p", "--jobs", "--quick"}
    assert {*cli.parser("run")._option_string_actions} >= options


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "nonsense"], ["unknown audit 'nonsense'", "gemm"]),
        (["run", "gemm", "--candidate", "nonsense"], ["candidate is 'nonsense'", "path/to/file.py:function"]),
        (["run", "gemm", "--candidate", "nowhere.py:linear"], ["nowhere.py:linear", "no file nowhere.py"]),
        (["run", "gemm", "--candidate", "{tmp}/broken.py:linear"], ["broken.py:linear", "ZeroDivisionError"]),
        (["run", "gemm", "--candidate", "{tmp}/one.py:one"], ["one.py:one' takes x", "linear, (x, weight)"]),
        (["run", "gemm", "-p", "dtpye", "bf16"], ["unknown parameter 'dtpye'", "dtype"]),
        (["run", "gemm", "--dtype", "bf61"], ["dtype is 'bf61'", "bf16, fp16, fp32"]),
        (["run", "gemm", "--seed", "x"], ["--seed", "'x'", "int"]),
        (["run", "gemm", "--jobs", "0"], ["--jobs", "0"]),
        (["run", "gemm", "--out", "{tmp}/broken.py/below"], ["--out", "broken.py/below", "cannot be written"]),
        (["run", "--no-such-option"], ["--no-such-option"]),
        (["report", "{tmp}/nowhere"], ["nowhere", "not a folder"]),
        (["nonsense"], ["nonsense"]),
    ],
    ids=" ".join,
)
def test_a_usage_error_is_one_line_and_status_2(arguments, words, tmp_path, monkeypatch, bi_audit):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "one.py").write_text("def one(x):\n    return x\n")
    monkeypatch.chdir(ROOT)
    done = bi_audit(*(a.replace("{tmp}", str(tmp_path)) for a in arguments))
    assert done.returncode == 2 and not done.out, done
    assert len(done.err.splitlines()) == 1 and done.err.startswith("bi-audit: "), done.err
    assert all(word in done.err for word in words), done.err


@pytest.mark.parametrize(
    "narrowed, name",
    [
        ((), "interpreter-tiny"),
        (("--dtype", "bf16"), "interpreter-tiny-bf16"),
        (("--quick",), "interpreter-tiny-quick-bf16"),
        (("-p", "op", "matmul", "--candidate", "torch"), "interpreter-tiny-torch-matmul"),
    ],
)
def test_a_part_of_an_audit_does_not_take_the_place_of_the_whole(narrowed, name, tmp_path, monkeypatch, bi_audit):
    written = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bi_kernels.audit.runs.runner.run", lambda names, parameters, out, *_: written.append(out))
    bi_audit("run", "gemm", "--device", "cpu", *narrowed)
    assert written == [Path("runs") / name]


@pytest.mark.parametrize(
    "arguments, order",
    [
        (("gemm", "attention", "dtype", "--jobs", "2"), ["gemm", "attention", "dtype"]),
        (("--jobs", "2"), sorted(SECONDS, key=SECONDS.get, reverse=True)),
        ((), [name for name, audit in audits().items() if not audit.only_named]),
        (("--quick",), QUICK_AUDITS),
    ],
    ids=["as named", "the longest first", "in reading order", "quick"],
)
def test_the_order_in_which_audits_start(arguments, order, tmp_path, monkeypatch, bi_audit):
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bi_kernels.audit.runs.runner.run", lambda names, *_: started.append(names))
    bi_audit("run", "--out", "out", *arguments)
    assert started == [order] and {*SECONDS} == {n for n, audit in audits().items() if not audit.only_named}


def test_a_board_shows_what_audits_say_how_far_they_are_and_what_they_found():
    said = Console(file=io.StringIO(), width=200)
    board = Board(["any", "dtype"], said, "2 audits into out")
    board.begin("any")
    for line in (
        "begun",
        "cell 3 12",
        "say f: 16 samples",
        "asked 7 49",
        "asked nonsense",
        "whatever a library prints",
    ):
        board.line("any", line)
    one, other = board.progress.tasks
    assert (one.completed, one.total) == (7, 49) and one.elapsed is not None and other.elapsed is None
    assert board.end("any", [ROW.json(), replace(ROW, verdict="needs-fix").json()]) >= 0 and one.finished
    said = said.file.getvalue().splitlines()
    assert said[:2] == ["2 audits into out", "any: f: 16 samples"] and "2 checks, 1 need" in said[2]


LIGHT = """
import sys
from bi_kernels.audit import cli
try:
    cli.run({})
finally:
    print(sorted({{"torch", "triton", "pandas", "papermill"}} & set(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [["-h"], ["run", "-h"], ["digest", "-h"], ["list"]], ids=" ".join)
def test_help_and_list_load_nothing_that_takes_seconds(arguments):
    done = subprocess.run([sys.executable, "-c", LIGHT.format(arguments)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]", done


def write(folder: Path, *rows: Row) -> None:
    folder.mkdir(parents=True)
    (folder / "verdicts.json").write_text(json.dumps([r.json() for r in rows]))
    (folder / "provenance.json").write_text(
        json.dumps({"device": "a device", "commit": "abc", "parameters": "dtype=all"})
    )


def table(lines: list[str], *names: str) -> list[dict[str, str]]:
    """The rows of every Markdown table whose first columns have these names."""
    found, head = [], None
    for line in lines:
        row = [cell.strip() for cell in line.strip("| ").split("|")]
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = row
        elif tuple(head[: len(names)]) == names and not line.startswith("|:"):
            found.append(dict(zip(head, row)))
    return found


def test_report_builds_the_matrix_from_verdicts(tmp_path, bi_audit):
    fp16, drifts, refused = (
        replace(ROW, dtype=d, verdict=v) for d, v in (("fp16", "pass"), ("fp16", "needs-fix"), ("fp32", "unsupported"))
    )
    write(
        tmp_path / "gpu" / "gemm",
        ROW,
        drifts,
        fp16,
        refused,
        replace(ROW, relation="accuracy"),
        replace(ROW, op="matmul", relation="determinism"),
        replace(ROW, candidate="a control", control=True, caught=True),
    )
    write(
        tmp_path / "gpu" / "elementwise",
        replace(ROW, audit="elementwise", op="silu"),
        replace(ROW, audit="elementwise", op="silu", verdict="needs-fix", control=True, caught=False),
    )
    write(tmp_path / "cpu" / "gemm", ROW, replace(ROW, op="matmul", verdict="needs-fix", control=True, caught=True))
    write(tmp_path / ".gemm.partial", replace(ROW, op="unfinished"))
    done = bi_audit("report", tmp_path)
    assert done.returncode == 0, done.err
    lines = (tmp_path / "README.md").read_text().splitlines()
    found = {row["report"].split("](")[-1]: row for row in table(lines, "report", "question")}
    assert {link: row["found"][0] for link, row in found.items()} == {
        "cpu/gemm/README.md)": "✅",
        "gpu/gemm/README.md)": "❌",
        "gpu/elementwise/README.md)": "❌",
    }, "an uncaught control fails its report"
    assert found["gpu/gemm/README.md)"]["controls caught"] == "1 of 1"
    assert found["gpu/elementwise/README.md)"]["controls caught"] == "0 of 1"
    gpu, cpu = (next(i for i, line in enumerate(lines) if f"{name}: op × dtype" in line) for name in ("gpu", "cpu"))
    assert gpu < cpu, "the folder with more reports comes first"
    matrix = {row["op"]: row for row in table(lines[gpu:cpu], "op")}
    assert matrix["linear"]["bf16"] == "✅" and matrix["linear"]["fp16"] == "❌ forward invariance", (
        "one check is enough"
    )
    assert matrix["linear"]["fp32"].startswith("⬜") and matrix["matmul"]["fp16"] == "–"
    assert [row["op"] for row in table(lines[cpu:], "op")] == ["linear"], "a control is no op of the matrix"
    assert "unfinished" not in "\n".join(lines)


def test_report_of_no_audit_and_of_one_that_stopped_before_it_recorded_anything(tmp_path, bi_audit):
    assert bi_audit("report", tmp_path).returncode == 0 and "| report" not in (tmp_path / "README.md").read_text()
    write(tmp_path / "gemm", replace(ROW, op="", verdict="needs-fix", mismatches=None, elements=None))
    (tmp_path / "gemm" / "provenance.json").unlink()
    assert bi_audit("report", tmp_path).returncode == 0
    assert "| ❌" in (tmp_path / "README.md").read_text()


def test_a_bar_in_a_table_is_no_column():
    head, rule, line = markdown.table([{"max |x|": "|y| < 3", "n": 1, "share": 0.5}]).splitlines()
    assert head.count("|") - head.count(r"\|") == rule.count("|") == line.count("|") - line.count(r"\|") == 4


def test_the_auditor_loads_nothing_that_draws_or_compiles_before_it_does():
    heavy = {"pandas", "matplotlib", "numba", "papermill", "nbformat"}
    code = f"import sys, bi_kernels.audit.callable_session; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done
