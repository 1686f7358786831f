"""Tables, figures and the verdict bundle of the notebooks."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown
from matplotlib.colors import LogNorm, Normalize

from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, UNSUPPORTED, Row

MIME = "application/vnd.bi-audit+json"
RELATIONS = (
    "invariance",
    "determinism",
    "accuracy",
    "parity",
    "contract",
    "gradient invariance",
    "gradient accuracy",
    "atomics-free",
    "reproducer",
    "no false alarm",
)
MARK = {PASS: "✅ pass", NEEDS_FIX: "❌ needs-fix", UNSUPPORTED: "⬜ unsupported", "": "–"}
plt.rcParams.update(
    {
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "figure.dpi": 110,
        "font.size": 9,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "image.cmap": "viridis",
    }
)


class Bundle:
    """A table for people and the same as JSON for programs, in one output."""

    def __init__(self, markdown: str, data: object, mime: str):
        self.markdown, self.data, self.mime = markdown, data, mime

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/markdown": self.markdown, "text/plain": self.markdown, self.mime: self.data}


def table(frame: pd.DataFrame | Sequence[dict], index: bool = False) -> Markdown:
    return Markdown(pd.DataFrame(frame).to_markdown(index=index, disable_numparse=True))


def facts(fields: dict[str, str]) -> Markdown:
    return table([{"": k, "value": v} for k, v in fields.items()])


def worst(rows: Sequence[Row]) -> str:
    """needs-fix if any row is, else unsupported if any is, else pass; '' if there is none."""
    found = {r.verdict for r in rows}
    return next((v for v in (NEEDS_FIX, UNSUPPORTED, PASS) if v in found), "")


def label(r: Row) -> str:
    return f"{r.op} {r.case}".strip()


def by_op(rows: Sequence[Row]) -> Markdown:
    """Op × dtype: the verdict of each relation, checks run, elements compared, and the largest share of the bound."""
    groups: dict[tuple, list[Row]] = {}
    for r in rows:
        if not r.control:
            groups.setdefault((label(r), r.dtype), []).append(r)
    lines = []
    for (op, dtype), mine in groups.items():
        shares = [r.threshold_share for r in mine if r.threshold_share is not None]
        lines.append(
            {"op": op, "dtype": dtype}
            | {
                k: MARK[worst([r for r in mine if r.relation == k])]
                for k in RELATIONS
                if any(x.relation == k for x in rows)
            }
            | {
                "checks": len(mine),
                "elements differing": f"{sum(r.mismatches or 0 for r in mine):,} of "
                f"{sum(r.elements or 0 for r in mine):,}",
                "error / bound": ("inf" if "inf" in shares else f"{max(shares):.2f}") if shares else "–",
            }
        )
    return table(lines)


def heading(title: str, body: Markdown) -> Markdown:
    return Markdown(f"**{title}**\n\n{body.data}")


def variants(found: Sequence) -> Markdown:
    """static.Variant by kernel: how many, what they use at most, and what was found in them."""
    groups: dict[str, list] = {}
    for v in found:
        groups.setdefault(v.kernel, []).append(v)
    if not groups:
        return Markdown("No Triton kernel was launched.")
    most = lambda mine, name: max((getattr(v, name) for v in mine if getattr(v, name) is not None), default="–")
    return table(
        [
            {
                "kernel": f"`{kernel}`",
                "variants": len(mine),
                "compiled": ", ".join(sorted({v.level for v in mine})),
                "registers": most(mine, "registers"),
                "spilled bytes": most(mine, "spills"),
                "shared bytes": most(mine, "shared"),
                "findings": "; ".join(dict.fromkeys(str(f) for v in mine for f in v.findings)) or "none",
            }
            for kernel, mine in sorted(groups.items())
        ]
    )


def controls(rows: Sequence[Row]) -> Markdown:
    mine = [r for r in rows if r.control]
    head = f"**{sum(bool(r.caught) for r in mine)} of {len(mine)} controls caught.**\n\n"
    return Markdown(
        head
        + table(
            [
                {
                    "control": r.candidate,
                    "op": label(r),
                    "dtype": r.dtype,
                    "flagged by": r.relation,
                    "caught": "✅" if r.caught else "❌ missed",
                    "where": f"{r.layout}, M = {r.rows}, {r.inputs}",
                    "elements": f"{r.mismatches} of {r.elements}",
                    "max ULP": r.max_ulp if r.max_ulp is not None else f"{_number(r.threshold_share)} × bound",
                    "first at [row, …]": r.first_index,
                }
                for r in mine
            ]
        ).data
    )


def drifts(rows: Sequence[Row], most: int = 40) -> Markdown:
    """Returns the drift report: every row that needs a fix, with its shape, count, sizes, first index and
    reproducer."""
    mine = [r for r in rows if r.verdict == NEEDS_FIX and not r.control]
    if not mine:
        return Markdown(f"No drift: {sum(r.elements or 0 for r in rows if not r.control):,} elements compared.")
    more = f"\n\n{len(mine) - most} more in verdicts.json." if len(mine) > most else ""
    return Markdown(
        table(
            [
                {
                    "op": label(r),
                    "dtype": r.dtype,
                    "relation": r.relation,
                    "tensor": r.tensor,
                    "layout": r.layout,
                    "M": r.rows,
                    "inputs": r.inputs,
                    "differ": "–" if r.mismatches is None else f"{r.mismatches} of {r.elements}",
                    "max abs": _number(r.max_abs),
                    "max rel": _number(r.max_rel),
                    "max ULP": r.max_ulp,
                    "first at [row, …]": r.first_index,
                    "reproduce": f"`{r.repro}`" if r.repro else "–",
                    "detail": r.detail,
                }
                for r in mine[:most]
            ]
        ).data
        + more
    )


def _number(x) -> str:
    return "–" if x is None else str(x) if isinstance(x, str) else f"{x:.3g}"


def verdict(session) -> Bundle:
    """Op × relation over all dtypes, the controls, and the one word; no number that could change between runs."""
    rows = session.rows
    ops = list(dict.fromkeys(r.op for r in rows if not r.control))
    relations = [k for k in RELATIONS if any(r.relation == k and not r.control for r in rows)]
    mine = {
        op: {k: worst([r for r in rows if r.op == op and r.relation == k and not r.control]) for k in relations}
        for op in ops
    }
    caught = [r for r in rows if r.control and r.caught]
    missed = [r.candidate for r in rows if r.control and not r.caught]
    judged = {r.verdict for r in rows if not r.control}
    word = PASS if session.passed else UNSUPPORTED if judged == {UNSUPPORTED} and not missed else NEEDS_FIX
    data = {
        "audit": session.audit,
        "candidate": session.candidate.spec,
        "device": session.device_label,
        "dtypes": session.dtypes,
        "verdict": word,
        "ops": mine,
        "controls": {"caught": len(caught), "total": len(caught) + len(missed), "missed": missed},
    }
    lines = [{"op": op} | {k: MARK[v] for k, v in mine[op].items()} for op in ops]
    where = (
        "on Triton's interpreter; no statement about a GPU"
        if session.device_label == "interpreter"
        else (f"on {session.device_label}")
    )
    subject = ", ".join(filter(None, [f"`{session.candidate.spec}`", *session.dtypes, where]))
    text = (
        f"### Verdict: {MARK[word]}\n\n{subject}. "
        f"Controls caught: {len(caught)} of {len(caught) + len(missed)}.\n\n" + table(lines).data
    )
    return Bundle(text, data, MIME)


def _short(v: float) -> str:
    """Three digits: 8, 1.02k, 5.1M."""
    power, unit = next((p, u) for p, u in ((1e6, "M"), (1e3, "k"), (1, "")) if v >= p or p == 1)
    return f"{v / power:.3g}{unit}"


def heat(values: dict[str, dict[str, float]], title: str, unit: str, top: float | None = None) -> plt.Figure:
    """Rows × columns of non-negative numbers, zeros pale: on a logarithmic scale, or a linear one from 0 to `top`."""
    frame = pd.DataFrame(values).T
    data = frame.to_numpy(dtype=float)
    labels = 0.06 * max(len(str(name)) for name in frame.index)
    across = 0.06 * max(len(str(name)) for name in frame.columns)  # the height of the slanted labels
    size = max(5.0, 1.8 + 0.42 * data.shape[1] + labels), 0.9 + across + 0.3 * data.shape[0]
    figure, ax = plt.subplots(figsize=size)
    positive = np.ma.masked_where(~(data > 0), data)
    ax.set_facecolor("#eef2f4")
    if positive.count():
        norm = Normalize(0, top) if top else LogNorm(min(1.0, float(positive.min())), max(10.0, float(positive.max())))
        mesh = ax.pcolormesh(positive, norm=norm, edgecolor="white", linewidth=1, cmap="viridis_r")
        figure.colorbar(mesh, ax=ax, label=unit, pad=0.01)
    for i in range(data.shape[0]):
        for j in range(data.shape[1]):
            v = data[i, j]
            text = "" if np.isnan(v) else "0" if v == 0 else f"{v:.2f}" if top else _short(v)
            dark = positive.count() and v > 0 and norm(v) > 0.45
            ax.text(
                j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=6.5, color="white" if dark else "#333333"
            )
    ax.set_xticks(np.arange(data.shape[1]) + 0.5, frame.columns, rotation=60, ha="right", rotation_mode="anchor")
    ax.set_yticks(np.arange(data.shape[0]) + 0.5, frame.index)
    ax.set(xlim=(0, data.shape[1]), ylim=(data.shape[0], 0), title=title)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    figure.tight_layout()
    return figure


def lines(
    series: dict[str, dict], title: str, xlabel: str, ylabel: str, limits: dict[str, float], log: bool = False
) -> plt.Figure:
    """One line a series over categories, with the limits drawn in; a series named "fixed…" is grey."""
    figure, ax = plt.subplots(figsize=(8.5, 4.2))
    styles = iter([("#0072B2", "o"), ("#E69F00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#56B4E9", "v")] * 3)
    for name, points in series.items():
        fixed = name.startswith("fixed")
        color, marker = ("#888888", "x") if fixed else next(styles)
        ax.plot(
            [str(x) for x in points],
            list(points.values()),
            marker=marker,
            color=color,
            label=name,
            linewidth=1 if fixed else 1.6,
            linestyle=":" if fixed else "-",
            markersize=5,
        )
    for text, y in limits.items():
        ax.axhline(y, color="#D55E00" if len(limits) == 1 or y != 1 else "black", linewidth=0.9, linestyle="--")
        ax.annotate(
            text,
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    if log:
        ax.set_yscale("log")
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.legend(edgecolor="none", ncols=3, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.14))
    figure.tight_layout()
    return figure
