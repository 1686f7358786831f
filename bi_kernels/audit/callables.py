"""Is this callable batch-invariant? `audit(fn, *inputs)` judges any function, nn.Module, compiled function or launcher.

The batch is one dimension of the first tensor; every sample along it is asked to keep its bits whatever stands beside it.
The relations are the audits' own (see judge.py); layouts are those that need no knowledge of the op.
"""

import contextlib
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.progress import track
from torch.utils._pytree import tree_leaves

from bi_kernels import contract
from bi_kernels.audit import static
from bi_kernels.audit.drift import Drift, compare
from bi_kernels.audit.gradients import ACCURACY, DETERMINISM, INVARIANCE, atomics_free
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.judge import NEEDS_FIX, PASS, UNSUPPORTED, Row, against_bound, poisoned_memory, sentence
from bi_kernels.audit.provenance import device_name
from bi_kernels.contract import CONTRACT, SWEEP, dtype_name
from bi_kernels.tokens import TokenLayout

SINGLES = 16  # samples that are computed alone, spread over the batch
RECOMPILES = 256
KINDS = ("given", "spread")  # the inputs as they are, and with exponents that differ from element to element
Layout = list[list[int]]  # calls; a call is sample numbers, −1 for one that is filled


def plan(count: int, seed: int = 0) -> dict[str, tuple[Layout, str]]:
    """{layout: (calls, what fills a place without a sample)} over `count` samples."""
    every = list(range(count))
    some = sorted({round(i * (count - 1) / max(1, min(count, SINGLES) - 1)) for i in range(min(count, SINGLES))})
    third, pad = max(1, count // 3), -count % 16 or 16
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    order = order if order != every else every[::-1]
    split = [every[:third], every[third:]]
    beside = [[i if i % 2 == parity else -1 for i in every] for parity in (0, 1)]
    return {  # those that tell most come first, should the time run out
        "singles": ([[i] for i in some], "stale"),
        "permuted": ([order], "stale"),
        "padded": ([every + [-1] * pad], "stale"),
        "left_padded": ([[-1] * pad + every], "stale"),
        "micro_batches:ragged": (split, "stale"),
        "neighbours": (beside, "stale"),
        "neighbours:nonfinite": (beside, "nonfinite"),
        **{f"rows:{m}": ([every[:m]], "stale") for m in contract.rows(count) if m < count},
    }


class OutOfTime(Exception):
    """The budget is spent."""


@dataclass
class Report:
    """The verdict of one callable with its evidence; shows itself as Markdown in Jupyter and as text elsewhere."""

    name: str
    rows: list[Row]
    read: str  # how the inputs were read
    notes: list[str] = field(default_factory=list)
    repro: Path | None = None
    target: "Target | None" = None

    @property
    def verdict(self) -> str:
        found = {r.verdict for r in self.rows}
        return NEEDS_FIX if NEEDS_FIX in found else PASS if PASS in found else UNSUPPORTED

    @property
    def passed(self) -> bool:
        return self.verdict == PASS

    def markdown(self) -> str:
        from bi_kernels.audit import show
        parts = [f"### {self.name}: {show.MARK[self.verdict]}", self.read, *self.notes, show.by_op(self.rows).data]
        if not self.passed:
            parts.append(show.drifts(self.rows).data)
        if self.repro:
            parts.append(f"Reproduce with `python {self.repro}`.")
        return "\n\n".join(parts)

    _repr_markdown_ = markdown
    __repr__ = markdown


class Target:
    """A callable with its arguments, and what it returned for the whole batch."""

    def __init__(self, function: Callable, inputs: Sequence, constants: dict, batch: int, shared: Iterable[str],
                 outputs: Iterable[str], name: str, seed: int, names: Sequence[str] = ()):
        self.function, self.name, self.batch, self.seed = function, name, batch, seed
        names = list(names) or _names(function, len(inputs))
        self.values = dict(zip(names, inputs)) | constants
        self.positional, self.outputs = len(inputs), list(outputs)
        tensors = {k: t for k, t in self.values.items() if isinstance(t, torch.Tensor)}
        for what, given in (("shared", shared), ("outputs", outputs)):
            for k in given:
                if k not in tensors:
                    raise ValueError(f"{what} names {k!r}, expected one of the tensors {', '.join(tensors)}")
        if not tensors:
            raise ValueError(f"{name}: no input is a tensor, expected at least one with a row a sample")
        self.first = next((k for k in tensors if k not in self.outputs), next(iter(tensors)))
        x = tensors[self.first]
        if not -x.dim() <= batch < x.dim():
            raise ValueError(f"batch is {batch}, expected a dimension of {self.first}, whose shape is {tuple(x.shape)}")
        self.batch = batch % x.dim()
        self.count, self.device = x.shape[self.batch], x.device
        if self.count < 2:
            raise ValueError(f"{self.first} holds {self.count} sample along dimension {batch}, expected at least 2")
        self.module = function if isinstance(function, torch.nn.Module) else None
        self.compiled = hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")
        self.dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), x.dtype)
        self.calls, self.changed, self.deadline = 0, set(), float("inf")
        self.dims: list[int | None] = []
        self.batched = self._batched(tensors, set(shared))

    def _batched(self, tensors: dict, shared: set) -> frozenset:
        """The tensors that hold a row a sample: of the right size there, and such that half of the batch and the batch
        in reverse give the results of the whole."""
        sized = [k for k, t in tensors.items() if t.dim() > self.batch and t.shape[self.batch] == self.count and k not in shared]
        rest, every = [k for k in sized if k != self.first], list(range(self.count))
        self.batched = frozenset()
        try:
            whole = self.call(every)
        except TypeError as error:
            raise error if str(error).startswith(self.name) else ValueError(f"{self.name} raised on the inputs as given: "
                                                                            f"{sentence(error)}") from error
        except Exception as error:
            raise ValueError(f"{self.name} raised on the inputs as given: {sentence(error)}") from error
        found, why = [], ""
        parts = list(dict.fromkeys(((self.count + 1) // 2, *reversed(contract.rows(self.count - 1)))))  # some may raise
        subsets = [frozenset((self.first, *c)) for n in range(len(rest), -1, -1) for c in itertools.combinations(rest, n)]
        for m, self.batched in itertools.product(parts, subsets):
            if found and m != found[0][2]:
                break
            try:
                part, reverse = self.call(every[:m]), self.call(every[::-1])
            except Exception as error:
                why = why or f"with {m} of {self.count} samples along dimension {self.batch} of {self.first} it raised {sentence(error)}"
                continue
            self.dims = [_dimension(a, b, self.count, m) for a, b in zip(whole, part)]
            if all(d is None for d in self.dims):
                continue
            found.append((self.batched, self.dims, m))
            if all(_alike(_by_sample(a, d, self.count)[:m], _by_sample(b, d, m))
                   and _alike(_by_sample(a, d, self.count).flip(0), _by_sample(c, d, self.count))
                   for a, b, c, d in zip(whole, part, reverse, self.dims) if d is not None):
                return self.batched
        if not found:
            why = why or f"no output has a row for each of the {self.count} samples along dimension {self.batch} of {self.first}"
            raise ValueError(f"{self.name}: {why}; expected a callable that takes any number of samples (is batch= right?)")
        self.batched, self.dims, _ = found[0]
        return self.batched

    def read(self) -> str:
        kinds = {"a row a sample": sorted(self.batched), "shared by all": sorted(
            k for k, t in self.values.items() if isinstance(t, torch.Tensor) and k not in self.batched)}
        return f"{self.count} samples along dimension {self.batch}; " + "; ".join(
            f"{what}: {', '.join(names)}" for what, names in kinds.items() if names)

    def take(self, call: Sequence[int], filler: str = "stale", kind: str = "given") -> dict:
        """The arguments of a call on these samples."""
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
            elif isinstance(value, torch.Tensor) and k in self.outputs:
                value = value.clone()
            out[k] = value
        return out

    def spread(self) -> dict:
        """The arguments, with exponents that differ from element to element."""
        return {k: self._spread(k, v) if k in self.batched else v for k, v in self.values.items()}

    def _spread(self, k: str, t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        powers = torch.randint(-4, 5, t.shape, generator=generator(t.device, self.seed, k), device=t.device)
        return t * torch.exp2(powers.float()).to(t.dtype)

    def results(self, arguments: dict) -> list[torch.Tensor]:
        """The tensors that one call returns, or that it writes into."""
        versions = {k: t._version for k, t in arguments.items() if isinstance(t, torch.Tensor)}
        if time.monotonic() > self.deadline:
            raise OutOfTime
        self.calls += 1
        with contextlib.nullcontext() if self.compiled else poisoned_memory(0xFF if self.calls % 2 else 0x00):
            y = self.returned(self.function, arguments)
        self.changed |= {k for k, v in versions.items() if arguments[k]._version != v} - set(self.outputs)
        found = [arguments[k] for k in self.outputs] or [t for t in tree_leaves(y) if isinstance(t, torch.Tensor)]
        if not found:
            raise TypeError(f"{self.name} returned {type(y).__name__}, expected a tensor or several; if it writes into an "
                            "argument, name that one: outputs=('out',)")
        return found

    def returned(self, function: Callable, arguments: dict):
        by_position = list(arguments)[:self.positional]
        return function(*(arguments[k] for k in by_position), **{k: v for k, v in arguments.items() if k not in by_position})

    def layout(self, call: Sequence[int]):
        """What this package's own ops are told: which sample each token belongs to."""
        x = self.values[self.first]
        inner = x.shape[self.batch + 1:-1] if x.is_floating_point() and x.dim() > 1 else x.shape[self.batch + 1:]
        length = torch.Size(inner).numel()
        order = {s: n for n, s in enumerate(sorted(i for i in call if i >= 0))}
        used = [at for at, i in enumerate(call) if i >= 0]
        if self.batch or not length or not used:
            return contextlib.nullcontext()
        return TokenLayout([at * length for at in used], [length] * len(used), len(call) * length, [order[call[at]] for at in used])

    def call(self, samples: Sequence[int], filler: str = "stale", kind: str = "given") -> list[torch.Tensor]:
        with torch.no_grad(), self.layout(samples):
            return self.results(self.take(samples, filler, kind))

    def compute(self, layout: Layout, filler: str = "stale", kind: str = "given") -> tuple[list[int], list[torch.Tensor]]:
        """(samples, what each output holds of them, by sample) over the calls of a layout."""
        samples, parts = [], []
        for call in layout:
            real = [at for at, i in enumerate(call) if i >= 0]
            samples += [call[at] for at in real]
            parts.append([_by_sample(y, d, len(call))[real] for y, d in zip(self.call(call, filler, kind), self.dims)
                          if d is not None])
        order = sorted(range(len(samples)), key=samples.__getitem__)
        return [samples[i] for i in order], [torch.cat(p)[order] for p in zip(*parts)]

    def row(self, relation: str, layout: str, drift: Drift | None = None, against: str = "the whole batch",
            inputs: str = "given", rows: int = 0, verdict: str = "", **more) -> Row:
        verdict = verdict or (NEEDS_FIX if drift is None or drift.mismatches else PASS)
        return Row("any", self.name, "", self.name, dtype_name(self.dtype), device_name(self.device), relation, layout, against,
                   inputs, rows, verdict, first_failing_op=self.name if verdict == NEEDS_FIX else None,
                   **({} if drift is None else drift.json()), **more)


def _names(function: Callable, count: int) -> list[str]:
    """The parameters' names in order, or input0, input1 … where the callable does not say."""
    with contextlib.suppress(TypeError, ValueError):
        subject = function.forward if isinstance(function, torch.nn.Module) else function
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = [p.name for p in inspect.signature(subject).parameters.values() if p.kind in kinds]
        if len(named) >= count:
            return named[:count]
    return [f"input{i}" for i in range(count)]


def _dimension(whole: torch.Tensor, part: torch.Tensor, count: int, half: int) -> int | None:
    """The dimension of an output that counts samples, or rows of samples."""
    if whole.dim() != part.dim():
        return None
    changed = [d for d in range(whole.dim()) if whole.shape[d] != part.shape[d]]
    fits = len(changed) == 1 and whole.shape[changed[0]] % count == 0
    return changed[0] if fits and part.shape[changed[0]] == whole.shape[changed[0]] // count * half else None


def _by_sample(y: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    return y.unflatten(dim, (count, y.shape[dim] // count)).movedim(dim, 0)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).abs().max() <= CONTRACT["any"]["alike"] * a.abs().max()) if a.numel() else True


def _compared(t: Target, relation: str, layout: str, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor],
              names: Sequence[str], **more) -> list[Row]:
    return [t.row(relation, layout, compare(a, b), tensor=name, **more) for name, a, b in zip(names, found, wanted)]


def _outputs(t: Target) -> list[str]:
    judged = [i for i, d in enumerate(t.dims) if d is not None]
    return [t.outputs[i] if t.outputs else "out" if len(t.dims) == 1 else f"out[{i}]" for i in judged]


def determinism(t: Target, runs: int) -> list[Row]:
    """The same call again; and, where it differs, whether a seed makes it the same."""
    every = [list(range(t.count))]
    first = t.compute(every)[1]
    for _ in range(runs - 1):
        rows = _compared(t, DETERMINISM, "whole batch", t.compute(every)[1], first, _outputs(t), against="itself", rows=t.count,
                         detail=f"{runs} runs")
        if any(r.verdict == NEEDS_FIX for r in rows):
            seeded = []
            for _ in range(2):
                torch.manual_seed(t.seed)
                seeded.append(t.compute(every)[1])
            random = all(not compare(a, b).mismatches for a, b in zip(*seeded))
            for r in rows:
                r.detail = ("random: equal once torch.manual_seed is called before each call; nothing else was judged" if random
                            else "not deterministic, whatever the seed; nothing else was judged")
            break
    return rows


def invariance(t: Target, name: str, layout: Layout, filler: str, whole: dict) -> list[Row]:
    """Every sample's bits under a layout against those of the whole batch."""
    rows, calls = [], f"{len(layout)} call{'s' * (len(layout) > 1)} of {', '.join(map(str, sorted({len(c) for c in layout})))}"
    for kind in whole:
        try:
            samples, found = t.compute(layout, filler, kind)
            rows += _compared(t, "invariance", name, found, [w[samples] for w in whole[kind]], _outputs(t), inputs=kind,
                              rows=max(map(len, layout)), detail=calls)
        except OutOfTime:
            raise
        except Exception as error:
            rows.append(t.row("invariance", name, inputs=kind, rows=max(map(len, layout)), detail=f"{calls}; raised {sentence(error)}"))
    return rows


class Step:
    """One training step of a target: a real backward() over the calls of a layout."""

    def __init__(self, t: Target):
        self.t, self.upstream = t, []
        self.floating = [k for k, v in t.values.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
                         and k not in t.outputs]

    def gradients(self, layout: Layout, filler: str = "stale") -> dict[str, torch.Tensor]:
        """{name: gradient}: of batched inputs by sample, of shared ones and a module's parameters once for all calls."""
        t, shared = self.t, {}
        for k in self.floating:
            if k not in t.batched:
                shared[k] = t.values[k].detach().clone().requires_grad_()
        parameters = dict(t.module.named_parameters()) if t.module else {}
        for k, p in (shared | parameters).items():
            p.grad, p.main_grad = None, torch.zeros_like(p, dtype=torch.float32, memory_format=torch.contiguous_format)
        samples, parts = [], {k: [] for k in self.floating if k in t.batched}
        for call in layout:
            arguments = t.take(call, filler) | shared
            leaves = {k: arguments[k].detach().requires_grad_() for k in parts}
            real = [at for at, i in enumerate(call) if i >= 0]
            with torch.enable_grad(), t.layout(call):
                found = t.results(arguments | {k: leaf.clone() for k, leaf in leaves.items()})  # so that it may work in place
            outputs = [(y, d) for y, d in zip(found, t.dims) if d is not None and y.requires_grad]
            if not outputs:
                raise ValueError("no output requires a gradient")
            self._draw(outputs, len(call))
            index = torch.tensor(call, device=t.device)
            given = []
            for (y, d), dy in zip(outputs, self.upstream):
                own = dy[index.clamp(min=0)].clone()
                own[index < 0] = 0
                given.append(own.movedim(0, d).flatten(d, d + 1))
            torch.autograd.backward([y for y, _ in outputs], given)
            samples += [call[at] for at in real]
            for k, leaf in leaves.items():
                if leaf.grad is not None:
                    parts[k].append(leaf.grad.movedim(t.batch, 0)[real])
        order = sorted(range(len(samples)), key=samples.__getitem__)
        out = {f"d{k}": torch.cat(p)[order] for k, p in parts.items() if p}
        for k, p in (shared | parameters).items():
            used = bool(p.main_grad.any())
            if p.grad is not None or used:
                out[f"d{k}"] = p.main_grad if p.grad is None else p.grad.clone()
            p.grad = None
            del p.main_grad
        return out

    def _draw(self, outputs: list, count: int) -> None:
        """An upstream gradient for every sample, the same in every layout, its exponents spread over the samples."""
        if self.upstream:
            return
        for number, (y, d) in enumerate(outputs):
            shape = _by_sample(y, d, count).shape[1:]
            g = generator(y.device, self.t.seed, "upstream", number)
            dy = torch.randn(self.t.count, *shape, generator=g, device=y.device)
            powers = torch.randint(-6, 7, (self.t.count, *[1] * len(shape)), generator=g, device=y.device)
            self.upstream.append((dy * torch.exp2(powers.float())).to(y.dtype))


def gradients(t: Target, step: Step, name: str, layout: Layout, filler: str, whole: dict) -> list[Row]:
    """What backward left under a layout against what it left for the whole batch."""
    try:
        found = step.gradients(layout, filler)
    except OutOfTime:
        raise
    except Exception as error:
        return [t.row(INVARIANCE, name, rows=max(map(len, layout)), detail=f"raised {sentence(error)}")]
    rows = []
    for k, expected in whole.items():
        if filler == "nonfinite" and k.removeprefix("d") not in t.batched:
            continue  # NaN beside a sample is in the sum over samples
        if k not in found:
            rows.append(t.row(INVARIANCE, name, tensor=k, rows=max(map(len, layout)), detail="backward left no gradient"))
            continue
        rows += _compared(t, INVARIANCE, name, [found[k]], [expected], [k], rows=max(map(len, layout)))
    return rows


def accuracy(t: Target, reference: Callable) -> list[Row]:
    """The error against `reference` in fp64: at most twice that of the reference itself in the inputs' dtype, and one
    rounding (the criterion of FlashAttention's tests)."""
    def judged(values: dict) -> list[torch.Tensor]:
        found = tree_leaves(t.returned(reference, values))
        if len(found) != len(t.dims):
            raise ValueError(f"the reference returned {len(found)} tensors, expected {len(t.dims)}, as {t.name} does")
        return [y for y, d in zip(found, t.dims) if d is not None]

    raised = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in t.values.items()}
    ours = [y for y, d in zip(t.call(range(t.count)), t.dims) if d is not None]
    rows = []
    for name, y, low, exact in zip(_outputs(t), ours, judged(t.values), judged(raised)):
        u, tiny = contract.rounding(y.dtype)
        limit = CONTRACT["any"]["accuracy"] * (low.double() - exact).abs().max() + u * exact.abs() + tiny
        rows.append(against_bound(t, "accuracy", y, exact.double(), limit.expand_as(exact), y.dtype, "given", t.count,
                                  f"twice the reference's own error in {dtype_name(t.dtype)}", name))
    return rows


def audit(fn: Callable, *inputs, batch: int = 0, shared: Iterable[str] = (), outputs: Iterable[str] = (),
          reference: Callable | None = None, backward: bool | None = None, seconds: float = 120.0, seed: int = 0,
          name: str = "", names: Sequence[str] = (), candidate: str = "", folder: str | Path | None = None, **constants
          ) -> Report:
    """Judges whether a sample's result, and every gradient, depends on what else is in the batch.

    fn(*inputs, **constants) is called on parts of the batch, in other orders, beside other samples and beside NaN; a
    callable may be a function, an nn.Module (its parameters' gradients are judged too), a compiled function or a Triton
    launcher (name what it writes into: outputs=("out",)). batch: the dimension of the first tensor that counts samples;
    which other tensors hold a row a sample is found out, or said with shared=("weight",). reference: an fp64-able
    callable of the same signature, for accuracy. backward: None judges gradients where there is a backward. seconds: the
    budget; what it did not reach needs a fix and says so. names: of the inputs, where fn's signature has none. candidate:
    how a reproducer imports fn, as in file.py:fn; folder: where that goes. Raises ValueError or TypeError
    with one sentence where fn cannot be judged at all.
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r:.80}, expected a callable")
    if "torch._dynamo" in sys.modules and torch._dynamo.config.recompile_limit < RECOMPILES:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):  # beyond it a compiled function runs in eager mode
            return audit(fn, *inputs, batch=batch, shared=shared, outputs=outputs, reference=reference, backward=backward,
                         seconds=seconds, seed=seed, name=name, names=names, candidate=candidate, folder=folder, **constants)
    started = time.monotonic()
    name = name or getattr(fn, "__name__", type(fn).__name__)
    t = Target(fn, inputs, constants, batch, shared, outputs, name, seed, names)
    rows, notes, layouts = determinism(t, 2), [], plan(t.count, seed)
    one_call = (time.monotonic() - started) / max(t.calls, 1)
    steady = all(r.verdict == PASS for r in rows)
    steps: list[tuple[str, str, Callable]] = []
    if steady:
        if t.device.type == "cuda":
            steps.append((DETERMINISM, "whole batch", lambda: determinism(t, SWEEP["runs"])))
        whole: dict = {}
        for kind in KINDS:
            with contextlib.suppress(Exception):  # sharper inputs may be none that the callable takes
                found = t.compute([list(range(t.count))], kind=kind)[1]
                if kind == "given" or any(bool(y.isfinite().all()) for y in found if y.is_floating_point()):
                    whole[kind] = found
        for layout, (calls, filler) in layouts.items():
            steps.append(("invariance", layout, lambda layout=layout, calls=calls, filler=filler: invariance(
                t, layout, calls, filler, whole)))
        if backward is not False:
            step, base = Step(t), None
            try:
                base = step.gradients([list(range(t.count))])
            except Exception as error:
                if backward:
                    rows.append(t.row(INVARIANCE, "whole batch", detail=f"raised {sentence(error)}"))
            if base is not None:
                each = {"micro_batches:each": ([[i] for i in range(t.count)], "stale")} if t.count <= 64 else {}
                keep = ("permuted", "padded", "left_padded", "micro_batches:ragged", "neighbours:nonfinite")
                for layout, (calls, filler) in ({k: v for k, v in layouts.items() if k in keep} | each).items():
                    if layout.startswith("neighbours"):
                        calls = calls[:1]
                    steps.append((INVARIANCE, layout, lambda layout=layout, calls=calls, filler=filler: _gradients_of_some(
                        t, step, layout, calls, filler, base)))
                steps.append((DETERMINISM, "backward", lambda: [
                    t.row(DETERMINISM, "backward", compare(again[k], base[k]), tensor=k, against="itself", rows=t.count)
                    for again in [step.gradients([list(range(t.count))])] for k in base if k in again]))
        if reference is not None:
            steps.append(("accuracy", "whole batch", lambda: accuracy(t, reference)))
    steps.append(("atomics-free", "source, PTX, SASS", lambda: _static(t)))
    steps.sort(key=lambda s: s[1].startswith("rows:"))  # the longest sweep last
    if steady:
        steps.append((DETERMINISM, "at the end", lambda: _compared(
            t, DETERMINISM, "at the end", t.compute([list(range(t.count))])[1], whole["given"], _outputs(t), against="at the start",
            rows=t.count, detail="the same call before and after all others")))
    shown = track(steps, description=name, transient=True, disable=not sys.stderr.isatty())
    late: dict[str, list[str]] = {}
    t.deadline = started + seconds
    for relation, layout, run in shown:
        try:
            rows += run()
        except OutOfTime:
            late.setdefault(relation, []).append(layout)
        except Exception as error:
            rows.append(t.row(relation, layout, detail=f"raised {sentence(error)}"))
    for relation, missing in late.items():
        rows.append(t.row(relation, "not run", detail=f"{', '.join(missing[:4])}{' …' * (len(missing) > 4)}: the budget of {seconds:g} "
                          f"s was spent, one call takes {one_call:.2g} s; raise it with seconds="))
    if t.changed:
        notes.append(f"It changes its input {', '.join(sorted(t.changed))} in place; every call here got a copy of a sample's rows.")
    if any(r.layout == "at the end" and r.verdict == NEEDS_FIX for r in rows):
        notes.append("Its result depends on the calls before it, as of a function that is compiled anew for other shapes; what "
                     "differs between layouts may come from that.")
    if any(d is None for d in t.dims):
        notes.append(f"Not judged, because nothing in them counts samples: outputs {[i for i, d in enumerate(t.dims) if d is None]}.")
    report = Report(name, rows, t.read(), notes, target=t)
    t.deadline = float("inf")
    if folder is not None and any(r.verdict == NEEDS_FIX and r.mismatches for r in rows):
        from bi_kernels.audit.callable_repro import export
        report.repro = export(t, rows, candidate, Path(folder))
    return report


def _gradients_of_some(t: Target, step: Step, layout: str, calls: Layout, filler: str, base: dict) -> list[Row]:
    """`gradients`, where a layout may leave samples out."""
    samples = sorted(i for call in calls for i in call if i >= 0)
    whole = {k: g[samples] if k.removeprefix("d") in t.batched else g for k, g in base.items()}
    return gradients(t, step, layout, calls, filler, whole)


def _static(t: Target) -> list[Row]:
    """Source, PTX and SASS of what one call, and its backward, launch."""
    with static.recorded() as launches, contextlib.suppress(Exception):
        t.call(list(range(t.count)))
        Step(t).gradients([list(range(t.count))])
    function = type(t.module).forward if t.module is not None else t.function
    unread = [f for f in static.source(function) if f.kind == static.UNREADABLE]
    if unread and not launches.variants and not launches.findings:
        return [t.row("atomics-free", "source, PTX, SASS", verdict=UNSUPPORTED, inputs="", detail=str(unread[0]))]
    return atomics_free([(SimpleNamespace(function=function, row=t.row), launches)])[0]
