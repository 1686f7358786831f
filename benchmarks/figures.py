"""The figures of the benchmark's notebook; each title says what was found."""

import statistics
from collections.abc import Sequence

import numpy as np
import pandas as pd

from bi_kernels.audit.evidence.figures import plt  # with the style of every figure
from bi_kernels.audit.evidence.verdicts import grouped
from bi_kernels.audit.index.goals import number

BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#333333"
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, "#888888", BLACK)
TICKS = (0.25, 0.33, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8)
PATHS = {"cuBLASLt": (BLUE, "o"), "Gluon": (GREEN, "s"), "Triton": (ORANGE, "^"), "in two": (SKY, "D")}
GOAL = {"color": RED, "linewidth": 1.2, "linestyle": "--"}


def _rates(record: dict, value: str) -> dict[str, float]:
    """Returns a rate of ours, and the same of every peer."""
    ours = record["ms"][record["who"]][0]
    return {name: record[value] * ours / times[0] for name, times in record["ms"].items()}


def _finish(figure: plt.Figure, ax: plt.Axes, columns: int = 1, **place) -> plt.Figure:
    ax.legend(edgecolor="none", fontsize=8, ncols=columns, **place)
    figure.tight_layout()
    return figure


def ratios(records: Sequence[dict], what: str, goals: dict[str, float], column: str = "") -> plt.Figure:
    """Draws every ratio to the peer by the path that computed it: over `column` with a line through the means, or over
    the size of the product."""
    found = pd.DataFrame([r for r in records if "ratio" in r])
    peers = " or ".join(found["against"].unique())
    means = {x: statistics.geometric_mean(mine) for x, mine in found.groupby(column or "group")["ratio"]}
    places = {x: i for i, x in enumerate(means)}
    jitter = np.random.default_rng(0).uniform(-0.3, 0.3, len(found))
    xs = found[column].map(places) + jitter if column else found["M"].astype(float) * found["N"] * found["K"]
    kinds = found["path"].map(lambda path: next(name for name in reversed(PATHS) if name in path))
    figure, ax = plt.subplots(figsize=(8.5, 4.2))
    for kind, (color, marker) in PATHS.items():
        own = kinds == kind
        how = {"color": color, "marker": marker, "s": 9 if column else 20, "alpha": 0.6, "linewidths": 0}
        ax.scatter(xs[own], found["ratio"][own], label=f"{kind} ({own.sum()})", **how)
    if column:
        how = {"color": BLACK, "marker": "_", "markersize": 14, "linewidth": 1}
        ax.plot([*places.values()], [*means.values()], label="geometric mean", **how)
        ax.set_xticks([*places.values()], [*map(str, places)])
    else:
        ax.set_xscale("log")
    ax.axhline(1, color=BLACK, linewidth=0.8)
    for text, y in goals.items():
        ax.axhline(y, **GOAL)
        ax.text(1.005, y, f"goal: {text} {y:g}", transform=ax.get_yaxis_transform(), va="center", fontsize=7)
    mean, least = statistics.geometric_mean(found["ratio"]), found["ratio"].min()
    met = mean >= goals.get("geometric mean", 0) and least >= goals.get("smallest", 0)
    said = f"{number(mean)} of {peers} on average, {number(least)} at least: {'' if met else 'not '}both goals met"
    bounds = [*goals.values(), 1, least, found["ratio"].max()]
    ticks = [t for t in TICKS if min(bounds) / 1.1 < t < max(bounds) * 1.1]
    ax.set_yscale("log", base=2)
    ax.set_yticks(ticks, [*map(str, ticks)])
    ax.set(xlabel=column or "M · N · K", ylabel=f"time of {peers} / ours", title=f"{what}: {said}")
    return _finish(figure, ax, 3, loc="upper left", bbox_to_anchor=(0, -0.14))


def attention(records: Sequence[dict], goals: dict[tuple[str, str], float]) -> plt.Figure:
    """Draws TFLOP/s of everybody, forward and backward. goals: shares of the peer, by direction and case."""
    directions = grouped(records, lambda r: r["direction"])
    figure, axes = plt.subplots(1, len(directions), figsize=(10, 3.8), squeeze=False)
    names = list(dict.fromkeys(name for r in records for name in r["ms"]))
    for ax, (direction, mine) in zip(axes[0], directions.items()):
        rates = pd.DataFrame([_rates(r, "TFLOP/s") for r in mine]).reindex(columns=names)
        for j, name in enumerate(names):
            if rates[name].any():
                at = np.arange(len(mine)) + 0.8 * (j / len(names) - 0.5)
                ax.bar(at, rates[name], 0.75 / len(names), color=COLORS[j], label=name, align="edge")
        for i, r in enumerate(mine):
            if (direction, r["case"]) in goals and "ratio" in r:
                ax.hlines(goals[direction, r["case"]] * r["TFLOP/s"] / r["ratio"], i - 0.4, i + 0.4, **GOAL)
        found = [r["ratio"] for r in mine if "ratio" in r]
        said = f"{number(min(found))} to {number(max(found))} of {mine[0].get('against')}" if found else ""
        ax.set_xticks(range(len(mine)), [r["case"] for r in mine])
        ax.set(title=f"{direction}: {said}", ylabel="TFLOP/s", xlabel="sequences × tokens; dashed: the goal")
    handles = {label: h for ax in axes[0] for h, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), edgecolor="none", fontsize=8, ncols=6, loc="lower left")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def roofline(records: Sequence[dict], limits: dict[str, float]) -> plt.Figure:
    """Draws the TFLOP/s of every op over its flops for each byte that it has to move."""
    mine = [r for r in records if r.get("intensity")]
    roof = lambda intensity: np.minimum(limits["TB/s"] * intensity, limits["TFLOP/s"])
    xs = np.geomspace(min(r["intensity"] for r in mine) / 1.5, max(r["intensity"] for r in mine) * 1.5, 200)
    figure, ax = plt.subplots(figsize=(8.5, 4.4))
    ax.plot(xs, roof(xs), color=BLACK, linewidth=1.2, label="limits, as measured")
    for color, (group, found) in zip(COLORS, grouped(mine, lambda r: r["group"]).items()):
        points = [r["intensity"] for r in found], [r["TFLOP/s"] for r in found]
        ax.scatter(*points, s=8, alpha=0.55, color=color, label=group)
    share = statistics.median(r["TFLOP/s"] / roof(r["intensity"]) for r in mine)
    said = f"half of {len(mine)} measurements reach {share:.2f} of the roof or more"
    title = f"{limits['TB/s']:.2f} TB/s, {limits['TFLOP/s']:.0f} TFLOP/s: {said}"
    ax.set(xscale="log", yscale="log", xlabel="flops a byte that has to be moved", ylabel="TFLOP/s", title=title)
    return _finish(figure, ax, loc="lower right")


def shares(records: Sequence[dict], goal: float) -> plt.Figure:
    """Draws everybody's share of a copy's bandwidth."""
    mine = [r for r in records if "of limit" in r]
    rates = pd.DataFrame([_rates(r, "of limit") for r in mine])
    figure, ax = plt.subplots(figsize=(8.5, 1 + 0.36 * len(mine)))
    for j, name in enumerate(rates):
        ax.scatter(rates[name], rates.index, color=COLORS[j], marker="osD^v"[j % 5], s=26, label=name)
    ax.axvline(goal, **GOAL)
    ax.set_yticks(range(len(mine)), [f"{r['op']}, {r['case']}, {r['direction']}" for r in mine], fontsize=7.5)
    ax.invert_yaxis()
    reached = sum(r["of limit"] >= goal for r in mine)
    title = f"{reached} of {len(mine)} of ours reach {goal:g} of a copy's bandwidth"
    ax.set(xlabel="share of a copy's bandwidth", title=title)
    return _finish(figure, ax, 4, loc="upper left", bbox_to_anchor=(0, -1.3 / len(mine)))


def calls(records: Sequence[dict], goals: dict[str, float]) -> plt.Figure:
    """Draws what each eager call costs the CPU, ours and stock's, with the goals."""
    mine = [r for r in records if "cpu_us" in r and r["op"] != "decode step"]
    figure, ax = plt.subplots(figsize=(8.5, 0.9 + 0.42 * len(mine)))
    at = np.arange(len(mine))
    for shift, key, color, label in ((-0.2, "cpu_us", BLUE, "bi_kernels"), (0.2, "stock_us", ORANGE, "stock PyTorch")):
        bars = ax.barh(at + shift, [r[key] for r in mine], 0.38, color=color, label=label)
        ax.bar_label(bars, fmt=" %.1f", fontsize=7)
    judged = [(i, r["cpu_us"], goals[r["op"]]) for i, r in enumerate(mine) if r["op"] in goals]
    for i, _, goal in judged:
        ax.vlines(goal, i - 0.42, i + 0.42, color=RED, linewidth=1.4)
    met = sum(us <= goal for _, us, goal in judged)
    ax.set_yticks(at, [r["op"] for r in mine])
    ax.invert_yaxis()
    title = f"{met} of {len(judged)} eager calls cost no more than their goal"
    ax.set(xlabel="µs of the CPU; red: the goal", title=title)
    return _finish(figure, ax)
