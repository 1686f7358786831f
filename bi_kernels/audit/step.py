"""A training step of a target: what a real backward() leaves, over the calls of a layout, or of one call made in any
other way.

The upstream gradient belongs to the step, not to a call: every logical token, or sample, keeps its own in every layout,
and padding has none.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Results = dict[str, Tensor | None]  # outputs by name, and gradients under "d" and a name; None: there is none


class NoBackward(ValueError):
    """Raised where nothing that a target returns has a gradient."""


@dataclass(frozen=True)
class Context:
    """How calls and their backward are made, next to the layout of their tokens."""

    wanted: Collection[str] | None = None  # inputs and parameters whose gradient is wanted; None: of all
    used: Collection[int] | None = None  # outputs that have an upstream gradient; None: all
    main_grad: bool = False  # whether parameters have one
    offset: int = 0  # of a main_grad within a flat buffer, in elements
    upstream: Callable[[int, Tensor], Tensor] = lambda number, dy: dy  # changes the upstream gradient of an output
    times: int = 1  # that the backward runs over the same graph; the last counts
    between: Callable[[], object] = lambda: None  # what comes between forward and backward
    function: Callable | None = None  # in place of the target's
    view: Callable[[Tensor], Tensor] = lambda t: t  # in which an op is given its tokens and their upstream gradient
    filler: str = "stale"  # what a callable is given in a place without a sample

    def wants(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted


PLAIN = Context()


class Step:
    """Inputs of one kind with their upstream gradient, and what a target makes of them.

    A subclass knows one kind of target: an op of the registry, or any callable. A call is one of a layout, or None: all
    tokens at once, as they are. A subclass has

    - floating, parameters: names of the inputs that may want a gradient, and of those that all tokens share
    - inputs(): new inputs of the whole call by name; taken(inputs, call, how): those of a call
    - outputs_of(inputs, call, how): what the target returns; named(outputs, call): the same by name
    - draw(outputs, call): draws `dy` where there is none yet; upstream(call): that of a call, new each time
    - in_order(calls, parts, name): outputs, or gradients of the input `name`, a row a token in logical order
    """

    floating: Sequence[str]
    parameters: Collection[str]

    def __init__(self):
        self.dy: list[Tensor] = []  # the upstream gradient of each output, drawn when its shape is known
        self.in_grad: set[str] = set()  # parameters whose gradient the last backward left in `.grad`
        self.leaves: set[str] = set()  # what had a gradient wanted, so far

    @contextmanager
    def module_parameters(self, how: Context) -> Iterator[dict[str, Tensor]]:
        """Yields the parameters of a module that the target is; afterwards their gradients are as they were."""
        yield {}

    @property
    def of_tokens(self) -> list[str]:
        """Names the inputs that may want a gradient and of which every token has its own."""
        return [k for k in self.floating if k not in self.parameters]

    @cached_property
    def base(self) -> Results:
        """Holds what the whole call gives, gradients in `.grad`."""
        return self.made()

    @cached_property
    def folded(self) -> Results:
        """Holds what the whole call gives, gradients of parameters in their main_grad."""
        return self.made(main_grad=True)

    @property
    def results(self) -> Results:
        """Returns the outputs of the whole call."""
        return {k: t for k, t in self.base.items() if k[1:] not in self.leaves}

    def others(self) -> dict[str, Tensor]:
        """Returns inputs of the same shapes that hold other numbers."""
        return {k: t.flip(0) if t.dim() else t for k, t in self.inputs().items()}

    def made(self, given: dict | None = None, calls: Sequence | None = None, **how) -> Results:
        """Returns the outputs of the calls, and the gradients that their backward leaves, a row a token in logical
        order. given: inputs of the whole call; calls: of a layout, else the whole call; how: see Context."""
        context, inputs = Context(**how), given or self.inputs()
        with self.module_parameters(context) as module:
            wanted = [k for k in self.floating if context.wants(k)]
            shared = {k: inputs[k].requires_grad_() for k in wanted if k in self.parameters} | module
            grads: dict[str, list] = {k: [] for k in wanted if k not in shared}
            self.leaves |= {*wanted, *module}
            prepare((shared if context.main_grad else module).values(), context.main_grad, context.offset)
            outputs = []
            kept = lambda t: t.clone() if calls and t is not None else t  # the next call may write into it
            for call in calls or (None,):
                own = self.taken(inputs, call, context)
                leaves = {k: own[k].requires_grad_() for k in grads}
                y = self.outputs_of(own, call, context)
                self.draw(y, call)
                self.backward(y, self.upstream(call), [*leaves.values(), *shared.values()], context)
                outputs.append(self.named([kept(t.detach()) for t in y], call))
                for k, t in leaves.items():
                    grads[k].append(kept(t.grad))
            self.in_grad = {k for k, t in shared.items() if t.grad is not None}
            merged = lambda parts, name="": self.in_order(calls, parts, name) if calls else parts[0]
            every = [k for k in outputs[0] if all(k in made for made in outputs)]
            left_of = lambda k: merged(grads[k], k) if k in grads else left(shared[k])
            found = {k: merged([made[k] for made in outputs]) for k in every}
            return found | {f"d{k}": left_of(k) for k in (*wanted, *module)}

    def rolled(self, given: dict | None = None, function: Callable | None = None) -> Results:
        """Returns the outputs of the whole call without gradients, as of a rollout."""
        with torch.no_grad():
            outputs = self.outputs_of(given or self.inputs(), how=Context(function=function))
            return self.named([t.clone() for t in outputs])

    def backward(
        self, outputs: Sequence[Tensor], dy: Sequence[Tensor], leaves: Collection[Tensor], how: Context
    ) -> None:
        """Runs a real backward of the outputs in use, which adds to the leaves' `.grad` and `main_grad`."""
        numbers = [i for i, y in enumerate(outputs) if y.requires_grad and (how.used is None or i in how.used)]
        if not numbers:
            raise NoBackward("no output of the candidate requires a gradient")
        how.between()
        for later in reversed(range(how.times)):
            with self.memory(later):
                upstream = [how.upstream(i, how.view(dy[i])) for i in numbers]
                torch.autograd.backward([outputs[i] for i in numbers], upstream, retain_graph=later > 0)
            if later:
                clear(leaves)

    def over_ones(self) -> None:
        """Makes fresh memory of the next call and its backward hold ones, where the target's memory can be chosen."""

    @contextmanager
    def memory(self, later: int) -> Iterator[None]:
        """Says what fresh memory holds in a backward, of which so many more come."""
        yield


def prepare(parameters: Iterable[Tensor], main_grad: bool, offset: int = 0) -> None:
    """Clears gradients, and gives tensors a main_grad of zeros, or none; offset: before it, in a flat buffer."""
    for t in parameters:
        t.grad = None
        if main_grad:
            flat = torch.zeros(offset + t.numel(), dtype=torch.float32, device=t.device)
            t.main_grad = flat[offset:].view(t.shape)
        else:
            vars(t).pop("main_grad", None)


def clear(leaves: Iterable[Tensor]) -> None:
    """Clears gradients, and fills a main_grad with zeros where there is one."""
    for t in leaves:
        t.grad = None
        if getattr(t, "main_grad", None) is not None:
            t.main_grad.zero_()


def left(t: Tensor) -> Tensor | None:
    """Returns the gradient that a backward left of a tensor: in `.grad`, else in its main_grad."""
    return getattr(t, "main_grad", None) if t.grad is None else t.grad
