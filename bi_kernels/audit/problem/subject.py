"""A subject: a candidate's function for one problem, called in any layout."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bi_kernels.audit.evidence.drift import Drift, Tensors
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, UNSUPPORTED, Judged, Row
from bi_kernels.audit.problem.attention_keys import Keys, keys
from bi_kernels.audit.problem.call_layouts import Call, layouts
from bi_kernels.audit.problem.inputs import on
from bi_kernels.audit.problem.problem import Problem, joined
from bi_kernels.contract import CONTRACT, SHAPES, SWEEP, dtype_name

SHARPEST = "cancelling"  # the inputs under which another order of a sum shows most


@dataclass
class Subject(Judged):
    """A candidate's function for one problem, with what was computed of it."""

    problem: Problem
    function: Callable
    candidate: str
    device: str
    command: str = ""
    memo: dict = field(default_factory=dict, repr=False)
    calls: int = 0
    own_lengths: Sequence[int] = ()

    @property
    def lengths(self) -> Sequence[int]:
        return self.own_lengths or SHAPES[self.problem.shapes]["lengths"]

    @property
    def largest(self) -> int:
        return SWEEP["interpreter_rows"] if self.problem.device.type == "cpu" else max(SWEEP["rows"])

    def row(
        self,
        relation: str,
        layout: str,
        drift: Drift | None = None,
        against: str = "",
        inputs: str = "normal",
        rows: int = 0,
        verdict: str = "",
        **more,
    ) -> Row:
        """Returns the row of a relation and a layout; it needs a fix where elements differ, or where there is no
        drift."""
        p = self.problem
        verdict = verdict or (NEEDS_FIX if drift is None or drift.mismatches else PASS)
        evidence = {} if drift is None else drift.json()
        more = {"tensor": [*p.returned][drift.part if drift else 0]} | more
        return Row(
            p.op.audit,
            p.op.name,
            p.case,
            self.candidate,
            dtype_name(p.dtype),
            self.device,
            relation,
            layout,
            against,
            inputs,
            rows,
            verdict,
            first_failing_op=p.op.name if verdict == NEEDS_FIX else None,
            repro=self.command if verdict == NEEDS_FIX else "",
            **evidence,
            **more,
        )

    def inputs(self, kind: str, count: int, poisoned: torch.Tensor | None = None) -> tuple[dict, dict]:
        key = ("inputs", kind, count, None if poisoned is None else tuple(poisoned.nonzero().flatten().tolist()))
        if key not in self.memo:
            self.memo[key] = self.problem.inputs(kind, count, poisoned)
        return self.memo[key]

    def constants(self) -> dict:
        if "constants" not in self.memo:
            self.memo["constants"] = self.problem.constants(max(*self.lengths, self.largest))
        return self.memo["constants"]

    def call(
        self,
        tokens: dict,
        shared: dict,
        lead: tuple[int, ...],
        positions: torch.Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        cached: Keys | None = None,
    ) -> Tensors:
        """Returns what the candidate makes of tokens of the leading shape `lead`, a row a token.

        Tensors go by position, so a candidate may name them as it likes; constants and positions go by name. The tokens
        are copies, so a candidate may work in place; fresh memory holds ones and zeros by turns, so an element that it
        leaves unwritten differs from call to call.
        """
        tokens = {k: t.clone() for k, t in tokens.items()}
        out = self.forward(tokens, shared, lead, positions, cu_seqlens, cached)
        returned, expected = out if isinstance(out, (tuple, list)) else [out], list(self.problem.returned)
        if len(expected) > 1 and len(returned) != len(expected):
            raise ValueError(f"the candidate returned {len(returned)} of the outputs {', '.join(expected)}")
        for t in returned:
            if not isinstance(t, torch.Tensor) or tuple(t.shape[: len(lead)]) != tuple(lead):
                got = tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
                raise ValueError(f"the candidate returned {got}, expected a tensor of shape {tuple(lead)} + …")
        return each(lambda t: t.reshape(-1, *t.shape[len(lead) :]), joined(out))

    def forward(
        self,
        tokens: dict,
        shared: dict,
        lead: tuple[int, ...],
        positions: torch.Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        cached: Keys | None = None,
    ):
        """Calls the candidate on tokens of the leading shape `lead`."""
        arguments = dict(self.constants())
        if self.problem.op.cache:
            cached = cached or keys(Call(np.empty(lead), cu_seqlens and tuple(cu_seqlens)), self.lengths)
            arguments |= cached.arguments(self.problem.device)
        if self.problem.op.positions:
            if cu_seqlens is not None:
                arguments["cu_seqlens"] = on(self.problem.device, np.array(cu_seqlens))
            else:
                arguments["positions"] = positions.reshape(lead)
        return self.called(*self.problem.arguments(tokens, shared), **arguments)

    def called(self, *tensors: torch.Tensor, **told):
        """Calls the candidate where fresh memory holds ones and zeros by turns."""
        self.calls += 1
        with poisoned_memory(0xFF if self.calls % 2 else 0x00):
            return self.function(*tensors, **told)

    def compute(self, calls: Sequence[Call], kind: str = SHARPEST, poisoned_sample: int = 3, page: int = 0) -> Tensors:
        """Computes every logical token's result under a layout, gathered back to logical order; page: of a cache in
        pages."""
        device, lengths, nonfinite = self.problem.device, self.lengths, kind == "nonfinite"
        sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        tokens, shared = self.inputs(kind, sum(lengths), sample == poisoned_sample)
        position = np.concatenate([np.arange(n) for n in lengths])
        result = None
        for call in calls:
            flat = call.index.reshape(-1)
            place = np.flatnonzero(flat >= 0)  # known on the host, so that no device is waited for
            cached = keys(call, lengths, page) if self.problem.op.cache else None
            gathered = {
                k: gather(t, cached.index if k in self.problem.op.cache else call.index, nonfinite)
                for k, t in tokens.items()
            }
            at = on(device, position[flat.clip(min=0)])
            out = self.call(gathered, shared, call.index.shape, at, call.cu_seqlens, cached)
            if result is None:
                result = each(lambda y: y.new_zeros(sum(lengths), *y.shape[1:]), out)
            to, whole = on(device, flat[place]), len(place) == len(flat)
            taken = None if whole else on(device, place)
            each(lambda into, y, to=to, taken=taken: fill(into, to, y, taken), result, out)
        return result

    def layout(self, name: str, kind: str = SHARPEST) -> Tensors:
        key = ("layout", name, kind)
        if key not in self.memo:
            self.memo[key] = self.compute(layouts(self.lengths, self.problem.seed)[name], kind)
        return self.memo[key]

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


def fill(result: torch.Tensor, to: torch.Tensor, out: torch.Tensor, taken: torch.Tensor | None) -> None:
    """Writes rows of `out`, those `taken` or all, to rows of the result."""
    if (out.dtype, out.shape[1:]) != (result.dtype, result.shape[1:]):
        raise ValueError(
            f"the candidate returned {out.dtype} {tuple(out.shape[1:])} a token after "
            f"{result.dtype} {tuple(result.shape[1:])}"
        )
    result[to] = out if taken is None else out[taken]


@contextlib.contextmanager
def poisoned_memory(byte: int) -> Iterator[None]:
    """Fills what torch.empty, empty_like and new_empty return, so that an element left unwritten is seen."""

    def wrap(make):
        def filled(*args, **kwargs):
            t = make(*args, **kwargs)
            if t.device.type != "meta" and t.is_contiguous():
                t.view(-1).view(torch.uint8).fill_(byte)
            return t

        return filled

    places = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals):
        setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals):
            setattr(owner, name, original)


def refusal(subject: Subject, error: Exception) -> str:
    """Returns the verdict on a candidate that raised: `unsupported` for a TypeError, ValueError or NotImplementedError
    that names the dtype, where the contract does not demand it; else it needs a fix."""
    name = dtype_name(subject.problem.dtype)
    said = re.search(rf"\b({name}|{str(subject.problem.dtype).removeprefix('torch.')})\b", str(error))
    clear = isinstance(error, (TypeError, ValueError, NotImplementedError)) and said
    return UNSUPPORTED if clear and name not in CONTRACT["dtypes"]["mandatory"] else NEEDS_FIX
