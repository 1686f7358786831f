"""Draws how much of a step differs in each world, and in each way that others take."""

import numpy as np

from bi_kernels.audit.evidence.kinds import Side
from bi_kernels.audit.evidence.verdicts import Row
from helpers.figures import plt  # in the style of all that is drawn

COLUMNS = {"invariance": "logprobs", "parity": "decode", "gradient invariance": "gradients", Side.TRAINED: "weights"}


def drawn(rows: list[Row]):
    """Returns a figure: a line a world or a control, a column a kind of result, in each cell how many differ of how
    many; hatched where nothing was asked."""
    rows = [r for r in rows if r.relation in COLUMNS and (r.control or r.against == "one rank")]
    lines = list(dict.fromkeys((r.candidate if r.control else "ours", r.layout) for r in rows))
    share = np.full((len(lines), len(COLUMNS)), np.nan)
    said = {}
    for r in rows:
        at = lines.index((r.candidate if r.control else "ours", r.layout)), list(COLUMNS).index(r.relation)
        if r.elements:
            share[at] = r.mismatches / r.elements
            said[at] = f"{r.mismatches} of {r.elements}"
        else:
            said[at] = "no result"
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(lines) + 1.4), layout="constrained")
    axes.patch.set(hatch="///", edgecolor="#9a9a9a", facecolor="none")
    image = axes.imshow(np.ma.masked_invalid(share), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (y, x), text in said.items():
        dark = not np.isnan(share[y, x]) and share[y, x] > 0.5
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color="white" if dark else "black")
    axes.set_xticks(range(len(COLUMNS)), COLUMNS.values())
    axes.set_yticks(range(len(lines)), [f"{world}" if who == "ours" else f"{who}, {world}" for who, world in lines])
    judged = [r for r in rows if not r.control]
    wrong, asked = sum(bool(r.mismatches) or r.mismatches is None for r in judged), len(judged)
    axes.set_title(
        f"Every world has one rank's bits ({asked} comparisons)"
        if not wrong
        else f"{wrong} of {asked} comparisons differ",
        loc="left",
    )
    figure.colorbar(image, ax=axes, label="share that differs from one rank; hatched: not asked")
    plt.close(figure)
    return figure
