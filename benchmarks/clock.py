"""Times calls in turns, in each of several rounds: on a GPU by its clock; without one, counts torch's operators."""

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CYCLES = 2000  # of a multiprocessor in a microsecond, at least
TRIES, LONGEST_US = 3, 20_000.0  # to queue calls while the device sleeps; how long it may


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float


def spread(samples: list[float]) -> Spread:
    """Returns the median and the quartiles of some samples, which are in between two of them where need be."""
    if len(samples) == 1:
        return Spread(*samples * 3)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high)


class Timing(NamedTuple):
    """The time of a call: on the device, in milliseconds, and until its user has the result, in microseconds."""

    device: Spread
    wall: Spread | None


class DeviceClock:
    """Times calls on a GPU. A call takes the number of a set of inputs, so that the sets rotate."""

    unit = "ms"

    def __init__(self):
        self.queued_us = weakref.WeakKeyDictionary()  # of the CPU, by call

    def device(self, call: Callable[[int], object], first: int, count: int) -> float:
        """Returns the device's milliseconds for one of `count` calls without a gap: the device sleeps until the CPU has
        queued them all."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for attempt in range(TRIES):
            sleep_us = 50 + 1.5 * (attempt + 1) * count * self.queued_us.get(call, 100.0)
            torch.cuda._sleep(int(CYCLES * min(sleep_us, LONGEST_US)))
            start.record()
            begun = time.perf_counter()
            for i in range(first, first + count):
                call(i)
            self.queued_us[call] = (time.perf_counter() - begun) / count * 1e6
            end.record()
            woke = start.query()  # before all was queued; or the call waits for the device, as some do
            torch.cuda.synchronize()
            if not woke:
                break
            first += count  # what was just read lies in the cache
        return start.elapsed_time(end) / count

    def wall(self, call: Callable[[int], object], first: int, count: int) -> float:
        """Returns the microseconds for one of `count` calls, until the device has ended the last."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for i in range(first, first + count):
            call(i)
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count * 1e6

    def cpu(self, call: Callable[[int], object], first: int, count: int) -> float:
        """Returns the CPU's microseconds until a call of `count` returns; the device must be the faster of the two."""
        call(0)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            call(0)
        taken = (time.perf_counter() - begun) / count * 1e6
        torch.cuda.synchronize()
        return taken

    def captured(self, call: Callable[[int], object], count: int) -> Callable[[int], object]:
        """Returns a replay of one CUDA graph of `count` calls; the call itself where it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        with contextlib.suppress(RuntimeError):
            with torch.cuda.graph(graph):
                for i in range(count):
                    call(i)
            return lambda _: graph.replay()
        return call


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


class OperatorCounter:
    """Takes the place of `DeviceClock` without a GPU: counts torch's operators in a call, launchers' included."""

    unit = "operators"

    def device(self, call: Callable[[int], object], first: int, count: int) -> float:
        with _Operators() as operators:
            for i in range(first, first + count):
                call(i)
        return operators.count / count

    wall = cpu = device

    def captured(self, call: Callable[[int], object], count: int) -> Callable[[int], object]:
        return call


def time_in_turns(
    calls: dict[str, Callable[[int], object]],
    clock,
    *,
    rounds: int,
    round_ms: float,
    most_calls: int,
    sets: int = 1,
    graphs: bool = False,
    walls: int = 3,
) -> dict[str, Timing]:
    """Returns the timing of each call; the calls take turns, and no two in a row get the same inputs.

    sets: number of sets of inputs; a call takes its number modulo that. graphs: times each call in a CUDA graph of at
    least as many calls as there are sets. walls: number of rounds in which wall times are taken, too.
    """
    counts, at = {}, 0
    for name, call in calls.items():
        call(at)
        clock.device(call, at, 1)  # a second call may compile once more
        ms = clock.device(call, at + 1, 1)
        counts[name] = max(1, int(min(most_calls, round_ms / ms))) if ms else most_calls
    timed, size = dict(calls), dict.fromkeys(calls, 1)
    if graphs:
        for name, call in calls.items():
            count = max(counts[name], sets)
            timed[name] = clock.captured(call, count)
            size[name] = count if timed[name] is not call else 1
    device, wall = {name: [] for name in calls}, {name: [] for name in calls}
    for number in range(rounds):
        for name in calls:
            count = 1 if size[name] > 1 else counts[name]
            device[name].append(clock.device(timed[name], at, count) / size[name])
            at += count
            if number < walls:
                wall[name].append(clock.wall(calls[name], at, counts[name]))
                at += counts[name]
    return {name: Timing(spread(device[name]), spread(wall[name]) if wall[name] else None) for name in calls}
