"""A callable with its arguments: which of them hold a row a sample, and what it returns for some samples."""

import contextlib
import copy
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from bi_kernels import contract
from bi_kernels.audit import adversarial_inputs as drawn
from bi_kernels.audit.axes import Kind, Side
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import INVARIANCE, UNSUPPORTED, Row, sentence
from bi_kernels.audit.kernel_error import kernel_error
from bi_kernels.audit.parameters import device_name
from bi_kernels.audit.reproduce.samples import in_order, take
from bi_kernels.audit.step import NoBackward, Results
from bi_kernels.audit.targets.base import Target
from bi_kernels.audit.targets.candidates import signature_of
from bi_kernels.audit.targets.fresh_memory import poisoned_memory
from bi_kernels.audit.targets.outputs import leaves
from bi_kernels.contract import CONTRACT, dtype_name
from bi_kernels.tokens import TokenLayout

WHOLE = "the whole batch"  # what parts of it are compared with
REFUSALS = RuntimeError, TypeError, ValueError, AssertionError  # of what a callable does not take, in its own words
SAMPLE = "sample"  # what fills a place without a sample: the first one
Layout = list[list[int]]  # calls; a call is sample numbers, −1 for one that is filled


class OutOfTime(BaseException):
    """Raised where the budget is spent; no row that says what raised takes it for its own."""


def tensors(values: dict) -> dict[str, torch.Tensor]:
    """Returns those of the values that are tensors."""
    return {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}


def module_of(function: Callable) -> torch.nn.Module | None:
    """Returns the module that a callable is, or calls: a bound method's, a partial's, one that a function or a lambda
    names; several as one that holds them; None where there is none."""
    if isinstance(function, torch.nn.Module):
        return function
    held, todo = [], [function]
    for f in todo:
        if isinstance(f, functools.partial):
            todo.append(f.func)
            held += [*f.args, *f.keywords.values()]
        if (owner := getattr(f, "__self__", None)) is not None:
            held += [owner, *getattr(owner, "__dict__", {}).values()]
        if inspect.isfunction(f := getattr(f, "__func__", f)):
            used = inspect.getclosurevars(f)
            held += [*used.nonlocals.values(), *used.globals.values()]
            todo += [g for g in used.nonlocals.values() if inspect.isfunction(g) and g not in todo]
    found = list(dict.fromkeys(m for m in (*held, *todo) if isinstance(m, torch.nn.Module)))
    return None if not found else found[0] if len(found) == 1 else torch.nn.ModuleList(found)


def first_and_batch(values: dict, batch: int, shared: Iterable[str], outputs: Sequence[str]) -> tuple[str, int]:
    """Returns the name of the first tensor and its dimension that counts samples; raises ValueError for what cannot
    be."""
    held = tensors(values)
    if not held:
        raise ValueError(
            f"the inputs {', '.join(values) or '(none)'} hold no tensor, expected at least one with a row a sample"
        )
    for what, given in (("shared", shared), ("outputs", outputs)):
        for k in given:
            if k not in held:
                raise ValueError(f"{what} names {k!r}, expected one of the tensors {', '.join(held)}")
    first = next((k for k in held if k not in outputs), next(iter(held)))
    x = held[first]
    if not -x.dim() <= batch < x.dim():
        raise ValueError(f"batch is {batch}, expected a dimension of {first}, whose shape is {tuple(x.shape)}")
    if x.shape[batch] < 2:
        held = f"{x.shape[batch]} sample{'s' * (x.shape[batch] != 1)}"
        raise ValueError(f"{first} holds {held} along dimension {batch}, expected at least 2")
    return first, batch % x.dim()


class CallableTarget(Target):
    """A callable with its arguments, and which dimension of each output counts samples."""

    def __init__(
        self,
        function: Callable,
        inputs: Sequence,
        constants: dict,
        batch: int,
        shared: Iterable[str],
        outputs: Iterable[str],
        name: str,
        seed: int,
        names: Sequence[str] = (),
        first: Callable[["CallableTarget"], object] = lambda t: None,  # what comes before the first call
    ):
        self.function, self.name, self.seed = function, name, seed
        names = list(names) or _names(function, len(inputs))
        self.values = dict(zip(names, inputs)) | constants
        self.positional, self.outputs, shared = len(inputs), list(outputs), set(shared)
        self.first, self.batch = first_and_batch(self.values, batch, shared, self.outputs)
        x = self.values[self.first]
        self.count = self.given_count = x.shape[self.batch]  # samples, and those that the user gave
        self.device = x.device
        self.every = list(range(self.count))
        self.module = module_of(function)
        # what torch.compile was given, or the callable itself
        self.eager = getattr(function, "_torchdynamo_orig_callable", getattr(function, "_orig_mod", function))
        self.compiled = self.eager is not function
        held = [*tensors(self.values).values(), *(self.module.parameters() if self.module is not None else ())]
        dtype = next((t.dtype for t in held if t.is_floating_point()), x.dtype)
        self.whose = "any", name, "", name, dtype_name(dtype), device_name(self.device)
        self.dtype, self.calls, self.deadline = dtype, 0, float("inf")
        self.changed: set[str] = set()  # inputs that it writes into
        self.kept: set[str] = set()  # buffers that it writes into, or puts another tensor in the place of
        self.drawn: dict[str, dict] = {}  # the arguments, by the kind of their values
        self.refused: dict[str, str] = {}  # kinds that it does not take, and what it said
        self.votes: dict = {}  # what other calls made of a sample in which two calls differ
        self.launches: bool | None = None  # a Triton kernel, where it is known
        self.step = None  # the training step of the whole batch, where there is a backward
        self.trained: dict[str, torch.Tensor] = {}  # the gradients of the whole batch, where there is a backward
        self.batched: frozenset[str] = frozenset()
        self.dims: list[int | None] = []
        self.listed = False  # whether a list may hold one entry a sample
        self.unread: set[str] = set()  # types of what it returned that are neither tensors nor numbers
        first(self)
        self._find_batched(shared)

    def _find_batched(self, shared: set) -> None:
        """Finds the tensors that hold a row a sample: of the right size there, and such that half of the batch and the
        batch in reverse give the results of the whole."""
        known, place = {*shared, self.first}, f"along dimension {self.batch} of {self.first}"
        sized = [k for k, t in tensors(self.values).items() if t.shape[self.batch : self.batch + 1] == (self.count,)]
        rest = [k for k in sized if k not in known]
        try:
            whole = self.call(self.every)
        except Exception as error:
            if isinstance(error, TypeError) and str(error).startswith(self.name):
                raise
            if "active drivers" in str(error):
                missing = "there is no GPU for its Triton kernel; set TRITON_INTERPRET=1 before Python starts"
                raise ValueError(f"{self.name}: {missing}") from None
            cause = kernel_error(error) or error  # which may quote a whole kernel
            raise ValueError(f"{self.name} raised on the inputs as given: {sentence(error)}") from cause
        subsets = [{self.first, *c} for n in range(len(rest), -1, -1) for c in itertools.combinations(rest, n)]
        found, why = [], ""
        for m in dict.fromkeys(((self.count + 1) // 2, *reversed(contract.rows(self.count - 1)))):  # some may raise
            for self.batched in map(frozenset, subsets):
                try:
                    part, reverse = self.call(self.every[:m]), self.call(self.every[::-1])
                    if len(part) != len(whole) and not self.listed:
                        self.listed = True
                        whole, part, reverse = (
                            self.call(self.every[at]) for at in (slice(None), slice(m), slice(None, None, -1))
                        )
                except Exception as error:
                    why = why or f"with {m} of {self.count} samples {place} it raised {sentence(error)}"
                    continue
                self.dims = [_dimension(a, b, self.count, m) for a, b in zip(whole, part)]
                if not self.judged:
                    continue
                found.append((self.batched, self.dims))
                rows = zip(self.rows(whole, self.count), self.rows(part, m), self.rows(reverse, self.count))
                if all(alike(a[:m], b) and alike(a.flip(0), c) for a, b, c in rows):
                    return
            if found:
                self.batched, self.dims = found[0]
                return
        why = why or f"no output has a row for each of the {self.count} samples {place}"
        expected = "expected a callable that takes any number of samples (is the parameter batch right?)"
        raise ValueError(f"{self.name}: {why}; {expected}")

    @property
    def sides(self) -> Mapping[str, Collection[str]]:
        parameters = (k for k, _ in self.module.named_parameters()) if self.module is not None else ()
        return {Side.INPUT: self.batched, Side.WEIGHT: {*tensors(self.values), *parameters} - self.batched}

    @property
    def judged(self) -> list[int]:
        """Lists the numbers of the outputs in which something counts samples."""
        return [i for i, d in enumerate(self.dims) if d is not None]

    def output_name(self, number: int) -> str:
        """Returns the name of an output, by its number among all."""
        return self.outputs[number] if self.outputs else "out" if len(self.dims) == 1 else f"out[{number}]"

    def output_names(self) -> list[str]:
        """Returns the names of the outputs that are judged."""
        return [self.output_name(i) for i in self.judged]

    def rows(self, outputs: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
        """Returns the judged outputs of a call on `count` samples, by sample."""
        return [by_sample(y, d, count) for y, d in zip(outputs, self.dims) if d is not None]

    def read(self) -> str:
        kinds = {"one row each": self.batched, "shared": tensors(self.values).keys() - self.batched}
        said = (f"{what}: {', '.join(sorted(names))}" for what, names in kinds.items() if names)
        return "; ".join([f"{self.count} samples along dimension {self.batch}", *said])

    def given(self, kind: str = "given") -> dict:
        """Returns the arguments, as given or of another kind: see `drawn`."""
        if kind in drawn.KINDS and kind not in self.drawn:
            self.drawn[kind] = drawn.KINDS[kind](self)
        return self.drawn.get(kind, self.values)

    def resampled(self, count: int) -> "CallableTarget":
        """Returns this target with `count` samples, drawn from those given."""
        many = copy.copy(self)
        many.values, many.count = drawn.resampled(self, count), count
        many.every, many.drawn = list(range(count)), {"resampled": many.values}
        many.votes = {}
        return many

    def take(self, call: Sequence[int], filler: str = "stale", kind: str = "given") -> dict:
        """Returns the arguments of a call on these samples."""
        out = dict(self.given(kind))
        for k, value in tensors(out).items():
            if k in self.batched:
                out[k] = take(value, call, self.batch, filling(filler, value.dtype))
            else:
                out[k] = value.clone()  # the callable may write into it
        return out

    def results(self, arguments: dict) -> list[torch.Tensor]:
        """Returns the tensors that one call returns, or that it writes into."""
        versions, buffers = {k: t._version for k, t in tensors(arguments).items()}, self._buffers()
        if time.monotonic() > self.deadline:
            raise OutOfTime
        self.calls += 1
        with contextlib.nullcontext() if self.compiled else poisoned_memory(self.calls):
            y = self.returned(self.function, arguments)
        self.changed |= {k for k, v in versions.items() if arguments[k]._version != v} - set(self.outputs)
        self.kept |= {k for k, v in self._buffers().items() if buffers.get(k, v) != v}
        found = [arguments[k] for k in self.outputs] or self.found_in(y, arguments[self.first].shape[self.batch])
        if not found:
            raise TypeError(
                f"{self.name} returned {type(y).__name__}, expected a tensor or several; if it writes into an "
                "argument, name that one in the parameter outputs"
            )
        return found

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Returns of each buffer of a module which tensor it is, and how often that was written to."""
        held = self.module.named_buffers() if self.module is not None else ()
        return {k: (id(b), b._version) for k, b in held if not b.is_inference()}

    def found_in(self, y, samples: int) -> list[torch.Tensor]:
        """Returns the tensors in what a call on so many samples returned, and notes what else is there."""
        every = leaves(y, samples * self.listed)
        self.unread |= {type(v).__name__ for v in every if not isinstance(v, torch.Tensor)}
        return [v for v in every if isinstance(v, torch.Tensor)]

    def returned(self, function: Callable, arguments: dict):
        given = list(arguments.items())
        return function(*(v for _, v in given[: self.positional]), **dict(given[self.positional :]))

    def layout(self, call: Sequence[int]):
        """Returns what this package's own ops are told: which sample each token belongs to."""
        x = self.values[self.first]
        length = x.shape[self.batch + 1 : -1 if x.is_floating_point() else None].numel()
        used = [at for at, i in enumerate(call) if i >= 0]
        if self.batch or not length or not used:
            return contextlib.nullcontext()
        starts, samples = zip(*((at * length, call[at]) for at in used))
        return TokenLayout(starts, [length] * len(used), len(call) * length, samples)

    def call(self, samples: Sequence[int], filler: str = "stale", kind: str = "given") -> list[torch.Tensor]:
        with torch.no_grad(), self.layout(samples):
            return self.results(self.take(samples, filler, kind))

    def called(self, changed: dict) -> list[torch.Tensor]:
        """Returns the judged outputs of a call on the whole batch, a row a sample; changed: arguments in place of its
        own."""
        with torch.no_grad(), self.layout(self.every):
            return self.rows(self.results(self.take(self.every) | changed), self.count)

    def compute(self, layout: Layout, filler: str = "stale", kind: str = "given") -> list[torch.Tensor]:
        """Returns what each judged output holds of the samples of a layout, in their order."""
        rows = lambda call: self.rows(self.call(call, filler, kind), len(call))
        parts = [[y.clone() for y in rows(call)] for call in layout]  # the next call may write into what one returned
        return [in_order(layout, part) for part in zip(*parts)]

    def whole(self, kind: str = "given") -> list[torch.Tensor]:
        """Returns what each judged output holds of the whole batch in one call."""
        return self.compute([self.every], kind=kind)

    def compared(self, relation: str, layout: str, found: Sequence, wanted: Sequence, **said) -> list[Row]:
        """Compares outputs one by one."""
        named = (dict(zip(self.output_names(), outputs)) for outputs in (found, wanted))
        return self.differences(relation, layout, *named, **said)

    def differences(self, relation: str, layout: str, found: Results, wanted: Results, **said) -> list[Row]:
        """Compares tensors name by name; one that is missing, or of another dtype, needs a fix."""

        def row(name: str, b: torch.Tensor) -> Row:
            a, why = found.get(name), "backward left no gradient"
            if a is not None and a.dtype == b.dtype:
                return self.row(relation, layout, compare(a, b), tensor=name, **said)
            if a is not None:
                why = f"the dtype follows the call: {dtype_name(a.dtype)} here, {dtype_name(b.dtype)} there"
            return self.row(relation, layout, tensor=name, **said | {"detail": why})

        return [row(*pair) for pair in wanted.items()]

    def gradient_rows(self, layout: str, asked: Callable[[], tuple[Results, Results]], **said) -> list[Row]:
        """Compares the gradients of a variant of the whole batch, name by name. Where the callable refuses it, and says
        so, the row says what it said; where nothing has a gradient there are none."""
        try:
            found, wanted = asked()
        except NoBackward:
            return []
        except (RuntimeError, TypeError, ValueError) as error:
            return [self.row(INVARIANCE, layout, verdict=UNSUPPORTED, rows=self.count, detail=sentence(error))]
        gradients = {k: v for k, v in wanted.items() if k not in self.output_names()}
        return self.differences(INVARIANCE, layout, found, gradients, **said)

    def row(self, relation: str, layout: str, drift: Drift | None = None, **said) -> Row:
        own = {"against": WHOLE, "inputs": "given"}
        if layout.startswith("neighbours"):
            own["axes"] = [Kind.NEIGHBOURS]
        return super().row(relation, layout, drift, **own | said)


def filling(filler: str, dtype: torch.dtype) -> float | None:
    """Returns the number that stands in places without a sample; None where the first sample does."""
    if filler == SAMPLE or not dtype.is_floating_point:
        return None if filler == SAMPLE else 0
    return {"nonfinite": float("nan"), "largest": torch.finfo(dtype).max}.get(filler, 7.0)


def _names(function: Callable, count: int) -> list[str]:
    """Returns the parameters' names in order, or input0, input1 … where the callable does not say."""
    signature = signature_of(function)
    parameters = signature.parameters.values() if signature else ()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return named[:count] if len(named) >= count else [f"input{i}" for i in range(count)]


def _dimension(whole: torch.Tensor, part: torch.Tensor, count: int, half: int) -> int | None:
    """Returns the dimension of an output that counts samples, or rows of samples."""
    halved = lambda d, n: (*whole.shape[:d], n // count * half, *whole.shape[d + 1 :])
    fits = (d for d, n in enumerate(whole.shape) if n and n % count == 0 and part.shape == halved(d, n))
    return next(fits, None)


def by_sample(y: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    return y.unflatten(dim, (count, y.shape[dim] // count)).movedim(dim, 0)


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether two results are of the same computation, roughly; no verdict."""
    a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a, b))
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).abs().max() <= CONTRACT["any"]["alike"] * a.abs().max()) if a.numel() else True
