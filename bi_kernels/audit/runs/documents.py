"""Executes an audit's notebook through papermill and makes its document: Markdown, figures, the notebook cleaned."""

import json
import os
import sys
from pathlib import Path

import nbformat
import papermill
from nbformat import NotebookNode, from_dict
from papermill.exceptions import PapermillExecutionError

from bi_kernels.audit.faults import CannotJudge
from bi_kernels.audit.index import report
from bi_kernels.audit.runs import engine

KERNEL = "python3"
SETUP = "setup"  # tag of the cell that begins an audit
OURS = "ours"  # tag of cells that are about this package's kernels, whoever else is judged


def clean(notebook: NotebookNode) -> None:
    """Drops what names the machine or the hour: papermill's records, warnings of libraries, and paths in outputs."""
    notebook.metadata.pop("papermill", None)
    roots = {str(Path.cwd()), str(Path.home()), sys.prefix, str(Path(__file__).parents[3])}
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell["id"] = "injected-parameters"  # else another one in every run
        text = json.dumps(cell.get("outputs", []))
        for root in sorted(roots, key=len, reverse=True):
            text = text.replace(json.dumps(root)[1:-1], "…")
        if "outputs" in cell:
            cell.outputs = [from_dict(o) for o in json.loads(text) if o.get("name") != "stderr"]


def about(path: Path, candidate: str) -> NotebookNode:
    """Returns a notebook, without the cells that are about this package's kernels where another candidate is judged."""
    notebook = nbformat.read(path, as_version=4)
    if candidate != "bi_kernels":
        notebook.cells = [cell for cell in notebook.cells if OURS not in cell.metadata.get("tags", [])]
    return notebook


def execute(name: str, path: Path, parameters: dict, folder: Path) -> tuple[str, str]:
    """Runs a notebook in this process, and leaves in `folder` what it records and the notebook.

    Prints lines for `runner.Board` as it goes. Returns what the notebook raised, and, where it refused what it was
    told before anything was judged, why.
    """
    tell = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")  # the cells' own prints are part of the notebook
    os.environ |= {"BI_AUDIT_OUT": str(folder.resolve()), "BI_AUDIT_TELL": str(tell.fileno())}
    notebook = about(path, parameters.get("candidate", "bi_kernels"))
    is_setup = lambda cell: SETUP in cell.metadata.get("tags", [])

    def started(cells: list, index: int) -> None:
        tell.write("begun\n" * (index > 0 and is_setup(cells[index - 1])) + f"cell {index} {len(cells)}\n")

    target = folder / report.NOTEBOOK
    try:
        how = {"engine_name": engine.NAME, "kernel_name": KERNEL, "progress_bar": False, "started": started}
        papermill.execute_notebook(notebook, str(target), parameters, **how)
    except PapermillExecutionError as failed:
        cells = nbformat.read(target, as_version=4).cells
        cell = next(c for c in cells if any(o.output_type == "error" for o in c.get("outputs", [])))
        refused = failed.ename == CannotJudge.__name__ or failed.ename == "ValueError" and is_setup(cell)
        return f"{failed.ename}: {failed.evalue}", failed.evalue * refused
    return "", ""


def written(name: str, folder: Path, title: str) -> tuple[str, bool]:
    """Writes the notebook in `folder` anew, cleaned, and its figures, as far as it came. Returns the Markdown, and
    whether what it raised was in its last cell, which asserts what the verdict above it says."""
    target = folder / report.NOTEBOOK
    if not target.exists():
        return f"# {title}\n", False
    executed = nbformat.read(target, as_version=4)
    clean(executed)
    nbformat.write(executed, target)
    body, figures = report.markdown(executed, name)
    for file, data in figures.items():
        (folder / file).write_bytes(data)
    return body, report.raised(executed.cells[-1])


def made(name: str, path: Path, title: str, parameters: dict, folder: Path) -> tuple[str, str, bool, str]:
    """Runs a notebook and makes its document: returns the Markdown, what the notebook raised, whether that was in its
    last cell, and why it refused what it was told, if it did."""
    error, refused = execute(name, path, parameters, folder)
    body, finished = ("", False) if refused else written(name, folder, title)
    return body, error, finished, refused
