"""Batch-invariant GEMM: `linear` and `matmul`, bf16, fp16 and fp32, fp32 accumulation.

y is one left fold over K in slabs of 16, whatever the tile (see kernel.py). Rounding points: the fp32 sum, the
fp32 sum plus bias, then once to the output dtype.

Backward: dX = dY W is the same product, its sum over N. dW = dYᵀ X and dbias = 1ᵀ dY are left folds over slabs of 16
tokens in the order of the token layout (bi_kernels.tokens), which continue from `main_grad` where the parameter has
one.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from bi_kernels.checks import check, check_shape, is_hopper, memory_peak, once
from bi_kernels.compat import is_recorded
from bi_kernels.launch import cached
from bi_kernels.op import Op, writes
from bi_kernels.ops.gemm.cost import PipelineConfig, Tile, best_cut, tile_for, way_for
from bi_kernels.ops.gemm.hopper_cublaslt import LIBRARY, serves, waves
from bi_kernels.ops.gemm.hopper_cublaslt import launch as launch_library
from bi_kernels.ops.gemm.kernel import FP32_TILE, INTERPRETED, launch
from bi_kernels.ops.gemm.launch_cache import cached_launch, remember_view
from bi_kernels.tokens import consume_zero_flag, gradient_of, layout_of, training_arguments, warn_unlaid_micro_batch


@cached
def cheapest(
    sizes: tuple[int, int, int],
    strides: tuple[tuple[int, int], tuple[int, int]],
    continues: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> tuple[Tile | PipelineConfig | str, int]:
    """Returns what computes a product x wᵀ of (M, N, K) with the strides of x and w, dtypes of x and y, and the column
    at which it is cut in two products (0: it is not); no choice changes a bit. Raises LookupError where the library
    cannot be asked now."""
    (M, N, K), transposed = sizes, (strides[0][1] != 1, strides[1][1] != 1)
    if dtypes[0] == torch.float32:
        return FP32_TILE, 0
    use = "fold" if continues else "columns" if all(transposed) else "rows"
    rings, library, peak = is_hopper(device), serves(device) and not continues, memory_peak(device)

    def way(columns: int, peak: float = 0) -> tuple[float, PipelineConfig | None]:
        filled = waves((M, columns, K), strides, dtypes, device, kept=columns == N) if library else None
        return way_for(M, columns, K, use, transposed, rings, filled, peak)

    us, ring = way(N, peak)
    if us:  # cut as on the GPU of the fit: waves are too coarse a guess where memory is faster
        return ring or LIBRARY, 0 if continues else best_cut(N, lambda columns: way(columns)[0])
    if device.type == "cpu":
        return INTERPRETED, 0
    return tile_for(M, N, K, use, transposed, peak), 0


def _launch(x, w, bias, out_dtype: torch.dtype | None = None, start=None, out=None) -> Tensor:
    """Launches the program that is the cheapest for a product; see kernel.launch. x (…, K): of more than two
    dimensions only where it is contiguous, without `start` and `out`."""
    if start is None and out is None and not is_recorded() and (y := cached_launch(x, w, bias, out_dtype)) is not None:
        return y
    (N, K), flat = w.shape, x.dim() == 2
    M, strides = (x.shape[0], x.stride()) if flat else (x.numel() // K, (K, 1))
    dtypes = x.dtype, out_dtype or x.dtype
    try:
        way, cut = cheapest((M, N, K), (strides, w.stride()), start is not None, dtypes, x.device)
    except LookupError:
        way, cut = tile_for(M, N, K, "rows"), 0
    if not flat:
        y = launch_library(x, w, bias, out_dtype) if way is LIBRARY and not cut and not is_recorded() else None
        if y is None:
            y = _launch(flat := x.view(M, K), w, bias, out_dtype).resize_(*x.shape[:-1], N)
            remember_view(x, flat, w, bias, out_dtype)
        return y
    if cut:
        return _in_two(x, w, bias, dtypes[1], start, out, cut)
    if way is LIBRARY:
        if not is_recorded() and (y := launch_library(x, w, bias, out_dtype, out)) is not None:
            return y
        way = tile_for(M, N, K, "rows")  # as whoever records launches sees only Triton's
    if isinstance(way, PipelineConfig) and (start is None or out is None or out.stride() == start.stride()):
        return _ring()(x, w, bias, way, out_dtype, start, out)
    return launch(x, w, bias, way if isinstance(way, Tile) else tile_for(M, N, K, "fold"), out_dtype, start, out)


def _in_two(x, w, bias, out_dtype, start, out, cut: int) -> Tensor:
    """Computes the columns of y below and from `cut` on, one after the other."""
    y = x.new_empty(len(x), len(w), dtype=out_dtype) if out is None else out
    for part in (slice(0, cut), slice(cut, None)):
        of_bias, of_start = None if bias is None else bias[part], None if start is None else start[:, part]
        _launch(x, w[part], of_bias, out_dtype, of_start, y[:, part])
    return y


@cache
def _ring() -> Callable:
    from bi_kernels.ops.gemm.hopper import launch as launch_ring  # noqa: PLC0415  (the interpreter knows no Gluon)

    return launch_ring


def product(
    x: Tensor, w: Tensor, start: Tensor | None = None, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """start + x (M, K) wᵀ (N, K), by the cheapest program: a left fold over K, which may continue an earlier call's."""
    (M, K), N = x.shape, w.shape[0]
    if M == 0 or N == 0 or K == 0:
        y = x.new_zeros(M, N, dtype=out_dtype or x.dtype) if start is None else start.to(out_dtype or start.dtype)
        return y if out is None else out.copy_(y)
    return _launch(x, w, None, out_dtype, start, out)


@writes("out")
def _fold(dy, x, layout, out, continues: bool) -> None:
    """out (columns of dy, columns of x) = Σ_t dy[t]ᵀ x[t], tokens folded in the layout's order, on from what is there
    if it `continues`."""
    layout = layout_of(layout)
    dy, x, into = layout.gather(dy), layout.gather(x), out.view(dy.shape[1], x.shape[1])
    product(dy.t(), x.t(), into if continues and not consume_zero_flag(out) else None, into, out.dtype)


def fold_weight(op: str, dy, x, weight, layout, name: str = "weight", buffer=None) -> Tensor | None:
    """dW (columns of dy, columns of x) = Σ_t dy[t]ᵀ x[t], tokens folded in the layout's order: into weight.main_grad,
    or returned in weight's dtype where there is none."""
    out, continues = gradient_of(op, weight, name, buffer)
    _fold(dy, x, layout, out, continues)
    return None if continues else out


def fold_bias(op: str, dy, bias, layout, name: str = "bias", buffer=None) -> Tensor | None:
    """dbias (N,) = Σ_t dy[t], likewise: the product of dy with a column of ones."""
    return fold_weight(op, dy.new_ones(len(dy), 1), dy, bias, layout, name, buffer)


def _gemm(x, w, bias, across: bool, layout=None, weight_buffer=None, bias_buffer=None) -> Tensor:
    """Returns x (…, K) times w, which is (N, K), or (K, N) `across`, as matmul is given it; what follows is for the
    backward."""
    if across:
        w = w.t()
    (N, K), lead = w.shape, x.shape[:-1]
    if 0 in lead or N == 0:
        return x.new_empty(*lead, N)
    if K == 0:  # an empty sum is +0
        return x.new_zeros(*lead, N) if bias is None else (bias + torch.zeros_like(bias)).repeat(*lead, 1)
    x = x if x.dim() == 2 else x.contiguous()
    return _launch(x, w, bias)


def _fake(x, w, bias, across, *_):
    return x.new_empty(*x.shape[:-1], w.shape[across])


def _save(ctx, inputs, y):
    x, weight, bias, ctx.across, ctx.layout, *ctx.buffers = inputs
    ctx.parameters = weight, bias  # a saved tensor may come back without main_grad, as under checkpointing
    ctx.save_for_backward(x, weight)


def _backward(ctx, dy):
    (x, weight), (parameter, bias), across = ctx.saved_tensors, ctx.parameters, ctx.across
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx = _linear.raw(dy, weight, None, not across) if needs_x else None
    dy, x = (t.reshape(t.shape[:-1].numel(), t.shape[-1]) for t in (dy, x))
    of_weight, of_bias = ctx.buffers
    op, name, *pair = ("matmul", "b", x, dy) if across else ("linear", "weight", dy, x)
    dw = fold_weight(op, *pair, parameter, ctx.layout, name, of_weight) if needs_weight else None
    db = fold_bias(op, dy, bias, ctx.layout, "bias", of_bias) if needs_bias else None
    return dx, dw, db, *[None] * 4


_linear = Op("gemm", _gemm, _backward, _fake, _save)


def _apply(op: str, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, across: bool) -> Tensor:
    def training() -> tuple:
        layout, *buffers = training_arguments(op, x, 1, **{name: weight, "bias": bias})
        if not torch.compiler.is_compiling():
            warn_unlaid_micro_batch(op, layout, *[p for p in (weight, bias) if p is not None and p.requires_grad])
        return layout, *buffers

    return _linear(x, weight, bias, across, training=training)


@once
def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises what `linear` does for these arguments."""
    check("linear", optional=("bias",), x=x, weight=weight, bias=bias)
    if weight.dim() != 2:
        raise ValueError(f"linear: weight has shape {tuple(weight.shape)}, expected two dimensions (N, K)")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: x has shape {tuple(x.shape)}, expected (..., {weight.shape[1]}) to match weight "
            f"{tuple(weight.shape)}"
        )
    if bias is not None:
        check_shape("linear", "bias", bias, weight.shape[:1], "the rows of weight")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) times weightᵀ, weight (N, K), plus bias (N,): (..., N) in the dtype of x, fp32 accumulation.

    The bits of a row of y and of dx depend on that row of x and dy, on weight and on bias alone; those of dW and dbias
    on the tokens in the order of the token layout. bf16, fp16 or fp32, any strides.
    Raises TypeError for another dtype, ValueError for shapes or devices that do not match.
    """
    check_linear(x, weight, bias)
    return _apply("linear", "weight", x, weight, bias, across=False)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (..., M, K) times b (K, N): (..., M, N). The same product as `linear(a, b.T)`, bit for bit, and so its
    gradients."""
    check("matmul", a=a, b=b)
    if b.dim() != 2 or a.dim() < 2 or a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"matmul: a has shape {tuple(a.shape)} and b {tuple(b.shape)}, expected (..., M, K) and (K, N)"
        )
    return _apply("matmul", "b", a, b, None, across=True)
