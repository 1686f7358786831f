"""The families that `apply` is tested on in bf16: some of all, and Qwen3 with adapters and with a reward head."""

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from bi_kernels.audit.targets import tiny_families as tiny

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


def _with_lora(layers: int) -> torch.nn.Module:
    wanted = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(tiny.built("qwen3", layers, torch.float32), wanted)


def _reward_model(layers: int) -> torch.nn.Module:
    config = hf.Qwen3Config(**SIZES | {"num_hidden_layers": layers}, num_labels=1)
    return hf.Qwen3ForSequenceClassification(config)


OTHERS = {"qwen3 with LoRA": _with_lora, "qwen3 reward model": _reward_model}
DENSE = ("qwen3", "qwen2", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "glm4", "olmo2", "smollm3")
FAMILIES = (*OTHERS, *DENSE, "gpt_neox", "gpt2", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")


def built(family: str, layers: int = 2) -> torch.nn.Module:
    """Returns a model of a family in bf16 with random weights, the same in every call."""
    if family not in OTHERS:
        return tiny.built(family, layers).train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = OTHERS[family](layers)
        tiny.draw(model)  # LoRA's B begins at zero, where A has no gradient
    return model.bfloat16()
