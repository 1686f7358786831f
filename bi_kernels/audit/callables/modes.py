"""The modes in which a callable is called: a rollout wants no gradient, a training step does, and the bits are one."""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from bi_kernels.audit.callables.relations import compared
from bi_kernels.audit.callables.target import Target, tensors
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.evidence.kinds import Kind
from bi_kernels.audit.evidence.verdicts import UNSUPPORTED, Row, sentence

WANTED, AUTOCAST, FEW = "a gradient wanted", "autocast", ", few samples"


def _wanted(t: Target, samples: list[int]) -> list[torch.Tensor]:
    arguments = t.take(samples)
    with torch.enable_grad(), t.layout(samples):
        for k, v in tensors(arguments).items():
            if v.is_floating_point() and k not in t.outputs:
                arguments[k] = v.requires_grad_().clone()  # which it may write into
        return [y.detach() for y in t.results(arguments)]


def _inference(t: Target, samples: list[int]) -> list[torch.Tensor]:
    arguments = t.take(samples)
    with torch.inference_mode(), t.layout(samples):
        return t.results(arguments)


def _autocast(t: Target, samples: list[int]) -> list[torch.Tensor]:
    with torch.autocast(t.device.type, torch.bfloat16):
        return t.call(samples)


def _deterministic(t: Target, samples: list[int]) -> list[torch.Tensor]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings(action="ignore"):
            return t.call(samples)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


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


def _other(t: Target, samples: list[int]) -> list[torch.Tensor]:
    with _switched(t.module):
        return t.call(samples)


def modes(t: Target) -> dict[str, Callable[[Target, list[int]], list[torch.Tensor]]]:
    """Returns what calls a target on samples in each mode but the one in which it is judged, without gradients."""
    found = {WANTED: _wanted, "inference_mode": _inference, "deterministic algorithms": _deterministic}
    found |= {AUTOCAST: _autocast}
    if t.module and not any(map(_by_design, t.module.modules())):
        found["eval()" if t.module.training else "train()"] = _other
    return found


def judged(t: Target, mode: str, whole: list[torch.Tensor]) -> list[Row]:
    """Compares the whole batch in a mode with `whole`, and few samples in it with the whole batch in it. Autocast may
    compute otherwise, for all samples alike. A callable that refuses a gradient or autocast, and says so, is not
    judged there, nor one that draws in the other of train() and eval()."""
    said = {"against": "no_grad", "rows": t.count, "axes": [Kind.MODE]}
    made = lambda samples: t.rows(modes(t)[mode](t, samples), len(samples))
    try:
        found = [y.clone() for y in made(t.every)]
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        if mode not in (WANTED, AUTOCAST):
            raise
        return [t.row("invariance", mode, verdict=UNSUPPORTED, detail=sentence(error), **said)]
    if mode.endswith("()") and any(compare(a, b).mismatches for a, b in zip(found, made(t.every))):
        return []
    rows = [] if mode == AUTOCAST else compared(t, "invariance", mode, found, whole, **said)
    for few in ([0], t.every[: max(2, t.count // 3)]):
        said, part = {"against": mode, "rows": len(few), "axes": [Kind.COUNT]}, made(few)
        rows += compared(t, "invariance", mode + FEW, part, [y[few] for y in found], **said)
    return rows
