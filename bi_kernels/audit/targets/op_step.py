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
from bi_kernels.audit.inputs import draw, generator, on, powers
from bi_kernels.audit.layouts import Call, keys, layouts, of_each_token
from bi_kernels.audit.step import PLAIN, Context, Results
from bi_kernels.audit.targets.fresh_memory import of_candidate, poisoned_memory
from bi_kernels.audit.targets.op import CANCELLING, POISONED, OpUnderTest, fill, gather, places
from bi_kernels.contract import SHAPES, VARIANT
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
    if "gradient_lengths" in shape and subject.problem.dtype.itemsize == 2:
        return shape["gradient_lengths"]
    return VARIANT["lengths"] if subject.problem.brief else shape["lengths"]


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
    def parameters(self) -> list[str]:
        return [k for k in self.floating if k in self.shared]

    def inputs(self) -> dict[str, Tensor]:
        made = {k: t.clone() for k, t in (self.tokens | self.shared).items()}
        return made | {k: torch.nn.Parameter(made[k], requires_grad=False) for k in self.parameters}

    def parts(self, given: dict) -> list[dict]:
        """Returns those of the whole call's inputs that every token has its own of, and those that are shared."""
        return [{k: given[k] for k in held} for held in (self.tokens, self.shared)]

    def taken(self, inputs: dict, call: Call | None, how: Context) -> dict:
        found = lambda t: gather(t, call.index, self.nan_in_padding)
        return inputs if call is None else inputs | {k: found(inputs[k]) for k in self.tokens}

    def outputs_of(self, given: dict, call: Call | None = None, how: Context = PLAIN) -> Sequence[Tensor]:
        tokens, shared = self.parts(given)
        return self.forward(call or self.call, {k: how.view(t) for k, t in tokens.items()}, shared, how.function)

    def named(self, outputs: Sequence[Tensor], call: Call | None = None) -> Results:
        return self.subject.named(outputs)

    def draw(self, outputs: Sequence[Tensor], call: Call | None = None) -> None:
        if self.dy:
            return
        p, lead = self.subject.problem, call.index.ndim if call else 1
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

    def upstream(self, call: Call | None = None) -> list[Tensor]:
        if call is None:
            return [dy.clone() for dy in self.dy]
        index = on(self.at.device, call.index)
        own = lambda dy: dy[index.clamp(min=0)].masked_fill((index < 0).view(*index.shape, *[1] * (dy.dim() - 1)), 0)
        return [own(dy) for dy in self.dy]

    def in_order(self, calls: Sequence[Call], parts: Sequence[Tensor | None], name: str = "") -> Tensor | None:
        if any(y is None for y in parts):
            return None
        found = None
        for call, y in zip(calls, parts):
            y = y.reshape(call.index.size, *y.shape[call.index.ndim :])
            found = y.new_zeros(self.count, *y.shape[1:]) if found is None else found
            to, taken = places(call, y.device)
            fill(found, to, y, taken)
            padding = on(y.device, call.index.reshape(-1) < 0) if name and taken is not None else None
            if padding is not None and not self.nan_in_padding and bool((y[padding] != 0).any()):
                raise ValueError(f"the candidate's backward left a gradient of {name} in padding, which has none")
        return found

    def gradients(self, calls: Sequence[Call] | str = "packed", main_grad: bool = True, **how) -> dict[str, Tensor]:
        """Returns {input: its gradient}, of tokens in logical order; calls: or the name of their layout; how: see
        Context. Raises ValueError for a gradient that is missing, or that stands in padding."""
        calls = self.layouts[calls] if isinstance(calls, str) else calls
        found = self.made(calls=calls, main_grad=main_grad, **how)
        out = {k: found.pop(f"d{k}") for k in self.floating}
        self.outputs = [*found.values()]
        if missing := [k for k, t in out.items() if t is None]:
            raise ValueError(f"the candidate's backward left no gradient for {missing[0]}")
        return out

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

    def over_ones(self) -> None:
        self.subject.over_ones()

    @contextmanager
    def memory(self, later: int) -> Iterator[None]:
        with poisoned_memory(self.subject.calls + later), of_candidate():
            yield

    def with_gradients(self, outputs: Sequence[Tensor], leaves: dict[str, Tensor], dy: Sequence[Tensor]) -> Results:
        """Returns outputs by name, and the leaves' gradients; fresh memory is as in a call."""
        used = [(y, d.reshape(y.shape)) for y, d in zip(outputs, dy) if y.requires_grad]
        with self.memory(0):
            grads = torch.autograd.grad(
                [y for y, _ in used], [*leaves.values()], [d for _, d in used], allow_unused=True
            )
        return self.named(outputs) | {f"d{k}": g for k, g in zip(leaves, grads)}
