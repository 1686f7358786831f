"""Backward passes broken on purpose, in one way each; the forward and every other gradient are this package's.

Each goes on from `main_grad` in the order of the token layout, but for the defect it is named for. `defect=False` mends
that one, so that a test can show that nothing else is what the audit sees.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

import bi_kernels
from bi_kernels.audit.broken.forward import Control
from bi_kernels.audit.broken.replaced_backward import with_backward
from bi_kernels.contract import EPS
from bi_kernels.ops.gemm import fold_weight, product
from bi_kernels.tokens import SLAB, TokenLayout


def _total(parameter: Tensor) -> Tensor:
    """Returns the fp32 sum that a fold goes on from: main_grad itself, or zeros."""
    buffer = getattr(parameter, "main_grad", None)
    return torch.zeros_like(parameter, dtype=torch.float32) if buffer is None else buffer


def _left(parameter: Tensor, total: Tensor) -> dict[int, Tensor | None]:
    """Returns what the backward returns for a parameter, which is the second argument."""
    return {1: total.to(parameter.dtype) if getattr(parameter, "main_grad", None) is None else None}


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _real(layout: TokenLayout, device, memory_order: bool = False) -> Tensor:
    """Returns the rows of the tokens, in logical order or as they lie in memory."""
    rows = layout.slots_on(device).long()
    rows = rows[rows >= 0]
    return rows.sort().values if memory_order else rows


def _dweight_terms(rows: Tensor, dy: Tensor, x: Tensor, eps: float) -> Tensor:
    """dy · x̂ of every row, fp32; zeros for row −1."""
    x, dy = _rows(x)[rows].float(), _rows(dy)[rows].float()
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


def _dweight_atomic(layout, dy, args, grads, eps, defect=True):
    total = _total(args[1])  # a grid over rows has them in memory's order
    atomic_sum(_dweight_terms(_real(layout, dy.device, memory_order=defect), dy, args[0], eps), total)
    return _left(args[1], total)


def _dweight_partials_by_m(layout, dy, args, grads, eps, defect=True):
    terms, total = _dweight_terms(layout.slots_on(dy.device).long(), dy, args[0], eps), _total(args[1])
    for part in terms.split(-(-len(terms) // 8) if defect else SLAB):  # eight programs share the rows of the call
        total += part.sum(0)
    return _left(args[1], total)


def _dx_twice(layout, dy, args, grads, eps, defect=True):
    return {0: (grads[0].float() * args[1].float()).to(grads[0].dtype)} if defect else {}


def _grad_doubled(layout, dy, args, grads, eps, defect=True):
    return {1: 2 * grads[1]} if defect and grads[1] is not None else {}


def _dw_separate(layout, dy, args, grads, defect=True):
    if not defect:
        return {1: fold_weight("control", _rows(dy), _rows(args[0]), args[1], layout)}
    total, x = _total(args[1]), layout.gather(_rows(args[0]))
    total += product(layout.gather(_rows(dy)).t(), x.t(), out_dtype=torch.float32)
    return _left(args[1], total)


def _dw_bf16_partials(layout, dy, args, grads, slabs=4, defect=True):
    rows, total = _real(layout, dy.device), _total(args[1])
    x, g = _rows(args[0])[rows].float(), _rows(dy)[rows].float()
    stored = lambda t: t.bfloat16().float() if defect else t
    for at in range(0, len(rows), slabs * SLAB):
        part = g[at : at + slabs * SLAB].T @ x[at : at + slabs * SLAB]
        total.copy_(stored(total + stored(part)))
    return _left(args[1], total)


def _dw_without_last_sample(layout, dy, args, grads, defect=True):
    dy = _rows(dy).clone()
    last = layout.slots_on(dy.device)[-SLAB:].long()
    dy[last[last >= 0]] *= 0 if defect else 1
    return {1: fold_weight("control", dy, _rows(args[0]), args[1], layout)}


def _divided_by_own_count(layout, dy, args, grads, defect=True):
    dy = dy / (layout.tokens if defect else 16)
    return {
        0: product(_rows(dy), args[1].t()).view_as(args[0]),
        1: fold_weight("control", _rows(dy), _rows(args[0]), args[1], layout),
    }


def _dw_with_padding(layout, dy, args, grads, defect=True):
    """dW over the whole batch, where every row of it starts with a token: padding on the right has dy = 0."""
    length = args[0].shape[-2]
    starts = [row for row in layout.slots.tolist() if row >= 0 and row % length == 0]  # in logical order
    if defect and layout.padding and len(starts) * length == layout.rows:
        layout = TokenLayout(starts, [length] * len(starts), layout.rows)
    return {1: fold_weight("control", _rows(dy), _rows(args[0]), args[1], layout)}


def _embedding_index_add(layout, dy, args, grads, padding_id, defect=True):
    rows, total = _real(layout, dy.device, memory_order=defect), _total(args[1])
    rows = rows[args[0].reshape(-1)[rows] != padding_id]
    total.index_add_(0, args[0].reshape(-1)[rows], _rows(dy)[rows].float())
    return _left(args[1], total)


def _embedding_unstable(layout, dy, args, grads, padding_id, defect=True):
    rows, total = _real(layout, dy.device), _total(args[1])
    rows = rows.flip(0) if defect else rows  # grouped by id all the same, but equal ids in another order
    rows = rows[args[0].reshape(-1)[rows] != padding_id]
    ids, order = args[0].reshape(-1)[rows].sort(stable=True)
    for i, row in zip(ids.tolist(), rows[order].tolist()):
        total[i] += _rows(dy)[row].float()
    return _left(args[1], total)


dw_separate = with_backward(bi_kernels.linear, _dw_separate, "dw_separate", 1)
_dw_bf16_slabs = with_backward(bi_kernels.linear, partial(_dw_bf16_partials, slabs=1), "dw_bf16_slabs", 1)


def lm_head_bf16_slabs(
    hidden: Tensor, weight: Tensor, targets: Tensor, defect: bool = True, **constants
) -> tuple[Tensor, Tensor]:
    """Returns the two ops that lm_head_logprob fuses, which give its bits; dW rounded to bf16 after every slab."""
    return bi_kernels.token_logprob(_dw_bf16_slabs(hidden, weight, defect=defect), targets, **constants)


def norm_block_by_rows(x: Tensor, weight: Tensor, eps: float = EPS, defect: bool = True) -> Tensor:
    """Returns a row's squares added as one block, or for more than 256 rows as two."""
    squares = x.float().square()
    half = x.shape[-1] // 2
    if defect and x.shape[:-1].numel() > 256:
        total = squares[..., :half].sum(-1, keepdim=True) + squares[..., half:].sum(-1, keepdim=True)
    else:
        total = squares[..., 0::2].sum(-1, keepdim=True) + squares[..., 1::2].sum(-1, keepdim=True)
    return (x.float() * torch.rsqrt(total / x.shape[-1] + eps) * weight.float()).to(x.dtype)


def lse_block_by_rows(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100, defect: bool = True
) -> tuple[Tensor, Tensor]:
    """logsumexp over blocks of 32, or for more than 16 rows of 128."""
    z = logits.float() / temperature
    block = 32 if defect and logits.shape[:-1].numel() <= 16 else 128
    blocks = torch.nn.functional.pad(z, (0, -z.shape[-1] % block), value=-torch.inf).unflatten(-1, (-1, block))
    top = z.amax(-1, keepdim=True)
    lse, ignored = (blocks - top[..., None]).exp().sum(-1).sum(-1).log() + top[..., 0], targets == ignore_index
    chosen = z.gather(-1, targets.masked_fill(ignored, 0)[..., None])[..., 0] - lse
    _, entropy = bi_kernels.token_logprob(logits, targets, temperature, ignore_index)
    return chosen.masked_fill(ignored, 0), entropy


_ATOMIC = with_backward(bi_kernels.rms_norm, _dweight_atomic, "dweight_by_atomics", 1)
_INDEX_ADD = with_backward(bi_kernels.embedding, _embedding_index_add, "embedding_index_add", 1)

GRADIENT_CONTROLS = (
    Control("dweight by tl.atomic_add", "rms_norm", "rms_norm", "gradient invariance", _ATOMIC),
    Control("dweight by tl.atomic_add, in the source", "rms_norm", "rms_norm", "atomics-free", _ATOMIC, level="AST"),
    Control("dweight by tl.atomic_add, in the PTX", "rms_norm", "rms_norm", "atomics-free", _ATOMIC, level="PTX"),
    Control("dweight by tl.atomic_add, in the binary", "rms_norm", "rms_norm", "atomics-free", _ATOMIC, level="SASS"),
    Control(
        "dweight partials whose row count depends on M",
        "rms_norm",
        "rms_norm",
        "gradient invariance",
        with_backward(bi_kernels.rms_norm, _dweight_partials_by_m, "dweight_partials_by_m", 1),
    ),
    Control("RMSNorm block switched at 256 rows", "rms_norm", "rms_norm", "invariance", norm_block_by_rows, "fp32"),
    Control(
        "dx multiplied by the weight twice",
        "rms_norm",
        "rms_norm",
        "gradient accuracy",
        with_backward(bi_kernels.rms_norm, _dx_twice, "dx_twice"),
    ),
    Control(
        "dweight doubled where there is no main_grad",
        "rms_norm",
        "rms_norm",
        "gradient accuracy",
        with_backward(bi_kernels.rms_norm, _grad_doubled, "grad_doubled"),
    ),
    Control("embedding backward by index_add_", "vocabulary", "embedding", "gradient invariance", _INDEX_ADD),
    Control(
        "embedding backward by index_add_, in the source",
        "vocabulary",
        "embedding",
        "atomics-free",
        _INDEX_ADD,
        level="AST",
    ),
    Control(
        "embedding backward by index_add_, as torch runs it",
        "vocabulary",
        "embedding",
        "atomics-free",
        _INDEX_ADD,
        level="torch",
    ),
    Control(
        "embedding fold by id, equal ids in an unstable order",
        "vocabulary",
        "embedding",
        "gradient invariance",
        with_backward(bi_kernels.embedding, _embedding_unstable, "embedding_unstable", 1),
    ),
    Control("logsumexp with a block size chosen by M", "vocabulary", "token_logprob", "invariance", lse_block_by_rows),
    Control(
        "LM head's dW rounded to bf16 after every slab",
        "vocabulary",
        "lm_head_logprob",
        "gradient accuracy",
        lm_head_bf16_slabs,
    ),
    Control(
        "dW as the sum of separately accumulated partials",
        "backward",
        "linear",
        "gradient invariance",
        dw_separate,
        case="o",
    ),
    Control(
        "dW with bf16 partials",
        "backward",
        "linear",
        "gradient accuracy",
        with_backward(bi_kernels.linear, _dw_bf16_partials, "dw_bf16_partials", 1),
        case="o",
    ),
    Control(
        "loss divided by the micro-batch's own token count",
        "backward",
        "linear",
        "gradient invariance",
        with_backward(bi_kernels.linear, _divided_by_own_count, "divided_by_own_count", 1),
        case="o",
    ),
    Control(
        "backward that ignores one sample",
        "backward",
        "linear",
        "gradient accuracy",
        with_backward(bi_kernels.linear, _dw_without_last_sample, "dw_without_last_sample", 1),
        case="o",
    ),
    Control(
        "dW that takes padding on the right for tokens",
        "backward",
        "linear",
        "gradient invariance",
        with_backward(bi_kernels.linear, _dw_with_padding, "dw_with_padding", 1),
        case="o",
    ),
)
