"""Parts of an audit run several at a time, each in a process of its own: to compile a kernel for a GPU takes a core
seconds, in which the GPU has nothing to do."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from queue import SimpleQueue

import torch

from bi_kernels.audit import faults
from bi_kernels.audit.memory import patiently

# attention's kernels compile longest, a vocabulary's tensors are largest
PROCESSES = {"random": 24, "attention": 12, "vocabulary": 2, "backward": 2, "training": 10, "chain": 6, "zoo": 6}
MOST = 6  # of any other audit
_own: list = []  # the session of a process that works for another
_seen: set[str] = set()  # what that process has told of its launches


class Processes:
    """Processes of one audit on a GPU, each of which judges one part at a time.

    One that loses its GPU over a check is replaced, and the part begins again without that check: see faults.py. One
    in which a part raises, or that ends, is replaced too.
    """

    def __init__(self, count: int, audit: str, parameters: dict):
        self._made = audit, parameters
        self._threads = ThreadPoolExecutor(count)
        self._free: SimpleQueue = SimpleQueue()
        for _ in range(count):
            self._free.put(self._one_more())

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *raised) -> None:
        self._threads.shutdown()
        while not self._free.empty():
            self._free.get().shutdown()

    def _one_more(self) -> ProcessPoolExecutor:
        process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, self._made)
        process.submit(os.getpid)  # it starts now
        return process

    def submit(self, function: Callable, item, args: tuple) -> Future:
        """Begins a part; its result is what `function` returns and what was compiled for it."""
        return self._threads.submit(self._part, function, item, args)

    def _part(self, function: Callable, item, args: tuple):
        process, rows, every = self._free.get(), {}, {}
        try:
            for _ in range(2 * faults.MOST):  # a fault that comes and goes may come elsewhere each time
                answers = False
                try:
                    found, launched, answers, lost = process.submit(_one, function, item, args, rows).result()
                finally:
                    if not answers:
                        process.shutdown()  # it ends, and gives back its memory
                        process = self._one_more()
                every |= launched
                if lost is None:
                    return found, every
                rows |= lost
            raise RuntimeError(f"the GPU stopped answering {2 * faults.MOST} times in one part of the audit")
        finally:
            self._free.put(process)


def answer_uninterrupted() -> None:
    """Has a notebook's kernel answer what it is asked about itself without an interrupt: papermill asks that last, and
    shuts the kernel down, beginning with an interrupt, as soon as it has the answer and while the kernel still answers.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    handlers = getattr(getattr(shell, "kernel", None), "shell_handlers", {})
    if answer := handlers.get("kernel_info_request"):

        def uninterrupted(*request):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # until this request ends, when the kernel sets its own again
            return answer(*request)

        handlers["kernel_info_request"] = uninterrupted


def begin(audit: str, parameters: dict) -> Processes:
    """Starts the processes of an audit on a GPU, which load their sessions while the caller loads its own."""
    beside = int(os.environ.get("BI_AUDIT_JOBS", "1"))  # audits that share the GPU's memory, as the runner says
    count = max(1, min(PROCESSES.get(audit, MOST), len(os.sched_getaffinity(0)) * 3 // 4) // beside)
    return Processes(count, audit, parameters)


def ahead(session, function: Callable, items: Iterable, *args) -> None:
    """Begins parts that `each` will be asked for later, so that no process waits for another in between."""
    if session.pool is not None:
        for item in items:
            session.begun[function, repr(item), args] = session.pool.submit(function, item, args)


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
    """Prepares a process, which ends with the one that it works for: an interrupt of a notebook's kernel, with which
    its shutdown begins, reaches all of its processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _own.append(importlib.import_module(__package__).load(audit, parameters))


def _one(function: Callable, item, args: tuple, rows: dict) -> tuple:
    """Runs one part, and gives back the memory that it took; rows: of its checks that lost a process before.

    Returns what it found, what was compiled for it, whether the GPU still answers, and, in place of what it found, the
    row of the check that lost it, by its name.
    """
    try:
        found = patiently(lambda: _judged(function, item, args, rows))
    except faults.Lost as lost:
        return None, _launched(), False, {lost.key: lost.row}
    finally:
        with contextlib.suppress(RuntimeError):  # of a GPU that no longer answers
            torch.cuda.empty_cache()
    return found, _launched(), faults.answers(), None


def _judged(function: Callable, item, args: tuple, rows: dict):
    with faults.going_on(rows):
        return function(_own[0], item, *args)


def _launched() -> dict:
    """Returns what was compiled since it was last asked."""
    launched = importlib.import_module("bi_kernels.audit.static.verdict").compiled_variants(_seen)
    _seen.update(launched)
    return launched
