"""Judges a mutant in a process forked for it. Imports nothing of bi_kernels before the mutant's copy comes first."""

import resource
import signal
import sys
import traceback

ROOM = 12 * 2**30  # bytes that a mutant may take on a CPU
PASSED = "bi-audit mutate: passed "  # how a line begins that names a stage which a mutant has passed


def judge(
    folder: str, asks: list, seeds: list, device: str, patience: int, only: list, passed: list, likely: dict
) -> dict:
    """Returns the verdict on the package in a folder; the rest is as `questions.killer` has it."""
    sys.path.insert(0, folder)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    try:
        import torch  # noqa: PLC0415 (the server has it)

        from bi_kernels.audit.parameters import find_helpers  # noqa: PLC0415 (the mutant's copy)

        find_helpers()
        from mutation.questions import killer  # noqa: PLC0415

        torch.set_num_threads(1)
        return killer(asks, seeds, device, patience, only, passed, likely)
    except Exception as error:
        said = "".join(traceback.format_exception_only(error)).strip()[:200]
        return {"verdict": "killed", "relation": "raised", "layout": "import", "detail": said, "checks": 0}
