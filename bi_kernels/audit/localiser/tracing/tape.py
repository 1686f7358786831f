"""Keeps the arguments of some ops of a run, so that they can be run again without the model."""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bi_kernels.audit.localiser.tracing.events import At, tensors_in
from bi_kernels.audit.localiser.tracing.geometry import Reading


class View(NamedTuple):
    """A tensor, as a view of a piece of memory."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Descriptor(NamedTuple):
    """A TMA descriptor, of Triton or of Gluon, without its tensor."""

    rest: object
    of: View


@dataclass
class Op:
    """An op that was called. name: in torch.ops, or in the module of a kernel, whose grid is not None then; args,
    kwargs: with a View for each tensor; results: a View for each new one, None for others."""

    name: str
    module: str
    grid: tuple[int, ...] | None
    random: bool
    args: tuple
    kwargs: dict
    results: View | list[View | None] | None = None


class Program:
    """Some ops of a run. memory: what pieces of memory held before, as bytes, None for what an op of the program makes;
    rows: of the result, that are compared, None for all; keys: of scores, those that both runs have, and seen: by which
    rows; modules: the file of each that defines a kernel or custom op."""

    def __init__(self, events: Iterable[At]):
        self.events = set(events)
        self.memory: list[torch.Tensor | None] = []
        self.ops: list[Op] = []
        self.result: View | None = None
        self.rows: torch.Tensor | None = None
        self.reading = Reading("n", ())
        self.keys: torch.Tensor | None = None
        self.seen: torch.Tensor | None = None
        self.modules: dict[str, str] = {}
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def _view(self, t: torch.Tensor, made: bool = False) -> View:
        storage = t.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known[0].expired():
            held = None if made else torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage).clone()
            self._known[storage._cdata] = known = StorageWeakRef(storage), len(self.memory)
            self.memory.append(held)
        return View(known[1], t.dtype, tuple(t.shape), t.stride(), t.storage_offset())

    def ends_in(self, t: torch.Tensor) -> None:
        """Names the tensor that the program's results are compared by."""
        self.result = self._view(t)

    def _kept(self, value):
        if isinstance(value, torch.Tensor):
            return self._view(value)
        if hasattr(value, "block_shape"):
            rest = copy(value)
            rest.base = None
            return Descriptor(rest, self._view(value.base))
        if isinstance(value, list | tuple):
            return (tuple if type(value) is tuple else list)(map(self._kept, value))
        return {k: self._kept(v) for k, v in value.items()} if type(value) is dict else value

    def before(self, target, args: tuple, kwargs: dict) -> Callable[[object], None]:
        """Keeps the arguments of an op; returns what keeps its results."""
        grid, random = None, False
        if isinstance(target, JITFunction | InterpretedFunction):
            fn, grid = target.fn, kwargs["grid"]
            if callable(grid):
                grid = grid({**dict(zip(inspect.signature(fn).parameters, args)), **kwargs})
            kwargs = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
            name, module, grid = fn.__qualname__, fn.__module__, tuple(grid)
            self.modules[module] = inspect.getsourcefile(fn) or ""
        else:
            namespace, name = target._schema.name.split("::")
            name = f"{namespace}.{name}.{target._overloadname}"
            random = torch.Tag.nondeterministic_seeded in target.tags
            defined = torch._library.custom_ops.OPDEFS.get(target._schema.name)
            module = defined._init_fn.__module__ if defined is not None else ""
            if module:
                self.modules[module] = getattr(sys.modules.get(module), "__file__", "") or ""
        op = Op(name, module, grid, random, self._kept(tuple(args)), self._kept(dict(kwargs)))
        self.ops.append(op)
        given = [*tensors_in(args), *tensors_in(kwargs)]

        def new(t: object) -> View | None:
            mine = isinstance(t, torch.Tensor) and all(t is not g for g in given)
            return self._view(t, made=True) if mine else None

        def after(out: object) -> None:
            op.results = [new(t) for t in out] if isinstance(out, list | tuple) else new(out)

        return after


class Tape:
    """The programs that a run keeps."""

    def __init__(self, programs: Sequence[Program]):
        self.programs = programs

    def before(self, at: At, target, args: tuple, kwargs: dict) -> list[Callable[[object], None]]:
        return [p.before(target, args, kwargs) for p in self.programs if at in p.events]
