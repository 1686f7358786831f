"""The committed notebooks, papermill's parameters, and nbval: what it checks, and that it can fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from papermill.exceptions import PapermillExecutionError

from bi_kernels.audit import anyones
from bi_kernels.audit.runner import audits
from bi_kernels.audit.session import PARAMETERS
from bi_kernels.audit.show import MIME

NOTEBOOKS = [audit.notebook for audit in audits().values()]
QUICK = {"dtype": "fp16", "op": "scale"}  # one op, one dtype: seconds


def execute(notebook: Path, out: Path, **parameters) -> nbformat.NotebookNode:
    return papermill.execute_notebook(str(notebook), str(out), parameters, kernel_name="python3", progress_bar=False)


def nbval(notebook: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbval-lax", notebook.name],
                          cwd=notebook.parent, capture_output=True, text=True, env=os.environ | {"PYTEST_ADDOPTS": ""})


def verdict_cell(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    return next(c for c in notebook.cells if "nbval-check-output" in c.metadata.get("tags", []))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_notebooks_carry_what_nbval_compares(path):
    notebook = nbformat.read(path, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(c.execution_count for c in code), "a cell that was not run is compared with nothing"
    assert not any(o.output_type == "error" for c in code for o in c.outputs)
    data = verdict_cell(notebook).outputs[0].data[MIME]
    assert (data["verdict"], data["device"], data["candidate"].partition(":")[0]) == ("pass", "interpreter", "bi_kernels")
    assert data["controls"]["caught"] == data["controls"]["total"] > 0
    assert code[-1].source == "assert run.passed, run.failure()"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_parameters_are_annotated_and_known(path):
    known = papermill.inspect_notebook(str(path))
    assert set(known) == set(anyones.PARAMETERS if path.stem == "7_any" else PARAMETERS)
    assert all(p["inferred_type_name"] in ("str", "int") for p in known.values())


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("nbval") / "quick.ipynb"
    execute(NOTEBOOKS[0], path, **QUICK)
    return path


def test_nbval_passes_an_untouched_notebook(executed):
    assert nbval(executed).returncode == 0


def change_verdict(notebook):
    output = verdict_cell(notebook).outputs[0]
    output.data["text/markdown"] = output.data["text/markdown"].replace("✅ pass", "❌ needs-fix", 1)


def change_json_verdict(notebook):
    verdict_cell(notebook).outputs[0].data[MIME]["verdict"] = "needs-fix"


def raise_assert(notebook):
    notebook.cells[-1].source = "assert not run.passed"


def drop_output(notebook):
    verdict_cell(notebook).outputs = []


@pytest.mark.parametrize("tamper", [change_verdict, change_json_verdict, raise_assert, drop_output], ids=lambda f: f.__name__)
def test_nbval_fails_a_tampered_notebook(tamper, executed, tmp_path):
    notebook = nbformat.read(executed, as_version=4)
    tamper(notebook)
    path = tmp_path / "tampered.ipynb"
    nbformat.write(notebook, path)
    assert nbval(path).returncode == 1


@pytest.mark.parametrize("number, parameters, verdict", [
    (0, {"dtype": "fp32", "op": "rope"}, "pass"),
    (1, {"dtype": "fp16", "op": "swiglu"}, "pass"),
    (2, {"dtype": "fp32", "candidate": "torch", "op": "matmul"}, None),
], ids=["dtype fp32", "elementwise fp16", "gemm torch fp32"])
def test_parameter_variants_run_and_repeat(number, parameters, verdict, tmp_path):
    path = tmp_path / "variant.ipynb"
    try:
        execute(NOTEBOOKS[number], path, **parameters)
        failed = False
    except PapermillExecutionError:
        failed = True
    notebook = nbformat.read(path, as_version=4)
    data = verdict_cell(notebook).outputs[0].data[MIME]
    assert data["dtypes"] == [parameters["dtype"]]
    assert failed == (data["verdict"] != "pass"), "the last assert says what the verdict says"
    assert verdict in (None, data["verdict"])
    assert (nbval(path).returncode != 0) == failed


@pytest.mark.parametrize("parameters, sentence", [
    ({"dtype": "bf61"}, "dtype is 'bf61', expected all, bf16, fp16, fp32"),
    ({"dtyp": "bf16"}, "unknown parameter 'dtyp', expected one of dtype, candidate, shapes, device, seed, op"),
    ({"shapes": "qwen3-8b"}, "shapes is 'qwen3-8b', which needs a CUDA device; the interpreter runs tiny"),
    ({"seed": "1e-3"}, "seed is '1e-3', expected an integer of at least 0"),
])
def test_a_wrong_parameter_is_one_sentence(parameters, sentence, tmp_path):
    with pytest.raises(PapermillExecutionError) as error:
        execute(NOTEBOOKS[1], tmp_path / "out.ipynb", **parameters)
    assert (error.value.ename, error.value.evalue) == ("ValueError", sentence)


BROKEN = """
import bi_kernels

def linear(x, weight, bias=None):
    if x.shape[:-1].numel() > 16:
        return bi_kernels.linear(x, weight)
    return bi_kernels.linear(x.flip(-1), weight.flip(-1))
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "bi_kernels.audit.cli", *arguments], capture_output=True, text=True, cwd=cwd)


def test_a_drifting_candidate_leaves_a_document_and_a_reproducer(tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    done = run("run", "gemm", "--candidate", "mine.py:linear", "--dtype", "fp16", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "needs-fix" in done.stdout and "Traceback" not in done.stdout + done.stderr
    out = tmp_path / "out"
    rows = json.loads((out / "verdicts.json").read_text())
    drift = [r for r in rows if r["verdict"] == "needs-fix" and not r["control"] and r["relation"] == "invariance"]
    assert {r["rows"] for r in drift if r["layout"] == "rows"} <= set(range(1, 17))
    assert all(r["candidate"] == "mine.py:linear" and r["first_failing_op"] == "linear" for r in drift)
    body = (out / "gemm" / "README.md").read_text()
    assert "needs-fix" in body and str(tmp_path) not in body
    script = next((out / "gemm" / "repro").glob("linear-*.py"))
    assert any(r["repro"].endswith(script.name) for r in drift)
    shown = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 1 and "elements differ" in shown.stdout, shown.stderr
    (tmp_path / "mine.py").write_text(BROKEN.replace("> 16", ">= 0"))
    mended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert mended.returncode == 0, mended.stdout + mended.stderr


def test_a_passing_run_writes_whole_documents_and_merges_into_the_folder(tmp_path):
    for dtype in ("fp16", "fp32"):
        done = run("run", "dtype", "--dtype", dtype, "-p", "op", "scale", "--out", "out", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    names = {p.name for p in (tmp_path / "out" / "dtype").iterdir()}
    assert {"README.md", "notebook.ipynb", "provenance.json", "verdicts.json"} < names and any(n.endswith(".png") for n in names)
    assert not list((tmp_path / "out").glob(".*")), "nothing half-written stays"
    made = json.loads((tmp_path / "out" / "dtype" / "provenance.json").read_text())
    assert {"commit", "device", "driver", "torch", "Triton", "contract", "parameters", "command"} <= set(made)
    assert "| scale" in (tmp_path / "out" / "README.md").read_text()


def test_ctrl_c_leaves_finished_documents_whole(tmp_path):
    finished = tmp_path / "out" / "gemm" / "README.md"
    finished.parent.mkdir(parents=True)
    finished.write_text("finished before")
    child = subprocess.Popen([sys.executable, "-m", "bi_kernels.audit.cli", "run", "gemm", "--out", "out"], cwd=tmp_path,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while not (tmp_path / "out" / ".gemm.partial" / "provenance.json").exists():
            assert child.poll() is None, child.stderr.read()
        os.killpg(child.pid, signal.SIGINT)
        said = child.communicate(timeout=60)[1]
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 130 and "interrupted; finished documents are whole" in said and "Traceback" not in said, said
    assert finished.read_text() == "finished before"
    assert not (tmp_path / "out" / ".gemm.partial").exists()
