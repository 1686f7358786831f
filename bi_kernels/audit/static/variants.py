"""Counts the variants of kernels that a server and a trainer compile for one model, whatever they are sent."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

import bi_kernels as bi
from bi_kernels import compat
from bi_kernels.contract import SHAPES

PAGES, PAGE = 1024, 16  # of the cache, whose numbers nobody reads; keys of a page
KINDS = "server", "trainer"
SEQUENCES, LONGEST = 128, 2**15  # of a call at most; its tokens at most, and keys of a sequence


@contextmanager
def counted() -> Iterator[dict[str, set[str]]]:
    """Yields {kernel: keys of the variants that Triton would compile for the launches meanwhile}.

    Launches nothing, so results are arbitrary, and what this process has cached of its launches counts as loaded: use
    it in a process of its own.
    """
    found: dict[str, set[str]] = defaultdict(set)

    def note(kernel, *args, grid, warmup, **named) -> None:
        named |= {"debug": False, "instrumentation_mode": ""}
        _, keys, _, _, binder = kernel.device_caches[driver.active.get_current_device()]
        _, specialization, options = binder(*args, **named)
        found[kernel.fn.__name__].add(compute_cache_key(keys, specialization, options))

    with mock.patch.object(JITFunction, "run", note), mock.patch.object(compat, "_RUN", note):  # not a recorder
        yield found


class Served:
    """A layer of a decoder between its embedding and its LM head, bf16, that calls our ops as a server does: with
    packed prompts, chunks and decode over pages, and training steps of packed and padded samples."""

    def __init__(self, device: torch.device, shapes: str, longest: int):
        self.device, self.dims, self.longest = device, SHAPES[shapes], longest
        d, D = self.dims, self.dims["head_dim"]
        sizes = {"embedding": (d["vocab"], d["hidden"]), "lm_head": (d["vocab"], d["hidden"])}
        sizes |= {"qkv": ((d["heads"] + 2 * d["kv_heads"]) * D, d["hidden"]), "o": (d["hidden"], d["heads"] * D)}
        sizes |= {"gate": (d["mlp"], d["hidden"]), "up": (d["mlp"], d["hidden"]), "down": (d["hidden"], d["mlp"])}
        sizes |= {"norm": (d["hidden"],), "q_norm": (D,), "k_norm": (D,)}
        there = {"device": device, "dtype": torch.bfloat16}
        self.w = {name: torch.nn.Parameter(torch.empty(size, **there)) for name, size in sizes.items()}
        for w in self.w.values():
            w.main_grad = torch.empty_like(w, dtype=torch.float32)
        self.table = bi.rope_table(longest, D, device=device)
        shape = PAGES, PAGE, d["kv_heads"], D
        self.cache = torch.empty(shape, **there), torch.empty(shape, **there)

    def _integers(self, numbers, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(np.asarray(numbers), device=self.device).to(dtype)

    def logprob(self, lead: tuple[int, ...], positions: Tensor, paged: bool = False, **where) -> Tensor:
        """Computes the layer and the LM head for tokens of a leading shape; where: what attention is told."""
        w, d = self.w, self.dims
        ids = torch.zeros(lead, dtype=torch.int64, device=self.device)
        x = bi.embedding(ids, w["embedding"])
        qkv = bi.linear(bi.rms_norm(x, w["norm"]), w["qkv"]).unflatten(-1, (-1, d["head_dim"]))
        q, k, v = qkv.split([d["heads"], d["kv_heads"], d["kv_heads"]], -2)
        q = bi.rope(bi.qk_norm(q, w["q_norm"]), self.table, positions)
        k = bi.rope(bi.qk_norm(k, w["k_norm"]), self.table, positions)
        out, _ = bi.attention(q, *(self.cache if paged else (k, v)), **where)
        h, x = bi.add_rms_norm(bi.linear(out.flatten(-2), w["o"]), x, w["norm"])
        h = bi.linear(bi.swiglu(bi.linear(h, w["gate"]), bi.linear(h, w["up"])), w["down"])
        h, _ = bi.add_rms_norm(h, x, w["norm"])
        return bi.lm_head_logprob(h, w["lm_head"], ids)[0]

    @torch.no_grad()
    def prompts(self, lengths: list[int]) -> None:
        """Computes whole prompts, one after another."""
        ends = self._integers(np.cumsum([0, *lengths]))
        self.logprob((sum(lengths),), bi.packed_positions(ends, sum(lengths)), cu_seqlens_q=ends)

    @torch.no_grad()
    def continued(self, lengths: list[int], before: list[int]) -> None:
        """Computes the next tokens of sequences that have some in pages: chunks, or one token each."""
        keys = np.add(lengths, before)
        told = {"lengths_k": self._integers(keys)}
        told["block_table"] = torch.zeros(len(keys), -(-int(keys.max()) // PAGE), dtype=torch.int32, device=self.device)
        if max(lengths) == 1:
            self.logprob((len(keys), 1), self._integers(before, torch.int64)[:, None], paged=True, **told)
            return
        positions = np.concatenate([np.arange(b, b + n) for n, b in zip(lengths, before)])
        told["cu_seqlens_q"] = self._integers(np.cumsum([0, *lengths]))
        self.logprob((sum(lengths),), self._integers(positions, torch.int64), paged=True, **told)

    def trained(self, lengths: list[int], padded: bool) -> None:
        """Computes a micro-batch and its backward."""
        width, count = max(lengths), len(lengths)
        if padded and width * count <= 2 * sum(lengths):
            told = {name: self._integers(lengths) for name in ("lengths_q", "lengths_k")}
            positions = torch.arange(width, device=self.device).expand(count, width).contiguous()
            with bi.TokenLayout.padded(lengths, width):
                self.logprob((count, width), positions, **told).sum().backward()
            return
        ends = np.cumsum([0, *lengths])
        told, count = {"cu_seqlens_q": self._integers(ends)}, sum(lengths)
        with bi.TokenLayout.packed(ends.tolist()):
            self.logprob((count,), bi.packed_positions(told["cu_seqlens_q"], count), **told).sum().backward()


def served(
    device: str, calls: int, seed: int = 0, shapes: str = "qwen3-8b", longest: int = LONGEST
) -> dict[str, dict[str, int]]:
    """Returns {kernel: how many variants are compiled} of a server, which computes forward alone, and of a trainer, in
    so many calls of each, of sizes drawn log-uniform."""
    rng = np.random.default_rng(seed)
    log_uniform = lambda most, low=1: int(np.exp(rng.uniform(np.log(low), np.log(most + 1))))
    layer = Served(torch.device(device), shapes, longest)

    def lengths() -> list[int]:
        """Draws 1 to SEQUENCES lengths of about as many tokens together as are drawn."""
        count, total = log_uniform(SEQUENCES), log_uniform(longest)
        shares = rng.exponential(size=count)
        return [max(1, int(total * share)) for share in shares / shares.sum()]

    def serve(number: int) -> None:
        mine = lengths()
        before = [log_uniform(longest // 2) for _ in mine]
        if not (kind := number % 3):
            layer.prompts(mine)
        else:
            layer.continued([min(n, longest // 2) for n in mine] if kind == 1 else [1] * len(mine), before)

    counts = {}
    for who, call in zip(KINDS, (serve, lambda n: layer.trained(lengths(), padded=n % 2 == 0))):
        with counted() as found:
            for number in range(calls):
                call(number)
        counts[who] = {kernel: len(keys) for kernel, keys in sorted(found.items())}
    return counts
