"""What a step and a token of a decoder cost on a GPU, beside the same decoder of stock ops, eager and compiled."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

import bi_kernels
from bi_kernels.audit.chain import plain
from bi_kernels.audit.chain.layouts import Step
from bi_kernels.audit.timing import GPU, times_ms
from bi_kernels.contract import CONTRACT
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Cache, Decoder, Rows, packed
from bi_kernels.ops.sample import sample
from bi_kernels.tokens import TokenLayout

KEEP = 2**35  # bytes of logits that are kept for the backward, as stock keeps them
STEPS, DECODES = ((4, 2048), (1, 8192)), ((1, 2048), (32, 4096), (64, 1024))


def _decoder(session, ops, **more) -> Decoder:
    config = replace(CONFIGS[session.parameters["shapes"]], layers=CONTRACT["chain"]["stock_layers"])
    return Decoder(config, session.device, longest=8192, ops=ops, **more)


def _peak(call: Callable) -> float:
    """Returns the GiB that a call needs beyond what is held before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


def whole(step: Step) -> list[dict]:
    """Times a packed step once it is warm, with checkpointing and without; and the memory that it needs in all, weights
    and gradients included."""
    lines = []
    for layout in ("packed", "checkpointing off"):
        step.run(layout)
        torch.cuda.reset_peak_memory_stats()
        with GPU.alone():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            step.run(layout)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
        said = {"checkpointing": "on" if layout == "packed" else "off", "layers": step.model.config.layers}
        peak = torch.cuda.max_memory_allocated() / 2**30
        lines.append(said | {"sequences": len(step.lengths), "tokens": step.count, "s": seconds, "GiB": peak})
    return lines


def steps(session) -> list[dict]:
    """Times forward and backward: ours into main_grad, stock in eager mode and compiled; ratios of time to stock's, and
    the memory that each needs. First of the audit's uneven sequences, packed, stock by its flash attention of packed
    sequences; then of whole batches."""
    ours, stock = _decoder(session, bi_kernels, keep_bytes=KEEP), _decoder(session, plain)
    grads, lines = MainGrads(ours.parameters()), []
    for lengths in (session.case["lengths"], *([length] * batch for batch, length in STEPS)):
        uneven = len(set(lengths)) > 1
        told = packed(lengths, session.device)
        if uneven:
            silent = told._replace(layout=None, attend=told.attend | {"longest": max(lengths)})
        else:
            at = told.positions.view(len(lengths), -1)
            told = Rows(at, TokenLayout.padded(lengths, max(lengths)), {})
            silent = told._replace(layout=None)
        ids, targets = torch.randint(0, ours.config.vocab, (2, *told.positions.shape), device=session.device)

        def theirs(ids, targets):
            return plain.lm_head_logprob(stock(ids, silent), stock.lm_head, targets)[0]

        def backward(logprob) -> None:
            (logprob.sum() / ids.numel()).backward()

        def our_step() -> None:
            grads.mark()  # as at the beginning of a step; the numbers do not matter here
            backward(ours.logprobs(ids, targets, told)[0])

        def their_step(call) -> None:
            backward(call(ids, targets))
            for p in stock.parameters():
                p.grad = None

        compiled = torch.compile(theirs, dynamic=False)
        calls = {"ours": our_step, "eager": lambda: their_step(theirs), "compiled": lambda: their_step(compiled)}
        for call in calls.values():
            call()
        peaks = {name: _peak(call) for name, call in calls.items()}
        ms = dict(zip(calls, times_ms(*calls.values(), rounds=2)))
        lines.append(
            {
                "sequences": f"{len(lengths)} uneven" if uneven else f"{len(lengths)} × {lengths[0]}",
                "tokens": ids.numel(),
                "layers": ours.config.layers,
            }
            | {"ms": ms["ours"]}
            | {f"of stock {name}": ms["ours"] / ms[name] for name in ("eager", "compiled")}
            | {f"GiB more, {name}": peak for name, peak in peaks.items()}
        )
        torch._dynamo.reset()
    return lines


class Exact(Cache):
    """A cache whose rows all hold as many keys, so that stock attention needs no mask, which is its best."""

    def put(self, layer, k, v, rows):
        found = super().put(layer, k, v, rows)
        return tuple(t[:, : self.capacity] for t in found) if rows.attend == {} else found

    def advance(self, rows):
        """Stays where it is, so that every replay of a graph computes the same token."""


def decodes(session) -> list[dict]:
    """Times a decode step in a CUDA graph, from a token to the next: ours, and stock without a mask."""
    lines = []
    models = {"ours": _decoder(session, bi_kernels), "stock": _decoder(session, plain)}
    for batch, keys in DECODES:
        graphs = {}
        for name, model in models.items():
            cache = Exact(model.config, batch, keys, model.lm_head)
            graphs[name] = _captured(model, cache, told=name == "ours")
        ms = dict(zip(graphs, times_ms(*graphs.values())))
        said = {"batch": batch, "keys": keys, "layers": models["ours"].config.layers}
        lines.append(said | {"ms": ms["ours"], "of stock": ms["ours"] / ms["stock"]})
        del graphs
    return lines


def decode_step(model: Decoder, cache: Cache, told: bool) -> Callable[[], None]:
    """Returns what computes the last token that the cache has room for; told: attention is told the lengths."""
    cache.lengths += cache.capacity - 1
    ids = torch.zeros_like(cache.lengths)
    counts, numbers = torch.ones_like(ids), torch.arange(len(ids), device=ids.device)

    @torch.no_grad()
    def step() -> None:
        rows = cache.rows(1, counts)
        hidden = model(ids[:, None], rows if told else rows._replace(attend={}), cache)[:, 0]
        ids.copy_(sample(model.ops.linear(hidden, model.lm_head), 0, numbers, cache.lengths))

    return step


def _captured(model: Decoder, cache: Cache, told: bool) -> Callable[[], None]:
    """Returns what replays a decode step, captured."""
    step = decode_step(model, cache, told)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(step=step) -> None:  # which holds what the graph reads
        graph.replay()

    return replay
