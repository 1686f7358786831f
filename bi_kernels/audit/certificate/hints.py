"""Probable causes, read from the numbers alone: which rows agree, where the others begin, and how Δ depends on the
logprob. The first rule that fits is taken; where none does, that is said."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from bi_kernels.audit.certificate.pairs import ROOM, Pairs, Sides, runs


class Cause(StrEnum):
    """What probably makes two captures disagree."""

    POSITIONS = "positions count from another origin"
    SAMPLE_ORDER = "samples in another order"
    TEMPLATE = "another chat template"
    TOKENIZER = "other token ids"
    DUPLICATED = "rows recorded twice"
    DROPPED_SAMPLE = "whole samples missing"
    PROMPT = "prompt tokens on one side"
    END = "last tokens on one side"
    SCATTERED = "tokens missing here and there"
    NOT_FINITE = "NaN or infinite logprobs"
    ZERO_SIGN = "the sign of zeros"
    SIGN = "the opposite sign"
    NO_LOGPROB = "values that are no logprobs"
    SHIFTED = "logprobs shifted by a position"
    ROUNDED = "logprobs rounded to a smaller dtype"
    UNIT = "a constant factor"
    BATCH_SIZE = "the batch size"
    POSITION = "the position"
    LENGTH = "the length"
    STALE = "weights of another step"
    PENALTY = "a repetition penalty"
    LOGIT_SCALE = "temperature or another scale of the logits"
    RENORMALISED = "top-k or top-p"
    VOCABULARY = "padding of the vocabulary"
    UNRELATED = "logprobs of something else"
    KERNELS = "other kernels"
    PRECISION = "another precision"
    WEIGHTS = "other weights"
    UNCLEAR = "cause unclear"


ARITHMETIC = {  # causes that an op of the forward has, so that `locate` can name it
    *(Cause.BATCH_SIZE, Cause.POSITION, Cause.LENGTH, Cause.ROUNDED),
    *(Cause.KERNELS, Cause.PRECISION, Cause.WEIGHTS, Cause.UNCLEAR),
}


@dataclass(frozen=True)
class Hint:
    """A probable cause; text: what was seen and what to check, in one or two sentences."""

    cause: Cause
    text: str


NAMES = ("the rollout", "training")
LOG2, LOG10 = float(np.log(2)), float(np.log(10))
SURE = -14.0  # log of the probability that chance alone splits the tokens as seen
FEW = 20  # tokens below which no rule about distributions is asked
BF16_KL, QUANTISED_KL = 2.0**-11, 2.0**-6  # KL (k3) up to which bf16 sums of a few layers, or 8 bits, explain noise
MASS = 0.05  # |Δ| that padded rows of a vocabulary stay below
FP32_SIZE = 2.0**-12  # mean |Δ| of sums in fp32


def probable_causes(sides: Sides, pairs: Pairs) -> list[Hint]:
    """Returns a hint for each way in which rows disagree, then at most one for the logprobs' values."""
    if found := _misplaced(sides):
        return [found]
    hints = [*_rows(sides)]
    clean = pairs.take(pairs.clean)
    if clean.differ.any():
        hints.append(next(filter(None, (rule(clean) for rule in RULES))))
    return hints


# Rows


def _misplaced(sides: Sides) -> Hint | None:
    """Says whether samples hold the same tokens elsewhere: under other sample numbers or positions."""
    hashes, first = [], []
    for c in (sides.rollout, sides.training):
        starts, lengths = runs(c.sample)
        rank = np.arange(len(c)) - np.repeat(starts, lengths)
        weights = np.random.default_rng(0).integers(2**63, size=int(lengths.max()), dtype=np.uint64) * 2 + 1
        sums = lambda v: np.add.reduceat((v.astype(np.uint64) + 1) * weights[rank], starts)
        samples = c.sample[starts]
        hashes.append(
            (
                dict(zip(samples.tolist(), sums(c.token).tolist())),
                dict(zip(samples.tolist(), sums(c.logprob.view(np.uint64)).tolist())),
            )
        )
        first.append(dict(zip(samples.tolist(), c.position[starts].tolist())))
    (tokens, logprobs), (other, others) = hashes
    for name, mine, theirs in (("tokens", tokens, other), ("logprobs", logprobs, others)):
        home = sum(theirs.get(s) == h for s, h in mine.items())
        owner = {h: s for s, h in theirs.items()}
        moved = [s for s, h in mine.items() if theirs.get(s) != h and h in owner]
        if len(owner) > 1 and len(moved) > max(1, home) and len({*mine.values()}) > len(mine) // 2:
            where = f"The {name} of sample {moved[0]} of the rollout are those of sample {owner[mine[moved[0]]]} in training"
            return Hint(
                Cause.SAMPLE_ORDER,
                f"{where}, and so on for {len(moved):,} samples. Check that both sides number the samples alike: sorting by length, shuffling, gathering over ranks.",
            )
    shifts = [first[1][s] - first[0][s] for s, h in tokens.items() if other.get(s) == h and len(tokens)]
    if shifts and np.mean(np.array(shifts) != 0) > 0.5:
        by = f"by {shifts[0]}" if len({*shifts}) == 1 else "by a number that depends on the sample"
        return Hint(
            Cause.POSITIONS,
            f"The samples hold the same tokens, but positions in training are larger {by}. Check that both count from the start of the prompt, padding excluded.",
        )
    return None


def _rows(sides: Sides) -> list[Hint]:
    """Says what kind of rows are missing, repeated, not finite, or of another id."""
    hints = []
    for dropped, name in zip(sides.dropped, NAMES):
        if len(dropped):
            hints.append(
                Hint(
                    Cause.DUPLICATED,
                    f"{name.capitalize()} has places more than once; the first of each was compared. Check retries, preempted requests, and rows that a sampler or a gather over ranks repeats to fill a batch.",
                )
            )
    r, t = sides.rollout.take(sides.both[0]), sides.training.take(sides.both[1])
    if _ids(sides, r, t, hints):
        return hints
    for side, (name, other) in enumerate((NAMES, NAMES[::-1])):
        alone = sides.alone(side)
        c = (sides.rollout, sides.training)[side]
        starts, lengths = runs(c.sample)
        rows = np.arange(len(c))
        last = np.maximum.reduceat(np.where(alone, -1, rows), starts).repeat(lengths)
        first = np.minimum.reduceat(np.where(alone, len(c), rows), starts).repeat(lengths)
        whole, before, after = last < 0, rows < first, rows > last
        for cause, mask, told in (
            (
                Cause.DROPPED_SAMPLE,
                whole,
                "all tokens of samples that the other lacks. Check filters, a dropped last batch, and samples that one side cut off",
            ),
            (
                Cause.PROMPT,
                before & ~whole,
                "all before the first one that both have. Check that both record the completion only, or both the prompt too",
            ),
            (
                Cause.END,
                after & ~whole,
                "all after the last one that both have. Check whether the end-of-sequence token counts, and the longest length on each side",
            ),
            (
                Cause.SCATTERED,
                ~(before | after),
                "in the middle of samples. Check the loss mask, and what the recorder leaves out",
            ),
        ):
            if count := int((alone & mask).sum()):
                hints.append(Hint(cause, f"{name.capitalize()} has {count:,} tokens that {other} lacks, {told}."))
    bad = [(name, c.logprob[~np.isfinite(c.logprob)]) for name, c in zip(NAMES, (r, t))]
    for name, values in bad:
        if len(values):
            what = (
                "a row of the softmax that is masked whole, or an overflow in fp16"
                if np.isnan(values).any()
                else "a token that a top-k, top-p or vocabulary mask excluded"
            )
            hints.append(
                Hint(
                    Cause.NOT_FINITE,
                    f"{name.capitalize()} has {len(values):,} logprobs that are {', '.join(sorted({str(v) for v in values}))}. Check for {what}.",
                )
            )
    return hints


def _ids(sides: Sides, r, t, hints: list[Hint]) -> int:
    """Adds a hint on token ids that differ at a place; returns by how many positions they are shifted."""
    wrong = r.token != t.token
    if not wrong.any():
        return 0
    code, known = sides.codes[0][sides.both[0]][wrong], sides.codes[1]
    for shift in sorted(range(-ROOM // 2, ROOM // 2), key=abs):
        at = np.searchsorted(known, code + shift).clip(max=len(known) - 1)
        there = known[at] == code + shift
        if shift and there.sum() > len(code) // 2 and (sides.training.token[at] == r.token[wrong])[there].mean() > 0.8:
            more, where = NAMES[shift > 0], int(r.position[wrong][0])
            hints.append(
                Hint(
                    Cause.TEMPLATE,
                    f"From a place on ({where} in sample {r.sample[wrong][0]}) the ids agree after a shift by {abs(shift)}: {more} has more tokens there. Check the chat template, BOS, and tokens that a parser adds or strips.",
                )
            )
            return shift
    starts, counts = runs(r.sample[wrong])
    places, samples = r.position[wrong], len(starts)
    if counts.max() <= 2 and len(np.unique(places[starts])) <= max(2, samples // 4):
        hints.append(
            Hint(
                Cause.TEMPLATE,
                f"{samples:,} samples have other ids at the same one or two places (position {places[0]}): {r.token[wrong][0]} against {t.token[wrong][0]}. Check the chat template and special tokens.",
            )
        )
    else:
        hints.append(
            Hint(
                Cause.TOKENIZER,
                f"In {samples:,} samples the ids differ from a place on, and no shift aligns them. Check that training takes the engine's token ids instead of tokenizing its text again.",
            )
        )
    return 0


# Values


def _zeros(p: Pairs) -> Hint | None:
    if not p.delta.any():
        return Hint(
            Cause.ZERO_SIGN,
            "Only the sign of zeros differs, which changes no ratio. Check for a multiplication by a mask.",
        )
    return None


def _no_logprob(p: Pairs) -> Hint | None:
    for values, other, name in ((p.rollout, p.training, NAMES[0]), (p.training, p.rollout, NAMES[1])):
        if np.mean(values > 2.0**-6) > 0.05:  # beyond what rounding does to a logprob of zero
            if _rms(values + other) < _rms(values - other) / 10:
                return Hint(
                    Cause.SIGN,
                    f"The values of {name} are positive and those of the other side with the sign changed. Check for a loss (−logprob) in place of the logprob.",
                )
            share = np.mean(values > 0)
            return Hint(
                Cause.NO_LOGPROB,
                f"{share:.0%} of the values of {name} are positive, which no logprob is. Check for the entropy, the probability or the logit in its place.",
            )
    return None


def _shifted(p: Pairs) -> Hint | None:
    for shift in (1, -1, 2, -2):
        here, there = (
            (slice(None, -shift), slice(shift, None)) if shift > 0 else (slice(-shift, None), slice(None, shift))
        )
        fits = (p.sample[here] == p.sample[there]) & (p.position[there] - p.position[here] == shift)
        off = np.abs(p.rollout[here] - p.training[there])[fits]
        if len(off) >= len(p.sample) // 2 and off.mean() < np.abs(p.delta).mean() / 8:
            side = "later" if shift > 0 else "earlier"
            return Hint(
                Cause.SHIFTED,
                f"The logprobs agree once those of training are taken {abs(shift)} position{'s' * (abs(shift) > 1)} {side}. Check which token a logit predicts: logits[:, :-1] go with labels[:, 1:].",
            )
    return None


def _cast(values: np.ndarray, dtype: str) -> np.ndarray:
    import torch  # noqa: PLC0415 (NumPy has no bf16)

    return torch.from_numpy(values).to(getattr(torch, dtype)).double().numpy()


def _rounded(p: Pairs) -> Hint | None:
    for values, other, name in ((p.rollout, p.training, NAMES[0]), (p.training, p.rollout, NAMES[1])):
        for dtype, bits in (("float32", 23), ("float16", 10), ("bfloat16", 7)):
            step = 2.0**-bits * np.abs(values)
            on, off = values == _cast(values, dtype), other == _cast(other, dtype)
            if on.all() and off.mean() < 0.5 and np.abs(p.delta).mean() <= 2 * step.mean():
                return Hint(
                    Cause.ROUNDED,
                    f"Every logprob of {name} is a {dtype} number, and Δ has the size of that rounding. Check for a cast of the logits or logprobs, and in which dtype the logprobs are stored.",
                )
            if dtype == "float32":
                continue
            chance = np.exp(values)
            grid, rest = (
                np.abs(_cast(chance, dtype) / chance - 1),
                np.abs(_cast(np.exp(other), dtype) / np.exp(other) - 1),
            )
            if np.median(grid) < 2.0**-20 < 2.0**-14 < np.median(rest) and np.quantile(grid, 0.95) < 2.0**-19:
                return Hint(
                    Cause.ROUNDED,
                    f"Every probability of {name} is a {dtype} number: the softmax was rounded before the logarithm. Check that log_softmax runs in fp32.",
                )
    return None


def _unit(p: Pairs) -> Hint | None:
    factor = float(p.rollout @ p.training / max(p.rollout @ p.rollout, 2.0**-60))
    if abs(factor - 1) < 2.0**-5 or _rms(p.training - factor * p.rollout) > _rms(p.delta) / 32:
        return None
    for base, known in (("2", LOG2), ("10", LOG10)):
        for side, value in enumerate((known, 1 / known)):
            if abs(factor / value - 1) < 2.0**-7:
                return Hint(
                    Cause.UNIT,
                    f"The logprobs of training are {factor:.4g} times the rollout's: those of {NAMES[side]} are logarithms to base {base}. Check for log{base} in place of log.",
                )
    return Hint(
        Cause.UNIT,
        f"The logprobs of training are {factor:.4g} times the rollout's. Check for a division by the length, or a temperature that divides logprobs instead of logits.",
    )


def _batch_size(p: Pairs) -> Hint | None:
    for name, sizes in p.batch_sizes.items():
        values = np.unique(sizes)
        share = np.array([p.differ[sizes == v].mean() for v in values])
        equal, other = values[share == 0], values[share > 0]
        rows = np.isin(sizes, equal)
        if len(equal) and _by_chance(rows.sum(), p.differ[~rows].mean()) < SURE:
            return Hint(
                Cause.BATCH_SIZE,
                f"The bits are equal for the {name} {_listed(equal)} and differ for {_listed(other)}. Check for kernels that depend on the batch: cuBLAS, split-K, CUDA graphs' padded sizes.",
            )
    return None


def _where(p: Pairs) -> Hint | None:
    """Finds an axis along which tokens agree up to a value and differ from it on, or the reverse."""
    best = None
    for axis, values in (("rank", p.rank), ("position", p.position), ("length", p.length), ("sample", p.sample)):
        for size, exact in ((p.differ.astype(float), True), (np.abs(p.delta), False)):
            found = _split(values, size, exact)
            if found and (best is None or found[0] > best[0]):
                best = (*found, axis, exact)
    if best is None:
        return None
    _, value, rising, axis, exact = best
    agree = "agree bit by bit" if exact else f"are at most a {CONTRAST}th as far apart"
    if axis == "sample":
        side = (
            f"before sample {value} and differ from it on" if rising else f"from sample {value} on and differ before it"
        )
        return Hint(
            Cause.STALE,
            f"The logprobs {agree} {side}. Check for a weight update that one side had not received: synchronisation, or a request that ran across an update.",
        )
    if axis == "length":
        side = (
            f"in samples shorter than {value} tokens and differ in longer ones"
            if rising
            else f"in samples of {value} tokens or more, and differ in shorter ones"
        )
        return Hint(
            Cause.LENGTH,
            f"The logprobs {agree} {side}. Check a rope scaling that depends on the length, a sliding window, and kernels chosen by the longest sequence.",
        )
    if axis == "rank" and rising:
        return Hint(
            Cause.POSITION,
            f"The logprobs {agree} at the first {value} token{'s' * (value > 1)} of each sample and differ after. Check decode against prefill: split-KV, and the dtype of the KV cache.",
        )
    side = (
        f"below position {value} and differ from it on" if rising else f"from position {value} on and differ before it"
    )
    return Hint(
        Cause.POSITION,
        f"The logprobs {agree} {side}. Check what begins there: split-KV in decode, a chunk of prefill, a sliding window, rope scaling.",
    )


CONTRAST = 6


def _split(by: np.ndarray, size: np.ndarray, exact: bool) -> tuple[float, int, bool] | None:
    """Returns (how pure, value from which the other kind begins, whether the larger differences begin there)."""
    values, index = np.unique(by, return_inverse=True)
    if len(values) < 2:
        return None
    count, total = np.cumsum(np.bincount(index))[:-1], np.cumsum(np.bincount(index, size))[:-1]
    below, above = total / count, (size.sum() - total) / (len(by) - count)
    if exact:
        for rising, small, large, n in ((True, below, above, count), (False, above, below, len(by) - count)):
            if (free := np.flatnonzero(small * n < 0.5)).size:
                at = free[-1] if rising else free[0]
                if _by_chance(n[at], large[at]) < SURE:
                    return large[at] + 1, int(values[at + 1]), rising
        return None
    wide = np.minimum(count, len(by) - count) >= max(FEW, len(by) // 10)
    ratio = np.where(wide, np.log(np.maximum(above, 2.0**-60) / np.maximum(below, 2.0**-60)), 0)
    at = np.abs(ratio).argmax()
    return (
        (float(1 - CONTRAST / np.exp(abs(ratio[at]))), int(values[at + 1]), bool(ratio[at] > 0))
        if np.exp(abs(ratio[at])) > CONTRAST
        else None
    )


def _unrelated(p: Pairs) -> Hint | None:
    if len(p.token) < FEW or not p.rollout.std() or np.abs(p.delta).mean() < 0.5:
        return None
    if not p.training.std() or np.corrcoef(p.rollout, p.training)[0, 1] < 0.3:
        return Hint(
            Cause.UNRELATED,
            "The logprobs of the two sides hardly depend on each other. Check that labels are shifted by one, and that both sides load the same checkpoint and see the same prompt.",
        )
    return None


def _penalty(p: Pairs) -> Hint | None:
    order = np.lexsort((p.position, p.token, p.sample))
    again = np.zeros(len(order), bool)
    again[order[1:]] = (np.diff(p.sample[order]) == 0) & (np.diff(p.token[order]) == 0)
    for sign, name in ((1, NAMES[0]), (-1, NAMES[1])):
        d = sign * p.delta
        large = [d[rows][np.abs(d[rows]) >= np.median(np.abs(d[rows]))] for rows in (again, ~again) if rows.any()]
        if min(map(len, large)) >= FEW and len(large) == 2 and min(np.mean(large[0] > 0), np.mean(large[1] < 0)) > 0.9:
            return Hint(
                Cause.PENALTY,
                f"Tokens that occurred before in their sample have smaller logprobs in {name}, all others larger ones. Check for a repetition, presence or frequency penalty there.",
            )
    return None


def _one_sided(p: Pairs) -> Hint | None:
    d = p.delta
    energy = float(d @ d)
    sign = np.sign(d.sum())
    if len(d) < FEW or float(d[d * sign < 0] @ d[d * sign < 0]) > energy * 2.0**-6:
        return None
    high, low = NAMES if sign < 0 else NAMES[::-1]
    upper = p.rollout if sign < 0 else p.training
    size = np.abs(d)
    whole = np.mean((upper == 0) & (size > 0)) > 0.01  # only one token was kept
    if not whole and (size.max() < MASS or size.std() < size.mean() / 8):
        return Hint(
            Cause.VOCABULARY,
            f"Every logprob of {low} is smaller, by {size.mean():.2g} on average and {size.max():.2g} at most. Check whether its sum counts padded rows of the vocabulary; a loose top-k or top-p in {high} would look alike.",
        )
    return Hint(
        Cause.RENORMALISED,
        f"Every logprob of {high} is at least the other side's, by {size.mean():.2g} on average and {size.max():.2g} at most. Check for top-k, top-p or min-p: {high} probably divides by what they keep.",
    )


def _scaled(p: Pairs) -> Hint | None:
    """Fits Δ to a temperature: it flattens, so that likely tokens lose and unlikely ones gain; or it sharpens."""
    d, middle = p.delta, (p.rollout + p.training) / 2
    if len(d) < FEW or not d.std() or not middle.std():
        return None
    unlikely, likely = d[middle <= np.quantile(middle, 0.15)], d[middle >= np.quantile(middle, 0.6)]
    follows = float(np.mean(unlikely > 0) - np.mean(likely > 0))
    if abs(follows) < 0.7 or abs(np.corrcoef(d, middle)[0, 1]) < 0.4:
        return None
    deep = p.rollout < min(-1.0, float(np.median(p.rollout)))
    ratio = p.training[deep] / p.rollout[deep]  # a temperature T bounds it by 1 / T, on one side
    factor = 1 / np.quantile(ratio, 0.005 if follows > 0 else 0.995) if len(ratio) >= FEW else 1.0
    flat, sharp = NAMES[follows > 0], NAMES[follows < 0]
    near = f", as if training's temperature were about {factor:.2g} times the rollout's" * bool(
        abs(factor - 1) > 2.0**-6
    )
    return Hint(
        Cause.LOGIT_SCALE,
        f"Unlikely tokens are likelier in {flat}, likely ones in {sharp}{near}. Check whether both sides divide logits by the temperature, and their soft-cap and logit scale.",
    )


def _noise(p: Pairs) -> Hint | None:
    d = p.delta
    if len(d) < FEW:
        return None
    moved = d[p.differ]
    up = float((moved > 0).mean())
    with np.errstate(over="ignore"):
        kl = float((np.expm1(d) - d).mean())
    if not 0.2 < up < 0.8 or abs(float(d.mean())) > max(4 * d.std() / len(d) ** 0.5, 2 * kl):
        return None
    size = np.abs(d).mean()
    if kl > QUANTISED_KL:
        return Hint(
            Cause.WEIGHTS,
            f"Δ has both signs everywhere and is large (mean |Δ| {size:.2g}). Check for weights of another step, an adapter that is not merged, and weights of 4 or 8 bits.",
        )
    if kl > BF16_KL:
        return Hint(
            Cause.PRECISION,
            f"Δ has both signs everywhere and is larger than bf16 makes it in a small model (mean |Δ| {size:.2g}). Check for fp8 or int8 in weights and KV cache, and for weights a step old; in a deep model, bf16 kernels alone reach it.",
        )
    what = "fp32" if size < FP32_SIZE else "bf16"
    return Hint(
        Cause.KERNELS,
        f"Δ has both signs everywhere and the size of {what} sums in another order (mean |Δ| {size:.2g}). Check for kernels that depend on the batch, the attention backend, and the all-reduce of tensor parallelism.",
    )


def _unclear(p: Pairs) -> Hint:
    bad = len(np.unique(p.sample[p.differ]))
    return Hint(
        Cause.UNCLEAR,
        f"{p.differ.mean():.1%} of the tokens differ, in {bad:,} of {len(np.unique(p.sample)):,} samples, and no known pattern fits.",
    )


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _by_chance(count: int, share: float) -> float:
    """Returns the log of the probability that `count` tokens agree if a share of them differed by chance."""
    return count * float(np.log1p(-min(share, 1 - 2.0**-30)))


def _listed(values: np.ndarray) -> str:
    return ", ".join(map(str, values[:6])) + f" and {len(values) - 6} more" * (len(values) > 6)


RULES = (
    _zeros,
    _no_logprob,
    _shifted,
    _rounded,
    _unit,
    _batch_size,
    _where,
    _unrelated,
    _penalty,
    _one_sided,
    _scaled,
    _noise,
    _unclear,
)
