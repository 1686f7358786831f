"""A decoder's training steps over the ranks of a parallel configuration: what every rank computes and reports."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import bi_kernels
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.layouts import pack, spans
from bi_kernels.audit.targets.decoder import cached_logprobs, logprobs
from bi_kernels.audit.targets.model import hashes
from bi_kernels.contract import CONTRACT, DTYPES
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Config, Decoder, policy_loss
from bi_kernels.ops.vocabulary import BLOCK
from bi_kernels.parallel.tensor import TensorParallel

OPS = "embedding", "rms_norm", "add_rms_norm", "linear", "qk_norm", "rope", "attention", "swiglu", "combine"
OPS += ("lm_head_logprob",)
LEAVES = (
    4  # parts of a weight's rows, or of an output's columns, that are hashed apart, so that a rank can hash its own
)


class ParallelConfig(NamedTuple):
    """How many ranks share each weight (tp), and how many share the groups of sequences (dp). tokens: norms and
    residuals are shared by the tp ranks as well, by tokens. mixture: of a decoder with experts; ep: the tp ranks share
    experts alone."""

    tp: int = 1
    dp: int = 1
    tokens: bool = False
    mixture: bool = False
    ep: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def name(self) -> str:
        name = "×".join(f"{what}{n}" for what, n in zip(("ep" if self.ep else "tp", "dp"), self) if n > 1) or "1"
        return name + " by tokens" * self.tokens + " mixture" * (self.mixture and not self.ep)

    @property
    def alone(self) -> "ParallelConfig":
        """Returns the configuration of the same decoder on one rank."""
        return ParallelConfig(mixture=self.mixture)

    def whole(self, name: str) -> bool:
        """Tells whether every rank has a parameter whole."""
        return not name.endswith(("gate_up", "down")) if self.ep else "norm" in name or name.endswith("router")


ONE_RANK = ParallelConfig()
PARALLEL_CONFIGS = (
    ONE_RANK,
    *(ParallelConfig(*sizes) for sizes in ((2, 1), (2, 1, True), (1, 2), (4, 1), (1, 4), (2, 2))),
    ParallelConfig(mixture=True),
    *(ParallelConfig(*sizes, mixture=True) for sizes in ((2, 1), (1, 2))),
    *(ParallelConfig(2, dp, mixture=True, ep=True) for dp in (1, 2)),
)


class ParallelStrategy(NamedTuple):
    """How ranks compute: the ops over a group, and what joins the gradients. forward: logprobs alone; steps: how many,
    the case's unless given."""

    ops: Callable[[dist.ProcessGroup, bool], object] = TensorParallel
    grads: Callable[..., MainGrads] = MainGrads
    forward: bool = False
    steps: int | None = None


def case(shapes: str) -> dict:
    """Returns the contract's [chain.world] at a shape set."""
    return CONTRACT["chain"]["world"]["tiny" if shapes == "tiny" else "real"]


def decoder(shapes: str, mixture: bool) -> Config:
    """Returns the decoder's sizes, or those of the mixture."""
    c = case(shapes)
    model, layers = (c["mixture"], c["mixture_layers"]) if mixture else (c["model"], c["layers"])
    return replace(CONFIGS[model], layers=layers)


class _TracedOps:
    """Ops that record their outputs: the op and its weight, the number of columns, and the SHA-256 of parts of them, as
    many as one rank hashes (whole) and as each of several does (part)."""

    def __init__(self, ops, found: list[dict], names: dict[Tensor, str], ranks: int):
        self._ops, self._given = ops, (found, names, ranks)

    def __getattr__(self, name: str):
        op = getattr(self._ops, name)
        if name == "keys":
            return lambda heads: _TracedOps(op(heads), *self._given)
        return self._recording(name, op) if name in OPS else op

    def _recording(self, name: str, op: Callable) -> Callable:
        found, names, ranks = self._given

        def call(*args, **given):
            out = op(*args, **given)
            weight = next((names[t] for t in args if isinstance(t, Tensor) and t in names), "")
            for t in out if isinstance(out, tuple) else (out,):
                flat = t.flatten(2).flatten(0, 1) if t.dim() > 3 else t.flatten(1) if t.dim() > 1 else t[:, None]
                whole, part = (
                    [digest.hex() for digest in hashes(flat.tensor_split(n, 1))] for n in (LEAVES, LEAVES // ranks)
                )
                found.append({"op": f"{name} {weight}".strip(), "columns": flat.shape[1], "whole": whole, "part": part})
            return out

        return call


class DistributedStep:
    """A decoder's training steps on this rank; this process alone where there is no group.

    told: shapes, dtype and seed; tensor, data: the groups of a mesh; of: the configuration.
    """

    def __init__(
        self,
        told: dict,
        device: torch.device,
        strategy: ParallelStrategy,
        tensor: dist.ProcessGroup | None = None,
        data: dist.ProcessGroup | None = None,
        of: ParallelConfig = ONE_RANK,
    ):
        self.case, self.strategy, self.tensor, self.data = case(told["shapes"]), strategy, tensor, data
        config = decoder(told["shapes"], of.mixture)
        ops = bi_kernels if tensor is None else strategy.ops(tensor, of.tokens)
        self.lengths = self.case["lengths"]
        self.samples, longest = spans(self.lengths), max(self.case["long"], *self.lengths)
        dtype, seed = DTYPES[told["dtype"]], told["seed"]
        self.model = Decoder(config, device, dtype, seed, longest, checkpointing=True, ops=ops)
        g, count = generator(device, seed, "world"), sum(self.lengths)
        draw = lambda g, count: torch.randint(0, config.vocab, (2, count), generator=g, device=device)
        steps = range(strategy.steps or self.case["steps"])
        self.steps = [(draw(g, count), torch.randn(count, generator=g, device=device)) for _ in steps]
        self.long = draw(generator(device, seed, "world", "long"), self.case["long"])

    def group(self, number: int) -> list[int]:
        """Returns the sequences of a group, dealt out in turn: some groups have more, and some may have none."""
        return list(range(len(self.lengths)))[number :: self.case["groups"]]

    def run(self) -> dict:
        """Returns this rank's evidence: `values`, the logprobs of the first step's sequences, of a longer one and of
        decode, and the SHA-256 of leaves of the first step's gradients and of the last weights; `ops`, what each op
        gave; `unmoved`, the parameters without a gradient."""
        values, unmoved = self._long(), []
        if self.strategy.forward:
            with torch.no_grad():
                for number in range(self.case["groups"]):
                    values |= self._logprobs(number)
            return {"values": values, "ops": self._traced()}
        if self.data is None:
            values |= self._decoded()
        ops = self._traced() if self.data is None else []
        told = {"groups": self.case["groups"], "world": self.data}
        grads = self.strategy.grads(self.model.parameters(), self.model.tied, **told)
        optimizer = torch.optim.AdamW(grads.masters, lr=self.case["learning_rate"])
        for step in range(len(self.steps)):
            for number in grads.mine:
                found = self._logprobs(number, step, grads)
                values |= found if step == 0 else {}
                grads.close(number)
            grads.join()
            if step == 0:
                values |= self._leaves("gradient", lambda p: p.main_grad)
                unmoved = [n for n, p in self.model.named_parameters() if p.numel() and not p.main_grad.any()]
            optimizer.step()
            grads.finish()
        return {"values": values | self._leaves("weight", lambda p: p), "ops": ops, "unmoved": unmoved}

    def _logprobs(self, number: int, step: int = 0, grads: MainGrads | None = None) -> dict[str, Tensor]:
        """Returns the logprobs of a group's sequences by name, from one packed call; with grads, after its backward."""
        (ids, targets), advantages = self.steps[step]

        def loss(logprob: Tensor, at: Tensor, real: Tensor) -> Tensor:
            old = logprob.detach() + 0.125 * advantages[at].roll(1)
            return policy_loss(logprob, old, advantages[at], real, len(ids))

        if not (group := self.group(number)):
            return {}
        calls = [pack([self.samples[i] for i in group])]
        found = logprobs(self.model, calls, self.lengths, ids, targets, loss if grads else None, grads).cpu()
        return {f"logprob {i}": found[self.samples[i]] for i in group}

    @torch.no_grad()
    def _long(self) -> dict[str, Tensor]:
        """Returns the logprobs of a longer sequence, whose tokens ranks share; the first data rank has it."""
        if self.data is not None and dist.get_rank(self.data):
            return {}
        lengths = [self.case["long"]]
        return {"logprob long": logprobs(self.model, [pack(spans(lengths))], lengths, *self.long).cpu()}

    def _decoded(self) -> dict[str, Tensor]:
        """Returns the logprobs of the last tokens of each sequence, one at a time against a cache."""
        first = [max(n - self.case["decoded"], 0) for n in self.lengths]
        found = cached_logprobs(self.model, self.lengths, *self.steps[0][0], 1, first).cpu()
        return {f"decode {i}": found[s[n:]] for i, (s, n) in enumerate(zip(self.samples, first))}

    @torch.no_grad()
    def _traced(self) -> list[dict]:
        """Returns a record of each output of each op, in order, of the group of the most tokens: see `_TracedOps`."""
        most = max(range(self.case["groups"]), key=lambda number: sum(self.lengths[i] for i in self.group(number)))
        ranks = 1 if self.tensor is None else dist.get_world_size(self.tensor)
        found, names = [], {p: name for name, p in self.model.named_parameters()}
        holders = [self.model, *self.model.layers]
        before = [holder.ops for holder in holders]
        for holder in holders:
            holder.ops = _TracedOps(holder.ops, found, names, ranks)
        self._logprobs(most)
        for holder, ops in zip(holders, before):
            holder.ops = ops
        return found

    def _leaves(self, what: str, of: Callable[[Tensor], Tensor]) -> dict[str, str]:
        """Returns the SHA-256 of the leaves of each parameter that this rank has; a norm's weight is one leaf."""
        parts = {}
        for name, p in self.model.named_parameters():
            first, end, rows = getattr(p, "cut", (0, len(p), len(p)))
            shared = hasattr(p, "cut") or p.dim() > 1 or name.endswith("_bias")
            size = (BLOCK if name in ("embedding", "lm_head") else rows // LEAVES) if shared else rows
            for leaf in range(first // size, -(-end // size) if end > first else 0):
                parts[f"{what} {name} {leaf}"] = of(p)[max(0, leaf * size - first) : (leaf + 1) * size - first]
        return dict(zip(parts, (digest.hex() for digest in hashes(parts.values()))))
