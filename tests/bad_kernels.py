"""Kernels and launchers that the static audit must flag, each beside a twin that it must pass."""

import functools

import torch
import triton
import triton.language as q
import triton.language as tl
from triton.language import atomic_add as plus
from triton.runtime.autotuner import Autotuner as Choice

BLOCK = 128


# Atomics; every kernel takes (x, y) and sums x into y[0].
@triton.jit
def atomic(x, y, BLOCK: tl.constexpr):
    tl.atomic_add(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


@triton.jit
def aliased(x, y, BLOCK: tl.constexpr):
    plus(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


@triton.jit
def another_module(x, y, BLOCK: tl.constexpr):
    q.atomic_max(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


@triton.jit
def _finish(y, total):
    plus(y, total)


@triton.jit
def in_a_helper(x, y, BLOCK: tl.constexpr):
    _finish(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


@triton.jit
def inline_red(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    zero = tl.inline_asm_elementwise(
        "{ red.global.add.f32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,f",
        [(y + 0 * at).to(tl.int64), tl.load(x + at)],
        tl.int32,
        False,
        1,
    )
    tl.store(y + 1 + at, zero.to(tl.float32))


RED_SHARED = tl.constexpr("{ .shared .b32 cell; atom.shared.add.u32 $0, [cell], $1; }")


@triton.jit
def inline_shared(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    old = tl.inline_asm_elementwise(RED_SHARED, "=r,r", [tl.load(x + at).to(tl.int32)], tl.int32, False, 1)
    tl.store(y + at, old.to(tl.float32))


@triton.jit
def histogram(x, y, BLOCK: tl.constexpr):  # becomes atom.shared
    count = tl.histogram(tl.load(x + tl.arange(0, BLOCK)).to(tl.int32), 16)
    tl.store(y + tl.arange(0, 16), count.to(tl.float32))


@triton.jit
def descriptor(x, y, BLOCK: tl.constexpr):  # becomes cp.reduce.async.bulk
    to = tl.make_tensor_descriptor(y, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    at = tl.arange(0, BLOCK)
    to.atomic_add([0, 0], tl.load(x + at[:, None] * BLOCK + at[None, :]))


@triton.jit
def published(x, y, BLOCK: tl.constexpr):
    """A descriptor made on the device: its publication is an ATOMG.EXCH in SASS, and adds nothing."""
    to = tl.make_tensor_descriptor(y, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    at = tl.arange(0, BLOCK)
    to.store([0, 0], tl.load(x + at[:, None] * BLOCK + at[None, :]))


@triton.jit
def in_registers(x, y, BLOCK: tl.constexpr):
    """redux.sync and bar.red: reductions, but not to memory."""
    at = tl.arange(0, BLOCK)
    whole = tl.load(x + at).to(tl.int32)
    warp = tl.inline_asm_elementwise("redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", [whole], tl.int32, False, 1)
    block = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; bar.red.popc.u32 $0, 1, p; }", "=r,r", [whole], tl.int32, False, 1
    )
    tl.store(y + at, (warp + block + tl.max(whole, 0)).to(tl.float32))


@triton.jit
def atomic_named(x, y, BLOCK: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


@triton.jit
def atomic_in_name_alone(x, y, BLOCK: tl.constexpr):
    atomic_named(x, y, BLOCK)


# Configurations chosen at run time
@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def autotuned(x, y, n, BLOCK: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


@triton.heuristics({"BLOCK": lambda args: 64 if args["n"] < 1000 else 128})
@triton.jit
def heuristic(x, y, n, BLOCK: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


def launch_autotuned(x, y):
    autotuned[(1,)](x, y, len(x))


def tunes_when_called(x, y):
    Choice(atomic_named, ["x"], [], ["x"], None, None)[(1,)](x, y)


# dweight: every program sums rows of x (M, N) into its row of partial.
@triton.jit
def grid_stride(x, partial, M, N: tl.constexpr):
    total = tl.zeros((N,), dtype=tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        total += tl.load(x + row * N + tl.arange(0, N))
    tl.store(partial + tl.program_id(0) * N + tl.arange(0, N), total)


@triton.jit
def _sum_rows(x, first, M, step, N: tl.constexpr):
    total = tl.zeros((N,), dtype=tl.float32)
    for row in range(first, M, step):
        total = total + tl.load(x + row * N + tl.arange(0, N))
    return total


@triton.jit
def grid_stride_in_a_helper(x, partial, M, N: tl.constexpr):
    step = tl.num_programs(0)
    tl.store(partial + tl.program_id(0) * N + tl.arange(0, N), _sum_rows(x, tl.program_id(0), M, step, N))


@triton.jit
def grid_stride_while(x, partial, M, N: tl.constexpr):
    total = tl.zeros((N,), dtype=tl.float32)
    row = tl.program_id(0)
    while row < M:
        total += tl.load(x + row * N + tl.arange(0, N))
        row += tl.num_programs(0)
    tl.store(partial + tl.program_id(0) * N + tl.arange(0, N), total)


@triton.jit
def grid_stride_counted(x, partial, M, N: tl.constexpr):
    total = tl.zeros((N,), dtype=tl.float32)
    row = tl.program_id(0)
    for _ in range(tl.cdiv(M, tl.num_programs(0))):
        own = tl.load(x + row * N + tl.arange(0, N), mask=row < M, other=0.0)
        both = total + own
        total = both
        row += tl.num_programs(0)
    tl.store(partial + tl.program_id(0) * N + tl.arange(0, N), total)


@triton.jit
def grid_stride_sometimes_reset(x, partial, M, N: tl.constexpr):
    total = tl.zeros((N,), dtype=tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        if row == tl.program_id(0):
            total = tl.zeros((N,), dtype=tl.float32)
        total += tl.load(x + row * N + tl.arange(0, N))
    tl.store(partial + tl.program_id(0) * N + tl.arange(0, N), total)


@triton.jit
def fixed_slabs(x, partial, M, N: tl.constexpr, SLAB: tl.constexpr):
    total = tl.zeros((N,), dtype=tl.float32)
    first = tl.program_id(0) * SLAB
    for row in range(first, tl.minimum(first + SLAB, M)):
        total += tl.load(x + row * N + tl.arange(0, N))
    tl.store(partial + tl.program_id(0) * N + tl.arange(0, N), total)


@triton.jit
def persistent(x, out, M, N: tl.constexpr, SLAB: tl.constexpr):
    """Programs share the slabs out among themselves, but each slab's sum starts anew: no order depends on the grid."""
    for slab in range(tl.program_id(0), tl.cdiv(M, SLAB), tl.num_programs(0)):
        total = tl.zeros((N,), dtype=tl.float32)
        for row in range(slab * SLAB, slab * SLAB + SLAB):
            total += tl.load(x + row * N + tl.arange(0, N), mask=row < M, other=0.0)
        tl.store(out + slab * N + tl.arange(0, N), total)


@triton.jit
def part_of_rows(x, partial, M, rows_per_program, N: tl.constexpr):
    total = tl.zeros((N,), dtype=tl.float32)
    first = tl.program_id(0) * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, M)):
        total += tl.load(x + row * N + tl.arange(0, N))
    tl.store(partial + tl.program_id(0) * N + tl.arange(0, N), total)


@triton.jit
def fold(partial, out, slabs, N: tl.constexpr):
    total = tl.zeros((N,), dtype=tl.float32)
    for slab in range(slabs):
        total += tl.load(partial + slab * N + tl.arange(0, N))
    tl.store(out + tl.arange(0, N), total)


@functools.cache
def _processors():
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def dweight_by_multiprocessors(x):
    programs = _processors()
    partial = x.new_empty(programs, x.shape[1])
    part_of_rows[(programs,)](x, partial, x.shape[0], triton.cdiv(x.shape[0], programs), N=x.shape[1])
    return partial.sum(0)


def dweight_by_some_multiprocessors(x):
    programs = 64
    programs = min(programs, _processors())
    programs -= programs % 2
    part_of_rows[(programs,)](x, x, x.shape[0], -(-x.shape[0] // programs), N=x.shape[1])


def _ceil(a, b):
    return -(-a // b)


def dweight_by_rows(x):
    M, N = x.shape
    partial = x.new_empty(8, N)
    part_of_rows[(8,)](x, partial, M, triton.cdiv(M, 8), N=N)
    return partial.sum(0)


def dweight_by_slabs(x):
    (M, N), rows_per_program = x.shape, 16
    partial = x.new_empty(_ceil(M, 16), N)
    part_of_rows[(_ceil(M, 16),)](x, partial, M, rows_per_program, N=N)
    total = x.new_empty(N)
    fold[(1,)](partial, total, _ceil(M, 16), N=N)
    return total, _ceil(1000, M)  # what one call of a helper divides by says nothing about another


# Split-K of x (M, K) w (K, N), partial products into y (splits, M, N)
@triton.jit
def split_k(
    x, w, y, M, N, K, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    m, n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(tl.cdiv(K, BLOCK_K * SPLIT_K)):
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(w + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
        k += BLOCK_K * SPLIT_K
    at = tl.program_id(2) * M * N + m[:, None] * N + n[None, :]
    tl.store(y + at, acc, mask=(m < M)[:, None] & (n < N)[None, :])


def _blocks(rows):
    return 16 if rows <= 16 else 64


def _product(x, w, splits, block_k=64):
    (M, K), N = x.shape, w.shape[1]
    y, block = x.new_empty(splits, M, N, dtype=torch.float32), _blocks(M)
    split_k[(triton.cdiv(M, block), triton.cdiv(N, 64), splits)](
        x, w, y, M, N, K, SPLIT_K=splits, BLOCK_M=block, BLOCK_N=64, BLOCK_K=block_k
    )
    return y.sum(0)


def split_k_by_rows(x, w):
    if x.shape[0] <= 64:
        splits = 4
    else:
        splits = 1
    return _product(x, w, splits)


def split_k_by_a_table(x, w):
    return _product(x, w, next(splits for rows, splits in ((64, 4), (2**63, 1)) if len(x) <= rows))


def split_k_by_multiprocessors(x, w):
    properties = torch.cuda.get_device_properties(x.device)
    tiles = triton.cdiv(x.shape[0], 64) * triton.cdiv(w.shape[1], 64)
    return _product(x, w, splits=max(1, properties.multi_processor_count // tiles))


def _fixed_product(x, w, tile):
    (M, K), N = x.shape, w.shape[1]
    y = x.new_empty(4, M, N, dtype=torch.float32)
    split_k[(triton.cdiv(M, tile[0]), triton.cdiv(N, 64), 4)](
        x, w, y, M, N, K, SPLIT_K=4, BLOCK_M=tile[0], BLOCK_N=64, BLOCK_K=tile[1]
    )
    return y.sum(0)


def split_k_fixed(x, w):
    """Always in four, and the tile, by rows, changes no order in a chain of tl.dot."""
    return _fixed_product(x, w, (16, 128) if len(x) <= 16 else (64, 64))


# The same, of a block that is no chain of tl.dot: the block is the order.
@triton.jit
def row_sum(x, y, N, BLOCK: tl.constexpr):
    total = 0.0
    for first in range(0, N, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + tl.program_id(0) * N + at, mask=at < N, other=0.0), 0)
    tl.store(y + tl.program_id(0), total)


class other:
    @staticmethod
    def dot(a, b, acc):
        return acc + a * b


@triton.jit
def no_dot(x, y, N, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, N, BLOCK):
        a = tl.load(x + first + tl.arange(0, BLOCK))
        total = other.dot(a, a, total)
    tl.store(y, tl.sum(total, 0))


def no_dot_by_rows(x, y):
    no_dot[(1,)](x, y, x.shape[1], BLOCK=1024 if x.shape[0] < 256 else 256)


@triton.jit
def row_maximum(x, y, N, BLOCK: tl.constexpr):
    most = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, N, BLOCK):
        a = tl.load(x + tl.program_id(0) * N + first + tl.arange(0, BLOCK))
        most = tl.maximum(most, a)
        count += (a > 0).to(tl.int32)
    tl.store(y + tl.program_id(0), tl.max(most, 0) + tl.sum(count, 0))


def row_maximum_by_rows(x, y):  # in any order the same
    row_maximum[(x.shape[0],)](x, y, x.shape[1], BLOCK=1024 if x.shape[0] < 256 else 256)


def row_sum_by_rows(x, y):
    row_sum[(x.shape[0],)](x, y, x.shape[1], BLOCK=1024 if x.shape[0] < 256 else 256)


def row_sum_by_vocabulary(weight, y):
    """Fixed for a model: no rows of a batch, if the auditor says what `weight` is."""
    row_sum[(1,)](weight, y, weight.shape[1], BLOCK=min(1024, triton.next_power_of_2(len(weight))))


def row_sum_by_width(x, y):
    row_sum[(x.shape[0],)](x, y, x.shape[1], BLOCK=min(1024, triton.next_power_of_2(x.shape[1])))


# Scatters in torch
def index_add(x, at, y):
    return x.index_add_(0, at, y)


def scatter_add(x, at, y):
    return torch.scatter_add(x, 0, at, y)


def scatter_by_another_name(x, at, y):
    add = torch.Tensor.index_add_
    return add(x, 0, at, y)


def scatter_by_string(x, at, y):
    return x.scatter_add_(0, at, y)


def scatter_spelled_apart(x, at, y):  # only what is dispatched shows it
    return getattr(x, "_".join(("index", "add", "")))(0, at, y)


def index_put(x, at, y):
    return x.index_put_((at,), y, accumulate=True)


def put(x, at, y):
    return x.put_(at, y, True)


def weighted_bincount(x, at, y):
    return torch.bincount(at, weights=y)


def scatter_reduce(x, at, y):
    return x.scatter_(0, at, y, reduce="add")


def gather_backward(x, at, y):  # nor is this in any source
    x = x.clone().requires_grad_()
    x.gather(0, at).backward(y)
    return x.grad


def logprob_backward(x, at, y):  # one column of a row: no two meet
    x = x.view(2, 2).clone().requires_grad_()
    x.gather(1, at[:2, None]).sum().backward()
    return x.grad


def last_backward(x, at, y):  # a row each
    x = x.view(2, 2).clone().requires_grad_()
    x[torch.arange(2), at[:2]].sum().backward()
    return x.grad


def permutes(x, at, y):  # no index stands twice
    order = at.argsort()
    x = x.index_add_(0, order, y).scatter_add_(0, order, y).index_put_((order,), y, accumulate=True)
    x = x.index_put_((at > 0,), y[0], accumulate=True).put_(order, y, True).clone().requires_grad_()
    (x[order] + x.gather(0, order)).backward(y)
    return x.grad


def writes(x, at, y):
    x.index_copy_(0, at, y).index_put_((at,), y, accumulate=False)
    return x.put_(at, y, accumulate=False).scatter_(0, at, y) + torch.bincount(at)[0]
