"""Attention's fp64 reference: the results of a sequence at a time, and what they and the gradients may err by, a head
at a time, as the contract's rows of attention derive it."""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from bi_kernels.contract import CONTRACT, factor, rounding

UNIT, LEAST = 2.0**-24, 2.0**-126  # one rounding to fp32, and what an fp32 result below it may be flushed from


def _sequences(
    q: Tensor,
    k: Tensor,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    lengths: Sequence[int | tuple[int, int]] | None = None,  # of each sequence, or its queries and its keys
) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """(rows of q that see a key, rows of k, which of these they see) of each sequence of which some query sees one.

    The last query is the last key's.
    """
    first = last = 0
    for pair in [(len(q), len(k))] if lengths is None else lengths:
        queries, keys = pair if isinstance(pair, Sequence) else (pair, pair)
        key = torch.arange(keys, device=q.device)
        position = torch.arange(keys - queries, keys, device=q.device)[:, None]
        seen = (key <= position) | (not causal)
        if window:
            seen &= key > position - window
        if chunk:
            seen &= key // chunk == position // chunk
        some = seen.any(-1).nonzero()[:, 0]
        if len(some):
            yield first + some, slice(last, last + keys), seen[some]
        first, last = first + queries, last + keys


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    **which,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64, differentiable; which: `causal`, `window`, `chunk` and `lengths`."""
    q, k, v = q.double(), k.double(), v.double()
    scale, group = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    out, lse = q.new_zeros(*q.shape[:2], v.shape[-1]), torch.full_like(q[..., 0], -torch.inf)
    for rows, keys, seen in _sequences(q, k, **which):
        own_k, own_v = (t[keys].repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        z = q[rows].transpose(0, 1) @ own_k.mT * scale
        z = (z if soft_cap is None else soft_cap * (z / soft_cap).tanh()).masked_fill(~seen, -torch.inf)
        own_lse = z.logsumexp(-1)
        if sinks is not None:
            own_lse = torch.logaddexp(own_lse, sinks.double()[:, None])
        out[rows] = ((z - own_lse[..., None]).exp() @ own_v).transpose(0, 1)
        lse[rows] = own_lse.T
    return out, lse


def log_total(t: Tensor) -> Tensor:
    return t.logsumexp(-1, keepdim=True)


def total(t: Tensor) -> Tensor:
    """Sums over the last dimension, which stays."""
    return t.sum(-1, keepdim=True)


@cache
def _of_slabs(dtype: torch.dtype, slabs: int) -> float:
    return factor("linear", dtype, CONTRACT["arithmetic"]["slab"] * slabs, "x")


@cache
def _up_to(dtype: torch.dtype, slabs: int, device: torch.device) -> Tensor:
    return torch.tensor([_of_slabs(dtype, n) for n in range(slabs + 1)], dtype=torch.float64, device=device)


def _fold(dtype: torch.dtype, seen: Tensor, times: int = 1) -> Tensor:
    """linear's c for the fold over the last dimension, so many times: of its slabs, those that hold something seen."""
    slab = CONTRACT["arithmetic"]["slab"]
    slabs = pad(seen, (0, -seen.shape[-1] % slab)).unflatten(-1, (-1, slab)).any(-1)
    most = times * slabs.shape[-1]  # known without waiting for the device
    return _up_to(dtype, most, seen.device)[times * slabs.sum(-1)][:, None]


def probability_errors(logp: Tensor, h: Tensor, largest: float = 16 * UNIT) -> Tensor:
    """Of p, where log p errs by h but stays below `largest`: lse is no less than the largest z, but for lg2.approx."""
    p = logp.exp()
    up = (logp + h).clamp(max=largest).exp() - p
    return torch.where(logp.isfinite(), torch.maximum(up, -p * (-h).expm1()), 0.0)


def changes(logp: Tensor, a: Tensor, own: Tensor) -> Tensor:
    """log(p_j exp(a_j − own_j) + Σ_{i≠j} p_i exp(a_i + own_j)), without overflow or cancellation."""
    grown = logp + a
    summed, largest = log_total(grown), grown.argmax(-1, keepdim=True)
    others = summed + (-(grown - summed).exp()).log1p()
    others.scatter_(-1, largest, log_total(grown.scatter(-1, largest, -torch.inf)))
    return torch.logaddexp(grown - own, others + own)


class _Softmax:
    """The probabilities of one head of a sequence, (queries, keys), and the absolute errors that the forward makes of
    them; q (queries, D) and k (keys, D) in fp64. What is of a query alone is (queries, 1). A sink is one more key,
    without a value: `logp`, `d` and `f` have a last column of it."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        seen: Tensor,
        scale: float | None,
        dtype: torch.dtype,
        sink: Tensor | None = None,
        soft_cap: float | None = None,
    ):
        self.scale, self.seen = q.shape[-1] ** -0.5 if scale is None else scale, seen
        block, key = CONTRACT["arithmetic"]["attention_block"], torch.arange(len(k), device=k.device)
        z = q @ k.T * self.scale
        # errors of z, and of the exponential beside that
        d = self.scale * factor("linear", dtype, q.shape[-1], "x") * (q.abs() @ k.abs().T + LEAST)
        self.slope, self.of_slope = torch.ones_like(z), torch.zeros_like(z)
        if soft_cap is not None:
            t, above, below = (((z + move) / soft_cap).tanh() for move in (0.0, d, -d))
            of_t = torch.maximum(above - t, t - below) + 14 * UNIT
            self.slope, self.of_slope = 1 - t * t, of_t * (2 * t.abs() + of_t) + 3 * UNIT
            z, d = soft_cap * t, soft_cap * of_t
        shown = z.masked_fill(~seen, -torch.inf)
        self.top = shown.amax(-1, keepdim=True)  # max z
        last = (seen * key).amax(-1, keepdim=True)
        # blocks from a key's own to the last one that its query sees
        steps = torch.where(seen, last // block - key // block + 1, 0).double()
        if sink is not None:
            steps = steps + seen
        f = UNIT * (3 * (self.top - z).clamp(min=0) + 4 + 4 * steps)
        self.steps, self.sink = steps, sink
        if sink is not None:
            of_sink = UNIT * (2 * self.top.abs() + 2 * sink.abs() + (self.top - sink).abs() + 8)
            shown, d, f = (
                torch.cat([t, more], 1) for t, more in ((shown, sink + 0 * of_sink), (d, 0 * of_sink), (f, of_sink))
            )
            steps, self.top = pad(steps, (0, 1), value=1.0), self.top.maximum(sink)
        self.lse = log_total(shown)
        self.logp = logp = shown - self.lse  # −inf where nothing is seen
        self.d, self.f = d, f
        self.grown = log_total(logp + d + f)  # log Σ p exp(d + f)
        error = self.of_p(changes(logp, d + f, d + f))  # of p, normalised
        self.sums = UNIT * total((logp.exp() + error) * (25 + 2 * steps))  # relative, of Σ p, but for that of p
        self.p, self.error = logp[:, : len(k)].exp(), error[:, : len(k)]
        self.most = self.p + self.error  # that p is with its error
        self.fold = _fold(dtype, seen)  # linear's c of the product with V
        self.u, tiny = rounding(dtype)
        self.least = tiny + 2 * LEAST  # what a rounding of p to the storage dtype, or a flush, may take near zero

    def of_p(self, h: Tensor) -> Tensor:
        """Of p, where log p errs by h but none is above 1."""
        return probability_errors(self.logp, h * (1 + 2.0**-16), 0.0)  # second order, which may be of a large exponent

    def stored(self) -> Tensor:
        """Errors of p as the product with V takes it, but for those of that product: the same for all features."""
        return self.error + self.u * self.most + self.most.clamp(max=self.least)

    def product(self) -> Tensor:
        """Errors that the product with V and its rescaling make of each p v."""
        return (self.fold + 2 * UNIT * self.steps) * self.most

    def underflow(self) -> Tensor:
        """Errors of out where what is summed is small."""
        return LEAST * (self.fold + UNIT * (self.steps.amax(-1, keepdim=True) + 4))

    def of_log_sum(self) -> Tensor:
        """Of the lse, but for those that the errors of z and of the exponentials make."""
        return self.sums + UNIT * (4 + 4 * (self.lse - self.top) + 3 * self.lse.abs() + 2 * self.top.abs())

    def again(self) -> Tensor:
        """Errors of p as the backward computes it from the lse; scale's own rounding is in both."""
        lse, top = self.lse, self.top
        own = UNIT * (4 - (lse - top) + 2 * lse.abs() - top.abs() + 2 * self.logp.abs())
        if self.sink is not None:  # the constant scale need not be that of lse, whose largest part may be the sink
            own = UNIT * (4 + 3 * lse.abs() + 3 * self.logp.abs())
        error = self.of_p(changes(self.logp, self.d + self.f, self.d) + self.of_log_sum() + own)
        return error + (self.logp.exp() + error).clamp(max=LEAST)


def _softmaxes(
    dtype: torch.dtype, q: Tensor, k: Tensor, sinks: Tensor | None, scale: float | None, soft_cap: float | None, **which
) -> Iterator[tuple]:
    """(where in q, where in k, its softmax) of every head of every sequence."""
    for rows, keys, seen in _sequences(q, k, **which):
        for head in range(q.shape[1]):
            row, key = (rows, head), (keys, head * k.shape[1] // q.shape[1])
            sink = None if sinks is None else sinks[head].double()
            yield row, key, _Softmax(q[row].double(), k[key].double(), seen, scale, dtype, sink, soft_cap)


@torch.no_grad()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    **which,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """((out, S), (lse, S)) of packed sequences: q (tokens, heads, D), k (rows, key heads, D), v likewise.

    which: `causal`, `window` and `chunk` as the op's, and `lengths` of each sequence, or pairs of its queries and its
    keys, of which the last belong together; one of all rows unless given. A query that sees no key gives 0 and −inf,
    S 0.
    """
    out, lse = attended(q, k, v, sinks, scale=scale, soft_cap=soft_cap, **which)
    of_out, of_lse = torch.zeros_like(out), torch.zeros_like(lse)
    for row, key, s in _softmaxes(q.dtype, q, k, sinks, scale, soft_cap, **which):
        error = (s.stored() + s.product()) @ v[key].double().abs()
        error += (out[row].abs() + error) * (s.sums + 4 * UNIT) + s.underflow()
        of_out[row] = error / UNIT
        of_lse[row] = (s.grown + s.of_log_sum())[:, 0] / UNIT
    return (out, of_out), (lse, of_lse)


def _slabs(tokens: int, lengths: Sequence[int | tuple[int, int]] | None) -> int:
    """Returns how many slabs the fold over the queries has."""
    counts = [n if isinstance(n, int) else n[0] for n in ([tokens] if lengths is None else lengths)]
    return sum(-(-n // CONTRACT["arithmetic"]["slab"]) for n in counts)


def _beyond(ds: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each dS, with its sign: infinity where a rounding to `dtype` surely makes it so, 1 where it may, else 0."""
    infinite = lambda t: t.clamp(min=0).to(dtype).isinf()
    error = error * (factor("attention", dtype, 1, "q") / UNIT)
    return ds.sign() * infinite(ds.abs() + error).double().masked_fill(infinite(ds.abs() - error), torch.inf)


def gradients(
    dtype: torch.dtype,
    d_out: Tensor,
    d_lse: Tensor,
    exact: dict[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    **which,
) -> dict[str, Tensor]:
    """S of the gradients of q, k, v and the sinks, inputs in fp64 that were of `dtype`; exact: the gradients without dS
    beyond its range, which gets what such a dS makes.

    That is infinities and NaN; where it is so close to the range's end that it may, or may not, S is infinite.
    """
    (u, tiny), width = rounding(dtype), v.shape[-1]
    dot, tree = factor("linear", dtype, width, "x"), 2 * (2 * width) ** 0.5 + 9
    found = {name: torch.zeros_like(t) for name, t in (("q", q), ("k", k), ("v", v), ("sinks", sinks)) if t is not None}
    additions = 16 + _slabs(len(q), which.get("lengths"))  # of each token's part in the gradient of a sink
    # what is infinite or NaN, and the sign of what may be
    beyond = {name: torch.zeros_like(found[name]) for name in ("q", "k")}
    for row, key, s in _softmaxes(dtype, q, k, sinks, scale, soft_cap, **which):
        own_q, own_k, own_v, do = q[row], k[key], v[key], d_out[row]
        dp, of_dp, out = do @ own_v.T, do.abs() @ own_v.abs().T, s.p @ own_v
        inner, inner_ = total(out * do), total((out * do).abs())
        delta = inner - d_lse[row][:, None]
        of_delta = total(s.stored() * dp.abs() + s.product() * of_dp) + s.sums * inner.abs()
        of_delta += (u + UNIT * (tree + 4)) * inner_ + UNIT * delta.abs()
        of_delta += (tiny + s.underflow()) * total(do.abs())

        of_p = s.again()
        if sinks is not None:
            p, of_sink = s.logp[:, -1:].exp(), of_p[:, -1:]
            each = (p + of_sink) * (delta.abs() + of_delta)
            of_each = of_sink * delta.abs() + (p + of_sink) * of_delta + UNIT * (1 + additions) * each + LEAST
            found["sinks"][row[1]] += of_each.sum()
        of_p = of_p[:, : len(own_k)]
        most, g = s.p + of_p, (dp - delta).abs()
        weight = s.p * s.slope  # with a cap, of which it also has the errors
        of_weight = of_p * s.slope + most * s.of_slope
        heavy = weight + of_weight
        own = of_weight * g + heavy * (dot * (of_dp + LEAST) + 2 * UNIT * g)  # of dS, but for what delta errs by
        of_ds = own + heavy * of_delta
        far = _beyond(weight * (dp - delta), of_ds, dtype)
        beyond["q"][row] = far @ own_k
        beyond["k"][key] += far.T @ own_q
        ds = weight * g + of_ds
        rounds = u * ds + ds.clamp(max=tiny)
        common = of_delta * ((weight @ own_k).abs() + of_weight @ own_k.abs())  # of delta, for all keys alike
        found["q"][row] = s.scale * ((own + rounds + s.fold * ds) @ own_k.abs() + common + s.fold * LEAST)
        fold = _fold(dtype, s.seen.T, q.shape[1] // k.shape[1])  # over the queries of all heads
        found["k"][key] += s.scale * ((of_ds + rounds + fold.T * ds).T @ own_q.abs() + fold * LEAST)
        of_p += (u + fold.T) * most + most.clamp(max=tiny)
        found["v"][key] += of_p.T @ do.abs() + fold * LEAST
    for name, far in beyond.items():
        found[name] += 2 * UNIT * exact[name].abs()
        found[name].masked_fill_(far != 0, torch.inf)
        open_ = far.isfinite() & (far != 0)  # such an element counts as the largest finite number
        exact[name] = torch.where(open_, far.sign() * torch.finfo(dtype).max, exact[name] + far)
    return {name: t / UNIT for name, t in found.items()}
