"""Draws where each recipe drifts, and what it costs."""

import statistics
import textwrap

from matplotlib.colors import LogNorm

from bi_kernels.audit.findings import grouped
from helpers.figures import plt  # in the style of all that is drawn
from helpers.recipes.products import DIRECTIONS, PLAIN
from helpers.recipes.summary import finding, ratios, where

COLORS = {"forward": "#0072B2", "dX": "#E69F00"}
LEAST = 2.0**-14  # share of elements at which the colours begin


def drawn(document: dict) -> plt.Figure:
    """Returns a figure: a row a recipe; on the left the shapes over M, forward and dX, a mark at each M asked, coloured
    by the share of elements that differ; on the right the time over plain cuBLAS's, where something was timed."""
    every, cases, rows = document["recipes"], list(document["shapes"]), document["rows"]
    plain = every.get(PLAIN.name)
    timed = bool(plain) and any(plain["ms"].values())
    columns = [*DIRECTIONS, *(["time"] if timed else [])]
    size = {"figsize": (4.6 * len(columns) + 1.2, (0.24 * len(cases) + 0.9) * len(every) + 1.2)}
    figure, axes = plt.subplots(len(every), len(columns), squeeze=False, layout="constrained", sharex=True, **size)
    norm, mesh = LogNorm(LEAST, 1), None
    for number, (line, (name, found)) in enumerate(zip(axes, every.items())):
        for ax, direction in zip(line, DIRECTIONS):
            mesh = _marks(ax, found, direction, cases, rows, norm)
            whose = f"{name}\n" if direction == "forward" else ""
            ax.set_title(f"{whose}{direction}: {where(found, direction)}", fontsize=9)
            ax.set_yticks(range(len(cases)), cases if direction == "forward" else [""] * len(cases), fontsize=8)
        if timed:
            _times(line[-1], name, found, plain, rows)
        if number == len(every) - 1:
            for ax in line:
                ax.set_xlabel(f"M: rows of the call, held against a call of {document['largest']}")
    for ax in axes.flat:
        ax.set_xticks(range(len(rows)), rows, rotation=90, fontsize=6.5)
        ax.set_xlim(-0.7, len(rows) - 0.3)
    figure.colorbar(mesh, ax=axes[:, : len(DIRECTIONS)], label="share of elements that differ", aspect=60, pad=0.01)
    title = textwrap.fill(finding(document), int(10 * size["figsize"][0]))  # letters of a line
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure


def _marks(ax: plt.Axes, found: dict, direction: str, cases: list[str], rows: list[int], norm: LogNorm):
    """Draws a pale dot where nothing differs, a coloured square where something does, and nothing where nothing was
    asked."""
    asked, drifting = found["asked"][direction], found["drifts"][direction]
    pale = [(x, y) for y, case in enumerate(cases) for x in range(asked.get(case, 0))]
    ax.scatter([x for x, _ in pale], [y for _, y in pale], s=5, color="#c4ccd2", linewidths=0)
    full = [(rows.index(int(m)), cases.index(case), a / b) for case, ms in drifting.items() for m, (a, b) in ms.items()]
    at = {"c": [max(share, LEAST) for *_, share in full], "norm": norm, "cmap": "viridis_r"}
    mesh = ax.scatter([x for x, *_ in full], [y for _, y, _ in full], s=34, marker="s", zorder=3, **at)
    ax.set_ylim(len(cases) - 0.5, -0.5)
    return mesh


def _times(ax: plt.Axes, name: str, found: dict, plain: dict, rows: list[int]) -> None:
    """Draws the geometric mean of the times over plain cuBLAS's at each M, and from the least to the most."""
    ax.axhline(1, color="#333333", linewidth=0.8)
    most = 0.0
    for direction, marker in zip(DIRECTIONS, "os"):
        by_m = grouped(ratios(found, plain, direction).items(), lambda item: item[0][1])
        values = {rows.index(m): [r for _, r in mine] for m, mine in sorted(by_m.items())}
        if not values:
            continue
        most = max(most, *map(max, values.values()))
        means = [statistics.geometric_mean(v) for v in values.values()]
        ax.plot([*values], means, color=COLORS[direction], marker=marker, markersize=4, label=direction)
        low, high = [*map(min, values.values())], [*map(max, values.values())]
        ax.fill_between([*values], low, high, color=COLORS[direction], alpha=0.18, linewidth=0)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylim(min(0.5, ax.get_ylim()[0]), max(2.0, ax.get_ylim()[1]))
    ax.set_ylabel("time / plain cuBLAS's", fontsize=8)
    paid = f"at most {most:.2f} times as long" if most else "not timed"
    ax.set_title(f"time: {paid if name != PLAIN.name else 'what the others are held against'}", fontsize=9)
    if most and name != PLAIN.name:
        ax.legend(edgecolor="none", fontsize=8, ncols=2, loc="best")
