"""Measures what a call costs the CPU in eager mode, and a decode step of a whole model as its user sees it."""

from collections.abc import Callable

import torch

import bi_kernels
from benchmarks.clock import spread
from benchmarks.measure import OURS, TORCH, Bench, Call
from bi_kernels.model import CONFIGS, Decoder
from helpers import torch_ops
from helpers.decoder_speed import Exact, decode_step

MODULES = {OURS: bi_kernels, TORCH: torch_ops}


def _ops(bench: Bench, sizes) -> dict[str, Callable]:
    """Returns a function of a module for each op, for one token of a decoder."""
    take, width, kv_width = bench.numbers.take, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    x, residual, weight = take(1, sizes.hidden), take(1, sizes.hidden), take(sizes.hidden)
    w = take(sizes.hidden, sizes.hidden)
    q, q_weight = take(1, sizes.heads, sizes.head_dim), take(sizes.head_dim)
    gate, up = take(1, sizes.mlp), take(1, sizes.mlp)
    keys = bench.settings["calls"]["keys"]
    cache = [take(1, keys, kv_width).view(1, keys, sizes.kv_heads, sizes.head_dim) for _ in range(2)]
    query, table = take(1, 1, width).view(1, 1, sizes.heads, sizes.head_dim), take(1000, sizes.hidden)
    angles = bi_kernels.rope_table(keys, sizes.head_dim, device=bench.device)
    at, ids = (torch.zeros(1, dtype=torch.int64, device=bench.device) for _ in range(2))
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


def _measure(bench: Bench, op: str, case: str, calls: dict[str, Call], count: int, step: bool = False) -> None:
    """Measures the CPU's microseconds until each of `count` calls returns, and until the device has ended it: for a
    step, these alone."""
    if not bench.times:
        bench.add("calls", op, bench.timed(calls), TORCH, {"direction": "forward", "case": case})
        return
    cpu, wall = ({name: [] for name in calls} for _ in range(2))
    with bench.alone():
        for number in range(bench.settings["rounds"] + step):
            for name, call in calls.items():
                if not step:
                    cpu[name].append(bench.clock.cpu(call, 0, count))
                taken = bench.clock.wall(call, 0, count)
                wall[name] += [taken] * (not step or number > 0)  # the first round of a step compiles
    cpu, wall = ({name: spread(times[name]) for name in calls} for times in (wall if step else cpu, wall))
    ours, theirs = cpu[OURS].median, cpu[TORCH].median
    bench.keep(
        {"group": "calls", "op": op, "direction": "forward", "case": case, "who": OURS, "against": TORCH}
        | {"cpu_us": ours, "stock_us": theirs, "times": ours / theirs, "CPU µs": cpu, "wall µs": wall}
    )


def _op(bench: Bench, op: str, call: Callable) -> None:
    calls = {name: lambda i, ops=ops: call(ops) for name, ops in MODULES.items()}
    _measure(bench, op, "one token", calls, bench.settings["calls"]["runs"])


def _step(bench: Bench) -> None:
    """Measures a decode step in eager mode: one sequence."""
    table, steps = bench.settings["calls"], {}
    config = CONFIGS[table["decoder"]]
    for name, ops in MODULES.items():
        model = Decoder(config, bench.device, seed=bench.seed, longest=table["keys"], ops=ops)
        cache = Exact(config, 1, table["keys"], model.lm_head)
        step = decode_step(model, cache, masked=name == OURS)
        steps[name] = lambda i, step=step: step()
    _measure(bench, "decode step", f"{config.layers} layers, {table['keys']} keys", steps, table["steps"], step=True)


@torch.no_grad()
def calls(bench: Bench) -> None:
    """Measures eager calls of one token, and the decode step of a decoder of this package's ops and of stock ones."""
    for op, call in _ops(bench, CONFIGS[bench.settings["calls"]["decoder"]]).items():
        bench.cell("calls", op, _op, op, call)
    bench.cell("calls", "decode step", _step)
    bench.free_cache()
