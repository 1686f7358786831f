"""What a decoder generates in a running batch, and what it says of the same tokens in one packed call."""

import time
from collections.abc import Sequence
from itertools import zip_longest

import torch

from bi_kernels.audit.chain.layouts import case
from bi_kernels.audit.chain.relations import INVARIANCE, PARITY, Whole
from bi_kernels.audit.evidence.drift import Drift, compare
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, Row
from bi_kernels.audit.problem.inputs import generator
from bi_kernels.contract import CONTRACT
from bi_kernels.model import Decoder, Generated, generate, score

TOGETHER = 16384  # tokens that are scored in one call
AGAIN = 4  # prompts that are continued once more, two at a time and in another order


class Rollout:
    """Prompts and how long their continuations are, drawn by a seed, and how a decoder continues them."""

    def __init__(self, shapes: str, vocab: int, device: torch.device, seed: int):
        self.case, self.seed, self.device = case(shapes), seed, device
        g, count = generator("cpu", seed, "prompts"), self.case["prompts"]
        lengths = torch.randint(1, self.case["prompt"] + 1, (count,), generator=g).tolist()
        self.prompts = [torch.randint(0, vocab, (n,), generator=g).tolist() for n in lengths]
        self.most = torch.randint(1, self.case["new"] + 1, (count,), generator=g).tolist()

    def run(self, model: Decoder, numbers: Sequence[int] = (), batch: int = 0) -> list[Generated]:
        """Returns the continuations of prompts, all of them unless named, in their order."""
        numbers = list(numbers) or list(range(len(self.prompts)))
        found = generate(
            model,
            [self.prompts[i] for i in numbers],
            [self.most[i] for i in numbers],
            seed=self.seed,
            batch=batch or self.case["batch"],
            samples=numbers,
        )
        return sorted(found, key=lambda one: one.number)


@torch.no_grad()
def rescored(model: Decoder, generated: Sequence[Generated]) -> torch.Tensor:
    """Returns the logprobs of all continuations' tokens, (tokens,) fp32, from packed calls."""
    found, group, held = [], [], 0
    for one in generated:
        group.append(one)
        held += len(one.prompt) + len(one.ids)
        if held > TOGETHER or one is generated[-1]:
            found += score(model, group)
            group, held = [], 0
    return torch.cat(found)


def figures(rolled: torch.Tensor, found: torch.Tensor) -> tuple[Drift, dict]:
    """Returns the drift of rescored logprobs, and what it means to a policy gradient: KL by its unbiased estimate of
    e^d − 1 − d (Schulman, 2020), and the share of tokens whose ratio is clipped."""
    drift, d = compare(found, rolled), found.double() - rolled.double()
    clipped = ((d.exp() - 1).abs() > CONTRACT["chain"]["clip"]).double().mean()
    return drift, {
        "tokens": drift.elements,
        "logprobs that differ": drift.mismatches,
        "max |Δ logprob|": drift.max_abs,
        "KL": float((d.exp() - 1 - d).mean()),
        "clipped": float(clipped),
    }


def _apart(one: Generated, other: Generated) -> tuple[int, int]:
    """Returns how many tokens of two sequences, or their logprobs, differ, and how many there are."""
    pairs = zip_longest(zip(one.ids, one.logprobs), zip(other.ids, other.logprobs))
    found = [mine != theirs for mine, theirs in pairs]
    return sum(found), len(found)


def judge(session, dtype: str, ops, layers: str = "") -> tuple[list[Row], dict]:
    """Generates, rescores, and continues a few prompts once more in another batch; returns the rows of that, and the
    figures."""
    step = session.step(dtype, ops=ops, layers=layers)
    model = step.model
    who = Whole(model.config.layers, dtype, session.device_label, session.command)
    for p in model.parameters():
        del p.main_grad
    rollout = Rollout(session.parameters["shapes"], model.config.vocab, session.device, session.parameters["seed"])
    if session.quick:
        del rollout.prompts[3:], rollout.most[3:]
    begun = time.perf_counter()
    generated = rollout.run(model)
    seconds = time.perf_counter() - begun
    rolled = torch.tensor([x for one in generated for x in one.logprobs], device=session.device)
    drift, told = figures(rolled, rescored(model, generated))
    most = CONTRACT["chain"]["parity"]
    sound = drift.mismatches == 0 and told["max |Δ logprob|"] <= most and told["KL"] <= most and not told["clipped"]
    said = {"rows": drift.elements, "verdict": PASS if sound else NEEDS_FIX}
    detail = f"{len(generated)} prompts, {rollout.case['batch']} at a time; KL {told['KL']:.3g}"
    rows = [who.row(PARITY, "generated, rescored packed", drift, "generated", detail=detail, **said)]
    again = list(range(0, len(generated), max(1, len(generated) // AGAIN)))[::-1]
    found, wanted = rollout.run(model, again, 2), [generated[i] for i in again]
    differ, tokens = map(sum, zip(*map(_apart, found, wanted)))
    layout, tensor = "generated 2 at a time, in another order", "ids and logprobs"
    rows.append(who.row(INVARIANCE, layout, Drift(differ, tokens), "generated", rows=tokens, tensor=tensor))
    return rows, told | {
        "tokens / s": told["tokens"] / seconds,
        "prompts": len(generated),
        "layers": model.config.layers,
    }
