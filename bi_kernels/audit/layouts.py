"""Layouts: where the logical tokens (sample, position) sit in memory, and in which calls they are computed.

A layout is a list of calls; a call is an array of logical token numbers, −1 for padding, of the shape the op is given:
(batch, length) or (tokens,). Logical tokens are numbered sample by sample, so a result gathered back is comparable.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import numpy as np
import torch

from bi_kernels.audit.inputs import on
from bi_kernels.contract import SWEEP


def _part(t: torch.Tensor) -> torch.Tensor:
    """Of rows twice as wide, as q is of a fused q, k and v."""
    if t.dim() == 1:
        return torch.stack((t, t.detach()), 1)[:, 0]
    dim = -2 if t.dim() > 2 else -1
    return torch.cat((t, t.detach()), dim).narrow(dim, 0, t.shape[dim])  # else a gradient of −0 would meet another's +0


def _slice(t: torch.Tensor) -> torch.Tensor:
    """Of a larger tensor, whose other rows and columns hold NaN."""
    beside = [2, 3, *[0, 0] * (t.dim() - 2), *[1, 1] * (t.dim() > 1)]
    whole = torch.nn.functional.pad(t, beside, value=float("nan") if t.is_floating_point() else 0)
    inner = whole[1:-1] if t.dim() > 1 else whole
    return inner[..., 2 : 2 + t.shape[-1]]


def unaligned(t: torch.Tensor, offset: int = 1) -> torch.Tensor:
    """Returns a copy that begins `offset` elements behind the start of its memory."""
    return torch.cat((t.new_zeros(offset), t.flatten()))[offset:].view(t.shape)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # the same values lying otherwise in memory
    "unaligned view": unaligned,
    "strided view": _part,
    "slice of a batch": _slice,
    "every other column": lambda t: torch.stack((t, t.detach()), -1)[..., 0],
    "transposed view": lambda t: (
        t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 1 else _part(t)
    ),  # heads first, columns first
}


@dataclass(frozen=True)
class Call:
    index: np.ndarray  # logical token numbers, −1 for padding
    cu_seqlens: tuple[int, ...] | None = None  # given where the call packs whole sequences


def spans(lengths: Sequence[int]) -> list[np.ndarray]:
    """Returns the logical token numbers of each sample."""
    return [np.arange(end - n, end) for n, end in zip(lengths, accumulate(lengths))]


def of_each_token(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sample of each logical token, and its position there."""
    return np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.arange(n) for n in lengths])


def pack(samples: Sequence[np.ndarray]) -> Call:
    return Call(np.concatenate(samples), (0, *accumulate(len(s) for s in samples)))


def pad(samples: Sequence[np.ndarray], left: bool = False, multiple: int = 1) -> Call:
    """One (batch, length) call, padded to the longest sample and up to a multiple."""
    width = -(-max(len(s) for s in samples) // multiple) * multiple
    index = np.full((len(samples), width), -1)
    for row, s in zip(index, samples):
        row[slice(width - len(s), width) if left else slice(len(s))] = s
    return Call(index)


def chunks(samples: Sequence[np.ndarray], size: int) -> list[Call]:
    """Returns each sample in chunks of `size`, alone, as a prefill against a KV cache computes it."""
    return [Call(s[None, at : at + size]) for s in samples for at in range(0, len(s), size)]


def pairs(samples: Sequence[np.ndarray]) -> list[Sequence[np.ndarray]]:
    return [samples[i : i + 2] for i in range(0, len(samples), 2)]


def decode(samples: Sequence[np.ndarray]) -> list[Call]:
    """One position a call, of every sample that still has one."""
    return [Call(np.array([s[t] for s in samples if t < len(s)])[:, None]) for t in range(max(map(len, samples)))]


def layouts(lengths: Sequence[int], seed: int = 0) -> dict[str, list[Call]]:
    """Returns every layout of the contract, by name; a name may carry a variant behind a colon. `packed` is what the
    others are compared with."""
    return _layouts(tuple(lengths), seed)


@cache
def _layouts(lengths: tuple[int, ...], seed: int) -> dict[str, list[Call]]:
    s = spans(lengths)
    order = np.random.default_rng(seed).permutation(len(s))
    if (order == np.arange(len(s))).all():
        order = order[::-1]
    shuffled = [s[i] for i in order]
    third = max(1, len(s) // 3)
    return {
        "packed": [pack(s)],
        "singles": [Call(x[None, :]) for x in s],
        "batch": [pad(s)],
        "batch:16": [pad(s, multiple=16)],
        "left_padded": [pad(s, left=True)],
        "left_padded:16": [pad(s, left=True, multiple=16)],
        "permuted": [pack(shuffled)],
        "permuted:batch": [pad(shuffled)],
        **{f"chunked:{size}": chunks(s, size) for size in SWEEP["chunks"]},
        "decode": decode(s),
        "micro_batches:each": [pack([x]) for x in s],
        "micro_batches:ragged": [pad(s[:third])] + ([pack(s[third:])] if third < len(s) else []),
        # every sample beside another one; where the inputs are `nonfinite`, one of the two may hold NaN or Inf
        "neighbours": [pad(pair) for pair in pairs(s)],
        "neighbours:left": [pad(pair, left=True) for pair in pairs(s[1:] + s[:1])],
    }


def micro_batches(samples: Sequence[np.ndarray], count: int) -> list[list[np.ndarray]]:
    """Cuts samples, in their order, into at most `count` parts of about as many."""
    return [[samples[i] for i in part] for part in np.array_split(range(len(samples)), min(count, len(samples)))]


def step_layouts(lengths: Sequence[int], seed: int = 0) -> dict[str, list[Call]]:
    """Returns the layouts of a whole model's step by name: those of `layouts` that keep samples whole, and further
    splits."""
    s, every = spans(lengths), layouts(lengths, seed)
    names = "packed", "singles", "batch", "left_padded", "permuted", "micro_batches:each", "micro_batches:ragged"
    fourths = enumerate(micro_batches(s, 4))
    return {name: every[name] for name in names} | {
        "micro_batches:2": [pad(part) for part in micro_batches(s, 2)],
        "micro_batches:4": [pad(part, left=True) if i % 2 else pack(part) for i, part in fourths],
    }


def shapes_launched(calls: Sequence[Call]) -> str:
    """Returns what a layout asks of an op, for the evidence: the number of calls and their shapes."""
    shapes = [call.index.shape for call in calls]
    text = ", ".join("x".join(map(str, shape)) for shape in list(dict.fromkeys(shapes))[:4])
    return f"{len(calls)} call{'s' * (len(calls) > 1)}: {text}{' …' * (len(set(shapes)) > 4)}"


def random_layout(lengths: Sequence[int], rng: np.random.Generator) -> list[Call]:
    """Returns any split of the samples into calls, each packed, padded, chunked or decoded, in any order."""
    s = spans(lengths)
    rest, calls = [s[i] for i in rng.permutation(len(s))], []
    while rest:
        take, multiple = int(rng.integers(1, len(rest) + 1)), int(rng.choice((1, 8, 16)))
        group, rest = rest[:take], rest[take:]
        ways = (
            lambda: [pack(group)],
            lambda: [pad(group, multiple=multiple)],
            lambda: [pad(group, left=True, multiple=multiple)],
            lambda: chunks(group, int(rng.integers(1, 41))),
            lambda: decode(group),
        )
        calls += ways[rng.integers(len(ways))]()
    return calls


# attention

ROOM = 16  # a cache has room for some more keys than it holds


@dataclass(frozen=True)
class Keys:
    """Says where the keys of a call are."""

    index: np.ndarray  # logical token numbers, −1 for nobody's, in the shape of k and v
    told: dict = field(default_factory=dict)  # arguments of `bi_kernels.attention`, arrays in place of tensors

    def arguments(self, device: torch.device) -> dict:
        """Returns what the op is told, as tensors on the device."""
        return {k: on(device, v.astype(np.int32)) if isinstance(v, np.ndarray) else v for k, v in self.told.items()}


def keys(call: Call, lengths: Sequence[int], page: int = 0) -> Keys:
    """Returns all tokens of each sample up to the call's last: packed as the queries are, in a cache, or in pages of
    `page` that lie in any order."""
    if call.cu_seqlens is not None or call.index.ndim == 1:
        return Keys(call.index, {"cu_seqlens_q": np.array(call.cu_seqlens or (0, call.index.size))})
    rows, (_, position) = [row[row >= 0] for row in call.index], of_each_token(lengths)
    seen = [np.arange(row[0] - position[row[0]], row[-1] + 1) if len(row) else row for row in rows]
    queries, counts = (np.array([*map(len, parts)]) for parts in (rows, seen))
    if page:
        return _paged(seen, queries, counts, page)
    left = bool(((call.index[:, 0] < 0) & (call.index[:, -1] >= 0)).any())
    index = call.index if (queries == counts).all() else pad(seen, left, ROOM).index
    if (call.index >= 0).all() and (index >= 0).all():
        return Keys(index)
    return Keys(index, {"lengths_q": queries, "lengths_k": counts} | ({"left_padded": True} if left else {}))


def _paged(seen: list[np.ndarray], queries: np.ndarray, counts: np.ndarray, page: int) -> Keys:
    """Returns keys in pages that lie in any order, among those of nobody."""
    needed = -(-counts // page)
    places = np.random.default_rng(page).permutation(needed.sum() + 3)
    pages, table = np.full((len(places), page), -1), np.zeros((len(seen), needed.max()), dtype=int)
    for row, s, mine in zip(table, seen, np.split(places, needed.cumsum())):
        row[: len(mine)] = mine
        pages[mine] = np.pad(s, (0, len(mine) * page - len(s)), constant_values=-1).reshape(-1, page)
    return Keys(pages, {"lengths_q": queries, "lengths_k": counts, "block_table": table})
