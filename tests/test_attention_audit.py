"""The attention audit: what a call is given, the controls and their mended twins, and the kernels for sm_90."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import op_under_test, slow_but

import bi_kernels
from bi_kernels.audit.checks import forward as judge
from bi_kernels.audit.checks import gradient as gradients
from bi_kernels.audit.checks import single_call
from bi_kernels.audit.compare import compare
from bi_kernels.audit.controls.attention import ATTENTION_CONTROLS
from bi_kernels.audit.findings import NEEDS_FIX, PASS
from bi_kernels.audit.layouts import keys, layouts, spans
from bi_kernels.audit.session import start
from bi_kernels.audit.targets.op_step import Step
from bi_kernels.contract import CONTRACT, SWEEP, VARIANT, dtype_name
from bi_kernels.ops.attention import decode
from bi_kernels.ops.attention.attention import arguments, attend
from bi_kernels.ops.attention.schedule import round_up_sequences
from helpers import attention
from helpers.attention_edges import EDGES, FAR, FEW, apart, edges, nan_for_no_key, packed_edges, padded_edges
from helpers.attention_generation import SMALL

LENGTHS = (5, 1, 40)
ROOT = Path(__file__).parents[1]


def subject(function=bi_kernels.attention, op: str = "attention", lengths=()) -> judge.OpUnderTest:
    return op_under_test(op, function, own_lengths=lengths)


# What a call is given


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("name", ["singles", "batch:16", "chunked:7", "decode", "neighbours"])
def test_a_query_is_given_the_keys_up_to_its_own_and_nobody_elses(name, page):
    for call in layouts(LENGTHS)[name]:
        found = keys(call, LENGTHS, page)
        told = found.told
        for row, queries in enumerate(call.index):
            mine = queries[queries >= 0]
            sample = next(s for s in spans(LENGTHS) if mine[0] in s)
            held = found.index[told["block_table"][row]].reshape(-1) if page else found.index[row]
            count = told["lengths_k"][row] if "lengths_k" in told else found.index.shape[1]
            held = held[len(held) - count :] if told.get("left_padded") else held[:count]
            assert list(held) == list(sample[: mine[-1] + 1 - sample[0]])


# Controls


INVARIANCE_CONTROLS = [c for c in ATTENTION_CONTROLS if c.relation == "invariance" and not c.gpu]


@pytest.mark.parametrize("control", slow_but(INVARIANCE_CONTROLS, INVARIANCE_CONTROLS[1]), ids=lambda c: c.name)
def test_a_control_drifts_and_without_its_defect_does_not(control, monkeypatch):
    monkeypatch.setattr(judge.contract, "rows", lambda largest: [31, 129])

    def drifts(**how) -> int:
        s = subject(lambda *x, **told: control.function(*x, **how, **told), control.op, (103, 1, 37))
        found = (
            list(judge.by_row_count(s))
            if "multiprocessors" in control.name
            else [*judge.by_layout(s, only=("singles", "decode"))]
        )
        assert not [r for r in found if r.mismatches is None]
        return sum(r.mismatches for r in found)

    assert drifts() and not drifts(defect=False)


@pytest.mark.parametrize(
    "control",
    [c for c in ATTENTION_CONTROLS if c.relation != "invariance" and c.level in ("", "AST") and not c.gpu],
    ids=lambda c: c.name,
)
def test_what_is_broken_otherwise_is_found_and_its_twin_is_not(control):
    how = {"defect": False}
    for options, broken in (({}, True), (how, False)):
        s = subject(lambda *x, **told: control.function(*x, **options, **told), control.op)
        if control.relation in ("accuracy", "determinism", gradients.ACCURACY):
            found = {
                "accuracy": lambda s: [judge.accuracy(s, "normal")],
                "determinism": lambda s: [judge.determinism(s)],
                gradients.ACCURACY: lambda s: gradients.gradient_accuracy(s, "normal"),
            }[control.relation](s)
            assert any(r.mismatches for r in found) == broken and all(r.mismatches is not None for r in found)
        elif control.relation == gradients.INVARIANCE:
            step = Step(s, judge.CANCELLING)
            one, other = (step.gradients(step.layouts[name]) for name in ("packed", "singles"))
            assert bool(sum(compare(one[k], other[k]).mismatches for k in one)) == broken
        else:
            step = Step(s, "normal", [20, 5])
            own = Step(subject(), "normal", [20, 5])
            found, expected = (x.gradients(x.layouts["packed"]) for x in (step, own))
            assert all((found[k].float() - expected[k].float()).abs().max() < 0.1 for k in found), (
                "wrong in its order alone"
            )
            assert bool(sum(compare(found[k], expected[k]).mismatches for k in found)) == broken


def test_a_prefill_that_differs_from_decode_is_found():
    def broken(*qkv, **told):
        call = arguments(*qkv, **told)
        out, lse = attend(call, SMALL)
        return out + out * (len(call.q) > 100), lse

    session = start("attention", {"dtype": "bf16"})
    session.candidate = type(session.candidate)("broken", {"attention": broken})
    found = [r for r in attention.run(session, ["generation"])["generation"] if not r.control]
    assert any(r.mismatches for r in found if r.relation == "invariance")


def test_an_output_that_is_not_returned_is_said_in_a_sentence():
    row = judge.supported(subject(lambda *x, **told: bi_kernels.attention(*x, **told)[0]))
    assert row.verdict == NEEDS_FIX and row.detail.endswith("the candidate returned 1 of the outputs out, lse")


def test_a_drift_of_the_lse_names_it():
    moved = lambda *x, **told: (lambda out, lse: (out, lse + len(x[0])))(*bi_kernels.attention(*x, **told))
    row = next(judge.by_layout(subject(moved), only=("singles",)))
    assert row.tensor == "lse" and len(row.first_index) == 2


@pytest.mark.parametrize("kind", gradients.ACCURATE)
def test_no_gradient_of_zeros_is_within_the_bounds(kind):
    s = subject(lambda q, k, v, **told: _Zero.apply(told, q, k, v))
    assert all(r.mismatches > 0.5 * r.elements for r in gradients.gradient_accuracy(s, kind))


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, told, *qkv):
        ctx.save_for_backward(*qkv)
        return bi_kernels.attention(*(t.detach() for t in qkv), **told)

    @staticmethod
    def backward(ctx, *dy):
        return None, *(torch.zeros_like(t) for t in ctx.saved_tensors)


def test_the_edges_pass_and_nan_where_there_is_no_key_does_not():
    assert {r.verdict for r in packed_edges(subject())} == {PASS}
    found = packed_edges(subject(nan_for_no_key))
    assert any(r.verdict == NEEDS_FIX and r.mismatches for r in found)


def test_heads_far_apart_are_those_side_by_side_and_wrapped_ones_are_not():
    elements, wraps = 2**13, 4  # as if the fifth head were the first one beyond 32 bits
    near = lambda t: t[:, :, torch.arange(t.shape[2]) % wraps] if t.stride(2) == elements else t
    wrapped = lambda q, k, v, defect=True, **told: bi_kernels.attention(q, near(k), near(v), **told)
    assert {(r.verdict, r.layout) for r in apart(subject(), elements)} == {(PASS, FAR)}
    assert {r.verdict for r in apart(subject(wrapped), elements)} == {NEEDS_FIX}


def test_what_stands_in_padding_is_judged():
    def stale(*tensors, **told):
        out, lse = bi_kernels.attention(*tensors, **told)
        return torch.where(out == 0, 7.0, out).to(out), lse

    assert {r.verdict for r in padded_edges(subject(), "edges, padded")} == {PASS}
    assert [r.verdict for r in padded_edges(subject(stale), "edges, padded")] == [NEEDS_FIX, PASS]


def test_gradients_of_padding_are_judged():
    def one_more(q, k, v, lengths_q, lengths_k, **told):
        """Takes a sample without tokens for one of a token, whose results alone are then dropped."""
        out, lse = bi_kernels.attention(q, k, v, lengths_q=lengths_q, lengths_k=lengths_k, **told)
        few, none = {f"lengths_{n}": t.clamp(min=1) for n, t in (("q", lengths_q), ("k", lengths_k))}, lengths_q == 0
        more, _ = bi_kernels.attention(q, k, v, **few, **told)
        return out + (more - more.detach()) * none.view(-1, 1, 1, 1), lse

    assert {r.verdict for r in padded_edges(subject(), "edges, padded", backward=True)} == {PASS}
    found = padded_edges(subject(one_more), "edges, padded", backward=True)
    assert "dv" in {r.tensor for r in found if r.verdict == NEEDS_FIX and r.relation == "invariance"}


def test_the_edges_are_as_many_as_a_kernel_looks_through_and_few_queries_take_steps_apart(monkeypatch):
    assert {round_up_sequences(len(lengths)) for lengths in (EDGES, FEW)} == {len(EDGES)} == {len(FEW)}
    calls, call = [], decode.SplitDecode.__call__
    monkeypatch.setattr(decode.SplitDecode, "__call__", lambda *of: calls.append(1) or call(*of))
    session = start("attention", {"dtype": "bf16"})
    assert {r.verdict for r in edges(session, 0)} == {PASS} and calls


def test_prefill_is_asked_for_from_inside_a_block_of_keys():
    session = start("attention", {"dtype": "bf16"})
    assert {r.verdict for r in attention.run(session, ["starts"])["starts"]} == {PASS}

    def broken(q, k, v, **told):
        out, lse = bi_kernels.attention(q, k, v, **told)
        return out * (1 + ((k.shape[1] - q.shape[1]) % 64 == 62)), lse

    session.candidate = type(session.candidate)("broken", {"attention": broken})
    found = attention.run(session, ["starts"])["starts"]
    assert {r.relation for r in found if r.verdict == NEEDS_FIX} == {"invariance", gradients.INVARIANCE}


# A generation


@pytest.mark.slow
def test_generation_against_a_long_cache_finds_a_schedule_that_depends_on_the_call():
    session = start("attention", {"dtype": "bf16"})
    rows = sum(attention.run(session, ["generation", "uneven"]).values(), [])
    assert {r.verdict for r in rows if not r.control} == {PASS} and [r.caught for r in rows if r.control] == [True]
    missed = attention.missing(session)
    assert {r.verdict for r in missed} == {NEEDS_FIX} and not {r.layout for r in missed} & {r.layout for r in rows}
    session = start("attention", {"dtype": "bf16"})
    control = next(c for c in ATTENTION_CONTROLS if "padding keys" in c.name)
    session.candidate = type(session.candidate)("broken", {"attention": control.function})
    rows = attention.run(session, ["generation"])["generation"]
    assert any(r.mismatches for r in rows if r.layout.startswith("decode, cache"))


# The kernel for sm_90

COMPILED = """
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
triton.runtime.driver.set_active(SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0,
                                                 get_current_target=lambda: GPUTarget("cuda", 90, 32)))
from helpers.attention_on_gpu import without_wait
from bi_kernels.audit.static import binary as static
from bi_kernels.audit.static.launches import recorded
from bi_kernels.ops.attention.hopper import common
from bi_kernels.ops.attention.hopper.forward import prefill
from bi_kernels.ops.attention.hopper.keys import keys_backward
from bi_kernels.ops.attention.hopper.queries import queries_backward
for (width, group, causal, many), late in zip({cases}, (0, 1000)):
    q, k = (torch.zeros(300, heads, width, dtype=torch.bfloat16) for heads in (2 * group, 2))
    with recorded(run=False) as launches:
        where, fp32 = [torch.zeros(3, dtype=torch.int32)] * 4, torch.zeros(300, 2 * group)
        forward = q, k, k, q, fp32, where, causal, 0.1, 4096, many, 9, 16
        told, common.PAUSE = (where, causal, 0.1, 0.1, 9, 16), late
        steep, sinks = (0.1, q[0, :, 0].contiguous()) if late else (None, None)  # of a cap
        keys_backward(q, k, k, q, fp32, fp32, k, k, *told, steep)
        queries_backward(q, k, k, q, fp32, fp32, q, *told, steep)
        prefill(*forward, sinks, steep)
        if late:
            common.PAUSE = 0
            without_wait().prefill(*forward)
    for v in static.distinct(static.examined(launches).values()):
        print(v.kernel, v.level, v.spills <= 256, v.shared <= 227 * 1024, v.findings)
    for v in launches.variants.values():  # the loop over tiles hands all eight words of a tile on, in every group
        if v.src.fn.fn.__name__ in ("_hopper_prefill_kernel", "_hopper_queries_kernel"):
            print(v.asm["ttgir"].count("-> (" + ", ".join(["i32"] * 8)))
"""


def test_the_gluon_kernels_compile_for_sm_90_without_an_atomic():
    cases = [(128, 4, True, True), (64, 1, False, False)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED.format(cases=cases)],
        env=environment,
        cwd=ROOT / "notebooks",
        capture_output=True,
        text=True,
    )
    kernels = ["_hopper_keys", "_order", "_hopper_queries", "_hopper_prefill"]
    late = kernels + ["_hopper_prefill"]
    lines = lambda names: [f"{name}_kernel sm_90 True True []" for name in names]
    expected = lines(kernels) + ["3"] * 2 + lines(late) + ["3", "5", "5"]  # a tile without keys is a branch
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr


# Variants, which are asked less where attention is asked everything


def test_a_variant_is_asked_less_beside_attention_alone():
    given = {"dtype": "all", "device": "cpu", "checks": "all"}
    every = start("attention", given).make()
    of = {s.problem.op.name: [t for t in every if t.problem.op == s.problem.op] for s in every}
    assert [dtype_name(s.problem.dtype) for s in of["attention_sinks"]] == VARIANT["dtypes"]
    own = {dtype_name(s.problem.dtype): s.problem.brief for s in of["attention"]}
    assert own == {"bf16": False, "fp16": True, "fp32": False}
    assert all(s.problem.brief for name, mine in of.items() for s in mine if name != "attention")
    assert not any(s.problem.brief for s in start("attention", given | {"op": "attention_sinks"}).make())
    assert not any(s.problem.brief for s in start("dtype", given).make()), "which asks all of every dtype"


def test_a_variants_checks_are_some_of_attentions():
    (s, *_) = [s for s in start("attention", {"device": "cpu", "checks": "all"}).make() if s.problem.brief]
    every = layouts(s.lengths)
    assert {*VARIANT["layouts"], *VARIANT["compiled"]} <= {*every} and {*VARIANT["gradient_layouts"]} <= {
        *gradients.LAYOUTS
    }
    assert {name.partition(":")[0] for name in VARIANT["layouts"]} == {*SWEEP["layouts"]}
    assert max(s.lengths) > CONTRACT["arithmetic"]["attention_block"] and sum(s.lengths) < s.largest
    assert {*VARIANT["uses"]} <= {*single_call.AXES}
