"""Runs the calls of a layout, forward and backward, traced or not."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import nn

from bi_kernels.audit.findings import sentence
from bi_kernels.audit.kernel_error import kernel_error
from bi_kernels.audit.localiser.tracing.digest import whole
from bi_kernels.audit.localiser.tracing.events import At, Event, Wrote, named_tensors
from bi_kernels.audit.localiser.tracing.geometry import Geometry, Tokens, flat_rows, write_rows
from bi_kernels.audit.localiser.tracing.layouts import Plan
from bi_kernels.audit.localiser.tracing.source import raised_at
from bi_kernels.audit.localiser.tracing.trace import Trace, tracing
from bi_kernels.audit.module_modes import GIVEN, MODES, OF_GRADIENTS, read_mode
from bi_kernels.grads import MainGrads
from bi_kernels.model import Decoder

FOLDED = "main_grad", "embedding_main_grad"  # attributes of parameters


@dataclass
class Run:
    """What one layout, or mode, did: for each call its geometry and events; digests of parameters, and of their
    gradients with the events that wrote them; buffers: their digests before the first call, of a mode; kept: the
    gradients that were asked for; outputs: the names of what a call returned."""

    layout: str
    tokens: Tokens
    geometries: list[Geometry]
    events: list[list[Event]]
    weights: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, tuple[int, tuple[Wrote, ...]]] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    seconds: float = 0.0
    digest_bytes: int = 0
    activation_bytes: int = 0

    def at(self, at: At) -> Event:
        return self.events[at[0]][at[1]]


def _run_the_model(function: Callable):
    """Calls; the stack is read up to here."""
    return function()


def _called(function: Callable, what: str, layout: str):
    """Calls the user's function. Raises ValueError, which says where it raised."""
    try:
        return _run_the_model(function)
    except Exception as error:
        said, cause = sentence(error).rstrip(": "), kernel_error(error) or error  # it may quote a kernel
        raise ValueError(f"{what} raised in layout {layout!r}{raised_at(error)}: {said}") from cause


def upstream(t: torch.Tensor, geometry: Geometry, seed: int) -> torch.Tensor:
    """Returns a gradient for an output: each token's own, whatever the layout; divided by the step's tokens."""
    reading, tokens = geometry.readings(t.shape)[0], geometry.tokens
    kinds = geometry.kinds(reading.form)
    if not {"t", "s"} & {*kinds}:
        return torch.full_like(t, 1.0)
    at, row = geometry.places_on(reading.form, t.device)
    if "t" not in kinds:
        starts = np.cumsum([0, *tokens.lengths])[tokens.samples()]  # the first token of each sample
        at = torch.from_numpy(starts).to(t.device)[at]
    out = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    g = torch.Generator(t.device).manual_seed(seed)
    features = flat_rows(out, reading).shape[1]
    drawn = torch.randn(tokens.count, features, generator=g, device=t.device) / tokens.count
    write_rows(out, reading, row, drawn[at])
    return out


def _of_loss(loss: Callable, out, geometry: Geometry, device, layout: str) -> torch.Tensor:
    """Returns the loss of a call, a value a token; it is given the sample and position of each place, −1 for padding,
    as (rows, width, 2)."""
    grid, tokens = geometry.grid, geometry.tokens
    of_place = [np.where(grid >= 0, a[np.maximum(grid, 0)], -1) for a in (tokens.samples(), tokens.positions())]
    out = _called(partial(loss, out, torch.from_numpy(np.stack(of_place, -1)).to(device)), "the loss", layout)
    tensor = isinstance(out, torch.Tensor)
    if not tensor or not any("t" in geometry.kinds(r.form) for r in geometry.readings(out.shape)):
        got = f"shape {tuple(out.shape)}" if tensor else f"a {type(out).__name__}"
        raise ValueError(f"loss returned {got}, expected a value a token, {grid.shape}")
    return out


@contextlib.contextmanager
def _restored(module: nn.Module | None) -> Iterator[None]:
    """Restores gradients, buffers and random generators on exit."""
    parameters, buffers = ([*module.parameters()], [*module.buffers()]) if module is not None else ([], [])
    before, values = [p.grad for p in parameters], [b.detach().clone() for b in buffers]
    folded = [{k: p.__dict__.pop(k) for k in FOLDED if k in p.__dict__} for p in parameters]
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            for p in parameters:
                p.grad = None
            yield
        finally:
            for p, grad, attributes in zip(parameters, before, folded):
                p.grad = grad
                for k in FOLDED:
                    p.__dict__.pop(k, None)
                p.__dict__.update(attributes)
            with torch.no_grad():
                for b, value in zip(buffers, values):
                    b.copy_(value)


def step(
    model,
    plan: Plan,
    loss: Callable | None,
    backward: bool,
    seed: int,
    edits: dict | None = None,
    programs: Sequence = (),
    traced: bool = True,
    keep: Collection[str] = (),
    mode: str = "",
) -> Run:
    """Runs a layout; edits: of events, by where they are; traced=False: as the user's own code would; keep: the
    parameters whose gradients the run holds; mode: of module_modes, in which the model is called."""
    module = model if isinstance(model, nn.Module) else None
    backward, (name, number) = backward and plan.trains, read_mode(mode or GIVEN)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_restored(module))
        stack.enter_context(torch.set_grad_enabled(backward))
        if module is not None or name in OF_GRADIENTS:
            stack.enter_context(MODES[name](module))
        for _ in range(number - 1):
            for call in plan.calls():
                _called(call.run, "the model", plan.layout)
        parameters, buffers, modules = ({}, {}, {})
        if module is not None:  # as it is now: a call may make some
            parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
            modules = dict(module.named_modules())
        own = parameters | buffers
        names = {id(m): name.replace("_orig_mod.", "").removesuffix("_orig_mod") for name, m in modules.items()}
        trace = Trace(names, {t.untyped_storage()._cdata: name for name, t in own.items()}, edits or {}, programs)
        device = next((t.device for t in own.values()), torch.device("cpu"))
        run = Run(plan.layout, plan.tokens, [], trace.events)
        run.buffers = {k: int(whole(b)) for k, b in buffers.items() if mode and b.numel()}
        started = perf_counter()
        if traced:
            stack.enter_context(tracing(trace))
        torch.manual_seed(seed)
        grads = MainGrads(model.parameters(), model.tied) if backward and isinstance(model, Decoder) else None
        for call in plan.calls():
            run.geometries.append(call.geometry)
            trace.begin(call.geometry)
            with trace.recording():
                out = _called(call.run, "the model", plan.layout)
                if loss is not None:
                    out = _of_loss(loss, out, call.geometry, device, plan.layout)
                named = [*named_tensors(out)]
            run.outputs, found = [name for name, _ in named], [t for _, t in named]
            if traced:
                trace.output(found)
            ends = [t for t in found if t.requires_grad]
            if backward and ends:
                given = [upstream(t, call.geometry, seed + 1 + i) for i, t in enumerate(ends)]
                with trace.recording():
                    _run_the_model(partial(torch.autograd.backward, ends, given))
            if traced and any(t.grad is not None for t in call.leaves):
                trace.output([t.grad for t in call.leaves if t.grad is not None], "backward")
            del out, named, found, ends
        if grads:
            with trace.recording():
                grads.join()
        if traced and backward:
            held = {n: getattr(p, "main_grad", p.grad) for n, p in parameters.items()}
            held = {n: g for n, g in held.items() if g is not None}
            run.gradients = {n: (whole(g), tuple(trace.store(g).writers)) for n, g in held.items()}
            run.kept = {n: held[n] for n in keep}
    run.activation_bytes = trace.activations
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    run.seconds = perf_counter() - started
    return run


def freeze(run: Run, weights: dict[str, torch.Tensor] | None = None) -> Run:
    """Brings every digest to the host, in one transfer, and forgets the writers of a tensor that left it as it was.
    weights: tensors of the model to digest, too."""
    slots = [s for events in run.events for e in events for s in (*e.inputs, *e.outputs) if s.digests]
    held = {id(d.rows): d.rows for s in slots for d in s.digests}
    every = [*held.values(), *(g for g, _ in run.gradients.values()), *map(whole, (weights or {}).values())]
    flat = torch.cat(every).cpu().numpy() if every else np.zeros(0, np.int64)
    parts = np.split(flat, np.cumsum([len(t) for t in every])[:-1])
    on_host = dict(zip(held, parts))
    run.digest_bytes = 8 * sum(map(len, held.values()))
    for s in slots:
        s.digests = tuple(d._replace(rows=on_host[id(d.rows)]) for d in s.digests)
    changed = lambda writers: tuple(w for w in writers if not run.at(w[:2]).left(w[2]))
    for events in run.events:
        for s in (s for e in events for s in (*e.inputs, *e.outputs)):
            s.writers = changed(s.writers)
    tail = [int(p[0]) for p in parts[len(held) :]] if every else []
    run.gradients = {k: (d, changed(w)) for d, (k, (_, w)) in zip(tail, run.gradients.items())}
    run.weights = dict(zip(weights or {}, tail[len(run.gradients) :]))
    return run
