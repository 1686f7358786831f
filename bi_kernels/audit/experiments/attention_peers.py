"""Measures attention beside others': accuracy and speed; and draws its summation order."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import bi_kernels
from bi_kernels import reference
from bi_kernels.audit.experiments.common import size
from bi_kernels.audit.experiments.timing import launch_us, timed, times_ms
from bi_kernels.contract import CONTRACT
from bi_kernels.ops.attention.schedule import SCHEDULE
from bi_kernels.reference_gradients import gradient

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")


def _qkv(session, batch: int, queries: int, keys: int, grad: bool = False) -> list[Tensor]:
    shape, g = size(session), torch.Generator(session.device).manual_seed(session.parameters["seed"])
    draw = lambda *dims: torch.randn(batch, *dims, shape["head_dim"], generator=g, device=session.device).bfloat16()
    sizes = (queries, shape["heads"]), (keys, shape["kv_heads"]), (keys, shape["kv_heads"])
    return [draw(*dims).requires_grad_(grad) for dims in sizes]


def _ours(q, k, v) -> Tensor:
    return bi_kernels.attention(q, k, v)[0]


def _sdpa(backend: SDPBackend, q, k, v) -> Tensor:
    """Calls torch's attention by one backend, whose context the call leaves."""
    with sdpa_kernel([backend]):
        return scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=q.shape[1] > 1, enable_gqa=q.shape[2] > k.shape[2]
        ).transpose(1, 2)


PEERS = {
    "cuDNN": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "FA2": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
}  # of q, k and v
EVERYBODY = {"bi_kernels": _ours} | PEERS


def errors(session, length: int = 2048) -> list[dict]:
    """Measures errors against fp64 of what everybody gives on the same inputs, bf16, causal: root mean square and
    largest, as a share of the exact result's root mean square."""
    qkv = _qkv(session, 1, length, length)
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


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _possible(calls: dict[str, Callable]) -> dict[str, Callable]:
    """Returns the calls that do not raise: a backend may have nothing for these inputs."""
    found = {}
    for name, call in calls.items():
        with contextlib.suppress(RuntimeError):
            call()
            found[name] = call
    return found


def speed(session) -> list[dict]:
    """Measures forward and backward, causal, bf16, the calls taking turns: TFLOP/s of the half of the square that is
    seen (backward 2.5 times that), and the ratio to cuDNN."""
    lines = []
    for batch, length in ((16, 1024), (4, 4096), (1, 16384)):
        qkv = _qkv(session, batch, length, length, grad=True)
        q, said = qkv[0], {"length": length, "batch": batch}
        flops = 2 * length * q.numel() / 1e9
        with torch.no_grad():
            times = timed({name: partial(function, *qkv) for name, function in EVERYBODY.items()})
        line = {name: flops / ms for name, ms in times.items()}
        lines.append({"pass": "forward"} | said | line | {"ratio to cuDNN": line["bi_kernels"] / line["cuDNN"]})
        dy = torch.randn_like(q)
        backward = lambda function: partial(torch.autograd.grad, function(*qkv), qkv, dy, retain_graph=True)
        calls = {name: backward(function) for name, function in EVERYBODY.items()}
        calls |= {f"{name}, deterministic": _deterministic()(backward(function)) for name, function in PEERS.items()}
        line = {name: 2.5 * flops / ms for name, ms in timed(_possible(calls)).items()}
        peer = line.get("cuDNN, deterministic", line["cuDNN"])
        lines.append({"pass": "backward"} | said | line | {"ratio to cuDNN": line["bi_kernels"] / peer})
        del calls
    return lines


def decode_speed(session) -> list[dict]:
    """Measures one query a sequence against a long cache, bf16: TB/s of the cache, and our time over that of SDPA's
    fastest backend."""
    lines = []
    copied = torch.empty(2**30, dtype=torch.int8, device=session.device)
    (copy_ms,) = times_ms(lambda: copied[: 2**29].copy_(copied[2**29 :]))
    for batch, length in ((32, 4096), (8, 8192), (1, 65536)):
        q, k, v = _qkv(session, batch, 1, length)
        wide = [t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v)]
        peers = {name: partial(function, q, k, v) for name, function in PEERS.items()}
        peers["efficient"] = partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION, q, *wide)
        calls = {"bi_kernels": partial(_ours, q, k, v)} | _possible(peers)
        with torch.no_grad():
            ms = timed(calls)
        ours, read = ms["bi_kernels"], 2 * k.nbytes
        lines.append(
            {
                "batch": batch,
                "cache": length,
                **{f"{n} µs": t * 1e3 for n, t in ms.items()},
                "TB/s": read / ours / 1e9,
                "of a copy": read / ours / (2**30 / copy_ms),
                "ours / fastest SDPA": ours / min(t for name, t in ms.items() if name != "bi_kernels"),
                "launch µs": launch_us(calls["bi_kernels"], 50),
            }
        )
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
    copied, longer = many["of a copy"], one["ours / fastest SDPA"]
    parts += [
        f"decode of {many['batch']} sequences with {many['cache']} keys **{copied:.2f}** of a copy's "
        f"bandwidth (goal {goal['decode_bandwidth']}): {word(copied >= goal['decode_bandwidth'])}",
        f"of one with {one['cache']} keys **{longer:.2f}** times SDPA's fastest backend (goal at "
        f"most {goal['decode_time']}): {word(longer <= goal['decode_time'])}",
        "what limits each, as we read the machine code and the times: forward, the exponentials, which run under the "
        "products but not entirely; backward, q kᵀ and dout vᵀ, which are computed twice, for dq and for dk and dv; "
        "decode, beside the bytes of the cache, the partial results and the second launch that merges them",
    ]
    return (
        "## Speed\n\nbf16, causal, calls taking turns; times are the device's, as under a CUDA graph.\n\n"
        + "\n".join(f"- {p}" for p in parts)
    )
