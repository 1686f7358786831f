"""What no audit asks of attention: splits and steps, tilings, pages, shapes that no layout has, what its bounds catch,
and lengths that change behind a call."""

import warnings
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from conftest import assert_same_bits
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import bi_kernels as bi
from bi_kernels import contract, reference
from bi_kernels.audit.inputs import draw, generator
from bi_kernels.audit.targets.fresh_memory import poisoned_memory
from bi_kernels.ops.attention import decode
from bi_kernels.ops.attention.attention import arguments as checked
from bi_kernels.ops.attention.attention import attend
from bi_kernels.ops.attention.schedule import SCHEDULE, Schedule, SplitDecodeConfig, Tiling
from bi_kernels.reference_gradients import gradient

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS, SHORT, EDGES = (5, 1, 130, 64, 200), (3, 150, 20), (0, 1, 15, 0, 16, 17, 127, 128, 129, 0)
LAST = 2  # tokens that are decoded
NEVER, ALWAYS = SplitDecodeConfig(0), SplitDecodeConfig(10**9, 10**9)
SMALL = replace(
    SCHEDULE, split=128, decode=Tiling(128, 64, 4, 4), merge_rows=256, apart=NEVER
)  # several splits, few programs
SPLITS, WHOLE = (replace(SMALL, few=few) for few in (10**9, 0))  # each split a program of its own; one after another
APART = replace(SMALL, apart=ALWAYS)  # all blocks at once
EITHER_SCHEDULE = pytest.mark.parametrize("schedule", [SPLITS, WHOLE, APART], ids=["splits", "whole", "apart"])


def numbers(name: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return draw("normal", shape, dtype, generator("cpu", name, *shape, dtype))


def arguments(
    count: int, dtype: torch.dtype = BF16, heads: tuple[int, int] = (4, 2), width: int = 32
) -> dict[str, torch.Tensor]:
    of_head = {"q": heads[0], "k": heads[1], "v": heads[1], "d_out": heads[0]}
    return {name: numbers(name, count, h, width, dtype=dtype) for name, h in of_head.items()} | {
        "d_lse": numbers("d_lse", count, heads[0], dtype=FP32)
    }


# Layouts: calls of (which token each row of q is, which token each row of k and v is, −1 for none, what the op is told)


def sequences(lengths: tuple[int, ...]) -> list[list[int]]:
    return [list(range(end - n, end)) for n, end in zip(lengths, accumulate(lengths))]


def span(sequence: list[int], begin: int = 0, end: int | None = None):
    """Queries from `begin` to `end` and all keys up to there."""
    return sequence[:end][max(begin, 0) :], sequence[:end]


def packed(*spans):
    queries, keys = zip(*spans)
    ends = {
        f"cu_seqlens_{name}": torch.tensor([0, *accumulate(map(len, s))]) for name, s in (("q", queries), ("k", keys))
    }
    return torch.tensor(sum(queries, []), dtype=torch.long), torch.tensor(sum(keys, []), dtype=torch.long), ends


def padded(*spans, room=0, left=False):
    def filled(rows, width):
        return torch.tensor(
            [[-1] * (width - len(r)) + r if left else r + [-1] * (width - len(r)) for r in rows], dtype=torch.long
        )

    queries, keys = zip(*spans)
    lengths = {f"lengths_{name}": torch.tensor([*map(len, s)]) for name, s in (("q", queries), ("k", keys))}
    widest = [max(map(len, s)) + room for s in (queries, keys)]
    return filled(queries, widest[0]), filled(keys, widest[1]), lengths | {"left_padded": left}


def paged(*spans, page, pack=False):
    """The pages lie anywhere, among those of nobody; a table's unused entries name none."""
    at_q, _, told = packed(*spans) if pack else padded(*spans)
    needed = [-(-len(keys) // page) for _, keys in spans]
    places = torch.randperm(sum(needed) + 3, generator=generator("cpu", "pages", page)).tolist()
    pages, table = torch.full((len(places), page), -1), torch.full((len(spans), max(needed) + 1), -1)
    for i, (_, keys) in enumerate(spans):
        for j in range(needed[i]):
            table[i, j], some = places.pop(), keys[j * page :][:page]
            pages[table[i, j], : len(some)] = torch.tensor(some)
    told = {k: t for k, t in told.items() if k in ("cu_seqlens_q", "lengths_q")}
    return at_q, pages, told | {"lengths_k": torch.tensor([len(keys) for _, keys in spans]), "block_table": table}


def layouts(every: list[list[int]], size: int = 100) -> dict[str, list]:
    """As a server calls it: some of the queries against all keys so far."""
    chunks = [[span(s, begin, begin + size) for s in every] for begin in range(0, max(map(len, every)), size)]
    steps = [
        [span(s, len(s) - back, len(s) - back + 1) for s in every if len(s) >= back] for back in range(LAST, 0, -1)
    ]
    return {
        "packed": [packed(*map(span, every))],
        "left-padded, with room": [padded(*map(span, every), room=9, left=True)],
        "chunks against a cache": [padded(*c) for c in chunks],
        "chunks, left-padded": [padded(*c, left=True) for c in chunks],
        "last tokens together": [packed(*(span(s, len(s) - LAST) for s in every))],
        "token by token": [padded(*s, room=60) for s in steps],
        "pages of 16, chunks packed": [paged(*c, page=16, pack=True) for c in chunks],
        "pages of 8, token by token": [paged(*s, page=8) for s in steps],
    }


def queries(calls: list) -> torch.Tensor:
    return torch.cat([at_q[at_q >= 0] for at_q, *_ in calls])


def take(t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    taken = t[at.clamp(min=0)]
    taken[at < 0] = torch.nan
    return taken


def results(
    given: dict, calls: list, trained: str = "", schedule: Schedule = SMALL, **options
) -> dict[str, torch.Tensor]:
    """Returns out and lse of every token, and the gradients of the inputs in `trained`. What is in no sequence holds
    NaN, and so does fresh memory and the gradient that comes there; it gives 0 and −inf, and gets no gradient."""
    found = {"out": torch.zeros_like(given["q"]), "lse": torch.zeros(given["q"].shape[:2])}
    found |= {f"d{name}": torch.zeros_like(given[name]) for name in trained}
    for at_q, at_k, told in calls:
        at = {"q": at_q, "k": at_k, "v": at_k, "out": at_q, "lse": at_q, "dq": at_q, "dk": at_k, "dv": at_k}
        inputs = {name: take(given[name], at[name]).requires_grad_(name in trained) for name in "qkv"}
        with poisoned_memory(0xFF):
            y = dict(zip(("out", "lse"), attend(checked(**inputs, **told, **options), schedule)))
            if trained:
                upstream = {name: take(given[f"d_{name}"], at_q) for name in y}
                torch.autograd.backward([y[name] for name in upstream], list(upstream.values()))
        assert all((t.grad is not None) == (name in trained) for name, t in inputs.items())
        for name, t in (y | {f"d{name}": inputs[name].grad for name in trained}).items():
            t, there = t.detach(), at[name] >= 0
            found[name][at[name][there]] = t[there]
            assert_same_bits(
                t[~there], torch.full_like(t[~there], -torch.inf if name == "lse" else 0.0), f"{name} in no sequence"
            )
    return found


def assert_same(found: dict, expected: dict, what: str, rows: slice | list | torch.Tensor = slice(None)) -> None:
    for name, t in expected.items():
        assert_same_bits(found[name][rows], t[rows], f"{what}: {name}")


# Where the tokens lie, and in which call

PLACES = {  # dtype, heads, width, lengths, options, schedules
    "GQA": (BF16, (4, 2), 32, LENGTHS, {}, [SPLITS, WHOLE]),
    "three splits": (FP16, (1, 1), 20, (*EDGES, 270), {"scale": 0.5, "window": 200}, [SPLITS, WHOLE, APART]),
}


@pytest.mark.parametrize(
    "dtype, heads, width, lengths, options, schedules",
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name != "GQA")) for name, case in PLACES.items()],
)
def test_a_result_does_not_depend_on_where_and_when_it_is_computed(dtype, heads, width, lengths, options, schedules):
    given, every = arguments(sum(lengths), dtype, heads, width), sequences(lengths)
    spans = [span(s) for s in every]
    expected = results(given, [packed(*spans)], **options)
    assert all(t.isfinite().all() for t in expected.values())
    for schedule in schedules:
        for layout, calls in layouts(every).items():
            found, what = results(given, calls, schedule=schedule, **options), f"{layout}, {schedule}"
            assert_same(found, expected, what, queries(calls))


@EITHER_SCHEDULE
@pytest.mark.parametrize("page, window", [(64, None), (128, 333), (192, 200)])
def test_pages_of_whole_blocks_are_read_where_the_keys_are(schedule, page, window):
    given, spans = arguments(820, heads=(2, 1)), [span(s, len(s) - 1) for s in sequences((300, 520))]
    expected, found = (
        results(given, [calls], schedule=schedule, window=window)
        for calls in (packed(*spans), paged(*spans, page=page))
    )
    assert_same(found, expected, f"pages of {page}", queries([packed(*spans)]))


# How it is computed


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("few, most", [(0, 0), (10**9, 0), (10**9, 10**9)])
def test_the_tiling_of_the_forward_changes_no_bit(few, most, rows):
    given, calls = arguments(sum(SHORT), heads=(3, 1)), [packed(*map(span, sequences(SHORT)))]
    tiling = Tiling(rows, 64, 4, 2)
    schedule = replace(SMALL, few=few, most=most, merge_rows=16, prefill=tiling, decode=tiling)
    for options in ({}, {"window": 90}):
        expected = results(given, calls, **options)
        assert_same(results(given, calls, schedule=schedule, **options), expected, f"{options}")


@pytest.mark.slow  # keys and run of the scores, columns of v, blocks of a round
@pytest.mark.parametrize("keys, run, columns, together", [(64, 64, 16, 1), (128, 1024, 32, 3), (32, 192, 128, 4)])
def test_the_tiling_of_decode_apart_changes_no_bit(keys, run, columns, together):
    given, calls = arguments(sum(SHORT), heads=(3, 1)), [packed(*map(span, sequences(SHORT)))]
    for rows, options in ((16, {}), (64, {"window": 90}), (16, {"causal": False})):
        apart = ALWAYS._replace(run=run, together=together)
        apart = apart._replace(scores=Tiling(rows, keys, 4, 3), values=Tiling(rows, columns, 4, 2))
        for split in (64, 128, 4096):
            expected = results(given, calls, schedule=replace(SMALL, split=split), **options)
            found = results(given, calls, schedule=replace(APART, split=split, apart=apart), **options)
            assert_same(found, expected, f"{rows}, {split}, {options}")


@pytest.fixture
def taken(monkeypatch):
    """Grows by a call that is computed in steps apart."""
    taken, compute = [], decode.SplitDecode.__call__
    monkeypatch.setattr(decode.SplitDecode, "__call__", lambda *given: (taken.append(True), compute(*given)))
    return taken


def test_decode_is_computed_apart_where_there_are_few_programs_and_few_rows(taken):
    """By the shapes alone, so that a graph may change the lengths."""

    def apart(batch, queries=1, keys=20, heads=(4, 1), dtype=BF16, **fields):
        q, k = (
            numbers("q", batch, queries, heads[0], 16, dtype=dtype),
            numbers("k", batch, keys, heads[1], 16, dtype=dtype),
        )
        taken.clear()
        apart = SCHEDULE.apart._replace(interpreted=10**6)
        told = replace(SCHEDULE, apart=apart, **fields)
        attend(checked(q, k, k, lengths_k=torch.ones(batch, dtype=torch.int32)), told)
        return bool(taken)

    most = SCHEDULE.apart.programs
    assert apart(1) and apart(most) and not apart(most + 1) and apart(most // 2, heads=(2, 2))
    assert not apart(most // 2 + 1, heads=(2, 2)) and not apart(most // 2 + 1, keys=200, split=128)
    assert apart(1, 4) and not apart(1, 5) and not apart(1, dtype=FP32)


def test_on_a_gpu_decode_is_computed_apart_in_a_capture_for_which_its_kernels_are_loaded(monkeypatch, taken):
    """A capture can load none, and in eager mode one launch is the faster."""
    capturing, schedule = [False], replace(SCHEDULE)
    q, k, lengths = numbers("q", 2, 1, 4, 16), numbers("k", 2, 40, 1, 16), torch.tensor([40, 3])
    shifted = torch.cat([k.new_zeros(1), k.flatten()])[1:].view(k.shape)  # other kernels load it
    expected = attend(checked(q, k, k, lengths_k=lengths), replace(SCHEDULE, apart=NEVER))
    assert attend(checked(q, k, k, lengths_k=lengths), schedule) and taken  # planned where steps run
    monkeypatch.setattr(decode, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    def apart(k, captured=False):
        taken.clear()
        capturing[0] = captured
        found = attend(checked(q, k, k, lengths_k=lengths), schedule)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        return bool(taken)

    assert not apart(k, captured=True)
    assert apart(k) and not apart(k) and apart(k, captured=True)
    assert not apart(shifted, captured=True) and not apart(shifted)
    with monkeypatch.context() as m:
        m.setattr(decode, "is_recorded", lambda: True)
        assert apart(k) and apart(k, captured=True)


@pytest.mark.parametrize(
    "rows, columns, options", [(16, 128, {}), (32, 16, {"causal": False}), (128, 32, {"window": 60}), (16, 16, {})]
)
def test_the_tiling_of_the_backward_changes_no_bit(options, rows, columns):
    given, calls = arguments(90, heads=(3, 1)), [packed(*(span(s, len(s) - 80) for s in sequences((86, 4))))]
    expected, tiling = results(given, calls, "qkv", **options), Tiling(rows, columns, 4, 2)
    schedule = replace(SMALL, keys=tiling, queries=tiling)
    assert_same(results(given, calls, "qkv", schedule=schedule, **options), expected, f"{rows} × {columns}")


@EITHER_SCHEDULE
def test_lengths_may_be_any_view_and_stay_the_callers(schedule):
    attention = lambda *qkv, **told: attend(checked(*qkv, **told), schedule)
    q, k, v = (
        torch.randn(3, n, heads, 16, generator=torch.Generator().manual_seed(n)).bfloat16()
        for n, heads in ((2, 2), (20, 1), (20, 1))
    )
    for lengths, view in (
        (torch.tensor([9, 20, 4]), torch.tensor([[9, 1], [20, 1], [4, 1]], dtype=torch.int32)[:, 0]),
        (torch.tensor([9, 9, 9]), torch.tensor([9], dtype=torch.int32).expand(3)),
    ):
        expected = attention(q, k, v, lengths_k=lengths)
        for y, e in zip(attention(q, k, v, lengths_k=view), expected):
            assert_same_bits(y, e)
    leaf, own = q.clone().requires_grad_(), torch.tensor([9, 20, 4], dtype=torch.int32)
    out, _ = attention(leaf, k, v, lengths_k=own)
    own += 1
    out.sum().backward()


# What it computes


def bounds(given: dict, spans: list, **options) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The fp64 results and gradients of packed sequences, and how far the contract lets each of them be off."""
    at_q, at_k, _ = packed(*spans)
    inputs = {name: given[name][at_q if name == "q" else at_k] for name in "qkv"}
    upstream = [given[name][at_q] for name in ("d_out", "d_lse")]
    lengths, dtype = [tuple(map(len, s)) for s in spans], given["q"].dtype
    limit = lambda out, *expected, **more: (
        expected[0],
        contract.bound("attention", out, *expected, **more, inputs=dtype),
    )
    out, lse = reference.attention(**inputs, lengths=lengths, **options)
    return {"out": limit(dtype, *out), "lse": limit(FP32, *lse)} | {
        f"d{name}": limit(dtype, *found, gradient=name)
        for name, found in gradient("attention", inputs, options, upstream, lengths).items()
    }


def share(y: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor) -> float:
    """Returns the largest error as a share of the bound; infinity is right where it reaches beyond the dtype, NaN where
    exact is NaN."""
    assert y.shape == exact.shape
    infinite = (exact.abs() + limit >= torch.finfo(y.dtype).max) & (y == exact.sign() * torch.inf)
    right = infinite | (y == exact) | (y.isnan() & exact.isnan())
    return float(torch.where(right, 0.0, (y.double() - exact).abs() / limit).nan_to_num(torch.inf).max())


ACCURACY = {  # dtype, heads, width, (queries, keys) of each sequence, options
    "not causal": (BF16, (2, 2), 32, [(20, 150), (100, 7)], {"causal": False}),
    "window, fp32": (FP32, (2, 1), 16, [(30, 60), (60, 30)], {"window": 5}),
    "scale, width 20": (FP16, (2, 2), 20, [(70, 70)], {"scale": 1.5}),
    "width 1": (BF16, (2, 1), 1, [(20, 20), (4, 0)], {}),
    "more keys, or fewer": (BF16, (6, 2), 32, [(17, 129), (1, 200), (140, 9)], {}),
}


@pytest.mark.parametrize("dtype, heads, width, lengths, options", ACCURACY.values(), ids=ACCURACY)
def test_results_and_gradients_are_within_the_contract_s_bounds(dtype, heads, width, lengths, options):
    every = sequences([max(n) for n in lengths])
    spans = [(s[:n], s[:m]) for s, (n, m) in zip(every, lengths)]
    given = arguments(sum(map(len, every)), dtype, heads, width)
    found, (at_q, at_k, _) = results(given, [packed(*spans)], "qkv", **options), packed(*spans)
    shares = {
        name: share(found[name][at_k if name in ("dk", "dv") else at_q], *limit)
        for name, limit in bounds(given, spans, **options).items()
    }
    assert max(shares.values()) <= 1, shares


def test_where_the_gradient_of_a_score_is_beyond_fp16_what_follows_is_infinite_and_nothing_else():
    given, spans = arguments(40, FP16, (2, 1), 16), [span(*sequences((40,)))]
    given["q"][2, 1] *= 2**-6  # its three keys weigh much the same
    given["d_out"][2, 1] = (given["v"][1, 0] - given["v"][2, 0]).sign() * 6e4
    found, limits = results(given, [packed(*spans)], "qkv"), bounds(given, spans)
    assert max(share(found[name], *limit) for name, limit in limits.items()) <= 1
    for name in ("dq", "dk"):
        exact, limit = limits[name]
        assert not exact[:3].isfinite().all() and exact[3:].isfinite().all() and limit[3:].isfinite().all()
        for at, wrong in (
            (torch.argwhere(exact.isfinite())[0], torch.inf),
            (torch.argwhere(exact.isinf())[0], 6e4),
            (torch.argwhere(exact.isinf())[0], torch.nan),
        ):
            y = found[name].clone()
            y[tuple(at)] = wrong
            assert share(y, exact, limit) > 1, (name, wrong)


def test_the_gradient_of_a_score_that_is_at_the_end_of_fp16_s_range_may_be_infinite():
    given = arguments(3, FP16, (1, 1), 1)
    given |= {"q": torch.ones(3, 1, 1).half(), "k": torch.tensor([1.0, 0.5, 0.5]).half().view(3, 1, 1) * 2**-20}
    given |= {"v": torch.tensor([8.0, -4.0, -4.0]).half().view(3, 1, 1), "d_out": torch.full((3, 1, 1), 24576.0).half()}
    given["d_lse"].zero_()
    spans = [([0], [0, 1, 2])]  # dS is 65536, −32768 and −32768
    found = results(given, [packed(*spans)], "qkv")
    for name, (exact, limit) in bounds(given, spans).items():
        y = found[name][: len(exact)]
        assert share(y, exact, limit) <= 1 and (name in ("dq", "dk")) == bool(limit.isinf().any()), name
        for value, expected in ((6e4, True), (torch.inf, True), (-torch.inf, False), (torch.nan, False)):
            assert name != "dq" or (share(torch.full_like(y, value), exact, limit) <= 1) == expected, value


def test_a_window_of_one_is_the_value_itself():
    given, calls = arguments(150), [packed(*map(span, sequences((20, 130))))]
    assert_same_bits(results(given, calls, window=1)["out"], given["v"].repeat_interleave(2, 1))


@pytest.mark.parametrize("window", [140, 2**20, 2**31 - 1, 2**31])
def test_a_window_wider_than_a_sequence_is_none(window):
    given, every = arguments(180, heads=(2, 1)), sequences((140, 40))
    calls = [packed((every[0], every[0][:70]), span(every[1]))]
    assert_same(results(given, calls, "qkv", window=window), results(given, calls, "qkv"), f"window of {window}")


@pytest.mark.parametrize("batch, queries, keys", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
def test_no_sequences_no_queries_or_no_keys(batch, queries, keys):
    q, k, v = (numbers("none", batch, n, 2, 16).requires_grad_() for n in (queries, keys, keys))
    out, lse = bi.attention(q, k, v)
    torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    assert out.shape == q.shape and lse.shape == q.shape[:3] and bool((lse == -torch.inf).all())
    assert not any(t.any() for t in (out, q.grad, k.grad, v.grad))


# Lengths that change, and what is computed again


@pytest.mark.parametrize(
    "name, values, behind, clamped",
    [
        ("cu_seqlens_q", [0, 4, 6], [0, 99, 6], [0, 6, 6]),
        ("cu_seqlens_q", [0, 4, 6], [3, 4, 5], [0, 4, 6]),
        ("lengths_k", [2, 3], [-7, 99], [0, 3]),
    ],
)
def test_values_are_looked_at_again_once_written_to_and_by_no_other_layer(name, values, behind, clamped):
    """A layer's call waits for the device no more for what the layer before it has seen. What torch does not notice, as
    a graph's replay, may be wrong then: every row is computed all the same, and none outside is read."""
    q, k = numbers("q", 6, 4, 16), numbers("k", 6, 2, 16)
    q, k = (q, k) if name == "cu_seqlens_q" else (t.unflatten(0, (2, 3)) for t in (q, k))
    given = torch.tensor(values)
    call = lambda t: bi.attention(q, k, k, **{name: t})
    first = call(given)
    given.numpy()[:] = behind  # of which no version tells
    for found, wanted in zip(call(given), call(torch.tensor(clamped))):
        assert_same_bits(found, wanted)
    given.numpy()[:] = values
    assert_same_bits(call(given)[0], first[0])
    given[0] = 99
    with pytest.raises(ValueError, match=name):
        call(given)
    with torch.inference_mode(), pytest.raises(ValueError, match=name):
        call(given.clone())  # of which no version is kept


@pytest.mark.parametrize("queries, fewer", [((0, 70, 150), (0, 40, 110)), ((0, 3, 6), (0, 2, 4))])
def test_rows_of_no_sequence_have_no_result_and_no_gradient_where_nobody_can_look(queries, fewer, monkeypatch):
    """As in the capture of a CUDA graph, which is replayed with other ends."""
    keys, fewer_keys = (0, 70, 150), (0, 40, 110)
    q, k, v = numbers("q", queries[-1], 4, 16), numbers("k", keys[-1], 2, 16), numbers("v", keys[-1], 2, 16)
    upstream = numbers("dy", queries[-1], 4, 16), numbers("dlse", queries[-1], 4, 1)[..., 0].float()

    def step(q, k, v):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        ends = {"cu_seqlens_q": torch.tensor(fewer), "cu_seqlens_k": torch.tensor(fewer_keys)}
        out = bi.attention(*leaves, **ends)
        return [*out, *torch.autograd.grad(out, leaves, [dy[: len(y)] for dy, y in zip(upstream, out)])]

    alone = step(q[: fewer[-1]], k[: fewer_keys[-1]], v[: fewer_keys[-1]])
    monkeypatch.setattr("bi_kernels.ops.attention.arguments.can_wait", lambda t: False)
    monkeypatch.setattr("bi_kernels.ops.attention.arguments.needs_validation", lambda *asked: False)
    for y, own, empty in zip(step(q, k, v), alone, (0, -torch.inf, 0, 0, 0), strict=True):
        assert_same_bits(y[: len(own)], own)
        assert_same_bits(y[len(own) :], torch.full_like(y[len(own) :], empty))


def test_selective_checkpointing_recomputes_the_same_ops():
    """What the first call has looked at, and the recomputation has not, makes no other op of torch's."""
    q, k = (numbers(n, 6, h, 16).requires_grad_() for n, h in (("q", 4), ("k", 2)))
    ends, w = torch.tensor([0, 4, 6]), torch.randn(16, 16).bfloat16().requires_grad_()

    def forward(q, k):
        return bi.attention(q @ w, k, k, cu_seqlens_q=ends)[0]

    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no token layout is entered
        checkpoint(forward, q, k, use_reentrant=False, context_fn=saved).sum().backward()
        found, q.grad = q.grad, None
        forward(q, k).sum().backward()
    assert_same_bits(found, q.grad)
