"""fp64 references: name(...) returns (y, S), the exact result and the sum of magnitudes that the contract's bound uses;
an op with two outputs returns two such pairs.

Inputs are the op's own inputs, already rounded to their dtype, upcast to fp64 here. Nothing is rounded on the way but
the h of add_rms_norm, an output itself; where the LM head rounds its logits, S says what that may change. The
gradients are in `bi_kernels.reference_gradients`.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding as _embedding
from torch.nn.functional import gelu as _gelu

from bi_kernels.contract import CONTRACT, EPS, bound
from bi_kernels.reference_attention import LEAST, UNIT, attention, changes, log_total, probability_errors, total  # noqa: F401

Pair = tuple[Tensor, Tensor]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Pair:
    x, w, b = x.double(), weight.double(), 0.0 if bias is None else bias.double()
    return x @ w.T + b, x.abs() @ w.abs().T + abs(b)


def matmul(a: Tensor, b: Tensor) -> Pair:
    return linear(a, b.T)


def _frequencies(dim: int, scaling: Mapping | None) -> tuple[Tensor, float]:
    """(radians a position of each pair at rope_table's default theta, what multiplies cos and sin)."""
    i, theta = torch.arange(0, dim, 2, dtype=torch.float64), 10000.0
    given = {"rope_type": "default", "factor": 1.0, **(scaling or {})}
    trained, slow = given.get("original_max_position_embeddings", math.inf), theta ** (-i / dim) / given["factor"]
    turns = trained * theta ** (-i / dim) / (2 * math.pi)
    if given["rope_type"] == "ntk":
        return (theta * given["factor"] ** (dim / max(dim - 2, 1))) ** (-i / dim), 1.0
    if given["rope_type"] == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        mixed = slow + (theta ** (-i / dim) - slow) * (turns - low) / (high - low)
        return torch.where(turns > high, theta ** (-i / dim), torch.where(turns < low, slow, mixed)), 1.0
    if given["rope_type"] == "yarn":  # with the defaults of its options
        pair = lambda turns: math.log(trained / (2 * math.pi * turns), theta) * dim / 2
        low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dim - 1)
        share = ((i / 2 - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return share * slow + (1 - share) * theta ** (-i / dim), 1 + 0.1 * math.log(given["factor"])
    return slow, 1.0


def rope(x: Tensor, table, positions: Tensor, interleaved: bool = False, scaling: Mapping | None = None) -> Pair:
    """From the angles themselves, at rope_table's default theta; of `table` the width alone is used."""
    dim = 2 * table.cos.shape[-1]
    frequency, factor = _frequencies(dim, scaling)
    angle = positions.double()[..., None, None] * frequency.to(x.device)
    (cos, sin), x = (factor * part for part in (angle.cos(), angle.sin())), x.double()
    x, rest = x[..., :dim], x[..., dim:]
    x1, x2 = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    join = lambda *halves: torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    a, b, c, d = x1 * cos, x2 * sin, x2 * cos, x1 * sin
    beside = lambda turned, rest: torch.cat((turned, rest), -1)
    return beside(join(a - b, c + d), rest), beside(join(a.abs() + b.abs(), c.abs() + d.abs()), torch.zeros_like(rest))


def silu(x: Tensor) -> Pair:
    x = x.double()
    y = x * torch.sigmoid(x)
    return y, y.abs() * (4 + x.abs()) + 2.0**-103 * x.abs()


def swiglu(gate: Tensor, up: Tensor) -> Pair:
    (y, magnitude), up = silu(gate), up.double()
    return y * up, (magnitude + LEAST) * up.abs()


def gelu(x: Tensor, approximate: str = "none") -> Pair:
    x = x.double()
    if approximate == "tanh":
        y = x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    else:
        y = _gelu(x)
    return y, x.abs()


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Pair:
    (y, magnitude), up = gelu(gate, approximate), up.double()
    return y * up, (magnitude + LEAST) * up.abs()


def clamped(gate: Tensor, up: Tensor, limit: float) -> Pair:
    """Both, clamped to a limit of fp32."""
    limit = torch.tensor(limit, dtype=torch.float32).item()
    return gate.double().clamp(max=limit), up.double().clamp(-limit, limit)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Pair:
    g, u = clamped(gate, up, limit)
    f, u = g * torch.sigmoid(alpha * g), u + offset
    y = f * u
    return y, y.abs() * (5 + 2 * (alpha * g).abs()) + f.abs() * abs(offset) + (2.0**-103 * g.abs() + LEAST) * u.abs()


def soft_cap(x: Tensor, cap: float) -> Pair:
    t = x.double() / cap
    e = torch.exp(-2 * t.abs())  # from 1 on: the gradient of tanh cancels there
    y = cap * torch.where(t.abs() < 1, t.tanh(), t.sign() * (1 - e) / (1 + e))
    return y, y.abs()


def add(x: Tensor, residual: Tensor) -> Pair:
    return x.double() + residual.double(), x.double().abs() + residual.double().abs()


def scale(x: Tensor, factor: float) -> Pair:
    y = x.double() * factor
    return y, y.abs()


def bias_add(x: Tensor, bias: Tensor) -> Pair:
    return add(x, bias)


def _rounded_nowhere(y: Tensor) -> Pair:
    return y, torch.zeros_like(y)


def mask_fill(x: Tensor, mask: Tensor, value: float) -> Pair:
    return _rounded_nowhere(x.double().masked_fill(mask, value))


def cast(x: Tensor, dtype: torch.dtype) -> Pair:
    return _rounded_nowhere(x.double())


def normalise(x: Tensor, eps: float) -> Pair:
    """(x rstd, rstd) of fp64 rows."""
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * rstd, rstd


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = EPS, offset: float = 0.0) -> Pair:
    w = torch.ones_like(x[..., :1], dtype=torch.float64) if weight is None else offset + weight.double()
    y = normalise(x.double(), eps)[0] * w
    return y, y.abs() + LEAST * w.abs()


qk_norm = rms_norm


def stored_sum(x: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    """x + residual, rounded to fp32 and to `dtype`; its gradient is that of the sum."""
    exact = x.double() + residual.double()
    stored = (x.detach().float() + residual.detach().float()).to(dtype).double()
    return torch.where(exact.isfinite(), exact + (stored - exact).detach(), exact)


def centred(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """((x - mean) rstd, rstd, rstd mean |x|) of fp64 rows: the last is what errors of the mean weigh."""
    rest = x - x.mean(-1, keepdim=True)
    rstd = (rest.square().mean(-1, keepdim=True) + eps).rsqrt()
    return rest * rstd, rstd, rstd * x.detach().abs().mean(-1, keepdim=True)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, heads: bool = False
) -> Pair:
    (normed, _, far), n = centred(x.double(), eps), x.shape[-1]
    w = torch.ones((), dtype=torch.float64, device=x.device) if weight is None else weight.double()
    b = torch.zeros_like(w) if bias is None else bias.double()
    y, again = normed * w, 1 + 2.0**-23 * (math.sqrt(n) + 13) * far.square()
    return y + b, again * y.abs() + b.abs() + w.abs() * (2 * far + LEAST)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = EPS, offset: float = 0.0
) -> tuple[Pair, Pair]:
    """y is judged as the norm of h as it is stored, and h as the exact sum."""
    h = x.double() + residual.double()
    return rms_norm(stored_sum(x, residual, x.dtype), weight, eps, offset), (h, h.abs() / 10)


def looked_up(ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
    """weight[ids]; without columns, of which torch's backward reads address 0 on a GPU (pytorch#189668), too."""
    return _embedding(ids, weight, padding_id) if weight.shape[1] else weight.sum(0).expand(*ids.shape, 0)


def embedding(ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Pair:
    return _rounded_nowhere(looked_up(ids, weight.double(), padding_id))


def log_probabilities(z: Tensor) -> Tensor:
    """NaN throughout a row that holds NaN, +Inf, or -Inf alone."""
    shifted = z - z.amax(-1, keepdim=True).detach()
    return shifted - total(shifted.exp()).log()


def entropies(p: Tensor, logp: Tensor) -> Tensor:
    return -total(p * logp.where(p > 0, 0.0))


@torch.no_grad()
def logprob_errors(z: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(of each log p, L, of the entropy), absolute, where each z errs by at most d: the contract's token_logprob."""
    block, vocab = CONTRACT["arithmetic"]["vocabulary_block"], z.shape[-1]
    logp, top = log_probabilities(z), z.amax(-1, keepdim=True)
    p, log_sum = logp.exp(), -logp.amax(-1, keepdim=True)
    sums = 2 * math.sqrt(min(vocab, block)) + math.ceil(vocab / block) + 13
    last = UNIT * (sums + 4 + 6 * log_sum + (top + log_sum).abs())
    f = UNIT * (3 * (top - z) + 4)
    a = d + f
    finite = logp.isfinite()
    lse = log_total(torch.where(finite, logp + a, -torch.inf))
    each = changes(logp, a.where(finite, 0.0), d.where(finite, 0.0)).where(finite, torch.inf)
    entropy = entropies(p, logp)
    weigh = lambda t: total(torch.where(p > 0, p * t, 0.0))
    changed = probability_errors(logp, a + lse)
    of_entropy = total(torch.where(changed > 0, changed * ((logp + entropy).abs() + a + lse), 0.0))
    mean = weigh(z).abs()
    of_entropy += weigh(f) + last + UNIT * ((sums + 3) * (weigh(z.abs()) + mean) + mean + entropy)
    return each, last, of_entropy


def selected(z: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """log p of the targets and the entropy, 0 where ignored."""
    logp, ignored = log_probabilities(z), targets == ignore_index
    entropy = entropies(logp.exp(), logp)[..., 0]
    return at_targets(logp, targets, ignored), entropy.masked_fill(ignored, 0.0)


def at_targets(t: Tensor, targets: Tensor, ignored: Tensor) -> Tensor:
    return t.gather(-1, targets.long().masked_fill(ignored, 0)[..., None])[..., 0].masked_fill(ignored, 0.0)


def _logprob(z: Tensor, d: Tensor, targets: Tensor, ignore_index: int) -> tuple[Pair, Pair]:
    (logprob, entropy), ignored = selected(z, targets, ignore_index), targets == ignore_index
    each, last, of_entropy = logprob_errors(z, d)
    of_logprob = at_targets(each + last, targets, ignored) + UNIT * logprob.abs()
    return (logprob, of_logprob / UNIT), (entropy, of_entropy[..., 0].masked_fill(ignored, 0.0) / UNIT)


def tempered(logits: Tensor, temperature: float) -> Pair:
    """z = logits / temperature, and the error of fp32's 1 / temperature and product."""
    z = logits.double() / temperature
    return z, torch.zeros_like(z) if temperature == 1 else 2 * UNIT * z.abs()


def token_logprob(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[Pair, Pair]:
    return _logprob(*tempered(logits, temperature), targets, ignore_index)


def log_softmax(logits: Tensor) -> Pair:
    z = logits.double()
    y = log_probabilities(z)
    each, last, _ = logprob_errors(z, torch.zeros_like(z))
    return y, (each + last) / UNIT + y.detach().abs()


def row_sum(x: Tensor, scale: float = 1.0) -> Pair:
    x = x.double()
    return x.sum(-1) * scale, x.abs().sum(-1) * abs(scale)


@torch.no_grad()
def softmax_errors(z: Tensor) -> Tensor:
    """Of each probability, absolute."""
    block, n, logp = CONTRACT["arithmetic"]["vocabulary_block"], z.shape[-1], log_probabilities(z)
    f, finite = UNIT * (3 * (z.amax(-1, keepdim=True) - z) + 4), logp.isfinite()
    of_sum = log_total(torch.where(finite, logp + f, -torch.inf))
    h = f + of_sum + UNIT * (2 * math.sqrt(min(n, block)) + math.ceil(n / block) + 9)
    return probability_errors(logp, h.where(finite, 0.0)) + 2 * LEAST


def softmax(x: Tensor) -> Pair:
    z = x.double()
    return log_probabilities(z).exp(), softmax_errors(z.detach()) / UNIT


def scaled(x: Tensor, weight: Tensor) -> Pair:
    y = x.double() * weight.double()
    return y, y.abs()


def shifted(x: Tensor, weight: Tensor) -> Pair:
    return add(x, weight)


def lm_head_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Pair:
    """z, and its error: that of a logit, rounded to the storage dtype, and that of the temperature."""
    logits, magnitude = linear(hidden, weight)
    logits = overflown(logits, hidden.dtype)
    z, d = tempered(logits, temperature)
    return z, d + bound("linear", hidden.dtype, logits, magnitude, hidden.shape[-1]) / temperature


def overflown(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, infinite where a rounding to `dtype` makes it so."""
    return x + torch.where(x.detach().to(dtype).isinf(), x.detach().sign() * torch.inf, 0.0)


def lm_head_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[Pair, Pair]:
    return _logprob(*lm_head_logits(hidden, weight, temperature), targets, ignore_index)


def by_expert(experts: Tensor, count: int) -> list[Tensor]:
    """Returns the flat places at which each expert stands."""
    return [(experts.flatten() == e).nonzero().flatten() for e in range(count)]


def routed_linear(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None = None) -> Pair:
    rows, places = x.reshape(-1, x.shape[-1]), by_expert(experts, len(weight))
    parts = [
        linear(looked_up(at, rows.double()), weight[e], None if bias is None else bias[e])
        for e, at in enumerate(places)
    ]
    back = torch.cat(places).argsort()
    return tuple(looked_up(back, torch.cat(part)).view(*x.shape[:-1], weight.shape[1]) for part in zip(*parts))


def routed_sum(y: Tensor, weights: Tensor, experts: Tensor) -> Pair:
    products = y.double() * weights.double()[..., None]
    return products.sum(-2), products.abs().sum(-2)
