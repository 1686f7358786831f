"""Runs Python scripts in forks of one process that has loaded torch: a script starts at once, and as fresh as in a new
interpreter. Nothing else is loaded there, and no device is touched.

The server reads a script's path, folder and environment from a socket, and forks; the child writes its pid, and at its
end its status, what it printed and what it printed to stderr.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a script ended. status: None where a signal ended its process, or where it took too long."""

    status: int | None
    printed: str
    errors: str
    late: bool = False


class ForkServer:
    """A context within which a process forks one for each script. It starts with `start`, or with the first script, and
    ends with the context, or with this process, however that ends."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.lock = threading.Lock()

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_) -> None:
        if self.process:  # and the scripts that still run in its forks
            self.process.stdin.close()
            self.process.wait()
            self.folder.cleanup()
            self.process = None

    def start(self) -> None:
        """Starts the process, which has loaded torch some seconds later."""
        with self.lock:
            if self.process:
                return
            self.folder = tempfile.TemporaryDirectory()
            self.address = f"{self.folder.name}/socket"
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, self.address],
                stdin=subprocess.PIPE,  # which is closed when this process is no more
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if not ours(k)},
                start_new_session=True,  # a terminal's Ctrl-C is for this process
            )

    def run(self, script: str, cwd: Path, seconds: float) -> Ended:
        """Runs a script, a path as seen from `cwd`, for at most so many seconds; any thread may call this."""
        self.start()
        environment = {k: v for k, v in os.environ.items() if not ours(k)}
        request = {"script": script, "cwd": str(cwd), "environment": environment}
        deadline = time.monotonic() + seconds
        with socket.socket(socket.AF_UNIX) as connection:
            self._connect(connection)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("r", encoding="utf-8") as reply:
                pid = int(reply.readline() or 0)
                connection.settimeout(max(1.0, deadline - time.monotonic()))
                try:
                    said = reply.readline()
                except TimeoutError:
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                    return Ended(None, "", "", late=True)
        return Ended(**json.loads(said)) if said else Ended(None, "", "")

    def _connect(self, connection: socket.socket) -> None:
        while True:  # until it has loaded torch
            with suppress(FileNotFoundError, ConnectionRefusedError):
                return connection.connect(self.address)
            if self.process.poll() is not None:
                raise RuntimeError(f"the process that runs scripts ended with status {self.process.returncode}")
            time.sleep(0.02)


def ours(variable: str) -> bool:
    """Tells whether a variable is the audit's, so that no script may need it."""
    return variable == "TRITON_INTERPRET" or variable.startswith("BI_AUDIT")


def _run(request: dict, connection: socket.socket) -> None:
    """Runs a script in this process, a fork, and ends it."""
    os.setpgid(0, 0)
    connection.sendall(f"{os.getpid()}\n".encode())
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, number in ((printed, 1), (errors, 2)):
            os.dup2(stream.fileno(), number)
        status = _status(request["script"])
        text = []
        for stream in (printed, errors):
            stream.seek(0)
            text.append(stream.read().decode(errors="replace"))
    reply = {"status": status, "printed": text[0], "errors": text[1]}
    connection.sendall(json.dumps(reply).encode() + b"\n")


def _status(script: str) -> int:
    import runpy  # noqa: PLC0415 (in the fork, as all that a script loads)

    sys.argv, sys.path[:0] = [script], [str(Path(script).resolve().parent)]
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def _serve(address: str) -> None:
    import torch.fx.experimental.symbolic_shapes  # noqa: F401, PLC0415 (in the server alone; backward loads it, in 2 s)

    children: set[int] = set()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(16)
        while True:
            ready, _, _ = select.select([sys.stdin, listener], [], [])
            children = {child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)}
            if sys.stdin in ready:  # it was closed
                break
            connection, _ = listener.accept()
            request = json.loads(connection.makefile("r", encoding="utf-8").readline())
            child = os.fork()
            if not child:
                try:
                    listener.close()
                    _run(request, connection)
                finally:
                    os._exit(0)
            connection.close()
            children.add(child)
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    _serve(sys.argv[1])
