"""Measures the LM head with the selected logprob, forward and backward."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

import bi_kernels
from bi_kernels.audit.bench.measure import Bench
from bi_kernels.audit.bench.rows import COMPILED, LIGER, TORCH
from bi_kernels.audit.experiments.backward import foreign

KEPT, NOTHING = "logits kept", "nothing kept"


def _plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor]:
    return (-F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none"),)


def _measure(bench: Bench) -> None:
    s = bench.settings["lm_head"]
    tokens, vocab, hidden = s["tokens"], s["vocab"], s["hidden"]
    h, weight = bench.numbers.take(tokens, hidden), bench.numbers.take(vocab, hidden).mul(0.02).requires_grad_()
    g = torch.Generator(bench.device).manual_seed(bench.seed)
    targets = torch.randint(0, vocab, (tokens,), generator=g, device=bench.device)
    upstream = torch.randn(tokens, generator=g, device=bench.device)
    buffer = torch.zeros_like(weight, dtype=torch.float32)

    def step(call: Callable, main_grad: torch.Tensor | None, i: int) -> None:
        leaf = h.detach().requires_grad_()
        weight.grad, weight.main_grad = None, main_grad
        call(leaf, weight, targets)[0].backward(upstream)

    keeps = partial(bi_kernels.lm_head_logprob, keep_bytes=s["keep_bytes"])
    ours = {
        f"{KEPT}, into main_grad": partial(step, keeps, buffer),
        f"{NOTHING}, into main_grad": partial(step, bi_kernels.lm_head_logprob, buffer),
        KEPT: partial(step, keeps, None),
        NOTHING: partial(step, bi_kernels.lm_head_logprob, None),
    }
    peers = {TORCH: partial(step, _plain, None)}
    if bench.on_gpu:
        peers[COMPILED] = partial(step, torch.compile(_plain, dynamic=False), None)
        if liger := foreign("lm_head_logprob").get(LIGER):
            peers[LIGER] = partial(step, liger, None)
    timings, errors = bench.timed(ours | peers)
    said = {"tokens": tokens, "vocab": vocab, "hidden": hidden, "flops": 6 * tokens * vocab * hidden}
    size = 2 * (3 * weight.numel() + 3 * h.numel())
    for name in ours:
        kept = {n: t for n, t in timings.items() if n == name or n not in ours}
        bench.add("lm_head", "lm_head_logprob", "both", name, (kept, errors), TORCH, name, size=size, **said)
    weight.main_grad = weight.grad = None
    torch._dynamo.reset()


def lm_head(bench: Bench) -> None:
    """Measures it with logits kept and with nothing kept, into main_grad and as returned."""
    bench.cell("lm_head", "lm_head_logprob", lambda: _measure(bench))
    bench.empty()
