"""Run by tests/test_tensor_parallel.py under torchrun, or alone: one step of small decoders, cut by tensor over gloo.

world_tensor.py FILE      # rank 0 writes {variant: {what: SHA-256}} of logprobs, whole gradients and what is generated
"""

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import bi_kernels
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Decoder, generate, packed, padded
from bi_kernels.parallel.tensor import TensorParallel

LENGTHS, WIDTH = [5, 1, 17, 33], 40
BASE = replace(CONFIGS["world"], layers=1, qkv_bias=True, tied=False)
VARIANTS = {  # of the configuration; of the step
    "biases, packed": ({}, {}),
    "one key head": ({"kv_heads": 1}, {}),
    "one key head, padded left": ({"kv_heads": 1}, {"padded": True, "left": True}),
    "fp32, padded, no main_grad": ({"qk_norm": False}, {"dtype": torch.float32, "padded": True, "buffers": False}),
    "tied, window": ({"tied": True, "window": 8}, {}),
}


def whole(p: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all ranks."""
    if not hasattr(p, "cut"):
        return mine
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return torch.cat(parts)


def sha(t: torch.Tensor) -> str:
    return hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def step(config, ops, dtype=torch.bfloat16, padded_=False, left=False, buffers=True) -> dict[str, str]:
    model = Decoder(config, dtype=dtype, ops=ops)
    g = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), WIDTH) if padded_ else (sum(LENGTHS),)
    rows = padded(LENGTHS, WIDTH, "cpu", left=left) if padded_ else packed(LENGTHS, "cpu")
    ids, targets = torch.randint(0, config.vocab, (2, *shape), generator=g)
    weights = torch.randn(shape, generator=g)
    if padded_:
        at = torch.arange(WIDTH) - (WIDTH - torch.tensor(LENGTHS)[:, None] if left else 0)
        targets = targets.masked_fill((at < 0) | (at >= torch.tensor(LENGTHS)[:, None]), -100)
    grads = MainGrads(model.parameters(), model.tied) if buffers else None
    logprob, entropy = model.logprobs(ids, targets, rows, temperature=0.8)
    ((logprob * weights).sum() + 0.1 * entropy.sum()).backward()
    if grads:
        grads.join()
    found = {"logprob": sha(logprob), "entropy": sha(entropy)}
    return found | {n: sha(whole(p, p.main_grad if grads else p.grad)) for n, p in model.named_parameters()}


def generated(ops) -> dict[str, str]:
    found = generate(Decoder(BASE, ops=ops), [[1, 2, 3], [4], [5, 6]], 5, batch=2, seed=1)
    return {"generated": str(sorted((one.number, one.ids, one.logprobs) for one in found))}


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    """What cannot be cut, and what is not the same on every rank."""
    found = {}
    for what, config, seed in (
        ("odd", replace(BASE, mlp=95), 0),
        ("heads", replace(BASE, heads=3, kv_heads=3, hidden=48), 0),
        ("seed", BASE, dist.get_rank(group)),
    ):
        try:
            Decoder(config, ops=TensorParallel(group), seed=seed)
        except ValueError as error:
            found[what] = str(error)
    return found


def main(file: Path) -> None:
    torch.set_num_threads(1)
    ranks = "RANK" in os.environ
    if ranks:
        dist.init_process_group("gloo")
    ops = lambda: TensorParallel(dist.group.WORLD) if ranks else bi_kernels
    found = {}
    for name, (sizes, how) in VARIANTS.items():
        how = {"padded_" if k == "padded" else k: v for k, v in how.items()}
        found[name] = step(replace(BASE, **sizes), ops(), **how)
    found["generation"] = generated(ops())
    if ranks:
        found["refused"] = refused(dist.group.WORLD)
    if not ranks or dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    if ranks:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
