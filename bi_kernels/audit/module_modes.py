"""The modes in which a module may be called: train() and eval(), gradients or none, hooks, patched forwards, and which
call it is. Each is a context, which leaves the module as it was."""

import contextlib
import copy
import copyreg
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from unittest.mock import patch

import torch
from torch import nn

GIVEN, NTH = "given", "call"  # the module as it is; and, as in call:40, after so many calls, this one included
HOOKS = [f"_{way}_{kind}" for way in ("forward", "backward") for kind in ("hooks", "pre_hooks")]
HOOKS += ["_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"]


@contextlib.contextmanager
def training(module: nn.Module, trains: bool) -> Iterator[None]:
    """Puts a module into train() or eval()."""
    before = {m: m.training for m in module.modules()}
    try:
        module.train(trains)
        yield
    finally:
        for m, was in before.items():
            m.training = was


@contextlib.contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    """Gives each module two forward hooks that change nothing, as a profiler or a logger does."""
    handles = [m.register_forward_hook(lambda *_: None) for m in module.modules()]
    handles += [m.register_forward_pre_hook(lambda *_: None) for m in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def unhooked(module: nn.Module) -> Iterator[None]:
    """Takes every hook off a module, and off the modules in it."""
    found = [getattr(m, name) for m in module.modules() for name in HOOKS]
    before = [dict(hooks) for hooks in found]
    try:
        for hooks in found:
            hooks.clear()
        yield
    finally:
        for hooks, held in zip(found, before):
            hooks.update(held)


@contextlib.contextmanager
def unpatched(module: nn.Module) -> Iterator[None]:
    """Takes off the forward that a module, or one in it, was given in place of its class's."""
    patched = [(m, m.__dict__.pop("forward")) for m in module.modules() if "forward" in m.__dict__]
    try:
        yield
    finally:
        for m, forward in patched:
            m.forward = forward


OF_GRADIENTS = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
MODES: dict[str, Callable[[nn.Module], AbstractContextManager]] = {
    GIVEN: lambda module: contextlib.nullcontext(),
    **{name: lambda module, enter=enter: enter() for name, enter in OF_GRADIENTS.items()},
    "train": lambda module: training(module, True),
    "eval": lambda module: training(module, False),
    "hooks": hooked,
    "no_hooks": unhooked,
    "no_patches": unpatched,
}


def read_mode(mode: str) -> tuple[str, int]:
    """Returns the name of a mode in MODES, and which call it is. Raises ValueError for any other."""
    name, _, number = mode.partition(":") if isinstance(mode, str) else ("", "", "")
    if name == NTH and number.isdecimal() and int(number):
        return GIVEN, int(number)
    if mode not in MODES:
        raise ValueError(f"modes holds {mode!r}, expected {', '.join(MODES)} or {NTH}:NUMBER")
    return mode, 1


def copied(module: nn.Module) -> nn.Module:
    """Returns a copy that shares the parameters, so that what calls leave in one is not in the other; and what cannot
    be copied, such as a lock. Raises what copy.deepcopy raises."""
    itself = lambda of_python: of_python.__name__  # for a name, deepcopy returns what has it
    shared = {id(p): p for p in module.parameters()}
    with patch.dict(copyreg.dispatch_table, {ModuleType: itself}):
        with contextlib.suppress(Exception):
            return copy.deepcopy(module, dict(shared))
        for m in module.modules():
            for name, value in vars(m).items():
                own = name in ("_modules", "_parameters") or isinstance(getattr(value, "__self__", None), nn.Module)
                try:
                    own or copy.deepcopy(value, dict(shared))
                except Exception:
                    shared[id(value)] = value
        return copy.deepcopy(module, shared)
