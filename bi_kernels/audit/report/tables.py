"""Tables and the verdict bundle of the notebooks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bi_kernels.audit.axes import BITS, HASH, Side
from bi_kernels.audit.findings import (
    LOCALISER,
    PASS,
    PRECONDITION,
    UNSUPPORTED,
    Row,
    grouped,
    needs_fix,
    verdict_of,
    worst_of,
)
from bi_kernels.audit.report import escape, markdown
from bi_kernels.audit.report.groups import group_rows, remaining
from bi_kernels.audit.report.markdown import Markdown
from bi_kernels.audit.report.sentences import headline
from bi_kernels.audit.report.sizes import share_of, size

if TYPE_CHECKING:  # it takes a second to load
    import pandas as pd

MIME = "application/vnd.bi-audit+json"
ACCURACIES = "accuracy", "gradient accuracy"
RELATIONS = "invariance", "determinism", "accuracy", "parity", "contract", "gradient invariance", "gradient accuracy"
RELATIONS += "atomics-free", "reproducer", "no false alarm", "timing", Side.TRAINED, LOCALISER, PRECONDITION
MARK = {verdict: f"{mark} {verdict}".strip() for verdict, mark in markdown.MARK.items()}


class Bundle:
    """A table for people and the same as JSON for programs, in one output."""

    def __init__(self, markdown: str, data: object):
        self.markdown, self.data = markdown, data

    def _repr_mimebundle_(self, **_):
        return {"text/markdown": self.markdown, "text/plain": self.markdown, MIME: self.data}


def table(lines: "pd.DataFrame | Sequence[dict]") -> Markdown:
    return Markdown(markdown.table(lines))


def facts(fields: dict[str, str]) -> Markdown:
    return table([{"": k, "value": v} for k, v in fields.items()])


def worst(rows: Sequence[Row]) -> str:
    """needs-fix if any row is, else pass if any is: a verdict names what was not judged; '' if there is none."""
    return worst_of({r.verdict for r in rows if r.verdict != UNSUPPORTED} or {r.verdict for r in rows})


def _mark(rows: Sequence[Row]) -> str:
    """Returns the mark of a relation; of a contract that some dtypes pass and others are refused by, both."""
    found = worst(rows)
    both = found == PASS and rows[0].relation == "contract" and any(r.verdict == UNSUPPORTED for r in rows)
    return f"{MARK[PASS]}, other dtypes refused" if both else MARK[found]


def label(r: Row) -> str:
    return f"{r.op} {r.case}".strip()


def by_op(rows: Sequence[Row]) -> Markdown:
    """Op × dtype: elements that differ, the largest error as a share of the bound, and all other checks."""
    lines = []
    for (op, dtype), mine in grouped((r for r in rows if not r.control), lambda r: (label(r), r.dtype)).items():
        bits, accuracy = ([r for r in mine if r.relation in kind] for kind in (BITS, ACCURACIES))
        others = grouped((r for r in mine if r not in bits and r not in accuracy), lambda r: r.relation)
        lines.append(
            {
                "op": escape.text(op),
                "dtype": dtype,
                "elements that differ": f"{markdown.MARK[worst(bits)]} {_of(bits)}",
                "error / bound": f"{markdown.MARK[worst(accuracy)]} {share_of([vars(r) for r in accuracy])}".strip(),
                "other checks": "; ".join(f"{relation}: {_mark(r)}" for relation, r in others.items()) or "–",
            }
        )
    unsaid = [k for k in ("error / bound", "other checks") if all(line[k] == markdown.MARK[""] for line in lines)]
    return table([{k: v for k, v in line.items() if k not in unsaid} for line in lines])


def _of(rows: Sequence[Row]) -> str:
    """Returns how many elements, and how many hashes, differ, of how many; of rows that compare bits."""
    total = lambda mine: " of ".join(f"{sum(getattr(r, k) or 0 for r in mine):,}" for k in ("mismatches", "elements"))
    parts = grouped(rows, lambda r: f" {HASH}" * r.tensor.startswith(HASH))
    return "; ".join(f"{total(mine)}{unit}" for unit, mine in parts.items())


def heading(title: str, body: Markdown) -> Markdown:
    return Markdown(f"**{title}**\n\n{body.data}")


def variants(found: Sequence) -> Markdown:
    """static.Variant by kernel: how many, what they use at most, and what was found in them."""
    if not found:
        return Markdown("No Triton kernel was recorded.")
    most = lambda mine, name: max((getattr(v, name) for v in mine if getattr(v, name) is not None), default="–")
    lines = [
        {
            "kernel": f"`{kernel}`",
            "variants": f"{len(mine)} for {', '.join(sorted({v.level for v in mine}))}",
            "registers": most(mine, "registers"),
            "spilled bytes": most(mine, "spills"),
            "shared bytes": most(mine, "shared"),
            "findings": "; ".join(dict.fromkeys(str(f) for v in mine for f in v.findings)) or "none",
        }
        for kernel, mine in sorted(grouped(found, lambda v: v.kernel).items())
    ]
    return table(lines)


def controls(rows: Sequence[Row]) -> Markdown:
    """Returns a line for each control: which check caught it, where, and how far off it is."""
    mine = [r for r in rows if r.control]
    lines = [
        {
            "control": escape.text(r.candidate),
            "op": escape.text(f"{label(r)} {r.dtype}"),
            "caught by": f"✅ {r.relation}" if r.caught else f"❌ missed by {r.relation}",
            "where": escape.text(", ".join(filter(None, (r.layout, f"M = {r.rows}" * bool(r.rows), r.inputs)))),
            "differ": f"{r.mismatches} of {r.elements}{' variants' * (r.relation == 'atomics-free')}",
            "how far": size([vars(r)]),
        }
        for r in mine
    ]
    return heading(f"{sum(bool(r.caught) for r in mine)} of {len(mine)} controls caught.", table(lines))


def drifts(rows: Sequence[Row]) -> Markdown:
    """Returns the drift report: a line for each side and kind of what needs a fix, with its layouts and row counts,
    sizes, and the index, reproducer and detail of the row of which most differs, whose own sizes are said if others."""
    if not needs_fix(r for r in rows if not r.control):
        return Markdown("Nothing drifts.")
    lines = [
        {
            "op": escape.text(" ".join(filter(None, (x["row"][k] for k in ("op", "case", "dtype"))))),
            "what": f"{x['']} ({escape.text(x['tensors'] or x['row']['tensor'])})",
            "where": escape.text(x["where"] or x["row"]["layout"]) + (f" ({x['inputs']})" if x["inputs"] else ""),
            "differ; max abs, relative or × bound, ULP": "; ".join(
                filter(None, (x["differ"], f"{x['max abs']}, {x['max rel']}, {x['ULP']}"))
            ),
            "reproduce": _command(x),
            "first at [row, …], or why": _first(x["row"], x["detail"]),
        }
        for x in sorted(group_rows(rows), key=lambda x: -x["harm"])
    ]
    return Markdown(f"{markdown.table(lines)}\n\nWhat differs most stands first{remaining()}.")


def _command(line: dict) -> str:
    """Returns the command of a line of `condensed`, and what it shows where the line's numbers are other rows'."""
    if not line["row"]["repro"]:
        return "–"
    return escape.code(line["row"]["repro"]) + f" shows {line['shows']}" * bool(line["shows"])


def _first(row: dict, detail: str) -> str:
    """Says at which index a row first differs, and its detail."""
    index = f"{row['first_index']}" if row["first_index"] is not None else ""
    return " ".join(filter(None, (index, escape.text(detail or row["detail"]))))


def verdict(session) -> Bundle:
    """Op × relation over all dtypes, the controls, and the one word; no number that could change between runs."""
    rows = [r for r in session.rows if not r.control]
    shown = [r for r in session.rows if r.control]
    relations = [k for k in RELATIONS if any(r.relation == k for r in rows)]
    by_name = grouped(rows, lambda r: r.op)
    ops = {op: {k: worst([r for r in mine if r.relation == k]) for k in relations} for op, mine in by_name.items()}
    missed = [r.candidate for r in shown if not r.caught]
    caught = len(shown) - len(missed)
    word = verdict_of(session.rows)
    dtypes = [d for d in session.dtypes if any(r.dtype == d for r in session.rows if not r.control)]
    data = {
        "audit": session.audit,
        "candidate": session.candidate.spec,
        "device": session.device_label,
        "dtypes": dtypes,
        "verdict": word,
        "ops": ops,
        "controls": {"caught": caught, "total": len(shown), "missed": missed},
    }
    interpreted = session.device_label == "interpreter"
    where = "on Triton's interpreter; no statement about a GPU" if interpreted else f"on {session.device_label}"
    subject = ", ".join(filter(None, (escape.code(session.candidate.spec), *dtypes, where)))
    said = "" if word == PASS else f"{escape.text(headline(rows))}.\n\n"
    text = (
        f"### Verdict: {MARK[word]}\n\n{said}{subject}. Controls caught: {caught} of {len(shown)}.\n\n"
        + markdown.table(
            [
                {"op": escape.text(op)} | {k: _mark([r for r in mine if r.relation == k]) for k in relations}
                for op, mine in by_name.items()
            ],
            most=len(RELATIONS) + 1,
        )
    )
    return Bundle(text, data)
