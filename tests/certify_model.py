"""A language model of one attention layer that samples, decodes and rescores as engines and trainers do, each with the
mistakes that they make."""

from dataclasses import dataclass

import numpy as np
import torch

PROMPT, LONGEST, SAMPLES, VOCABULARY, WIDTH = 8, 64, 48, 128, 32


@dataclass(frozen=True)
class Engine:
    """How logprobs are computed. Defaults: fp32, plain."""

    seed: int = 0  # of the weights
    drift: float = 0.0  # of the weights, as after steps of training
    adapter: bool = False
    quantised: str = ""  # fp8 or int8 weights, "kv" for an fp8 cache
    dtype: torch.dtype = torch.float32  # of activations
    ranks: int = 1  # of tensor parallelism
    split: int = 0  # keys of each part of attention, from as many positions on
    temperature: float = 1.0
    cap: float = 0.0  # of logits
    padded: int = 0  # rows of the vocabulary, with a logit of `pad_logit`
    pad_logit: float = 0.0
    penalty: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    softmax: torch.dtype = torch.float32
    rope_above: int = 0  # rope is scaled for sequences that are longer
    scale: float = 3.0


def weights(e: Engine) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(e.seed)
    draw = lambda *shape: torch.randn(shape, generator=g)
    w = {
        "embedding": draw(VOCABULARY, WIDTH),
        "head": draw(VOCABULARY, WIDTH) / WIDTH**0.5,
        "gate": draw(WIDTH) / WIDTH**0.5,
    }
    w |= {name: draw(WIDTH, WIDTH) / WIDTH**0.5 for name in ("q", "k", "v", "o")}
    low = draw(WIDTH, 2) @ draw(2, WIDTH) / WIDTH
    noise = {name: draw(*t.shape) * t.std() for name, t in w.items()}
    w = {name: t + e.drift * noise[name] for name, t in w.items()}
    w["o"] = w["o"] + low * (0.5 * e.adapter)
    if e.quantised == "fp8":
        w = {name: t.to(torch.float8_e4m3fn).float() for name, t in w.items()}
    if e.quantised == "int8":
        step = {name: t.abs().amax() / 127 for name, t in w.items()}
        w = {name: (t / step[name]).round() * step[name] for name, t in w.items()}
    return w


def rope(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(x.shape[1])[:, None] * 10.0 ** -torch.linspace(0, 3, WIDTH // 2) / factor[:, None, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def logits(ids: torch.Tensor, lengths: torch.Tensor, e: Engine) -> torch.Tensor:
    """(samples, positions, vocabulary), each of the token that follows."""
    w = {name: t.to(e.dtype) for name, t in weights(e).items()}
    x = w["embedding"][ids]
    factor = torch.where(lengths > e.rope_above, 4.0, 1.0) if e.rope_above else torch.ones(len(ids))
    q, k = (rope((x @ w[name]).float(), factor).to(e.dtype) for name in "qk")
    v = x @ w["v"]
    if e.quantised == "kv":
        k, v = (t.to(torch.float8_e4m3fn).to(t.dtype) for t in (k, v))
    count = ids.shape[1]
    scores = (q @ k.mT).float() * (2 / WIDTH**0.5)
    p = scores.masked_fill(~torch.ones(count, count).tril().bool(), -torch.inf).softmax(-1).to(e.dtype)
    y = p @ v
    if e.split:
        parts = sum(p[:, :, i::3] @ v[:, i::3] for i in range(3))
        y = torch.where(torch.arange(count)[:, None] >= e.split, parts, y)
    cut = WIDTH // e.ranks
    reduced = (y[..., i * cut : (i + 1) * cut] @ w["o"][i * cut : (i + 1) * cut] for i in range(e.ranks))
    h = x + sum(reduced)
    h = (h.float() * torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 2.0**-20)).to(e.dtype)
    z = (h @ w["head"].mT).float() * e.scale * (0.3 + 1.4 * torch.sigmoid(3 * (h @ w["gate"]).float()))[..., None]
    return e.cap * (z / e.cap).tanh() if e.cap else z


def logprobs(z: torch.Tensor, ids: torch.Tensor, e: Engine) -> torch.Tensor:
    """Log-probabilities of every token at every position, as an engine reports them."""
    if e.penalty != 1:
        seen = torch.nn.functional.one_hot(ids, VOCABULARY).cumsum(1) > 0
        z = torch.where(seen, torch.where(z > 0, z / e.penalty, z * e.penalty), z)
    z = z / e.temperature
    if e.top_k:
        z = z.masked_fill(z < z.topk(e.top_k).values[..., -1:], -torch.inf)
    if e.top_p < 1:
        chance, order = z.softmax(-1).sort(-1, descending=True)
        late = chance.cumsum(-1) - chance >= e.top_p
        z = z.masked_fill(late.gather(-1, order.argsort(-1)), -torch.inf)
    if e.padded:
        z = torch.cat([z, torch.full((*z.shape[:-1], e.padded), e.pad_logit)], -1)
    if e.softmax != torch.float32:
        return z.to(e.softmax).float().softmax(-1).to(e.softmax).float().log()[..., :VOCABULARY]
    return z.log_softmax(-1)[..., :VOCABULARY]


def generate(e: Engine, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, lengths) of samples that begin with a prompt of PROMPT tokens."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(PROMPT + 12, LONGEST + 1, (SAMPLES,), generator=g)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, PROMPT), generator=g)
    while ids.shape[1] < LONGEST:
        last = logprobs(logits(ids, lengths, e), ids, e)[:, -1].exp()
        ids = torch.cat([ids, torch.multinomial(last.clamp_min(0), 1, generator=g)], 1)
    return ids, lengths


def score(ids: torch.Tensor, lengths: torch.Tensor, e: Engine) -> torch.Tensor:
    """(samples, positions): the logprob of each token, that of the first one 0."""
    every = logprobs(logits(ids, lengths, e), ids, e)[:, :-1]
    return torch.cat([torch.zeros(len(ids), 1), every.gather(-1, ids[:, 1:, None])[..., 0]], 1)


def columns(
    ids: torch.Tensor, lengths: torch.Tensor, values: torch.Tensor, start: int = PROMPT
) -> dict[str, np.ndarray]:
    """A capture of the completions."""
    position = torch.arange(ids.shape[1]).expand_as(ids)
    sample = torch.arange(len(ids))[:, None].expand_as(ids)
    rows = (position >= start) & (position < lengths[:, None])
    picked = {"sample": sample, "position": position, "token": ids, "logprob": values}
    return {name: t[rows].numpy() for name, t in picked.items()}
