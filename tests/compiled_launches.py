"""Run by tests/test_launch.py without the interpreter: ops on a CPU whose kernels are compiled for sm_90 and not run.

Every launch through a compiled form is held against what Triton would have launched. Given dtypes, as float32. Prints
their number, and the number of calls that Triton was asked.
"""

import sys
from dataclasses import replace

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

TRITON_RUN, made, count = JITFunction.run, {}, {"asked": 0, "kept": 0}


def asked(self, *args, grid, warmup, **options):
    count["asked"] += 1
    kernel = TRITON_RUN(self, *args, grid=grid, warmup=True, **options)
    made[kernel] = self, {name: value for name, value in options.items() if name not in self.arg_names}
    return kernel


def kept(compiled, device, grid, values):
    assert len(grid) == 3 and all(type(n) is int for n in grid), grid
    count["kept"] += 1
    addresses = lambda values: [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in values]
    assert addresses(values[: len(given)]) == addresses(given), values
    kernel, options = made[compiled]
    assert TRITON_RUN(kernel, *given, *values[len(given) :], grid=grid, warmup=True, **options) is compiled, kernel


def named(self, *tensors):
    given.extend(tensors)
    try:
        NAMED(self, *tensors)
    finally:
        given.clear()


JITFunction.run, torch.cuda.current_device = asked, lambda: 0

import bi_kernels
from bi_kernels import checks, compat, launch
from bi_kernels.audit.static.binary import without_gpu
from bi_kernels.ops.attention import decode
from bi_kernels.ops.attention.attention import arguments, attend
from bi_kernels.ops.attention.schedule import SCHEDULE
from bi_kernels.ops.gemm import gemm

SMALL = replace(SCHEDULE, split=64, block=16)  # splits of programs of their own
APART = [replace(s, few=s.few + 1) for s in (SCHEDULE, SMALL)]  # for decode in steps
CALLS = [(rows, width, shift) for rows, width in ((1, 64), (16, 64), (17, 100)) for shift in (0, 1)]
QUICK = [c for c in CALLS if c[0] == 16 or not c[2]]  # each kind of size, and one at both addresses
NAMED, given = launch.Launch.__call__, []  # a launch of that is told addresses
launch.Launch.__call__, compat.launch_compiled = named, kept


def call(dtype: torch.dtype, rows: int, width: int, shift: int) -> None:
    """Calls ops, forward and backward, on tensors that begin `shift` elements behind an aligned address."""

    def made_of(*shape):
        size = torch.Size(shape).numel()
        return torch.randn(size + shift).to(dtype)[shift:].view(shape).requires_grad_()

    x, up, weight = made_of(rows, width), made_of(rows, width), made_of(width)
    bi_kernels.swiglu(x, up).sum().backward()
    bi_kernels.scale(x, 0.5).sum().backward()
    bi_kernels.cast(x, torch.float16).sum().backward()
    bi_kernels.rms_norm(x, weight).sum().backward()
    heads = made_of(rows, 2, width)
    bi_kernels.rope(heads, bi_kernels.rope_table(64, width), torch.arange(rows)).sum().backward()
    for integers in (torch.long, torch.int32):
        bi_kernels.embedding(torch.zeros(rows, dtype=integers), made_of(9, width)).sum().backward()
        bi_kernels.rope(heads, bi_kernels.rope_table(64, width), torch.arange(rows, dtype=integers))
    bi_kernels.token_logprob(x, torch.zeros(rows, dtype=torch.long))[0].sum().backward()
    with torch.no_grad():
        bi_kernels.add_rms_norm(x, up, weight)
        bi_kernels.rms_norm(x, weight)
        if rows == 1:  # decode has one query whatever `rows` is
            return
        cache = made_of(1, 128, 1, width)
        query, length = made_of(1, 1, 2, width), torch.tensor([min(rows, 16)])
        pages, ends = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1])
        if rows == 16:
            bi_kernels.attention(query, cache, cache, lengths_k=length)
            for lengths in (length, length.int()):
                bi_kernels.attention(query, cache, cache, lengths_k=lengths, block_table=pages)
            bi_kernels.attention(query[0], cache, cache, cu_seqlens_q=ends, lengths_k=length, block_table=pages)
        attend(arguments(query, cache, cache, lengths_k=length), SMALL if rows == 16 else SCHEDULE)
        decode.INTERPRETED = True  # else a CPU computes in one launch
        attend(arguments(query, cache, cache, lengths_k=length), APART[rows == 16])
        decode.INTERPRETED = False


def multiply(rows: int, columns: int) -> None:
    x, weight = (torch.randn(n, 48).bfloat16().requires_grad_() for n in (rows, columns))
    weight.main_grad = torch.zeros(columns, 48)
    bi_kernels.linear(x, weight).sum().backward()


def on_hopper() -> None:
    """Calls sm_90's GEMM: of one shape with a bias and without, in two dtypes, and a fold that begins and goes on."""
    gemm.is_hopper = lambda device: True
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = (torch.randn(rows, 64).to(dtype).requires_grad_() for rows in (1, 64))
        for bias in (None, weight[0], None):
            bi_kernels.linear(x, weight, bias)
        grads = bi_kernels.MainGrads([weight])
        for _ in range(3):
            bi_kernels.linear(torch.randn(64, 64).to(dtype), weight).sum().backward()
        grads.finish()


def hooked() -> None:
    """A profiler sees each launch: Triton makes it then."""
    x, here = torch.zeros(16), count["kept"]
    bi_kernels.silu(x)
    before = count["asked"]
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(print)
        bi_kernels.silu(x)
        hook.remove(print)
    assert count == {"asked": before + 2, "kept": here}
    bi_kernels.silu(x)
    assert count["kept"] == here + 1


if __name__ == "__main__":
    without_gpu()
    is_hopper = gemm.is_hopper
    loaded = [getattr(bi_kernels, name) for name in bi_kernels.__all__]  # their kernels are not interpreted ones
    checks.INTERPRETED = True  # from here on a CPU is let through
    for again in range(2):
        for dtype in (getattr(torch, name) for name in sys.argv[1:]):
            for rows, width, shift in CALLS if len(sys.argv) > 2 else QUICK:
                call(dtype, rows, width, shift)
        for rows in (1, 16, 17):
            for columns in (1, 24, 40):
                multiply(rows, columns)
        on_hopper()
        gemm.is_hopper = is_hopper
        print(count["asked"], count["kept"])
    hooked()
