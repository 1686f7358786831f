"""Measures attention's accuracy beside others', draws its summation order, and says which shapes are of one kind."""

from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import bi_kernels
from bi_kernels import reference
from bi_kernels.contract import SHAPES
from bi_kernels.ops.attention.schedule import SCHEDULE
from bi_kernels.reference_gradients import gradient
from helpers.common import size

SIZES = "heads", "kv_heads", "head_dim", "lengths", "gradient_lengths"  # of a shape set, that attention has
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")


def _qkv(session, length: int) -> list[Tensor]:
    shape, g = size(session), torch.Generator(session.device).manual_seed(session.parameters["seed"])
    heads = shape["heads"], shape["kv_heads"], shape["kv_heads"]
    draw = lambda *dims: torch.randn(dims, generator=g, device=session.device).bfloat16()
    return [draw(1, length, n, shape["head_dim"]) for n in heads]


def ours(q, k, v) -> Tensor:
    return bi_kernels.attention(q, k, v)[0]


def sdpa(backend: SDPBackend, q, k, v) -> Tensor:
    """Calls torch's attention by one backend, whose context the call leaves."""
    with sdpa_kernel([backend]):
        return scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=q.shape[1] > 1, enable_gqa=q.shape[2] > k.shape[2]
        ).transpose(1, 2)


PEERS = {
    "cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "FA2": partial(sdpa, SDPBackend.FLASH_ATTENTION),
}  # of q, k and v
EVERYBODY = {"bi_kernels": ours} | PEERS


def whose_heads(shapes: str, sets: dict[str, dict] = SHAPES) -> str:
    """Says which other sets of shapes have the same heads and lengths; '' if none."""
    sizes = lambda name: [sets[name].get(k) for k in SIZES]
    same = [f"`{name}`" for name in sets if name != shapes and sizes(name) == sizes(shapes)]
    if not same:
        return ""
    also = f"Heads and lengths of `{shapes}` are those of {' and '.join(same)} too"
    return f"{also}: attention's calls have the same shapes in both documents, and are made a second time."


def errors(session, length: int = 2048) -> list[dict]:
    """Measures errors against fp64 of what everybody gives on the same inputs, bf16, causal: root mean square and
    largest, as a share of the exact result's root mean square."""
    qkv = _qkv(session, length)
    g = torch.Generator(session.device).manual_seed(1)
    dy = torch.randn(qkv[0].shape, generator=g, device=session.device).bfloat16()
    inputs = {name: t[0] for name, t in zip("qkv", qkv)}
    (out, _), _ = reference.attention(**inputs, lengths=[(length, length)])
    gradients = gradient("attention", inputs, {}, [dy[0], None])
    exact, lines = {"out": out} | {f"d{name}": found.exact for name, found in gradients.items()}, []
    for name, function in EVERYBODY.items():
        leaves = [t.detach().requires_grad_() for t in qkv]
        y = function(*leaves)
        found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        for (tensor, e), y in zip(exact.items(), found):
            gap, scale = y[0].double() - e, e.square().mean().sqrt()
            shares = {"rms": float(gap.square().mean().sqrt() / scale), "largest": float(gap.abs().max() / scale)}
            lines.append({"who": name, "tensor": tensor} | shares)
    return lines


def bars(lines: list[dict], title: str) -> plt.Figure:
    """Draws root-mean-square errors by tensor, a bar each."""
    frame = pd.DataFrame(lines)
    shown = frame.pivot(index="tensor", columns="who", values="rms").loc[frame.tensor.unique(), frame.who.unique()]
    figure, ax = plt.subplots(figsize=(7.5, 3.6))
    shown.plot.bar(ax=ax, width=0.75, rot=0, color=COLORS, edgecolor="white", title=title, xlabel="")
    ax.set_ylabel("RMS error / RMS of the exact result")
    ax.legend(edgecolor="none", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


def order_figure(length: int = 11_000) -> plt.Figure:
    """Draws the keys of one query, block by block and split by split, and which program of each schedule adds them."""
    block, split = SCHEDULE.block, SCHEDULE.split
    schedules = (
        "prefill: a program for\na tile of queries",
        "a long chunk:\nthe same",
        "decode, a short chunk:\na program a split",
    )
    figure, ax = plt.subplots(figsize=(9, 3.3))
    small, arrow = {"ha": "center", "fontsize": 7.5}, lambda color: {"arrowstyle": "->", "color": color}
    for lane, name in enumerate(schedules):
        for n, lo in enumerate(range(0, length, split)):
            hi, color = min(lo + split, length), COLORS[n % len(COLORS) if "a program a split" in name else 0]
            cells = [(at, min(block, hi - at)) for at in range(lo, hi, block)]
            ax.broken_barh(cells, (lane - 0.21, 0.42), facecolor=color, edgecolor="white", linewidth=0.25)
            ax.annotate("", (hi - block, lane + 0.32), (lo + block, lane + 0.32), arrowprops=arrow("#333333"))
            ax.text((lo + hi) / 2, lane + 0.36, f"blocks {lo // block + 1} to {-(-hi // block)}", va="top", **small)
            if n:
                ends, red = ((lo, lane - 0.22), (lo, lane - 0.42)), "#D55E00"
                ax.annotate(f"merge {n}", *ends, color=red, arrowprops=arrow(red), **small)
    ax.set(
        yticks=range(len(schedules)),
        yticklabels=schedules,
        xlabel=f"key, counted from its sequence's first; a cell is a block of {block}",
        title=f"One order of {length:,} keys, three schedules: blocks of {block} in splits of {split:,}",
        xlim=(0, length),
        ylim=(len(schedules) - 0.35, -0.6),
    )
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    figure.tight_layout()
    return figure
