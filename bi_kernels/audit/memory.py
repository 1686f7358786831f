"""Memory of a GPU that processes share: a check that finds too little waits until others have given back theirs."""

import contextlib
import fcntl
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SPARE = 2**32  # bytes that a process may keep for its next check
LONGEST, STILL, LOOK = 240.0, 15.0, 1.0  # seconds to wait at most; while nobody moves; between two tries
SHORT = "OutOfMemoryError"
_in_vain: set[int] = set()  # what others held while waiting did not help: it would not help again
_mine: list = []  # the lock, while it is this process's turn


def patiently(thunk: Callable):
    """Returns what `thunk` returns. Where the GPU has no memory left for it, it is called again when other processes
    have given back theirs, one caller of all at a time; raises what it raised once nobody's use changes any more."""
    try:
        return thunk()
    except Exception as error:
        if type(error).__name__ != SHORT:
            raise
    return in_turn(thunk)


def in_turn(thunk: Callable):
    """Returns what `thunk` returns, which takes much of a GPU's memory: one caller of all processes at a time, and
    again where others hold too much."""
    began = moved = time.monotonic()
    before = None
    give_back()
    with _turn():
        while True:
            held, now = _held_by_others(), time.monotonic()
            moved, before = (moved if held == before else now), held
            try:
                return thunk()
            except Exception as error:
                if type(error).__name__ != SHORT:
                    raise
                if now - began > LONGEST or now - moved > STILL or held in _in_vain:
                    _in_vain.add(held)
                    raise
            time.sleep(LOOK)


def _cuda():
    """Returns torch.cuda where this process uses a GPU; loads nothing."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda and cuda.is_initialized() else None


def _held_by_others() -> int:
    """Gives back what this process does not need; returns how many bytes all others hold of its GPU, 0 without one."""
    if not (cuda := _cuda()):
        return 0
    gc.collect()
    cuda.empty_cache()
    free, total = cuda.mem_get_info()
    return total - free - cuda.memory_reserved()


def give_back() -> None:
    """Gives back what a check leaves unused, where that is much: other processes wait for it."""
    if (cuda := _cuda()) and cuda.memory_reserved() - cuda.memory_allocated() > SPARE:
        with contextlib.suppress(RuntimeError):  # a GPU that no longer answers: see faults.py
            cuda.empty_cache()


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Waits for those that ran short of memory before. A check inside another that waited has its turn already, and
    would wait for itself."""
    if _mine:
        yield
        return
    with Path(tempfile.gettempdir(), f"bi-audit-memory-{os.getuid()}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _mine.append(file)
        try:
            yield
        finally:
            _mine.clear()
