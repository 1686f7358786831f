"""Models of Transformers with one thing broken or forgotten, each with the relation that must flag it."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bi_kernels
from bi_kernels.audit.findings import Row
from bi_kernels.audit.targets.model import Control, Relation, layout_rows, mode_rows, rescored_row
from bi_kernels.audit.targets.transformers import TransformersTarget, build, case, generated
from bi_kernels.integrations.transformers import apply, restore
from bi_kernels.integrations.transformers.gradients import forget
from bi_kernels.integrations.transformers.modules import NORM


def _halves_for_few_rows(self: nn.Linear, x: Tensor) -> Tensor:
    """Adds two halves of K where it is given few rows."""
    if x.numel() // x.shape[-1] > self.few:
        return F.linear(x, self.weight)
    (a, b), (v, w) = x.chunk(2, -1), self.weight.chunk(2, -1)
    return F.linear(a, v) + F.linear(b, w)


def _of_a_scaled_weight(self: nn.Linear, x: Tensor) -> Tensor:
    """Scales the weight first, whose gradient PyTorch then adds up."""
    return F.linear(x, self.weight * 1)


def _other_in_training(self: nn.Linear, x: Tensor) -> Tensor:
    """This package's linear, but for another result where a gradient is wanted."""
    y = bi_kernels.linear(x, self.weight)
    return y * 1.015625 if torch.is_grad_enabled() and self.weight.requires_grad else y


def _other_if_hooked(self: nn.Linear, x: Tensor) -> Tensor:
    """This package's linear, but for another result where hooks look on."""
    y = bi_kernels.linear(x, self.weight)
    return y * 1.015625 if self._forward_hooks else y


def _target(session, name: str = "llama", prepare: Callable = id, ours: bool = True, **told) -> TransformersTarget:
    return TransformersTarget(session, name, "bf16", build(session, name, "bf16", ours, prepare), ours, **told)


def _down(forward: Callable) -> Callable[[object], Callable]:
    """Returns what gives, in a session, the first layer's down projection a class that `apply` does not know."""

    def of(session) -> Callable[[nn.Module], None]:
        def prepare(model: nn.Module) -> None:
            down = model.model.layers[0].mlp.down_proj
            down.__class__, down.few = type("OtherLinear", (nn.Linear,), {"forward": forward}), case(session)["few"]

        return prepare

    return of


def _without_a_norm(model: nn.Module) -> None:
    model.model.layers[0].post_attention_layernorm = nn.Identity()


def _without_its_window(model: nn.Module) -> None:
    model.config.sliding_window = None


def _forget(model: nn.Module) -> None:
    for p in model.parameters():
        forget(p)


def _in(layout: str, prepare: Callable = lambda session: id, **told) -> Callable:
    """Returns what yields the rows of a layout of a changed model."""
    return lambda session: layout_rows(_target(session, prepare=prepare(session), **told), [layout])


def _in_modes(prepare: Callable) -> Callable:
    """Returns what yields the rows of the other modes of a changed model."""
    return lambda session: mode_rows(_target(session, prepare=prepare(session)))


def _changed(name: str, prepare: Callable) -> Callable:
    """Returns what yields the row of the logits of a model that was changed before `apply`."""

    def judge(session) -> list[Row]:
        stock, changed = _target(session, name, ours=False), _target(session, name, prepare)
        return [changed.accuracy_row(changed.logits(), stock.logits())[0]]

    return judge


def _generated(prepare: Callable = lambda session: id, **told) -> Callable:
    """Returns what yields the row of what a changed model samples."""

    def judge(session) -> list[Row]:
        target = _target(session, prepare=prepare(session))
        found = generated(session, target.model, "dynamic", **told)
        said = {"against": "rescored packed", "tensor": "logits"}
        return [rescored_row(target, "generate, dynamic cache", *found, **said)[0]]

    return judge


def _a_module_lost(session) -> list[Row]:
    target = _target(session, ours=False)
    report = copy.deepcopy(apply(target.model))
    del report.replaced["model.norm"]
    return [target.apply_row(report)]


def _restored_in_part(session) -> list[Row]:
    target = _target(session, ours=False)
    before, model = target.state(), target.model
    apply(model)
    norm = model.model.norm
    ours, computes = type(norm), norm.__dict__[NORM]
    restore(model)
    norm.__class__, norm.__dict__[NORM] = ours, computes
    return [target.restored_row(before)]


_HALVES, _FORGETTING = _down(_halves_for_few_rows), _in("singles", between=_forget)
CONTROLS = (
    Control("a report that names one module less", Relation.CONTRACTED, _a_module_lost),
    Control("a linear that adds two halves of K for few rows", Relation.INVARIANCE, _in("singles", _HALVES)),
    Control("a gradient that apply left to PyTorch", Relation.GRADIENT, _in("singles", _down(_of_a_scaled_weight))),
    Control("a layer that trains otherwise", Relation.INVARIANCE, _in("permuted", _down(_other_in_training))),
    Control("a layer that is another with hooks", Relation.INVARIANCE, _in_modes(_down(_other_if_hooked))),
    Control("folds that begin anew from .grad in every micro-batch", Relation.GRADIENT, _FORGETTING),
    Control("a layer without one of its norms", Relation.ACCURACY, _changed("llama", _without_a_norm)),
    Control("a sliding window that is not applied", Relation.ACCURACY, _changed("mistral", _without_its_window)),
    Control("generate that is not told the padding", Relation.PARITY, _generated(told=False)),
    Control("a linear that adds two halves of K for few rows, generated", Relation.PARITY, _generated(_HALVES)),
    Control("restored but for one norm", Relation.DETERMINISM, _restored_in_part),
)
