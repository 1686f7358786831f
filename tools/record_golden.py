"""Records what an sm_90 GPU answers, for the tests that hold the CPU interpreter to it.

    python tools/record_golden.py OUT.npz

Every array holds bits, as integers. Keys, with <dtype> the operands':

- mma/<dtype>/<family>/{a,b,c,out}: one tensor-core step, or for chain_* four of them. mma.sync and wgmma gave the
  same `out` in every bit; `instructions` lists the two.
- dot_fp32/<family>/{a,b,c,out}: tl.dot of fp32 with input_precision="ieee".
- binary/<dtype>/{a,b,<operation>} and ternary/<dtype>/{a,b,c,<operation>}: elementwise arithmetic.
- cast/<source>/<target>[_<rounding>]/{a,out}
"""

import argparse

import numpy as np
import torch
import triton
import triton.language as tl

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
INF, NAN, FP32_MAX = float("inf"), float("nan"), 2.0**128 - 2.0**104
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Draw:
    """Random numbers, on the CPU and from one seed; all but `bits` in fp64."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=FP64)

    def bits(self, dtype, *shape):
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=self.generator).to(torch.uint8)
        return raw.view(dtype)[..., 0]

    def spread(self, x, low, high, shared=()):
        """x times 2^n with low <= n < high, one n for all of the dimensions `shared`."""
        shape = [1 if dim in shared else size for dim, size in enumerate(x.shape)]
        return x * torch.exp2(torch.randint(low, high, shape, generator=self.generator).double())

    def some(self, p, shape):
        """Whether, with probability p."""
        return torch.rand(shape, generator=self.generator) < p

    def sprinkled(self, x, p, *values):
        """x with each of the values in the place of a share p of it."""
        for value in values:
            x = torch.where(self.some(p, x.shape), value, x)
        return x


def any_bits(dtype):
    return lambda a, b, c, d: (d.bits(dtype, *a.shape), d.bits(dtype, *b.shape), d.bits(FP32, *c.shape))


def zero_by_huge(a, b, c, d, huge, small):
    """b is huge only where a is zero: 2^huge must not decide how much is kept of the other products."""
    zero = d.some(0.5, a.shape[1])
    return torch.where(zero, 0.0, a), b * torch.where(zero, 2.0**huge, 2.0**small)[:, None], d.spread(c, -30, -10)


def borrow(a, b, c, d):
    """2^-148 less products around the last bit that is kept of them: only what is kept makes the result 2^-149."""
    a, b = torch.where(d.some(0.2, a.shape), a.abs() * 2.0**-70, 0.0), -d.spread(b.abs(), -92, -84)
    a[:, 0], b[0] = 2.0**-70, 2.0**-78
    return a, b, c * 0


# Functions of normal a (16, K), b (K, 16), c (16, 16) and of a Draw; x * 0 is a zero with the sign of x.
MMA_FAMILIES = {
    "normal": lambda a, b, c, d: (a, b, c),
    "wide": lambda a, b, c, d: (d.spread(a, -12, 12), d.spread(b, -12, 12), d.spread(c, -24, 24)),
    "nonfinite": lambda a, b, c, d: (
        d.sprinkled(a, 0.02, INF, -INF, NAN, 0.0),
        d.sprinkled(b, 0.03, INF, -INF, 0.0),
        d.sprinkled(c, 0.1, INF, -INF),
    ),
    "cancelling": lambda a, b, c, d: (
        a[:, :8].repeat(1, 2),
        torch.cat([b[:8], -b[:8]]),
        d.spread(c, -30, 1) * d.some(0.5, c.shape),
    ),
    "signed_zeros": lambda a, b, c, d: (d.sprinkled(a * 0, 0.1, 1.0), b * 0, c * 0),
    "negative_zeros": lambda a, b, c, d: (a.abs() * -0.0, b.abs(), c * 0),
    "zero_products": lambda a, b, c, d: (a * 0, b.sign(), c * 0),
    "accumulator_large": lambda a, b, c, d: (a, b, d.spread(c, 10, 30)),
    "accumulator_small": lambda a, b, c, d: (a, b, d.spread(c, -40, -10)),
    "accumulator_bits": lambda a, b, c, d: (a, b, d.bits(FP32, *c.shape)),
    "chain_normal": lambda a, b, c, d: (a, b, c),
    "chain_wide": lambda a, b, c, d: (d.spread(a, -8, 8), d.spread(b, -8, 8), c),
    "chain_cancel": lambda a, b, c, d: (a[:, :32].repeat(1, 2), torch.cat([b[:32], -b[:32]]), c * 0),
}
MMA_FAMILIES_OF = {
    BF16: {
        "bits": any_bits(BF16),
        "subnormal_inputs": lambda a, b, c, d: (a * 2.0**-130, b * 2.0**100, d.spread(c, -34, -28)),
        "subnormal_results": lambda a, b, c, d: (a * 2.0**-65, d.spread(b, -80, -58), d.spread(c, -150, -120)),
        "overflow": lambda a, b, c, d: (a * 2.0**63, d.spread(b, 58, 66), d.spread(c.sign() * FP32_MAX, -2, 1)),
        "underflow": lambda a, b, c, d: (a * 2.0**-75, b * 2.0**-77, c.sign() * 2.0**-149),
        "zero_by_huge": lambda a, b, c, d: zero_by_huge(a, b, c, d, 120, -20),
        # Where no product reaches 2^-133. fp16 has no products that small.
        "far_below_fp32": lambda a, b, c, d: (a * 2.0**-70, d.spread(b, -84, -62, shared=[0]), c * 0),
        "far_below_fp32_subnormal": lambda a, b, c, d: (a * 2.0**-130, d.spread(b, -24, -2, shared=[0]), c * 0),
        "far_below_fp32_accumulator": lambda a, b, c, d: (
            a * 2.0**-70,
            d.spread(b, -84, -62, shared=[0]),
            d.spread(c.sign(), -149, -120) * d.some(0.5, c.shape),
        ),
        "far_below_fp32_borrow": borrow,
    },
    FP16: {
        "bits": any_bits(FP16),
        "subnormal_inputs": lambda a, b, c, d: (a * 2.0**-18, b, d.spread(c, -22, -16)),
        "subnormal_results": lambda a, b, c, d: (a * 2.0**-16, d.spread(b, -8, 0), d.spread(c, -150, -120)),
        "overflow": lambda a, b, c, d: (a * 2.0**12, d.spread(b, 0, 4), d.spread(c.sign() * FP32_MAX, -2, 1)),
        "underflow": lambda a, b, c, d: (a * 2.0**-24, b * 2.0**-26, c.sign() * 2.0**-149),
        "zero_by_huge": lambda a, b, c, d: zero_by_huge(a, b, c, d, 13, -14),
    },
}
FP32_FAMILIES = {
    "normal": lambda a, b, c, d: (a, b, c),
    "wide": lambda a, b, c, d: (d.spread(a, -12, 12), d.spread(b, -12, 12), c),
    "tiny": lambda a, b, c, d: (a * 2.0**-75, d.spread(b, -80, -55), c * 2.0**-140),
    "short": lambda a, b, c, d: (d.spread((a * 8).round(), -12, 12), (b * 8).round(), c),  # makes ties
    "bits": any_bits(FP32),
}
# A tile of 64 rows, which repeats the 16, and one warp group make the compiler choose wgmma.
INSTRUCTIONS = {"mma.sync": dict(BLOCK_M=16, num_warps=1), "wgmma": dict(BLOCK_M=64, num_warps=4)}

BINARY = ("add", "sub", "mul", "div", "maximum")
TERNARY = ("fma", "minimum", "minimum_nan", "maximum_nan", "neg", "abs", "clamp", "clamp_nan")
CASTS = [
    (source, target, None)
    for source in (FP64, FP32, BF16, FP16, torch.int64, torch.int32)
    for target in (FP32, BF16, FP16)
    if source != target
] + [(FP32, BF16, "rtz"), (FP32, FP16, "rtz")]
SPECIAL_BITS = """0 1 7FFFFF 800000 3F800000 3F800001 3F7FFFFF 7F7FFFFF 7F800000 7F800001 7FC00000
    7FFFFFFF 33800000 00400000 477FF000 387FC000 33000000 3F808000 3F818000 3FFFC000 7F7F8000 00008000"""
SPECIAL = [sign | value for sign in (0, -(2**31)) for value in (int(x, 16) for x in SPECIAL_BITS.split())]
SPECIAL = torch.tensor(SPECIAL).to(torch.int32)


@triton.jit
def dot(a, b, c, out, K: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr):
    rows, cols, k = tl.arange(0, BLOCK_M), tl.arange(0, 16), tl.arange(0, K)
    at = (rows % 16)[:, None] * 16 + cols[None, :]
    x = tl.load(a + (rows % 16)[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * 16 + cols[None, :])
    tl.store(out + at, tl.dot(x, y, tl.load(c + at), input_precision=PRECISION), mask=(rows < 16)[:, None])


@triton.jit
def elementwise(a, b, c, out, n, OP: tl.constexpr):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    x, y, z = tl.load(a + at, mask=at < n), tl.load(b + at, mask=at < n), tl.load(c + at, mask=at < n)
    if OP == "add":
        r = x + y
    elif OP == "sub":
        r = x - y
    elif OP == "mul":
        r = x * y
    elif OP == "div":
        r = tl.div_rn(x, y)
    elif OP == "maximum":
        r = tl.maximum(x, y)
    elif OP == "minimum":
        r = tl.minimum(x, y)
    elif OP == "maximum_nan":
        r = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "minimum_nan":
        r = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "neg":
        r = -x
    elif OP == "abs":
        r = tl.abs(x)
    elif OP == "fma":
        r = tl.fma(x, y, z)
    elif OP == "clamp":
        r = tl.clamp(x, y, z)
    elif OP == "clamp_nan":
        r = tl.clamp(x, y, z, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, r, mask=at < n)


@triton.jit
def cast(a, out, n, ROUNDING: tl.constexpr):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    x = tl.load(a + at, mask=at < n)
    tl.store(out + at, x.to(out.dtype.element_ty, fp_downcast_rounding=ROUNDING), mask=at < n)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bits(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(INTEGER[t.element_size()]).cpu().numpy()


def record_dot(family, K: int, dtype: torch.dtype, draw: Draw) -> dict[str, np.ndarray]:
    a, b, c = family(draw.normal(16, K), draw.normal(K, 16), draw.normal(16, 16), draw)
    a, b, c = (t.to(dtype_of)[None].contiguous() for t, dtype_of in ((a, dtype), (b, dtype), (c, FP32)))
    instructions = {"fma.rn.f32": dict(BLOCK_M=16, num_warps=4)} if dtype == FP32 else INSTRUCTIONS
    outs = []
    for instruction, options in instructions.items():
        out = torch.full(c.shape, NAN).cuda()
        precision = "ieee" if dtype == FP32 else None
        kernel = dot[(1,)](a.cuda(), b.cuda(), c.cuda(), out, K=K, PRECISION=precision, **options)
        assert instruction in kernel.asm["ptx"], f"the compiler chose another instruction than {instruction}"
        outs.append(bits(out))
    assert all((out == outs[0]).all() for out in outs), f"{' and '.join(instructions)} differ"
    return {"a": bits(a), "b": bits(b), "c": bits(c), "out": outs[0]}


def operands(dtype: torch.dtype, count: int, draw: Draw) -> list[torch.Tensor]:
    """Of 2 operands, every pair of special values; of 3, every triple of the most special, and random ones."""
    if count == 2:
        halves = torch.stack([SPECIAL >> 16, SPECIAL], 1).to(torch.int16).unique()
        values = (SPECIAL if dtype == FP32 else halves).view(dtype)
        return [t.flatten() for t in torch.meshgrid(values, values, indexing="ij")]
    x, y, z = (draw.normal(96).to(dtype) for _ in range(3))
    z[::2] = -(x * y)[::2]  # fma leaves what the rounding of the product lost
    values = torch.tensor([0.0, -0.0, 1.0, INF, -INF, NAN]).to(dtype)
    triples = torch.meshgrid(values, values, values, indexing="ij")
    return [torch.cat([t, draw.bits(dtype, 96), u.flatten()]) for t, u in zip((x, y, z), triples)]


def to_cast(source: torch.dtype, draw: Draw) -> torch.Tensor:
    """Numbers of every magnitude, and numbers halfway between two of bf16 or fp16 and just beside that."""
    if source.itemsize == 2:
        return torch.arange(-(2**15), 2**15, 75).to(torch.int16).view(source)
    odd, beside = 2 * torch.arange(192) + 1, torch.arange(192) % 3 - 1
    if source.is_floating_point:
        halfway = 1 + odd / torch.tensor([512.0, 2048.0]).repeat(96) + beside * 2.0**-40
        normal = torch.cat([draw.spread(draw.normal(96), -26, 18), draw.spread(draw.normal(96), -160, 140)])
        raw = torch.cat([SPECIAL.view(FP32), draw.bits(FP32, 192)]).double()
        return torch.cat([draw.spread(halfway, -140, 3), normal, raw]).to(source)
    # 9 bits and a last one, far enough apart that rounding to fp32 first would show, and near enough for fp64.
    halfway = (odd % 256 + 256) * 2 ** (21 if source == torch.int32 else 40) + beside
    shift = torch.arange(192) % (8 * source.itemsize - 1)
    return torch.cat([halfway.to(source), draw.bits(source, 192) >> shift.to(source)])


def record(seed: int = 0) -> dict[str, np.ndarray]:
    draw, golden = Draw(seed), {"instructions": np.array(list(INSTRUCTIONS))}
    dots = [
        (f"mma/{name(dtype)}/{family}", inputs, 64 if family.startswith("chain") else 16, dtype)
        for dtype, own in MMA_FAMILIES_OF.items()
        for family, inputs in (MMA_FAMILIES | own).items()
    ]
    dots += [(f"dot_fp32/{family}", inputs, 32, FP32) for family, inputs in FP32_FAMILIES.items()]
    for key, *which in dots:
        golden |= {f"{key}/{part}": array for part, array in record_dot(*which, draw).items()}
    for group, count, operations in (("binary", 2, BINARY), ("ternary", 3, TERNARY)):
        for dtype in (FP32, BF16, FP16):
            inputs, key = operands(dtype, count, draw), f"{group}/{name(dtype)}"
            golden |= {f"{key}/{part}": bits(t) for part, t in zip("abc", inputs)}
            a, b, c = (t.cuda() for t in (inputs + inputs)[:3])
            grid = (triton.cdiv(len(a), 256),)
            for operation in operations:
                if operation != "div" or dtype == FP32:  # tl.div_rn takes nothing else
                    out = torch.empty_like(a)
                    elementwise[grid](a, b, c, out, len(a), OP=operation, enable_fp_fusion=False)
                    golden[f"{key}/{operation}"] = bits(out)
    for source, target, rounding in CASTS:
        a = to_cast(source, draw)
        out = torch.empty(len(a), dtype=target).cuda()
        cast[(triton.cdiv(len(a), 256),)](a.cuda(), out, len(a), ROUNDING=rounding)
        key = f"cast/{name(source)}/{name(target)}" + (f"_{rounding}" if rounding else "")
        golden |= {f"{key}/a": bits(a), f"{key}/out": bits(out)}
    return golden


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    np.savez_compressed(parser.parse_args().out, **record())
