"""`apply` swaps a model's modules for ours, all or none, and reports what is left; `restore` swaps them back."""

import warnings
from collections import Counter

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bi_kernels.contract import DTYPES
from bi_kernels.integrations.transformers import modules, ranks
from bi_kernels.integrations.transformers.attention import NAME
from bi_kernels.integrations.transformers.check import check as compare_bits
from bi_kernels.integrations.transformers.classify import SILU, UNKNOWN, plan_of, tried
from bi_kernels.integrations.transformers.gradients import BUFFERS, forget
from bi_kernels.integrations.transformers.norms import recognised
from bi_kernels.integrations.transformers.report import Report
from bi_kernels.integrations.transformers.routing import GRADIENT, ROUTED, Routed, Trial, stock_logits
from bi_kernels.integrations.transformers.swap import (
    FOLDED,
    FORWARDS,
    PARTS,
    WITHIN,
    Swapped,
    check_whole,
    remember_parts,
    swapped,
)
from bi_kernels.parallel.tensor import TensorParallel

TRIED = ("padded right", "padded left", "packed")  # layouts, where code is known by a trial alone
PARAMETERS = (modules.Linear, modules.Embedding, modules.Norm, modules.Experts)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply: model is a {type(model).__name__}, expected a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, Swapped):
            raise ValueError(f"apply: {name or 'the model'} is replaced already; call restore(model) first")
        if "forward" in vars(module):
            raise ValueError(
                f"apply: {name or 'the model'} has a forward set on the instance, as Accelerate and torch.compile do; "
                "unwrap the model first"
            )
    check_whole(model)
    given = [*model.named_parameters(), *model.named_buffers()]
    devices = {str(t.device): name for name, t in given}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"apply: the model is on {len(devices)} devices ({where}), expected one")
    if "meta" in devices:
        raise ValueError("apply: the model is on the meta device, expected one with its weights")
    for name, p in model.named_parameters():
        if p.dtype not in DTYPES.values():
            raise TypeError(f"apply: {name} has dtype {p.dtype}; supported are {', '.join(DTYPES)}, not quantised ones")
        if any(hasattr(p, buffer) for buffer in BUFFERS):
            raise ValueError(f"apply: {name} has a main_grad already, expected none: apply keeps its own")


def _reported(model: nn.Module, plan: dict[str, tuple[type[Swapped] | None, str]], trial: Trial | None) -> Report:
    report, named = Report(), dict(model.named_modules())
    report.kinds = {name: type(module).__name__ for name, module in named.items()}
    for name, (kind, why) in plan.items():
        parent = plan.get(name.rpartition(".")[0], (None, ""))[0]
        if parent is modules.MLP and isinstance(named[name], SILU):
            report.replaced[name] = "SiLU in its MLP's swiglu"
        elif why:
            report.left[name] = why
        elif kind in (Routed, modules.RoutedLayer):
            report.replaced[name] = f"PyTorch's functions, routed: {', '.join(sorted(trial.functions[named[name]]))}"
        elif kind is None or kind is modules.Checkpointed:
            report.containers[name] = type(named[name]).__name__
        else:
            report.replaced[name] = kind.__doc__
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    again = {id(p) for m in named.values() if places[id(m)] > 1 for p in m.parameters(recurse=False)}
    again = again if trial is None else trial.again
    owners: dict[int, list[str]] = {}
    for name, module in named.items():
        for short, p in module.named_parameters(recurse=False):
            owners.setdefault(id(p), []).append(f"{name}.{short}".lstrip("."))
    for name, p in model.named_parameters():
        at = [plan[n.rpartition(".")[0]][0] for n in owners[id(p)]]
        if not p.requires_grad:
            report.folded[name] = "frozen"
        elif id(p) in again:
            report.others[name] = "a call uses it more than once"
        elif not all(kind in PARAMETERS for kind in at) and (trial is None or id(p) not in trial.folded):
            owner = report.kinds[owners[id(p)][0].rpartition(".")[0]]
            report.others[name] = f"its {owner} is PyTorch's"
        elif len(at) > 1 and sorted(k.__name__ for k in at if k) != ["Embedding", "Linear"] and trial is None:
            report.others[name] = f"{' and '.join(owners[id(p)][:2])} share it"
        else:
            report.folded[name] = "tied" if len(at) > 1 else "fp32 fold"
    for name, module in named.items() if trial is not None else ():
        for unknown in trial.unknown.get(module, ()):
            if unknown.startswith(GRADIENT) and name not in report.left:
                report.others[name] = f"{unknown.removeprefix(GRADIENT)}: its gradient is PyTorch's"
    return report


def apply(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, strict: bool = False, check: bool = False
) -> Report:
    """Puts this package's ops into a model, in place; the report says whether the model keeps its bits now.

    If it does, a token's result is batch-invariant, and a step's gradients are split-invariant. Each micro-batch is one
    forward and one backward, in the step's order, cut between sequences. Linears, embeddings, norms, attention and
    experts become ops of ours; what else a model's code asks of PyTorch is found by a short trial call, and routed as
    `batch_invariant_mode` does. Where something has no batch-invariant form, the report's first line says NO and why,
    and a UserWarning repeats it. Parameters, names and buffers stay, so checkpoints save and load.

    group: ranks that share each weight of a model that is replaced whole. Every rank passes the same model and keeps
    its rows; every result has the bits of one rank. It generates by `generate`, not by continuous batching.
    strict: raises ValueError, before anything is replaced, where the answer would be NO.
    check: verifies the answer by bits on three short sequences: padded left and right, packed, prefilled in chunks,
    decoded, and a step cut two ways. Takes seconds, and fp32 copies of the gradients in host memory.

    Raises TypeError and ValueError with one sentence; nothing is replaced then.
    """
    _check(model)
    named = dict(model.named_modules())
    plan = plan_of(named)
    if all(kind is None for kind, _ in plan.values()):
        raise ValueError(f"apply: model is a {type(model).__name__}, expected one with a module that can be replaced")
    done: list[nn.Module] = []
    trial, stock = None, stock_logits(model) if any(why == UNKNOWN for _, why in plan.values()) else None
    try:
        _swap(named, plan, done)
        if stock is not None:
            trial = Trial(model, stock)
            if trial.error:  # its attention and its masks stay PyTorch's
                _undo(done)
                why, done = trial.error, []
                plan = {n: (modules.Model if k is modules.LanguageModel else k, w) for n, (k, w) in plan.items()}
                _swap(named, plan, done)
                trial = Trial(model, stock)
            if trial.error:
                plan = {n: (k, f"{w}, and {why}" if w == UNKNOWN else w) for n, (k, w) in plan.items()}
                trial = None
            else:
                plan = {name: tried(named[name], answer, trial) for name, answer in plan.items()}
                _swap(named, plan, done, trial)
        report = _reported(model, plan, trial)
        if trial is not None and report.batch_invariant:  # its own code is known by a trial alone
            report.checks = compare_bits(model, TRIED, gradients=False)
        _answer(report, strict)
        for name, module in named.items():
            if isinstance(module, modules.Model):
                prefix = f"{name}." if name else ""
                folded = {n.removeprefix(prefix) for n in report.folded if n.startswith(prefix)}
                remember_parts(module, folded if report.split_invariant else set())
        if group is not None:
            ranks.share(model, TensorParallel(group))
        if check:
            report.checks = compare_bits(model)
            _answer(report, strict)
    except BaseException:
        if group is not None:
            ranks.gather(model)
        _undo(done)
        raise
    if not report.split_invariant:
        warnings.warn(f"apply: {type(model).__name__}: {' '.join(report.verdict)}", stacklevel=2)
    return report


def _swap(named: dict, plan: dict, done: list[nn.Module], trial: Trial | None = None) -> None:
    """Puts in what is planned, and is not in yet; a model's own code is routed where the trial says so."""
    for name, (kind, _) in plan.items():
        module = named[name]
        if trial is not None and isinstance(module, modules.Model):
            module.__dict__[ROUTED] = bool(trial.functions.get(module))
        if kind is None or isinstance(module, kind):
            continue
        if kind is modules.Norm:
            module.__dict__[modules.NORM] = recognised(module)
        before = getattr(type(module), "replaces", type(module))
        module.__class__ = swapped(before, kind)
        if module not in done:
            done.append(module)
        if kind is modules.LanguageModel:
            module.__dict__["bi_kernels_before"] = module.config._attn_implementation
    for module in done if trial is None else ():
        if isinstance(module, modules.LanguageModel):
            module.set_attn_implementation(NAME)


def _answer(report: Report, strict: bool) -> None:
    if strict and not report.split_invariant:
        raise ValueError(
            f"apply: strict is True, and the answer would be: {' '.join(report.verdict)} Without strict, "
            "print(apply(model)) lists each reason"
        )


def restore(model: nn.Module) -> None:
    """Takes out what `apply` put into a model; its parameters and their `.grad` stay as they are, and are whole again
    where ranks shared them. Raises ValueError for a model without it, and for one that FSDP2 shards."""
    done = [m for m in model.modules() if isinstance(m, Swapped)] if isinstance(model, nn.Module) else []
    if not done:
        raise ValueError(f"restore: model is a {type(model).__name__} without swapped modules, expected apply(model)")
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise ValueError("restore: model was given to fully_shard, expected one before that: its classes stay sharded")
    ranks.gather(model)
    _undo(done)
    for p in model.parameters():
        forget(p)


def _undo(done: list[nn.Module]) -> None:
    for module in done:
        before = module.__dict__.pop("bi_kernels_before", None)
        if before is not None:
            module.config._attn_implementation_internal = before
        for kept in ("bi_kernels_table", PARTS, FORWARDS, FOLDED, WITHIN, ROUTED, modules.NORM):
            module.__dict__.pop(kept, None)
        module.__class__ = type(module).replaces
