"""fp64 references of the gradients: exact by autograd through `bi_kernels.reference`, S by the contract's formulas."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bi_kernels import reference, reference_attention
from bi_kernels.contract import CONTRACT, EPS, factor, rounding
from bi_kernels.reference import LEAST, UNIT, looked_up, total


class Gradient(NamedTuple):
    """What `contract.bound` needs after the op and the dtype: the exact gradient, S, and n."""

    exact: Tensor
    magnitude: Tensor
    n: int | Mapping[str, int] = 1


@dataclass
class _Call:
    """A call and what came back to it, in fp64: `dys` of the outputs, `exact` gradients by input."""

    dtype: torch.dtype
    dys: list[Tensor]
    dy: Tensor  # the first of them
    exact: dict[str, Tensor]
    slots: int


def _gelu(call: _Call, **inputs) -> dict:
    return {"x": call.dy.abs()}


def _silu(call: _Call, x: Tensor) -> dict:
    q = torch.sigmoid(x)
    return {"x": call.dy.abs() * (q * (1 + x.abs() * torch.sigmoid(-x)) * (7 + x.abs()) + 2.0**-103 * (1 + x.abs()))}


def _swiglu(call: _Call, gate: Tensor, up: Tensor) -> dict:
    return {"gate": up.abs() * (_silu(call, gate)["x"] + LEAST), "up": reference.swiglu(gate, call.dy)[1]}


def _geglu(call: _Call, gate: Tensor, up: Tensor, **how) -> dict:
    return {"gate": up.abs() * (call.dy.abs() + LEAST), "up": reference.geglu(gate, call.dy)[1]}


def _clamped_swiglu(
    call: _Call, gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0
) -> dict:
    g, u = reference.clamped(gate, up, limit)
    free, u = (gate == g, up == u), u + offset
    dy, t = call.dy.abs(), (alpha * g).abs()
    q = torch.sigmoid(alpha * g)
    b = q * (1 + t * torch.sigmoid(-alpha * g))
    of_gate = u.abs() * (b * (9 + 2 * t) + 2.0**-103 * (1 + t) + LEAST * g.abs()) + b * abs(offset)
    of_up = call.exact["up"].abs() * (5 + 2 * t) + (2.0**-103 * g.abs() + LEAST) * dy
    of_each = dy * of_gate + LEAST * u.abs(), of_up
    return {k: torch.where(mine, s, 0.0) for k, mine, s in zip(("gate", "up"), free, of_each)}


def _soft_cap(call: _Call, x: Tensor, cap: float) -> dict:
    t = (x / cap).abs().clamp(max=128)
    return {"x": call.exact["x"].abs() * (6 + 4 * t) + 2.0**-101 * call.dy.abs()}


def _copied(call: _Call, **inputs) -> dict:
    return {name: torch.zeros_like(exact) for name, exact in call.exact.items()}


def _itself(call: _Call, **inputs) -> dict:
    """Returns |exact| of every gradient: S of an op whose error is relative to its result."""
    return {name: exact.abs() for name, exact in call.exact.items()}


def _rope(call: _Call, x: Tensor, **constants) -> dict:
    return {"x": reference.rope(call.dy, **constants)[1]}


def _rows(t: Tensor) -> Tensor:
    return t.reshape(t.shape[:-1].numel(), t.shape[-1]).abs()


def _bias_add(call: _Call, **inputs) -> dict:
    return _copied(call) | {"bias": (_rows(call.dy).sum(0), call.slots)}


def _linear(call: _Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict:
    dy = call.dy.abs()
    return {
        "x": (dy @ weight.abs(), len(weight)),
        "weight": (_rows(dy).T @ _rows(x), call.slots),
        "bias": (_rows(dy).sum(0), call.slots),
    }


def _matmul(call: _Call, a: Tensor, b: Tensor) -> dict:
    found = _linear(call, a, b.T)
    return {"a": found["x"], "b": (found["weight"][0].T, call.slots)}


def _routed_linear(call: _Call, x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict:
    dy, places = _rows(call.dy), reference.by_expert(experts, len(weight))
    return {
        "x": (reference.routed_linear(call.dy.abs(), experts, weight.abs().mT)[0], weight.shape[1]),
        "weight": (torch.stack([dy[at].T @ _rows(x)[at] for at in places]), call.slots),
        "bias": (torch.stack([dy[at].sum(0) for at in places]), call.slots),
    }


def _routed_sum(call: _Call, y: Tensor, weights: Tensor, experts: Tensor) -> dict:
    return {"y": call.exact["y"].abs(), "weights": ((call.dy.unsqueeze(-2) * y).abs().sum(-1), y.shape[-1])}


def _mean(t: Tensor) -> Tensor:
    return t.mean(-1, keepdim=True)


def _rms_norm(
    call: _Call, x: Tensor, weight: Tensor | None, eps: float = EPS, heads: int = 1, offset: float = 0.0
) -> dict:
    (normed, rstd), dy, mean = reference.normalise(x, eps), call.dy.abs(), _mean
    weighted = dy if weight is None else dy * (offset + weight).abs()
    inner = mean(weighted * normed.abs()) + LEAST * (1 + mean(weighted))
    return {
        "x": (rstd * (weighted + LEAST + normed.abs() * inner), x.shape[-1]),
        "weight": (
            _rows(dy * normed).sum(0) + LEAST * (1 + _rows(dy)).sum(0),
            {"n": call.slots, "features": x.shape[-1], "heads": heads},
        ),
    }


def _qk_norm(call: _Call, x: Tensor, weight: Tensor | None, eps: float = EPS, offset: float = 0.0) -> dict:
    return _rms_norm(call, x, weight, eps, x.shape[-2], offset)


def _layer_norm(
    call: _Call,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    heads: bool = False,
) -> dict:
    (normed, rstd, far), dy, n = reference.centred(x, eps), call.dy.abs(), x.shape[-1]
    weighted, xhat, root = dy if weight is None else dy * weight.abs(), normed.abs(), math.sqrt(x.shape[-1])
    shift, along = _mean(weighted) + LEAST, _mean(weighted * xhat) + LEAST * (1 + _mean(weighted))
    again = 1 + 0.24 * UNIT * (5 * root + 45) * far.square()
    inner = again * (weighted + LEAST + shift + xhat * along) + 0.4 * far * (xhat * shift + along)
    terms = dy * xhat * (1 + 2 * UNIT * (root + 12) * far.square()) + dy * (2 * far + LEAST) + LEAST
    lengths = {"n": call.slots, "features": n, "heads": x.shape[-2] if heads else 1}
    return {"x": (rstd * inner, n), "weight": (_rows(terms).sum(0), lengths), "bias": (_rows(dy).sum(0), lengths)}


def _row_sum(call: _Call, x: Tensor, scale: float = 1.0) -> dict:
    return _itself(call)


def _softmax(call: _Call, x: Tensor) -> dict:
    p, of_p, dy = reference.softmax(x)[0], reference.softmax_errors(x), call.dy
    block, n, inner = CONTRACT["arithmetic"]["vocabulary_block"], x.shape[-1], total(p * dy)
    adds = 2 * math.sqrt(min(n, block)) + math.ceil(n / block) + 9
    of_inner = total(of_p * dy.abs()) + UNIT * adds * total(p * dy.abs()) + n * LEAST
    rest = (dy - inner).abs()
    return {"x": (of_p * rest + (p + of_p) * (of_inner + 2 * UNIT * rest) + LEAST) / UNIT}


def _scaled(call: _Call, x: Tensor, weight: Tensor) -> dict:
    terms = (call.dy * x).abs() + LEAST
    lengths = {"n": call.slots, "features": terms.shape[terms.dim() - weight.dim() :].numel() // max(1, weight.numel())}
    return {"x": call.exact["x"].abs(), "weight": (terms.sum_to_size(weight.shape), lengths)}


def _shifted(call: _Call, x: Tensor, weight: Tensor) -> dict:
    return _copied(call) | {"weight": (_rows(call.dy).sum(0), {"n": call.slots, "features": 1})}


def _add_rms_norm(
    call: _Call, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = EPS, offset: float = 0.0
) -> dict:
    found = _rms_norm(call, reference.stored_sum(x, residual, call.dtype), weight, eps, offset=offset)
    dx = found["x"][0] + call.dys[1].abs() / 40, x.shape[-1]
    return {"x": dx, "residual": dx, "weight": found["weight"]}


def _embedding(call: _Call, ids: Tensor, weight: Tensor, padding_id: int | None = None) -> dict:
    table = torch.zeros_like(weight, requires_grad=True)
    with torch.enable_grad():
        (magnitude,) = torch.autograd.grad(looked_up(ids, table, padding_id), table, call.dy.abs())
    counts = ids.flatten().bincount(minlength=len(weight))
    if padding_id is not None:
        counts[padding_id] = 0
    return {"weight": (magnitude, int(counts.max()))}


def _dlogits(
    call: _Call, z: Tensor, d: Tensor, targets: Tensor, temperature: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """(dlogits, their error), absolute, where each z errs by d: the contract's token_logprob.gradient.logits."""
    (g, g_entropy), ignored = ([t[..., None] for t in call.dys], (targets == ignore_index)[..., None])
    logp = reference.log_probabilities(z)
    p = logp.exp()
    one = torch.zeros_like(z).scatter_(-1, targets.long()[..., None].masked_fill(ignored, 0), 1.0)
    entropy = reference.entropies(p, logp)
    v = torch.where(logp.isfinite(), logp + entropy, 0.0)
    dlogits = (g * (one - p) - g_entropy * p * v) / temperature
    each, last, of_entropy = reference.logprob_errors(z, d)
    once_more = last + UNIT * (3 * logp.abs() + 4)
    h = torch.where(logp.isfinite(), each + once_more, 0.0)
    of_p = reference.probability_errors(logp, h)
    of_v = torch.where(of_p > 0, h + UNIT * v.abs() + of_entropy, 0.0)
    error = g.abs() * (of_p + 2 * UNIT * (one - p).abs())
    error += g_entropy.abs() * ((p + of_p) * of_v + of_p * v.abs() + 3 * UNIT * p * v.abs())
    error += LEAST * (g.abs() + g_entropy.abs() * v.abs().clamp(max=256))
    error = error / temperature + 3 * UNIT * dlogits.abs()
    return dlogits.masked_fill(ignored, 0.0), error.masked_fill(ignored, 0.0)


def _token_logprob(
    call: _Call, logits: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100
) -> dict:
    _, error = _dlogits(call, *reference.tempered(logits, temperature), targets, temperature, ignore_index)
    return {"logits": error / UNIT}


def _log_softmax(call: _Call, logits: Tensor) -> dict:
    logp, summed = reference.log_probabilities(logits), total(call.dy)
    each, last, _ = reference.logprob_errors(logits, torch.zeros_like(logits))
    once_more = last + UNIT * (3 * logp.abs() + 4)
    of_p = reference.probability_errors(logp, each + once_more)
    p = logp.exp()
    error = summed.abs() * (of_p + UNIT * p + LEAST) + p * last * total(call.dy.abs())
    return {"logits": error / UNIT + call.exact["logits"].abs()}


def _lm_head_logprob(
    call: _Call, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100
) -> dict:
    u, tiny = rounding(call.dtype)
    z, d = reference.lm_head_logits(hidden.to(call.dtype), weight.to(call.dtype), temperature)
    dlogits, error = (_rows(t) for t in _dlogits(call, z, d, targets, temperature, ignore_index))
    ignored = (targets == ignore_index).reshape(-1, 1)
    error = ((1 + u) * error + u * dlogits + tiny).masked_fill(ignored, 0.0)
    fold = lambda n, name: factor("linear", call.dtype, n, name)
    hidden_error = (error + fold(len(weight), "x") * (dlogits + error)) @ weight.abs()
    weight_error = (error + fold(call.slots, "weight") * (dlogits + error)).T @ _rows(hidden)
    return {"hidden": hidden_error.reshape(hidden.shape) / UNIT, "weight": weight_error / UNIT}


def _attention(call: _Call, **given) -> dict:
    return reference_attention.gradients(call.dtype, *call.dys, call.exact, **given)


_add = _mask_fill = _cast = _copied


def _outputs(op: str, dtype: torch.dtype, given: Mapping[str, Any]) -> list[Tensor]:
    if op == "add_rms_norm":  # the storage dtype is no longer that of the inputs
        h = reference.stored_sum(given["x"], given["residual"], dtype)
        return [reference.rms_norm(h, given.get("weight"), given.get("eps", EPS), given.get("offset", 0.0))[0], h]
    if op == "lm_head_logprob":
        logits = reference.overflown(given["hidden"] @ given["weight"].T, dtype)
        z = logits / given.get("temperature", 1.0)
        return list(reference.selected(z, given["targets"], given.get("ignore_index", -100)))
    if op == "attention":
        return list(reference_attention.attended(**given))
    y, other = getattr(reference, op)(**given)
    return [y] if isinstance(y, Tensor) else [y[0], other[0]]


def _slots(lengths: Sequence[int] | None, lead: Sequence[int]) -> int:
    """Of the fold over the tokens of `lengths`, or of a (..., length) batch, each sequence filled up to a slab."""
    (*outer, length), slab = lead or (1,), CONTRACT["arithmetic"]["slab"]
    lengths = [length] * torch.Size(outer).numel() if lengths is None else lengths
    return sum(-(-n // slab) * slab for n in lengths)


def gradient(
    op: str,
    inputs: Mapping[str, Tensor],
    constants: Mapping[str, Any],
    upstream: Tensor | Sequence[Tensor | None],
    lengths: Sequence[int] | None = None,
) -> dict[str, Gradient]:
    """Returns the gradient of every floating-point input by name, in fp64 on its device, as `contract.bound` wants it:

        for name, found in gradient("linear", {"x": x, "weight": weight}, {}, dy).items():
            limit = contract.bound("linear", dtype, *found, gradient=name, inputs=x.dtype)

    op: the name of a function of `bi_kernels.reference`; inputs: its tensors in the dtypes the op was given; upstream:
    the gradient of its output, or of each of two, None for zeros; lengths: of the sequences that the token rows hold
    one after another, where they are not those of their (..., length); of attention, one sequence unless given.
    """
    if op == "attention":
        constants, lengths = {"lengths": lengths, **constants}, None
    tensors = {k: t for k, t in inputs.items() if t is not None}
    leaves = {k: t.detach().double().requires_grad_() for k, t in tensors.items() if t.is_floating_point()}
    first = tensors[next(iter(leaves))]
    outputs = _outputs(op, first.dtype, {**tensors, **leaves, **constants})
    given = [upstream] if isinstance(upstream, Tensor) else upstream
    dy = [torch.zeros_like(y) if g is None else g.detach().double() for y, g in zip(outputs, given, strict=True)]
    found = torch.autograd.grad(outputs, list(leaves.values()), dy)
    exact = dict(zip(leaves, found))
    of_heads = op in ("qk_norm", "attention")
    lead = tensors["ids"].shape if op == "embedding" else first.shape[:-2] if of_heads else first.shape[:-1]
    call = _Call(first.dtype, dy, dy[0], exact, _slots(lengths, lead))
    with torch.no_grad():
        plain = {k: t.detach() for k, t in leaves.items()}
        of_op = globals().get(f"_{op}", _itself)
        rows = of_op(call, **{**tensors, **plain, **constants})
    return {k: Gradient(g, *(rows[k] if isinstance(rows[k], tuple) else (rows[k],))) for k, g in exact.items()}
