"""Products of the same operands that differ in one thing each: what GEMM remembers of one must not serve another."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from bi_kernels.audit.compare import Drift, compare, joined
from bi_kernels.audit.layouts import unaligned
from bi_kernels.checks import is_hopper
from bi_kernels.ops.gemm import gemm, kernel, launch_cache

SIZES = {"cpu": [(48, 16, 32)], "cuda": [(48, 16, 32), (128, 512, 256), (512, 4096, 512)]}  # M, N, K
FP32 = torch.float32
# what tells products apart: one that is remembered, and one that is taken for it where this is forgotten
TOLD_APART = {
    "the dtype of y": ("plain", "plain, in fp32"),
    "the bias": ("plain", "bias"),
    "the dtype of bias": ("bias", "bias of fp32"),
    "the strides of x": ("plain", "x turned"),
    "the strides of w": ("plain", "w turned"),
    "the rows": ("plain", "fewer rows"),
    "the columns": ("plain", "fewer columns"),
    "the dtype of x": ("plain", "of other 16 bits"),
}


def asked(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, tuple]:
    """Draws x (M, K), w (N, K) and bias (N,); returns what is asked of them, by name: x, w, bias, and a dict of what
    the product is told besides: `out_dtype`, `start`, `out`."""
    (m, n, k), g = sizes, torch.Generator().manual_seed(seed)
    draw = lambda *shape, of=dtype: torch.randn(shape, generator=g).to(device, of)
    # with memory behind them: what a key confuses may read on
    x, w, bias, start = draw(2 * m, k)[:m], draw(2 * n, k)[:n], draw(n), draw(m, n, of=FP32)
    wider, by_half = lambda t: torch.cat((t, -t), 1)[:, :k], lambda t: unaligned(t, 8 // t.element_size())
    turned = lambda t: t.t().contiguous().t()
    strided = torch.stack([bias, torch.full_like(bias, torch.nan)], -1)[:, 0]
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    operands = {
        "plain": (x, w, None),
        "bias": (x, w, bias),
        "bias of fp32": (x, w, draw(n, of=FP32)),
        "bias, unaligned": (x, w, unaligned(bias)),
        "bias at 8 bytes": (x, w, by_half(bias)),
        "bias, strided": (x, w, strided),
        "x turned": (turned(x), w, None),
        "w turned": (x, turned(w), None),
        "both turned": (turned(x), turned(w), None),
        "x unaligned": (unaligned(x), w, None),
        "w unaligned": (x, unaligned(w), None),
        "x at 8 bytes": (by_half(x), w, None),
        "w at 8 bytes": (x, by_half(w), None),
        "x of wider rows": (wider(x), w, None),
        "w of wider rows": (x, wider(w), None),
        "x of three dimensions": (x.unflatten(0, (2, -1)), w, None),
        "fewer rows": (x[: m - 8], w, None),
        "fewer columns": (x, w[: n // 2], None),
        "of other 16 bits": (x.to(other), w.to(other), None),
    }
    told = {
        "start": {"start": start},
        "start, in fp32": {"start": start, "out_dtype": FP32},
        "out": {"out": torch.empty_like(start, dtype=dtype)},
        "out of fp32": {"out": torch.empty_like(start), "out_dtype": FP32},
        "start and out": {"start": start, "out": torch.empty_like(start), "out_dtype": FP32},
    }
    every = {name: (*of, {}) for name, of in operands.items()}
    every |= {f"{name}, in fp32": (*of, {"out_dtype": FP32}) for name, of in operands.items()}
    return every | {name: (x, w, None, more) for name, more in told.items()}


def in_a_thread(products: Iterable[tuple], key: Callable | None = None) -> list[list[Tensor]]:
    """Returns of each product that is `asked` what it is when called twice, and when looked up if it can be, one after
    the other in a thread that remembers none before.

    What a CPU computes is remembered here, as sm_90's programs remember of which nothing has to be copied; with a `key`
    of x, w, bias and out_dtype what a GPU does too, by that key."""
    with ThreadPoolExecutor(1) as thread:
        return list(thread.map(partial(_computed, key), products))


def _computed(key: Callable | None, given: tuple) -> list[Tensor]:
    *operands, told = given
    x, w, bias = operands
    looked_up = not told.keys() & {"start", "out"}
    found, kind = [], (*operands, told.get("out_dtype"))
    with torch.cuda.device_of(x):
        rows = x.flatten(0, -2)
        for _ in range(2):
            out = told["out"].fill_(torch.nan) if "out" in told else None
            y = gemm._launch(*operands, **told)
            found += [y.clone()] if out is None else [y.clone(), out.clone()]
            straight = kernel.tma_ready(rows) is rows and kernel.tma_ready(w) is w
            if looked_up and (key or x.device.type == "cpu") and straight:
                launch_cache.remember((key or launch_cache.kind_of)(*kind), _straight(*kind))
        y = launch_cache.cached_launch(*kind) if looked_up else None
    return found if y is None else [*found, y]


def _straight(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Callable:
    """Returns what computes products of operands that lie as these do: told addresses alone, which it rounds down."""
    lead, x = x.shape[:-1], x.flatten(0, -2)
    lie = [(x.dtype, x.shape, x.stride()), (w.dtype, w.shape, w.stride())]
    lie.append(bias if bias is None else (bias.dtype, bias.shape, (1,)))
    tile = kernel.FP32_TILE if x.dtype == FP32 else kernel.INTERPRETED

    def read(t: Tensor, dtype: torch.dtype, shape: tuple, strides: tuple) -> Tensor:
        behind = t.data_ptr() % 16 // t.element_size()
        return t.view(dtype).as_strided(shape, strides, t.storage_offset() - behind)

    launch = lambda *given: kernel.launch(*[at and read(t, *at) for t, at in zip(given, lie)], tile, out_dtype)
    return lambda *given: launch(*given).unflatten(0, lead)


def differing(found: list[Tensor], alone: Tensor) -> Drift:
    """Compares what a product was, each time, with what it is alone: in another dtype or shape all of it differs."""
    alike = lambda y: (y.dtype, y.shape) == (alone.dtype, alone.shape)
    return joined([compare(y, alone) if alike(y) else Drift(*[alone.numel()] * 2) for y in found])


def alone(every: dict[str, tuple]) -> dict[str, Tensor]:
    """Returns what each product is where nothing came before it: in a thread of its own, choices and launches
    forgotten."""
    found = {}
    for name, given in every.items():
        for kept in _kept(given[0].device):
            kept.cache_clear()
        found[name] = in_a_thread([given])[0][0]
    return found


def _kept(device: torch.device) -> list:
    """Returns what remembers choices and launches for all threads."""
    on_hopper = [import_module("bi_kernels.ops.gemm.hopper")._launch_for] if is_hopper(device) else []
    return [gemm.cheapest, kernel._launch_for, *on_hopper]  # the interpreter knows no Gluon


def confused(before: tuple, after: tuple) -> list[Tensor]:
    """Returns what a product is after one that a key takes for it."""
    *operands, told = after
    return in_a_thread([before, after], lambda *_: launch_cache.kind_of(*operands, told.get("out_dtype")))[1]


def names() -> list[str]:
    """Returns the names of all that is `asked`."""
    return [*asked((2, 1, 1), FP32, torch.device("cpu"))]
