"""Attention's cap, sinks, chunks and a v of its own width: the same bits in every call, near fp64, and each of them in
every form of the call."""

from dataclasses import replace

import pytest
import torch
from conftest import assert_same_bits

import bi_kernels as bi
from bi_kernels import MainGrads, TokenLayout, contract, reference
from bi_kernels.ops.attention.arguments import arguments
from bi_kernels.ops.attention.attention import attend
from bi_kernels.ops.attention.schedule import SCHEDULE
from bi_kernels.reference_gradients import gradient

BF16, FP32 = torch.bfloat16, torch.float32
# split where a sequence has several, each a program of its own, or in one program
SPLIT = replace(SCHEDULE, split=64, few=0), replace(SCHEDULE, split=64), replace(SCHEDULE, split=64, few=1000)
WAYS = {
    "cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "narrow v": {"wide": 16},
    "wide v": {"wide": 40},
    "sinks, wide v": {"sinks": True, "wide": 72},  # of which decode computes some columns a program
    "chunks": {"chunk": 50},
    "all": {"soft_cap": 2.0, "sinks": True, "wide": 16, "chunk": 70},
    "window": {"soft_cap": 2.0, "sinks": True, "window": 30},
}


def given(tokens: int, dtype=BF16, heads=(4, 2), width=24, wide=None, sinks=False, **told):
    """Returns q, k, v, the sinks, and the other arguments."""
    g = torch.Generator().manual_seed(tokens)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    q, k, v = (draw(tokens, h, w) for h, w in zip((heads[0], *2 * heads[1:]), (width, width, wide or width)))
    s = draw(heads[0]).to(dtype) if sinks else None
    return (2 * q).to(dtype), k.to(dtype), v.to(dtype), s, told


def run(q, k, v, sinks, schedule=SCHEDULE, **told):
    return attend(arguments(q, k, v, sinks=sinks, **told), schedule)


@pytest.mark.parametrize("way", WAYS)
def test_a_query_has_its_bits_in_every_call(way):
    q, k, v, sinks, told = given(180, **WAYS[way])
    expected = run(q, k, v, sinks, cu_seqlens_q=torch.tensor([0, 180]), **told)
    some = lambda t, n: tuple(x[-n:] for x in t)
    for n in (1, 3, 70):  # the last queries, behind a cache
        cached = {"cu_seqlens_q": torch.tensor([0, n]), "cu_seqlens_k": torch.tensor([0, 180])}
        for found, part in zip(run(q[-n:], k, v, sinks, **cached, **told), some(expected, n)):
            assert_same_bits(found, part)
        room = lambda t: torch.cat([t, torch.full_like(t[:76], 7.0)])[None]
        lengths = {"lengths_k": torch.tensor([180])}
        for found, part in zip(run(q[None, -n:], room(k), room(v), sinks, **lengths, **told), some(expected, n)):
            assert_same_bits(found[0], part)
        pages = {"block_table": torch.randperm(16)[None], **lengths}
        paged = [torch.empty(16, 16, *t.shape[2:]).to(t) for t in (room(k), room(v))]
        for t, whole in zip(paged, (room(k), room(v))):
            t[pages["block_table"][0]] = whole[0].unflatten(0, (16, 16))
        for found, part in zip(run(q[None, -n:], *paged, sinks, **pages, **told), some(expected, n)):
            assert_same_bits(found[0], part)
    ends = torch.tensor([0, 20, 200])
    beside = [torch.cat([torch.full_like(t[:20], 3.0), t]) for t in (q, k, v)]
    for found, part in zip(run(*beside, sinks, cu_seqlens_q=ends, **told), expected):
        assert_same_bits(found[20:], part)


@pytest.mark.parametrize("way", WAYS)
def test_who_computes_a_split_changes_no_bit(way):
    q, k, v, sinks, told = given(150, **WAYS[way])
    ends = {"cu_seqlens_q": torch.tensor([0, 1]), "cu_seqlens_k": torch.tensor([0, 150])}
    every = [run(q[-1:], k, v, sinks, s, **ends, **told) for s in SPLIT]
    whole = run(q[-1:], k, v, sinks, **ends, **told)[0]
    assert (whole != every[0][0]).any() or told.get("window", told.get("chunk")), "the splits are merged"
    for out, lse in every[1:]:
        assert_same_bits(out, every[0][0])
        assert_same_bits(lse, every[0][1])


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_within_the_contract_s_bounds(way, dtype):
    lengths, names = [7, 70], ("q", "k", "v", "sinks")
    q, k, v, sinks, told = given(77, dtype, **WAYS[way])
    inputs = {n: t.requires_grad_() for n, t in zip(names, (q, k, v, sinks)) if t is not None}
    ends = torch.tensor([0, 7, 77])
    with TokenLayout.packed(ends):
        out, lse = bi.attention(*inputs.values(), cu_seqlens=ends, **told)
    dy = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), list(inputs.values()), dy)
    expected = gradient("attention", {n: t.detach() for n, t in inputs.items()}, told, dy, lengths)
    for (name, e), y in zip(expected.items(), found, strict=True):
        limit = contract.bound("attention", dtype, *e, gradient=name)
        assert ((y.double() - e.exact).abs() <= limit).all(), name
        assert 2 * limit.max() < e.exact.abs().max() or name != "sinks", "the bound says something"


def sinks_gradient(split, layout_order=(0, 1, 2), padded=False, dtype=BF16) -> torch.Tensor:
    """Returns the sinks' main_grad after micro-batches of so many of three sequences."""
    lengths = (5, 33, 16)
    q, k, v, sinks, _ = given(sum(lengths), dtype, sinks=True)
    parts = [[t[a : a + n] for t in (q, k, v)] for a, n in zip((0, 5, 38), lengths)]
    sinks = torch.nn.Parameter(sinks)
    grads, begin = MainGrads([sinks]), 0
    for n in split:
        chosen = list(range(begin, begin + n))
        begin += n
        order = [i for i in layout_order if i in chosen]
        counts = torch.tensor([lengths[i] for i in order])
        q, k, v = (torch.cat([parts[i][j] for i in order]).requires_grad_() for j in range(3))
        told = {"cu_seqlens": torch.tensor([0, *counts.cumsum(0)])}
        layout = TokenLayout.packed(told["cu_seqlens"], order=[sorted(order).index(i) for i in order])
        if padded:
            width = 40
            rows = [torch.full((len(order), width, *t.shape[1:]), 5.0).to(t.dtype) for t in (q, k, v)]
            for t, whole in zip(rows, (q, k, v)):
                for row, some in zip(t, whole.detach().split(counts.tolist())):
                    row[width - len(some) :] = some
            q, k, v = (t.requires_grad_() for t in rows)
            told = {"lengths_q": counts, "lengths_k": counts, "left_padded": True}
            layout = TokenLayout.padded(counts, width, left=True, order=[sorted(order).index(i) for i in order])
        with layout:
            out, _ = bi.attention(q, k, v, sinks, **told)
        out.float().square().sum().backward()
    found = sinks.main_grad.clone()
    grads.drop()
    return found


def test_the_gradient_of_sinks_does_not_depend_on_the_split():
    expected = sinks_gradient([3])
    assert expected.abs().max() > 0
    for split in ([1, 1, 1], [2, 1], [1, 2]):
        assert_same_bits(sinks_gradient(split), expected)
    assert_same_bits(sinks_gradient([3], (2, 0, 1)), expected)
    assert_same_bits(sinks_gradient([3], padded=True), expected)
    assert_same_bits(sinks_gradient([2, 1], padded=True), expected)


def test_a_sink_of_minus_infinity_is_none_and_a_query_without_keys_has_none():
    q, k, v, sinks, _ = given(100, sinks=True)
    ends, none = torch.tensor([0, 100]), torch.full_like(sinks, -torch.inf)
    for found, plain in zip(bi.attention(q, k, v, none, cu_seqlens=ends), bi.attention(q, k, v, cu_seqlens=ends)):
        assert_same_bits(found, plain)
    few = torch.tensor([0, 60])  # the first 40 queries see nothing
    out, lse = bi.attention(q, k[:60], v[:60], sinks, cu_seqlens_q=ends, cu_seqlens_k=few)
    assert not out[:40].any() and (lse[:40] == -torch.inf).all() and lse[40:].isfinite().all()


def test_a_chunk_is_a_sequence_of_its_own_as_far_as_fp64_can_tell():
    q, k, v, sinks, _ = given(100, FP32, sinks=True)
    whole = bi.attention(q, k, v, sinks, cu_seqlens=torch.tensor([0, 100]), chunk=40)
    apart = bi.attention(q, k, v, sinks, cu_seqlens=torch.tensor([0, 40, 80, 100]))
    expected = reference.attention(q, k, v, sinks, lengths=[40, 40, 20])
    for *found, (exact, magnitude) in zip(whole, apart, expected):
        limit = contract.bound("attention", FP32, exact, magnitude)
        assert all(((y.double() - exact).abs() <= limit).all() for y in found)


def test_an_fp32_sink_beside_bf16():
    q, k, v, sinks, _ = given(40, sinks=True)
    ends = torch.tensor([0, 40])
    both = [bi.attention(q, k, v, s, cu_seqlens=ends)[0] for s in (sinks, sinks.float())]
    assert_same_bits(*both)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("soft_cap is 0", {"soft_cap": 0.0}),
        ("soft_cap is -1", {"soft_cap": -1.0}),
        ("chunk is 0", {"chunk": 0}),
        ("and window is 3", {"chunk": 4, "window": 3}),
        ("causal is False", {"chunk": 4, "causal": False}),
        ("sinks has shape (2,)", {"sinks": torch.zeros(2, dtype=BF16)}),
        ("sinks has dtype torch.float16", {"sinks": torch.zeros(4, dtype=torch.float16)}),
        ("v has heads of width 300", {"v": torch.zeros(9, 2, 300, dtype=BF16)}),
    ],
)
def test_what_is_refused(said, wrong):
    q, k, v, _, _ = given(9)
    with pytest.raises((ValueError, TypeError), match=r"^attention: ") as error:
        bi.attention(**{"q": q, "k": k, "v": v, "cu_seqlens": torch.tensor([0, 9])} | wrong)
    assert said in str(error.value)
