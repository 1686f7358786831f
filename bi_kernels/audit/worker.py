"""Runs a function of the package in a process of its own, with or without Triton's interpreter.

The process is told a folder made for it, in a line; it reads `request` there and leaves `reply`. What it prints is its
progress.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType


class Died(RuntimeError):
    """Raised for a worker that ended without a reply.

    status: its exit status, or minus the signal that ended it; said: the lines of its stderr.
    """

    def __init__(self, function: str, status: int, said: list[str]):
        self.status, self.said = status, said
        super().__init__(f"{function}: {said[-1].strip() if said else f'ended with status {status}'}")


_warm: list[subprocess.Popen] = []  # a process that the next Worker takes


def warm() -> None:
    """Starts the next Worker's process, which loads torch while this one still loads what it needs itself."""
    _warm.append(_started(os.environ, "torch"))


def _started(environment: Mapping[str, str], *loads: str) -> subprocess.Popen:
    # through env: a debugger makes a Python that Python starts wait for it, and JupyterLab's never comes
    return subprocess.Popen(
        ["env", sys.executable, "-P", __file__, *loads],
        env=environment,
        stdin=subprocess.PIPE,  # which is closed when this process is no more
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # until it is told where
        text=True,
        errors="replace",
    )


class Worker:
    """A process that calls `package.module:function` with arguments that pickle takes; it starts at once, and ends
    with this one, however that ends.

    interpreter: False takes TRITON_INTERPRET out of its environment, which is otherwise this process's and what
    `environment` adds to it.
    """

    def __init__(
        self, function: str, *arguments, interpreter: bool = True, environment: Mapping[str, str] = MappingProxyType({})
    ):
        self.function, self.folder = function, tempfile.TemporaryDirectory()
        request = Path(self.folder.name, "request")
        request.write_bytes(pickle.dumps((sys.path, function, pickle.dumps(arguments))))
        own = {k: v for k, v in os.environ.items() if interpreter or k != "TRITON_INTERPRET"} | environment
        self.process = _warm.pop() if _warm else _started(own)
        self.process.stdin.write(json.dumps({"folder": self.folder.name, "environment": own}) + "\n")
        self.process.stdin.flush()

    def result(self, progress: Callable[[str], object] = lambda line: None):
        """Waits for the reply, calling `progress` with every line that the process prints. Raises Died without one."""
        with self.folder:
            try:
                for line in self.process.stdout:
                    progress(line.rstrip("\n"))
                status = self.process.wait()
            except BaseException:
                self.stop()
                raise
            reply = Path(self.folder.name, "reply")
            if reply.is_file():
                return pickle.loads(reply.read_bytes())
            said = Path(self.folder.name, "stderr").read_text(encoding="utf-8", errors="replace")
            raise Died(self.function, status, said.splitlines())

    def stop(self) -> None:
        """Sends SIGTERM, and waits for the end."""
        self.process.terminate()
        self.process.wait()


def closed_gate():
    """Returns a file that holds a process up at `wait_at` until it is closed, or until who holds it ends."""
    fcntl.flock(gate := tempfile.NamedTemporaryFile(), fcntl.LOCK_EX)  # noqa: SIM115
    return gate


def wait_at(gate: str) -> None:
    """Waits until who holds a `closed_gate` of this path closes the file."""
    with contextlib.suppress(FileNotFoundError), open(gate, encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def call(function: str, *arguments, **how):
    """Returns what `package.module:function` returns in a process of its own. how: as Worker has it. Raises Died."""
    return Worker(function, *arguments, **how).result()


def _end_with_parent() -> None:
    os.read(0, 1)  # not by sys.stdin, whose lock Python wants when it ends
    os._exit(1)


def _serve() -> None:
    told = json.loads(_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    folder = Path(told["folder"])
    with (folder / "stderr").open("wb") as errors:
        os.dup2(errors.fileno(), 2)
    os.environ.clear()
    os.environ.update(told["environment"])
    gc.set_threshold(50_000)  # it makes many objects, few of them in circles, and ends
    sys.path[:], function, arguments = pickle.loads((folder / "request").read_bytes())
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)(*pickle.loads(arguments))
    (folder / "part").write_bytes(pickle.dumps(answer))
    (folder / "part").rename(folder / "reply")  # whole, or not there


def _line() -> bytes:
    """Reads a line from stdin, and no more than that."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            os._exit(1)  # whoever started it needs it no more
        line += byte
    return line


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    _serve()
