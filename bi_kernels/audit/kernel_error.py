"""A Triton kernel's error in one sentence: the compiler's or the interpreter's own last one, and the line it names.

Imports neither triton nor the rest of the auditor.
"""

import inspect
import linecache
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType

PACKAGE = __name__.partition(".")[0]
LIBRARIES = ("triton", "numpy", "torch", *(f"{PACKAGE}.{part}" for part in ("interpreter", "workbench")))


@dataclass(eq=False, repr=False)
class KernelError(RuntimeError):
    """The error of a kernel."""

    kernel: str
    line: int  # in the cell or file, 0 if unknown
    code: str  # that line's text
    message: str
    cause: str = ""  # the name of the error's class
    file: str = ""  # the file's last two parts, '' for a cell

    def __str__(self) -> str:
        where = [self.kernel, *[f"line {self.line}"] * bool(self.line), *[f"`{self.code}`"] * bool(self.code)]
        return f"{', '.join(where)}: {self.message}"

    @property
    def sentence(self) -> str:
        """Says in a row of a report what was raised, and where."""
        place = f"{self.file}:{self.line}" if self.file and self.line else f"{self.kernel}, line {self.line}"
        said = self.message if self.message.startswith(self.cause) else f"{self.cause}: {self.message}"
        return f"{said} ({place})" if self.line else said

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


def kernel_error(error: BaseException) -> KernelError | None:
    """Returns the error of the Triton kernel that `error` is, or came from; None if no kernel raised."""
    chain = [*_causes(error)]
    known = next((e for e in chain if isinstance(e, KernelError)), None)
    raised = [e for e in chain if _tritons(e)]
    if known or not raised:
        return known
    last, frames = chain[-1], [[*traceback.walk_tb(e.__traceback__)] for e in chain]
    text, cause = str(getattr(last, "error_message", None) or last).strip().splitlines(), type(last).__name__
    text = text or [cause]
    inner = next((e for e in reversed(raised) if hasattr(e, "node")), None)
    # the compiler's, or the interpreter's, where a KeyError's text is a key and no sentence
    name, line, code, file = _compiled(inner, sum(frames, [])) if inner else _interpreted(frames)
    message = text[-1] if inner or " " in text[-1] else f"{cause}: {text[-1]}"
    return KernelError(name, line, code, message, cause, _short(file))


def _short(file: str) -> str:
    """Returns the last two parts of a file's path; '' for a notebook's cell."""
    return "/".join(Path(file).parts[-2:]) if Path(file).is_file() and "ipykernel" not in file else ""


def _tritons(error: BaseException) -> bool:
    return any(kind.__name__ == "TritonError" for kind in type(error).__mro__)


def line_of(kernel: FunctionType, name: str, at: int) -> int:
    """Returns the line in its file that is `at` lines below the def of `name`, which is the kernel or used by it."""
    return _place(kernel, name, at)[0]


def _place(kernel: FunctionType, name: str, at: int) -> tuple[int, str]:
    function = kernel if kernel.__name__ == name else _python_of(kernel.__globals__.get(name))
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return 0, ""
    above = next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
    return first + at + above, function.__code__.co_filename


def _python_of(jitted: object) -> object:
    """Returns the Python function of what Triton made of it."""
    while hasattr(jitted, "fn"):
        jitted = jitted.fn
    return jitted


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        hidden = error.__suppress_context__ and not _tritons(error)  # Triton's compiler raises `from None`
        error = error.__cause__ or (None if hidden else error.__context__)


def _compiled(error: BaseException, frames: Iterable[tuple[FrameType, int]]) -> tuple[str, int, str, str]:
    """Returns the function, the line in its file, that line and the file, as a CompilationError knows them: its `src`
    begins with the function's def. Triton takes its own frames out of the traceback, but not that of the launch."""
    lines, at = (error.src or "").splitlines(), getattr(error.node, "lineno", 0)
    if not 0 < at <= len(lines):
        return "kernel", 0, "", ""
    name = lines[0].removeprefix("def ").partition("(")[0]
    launched = (_python_of(frame.f_locals.get("self")) for frame, _ in frames)
    kernel = next((fn for fn in launched if isinstance(fn, FunctionType)), None)
    line, file = _place(kernel, name, at - 1) if kernel else (0, "")
    return name, line, lines[at - 1].strip(), file


def _interpreted(frames: Iterable[list[tuple[FrameType, int]]]) -> tuple[str, int, str, str]:
    """Returns the same of the innermost frame that is no library's: interpreted, a kernel is a Python function."""
    for frame, at in (place for places in reversed(frames) for place in reversed(places)):
        home = frame.f_globals.get("__name__", "")
        if not any(home == library or home.startswith(f"{library}.") for library in LIBRARIES):
            code = linecache.getline(frame.f_code.co_filename, at, frame.f_globals).strip()
            return frame.f_code.co_name, at, code, frame.f_code.co_filename
    return "kernel", 0, "", ""
