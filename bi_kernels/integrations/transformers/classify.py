"""Tables of the classes that `apply` replaces, and of the reasons to leave a module to PyTorch."""

from collections.abc import Callable
from functools import cache
from inspect import signature
from types import CodeType, FunctionType, MethodType

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
    if not getattr(module, "is_causal", True):
        return None, UNKNOWN
    if _draws(module):
        return None, DRAWS.format(module.attention_dropout)
    if not 1 <= module.head_dim <= 256:
        return None, f"its heads are {module.head_dim} wide, the most are 256"
    of_mistral = _copied(type(module).forward) is mistral.MistralAttention
    return modules.MistralAttention if of_mistral else modules.Attention, ""


def _mlp(module: nn.Module) -> Answer:
    return (modules.MLP, "") if isinstance(module.act_fn, SILU) else (None, UNKNOWN)


def _rotary(module: nn.Module) -> Answer:
    head_dim = getattr(module.config, "head_dim", None)
    head_dim = head_dim or module.config.hidden_size // module.config.num_attention_heads
    if module.rope_type not in STATIC_ROPE:
        return None, f"rope_type {module.rope_type!r} follows the longest sequence of the batch"
    turned = 2 * len(module.inv_freq)
    return (modules.Rotary, "") if turned == head_dim else (None, UNKNOWN)


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


def _alike(a: object, b: object, known: frozenset = frozenset()) -> bool:
    """Tells whether two functions compute the same: by their bytecode, and that of what they call. known: pairs that
    are being compared."""
    if a is b or (a, b) in known:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and type(a.__self__) is type(b.__self__)
    if isinstance(a, CodeType):
        mine, theirs = ([c.co_code, c.co_names, c.co_varnames, *c.co_consts] for c in (a, b))
        return len(mine) == len(theirs) and all(_alike(*pair) for pair in zip(mine, theirs))
    if not isinstance(a, FunctionType):
        return not isinstance(a, type) and bool(a == b)
    if not _alike(a.__code__, b.__code__) or (a.__defaults__, a.__kwdefaults__) != (b.__defaults__, b.__kwdefaults__):
        return False
    called = ([f.__globals__.get(name) for name in _names(f.__code__)] for f in (a, b))
    held = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b))
    return all(_alike(*pair, known | {(a, b)}) for pair in (*zip(*called), *zip(*held)))


def _names(code: CodeType) -> list[str]:
    """Lists the names that a function looks up, and what is defined within it."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _names(c)]
    return [*code.co_names, *inner]


PARTS: dict[str, Rule] = {  # of each family
    "Attention": _attention,
    "MLP": _mlp,
    "RotaryEmbedding": _rotary,
    "DecoderLayer": lambda m: (modules.Checkpointed, ""),
}
BY_CODE = {getattr(family, f"{name}{part}"): rule for name, family in FAMILIES.items() for part, rule in PARTS.items()}
FORWARDS = {kind: kind.forward for kind in BY_CODE if kind.forward.__module__ == kind.__module__}  # no one's patch
BY_CLASS = {nn.Linear: _linear, nn.Embedding: _embedding}
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


@cache
def _copied(forward: Callable) -> type[nn.Module] | None:
    """Returns the known class that has this forward, or one that was copied into another file; None for others."""
    return next((known for known, own in FORWARDS.items() if _alike(own, forward)), None)


def classify(module: nn.Module) -> Answer:
    """Returns (the class that takes a module's place, None to leave it; why it is left).

    The reason is empty where nothing that the module itself computes depends on the batch.
    """
    kind = type(module)
    if known := _copied(kind.forward):
        return BY_CODE[known](module)
    rule = BY_CLASS.get(kind) if kind.forward.__module__ == kind.__module__ else None  # no one's patch
    rule = rule or next((rule for holds, rule in BY_PROPERTY if holds(module)), None)
    return rule(module) if rule else (None, UNKNOWN)


def plan_of(named: dict[str, nn.Module]) -> dict[str, Answer]:
    """Returns the answer for each module of a model. A rope table is for our attention alone: where another module
    takes what a rotary module returns, this one stays."""
    plan = {name: classify(module) for name, module in named.items()}
    takes = [n for n, m in named.items() if "position_embeddings" in signature(type(m).forward).parameters]
    inner = [n for n in takes if not any(other.startswith(f"{n}.") for other in takes)]
    if any(not issubclass(plan[n][0] or nn.Module, modules.Attention) for n in inner):
        plan = {n: (None, UNKNOWN) if kind is modules.Rotary else (kind, why) for n, (kind, why) in plan.items()}
    return plan
