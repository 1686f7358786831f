"""Run by tests/test_data_parallel.py under torchrun, or alone: two steps of an applied model in DDP and in FSDP2.

ranks_sharded.py FILE NAME…    # rank 0 writes {variant, or family: SHA-256 of the last step's gradients and weights}
"""

import contextlib
import hashlib
import json
import os
import sys
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from families import built
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from bi_kernels import MainGrads
from bi_kernels.integrations.transformers import StepSampler, apply, logprobs

TRAINERS = "trainers"  # by this name; the other names are those of VARIANTS
LENGTHS, GROUPS, STEPS = (5, 1, 11, 3, 2, 7, 4, 2), 2, 2
FAMILIES = ("qwen3", "gemma3_text", "gpt2", "qwen3_moe")  # the second and third tie their weights
VARIANTS = {  # family, wrapper, sizes of a rank's micro-batches, options
    "ddp": ("qwen3", "ddp", (4,), {}),
    "ddp, split": ("qwen3", "ddp", (1, 3), {}),
    "ddp, every micro-batch summed": ("qwen3", "ddp", (2, 2), {"every": True}),
    "ddp, views, checkpoints": ("qwen3", "ddp", (2, 2), {"views": True, "checkpoints": True}),
    "ddp, finds unused": ("qwen3", "ddp", (2, 2), {"unused": True}),
    "ddp, finds unused, every summed": ("qwen3", "ddp", (1, 3), {"unused": True, "every": True}),
    "fsdp": ("qwen3", "fsdp", (4,), {}),
    "fsdp, split, checkpoints": ("qwen3", "fsdp", (2, 2), {"checkpoints": True}),
    "fsdp, every micro-batch summed": ("qwen3", "fsdp", (1, 3), {"every": True}),
    "fsdp, kept whole": ("qwen3", "fsdp", (1, 1, 2), {"reshard": False}),
    "ddp of logprobs": ("qwen3", "ddp", (4,), {"scores": True}),
    "ddp of logprobs, split": ("qwen3", "ddp", (2, 2), {"scores": True}),
    "fsdp of logprobs": ("qwen3", "fsdp", (4,), {"scores": True}),
    "fsdp of logprobs, split": ("qwen3", "fsdp", (2, 2), {"scores": True}),
    "fsdp, zeroed in place": ("qwen3", "fsdp", (2, 2), {"in place": True}),
    "accelerate": ("qwen3", "accelerate", (2, 2), {}),
    **{f"{w}, {f}": (f, w, (1, 3), {}) for f in FAMILIES[1:] for w in ("ddp", "fsdp")},
    "fsdp, bf16": ("qwen3", "fsdp", (4,), {"bf16": True}),
    "fsdp, bf16, split": ("qwen3", "fsdp", (2, 2), {"bf16": True}),
    "ddp, autocast": ("qwen3", "ddp", (4,), {"autocast": True}),
    "ddp, autocast, split": ("qwen3", "ddp", (2, 2), {"autocast": True}),
    "stock ddp": ("qwen3", "ddp", (4,), {"stock": True}),
    "stock ddp, split": ("qwen3", "ddp", (2, 2), {"stock": True}),
}
generator = torch.Generator().manual_seed(1)
IDS = [torch.randint(3, 100, (n,), generator=generator) for n in LENGTHS]
WEIGHTS = [torch.randn(n, generator=generator) for n in LENGTHS]


def sha(values) -> str:
    parts = [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in values]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def loss_of(model, which: list[int]) -> torch.Tensor:
    """Returns the loss of some sequences of the step, which a rank adds up."""
    width = max(LENGTHS[i] for i in which)
    ids, mask, weights = (torch.zeros(len(which), width, dtype=d) for d in (torch.long, torch.long, torch.float))
    for row, i in enumerate(which):
        ids[row, : LENGTHS[i]], mask[row, : LENGTHS[i]], weights[row, : LENGTHS[i]] = IDS[i], 1, WEIGHTS[i]
    out = model(input_ids=ids, attention_mask=mask)
    if isinstance(out, torch.Tensor):
        return (out * weights).sum()
    logits = out.logits.float()
    return (logits.log_softmax(-1)[..., 5] * weights).sum()


class Scores(torch.nn.Module):
    """Calls logprobs in a module that a wrapper is given, which has the bits of no other loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return logprobs(self.model, input_ids, attention_mask)[0]


@lru_cache
def kept(family: str) -> tuple[torch.nn.Module, dict]:
    """Returns an applied model and its weights, which `apply`'s trial need not see again."""
    torch.manual_seed(0)
    model = built(family, 1).float()
    apply(model, strict=True)
    return model, {name: t.clone() for name, t in model.state_dict().items()}


def fresh(family: str) -> torch.nn.Module:
    model, weights = kept(family)
    model.load_state_dict(weights)
    model.zero_grad()
    return model.eval()


def shard(model, options: dict) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.get("bf16") else MixedPrecisionPolicy()
    given = {"mesh": dist.init_device_mesh("cpu", (dist.get_world_size(),)), "mp_policy": policy}
    given |= {"reshard_after_forward": options.get("reshard", True)}
    for layer in next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        fully_shard(layer, **given)
    fully_shard(model, **given)


def trained(family: str, wrapper: str, sizes: tuple[int, ...], options: dict) -> str:
    """Returns the digest of what two steps on this rank's sequences leave."""
    stock = options.get("stock", False)
    model = built(family, 1).float() if stock else fresh(family)
    if options.get("checkpoints"):
        model.gradient_checkpointing_enable()
        model.train()
    if options.get("scores"):
        model = Scores(model)
    between, outer = contextlib.nullcontext, model
    if wrapper == "ddp":
        given = {"gradient_as_bucket_view": options.get("views", False)}
        outer = DistributedDataParallel(model, find_unused_parameters=options.get("unused", False), **given)
        between = outer.no_sync
    elif wrapper == "fsdp":
        kept.cache_clear()  # a sharded model stays one
        shard(model, options)
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.05)
    if wrapper == "accelerate":
        accelerator = Accelerator(cpu=True)
        outer, optimizer = accelerator.prepare(model, optimizer)
        between = lambda: accelerator.no_sync(outer)
    rank, count = dist.get_rank(), sum(sizes)
    for _ in range(STEPS):
        at = rank * count
        for number, size in enumerate(sizes):
            last = number == len(sizes) - 1 or options.get("every", False)
            if wrapper == "fsdp":
                model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last else between(), autocast(options):
                loss_of(outer, [*range(at, at + size)]).backward()
            at += size
        grads = [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=not options.get("in place"))
    return sha([*grads, *map(whole, model.parameters())])


def autocast(options: dict):
    return torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False))


def alone(family: str) -> str:
    """Returns the digest of the same steps on one rank, by MainGrads in as many groups as there are ranks."""
    model = fresh(family)
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    grads = MainGrads(model.parameters(), tied=[table] * (head is table), groups=GROUPS)
    optimizer = torch.optim.SGD(grads.masters, lr=0.05)
    for _ in range(STEPS):
        for group in grads.mine:
            first = group * len(LENGTHS) // GROUPS
            for i in range(first, first + len(LENGTHS) // GROUPS):
                loss_of(model, [i]).backward()
            grads.close(group)
        grads.join()
        for p in grads.parameters:  # the mean, as DDP's: a divided loss would round subnormal numbers elsewhere
            p.main_grad.div_(GROUPS)
        left = [p.main_grad.clone() for p in grads.parameters]
        optimizer.step()
        grads.finish()
    return sha([*left, *grads.parameters])


class Ours(Trainer):
    def _get_train_sampler(self, *given):
        return StepSampler(super()._get_train_sampler(*given), self.args)


def by_trainer(kind: type[Trainer], batch: int, accumulated: int, folder: Path) -> str:
    """Returns the digest of the weights that `Trainer` leaves on two ranks."""
    model = fresh("qwen3")
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated, max_steps=STEPS,
        use_cpu=True, ddp_backend="gloo", report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=0.01,
        logging_strategy="no", dataloader_pin_memory=False, optim="sgd", max_grad_norm=0.0,
    )  # fmt: skip
    assert args.world_size == 2
    rows = [{"input_ids": ids, "labels": ids} for ids in [ids for ids in IDS if len(ids) > 1] * 3][:16]

    def padded(examples: list[dict]) -> dict:
        ids = [e["input_ids"] for e in examples]
        pad = torch.nn.utils.rnn.pad_sequence
        mask = pad([torch.ones_like(i) for i in ids], True)
        return {"input_ids": pad(ids, True), "attention_mask": mask, "labels": pad(ids, True, -100)}

    kind(model, args, data_collator=padded, train_dataset=rows).train()
    return sha(model.parameters())


def trainers(folder: Path) -> dict[str, str]:
    """Returns what `Trainer` leaves for two batch sizes, with and without our sampler."""
    kinds = {"trainer": Ours, "trainer, dealt out in turn": Trainer}
    return {f"{n} {s}": by_trainer(kind, *s, folder) for n, kind in kinds.items() for s in ((4, 1), (2, 2))}


def main(file: Path, names: list[str]) -> None:
    if "RANK" not in os.environ:
        families = {VARIANTS[name][0] for name in names if name != TRAINERS}
        file.write_text(json.dumps({family: alone(family) for family in families}))
        return
    dist.init_process_group("gloo")
    found = {name: trained(*VARIANTS[name]) for name in names if name != TRAINERS}
    found |= trainers(file.parent) if TRAINERS in names else {}
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
