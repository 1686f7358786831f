"""Trains by Transformers' Trainer, and by TRL's GRPO, in steps that are cut into other micro-batches, and compares the
weights."""

import importlib.util
import tempfile
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from bi_kernels.audit.axes import Side
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import PRECONDITION, control_row
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.targets.model import sha256
from bi_kernels.audit.targets.transformers import OURS, STOCK, TransformersTarget, build, case, draw_ids, quiet

TRAINED = "mistral"  # untied, with a window
RATE = 2.0**-7  # by which a bf16 weight near 1 moves
GRPO = "TRL's GRPO"
NEW = 32  # tokens of a completion


def sequences(session) -> list[dict[str, list[int]]]:
    """Returns as many sequences as the steps take, as Trainer wants them."""
    c, g = case(session), generator("cpu", session.parameters["seed"], "Trainer")
    ids = [draw_ids(session, [n], g).tolist() for n in c["rows"] * c["steps"]]
    return [{"input_ids": one, "labels": one} for one in ids]


def collate(rows: Sequence[dict]) -> dict[str, Tensor]:
    """Returns a batch, right-padded to its longest sequence."""
    width = max(len(row["input_ids"]) for row in rows)
    fill = lambda name, value: torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": fill("input_ids", 0), "attention_mask": mask, "labels": fill("labels", -100)}


def _arguments(session, size: int, folder: str) -> dict:
    """Returns the arguments of every trainer's configuration."""
    c = case(session)
    given = {
        "output_dir": folder,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": len(c["rows"]) // size,
        "max_steps": c["steps"],
        "learning_rate": RATE,
        "use_cpu": not session.on_gpu,
    }
    off = {"dataloader_pin_memory": False, "bf16": False, "report_to": []}
    return given | off | {"save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "log_level": "error"}


def by_trainer(session, model: PreTrainedModel, size: int, ours: bool, folder: str) -> Trainer:
    arguments = TrainingArguments(**_arguments(session, size, folder), train_sampling_strategy="sequential")
    return Trainer(model, arguments, train_dataset=sequences(session), data_collator=collate)


def by_grpo(session, model: PreTrainedModel, size: int, ours: bool, folder: str) -> Trainer:
    """Returns a trainer that rewards odd ids; words are ids."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from bi_kernels.integrations.trl import use_folded_head

    words = Tokenizer(models.WordLevel({str(i): i for i in range(model.config.vocab_size)}, unk_token="1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    share_odd = lambda text: sum(int(w) % 2 for w in text.split()) / max(1, len(text.split()))
    prompts = [" ".join(map(str, s["input_ids"])) for s in sequences(session)]
    generated = {"num_generations": 2, "generation_batch_size": len(case(session)["rows"]), "beta": 0.0}
    made = GRPOTrainer(
        model=model,
        args=GRPOConfig(**_arguments(session, size, folder), **generated, max_completion_length=NEW),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2", unk_token="1"),
        reward_funcs=lambda completions, **_: [share_odd(text) for text in completions],
    )
    if ours:
        use_folded_head(made)
    return made


def trained(
    session, dtype: str, size: int, ours: bool, make: Callable = by_trainer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains a model in micro-batches of `size` sequences; returns its weights before and after."""
    model = build(session, TRAINED, dtype, ours)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(session, model, size, ours, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return before, {name: p.detach() for name, p in model.named_parameters()}


def run(session, dtype: str) -> list[dict]:
    """Trains under every split by Trainer, and on a GPU by TRL's GRPO, where it is installed. Returns the lines of a
    table."""
    trl = session.on_gpu and importlib.util.find_spec("trl")
    makes = {"Trainer": by_trainer} | ({GRPO: by_grpo} if trl else {})
    return [line for name, make in makes.items() for line in compared(session, dtype, name, make)]


def compared(session, dtype: str, name: str, make: Callable) -> list[dict]:
    """Trains under every split, ours and stock, and records our rows, and one of stock as a control: the audit must see
    that its weights follow the split. Returns the lines of a table."""
    c, lines, of_stock = case(session), [], []
    target = TransformersTarget(session, TRAINED, dtype, model=None)
    for ours in (True, False):
        first: dict[str, Tensor] = {}
        for size in c["splits"][: 2 if session.quick else None]:
            with quiet():
                before, found = trained(session, dtype, size, ours, make)
            first = first or found
            drifts = {weight: compare(t, first[weight]) for weight, t in found.items()}
            split, digest = f"{name}, {size} × {len(c['rows']) // size}", sha256(found)
            still = sum(bool((t == before[w]).all()) or not bool(t.isfinite().all()) for w, t in found.items())
            said = {"rows": sum(c["rows"]), "detail": f"{c['steps']} steps; SHA-256 {digest}"}
            row = target.about(Side.TRAINED, split, drifts, f"{name}, {c['splits'][0]} × …", **said)
            again = [row] * (found is not first)
            if ours:
                said = {"against": "the initial weights", "tensor": "tensors left unmoved"}
                session.add([target.row(PRECONDITION, split, Drift(still, len(found)), **said), *again])
            else:
                of_stock += again
            line = {"model": OURS if ours else STOCK, "trainer": name}
            line |= {"sequences × micro-batches": split.rpartition(", ")[2]}
            line |= {"tensors moved": f"{len(found) - still} of {len(found)}"}
            differ = f"{row.mismatches:,} of {row.elements:,}"
            lines.append(line | {"weights that differ": differ, "SHA-256": digest})
    session.add([control_row(f"the model of {STOCK}, trained by {name}", of_stock)])
    return lines


def conclusion(lines: Sequence[dict]) -> str:
    """Says for each trainer in how many sets of weights its splits end."""
    said = []
    for trainer in dict.fromkeys(line["trainer"] for line in lines):
        mine = [[line for line in lines if (line["trainer"], line["model"]) == (trainer, who)] for who in (OURS, STOCK)]
        splits, stock = (len(each) for each in mine)
        count = [len({line["SHA-256"] for line in each}) for each in mine]
        sets = [f"{n} set{'s' * (n != 1)} of weights" for n in count]
        of_stock = f"; stock Transformers' {stock} in {sets[1]}" * bool(stock)
        said.append(f"{splits} splits of a step end in {sets[0]} under {trainer}{of_stock}.")
    return " ".join(said)


def hashes(lines: Sequence[dict]) -> dict[str, int]:
    """Returns how many SHA-256 there are, by model and trainer."""
    runs = dict.fromkeys((line["model"], line["trainer"]) for line in lines)
    count = lambda run: len({line["SHA-256"] for line in lines if (line["model"], line["trainer"]) == run})
    return {", ".join(run): count(run) for run in runs}
