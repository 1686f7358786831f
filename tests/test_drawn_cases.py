"""Every argument has a row, every population and value comes, and a case is the same whenever it is drawn."""

import inspect
from collections import Counter

import pytest
import torch

import bi_kernels
from bi_kernels.audit.checks import forward, modes, single_call
from bi_kernels.audit.checks.edge_cases import ONE_TOKEN, populations
from bi_kernels.audit.controls.usage import _Gradient, doubled_for_several
from bi_kernels.audit.findings import NEEDS_FIX, PASS, needs_fix
from bi_kernels.audit.fuzz.cases import FINITE, POPULATIONS, draw
from bi_kernels.audit.fuzz.checks import ROLLOUT, judge
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.contract import DTYPES

LAYOUT_ARGUMENTS = "table positions cu_seqlens cu_seqlens_q cu_seqlens_k lengths_q lengths_k left_padded block_table"
CPU, BF16 = torch.device("cpu"), DTYPES["bf16"]
# what says the dtype of a result, or which of x's dimensions are a token's: each has tests of its own
OF_ITSELF = {"cast": {"dtype"}} | {name: {"out_dtype"} for name in ("row_sum", "softmax", "log_softmax")}
OF_ITSELF |= {"layer_norm": {"heads"}, "scaled": {"features"}, "shifted": {"features"}}


def public(op):
    return getattr(bi_kernels, op.function or op.name)


def drawn(name, number, function=None, seed=0):
    return draw(OPS[name], function or public(OPS[name]), number, BF16, CPU, seed)


def subject(name, function):
    op = OPS[name]
    return OpUnderTest(OpConfig(op, next(iter(op.cases("tiny"))), BF16, "tiny", CPU), function, "test", "interpreter")


@pytest.mark.parametrize("name", sorted({op.function or op.name for op in OPS.values()}))
def test_every_public_argument_has_a_row(name):
    entries = [op for op in OPS.values() if (op.function or op.name) == name]
    held = {n for op in entries for names in (*op.arguments, *op.free, *op.constants) for n in names.split(", ")}
    held |= {n for op in entries for n in (*op.tokens, *op.shared, *LAYOUT_ARGUMENTS.split())} | OF_ITSELF.get(
        name, set()
    )
    assert set(inspect.signature(getattr(bi_kernels, name)).parameters) <= held


@pytest.mark.parametrize("name", OPS)
def test_a_few_cases_hold_every_population_family_and_value(name):
    cases = [drawn(name, n) for n in range(len(POPULATIONS))]
    assert Counter(c.population for c in cases) == Counter(POPULATIONS)
    assert {c.kind for c in cases} == set(FINITE)
    for names, values in OPS[name].arguments.items():
        wanted = [v if ", " in names else (v,) for v in values]
        given = [tuple(c.subject.problem.op.constants.get(n) for n in names.split(", ")) for c in cases]
        assert all(any(g == w and [type(x) for x in g] == [type(x) for x in w] for g in given) for w in wanted)


def test_a_case_is_the_same_whatever_was_drawn_before():
    one, again = drawn("attention", 7), (drawn("attention", 3), drawn("attention", 7))[1]
    assert one.said == again.said and list(one.subject.lengths) == list(again.subject.lengths)
    assert [c.index.tolist() for c in one.groups] == [c.index.tolist() for c in again.groups]
    assert one.said != drawn("attention", 7, seed=1).said


def test_what_is_broken_for_two_equal_samples_is_found():
    def shares_what_begins_alike(x):
        y = bi_kernels.silu(x)
        return y * 1.015625 if x.dim() == 2 and 0 < len(x[:, :8].unique(dim=0)) < len(x) else y

    rows = [r for n in range(len(POPULATIONS)) for r in judge(drawn("silu", n, shares_what_begins_alike))]
    assert any("twins" in r.detail and r.verdict == NEEDS_FIX and r.relation == "gradient invariance" for r in rows)


@pytest.mark.slow
def test_a_rollout_that_is_another_is_found_and_what_raises_says_so():
    def rolls_out_otherwise(q, k, v, **told):
        out, lse = bi_kernels.attention(q, k, v, **told)
        return (out * 2, lse) if not q.requires_grad else (out, lse)

    rows = [r for n in range(4) for r in judge(drawn("attention", n, rolls_out_otherwise))]
    assert {(r.relation, r.layout) for r in rows if r.verdict == NEEDS_FIX} == {("invariance", ROLLOUT)}

    def raises(x):
        raise RuntimeError("out of resources")

    (row,) = judge(drawn("silu", 0, raises))
    assert row.verdict == NEEDS_FIX and "out of resources" in row.detail


def test_a_gradient_that_is_another_is_named_beside_outputs_that_are_not():
    rows = judge(drawn("swiglu", 0, doubled_for_several(bi_kernels.swiglu)))
    assert {r.tensor for r in rows if r.verdict == NEEDS_FIX} >= {"dgate"}
    assert {(r.relation, r.layout) for r in rows if r.verdict == PASS} >= {
        ("invariance", ROLLOUT),
        ("accuracy", "rows"),
    }


def test_every_way_of_use_is_asked_and_a_refusal_that_names_it_is_no_drift():
    def refuses(x):
        if torch.is_autocast_enabled("cpu"):
            raise ValueError("silu: called under autocast, expected full precision")
        return bi_kernels.silu(x)

    rows = list(single_call.by_use(subject("silu", refuses)))
    assert {r.detail.partition(";")[0] for r in rows if "refused" not in r.detail} == {*single_call.AXES}
    assert {r.layout for r in rows if "refused: " in r.detail} == {"autocast"}
    assert {r.layout for r in rows if r.verdict != PASS} == {"autocast"} and not needs_fix(rows)


def masks_upstream(x):
    """Its backward leaves the gradient from upstream as another call would find it: the second time nothing changes."""
    return _Gradient.apply(lambda dy, _: dy.mul_(torch.arange(dy.shape[-1]) % 2).clone(), bi_kernels.silu(x))


def doubled_for_one_token(x, weight):
    y = bi_kernels.linear(x, weight)
    return _Gradient.apply(lambda dy, _: 2 * dy, y) if x.dim() == 1 else y


def doubled_with_positions_for_all(x, table, positions=None, **told):
    y = bi_kernels.rope(x, table, positions, **told)
    return y if positions is None or positions.dim() > 1 else _Gradient.apply(lambda dy, _: 2 * dy, y)


def fp32_without_columns(x):
    return bi_kernels.silu(x) if x.shape[-1] else x.float()


def test_a_number_that_is_written_behind_fresh_memory_is_seen():
    def beyond(x):
        y = torch.empty_like(x)
        torch.as_strided(y, (y.numel() + 1,), (1,))[-1] = 0
        return y.copy_(bi_kernels.silu(x))

    (row,) = forward.by_layout(subject("silu", beyond), only=("singles",))
    assert row.verdict == NEEDS_FIX and "wrote behind" in row.detail, row.detail


@pytest.mark.parametrize("name", ["attention", "embedding", "linear_bias", "mask_fill", "rope", "token_logprob"])
def test_samples_that_no_layout_holds_are_asked_of_every_kind_of_op(name):
    found = list(single_call.by_use(subject(name, public(OPS[name])), ["population"]))
    assert [r.layout for r in found] == [*populations(OPS[name])] and not [r for r in found if r.verdict != PASS]


def few_rows_without_gradients(x, weight):
    y = bi_kernels.linear(x, weight)
    return y * 1.0078125 if not torch.is_grad_enabled() and x.numel() // x.shape[-1] <= 8 else y


def few_rows_in_inference_mode(x, weight):
    y = bi_kernels.linear(x, weight)
    return y * 1.0078125 if torch.is_inference_mode_enabled() and x.numel() // x.shape[-1] <= 8 else y


@pytest.mark.parametrize(
    "function, layout", [(few_rows_without_gradients, "singles"), (few_rows_in_inference_mode, "random")]
)
def test_a_rollout_of_few_rows_that_is_another_is_found(function, layout):
    rows = forward.judge(subject("linear", function))
    assert layout in {r.layout for r in rows if r.verdict == NEEDS_FIX}


class _Workspace(torch.autograd.Function):
    """silu, whose backward reads what the last call of a shape left."""

    held: dict = {}

    @staticmethod
    def forward(ctx, x):
        _Workspace.held[x.shape] = x.clone()
        ctx.shape = x.shape
        return bi_kernels.silu(x)

    @staticmethod
    def backward(ctx, dy):
        x = _Workspace.held[ctx.shape].detach().clone().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(bi_kernels.silu(x), x, dy)[0]


def int64_alone(ids, weight, padding_id=None):
    return bi_kernels.embedding(ids if ids.dtype == torch.int64 else torch.zeros_like(ids), weight, padding_id)


def scratch_in_inference_mode(x):
    y = bi_kernels.silu(x)
    return x.copy_(y) if torch.is_inference_mode_enabled() else y


def deterministic_otherwise(x):
    return bi_kernels.silu(x) * (1.5 if torch.are_deterministic_algorithms_enabled() else 1)


SOME = ["memory", "population"]  # a bug may show in other axes too
USES = [
    ("silu", masks_upstream, "inputs and upstream", SOME),
    ("linear", doubled_for_one_token, ONE_TOKEN, SOME),
    ("rope", doubled_with_positions_for_all, "positions for all", SOME),
    ("silu", fp32_without_columns, "no mlp", SOME),
    ("silu", _Workspace.apply, "backward after a later call", single_call.AXES),
    ("embedding", int64_alone, "ids in int32", single_call.AXES),
    ("silu", scratch_in_inference_mode, "inference_mode", single_call.AXES),
    ("silu", deterministic_otherwise, modes.DETERMINISTIC, single_call.AXES),
]


@pytest.mark.parametrize("name, function, layout, axes", USES, ids=[layout for _, _, layout, _ in USES])
def test_a_use_that_is_another_is_named(name, function, layout, axes):
    found = {r.layout for r in single_call.by_use(subject(name, function), [*axes]) if r.verdict == NEEDS_FIX}
    assert found == {layout}
