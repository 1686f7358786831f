"""What is asked of a backward: which gradients, of which outputs, from which upstream gradient, and how often."""

from collections.abc import Callable
from functools import partial

import torch

from bi_kernels.audit.callables.relations import left
from bi_kernels.audit.callables.step import NoBackward, Pair, Step
from bi_kernels.audit.callables.target import Target
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.kinds import Kind
from bi_kernels.audit.evidence.verdicts import UNSUPPORTED, Row, sentence
from bi_kernels.audit.relations.gradient import INVARIANCE

STRIDED, UNBUFFERED = "a strided upstream gradient", "no main_grad, the batch in reverse"
IN_MEMORY = "the same in memory"
LEAVES = 6  # inputs and parameters each of which is asked for its gradient alone
TWICE, EXPANDED, KEPT = "a graph kept, backward twice", "an expanded upstream gradient", "the upstream gradient is kept"


def _one_used(number: int, zeros: bool) -> Pair:
    """Uses one output; the others get no upstream gradient, or one of zeros."""

    def pair(ys: list, given: list) -> tuple[list, list]:
        if zeros:
            return ys, [dy if i == number else torch.zeros_like(dy) for i, dy in enumerate(given)]
        return [ys[number]], [given[number]]

    return pair


def _expanded(ys: list, given: list) -> tuple[list, list]:
    """Gives one number as the upstream gradient of all, as of a sum."""
    return ys, [y.new_full((), 0.75).expand(y.shape) for y in ys]


def _in_memory(ys: list, given: list) -> tuple[list, list]:
    return ys, [dy.contiguous() for dy in _expanded(ys, given)[1]]


def _strided(ys: list, given: list) -> tuple[list, list]:
    """Gives the first columns of wider tensors as upstream gradients, as of what was concatenated."""
    return ys, [torch.cat((dy, dy), -1)[..., : dy.shape[-1]] for dy in given]


def _twice(step: Step, leaves: dict, shared: dict, outputs: list, upstream: list) -> None:
    """Goes through a kept graph a second time; what the second leaves is what is judged."""
    torch.autograd.backward(outputs, [dy.clone() for dy in upstream], retain_graph=True)
    parameters = list(step.t.module.parameters()) if step.t.module else []
    for leaf in (*leaves.values(), *shared.values(), *parameters):
        leaf.grad = None
        if getattr(leaf, "main_grad", None) is not None:
            leaf.main_grad.zero_()
    torch.autograd.backward(outputs, upstream)


def _signed_zeros_apart(found: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both without what a term of 0 in a sum may change: the sign of a zero, and what 0 × Inf makes."""
    return torch.where(wanted.isfinite(), found + 0.0, wanted), wanted + 0.0


# what one step shows of a demand; the last is what an expanded gradient is held against
STEPS: dict[str, Callable[[Target], Step]] = {
    STRIDED: partial(Step, pair=_strided),
    TWICE: partial(Step, backward=_twice),
    EXPANDED: partial(Step, pair=_expanded),
    IN_MEMORY: partial(Step, pair=_in_memory),
}


def demands(t: Target, step: Step, whole: dict[str, torch.Tensor]) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges each demand against `whole`, the gradients that `step` has when all are wanted of all
    outputs."""
    said = {"against": "all gradients wanted", "rows": t.count, "axes": [Kind.DEMAND]}
    every = [t.every]

    def same(layout: str, step: Step, names: list[str]) -> list[Row]:
        return left(t, layout, step.gradients(every), {k: whole[k] for k in names}, **said)

    def expanded() -> list[Row]:
        found, wanted = (STEPS[way](t).gradients(every) for way in (EXPANDED, IN_MEMORY))
        return left(t, EXPANDED, found, wanted, **said | {"against": IN_MEMORY})

    def used(layout: str, number: int) -> list[Row]:
        found, wanted = (Step(t, pair=_one_used(number, zeros)).gradients(every) for zeros in (False, True))
        told = said | {"against": "zeros of the others"}
        pairs = {k: _signed_zeros_apart(found.get(k, torch.zeros_like(v)), v) for k, v in wanted.items()}
        return [t.row(INVARIANCE, layout, compare(*pair), tensor=k, **told) for k, pair in pairs.items()]

    def unbuffered() -> list[Row]:
        step, turned = Step(t, buffered=False), t.every[::-1]
        found, wanted = step.gradients([turned]), step.gradients(every)
        kept = {k: v for k, v in wanted.items() if k.removeprefix("d") not in t.batched}
        told = {"against": "the whole batch, in its order", "axes": [Kind.PLACE]}
        return left(t, UNBUFFERED, found, kept, **said | told)

    def kept() -> list[Row]:
        drifts = []

        def backward(step: Step, leaves: dict, shared: dict, outputs: list, upstream: list) -> None:
            before = [dy.clone() for dy in upstream]
            torch.autograd.backward(outputs, upstream)
            drifts.extend(compare(a, b) for a, b in zip(upstream, before))

        Step(t, backward=backward).gradients(every)
        told = said | {"against": "itself before", "tensor": "upstream"}
        return [t.row(INVARIANCE, KEPT, d, **told | {"detail": "backward writes into it"}) for d in drifts]

    out = {}
    if len(whole) > LEAVES:
        t.refused["each gradient alone"] = f"there are {len(whole)}, of which the first {LEAVES} were asked"
    if len(whole) > 1:
        for k in list(whole)[:LEAVES]:
            layout = f"{k.removeprefix('d')} alone wants a gradient"
            out[layout] = partial(same, layout, Step(t, wanted=[k.removeprefix("d")]), [k])
            if len(whole) > 2:
                layout, rest = f"{k.removeprefix('d')} alone is frozen", [other for other in whole if other != k]
                out[layout] = partial(same, layout, Step(t, wanted=[other.removeprefix("d") for other in rest]), rest)
    if len(step.upstream) > 1:
        for number in range(len(step.upstream)):
            layout = f"output {number} alone is used"
            out[layout] = partial(used, layout, number)
    out[EXPANDED] = expanded
    out[STRIDED] = partial(same, STRIDED, STEPS[STRIDED](t), list(whole))
    out[UNBUFFERED] = unbuffered
    out[TWICE] = partial(same, TWICE, STEPS[TWICE](t), list(whole))
    out[KEPT] = kept
    return {layout: partial(refusable, t, layout, run) for layout, run in out.items()}


def refusable(t: Target, layout: str, run: Callable[[], list[Row]]) -> list[Row]:
    """Returns a demand's rows; where the callable refuses it, and says so, the row that says what it said."""
    try:
        return run()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        if isinstance(error, NoBackward):
            return []
        return [t.row(INVARIANCE, layout, verdict=UNSUPPORTED, rows=t.count, detail=sentence(error))]
