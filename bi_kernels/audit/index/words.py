"""A document's words are those of the notebook that stands here; its numbers stay those of its run.

Where a notebook has other text than when a document was made, and the same code, the document is written anew of what
its run had put out. Where a cell of code differs it stays as it is, and its sources say so. So is the page of mutants,
where what writes it or the file of equivalents is another by now, and all else is what they were judged with.
"""

import ast
import json
from pathlib import Path

from bi_kernels.audit.bench import goals
from bi_kernels.audit.evidence.answer import led
from bi_kernels.audit.evidence.limits import promised
from bi_kernels.audit.evidence.verdicts import read_rows
from bi_kernels.audit.index import sources

EXECUTED = "notebook.ipynb"
GIVEN, MARKED = "injected-parameters", "papermill-error-cell-tag"  # cells that papermill put in, by tag


def follow(folder: Path) -> bool:
    """Writes a document anew where its notebook's text is another by now and its code is not; returns whether it
    did."""
    executed, notebook = folder / EXECUTED, _notebook(folder)
    if notebook is None or not executed.is_file():
        return False
    import nbformat  # noqa: PLC0415 (what makes documents takes a second to load)

    from bi_kernels.audit.runs import documents  # noqa: PLC0415

    ran = nbformat.read(executed, as_version=4)
    given = [cell for cell in ran.cells if GIVEN in cell.metadata.get("tags", [])]
    old = {_said(cell): cell for cell in ran.cells if not {GIVEN, MARKED} & {*cell.metadata.get("tags", [])}}
    now = documents.about(notebook, _candidate(given)).cells
    lost = [said for cell in now if cell.cell_type == "code" and (said := _said(cell)) not in old]
    stopped = any(_errors(cell) for cell in [*old.values()][:-1])
    if lost or stopped:
        return False
    if [*old] == [*map(_said, now)]:  # another cell has changed, which this document has not
        _record(folder, notebook)
        return False
    for cell in now:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = old[_said(cell)].outputs, old[_said(cell)].execution_count
    at = next((i for i, cell in enumerate(now) if "parameters" in cell.metadata.get("tags", [])), -1) + 1
    ran.cells = [*now[:at], *given, *now[at:]]
    whole = nbformat.writes(ran)
    if _errors(ran.cells[-1]):  # what the last assert says, which the verdict above it has said
        ran.cells[-1].outputs = []
    body, figures = documents.document(ran, folder.name)
    for file in folder.glob(f"{folder.name}_*.png"):
        file.unlink()
    for name, data in figures.items():
        (folder / name).write_bytes(data)
    text = f"{led(body, read_rows(folder), goals.told(folder)).strip()}\n\n{promised(folder)}"
    (folder / "README.md").write_text(text.strip() + "\n", encoding="utf-8")
    _record(folder, notebook)
    executed.write_text(whole + "\n", encoding="utf-8")  # last: who is interrupted before it begins again
    return True


def follow_mutants(folder: Path) -> bool:
    """Writes a document of mutants anew where nothing but its page is another by now; returns whether it did."""
    file = folder / sources.FILE
    recorded = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    place = folder / "provenance.json"
    made = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
    if not recorded or sum(sources.changed(recorded, made).values(), []) != [sources.PAGE]:
        return False
    from bi_kernels.audit.mutants import document  # noqa: PLC0415 (all mutants are made for it: ten seconds)

    document.again(folder)
    now = recorded | {sources.PAGE: sources.package(of_mutants=True)[sources.PAGE]}
    file.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    return True


def _record(folder: Path, notebook: Path) -> None:
    """Writes that a document is of a notebook as it stands here."""
    recorded = json.loads((folder / sources.FILE).read_text(encoding="utf-8"))
    if recorded[notebook.name] != (now := sources.code(notebook)):
        said = json.dumps(recorded | {notebook.name: now}, indent=1)
        (folder / sources.FILE).write_text(said + "\n", encoding="utf-8")


def _notebook(folder: Path) -> Path | None:
    """Returns the notebook that a document was made of, as it stands here."""
    recorded = folder / sources.FILE
    names = json.loads(recorded.read_text(encoding="utf-8")) if recorded.is_file() else {}
    places = (place / name for place in sources.NOTEBOOKS for name in names if name.endswith(".ipynb"))
    return next((path for path in places if path.is_file()), None)


def _said(cell) -> tuple[str, str, str]:
    return cell.id, cell.cell_type, cell.source


def _errors(cell) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", []))


def _candidate(given: list) -> str:
    """Returns the candidate of a run, by the cell of the parameters that it was given."""
    told = [s for cell in given for s in ast.parse(cell.source).body if isinstance(s, ast.Assign)]
    return next((ast.literal_eval(s.value) for s in told if s.targets[0].id == "candidate"), "bi_kernels")
