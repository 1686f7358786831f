"""What is asked of a backward: which gradients, of which outputs, from which upstream gradient, and how often."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch

from bi_kernels.audit.callables.relations import left
from bi_kernels.audit.callables.step import NoBackward, Step
from bi_kernels.audit.callables.target import Target
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.verdicts import UNSUPPORTED, Row, sentence
from bi_kernels.audit.relations.gradient import INVARIANCE

STRIDED, UNBUFFERED = "a strided upstream gradient", "no main_grad, the batch in reverse"
IN_MEMORY = "the same in memory"
LEAVES = 6  # inputs and parameters each of which is asked for its gradient alone
TWICE, EXPANDED, KEPT = "a graph kept, backward twice", "an expanded upstream gradient", "the upstream gradient is kept"


@contextlib.contextmanager
def _frozen(module: torch.nn.Module | None, but: list[str]) -> Iterator[None]:
    """Has none of a module's parameters want a gradient but some."""
    frozen = [p for k, p in (module.named_parameters() if module else ()) if p.requires_grad and k not in but]
    try:
        for p in frozen:
            p.requires_grad_(False)
        yield
    finally:
        for p in frozen:
            p.requires_grad_()


class _Some(Step):
    """A step in which some of the inputs and parameters want a gradient."""

    def __init__(self, t: Target, names: list[str]):
        super().__init__(t)
        self.names = names

    def wants(self, name: str) -> bool:
        return name in self.names

    def gradients(self, *layout) -> dict[str, torch.Tensor]:
        with _frozen(self.t.module, self.names):
            return super().gradients(*layout)


class _OneUsed(Step):
    """A step in which one output is used; the others get no upstream gradient, or one of zeros."""

    def __init__(self, t: Target, number: int, zeros: bool):
        super().__init__(t)
        self.number, self.zeros = number, zeros

    def paired(self, outputs: list, call: list[int]) -> tuple[list, list]:
        ys, given = super().paired(outputs, call)
        if self.zeros:
            return ys, [dy if i == self.number else torch.zeros_like(dy) for i, dy in enumerate(given)]
        return [ys[self.number]], [given[self.number]]


class _Expanded(Step):
    """A step with one number as the upstream gradient of all, as of a sum, in memory or expanded."""

    def __init__(self, t: Target, expanded: bool):
        super().__init__(t)
        self.expanded = expanded

    def paired(self, outputs: list, call: list[int]) -> tuple[list, list]:
        ys, ones = [y for y, _ in outputs], [y.new_full((), 0.75).expand(y.shape) for y, _ in outputs]
        return ys, ones if self.expanded else [dy.contiguous() for dy in ones]


class _Strided(Step):
    """A step whose upstream gradients are the first columns of wider tensors, as of what was concatenated."""

    def paired(self, outputs: list, call: list[int]) -> tuple[list, list]:
        ys, given = super().paired(outputs, call)
        return ys, [torch.cat((dy, dy), -1)[..., : dy.shape[-1]] for dy in given]


class _Unbuffered(Step):
    """A step whose parameters have no main_grad."""

    buffered = False


class _Twice(Step):
    """A step whose graph is kept, and gone through a second time; what the second leaves is what is judged."""

    def run(self, leaves: dict, shared: dict, outputs: list, upstream: list) -> None:
        torch.autograd.backward(outputs, [dy.clone() for dy in upstream], retain_graph=True)
        parameters = list(self.t.module.parameters()) if self.t.module else []
        for leaf in (*leaves.values(), *shared.values(), *parameters):
            leaf.grad = None
            if getattr(leaf, "main_grad", None) is not None:
                leaf.main_grad.zero_()
        torch.autograd.backward(outputs, upstream)


class _Watched(Step):
    """A step that keeps what its upstream gradients held before."""

    def run(self, leaves: dict, shared: dict, outputs: list, upstream: list) -> None:
        before = [dy.clone() for dy in upstream]
        torch.autograd.backward(outputs, upstream)
        self.drifts = [compare(a, b) for a, b in zip(upstream, before)]


def _signed_zeros_apart(found: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both without what a term of 0 in a sum may change: the sign of a zero, and what 0 × Inf makes."""
    return torch.where(wanted.isfinite(), found + 0.0, wanted), wanted + 0.0


# what one step shows of a demand; the last is what an expanded gradient is held against
STEPS: dict[str, Callable[[Target], Step]] = {
    STRIDED: _Strided,
    TWICE: _Twice,
    EXPANDED: partial(_Expanded, expanded=True),
    IN_MEMORY: partial(_Expanded, expanded=False),
}


def demands(t: Target, step: Step, whole: dict[str, torch.Tensor]) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges each demand against `whole`, the gradients that `step` has when all are wanted of all
    outputs."""
    said = {"against": "all gradients wanted", "rows": t.count}
    every = [t.every]

    def same(layout: str, step: Step, names: list[str]) -> list[Row]:
        return left(t, layout, step.gradients(every), {k: whole[k] for k in names}, **said)

    def expanded() -> list[Row]:
        found, wanted = (STEPS[way](t).gradients(every) for way in (EXPANDED, IN_MEMORY))
        return left(t, EXPANDED, found, wanted, **said | {"against": IN_MEMORY})

    def used(layout: str, number: int) -> list[Row]:
        found, wanted = (_OneUsed(t, number, zeros).gradients(every) for zeros in (False, True))
        told = said | {"against": "zeros of the others"}
        pairs = {k: _signed_zeros_apart(found.get(k, torch.zeros_like(v)), v) for k, v in wanted.items()}
        return [t.row(INVARIANCE, layout, compare(*pair), tensor=k, **told) for k, pair in pairs.items()]

    def unbuffered() -> list[Row]:
        step, turned = _Unbuffered(t), t.every[::-1]
        found, wanted = step.gradients([turned]), step.gradients(every)
        kept = {k: v for k, v in wanted.items() if k.removeprefix("d") not in t.batched}
        return left(t, UNBUFFERED, found, kept, **said | {"against": "the whole batch, in its order"})

    def watched() -> list[Row]:
        step = _Watched(t)
        step.gradients(every)
        told = said | {"against": "itself before", "tensor": "upstream"}
        return [t.row(INVARIANCE, KEPT, d, **told | {"detail": "backward writes into it"}) for d in step.drifts]

    out = {}
    if len(whole) > LEAVES:
        t.refused["each gradient alone"] = f"there are {len(whole)}, of which the first {LEAVES} were asked"
    if len(whole) > 1:
        for k in list(whole)[:LEAVES]:
            layout = f"{k.removeprefix('d')} alone wants a gradient"
            out[layout] = partial(same, layout, _Some(t, [k.removeprefix("d")]), [k])
            if len(whole) > 2:
                layout, rest = f"{k.removeprefix('d')} alone is frozen", [other for other in whole if other != k]
                out[layout] = partial(same, layout, _Some(t, [other.removeprefix("d") for other in rest]), rest)
    if len(step.upstream) > 1:
        for number in range(len(step.upstream)):
            layout = f"output {number} alone is used"
            out[layout] = partial(used, layout, number)
    out[EXPANDED] = expanded
    out[STRIDED] = partial(same, STRIDED, STEPS[STRIDED](t), list(whole))
    out[UNBUFFERED] = unbuffered
    out[TWICE] = partial(same, TWICE, STEPS[TWICE](t), list(whole))
    out[KEPT] = watched
    return {layout: partial(refusable, t, layout, run) for layout, run in out.items()}


def refusable(t: Target, layout: str, run: Callable[[], list[Row]]) -> list[Row]:
    """Returns a demand's rows; where the callable refuses it, and says so, the row that says what it said."""
    try:
        return run()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        if isinstance(error, NoBackward):
            return []
        return [t.row(INVARIANCE, layout, verdict=UNSUPPORTED, rows=t.count, detail=sentence(error))]
