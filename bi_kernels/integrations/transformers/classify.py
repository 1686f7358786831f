"""Which class takes a module's place, and why a module is left to PyTorch: tables of the classes that are known."""

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from bi_kernels.integrations.transformers import attention_modules, modules
from bi_kernels.integrations.transformers.swap import Swapped

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
# whose models' own code is known: these families', and the heads that Transformers puts on any of them
MODELS = (*(m.__name__ for m in (qwen3, qwen2, llama, mistral)), GradientCheckpointingLayer.__module__)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity)
SILU = (type(ACT2FN["silu"]), nn.SiLU)
# PEFT's, by name, since it need not be installed: they call their parts, and add and scale what these return
ADAPTERS = ("tuners.lora.layer.Linear", "tuners.lora.model.LoraModel", "utils.other.ModulesToSaveWrapper")
PEFT_MODELS = "peft.peft_model"
UNKNOWN = "not recognised"
WRAPPER = "not recognised: call apply on the model inside it"


def classify(module: nn.Module) -> tuple[type[Swapped] | None, str]:
    """Returns (the class that takes a module's place, None to leave it; why it is left).

    The reason is empty where nothing that the module itself computes depends on the batch: it is elementwise, or calls
    its parts.
    """
    kind = type(module)
    if kind in ATTENTION:
        if module.attention_dropout:
            return None, f"attention_dropout is {module.attention_dropout}: it draws by place in the batch; set 0"
        known = 1 <= module.head_dim <= 256
        return (ATTENTION[kind], "") if known else (None, f"its heads are {module.head_dim} wide, the most are 256")
    if kind in MLP:
        known = isinstance(module.act_fn, SILU)
        return (modules.MLP, "") if known else (None, f"its activation is {type(module.act_fn).__name__}, not SiLU")
    if kind in ROTARY:
        return _rotary(module)
    if _is_rms_norm(module):
        return modules.RMSNorm, ""
    if kind is nn.Linear:
        return modules.Linear, ""
    if kind is nn.Embedding:
        plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return (modules.Embedding, "") if plain else (None, "max_norm, sparse or scale_grad_by_freq is set")
    if isinstance(module, PreTrainedModel):
        known = kind.forward.__module__ in MODELS
        return (modules.LanguageModel if _keeps_attention(module) else modules.Model), "" if known else UNKNOWN
    if isinstance(module, GradientCheckpointingLayer):
        return modules.Checkpointed, "" if kind in LAYERS else UNKNOWN
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return None, f"p is {module.p}: it draws by place in the batch; set 0" if module.p else ""
    if kind in CONTAINERS or _is_activation(module) or _is_adapter(module):
        return None, ""
    return None, WRAPPER if any(isinstance(m, PreTrainedModel) for m in module.modules()) else UNKNOWN


def _rotary(module: nn.Module) -> tuple[type[Swapped] | None, str]:
    head_dim = getattr(module.config, "head_dim", None)
    head_dim = head_dim or module.config.hidden_size // module.config.num_attention_heads
    if module.rope_type not in STATIC_ROPE:
        return None, f"rope_type {module.rope_type!r} follows the longest sequence of the batch"
    turned = 2 * len(module.inv_freq)
    return (modules.Rotary, "") if turned == head_dim else (None, f"it turns {turned} of {head_dim} features")


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


def _keeps_attention(model: PreTrainedModel) -> bool:
    """Returns whether all attention within a model is replaced, so that its masks can be too."""
    inner = [m for m in model.modules() if "attention" in type(m).__name__.lower()]
    return bool(inner) and all(classify(m)[0] is not None for m in inner)


def _is_activation(module: nn.Module) -> bool:
    """Returns whether a module is an elementwise activation of torch or Transformers, without parameters."""
    sums = (nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax)
    known = type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return known and not isinstance(module, sums) and not any(True for _ in module.parameters())


def _is_adapter(module: nn.Module) -> bool:
    """Returns whether a module is PEFT's model with LoRA, one of its plain LoRA linears, or a wrapper that only calls
    its parts."""
    name = f"{type(module).__module__}.{type(module).__name__}"
    if type(module).__module__ == PEFT_MODELS:
        return all(c.peft_type == "LORA" for c in module.peft_config.values())
    if isinstance(module, nn.ParameterDict):
        return not len(module)
    return name.removeprefix("peft.") in ADAPTERS and not getattr(module, "lora_variant", None)
