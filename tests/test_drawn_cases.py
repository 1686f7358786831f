"""Every argument has a row, every population and value comes, and a case is the same whenever it is drawn."""

import inspect
import threading
from collections import Counter
from functools import partial

import pytest
import torch
from conftest import slow_but

import bi_kernels
from bi_kernels import audit
from bi_kernels.audit.checks import forward, memory, modes, order, requests, single_call
from bi_kernels.audit.checks.caches import FAR, HEADS_FIRST
from bi_kernels.audit.checks.edge_cases import ONE_TOKEN, populations
from bi_kernels.audit.checks.memory import FLAT
from bi_kernels.audit.checks.placement import BATCH, DIMENSIONS, EXPANDED, LATE, OFTEN, SHIFTED
from bi_kernels.audit.controls.usage import _each, _Gradient, doubled_for_several
from bi_kernels.audit.executor import Died
from bi_kernels.audit.findings import NEEDS_FIX, PASS, needs_fix
from bi_kernels.audit.fuzz.cases import FINITE, POPULATIONS, RANDOM, draw
from bi_kernels.audit.fuzz.checks import ALONE, GROUPS, ROLLOUT, judge
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.session import start
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.contract import DTYPES
from helpers import fuzz

LAYOUT_ARGUMENTS = "table positions cu_seqlens cu_seqlens_q cu_seqlens_k lengths_q lengths_k left_padded block_table"
CPU, BF16 = torch.device("cpu"), DTYPES["bf16"]
# what says the dtype of a result, or which of x's dimensions are a token's: each has tests of its own
OF_ITSELF = {"cast": {"dtype"}} | {name: {"out_dtype"} for name in ("row_sum", "softmax", "log_softmax")}
OF_ITSELF |= {"scaled": {"features"}, "shifted": {"features"}}


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


def test_cases_on_a_gpu_share_widths_and_have_rows_of_their_own():
    limits, silu = RANDOM["cuda"], OPS["silu"]
    cases = [draw(silu, public(silu), n, BF16, torch.device("cuda")) for n in range(60 * len(POPULATIONS))]
    assert len({c.subject.problem.sizes["mlp"] for c in cases}) == limits["pool"]
    rows = [sum(c.subject.lengths) for c in cases]
    assert len({*rows}) > 2 * len(POPULATIONS) and max(rows) <= 3 * limits["tokens"]
    assert sum(n > 1 and (n % 64 + 1) % 64 < 3 for n in rows) > len(rows) / 15, "near the edge of a tile"
    assert [c.full for c in cases[:9]] == [True, *[False] * 7, True]


def test_a_case_that_is_not_full_is_compared_in_each_way_by_turns():
    case = lambda n: draw(OPS["silu"], bi_kernels.silu, n, BF16, CPU, full=False)
    rows = [judge(case(n)) for n in range(len(POPULATIONS))]
    assert {len(found) for found in rows} == {1} and all(r.verdict == PASS for (r,) in rows)
    assert {r.layout for (r,) in rows} == {ALONE, GROUPS, ROLLOUT}


def test_what_ends_a_process_is_the_row_of_its_case_alone(monkeypatch):
    def each(session, function, parts):
        if any(3 in part[2] for part in parts):
            raise Died("judge", -11, [])
        return iter([function(session, part) for part in parts])

    session = audit.start("random", device="cpu", dtype="bf16", op="silu", cases=5)
    monkeypatch.setattr(fuzz.parallel, "each", each)
    rows, seen = fuzz.judge_cases(session)
    (bad,) = [r for r in rows if r.verdict == NEEDS_FIX]
    assert "case 3" in bad.detail and bad.repro.endswith("-p op silu -p cases 1 -p first 3") and len(seen) == 5


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
    asked = {*single_call.AXES} - {"indices", "cache"}  # it has neither
    assert {r.detail.partition(";")[0] for r in rows if "refused" not in r.detail} == asked
    refused = {modes.AUTOCAST, modes.AUTOCAST_FP16}
    assert {r.layout for r in rows if "refused: " in r.detail} == refused
    assert {r.layout for r in rows if r.verdict != PASS} == refused and not needs_fix(rows)


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


def scratch_in_inference_mode(x):
    y = bi_kernels.silu(x)
    return x.copy_(y) if torch.is_inference_mode_enabled() else y


def deterministic_otherwise(x):
    return bi_kernels.silu(x) * (1.5 if torch.are_deterministic_algorithms_enabled() else 1)


def doubled_in_a_flat_buffer(x, weight):
    buffer = getattr(weight, "main_grad", None)
    return bi_kernels.linear(x, weight) * (2 if buffer is not None and buffer.data_ptr() % 16 else 1)


def ids(dtype):
    return lambda given, told: any(t.dtype == dtype for t in given if not t.is_floating_point())


def shifted(given, told):
    x = given[0]
    return x.shape[:2] == BATCH and x.shape[1] * x.stride(1) < x.stride(0)


def told_in(name, dtype):
    return lambda given, told: name in told and told[name].dtype == dtype


def grouped(heads):
    return lambda given, told: given[0].shape[-2] == heads * given[1].shape[-2]


DECODED = 33, 127
# of one op of each family, what breaks it, each in a call of one kind alone
PRODUCTION = {
    "swiglu": {
        DIMENSIONS: lambda given, told: given[0].dim() == 4,
        SHIFTED: shifted,
        EXPANDED: lambda given, told: given[0].stride(0) == 0,
    },
    "rope": {
        "positions in int16": told_in("positions", torch.int16),
        "cu_seqlens in every other column": lambda given, told: (
            "cu_seqlens" in told and not told["cu_seqlens"].is_contiguous()
        ),
        "cu_seqlens in uint8": told_in("cu_seqlens", torch.uint8),
    },
    "rms_norm": {DIMENSIONS: lambda given, told: given[0].dim() == 4, SHIFTED: shifted},
    "linear": {SHIFTED: shifted, EXPANDED: lambda given, told: given[0].stride(0) == 0},
    "routed_linear": {DIMENSIONS: lambda given, told: given[0].dim() == 4, "ids in uint8": ids(torch.uint8)},
    "embedding": {
        SHIFTED: shifted,
        OFTEN: lambda given, told: given[0].numel() > 2048,
        "ids in int16": ids(torch.int16),
        "ids in every other column": lambda given, told: given[0].dim() == 1 and given[0].stride(0) == 2,
    },
    "token_logprob": {SHIFTED: shifted, "ids in int32": ids(torch.int32)},
    "attention": {
        SHIFTED: shifted,
        "cu_seqlens in int64": told_in("cu_seqlens_q", torch.int64),
        "block table and lengths in uint8": told_in("block_table", torch.uint8),
        HEADS_FIRST: lambda given, told: given[1].dim() == 4 and given[1].stride(2) > given[1].stride(1),
        FAR: lambda given, told: given[1].dim() == 4 and given[1].shape[1] > 512,
        "pages of 2": lambda given, told: "block_table" in told and given[1].shape[1] == 2,
        "7 query heads a key head": lambda given, told: grouped(7)(given, told) and "cu_seqlens_q" not in told,
        **{f"{n} sequences decoded": lambda given, told, n=n: given[0].shape[:2] == (n, 1) for n in DECODED},
    },
}


@pytest.mark.parametrize("name", PRODUCTION)
def test_inputs_as_production_has_them_are_told_apart(name):
    def broken(*given, **told):
        out = public(OPS[name])(*given, **told)
        wrong = any(holds(given, told) for holds in PRODUCTION[name].values())
        return _each(lambda t: t * 1.5, out) if wrong else out

    rows = list(single_call.by_use(subject(name, broken), single_call.ONCE))
    assert {r.layout for r in rows if r.verdict == NEEDS_FIX} == {*PRODUCTION[name]}


def test_what_a_candidate_refuses_of_them_is_said():
    def refuses(x, table, cu_seqlens=None, **told):
        assert cu_seqlens is None or cu_seqlens.dtype == torch.int64, "int64 alone"
        return bi_kernels.rope(x, table, cu_seqlens=cu_seqlens, **told)

    rows = list(single_call.by_use(subject("rope", refuses), ["indices"]))
    refused = {r.layout for r in rows if r.detail.startswith("refused: ")}
    assert not [r for r in rows if r.verdict != PASS]
    assert refused == {f"cu_seqlens in {dtype}" for dtype in ("uint8", "int16", "int32")} | {LATE}


SOME = ["memory", "population"]  # a bug may show in other axes too
USES = [
    ("silu", masks_upstream, "inputs and upstream", SOME),
    ("linear", doubled_for_one_token, ONE_TOKEN, SOME),
    ("linear", doubled_in_a_flat_buffer, FLAT, SOME),
    ("rope", doubled_with_positions_for_all, "positions for all", SOME),
    ("silu", fp32_without_columns, "no mlp", SOME),
    ("silu", _Workspace.apply, "backward after a later call", single_call.AXES),
    ("silu", scratch_in_inference_mode, "inference_mode", single_call.AXES),
    ("silu", deterministic_otherwise, modes.DETERMINISTIC, single_call.AXES),
]


@pytest.mark.parametrize("name, function, layout, axes", USES, ids=[layout for _, _, layout, _ in USES])
def test_a_use_that_is_another_is_named(name, function, layout, axes):
    found = {r.layout for r in single_call.by_use(subject(name, function), [*axes]) if r.verdict == NEEDS_FIX}
    assert found == {layout}


def scaled_where(condition):
    """Returns what makes an op's outputs other ones where the condition holds of a call's tensors."""

    def broken(function):
        def op(*given, **told):
            out, other = function(*given, **told), condition(*given)
            return _each(lambda t: t * 1.015625, out) if other else out

        return op

    return broken


def after_a_call_of_two():
    """Returns what tells whether a call of all 63 tokens is the first after one of two. Many calls are of fewer, so it
    does not matter at which of them their time is over."""
    held = [0]

    def condition(*given):
        count, after = len(given[0]), held[0]
        held[0] = (count == 2 or after) * (count < 63)
        return count >= 63 and after

    return condition


def stale(keeps):
    """Returns an op that reads copies of the tensors of a rollout that `keeps` keeps."""

    def broken(function):
        held = {}
        return lambda *given, **told: function(*(given if torch.is_grad_enabled() else keeps(held, given)), **told)

    return broken


def by_version(own):
    """Keeps copies by object and version, of tensors in memory of their own, or of others."""
    alone = lambda t: t.untyped_storage().nbytes() == t.nbytes
    copy = lambda held, t: held.setdefault((id(t), t._version), (t, t.clone()))[1]
    return stale(lambda held, given: [copy(held, t) if alone(t) == own else t for t in given])


def kept_by_address(held, given):
    """Keeps copies by address and version, anew for another content of the same tensor."""
    copies = []
    for t in given:
        key = t.data_ptr(), t._version
        if key in held and held[key][0] is t and not torch.equal(held[key][1], t):
            held.pop(key)
        copies.append(held.setdefault(key, (t, t.clone()))[1])
    return copies


STATES = {
    modes.AUTOCAST_FP16: scaled_where(
        lambda *_: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16
    ),
    modes.PRECISION: scaled_where(lambda *_: torch.get_float32_matmul_precision() != "highest"),
    modes.DEFAULT: scaled_where(lambda *_: torch.get_default_dtype() != torch.float32),
    modes.DEVICE: scaled_where(lambda *_: torch._C._len_torch_function_stack() > 0),
    modes.THREAD: scaled_where(lambda *_: threading.current_thread() is not threading.main_thread()),
    order.MANY: lambda function: scaled_where(after_a_call_of_two())(function),
    f"{order.WRITTEN} through .data": by_version(own=True),
    f"{order.WRITTEN} in a flat buffer": by_version(own=False),
    f"{order.WRITTEN} at the addresses of others": stale(kept_by_address),
}
FAMILIES = ("silu", "rms_norm", "linear", "embedding", "attention", "routed_linear")


@pytest.mark.parametrize("layout", STATES)
@pytest.mark.parametrize("name", slow_but(FAMILIES, "silu"))
def test_what_hangs_on_the_state_of_the_process_is_named(name, layout):
    s = subject(name, STATES[layout](public(OPS[name])))
    u = single_call.begun(s)
    ways = {k: (axis, way) for axis in ("mode", "history") for k, way in single_call.AXES[axis][2](u).items()}
    for other in [k for k in ways if k not in ("compiled", requests.CHECKPOINTED)] if name == "silu" else [layout]:
        axis, way = ways[other]
        (row,) = s.attempt("invariance", other, partial(single_call.judged, s, "invariance", other, way))
        assert (row.verdict == NEEDS_FIX) == (other == layout), (other, row.detail)


def test_an_op_that_reads_one_tensor_by_the_strides_of_another_is_found():
    by_x = lambda x, y: bi_kernels.add(x, y.as_strided(y.shape, x.stride(), y.storage_offset()))
    found = {r.layout for r in memory.by_view(subject("add", by_x)) if r.verdict == NEEDS_FIX}
    assert memory.APART in found


@pytest.mark.slow
def test_another_first_call_is_made_in_another_process(tmp_path):
    """A scale that the first call leaves, and a plan of the first shape that is right."""
    lines = "import bi_kernels\n\n\ndef f(x, held={{}}):\n    {}\n    return bi_kernels.silu(x) * {}\n"
    for first, factor, verdict in (
        ('scale = held.setdefault("scale", 1 + (len(x) == 1))', "scale", NEEDS_FIX),
        ('held.setdefault("rows", len(x))', "1", PASS),
    ):
        (tmp_path / "mine.py").write_text(lines.format(first, factor), encoding="utf-8")
        given = {"candidate": f"{tmp_path / 'mine.py'}:f", "op": "silu", "dtype": "bf16", "shapes": "tiny"}
        session = start("elementwise", given)
        (row,) = single_call.by_first_call(session, single_call.begin_otherwise(session))
        assert (row.layout, row.verdict) == (order.FIRST, verdict), row
