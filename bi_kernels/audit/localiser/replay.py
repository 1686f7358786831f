"""Keeps what some ops of a run were given, so that they can be run again without the model."""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bi_kernels.audit.localiser.watched.events import At, tensors_in
from bi_kernels.audit.localiser.watched.geometry import Reading


class Program:
    """Some ops of a run: their arguments, as views of pieces of memory, and what those held before."""

    def __init__(self, events: Iterable[At]):
        self.events = set(events)
        self.memory: list[torch.Tensor | None] = []  # bytes; None for what an op of the program makes
        self.ops: list[dict] = []
        self.result: dict | None = None
        self.rows: torch.Tensor | None = None  # of the result, that are compared; of all of it unless given
        self.reading = Reading("n", ())
        self.keys: torch.Tensor | None = None  # of scores: those that both runs have
        self.seen: torch.Tensor | None = None  # (rows, keys)
        self.modules: dict[str, str] = {}  # that define the kernels and custom ops: the file of each
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def _number(self, t: torch.Tensor, made: bool = False) -> int:
        storage = t.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known[0].expired():
            held = None if made else torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage).clone()
            self._known[storage._cdata] = known = StorageWeakRef(storage), len(self.memory)
            self.memory.append(held)
        return known[1]

    def view(self, t: torch.Tensor) -> dict:
        """Returns what a script needs to see `t`."""
        return {
            "memory": self._number(t),
            "dtype": t.dtype,
            "size": tuple(t.shape),
            "stride": t.stride(),
            "offset": t.storage_offset(),
        }

    def ends_in(self, t: torch.Tensor) -> None:
        """Names the tensor that the program's results are compared by."""
        self.result = self.view(t)

    def saved(self) -> dict:
        """Returns what the script loads."""
        own = {k: getattr(self, k) for k in ("memory", "ops", "result", "rows", "keys", "seen")}
        return own | {"dims": self.reading.dims, "split": self.reading.split}

    def _kept(self, value):
        if isinstance(value, torch.Tensor):
            return self.view(value)
        if isinstance(value, torch.memory_format | torch.layout):
            return {"attribute": str(value).removeprefix("torch.")}
        if hasattr(value, "block_shape"):  # a TMA descriptor, of Triton or of Gluon
            descriptor = copy(value)
            descriptor.base = None
            return {"descriptor": descriptor, "of": self.view(value.base)}
        if isinstance(value, list | tuple):
            return type(value)(map(self._kept, value)) if type(value) in (list, tuple) else list(map(self._kept, value))
        return {k: self._kept(v) for k, v in value.items()} if type(value) is dict else value

    def before(self, target, args: tuple, kwargs: dict) -> Callable[[list], None]:
        """Keeps the arguments of an op; returns what is to be told of its results."""
        if isinstance(target, JITFunction | InterpretedFunction):
            fn = target.fn
            grid = kwargs["grid"]
            if callable(grid):
                grid = grid({**dict(zip(inspect.signature(fn).parameters, args)), **kwargs})
            more = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
            op = {"kernel": (fn.__module__, fn.__qualname__), "grid": tuple(grid)}
            self.modules[fn.__module__] = inspect.getsourcefile(fn) or ""
            args, kwargs = args, more
        else:
            name, overload = str(target.name()).partition(".")[::2]
            op = {"op": (*name.split("::"), overload or "default")}
            defined = torch._library.custom_ops.OPDEFS.get(name)
            if defined is not None:
                home = defined._init_fn.__module__
                self.modules[home] = getattr(sys.modules.get(home), "__file__", "") or ""
        op |= {"args": self._kept(tuple(args)), "kwargs": self._kept(dict(kwargs))}
        self.ops.append(op)
        given = [*tensors_in(args), *tensors_in(kwargs)]

        def after(results: Sequence[torch.Tensor]) -> None:
            op["results"] = [None if any(t is g for g in given) else self._number(t, made=True) for t in results]

        return after


class Tape:
    """The programs that a run is to keep. ends: for an event, what reads a program's result before or after it."""

    def __init__(self, programs: Sequence[Program]):
        self.programs = programs

    def before(self, at: At, target, args: tuple, kwargs: dict) -> list[Callable]:
        return [p.before(target, args, kwargs) for p in self.programs if at in p.events]


def reach(modules: dict[str, str], folder: Path) -> list[tuple[str, str]]:
    """Returns (module, the file to load it from, or the folder to find it in) for those that are not installed."""
    found = []
    for name, file in modules.items():
        top = name.partition(".")[0]
        if not file or "site-packages" in file or top == "bi_kernels":
            found.append((name, ""))
        elif name == "__main__" or name.startswith("candidate_"):
            found.append((name, str(Path(file).resolve())))
        else:
            found.append(
                (name, str(Path(file).resolve().parents[name.count(".") + (Path(file).name == "__init__.py")]))
            )
    return found
