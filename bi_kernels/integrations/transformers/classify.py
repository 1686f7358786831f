"""Tables of the classes that `apply` replaces, and of the reasons to leave a module to PyTorch."""

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from bi_kernels.integrations.transformers import modules
from bi_kernels.integrations.transformers.norms import recognised
from bi_kernels.integrations.transformers.routing import GRADIENT, Routed, Trial
from bi_kernels.integrations.transformers.swap import Swapped

FAMILIES = {"Qwen3": qwen3, "Qwen2": qwen2, "Llama": llama, "Mistral": mistral}
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # the others follow the longest sequence of a batch
# whose models' own code is known: these families', and the heads that Transformers puts on any of them
MODELS = (*(family.__name__ for family in FAMILIES.values()), GradientCheckpointingLayer.__module__)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity)
SILU = (type(ACT2FN["silu"]), nn.SiLU)
# PEFT's, by name, since it need not be installed: they call their parts, and add and scale what these return
ADAPTERS = ("tuners.lora.layer.Linear", "tuners.lora.model.LoraModel", "utils.other.ModulesToSaveWrapper")
PEFT_MODELS = "peft.peft_model"
UNKNOWN = "not recognised"
DRAWS = "attention_dropout is {}: it draws by place in the batch; set 0"
COMPUTED = "its weight is no parameter: a hook computes it, as weight_norm and pruning do"
WRAPPER = "not recognised: call apply on the model inside it"


Answer = tuple[type[Swapped] | None, str]  # as `classify` returns it
Rule = Callable[[nn.Module], Answer]


def _attention(module: nn.Module) -> Answer:
    if _draws(module):
        return None, DRAWS.format(module.attention_dropout)
    if not 1 <= module.head_dim <= 256:
        return None, f"its heads are {module.head_dim} wide, the most are 256"
    of_mistral = isinstance(module, mistral.MistralAttention)
    return modules.MistralAttention if of_mistral else modules.Attention, ""


def _mlp(module: nn.Module) -> Answer:
    known = isinstance(module.act_fn, SILU)
    return (modules.MLP, "") if known else (None, f"its activation is {type(module.act_fn).__name__}, not SiLU")


def _rotary(module: nn.Module) -> Answer:
    head_dim = getattr(module.config, "head_dim", None)
    head_dim = head_dim or module.config.hidden_size // module.config.num_attention_heads
    if module.rope_type not in STATIC_ROPE:
        return None, f"rope_type {module.rope_type!r} follows the longest sequence of the batch"
    turned = 2 * len(module.inv_freq)
    return (modules.Rotary, "") if turned == head_dim else (None, f"it turns {turned} of {head_dim} features")


def _linear(module: nn.Linear) -> Answer:
    return (modules.Linear, "") if "weight" in module._parameters else (None, COMPUTED)


def _embedding(module: nn.Embedding) -> Answer:
    if "weight" not in module._parameters:
        return None, COMPUTED
    plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return (modules.Embedding, "") if plain else (None, "max_norm, sparse or scale_grad_by_freq is set")


def _model(module: PreTrainedModel) -> Answer:
    known = type(module).forward.__module__ in MODELS
    return (modules.LanguageModel if _keeps_attention(module) else modules.Model), "" if known else UNKNOWN


def _dropout(module: nn.Module) -> Answer:
    return None, f"p is {module.p}: it draws by place in the batch; set 0" if module.p else ""


def _keeps_attention(model: PreTrainedModel) -> bool:
    """Tells whether all attention within a model is replaced, or called through Transformers' interface, so that its
    masks can be too."""
    if model._supports_attention_backend or model._supports_sdpa:
        return True
    inner = [m for m in model.modules() if "attention" in type(m).__name__.lower()]
    return bool(inner) and all(classify(m)[0] is not None for m in inner)


def _follows_batch(module: nn.Module) -> bool:
    """Tells whether a rotary module's frequencies follow the longest sequence of a batch."""
    kinds = getattr(module, "rope_type", "default")
    kinds = (kinds,) if isinstance(kinds, str) else kinds.values()
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def _draws(module: nn.Module) -> bool:
    """Tells whether a module's attention draws by place in the batch where it trains."""
    p = getattr(module, "attention_dropout", 0)
    return isinstance(p, float | int) and p > 0 and not isinstance(module, PreTrainedModel)


def _is_experts(module: nn.Module) -> bool:
    """Tells whether a module's forward is what Transformers' experts interface says."""
    return getattr(type(module).forward, "__globals__", {}).get("__name__") == use_experts_implementation.__module__


def _is_activation(module: nn.Module) -> bool:
    """Tells whether a module is an elementwise activation of torch or Transformers, without parameters."""
    sums = (nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax)
    known = type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return known and not isinstance(module, sums) and not any(True for _ in module.parameters())


def _is_adapter(module: nn.Module) -> bool:
    """Tells whether a module is PEFT's model with LoRA, one of its plain LoRA linears, or a wrapper that only calls
    its parts."""
    name = f"{type(module).__module__}.{type(module).__name__}"
    if type(module).__module__ == PEFT_MODELS:
        return all(c.peft_type == "LORA" for c in module.peft_config.values())
    if isinstance(module, nn.ParameterDict):
        return not len(module)
    return name.removeprefix("peft.") in ADAPTERS and not getattr(module, "lora_variant", None)


PARTS: dict[str, Rule] = {  # of each family
    "Attention": _attention,
    "MLP": _mlp,
    "RotaryEmbedding": _rotary,
    "DecoderLayer": lambda m: (modules.Checkpointed, ""),
}
BY_CLASS = {getattr(family, f"{name}{part}"): rule for name, family in FAMILIES.items() for part, rule in PARTS.items()}
BY_CLASS |= {nn.Linear: _linear, nn.Embedding: _embedding}
BY_PROPERTY: tuple[tuple[Callable[[nn.Module], bool], Rule], ...] = (
    (lambda m: recognised(m) is not None, lambda m: (modules.Norm, "")),
    (lambda m: isinstance(m, PreTrainedModel), _model),
    (_is_experts, lambda m: (modules.Experts, "")),
    (_follows_batch, lambda m: (None, f"rope_type {m.rope_type!r} follows the longest sequence of the batch")),
    (_draws, lambda m: (None, DRAWS.format(m.attention_dropout))),
    (lambda m: isinstance(m, GradientCheckpointingLayer), lambda m: (modules.Checkpointed, UNKNOWN)),
    (lambda m: isinstance(m, nn.modules.dropout._DropoutNd), _dropout),
    (lambda m: type(m) in CONTAINERS or _is_activation(m) or _is_adapter(m), lambda m: (None, "")),
    (lambda m: any(isinstance(part, PreTrainedModel) for part in m.modules()), lambda m: (None, WRAPPER)),
)


def tried(module: nn.Module, answer: Answer, trial: Trial) -> Answer:
    """Returns the answer for a module that `classify` does not recognise, by what a trial call saw of it."""
    kind, why = answer
    if kind is None and not why and trial.functions.get(module):
        return Routed, ""
    if why != UNKNOWN:
        return answer
    if module not in trial.calls:
        owns = any(True for _ in module.parameters(recurse=False))
        return kind, "a trial call did not call it" if owns else ""
    if unknown := [name for name in trial.unknown.get(module, ()) if not name.startswith(GRADIENT)]:
        return kind, f"{' and '.join(unknown[:2])}: no batch-invariant form is known"
    if trial.functions.get(module) and kind in (None, modules.Checkpointed):
        kind = Routed if kind is None else modules.RoutedLayer
    return kind, ""


def classify(module: nn.Module) -> Answer:
    """Returns (the class that takes a module's place, None to leave it; why it is left).

    The reason is empty where nothing that the module itself computes depends on the batch.
    """
    kind = type(module)
    rule = BY_CLASS.get(kind) if kind.forward.__module__ == kind.__module__ else None  # no one's patch
    rule = rule or next((rule for holds, rule in BY_PROPERTY if holds(module)), None)
    return rule(module) if rule else (None, UNKNOWN)
