"""TRL's trainers on an applied model: one hash of weights for every batch size and accumulation."""

import re
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
import transformers
from families import built
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from bi_kernels.integrations.transformers import apply
from bi_kernels.integrations.trl import use_folded_head

DOCUMENT = Path(__file__).parents[1] / "docs" / "trl.md"
COMMON = {
    "max_steps": 2, "learning_rate": 0.001, "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no",
    "disable_tqdm": True, "gradient_checkpointing": False, "dataloader_pin_memory": False, "seed": 1,
}  # fmt: skip
GRPO = {"num_generations": 2, "max_completion_length": 8, "beta": 0.0, "generation_batch_size": 4}
LENGTHS = (3, 11, 7, 19, 5, 2, 14, 9)


def tokenizer() -> PreTrainedTokenizerFast:
    """Of words that are numbers."""
    made = Tokenizer(models.WordLevel({str(i): i for i in range(160)}, unk_token="1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="0", eos_token="2", unk_token="1")


def dataset(*columns: str) -> datasets.Dataset:
    table = {}
    for i, column in enumerate(columns):
        g = torch.Generator().manual_seed(i)
        rows = [torch.randint(3, 160, (n,), generator=g).tolist() for n in LENGTHS[i:] + LENGTHS[:i]]
        texts = [" ".join(map(str, [*row, 2][: None if i else -1])) + " " * (not i) for row in rows]
        table[column] = {"input_ids": rows, "label": [row[0] % 2 > 0 for row in rows]}.get(column, texts)
    return datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table(table)), fingerprint="_".join(columns))


def odd(completions, **_) -> list[float]:
    return [sum(int(w) % 2 for w in c.split()) / max(1, len(c.split())) for c in completions]


def grpo(model, folder, batch: int, accumulated: int) -> GRPOTrainer:
    how = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, **COMMON, **GRPO}
    given = {"train_dataset": dataset("prompt"), "processing_class": tokenizer(), "reward_funcs": odd}
    return GRPOTrainer(model=model, args=GRPOConfig(str(folder), **how), **given)


def sft(model, folder, batch: int, accumulated: int) -> SFTTrainer:
    how = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, **COMMON}
    args = SFTConfig(str(folder), **how, packing=False, dataset_kwargs={"skip_prepare_dataset": True})
    return SFTTrainer(model=model, args=args, train_dataset=dataset("input_ids"), processing_class=tokenizer())


def rloo(model, folder, batch: int, accumulated: int) -> RLOOTrainer:
    how = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, **COMMON, **GRPO}
    given = {"train_dataset": dataset("prompt"), "processing_class": tokenizer(), "reward_funcs": odd}
    saved(model, folder)
    return RLOOTrainer(model=model, args=RLOOConfig(str(folder), **how | {"beta": 0.5}), **given)


def dpo(model, folder, batch: int, accumulated: int) -> DPOTrainer:
    how = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, **COMMON}
    given = {"train_dataset": dataset("prompt", "chosen", "rejected"), "processing_class": tokenizer()}
    return DPOTrainer(model=saved(model, folder), args=DPOConfig(str(folder), **how), **given)


def kto(model, folder, batch: int, accumulated: int) -> KTOTrainer:
    how = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, **COMMON}
    given = {"train_dataset": dataset("prompt", "completion", "label"), "processing_class": tokenizer()}
    args = KTOConfig(str(folder), loss_type="apo_zero_unpaired", **how)
    return KTOTrainer(model=saved(model, folder), args=args, **given)


def saved(model, folder):
    """Returns the model, saved where its trainer looks for a reference."""
    model.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


def weights(trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def made(make, folder, batch: int, accumulated: int, ours: bool = True, lora: bool = False):
    """Returns a trainer of a small model."""
    torch.manual_seed(0)
    model = built("qwen3", 1).float()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    if ours:
        apply(model, strict=True)
    trainer = make(model, folder, batch, accumulated)
    if ours:
        use_folded_head(trainer)
    return trainer


def trained(make, folder, batch: int, accumulated: int, ours: bool = True, lora: bool = False) -> list[torch.Tensor]:
    """Returns the weights after two steps."""
    trainer = made(make, folder, batch, accumulated, ours, lora)
    trainer.train()
    return weights(trainer)


@pytest.mark.parametrize("make, lora", [(grpo, False), (grpo, True), (sft, False)], ids=["grpo", "lora", "sft"])
def test_weights_do_not_depend_on_batch_size_and_accumulation(make, lora, tmp_path):
    whole, split = (trained(make, tmp_path, *sizes, lora=lora) for sizes in ((4, 1), (2, 2)))
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))


def test_the_control_of_stock_weights(tmp_path):
    whole, split = (trained(grpo, tmp_path, *sizes, ours=False) for sizes in ((4, 1), (2, 2)))
    assert not all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))


def test_without_the_line_the_first_step_is_refused(tmp_path):
    model = built("qwen3", 1).float()
    apply(model, strict=True)
    with pytest.raises(ValueError, match="apply: a forward that was set on the model calls"):
        sft(model, tmp_path, 2, 2).train()


def test_a_trainer_without_a_fused_head_is_refused():
    with pytest.raises(ValueError, match="use_folded_head: trainer is a SimpleTrainer, expected one of TRL's"):
        use_folded_head(type("SimpleTrainer", (), {"model": built("qwen3", 1)})())


def test_the_document_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, dtype: built("qwen3", 1))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer())
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: dataset("prompt"))
    here = {**COMMON, "max_steps": 1, "max_completion_length": 4, "num_generations": 2}
    code = code.replace('.to("cuda")', "").replace('GRPOConfig("out", ', f"GRPOConfig({str(tmp_path)!r}, **{here}, ")
    exec(code, {})
