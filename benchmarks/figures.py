"""The figures of the benchmark's notebook; each title says what was found."""

import statistics
from collections.abc import Sequence

import numpy as np
import pandas as pd

from bi_kernels.audit.findings import grouped
from bi_kernels.audit.index.goals import number
from helpers.figures import plt  # with the style of every figure

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
    said = f"{number(mean)} of {peers} on average, {number(least)} at least"
    bounds = [*goals.values(), 1, least, found["ratio"].max()]
    ticks = [t for t in TICKS if min(bounds) / 1.1 < t < max(bounds) * 1.1]
    ax.set_yscale("log", base=2)
    ax.set_yticks(ticks, [*map(str, ticks)])
    ax.set(xlabel=column or "M · N · K", ylabel=f"time of {peers} / ours", title=f"{what}: {said}")
    return _finish(figure, ax, 3, loc="upper left", bbox_to_anchor=(0, -0.14))


def everybody(records: Sequence[dict], values: Sequence[dict], what: str, title: str, goals: Sequence) -> plt.Figure:
    """Draws a line a measurement: a value of ours and of every peer, and the goal, or None. values: by name."""
    found = pd.DataFrame(values)
    figure, ax = plt.subplots(figsize=(8.5, 1.2 + 0.36 * len(records)))
    for j, name in enumerate(found):
        ax.scatter(found[name], found.index, color=COLORS[j], marker="osD^v"[j % 5], s=26, label=name)
    for i, goal in enumerate(goals):
        ax.vlines(np.nan if goal is None else goal, i - 0.42, i + 0.42, **GOAL)
    ax.set_yticks(found.index, [", ".join((r["op"], r["case"], r["direction"])) for r in records], fontsize=7.5)
    ax.invert_yaxis()
    ax.set(xlabel=f"{what}; red: the goal", title=title)
    return _finish(figure, ax, 5, loc="upper left", bbox_to_anchor=(0, -1.3 / len(records)))


def attention(records: Sequence[dict], goals: dict[tuple[str, str], float]) -> plt.Figure:
    """Draws TFLOP/s of everybody, forward and backward. goals: shares of the peer, by direction and case."""
    said = []
    for direction, mine in grouped((r for r in records if "ratio" in r), lambda r: r["direction"]).items():
        ratios = [r["ratio"] for r in mine]
        said.append(f"{direction} {number(min(ratios))} to {number(max(ratios))} of {mine[0]['against']}")
    share = lambda r: goals.get((r["direction"], r["case"]), np.nan) / r.get("ratio", np.nan)
    every = [r["TFLOP/s"] * share(r) for r in records]
    return everybody(records, [_rates(r, "TFLOP/s") for r in records], "TFLOP/s", ", ".join(said), every)


def shares(records: Sequence[dict], goal: float) -> plt.Figure:
    """Draws everybody's share of a copy's bandwidth."""
    mine = [r for r in records if "of limit" in r]
    reached = [r["of limit"] for r in mine]
    title = f"Ours reach {number(min(reached))} to {number(max(reached))} of a copy's bandwidth"
    values = [_rates(r, "of limit") for r in mine]
    return everybody(mine, values, "share of a copy's bandwidth", title, [goal] * len(mine))


def calls(records: Sequence[dict], goals: dict[str, float]) -> plt.Figure:
    """Draws what each eager call costs the CPU, ours and stock's."""
    mine = [r for r in records if "cpu_us" in r and r["op"] != "decode step"]
    ratios = [r["times"] for r in mine]
    title = f"An eager call costs the CPU {number(min(ratios))} to {number(max(ratios))} times what stock's does"
    values = [{name: times[0] for name, times in r["CPU µs"].items()} for r in mine]
    return everybody(mine, values, "µs of the CPU", title, [goals.get(r["op"]) for r in mine])


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
