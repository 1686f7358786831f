"""Training steps of a small network of the package's ops, under several layouts: one SHA-256 of all weights at the end,
and the first op whose result or gradient two layouts do not share."""

import hashlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import torch

import bi_kernels
from bi_kernels.audit import stock
from bi_kernels.audit.broken.gradient import dw_separate
from bi_kernels.audit.evidence.drift import compare
from bi_kernels.audit.problem.call_layouts import Call, layouts
from bi_kernels.audit.problem.inputs import generator, on
from bi_kernels.audit.relations.step import token_layout
from bi_kernels.contract import CONTRACT, SHAPES
from bi_kernels.grads import MainGrads

CONTROL = "dW as the sum of separately accumulated partials, trained"
SPLITS = ("packed", "batch", "left_padded:16", "micro_batches:each", "micro_batches:ragged")


class Network(torch.nn.Module):
    """Embedding, layers of (RMSNorm, QK-norm and RoPE on a projection, residual, RMSNorm, SwiGLU), RMSNorm, LM head. No
    attention: tokens only meet in the gradients. `ops` is bi_kernels or a module with its names."""

    def __init__(self, shapes: str, ops, device: torch.device, seed: int, tied: bool, layers: int = 2):
        super().__init__()
        size, self.ops, self.tied = SHAPES[shapes], ops, tied
        self.heads, self.head_dim = size["heads"], size["head_dim"]
        self.vocab = CONTRACT["training"]["vocab"].get(shapes, size["vocab"])
        hidden, width = size["hidden"], size["heads"] * size["head_dim"]
        g = generator(device, seed, "network")
        self.weights = torch.nn.ParameterDict()
        self.table = bi_kernels.rope_table(
            max(size.get("gradient_lengths", size["lengths"])), self.head_dim, device=device
        )

        def add(name: str, *shape: int) -> None:
            w = torch.randn(shape, generator=g, device=device) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
            self.weights[name] = torch.nn.Parameter((w + (len(shape) == 1)).bfloat16())

        add("embedding", self.vocab, hidden)
        for i in range(layers):
            for name, *shape in (
                ("norm", hidden),
                ("q", width, hidden),
                ("q_bias", width),
                ("q_norm", self.head_dim),
                ("o", hidden, width),
                ("mlp_norm", hidden),
                ("gate", size["mlp"], hidden),
                ("up", size["mlp"], hidden),
                ("down", hidden, size["mlp"]),
            ):
                add(f"{name}_{i}", *shape)
        add("last_norm", hidden)
        if not tied:
            add("lm_head", self.vocab, hidden)
        self.layers = layers
        self.trace: Callable | None = None

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ops, w, seen = self.ops, self.weights, self.trace or (lambda name, y: y)
        x = seen("embedding", ops.embedding(ids, w["embedding"]))
        h = residual = x
        for i in range(self.layers):
            h = seen(f"layer {i} rms_norm", ops.rms_norm(residual, w[f"norm_{i}"]))
            q = seen(f"layer {i} linear q", ops.linear(h, w[f"q_{i}"], w[f"q_bias_{i}"]))
            q = q.unflatten(-1, (self.heads, self.head_dim))
            q = seen(f"layer {i} qk_norm", ops.qk_norm(q, w[f"q_norm_{i}"]))
            q = seen(f"layer {i} rope", ops.rope(q, self.table, positions)).flatten(-2)
            o = seen(f"layer {i} linear o", ops.linear(q, w[f"o_{i}"]))
            h, residual = ops.add_rms_norm(o, residual, w[f"mlp_norm_{i}"])
            h = seen(f"layer {i} add_rms_norm", h)
            gate = seen(f"layer {i} linear gate", ops.linear(h, w[f"gate_{i}"]))
            up = seen(f"layer {i} linear up", ops.linear(h, w[f"up_{i}"]))
            h = seen(f"layer {i} swiglu", ops.swiglu(gate, up))
            residual = seen(f"layer {i} add", ops.add(ops.linear(h, w[f"down_{i}"]), residual))
        h = seen("last rms_norm", ops.rms_norm(residual, w["last_norm"]))
        return seen("lm_head_logprob", ops.lm_head_logprob(h, w["embedding" if self.tied else "lm_head"], targets)[0])


def _ops(candidate: str):
    ours = {name: getattr(bi_kernels, name) for name in bi_kernels.__all__}
    return {"bi_kernels": bi_kernels, "torch": stock, CONTROL: SimpleNamespace(**ours | {"linear": dw_separate})}[
        candidate
    ]


def batches(lengths: list[int], vocab: int, steps: int, device: torch.device, seed: int) -> Iterator[tuple]:
    """(ids, targets, advantages) of each step's logical tokens; the first quarter of a sample is a prompt, not
    scored."""
    g = generator(device, seed, "batches")
    prompt = torch.cat([torch.arange(n) < n // 4 for n in lengths]).to(device)
    for _ in range(steps):
        # a square skews the ids towards the low ones, so that many repeat
        ids = ((torch.rand(sum(lengths), generator=g, device=device) ** 2) * vocab).long()
        targets = torch.randint(0, vocab, ids.shape, generator=g, device=device).masked_fill_(prompt, -100)
        yield ids, targets, torch.randn(ids.shape, generator=g, device=device)


def run_step(
    network: Network, calls: list[Call], lengths: list[int], ids, targets, advantages, each=lambda: None
) -> torch.Tensor:
    """Forward and backward of every call; logprobs in logical order. The denominator is the step's, not the call's."""
    device = ids.device
    active = (targets >= 0).sum()
    at = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device)
    logprobs = torch.zeros(len(ids), device=device)
    for call in calls:
        index = on(device, call.index)
        real, rows = index >= 0, index.clamp(min=0)
        with token_layout(call, lengths):
            logprob = network(ids[rows].masked_fill(~real, 0), targets[rows].masked_fill(~real, -100), at[rows])
        loss = -(logprob * advantages[rows].masked_fill(~real, 0)).sum() / active
        loss.backward()
        logprobs[rows[real]] = logprob.detach()[real]
        each()
    return logprobs


def train(
    session, candidate: str, layout: str, steps: int, tied: bool = True, tick=lambda: None
) -> dict[str, torch.Tensor]:
    """Returns the weights (fp32 masters) after `steps` AdamW steps of the network under one layout; without weight
    decay, which moves weights that no gradient reached."""
    shapes, device, seed = session.parameters["shapes"], session.device, session.parameters["seed"]
    network = Network(shapes, _ops(candidate), device, seed, tied)
    lengths = training_lengths(shapes)
    grads = MainGrads(network.parameters(), tied=[network.weights["embedding"]] if tied else [])
    optimizer = torch.optim.AdamW(grads.masters, lr=CONTRACT["training"]["learning_rate"], weight_decay=0.0)
    calls = layouts(lengths, seed)[layout]
    for ids, targets, advantages in batches(lengths, network.vocab, steps, device, seed):
        run_step(network, calls, lengths, ids, targets, advantages, grads.collect)
        grads.join()
        optimizer.step()
        grads.finish()
        tick()
    return {name: master.detach() for (name, _), master in zip(network.weights.items(), grads.masters)}


def training_lengths(shapes: str) -> list[int]:
    return SHAPES[shapes].get("gradient_lengths", SHAPES[shapes]["lengths"])


def digest(weights: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name, w in weights.items():
        sha.update(name.encode())
        sha.update(w.contiguous().cpu().numpy().tobytes())
    return sha.hexdigest()


def hashes(session, candidate: str, steps: int, tied: bool = True, splits=SPLITS) -> list[dict]:
    """Returns each split's SHA-256 after training, how far its weights are from the first split's, and how many
    tensors are where they began."""
    first, out, begin = None, [], train(session, candidate, splits[0], 0, tied)
    for split in splits:
        weights = train(session, candidate, split, steps, tied)
        first = weights if first is None else first
        drift = [compare(w, first[name]) for name, w in weights.items()]
        worst = max(((weights[name] - first[name]).abs().max().item(), name) for name in weights)
        out.append(
            {
                "candidate": candidate,
                "layout": split,
                "SHA-256": digest(weights),
                "weights that differ": sum(d.mismatches for d in drift),
                "of": sum(d.elements for d in drift),
                "tensors": len(weights),
                "unmoved": sum(torch.equal(w, begin[name]) for name, w in weights.items()),
                "max abs": worst[0],
                "largest in": worst[1] if worst[0] else "",
            }
        )
    return out


def first_difference(session, candidate: str, a: str = "packed", b: str = "micro_batches:each") -> dict:
    """One step under two layouts: the first op whose result differs, and the first (backward) whose incoming gradient
    does, each with its drift; then the parameters whose gradients differ."""
    shapes, device, seed = session.parameters["shapes"], session.device, session.parameters["seed"]
    lengths, seen = training_lengths(shapes), []
    for layout in (a, b):
        network = Network(shapes, _ops(candidate), device, seed, tied=False)
        grads = MainGrads(network.parameters())
        calls = layouts(lengths, seed)[layout]
        forward, backward, now = {}, {}, {}

        def put(store: dict, name: str, t: torch.Tensor) -> None:
            index = on(device, now["call"].index.reshape(-1))
            t = t.detach().reshape(len(index), -1)
            store.setdefault(name, t.new_zeros(sum(lengths), t.shape[1]))[index[index >= 0]] = t[index >= 0]

        def trace(name: str, y: torch.Tensor) -> torch.Tensor:
            put(forward, name, y)
            y.register_hook(lambda g: put(backward, name, g))
            return y

        network.trace = trace
        data = next(batches(lengths, network.vocab, 1, device, seed))
        remaining = iter(calls)
        now["call"] = next(remaining)

        def each() -> None:
            grads.collect()
            now["call"] = next(remaining, None)

        run_step(network, calls, lengths, *data, each)
        grads.join()
        seen.append((forward, backward, {k: p.main_grad for k, p in network.weights.items()}))
    result = {}
    for part, one, other in zip(("forward", "backward", "parameters"), *seen):
        drifts = {name: compare(t, other[name]) for name, t in one.items()}
        result[part] = next(((name, d) for name, d in drifts.items() if d.mismatches), ("", None))
    return result
