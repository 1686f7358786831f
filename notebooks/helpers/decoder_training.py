"""Trains a decoder by GRPO on what it generates, under several layouts, and counts the SHA-256 of its weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

import bi_kernels
from bi_kernels.audit import parallel
from bi_kernels.audit.axes import Side
from bi_kernels.audit.compare import Drift
from bi_kernels.audit.findings import NEEDS_FIX, PASS, PRECONDITION, Row
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.layouts import Call, micro_batches, pack, pad, spans
from bi_kernels.audit.targets.base import Target
from bi_kernels.audit.targets.decoder import logprobs
from bi_kernels.audit.targets.decoder_controls import PADDING_SEEN, SEPARATE
from bi_kernels.audit.targets.model import Relation, hashes, policy_drift, sha256
from bi_kernels.contract import CONTRACT, DTYPES
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Decoder, Generated, generate, policy_loss
from helpers import torch_ops
from helpers.figures import plt  # in the style of all that is drawn

APART, PADDING = "dW as the sum of separately accumulated partials, trained", "rollouts that see a cache's padding"
OPS = {"bi_kernels": bi_kernels, "torch": torch_ops, APART: SEPARATE, PADDING: PADDING_SEEN}
SPLITS: dict[str, Callable[[list, int], list[Call]]] = {  # the calls of step `number`, of its samples' tokens
    "packed": lambda s, number: [pack(s)],
    "micro_batches:each": lambda s, number: [pack([x]) for x in s],
    "batch, in 2": lambda s, number: [pad(part) for part in micro_batches(s, 2)],
    "left_padded, in 4": lambda s, number: [pad(part, left=True) for part in micro_batches(s, 4)],
    "micro_batches:changing": lambda s, number: [
        pad(part) if i % 2 else pack(part) for i, part in enumerate(micro_batches(s, 1 + number % len(s)))
    ],
}
CONTROLS = ((APART, "packed"), (APART, "micro_batches:each"), (PADDING, "packed"))  # in which each shows


@dataclass
class Trained:
    """What a run leaves: its losses by step, its rewards and the drift of its logprobs by rollout, and its weights."""

    candidate: str
    split: str
    parameters: int
    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parity: list[dict] = field(default_factory=list)  # of rollout and first step after it, under the same weights
    sha256: str = ""
    unmoved: int = 0  # tensors that are where they began
    tensors: int = 0
    sample: list[float] = field(default_factory=list)  # a few weights at the end


def case(session) -> dict:
    """Returns what the contract's [chain.training] says of a session's shapes."""
    found = CONTRACT["chain"]["training"]
    return found | found["tiny" if session.parameters["shapes"] == "tiny" else "real"]


def reward(one: Generated) -> float:
    """Returns the share of even ids among the new tokens: about a half at first, in every group of continuations."""
    return sum(i % 2 == 0 for i in one.ids) / len(one.ids)


class Run:
    """A decoder of a candidate's ops, trained under one split."""

    def __init__(self, session, candidate: str, split: str, dtype: str):
        self.case, self.device, self.seed = case(session), session.device, session.parameters["seed"]
        self.split = SPLITS[split]
        longest = self.case["prompt"] + self.case["new"]
        config = CONFIGS[self.case["model"]]
        self.model = Decoder(config, self.device, DTYPES[dtype], self.seed, longest, ops=OPS[candidate])
        self.grads = MainGrads(self.model.parameters(), self.model.tied)
        how = {"lr": self.case["learning_rate"], "weight_decay": 0.0, "fused": self.device.type == "cuda"}
        self.optimizer = torch.optim.AdamW(self.grads.masters, **how)
        self.rollouts = 1 if (candidate, split) in CONTROLS else self.case["rollouts"]
        self.trained = Trained(candidate, split, sum(p.numel() for p in self.grads.parameters))
        self.begin = hashes(self.grads.masters)
        self.steps = 0

    def rollout(self, number: int) -> list[Generated]:
        """Returns the continuations of a rollout's prompts, each prompt `group` times."""
        c, g = self.case, generator("cpu", self.seed, "rollout", number)
        draw = lambda high: torch.randint(1, high + 1, (c["prompts"],), generator=g).tolist()
        prompts = [torch.randint(0, self.model.config.vocab, (n,), generator=g).tolist() for n in draw(c["prompt"])]
        several = lambda values: [v for v in values for _ in range(c["group"])]
        found = generate(self.model, several(prompts), several(draw(c["new"])), seed=self.seed + number)
        return sorted(found, key=lambda one: one.number)

    def train(self) -> Trained:
        c, size = self.case, self.case["minibatch"]
        for number in range(self.rollouts):
            generated = self.rollout(number)
            rewards = torch.tensor([reward(one) for one in generated]).view(-1, c["group"])
            self.trained.rewards.append(float(rewards.mean()))
            spread = rewards.std(1, keepdim=True, correction=0).clamp(min=1 / 64)
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten().tolist()
            for first in range(0, len(generated), size):
                chosen = slice(first, first + size)
                self.step(generated[chosen], advantages[chosen], fresh=first == 0)
        moved = [now != then for now, then in zip(hashes(self.grads.masters), self.begin)]
        weights = {name: m.detach() for (name, _), m in zip(self.model.named_parameters(), self.grads.masters)}
        self.trained.sha256, self.trained.tensors = sha256(weights), len(moved)
        self.trained.unmoved = len(moved) - sum(moved)
        self.trained.sample = torch.cat([w.flatten()[:4] for w in weights.values()]).tolist()
        return self.trained

    def step(self, generated: Sequence[Generated], advantages: Sequence[float], fresh: bool) -> None:
        """Takes a step of the optimizer, its calls as the split has them. fresh: the weights are the rollout's."""
        make = lambda values, dtype: torch.tensor([v for one in values for v in one], dtype=dtype, device=self.device)
        blank = lambda one, fill, values: [fill] * (len(one.prompt) - 1) + values
        lengths = [len(one.prompt) + len(one.ids) - 1 for one in generated]
        ids = make([[*one.prompt, *one.ids][:-1] for one in generated], torch.int64)
        targets = make([blank(one, -100, one.ids) for one in generated], torch.int64)
        old = make([blank(one, 0.0, one.logprobs) for one in generated], torch.float32)
        gain = make([[a] * n for a, n in zip(advantages, lengths)], torch.float32)
        active, denominator = targets >= 0, sum(len(one.ids) for one in generated)
        loss = lambda logprob, at, real: policy_loss(logprob, old[at], gain[at], active[at] & real, denominator)
        calls = self.split(spans(lengths), self.steps)
        found = logprobs(self.model, calls, lengths, ids, targets, loss, self.grads)
        self.grads.join()
        self.optimizer.step()
        self.grads.finish()
        self.trained.losses.append(float(policy_loss(found, old, gain, active, denominator)))
        if fresh:
            self.trained.parity.append(policy_drift(old[active], found[active]))
        self.steps += 1


def train(session, which: tuple[str, str], dtype: str) -> Trained:
    """Trains a candidate under a split."""
    return Run(session, *which, dtype).train()


def runs(session, dtype: str) -> list[Trained]:
    """Trains ours, stock and the controls, these under the splits that tell; on a GPU side by side."""
    splits, broken = ([*SPLITS][:2], CONTROLS[2:]) if session.quick else (SPLITS, CONTROLS)
    every = [*((c, split) for c in ("bi_kernels", "torch") for split in splits), *broken]
    return list(parallel.each(session, train, every, dtype))


def judge(session, dtype: str, found: Sequence[Trained]) -> list[Row]:
    """Returns the rows: our weights' SHA-256 is that of the first split, our rollouts' logprobs are those of the step
    that follows, every tensor moved; and the first of the controls' rows by which each is flagged."""
    who, rows = Target(), []
    for run in found:
        steps = f"{len(run.losses)} AdamW steps, {run.split}"
        first = next(r for r in found if r.candidate == run.candidate)
        who.whose = "training", "decoder", f"{run.parameters:,} parameters", run.candidate, dtype, session.device_label
        who.command = session.command
        told = {"against": first.split, "tensor": "SHA-256 of the weights", "detail": run.sha256}
        weights = who.row(Side.TRAINED, steps, Drift(int(run.sha256 != first.sha256), 1), **told)
        differ, tokens = (sum(p[k] for p in run.parity) for k in ("logprobs that differ", "tokens"))
        worst, kl = (max(p[k] for p in run.parity) for k in ("max |Δ logprob|", "KL"))
        said = {"against": "generated", "tensor": "logprob", "detail": f"{len(run.parity)} rollouts; KL {kl:.3g}"}
        verdict = PASS if not differ and max(worst, kl) <= CONTRACT["chain"]["parity"] else NEEDS_FIX
        parity = who.row(Relation.PARITY, steps, Drift(differ, tokens, worst), verdict=verdict, **said)
        if run.candidate == "bi_kernels":
            moved = Drift(run.unmoved, run.tensors)
            rows += [parity, who.row(PRECONDITION, steps, moved, "the initial weights", tensor="tensors left unmoved")]
            rows += [weights] if run is not first else []
        elif run.candidate == APART and run is not first:
            rows.append(weights.as_control())
        elif run.candidate == PADDING:
            rows.append(parity.as_control())
    return rows


def spread(found: Sequence[Trained]) -> list[dict]:
    """Returns a line a candidate: how many SHA-256 there are, and how far its runs are from each other."""
    lines = []
    for candidate in dict.fromkeys(run.candidate for run in found):
        mine = [run for run in found if run.candidate == candidate]
        range_of = lambda name: float(np.ptp([getattr(run, name) for run in mine], axis=0).max())
        several = [p for run in mine for p in run.parity]
        lines.append(
            {
                "candidate": candidate,
                "runs": len(mine),
                "steps": len(mine[0].losses),
                "SHA-256": len({run.sha256 for run in mine}),
                "losses, largest spread": range_of("losses"),
                "rewards, largest spread": range_of("rewards"),
                "weights looked at, largest spread": range_of("sample"),
                "share of logprobs that differ": sum(p["logprobs that differ"] for p in several)
                / sum(p["tokens"] for p in several),
                "max |Δ logprob|": max(p["max |Δ logprob|"] for p in several),
                "KL, largest": max(p["KL"] for p in several),
                "clipped, largest": max(p["clipped"] for p in several),
            }
        )
    return lines


def draw(found: Sequence[Trained], title: str) -> plt.Figure:
    """Draws what the splits of a candidate make of the same run: rewards, losses from the first split's, and the KL of
    rollout and training under the same weights."""
    figure, axes = plt.subplots(3, 2, figsize=(9, 7.5), sharex="col", sharey="row")
    colors = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
    for column, candidate in enumerate(("bi_kernels", "torch")):
        mine = [run for run in found if run.candidate == candidate]
        for run, color in zip(mine, colors):
            at = np.arange(len(run.rewards)) * (len(run.losses) / len(run.rewards))
            gaps = np.abs(np.subtract(run.losses, mine[0].losses))
            for ax, x, y in zip(
                axes[:, column], (at, range(len(gaps)), at), (run.rewards, gaps, [p["KL"] for p in run.parity])
            ):
                ax.plot(x, y, color=color, linewidth=1.3, marker="o", markersize=2.5, label=run.split)
        count = len({run.sha256 for run in mine})
        axes[0, column].set_title(f"{candidate}: {count} SHA-256 of {len(mine)} runs")
        axes[2, column].set_xlabel("optimizer step")
    for ax, label in zip(axes[:, 0], ("reward", "|loss − first layout's|", "KL, rollout to training")):
        ax.set_ylabel(label)
    for ax in axes[1:].flat:
        ax.set_yscale("symlog", linthresh=2.0**-30, linscale=0.3)
        ax.set_ylim(-(2.0**-31), 1)
        ax.set_yticks([0.0, *(10.0**p for p in range(-8, 1, 2))])
    figure.legend(*axes[0, 1].get_legend_handles_labels(), edgecolor="none", fontsize=8, ncols=5, loc="lower left")
    figure.suptitle(title, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    return figure
