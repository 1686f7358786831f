"""A mixture's experts modules of Transformers: rows that do not depend on the batch, gradients that do not depend on
the split."""

import itertools

import pytest
import torch
from conftest import slow_but

from bi_kernels.integrations.transformers import experts, modules
from bi_kernels.integrations.transformers.layout import Call
from bi_kernels.integrations.transformers.swap import swapped
from bi_kernels.tokens import TokenLayout

transformers = pytest.importorskip("transformers")
LENGTHS = [5, 1, 19, 40]
SPLITS = ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]])


def _module(family: str, dtype: torch.dtype) -> torch.nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    if family == "qwen3_moe":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig as Config
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Experts

        config = Config(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, **sizes)
    elif family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig as Config
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Experts

        config = Config(num_local_experts=8, num_experts_per_tok=2, intermediate_size=24, **sizes)
    else:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig as Config
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts

        config = Config(num_local_experts=8, num_experts_per_tok=2, intermediate_size=24, **sizes)
    torch.manual_seed(0)
    config._experts_implementation = "eager"
    module = Experts(config)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return module.to(dtype)


def _step(module, x, ids, weights, dy, split, left=None):
    """Returns outputs, input gradients, and parameters' gradients of a step cut into micro-batches."""
    for p in module.parameters():
        p.grad = None
    offsets = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    out, dx, dw = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
    for samples in split:
        lengths = [LENGTHS[i] for i in samples]
        width = max(lengths)
        at = [torch.arange(offsets[i], offsets[i] + LENGTHS[i]) for i in samples]
        if left is None:
            layout = TokenLayout.packed([0, *torch.tensor(lengths).cumsum(0).tolist()])
        else:
            layout = TokenLayout.padded(lengths, width, left)
            filler = lambda a: torch.full((width - len(a),), -1)
            at = [torch.cat((filler(a), a) if left else (a, filler(a))) for a in at]
        at = torch.cat(at)
        some, real = at.clamp(min=0), at >= 0
        given, routing = x[some].requires_grad_(), weights[some].requires_grad_()
        call = Call(len(samples), width, layout=layout)
        with call:
            y = module(given, ids[some], routing)
        call.folds.attach(y)
        y.backward(dy[some])
        for into, found in ((out, y.detach()), (dx, given.grad), (dw, routing.grad)):
            into[at[real]] = found[real]
    return [out, dx, dw, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", slow_but(["qwen3_moe", "mixtral", "gpt_oss"], "qwen3_moe"))
def test_rows_and_gradients_of_experts_depend_on_no_batch_and_no_split(family, dtype, monkeypatch):
    module = _module(family, dtype)
    module.__class__ = swapped(type(module), modules.Experts)
    tokens = sum(LENGTHS)
    x, dy = torch.randn(2, tokens, 32).to(dtype)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)])  # three experts get no token
    weights = torch.rand(tokens, 2).to(dtype)
    whole = _step(module, x, ids, weights, dy, SPLITS[0])
    for split, left, padded in itertools.product(SPLITS, (None, False, True), (False, True)):
        if padded:
            monkeypatch.setattr(experts, "PAD_FROM", 0)
        for a, b in zip(whole, _step(module, x, ids, weights, dy, split, left)):
            assert torch.equal(a, b)
        monkeypatch.undo()
    with torch.no_grad():
        alone = torch.cat([module(x[t, None], ids[t, None], weights[t, None]) for t in range(0, tokens, 7)])
    assert torch.equal(alone, whole[0][::7])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_those_of_transformers(family):
    module, tokens = _module(family, torch.float32), 12
    x, ids = torch.randn(tokens, 32), torch.stack([torch.randperm(8)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2)
    found = []
    for kind in (swapped(type(module), modules.Experts), type(module)):
        module.__class__ = kind
        for p in module.parameters():
            p.grad = None
        given = x.clone().requires_grad_()
        y = module(given, ids, weights)
        y.square().sum().backward()
        found.append([y, given.grad, *(p.grad for p in module.parameters())])
    for ours, theirs in zip(*found):
        assert (ours - theirs).abs().max() <= 2.0**-13 * theirs.abs().max()
