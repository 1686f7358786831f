"""Measures the ops that memory bounds: norms, RoPE, SwiGLU, and the embedding both ways."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch._functorch.config

import bi_kernels
from bi_kernels.audit import stock
from bi_kernels.audit.bench.measure import OURS, Bench
from bi_kernels.audit.experiments.backward import foreign

TORCH, COMPILED, LIGER = "torch", "torch.compile", "Liger"
Shape = tuple[int, ...]


class Op(NamedTuple):
    """An op of some tensors, which a call must read and write `forward` times in all, and `backward` times.

    flops: of an element, about, forward and backward."""

    op: str
    case: str
    tensors: list[Shape]
    weights: list[Shape]
    forward: int
    backward: int
    flops: tuple[int, int]
    extra: tuple = ()
    compiled: bool = True


def ops(bench: Bench) -> Iterator[Op]:
    """Yields the ops but for the embedding."""
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
    """Returns who computes the op, by name: ours, stock PyTorch in eager mode and compiled, and Liger where it is
    installed."""
    theirs = getattr(stock, op.op)
    found = {OURS: getattr(bi_kernels, op.op), TORCH: theirs}
    if bench.on_gpu:
        if op.compiled:
            found[COMPILED] = torch.compile(lambda *given: theirs(*given), dynamic=False)
        if op.op == "rms_norm" and (liger := foreign(op.op).get("Liger")):
            found[LIGER] = liger
    return found


def _op(bench: Bench, op: Op) -> None:
    """Measures forward and backward of an op."""
    count = torch.Size(op.tensors[0]).numel()
    size, (forward, backward) = 2 * count, op.flops
    functions, said = _functions(bench, op), {"tokens": op.tensors[0][0]}
    sets = bench.sets(op.forward * size)
    given = [[bench.numbers.take(*shape) for shape in (*op.tensors, *op.weights)] for _ in range(sets)]
    with torch.no_grad():
        calls = {name: lambda i, f=f: f(*given[i % sets], *op.extra) for name, f in functions.items()}
        found = bench.timed(calls, sets=sets)
    more = {"flops": forward * count, "size": op.forward * size} | said
    bench.add("rows", op.op, "forward", op.case, found, TORCH, **more)
    with torch._functorch.config.patch(donated_buffer=False):  # what a compiled backward reads stays for the next
        calls = {name: _gradients(bench, op, f, given, name == OURS) for name, f in functions.items()}
        found = bench.timed(calls, sets=sets)
    more = {"flops": backward * count, "size": op.backward * size} | said
    bench.add("rows", op.op, "backward", op.case, found, TORCH, **more)
    torch._dynamo.reset()


def _gradients(
    bench: Bench, op: Op, function: Callable, given: list[list[torch.Tensor]], into_main_grad: bool
) -> Callable[[int], object]:
    """Returns what computes the gradients, ours of weights into main_grad; the first call of each set computes the
    forward."""
    kept: dict[int, tuple] = {}

    def call(i: int) -> tuple:
        number = i % len(given)
        if number not in kept:
            leaves = [t.detach().clone().requires_grad_() for t in given[number]]
            for weight in leaves[len(op.tensors) :] if into_main_grad else ():
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            out = function(*leaves, *op.extra)
            outs = out if isinstance(out, tuple) else (out,)
            kept[number] = outs, leaves, [bench.numbers.take(*o.shape) for o in outs]
        outs, leaves, dys = kept[number]
        return torch.autograd.grad(outs, leaves, dys, retain_graph=True, allow_unused=True)

    for number in range(len(given)):
        call(number)
    return call


def _embedding(bench: Bench, name: str, ids: torch.Tensor, table: torch.Tensor) -> None:
    """Measures the embedding of ids, forward and its gradient: into main_grad, and returned."""
    vocab, hidden = table.shape
    distinct = len(ids.unique())
    rows, read = 2 * len(ids) * hidden, 2 * distinct * hidden
    said = {"tokens": len(ids), "vocab": vocab, "distinct": distinct}
    functions = {OURS: bi_kernels.embedding, TORCH: stock.embedding}
    with (
        torch.no_grad()
    ):  # in a graph: in eager mode ours waits for the device, which it asks whether the ids are right
        found = bench.timed({n: lambda i, f=f: f(ids, table) for n, f in functions.items()}, graphs=True)
    bench.add("rows", "embedding", "forward", name, found, TORCH, size=rows + read, **said)

    dy = bench.numbers.take(len(ids), hidden)

    def gradient(function: Callable, main_grad: bool) -> Callable[[int], object]:
        weight = table.detach().requires_grad_()
        if main_grad:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        y = function(ids, weight)
        return lambda i: torch.autograd.grad(y, weight, dy, retain_graph=True, allow_unused=True)

    theirs = gradient(stock.embedding, False)
    for direction, main_grad, size in (
        ("backward", True, rows + 4 * read),
        ("backward, returned", False, rows + 2 * table.numel()),
    ):
        found = bench.timed({OURS: gradient(bi_kernels.embedding, main_grad), TORCH: theirs})
        bench.add("rows", "embedding", direction, name, found, TORCH, size=size, **said)


def rows(bench: Bench) -> None:
    """Measures every op that memory bounds."""
    s = bench.settings["rows"]
    for op in ops(bench):
        bench.cell("rows", f"{op.op}, {op.case}", lambda: _op(bench, op))
        bench.empty()
    table = bench.numbers.take(s["vocab"], s["hidden"])
    share = torch.rand(s["tokens"], generator=torch.Generator().manual_seed(bench.seed)).to(bench.device)
    for name, skew in (("ids drawn evenly", 1), ("ids drawn unevenly", 6)):
        ids = (share**skew * s["vocab"]).long()
        bench.cell("rows", f"embedding, {name}", lambda: _embedding(bench, name, ids, table))
