"""Computes products under a recipe, in a process of its own: M rows in one call beside the same rows of the largest.

A reproducer holds the text of the functions here that compute, so they need torch and nothing else.
"""

import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.clock import DeviceClock, OperatorCounter, time_in_turns
from bi_kernels.audit.compare import compare
from bi_kernels.audit.controls.forward import row_count, split_k_by_m
from bi_kernels.audit.findings import sentence
from bi_kernels.audit.inputs import cancel
from bi_kernels.contract import CONTRACT, DTYPES, linears, rows

STOCK = "torch.nn.functional:linear"


def numbers(m, n, k, dtype, device, seed):
    """Draws x (m, k), w (n, k) and dy (m, n), whose sums over k and over n grow and then vanish."""
    g = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, device=device)
    w = draw(n, k)
    cancel(w, shared=True)
    cancel(w.t(), shared=True)
    w = w.to(dtype)
    x = draw(m, k)
    cancel(x)
    x = x.to(dtype)
    dy = draw(m, n)
    cancel(dy)
    return x, w, dy.to(dtype)


def forward(linear, x, w, dy):
    with torch.no_grad():
        return linear(x, w)


def gradient(linear, x, w, dy):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(linear(x, w), x, dy)[0]


def without_split():
    """Has cuBLASLt compute what cuBLAS would, and keeps it from splitting K."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
    except (TypeError, RuntimeError) as error:
        said = "takes no pair (allow_reduced_precision, allow_splitk) in its reduced-precision settings"
        raise RuntimeError(f"torch {torch.__version__} {said}; expected 2.10 or newer") from error


DIRECTIONS: dict[str, Callable] = {"forward": forward, "dX": gradient}


@dataclass(frozen=True)
class Recipe:
    """A way to compute a linear layer."""

    name: str
    what: str  # that it does, in a table
    environment: Mapping[str, str] = field(default_factory=dict)  # set before torch starts
    told: Callable | None = None  # what torch is told then, on a GPU
    linear: str = STOCK


PLAIN = Recipe("plain cuBLAS", "torch as it is")
STARVED = Recipe("starved cuBLAS", "little workspace to split in", CONTRACT["benchmark"]["gemm"]["environment"])
UNSPLIT = Recipe("cuBLASLt without a split", "torch's own settings, since 2.10", told=without_split)
BOTH = Recipe(
    "both together",
    "little workspace and cuBLASLt without a split, as vLLM's batch-invariant mode has them on Hopper",
    STARVED.environment,
    without_split,
)
OURS = Recipe("bi_kernels", "one fold over K, by any program", linear="bi_kernels:linear")
THEIRS = PLAIN, STARVED, UNSPLIT, BOTH
ON_A_CPU = Recipe("torch's linear on a CPU", "another library, which no recipe reaches")
BROKEN = Recipe(
    "linear in halves of K and of N for 64 rows or fewer", "broken on purpose", linear=f"{__name__}:halves_by_m"
)


def halves_by_m(x: Tensor, weight: Tensor) -> Tensor:
    """Splits K for few rows, and the layer's columns, so that the halves of dX are added in the dtype of x."""
    return torch.cat([split_k_by_m(x, part) for part in weight.chunk(2 if row_count(x) <= 64 else 1)], -1)


def settings(shapes: str) -> dict:
    """Returns the contract's [recipes] at a shape set, and the row counts and (N, K) that it comes to."""
    table = CONTRACT["recipes"]
    table = {k: v for k, v in (table | (table["tiny"] if shapes == "tiny" else {})).items() if k != "tiny"}
    counts = [m for m in rows(table["largest"]) if m < table["largest"]]
    return table | {
        "rows": counts,
        "shapes": linears(shapes) | {name: tuple(nk) for name, nk in table["shapes"].items()},
    }


def measured(recipe: Recipe, told: dict) -> list[dict]:
    """Returns the `cells` of a recipe, for the process that it is alone in. Raises RuntimeError where this torch does
    not know the recipe."""
    for name in STARVED.environment.keys() - recipe.environment.keys():
        os.environ.pop(name, None)  # the user's own; cuBLAS reads them when it is first called
    if recipe.told and told["device"] == "cuda":
        recipe.told()
    return list(cells(recipe, told))


def cells(recipe: Recipe, told: dict) -> Iterator[dict]:
    """Yields {case, direction, M, drift}, {case, direction, M, ms}, and {case, direction, why} of what raised.

    told: of `settings` rows, largest, timed and shapes; device, dtype, seed.
    """
    module, _, name = recipe.linear.partition(":")
    linear = getattr(importlib.import_module(module), name)
    device, dtype = torch.device(told["device"]), DTYPES[told["dtype"]]
    for case, (n, k) in told["shapes"].items():
        for direction in DIRECTIONS:
            said = {"case": case, "direction": direction}
            try:
                given = numbers(told["largest"], n, k, dtype, device, told["seed"])
                for m, drift in drifts(linear, DIRECTIONS[direction], given, told["rows"]):
                    yield said | {"M": m, "drift": drift}
                del given
                for m in told["timed"]:
                    yield said | {"M": m, "ms": _ms(linear, direction, (m, n, k), dtype, device)}
            except Exception as error:  # of one shape: the others are asked all the same
                yield said | {"why": sentence(error)}
            if device.type == "cuda":
                torch.cuda.empty_cache()


def drifts(linear: Callable, call: Callable, given: tuple, counts: list[int]) -> Iterator[tuple]:
    """Yields (M, drift) of the first M rows in a call of their own, against the same rows of the largest."""
    x, w, dy = given
    whole = call(linear, x, w, dy)
    for m in counts:
        yield m, compare(call(linear, x[:m], w, dy[:m]), whole[:m])


def _ms(linear: Callable, direction: str, shape: tuple, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the median milliseconds of a GPU for one product, whose inputs are not in its cache; on a CPU, torch's
    operators in a call."""
    table, (m, n, k), on_gpu = CONTRACT["benchmark"], shape, device.type == "cuda"
    sets = math.ceil(table["cold_bytes"] / (2 * (m * k + n * k + m * n))) if on_gpu else 1
    draw = lambda *size: [torch.randn(size, device=device, dtype=dtype) for _ in range(sets)]
    xs, ws = draw(m, k), draw(n, k)
    if direction == "forward":
        call = lambda i: forward(linear, xs[i % sets], ws[i % sets], None)
    else:
        dys = draw(m, n)
        ys = [linear(x.requires_grad_(), w) for x, w in zip(xs, ws)]
        of = lambda at: torch.autograd.grad(ys[at], xs[at], dys[at], retain_graph=True)
        call = lambda i: of(i % sets)
    how = {name: table[name] for name in ("rounds", "round_ms", "most_calls")}
    clock = DeviceClock() if on_gpu else OperatorCounter()
    return time_in_turns({"": call}, clock, sets=sets, walls=0, **how)[""].device.median
