"""Exchanges tensors between the GPUs of one host by copy engines, while kernels run.

A collective's kernel takes multiprocessors from a product that wants them all. PyTorch's symmetric memory lets a rank
write where another will read, rows of a wider matrix too, so nothing is copied before or after. Ranks on several hosts,
or without access to each other, use collectives.
"""

import ctypes
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from bi_kernels.compat import current_stream

SLOTS = 3  # what a round brought is there until the next but one begins
UNIT = 2**25  # bytes, of which the memory of a slot is a multiple
ALIGNED = 256  # bytes
SECONDS = 600  # that a rank waits for others before it fails
PLANS = 4096  # kept
DEVICE_TO_DEVICE, DISABLE_TIMING = 3, 2  # cudaMemcpyKind, a flag of an event


class Move(NamedTuple):
    """What this rank sends to each rank: rows of x (rows, numbers). Every rank sends a rank equally many rows, which
    arrive one after another, or beside each other with `beside`."""

    x: Tensor
    rows: tuple[int, ...]  # of each rank
    first: tuple[int, ...]  # number of x, of each rank
    columns: int
    beside: bool
    all: bool = False  # every rank is sent all of x
    own: bool = True  # what a rank has for itself is moved as well

    def shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of what a rank receives."""
        rows, ranks = self.rows[rank], len(self.rows)
        return (rows, ranks * self.columns) if self.beside else (ranks, rows, self.columns)

    def room(self) -> int:
        """Returns the most bytes that a rank receives."""
        return max(self.rows) * self.columns * self.x.element_size() * len(self.rows)


class _Round:
    """Waits, when called, for the tensors that all ranks send in a round, and returns them."""

    def __init__(self, peers: "Peers", came: list[Tensor], done: ctypes.c_void_p, kept: bool, moves: Sequence[Move]):
        self.peers, self.came, self.done, self.kept, self.held = peers, came, done, kept, moves

    def __call__(self) -> list[Tensor]:
        reader = current_stream(self.peers.device.index)
        _must(_runtime().cudaStreamWaitEvent(reader, self.done, 0))
        self.peers.readers.add(reader)
        self.peers.due.discard(self)
        return [t.clone() for t in self.came] if self.kept else self.came


class Peers:
    """The symmetric memory of a group, which grows with what the ranks exchange."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.order = [(self.rank + i) % self.ranks for i in range(1, self.ranks + 1)]  # no two send to one at a time
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.ready, *self.done = (_event() for _ in range(1 + SLOTS))
        self.read, self.readers = _event(), set()  # streams that have waited for what came
        self.rounds, self.room, self.due = 0, 0, WeakSet()  # rounds that somebody is still to wait for
        self.plans: dict[tuple, tuple[list, list[Tensor]]] = {}  # by a slot and the kinds of the moves in it
        self._grow(1)

    def _grow(self, size: int) -> None:
        """Gives slots room for `size` bytes on all ranks, after all writes into the old memory."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group, device_ids=[self.device.index])
        self.plans.clear()
        self.room, self.memory, self.there = 0, None, None
        torch.cuda.empty_cache()  # symmetric memory takes none of what PyTorch keeps
        room = -(-size // UNIT) * UNIT
        self.memory = symmetric.empty(SLOTS * room, dtype=torch.uint8, device=self.device)
        self.there = symmetric.rendezvous(self.memory, self.group)
        self.addresses, self.room = self.there.buffer_ptrs, room

    def exchange(self, moves: Sequence[Move], kept: bool = False) -> Callable[[], list[Tensor]]:
        """Begins a round of moves; returns a function that waits for all ranks and returns a tensor a move.

        Without `kept` the tensors are valid until the round after next begins. Raises RuntimeError where two rounds are
        due already.
        """
        if len(self.due) == SLOTS - 1:
            raise RuntimeError(f"Peers: exchange was called with {len(self.due)} rounds due, expected at most 1")
        slot = self.rounds % SLOTS
        key = slot, *((m.x.shape, m.x.stride(), m.x.dtype, *m[1:]) for m in moves)
        copies, came = self.plans.get(key) or self._plan(key, slot, moves)
        self.rounds, done = self.rounds + 1, self.done[slot]
        runtime, side = _runtime(), self.stream.cuda_stream
        current = torch.cuda.current_stream(self.device)
        status = runtime.cudaEventRecord(self.ready, current.cuda_stream)
        status = status or runtime.cudaStreamWaitEvent(side, self.ready, 0)
        for stream in self.readers - {current.cuda_stream}:
            status = status or runtime.cudaEventRecord(self.read, stream)
            status = status or runtime.cudaStreamWaitEvent(side, self.read, 0)
        for move, its in zip(moves, copies):
            begin = move.x.data_ptr()
            for to, pitch, source, apart, width, rows in its:
                if rows == 1:
                    status = status or runtime.cudaMemcpyAsync(to, begin + source, width, DEVICE_TO_DEVICE, side)
                else:
                    given = to, pitch, begin + source, apart, width, rows
                    status = status or runtime.cudaMemcpy2DAsync(*given, DEVICE_TO_DEVICE, side)
        torch.cuda.set_stream(self.stream)  # on which the barrier is launched
        try:
            self.there.barrier(0, SECONDS * 1000)
        finally:
            torch.cuda.set_stream(current)
        _must(status or runtime.cudaEventRecord(done, side))

        due = _Round(self, came, done, kept, moves)
        self.due.add(due)  # until somebody has called it, or can no more
        return due

    def _plan(self, key: tuple, slot: int, moves: Sequence[Move]) -> tuple[list, list[Tensor]]:
        """Returns the copies of each move in a slot (where to, its pitch, where in x, its pitch, bytes, rows) and the
        tensors that arrive; remembers both."""
        ends = [0]
        for move in moves:
            ends.append(ends[-1] + -(-move.room() // ALIGNED) * ALIGNED)
        if ends[-1] > self.room:
            self._grow(ends[-1])
        if len(self.plans) >= PLANS:
            self.plans.clear()
        copies, came = [], []
        for move, end in zip(moves, ends):
            at, x, shape = slot * self.room + end, move.x, move.shape(self.rank)
            copies.append([*self._copies(move, at)])
            came.append(self.memory[at : at + prod(shape) * x.element_size()].view(x.dtype).view(shape))
        self.plans[key] = copies, came
        return copies, came

    def _copies(self, move: Move, at: int) -> Iterator[tuple[int, ...]]:
        """Yields the copies of a move; contiguous rows are one copy."""
        size = move.x.element_size()
        width, apart = move.columns * size, move.x.stride(0) * size
        pitch = width * self.ranks if move.beside else width
        for r in self.order if move.own else self.order[:-1]:
            rows, source = move.rows[r], move.first[r] * size
            to = self.addresses[r] + at + self.rank * (width if move.beside else rows * width)
            if rows * width:
                adjacent = rows == 1 or apart == pitch == width
                yield (to, 0, source, 0, rows * width, 1) if adjacent else (to, pitch, source, apart, width, rows)


def _event() -> ctypes.c_void_p:
    """Makes an event of the CUDA runtime, whose calls take less time than PyTorch's."""
    event = ctypes.c_void_p()
    _must(_runtime().cudaEventCreateWithFlags(ctypes.byref(event), DISABLE_TIMING))
    return event


def _must(status: int) -> None:
    if status:
        raise RuntimeError(f"Peers: the CUDA runtime returned {status}")


@cache
def _runtime() -> ctypes.CDLL:
    """Returns the CUDA runtime that PyTorch has loaded."""
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    runtime.cudaMemcpyAsync.argtypes = [pointer, pointer, size, number, pointer]
    runtime.cudaMemcpy2DAsync.argtypes = [pointer, size, pointer, size, size, size, number, pointer]
    runtime.cudaEventRecord.argtypes = [pointer, pointer]
    runtime.cudaStreamWaitEvent.argtypes = [pointer, pointer, number]
    return runtime


def peers_for(group: dist.ProcessGroup, x: Tensor) -> Peers | None:
    """Returns the group's symmetric memory on x's device, or None for collectives; all ranks must call it."""
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    return _of(group, x.device)


@cache
def _of(group: dist.ProcessGroup, device: torch.device) -> Peers | None:
    ranks = dist.get_world_size(group)
    hosts: list = [None] * ranks
    dist.all_gather_object(hosts, platform.node(), group=group)
    if ranks == 1 or len(set(hosts)) > 1:
        return None
    try:
        found, why = Peers(group, device), ""
    except (RuntimeError, OSError, AttributeError) as error:  # no access to each other's memory, or another runtime
        found, why = None, str(error)
    said: list = [None] * ranks
    dist.all_gather_object(said, why, group=group)
    return None if any(said) else found
