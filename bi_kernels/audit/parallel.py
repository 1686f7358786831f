"""Judges parts of an audit on a GPU in several processes at a time: to compile a kernel takes a core seconds, in which
the GPU has nothing to do."""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import torch

from bi_kernels.audit import faults
from bi_kernels.audit.executor import Pool
from bi_kernels.audit.memory import patiently

# attention's kernels compile longest, a vocabulary's tensors are largest
PROCESSES = {"random": 24, "attention": 12, "vocabulary": 2, "backward": 2, "training": 10, "chain": 6, "zoo": 6}
MOST = 6  # of any other audit
_own: list = []  # the session of a process that works for another
_seen: set[str] = set()  # what that process has told of its launches


class Processes(Pool):
    """Processes of one audit on a GPU, each of which judges one part at a time.

    One that loses its GPU over a check is replaced, and the part begins again without that check: see faults.py.
    """

    def __init__(self, count: int, audit: str, parameters: dict):
        super().__init__(count, f"{__name__}:_begin", audit, parameters)

    def begin(self, function: Callable, item, args: tuple) -> Future:
        """Begins a part; its result is what `function` returns and what was compiled for it."""
        return self.threads.submit(self._part, function, item, args)

    def _part(self, function: Callable, item, args: tuple):
        rows, every = {}, {}
        for _ in range(2 * faults.MOST):  # a fault that comes and goes may come elsewhere each time
            arguments = f"{__name__}:_judge", f"{function.__module__}:{function.__qualname__}", item, args, rows
            found, launched, lost = self.call(*arguments, keep=lambda told: told[-1])[:3]
            every |= launched
            if lost is None:
                return found, every
            rows |= lost
        raise RuntimeError(f"the GPU stopped answering {2 * faults.MOST} times in one part of the audit")


def begin(audit: str, parameters: dict) -> Processes:
    """Starts the processes of an audit on a GPU, which load their sessions while the caller loads its own."""
    beside = int(os.environ.get("BI_AUDIT_JOBS", "1"))  # audits that share the GPU's memory, as the runner says
    count = max(1, min(PROCESSES.get(audit, MOST), len(os.sched_getaffinity(0)) * 7 // 8) // beside)
    return Processes(count, audit, parameters)


def ahead(session, function: Callable, items: Iterable, *args) -> None:
    """Begins parts that `each` will be asked for later, so that no process waits for another in between."""
    if session.pool is not None:
        for item in items:
            session.begun[function, repr(item), args] = session.pool.begin(function, item, args)


def each(session, function: Callable, items: Iterable, *args) -> Iterator:
    """Returns function(session, item, *args) of every item, in their order.

    On a GPU they run in processes of their own, whose sessions are made anew from the parameters: `function` stands in
    a module, items and results can be pickled, and only the caller records rows. On the interpreter, whose cores
    audits share, one runs after another, here.
    """
    items = list(items)
    if session.pool is None:
        return (function(session, item, *args) for item in items)
    ahead(session, function, [i for i in items if (function, repr(i), args) not in session.begun], *args)
    return (_result(session, session.begun.pop((function, repr(item), args))) for item in items)


def _result(session, part: Future):
    """Returns what a part found, and notes what it launched."""
    found, launched = part.result()
    session.launched |= launched
    return found


def load(audit: str, parameters: dict):
    """Returns the session of an audit in another process than its own."""
    return importlib.import_module(__package__).load(audit, parameters)


def _begin(audit: str, parameters: dict) -> None:
    """Loads the session of a process that judges parts."""
    _own.append(load(audit, parameters))


def _judge(function: str, item, args: tuple, rows: dict) -> tuple[object, dict, dict | None, bool]:
    """Judges one part, and gives back the memory that it took; rows: of its checks that lost a process before.

    Returns what it found; what was compiled for it; in place of what it found, the row of the check that lost the GPU,
    by its name; and whether the GPU still answers.
    """
    module, _, name = function.partition(":")
    judge = getattr(importlib.import_module(module), name)
    found, lost = None, None
    try:
        with faults.going_on(rows):
            found = patiently(lambda: judge(_own[0], item, *args))
    except faults.Lost as check:
        lost = {check.key: check.row}
    finally:
        with contextlib.suppress(RuntimeError):  # of a GPU that no longer answers
            torch.cuda.empty_cache()
    return found, _launched(), lost, lost is None and faults.answers()


def _launched() -> dict:
    """Returns what was compiled since it was last asked."""
    launched = importlib.import_module("bi_kernels.audit.static.verdict").compiled_variants(_seen)
    _seen.update(launched)
    return launched
