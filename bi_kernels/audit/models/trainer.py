"""Transformers' Trainer over the same sequences, its micro-batches cut otherwise: the weights that it ends with."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

from bi_kernels.audit.chain.layouts import sha256
from bi_kernels.audit.evidence.drift import Drift, compare, joined
from bi_kernels.audit.evidence.kinds import Side
from bi_kernels.audit.evidence.verdicts import PRECONDITION
from bi_kernels.audit.models.cases import OURS, STOCK, built, case, quiet, vocabulary
from bi_kernels.audit.models.relations import Model
from bi_kernels.audit.problem.inputs import generator

TRAINED = "mistral"  # untied, with a window
RATE = 2.0**-7  # by which a bf16 weight near 1 moves


class Rows(Dataset):
    """As many sequences as the steps take, as Trainer wants them."""

    def __init__(self, session):
        c, g = case(session), generator("cpu", session.parameters["seed"], "Trainer")
        most = vocabulary(session)
        self.rows = [torch.randint(1, most, (n,), generator=g).tolist() for n in c["rows"] * c["steps"]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def collate(rows: Sequence[dict]) -> dict[str, Tensor]:
    """Returns a batch, right-padded to its longest sequence."""
    width = max(len(row["input_ids"]) for row in rows)
    fill = lambda name, value: torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": fill("input_ids", 0), "attention_mask": mask, "labels": fill("labels", -100)}


def trained(session, dtype: str, size: int, ours: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains a model in micro-batches of `size` sequences; returns its weights before and after."""
    c = case(session)
    model = built(session, TRAINED, dtype, ours)
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
        trainer = Trainer(model, arguments, train_dataset=Rows(session), data_collator=collate)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return before, {name: p.detach() for name, p in model.named_parameters()}


def run(session, dtype: str) -> list[dict]:
    """Trains under every split, ours and stock, and records our rows, and one of stock as a control: that its weights
    follow the split must be seen. Returns the lines of a table."""
    c, lines, control = case(session), [], None
    who = Model(session, TRAINED, dtype)
    for ours in (True, False):
        first: dict[str, Tensor] = {}
        for size in c["splits"][: 2 if session.quick else None]:
            with quiet():
                before, found = trained(session, dtype, size, ours)
            first = first or found
            drift = joined([compare(t, first[name]) for name, t in found.items()])
            split = f"Trainer, {size} × {len(c['rows']) // size}"
            moved = sum(bool((t != before[name]).any()) and bool(t.isfinite().all()) for name, t in found.items())
            said = {"rows": sum(c["rows"]), "detail": f"{c['steps']} steps; SHA-256 {sha256(found)}"}
            row = who.about(Side.TRAINED, split, drift, found, f"Trainer, {c['splits'][0]} × …", **said)
            if ours:
                still = Drift(len(found) - moved, len(found)), ["tensors left unmoved"], "the initial weights"
                session.add([who.about(PRECONDITION, split, *still), *[row] * (found is not first)])
            elif size != c["splits"][0] and not (control and control.mismatches):
                control = row
            line = {"model": OURS if ours else STOCK, "sequences × micro-batches": split.partition(", ")[2]}
            lines.append(
                line
                | {"tensors moved": f"{moved} of {len(found)}", "weights that differ": drift.mismatches}
                | {"of": drift.elements, "SHA-256": sha256(found)}
            )
    session.add([replace(control, candidate=f"the model of {STOCK}, trained").as_control()])
    return lines


def hashes(lines: Sequence[dict]) -> dict[str, int]:
    """Returns how many SHA-256 there are, by whose weights they are."""
    whose = dict.fromkeys(line["model"] for line in lines)
    return {name: len({line["SHA-256"] for line in lines if line["model"] == name}) for name in whose}
