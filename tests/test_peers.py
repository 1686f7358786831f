"""What ranks write into each other's memory, of one process that stands for all: copies are the CPU's."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_kernels.parallel import exchange, peers
from bi_kernels.parallel.peers import SLOTS, Peers


class Runtime:
    """The CUDA runtime's calls, at once."""

    def cudaMemcpyAsync(self, to, source, count, kind, stream):
        ctypes.memmove(to, source, count)
        return 0

    def cudaMemcpy2DAsync(self, to, pitch, source, apart, width, rows, kind, stream):
        if pitch < width or apart < width:
            return 12  # cudaErrorInvalidPitchValue
        for row in range(rows):
            ctypes.memmove(to + row * pitch, source + row * apart, width)
        return 0

    def cudaEventRecord(self, event, stream):
        return 0

    def cudaStreamWaitEvent(self, stream, event, flags):
        return 0


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(peers, "_runtime", Runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(peers, "current_stream", lambda device: 0)


def ranks_of(count: int, room: int = 2**18) -> list[Peers]:
    found = []
    for rank in range(count):
        p = object.__new__(Peers)
        p.device, p.rank, p.ranks = SimpleNamespace(index=0), rank, count
        p.order = [(rank + i) % count for i in range(1, count + 1)]
        p.stream, p.ready, p.read, p.done = SimpleNamespace(cuda_stream=1), 0, 0, [0] * SLOTS
        p.rounds, p.room, p.due, p.readers, p.plans = 0, room, peers.WeakSet(), set(), {}
        p.memory = torch.full((SLOTS * room,), 0x55, dtype=torch.uint8)
        p.there = SimpleNamespace(barrier=lambda channel, milliseconds: None)
        found.append(p)
    for p in found:
        p.addresses = [other.memory.data_ptr() for other in found]
    return found


def moved(kind: str, x: torch.Tensor, rank: int, ranks: int, cuts: list[slice]) -> peers.Move:
    exchange.rank_and_world_size, before = lambda group: (rank, ranks), exchange.rank_and_world_size
    try:
        return (
            exchange.all_to_all_tokens(x, None, cuts)
            if kind == "all_to_all_tokens"
            else getattr(exchange, kind)(x, None)
        )
    finally:
        exchange.rank_and_world_size = before


def expected(kind: str, every: list[torch.Tensor], rank: int, cuts: list[slice]) -> torch.Tensor:
    width = every[0].shape[1] // len(every)
    return {
        "all_gather_rows": lambda: torch.stack(every),
        "all_gather_columns": lambda: torch.cat(every, 1),
        "all_to_all_tokens": lambda: torch.cat([x[cuts[rank]] for x in every], 1),
        "reshard": lambda: torch.stack([x[:, rank * width : (rank + 1) * width] for x in every]),
    }[kind]()


LAID = {  # how x lies in memory
    "by rows": lambda x: x.clone(),
    "wider": lambda x: torch.nn.functional.pad(x, (1, 2))[:, 1:-2],
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: torch.stack([x, x], 2).flatten(1)[:, ::2],
    "one row": lambda x: x[:1].clone().expand(len(x), -1),
}


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["all_gather_rows", "all_gather_columns", "all_to_all_tokens", "reshard"]),
    ranks=st.sampled_from([2, 3, 4, 8]),
    rows=st.sampled_from([0, 1, 3, 16, 40]),
    width=st.integers(1, 5),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    laid=st.sampled_from(sorted(LAID)),
    ends=st.lists(st.integers(0, 40), min_size=7, max_size=7),
)
def test_every_move_arrives_and_nothing_else_is_written(kind, ranks, rows, width, dtype, laid, ends):
    group, g = ranks_of(ranks), torch.Generator().manual_seed(rows + width)
    at = [0, *sorted(min(end, rows) for end in ends[: ranks - 1]), rows]
    cuts = [slice(*pair) for pair in zip(at, at[1:])]
    for _ in range(SLOTS + 1):  # each slot, and the first again
        every = [LAID[laid](torch.randn(rows, ranks * width, generator=g).to(dtype)) for _ in range(ranks)]
        moves = [[moved(kind, x, r, ranks, cuts)] * 2 for r, x in enumerate(every)]
        due = [p.exchange(of) for p, of in zip(group, moves)]
        for rank, wait in enumerate(due):
            assert all(came.equal(expected(kind, every, rank, cuts)) for came in wait())


def test_two_rounds_may_be_due_and_what_nobody_can_wait_for_is_not():
    group, x = ranks_of(2), torch.randn(4, 4)
    p = group[0]
    move = [moved("all_gather_rows", x, 0, 2, [])]
    for _ in range(4):  # each is lost, as by an error before somebody waits
        p.exchange(move)
    first, second = p.exchange(move), p.exchange(move)
    with pytest.raises(RuntimeError, match="^Peers: exchange was called with 2 rounds due, expected at most 1$"):
        p.exchange(move)
    first()
    third = p.exchange(move)
    assert len(second()) == len(third()) == 1 and not p.due


def test_a_round_is_planned_once_for_its_shapes_and_slot():
    group = ranks_of(2)
    p = group[0]
    for step in range(2 * SLOTS):
        p.exchange([moved("all_gather_rows", torch.full((4, 4), float(step)), 0, 2, [])])()
    assert len(p.plans) == SLOTS


def test_an_error_of_the_runtime_is_raised(monkeypatch):
    group = ranks_of(2)
    p = group[0]
    monkeypatch.setattr(Runtime, "cudaMemcpyAsync", lambda *args: 700)
    with pytest.raises(RuntimeError, match="^Peers: the CUDA runtime returned 700$"):
        p.exchange([moved("all_gather_rows", torch.randn(4, 4), 0, 2, [])])
