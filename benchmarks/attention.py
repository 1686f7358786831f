"""Measures attention next to cuDNN and FA2: forward, backward, and decode over a grid of caches."""

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend

import bi_kernels
from benchmarks import cases, peers
from benchmarks.measure import FASTEST, OURS, Bench, Numbers, padded, rotated
from helpers.attention_peers import EVERYBODY, PEERS, ours, sdpa

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


def _prefill(bench: Bench, case: str, batch: int, length: int) -> None:
    """Measures forward and backward of a batch of equal sequences."""
    table = bench.settings["attention"]
    heads, kv_heads, width = (table[k] for k in ("heads", "kv_heads", "head_dim"))
    sets = bench.numbers.sets(1, *((batch, length, n, width) for n in (heads, kv_heads, kv_heads)))
    flops, size = 2 * batch * heads * length**2 * width, 2 * sum(2 * t.numel() for t in sets[0][:2])
    fields = {"batch": batch, "length": length, "heads": heads, "kv_heads": kv_heads, "head_dim": width}
    everybody = EVERYBODY | peers.attention()
    with torch.no_grad():
        measured = bench.timed(rotated(everybody, sets))
    line = {"direction": "forward", "case": case, "flops": flops, "size": size}
    bench.add("attention", "attention", measured, "cuDNN", line, **fields)

    calls = {name: bench.gradients(f, sets) for name, f in everybody.items()}
    calls |= {f"{name}, deterministic": _deterministic()(bench.gradients(f, sets)) for name, f in PEERS.items()}
    measured = bench.timed(calls)
    peer = DETERMINISTIC if DETERMINISTIC in measured[0] else "cuDNN"
    line = {"direction": "backward", "case": case, "flops": 2.5 * flops, "size": 2 * size}
    bench.add("attention", "attention", measured, peer, line, **fields)


def attention(bench: Bench) -> None:
    """Measures causal attention, forward and backward."""
    for batch, length in bench.settings["attention"]["sizes"]:
        case = f"{batch} × {length}"
        bench.cell("attention", case, _prefill, case, batch, length)
        bench.free_cache()


def _sets(bench: Bench, cell: cases.Cell) -> int:
    """Returns how many caches take turns."""
    return min(bench.sets(cell.bytes), 64)


def _size(cell: cases.Cell) -> int:
    """Returns how many numbers a query and its cache occupy."""
    rows = cell.batch * cell.head_dim
    return padded(rows * cell.heads) + 2 * padded(rows * cell.kv_heads * cell.keys)


def _decode(bench: Bench, numbers: Numbers, cell: cases.Cell) -> None:
    """Measures one query a sequence, with a contiguous cache and with pages in random order."""
    table, count = bench.settings["decode"], _sets(bench, cell)
    numbers.reserve(count * _size(cell))
    shape = lambda n, heads: (cell.batch, n, heads, cell.head_dim)
    caches = shape(cell.keys, cell.kv_heads)
    sets = numbers.sets(count, shape(1, cell.heads), caches, caches)
    pages = lambda t: t.view(-1, table["page"], cell.kv_heads, cell.head_dim)
    paged_sets = [(q, pages(k), pages(v)) for q, k, v in sets]
    order = torch.randperm(len(paged_sets[0][1]), generator=torch.Generator().manual_seed(bench.seed))
    paged = {
        "block_table": order.view(cell.batch, -1).to(bench.device, torch.int32),
        "lengths_k": torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=bench.device),
    }
    others = PEERS | peers.attention(num_splits=0)
    if cell.heads == cell.kv_heads:
        others["efficient"] = lambda q, k, v: sdpa(SDPBackend.EFFICIENT_ATTENTION, q, k, v)
    calls = rotated({OURS: ours}, sets)
    calls |= rotated({PAGED: lambda q, k, v: bi_kernels.attention(q, k, v, **paged)}, paged_sets)
    measured = bench.timed(calls | rotated(others, sets), sets=count, graphs=True)
    lines = [
        {"direction": direction, "case": cell.name, "ours": name}
        for direction, name in (("contiguous", OURS), ("paged", PAGED))
    ]
    fields = cell._asdict() | {"cache": cell.bytes, "large": cell.bytes > table["large"]}
    fields |= {"flops": cell.bytes * cell.heads // cell.kv_heads, "size": cell.bytes}
    bench.add("decode", "attention", measured, FASTEST, *lines, **fields)


@torch.no_grad()
def decode(bench: Bench) -> None:
    """Measures every cell of the grid whose cache is not too large, the smallest first."""
    table, numbers = bench.settings["decode"], bench.numbers
    for cell in sorted(cases.decode(table), key=lambda cell: cell.bytes):
        if cell.bytes > table["largest"]:
            continue
        if _sets(bench, cell) * _size(cell) > numbers.all.numel():
            numbers = None  # before a larger buffer takes its memory
            bench.free_cache()
            numbers = Numbers(bench.device, bench.seed, (table["largest"] + 2**28) // 2)
        bench.cell("decode", cell.name, _decode, numbers, cell)
    numbers = None
    bench.free_cache()
