"""Where the tokens of a call lie, and the keys and values of those that were computed before."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import bi_kernels as bi
from bi_kernels.checks import can_wait
from bi_kernels.tokens import TokenLayout


class Rows(NamedTuple):
    """Where the sequences of a call lie: what its ops are told."""

    positions: Tensor  # like ids: of each token in its sequence
    layout: TokenLayout | None  # of the gradients; None where none is wanted
    attend: dict  # keyword arguments of attention
    places: tuple[Tensor, Tensor] | None = None  # of each token in a cache: its row, and where in it
    cached: bool = False  # whether the queries see a cache's keys


def packed(lengths: Sequence[int], device: torch.device | str, order: Sequence[int] | None = None) -> Rows:
    """Lays sequences one after another, ids (tokens,); order: the step's number of each, as TokenLayout has it."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    there = ends.to(device, torch.int32)
    return Rows(bi.packed_positions(there, int(ends[-1])), TokenLayout.packed(ends, order), {"cu_seqlens_q": there})


def padded(
    lengths: Sequence[int],
    width: int,
    device: torch.device | str,
    left: bool = False,
    order: Sequence[int] | None = None,
) -> Rows:
    """Lays each sequence at the start of its row of ids (sequences, width), or at its end."""
    layout, counts = TokenLayout.padded(lengths, width, left, order), torch.tensor(lengths, device=device)
    positions = torch.arange(width, device=device).expand(len(lengths), -1)
    positions = (positions - (width - counts)[:, None]).clamp(min=0) if left else positions
    attend = {"lengths_q": counts, "lengths_k": counts, "left_padded": left}
    return Rows(positions.contiguous(), layout, attend)


class Cache:
    """Keys and values of the tokens that were computed before, one row a sequence; its last place takes padding's.

    config: the decoder's; like: a tensor of its device and dtype; heads: key heads, the decoder's unless given."""

    def __init__(self, config, sequences: int, capacity: int, like: Tensor, heads: int | None = None):
        shape = config.layers, sequences, capacity + 1, heads or config.kv_heads, config.head_dim
        self.k, self.v = like.new_zeros(shape), like.new_zeros(shape)
        self.lengths = torch.zeros(sequences, dtype=torch.int64, device=like.device)
        self.capacity = capacity

    def rows(self, width: int, counts: Tensor | None = None) -> Rows:
        """Says where the next tokens of each sequence lie: ids (sequences, width), of which counts (sequences,) are
        tokens, all unless given. Raises ValueError where the cache is too small; not in a CUDA graph, whose caller has
        to know."""
        counts = torch.full_like(self.lengths, width) if counts is None else counts
        if width and can_wait(counts) and int((self.lengths + counts).max()) > self.capacity:
            raise ValueError(f"Cache: {int((self.lengths + counts).max())} tokens, expected at most {self.capacity}")
        at = torch.arange(width, device=counts.device)
        positions, real = self.lengths[:, None] + at, at < counts[:, None]
        sequence = torch.arange(len(counts), device=counts.device)[:, None]
        places = sequence, torch.where(real, positions, self.capacity)
        return Rows(positions, None, {"lengths_q": counts, "lengths_k": self.lengths + counts}, places, cached=True)

    def joining(self, sequences: Sequence[int], lengths: Sequence[int]) -> Rows:
        """Says where whole prompts lie, ids (tokens,), one after another, that begin the rows `sequences`; sets their
        lengths. Raises ValueError where the cache is too small."""
        if max(lengths) > self.capacity:
            raise ValueError(f"Cache: {max(lengths)} tokens, expected at most {self.capacity}")
        device = self.lengths.device
        rows, counts = packed(lengths, device), torch.tensor(lengths, device=device)
        where = torch.tensor(sequences, device=device)
        self.lengths[where] = counts
        of_each = where.repeat_interleave(counts, output_size=sum(lengths))
        return rows._replace(layout=None, places=(of_each, rows.positions))

    def put(self, layer: int, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values; returns those that the queries see. Raises ValueError where a gradient is
        wanted: the folds over a sequence's queries are not cut, so what trains is one call of whole sequences."""
        if k.requires_grad:
            raise ValueError(
                "Cache: the call wants gradients, which a cache has none of; expected torch.no_grad(), or whole "
                "sequences and no cache"
            )
        self.k[layer][rows.places], self.v[layer][rows.places] = k, v
        return (self.k[layer], self.v[layer]) if rows.cached else (k, v)

    def advance(self, rows: Rows) -> None:
        """Counts the tokens of a call, once every layer has put them."""
        if rows.cached:
            self.lengths += rows.attend["lengths_q"]
