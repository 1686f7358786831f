"""Finds what attention is given for a call: the keys that its queries see, where they lie, and what says so."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from bi_kernels.audit.problem.call_layouts import Call, pad
from bi_kernels.audit.problem.inputs import on

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
    ends, rows = np.cumsum(lengths), [row[row >= 0] for row in call.index]
    samples = np.searchsorted(ends, [row[0] for row in rows], side="right")
    seen = [np.arange(ends[i] - lengths[i], row[-1] + 1) for i, row in zip(samples, rows)]
    queries, counts = (np.array([*map(len, parts)]) for parts in (rows, seen))
    if page:
        return _paged(seen, queries, counts, page)
    left = bool((call.index[:, 0] < 0).any())
    index = call.index if (queries == counts).all() else pad(seen, left, ROOM).index
    if (call.index >= 0).all() and (index >= 0).all():
        return Keys(index)
    return Keys(index, {"lengths_q": queries, "lengths_k": counts} | ({"left_padded": True} if left else {}))


def _paged(seen: list[np.ndarray], queries: np.ndarray, counts: np.ndarray, page: int) -> Keys:
    """Returns keys in pages that lie in any order, among those of nobody."""
    needed = [-(-len(s) // page) for s in seen]
    places = np.random.default_rng(page).permutation(sum(needed) + 3)
    pages, table = np.full((len(places), page), -1), np.zeros((len(seen), max(needed)), dtype=int)
    for row, (s, n, first) in enumerate(zip(seen, needed, accumulate([0, *needed[:-1]]))):
        table[row, :n] = places[first : first + n]
        pages[table[row, :n]] = np.pad(s, (0, n * page - len(s)), constant_values=-1).reshape(n, page)
    return Keys(pages, {"lengths_q": queries, "lengths_k": counts, "block_table": table})
