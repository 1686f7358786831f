"""What an applied model of Transformers refuses, each in one sentence: models, calls, and other gradients than those of
backward()."""

import copy

import pytest
import torch
from conftest import assert_same_bits
from families import SIZES
from test_transformers import IDS, SEQUENCES, applied, built, grads, half, padded
from transformers import DynamicCache, Qwen3Config

from bi_kernels.integrations.transformers import apply, logprobs, restore


def refused(error: type, sentence: str, call, *args, **kwargs) -> None:
    with pytest.raises(error, match=sentence) as raised:
        call(*args, **kwargs)
    assert "\n" not in str(raised.value)


def test_bad_models_are_refused_whole():
    refused(TypeError, "model is a int, expected a torch.nn.Module", apply, 3)
    refused(ValueError, "expected one with a module that can be replaced", apply, torch.nn.Sequential())
    refused(ValueError, "restore: model is a Qwen3ForCausalLM without swapped modules", restore, built())
    model = applied()
    refused(ValueError, "replaced already; call restore", apply, model)
    refused(ValueError, "attn_implementation is 'sdpa', expected 'bi_kernels'", model.set_attn_implementation, "sdpa")
    model = built()
    refused(ValueError, "expected a causal language model", logprobs, model, IDS[None])
    model.model.layers[0].to("meta")
    refused(ValueError, r"on 2 devices \(.* on cpu, .* on meta\), expected one", apply, model)
    refused(TypeError, "model.embed_tokens.weight has dtype torch.float64", apply, built().double())
    model = built()
    model.lm_head.weight.main_grad = torch.zeros(1)
    refused(ValueError, "has a main_grad already, expected none", apply, model)
    model = built()
    model.forward = model.forward
    refused(ValueError, "the model has a forward set on the instance", apply, model)
    other = type(applied())(Qwen3Config(**SIZES, attn_implementation="bi_kernels"))
    refused(ValueError, "Qwen3Attention got the configuration of an applied model", other, IDS[None])


class Adapter(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base_layer, self.more = base, torch.nn.Linear(base.in_features, base.out_features, False)

    def forward(self, x):
        return self.base_layer(x) + self.more(x.to(self.more.weight.dtype)).to(x.dtype)


def put_in(model, name: str, module: torch.nn.Module) -> None:
    parent, _, part = name.rpartition(".")
    setattr(model.get_submodule(parent), part, module)


PROJECTION = "model.layers.1.self_attn.q_proj"
PUT_IN = {  # after apply: the module's name, what it is then, and how
    "a linear": (PROJECTION, "Linear", lambda m: put_in(m, PROJECTION, torch.nn.Linear(64, 64, False).bfloat16())),
    "an adapter": (PROJECTION, "Adapter", lambda m: put_in(m, PROJECTION, Adapter(m.get_submodule(PROJECTION)))),
    "a head": ("lm_head", "Linear", lambda m: m.resize_token_embeddings(170, mean_resizing=False)),
    "a layer": ("model.layers.2", "LlamaDecoderLayer", lambda m: m.model.layers.append(built("llama").model.layers[0])),
}


@pytest.mark.parametrize("change", PUT_IN)
def test_a_module_put_in_after_apply_is_named(change):
    model, (name, kind, put), ids = applied("llama"), PUT_IN[change], SEQUENCES[0][None]
    put(model)
    sentence = f"{name} is a {kind} put in after apply.model., expected .*: restore and apply again"
    refused(ValueError, "apply: " + sentence, model, ids)
    refused(ValueError, "logprobs: " + sentence, logprobs, model, ids)
    with torch.no_grad():
        refused(ValueError, "apply: " + sentence, copy.deepcopy(model), ids)
    restore(model)
    apply(model)
    model(ids, labels=ids).loss.backward()
    del model.model.layers[-1]
    refused(ValueError, r"model.layers.\d is missing after apply", model, ids)


def test_other_gradients_than_those_of_backward_are_refused():
    model = applied("small")
    weights, loss = [*model.parameters()], half(model, 0)
    gradient = lambda of, **how: torch.autograd.grad(loss, of, allow_unused=True, retain_graph=True, **how)
    refused(ValueError, "torch.autograd.grad and backward.inputs=.... are not supported", gradient, weights)
    for p in weights:
        refused(ValueError, "call backward.. alone", gradient, p)
        refused(ValueError, "call backward.. alone", loss.backward, inputs=[p], retain_graph=True)
    refused(ValueError, "create_graph is True, expected False", loss.backward, create_graph=True)
    assert not grads(model)
    logprob, _ = logprobs(model, SEQUENCES[0][None])
    (g,) = torch.autograd.grad((logprob * 2).sum(), logprob, retain_graph=True)  # it ends at the output
    assert (g == 2).all() and not grads(model)
    loss.backward()
    assert len(grads(model)) == len(weights)
    model.requires_grad_(False)
    embeds = model.model.embed_tokens(SEQUENCES[0][None]).requires_grad_()
    (g,) = torch.autograd.grad(model(inputs_embeds=embeds).logits.sum(), embeds)
    assert g.any()


def test_a_model_is_never_left_half_replaced(monkeypatch):
    from bi_kernels.integrations.transformers import replace as module

    def stumbling(replaces, kind):
        if kind is module.modules.MLP:
            raise KeyboardInterrupt
        return swapped(replaces, kind)

    model, swapped = built(), module.swapped
    kinds = [type(m) for m in model.modules()]
    monkeypatch.setattr(module, "swapped", stumbling)
    with pytest.raises(KeyboardInterrupt):
        apply(model)
    assert [type(m) for m in model.modules()] == kinds and model.config._attn_implementation == "sdpa"


def test_bad_calls_are_refused_in_one_sentence():
    model, (given, _) = applied(), padded([0, 1])
    ids, mask = given["input_ids"], given["attention_mask"]
    row, ends, holes = ids.view(1, 40), torch.tensor([0, 5, 19]), mask.clone()
    holes[0, 2] = 0
    at = {"position_ids": torch.arange(20).repeat(2)[None]}
    both = {"attention_mask": mask.view(1, 40), "cu_seqlens": torch.tensor([0, 40])}
    for sentence, call, *args, more in (
        (r"attention_mask has shape \(2, 19\), expected \(2, 20\)", model, ids, mask[:, 1:], {}),
        ("attention_mask's row 0 has zeros between ones, expected padding at its ends", model, ids, holes, {}),
        (r"attention_mask is of shape \(2, 1, 20, 20\)", model, ids, torch.ones(2, 1, 20, 20), {}),
        ("row 0 has 5 values that are neither, expected ones and zeros", model, ids, 2 * mask, {}),
        ("attention_mask's row 0 has 20 values that are neither", logprobs, model, ids, mask - 0.5, {}),
        (r"cu_seq_lens_q is \[0, 5, 19\] for tokens \(1, 40\)", model, row, {"cu_seq_lens_q": ends}),
        (r"cu_seqlens is \[0, 5, 19\] for tokens \(1, 40\),", logprobs, model, row, {"cu_seqlens": ends}),
        (r"cu_seqlens is \[0, 40\] .* and an attention_mask, expected", logprobs, model, row, both),
        ("cu_seqlens is a list, expected a torch.Tensor", logprobs, model, row, {"cu_seqlens": [0, 40]}),
        (r"cu_seqlens is of shape \(0,\)", logprobs, model, row, {"cu_seqlens": ends[:0]}),
        ("cu_seq_lens_q is of .* dtype torch.float32", model, row, {"cu_seq_lens_q": ends.float()}),
        (r"logprobs: input_ids has shape \(20,\), expected", logprobs, model, ids[0], {}),
        (r"logprobs: input_ids has shape \(2, 0\), expected a token or more", logprobs, model, ids[:, :0], {}),
        (
            "logprobs: position_ids restart among the tokens of att",
            logprobs,
            model,
            row,
            {"attention_mask": row**0} | at,
        ),
        ("logprobs: input_ids is a list, expected a torch.Tensor", logprobs, model, ids.tolist(), {}),
        (r"labels has shape \(2, 19\), expected \(2, 20\)", model, ids, mask, {"labels": ids[:, 1:]}),
        (r"position_ids has shape \(2, 7\), expected \(2, 20\)", model, ids, {"position_ids": ids[:, :7]}),
        ("output_attentions is True", model, ids, mask, {"output_attentions": True}),
    ):
        refused((TypeError, ValueError), sentence, call, *args, **more)
    assert_same_bits(model(ids, mask.float()).logits, model(ids, mask.bool()).logits)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, mask, past_key_values=cache)
        refused(ValueError, r"expected \(2, 21\)", model, ids[:, :1], mask[:, :1], past_key_values=cache)
    refused(ValueError, "a gradient is wanted behind a cache", model, ids[:, :1], past_key_values=cache)
    model(ids, mask, None)  # given by position
    model.lm_head.weight.register_hook(lambda g: g)
    refused(ValueError, "has a gradient hook", model, ids, mask)
