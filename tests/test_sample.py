"""Sampling by counter: the right distribution, and a token that is a function of seed, sample and position."""

import pytest
import torch

from bi_kernels.ops.sample import sample

COUNT = 400
SIGMAS = 5
LOGITS = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()  # more than a block
SAMPLES, POSITIONS = torch.tensor([3, 1, 4, 1, 2**33 + 3, 3]), torch.tensor([5, 9, 2, 6, 5, 6])


def scores(counts: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """How many standard deviations each count is from what p says."""
    return (counts - COUNT * p) / (COUNT * p * (1 - p)).sqrt()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_are_drawn_from_the_softmax(temperature):
    logits = torch.linspace(-2, 2, 7)
    drawn = sample(logits.repeat(COUNT, 1), 1, torch.arange(COUNT), torch.full((COUNT,), 3), temperature)
    counts = torch.bincount(drawn, minlength=7).float()
    assert scores(counts, (logits / temperature).softmax(-1)).abs().max() < SIGMAS
    assert scores(counts, (logits / temperature * 2).softmax(-1)).abs().max() > SIGMAS, (
        "another distribution is told apart"
    )


def test_samples_positions_and_seeds_draw_independently():
    flat = torch.zeros(COUNT, 2)
    at, same = torch.arange(COUNT), torch.zeros(COUNT, dtype=torch.int64)
    for drawn in (sample(flat, 0, at, same), sample(flat, 0, same, at)):
        agree = (drawn[1:] == drawn[:-1]).sum()
        assert abs(agree - COUNT / 2) < SIGMAS * COUNT**0.5 / 2
    assert sample(flat, 0, same, same).unique().numel() == 1, "one counter draws one token"


def test_a_token_does_not_depend_on_its_batch():
    whole = sample(LOGITS, 7, SAMPLES, POSITIONS)
    for rows in ([0], [5, 2], [4, 3, 2, 1, 0, 5]):
        assert torch.equal(sample(LOGITS[rows], 7, SAMPLES[rows], POSITIONS[rows]), whole[rows])
    view = torch.zeros(6, 5003).bfloat16()[:, 3:].copy_(LOGITS)
    assert torch.equal(sample(view, 7, SAMPLES, POSITIONS), whole)


@pytest.mark.parametrize(
    "seed, samples, positions",
    [
        (8, SAMPLES, POSITIONS),
        (7 + 2**40, SAMPLES, POSITIONS),
        (7, SAMPLES + 1, POSITIONS),
        (7, SAMPLES + 2**32, POSITIONS),
        (7, SAMPLES, POSITIONS + 1),
    ],
)
def test_every_part_of_the_counter_counts(seed, samples, positions):
    assert not torch.equal(sample(LOGITS, seed, samples, positions), sample(LOGITS, 7, SAMPLES, POSITIONS))


def test_temperature_0_takes_the_first_of_the_largest_and_no_nan():
    logits = torch.zeros(2, 5000)
    logits[0, [4097, 20, 4999]] = 1
    logits[1, 3], logits[1, 4500] = float("nan"), 2
    assert sample(logits, 0, torch.arange(2), torch.arange(2), 0.0).tolist() == [20, 4500]
    assert sample(logits, 0, torch.arange(2), torch.arange(2), 1 / 128).tolist()[1] == 4500


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"logits": LOGITS[0]}, ValueError, r"logits has shape \(5000,\), expected \(rows, V\)"),
        ({"samples": SAMPLES[:2]}, ValueError, r"samples has shape \(2,\), expected \(6,\)"),
        ({"positions": POSITIONS.float()}, TypeError, "positions has dtype torch.float32, expected integers"),
        ({"seed": -1}, ValueError, "seed is -1, expected 0 to"),
        ({"temperature": -0.5}, ValueError, "temperature is -0.5, expected a number of at least 0"),
        ({"logits": LOGITS.double()}, TypeError, "dtype float64; supported are"),
    ],
)
def test_bad_arguments_are_one_sentence(change, error, said):
    given = {"logits": LOGITS, "seed": 0, "samples": SAMPLES, "positions": POSITIONS} | change
    with pytest.raises(error, match=f"^sample: .*{said}"):
        sample(**given)
