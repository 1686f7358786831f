"""An op under test: a candidate's function for one problem, called in any layout."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from bi_kernels.audit.axes import Side
from bi_kernels.audit.compare import Tensors
from bi_kernels.audit.findings import NEEDS_FIX, UNSUPPORTED
from bi_kernels.audit.inputs import on
from bi_kernels.audit.layouts import Call, Keys, keys, layouts, of_each_token, spans
from bi_kernels.audit.targets.base import Target
from bi_kernels.audit.targets.fresh_memory import of_candidate, poisoned_memory
from bi_kernels.audit.targets.op_config import OpConfig, joined
from bi_kernels.contract import CONTRACT, SHAPES, SWEEP, VARIANT, dtype_name

POISONED = 3  # sample that holds NaN and Inf, of inputs that are not finite
CANCELLING = "cancelling"  # the inputs under which another order of a sum shows most


@dataclass
class OpUnderTest(Target):
    """A candidate's function for one problem, with what was computed of it."""

    required: ClassVar[bool] = True
    problem: OpConfig
    function: Callable
    candidate: str
    device: str
    command: str = ""
    memo: dict = field(default_factory=dict, repr=False)
    calls: int = 0
    own_lengths: Sequence[int] = ()
    twins: bool = False  # every second sample begins as the one before it does

    @property
    def sides(self) -> Mapping[str, Collection[str]]:
        return {Side.INPUT: self.problem.op.tokens, Side.WEIGHT: self.problem.op.shared}

    @property
    def lengths(self) -> Sequence[int]:
        return self.own_lengths or (VARIANT if self.problem.brief else SHAPES[self.problem.shapes])["lengths"]

    @property
    def largest(self) -> int:
        if self.problem.brief:
            return max(VARIANT["rows"])
        return SWEEP["interpreter_rows"] if self.problem.device.type == "cpu" else max(SWEEP["rows"])

    @property
    def whose(self) -> tuple[str, ...]:
        p = self.problem
        return p.op.audit, p.op.name, p.case, self.candidate, dtype_name(p.dtype), self.device

    @property
    def parts(self) -> list[str]:
        return list(self.problem.returned)

    @property
    def free(self) -> dict[str, tuple]:
        """Returns the op's arguments that change no bit, those that the candidate takes."""
        if self.candidate == "bi_kernels" or not self.problem.op.free:
            return self.problem.op.free
        takes = inspect.signature(self.function).parameters
        every = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        return {k: values for k, values in self.problem.op.free.items() if every or k in takes}

    def once(self, key, make: Callable):
        """Returns what `make` made for this key when it was first asked for."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def inputs(self, kind: str, count: int, poisoned: torch.Tensor | None = None) -> tuple[dict, dict]:
        key = ("inputs", kind, count, None if poisoned is None else tuple(poisoned.nonzero().flatten().tolist()))
        return self.once(key, lambda: self.drawn(kind, count, poisoned))

    def drawn(self, kind: str, count: int, poisoned: torch.Tensor | None = None) -> tuple[dict, dict]:
        """Draws the inputs of `count` tokens: (those of every token, those that are shared)."""
        tokens, shared = self.problem.inputs(kind, count, poisoned)
        first = spans(self.lengths)
        for a, b in zip(first[::2], first[1::2]) if self.twins else ():
            n = min(len(a), len(b))
            for t in tokens.values():
                t[b[0] : b[0] + n] = t[a[0] : a[0] + n]
        return tokens, shared

    def constants(self) -> dict:
        return self.once("constants", lambda: self.problem.constants(max(*self.lengths, self.largest)))

    def call(self, tokens: dict, shared: dict, lead: tuple[int, ...], *where) -> Tensors:
        """Returns what the candidate makes of tokens in a rollout, without gradients, a row a token; `where` they are,
        as in `arguments`.

        Tensors go by position, so a candidate may name them as it likes; constants and positions go by name. The tokens
        are copies, so a candidate may work in place; fresh memory holds ones and zeros by turns, so an element that it
        leaves unwritten differs from call to call.
        """
        tokens = {k: t.clone() for k, t in tokens.items()}
        with torch.no_grad():
            out = self.forward(tokens, shared, lead, *where)
        for t in self.outputs(out):
            if not isinstance(t, torch.Tensor) or tuple(t.shape[: len(lead)]) != tuple(lead):
                got = tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
                raise ValueError(f"the candidate returned {got}, expected a tensor of shape {tuple(lead)} + …")
        return each(lambda t: t.reshape(-1, *t.shape[len(lead) :]), joined(out))

    def outputs(self, out) -> Sequence:
        """Returns what the candidate returned, one by one. Raises ValueError where some of several are missing."""
        found = out if isinstance(out, (tuple, list)) else (out,)
        if 1 < len(self.parts) != len(found):
            raise ValueError(f"the candidate returned {len(found)} of the outputs {', '.join(self.parts)}")
        return found

    def named(self, outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns outputs by name; those of the registry where it names as many."""
        names = (
            self.parts if len(self.parts) == len(outputs) else [f"{self.parts[0]}[{i}]" for i in range(len(outputs))]
        )
        return {name: t.detach() for name, t in zip(names, outputs)}

    def forward(self, *where):
        """Calls the candidate on what `arguments` makes of the same."""
        tensors, told = self.arguments(*where)
        return self.called(*tensors, **told)

    def arguments(
        self,
        tokens: dict,
        shared: dict,
        lead: tuple[int, ...],
        positions: torch.Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        cached: Keys | None = None,
    ) -> tuple[list[torch.Tensor], dict]:
        """Returns what the candidate is given for tokens of the leading shape `lead`: tensors by position, the rest by
        name."""
        told = dict(self.constants())
        if self.problem.op.cache:
            cached = cached or keys(Call(np.empty(lead), cu_seqlens and tuple(cu_seqlens)), self.lengths)
            told |= cached.arguments(self.problem.device)
        if self.problem.op.positions:
            if cu_seqlens is not None:
                told["cu_seqlens"] = on(self.problem.device, np.array(cu_seqlens))
            else:
                told["positions"] = positions.reshape(lead)
        return self.problem.arguments(tokens, shared), told

    def over_ones(self) -> None:
        """Makes fresh memory of the next call hold ones, so that what is left unwritten does not pass for 0."""
        self.calls += self.calls % 2

    def called(self, *tensors: torch.Tensor, **told):
        """Calls the candidate where fresh memory holds ones and zeros by turns."""
        self.calls += 1
        with poisoned_memory(self.calls), of_candidate():
            return self.function(*tensors, **told)

    def compute(self, calls: Sequence[Call], kind: str = CANCELLING, poisoned_sample=POISONED, page=0) -> Tensors:
        """Computes every logical token's result under a layout, gathered back to logical order; page: of a cache in
        pages."""
        device, lengths = self.problem.device, self.lengths
        sample, position = (on(device, at) for at in of_each_token(lengths))
        tokens, shared = self.inputs(kind, sum(lengths), sample == poisoned_sample)
        result = None
        for call in calls:
            cached = keys(call, lengths, page) if self.problem.op.cache else None
            lies = lambda k: cached.index if k in self.problem.op.cache else call.index
            gathered = {k: gather(t, lies(k), kind == "nonfinite") for k, t in tokens.items()}
            at = position[on(device, call.index.reshape(-1).clip(min=0))]
            out = self.call(gathered, shared, call.index.shape, at, call.cu_seqlens, cached)
            if result is None:
                result = each(lambda y: y.new_zeros(sum(lengths), *y.shape[1:]), out)
            to, taken = places(call, device)
            each(lambda into, y: fill(into, to, y, taken), result, out)
        return result

    def layout(self, name: str, kind: str = CANCELLING) -> Tensors:
        calls = layouts(self.lengths, self.problem.seed)[name]
        return self.once(("layout", name, kind), lambda: self.compute(calls, kind))

    def forget(self) -> None:
        self.memo.clear()


def each(function: Callable, *outputs: Tensors):
    """Applies a function to a tensor, or to each of a tuple of them."""
    return function(*outputs) if isinstance(outputs[0], torch.Tensor) else tuple(map(function, *outputs))


def gather(t: torch.Tensor, index: np.ndarray, nonfinite: bool) -> torch.Tensor:
    """Gathers tokens in the shape of `index`. What padding holds is nobody's business: stale numbers, or NaN beside
    others' NaN."""
    at = on(t.device, index)
    found = t[at.clamp(min=0)]
    if (index < 0).any():
        found[at < 0] = (float("nan") if nonfinite else 7.0) if t.dtype.is_floating_point else 0
    return found


def places(call: Call, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the tokens of a call and their rows in it, None for all; found on the host, so that no device is waited
    for."""
    flat = call.index.reshape(-1)
    rows = np.flatnonzero(flat >= 0)
    taken = None if len(rows) == len(flat) else on(device, rows)
    return on(device, flat[rows]), taken


def fill(result: torch.Tensor, to: torch.Tensor, out: torch.Tensor, taken: torch.Tensor | None) -> None:
    """Writes rows of `out`, those `taken` or all, to rows of the result."""
    if (out.dtype, out.shape[1:]) != (result.dtype, result.shape[1:]):
        raise ValueError(
            f"the candidate returned {out.dtype} {tuple(out.shape[1:])} a token after "
            f"{result.dtype} {tuple(result.shape[1:])}"
        )
    result[to] = out if taken is None else out[taken]


def refusal(subject: OpUnderTest, error: Exception) -> str:
    """Returns the verdict on a candidate that raised: `unsupported` for a TypeError, ValueError or NotImplementedError
    that names the dtype, where the contract does not demand it; else it needs a fix."""
    name = dtype_name(subject.problem.dtype)
    said = re.search(rf"\b({name}|{str(subject.problem.dtype).removeprefix('torch.')})\b", str(error))
    clear = isinstance(error, (TypeError, ValueError, NotImplementedError)) and said
    return UNSUPPORTED if clear and name not in CONTRACT["dtypes"]["mandatory"] else NEEDS_FIX
