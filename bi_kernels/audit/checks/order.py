"""The calls before: whatever they were, and whatever a tensor held then, the next call has the bits of the first."""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module

from bi_kernels.audit.axes import Kind
from bi_kernels.audit.checks.modes import untrained
from bi_kernels.audit.checks.requests import Variant
from bi_kernels.audit.compare import compare
from bi_kernels.audit.findings import UNSUPPORTED, Row, sentence
from bi_kernels.audit.step import Results
from bi_kernels.audit.targets.any_callable import CallableTarget, tensors
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import DTYPES

UPDATED = "weights updated in place"
OTHER = {torch.float32: torch.bfloat16, torch.float64: torch.float32}

# ops of the registry


def op_order(u: Step) -> dict[str, Variant]:
    """Returns what an op is asked after other calls: in other shapes and dtypes, and on the same tensors when they held
    other numbers."""

    def after_others() -> tuple[Results, Results]:
        for dtype in DTYPES.values():
            with contextlib.suppress(Exception):  # what the candidate refuses; in its own dtype it is judged
                _of_first_samples(u, dtype)
        return u.made(), u.base

    def refilled() -> tuple[Results, Results]:
        given = u.inputs()
        u.rolled(given)
        for k, t in u.others().items():
            given[k].copy_(t)
        rolled = untrained(u.rolled(given))
        expected = u.made(u.others())
        others = {k: expected[k] for k in u.results}
        return u.made(given) | rolled, expected | untrained(others)

    return {"after other calls": after_others, "tensors written to": refilled}


def _of_first_samples(u: Step, dtype: torch.dtype) -> None:
    """Calls the candidate on the first sample, and on the first three, in a dtype; backward, too."""
    given = {k: t.to(dtype) if k in u.floating else t for k, t in u.inputs().items()}
    for count in (1, 3):
        rows = sum(u.lengths[:count])
        tokens, shared = u.parts({k: t.clone().requires_grad_(k in u.floating) for k, t in given.items()})
        tokens = {k: t[:rows] for k, t in tokens.items()}
        outputs = u.subject.outputs(u.subject.forward(tokens, shared, (rows,), u.at[:rows]))
        sum(o.float().sum() for o in outputs if o.requires_grad).backward()


# any callable


def _other_dtype(t: CallableTarget) -> None:
    """Calls a target on inputs of another dtype. A module's parameters stay as they are: it may refuse."""
    t.called(
        {k: v.to(OTHER.get(v.dtype, torch.float32)) for k, v in tensors(t.values).items() if v.is_floating_point()}
    )


BEFORE: dict[str, Callable[[CallableTarget], object]] = {
    "one sample": lambda t: t.call([0]),
    "another order": lambda t: t.call(t.every[::-1]),
    "NaN": lambda t: t.call([-1] * t.count, "nonfinite"),
    "another dtype": _other_dtype,
}


def _after(t: CallableTarget, layout: str, before: Callable, whole: list[Tensor]) -> list[Row]:
    said = {"against": "the first call", "rows": t.count, "axes": [Kind.HISTORY]}
    try:
        before(t)
    except Exception as error:
        said["detail"] = f"the call before was refused: {sentence(error)}"
    return t.compared("invariance", layout, t.whole(), whole, **said)


def _weights(t: CallableTarget) -> dict[str, Tensor]:
    """Returns what may be updated between two calls: a module's parameters, the floating tensors that all samples
    share."""
    if t.module is not None:
        return {k: p for k, p in t.module.named_parameters() if p.is_floating_point()}
    rest = tensors(t.values).items()
    return {k: v for k, v in rest if k not in t.batched and k not in t.outputs and v.is_floating_point()}


def _updated(t: CallableTarget, whole: list[Tensor]) -> list[Row]:
    """Updates weights in place between two calls, as an optimizer does: the second call must have the results of fresh
    tensors that hold the same, and not those of the first. A module gets its own values back."""
    own, of_module = _weights(t), t.module is not None
    weights = own if of_module else {k: v.clone() for k, v in own.items()}
    kept = {k: v.detach().clone() for k, v in weights.items()}
    moved_of = lambda v: v.clone().mul_(0.5).add_(v.flip(0) if v.dim() else v, alpha=0.25)  # as an optimizer might
    called = lambda weights: [y.clone() for y in t.called({} if of_module else weights)]
    try:
        moved = {k: moved_of(v) for k, v in kept.items()}
    except (NotImplementedError, RuntimeError, TypeError) as error:  # such as of quantised weights
        return [t.row("invariance", UPDATED, verdict=UNSUPPORTED, detail=sentence(error))]
    try:
        called(weights)
        with torch.no_grad():
            for k, v in weights.items():
                v.copy_(moved[k])
        fresh = {k: v.detach().clone() for k, v in weights.items()}  # before the call: it may write into them
        found = called(weights)
        instead = {k: torch.nn.Parameter(fresh[k], p.requires_grad) for k, p in own.items()} if of_module else {}
        with _reparametrize_module(t.module, instead, tie_weights=True) if of_module else contextlib.nullcontext():
            wanted = called(fresh)
    finally:
        with torch.no_grad():
            for k, v in weights.items():
                v.copy_(kept[k])
    said = {"against": "fresh tensors of equal values", "rows": t.count, "axes": [Kind.HISTORY]}
    rows = t.compared("invariance", UPDATED, found, wanted, **said)
    unmoved = whole and of_module and not any(compare(a, b).mismatches for a, b in zip(found, whole))
    if unmoved and any(k[1:] in own and bool(g.any()) for k, g in t.trained.items()):
        stale = "the update changed nothing, although backward leaves the weights a gradient"
        rows.append(t.row("invariance", UPDATED, tensor=t.output_name(t.judged[0]), detail=stale, **said))
    return rows + t.compared("invariance", UPDATED, t.whole(), whole, **said | {"against": "before the update"})


def history(t: CallableTarget, whole: list[Tensor]) -> dict[str, Callable[[], list[Row]]]:
    """Returns what judges the whole batch after each call before it."""
    out = {f"after {k}": partial(_after, t, f"after {k}", before, whole) for k, before in BEFORE.items()}
    return out | ({UPDATED: partial(_updated, t, whole)} if _weights(t) else {})
