"""Writes an audit's report, README.md and its figures, from what a run left: the executed notebook, verdicts and
provenance. Today's generator can write any report anew that has its notebook; a published one has none."""

import json
import os
import re
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bi_kernels.audit.axes import compares_bits
from bi_kernels.audit.findings import (
    FINDING,
    NEEDS_FIX,
    PACKED,
    PASS,
    UNSUPPORTED,
    VERDICTS,
    Row,
    late,
    needs_fix,
    pack,
    read_rows,
    verdict_of,
)
from bi_kernels.audit.index import goals
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.markdown import MARK, folded, table
from bi_kernels.audit.report.sentences import headline

if TYPE_CHECKING:
    from nbformat import NotebookNode

NOTEBOOK, PAGE = "notebook.ipynb", "README.md"
# tags of cells; the report begins with the verdict and ends with the provenance
VERDICT = "nbval-check-output"
NOT_SHOWN = {"papermill-error-cell-tag", "injected-parameters", "parameters", "setup", VERDICT}
PROVENANCE = "run.provenance()"
UNSHOWN = "The notebook is not shown: "  # how the report of one begins that nbconvert cannot render
STOPPED = "the notebook stopped: "  # how the row of an audit begins that did not run to its end
PNG = "image/png"
WITH_ALT = """{% extends 'markdown/index.md.j2' %}
{% block data_png %}
![{{ output.metadata['image/png'].alt }}]({{ output.metadata.filenames['image/png'] | path2url }})
{% endblock data_png %}"""


STOCK = "stock PyTorch (a control, not this package)"
ON_INTERPRETER = "On Triton's interpreter: no statement about a GPU."
LIMITS, READING = Path("docs", "limits.md"), Path("docs", "auditing.md")  # of a checkout, as is what follows
OURS = Path("bi_kernels", "contract.toml")
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def render(template: str, **given) -> str:
    """Returns the text of a template: no trailing blanks, and one empty line at a time."""
    text = "\n".join(line.rstrip() for line in TEMPLATES.get_template(template).render(**given).splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def promised(folder: Path) -> str:
    """Returns the link from a folder of a checkout to what is promised, and where; '' of any other folder."""
    return _linked(folder, "What is promised, and where", LIMITS)


def reading(folder: Path) -> str:
    """Returns the link from a folder of a checkout to how a report is read; '' of any other folder."""
    return _linked(folder, "How to read a report", READING, "#how-to-read-a-report")


def _linked(folder: Path, text: str, file: Path, heading: str = "") -> str:
    place = _path_to(file, folder)
    return f"[{text}]({place}{heading})." if place else ""


def _path_to(file: Path, folder: Path) -> str:
    """Returns where a file of the checkout lies that a folder is in, '' of any other folder."""
    folder = folder.resolve()
    for root in folder.parents:
        if (root / file).is_file() and (root / OURS).is_file():
            return Path(os.path.relpath(root / file, folder)).as_posix()
    return ""


def moved(body: str, folder: Path) -> str:
    """Returns a notebook's Markdown with its links to the checkout's files as the folder of a report has them."""

    def link(match: re.Match) -> str:
        place = _path_to(Path(match[2]), folder)
        return f"[{match[1]}]({place})" if place else match[1]

    return re.sub(r"\[([^\]\n]+)\]\(\.\./([\w./-]+)\)", link, body)


def subject(rows: list[dict]) -> str:
    """Names in Markdown what a report judges, '' where that is this package's ops."""
    found = {r["candidate"] for r in rows if not r["control"]} - {"", "bi_kernels"}
    name = found.pop() if len(found) == 1 else ""
    return {"torch": STOCK, "zoo": "", "": ""}.get(name, escape.code(name))


def counts(rows: list[dict]) -> tuple[str, str, str]:
    """Returns how many checks were made, how many of them need a fix, and how many controls were caught of how many."""
    controls = [r for r in rows if r["control"]]
    bad, count = len(needs_fix(r for r in rows if not r["control"])), len(rows) - len(controls)
    return f"{count:,}", f"{bad:,}", f"{sum(bool(r['caught']) for r in controls)} of {len(controls)}"


def counted(rows: list[dict]) -> str:
    """Says what `counts` returns."""
    checks, bad, caught = counts(rows)
    return f"{checks} check{'s' * (checks != '1')}, {bad} need a fix; controls caught: {caught}"


def conclusion(folder: Path) -> str:
    """Returns what an audit found out, in Markdown: what its run left in a file."""
    file = folder / FINDING
    return escape.text(file.read_text(encoding="utf-8").strip()) if file.is_file() else ""


def finding(folder: Path, rows: list[dict]) -> str:
    """Returns what a report says of its rows and goals, in Markdown. Goals are left out where a row needs a fix;
    a report that compares no bits has only goals."""
    met = "" if needs_fix(rows) else goals.summary(goals.read(folder))
    said = f"{escape.text(headline(rows))}." if compares_bits(rows) or not met else ""
    said = f"This package's kernels: {said}" if said and (folder / FINDING).is_file() else _begun(said)
    return " ".join(filter(None, (said, met)))


def _begun(text: str) -> str:
    return text[:1].upper() + text[1:]


def verdict(folder: Path, rows: list[dict]) -> str:
    """Returns the verdict, '' of a benchmark that passes: its goals are no verdict."""
    word = verdict_of(rows)
    return "" if word == PASS and (folder / goals.FILE).exists() and not compares_bits(rows) else word


def title(folder: Path, rows: list[dict]) -> str:
    """Returns in a few words what a report found."""
    own = [r for r in rows if not r["control"]]
    bad = {(r["op"], r["case"], r["dtype"]) for r in needs_fix(own)}
    if any(not op for op, *_ in bad):
        return "the audit stopped"
    if bad:
        judged = {(r["op"], r["case"], r["dtype"]) for r in own if r["verdict"] != UNSUPPORTED}
        return f"{len(bad)} of {len(judged)} need a fix" if len(judged) > 1 else "needs a fix"
    if verdict_of(rows) == NEEDS_FIX:
        return "a control was missed" if needs_fix(rows) else "nothing was judged"
    if verdict_of(rows) == UNSUPPORTED:
        return "time was up" if late(rows) else "nothing could be judged"
    if said := conclusion(folder):
        return said[0].lower() + re.split(r"[:,;.](?:\s|$)", said[1:])[0]
    if compares_bits(rows):
        return "every bit agrees"
    return goals.counted(goals.read(folder)) or "every check passes"


def page(body: str, folder: Path, rows: list[dict], place: Path | None = None) -> str:
    """Returns the text of README.md. body: the notebook as Markdown; folder: where the evidence is; place: where the
    report will stand, if elsewhere."""
    heading, _, rest = moved(body, place or folder).strip().partition("\n")
    name, _, question = heading.lstrip("# ").partition(": ")
    made = folder / "provenance.json"
    fields = json.loads(made.read_text(encoding="utf-8")) if made.is_file() else {}
    whose = subject(rows)
    return render(
        "report.md.jinja",
        name=f"{name}, {whose}" if whose else name,
        title=title(folder, rows),
        question=_begun(question),
        verdict=MARK[word] + f" **{word}**: " if (word := verdict(folder, rows)) else "",
        finding=f"{conclusion(folder)} {finding(folder, rows)}".strip(),
        counted=counted(rows),
        interpreted=ON_INTERPRETER if any(r["device"] == "interpreter" for r in rows) else "",
        command=fields.pop("command", ""),
        evidence=[escape.link(name, name) for name in (VERDICTS, PACKED, NOTEBOOK) if (folder / name).is_file()],
        rest=rest.strip(),
        provenance=folded("Provenance", table([{"": k, "value": escape.text(v)} for k, v in fields.items()])),
        promised=promised(place or folder),
    )


def markdown(notebook: "NotebookNode", name: str) -> tuple[str, dict[str, bytes]]:
    """Returns an executed notebook as Markdown without its code, and its figures by file name."""
    from jinja2 import DictLoader  # noqa: PLC0415 (as nbconvert)
    from nbconvert import MarkdownExporter  # noqa: PLC0415 (it takes a second to load)
    from traitlets.config import Config  # noqa: PLC0415

    notebook = deepcopy(notebook)
    for cell in notebook.cells:  # it stands at the end of the report
        if PROVENANCE in cell.source:
            cell.outputs = []
    if raised(notebook.cells[-1]):  # it asserts what the verdict above it says
        notebook.cells[-1].outputs = []
    for i, cell in reversed([*enumerate(notebook.cells)][1:]):  # a heading of the verdict alone, which is not shown
        if VERDICT in cell.metadata.get("tags", ()) and notebook.cells[i - 1].cell_type == "markdown":
            del notebook.cells[i - 1]
    describe(notebook)
    config = Config()
    config.MarkdownExporter.exclude_input = True
    config.MarkdownExporter.preprocessors = ["nbconvert.preprocessors.TagRemovePreprocessor"]
    config.TagRemovePreprocessor.remove_cell_tags = NOT_SHOWN
    config.ExtractOutputPreprocessor.output_filename_template = name + "_{cell_index}_{index}{extension}"
    template = {"template_file": "with_alt", "extra_loaders": [DictLoader({"with_alt": WITH_ALT})]}
    body, resources = MarkdownExporter(config=config, **template).from_notebook_node(notebook)
    return body, resources["outputs"]


def check_templates() -> None:
    """Raises ValueError where nbconvert finds no template for Markdown, as where its data was installed elsewhere."""
    from nbformat.v4 import new_markdown_cell, new_notebook  # noqa: PLC0415 (as nbconvert)

    try:
        markdown(new_notebook(cells=[new_markdown_cell()]), "")
    except ValueError as error:
        raise ValueError(
            f"nbconvert: {_briefly(error)}; set JUPYTER_PATH to the share/jupyter of its installation"
        ) from None


def _briefly(error: Exception) -> str:
    """Returns what an error says, without the folders that nbconvert lists."""
    return re.split(" found in|\n", str(error))[0]


def plain(title: str, rows: list[dict], why: Exception) -> str:
    """Returns the Markdown of a report whose notebook cannot be shown: the tables of its rows."""
    from bi_kernels.audit.report import tables  # noqa: PLC0415 (pandas takes a second to load)

    of = [Row(**row) for row in rows]
    parts = [f"# {title}", f"{UNSHOWN}{type(why).__name__}: {_briefly(why)}"]
    parts += ["## Every op", tables.by_op(of).data, tables.drifts(of).data, "## Controls", tables.controls(of).data]
    return "\n\n".join(parts)


def describe(notebook: "NotebookNode") -> None:
    """Gives every figure an alternative text: its own title, which `figures` recorded, else the heading above it."""
    above = "A figure without a title"
    for cell in notebook.cells:
        above = _heading(cell.source if cell.cell_type == "markdown" else "", above)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            above = _heading(data.get("text/markdown", ""), above)
            if PNG in data:
                own = output.metadata.get(PNG, {})
                output.metadata[PNG] = {**own, "alt": escape.text(own.get("alt") or above)}


def _heading(text: str, above: str) -> str:
    """Returns the last heading of a text of Markdown, `above` where it has none."""
    found = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\([^)]*\)|[`*$\\]", r"\1", found[-1]).strip() if found else above


def raised(cell: "NotebookNode") -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", []))


def publish(folder: Path) -> None:
    """Packs the verdicts and benchmarks of a report, has it say so, and drops its notebook, which any run makes again;
    but not one that the report could not show. What was interrupted goes on where it stopped."""
    text = (folder / PAGE).read_text(encoding="utf-8")
    for path in (folder / VERDICTS, *folder.glob("*.jsonl")):
        if path.is_file():
            pack(path)
            text = text.replace(f"`{path.name}`", f"`{path.name}.xz`")
    text = text.replace(f", {escape.link(NOTEBOOK, NOTEBOOK)}", "")
    text = text.replace(escape.link(VERDICTS, VERDICTS), escape.link(PACKED, PACKED))
    (folder / PAGE).write_text(text, encoding="utf-8")
    if UNSHOWN not in text:
        (folder / NOTEBOOK).unlink(missing_ok=True)


def write(folder: Path) -> None:
    """Writes the report of a folder anew from its evidence. One without a notebook stays as it is: it was published."""
    if not (notebook := folder / NOTEBOOK).is_file():
        return
    import nbformat  # noqa: PLC0415 (as nbconvert)

    body, figures = markdown(nbformat.read(notebook, as_version=4), folder.name)
    for name, data in figures.items():
        (folder / name).write_bytes(data)
    (folder / PAGE).write_text(page(body, folder, read_rows(folder)), encoding="utf-8")
