"""Measures calls: random inputs, the device's limits, and a record of each measurement."""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import peers as cute
from benchmarks.clock import DeviceClock, OperatorCounter, Timing, time_in_turns
from bi_kernels.audit.findings import sentence
from bi_kernels.audit.timing import GPU

OURS, TORCH, COMPILED, LIGER = "bi_kernels", "torch", "torch.compile", "Liger"
FASTEST = "the fastest"  # peer that PyTorch has
NUMBERS = {"cuda": 2**31, "cpu": 2**21}  # in the buffer
Call = Callable[[int], object]  # of the number of a set of inputs


def padded(size: int) -> int:
    """Returns how many numbers a tensor of `size` occupies: the next begins at a multiple of 256 bytes."""
    return -(-size // 128) * 128


class Numbers:
    """One buffer of normal bf16 numbers. Tensors are taken from it one after another, then from its beginning again."""

    def __init__(self, device: torch.device, seed: int, count: int = 0):
        g = torch.Generator(device).manual_seed(seed)
        count = count or NUMBERS[device.type]
        self.all = torch.empty(count, dtype=torch.bfloat16, device=device).normal_(generator=g)
        self.at = 0

    def reserve(self, count: int) -> None:
        """Begins again unless `count` numbers are left. They are taken next, and two tensors that share one would find
        it in the L2 cache. Raises ValueError for more than the buffer has."""
        if count > len(self.all):
            raise ValueError(f"count is {count}, expected at most the buffer's {len(self.all)} numbers")
        if self.at + count > len(self.all):
            self.at = 0

    def take(self, *shape: int) -> torch.Tensor:
        size = math.prod(shape)
        if self.at + size > len(self.all):
            self.at = 0
        found = self.all[self.at : self.at + size].view(shape)
        self.at += padded(size)
        return found

    def sets(self, count: int, *shapes: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        """Returns `count` sets of inputs, each with a tensor of every shape."""
        return list(zip(*([self.take(*shape) for _ in range(count)] for shape in shapes)))


def rotated(functions: dict[str, Callable], sets: Sequence[tuple], *more) -> dict[str, Call]:
    """Returns a call of each function, which takes one of the sets of inputs, and `more` every time."""
    return {name: lambda i, f=f: f(*sets[i % len(sets)], *more) for name, f in functions.items()}


@dataclass
class Bench:
    """What the groups measure with. Each record is a line of `file` as soon as it is measured."""

    device: torch.device
    settings: dict  # the contract's [benchmark]
    seed: int
    file: Path | None = None
    records: list[dict] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)  # TB/s of a copy, TFLOP/s of a product
    clock: DeviceClock | OperatorCounter = field(init=False)

    def __post_init__(self):
        self.clock = DeviceClock() if self.on_gpu else OperatorCounter()
        self.numbers = Numbers(self.device, self.seed)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def times(self) -> bool:
        """Tells whether the clock measures time, and does not count operators."""
        return self.clock.unit == "ms"

    def alone(self) -> contextlib.AbstractContextManager:
        """Keeps the GPU to this process."""
        return GPU.alone() if self.on_gpu else contextlib.nullcontext()

    def free_cache(self) -> None:
        """Returns cached memory to the device."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def sets(self, size: float) -> int:
        """Returns how many sets of inputs, of `size` bytes each, exceed the L2 cache."""
        return max(1, math.ceil(self.settings["cold_bytes"] / size)) if self.times else 1

    def gradients(self, function: Callable, sets: Sequence[tuple], *more, main_grads: int = 0) -> Call:
        """Returns a call that computes the gradients of a function of one set of inputs, and of `more` that needs none.

        The first call computes the forward of every set. main_grads: number of inputs at the end of a set whose
        gradients go into fp32 `.main_grad`.
        """
        graphs = []

        def backward(outputs: tuple, leaves: list, dys: list) -> tuple:
            return torch.autograd.grad(outputs, leaves, dys, retain_graph=True, allow_unused=True)

        def call(i: int) -> tuple:
            for inputs in () if graphs else sets:
                inputs = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
                for weight in inputs[len(inputs) - main_grads :]:
                    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
                out = function(*inputs, *more)
                outputs = out if isinstance(out, tuple) else (out,)
                dys = [self.numbers.take(*y.shape) for y in outputs]
                graphs.append((outputs, [t for t in inputs if t.requires_grad], dys))
                backward(*graphs[-1])
            return backward(*graphs[i % len(graphs)])

        return call

    def timed(self, calls: dict[str, Call], **options) -> tuple[dict[str, Timing], dict[str, str]]:
        """Returns timings by name, and the errors of peers that raise. Ours comes first, and its error is raised."""
        possible, errors = {}, {}
        for number, (name, call) in enumerate(calls.items()):
            try:
                call(0)
                possible[name] = call
            except Exception as error:  # a peer's: it does not support these inputs, or is of another version
                if number == 0:
                    raise
                errors[name] = sentence(error)
        if not self.times:  # counts do not vary
            return time_in_turns(possible, self.clock, rounds=1, round_ms=0, most_calls=1, walls=0), errors
        with self.alone():
            return time_in_turns(possible, self.clock, **self.rounds | options), errors

    @property
    def rounds(self) -> dict:
        """Returns the contract's number of rounds and of calls in each."""
        return {k: self.settings[k] for k in ("rounds", "round_ms", "most_calls")}

    def add(self, group: str, op: str, measured: tuple, against: str, *lines: dict, **fields) -> None:
        """Records one measurement for each of `lines`: its direction, case, and what else it has.

        measured: timings and errors from `timed`. against: the peer whose time is divided by ours, unless a line names
        another. `ours` names a line's call; `flops` and the `size` in bytes that have to be moved are a call's. fields:
        of every line.
        """
        timings, errors = measured
        every = {line.get("ours", OURS) for line in lines}
        for line in lines:
            line = {"group": group, "op": op, "against": against, "ours": OURS, "flops": 0, "size": 0} | line | fields
            peer, ours, flops, size = (line.pop(k) for k in ("against", "ours", "flops", "size"))
            found = {name: t for name, t in timings.items() if name == ours or name not in every}
            record = line | {"who": ours, self.clock.unit: {name: t.device for name, t in found.items()}}
            if walls := {name: t.wall for name, t in found.items() if t.wall}:
                record["wall µs"] = walls
            if errors:
                record["errors"] = errors
            self.keep(record | (self._derived(found, peer, ours, flops, size) if self.times else {}))

    def _derived(self, timings: dict[str, Timing], against: str, ours: str, flops: float, size: float) -> dict:
        """Returns the ratio to a peer, and the rates of ours."""
        peers = {name: t.device.median for name, t in timings.items() if name != ours}
        if against == FASTEST and (stock := peers.keys() - {*cute.NAMES}):
            against = min(stock, key=peers.get)
        found, ms = {}, timings[ours].device.median
        if against in peers:
            found |= {"against": against, "ratio": peers[against] / ms, "times": ms / peers[against]}
        if flops:
            found["TFLOP/s"] = flops / ms / 1e9
            found["intensity"] = flops / size if size else None
        if size:
            found["TB/s"] = size / ms / 1e9
            if copy := self.limits.get("TB/s"):
                found["of limit"] = found["TB/s"] / copy
        return found

    def keep(self, record: dict) -> dict:
        """Appends a record to the file at once, so that an interrupted run keeps its measurements."""
        self.records.append(record)
        if self.file:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        return record

    def cell(self, group: str, case: str, measure: Callable, *arguments) -> None:
        """Calls measure(bench, *arguments); records an error that it raises."""
        try:
            measure(self, *arguments)
        except Exception as error:
            self.keep({"group": group, "case": case, "error": sentence(error)})

    def find_limits(self) -> None:
        """Measures the bandwidth of a copy, read and written, and the rate of cuBLAS's fastest product."""
        if not self.times:
            return
        half = self.settings["copy_bytes"] // 2
        source, target = torch.empty(2, half, dtype=torch.int8, device=self.device)
        self._limit("copy", lambda i: target.copy_(source), "TB/s", 2 * half)
        for m, n, k in self.settings["products"]:
            x, w = self.numbers.take(m, k), self.numbers.take(n, k)
            self._limit(f"{m}×{n}×{k}", lambda i: torch.mm(x, w.t()), "TFLOP/s", 2 * m * n * k)

    def _limit(self, case: str, call: Call, unit: str, amount: float) -> None:
        timings, _ = self.timed({case: call}, walls=0)
        rate = amount / timings[case].device.median / 1e9
        self.keep({"group": "limits", "case": case, "ms": timings[case].device, unit: rate})
        self.limits[unit] = max(rate, self.limits.get(unit, 0))
