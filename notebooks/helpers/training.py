"""Training steps of a small network of the package's ops, under several layouts: one SHA-256 of all weights at the end,
and the first op whose result or gradient two layouts do not share."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

import bi_kernels
from bi_kernels.audit import stock
from bi_kernels.audit.compare import compare
from bi_kernels.audit.controls.gradient import dw_separate
from bi_kernels.audit.inputs import generator, on
from bi_kernels.audit.layouts import Call, layouts
from bi_kernels.audit.targets.op_step import token_layout
from bi_kernels.contract import CONTRACT, SHAPES
from bi_kernels.grads import MainGrads

CONTROL = "dW as the sum of separately accumulated partials, trained"
SPLITS = ("packed", "batch", "left_padded:16", "micro_batches:each", "micro_batches:ragged")
TELLING = ("packed", "micro_batches:ragged")


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
        self.table = bi_kernels.rope_table(max(training_lengths(shapes)), self.head_dim, device=device)

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
        self.trace: Callable | None = None  # is given the name of every result, and the result, which it returns
        self.call: Call | None = None  # that is computed

    def forward(self, ids: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        ops, w, seen = self.ops, self.weights, self.trace or (lambda name, y: y)
        x = seen("embedding", ops.embedding(ids, w["embedding"]))
        h = residual = x
        for i in range(self.layers):
            own = lambda name: w[f"{name}_{i}"]
            within = lambda op, y: seen(f"layer {i} {op}", y)
            linear = lambda name, x, *bias: within(f"linear {name}", ops.linear(x, own(name), *bias))
            h = within("rms_norm", ops.rms_norm(residual, own("norm")))
            q = linear("q", h, own("q_bias")).unflatten(-1, (self.heads, self.head_dim))
            q = within("qk_norm", ops.qk_norm(q, own("q_norm")))
            q = within("rope", ops.rope(q, self.table, positions)).flatten(-2)
            h, residual = ops.add_rms_norm(linear("o", q), residual, own("mlp_norm"))
            h = within("add_rms_norm", h)
            h = within("swiglu", ops.swiglu(linear("gate", h), linear("up", h)))
            residual = within("add", ops.add(ops.linear(h, own("down")), residual))
        h = seen("last rms_norm", ops.rms_norm(residual, w["last_norm"]))
        return seen("lm_head_logprob", ops.lm_head_logprob(h, w["embedding" if self.tied else "lm_head"], targets)[0])


class Run:
    """A network of a candidate's ops that is trained under one layout."""

    def __init__(self, session, candidate: str, layout: str, tied: bool):
        shapes, self.device, self.seed = session.parameters["shapes"], session.device, session.parameters["seed"]
        ours = {name: getattr(bi_kernels, name) for name in bi_kernels.__all__}
        separate = SimpleNamespace(**ours | {"linear": dw_separate})
        ops = {"bi_kernels": bi_kernels, "torch": stock, CONTROL: separate}[candidate]
        self.network = Network(shapes, ops, self.device, self.seed, tied)
        self.grads = MainGrads(self.network.parameters(), tied=[self.network.weights["embedding"]] if tied else [])
        self.lengths = training_lengths(shapes)
        self.calls = layouts(self.lengths, self.seed)[layout]

    def batches(self, steps: int) -> Iterator[tuple]:
        """(ids, targets, advantages) of each step's logical tokens; the first quarter of a sample is a prompt, not
        scored."""
        count, vocab, device = sum(self.lengths), self.network.vocab, self.device
        g = generator(device, self.seed, "batches")
        prompt = torch.cat([torch.arange(n) < n // 4 for n in self.lengths]).to(device)
        for _ in range(steps):
            # a square skews the ids towards the low ones, so that many repeat
            ids = ((torch.rand(count, generator=g, device=device) ** 2) * vocab).long()
            targets = torch.randint(0, vocab, ids.shape, generator=g, device=device).masked_fill_(prompt, -100)
            yield ids, targets, torch.randn(ids.shape, generator=g, device=device)

    def step(self, ids: Tensor, targets: Tensor, advantages: Tensor) -> None:
        """Forward and backward of every call. The denominator is the step's, not the call's."""
        active = (targets >= 0).sum()
        at = on(self.device, np.concatenate([np.arange(n) for n in self.lengths]))
        for call in self.calls:
            self.network.call = call
            index = on(self.device, call.index)
            padding, rows = index < 0, index.clamp(min=0)
            with token_layout(call, self.lengths):
                wanted = targets[rows].masked_fill(padding, -100)
                logprob = self.network(ids[rows].masked_fill(padding, 0), wanted, at[rows])
            (-(logprob * advantages[rows].masked_fill(padding, 0)).sum() / active).backward()
            self.grads.collect()
        self.grads.join()


def train(session, candidate: str, layout: str, steps: int, tied: bool = True) -> dict[str, Tensor]:
    """Returns the weights (fp32 masters) after `steps` AdamW steps of the network under one layout; without weight
    decay, which moves weights that no gradient reached."""
    run = Run(session, candidate, layout, tied)
    optimizer = torch.optim.AdamW(run.grads.masters, lr=CONTRACT["training"]["learning_rate"], weight_decay=0.0)
    for batch in run.batches(steps):
        run.step(*batch)
        optimizer.step()
        run.grads.finish()
    return {name: master.detach() for name, master in zip(run.network.weights, run.grads.masters)}


def training_lengths(shapes: str) -> list[int]:
    return SHAPES[shapes].get("gradient_lengths", SHAPES[shapes]["lengths"])


def digest(weights: dict[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, w in weights.items():
        sha.update(name.encode())
        sha.update(w.contiguous().cpu().numpy())
    return sha.hexdigest()


def hashes(session, candidate: str, steps: int, tied: bool = True, splits: Sequence[str] = ()) -> list[dict]:
    """Returns each split's SHA-256 after training, how far its weights are from the first split's, and how many
    tensors are where they began; splits: SPLITS, unless given, and of the control the two between which it shows."""
    splits = splits or (TELLING if candidate == CONTROL else SPLITS)
    first, out, begin = None, [], train(session, candidate, splits[0], 0, tied)
    with ThreadPoolExecutor() as beside:  # a gigabyte takes the CPU a second, in which the next split is trained
        for split in splits:
            weights = train(session, candidate, split, steps, tied)
            first = first or weights
            drift = [compare(w, first[name]) for name, w in weights.items()]
            worst, where = max(((w - first[name]).abs().max().item(), name) for name, w in weights.items())
            out.append(
                {
                    "candidate": candidate,
                    "layout": split,
                    "SHA-256": beside.submit(digest, weights),
                    "weights that differ": sum(d.mismatches for d in drift),
                    "of": sum(d.elements for d in drift),
                    "tensors": len(weights),
                    "unmoved": sum(torch.equal(w, begin[name]) for name, w in weights.items()),
                    "max abs": worst,
                    "largest in": where if worst else "",
                }
            )
    return [line | {"SHA-256": line["SHA-256"].result()} for line in out]


def first_difference(session, candidate: str, a: str = "packed", b: str = "micro_batches:each") -> dict:
    """One step under two layouts: the first op whose result differs, and the first (backward) whose incoming gradient
    does, each with its drift; then the parameters whose gradients differ."""

    def parts(layout: str) -> tuple[dict[str, Tensor], ...]:
        run = Run(session, candidate, layout, tied=False)
        forward, backward = {}, {}

        def put(store: dict, name: str, t: Tensor) -> None:
            index = on(run.device, run.network.call.index.reshape(-1))
            t = t.detach().reshape(len(index), -1)
            store.setdefault(name, t.new_zeros(sum(run.lengths), t.shape[1]))[index[index >= 0]] = t[index >= 0]

        def trace(name: str, y: Tensor) -> Tensor:
            put(forward, name, y)
            y.register_hook(lambda g: put(backward, name, g))
            return y

        run.network.trace = trace
        run.step(*next(run.batches(1)))
        return forward, backward, {k: p.main_grad for k, p in run.network.weights.items()}

    result = {}
    for part, one, other in zip(("forward", "backward", "parameters"), parts(a), parts(b)):
        drifts = ((name, compare(t, other[name])) for name, t in one.items())
        result[part] = next((found for found in drifts if found[1].mismatches), ("", None))
    return result
