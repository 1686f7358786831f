"""Measures the ops that memory bounds (norms, RoPE, SwiGLU, the embedding) and the LM head, forward and backward."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch._functorch.config
import torch.nn.functional as F

import bi_kernels
from benchmarks import peers
from benchmarks.measure import COMPILED, LIGER, OURS, TORCH, Bench, rotated
from bi_kernels.audit import stock
from helpers.backward import foreign

KEPT, NOTHING = "logits kept", "nothing kept"


class Op(NamedTuple):
    """An op and its inputs. forward, backward: how many times a call must read or write a tensor of the first's size.
    flops: for an element, about, forward and backward."""

    op: str
    case: str
    tensors: list[tuple[int, ...]]
    weights: list[tuple[int, ...]]
    forward: int
    backward: int
    flops: tuple[int, int]
    extra: tuple = ()
    compiled: bool = True


def ops(bench: Bench) -> Iterator[Op]:
    """Yields every op but the embedding."""
    s, t = bench.settings["rows"], bench.settings["rows"]["tokens"]
    heads, width = s["heads"], s["head_dim"]
    for n in s["rms_norm"]:
        yield Op("rms_norm", f"width {n}", [(t, n)], [(n,)], 2, 3, (4, 9), compiled=n == s["compiled"])
    yield Op("qk_norm", f"{heads} heads of {width}", [(t, heads, width)], [(width,)], 2, 3, (4, 9))
    yield Op("add_rms_norm", f"width {s['hidden']}", [(t, s["hidden"])] * 2, [(s["hidden"],)], 4, 4, (5, 10))
    table = bi_kernels.rope_table(t, width, device=bench.device)
    at = torch.arange(t, device=bench.device)
    yield Op("rope", f"{heads} heads of {width}", [(t, heads, width)], [], 2, 2, (3, 3), (table, at))
    yield Op("swiglu", f"width {s['mlp']}", [(t, s["mlp"])] * 2, [], 3, 5, (5, 13))


def _functions(bench: Bench, op: Op) -> dict[str, Callable]:
    """Returns ours, stock PyTorch in eager mode and compiled, and Liger and QuACK where they are installed."""
    theirs = getattr(stock, op.op)
    found = {OURS: getattr(bi_kernels, op.op), TORCH: theirs}
    if bench.on_gpu:
        if op.compiled:
            found[COMPILED] = torch.compile(lambda *given: theirs(*given), dynamic=False)
        if op.op == "rms_norm":
            found |= {k: f for k, f in foreign(op.op).items() if k == LIGER} | peers.rms_norm()
    return found


def _op(bench: Bench, op: Op) -> None:
    """Measures forward and backward of an op. Ours adds gradients of weights to main_grad."""
    count, functions = torch.Size(op.tensors[0]).numel(), _functions(bench, op)
    sets = bench.numbers.sets(bench.sets(op.forward * 2 * count), *op.tensors, *op.weights)

    def add(direction: str, calls: dict, times: int, flops: int) -> None:
        line = {"direction": direction, "case": op.case, "tokens": op.tensors[0][0]}
        measured = bench.timed(calls, sets=len(sets))
        bench.add("rows", op.op, measured, TORCH, line, flops=flops * count, size=times * 2 * count)

    with torch.no_grad():
        add("forward", rotated(functions, sets, *op.extra), op.forward, op.flops[0])
    with torch._functorch.config.patch(donated_buffer=False):  # a compiled backward's inputs stay for the next call
        calls = {
            name: bench.gradients(f, sets, *op.extra, main_grads=len(op.weights) * (name == OURS))
            for name, f in functions.items()
        }
        add("backward", calls, op.backward, op.flops[1])
    torch._dynamo.reset()


def _embedding(bench: Bench, case: str, ids: torch.Tensor, table: torch.Tensor) -> None:
    """Measures the embedding of ids, forward and its gradient: into main_grad, and returned."""
    vocab, hidden = table.shape
    distinct = len(ids.unique())
    rows, read = 2 * len(ids) * hidden, 2 * distinct * hidden
    fields = {"tokens": len(ids), "vocab": vocab, "distinct": distinct}
    functions, sets = {OURS: bi_kernels.embedding, TORCH: stock.embedding}, [(ids, table)]

    def add(direction: str, calls: dict, size: int, **options) -> None:
        line = {"direction": direction, "case": case}
        bench.add("rows", "embedding", bench.timed(calls, **options), TORCH, line, size=size, **fields)

    with (
        torch.no_grad()
    ):  # in a graph, since ours in eager mode waits for the device's answer whether the ids are right
        add("forward", rotated(functions, sets), rows + read, graphs=True)
    theirs = {TORCH: bench.gradients(stock.embedding, sets)}
    into = {OURS: bench.gradients(bi_kernels.embedding, sets, main_grads=1)}
    add("backward", into | theirs, rows + 4 * read)
    returned = {OURS: bench.gradients(bi_kernels.embedding, sets)}
    add("backward, returned", returned | theirs, rows + 2 * table.numel())


def rows(bench: Bench) -> None:
    """Measures every op that memory bounds."""
    s = bench.settings["rows"]
    for op in ops(bench):
        bench.cell("rows", f"{op.op}, {op.case}", _op, op)
        bench.free_cache()
    table = bench.numbers.take(s["vocab"], s["hidden"])
    share = torch.rand(s["tokens"], generator=torch.Generator().manual_seed(bench.seed)).to(bench.device)
    for name, skew in (("ids drawn evenly", 1), ("ids drawn unevenly", 6)):
        ids = (share**skew * s["vocab"]).long()
        bench.cell("rows", f"embedding, {name}", _embedding, name, ids, table)


def _plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor]:
    return (-F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none"),)


def _lm_head(bench: Bench) -> None:
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

    ours = {KEPT: partial(bi_kernels.lm_head_logprob, keep_bytes=s["keep_bytes"]), NOTHING: bi_kernels.lm_head_logprob}
    calls = {f"{name}, into main_grad": partial(step, call, buffer) for name, call in ours.items()}
    calls |= {name: partial(step, call, None) for name, call in ours.items()}
    lines = [{"direction": "both", "case": name, "ours": name} for name in calls]
    calls[TORCH] = partial(step, _plain, None)
    if bench.on_gpu:
        calls[COMPILED] = partial(step, torch.compile(_plain, dynamic=False), None)
        found = {k: f for k, f in foreign("lm_head_logprob").items() if k == LIGER} | peers.logprob()
        calls |= {name: partial(step, call, None) for name, call in found.items()}
    fields = {"tokens": tokens, "vocab": vocab, "hidden": hidden, "flops": 6 * tokens * vocab * hidden}
    size = 2 * (3 * weight.numel() + 3 * h.numel())
    bench.add("lm_head", "lm_head_logprob", bench.timed(calls), TORCH, *lines, size=size, **fields)
    weight.main_grad = weight.grad = None
    torch._dynamo.reset()


def lm_head(bench: Bench) -> None:
    """Measures logits kept and nothing kept, with the weight's gradient in main_grad and returned."""
    bench.cell("lm_head", "lm_head_logprob", _lm_head)
    bench.free_cache()
