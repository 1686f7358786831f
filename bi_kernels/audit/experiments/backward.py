"""The experiments of the backward audit: drift by split, training runs, the first op that drifts, and speed."""

from functools import partial

import torch
import torch.nn.functional as F

import bi_kernels
from bi_kernels.audit import stock
from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, Row
from bi_kernels.audit.experiments import training
from bi_kernels.audit.experiments.timing import times_ms
from bi_kernels.audit.relations.gradient import LAYOUTS
from bi_kernels.audit.relations.step import Step
from bi_kernels.contract import CONTRACT, EPS, SHAPES, linears
from bi_kernels.ops import embedding as embed
from bi_kernels.ops import norm
from bi_kernels.ops.gemm import product
from bi_kernels.tokens import layout_for


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
    try:
        if op == "rms_norm":
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # noqa: PLC0415  (may be installed)

            found["Liger"] = lambda x, weight, eps=EPS: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
        if op == "lm_head_logprob":
            import liger_kernel.ops.fused_linear_cross_entropy as liger_loss  # noqa: PLC0415  (may be installed)

            def liger(hidden, weight, targets, temperature=1.0, ignore_index=-100):
                rows = hidden.reshape(-1, hidden.shape[-1]) / temperature
                fused = liger_loss.LigerFusedLinearCrossEntropyFunction.apply
                loss = fused(rows, weight, targets.reshape(-1), None, None, ignore_index, 0.0, 0.0, "sum")[0]
                return _AtEveryToken.apply(-loss, targets.shape), torch.zeros(targets.shape, device=hidden.device)

            found["Liger"] = liger
    except ImportError:
        pass
    return found


def split_drift(session, ops: tuple[str, ...], dtype: str = "bf16") -> dict[str, dict[str, float]]:
    """Returns {candidate's op: {layout: elements of all gradients that differ from those of `packed`}}; NaN where it
    raised."""
    out: dict[str, dict[str, float]] = {}
    for op in ops:
        for name, function in {"bi_kernels": getattr(bi_kernels, op), **foreign(op)}.items():
            s = session.subject(op, dtype, function, name)
            step, line = Step(s, "normal", s.lengths), {}
            if op == "lm_head_logprob":  # cross entropy, summed, as Liger has it
                step.dy = [
                    torch.ones(step.count, device=session.device),
                    torch.zeros(step.count, device=session.device),
                ]
            try:
                whole = step.gradients(step.layouts["packed"])
            except Exception as error:
                out[f"{name} {op} ({type(error).__name__})"] = dict.fromkeys(LAYOUTS[1:], float("nan"))
                continue
            for layout in LAYOUTS[1:]:
                try:
                    found = step.gradients(step.layouts[layout])
                    line[layout] = sum(compare(found[k], whole[k]).mismatches for k in whole)
                except Exception:
                    line[layout] = float("nan")
            out[f"{name} {op}"] = line
            s.forget()
            del step, whole
    return out


def trained(session) -> tuple[list[Row], list[dict]]:
    """AdamW steps of a two-layer network under five layouts: ours must end in one SHA-256, and elsewhere than it
    began; with a dW that depends on the split, the control, it must not."""
    steps = CONTRACT["training"]["steps" if session.on_gpu else "interpreter_steps"]
    s = session.subject("linear")

    def row(line: dict, against: str, differ: int, of: int, tensor: str = "all weights") -> Row:
        return s.row(
            "gradient invariance",
            f"{steps} AdamW steps, {line['layout']}",
            Drift(differ, of, line["max abs"]),
            against,
            "normal",
            tensor=tensor,
            detail=line["SHA-256"],
        )

    lines = training.hashes(session, "bi_kernels", steps)
    first, *others = lines
    rows = [row(line, first["layout"], line["weights that differ"], line["of"]) for line in others]
    rows.append(row(first, "the initial weights", first["unmoved"], first["tensors"], "tensors left unmoved"))
    split = training.hashes(session, training.CONTROL, steps, splits=("packed", "micro_batches:ragged"))[-1]
    control = row(split, first["layout"], split["weights that differ"], split["of"])
    control.candidate, control.control, control.caught = training.CONTROL, True, control.verdict == NEEDS_FIX
    lines += [split, *training.hashes(session, "torch", steps)]
    return [*rows, control], lines


def hash_table(lines: list[dict]) -> list[dict]:
    return [
        line
        | {
            "SHA-256": line["SHA-256"][:16] + "…",
            "weights that differ": f"{line['weights that differ']:,}",
            "of": f"{line['of']:,}",
            "max abs": f"{line['max abs']:.3g}",
        }
        for line in lines
    ]


def first_failing(session) -> list[dict]:
    """One step packed against one sample a call: where each candidate's forward and backward first part."""
    out = []
    for candidate in ("bi_kernels", "torch"):
        found = training.first_difference(session, candidate)
        line = {"candidate": candidate}
        for part in ("forward", "backward", "parameters"):
            name, drift = found[part]
            line[f"first in {part}"] = (
                f"{name}: {drift.mismatches} of {drift.elements}, {drift.max_ulp} ULP" if name else "none"
            )
        out.append(line)
    return out


def gemm_speed(session) -> list[dict]:
    """dX and dW of the linear layers, bf16: the ratio to cuBLAS, dW into an fp32 main_grad against torch's way to
    that."""
    out = []
    for case, (n, k) in linears(session.parameters["shapes"]).items():
        if case == "lm_head":
            continue
        for tokens in (4096, 16384):
            make = lambda *shape: torch.randn(*shape, device=session.device, dtype=torch.bfloat16)
            x, w, dy = make(tokens, k), make(n, k), make(tokens, n)
            buffer = torch.zeros(n, k, device=session.device)
            cublas_dx, dx, into_torch, into, cublas_dw, dw = times_ms(
                lambda: dy @ w,
                lambda: product(dy, w.t()),
                lambda: buffer.add_(torch.mm(dy.t(), x, out_dtype=torch.float32)),
                lambda: product(dy.t(), x.t(), buffer, buffer, torch.float32),
                lambda: dy.t() @ x,
                lambda: product(dy.t(), x.t()),
            )
            out.append(
                {
                    "shape": case,
                    "N": n,
                    "K": k,
                    "tokens": tokens,
                    "dX": cublas_dx / dx,
                    "dW": cublas_dw / dw,
                    "dW into main_grad, to torch's way": into_torch / into,
                    "the same, to cuBLAS's bf16 dW": cublas_dw / into,
                    "TFLOP/s into main_grad": 2 * tokens * n * k / into / 1e9,
                }
            )
    return out


def norm_speed(session) -> list[dict]:
    """RMSNorm and QK-norm, 16384 tokens, bf16: TB/s of what must be read and written."""
    size, out = SHAPES[session.parameters["shapes"]], []
    for op, shape, heads in (
        ("rms_norm", (16384, size["hidden"]), 1),
        ("qk_norm", (16384, size["heads"], size["head_dim"]), size["heads"]),
    ):
        make = lambda *dims: torch.randn(*dims, device=session.device, dtype=torch.bfloat16)
        x, w, dy = make(*shape), make(shape[-1]), make(*shape)
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
            leaf, weight = x.clone().requires_grad_(), torch.nn.Parameter(w.detach().clone())
            y = function(leaf, weight)
            calls[name] = (
                lambda function=function, weight=weight: function(x, weight.detach()),
                lambda y=y, leaf=leaf, weight=weight: torch.autograd.grad(y, (leaf, weight), dy, retain_graph=True),
            )
        for name, (forward, backward) in calls.items():
            try:
                f, b = times_ms(forward, backward)
            except Exception as error:  # an implementation that cannot do it twice, or not this shape
                out.append({"op": op, "candidate": name, "forward TB/s": type(error).__name__, "backward TB/s": "–"})
                continue
            out.append(
                {
                    "op": op,
                    "candidate": name,
                    "forward TB/s": 2 * x.nbytes / f / 1e9,
                    "backward TB/s": 3 * x.nbytes / b / 1e9,
                }
            )
    return out


def embedding_speed(session) -> list[dict]:
    """Embedding backward, 16384 tokens, bf16: times of torch's, by how the ids repeat; into main_grad and as .grad."""
    size, out = SHAPES[session.parameters["shapes"]], []
    tokens, vocab, device = 16384, size["vocab"], session.device
    weight = torch.nn.Parameter(torch.randn(vocab, size["hidden"], device=device, dtype=torch.bfloat16))
    dy = torch.randn(tokens, size["hidden"], device=device, dtype=torch.bfloat16)
    buffer, layout = torch.zeros_like(weight, dtype=torch.float32), layout_for("embedding", (tokens,))
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
        out.append(
            {
                "ids": name,
                "torch ms": theirs,
                ".grad ms": grad,
                "main_grad ms": into,
                ".grad / torch": grad / theirs,
                "main_grad / torch": into / theirs,
            }
        )
    return out


def lm_head_speed(session, tokens: int = 4096) -> list[dict]:
    """LM head and selected logprob, forward and backward, counted as 6 · tokens · vocabulary · hidden, calls taking
    turns, and peak memory beyond inputs and gradients."""
    size, device, out, failed = SHAPES[session.parameters["shapes"]], session.device, [], []
    hidden, vocab = size["hidden"], size["vocab"]
    h = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(vocab, hidden, device=device, dtype=torch.bfloat16) * 0.02)
    targets = torch.randint(0, vocab, (tokens,), device=device)
    upstream = torch.randn(tokens, device=device)

    buffer = torch.zeros_like(weight, dtype=torch.float32)

    def step(call, main_grad=None) -> None:
        leaf = h.detach().requires_grad_()
        weight.grad, weight.main_grad = None, main_grad
        call(leaf).backward(upstream)

    kept = lambda leaf: bi_kernels.lm_head_logprob(leaf, weight, targets, keep_bytes=2e9)[0]
    nothing = lambda leaf: bi_kernels.lm_head_logprob(leaf, weight, targets)[0]
    ways = {
        "logits kept": (kept,),
        "nothing kept": (nothing,),
        "torch": (lambda leaf: -F.cross_entropy(F.linear(leaf, weight).float(), targets, reduction="none"),),
        "logits kept, into main_grad": (kept, buffer),
        "nothing kept, into main_grad": (nothing, buffer),
    }
    if "Liger" in foreign("lm_head_logprob"):
        ways["Liger"] = (lambda leaf: foreign("lm_head_logprob")["Liger"](leaf, weight, targets)[0],)
    for name, way in list(ways.items()):
        try:
            step(*way)
            gradients = torch.cuda.memory_allocated() + h.nbytes
            torch.cuda.reset_peak_memory_stats()
            step(*way)
            out.append({"candidate": name, "extra GiB": (torch.cuda.max_memory_allocated() - gradients) / 2**30})
        except Exception as error:  # a peer's, such as too little memory
            if way[0] in (kept, nothing):
                raise
            failed.append({"candidate": name, "extra GiB": type(error).__name__, "ms": "–", "TFLOP/s": "–"})
            del ways[name]
    for line, ms in zip(out, times_ms(*(partial(step, *way) for way in ways.values()))):
        line |= {"ms": ms, "TFLOP/s": 6 * tokens * vocab * hidden / ms / 1e9}
    weight.main_grad = weight.grad = None
    torch.cuda.empty_cache()
    return out + failed
