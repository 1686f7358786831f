"""A training step of an op of the registry: what a real backward() leaves under any layout and micro-batch split.

Gradients of tokens are gathered back to logical order; gradients of parameters are what stands in `main_grad`, or in
`.grad` where the candidate leaves it there, after the last call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bi_kernels.audit import step
from bi_kernels.audit.attention_keys import keys
from bi_kernels.audit.inputs import draw, generator, on, powers
from bi_kernels.audit.layouts import Call, layouts, of_each_token
from bi_kernels.audit.step import Context, Results
from bi_kernels.audit.targets.fresh_memory import of_candidate, poisoned_memory
from bi_kernels.audit.targets.op import CANCELLING, POISONED, OpUnderTest, fill, gather, places
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


class Step(step.Step):
    """One training step of an op: its inputs of one kind in samples of these lengths, and their upstream gradient. The
    whole call is the packed one."""

    def __init__(self, subject: OpUnderTest, kind: str, lengths: Sequence[int] = ()):
        super().__init__()
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
        self.outputs: list[Tensor] = []  # of the calls that were last made, in logical order

    @cached_property
    def layouts(self) -> dict[str, list[Call]]:
        return layouts(self.lengths, self.subject.problem.seed)

    @property
    def call(self) -> Call:
        return self.layouts["packed"][0]

    @property
    def nan_in_padding(self) -> bool:
        return self.kind in ("nonfinite", NAN_PADDING)

    @cached_property
    def floating(self) -> list[str]:
        return [k for k, t in (self.tokens | self.shared).items() if t.is_floating_point()]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return self.shared

    def inputs(self) -> dict[str, Tensor]:
        made = {k: t.clone() for k, t in (self.tokens | self.shared).items()}
        trained = [k for k in self.shared if made[k].is_floating_point()]
        return made | {k: torch.nn.Parameter(made[k], requires_grad=False) for k in trained}

    def parts(self, given: dict) -> list[dict]:
        """Returns those of the whole call's inputs that every token has its own of, and those that are shared."""
        return [{k: given[k] for k in held} for held in (self.tokens, self.shared)]

    def outputs_of(self, given: dict, function: Callable | None = None) -> Sequence[Tensor]:
        return self.forward(self.call, *self.parts(given), function)

    def named(self, outputs: Sequence[Tensor]) -> Results:
        return self.subject.named(outputs)

    def draw(self, outputs: Sequence[Tensor], lead: int = 1) -> None:
        """Draws the step's upstream gradient; lead: dimensions of the outputs that count tokens."""
        if self.dy:
            return
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
        view: Callable[[Tensor], Tensor] = lambda t: t,
    ) -> dict[str, Tensor]:
        """Returns {input: its gradient}, of tokens in logical order; calls: or the name of their layout; view: in which
        the op is given its tokens and what comes upstream. Raises ValueError for a gradient that is missing, or that
        stands in padding."""
        shared = {k: t.detach().clone().requires_grad_(t.is_floating_point()) for k, t in self.shared.items()}
        trained = {k: t for k, t in shared.items() if t.is_floating_point()}
        step.prepare(trained.values(), main_grad)
        out = {k: torch.zeros_like(t) for k, t in self.tokens.items() if t.is_floating_point()}
        self.outputs = []
        for call in self.layouts[calls] if isinstance(calls, str) else calls:
            self._add(call, shared, view, out)
        self.in_grad = {k for k, t in trained.items() if t.grad is not None}
        out |= {k: step.left(t) for k, t in trained.items()}
        if missing := [k for k, t in out.items() if t is None]:
            raise ValueError(f"the candidate's backward left no gradient for {missing[0]}")
        return out

    @torch.no_grad()
    def without_gradients(self) -> list[Tensor]:
        """Returns the outputs of one packed call of which no gradient is wanted, as a rollout's."""
        tokens, shared = ({k: t.clone() for k, t in given.items()} for given in (self.tokens, self.shared))
        return [t.clone() for t in self.forward(self.call, tokens, shared)]

    def forward(self, call: Call, tokens: dict, shared: dict, function: Callable | None = None) -> Sequence[Tensor]:
        """Returns the outputs of one call of whole samples; function: in place of the candidate's, and as it is."""
        tensors, told = self.arguments(call, tokens, shared)
        with token_layout(call, self.lengths) if self.says_layout else nullcontext():
            return self.subject.outputs((function or self.subject.called)(*tensors, **told))

    def arguments(self, call: Call, tokens: dict, shared: dict) -> tuple[list[Tensor], dict]:
        """Returns what the candidate is given in a call: tensors by position, the rest by name."""
        s, rows = self.subject, on(self.at.device, call.index.reshape(-1)).clamp(min=0)
        cached = keys(call, self.lengths) if s.problem.op.cache else None  # those of the queries: samples are whole
        return s.arguments(tokens, shared, call.index.shape, self.at[rows], call.cu_seqlens, cached)

    @contextmanager
    def memory(self, later: int) -> Iterator[None]:
        with poisoned_memory(self.subject.calls + later), of_candidate():
            yield

    def grad(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], dy: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Returns the leaves' gradients, None where there is none; fresh memory is as in a call."""
        with self.memory(0):
            return torch.autograd.grad(outputs, leaves, dy, allow_unused=True)

    def _add(self, call: Call, shared: dict, view: Callable, out: dict) -> None:
        """Runs one call and its backward; its outputs, and the gradients of its tokens, go to their places."""
        index = on(self.at.device, call.index.reshape(-1))
        rows, padding = index.clamp(min=0), index < 0
        to, taken = places(call, index.device)
        tokens = {k: gather(t, call.index, self.nan_in_padding) for k, t in self.tokens.items()}
        for k in out:
            tokens[k].requires_grad_()
        outputs = self.forward(call, {k: view(t) for k, t in tokens.items()}, shared)
        made = [o.detach().reshape(call.index.size, *o.shape[call.index.ndim :]) for o in outputs]
        self.outputs = self.outputs or [y.new_zeros(self.count, *y.shape[1:]) for y in made]
        for into, y in zip(self.outputs, made):
            fill(into, to, y, taken)
        self.draw(outputs, call.index.ndim)
        masked = lambda dy: dy[rows].masked_fill(padding.view(-1, *[1] * (dy.dim() - 1)), 0)
        self.backward(outputs, [view(masked(dy).reshape(o.shape)) for dy, o in zip(self.dy, outputs)], (), Context())
        for k in out:
            if tokens[k].grad is None:
                raise ValueError(f"the candidate's backward left no gradient for {k}")
            grad = tokens[k].grad.reshape(call.index.size, *out[k].shape[1:])
            fill(out[k], to, grad, taken)
            if taken is not None and not self.nan_in_padding and bool((grad[padding] != 0).any()):
                raise ValueError(f"the candidate's backward left a gradient of {k} in padding, which has none upstream")
