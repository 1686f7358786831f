"""Trains by Transformers' Trainer on the same sequences, cut into other micro-batches, and compares the weights."""

import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainingArguments

from bi_kernels.audit.axes import Side
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import PRECONDITION, control_row
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.targets.model import sha256
from bi_kernels.audit.targets.transformers import OURS, STOCK, TransformersTarget, build, case, draw_ids, quiet

TRAINED = "mistral"  # untied, with a window
RATE = 2.0**-7  # by which a bf16 weight near 1 moves


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


def trained(session, dtype: str, size: int, ours: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains a model in micro-batches of `size` sequences; returns its weights before and after."""
    c = case(session)
    model = build(session, TRAINED, dtype, ours)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=len(c["rows"]) // size,
            max_steps=c["steps"],
            learning_rate=RATE,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=not session.on_gpu,
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
            log_level="error",
        )
        trainer = Trainer(model, arguments, train_dataset=sequences(session), data_collator=collate)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return before, {name: p.detach() for name, p in model.named_parameters()}


def run(session, dtype: str) -> list[dict]:
    """Trains under every split, ours and stock, and records our rows, and one of stock as a control: the audit must see
    that its weights follow the split. Returns the lines of a table."""
    c, lines, of_stock = case(session), [], []
    target = TransformersTarget(session, TRAINED, dtype, model=None)
    for ours in (True, False):
        first: dict[str, Tensor] = {}
        for size in c["splits"][: 2 if session.quick else None]:
            with quiet():
                before, found = trained(session, dtype, size, ours)
            first = first or found
            drifts = {name: compare(t, first[name]) for name, t in found.items()}
            split, digest = f"Trainer, {size} × {len(c['rows']) // size}", sha256(found)
            still = sum(bool((t == before[name]).all()) or not bool(t.isfinite().all()) for name, t in found.items())
            said = {"rows": sum(c["rows"]), "detail": f"{c['steps']} steps; SHA-256 {digest}"}
            row = target.about(Side.TRAINED, split, drifts, f"Trainer, {c['splits'][0]} × …", **said)
            again = [row] * (found is not first)
            if ours:
                said = {"against": "the initial weights", "tensor": "tensors left unmoved"}
                session.add([target.row(PRECONDITION, split, Drift(still, len(found)), **said), *again])
            else:
                of_stock += again
            line = {"model": OURS if ours else STOCK, "sequences × micro-batches": split.partition(", ")[2]}
            line |= {"tensors moved": f"{len(found) - still} of {len(found)}"}
            lines.append(line | {"weights that differ": row.mismatches, "of": row.elements, "SHA-256": digest})
    session.add([control_row(f"the model of {STOCK}, trained", of_stock)])
    return lines


def hashes(lines: Sequence[dict]) -> dict[str, int]:
    """Returns how many SHA-256 there are, by model."""
    models = dict.fromkeys(line["model"] for line in lines)
    return {name: len({line["SHA-256"] for line in lines if line["model"] == name}) for name in models}
