"""Experiments see the bugs that they are for, and nothing in the ops as they are."""

from dataclasses import replace

import pytest
import torch

import bi_kernels
from bi_kernels.audit import load
from bi_kernels.audit.findings import NEEDS_FIX
from bi_kernels.ops import embedding as embed
from bi_kernels.ops import lm_head
from bi_kernels.ops.embedding import MANY
from helpers import attention_on_gpu, vocabulary, without_main_grad


def session(audit: str, dtype: str = "bf16"):
    found = load(audit, {"dtype": dtype, "device": "cpu", "op": "", "shapes": "tiny", "seed": 0})
    found.pool = None
    return found


class Summed(torch.autograd.Function):
    """y, and for a bias of it the sum of what comes upstream, by torch."""

    @staticmethod
    def forward(ctx, y, bias):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return dy, dy.flatten(0, -2).sum(0)


def summed_without_main_grad(x, weight, bias):
    if hasattr(bias, "main_grad"):
        return bi_kernels.linear(x, weight, bias)
    return Summed.apply(bi_kernels.linear(x, weight, bias.detach()), bias)


@pytest.mark.parametrize("dtype, differs", [("fp32", True), ("bf16", False)])
def test_a_gradient_that_is_another_without_main_grad_is_found_in_fp32(dtype, differs):
    """In bf16 its order hardly shows, which is why each audit asks in fp32, too."""
    own = session("backward", dtype)
    s = next(s for s in own.make() if s.problem.op.name == "linear_bias")
    found = without_main_grad.of(replace(s, function=summed_without_main_grad))
    assert [r.tensor for r in found if r.verdict == NEEDS_FIX] == ["dbias.grad"] * differs
    rows, lines = without_main_grad.judge(own)
    asked = {(r.op, r.dtype) for r in rows if not r.control}
    assert {dtype for op, dtype in asked if op == "linear_bias"} == {dtype, "fp32"} and len(lines) == len(rows) - 1
    assert [r.verdict == NEEDS_FIX for r in rows] == [r.control for r in rows] and rows[-1].caught


def test_a_gradient_of_this_package_that_is_not_asked_without_main_grad_needs_a_fix(monkeypatch):
    of = without_main_grad.of
    found = lambda s: of(s)[1 if s.candidate == "bi_kernels" and s.problem.op.name == "linear_bias" else 0 :]
    monkeypatch.setattr(without_main_grad, "of", found)
    rows, _ = without_main_grad.judge(session("backward", "fp32"))
    left = [(r.op, r.tensor, r.detail) for r in rows if r.verdict == NEEDS_FIX and not r.control]
    assert left == [("linear_bias", "dweight.grad", "required, not run")]


def test_a_control_of_attention_in_a_graph_that_raises_is_a_control_that_was_missed(monkeypatch):
    def graph():
        raise RuntimeError("no graph")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    rows = attention_on_gpu.of_nobody(session("attention"), 0)
    assert [(r.control, r.caught) for r in rows] == [(True, False)] * 2 and len({r.candidate for r in rows}) == 2


def test_torchs_table_moves_with_the_split_where_one_id_is_frequent_and_ours_does_not():
    rows, lines = vocabulary.frequent(session("vocabulary"), "fp32")
    assert [(r.verdict == NEEDS_FIX, r.control) for r in rows] == [(False, False), (True, True)]
    together, (most, _, other) = lines[0]["of one id"], vocabulary.OFTEN
    assert max(most, other) < 2 * MANY <= together, "programs of its own in one call, and in none of a sample"


@pytest.mark.slow
def test_an_lm_head_whose_parts_are_no_whole_blocks_is_found_with_few_tokens(monkeypatch):
    def parts(rows: int, vocab: int, kept: int) -> list[tuple[int, int]]:
        step = max(lm_head.BLOCK, lm_head.SCRATCH // max(rows, 1) // lm_head.BLOCK)
        return [(0, kept)] * (kept > 0) + [(at, min(at + step, vocab)) for at in range(kept, vocab, step)]

    own = session("vocabulary")
    monkeypatch.setattr(lm_head, "_chunks", parts)
    found = {tokens: vocabulary.handoff(own, "bf16", [tokens])[0] for tokens in vocabulary.HANDED}
    assert [any(r.verdict == NEEDS_FIX for r in rows) for rows in found.values()] == [False, True]


def reads_the_last_row(ids, weight):
    return embed.embedding(ids.clamp(max=len(weight) - 1), weight)


@pytest.mark.parametrize("function, verdict", [(embed.embedding, "pass"), (reads_the_last_row, NEEDS_FIX)])
def test_an_id_outside_the_table_is_told_from_the_nearest_row(function, verdict, monkeypatch):
    """As on a GPU, where ids that were checked are not looked at again."""
    own = session("vocabulary", "fp32")
    monkeypatch.setattr(type(own), "on_gpu", True)
    monkeypatch.setattr(embed, "check_ids", lambda *args: None)
    monkeypatch.setattr(bi_kernels, "embedding", function)
    (row,) = vocabulary.outside(own)
    assert row.verdict == verdict, row.detail
