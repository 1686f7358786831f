"""Run by tests/test_fits.py without the interpreter: launches are compiled for sm_90 and not run. Given "some", each
kernel and ring once, at the sizes that need most: without fp16, and without attention's wider heads in fp32.

Prints a JSON line of each variant: its kernel, what it is of, its bytes of shared memory, or why it was not compiled.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from triton.runtime.jit import JITFunction

TRITON_RUN, asked = JITFunction.run, []


def noted(self, *args, grid, warmup, **options):
    asked.append((self, args, grid, options))


JITFunction.run = noted

from bi_kernels import checks
from bi_kernels.audit.static.binary import read, without_gpu
from bi_kernels.contract import DTYPES
from bi_kernels.ops import layer_norm, norm
from bi_kernels.ops.attention import decode, forward
from bi_kernels.ops.attention.arguments import arguments
from bi_kernels.ops.attention.backward import attention_backward
from bi_kernels.ops.attention.forward import attention_forward
from bi_kernels.ops.attention.padded import materialize_offsets
from bi_kernels.ops.attention.schedule import SCHEDULE, using
from bi_kernels.ops.gemm import hopper
from bi_kernels.ops.gemm.cost import RINGS, TILES, PipelineConfig
from bi_kernels.ops.gemm.kernel import launch, tiles
from bi_kernels.ops.rows import row_sum, softmax
from bi_kernels.ops.square_sum import block_sums
from bi_kernels.tokens import TokenLayout

SOME = sys.argv[1:] == ["some"]
OF = [dtype for dtype in DTYPES.values() if not (SOME and dtype == torch.float16)]
FULL = 150 * 1024  # bytes of a ring from which on it is compiled
WIDE = PipelineConfig(64, 256, 64, 5, 2)


def products() -> None:
    """Every tile, of one token and of an odd width; the stored operands' strides decide least, so fewest of them."""
    for dtype in OF:
        for tile in tiles(dtype):
            for rows, tokens in ((1024, 1), (1000, 33)):
                dy, x = torch.zeros(tokens, rows, dtype=dtype), torch.zeros(tokens, 1032, dtype=dtype)
                if dtype == torch.bfloat16 and tile in TILES["fold"] or dtype == torch.float32:
                    buffer = torch.zeros(rows, 1032)
                    launch(dy.t(), x.t(), None, tile, torch.float32, buffer, buffer)
            if SOME and tile in TILES["fold"] and dtype == torch.bfloat16:
                continue
            launch(torch.zeros(7, 64, dtype=dtype), torch.zeros(72, 64, dtype=dtype), x[0, :72], tile, torch.float32)


def rings() -> None:
    seen = set()
    for use, found in reversed(RINGS.items()):  # a fold needs most
        for ring in found:
            stored = use == "rows"
            if ring in seen and SOME:
                continue
            seen.add(ring)
            if ring.shared * ring.resident > FULL:
                x, w = (torch.zeros(32, 128 if n else 32, dtype=torch.bfloat16) for n in (not stored, not stored))
                out = torch.zeros(*(len(t if stored else t.t()) for t in (x, w)))
                x, w = (x, w) if stored else (x.t(), w.t())
                hopper.launch(x, w, None, ring, torch.float32, out if use == "fold" else None, out)
    x, w, out = torch.zeros(32, 32).bfloat16().t(), torch.zeros(32, 136).bfloat16().t(), torch.zeros(32, 136)
    hopper.launch(x, w, None, WIDE, torch.float32, out, out)  # rows of no multiple of 16


def rows() -> None:
    layout = TokenLayout.packed([0, 33])
    for dtype in OF:
        for width in (1025, 4096, 32768) if SOME else (1, 1024, 1025, 4096, 5120, 32768):
            x = torch.zeros(33, width, dtype=dtype)
            per_row = torch.zeros(33)
            norm.norm_gradient(x, x[0], per_row, x, x, layout, 1, x, x[0], False, 0.0)
            layer_norm._gradient(x, x[0], per_row, per_row, x, layout, 1, x, x[0], x[1], False, False)
        for width in (5000,) if SOME else (8, 4096, 5000):
            x = torch.zeros(2, width, dtype=dtype).requires_grad_()
            (softmax(x).sum() + row_sum(x).sum()).backward()
    for squared in (True, False):
        block_sums(torch.zeros(5000), squared)


def heads() -> None:
    for dtype in OF:
        for width in (16 if dtype == torch.float32 else 256,) if SOME else (16, 96, 128, 256):
            q = torch.zeros(1, 2100, 4, width, dtype=dtype)
            call = arguments(q, q[:, :, :2], q[:, :, :2])
            out, lse = attention_forward(*call[:7])
            out, lse, *qkv = (t.flatten(0, 1) for t in (out, lse, *call[:3]))
            where = materialize_offsets(call.sequences, q.device)[:4]
            attention_backward(out, None, *qkv, out, lse, where, *call[4:7], *qkv)
            for cache in (call[1], call[1].new_zeros(1, 5000, 2, width))[1 if SOME else 0 :]:
                decode.INTERPRETED = True  # in steps, which it else is on a GPU alone
                attention_forward(*arguments(q[:, :1], cache, cache)[:7])
                decode.INTERPRETED = False


def pages() -> None:
    """Decode from pages that hold whole blocks of keys, and from smaller ones: by TMA, by pointers, in steps."""
    forward.is_hopper, forward.multiprocessors = lambda device: True, lambda device: 132
    torch.Tensor.get_device = lambda tensor: 0
    for sequences, page in ((64, 16), (64, 64), (5, 64)):
        q = torch.zeros(sequences, 1, 32, 128, dtype=torch.bfloat16)
        k = torch.zeros(99, page, 8, 128, dtype=torch.bfloat16)
        told = {"block_table": torch.zeros(sequences, 4160 // page, dtype=torch.int32)}
        told["lengths_k"] = torch.full((sequences,), 4160, dtype=torch.int32)
        call = arguments(q, k, k, **told)[:7]
        attention_forward(*call)
        if SOME and page > 16:
            continue
        decode.INTERPRETED = True
        with using(replace(SCHEDULE, apart=SCHEDULE.apart._replace(programs=10**6))):
            attention_forward(*call)
        decode.INTERPRETED = False


def constants(kernel, args: tuple) -> dict:
    return {p.name: a for p, a in zip(kernel.params, args) if p.is_constexpr and isinstance(a, (int, bool))}


def of_a_ring(args: tuple, words: dict, done) -> dict:
    rows, columns = (args[i].block_shape[words[stored]] for i, stored in enumerate(("X_T", "W_T")))
    ring = PipelineConfig(rows, columns, words["PART"] * words["PARTS"], words["STAGES"], words["GROUPS"])
    return {"spills": read([done])[0].spills, "ring": ring, "said": ring.shared}


def compiled(one) -> dict:
    kernel, args, grid, options = one
    words = constants(kernel, args) | options
    try:
        done = TRITON_RUN(kernel, *args, grid=grid, warmup=True, **options)
        of_ring = of_a_ring(args, words, done) if kernel.fn.__name__ == "_hopper_gemm_kernel" else {}
    except Exception as error:
        return {"kernel": kernel.fn.__name__, "of": words, "error": str(error)[-300:]}
    return {"kernel": kernel.fn.__name__, "of": words, "shared": done.metadata.shared} | of_ring


if __name__ == "__main__":
    without_gpu()
    checks.INTERPRETED = True  # from here on a CPU is let through
    torch.cuda.current_device = lambda: 0
    for part in (products, rings, rows, heads, pages):
        part()
    kinds = {}
    for one in asked:
        kernel, args, _, options = one
        kind = [(getattr(a, "dtype", None), getattr(a, "block_shape", None), a is None) for a in args]
        kinds.setdefault(str((kernel.fn.__name__, kind, constants(kernel, args), options)), one)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(compiled, kinds.values()):
            print(json.dumps(found), flush=True)
