"""Holds what attention's kernels for sm_90 have in common: their ring of copies, and what a tile is of."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bi_kernels.checks import ensure_cuda_context

BLOCK = 64  # rows that one copy brings
STAGES, REGISTERS = 4, 240  # blocks in the ring; of a thread that computes
PAUSE = 0  # nanoseconds by which some copies are late: whoever waits too little for them reads other numbers then


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def uniform(x):
    """Returns x, in a way that shows ptxas that it is the same for a warp: else what follows from it spills."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def pause(turn, PAUSE: gl.constexpr):
    """Sleeps for PAUSE nanoseconds where `turn` is odd."""
    if PAUSE > 0:
        gl.inline_asm_elementwise("nanosleep.u32 $1; mov.b32 $0, $1;", "=r,r", [turn % 2 * PAUSE], gl.int32, False, 1)


@gluon.jit
def sequence_of(tile, lengths, sequences, SIZE: gl.constexpr, COUNT: gl.constexpr):
    """Returns the first two of what `schedule.sequence_of` does, of rows one by one."""
    i = gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    ends = gl.associative_scan(gl.cdiv(gl.load(lengths + i, mask=i < sequences, other=0), SIZE), 0, _plus)
    before = gl.max(gl.where(ends <= tile, ends, 0), 0)
    return gl.sum((ends <= tile).to(gl.int32), 0), before


@gluon.jit
def places(
    base, row0, head, queries, layout: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr
):
    """Returns (where in q's rows of D the rows are, whether they are)."""
    row = row0 + gl.arange(0, ROWS, layout)
    return (base + row // GROUP) * (HEADS * GROUP) + head * GROUP + row % GROUP, row // GROUP < queries


@gluon.jit
def key_tile(where, SIZE: gl.constexpr, COUNT: gl.constexpr, BLOCK: gl.constexpr, CAUSAL: gl.constexpr):
    """Returns (first row of q's tokens, of k, first key, queries, keys, first block of queries that sees some, how many
    blocks do)."""
    first_q, length_q, first_k, length_k, sequences = where
    sequence, before = sequence_of(gl.program_id(0), length_k, sequences, SIZE, COUNT)
    known = sequence < sequences
    queries, length = (
        gl.load(length_q + sequence, mask=known, other=0),
        gl.load(length_k + sequence, mask=known, other=0),
    )
    base = gl.load(first_q + sequence, mask=known, other=0)
    row_k = gl.load(first_k + sequence, mask=known, other=0)
    key = (gl.program_id(0) - before) * SIZE
    begin = 0
    if CAUSAL:
        begin = gl.maximum(key + queries - length, 0) // BLOCK * BLOCK
    blocks = gl.cdiv(gl.maximum(queries - begin, 0), BLOCK)
    return (
        uniform(base),
        uniform(row_k),
        uniform(key),
        uniform(queries),
        uniform(length),
        uniform(begin),
        uniform(blocks),
    )


@gluon.jit
def place(i, STAGES: gl.constexpr):
    """Returns where in a ring copy i lies; it is no negative number, which Triton does not know."""
    return (i.to(gl.uint32) % STAGES).to(gl.int32)


@gluon.jit
def wait(bar, i, needed=True):
    """Waits for copy i into a ring, or for the place that it left, if `needed`."""
    STAGES: gl.constexpr = bar.shape[0]
    parity = (i.to(gl.uint32) // STAGES & 1).to(gl.int32)
    mbarrier.wait(bar.index(place(i, STAGES)), parity, pred=needed)


@gluon.jit
def release(bar, i):
    """Says that one group of warps is done with copy i."""
    STAGES: gl.constexpr = bar.shape[0]
    mbarrier.arrive(bar.index(place(i, STAGES)))


@gluon.jit
def scores(qt, ks, i, S: gl.constexpr):
    """Starts q kᵀ of block i."""
    STAGES: gl.constexpr = ks.shape[0]
    ROWS: gl.constexpr = qt.shape[0]
    BLOCK: gl.constexpr = ks.shape[1]
    none = gl.zeros([ROWS, BLOCK], gl.float32, S)
    return warpgroup_mma(qt, ks.index(place(i, STAGES)).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def capped(s, steep):
    """Returns what `schedule.capped` does; without a cap, None, s itself."""
    if steep is not None:
        y = 1.0 + gl.exp2(s * steep)
        s = gl.fma(gl.rsqrt(y * y), -2.0, 1.0)
    return s


@gluon.jit
def sloped(p, s, steep):
    """Returns probabilities times the slope of a cap, of the scores that `capped` returned."""
    if steep is not None:
        p = p * (1.0 - s * s)
    return p


@gluon.jit
def over(x, acc):
    """Returns a value per row, as a column beside acc."""
    return gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def operand(p, acc, dtype: gl.constexpr):
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


def descriptor(t: torch.Tensor) -> TensorDescriptor:
    """Returns blocks of 64 rows of one head, of t (rows, heads, D)."""
    rows, heads, width = t.shape
    dtype = gl.bfloat16 if t.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(
        ensure_cuda_context(t),
        [rows, heads * width],
        [t.stride(0), 1],
        [BLOCK, width],
        gl.NVMMASharedLayout.get_default_for([BLOCK, width], dtype),
    )
