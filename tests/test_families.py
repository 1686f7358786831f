"""`apply` answers for every family: yes where the model keeps its bits, NO with the reason where it does not."""

import inspect
import types
import warnings

import pytest
import torch
from conftest import slow_but
from families import FAMILIES, OTHERS, SIZES, built
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from bi_kernels.integrations.transformers import apply, classify, restore

DEEP = ("qwen3", "deepseek_v3", "gpt_oss")  # with two layers; others with one of each kind
# whose parts the others have, too; test_every_family.py has some of all
CHECKED = (*OTHERS, "qwen3")
YES = ["Batch-invariant: yes", "Split-invariant: yes"]
NO = ("gpt_neo", "falcon_mamba", "minimax")  # attention of its own, a state space, linear attention


def bits(report) -> tuple[bool, bool]:
    """Whether no forward and no gradient of the check differs."""
    return tuple(not any(c.fails for c in report.checks if c.gradient == of) for of in (False, True))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in CHECKED])
def test_a_known_model_is_told_yes(family):
    assert str(apply(built(family, 1), strict=True)).splitlines()[:2] == YES


@pytest.mark.parametrize("family", slow_but(FAMILIES, *CHECKED))
def test_a_model_that_keeps_its_bits_is_told_yes(family):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "apply:")
        report = apply(built(family, 1 + (family in DEEP)), strict=True, check=True)
    assert (report.batch_invariant, report.split_invariant, bits(report)) == (True, True, (True, True)), report
    assert str(report).splitlines()[:2] == YES
    assert len(report.checks) == (3 if "reward" in family else 6), "a reward has no decode"


@pytest.mark.parametrize("old, new, known", [
    ("", "", True),
    ("torch.cat((-x2, x1)", "torch.cat((x2, -x1)", False),  # of the function that a function of its file calls
    ("scaling=self.scaling", "scaling=self.scaling * 2", False),
    ("cos, sin, unsqueeze_dim=1):", "cos, sin, unsqueeze_dim=2):", False),
], ids=["copied", "turned", "scaled", "default"])  # fmt: skip
def test_a_copy_of_known_code_is_known_and_an_edit_is_not(old, new, known):
    module = types.ModuleType(qwen3_moe.__name__)
    module.__package__ = qwen3_moe.__package__
    source = inspect.getsource(qwen3_moe).partition("class Qwen3MoeMLP")[0]
    assert old in source
    exec(source.replace(old, new), vars(module))
    found = classify._copied(module.Qwen3MoeAttention.forward)
    assert (found is not None and found.__name__ == "Qwen3Attention") == known


@pytest.mark.parametrize("family", slow_but(NO, "gpt_neo", "falcon_mamba"))
def test_a_model_that_drifts_is_told_no_and_why(family):
    with pytest.warns(UserWarning, match="Batch-invariant: NO") as warned:
        report = apply(built(family), check=True)
    (warning,) = [w for w in warned if "apply: " in str(w.message)]
    assert warning.filename == __file__
    assert (report.batch_invariant, report.split_invariant) == (False, False)
    assert not all(bits(report)) and report.left, report


@pytest.mark.parametrize("family", slow_but(["qwen3_moe", "gpt2", "qwen3 with LoRA"], "qwen3 with LoRA"))
def test_a_report_is_as_short_for_5_layers_as_for_2(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shallow, deep = (str(apply(built(family, layers))).splitlines() for layers in (2, 5))
    assert shallow[0] == deep[0] and len(shallow) == len(deep) <= 40 and max(map(len, deep)) <= 120


def test_strict_raises_before_anything_is_replaced():
    model = built("gpt_neo")
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="strict is True, .*NO. Attention is still PyTorch's"):
        apply(model, strict=True)
    assert [type(m) for m in model.modules()] == kinds and model.config._attn_implementation != "bi_kernels"


class Shifted(Qwen3ForCausalLM):
    """A Qwen3 whose own code depends on how many sequences a call holds."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + len(out.logits)
        return out


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = built("qwen3")

    def forward(self, input_ids):
        return self.model(input_ids).logits.softmax(-1)


@pytest.mark.parametrize("make, said", [
    (lambda: Shifted(Qwen3Config(**SIZES)).bfloat16(), "the check found a difference"),
    (Policy, "policy is still"),
], ids=["subclass", "wrapper"])  # fmt: skip
def test_code_of_the_users_own_is_no_yes(make, said):
    model = make()
    with pytest.warns(UserWarning, match="Batch-invariant: NO"):
        report = apply(model)
    assert said in str(report).splitlines()[0].lower()
    assert classify.WRAPPER in report.left.values() or isinstance(model, Shifted)


def drifting_hook(module, args, y):
    """Control: a last bit that depends on how many rows there are."""
    return y * (1 + 2.0**-7) if y.shape[:-1].numel() > 40 else y


def test_the_check_finds_what_no_class_shows():
    """Its control: a forward hook makes one linear depend on the number of rows."""
    model = built("qwen3", 1)
    model.model.layers[0].mlp.up_proj.register_forward_hook(drifting_hook)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="strict is True, .*check found .*: padded right .* elements differ"):
        apply(model, strict=True, check=True)
    assert [type(m) for m in model.modules()] == kinds, "it is as it was"
    assert apply(model).batch_invariant, "without the check nobody can know"
    restore(model)
    with pytest.warns(UserWarning, match="The check found a difference"):
        report = apply(model, check=True)
    assert not report.batch_invariant and not report.split_invariant


def test_the_check_leaves_the_model_as_it_was():
    model = built("qwen3", 1).train()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before, mode = torch.random.get_rng_state(), model.model.norm.eval().training
    apply(model, check=True)
    assert all((p.grad == 1).all() and not hasattr(p, "main_grad") for p in model.parameters())
    assert model.training and model.model.norm.training == mode and model.model.layers[0].training
    assert torch.equal(torch.random.get_rng_state(), before)


def test_dropout_is_a_reason():
    model = built("qwen3 with LoRA")
    linear = next(m for m in model.modules() if hasattr(m, "lora_dropout"))
    linear.lora_dropout["default"] = torch.nn.Dropout(0.1)
    with pytest.warns(UserWarning, match="NO. Dropout is still PyTorch's"):
        assert not apply(model).batch_invariant


def test_attention_dropout_is_a_reason():
    model = built("qwen3")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with pytest.raises(ValueError, match="NO. Attention is still PyTorch's"):
        apply(model, strict=True)
    with pytest.warns(UserWarning, match="NO. Attention"):
        assert "attention_dropout is 0.1" in str(apply(model))


def test_a_check_of_a_model_without_token_ids_is_one_sentence():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with pytest.raises(ValueError, match="check is True for a Sequential, expected a model that embeds token ids"):
        apply(model, check=True)
    assert type(model[0]) is torch.nn.Linear
