"""bi-audit certify: a model's logprobs, recorded by an engine and a trainer that disagree in a planted way."""

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from certify_model import PROMPT, SAMPLES, VOCABULARY, Engine, columns, generate, logits, logprobs, score

from bi_kernels.audit import Recorder, certify
from bi_kernels.audit.certificate.hints import BF16_KL, QUANTISED_KL, Cause
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


LATER = torch.arange(64)
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
    "a loss mask": (values(lambda x: x * (np.arange(len(x)) % 7 > 0)), [Cause.MASKED]),
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
    "one token": (values(lambda x: x - (np.arange(len(x)) == 500)), [Cause.UNCLEAR]),
    "one sample": (mixed(lambda c: c["sample"] == 7, drift=0.02), [Cause.UNCLEAR]),
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
    "another template's token": (replaced(lambda ids: (LATER == 7).expand_as(ids)), [Cause.TEMPLATE]),
    "tokenized again": (
        replaced(lambda ids: torch.arange(64) >= 9 + torch.arange(SAMPLES)[:, None] % 30),
        [Cause.TOKENIZER],
    ),
    "NaN": (values(lambda x: np.where(np.arange(len(x)) == 9, np.nan, x)), [Cause.NOT_FINITE]),
    "-inf": (values(lambda x: np.where(np.arange(len(x)) % 99 == 9, -np.inf, x)), [Cause.NOT_FINITE]),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_disagreement_is_found_and_named(name):
    plant, causes = PLANTS[name]
    found = certify(*plant())
    assert not found.passed and [h.cause for h in found.hints] == causes, found


def test_the_document_lists_every_cause():
    text = (Path(__file__).parents[1] / "docs" / "certify.md").read_text(encoding="utf-8")
    assert all(f"| `{c.name}` | {c.title} | {c.check} |" in text for c in Cause)
    assert f"KL up to {BF16_KL:.2g}, up to {QUANTISED_KL:.2g}, and" in text
    planted = {c for _, causes in PLANTS.values() for c in causes}
    assert len(PLANTS) >= 30 and planted == {*Cause}


FINDINGS = {
    "EOS missing": [Kind.MISSING],
    "prompt tokens counted": [Kind.ADDITIONAL],
    "rows twice": [Kind.DUPLICATES],
    "another template's token": [Kind.TOKEN_IDS],
    "NaN": [Kind.NOT_FINITE],
    "temperature up": [],
}


@pytest.mark.parametrize("name", FINDINGS)
def test_other_disagreements_are_findings_of_their_own(name):
    found = certify(*PLANTS[name][0]())
    assert [f.kind for f in found.findings] == FINDINGS[name]
    assert (found.tokens == found.equal) == (found.max_abs == 0)


def recorded(c, path, order=None):
    """A capture in a file, as a recorder saves it."""
    side = Recorder()
    for sample in np.unique(c["sample"]) if order is None else order:
        mine = {name: v[c["sample"] == sample] for name, v in c.items()}
        logprob = torch.from_numpy(mine["logprob"])
        side.add(sample, int(mine["position"][0]), mine["token"].tolist(), logprob, batch_size=4)
    side.save(path)
    return path


SUFFIXES = ("safetensors", "jsonl", "parquet")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_equal_captures_pass_in_another_format_and_order(suffix, tmp_path, bi_audit):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    rollout, _ = captures(BASE, BASE)
    one = recorded(rollout, tmp_path / "rollout.safetensors")
    other = recorded(rollout, tmp_path / f"training.{suffix}", reversed(range(SAMPLES)))
    done = bi_audit("certify", one, other, "--out", tmp_path / "page")
    page = (tmp_path / "page" / "README.md").read_text()
    assert done.returncode == 0 and done.out.startswith(f"All {len(rollout['token']):,} logprobs are equal"), done
    assert page.startswith("# Rollout and training: every bit agrees") and "Probably" not in page
    rollout["logprob"][100] = np.nextafter(rollout["logprob"][100], np.float32(-99))
    done = bi_audit("certify", one, recorded(rollout, tmp_path / f"training.{suffix}"))
    assert done.returncode == 1 and done.out.startswith("1 of "), "one step of one number"


def test_numbers_are_those_of_their_definitions():
    found = certify(*PLANTS["temperature up"][0]())
    p, ratio = found.pairs, np.exp(found.pairs.delta)
    exact = {
        "k1": -p.delta.mean(),
        "k3": (ratio - 1 - p.delta).mean(),
        "clipped": ((ratio > 1.2) | (ratio < 0.8)).mean(),
    }
    exact |= {"max_abs": np.abs(p.delta).max(), "mean_abs": np.abs(p.delta).mean()}
    assert all(abs(getattr(found, name) - value) < 2.0**-40 for name, value in exact.items()), found
    assert all(sum(g.tokens for g in groups) == found.tokens for groups in found.groups.values())
    assert [t.delta for t in found.worst] == sorted((t.delta for t in found.worst), key=abs, reverse=True)
    assert abs(found.worst[0].delta) == found.max_abs and found.k3 > 2.0**-10


def test_the_page_holds_the_verdict_two_figures_and_the_command(tmp_path, bi_audit):
    paths = [recorded(c, tmp_path / f"{i}.safetensors") for i, c in enumerate(PLANTS["kernels by batch size"][0]())]
    done = bi_audit("certify", *paths, "--out", tmp_path / "page")
    page, found = (tmp_path / "page" / "README.md").read_text(), certify(*paths)
    first = int(found.pairs.sample[found.pairs.differ][0])
    ids = json.loads((tmp_path / "page" / f"sample_{first}.json").read_text())
    assert done.returncode == 1 and found.hints[0].text.split(".")[0] in page
    assert ids == found.sides.rollout.token[found.sides.rollout.sample == first].tolist()
    assert "bi-audit locate --candidate trainer.py:build" in page and f"ids of sample {first}" in page
    assert {f.suffix for f in (tmp_path / "page").iterdir()} == {".md", ".png", ".json"}
    assert all(f"({f.name})" in page for f in (tmp_path / "page").glob("*.png"))
    (tmp_path / "README.md").write_text("# Mine\n")
    done = bi_audit("certify", *paths, "--out", tmp_path)
    assert done.returncode == 2 and (tmp_path / "README.md").read_text() == "# Mine\n"


GOOD = {"sample": 0, "position": 1, "token": 2, "logprob": -0.5}
LINE = json.dumps(GOOD)
BAD = {
    "a.csv": ("sample,position\n", ["a.csv", "'.csv'", ".jsonl"]),
    "nowhere.jsonl": (None, ["nowhere.jsonl", "not a file"]),
    "empty.jsonl": ("", ["empty.jsonl", "empty"]),
    "blank.jsonl": ("\n\n", ["blank.jsonl", "no token"]),
    "cut.jsonl": (f"{LINE}\n{LINE}\n{LINE[:20]}", ["cut.jsonl", "line 3", "not JSON"]),
    "list.jsonl": (f"{LINE}\n[1]\n", ["list.jsonl", "line 2", "object"]),
    "float.jsonl": (json.dumps(GOOD | {"token": 2.5}), ["line 1", "token", "2.5", "integer"]),
    "nan.jsonl": (
        f"{LINE}\n" + json.dumps(GOOD | {"position": float("nan")}),
        ["line 2", "position", "NaN", "integer"],
    ),
    "text.jsonl": (json.dumps(GOOD | {"logprob": "-1"}), ["line 1", "logprob", '"-1"', "number"]),
    "some.jsonl": (f"{LINE}\n" + json.dumps({"sample": 1}), ["line 2", "'position'"]),
    "wrong.jsonl": (json.dumps({"sample": 1, "logp": -1.0}), ["wrong.jsonl", "'position'", "logprob"]),
    "negative.jsonl": (json.dumps(GOOD | {"token": -100}), ["token", "-100", "from 0"]),
    "huge.jsonl": (json.dumps(GOOD | {"sample": 2**70}), ["line 1", "sample", str(2**70), "64 bits"]),
    "text.safetensors": (LINE, ["text.safetensors", "not a safetensors file"]),
    "text.parquet": (LINE, ["text.parquet", "Parquet"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gives_one_sentence(name, tmp_path, bi_audit):
    text, words = BAD[name]
    (tmp_path / "good.jsonl").write_text(f"{LINE}\n\n")
    if text is not None:
        (tmp_path / name).write_text(text)
    done = bi_audit("certify", tmp_path / "good.jsonl", tmp_path / name)
    assert done.returncode == 2 and not done.out and len(done.err.splitlines()) == 1, done
    assert all(word in done.err for word in words), done.err
    assert bi_audit("certify", tmp_path / "good.jsonl", tmp_path / "good.jsonl").returncode == 0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"token": torch.ones(3)}, ["token", "float32", "integers"]),
        ({"token": np.array([1, np.nan, 2])}, ["token is nan in row 2", "integers"]),
        ({"token": torch.ones(2, dtype=torch.int64)}, ["token [2]", "logprob [3]", "one length"]),
        ({"position": torch.ones(3, 1, dtype=torch.int64)}, ["position [3, 1]", "one dimension"]),
        ({"logprob": torch.ones(3, dtype=torch.int64)}, ["logprob", "int64", "floating-point"]),
        ({"batch_size": [1, 0, 1]}, ["batch_size is 0 in row 2", "from 1"]),
    ],
)
def test_a_wrong_column_gives_one_sentence(change, words):
    good = {name: torch.arange(3) for name in GOOD} | {"logprob": -torch.rand(3, dtype=torch.bfloat16)}
    assert certify(good, good).passed
    with pytest.raises(ValueError) as error:
        certify(good, good | change)
    assert str(error.value).startswith("training") and all(word in str(error.value) for word in words), error.value


def test_a_recorder_refuses_what_it_cannot_save():
    side = Recorder()
    for arguments, word in (((0, 0, [1, 2], [0.5]), "shapes"), ((0, [0, 1, 2], [1, 2], [0.5, 1]), "(3,)")):
        with pytest.raises(ValueError, match=word.replace("(", r"\(").replace(")", r"\)")):
            side.add(*arguments)
    with pytest.raises(ValueError, match="no token"):
        certify(side, side)
    side.add(0, 0, [1], [-0.5])
    assert certify(side, side).passed
    side.add(0, 1, [1], [-0.5], batch_size=2)
    with pytest.raises(ValueError, match="batch_size"):
        side.columns()


def test_it_needs_neither_triton_nor_pyarrow(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINE)
    code = "import sys; sys.modules |= dict.fromkeys(('triton', 'pyarrow')); from bi_kernels.audit import certify\n"
    code += "print(certify('a.jsonl', 'a.jsonl').passed)\ntry: certify('a.jsonl', 'a.parquet')\n"
    code += "except ValueError as error: print(error)"
    (tmp_path / "a.parquet").write_text(LINE)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "True" and "pip install pyarrow" in done.stdout, done
