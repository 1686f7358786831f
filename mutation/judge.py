"""Judges a mutant in a process forked for it. Imports nothing of bi_kernels before the mutant's copy comes first."""

import os
import resource
import signal
import sys
import threading
import traceback

ROOM = 12 * 2**30  # bytes that a mutant may take on a CPU
PASSED = "bi-audit mutate: passed "  # how a line begins that names a stage which a mutant has passed
STUCK = signal.SIGVTALRM  # ends a process that waits for a GPU which does not answer
GRACE = 20  # seconds that such a process has to show that it goes on


class Patience:
    """Ends this process where an answer takes more than `seconds`; 0: never.

    shared: a GPU is shared, so that kernels which never end slow down those of others: who still gets answers from it,
    late, goes on, and only who waits for one is ended. A signal's handler in Python runs in the first alone.
    """

    def __init__(self, seconds: int, shared: bool):
        self.seconds, self.shared, self.timer = seconds, shared, None
        if seconds:
            signal.signal(signal.SIGALRM, (lambda *_: self.begin()) if shared else signal.SIG_DFL)

    def begin(self) -> None:
        """An answer begins."""
        self.end()
        signal.alarm(self.seconds)
        if self.seconds and self.shared:
            self.timer = threading.Timer(self.seconds + GRACE, os.kill, (os.getpid(), STUCK))
            self.timer.daemon = True
            self.timer.start()

    def end(self) -> None:
        signal.alarm(0)
        if self.timer:
            self.timer.cancel()


def judge(
    folder: str, asks: list, seeds: list, device: str, patience: int, only: list, passed: list, likely: dict
) -> dict:
    """Returns the verdict on the package in a folder; the rest is as `questions.killer` has it."""
    sys.path.insert(0, folder)
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    try:
        import torch  # noqa: PLC0415 (the server has it)

        from bi_kernels.audit.parameters import find_helpers  # noqa: PLC0415 (the mutant's copy)

        find_helpers()
        from mutation.questions import killer  # noqa: PLC0415

        torch.set_num_threads(1)
        return killer(asks, seeds, device, Patience(patience, device == "cuda"), only, passed, likely)
    except Exception as error:
        said = "".join(traceback.format_exception_only(error)).strip()[:200]
        return {"verdict": "killed", "relation": "raised", "layout": "import", "detail": said, "checks": 0}
