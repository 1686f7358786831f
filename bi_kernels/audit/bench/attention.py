"""Measures attention beside cuDNN and FA2: forward, backward, and decode over a grid of caches."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import bi_kernels
from bi_kernels.audit.bench import cases
from bi_kernels.audit.bench.measure import FASTEST, OURS, Bench, Numbers, padded
from bi_kernels.audit.experiments.attention_peers import PEERS, ours, sdpa

DETERMINISTIC = "cuDNN, deterministic"
PAGED = "bi_kernels, paged"


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _pair(bench: Bench, batch: int, length: int) -> None:
    """Measures forward and backward of a batch of equal sequences."""
    table = bench.settings["attention"]
    heads, kv_heads, width = (table[k] for k in ("heads", "kv_heads", "head_dim"))
    q, k, v, dy = (bench.numbers.take(batch, length, n, width).detach() for n in (heads, kv_heads, kv_heads, heads))
    flops, size = 2 * batch * heads * length**2 * width, 2 * (2 * q.numel() + 2 * k.numel())
    said = {"batch": batch, "length": length, "heads": heads, "kv_heads": kv_heads, "head_dim": width}
    case, everybody = f"{batch} × {length}", {OURS: ours} | PEERS
    with torch.no_grad():
        found = bench.timed({name: lambda i, f=f: f(q, k, v) for name, f in everybody.items()})
    bench.add("attention", "attention", "forward", case, found, "cuDNN", flops=flops, size=size, **said)

    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    calls = {name: partial(_backward, f, leaves, dy, []) for name, f in everybody.items()}
    calls |= {
        f"{name}, deterministic": _deterministic()(partial(_backward, f, leaves, dy, [])) for name, f in PEERS.items()
    }
    found = bench.timed(calls)
    peer = DETERMINISTIC if DETERMINISTIC in found[0] else "cuDNN"
    more = {"flops": 2.5 * flops, "size": 2 * size} | said
    bench.add("attention", "attention", "backward", case, found, peer, **more)


def _backward(function: Callable, leaves: list[Tensor], dy: Tensor, kept: list[Tensor], i: int) -> list[Tensor]:
    """Computes the gradients of what `kept` holds, which the first call computes."""
    if not kept:
        kept.append(function(*leaves))
    return torch.autograd.grad(kept[0], leaves, dy, retain_graph=True)


def attention(bench: Bench) -> None:
    """Measures causal attention, forward and backward."""
    for batch, length in bench.settings["attention"]["sizes"]:
        bench.cell("attention", f"{batch} × {length}", lambda: _pair(bench, batch, length))
        bench.empty()


def _sets(bench: Bench, cell: cases.Cell) -> int:
    """Returns how many caches take turns."""
    return min(bench.sets(cell.bytes), 64)


def _size(cell: cases.Cell) -> int:
    """Returns how many numbers a query and its cache are."""
    rows = cell.batch * cell.head_dim
    return padded(rows * cell.heads) + 2 * padded(rows * cell.kv_heads * cell.keys)


def _decode(bench: Bench, numbers: Numbers, cell: cases.Cell) -> None:
    """Measures one query a sequence, of a contiguous cache and of pages that lie anywhere."""
    table, page = bench.settings["decode"], bench.settings["decode"]["page"]
    sets = _sets(bench, cell)
    numbers.reserve(sets * _size(cell))
    take = lambda n, heads: [numbers.take(cell.batch, n, heads, cell.head_dim) for _ in range(sets)]
    qs, ks, vs = take(1, cell.heads), take(cell.keys, cell.kv_heads), take(cell.keys, cell.kv_heads)
    pages = [t.view(-1, page, cell.kv_heads, cell.head_dim) for t in (*ks, *vs)]
    order = torch.randperm(len(pages[0]), generator=torch.Generator().manual_seed(bench.seed))
    paged = {
        "block_table": order.view(cell.batch, -1).to(bench.device, torch.int32),
        "lengths_k": torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=bench.device),
    }
    of = lambda i: (qs[i % sets], ks[i % sets], vs[i % sets])
    calls = {
        OURS: lambda i: ours(*of(i)),
        PAGED: lambda i: bi_kernels.attention(qs[i % sets], pages[i % sets], pages[sets + i % sets], **paged),
    }
    calls |= {name: lambda i, f=f: f(*of(i)) for name, f in PEERS.items()}
    if cell.heads == cell.kv_heads:
        calls["efficient"] = lambda i: sdpa(SDPBackend.EFFICIENT_ATTENTION, *of(i))
    timings, errors = bench.timed(calls, sets=sets, graphs=True)
    said = cell._asdict() | {"cache": cell.bytes, "large": cell.bytes > table["large"]}
    for name in (OURS, PAGED):
        kept = {n: t for n, t in timings.items() if n == name or n not in (OURS, PAGED)}
        direction = "paged" if name == PAGED else "contiguous"
        more = {"flops": cell.bytes * cell.heads // cell.kv_heads, "size": cell.bytes} | said
        bench.add("decode", "attention", direction, cell.name, (kept, errors), FASTEST, name, **more)


@torch.no_grad()
def decode(bench: Bench) -> None:
    """Measures every cell of the grid whose cache is not too large, the smallest first."""
    table, numbers = bench.settings["decode"], bench.numbers
    for cell in sorted(cases.decode(table), key=lambda cell: cell.bytes):
        if cell.bytes > table["largest"]:
            continue
        if _sets(bench, cell) * _size(cell) > numbers.all.numel():
            numbers = None
            bench.empty()
            numbers = Numbers(bench.device, bench.seed, (table["largest"] + 2**28) // 2)
        bench.cell("decode", cell.name, lambda: _decode(bench, numbers, cell))
    numbers = None
    bench.empty()
