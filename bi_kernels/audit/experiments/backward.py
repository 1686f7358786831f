"""The experiments of the backward audit: drift by split, training runs, the first op that drifts, and speed."""

import contextlib
from functools import partial

import torch
import torch.nn.functional as F

import bi_kernels
from bi_kernels.audit import parallel, stock
from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.experiments import training
from bi_kernels.audit.experiments.common import Counts, Found, normal, size
from bi_kernels.audit.experiments.timing import times_ms
from bi_kernels.audit.relations.gradient import INVARIANCE, LAYOUTS
from bi_kernels.audit.relations.step import Step
from bi_kernels.contract import CONTRACT, EPS, linears
from bi_kernels.ops import embedding as embed
from bi_kernels.ops import norm
from bi_kernels.ops.gemm import product
from bi_kernels.tokens import layout_for

SHOWN = {  # ops beside which others' implementations are shown, by audit
    "rms_norm": ("rms_norm", "add_rms_norm"),
    "vocabulary": ("embedding", "lm_head_logprob"),
    "backward": ("linear", "bias_add", "swiglu"),
}
TRAINED = ("bi_kernels", training.CONTROL, "torch")
_steps = lambda session: CONTRACT["training"]["steps" if session.on_gpu else "interpreter_steps"]


class _AtEveryToken(torch.autograd.Function):
    """A loss that is a sum, for a check that gives every token its upstream gradient: the largest of them is the sum's.

    Liger's fused loss of one value a token scales every gradient by the first token's (Liger-Kernel, pull request
    1298).
    """

    @staticmethod
    def forward(ctx, total, shape):
        return total.expand(shape).clone()

    @staticmethod
    def backward(ctx, dy):
        return dy.max(), None


def foreign(op: str) -> dict:
    """Returns {name: function} of others' implementations that are installed here."""
    found = {"torch": getattr(stock, op)}
    with contextlib.suppress(ImportError):  # they may be installed
        if op == "rms_norm":
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # noqa: PLC0415

            found["Liger"] = lambda x, weight, eps=EPS: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
        if op == "lm_head_logprob":
            from liger_kernel.ops import fused_linear_cross_entropy as liger_loss  # noqa: PLC0415

            def liger(hidden, weight, targets, temperature=1.0, ignore_index=-100):
                rows = hidden.reshape(-1, hidden.shape[-1]) / temperature
                fused = liger_loss.LigerFusedLinearCrossEntropyFunction.apply
                loss = fused(rows, weight, targets.reshape(-1), None, None, ignore_index, 0.0, 0.0, "sum")[0]
                return _AtEveryToken.apply(-loss, targets.shape), torch.zeros(targets.shape, device=hidden.device)

            found["Liger"] = liger
    return found


def split_drift(session) -> Counts:
    """Returns {candidate's op: {layout: elements of all gradients that differ from those of `packed`}} of the audit's
    SHOWN, in bf16; NaN where it raised."""
    every = parallel.each(session, _split_drift, SHOWN[session.audit])
    return {name: line for lines in every for name, line in lines.items()}


def begin(session) -> None:
    """Begins `split_drift`, and `trained` where it is part of the audit, on a GPU, while the relations are judged."""
    if session.audit == "backward":
        parallel.ahead(session, training.hashes, TRAINED, _steps(session))
    parallel.ahead(session, _split_drift, SHOWN[session.audit])


def _split_drift(session, op: str) -> Counts:
    out: Counts = {}
    for name, function in {"bi_kernels": getattr(bi_kernels, op), **foreign(op)}.items():
        s = session.subject(op, "bf16", function, name)
        step, line = Step(s, "normal", s.lengths), dict.fromkeys(LAYOUTS[1:], float("nan"))
        if op == "lm_head_logprob":  # cross entropy, summed, as Liger has it
            step.dy = [torch.full((step.count,), value, device=session.device) for value in (1.0, 0.0)]
        try:
            whole = step.gradients(step.layouts["packed"])
        except Exception as error:
            out[f"{name} {op} ({type(error).__name__})"] = line
            continue
        for layout in line:
            with contextlib.suppress(Exception):
                found = step.gradients(step.layouts[layout])
                line[layout] = sum(compare(found[k], whole[k]).mismatches for k in whole)
        out[f"{name} {op}"] = line
        del step, whole
    return out


def trained(session) -> Found:
    """AdamW steps of a two-layer network under five layouts: ours must end in one SHA-256, and elsewhere than it
    began; with a dW that depends on the split, the control, it must not."""
    s, steps = session.subject("linear"), _steps(session)

    def row(line: dict, against: str, differ: int, of: int, tensor: str = "all weights") -> Row:
        drift, layout = Drift(differ, of, line["max abs"]), f"{steps} AdamW steps, {line['layout']}"
        return s.row(INVARIANCE, layout, drift, against, tensor=tensor, detail=line["SHA-256"])

    lines, (*_, split), theirs = parallel.each(session, training.hashes, TRAINED, steps)
    first, *others = lines
    *rows, control = (row(x, first["layout"], x["weights that differ"], x["of"]) for x in (*others, split))
    rows.append(row(first, "the initial weights", first["unmoved"], first["tensors"], "tensors left unmoved"))
    control.candidate = training.CONTROL
    return [*rows, control.as_control()], [*lines, split, *theirs]


def hash_table(lines: list[dict]) -> list[dict]:
    counts = "weights that differ", "of"
    return [
        x | {"SHA-256": x["SHA-256"][:16] + "…", "max abs": f"{x['max abs']:.3g}"} | {k: f"{x[k]:,}" for k in counts}
        for x in lines
    ]


def first_failing(session) -> list[dict]:
    """One step packed against one sample a call: where each candidate's forward and backward first part."""

    def told(name: str, drift: Drift | None) -> str:
        return f"{name}: {drift.mismatches} of {drift.elements}, {drift.max_ulp} ULP" if name else "none"

    return [
        {"candidate": candidate}
        | {f"first in {part}": told(*found) for part, found in training.first_difference(session, candidate).items()}
        for candidate in ("bi_kernels", "torch")
    ]


def gemm_speed(session) -> list[dict]:
    """dX and dW of the linear layers, bf16: the ratio to cuBLAS, dW into an fp32 main_grad against torch's way to
    that."""
    out = []
    for case, (n, k) in linears(session.parameters["shapes"]).items():
        if case == "lm_head":
            continue
        for tokens in (4096, 16384):
            x, w, dy = normal(session, tokens, k), normal(session, n, k), normal(session, tokens, n)
            buffer = torch.zeros(n, k, device=session.device)
            cublas_dx, dx, into_torch, into, cublas_dw, dw = times_ms(
                lambda: dy @ w,
                lambda: product(dy, w.t()),
                lambda: buffer.add_(torch.mm(dy.t(), x, out_dtype=torch.float32)),
                lambda: product(dy.t(), x.t(), buffer, buffer, torch.float32),
                lambda: dy.t() @ x,
                lambda: product(dy.t(), x.t()),
            )
            ratios = {
                "dX": cublas_dx / dx,
                "dW": cublas_dw / dw,
                "dW into main_grad, to torch's way": into_torch / into,
            }
            flops = 2 * tokens * n * k / 1e9
            rest = {"the same, to cuBLAS's bf16 dW": cublas_dw / into, "TFLOP/s into main_grad": flops / into}
            out.append({"shape": case, "N": n, "K": k, "tokens": tokens} | ratios | rest)
    return out


def norm_speed(session) -> list[dict]:
    """RMSNorm and QK-norm, 16384 tokens, bf16: TB/s of what must be read and written."""
    sizes, out = size(session), []
    for op, shape, heads in (
        ("rms_norm", (16384, sizes["hidden"]), 1),
        ("qk_norm", (16384, sizes["heads"], sizes["head_dim"]), sizes["heads"]),
    ):
        x, w, dy = normal(session, *shape), normal(session, shape[-1]), normal(session, *shape)
        w.main_grad = torch.zeros(shape[-1], device=session.device)
        layout = layout_for(op, shape[:1])
        _, rstd = norm._launch(x, None, w, EPS)
        calls = {
            "bi_kernels": (
                lambda: norm._launch(x, None, w, EPS),
                lambda: norm._backward(op, x, w, rstd, dy, None, layout, heads, True, True),
            )
        }
        for name, function in foreign("rms_norm").items():
            leaves = [t.clone().requires_grad_() for t in (x, w)]
            backward = partial(torch.autograd.grad, function(*leaves), leaves, dy, retain_graph=True)
            calls[name] = partial(function, x, w), backward
        for name, pair in calls.items():
            try:
                f, b = times_ms(*pair)
                speeds = 2 * x.nbytes / f / 1e9, 3 * x.nbytes / b / 1e9
            except Exception as error:  # an implementation that cannot do it twice, or not this shape
                speeds = type(error).__name__, "–"
            out.append({"op": op, "candidate": name} | dict(zip(("forward TB/s", "backward TB/s"), speeds)))
    return out


def embedding_speed(session) -> list[dict]:
    """Embedding backward, 16384 tokens, bf16: times of torch's, by how the ids repeat; into main_grad and as .grad."""
    tokens, vocab, hidden, device = 16384, size(session)["vocab"], size(session)["hidden"], session.device
    weight, dy = normal(session, vocab, hidden).requires_grad_(), normal(session, tokens, hidden)
    buffer, layout = torch.zeros_like(weight, dtype=torch.float32), layout_for("embedding", (tokens,))
    out = []
    for name, ids in (
        ("uniform", torch.randint(0, vocab, (tokens,), device=device)),
        ("skewed", (torch.rand(tokens, device=device) ** 6 * vocab).long()),
        ("one id", torch.zeros(tokens, dtype=torch.long, device=device)),
    ):
        y = F.embedding(ids, weight)
        theirs, grad, into = times_ms(
            lambda: torch.autograd.grad(y, weight, dy, retain_graph=True),
            lambda: embed._fold_rows(dy, ids, weight, None, layout, None),
            lambda: embed._fold_rows(dy, ids, weight, buffer, layout, None),
        )
        times = {"torch ms": theirs, ".grad ms": grad, "main_grad ms": into}
        out.append({"ids": name} | times | {".grad / torch": grad / theirs, "main_grad / torch": into / theirs})
    return out


def lm_head_speed(session, tokens: int = 4096) -> list[dict]:
    """LM head and selected logprob, forward and backward, counted as 6 · tokens · vocabulary · hidden, calls taking
    turns, and peak memory beyond inputs and gradients."""
    hidden, vocab, out, failed = size(session)["hidden"], size(session)["vocab"], [], []
    h, weight = normal(session, tokens, hidden), normal(session, vocab, hidden).mul_(0.02).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=session.device)
    upstream = torch.randn(tokens, device=session.device)
    buffer = torch.zeros_like(weight, dtype=torch.float32)

    def step(call, main_grad=None, **more) -> None:
        leaf = h.detach().requires_grad_()
        weight.grad, weight.main_grad = None, main_grad
        call(leaf, weight, targets, **more)[0].backward(upstream)

    plain = lambda h, w, targets: [-F.cross_entropy(F.linear(h, w).float(), targets, reduction="none")]
    ours = bi_kernels.lm_head_logprob
    calls = {
        "logits kept": partial(step, ours, keep_bytes=2e9),
        "nothing kept": partial(step, ours),
        "torch": partial(step, plain),
        "logits kept, into main_grad": partial(step, ours, buffer, keep_bytes=2e9),
        "nothing kept, into main_grad": partial(step, ours, buffer),
    }
    if liger := foreign("lm_head_logprob").get("Liger"):
        calls["Liger"] = partial(step, liger)
    for name, call in list(calls.items()):
        try:
            call()
            gradients = torch.cuda.memory_allocated() + h.nbytes
            torch.cuda.reset_peak_memory_stats()
            call()
            out.append({"candidate": name, "extra GiB": (torch.cuda.max_memory_allocated() - gradients) / 2**30})
        except Exception as error:  # a peer's, such as too little memory
            if "kept" in name:
                raise
            failed.append({"candidate": name, "extra GiB": type(error).__name__, "ms": "–", "TFLOP/s": "–"})
            del calls[name]
    for line, ms in zip(out, times_ms(*calls.values())):
        line |= {"ms": ms, "TFLOP/s": 6 * tokens * vocab * hidden / ms / 1e9}
    weight.main_grad = weight.grad = None
    torch.cuda.empty_cache()
    return out + failed
