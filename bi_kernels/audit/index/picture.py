"""The status matrix as a picture: a panel a folder of reports, and in each cell how many of the dtypes asked pass."""

import io
import textwrap

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED
from bi_kernels.audit.index.matrix import RELATION
from bi_kernels.contract import DTYPES

SOME, ALL = "#6baed6", "#08519c"  # of the dtypes that were asked pass
WRONG, REFUSED, NOT_JUDGED, LINES = "#d55e00", "#bdbdbd", "#f2f2f2", "#999999"
WIDE, HIGH = 0.21, 0.19  # inches of a cell
ROOM = {"svg.hashsalt": "bi-audit", "svg.fonttype": "none", "font.size": 8, "hatch.linewidth": 0.4}


def png(figure: Figure) -> bytes:
    """Returns a figure as a PNG with one byte a pixel, of 256 colors, which takes a third of the usual bytes."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, format="PNG", optimize=True)
    return small.getvalue()


def draw(places: dict[str, dict], title: str) -> str:
    """Returns an SVG of `matrix.cells` of some folders, the same text for the same cells."""
    ops = list(dict.fromkeys(op for found in places.values() for op in found))
    width, height = len(places) * (len(RELATION) + 1) * WIDE + 2.2, len(ops) * HIGH + 2.9
    with matplotlib.rc_context(ROOM):
        figure = Figure(figsize=(width, height), facecolor="white")
        panels = figure.subplots(1, len(places), squeeze=False, sharey=True)[0]
        for panel, (name, found) in zip(panels, places.items()):
            panel.set_facecolor(NOT_JUDGED)
            panel.patch.set(hatch="////", edgecolor=LINES)
            for op, columns in found.items():
                for x, of_dtype in enumerate(columns.values()):
                    if of_dtype:
                        _cell(panel, x, ops.index(op), of_dtype)
            panel.set(xlim=(0, len(RELATION)), ylim=(len(ops), 0))
            panel.set_title("\n".join([*textwrap.wrap(name, 26), _count(found)]), fontsize=8, loc="left")
            panel.set_xticks([x + 0.5 for x in range(len(RELATION))], RELATION, rotation=90)
            panel.set_yticks([y + 0.5 for y in range(len(ops))], ops)
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
        shown = [Patch(facecolor=ALL, label="n/n: all dtypes asked pass"), Patch(facecolor=SOME, label="some pass")]
        shown += [Patch(facecolor=WRONG, label="✗ needs a fix"), Patch(facecolor=REFUSED, label="refused")]
        shown += [Patch(facecolor=NOT_JUDGED, hatch="////", edgecolor=LINES, label="not judged")]
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        figure.legend(handles=shown, loc="lower left", ncols=len(shown), frameon=False)
        inches = lambda bottom, top: {"bottom": bottom / height, "top": 1 - top / height}
        figure.subplots_adjust(left=1.35 / width, right=1 - 0.15 / width, wspace=0.12, **inches(1.55, 0.95))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _asked(of_dtype: dict[str, str]) -> list[str]:
    """Returns the verdicts of the dtypes that were asked; the contract's row holds those besides that are refused."""
    return [of_dtype[d] for d in of_dtype if d in DTYPES] or [*of_dtype.values()]


def _count(found: dict[str, dict[str, dict[str, str]]]) -> str:
    """Says how many cells pass of those that were judged: what is refused is not."""
    every = [of_dtype.values() for columns in found.values() for of_dtype in columns.values() if of_dtype]
    judged = [verdicts for verdicts in every if {*verdicts} != {UNSUPPORTED}]
    return f"{sum(NEEDS_FIX not in verdicts for verdicts in judged)} of {len(judged)} pass"


def _cell(panel, x: int, y: int, of_dtype: dict[str, str]) -> None:
    """Draws the verdicts of the dtypes on one op and property."""
    asked, wrong = _asked(of_dtype), NEEDS_FIX in of_dtype.values()
    good = asked.count(PASS)
    color = WRONG if wrong else ALL if good == len(asked) else SOME if good else REFUSED
    panel.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", clip_on=False))
    text, size = ("✗", 8) if wrong else (f"{good}/{len(asked)}", 5)
    panel.text(x + 0.5, y + 0.5, text, ha="center", va="center", color="white", fontsize=size)
