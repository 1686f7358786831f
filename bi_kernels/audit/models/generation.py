"""What a model generates, by `generate` and in continuous batching, and what it says of the same tokens in one call."""

import inspect
import time

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from bi_kernels.audit.chain.generation import figures
from bi_kernels.audit.evidence.drift import Drift, compare, joined
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, Row
from bi_kernels.audit.models.cases import OURS, STOCK, architectures, built, case, packed_logits, quiet, vocabulary
from bi_kernels.audit.models.relations import PARITY, Model
from bi_kernels.audit.problem.inputs import generator
from bi_kernels.contract import CONTRACT

TOGETHER = 8  # sequences of continuous batching that are rescored in one call
PAGE = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
CACHES = {"dynamic": None, "static": "static"}
Found = tuple[Drift, Tensor, Tensor]  # of the logits, or the logprobs; logprobs generated, and rescored


def chosen(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns the logprobs of ids (tokens,) under logits (tokens, vocabulary) fp32, as continuous batching has them."""
    return logits.softmax(-1).gather(1, ids[:, None])[:, 0].log()


@torch.no_grad()
def generated(session, model: nn.Module, cache: str, ours: bool = True, told: bool = True) -> Found:
    """Samples behind left-padded prompts and compares every step's logits with those of the same tokens rescored.

    told: of the padding; else it counts as tokens.
    """
    c, device = case(session), session.device
    lengths = c["lengths"][: c["prompts"]]
    g, width = generator("cpu", session.parameters["seed"], "generate"), max(lengths)
    ids = torch.randint(1, vocabulary(session), (len(lengths), width), generator=g).to(device)
    real = torch.arange(width, device=device) >= width - torch.tensor(lengths, device=device)[:, None]
    mask = real if told else torch.ones_like(real)
    torch.manual_seed(session.parameters["seed"])
    out = model.generate(
        input_ids=ids.masked_fill(~real, 0),
        attention_mask=mask.long(),
        max_new_tokens=c["new"],
        do_sample=True,
        output_logits=True,
        return_dict_in_generate=True,
        cache_implementation=CACHES[cache],
    )
    rows = [row[width - n :] for row, n in zip(out.sequences, lengths)]
    drifts, rolled, found = [], [], []
    for i, (row, n, logits) in enumerate(zip(rows, lengths, packed_logits(model, rows, ours))):
        then, now = torch.stack([step[i] for step in out.logits]).float(), logits[n - 1 : -1].float()
        drifts.append(compare(now, then))
        rolled.append(chosen(then, row[n:]))
        found.append(chosen(now, row[n:]))
    return joined(drifts), torch.cat(rolled), torch.cat(found)


def batched(session, model: nn.Module, ours: bool, count: int) -> tuple[Found, float]:
    """Samples by continuous batching and compares the logprobs that it tells with those of the same tokens rescored;
    returns that, and the seconds that it took to sample."""
    c, g = case(session), generator("cpu", session.parameters["seed"], "batched")
    lengths = torch.randint(1, c["batched_prompt"] + 1, (count,), generator=g).tolist()
    prompts = [torch.randint(1, vocabulary(session), (n,), generator=g).tolist() for n in lengths]
    how = GenerationConfig(max_new_tokens=c["batched_new"], do_sample=True, eos_token_id=-1, pad_token_id=0)
    more = {PAGE: c["page"]} if "page" in c else {}
    if not ours and "auto_switch_to_flash" in inspect.signature(ContinuousBatchingConfig).parameters:
        more["auto_switch_to_flash"] = False
    if not ours:
        more["use_cuda_graph"] = False  # whose warm-up samples from NaN where its memory holds some (5.17)
    batching = ContinuousBatchingConfig(return_logprobs=True, max_requests_per_batch=96, **c["batching"], **more)
    if not ours and PAGE == "block_size":
        model.set_attn_implementation("paged|sdpa")
    torch.manual_seed(session.parameters["seed"])
    begun = time.perf_counter()
    results = [*model.generate_batch(prompts, how, batching, progress_bar=False).values()]
    seconds = time.perf_counter() - begun
    if not ours:
        model.set_attn_implementation("sdpa")
    short = [o for o in results if o.error or len(o.generated_tokens) != c["batched_new"]]
    if len(results) != count or short:
        why = f", the first with {len(short[0].generated_tokens)} and the error {short[0].error!r}" if short else ""
        raise ValueError(
            f"generate_batch: {len(results)} of {count} prompts returned, {len(short)} without {c['batched_new']} "
            f"new tokens{why}"
        )
    rolled, found = [], []
    with torch.no_grad():
        for at in range(0, count, TOGETHER):
            some = results[at : at + TOGETHER]
            rows = [torch.tensor([*o.prompt_ids, *o.generated_tokens], device=session.device) for o in some]
            for o, row, logits in zip(some, rows, packed_logits(model, rows, ours)):
                n = len(o.prompt_ids)
                found.append(chosen(logits[n - 1 : -1].float(), row[n:]))
                rolled.append(torch.tensor(o.logprobs, device=session.device))
    rolled, found = torch.cat(rolled), torch.cat(found)
    return (compare(found, rolled), rolled, found), seconds


def judged(who: Model, layout: str, found: Found, of: str) -> tuple[Row, dict]:
    """Returns the row of what was generated and rescored, and its figures."""
    drift, rolled, again = found
    _, told = figures(rolled, again)
    most = CONTRACT["chain"]["parity"]
    sound = not drift.mismatches and max(told["max |Δ logprob|"], abs(told["KL"]), told["clipped"]) <= most
    said = {"rows": told["tokens"], "verdict": PASS if sound else NEEDS_FIX, "detail": f"KL {told['KL']:.3g}"}
    return who.about(PARITY, layout, drift, [of], "rescored packed", **said), told


def run(session, dtype: str, batches: str = "qwen3") -> tuple[list[dict], dict[str, Tensor]]:
    """Judges `generate` of every model and continuous batching of one, and records the rows; returns the figures, ours
    and stock's, and {model: |Δ logprob| of continuous batching}."""
    lines, gaps, c = [], {}, case(session)

    def note(name: str, ours: bool, layout: str, found: Found, of: str, prompts: int, speed="–"):
        row, told = judged(Model(session, name, dtype), layout, found, of)
        if ours:
            session.add([row])
        lines.append(
            {"model": f"{name}, {dtype}, {OURS if ours else STOCK}", "how": layout, "prompts": prompts}
            | told
            | {"tokens / s": speed}
        )

    with quiet():
        for name in architectures(session):
            for ours in (True, False):
                model = built(session, name, dtype, ours)
                for cache in CACHES if ours else ("dynamic",):
                    found = generated(session, model, cache, ours)
                    note(name, ours, f"generate, {cache} cache", found, "logits", c["prompts"])
                if name == batches:
                    count = c["batched_prompts" if ours else "stock_prompts"]
                    found, seconds = batched(session, model, ours, count)
                    note(name, ours, "generate_batch", found, "logprob", count, f"{len(found[1]) / seconds:.3g}")
                    gaps[OURS if ours else STOCK] = (found[2] - found[1]).abs()
    return lines, gaps
