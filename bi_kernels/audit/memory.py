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
_vain: set[int] = set()  # what others held while waiting was in vain: it would be again
_mine: list = []  # the lock, while it is this process's turn


def patiently(thunk: Callable):
    """Returns what `thunk` returns. Where the GPU has no memory left for it, it is called again when other processes
    have given back theirs, one caller of all at a time; raises what it raised once nobody's use changes any more."""
    try:
        return thunk()
    except Exception as error:
        if type(error).__name__ != SHORT:
            raise
    with _turn():
        return _again(thunk)


def in_turn(thunk: Callable):
    """Returns what `thunk` returns, which takes much of a GPU's memory: one caller of all processes at a time, and, as
    in `patiently`, again where others hold too much."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    give_back()
    with _turn():
        return _again(thunk) if cuda and cuda.is_initialized() else thunk()


def _again(thunk: Callable):
    began = moved = time.monotonic()
    before = None
    while True:
        held, now = _held_by_others(), time.monotonic()
        moved, before = (moved if held == before else now), held
        over = now - began > LONGEST or now - moved > STILL or held in _vain
        try:
            return thunk()
        except Exception as error:
            if type(error).__name__ != SHORT:
                raise
            if over:
                _vain.add(held)
                raise
        time.sleep(LOOK)


def _held_by_others() -> int:
    """Gives back what this process does not need; returns how many bytes all others hold of its GPU."""
    import torch  # noqa: PLC0415 (documents are listed without it)

    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def give_back() -> None:
    """Gives back what a check leaves unused, where that is much: other processes wait for it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda and cuda.is_initialized() and cuda.memory_reserved() - cuda.memory_allocated() > SPARE:
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
