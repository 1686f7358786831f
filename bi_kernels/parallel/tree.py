"""A step's gradients over data-parallel ranks: a fixed number of groups of sequences, joined by one fixed binary tree.

A group is a fold of its own (tokens.py). Groups first … end are joined as (first … middle) + (middle … end), where the
left half has the largest power of two of groups that leaves the right one any. The tree does not depend on the ranks: a
rank adds the nodes within its own groups; the ranks exchange the rest, and each adds its share of all parameters.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from bi_kernels.ops.square_sum import BLOCK
from bi_kernels.parallel.exchange import all_gather
from bi_kernels.parallel.peers import Move, peers_for
from bi_kernels.scalars import truncated_repr

BUCKET = 2**25  # fp32 numbers that are exchanged at a time
Node = tuple[int, int]  # groups: the first, and the one after the last


def middle(first: int, end: int) -> int:
    """Returns the group at which a node of the tree divides."""
    return first + (1 << (end - first - 1).bit_length() - 1)


def whole(first: int, end: int, groups: int) -> Iterator[Node]:
    """Yields, in ascending order, the largest nodes of the tree over all groups that lie within first … end."""

    def within(node: Node) -> Iterator[Node]:
        low, high = node
        if first <= low and high <= end:
            yield node
        elif low < end and first < high:
            divided = middle(low, high)
            yield from within((low, divided))
            yield from within((divided, high))

    if first < end:
        yield from within((0, groups))


class GroupTree:
    """The fp32 gradients of this rank's groups, in one flat buffer, and the tree that joins them.

    groups: of the whole step. world: the ranks that share it, or None for this process alone. Rank r of W has groups
    r · groups // W … (r + 1) · groups // W, maybe none. Each node that waits for its other half keeps a buffer: at most
    log2 of the rank's groups.
    """

    def __init__(self, numbers: int, groups: int, world: dist.ProcessGroup | None, device: torch.device):
        self.groups, self.world = groups, world
        self.rank, self.ranks = (dist.get_rank(world), dist.get_world_size(world)) if world else (0, 1)
        self.size = -(-max(numbers, 1) // (self.ranks * BLOCK)) * self.ranks * BLOCK
        self.flat = torch.zeros(self.size, device=device)
        self.mine = self.of(self.rank)
        self.waiting: list[tuple[Node, torch.Tensor]] = []
        self.next = self.mine.start

    def of(self, rank: int) -> range:
        """Returns the groups of a rank."""
        return range(*(r * self.groups // self.ranks for r in (rank, rank + 1)))

    def close(self, group: int) -> bool:
        """Ends a group's fold and zeroes the flat buffer if another follows; returns whether one does. Raises
        ValueError for a group other than this rank's next."""
        if group != self.next or group not in self.mine:
            due = f"group {self.next}" if self.next in self.mine else "none, for all are closed"
            mine = f"rank {self.rank} has {_said(self.mine)}"
            raise ValueError(f"MainGrads: close was called for group {truncated_repr(group)}, expected {due}; {mine}")
        self.next += 1
        node, held = (group, group + 1), None
        while self.waiting and self._halves(self.waiting[-1][0], node):
            (first, _), left = self.waiting.pop()
            held = left.add_(self.flat if held is None else held)
            node = first, node[1]
        others = self.next in self.mine
        if held is None:
            held = self.flat.clone() if others else self.flat
        self.waiting.append((node, held))
        if others:
            self.flat.zero_()
        return others

    def _halves(self, left: Node, right: Node) -> bool:
        """Tells whether two neighbours are the halves of one node."""
        return [*whole(left[0], right[1], self.groups)] == [(left[0], right[1])]

    def join(self) -> list[torch.Tensor]:
        """Returns this rank's share of the sum of all groups, a tensor for each part of the flat buffer. Raises
        ValueError if a group of this rank was not closed."""
        if self.next != self.mine.stop:
            missing = range(self.next, self.mine.stop)
            raise ValueError(f"MainGrads: join was called before {_said(missing)} of rank {self.rank} was closed")
        found, due = [], None
        for part in self.parts():  # one is on its way while the one before is added
            begun = self._exchange(part)
            found += [due()] if due else []
            due = begun
        found += [due()] if due else []
        self.begin()
        return found

    def begin(self) -> None:
        """Forgets the groups that were closed."""
        self.waiting.clear()
        self.next = self.mine.start

    @property
    def begun(self) -> bool:
        """Tells whether a group of this rank was closed, and none joined since."""
        return self.next != self.mine.start

    def gather(self, shares: list[torch.Tensor]) -> torch.Tensor:
        """Gathers all ranks' shares into the flat buffer; returns it, viewed in their dtype."""
        flat = self.flat.view(shares[0].dtype)[: self.size]
        for part, share in zip(self.parts(), shares):
            if self.world is None:
                flat[part].copy_(share)
            else:
                all_gather(flat[part], share, group=self.world)
        return flat

    def gathered(self, share: torch.Tensor) -> torch.Tensor:
        """Returns the shares of all ranks, one after another."""
        found = share.new_empty(self.ranks * len(share))
        all_gather(found, share, group=self.world)
        return found

    def parts(self) -> Iterator[slice]:
        """Yields the parts of the flat buffer that are exchanged at a time; each rank has a share of each."""
        bucket = -(-BUCKET // (self.ranks * BLOCK)) * self.ranks * BLOCK
        yield from (slice(first, min(first + bucket, self.size)) for first in range(0, self.size, bucket))

    def share(self, part: slice) -> slice:
        """Returns this rank's share of a part, as a slice of the flat buffer."""
        count = (part.stop - part.start) // self.ranks
        return slice(part.start + self.rank * count, part.start + (self.rank + 1) * count)

    def _exchange(self, part: slice) -> Callable[[], torch.Tensor]:
        """Begins to exchange the shares of a part; returns a function that waits for them and returns this rank's share
        of the sum of all groups."""
        if self.world is None:
            return lambda: self.waiting[0][1][part]
        share = (part.stop - part.start) // self.ranks
        nodes = [[*whole(held.start, held.stop, self.groups)] for held in map(self.of, range(self.ranks))]
        if all(len(of) == 1 for of in nodes) and (peers := peers_for(self.world, self.flat)):
            (_, flat), ranks, node = self.waiting[0], self.ranks, nodes[self.rank][0]
            firsts = tuple(range(0, ranks * share, share))
            arrived = peers.exchange([Move(flat[part].view(1, -1), (1,) * ranks, firsts, share, False, own=False)])

            def added_up() -> torch.Tensor:
                came = {of: piece for (of,), piece in zip(nodes, arrived()[0].flatten(1))}
                return added(came | {node: flat[self.share(part)]}, (0, self.groups))

            return added_up
        found: dict[Node, torch.Tensor] = {}
        works = []
        for i in range(max(map(len, nodes))):
            sent = self.waiting[i][1][part] if i < len(self.waiting) else self.flat[:0]
            sizes = [share * (i < len(of)) for of in nodes]
            came = self.flat.new_empty(sum(sizes))
            given = [len(sent) // self.ranks] * self.ranks
            works.append(dist.all_to_all_single(came, sent, sizes, given, group=self.world, async_op=True))
            found |= {of[i]: piece for of, piece in zip(nodes, came.split(sizes)) if i < len(of)}

        def due() -> torch.Tensor:
            for work in works:
                work.wait()
            return added(found, (0, self.groups))

        return due


def added(found: dict[Node, torch.Tensor], node: Node) -> torch.Tensor:
    """Returns the sum of a node's groups from the nodes that are there, in the order of the tree."""
    if node in found:
        return found[node]
    divided = middle(*node)
    return added(found, (node[0], divided)) + added(found, (divided, node[1]))


def agree(who: str, world: dist.ProcessGroup, said: dict[str, object]) -> None:
    """Raises ValueError, on every rank, where a rank's values differ from rank 0's."""
    everybody: list = [None] * dist.get_world_size(world)
    dist.all_gather_object(everybody, said, group=world)
    for rank, theirs in enumerate(everybody):
        for name, value in theirs.items():
            if value != everybody[0][name]:
                raise ValueError(
                    f"{who}: rank {rank} has {name} {value!r:.200}, expected {everybody[0][name]!r:.200} as rank 0"
                )


def _said(groups: range) -> str:
    if not groups:
        return "no groups"
    last = groups.stop - 1
    return f"group {last}" if len(groups) == 1 else f"groups {groups.start} to {last}"
