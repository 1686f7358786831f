"""Builds any decoder family of the installed Transformers tiny, on the CPU, from its configuration.

Rules shrink a configuration's fields by their names, so there is no list of configurations; `CHANGES` holds what no
rule can know.
"""

import dataclasses
import functools
import re

import torch
import transformers as hf
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, POSITIONS, LAYERS = 160, 256, 2
# (a field's name, its size): the first pattern that matches decides, for integers; what is None stays None
RULES = tuple((re.compile(pattern), size) for pattern, size in (
    ("vocab_size", VOCABULARY),
    ("token_(id|index)$", 0),
    ("position_embeddings$|n_positions|max_seq_len|context_length|n_ctx|target_positions", POSITIONS),
    ("num_(local_|routed_)?experts$|n_routed_experts|moe_num_experts|^zero_expert_num$", 8),
    ("experts_per_tok$|moe_topk|moe_k$|top_k_experts|moe_top_k", 2),
    ("^n_group$", 2),
    ("topk_group|shared_experts?$|num_dense_layers|dense_replace|start_index|max_window_layers", 1),
    ("(moe|expert).*(intermediate|ffn|hidden)|shared_expert.*size", 32),
    ("intermediate_size|ffn_dim|ffn_hidden|n_inner|d_inner|feed_forward_size|shared_intermediate|dense_inter", 96),
    ("query_pre_attn_scalar", 16),
    ("linear_num_value_heads|mamba_num_heads", 4),
    ("(key_value|kv|key)(_n)?_heads|linear_num_heads", 2),
    ("mamba_n_heads", 8),
    ("attention_heads$|^n_heads?$|^num_heads$|heads$", 4),
    ("rope_head_dim|rotary_dim", 8),
    ("mamba_head_dim", 32),
    ("head_dim$|head_size|kv_channels|d_head|head_v_dim|ssm_state_size|mamba_d_state", 16),
    ("kv_lora_rank", 16),
    ("lora_rank|_rank$|hc_lowrank", 32),
    ("per_layer_input$", 16),
    ("^(hidden_size|d_model|n_embd|emb_dim|embedding_size|.*embed_dim|.*hidden_size|word_embed.*)$", 64),
    ("^(.*hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers)$", LAYERS),
    ("window|local_attention$", 6),
    ("attention_chunk_size|index_topk|chunk_size$", 8),
))  # fmt: skip
NONE = {"head_dim": 16, "num_key_value_heads": 4, "num_experts_per_tok": 2}  # what is None by default
NO_DROP = re.compile("drop|jitter")
TYPES = ("layer_types", "mlp_layer_types", "layers_block_type")  # one of a kind each
ROUTED = {"num_experts": 8, "moe_intermediate_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DOTS3 = {"q_lora_rank": 16, "kv_lora_rank": 32, "head_dim": 24, "qk_nope_head_dim": 16, "v_head_dim": 16}
DOTS3 |= {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_rope_head_dim": 8}
CHANGES: dict[str, dict] = {  # ...: the configuration's own default
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": "auto"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE | {"mrope_section": [4, 2, 2]}}},
    "cpmant": {"prompt_length": 4, "segment_types": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "head_dim": ...},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "dots3_note_text": {"layer_types": ["sliding_attention", "indexed_attention"], "per_layer_config": {0: DOTS3}},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"enable_moe_block": True, "num_kv_shared_layers": 0, "top_k_experts": 2, **ROUTED},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": "auto"},
    "hrm_text": {"num_hidden_layers": 1},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 32},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                       "indexer_compress_ratio": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 48],
                 "attn_layers": ["local", "lsh"], "num_buckets": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}  # fmt: skip
LEFT_OUT = {
    "blt": "reads bytes, in patches that another model cuts",
    "gemma4_assistant": "drafts for another model, whose keys it reads",
    "gemma4_unified_assistant": "drafts for another model, whose keys it reads",
    "xlstm": "recurrent",
}


@functools.cache
def families() -> dict[str, str]:
    """Returns the causal language models of the installed Transformers: the name of each class by model type, each
    class with each of its configurations once. A class that is no text decoder is left out; see `left_out`."""
    found = {}
    for name, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        config = CONFIG_MAPPING[name]
        parts = {"text_config", "vision_config", "audio_encoder", "audio_encoder_config"} & set(config.sub_configs)
        same = config.model_type != name and config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in LEFT_OUT and not parts and not same:
            found[name] = cls
    return found


def left_out() -> dict[str, str]:
    """Returns why each other model type of the mapping is no family of this loop."""
    classes = set(families().values())
    others = {n: c for n, c in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if n not in families() and c not in classes}
    return {n: LEFT_OUT.get(n, "multimodal") for n in others}


def tiny(name: str, layers: int = LAYERS) -> hf.PreTrainedConfig:
    """Returns the configuration of a family with every size shrunk, and without dropout."""
    config = CONFIG_MAPPING[name]
    given = _shrunk(config, layers) | CHANGES.get(name, {})
    return config(**{k: v for k, v in given.items() if v is not ...})


def _shrunk(config: type[hf.PreTrainedConfig], layers: int) -> dict:
    usual, given = config(), {}
    fields = {f.name: f for f in dataclasses.fields(config)}
    latent = "qk_rope_head_dim" in fields
    for name, field in fields.items():
        if name in config.sub_configs:
            given[name] = _shrunk(config.sub_configs[name], layers)
        elif name in NONE and field.default is None and not (latent and name == "head_dim"):
            given[name] = NONE[name]
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            given[name] = None if "None" in str(field.type) and name != "pad_token_id" else 0
        elif (size := _size(name, field.default)) is not None:
            given[name] = layers if re.search(RULES_LAYERS, name) else size
        elif name == "is_decoder":
            given[name] = True
    for name in [n for n in given if re.search("(key_value|kv)_heads$", n)]:
        of_q = re.sub("key_value_heads|kv_heads", "attention_heads", name)
        if of_q in fields and fields[name].default == fields[of_q].default:  # as many as query heads, as the family has
            given[name] = given[of_q]
    kinds = {n: list(dict.fromkeys(getattr(usual, n, None) or ())) for n in TYPES if n in fields}
    count = max([layers, *map(len, kinds.values())])
    for name, of_layer in kinds.items():
        if of_layer:  # each kind once, and the last kind again
            given[name] = [*of_layer, *of_layer[-1:] * count][:count]
    return given | {n: count for n in given if re.search(RULES_LAYERS, n)}


RULES_LAYERS = next(p for p, size in RULES if size is LAYERS and "hidden_layers" in p.pattern)


def _size(name: str, default: object) -> int | float | None:
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return None
    if NO_DROP.search(name):
        return type(default)(0)
    if isinstance(default, float):
        return None
    size = next((size for p, size in RULES if p.search(name)), None)
    return size if size is None or size > 8 else min(size, default)


def built(name: str, layers: int = LAYERS, dtype: torch.dtype = torch.bfloat16) -> hf.PreTrainedModel:
    """Returns a model of a family with random weights, the same in every call; norms and biases are drawn too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = from_config(getattr(hf, families()[name]), tiny(name, layers), dtype)
        draw(model)
    return model.eval()


def from_config(cls: type[hf.PreTrainedModel], config: hf.PreTrainedConfig, dtype: torch.dtype) -> hf.PreTrainedModel:
    """Returns a new model in a dtype, but for what its class keeps in fp32."""
    model = cls._from_config(config, dtype=dtype)
    for n, t in [*model.named_parameters(), *model.named_buffers()]:
        if any(kept in n for kept in model._keep_in_fp32_modules_strict or ()):
            t.data = t.data.float()
    return model


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Draws every parameter anew: a matrix from N(0, 0.1²), what is constant around its value."""
    done = set()
    for _name, p in [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "bias" in n)]:
        if id(p) in done or not p.is_floating_point():
            continue
        done.add(id(p))
        noise = torch.randn(p.shape, dtype=torch.float32) / 10
        p.copy_(noise if p.dim() > 1 and float(p.float().std()) > 0 else p.float() + noise)


def is_mixture(model: nn.Module) -> bool:
    """Tells whether a model routes tokens to experts, by the names of its classes."""
    return any("Experts" in type(m).__name__ for m in model.modules())
