"""Which modules of a model are swapped, which are left, and why: all of them or none, and back again."""

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from bi_kernels.contract import DTYPES
from bi_kernels.integrations.transformers import attention_modules, modules, ranks
from bi_kernels.integrations.transformers.attention import NAME
from bi_kernels.integrations.transformers.gradients import BUFFERS, forget
from bi_kernels.integrations.transformers.report import Report
from bi_kernels.integrations.transformers.swap import PARTS, Swapped, remember_parts, swapped
from bi_kernels.parallel.tensor import TensorParallel

ATTENTION = {
    qwen3.Qwen3Attention: attention_modules.Attention,
    qwen2.Qwen2Attention: attention_modules.Attention,
    llama.LlamaAttention: attention_modules.Attention,
    mistral.MistralAttention: attention_modules.MistralAttention,
}
MLP = (qwen3.Qwen3MLP, qwen2.Qwen2MLP, llama.LlamaMLP, mistral.MistralMLP)
ROTARY = (qwen3.Qwen3RotaryEmbedding, qwen2.Qwen2RotaryEmbedding, llama.LlamaRotaryEmbedding)
ROTARY += (mistral.MistralRotaryEmbedding,)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # the others follow the longest sequence of a batch
LAYERS = (qwen3.Qwen3DecoderLayer, qwen2.Qwen2DecoderLayer, llama.LlamaDecoderLayer, mistral.MistralDecoderLayer)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity)
SILU = (type(ACT2FN["silu"]), nn.SiLU)
PARAMETERS = (modules.Linear, modules.Embedding, modules.RMSNorm)


def _is_rms_norm(module: nn.Module) -> bool:
    """Returns whether a module's code is that of Llama's RMSNorm, as most architectures copy it, or torch's own."""
    if type(module) is nn.RMSNorm:
        return module.elementwise_affine and len(module.normalized_shape) == 1
    code, known = getattr(type(module).forward, "__code__", None), llama.LlamaRMSNorm.forward.__code__
    same = code is not None and (code.co_code, code.co_consts, code.co_names) == (
        known.co_code,
        known.co_consts,
        known.co_names,
    )
    return same and {n for n, _ in module.named_parameters()} == {"weight"} and module.weight.dim() == 1


def _kind(module: nn.Module) -> tuple[type[Swapped] | None, str]:
    """Returns the class that takes a module's place and by what it is replaced, or None and why it is left; an empty
    reason for a container."""
    kind, name = type(module), type(module).__name__
    if kind in ATTENTION:
        return (ATTENTION[kind], "") if 1 <= module.head_dim <= 256 else (None, f"its heads are {module.head_dim} wide")
    if kind in MLP:
        known = isinstance(module.act_fn, SILU)
        return (modules.MLP, "") if known else (None, f"{type(module.act_fn).__name__} is not SwiGLU's activation")
    if kind in ROTARY:
        head_dim = getattr(module.config, "head_dim", None)
        head_dim = head_dim or module.config.hidden_size // module.config.num_attention_heads
        if module.rope_type not in STATIC_ROPE or 2 * len(module.inv_freq) != head_dim:
            turned = f"{2 * len(module.inv_freq)} of {head_dim}"
            return None, f"rope_type {module.rope_type!r}, turning {turned} features, has no fixed table of all"
        return modules.Rotary, ""
    if _is_rms_norm(module):
        return modules.RMSNorm, ""
    if kind is nn.Linear:
        return modules.Linear, ""
    if kind is nn.Embedding:
        plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return (modules.Embedding, "") if plain else (None, "max_norm, sparse or scale_grad_by_freq is set")
    if isinstance(module, PreTrainedModel):
        inner = [m for m in module.modules() if "attention" in type(m).__name__.lower()]
        ours = bool(inner) and all(_kind(m)[0] is not None for m in inner)
        return (modules.LanguageModel if ours else modules.Model), ""
    if isinstance(module, GradientCheckpointingLayer):
        return modules.Checkpointed, "" if kind in LAYERS else f"what a {name} computes itself is not known"
    if kind in CONTAINERS:
        return None, ""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return None, "" if not module.p else f"p is {module.p}: it draws by a token's place in the batch"
    return None, f"what a {name} computes itself is not known"


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply: model is a {type(model).__name__}, expected a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, Swapped):
            raise ValueError(f"apply: {name or 'the model'} is swapped already, expected restore(model) first")
        if "forward" in vars(module):
            raise ValueError(
                f"apply: {name or 'the model'} has a forward of its own, as accelerate's hooks give it, "
                "expected its class's: unwrap the model first"
            )
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


def _reported(model: nn.Module, plan: dict[str, tuple[type[Swapped] | None, str]]) -> Report:
    report, named = Report(), dict(model.named_modules())
    for name, (kind, why) in plan.items():
        parent = plan.get(name.rpartition(".")[0], (None, ""))[0]
        if parent is modules.MLP and isinstance(named[name], SILU):
            report.replaced[name] = "SiLU in its MLP's swiglu"
        elif why:
            report.left[name] = why
        elif kind is None or kind is modules.Checkpointed:
            report.containers[name] = type(named[name]).__name__
        else:
            report.replaced[name] = f"{type(named[name]).__name__}: {kind.__doc__}"
    owners: dict[int, list[str]] = {}
    for name, module in named.items():
        for short, p in module.named_parameters(recurse=False):
            owners.setdefault(id(p), []).append(f"{name}.{short}".lstrip("."))
    for name, p in model.named_parameters():
        at = [plan[n.rpartition(".")[0]][0] for n in owners[id(p)]]
        if not all(kind in PARAMETERS for kind in at):
            report.others[name] = "its module is left"
        elif len(at) > 1 and sorted(k.__name__ for k in at) != ["Embedding", "Linear"]:
            report.others[name] = f"shared by {', '.join(owners[id(p)])}: the order of its folds follows the split"
        else:
            report.folded[name] = "frozen" if not p.requires_grad else "tied" if len(at) > 1 else "fp32 fold"
    return report


def apply(model: nn.Module, group: dist.ProcessGroup | None = None) -> Report:
    """Puts this package's ops into a model, in place; returns what was replaced, what was left, and why.

    Parameters, names and buffers stay as they are, so checkpoints save and load, and any optimizer trains the model; a
    step's gradients have the same bits however it is cut into micro-batches: each one forward and one backward, in the
    step's order, between sequences. Qwen3, Qwen2, Llama and Mistral models are swapped whole; of another, what is
    recognised. Raises TypeError and ValueError with one sentence, and then nothing was replaced.

    group: ranks that share each weight of a model that is swapped whole: every rank gives the same one and keeps its
    rows, and every result has the bits of one rank (parallel/tensor.py). It generates by `generate`, not by continuous
    batching.
    """
    _check(model)
    named = dict(model.named_modules())
    plan = {name: _kind(module) for name, module in named.items()}
    if all(kind is None for kind, _ in plan.values()):
        raise ValueError(f"apply: model is a {type(model).__name__}, expected one with a module that can be replaced")
    report, done = _reported(model, plan), []
    try:
        for name, (kind, _) in plan.items():
            if kind is not None:
                module = named[name]
                module.__class__ = swapped(type(module), kind)
                done.append(module)
                if kind is modules.LanguageModel:
                    module.__dict__["bi_kernels_before"] = module.config._attn_implementation
        for module in done:
            if isinstance(module, modules.Model):
                remember_parts(module)
            if isinstance(module, modules.LanguageModel):
                module.set_attn_implementation(NAME)
        if group is not None:
            ranks.share(model, TensorParallel(group))
    except BaseException:
        _undo(done)
        raise
    return report


def restore(model: nn.Module) -> None:
    """Takes out what `apply` put into a model; its parameters and their `.grad` stay as they are, and are whole again
    where ranks shared them. Raises ValueError for a model without it."""
    done = [m for m in model.modules() if isinstance(m, Swapped)] if isinstance(model, nn.Module) else []
    if not done:
        raise ValueError(f"restore: model is a {type(model).__name__} without swapped modules, expected apply(model)")
    ranks.gather(model)
    _undo(done)
    for p in model.parameters():
        forget(p)


def _undo(done: list[nn.Module]) -> None:
    for module in done:
        before = module.__dict__.pop("bi_kernels_before", None)
        if before is not None:
            module.config._attn_implementation_internal = before
        for kept in ("bi_kernels_table", PARTS):
            module.__dict__.pop(kept, None)
        module.__class__ = type(module).replaces
