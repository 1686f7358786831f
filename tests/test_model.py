"""The chain: a token's logprob, and every parameter's gradient, in every layout, split and order of computing."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_bits, slow_but

import bi_kernels
from bi_kernels.audit.targets.decoder import cached_logprobs
from bi_kernels.audit.targets.model import ModelTarget, layout_rows
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Cache, Decoder, generate, packed, padded, policy_loss, score
from helpers.whole_model import shares

LENGTHS = [5, 1, 17, 33, 9]
STARTS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
WIDTH = 40
CONFIG = CONFIGS["tiny"]
CONFIG_OTHER = dataclasses.replace(CONFIG, tied=False, qk_norm=False, qkv_bias=True, window=8)


def drawn() -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    count = sum(LENGTHS)
    ids, targets = torch.randint(0, CONFIG.vocab, (2, count), generator=g)
    return ids, targets, torch.randn(count, generator=g)


IDS, TARGETS, ADVANTAGES = drawn()


def tokens_of(sequences) -> torch.Tensor:
    return torch.cat([torch.arange(STARTS[i], STARTS[i] + LENGTHS[i]) for i in sequences])


def one_packed(sequences):
    """(rows, the logical token of each place) of some sequences, laid one after another."""
    return packed([LENGTHS[i] for i in sequences], "cpu", list(sequences)), tokens_of(sequences)


def one_padded(sequences, left: bool):
    at = torch.full((len(sequences), WIDTH), -1)
    for row, i in zip(at, sequences):
        (row[WIDTH - LENGTHS[i] :] if left else row[: LENGTHS[i]]).copy_(tokens_of([i]))
    return padded([LENGTHS[i] for i in sequences], WIDTH, "cpu", left, list(sequences)), at


EVERY = range(len(LENGTHS))
STEPS = {  # the calls of a step, in its order
    "packed": [one_packed([*EVERY])],
    "singles": [one_packed([i]) for i in EVERY],
    "batch": [one_padded([*EVERY], left=False)],
    "left padded": [one_padded([*EVERY], left=True)],
    "permuted": [one_packed([3, 0, 4, 2, 1])],
    "micro-batches": [one_packed([0, 1]), one_padded([3, 2], left=True), one_packed([4])],
}


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


def step(model: Decoder, calls: list) -> dict[str, torch.Tensor]:
    """Every token's logprob and every parameter's gradient after one step."""
    grads = MainGrads(model.parameters(), model.tied)
    found = torch.zeros(sum(LENGTHS))
    for rows, at in calls:
        real = at >= 0
        targets = TARGETS[at.clamp(min=0)].masked_fill(~real, -100)
        logprob, _ = model.logprobs(IDS[at.clamp(min=0)].masked_fill(~real, 0), targets, rows)
        old = logprob.detach() - 0.1
        policy_loss(logprob, old, ADVANTAGES[at.clamp(min=0)], real, sum(LENGTHS)).backward()
        grads.collect()
        found[at[real]] = logprob.detach()[real]
    grads.join()
    return {"logprob": found} | {name: p.main_grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    return step(Decoder(CONFIG), STEPS["packed"])


@pytest.mark.parametrize("name", [*STEPS][1:])
def test_logprobs_and_gradients_are_the_same_in_every_layout(name, whole):
    found = step(Decoder(CONFIG, checkpointing=name == "micro-batches"), STEPS[name])
    assert found.keys() == whole.keys()
    for what, expected in whole.items():
        assert expected.any(), what
        assert_same_bits(found[what], expected, what)


def test_without_its_layout_a_gradient_moves(whole):
    rows, at = STEPS["left padded"][0]
    dense = rows._replace(layout=padded([WIDTH] * len(LENGTHS), WIDTH, "cpu").layout)
    found = step(Decoder(CONFIG), [(dense, at)])
    assert_same_bits(found["logprob"], whole["logprob"])
    assert any((found[what] != expected).any() for what, expected in whole.items())


@torch.no_grad()
def test_a_linear_that_adds_otherwise_for_few_rows_is_seen(whole):
    def linear(x, weight, bias=None):
        if x.shape[:-1].numel() > 16:
            return bi_kernels.linear(x, weight, bias)
        half = x.shape[-1] // 2
        first = bi_kernels.linear(x[..., :half], weight[:, :half], bias)
        return bi_kernels.add(first, bi_kernels.linear(x[..., half:], weight[:, half:]))

    ours = {name: getattr(bi_kernels, name) for name in bi_kernels.__all__}
    model = Decoder(CONFIG, ops=SimpleNamespace(**ours | {"linear": linear}))
    for rows, at in STEPS["packed"] + STEPS["singles"]:
        logprob, _ = model.logprobs(IDS[at], TARGETS[at], rows)
        assert bool((logprob != whole["logprob"][at]).any()) == (len(at) <= 16), len(at)


@pytest.mark.parametrize("config", [CONFIG, CONFIG_OTHER], ids=["QK-norm, tied", "biases, window"])
@pytest.mark.parametrize("chunk", slow_but([1, 7], 7))
@torch.no_grad()
def test_chunks_and_decode_give_the_logprobs_of_one_call(config, chunk):
    model = Decoder(config)
    expected, _ = model.logprobs(IDS, TARGETS, STEPS["packed"][0][0])
    assert len(expected.unique()) > len(expected) // 2
    found = cached_logprobs(model, LENGTHS, IDS, TARGETS, chunk, [0] * len(LENGTHS))
    assert_same_bits(found, expected)


def test_a_cache_that_is_full_says_so():
    cache = Cache(CONFIG, 2, 8, torch.zeros(1))
    with pytest.raises(ValueError, match="Cache: 9 tokens, expected at most 8"):
        cache.rows(9)


def test_the_configurations_count_as_many_parameters_as_published():
    for name, published in (("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360), ("llama3-8b", 8_030_261_248)):
        c = CONFIGS[name]
        width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
        layer = c.hidden * (2 * width + 2 * kv_width + 3 * c.mlp + 2) + 2 * c.head_dim * c.qk_norm
        count = c.layers * layer + c.vocab * c.hidden * (1 if c.tied else 2) + c.hidden
        assert count == published, name


PROMPTS = [IDS[first : first + n].tolist() for first, n in zip(STARTS, [5, 1, 17, 9, 3])]
MOST = [4, 2, 3, 5, 3]


def generated(model: Decoder, **options) -> list:
    return sorted(generate(model, PROMPTS, MOST, seed=1, **options), key=lambda one: one.number)


@pytest.fixture(scope="module")
def continued() -> tuple:
    model = Decoder(CONFIG)
    return model, generated(model)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_continuation_does_not_depend_on_the_batch(continued, batch):
    model, whole = continued
    assert generated(model, batch=batch) == whole
    assert [len(one.ids) for one in whole] == MOST


def test_noise_follows_the_sample_not_the_row(continued):
    model, whole = continued
    turned = list(generate(model, PROMPTS[::-1], MOST[::-1], seed=1, samples=range(5)[::-1]))
    assert sorted((one.ids, one.logprobs) for one in turned) == sorted((one.ids, one.logprobs) for one in whole)
    other = list(generate(model, PROMPTS[::-1], MOST[::-1], seed=1))
    assert sorted(one.ids for one in other) != sorted(one.ids for one in whole)


def test_what_was_generated_is_scored_with_the_same_bits(continued):
    model, whole = continued
    for found, one in zip(score(model, whole), whole):
        assert_same_bits(found.detach(), torch.tensor(one.logprobs))
    one = whole[0]
    other = dataclasses.replace(one, ids=[*one.ids[:-1], (one.ids[-1] + 1) % CONFIG.vocab])
    assert not torch.equal(score(model, [other])[0], torch.tensor(one.logprobs)), "another token has another logprob"


def test_generation_ends_with_a_stop_token(continued):
    model, whole = continued
    first = whole[0]
    (ended,) = generate(model, PROMPTS[:1], MOST[:1], seed=1, stop=[first.ids[2]])
    assert ended.ids == first.ids[: first.ids.index(first.ids[2]) + 1]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"max_new_tokens": [1]}, "max_new_tokens holds 1 numbers, expected 5, one a prompt"),
        ({"prompts": [[1], []]}, "2 prompts of 0 tokens or more"),
        ({"prompts": []}, "0 prompts of 0 tokens"),
        ({"max_new_tokens": 5000}, "5017 tokens with the new ones, expected at most 4096"),
        ({"samples": [1]}, "samples holds 1 numbers, expected 5"),
    ],
)
def test_a_bad_call_of_generate_is_one_sentence(continued, change, said):
    with pytest.raises(ValueError, match=f"^generate: {said}"):
        list(generate(continued[0], **{"prompts": PROMPTS, "max_new_tokens": 3} | change))


def test_a_training_forward_in_chunks_is_refused_in_a_sentence():
    model = Decoder(CONFIGS["tiny"], "cpu")
    cache = Cache(model.config, 1, 8, model.embedding)
    ids = torch.arange(5)[None]
    with pytest.raises(ValueError, match=r"^Cache: the call wants gradients, .* expected torch\.no_grad\(\), or whole"):
        model.logprobs(ids, ids, cache.rows(5), cache)
    with torch.no_grad():
        model.logprobs(ids, ids, cache.rows(5), cache)
    assert int(cache.lengths) == 5, "what was refused left nothing behind"
