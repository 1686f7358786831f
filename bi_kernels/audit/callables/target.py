"""A callable with its arguments: which of them hold a row a sample, and what it returns for some samples."""

import contextlib
import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils._pytree import tree_leaves

from bi_kernels import contract
from bi_kernels.audit.evidence.drift import Drift
from bi_kernels.audit.evidence.provenance import device_name
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, Judged, Row, sentence
from bi_kernels.audit.problem.inputs import generator
from bi_kernels.audit.problem.subject import poisoned_memory
from bi_kernels.contract import CONTRACT, dtype_name
from bi_kernels.tokens import TokenLayout

Layout = list[list[int]]  # calls; a call is sample numbers, −1 for one that is filled


class OutOfTime(BaseException):
    """Raised where the budget is spent; no row that says what raised takes it for its own."""


def first_and_batch(values: dict, batch: int, shared: Iterable[str], outputs: Sequence[str]) -> tuple[str, int]:
    """Returns the name of the first tensor and its dimension that counts samples; raises ValueError for what cannot
    be."""
    tensors = {k: t for k, t in values.items() if isinstance(t, torch.Tensor)}
    if not tensors:
        raise ValueError(
            f"the inputs {', '.join(values) or '(none)'} hold no tensor, expected at least one with a row a sample"
        )
    for what, given in (("shared", shared), ("outputs", outputs)):
        for k in given:
            if k not in tensors:
                raise ValueError(f"{what} names {k!r}, expected one of the tensors {', '.join(tensors)}")
    first = next((k for k in tensors if k not in outputs), next(iter(tensors)))
    x = tensors[first]
    if not -x.dim() <= batch < x.dim():
        raise ValueError(f"batch is {batch}, expected a dimension of {first}, whose shape is {tuple(x.shape)}")
    if x.shape[batch] < 2:
        raise ValueError(f"{first} holds {x.shape[batch]} sample along dimension {batch}, expected at least 2")
    return first, batch % x.dim()


class Target(Judged):
    """A callable with its arguments, and what it returned for the whole batch."""

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
    ):
        self.function, self.name, self.batch, self.seed = function, name, batch, seed
        names = list(names) or _names(function, len(inputs))
        self.values = dict(zip(names, inputs)) | constants
        self.positional, self.outputs, shared = len(inputs), list(outputs), set(shared)
        tensors = {k: t for k, t in self.values.items() if isinstance(t, torch.Tensor)}
        self.first, self.batch = first_and_batch(self.values, batch, shared, self.outputs)
        x = tensors[self.first]
        self.count, self.device = x.shape[self.batch], x.device
        self.module = function if isinstance(function, torch.nn.Module) else None
        self.compiled = hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")
        self.dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), x.dtype)
        self.calls, self.changed, self.deadline = 0, set(), float("inf")
        self.dims: list[int | None] = []
        self.batched = self._batched(tensors, shared)

    def _batched(self, tensors: dict, shared: set) -> frozenset:
        """Returns the tensors that hold a row a sample: of the right size there, and such that half of the batch and
        the batch in reverse give the results of the whole."""
        sized = [
            k
            for k, t in tensors.items()
            if t.dim() > self.batch and t.shape[self.batch] == self.count and k not in shared
        ]
        rest, every = [k for k in sized if k != self.first], list(range(self.count))
        self.batched = frozenset()
        try:
            whole = self.call(every)
        except TypeError as error:
            raise (
                error
                if str(error).startswith(self.name)
                else ValueError(f"{self.name} raised on the inputs as given: {sentence(error)}")
            ) from error
        except Exception as error:
            raise ValueError(f"{self.name} raised on the inputs as given: {sentence(error)}") from error
        found, why = [], ""
        parts = list(dict.fromkeys(((self.count + 1) // 2, *reversed(contract.rows(self.count - 1)))))  # some may raise
        subsets = [
            frozenset((self.first, *c)) for n in range(len(rest), -1, -1) for c in itertools.combinations(rest, n)
        ]
        for m, self.batched in itertools.product(parts, subsets):
            if found and m != found[0][2]:
                break
            try:
                part, reverse = self.call(every[:m]), self.call(every[::-1])
            except Exception as error:
                place = f"with {m} of {self.count} samples along dimension {self.batch} of {self.first}"
                why = why or f"{place} it raised {sentence(error)}"
                continue
            self.dims = [_dimension(a, b, self.count, m) for a, b in zip(whole, part)]
            if all(d is None for d in self.dims):
                continue
            found.append((self.batched, self.dims, m))
            if all(
                _alike(by_sample(a, d, self.count)[:m], by_sample(b, d, m))
                and _alike(by_sample(a, d, self.count).flip(0), by_sample(c, d, self.count))
                for a, b, c, d in zip(whole, part, reverse, self.dims)
                if d is not None
            ):
                return self.batched
        if not found:
            place = f"the {self.count} samples along dimension {self.batch} of {self.first}"
            why = why or f"no output has a row for each of {place}"
            expected = "expected a callable that takes any number of samples (is the parameter batch right?)"
            raise ValueError(f"{self.name}: {why}; {expected}")
        self.batched, self.dims, _ = found[0]
        return self.batched

    def read(self) -> str:
        kinds = {
            "a row a sample": sorted(self.batched),
            "shared by all": sorted(
                k for k, t in self.values.items() if isinstance(t, torch.Tensor) and k not in self.batched
            ),
        }
        return f"{self.count} samples along dimension {self.batch}; " + "; ".join(
            f"{what}: {', '.join(names)}" for what, names in kinds.items() if names
        )

    def take(self, call: Sequence[int], filler: str = "stale", kind: str = "given") -> dict:
        """Returns the arguments of a call on these samples."""
        index = torch.tensor(list(call), device=self.device)
        out = {}
        for k, value in self.values.items():
            if k in self.batched:
                value = self._spread(k, value) if kind == "spread" else value
                value = value.index_select(self.batch, index.clamp(min=0))
                empty = (index < 0).nonzero().flatten()
                if len(empty):
                    fill = (float("nan") if filler == "nonfinite" else 7.0) if value.is_floating_point() else 0
                    value.index_fill_(self.batch, empty, fill)
            elif isinstance(value, torch.Tensor):
                value = value.clone()  # the callable may write into it
            out[k] = value
        return out

    def spread(self) -> dict:
        """Returns the arguments, with exponents that differ from element to element."""
        return {k: self._spread(k, v) if k in self.batched else v for k, v in self.values.items()}

    def _spread(self, k: str, t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        powers = torch.randint(-4, 5, t.shape, generator=generator(t.device, self.seed, k), device=t.device)
        return t * torch.exp2(powers.float()).to(t.dtype)

    def results(self, arguments: dict) -> list[torch.Tensor]:
        """Returns the tensors that one call returns, or that it writes into."""
        versions = {k: t._version for k, t in arguments.items() if isinstance(t, torch.Tensor)}
        if time.monotonic() > self.deadline:
            raise OutOfTime
        self.calls += 1
        with contextlib.nullcontext() if self.compiled else poisoned_memory(0xFF if self.calls % 2 else 0x00):
            y = self.returned(self.function, arguments)
        self.changed |= {k for k, v in versions.items() if arguments[k]._version != v} - set(self.outputs)
        found = [arguments[k] for k in self.outputs] or [t for t in tree_leaves(y) if isinstance(t, torch.Tensor)]
        if not found:
            raise TypeError(
                f"{self.name} returned {type(y).__name__}, expected a tensor or several; if it writes into an "
                "argument, name that one in the parameter outputs"
            )
        return found

    def returned(self, function: Callable, arguments: dict):
        by_position = list(arguments)[: self.positional]
        return function(
            *(arguments[k] for k in by_position), **{k: v for k, v in arguments.items() if k not in by_position}
        )

    def layout(self, call: Sequence[int]):
        """Returns what this package's own ops are told: which sample each token belongs to."""
        x = self.values[self.first]
        inner = x.shape[self.batch + 1 : -1] if x.is_floating_point() and x.dim() > 1 else x.shape[self.batch + 1 :]
        length = torch.Size(inner).numel()
        order = {s: n for n, s in enumerate(sorted(i for i in call if i >= 0))}
        used = [at for at, i in enumerate(call) if i >= 0]
        if self.batch or not length or not used:
            return contextlib.nullcontext()
        return TokenLayout(
            [at * length for at in used], [length] * len(used), len(call) * length, [order[call[at]] for at in used]
        )

    def call(self, samples: Sequence[int], filler: str = "stale", kind: str = "given") -> list[torch.Tensor]:
        with torch.no_grad(), self.layout(samples):
            return self.results(self.take(samples, filler, kind))

    def compute(
        self, layout: Layout, filler: str = "stale", kind: str = "given"
    ) -> tuple[list[int], list[torch.Tensor]]:
        """(samples, what each output holds of them, by sample) over the calls of a layout."""
        samples, parts = [], []
        for call in layout:
            real = [at for at, i in enumerate(call) if i >= 0]
            samples += [call[at] for at in real]
            parts.append(
                [
                    by_sample(y, d, len(call))[real]
                    for y, d in zip(self.call(call, filler, kind), self.dims)
                    if d is not None
                ]
            )
        order = sorted(range(len(samples)), key=samples.__getitem__)
        return [samples[i] for i in order], [torch.cat(p)[order] for p in zip(*parts)]

    def row(
        self,
        relation: str,
        layout: str,
        drift: Drift | None = None,
        against: str = "the whole batch",
        inputs: str = "given",
        rows: int = 0,
        verdict: str = "",
        **more,
    ) -> Row:
        verdict = verdict or (NEEDS_FIX if drift is None or drift.mismatches else PASS)
        return Row(
            "any",
            self.name,
            "",
            self.name,
            dtype_name(self.dtype),
            device_name(self.device),
            relation,
            layout,
            against,
            inputs,
            rows,
            verdict,
            first_failing_op=self.name if verdict == NEEDS_FIX else None,
            **({} if drift is None else drift.json()),
            **more,
        )


def _names(function: Callable, count: int) -> list[str]:
    """Returns the parameters' names in order, or input0, input1 … where the callable does not say."""
    with contextlib.suppress(TypeError, ValueError):
        subject = function.forward if isinstance(function, torch.nn.Module) else function
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = [p.name for p in inspect.signature(subject).parameters.values() if p.kind in kinds]
        if len(named) >= count:
            return named[:count]
    return [f"input{i}" for i in range(count)]


def _dimension(whole: torch.Tensor, part: torch.Tensor, count: int, half: int) -> int | None:
    """Returns the dimension of an output that counts samples, or rows of samples."""
    if whole.dim() != part.dim():
        return None
    changed = [d for d in range(whole.dim()) if whole.shape[d] != part.shape[d]]
    fits = len(changed) == 1 and whole.shape[changed[0]] % count == 0
    return changed[0] if fits and part.shape[changed[0]] == whole.shape[changed[0]] // count * half else None


def by_sample(y: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    return y.unflatten(dim, (count, y.shape[dim] // count)).movedim(dim, 0)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).abs().max() <= CONTRACT["any"]["alike"] * a.abs().max()) if a.numel() else True
