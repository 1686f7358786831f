"""Deals tiles of queries to the programs of a persistent kernel for sm_90, and brings their K and V.

Sequences come in bands whose keys and values the L2 cache holds, and in a band the tiles by how many keys they see: the
most first in the last band, and one way and the other in turn before, so that what runs together takes as long. A
kernel of its own writes that order down, since to find one tile's place takes as long as to compute a short one. A
program's producer runs ahead into the next tile, and tells the groups of warps that compute what the tile is of.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from bi_kernels.ops.attention.hopper.common import _plus, pause, places, uniform

WORDS = 8  # that are told of a tile
BAND = gl.constexpr(256)  # tiles of a band of MHA: 32,768 keys and values, 16 MiB of width 128 in 16 bits


@gluon.jit
def _sequences(where, GROUP: gl.constexpr, SIZE: gl.constexpr, COUNT: gl.constexpr, CAUSAL: gl.constexpr):
    """Returns (rank of its first tile, tiles) of each sequence; a tile's rank grows with the keys that it sees."""
    first_q, length_q, first_k, length_k, sequences = where
    lanes: gl.constexpr = 32 if COUNT <= 128 else 32 * gl.num_warps()  # few: lest warps ask each other
    each: gl.constexpr = COUNT // lanes if lanes < COUNT else 1
    i = gl.arange(0, COUNT, gl.BlockedLayout([each], [32], [gl.num_warps()], [0]))
    queries = gl.load(length_q + i, mask=i < sequences, other=0)
    length = gl.load(length_k + i, mask=i < sequences, other=0)
    return _rank(queries, length, GROUP, SIZE, CAUSAL), gl.cdiv(queries * GROUP, SIZE)


@gluon.jit
def _bands(where, tiles, GROUP: gl.constexpr, HEADS: gl.constexpr, SIZE: gl.constexpr, COUNT: gl.constexpr):
    """Returns (tiles up to its end, number of its band) of each sequence, in the order of the sequences."""
    first_q, length_q, first_k, length_k, sequences = where
    lanes: gl.constexpr = 32 if COUNT <= 128 else 32 * gl.num_warps()
    each: gl.constexpr = COUNT // lanes if lanes < COUNT else 1
    i = gl.arange(0, COUNT, gl.BlockedLayout([each], [32], [gl.num_warps()], [0]))
    before = gl.load(length_q + i - 1, mask=(i > 0) & (i <= sequences), other=0)
    ends = gl.associative_scan(tiles, 0, _plus)
    starts = ends - tiles
    earlier = starts - gl.cdiv(before * GROUP, SIZE)
    opens = starts * HEADS // (BAND * GROUP) > earlier * HEADS // (BAND * GROUP)
    return ends, gl.associative_scan(opens.to(gl.int32), 0, _plus)


@gluon.jit
def _rank(queries, length, GROUP: gl.constexpr, SIZE: gl.constexpr, CAUSAL: gl.constexpr):
    before = length - queries if CAUSAL else length
    return (gl.maximum(before, 0).to(gl.int64) * GROUP // SIZE).to(gl.int32)


@gluon.jit
def _above(rank, first, tiles, CAUSAL: gl.constexpr):
    """Returns how many tiles of each sequence have at least this rank."""
    if CAUSAL:
        return gl.minimum(gl.maximum(first + tiles - rank, 0), tiles)
    return gl.where(first >= rank, tiles, 0)


@gluon.jit
def items_of(where, GROUP: gl.constexpr, HEADS: gl.constexpr, SIZE: gl.constexpr, COUNT: gl.constexpr):
    """Returns how many tiles there are, times heads."""
    first, tiles = _sequences(where, GROUP, SIZE, COUNT, False)
    return uniform(gl.sum(tiles, 0)) * HEADS


@gluon.jit
def _dealt(item, items):
    """Returns which item a program takes in this one's place: every other round is dealt backwards, so that each gets
    as much."""
    programs = gl.num_programs(0)
    turn = item // programs
    back = (turn % 2 > 0) & (turn < items // programs)
    return gl.where(back, (2 * turn + 1) * programs - 1 - item, item)


@gluon.jit
def _nth(n, seen, bands, where, GROUP: gl.constexpr, SIZE: gl.constexpr, BLOCK: gl.constexpr, CAUSAL: gl.constexpr):
    """Returns what the nth tile is, band by band, those of the highest rank first or last: first row of q's tokens, of
    the tile, queries, keys, keys up to the first that not all see, keys up to the last that some see, first row of
    k."""
    first_q, length_q, first_k, length_k, sequences = where
    first, tiles = seen
    ends, band = bands
    own = gl.min(gl.where(ends > n, band, 0x7FFFFFFF), 0)
    back = (gl.max(gl.where(tiles > 0, band, 0), 0) - own) % 2 > 0
    n -= gl.sum(gl.where(band < own, tiles, 0), 0)
    tiles = gl.where(band == own, tiles, 0)
    n = uniform(gl.where(back, gl.sum(tiles, 0) - 1 - n, n))
    rank, span = n * 0, uniform(gl.max(first + tiles, 0)) + 1  # it is one of so many from here on
    while span > 1:
        half = span // 2
        more = uniform(gl.sum(_above(rank + half, first, tiles, CAUSAL), 0)) > n
        rank = gl.where(more, rank + half, rank)
        span -= half
    above = _above(rank + 1, first, tiles, CAUSAL)
    n -= gl.sum(above, 0)
    ends = gl.associative_scan(_above(rank, first, tiles, CAUSAL) - above, 0, _plus)
    sequence = gl.sum((ends <= n).to(gl.int32), 0)
    known = sequence < sequences
    queries, length = (
        gl.load(length_q + sequence, mask=known, other=0),
        gl.load(length_k + sequence, mask=known, other=0),
    )
    base = gl.load(first_q + sequence, mask=known, other=0)
    row_k = gl.load(first_k + sequence, mask=known, other=0)
    if CAUSAL:
        tile = rank - _rank(queries, length, GROUP, SIZE, CAUSAL)
    else:
        tile = n - gl.max(gl.where(ends <= n, ends, 0), 0)
    first_seen = tile * SIZE // GROUP + length - queries  # positions of the tile's first and last query
    last_seen = gl.minimum(tile * SIZE + SIZE - 1, queries * GROUP - 1) // GROUP + length - queries
    end, whole = length, length // BLOCK * BLOCK
    if CAUSAL:
        end = gl.minimum(end, last_seen + 1)
        whole = gl.minimum(whole, (first_seen + 1) // BLOCK * BLOCK)
    return base, tile * SIZE, queries, length, whole, gl.maximum(end, 0), row_k


@gluon.jit(do_not_specialize=["sequences"])
def _order_kernel(
    table,
    first_q,
    length_q,
    first_k,
    length_k,
    sequences,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    BLOCK: gl.constexpr,
    COUNT: gl.constexpr,
    CAUSAL: gl.constexpr,
    WORDS: gl.constexpr,
):
    where, n = (first_q, length_q, first_k, length_k, sequences), gl.program_id(0)
    seen = _sequences(where, GROUP, SIZE, COUNT, CAUSAL)
    if n < uniform(gl.sum(seen[1], 0)):
        bands = _bands(where, seen[1], GROUP, HEADS, SIZE, COUNT)
        words = _nth(n, seen, bands, where, GROUP, SIZE, BLOCK, CAUSAL)
        for j in gl.static_range(7):
            gl.store(table + n * WORDS + j, words[j])


def order(
    where: tuple[Tensor, ...], tiles: int, room: int, group: int, heads: int, size: int, block: int, causal: bool
) -> Tensor:
    """Returns what each tile is, (tiles, WORDS) int32, in the order in which they are dealt; see `prefill`."""
    table = where[0].new_empty(tiles, WORDS, dtype=torch.int32)
    _order_kernel[(tiles,)](
        table,
        *where,
        len(where[0]),
        GROUP=group,
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
        COUNT=room,
        CAUSAL=causal,
        WORDS=WORDS,
        num_warps=1,
    )
    return table


@gluon.jit
def _tile(table, item, items, HEADS: gl.constexpr, WORDS: gl.constexpr):
    """Returns what `tile_of` does of an item, and the first row of k; of the last one, where there is no such item."""
    dealt = _dealt(gl.minimum(item, items - 1), items)
    at = table + dealt // HEADS * WORDS
    base, row0, queries, length = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    return (base, row0, dealt % HEADS, queries, length, gl.load(at + 4), gl.load(at + 5)), gl.load(at + 6)


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """Returns those of K's and V's copies and of their places, and of what is told and its place."""
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(free.index(i), 2)
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), 1 + i)
    fence_async_shared()
    return k_full, v_full, free, told


@gluon.jit
def _tell(info, told, turn, words):
    """Tells both groups of warps what the program's tile of this turn is."""
    WORDS: gl.constexpr = info.shape[0]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(told.index(1), turn - 1 & 1, pred=turn > 0)
    for j in gl.static_range(WORDS):
        info.index(j).store(gl.full([1], 0, gl.int32, ONE) + words[j])
    mbarrier.arrive(told.index(0))


@gluon.jit
def _word(info, j: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return uniform(gl.max(info.index(j).load(ONE), 0))


@gluon.jit
def tile_of(info, told, turn, there):
    """Returns what `_nth` does, without k's row, and how many blocks of keys were before; something else if not
    `there`."""
    mbarrier.wait(told.index(0), turn & 1, pred=there)
    base, row0, head, queries = _word(info, 0), _word(info, 1), _word(info, 2), _word(info, 3)
    length, whole, end, before = _word(info, 4), _word(info, 5), _word(info, 6), _word(info, 7)
    mbarrier.arrive(told.index(1), pred=there)
    return base, row0, head, queries, length, whole, end, before


@gluon.jit
def fetch(x, xt, tile, there, ROWS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, ME: gl.constexpr):
    """Starts to copy the rows of a group of warps, of x (tokens, heads, D)."""
    base, row0, head, queries, length, whole, end, before = tile
    D: gl.constexpr = xt.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    row0 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [row0], gl.int32, False, 1)  # lest offsets stay alive
    row0 += ME * ROWS
    at, inside = places(base.to(gl.int64), row0, head, queries, gl.SliceLayout(1, WIDE), ROWS, GROUP, HEADS)
    at = at[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
    async_copy.async_copy_global_to_shared(xt, x + at, mask=(inside & there)[:, None])


@gluon.jit
def _prefetch(x, tile, SIZE: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr):
    """Asks for a tile's rows of x (tokens, heads, D) to be in L2, line by line."""
    base, row0, head, queries, length, whole, end = tile
    LINES: gl.constexpr = D // 64
    line = gl.arange(0, SIZE * LINES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    row = row0 + line // LINES
    at = (base.to(gl.int64) + row // GROUP) * (HEADS * GROUP) + head * GROUP + row % GROUP
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, $2; }",
        "=r,l,r",
        [x + (at * D + line % LINES * 64), (row // GROUP < queries).to(gl.int32)],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def produce(
    q,
    k_tma,
    v_tma,
    ks,
    vs,
    bars,
    info,
    table,
    where,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    COUNT: gl.constexpr,
    PAUSE: gl.constexpr,
):
    """Copies K and V, tile after tile and block after block, into the ring, and has q's rows brought nearer."""
    k_full, v_full, free, told = bars
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK: gl.constexpr = ks.shape[1]
    D: gl.constexpr = ks.shape[2]
    WORDS: gl.constexpr = info.shape[0]
    items = items_of(where, GROUP, HEADS, SIZE, COUNT)
    i = 0
    following = _tile(table, gl.program_id(0), gl.maximum(items, 1), HEADS, WORDS)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, row_k = following
        base, row0, head, queries, length, whole, end = tile
        _tell(info, told, item // gl.num_programs(0), (base, row0, head, queries, length, whole, end, i))
        following = _tile(table, item + gl.num_programs(0), items, HEADS, WORDS)
        row, column = uniform(row_k), uniform(head) * D
        if q is not None:
            _prefetch(q, tile, SIZE, GROUP, HEADS, D)
        for block in range(uniform(gl.cdiv(end, BLOCK))):
            at = [row + block * BLOCK, column]
            mbarrier.wait(free.index(i % STAGES), i // STAGES - 1 & 1, pred=i >= STAGES)
            pause(i // 2 + 1, PAUSE)
            mbarrier.expect(k_full.index(i % STAGES), k_tma.block_type.nbytes)
            tma.async_copy_global_to_shared(k_tma, at, k_full.index(i % STAGES), ks.index(i % STAGES))
            pause(i, PAUSE)
            mbarrier.expect(v_full.index(i % STAGES), v_tma.block_type.nbytes)
            tma.async_copy_global_to_shared(v_tma, at, v_full.index(i % STAGES), vs.index(i % STAGES))
            i += 1
