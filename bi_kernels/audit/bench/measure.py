"""Holds what is measured: numbers to compute with, the limits of the device, and a record of each measurement."""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bi_kernels.audit.bench.timing import GPU, DeviceClock, Timing, turns
from bi_kernels.audit.evidence.verdicts import sentence

OURS = "bi_kernels"
FASTEST = "the fastest"  # peer
ROOM = {"cuda": 2**31, "cpu": 2**21}  # numbers


def padded(size: int) -> int:
    """Returns how many numbers are passed over where `size` are taken: a tensor begins at a multiple of 256 bytes."""
    return -(-size // 128) * 128


class Numbers:
    """One buffer of normal numbers in bf16; what is taken lies elsewhere each time, until it begins again."""

    def __init__(self, device: torch.device, seed: int, count: int = 0):
        g = torch.Generator(device).manual_seed(seed)
        count = count or ROOM[device.type]
        self.all = torch.empty(count, dtype=torch.bfloat16, device=device).normal_(generator=g)
        self.at = 0

    def reserve(self, count: int) -> None:
        """Begins again unless so many numbers, which are taken next, are left: none of them may lie in two tensors,
        which would be found in the L2 cache. Raises ValueError where there are not as many."""
        if count > len(self.all):
            raise ValueError(f"{count} numbers are asked of {len(self.all)}")
        if self.at + count > len(self.all):
            self.at = 0

    def take(self, *shape: int) -> torch.Tensor:
        size = math.prod(shape)
        if self.at + size > len(self.all):
            self.at = 0
        found = self.all[self.at : self.at + size].view(shape)
        self.at += padded(size)
        return found


class _Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **kwargs or {})


class Counter:
    """Stands where there is no GPU to time: counts the operators of torch that a call makes, launchers' included."""

    unit = "operators"

    def device(self, call: Callable[[int], object], first: int, count: int) -> float:
        with _Counted() as counted:
            for i in range(first, first + count):
                call(i)
        return counted.operators / count

    wall = cpu = device

    def captured(self, call: Callable[[int], object], count: int) -> Callable[[int], object]:
        return call


@dataclass
class Bench:
    """What the groups measure with, and the records that they leave: on disk as they come, a line each."""

    device: torch.device
    settings: dict  # the contract's [benchmark]
    seed: int
    file: Path | None = None
    records: list[dict] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)  # TB/s of a copy, TFLOP/s of a product

    clock: DeviceClock | Counter = field(init=False)

    def __post_init__(self):
        self.clock = DeviceClock() if self.on_gpu else Counter()
        self.numbers = Numbers(self.device, self.seed)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def times(self) -> bool:
        """Tells whether the clock is one, and does not count."""
        return self.clock.unit == "ms"

    def alone(self) -> contextlib.AbstractContextManager:
        """Keeps the GPU to this process."""
        return GPU.alone() if self.on_gpu else contextlib.nullcontext()

    def empty(self) -> None:
        """Gives back the memory that is kept for later."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def sets(self, size: float) -> int:
        """Returns how many sets of inputs, of so many bytes each, the L2 cache cannot hold."""
        return max(1, math.ceil(self.settings["cold_bytes"] / size)) if self.times else 1

    def timed(self, calls: dict[str, Callable[[int], object]], **how) -> tuple[dict[str, Timing], dict[str, str]]:
        """Returns timings of the calls that do not raise, and what the others say. Ours, the first, has to work."""
        possible, errors = {}, {}
        for number, (name, call) in enumerate(calls.items()):
            try:
                call(0)
                possible[name] = call
            except Exception as error:  # a peer's: it has nothing for these inputs, or is of another version
                if number == 0:
                    raise
                errors[name] = sentence(error)
        s = self.settings
        if not self.times:  # counts do not vary
            return turns(possible, self.clock, rounds=1, round_ms=0, most_calls=1, walls=0), errors
        with self.alone():
            limits = {k: s[k] for k in ("rounds", "round_ms", "most_calls")}
            return turns(possible, self.clock, **limits | how), errors

    def add(
        self,
        group: str,
        op: str,
        direction: str,
        case: str,
        found: tuple[dict[str, Timing], dict[str, str]],
        against: str,
        ours: str = OURS,
        flops: float = 0,
        size: float = 0,
        **said,
    ) -> dict:
        """Records a measurement. found: of `timed`; against: the peer whose time is divided by ours; flops, size: that
        a call computes, and bytes that it has to move."""
        timings, errors = found
        record = {"group": group, "op": op, "direction": direction, "case": case} | said
        record |= {"who": ours, self.clock.unit: {name: t.device for name, t in timings.items()}}
        if walls := {name: t.wall for name, t in timings.items() if t.wall}:
            record["wall µs"] = walls
        if errors:
            record["errors"] = errors
        if self.times:
            record |= self._derived(timings, against, ours, flops, size)
        return self.keep(record)

    def _derived(self, timings: dict[str, Timing], against: str, ours: str, flops: float, size: float) -> dict:
        peers = {name: t.device.median for name, t in timings.items() if name != ours}
        if against == FASTEST and peers:
            against = min(peers, key=peers.get)
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
        """Appends a record to the file, whole, so that a run that is cut keeps what it has measured."""
        self.records.append(record)
        if self.file:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        return record

    def cell(self, group: str, case: str, measure: Callable[[], object]) -> None:
        """Calls what measures a cell; where it raises, records that."""
        try:
            measure()
        except Exception as error:
            self.keep({"group": group, "case": case, "error": sentence(error)})

    def find_limits(self) -> dict[str, float]:
        """Measures the bandwidth of a copy, read and written, and the rate of the fastest product of cuBLAS."""
        if not self.times:
            return {}
        half = self.settings["copy_bytes"] // 2
        source, target = torch.empty(2, half, dtype=torch.int8, device=self.device)
        timings, _ = self.timed({"copy": lambda i: target.copy_(source)}, walls=0)
        self.limits["TB/s"] = 2 * half / timings["copy"].device.median / 1e9
        self.keep({"group": "limits", "case": "copy", "ms": timings["copy"].device, "TB/s": self.limits["TB/s"]})
        for m, n, k in self.settings["products"]:
            x, w = self.numbers.take(m, k), self.numbers.take(n, k)
            timings, _ = self.timed({"cuBLAS": partial(lambda x, w, i: torch.mm(x, w.t()), x, w)}, walls=0)
            rate = 2 * m * n * k / timings["cuBLAS"].device.median / 1e9
            self.keep({"group": "limits", "case": f"{m}×{n}×{k}", "ms": timings["cuBLAS"].device, "TFLOP/s": rate})
            self.limits["TFLOP/s"] = max(rate, self.limits.get("TFLOP/s", 0))
        return self.limits


def read(file: Path) -> list[dict]:
    """Returns the records of a run, also of one that was cut: a line that is not whole is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
