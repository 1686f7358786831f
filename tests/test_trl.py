"""TRL's trainers on an applied model: one hash of weights for every batch size and accumulation."""

import re
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
import transformers
from conftest import slow_but
from families import built
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
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

import bi_kernels as bi
from bi_kernels.audit import start
from bi_kernels.integrations.transformers import apply
from bi_kernels.integrations.trl import use_folded_head
from helpers import transformers_trainer

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
    return RLOOTrainer(model=model, args=RLOOConfig(str(folder), **how | {"beta": 0.5}), **given)


def dpo(model, folder, batch: int, accumulated: int) -> DPOTrainer:
    how = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, **COMMON}
    given = {"train_dataset": dataset("prompt", "chosen", "rejected"), "processing_class": tokenizer()}
    return DPOTrainer(model=model, args=DPOConfig(str(folder), **how), **given)


def kto(model, folder, batch: int, accumulated: int) -> KTOTrainer:
    how = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, **COMMON}
    given = {"train_dataset": dataset("prompt", "completion", "label"), "processing_class": tokenizer()}
    args = KTOConfig(str(folder), loss_type="apo_zero_unpaired", **how)
    return KTOTrainer(model=model, args=args, **given)


def weights(trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def made(make, folder, batch: int, accumulated: int, ours: bool = True, lora: bool = False, dtype=torch.float32):
    """Returns a trainer of a small model, saved where a trainer looks for a reference."""
    torch.manual_seed(0)
    model = built("qwen3", 1).to(dtype)
    model.save_pretrained(folder)
    model.config._name_or_path = str(folder)
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


@pytest.mark.parametrize("make", slow_but([grpo, sft, dpo, kto, rloo], grpo))
def test_weights_do_not_depend_on_batch_size_and_accumulation(make, tmp_path):
    whole, split = (trained(make, tmp_path, *sizes) for sizes in ((4, 1), (2, 2)))
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))


@pytest.mark.slow
def test_weights_of_adapters_do_not_depend_on_batch_size_and_accumulation(tmp_path):
    whole, split = (trained(grpo, tmp_path, *sizes, lora=True) for sizes in ((4, 1), (2, 2)))
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))


@pytest.mark.parametrize("make", slow_but([grpo, dpo, kto, rloo], grpo))
def test_the_control_of_stock_weights(make, tmp_path):
    whole, split = (trained(make, tmp_path, *sizes, ours=False) for sizes in ((4, 1), (2, 2)))
    assert not all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))


def scored(trainer, model, ids: torch.Tensor, mask: torch.Tensor, batch: int | None = None) -> torch.Tensor:
    """Returns the trainer's own logprobs of the last tokens of rows."""
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(model, ids, mask, GRPO["max_completion_length"], batch)[0]


@pytest.mark.parametrize("bf16", [False, True])  # under which Accelerate wraps a reference's forward in autocast
def test_a_reference_model_that_the_trainer_loads_has_the_bits_of_the_policy(bf16, tmp_path, monkeypatch):
    monkeypatch.setitem(COMMON, "bf16", bf16)
    monkeypatch.setitem(GRPO, "beta", 0.5)
    trainer, stock = (made(grpo, tmp_path, 4, 1, ours) for ours in (True, False))
    assert hasattr(stock.ref_model, "_original_forward") == bf16

    def logprobs(model, ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs

    ids = torch.arange(3, 67).view(4, 16)
    with torch.no_grad():
        with trainer.accelerator.autocast():
            policy = logprobs(trainer.model, ids)
        assert torch.equal(torch.cat([logprobs(trainer.ref_model, row) for row in ids.split(1)]), policy)
        assert not torch.equal(torch.cat([logprobs(stock.ref_model, row) for row in ids.split(1)]), policy)


def test_a_loss_that_takes_means_over_a_micro_batch_is_refused(tmp_path):
    model = built("qwen3", 1).float()
    apply(model, strict=True)
    trainer = sft(model, tmp_path, 2, 2)  # a KTOTrainer would load its reference from a hub
    trainer.__class__, trainer.args.loss_type = type("KTOTrainer", (SFTTrainer,), {}), "kto"
    with pytest.raises(ValueError, match="use_folded_head: loss_type is 'kto', expected 'apo_zero_unpaired'"):
        use_folded_head(trainer)


def test_a_reference_model_without_a_fused_head_is_refused(tmp_path):
    model = built("qwen3", 1).float()
    apply(model, strict=True)
    trainer = grpo(model, tmp_path, 4, 1)
    trainer.ref_model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="use_folded_head: trainer.ref_model is a Linear without a head"):
        use_folded_head(trainer)


def recorded(trainer) -> tuple[torch.Tensor, ...]:
    """Generates; returns ids, their mask, the generated tokens' logprobs and which of these come before the end."""
    kept = GRPO["max_completion_length"]
    given = trainer.processing_class(
        list(dataset("prompt")["prompt"]), return_tensors="pt", padding=True, padding_side="left"
    )
    torch.manual_seed(1)
    how = {"do_sample": True, "max_new_tokens": kept, "return_dict_in_generate": True, "output_logits": True}
    out = trainer.model.eval().generate(
        input_ids=given["input_ids"], attention_mask=given["attention_mask"], use_cache=True, **how
    )
    ids = out.sequences
    tokens, logits = ids[:, -kept:], torch.stack(out.logits, 1).to(trainer.model.dtype)
    logprobs = bi.log_softmax(logits).gather(2, tokens[..., None])[..., 0]
    before = (tokens == trainer.processing_class.eos_token_id).cumsum(1) <= 1
    return ids, torch.cat([given["attention_mask"], before.long()], 1), logprobs, before


@pytest.mark.parametrize("dtype", slow_but([torch.float32, torch.bfloat16], torch.float32), ids=str)
@pytest.mark.parametrize("bf16", slow_but([False, True], False))
def test_recorded_logprobs_are_the_trainers_own(dtype, bf16, tmp_path, monkeypatch):
    monkeypatch.setitem(COMMON, "bf16", bf16)
    differ = {}
    for ours in (True, False):
        trainer = made(grpo, tmp_path, 4, 1, ours, dtype=dtype)
        with trainer.accelerator.autocast():  # as in training
            ids, mask, logprobs, before = recorded(trainer)
        for batch in (None, 1):
            again = scored(trainer, trainer.model, ids, mask, batch)
            differ[ours, batch] = int((again != logprobs)[before].sum())
    assert differ[True, None] == differ[True, 1] == 0
    assert differ[False, None] and differ[False, 1]


class Killed(TrainerCallback):
    """Ends a run after its first checkpoint."""

    def on_save(self, args, state, control, **_):
        raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_to_the_same_bits(tmp_path, monkeypatch):
    for name, value in {"save_strategy": "steps", "save_steps": 1}.items():
        monkeypatch.setitem(COMMON, name, value)
    whole = trained(grpo, tmp_path / "whole", 2, 2)
    killed = made(grpo, tmp_path / "killed", 2, 2)
    killed.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    (checkpoint,) = (tmp_path / "killed").glob("checkpoint-*")

    def resumed() -> list[torch.Tensor]:
        trainer = made(grpo, tmp_path / "resumed", 2, 2)
        torch.manual_seed(5)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return weights(trainer)

    assert all(torch.equal(a, b) for a, b in zip(whole, resumed(), strict=True))
    (checkpoint / "optimizer.pt").unlink()
    assert not all(torch.equal(a, b) for a, b in zip(whole, resumed(), strict=True))


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


@pytest.mark.slow
def test_the_audit_trains_by_grpo_in_other_micro_batches():
    run = start("transformers", dtype="bf16", shapes="tiny", device="cpu", checks="quick")
    lines = transformers_trainer.compared(run, "bf16", transformers_trainer.GRPO, transformers_trainer.by_grpo)
    assert transformers_trainer.hashes(lines) == {"bi_kernels, TRL's GRPO": 1, "stock Transformers, TRL's GRPO": 2}
    assert [r.verdict for r in run.rows] == ["pass"] * 3 + ["needs-fix"] and run.rows[-1].control
