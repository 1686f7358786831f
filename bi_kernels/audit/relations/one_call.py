"""One packed call of a few samples with its backward, to be made again in other ways."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from bi_kernels.audit.problem.subject import CANCELLING, OpUnderTest, of_candidate, poisoned_memory
from bi_kernels.audit.relations.step import Step

LENGTHS = (5, 1, 17, 40)
ALIKE = 19  # tokens of samples of one length

Outputs = dict  # {output, or d and an input: its bits}; None for a gradient that is not there
Variant = Callable[[], tuple[Outputs, Outputs]]  # returns what a way gives, and what it is to give


def gradients(step: Step, layout: str = "packed") -> Outputs:
    """Returns the gradients of a step under a layout, by the names that they have here."""
    return {f"d{k}": t for k, t in step.gradients(layout).items()}


class BaselineCall:
    """One packed call of a subject with its backward, and the same made in other ways."""

    def __init__(self, subject: OpUnderTest, lengths: Sequence[int] = LENGTHS):
        self.subject = subject
        self.step = Step(subject, CANCELLING, lengths)
        (self.call,) = self.step.layouts["packed"]
        self.floating = [k for k, t in self.inputs().items() if t.is_floating_point()]
        self.base = self.made()

    @cached_property
    def folded(self) -> Outputs:
        """Returns what the call gives with parameters that have a main_grad."""
        return self.made(main_grad=True)

    @property
    def results(self) -> Outputs:
        """Returns what the outputs of the call are."""
        return {k: t for k, t in self.base.items() if k not in [f"d{k}" for k in self.floating]}

    def inputs(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the call by name, new ones each time; what is trained is a parameter."""
        made = {k: t.clone() for k, t in (self.step.tokens | self.step.shared).items()}
        trained = [k for k in self.step.shared if made[k].is_floating_point()]
        return made | {k: torch.nn.Parameter(made[k], requires_grad=False) for k in trained}

    def others(self) -> dict[str, torch.Tensor]:
        """Returns tensors of the same shapes that hold other numbers."""
        return {k: t.flip(0) for k, t in self.inputs().items()}

    def outputs(self, given: dict, function: Callable | None = None) -> Sequence[torch.Tensor]:
        return self.step.forward(self.call, *self.parts(given), function)

    def parts(self, given: dict) -> list[dict]:
        return [{k: given[k] for k in held} for held in (self.step.tokens, self.step.shared)]

    def named(self, outputs: Sequence[torch.Tensor]) -> Outputs:
        return self.subject.named(outputs)

    def made(
        self,
        wanted: Sequence[str] | None = None,
        used: Sequence[int] | None = None,
        given: dict | None = None,
        upstream: Callable[[int, torch.Tensor], torch.Tensor] = lambda number, dy: dy,
        times: int = 1,
        function: Callable | None = None,
        main_grad: bool = False,
        between: Callable[[], object] = lambda: None,
    ) -> Outputs:
        """Returns the outputs, and the gradients of the inputs `wanted` as `torch.autograd.grad` has them.

        used: numbers of the outputs that have a gradient upstream; upstream: changes that of an output's number; given:
        the inputs; times: that the backward runs, the last of which counts; main_grad: what parameters have there is
        their gradient, where the candidate adds to it; between: what comes before the backward.
        """
        given, wanted = given or self.inputs(), self.floating if wanted is None else wanted
        leaves = [given[k].requires_grad_() for k in wanted]
        held = {k: given[k] for k in wanted if k in self.step.shared and main_grad}
        for t in held.values():
            t.main_grad = torch.zeros_like(t, dtype=torch.float32, memory_format=torch.contiguous_format)
        outputs = self.outputs(given, function)
        if not self.step.dy:
            self.step.upstream(outputs, 1)
        numbers = [i for i, o in enumerate(outputs) if o.requires_grad and (used is None or i in used)]
        if not numbers:
            raise ValueError("no output of the candidate requires a gradient")
        dys = [upstream(i, self.step.dy[i].clone()) for i in numbers]
        between()
        for left in reversed(range(times)):
            grads = self.backward([outputs[i] for i in numbers], leaves, dys, left)
        grads = [held[k].main_grad if g is None and k in held else g for k, g in zip(wanted, grads)]
        return self.named(outputs) | {f"d{k}": g for k, g in zip(wanted, grads)}

    def backward(self, outputs: Sequence, leaves: Sequence, upstream: Sequence, left: int = 0) -> Sequence:
        """Returns the leaves' gradients, None where there is none; fresh memory is as in a call, and `left` more
        backwards come."""
        with poisoned_memory(self.subject.calls + left), of_candidate():
            return torch.autograd.grad(outputs, leaves, upstream, retain_graph=left > 0, allow_unused=True)

    def rolled(self, given: dict | None = None, function: Callable | None = None) -> Outputs:
        """Returns the outputs of a call without gradients."""
        with torch.no_grad():
            return self.named([t.clone() for t in self.outputs(given or self.inputs(), function)])

    @staticmethod
    def untrained(made: Outputs) -> Outputs:
        """Returns the same under names that say so."""
        return {f"{k}, no gradient wanted": t for k, t in made.items()}

    def one_token(self, lead: tuple[int, ...]) -> Outputs:
        """Returns what is made of the first token, given with the leading shape `lead`."""
        given = {k: t[:1] if k in self.step.tokens else t for k, t in self.inputs().items()}
        leaves = {k: t.clone().requires_grad_(k in self.floating) for k, t in given.items()}
        tokens, shared = self.parts(leaves)
        own = {k: t.reshape(lead + t.shape[1:]) for k, t in tokens.items()}
        outputs = self.subject.outputs(self.subject.forward(own, shared, lead, self.step.at[:1]))
        trained = [(o, dy[:1].reshape(o.shape)) for o, dy in zip(outputs, self.step.dy) if o.requires_grad]
        outs, dys = zip(*trained)
        grads = self.backward(outs, [leaves[k] for k in self.floating], dys)
        made = {k: t.reshape(1, *t.shape[len(lead) :]) for k, t in self.named(outputs).items()}
        return made | {f"d{k}": g for k, g in zip(self.floating, grads)}

    def first(self, dtype: torch.dtype) -> None:
        """Calls the candidate on the first sample, and on the first three, in a dtype; backward, too."""
        given = {k: t.to(dtype) if k in self.floating else t for k, t in self.inputs().items()}
        for count in (1, 3):
            rows = sum(self.step.lengths[:count])
            tokens, shared = self.parts({k: t.clone().requires_grad_(k in self.floating) for k, t in given.items()})
            tokens = {k: t[:rows] for k, t in tokens.items()}
            outputs = self.subject.outputs(self.subject.forward(tokens, shared, (rows,), self.step.at[:rows]))
            sum(o.float().sum() for o in outputs if o.requires_grad).backward()
