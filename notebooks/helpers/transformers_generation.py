"""Shows what Transformers' models generate, by `generate` and by continuous batching, and what rescoring changes."""

import inspect
import time

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from bi_kernels.audit.compare import compare
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.targets.model import rescored_row
from bi_kernels.audit.targets.transformers import (
    CACHES,
    OURS,
    STOCK,
    Rescored,
    TransformersTarget,
    architectures,
    build,
    case,
    chosen,
    draw_ids,
    generated,
    packed_logits,
    quiet,
)
from helpers.figures import plt  # in the style of all that is drawn

RESCORED = 8  # sequences of continuous batching that one call rescores
PAGE = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
LOWEST, HIGHEST = -22, 2  # powers of two between which a difference is shown


def batched(session, model: nn.Module, ours: bool, count: int) -> tuple[Rescored, float]:
    """Samples by continuous batching and compares the logprobs it returns with those of the same tokens rescored;
    returns that, and the seconds that sampling took. Raises ValueError where prompts or tokens are missing."""
    c, g = case(session), generator("cpu", session.parameters["seed"], "batched")
    lengths = torch.randint(1, c["batched_prompt"] + 1, (count,), generator=g).tolist()
    prompts = [ids.tolist() for ids in draw_ids(session, [sum(lengths)], g).split(lengths)]
    how = GenerationConfig(max_new_tokens=c["batched_new"], do_sample=True, eos_token_id=-1, pad_token_id=0)
    more = {PAGE: c["page"]} if "page" in c else {}
    if not ours:
        more["use_cuda_graph"] = False  # whose warm-up samples from NaN where its memory holds some (5.17)
        if "auto_switch_to_flash" in inspect.signature(ContinuousBatchingConfig).parameters:
            more["auto_switch_to_flash"] = False
        if PAGE == "block_size":
            model.set_attn_implementation("paged|sdpa")
    batching = ContinuousBatchingConfig(return_logprobs=True, max_requests_per_batch=96, **c["batching"], **more)
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
        for at in range(0, count, RESCORED):
            some = results[at : at + RESCORED]
            sequences = [torch.tensor([*o.prompt_ids, *o.generated_tokens], device=session.device) for o in some]
            for o, ids, logits in zip(some, sequences, packed_logits(model, sequences, ours)):
                n = len(o.prompt_ids)
                found.append(chosen(logits[n - 1 : -1].float(), ids[n:]))
                rolled.append(torch.tensor(o.logprobs, device=session.device))
    logprobs = torch.cat(rolled), torch.cat(found)
    return (compare(*logprobs[::-1]), logprobs), seconds


def run(session, dtype: str, batches: str = "qwen3") -> tuple[list[dict], dict[str, Tensor]]:
    """Judges `generate` of every model, and continuous batching of the model `batches`, and records the rows; returns
    the figures of ours and stock's, and {model: |Δ logprob| of continuous batching}."""
    lines, gaps, c = [], {}, case(session)

    def note(target: TransformersTarget, layout: str, found: Rescored, tensor: str, prompts: int, speed="–"):
        row, figures = rescored_row(target, layout, *found, against="rescored packed", tensor=tensor)
        if target.ours:
            session.add([row])
        who = {"model": f"{target.name}, {dtype}, {OURS if target.ours else STOCK}", "how": layout, "prompts": prompts}
        lines.append(who | figures | {"tokens / s": speed})

    with quiet():
        for name in architectures(session):
            for ours in (True, False):
                target = TransformersTarget(session, name, dtype, build(session, name, dtype, ours), ours)
                for cache in CACHES if ours else ("dynamic",):
                    found = generated(session, target.model, cache, ours)
                    note(target, f"generate, {cache} cache", found, "logits", c["prompts"])
                if name == batches:
                    count = c["batched_prompts" if ours else "stock_prompts"]
                    found, seconds = batched(session, target.model, ours, count)
                    _, (rolled, again) = found
                    note(target, "generate_batch", found, "logprob", count, f"{len(rolled) / seconds:.3g}")
                    gaps[OURS if ours else STOCK] = (again - rolled).abs()
    return lines, gaps


def draw_gaps(found: dict[str, Tensor], title: str) -> plt.Figure:
    """Draws the share of tokens by |Δ logprob|, a bar a power of two; equal bits stand apart, at the left."""
    figure, ax = plt.subplots(figsize=(8.5, 3.2))
    width = 0.8 / len(found)
    edges = 2.0 ** np.arange(LOWEST, HIGHEST + 1)
    for i, (name, gap) in enumerate(found.items()):
        values = gap.double().cpu().numpy()
        counts, _ = np.histogram(np.clip(values[values > 0], edges[0], edges[-1]), edges)
        shares = np.array([(values == 0).sum(), 0, *counts]) / len(values)
        at = np.arange(len(shares)) + (i - (len(found) - 1) / 2) * width
        ax.bar(at, shares, width, label=name, color=("#0072B2", "#E69F00")[i % 2])
    powers = range(LOWEST + 2, HIGHEST, 4)
    ax.set_xticks([0, *(2 + p - LOWEST - 0.5 for p in powers)], ["equal bits", *(f"$2^{{{p}}}$" for p in powers)])
    ax.set(xlabel="|Δ logprob|", ylabel="share of tokens", ylim=(0, 1.05), title=title)
    ax.legend(edgecolor="none", loc="upper right")
    figure.tight_layout()
    return figure


def versions() -> str:
    """Names the library that was audited."""
    return f"transformers {transformers.__version__}"
