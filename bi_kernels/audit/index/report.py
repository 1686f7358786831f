"""Writes an audit's report, README.md and its figures, from what a run left: the executed notebook, verdicts and
provenance. It changes none of these, so today's generator can write any report anew."""

import re
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bi_kernels.audit.axes import compares_bits
from bi_kernels.audit.findings import needs_fix, read_rows
from bi_kernels.audit.index import goals
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.limits import promised
from bi_kernels.audit.report.sentences import headline

if TYPE_CHECKING:
    from nbformat import NotebookNode

NOTEBOOK, PAGE = "notebook.ipynb", "README.md"
FINDING = "finding.txt"  # plain sentences about others than this package, with which a report begins
NOT_SHOWN = {"papermill-error-cell-tag", "injected-parameters", "parameters", "setup"}  # tags of cells
STOPPED = "the notebook stopped: "  # how the row of an audit begins that did not run to its end
PNG, LONGEST = "image/png", 250  # characters of a sentence in a figure's alternative text
WITH_ALT = """{% extends 'markdown/index.md.j2' %}
{% block data_png %}
![{{ output.metadata['image/png'].alt }}]({{ output.metadata.filenames['image/png'] | path2url }})
{% endblock data_png %}"""


STOCK = "stock PyTorch (a control, not this package)"
AUDITOR = "what the auditor says of third-party ops"  # which the audit zoo judges
ON_INTERPRETER = "On Triton's interpreter: no statement about a GPU."


def subject(rows: list[dict]) -> str:
    """Names in Markdown what a report judges, '' where that is this package's ops."""
    found = {r["candidate"] for r in rows if not r["control"]} - {"", "bi_kernels"}
    name = found.pop() if len(found) == 1 else ""
    return {"torch": STOCK, "zoo": AUDITOR, "": ""}.get(name, escape.code(name))


def interpreted(rows: list[dict]) -> str:
    """Returns the sentence that a report on Triton's interpreter ends its first ones with, '' of any other."""
    return ON_INTERPRETER if any(r["device"] == "interpreter" for r in rows) else ""


class Lead(NamedTuple):
    """The sentences under a report's title, which its line in the index repeats; '' where there is none."""

    finding: str  # about others, which no verdict of this package is about
    verdict: str
    goals: str


def lead(folder: Path, rows: list[dict]) -> Lead:
    """Returns the sentences on a report's rows and on its goals. Goals are left out where a row needs a fix; a report
    that compares no bits has only goals."""
    met, found = "" if needs_fix(rows) else goals.read_summary(folder), finding(folder)
    verdict = f"{escape.text(headline(rows))}." if compares_bits(rows) or not met else ""
    return Lead(found, f"This package's kernels: {verdict}" if found and verdict else verdict, met)


def finding(folder: Path) -> str:
    """Returns what an audit found out about others, in Markdown: the sentences that it left in a file, if any."""
    file = folder / FINDING
    return escape.text(file.read_text(encoding="utf-8").strip()) if file.is_file() else ""


def page(body: str, folder: Path, rows: list[dict], place: Path | None = None) -> str:
    """Returns the text of README.md. body: the notebook as Markdown; folder: where the evidence is; place: where the
    report will stand, if elsewhere."""
    title, _, rest = body.strip().partition("\n")
    first, whose = lead(folder, rows), subject(rows)
    title = f"# {_begun(whose)}: {title.lstrip('# ')}" if whose not in ("", AUDITOR) else title
    judge = ", judged by this package's contract" * (whose == STOCK)
    verdict = f"{_begun(whose)}{judge}: {first.verdict}" if whose in (STOCK, AUDITOR) else first.verdict
    bold, plain = (first.finding, verdict) if first.finding else (verdict, "")
    sentences = " ".join(filter(None, (f"**{bold}**" * bool(bold), plain, first.goals, interpreted(rows))))
    why = next((r["detail"] for r in rows if not r["op"] and r["detail"].startswith(STOPPED)), "")
    stopped = f"**The audit stopped here:** {escape.code(why.removeprefix(STOPPED)[:300])}" * bool(why)
    parts = [title, sentences, rest.strip(), stopped, promised(place or folder)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _begun(text: str) -> str:
    return text[:1].upper() + text[1:]


def markdown(notebook: "NotebookNode", name: str) -> tuple[str, dict[str, bytes]]:
    """Returns an executed notebook as Markdown without its code, and its figures by file name."""
    from jinja2 import DictLoader  # noqa: PLC0415 (as nbconvert)
    from nbconvert import MarkdownExporter  # noqa: PLC0415 (it takes a second to load)
    from traitlets.config import Config  # noqa: PLC0415

    notebook = deepcopy(notebook)
    if raised(notebook.cells[-1]):  # it asserts what the verdict above it says
        notebook.cells[-1].outputs = []
    describe(notebook)
    config = Config()
    config.MarkdownExporter.exclude_input = True
    config.MarkdownExporter.preprocessors = ["nbconvert.preprocessors.TagRemovePreprocessor"]
    config.TagRemovePreprocessor.remove_cell_tags = NOT_SHOWN
    config.ExtractOutputPreprocessor.output_filename_template = name + "_{cell_index}_{index}{extension}"
    template = {"template_file": "with_alt", "extra_loaders": [DictLoader({"with_alt": WITH_ALT})]}
    body, resources = MarkdownExporter(config=config, **template).from_notebook_node(notebook)
    return body, resources["outputs"]


def describe(notebook: "NotebookNode") -> None:
    """Gives every figure an alternative text: its own title, which `figures` recorded, else the heading above it and
    the sentence below that heading."""
    above, outputs = "", []
    for cell in notebook.cells:
        above = _described(cell.source if cell.cell_type == "markdown" else "") or above
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            above = _described(data.get("text/markdown", "")) or above
            if PNG in data:
                told = output.metadata.get(PNG, {}).get("alt", "")
                outputs.append((output, escape.text(told or above or "A figure without a title")))
    count, seen = Counter(alt for _, alt in outputs), Counter()
    for output, alt in outputs:
        seen[alt] += 1
        number = f" (figure {seen[alt]} of {count[alt]})" * (count[alt] > 1)
        output.metadata[PNG] = {**output.metadata.get(PNG, {}), "alt": f"{alt}{number}"}


def _described(text: str) -> str:
    """Returns the last heading of a text of Markdown, and the sentence that follows it; '' where it has no heading."""
    found = re.findall(r"^#+ +(.+)\n*([^\n#|!]*)", text, re.MULTILINE)
    if not found:
        return ""
    heading, paragraph = (re.sub(r"\[([^]]*)\]\([^)]*\)|[`*$\\]", r"\1", part).strip() for part in found[-1])
    sentence = re.split(r"(?<=[.?!]) ", paragraph)[0].rstrip(". ")
    return heading if not sentence or len(sentence) > LONGEST else f"{heading.rstrip('.?')}. {sentence}"


def raised(cell: "NotebookNode") -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", []))


def write(folder: Path) -> None:
    """Writes the report of a folder anew from its evidence. Where no notebook was left, the title stays."""
    notebook, text = folder / NOTEBOOK, folder / PAGE
    if notebook.is_file():
        import nbformat  # noqa: PLC0415 (as nbconvert)

        body, figures = markdown(nbformat.read(notebook, as_version=4), folder.name)
        for name, data in figures.items():
            (folder / name).write_bytes(data)
    else:
        lines = text.read_text(encoding="utf-8").splitlines() if text.is_file() else []
        body = next(iter(lines), f"# {folder.name}")
    text.write_text(page(body, folder, read_rows(folder)), encoding="utf-8")
