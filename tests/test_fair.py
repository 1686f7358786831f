"""No false alarm: correct implementations that are written otherwise need no fix, whatever is asked of them.

Half are any callables, the other half candidates for ops of the registry.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from conftest import op_under_test, slow_but, under_test
from torch.utils.checkpoint import checkpoint

import bi_kernels as bi
from bi_kernels.audit import audit
from bi_kernels.audit.checks import forward, gradient, modes, single_call
from bi_kernels.audit.checks.edge_cases import begun
from bi_kernels.audit.checks.requests import FROZEN
from bi_kernels.audit.findings import NEEDS_FIX, UNSUPPORTED, needs_fix
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.contract import EPS
from bi_kernels.tokens import layout_for

ROWS, WIDTH = 20, 32
G = torch.Generator().manual_seed(0)
X, Y = (torch.randn(ROWS, WIDTH, generator=G) for _ in range(2))
W, V = torch.randn(24, WIDTH, generator=G), torch.randn(WIDTH, generator=G)
IDS = torch.randint(0, 24, (ROWS,), generator=G)
S = torch.randn(5, 12, 16, generator=G)  # sequences
HALF = X.bfloat16()
LENGTHS = torch.tensor([7, 12, 3, 9, 5])  # of S


def folded(p):
    """Sums over the last dimension, feature by feature."""
    total = p[..., 0]
    for k in range(1, p.shape[-1]):
        total = total + p[..., k]
    return total


def rms_norm(x):
    return (x.float() * torch.rsqrt(folded(x.float() ** 2)[..., None] / x.shape[-1] + EPS)).to(x.dtype)


def pairwise_mean(x):
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0] / WIDTH


def rope(x):
    at = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * 0.1 ** torch.arange(x.shape[2] // 2)
    cos, sin, (a, b) = at.cos().float(), at.sin().float(), x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def causal_conv(x):
    padded = F.pad(x, (0, 0, 3, 0))
    return sum(padded[:, k : k + x.shape[1]] * (k + 0.5) for k in range(4))


def attention(q, k, v):
    scores = folded(q[:, :, None] * k[:, None]) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    p = scores.masked_fill(future, -torch.inf).exp()
    return folded(p[:, :, None] * v.transpose(1, 2)[:, None]) / folded(p)[..., None]


def chosen_logprob(x, ids):
    chosen = torch.arange(x.shape[-1]) == ids[:, None]
    return x.double().log_softmax(-1).masked_fill(~chosen, 0).sum(-1).to(x.dtype)


@dataclass
class Out:
    first: torch.Tensor
    second: torch.Tensor


torch.utils._pytree.register_dataclass(Out)


@dataclass
class Scored:
    out: torch.Tensor
    scores: dict


def launches_contiguous(x, out):
    if not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError("x and out must be contiguous")
    out.view(-1).copy_(x.view(-1) * 2)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", V.clone())

    def forward(self, x):
        return torch.sigmoid(x * self.scale) * x


class CachesAPlan(torch.nn.Module):
    """What is cached depends on the shape and the dtype alone."""

    def __init__(self):
        super().__init__()
        self.plans = {}

    def forward(self, x):
        key = x.shape[-1], x.dtype
        if key not in self.plans:
            self.plans[key] = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)
        return x * self.plans[key]


class CachesByContent(torch.nn.Module):
    """An address and a version alone do not tell that a weight is another."""

    def __init__(self):
        super().__init__()
        self.weight, self.key = torch.nn.Parameter(V.clone(), requires_grad=False), None

    def forward(self, x):
        key = self.weight.data_ptr(), self.weight._version
        if self.key != key or not torch.equal(self.held, self.weight):
            self.key, self.held, self.doubled = key, self.weight.clone(), self.weight * 2
        return x * self.doubled


class CountsCalls(torch.nn.Module):
    """Counts its calls in a buffer, and keeps a running mean of what it was given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.calls += 1
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return F.silu(x)


_thread = threading.local()


def in_a_workspace_of_the_thread(x):
    """Doubles in memory that each thread keeps for itself."""
    spaces = vars(_thread).setdefault("spaces", {})
    space = spaces.setdefault((x.shape, x.dtype), torch.empty_like(x).detach())
    return torch.mul(x.detach(), 2, out=space).clone()


@triton.jit
def _softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * columns + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < columns
    e = tl.exp(tl.load(x + at, mask=inside, other=-float("inf")))
    tl.store(out + at, e / tl.sum(e, 0), mask=inside)


def triton_softmax(block):
    def softmax(x):
        x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        _softmax_kernel[(len(x),)](x, out, x.shape[1], BLOCK=block)
        return out

    return softmax


@triton.jit
def _add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


def triton_add(x, y):
    out = torch.empty(x.shape, dtype=x.dtype)
    _add_kernel[(triton.cdiv(x.numel(), 4096),)](x.contiguous(), y.contiguous(), out, x.numel(), BLOCK=4096)
    return out


@triton.jit
def _add_into_kernel(x, y, out, rows, columns, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
    row, k = tl.program_id(0) * 64 + tl.arange(0, 64)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (k < columns)
    total = tl.load(x + row * x_stride + k, mask=inside) + tl.load(y + row * y_stride + k, mask=inside)
    tl.store(out + row * out_stride + k, total, mask=inside)


def triton_add_into(x, y, out):
    """Writes into memory that its caller allocated, whatever its strides."""
    strides = (t.stride(0) for t in (x, y, out))
    _add_into_kernel[(triton.cdiv(len(x), 64),)](x, y, out, *x.shape, *strides, BLOCK=WIDTH)


class Grows(torch.nn.Module):
    """A table of positions that grows with the longest sequence that came; a position's numbers stay."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(0)

    def forward(self, x):
        if x.shape[1] > len(self.table):
            self.table = torch.arange(2 * x.shape[1], dtype=torch.float64).add(1).reciprocal().float()
        return x * self.table[: x.shape[1], None]


class Remembers:
    """Keeps each row's result by the row's bytes."""

    def __init__(self):
        self.known = {}

    def __call__(self, x):
        rows = x.detach().contiguous()
        return torch.stack([self.known.setdefault(row.numpy().tobytes(), row * 2 + 1) for row in rows])


class Recurrent(torch.nn.Module):
    """A model of token ids: its state passes over padding."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", V.new_tensor(range(96)).view(24, 4).sin())

    def forward(self, input_ids, attention_mask):
        state, out = self.table.new_zeros(len(input_ids), 4), []
        for k in range(input_ids.shape[1]):
            state = torch.where(attention_mask[:, k, None] > 0, state / 2 + self.table[input_ids[:, k]], state)
            out.append(state)
        return torch.stack(out, 1)


class Experts(torch.nn.Module):
    """Takes the rows of one expert at a time, and puts them back."""

    def forward(self, x):
        expert, out = (x[:, 0] > 0).long() + (x[:, 1] > 0), torch.zeros_like(x)
        for i in range(3):
            mine = (expert == i).nonzero().flatten()
            out = out.index_copy(0, mine, (x.index_select(0, mine) * (i + 1)).relu())
        return out


def hooked():
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Hardtanh())
    model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    model[1].register_forward_hook(lambda module, given, out: out + 1)
    model.register_full_backward_hook(lambda module, given, upstream: (given[0] * 2,))
    return model


def clamps_gradient(x):
    y = x * 3
    if y.requires_grad:
        y.register_hook(lambda dy: dy.clamp(-1, 1))
    return y.relu()


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone().relu_()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dy):
        return None if dy is None else dy * (ctx.saved_tensors[0] > 0)


class WithIndex(torch.autograd.Function):
    """Two outputs, the second without a gradient; computes again in its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        at = x.argmax(-1)
        ctx.mark_non_differentiable(at)
        return x.square(), at

    @staticmethod
    def backward(ctx, dy, _):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.square(), x, dy)[0]


@torch.library.custom_op("test_fair::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halve.register_fake(torch.empty_like)
halve.register_autograd(lambda ctx, dy: dy / 2)


def by_length(x, lengths):
    """The longest sequence first, then back in order."""
    order = lengths.argsort(descending=True, stable=True)
    inside = torch.arange(x.shape[1])[None, :, None] < lengths[order, None, None]
    return (x[order] * inside).relu()[order.argsort()]


def each_sequence(x, lengths):
    parts = [sequence[:n].cumsum(0) for sequence, n in zip(x, lengths.tolist())]
    return torch.stack([F.pad(p, (0, 0, 0, x.shape[1] - len(p))) for p in parts])


def of_unique(ids):
    each, back = ids.unique(return_inverse=True)
    return W[each][back] * 2


def in_halves(x):
    """As a tree over the batch."""
    return x.sigmoid() if len(x) < 2 else torch.cat([in_halves(part) for part in x.tensor_split(2)])


def quantised(x):
    """int8 with a scale a row; sums of integers are exact in any order."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / 127
    whole = (x / scale).round().clamp(-127, 127).nan_to_num().to(torch.int32)
    return (whole @ (W.T * 16).round().to(torch.int32)) * scale


def in_fixed_point(x):
    """Sums integers, whose order changes nothing."""
    return (x.clamp(-8, 8) * 2**20).round().nan_to_num().long().sum(-1).to(x.dtype) / 2**20


def compensated(x):
    """Kahan's sum."""
    total, lost = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
    for k in range(x.shape[-1]):
        y = x[..., k] - lost
        new = total + y
        lost, total = (new - total) - y, new
    return total


def newton(x):
    """Each row until it has converged: how often depends on the row."""
    rows = []
    for row in x.detach().abs() + 1:
        root, steps = row, 0
        while steps < 30 and not torch.equal(root, new := (root + row / root) / 2):
            root, steps = new, steps + 1
        rows.append(root)
    return torch.stack(rows)


def in_threads(x):
    with ThreadPoolExecutor(2) as pool:
        return torch.stack([*pool.map(lambda row: row * 2 + 1, x)])


def dithered(x):
    """The same noise for every row, whatever was drawn before."""
    return x + torch.rand(x.shape[-1], generator=torch.Generator().manual_seed(1))


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def apply_to(self, x):
        return x * self.factor


def permuted(x):
    order = torch.arange(x.shape[-1]).flip(0)
    return (x[:, order] * 2)[:, order.argsort()]


def permuted_rows(x):
    order = torch.arange(len(x)).flip(0)
    return torch.zeros_like(x).index_put_((order,), x[order] * 2)


def added_at_unique(x):
    """Adds to zeros, at indices that differ."""
    order = x.argsort(-1)
    flat = torch.zeros_like(x).scatter_add_(-1, order, x.gather(-1, order))
    rows = torch.arange(len(x)).flip(0)
    return torch.zeros_like(x).index_add_(0, rows, flat[rows])


compiled_relu = torch.compile(F.relu, backend="eager")


def complex_of(pairs):
    return torch.view_as_complex(pairs)


KINDS = {
    "compiled": {
        "a module": (torch.compile(torch.nn.SiLU(), backend="eager", dynamic=True), X[:6]),
        "layers": (torch.compile(torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Tanh()), backend="aot_eager"), X[:6]),
        "any shape": (torch.compile(lambda x: x.tanh() * x, backend="aot_eager", dynamic=True), X[:6]),
        "by Inductor": (torch.compile(lambda x: x.relu() * 2 + 1, dynamic=True), X[:6]),
        "in part": (lambda x: compiled_relu(x) * 2, X[:6]),
    },
    "stateful": {
        "a table that grows": (Grows(), S),
        "a memo by content": (Remembers(), X[:9]),
        "noise of its own seed": (dithered, X[:9]),
    },
    "by sequence": {
        "in a loop": (each_sequence, S, LENGTHS),
        "the longest first": (by_length, S, LENGTHS),
        "a recurrent model": (Recurrent(), IDS.view(4, 5), torch.arange(5) < torch.tensor([[5], [2], [4], [3]])),
        "in halves": (in_halves, X[:9]),
        "rows in threads": (in_threads, X[:9]),
        "vmap": (torch.vmap(lambda row: row.exp() / folded(row.exp())), X[:9]),
        "experts": (Experts(), X[:9]),
    },
    "not capturable": {
        "item": (lambda x: torch.stack([row * (2.0 if row[0].item() > 0 else 3.0) for row in x]), X[:9]),
        "until it converges": (newton, X[:9].abs()),
        "unique ids": (of_unique, IDS),
        "numpy": (lambda x: torch.from_numpy(x.detach().numpy() * 2), X[:9].clamp(-4, 4)),
        "lists": (lambda ids: torch.tensor([3 * i for i in ids.tolist()]), IDS),
        "by its mask": (lambda x: torch.zeros_like(x).masked_scatter(x > 0, x[x > 0]), X[:9]),
    },
    "sums": {
        "int8": (quantised, X[:9]),
        "fixed point": (in_fixed_point, X[:9]),
        "Kahan": (compensated, X[:9]),
        "fp64 logsumexp": (lambda x: x.double().logsumexp(-1).to(x.dtype), X[:9]),
        "einsum of one term": (lambda x: torch.einsum("bi,i->bi", x, V), X[:9]),
        "einsum of integers": (lambda a, b: torch.einsum("bi,ij->bj", a, b), IDS.view(5, 4), IDS.view(4, 5)),
        "cummax": (lambda x: x.cummax(-1).values, X[:9], {"backward": False}),
        "top k": (lambda x: x.topk(3, -1).values, X[:9]),
    },
    "backward": {
        "checkpointed": (lambda x: checkpoint(torch.tanh, x, use_reentrant=False), X[:9]),
        "hooks": (hooked(), X[:9]),
        "a hook on a tensor": (clamps_gradient, X[:9]),
        "setup_context": (InPlace.apply, X[:9]),
        "an index next to it": (WithIndex.apply, X[:9]),
        "a custom op": (halve, X[:9]),
        "no gradient at all": (torch.no_grad()(lambda x: x * 2), X[:9]),
        "inference_mode": (torch.inference_mode()(lambda x: x * 2), X[:9]),
        "a part detached": (lambda x: x * x.detach().sigmoid(), X[:9]),
    },
    "scatters": {
        "columns": (permuted, X[:9]),
        "rows": (permuted_rows, X[:9]),
        "added at unique indices": (added_at_unique, X[:9]),
        "gathered by argsort": (lambda x: x.gather(-1, x.argsort(-1)), X[:9]),
    },
    "returned": {
        "nested": (lambda x: {"a": [x * 2, None], "b": (x.relu(), {"n": 3})}, X[:9]),
        "a list": (lambda x: [*(x * 2).unbind(1)], X[:9, :4]),
        "expanded": (lambda x: x[:, :1].relu().expand(-1, 4), X[:9]),
        "every other column": (lambda x: (x * 2)[:, ::2], X[:9]),
        "in a larger buffer": (lambda x: F.pad(x * 2, (1, 1, 1, 1))[1:-1, 1:-1], X[:9]),
        "lazily conjugated": (lambda pairs: complex_of(pairs).conj(), S[..., :2].contiguous()),
        "lazily negated": (lambda pairs: complex_of(pairs).conj().imag, S[..., :2].contiguous()),
        "complex as real": (lambda pairs: torch.view_as_real(complex_of(pairs) * 2), S[..., :2].contiguous()),
        "bool": (lambda x: x > 0, X[:9]),
    },
    "called": {
        "a bound method": (Scale(1.5).apply_to, X[:9]),
        "a tensor's method": (V.mul, X[:9]),
        "a partial": (functools.partial(torch.add, alpha=2), X[:9], Y[:9]),
        "samples in columns": (lambda x: x * 2, X[:9], {"batch": 1}),
        "no layers": (torch.nn.Sequential(), X[:9]),
        "Triton into given memory": (triton_add_into, X[:6], Y[:6], torch.empty(6, WIDTH), {"outputs": ("out",)}),
    },
}
INTO = {"outputs": ("out",)}
QUICK = "compiled: a module", "scatters: rows", "scatters: added at unique indices", "returned: lazily conjugated"
CALLABLES = {f"{kind}: {name}": case for kind, cases in KINDS.items() for name, case in cases.items()} | {
    "rows": (lambda x: torch.stack([F.softmax(row, -1) for row in x]), X),
    "chunks": (lambda x: torch.cat([p.exp() / p.exp().sum(-1, keepdim=True) for p in x.split(7)]), X),
    "linear by feature": (lambda x: folded(x.float()[:, None] * W).to(x.dtype), HALF),
    "linear from the end": (lambda x: folded((x.float()[:, None] * W).flip(-1)).to(x.dtype), HALF),
    "linear by row": (lambda x: torch.stack([W @ row for row in x]), X),
    "rms norm": (rms_norm, HALF),
    "layer norm in fp64": (lambda x: F.layer_norm(x.double(), x.shape[-1:]).to(x.dtype), X),
    "a tree": (pairwise_mean, X),
    "rope": (rope, S),
    "causal conv": (causal_conv, S),
    "cumsum": (lambda x: x.double().cumsum(-1).to(x.dtype), X),
    "attention": (attention, S, S.flip(0).contiguous(), S.flip(1).contiguous()),
    "logprob": (chosen_logprob, X, IDS),
    "lookup": (lambda ids: W[ids], IDS),
    "integers": (lambda ids: ids * 2 + 1, IDS),
    "in place on a clone": (lambda x: x.clone().mul_(2).relu_(), X),
    "in place": (lambda x: x.mul_(2), X),
    "views": (
        lambda x: {"left": x[..., : WIDTH // 2], "right": x[..., WIDTH // 2 :], "whole": x.view(-1, 4, WIDTH // 4)},
        X,
    ),
    "the input itself": (lambda x: x, X),
    "the input and a result": (lambda x: (x, 2 * x), X),
    "a dataclass": (lambda x: Out(x * 2, x + 1), X),
    "a tuple of two dtypes": (lambda x: (x.bfloat16(), x.argmax(-1)), X),
    "autograd.Function": (Square.apply, X),
    "a module": (Gated(), X),
    "a module, training": (Gated().train(), HALF),
    "a plan by shape": (CachesAPlan(), X),
    "a cache by content": (CachesByContent(), X),
    "torch.compile, eager": (torch.compile(lambda x: F.silu(x) * 2, backend="eager"), X),
    "transposed": (lambda x: F.silu(x.T).T, X),
    "a transposed input": (torch.sigmoid, torch.randn(WIDTH, ROWS, generator=G).T),
    "an expanded input": (lambda x, y: x + y, X, V.expand(ROWS, WIDTH)),
    "Triton, larger tiles": (triton_softmax(64), X),
    "Triton over all elements": (triton_add, X, Y),
    "sorted": (lambda x: x.sort(-1).values, X),
    "masked": (lambda x, keep: x.masked_fill(~keep, -1.0), X, X > 0),
    "fp16": (lambda x: x * 1.5 + 1, X.half()),
    "fp64": (lambda x: x.tanh(), X.double()),
    "probabilities": (lambda p: -(p * p.log()), X.softmax(-1)),
    "a counter and a mean as buffers": (CountsCalls(), X),
    "a workspace of the thread": (in_a_workspace_of_the_thread, X),
    "host tensors without a dtype": (lambda x: x * torch.linspace(0.5, 2, WIDTH).to(x.dtype), X),
    "five dimensions": (lambda x: x * 2 + x.flip(-1), X.view(4, 5, 2, 4, 4)),
    "heads first": (lambda q: (q.transpose(1, 2) * 2).contiguous().transpose(1, 2), X.view(ROWS, 4, 2, 4)),
    "a list of samples": (lambda x: [row * 2 for row in x], X),
    "a dataclass that nobody registered": (lambda x: Scored(x * 2, {"first": x.detach()[:, 0].tolist()}), X),
    "text and numbers of each sample": (lambda x: [{"text": "a", "score": float(v)} for v in x.detach()[:, 0]], X),
    "int32": (lambda ids: W[ids.long()], IDS.int()),
    "positions": (lambda x, at: x * at[:, None].cos(), X, torch.arange(ROWS) % 7),
    "padding ids": (lambda ids: F.embedding(ids, W, padding_idx=0), IDS % 3),
    "in place, unseen": (lambda x: (np.multiply(x.detach().numpy(), 2, out=x.detach().numpy()), x)[1], X),
    "a launcher": (lambda x, out: out.copy_(x * 2), X, torch.empty(ROWS, WIDTH), INTO),
    "a launcher of contiguous outputs": (launches_contiguous, X, torch.empty(ROWS, WIDTH), INTO),
    "a launcher that clears its output": (lambda x, out: out.zero_().add_(x), X, torch.empty(ROWS, WIDTH), INTO),
    "a launcher of integers": (
        lambda x, out: torch.argmax(x, -1, out=out),
        X,
        torch.zeros(ROWS, dtype=torch.int64),
        INTO,
    ),
}


@pytest.mark.parametrize("name", slow_but(CALLABLES, "layer norm in fp64", "views", "attention", "a launcher", *QUICK))
def test_a_correct_callable_needs_no_fix(name):
    function, *inputs = CALLABLES[name]
    told = inputs.pop() if isinstance(inputs[-1], dict) else {}
    report = audit(function, *inputs, name=name, **told)
    assert report.passed and not needs_fix(report.rows), report.markdown()


# candidates for ops of the registry


def fp64(function):
    """The function in fp64, rounded once."""

    def rounded(*tensors, **told):
        raised = [t.double() if t.is_floating_point() else t for t in tensors]
        return function(*raised, **told).to(tensors[0].dtype)

    return rounded


def through_views(function):
    """Elementwise through a tensor that lies the other way round."""

    def turned(*tensors, **told):
        return function(*(t.movedim(-1, 0).contiguous() for t in tensors), **told).movedim(0, -1)

    return turned


def by_rows_of(size, function):
    def chunked(*tensors, **told):
        lead, parts = tensors[0].shape[:-1], [t.reshape(-1, t.shape[-1]).split(size) for t in tensors]
        return torch.cat([function(*part, **told) for part in zip(*parts)]).unflatten(0, lead)

    return chunked


def silu(x):
    return x / (1 + torch.exp(-x))


def log_softmax(logits):
    shifted = logits.double() - logits.double().amax(-1, keepdim=True)
    return (shifted - torch.log(folded(shifted.exp()))[..., None]).float()


def rope_of_int64(x, table, positions=None, cu_seqlens=None, **told):
    if (positions if cu_seqlens is None else cu_seqlens).dtype != torch.int64:
        raise TypeError("positions must be int64")
    return bi.rope(x.contiguous(), table, positions, cu_seqlens, **told)


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return silu(x.double()).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors  # once: a checkpoint refuses a second time
        s = (x := x.double()).sigmoid()
        return (dy.double() * (s + x * s * (1 - s))).to(dy.dtype)


def of_permuted(function):
    """Elementwise through columns in another order, by indices that differ."""

    def moved(*tensors, **told):
        order = torch.arange(tensors[0].shape[-1]).flip(0)
        return function(*(t[..., order] for t in tensors), **told)[..., order.argsort()]

    return moved


def not_capturable(x, residual):
    return x + residual if x.isfinite().all().item() else residual + x


def asks_for_the_layout(x, weight):
    layout_for("mine", x.shape[:-1])
    return bi.linear(x, weight)


def add_then_norm(x, residual, weight, eps):
    total = bi.add(x, residual)
    return bi.rms_norm(total, weight, eps=eps), total


CANDIDATES = {
    "silu in chunks": ("silu", "bf16", by_rows_of(7, fp64(silu))),
    "silu through views": ("silu", "fp32", through_views(fp64(silu))),
    "gelu by torch": ("gelu", "fp32", fp64(F.gelu)),
    "gelu_tanh by torch": ("gelu_tanh", "bf16", fp64(F.gelu)),
    "add through views": ("add", "fp32", through_views(torch.add)),
    "add in place": ("add", "fp32", lambda x, residual: x.clone().add_(residual)),
    "scale in chunks": ("scale", "fp32", by_rows_of(9, lambda x, factor: x * factor)),
    "mask_fill": ("mask_fill", "bf16", lambda x, mask, value: torch.where(mask, value, x).to(x.dtype)),
    "log_softmax in fp64": ("log_softmax", "bf16", log_softmax),
    "log_softmax by torch": ("log_softmax", "fp32", lambda logits: logits.double().log_softmax(-1).float()),
    "linear of a copy": ("linear", "bf16", lambda x, weight: bi.linear(x.clone(), weight).clone()),
    "linear of rows": ("linear", "fp32", lambda x, weight: bi.linear(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)),
    "add_rms_norm of two ops": ("add_rms_norm", "bf16", add_then_norm),
    "qk_norm of a copy": ("qk_norm", "fp32", lambda x, weight, eps: bi.qk_norm(x.clone(), weight, eps=eps)),
    "rope of int64 alone": ("rope", "bf16", rope_of_int64),
    "silu as a Function": ("silu", "fp32", Silu.apply),
    "silu checkpointed": ("silu", "fp32", lambda x: checkpoint(fp64(silu), x, use_reentrant=False)),
    "add of permuted columns": ("add", "bf16", of_permuted(torch.add)),
    "add, not capturable": ("add", "fp32", not_capturable),
    "mask_fill in place": ("mask_fill", "fp32", lambda x, mask, value: x.clone().masked_fill_(mask, value)),
    "linear that asks for the layout": ("linear", "bf16", asks_for_the_layout),
    "ours, contiguous first": ("swiglu", "bf16", lambda gate, up: bi.swiglu(gate.contiguous(), up.contiguous())),
}


def judged(op: str, dtype: str, function) -> list:
    """Returns the rows of every relation that a candidate is held to."""
    subject = op_under_test(op, function, dtype)
    return forward.judge(subject, examples=1) + gradient.judge_gradients(subject)


def test_a_function_typed_at_a_prompt_is_not_called_wrong():
    """Its source cannot be read: of its static audit nothing is known."""
    exec("def typed(x):\n    return x.relu()", scope := {})
    report = audit(scope["typed"], X, backward=False, quiet=True)
    assert report.passed, report
    (static,) = [r for r in report.rows if r.relation == "atomics-free"]
    assert static.verdict == "unsupported" and "not readable" in static.detail


@pytest.mark.parametrize("name", slow_but(CANDIDATES, "log_softmax in fp64", "add of permuted columns"))
def test_a_correct_candidate_needs_no_fix(name):
    found = needs_fix(judged(*CANDIDATES[name]))
    assert not found, "\n".join(f"{r.relation} {r.layout} {r.inputs} {r.tensor}: {r.detail}" for r in found)


def way(subject: OpUnderTest, axis: str, name: str, asked=None):
    """Returns the verdict of one way to call an op."""
    (kind, relation, checks), u = single_call.AXES[axis], begun(subject)
    said = {"axes": [kind], "detail": axis}
    judged = partial(single_call.judged, subject, relation, name, asked and asked(u) or checks(u)[name], **said)
    return subject.attempt(relation, name, judged, **said)[0].verdict


def test_an_op_that_asks_for_the_layout_whatever_trains_is_unsupported_there():
    assert way(op_under_test("linear", asks_for_the_layout), "demand", FROZEN) == UNSUPPORTED
    assert way(under_test("linear", function=asks_for_the_layout), "demand", FROZEN) == NEEDS_FIX, "of ours it is a bug"


def test_an_op_that_cannot_be_captured_is_unsupported_there(monkeypatch):
    """A stand-in for CUDA's graphs, which no CPU has: while one is captured nothing can be waited for."""
    capturing = []

    @contextmanager
    def capture(graph):
        capturing.append(graph)
        yield
        capturing.clear()

    def item(t, original=torch.Tensor.item):
        if capturing:
            capturing.clear()
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return original(t)

    monkeypatch.setattr(torch.Tensor, "item", item)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    captured = lambda u: partial(modes.captured, u)
    assert way(op_under_test("add", not_capturable, "fp32"), "mode", modes.CAPTURED, captured) == UNSUPPORTED
    ours = under_test("add", "fp32", function=not_capturable)
    assert way(ours, "mode", modes.CAPTURED, captured) == NEEDS_FIX, "of ours it is a bug"


def test_a_lookup_whose_ids_differ_by_chance_is_still_a_scatter():
    report = audit(lambda ids, table: table[ids], IDS.unique()[:5], W, quiet=True)
    assert [r.relation for r in needs_fix(report.rows) if "index_put" in r.detail] == ["atomics-free"], report


def test_a_scatter_in_source_that_no_call_reached_is_still_one():
    report = audit(lambda x: x.index_add_(0, IDS, x) if len(x) > 10**6 else x * 2, X[:5], quiet=True)
    assert [r.relation for r in needs_fix(report.rows)] == ["atomics-free"], report


def test_there_are_enough():
    assert len(CALLABLES) + len(CANDIDATES) >= 120


def test_a_buffer_replaced_under_inference_mode_comes_back_where_the_module_then_raises():
    module = torch.nn.BatchNorm1d(4)
    before = module.running_mean
    with pytest.raises(RuntimeError, match="refused"), modes._inference(module):
        module.running_mean = torch.ones(4)
        raise RuntimeError("refused")
    assert module.running_mean is before and not module.running_mean.is_inference()
