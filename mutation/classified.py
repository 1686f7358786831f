"""Modules that the adapter of Transformers is asked about: which class takes their place, and whether it says why."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen3 import modeling_qwen3 as qwen3

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def _config(family: str = "qwen3", **changed):
    return AutoConfig.for_model(family, **SIZES | changed)


def _changed(module: nn.Module, **attributes) -> nn.Module:
    for k, v in attributes.items():
        setattr(module, k, v)
    return module


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class _Copied(nn.Module):
    forward = qwen3.Qwen3MLP.forward

    def __init__(self, act: nn.Module):
        super().__init__()
        self.act_fn = act


def _rotary(**more) -> nn.Module:
    return qwen3.Qwen3RotaryEmbedding(_config(rope_parameters={"rope_theta": 1e4, "rope_type": "default"} | more))


def _attention(kind: type = qwen3.Qwen3Attention, family: str = "qwen3", **more) -> nn.Module:
    return kind(_config(family, **more), 0)


FOLLOWS = "follows the longest sequence"
# what makes a module; the class that takes its place, "" for none; whether a reason is given, or words of it
MODULES: dict[str, tuple[Callable[[], nn.Module], str, bool | str]] = {
    "Linear": (lambda: nn.Linear(4, 4), "Linear", False),
    "Linear of a computed weight": (lambda: nn.utils.weight_norm(nn.Linear(4, 4)), "", True),
    "Linear with a forward of its own": (lambda: _Doubled(4, 4), "", True),
    "Embedding": (lambda: nn.Embedding(5, 8), "Embedding", False),
    "Embedding of a computed weight": (lambda: nn.utils.weight_norm(nn.Embedding(5, 8)), "", True),
    "Embedding, max_norm": (lambda: nn.Embedding(5, 8, max_norm=1.0), "", True),
    "Embedding, sparse": (lambda: nn.Embedding(5, 8, sparse=True), "", True),
    "Embedding by frequency": (lambda: nn.Embedding(5, 8, scale_grad_by_freq=True), "", True),
    "Dropout": (lambda: nn.Dropout(0.5), "", True),
    "Dropout of 0": (lambda: nn.Dropout(0.0), "", False),
    "GELU": (nn.GELU, "", False),
    "PReLU": (nn.PReLU, "", True),
    "Softmax": (nn.Softmax, "", True),
    "LogSoftmax": (nn.LogSoftmax, "", True),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 1), "", True),
    "Sequential": (nn.Sequential, "", False),
    "ParameterDict": (nn.ParameterDict, "", False),
    "ParameterDict with one": (lambda: nn.ParameterDict({"w": torch.ones(1)}), "", True),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), "", True),
    "LayerNorm": (lambda: nn.LayerNorm(4), "Norm", False),
    "LayerNorm of two": (lambda: nn.LayerNorm((4, 4)), "", True),
    "RMSNorm": (lambda: nn.RMSNorm(4), "Norm", False),
    "RMSNorm of Gemma": (lambda: gemma.GemmaRMSNorm(4), "Norm", False),
    "MLP": (lambda: qwen3.Qwen3MLP(_config()), "MLP", False),
    "MLP of nn.SiLU": (lambda: _Copied(nn.SiLU()), "MLP", False),
    "MLP of GELU": (lambda: qwen3.Qwen3MLP(_config(hidden_act="gelu")), "", True),
    "Attention": (_attention, "Attention", False),
    "Attention of Mistral": (lambda: _attention(mistral.MistralAttention, "mistral"), "MistralAttention", False),
    "Attention of Llama": (lambda: _attention(llama.LlamaAttention, "llama"), "Attention", False),
    "Attention without a mask": (lambda: _changed(_attention(), is_causal=False), "", True),
    "Attention with dropout": (lambda: _attention(attention_dropout=0.1), "", True),
    "Attention with dropout of 0": (lambda: _attention(attention_dropout=0), "Attention", False),
    "Attention of 256": (lambda: _attention(head_dim=256), "Attention", False),
    "Attention of 258": (lambda: _attention(head_dim=258), "", True),
    "Rotary": (_rotary, "Rotary", False),
    "Rotary, yarn": (lambda: _rotary(rope_type="yarn", factor=2.0), "Rotary", False),
    "Rotary, dynamic": (lambda: _rotary(rope_type="dynamic", factor=2.0), "", FOLLOWS),
    "Rotary of a part": (lambda: _changed(_rotary(), inv_freq=torch.ones(4)), "", True),
    "another's rotary, dynamic": (lambda: _changed(nn.Module(), rope_type="dynamic"), "", FOLLOWS),
    "another's rotary, of two kinds": (
        lambda: _changed(nn.Module(), rope_type={"a": "default", "b": "longrope"}),
        "",
        FOLLOWS,
    ),
    "another's attention": (lambda: _changed(nn.Module(), attention_dropout=0.1), "", "attention_dropout"),
    "DecoderLayer": (lambda: qwen3.Qwen3DecoderLayer(_config(), 0), "Checkpointed", False),
    "Model": (lambda: qwen3.Qwen3Model(_config()), "LanguageModel", False),
    "CausalLM": (lambda: qwen3.Qwen3ForCausalLM(_config()), "LanguageModel", False),
    "a wrapper": (lambda: _changed(nn.Module(), model=qwen3.Qwen3Model(_config())), "", True),
    "Module": (nn.Module, "", True),
}
