"""Judges mutants, each in a process of its own that is forked from one which has imported torch and triton already.

Run by its path, so that the package itself is not imported before a mutant's copy of it is. Reads a job a line, as
JSON: the folder that holds the copy, what is asked of which op and dtype, the seeds, the device, and the seconds that
all of it and an answer may take; prints its verdict.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback

ROOM = 12 * 2**30  # bytes that a mutant may take on a CPU


def judge(job: dict, into: int) -> None:
    """Judges one mutant, in this process."""
    sys.path.insert(0, job["folder"])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not what the server has made of it: it ends this process
    if job["device"] == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    try:
        from bi_kernels.audit.mutants.questions import killer  # noqa: PLC0415 (the mutant's own)

        found = killer(job["asks"], job["seeds"], job["device"], job["patience"])
    except Exception as error:
        said = "".join(traceback.format_exception_only(error)).strip()[:200]
        found = {"verdict": "killed", "relation": "raised", "layout": "import", "detail": said, "checks": 0}
    with os.fdopen(into, "w") as out:
        json.dump(found, out)


def end_with(parent: int) -> None:
    """Ends this process and those that it has started when its parent has ended, as where a run is interrupted."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def forked(job: dict) -> dict:
    """Returns what a child of this process says of a job; that it crashed, or that it took too long."""
    (read, write), parent = os.pipe(), os.getpid()
    child = os.fork()
    if not child:
        os.setsid()
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
        os.close(read)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        with contextlib.suppress(BaseException):
            judge(job, write)
        os._exit(0)
    os.close(write)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(job["seconds"])
    began = time.monotonic()
    with os.fdopen(read) as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    seconds = time.monotonic() - began
    if text:
        return json.loads(text) | {"seconds": round(seconds, 1)}
    relation, detail = "crashed", f"status {status}"
    if seconds >= job["seconds"] - 1:
        relation, detail = "time", f"more than {job['seconds']} s"
    elif status == signal.SIGALRM:
        relation, detail = "time", f"an answer took more than {job['patience']} s"
    return {"verdict": "killed", "relation": relation, "layout": "", "detail": detail, "seconds": round(seconds, 1)}


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder
    import hypothesis  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import numpy  # noqa: F401
    import pandas  # noqa: F401
    import torch
    import triton  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line))), flush=True)
