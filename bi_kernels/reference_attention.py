"""Attention's fp64 reference: the results of a sequence at a time, and what they and the gradients may err by, a head
at a time, as the contract's rows of attention derive it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from bi_kernels.contract import CONTRACT, factor, rounding

UNIT, LEAST = 2.0**-24, 2.0**-126  # one rounding to fp32, and what an fp32 result below it may be flushed from
Lengths = Sequence[int | tuple[int, int]] | None  # of each sequence, or its queries and its keys


def _seen(queries: int, keys: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """(queries, keys): which keys each query sees; the last query is the last key's."""
    key, position = torch.arange(keys, device=device), torch.arange(queries, device=device)[:, None] + keys - queries
    seen = (key <= position) | (not causal)
    return seen & (key > position - window) if window else seen


def _sequences(
    q: Tensor, k: Tensor, causal: bool, window: int | None, lengths: Lengths
) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """(rows of q that see a key, rows of k, which of these they see) of each sequence of which some query sees one."""
    first = last = 0
    for pair in [(len(q), len(k))] if lengths is None else lengths:
        queries, keys = pair if isinstance(pair, Sequence) else (pair, pair)
        seen = _seen(queries, keys, causal, window, q.device)
        some = seen.any(-1).nonzero()[:, 0]
        if len(some):
            yield first + some, slice(last, last + keys), seen[some]
        first, last = first + queries, last + keys


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    lengths: Lengths = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64, differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    scale, group = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for rows, keys, seen in _sequences(q, k, causal, window, lengths):
        own_k, own_v = (t[keys].repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        z = (q[rows].transpose(0, 1) @ own_k.mT * scale).masked_fill(~seen, -torch.inf)
        own_lse = z.logsumexp(-1)
        out[rows] = ((z - own_lse[..., None]).exp() @ own_v).transpose(0, 1)
        lse[rows] = own_lse.T
    return out, lse


def _slabs(seen: Tensor) -> Tensor:
    """Of the fold over the last dimension: those that hold something seen."""
    slab = CONTRACT["arithmetic"]["slab"]
    return pad(seen, (0, -seen.shape[-1] % slab)).unflatten(-1, (-1, slab)).any(-1).sum(-1)


@cache
def _of_slabs(dtype: torch.dtype, slabs: int) -> float:
    return factor("linear", dtype, CONTRACT["arithmetic"]["slab"] * slabs, "x")


@cache
def _up_to(dtype: torch.dtype, slabs: int, device: torch.device) -> Tensor:
    return torch.tensor([_of_slabs(dtype, n) for n in range(slabs + 1)], dtype=torch.float64, device=device)


def _fold(dtype: torch.dtype, seen: Tensor, group: int = 1) -> Tensor:
    """linear's c for each sum over what is seen, slab by slab, of `group` heads."""
    most = group * -(-seen.shape[-1] // CONTRACT["arithmetic"]["slab"])  # known without waiting for the device
    return _up_to(dtype, most, seen.device)[group * _slabs(seen)][:, None]


def _errors(logp: Tensor, h: Tensor) -> Tensor:
    """Of p, where log p errs by h but none is above 1."""
    p, h = logp.exp(), h * (1 + 2.0**-16)  # second order, which may be of a large exponent
    up = (logp + h).clamp(max=0.0).exp() - p
    return torch.where(logp.isfinite(), torch.maximum(up, -p * (-h).expm1()), 0.0)


def changes(logp: Tensor, a: Tensor, own: Tensor) -> Tensor:
    """log(p_j exp(a_j − own_j) + Σ_{i≠j} p_i exp(a_i + own_j)), without overflow or cancellation."""
    grown = logp + a
    total, largest = grown.logsumexp(-1, keepdim=True), grown.argmax(-1, keepdim=True)
    others = total + (-(grown - total).exp()).log1p()
    others.scatter_(-1, largest, grown.scatter(-1, largest, -torch.inf).logsumexp(-1, keepdim=True))
    return torch.logaddexp(grown - own, others + own)


@dataclass
class _Softmax:
    """The probabilities of one head of a sequence, (queries, keys), and the absolute errors that the forward makes of
    them; q (queries, D) and k (keys, D) in fp64. What is of a query alone is (queries, 1)."""

    lse: Tensor
    logp: Tensor  # −inf where nothing is seen
    p: Tensor
    d: Tensor  # of z, and f of the exponential beside that
    f: Tensor
    grown: Tensor  # log Σ p exp(d + f)
    error: Tensor  # of p, normalised
    most: Tensor  # that p is with its error
    steps: Tensor  # blocks from a key's own to the last one that its query sees
    fold: Tensor  # linear's c of the product with V
    sums: Tensor  # relative error of Σ p, but for that of p
    top: Tensor  # max z
    least: float  # what a rounding of p to the storage dtype, or a flush, may take near zero

    @classmethod
    def of(cls, q: Tensor, k: Tensor, seen: Tensor, scale: float, dtype: torch.dtype) -> "_Softmax":
        block, key = CONTRACT["arithmetic"]["attention_block"], torch.arange(len(k), device=k.device)
        z = q @ k.T * scale
        shown = z.masked_fill(~seen, -torch.inf)
        lse, top = shown.logsumexp(-1, keepdim=True), shown.amax(-1, keepdim=True)
        last = (seen * key).amax(-1, keepdim=True)
        steps = torch.where(seen, last // block - key // block + 1, 0).double()
        logp = shown - lse
        d = scale * factor("linear", dtype, q.shape[-1], "x") * (q.abs() @ k.abs().T + LEAST)
        f = UNIT * (3 * (top - z).clamp(min=0) + 4 + 4 * steps)
        grown = (logp + d + f).logsumexp(-1, keepdim=True)
        p, error = logp.exp(), _errors(logp, changes(logp, d + f, d + f))
        sums = UNIT * ((p + error) * (25 + 2 * steps)).sum(-1, keepdim=True)
        least = rounding(dtype)[1] + 2 * LEAST
        return cls(lse, logp, p, d, f, grown, error, p + error, steps, _fold(dtype, seen), sums, top, least)

    def stored(self, dtype: torch.dtype) -> Tensor:
        """Errors of p as the product with V takes it, but for those of that product: the same for all features."""
        return self.error + rounding(dtype)[0] * self.most + self.most.clamp(max=self.least)

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
        """Errors of p as the backward computes it from the lse."""
        lse, top = self.lse, self.top.abs()
        own = UNIT * (
            4 - (lse - self.top) + 2 * lse.abs() - top + 2 * self.logp.abs()
        )  # scale's own rounding is in both
        error = _errors(self.logp, changes(self.logp, self.d + self.f, self.d) + self.of_log_sum() + own)
        return error + (self.p + error).clamp(max=LEAST)


@torch.no_grad()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    lengths: Lengths = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """((out, S), (lse, S)) of packed sequences: q (tokens, heads, D), k and v (rows, key heads, D).

    lengths: of each sequence, or pairs of its queries and its keys, of which the last belong together; one of all rows
    unless given. A query that sees no key gives 0 and −inf, with S of 0.
    """
    out, lse = attended(q, k, v, causal, scale, window, lengths)
    of_out, of_lse = torch.zeros_like(out), torch.zeros_like(lse)
    scale, group = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    for rows, keys, seen in _sequences(q, k, causal, window, lengths):
        for head in range(q.shape[1]):
            own_k, own_v = (t[keys, head // group].double() for t in (k, v))
            s = _Softmax.of(q[rows, head].double(), own_k, seen, scale, q.dtype)
            error = (s.stored(q.dtype) + s.product()) @ own_v.abs()
            error += (out[rows, head].abs() + error) * (s.sums + 4 * UNIT) + s.underflow()
            of_out[rows, head] = error / UNIT
            of_lse[rows, head] = (s.grown + s.of_log_sum())[:, 0] / UNIT
    return (out, of_out), (lse, of_lse)


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
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    lengths: Lengths = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """(gradient, S) of q, k and v, inputs in fp64 that were of `dtype`; exact: the gradients without dS beyond its
    range.

    Such a dS makes infinities and NaN; where it is so close to the range's end that it may, or may not, S is infinite.
    """
    (u, tiny), width = rounding(dtype), q.shape[-1]
    scale, group = width**-0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    dot, tree = factor("linear", dtype, width, "x"), 2 * (2 * width) ** 0.5 + 9
    found = {name: torch.zeros_like(t) for name, t in (("q", q), ("k", k), ("v", v))}
    beyond = {name: torch.zeros_like(t) for name, t in found.items()}
    for rows, keys, seen in _sequences(q, k, causal, window, lengths):
        over_queries = _fold(dtype, seen.T, group)
        for head in range(q.shape[1]):
            of = head // group
            own_q, own_k, own_v, do = q[rows, head], k[keys, of], v[keys, of], d_out[rows, head]
            s = _Softmax.of(own_q, own_k, seen, scale, dtype)
            dp, of_dp, out = do @ own_v.T, do.abs() @ own_v.abs().T, s.p @ own_v
            inner, inner_ = (out * do).sum(-1, keepdim=True), (out * do).abs().sum(-1, keepdim=True)
            delta = inner - d_lse[rows, head, None]
            of_delta = (s.stored(dtype) * dp.abs() + s.product() * of_dp).sum(-1, keepdim=True) + s.sums * inner.abs()
            of_delta += (u + UNIT * (tree + 4)) * inner_ + UNIT * delta.abs()
            of_delta += (tiny + s.underflow()) * do.abs().sum(-1, keepdim=True)

            of_p = s.again()
            most, g = s.p + of_p, (dp - delta).abs()
            own = of_p * g + most * (dot * (of_dp + LEAST) + 2 * UNIT * g)  # of dS, but for what delta errs by
            of_ds = own + most * of_delta
            far = _beyond(s.p * (dp - delta), of_ds, dtype)
            beyond["q"][rows, head] = far @ own_k
            beyond["k"][keys, of] += far.T @ own_q
            ds = s.p * g + of_ds
            rounds = u * ds + ds.clamp(max=tiny)
            common = of_delta * ((s.p @ own_k).abs() + of_p @ own_k.abs())  # of delta, for all keys alike
            found["q"][rows, head] = scale * ((own + rounds + s.fold * ds) @ own_k.abs() + common + s.fold * LEAST)
            found["k"][keys, of] += scale * (
                (of_ds + rounds + over_queries.T * ds).T @ own_q.abs() + over_queries * LEAST
            )
            of_p += (u + over_queries.T) * most + most.clamp(max=tiny)
            found["v"][keys, of] += of_p.T @ do.abs() + over_queries * LEAST
    for name in ("q", "k"):
        found[name] += 2 * UNIT * exact[name].abs()
    return {name: _with_infinities(exact[name], t / UNIT, beyond[name], dtype) for name, t in found.items()}


def _with_infinities(exact: Tensor, magnitude: Tensor, beyond: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """beyond: what is infinite or NaN, and the sign of what may be; such an element counts as the largest finite
    number."""
    open_ = beyond.isfinite() & (beyond != 0)
    exact = torch.where(open_, beyond.sign() * torch.finfo(dtype).max, exact + beyond)
    return exact, magnitude.masked_fill(beyond != 0, torch.inf)
