"""What an op remembers of a call changes nothing but its time: mistakes have their sentences, and inputs their bits."""

from fractions import Fraction

import pytest
import torch

import bi_kernels
from bi_kernels.audit.compare import compare
from bi_kernels.checks import once

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def made(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unaligned(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def strided(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, torch.full_like(t, float("nan") if t.is_floating_point() else 0)], -1)[..., 0]


TABLE, POSITIONS = bi_kernels.rope_table(32, 16), torch.arange(5)
# op: the inputs that a call of it has beside others
CALLS = {
    "linear": (lambda x: bi_kernels.linear(x, made(24, 16, dtype=x.dtype)), (40, 16)),
    "rms_norm": (lambda x: bi_kernels.rms_norm(x, made(16, dtype=x.dtype)), (5, 16)),
    "add_rms_norm": (
        lambda x: bi_kernels.add_rms_norm(x, made(5, 16, dtype=x.dtype), made(16, dtype=x.dtype)),
        (5, 16),
    ),
    "rope": (lambda x: bi_kernels.rope(x, TABLE, POSITIONS), (5, 2, 16)),
    "swiglu": (lambda x: bi_kernels.swiglu(x, made(5, 16, dtype=x.dtype)), (5, 16)),
    "scale": (lambda x: bi_kernels.scale(x, 0.5), (5, 16)),
    "embedding": (lambda x: bi_kernels.embedding(POSITIONS, x), (9, 16)),
    "decode": (
        lambda x: bi_kernels.attention(
            x, *[made(3, 20, 2, 16, dtype=x.dtype, seed=s) for s in (1, 2)], lengths_k=torch.tensor([20, 1, 7])
        ),
        (3, 1, 4, 16),
    ),
}
EACH = pytest.mark.parametrize("call, shape", CALLS.values(), ids=CALLS)


def flat(out) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else list(out)


def same(a, b) -> bool:
    pairs = zip(flat(a), flat(b), strict=True)
    return all(s.dtype == t.dtype and not compare(s, t).mismatches for s, t in pairs)


@EACH
def test_other_strides_and_addresses_have_the_same_bits(call, shape):
    x = made(*shape)
    with torch.no_grad():
        expected = call(x)
        for other in (unaligned, strided, torch.clone):
            assert same(call(other(x)), expected), other.__name__
        assert same(call(x), expected)


@EACH
def test_each_dtype_has_its_own(call, shape):
    with torch.no_grad():
        first = {dtype: call(made(*shape, dtype=dtype)) for dtype in (BF16, FP16, FP32)}
        for dtype, out in first.items():
            assert flat(out)[0].dtype == dtype and same(call(made(*shape, dtype=dtype)), out)
        assert not same([t.float() for t in flat(first[BF16])], [t.float() for t in flat(first[FP16])])


@EACH
def test_a_gradient_is_there_when_it_is_wanted_and_only_then(call, shape):
    x = made(*shape)
    expected = call(x)
    leaf = made(*shape).requires_grad_()
    for _ in range(2):
        out = call(leaf)
        assert same(out, expected) and flat(out)[0].requires_grad
        (grad,) = torch.autograd.grad(flat(out)[0].float().sum(), leaf)
        assert grad.shape == x.shape and bool(grad.any())
        assert not any(t.requires_grad for t in flat(call(x)))
        with torch.no_grad():
            assert not any(t.requires_grad for t in flat(call(leaf)))
        with torch.inference_mode():
            assert same(call(x), expected)


def said(op, **given) -> tuple[type, str]:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        op(**given)
    return caught.type, str(caught.value)


Q, K = made(2, 1, 4, 16), made(2, 8, 2, 16)
LENGTHS, PAGES = torch.tensor([8, 3]), torch.tensor([[1], [0]])
# an op, arguments that are right, and what is wrong in their place
MISTAKES = [
    (bi_kernels.linear, {"x": made(3, 16), "weight": made(8, 16)}, {"weight": made(8, 16, dtype=FP16)}),
    (bi_kernels.linear, {"x": made(3, 16), "weight": made(8, 16)}, {"weight": made(8, 17)}),
    (bi_kernels.linear, {"x": made(3, 16), "weight": made(8, 16)}, {"x": [1.0]}),
    (bi_kernels.linear, {"x": made(3, 16), "weight": made(8, 16)}, {"x": made(3, 16).to("meta")}),
    (bi_kernels.linear, {"x": made(3, 16), "weight": made(8, 16)}, {"x": made(3, 16).long()}),
    (bi_kernels.linear, {"x": made(3, 16), "weight": made(8, 16), "bias": made(8)}, {"bias": made(7)}),
    (bi_kernels.rms_norm, {"x": made(3, 16), "weight": made(16)}, {"weight": made(16, dtype=FP16)}),
    (bi_kernels.rms_norm, {"x": made(3, 16), "weight": made(16)}, {"weight": made(15)}),
    (bi_kernels.rms_norm, {"x": made(3, 16), "weight": made(16), "eps": 0.5}, {"eps": Fraction(1, 2)}),
    (bi_kernels.rms_norm, {"x": made(3, 16), "weight": made(16), "eps": 0.5}, {"eps": "0.5"}),
    (bi_kernels.rope, {"x": made(5, 2, 16), "table": TABLE, "positions": POSITIONS}, {"positions": POSITIONS.float()}),
    (bi_kernels.rope, {"x": made(5, 2, 16), "table": TABLE, "positions": POSITIONS}, {"positions": POSITIONS[:4]}),
    (bi_kernels.rope, {"x": made(5, 2, 16), "table": TABLE, "positions": POSITIONS}, {"positions": None}),
    (bi_kernels.rope, {"x": made(5, 2, 16), "table": TABLE, "positions": POSITIONS}, {"table": tuple(TABLE)}),
    (bi_kernels.rope, {"x": made(5, 2, 16), "table": TABLE, "positions": POSITIONS}, {"x": made(5, 2, 14)}),
    (bi_kernels.swiglu, {"gate": made(3, 16), "up": made(3, 16)}, {"up": made(3, 16, dtype=FP32)}),
    (bi_kernels.swiglu, {"gate": made(3, 16), "up": made(3, 16)}, {"up": made(16, 3)}),
    (bi_kernels.embedding, {"ids": LENGTHS, "weight": made(9, 16)}, {"ids": LENGTHS + 1}),
    (bi_kernels.embedding, {"ids": LENGTHS, "weight": made(9, 16)}, {"ids": LENGTHS.float()}),
    (bi_kernels.embedding, {"ids": LENGTHS, "weight": made(9, 16), "padding_id": 1}, {"padding_id": Fraction(1)}),
    (bi_kernels.embedding, {"ids": LENGTHS, "weight": made(9, 16), "padding_id": 1}, {"padding_id": 9}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS}, {"k": K.half()}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS}, {"v": K[..., :8]}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS}, {"lengths_k": LENGTHS.float()}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS}, {"lengths_k": LENGTHS + 1}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS}, {"lengths_k": LENGTHS - 4}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS}, {"lengths_k": LENGTHS[:1]}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS}, {"lengths_k": [8, 3]}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS}, {"lengths_q": LENGTHS}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS, "window": 2}, {"window": Fraction(2)}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "scale": 1.0}, {"scale": float("inf")}),
    (bi_kernels.attention, {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS, "block_table": PAGES}, {"lengths_k": None}),
    (
        bi_kernels.attention,
        {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS, "block_table": PAGES},
        {"block_table": -PAGES},
    ),
    (
        bi_kernels.attention,
        {"q": Q, "k": K, "v": K, "lengths_k": LENGTHS, "block_table": PAGES},
        {"q": made(2, 1, 4, 16).requires_grad_()},
    ),
]


@pytest.mark.parametrize("op, right, wrong", MISTAKES, ids=[f"{m[0].__name__} {[*m[2]][0]}" for m in MISTAKES])
def test_a_mistake_has_its_sentence_whatever_was_right_before(op, right, wrong):
    before = said(op, **(right | wrong))
    for _ in range(2):
        op(**right)
        assert said(op, **(right | wrong)) == before


def test_lengths_that_are_written_to_are_looked_at_again():
    lengths = LENGTHS.clone()
    for _ in range(2):
        bi_kernels.attention(Q, K, K, lengths_k=lengths)
        lengths[1] = 9
        with pytest.raises(ValueError, match=r"lengths_k is \[8, 9\], expected 0 to 8"):
            bi_kernels.attention(Q, K, K, lengths_k=lengths)
        lengths[1] = 3


def test_pages_are_looked_at_again_with_other_lengths():
    table, short, long = torch.tensor([[1, 7], [0, 1]]), torch.tensor([8, 9]), torch.tensor([9, 9])
    for _ in range(2):
        bi_kernels.attention(Q, K, K, lengths_k=short, block_table=table)
        with pytest.raises(ValueError, match="block_table holds 0 to 7, expected 0 to 1"):
            bi_kernels.attention(Q, K, K, lengths_k=long, block_table=table)


def test_ids_that_are_written_to_are_looked_at_again():
    ids, weight = torch.tensor([0, 8]), made(9, 16)
    bi_kernels.embedding(ids, weight)
    ids[0] = 9
    with pytest.raises(ValueError, match="ids holds 9 at flat index 0, expected 0 to 8"):
        bi_kernels.embedding(ids, weight)
    with pytest.raises(ValueError, match="expected 0 to 7"):
        bi_kernels.embedding(ids - 1, weight[:8])


def test_zeros_of_both_signs_are_not_confused():
    x, everywhere = torch.ones(4), torch.ones(4, dtype=torch.bool)
    for value in (0.0, -0.0, 0.0):
        sign = value.hex().startswith("-")
        assert torch.signbit(bi_kernels.mask_fill(x, everywhere, value)).eq(sign).all()
        assert torch.signbit(bi_kernels.scale(x, value)).eq(sign).all()


def test_a_check_is_asked_once_of_each_kind_and_of_all_that_it_refused():
    asked = []

    @once
    def check(name, t, number):
        asked.append((name, number))
        if number < 0:
            raise ValueError(name)
        return len(asked)

    a, b = torch.zeros(2, 3), torch.ones(3, 2).t()
    assert check("a", a, 1) == check("a", b, 1) == 1  # values and strides are not what it may look at
    kinds = [("a", a.half(), 1), ("a", a[:1], 1), ("b", a, 1), ("a", None, 1), ("a", a, True), ("a", a, 1.0)]
    assert [check(*k) for k in kinds] == [2, 3, 4, 5, 6, 7] == [check(*k) for k in kinds]
    for _ in range(2):
        with pytest.raises(ValueError, match="c"):
            check("c", a, -1)
    assert len(asked) == 9 and check("d", [1], 1) == 10 and check("d", [1], 1) == 11  # a list has no hash


@pytest.mark.parametrize("wrong", [9, -1, 2**40])
def test_a_target_or_id_that_was_written_behind_pytorchs_back_gives_nan_and_no_number(wrong):
    logits, hidden, weight = made(3, 9), made(3, 16), made(9, 16)
    targets = torch.tensor([0, -100, 8])
    calls = (
        lambda: bi_kernels.token_logprob(logits, targets)[0],
        lambda: bi_kernels.lm_head_logprob(hidden, weight, targets)[0],
    )
    assert all(call().isfinite().all() for call in calls)
    ids = targets[[0, 2]]
    assert bi_kernels.embedding(ids, weight).isfinite().all()
    targets.data[0] = ids.data[0] = wrong
    for call in calls:
        assert call().isnan().tolist() == [True, False, False] and call()[1] == 0
    assert bi_kernels.embedding(ids, weight).isnan().all(1).tolist() == [True, False]
