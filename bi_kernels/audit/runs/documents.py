"""Executes an audit's notebook through papermill and makes its document: Markdown, figures, the notebook cleaned."""

import json
import os
import sys
from pathlib import Path

import nbformat
import papermill
from nbformat import NotebookNode, from_dict
from papermill.exceptions import PapermillExecutionError

from bi_kernels.audit.index import report
from bi_kernels.audit.runs.limits import Limits

KERNEL = "python3"
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


def execute(
    name: str, path: Path, title: str, parameters: dict, folder: Path, seconds: tuple[float, float], gate: str
) -> tuple[str, str, bool]:
    """Runs a notebook and leaves in `folder` what it records, the notebook and its figures. seconds: that a cell and
    the audit may take, 0 for any number; gate: where it waits once it is loaded.

    Prints "cell DONE OF" as it goes. Returns the Markdown, what the notebook raised, and whether that was in its last
    cell, which asserts what the verdict above it says.
    """
    os.environ |= {"BI_AUDIT_OUT": str(folder.resolve()), "BI_AUDIT_GATE": gate}
    target = folder / report.NOTEBOOK
    notebook = about(path, parameters.get("candidate", "bi_kernels"))
    total = len(notebook.cells)
    limits = Limits(gate, *seconds)

    def started(cell, cell_index: int) -> None:
        limits.next_cell()
        print("cell", cell_index, total, flush=True)

    error = ""
    try:
        how = {"kernel_name": KERNEL, "progress_bar": False, "on_cell_start": started}
        papermill.execute_notebook(notebook, str(target), parameters, **how)
    except PapermillExecutionError as failed:
        if failed.ename == "KeyboardInterrupt" and not limits.exceeded:
            raise KeyboardInterrupt from None
        error = limits.exceeded or f"{failed.ename}: {failed.evalue}"
    except Exception as failed:  # the kernel died: what it had recorded is on disk
        error = limits.exceeded or f"{type(failed).__name__}: {failed}"
    if not target.exists():
        return f"# {title}\n", error, False
    executed = nbformat.read(target, as_version=4)
    clean(executed)
    nbformat.write(executed, target)
    body, figures = report.markdown(executed, name)
    for file, data in figures.items():
        (folder / file).write_bytes(data)
    return body, error, report.raised(executed.cells[-1])
