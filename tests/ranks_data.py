"""Run by tests/test_parallel.py on each rank, or alone: steps of a tiny decoder, data-parallel over gloo.

Rank 0 writes {way: SHA-256 of every gradient and weight}.
"""

import copy
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Decoder, packed, policy_loss

STEPS = 2
LENGTHS = [5, 1, 17, 33, 9, 2]  # of a step's sequences
GROUPS_OF = [[0, 1], [2], [], [3], [4], [5], [], []]  # the sequences of each group, some of none


def drawn(step: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(step)
    count = sum(LENGTHS)
    ids, targets = torch.randint(0, CONFIGS["tiny"].vocab, (2, count), generator=g)
    return ids, targets, torch.randn(count, generator=g)


def backward(model: Decoder, sequences: list[int], step: int) -> None:
    ids, targets, advantages = drawn(step)
    starts = [sum(LENGTHS[:i]) for i in sequences]
    at = torch.cat([torch.arange(start, start + LENGTHS[i]) for i, start in zip(sequences, starts)])
    logprob, _ = model.logprobs(ids[at], targets[at], packed([LENGTHS[i] for i in sequences], "cpu"))
    old = logprob.detach() - 0.1
    policy_loss(logprob, old, advantages[at], torch.ones_like(at, dtype=torch.bool), sum(LENGTHS)).backward()


def by_tree(groups: int, world: dist.ProcessGroup | None, sharded: bool = False) -> tuple[str, str]:
    """Trains with groups that the fixed tree joins; returns digests of the steps' gradients and of the weights."""
    model = Decoder(replace(CONFIGS["tiny"], layers=1), dtype=torch.float32)  # in which a weight shows its last bit
    grads = MainGrads(model.parameters(), model.tied, groups=groups, world=world, sharded=sharded)
    optimizer = torch.optim.AdamW(grads.masters, lr=0.01)
    seen, weights = hashlib.sha256(), hashlib.sha256()
    for step in range(STEPS):
        for group in grads.mine:
            if GROUPS_OF[group]:
                backward(model, GROUPS_OF[group], step)
            grads.close(group)
        grads.join()
        note(seen, [p.main_grad for p in model.parameters()])
        optimizer.step()
        grads.finish()
    note(weights, [p.detach() for p in model.parameters()])
    return seen.hexdigest(), weights.hexdigest()


def clipped(groups: int, world: dist.ProcessGroup | None, sharded: bool = False, resumed: bool = False) -> str:
    """Trains bf16 weights, of sizes that fill no block, whose gradients are clipped; returns a digest of the norms and
    the weights. resumed: each step but the first by other objects, from the state of the one before."""

    def made(seed: int) -> tuple:
        g = torch.Generator().manual_seed(seed)
        weights = [torch.nn.Parameter(torch.randn(size, generator=g).bfloat16()) for size in (100, 1000, 5000)]
        grads = MainGrads(weights, groups=groups, world=world, sharded=sharded)
        return weights, grads, torch.optim.AdamW(grads.masters, lr=0.01)

    (weights, grads, optimizer), seen = made(2), hashlib.sha256()
    for step in range(STEPS):
        if resumed and step:
            state = copy.deepcopy((grads.state_dict(), optimizer.state_dict()))
            weights, grads, optimizer = made(3)
            for one, of in zip((grads, optimizer), state):
                one.load_state_dict(of)
        for group in grads.mine:
            g = torch.Generator().manual_seed(10 * step + group)
            for p in weights:
                p.main_grad += torch.randn(p.shape, generator=g)
            grads.close(group)
        grads.join()
        note(seen, [grads.clip_grad_norm_(1.0)[None]])
        optimizer.step()
        grads.finish()
        assert not any(p.main_grad.any() for p in weights) and not grads.tree.flat.any()
    note(seen, [p.detach() for p in weights])
    return seen.hexdigest()


def note(seen, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        seen.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def main(file: Path, groups: int) -> None:
    world = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        world = dist.group.WORLD
    ranks = dist.get_world_size() if world else 1
    found = {"tree": by_tree(groups, world), "clipped": clipped(groups, world)}
    if world:
        found["sharded"] = by_tree(groups, world, sharded=True)
        found["clipped, sharded"] = clipped(groups, world, sharded=True)
        found["resumed, sharded"] = clipped(groups, world, sharded=True, resumed=True)
        rank, few = dist.get_rank(), torch.nn.Linear(3, 2)
        found["groups"] = refused(lambda: MainGrads(few.parameters(), groups=4 + (rank == 1), world=world))
        grads = MainGrads(few.parameters(), groups=ranks, world=world)
        found["too early"] = refused(grads.join)
        found["another's"] = refused(lambda: grads.close((rank + 1) % ranks))
    if not world or dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    if world:
        dist.barrier()
        dist.destroy_process_group()
