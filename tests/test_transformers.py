"""Transformers' models after `apply`, where notebook `transformers` does not ask: Qwen2, what a training loop does to
gradients, copies, other modules in a model, and what is refused."""

import copy
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_bits, slow_but
from families import SIZES
from transformers import (
    ContinuousBatchingConfig,
    DataCollatorWithFlattening,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import bi_kernels as bi
from bi_kernels.integrations.transformers import apply, logprobs, restore
from bi_kernels.integrations.transformers.layout import read
from bi_kernels.integrations.transformers.swap import Swapped

MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "use_sliding_window": True}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "small": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_hidden_layers": 1}, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"} | MIXED)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
}
LENGTHS = [5, 1, 17, 9]
STARTS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
IDS = torch.randint(1, 160, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
SEQUENCES = [IDS[s : s + n] for s, n in zip(STARTS, LENGTHS)]
ADVANTAGES = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(2))


def built(name: str = "qwen3", dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    model, g = MODELS[name](), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + p / 8)
    return model.to(dtype)


def applied(name: str = "qwen3", dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    model = built(name, dtype)
    apply(model)
    return model


def tokens_of(sequences) -> torch.Tensor:
    return torch.cat([torch.arange(STARTS[i], STARTS[i] + LENGTHS[i]) for i in sequences])


def padded(sequences, left: bool = False, width: int = 20) -> tuple[dict, torch.Tensor]:
    """(arguments, the logical token of each place, −1 for padding) of some sequences."""
    at = torch.full((len(sequences), width), -1)
    for row, i in zip(at, sequences):
        (row[width - LENGTHS[i] :] if left else row[: LENGTHS[i]]).copy_(tokens_of([i]))
    real = at >= 0
    return {"input_ids": IDS[at.clamp(min=0)].masked_fill(~real, 0), "attention_mask": real.long()}, at


def packed(sequences) -> tuple[dict, torch.Tensor]:
    at = tokens_of(sequences)[None]
    ends = torch.tensor([0, *[LENGTHS[i] for i in sequences]]).cumsum(0).int()
    return {"input_ids": IDS[at], "cu_seqlens": ends}, at


def single(i: int) -> tuple[dict, torch.Tensor]:
    return {"input_ids": IDS[tokens_of([i])[None]]}, tokens_of([i])[None]


EVERY = [*range(len(LENGTHS))]
STEPS = {  # the calls of a step, in its order
    "packed": [packed(EVERY)],
    "singles": [single(i) for i in EVERY],
    "batch": [padded(EVERY)],
    "left padded": [padded(EVERY, left=True)],
}


def step(model: torch.nn.Module, calls: list) -> dict[str, torch.Tensor]:
    """Every token's logprob and every parameter's `.grad` after one step of a loss."""
    model.zero_grad()
    found = torch.zeros(2, sum(LENGTHS))
    for given, at in calls:
        logprob, entropy = logprobs(model, **given)
        real = at >= 0
        weight = ADVANTAGES[at.clamp(min=0)].masked_fill(~real, 0)
        ((logprob * weight).sum() / sum(LENGTHS) + entropy.sum() / 64).backward()
        found[:, at[real]] = torch.stack([logprob, entropy])[:, real].detach()
    return {"logprob": found} | {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.any(), name
        assert_same_bits(found[name], value, name)


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    return step(applied(), STEPS["packed"])


def test_layers_with_and_without_a_window_have_the_same_bits_in_micro_batches():
    cut = [packed([0, 1]), padded([2, 3], left=True)]
    assert_same(step(applied("qwen2"), cut), step(applied("qwen2"), STEPS["packed"]))


def rescored(model: torch.nn.Module, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """The logits of each sequence in one packed call."""
    ends = torch.tensor([0, *[len(s) for s in sequences]]).cumsum(0).int()
    given = {"cu_seqlens": ends, "position_ids": torch.cat([torch.arange(len(s)) for s in sequences])[None]}
    with torch.no_grad():
        logits = model(input_ids=torch.cat(sequences)[None], **given, use_cache=False).logits[0]
    return list(logits.split([len(s) for s in sequences]))


PROMPTS = [SEQUENCES[i] for i in (0, 2, 1)]
LONG = torch.randint(1, 160, (61,), generator=torch.Generator().manual_seed(7))  # a window slides over a block of keys


@pytest.mark.parametrize("cache", slow_but([None, "static"], None))
@pytest.mark.parametrize("name, prompts", slow_but([("qwen2", PROMPTS), ("mistral", [LONG, LONG[5:]])], "qwen2"))
def test_what_is_generated_is_rescored_to_the_bit(name, prompts, cache):
    """The logits of tokens generated behind left-padded prompts are those of one packed call."""
    model, width = applied(name).eval(), max(map(len, prompts)) + 2
    ids, mask = torch.zeros(2, len(prompts), width).long()
    for row, real, prompt in zip(ids, mask, prompts):
        row[-len(prompt) :], real[-len(prompt) :] = prompt, 1
    told = {"max_new_tokens": 12, "do_sample": True, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(input_ids=ids, attention_mask=mask, **told, cache_implementation=cache)
    rows = [row[width - len(prompt) :] for prompt, row in zip(prompts, out.sequences)]
    for row, (prompt, logits) in enumerate(zip(prompts, rescored(model, rows))):
        generated = torch.stack([step[row] for step in out.logits])
        assert_same_bits(generated, logits[len(prompt) - 1 : -1].float(), f"row {row}")


@pytest.mark.slow
def test_a_window_s_continuous_batching_is_rescored_to_the_bit():
    model = applied("mistral").eval()
    prompts = [[*s.tolist()] for s in SEQUENCES] + [SEQUENCES[2].tolist()[:7]]
    told = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    batching = ContinuousBatchingConfig(num_blocks=24, max_batch_tokens=20, return_logprobs=True, **{page: 8})
    out = model.generate_batch(prompts, told, batching, progress_bar=False)
    found = sorted(out.values(), key=lambda o: int(o.request_id.rsplit("_", 1)[1]))
    rows = [torch.tensor(o.prompt_ids + o.generated_tokens) for o in found]
    for o, prompt, row, logits in zip(found, prompts, rows, rescored(model, rows), strict=True):
        there, new = logits[len(prompt) - 1 : -1].float(), row[len(prompt) :]
        assert o.prompt_ids == prompt and len(new) == 8
        assert_same_bits(there.argmax(-1), new)
        assert_same_bits(torch.tensor(o.logprobs), there.softmax(-1).gather(1, new[:, None])[:, 0].log())


def test_a_paged_cache_is_cleared_once_before_it_is_read():
    """Transformers 5.17 warms up on what the memory held before."""
    cache = SimpleNamespace(num_blocks=2, block_size=4)
    cache.key_cache, cache.value_cache = [torch.full((10, 2, 4), torch.nan)], [torch.full((10, 2, 4), torch.inf)]
    read(torch.zeros(1, 3, dtype=torch.long), cache=cache)
    assert not cache.key_cache[0].any() and not cache.value_cache[0].any()
    cache.key_cache[0].fill_(1)
    read(torch.zeros(1, 3, dtype=torch.long), cache=cache)
    assert cache.key_cache[0].all()
    cache.bi_kernels_cleared, cache._block_manager = False, SimpleNamespace(_hash_to_id={7: 0})
    read(torch.zeros(1, 3, dtype=torch.long), cache=cache)
    assert cache.key_cache[0].all(), "it held a prefix when the model came to it"


def test_the_keys_that_a_window_drops_are_counted():
    """The fold over keys is anchored at absolute positions, in blocks of 64 and splits of 4096."""
    from bi_kernels.integrations.transformers.layout import trimmed
    from bi_kernels.ops.attention.attention import Arguments, attend

    g, window = torch.Generator().manual_seed(0), 40
    for total in (100, 4110):
        q, k, v = (torch.randn(n, 1, 16, generator=g).bfloat16() for n in (1, total, total))
        ends = torch.tensor([0, total])
        expected, _ = bi.attention(q, k, v, cu_seqlens_q=ends.clamp(max=1), cu_seqlens_k=ends, window=window)
        zero, one, kept = (torch.tensor([n], dtype=torch.int32) for n in (0, 1, window))
        last, constants = [t[-window:].contiguous() for t in (k, v)], (True, 0.25, window, q.shape, None, 0.0, 0)
        found = {
            dropped: attend(Arguments(q, *last, sequences, *constants))[0]
            for dropped in (total - window, 0)
            for sequences in [trimmed(zero, one, zero, kept, torch.tensor([dropped]), window, True)]
        }
        assert_same_bits(found[total - window], expected)
        assert (found[0] != expected).any(), "what begins anew at the first key that is kept"


def half(model, part: int, weight: float = 1.0) -> torch.Tensor:
    """The loss of half of the sequences."""
    given, at = padded([0, 1] if part == 0 else [2, 3])
    logprob, _ = logprobs(model, **given)
    return weight * (logprob * ADVANTAGES[at.clamp(min=0)].masked_fill(at < 0, 0)).sum() / sum(LENGTHS)


def grads(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def halves() -> dict[str, torch.Tensor]:
    model = applied()
    half(model, 0).backward()
    half(model, 1).backward()
    return grads(model)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_begins_a_step_wherever_it_stands(set_to_none, halves):
    model = applied()
    half(model, 1).backward()
    loss = half(model, 0)  # the classic order: forward, zero_grad, backward
    model.zero_grad(set_to_none)
    kept = model.lm_head.weight.grad
    loss.backward()
    assert set_to_none or kept is model.lm_head.weight.grad
    with torch.no_grad():
        logprobs(model, **single(2)[0])  # an evaluation between
        model.eval().generate(SEQUENCES[0][None], max_new_tokens=2, do_sample=False)
    half(model.train(), 1).backward()
    assert_same(grads(model), halves)
    assert model.lm_head.weight.grad.dtype == torch.bfloat16
    model.zero_grad(set_to_none)
    assert not set_to_none or not grads(model)


def test_what_a_user_does_to_grad_is_kept():
    model, weight = applied(), lambda m: m.model.layers[0].mlp.up_proj.weight
    half(model, 0).backward()
    before = weight(model).grad.clone()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1 / 64)
    clipped = weight(model).grad.clone()
    assert (clipped != before).any()
    half(model, 0, 0.0).backward()
    assert_same_bits(weight(model).grad, clipped)  # the fold goes on from what stands there
    weight(model).grad = torch.full_like(before, 2.0)
    half(model, 0, 0.0).backward()
    assert_same_bits(weight(model).grad, torch.full_like(before, 2.0))
    model.zero_grad()
    half(model, 0).backward()
    assert_same_bits(weight(model).grad, before)


def test_backward_twice_doubles_and_autograd_adds_its_own():
    model = applied(dtype=torch.float32)
    loss = half(model, 0)
    loss.backward(retain_graph=True)
    once = grads(model)
    loss.backward()
    weight = "model.layers.1.mlp.down_proj.weight"
    assert_same_bits(grads(model)[weight].bfloat16(), (2 * once[weight]).bfloat16())
    model.zero_grad()
    (half(model, 0) + model.get_parameter(weight).sum()).backward()  # an op that is not ours
    assert_same_bits(grads(model)[weight], once[weight] + 1)


def test_frozen_parameters_and_several_forwards(halves):
    model = applied()
    model.model.layers[0].requires_grad_(False)
    half(model, 0).backward()
    half(model, 1).backward()
    found = grads(model)
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad} < halves.keys()
    assert_same(found, {n: halves[n] for n in found})
    model.zero_grad()
    first, second = half(model, 0), half(model, 1)  # the backward passes say the order
    first.backward()
    second.backward()
    assert_same(grads(model), {n: halves[n] for n in found})


def test_autocast_of_fp32_weights_changes_no_bit_between_splits():
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(*(step(applied("small", torch.float32), STEPS[name]) for name in ("singles", "packed")))


def test_checkpointing_without_the_call_is_refused(monkeypatch):
    from bi_kernels.integrations.transformers.layout import Call

    monkeypatch.setattr(Call, "__call__", lambda call, function: function)
    model = applied().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="called"):
        step(model, STEPS["left padded"])


def test_the_models_own_loss_has_its_gradients_where_layers_are_computed_again():
    found = []
    for reentrant in (None, False, True):
        for calls in ([EVERY], [[i] for i in EVERY]):
            model = applied().train()
            if reentrant is not None:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            found.append(step_of_loss(model, [padded(rows)[0] for rows in calls]))
    for other in found[1:]:
        assert_same(other, found[0])


def test_the_models_own_loss_and_logits():
    """labels, num_items_in_batch and logits_to_keep as Trainer and others pass them; positions from the mask, or of a
    batch that a collator has flattened."""
    model, made = applied(), {}
    rows = [{"input_ids": s.tolist(), "labels": s.tolist()} for s in SEQUENCES]
    batches = {left: padded(EVERY, left) for left in (False, True)}
    batches["flat"] = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows), torch.arange(len(IDS))[None]
    for name, (given, at) in batches.items():
        labels = given["input_ids"].masked_fill(at < 0, -100) if "labels" not in given else given["labels"]
        model.zero_grad()
        out = model(**given | {"labels": labels}, num_items_in_batch=28)
        out.loss.backward()
        made[name] = grads(model) | {"logits": out.logits.detach()[at >= 0]}
    assert_same(made[True], made[False])
    assert_same(made["flat"], made[False])
    given = batches[False][0]
    stock = built()(
        **given, labels=given["input_ids"].masked_fill(batches[False][1] < 0, -100), num_items_in_batch=28
    ).loss
    assert (out.loss - stock).abs() < stock.abs() / 64
    kept = {}
    for keep in (0, 6):
        model.zero_grad()
        logits = model(**given, logits_to_keep=keep).logits[:, -6:]
        logits.float().square().sum().backward()
        kept[keep] = grads(model) | {"logits": logits.detach()}
    assert_same(kept[6], kept[0])


def test_copies_and_pickles_stay_applied(whole):
    model = applied()
    step(model, STEPS["singles"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, Qwen3ForCausalLM) and type(other) is type(model)
        assert_same(step(other, STEPS["batch"]), whole)
        restore(other)
        assert type(other) is Qwen3ForCausalLM
    assert isinstance(model.lm_head, torch.nn.Linear)


def test_a_vocabulary_that_grows_begins_a_fold_anew():
    model = applied()
    half(model, 1).backward()
    model.zero_grad()
    model.resize_token_embeddings(170, mean_resizing=False)
    assert isinstance(model.lm_head, Swapped) and isinstance(model.model.embed_tokens, Swapped)
    calls = {"together": [[0, 2]], "apart": [[0], [2]]}
    assert_same(
        *[step_of_loss(model, [padded(some)[0] for some in part]) for part in (calls["apart"], calls["together"])]
    )
    assert model.lm_head.weight.grad.shape == (170, 64) and model.lm_head.weight.grad[165].any()


def step_of_loss(model, calls: list[dict]) -> dict[str, torch.Tensor]:
    """Every parameter's `.grad` after a step of the model's own loss."""
    model.zero_grad()
    for given in calls:
        labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
        model(**given, labels=labels, num_items_in_batch=20).loss.backward()
    return grads(model)


def test_restore_gives_the_original_back(tmp_path, whole):
    model, stock = built(), built()
    kinds = [type(m) for m in model.modules()]
    given, _ = padded(EVERY)

    def outcome(model) -> dict[str, torch.Tensor]:
        model.zero_grad()
        out = model.train()(**given, labels=given["input_ids"])
        out.loss.backward()
        return grads(model) | {"logits": out.logits.detach()}

    expected = outcome(stock)
    report = apply(model)
    assert report.batch_invariant and report.split_invariant
    assert_same(step(model, STEPS["batch"]), whole)
    model.eval().generate(SEQUENCES[0][None], max_new_tokens=2)
    restore(model)
    assert [type(m) for m in model.modules()] == kinds and model.config._attn_implementation == "sdpa"
    assert not any(hasattr(p, "main_grad") for p in model.parameters())
    assert not any("bi_kernels" in name for m in model.modules() for name in vars(m))
    assert_same(outcome(model), expected)
    apply(model)
    assert_same(step(model.train(), STEPS["batch"]), whole)


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.RMSNorm(16), torch.nn.Dropout(0.5))
        self.wide = torch.nn.Linear(16, 8)
        self.wide.weight.requires_grad_(False)

    def forward(self, x):
        return self.wide(self.inner(self.norm(x)))


def test_every_module_and_parameter_is_accounted_for():
    model = Mixed()
    report = apply(model)
    names = [*report.replaced, *report.left, *report.containers]
    assert sorted(names) == sorted(n for n, _ in model.named_modules())
    assert sorted([*report.folded, *report.others]) == sorted(n for n, _ in model.named_parameters())
    assert set(report.left) == {"", "inner.2"} and "draws" in report.left["inner.2"]
    assert report.folded["wide.weight"] == "frozen" and not report.others
    model.eval()(torch.randn(2, 3, 16)).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_a_rope_that_follows_the_batch_is_left_and_named():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=rope)).bfloat16().eval()
    with torch.no_grad():
        stock = model(SEQUENCES[2][None]).logits
        report = apply(model)
        assert list(report.left) == ["model.rotary_emb"] and "dynamic" in report.left["model.rotary_emb"]
        assert (model(SEQUENCES[2][None]).logits - stock).abs().max() < stock.abs().max() / 16


def test_other_parameters_and_a_module_beside_are_no_refusal(whole):
    model = applied()
    model.score = torch.nn.Linear(64, 1)
    model(SEQUENCES[0][None])
    del model.score
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())
    model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()}, assign=True)
    model.tie_weights()
    assert_same(step(model, STEPS["batch"]), whole)


def test_a_dropped_model_is_freed_at_once():
    model = applied("small")
    weight = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    del model
    assert weight() is None


def test_a_logprob_stands_before_its_token():
    model, ids = applied(dtype=torch.float32), SEQUENCES[2][None]
    with torch.no_grad():
        logprob, entropy = logprobs(model, ids)
        expected, _ = bi.token_logprob(model(ids).logits[:, :-1], ids[:, 1:])
    assert torch.equal(logprob[:, :-1], expected) and not logprob[0, -1] and not entropy[0, -1]
