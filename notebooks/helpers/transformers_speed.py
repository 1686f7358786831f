"""Times a step, and a decode step in a CUDA graph, on a GPU after `apply`, next to the stock model's."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import StaticCache

from bi_kernels.audit.inputs import generator
from bi_kernels.audit.targets.transformers import OURS, STOCK, build, draw_ids, quiet
from bi_kernels.audit.timing import timed

TIMED = "qwen3"
STEP, DECODE, ROOM = (4, 2048), (8, 500), 1024  # sequences and tokens; of the static cache


def training_step(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """Returns what runs a forward and backward of ids (batch, length); it has run once."""

    def step() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    step()
    return step


@torch.no_grad()
def _decode(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """Returns what replays one decode step behind a static cache, captured; it begins by setting the cache back, so
    that every replay computes the same token."""
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    position = torch.full((1, 1), ids.shape[1], device=ids.device)
    lengths = [layer.cumulative_length for layer in cache.layers]

    def step() -> torch.Tensor:
        for length in lengths:
            length.fill_(ids.shape[1])
        return model(token, position_ids=position, past_key_values=cache, use_cache=True).logits

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay(kept=(out, cache, token, position)) -> None:  # what the graph reads and writes
        graph.replay()

    return replay


def run(session, dtype: str) -> list[dict]:
    """Times both, calls taking turns; returns the lines of a table."""
    lines = []
    with quiet():
        models = {OURS: build(session, TIMED, dtype), STOCK: build(session, TIMED, dtype, ours=False)}
        for what, make, shape in (
            ("forward and backward of a step", training_step, STEP),
            ("a decode step in a CUDA graph", _decode, DECODE),
        ):
            ids = draw_ids(session, shape, generator("cpu", session.parameters["seed"], "speed"))
            calls = {name: make(model, ids) for name, model in models.items()}
            ms = timed(calls)
            sizes = f"{shape[0]} × {shape[1]} tokens"
            lines.append({"what": what, "of": sizes, "ms": ms[OURS], "of stock": ms[OURS] / ms[STOCK]})
            for model in models.values():
                model.zero_grad()
    return lines
