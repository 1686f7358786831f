"""Shows a certificate: as text, as Markdown, and as a page with two figures."""

import json
import shlex
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from bi_kernels.audit.certificate.hints import ARITHMETIC, Cause
from bi_kernels.audit.certificate.pairs import CLIP, axes
from bi_kernels.audit.findings import NEEDS_FIX, PASS
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.markdown import MARK, table

TITLE, PAGE = "# Rollout and training", "README.md"
LOGPROBS, WHERE = "logprobs.png", "where.png"
WIDTH = 100  # columns of a terminal
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#888888"
STYLE = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 9,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def verdict(c) -> str:
    """Returns the first sentence: whether all agrees, else how many logprobs differ and by how much."""
    if c.passed:
        return f"All {c.tokens:,} logprobs are equal, bit by bit."
    found = f"; also {', '.join(dict.fromkeys(f.kind for f in c.findings))}" * bool(c.findings)
    if not c.tokens:
        return f"No token can be compared{found}."
    if c.tokens == c.equal:
        return f"The {c.tokens:,} logprobs that can be compared are equal{found}."
    return f"{c.tokens - c.equal:,} of {c.tokens:,} logprobs differ, by at most {c.max_abs:.3g}{found}."


def effect(c) -> list[str]:
    """Returns the sentences on what the differences do to PPO."""
    if c.tokens == c.equal:
        return []
    near = lambda r: f"1 {'+-'[r < 1]} {abs(r - 1):.2g}" if 0 < abs(r - 1) < 2.0**-10 else f"{r:.4g}"
    low, high = map(near, c.ratios)
    clipped = f"PPO's clip at {CLIP} touches {share(c.clipped) if c.clipped else 'none'} of the tokens"
    return [
        f"Equal bits: {share(c.equal / c.tokens)}. Mean |Δ| {c.mean_abs:.3g}.",
        f"KL(rollout ‖ training) {c.k3:.3g} by k3, {c.k1:.3g} by k1.",
        f"Ratios reach from {low} to {high}; {clipped}.",
    ]


def share(value: float) -> str:
    """Returns a percentage of three digits that is 0 % or 100 % only where that is exact."""
    text = f"{100 * value:.3g}"
    return f"{'<' if value > 0.5 else '>'}{text} %" if text in ("0", "100") and value not in (0, 1) else f"{text} %"


def where_to_look(c, ids: str = "") -> list[str]:
    """Returns how `locate` would name the op, for the first sample that differs; its commands begin with bi-audit."""
    if not ARITHMETIC & {h.cause for h in c.hints}:
        return []
    sample = int(c.pairs.sample[c.pairs.differ][0])
    of = f" (completion: {ids})" * bool(ids)
    return [
        "Where both sides run, locate names the first op that differs. "
        f"Let build() return the model and the ids of sample {sample}{of}.",
        "bi-audit locate --candidate engine.py:build --layouts decode --record run.dir",
        "bi-audit locate --candidate trainer.py:build --layouts batch --against run.dir",
    ]


def lines(groups: list, name: str) -> list[dict[str, str]]:
    """Returns a table's lines."""
    return [
        {
            name: str(g.first) if g.first == g.last else f"{g.first}–{g.last}",
            "tokens": f"{g.tokens:,}",
            "differ": share(g.share_differ),
            "max |Δ|": f"{g.max_abs:.3g}",
            "mean |Δ|": f"{g.mean_abs:.3g}",
            "KL (k3)": f"{g.k3:.3g}",
            "clipped": share(g.clipped),
        }
        for g in groups
    ]


def worst(c) -> list[dict[str, str]]:
    numbers = lambda t: {"rollout": f"{t.rollout:.9g}", "training": f"{t.training:.9g}", "Δ": f"{t.delta:.3g}"}
    return [{name: str(getattr(t, name)) for name in ("sample", "position", "token")} | numbers(t) for t in c.worst]


def text(c) -> str:
    """Returns the certificate for a terminal: lines of at most 100 letters, but for commands."""
    fill = lambda line: textwrap.fill(escape.line(line), WIDTH)
    said = [fill(line) for line in (verdict(c), *effect(c), *(f.text for f in c.findings))]
    said += [""] * bool(c.hints) + [fill(f"{_likely(h)} {h.text}") for h in c.hints]
    if c.tokens > c.equal:
        for name, groups in c.groups.items():
            said += ["", *_columns(lines(groups, name))]
        said += ["", "The worst tokens", *_columns(worst(c))]
    if look := where_to_look(c):
        said += ["", fill(look[0]), *look[1:]]
    return "\n".join([*said, "", fill(_sizes(c))])


def markdown(c, ids: str = "", figures: bool = False) -> str:
    """Returns the certificate as Markdown. ids: the file of the first sample that differs; figures: link to them."""
    parts = [f"{TITLE}: {'every bit agrees' if c.passed else 'they differ'}"]
    mark = MARK[PASS if c.passed else NEEDS_FIX]
    parts += [" ".join([f"{mark} **{escape.text(verdict(c))}**", *map(escape.text, effect(c))])]
    parts += ["\n".join(f"- {escape.text(f.text)}" for f in c.findings)] * bool(c.findings)
    parts += [f"**{escape.text(_likely(h))}** {escape.text(h.text)}" for h in c.hints]
    if look := where_to_look(c, ids):
        parts += [escape.text(look[0]), "```\n" + "\n".join(look[1:]) + "\n```"]
    if figures:
        parts += [f"![{logprobs_title(c)}]({LOGPROBS})", f"![{where_title(c)}]({WHERE})"]
    if c.tokens > c.equal:
        parts += ["## Where", *(table(lines(groups, name), most=7) for name, groups in c.groups.items())]
        parts += ["## The worst tokens", table(worst(c))]
    parts += ["## Captures", escape.text(_sizes(c))]
    names = [s.name for s in (c.sides.rollout, c.sides.training)]
    if all(Path(name).suffix for name in names):
        parts += [escape.code(" ".join(["bi-audit certify", *map(shlex.quote, names)]))]
    return "\n\n".join(parts)


def write(c, folder) -> None:
    """Writes the page into a folder. Raises ValueError if another README.md stands there."""
    folder = Path(folder)
    page = folder / PAGE
    if page.is_file() and not page.read_text(encoding="utf-8", errors="replace").startswith(TITLE):
        raise ValueError(f"--out is {str(folder)!r}, whose README.md no certificate is; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("sample_*.json"), folder / LOGPROBS, folder / WHERE) if page.is_file() else ():
        old.unlink(missing_ok=True)
    ids = ""
    if where_to_look(c):
        sample = int(c.pairs.sample[c.pairs.differ][0])
        ids = f"sample_{sample}.json"
        (folder / ids).write_text(json.dumps(c.sides.rollout.token[c.sides.rollout.sample == sample].tolist()))
    with matplotlib.rc_context(STYLE):
        if c.tokens:
            logprobs_figure(c).savefig(folder / LOGPROBS, dpi=110)
            where_figure(c).savefig(folder / WHERE, dpi=110)
    page.write_text(markdown(c, ids, bool(c.tokens)) + "\n", encoding="utf-8")


def _likely(hint) -> str:
    return f"{'Cause' if hint.cause == Cause.UNCLEAR else 'Probably'} {hint.cause.title}."


def _sizes(c) -> str:
    r, t = c.sides.rollout, c.sides.training
    told = (f"{s.name}: {len(s):,} tokens of {len(np.unique(s.sample)):,} samples, {s.dtype}" for s in (r, t))
    return "; ".join(told) + ". Δ is training − rollout, in fp64."


def _columns(rows: list[dict[str, str]]) -> list[str]:
    """Returns a table for a terminal."""
    width = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    every = [dict(zip(width, width)), *rows]
    return ["  " + "  ".join(row[name].rjust(width[name]) for name in width) for row in every]


# Figures


def logprobs_title(c) -> str:
    return f"Δ against the logprob: at most {c.max_abs:.2g}" if c.max_abs else "Every token lies on the line"


def where_title(c) -> str:
    return f"{share(c.clipped)} of the tokens leave PPO's clip range" if c.max_abs else "Nothing differs anywhere"


def logprobs_figure(c) -> Figure:
    """Draws Δ over the rollout's logprob, as counts of tokens; beside it, how Δ is distributed."""
    p, d = c.pairs, c.pairs.delta
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    low, high = float(np.quantile(p.rollout, 0.0005)), float(p.rollout.max())
    top = max(float(np.quantile(np.abs(d), 0.9995)), c.max_abs / 100) * 1.1 or 1.0
    x, y = np.clip(p.rollout, low, high), np.clip(d, -top, top)
    edges = [np.linspace(low, max(high, low + 0.1), 81), np.linspace(-top, top, 62)]
    counts = np.ma.masked_equal(np.histogram2d(x, y, edges)[0].T, 0)
    mesh = left.pcolormesh(*edges, counts, norm=LogNorm(1, max(10, counts.max())), cmap="viridis_r", rasterized=True)
    figure.colorbar(mesh, ax=left, label="tokens", pad=0.01)
    right.hist(y, edges[1], orientation="horizontal", color=BLUE)
    right.set_xscale("log")
    for ax in (left, right):
        ax.axhline(0, color=GREY, linewidth=0.6)
        for ratio in (1 - CLIP, 1 + CLIP):
            if abs(np.log(ratio)) < top:
                label = "PPO's clip" if ratio < 1 else None
                ax.axhline(np.log(ratio), color=ORANGE, linewidth=0.9, linestyle="--", label=label)
    if left.get_legend_handles_labels()[0]:
        left.legend(frameon=False, loc="lower left")
    left.set(xlabel="logprob of the rollout", ylabel="Δ = training − rollout")
    right.set(xlabel="tokens")
    figure.suptitle(logprobs_title(c), x=0.01, ha="left", fontsize=11)
    return figure


def where_figure(c) -> Figure:
    """Draws |Δ| by position, by length and by batch size: mean and maximum of up to 40 groups each."""
    named, size = axes(c.pairs), np.abs(c.pairs.delta)
    figure = Figure(figsize=(3.2 * len(named) + 1.2, 3.4), layout="constrained")
    for ax, (name, by) in zip(figure.subplots(1, len(named), squeeze=False, sharey=True)[0], named.items()):
        values = np.unique(by)
        cuts = values if len(values) <= 40 else np.linspace(values[0], values[-1] + 1, 41)[:-1]
        group = np.searchsorted(cuts, by, side="right") - 1
        used = np.unique(group)
        starts = np.searchsorted(np.sort(group), used)
        ordered = size[np.argsort(group, kind="stable")]
        most, count = np.maximum.reduceat(ordered, starts), np.diff(starts, append=len(size))
        mean = np.add.reduceat(ordered, starts) / count
        at = cuts[used] if len(values) > 8 else np.arange(len(used))
        ax.plot(at, most, color=ORANGE, marker="s", markersize=3, linewidth=1, label="maximum")
        ax.plot(at, mean, color=BLUE, marker="o", markersize=3, linewidth=1.4, label="mean")
        if len(values) <= 8:
            ax.set_xticks(at, values)
        ax.set(xlabel=name)
        ax.set_ylim(bottom=0)
    figure.axes[0].set_ylabel("|Δ|")
    figure.axes[0].legend(frameon=False)
    figure.suptitle(where_title(c), x=0.01, ha="left", fontsize=11)
    return figure
