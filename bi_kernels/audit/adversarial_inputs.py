"""Inputs made of the user's own that show a reordering: spread, cancelling, on the brink of a rounding, resampled."""

import torch

from bi_kernels import contract
from bi_kernels.audit.compare import ordered
from bi_kernels.audit.inputs import cancel, generator, powers
from bi_kernels.contract import SWEEP

SCALES = 1.0, 2.0**-5, 2.0**-9, 2.0**-15  # of a share of the features each: all but the first move a result finely
STEPS = 9  # halvings of the range in which a result changes, for each of the fine shares
SMALL = 2**14  # numbers in all samples
NEAR = 64  # ULP that a result may move over that range: what moves further is made of the one element that moved


def _floating(t, batched: bool) -> dict[str, torch.Tensor]:
    held = {k: v for k, v in t.values.items() if isinstance(v, torch.Tensor) and k not in t.outputs}
    return {k: v for k, v in held.items() if v.is_floating_point() and (k in t.batched) == batched}


def spread(t) -> dict:
    """Returns the arguments with exponents that differ from element to element."""
    scale = lambda k, v: powers(v.shape, -4, 5, generator(v.device, t.seed, k)).to(v.dtype)
    return t.values | {k: v * scale(k, v) for k, v in _floating(t, True).items()}


def cancelling(t) -> dict:
    """Returns the arguments such that sums over features, and over samples, grow and vanish.

    The first batched tensor negates the first half of its features in the second, all others repeat theirs, so that
    their products cancel; what a weight holds is repeated along both of its last dimensions. The second half of the
    samples repeats the first: upstream gradients negate it (see Step).
    """
    out = dict(t.values)
    for number, (k, v) in enumerate(_floating(t, True).items()):
        if v.dim() < 2:
            continue
        x = v.movedim(t.batch, 0).clone(memory_format=torch.contiguous_format)
        if x.numel() and bool(x.min() < 0 < x.max()) and bool(x.isfinite().all()):  # else a mask, or a probability
            cancel(x, shared=number > 0)
        half = t.count // 2
        x[half : 2 * half] = x[:half].clone()
        out[k] = x.movedim(0, t.batch)
    for k, v in _floating(t, False).items():
        if v.dim():
            out[k] = v.clone(memory_format=torch.contiguous_format)
            cancel(out[k], shared=True)
            if v.dim() > 1:
                cancel(out[k].transpose(-1, -2), shared=True)
    return out


def brink(t) -> dict | None:
    """Returns the arguments with every sample where one of its results is about to round to another number: there a
    change in the last bit of a sum in fp32, of any op, changes what is returned in 16 bits. Found by halving, with
    every sample in one call; None where no output has 16 bits."""
    moved = {k: v.movedim(t.batch, 0) for k, v in _floating(t, True).items() if v.dim() > 1}
    if not moved or all(y.element_size() != 2 or not y.is_floating_point() for y in t.whole()):
        return None
    g = generator(t.device, t.seed, "brink")
    share = {k: torch.randint(0, len(SCALES), v.shape[-1:], generator=g, device=t.device) for k, v in moved.items()}
    scales = torch.tensor(SCALES, dtype=torch.float64, device=t.device)
    factor = torch.ones(t.count, len(SCALES), dtype=torch.float64, device=t.device)

    def at(factor: torch.Tensor) -> dict:
        by_feature = lambda k, v: (factor * scales)[:, share[k]].view(t.count, *[1] * (v.dim() - 2), -1)
        return t.values | {k: (v * by_feature(k, v)).to(v.dtype).movedim(0, t.batch) for k, v in moved.items()}

    def results(factor: torch.Tensor) -> torch.Tensor:
        t.drawn["brink"] = at(factor)
        found = [y for y in t.whole("brink") if y.is_floating_point() and y.element_size() == 2]
        return torch.cat([ordered(y).flatten(1) for y in found], 1)

    for part in range(1, len(SCALES)):
        low, high = factor.clone(), factor.clone()
        low[:, part], high[:, part] = 0.5, 1.5
        before = results(low)
        gap = (before - results(high)).abs()
        nearest, element = torch.where(gap == 0, 2**30, gap).min(1)  # one that the others' sum moves
        one = lambda y: y.gather(1, element[:, None])
        for _ in range(STEPS):
            middle = (low + high) / 2
            same = one(results(middle)) == one(before)
            low, high = torch.where(same, middle, low), torch.where(same, high, middle)
        factor = torch.where((nearest < NEAR)[:, None], low, factor)
    return at(factor)


KINDS = {"spread": spread, "cancelling": cancelling, "brink": brink}


def wanted(t) -> int:
    """Returns how many samples an audit of a target calls for: rows around every tile's edge as far as the sweep goes;
    of a sample with several rows as many fewer, but more where they are small."""
    x = t.values[t.first]
    rows = x.shape[t.batch + 1 : -1 if x.is_floating_point() else None].numel()
    most = SWEEP["interpreter_rows"] if t.device.type == "cpu" else max(SWEEP["rows"])
    size = sum(t.values[k].numel() for k in t.batched) // t.count
    return min(most, max(most // max(rows, 1), SMALL // max(size, 1)))


def resampled(t, count: int) -> dict:
    """Returns the arguments with `count` samples: the given ones, then others, each a given one whose numbers are those
    of any given sample at the same place. What is no number, as an id or a mask, stays together."""
    g = generator(t.device, t.seed, "resampled")
    number = torch.randint(0, t.count, (count,), generator=g, device=t.device)
    number[: t.count] = torch.arange(t.count, device=t.device)
    out = dict(t.values)
    for k, v in out.items():
        if k not in t.batched:
            continue
        x = v.movedim(t.batch, 0)
        more = x[number]
        if v.is_floating_point() and k not in t.outputs and bool(v.isfinite().all()):
            anyones = torch.randint(0, t.count, (count - t.count, *x.shape[1:]), generator=g, device=t.device)
            more[t.count :] = x.gather(0, anyones)
        out[k] = more.movedim(0, t.batch)
    return out


def edges(count: int, given: int) -> list[int]:
    """Returns the row counts of the sweep below `count` that lie one past a power of two, and `given`."""
    return sorted({m for m in contract.rows(count - 1) if (m - 1) & (m - 2) == 0} | {given} - {count})
