"""Parts of an audit run several at a time, each in a process of its own: to compile a kernel for a GPU takes a core
seconds, in which the GPU has nothing to do."""

import importlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import torch

from bi_kernels.audit.memory import patiently

# attention's kernels compile longest, a vocabulary's tensors are largest
PROCESSES = {"random": 12, "attention": 12, "vocabulary": 2, "backward": 2, "training": 10, "chain": 6}
MOST = 6  # of any other audit
_own: list = []  # the session of a process that works for another
_seen: set[str] = set()  # what that process has told of its launches


def begin(audit: str, parameters: dict) -> ProcessPoolExecutor:
    """Starts the processes of an audit on a GPU, which load their sessions while the caller loads its own."""
    beside = int(os.environ.get("BI_AUDIT_JOBS", "1"))  # audits that share the GPU's memory, as the runner says
    count = max(1, min(PROCESSES.get(audit, MOST), (os.cpu_count() or 1) * 3 // 4) // beside)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, spawn, _begin, (audit, parameters))
    for _ in range(count):
        pool.submit(os.getpid)
    return pool


def ahead(session, function: Callable, items: Iterable, *args) -> None:
    """Begins parts that `each` will be asked for later, so that no process waits for another in between."""
    if session.pool is not None:
        for item in items:
            session.begun[function, repr(item), args] = session.pool.submit(_one, function, item, args)


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


def _begin(audit: str, parameters: dict) -> None:
    """Prepares a process, which ends with the one that it works for."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _own.append(importlib.import_module(__package__).load(audit, parameters))


def _one(function: Callable, item, args: tuple):
    """Runs one part, and gives back the memory that it took; returns what it found, and what was compiled for it."""
    try:
        found = patiently(lambda: function(_own[0], item, *args))
    finally:
        torch.cuda.empty_cache()
    launched = importlib.import_module("bi_kernels.audit.static.whole_run").compiled(_seen)
    _seen.update(launched)
    return found, launched
