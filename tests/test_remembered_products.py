"""A product that is looked up has the bits of one that is asked for the first time, whatever was asked in between: what
a GPU's programs remember (ops/gemm/again.py) is remembered of a CPU's here."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from test_remembered import BF16, FP32, made, same, strided, unaligned

from bi_kernels.ops.gemm import again, gemm, kernel

X, W, BIAS, START = made(48, 32), made(16, 32, seed=1), made(16, seed=2), made(48, 16, dtype=FP32, seed=3)
turned = lambda t: t.t().contiguous().t()
# what is asked of the same operands: x, w and bias, and what the product is told
ASKED = {
    "plain": (X, W, None, {}),
    "in fp32": (X, W, None, {"out_dtype": FP32}),
    "bias": (X, W, BIAS, {}),
    "bias, in fp32": (X, W, BIAS, {"out_dtype": FP32}),
    "bias of fp32": (X, W, BIAS.float() / 3, {}),
    "bias of fp32, in fp32": (X, W, BIAS.float() / 3, {"out_dtype": FP32}),
    "bias, unaligned": (X, W, unaligned(BIAS), {}),
    "bias, strided": (X, W, strided(BIAS), {}),
    "start": (X, W, None, {"start": START}),
    "start, in fp32": (X, W, None, {"start": START, "out_dtype": FP32}),
    "out": (X, W, None, {"out": BF16}),
    "out of fp32": (X, W, None, {"out": FP32, "out_dtype": FP32}),
    "start and out": (X, W, None, {"start": START, "out": FP32, "out_dtype": FP32}),
    "x turned": (turned(X), W, None, {}),
    "w turned": (X, turned(W), None, {}),
    "both turned, in fp32": (turned(X), turned(W), None, {"out_dtype": FP32}),
    "x unaligned": (unaligned(X), W, None, {}),
    "w unaligned": (X, unaligned(W), None, {}),
    "fewer rows": (X[:40], W, None, {}),
    "fewer columns": (X, W[:8], None, {}),
    "fp16": (X.half(), W.half(), None, {}),
}
LOOKED_UP = [k for k in ASKED if not any(word in k for word in ("start", "out", "unaligned", "strided"))]


def asked(name: str) -> torch.Tensor:
    x, w, bias, told = ASKED[name]
    into = {"out": torch.full((len(x), len(w)), 7.0, dtype=told["out"])} if "out" in told else {}
    y = gemm._launch(x, w, bias, **told | into)
    return into.get("out", y)


def in_a_new_thread(names: Sequence[str]) -> list[torch.Tensor]:
    """Returns what is asked one after the other in a thread, which has no product to remember."""
    with ThreadPoolExecutor(1) as thread:
        return list(thread.map(asked, names))


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    """Returns what each is in a thread of its own, where the process remembers nothing either."""
    found = {}
    for name in ASKED:
        for kept in (gemm.cheapest, kernel._launch_for):
            kept.cache_clear()
        (found[name],) = in_a_new_thread([name])
    return found


def read(t: torch.Tensor, dtype: torch.dtype, shape: tuple, strides: tuple) -> torch.Tensor:
    """Reads the memory of `t` as a program does that knows its address, rounded down, and nothing else of it."""
    behind = t.data_ptr() % 16 // t.element_size()
    return t.view(dtype).as_strided(shape, strides, t.storage_offset() - behind)


@pytest.fixture
def replayed(monkeypatch) -> list:
    """Remembers products as sm_90's programs do, of which nothing had to be copied. Lists those that were looked up."""
    found = []

    def straight(lie: list, tile, out_dtype: torch.dtype | None, *given: torch.Tensor | None) -> torch.Tensor:
        found.append(out_dtype)
        return kernel.launch(*[at if at is None else read(t, *at) for t, at in zip(given, lie)], tile, out_dtype)

    def launch(x, w, bias, tile, out_dtype=None, start=None, out=None) -> torch.Tensor:
        if start is None and out is None and kernel.tma_ready(x) is x and kernel.tma_ready(w) is w:
            lie = [(t.dtype, t.shape, t.stride()) for t in (x, w)]
            lie.append(bias if bias is None else (bias.dtype, bias.shape, (1,)))
            again.remember(again.kind_of(x, w, bias, out_dtype), partial(straight, lie, tile, out_dtype))
        return kernel.launch(x, w, bias, tile, out_dtype, start, out)

    monkeypatch.setattr(gemm, "launch", launch)
    return found


def differing(names: Sequence[str], alone: dict[str, torch.Tensor]) -> set[str]:
    """Returns those that do not have the bits, after those before them, that they have alone."""
    pairs = {k: (y, alone[k]) for k, y in zip(names, in_a_new_thread(names))}
    return {k for k, (y, z) in pairs.items() if (y.dtype, y.shape) != (z.dtype, z.shape) or not same(y, z)}


@pytest.mark.parametrize("kinds", [again.KINDS, 1, 3])
@pytest.mark.parametrize("names", [[*ASKED], [*ASKED][::-1]], ids=["in order", "backwards"])
def test_a_product_after_others_has_the_bits_that_it_has_alone(names, kinds, alone, replayed, monkeypatch):
    monkeypatch.setattr(again, "KINDS", kinds)
    assert differing([name for name in names for _ in range(2)], alone) == set()
    assert len(replayed) >= len(LOOKED_UP)
    assert differing(names * 2, alone) == set()


# what a key forgets, and a product that has another's bits then, that of the one before it
FORGOTTEN = {
    "the dtype of y": (lambda x, w, bias, _: (x, w, bias, None), "plain", "in fp32"),
    "the bias": (lambda x, w, bias, out: (x, w, None, out), "plain", "bias"),
    "the dtype of bias": (lambda x, w, bias, out: (x, w, bias.bfloat16(), out), "bias", "bias of fp32"),
    "the strides of x": (lambda x, w, bias, out: (x.contiguous(), w, bias, out), "plain", "x turned"),
    "the strides of w": (lambda x, w, bias, out: (x, w.contiguous(), bias, out), "plain", "w turned"),
    "the rows": (lambda x, w, bias, out: (x[:1], w, bias, out), "plain", "fewer rows"),
    "the columns": (lambda x, w, bias, out: (x, w[:1], bias, out), "plain", "fewer columns"),
    "the dtype of x": (lambda x, w, bias, out: (x.bfloat16(), w, bias, BF16), "plain", "fp16"),
}


@pytest.mark.parametrize("forget, before, name", FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_key_that_forgets_is_found(forget, before, name, alone, replayed, monkeypatch):
    whole = again.kind_of
    assert differing([before, name], alone) == set() and not replayed
    monkeypatch.setattr(again, "kind_of", lambda *given: whole(*forget(*given)))
    assert differing([before, name], alone) == {name} and replayed


@pytest.mark.parametrize("name", ["x unaligned", "w unaligned", "bias, unaligned", "bias, strided"])
def test_a_lookup_that_does_not_see_where_tensors_lie_is_found(name, alone, replayed, monkeypatch):
    blind = lambda *given: (run := vars(again._thread).get(again.kind_of(*given))) and run(*given[:3])
    before = "bias" if "bias" in name else "plain"
    assert differing([before, name], alone) == set() and not replayed
    monkeypatch.setattr(gemm, "again", blind)
    assert differing([before, name], alone) == {name} and replayed
