"""What is audited: `bi_kernels`, `torch`, `package.module:function` or `path/to/file.py:function`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import bi_kernels
from bi_kernels.audit import stock
from bi_kernels.audit.registry import OPS, Op, audited

REGISTERED = ("bi_kernels", "torch")


@dataclass(frozen=True)
class Candidate:
    spec: str
    functions: dict[str, Callable]  # by op name


def signature_of(function: Callable) -> inspect.Signature | None:
    """Returns the signature of a callable, or of a module's forward; None where it has none."""
    try:
        return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):
        return None


def load(spec: str, what: str = "candidate") -> Callable:
    module, _, name = spec.rpartition(":") if isinstance(spec, str) else ("", "", "")
    if not module or not name:
        raise ValueError(
            f"{what} is {spec!r}, expected one of {', '.join(REGISTERED)}, package.module:function or "
            "path/to/file.py:function"
        )
    in_file = module.endswith(".py")
    if in_file and not Path(module).is_file():
        raise ValueError(f"{what} {spec!r}: no file {module}")
    try:
        if in_file:
            found = importlib.util.spec_from_file_location(f"candidate_{Path(module).stem}", module)
            loaded = importlib.util.module_from_spec(found)
            sys.modules[found.name] = loaded  # Triton and inspect look a kernel's module up by name
            found.loader.exec_module(loaded)
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")
            loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        said = str(error).partition("\n")[0]
        raise ValueError(f"{what} {spec!r}: cannot import {module} ({type(error).__name__}: {said})") from None
    function = getattr(loaded, name, None)
    if not callable(function):
        raise ValueError(f"{what} {spec!r}: {module} has no function {name}")
    if isinstance(function, type):
        raise ValueError(
            f"{what} {spec!r} is a class, expected a function or an object that can be called, as of op = {name}(…) "
            "in its file"
        )
    return function


def resolve(spec: str, audit: str, op: str = "") -> Candidate:
    """Returns the candidate's function for each op of the audit that it stands for.

    A single function stands for the op named by `op`, else for the op of the function's own name, else for `linear` in
    the GEMM audit. Raises ValueError with one sentence if that leaves nothing.
    """
    ops = {o.name: o.function or o.name for o in audited(audit)}
    if op and op not in ops:
        raise ValueError(f"op is {op!r}, expected one of {', '.join(ops)} in the {audit} audit")
    if spec in REGISTERED:
        source = stock if spec == "torch" else bi_kernels
        return Candidate(spec, {k: getattr(source, name) for k, name in ops.items() if op in ("", k)})
    function = load(spec)
    name = op or spec.rpartition(":")[2]
    if name not in ops:
        if audit != "gemm":
            raise ValueError(
                f"candidate {spec!r}: which op it is must be said with -p op NAME; the {audit} audit has "
                f"{', '.join(ops)}"
            )
        name = "linear"
    check_arguments(spec, OPS[name], function)
    return Candidate(spec, {name: function})


def check_arguments(spec: str, op: Op, function: Callable) -> None:
    """Raises ValueError where a candidate's signature does not take what every call of an op is given."""
    tensors, told = list(op.order or (*op.tokens, *op.shared)), set(op.constants)
    told |= {"table", "positions", "cu_seqlens"} if op.positions else {"cu_seqlens_q"} if op.cache else set()
    told |= {"dtype"} if op.casts else set()
    if (signature := signature_of(function)) is None:
        return
    try:
        signature.bind(*tensors, **dict.fromkeys(told))
    except TypeError as error:
        call = ", ".join([*tensors, *(f"{k}=…" for k in sorted(told))])
        takes = ", ".join(map(str, signature.parameters.values())) or "nothing"
        raise ValueError(
            f"candidate {spec!r} takes {takes}, expected the arguments of {op.name}, ({call}): {error}"
        ) from None
