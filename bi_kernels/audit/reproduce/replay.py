"""What scripts of the registry's ops call: the inputs as the audit drew them, and the calls of a layout."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch

import bi_kernels.checks  # noqa: F401  (mends Triton's interpreter before a candidate defines a kernel)
from bi_kernels.audit.checks import memory, single_call
from bi_kernels.audit.problem import call_layouts
from bi_kernels.audit.problem.attention_keys import keys
from bi_kernels.audit.problem.call_layouts import VIEWS
from bi_kernels.audit.problem.inputs import on
from bi_kernels.audit.problem.problem import OpConfig
from bi_kernels.audit.problem.registry import OPS
from bi_kernels.audit.problem.subject import POISONED, OpUnderTest, fill, gather, places
from bi_kernels.audit.relations.step import Step, token_layout
from bi_kernels.contract import DTYPES

Parts = list[torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One call of a layout: the numbers of its tokens, in the shape that the op is given, −1 for padding."""

    tokens: torch.Tensor
    keys: torch.Tensor  # of attention: which tokens k and v hold
    where: dict  # what the op is told besides: constants, cu_seqlens, positions, lengths
    made: call_layouts.Call


class Operator:
    """An op of the registry at one shape, dtype and device, with its inputs as the audit drew them.

    inputs: their family; count: of so many tokens, None: those of the samples of the layouts, one after another;
    trained: those of a training step. Of `nonfinite` inputs the tokens of one sample hold NaN and Inf; finite: those
    from this token on.
    """

    def __init__(
        self, op: str, case: str, dtype: str, shapes: str, device: str, seed: int = 0, inputs: str = "normal",
        count: int | None = None, finite: int | None = None, trained: bool = False, threads: int = 1,
    ):  # fmt: skip
        torch.set_num_threads(threads)
        self.problem = OpConfig(OPS[op], case, DTYPES[dtype], shapes, torch.device(device), seed)
        self.subject, self.kind, self.trained = OpUnderTest(self.problem, lambda *_: None, "", ""), inputs, trained
        count, device = count or sum(self.subject.lengths), self.problem.device
        self.at = torch.arange(count, device=device)
        if trained:
            self.given = self.step.tokens, self.step.shared
        elif finite is not None:
            self.given = self.problem.inputs(inputs, count, self.at >= finite)
        else:
            sample, _ = call_layouts.of_each_token(self.subject.lengths)
            of_one = on(device, sample == POISONED) if count == len(sample) else None
            self.given = self.problem.inputs(inputs, count, of_one)

    @cached_property
    def step(self) -> Step:
        return Step(self.subject, self.kind)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each sample."""
        return self.step.lengths if self.trained else self.subject.lengths

    def tensors(self) -> Parts:
        """Returns the inputs in the order in which the op takes them: of every token, and shared ones."""
        return self.problem.arguments(*self.given)

    def where(self, first: int, apart: int = 0) -> dict:
        """Returns what the op is told of one call on the first tokens; apart: from which one on they are another
        sequence, for attention."""
        ends = (0, apart, first) if apart and apart < first else None
        _, told = self.subject.arguments(*self.given, (first,), self.at[:first], ends)
        return told

    def calls(self, layout: str) -> Iterator[Call]:
        """Yields the calls of a layout."""
        device, step = self.problem.device, self.step if self.trained else None
        _, position = call_layouts.of_each_token(self.lengths)
        for made in call_layouts.layouts(self.lengths, self.problem.seed)[layout]:
            cached = keys(made, self.lengths) if self.problem.op.cache else None
            at = on(device, position[made.index.reshape(-1).clip(min=0)])
            if step:
                _, told = step.arguments(made, *self.given)
            else:
                _, told = self.subject.arguments(*self.given, made.index.shape, at, made.cu_seqlens, cached)
            held = cached.index if cached else made.index
            yield Call(on(device, made.index.copy()), on(device, held.copy()), told, made)

    def take(self, t: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns tokens by number; padding holds 7, or NaN where a sample is to be safe from others' NaN."""
        nan = self.step.nan_in_padding if self.trained else self.kind == "nonfinite"
        return gather(t, numbers.cpu().numpy(), nan)

    def gathered(self, layout: str, made: Sequence) -> Parts:
        """Returns what the calls of a layout made, one output after another, a row a token in the tokens' order."""
        each = [list(y) if isinstance(y, (tuple, list)) else [y] for y in made]
        calls = call_layouts.layouts(self.lengths, self.problem.seed)[layout]
        out = []
        for parts in zip(*each):
            rows = [y.detach().reshape(c.index.size, *y.shape[c.index.ndim :]) for y, c in zip(parts, calls)]
            result = rows[0].new_zeros(sum(self.lengths), *rows[0].shape[1:])
            for c, y in zip(calls, rows):
                to, taken = places(c, y.device)
                fill(result, to, y, taken)
            out.append(result)
        return out

    def token_layout(self, call: Call) -> AbstractContextManager:
        """Tells bi_kernels' ops where the sequences of a call lie, as a training loop does."""
        return token_layout(call.made, self.lengths)

    def backward(self, outputs, call: Call) -> None:
        """Runs backward; every token has an upstream gradient of its own, whichever call it is in, and padding none."""
        outputs, index = outputs if isinstance(outputs, (tuple, list)) else (outputs,), call.tokens.reshape(-1)
        if not self.step.dy:
            self.step.draw(outputs, call.tokens.dim())
        pairs = []
        for y, dy in zip(outputs, self.step.dy):
            own = dy[index.clamp(min=0)]
            own[index < 0] = 0
            pairs += [(y, own.reshape(y.shape))] * y.requires_grad
        torch.autograd.backward(*zip(*pairs))

    def judged(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the rows of tokens that a sample of NaN must leave alone: those of the others."""
        return gradient[~self.step.poisoned]

    # layouts that are no calls on tokens; each returns two lists of tensors that should have the same bits

    def viewed(self, fn: Callable, view: str) -> tuple[Parts, Parts]:
        """Calls fn on the inputs in one piece, and lying otherwise in memory."""
        s = self._subject(fn)
        with torch.no_grad():
            return tuple(_listed(made(s, view, self.kind)) for made in (memory.run_contiguous, memory.run_on_view))

    def gradients_viewed(self, fn: Callable, view: str, tensor: str) -> tuple[Parts, Parts]:
        """Runs forward and backward on the inputs in one piece, and lying otherwise in memory, upstream too."""
        step, name = Step(self._subject(fn), self.kind), tensor.removeprefix("d").removesuffix(".grad")
        own = not tensor.endswith(".grad")
        ways = {}, {"view": VIEWS[view]}
        return tuple([step.gradients(main_grad=own, **way)[name].clone()] for way in ways)

    def trained_and_not(self, fn: Callable, layout: str) -> tuple[Parts, Parts]:
        """Calls fn on packed tokens without gradients, and in a layout, or view, of a step that trains."""
        step = Step(self._subject(fn), self.kind)
        plain = list(step.without_gradients())
        calls, view = ("packed", {"view": VIEWS[layout]}) if layout in VIEWS else (layout, {})
        step.gradients(calls, **view)
        return plain, [y.clone() for y in step.outputs]

    def used(self, fn: Callable, axis: str, way: str) -> tuple[Parts, Parts]:
        """Calls fn as usual, and in another way of use, with what it gives there: see `checks.single_call`."""
        s = self._subject(fn)
        return tuple(single_call.again(s, axis, way, once) for once in (True, False))

    def _subject(self, fn: Callable) -> OpUnderTest:
        return OpUnderTest(self.problem, fn, "", "")


def _listed(made) -> Parts:
    return [made] if isinstance(made, torch.Tensor) else [t for part in made for t in _listed(part)]
