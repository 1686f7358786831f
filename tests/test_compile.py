"""The decoder under torch.compile: a step that trains is one graph, of the bits of eager mode, into `main_grad` too."""

from dataclasses import replace

import pytest
import torch
from conftest import slow_but

from bi_kernels import MainGrads
from bi_kernels.model import CONFIGS, Decoder
from bi_kernels.model.cache import packed

LENGTHS = [(5, 19), (3, 1, 16)]  # of two micro-batches


def gradients(name: str, backend: str | None) -> list[torch.Tensor]:
    """Returns the losses and gradients of a step, in eager mode without a backend."""
    model, drawn = Decoder(replace(CONFIGS[name], layers=1)), torch.Generator().manual_seed(0)
    grads = MainGrads(model.parameters(), tied=model.tied)

    def loss(ids, targets, rows):
        logprob, entropy = model.ops.lm_head_logprob(model(ids, rows), model.lm_head, targets)
        return 0.1 * entropy.sum() - logprob.sum()

    called, losses = loss if backend is None else torch.compile(loss, backend=backend, fullgraph=True), []
    for lengths in LENGTHS:
        rows = packed(lengths, "cpu")
        ids, targets = torch.randint(model.config.vocab, (2, sum(lengths)), generator=drawn)
        with rows.layout:
            losses.append(called(ids, targets, rows))
        losses[-1].backward()
    grads.join()
    return [*losses, *(p.main_grad for p in model.parameters())]


@pytest.mark.parametrize("name", slow_but(["tiny", "tiny-experts"], "tiny"))
def test_a_compiled_step_of_the_decoder_has_the_bits_of_eager_mode(name):
    torch.compiler.reset()
    found, expected = gradients(name, "aot_eager"), gradients(name, None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
