"""The experiments of the backward audit: drift by split, training runs, and the first op that drifts."""

import contextlib
import math
from functools import partial

import torch

import bi_kernels
from bi_kernels.audit import parallel, stock
from bi_kernels.audit.axes import Side
from bi_kernels.audit.checks.gradient import LAYOUTS
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import PRECONDITION, Row
from bi_kernels.audit.memory import patiently
from bi_kernels.audit.report.sizes import size
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import CONTRACT, EPS
from helpers import training
from helpers.common import Counts, Found

SHOWN = {  # ops beside which others' implementations are shown, by audit
    "rms_norm": ("rms_norm", "add_rms_norm"),
    "vocabulary": ("embedding", "lm_head_logprob"),
    "backward": ("linear", "bias_add", "swiglu"),
}
TRAINED = ("bi_kernels", training.CONTROL, "torch")
QUICK_STEPS = 2  # of the quick form


def _steps(session) -> int:
    steps = CONTRACT["training"]["steps" if session.on_gpu else "interpreter_steps"]
    return min(steps, QUICK_STEPS) if session.quick else steps


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
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            found["Liger"] = lambda x, weight, eps=EPS: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
        if op == "lm_head_logprob":
            from liger_kernel.ops import fused_linear_cross_entropy as liger_loss

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


def split_said(counts: Counts) -> str:
    """Says how many of the backward passes drift, of those that could be computed."""
    drifts = lambda line: any(v > 0 for v in line.values())
    drifting = sum(map(drifts, counts.values()))
    computed = [line for line in counts.values() if drifts(line) or not any(map(math.isnan, line.values()))]
    raised = f"; {len(counts) - len(computed)} raised" * (len(computed) < len(counts))
    return f"bf16, normal inputs: {drifting} of {len(computed)} backward passes drift with the split{raised}"


def begin(session) -> None:
    """Begins `split_drift`, and `trained` where it is part of the audit, on a GPU, while the relations are judged."""
    if session.audit == "backward":
        parallel.ahead(session, training.hashes, TRAINED, _steps(session))
    parallel.ahead(session, _split_drift, SHOWN[session.audit])


def _differing(step: Step, layout: str, whole: dict) -> int:
    found = step.gradients(step.layouts[layout])
    return sum(compare(found[k], whole[k]).mismatches for k in whole)


def _split_drift(session, op: str) -> Counts:
    out: Counts = {}
    for name, function in {"bi_kernels": getattr(bi_kernels, op), **foreign(op)}.items():
        s = session.subject(op, "bf16", function, name)
        step, line, raised = Step(s, "normal", s.lengths), dict.fromkeys(LAYOUTS[1:], float("nan")), {}
        if op == "lm_head_logprob":  # cross entropy, summed, as Liger has it
            step.dy = [torch.full((step.count,), value, device=session.device) for value in (1.0, 0.0)]
        try:
            whole = patiently(partial(step.gradients, step.layouts["packed"]))
        except Exception as error:
            out[f"{name} {op} ({type(error).__name__})"] = line
            continue
        # the fused loss counts every token that it is given, and cannot know of padding
        padded = [layout for layout in line if any((call.index < 0).any() for call in step.layouts[layout])]
        for layout in padded if (name, op) == ("Liger", "lm_head_logprob") else ():
            del line[layout]
        for layout in line:
            try:
                line[layout] = patiently(partial(_differing, step, layout, whole))
            except Exception as error:
                raised[type(error).__name__] = None
        out[" ".join([name, op, *[f"({', '.join(raised)})"] * bool(raised)])] = line
        del step, whole
    return out


def trained(session) -> Found:
    """AdamW steps of a two-layer network under five layouts: ours must end in one SHA-256, and elsewhere than it
    began; with a dW that depends on the split, the control, it must not."""
    s, steps = session.subject("linear"), _steps(session)

    def row(line: dict, against: str, differ: int, of: int, tensor: str = "all weights", asked=Side.TRAINED) -> Row:
        drift, layout = Drift(differ, of, line["max abs"]), f"{steps} AdamW steps, {line['layout']}"
        return s.row(asked, layout, drift, against, tensor=tensor, detail=line["SHA-256"])

    lines, (*_, split), theirs = parallel.each(session, training.hashes, TRAINED, steps)
    first, *others = lines
    *rows, control = (row(x, first["layout"], x["weights that differ"], x["of"]) for x in (*others, split))
    moved = first["unmoved"], first["tensors"], "tensors left unmoved"
    rows.append(row(first, "the initial weights", *moved, PRECONDITION))
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
        return f"{name}: {drift.mismatches} of {drift.elements}, {size([drift.json()])}" if name else "none"

    return [
        {"candidate": candidate}
        | {f"first in {part}": told(*found) for part, found in training.first_difference(session, candidate).items()}
        for candidate in ("bi_kernels", "torch")
    ]
