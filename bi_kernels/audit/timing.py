"""Times calls on a GPU, which no other audit uses meanwhile: they take turns, in each of several rounds."""

import contextlib
import fcntl
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

FLUSH = 2**30  # bytes, a third of a millisecond
TURN_MS = 40.0  # that a call is timed before it is the next one's turn


class GpuLock:
    """Keeps a GPU to one audit while it times; audits that do not time share it."""

    def __init__(self):
        self.files = ()  # the lock and the queue before it, open for the life of the process

    def share(self) -> None:
        """Uses the GPU from now on, together with others; first waits for a process that times, or is about to."""
        self._take(fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no other audit uses the GPU, and keeps them waiting."""
        self._take(fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.files[0], fcntl.LOCK_SH)

    def _take(self, mode: int) -> None:
        """Waits in the order of requests; else audits that begin later would keep out one that wants to be alone."""
        if not self.files:
            name = f"bi-audit-{torch.cuda.get_device_properties(0).uuid}"
            self.files = tuple(Path(tempfile.gettempdir(), name + end).open("w") for end in ("", "-queue"))  # noqa: SIM115
        lock, queue = self.files
        fcntl.flock(lock, fcntl.LOCK_UN)  # else two that want to be alone would wait for each other's share
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(lock, mode)
        fcntl.flock(queue, fcntl.LOCK_UN)


GPU = GpuLock()


def times_ms(*calls: Callable, rounds: int = 3) -> list[float]:
    """Returns the median milliseconds of each call on the device, the L2 cache flushed before every run; the flush
    takes so long that the CPU has queued the call by its end.

    The calls take turns: a product that runs long heats the GPU and lowers its clocks, and so is paid for by all alike.
    """
    flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")

    def median(call: Callable, runs: int) -> float:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for start, end in pairs:
            flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs)

    with GPU.alone():
        runs = [max(5, min(200, int(TURN_MS / median(call, 5)))) for call in calls]
        turns = [[median(call, n) for call, n in zip(calls, runs)] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*turns)]


def timed(calls: dict[str, Callable]) -> dict[str, float]:
    """Returns `times_ms` by name."""
    return dict(zip(calls, times_ms(*calls.values())))
