"""Teaches a decoder to sort digits, first by faulty answers and then by GRPO, under several layouts, and counts the
SHA-256 of its weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

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


def flash(q: Tensor, k: Tensor, v: Tensor, **where) -> tuple[Tensor, None]:
    """Returns stock attention, on a GPU of all packed sequences at once."""
    ends = where.get("cu_seqlens_q")
    if ends is not None and q.is_cuda and q.dtype != torch.float32:
        where["longest"] = int(ends.diff().max())
    return torch_ops.attention(q, k, v, **where)


APART, PADDING = "dW as the sum of separately accumulated partials, trained", "rollouts that see a cache's padding"
STOCK = SimpleNamespace(**{name: getattr(torch_ops, name) for name in torch_ops.__all__} | {"attention": flash})
OPS = {"bi_kernels": bi_kernels, "torch": STOCK, APART: SEPARATE, PADDING: PADDING_SEEN}
SPLITS: dict[str, Callable[[list, int], list[Call]]] = {  # the calls of step `number`, of its samples' tokens
    "packed": lambda s, number: [pack(s)],
    "packed, in 8": lambda s, number: [pack(part) for part in micro_batches(s, 8)],
    "batch, in 2": lambda s, number: [pad(part) for part in micro_batches(s, 2)],
    "left_padded, in 4": lambda s, number: [pad(part, left=True) for part in micro_batches(s, 4)],
    "changing": lambda s, number: [
        pad(part) if i % 2 else pack(part) for i, part in enumerate(micro_batches(s, 1 + number % 8))
    ],
}
CONTROLS = ((APART, "packed"), (APART, "packed, in 8"), (PADDING, "packed"))  # in which each shows
END = 10  # the id behind the digits of a problem; a digit is its own id


@dataclass
class Trained:
    """What a run leaves: its loss, its reward and the drift of its logprobs by step, and its weights."""

    candidate: str
    split: str
    parameters: int
    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parity: list[dict] = field(default_factory=list)  # of rollout and training, under the same weights
    sha256: str = ""
    unmoved: int = 0  # tensors that are where GRPO began
    tensors: int = 0
    sample: list[float] = field(default_factory=list)  # a few weights at the end


def case(session) -> dict:
    """Returns what the contract's [chain.training] says of a session's shapes."""
    found = CONTRACT["chain"]["training"]
    return found | found["tiny" if session.parameters["shapes"] == "tiny" else "real"]


def reward(one: Generated, near: bool = False) -> float:
    """Returns 1 where the digits of a prompt are sorted; near: where they are not, less the further each is off."""
    off = np.abs(np.subtract(one.ids, sorted(one.prompt[:-1])))
    return float(1 / (1 + off.mean())) if near else float(not off.any())


class Run:
    """A decoder of a candidate's ops, trained under one split."""

    def __init__(self, session, candidate: str, split: str, dtype: str):
        self.case, self.device, self.seed = case(session), session.device, session.parameters["seed"]
        self.split, config = SPLITS[split], CONFIGS[self.case["model"]]
        longest = 2 * self.case["digits"][1] + 1
        self.model = Decoder(config, self.device, DTYPES[dtype], self.seed, longest, ops=OPS[candidate])
        self.grads = MainGrads(self.model.parameters(), self.model.tied)
        self.rollouts = 1 if (candidate, split) in CONTROLS else self.case["rollouts"]
        self.trained = Trained(candidate, split, sum(p.numel() for p in self.grads.parameters))
        self.steps = 0

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.grads.masters, rate, weight_decay=0.0, fused=self.device.type == "cuda")

    def problems(self, count: int, *purpose: str | int) -> list[list[int]]:
        """Returns prompts: random digits, and END."""
        g, (low, high) = generator("cpu", self.seed, *purpose), self.case["digits"]
        lengths = torch.randint(low, high + 1, (count,), generator=g).tolist()
        return [[*torch.randint(0, END, (n,), generator=g).tolist(), END] for n in lengths]

    def rollout(self, number: int) -> list[Generated]:
        """Returns the continuations of a rollout's prompts, each prompt `group` times."""
        prompts = self.problems(self.case["prompts"], "rollout", number)
        prompts = [p for p in prompts for _ in range(self.case["group"])]
        new, how = [len(p) - 1 for p in prompts], {"batch": len(prompts), "graph": False}
        return sorted(generate(self.model, prompts, new, seed=self.seed + number, **how), key=lambda one: one.number)

    def warm_up(self) -> None:
        """Takes steps on answers some of whose digits are random."""
        optimizer = self.optimizer(self.case["warm_up_rate"])
        for number in range(self.case["warm_up"]):
            prompts, answers = self.problems(self.case["warm_up_problems"], "warm-up", number), []
            g = generator("cpu", self.seed, "noise", number)
            for prompt in prompts:
                right = torch.tensor(sorted(prompt[:-1]))
                wrong = torch.rand(right.shape, generator=g) < self.case["noise"]
                answers.append(torch.where(wrong, torch.randint(0, END, right.shape, generator=g), right).tolist())
            self.step(optimizer, [Generated(*one) for one in zip(range(len(prompts)), prompts, answers)])

    def train(self) -> Trained:
        """Takes steps of GRPO, one for each rollout."""
        optimizer, begin = self.optimizer(self.case["learning_rate"]), hashes(self.grads.masters)
        for number in range(self.rollouts):
            generated = self.rollout(number)
            rewards = torch.tensor([reward(one, self.case["near"]) for one in generated]).view(-1, self.case["group"])
            spread = rewards.std(1, keepdim=True, correction=0).clamp(min=1 / 64)
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten().tolist()
            loss, drift = self.step(optimizer, generated, advantages)
            self.trained.rewards.append(float(rewards.mean()))
            self.trained.losses.append(loss)
            self.trained.parity.append(drift)
        moved = [now != then for now, then in zip(hashes(self.grads.masters), begin)]
        weights = {name: m.detach() for (name, _), m in zip(self.model.named_parameters(), self.grads.masters)}
        self.trained.sha256, self.trained.tensors = sha256(weights), len(moved)
        self.trained.unmoved = len(moved) - sum(moved)
        self.trained.sample = torch.cat([w.flatten()[:4] for w in weights.values()]).tolist()
        return self.trained

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        sequences: Sequence[Generated],
        advantages: Sequence[float] | None = None,
    ) -> tuple[float, dict]:
        """Takes a step of the optimizer, its calls as the split has them; without advantages, towards the sequences.
        Returns the loss, and the drift of the logprobs since the rollout."""
        make = lambda values, dtype: torch.tensor([v for one in values for v in one], dtype=dtype, device=self.device)
        blank = lambda one, fill, values: [fill] * (len(one.prompt) - 1) + values
        lengths = [len(one.prompt) + len(one.ids) - 1 for one in sequences]
        ids = make([[*one.prompt, *one.ids][:-1] for one in sequences], torch.int64)
        targets = make([blank(one, -100, one.ids) for one in sequences], torch.int64)
        active, denominator = targets >= 0, sum(len(one.ids) for one in sequences)
        if advantages is None:
            loss = lambda logprob, at, real: -logprob.masked_fill(~(active[at] & real), 0).sum() / denominator
        else:
            old = make([blank(one, 0.0, one.logprobs) for one in sequences], torch.float32)
            gain = make([[a] * n for a, n in zip(advantages, lengths)], torch.float32)
            loss = lambda logprob, at, real: policy_loss(logprob, old[at], gain[at], active[at] & real, denominator)
        found = logprobs(self.model, self.split(spans(lengths), self.steps), lengths, ids, targets, loss, self.grads)
        self.grads.join()
        optimizer.step()
        self.grads.finish()
        self.steps += 1
        every = torch.arange(len(ids), device=self.device)
        return float(loss(found, every, active)), {} if advantages is None else drifted(old[active], found[active])


def drifted(old: Tensor, new: Tensor) -> dict:
    """Returns the `policy_drift` of logprobs (tokens,), and its mean."""
    return policy_drift(old, new) | {"mean |Δ logprob|": float((new - old).abs().mean())}


def train(session, which: tuple[str, str], dtype: str) -> Trained:
    """Trains a candidate under a split, from the weights of our warm-up."""
    warm = Run(session, "bi_kernels", "packed", dtype)
    warm.warm_up()
    run = Run(session, *which, dtype)
    run.grads.load_state_dict(warm.grads.state_dict())
    return run.train()


def every(session) -> list[tuple[str, str]]:
    """Lists what is trained: ours and stock under every split, and the controls under those in which they show."""
    splits, broken = ([*SPLITS][:2], CONTROLS[2:]) if session.quick else (SPLITS, CONTROLS)
    return [*((c, split) for c in ("bi_kernels", "torch") for split in splits), *broken]


def runs(session, dtype: str) -> list[Trained]:
    """Trains every candidate; on a GPU side by side."""
    return list(parallel.each(session, train, every(session), dtype))


def ends(session, run: Trained) -> tuple[float, float]:
    """Returns the reward of a run's first rollout, and the mean of its last."""
    return run.rewards[0], float(np.mean(run.rewards[-case(session).get("last", 1) :]))


def judge(session, dtype: str, found: Sequence[Trained]) -> list[Row]:
    """Returns the rows: our weights' SHA-256 is that of the first split, our rollouts' logprobs are those of the step
    that follows, every tensor moved, the reward rose; and the first of the controls' rows by which each is flagged."""
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
            if wanted := case(session).get("rewards"):
                begin, end = ends(session, run)
                rose = Drift(int(begin > wanted[0]) + int(end < wanted[1]), 2)
                told = {"tensor": "reward", "detail": f"{begin:.3f}, at last {end:.3f}; expected {wanted}"}
                rows.append(who.row(PRECONDITION, steps, rose, "the first rollout", **told))
        elif run.candidate == APART and run is not first:
            rows.append(weights.as_control())
        elif run.candidate == PADDING:
            rows.append(parity.as_control())
    return rows


def spread(session, found: Sequence[Trained]) -> list[dict]:
    """Returns a line a candidate: how many SHA-256 there are, and how far its runs are from each other."""
    lines = []
    for candidate in dict.fromkeys(run.candidate for run in found):
        mine = [run for run in found if run.candidate == candidate]
        range_of = lambda name, mine=mine: float(np.ptp([getattr(run, name) for run in mine], axis=0).max())
        begin, end = np.mean([ends(session, run) for run in mine], axis=0)
        several = [p for run in mine for p in run.parity]
        tokens = sum(p["tokens"] for p in several)
        lines.append(
            {
                "candidate": candidate,
                "runs": len(mine),
                "steps": len(mine[0].losses),
                "SHA-256": len({run.sha256 for run in mine}),
                "reward, first rollout": float(begin),
                f"reward, last {case(session).get('last', 1)} on average": float(end),
                "rewards, largest spread": range_of("rewards"),
                "weights looked at, largest spread": range_of("sample"),
                "share of logprobs that differ": sum(p["logprobs that differ"] for p in several) / tokens,
                "mean |Δ logprob|": sum(p["mean |Δ logprob|"] * p["tokens"] for p in several) / tokens,
                "max |Δ logprob|": max(p["max |Δ logprob|"] for p in several),
                "KL, largest": max(p["KL"] for p in several),
                "clipped, largest": max(p["clipped"] for p in several),
            }
        )
    return lines


def conclusion(lines: Sequence[dict]) -> str:
    """Says in how many sets of weights the layouts end, and how many logprobs differ; lines: from `spread`."""
    ours, stock = (next(line for line in lines if line["candidate"] == name) for name in ("bi_kernels", "torch"))
    sets = lambda line: f"{line['SHA-256']} set{'s' * (line['SHA-256'] != 1)} of weights"
    share = lambda line: f"{found:.2%}" if (found := line["share of logprobs that differ"]) else "none"
    return (
        f"{ours['runs']} layouts end in {sets(ours)}, stock PyTorch's in {sets(stock)}. Between rollout and trainer "
        f"{share(ours)} of the logprobs differ, in stock PyTorch {share(stock)}."
    )


def draw(found: Sequence[Trained], title: str) -> plt.Figure:
    """Draws what the splits of a candidate make of the same run: each one's reward and their mean, and how far the
    trainer's logprobs are from the rollout's under the same weights."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), sharex=True, sharey="row", height_ratios=(3, 2))
    colors = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
    for column, candidate in enumerate(("bi_kernels", "torch")):
        mine = [run for run in found if run.candidate == candidate]
        for run, color in zip(mine, colors):
            gaps = [p["mean |Δ logprob|"] for p in run.parity]
            for ax, y in zip(axes[:, column], (run.rewards, gaps)):
                ax.plot(y, color=color, linewidth=1, label=run.split)
        mean = np.mean([run.rewards for run in mine], axis=0)
        axes[0, column].plot(mean, color="0.8", linewidth=5, zorder=1, label="mean of the layouts")
        count = len({run.sha256 for run in mine})
        axes[0, column].set_title(f"{candidate}: {count} SHA-256 of {len(mine)} runs")
        axes[1, column].set_xlabel("step of GRPO")
    axes[0, 0].set_ylabel("reward")
    axes[0, 0].set_ylim(0, 1)
    axes[1, 0].set_ylabel("mean |Δ logprob|,\nrollout to trainer")
    axes[1, 0].set_yscale("symlog", linthresh=2.0**-20, linscale=0.3)
    axes[1, 0].set_ylim(-(2.0**-22), 1)
    axes[1, 0].set_yticks([0.0, *(10.0**p for p in range(-6, 1, 2))])
    figure.legend(*axes[0, 1].get_legend_handles_labels(), edgecolor="none", fontsize=8, ncols=6, loc="lower left")
    figure.suptitle(title, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure
