"""The committed notebooks, papermill's parameters, and nbval: what it checks, and that it can fail."""

import ast
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from conftest import ROW, run, wait_for
from papermill.exceptions import PapermillExecutionError
from test_runs import ARGUMENTS, started

from bi_kernels.audit import cli, start
from bi_kernels.audit.findings import read_rows, write_rows
from bi_kernels.audit.parameters import OPTIONS, accepted, defaults
from bi_kernels.audit.report.tables import MIME
from bi_kernels.audit.runs.notebook import parameterized
from bi_kernels.audit.runs.runner import audits

ROOT = Path(__file__).parents[1]
NOTEBOOKS = [audit.notebook for audit in audits().values()]
WORKBENCHES = [ROOT / "notebooks" / f"{name}.ipynb" for name in ("workbench", "paste_your_kernel", "gallery_of_bugs")]
name_of = lambda path: path.stem.partition("_")[2]


def execute(notebook: Path, out: Path, **parameters) -> nbformat.NotebookNode:
    return papermill.execute_notebook(str(notebook), str(out), parameters, kernel_name="python3", progress_bar=False)


def nbval(*notebooks: Path) -> dict[str, bool]:
    """{notebook: whether nbval failed a cell of it}, in one process."""
    told = ["-p", "no:cacheprovider", "-rfpE", "--nbval-lax", *(n.name for n in notebooks)]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    done = run(sys.executable, "-m", "pytest", *told, cwd=notebooks[0].parent, env=environment)
    assert done.returncode in (0, 1) and not re.search(r"^ERROR ", done.stdout, re.M), done.stdout
    cells = re.findall(r"^(PASSED|FAILED) (\w+)\.ipynb::", done.stdout, re.M)
    return {name: ("FAILED", name) in cells for _, name in cells}


def verdict_cell(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    return next(c for c in notebook.cells if "nbval-check-output" in c.metadata.get("tags", []))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_notebooks_carry_what_nbval_compares(path):
    notebook = nbformat.read(path, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(c.execution_count for c in code), "a cell that was not run is compared with nothing"
    assert not any(o.output_type == "error" for c in code for o in c.outputs)
    data = verdict_cell(notebook).outputs[0].data[MIME]
    assert (data["verdict"], data["device"], data["candidate"].partition(":")[0]) == (
        "pass",
        "interpreter",
        "zoo" if name_of(path) == "zoo" else "bi_kernels",
    )
    assert data["controls"]["caught"] == data["controls"]["total"] > 0
    assert code[-1].source == "assert run.passed, run.failure()"


@pytest.mark.parametrize(
    "path", [n for n in NOTEBOOKS if "candidate: str" in n.read_text(encoding="utf-8")], ids=lambda p: p.stem
)
def test_another_candidates_document_is_without_the_cells_about_ours(path):
    whole, mine = (parameterized(path, {"candidate": name}).cells for name in ("bi_kernels", "torch"))
    sources = lambda cells: [c.source for c in cells if "injected-parameters" not in c.metadata.get("tags", [])]
    assert sources(c for c in whole if "ours" not in c.metadata.get("tags", [])) == sources(mine)
    names = [n for c in mine if c.cell_type == "code" for n in ast.walk(ast.parse(c.source.replace("%", "#")))]
    kept = {n.id for n in names if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    lost = [n for c in whole if c not in mine and c.cell_type == "code" for n in ast.walk(ast.parse(c.source))]
    needed = {n.id for n in lost if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} - kept
    assert not needed & {n.id for n in names if isinstance(n, ast.Name)}, "names that only a dropped cell gives"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_parameters_are_annotated_and_known(path):
    known = papermill.inspect_notebook(str(path))
    assert {*known} == {*defaults(name_of(path))}
    setup = next(c.source for c in nbformat.read(path, as_version=4).cells if "setup" in c.metadata.get("tags", []))
    assert set(known) == set(re.findall(r"\b(\w+)=\1\b", setup)), "a parameter that start is not given has no effect"
    assert all(p["inferred_type_name"] in ("str", "int") for p in known.values())


@pytest.mark.parametrize(
    "path", [n for n in NOTEBOOKS if "checks: str" in n.read_text(encoding="utf-8")], ids=lambda p: p.stem
)
def test_a_notebook_by_itself_is_quick_and_says_so_and_bi_audit_run_asks_all(path):
    assert papermill.inspect_notebook(str(path))["checks"]["default"] == '"quick"'
    assert accepted(name_of(path), {})["checks"] == "all"
    setup = next(c for c in nbformat.read(path, as_version=4).cells if "setup" in c.metadata.get("tags", []))
    printed = "".join(o.text for o in setup.outputs if o.get("name") == "stdout")
    assert f"bi-audit run {name_of(path)}" in printed, "in its first lines"


@pytest.mark.slow
@pytest.mark.parametrize("name", audits())
def test_the_long_form_passes(name, tmp_path, bi_audit):
    done = bi_audit("run", name, "--device", "cpu", "--out", tmp_path)
    assert done.returncode == 0, done


def change_json_verdict(notebook):
    verdict_cell(notebook).outputs[0].data[MIME]["verdict"] = "needs-fix"


def raise_assert(notebook):
    notebook.cells[-1].source = "assert not run.passed"


def drop_output(notebook):
    verdict_cell(notebook).outputs = []


TAMPERED = (change_json_verdict, raise_assert, drop_output)
NEEDED = (
    "experiments.accuracy(run)",
    "run.controls()",
    "run.passed",
)  # what a verdict comes from; one op and dtype of it take seconds


@pytest.fixture
def failed(tmp_path) -> dict[str, bool]:
    """Whether nbval fails a short notebook, and the same with something changed in it."""
    path = tmp_path / "untouched.ipynb"
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    notebook.cells = [c for c in notebook.cells if c.metadata.get("tags") or any(word in c.source for word in NEEDED)]
    nbformat.write(notebook, path)
    executed = execute(path, path, dtype="fp16", op="scale")
    assert verdict_cell(executed).outputs[0].data[MIME]["verdict"] == "pass"
    paths = [path]
    for tamper in TAMPERED:
        notebook = nbformat.read(path, as_version=4)
        tamper(notebook)
        paths.append(path.with_stem(tamper.__name__))
        nbformat.write(notebook, paths[-1])
    return nbval(*paths)


@pytest.mark.slow
def test_nbval_fails_a_tampered_notebook_and_no_other(failed):
    assert failed == {"untouched": False} | {tamper.__name__: True for tamper in TAMPERED}


@pytest.mark.slow
def test_a_variant_of_the_parameters_runs_and_repeats(tmp_path):
    path, failed = tmp_path / "variant.ipynb", False
    try:
        execute(NOTEBOOKS[2], path, dtype="fp32", candidate="torch", op="matmul")
    except PapermillExecutionError:
        failed = True
    data = verdict_cell(nbformat.read(path, as_version=4)).outputs[0].data[MIME]
    assert data["dtypes"] == ["fp32"]
    assert failed == (data["verdict"] != "pass"), "the last assert says what the verdict says"
    assert nbval(path) == {"variant": failed}


def setup_of(notebook: nbformat.NotebookNode) -> str:
    """Returns the code that sets the parameters and begins the audit."""
    tags = {"parameters", "injected-parameters", "setup"}
    cells = [c for c in notebook.cells if tags & {*c.metadata.get("tags", [])}]
    return "\n".join(line for c in cells for line in c.source.splitlines() if not line.startswith("%"))


def test_a_wrong_parameter_is_one_sentence():
    with pytest.raises(ValueError, match="^dtype is 'bf61', expected all, bf16, fp16, fp32$"):
        exec(setup_of(parameterized(NOTEBOOKS[1], {"dtype": "bf61"})), {})


@pytest.mark.parametrize(
    "audit, given", [("gemm", {"dtyp": "bf16"}), ("any", {"dtype": "bf16"}), ("zoo", {"candidate": "torch"})]
)
def test_an_unknown_parameter_is_one_sentence(audit, given):
    with pytest.raises(ValueError) as error:
        start(audit, **given)
    (name,) = given
    assert str(error.value) == f"unknown parameter {name!r}, expected one of {', '.join(defaults(audit))}"


def test_a_copy_of_a_notebook_finds_its_helpers_from_any_folder(tmp_path):
    """As a report's notebook does for whoever opens it: only `start` knows where the helpers are."""
    code = setup_of(nbformat.read(audits()["rms_norm"].notebook, as_version=4))
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert "from helpers" in code and done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["gemm", "any", "zoo"])
def test_a_session_says_the_command_that_repeats_it(name):
    given = {
        "gemm": {"dtype": "bf16", "op": "matmul", "seed": 3},
        "any": {"candidate": "torch:add", "inputs": "x:fp32[30] y:fp32[30]", "seconds": 9, "shared": "y"},
        "zoo": {"callables": "F.silu; F.gelu", "seed": 1},
    }[name]
    program, run, audit, *words = shlex.split(start(name, **given).command)
    assert (program, run, audit) == ("bi-audit", "run", name)
    told = {}
    while words:
        option = words.pop(0)
        parameter = words.pop(0) if option == "-p" else option.removeprefix("--")
        told[parameter] = words.pop(0)
    assert told == {k: str(v) for k, v in given.items()}
    assert all(f"--{k}" in cli.parser("run")._option_string_actions for k in OPTIONS)


def test_a_passing_run_writes_whole_reports_and_merges_into_the_folder(tmp_path, monkeypatch, bi_audit):
    out = tmp_path / "out"
    for name in ("dtype", "gemm"):  # of runs before: one is replaced and one stays
        (out / name).mkdir(parents=True)
        write_rows(out / name / "verdicts.json", [ROW.json()])
    (out / "dtype" / "left over").touch()
    monkeypatch.chdir(tmp_path)
    done = bi_audit("run", "dtype", "--dtype", "fp32", "-p", "op", "scale", "--quick", "--out", "out")
    assert done.returncode == 0 and re.search(r"^dtype: \d+ checks, 0 need", done.err, re.M), done
    names = {p.name for p in (out / "dtype").iterdir()}
    assert {"README.md", "notebook.ipynb", "provenance.json", "verdicts.json"} < names and "left over" not in names
    assert any(n.endswith(".png") for n in names) and [p.name for p in out.glob(".*")] == [".lock"]
    made = json.loads((out / "dtype" / "provenance.json").read_text())
    assert {"commit", "kernels", "device", "driver", "torch", "Triton", "contract", "parameters", "command"} <= {*made}
    shown = verdict_cell(nbformat.read(out / "dtype" / "notebook.ipynb", as_version=4)).outputs[0].data[MIME]
    assert (shown["verdict"], shown["dtypes"]) == ("pass", ["fp32"])
    document, index = ((out / place / "README.md").read_text() for place in ("dtype", "."))
    assert "| scale" in index and "| linear" in index
    assert widest(document) <= 6 and document.count(f"{len(read_rows(out / 'dtype')):,} checks") <= 1
    joined = {(r["audit"], r["op"]) for r in read_rows(out)}
    assert {("gemm", "linear"), ("dtype", "scale")} <= joined


def widest(markdown: str) -> int:
    """Returns how many columns the widest table has."""
    return max(line.count("|") - line.count(r"\|") - 1 for line in markdown.splitlines() if line.startswith("|"))


# Computes until the first verdicts are recorded.
SCALE = """import os
import time


def scale(x, factor):
    time.sleep(600 * os.path.exists(f"{os.environ['BI_AUDIT_OUT']}/verdicts.json"))
    return x * factor
"""


@pytest.mark.slow
def test_ctrl_c_leaves_finished_reports_whole(tmp_path):
    (tmp_path / "mine.py").write_text(SCALE)
    finished = tmp_path / "out" / "dtype" / "README.md"
    finished.parent.mkdir(parents=True)
    finished.write_text("finished before")
    (finished.parent / "verdicts.json").write_text("[]")
    own = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's `&` has it ignored
    child = started(*ARGUMENTS, cwd=tmp_path, start_new_session=True, preexec_fn=own)
    try:
        wait_for(tmp_path / "out" / f".dtype.{child.pid}.partial" / "verdicts.json", child)
        os.killpg(child.pid, signal.SIGINT)
        said = child.communicate(timeout=60)[1]
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 130 and "interrupted" in said and "Traceback" not in said, said
    assert finished.read_text() == "finished before" and not [*(tmp_path / "out").glob(".*.partial")]
    assert "out/.dtype.interrupted" in said and read_rows(tmp_path / "out" / ".dtype.interrupted")


def test_every_notebook_is_an_audits_or_a_workbench():
    assert {*(ROOT / "notebooks").glob("*.ipynb")} == {*NOTEBOOKS, *WORKBENCHES}


@pytest.mark.parametrize("path", WORKBENCHES, ids=lambda p: p.stem)
def test_the_workbenches_are_committed_executed(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [c for c in cells if c.cell_type == "code"]
    assert all(c.execution_count for c in code)
    assert not any(o.output_type == "error" or o.get("name") == "stderr" for c in code for o in c.outputs)
    assert any("nbval-check-output" in c.metadata.get("tags", []) and c.outputs for c in code)
