"""Records what an sm_90 GPU answers, for the tests that hold the CPU interpreter to it.

    python tools/record_golden.py OUT.npz [--sets 2]

One tensor-core step (16x16x16, fp32 accumulator) over input families that the model of the tensor core could get
wrong, through mma.sync and through wgmma, and the fp32/fp16/bf16 casts and arithmetic over special values.
"""

import argparse

import numpy as np
import torch
import triton
import triton.language as tl

FAMILIES = ("normal", "wide", "bits", "subnormal_inputs", "subnormal_results", "overflow", "nonfinite", "cancelling",
            "signed_zeros", "accumulator_large", "accumulator_small", "accumulator_bits")


@triton.jit
def mma_step(a, b, c, d, BLOCK_M: tl.constexpr):
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, 16)
    at = tl.program_id(0)
    a_tile = tl.load(a + at * 256 + (rows % 16)[:, None] * 16 + cols[None, :])
    b_tile = tl.load(b + at * 256 + cols[:, None] * 16 + cols[None, :])
    c_tile = tl.load(c + at * 256 + (rows % 16)[:, None] * 16 + cols[None, :])
    out = tl.dot(a_tile, b_tile, c_tile)
    tl.store(d + at * 256 + (rows % 16)[:, None] * 16 + cols[None, :], out, mask=(rows < 16)[:, None])


@triton.jit
def binary(a, b, out, n, OP: tl.constexpr):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    x, y = tl.load(a + at, mask=at < n), tl.load(b + at, mask=at < n)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "div":
        z = tl.div_rn(x, y)
    elif OP == "maximum":
        z = tl.maximum(x, y)
    tl.store(out + at, z, mask=at < n)


@triton.jit
def cast(a, out, n):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(out + at, tl.load(a + at, mask=at < n).to(out.dtype.element_ty), mask=at < n)


def bits(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()]).cpu().numpy()


def family(name: str, dtype: torch.dtype, sets: int, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """a, b (sets, 16, 16) in dtype and c (sets, 16, 16) in fp32."""
    shape = (sets, 16, 16)
    bf16 = dtype == torch.bfloat16
    normal = lambda: torch.randn(shape, generator=g, dtype=torch.float64)
    sign = lambda: torch.randint(0, 2, shape, generator=g).double() * 2 - 1
    power = lambda low, high: torch.exp2(torch.randint(low, high, shape, generator=g).double())
    raw16 = lambda: torch.randint(-2**15, 2**15, shape, generator=g).to(torch.int16).view(dtype)
    raw32 = lambda: torch.randint(-2**31, 2**31, shape, generator=g).to(torch.int32).view(torch.float32)
    a, b, c = normal(), normal(), normal()
    if name == "wide":
        a, b, c = a * power(-12, 12), b * power(-12, 12), c * power(-24, 24)
    elif name == "bits":
        return raw16(), raw16(), raw32()
    elif name == "subnormal_inputs":
        tiny = 2.0**(-130 if bf16 else -18)
        a, b = a * tiny, b * (2.0**100 if bf16 else 1.0)
        c = c * tiny * (2.0**100 if bf16 else 1.0) * power(-4, 2)
    elif name == "subnormal_results":
        a, b = a * 2.0**(-65 if bf16 else -16), b * (power(-80, -58) if bf16 else power(-8, 0))
        c = c * power(-150, -120)
    elif name == "overflow":
        a, b = a * 2.0**(63 if bf16 else 12), b * (power(58, 66) if bf16 else power(0, 4))
        c = sign() * (2.0**128 - 2.0**104) * power(-2, 1)
    elif name == "nonfinite":
        for t in (a, b):
            t[torch.rand(shape, generator=g) < 0.03] = float("inf")
            t[torch.rand(shape, generator=g) < 0.03] = -float("inf")
            t[torch.rand(shape, generator=g) < 0.03] = 0.0
        a[torch.rand(shape, generator=g) < 0.01] = float("nan")
        c[torch.rand(shape, generator=g) < 0.1] = float("inf")
        c[torch.rand(shape, generator=g) < 0.1] = -float("inf")
    elif name == "cancelling":
        a[:, :, 1::2] = a[:, :, ::2]
        b[:, 1::2] = -b[:, ::2]
        c = c * power(-30, 1) * torch.randint(0, 2, shape, generator=g)
    elif name == "signed_zeros":
        a, b, c = (t * 0 * torch.sign(t) for t in (a, b, c))
        a[torch.rand(shape, generator=g) < 0.1] = 1.0
        c[:, ::3] = -0.0
    elif name == "accumulator_large":
        c = c * power(10, 30)
    elif name == "accumulator_small":
        c = c * power(-40, -10)
    elif name == "accumulator_bits":
        c = raw32()
    return a.to(dtype), b.to(dtype), c.to(torch.float32)


def record(sets: int) -> dict[str, np.ndarray]:
    g = torch.Generator().manual_seed(0)
    out = {}
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for kind in FAMILIES:
            a, b, c = family(kind, dtype, sets, g)
            key = f"mma/{name}/{kind}"
            out[f"{key}/a"], out[f"{key}/b"], out[f"{key}/c"] = bits(a), bits(b), bits(c)
            for instruction, block_m, warps in (("mma.sync", 16, 1), ("wgmma", 64, 4)):
                d = torch.full((sets, 16, 16), float("nan"), device="cuda")
                kernel = mma_step[(sets, )](a.cuda(), b.cuda(), c.cuda(), d, BLOCK_M=block_m, num_warps=warps)
                assert instruction in kernel.asm["ptx"], f"{instruction} was not what the compiler chose"
                out[f"{key}/{instruction}"] = bits(d)
    special = torch.tensor([0x0, 0x1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x3F7FFFFF, 0x7F7FFFFF, 0x7F800000,
                            0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x33800000, 0x00400000, 0x477FF000, 0x387FC000,
                            0x33000000, 0x3F808000, 0x3F818000, 0x3FFFC000, 0x7F7F8000, 0x00008000])
    special = torch.cat([special, special + 2**31]).to(torch.int64)
    special = torch.where(special >= 2**31, special - 2**32, special).to(torch.int32)
    random32 = torch.randint(-2**31, 2**31, (2048, ), generator=g).to(torch.int32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        x = special if dtype == torch.float32 else torch.cat([special >> 16, special & 0xFFFF]).unique().to(torch.int16)
        x, y = (t.flatten().contiguous().view(dtype) for t in torch.meshgrid(x, x, indexing="ij"))
        out[f"binary/{name}/a"], out[f"binary/{name}/b"] = bits(x), bits(y)
        for op in ("add", "sub", "mul", "maximum") + (("div", ) if dtype == torch.float32 else ()):
            z = torch.empty_like(x, device="cuda")
            binary[(triton.cdiv(x.numel(), 256), )](x.cuda(), y.cuda(), z, x.numel(), OP=op, enable_fp_fusion=False)
            out[f"binary/{name}/{op}"] = bits(z)
    every16 = torch.arange(-2**15, 2**15).to(torch.int16)
    for source, target in ((torch.float32, torch.bfloat16), (torch.float32, torch.float16),
                           (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                           (torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        x = (torch.cat([special, random32]) if source == torch.float32 else every16[::5].contiguous()).view(source)
        z = torch.empty(x.numel(), dtype=target, device="cuda")
        cast[(triton.cdiv(x.numel(), 256), )](x.cuda(), z, x.numel())
        key = f"cast/{str(source).removeprefix('torch.')}/{str(target).removeprefix('torch.')}"
        out[f"{key}/a"], out[f"{key}/out"] = bits(x), bits(z)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--sets", type=int, default=2, help="16x16x16 steps recorded for each input family")
    arguments = parser.parse_args()
    np.savez_compressed(arguments.out, **record(arguments.sets))
