"""Reproducers of a gradient's drift: the same samples in one call and in one call each, as small as the drift allows."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import Row
from bi_kernels.audit.problem.candidates import Candidate
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.relations.gradient import INVARIANCE
from bi_kernels.audit.relations.step import gradient_lengths
from bi_kernels.audit.reproduce.forward import write
from bi_kernels.contract import dtype_name

SAMPLES = ((1, 1), (3, 2), (5, 17), (17, 44), (129, 64), (300, 211))


@dataclass(frozen=True)
class Split:
    """Samples of these lengths, computed in one call and in one call each; what `tensor`'s gradient then is."""

    lengths: tuple[int, ...]
    seed: int
    tensor: str

    def results(self, s: Subject) -> tuple[torch.Tensor, torch.Tensor]:
        scope = {"fn": s.function, "torch": torch}
        exec("\n".join(body(s, self)), scope)
        return scope["whole"], scope["split"]

    def drifts(self, s: Subject) -> bool:
        try:
            return bool(compare(*self.results(s)).mismatches)
        except Exception:
            return False


def body(s: Subject, split: Split) -> list[str]:
    """The lines that leave both gradients in `whole` and `split`; they need `torch` and `fn`."""
    p, op, dtype, device = s.problem, s.problem.op, str(s.problem.dtype), f'"{s.problem.device.type}"'
    shape = lambda v: ", ".join(map(str, p._shape(v)))
    lines = [
        "from bi_kernels import TokenLayout",
        *["from bi_kernels import rope_table"] * op.positions,
        "",
        f"lengths = {list(split.lengths)}",
        "tokens = sum(lengths)",
        f"torch.manual_seed({split.seed})",
    ]
    for k, v in op.tokens.items():
        if v.endswith(":id"):
            lines.append(f"{k} = torch.randint(0, 7, (tokens,))")
        elif v.endswith(":bool"):
            lines.append(f"{k} = torch.randn(tokens, {shape(v)}) > 0.5")
        else:
            lines.append(f"{k} = torch.randn(tokens, {shape(v)}).to({p.input_dtype})")
    for k, v in op.shared.items():
        dims = ", ".join(reversed(shape(v).split(", "))) if v.endswith(":t") else shape(v)
        lines.append(f"{k} = torch.randn({dims}).to({dtype})")
    names = list(op.tokens | op.shared)
    floating = [k for k, v in (op.tokens | op.shared).items() if not v.endswith((":id", ":bool"))]
    constants = [f"{k}={v!r}" for k, v in op.constants.items()] + [f"dtype={dtype}"] * op.casts
    if op.positions:
        constants.append(
            f"table=rope_table({max(split.lengths)}, {p.dims['head_dim']}, device={device}), "
            f"positions=torch.cat([torch.arange(m, device={device}) for m in samples])"
        )
    if op.cache:
        constants.append(
            f"cu_seqlens_q=torch.tensor([sum(samples[:i]) for i in range(len(samples) + 1)], device={device})"
        )
    lines += [
        "",
        "",
        "def gradient(calls):",
        f"    leaves = {{name: t.to({device}) for name, t in dict("
        + ", ".join(f"{k}={k}" for k in names)
        + ").items()}",
        f"    for name in {floating}:",
        "        leaves[name] = leaves[name].clone().requires_grad_()",
    ]
    if op.shared:
        lines += [
            f"    for name in {list(op.shared)}:",
            "        leaves[name].main_grad = torch.zeros_like(leaves[name], dtype=torch.float32)  # for ops that use it",
        ]
    lines += [
        "    at = 0",
        "    for samples in calls:",
        "        n = sum(samples)",
        "        with TokenLayout(*zip(*[(sum(samples[:i]), m) for i, m in enumerate(samples)]), n):",
        "            y = fn("
        + ", ".join(
            [f"leaves[{k!r}]" + ("[at:at + n]" if k in op.tokens else "") for k in op.order or names] + constants
        )
        + ")",
        "        ys = y if isinstance(y, tuple) else (y,)",
        "        g = torch.Generator().manual_seed(1)",
        "        torch.autograd.backward(ys, [torch.randn(tokens, *t.shape[1:], generator=g)[at:at + n].to(t) for t in ys])",
        "        at += n",
        f"    leaf = leaves[{split.tensor!r}]",
        "    return leaf.grad if leaf.grad is not None else leaf.main_grad",
        "",
        "",
        "whole, split = gradient([lengths]), gradient([[n] for n in lengths])",
    ]
    return lines


def export_gradient(s: Subject, candidate: Candidate, rows: list[Row], folder: Path) -> Path | None:
    """Writes the reproducer of the first gradient that drifts, and names it in each such row; None where none is found."""
    drifting = [r for r in rows if r.verdict != "pass" and r.relation == INVARIANCE and r.mismatches]
    tensors = list(dict.fromkeys(r.tensor.removeprefix("d").removesuffix(".grad") for r in drifting))
    # parameters first: a token's own gradient rarely needs the split
    tensors.sort(key=lambda k: k in s.problem.op.tokens)
    longest = tuple(gradient_lengths(s)[:4])
    split = next(
        (
            x
            for lengths in (*SAMPLES, longest)
            for tensor in tensors
            for seed in (0, 1)
            for x in (Split(lengths, seed, tensor),)
            if x.drifts(s)
        ),
        None,
    )
    if split is None:
        return None
    p = s.problem
    path = folder / ("-".join(filter(None, (p.op.name, p.case, dtype_name(p.dtype), "gradient"))) + ".py")
    write(
        s,
        candidate,
        f"the gradient of {split.tensor}, of samples of {list(split.lengths)} tokens in one call and in one call each.",
        body(s, split),
        ("whole", "split"),
        path,
    )
    for r in drifting:
        r.repro = f"python {folder.name}/{path.name}"
    return path
