"""A step of a decoder, its logprobs and gradients under any layout, and its logprobs from a cache."""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import bi_kernels
from bi_kernels.audit.problem.call_layouts import Call, pack, pad, spans
from bi_kernels.audit.problem.inputs import generator, on
from bi_kernels.audit.relations.step import token_layout
from bi_kernels.contract import CONTRACT, DTYPES
from bi_kernels.grads import MainGrads
from bi_kernels.model import CONFIGS, Cache, Decoder, Rows, packed, policy_loss
from bi_kernels.tokens import TokenLayout

THREADS = 12  # that hash


def case(shapes: str) -> dict:
    """Returns what the contract's [chain] says of a shape set."""
    return CONTRACT["chain"]["tiny" if shapes == "tiny" else "real"]


def parts(samples: Sequence, count: int) -> list[list]:
    """Cuts samples into at most `count` parts of about as many."""
    return [[samples[i] for i in part] for part in np.array_split(np.arange(len(samples)), min(count, len(samples)))]


def layouts(lengths: Sequence[int], seed: int) -> dict[str, list[Call]]:
    """Returns every layout of a step by name, as its calls; `packed` is what the others are compared with."""
    s = spans(lengths)
    order = np.roll(np.random.default_rng(seed).permutation(len(s))[::-1], 1)
    third = max(1, len(s) // 3)
    return {
        "packed": [pack(s)],
        "checkpointing off": [pack(s)],
        "singles": [Call(x[None, :]) for x in s],
        "batch": [pad(s)],
        "left_padded": [pad(s, left=True)],
        "permuted": [pack([s[i] for i in order])],
        "micro_batches:2": [pack(part) for part in parts(s, 2)],
        "micro_batches:4": [pad(part, left=i % 2 == 1) for i, part in enumerate(parts(s, 4))],
        "micro_batches:each": [pack([x]) for x in s],
        "micro_batches:ragged": [pad(s[:third]), pack(s[third:])],
    }


def rows_of(call: Call, lengths: Sequence[int], device: torch.device, told: bool = True) -> Rows:
    """Returns what the decoder is told of a call of whole sequences; told: else its gradients take every
    row of the call for a sequence, padding included."""
    whole = [call.index.shape[-1]] * (call.index.size // call.index.shape[-1])
    layout = token_layout(call, lengths) if told else TokenLayout.padded(whole, whole[0])
    if call.cu_seqlens is not None:
        return packed(np.diff(call.cu_seqlens).tolist(), device)._replace(layout=layout)
    real = call.index >= 0
    counts, width, left = real.sum(1), real.shape[1], bool((~real[:, 0]).any())
    at = np.arange(width) - (width - counts[:, None] if left else 0)
    there = on(device, counts)
    attend = {"lengths_q": there, "lengths_k": there, "left_padded": left}
    return Rows(on(device, np.clip(at, 0, None) + np.zeros_like(call.index)), layout, attend)


class Step:
    """A step of a decoder with random weights: its tokens, and what each leaves in any layout.

    layers: the key of [chain] that says how many, the decoder's own unless given; ops: the decoder's; forgets: its
    calls are not told their token layout; own: each micro-batch divides by its own tokens.
    """

    def __init__(
        self,
        shapes: str,
        dtype: str,
        device: torch.device,
        seed: int,
        layers: str = "",
        ops=bi_kernels,
        checkpointing: bool = True,
        forgets: bool = False,
        own: bool = False,
    ):
        config = CONFIGS[shapes]
        config = replace(config, layers=min(config.layers, CONTRACT["chain"][layers])) if layers else config
        self.case, self.shapes, self.dtype, self.device = case(shapes), shapes, dtype, device
        self.lengths, self.forgets, self.own = self.case["lengths"], forgets, own
        self.model = Decoder(config, device, DTYPES[dtype], seed, checkpointing=checkpointing, ops=ops)
        self.grads = MainGrads(self.model.parameters(), self.model.tied)
        self.layouts = layouts(self.lengths, seed)
        g, self.count = generator(device, seed, "chain"), sum(self.lengths)
        self.ids, self.targets = torch.randint(0, config.vocab, (2, self.count), generator=g, device=device)
        self.advantages, self.ratio = torch.randn(2, self.count, generator=g, device=device)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Holds the step's gradient of every parameter, fp32, as `run` left them."""
        return {name: p.main_grad for name, p in self.model.named_parameters()}

    def run(self, layout: str, rolled: Tensor | None = None) -> Tensor:
        """Runs forward and backward of every call of a layout; returns the logprobs (tokens,), fp32.

        rolled: (tokens,) fp32, logprobs that the old policy's are made from, instead of the step's own.
        """
        self.grads.finish()
        checkpointing, self.model.checkpointing = self.model.checkpointing, layout != "checkpointing off"
        found = self.ratio.new_zeros(self.count)
        for call in self.layouts[layout]:
            index = on(self.device, call.index)
            real, at = index >= 0, index.clamp(min=0)
            ids, targets = self.ids[at].masked_fill(~real, 0), self.targets[at].masked_fill(~real, -100)
            rows = rows_of(call, self.lengths, self.device, told=not self.forgets)
            with warnings.catch_warnings(action="ignore") if self.forgets else nullcontext():
                logprob, _ = self.model.logprobs(ids, targets, rows)
                old = (logprob.detach() if rolled is None else rolled[at]) + 0.125 * self.ratio[at]
                denominator = int(real.sum()) if self.own else self.count
                policy_loss(logprob, old, self.advantages[at], real, denominator).backward()
            self.grads.collect()
            found[index[real]] = logprob.detach()[real]
        self.grads.join()
        self.model.checkpointing = checkpointing
        return found

    @torch.no_grad()
    def cached(self, chunk: int, first: Sequence[int]) -> Tensor:
        """Returns the logprobs from a cache: of the first tokens of each sequence, as many as `first` says, in one
        call, and of the others in chunks."""
        make = lambda numbers: torch.tensor(numbers, device=self.device)
        counts, done, width = make(self.lengths), make(list(first)), torch.arange(chunk, device=self.device)
        starts, found = counts.cumsum(0) - counts, self.ratio.new_zeros(self.count)
        cache = Cache(self.model.config, len(counts), max(self.lengths), self.model.lm_head)
        if begun := [i for i, n in enumerate(first) if n]:
            at = torch.cat([starts[i] + torch.arange(first[i], device=self.device) for i in begun])
            rows = cache.joining(begun, [first[i] for i in begun])
            found[at], _ = self.model.logprobs(self.ids[at], self.targets[at], rows, cache)
        for _ in range(-(-max(n - f for n, f in zip(self.lengths, first)) // chunk)):
            new = (counts - done).clamp(0, chunk)
            real = width < new[:, None]
            at = ((starts + done)[:, None] + width).masked_fill(~real, 0)
            targets = self.targets[at].masked_fill(~real, -100)
            logprob, _ = self.model.logprobs(self.ids[at], targets, cache.rows(chunk, new), cache)
            found[at[real]] = logprob[real]
            done = done + new
        return found

    def in_chunks(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields the logprobs of chunked prefill, and of decode behind a prefill, by name of the layout, each with the
        tokens that were computed so: (tokens,) bool."""
        every = torch.ones(self.count, dtype=torch.bool, device=self.device)
        for size in self.case["chunks"]:
            yield f"chunked:{size}", self.cached(size, [0] * len(self.lengths)), every
        first = [max(n - self.case["decoded"], 0) for n in self.lengths]
        decoded = torch.cat([torch.arange(n) >= f for n, f in zip(self.lengths, first)]).to(self.device)
        found = self.cached(1, first)
        yield "prefill of a cache", found, ~decoded
        yield "decode", found, decoded


def hash_of(t: Tensor) -> bytes:
    """Returns the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(t.detach().contiguous().cpu().view(torch.uint8).numpy()).digest()


def sha256(tensors: dict[str, Tensor]) -> str:
    """Returns the SHA-256 of the names of tensors and of the SHA-256 of each, which threads compute."""
    with ThreadPoolExecutor(THREADS) as threads:
        hashed = threads.map(hash_of, tensors.values())
        return hashlib.sha256(b"".join(name.encode() + b for name, b in zip(tensors, hashed))).hexdigest()
