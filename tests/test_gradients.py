"""The gradient check flags every backward that is broken, passes those that are not, and calls nothing a pass that it
did not run; the layouts it gives the ops, the buffers, and a training step."""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, slow_but, under_test

import bi_kernels
from bi_kernels.audit.checks import gradient as gradients
from bi_kernels.audit.checks import long_sequences
from bi_kernels.audit.checks.gradient import DETERMINISM, INVARIANCE, NO_GRAD_NEEDED
from bi_kernels.audit.controls import run as broken
from bi_kernels.audit.controls.experts import EXPERT_CONTROLS
from bi_kernels.audit.controls.gradient import GRADIENT_CONTROLS, with_backward
from bi_kernels.audit.controls.rows import ROW_CONTROLS
from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED, Row
from bi_kernels.audit.layouts import VIEWS, Call, layouts
from bi_kernels.audit.session import start
from bi_kernels.audit.static import binary as static
from bi_kernels.audit.static import launches
from bi_kernels.audit.static import source as syntax
from bi_kernels.audit.static.verdict import STATIC
from bi_kernels.audit.targets.op import CANCELLING, OpUnderTest
from bi_kernels.audit.targets.op_step import token_layout
from bi_kernels.contract import SHAPES, SWEEP
from bi_kernels.tokens import SLAB, TokenLayout
from helpers import backward, training

RUNS = "interpreter_gradient_runs"
# that an interpreter judges, too
HERE = [c for c in (*GRADIENT_CONTROLS, *ROW_CONTROLS, *EXPERT_CONTROLS) if not c.gpu]
AUDITS = list(dict.fromkeys(c.audit for c in HERE))


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch):
    monkeypatch.delenv("BI_AUDIT_OUT", raising=False)


@pytest.fixture
def fewer(monkeypatch):
    """The layouts and the row counts in which a control shows, and two runs: an audit's controls need no more."""
    monkeypatch.setattr(gradients, "LAYOUTS", ("packed", "permuted", "micro_batches:ragged"))
    monkeypatch.setattr(gradients, "WITH_NEIGHBOURS", ("neighbours",))
    monkeypatch.setattr(gradients, "VIEWS", {})
    monkeypatch.setitem(SWEEP, RUNS, 2)
    monkeypatch.setitem(SWEEP, "rows", [1, 16, 17, 257, 300])


def subject(op: str, function=None, dtype: str = "bf16", case: str = "") -> OpUnderTest:
    return replace(under_test(op, dtype, case, function), candidate="test")


def report(found: list[Row]) -> str:
    return "\n".join(
        f"{r.op} {r.dtype} {r.relation} {r.layout} {r.inputs} {r.tensor}: {r.verdict}, {r.mismatches} of "
        f"{r.elements} at {r.first_index}; {r.detail}"
        for r in found
    )


def in_need(found: list[Row]) -> list[Row]:
    return [r for r in found if r.verdict == NEEDS_FIX]


# Controls


@pytest.mark.parametrize("control", [c for c in HERE if c.relation != STATIC], ids=lambda c: c.name)
def test_a_control_without_its_defect_passes_the_experiment_that_flags_it(control, monkeypatch):
    monkeypatch.setitem(SWEEP, RUNS, 2)
    mended = replace(control, function=partial(control.function, defect=False))
    monkeypatch.setattr(broken, "EVERY", [mended])
    found = start(control.audit, {}).controls()
    assert [(r.candidate, r.verdict, r.caught) for r in found] == [(control.name, PASS, False)], report(found)


def empty(level: str, monkeypatch) -> None:
    """The static audit finds nothing at a level: PTX and SASS are read by the process that compiles."""
    if level == "AST":
        monkeypatch.setattr(syntax, "_forbidden", lambda f: ())
    elif level == "torch":
        monkeypatch.setattr(launches, "_dispatch_mode", lambda launches: nullcontext())
    else:
        call = static.executor.call
        monkeypatch.setattr(
            static.executor, "call", lambda _, messages, **how: call("one_level_blind:compiled", level, messages, **how)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "audit, level", [("rms_norm", "PTX"), ("rms_norm", "SASS"), ("vocabulary", "AST"), ("vocabulary", "torch")]
)
def test_what_one_level_finds_is_not_counted_for_another(audit, level, monkeypatch):
    mine = [c for c in GRADIENT_CONTROLS if c.audit == audit and c.relation == STATIC]
    assert level in {c.level for c in mine}
    monkeypatch.setattr(broken, "EVERY", mine)
    if audit == "vocabulary":  # compiling takes its time, and is not what these levels ask
        monkeypatch.setattr(static, "_compile_elsewhere", lambda messages: ["not compiled"] * len(messages))
    empty(level, monkeypatch)
    found = start(audit, {}).controls()
    assert {c.level: r.caught for c, r in zip(mine, found)} == {c.level: c.level != level for c in mine}, report(found)


def test_a_fold_that_depends_on_the_call_beyond_many_tokens_is_seen_where_a_sequence_is_long(monkeypatch):
    monkeypatch.setattr(long_sequences, "LAYOUTS", ("micro_batches:each",))
    control = next(c for c in GRADIENT_CONTROLS if c.relation == long_sequences.LONG_SEQUENCES)
    made = lambda defect: subject(control.op, partial(control.function, defect=defect))
    judged = lambda defect: [*long_sequences.by_layout(made(defect), [8200, 33])]
    assert {r.tensor for r in in_need(judged(True))} == {"dweight"} and not in_need(judged(False))


def test_long_sequences_are_judged_on_a_gpu_alone(monkeypatch):
    s = subject("rms_norm")
    assert not long_sequences.judge(s)
    monkeypatch.setattr(long_sequences, "applies", lambda subject: True)
    monkeypatch.setitem(long_sequences.LONG, "lengths", [40, 3])
    monkeypatch.setitem(long_sequences.LONG, "accurate", [30, 2])
    rows = long_sequences.judge(s)
    assert not in_need(rows) and {r.layout for r in rows} == {*long_sequences.LAYOUTS, "rows"}


def test_a_control_that_raises_is_not_caught(fewer, monkeypatch):
    def raises(*tensors, **more):
        raise RuntimeError("boom")

    monkeypatch.setattr(broken, "EVERY", [replace(c, function=raises) for c in GRADIENT_CONTROLS])
    for audit in AUDITS:
        assert not [r for r in start(audit, {}).controls() if r.caught]


# Judging one op


def test_a_check_without_a_row_needs_a_fix():
    (row,) = subject("rms_norm").attempt(INVARIANCE, "batch", list)
    assert (row.verdict, row.detail) == (NEEDS_FIX, "required, not run")


# Candidates that do not do what they should


def rms_norm_without(which: int):
    return lambda *tensors, **more: bi_kernels.rms_norm(
        *(t.detach() if i == which else t for i, t in enumerate(tensors)), **more
    )


def raises_for(shape: tuple[int, ...], when: str):
    """rms_norm that fails on x of that leading shape, in its forward or in its backward."""

    class Fails(torch.autograd.Function):
        forward = staticmethod(lambda ctx, y: y.clone())

        @staticmethod
        def backward(ctx, dy):
            raise RuntimeError("boom\nand more")

    def fails(x, weight, eps):
        y = bi_kernels.rms_norm(x, weight, eps)
        if tuple(x.shape[:-1]) == shape and when == "forward":
            raise RuntimeError("boom\nand more")
        return Fails.apply(y) if tuple(x.shape[:-1]) == shape else y

    return fails


class _Altered(torch.autograd.Function):
    """x, whose gradient alter(gradient) becomes."""

    @staticmethod
    def forward(ctx, x, alter):
        ctx.alter = alter
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.alter(dy), None


def test_a_gradient_left_in_padding_is_reported(fewer, monkeypatch):
    monkeypatch.setattr(gradients, "LAYOUTS", ("packed", "batch", "left_padded"))
    found = list(
        gradients.by_split(subject("silu", lambda x: bi_kernels.silu(_Altered.apply(x, lambda g: g + (g == 0)))))
    )
    bad = in_need(found)
    assert {r.layout for r in bad} >= {"batch", "left_padded"}
    assert any("left a gradient of x in padding" in r.detail for r in bad), report(found)


def test_a_gradient_that_depends_on_how_its_upstream_lies_is_reported(fewer, monkeypatch):
    monkeypatch.setattr(gradients, "VIEWS", VIEWS)

    class Uneven(torch.autograd.Function):
        forward = staticmethod(lambda ctx, y: y.clone())
        backward = staticmethod(lambda ctx, dy: dy if dy.is_contiguous() else dy * 2)

    for function, expected in (
        (bi_kernels.silu, set()),
        (lambda x: Uneven.apply(bi_kernels.silu(x)), {*VIEWS} - {"unaligned view"}),
    ):
        assert {r.layout for r in in_need(list(gradients.by_split(subject("silu", function))))} == expected


@pytest.mark.parametrize("which, name", [(0, "x"), (1, "weight")])
def test_a_backward_that_leaves_no_gradient_is_reported(which, name, fewer):
    s = subject("rms_norm", rms_norm_without(which))
    assert f"left no gradient for {name}" in report(in_need(gradients.judge_gradients(s)))
    bad = in_need(gradients.judge_gradient_accuracy(s))
    assert {row.inputs for row in bad} == {*gradients.ACCURATE} and f"left no gradient for {name}" in report(bad)


@pytest.mark.parametrize(
    "layout, when", slow_but([("micro_batches:ragged", "backward"), ("neighbours", "forward")], "micro_batches:ragged")
)
def test_an_error_in_one_layout_is_reported_there(layout, when, monkeypatch):
    monkeypatch.setattr(gradients, "LAYOUTS", ("packed", "singles", "batch:16", "micro_batches:ragged", "neighbours"))
    monkeypatch.setattr(gradients, "WITH_NEIGHBOURS", ())
    monkeypatch.setitem(SWEEP, RUNS, 2)
    every = layouts(SHAPES["tiny"]["lengths"])
    elsewhere = {call.index.shape for name in gradients.LAYOUTS if name != layout for call in every[name]}
    shape = next(call.index.shape for call in every[layout] if call.index.shape not in elsewhere)
    found = [
        r for r in gradients.judge_gradients(subject("rms_norm", raises_for(shape, when))) if r.relation == INVARIANCE
    ]
    bad = [r for r in in_need(found) if r.layout == layout]
    assert len(bad) == 1 and "RuntimeError: boom" in bad[0].detail and "and more" not in bad[0].detail, report(found)
    unharmed = {"permuted", "batch"} | (
        {"packed"} if layout != "singles" else set()
    )  # they are what it is compared with
    assert {r.layout for r in found if r.verdict == PASS} >= unharmed, report(found)


def grad_for_main_grad(x, weight, eps):
    """autograd's way: a gradient in the dtype of the weight, which torch adds up over micro-batches in that dtype."""
    return bi_kernels.rms_norm(x, weight.clone(), eps)


def test_a_gradient_in_grad_instead_of_main_grad_is_seen(fewer):
    s = subject("rms_norm", grad_for_main_grad)
    found = gradients.judge_gradients(s)
    split = [r for r in found if r.layout == "micro_batches:ragged" and r.tensor == "dweight"]
    assert in_need(split) == split, "bf16 gradients added up by micro-batch depend on the split"
    assert not [r for r in in_need(found) if r.layout in ("permuted", "batch")], report(in_need(found))
    judged_in = lambda s: {r.detail for r in gradients.gradient_accuracy(s, "normal") if r.tensor == "dweight"}
    assert (judged_in(s), judged_in(subject("rms_norm"))) == ({"bf16"}, {"fp32"}), "the dtype that dweight is judged in"


def spoiled(backward, name="spoiled"):
    return with_backward(bi_kernels.rms_norm, backward, name)


def unwritten(layout, dy, args, grads, **constants):
    dx = torch.empty_like(grads[0])
    dx.view(-1)[1:] = grads[0].reshape(-1)[1:]
    return {0: dx}


def test_an_element_that_backward_leaves_unwritten_is_not_deterministic(fewer, monkeypatch):
    monkeypatch.setitem(SWEEP, RUNS, 3)  # fresh memory holds ones and zeros by turns
    found = gradients.judge_gradients(subject("rms_norm", spoiled(unwritten)))
    bad = [r for r in in_need(found) if r.relation == DETERMINISM and r.against == "itself"]
    assert [(r.tensor, r.mismatches, r.first_index) for r in bad] == [("dx", 1, [0, 0])], report(found)


def leaks(layout, dy, args, grads, **constants):
    return {0: grads[0] + (0 * args[0].float()).sum().to(grads[0].dtype)}


def test_a_neighbours_nan_that_reaches_a_gradient_is_seen(fewer):
    found = gradients.judge_gradients(subject("rms_norm", spoiled(leaks)))
    bad = [r for r in in_need(found) if r.inputs == "nonfinite"]
    assert bad and {r.tensor for r in bad} == {"dx"}, report(found)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e6])
def test_one_wrong_number_exceeds_the_bound(value):
    def one_wrong(layout, dy, args, grads, **constants):
        grads[0][3, 5] = value
        return {0: grads[0]}

    found = gradients.gradient_accuracy(subject("rms_norm", spoiled(one_wrong)), "normal")
    bad = in_need(found)
    assert [(r.tensor, r.mismatches, r.first_index) for r in bad] == [("dx", 1, [3, 5])], report(found)


def test_a_clear_refusal_of_an_optional_dtype_is_unsupported(fewer):
    def refuses(x, weight, eps):
        raise TypeError("x has dtype fp16; supported are bf16, fp32")

    s = subject("rms_norm", refuses, "fp16")
    found = gradients.judge_gradients(s)
    assert {r.verdict for r in found} == {UNSUPPORTED}, report(found)


# What the ops are told of a layout

LENGTHS = [5, 1, 17, 33, 16]


@pytest.mark.parametrize("name", layouts(LENGTHS))
def test_the_slots_of_every_layout_are_the_tokens_in_logical_order(name):
    sample = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    for call in layouts(LENGTHS)[name]:
        layout, flat = token_layout(call, LENGTHS), np.append(call.index.reshape(-1), -1)
        tokens = flat[layout.slots.numpy()]
        expected = []
        for s in range(len(LENGTHS)):
            own = [t for t in np.unique(flat) if t >= 0 and sample[t] == s]
            expected += own + [-1] * (-len(own) % SLAB)
        assert tokens.tolist() == expected
        assert layout.rows == call.index.size and layout.tokens == (flat >= 0).sum()
        assert layout.padding == bool((call.index < 0).any())


def test_a_layout_that_needs_no_gathering_says_so():
    x = torch.randn(32, 3)
    for index, identity in (
        ([[*range(16)], [*range(16, 32)]], True),
        ([[*range(31)]], True),
        ([[*range(31), -1]], False),
        ([[-1, *range(31)]], False),
        ([[*range(17), *[-1] * 15]], False),
    ):
        layout = token_layout(Call(np.array(index)), [16, 16] if len(index) == 2 else [31])
        assert layout.identity == identity, index
        rows = x[: np.size(index)]
        gathered = layout.gather(rows)
        if identity:
            assert gathered is rows, index
        else:
            assert_same_bits(gathered, torch.cat((rows, torch.zeros(1, 3)))[layout.slots.long()], index)


# A training step


@pytest.fixture
def small(monkeypatch):
    """A session over a network of one layer and three dozen tokens."""
    monkeypatch.setitem(
        SHAPES,
        "tiny",
        {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp": 48, "vocab": 40, "lengths": [5, 1, 17, 12]},
    )
    monkeypatch.setattr(training, "Network", partial(training.Network, layers=1))
    return SimpleNamespace(parameters={"shapes": "tiny", "seed": 0}, device=torch.device("cpu"))


def trained(small, monkeypatch) -> list[Row]:
    hashes = lambda *args, splits=("packed", "micro_batches:ragged"): small_hashes(*args, splits=splits)
    small_hashes = training.hashes
    monkeypatch.setattr(training, "hashes", hashes)
    return backward.trained(start("backward", {}))[0]


def test_the_rows_of_the_training_runs(small, monkeypatch):
    split, moved, control = trained(small, monkeypatch)
    assert (split.layout, split.against, split.verdict) == ("1 AdamW steps, micro_batches:ragged", "packed", PASS)
    assert (moved.tensor, moved.verdict) == ("tensors left unmoved", PASS) and moved.elements == 11
    assert control.control and control.caught and control.candidate == training.CONTROL, report([control])


@pytest.mark.parametrize("owner, name", [(torch.optim.AdamW, "step"), (torch.Tensor, "backward")])
def test_a_training_run_that_trains_nothing_needs_a_fix(owner, name, small, monkeypatch):
    monkeypatch.setattr(owner, name, lambda *args, **more: None)
    split, moved, control = trained(small, monkeypatch)
    assert (moved.verdict, moved.mismatches) == (NEEDS_FIX, moved.elements), report([moved])
    assert split.verdict == PASS and not control.caught, "which is all that the weights of two splits would show"


def test_the_first_op_that_drifts_is_named(small, monkeypatch):
    found = training.first_difference(small, "bi_kernels", b="micro_batches:ragged")
    assert not any(found[part][0] for part in ("forward", "backward", "parameters")), found

    def by_rows(x, weight, eps=1e-6):
        y = bi_kernels.qk_norm(x, weight, eps)
        return y * 1.5 if x.shape[0] == 30 else y  # all but the first sample, in a call of their own

    ops = {name: getattr(bi_kernels, name) for name in bi_kernels.__all__}
    monkeypatch.setattr(training, "stock", SimpleNamespace(**ops | {"qk_norm": by_rows}))
    found = training.first_difference(small, "torch", b="micro_batches:ragged")
    assert found["forward"][0] == "layer 0 qk_norm" and found["forward"][1].first_index[0] == 5, found["forward"]


def silent(call) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


def test_a_forgotten_layout_is_named():
    """Attention is told of two sequences, and the linear before it folds its weight's gradient over one; told both, or
    without gradients, nobody is warned."""
    x, w = torch.randn(5, 16, requires_grad=True), torch.nn.Parameter(torch.randn(16, 16))
    ends = torch.tensor([0, 2, 5])

    def forward():
        q = bi_kernels.linear(x, w).unflatten(-1, (2, 8))
        bi_kernels.attention(q, q, q, cu_seqlens_q=ends)

    with pytest.warns(UserWarning, match="2 packed or padded sequences, but no token layout is entered"):
        forward()
    silent(TokenLayout.packed(ends).within(forward))
    silent(torch.no_grad()(forward))


def test_heads_that_take_the_place_of_tokens_are_named():
    """(B, heads, L, D) instead of (B, L, heads, D): with fewer key heads there are fewer keys than queries, and long
    sequences make more heads than a model has."""
    x, w = torch.randn(1, 3, 2, 8), torch.nn.Parameter(torch.randn(8))
    with pytest.warns(UserWarning, match=r"taken for 3 sequences of 2 tokens .* use qk_norm"):
        bi_kernels.rms_norm(x, w)
    silent(lambda: bi_kernels.qk_norm(x, w))
    for heads, length in ((4, 2), 10), ((4, 4), 129):
        q, k = (torch.randn(1, length, h, 8) for h in heads)
        with pytest.warns(UserWarning, match=f"4 queries of {length} heads .* q.transpose"):
            bi_kernels.attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2))
        silent(lambda: bi_kernels.attention(q, k, k))


def test_each_layout_s_own_outputs_are_held_to_a_call_without_gradients():
    """What trains otherwise in packed calls alone is no matter of single samples; one that fails without gradients has
    a row that says so."""

    def packed_otherwise(x, weight, eps):
        y = bi_kernels.rms_norm(x, weight, eps)
        return y * 2 if x.requires_grad and x.dim() == 2 else y

    def trains_only(x, weight, eps):
        if not x.requires_grad:
            raise RuntimeError("no rollout")
        return bi_kernels.rms_norm(x, weight, eps)

    rows = [r for r in gradients.judge_gradients(subject("rms_norm", packed_otherwise)) if r.against == NO_GRAD_NEEDED]
    verdicts = {r.layout: r.verdict for r in rows if r.inputs == CANCELLING}
    assert (verdicts["packed"], verdicts["singles"], verdicts["batch"]) == (NEEDS_FIX, PASS, PASS)
    (row,) = gradients.judge_gradients(subject("rms_norm", trains_only))
    assert row.verdict == NEEDS_FIX and "no rollout" in row.detail
