"""Watches what a model runs: every aten op, custom op and Triton launch, with digests of what it reads and writes."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bi_kernels.audit.localiser.watched.digest import digests
from bi_kernels.audit.localiser.watched.events import OUTPUT, At, Edit, Event, Slot, Store, Wrote, kind_of, tensors_in
from bi_kernels.audit.localiser.watched.frames import place
from bi_kernels.audit.localiser.watched.geometry import Geometry
from bi_kernels.audit.localiser.watched.writes import only_read


class Watched:
    """One run of a layout: its events, and what it needs to see them. names: the modules' paths by id; own: the names
    of parameters and buffers by the storage that holds them."""

    def __init__(self, names: dict[int, str], own: dict[int, str], edits: dict[At, list[Edit]], tape=None):
        self.names, self.own, self.edits, self.tape = names, own, edits, tape
        self.events: list[list[Event]] = []
        self.geometry: Geometry | None = None
        self.stores: dict[int, Store] = {}
        self.nodes: dict[int, tuple[str, str]] = {}
        self.paused = True
        self.activations = 0

    def begin(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.events.append([])

    def store(self, t: torch.Tensor) -> Store:
        storage = t.untyped_storage()
        key = storage._cdata
        found = self.stores.get(key)
        if found is None or found.alive.expired():
            found = self.stores[key] = Store(StorageWeakRef(storage), self.own.get(key, ""))
        return found

    def slot(self, t: torch.Tensor, look: bool, written: bool = False) -> Slot:
        store = self.store(t)
        name, numbers = store.parameter, t.is_floating_point() or t.is_complex()
        slot = Slot(name, t.numel() if name else None, None, tuple(store.writers), numbers, store.fresh)
        if name or not look or not numbers and not written or store.fresh and not written:
            return slot
        version = -1 if t.is_inference() else t._version
        if store.version != version:
            store.version = version
            store.found.clear()
        key = t.storage_offset(), t.shape, t.stride(), t.dtype, id(self.geometry)
        if key not in store.found:
            store.found[key] = digests(t.detach(), self.geometry, store.found)  # which would else be in the graph
        slot.digests = store.found[key]
        return slot

    def wrote(self, t: torch.Tensor, at: Wrote, whole: bool) -> None:
        store = self.store(t)
        store.fresh = False
        store.found.clear()
        if whole and t.numel() * t.element_size() == t.untyped_storage().nbytes():
            store.writers = [at]
        elif not store.writers or store.writers[-1] != at:
            store.writers.append(at)

    def made(self, path: str | None = None, source: str = "") -> None:
        """Notes where the newest node of the autograd graph was made."""
        number = torch._C._autograd._get_sequence_nr() - 1
        if number not in self.nodes:
            if not source:
                path, source, _ = place(self.names)
            self.nodes[number] = path or "", source

    def event(self, op: str, inputs: list[Slot]) -> tuple[Event, At]:
        where = place(self.names)
        path, source, node, phase = where.path, where.source, "", "forward"
        if torch._C._current_graph_task_id() == -1:
            self.made(path, source)
        else:
            running = torch._C._current_autograd_node()
            phase, node = "backward", type(running).__name__ if running is not None else ""
            number = running._sequence_nr() if running is not None else -1  # an update through a view has two nodes
            known = self.nodes.get(number) or self.nodes.get(number - 1, ("", ""))
            path, source = known[0] if path is None else path, source or known[1]
        compiled = where.compiled or node.startswith("CompiledFunction")
        event = Event(phase, path or "", f"compiled {op}" if compiled else op, source, node, inputs)
        events = self.events[-1]
        events.append(event)
        return event, (len(self.events) - 1, len(events) - 1)

    def edit(self, at: At, io: str, tensors: list[torch.Tensor]) -> None:
        for e in self.edits.get(at, ()):
            if e.io == io:
                e.change(tensors[e.slot])
                self.store(tensors[e.slot]).found.clear()

    def next(self) -> At:
        return len(self.events) - 1, len(self.events[-1])

    def operator(self, func, args: tuple, kwargs: dict):
        kind = kind_of(func)
        if kind.written is None:
            if torch._C._current_graph_task_id() == -1:
                self.made()
            if func._schema.is_mutable:  # a constant was written, of which no version tells in inference mode
                self.store(args[0]).found.clear()
            return func(*args, **kwargs)
        if kind.empty:
            out = func(*args, **kwargs)
            if out.numel():
                out.zero_()  # what a kernel leaves unwritten must not differ by chance
            self.store(out).fresh = True
            return out
        given = tensors_in(args) + tensors_in(kwargs)
        if self.edits:
            self.edit(self.next(), "in", given)
        numbers = any(t.is_floating_point() or t.is_complex() for t in given)
        inputs = [self.slot(t, numbers) for t in given]
        event, at = self.event(kind.op, inputs)
        records = self.tape.before(at, func, args, kwargs) if self.tape else ()
        out = func(*args, **kwargs)
        made, changed = tensors_in(out), []
        if kind.written:
            named = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
            changed = tensors_in([named.get(k) for k in kind.written])
            made = [t for t in made if all(t is not c for c in changed)]
        for record in records:
            record(out)
        self._outputs(event, at, changed + made, changed, numbers or not given)
        return out

    def _outputs(self, event: Event, at: At, tensors: list, changed: list, numbers: bool) -> None:
        self.edit(at, "keep", tensors)
        self.edit(at, "out", tensors)
        for k, t in enumerate(tensors):
            self.wrote(t, (*at, k), not changed or all(t is not c for c in changed) or t.is_contiguous())
            look = numbers or t.is_floating_point()
            slot = self.slot(t, look, written=look)
            event.outputs.append(slot)
            if event.phase == "forward" and slot.digests and slot.digests[0].form != "n":
                self.activations += t.numel() * t.element_size()

    def output(self, tensors: list[torch.Tensor], phase: str = "forward") -> None:
        """Notes what a call returned, or the gradients of what it was given, as if an op had read them."""
        at = self.next()
        self.edit(at, "in", [t.detach() for t in tensors] if at in self.edits else tensors)
        self.events[-1].append(Event(phase, "", OUTPUT, "", "", [self.slot(t, True) for t in tensors]))

    def launch(self, kernel, run: Callable, args: tuple, kwargs: dict):
        """Runs a Triton kernel; each of its tensors is looked at before, and after where it may have been written."""
        named = [(n, t) for n, v in (*zip(kernel.arg_names, args), *kwargs.items()) for t in tensors_in(v)]
        given = [t for _, t in named]
        self.edit(self.next(), "in", given)
        inputs = [self.slot(t, True) for t in given]
        event, at = self.event(kernel.fn.__name__, inputs)
        event.launch = True
        records = self.tape.before(at, kernel, args, kwargs) if self.tape else ()
        result = run()
        for record in records:
            record(None)
        self.edit(at, "keep", given)
        self.edit(at, "out", given)
        stores = [t.untyped_storage()._cdata for t in given]
        read = frozenset() if at in self.edits else only_read(kernel)
        written = {s for s, (n, _), before in zip(stores, named, inputs) if n not in read or before.fresh}
        for k, (t, before) in enumerate(zip(given, inputs)):
            if before.parameter:
                event.outputs.append(Slot(before.parameter, before.size))
                continue
            if stores[k] not in written:
                event.outputs.append(replace(before))
                continue
            self.wrote(t, (*at, k), False)
            event.outputs.append(self.slot(t, True, written=t.is_floating_point()))
            if event.phase == "forward" and before.fresh:
                self.activations += t.numel() * t.element_size()
        return result


@cache
def _mode(beside_dynamo: bool) -> type[TorchDispatchMode]:
    """Makes the mode; beside_dynamo: torch.compile may be at work, and must leave the mode alone."""

    class Watching(TorchDispatchMode):
        _should_skip_dynamo = classmethod(lambda cls: beside_dynamo)
        ignore_compile_internals = classmethod(lambda cls: True)  # what is compiled stays compiled

        def __init__(self, watched: Watched):
            super().__init__()
            self.watched = watched

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            w = self.watched
            if w.paused or not isinstance(func, torch._ops.OpOverload):
                return func(*args, **(kwargs or {}))
            w.paused = True
            try:
                return w.operator(func, args, kwargs or {})
            finally:
                w.paused = False

    return Watching


@contextlib.contextmanager
def watching(watched: Watched) -> Iterator[None]:
    """Records into `watched` what runs inside."""

    def of(kind):
        def run(self, *args, **kwargs):
            if watched.paused or kwargs.get("warmup"):
                return stock[kind](self, *args, **kwargs)
            watched.paused = True
            try:
                with torch._C._DisableTorchDispatch():  # the mode would be asked for each op of a digest
                    return watched.launch(self, lambda: stock[kind](self, *args, **kwargs), args, kwargs)
            finally:
                watched.paused = False

        return run

    stock = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}
    with contextlib.ExitStack() as undo:
        for kind in stock:
            undo.callback(setattr, kind, "run", stock[kind])
            kind.run = of(kind)
        undo.enter_context(_mode("torch._dynamo" in sys.modules)(watched))
        watched.paused = False
        undo.callback(setattr, watched, "paused", True)
        yield
