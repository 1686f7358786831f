"""Reports lead with one sentence of the right kind, count nothing twice, fit a terminal, and hold what comes from
outside as text."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn.functional as F
from conftest import ROW
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from bi_kernels.audit import audit
from bi_kernels.audit.axes import NO_GRAD_NEEDED, Kind, axes_of, side_of
from bi_kernels.audit.findings import LATE, NEEDS_FIX, PASS, UNSUPPORTED, Row
from bi_kernels.audit.index import report
from bi_kernels.audit.index.report import page
from bi_kernels.audit.parameters import command
from bi_kernels.audit.report import escape, tables
from bi_kernels.audit.report.any_callable import Report
from bi_kernels.audit.report.groups import LINES, WIDTH, group_rows, terminal
from bi_kernels.audit.report.markdown import table
from bi_kernels.audit.report.sentences import answer, headline
from bi_kernels.audit.runs.summary import summary
from helpers import figures

G = torch.Generator().manual_seed(0)
X, W = torch.randn(40, 64, generator=G), torch.randn(64, generator=G)


def split_rows(x):
    halves = x.unflatten(-1, (2, -1)).sum(-1)
    return halves.sum(-1, keepdim=True) if len(x) > 16 else x.unflatten(-1, (-1, 2)).sum(-2).sum(-1, keepdim=True)


def reads_row_2(x):
    y = 2 * x
    return torch.cat((y[:3], y[3:4] + y[2:3], y[4:])) if len(x) > 3 else y


class InChunks(torch.autograd.Function):
    """The gradient of the weight is summed in chunks whose size depends on the batch."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        chunks = [part.flip(0).cumsum(0)[-1] for part in (dy * x).split(8 if len(x) > 16 else 4)]
        return dy * w, torch.stack(chunks).cumsum(0)[-1]


def fails_alone(x):
    if len(x) == 1:
        raise RuntimeError("no kernel for <b>1</b> row")
    return 2 * x


class OfSequences(torch.nn.Module):
    """Attention over padded sequences in which the width of the batch counts."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(64, 16, generator=G))

    def forward(self, input_ids, attention_mask=None):
        h = self.table[input_ids]
        scores = h @ h.mT / 4
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask.bool()[:, None, :], float("-inf"))
        return scores.softmax(-1) @ h * (1 + 2**-10 * (input_ids.shape[1] > 12))


FAULTS = {  # what is judged, and what of the sentence says of which kind it is
    "split": (
        (split_rows, X),
        "calls of 1, 2, 3, 7, 8, 9, 15 and 16 rows differ from the whole batch; 17 and more agree",
    ),
    "row 3": ((reads_row_2, X), "row 3 depends on the values of its neighbours"),
    "weight": ((InChunks.apply, X, W), "weight gradients (input1) change with the split into micro-batches"),
    "zeros": ((lambda x: x * 0 if len(x) > 16 else -(x * 0), X), "in the sign of zeros"),
    "raises": ((fails_alone, X), "it raises in calls of 1 row: RuntimeError: no kernel for <b>1</b> row"),
    "padding": ((OfSequences(), torch.randint(1, 64, (6, 9), generator=G)), "depends on the padding beside it"),
    "passes": ((F.silu, X), "every bit agrees in "),
}
KINDS = "draws random", "neighbours", "how many rows", "its place", "padding", "mode of", "a later call", "calls before"
KINDS += "weight gradients", "raises", "every bit agrees"


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {name: audit(*given, name=name) for name, (given, _) in FAULTS.items()}


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_line_says_of_what_kind_a_fault_is(name, reports):
    """And of no other kind: each kind's words stand in the sentences of its own faults alone."""
    report, wanted = reports[name], FAULTS[name][1].replace("input1", "dinput1")
    lead = report.answer.partition(". Also,")[0]
    assert wanted in lead, report.answer
    named = {k for k in KINDS if k in lead}
    assert named <= {k for k in KINDS if k in wanted} or name in ("split", "zeros") and named == {"how many rows"}, lead
    flat = " ".join(repr(report).split())
    assert flat.startswith(f"{report.verdict} {name}: {report.answer}."), flat
    assert report.markdown().splitlines()[0].startswith(f"**{tables.MARK[report.verdict]}: {name}: ")


@pytest.mark.parametrize("name", FAULTS)
def test_the_headline_and_the_table_show_the_same_number(name, reports):
    """Each distance in the sentence stands in a line of the table that is of the same side."""
    report = reports[name]
    cells = lambda side: {x[k] for x in group_rows(report.rows) if side in x[""] for k in ("max abs", "max rel", "ULP")}
    lead, _, inputs = report.answer.partition(". Also,")[0].partition(", input gradients")
    said = lambda text: {n.rstrip(",.") for n in re.findall(r"by (?:at most|up to) (\S+)", text)}
    first = next(iter(group_rows(report.rows)), {"": ""})[""]
    assert said(lead) <= cells(first) and said(inputs) <= cells("input gradients"), repr(report)


SAID = "the verdicts beside this report"


@pytest.mark.parametrize("name", FAULTS)
def test_a_report_fits_a_terminal_and_names_no_file_that_was_not_written(name, reports, monkeypatch):
    text = repr(reports[name])
    assert max(map(len, text.splitlines())) <= WIDTH and SAID not in text + reports[name].markdown()
    assert len(text.splitlines()) <= 2 * LINES + 8 and "|" not in text, text
    monkeypatch.setenv("BI_AUDIT_OUT", "out")
    assert (SAID in repr(reports[name])) == (reports[name].verdict == NEEDS_FIX)


ROW = replace(ROW, candidate="mine.py:f", elements=64)


def failed(**said) -> Row:
    """Returns a row that needs a fix, with the axes and side that its layout has where none are given."""
    found = {"verdict": NEEDS_FIX, "mismatches": 3, "max_abs": 1.0, "max_rel": 0.5, "max_ulp": 3} | said
    row = replace(ROW, **found)
    axes = axes_of(row.relation, row.layout, row.inputs)
    return replace(row, axes=found.get("axes", axes), side=found.get("side", side_of(row.relation)))


MEMORY = {"layout": "unaligned view", "axes": [Kind.MEMORY]}
BOTH = [ROW, failed(**MEMORY, against=NO_GRAD_NEEDED)]
OF_INPUT = {
    "relation": "gradient invariance",
    "axes": [Kind.MEMORY],
    "layout": "unaligned view",
    "side": "input gradients",
}
TRAINED = ("unaligned view", [Kind.MEMORY, Kind.MODE]), ("packed", [Kind.MODE])


@pytest.mark.parametrize(
    "rows, said",
    [
        (
            [failed(rows=1), failed(rows=7), replace(ROW, rows=8)],
            "1 and 7 rows differ from the largest call; 8 and more agree",
        ),
        (
            [ROW, failed(inputs="nonfinite", axes=[Kind.NEIGHBOURS], max_abs="inf", max_rel="inf", max_ulp="inf")],
            "values of its neighbours",
        ),
        ([failed(), failed(inputs="nonfinite")], "how many rows are in the call"),
        ([ROW, failed(layout="decode", against="packed")], "is another one decoded, or prefilled in chunks (decode)"),
        ([ROW, failed(layout="permuted:batch", against="packed")], "its place in the batch"),
        ([ROW, failed(axes=[Kind.KEPT])], "a later call writes into what an earlier one made"),
        ([ROW, failed(axes=[Kind.HISTORY])], "the result depends on the calls before"),
        ([ROW, failed(relation="determinism", detail="random: rand")], "it draws random numbers"),
        ([ROW, failed(layout="batch:16", against="packed")], "the padding beside it"),
        ([ROW, failed(layout="compiled", axes=[Kind.MODE])], "the mode of the call (compi"),
        ([ROW, failed(**MEMORY, against="aligned")], "where the inputs lie in memory (unaligned view)"),
        ([ROW, failed(layout="packed", axes=[Kind.MODE])], "the mode of the call (packed)"),
        (
            [ROW, failed(relation="determinism", detail="backward, 10 runs", tensor="dq", side="input gradients")],
            "input gradients (dq) are not deterministic: the same call gives other bits",
        ),
        ([failed(), failed(relation="determinism", against="itself", layout="packed")], "it is not deterministic"),
        (
            [ROW, failed(relation="gradient invariance", layout="micro_batches:each", side="weight gradients")],
            "weight gradients (out) change with the split into micro-batches, by at most 3 ULP; forward does not",
        ),
        ([*BOTH, failed(**OF_INPUT, max_ulp=17)], "(unaligned view), by at most 3 ULP, input gradients by at most 17 "),
        ([ROW, failed(relation="accuracy", threshold_share=1.5)], "results are less accurate than allowed, 1.5 × the"),
        ([ROW, failed(relation="atomics-free", detail="atomic_add")], "may change the order of a sum: atomic_add"),
        ([failed(mismatches=None, detail="not reached")], "not reached"),
        ([replace(ROW, verdict=UNSUPPORTED, detail="TypeError: fp64")], "it could not be judged: TypeError: fp64"),
        (
            [
                ROW,
                *(
                    replace(ROW, verdict=UNSUPPORTED, layout=LATE, detail=f"{n}: no time is left")
                    for n in ("a, b", "c")
                ),
            ],
            "every bit agrees in 64 elements (forward); not judged: a, b, c: no time",
        ),
        ([ROW, replace(ROW, control=True, verdict=NEEDS_FIX)], "every bit agrees in 64 elements"),
        (
            [
                replace(ROW, side=side)
                for side in ("weight gradients", "outputs and gradients", "weights after training")
            ],
            "every bit agrees in 192 elements (forward, gradients, weights after training)",
        ),
        (
            [ROW, failed(relation="weights after training", layout="2 steps, batch", tensor="all weights")],
            "weights after training (all weights) change with the layout of the call (2 steps, batch)",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_rows_of_the_registry_have_their_sentences_too(rows, said):
    assert said in answer(rows) and said in headline(rows) and said in answer([r.json() for r in rows]), answer(rows)


@given(st.sets(st.integers(1, 300), min_size=1), st.sets(st.integers(1, 300)))
def test_no_list_of_row_counts_claims_what_was_not_found(differ, agree):
    """Every count that a sentence names is on its own side, and "and more" holds of all that were asked."""
    agree -= differ
    sentence = answer([*(failed(rows=m) for m in differ), *(replace(ROW, rows=m) for m in agree)])
    listed, _, rest = sentence.partition(": calls of ")[2].partition(" differ from the largest call")
    assert {int(n) for n in re.findall(r"\d+", listed.partition("(")[0])} <= differ, sentence
    named = {int(n) for n in re.findall(r"\d+", rest.partition(", by")[0].partition("(")[0])}
    assert named <= agree and ("more" not in rest or max(differ) < min(agree)), sentence
    assert "fewer" not in rest or min(differ) > max(agree), sentence


TEXT = st.text(max_size=30).filter(lambda text: not re.search(r"\d{7}", text))  # no count of ours
ROWS = st.builds(
    failed,
    relation=st.sampled_from(tables.RELATIONS),
    layout=st.sampled_from(("rows", "singles", "permuted", "kept: x", "decode", "neighbours")) | TEXT,
    against=st.sampled_from(("the whole batch", "packed", "no_grad", "one packed call", "itself")),
    inputs=st.sampled_from(("given", "cancelling", "nonfinite")),
    rows=st.integers(0, 10**6),
    verdict=st.sampled_from((NEEDS_FIX, PASS, UNSUPPORTED)),
    mismatches=st.none() | st.integers(0, 64),
    max_abs=st.none() | st.floats(0, 1e30) | st.just("inf"),
    max_rel=st.none() | st.floats(0, 2) | st.just("inf"),
    max_ulp=st.none() | st.integers(0, 2**32) | st.just("inf"),
    tensor=TEXT,
    side=st.sampled_from(("", "input gradients", "weight gradients")),
    first_index=st.none() | st.just([0, 1]),
    detail=TEXT,
)


@given(st.lists(ROWS, min_size=1, max_size=20), TEXT)
@example([failed(layout="rows", mismatches=None, max_abs=None), failed(layout="\n", mismatches=None, max_abs=None)], "")
@example([failed(rows=10**6, mismatches=None, max_abs=None)], "")
def test_any_rows_have_a_sentence_and_a_report_of_few_plain_lines(rows, name):
    report = Report(name, rows, "read")
    text, sentence = repr(report), report.answer
    lines = text.splitlines()
    assert sentence and "\n" not in sentence and all(len(line) <= WIDTH for line in lines), text
    assert len(terminal(group_rows(rows)).splitlines()) <= 2 * LINES + 1
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text) and not re.search(r"\d{7,}", terminal(group_rows(rows)))
    for count, of in re.findall(r"([\d,]+) of ([\d,]+)", terminal(group_rows(rows))):
        assert int(count.replace(",", "")) <= int(of.replace(",", ""))
    rendered(report.markdown())


def rendered(markdown: str) -> str:
    """HTML of a document as a forge makes it, HTML in it included: none may have come from outside."""
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    tags = set(re.findall(r"<\s*/?\s*([a-zA-Z]+)", html))
    assert tags <= {"p", "strong", "table", "thead", "tbody", "tr", "th", "td", "code", "h", "ul", "li", "em"}, html
    return html


EVIL = "<script>alert(1)</script> | `a` [x](javascript:1) ``b`` <img src=x>\n\n# title\x1b[31m"


@given(st.text() | st.just(EVIL))
def test_what_comes_from_outside_stays_text_in_markdown(text):
    assert rendered(f"x {escape.text(text)}").count("<") == 2, "one paragraph"
    spaced = "" if not escape.line(text) else rendered(f"x {escape.code(text)} x")
    assert spaced.count("<") <= 4, spaced
    assert not re.search(r"<(script|img|a)\b", rendered(tables.table([{"a": escape.text(text)}]).data))


def test_reports_of_evil_names_and_errors_hold_no_tag(tmp_path):
    row = failed(audit="any", op=EVIL, candidate=EVIL, detail=EVIL, repro=f"python {shlex.quote(EVIL)}", tensor=EVIL)
    report, out = Report(EVIL, [row], EVIL, [EVIL]), tmp_path / "o $(touch y)"
    (out / "any").mkdir(parents=True)
    (out / "any" / "README.md").touch()
    html = rendered(report.markdown())
    assert "<img" not in html and "&lt;script&gt;" in html and "\x1b" not in repr(report)
    document = page(f"# Title\n\n{tables.by_op(report.rows).data}", tmp_path, [row.json()])
    for text in (document, summary([row.json()], out, tmp_path / "s.md", ["any"], [EVIL], "drift")):
        html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
        assert not re.search(r'<(script|img)|<a href="javascript', html), html
    assert '<a href="o%20%24%28touch%20y%29/any/README.md">' in html, html


ODD = "my `op` <b>|$(touch x).py"
MINE = """
def op(x):
    if len(x) == 7:
        raise RuntimeError("<script>alert(1)</script> | `a`\\nand more")
    return x - x.mean(0)
"""


@pytest.mark.slow
def test_printed_commands_work_when_pasted(tmp_path, monkeypatch, bi_audit):
    (tmp_path / ODD).write_text(MINE)
    monkeypatch.chdir(tmp_path)
    given = {"candidate": f"{ODD}:op", "inputs": "x:fp32[9,4]"}
    assert shlex.split(command("any", given))[3:] == ["--candidate", given["candidate"], "--inputs", given["inputs"]]
    done = bi_audit("run", "any", *(w for k, v in given.items() for w in (f"--{k}", v)), "--out", "o $(touch y)")
    lines = done.out.splitlines()
    assert lines[0].startswith("needs-fix  op fp32: a row's result depends on the values of its neighbours"), done.out
    assert all(len(x) <= WIDTH or x.startswith("    python ") for x in lines), done.out
    pasted = next(x.strip() for x in lines if x.startswith("    python "))
    shown = subprocess.run(
        pasted.replace("python", shlex.quote(sys.executable), 1), shell=True, text=True, capture_output=True
    )
    assert shown.returncode == 1 and "elements differ" in shown.stdout, shown.stderr
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()
    document = (tmp_path / "o $(touch y)" / "any" / "README.md").read_text()
    named = {shlex.split(x)[1] for x in re.findall(r"`(python [^`]*)`", document)}
    assert named and all((tmp_path / "o $(touch y)" / "any" / path).is_file() for path in named), "from the document"
    assert ".partial" not in document and "…/" not in document
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(document)
    assert "<script" not in html and "<b>" not in html, html
    assert "a row's result depends on the values of its neighbours" in document.splitlines()[4]


def test_the_command_of_a_line_shows_the_row_of_its_numbers_or_says_what_it_shows():
    few = failed(rows=1, mismatches=1, repro="few", first_index=[1], max_ulp=2)
    most = failed(rows=7, mismatches=9, repro="most", first_index=[7])
    (line,) = group_rows([few, most, ROW])
    assert (line["row"]["repro"], line["differ"], line["ULP"], line["shows"]) == ("most", "9 of 64", "3", "")
    assert "shows" not in tables.drifts([few, most]).data and "`most`" in tables.drifts([few, most]).data
    further = replace(few, max_ulp=5, max_rel=0.75)
    assert "`most` shows 9 of 64; 1, 0.5, 3 |" in " ".join(tables.drifts([further, most]).data.split())
    unshown = replace(most, repro="")
    text = " ".join(tables.drifts([few, unshown]).data.split())
    assert "| 9 of 64; 1, 0.5, 3 | `few` shows 1 of 64; 1, 0.5, 2 | [1] |" in text, text


def test_a_heat_map_has_a_color_for_inf_and_calls_nothing_1_that_is_below():
    shares = {"a": {"x": 0.9996, "y": float("inf")}, "b": {"x": 3e12, "y": 0.004}}
    figure = figures.heat(shares, "A map", "error / bound", top=1.0)
    ax = figure.axes[0]
    assert [t.get_text() for t in ax.texts] == ["0.99", "inf", "3e12", "<.01"]
    assert figures.share(0.29) == "0.29" and figures._short(9.997e8) == "1e9" and figures._short(9.99e8) == "999M"
    assert figures.share(0.9999999999) == "0.99" and figures._short(999.5) == "1k" and figures._short(999_500) == "1M"
    assert ax.collections[0].get_array().compressed().tolist() == [0.9996, 1.0, 1.0, 0.004]
    plt.close(figure)


@pytest.mark.parametrize("differs, headings", [("b", ["a b c d e", "a b f g h"]), ("e", ["a b c d e f · g · h"])])
def test_a_wide_table_is_in_parts_that_say_which_line_is_which(differs, headings):
    text = table([dict.fromkeys("abcdefgh", 0) | {differs: i} for i in range(2)])
    first = [part.splitlines()[0].strip("| ") for part in text.split("\n\n")]
    assert [re.sub(r" *\| *", " ", line) for line in first] == headings
    assert all(len(part.splitlines()) == 4 for part in text.split("\n\n"))


def test_the_readme_reads_a_wide_table_whole():
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    try:
        import readme
    finally:
        sys.path.pop(0)
    lines = [{"n": i, **{f"column {j}": f"{i}.{j}" for j in range(9)}} for i in range(3)]
    other = [{"n": 0, "column 8": "of another table"}]
    text = f"{table(lines)}\n\n{table(other)}\n"
    assert text.count("| n ") > 2
    read = readme.tables(text, "column 8")
    assert read == [{k: str(v) for k, v in line.items()} for line in [*lines, *other]]


def test_a_link_of_a_notebook_leads_there_from_its_report(tmp_path):
    root = Path(__file__).parents[1]
    body = "See [families](../docs/families.md) and [a page](https://pytorch.org)."
    assert report.moved(body, root / "audits" / "a" / "b").startswith(
        "See [families](../../../docs/families.md) and [a"
    )
    assert report.moved(body, tmp_path) == "See families and [a page](https://pytorch.org).", "outside of a checkout"
