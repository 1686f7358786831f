"""The fold of an expert's gradient over one step, cut into micro-batches in several ways: computed, and drawn."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from matplotlib.patches import Rectangle
from torch import Tensor

import bi_kernels
from bi_kernels.audit.compare import compare
from bi_kernels.audit.findings import control_row
from bi_kernels.audit.targets.model import Relation
from bi_kernels.tokens import SLAB, TokenLayout
from helpers.figures import plt  # in the style of all that is drawn

LENGTHS = [21, 5, 40, 16]  # rows of the expert in each sequence
CUTS = {"one micro-batch": [4], "2 + 2": [2, 2], "1 + 3": [1, 3], "one each": [1] * 4}  # sequences of each micro-batch
ONE_PRODUCT = "one product for each micro-batch"
COLORS, GREY = ("#0072B2", "#C07F00", "#009E73", "#B05A8C"), "#777777"


@dataclass
class Fold:
    """differ: by split, the elements of dW that differ from those of one micro-batch, ours and stock's; elements: of
    dW."""

    differ: dict[str, tuple[int, int]]
    elements: int


def fold(session, features: tuple[int, int] = (48, 64)) -> Fold:
    """Computes dW of one expert for each split, and records the rows: ours continues in main_grad; stock's is one
    product for each micro-batch, added up in fp32."""
    g = torch.Generator().manual_seed(session.parameters["seed"])
    x, dy = (torch.randn(sum(LENGTHS), n, generator=g).to(session.device) for n in features[::-1])
    grads = {name: (_ours(x, dy, cut), _stock(x, dy, cut)) for name, cut in CUTS.items()}
    whole = next(iter(grads.values()))
    drifts = {name: [compare(a, b) for a, b in zip(pair, whole)] for name, pair in grads.items()}
    target = session.target("grouped_linear", "an expert", "fp32")
    said = {"against": next(iter(CUTS)), "tensor": "dW", "rows": sum(LENGTHS)}
    row = lambda name, drift: target.row(Relation.GRADIENT, f"micro_batches: {name}", drift, **said)
    session.add([row(name, ours) for name, (ours, _) in drifts.items()])
    session.add([control_row(ONE_PRODUCT, [row(name, stock) for name, (_, stock) in drifts.items()])])
    return Fold({n: tuple(d.mismatches for d in pair) for n, pair in drifts.items()}, whole[0].numel())


def _micro_batches(cut: list[int]) -> Iterator[tuple[list[int], slice]]:
    """Yields the lengths of the sequences of each micro-batch, and its rows."""
    first, row = 0, 0
    for count in cut:
        mine = LENGTHS[first : first + count]
        yield mine, slice(row, row + sum(mine))
        first, row = first + count, row + sum(mine)


def _ours(x: Tensor, dy: Tensor, cut: list[int]) -> Tensor:
    weight = torch.nn.Parameter(torch.zeros(1, dy.shape[1], x.shape[1], device=x.device))
    weight.main_grad = torch.zeros_like(weight)
    for lengths, rows in _micro_batches(cut):
        layout = TokenLayout.packed([0, *torch.tensor(lengths).cumsum(0).tolist()])
        ids = torch.zeros(sum(lengths), 1, dtype=torch.int64, device=x.device)
        groups = bi_kernels.group_by_expert(ids, 1, layout)
        y = bi_kernels.grouped_linear(bi_kernels.dispatch(x[rows], groups), weight, groups)
        y.backward(bi_kernels.dispatch(dy[rows], groups))
    return weight.main_grad[0].detach()


def _stock(x: Tensor, dy: Tensor, cut: list[int]) -> Tensor:
    total = torch.zeros(dy.shape[1], x.shape[1], device=x.device)
    for _, rows in _micro_batches(cut):
        total += dy[rows].t() @ x[rows]
    return total


def _slabs() -> Iterator[tuple[int, int, int]]:
    """Yields (first row, rows, sequence) of each slab."""
    first = 0
    for sequence, length in enumerate(LENGTHS):
        for a, b in pairwise([*range(0, length, SLAB), length]):
            yield first + a, b - a, sequence
        first += length


def _sum(ax, first: int, rows: int, y: float, color: str) -> None:
    ax.add_patch(Rectangle((first, y - 0.3), rows, 0.6, facecolor=color, edgecolor="white", linewidth=1.5))
    ax.text(first + rows / 2, y, f"{rows}", ha="center", va="center", color="white", fontsize=8)


def _joint(ax, at: int, y: float, ours: bool) -> None:
    """Draws how two sums are joined: the second continues from the first, or both are added."""
    circle = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "#333333", "linewidth": 0.8}
    if ours:
        ax.scatter([at], [y], marker=">", s=34, facecolor="white", edgecolor="#333333", linewidth=0.8, zorder=3)
    else:
        ax.text(at, y, "+", ha="center", va="center", fontsize=8, bbox=circle, zorder=3)


def draw(found: Fold) -> plt.Figure:
    """Draws which rows each sum holds and how the sums are joined, a line a split: ours above stock's."""
    figure, axes = plt.subplots(2, 1, figsize=(9, 5.4))
    worst = [max(differ[side] for differ in found.differ.values()) for side in (0, 1)]
    titles = (
        f"bi_kernels: slabs of {SLAB} rows continue in main_grad; {worst[0]} elements of dW differ over splits",
        f"stock: {ONE_PRODUCT}; up to {worst[1]:,} of {found.elements:,} elements differ over splits",
    )
    for side, (ax, title) in enumerate(zip(axes, titles)):
        for y, (name, cut) in enumerate(CUTS.items()):
            batches = [rows for _, rows in _micro_batches(cut)]
            sums = [(rows.start, rows.stop - rows.start, GREY) for rows in batches]
            if side == 0:
                sums = [(first, rows, COLORS[sequence]) for first, rows, sequence in _slabs()]
            for first, rows, color in sums:
                _sum(ax, first, rows, y, color)
            for rows in batches[1:]:
                ax.plot([rows.start] * 2, [y - 0.46, y + 0.46], color="black", linewidth=1.6)
            for first, *_ in sums[1:]:
                _joint(ax, first, y, side == 0)
            ax.text(sum(LENGTHS) + 1, y, f"{found.differ[name][side]:,} differ", va="center", fontsize=8.5)
        ax.set_yticks(range(len(CUTS)), CUTS)
        ax.set(xlim=(-0.5, sum(LENGTHS) + 11), ylim=(len(CUTS) - 0.5, -0.9))
        ax.set_title(title, pad=8)
        ax.tick_params(length=0)
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.set_xticks([])
    first = 0
    for sequence, length in enumerate(LENGTHS):
        at = {"ha": "center", "va": "bottom", "fontsize": 8, "color": COLORS[sequence]}
        axes[0].text(first + length / 2, -0.42, f"sequence {sequence + 1}", **at)
        first += length
    said = (
        "a box: a sum of so many rows; ▷ the next sum continues; + two sums are added; a black line: a micro-batch ends"
    )
    axes[1].set_xlabel(said, fontsize=8.5, loc="left")
    figure.tight_layout()
    return figure
