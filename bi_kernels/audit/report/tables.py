"""Tables and the verdict bundle of the notebooks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from IPython.display import Markdown

from bi_kernels.audit.axes import BITS, HASH, Side
from bi_kernels.audit.findings import (
    LOCALISER,
    NEEDS_FIX,
    PASS,
    PRECONDITION,
    UNSUPPORTED,
    Row,
    grouped,
    verdict_of,
    worst_of,
)
from bi_kernels.audit.report import escape, markdown
from bi_kernels.audit.report.groups import group_rows, remaining
from bi_kernels.audit.report.sentences import headline
from bi_kernels.audit.report.sizes import share_of, steps

if TYPE_CHECKING:  # it takes a second to load
    import pandas as pd

MIME = "application/vnd.bi-audit+json"
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
    """needs-fix if any row is, else unsupported if any is, else pass; '' if there is none."""
    return worst_of({r.verdict for r in rows})


def _mark(rows: Sequence[Row]) -> str:
    """Returns the mark of a relation; of a contract that some dtypes pass and others are refused by, both."""
    found = worst(rows)
    both = found == UNSUPPORTED and rows[0].relation == "contract" and any(r.verdict == PASS for r in rows)
    return f"{MARK[PASS]}, other dtypes refused" if both else MARK[found]


def label(r: Row) -> str:
    return f"{r.op} {r.case}".strip()


def by_op(rows: Sequence[Row]) -> Markdown:
    """Op × dtype: the verdict of each relation, checks run, elements whose bits were compared, and the largest share of
    the bound."""
    relations = [k for k in RELATIONS if any(r.relation == k for r in rows)]
    lines = []
    for (op, dtype), mine in grouped((r for r in rows if not r.control), lambda r: (label(r), r.dtype)).items():
        bits = [r for r in mine if r.relation in BITS]
        counted = {
            "checks": len(mine),
            "elements differing": _of(bits),
            "error / bound": share_of([vars(r) for r in mine]) or "–",
        }
        marks = {k: _mark([r for r in mine if r.relation == k]) for k in relations}
        lines.append({"op": escape.text(op), "dtype": dtype} | marks | counted)
    return table(lines)


def _of(rows: Sequence[Row]) -> str:
    """Returns how many elements, and how many hashes, differ, of how many; of rows that compare bits."""
    total = lambda mine: " of ".join(f"{sum(getattr(r, k) or 0 for r in mine):,}" for k in ("mismatches", "elements"))
    parts = grouped(rows, lambda r: f" {HASH}" * r.tensor.startswith(HASH))
    return "; ".join(f"{total(mine)}{unit}" for unit, mine in parts.items()) or "–"


def _far(r: Row) -> str:
    return steps([vars(r)]) or "–" if r.threshold_share is None else f"{_number(r.threshold_share)} × bound"


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
            "variants": len(mine),
            "compiled": ", ".join(sorted({v.level for v in mine})),
            "registers": most(mine, "registers"),
            "spilled bytes": most(mine, "spills"),
            "shared bytes": most(mine, "shared"),
            "findings": "; ".join(dict.fromkeys(str(f) for v in mine for f in v.findings)) or "none",
        }
        for kernel, mine in sorted(grouped(found, lambda v: v.kernel).items())
    ]
    return table(lines)


def controls(rows: Sequence[Row]) -> Markdown:
    mine = [r for r in rows if r.control]
    lines = [
        {
            "control": escape.text(r.candidate),
            "op": escape.text(label(r)),
            "dtype": r.dtype,
            "flagged by": r.relation,
            "caught": "✅" if r.caught else "❌ missed",
            "where": escape.text(", ".join(filter(None, (r.layout, f"M = {r.rows}" * bool(r.rows), r.inputs)))),
            "elements": f"{r.mismatches} of {r.elements}{' variants' * (r.relation == 'atomics-free')}",
            "max ULP": _far(r),
            "first at [row, …]": r.first_index,
        }
        for r in mine
    ]
    return heading(f"{sum(bool(r.caught) for r in mine)} of {len(mine)} controls caught.", table(lines))


def drifts(rows: Sequence[Row]) -> Markdown:
    """Returns the drift report: a line for each side and kind of what needs a fix, with its layouts and row counts,
    sizes, and the index, reproducer and detail of the row of which most differs, whose own sizes are said if others."""
    mine = [r for r in rows if r.verdict == NEEDS_FIX and not r.control]
    if not mine:
        return Markdown(f"No drift: {headline(rows)}.")
    lines = [
        {
            "op": escape.text(" ".join(filter(None, (x["row"][k] for k in ("op", "case", "dtype"))))),
            "what": f"{x['']} ({escape.text(x['tensors'] or x['row']['tensor'])})",
            "where": escape.text(x["where"] or x["row"]["layout"]) + (f" ({x['inputs']})" if x["inputs"] else ""),
            "checks": x["checks"],
            "differ, or exceed the bound": x["differ"] or "–",
            "max abs, relative or × bound, ULP": f"{x['max abs']}, {x['max rel']}, {x['ULP']}",
            "reproduce": _command(x),
            "first at [row, …], or why": _first(x["row"], x["detail"]),
        }
        for x in sorted(group_rows(rows), key=lambda x: -x["harm"])
    ]
    count = f"{len(mine):,} of the checks above need a fix{remaining()}; what differs most stands first."
    return Markdown(f"{markdown.table(lines)}\n\n{count}")


def _command(line: dict) -> str:
    """Returns the command of a line of `condensed`, and what it shows where the line's numbers are other rows'."""
    if not line["row"]["repro"]:
        return "–"
    return escape.code(line["row"]["repro"]) + f" shows {line['shows']}" * bool(line["shows"])


def _first(row: dict, detail: str) -> str:
    """Says at which index a row first differs, and its detail."""
    index = f"{row['first_index']}" if row["first_index"] is not None else ""
    return " ".join(filter(None, (index, escape.text(detail or row["detail"]))))


def _number(x: float | str | None) -> str:
    return "–" if x is None else f"{float(x):.3g}"


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
            ]
        )
    )
    return Bundle(text, data)
