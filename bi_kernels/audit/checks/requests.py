"""What is requested of a backward: which gradients, of which outputs, from which upstream gradient, and how often."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bi_kernels.audit.step import Results, Step, prepare
from bi_kernels.audit.targets.op_step import token_layout
from bi_kernels.tokens import TokenLayout

Variant = Callable[[], tuple[Results, Results]]  # returns what the call gives in another way, and what it is to give

MOST = 6  # inputs and parameters each of which is asked for its gradient alone
EXPANDED, STRIDED = "an expanded upstream gradient", "a strided upstream gradient"
APART = "an upstream gradient in every other column"
AGAINST = {EXPANDED: "the same in memory"}  # what a request is compared with, where it is not all gradients
TWICE = "a graph kept, backward twice"
CHECKPOINTED, FROZEN = "checkpointed", "frozen parameters"
FROZEN_CHECKPOINTED = f"{FROZEN}, {CHECKPOINTED}"


def one_number(number: int, dy: Tensor) -> Tensor:
    """Returns an upstream gradient that is one number for all, as of a sum."""
    return dy.new_full((), 0.75).expand(dy.shape)


def in_memory(number: int, dy: Tensor) -> Tensor:
    """Returns an upstream gradient of one number, written out for all."""
    return one_number(number, dy).contiguous()


def apart(number: int, dy: Tensor) -> Tensor:
    """Returns every other column of a wider upstream gradient."""
    return torch.stack((dy, dy), -1)[..., 0]


def strided(number: int, dy: Tensor) -> Tensor:
    """Returns the first columns of a wider upstream gradient, as of what was concatenated."""
    return torch.cat((dy, dy), -1)[..., : dy.shape[-1]] if dy.dim() else dy


def without_signs_of_zeros(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both without what a term of 0 in a sum may change: the sign of a zero, and what 0 × Inf makes."""
    return torch.where(wanted.isfinite(), found + 0.0, wanted), wanted + 0.0


def gradient_requests(step: Step, main_grad: bool = True, exact: bool = True) -> dict[str, Variant]:
    """Returns what any backward is asked: one gradient alone, all but one, one output in use, other upstream gradients,
    and twice over a kept graph. exact: whether zeros upstream of the other outputs may change no sign of a zero."""
    base = step.folded if main_grad else step.base
    outputs = {k: t for k, t in base.items() if k[1:] not in step.leaves}
    names = [k[1:] for k, t in base.items() if k not in outputs and t is not None]
    made = partial(step.made, main_grad=main_grad)
    found: dict[str, Variant] = {}

    def some(wanted: list[str]) -> tuple[Results, Results]:
        all_wanted = outputs | {f"d{k}": step.folded[f"d{k}"] for k in wanted}
        return step.made(wanted=wanted, main_grad=True), all_wanted

    if len(names) > 1:
        for name in names[:MOST]:
            found[f"{name} alone wants a gradient"] = partial(some, [name])
            if len(names) > 2:
                found[f"{name} alone is frozen"] = partial(some, [k for k in names if k != name])

    def used(number: int) -> tuple[Results, Results]:
        zeros = lambda i, dy: dy if i == number else torch.zeros_like(dy)
        step.over_ones()  # a backward may need zeros for the output that is not used: unwritten, they would show
        made_of_one, wanted = made(used=[number]), made(upstream=zeros)
        for k, t in wanted.items():  # an output may be made without some of the inputs: no gradient is zeros
            if t is not None and made_of_one.get(k) is None:
                made_of_one[k] = torch.zeros_like(t)
            if t is not None and not exact and k not in outputs:
                made_of_one[k], wanted[k] = without_signs_of_zeros(made_of_one[k], t)
        return made_of_one, wanted

    if len(step.dy) > 1:
        found |= {f"output {number} alone is used": partial(used, number) for number in range(len(step.dy))}
    found[EXPANDED] = lambda: (made(upstream=one_number), made(upstream=in_memory))
    found[STRIDED] = lambda: (made(upstream=strided), base)
    found[TWICE] = lambda: (made(times=2), base)
    return found


# ops of the registry


def op_requests(u: Step) -> dict[str, Variant]:
    """Returns what an op's backward is asked."""
    found = gradient_requests(u, main_grad=False)
    found[APART] = lambda: (u.made(upstream=apart), u.base)
    for name, values in u.subject.free.items():
        for value in values:
            function = partial(u.subject.function, **{name: value})
            found[f"{TWICE}, {name} = {value}"] = partial(lambda f: (u.made(times=2, function=f), u.base), function)
    if u.of_tokens and u.parameters:
        found |= {FROZEN: partial(frozen, u), FROZEN_CHECKPOINTED: partial(frozen, u, again=True)}
    return found


def _again(u: Step, layout: TokenLayout | None = None, reentrant: bool = False) -> Callable:
    """Returns the candidate in a checkpoint, under a layout both times where there is one."""
    call = layout.within(u.subject.called) if layout else u.subject.called
    return lambda *given, **told: checkpoint(partial(call, **told), *given, use_reentrant=reentrant)


def checkpointed(u: Step) -> tuple[Results, Results]:
    """Compares all outputs and gradients of the call in a checkpoint, those that main_grad holds as well, and in a
    reentrant checkpoint."""
    layout = token_layout(u.call, u.lengths)
    function, said = _again(u, layout), lambda made: {f"{k}, reentrant": t for k, t in made.items()}
    expected = u.base | said(u.base)
    found = u.made(function=function) | said(u.made(function=_again(u, layout, reentrant=True)))
    if u.parameters:
        for into, way in ((found, function), (expected, None)):
            given = u.inputs()
            u.made(given, main_grad=True, function=way)
            into |= {f"main_grad of {k}": given[k].main_grad for k in u.parameters}  # not what is left in .grad
    return found, expected


def frozen(u: Step, again: bool = False) -> tuple[Results, Results]:
    """Compares what the call gives where no parameter trains, and what their main_grad holds then; again: in a
    checkpoint. Without trainable parameters nothing is accumulated, so no layout is needed."""
    given = u.inputs()
    prepare([given[k] for k in u.parameters], main_grad=True)
    u.says_layout = False
    try:
        with TokenLayout([0], [1], 1):  # of another call
            made = u.made(given, wanted=u.of_tokens, function=_again(u) if again else None)
    finally:
        u.says_layout = True
    held = {f"main_grad of a frozen {k}": given[k].main_grad for k in u.parameters}
    expected = u.results | {f"d{k}": u.base[f"d{k}"] for k in u.of_tokens}
    return made | held, expected | {k: torch.zeros_like(t) for k, t in held.items()}
