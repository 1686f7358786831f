"""`audit` finds another order of a sum that the inputs given do not show: in bf16, at any threshold, of few rows."""

import pytest
import torch

from bi_kernels.audit import audit
from bi_kernels.audit.findings import needs_fix
from bi_kernels.contract import EPS

ORDERS = {  # of the products of a sum, by which calls of more rows than the threshold add otherwise
    "split-K": lambda p: sum(blocks(q, 8) for q in p.split(p.shape[-1] // 4, -1)),
    "two halves": lambda p: torch.add(*(blocks(q, 8) for q in p.chunk(2, -1))),
    "reversed": lambda p: blocks(p.flip(-1), 8),
    "block size": lambda p: blocks(p, 16),
    "": lambda p: blocks(p, 8),
}


def blocks(p, size):
    total = torch.zeros(p.shape[:-1])
    for part in p.split(size, -1):
        total = total + part.sum(-1)
    return total


def made(op: str, order: str, threshold: int):
    """Returns an op of bf16 that computes in fp32 and rounds once; calls of more rows than the threshold add in that
    order."""
    total = lambda p, rows: ORDERS[order if rows > threshold else ""](p)

    def linear(x, weight):
        return total(x.float()[:, None] * weight.float(), len(x)).to(x.dtype)

    def rms_norm(x, weight):
        scale = torch.rsqrt(total(x.float() ** 2, len(x)) / x.shape[-1] + EPS)
        return (x.float() * scale[:, None] * weight.float()).to(x.dtype)

    def softmax(x):
        e = (x.float() - x.float().amax(-1, keepdim=True)).exp()
        return (e / total(e, len(x))[:, None]).to(x.dtype)

    def attention(q, k, v):
        scores = blocks(q.float()[:, :, None] * k.float()[:, None], 8) / q.shape[-1] ** 0.5
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        out = total(p[:, :, None] * v.float().transpose(1, 2)[:, None], len(q))
        return (out / total(p, len(q))[..., None]).to(q.dtype)

    return {"linear": linear, "rms_norm": rms_norm, "softmax": softmax, "attention": attention}[op]


def given(op: str, rows: int, seed: int) -> tuple:
    g = torch.Generator().manual_seed(100 + seed)
    drawn = lambda *shape: torch.randn(*shape, generator=g).bfloat16()
    own = {"linear": [(80, 64)], "rms_norm": [(64,)], "attention": [(rows, 64, 16)] * 2}.get(op, [])
    return drawn(rows, *((64, 16) if op == "attention" else (64,))), *(drawn(*shape) for shape in own)


OTHERS = [("rms_norm", "reversed"), ("softmax", "block size"), ("attention", "two halves")]
ORDERED = [(op, order, 12 if op == "attention" else 300, 4 if op == "attention" else 8) for op, order in OTHERS]
LATER = [("linear", order, 300, 8) for order in ORDERS if order and order != "split-K"]
ORDERED += [("linear", "split-K", 300, 8)]
FEW = [("linear", "reversed", 8, 1), ("rms_norm", "reversed", 8, 64), ("softmax", "reversed", 8, 128)]


@pytest.mark.parametrize(
    "op, order, rows, threshold", [*ORDERED, *FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER)]
)
def test_another_order_is_found_with_every_seed(op, order, rows, threshold):
    """Also of eight rows, where the threshold lies beyond them."""
    for seed in range(3):
        report = audit(made(op, order, threshold), *given(op, rows, seed), seed=seed, backward=False)
        assert any(r.mismatches for r in report.rows), (seed, report.markdown())


@pytest.mark.parametrize("op", ["linear", "rms_norm", "softmax", "attention"])
def test_one_order_passes(op):
    report = audit(made(op, "", 8), *given(op, 12 if op == "attention" else 40, 0), backward=False)
    assert report.passed and not needs_fix(report.rows), report.markdown()


class OrderOfDx(torch.autograd.Function):
    """The gradient of x, summed over the features of y in another order beyond a number of rows."""

    @staticmethod
    def forward(ctx, x, weight, threshold):
        ctx.save_for_backward(x, weight)
        ctx.threshold = threshold
        return made("linear", "", 0)(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        order = ORDERS["reversed" if len(x) > ctx.threshold else ""]
        return order(dy.float()[:, None] * weight.float().T).to(x.dtype), None, None


def test_another_order_of_a_backward_is_found():
    for seed in range(3):
        report = audit(lambda x, weight: OrderOfDx.apply(x, weight, 8), *given("linear", 300, seed), seed=seed)
        assert any(r.mismatches and r.tensor == "dx" and r.inputs == "cancelling" for r in report.rows)
