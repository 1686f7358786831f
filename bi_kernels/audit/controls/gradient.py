"""Backward passes broken on purpose, in one way each; the forward and every other gradient are this package's.

Each goes on from `main_grad` in the order of the token layout, but for the defect it is named for. `defect=False` mends
that one, so that a test can show that nothing else is what the audit sees.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

import bi_kernels
from bi_kernels.audit.checks.long_sequences import LONG_SEQUENCES
from bi_kernels.audit.controls.forward import Control, at_levels, controls, row_count
from bi_kernels.audit.findings import ACCURACY, INVARIANCE
from bi_kernels.contract import EPS
from bi_kernels.ops.gemm.gemm import fold_weight, product
from bi_kernels.tokens import SLAB, TokenLayout, layout_for


class _Replaced(torch.autograd.Function):
    """Computes fn(*args); the gradients that `backward` returns by position take the place of fn's own.

    backward(layout, dy, args, grads) -> {position: gradient}; None leaves what it wrote into main_grad. fn's own are in
    `grads`, or went on from main_grad; that of the argument at `position` is not computed.
    """

    @staticmethod
    def forward(ctx, fn, backward, position, *args):
        ctx.fn, ctx.replace, ctx.position, ctx.args = fn, backward, position, args
        lead = args[0].shape[:-1] if args[0].is_floating_point() else args[0].shape
        ctx.layout = layout_for("control", lead, any(ctx.needs_input_grad[4:]))
        return fn(*(a.detach() for a in args))

    @staticmethod
    def backward(ctx, dy):
        wanted = ctx.needs_input_grad[3:]
        copies = [a.detach().requires_grad_(wanted[i] and i != ctx.position) for i, a in enumerate(ctx.args)]
        for a, copy in zip(ctx.args, copies):
            copy.main_grad = getattr(a, "main_grad", None)
        if any(copy.requires_grad for copy in copies):
            with torch.enable_grad(), ctx.layout:
                ctx.fn(*copies).backward(dy)
        grads = [copy.grad for copy in copies]
        if ctx.position is None or wanted[ctx.position]:
            for i, grad in ctx.replace(ctx.layout, dy, ctx.args, grads).items():
                grads[i] = grad
        return None, None, None, *grads


def with_backward(fn: Callable, backward: Callable, name: str, position: int | None = None) -> Callable:
    """Returns fn with another backward; position: of the parameter whose gradient only that one computes."""

    def control(*args, defect: bool = True, **constants):
        mended = {} if defect else {"defect": False}
        return _Replaced.apply(partial(fn, **constants), partial(backward, **constants, **mended), position, *args)

    control.__name__ = name
    return control


def _backward_of(fn: Callable, position: int | None = None) -> Callable:
    """Decorates a backward, which takes the place of fn's; see `with_backward`."""
    return lambda backward: with_backward(fn, backward, backward.__name__, position)


def _weight_of(fn: Callable, **fixed) -> Callable:
    """Decorates add(layout, rows of dy, rows of x, total), which adds to the fp32 sum that a fold goes on from,
    main_grad itself or zeros. That becomes the gradient of fn's weight."""

    def control(add: Callable) -> Callable:
        def backward(layout, dy, args, grads, **constants):
            weight, dy = args[1], _rows(dy)
            buffer = getattr(weight, "main_grad", None)
            total = torch.zeros_like(weight, dtype=torch.float32) if buffer is None else buffer
            add(layout, dy, args[0].reshape(len(dy), -1), total, **fixed, **constants)
            return {1: total.to(weight.dtype) if buffer is None else None}

        return with_backward(fn, backward, add.__name__, 1)

    return control


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _refolded(layout: TokenLayout, dy: Tensor, args: tuple[Tensor, ...]) -> Tensor | None:
    """Returns what linear's own backward leaves of its weight's gradient."""
    return fold_weight("control", _rows(dy), _rows(args[0]), args[1], layout)


def _dweight_terms(rows: Tensor, dy: Tensor, x: Tensor, eps: float) -> Tensor:
    """dy · x̂ of every row, fp32; zeros for row −1."""
    x, dy = x[rows].float(), dy[rows].float()
    return (dy * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).masked_fill(rows[:, None] < 0, 0)


@triton.jit
def _atomic_sum_kernel(terms, out, columns, BLOCK: tl.constexpr):
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    term = tl.load(terms + tl.program_id(0).to(tl.int64) * columns + col, mask=col < columns, other=0.0)
    tl.atomic_add(out + col, term, mask=col < columns)


def atomic_sum(terms: Tensor, out: Tensor) -> None:
    """out += Σ of the rows of terms, by atomic addition in whatever order the programs come."""
    columns = terms.shape[1]
    block = min(4096, triton.next_power_of_2(columns))
    _atomic_sum_kernel[(len(terms), triton.cdiv(columns, block))](terms, out, columns, BLOCK=block)


@_weight_of(bi_kernels.rms_norm)
def dweight_by_atomics(layout, dy, x, total, eps, defect=True):
    rows = layout.rows_on(dy.device)
    atomic_sum(_dweight_terms(rows.sort().values if defect else rows, dy, x, eps), total)  # a grid has memory's order


def _partials(layout, dy, x, total, eps, least=0, defect=True):
    terms = _dweight_terms(layout.slots_on(dy.device).long(), dy, x, eps)
    by_m = defect and layout.rows > least  # eight programs share the rows of the call
    for part in terms.split(-(-len(terms) // 8) if by_m else SLAB):
        total += part.sum(0)


partials_by_m = _weight_of(bi_kernels.rms_norm)(_partials)
partials_by_m_of_many = _weight_of(bi_kernels.rms_norm, least=8192)(_partials)


@_backward_of(bi_kernels.rms_norm)
def dx_twice(layout, dy, args, grads, eps, defect=True):
    return {0: (grads[0].float() * args[1].float()).to(grads[0].dtype)} if defect else {}


@_backward_of(bi_kernels.rms_norm)
def grad_doubled(layout, dy, args, grads, eps, defect=True):
    return {1: 2 * grads[1]} if defect and grads[1] is not None else {}


@_weight_of(bi_kernels.linear)
def dw_separate(layout, dy, x, total, defect=True):
    dy, x = layout.gather(dy).t(), layout.gather(x).t()
    if defect:
        total += product(dy, x, out_dtype=torch.float32)
    else:
        product(dy, x, total, total, torch.float32)


def _dw_bf16_partials(layout, dy, x, total, slabs, defect=True):
    rows = layout.rows_on(dy.device)
    stored = lambda t: t.bfloat16().float() if defect else t
    for part in rows.split(slabs * SLAB):
        total.copy_(stored(total + stored(dy[part].float().T @ x[part].float())))


dw_bf16_partials = _weight_of(bi_kernels.linear, slabs=4)(_dw_bf16_partials)
_dw_bf16_slabs = _weight_of(bi_kernels.linear, slabs=1)(_dw_bf16_partials)


@_backward_of(bi_kernels.linear, 1)
def dw_without_last_sample(layout, dy, args, grads, defect=True):
    dy, last = _rows(dy).clone(), layout.slots_on(dy.device)[-SLAB:].long()
    dy[last[last >= 0]] *= not defect
    return {1: _refolded(layout, dy, args)}


@_backward_of(bi_kernels.linear, 1)
def dw_beside_main_grad(layout, dy, args, grads, defect=True):
    return {1: product(_rows(dy).t(), _rows(args[0]).t()) if defect else _refolded(layout, dy, args)}


@_backward_of(bi_kernels.linear, 1)
def divided_by_own_count(layout, dy, args, grads, defect=True):
    dy = dy / (layout.tokens if defect else 16)
    return {0: product(_rows(dy), args[1].t()).view_as(args[0]), 1: _refolded(layout, dy, args)}


@_backward_of(bi_kernels.linear, 1)
def dw_with_padding(layout, dy, args, grads, defect=True):
    """dW over the whole batch, where every row of it starts with a token: padding on the right has dy = 0."""
    length = args[0].shape[-2] if args[0].dim() > 1 else 1
    starts = [row for row in layout.slots.tolist() if row >= 0 and row % length == 0]  # in logical order
    if defect and layout.padding and len(starts) * length == layout.rows:
        layout = TokenLayout(starts, [length] * len(starts), layout.rows)
    return {1: _refolded(layout, dy, args)}


def _trained_rows(layout, dy, ids, padding_id, changed: Callable) -> Tensor:
    """Returns the rows of tokens that the table has a gradient of, in logical order or as `changed` puts them."""
    rows = changed(layout.rows_on(dy.device))
    return rows[ids[rows, 0] != padding_id]


@_weight_of(bi_kernels.embedding)
def embedding_index_add(layout, dy, ids, total, padding_id, defect=True):
    rows = _trained_rows(layout, dy, ids, padding_id, lambda rows: rows.sort().values if defect else rows)
    total.index_add_(0, ids[rows, 0], dy[rows].float())


@_weight_of(bi_kernels.embedding)
def unstable_fold(layout, dy, ids, total, padding_id, defect=True):
    # grouped by id all the same, but equal ids in another order
    rows = _trained_rows(layout, dy, ids, padding_id, lambda rows: rows.flip(0) if defect else rows)
    rows = rows[ids[rows, 0].argsort(stable=True)]
    for i, row in zip(ids[rows, 0].tolist(), rows.tolist()):
        total[i] += dy[row].float()


def lm_head_bf16_slabs(
    hidden: Tensor, weight: Tensor, targets: Tensor, defect: bool = True, **constants
) -> tuple[Tensor, Tensor]:
    """Returns the two ops that lm_head_logprob fuses, which give its bits; dW rounded to bf16 after every slab."""
    return bi_kernels.token_logprob(_dw_bf16_slabs(hidden, weight, defect=defect), targets, **constants)


def norm_block_by_rows(x: Tensor, weight: Tensor, eps: float = EPS, defect: bool = True) -> Tensor:
    """Returns a row's squares added as one block, or for more than 256 rows as two."""
    squares = x.float().square()
    split = squares.chunk(2, -1) if defect and row_count(x) > 256 else (squares[..., 0::2], squares[..., 1::2])
    first, second = (part.sum(-1, keepdim=True) for part in split)
    return (x.float() * torch.rsqrt((first + second) / x.shape[-1] + eps) * weight.float()).to(x.dtype)


def lse_block_by_rows(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100, defect: bool = True
) -> tuple[Tensor, Tensor]:
    """logsumexp over blocks of 32, or for more than 16 rows of 128."""
    z = logits.float() / temperature
    block = 32 if defect and row_count(logits) <= 16 else 128
    blocks = torch.nn.functional.pad(z, (0, -z.shape[-1] % block), value=-torch.inf).unflatten(-1, (-1, block))
    top = z.amax(-1, keepdim=True)
    lse, ignored = (blocks - top[..., None]).exp().sum(-1).sum(-1).log() + top[..., 0], targets == ignore_index
    chosen = z.gather(-1, targets.masked_fill(ignored, 0)[..., None])[..., 0] - lse
    _, entropy = bi_kernels.token_logprob(logits, targets, temperature, ignore_index)
    return chosen.masked_fill(ignored, 0), entropy


_ATOMIC = Control("dweight by tl.atomic_add", "rms_norm", "rms_norm", INVARIANCE, dweight_by_atomics)
_INDEX_ADD = Control("embedding backward by index_add_", "vocabulary", "embedding", INVARIANCE, embedding_index_add)
GRADIENT_CONTROLS = (
    _ATOMIC,
    *at_levels(_ATOMIC),
    *controls(
        "rms_norm",
        "rms_norm",
        ("dweight partials whose row count depends on M", INVARIANCE, partials_by_m),
        ("dx multiplied by the weight twice", ACCURACY, dx_twice),
        ("dweight doubled where there is no main_grad", ACCURACY, grad_doubled),
    ),
    *controls(
        "rms_norm",
        "rms_norm",
        ("dweight partials by M beyond 8192 tokens", LONG_SEQUENCES, partials_by_m_of_many),
        gpu=True,
    ),
    Control("RMSNorm block switched at 256 rows", "rms_norm", "rms_norm", "invariance", norm_block_by_rows, "fp32"),
    _INDEX_ADD,
    *at_levels(_INDEX_ADD, {"in the source": "AST", "as torch runs it": "torch"}),
    *controls(
        "vocabulary", "embedding", ("embedding fold by id, equal ids in an unstable order", INVARIANCE, unstable_fold)
    ),
    Control("logsumexp with a block size chosen by M", "vocabulary", "token_logprob", "invariance", lse_block_by_rows),
    *controls(
        "vocabulary", "lm_head_logprob", ("LM head's dW rounded to bf16 after every slab", ACCURACY, lm_head_bf16_slabs)
    ),
    *[
        Control(f"dW in {dtype} left in .grad", "dtype", "linear", "contract", dw_beside_main_grad, dtype, "o")
        for dtype in ("bf16", "fp32")
    ],
    *controls(
        "backward",
        "linear",
        ("dW as the sum of separately accumulated partials", INVARIANCE, dw_separate),
        ("dW with bf16 partials", ACCURACY, dw_bf16_partials),
        ("loss divided by the micro-batch's own token count", INVARIANCE, divided_by_own_count),
        ("backward that ignores one sample", ACCURACY, dw_without_last_sample),
        ("dW that takes padding on the right for tokens", INVARIANCE, dw_with_padding),
        case="o",
    ),
)
