"""Offsets beyond 2**31 elements: what passes at a small size, what must be found, and who is asked."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import bi_kernels
from bi_kernels.audit import callable_session as any_session
from bi_kernels.audit import start
from bi_kernels.audit.callable_audit import audit
from bi_kernels.audit.checks import limits as offsets
from bi_kernels.audit.controls.forward import CONTROLS
from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED, Row
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.targets.candidates import resolve
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import problems
from bi_kernels.contract import DTYPES
from bi_kernels.tokens import TokenLayout

SMALL, FEWER = 2**13, 2**11  # elements in place of 2**31, on the interpreter; of attention, which takes long there
BEYOND = offsets.OVER_INT32


def subjects(shapes: str, device: str, dtypes: tuple[str, ...] = ("bf16",), candidate: str = "bi_kernels") -> list:
    """Returns what the audits that judge forward passes are made of."""
    made = []
    for name in dict.fromkeys(op.audit for op in OPS.values()):
        functions = resolve(candidate, name).functions
        every = problems(name, list(dtypes), shapes, torch.device(device), 0, tuple(functions))
        made += [OpUnderTest(p, functions[p.op.name], candidate, device) for p in every]
    return made


ASKED = [s for s in subjects("qwen3-8b", "cuda", tuple(DTYPES)) if offsets.applies(s)]
TINY = {f"{s.problem.op.name} {s.problem.case}".strip(): replace(s, device="interpreter") for s in ASKED}
for s in TINY.values():
    s.problem = replace(s.problem, shapes="tiny", device=torch.device("cpu"))


def found(name: str, function=None, elements: int = SMALL) -> Row:
    s = replace(TINY[name], function=function or TINY[name].function, memo={})
    row, *_ = offsets.by_call(s, elements=elements)
    return row


@pytest.mark.parametrize("name", TINY)
def test_every_op_gives_in_one_call_what_it_gives_its_sequences(name):
    elements = FEWER if TINY[name].problem.op.cache else SMALL
    rows = [*offsets.by_call(TINY[name], elements=elements)]
    assert [(r.verdict, r.elements > elements) for r in rows] == [(PASS, True)] * len(offsets.calls(TINY[name])), rows
    assert not any(r.verdict != PASS for r in offsets.by_call(TINY[name], backward=False, elements=elements))


def test_every_op_is_asked_once_on_a_gpu_in_bf16():
    asked = Counter((s.problem.op.name, s.problem.case, c.layout) for s in ASKED for c in offsets.calls(s))
    assert {name for name, *_ in asked} == {*OPS} and set(asked.values()) == {1}
    assert {case for name, case, _ in asked if name in offsets.CASES} == {"lm_head", "o", "mha"}
    assert [name for name, _, layout in asked if layout == offsets.LOGITS_KEPT] == ["lm_head_logprob"]
    assert all(s.problem.dtype == torch.bfloat16 for s in ASKED)
    for others in (("tiny", "cuda"), ("qwen3-8b", "cpu"), ("qwen3-8b", "cuda", ("bf16",), "torch")):
        assert not any(map(offsets.applies, subjects(*others)))


@pytest.fixture
def here(monkeypatch):
    """Has an interpreter asked at its sizes."""
    monkeypatch.setattr(offsets, "applies", lambda s: s.problem.dtype == torch.bfloat16)
    monkeypatch.setattr(offsets, "by_call", partial(offsets.by_call, elements=SMALL))


@pytest.mark.slow
def test_an_audit_asks_once_and_requires_it(here):
    session = start("elementwise", op="silu", shapes="tiny", device="cpu", dtype="bf16")
    rows = session.judge()
    (row,) = (r for r in rows if r.layout == BEYOND)
    assert (row.relation, row.verdict, row.dtype) == ("invariance", PASS, "bf16")
    other = start("backward", op="silu", shapes="tiny", device="cpu", dtype="bf16")
    assert not [r for r in other.judge(forward=False, backward=True) if r.layout == BEYOND]


def test_gradients_of_another_candidate_are_asked_where_its_audit_asks_them(here):
    cut = lambda x: bi_kernels.silu(x).detach()
    for candidate, backward, verdict in (("x", False, PASS), ("x", True, NEEDS_FIX), ("bi_kernels", False, NEEDS_FIX)):
        (row,) = offsets.judge(replace(TINY["silu"], function=cut, candidate=candidate), backward)
        assert row.verdict == verdict and ("requires a gradient" in row.detail) == (verdict == NEEDS_FIX)


def wrapped(x: torch.Tensor) -> torch.Tensor:
    """Returns the rows at which those of x are found by offsets that wrap."""
    return torch.arange(len(x)) % (SMALL // x.shape[1])


def read_wrapped(x: torch.Tensor) -> torch.Tensor:
    return bi_kernels.silu(x[wrapped(x)])


def written_wrapped(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).index_copy(0, wrapped(x), bi_kernels.silu(x))


@pytest.mark.parametrize("function, first", [(read_wrapped, SMALL // 96), (written_wrapped, 0)])
def test_an_offset_that_wraps_is_found_in_an_output_and_a_gradient(function, first):
    row = found("silu", function)
    assert row.verdict == NEEDS_FIX and row.tensor == "out" and row.first_index[0] == first
    assert "; out: " in row.detail and "; dx: " in row.detail


def test_the_control_of_the_auditor_is_caught_where_its_offsets_wrap():
    (control,) = (c for c in CONTROLS if c.relation == offsets.OFFSETS)
    assert control.gpu and (control.audit, control.op) == ("elementwise", "silu")
    assert found("silu", partial(control.function, elements=SMALL)).as_control().caught
    assert found("silu", control.function).verdict == PASS


def without_the_last(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product whose weight has no gradient of the last sequence, but of a sequence alone."""
    length, _ = offsets.calls(TINY["linear o"])[0].sizes(SMALL)
    parts = []
    for part, w in ((x[:-length], weight), (x[-length:], weight.detach())) if len(x) > length else ((x, weight),):
        with TokenLayout.packed(range(0, len(part) + 1, length)):
            parts.append(bi_kernels.linear(part, w))
    return torch.cat(parts)


def test_a_sequence_that_a_parameters_gradient_misses_is_found():
    row = found("linear o", without_the_last)
    assert row.tensor == "dweight" and row.mismatches > 64 * 64 / 2


# Any callable

X = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))
LAST_ELEMENT = 2**10


class Wrapped(torch.autograd.Function):
    """Twice x; the gradient of rows beyond so many elements is that of the first."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        n = LAST_ELEMENT // dy[0].numel()
        return 2 * torch.cat((dy[:n], dy[: len(dy) - n])) if len(dy) > n else 2 * dy


def reads_first(x):
    n = LAST_ELEMENT // x[0].numel()
    return 2 * torch.cat((x[:n], x[: len(x) - n])) if len(x) > n else 2 * x


def few_only(x):
    if len(x) > 8:
        raise ValueError(f"x has {len(x)} rows, expected at most 8")
    return 2 * x


@pytest.mark.parametrize("batch", [0, 1])
def test_a_callable_that_reads_what_32_bits_do_not_reach_passes(batch):
    rows = offsets.beyond(audit(lambda x: x.exp(), X, batch=batch).target, LAST_ELEMENT)
    assert [(r.tensor, r.layout, r.verdict) for r in rows] == [(k, BEYOND, PASS) for k in ("out", "dx")]
    assert all(r.elements >= LAST_ELEMENT for r in rows)


@pytest.mark.parametrize("function, drifting", [(reads_first, ["out", "dx"]), (Wrapped.apply, ["dx"])])
def test_a_callable_whose_offsets_wrap_is_found(function, drifting):
    rows = offsets.beyond(audit(function, X, names=("x",)).target, LAST_ELEMENT)
    assert [r.tensor for r in rows if r.mismatches] == drifting
    first = {r.tensor: r.first_index[0] for r in rows if r.mismatches}
    n = LAST_ELEMENT // X[0].numel()
    assert first == {"out": n, "dx": 0} if function is reads_first else first == {"dx": n}


def test_a_callable_that_refuses_so_many_samples_in_a_sentence_is_not_judged():
    (row,) = offsets.beyond(audit(few_only, X).target, LAST_ELEMENT)
    assert row.verdict == UNSUPPORTED and "expected at most 8" in row.detail


@pytest.mark.slow
def test_the_audit_of_any_asks_and_finds_its_control(monkeypatch):
    given = {"candidate": "bi_kernels:silu", "inputs": "x:bf16[40,8]", "device": "cpu"}
    session = start("any", **given)
    assert session.judge().passed and not session.beyond()
    small = partial(offsets.beyond, elements=LAST_ELEMENT)
    monkeypatch.setattr(any_session, "beyond", small)
    monkeypatch.setattr(any_session, "applies_to", lambda t: True)
    session = start("any", **given)
    session.judge()
    assert [(r.verdict, r.relation) for r in session.beyond()] == [(PASS, "invariance"), (PASS, "gradient invariance")]
    assert [(r.layout, r.caught) for r in session.rows if r.control] == [(BEYOND, True)]
