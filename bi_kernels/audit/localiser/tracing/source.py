"""Finds which module called an op, and from which line of the user's code."""

import sys
import traceback
from functools import cache
from pathlib import Path
from types import CodeType

import torch

PACKAGE = Path(__file__).parents[3]
FOLDERS = Path(torch.__file__).parent, *(PACKAGE / k for k in ("ops", "interpreter", "audit/localiser", "audit/static"))
LIBRARY = tuple(f"{folder}/" for folder in FOLDERS) + ("<frozen",)
LIBRARY += tuple(str(PACKAGE / f"{name}.py") for name in ("tokens", "grads", "checks", "eager"))
SKIP, USER, MODULE, COMPILED, STOP = range(5)


@cache
def _kind(code: CodeType) -> int:
    file, name = code.co_filename, code.co_name
    if name == "_run_the_model" or file.endswith("torch/autograd/graph.py") and name == "_engine_run_backward":
        return STOP
    if file.startswith("<eval_with_key>") or name == "compile_wrapper" or "torchinductor_" in file:
        return COMPILED
    if file.endswith("torch/nn/modules/module.py") and name == "_call_impl":
        return MODULE
    generated = file.startswith("<") and not file.startswith(("<ipython", "<stdin", "<string"))
    return SKIP if generated or file.startswith(LIBRARY) or "/triton/" in file else USER


def _shown(file: str) -> str:
    parts = Path(file).parts
    return "/".join(parts[-3:] if "site-packages" in parts else parts[-2:])


def place(names: dict[int, str]) -> tuple[str | None, str, bool]:
    """Returns the path of the module that called an op, the line, and whether torch.compile's code did, as the stack
    has them, from the op outwards; names: the path of each module, by its id."""
    frame, path, source, compiled = sys._getframe(2), None, "", False
    while frame is not None and not (source and path is not None):  # compiled code lies further in
        kind = _kind(frame.f_code)
        if kind == STOP:
            break
        if kind == USER and not source:
            source = f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"
        elif kind == COMPILED:
            compiled = True
        elif kind == MODULE and path is None:
            path = names.get(id(frame.f_locals.get("self")))
        frame = frame.f_back
    return path, source, compiled


def raised_at(error: Exception) -> str:
    """Returns the last line of the user's code that an error came through."""
    mine = [at for at in traceback.walk_tb(error.__traceback__) if _kind(at[0].f_code) == USER]
    return f", {_shown(mine[-1][0].f_code.co_filename)}:{mine[-1][1]}" if mine else ""
