"""A training step of a subject: what a real backward() leaves under any layout and micro-batch split.

Upstream gradient and denominator belong to the step, not to the call: every logical token keeps its own in every
layout, and padding has none. Gradients of tokens are gathered back to logical order; gradients of parameters are what
stands in `main_grad`, or in `.grad` where the candidate leaves it there, after the last call.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property

import numpy as np
import torch

from bi_kernels.audit.problem.attention_keys import keys
from bi_kernels.audit.problem.call_layouts import Call, layouts, of_each_token
from bi_kernels.audit.problem.inputs import draw, generator, on, powers
from bi_kernels.audit.problem.subject import (
    CANCELLING,
    POISONED,
    OpUnderTest,
    fill,
    gather,
    of_candidate,
    places,
    poisoned_memory,
)
from bi_kernels.contract import SHAPES
from bi_kernels.tokens import TokenLayout

NAN_PADDING = "normal, NaN in padding"


def token_layout(call: Call, lengths: Sequence[int]) -> TokenLayout:
    """Returns the token layout of a call's whole sequences, made as a user makes it where they all have tokens."""
    flat = call.index.reshape(-1)
    sample, _ = of_each_token(lengths)
    found = np.unique(np.where(flat >= 0, sample[flat], -1), return_index=True, return_counts=True)
    samples, starts, counts = (part[found[0] >= 0] for part in found)
    at = np.argsort(starts)
    if call.cu_seqlens and min(np.diff(call.cu_seqlens)):
        return TokenLayout.packed(call.cu_seqlens, samples[at])
    if call.index.ndim == 2 and len(samples) == len(call.index):
        left = bool((call.index[:, 0] < 0).any())
        return TokenLayout.padded(counts[at], call.index.shape[1], left, samples[at])
    return TokenLayout(starts, counts, flat.size, samples)


def gradient_lengths(subject: OpUnderTest) -> list[int]:
    """Returns the samples of a step: long ones where the tensor core does the work, the forward audits' for fp32."""
    shape = SHAPES[subject.problem.shapes]
    return shape.get("gradient_lengths", shape["lengths"]) if subject.problem.dtype.itemsize == 2 else shape["lengths"]


class Step:
    """One training step of a subject: its inputs, parameters and upstream gradient, and its gradients under a
    layout."""

    def __init__(self, subject: OpUnderTest, kind: str, lengths: Sequence[int] = ()):
        self.subject, self.kind = subject, kind
        self.lengths = list(lengths) or gradient_lengths(subject)
        self.count = sum(self.lengths)
        p = subject.problem
        sample, self.at = (on(p.device, at) for at in of_each_token(self.lengths))
        self.poisoned = (sample == POISONED) & (kind == "nonfinite")
        self.tokens, self.shared = subject.drawn(kind, self.count, self.poisoned)
        if "ignore_index" in p.op.constants:  # every sample has a token to train on
            self.tokens["targets"][self.at == 0] = max(0, p.op.constants["ignore_index"] + 1)
        self.says_layout = True  # else an op has the shapes of a call alone
        self.dy: list[torch.Tensor] = []
        self.in_grad: set[str] = set()  # parameters whose gradient the last step left in `.grad`
        self.outputs: list[torch.Tensor] = []  # of the calls that were last made, in logical order

    @cached_property
    def layouts(self) -> dict[str, list[Call]]:
        return layouts(self.lengths, self.subject.problem.seed)

    @property
    def nan_in_padding(self) -> bool:
        return self.kind in ("nonfinite", NAN_PADDING)

    def upstream(self, outputs: Sequence[torch.Tensor], lead: int) -> None:
        """Draws the step's upstream gradient, once the outputs' shapes are known."""
        p = self.subject.problem
        g = generator(p.device, p.seed, "upstream", self.kind)
        kind, drawn = "normal" if self.kind == "nonfinite" else self.kind, []
        for y in outputs:
            dy = draw(kind if y.dim() > lead else "normal", (self.count, *y.shape[lead:]), y.dtype, g)
            if self.kind == CANCELLING:  # else the sum of a few bf16 numbers is exact in fp32, in any order
                most, shape = 6 if y.dtype == torch.float16 else 12, (self.count, *[1] * (dy.dim() - 1))
                dy *= powers(shape, -most, most + 1, g).to(dy.dtype)
            dy[self.poisoned] = 0
            drawn.append(dy)
        self.dy = drawn  # all of them, or none where memory is short

    def gradients(
        self,
        calls: Sequence[Call] | str = "packed",
        main_grad: bool = True,
        view: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    ) -> dict[str, torch.Tensor]:
        """Returns {input: its gradient}, of tokens in logical order; calls: or the name of their layout; view: in which
        the op is given its tokens and what comes upstream. Raises ValueError for a gradient that is missing, or that
        stands in padding."""
        shared = {k: t.detach().clone().requires_grad_(t.is_floating_point()) for k, t in self.shared.items()}
        trained = {k: t for k, t in shared.items() if t.is_floating_point()}
        for t in trained.values() if main_grad else ():
            t.main_grad = torch.zeros_like(t, dtype=torch.float32, memory_format=torch.contiguous_format)
        out = {k: torch.zeros_like(t) for k, t in self.tokens.items() if t.is_floating_point()}
        self.outputs = []
        self.in_grad.clear()
        for call in self.layouts[calls] if isinstance(calls, str) else calls:
            self._backward(call, shared, view, out)
        for k, t in trained.items():
            out[k] = t.main_grad if t.grad is None and main_grad else t.grad
            if t.grad is not None:
                self.in_grad.add(k)
            if out[k] is None:
                raise ValueError(f"the candidate's backward left no gradient for {k}")
        return out

    @torch.no_grad()
    def without_gradients(self) -> list[torch.Tensor]:
        """Returns the outputs of one packed call of which no gradient is wanted, as a rollout's."""
        (call,) = self.layouts["packed"]
        tokens, shared = ({k: t.clone() for k, t in given.items()} for given in (self.tokens, self.shared))
        return [t.clone() for t in self.forward(call, tokens, shared)]

    def forward(
        self, call: Call, tokens: dict, shared: dict, function: Callable | None = None
    ) -> Sequence[torch.Tensor]:
        """Returns the outputs of one call of whole samples; function: in place of the candidate's, and as it is."""
        tensors, told = self.arguments(call, tokens, shared)
        with token_layout(call, self.lengths) if self.says_layout else nullcontext():
            return self.subject.outputs((function or self.subject.called)(*tensors, **told))

    def arguments(self, call: Call, tokens: dict, shared: dict) -> tuple[list[torch.Tensor], dict]:
        """Returns what the candidate is given in a call: tensors by position, the rest by name."""
        s, rows = self.subject, on(self.at.device, call.index.reshape(-1)).clamp(min=0)
        cached = keys(call, self.lengths) if s.problem.op.cache else None  # those of the queries: samples are whole
        return s.arguments(tokens, shared, call.index.shape, self.at[rows], call.cu_seqlens, cached)

    def _keep(self, outputs: Sequence[torch.Tensor], call: Call, to: torch.Tensor, taken: torch.Tensor | None) -> None:
        """Puts a call's outputs in their places, in logical order."""
        made = [o.detach().reshape(call.index.size, *o.shape[call.index.ndim :]) for o in outputs]
        self.outputs = self.outputs or [y.new_zeros(self.count, *y.shape[1:]) for y in made]
        for into, y in zip(self.outputs, made):
            fill(into, to, y, taken)

    def _backward(self, call: Call, shared: dict, view: Callable, out: dict) -> None:
        """Runs one call and its backward; the gradients of its tokens go to their places in `out`."""
        s, index = self.subject, on(self.at.device, call.index.reshape(-1))
        rows, padding = index.clamp(min=0), index < 0
        to, taken = places(call, index.device)
        tokens = {k: gather(t, call.index, self.nan_in_padding) for k, t in self.tokens.items()}
        for k in out:
            tokens[k].requires_grad_()
        outputs = self.forward(call, {k: view(t) for k, t in tokens.items()}, shared)
        self._keep(outputs, call, to, taken)
        if not self.dy:
            self.upstream(outputs, call.index.ndim)
        upstream = [
            (o, view(dy[rows].masked_fill(padding.view(-1, *[1] * (dy.dim() - 1)), 0).reshape(o.shape)))
            for dy, o in zip(self.dy, outputs)
            if o.requires_grad
        ]
        if not upstream:
            raise ValueError("no output of the candidate requires a gradient")
        with poisoned_memory(s.calls), of_candidate():
            torch.autograd.backward(*zip(*upstream))
        for k in out:
            if tokens[k].grad is None:
                raise ValueError(f"the candidate's backward left no gradient for {k}")
            grad = tokens[k].grad.reshape(call.index.size, *out[k].shape[1:])
            fill(out[k], to, grad, taken)
            if taken is not None and not self.nan_in_padding and bool((grad[padding] != 0).any()):
                raise ValueError(f"the candidate's backward left a gradient of {k} in padding, which has none upstream")
