"""The figures of the performance notebook; each title says what was found."""

import statistics
from collections.abc import Sequence

import numpy as np

from bi_kernels.audit.bench.goals import number
from bi_kernels.audit.evidence.figures import plt  # in the style of all that is drawn
from bi_kernels.audit.evidence.verdicts import grouped

BLUE, ORANGE, GREEN, PINK, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, "#888888", "#333333")
TICKS = (0.25, 0.33, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8)
PATHS = {"cuBLASLt": (BLUE, "o"), "Gluon": (GREEN, "s"), "Triton": (ORANGE, "^"), "in two": (SKY, "D")}


def _kind(record: dict) -> str:
    return next(name for name in reversed(PATHS) if name in record["path"])


def _bars(ax: plt.Axes, bars: dict[str, float]) -> None:
    """Draws goals, and where both are equally fast."""
    ax.axhline(1, color="#333333", linewidth=0.8)
    for text, y in bars.items():
        ax.axhline(y, color=RED, linewidth=0.9, linestyle="--")
        ax.annotate(
            f"goal: {text} {y:g}",
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )


def _peers(records: Sequence[dict]) -> str:
    return " or ".join(dict.fromkeys(r["against"] for r in records))


def _said(records: Sequence[dict], bars: dict[str, float]) -> str:
    """Says what ratios come to, to whom, and whether both bars are reached."""
    ratios = [r["ratio"] for r in records]
    mean, least = statistics.geometric_mean(ratios), min(ratios)
    met = mean >= bars.get("geometric mean", 0) and least >= bars.get("smallest", 0)
    word = "both goals met" if met else "not both goals met"
    return f"{number(mean)} of {_peers(records)} on average, {number(least)} at least: {word}"


def strip(records: Sequence[dict], column: str, what: str, bars: dict[str, float]) -> plt.Figure:
    """Draws every ratio to the peer over a number of rows, by the path that computed it; a line through the means."""
    records = [r for r in records if "ratio" in r]
    places = {x: i for i, x in enumerate(sorted({r[column] for r in records}))}
    rng = np.random.default_rng(0)
    figure, ax = plt.subplots(figsize=(8.5, 4.2))
    for kind, (color, marker) in PATHS.items():
        mine = [r for r in records if _kind(r) == kind]
        at = [places[r[column]] + rng.uniform(-0.3, 0.3) for r in mine]
        how = {"color": color, "marker": marker, "s": 9, "alpha": 0.6, "linewidths": 0}
        ax.scatter(at, [r["ratio"] for r in mine], label=f"{kind} ({len(mine)})", **how)
    means = [statistics.geometric_mean(r["ratio"] for r in records if r[column] == x) for x in places]
    ax.plot(
        list(places.values()), means, color="#333333", marker="_", markersize=14, linewidth=1, label="geometric mean"
    )
    _bars(ax, bars)
    ax.set_yscale("log", base=2)
    least, most = (bound([*bars.values(), 1, *(r["ratio"] for r in records)]) for bound in (min, max))
    ticks = [t for t in TICKS if least / 1.1 < t < most * 1.1]
    ax.set_yticks(ticks, [str(t) for t in ticks])
    ax.set_xticks(list(places.values()), [str(x) for x in places])
    ax.set(xlabel=column, ylabel=f"time of {_peers(records)} / ours", title=f"{what}: {_said(records, bars)}")
    ax.legend(edgecolor="none", fontsize=8, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.14))
    figure.tight_layout()
    return figure


def scatter(records: Sequence[dict], bars: dict[str, float]) -> plt.Figure:
    """Draws the ratios of drawn shapes over the size of the product."""
    records = [r for r in records if "ratio" in r]
    figure, ax = plt.subplots(figsize=(8.5, 3.8))
    for kind, (color, marker) in PATHS.items():
        mine = [r for r in records if _kind(r) == kind]
        size = [float(r["M"]) * r["N"] * r["K"] for r in mine]
        ax.scatter(
            size, [r["ratio"] for r in mine], color=color, marker=marker, s=16, alpha=0.8, label=f"{kind} ({len(mine)})"
        )
    _bars(ax, bars)
    ax.set_xscale("log")
    title = f"{len(records)} drawn shapes: {_said(records, bars)}"
    ax.set(xlabel="M · N · K", ylabel=f"time of {_peers(records)} / ours", title=title)
    ax.legend(edgecolor="none", fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.16))
    figure.tight_layout()
    return figure


def attention(records: Sequence[dict], bars: dict[tuple[str, str], float]) -> plt.Figure:
    """Draws TFLOP/s of everybody, forward and backward; bars: goals, by direction and case, as shares of the peer."""
    directions = grouped(records, lambda r: r["direction"])
    figure, axes = plt.subplots(1, len(directions), figsize=(10, 3.8))
    names = list(dict.fromkeys(name for r in records for name in r["ms"]))
    for ax, (direction, mine) in zip(np.atleast_1d(axes), directions.items()):
        for j, name in enumerate(names):
            rates = [r["TFLOP/s"] * r["ms"][r["who"]][0] / r["ms"][name][0] if name in r["ms"] else 0 for r in mine]
            at = np.arange(len(mine)) + 0.8 * (j / len(names) - 0.5)
            if any(rates):
                ax.bar(at, rates, 0.75 / len(names), color=COLORS[j], label=name, align="edge")
        for i, r in enumerate(mine):
            if (direction, r["case"]) in bars and "ratio" in r:
                y = bars[direction, r["case"]] * r["TFLOP/s"] / r["ratio"]
                ax.plot([i - 0.4, i + 0.4], [y, y], color=RED, linewidth=1.2, linestyle="--")
        ratios = [r["ratio"] for r in mine if "ratio" in r]
        said = f"{number(min(ratios))} to {number(max(ratios))} of {mine[0].get('against')}" if ratios else ""
        ax.set_xticks(range(len(mine)), [r["case"] for r in mine])
        ax.set(title=f"{direction}: {said}", ylabel="TFLOP/s", xlabel="sequences × tokens; dashed: the goal")
    handles = {label: h for ax in np.atleast_1d(axes) for h, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), edgecolor="none", fontsize=8, ncols=6, loc="lower left")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def roofline(records: Sequence[dict], limits: dict[str, float]) -> plt.Figure:
    """Draws the rate of every op that computes over the flops that it computes for each byte it has to move."""
    mine = [r for r in records if r.get("intensity")]
    copy, most = limits["TB/s"], limits["TFLOP/s"]
    xs = np.geomspace(min(r["intensity"] for r in mine) / 1.5, max(r["intensity"] for r in mine) * 1.5, 200)
    figure, ax = plt.subplots(figsize=(8.5, 4.4))
    ax.plot(xs, np.minimum(copy * xs, most), color="#333333", linewidth=1.2, label="limits, as measured")
    roof = lambda r: min(copy * r["intensity"], most)
    for color, (name, found) in zip(COLORS, grouped(mine, lambda r: r["group"]).items()):
        ax.scatter(
            [r["intensity"] for r in found], [r["TFLOP/s"] for r in found], s=8, alpha=0.55, color=color, label=name
        )
    share = statistics.median(r["TFLOP/s"] / roof(r) for r in mine)
    said = f"half of {len(mine)} measurements reach {share:.2f} of the roof or more"
    title = f"{copy:.2f} TB/s, {most:.0f} TFLOP/s: {said}"
    ax.set(xscale="log", yscale="log", xlabel="flops a byte that has to be moved", ylabel="TFLOP/s", title=title)
    ax.legend(edgecolor="none", fontsize=8, loc="lower right")
    figure.tight_layout()
    return figure


def shares(records: Sequence[dict], goal: float) -> plt.Figure:
    """Draws, of ops that memory bounds, the share of a copy's bandwidth of everybody."""
    mine = [r for r in records if "of limit" in r]
    names = list(dict.fromkeys(name for r in mine for name in r["ms"]))
    figure, ax = plt.subplots(figsize=(8.5, 1 + 0.36 * len(mine)))
    for j, name in enumerate(names):
        found = [
            (i, r["of limit"] * r["ms"][r["who"]][0] / r["ms"][name][0]) for i, r in enumerate(mine) if name in r["ms"]
        ]
        ax.scatter(
            [x for _, x in found], [i for i, _ in found], color=COLORS[j], marker="osD^v"[j % 5], s=26, label=name
        )
    ax.axvline(goal, color=RED, linewidth=0.9, linestyle="--")
    reached = sum(r["of limit"] >= goal for r in mine)
    ax.set_yticks(range(len(mine)), [f"{r['op']}, {r['case']}, {r['direction']}" for r in mine], fontsize=7.5)
    ax.invert_yaxis()
    ax.set(
        xlabel="share of a copy's bandwidth",
        title=f"{reached} of {len(mine)} of ours reach {goal:g} of a copy's bandwidth",
    )
    ax.legend(edgecolor="none", fontsize=8, ncols=4, loc="upper left", bbox_to_anchor=(0, -1.3 / len(mine)))
    figure.tight_layout()
    return figure


def calls(records: Sequence[dict], bars: dict[str, float]) -> plt.Figure:
    """Draws what each eager call costs the CPU beside stock's, with the goals."""
    mine = [r for r in records if "cpu_us" in r and r["op"] != "decode step"]
    figure, ax = plt.subplots(figsize=(8.5, 0.9 + 0.42 * len(mine)))
    at = np.arange(len(mine))
    for shift, key, color, label in ((-0.2, "cpu_us", BLUE, "bi_kernels"), (0.2, "stock_us", ORANGE, "stock PyTorch")):
        values = [r[key] for r in mine]
        ax.barh(at + shift, values, 0.38, color=color, label=label)
        for i, v in enumerate(values):
            ax.text(v, i + shift, f" {v:.1f}", va="center", fontsize=7)
    for i, r in enumerate(mine):
        if r["op"] in bars:
            ax.plot([bars[r["op"]]] * 2, [i - 0.42, i + 0.42], color=RED, linewidth=1.4)
    judged = [r for r in mine if r["op"] in bars]
    met = sum(r["cpu_us"] <= bars[r["op"]] for r in judged)
    ax.set_yticks(at, [r["op"] for r in mine])
    ax.invert_yaxis()
    ax.set(
        xlabel="µs of the CPU; red: the goal", title=f"{met} of {len(judged)} eager calls cost no more than their goal"
    )
    ax.legend(edgecolor="none", fontsize=8)
    figure.tight_layout()
    return figure
