"""What `batch_invariant_mode` is asked: functions of PyTorch of a row alone and among others, against fp64; by name,
under autocast, and what it must refuse."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bi_kernels
from bi_kernels.audit.compare import Drift, compare
from bi_kernels.audit.findings import Row
from bi_kernels.audit.inputs import generator
from bi_kernels.audit.layouts import unaligned
from bi_kernels.audit.targets.fresh_memory import poisoned_memory
from bi_kernels.audit.targets.model import ModelTarget, Relation
from bi_kernels.tokens import TokenLayout

WIDTH, ROWS = 32, 3  # of x
Tensors = dict[str, Tensor]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _apart(x: Tensor) -> Tensor:
    """Returns the numbers so far apart that none are equal."""
    return x + 8 * (torch.arange(WIDTH, device=x.device) * 5 % WIDTH)


def _loss(row: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(torch.stack((row, -row)), row.argmin(-1).expand(2), reduction=reduction)


def _wide_attention(x: Tensor, width: int) -> Tensor:
    heads = torch.cat([x] * 9, -1)[:, None, None, :width]
    return F.scaled_dot_product_attention(*[heads] * 3)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of x (rows, WIDTH) and a parameter w (WIDTH, WIDTH)
    "mm": lambda x, w: x.mm(w),
    "addmm": lambda x, w: torch.addmm(w[0], x, w),
    "addmm, beta": lambda x, w: torch.addmm(x, x, w, beta=0.5, alpha=-2.0),
    "matmul": lambda x, w: x[:, None] @ w,
    "matrix and vector": lambda x, w: x @ w[0],
    "bmm": lambda x, w: torch.bmm(x[:, None], w.expand(len(x), -1, -1)),
    "softmax": lambda x, w: F.softmax(x, -1),
    "softmax over the first of two": lambda x, w: x.unflatten(-1, (4, 8)).softmax(1),
    "log_softmax": lambda x, w: x.log_softmax(-1),
    "mean of two": lambda x, w: x.unflatten(-1, (4, 8)).mean((1, 2)),
    "sum": lambda x, w: x.sum(1),
    "norm": lambda x, w: torch.linalg.vector_norm(x, dim=-1),
    "patches": lambda x, w: F.conv1d(x.unflatten(-1, (2, 16)), w[:6, :8].reshape(6, 2, 4), w[0, :6], 4),
    "topk": lambda x, w: x.round().topk(5).values,
    "cross_entropy": lambda x, w: F.cross_entropy(x, x.argmin(-1), reduction="none"),
    "plus a row": lambda x, w: x + w[0],
    "plus numbers": lambda x, w: x + torch.linspace(-1, 1, WIDTH, device=x.device, dtype=x.dtype),
    "a row minus": lambda x, w: w[0] - 2 * x,
    "times a row": lambda x, w: x * w[0],
    "over a row": lambda x, w: x / (2 + w[0].abs()),
    "times a number": lambda x, w: x * w[0, 0],
    "where": lambda x, w: torch.where(x > 0, x, w[0]),
    "lerp": lambda x, w: torch.lerp(x, w[0], 0.25),
    "expand_as": lambda x, w: w[0].expand_as(x) * x,
    "expand": lambda x, w: w[0].expand(len(x), WIDTH) * x,
    "expand, -1": lambda x, w: w[:1].expand(len(x), -1) * x,
    "broadcast_to": lambda x, w: torch.broadcast_to(w[0], x.shape) * x,
    "repeat": lambda x, w: w[0].repeat(len(x), 2)[:, 16:48] * x,
    "repeat_interleave": lambda x, w: x.unflatten(-1, (4, 8)).repeat_interleave(3, 1).flatten(1),
    "repeat_interleave of a row": lambda x, w: w[0, :4].repeat_interleave(8, 0) * x,
    "stack": lambda x, w: torch.stack((x, x * w[0]), 1),
    "linear": lambda x, w: F.linear(x, w),
    "linear, bias": lambda x, w: F.linear(x, w, w[0]),
    "linear, transposed": lambda x, w: x @ w.T,
    "mm across": lambda x, w: x @ w,
    "vector": lambda x, w: w[0] @ x.T,
    "baddbmm": lambda x, w: torch.baddbmm(x[:, None], x[:, None], w.expand(len(x), -1, -1), beta=2.0, alpha=0.5),
    "addmm, bias": lambda x, w: torch.addmm(w[0], x, w, beta=0.5),
    "batched": lambda x, w: x.unflatten(-1, (1, 4, 8)) @ w[:8, :16].unflatten(0, (1, 8)),
    "outer": lambda x, w: x[:, :, None] @ w[:1, None].expand(len(x), 1, WIDTH),
    "layer_norm": lambda x, w: F.layer_norm(x, (WIDTH,), w[0], w[1]),
    "layer_norm, plain": lambda x, w: F.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x, w: F.rms_norm(x, (WIDTH,), w[0]),
    "rms_norm, eps": lambda x, w: F.rms_norm(x, (WIDTH,), None, 0.1),
    "normalize": lambda x, w: F.normalize(x, dim=-1),
    "mean": lambda x, w: x.mean(-1, keepdim=True) * x,
    "mean in fp32": lambda x, w: x.mean(-1, dtype=_wide(x)),
    "sum of two": lambda x, w: x.unflatten(-1, (4, 8)).sum((-1, 1), keepdim=True)[..., 0, 0],
    "sum of all but rows": lambda x, w: x.unflatten(-1, (4, 8)).sum((2, 1)),
    "softmax in fp32": lambda x, w: x.softmax(-1, _wide(x)),
    "logsumexp": lambda x, w: torch.log_softmax(x, 1, dtype=_wide(x)),
    "cross_entropy, sums": lambda x, w: torch.stack([_loss(row, "sum") for row in x]),
    "cross_entropy, means": lambda x, w: torch.stack([_loss(row, "mean") for row in x]),
    "attention of 256": lambda x, w: _wide_attention(x, 256),
    "attention": lambda x, w: F.scaled_dot_product_attention(*[x.view(-1, 2, 4, 4)] * 3, is_causal=True).flatten(1),
    "attention, grouped": lambda x, w: F.scaled_dot_product_attention(
        x.view(-1, 2, 4, 4), *[x.view(-1, 2, 4, 4)[:, :1]] * 2, enable_gqa=True, scale=0.3
    ).flatten(1),
    "sort": lambda x, w: x.round().sort(-1, descending=True).values,
    "topk, least": lambda x, w: _apart(x).topk(3, largest=False).values,
    "topk of columns": lambda x, w: _apart(x).unflatten(-1, (4, 8)).topk(2, 1).values,
    "gelu": lambda x, w: F.gelu(x, approximate="tanh"),
    "silu": lambda x, w: F.silu(x * w[0]),
    "conv2d": lambda x, w: F.conv2d(x.view(-1, 2, 4, 4), w[:6, :8].reshape(6, 2, 2, 2), w[0, :6], 2).flatten(1),
    "embedding": lambda x, w: F.embedding(x.argmax(-1), w) * x,
    "index": lambda x, w: w[x.argmax(-1)] * x,
    "index of a row": lambda x, w: w[0][x.argmax(-1)][:, None] * x,
    "cast": lambda x, w: x * w[0].float().to(x.dtype),
    "sliced": lambda x, w: F.linear(x[:, :16], w[:, :16]),
    "chunked": lambda x, w: torch.cat([F.linear(x, part) for part in w.chunk(2)], -1),
    "flattened": lambda x, w: F.linear(x, w.flatten().view(WIDTH, WIDTH)),
    "permuted": lambda x, w: F.linear(x, w.permute(1, 0)),
    "in three dimensions": lambda x, w: F.linear(x[:, None], w)[:, 0],
    "softmax of a row": lambda x, w: torch.stack([row.softmax(-1) for row in x]),
    "sum by name": lambda x, w: torch.sum(input=x, dim=-1),
    "mean by NumPy's names": lambda x, w: x.mean(axis=-1, keepdims=True) * x,
    "linear by name": lambda x, w: F.linear(input=x, weight=w, bias=w[0]),
    "matmul by name": lambda x, w: torch.matmul(input=x, other=w),
    "times nothing random": lambda x, w: x + 0 * torch.rand_like(x),
    "dropout of nothing": lambda x, w: F.dropout(x, 0.0),
    "dropout at rest": lambda x, w: F.dropout(x, 0.5, training=False),
}
UNTRAINED = {  # whose gradients of w have no batch-invariant form
    *(
        "matrix and vector",
        "patches",
        "over a row",
        "repeat",
        "repeat_interleave of a row",
        "addmm, bias",
        "batched",
        "conv2d",
        "sliced",
    )
}
REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # likewise, what has no batch-invariant form at all
    "cumsum": lambda x, w: x.cumsum(0),
    "norm of 1": lambda x, w: x.norm(1, -1),
    "norm of all": lambda x, w: x.norm(),
    "fp64": lambda x, w: x.double().sum(-1),
    "softmax of nothing": lambda x, w: F.softmax(x.double(), -1),
    "conv1d overlapping": lambda x, w: F.conv1d(x.unflatten(-1, (2, 16)), w[:6, :8].reshape(6, 2, 4), None, 2),
    "conv1d padded": lambda x, w: F.conv1d(x.unflatten(-1, (2, 16)), w[:6, :8].reshape(6, 2, 4), None, 4, 4),
    "conv grouped": lambda x, w: F.conv1d(x.unflatten(-1, (2, 16)), w[:6, :4].reshape(6, 1, 4), None, 4, 0, 1, 2),
    "attention of 257": lambda x, w: _wide_attention(x, 257),
    "masked attention": lambda x, w: F.scaled_dot_product_attention(
        *[x.view(-1, 2, 4, 4)] * 3, attn_mask=torch.ones(4, 4, dtype=torch.bool)
    ),
    "label smoothing": lambda x, w: F.cross_entropy(x, x.argmin(-1), label_smoothing=0.1),
    "weights of classes": lambda x, w: F.cross_entropy(x, x.argmin(-1), w[0].abs()),
    "embedding by frequency": lambda x, w: F.embedding(x.argmax(-1), w, scale_grad_by_freq=True),
    "layer_norm of two": lambda x, w: F.layer_norm(x.unflatten(-1, (4, 8)), (4, 8)),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "repeats": lambda x, w: x.repeat_interleave(torch.arange(1, 1 + len(x), device=x.device), 0),
    "repeats of all": lambda x, w: x.repeat_interleave(2),
    "sum of all, out": lambda x, w: torch.sum(x.detach(), None, False, out=x.new_empty(())),
    "embedding in fp64": lambda x, w: F.embedding(x.argmax(-1), w.detach().double()),
    "power of a parameter": lambda x, w: x * torch.pow(2.0, w[0]),
    "var": lambda x, w: x.var(-1),
    "prod": lambda x, w: x.prod(-1),
    "einsum": lambda x, w: torch.einsum("rk,nk->rn", x, w),
}
COMPUTED = {  # whose gradients PyTorch sums: allowed where the mode is not strict
    "a computed row": lambda x, w: x * (2 * w)[0],
    "a computed weight": lambda x, w: F.linear(x, 2 * w),
}
IN_TRIAL = {  # refused before it is known whether a model will train
    "random numbers": FUNCTIONS["times nothing random"],
    "dropout at rest": FUNCTIONS["dropout at rest"],
    "sum of everything": lambda x, w: x.sum(),
}
AUTOCAST = (
    *("linear, bias", "mm", "matmul", "bmm", "addmm, bias", "softmax", "log_softmax", "sum", "mean", "norm"),
    *("normalize", "layer_norm", "rms_norm", "rms_norm, eps", "cross_entropy", "attention", "conv2d", "embedding"),
)
SAME = {"bmm": "mm", "matmul": "mm", "mm across": "mm", "matmul by name": "mm"}  # the same product by another name


def _called(
    name: str, x: Tensor, w: Tensor, ours: bool = True, view: Callable = torch.clone, autocast: bool = False
) -> Tensors:
    """Returns what a function gives, and the gradients of x and w: that of w in its main_grad under our mode."""
    trains, function = name not in UNTRAINED, (FUNCTIONS | COMPUTED)[name]
    w, x = nn.Parameter(w.clone(), requires_grad=trains), view(x).requires_grad_(trains)
    if ours:
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
    mode = bi_kernels.batch_invariant_mode(strict=name in FUNCTIONS) if ours else nullcontext()
    with mode, TokenLayout.packed([0, len(x)]), torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = function(x, w)
    if y.requires_grad:
        dy = torch.linspace(-1, 1, y[0].numel(), device=y.device, dtype=torch.float64).view(y[0].shape)
        y.backward(view(dy.to(y.dtype).expand(y.shape)))
    grads = {"dx": x.grad, "dw": w.main_grad if ours and w.grad is None else w.grad}
    zeros = lambda k: torch.zeros_like(x if k == "dx" else w)
    return {"": y.detach()} | {k: zeros(k) if g is None else g for k, g in grads.items()}


def _refuses(call: Callable, *given: Tensor, in_trial: bool = False) -> bool:
    mode = bi_kernels.batch_invariant_mode(strict=True)
    mode.in_trial = in_trial
    try:
        with mode:
            call(*given)
    except ValueError:
        return True
    return False


def functions(target: ModelTarget, dtype: str, seed: int, accuracy: Callable[..., Iterator[Row]]) -> Iterator[Row]:
    """Yields the rows of every function: of its rows alone, at odd addresses, against all in one call; of what it gives
    and of gradients against fp64; and of what is refused."""
    g = generator(target.device, seed, "mutants", "functions")
    draw = lambda rows: torch.randn(rows, WIDTH, generator=g, device=target.device).to(target.dtype)
    x, w = draw(ROWS), draw(WIDTH)
    plain = {}
    for name in FUNCTIONS | COMPUTED:
        plain[name] = whole = _called(name, x, w)
        yield from _alone(target, name, whole, [_called(name, part, w, view=unaligned) for part in x.split(1)])
        theirs = (_called(name, x.to(dtype), w.to(dtype), False) for dtype in (x.dtype, torch.float64))
        yield from accuracy(target, "rows", whole, *theirs, of=f"{name} ", times=8)
    for name, other in SAME.items():
        drift = compare(*(plain[k][""].view(ROWS, -1) for k in (name, other)))
        yield target.row(Relation.PARITY, "rows", drift, other, tensor=name)
    for name in AUTOCAST if dtype == "fp32" else ():
        with poisoned_memory(1):
            whole, *alone = (_called(name, part, w, autocast=True) for part in (x, *x.split(1)))
        yield from _alone(target, f"{name}, autocast", whole, alone)
        theirs, exact = _called(name, x, w, False, autocast=True), _called(name, x.double(), w.double(), False)
        yield from accuracy(target, "autocast", whole, theirs, exact, of=f"{name} ", times=8)
        drift = Drift(int(whole[""].dtype != theirs[""].dtype), 1)
        yield target.row(Relation.CONTRACTED, "autocast", drift, "PyTorch's dtype", tensor=name)
    yield from _ties(target)
    yield from _refused(target, x, w)


def _alone(target: ModelTarget, name: str, whole: Tensors, alone: list[Tensors]) -> Iterator[Row]:
    for k in ("", "dx"):
        drift = compare(torch.cat([found[k] for found in alone]), whole[k])
        yield target.row(Relation.INVARIANCE, "rows", drift, "each row alone", tensor=f"{name} {k}".strip())


def _ties(target: ModelTarget) -> Iterator[Row]:
    ties = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]], device=target.device)
    with bi_kernels.batch_invariant_mode():
        found = ties.topk(3).indices, ties.topk(3, largest=False).indices, ties.T.topk(3, 0).indices.T
    expected = torch.tensor([[1, 2, 3], [0, 4, 1], [1, 2, 3]], device=target.device)
    yield target.row(
        Relation.CONTRACTED, "ties", compare(torch.cat(found), expected), "in ascending order", tensor="topk"
    )


def _refused(target: ModelTarget, x: Tensor, w: Tensor) -> Iterator[Row]:
    """Yields the rows of what is refused: by a strict mode, in a trial; and of a copy of a parameter, which is not."""
    w, other = nn.Parameter(w), nn.Parameter(torch.zeros_like(w))
    for p in (w, other):
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    trained = {name: FUNCTIONS[name] for name in UNTRAINED} | COMPUTED
    for name, call in (REFUSED | trained).items():
        drift = Drift(int(not _refuses(call, x.clone().requires_grad_(), w)), 1)
        yield target.row(Relation.CONTRACTED, "strict", drift, "refused", tensor=name)
    for name, call in IN_TRIAL.items():
        drift = Drift(int(not _refuses(call, x, w.detach(), in_trial=True)), 1)
        yield target.row(Relation.CONTRACTED, "in trial", drift, "refused", tensor=name)
    with torch.no_grad():
        drift = Drift(int(_refuses(other.copy_, w)), 1)
    yield target.row(Relation.CONTRACTED, "strict", drift, "allowed", tensor="a copy of a parameter")
