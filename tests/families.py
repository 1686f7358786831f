"""Tiny models of the families that `apply` is tested on: README's table of models is made of these.

`python tools/readme.py models` writes that table.
"""

from collections.abc import Callable

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
DEEPSEEK = LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2}
DEEPSEEK |= {"topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
NARROW = {"num_attention_heads": 4, "num_key_value_heads": 4}


def _made(model: str, config: str, **changes) -> Callable[[int], torch.nn.Module]:
    def make(layers: int = 2) -> torch.nn.Module:
        given = SIZES | changes | {"num_hidden_layers": layers}
        return getattr(hf, model)(getattr(hf, config)(**{k: v for k, v in given.items() if v is not ...}))

    return make


def _with_lora(layers: int = 2) -> torch.nn.Module:
    model = get_peft_model(FAMILIES["Qwen3"](layers), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)  # it begins at zero, where A has no gradient
    return model


def _gpt2(layers: int = 2) -> torch.nn.Module:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=160, n_embd=64, n_layer=layers, n_head=4, n_positions=128, **none)
    )


FAMILIES: dict[str, Callable[..., torch.nn.Module]] = {
    "Qwen3": _made("Qwen3ForCausalLM", "Qwen3Config"),
    "Qwen3 with LoRA": _with_lora,
    "Qwen3 reward model": _made("Qwen3ForSequenceClassification", "Qwen3Config", num_labels=1),
    "Qwen2": _made("Qwen2ForCausalLM", "Qwen2Config", head_dim=...),
    "Llama": _made("LlamaForCausalLM", "LlamaConfig"),
    "Mistral": _made("MistralForCausalLM", "MistralConfig", sliding_window=6),
    "Qwen3-MoE": _made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **EXPERTS),
    "Mixtral": _made("MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
    "DeepSeek-V3": _made("DeepseekV3ForCausalLM", "DeepseekV3Config", head_dim=..., **DEEPSEEK),
    "gpt-oss": _made("GptOssForCausalLM", "GptOssConfig", num_local_experts=4, num_experts_per_tok=2),
    "Gemma 2": _made("Gemma2ForCausalLM", "Gemma2Config"),
    "Gemma 3": _made("Gemma3ForCausalLM", "Gemma3TextConfig"),
    "Phi-3": _made("Phi3ForCausalLM", "Phi3Config", head_dim=...),
    "GLM-4": _made("Glm4ForCausalLM", "Glm4Config"),
    "OLMo 2": _made("Olmo2ForCausalLM", "Olmo2Config", head_dim=...),
    "SmolLM3": _made("SmolLM3ForCausalLM", "SmolLM3Config", head_dim=...),
    "GPT-NeoX": _made("GPTNeoXForCausalLM", "GPTNeoXConfig", num_key_value_heads=..., head_dim=...),
    "GPT-2": _gpt2,
}


def built(family: str, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """Returns a model of a family with random weights, the same in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[family](layers)
    return model.to(dtype)
