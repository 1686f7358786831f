"""Generates from a running batch that sequences join and leave, and scores what it generated in one packed call.

A token's logits have the same bits in every batch, and its noise is a function of (seed, sample, position): so a
prompt's continuation depends on neither the batch, nor its size, nor when it joined, and its logprobs are those that a
training step computes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bi_kernels.model.cache import Cache, packed
from bi_kernels.model.decoder import Decoder
from bi_kernels.ops.sample import sample


@dataclass
class Generated:
    """What a prompt was continued with."""

    number: int  # of the prompt
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of ids, fp32, under the policy that drew them


class Batch:
    """Rows of a cache, in each of which a sequence runs or none; one token a step for all, as a CUDA graph on a GPU."""

    def __init__(self, model: Decoder, rows: int, capacity: int, seed: int, temperature: float, graph: bool):
        device = model.embedding.device
        self.model, self.seed, self.temperature = model, seed, temperature
        self.cache = Cache(model.config, rows, capacity, model.embedding, model.key_heads)
        self.ids, self.samples, self.running = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.drawn = self.ids, torch.zeros(rows, device=device)  # the last tokens and their logprobs
        self.step: Callable[[], None] = self._decode
        if graph and device.type == "cuda":
            self._decode()  # compiles
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self._decode()
            self.step = captured.replay

    def join(self, rows: Sequence[int], prompts: Sequence[list[int]], samples: Sequence[int]) -> None:
        """Computes prompts in one packed call, and draws the first token of each."""
        device = self.ids.device
        lengths = [len(p) for p in prompts]
        there = torch.tensor(rows, device=device)
        ids = torch.tensor([i for p in prompts for i in p], device=device)
        hidden = self.model(ids, self.cache.joining(rows, lengths), self.cache)
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        self.samples[there], self.running[there] = torch.tensor(samples, device=device), 1
        for kept, new in zip(self.drawn, self._draw(hidden[last], self.samples[there], self.cache.lengths[there])):
            kept[there] = new

    def leave(self, rows: Sequence[int]) -> None:
        """Frees rows."""
        there = torch.tensor(rows, device=self.ids.device)
        self.running[there], self.cache.lengths[there] = 0, 0

    def _decode(self) -> None:
        """Computes the last token of every running sequence, and draws the next."""
        hidden = self.model(self.ids[:, None], self.cache.rows(1, self.running), self.cache)[:, 0]
        for kept, new in zip(self.drawn, self._draw(hidden, self.samples, self.cache.lengths)):
            kept.copy_(new)

    def _draw(self, hidden: Tensor, samples: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(hidden)
        ids = sample(logits, self.seed, samples, positions, self.temperature)
        return ids, self.model.ops.token_logprob(logits, ids, self.temperature or 1.0)[0]


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    stop: Sequence[int] = (),
    seed: int = 0,
    temperature: float = 1.0,
    batch: int = 64,
    samples: Sequence[int] | None = None,
    graph: bool = True,
) -> Iterator[Generated]:
    """Yields each prompt's continuation as it ends: after a token of `stop`, which it keeps, or max_new_tokens.

    max_new_tokens: of all prompts, or of each; temperature 0 takes the likeliest token; batch: sequences that run at a
    time; samples: the number that draws a prompt's noise, its place unless given, so that one prompt may be continued
    in several ways; graph: decode in a CUDA graph, on a GPU. Raises ValueError with one sentence.
    """
    prompts = [list(map(int, p)) for p in prompts]
    most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    numbers = list(range(len(prompts)) if samples is None else samples)
    for name, given in (("max_new_tokens", most), ("samples", numbers)):
        if len(given) != len(prompts):
            raise ValueError(f"generate: {name} holds {len(given)} numbers, expected {len(prompts)}, one a prompt")
    if not prompts or not min(map(len, prompts)) or min(most) < 1 or batch < 1:
        raise ValueError(
            f"generate: {len(prompts)} prompts of {min(map(len, prompts), default=0)} tokens or more, max_new_tokens "
            f"of {min(most, default=0)} or more and batch {batch}, expected at least 1 of each"
        )
    longest = max(len(p) + n for p, n in zip(prompts, most))
    if longest > len(model.table.cos):
        raise ValueError(f"generate: {longest} tokens with the new ones, expected at most {len(model.table.cos)}")
    running = Batch(model, min(batch, len(prompts)), longest, seed, temperature, graph)
    slots: list[Generated | None] = [None] * len(running.ids)
    waiting = list(range(len(prompts)))[::-1]
    while waiting or any(slots):
        free = [row for row, one in enumerate(slots) if one is None][: len(waiting)]
        if any(slots):
            running.step()
            yield from _collect(running, slots, most, stop)
        if free:
            joining = [waiting.pop() for _ in free]
            running.join(free, [prompts[i] for i in joining], [numbers[i] for i in joining])
            for row, i in zip(free, joining):
                slots[row] = Generated(i, prompts[i])
            yield from _collect(running, slots, most, stop, free)


def _collect(running: Batch, slots: list, most: list[int], stop: Sequence[int], rows: list[int] | None = None):
    """Takes the tokens just drawn, of some rows or of all; yields the sequences that end."""
    ids, logprobs = (t.tolist() for t in running.drawn)  # waits for the device
    ended = []
    for row in range(len(slots)) if rows is None else rows:
        if (one := slots[row]) is not None:
            one.ids.append(ids[row])
            one.logprobs.append(logprobs[row])
            if ids[row] in stop or len(one.ids) == most[one.number]:
                ended.append(row)
    if ended:
        running.leave(ended)
    for row in ended:
        yield slots[row]
        slots[row] = None


def score(model: Decoder, generated: Sequence[Generated], temperature: float = 1.0) -> list[Tensor]:
    """Returns the logprobs of each continuation's tokens, (new tokens,) fp32, all sequences in one packed call; with
    gradients where they are wanted."""
    device = model.embedding.device
    whole = [[*g.prompt, *g.ids] for g in generated]
    targets = [[-100] * (len(g.prompt) - 1) + g.ids for g in generated]
    ids, wanted = (
        torch.tensor([i for s in lists for i in s], device=device) for lists in ([s[:-1] for s in whole], targets)
    )
    lengths = [len(s) - 1 for s in whole]
    logprob, _ = model.logprobs(ids, wanted, packed(lengths, device), temperature=temperature)
    return [part[len(part) - len(g.ids) :] for part, g in zip(logprob.split(lengths), generated)]


def policy_loss(
    logprob: Tensor, old: Tensor, advantages: Tensor, active: Tensor, denominator: int, clip: float = 0.2
) -> Tensor:
    """Returns GRPO's clipped loss of the tokens of one micro-batch; Shao et al., arXiv 2402.03300, without its KL term.

    logprob, old, advantages: (…) fp32 of each token, under the policy and under that which sampled it; active: (…)
    bool, the tokens that count; denominator: how many of them the whole step has, so that no split changes a weight.
    """
    ratio = (logprob - old).exp()
    gained = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -gained.masked_fill(~active, 0).sum() / denominator
