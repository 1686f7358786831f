"""Figures of the notebooks: apart from the tables, for the library that draws takes half a second to load."""

import math
from base64 import b64encode
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle

from bi_kernels.audit.index.picture import png
from bi_kernels.audit.progress import shell

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


def title(figure: plt.Figure) -> str:
    """Returns in one line what a figure is called: its own title, else those of its axes."""
    axes = (ax.get_title(loc=loc) for ax in figure.axes for loc in ("left", "center", "right"))
    return " ".join((figure.get_suptitle() or "; ".join(filter(None, axes))).split())


def show_small() -> None:
    """Has Jupyter show figures with one byte a pixel, and keep the title of each in the output's metadata, where
    reports find their alternative text."""
    if found := shell():
        import matplotlib_inline.backend_inline  # noqa: F401 (it says how figures are shown, once)

        formatter, told = found.display_formatter, lambda figure: ({}, {"image/png": {"alt": title(figure)}})
        formatter.mimebundle_formatter.for_type(plt.Figure, told)
        formatter.formatters["image/png"].for_type(plt.Figure, lambda figure: b64encode(png(figure)).decode())


show_small()


def _short(v: float) -> str:
    """Three digits: 8, 1.02k, 5.1M; beyond them the power of ten."""
    if v >= 9.995e8:
        return f"{v:.0e}".replace("e+0", "e").replace("e+", "e")
    power, unit = next((p, u) for p, u in ((1e6, "M"), (1e3, "k"), (1, "")) if v >= 0.9995 * p or p == 1)
    return f"{v / power:.3g}{unit}"


def share(v: float) -> str:
    """Two digits, rounded down: what is below 1 does not look like 1."""
    down = math.floor(round(v * 100, 6)) / 100
    return f"{min(down, 0.99) if v < 1 else down:.2f}" if v >= 0.01 else "<.01"


def heat(
    values: dict[str, dict[str, float]], title: str, unit: str, top: float | None = None, across: str = ""
) -> plt.Figure:
    """Rows × columns of non-negative numbers, on a logarithmic scale or from 0 to `top`: zeros pale, hatched what a row
    does not have, and said of NaN that it raised; across: what the columns are."""
    frame = pd.DataFrame(values).T
    data = frame.to_numpy(dtype=float)
    height, width = data.shape
    beside, below = (0.06 * max(len(str(name)) for name in names) for names in (frame.index, frame.columns))  # labels
    figure, ax = plt.subplots(figsize=(max(5.0, 1.8 + 0.42 * width + beside), 0.9 + below + 0.3 * height))
    bounded = np.minimum(data, top or data[np.isfinite(data)].max(initial=10.0))  # what is beyond has the last color
    positive = np.ma.masked_where(~(data > 0), bounded)
    ax.set_facecolor("#eef2f4")
    if positive.count():
        norm = Normalize(0, top) if top else LogNorm(min(1.0, float(positive.min())), max(10.0, float(positive.max())))
        mesh = ax.pcolormesh(positive, norm=norm, edgecolor="white", linewidth=1, cmap="viridis_r")
        beyond = "max" if np.nanmax(data) > positive.max() else "neither"
        figure.colorbar(mesh, ax=ax, label=unit, pad=0.01, extend=beyond)
    asked = np.array([[name in line for name in frame.columns] for line in values.values()])
    for (i, j), v in np.ndenumerate(data):
        two = share(v) if v < 1 and unit != "times" else f"{v:.2f}"
        text = "raised" if np.isnan(v) else "0" if v == 0 else two if top and v < 10 else _short(v)
        text = text if asked[i, j] else ""
        color = "white" if v > 0 and norm(bounded[i, j]) > 0.45 else "#333333"
        ax.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=6.5, color=color)
    ax.set_xticks(np.arange(width) + 0.5, frame.columns, rotation=60, ha="right", rotation_mode="anchor")
    ax.set_yticks(np.arange(height) + 0.5, frame.index)
    ax.set(xlim=(0, width), ylim=(height, 0), title=title)
    for i, j in np.argwhere(~asked):
        ax.add_patch(Rectangle((j, i), 1, 1, fill=False, hatch="////", edgecolor="#bbbbbb", linewidth=0))
    said = [across] * bool(across) + ["hatched: not asked"] * (not asked.all())
    ax.set_xlabel("; ".join(said), fontsize=7, loc="left")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    figure.tight_layout()
    return figure


def lines(
    series: dict[str, dict], title: str, xlabel: str, ylabel: str, limits: dict[str, float], log: bool = False
) -> plt.Figure:
    """One line a series over categories, with the limits drawn in; a series named "fixed…" is grey. log: a logarithmic
    scale, linear below 1 where something is 0."""
    figure, ax = plt.subplots(figsize=(8.5, 4.2))
    styles = cycle([("#0072B2", "o"), ("#E69F00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#56B4E9", "v")])
    for name, points in series.items():
        fixed = name.startswith("fixed")
        color, marker = ("#888888", "x") if fixed else next(styles)
        width, style = (1, ":") if fixed else (1.6, "-")
        how = {"marker": marker, "color": color, "linewidth": width, "linestyle": style, "markersize": 5}
        ax.plot([str(x) for x in points], list(points.values()), label=name, **how)
    for text, y in limits.items():
        ax.axhline(y, color="#D55E00" if len(limits) == 1 or y != 1 else "black", linewidth=0.9, linestyle="--")
        at = {"xycoords": ("axes fraction", "data"), "xytext": (3, 0), "textcoords": "offset points"}
        ax.annotate(text, (1, y), **at, va="center", fontsize=8)
    if log and any(v == 0 for points in series.values() for v in points.values()):
        ax.set_yscale("symlog", linthresh=1)
        ax.set_ylim(0, 2 * ax.get_ylim()[1])  # room for the markers of the largest
    elif log:
        ax.set_yscale("log")
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.legend(edgecolor="none", ncols=3, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.14))
    figure.tight_layout()
    return figure
