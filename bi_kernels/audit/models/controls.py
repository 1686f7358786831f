"""Models with one thing broken, each of which the relation that is about it must flag."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bi_kernels
from bi_kernels.audit.evidence.verdicts import Row, control_row
from bi_kernels.audit.models.cases import Step, built, case, quiet
from bi_kernels.audit.models.generation import generated, judged
from bi_kernels.audit.models.relations import (
    ACCURACY,
    CONTRACTED,
    DETERMINISM,
    GRADIENT,
    INVARIANCE,
    PARITY,
    Model,
    accuracy,
    back,
    layouts,
    logits,
    state,
    unaccounted,
)
from bi_kernels.integrations.transformers import apply, restore
from bi_kernels.integrations.transformers.gradients import forget

DTYPE = "bf16"


class _Stock(nn.Linear):
    """A linear that `apply` does not know, and leaves to PyTorch."""


class _HalvesForFewRows(nn.Linear):
    """A linear that adds two halves of K where it is given few rows."""

    few = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] > self.few:
            return F.linear(x, self.weight)
        (a, b), (v, w) = x.chunk(2, -1), self.weight.chunk(2, -1)
        return F.linear(a, v) + F.linear(b, w)


class _TrainsOtherwise(nn.Linear):
    """A linear that is another where a gradient is wanted, and else this package's."""

    def forward(self, x: Tensor) -> Tensor:
        y = bi_kernels.linear(x, self.weight)
        return y * 1.015625 if torch.is_grad_enabled() and self.weight.requires_grad else y


def _down(kind: type[nn.Linear], **attributes) -> Callable[[nn.Module], None]:
    """Returns what gives the first layer's down projection another class, before `apply` sees it."""

    def prepare(model: nn.Module) -> None:
        down = model.model.layers[0].mlp.down_proj
        down.__class__ = kind
        vars(down).update(attributes)

    return prepare


def _without_a_norm(model: nn.Module) -> None:
    model.model.layers[0].post_attention_layernorm = nn.Identity()


def _without_its_window(model: nn.Module) -> None:
    model.config.sliding_window = None


def _few(session) -> Callable[[nn.Module], None]:
    return _down(_HalvesForFewRows, few=case(session)["few"])


def _in(layout: str, name: str = "llama", prepare: Callable = lambda session: id, between: Callable = id) -> Callable:
    """Returns the judge of a model in one layout."""

    def judge(session) -> list[Row]:
        model = built(session, name, DTYPE, prepare=prepare(session))
        return list(layouts(session, Model(session, name, DTYPE), Step(session), model, [layout], between=between))

    return judge


def _otherwise(name: str, prepare: Callable) -> Callable:
    """Returns the judge of the logits of a model that was changed before `apply`."""

    def judge(session) -> list[Row]:
        step, stock = Step(session), built(session, name, DTYPE, ours=False)
        changed = built(session, name, DTYPE, prepare=prepare)
        return [accuracy(session, Model(session, name, DTYPE), logits(step, changed), logits(step, stock))[0]]

    return judge


def _generated(prepare: Callable = lambda session: id, **told) -> Callable:
    """Returns the judge of what a model samples."""

    def judge(session) -> list[Row]:
        model = built(session, "llama", DTYPE, prepare=prepare(session))
        found = generated(session, model, "dynamic", **told)
        return [judged(Model(session, "llama", DTYPE), "generate, dynamic cache", found, "logits")[0]]

    return judge


def _a_module_lost(session) -> list[Row]:
    model = built(session, "llama", DTYPE, ours=False)
    report = copy.deepcopy(apply(model))
    del report.replaced["model.norm"]
    who = Model(session, "llama", DTYPE)
    return [who.about(CONTRACTED, "apply", unaccounted(model, report), ["modules unaccounted for"], "")]


def _restored_in_part(session) -> list[Row]:
    model, step = built(session, "llama", DTYPE, ours=False), Step(session)
    before = state(model), logits(step, model)
    apply(model)
    ours = type(model.model.norm)
    restore(model)
    model.model.norm.__class__ = ours
    return [back(Model(session, "llama", DTYPE), before, model, logits(step, model))]


def _forget(model: nn.Module) -> None:
    for p in model.parameters():
        forget(p)


CONTROLS: tuple[tuple[str, str, Callable], ...] = (  # name, the relation that must flag it, its judge
    ("a report that names one module less", CONTRACTED, _a_module_lost),
    ("a linear that adds two halves of K for few rows", INVARIANCE, _in("singles", prepare=_few)),
    ("a linear that apply left to PyTorch", GRADIENT, _in("singles", prepare=lambda session: _down(_Stock))),
    ("a layer that trains otherwise", INVARIANCE, _in("permuted", prepare=lambda session: _down(_TrainsOtherwise))),
    ("folds that begin anew from .grad in every micro-batch", GRADIENT, _in("singles", between=_forget)),
    ("a layer without one of its norms", ACCURACY, _otherwise("llama", _without_a_norm)),
    ("a sliding window that is not applied", ACCURACY, _otherwise("mistral", _without_its_window)),
    ("generate that is not told the padding", PARITY, _generated(told=False)),
    ("a linear that adds two halves of K for few rows, generated", PARITY, _generated(prepare=_few)),
    ("restored but for one norm", DETERMINISM, _restored_in_part),
)


def run(session) -> list[Row]:
    """Judges every control and records its row: the one that flags it, or the first of its relation."""
    rows = []
    for name, relation, judge in CONTROLS[:2] if session.quick else CONTROLS:
        with quiet():
            found = [row for row in judge(session) if row.relation == relation]
        rows.append(control_row(name, found))
        session.add(rows[-1:])
        torch.cuda.empty_cache()
    return rows
