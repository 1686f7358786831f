"""Activation checkpointing changes no bit: a call that is computed again in the backward has the outputs and gradients
of the plain one, or is refused in a sentence. Of a checkpoint that is not reentrant, with all gradients wanted, see
audit/checks/requests.py."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import accumulate

import pytest
import torch
from conftest import under_test
from torch.utils.checkpoint import checkpoint

import bi_kernels
from bi_kernels import MainGrads, tokens
from bi_kernels.audit.checks.edge_cases import LENGTHS
from bi_kernels.audit.checks.single_call import compared
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.step import Results
from bi_kernels.audit.targets.op import CANCELLING
from bi_kernels.audit.targets.op_step import Step, token_layout
from bi_kernels.tokens import TokenLayout, layout_for

pytestmark = pytest.mark.filterwarnings("error")  # what is computed again has nothing to say either
OTHER = LENGTHS[::-1]  # as many rows, so that no op sees by the shapes that a layout is another call's
EVERY = pytest.mark.parametrize("name", OPS)
WITH_PARAMETERS = pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.shared])
# whether the checkpoint is reentrant, and whether its function has the layout of its own, `layout.within(function)`
KINDS = {"not reentrant": (False, False), "not reentrant, within": (False, True), "reentrant, within": (True, True)}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
REFUSED = "called inside a backward, as activation checkpointing does, without its token layout; checkpoint layout.w"


class Call(Step):
    """One packed call with its backward."""

    @property
    def layout(self) -> TokenLayout:
        return token_layout(self.call, self.lengths)

    def expected(self, wanted: Sequence[str], main_grad: bool = True) -> Results:
        """Returns what the plain call gives."""
        made = self.folded if main_grad else self.base
        return self.results | {f"d{k}": made[f"d{k}"] for k in wanted}

    def checkpointed(
        self, reentrant: bool, within: bool, again: Callable | None = None, passed: bool = False, **more
    ) -> Callable:
        """Returns the op in a checkpoint that holds its parameters, as a layer does, or is `passed` them; again: what
        is computed in the op's place the second time; more: arguments of the op."""

        def function(*tensors, **told):
            held = {} if passed else {i: t for i, t in enumerate(tensors) if isinstance(t, torch.nn.Parameter)}
            given = [t for i, t in enumerate(tensors) if i not in held]
            ways = [self.subject.called, again or self.subject.called]

            def call(*given):
                rest = iter(given)
                every = [held[i] if i in held else next(rest) for i in range(len(tensors))]
                return ways.pop(0)(*every, **told, **more)

            if reentrant and not any(t.requires_grad for t in given):  # else PyTorch finds nothing to train
                given.append(torch.zeros((), requires_grad=True))
            return checkpoint(self.layout.within(call) if within else call, *given, use_reentrant=reentrant)

        return function


@cache
def call_of(name: str, lengths: tuple[int, ...] = LENGTHS) -> Call:
    return Call(under_test(name), CANCELLING, lengths)


def others() -> TokenLayout:
    """Returns the layout of another call of as many rows, whose sequences follow in another order."""
    return TokenLayout.packed([0, *accumulate(OTHER)], range(len(OTHER))[::-1])


def stepped(u: Call) -> tuple[dict, MainGrads]:
    """Returns inputs of a call whose parameters MainGrads has."""
    given = u.inputs()
    return given, MainGrads([given[k].requires_grad_() for k in u.parameters])


def assert_same(found: Results, expected: Results, *what: object) -> None:
    drift, tensor = compared(found, expected)
    assert not drift.mismatches, (*what, tensor, str(drift))


def differing(found: Results, expected: Results) -> set[str]:
    """Returns the names of what differs, by the same comparison."""
    return {k for k, t in expected.items() if compared({k: found[k]}, {k: t})[0].mismatches}


@pytest.fixture(autouse=True)
def no_layout_is_left():
    before = tokens.inferred_any.set(False)  # else attention is reminded of layouts
    yield
    tokens.inferred_any.reset(before)
    assert layout_for("linear", (1,)).rows == 1, "a layout is still entered"


# What is computed again


@EVERY
def test_all_that_is_wanted_has_the_bits_of_the_plain_call(name):
    u = call_of(name)
    for wanted in filter(None, [u.floating, u.parameters]):
        for main_grad in (False, True)[: 1 + bool(u.parameters)]:
            found = u.made(wanted=wanted, main_grad=main_grad, function=u.checkpointed(True, True))
            assert_same(found, u.expected(wanted, main_grad), wanted, main_grad)
    for argument, values in u.subject.free.items():
        for value in values:
            found = u.made(main_grad=True, function=u.checkpointed(True, True, **{argument: value}))
            assert_same(found, u.expected(u.floating), argument, value)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.shared and name != "embedding"])
def test_parameters_that_are_frozen_keep_their_main_grad_and_need_no_layout(name):
    u = call_of(name)
    given = u.inputs()
    for k in u.parameters:
        given[k].main_grad = torch.full_like(given[k], 3.0, dtype=torch.float32)
    found = u.made(given, wanted=u.of_tokens, function=u.checkpointed(True, False))
    assert_same(found, u.expected(u.of_tokens))
    for k in u.parameters:
        assert given[k].grad is None and bool((given[k].main_grad == 3).all()), k


@EVERY_KIND
@pytest.mark.parametrize("name", ["linear", "matmul", "rms_norm", "embedding", "lm_head_logprob", "attention"])
def test_a_call_with_other_lengths_in_between_changes_neither(name, kind):
    """Whose layout is even entered while the first is computed again."""
    u, other = call_of(name), call_of(name, OTHER)
    made = []
    with ExitStack() as entered:

        def between():
            made.append(other.made(main_grad=True, function=other.checkpointed(*kind)))
            entered.enter_context(others())

        found = u.made(main_grad=True, function=u.checkpointed(*kind), between=between)
    assert_same(found, u.expected(u.floating))
    assert_same(made[0], other.expected(other.floating))


@pytest.mark.parametrize("reentrant", [False, True])
@WITH_PARAMETERS
def test_a_parameter_that_is_passed_has_its_gradient_once(name, reentrant):
    """In its main_grad, or, of a reentrant checkpoint, in `.grad`: PyTorch passes a copy that has no main_grad on."""
    u = call_of(name)
    given = u.inputs()
    found = u.made(given, main_grad=True, function=u.checkpointed(reentrant, True, passed=True))
    assert_same(found, u.expected(u.floating, main_grad=not reentrant))
    for k in u.parameters:
        assert (given[k].grad is None) != reentrant and bool(given[k].main_grad.any()) != reentrant, k


@WITH_PARAMETERS
def test_a_parameter_of_main_grads_that_is_passed_is_refused_where_its_gradient_would_miss_them(name):
    u = call_of(name)
    function = u.checkpointed(True, True, passed=True)
    for wanted in (u.floating, u.parameters):
        given, grads = stepped(u)
        with pytest.raises(
            ValueError, match=r": (a|b|weight|bias|sinks) is a copy of a parameter, made by a reentrant checkp"
        ):
            u.made(given, wanted=wanted, function=function)
        grads.join()
        assert not any(given[k].main_grad.any() for k in u.parameters), "part of a gradient was joined"
    for kind in ((False, True, None, True), (True, True, None, False)):  # passed to one that is not, or held
        given, grads = stepped(u)
        made = u.made(given, function=u.checkpointed(*kind))
        assert_same(made | {f"d{k}": given[k].main_grad for k in u.parameters}, u.expected(u.floating))


def test_a_tensor_that_trains_and_is_no_module_s_may_be_held():
    table = torch.ones(8, 4, requires_grad=True)
    grads = MainGrads([table])
    x, ids = torch.ones(3, 4, requires_grad=True), torch.tensor([0, 1, 1])
    call = TokenLayout.packed([0, 3]).within(lambda x: x + bi_kernels.embedding(ids, table))
    checkpoint(call, x, use_reentrant=True).sum().backward()
    grads.join()
    assert table.main_grad.sum(1).tolist() == [4, 8, 0, 0, 0, 0, 0, 0]


# The layout that it is computed under


@pytest.mark.parametrize("around", ["", "its own", "another call's"])
@EVERY
def test_a_reentrant_checkpoint_after_its_layout_is_refused_where_a_parameter_trains(name, around, monkeypatch):
    """Whatever is entered around the backward, which is seen in a thread of its own or not."""
    tokens.inferred_any.set(True)  # an op has folded by shapes: of that, attention says nothing here
    u, given = call_of(name), call_of(name).inputs()

    def call():
        with ExitStack() as entered:
            layout = {"its own": u.layout, "another call's": others()}.get(around)
            between = lambda: layout and entered.enter_context(layout)
            return u.made(given, main_grad=True, function=u.checkpointed(True, False), between=between)

    if not u.parameters:
        assert_same(call(), u.expected(u.floating))
        return
    with pytest.raises(ValueError, match=f"^{OPS[name].function or name}: {REFUSED}"):
        call()
    for k in u.parameters:
        assert given[k].grad is None and not given[k].main_grad.any(), f"{k} has part of a gradient"


@WITH_PARAMETERS
def test_where_no_layout_was_ever_entered_shapes_say_it_again(name, monkeypatch):
    warnings.filterwarnings("ignore", "attention: ")  # it sees that its sequences are others
    u = call_of(name)
    function = u.checkpointed(True, False)
    monkeypatch.setattr(tokens, "ENTERED", f"{name}: a layout was entered, as this test has it")
    monkeypatch.setattr(u, "says_layout", False)
    expected = u.made(main_grad=True)
    assert differing(expected, u.folded) <= {f"d{k}" for k in u.parameters}, "shapes say another layout, and no more"
    assert_same(u.made(main_grad=True, function=function), expected)
    with TokenLayout.packed([0, 1]):
        pass
    with pytest.raises(ValueError, match=REFUSED):
        u.made(main_grad=True, function=function)


# A control


@WITH_PARAMETERS
def test_a_layout_of_another_call_is_found(name):
    """An op cannot tell that a layout of as many rows, entered in the backward, is another call's."""
    warnings.filterwarnings("ignore", "attention: ")  # it sees that its sequences are others
    u = call_of(name)
    found = u.made(main_grad=True, function=u.checkpointed(True, True, others().within(u.subject.called)))
    assert differing(found, u.expected(u.floating)) == {f"d{k}" for k in u.parameters}
