"""Backward passes broken on purpose, in one way each; the forward and every other gradient are this package's."""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

import bi_kernels
from bi_kernels.audit.controls import Control
from bi_kernels.contract import EPS
from bi_kernels.tokens import SLAB, TokenLayout, layout_for


class _Replaced(torch.autograd.Function):
    """fn(*args), but the gradients that `backward` returns by position take the place of fn's own.

    backward(layout, dy, args, grads, **constants) -> {position: gradient}; None leaves what it wrote into main_grad.
    """

    @staticmethod
    def forward(ctx, fn, backward, *args):
        ctx.fn, ctx.replace, ctx.args = fn, backward, args
        ctx.layout = layout_for("control", args[0].shape if not args[0].is_floating_point() else args[0].shape[:-1])
        return fn(*(a.detach() if isinstance(a, Tensor) else a for a in args))

    @staticmethod
    def backward(ctx, dy):
        copies = [a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in ctx.args]
        wanted = [i for i, a in enumerate(copies) if isinstance(a, Tensor) and a.requires_grad]
        with torch.enable_grad(), ctx.layout:
            y = ctx.fn(*copies)
        grads: list = [None] * len(copies)
        for i, grad in zip(wanted, torch.autograd.grad(y, [copies[i] for i in wanted], dy)):
            grads[i] = grad
        for i, grad in ctx.replace(ctx.layout, dy, ctx.args, grads).items():
            grads[i] = grad
        return None, None, *grads


def _control(fn: Callable, backward: Callable, name: str) -> Callable:
    def control(*args, **constants):
        call = lambda *given: fn(*given, **constants)
        return _Replaced.apply(call, partial(backward, **constants), *args)
    control.__name__ = name
    return control


def _into(parameter: Tensor, grad: Tensor) -> Tensor | None:
    """Adds an fp32 gradient to main_grad, or returns it in the parameter's dtype."""
    buffer = getattr(parameter, "main_grad", None)
    if buffer is None:
        return grad.to(parameter.dtype)
    buffer.add_(grad)
    return None


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _real(layout: TokenLayout, device) -> Tensor:
    rows = layout.slots_on(device).long()
    return rows[rows >= 0]


def _dweight_terms(layout: TokenLayout, dy: Tensor, x: Tensor, eps: float) -> Tensor:
    """dy · x̂ of every token, fp32, in logical order."""
    rows = _real(layout, x.device)
    x, dy = _rows(x)[rows].float(), _rows(dy)[rows].float()
    return dy * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@triton.jit
def _atomic_sum_kernel(terms, out, columns, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    term = tl.load(terms + tl.program_id(0).to(tl.int64) * columns + col, mask=col < columns, other=0.0)
    tl.atomic_add(out + col, term, mask=col < columns)


def atomic_sum(terms: Tensor, out: Tensor) -> None:
    """out += Σ of the rows of terms, by atomic addition in whatever order the programs come."""
    _atomic_sum_kernel[(len(terms), )](terms, out, terms.shape[1], BLOCK=triton.next_power_of_2(terms.shape[1]))


def _dweight_atomic(layout, dy, args, grads, eps):
    rows = _real(layout, dy.device).sort().values  # memory order, as a grid over rows has it
    x, g = _rows(args[0])[rows].float(), _rows(dy)[rows].float()
    total = torch.zeros(x.shape[1], device=x.device) if getattr(args[1], "main_grad", None) is None else args[1].main_grad
    atomic_sum(g * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), total)
    return {1: total.to(args[1].dtype) if getattr(args[1], "main_grad", None) is None else None}


def _dweight_partials_by_m(layout, dy, args, grads, eps):
    terms = _dweight_terms(layout, dy, args[0], eps)
    partials = [part.sum(0) for part in terms.split(-(-len(terms) // 8))]  # eight programs share the rows of the call
    return {1: _into(args[1], torch.stack(partials).sum(0))}


def _dx_twice(layout, dy, args, grads, eps):
    return {0: (grads[0].float() * args[1].float()).to(grads[0].dtype)}


def _own_fold(layout, dy, args, grads):
    """dW of this call alone, fp32, from zero."""
    buffer = torch.zeros_like(args[1], dtype=torch.float32)
    weight = args[1].detach().requires_grad_()
    weight.main_grad = buffer
    with torch.enable_grad(), layout:
        bi_kernels.linear(args[0].detach(), weight).backward(dy)
    return buffer


def _dw_separate(layout, dy, args, grads):
    return {1: _into(args[1], _own_fold(layout, dy, args, grads))}


def _dw_bf16_partials(layout, dy, args, grads):
    rows = _real(layout, dy.device)
    x, g = _rows(args[0])[rows].float(), _rows(dy)[rows].float()
    total = torch.zeros(args[1].shape, device=x.device)
    for at in range(0, len(rows), 4 * SLAB):
        total = (total + (g[at:at + 4 * SLAB].T @ x[at:at + 4 * SLAB]).bfloat16().float()).bfloat16().float()
    return {1: _into(args[1], total)}


def _dw_without_last_sample(layout, dy, args, grads):
    dy = dy.clone()
    last = layout.slots_on(dy.device)[-SLAB:].long()
    _rows(dy)[last[last >= 0]] = 0
    return {1: _into(args[1], _own_fold(layout, dy, args, grads))}


def _divided_by_own_count(layout, dy, args, grads):
    return {0: grads[0] / layout.tokens, 1: _into(args[1], _own_fold(layout, dy, args, grads) / layout.tokens)}


def _embedding_index_add(layout, dy, args, grads, padding_id):
    rows = _real(layout, dy.device).sort().values
    rows = rows[args[0].reshape(-1)[rows] != padding_id]
    total = torch.zeros_like(args[1], dtype=torch.float32)
    return {1: _into(args[1], total.index_add_(0, args[0].reshape(-1)[rows], _rows(dy)[rows].float()))}


def _embedding_unstable(layout, dy, args, grads, padding_id):
    rows = _real(layout, dy.device).flip(0)  # grouped by id all the same, but equal ids in another order
    rows = rows[args[0].reshape(-1)[rows] != padding_id]
    ids, order = args[0].reshape(-1)[rows].sort(stable=True)
    total = torch.zeros_like(args[1], dtype=torch.float32)
    for i, row in zip(ids.tolist(), rows[order].tolist()):
        total[i] += _rows(dy)[row].float()
    return {1: _into(args[1], total)}


def norm_block_by_rows(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """A row's squares added as one block, or for more than 256 rows as two."""
    squares = x.float().square()
    half = x.shape[-1] // 2
    if x.shape[:-1].numel() > 256:
        total = squares[..., :half].sum(-1, keepdim=True) + squares[..., half:].sum(-1, keepdim=True)
    else:
        total = squares[..., 0::2].sum(-1, keepdim=True) + squares[..., 1::2].sum(-1, keepdim=True)
    return (x.float() * torch.rsqrt(total / x.shape[-1] + eps) * weight.float()).to(x.dtype)


def lse_block_by_rows(logits: Tensor, targets: Tensor, temperature: float = 1.0, ignore_index: int = -100
                      ) -> tuple[Tensor, Tensor]:
    """logsumexp over blocks of 32, or for more than 16 rows of 128."""
    z = logits.float() / temperature
    block = 32 if logits.shape[:-1].numel() <= 16 else 128
    blocks = torch.nn.functional.pad(z, (0, -z.shape[-1] % block), value=-torch.inf).unflatten(-1, (-1, block))
    top = z.amax(-1, keepdim=True)
    lse, ignored = (blocks - top[..., None]).exp().sum(-1).sum(-1).log() + top[..., 0], targets == ignore_index
    chosen = z.gather(-1, targets.masked_fill(ignored, 0)[..., None])[..., 0] - lse
    _, entropy = bi_kernels.token_logprob(logits, targets, temperature, ignore_index)
    return chosen.masked_fill(ignored, 0), entropy


GRADIENT_CONTROLS = (
    Control("dweight by tl.atomic_add", "rms_norm", "rms_norm", "gradient invariance",
            _control(bi_kernels.rms_norm, _dweight_atomic, "dweight_by_atomics")),
    Control("dweight by tl.atomic_add, in the binary", "rms_norm", "rms_norm", "atomics-free",
            _control(bi_kernels.rms_norm, _dweight_atomic, "dweight_by_atomics")),
    Control("dweight partials whose row count depends on M", "rms_norm", "rms_norm", "gradient invariance",
            _control(bi_kernels.rms_norm, _dweight_partials_by_m, "dweight_partials_by_m")),
    Control("RMSNorm block switched at 256 rows", "rms_norm", "rms_norm", "invariance", norm_block_by_rows, "fp32"),
    Control("dx multiplied by the weight twice", "rms_norm", "rms_norm", "gradient accuracy",
            _control(bi_kernels.rms_norm, _dx_twice, "dx_twice")),
    Control("embedding backward by index_add_", "vocabulary", "embedding", "gradient invariance",
            _control(bi_kernels.embedding, _embedding_index_add, "embedding_index_add")),
    Control("embedding backward by index_add_, in the source", "vocabulary", "embedding", "atomics-free",
            _control(bi_kernels.embedding, _embedding_index_add, "embedding_index_add")),
    Control("embedding fold by id, equal ids in an unstable order", "vocabulary", "embedding", "gradient invariance",
            _control(bi_kernels.embedding, _embedding_unstable, "embedding_unstable")),
    Control("logsumexp with a block size chosen by M", "vocabulary", "token_logprob", "invariance", lse_block_by_rows),
    Control("dW as the sum of separately accumulated partials", "backward", "linear", "gradient invariance",
            _control(bi_kernels.linear, _dw_separate, "dw_separate"), case="o"),
    Control("dW with bf16 partials", "backward", "linear", "gradient accuracy",
            _control(bi_kernels.linear, _dw_bf16_partials, "dw_bf16_partials"), case="o"),
    Control("loss divided by the micro-batch's own token count", "backward", "linear", "gradient invariance",
            _control(bi_kernels.linear, _divided_by_own_count, "divided_by_own_count"), case="o"),
    Control("backward that ignores one sample", "backward", "linear", "gradient accuracy",
            _control(bi_kernels.linear, _dw_without_last_sample, "dw_without_last_sample"), case="o"),
)
