"""Probable causes, read from the numbers alone: which rows agree, where the others begin, and how Δ depends on the
logprob. The first rule on values that fits is taken; where none does, that is said."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from bi_kernels.audit.certificate.pairs import ROOM, Pairs, Sides, runs


class Cause(Enum):
    """What probably makes two captures disagree, and what to check."""

    # rows
    POSITIONS = "positions from another origin", "that both count from the start of the prompt, BOS in, padding out"
    SAMPLE_ORDER = "samples in another order", "sorting by length, shuffling and gathering over ranks"
    TEMPLATE = "another chat template", "the template, BOS, and tokens that a parser adds or strips"
    TOKENIZER = "text tokenized again", "that training takes the engine's token ids, not its text"
    DUPLICATED = "rows recorded twice", "retries, preempted requests, and rows that fill up a batch"
    DROPPED_SAMPLE = "samples missing", "filters, a dropped last batch, and failed requests"
    PROMPT = "prompt tokens on one side", "that both record the completion only, or both the prompt too"
    END = "last tokens on one side", "whether EOS counts, and the longest length on each side"
    SCATTERED = "tokens left out", "the loss mask, and what the recorder leaves out"
    NOT_FINITE = (
        "NaN or infinity",
        "tokens that top-k, top-p or a mask excludes, rows masked whole, and overflow in fp16",
    )
    # values
    ZERO_SIGN = "the sign of zeros", "a multiplication by a mask; it changes no ratio"
    MASKED = "zeros in place of logprobs", "whether a loss mask multiplied the logprobs of that side"
    SIGN = "the opposite sign", "for a loss (−logprob) in place of the logprob"
    NO_LOGPROB = "values that are no logprobs", "for the entropy, the probability or the logit in their place"
    SHIFTED = "logprobs shifted by a position", "which token a logit predicts: logits[:, :-1] go with labels[:, 1:]"
    ROUNDED = (
        "rounding to a smaller dtype",
        "casts of logits and logprobs, the softmax's dtype, and how they are stored",
    )
    UNIT = "a constant factor", "for log2 or log10, a division by the length, and a temperature that divides logprobs"
    BATCH_SIZE = "the batch size", "kernels that depend on it: cuBLAS, split-K, padded sizes of CUDA graphs"
    POSITION = (
        "the position",
        "what begins there: split-KV in decode, a chunk of prefill, the KV cache, a sliding window",
    )
    LENGTH = (
        "the length",
        "rope scaling that depends on it, a sliding window, and kernels chosen by the longest sequence",
    )
    STALE = "weights of another step", "weight synchronisation, and requests that ran across an update"
    UNRELATED = "logprobs of something else", "that labels are shifted by one, the checkpoint and the prompt"
    PENALTY = "a repetition penalty", "repetition, presence and frequency penalties of that side"
    VOCABULARY = "padding of the vocabulary", "whether its sum counts padded rows; a loose top-k or top-p looks alike"
    RENORMALISED = "top-k or top-p", "for top-k, top-p and min-p: that side probably divides by what they keep"
    LOGIT_SCALE = "a temperature", "whether both sides divide logits by it, and their soft-cap and logit scale"
    KERNELS = (
        "other kernels",
        "kernels that depend on the batch, attention backends, and tensor parallelism's all-reduce",
    )
    PRECISION = (
        "another precision",
        "fp8 or int8 in weights and KV cache, weights a step old; deep bf16 models reach it too",
    )
    WEIGHTS = "other weights", "for weights of another step, an adapter that is not merged, and 4 or 8 bits"
    UNCLEAR = "unclear", "the worst tokens, and where the differences are"

    def __init__(self, title: str, check: str):
        self.title, self.check = title, check


ARITHMETIC = {  # what an op of the forward does, so that `locate` can name it
    *(Cause.BATCH_SIZE, Cause.POSITION, Cause.LENGTH, Cause.ROUNDED),
    *(Cause.KERNELS, Cause.PRECISION, Cause.WEIGHTS, Cause.UNCLEAR),
}


@dataclass(frozen=True)
class Hint:
    """A probable cause; seen: one sentence on the numbers."""

    cause: Cause
    seen: str

    @property
    def text(self) -> str:
        return f"{self.seen} Check {self.cause.check}."


NAMES = ("the rollout", "training")
SURE = -14.0  # log of the probability that chance alone splits the tokens as seen
FEW = 20  # tokens below which no rule about distributions is asked
CONTRAST = 6  # times that Δ is larger on one side of a split
BF16_KL, QUANTISED_KL = 2.0**-11, 2.0**-6  # KL (k3) that sums in bf16 and 8 bits stay below, in a few layers
FP32_SIZE = 2.0**-12  # mean |Δ| of sums in fp32
MASS = 0.05  # |Δ| that padded rows of a vocabulary stay below


def probable_causes(sides: Sides, pairs: Pairs) -> list[Hint]:
    """Returns a hint for each way in which rows disagree, then at most one for the logprobs' values."""
    if found := _misplaced(sides):
        return [found]
    hints, clean = _rows(sides), pairs.take(pairs.clean)
    if clean.differ.any():
        hints.append(next(filter(None, (rule(clean) for rule in RULES))))
    return hints


# Rows


def _misplaced(sides: Sides) -> Hint | None:
    """Says whether samples hold the same tokens under other sample numbers or positions."""
    (mine, values, begin), (theirs, others, start) = map(_digests, (sides.rollout, sides.training))
    for name, own, other in (("tokens", mine, theirs), ("logprobs", values, others)):
        owner = {digest: sample for sample, digest in other.items()}
        home = sum(other.get(s) == digest for s, digest in own.items())
        moved = [s for s, digest in own.items() if digest in owner and other.get(s) != digest]
        if len(moved) > max(1, home) and 2 * len({*own.values()}) > len(own):
            which = f"the {name} of sample {moved[0]} are those of sample {owner[own[moved[0]]]} in training"
            return Hint(Cause.SAMPLE_ORDER, f"{len(moved):,} samples have another number: {which}.")
    shifts = [start[s] - begin[s] for s in mine if theirs.get(s) == mine[s]]
    if np.count_nonzero(shifts) * 2 > len(shifts):
        by = f"{shifts[0]:+}" if len({*shifts}) == 1 else f"{min(shifts):+} to {max(shifts):+}"
        return Hint(Cause.POSITIONS, f"The samples hold the same tokens, at positions that differ by {by} in training.")
    return None


def _digests(c) -> tuple[dict[int, int], ...]:
    """Returns {sample: …} of a hash of its tokens, of its logprobs' bits, and of its first position."""
    starts, lengths = runs(c.sample)
    rank = np.arange(len(c)) - np.repeat(starts, lengths)
    weights = np.random.default_rng(0).integers(2**63, size=int(lengths.max()), dtype=np.uint64) * 2 + 1
    summed = lambda v: np.add.reduceat((v.view(np.uint64) + np.uint64(1)) * weights[rank], starts)
    columns = summed(c.token), summed(c.logprob), c.position[starts]
    return tuple(dict(zip(c.sample[starts].tolist(), v.tolist())) for v in columns)


def _rows(sides: Sides) -> list[Hint]:
    """Says which rows are repeated, missing, not finite, or of another id."""
    names = [name.capitalize() for name in NAMES]
    hints = [
        Hint(Cause.DUPLICATED, f"{name} has places more than once; the first of each was compared.")
        for name, dropped in zip(names, sides.dropped)
        if len(dropped)
    ]
    r, t = sides.rollout.take(sides.both[0]), sides.training.take(sides.both[1])
    other_ids = _ids(sides, r, t)
    hints += other_ids
    for side, c in enumerate((sides.rollout, sides.training)):
        alone = sides.alone(side)
        starts, lengths = runs(c.sample)
        rows = np.arange(len(c))
        last = np.maximum.reduceat(np.where(alone, -1, rows), starts).repeat(lengths)
        first = np.minimum.reduceat(np.where(alone, len(c), rows), starts).repeat(lengths)
        whole, before, after = last < 0, rows < first, rows > last
        for cause, mask, where in (
            (Cause.DROPPED_SAMPLE, whole, "all those of some samples"),
            (Cause.PROMPT, before & ~whole, "before the first that both have"),
            (Cause.END, after & ~whole, "after the last that both have"),
            (Cause.SCATTERED, ~(before | after), "between others"),
        ):
            if (count := int((alone & mask).sum())) and not other_ids:
                what = f"{names[side]} has {count:,} tokens that {NAMES[1 - side]} lacks, {where}."
                hints.append(Hint(cause, what))
    for name, values in zip(names, (r.logprob, t.logprob)):
        if len(bad := values[~np.isfinite(values)]):
            kinds = ", ".join(sorted({*map(str, bad)}))
            hints.append(Hint(Cause.NOT_FINITE, f"{name} has {len(bad):,} logprobs that are {kinds}."))
    return hints


def _ids(sides: Sides, r, t) -> list[Hint]:
    """Says how token ids at the same place differ."""
    wrong = r.token != t.token
    if not wrong.any():
        return []
    code, known = sides.codes[0][sides.both[0]][wrong], sides.codes[1]
    ids, place, sample = r.token[wrong], r.position[wrong], r.sample[wrong]
    for shift in sorted(range(-ROOM // 2, ROOM // 2), key=abs)[1:]:
        at = np.searchsorted(known, code + shift).clip(max=len(known) - 1)
        there = known[at] == code + shift
        if there.sum() > len(code) // 2 and (sides.training.token[at] == ids)[there].mean() > 0.8:
            more = f"{NAMES[shift > 0]} has {abs(shift)} more"
            return [Hint(Cause.TEMPLATE, f"Token ids agree after a shift, from position {place[0]} on: {more} there.")]
    starts, counts = runs(sample)
    if counts.max() <= 2 and len(np.unique(place[starts])) <= max(2, len(starts) // 4):
        what = f"{ids[0]} against {t.token[wrong][0]} in training"
        return [Hint(Cause.TEMPLATE, f"{len(starts):,} samples have another id at position {place[0]}: {what}.")]
    what = f"first at position {place[0]} of sample {sample[0]}, and no shift aligns them"
    return [Hint(Cause.TOKENIZER, f"In {len(starts):,} samples token ids differ from a place on, {what}.")]


# Values: each rule returns a hint, or None if it does not fit


def _zeros(p: Pairs) -> Hint | None:
    return None if p.delta.any() else Hint(Cause.ZERO_SIGN, "Only the sign of zeros differs.")


def _masked(p: Pairs) -> Hint | None:
    for values, _, name in _sides(p):
        if not values[p.differ].any():
            return Hint(Cause.MASKED, f"The logprob is 0 in {name} wherever the two sides differ.")
    return None


def _no_logprob(p: Pairs) -> Hint | None:
    for values, other, name in _sides(p):
        if np.mean(values > 2.0**-6) > 0.05:  # beyond what rounding does to a logprob of zero
            if _rms(values + other) < _rms(values - other) / 10:
                return Hint(Cause.SIGN, f"The values of {name} are those of the other side with the sign changed.")
            return Hint(Cause.NO_LOGPROB, f"{100 * np.mean(values > 0):.3g} % of the values of {name} are above 0.")
    return None


def _shifted(p: Pairs) -> Hint | None:
    every = np.arange(len(p.sample))
    for shift in (1, -1, 2, -2):
        there = np.clip(every + shift, 0, len(every) - 1)
        fits = (p.sample[there] == p.sample) & (p.position[there] - p.position == shift)
        off = np.abs(p.rollout - p.training[there])[fits]
        if len(off) >= max(2, len(every) // 2) and off.mean() < np.abs(p.delta).mean() / 8:
            where = f"{abs(shift)} {'later' if shift > 0 else 'earlier'}"
            return Hint(Cause.SHIFTED, f"A logprob of the rollout agrees with training's at the position {where}.")
    return None


def _rounded(p: Pairs) -> Hint | None:
    for values, other, name in _sides(p):
        for dtype, bits in (("float32", 23), ("float16", 10), ("bfloat16", 7)):
            small = np.abs(p.delta).mean() <= 2.0 ** (1 - bits) * np.abs(values).mean()
            if small and not _off_grid(values, dtype).any() and np.mean(_off_grid(other, dtype) > 0) > 0.5:
                return Hint(
                    Cause.ROUNDED, f"Every logprob of {name} is a {dtype}, and Δ has the size of that rounding."
                )
            ours, theirs = (_off_grid(np.exp(v), dtype) for v in (values, other))
            small = np.abs(p.delta).mean() <= 2.0 ** (1 - bits)
            if small and bits < 23 and np.quantile(ours, 0.95) < 2.0**-19 and np.median(theirs) > 2.0**-14:
                return Hint(Cause.ROUNDED, f"Every probability of {name} is a {dtype}: its softmax was rounded.")
    return None


def _off_grid(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns by how much of itself a number changes when it is rounded to a dtype."""
    import torch  # noqa: PLC0415 (NumPy has no bf16)

    rounded = torch.from_numpy(values).to(getattr(torch, dtype)).double().numpy()
    return np.abs(rounded - values) / np.maximum(np.abs(values), 2.0**-100)


def _unit(p: Pairs) -> Hint | None:
    factor = float(p.rollout @ p.training / max(p.rollout @ p.rollout, 2.0**-60))
    if abs(factor - 1) < 2.0**-5 or _rms(p.training - factor * p.rollout) > _rms(p.delta) / 32:
        return None
    bases = {2: np.log(2), 10: np.log(10)}
    known = {(base, side): v ** (1 - 2 * side) for base, v in bases.items() for side in (0, 1)}
    fits = (f": {NAMES[s]} has log{b}" for (b, s), v in known.items() if abs(factor / v - 1) < 2.0**-7)
    return Hint(Cause.UNIT, f"Logprobs of training are {factor:.4g} times the rollout's{next(fits, '')}.")


def _batch_size(p: Pairs) -> Hint | None:
    for name, sizes in p.batch_sizes.items():
        values = np.unique(sizes)
        equal = np.array([not p.differ[sizes == v].any() for v in values])
        rows = np.isin(sizes, values[equal])
        if rows.any() and _by_chance(rows.sum(), p.differ[~rows].mean()) < SURE:
            listed = lambda v: ", ".join(map(str, v[:6])) + f" and {len(v) - 6} more" * (len(v) > 6)
            what = f"equal for the {name} {listed(values[equal])} and differ for {listed(values[~equal])}"
            return Hint(Cause.BATCH_SIZE, f"The bits are {what}.")
    return None


def _where(p: Pairs) -> Hint | None:
    """Finds the axis along which tokens agree best up to a value and differ from it on, or the reverse."""
    by = {"rank": p.rank, "position": p.position, "length": p.length, "sample": p.sample}
    splits = [(*s, axis) for axis, values in by.items() if (s := _split(values, p))]
    if not splits:
        return None
    _, value, rising, exact, axis = max(splits, key=lambda s: s[0])
    agree = "agree bit by bit" if exact else f"are {CONTRAST} times closer"
    below, above = {
        "rank": (f"at the first {value} tokens of a sample", "after them"),
        "position": (f"below position {value}", "from it on"),
        "length": (f"in samples of less than {value} tokens", "in longer ones"),
        "sample": (f"before sample {value}", "from it on"),
    }[axis]
    cause = {"sample": Cause.STALE, "length": Cause.LENGTH}.get(axis, Cause.POSITION)
    first, second = (agree, "differ") if rising else ("differ", agree)
    return Hint(cause, f"The logprobs {first} {below} and {second} {above}.")


def _split(by: np.ndarray, p: Pairs) -> tuple[float, int, bool, bool] | None:
    """Returns (how well it fits, value from which the other kind begins, whether that one differs more, whether the
    first agrees bit by bit)."""
    values, index = np.unique(by, return_inverse=True)
    if len(values) < 2:
        return None
    below = lambda weights=None: np.cumsum(np.bincount(index, weights))[:-1]
    counts = below(), len(by) - below()
    differ = below(p.differ), p.differ.sum() - below(p.differ)
    bad = np.bincount(index, p.differ) > 0  # values at which something differs
    scattered = len(np.unique(p.sample[p.differ])) < min(4, len(np.unique(p.sample)))  # one sample is no boundary
    for rising, a, b in ((True, 0, 1), (False, 1, 0)):
        if (free := np.flatnonzero(differ[a] < 0.5)).size and not scattered:
            at = free[-1] if rising else free[0]
            share, dense = differ[b][at] / counts[b][at], bad[at + 1 :] if rising else bad[: at + 1]
            if dense.mean() > 0.5 and _by_chance(counts[a][at], share) < SURE:
                return 1 + share, int(values[at + 1]), rising, True
    size = np.minimum(np.abs(p.delta), np.quantile(np.abs(p.delta), 0.9))  # no few tokens make a difference
    under, over = below(size) / counts[0], (size.sum() - below(size)) / counts[1]
    wide = np.minimum(*counts) >= max(FEW, len(by) // 10)
    ratio = np.where(wide, np.log(np.maximum(over, 2.0**-60) / np.maximum(under, 2.0**-60)), 0)
    at = np.abs(ratio).argmax()
    fits = 1 - CONTRAST / float(np.exp(abs(ratio[at])))
    return (fits, int(values[at + 1]), bool(ratio[at] > 0), False) if fits > 0 else None


def _unrelated(p: Pairs) -> Hint | None:
    if len(p.token) < FEW or np.median(np.abs(p.delta)) < 0.5 or not p.rollout.std():
        return None
    if p.training.std() and np.corrcoef(p.rollout, p.training)[0, 1] > 0.3:
        return None
    return Hint(Cause.UNRELATED, "The logprobs of the two sides hardly depend on each other.")


def _penalty(p: Pairs) -> Hint | None:
    order = np.lexsort((p.position, p.token, p.sample))
    again = np.zeros(len(order), bool)
    again[order[1:]] = (np.diff(p.sample[order]) == 0) & (np.diff(p.token[order]) == 0)
    if min(again.sum(), (~again).sum()) < 2 * FEW:
        return None
    for sign, name in ((1, NAMES[0]), (-1, NAMES[1])):
        seen, new = (sign * p.delta[rows] for rows in (again, ~again))
        larger = lambda d: d[np.abs(d) >= np.median(np.abs(d))]
        if min(np.mean(larger(seen) > 0), np.mean(larger(new) < 0)) > 0.9:
            return Hint(
                Cause.PENALTY, f"Tokens that occurred before have smaller logprobs in {name}, others larger ones."
            )
    return None


def _one_sided(p: Pairs) -> Hint | None:
    d, size = p.delta, np.abs(p.delta)
    down = d.sum() < 0
    wrong = d[d > 0] if down else d[d < 0]
    if len(d) < FEW or not _widespread(p) or wrong @ wrong > d @ d * 2.0**-7:
        return None
    (low, upper, high) = (NAMES[1], p.rollout, NAMES[0]) if down else (NAMES[0], p.training, NAMES[1])
    what = f"than {high}'s, by {size.mean():.2g} on average and {size.max():.2g} at most"
    alone = np.mean((upper == 0) & (size > 0)) > 0.01  # one token was kept, and its logprob is 0
    padded = not alone and (size.max() < MASS or size.std() < size.mean() / 8)
    return Hint(Cause.VOCABULARY if padded else Cause.RENORMALISED, f"Logprobs of {low} are smaller {what}.")


def _scaled(p: Pairs) -> Hint | None:
    """Fits Δ to a temperature: it flattens, so that likely tokens lose and unlikely ones gain; or it sharpens."""
    d, middle = p.delta, (p.rollout + p.training) / 2
    if len(d) < FEW or not d.std() or not middle.std():
        return None
    unlikely, likely = d[middle <= np.quantile(middle, 0.1)], d[middle >= np.quantile(middle, 0.6)]
    follows = float(np.mean(unlikely > 0) - np.mean(likely > 0))
    together = abs(float(np.corrcoef(d, middle)[0, 1]))
    if not (abs(follows) > 0.65 and together > 0.4 or abs(follows) > 0.4 and together > 0.8):
        return None
    deep = p.rollout <= min(-1.0, float(np.median(p.rollout)))
    bounds = p.training[deep] / p.rollout[deep] if deep.any() else np.ones(1)  # by 1 / T, on one side
    factor = 1 / np.quantile(bounds, 0.005 if follows > 0 else 0.995)
    what = f"Unlikely tokens are likelier in {NAMES[follows > 0]}, likely ones in {NAMES[follows < 0]}"
    by = f"{'at least' if follows > 0 else 'at most'} {factor:.2g} times"
    return Hint(Cause.LOGIT_SCALE, f"{what}, as if training's temperature were {by} the rollout's.")


def _noise(p: Pairs) -> Hint | None:
    d, moved = p.delta, p.delta[p.differ]
    size = float(np.abs(d).mean())
    with np.errstate(over="ignore"):
        kl = float((np.expm1(d) - d).mean())
    if (
        len(d) < FEW
        or not _widespread(p)
        or not 0.2 < np.mean(moved > 0) < 0.8
        or abs(d.mean()) > max(4 * d.std() / len(d) ** 0.5, 2 * kl)
    ):
        return None
    where = f"at {100 * p.differ.mean():.3g} % of the tokens"
    what = f"Δ has both signs and mean 0 within its noise, {where}; mean |Δ| {size:.2g}"
    if kl > QUANTISED_KL:
        return Hint(Cause.WEIGHTS, f"{what} is more than 8 bits usually make.")
    if kl > BF16_KL:
        return Hint(Cause.PRECISION, f"{what} is more than bf16 makes in a few layers.")
    return Hint(
        Cause.KERNELS, f"{what} is what sums in {'fp32' if size < FP32_SIZE else 'bf16'} in another order make."
    )


def _unclear(p: Pairs) -> Hint:
    bad, every = (len(np.unique(rows)) for rows in (p.sample[p.differ], p.sample))
    return Hint(Cause.UNCLEAR, f"{100 * p.differ.mean():.3g} % of the tokens differ, in {bad:,} of {every:,} samples.")


RULES = (
    *(_zeros, _masked, _no_logprob, _shifted, _rounded, _unit, _batch_size, _where, _unrelated),
    *(_penalty, _one_sided, _scaled, _noise, _unclear),
)


def _sides(p: Pairs):
    return (p.rollout, p.training, NAMES[0]), (p.training, p.rollout, NAMES[1])


def _widespread(p: Pairs) -> bool:
    """Tells whether most samples differ."""
    return len(np.unique(p.sample[p.differ])) * 2 > len(np.unique(p.sample))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _by_chance(count: int, share: float) -> float:
    """Returns the log of the probability that `count` tokens agree if a share of them differed by chance."""
    return count * float(np.log1p(-min(share, 1 - 2.0**-30)))
