"""Measures what a call costs the CPU in eager mode, and a decode step of a whole model as its user sees it."""

from collections.abc import Callable

import torch

import bi_kernels
from bi_kernels.audit.bench.measure import OURS, Bench
from bi_kernels.audit.bench.timing import spread
from bi_kernels.audit.chain import plain
from bi_kernels.audit.chain.speed import Exact, decode_step
from bi_kernels.model import CONFIGS, Decoder

STOCK = "torch"


def _ops(bench: Bench, sizes) -> dict[str, Callable]:
    """Returns {op: what calls it of a module}, of one token of a decoder."""
    take, width, kv_width = bench.numbers.take, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    x, residual, weight = take(1, sizes.hidden), take(1, sizes.hidden), take(sizes.hidden)
    w = take(sizes.hidden, sizes.hidden)
    q, q_weight = take(1, sizes.heads, sizes.head_dim), take(sizes.head_dim)
    gate, up = take(1, sizes.mlp), take(1, sizes.mlp)
    keys = bench.settings["calls"]["keys"]
    cache = [take(1, keys, kv_width).view(1, keys, sizes.kv_heads, sizes.head_dim) for _ in range(2)]
    query, table = take(1, 1, width).view(1, 1, sizes.heads, sizes.head_dim), take(1000, sizes.hidden)
    angles = bi_kernels.rope_table(keys, sizes.head_dim, device=bench.device)
    at, ids = torch.zeros(1, dtype=torch.int64, device=bench.device), torch.zeros(1, dtype=torch.int64)
    ids = ids.to(bench.device)
    return {
        "linear": lambda ops: ops.linear(x, w),
        "rms_norm": lambda ops: ops.rms_norm(x, weight),
        "add_rms_norm": lambda ops: ops.add_rms_norm(x, residual, weight),
        "qk_norm": lambda ops: ops.qk_norm(q, q_weight),
        "rope": lambda ops: ops.rope(q, angles, at),
        "swiglu": lambda ops: ops.swiglu(gate, up),
        "embedding": lambda ops: ops.embedding(ids, table),
        "attention, decode": lambda ops: ops.attention(query, *cache),
    }


def _call(bench: Bench, op: str, call: Callable) -> None:
    """Measures one op: the CPU's microseconds until each call returns, and until the device has ended it."""
    table = bench.settings["calls"]
    calls = {OURS: lambda i: call(bi_kernels), STOCK: lambda i: call(plain)}
    if not bench.times:
        bench.add("calls", op, "forward", "one token", bench.timed(calls), STOCK)
        return
    cpu, wall = ({name: [] for name in calls} for _ in range(2))
    with bench.alone():
        for _ in range(bench.settings["rounds"]):
            for name, one in calls.items():
                cpu[name].append(bench.clock.cpu(one, 0, table["runs"]))
                wall[name].append(bench.clock.wall(one, 0, table["runs"]))
    _keep(bench, op, "one token", cpu, wall)


def _keep(bench: Bench, op: str, case: str, cpu: dict[str, list], wall: dict[str, list]) -> None:
    spreads = {name: spread(samples) for name, samples in cpu.items()}
    ours, theirs = (spreads[name].median for name in (OURS, STOCK))
    bench.keep(
        {"group": "calls", "op": op, "direction": "forward", "case": case, "who": OURS, "against": STOCK}
        | {"cpu_us": ours, "stock_us": theirs, "times": ours / theirs, "CPU µs": spreads}
        | {"wall µs": {name: spread(samples) for name, samples in wall.items()}}
    )


def _step(bench: Bench) -> None:
    """Measures a decode step in eager mode: one sequence."""
    table = bench.settings["calls"]
    config = CONFIGS[table["decoder"]]
    steps = {}
    for name, ops in ((OURS, bi_kernels), (STOCK, plain)):
        model = Decoder(config, bench.device, seed=bench.seed, longest=table["keys"], ops=ops)
        cache = Exact(config, 1, table["keys"], model.lm_head)
        step = decode_step(model, cache, told=name == OURS)
        steps[name] = lambda i, step=step: step()
    case = f"{config.layers} layers, {table['keys']} keys"
    if not bench.times:
        bench.add("calls", "decode step", "forward", case, bench.timed(steps), STOCK)
        return
    wall = {name: [] for name in steps}
    with bench.alone():
        for number in range(bench.settings["rounds"] + 1):
            for name, step in steps.items():
                taken = bench.clock.wall(step, 0, table["steps"])
                wall[name] += [taken] * (number > 0)  # the first compiles
    _keep(bench, "decode step", case, wall, wall)


@torch.no_grad()
def calls(bench: Bench) -> None:
    """Measures eager calls of one token, and the decode step of a decoder of this package's ops and of stock ones."""
    for op, call in _ops(bench, CONFIGS[bench.settings["calls"]["decoder"]]).items():
        bench.cell("calls", op, lambda: _call(bench, op, call))
    bench.cell("calls", "decode step", lambda: _step(bench))
    bench.empty()
