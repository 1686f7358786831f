"""Sampling by counter: the noise of a token depends on its seed, sample and position, never on the batch.

A token is drawn from softmax(logits / temperature) as the first arrival of a race: column v arrives at E_v / p_v, E_v
exponential, so that the winner maximises z_v − log E_v (Gumbel-max). E_v comes from Philox 4x32-10 (Salmon et al.,
2011) with the key `seed` and the counter (column, position, sample). A maximum has no order: ties go to the lowest
column.
"""

import torch
import triton
import triton.language as tl

from bi_kernels.checks import check, check_shape, integers
from bi_kernels.launch import jit
from bi_kernels.scalars import check_fp32, check_integer, check_number, truncated_repr

BLOCK, WARPS = 4096, 8  # of the vocabulary


@triton.jit
def _exponential(bits):
    """−log(1 − u) of u = (bits + ½) / 2^32; by its series where 1 − u would round u away: winners have a small E."""
    u = (bits.to(tl.uint32).to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * 0.25)))
    return tl.where(u < 1.0 / 64, series, -tl.log(1.0 - tl.minimum(u, 1.0 - 1.0 / 16777216.0)))


@jit(do_not_specialize=["columns", "seed"])
def _sample_kernel(logits, samples, positions, out, columns, stride, seed, inv_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sample, position = tl.load(samples + row), tl.load(positions + row)
    best = tl.full((), -float("inf"), tl.float32)
    chosen = tl.zeros((), tl.int32)
    for first in range(0, columns, BLOCK):
        col = first + tl.arange(0, BLOCK)
        z = tl.load(logits + row * stride + col, mask=col < columns, other=-float("inf")).to(tl.float32)
        if inv_temperature != 0.0:
            c0, c1 = col.to(tl.uint32), tl.zeros_like(col).to(tl.uint32)
            low, high = (sample & 0xFFFFFFFF).to(tl.uint32), (sample >> 32).to(tl.uint32)
            bits, _, _, _ = tl.philox(seed, c0, c1 + position.to(tl.uint32), c1 + low, c1 + high)
            z = z * inv_temperature - tl.log(_exponential(bits))
        z = tl.where(z == z, z, -float("inf"))
        top = tl.max(z, 0)
        at = first + tl.argmax(z, 0, tie_break_left=True)
        chosen = tl.where(top > best, at, chosen)
        best = tl.maximum(top, best)
    tl.store(out + row, chosen.to(tl.int64))


def sample(
    logits: torch.Tensor, seed: int, samples: torch.Tensor, positions: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Draws a token of each row of logits (rows, V): (rows,) int64. temperature 0: the largest logit.

    samples, positions: (rows,) int64, the row's sample and the place in it of the token that is drawn; the same seed,
    sample, position and logits give the same token in every batch. A NaN never wins. Raises TypeError and ValueError.
    """
    op = "sample"
    check(op, logits=logits)
    check(op, same_dtype=False, logits=logits, samples=samples, positions=positions)
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}, expected (rows, V)")
    for name, t in (("samples", samples), ("positions", positions)):
        check_shape(op, name, t, logits.shape[:1], "one a row of logits")
        if not integers(t):
            raise TypeError(f"{op}: {name} has dtype {t.dtype}, expected integers")
    if not 0 <= check_integer(op, "seed", seed) < 2**63:
        raise ValueError(f"{op}: seed is {truncated_repr(seed)}, expected 0 to 2**63 - 1")
    if not 0 <= check_number(op, "temperature", temperature) < float("inf"):
        raise ValueError(f"{op}: temperature is {temperature}, expected a number of at least 0")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, columns = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        inv_temperature = check_fp32(op, "1 / temperature", 1.0 / temperature) if temperature else 0.0
        given = logits, samples.long().contiguous(), positions.long().contiguous(), out
        numbers, options = (columns, logits.stride(0), seed, inv_temperature), {"num_warps": WARPS, "BLOCK": BLOCK}
        _sample_kernel[(rows,)](*given, *numbers, enable_fp_fusion=False, **options)
    return out
