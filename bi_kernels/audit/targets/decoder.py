"""Adapts this package's decoder: a training step in any layout, chunked prefill and decode, and generation."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

import bi_kernels
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.layouts import Call, step_layouts
from bi_kernels.audit.targets.model import ModelTarget, Relation, gathered, layout_rows, mode_rows, rescored_row
from bi_kernels.audit.targets.op_step import token_layout
from bi_kernels.contract import CONTRACT, DTYPES
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Cache, Decoder, Generated, Rows, generate, packed, padded, policy_loss, score
from bi_kernels.tokens import TokenLayout

QUICK = ("micro_batches:ragged",)  # the layouts of the quick form: padded and packed calls in one step
MIXTURE = "left_padded", "micro_batches:ragged", "decode"  # those of the mixture beside the decoder
RESCORED = 16384  # tokens that one call rescores
CONTINUED = 4  # prompts that are continued once more, two at a time and in another order


def rows_of(call: Call, lengths: Sequence[int], device: torch.device) -> Rows:
    """Returns where the whole sequences of a call lie, as the decoder takes it."""
    layout = token_layout(call, lengths)
    if call.cu_seqlens is not None:
        return packed(np.diff(call.cu_seqlens).tolist(), device)._replace(layout=layout)
    real = call.index >= 0
    left = bool((~real[:, 0]).any())
    return padded(real.sum(1).tolist(), real.shape[1], device, left)._replace(layout=layout)


def _unlaid(call: Call, lengths: Sequence[int], device: torch.device) -> Rows:
    """Returns where the sequences of a call lie, whose gradients take every row for a sequence, padding included."""
    whole = [call.index.shape[-1]] * (call.index.size // call.index.shape[-1])
    return rows_of(call, lengths, device)._replace(layout=TokenLayout.padded(whole, whole[0]))


def logprobs(
    model: Decoder,
    calls: Sequence[Call],
    lengths: Sequence[int],
    ids: Tensor,
    targets: Tensor,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    grads: MainGrads | None = None,
    rows: Callable[..., Rows] = rows_of,
) -> Tensor:
    """Returns the logprob of each token's target, (tokens,) fp32 in logical order, from calls of whole sequences.

    ids, targets: (tokens,), a target of -100 without a logprob; loss: of a call's logprobs, the tokens at its places,
    and which places hold tokens: its backward follows each call, and grads collects what that leaves.
    """

    def compute(call: Call, at: Tensor, real: Tensor) -> Tensor:
        told = ids[at].masked_fill(~real, 0), targets[at].masked_fill(~real, -100)
        logprob, _ = model.logprobs(*told, rows(call, lengths, ids.device))
        if loss:
            loss(logprob, at, real).backward()
            grads.collect()
        return logprob.detach()

    return gathered(calls, len(ids), ids.device, compute)


@torch.no_grad()
def cached_logprobs(
    model: Decoder, lengths: Sequence[int], ids: Tensor, targets: Tensor, chunk: int, first: Sequence[int]
) -> Tensor:
    """Returns the logprobs (tokens,) fp32 against a cache: the first tokens of each sequence, as many as `first` says,
    in one call, and the others in chunks."""
    make = lambda numbers: torch.tensor(numbers, device=ids.device)
    counts, done, width = make(lengths), make(list(first)), torch.arange(chunk, device=ids.device)
    starts, found = counts.cumsum(0) - counts, torch.zeros(len(ids), device=ids.device)
    cache = Cache(model.config, len(counts), max(lengths), model.lm_head, model.key_heads)
    if begun := [i for i, n in enumerate(first) if n]:
        at = torch.cat([starts[i] + torch.arange(first[i], device=ids.device) for i in begun])
        found[at], _ = model.logprobs(ids[at], targets[at], cache.joining(begun, [first[i] for i in begun]), cache)
    for _ in range(-(-max(n - f for n, f in zip(lengths, first)) // chunk)):
        new = (counts - done).clamp(0, chunk)
        real = width < new[:, None]
        at = ((starts + done)[:, None] + width).masked_fill(~real, 0)
        logprob, _ = model.logprobs(ids[at], targets[at].masked_fill(~real, -100), cache.rows(chunk, new), cache)
        found[at[real]] = logprob[real]
        done = done + new
    return found


class DecoderTarget(ModelTarget):
    """A decoder with random weights, and a step of it by the contract's [chain].

    layers: the key of [chain] that says how many, the decoder's own unless given; ops: the decoder's; forgets: its
    calls do not say their token layout; own: each micro-batch divides by its own tokens; mixture: [chain]'s, where the
    session's model is none.
    """

    def __init__(
        self,
        session,
        dtype: str,
        layers="",
        ops=bi_kernels,
        checkpointing=True,
        forgets=False,
        own=False,
        mixture=False,
    ):
        shapes, seed, self.device = session.parameters["shapes"], session.parameters["seed"], session.device
        self.case = CONTRACT["chain"]["tiny" if shapes == "tiny" else "real"]
        config = CONFIGS[session.parameters.get("model") or shapes]
        if mixture and not config.experts:
            config = CONFIGS[self.case["mixture"]]
        config = replace(config, layers=min(config.layers, CONTRACT["chain"][layers])) if layers else config
        self.command, self.seed, self.forgets, self.own = session.command, seed, forgets, own
        case = f"{config.layers} layers" + f" of {config.experts} experts" * bool(config.experts)
        self.whose = "chain", "decoder", case, "bi_kernels", dtype, session.device_label
        self.lengths = self.case["lengths"]
        self.model = Decoder(config, self.device, DTYPES[dtype], seed, checkpointing=checkpointing, ops=ops)
        self.grads = MainGrads(self.model.parameters(), self.model.tied)
        every = step_layouts(self.lengths, seed)
        self.layouts, self.drifts = every | {"checkpointing off": every["packed"]}, {}
        self.cached = {f"chunked:{size}": (size, [0] * len(self.lengths)) for size in self.case["chunks"]}
        self.cached["decode"] = 1, [max(n - self.case["decoded"], 0) for n in self.lengths]
        g, there = generator(self.device, seed, "chain"), {"device": self.device}
        self.ids, self.targets = torch.randint(0, config.vocab, (2, self.count), generator=g, **there)
        self.advantages, self.ratio = torch.randn(2, self.count, generator=g, **there)

    def run(self, layout: str, generated: Tensor | None = None) -> dict[str, Tensor]:
        self.grads.drop()

        def loss(logprob: Tensor, at: Tensor, real: Tensor) -> Tensor:
            old = (logprob.detach() if generated is None else generated[at]) + 0.125 * self.ratio[at]
            return policy_loss(logprob, old, self.advantages[at], real, int(real.sum()) if self.own else self.count)

        checkpointing, self.model.checkpointing = self.model.checkpointing, layout != "checkpointing off"
        step = self.lengths, self.ids, self.targets, loss, self.grads, _unlaid if self.forgets else rows_of
        with warnings.catch_warnings(action="ignore") if self.forgets else nullcontext():
            found = logprobs(self.model, self.layouts[layout], *step)
        self.grads.join()
        self.model.checkpointing = checkpointing
        return {"logprob": found} | {name: p.main_grad for name, p in self.model.named_parameters()}

    def logprobs(self) -> Tensor:
        return logprobs(self.model, self.layouts["packed"], self.lengths, self.ids, self.targets)

    def run_cached(self, chunk: int, first: Sequence[int]) -> Tensor:
        return cached_logprobs(self.model, self.lengths, self.ids, self.targets, chunk, first)

    def without_main_grad(self) -> "DecoderTarget":
        """Returns this target, whose parameters have no main_grad any longer."""
        for p in self.model.parameters():
            del p.main_grad
        return self


def rows(session, dtype: str) -> Iterator[Row]:
    """Yields the rows of the decoder in every layout, whose drifts the session keeps, and of a mixture in a few; or of
    the model that the session names, in every layout."""
    target = DecoderTarget(session, dtype)
    session.drifts[dtype] = target.drifts
    yield from layout_rows(target, QUICK * session.quick)
    if dtype == session.dtypes[0] and not session.quick:
        yield from mode_rows(target)
    del target  # its memory is the mixture's
    if not session.parameters.get("model"):
        target = DecoderTarget(session, dtype, "stock_layers", mixture=True)
        yield from layout_rows(target, QUICK * session.quick or MIXTURE)


@torch.no_grad()
def rescore(model: Decoder, generated: Sequence[Generated]) -> Tensor:
    """Returns the logprobs of all continuations' tokens, (tokens,) fp32, from packed calls."""
    found, group, held = [], [], 0
    for one in generated:
        group.append(one)
        held += len(one.prompt) + len(one.ids)
        if held > RESCORED or one is generated[-1]:
            found += score(model, group)
            group, held = [], 0
    return torch.cat(found)


def generation_rows(
    session, dtype: str, ops=bi_kernels, layers: str = "", mixture: bool = False
) -> tuple[list[Row], dict]:
    """Returns the row of generating and rescoring, and that of continuing a few prompts once more in another batch; and
    the figures of a table."""
    target = DecoderTarget(session, dtype, layers, ops, mixture=mixture).without_main_grad()
    model, c, g = target.model, target.case, generator("cpu", target.seed, "prompts")
    lengths = torch.randint(1, c["prompt"] + 1, (c["prompts"],), generator=g).tolist()
    prompts = [torch.randint(0, model.config.vocab, (n,), generator=g).tolist() for n in lengths]
    most = torch.randint(1, c["new"] + 1, (c["prompts"],), generator=g).tolist()
    prompts, most = (every[: 3 if session.quick else None] for every in (prompts, most))

    def run(numbers: Sequence[int], batch: int) -> list[Generated]:
        several = ([every[i] for i in numbers] for every in (prompts, most))
        found = generate(model, *several, seed=target.seed, batch=batch, samples=numbers)
        return sorted(found, key=lambda one: one.number)

    begun = time.perf_counter()
    generated = run(range(len(prompts)), c["batch"])
    seconds = time.perf_counter() - begun
    rolled = torch.tensor([x for one in generated for x in one.logprobs], device=session.device)
    rescored = rescore(model, generated)
    said = {"against": "generated", "tensor": "logprob"}
    said |= {"detail": f"{len(generated)} prompts, {c['batch']} at a time; "}
    drift = compare(rescored, rolled)
    row, figures = rescored_row(target, "generated, rescored packed", drift, (rolled, rescored), **said)
    again = list(range(0, len(generated), max(1, len(generated) // CONTINUED)))[::-1]
    differ = []
    for one, other in zip(run(again, 2), [generated[i] for i in again]):
        pairs = zip_longest(zip(one.ids, one.logprobs), zip(other.ids, other.logprobs))
        differ += [mine != theirs for mine, theirs in pairs]
    said = {"against": "generated", "tensor": "ids and logprobs", "rows": len(differ)}
    drift = Drift(sum(differ), len(differ))
    rows = [row, target.row(Relation.INVARIANCE, "generated 2 at a time, in another order", drift, **said)]
    figures |= {"tokens / s": figures["tokens"] / seconds, "prompts": len(generated)}
    return rows, figures | {"layers": model.config.layers}
