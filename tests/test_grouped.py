"""Experts: grouped products against `linear`, their folds over splits, the order of routing and of combination."""

import itertools

import pytest
import torch

import bi_kernels as bi
from bi_kernels import TokenLayout
from bi_kernels.ops.gemm import kernel as gemm_kernel
from bi_kernels.ops.grouped import fold, groups, kernel

LENGTHS = (5, 1, 17, 40, 9)
TOKENS = sum(LENGTHS)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def routed(experts: int, k: int, used: int | None = None) -> torch.Tensor:
    """k different experts of each token, of the first `used`."""
    return torch.stack([torch.randperm(used or experts)[:k] for _ in range(TOKENS)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, K", [(40, 48), (17, 30), (64, 64)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_row_has_the_bits_of_linear_by_its_experts_weight(dtype, N, K, transposed):
    ids, weight = routed(8, 2, used=6), torch.randn(8, N, K).to(dtype)
    x, bias = torch.randn(TOKENS, K).to(dtype), torch.randn(8, N).to(dtype)
    groups = bi.group_by_expert(ids, 8)
    stored = weight.mT.contiguous() if transposed else weight
    y = bi.grouped_linear(bi.dispatch(x, groups), stored, groups, bias, transposed=transposed)
    for token, choice in itertools.product(range(0, TOKENS, 5), range(2)):
        e = int(ids[token, choice])
        assert torch.equal(y[groups.rows[token, choice]], bi.linear(x[token], weight[e], bias[e]))


@pytest.mark.parametrize("sizes", [*itertools.product((1, 2), (1, 64), (1, 64))], ids=str)
def test_sizes_of_1_are_sizes_like_others_forward_and_backward(sizes):
    """A dimension of 1 has any stride, and no copy changes it."""
    rows, ends = 32, torch.tensor([32, 32][: sizes[0]], dtype=torch.int32)
    x, weight = (torch.randn(*shape).bfloat16() for shape in ((rows, sizes[2]), sizes))
    dy = torch.randn(rows, sizes[1]).bfloat16()
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (grads, y), (expected, whole) = (
        (torch.autograd.grad(out, leaves, dy), out)
        for out in (bi.grouped_linear(*leaves, ends), bi.linear(leaves[0], leaves[1][0]))
    )
    assert torch.equal(y, whole) and torch.equal(grads[0], expected[0])
    assert torch.equal(grads[1][0], expected[1][0]) and not grads[1][1:].any()


def test_k_is_never_a_constant_of_a_product_with_a_bias():
    """Where K is 1, Triton would drop the loop and begin the only product at the bias, for some tiles and not for
    others."""
    for k in (kernel._grouped_kernel, gemm_kernel._gemm_kernel):
        assert "K" in k.kwargs["do_not_specialize"]


@pytest.mark.parametrize("tile", [*kernel.TILES.values(), kernel.MANY], ids=str)
def test_no_tile_changes_a_bit(tile):
    ends = torch.tensor([3, 3, 40, 41, 90], dtype=torch.int32)
    x, weight = torch.randn(90, 64).bfloat16(), torch.randn(5, 40, 64).bfloat16()
    wide = [kernel.launch(x, w, None, ends, tile) for w in (weight, weight.mT.contiguous().mT)]
    assert all(torch.equal(y, kernel.launch(x, weight, None, ends)) for y in wide)


@pytest.mark.parametrize("loads", [[0, 0, 0, 0], [7, 0, 0, 0], [0, 0, 0, 7], [0, 1, 6, 0]])
def test_an_expert_may_get_no_row_one_or_all_and_rows_of_no_expert_are_zeros(loads):
    ends = torch.tensor(loads).cumsum(0).to(torch.int32)
    x, weight = torch.randn(9, 32).requires_grad_(), torch.randn(4, 24, 32).requires_grad_()
    y = bi.grouped_linear(x, weight, ends)
    e = torch.searchsorted(ends, torch.arange(9), right=True)
    expected = torch.cat([bi.linear(x[i : i + 1], weight[e[i]]) if e[i] < 4 else torch.zeros(1, 24) for i in range(9)])
    assert torch.equal(y, expected)
    y.sum().backward()
    assert not x.grad[sum(loads) :].any()
    exact = torch.stack([x.detach().double()[e == i].sum(0).expand(24, -1) for i in range(4)])
    assert (weight.grad.double() - exact).abs().max() <= 2.0**-16 * exact.abs().max()


def step(split, kind="packed", padded=False, dtype=torch.bfloat16, main_grad=True, transposed=False, seed=0):
    """Returns outputs, gradients of x and of the routing weights, dW and dbias of a step cut into micro-batches."""
    torch.manual_seed(seed)
    x, dy, ids, routing = torch.randn(TOKENS, 40), torch.randn(TOKENS, 24), routed(8, 2, used=5), torch.rand(TOKENS, 2)
    weight, bias = torch.randn(8, 40, 24) if transposed else torch.randn(8, 24, 40), torch.randn(8, 24)
    x, dy, weight, bias = (t.to(dtype) for t in (x, dy, weight, bias))
    for p in (weight, bias):
        p.requires_grad_()
        if main_grad:
            p.main_grad = torch.zeros(p.shape)
    out, dx, drouting = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(routing)
    samples = torch.arange(TOKENS).split(LENGTHS)
    for mine in split:
        lengths, width = [LENGTHS[i] for i in mine], max(LENGTHS[i] for i in mine) + 2
        if kind == "packed":
            layout = TokenLayout.packed([0, *torch.tensor(lengths).cumsum(0).tolist()])
            at = torch.cat([samples[i] for i in mine])
        elif kind == "permuted":
            layout = TokenLayout.packed([0, *torch.tensor(lengths[::-1]).cumsum(0).tolist()], range(len(mine))[::-1])
            at = torch.cat([samples[i] for i in mine[::-1]])
        else:
            layout, filler = TokenLayout.padded(lengths, width, kind == "left"), torch.full((width,), -1)
            rows = [(filler[len(samples[i]) :], samples[i]) for i in mine]
            at = torch.cat([torch.cat(pair if kind == "left" else pair[::-1]) for pair in rows])
        some, real = at.clamp(min=0), at >= 0
        given = x[some].masked_fill(~real[:, None], float("nan")).requires_grad_()
        weights = routing[some].requires_grad_()
        groups = bi.group_by_expert(ids[some], 8, layout, padded=padded)
        y = bi.grouped_linear(bi.dispatch(given, groups), weight, groups, bias, transposed=transposed)
        y = bi.combine(y, weights, groups)
        y.backward(dy[some])
        for into, found in ((out, y.detach()), (dx, given.grad), (drouting, weights.grad)):
            into[at[real]] = found[real]
    return [out, dx, drouting, *(p.main_grad if main_grad else p.grad for p in (weight, bias))]


SPLITS = ([[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]])


CUTS = [*itertools.product(SPLITS, ("packed", "permuted", "left", "right"), (False, True))]
FEW = CUTS[1::5]  # each split and each layout, padded and not


@pytest.mark.parametrize("cuts", [pytest.param(CUTS, marks=pytest.mark.slow), FEW], ids=len)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_depend_on_no_split_layout_or_padding(dtype, transposed, cuts):
    wanted = step(SPLITS[0], dtype=dtype, transposed=transposed)
    for split, kind, padded in cuts:
        found = step(split, kind, padded, dtype, transposed=transposed)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted)), (split, kind, padded)


def test_gradients_of_bf16_depend_on_no_cut():
    wanted = step(SPLITS[0])
    for cut in CUTS:
        assert all(torch.equal(a, b) for a, b in zip(step(*cut), wanted)), cut


def test_a_gradient_without_main_grad_is_the_fold_rounded_once():
    folded, returned = step(SPLITS[0]), step(SPLITS[0], main_grad=False)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(folded[3:], returned[3:]))


def test_gradients_are_those_of_fp64():
    torch.manual_seed(0)
    x, dy, ids, routing = torch.randn(TOKENS, 40), torch.randn(TOKENS, 24), routed(8, 2, used=5), torch.rand(TOKENS, 2)
    weight, bias = torch.randn(8, 24, 40), torch.randn(8, 24)
    leaves = [t.double().requires_grad_() for t in (x, routing, weight, bias)]
    each = torch.einsum("tk,tjnk->tjn", leaves[0], leaves[2][ids]) + leaves[3][ids]
    y = (each * leaves[1][..., None]).sum(1)
    y.backward(dy.double())
    found = step(SPLITS[2], dtype=torch.float32)
    for ours, exact in zip(found, (y, *(leaf.grad for leaf in leaves))):
        assert (ours.double() - exact).abs().max() <= 2.0**-16 * exact.abs().max()


def test_a_micro_batch_whose_sequences_nobody_told_is_warned_of():
    weight, ends = torch.randn(2, 16, 16).requires_grad_(), torch.tensor([1, 4], dtype=torch.int32)
    grads, x = bi.MainGrads([weight]), torch.randn(4, 16)
    bi.grouped_linear(x, weight, ends).sum().backward()
    with pytest.warns(UserWarning, match="grouped_linear: another micro-batch without sequences"):
        bi.grouped_linear(x, weight, ends)
    grads.release()


def test_no_tile_of_the_fold_changes_a_bit(monkeypatch):
    wanted = step(SPLITS[1])
    for tile in (fold.FEW, fold.MANY, fold.INTERPRETED._replace(k=16)):
        monkeypatch.setattr(fold, "_tile_for", lambda *_, tile=tile: tile)
        fold._launch_for.cache_clear()
        assert all(torch.equal(a, b) for a, b in zip(step(SPLITS[1]), wanted))
    fold._launch_for.cache_clear()


def test_a_neighbours_nan_reaches_its_own_experts_alone():
    ids, weight = torch.tensor([[0], [1], [1], [3]]), torch.randn(4, 16, 16).bfloat16().requires_grad_()
    x = torch.randn(4, 16).bfloat16()
    x[3] = float("nan")
    layout = TokenLayout.packed([0, 2, 4])
    groups = bi.group_by_expert(ids, 4, layout)
    y = bi.combine(bi.grouped_linear(bi.dispatch(x, groups), weight, groups), None, groups)
    y.sum().backward()
    assert y[:3].isfinite().all() and y[3].isnan().all()
    assert weight.grad[:3].isfinite().all() and weight.grad[3].isnan().all()


@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_sorted_by_expert_sequence_and_position(padded):
    torch.manual_seed(1)
    ids, starts = routed(8, 3), [20, 0, 60]
    layout = TokenLayout(starts, [17, 20, 9], TOKENS, order=[2, 0, 1])
    groups = bi.group_by_expert(ids, 8, layout, padded=padded)
    logical = [*range(20), *range(60, 69), *range(20, 37)]
    sequence = {t: i for i, some in enumerate((range(20), range(60, 69), range(20, 37))) for t in some}
    wanted = sorted((int(e), sequence[t], logical.index(t), 3 * t + j) for t in logical for j, e in enumerate(ids[t]))
    source = groups.source[groups.source >= 0].tolist()
    assert source == [choice for *_, choice in wanted]
    place = torch.arange(len(groups.source)) if padded else groups.slots
    row_of = {int(r): i for i, r in enumerate(place.tolist()) if r >= 0}
    before, at = None, -1
    for e, s, _, choice in wanted:  # every (expert, sequence) begins a slab, and has no gap
        at = -(-(at + 1) // 16) * 16 if (e, s) != before else at + 1
        row = int(groups.rows.flatten()[choice])
        assert row_of[row] == at
        before = e, s
    assert (groups.rows[list(set(range(TOKENS)) - set(logical))] == -1).all()


def test_a_choice_beyond_the_experts_is_routed_nowhere():
    ids = routed(8, 2)
    ids[3] = torch.tensor([8, 2])
    ids[4] = -1
    for layout in (None, TokenLayout.packed([0, TOKENS])):
        groups = bi.group_by_expert(ids, 8, layout)
        x = torch.randn(TOKENS, 16)
        y = bi.combine(bi.dispatch(x, groups), torch.ones(TOKENS, 2), groups)
        assert torch.equal(y[5], x[5] + x[5]) and torch.equal(y[3], x[3]) and not y[4].any()


def test_combination_is_in_ascending_expert_id():
    torch.manual_seed(0)
    y, weights = torch.randn(50, 4, 33) * 2.0 ** torch.randint(-8, 9, (50, 4, 1)), torch.rand(50, 4)
    ids = torch.stack([torch.randperm(9)[:4] for _ in range(50)])
    total = torch.zeros(50, 33)
    for choice in ids.argsort(1).T:
        total = total + y[torch.arange(50), choice] * weights[torch.arange(50), choice, None]
    assert torch.equal(bi.routed_sum(y, weights, ids), total)
    order = torch.randperm(4)
    assert torch.equal(bi.routed_sum(y[:, order], weights[:, order], ids[:, order]), total)
    assert not torch.equal(torch.einsum("tjf,tj->tf", y, weights), total)


def test_a_compiled_combination_has_the_bits_of_eager_mode():
    torch.compiler.reset()
    y, weights, ids = torch.randn(5, 3, 16), torch.rand(5, 3), torch.stack([torch.randperm(8)[:3] for _ in range(5)])
    found = []
    for function in (bi.routed_sum, torch.compile(bi.routed_sum, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (y, weights)]
        out = function(*leaves, ids)
        out.backward(torch.ones_like(out))
        found.append([out, *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "gate, numbers",
    [
        ("swiglu", {}),
        ("geglu", {}),
        ("geglu", {"approximate": "tanh"}),
        ("clamped_swiglu", {"limit": 0.5, "alpha": 2.0}),
    ],
)
def test_a_gate_beside_its_factor_has_the_bits_of_one_apart(gate, numbers, interleaved, dtype):
    both = (3 * torch.randn(5, 3, 38)).to(dtype).requires_grad_()
    apart = [t.detach().clone().requires_grad_() for t in (both[..., ::2], both[..., 1::2])]
    if not interleaved:
        apart = [t.detach().clone().requires_grad_() for t in both.chunk(2, -1)]
    y, wanted = bi.gated(both, gate, interleaved=interleaved, **numbers), getattr(bi, gate)(*apart, **numbers)
    given = torch.randn(5, 3, 19).to(dtype)
    y.backward(given)
    wanted.backward(given)
    found = (both.grad[..., ::2], both.grad[..., 1::2]) if interleaved else both.grad.chunk(2, -1)
    assert torch.equal(y, wanted) and all(torch.equal(a, b.grad) for a, b in zip(found, apart))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts, k", [(1, 1), (8, 2), (60, 6), (128, 128)])
def test_top_k_is_in_a_total_order(experts, k, dtype):
    torch.manual_seed(0)
    scores = torch.randint(-3, 3, (37, experts)).to(dtype)  # ties everywhere
    scores[1], scores[2], scores[3, :] = -torch.inf, float("nan"), 0.0
    scores[3, ::2] = -0.0
    scores[4, experts // 2] = float("nan")
    leaf = scores.clone().requires_grad_()
    values, ids = bi.top_k(leaf, k)
    for row, found in zip(scores.nan_to_num(torch.inf, torch.inf, -torch.inf).tolist(), ids.tolist()):
        assert found == sorted(range(experts), key=lambda e: (-row[e], e))[:k]
    assert values.isnan().equal(scores.gather(1, ids).isnan())
    assert torch.equal(values.nan_to_num(9), scores.gather(1, ids).nan_to_num(9))
    given = torch.randn(37, k).to(dtype)
    values.backward(given)
    assert torch.equal(leaf.grad, torch.zeros_like(scores).scatter(1, ids, given))
    assert torch.equal(bi.top_k(scores[5:6], k)[1], ids[5:6])


def test_a_tie_that_position_breaks_is_seen():
    """The control: ids of equal scores in the order of their positions in the batch."""
    scores = torch.zeros(6, 8)
    by_position = lambda rows: torch.stack([torch.arange(8).roll(i)[:2] for i in range(len(rows))])
    assert torch.equal(bi.top_k(scores, 2)[1][3:], bi.top_k(scores[3:], 2)[1])
    assert not torch.equal(by_position(scores)[3:], by_position(scores[3:]))


X, W, ENDS = torch.zeros(4, 8), torch.zeros(2, 6, 8), torch.tensor([1, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: bi.grouped_linear(X, W[0], ENDS), "grouped_linear: weight has shape"),
        (lambda: bi.grouped_linear(X, W, ENDS, transposed=True), "expected .rows, 6. to match weight"),
        (lambda: bi.grouped_linear(X, W, ENDS.long()), "offsets is torch.int64 of shape"),
        (lambda: bi.grouped_linear(X, W, ENDS[:1]), r"expected torch.int32 \(2,\)"),
        (lambda: bi.grouped_linear(X, W, ENDS, torch.zeros(2, 8)), "bias has shape"),
        (lambda: bi.grouped_linear(X.bfloat16(), W, ENDS), "must be equal"),
        (lambda: bi.grouped_linear(X, W, bi.group_by_expert(torch.zeros(3, 1).long(), 2)), "x has 4 rows, expected 3"),
        (lambda: bi.group_by_expert(torch.zeros(3, 1), 2), "expert_ids has dtype torch.float32"),
        (lambda: bi.group_by_expert(torch.zeros(3, 1).long(), 0), "experts is 0"),
        (lambda: bi.group_by_expert(torch.zeros(3, 1).long(), 2, padded=True), "layout is None"),
        (lambda: bi.group_by_expert(torch.zeros(3, 1).long(), 2, TokenLayout.packed([0, 4])), "has 4 rows"),
        (lambda: bi.combine(X, None, ENDS), "groups is"),
        (lambda: bi.combine(X, torch.zeros(3, 2), bi.group_by_expert(torch.zeros(4, 1).long(), 2)), "weights has"),
        (lambda: bi.dispatch(X, bi.group_by_expert(torch.zeros(3, 1).long(), 2)), "dispatch: x has shape"),
        (lambda: bi.routed_linear(X, torch.zeros(3).long(), W), "routed_linear: x has shape"),
        (lambda: bi.routed_sum(W, torch.zeros(2, 6), torch.zeros(2).long()), "routed_sum: y has shape"),
        (lambda: bi.gated(X, "silu"), "gate is 'silu', expected one of swiglu"),
        (lambda: bi.gated(X[:, :5]), "gated: gate_up has shape"),
        (lambda: bi.top_k(X, 9), "k is 9, expected 1 to 8"),
        (lambda: bi.top_k(X, 2.0), "k is 2.0"),
        (lambda: bi.top_k(torch.zeros(3, 0), 1), "scores has shape"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, said):
    with pytest.raises((TypeError, ValueError), match=said) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
@pytest.mark.parametrize("tokens, choices, experts", [(1, 8, 100), (100, 8, 100), (3, 1, 1), (7, 3, 60)])
def test_a_few_choices_are_grouped_as_many_are(tokens, choices, experts, dtype, monkeypatch):
    ids = torch.randint(-1, experts + 2, (tokens, choices), generator=torch.Generator().manual_seed(0)).to(dtype)
    few = bi.group_by_expert(ids, experts)
    monkeypatch.setattr(groups, "FEW", 0)
    assert all(torch.equal(a, b) for a, b in zip(few[:3], bi.group_by_expert(ids, experts)[:3], strict=True))
