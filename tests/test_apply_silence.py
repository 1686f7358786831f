"""What `apply` and the mode once said nothing about: gradients lost, code that only training runs, other tokens."""

import contextlib
import types
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils.operations import convert_outputs_to_fp32
from families import built
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from bi_kernels import MainGrads, TokenLayout, batch_invariant_mode
from bi_kernels.integrations.transformers import apply, restore

IDS = torch.randint(1, 160, (3, 20), generator=torch.Generator().manual_seed(0))


class Mlp(nn.Module):
    """The base of MLPs with code of their own."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.lin = nn.Linear(width, width, bias=False)
        self.table = nn.Parameter(torch.randn(width, width))


def applied(forward) -> tuple[nn.Module, object]:
    model = built("qwen3", 1)
    model.model.layers[0].mlp = type("Mlp", (Mlp,), {"forward": forward})().bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, apply(model)


def test_a_parameter_that_is_called_and_read_is_used_twice():
    _, report = applied(lambda self, x: self.lin(x) + F.linear(x.relu(), self.lin.weight))
    assert report.batch_invariant and report.others["model.layers.0.mlp.lin.weight"] == "a call uses it more than once"


@pytest.mark.parametrize("forward, said", [
    (lambda self, x: self.lin(x) * (torch.empty_like(x).uniform_(0.9, 1.1) if self.training else 1),
     "uniform_: no batch-invariant form"),
    (lambda self, x: self.lin(x) + F.pad(x, (0, 0, 1, -1)), ""),
], ids=["noise in training", "the token before"])  # fmt: skip
def test_code_that_the_batch_reaches_is_no_yes(forward, said):
    model, report = applied(forward)
    assert not report.batch_invariant and model.training
    assert said in report.left.get("model.layers.0.mlp", "") and bool(report.checks) is not bool(said)


def test_a_weight_that_a_hook_computes_is_no_yes():
    model = built("qwen3", 1)
    prune.random_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.3)
    with pytest.raises(ValueError, match="NO. Linear is still PyTorch's"):
        apply(model, strict=True)


def test_a_layer_that_is_called_twice_has_no_split_invariant_gradient():
    model = built("qwen3")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(ValueError, match="PyTorch adds up the gradients of 11 of 14"):
        apply(model, strict=True)


def test_a_forward_that_was_patched_is_not_replaced(monkeypatch):
    relu = lambda self, x: self.down_proj(self.gate_proj(x).relu() * self.up_proj(x))
    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", relu)
    model = built("qwen3", 1)
    expected = model(IDS).logits
    apply(model, strict=True)
    assert (model(IDS).logits - expected).norm() <= 2.0**-6 * expected.norm()


class Handing(Qwen3ForCausalLM):
    """Hands on what it is given."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Halved(Qwen3ForCausalLM):
    """Calls its base on a part of the tokens."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return super().forward(input_ids[:, :-3], attention_mask[:, :-3])


def test_arguments_by_place_are_found_behind_args_and_kwargs():
    model = Handing(built("qwen3", 1).config).bfloat16()
    apply(model, strict=True)
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    given, alone = model(IDS, mask).logits, model(IDS[:1, 7:]).logits
    assert torch.equal(given[0, 7:], alone[0]) and torch.equal(given, model(input_ids=IDS, attention_mask=mask).logits)


def test_attention_over_other_tokens_than_the_calls_is_refused():
    model = Halved(built("qwen3", 1).config).bfloat16()
    with pytest.warns(UserWarning, match="NO"):
        apply(model)
    with pytest.raises(ValueError, match=r"attention is over \(3, 17\) tokens in a model's call of \(3, 20\)"):
        model(IDS, torch.ones_like(IDS))


def test_a_configuration_that_two_models_share_is_no_silence():
    first = built("qwen3", 1)
    second = Qwen3ForCausalLM(first.config).bfloat16()
    apply(first)
    apply(second)
    restore(first)
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa', expected 'bi_kernels': a model that shares"):
        second(IDS)


def test_an_adapter_of_experts_has_its_gradient_and_no_yes():
    changes = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    torch.manual_seed(0)
    model, found = get_peft_model(built("qwen3_moe", 1).float(), changes).eval(), []  # bf16 would choose other experts
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    for _ in range(2):
        model(IDS).logits.float().square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
        if len(found) == 1:
            with pytest.warns(UserWarning, match="Split-invariant: NO"):
                report = apply(model)
    assert any("a computed weight" in why for why in report.others.values())
    assert found[0].keys() == found[1].keys()
    assert all((found[1][n] - g).norm() <= 0.05 * g.norm() for n, g in found[0].items())


LOST = {  # code that reads a view or a cast of a parameter, and what strict says
    "stack": (lambda x, p: x * torch.stack([p[0], p[1]]).sum(0), "stack"),
    "cast and exp": (lambda x, p: x * p[0].bfloat16().float().exp(), "exp"),
    "assignment": (lambda x, p: x.clone().index_put_((torch.tensor(0),), p[0]), "index_put_"),
    "computed weight": (lambda x, p: F.linear(x, p * p[0]), "a computed weight"),
}


@pytest.mark.parametrize("code", LOST)
def test_a_gradient_that_pytorch_computes_is_kept_and_named(code):
    function, said = LOST[code]
    x, p = torch.randn(5, 8), nn.Parameter(torch.randn(2, 8))
    (expected,) = torch.autograd.grad(function(x, p).square().sum(), p)
    grads = MainGrads([p])
    with TokenLayout.packed([0, 5]), batch_invariant_mode() as mode:
        function(x, p).square().sum().backward()
    grads.join()
    assert any(said in name for name in mode.unknown)
    assert (p.main_grad - expected).norm() <= 2.0**-6 * expected.norm()
    with pytest.raises(ValueError, match=said), TokenLayout.packed([0, 5]), batch_invariant_mode(strict=True):
        function(x, p)


def test_a_batch_of_one_adds_to_the_same_sum():
    x, found = torch.randn(3, 6, 8), []
    for calls in ((3,), (1, 1, 1)):
        p = nn.Parameter(torch.ones(1, 9, 8, dtype=torch.bfloat16))
        grads = MainGrads([p])
        for rows in x.bfloat16().split(calls):
            with TokenLayout.packed(range(len(rows) + 1)), batch_invariant_mode(strict=True):
                (rows + p[:, :6]).square().sum().backward()
        grads.join()
        found.append(p.main_grad)
    assert torch.equal(*found) and found[0].any()


def test_arguments_by_name_and_numpys_names_are_routed():
    x, w = torch.randn(5, 8), torch.randn(8, 8)
    q = x.view(1, 1, 5, 8)
    with batch_invariant_mode(strict=True) as mode:
        found = F.linear(input=x, weight=w), x.mean(axis=-1, keepdims=True), torch.matmul(input=x, other=w)
        y = F.scaled_dot_product_attention(query=q, key=q, value=q)
    expected = x @ w.T, x.mean(-1, keepdim=True), x @ w
    for a, b in zip((*found, y), (*expected, F.scaled_dot_product_attention(q, q, q)), strict=True):
        assert (a - b).norm() <= 2.0**-16 * b.norm()
    assert mode.routed.total() == 4
    with pytest.raises(ValueError, match="sum"), batch_invariant_mode(strict=True):
        x.double().sum(-1)


PROMPTS = [torch.randint(1, 160, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 1, 17, 9, 30, 22)]


def left_padded(prompts) -> tuple[torch.Tensor, torch.Tensor]:
    pad = lambda rows: torch.stack([F.pad(r, (max(map(len, rows)) - len(r), 0)) for r in rows])
    return pad(prompts), pad([torch.ones_like(p) for p in prompts])


def scored(logits, ids, mask) -> torch.Tensor:
    """-Σ log p(next token); logits (batch, length, vocab)."""
    logprob = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(logprob * mask[:, :-1]).sum() / 50


def model_loss(model, ids, mask):
    return scored(model(input_ids=ids, attention_mask=mask).logits, ids, mask)


def of_head(model, ids, mask):
    """The head is a part, called by itself."""
    return scored(model.lm_head(model.model(input_ids=ids, attention_mask=mask).last_hidden_state), ids, mask)


def of_chosen(model, ids, mask):
    return model.lm_head(model.model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]).sum()


def gradients(model, loss, counts) -> dict[str, torch.Tensor]:
    """A step's, in fp32, of micro-batches of so many sequences."""
    at = 0
    for p in model.parameters():
        p.grad = None
    for count in counts:
        loss(model, *left_padded(PROMPTS[at : at + count])).backward()
        at += count
    return {n: getattr(p, "main_grad", p.grad).clone() for n, p in model.named_parameters()}


def drifting(model, loss=model_loss) -> list[str]:
    """The parameters whose gradient depends on the split."""
    whole, split = (gradients(model, loss, counts) for counts in ((6,), (1, 3, 2)))
    return [n for n, g in whole.items() if not torch.equal(g, split[n])]


def reads_its_head(self, input_ids, attention_mask=None, **kwargs):
    hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return types.SimpleNamespace(logits=F.linear(hidden, self.lm_head.weight))


def reads_chosen(self, input_ids, attention_mask=None, **kwargs):
    """As trainers do: shifted, and the tokens that have a label alone."""
    hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, :-1]
    chosen = attention_mask[:, :-1].bool()
    logits = input_ids.new_zeros(*input_ids.shape, 160, dtype=hidden.dtype)
    logits[:, :-1][chosen] = hidden[chosen] @ self.lm_head.weight.t()
    return types.SimpleNamespace(logits=logits)


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ hidden.flatten(0, -2)


def fuses(self, input_ids, attention_mask=None, **kwargs):
    hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return types.SimpleNamespace(logits=Fused.apply(hidden, self.lm_head.weight))


def joins(self, input_ids, attention_mask=None, **kwargs):
    hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    logits = F.linear(torch.cat([hidden[:, :1], hidden[:, 3:]], 1), self.lm_head.weight)
    return types.SimpleNamespace(logits=F.pad(logits, (0, 0, 2, 0)))


def sums(self, input_ids, attention_mask=None, **kwargs):
    hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return types.SimpleNamespace(logits=F.linear(hidden, self.lm_head.weight) - hidden.logsumexp(-1, keepdim=True))


def patched(forward, on_class: bool = False) -> nn.Module:
    model = built("qwen3", 1)
    apply(model, strict=True)
    if on_class:
        type(model).replaces.forward = forward
    else:
        model.forward = types.MethodType(forward, model)
    return model


@pytest.mark.parametrize("forward", [reads_its_head, reads_chosen])
def test_a_forward_that_is_set_after_apply_is_folded(forward, monkeypatch):
    assert drifting(patched(forward)) == []
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", Qwen3ForCausalLM.forward)  # set back at the end
    assert drifting(patched(forward, on_class=True)) == []


def test_a_forward_that_is_set_gives_as_many_logits_as_are_asked_for():
    model = patched(reads_its_head).train()
    assert torch.equal(model(IDS, logits_to_keep=2).logits, model(IDS).logits[:, -2:])


def test_the_control_of_forwards_that_are_set():
    model = built("qwen3", 1)
    model.forward = types.MethodType(reads_its_head, model)
    assert "lm_head.weight" in drifting(model)


def linears(self, x):
    inner = F.silu(F.linear(x, self.gate_proj.weight)) * F.linear(x, self.up_proj.weight)
    return F.linear(inner, self.down_proj.weight)


@pytest.mark.parametrize("where", ["instance", "swapped class", "class"])
def test_a_forward_that_is_set_on_a_part_is_refused_without_gradients_too(where, monkeypatch):
    model = built("qwen3", 1)
    apply(model, strict=True)
    mlp = model.model.layers[0].mlp
    at = {"instance": mlp, "swapped class": type(mlp), "class": modeling_qwen3.Qwen3MLP}[where]
    monkeypatch.setattr(at, "forward", partial(linears, mlp) if at is mlp else linears)
    for mode in (torch.no_grad(), contextlib.nullcontext()):
        with mode, pytest.raises(ValueError, match="the forward of .*mlp, a Qwen3MLP, was set after apply"):
            model(IDS)


def test_a_forward_that_is_set_on_a_parts_class_before_apply_is_folded(monkeypatch):
    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", linears)
    model = built("qwen3", 1)
    apply(model, strict=True)
    assert drifting(model) == []


def test_accelerates_forward_is_folded():
    model = built("qwen3", 1)
    apply(model, strict=True)
    model.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(model.forward.__func__), model)
    model.forward = types.MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
    assert drifting(model) == []


@pytest.mark.parametrize("forward, said", [
    (fuses, "lm_head.weight got its gradient from code that is not ours"),
    (joins, "is given .* tokens, .* and nobody told their sequences"),
    (sums, "a forward that was set on the model calls logsumexp, which has no batch-invariant form"),
])  # fmt: skip
def test_a_forward_that_no_fold_reaches_is_refused(forward, said):
    with pytest.raises(ValueError, match=said):
        gradients(patched(forward), model_loss, (2,))


def test_a_module_outside_its_models_call_follows_the_sequences_or_is_refused():
    model = built("qwen3", 1)
    apply(model, strict=True)
    assert drifting(model, of_head) == []
    with pytest.raises(ValueError, match="a Linear that trains is called outside its model's call, on 6 tokens"):
        gradients(model, of_chosen, (2,))
    with torch.no_grad():
        of_chosen(model, *left_padded(PROMPTS[:2]))

    def told(model, ids, mask):
        with TokenLayout.packed([0, *mask.sum(1).cumsum(0).tolist()]):
            return of_chosen(model, ids, mask)

    assert drifting(model, told) == []


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": YARN}], ids=["default", "yarn"])
def test_positions_beyond_the_table_are_finite_and_negative_ones_are_refused(rope):
    config = Qwen3Config(**built("qwen3", 1).config.to_dict() | rope)
    model = Qwen3ForCausalLM(config).bfloat16().eval()
    expected = {first: model(IDS, position_ids=torch.arange(20)[None] + first).logits for first in (115, 1000)}
    apply(model, strict=True)
    for first, logits in expected.items():
        given = model(IDS, position_ids=torch.arange(20)[None] + first).logits
        assert (given - logits).norm() <= 2.0**-6 * logits.norm()
    with pytest.raises(ValueError, match="position_ids holds -1, expected 0 to"):
        model(IDS, position_ids=torch.arange(20)[None] - 1)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_model_is_refused(one_rank):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    shards = {
        "fsdp2 first": (partial(fully_shard, mesh=one_rank), True),
        "fsdp1": (partial(FullyShardedDataParallel, device_id=torch.device("cpu")), False),
    }
    for shard, first in shards.values():
        model = built("qwen3", 1)
        with pytest.raises(ValueError, match="apply: .* sharded by FSDP1 or FSDP2, expected whole parameters"):
            for step in (shard, apply) if first else (apply, shard):
                found = step(model)
            (found if isinstance(found, nn.Module) else model)(input_ids=IDS)


@pytest.mark.parametrize("attribute, said", [("ds_id", "sharded by DeepSpeed"), ("_hp_mapping", "held by DeepSpeed's")])
@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_deepspeed_holds_is_refused(attribute, said, first):
    model = built("qwen3", 1)
    if not first:
        apply(model)
    setattr(model.lm_head.weight, attribute, 0)  # as ZeRO's third stage marks it, and its optimizers for 16 bits
    with pytest.raises(ValueError, match=f"apply: lm_head.weight is {said}"):
        apply(model) if first else model(input_ids=IDS)


def two_calls(model):
    (model(input_ids=IDS).logits.sum() + model(input_ids=IDS).logits.sum()).backward()


def interrupted(model):
    handle = model.model.embed_tokens.register_full_backward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model(input_ids=IDS).logits.sum().backward()
    handle.remove()
    model(input_ids=IDS)


def in_ddp(how=None, **given):
    """A call in a DistributedDataParallel, and what is done before it."""

    def call(model):
        ddp = DistributedDataParallel(model, **given)
        if how is not None:
            how(ddp)
        ddp(input_ids=IDS)

    return call


def with_autocast(ddp):
    with torch.autocast("cpu", torch.bfloat16):
        ddp(input_ids=IDS)


@pytest.mark.parametrize(
    "family, call, sentence",
    [
        ("qwen3", in_ddp(static_graph=True), "static_graph=True, expected False"),
        ("qwen3", in_ddp(lambda d: MainGrads(d.parameters())), "a MainGrads holds parameters that a Distributed"),
        ("qwen3", in_ddp(lambda d: d.register_comm_hook(None, allreduce_hook)), "a communication hook, expected none"),
        ("gpt2", in_ddp(with_autocast), "is cast or viewed by code that apply routes"),
        ("qwen3", (two_calls, "fsdp2"), "one backward of two calls of a model that FSDP2 shards"),
        ("qwen3", (interrupted, "fsdp2"), "an exception ended a backward of what fully_shard was given last"),
        ("qwen3", (restore, "fsdp2"), "model was given to fully_shard, expected one before that"),
    ],
    ids=["static graph", "MainGrads", "hook", "autocast", "two calls", "interrupted", "restore"],
)
def test_what_ranks_would_sum_wrong_is_refused(family, call, sentence, one_rank):
    from torch.distributed.fsdp import fully_shard

    model = built(family, 1).float()
    apply(model, strict=True)
    if isinstance(call, tuple):
        fully_shard(model, mesh=one_rank)
        call, _ = call
    with pytest.raises(ValueError, match=sentence):
        call(model)


def test_apply_draws_nothing_on_a_default_device():
    model, other = built("qwen3_moe", 1), built("qwen3_moe", 1)
    with torch.device("meta"):
        report = apply(model, strict=True)
        found = model(IDS).logits
    apply(other)
    assert report.split_invariant and torch.equal(found, other(IDS).logits)
