"""Runs audit notebooks through papermill and turns each into a document: Markdown, figures, verdicts, notebook.

A document is built beside its place and moved there whole, so an interrupted run leaves the finished ones intact;
what an unfinished one had recorded stays beside it, hidden.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nbformat import from_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bi_kernels.audit.evidence.verdicts import read_rows, write_rows

KERNEL = "python3"


@dataclass(frozen=True)
class Audit:
    name: str
    notebook: Path
    title: str
    only_named: bool = False  # not among those that run when none is named


def audits() -> dict[str, Audit]:
    """The audit notebooks, in reading order: `3_gemm.ipynb` is the audit `gemm`."""
    package = Path(__file__).parents[1]
    folder = next(d for d in (package / "notebooks", package.parent / "notebooks") if d.is_dir())
    found = {}
    for path in sorted(folder.glob("[0-9]*_*.ipynb")):
        notebook, name = json.loads(path.read_text(encoding="utf-8")), path.stem.split("_", 1)[1]
        first = "".join(notebook["cells"][0]["source"])
        found[name] = Audit(
            name,
            path,
            first.splitlines()[0].lstrip("# "),
            notebook["metadata"].get("bi_audit", {}).get("only_named", False),
        )
    return found


def of_audit(name: str, parameters: dict) -> dict:
    """The parameters that an audit has: `any` and `zoo` have neither dtype nor shapes."""
    from bi_kernels.audit.callables.session import PARAMETERS

    return {k: v for k, v in parameters.items() if k in PARAMETERS.get(name, parameters)}


def clean(notebook) -> None:
    """Drops what names the machine or the hour: papermill's records, warnings of libraries, and paths in outputs."""
    notebook.metadata.pop("papermill", None)
    roots = sorted(
        {str(Path.cwd()), str(Path.home()), sys.prefix, str(Path(__file__).parents[2])}, key=len, reverse=True
    )
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell["id"] = "injected-parameters"  # else another one in every run
        text = json.dumps(cell.get("outputs", []))
        for root in roots:
            text = text.replace(json.dumps(root)[1:-1], "…")
        if "outputs" in cell:
            cell.outputs = [from_dict(o) for o in json.loads(text) if o.get("name") != "stderr"]


def document(notebook, name: str) -> tuple[str, dict[str, bytes]]:
    """(Markdown without code, figures by file name)."""
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    config = Config()
    config.MarkdownExporter.exclude_input = True
    config.MarkdownExporter.preprocessors = ["nbconvert.preprocessors.TagRemovePreprocessor"]
    config.TagRemovePreprocessor.remove_cell_tags = {
        "papermill-error-cell-tag",
        "injected-parameters",
        "parameters",
        "setup",
    }
    config.ExtractOutputPreprocessor.output_filename_template = name + "_{cell_index}_{index}{extension}"
    body, resources = MarkdownExporter(config=config).from_notebook_node(notebook)
    return body, resources["outputs"]


def execute(audit: Audit, parameters: dict, folder: Path, progress=lambda done, of: None) -> bool:
    """Runs one audit and writes its document into `folder`; whether the notebook passed."""
    import nbformat
    import papermill
    from papermill.exceptions import PapermillExecutionError

    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    os.environ["BI_AUDIT_OUT"] = str(partial.resolve())
    target = partial / "notebook.ipynb"
    total = len(json.loads(audit.notebook.read_text(encoding="utf-8"))["cells"])
    error, finished = "", False
    try:
        papermill.execute_notebook(
            str(audit.notebook),
            str(target),
            parameters,
            kernel_name=KERNEL,
            progress_bar=False,
            on_cell_start=lambda cell, cell_index: progress(cell_index, total),
        )
    except PapermillExecutionError as failed:
        if failed.ename == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        error = f"{failed.ename}: {failed.evalue}"
    except Exception as failed:  # the kernel died: what it had recorded is on disk
        error = f"{type(failed).__name__}: {failed}"
    if target.exists():
        notebook = nbformat.read(target, as_version=4)
        clean(notebook)
        nbformat.write(notebook, target)
        if any(o.output_type == "error" for o in notebook.cells[-1].outputs):
            # the last cell only asserts what the verdict above it says
            notebook.cells[-1].outputs, finished = [], True
        body, figures = document(notebook, audit.name)
        for name, data in figures.items():
            (partial / name).write_bytes(data)
    else:
        body = f"# {audit.title}\n"
    return publish(audit, parameters, folder, body, error, finished)


def stopped(audit: str, why: str, candidate: str = "") -> dict:
    """The row of an audit that did not run to its end; it names neither an op nor a relation."""
    from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, Row

    return Row(audit, "", "", candidate, "", "", "", "", "", "", 0, NEEDS_FIX, detail=why).json()


def publish(audit: Audit, parameters: dict, folder: Path, body: str, error: str = "", finished: bool = False) -> bool:
    """Moves what was built for `folder` into its place; whether the audit passed.

    error: what the notebook raised; finished: in its last cell, which asserts what the verdict says.
    """
    partial = _partial(folder)
    verdicts = partial / "verdicts.json"
    rows = read_rows(partial)
    error = error.strip().splitlines()[0] if error.strip() else error
    if error and not (finished and needs_fix(rows)):
        rows.append(stopped(audit.name, f"the notebook stopped: {error}", parameters.get("candidate", "")))
    write_rows(verdicts, rows)
    if error and not finished:
        body += f"\n\n**The audit stopped here:** `{error[:300]}`\n"
    (partial / "README.md").write_text(body.strip() + "\n", encoding="utf-8")
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    for done in (old, _interrupted(folder)):
        shutil.rmtree(done, ignore_errors=True)
    return not error and not needs_fix(rows)


def _partial(folder: Path) -> Path:
    """Where the document that will be `folder` is built."""
    return folder.with_name(f".{folder.name}.partial")


def _interrupted(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.interrupted")


def _keep(folder: Path, console: Console) -> None:
    """Of an audit that is interrupted, what it had recorded stays, hidden beside its document."""
    partial, kept = _partial(folder), _interrupted(folder)
    if read_rows(partial):
        shutil.rmtree(kept, ignore_errors=True)
        partial.rename(kept)
        console.print(
            f"{folder.name}: what it had recorded is in {kept}", markup=False, highlight=False, soft_wrap=True
        )
    shutil.rmtree(partial, ignore_errors=True)


def needs_fix(rows: list[dict]) -> list[dict]:
    """Rows that need a fix, and controls that were missed."""
    return [r for r in rows if (not r["caught"] if r["control"] else r["verdict"] == "needs-fix")]


def collect(folder: Path) -> list[dict]:
    """The rows of every document in `folder`, also written to its verdicts.json."""
    rows = [
        r for path in sorted(folder.glob("[!.]*/verdicts.json")) for r in json.loads(path.read_text(encoding="utf-8"))
    ]
    write_rows(folder / "verdicts.json", rows)
    return rows


def run(names: list[str], parameters: dict, out: Path, jobs: int, console: Console, seconds: dict[str, float]) -> None:
    """Runs audits, `jobs` at a time, each in a process of its own.

    seconds: gets how long each took as it finishes, so that a caller that is interrupted knows which did.
    """
    every, children = audits(), []
    columns = (
        TextColumn("{task.description:14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[word]}"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(name, total=None, word="waiting") for name in names}

        def one(name: str) -> None:
            start = time.monotonic()
            order = json.dumps({"audit": name, "parameters": of_audit(name, parameters), "folder": str(out / name)})
            child = subprocess.Popen(
                [sys.executable, "-m", "bi_kernels.audit.runner", order],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            children.append(child)
            errors: list[str] = []
            reader = threading.Thread(target=lambda: errors.extend(child.stderr), daemon=True)
            reader.start()
            for line in child.stdout:
                if line.startswith("cell "):
                    done, of = map(int, line.split()[1:])
                    progress.update(tasks[name], completed=done, total=of, word="running")
            passed = child.wait() == 0
            reader.join(timeout=5)
            if child.returncode in (-signal.SIGINT, -signal.SIGTERM):
                return
            if child.returncode not in (0, 1):
                console.print("".join(errors[-15:]), markup=False, highlight=False)
                _partial(out / name).mkdir(parents=True, exist_ok=True)
                publish(
                    every[name],
                    parameters,
                    out / name,
                    f"# {every[name].title}",
                    f"the process ended with status {child.returncode}",
                )
            seconds[name] = time.monotonic() - start
            total = next(t.total for t in progress.tasks if t.id == tasks[name]) or 1
            progress.update(
                tasks[name], completed=total, total=total, word="[green]pass[/]" if passed else "[red]needs-fix[/]"
            )

        with ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(one, reversed(names)))  # the last of the reading order take longest
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in children:
                    child.send_signal(signal.SIGTERM)
                    child.wait()
                for name in names:
                    _keep(out / name, console)
                raise


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    try:
        ok = execute(
            audits()[task["audit"]],
            task["parameters"],
            Path(task["folder"]),
            lambda done, of: print("cell", done, of, flush=True),
        )
    except Exception:
        traceback.print_exc()
        raise SystemExit(3) from None
    raise SystemExit(0 if ok else 1)
