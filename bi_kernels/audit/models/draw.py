"""How far rescoring moves the logprobs of what was generated."""

import numpy as np
from torch import Tensor

from helpers.figures import plt  # in the style of all that is drawn

LOWEST, HIGHEST = -22, 2  # powers of two between which a difference is shown


def gaps(found: dict[str, Tensor], title: str) -> plt.Figure:
    """Draws the share of tokens by |Δ logprob|, a bar a power of two; equal bits stand apart, at the left."""
    figure, ax = plt.subplots(figsize=(8.5, 3.2))
    width = 0.8 / len(found)
    edges = 2.0 ** np.arange(LOWEST, HIGHEST + 1)
    for i, (name, gap) in enumerate(found.items()):
        values = gap.double().cpu().numpy()
        counts, _ = np.histogram(np.clip(values[values > 0], edges[0], edges[-1]), edges)
        shares = np.array([(values == 0).sum(), 0, *counts]) / len(values)
        at = np.arange(len(shares)) + (i - (len(found) - 1) / 2) * width
        ax.bar(at, shares, width, label=name, color=("#0072B2", "#E69F00")[i % 2])
    powers = range(LOWEST + 2, HIGHEST, 4)
    ax.set_xticks([0, *(2 + p - LOWEST - 0.5 for p in powers)], ["equal bits", *(f"$2^{{{p}}}$" for p in powers)])
    ax.set(xlabel="|Δ logprob|", ylabel="share of tokens", ylim=(0, 1.05), title=title)
    ax.legend(edgecolor="none", loc="upper right")
    figure.tight_layout()
    return figure
