"""bi-audit certify: a model's logprobs, recorded by an engine and a trainer that disagree in a planted way."""

import functools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from certify_model import PROMPT, SAMPLES, VOCABULARY, Engine, columns, generate, logits, logprobs, score

from bi_kernels.audit import Recorder, certify
from bi_kernels.audit.certificate.hints import Cause
from bi_kernels.audit.certificate.pairs import Kind

BASE = Engine()
BF16 = replace(BASE, dtype=torch.bfloat16)
LIVE = functools.cache(generate)  # the same tokens for every trainer of one engine


def of(**trainer):
    """The base engine, and a trainer that differs from it."""
    return lambda: captures(BASE, replace(BASE, **trainer))


def by(**engine):
    """An engine that differs from the base, which trains."""
    return lambda: captures(replace(BASE, **engine), BASE)


def captures(rollout: Engine, training: Engine, start: int = PROMPT):
    ids, lengths = LIVE(rollout)
    return tuple(columns(ids, lengths, score(ids, lengths, e), start) for e in (rollout, training))


def mixed(choose, **trainer):
    """The trainer where `choose(capture)` says so, the base elsewhere."""

    def plant():
        rollout, training = of(**trainer)()
        there = choose(rollout)
        return rollout, training | {"logprob": np.where(there, training["logprob"], rollout["logprob"])}

    return plant


def changed(change, start: int = PROMPT):
    """Equal captures, of which `change(capture)` makes training's."""

    def plant():
        rollout, _ = captures(BASE, BASE, start)
        return rollout, change({name: v.copy() for name, v in rollout.items()})

    return plant


def values(change):
    return changed(lambda c: c | {"logprob": np.asarray(change(c["logprob"]))})


def rows(choose):
    """Training lacks rows, repeats them or has them in another order: `choose(capture)` returns an index."""
    return changed(lambda c: {name: v[choose(c)] for name, v in c.items()})


def cast(dtype):
    return values(lambda x: torch.from_numpy(x).to(dtype).float())


def last(c, count: int = 1):
    """A mask of the last tokens of each sample."""
    return np.append(c["sample"][count:] != c["sample"][:-count], [True] * count)


def in_place_of_logprob(what):
    """Another quantity of the same distribution."""

    def plant():
        ids, lengths = LIVE(BASE)
        every = logprobs(logits(ids, lengths, BASE), ids, BASE)[:, :-1]
        return captures(BASE, BASE)[0], columns(ids, lengths, torch.cat([torch.zeros(SAMPLES, 1), what(every, ids)], 1))

    return plant


def entropy(every, ids):
    return -(every.exp() * every).sum(-1)


def inserted(at: int, extra: int = 1):
    """Training's samples have another token at a position, and so everything after it one place later."""

    def plant():
        ids, lengths = LIVE(BASE)
        longer = torch.cat([ids[:, :at], torch.full((SAMPLES, extra), 7), ids[:, at:]], 1)
        theirs = columns(longer, lengths + extra, score(longer, lengths + extra, BASE), 0)
        return captures(BASE, BASE, 0)[0], theirs

    return plant


def replaced(choose):
    """Training scores other ids where `choose(ids)` says so."""

    def plant():
        ids, lengths = LIVE(BASE)
        other = torch.where(choose(ids), (ids + 1) % VOCABULARY, ids)
        return captures(BASE, BASE, 0)[0], columns(other, lengths, score(other, lengths, BASE), 0)

    return plant


def later(c):
    """Each logprob one place later in its sample."""
    moved = np.roll(c["logprob"], 1)
    first = np.append(True, c["sample"][1:] != c["sample"][:-1])
    return c | {"logprob": np.where(first, 0, moved)}


def batched():
    rollout, training = mixed(lambda c: c["sample"] % 3 == 2, split=1)()
    size = np.array([1, 4, 16])[rollout["sample"] % 3]
    return rollout | {"batch_size": size}, training


def shuffled():
    """The same tokens of samples of one length, with the logprobs of the samples in the reverse order."""
    short, _ = captures(BASE, BASE)
    rollout = {name: v[short["position"] < PROMPT + 12] for name, v in short.items()}
    return rollout, rollout | {"logprob": rollout["logprob"].reshape(SAMPLES, -1)[::-1].ravel()}


def zeros():
    rollout, _ = captures(BASE, BASE)
    at = np.arange(len(rollout["token"])) % 9 == 0
    return tuple(rollout | {"logprob": np.where(at, zero, rollout["logprob"])} for zero in (0.0, -0.0))


PLANTS = {
    # the values
    "temperature up": (of(temperature=1.3), [Cause.LOGIT_SCALE]),
    "temperature a little up": (of(temperature=1.05), [Cause.LOGIT_SCALE]),
    "temperature down": (of(temperature=0.7), [Cause.LOGIT_SCALE]),
    "temperature of the engine": (by(temperature=0.7), [Cause.LOGIT_SCALE]),
    "soft-cap forgotten": (by(cap=8.0), [Cause.LOGIT_SCALE]),
    "soft-cap of the trainer": (of(cap=8.0), [Cause.LOGIT_SCALE]),
    "top-k renormalised": (by(top_k=10), [Cause.RENORMALISED]),
    "top-p renormalised": (by(top_p=0.9), [Cause.RENORMALISED]),
    "top-k of the trainer": (of(top_k=20), [Cause.NOT_FINITE, Cause.RENORMALISED]),
    "padded vocabulary": (of(padded=4, pad_logit=-4.0), [Cause.VOCABULARY]),
    "padded vocabulary of the engine": (by(padded=4, pad_logit=-4.0), [Cause.VOCABULARY]),
    "a constant": (values(lambda x: x - 0.25), [Cause.VOCABULARY]),
    "repetition penalty": (by(penalty=1.2), [Cause.PENALTY]),
    "repetition penalty of the trainer": (of(penalty=1.2), [Cause.PENALTY]),
    "fp8 weights": (of(quantised="fp8"), [Cause.PRECISION]),
    "int8 weights": (by(quantised="int8"), [Cause.PRECISION]),
    "fp8 KV cache": (by(quantised="kv"), [Cause.PRECISION]),
    "stale weights": (of(drift=0.1), [Cause.WEIGHTS]),
    "LoRA not merged": (by(adapter=True), [Cause.WEIGHTS]),
    "another checkpoint": (of(seed=5), [Cause.UNRELATED]),
    "bf16 activations": (of(dtype=torch.bfloat16), [Cause.KERNELS]),
    "all-reduce in bf16": (lambda: captures(replace(BF16, ranks=4), BF16), [Cause.KERNELS]),
    "all-reduce in fp32": (by(ranks=4), [Cause.KERNELS]),
    "split-KV at every length": (by(split=1), [Cause.KERNELS]),
    "softmax in bf16": (of(softmax=torch.bfloat16), [Cause.ROUNDED]),
    "softmax in fp16": (of(softmax=torch.float16), [Cause.ROUNDED]),
    "logprobs in bf16": (cast(torch.bfloat16), [Cause.ROUNDED]),
    "logprobs in fp16": (cast(torch.float16), [Cause.ROUNDED]),
    "sign error": (values(np.negative), [Cause.SIGN]),
    "log2": (values(lambda x: x / np.log(2)), [Cause.UNIT]),
    "log10": (values(lambda x: x / np.log(10)), [Cause.UNIT]),
    "temperature on logprobs": (values(lambda x: x / 1.25), [Cause.UNIT]),
    "entropy": (in_place_of_logprob(entropy), [Cause.NO_LOGPROB]),
    "probability": (values(np.exp), [Cause.NO_LOGPROB]),
    "the sign of zeros": (zeros, [Cause.ZERO_SIGN]),
    # where they are
    "shifted by a position": (changed(later), [Cause.SHIFTED]),
    "split-KV from a length on": (by(split=32), [Cause.POSITION]),
    "chunked prefill": (of(split=16), [Cause.POSITION]),
    "decode after prefill": (by(split=PROMPT + 1), [Cause.POSITION]),
    "rope scaled above a length": (of(rope_above=40), [Cause.LENGTH]),
    "stale from a sample on": (mixed(lambda c: c["sample"] >= 30, drift=0.02), [Cause.STALE]),
    "stale up to a sample": (mixed(lambda c: c["sample"] < 10, drift=0.02), [Cause.STALE]),
    "kernels by batch size": (batched, [Cause.BATCH_SIZE]),
    # the rows
    "samples in another order": (changed(lambda c: c | {"sample": SAMPLES - 1 - c["sample"]}), [Cause.SAMPLE_ORDER]),
    "logprobs of other samples": (shuffled, [Cause.SAMPLE_ORDER]),
    "a dropped sample": (rows(lambda c: c["sample"] != 5), [Cause.DROPPED_SAMPLE]),
    "rows twice": (rows(lambda c: np.sort(np.append(np.arange(len(c["token"])), np.arange(40)))), [Cause.DUPLICATED]),
    "EOS missing": (rows(lambda c: ~last(c)), [Cause.END]),
    "the loss mask": (rows(lambda c: c["position"] != 12), [Cause.SCATTERED]),
    "prompt tokens counted": (lambda: (captures(BASE, BASE)[0], captures(BASE, BASE, 2)[1]), [Cause.PROMPT]),
    "positions from the completion": (changed(lambda c: c | {"position": c["position"] - PROMPT}), [Cause.POSITIONS]),
    "positions with padding": (changed(lambda c: c | {"position": c["position"] + c["sample"] % 5}), [Cause.POSITIONS]),
    "BOS": (inserted(0), [Cause.TEMPLATE]),
    "a template's token": (inserted(6, 2), [Cause.TEMPLATE]),
    "another template's token": (replaced(lambda ids: (torch.arange(64) == 7).expand_as(ids)), [Cause.TEMPLATE]),
    "tokenized again": (replaced(lambda ids: torch.arange(64) >= 9 + torch.arange(SAMPLES)[:, None] % 30), [Cause.TOKENIZER]),
    "NaN": (values(lambda x: np.where(np.arange(len(x)) == 9, np.nan, x)), [Cause.NOT_FINITE]),
    "-inf": (values(lambda x: np.where(np.arange(len(x)) % 99 == 9, -np.inf, x)), [Cause.NOT_FINITE]),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_disagreement_is_found_and_named(name):
    plant, causes = PLANTS[name]
    found = certify(*plant())
    assert not found.passed and [h.cause for h in found.hints] == causes, found
