"""Tables of documents fit a screen: what is too wide may break, and says what it said."""

import re
from pathlib import Path

import mistune
import pytest

from bi_kernels.audit.evidence.limits import promised
from bi_kernels.audit.index import fit
from bi_kernels.audit.index.page import write

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "audits").rglob("README.md"))
HEAD = "| op | " + " | ".join(["determinism"] * 8) + " | source |\n|:--|" + ":--|" * 9 + "\n"
ROW = "| a | " + " | ".join(["0"] * 8) + " | {} |\n"


def shown(page: str) -> str:
    """What a browser shows of a page's tables."""
    html = mistune.create_markdown(plugins=["table"], escape=False)(page)
    return re.sub("\xad|&shy;|<wbr>|\n", "", html)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.relative_to(ROOT).as_posix())
def test_a_document_fits_a_screen_and_links_what_is_promised(page):
    text = page.read_text(encoding="utf-8")
    widths = [fit.width(found[0]) for found in fit.TABLE.finditer(text)]
    assert widths and max(widths) < 1233, "which is what a browser's window of 1,280 leaves a page"
    assert fit.fitted(text) == text, "bi-audit report audits"
    assert promised(page.parent) and text.count(promised(page.parent)) == 1, "bi-audit report audits"


@pytest.mark.parametrize(
    "cell, expected",
    [
        ("model/decoder.py:83", "model/<wbr>decoder.<wbr>py:<wbr>83"),
        (r"_hopper_gemm a\_b", r"_hopper<wbr>\_gemm a<wbr>\_b"),
        ("add_. a_b_ c_d", r"add_. a<wbr>\_b_ c<wbr>\_d"),
        ("`a/b.c_d` [a_b](c/d_e.md)", r"`a/b.c_d` [a<wbr>\_b](c/d_e.md)"),
        ("``x_y`z_w`` [a](b(c/d)e/f_g.md) $a_b$ ![a.b](c)", "``x_y`z_w`` [a](b(c/d)e/f_g.md) $a_b$ ![a.b](c)"),
        ("https://a.b/c_d e_f@g.h", "https://a.b/c_d e_f@g.h"),
        ("1.5 of 4,276,224, 3/4 &shy;", "1.5 of 4,276,224, 3/4 &shy;"),
        (r"x \| y_z", r"x \| y<wbr>\_z"),
    ],
)
def test_a_table_that_is_too_wide_may_break_its_words(cell, expected):
    wide = HEAD + ROW.format(cell)
    found = fit.fitted(f"determinism\n\n{wide}\ndeterminism\n")
    assert (
        found
        == f"determinism\n\n{HEAD.replace('determinism', 'determi&shy;nism')}{ROW.format(expected)}\ndeterminism\n"
    )
    assert fit.width(wide) > fit.SCREEN > fit.width(fit.TABLE.search(found)[0])
    assert shown(found) == shown(f"determinism\n\n{wide}\ndeterminism\n") and fit.fitted(found) == found


@pytest.mark.parametrize(
    "table",
    [
        "| determinism | a |\n|:--|:--|\n| model/decoder.py:83 | b_c |\n",
        "| a | b |\n|:--|:--|\n",
        "| a | b |\n|:--|:--|\n| c |\n| d | e | f |\n",
        "|x| is small, and |y|\n",
        f"```\n{HEAD}{ROW.format('a_b')}```\n",
    ],
)
def test_what_fits_or_is_no_table_stays_as_it_is(table):
    assert fit.fitted(table) == table


BROKEN = [page for page in PAGES if "<wbr>" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", BROKEN, ids=lambda page: page.parent.relative_to(ROOT).as_posix())
def test_breaks_change_nothing_that_is_shown(page):
    text = page.read_text(encoding="utf-8")
    plain = re.sub(r"<wbr>\\_", "_", text).replace("<wbr>", "").replace("&shy;", "")
    assert shown(text) == shown(plain) != shown(text.replace("_", "-"))


def test_a_break_that_makes_emphasis_is_seen():
    row = "| fill{0}_reverse{0}_indices_ |\n|:--|\n"
    assert shown(row.format("<wbr>\\")) == shown(row.format("")) != shown(row.format("<wbr>"))


def test_the_index_fits_its_documents_and_links_what_is_promised_once(tmp_path):
    place = tmp_path / "audits" / "tiny" / "gemm"
    for file in (tmp_path / "docs/limits.md", tmp_path / "bi_kernels/contract.toml", place / "verdicts.json"):
        file.parent.mkdir(parents=True)
        file.write_text("[]")
    page, wide = place / "README.md", f"{HEAD}{ROW.format('b')}"
    page.write_text(f"# What was asked\n\n{wide}")
    for _ in range(2):
        write(tmp_path / "audits")
        assert fit.width(wide) > fit.SCREEN > fit.width(fit.TABLE.search(page.read_text())[0])
        assert promised(place) and page.read_text().count(promised(place)) == 1
