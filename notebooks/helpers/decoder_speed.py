"""Times a step and a token of a decoder on a GPU next to the same decoder of stock ops, eager and compiled."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import bi_kernels
from bi_kernels.audit.targets.decoder import DecoderTarget
from bi_kernels.audit.timing import GPU, times_ms
from bi_kernels.contract import CONTRACT
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Cache, Decoder, Rows, packed
from bi_kernels.ops.sample import sample
from bi_kernels.tokens import TokenLayout
from helpers import torch_ops

KEEP = 2**35  # bytes of logits that are kept for the backward, as stock keeps them
STEPS, DECODES = ((4, 2048), (1, 8192)), ((1, 2048), (32, 4096), (64, 1024))


def _decoder(session, ops, **more) -> Decoder:
    config = replace(
        CONFIGS[session.parameters["model"] or session.parameters["shapes"]], layers=CONTRACT["chain"]["stock_layers"]
    )
    return Decoder(config, session.device, longest=8192, ops=ops, **more)


def _peak(call: Callable) -> float:
    """Returns the GiB that a call needs beyond what is held before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


def packed_steps(session) -> list[dict]:
    """Times a packed step of the whole decoder once it is warm, with checkpointing and without; and its peak memory,
    weights and gradients included."""
    lines = []
    for dtype in session.dtypes:
        target = DecoderTarget(session, dtype)
        for layout in ("packed", "checkpointing off"):
            target.run(layout)
            torch.cuda.reset_peak_memory_stats()
            with GPU.alone():
                torch.cuda.synchronize()
                begun = time.perf_counter()
                target.run(layout)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - begun
            said = {"checkpointing": "on" if layout == "packed" else "off", "layers": target.model.config.layers}
            said |= {"sequences": len(target.lengths), "tokens": target.count, "s": seconds}
            lines.append(said | {"GiB": torch.cuda.max_memory_allocated() / 2**30})
        del target
    return lines


def steps(session) -> list[dict]:
    """Times forward and backward: ours into main_grad, stock in eager mode and compiled; ratios of time to stock's, and
    the memory that each needs. First the audit's uneven sequences, packed, for stock by flash attention of packed
    sequences; then whole batches."""
    ours, stock = _decoder(session, bi_kernels, keep_bytes=KEEP), _decoder(session, torch_ops)
    grads, lines = MainGrads(ours.parameters(), ours.tied), []
    for lengths in (CONTRACT["chain"]["real"]["lengths"], *([length] * batch for batch, length in STEPS)):
        uneven = len(set(lengths)) > 1
        rows = packed(lengths, session.device)
        if uneven:
            of_stock = rows._replace(layout=None, attend=rows.attend | {"longest": max(lengths)})
        else:
            rows = Rows(rows.positions.view(len(lengths), -1), TokenLayout.padded(lengths, max(lengths)), {})
            of_stock = rows._replace(layout=None)
        ids, targets = torch.randint(0, ours.config.vocab, (2, *rows.positions.shape), device=session.device)
        loss = lambda logprob, ids=ids: logprob.sum() / ids.numel()

        def forward(ids, targets, of_stock=of_stock):
            return torch_ops.lm_head_logprob(stock(ids, of_stock), stock.lm_head, targets)[0]

        def our_step(ids=ids, targets=targets, rows=rows, loss=loss) -> None:
            grads.mark()  # as at the beginning of a step; the numbers do not matter here
            loss(ours.logprobs(ids, targets, rows)[0]).backward()

        def stock_step(call, ids=ids, targets=targets, loss=loss) -> None:
            loss(call(ids, targets)).backward()
            for p in stock.parameters():
                p.grad = None

        compiled = torch.compile(forward, dynamic=False)
        calls = {"ours": our_step, "eager": partial(stock_step, forward), "compiled": partial(stock_step, compiled)}
        for call in calls.values():
            call()
        peaks = {name: _peak(call) for name, call in calls.items()}
        ms = dict(zip(calls, times_ms(*calls.values(), rounds=2)))
        sequences = f"{len(lengths)} uneven" if uneven else f"{len(lengths)} × {lengths[0]}"
        lines.append(
            {"sequences": sequences, "tokens": ids.numel(), "layers": ours.config.layers, "ms": ms["ours"]}
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
    models = {"ours": _decoder(session, bi_kernels), "stock": _decoder(session, torch_ops)}
    for batch, keys in DECODES:
        graphs = [_captured(model, batch, keys, masked=name == "ours") for name, model in models.items()]
        ours, stock = times_ms(*graphs)
        said = {"batch": batch, "keys": keys, "layers": models["ours"].config.layers}
        lines.append(said | {"ms": ours, "of stock": ours / stock})
        del graphs
    return lines


def decode_step(model: Decoder, cache: Cache, masked: bool) -> Callable[[], None]:
    """Returns a function that computes the last token that the cache has room for; masked: attention is told the
    lengths."""
    cache.lengths += cache.capacity - 1
    ids = torch.zeros_like(cache.lengths)
    counts, numbers = torch.ones_like(ids), torch.arange(len(ids), device=ids.device)

    @torch.no_grad()
    def step() -> None:
        rows = cache.rows(1, counts)
        hidden = model(ids[:, None], rows if masked else rows._replace(attend={}), cache)[:, 0]
        ids.copy_(sample(model.ops.linear(hidden, model.lm_head), 0, numbers, cache.lengths))

    return step


def _captured(model: Decoder, batch: int, keys: int, masked: bool) -> Callable[[], None]:
    """Returns a function that replays a decode step, captured."""
    step = decode_step(model, Exact(model.config, batch, keys, model.lm_head), masked)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(step=step) -> None:  # which holds what the graph reads
        graph.replay()

    return replay
