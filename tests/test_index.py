"""The index says in a line what every document found, of when and of which sources, and draws what passes where."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

from bi_kernels.audit.evidence import limits
from bi_kernels.audit.evidence.answer import headline
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, UNSUPPORTED, Row, verdict_of
from bi_kernels.audit.index import page, sources, words
from bi_kernels.audit.index.matrix import RELATION, cells
from bi_kernels.audit.index.picture import NOT_JUDGED, PASSES, REFUSED, WRONG, draw
from bi_kernels.contract import DTYPES

ROW = Row("gemm", "linear", "o", "bi_kernels", "bf16", "gpu", "invariance", "rows", "300", "normal", 9, PASS, 0, 64)
CONTROL = replace(ROW, control=True, caught=True, verdict=NEEDS_FIX)
ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "1_dtype.ipynb"


def document(place: Path, *rows: Row, title: str = "GEMM: does it drift?", **made: str) -> Path:
    place.mkdir(parents=True)
    (place / "README.md").write_text(f"# {title}\n\nText.\n")
    (place / "verdicts.json").write_text(json.dumps([r.json() for r in rows]))
    (place / "provenance.json").write_text(
        json.dumps({"device": "A GPU", "commit": "abc", "architecture": "sm_90"} | made)
    )
    return place


def line(text: str, name: str) -> str:
    (found,) = [row for row in text.splitlines() if row.startswith(f"| [{name}]") and "abc" not in row]
    return found


def test_a_line_says_what_was_asked_and_found_and_when(tmp_path):
    rows = [ROW, replace(ROW, relation="accuracy", threshold_share=0.99961, mismatches=None), CONTROL]
    document(tmp_path / "gpu" / "gemm", *rows, date="2026-11-26")
    old = document(tmp_path / "gpu" / "old", replace(ROW, verdict=NEEDS_FIX, mismatches=3), CONTROL, title="Old?")
    text = page.report(tmp_path)["README.md"]
    assert "✅ every bit agrees in 1 checks of 64 elements" in line(text, "gemm") and "2026-11-26" in line(text, "gemm")
    assert "0.9996 × the bound" in line(text, "gemm"), "a share below the bound is not said to be the bound"
    assert "| Old? " in line(text, "old") and "❌" in line(text, "old")
    assert headline([r.json() for r in (replace(ROW, verdict=NEEDS_FIX, mismatches=3),)]) in line(text, "old")
    assert line(text, "old").count(sources.NOT_RECORDED) == 1 and "1 of 2 pass. 0 of 2 are current." in text
    (old / "provenance.json").unlink()
    assert "Old?" in page.report(tmp_path)["README.md"], "its notebook stopped before"


def test_the_index_and_the_documents_have_one_word_for_one_thing():
    refused = replace(ROW, verdict=UNSUPPORTED)
    assert verdict_of([ROW, CONTROL]) == verdict_of([ROW, refused, CONTROL]) == PASS
    assert verdict_of([refused, CONTROL]) == verdict_of([refused]) == UNSUPPORTED
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
    assert "refused as the contract says: float8_e5m2" in said and "not judged" not in said and "✅" in said


def test_a_row_of_all_dtypes_counts_for_each():
    found = cells([replace(ROW, op="every kernel", relation="atomics-free", dtype="all").json()])
    assert found["every kernel"]["atomics-free"] == dict.fromkeys(DTYPES, PASS)


def test_goals_that_are_missed_have_no_tick(tmp_path):
    place = document(tmp_path / "gpu" / "bench", replace(ROW, relation="timing"), CONTROL)
    (place / "goals.json").write_text(json.dumps([{"met": True}, {"met": False}]))
    said = line(page.report(tmp_path)["README.md"], "bench")
    assert "1 of 2 goals met" in said and "1 missed" in said and "✅" not in said
    (place / "verdicts.json").write_text(json.dumps([r.json() for r in (ROW, CONTROL)]))
    said = line(page.report(tmp_path)["README.md"], "bench")
    assert "✅ every bit agrees in 1 checks" in said and "1 of 2 goals met" in said, "bits were compared beside"
    (place / "verdicts.json").write_text(json.dumps([replace(ROW, verdict=NEEDS_FIX).json()]))
    assert "❌" in line(page.report(tmp_path)["README.md"], "bench"), "goals hide no verdict"


def test_mutants_are_a_line_of_the_same_table(tmp_path):
    place = tmp_path / "gpu-mutants" / "mutants"
    place.mkdir(parents=True)
    verdicts = ["killed"] * 3 + ["survived", "explained"]
    (place / "mutants.json").write_text(json.dumps([{"verdict": v} for v in verdicts]))
    (place / "provenance.json").write_text(json.dumps({"device": "A GPU"}))
    assert "75.00% of 4; 1 survived, 1 more are explained" in line(page.report(tmp_path)["README.md"], "mutants")


def test_folders_come_by_what_is_promised_there(tmp_path):
    document(tmp_path / "a-cpu" / "gemm", ROW, CONTROL, architecture="interpreter (bits are promised on sm_90 only)")
    document(tmp_path / "b-other" / "gemm", ROW, CONTROL, architecture="sm_80 (bits are promised on sm_90 only)")
    document(tmp_path / "c-torch" / "gemm", replace(ROW, candidate="torch"), CONTROL)
    document(tmp_path / "d-ours" / "gemm", ROW, CONTROL)
    found = [place.name for place in page.documents(tmp_path)]
    assert found == ["d-ours", "c-torch", "b-other", "a-cpu"]


def colors(svg: str) -> list[str]:
    """The colours of the cells, by op and column."""
    tree = ElementTree.fromstring(svg)
    filled = [part.get("style") or "" for part in tree.iter("{http://www.w3.org/2000/svg}path")]
    return [style.partition("fill: ")[2][:7] for style in filled if "stroke: #ffffff" in style and "fill: #" in style]


def test_weights_after_training_and_what_the_localiser_names_have_their_cells():
    for relation, column in (("weights after training", "gradient invariance"), ("localiser", "forward invariance")):
        (found,) = cells(replace(ROW, relation=relation, verdict=v).json() for v in (PASS, NEEDS_FIX)).values()
        assert {name: of for name, of in found.items() if of} == {column: {ROW.dtype: NEEDS_FIX}}


def test_the_picture_has_a_colour_for_every_outcome_and_the_same_bytes_twice():
    rows = [replace(ROW, dtype=d) for d in ("bf16", "fp16", "fp32")]
    rows += [replace(ROW, op="two", dtype=d) for d in ("bf16", "fp16")] + [replace(ROW, op="one")]
    rows += [replace(ROW, op="bad", dtype="bf16"), replace(ROW, op="bad", dtype="fp32", verdict=NEEDS_FIX)]
    rows += [replace(ROW, op="refused", verdict=UNSUPPORTED)]
    found = cells(r.json() for r in rows)
    svg = draw({"ours": found, "other": {}}, "a title")
    assert svg == draw({"ours": found, "other": {}}, "a title")
    assert colors(svg) == [PASSES[2], PASSES[1], PASSES[0], WRONG, REFUSED], "cells that were not judged are none"
    assert svg.count("✗") == 2 and NOT_JUDGED in svg and "4 of 5 need no fix" in svg and "0 of 0 need no fix" in svg


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
def test_documents_of_the_checkout_link_to_what_is_promised(place, link):
    said = limits.promised(ROOT / place)
    assert said == (f"[What is promised, and where]({link}/limits.md)." if link else "")


def test_the_committed_index_is_that_of_the_committed_documents():
    for name, text in page.report(ROOT / "audits").items():
        assert (ROOT / "audits" / name).read_text(encoding="utf-8") == text, f"{name}: run `bi-audit report`"


def made(tmp_path: Path, **changes: str) -> Path:
    """A copy of a committed document; changes: texts of its executed notebook, and what stands there instead."""
    place = tmp_path / "dtype"
    shutil.copytree(ROOT / "audits" / "interpreter-tiny" / "dtype", place)
    executed = nbformat.read(place / words.EXECUTED, as_version=4)
    for cell in executed.cells:
        for old, new in changes.values():
            cell.source = cell.source.replace(old, new)
    nbformat.write(executed, place / words.EXECUTED)
    return place


def test_a_documents_words_are_the_notebooks_and_its_numbers_the_runs(tmp_path):
    place = made(tmp_path, text=("How far from fp64", "How near to fp64"))
    committed = (place / "README.md").read_text()
    (place / "README.md").write_text("older words")
    (place / "dtype_99_0.png").write_bytes(b"of a cell that is gone")
    figures = {path.name: path.read_bytes() for path in place.glob("dtype_??_0.png") if "99" not in path.name}
    (place / "sources.json").write_text(json.dumps({"1_dtype.ipynb": "another"}))
    assert words.follow(place) and figures
    assert (place / "README.md").read_text().strip() == committed.rpartition("\n[")[0].strip()  # no checkout, no link
    assert {path.name: path.read_bytes() for path in place.glob("*.png")} == figures
    assert json.loads((place / "sources.json").read_text()) == {"1_dtype.ipynb": sources.code(NOTEBOOK)}
    (place / "README.md").write_text("untouched")
    (place / "sources.json").write_text(json.dumps({"1_dtype.ipynb": "of other cells that it has not"}))
    assert not words.follow(place) and (place / "README.md").read_text() == "untouched", "nothing is left to do"
    assert json.loads((place / "sources.json").read_text()) == {"1_dtype.ipynb": sources.code(NOTEBOOK)}


def test_a_document_of_other_code_stays_as_it_was(tmp_path):
    for i, changes in enumerate(({"code": ("run.controls()", "pass")}, {})):
        place = made(tmp_path / str(i), text=("How far from fp64", "How near to fp64"), **changes)
        executed = nbformat.read(place / words.EXECUTED, as_version=4)
        if not changes:  # a cell in the middle that raised
            error = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
            next(c for c in executed.cells[5:] if c.cell_type == "code").outputs = [error]
            nbformat.write(executed, place / words.EXECUTED)
        before = (place / "README.md").read_text()
        assert not words.follow(place) and (place / "README.md").read_text() == before
