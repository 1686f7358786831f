"""Runs the calls of a layout, forward and backward, watched or not."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bi_kernels.audit.evidence.verdicts import sentence
from bi_kernels.audit.kernel_error import kernel_error
from bi_kernels.audit.localiser.watched.digest import Digest, whole
from bi_kernels.audit.localiser.watched.events import At, Event, Wrote
from bi_kernels.audit.localiser.watched.frames import raised_at
from bi_kernels.audit.localiser.watched.geometry import Geometry, Tokens, by_rows
from bi_kernels.audit.localiser.watched.plans import Plan
from bi_kernels.audit.localiser.watched.watch import Watched, watching


@dataclass
class Run:
    """What one layout did: for each call its geometry and events; digests of parameters, and of their gradients with
    the events that wrote them."""

    layout: str
    tokens: Tokens
    geometries: list[Geometry]
    events: list[list[Event]]
    weights: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, tuple[int, tuple[Wrote, ...]]] = field(default_factory=dict)
    seconds: float = 0.0
    digest_bytes: int = 0
    activation_bytes: int = 0

    def at(self, at: At) -> Event:
        return self.events[at[0]][at[1]]


def _run_the_model(function: Callable):
    """Calls; the stack is read up to here."""
    return function()


def _called(function: Callable, what: str, layout: str):
    """Calls what is the user's. Raises ValueError, which says where it raised."""
    try:
        return _run_the_model(function)
    except Exception as error:
        said, cause = sentence(error).rstrip(": "), kernel_error(error) or error  # it may quote a kernel
        raise ValueError(f"{what} raised in layout {layout!r}{raised_at(error)}: {said}") from cause


def upstream(t: torch.Tensor, geometry: Geometry, seed: int) -> torch.Tensor:
    """Returns a gradient for an output: of each token its own, whatever the layout; divided by the step's tokens."""
    reading = geometry.readings(t.shape)[0]
    kinds, tokens = geometry.kinds(reading.form), geometry.tokens
    if not {"t", "s"} & {*kinds}:
        return torch.full_like(t, 1.0)
    at, row = geometry.places(reading.form)
    if "t" not in kinds:
        first = np.cumsum([0, *tokens.lengths])
        at = first[tokens.samples()[at]]
    out = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    view = by_rows(out, reading)
    rows = out.new_zeros(view.shape[: len(reading.dims)].numel(), t.numel() // view.shape[: len(reading.dims)].numel())
    g = torch.Generator(t.device).manual_seed(seed)
    drawn = torch.randn(tokens.count, rows.shape[1], generator=g, device=t.device) / tokens.count
    rows[torch.from_numpy(row).to(t.device)] = drawn[torch.from_numpy(at).to(t.device)].to(t.dtype)
    view.copy_(rows.view(view.shape))
    return out


def _a_value_a_token(out, geometry: Geometry) -> None:
    fits = isinstance(out, torch.Tensor) and any("t" in geometry.kinds(r.form) for r in geometry.readings(out.shape))
    if not fits:
        got = f"shape {tuple(out.shape)}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
        raise ValueError(f"loss returned {got}, expected a value a token, {geometry.grid.shape}")


@contextlib.contextmanager
def _kept(module: nn.Module | None) -> Iterator[None]:
    """Leaves gradients, buffers and random generators as they were."""
    parameters, buffers = ([*module.parameters()], [*module.buffers()]) if module else ([], [])
    before, held = [p.grad for p in parameters], [b.detach().clone() for b in buffers]
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            for p in parameters:
                p.grad = None
            yield
        finally:
            for p, grad in zip(parameters, before):
                p.grad = grad
            with torch.no_grad():
                for b, value in zip(buffers, held):
                    b.copy_(value)


def _pairs(geometry: Geometry, device) -> torch.Tensor:
    """Returns (rows, width, 2): the sample and position of each place, −1 for padding."""
    grid = geometry.grid
    pairs = np.stack(
        [
            np.where(grid >= 0, a[np.maximum(grid, 0)], -1)
            for a in (geometry.tokens.samples(), geometry.tokens.positions())
        ],
        -1,
    )
    return torch.from_numpy(pairs).to(device)


def step(
    model,
    plan: Plan,
    loss: Callable | None,
    backward: bool,
    seed: int,
    edits: dict | None = None,
    tape=None,
    watch: bool = True,
    ended: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> Run:
    """Runs a layout; edits: of events, by where they are; watch=False: as the user's own code would; ended: is given
    the parameters' gradients."""
    module = model if isinstance(model, nn.Module) else None
    parameters = dict(module.named_parameters()) if module else {}
    mine = parameters | (dict(module.named_buffers()) if module else {})
    own = {t.untyped_storage()._cdata: name for name, t in mine.items()}
    names = {
        id(m): name.replace("_orig_mod.", "").removesuffix("_orig_mod")
        for name, m in (module.named_modules() if module else ())
    }
    watched = Watched(names, own, edits or {}, tape)
    backward = backward and plan.trains
    device = next((t.device for t in mine.values()), torch.device("cpu"))
    run = Run(plan.layout, plan.tokens, [], watched.events)
    started = perf_counter()
    with _kept(module), contextlib.ExitStack() as stack:
        torch.manual_seed(seed)
        if watch:
            stack.enter_context(watching(watched))
        watched.paused = True
        stack.enter_context(torch.set_grad_enabled(backward))
        with plan.around() if backward else contextlib.nullcontext() as finish:
            for call in plan.calls():
                run.geometries.append(call.geometry)
                watched.begin(call.geometry)
                watched.paused = not watch
                out = _called(call.run, "the model", plan.layout)
                if loss is not None:
                    tokens = _pairs(call.geometry, device)
                    out = _called(partial(loss, out, tokens), "the loss", plan.layout)
                    _a_value_a_token(out, call.geometry)
                found = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
                watched.paused = True
                if watch:
                    watched.output(found)
                ends = [t for t in found if t.requires_grad]
                if backward and ends:
                    given = [upstream(t, call.geometry, seed + 1 + i) for i, t in enumerate(ends)]
                    watched.paused = not watch
                    _run_the_model(partial(torch.autograd.backward, ends, given))
                watched.paused = True
                if watch and any(t.grad is not None for t in call.leaves):
                    watched.output([t.grad for t in call.leaves if t.grad is not None], "backward")
                del out, found, ends
            if finish is not None:
                watched.paused = not watch
                finish()
                watched.paused = True
            if watch and backward:
                held = {n: getattr(p, "main_grad", p.grad) for n, p in parameters.items()}
                held = {n: g for n, g in held.items() if g is not None}
                run.gradients = {n: (whole(g), tuple(watched.store(g).writers)) for n, g in held.items()}
                if ended is not None:
                    ended(held)
    run.activation_bytes = watched.activations
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    run.seconds = perf_counter() - started
    return run


def freeze(run: Run, weights: dict[str, torch.Tensor] | None = None) -> Run:
    """Brings every digest to the host, in one transfer; weights: tensors of the model whose digests are wanted too."""
    held: dict[int, torch.Tensor] = {}
    slots = [s for events in run.events for e in events for s in (*e.inputs, *e.outputs) if s.digests]
    for s in slots:
        for d in s.digests:
            held[id(d.rows)] = d.rows
    extra = [g for g, _ in run.gradients.values()] + [whole(w) for w in (weights or {}).values()]
    every = [*held.values(), *extra]
    flat = torch.cat(every).cpu().numpy() if every else np.zeros(0, np.int64)
    ends = np.cumsum([len(t) for t in every])
    parts = [flat[e - len(t) : e] for e, t in zip(ends, every)]
    of = dict(zip(held, parts))
    run.digest_bytes = 8 * sum(map(len, held.values()))
    done: dict[int, tuple[Digest, ...]] = {}
    for s in slots:
        key = id(s.digests)
        if key not in done:
            done[key] = s.digests, tuple(d._replace(rows=of[id(d.rows)]) for d in s.digests)
    for s in slots:
        s.digests = done[id(s.digests)][1]
    tail = [int(p[0]) for p in parts[len(held) :]]
    run.gradients = {k: (d, w) for d, (k, (_, w)) in zip(tail, run.gradients.items())}
    run.weights = dict(zip(weights or {}, tail[len(run.gradients) :]))
    return run
