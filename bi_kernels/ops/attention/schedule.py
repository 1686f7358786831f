"""Holds what attention's launchers are told, forward and backward: a schedule, and where a call's sequences lie."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bi_kernels.checks import is_hopper  # (checks mends the interpreter before a kernel is defined)

LOG2E = math.log2(math.e)


class Tiling(NamedTuple):
    """Names a launch configuration, free of any bit: its warps lie along the rows, so a row's sum keeps its order."""

    rows: int  # queries
    columns: int  # keys
    warps: int
    stages: int


class SplitDecodeConfig(NamedTuple):
    """Says when decode's steps are computed apart (decode_kernels.py), and how: free of any bit."""

    programs: int = 64  # splits of sequences and key heads: where there are more, each is a program of its own
    rows: int = 16  # of a sequence and key head, on average, at most
    run: int = 256  # keys whose scores a program computes
    scores: Tiling = Tiling(16, 128, 4, 3)
    values: Tiling = Tiling(16, 32, 4, 4)  # columns of v
    together: int = 4  # blocks of a round of its loop
    interpreted: int = 96  # rows of q at most on the interpreter, where each is a program of some milliseconds


@dataclass(frozen=True, eq=False)  # by identity: a launch looks one up
class SumOrder:
    """Says where the sums are cut: the summation order, which is what the bits follow from."""

    block: int = 64  # keys; sm_90's kernels know no other
    split: int = 4096  # keys


@dataclass(frozen=True, eq=False)
class Schedule(SumOrder):
    """Says besides which program computes what: nothing of that changes a bit."""

    prefill: Tiling = Tiling(128, 64, 8, 3)
    decode: Tiling = Tiling(64, 64, 4, 4)
    decode_tma: int = 64  # programs beyond which it copies keys that lie in whole blocks, on sm_90
    many_decode: Tiling = Tiling(64, 64, 4, 2)  # so, of heads of 128, where two programs share a multiprocessor
    wide_prefill: Tiling = Tiling(128, 64, 8, 2)  # of heads wider than 128: shared memory
    wide_decode: Tiling = Tiling(64, 64, 4, 2)
    keys: Tiling = Tiling(64, 128, 8, 3)  # dK and dV
    queries: Tiling = Tiling(128, 64, 8, 3)  # dQ
    wide_backward: Tiling = Tiling(64, 64, 8, 2)
    fp32: Tiling = Tiling(32, 32, 4, 2)
    apart: SplitDecodeConfig = SplitDecodeConfig()
    merge_rows: int = 16
    few: int = 256  # tiles below which each split is a program of its own
    most: int = 4096  # programs of such a launch
    hopper: bool = True  # sm_90's kernels, where q, k and v fit


SCHEDULE = Schedule()
_in_use: ContextVar[Schedule] = ContextVar("attention's schedule", default=SCHEDULE)


def current_schedule() -> Schedule:
    """Returns the schedule that attention is computed in now."""
    return _in_use.get()


@contextmanager
def using(schedule: Schedule) -> Iterator[None]:
    """Computes attention in a schedule; a backward has that of its forward."""
    token = _in_use.set(schedule)
    try:
        yield
    finally:
        _in_use.reset(token)


class Batch(NamedTuple):
    """Says how many sequences have a row of a batch each, and what the rows have room for."""

    count: int
    width_q: int | None  # None: queries are packed, keys in pages
    width_k: int
    left: bool  # sequences lie at the end of their rows


class Sequences(NamedTuple):
    """Says where the sequences of a call lie; tensors are int32, and those of first rows and lengths (sequences,).

    In a `batch`, first rows are None, and so are lengths of whole rows; they are integers of any kind, and what exceeds
    a row does not count.
    """

    first_q: Tensor | None
    length_q: Tensor | None
    first_k: Tensor | None
    length_k: Tensor | None
    pages: Tensor | None  # (sequences, pages of the longest): k's pages
    page: int  # keys of a page, or 0
    longest: int  # keys that a sequence has at most
    full_q: bool  # every row of q is of some sequence
    full_k: bool
    batch: Batch | None = None


@triton.jit
def length_of(lengths, i, inside, width):
    """Returns how many queries or keys sequence i has, in a batch whose rows have room for `width`, or with None there
    of packed ones."""
    if lengths is None:
        length = tl.where(inside, width, 0)
    else:
        length = tl.load(lengths + i, mask=inside, other=0)
        if width is not None:
            length = tl.minimum(tl.maximum(length.to(tl.int64), 0), width).to(tl.int32)
    return length


@triton.jit
def sequence_of(tile, lengths, sequences, ROWS: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr, width=None):
    """Returns (sequence, its first tile, its last tile) of a tile, where tiles hold SIZE rows and a token has ROWS;
    sequence COUNT for a tile of none."""
    i = tl.arange(0, COUNT)
    ends = tl.cumsum(tl.cdiv(length_of(lengths, i, i < sequences, width) * ROWS, SIZE), 0)
    before = tl.max(tl.where(ends <= tile, ends, 0), 0)
    after = tl.min(tl.where(ends > tile, ends, tl.maximum(tl.max(ends, 0), tile + 1)), 0)
    return tl.sum((ends <= tile).to(tl.int32), 0), before, after - 1


@triton.jit
def first_row(first, i, inside, length, width, LEFT: tl.constexpr):
    """Returns the row of the first query or key of sequence i, of so many, where `length_of` finds them."""
    if width is None:
        row = tl.load(first + i, mask=inside, other=0).to(tl.int64)
    else:
        row = i.to(tl.int64) * width + (width - length if LEFT else 0)
    return row


@triton.jit
def seen(key, position, length, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Returns whether the query at `position` sees `key`. WINDOW: 1 for a window, 2 for chunks, of so many keys."""
    visible = (key < length)[None, :]
    if CAUSAL:
        visible &= key[None, :] <= position[:, None]
    if WINDOW == 2:
        visible &= key[None, :] >= position[:, None] // window * window
    elif WINDOW:
        visible &= key[None, :] > position[:, None] - window
    return visible


@triton.jit
def capped(score, steep):
    """Returns tanh(x) with exp2(score · steep) = exp(2x), whose absolute error counts: a cap multiplies it."""
    y = 1.0 + tl.math.exp2(score * steep)
    return tl.fma(tl.math.rsqrt(y * y), -2.0, 1.0)  # 1 − 2 / y in half the instructions of a quotient; y is 1 or more


def round_up_sequences(sequences: int) -> int:
    """Returns how many sequences a kernel looks through: 32, 128 or a larger power of two, so that few variants of it
    are compiled."""
    return 32 if sequences <= 32 else max(128, triton.next_power_of_2(sequences))


def max_tiles(tokens: int, sequences: int, rows: int) -> int:
    """Returns at least as many tiles as there are, however `tokens` are spread over the sequences."""
    return tokens // rows + min(sequences, tokens)


def scales(scale: float, soft_cap: float) -> tuple[float, float | None]:
    """Returns what exp2 multiplies the scores by, or their tanh with a cap, and `steep` of `capped`: None without."""
    return (soft_cap * LOG2E, 2 * LOG2E * scale / soft_cap) if soft_cap else (scale * LOG2E, None)


def shape_of(q: torch.Size, k: torch.Size, strides_k: tuple[int, ...], strides_v: tuple[int, ...], wide: int) -> dict:
    """Returns the kernels' arguments that follow from the shapes of q and k (…, heads, D), from strides, and from v's
    width."""
    width, group = q[-1], q[-2] // k[-2]
    block, block_v = (max(16, triton.next_power_of_2(n)) for n in (width, wide))
    return {
        "stride_k": strides_k[-3],
        "stride_v": strides_v[-3],
        "head_k": strides_k[-2],
        "head_v": strides_v[-2],
        "width": width,
        "GROUP": group,
        "HEADS": k[-2],
        "D": block,
        "EVEN": block == width,
        "width_v": None if wide == width else wide,
        "DV": block_v,
        "EVEN_V": block_v == wide,
        "enable_fp_fusion": False,
    }


def tma_ready(t: Tensor) -> bool:
    """Returns whether a TMA descriptor can name blocks of t (rows, heads, D)."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(1) == t.shape[2]


def fits_hopper(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether the kernels for sm_90 can take q, k and v."""
    return (
        q.dtype != torch.float32
        and q.shape[-1] in (64, 128)
        and v.shape[-1] == q.shape[-1]
        and q.data_ptr() % 16 == 0
        and tma_ready(k)
        and tma_ready(v)
        and is_hopper(q.device)
    )
