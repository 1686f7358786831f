"""What no audit asks of folds over tokens and over a vocabulary of many blocks: layouts with gaps, cuts of a sequence,
each kernel of a fold, buffers, and logits that are not finite."""

from functools import cache
from itertools import accumulate

import pytest
import torch
from conftest import assert_same_bits, assert_within

import bi_kernels as bi
from bi_kernels.audit.compare import compare
from bi_kernels.audit.inputs import draw, draw_ids, generator
from bi_kernels.audit.targets.fresh_memory import poisoned_memory
from bi_kernels.contract import DTYPES
from bi_kernels.interpreter import tensor_core
from bi_kernels.ops import embedding as embed
from bi_kernels.ops import lm_head, logprob, vocabulary
from bi_kernels.reference_gradients import gradient
from bi_kernels.tokens import SLAB, TokenLayout, layout_for

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
LENGTHS = (5, 17, 3, 33)
TOKENS, VOCAB, IGNORED, PADDING_ID = sum(LENGTHS), 56, 3, 3
HIDDEN, COLUMNS, HEADS = (40,), (24,), (3, 16)
IDS = ()
MASKED = {"temperature": 0.7, "ignore_index": IGNORED}

# name: (function, {input of every token: its trailing shape}, {parameter: shape}, constants)
CALLS = {
    "linear": (bi.linear, {"x": HIDDEN}, {"weight": (*COLUMNS, *HIDDEN), "bias": COLUMNS}, {}),
    "matmul": (bi.matmul, {"a": HIDDEN}, {"b": (*HIDDEN, *COLUMNS)}, {}),
    "bias_add": (bi.bias_add, {"x": HIDDEN}, {"bias": HIDDEN}, {}),
    "rms_norm": (bi.rms_norm, {"x": HIDDEN}, {"weight": HIDDEN}, {}),
    "qk_norm": (bi.qk_norm, {"x": HEADS}, {"weight": HEADS[1:]}, {}),
    "layer_norm": (bi.layer_norm, {"x": HIDDEN}, {"weight": HIDDEN, "bias": HIDDEN}, {}),
    "layer_norm, heads": (bi.layer_norm, {"x": HEADS}, {"weight": HEADS[1:], "bias": HEADS[1:]}, {"heads": True}),
    "scaled": (bi.scaled, {"x": HIDDEN}, {"weight": HIDDEN}, {}),
    "scaled, heads": (bi.scaled, {"x": HEADS}, {"weight": (HEADS[0], 1)}, {}),
    "scaled, whole": (bi.scaled, {"x": HEADS}, {"weight": ()}, {"features": 2}),
    "shifted": (bi.shifted, {"x": HEADS}, {"weight": (1, *HEADS[1:])}, {"features": 2}),
    "add_rms_norm": (bi.add_rms_norm, {"x": HIDDEN, "residual": HIDDEN}, {"weight": HIDDEN}, {}),
    "embedding": (bi.embedding, {"ids": IDS}, {"weight": (VOCAB, *HIDDEN)}, {"padding_id": PADDING_ID}),
    "lm_head_logprob": (
        bi.lm_head_logprob,
        {"hidden": HIDDEN, "targets": IDS},
        {"weight": (VOCAB, *HIDDEN)},
        MASKED | {"keep_bytes": 20 * 4 * TOKENS},  # of a part of the logits
    ),
}
EVERY_OP = pytest.mark.parametrize("name", CALLS)
ALIKE = "bias_add", "shifted", "scaled, heads", "scaled, whole"  # a sum of few bf16 is exact, and few sums may agree


def numbers(shape: tuple[int, ...], dtype: torch.dtype, kind: str = "normal", seed: object = 0) -> torch.Tensor:
    return draw(kind, shape, dtype, generator("cpu", seed, *shape, dtype, kind))


def arguments(name: str, dtype: torch.dtype, kind: str = "cancelling") -> dict[str, torch.Tensor]:
    _, tokens, parameters, _ = CALLS[name]
    given = {k: numbers((TOKENS, *shape), dtype, kind, k) for k, shape in tokens.items() if shape}
    for k, shape in tokens.items():
        if not shape:
            given[k] = draw_ids("normal", (TOKENS,), VOCAB, generator("cpu", name, k))
            given[k][::7] = IGNORED
    return given | {k: numbers(shape, dtype, "normal", k) for k, shape in parameters.items()}


def trained(t: torch.Tensor, **buffers) -> torch.Tensor:
    t = t.clone().requires_grad_()
    for name, buffer in buffers.items():
        setattr(t, name, buffer)
    return t


def upstream(name: str, dtype: torch.dtype, kind: str = "cancelling") -> list[torch.Tensor]:
    """Of every output; exponents spread over the tokens, else a sum of a few bf16 numbers is exact in any order."""
    function, tokens, *_ = CALLS[name]
    shape = {"linear": COLUMNS, "matmul": COLUMNS, "embedding": HIDDEN}.get(name) or (
        () if "logprob" in name else next(iter(tokens.values()))
    )
    scalar = torch.float32 if "log" in name else dtype
    dy = [
        numbers((TOKENS, *shape), scalar, kind if shape else "normal", f"dy{i}")
        for i in range(1 + (name == "add_rms_norm" or "logprob" in name))
    ]
    exponents = torch.randint(-6, 7, (TOKENS, *[1] * len(shape)), generator=generator("cpu", "exponents"))
    return [t * torch.exp2(exponents.float()).to(t.dtype) if kind == "cancelling" else t for t in dy]


# Layouts: [(number of the token in each place, −1 for padding; what the op is told)]
SAMPLES = [list(range(end - n, end)) for n, end in zip(LENGTHS, accumulate(LENGTHS))]


def packed(*samples, order=None):
    ends = [0, *accumulate(map(len, samples))]
    return torch.tensor(sum(samples, [])), TokenLayout.packed(ends, order)


def padded(*samples, width=33, left=False, order=None):
    rows = [[-1] * (width - len(s)) + s if left else s + [-1] * (width - len(s)) for s in samples]
    return torch.tensor(rows), TokenLayout.padded([len(s) for s in samples], width, left, order)


def scattered(*samples, starts, rows):
    index = torch.full((rows,), -1)
    for start, s in zip(starts, samples):
        index[start : start + len(s)] = torch.tensor(s)
    return index, TokenLayout(starts, [len(s) for s in samples], rows)


A, B, C, D = SAMPLES
PACKED = [packed(A, B, C, D)]
LAYOUTS = {
    "permuted and padded": [padded(D, B, A, C, order=[9, 4, 0, 7])],
    "scattered, with gaps and empty sequences": [scattered(A, [], B, C, [], D, starts=[60, 0, 1, 20, 65, 25], rows=70)],
    "ragged micro-batches": [padded(A, width=7), packed(C, B, order=[5, 2]), padded(D, left=True, width=34)],
}


def gradients(
    name: str, given: dict, dy: list[torch.Tensor], calls: list, main_grad: bool = True
) -> dict[str, torch.Tensor]:
    """What backward() leaves of every input: of tokens in logical order, of parameters in main_grad or in `.grad`.
    Padding holds NaN, and so do fresh memory and padding's dy."""
    function, tokens, _, constants = CALLS[name]
    parameters = {k: trained(t) for k, t in given.items() if k not in tokens}
    for t in parameters.values() if main_grad else ():
        t.main_grad = torch.zeros_like(t, dtype=torch.float32)
    out = {k: torch.zeros_like(given[k]) for k in tokens if given[k].is_floating_point()}
    for at, layout in calls:
        real, rows = at >= 0, at.clamp(min=0)
        inputs = {k: given[k][rows] for k in tokens}
        for t in inputs.values():
            t[~real] = torch.nan if t.is_floating_point() else 7
            t.requires_grad_(t.is_floating_point())
        with poisoned_memory(0xFF):
            with layout:
                y = function(**inputs, **parameters, **constants)
            outgoing = [t[rows].masked_fill(~real.view(*real.shape, *[1] * (t.dim() - 1)), torch.nan) for t in dy]
            torch.autograd.backward(y, outgoing[0] if isinstance(y, torch.Tensor) else outgoing)
        for k in out:
            out[k][at[real]] = inputs[k].grad[real]
    for k, t in parameters.items():
        assert (t.grad is None) == main_grad, f"{k}.grad beside main_grad"
    return out | {k: t.main_grad if main_grad else t.grad for k, t in parameters.items()}


def assert_same_gradients(found: dict, expected: dict, what: str) -> None:
    for k in expected:
        assert_same_bits(found[k], expected[k], f"{what}: d{k}")


@pytest.fixture
def blocks_of_16(monkeypatch):
    """A vocabulary of 56 has four blocks, so that the LM head has logits to keep and to compute again."""
    for module in (vocabulary, lm_head):
        monkeypatch.setattr(module, "BLOCK", 16)
    for module in (vocabulary, logprob):
        monkeypatch.setattr(module, "blocks_of", lambda vocab: {"ROWS": 64, "BLOCK": 16})


# Where the tokens lie, and in which call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@EVERY_OP
def test_gradients_do_not_depend_on_gaps_order_and_padding_of_nan(name, dtype, blocks_of_16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    expected = gradients(name, given, dy, PACKED)
    assert all(t.isfinite().all() and t.any() for t in expected.values())
    for layout, calls in LAYOUTS.items():
        assert_same_gradients(gradients(name, given, dy, calls), expected, layout)
    rounded = {k: t.to(given[k].dtype) for k, t in expected.items()}
    assert_same_gradients(gradients(name, given, dy, LAYOUTS["permuted and padded"], False), rounded, "in .grad")
    # every product is −0, in padding NaN, and a free slot of a slab holds nothing: the fold stays at +0
    given = {k: t.abs() if t.is_floating_point() else t for k, t in given.items()}
    for layout, main_grad in zip(LAYOUTS, (False, True, True)):
        found = gradients(name, given, [torch.full_like(t, -0.0) for t in dy], LAYOUTS[layout], main_grad)
        for k in CALLS[name][2]:
            assert_same_bits(found[k], torch.zeros_like(found[k]), f"of nothing, {layout}: d{k}")


CUTS = {
    "between sequences": [packed(A, B), packed(C, D)],
    "between slabs": [packed(A, B[:16]), packed(B[16:], C, D)],
    "inside a slab": [packed(A, B[:7]), packed(B[7:], C, D)],
}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ALIKE])
def test_main_grad_goes_on_from_where_it_was_unless_a_slab_is_cut(name, dtype=torch.bfloat16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    whole = gradients(name, given, dy, PACKED)
    for where, calls in CUTS.items():
        found = gradients(name, given, dy, calls)
        drifts = [compare(found[k], whole[k]).mismatches for k in CALLS[name][2]]
        assert any(drifts) == (where == "inside a slab" and name != "embedding"), f"{where}: {drifts} mismatches"


def slabs():
    return [s[at : at + SLAB] for s in SAMPLES for at in range(0, len(s), SLAB)]


@EVERY_DTYPE
def test_dw_is_the_tensor_cores_fold_over_slabs_of_16_tokens(dtype):
    given, (dy,) = arguments("linear", dtype), upstream("linear", dtype)
    x, dy32 = given["x"].float().numpy(), dy.float().numpy()
    step = (
        tensor_core.fma_dot
        if dtype == torch.float32
        else (lambda a, b, c: tensor_core.mma(a, b, c, -126 if dtype == torch.bfloat16 else -14))
    )
    weight, bias = torch.full((*COLUMNS, *HIDDEN), 0.5).numpy(), torch.full((*COLUMNS, 1), -0.25).numpy()
    for slab in slabs():
        weight = step(dy32[slab].T, x[slab], weight)
        bias = step(dy32[slab].T, torch.ones(len(slab), 1).numpy(), bias)
    parameters = {k: given[k].clone().requires_grad_() for k in ("weight", "bias")}
    parameters["weight"].main_grad = torch.full_like(given["weight"], 0.5, dtype=torch.float32)
    parameters["bias"].main_grad = torch.full_like(given["bias"], -0.25, dtype=torch.float32)
    with PACKED[0][1]:
        bi.linear(given["x"], **parameters).backward(dy)
    assert_same_bits(parameters["weight"].main_grad, torch.from_numpy(weight), "dW")
    assert_same_bits(parameters["bias"].main_grad, torch.from_numpy(bias[:, 0].copy()), "dbias")


@pytest.mark.parametrize("many", [1, 64, 2**12], ids=lambda many: f"heavy from {2 * many}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_row_of_the_table_is_folded_token_by_token(dtype, many, monkeypatch):
    """Runs of 1, 2, 127, 128 and 150 tokens of an id, whichever of the two kernels folds them."""
    monkeypatch.setattr(embed, "MANY", many)
    runs = {0: 1, 5: 2, 7: 127, 8: 128, 55: 150, PADDING_ID: 20}
    ids = torch.tensor([i for i, n in runs.items() for _ in range(n)])
    ids = ids[torch.randperm(len(ids), generator=generator("cpu", "shuffled"))]
    dy = numbers((len(ids), *HIDDEN), dtype, "wide", "dy")
    dy[ids == PADDING_ID] = torch.nan
    weight = trained(numbers((VOCAB, *HIDDEN), dtype))
    for start in (torch.zeros(VOCAB, *HIDDEN), numbers((VOCAB, *HIDDEN), torch.float32)):
        expected = start.clone()
        for token in (ids != PADDING_ID).nonzero().flatten():
            expected[ids[token]] += dy[token].float()
        weight.main_grad = start if start.any() else None
        bi.embedding(ids, weight, PADDING_ID).backward(dy)
        if weight.main_grad is None:
            assert_same_bits(weight.grad, expected.to(dtype), ".grad")
        else:
            assert_same_bits(weight.main_grad, expected, "on from main_grad")


def test_an_id_beyond_32_bits_reaches_no_row():
    """Nobody checks the ids of a captured graph."""
    dy, ids = torch.ones(2, 40), torch.tensor([2**32 + 3, 3])
    embed.fold_rows(dy, ids, layout_for("embedding", (2,)), None, found := torch.zeros(8, 40), False)
    assert (found[3] == 1).all() and found.sum() == 40


@pytest.mark.parametrize("wrong", [9, -1, 2**40])
def test_a_target_or_id_that_was_written_behind_pytorchs_back_gives_nan_and_no_number(wrong):
    """As in a captured graph, which is replayed with other ids."""
    logits, hidden, weight = (numbers(shape, torch.bfloat16) for shape in ((3, 9), (3, 16), (9, 16)))
    targets = torch.tensor([0, -100, 8])
    calls = (lambda: bi.token_logprob(logits, targets)[0], lambda: bi.lm_head_logprob(hidden, weight, targets)[0])
    assert all(call().isfinite().all() for call in calls)
    ids = targets[[0, 2]]
    right = bi.embedding(ids, weight)
    targets.data[0] = ids.data[0] = wrong
    for call in calls:
        assert call().isnan().tolist() == [True, False, False] and call()[1] == 0
    found = bi.embedding(ids, weight)
    assert found[0].isnan().all() and found[1].equal(right[1])


# A call and its backward


def test_main_grad_is_found_where_saved_tensors_are_moved(dtype=torch.bfloat16):
    for name, (function, tokens, parameters, constants) in CALLS.items():
        given, dy = arguments(name, dtype), upstream(name, dtype)
        expected = gradients(name, given, dy, PACKED)
        leaves = {k: trained(given[k]) if k in parameters else given[k] for k in given}
        for k in parameters:
            leaves[k].main_grad = torch.zeros_like(leaves[k], dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t), PACKED[0][1]:
            y = function(**leaves, **constants)  # as under save_on_cpu
        torch.autograd.backward(y, dy[0] if isinstance(y, torch.Tensor) else dy)
        for k in parameters:
            assert leaves[k].grad is None, f"{name}: d{k} is in .grad, in {leaves[k].grad.dtype}"
            assert_same_bits(leaves[k].main_grad, expected[k], f"{name}: d{k}")


def test_the_layout_belongs_to_the_call_and_not_to_its_backward():
    given, dy = arguments("rms_norm", torch.bfloat16), upstream("rms_norm", torch.bfloat16)
    expected = gradients("rms_norm", given, dy, PACKED)
    outer, inner = TokenLayout.packed([0, TOKENS]), PACKED[0][1]
    leaves = {k: trained(t) for k, t in given.items()}
    leaves["weight"].main_grad = torch.zeros(HIDDEN)
    with outer:
        with inner, inner:
            y = bi.rms_norm(**leaves)
        y.backward(dy[0])
        assert_same_bits(leaves["weight"].main_grad, expected["weight"], "backward under another layout")
        with pytest.raises(ZeroDivisionError), inner:
            1 / 0
        other = bi.rms_norm(leaves["x"], trained(given["weight"]))
    assert compare(torch.autograd.grad(other, [leaves["x"]], dy)[0], leaves["x"].grad).mismatches == 0
    with pytest.raises(ValueError, match="^rms_norm: x has 3 tokens"), outer:
        bi.rms_norm(leaves["x"][:3], leaves["weight"])
    bi.rms_norm(leaves["x"][:3], leaves["weight"])  # and none is left behind


@pytest.mark.parametrize("integer", [torch.int16, torch.uint8])
def test_ids_of_any_integer_dtype_give_the_same_bits(integer, dtype=torch.bfloat16):
    for name, ids in (("embedding", "ids"), ("lm_head_logprob", "targets")):
        given, dy = arguments(name, dtype), upstream(name, dtype)
        found = gradients(name, given | {ids: given[ids].to(integer)}, dy, PACKED)
        assert_same_gradients(found, gradients(name, given, dy, PACKED), f"{name}, {integer}")


@pytest.mark.parametrize("keep_bytes", [0, 20 * 4 * TOKENS, float("inf")])
def test_a_second_backward_of_the_lm_head_finds_its_logits_again(keep_bytes, blocks_of_16, dtype=torch.bfloat16):
    given, dy = arguments("lm_head_logprob", dtype), upstream("lm_head_logprob", dtype)
    leaves = [trained(given[k]) for k in ("hidden", "weight")]
    plain = bi.lm_head_logprob(*leaves, given["targets"], **MASKED)
    y = bi.lm_head_logprob(*leaves, given["targets"], **MASKED, keep_bytes=keep_bytes)
    expected = torch.autograd.grad(plain, leaves, dy)
    for _ in range(2):
        for k, a, b in zip(("hidden", "weight"), torch.autograd.grad(y, leaves, dy, retain_graph=True), expected):
            assert_same_bits(a, b, f"d{k}")
    for a, b in zip(y, plain):
        assert_same_bits(a.detach(), b.detach(), "an output after backward")


# A vocabulary of several blocks, and logits that are not finite

LARGE = 9000


@cache
def large(dtype=torch.bfloat16):
    """hidden, weight, targets, dy of both outputs, and what logprob_and_gradients finds for them."""
    hidden, weight = numbers((17, 24), dtype), numbers((LARGE, 24), dtype, seed="weight")
    targets = torch.randint(0, LARGE, (17,), generator=generator("cpu", "targets"))
    targets[:4] = torch.tensor([0, 4095, 4096, LARGE - 1])
    targets[7] = IGNORED
    dy = [numbers((17,), torch.float32, seed=i) for i in range(2)]
    return hidden, weight, targets, dy, logprob_and_gradients(hidden, weight, targets, dy)


def logprob_and_gradients(hidden, weight, targets, dy, **more):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    y = bi.lm_head_logprob(hidden, weight, targets, **MASKED, **more)
    torch.autograd.backward(y, dy)
    return {"logprob": y[0].detach(), "entropy": y[1].detach(), "hidden": hidden.grad, "weight": weight.main_grad}


def test_how_much_of_a_large_vocabulary_is_computed_at_a_time_changes_no_bit(monkeypatch):
    hidden, weight, targets, dy, expected = large()
    assert len(lm_head._chunks(17, LARGE, 0)) == 1
    monkeypatch.setattr(lm_head, "SCRATCH", 1)
    assert len(lm_head._chunks(17, LARGE, 0)) == 3
    assert_same_gradients(logprob_and_gradients(hidden, weight, targets, dy), expected, "three chunks")
    part = 17 * 5000 * hidden.element_size()
    assert_same_gradients(logprob_and_gradients(hidden, weight, targets, dy, keep_bytes=part), expected, "4096 kept")


def test_a_row_of_a_large_vocabulary_does_not_depend_on_the_number_of_rows():
    hidden, weight, targets, dy, expected = large()
    for rows in (1, 16):
        found = logprob_and_gradients(hidden[:rows], weight, targets[:rows], [t[:rows] for t in dy])
        for k in ("logprob", "entropy", "hidden"):
            assert_same_bits(found[k], expected[k][:rows], f"{k}, {rows} rows")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_lm_head_is_linear_and_token_logprob(dtype):
    hidden, weight, targets, dy, fused = large(dtype)
    logits = bi.linear(hidden, weight).requires_grad_()
    y = bi.token_logprob(logits, targets, **MASKED)
    (dlogits,) = torch.autograd.grad(y, logits, dy)
    for rows in (1, 16):
        part = logits[:rows].detach().requires_grad_()
        (alone,) = torch.autograd.grad(bi.token_logprob(part, targets[:rows], **MASKED), part, [t[:rows] for t in dy])
        assert_same_bits(alone, dlogits[:rows], f"dlogits, {rows} rows")
    assert_same_bits(fused["logprob"], y[0].detach(), "logprob")
    assert_same_bits(fused["entropy"], y[1].detach(), "entropy")
    assert_same_bits(fused["hidden"], bi.linear(dlogits, weight.t()), "dhidden")
    own = numbers(logits.shape, torch.float32, seed="dy")
    (every,) = torch.autograd.grad(bi.log_softmax(logits), logits, own)
    logits = {"logits": logits.detach()}
    for name, given, constants, up, found in (
        ("lm_head_logprob", {"hidden": hidden, "targets": targets, "weight": weight}, MASKED, dy, fused),
        ("token_logprob", logits | {"targets": targets}, MASKED, dy, {"logits": dlogits}),
        ("log_softmax", logits, {}, [own], {"logits": every}),
    ):
        for k, expected in gradient(name, given, constants, up, (17,)).items():
            assert_within(name, found[k], expected, gradient=k, inputs=dtype)


@pytest.mark.parametrize("spoiler", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_in_a_row_of_logits_is_nan_there_and_nowhere_else(spoiler, blocks_of_16):
    logits, targets = numbers((9, VOCAB), torch.bfloat16), torch.arange(9)
    dy = [numbers((9,), torch.float32, seed=i) for i in range(2)]

    def made(logits):
        leaf = logits.clone().requires_grad_()
        y, every = bi.token_logprob(leaf, targets, **MASKED), bi.log_softmax(leaf)
        rows = dy[0][:, None].expand_as(every).contiguous()
        return [
            t.detach() for t in (*y, *torch.autograd.grad(y, leaf, dy), every, *torch.autograd.grad(every, leaf, rows))
        ]

    spoiled = logits.clone()
    if spoiler == -torch.inf:
        spoiled[[IGNORED, 7]] = spoiler  # nothing has a probability
    else:
        spoiled[[IGNORED, 7], [30, 50]] = spoiler
    others = [i for i in range(9) if i not in (IGNORED, 7)]
    for number, (found, expected) in enumerate(zip(made(spoiled), made(logits))):
        assert_same_bits(found[others], expected[others], number)
        assert found[7].isnan().all() and (number > 2 or not found[IGNORED].any()), number
