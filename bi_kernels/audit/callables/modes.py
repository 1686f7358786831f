"""The modes in which a callable is called: a rollout wants no gradient, a training step does, and the bits are one."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from bi_kernels.audit.callables.relations import compared
from bi_kernels.audit.callables.target import Target, tensors
from bi_kernels.audit.evidence.verdicts import UNSUPPORTED, Row, sentence

WANTED = "a gradient wanted"


def _wanted(t: Target) -> list[torch.Tensor]:
    arguments = t.take(t.every)
    for k, v in tensors(arguments).items():
        if v.is_floating_point() and k not in t.outputs:
            arguments[k] = v.requires_grad_().clone()  # which it may write into
    with torch.enable_grad(), t.layout(t.every):
        return [y.detach() for y in t.results(arguments)]


def _inference(t: Target) -> list[torch.Tensor]:
    arguments = t.take(t.every)
    with torch.inference_mode(), t.layout(t.every):
        return t.results(arguments)


def _by_design(m: nn.Module) -> bool:
    """Tells whether a module is there to compute something else in training: it draws, or it looks at the batch."""
    drops = isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
    return drops or isinstance(m, nn.modules.batchnorm._NormBase)


@contextlib.contextmanager
def _switched(module: nn.Module) -> Iterator[None]:
    """Puts a module that trains into eval(), and another into train(); leaves it as it was."""
    training, buffers = {m: m.training for m in module.modules()}, [(b, b.clone()) for b in module.buffers()]
    try:
        module.train(not module.training)
        yield
    finally:
        for m, was in training.items():
            m.training = was
        with torch.no_grad():
            for b, value in buffers:
                b.copy_(value)


def _other(t: Target) -> list[torch.Tensor]:
    with _switched(t.module):
        return t.call(t.every)


def modes(t: Target) -> dict[str, Callable[[Target], list[torch.Tensor]]]:
    """Returns what calls a target in each mode but the one in which it is judged, without gradients."""
    found = {WANTED: _wanted, "inference_mode": _inference}
    if t.module and not any(map(_by_design, t.module.modules())):
        found["eval()" if t.module.training else "train()"] = _other
    return found


def judged(t: Target, mode: str, whole: list[torch.Tensor]) -> list[Row]:
    """Compares the whole batch in a mode with `whole`; a callable that refuses a gradient, and says so, is not judged
    where one is wanted."""
    said = {"against": "no_grad", "rows": t.count}
    try:
        found = t.rows(modes(t)[mode](t), t.count)
    except (RuntimeError, TypeError, ValueError) as error:
        if mode != WANTED:
            raise
        return [t.row("invariance", mode, verdict=UNSUPPORTED, detail=sentence(error), **said)]
    return compared(t, "invariance", mode, found, whole, **said)
