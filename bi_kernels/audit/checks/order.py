"""The calls before: whatever they were, and whatever a tensor held then, the next call has the bits of the first.

A tensor may be written to in ways of which autograd's version of it, its address, its storage or its object says
nothing: a cache of what was made of it must not go by these.
"""

import contextlib
import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import cloudpickle
import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module

from bi_kernels.audit.axes import Kind
from bi_kernels.audit.checks.modes import asks_once, untrained
from bi_kernels.audit.checks.requests import Variant
from bi_kernels.audit.compare import compare
from bi_kernels.audit.executor import Forked, Process
from bi_kernels.audit.findings import UNSUPPORTED, Row, sentence
from bi_kernels.audit.step import Results, clear
from bi_kernels.audit.targets.any_callable import REFUSALS, CallableTarget, tensors
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import CONTRACT, DTYPES

MANY, FIRST = "after many calls", "after another first call"
COPIED, WAITED = 2**28, 20.0  # bytes, and seconds, that another process may take
WRITTEN, UPDATED, LOADED = "tensors written to", "weights updated in place", "a state dict is loaded"
UNSEEN_BY = "weights written"  # in one of the ways of UNSEEN
FEW = 5  # samples of a call that is made many times, below
ALIGNMENT = 64  # bytes, of a tensor in a flat buffer
OTHER = {torch.float32: torch.bfloat16, torch.float64: torch.float32}

Ways = Iterator[list[Tensor]]


def _through_data(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Ways:
    """Yields tensors, and the same ones when other values were written to them, which keep their versions."""
    held = [t.clone() for t in tensors]
    yield held
    torch._foreach_copy_([t.data for t in held], [*values])
    yield held


def _in_flat_buffer(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Ways:
    """Yields tensors that lie in one buffer, and the same ones when the buffer was written to."""
    flat, held = _flattened(tensors)
    yield held
    flat.copy_(_flattened(values)[0])
    yield held


def _flattened(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns one buffer that holds tensors, each at a multiple of ALIGNMENT bytes and none at its start, and them in
    it."""
    ends = [*itertools.accumulate((-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors), initial=ALIGNMENT)]
    flat = torch.zeros(ends[-1], dtype=torch.uint8, device=tensors[0].device)
    held = [flat[at : at + t.nbytes].view(t.dtype).view(t.shape).data for at, t in zip(ends, tensors)]
    for to, t in zip(held, tensors):
        to.copy_(t)
    return flat, held


def _at_same_addresses(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Ways:
    """Yields tensors, and others at the same addresses, as in memory that was freed and given out again."""
    held = [t.clone() for t in tensors]
    yield held
    for t, value in zip(held, values):
        t.data.copy_(value)
    yield [t.data for t in held]


UNSEEN: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor]], Ways]] = {
    "through .data": _through_data,
    "in a flat buffer": _in_flat_buffer,
    "at the addresses of others": _at_same_addresses,
}


def many_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Makes as many calls as a server makes in a while, of each kind by turns, or those for which there is time."""
    end = time.monotonic() + CONTRACT["sweep"]["earlier_seconds" if device.type == "cuda" else "interpreter_seconds"]
    with torch.no_grad():
        for number in range(CONTRACT["sweep"]["earlier_calls"]):
            calls[number % len(calls)]()
            if number and time.monotonic() > end:
                break


# ops of the registry


def op_order(u: Step) -> dict[str, Variant]:
    """Returns what an op is asked after other calls: in other shapes and dtypes, after many, and on the same tensors
    when they held other numbers."""

    def after_others() -> tuple[Results, Results]:
        for dtype in DTYPES.values():
            with contextlib.suppress(Exception):  # what the candidate refuses; in its own dtype it is judged
                _of_first_samples(u, dtype)
        return u.made(), u.base

    def after_many() -> tuple[Results, Results]:
        tokens, shared = u.parts(u.inputs())
        of = lambda m: u.subject.arguments({k: t[:m] for k, t in tokens.items()}, shared, (m,), u.at[:m])
        arguments = [of(m) for m in range(1, u.count)]
        many_calls([partial(u.subject.function, *given, **told) for given, told in arguments], u.at.device)
        return u.made() | untrained(u.rolled()), u.base | untrained(u.results)

    expected = cache(lambda: u.made(u.others()))
    others = lambda: {f"{k}, no gradient wanted": expected()[k] for k in u.results}

    def refilled() -> tuple[Results, Results]:
        given = u.inputs()
        u.rolled(given)
        for k, t in u.others().items():
            given[k].copy_(t)
        rolled = untrained(u.rolled(given))
        return u.made(given) | rolled, expected() | others()

    def unseen(way: Callable) -> tuple[Results, Results]:
        names, again = [*u.inputs()], way is _through_data  # a backward may have a cache of its own
        made, parameters = {}, {}
        for held in way([*u.inputs().values()], [*u.others().values()]):
            given = dict(zip(names, held))
            for k in u.parameters:
                given[k] = parameters.setdefault(id(given[k]), torch.nn.Parameter(given[k], requires_grad=False))
            clear(given.values())
            made = untrained(u.rolled(given)) | (u.made(given) if again else {})
        return made, others() | (expected() if again else {})

    found = {"after other calls": after_others, WRITTEN: refilled}
    if asks_once(u):
        found |= {MANY: after_many} | {f"{WRITTEN} {name}": partial(unseen, way) for name, way in UNSEEN.items()}
    return found


def _of_first_samples(u: Step, dtype: torch.dtype) -> None:
    """Calls the candidate on the first sample, and on the first three, in a dtype; backward, too."""
    given = {k: t.to(dtype) if k in u.floating else t for k, t in u.inputs().items()}
    for count in (1, 3):
        rows = sum(u.lengths[:count])
        tokens, shared = u.parts({k: t.clone().requires_grad_(k in u.floating) for k, t in given.items()})
        tokens = {k: t[:rows] for k, t in tokens.items()}
        outputs = u.subject.outputs(u.subject.forward(tokens, shared, (rows,), u.at[:rows]))
        sum(o.float().sum() for o in outputs if o.requires_grad).backward()


# any callable


def _other_dtype(t: CallableTarget) -> None:
    """Calls a target on inputs of another dtype. A module's parameters stay as they are: it may refuse."""
    t.called(
        {k: v.to(OTHER.get(v.dtype, torch.float32)) for k, v in tensors(t.values).items() if v.is_floating_point()}
    )


def _many(t: CallableTarget) -> None:
    """Calls a target many times on few samples."""

    def call(samples: list[int], arguments: dict) -> None:
        with t.layout(samples):
            t.returned(t.function, arguments)

    every = [t.every[:m] for m in range(1, FEW + 1)]
    many_calls([partial(call, some, t.take(some)) for some in every], t.device)


BEFORE: dict[str, Callable[[CallableTarget], object]] = {
    "one sample": lambda t: t.call([0]),
    "another order": lambda t: t.call(t.every[::-1]),
    "NaN": lambda t: t.call([-1] * t.count, "nonfinite"),
    "many calls": _many,
    "another dtype": _other_dtype,
}


def _after(t: CallableTarget, layout: str, before: Callable, whole: list[Tensor]) -> list[Row]:
    said = {"against": "the first call", "rows": t.count, "axes": [Kind.HISTORY]}
    try:
        before(t)
    except Exception as error:
        said["detail"] = f"the call before was refused: {sentence(error)}"
    return t.compared("invariance", layout, t.whole(), whole, **said)


def _weights(t: CallableTarget) -> dict[str, Tensor]:
    """Returns what may be updated between two calls: a module's parameters and buffers, the floating tensors that all
    samples share."""
    if t.module is not None:
        held = itertools.chain(t.module.named_parameters(), t.module.named_buffers())
        return {k: p for k, p in held if p.is_floating_point()}
    rest = tensors(t.values).items()
    return {k: v for k, v in rest if k not in t.batched and k not in t.outputs and v.is_floating_point()}


def _moved(weights: dict[str, Tensor]) -> list[Tensor]:
    """Returns other values for weights, as an optimizer might find them."""
    kept = [v.detach().clone() for v in weights.values()]
    return [v.clone().mul_(0.5).add_(v.flip(0) if v.dim() else v, alpha=0.25) for v in kept]


def _with(t: CallableTarget, weights: dict[str, Tensor]) -> list[Tensor]:
    """Returns the outputs of a call with these weights, a module's as new parameters and buffers."""
    if t.module is None:
        return [y.clone() for y in t.called(weights)]
    own = _weights(t)
    wrapped = lambda k, v: torch.nn.Parameter(v, own[k].requires_grad) if isinstance(own[k], torch.nn.Parameter) else v
    with _reparametrize_module(t.module, {k: wrapped(k, v) for k, v in weights.items()}, tie_weights=True):
        return [y.clone() for y in t.called({})]


def _updated(t: CallableTarget, whole: list[Tensor]) -> list[Row]:
    """Updates weights in place between two calls, as an optimizer does: the second call must have the results of fresh
    tensors that hold the same, and not those of the first. A module gets its own values back."""
    own, of_module = _weights(t), t.module is not None
    weights = own if of_module else {k: v.clone() for k, v in own.items()}
    kept = {k: v.detach().clone() for k, v in weights.items()}
    called = lambda weights: [y.clone() for y in t.called({} if of_module else weights)]
    try:
        moved = dict(zip(own, _moved(own)))
    except (NotImplementedError, RuntimeError, TypeError) as error:  # such as of quantised weights
        return [t.row("invariance", UPDATED, verdict=UNSUPPORTED, detail=sentence(error))]
    try:
        called(weights)
        with torch.no_grad():
            for k, v in weights.items():
                v.copy_(moved[k])
        fresh = {k: v.detach().clone() for k, v in weights.items()}  # before the call: it may write into them
        found = called(weights)
        wanted = _with(t, fresh)
    finally:
        with torch.no_grad():
            for k, v in weights.items():
                v.copy_(kept[k])
    said = {"against": "fresh tensors of equal values", "rows": t.count, "axes": [Kind.HISTORY]}
    rows = t.compared("invariance", UPDATED, found, wanted, **said)
    unmoved = whole and not any(compare(a, b).mismatches for a, b in zip(found, whole))
    if unmoved and any(k[1:] in own and bool(g.any()) for k, g in t.trained.items()):
        stale = "the update changed nothing, although backward leaves the weights a gradient"
        rows.append(t.row("invariance", UPDATED, tensor=t.output_name(t.judged[0]), detail=stale, **said))
    return rows + t.compared("invariance", UPDATED, t.whole(), whole, **said | {"against": "before the update"})


@contextlib.contextmanager
def _holding(t: CallableTarget, weights: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yields weights by name as a call takes them: a module's own parameters and buffers hold them."""
    own = _weights(t)
    if t.module is None:
        yield dict(zip(own, weights))
        return
    kept = [v.data for v in own.values()]
    try:
        for v, value in zip(own.values(), weights):
            v.data = value
        yield {}
    finally:
        for v, value in zip(own.values(), kept):
            v.data = value


def _written(t: CallableTarget, layout: str, way: Callable) -> list[Row]:
    """Writes to weights between two calls, unseen by autograd: the second call must have the results of a first call
    with what was written."""
    said = {"against": "a first call with these weights", "rows": t.count, "axes": [Kind.HISTORY]}
    own = _weights(t)
    try:
        moved, found = [v.contiguous() for v in _moved(own)], []
        fresh = {k: v.clone() for k, v in zip(own, moved)}  # kept: its memory is nobody's
        wanted = _with(t, fresh)
        for weights in way([v.detach().contiguous() for v in own.values()], moved):
            if way is _at_same_addresses:
                found = _with(t, dict(zip(own, weights)))
                continue
            with _holding(t, weights) as named:
                found = [y.clone() for y in t.called(named)]
    except REFUSALS as error:  # such as of quantised weights
        return [t.row("invariance", layout, verdict=UNSUPPORTED, detail=sentence(error), **said)]
    return t.compared("invariance", layout, found, wanted, **said)


def _loaded(t: CallableTarget) -> list[Row]:
    """Loads a state dict between two calls; the module gets its own back."""
    said = {"against": "a first call with these weights", "rows": t.count, "axes": [Kind.HISTORY]}
    own = _weights(t)
    try:
        saved = {k: v.clone() for k, v in t.module.state_dict().items() if isinstance(v, Tensor)}
        moved = {k: v for k, v in zip(own, _moved(own)) if k in saved and saved[k].shape == v.shape}
        wanted = _with(t, {k: v.clone() for k, v in moved.items()})
        t.called({})
        try:
            t.module.load_state_dict(moved, strict=False)
            found = [y.clone() for y in t.called({})]
        finally:
            t.module.load_state_dict(saved, strict=False)
    except REFUSALS as error:
        return [t.row("invariance", LOADED, verdict=UNSUPPORTED, detail=sentence(error), **said)]
    return t.compared("invariance", LOADED, found, wanted, **said)


class FirstCall:
    """Another process, in which a target's first call is on one sample. It begins before the target is first called
    here, and computes beside the audit."""

    def __init__(self):
        self.process, self.why = None, ""

    def begin(self, t: CallableTarget) -> None:
        """Begins the process: a fork of this one, or, with a GPU, one that loads a copy of the target."""
        if t.device.type == "cpu":
            self.process = Forked(partial(_began_otherwise, t))
            return
        held = [*tensors(t.values).values(), *(t.module.state_dict().values() if t.module is not None else ())]
        try:
            if sum(v.nbytes for v in held if isinstance(v, Tensor)) > COPIED:
                raise ValueError(f"what it holds has more than {COPIED} bytes")
            self.copied, self.process = cloudpickle.dumps(t), Process()
        except Exception as error:  # what cannot be pickled says so in its own way
            self.why = f"it cannot be brought into another process ({sentence(error)})"

    def call(self, t: CallableTarget) -> None:
        """Has it call the target, of which it is known by now which tensors hold a row a sample."""
        known = t.batched, t.dims
        if isinstance(self.process, Forked):
            self.process.begin(*known)
        elif self.process:
            self.process.begin(f"{__name__}:_began_elsewhere", self.copied, *known)

    def rows(self, t: CallableTarget) -> list[Row]:
        """Compares what it computed of the whole batch with what this process does, in one thread as it did."""
        said = {"against": "this process", "rows": t.count, "axes": [Kind.HISTORY]}
        threads = torch.get_num_threads()
        try:
            if self.why:
                raise RuntimeError(self.why)
            found = pickle.loads(self.process.result(seconds=max(1.0, min(t.deadline - time.monotonic(), WAITED))))
            torch.set_num_threads(1)
            whole = [y.cpu() for y in t.whole()]
        except RuntimeError as error:
            return [t.row("invariance", FIRST, verdict=UNSUPPORTED, detail=sentence(error), **said)]
        finally:
            torch.set_num_threads(threads)
        return t.compared("invariance", FIRST, found, whole, **said)


def _began_otherwise(t: CallableTarget, batched: frozenset, dims: list) -> bytes:
    """Calls a target on one sample, whatever comes of it, and returns what it makes of the whole batch then."""
    t.batched, t.dims = batched, dims
    if t.device.type == "cpu":
        torch.set_num_threads(1)  # those of the other process are not there
    with contextlib.suppress(Exception):
        t.call([0])
    return pickle.dumps([y.cpu() for y in t.whole()])


def _began_elsewhere(copied: bytes, *known) -> bytes:
    return _began_otherwise(pickle.loads(copied), *known)


def history(t: CallableTarget, whole: list[Tensor]) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges the whole batch after each call before it, and after weights have changed."""
    out = {f"after {k}": partial(_after, t, f"after {k}", before, whole) for k, before in BEFORE.items()}
    if not _weights(t):
        return out
    out[UPDATED] = partial(_updated, t, whole)
    for name, way in UNSEEN.items():
        out[f"{UNSEEN_BY} {name}"] = partial(_written, t, f"{UNSEEN_BY} {name}", way)
    return out | ({LOADED: partial(_loaded, t)} if t.module is not None else {})
