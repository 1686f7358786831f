"""Measures attention beside others': accuracy and speed; and draws its summation order."""

import math
from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import bi_kernels
from bi_kernels import contract
from bi_kernels.audit.experiments.timing import launch_us, times_ms
from bi_kernels.contract import CONTRACT
from bi_kernels.ops.attention.schedule import SCHEDULE

PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}


def _qkv(
    session, batch: int, queries: int, keys: int, heads: tuple[int, int] | None = None, grad: bool = False
) -> list[torch.Tensor]:
    shape = contract.SHAPES[session.parameters["shapes"]]
    h, kv = heads or (shape["heads"], shape["kv_heads"])
    g = torch.Generator(session.device).manual_seed(session.parameters["seed"])
    return [
        torch.randn(batch, n, count, shape["head_dim"], generator=g, device=session.device)
        .bfloat16()
        .requires_grad_(grad)
        for n, count in ((queries, h), (keys, kv), (keys, kv))
    ]


def _sdpa(backend: SDPBackend, q, k, v) -> torch.Tensor:
    """Calls torch's attention by one backend, whose context the call leaves."""
    with sdpa_kernel([backend]):
        return scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=q.shape[1] > 1, enable_gqa=q.shape[2] > k.shape[2]
        ).transpose(1, 2)


def errors(session, length: int = 2048) -> list[dict]:
    """Measures errors against fp64 of what everybody gives on the same inputs, bf16, causal: root mean square and
    largest, as a share of the exact result's root mean square."""
    q, k, v = _qkv(session, 1, length, length)
    dy = torch.randn(
        q.shape, generator=torch.Generator(session.device).manual_seed(1), device=session.device
    ).bfloat16()

    def results(function: Callable) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dy)]

    q64, k64, v64 = (t.detach().double().requires_grad_() for t in (q, k, v))
    wide = [t.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for t in (k64, v64)]
    s = q64.transpose(1, 2) @ wide[0].mT * q.shape[-1] ** -0.5
    out = (
        s.masked_fill(~torch.ones_like(s[0, 0], dtype=torch.bool).tril(), -torch.inf).softmax(-1) @ wide[1]
    ).transpose(1, 2)
    exact = [out.detach(), *torch.autograd.grad(out, (q64, k64, v64), dy.double())]
    lines = []
    for name, function in {
        "bi_kernels": lambda *x: bi_kernels.attention(*x)[0],
        **{peer: lambda *x, backend=backend: _sdpa(backend, *x) for peer, backend in PEERS.items()},
    }.items():
        for tensor, y, e in zip(("out", "dq", "dk", "dv"), results(function), exact):
            gap, scale = y.double() - e, e.square().mean().sqrt()
            lines.append(
                {
                    "who": name,
                    "tensor": tensor,
                    "rms": float(gap.square().mean().sqrt() / scale),
                    "largest": float(gap.abs().max() / scale),
                }
            )
    return lines


def _deterministic(call: Callable) -> Callable:
    def wrapped():
        torch.use_deterministic_algorithms(True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)

    return wrapped


def speed(session) -> list[dict]:
    """Measures forward and backward, causal, bf16, the calls taking turns: TFLOP/s of the half of the square that is
    seen (backward 2.5 times that), and the ratio to cuDNN."""
    lines = []
    for batch, length in ((16, 1024), (4, 4096), (1, 16384)):
        q, k, v = _qkv(session, batch, length, length, grad=True)
        flops = 2 * batch * q.shape[2] * length**2 * q.shape[3] / 1e9
        with torch.no_grad():
            names, calls = ["bi_kernels", *PEERS], [lambda: bi_kernels.attention(q, k, v)]
            calls += [lambda b=b: _sdpa(b, q, k, v) for b in PEERS.values()]
            line = dict(zip(names, (flops / ms for ms in times_ms(*calls))))
        lines.append(
            {"pass": "forward", "length": length, "batch": batch}
            | line
            | {"ratio to cuDNN": line["bi_kernels"] / line["cuDNN"]}
        )
        calls, names, dy = [], [], torch.randn_like(q)
        candidates = (
            {"bi_kernels": lambda: bi_kernels.attention(q, k, v)[0]}
            | {name: lambda b=b: _sdpa(b, q, k, v) for name, b in PEERS.items()}
            | {f"{name}, deterministic": lambda b=b: _sdpa(b, q, k, v) for name, b in PEERS.items()}
        )
        for name, make in candidates.items():
            y = make()
            call = lambda y=y: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
            call = _deterministic(call) if "deterministic" in name else call
            try:
                call()
            except RuntimeError:  # this backend has none for these inputs
                continue
            names.append(name)
            calls.append(call)
        line = dict(zip(names, (2.5 * flops / ms for ms in times_ms(*calls))))
        peer = line.get("cuDNN, deterministic", line["cuDNN"])
        lines.append(
            {"pass": "backward", "length": length, "batch": batch}
            | line
            | {"ratio to cuDNN": line["bi_kernels"] / peer}
        )
        del calls, candidates, y
    return lines


def decode_speed(session) -> list[dict]:
    """Measures one query a sequence against a long cache, bf16: TB/s of the cache, and our time over that of SDPA's
    fastest backend."""
    lines, backends = [], PEERS | {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    copied = torch.empty(2**30, dtype=torch.int8, device=session.device)
    (copy_ms,) = times_ms(lambda: copied[: 2**29].copy_(copied[2**29 :]))
    for batch, length in ((32, 4096), (8, 8192), (1, 65536)):
        q, k, v = _qkv(session, batch, 1, length)
        calls, names = [lambda: bi_kernels.attention(q, k, v)], ["bi_kernels"]
        for name, b in backends.items():
            wide = [t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v)] if name == "efficient" else [k, v]
            try:
                _sdpa(b, q, *wide)
            except RuntimeError:
                continue
            calls.append(lambda b=b, wide=wide: _sdpa(b, q, *wide))
            names.append(name)
        with torch.no_grad():
            ms = dict(zip(names, times_ms(*calls)))
        best = min(t for name, t in ms.items() if name != "bi_kernels")
        lines.append(
            {
                "batch": batch,
                "cache": length,
                **{f"{n} µs": t * 1e3 for n, t in ms.items()},
                "TB/s": 2 * k.nbytes / ms["bi_kernels"] / 1e9,
                "of a copy": 2 * k.nbytes / ms["bi_kernels"] / (2**30 / copy_ms),
                "ours / fastest SDPA": ms["bi_kernels"] / best,
                "launch µs": launch_us(lambda: bi_kernels.attention(q, k, v), 50),
            }
        )
    return lines


def bars(lines: list[dict], title: str) -> plt.Figure:
    """Draws root-mean-square errors by tensor, a bar each."""
    names, tensors = list(dict.fromkeys(x["who"] for x in lines)), list(dict.fromkeys(x["tensor"] for x in lines))
    figure, ax = plt.subplots(figsize=(7.5, 3.6))
    for i, (name, color) in enumerate(zip(names, ("#0072B2", "#E69F00", "#009E73"))):
        mine = {x["tensor"]: x for x in lines if x["who"] == name}
        at = np.arange(len(tensors)) + (i - (len(names) - 1) / 2) * 0.25
        ax.bar(at, [mine[t]["rms"] for t in tensors], 0.23, color=color, label=name)
    ax.set(xticks=range(len(tensors)), xticklabels=tensors, ylabel="RMS error / RMS of the exact result", title=title)
    ax.legend(edgecolor="none", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


def order_figure(length: int = 11_000) -> plt.Figure:
    """Draws the keys of one query, block by block and split by split, and which program of each schedule adds them."""
    block, split = SCHEDULE.block, SCHEDULE.split
    splits = math.ceil(length / split)
    schedules = {
        "prefill: a program for\na tile of queries": [0] * splits,
        "a long chunk:\nthe same": [0] * splits,
        "decode, a short chunk:\na program a split": list(range(splits)),
    }
    palette = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
    figure, ax = plt.subplots(figsize=(9, 3.3))
    for lane, programs in enumerate(schedules.values()):
        for n, program in enumerate(programs):
            lo, hi = n * split, min((n + 1) * split, length)
            starts = np.arange(lo, hi, block)
            ax.barh(
                [lane] * len(starts),
                np.minimum(block, hi - starts),
                left=starts,
                height=0.42,
                color=palette[program % 5],
                edgecolor="white",
                linewidth=0.25,
            )
            ax.annotate(
                "",
                (hi - block, lane + 0.32),
                (lo + block, lane + 0.32),
                arrowprops={"arrowstyle": "->", "color": "#333333"},
            )
            ax.text(
                (lo + hi) / 2,
                lane + 0.36,
                f"blocks {lo // block + 1} to {math.ceil(hi / block)}",
                ha="center",
                va="top",
                fontsize=7.5,
            )
            if n:
                ax.annotate(
                    f"merge {n}",
                    (lo, lane - 0.22),
                    (lo, lane - 0.42),
                    ha="center",
                    fontsize=7.5,
                    color="#D55E00",
                    arrowprops={"arrowstyle": "->", "color": "#D55E00"},
                )
    ax.set(
        yticks=range(len(schedules)),
        yticklabels=list(schedules),
        xlabel=f"key, counted from its sequence's first; a cell is a block of {block}",
        title=f"One order of {length:,} keys, three schedules: blocks of {block} in splits of {split:,}",
        xlim=(0, length),
        ylim=(len(schedules) - 0.35, -0.6),
    )
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    figure.tight_layout()
    return figure


def goals() -> dict:
    return CONTRACT["benchmark"]["attention"]


def speed_text(goal: dict, speed: list[dict], decode: list[dict]) -> str:
    """Says which goals are met and which are not."""
    word = lambda met: "met" if met else "**not met**"
    parts = []
    peers = {"forward": "cuDNN", "backward": "cuDNN's deterministic one (its other one, where that raised)"}
    for name, peer in peers.items():
        least = min(x["ratio to cuDNN"] for x in speed if x["pass"] == name and x["length"] >= goal["length"])
        parts.append(
            f"{name} at least **{least:.2f}** of {peer} from {goal['length']} tokens on (goal {goal[name]:.2f}): "
            f"{word(least >= goal[name])}"
        )
    many, one = decode[0], decode[-1]
    parts.append(
        f"decode of {many['batch']} sequences with {many['cache']} keys **{many['of a copy']:.2f}** of a copy's "
        f"bandwidth (goal {goal['decode_bandwidth']}): {word(many['of a copy'] >= goal['decode_bandwidth'])}"
    )
    parts.append(
        f"of one with {one['cache']} keys **{one['ours / fastest SDPA']:.2f}** times SDPA's fastest backend (goal at "
        f"most {goal['decode_time']}): {word(one['ours / fastest SDPA'] <= goal['decode_time'])}"
    )
    parts.append(
        "what limits each, as we read the machine code and the times: forward, the exponentials, which run under the "
        "products but not entirely; backward, q kᵀ and dout vᵀ, which are computed twice, for dq and for dk and dv; "
        "decode, beside the bytes of the cache, the partial results and the second launch that merges them"
    )
    return (
        "## Speed\n\nbf16, causal, calls taking turns; times are the device's, as under a CUDA graph.\n\n"
        + "\n".join(f"- {p}" for p in parts)
    )
