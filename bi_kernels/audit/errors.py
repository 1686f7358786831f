"""A Triton kernel's error in one line: its own last sentence, and where in the kernel it arose.

Triton's compiler begins with "at 5:10:" and quotes the source; its interpreter wraps an error once a function. What
went wrong is said last, by the innermost error.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

NOT_A_KERNEL = "triton", "numpy", "torch", "bi_kernels.interpreter"  # packages whose frames are not a kernel's


def kernel_error(error: BaseException) -> str:
    """Returns what a Triton kernel raised, and its file and line; '' for an error that no kernel raised."""
    chain = [*_causes(error)]
    triton = [e for e in chain if any(kind.__name__ == "TritonError" for kind in type(e).__mro__)]
    if not triton:
        return ""
    last = chain[-1]
    lines = str(getattr(last, "error_message", None) or last).strip().splitlines()
    said = f"{type(last).__name__}: {lines[-1].strip()}" if lines else type(last).__name__
    compiled = [e for e in triton if hasattr(e, "node")]
    place = _compiled_at(compiled[-1], chain) if compiled else _interpreted_at(chain)
    return f"{said} ({place})" if place else said


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _frames(error: BaseException) -> Iterator[tuple]:
    trace = error.__traceback__
    while trace:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _interpreted_at(chain: list[BaseException]) -> str:
    """Returns file:line of the innermost frame that is no library's: interpreted, a kernel is a Python function."""
    for error in reversed(chain):
        for frame, line in reversed([*_frames(error)]):
            home = frame.f_globals.get("__name__", "")
            if not any(home == package or home.startswith(f"{package}.") for package in NOT_A_KERNEL):
                return f"{_short(frame.f_code.co_filename)}:{line}"
    return ""


def _compiled_at(error: BaseException, chain: list[BaseException]) -> str:
    """Returns file:line of what the compiler was at: its line counts from the def of the function it quotes, which is
    the kernel that a frame launched, or one that this one calls."""
    source, at = (error.src or "").splitlines(), getattr(error.node, "lineno", 0)
    name = source[0].removeprefix("def ").partition("(")[0] if source else ""
    owners = (frame.f_locals.get("self") for e in chain for frame, _ in _frames(e))
    kernel = next((fn for owner in owners if isinstance(fn := _python_of(owner), FunctionType)), None)
    named = kernel is None or kernel.__name__ == name
    function = kernel if named else _python_of(kernel.__globals__.get(name))
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return f"{name}, line {at}" if name and at else ""
    above = next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
    return f"{_short(function.__code__.co_filename)}:{first + above + at - 1}"


def _python_of(jitted: object) -> object:
    """Returns the Python function of what Triton made of it."""
    while hasattr(jitted, "fn"):
        jitted = jitted.fn
    return jitted


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])
