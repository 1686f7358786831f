"""Records what a model runs: every aten op, custom op and Triton launch, with digests of what it reads and writes."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bi_kernels.audit.localiser.tracing.digest import digests
from bi_kernels.audit.localiser.tracing.events import OUTPUT, At, Edit, Event, Slot, Store, Wrote, kind_of, tensors_in
from bi_kernels.audit.localiser.tracing.geometry import Geometry
from bi_kernels.audit.localiser.tracing.source import place

SORTS = "sort", "argsort"
TAKES = "index", "index_select", "gather"
PUTS = "index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "index_copy", "index_copy_"


def in_backward() -> bool:
    """Tells whether the autograd engine is running."""
    return torch._C._current_graph_task_id() != -1


class Trace:
    """The events of one run of a layout. names: the modules' paths by id; own: the names of parameters and buffers by
    the storage that holds them; edits: what is done to tensors of events; programs: record some of the ops, as a
    script runs them (see script.Program)."""

    def __init__(
        self, names: dict[int, str], own: dict[int, str], edits: dict[At, list[Edit]], programs: Sequence = ()
    ):
        self.names, self.own, self.edits, self.programs = names, own, edits, programs
        self.events: list[list[Event]] = []
        self.geometry: Geometry | None = None
        self.stores: dict[int, Store] = {}
        self.nodes: dict[int, tuple[str, str]] = {}  # where each node of the autograd graph was made
        self.paused = True
        self.activations = 0  # bytes

    def begin(self, geometry: Geometry) -> None:
        """Begins a call."""
        self.geometry = geometry
        self.events.append([])

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self.paused = False
        try:
            yield
        finally:
            self.paused = True

    def store(self, t: torch.Tensor) -> Store:
        storage = t.untyped_storage()
        key = storage._cdata
        found = self.stores.get(key)
        if found is None or found.alive.expired():
            found = self.stores[key] = Store(StorageWeakRef(storage), self.own.get(key, ""))
        return found

    def slot(self, t: torch.Tensor, look: bool, written: bool = False) -> Slot:
        """Returns what is known of a tensor; look: whether to digest it."""
        store, floating = self.store(t), t.is_floating_point() or t.is_complex()
        slot = Slot(store.parameter, None, None, tuple(store.writers), floating, store.fresh)
        if store.parameter:
            slot.size = t.numel()
        elif store.grouped and len(t) == store.grouped:
            pass
        elif written or look and floating and not store.fresh:
            version = -1 if t.is_inference() else t._version
            if store.version != version:
                store.version = version
                store.found.clear()
            key = t.storage_offset(), t.shape, t.stride(), t.dtype, id(self.geometry)
            if key not in store.found:
                store.found[key] = digests(t.detach(), self.geometry, store.found)  # else it would be in the graph
            slot.digests = store.found[key]
        return slot

    def wrote(self, t: torch.Tensor, at: Wrote, whole: bool, grouped: int = 0) -> None:
        """Notes which event wrote a tensor; grouped: how many rows, sorted by expert, the event writes."""
        store = self.store(t)
        store.fresh = False
        if t.dim() and len(t) == grouped:
            store.grouped = grouped
        store.found.clear()
        if whole and t.numel() * t.element_size() == t.untyped_storage().nbytes():
            store.writers = [at]
        elif not store.writers or store.writers[-1] != at:
            store.writers.append(at)

    def note_node(self, path: str | None = None, source: str = "") -> None:
        """Notes where the newest node of the autograd graph was made."""
        number = torch._C._autograd._get_sequence_nr() - 1
        if number not in self.nodes:
            if not source:
                path, source, _ = place(self.names)
            self.nodes[number] = path or "", source

    def event(self, op: str, inputs: list[Slot], launch: bool = False) -> tuple[Event, At]:
        path, source, compiled = place(self.names)
        phase, node = "forward", ""
        if in_backward():
            running = torch._C._current_autograd_node()
            phase, node = "backward", type(running).__name__ if running is not None else ""
            number = running._sequence_nr() if running is not None else -1  # an update through a view has two nodes
            known = self.nodes.get(number) or self.nodes.get(number - 1, ("", ""))
            path, source = known[0] if path is None else path, source or known[1]
        else:
            self.note_node(path, source)
        compiled = compiled or node.startswith("CompiledFunction")
        event = Event(phase, path or "", "compiled " * compiled + op, source, node, inputs, launch=launch)
        at = self.next()
        self.events[-1].append(event)
        return event, at

    def next(self) -> At:
        return len(self.events) - 1, len(self.events[-1])

    def edit(self, at: At, io: str, tensors: list[torch.Tensor]) -> None:
        for e in self.edits.get(at, ()):
            if e.io == io:
                e.change(tensors[e.slot])
                self.store(tensors[e.slot]).found.clear()

    def operator(self, func, args: tuple, kwargs: dict):
        """Runs an operator of torch."""
        kind = kind_of(func)
        if kind.written is None:
            if not in_backward():
                self.note_node()
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
        self.edit(self.next(), "in", given)
        numbers = any(t.is_floating_point() or t.is_complex() for t in given)
        event, at = self.event(kind.op, [self.slot(t, numbers) for t in given])
        grouped = self._sorted(func._schema.name.partition("::")[2], given)
        out = self._run(at, func, args, kwargs, lambda: func(*args, **kwargs))
        named = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        changed = tensors_in([named.get(k) for k in kind.written])
        made = [t for t in tensors_in(out) if all(t is not c for c in changed)]
        tensors, numbers = changed + made, numbers or not given
        self.edit(at, "out", tensors)
        for k, t in enumerate(tensors):
            self.wrote(t, (*at, k), k >= len(changed) or t.is_contiguous(), grouped)
            slot = self.slot(t, False, written=numbers or t.is_floating_point())
            event.outputs.append(slot)
            if event.phase == "forward" and slot.digests and slot.digests[0].form != "n":
                self.activations += t.numel() * t.element_size()
        return out

    def _run(self, at: At, target, args: tuple, kwargs: dict, run: Callable):
        records = [program.record(target, args, kwargs) for program in self.programs if at in program.events]
        out = run()
        for record in records:
            record(out)
        return out

    def output(self, tensors: list[torch.Tensor], phase: str = "forward") -> None:
        """Notes what a call returned, or the gradients of its inputs, as if an op had read them."""
        at = self.next()
        self.edit(at, "in", [t.detach() for t in tensors] if at in self.edits else tensors)
        self.events[-1].append(Event(phase, "", OUTPUT, "", "", [self.slot(t, True) for t in tensors]))

    def _sorted(self, op: str, given: list[torch.Tensor]) -> int:
        """Returns how many rows, sorted by expert, an op of torch writes: as many as it reads, but for a sort of
        integers and for what moves rows by its indices, into that order or out of it."""
        rows = [self.store(t).grouped * (t.dim() > 0 and len(t) == self.store(t).grouped) for t in given]
        if op in SORTS and given[0].dim() == 1 and not given[0].is_floating_point():
            return len(given[0])
        if op not in TAKES and op not in PUTS:
            return max(rows, default=0)
        moved, *indices = rows if op in TAKES else (rows[-1], *rows[1:-1])
        return 0 if moved else max(indices, default=0)

    def _grouped(self, given: list[torch.Tensor], kernel) -> int:
        """Returns how many rows, sorted by expert, a kernel writes: as many as it reads, but for those that move rows
        between tokens and experts."""
        read = [self.store(t).grouped for t in given if t.dim() > 1 and t.is_floating_point()]
        if kernel.__module__ != "bi_kernels.ops.grouped.rows":
            return max(read, default=0)
        if kernel.__name__ == "_gather_kernel":
            to_tokens = read[0] and len(given) == 3  # without the end of a fold's places
            return 0 if to_tokens else len(given[-1])
        return 0 if kernel.__name__ == "_combine_kernel" else len(given[1])

    def launch(self, kernel, run: Callable, args: tuple, kwargs: dict):
        """Runs a Triton kernel; digests each of its floating tensors before and after: what is the same was only read.
        Integers are compared at once."""
        given = tensors_in(args) + tensors_in(kwargs)
        self.edit(self.next(), "in", given)
        event, at = self.event(kernel.fn.__name__, [self.slot(t, True) for t in given], launch=True)
        integers = {
            k: given[k].clone() for k, s in enumerate(event.inputs) if not (s.floating or s.fresh or s.parameter)
        }
        grouped = self._grouped(given, kernel.fn)
        result = self._run(at, kernel, args, kwargs, run)
        self.edit(at, "out", given)
        for k, (t, before) in enumerate(zip(given, event.inputs)):
            if before.parameter or k in integers and integers[k].equal(t):
                event.outputs.append(replace(before))
                continue
            self.wrote(t, (*at, k), False, grouped if t.is_floating_point() else 0)
            event.outputs.append(self.slot(t, True, written=t.is_floating_point()))
            if event.phase == "forward" and before.fresh:
                self.activations += t.numel() * t.element_size()
        return result


def _mode(trace: Trace) -> TorchDispatchMode:
    compiles = "torch._dynamo" in sys.modules  # torch.compile may be at work, and must leave the mode alone

    class TracingMode(TorchDispatchMode):
        _should_skip_dynamo = classmethod(lambda cls: compiles)
        ignore_compile_internals = classmethod(lambda cls: True)  # what is compiled stays compiled

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if trace.paused or not isinstance(func, torch._ops.OpOverload):
                return func(*args, **(kwargs or {}))
            trace.paused = True
            try:
                return trace.operator(func, args, kwargs or {})
            finally:
                trace.paused = False

    return TracingMode()


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Makes what runs inside known to `trace`, which records it while it is not paused."""

    def traced(kind):
        def run(self, *args, **kwargs):
            if trace.paused or kwargs.get("warmup"):
                return stock[kind](self, *args, **kwargs)
            trace.paused = True
            try:
                with torch._C._DisableTorchDispatch():  # else the mode would see each op of a digest
                    return trace.launch(self, lambda: stock[kind](self, *args, **kwargs), args, kwargs)
            finally:
                trace.paused = False

        return run

    stock = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}
    with contextlib.ExitStack() as undo:
        for kind in stock:
            undo.callback(setattr, kind, "run", stock[kind])
            kind.run = traced(kind)
        undo.enter_context(_mode(trace))
        yield
