"""Callables that nobody wrote for the auditor, judged by it: torch, what torch.compile makes of it, attention backends,
Hugging Face's modules, and ops of Liger, FlagGems and torchao where they are installed."""

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch.nn.attention import SDPBackend, sdpa_kernel

import bi_kernels
from bi_kernels.audit.callables.audit import audit
from bi_kernels.audit.callables.report import Report
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, UNSUPPORTED, Row, sentence

SMALL = {"rows": 20, "hidden": 64, "mlp": 96, "vocab": 200, "heads": 4, "head_dim": 16, "length": 24, "batch": 4}
LARGE = {
    "rows": 300,
    "hidden": 4096,
    "mlp": 12288,
    "vocab": 32000,
    "heads": 16,
    "head_dim": 128,
    "length": 256,
    "batch": 8,
}


@dataclass
class Animal:
    function: Callable
    inputs: tuple
    options: dict = field(default_factory=dict)


class Part(torch.nn.Module):
    """A module, and which part of what it returns is judged."""

    def __init__(self, module: torch.nn.Module, part: Callable):
        super().__init__()
        self.module, self.part = module, part

    def forward(self, *inputs):
        return self.part(self.module(*inputs))


def attention(backend: SDPBackend) -> Callable:
    def scaled_dot_product_attention(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return scaled_dot_product_attention


def zoo(device: torch.device, size: dict) -> Iterator[tuple[str, Callable[[], Animal]]]:
    """(name, what makes it) of every animal; making one raises where its package is missing."""
    g = torch.Generator(device).manual_seed(0)
    bf16, fp32 = torch.bfloat16, torch.float32
    draw = lambda *shape, dtype=bf16: torch.randn(shape, generator=g, device=device).to(dtype)
    rows, hidden, mlp, vocab = (size[k] for k in ("rows", "hidden", "mlp", "vocab"))
    heads, dim, length, batch = (size[k] for k in ("heads", "head_dim", "length", "batch"))
    integers = lambda top, *shape: torch.randint(0, top, shape, generator=g, device=device)
    weight = lambda n, k, dtype=bf16: draw(n, k, dtype=dtype) * k**-0.5
    module = lambda m, dtype=bf16: m.to(device=device, dtype=dtype)

    def plain(name: str, function: Callable, *make: Callable, **options):
        return name, lambda: Animal(function, tuple(m() for m in make), options)

    x = lambda: draw(rows, hidden)
    yield plain("F.linear, square, bf16", F.linear, x, lambda: weight(hidden, hidden))
    yield plain("F.linear, down, bf16", F.linear, lambda: draw(rows, mlp), lambda: weight(hidden, mlp))
    yield plain("F.linear, up, bf16", F.linear, x, lambda: weight(2 * mlp, hidden))
    yield plain(
        "F.linear, square, fp32", F.linear, lambda: draw(rows, hidden, dtype=fp32), lambda: weight(hidden, hidden, fp32)
    )
    yield plain(
        "torch.matmul of a stack", torch.matmul, lambda: draw(batch, length, hidden), lambda: weight(hidden, hidden)
    )
    yield plain("torch.bmm", torch.bmm, lambda: draw(batch, length, dim), lambda: draw(batch, dim, length))
    yield plain(
        "torch.einsum over heads",
        lambda x, w: torch.einsum("bshd,hde->bshe", x, w),
        lambda: draw(batch, length, heads, dim),
        lambda: draw(heads, dim, dim),
    )
    for name in ("silu", "gelu", "relu", "softplus"):
        yield plain(f"F.{name}", getattr(F, name), x)
    for name in ("softmax", "log_softmax"):
        yield plain(f"F.{name}", lambda x, f=getattr(F, name): f(x, -1), x)
    yield plain("torch.logsumexp", lambda x: torch.logsumexp(x, -1), lambda: draw(rows, vocab, dtype=fp32))
    yield plain("torch.sum", lambda x: x.sum(-1), x)
    yield plain("torch.cumsum", lambda x: x.cumsum(-1), lambda: draw(rows, hidden, dtype=fp32))
    yield plain("torch.topk", lambda x: x.topk(8, -1).values, x)
    yield plain(
        "F.layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b), x, lambda: draw(hidden), lambda: draw(hidden)
    )
    yield plain("F.rms_norm", lambda x, w: F.rms_norm(x, w.shape, w), x, lambda: draw(hidden))
    yield plain("F.group_norm", lambda x: F.group_norm(x, 8), x)
    yield plain("F.embedding", F.embedding, lambda: integers(vocab, rows), lambda: draw(vocab, hidden))
    yield plain(
        "F.cross_entropy",
        lambda x, t: F.cross_entropy(x.float(), t, reduction="none"),
        lambda: draw(rows, vocab),
        lambda: integers(vocab, rows),
    )
    yield plain("F.conv1d", F.conv1d, lambda: draw(batch, dim, length), lambda: draw(dim, dim, 4))
    yield plain("sampling by softmax", lambda x: torch.multinomial(x.float().softmax(-1), 1), x)
    yield plain("a batch's mean taken off", lambda x: x - x.mean(0), x)
    yield plain("nn.BatchNorm1d, training", module(torch.nn.BatchNorm1d(hidden)), x)
    yield plain("nn.BatchNorm1d, eval", module(torch.nn.BatchNorm1d(hidden)).eval(), x)
    yield plain("nn.Dropout, training", torch.nn.Dropout(0.1), x)
    yield plain("nn.Linear", module(torch.nn.Linear(hidden, hidden)), x)
    yield plain(
        "nn.LSTM",
        Part(module(torch.nn.LSTM(dim, dim, batch_first=True), fp32), lambda y: y[0]),
        lambda: draw(batch, length, dim, dtype=fp32),
    )
    yield plain(
        "nn.TransformerEncoderLayer, eval",
        module(torch.nn.TransformerEncoderLayer(heads * dim, heads, 4 * heads * dim, batch_first=True)).eval(),
        lambda: draw(batch, length, heads * dim),
    )
    backends = {"math": SDPBackend.MATH} | (
        {
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cuDNN": SDPBackend.CUDNN_ATTENTION,
        }
        if device.type == "cuda"
        else {}
    )
    qkv = [lambda: draw(batch, heads, length, dim)] * 3
    for name, backend in backends.items():
        yield plain(f"SDPA, {name}", attention(backend), *qkv)
    for name, function, *make in (
        ("F.rms_norm", lambda x, w: F.rms_norm(x, w.shape, w), x, lambda: draw(hidden)),
        ("softmax(x) x", lambda x: x.float().softmax(-1) * x, x),
        ("linear and silu", lambda x, w: F.silu(F.linear(x, w)), x, lambda: weight(hidden, hidden)),
    ):
        yield plain(f"torch.compile: {name}", torch.compile(function), *make)

    def liger(name: str, make: Callable):
        return f"Liger {name}", lambda: Animal(*make(__import__("liger_kernel.transformers", fromlist=["x"])))

    def flag(name: str, call: Callable, *make: Callable):
        return f"FlagGems {name}", lambda: Animal(partial(call, __import__("flag_gems")), tuple(m() for m in make))

    def quantised():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        linear = module(torch.nn.Sequential(torch.nn.Linear(hidden, hidden)))
        quantize_(linear, Int8WeightOnlyConfig())
        return Animal(linear, (x(),), {"backward": False})

    yield "torchao int8 weight-only Linear", quantised
    yield plain("bi_kernels.linear", bi_kernels.linear, x, lambda: weight(hidden, hidden))
    yield plain("bi_kernels.rms_norm", bi_kernels.rms_norm, x, lambda: draw(hidden))
    if device.type == "cuda":
        yield flag("mm", lambda gems, x, w: gems.mm(x, w), x, lambda: weight(hidden, hidden))
        yield flag("softmax", lambda gems, x: gems.softmax(x, -1), x)
        yield flag("rms_norm", lambda gems, x, w: gems.rms_norm(x, w.shape, w), x, lambda: draw(hidden))
        config = type("Config", (), {"hidden_size": hidden, "intermediate_size": mlp, "hidden_act": "silu"})
        yield liger("RMSNorm", lambda k: (module(k.LigerRMSNorm(hidden)), (x(),)))
        yield liger("LayerNorm", lambda k: (module(k.LigerLayerNorm(hidden)), (x(),)))
        yield liger("SwiGLU MLP", lambda k: (module(k.LigerSwiGLUMLP(config)), (draw(batch, length, hidden),)))
        yield liger(
            "cross entropy",
            lambda k: (k.LigerCrossEntropyLoss(reduction="none"), (draw(rows, vocab), integers(vocab, rows))),
        )

    def llama(name: str, make: Callable):
        def built():
            from transformers.models.llama import modeling_llama
            from transformers.models.llama.configuration_llama import LlamaConfig

            config = LlamaConfig(
                hidden_size=heads * dim,
                intermediate_size=4 * dim,
                num_attention_heads=heads,
                head_dim=dim,
                num_key_value_heads=heads // 2,
                num_hidden_layers=1,
                vocab_size=vocab,
                attn_implementation="sdpa",
            )
            return Animal(*make(modeling_llama, config))

        return f"Hugging Face {name}", built

    states = lambda: draw(batch, length, heads * dim)
    yield llama("LlamaRMSNorm", lambda m, c: (module(m.LlamaRMSNorm(c.hidden_size)), (states(),)))
    yield llama("LlamaMLP", lambda m, c: (module(m.LlamaMLP(c)), (states(),)))
    yield llama(
        "LlamaModel, one layer",
        lambda m, c: (
            Part(module(m.LlamaModel(c)).eval(), lambda y: y.last_hidden_state),
            (integers(vocab, batch, length),),
        ),
    )


def function(name: str, device: str) -> Callable:
    """The callable of that name, for the scripts that show its drift."""
    makers = zoo(torch.device(device), LARGE if device == "cuda" else SMALL)
    return next(make for known, make in makers if known == name)().function


# What is known without the auditor. Elementwise functions of one element cannot see the batch, and this package's ops are
# judged by audits of their own; the drifting ones see the batch by what they are.
INVARIANT = ("F.silu", "F.gelu", "F.relu", "F.softplus", "bi_kernels.linear", "bi_kernels.rms_norm")
DRIFTING = ("a batch's mean taken off", "nn.BatchNorm1d, training", "sampling by softmax", "nn.Dropout, training")
IMPORTS = "from bi_kernels.audit import zoo\n\nfn = zoo.function({name!r}, {device!r})"
LONGEST = 300  # seconds that a reproducer may take
FEW = (
    "F.silu",
    "F.linear, square, fp32",
    "F.rms_norm",
    "a batch's mean taken off",
    "nn.Dropout, training",
    "bi_kernels.rms_norm",
)
RELATIONS = ("invariance", "gradient invariance", "determinism", "atomics-free")


def judge(
    device: torch.device,
    size: dict,
    folder: Path | None,
    seconds: float = 60.0,
    only: Sequence[str] = (),
    seed: int = 0,
) -> list[dict]:
    """A line an animal: verdicts, how much drifts, and whether its reproducer reproduces, run in a process of its own."""
    lines, reports = [], []
    every = [(name, make) for name, make in zoo(device, size) if not only or name in only]
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in track(every, description="zoo", transient=True, disable=not sys.stderr.isatty()):
            lines.append({"callable": name})
            started, report = time.monotonic(), None
            try:
                animal = make()
                report = audit(
                    animal.function,
                    *animal.inputs,
                    seconds=seconds,
                    seed=seed,
                    folder=folder or scratch,
                    name=name,
                    imports=IMPORTS.format(name=name, device=device.type),
                    **animal.options,
                )
                report.target = None  # the tensors
                lines[-1] |= summary(report) | {"seconds": round(time.monotonic() - started)}
            except Exception as error:
                traceback.clear_frames(error.__traceback__)
                lines[-1] |= {"verdict": UNSUPPORTED, "detail": f"not judged: {sentence(error)}"}
            reports.append(report)
        with ThreadPoolExecutor(os.cpu_count() // 2 or 1) as pool:
            for line, said in zip(lines, pool.map(lambda r: r and reproduced(r), reports)):
                line["reproducer"] = said or "–"
    return lines


def rows(lines: Sequence[dict], device: str) -> list[Row]:
    """Whether the auditor was right: a drift that it reports is shown by a script without it, and what is known is found."""
    out = []
    for line in lines:
        name, found = line["callable"], line["verdict"]
        make = lambda relation, verdict, detail="", candidate="zoo", **more: Row(
            "zoo", name, "", candidate, "", device, relation, "", "", "given", 0, verdict, detail=detail, **more
        )
        if line["reproducer"] != "–":
            out.append(make("reproducer", PASS if line["reproducer"] == "drifts" else NEEDS_FIX, line["reproducer"]))
        elif found != PASS and name not in DRIFTING:  # not judged, or something that no script shows
            out.append(make("reproducer", UNSUPPORTED, line["detail"]))
        if name in INVARIANT:
            out.append(make("no false alarm", PASS if found == PASS else NEEDS_FIX, found))
        if name in DRIFTING:
            worst = line.get("worst") or Row(*[""] * 10, 0, found)
            out.append(
                replace(worst, audit="zoo", op=name, candidate=name, control=True, caught=bool(worst.mismatches))
            )
    return out


def table(lines: Sequence[dict]) -> list[dict]:
    """For people: what drifts first, and how it is known."""
    order = (NEEDS_FIX, PASS, UNSUPPORTED)

    def known(line: dict) -> str:
        name = line["callable"]
        return (
            "its reproducer"
            if line["reproducer"] == "drifts"
            else "its own audits"
            if name.startswith("bi_kernels")
            else "elementwise"
            if name in INVARIANT
            else "random, or of the batch, by its nature"
            if name in DRIFTING
            else ""
        )

    return [
        {
            "callable": f"`{line['callable']}`",
            "verdict": line["verdict"],
            **{k: line.get(k, "–") for k in RELATIONS},
            "reproducer": line["reproducer"],
            "established by": known(line),
            "seconds": line.get("seconds", "–"),
        }
        for line in sorted(lines, key=lambda line: order.index(line["verdict"]))
    ]


def shares(lines: Sequence[dict]) -> dict[str, dict[str, float]]:
    """{callable: {relation: the largest share of elements that differ, in percent}} of those that were judged."""
    return {line["callable"]: {k: line["shares"][k] for k in RELATIONS[:2]} for line in lines if "shares" in line}


def summary(report: Report) -> dict:
    """Each relation's worst drift: elements, and the largest ULP."""
    drifts = [r for r in report.rows if r.verdict == NEEDS_FIX and r.mismatches and r.relation in RELATIONS[:3]]
    shown = lambda r: r.relation.endswith("invariance") and r.mismatches  # in columns of their own
    why = dict.fromkeys(
        f"{r.relation}: {r.detail}" for r in report.rows if r.verdict == NEEDS_FIX and r.detail and not shown(r)
    )
    line = {
        "verdict": report.verdict,
        "detail": "; ".join(why),
        "shares": {},
        "worst": max(drifts, key=lambda r: r.mismatches, default=None),
    }
    for relation in RELATIONS:
        mine = [r for r in report.rows if r.relation == relation]
        bad = [r for r in mine if r.verdict == NEEDS_FIX]
        most = max(bad, key=lambda r: (r.mismatches or 0) / max(r.elements or 1, 1), default=None)
        counted = most is None or bool(most.mismatches and most.max_ulp is not None)  # else it raised, or time was up
        share = 100 * most.mismatches / most.elements if most and counted else 0.0
        line["shares"][relation] = share if mine and counted else float("nan")
        line[relation] = (
            "–"
            if not mine
            else mine[0].verdict
            if most is None
            else most.detail
            if not counted
            else f"{share:.1f}% of {most.tensor}, {most.max_ulp} ULP ({most.layout})"
        )
    return line


def reproduced(report: Report) -> str:
    """What the standalone script says when it runs by itself: 'drifts', 'does not', or '–' where nothing drifts."""
    drifts = [r for r in report.rows if r.verdict == NEEDS_FIX and r.mismatches and r.relation.endswith("invariance")]
    if not drifts:
        return "–"
    if report.repro is None:
        return "none found"
    done = subprocess.run(
        [sys.executable, report.repro.name], cwd=report.repro.parent, capture_output=True, text=True, timeout=LONGEST
    )
    return (
        "drifts"
        if done.returncode == 1 and "elements differ" in done.stdout
        else f"does not: {done.stderr.strip()[-80:]}"
    )
