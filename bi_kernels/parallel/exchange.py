"""Exchanges tensors between ranks byte for byte, so that no collective adds a number."""

from collections.abc import Callable
from functools import cache, lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bi_kernels.parallel.peers import Move, peers_for
from bi_kernels.tokens import SLAB

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.12 on


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


def exchange_async(group: dist.ProcessGroup, *moves: Move, kept: bool = False) -> Callable[[], list[Tensor]]:
    """Begins moves; returns a function that waits for them and returns a tensor a move.

    Without `kept` the tensors are valid only for what is launched next: see peers.py.
    """
    if peers := peers_for(group, moves[0].x):
        return peers.exchange(moves, kept)
    waits = [_collective(group, move) for move in moves]
    return lambda: [wait() for wait in waits]


def exchange(group: dist.ProcessGroup, move: Move, kept: bool = False) -> Tensor:
    """Returns the tensor of one move."""
    return exchange_async(group, move, kept=kept)()[0]


def _collective(group: dist.ProcessGroup, move: Move) -> Callable[[], Tensor]:
    """Begins a move by a collective."""
    (rank, ranks), columns = rank_and_world_size(group), move.columns
    rows, width = move.rows[rank], columns * move.x.element_size()
    if move.all or columns == move.x.shape[1]:  # already contiguous
        x = move.x.contiguous()
    else:
        x = torch.cat([part.flatten() for part in move.x.split(columns, 1)])
    found, work = x.new_empty(ranks, rows, columns), None
    if x.numel() and move.all:
        work = all_gather(_bytes(found), _bytes(x), group=group, async_op=True)
    elif x.numel():
        counts = [rows * width] * ranks, [n * width for n in move.rows]
        work = dist.all_to_all_single(_bytes(found), _bytes(x), *counts, group=group, async_op=True)

    def wait(held: Tensor = x) -> Tensor:
        if work:
            work.wait()
        if not move.beside or not found.numel():
            return found.view(move.shape(rank))
        return found.transpose(0, 1).reshape(rows, ranks * columns)

    return wait


@cache
def rank_and_world_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Returns (this rank in a group, its number of ranks)."""
    return dist.get_rank(group), dist.get_world_size(group)


def all_gather_rows(x: Tensor, group: dist.ProcessGroup, beside: bool = False) -> Move:
    """Sends every rank's x (rows, columns) to all: (ranks, rows, columns), or (rows, ranks · columns) with `beside`."""
    ranks, (rows, columns) = rank_and_world_size(group)[1], x.shape
    return Move(_by_rows(x), (rows,) * ranks, (0,) * ranks, columns, beside, all=True)


def _by_rows(x: Tensor) -> Tensor:
    """Returns x (rows, columns) with contiguous rows, which may lie apart."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def all_gather_columns(x: Tensor, group: dist.ProcessGroup) -> Move:
    """Sends every rank's x (rows, columns) to all, beside each other: (rows, ranks · columns)."""
    return all_gather_rows(x, group, beside=True)


@lru_cache(maxsize=256)
def shards(tokens: int, group: dist.ProcessGroup, unit: int = SLAB) -> list[slice]:
    """Returns each rank's tokens: equal numbers of whole slabs, fewer or none on the last ranks. unit: 1 if slabs
    themselves are counted."""
    ranks = rank_and_world_size(group)[1]
    most = -(-tokens // (unit * ranks)) * unit
    return [slice(min(tokens, r * most), min(tokens, r * most + most)) for r in range(ranks)]


def all_to_all_tokens(x: Tensor, group: dist.ProcessGroup, cuts: list[slice]) -> Move:
    """Sends each rank its tokens of x (tokens, columns), this rank's columns: (its tokens, ranks · columns). cuts: the
    tokens of each rank."""
    x, columns = x.contiguous(), x.shape[1]
    rows, first = (tuple(cut.stop - cut.start for cut in cuts), tuple(cut.start * columns for cut in cuts))
    return Move(x, rows, first, columns, True)


def reshard(weight: Tensor, group: dist.ProcessGroup) -> Move:
    """Turns a weight cut along its rows into one cut along its columns: (ranks, rows, columns of a rank)."""
    ranks, (rows, columns) = rank_and_world_size(group)[1], weight.shape
    return Move(_by_rows(weight), (rows,) * ranks, tuple(range(0, columns, columns // ranks)), columns // ranks, False)


def gather_tokens(mine: Tensor, cuts: list[slice], group: dist.ProcessGroup) -> Tensor:
    """Returns (tokens, columns) of the tokens that each rank has by `cuts`."""
    most, tokens = max(cut.stop - cut.start for cut in cuts), cuts[-1].stop
    if len(mine) < most:
        mine = torch.cat([mine, mine.new_zeros(most - len(mine), mine.shape[1])])
    adjacent = all(cut.start == min(r * most, tokens) for r, cut in enumerate(cuts))
    found = exchange(group, all_gather_rows(mine, group), kept=adjacent)
    return found.flatten(0, 1)[:tokens] if adjacent else torch.cat([t[: c.stop - c.start] for t, c in zip(found, cuts)])


def merge(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduces x in place by adding its bits as integers; each number is one rank's, and 0 on all others."""
    whole = x.view(-1).view(torch.uint8)
    dist.all_reduce(whole.view(torch.int32) if whole.numel() % 4 == 0 else whole, group=group)
    return x


class Mapped(torch.autograd.Function):
    """forward(x), whose gradient is backward(dy): a part of x and its gathering, or the other way round."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.gradient = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return ctx.gradient(dy), None, None


def shard_columns(x: Tensor, columns: slice, group: dist.ProcessGroup, kept: slice) -> Tensor:
    """Returns x[:, columns] of x (rows, columns), which every rank has; kept: the ranks whose gradients are wanted."""
    gather = lambda dy: torch.cat([*exchange(group, all_gather_rows(dy, group))[kept]], 1)
    return Mapped.apply(x, lambda x: x[:, columns], gather)


def gather_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the columns of all ranks beside each other: (rows, ranks · columns) of x (rows, columns)."""
    gather, mine = lambda x: exchange(group, all_gather_columns(x, group), kept=True), own(x.shape[1], group)
    return Mapped.apply(x, gather, lambda dy: dy[:, mine])


def shard_tokens(x: Tensor, cuts: list[slice], group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's tokens of x (tokens, columns), which every rank has."""
    mine = cuts[rank_and_world_size(group)[0]]
    return Mapped.apply(x, lambda x: x[mine], lambda dy: gather_tokens(dy, cuts, group))


def own(columns: int, group: dist.ProcessGroup) -> slice:
    """Returns this rank's columns among those of all ranks, which have equally many."""
    rank, _ = rank_and_world_size(group)
    return slice(rank * columns, (rank + 1) * columns)
