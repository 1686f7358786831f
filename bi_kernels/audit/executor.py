"""Runs functions and scripts in processes that are forked from one that has loaded torch.

The fork server is started by this file's path, so it knows nothing of this package, and it touches no GPU: a process
that holds a CUDA context must not fork. A process answers calls over its connection, one after another.
"""

import atexit
import gc
import importlib
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue

# torch first; the others while nobody waits. backward() needs symbolic_shapes, which takes 2 s.
PRELOAD = "torch", "torch.fx.experimental.symbolic_shapes"
REPORTS = "IPython.core.interactiveshell", "pandas", "nbconvert"  # what a notebook and its report need
ADDRESS = "BI_AUDIT_SERVER"  # the server's socket, for the processes that it forked


class Died(RuntimeError):
    """Raised for a process that ended without a reply.

    status: its exit status, or minus the signal that ended it; None where the server ended; said: the lines of its
    stderr; late: it took too long.
    """

    def __init__(self, function: str, status: int | None, said: Sequence[str], late: bool = False):
        self.status, self.said, self.late = status, said, late
        ended = "the process that forks others ended" if status is None else f"ended with status {status}"
        super().__init__(f"{function}: {said[-1].strip() if said else ended}")


@dataclass(frozen=True)
class Ended:
    """How a script ended. status: None where a signal ended its process, or where it took too long."""

    status: int | None
    printed: str
    errors: str
    late: bool = False


class ForkServer:
    """Forks processes. It starts with `start`, or with the first process, and ends with this process or at the end of
    its context, with all that it forked. A process that the shared server forked has no other one.

    preload: modules to load, in this order; environment: of the server; None shares one server.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD, environment: Mapping[str, str] | None = None):
        self.preload, self.environment, self.process = preload, environment, None
        self.address = os.environ.get(ADDRESS, "") if environment is None else ""
        self.lock = threading.Lock()

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_) -> None:
        if self.process:
            self.process.stdin.close()
            with suppress(subprocess.TimeoutExpired):  # it may be loading something
                self.process.wait(0.5)
            self.process, self.address = None, ""

    def start(self) -> None:
        with self.lock:
            if self.address:
                return
            self.address = os.path.join(tempfile.mkdtemp(), "socket")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(self.address)
                listener.listen(64)
                # through env: a debugger makes a Python that Python starts wait for it, and JupyterLab's never comes
                self.process = subprocess.Popen(
                    ["env", sys.executable, "-P", __file__, str(listener.fileno()), *self.preload],
                    env=os.environ if self.environment is None else self.environment,
                    stdin=subprocess.PIPE,  # closed when this process is no more
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,  # a terminal's Ctrl-C is for this process
                )
        atexit.register(self.__exit__)

    def run(self, script: str, cwd: Path, seconds: float) -> Ended:
        """Runs a script, a path as seen from `cwd`, for at most so many seconds; any thread may call this."""
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("BI_AUDIT")}
        process, printed = Process(self, environment, cwd), []
        try:
            process.begin(script)
            process.result(printed.append, seconds)
        except Died as died:
            status = None if died.late or died.status is None or died.status < 0 else died.status
            lines = lambda said: "".join(f"{line}\n" for line in said)
            return Ended(status, lines(printed), lines(died.said), died.late)
        raise AssertionError("a script ends its process")


SHARED = ForkServer((*PRELOAD, *REPORTS))


class Process:
    """A process that runs calls, one after another, until it is closed, or one of them raises or ends it.

    environment: its whole environment; cwd: its folder.
    """

    def __init__(
        self, server: ForkServer = SHARED, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ):
        server.start()
        self.function, self.pending, self.reader, self.lock = "", 0, None, threading.Lock()
        self.pid = 0  # once `result` waits
        environment = {**(os.environ if environment is None else environment)}
        if server is SHARED:
            environment[ADDRESS] = server.address
        self.errors, (self.printed, out) = tempfile.TemporaryFile(), os.pipe()  # noqa: SIM115 (until it ends)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(server.address)
        socket.send_fds(self.socket, [b"!"], [out, self.errors.fileno()])
        os.close(out)
        self.connection = Connection(os.dup(self.socket.fileno()))
        self.connection.send((environment, str(cwd or Path.cwd())))

    def begin(self, function: str, *arguments) -> "Process":
        """Has it call `package.module:function` with arguments that pickle takes, or run a script."""
        self.function, self.pending = function, self.pending + 1
        with suppress(OSError):  # `result` says how it ended
            self.connection.send((sys.path, function, pickle.dumps(arguments)))
        return self

    def call(self, function: str, *arguments, seconds: float | None = None):
        """Returns what the function returns; the process goes on. Raises Died."""
        return self.begin(function, *arguments)._answer(seconds=seconds)

    def result(self, progress: Callable[[str], object] = lambda line: None, seconds: float | None = None):
        """Returns what the last call returned, and closes the process. progress: gets each line that is printed.

        Raises Died where there is no reply, after so many seconds too.
        """
        found = self._answer(progress, seconds)
        self.close()
        return found

    def _answer(self, progress: Callable[[str], object] = lambda line: None, seconds: float | None = None):
        if self.reader is None:
            self.reader = threading.Thread(target=self._read, args=(progress,), daemon=True)
            self.reader.start()
        late = False
        try:
            with self.lock:
                while True:
                    if self.connection.closed:  # it was stopped
                        raise Died(self.function, -signal.SIGKILL, [])
                    if not self.connection.poll(seconds):
                        late, seconds = True, None
                        self._hang_up()
                    kind, found = self._message()
                    if kind == "pid":
                        self.pid = found
                        continue
                    if kind == "ended":
                        said = self._said()
                        self._release()
                        raise Died(self.function, found, said, late)
                    self.pending -= 1
                    if not self.pending:
                        return found
        except BaseException:
            self.stop()
            raise

    def _said(self) -> list[str]:
        """Returns the lines of stderr; those of stdout are read by then, unless what it started holds it."""
        self.reader.join(5)
        size = os.fstat(self.errors.fileno()).st_size
        return os.pread(self.errors.fileno(), size, 0).decode(errors="replace").splitlines()

    def _message(self) -> tuple[str, object]:
        try:
            return self.connection.recv()
        except (EOFError, OSError):  # the server ended
            return "ended", None

    def _read(self, progress: Callable[[str], object]) -> None:
        with os.fdopen(self.printed, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                progress(line.rstrip("\n"))

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def _release(self) -> None:
        for file in (self.socket, self.connection, self.errors):
            file.close()
        if self.reader is None:
            os.close(self.printed)
            self.reader = threading.Thread()

    def close(self) -> None:
        """Has it end, and waits for that."""
        with suppress(OSError):
            self.connection.send(None)
        self._wait()

    def stop(self) -> None:
        """Kills it and what it started in its session, and waits for that."""
        self._hang_up()
        self._wait()

    def _wait(self) -> None:
        with self.lock:
            if not self.connection.closed:
                while self._message()[0] != "ended":
                    pass
                if self.reader:
                    self.reader.join(5)
                self._release()


def begin(function: str, *arguments, interpreter: bool = True, environment: Mapping[str, str] | None = None) -> Process:
    """Begins a call of `package.module:function` in a process of its own; its `result` closes that.

    interpreter: False sets TRITON_INTERPRET=0 in the environment, which is otherwise this process's and what
    `environment` adds to it.
    """
    own = {**os.environ, **({} if interpreter else {"TRITON_INTERPRET": "0"})}
    return Process(environment=own | {**(environment or {})}).begin(function, *arguments)


def call(function: str, *arguments, **how):
    """Returns what `package.module:function` returns in a process of its own. how: as `begin` has it. Raises Died."""
    return begin(function, *arguments, **how).result()


class Forked:
    """A fork of this process, made at once, in which a function waits for its arguments. It has this process's memory
    and none of its threads; a process with a CUDA context must not fork.

    The function returns bytes. It prints nowhere.
    """

    def __init__(self, function: Callable[..., bytes]):
        self.connection, other = Pipe()
        with warnings.catch_warnings(action="ignore"):  # that this process has threads
            self.pid = os.fork()
        if self.pid:
            other.close()
            return
        try:
            self.connection.close()
            with open(os.devnull, "r+b") as nowhere:
                for number in range(3):
                    os.dup2(nowhere.fileno(), number)
            other.send_bytes(b"+" + function(*pickle.loads(other.recv_bytes())))
        except BaseException as error:
            with suppress(BaseException):
                other.send_bytes(b"-" + f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)

    def begin(self, *arguments) -> None:
        with suppress(OSError):  # `result` says that it ended
            self.connection.send_bytes(pickle.dumps(arguments))

    def result(self, seconds: float) -> bytes:
        """Returns what the function returns, and ends the process. Raises RuntimeError for what it raised, and where
        there is no reply after so many seconds."""
        try:
            if not self.connection.poll(seconds):
                raise RuntimeError(f"a fork of this process did not reply in {seconds:.0f} s")
            said = self.connection.recv_bytes()
        except (EOFError, OSError):
            raise RuntimeError("a fork of this process ended without a reply") from None
        finally:
            self.close()
        if said[:1] == b"-":
            raise RuntimeError(f"a fork of this process raised {said[1:].decode()}")
        return said[1:]

    def close(self) -> None:
        """Kills it, and waits for that."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = 0
        self.connection.close()

    def __del__(self):
        self.close()


class Pool:
    """Processes that run one call at a time each; one that dies is replaced. first: what each calls before others."""

    def __init__(self, count: int, *first):
        self.first, self.threads, self.free = first, ThreadPoolExecutor(count), SimpleQueue()
        self.every, self.over = [], False
        for _ in range(count):
            self.free.put(self._one_more())

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:
            self.over = True
            self.threads.shutdown(wait=False, cancel_futures=True)
            for process in [*self.every]:
                process.stop()
        self.threads.shutdown()
        for process in self.every:
            process.close()

    def _one_more(self) -> Process:
        self.every.append(Process())
        return self.every[-1].begin(*self.first) if self.first else self.every[-1]

    def submit(self, function: str, *arguments) -> Future:
        return self.threads.submit(self.call, function, *arguments)

    def call(self, function: str, *arguments, keep: Callable[[object], bool] = lambda found: True):
        """Returns what a call returns in a process that is free. keep: says by that whether the process goes on."""
        process, good = self.free.get(), False
        try:
            found = process.call(function, *arguments)
            good = keep(found)
            return found
        finally:
            if not good:
                process.stop()
                if not self.over:
                    self.every.remove(process)
                    process = self._one_more()
            self.free.put(process)


def _serve(listener: socket.socket, preload: list[str]) -> None:
    """Forks a process for each connection, until stdin is closed; kills one whose client hangs up."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    importlib.import_module(preload.pop(0))
    connections: dict[int, Connection] = {}
    while True:
        poll = select.poll()
        for end in (0, listener.fileno(), woken):
            poll.register(end, select.POLLIN)
        for connection in connections.values():
            poll.register(connection.fileno(), select.POLLRDHUP)
        ready = dict(poll.poll(0 if preload else None))
        if not ready:
            with suppress(ImportError):
                importlib.import_module(preload.pop(0))
        if 0 in ready:
            break
        if woken in ready:
            os.read(woken, 4096)
        for pid, connection in [*connections.items()]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                with suppress(OSError):
                    connection.send(("ended", os.waitstatus_to_exitcode(status)))
                connections.pop(pid).close()
            elif connection.fileno() in ready:
                _kill(pid)
        if listener.fileno() in ready:
            client = listener.accept()[0]
            _, (out, err), _, _ = socket.recv_fds(client, 1, 2)
            connection = Connection(client.detach())
            pid = os.fork()
            if not pid:
                for end in (listener, *connections.values()):
                    end.close()
                _answer(connection, out, err)
            connections[pid] = connection
            for end in (out, err):
                os.close(end)
    for pid in connections:
        _kill(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # also before it has a session of its own
        os.killpg(pid, signal.SIGKILL)


def _answer(connection: Connection, out: int, err: int) -> None:
    """Runs the calls of a client in this process, a fork, and ends it."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(stream, number)
        os.close(stream)
    status = 0
    try:
        atexit._clear()
        environment, cwd = connection.recv()
        connection.send(("pid", os.getpid()))
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        while request := connection.recv():
            path, function, arguments = request
            module, _, name = function.partition(":")
            if not name:
                _run(function)
                break
            sys.path[:] = path
            found = getattr(importlib.import_module(module), name)(*pickle.loads(arguments))
            connection.send(("reply", found))
    except EOFError:  # the client is gone
        pass
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        print(*[end.code] * isinstance(end.code, str), end="", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    with suppress(BaseException):
        atexit._run_exitfuncs()
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 255)


def _run(script: str) -> None:
    sys.argv, sys.path[:0] = [script], [str(Path(script).resolve().parent)]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as shared:
        place = shared.getsockname()
        _serve(shared, sys.argv[2:])
    shutil.rmtree(Path(place).parent, ignore_errors=True)
    os._exit(0)
