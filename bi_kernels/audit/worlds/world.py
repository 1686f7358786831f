"""How a step is cut over ranks, and the step itself: what every rank computes, and leaves as evidence."""

import base64
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import bi_kernels
from bi_kernels.audit.chain.layouts import THREADS, hash_of
from bi_kernels.audit.problem.inputs import generator
from bi_kernels.audit.worlds.first import watched
from bi_kernels.contract import CONTRACT, DTYPES
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Cache, Decoder, packed, policy_loss
from bi_kernels.ops.vocabulary import BLOCK
from bi_kernels.parallel.tensor import TensorParallel

LEAVES = 4  # parts of a weight's rows that are hashed apart, so that a rank can hash what it has of them


class World(NamedTuple):
    """How many ranks share each weight, and how many share the groups of sequences. tokens: norms and residuals are
    shared as well, by tokens."""

    tp: int = 1
    dp: int = 1
    tokens: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def name(self) -> str:
        name = "×".join(f"{what}{n}" for what, n in zip(("tp", "dp"), self) if n > 1) or "1"
        return name + " by tokens" * self.tokens


WORLDS = World(), World(2, 1), World(2, 1, tokens=True), World(1, 2), World(4, 1), World(1, 4), World(2, 2)


def case(shapes: str) -> dict:
    """Returns what the contract's [chain.world] says of a shape set."""
    return CONTRACT["chain"]["world"]["tiny" if shapes == "tiny" else "real"]


class Way(NamedTuple):
    """How a world computes: the ops over a group, and what joins the gradients. forward: nothing but logprobs; steps:
    so many of the case's, all unless given."""

    ops: Callable[[dist.ProcessGroup, bool], object] = TensorParallel
    grads: Callable[..., MainGrads] = MainGrads
    forward: bool = False
    steps: int | None = None


class WorldStep:
    """A decoder's training steps over the ranks of a world; this process alone where there is no group.

    tensor, data: the groups of a mesh; tokens: as a World has it.
    """

    def __init__(
        self,
        shapes: str,
        dtype: str,
        device: torch.device,
        seed: int,
        way: Way,
        tensor: dist.ProcessGroup | None = None,
        data: dist.ProcessGroup | None = None,
        tokens: bool = False,
    ):
        self.case, self.device, self.way = case(shapes), device, way
        config = replace(CONFIGS[self.case["model"]], layers=self.case["layers"])
        ops = bi_kernels if tensor is None else way.ops(tensor, tokens)
        longest = max(self.case["long"], *self.case["lengths"])
        self.model = Decoder(config, device, DTYPES[dtype], seed, longest, checkpointing=True, ops=ops)
        self.data, self.tensor = data, tensor
        self.lengths = self.case["lengths"]
        g, count = generator(device, seed, "world"), sum(self.lengths)
        draw = lambda: torch.randint(0, config.vocab, (2, count), generator=g, device=device)
        self.steps = [
            (draw(), torch.randn(count, generator=g, device=device)) for _ in range(way.steps or self.case["steps"])
        ]
        self.generator = generator(device, seed, "world", "long")

    def sequences(self, group: int) -> list[int]:
        """Returns the sequences of a group: dealt out in turn, so that some groups have more and some may have none."""
        return list(range(len(self.lengths)))[group :: self.case["groups"]]

    def _at(self, sequences: list[int]) -> Tensor:
        starts = [sum(self.lengths[:i]) for i in sequences]
        return torch.cat([torch.arange(s, s + self.lengths[i]) for s, i in zip(starts, sequences)]).to(self.device)

    def run(self) -> dict:
        """Returns the evidence: base64 of the logprobs of each sequence that this rank computed, of a first step and
        from a cache, what each op gives, SHA-256 of the leaves of the first step's gradients and of the weights after
        all steps, and the parameters without a gradient."""
        if self.way.forward:
            with torch.no_grad():
                logprob = dict(self._forward(range(self.case["groups"]))) | self._long()
                return {"logprob": logprob, "ops": self._watched()}
        grads = self.way.grads(self.model.parameters(), self.model.tied, groups=self.case["groups"], world=self.data)
        optimizer = torch.optim.AdamW(grads.masters, lr=self.case["learning_rate"])
        found: dict = {"logprob": self._long(), "leaves": {}}
        found["decode"] = dict(self._decoded()) if self.data is None else {}
        found["ops"] = self._watched() if self.data is None else []
        for number in range(len(self.steps)):
            for group in grads.mine:
                found["logprob"] |= self._backward(self.sequences(group), number, keep=number == 0)
                grads.close(group)
            grads.join()
            if number == 0:
                found["leaves"] |= self._hashed("gradient", lambda p: p.main_grad)
                found["unmoved"] = [n for n, p in self.model.named_parameters() if p.numel() and not p.main_grad.any()]
            optimizer.step()
            grads.finish()
        found["leaves"] |= self._hashed("weight", lambda p: p)
        return found

    def _backward(self, sequences: list[int], number: int, keep: bool) -> dict[str, str]:
        if not sequences:
            return {}
        at, ((ids, targets), advantages) = self._at(sequences), self.steps[number]
        rows = packed([self.lengths[i] for i in sequences], self.device)
        logprob, _ = self.model.logprobs(ids[at], targets[at], rows)
        active = torch.ones_like(at, dtype=torch.bool)
        old = logprob.detach() + 0.125 * advantages[at].roll(1)
        policy_loss(logprob, old, advantages[at], active, sum(self.lengths)).backward()
        return dict(self._said(logprob, sequences)) if keep else {}

    def _forward(self, groups: range) -> Iterator[tuple[str, str]]:
        (ids, targets), _ = self.steps[0]
        for sequences in filter(None, map(self.sequences, groups)):
            at, rows = self._at(sequences), packed([self.lengths[i] for i in sequences], self.device)
            yield from self._said(self.model.logprobs(ids[at], targets[at], rows)[0], sequences)

    @torch.no_grad()
    def _watched(self) -> list[dict]:
        """Returns what each op gives of the group of the most tokens; see first.py."""
        ranks = dist.get_world_size(self.tensor) if self.tensor is not None else 1
        tokens = [sum(self.lengths[i] for i in self.sequences(group)) for group in range(self.case["groups"])]
        most = tokens.index(max(tokens))
        return watched(self.model, ranks, lambda: dict(self._forward(range(most, most + 1))))

    @torch.no_grad()
    def _long(self) -> dict[str, str]:
        """Returns the logprobs of a prompt of many tokens, which more than one rank cuts in another way; of data, the
        first rank has it."""
        if self.data is not None and dist.get_rank(self.data):
            return {}
        count, vocab = self.case["long"], self.model.config.vocab
        ids, targets = torch.randint(0, vocab, (2, count), generator=self.generator, device=self.device)
        logprob = self.model.logprobs(ids, targets, packed([count], self.device))[0]
        return {"long": base64.b64encode(logprob.cpu().numpy().tobytes()).decode()}

    def _said(self, logprob: Tensor, sequences: list[int]) -> Iterator[tuple[str, str]]:
        for i, part in zip(sequences, logprob.detach().split([self.lengths[i] for i in sequences])):
            yield str(i), base64.b64encode(part.cpu().numpy().tobytes()).decode()

    @torch.no_grad()
    def _decoded(self) -> Iterator[tuple[str, str]]:
        """Yields the logprobs of the last tokens of each sequence, one at a time against a cache."""
        (ids, targets), _ = self.steps[0]
        count = self.case["decoded"]
        long = [i for i, n in enumerate(self.lengths) if n > count]
        before = [self.lengths[i] - count for i in long]
        cache = Cache(self.model.config, len(long), max(self.lengths), self.model.embedding, self.model.key_heads)
        ends = torch.tensor(self.lengths).cumsum(0)[long].to(self.device)
        at = torch.cat([self._at([i])[:n] for i, n in zip(long, before)])
        self.model(ids[at], cache.joining(range(len(long)), before), cache)
        found = []
        for back in range(count, 0, -1):
            last = (ends - back)[:, None]
            found.append(self.model.logprobs(ids[last], targets[last], cache.rows(1), cache)[0])
        for i, part in zip(long, torch.cat(found, 1)):
            yield str(i), base64.b64encode(part.cpu().numpy().tobytes()).decode()

    def _hashed(self, what: str, of: Callable[[Tensor], Tensor]) -> dict[str, str]:
        """Returns SHA-256 of the leaves of each parameter that this rank has."""
        parts = {}
        for name, p in self.model.named_parameters():
            first, end, rows = getattr(p, "cut", (0, len(p), len(p)))
            shared = hasattr(p, "cut") or name in _cut(self.model)
            step = (BLOCK if name in ("embedding", "lm_head") else rows // LEAVES) if shared else rows
            for leaf in range(first // step, -(-end // step) if end > first else 0):
                parts[f"{what} {name} {leaf}"] = of(p)[max(0, leaf * step - first) : (leaf + 1) * step - first]
        with ThreadPoolExecutor(THREADS) as threads:
            return dict(zip(parts, (b.hex() for b in threads.map(hash_of, parts.values()))))


def _cut(model: Decoder) -> set[str]:
    """Returns the names of what a world may cut: all but the norms' weights."""
    return {name for name, p in model.named_parameters() if p.dim() == 2 or name.endswith("_bias")}


def digest(leaves: dict[str, str]) -> str:
    """Returns one SHA-256 of the leaves of all ranks."""
    return hashlib.sha256("".join(f"{k} {v}\n" for k, v in sorted(leaves.items())).encode()).hexdigest()
