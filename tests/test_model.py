"""What notebook `chain` does not ask of the decoder: another configuration, what stops it, and what it refuses."""

import dataclasses

import pytest
import torch
from conftest import assert_same_bits

from bi_kernels.audit.targets.decoder import cached_logprobs
from bi_kernels.audit.targets.model import ModelTarget, layout_rows, mode_rows
from bi_kernels.model import CONFIGS, Cache, Decoder, generate, packed, padded
from helpers.whole_model import shares

LENGTHS = [5, 1, 17, 33, 9]
CONFIG = CONFIGS["tiny"]
IDS, TARGETS = torch.randint(0, CONFIG.vocab, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


class Toy(ModelTarget):
    """A model of two weights, whose gradient moves by so many elements where a rollout gave the old logprobs."""

    whose = "chain", "toy", "", "bi_kernels", "bf16", "cpu"
    device, lengths, layouts = torch.device("cpu"), [3], {"packed": []}
    cached = {"chunked:2": (2, [0]), "decode": (1, [2])}

    def __init__(self, moved: int):
        self.moved, self.drifts = moved, {}

    def run(self, layout, generated=None):
        found = {"logprob": torch.ones(3), "a.weight": torch.ones(4), "b.weight": torch.ones(4)}
        found["a.weight"][0] += self.moved * (generated is not None)
        return found

    def run_cached(self, chunk, first):
        return torch.ones(3)


@pytest.mark.parametrize("moved", [0, 1])
def test_gradients_of_a_step_on_a_rollout_are_compared(moved):
    """A prefill alone is no rollout: no step is made of it."""
    toy = Toy(moved)
    rows = [row for row in layout_rows(toy) if "then trained" in row.layout]
    assert [row.mismatches for row in rows] == [moved, moved]
    found = shares(toy.drifts)
    assert found["chunked:2"] == found["decode"] == {"logprob": 0, "weight": moved / 8}
    assert found["prefill of a cache"] == {"logprob": 0}


MODES = {  # what a model looks at, and the rows that name it
    "no_grad": (lambda model: not torch.is_grad_enabled(), ["no_grad", "inference_mode"]),
    "inference_mode": (lambda model: torch.is_inference_mode_enabled(), ["inference_mode"]),
    "hooks": (lambda model: model._forward_hooks and model._forward_pre_hooks, ["hooks"]),
    "eval": (lambda model: not model.training, ["eval"]),
    "a later call": (lambda model: True, ["no_grad", "inference_mode", "hooks", "eval", "a later call"]),
}


@pytest.mark.parametrize("looks, named", MODES.values(), ids=MODES)
def test_a_model_that_is_another_in_a_mode_is_named_by_it(looks, named):
    """One call in all modes; only if it drifts, one in each."""
    toy = Toy(0)
    toy.model, toy.first = torch.nn.Identity(), torch.ones(3)
    toy.logprobs = lambda: toy.first * (1 + bool(looks(toy.model)))
    together, *each = mode_rows(toy)
    assert together.mismatches == 3 and len(each) == 5 and [r.layout for r in each if r.mismatches] == named
    toy.logprobs = lambda: toy.first
    assert [r.verdict for r in mode_rows(toy)] == ["pass"]
    assert toy.model.training and not toy.model._forward_hooks


BIASES = dataclasses.replace(CONFIG, tied=False, qk_norm=False, qkv_bias=True, window=8)
EXPERTS = dataclasses.replace(CONFIGS["tiny-experts"], layers=1, norm_topk=False)


@torch.no_grad()
@pytest.mark.parametrize("config", [BIASES, EXPERTS], ids=["biases and a window", "experts"])
def test_chunks_and_left_padding_give_the_logprobs_of_one_call(config):
    model = Decoder(config)
    expected, _ = model.logprobs(IDS, TARGETS, packed(LENGTHS, "cpu"))
    assert len(expected.unique()) > len(expected) // 2
    assert_same_bits(cached_logprobs(model, LENGTHS, IDS, TARGETS, 7, [0] * len(LENGTHS)), expected)
    width = 40
    real = torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]
    ids, targets = (torch.zeros(real.shape, dtype=torch.long).masked_scatter(real, t) for t in (IDS, TARGETS))
    found, _ = model.logprobs(ids, targets, padded(LENGTHS, width, "cpu", left=True))
    assert_same_bits(found[real], expected)


def test_a_cache_that_is_full_says_so():
    cache = Cache(CONFIG, 2, 8, torch.zeros(1))
    with pytest.raises(ValueError, match="Cache: 9 tokens, expected at most 8"):
        cache.rows(9)


def test_the_configurations_count_as_many_parameters_as_published():
    for name, published in (
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("llama3-8b", 8_030_261_248),
        ("qwen3-30b-a3b", 30_532_122_624),
    ):
        c = CONFIGS[name]
        width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
        mlp = 3 * c.mlp + c.experts * (3 * c.expert_mlp + 1)
        layer = c.hidden * (2 * width + 2 * kv_width + mlp + 2) + 2 * c.head_dim * c.qk_norm
        count = c.layers * layer + c.vocab * c.hidden * (1 if c.tied else 2) + c.hidden
        assert count == published, name


@pytest.mark.parametrize("norm_topk", [True, False])
def test_a_mixture_is_that_of_qwen3(norm_topk):
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    c = dataclasses.replace(EXPERTS, norm_topk=norm_topk)
    layer = Decoder(c, dtype=torch.float32).layers[0]
    sizes = {"hidden_size": c.hidden, "num_experts": c.experts, "num_experts_per_tok": c.experts_per_token}
    sizes |= {"moe_intermediate_size": c.expert_mlp, "norm_topk_prob": norm_topk}
    theirs = modeling.Qwen3MoeSparseMoeBlock(modeling.Qwen3MoeConfig(experts_implementation="eager", **sizes))
    weights = {"gate.weight": layer.router, "experts.gate_up_proj": layer.gate_up, "experts.down_proj": layer.down}
    theirs.load_state_dict(weights)
    h, dy = torch.randn(2, 1, 20, c.hidden).unbind()
    found = []
    for mixture, of in ((lambda h: layer.mixture(h, padded([20], 20, "cpu")), weights), (theirs, None)):
        x = h.clone().requires_grad_()
        y = mixture(x)
        y.backward(dy)
        named = weights if of else dict(theirs.named_parameters())
        found.append([y, x.grad, *(named[name].grad for name in weights)])
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).abs().max() <= 2.0**-16 * expected.abs().max()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"experts_per_token": 9}, "experts_per_token is 9 and expert_mlp 32, expected 1 to 8, the experts, and at"),
        ({"mlp": 96}, "mlp is 96 and experts 8, expected one of them, and 0 of the other"),
    ],
)
def test_sizes_that_no_mixture_has_are_one_sentence(change, said):
    with pytest.raises(ValueError, match=f"^Config: {said}"):
        dataclasses.replace(EXPERTS, **change)


PROMPTS = [part.tolist() for part in IDS.split(LENGTHS)]


def test_generation_ends_with_a_stop_token():
    model = Decoder(CONFIG)
    (whole,) = generate(model, PROMPTS[:1], 4, seed=1)
    (ended,) = generate(model, PROMPTS[:1], 4, seed=1, stop=[whole.ids[2]])
    assert len(whole.ids) == 4 and ended.ids == whole.ids[: whole.ids.index(whole.ids[2]) + 1]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"max_new_tokens": [1]}, "max_new_tokens holds 1 numbers, expected 5, one a prompt"),
        ({"prompts": [[1], []]}, "2 prompts of 0 tokens or more"),
        ({"prompts": []}, "0 prompts of 0 tokens"),
        ({"max_new_tokens": 5000}, "5033 tokens with the new ones, expected at most 4096"),
        ({"samples": [1]}, "samples holds 1 numbers, expected 5"),
    ],
)
def test_a_bad_call_of_generate_is_one_sentence(change, said):
    with pytest.raises(ValueError, match=f"^generate: {said}"):
        list(generate(Decoder(CONFIG), **{"prompts": PROMPTS, "max_new_tokens": 3} | change))


def test_a_training_forward_in_chunks_is_refused_in_a_sentence():
    model = Decoder(CONFIGS["tiny"], "cpu")
    cache = Cache(model.config, 1, 8, model.embedding)
    ids = torch.arange(5)[None]
    with pytest.raises(ValueError, match=r"^Cache: the call wants gradients, .* expected torch\.no_grad\(\), or whole"):
        model.logprobs(ids, ids, cache.rows(5), cache)
    with torch.no_grad():
        model.logprobs(ids, ids, cache.rows(5), cache)
    assert int(cache.lengths) == 5, "what was refused left nothing behind"
