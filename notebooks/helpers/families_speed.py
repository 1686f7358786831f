"""Times experts, a training step, `generate`, and attention with a soft cap or sinks on a GPU, each next to its peer."""

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from matplotlib.lines import Line2D
from torch import Tensor

import bi_kernels
from bi_kernels.audit.findings import grouped as group_by
from bi_kernels.audit.memory import give_back
from bi_kernels.audit.targets.transformers import OURS, STOCK, quiet
from bi_kernels.audit.timing import times_ms
from bi_kernels.contract import CONTRACT
from bi_kernels.integrations.transformers import apply
from bi_kernels.integrations.transformers.experts import PAD_FROM
from bi_kernels.ops.grouped.fold import fold_weight
from bi_kernels.tokens import TokenLayout
from helpers.families_at_width import build
from helpers.figures import plt  # in the style of all that is drawn
from helpers.transformers_speed import training_step

GROUPED_MM = "torch._grouped_mm"
FORWARD, DX, DW = "grouped_linear", "dX of grouped_linear", "dW into main_grad"
STEP, GENERATE, ATTENTION = "training step", "generate", "attention with a soft cap or sinks"
SEQUENCE, MODEL = 1024, "Qwen3-30B-A3B"  # tokens of a sequence; the model that trains and generates
COLORS = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"


class Product(NamedTuple):
    """A product of every expert: x (rows, k) times a weight of (n, k) an expert, or (k, n) if it is transposed."""

    name: str
    experts: int
    n: int
    k: int
    rows: int
    skewed: bool
    transposed: bool = False


class Sizes(NamedTuple):
    """tokens: of the named products' batches; drawn: products by chance, of at most so many experts, rows, features and
    elements of a weight; step: sequences and their tokens; generated: batches, prompt and new tokens; attention:
    sequences, tokens, heads, kv heads and head_dim."""

    tokens: tuple[int, ...] = (64, 4096)
    drawn: int = 24
    most: tuple[int, int, int, int] = (256, 65536, 8192, 2**32)
    step: tuple[int, int] = (4, 2048)
    generated: tuple[tuple[int, ...], int, int] = ((1, 16, 64), 64, 32)
    attention: tuple[int, ...] = (4, 4096, 32, 8, 128)


SMALL = Sizes((4,), 2, (8, 40, 32, 2**16), (2, 8), ((1, 2), 4, 2), (2, 8, 2, 1, 16))
NAMED = {  # experts, features out and in, choices of a token, whether the weight is (in, out)
    "Qwen3-30B-A3B gate and up": (128, 1536, 2048, 8, False),
    "Qwen3-30B-A3B down": (128, 2048, 768, 8, False),
    "gpt-oss-20b gate and up": (32, 5760, 2880, 4, True),
    "gpt-oss-20b down": (32, 2880, 2880, 4, True),
    "DeepSeek-V3 gate and up": (256, 4096, 7168, 8, False),
    "DeepSeek-V3 down": (256, 7168, 2048, 8, False),
}
NAMED_SMALL = {"tiny": (4, 16, 32, 2, False), "tiny, transposed": (4, 16, 32, 2, True)}
Clock = Callable[..., dict[str, float]]  # of calls by name, and rounds: milliseconds by name


def by_turns(calls: dict[str, Callable], rounds: int = 3) -> dict[str, float]:
    """Returns the milliseconds of each call on the device; see bi_kernels.audit.timing."""
    return dict(zip(calls, times_ms(*calls.values(), rounds=rounds)))


def products(seed: int, sizes: Sizes, named: dict[str, tuple]) -> Iterator[Product]:
    """Yields the named products, even and skewed, and those that the seed draws."""
    for name, (experts, n, k, choices, transposed) in named.items():
        for tokens in sizes.tokens:
            for skewed in (False, True):
                yield Product(name, experts, n, k, tokens * choices, skewed, transposed)
    rng, (experts, rows, features, elements) = random.Random(f"experts {seed}"), sizes.most
    log = lambda low, high, unit=1: max(low, round(math.exp(rng.uniform(math.log(low), math.log(high))) / unit) * unit)
    for number in range(sizes.drawn):
        count = log(min(8, experts), experts)
        n, k = (log(8, features, 8) for _ in range(2))
        while count * n * k > elements:
            n, k = (max(8, size // 16 * 8) for size in (n, k))
        yield Product(f"drawn {number}", count, n, k, log(1, rows), number % 2 == 1)


def experts(session, clock: Clock = by_turns, small: bool = False) -> list[dict]:
    """Times grouped_linear, its dX, and its dW into main_grad next to torch._grouped_mm; returns a line for each."""
    seed, lines = session.parameters["seed"], []
    for p in products(seed, SMALL if small else Sizes(), NAMED_SMALL if small else NAMED):
        calls = _calls(p, session.device, seed)
        for what, ours, theirs in calls:
            ms = clock({OURS: ours, GROUPED_MM: theirs})
            shape = f"{p.experts} × {p.n} × {p.k}, {p.rows:,} rows, {'skewed' if p.skewed else 'even'}"
            lines.append({"what": what, "case": p.name, "shape": shape} | _ratio(ms, GROUPED_MM))
        del calls, ours, theirs
        give_back()
    return lines


def _ratio(ms: dict[str, float], peer: str) -> dict:
    return {"peer": peer, "ms": ms[OURS], "ratio": ms[peer] / ms[OURS], "times": ms[OURS] / ms[peer]}


@torch.no_grad()
def _calls(p: Product, device: torch.device, seed: int) -> list[tuple[str, Callable, Callable]]:
    """Returns what is timed of a product, with ours and the peer's call. Sequences have 1,024 tokens."""
    g = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16)
    share = torch.randn(p.experts, generator=g, device=device).mul(2 * p.skewed).softmax(0)
    ids = torch.multinomial(share, p.rows, replacement=True, generator=g)[:, None]
    ends = [*range(0, p.rows, SEQUENCE), p.rows]
    layout = TokenLayout.packed(ends)
    groups = bi_kernels.group_by_expert(ids, p.experts, layout)
    offsets, out, into = groups.offsets, *((p.k, p.n) if p.transposed else (p.n, p.k))
    x, dy, w = draw(p.rows, p.k), draw(p.rows, p.n), draw(p.experts, out, into)
    forward = w if p.transposed else w.mT  # (experts, k, n)
    how = {"transposed": p.transposed}
    main_grad = torch.zeros(w.shape, dtype=torch.float32, device=device)
    theirs = torch.zeros_like(main_grad)
    pair = (x, dy) if p.transposed else (dy, x)
    padded = PAD_FROM * min(p.experts * (len(ends) - 1), p.rows) <= p.rows  # as a model's experts do
    places = bi_kernels.group_by_expert(ids, p.experts, layout, padded=True) if padded else groups
    of_fold = [draw(len(places.source), t.shape[1]) for t in pair] if padded else pair

    def add() -> None:
        theirs.add_(torch._grouped_mm(pair[0].t(), pair[1], offs=offsets))

    return [
        (
            FORWARD,
            lambda: bi_kernels.grouped_linear(x, w, groups, **how),
            lambda: torch._grouped_mm(x, forward, offs=offsets),
        ),
        (
            DX,
            lambda: bi_kernels.grouped_linear(dy, w, groups, transposed=not p.transposed),
            lambda: torch._grouped_mm(dy, forward.mT, offs=offsets),
        ),
        (DW, lambda: fold_weight(*of_fold, places.slots, places.slot_offsets, main_grad, True), add),
    ]


def models(session, clock: Clock = by_turns, small: bool = False) -> list[dict]:
    """Times a training step and `generate` of 4 layers of Qwen3-30B-A3B next to stock with grouped_mm."""
    sizes, lines, seed = SMALL if small else Sizes(), [], session.parameters["seed"]
    with quiet():
        both = {name: build(MODEL, session.device, seed, small) for name in (OURS, STOCK)}
        apply(both[OURS])
        both[STOCK].set_experts_implementation("grouped_mm")
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randint(1, both[STOCK].config.vocab_size, shape, generator=g).to(session.device)
        ids = draw(*sizes.step)
        case = f"{MODEL}, {len(both[OURS].model.layers)} layers"
        ms = clock({name: training_step(model.train(), ids) for name, model in both.items()})
        shape = f"{sizes.step[0]} × {sizes.step[1]:,} tokens"
        lines.append({"what": STEP, "case": case, "shape": shape} | _ratio(ms, STOCK))
        for model in both.values():
            model.zero_grad()
            model.eval()
        batches, prompt, new = sizes.generated
        for batch in batches:
            ids = draw(batch, prompt)
            ms = clock({name: partial(_generate, model, ids, new) for name, model in both.items()}, rounds=1)
            lines.append({"what": GENERATE, "case": case, "shape": f"batch {batch}"} | _ratio(ms, STOCK))
    return lines


@torch.no_grad()
def _generate(model, ids: Tensor, new: int) -> None:
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)


def attention(session, clock: Clock = by_turns, small: bool = False) -> list[dict]:
    """Times attention with a soft cap and with sinks, forward and backward, next to attention without."""
    count, length, heads, kv_heads, width = (SMALL if small else Sizes()).attention
    g = torch.Generator(session.device).manual_seed(session.parameters["seed"])
    dtype = torch.float32 if small else torch.bfloat16
    draw = lambda *shape: torch.randn(shape, generator=g, device=session.device, dtype=dtype).requires_grad_()
    q, k, v = draw(count * length, heads, width), *(draw(count * length, kv_heads, width) for _ in range(2))
    sinks, dy = draw(heads), draw(count * length, heads, width).detach()
    cu_seqlens = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=session.device)
    plain, lines = "plain attention", []
    kinds = {plain: ((), {}), "soft cap": ((), {"soft_cap": 50.0}), "sinks": ((sinks,), {})}

    def run(name: str) -> Tensor:
        (more, how) = kinds[name]
        with TokenLayout.packed(cu_seqlens):
            return bi_kernels.attention(q, k, v, *more, cu_seqlens=cu_seqlens, **how)[0]

    outs = {name: run(name) for name in kinds}

    def backward(name: str) -> None:
        torch.autograd.grad(outs[name], (q, k, v, *kinds[name][0]), dy, retain_graph=True)

    def forward(name: str) -> None:
        with torch.no_grad():
            run(name)

    for direction, call in (("forward", forward), ("backward", backward)):
        ms = clock({name: partial(call, name) for name in kinds})
        for name in [*kinds][1:]:
            ratio = _ratio({OURS: ms[name], plain: ms[plain]}, plain)
            shape = f"{count} × {length:,}, {heads} / {kv_heads} heads of {width}"
            lines.append({"what": ATTENTION, "case": f"{name}, {direction}", "shape": shape} | ratio)
    return lines


def summary(lines: list[dict]) -> list[dict]:
    """Returns a line for each kind of measurement: its mean, its range, and its goal in the contract."""
    goals, found = {goal["what"]: goal for goal in CONTRACT["families"]["goals"]}, []
    for what, mine in group_by(lines, lambda line: line["what"]).items():
        goal = goals[what]
        values = [line[goal["value"]] for line in mine]
        mean = math.exp(sum(map(math.log, values)) / len(values))
        bar = f"at least {goal['least']}" if "least" in goal else f"at most {goal['most']}"
        met = mean >= goal["least"] if "least" in goal else mean <= goal["most"]
        said = "peer's time / ours" if goal["value"] == "ratio" else "our time / peer's"
        line = {"what": what, "against": mine[0]["peer"], "measured": said, "cases": len(mine), "mean": f"{mean:.2f}"}
        found.append(
            line | {"range": f"{min(values):.2f} to {max(values):.2f}", "goal": bar, "met": "yes" if met else "NO"}
        )
    return found


def slowest(lines: list[dict], count: int = 10) -> list[dict]:
    """Returns the measurements that are slowest next to their peers."""
    shown = sorted(lines, key=lambda line: line["ratio"])[:count]
    names = "what", "case", "shape", "peer"
    return [
        {n: line[n] for n in names} | {"ms": f"{line['ms']:.3g}", "times": f"{line['times']:.2f}"} for line in shown
    ]


def draw(lines: list[dict]) -> plt.Figure:
    """Draws each measurement as its time in the peer's: a row a kind, named cases filled, drawn ones hollow."""
    kinds = group_by(lines, lambda line: line["what"])
    figure, ax = plt.subplots(figsize=(8.5, 0.9 + 0.55 * len(kinds)))
    goals = {goal["what"]: goal for goal in CONTRACT["families"]["goals"]}
    for y, (what, mine) in enumerate(kinds.items()):
        for by_chance in (False, True):
            some = [line["times"] for line in mine if line["case"].startswith("drawn") == by_chance]
            color = COLORS[y % len(COLORS)]
            face = "none" if by_chance else color
            ax.scatter(some, [y + 0.12 * by_chance] * len(some), s=26, facecolor=face, edgecolor=color, alpha=0.8)
        limit = goals[what].get("most") or 1 / goals[what]["least"]
        ax.plot([limit] * 2, [y - 0.35, y + 0.35], color="#D55E00", linewidth=1.2, linestyle="--")
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_xscale("log")
    worst = max(lines, key=lambda line: line["times"])
    ax.set(
        title=f"Slowest next to its peer: {worst['what']}, {worst['times']:.2f} times its time",
        ylim=(len(kinds) - 0.5, -0.5),
    )
    ax.set_yticks(range(len(kinds)), kinds)
    ax.set_xlabel("our time / the peer's; left of 1 is faster")
    marks = [("named", "full"), ("drawn", "none")]
    handles = [Line2D([], [], marker="o", linestyle="", color="#555555", fillstyle=f, label=n) for n, f in marks]
    handles.append(Line2D([], [], color="#D55E00", linestyle="--", label="goal of the mean"))
    ax.legend(handles=handles, fontsize=8, edgecolor="none", loc="lower right")
    figure.tight_layout()
    return figure
