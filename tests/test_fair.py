"""No false alarm: correct implementations that are written otherwise need no fix, whatever is asked of them.

Half are any callables, the other half candidates for ops of the registry.
"""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from conftest import op_under_test, slow_but

import bi_kernels as bi
from bi_kernels.audit import audit
from bi_kernels.audit.checks import forward, gradient
from bi_kernels.audit.findings import needs_fix
from bi_kernels.contract import EPS

ROWS, WIDTH = 20, 32
G = torch.Generator().manual_seed(0)
X, Y = (torch.randn(ROWS, WIDTH, generator=G) for _ in range(2))
W, V = torch.randn(24, WIDTH, generator=G), torch.randn(WIDTH, generator=G)
IDS = torch.randint(0, 24, (ROWS,), generator=G)
S = torch.randn(5, 12, 16, generator=G)  # sequences
HALF = X.bfloat16()


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


CALLABLES = {
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
    "an array": (lambda x: x.detach().numpy() * 2, X),
    "int32": (lambda ids: W[ids.long()], IDS.int()),
    "positions": (lambda x, at: x * at[:, None].cos(), X, torch.arange(ROWS) % 7),
    "padding ids": (lambda ids: F.embedding(ids, W, padding_idx=0), IDS % 3),
    "in place, unseen": (lambda x: (np.multiply(x.detach().numpy(), 2, out=x.detach().numpy()), x)[1], X),
    "a launcher": (lambda x, out: out.copy_(x * 2), X, torch.empty(ROWS, WIDTH)),
    "a launcher of contiguous outputs": (launches_contiguous, X, torch.empty(ROWS, WIDTH)),
    "a launcher that clears its output": (lambda x, out: out.zero_().add_(x), X, torch.empty(ROWS, WIDTH)),
    "a launcher of integers": (lambda x, out: torch.argmax(x, -1, out=out), X, torch.zeros(ROWS, dtype=torch.int64)),
}


@pytest.mark.parametrize(
    "name", slow_but(CALLABLES, "torch.compile, eager", "layer norm in fp64", "views", "attention", "a launcher")
)
def test_a_correct_callable_needs_no_fix(name):
    function, *inputs = CALLABLES[name]
    report = audit(function, *inputs, name=name, outputs=("out",) * name.startswith("a launcher"))
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
    "ours, contiguous first": ("swiglu", "bf16", lambda gate, up: bi.swiglu(gate.contiguous(), up.contiguous())),
}


def judged(op: str, dtype: str, function) -> list:
    """Returns the rows of every relation that a candidate is held to."""
    subject = op_under_test(op, function, dtype)
    return forward.judge(subject, examples=1) + gradient.judge_gradients(subject)


def test_a_function_typed_at_a_prompt_is_not_called_wrong():
    """Its source cannot be read: of its static audit nothing is known."""
    exec("def typed(x, weight):\n    return bi.linear(x, weight)", scope := {"bi": bi})
    report = audit(scope["typed"], X, W, backward=False, quiet=True)
    assert report.passed, report
    (static,) = [r for r in report.rows if r.relation == "atomics-free"]
    assert static.verdict == "unsupported" and "not readable" in static.detail


@pytest.mark.parametrize("name", slow_but(CANDIDATES, "linear of rows", "log_softmax in fp64"))
def test_a_correct_candidate_needs_no_fix(name):
    found = needs_fix(judged(*CANDIDATES[name]))
    assert not found, "\n".join(f"{r.relation} {r.layout} {r.inputs} {r.tensor}: {r.detail}" for r in found)
