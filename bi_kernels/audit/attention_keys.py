"""Finds what attention is given for a call: the keys that its queries see, where they lie, and what says so."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bi_kernels.audit.inputs import on
from bi_kernels.audit.layouts import Call, of_each_token, pad

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
