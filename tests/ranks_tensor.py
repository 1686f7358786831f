"""Run by tests/test_tensor_parallel.py on each rank, or alone: one step of small decoders, cut by tensor over gloo.

Each rank writes {variant: {what: SHA-256}}: logprobs, gradients, what is generated.
"""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import bi_kernels
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Decoder, generate, packed, padded
from bi_kernels.parallel import exchange
from bi_kernels.parallel.tensor import ExpertParallel, TensorParallel

LENGTHS, WIDTH = [5, 1, 17, 33], 40
BASE = replace(CONFIGS["world"], layers=1, qkv_bias=True, tied=False)
MIXTURE = {"mlp": 0, "experts": 4, "experts_per_token": 3, "expert_mlp": 32}
SMALL = replace(BASE, vocab=300, qkv_bias=False)  # one block, so that a rank has none of the vocabulary
VARIANTS = {  # of the configuration; of the step
    "biases, packed": ({}, {}),
    "one key head": ({"kv_heads": 1}, {}),
    "one key head, padded left": ({"kv_heads": 1}, {"padded": True, "left": True}),
    "fp32, padded, no main_grad": ({"qk_norm": False}, {"dtype": torch.float32, "padded": True, "buffers": False}),
    "tied, window": ({"tied": True, "window": 8}, {}),
    "checkpointing, micro-batches": ({"layers": 2}, {"checkpointing": True, "batches": [[0, 1], [2, 3]]}),
    "one block of vocabulary": ({"vocab": 300}, {}),
    "all frozen but an inner weight": ({"layers": 2}, {"trains": "layers.0.k"}),
    "the embedding and a norm are frozen": ({}, {"frozen": ("embedding", "layers.0.norm")}),
}
SEQUENCE = {  # likewise, of norms and residuals by tokens
    "packed": ({}, {}),
    "packed in another order": ({"layers": 2}, {"order": [2, 0, 3, 1]}),
    "one key head, padded left": ({"kv_heads": 1}, {"padded": True, "left": True}),
    "fp32, no main_grad": ({"qk_norm": False}, {"dtype": torch.float32, "buffers": False}),
    "checkpointing, micro-batches": ({"layers": 2}, {"checkpointing": True, "batches": [[0, 1], [2, 3]]}),
    "the embedding and a norm are frozen": ({}, {"frozen": ("embedding", "layers.0.norm")}),
}
MIXTURES = {  # likewise, of experts; shared by tensor, by tokens too, and alone
    "mixture by tensor": ({"kv_heads": 1}, {"checkpointing": True, "batches": [[0, 1], [2, 3]]}),
    "mixture by tokens": ({}, {"padded": True, "left": True}),
    "mixture by experts": ({"norm_topk": False}, {"dtype": torch.float32, "order": [2, 0, 3, 1]}),
}


def whole(p: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all ranks."""
    if not hasattr(p, "cut"):
        return mine
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return torch.cat(parts)


def sha(t: torch.Tensor) -> str:
    return hashlib.sha256(t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def step(
    config,
    ops,
    dtype=torch.bfloat16,
    padded_=False,
    left=False,
    buffers=True,
    checkpointing=False,
    batches=None,
    trains="",
    frozen=(),
    order=None,
) -> dict[str, str]:
    model, found = Decoder(config, dtype=dtype, ops=ops, checkpointing=checkpointing), {}
    for name, p in model.named_parameters():
        p.requires_grad_(name == trains if trains else name not in frozen)
    grads = MainGrads(model.parameters(), model.tied) if buffers else None
    for batch in batches or [range(len(LENGTHS))]:
        lengths = [LENGTHS[i] for i in batch]
        g = torch.Generator().manual_seed(3 + batch[0])
        shape = (len(lengths), WIDTH) if padded_ else (sum(lengths),)
        rows = padded(lengths, WIDTH, "cpu", left=left) if padded_ else packed(lengths, "cpu", order)
        ids, targets = torch.randint(0, config.vocab, (2, *shape), generator=g)
        weights = torch.randn(shape, generator=g)
        if padded_:
            at = torch.arange(WIDTH) - (WIDTH - torch.tensor(lengths)[:, None] if left else 0)
            targets = targets.masked_fill((at < 0) | (at >= torch.tensor(lengths)[:, None]), -100)
        logprob, entropy = model.logprobs(ids, targets, rows, temperature=0.8)
        ((logprob * weights).sum() + 0.1 * entropy.sum()).backward()
        found |= {f"logprob {batch[0]}": sha(logprob), f"entropy {batch[0]}": sha(entropy)}
    if grads:
        grads.join()
    of = {n: p.main_grad if grads else p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(x.any() for x in of.values() if x.numel()), "every gradient is there"
    return found | {n: sha(whole(p, of[n])) for n, p in model.named_parameters() if n in of}


def generated(config, ops) -> dict[str, str]:
    found = generate(Decoder(config, ops=ops), [[1, 2, 3], [4], [5, 6]], 5, batch=2, seed=1)
    return {"generated": str(sorted((one.number, one.ids, one.logprobs) for one in found))}


def used_twice(ops, weights: list[torch.Tensor]) -> dict[str, str]:
    """An x that goes to two products and elsewhere, and a weight that is not shared."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(24, 64, generator=g).bfloat16().requires_grad_()
    share = getattr(ops, "share", lambda w: torch.nn.Parameter(w.clone()))
    a, b, own = share(weights[0]), share(weights[1]), torch.nn.Parameter(weights[2].clone())
    ys = [ops.linear(x, a), ops.linear(x, b), ops.linear(x, own), x * 3]
    first, end = getattr(a, "cut", (0, 64))[:2]
    d = [torch.randn(24, 64, generator=g).bfloat16() for _ in ys]
    parts = [d[0][:, first:end], d[1][:, first:end], *d[2:]]
    sum((y.float() * one.float()).sum() for y, one in zip(ys, parts)).backward()
    found = {"dx": sha(x.grad), "own": sha(own.grad), "shared": sha(whole(a, a.grad))}
    x.grad, own.grad = None, None
    entered = getattr(ops, "enter", lambda h: h)(x)
    sum((ops.linear(entered, w).float() * one.float()).sum() for w, one in ((a, parts[0]), (own, d[2]))).backward()
    return found | {"dx, entered": sha(x.grad), "own, entered": sha(own.grad)}


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    """What cannot be cut, and what is not the same on every rank."""
    found = {}
    for what, config, seed in (
        ("odd", replace(BASE, mlp=95), 0),
        ("heads", replace(BASE, heads=3, kv_heads=3, hidden=48), 0),
        ("one head", replace(BASE, heads=1, kv_heads=1), 0),
        ("experts", replace(BASE, **MIXTURE | {"experts": 3}), 0),
        ("seed", BASE, dist.get_rank(group)),
    ):
        try:
            Decoder(config, ops=TensorParallel(group), seed=seed)
        except ValueError as error:
            found[what] = str(error)
    ops = TensorParallel(group)
    hidden, weight, targets = torch.zeros(4, 32).bfloat16(), torch.zeros(9000, 64).bfloat16(), torch.ones(4).long()
    for what, call in (
        ("group", lambda: TensorParallel(None)),
        ("unshared", lambda: ops.lm_head_logprob(torch.zeros(4, 64).bfloat16(), weight, targets)),
        ("hidden", lambda: ops.lm_head_logprob(hidden, ops.share(weight, None), targets)),
    ):
        try:
            call()
        except ValueError as error:
            found[what] = str(error)
    return found


def moved(group: dist.ProcessGroup) -> dict[str, bool]:
    """Whether every move brings what it says, of widths and shares that are odd, and none."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found = {}
    for rows, columns in ((33, 4), (32, 6), (5, 3), (0, 8), (40, 1)):
        every = [
            torch.randn(rows, columns, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(ranks)
        ]
        mine, said = every[rank], f"{rows} × {columns}"
        came = lambda move: exchange.exchange(group, move)
        found[f"gathering {said}"] = came(exchange.all_gather_rows(mine, group)).equal(torch.stack(every))
        found[f"joining {said}"] = came(exchange.all_gather_columns(mine.t(), group)).equal(
            torch.cat([x.t() for x in every], 1)
        )
        for name, ends in (("even", None), ("the first none", [0, 0]), ("the last none", [0, rows])):
            cuts = exchange.shards(rows, group)
            if ends:
                ends += [rows] * (ranks + 1 - len(ends))
                cuts = [slice(*pair) for pair in zip(ends, ends[1:])]
            turned = came(exchange.all_to_all_tokens(mine, group, cuts))
            found[f"turning {said}, {name}"] = turned.equal(torch.cat([x[cuts[rank]] for x in every], 1))
            of_all = exchange.gather_tokens(every[0][cuts[rank]], cuts, group)
            found[f"of all {said}, {name}"] = of_all.equal(every[0])
    every = [torch.randn(3, 4 * ranks, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    recut = exchange.exchange(group, exchange.reshard(every[rank], group)).flatten(0, 1)
    found["recutting"] = recut.equal(torch.cat(every)[:, exchange.own(4, group)])
    return found


def of_dense(ops, found: dict) -> None:
    for variants, sequence in ((VARIANTS, False), (SEQUENCE, True)):
        for name, (sizes, how) in variants.items():
            how = {"padded_" if k == "padded" else k: v for k, v in how.items()}
            found["sequence, " * sequence + name] = step(replace(BASE, **sizes), ops(sequence), **how)
    found["generation"] = generated(BASE, ops()) | generated(replace(BASE, kv_heads=1), ops())
    found["generation, one block"] = generated(SMALL, ops())
    both = ops()  # of two models, whose key heads are more and fewer than the ranks
    found["two models"] = step(replace(BASE, kv_heads=1), both) | generated(BASE, both)
    g = torch.Generator().manual_seed(7)
    found["x used twice"] = used_twice(ops(), [torch.randn(64, 64, generator=g).bfloat16() for _ in range(3)])


def of_mixtures(ops, found: dict) -> None:
    experts = bi_kernels if ops() is bi_kernels else ExpertParallel(dist.group.WORLD)
    for by, (name, (sizes, how)) in zip((ops(), ops(True), experts), MIXTURES.items()):
        how = {"padded_" if k == "padded" else k: v for k, v in how.items()}
        found[name] = step(replace(BASE, **MIXTURE | sizes), by, **how)
    found["mixture, generation"] = generated(replace(BASE, **MIXTURE), experts)


def main(folder: Path, kind: str = "dense") -> None:
    ranks = "RANK" in os.environ
    if ranks:
        dist.init_process_group("gloo")
    found = {}
    of = of_mixtures if kind == "mixtures" else of_dense
    of(lambda sequence=False: TensorParallel(dist.group.WORLD, sequence) if ranks else bi_kernels, found)
    if ranks and kind == "dense":
        found |= {"refused": refused(dist.group.WORLD), "moved": moved(dist.group.WORLD)}
    (folder / f"{dist.get_rank() if ranks else 'one'}.json").write_text(json.dumps(found))
    if ranks:
        dist.barrier()
        dist.destroy_process_group()
