"""A report is written from what its run left; the index says in a line what every report found, and what passes."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import nbformat
import pandas
import pytest
from conftest import ROW
from IPython.core.formatters import DisplayFormatter
from nbconvert import MarkdownExporter
from PIL import Image

from bi_kernels.audit import kernels
from bi_kernels.audit.axes import Kind
from bi_kernels.audit.findings import NEEDS_FIX, PACKED, PASS, UNSUPPORTED, Row, read_rows, verdict_of
from bi_kernels.audit.index import goals, page, report
from bi_kernels.audit.index.matrix import RELATION, cells, matrix
from bi_kernels.audit.index.picture import ALL, NOT_JUDGED, REFUSED, SOME, WRONG, draw
from bi_kernels.audit.options import LEVELS
from bi_kernels.audit.report.sentences import answer, headline
from bi_kernels.audit.runs.ci import fails
from bi_kernels.audit.runs.notebook import write
from bi_kernels.contract import DTYPES
from helpers import figures

ROW = replace(ROW, elements=64)
CONTROL = replace(ROW, control=True, caught=True, verdict=NEEDS_FIX)
ROOT = Path(__file__).parents[1]
REPORTS = sorted(path.parent for path in (ROOT / "audits").rglob(PACKED))


def document(place: Path, *rows: Row, title: str = "GEMM: does it drift?", **made: str) -> Path:
    place.mkdir(parents=True)
    (place / "README.md").write_text(f"# {title}\n\nText.\n")
    (place / "verdicts.json").write_text(json.dumps([r.json() for r in rows]))
    (place / "provenance.json").write_text(
        json.dumps({"device": "A GPU", "commit": "abc", "architecture": "sm_90"} | made)
    )
    return place


def line(text: str, name: str) -> str:
    (found,) = [row for row in text.splitlines() if row.startswith(f"| [{name}]")]
    return found


def test_a_line_says_what_was_found_by_how_many_checks_and_when(tmp_path):
    rows = [ROW, replace(ROW, relation="accuracy", threshold_share=0.99961, mismatches=None), CONTROL]
    document(tmp_path / "gpu" / "gemm", *rows, date="2026-11-26")
    failed = replace(ROW, verdict=NEEDS_FIX, mismatches=3)
    old = document(tmp_path / "gpu" / "old", failed, CONTROL)
    text = page.report(tmp_path)["README.md"]
    said = line(text, "gemm")
    assert "| ✅ " in said and "| 2026-11-26, abc, older kernels" in said and "| Does a row of the product" in said
    checks, bad, caught = report.counts([r.json() for r in rows])
    assert re.search(rf"\| {checks} *\| {bad} *\| {caught} *\|", said)
    assert "0.9996 × the bound" in said, "a share below the bound is not said to be the bound"
    assert "❌" in line(text, "old") and headline([failed])[1:] in line(text, "old")
    (old / "provenance.json").unlink()
    assert line(page.report(tmp_path)["README.md"], "old"), "its notebook stopped before"


def test_the_index_and_the_documents_have_one_word_for_one_thing():
    refused = replace(ROW, verdict=UNSUPPORTED)
    assert verdict_of([ROW, CONTROL]) == verdict_of([ROW, refused, CONTROL]) == PASS
    assert verdict_of([refused, CONTROL]) == verdict_of([refused]) == UNSUPPORTED
    late = replace(refused, layout="not run")
    assert verdict_of([ROW, late, CONTROL]) == UNSUPPORTED, "time was up"
    assert [fails([vars(ROW), vars(late)], [], level) for level in LEVELS] == [False, False, True, True]
    for wrong in (
        [ROW],
        [CONTROL],
        [],
        [ROW, replace(CONTROL, caught=False)],
        [replace(ROW, verdict=NEEDS_FIX), CONTROL],
    ):
        assert verdict_of(wrong) == NEEDS_FIX, wrong


def test_a_dtype_that_is_refused_as_the_contract_says_was_judged(tmp_path):
    refused = replace(ROW, relation="contract", layout="dtype", dtype="float8_e5m2", verdict=UNSUPPORTED)
    document(tmp_path / "gpu" / "dtype", ROW, refused, CONTROL)
    said = line(page.report(tmp_path)["README.md"], "dtype")
    assert "float8_e5m2" in said and "✅" in said


def test_goals_are_told_as_sizes_gains_and_losses_alike():
    def goal(what, kind, reached, met, **bar):
        return {"what": what, "goal": {"value": kind} | bar, "reached": reached, "met": met}

    found = [
        goal("norms", "ratio", 1.25, True, least=1.0),
        goal("decode", "times", 3.62, False, most=1.15),
        goal("a step", "times", 0.8, True, most=1.0),
        goal("a copy", "ratio", 1.004, True, least=1.0),
        goal("head", "TFLOP/s", 600.0, False, least=640),
        goal("dW", "ratio", 0.7, False, least=0.75),
        goal("dX", "ratio", 0.9, False, least=0.97),
        goal("four GPUs", "times", None, None, most=1.3),
    ]
    assert goals.summary(found) == (
        "Largest gain among the goals: norms, 1.250 × the peer's speed; a step, 0.800 × the peer's time. "
        "Farthest from its goal: decode, 3.620 × the peer's time (goal ≤ 1.15); dX, 0.900 × the peer's speed "
        "(goal ≥ 0.97); dW, 0.700 × the peer's speed (goal ≥ 0.75); and 1 more. "
        "✘ 3 of 7 goals met, 1 not measured in this run."
    )
    assert goals.summary(found[:1]) == (
        "Largest gain among the goals: norms, 1.250 × the peer's speed. ✔ 1 of 1 goals met."
    )
    assert goals.counted([]) == "" and goals.counted(found[-1:]) == "no goal was measured"
    assert goals.summary([]) == "" and goals.summary(found[-1:]).startswith("None of 1 goals was measured")


def test_goals_that_are_missed_have_no_tick_and_hide_no_verdict(tmp_path):
    place = document(tmp_path / "gpu" / "bench")
    (place / "goals.json").write_text(json.dumps([{"met": True}, {"met": False}]))

    def said(*rows: Row) -> str:
        (place / "verdicts.json").write_text(json.dumps([r.json() for r in rows]))
        return line(page.report(tmp_path)["README.md"], "bench")

    time, bits = said(replace(ROW, relation="timing"), CONTROL), said(ROW, CONTROL)
    assert "✘ 1 of 2 goals" in time and "✅" not in time and "✘ 1 of 2 goals" in bits and "✅" in bits
    assert "❌" in said(replace(ROW, verdict=NEEDS_FIX)) and "goals" not in said(replace(ROW, verdict=NEEDS_FIX))


def test_an_index_has_the_documents_beside_it_and_below(tmp_path):
    for place in ("gemm", "gpu/gemm", "gpu/deep/gemm"):
        document(tmp_path / place, ROW, CONTROL)
    page.write(tmp_path)
    links = lambda place: {*re.findall(r"^\| \[gemm\]\((.*?)\)", (tmp_path / place / "README.md").read_text(), re.M)}
    assert links(".") == {"gemm/README.md", "gpu/gemm/README.md", "gpu/deep/gemm/README.md"}
    assert links("gpu") == {"gemm/README.md", "deep/gemm/README.md"} and links("gpu/deep") == {"gemm/README.md"}


def test_the_first_sentence_tells_a_control_that_was_missed(tmp_path):
    document(tmp_path / "gpu" / "gemm", ROW, replace(CONTROL, caught=False))
    assert "**A GPU, 1 report: a control was missed; every bit" in page.report(tmp_path)["README.md"]
    late = replace(ROW, verdict=UNSUPPORTED, layout="not run", detail="time was up")
    refused = replace(ROW, relation="contract", layout="dtype", dtype="int8", verdict=UNSUPPORTED)
    document(tmp_path / "other" / "gemm", ROW, refused, late, CONTROL)
    (first,) = re.findall(r"^\*\*.*", page.report(tmp_path / "other")["README.md"], re.M)
    assert "int8" not in first and "time was up" in first, first


def test_folders_come_by_what_is_promised_there(tmp_path):
    document(tmp_path / "a-cpu" / "gemm", ROW, CONTROL, architecture="interpreter (bits are promised on sm_90 only)")
    document(tmp_path / "b-other" / "gemm", ROW, CONTROL, architecture="sm_80 (bits are promised on sm_90 only)")
    document(tmp_path / "c-torch" / "gemm", replace(ROW, candidate="torch"), CONTROL)
    document(tmp_path / "d-ours" / "gemm", ROW, CONTROL)
    found = [place.name for place in page.documents(tmp_path)]
    assert found == ["d-ours", "c-torch", "b-other", "a-cpu"]


def test_stock_pytorch_is_called_a_control_wherever_its_results_stand(tmp_path):
    stock = [replace(ROW, candidate="torch", verdict=NEEDS_FIX, mismatches=3), replace(CONTROL, candidate="broken")]
    page_of = lambda *rows: report.page("# GEMM: does it drift?", tmp_path, [r.json() for r in rows])
    assert page_of(*stock).splitlines()[0].startswith(f"# GEMM, {report.STOCK}: ")
    assert page_of(ROW, CONTROL).startswith("# GEMM: ") and page_of(replace(ROW, candidate="my.py:f")).startswith(
        "# GEMM, `my.py:f`: "
    )
    document(tmp_path / "gpu-torch" / "gemm", *stock)
    document(tmp_path / "gpu" / "gemm", ROW, CONTROL)
    files = page.report(tmp_path)
    headings = [row for row in files["README.md"].splitlines() if row.startswith("### ")]
    assert headings == ["### gpu", f"### gpu-torch: {report.STOCK}"] and "PyTorch" in files[page.PICTURE]


FAILED, MISSED = replace(ROW, verdict=NEEDS_FIX, mismatches=3), replace(CONTROL, caught=False)


@pytest.mark.parametrize(
    "rows, verdict",
    [
        ([ROW, CONTROL], PASS),
        ([FAILED, CONTROL], NEEDS_FIX),
        ([FAILED, replace(ROW, op="add")], NEEDS_FIX),
        ([ROW, MISSED], NEEDS_FIX),
        ([ROW], NEEDS_FIX),
        ([replace(ROW, verdict=UNSUPPORTED), CONTROL], UNSUPPORTED),
        ([replace(ROW, relation="accuracy", threshold_share=0.5), CONTROL], PASS),
        ([replace(ROW, op="", relation="", verdict=NEEDS_FIX, detail="it died")], NEEDS_FIX),
    ],
)
def test_a_report_begins_with_its_finding_one_verdict_and_one_number_of_checks(rows, verdict, tmp_path):
    (tmp_path / "provenance.json").write_text('{"commit": "abc", "command": "`bi-audit run gemm`"}')
    rows = [r.json() for r in rows]
    text = report.page("# GEMM: does it drift?\n\ntext", tmp_path, rows)
    title, _, counts, *_ = text.splitlines()
    assert report.ON_INTERPRETER in counts
    assert title == f"# GEMM: {report.title(tmp_path, rows)}" and report.counted(rows) in counts
    assert f"**{verdict}**" in counts and text.count("checks,") + text.count("check,") == 1
    places = [text.index(part) for part in ("`bi-audit run gemm`", "*Does it drift?*", "\ntext\n", "| commit | abc")]
    assert places == sorted(places)
    assert len({report.title(tmp_path, rows), "every bit agrees"}) == 1 + (verdict != PASS or "accuracy" in str(rows))


def test_of_several_ops_the_headline_tells_the_most_basic_cause():
    accuracy = replace(ROW, op="silu", relation="accuracy", verdict=NEEDS_FIX, threshold_share=7.0, mismatches=None)
    memory = replace(ROW, op="add", axes=[Kind.MEMORY], verdict=NEEDS_FIX, mismatches=3)
    rows = replace(ROW, op="linear", axes=[Kind.COUNT], rows=1, verdict=NEEDS_FIX, mismatches=3)
    assert f"linear o bf16: {answer([rows])}" in headline([accuracy, memory, rows])


def colors(svg: str) -> list[str]:
    """The colours of the cells, by op and column."""
    tree = ElementTree.fromstring(svg)
    filled = [part.get("style") or "" for part in tree.iter("{http://www.w3.org/2000/svg}path")]
    return [style.partition("fill: ")[2][:7] for style in filled if "stroke: #ffffff" in style and "fill: #" in style]


@pytest.mark.parametrize(
    "relation, dtype, column",
    [
        ("weights after training", "bf16", "gradient invariance"),
        ("localiser", "bf16", "forward invariance"),
        ("atomics-free", "all", "atomics-free"),
    ],
)
def test_every_relation_of_bits_has_its_cell(relation, dtype, column):
    (found,) = cells(replace(ROW, relation=relation, dtype=dtype, verdict=v).json() for v in (PASS, NEEDS_FIX)).values()
    dtypes = DTYPES if dtype == "all" else [dtype]
    assert {name: of for name, of in found.items() if of} == {column: dict.fromkeys(dtypes, NEEDS_FIX)}


def test_the_picture_has_a_colour_for_every_outcome_and_the_same_bytes_twice():
    rows = [replace(ROW, dtype=d) for d in ("bf16", "fp16", "fp32")]
    rows += [replace(ROW, op="some", dtype="bf16"), replace(ROW, op="some", dtype="fp16", verdict=UNSUPPORTED)]
    rows += [replace(ROW, op="one"), replace(ROW, op="other", dtype="float64", verdict=NEEDS_FIX)]
    rows += [replace(ROW, op="bad", dtype="bf16"), replace(ROW, op="bad", dtype="fp32", verdict=NEEDS_FIX)]
    rows += [replace(ROW, op="refused", verdict=UNSUPPORTED)]
    given = {"ours": cells(r.json() for r in rows), "other": {}}, "a title"
    svg = draw(*given)
    assert svg == draw(*given) and colors(svg) == [ALL, SOME, ALL, WRONG, WRONG, REFUSED], "what is not judged is none"
    assert ">3/3<" in svg and ">1/2<" in svg and ">1/1<" in svg and NOT_JUDGED in svg
    assert "3 of 5 pass" in svg and "0 of 0 pass" in svg, "refused is not judged"


def test_a_picture_is_of_two_folders_and_each_folder_has_an_index(tmp_path):
    document(tmp_path / "gpu" / "gemm", ROW, CONTROL)
    page.write(tmp_path)
    assert not list(tmp_path.rglob(page.PICTURE))
    document(tmp_path / "cpu" / "gemm", ROW, CONTROL)
    page.write(tmp_path)
    assert [path.parent for path in tmp_path.rglob(page.PICTURE)] == [tmp_path]
    assert "[gemm](gemm/README.md)" in (tmp_path / "cpu" / "README.md").read_text()
    assert f"]({page.PICTURE})" in (tmp_path / "README.md").read_text() and len(RELATION) == 8


@pytest.mark.parametrize("place, link", [("audits", "../docs"), ("audits/a/gemm", "../../../docs"), ("..", "")])
def test_reports_of_the_checkout_link_to_what_is_promised(place, link):
    said = report.promised(ROOT / place)
    assert f"]({link}/limits.md)" in said if link else not said


def test_a_report_of_other_kernels_or_another_contract_says_so(tmp_path):
    document(tmp_path / "gpu" / "now", ROW, CONTROL, kernels=kernels.digest())
    document(tmp_path / "gpu" / "other", ROW, CONTROL, kernels="0" * 12)
    document(tmp_path / "gpu" / "unknown", ROW, CONTROL)
    document(tmp_path / "torch" / "gemm", replace(ROW, candidate="torch", verdict=NEEDS_FIX), CONTROL)
    text = page.report(tmp_path)["README.md"]
    assert [page.OLDER in line(text, name) for name in ("now", "other", "unknown")] == [False, True, True]
    assert f"2 of 3 are of {page.OLDER}" in text and page.lead([], "") == ""
    assert text.splitlines()[4].startswith("**A GPU, 3 reports: every bit agrees.** 3 checks"), "stock has no part"


@pytest.mark.parametrize(
    "name, changes",
    [("ops/gemm/gemm.py", True), ("ops/gemm/cost.toml", True), ("contract.toml", True), ("launch.py", True)]
    + [("audit/cli.py", False), ("reference.py", False), ("model/decoder.py", False)],
)
def test_the_digest_is_of_kernels_what_they_import_and_the_contract(name, changes, tmp_path):
    for file in ("ops/gemm/gemm.py", "contract.toml", name):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")
    before = kernels.digest(tmp_path)
    (tmp_path / name).write_text("2")
    assert (kernels.digest(tmp_path) != before) == changes


def test_the_digest_has_every_module_that_an_op_imports():
    text = "".join(path.read_text() for path in (ROOT / "bi_kernels/ops").rglob("*.py"))
    modules = {*re.findall(r"^ *from bi_kernels\.(\w+)[\w.]* import", text, re.M)}
    modules |= {*re.findall(r"^ *from bi_kernels import (\w+)", text, re.M)} - {"reference", "reference_attention"}
    assert modules - {"reference", "reference_attention"} <= {*kernels.MODULES, "ops"}


def executed(*cells: str | dict) -> nbformat.NotebookNode:
    """A notebook of Markdown, and of what its cells of code put out."""
    new = nbformat.v4
    code = lambda data: new.new_code_cell("run()", outputs=[new.new_output("display_data", data)])
    return new.new_notebook(cells=[new.new_markdown_cell(c) if isinstance(c, str) else code(c) for c in cells])


PNG = "iVBORw0KGgo="


def test_a_report_is_written_anew_from_its_evidence_which_stays_as_it_is(tmp_path, bi_audit):
    place = document(tmp_path / "gpu" / "gemm", ROW, CONTROL)
    notebook = executed("# GEMM: does it drift?\n\nText.", "## A map", {"image/png": PNG}, "The end.")
    nbformat.write(notebook, place / report.NOTEBOOK)
    (place / "README.md").write_text("# Older words")
    kept = {path: path.read_bytes() for path in place.iterdir() if path.suffix != ".md"}
    assert bi_audit("report", tmp_path).returncode == 0
    text = (place / "README.md").read_text()
    assert answer([ROW])[1:] in text and text.index("*Does it drift?*\n\nText.") < text.index("The end.\n")
    assert "](gemm_2_0.png)" in text and (place / "gemm_2_0.png").is_file() and "run()" not in text
    assert {path: path.read_bytes() for path in kept} == kept
    assert "(gpu/gemm/README.md)" in (tmp_path / "README.md").read_text()


def test_a_published_report_packs_its_rows_and_stays_as_it_is(tmp_path, monkeypatch, bi_audit):
    """It was interrupted before the last of what it does, and goes on."""

    unlink = Path.unlink

    def interrupted(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".ipynb":
            raise KeyboardInterrupt
        unlink(path)

    place = document(tmp_path / "gpu" / "gemm", ROW, CONTROL, command="`bi-audit run gemm`")
    nbformat.write(executed("# GEMM: does it drift?\n\nText.", {"image/png": PNG}), place / report.NOTEBOOK)
    (place / "benchmark.jsonl").write_text('{"ms": 1}\n{"ms": 2}\n')
    report.write(place)
    rows, shown = read_rows(place), (place / "README.md").read_text()
    assert f"Evidence: [verdicts.json](verdicts.json), [{report.NOTEBOOK}]({report.NOTEBOOK})." in shown
    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report.publish(place)
    monkeypatch.undo()
    report.publish(place)
    kept = {path: path.read_bytes() for path in place.iterdir()}
    names = {"README.md", "gemm_1_0.png", "provenance.json", PACKED, "benchmark.jsonl.xz"}
    assert {path.name for path in kept} == names and read_rows(place) == rows
    assert f"Evidence: [{PACKED}]({PACKED})." in kept[place / "README.md"].decode()
    assert [*pandas.read_json(place / "benchmark.jsonl.xz", lines=True).ms] == [1, 2]
    assert bi_audit("report", tmp_path).returncode == 0
    assert {path: path.read_bytes() for path in place.iterdir()} == kept
    assert line((tmp_path / "README.md").read_text(), "gemm")
    (place / PACKED).write_bytes(kept[place / PACKED][:-9])
    done = bi_audit("report", tmp_path)
    assert done.returncode == 2 and f"{PACKED} holds no JSON" in done.err, "cut short"


def test_a_report_that_cannot_be_shown_has_its_rows_and_keeps_its_notebook(tmp_path, monkeypatch, bi_audit):
    """As where nbconvert was installed with its templates elsewhere."""

    def nowhere(*_):
        raise ValueError("No template 'markdown' found in the following paths:\n\t/somewhere")

    monkeypatch.setattr(MarkdownExporter, "get_template_names", nowhere)
    with pytest.raises(ValueError, match=r"^nbconvert: No template 'markdown'; set JUPYTER_PATH"):
        report.check_templates()
    monkeypatch.chdir(tmp_path)
    refused = bi_audit("run", "dtype", "--device", "cpu", "--publish")
    assert refused.returncode == 2 and "set JUPYTER_PATH" in refused.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing has run"
    place = document(tmp_path / "gpu" / "gemm", ROW, CONTROL)
    nbformat.write(executed("# GEMM: does it drift?\n\nText."), place / report.NOTEBOOK)
    write(place, place, "GEMM: does it drift?", {})
    report.publish(place)
    text = (place / "README.md").read_text()
    assert "The notebook is not shown: ValueError: No template 'markdown'\n" in text and "somewhere" not in text
    assert "\n## Every op\n" in text and "1 of 1 controls caught" in text
    assert (place / report.NOTEBOOK).is_file() and (place / PACKED).is_file()


def test_a_figures_alternative_text_is_its_own_title_or_what_stands_above_it(tmp_path):
    told = nbformat.v4.new_output("display_data", {"image/png": PNG}, metadata={"image/png": {"alt": "2 of 3 drift"}})
    notebook = executed("# GEMM", "## A [map](a.md)\n\nElements that *differ*: by M. More.", {"image/png": PNG})
    notebook.cells += executed(
        {"image/png": PNG}, "Of no heading", {"text/markdown": "# Speed"}, {"image/png": PNG}
    ).cells
    notebook.cells[-1].outputs.append(told)
    body, _ = report.markdown(notebook, "gemm")
    wanted = ["A map", "A map", "Speed", "2 of 3 drift"]
    assert re.findall(r"!\[(.*)\]\(gemm_\d_\d.png\)", body) == wanted


def test_a_heading_of_the_verdict_alone_is_not_shown():
    notebook = executed("# GEMM", "## Every op", {"text/markdown": "a table"}, "## Status")
    notebook.cells.append(nbformat.v4.new_code_cell("run.verdict()", metadata={"tags": [report.VERDICT]}))
    body, _ = report.markdown(notebook, "gemm")
    assert "Every op" in body and "a table" in body and "Status" not in body


def test_a_report_about_others_is_titled_by_what_it_found(tmp_path):
    place, rows = document(tmp_path / "recipes", ROW, CONTROL), [ROW.json(), CONTROL.json()]
    assert report.title(place, rows) == "every bit agrees"
    (place / report.FINDING).write_text("2 of 3 settings drift: a, b. None else.")
    assert report.title(place, rows) == "2 of 3 settings drift"


def test_a_published_page_names_a_file_as_it_is_packed(tmp_path):
    place = document(tmp_path / "bench", ROW, CONTROL, title="Speed: fast?\n\nA line of `benchmark.jsonl` each")
    (place / "benchmark.jsonl").write_text("{}\n")
    report.publish(place)
    assert "`benchmark.jsonl.xz`" in (place / "README.md").read_text() and (place / "benchmark.jsonl.xz").is_file()


def test_a_dtype_of_which_no_bits_were_compared_is_told_so():
    half = [replace(ROW, dtype="fp16", relation="accuracy").json(), replace(ROW, dtype="fp16").json()]
    assert "✅ forward accuracy alone" in matrix([ROW.json(), half[0]])
    assert "alone" not in matrix([ROW.json(), *half]) and "alone" not in matrix(half[:1])


def test_jupyter_keeps_the_title_of_a_figure_with_it(monkeypatch):
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    monkeypatch.setattr(figures, "shell", lambda: shell)
    figures.show_small()
    figure, axes = plt.subplots(1, 2)
    axes[0].set_title("one", loc="left")
    axes[1].set_title("the\nother")
    shown = lambda: shell.display_formatter.format(figure)[1]["image/png"]["alt"]
    assert shown() == "one; the other"
    figure.suptitle("both")
    assert shown() == "both"
    small = base64.b64decode(shell.display_formatter.format(figure)[0]["image/png"])
    assert Image.open(io.BytesIO(small)).mode == "P", "one byte a pixel"
    plt.close(figure)


def test_every_figure_of_a_committed_report_says_what_it_shows():
    found = [alt for path in (ROOT / "audits").rglob("*.md") for alt in re.findall(r"!\[(.*)\]", path.read_text())]
    assert len(found) > 60 and not [alt for alt in found if len(alt.split()) < 3]


@pytest.mark.parametrize("place", REPORTS, ids=lambda place: place.relative_to(ROOT / "audits").as_posix())
def test_a_committed_report_shows_its_figures_and_counts_its_evidence(place):
    text, rows = (place / "README.md").read_text(encoding="utf-8"), pandas.read_json(place / PACKED)
    assert {path.name for path in place.glob("*.png")} == {*re.findall(r"\]\((\w+\.png)\)", text)}
    found = read_rows(place)
    assert report.promised(place) in text and report.counted(found) in text
    assert [*rows["verdict"]] == [r["verdict"] for r in found] and not (place / report.NOTEBOOK).exists()


def test_the_committed_index_has_every_report():
    text = (ROOT / "audits" / "README.md").read_text(encoding="utf-8")
    places = [path.parent for path in (ROOT / "audits").rglob("provenance.json")]
    links = [f"({place.relative_to(ROOT / 'audits').as_posix()}/README.md)" for place in places]
    assert all(link in text for link in links) and len(links) > 30
