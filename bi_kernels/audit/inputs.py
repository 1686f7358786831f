"""Inputs that can reveal a reordering: drawn at random in families, one family a name of the contract's sweep."""

from collections.abc import Sequence

import numpy as np
import torch

from bi_kernels.contract import SWEEP, dtype_name

KINDS = tuple(SWEEP["inputs"])
INTEGERS = "integers"  # a further family, of ops whose only rounding before the result would be that of a sum
POISON = (float("nan"), float("inf"), -float("inf"))


def generator(device: torch.device | str, *seed: int | str) -> torch.Generator:
    """Returns a generator on `device`, seeded from numbers and names alike."""
    number = 0
    for part in seed:
        for byte in str(part).encode():
            number = (number * 257 + byte + 1) % (2**61 - 1)
    return torch.Generator(device).manual_seed(number)


def on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    """Copies an array to a device without waiting for what the device has yet to do."""
    t = torch.from_numpy(array)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def powers(shape: Sequence[int], low: int, high: int, g: torch.Generator) -> torch.Tensor:
    """Returns powers of two, fp32, their exponents from `low` to below `high`."""
    return torch.exp2(torch.randint(low, high, shape, generator=g, device=g.device).float())


def draw(
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    g: torch.Generator,
    shared: bool = False,
    poisoned: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a tensor of `shape` on the generator's device.

    kind: normal; wide (exponents spread over what the dtype holds without every product overflowing); cancelling (the
    second half of the features negates the first but for one in eight, so sums grow and then vanish and the last bits
    of a fold reach the result); signed_zeros (half are −0 or +0); subnormal (of the dtype); nonfinite (normal, but the
    tokens in `poisoned` hold NaN, Inf and −Inf). shared: a weight, which cancelling repeats instead of negating and
    the last two kinds leave normal.
    """
    there = {"generator": g, "device": g.device}
    x = torch.randn(shape, **there)
    small = dtype == torch.float16
    if kind == "wide":
        x *= powers(shape, *((-10, 5) if small else (-20, 21)), g)
    elif kind == "cancelling":
        cancel(x, shared)
    elif kind == "signed_zeros":
        x = torch.where(torch.rand(shape, **there) < 0.5, 0.0 * x, x)
    elif kind == "subnormal" and not shared:
        x *= 2.0 ** (-17 if small else -128)
    x = x.to(dtype)
    if kind == "nonfinite" and not shared and poisoned is not None:
        rows = poisoned.nonzero().flatten()
        for offset, value in enumerate(POISON):
            x[rows[offset :: len(POISON)]] = value if dtype.is_floating_point else 1
        spared = torch.rand(shape, **there) < 0.25  # a poisoned token keeps some numbers
        x[spared & poisoned.reshape(-1, *[1] * (x.dim() - 1))] = 1.0
    return x


def cancel(x: torch.Tensor, shared: bool = False) -> None:
    """Makes sums over the last dimension grow and then vanish, in place: see `draw`."""
    half = x.shape[-1] // 2
    if shared:
        x[..., half : 2 * half] = x[..., :half]
    else:
        x[..., 7::8] *= 2.0**-12
        kept = (torch.arange(2 * half, device=x.device).view(2, half) % 8 != 7).all(0)
        x[..., half : 2 * half] = torch.where(kept, -x[..., :half], x[..., half : 2 * half])


def draw_integers(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator, shared: bool = False) -> torch.Tensor:
    """Returns integers of which every sum of products is exact: see the contract.

    Tokens are as large as the dtype allows, odd, and the second half of their features negates the first; a weight
    repeats its first half, but for one feature. Features at which a weight is 0 keep sums within what fp32 holds.
    """
    x = torch.randint(0, 2**30, shape, generator=g, device=g.device)
    limits, half, n = SWEEP[INTEGERS], shape[-1] // 2, shape[-1]
    largest = limits["largest"][dtype_name(dtype)]
    of_weight = 1 if dtype == torch.float32 else largest
    if not shared:
        x = (largest - 2 * (x % (largest // 4 + 1))) * (1 - 2 * (x // 2**20 % 2))
        x[..., half : 2 * half] = -x[..., :half]
        return x.to(dtype)
    x = x % (2 * of_weight + 1) - of_weight
    if x.dim() > 1:
        x *= torch.arange(n, device=x.device) % half % -(-n * largest * (of_weight + 1) // limits["sums"]) == 0
        x[..., half : 2 * half] = x[..., :half]
        rows = x.view(-1, n)
        at = torch.arange(len(rows), device=x.device)
        rows[at, half + at % half] += 1
    return x.to(dtype)


def draw_ids(kind: str, shape: tuple[int, ...], vocab: int, g: torch.Generator) -> torch.Tensor:
    """Token ids below `vocab`: a few that repeat a lot; over the whole vocabulary (wide); the same one everywhere
    (signed_zeros)."""
    if kind == "signed_zeros":
        return torch.full(shape, min(7, vocab - 1), device=g.device)
    there = {"generator": g, "device": g.device}
    few, anywhere = (torch.randint(0, below, shape, **there) for below in (min(vocab, 11), vocab))
    return anywhere if kind == "wide" else torch.where(torch.rand(shape, **there) < 0.7, few, anywhere)
