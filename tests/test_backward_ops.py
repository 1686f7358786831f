"""Gradients of the ops that reduce, as a real backward() leaves them: the bits of the fold over slabs of tokens
wherever the tokens lie and however the step is split, within the contract's bound, and one clear sentence on bad
input."""

from contextlib import nullcontext
from functools import cache, partial
from itertools import accumulate, combinations

import pytest
import torch
from conftest import assert_same_bits
from torch.utils.checkpoint import checkpoint

import bi_kernels as bi
from bi_kernels import contract
from bi_kernels.audit.compare import compare
from bi_kernels.audit.inputs import draw, draw_ids, generator
from bi_kernels.audit.targets.fresh_memory import poisoned_memory
from bi_kernels.contract import DTYPES
from bi_kernels.interpreter import tensor_core
from bi_kernels.ops import embedding as embed
from bi_kernels.ops import lm_head, logprob, norm, vocabulary
from bi_kernels.reference_gradients import gradient
from bi_kernels.tokens import SLAB, TokenLayout, layout_for

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
LENGTHS = (5, 17, 3, 33)
TOKENS, VOCAB, IGNORED, PADDING_ID = sum(LENGTHS), 56, 3, 3
HIDDEN, COLUMNS, HEADS = (40,), (24,), (3, 16)
IDS = ()
MASKED = {"temperature": 0.7, "ignore_index": IGNORED}
LM_HEAD = (bi.lm_head_logprob, {"hidden": HIDDEN, "targets": IDS}, {"weight": (VOCAB, *HIDDEN)})

# name: (function, {input of every token: its trailing shape}, {parameter: shape}, constants)
CALLS = {
    "linear": (bi.linear, {"x": HIDDEN}, {"weight": (*COLUMNS, *HIDDEN), "bias": COLUMNS}, {}),
    "matmul": (bi.matmul, {"a": HIDDEN}, {"b": (*HIDDEN, *COLUMNS)}, {}),
    "rms_norm": (bi.rms_norm, {"x": HIDDEN}, {"weight": HIDDEN}, {}),
    "qk_norm": (bi.qk_norm, {"x": HEADS}, {"weight": HEADS[1:]}, {}),
    "add_rms_norm": (bi.add_rms_norm, {"x": HIDDEN, "residual": HIDDEN}, {"weight": HIDDEN}, {}),
    "embedding": (bi.embedding, {"ids": IDS}, {"weight": (VOCAB, *HIDDEN)}, {"padding_id": PADDING_ID}),
    "token_logprob": (bi.token_logprob, {"logits": (VOCAB,), "targets": IDS}, {}, MASKED),
    "log_softmax": (bi.log_softmax, {"logits": (VOCAB,)}, {}, {}),
    "lm_head_logprob": (*LM_HEAD, MASKED),
    "lm_head_logprob, part kept": (*LM_HEAD, MASKED | {"keep_bytes": 20 * 4 * TOKENS}),
    "lm_head_logprob, all kept": (*LM_HEAD, MASKED | {"keep_bytes": float("inf")}),
}
EVERY_OP = pytest.mark.parametrize("name", CALLS)
UNKEPT = [name for name in CALLS if "kept" not in name]
EITHER_KEPT = [name for name in CALLS if name not in ("lm_head_logprob", "lm_head_logprob, all kept")]
WITH_PARAMETERS = [name for name in UNKEPT if CALLS[name][2]]


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
    shape = {"linear": COLUMNS, "matmul": COLUMNS, "embedding": HIDDEN, "log_softmax": (VOCAB,)}.get(name) or (
        () if "logprob" in name else next(iter(tokens.values()))
    )
    scalar = torch.float32 if "log" in name else dtype
    dy = [
        numbers((TOKENS, *shape), scalar, kind if shape else "normal", f"dy{i}")
        for i in range(1 + (name == "add_rms_norm" or "logprob" in name))
    ]
    exponents = torch.randint(-6, 7, (TOKENS, *[1] * len(shape)), generator=generator("cpu", "exponents"))
    return [t * torch.exp2(exponents.float()).to(t.dtype) if kind == "cancelling" else t for t in dy]


# Layouts: name: [(number of the token in each place, −1 for padding; what the op is told)]
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
PERMUTED = [packed(C, A, D, B, order=[2, 0, 3, 1])]
LAYOUTS = {
    "each alone, told or not": [
        packed(A),
        (torch.tensor([B]), nullcontext()),
        packed(C),
        (torch.tensor([D]), nullcontext()),
    ],
    "right-padded": [padded(A, B, C, D)],
    "left-padded to 48": [padded(A, B, C, D, width=48, left=True)],
    "permuted": PERMUTED,
    "permuted and padded": [padded(D, B, A, C, order=[9, 4, 0, 7])],
    "scattered, with gaps and empty sequences": [scattered(A, [], B, C, [], D, starts=[60, 0, 1, 20, 65, 25], rows=70)],
    "ragged micro-batches": [padded(A, width=7), packed(C, B, order=[5, 2]), padded(D, left=True, width=34)],
}


def gradients(
    name: str, given: dict, dy: list[torch.Tensor], calls: list, main_grad: bool = True, wanted: tuple[str, ...] = ()
) -> dict[str, torch.Tensor | None]:
    """What backward() leaves of every input, or of those wanted: of tokens in logical order, of parameters in
    main_grad, which holds 3 where it is not wanted, or in `.grad`. Padding holds NaN, and so do fresh memory and
    padding's dy."""
    function, tokens, _, constants = CALLS[name]
    trains = lambda k: given[k].is_floating_point() and (not wanted or k in wanted)
    parameters = {k: t.clone().requires_grad_(trains(k)) for k, t in given.items() if k not in tokens}
    for k, t in parameters.items():
        if main_grad:
            t.main_grad = torch.full_like(t, 0.0 if trains(k) else 3.0, dtype=torch.float32)
    out = {k: torch.zeros_like(given[k]) if trains(k) else None for k in tokens if given[k].is_floating_point()}
    for at, layout in calls:
        real, rows = at >= 0, at.clamp(min=0)
        inputs = {}
        for k in tokens:
            inputs[k] = given[k][rows]
            inputs[k][~real] = torch.nan if inputs[k].is_floating_point() else 7
            inputs[k].requires_grad_(trains(k))
        with poisoned_memory(0xFF):
            with layout:
                y = function(**inputs, **parameters, **constants)
            outgoing = [t[rows] for t in dy]
            for t in outgoing:
                t[~real] = torch.nan
            torch.autograd.backward(y, outgoing[0] if isinstance(y, torch.Tensor) else outgoing)
        for k in out:
            if trains(k):
                out[k][at[real]] = inputs[k].grad[real]
            else:
                assert inputs[k].grad is None
    for k, t in parameters.items():
        assert (t.grad is None) == (main_grad or not trains(k)), f"{k}.grad beside main_grad, or where none is wanted"
        out[k] = t.main_grad if main_grad else t.grad
    return out


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


@EVERY_DTYPE
@pytest.mark.parametrize("name", EITHER_KEPT)
def test_gradients_do_not_depend_on_the_layout_or_the_split(name, dtype, blocks_of_16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    expected = gradients(name, given, dy, PACKED)
    assert all(t.isfinite().all() and t.any() for t in expected.values())
    for layout, calls in LAYOUTS.items():
        assert_same_gradients(gradients(name, given, dy, calls), expected, layout)
    for k, t in expected.items():
        assert t.dtype == (torch.float32 if k in CALLS[name][2] else dtype)


@EVERY_DTYPE
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_without_main_grad_the_fold_is_rounded_once_to_the_dtype_of_the_parameter(name, dtype, blocks_of_16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    expected = {k: t.to(given[k].dtype) for k, t in gradients(name, given, dy, PACKED).items()}
    for layout in (PACKED, LAYOUTS["right-padded"], LAYOUTS["left-padded to 48"], PERMUTED):
        assert_same_gradients(gradients(name, given, dy, layout, main_grad=False), expected, str(layout[0][0].shape))


@EVERY_DTYPE
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_the_order_of_the_sequences_is_the_order_of_the_fold(name, dtype):
    """So these inputs would show another order: a control of the tests above."""
    given, dy = arguments(name, dtype), upstream(name, dtype)
    expected = gradients(name, given, dy, PACKED)
    found = gradients(name, given, dy, [packed(C, A, D, B)])
    for k in found:
        assert bool(compare(found[k], expected[k]).mismatches) == (k in CALLS[name][2]), k


def test_the_lm_head_is_the_same_whatever_is_kept(blocks_of_16):
    given, dy = arguments("lm_head_logprob", torch.bfloat16), upstream("lm_head_logprob", torch.bfloat16)
    expected = gradients("lm_head_logprob", given, dy, PACKED)
    for name in CALLS:
        if name.startswith("lm_head_logprob,"):
            assert_same_gradients(gradients(name, given, dy, PACKED), expected, name)


# What the fold is

CUTS = {
    "between sequences": [packed(A, B), packed(C, D)],
    "between slabs": [packed(A, B[:16]), packed(B[16:], C, D)],
    "inside a slab": [packed(A, B[:7]), packed(B[7:], C, D)],
}


@pytest.mark.parametrize("name", WITH_PARAMETERS)
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
@EVERY_DTYPE
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


@pytest.mark.parametrize("count", [1, 63, 127, 128, 200])
def test_one_id_everywhere(count):
    dy, weight = (
        numbers((count, *HIDDEN), torch.bfloat16, "wide", "dy"),
        torch.zeros(VOCAB, *HIDDEN, dtype=torch.bfloat16),
    )
    weight.requires_grad_().main_grad = torch.zeros(VOCAB, *HIDDEN)
    bi.embedding(torch.full((count,), 9), weight).backward(dy)
    assert_same_bits(weight.main_grad[9], sum(dy.float(), torch.zeros(HIDDEN)))
    assert not weight.main_grad[[i for i in range(VOCAB) if i != 9]].any()


def test_an_id_that_nobody_has_checked_gives_nan_and_not_a_strangers_row(monkeypatch):
    """As in a captured graph, which is replayed with other ids."""
    monkeypatch.setattr(embed, "needs_validation", lambda question, ids: False)
    weight = torch.randn(VOCAB, 20, generator=torch.Generator().manual_seed(0))
    y = bi.embedding(torch.tensor([0, VOCAB, -1, VOCAB - 1]), weight)
    assert y[1:3].isnan().all()
    assert_same_bits(y[[0, 3]], weight[[0, -1]])


def test_the_embedding_of_a_tied_table_has_a_buffer_of_its_own():
    given, dy = arguments("embedding", torch.bfloat16), upstream("embedding", torch.bfloat16)
    weight = trained(given["weight"])
    weight.main_grad, weight.embedding_main_grad = torch.full((VOCAB, *HIDDEN), 3.0), torch.zeros(VOCAB, *HIDDEN)
    with PACKED[0][1]:
        bi.embedding(given["ids"], weight, PADDING_ID).backward(dy[0])
    assert_same_bits(weight.embedding_main_grad, gradients("embedding", given, dy, PACKED)["weight"])
    assert weight.grad is None and bool((weight.main_grad == 3).all())


# Accuracy


def assert_within(name: str, given: dict, dy: list[torch.Tensor], lengths: tuple[int, ...], found: dict) -> None:
    op = CALLS[name][0].__name__
    row = "rms_norm" if op == "qk_norm" else "linear" if op == "matmul" else op
    constants = {k: v for k, v in CALLS[name][3].items() if k != "keep_bytes"}
    for k, expected in gradient(op, given, constants, dy, lengths).items():
        y, exact = found[k], expected.exact
        assert y.shape == exact.shape
        limit = contract.bound(row, y.dtype, *expected, gradient=k, inputs=given[k].dtype)
        beyond = (exact.abs() + limit >= torch.finfo(y.dtype).max) & (y == exact.sign() * torch.inf)
        wrong = (~((y.double() - exact).abs() <= limit) & ~beyond).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            share = (y[at].double() - exact[at]).abs() / limit[at]
            raise AssertionError(
                f"{name} d{k} {y.dtype}: {len(wrong)} of {y.numel()} exceed the bound, first at {at}: "
                f"{y[at]} instead of {exact[at]}, {share:.3g} × the bound"
            )


@EVERY_DTYPE
@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling", "signed_zeros", "subnormal"])
@pytest.mark.parametrize("name", UNKEPT)
def test_gradients_are_within_the_bound(name, kind, dtype):
    given, dy = arguments(name, dtype, kind), upstream(name, dtype, kind)
    assert_within(name, given, dy, LENGTHS, gradients(name, given, dy, PACKED))


# Padding, zeros, and what is not asked for


@EVERY_DTYPE
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_a_gradient_of_nothing_is_plus_zero(name, dtype):
    """Every product is −0, in padding it is NaN, and a free slot of a slab holds nothing: the fold stays at +0."""
    given, dy = arguments(name, dtype, "normal"), upstream(name, dtype, "normal")
    given = {k: t.abs() if t.is_floating_point() else t for k, t in given.items()}
    negative = [torch.full_like(t, -0.0) for t in dy]
    for layout, main_grad in (
        ("scattered, with gaps and empty sequences", True),
        ("ragged micro-batches", True),
        ("left-padded to 48", False),
    ):
        found = gradients(name, given, negative, LAYOUTS[layout], main_grad)
        for k in CALLS[name][2]:
            assert_same_bits(found[k], torch.zeros_like(found[k]), f"{layout}: d{k}")


@EVERY_OP
def test_only_the_gradients_asked_for_are_computed_and_have_the_same_bits(name, blocks_of_16, dtype=torch.bfloat16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    every = [k for k in given if given[k].is_floating_point()]
    expected = gradients(name, given, dy, PACKED)
    for wanted in (c for n in range(1, len(every)) for c in combinations(every, n)):
        found = gradients(name, given, dy, PACKED, wanted=wanted)
        assert_same_gradients(found, {k: expected[k] for k in wanted}, f"{wanted} alone")
        for k in set(CALLS[name][2]) - set(wanted):
            assert bool((found[k] == 3).all()), f"main_grad of {k}, which is frozen"


@pytest.mark.parametrize("name", ["token_logprob", *[name for name in CALLS if name.startswith("lm_head")]])
def test_the_logprob_alone_or_the_entropy_alone_may_be_trained_on(name, blocks_of_16, dtype=torch.bfloat16):
    given, dy = arguments(name, dtype, "normal"), upstream(name, dtype, "normal")
    for only in (0, 1):
        leaves = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in given.items()}
        with PACKED[0][1]:
            CALLS[name][0](**leaves, **CALLS[name][3])[only].backward(dy[only])
        one = [g if i == only else torch.zeros_like(g) for i, g in enumerate(dy)]
        for k, expected in gradients(name, given, one, PACKED, main_grad=False).items():
            assert_same_bits(leaves[k].grad, expected, f"output {only}: d{k}")


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("lm_head")])
def test_a_second_backward_of_the_lm_head_finds_its_logits_again(name, blocks_of_16, dtype=torch.bfloat16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    leaves = [given[k].clone().requires_grad_() for k in ("hidden", "weight")]
    y = bi.lm_head_logprob(*leaves, given["targets"], **CALLS[name][3])
    before = [t.detach().clone() for t in y]
    first, second = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    for a, b, k in zip(first, second, ("hidden", "weight")):
        assert_same_bits(b, a, f"d{k}, the second time")
    for a, b in zip(y, before):
        assert_same_bits(a, b, "an output after backward")


def moved(call, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):  # as save_on_cpu does
        return call(x)


@pytest.mark.parametrize("way", [moved, partial(checkpoint, use_reentrant=False)], ids=["moved", "checkpoint"])
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_main_grad_is_found_where_saved_tensors_are_moved_or_computed_again(name, way, dtype=torch.bfloat16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    expected = gradients(name, given, dy, PACKED)
    first, *others = given
    leaves = {k: trained(given[k]) if k in CALLS[name][2] else given[k] for k in others}
    for k in CALLS[name][2]:
        leaves[k].main_grad = torch.zeros_like(leaves[k], dtype=torch.float32)
    given[first].requires_grad_(given[first].is_floating_point())
    with PACKED[0][1]:
        y = way(lambda x: CALLS[name][0](**{first: x}, **leaves, **CALLS[name][3]), given[first])
    torch.autograd.backward(y, dy[0] if isinstance(y, torch.Tensor) else dy)
    for k in CALLS[name][2]:
        assert leaves[k].grad is None, f"{k}: the gradient is in .grad, in {leaves[k].grad.dtype}"
        assert_same_bits(leaves[k].main_grad, expected[k], k)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["linear", "rms_norm"])
def test_what_is_computed_again_in_the_backward_has_its_layout(name, reentrant, dtype=torch.bfloat16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    expected = gradients(name, given, dy, PACKED)
    weight, layout, x = trained(given["weight"]), PACKED[0][1], given["x"].clone().requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    call = lambda x: CALLS[name][0](x, weight, *([given["bias"]] if "bias" in given else []))
    y = checkpoint(layout.within(call), x, use_reentrant=reentrant)
    with TokenLayout.packed([0, 7]):  # that of the next micro-batch
        y.backward(dy[0])
    assert_same_bits(weight.main_grad, expected["weight"], "weight")
    with layout:
        y = checkpoint(call, x, use_reentrant=reentrant)
    if reentrant:  # else PyTorch calls it again in the context of its forward
        with pytest.raises(ValueError, match=f"^{name}: called inside a backward.*layout.within"):
            y.backward(dy[0])


@pytest.mark.parametrize("name", ["linear", "rms_norm", "lm_head_logprob"])
def test_a_parameter_that_does_not_train_asks_for_no_layout(name, dtype=torch.bfloat16):
    given = arguments(name, dtype)
    some = {k: t[:3] if k in CALLS[name][1] else t for k, t in given.items()}
    some[next(iter(some))].requires_grad_()
    with PACKED[0][1]:
        CALLS[name][0](**some, **CALLS[name][3])
        with pytest.raises(ValueError, match=rf"^{name}: \w+ has 3 tokens"):
            CALLS[name][0](**some | {"weight": trained(given["weight"])}, **CALLS[name][3])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_gradients_of_a_compiled_function_are_those_of_eager_mode(name, backend, dtype=torch.bfloat16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    torch._dynamo.reset()
    call = CALLS[name][0]
    expected = gradients(name, given, dy, PACKED)
    leaves = {k: trained(t) if t.is_floating_point() else t for k, t in given.items()}
    for k in CALLS[name][2]:
        leaves[k].main_grad = torch.zeros_like(leaves[k], dtype=torch.float32)
    compiled = torch.compile(lambda given: call(**given, **CALLS[name][3]), backend=backend, fullgraph=True)
    with packed(A, B, C, D)[1]:  # which nobody else keeps until the backward
        y = compiled(leaves)
    torch.autograd.backward(y, dy[0] if isinstance(y, torch.Tensor) else dy)
    for k, t in leaves.items():
        if t.is_floating_point():
            assert_same_bits(t.main_grad if k in CALLS[name][2] else t.grad, expected[k], k)


def test_masters_get_every_gradient_whatever_the_loop_looks_like():
    x, dy = numbers((8, *HIDDEN), torch.bfloat16), numbers((8, 12), torch.bfloat16)
    for zeroed in (
        lambda optimizer: None,
        lambda optimizer: optimizer.zero_grad(),
        lambda optimizer: optimizer.zero_grad(False),
    ):
        weight = trained(numbers((*COLUMNS, *HIDDEN), torch.bfloat16))
        before, grads = weight.detach().clone(), bi.MainGrads([weight])
        optimizer = torch.optim.SGD(grads.masters, lr=1.0)
        for _ in range(2):
            zeroed(optimizer)
            bi.linear(x, weight[:12]).backward(dy)  # a view: its gradient is in .grad
            bi.linear(x, weight)[:, 12:].backward(dy)
            grads.join()
            assert weight.grad is None and grads.masters[0].grad is weight.main_grad and weight.main_grad.all()
            optimizer.step()
            grads.finish()
        assert (weight != before).float().mean() > 0.9


@pytest.mark.parametrize("integer", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("name", ["embedding", "token_logprob", "lm_head_logprob"])
def test_ids_of_any_integer_dtype_give_the_same_bits(name, integer, dtype=torch.bfloat16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    ids = "ids" if name == "embedding" else "targets"
    found = gradients(name, given | {ids: given[ids].to(integer)}, dy, LAYOUTS["right-padded"])
    assert_same_gradients(found, gradients(name, given, dy, PACKED), integer)


@pytest.mark.parametrize("name", [name for name in UNKEPT if name != "matmul"])
def test_one_token_without_a_batch_is_a_batch_of_one(name, dtype=torch.bfloat16):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    found, expected = (gradients(name, given, dy, [(torch.tensor(at), nullcontext())]) for at in (1, [1]))
    assert_same_gradients(found, expected, "()")
    assert all(t.any() for t in found.values())


@EVERY_OP
def test_a_second_derivative_is_refused(name):
    given = {k: t.requires_grad_(t.is_floating_point()) for k, t in arguments(name, torch.float32).items()}
    dy = [t.requires_grad_() for t in upstream(name, torch.float32)]
    y = CALLS[name][0](**given, **CALLS[name][3])
    found = torch.autograd.grad(y, [t for t in given.values() if t.requires_grad], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable") as caught:
        found[0].sum().backward()
    assert "\n" not in str(caught.value)


VIEWS = {
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else torch.stack((t, t), -1)[:, 0],
    "rows apart": lambda t: torch.cat((t, t[..., :3]), -1)[..., :-3],
    "misaligned": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
}


@pytest.mark.parametrize("name", UNKEPT)
def test_a_view_gives_the_bits_of_its_copy(name, dtype=torch.bfloat16):
    def found(given, dy):
        leaves = {k: t.detach().requires_grad_(t.is_floating_point()) for k, t in given.items()}
        with LAYOUTS["scattered, with gaps and empty sequences"][0][1]:
            y = CALLS[name][0](**leaves, **CALLS[name][3])
        wanted = {k: t for k, t in leaves.items() if t.requires_grad}
        y = [y] if isinstance(y, torch.Tensor) else y
        return dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy)))

    apart = torch.arange(70) % TOKENS
    given = {k: t[apart] if k in CALLS[name][1] else t for k, t in arguments(name, dtype).items()}
    dy = [t[apart] for t in upstream(name, dtype)]
    expected = found(given, dy)
    for what, view in VIEWS.items():
        assert_same_gradients(found(given, [view(t) for t in dy]), expected, f"dy {what}")
        for k in given:
            assert_same_gradients(found(given | {k: view(given[k])}, dy), expected, f"{k} {what}")
    expanded = [t[:1].expand_as(t) for t in dy]  # as the backward of a sum gives it
    assert_same_gradients(found(given, expanded), found(given, [t.contiguous() for t in expanded]), "dy expanded")


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
    given = {"hidden": hidden, "targets": targets, "weight": weight}
    assert_within("lm_head_logprob", given, dy, (17,), fused)
    assert_within("token_logprob", {"logits": logits.detach(), "targets": targets}, dy, (17,), {"logits": dlogits})
    own = numbers(logits.shape, torch.float32, seed="dy")
    (found,) = torch.autograd.grad(bi.log_softmax(logits), logits, own)
    assert_within("log_softmax", {"logits": logits.detach()}, [own], (17,), {"logits": found})


def selected(logits, targets, dy):
    """logprob, entropy and dlogits of token_logprob, y and dlogits of log_softmax."""
    leaf = logits.clone().requires_grad_()
    y = bi.token_logprob(leaf, targets, **MASKED)
    every = bi.log_softmax(leaf)
    return [
        *(t.detach() for t in y),
        *torch.autograd.grad(y, leaf, dy),
        every.detach(),
        *torch.autograd.grad(every, leaf, dy[0][:, None].expand_as(every).contiguous()),
    ]


@EVERY_DTYPE
@pytest.mark.parametrize("spoiler", [torch.nan, torch.inf])
def test_nan_or_infinity_in_a_row_of_logits_is_nan_there_and_nowhere_else(spoiler, dtype, blocks_of_16):
    given, dy = arguments("token_logprob", dtype, "normal"), upstream("token_logprob", dtype)
    given["targets"][4], given["targets"][9] = IGNORED, 20
    logits = given["logits"].clone()
    logits[[4, 9], [30, 50]] = spoiler
    logits[11] = -torch.inf
    expected = selected(given["logits"], given["targets"], dy)
    found = selected(logits, given["targets"], dy)
    clean = torch.tensor([i for i in range(TOKENS) if i not in (4, 9, 11)])
    for what, y, x in zip(("logprob", "entropy", "dlogits", "log_softmax", "its dlogits"), found, expected):
        assert_same_bits(y[clean], x[clean], what)
        assert y[9].isnan().all() and (given["targets"][11] == IGNORED or y[11].isnan().all()), what
        assert "log_softmax" in what or "its" in what or not y[4].any(), f"{what} of an ignored token"


@EVERY_DTYPE
def test_a_logit_of_minus_infinity_is_a_probability_of_zero(dtype, blocks_of_16):
    """A masked vocabulary, whole blocks of it too: the bits of a very negative logit, and no gradient for it."""
    given, dy = arguments("token_logprob", dtype, "normal"), upstream("token_logprob", dtype, "normal")
    masked = (torch.arange(VOCAB) % 5 == 0) | (torch.arange(VOCAB) < 18)
    targets = torch.where(masked[given["targets"]], 19, given["targets"])
    found, expected = (
        selected(given["logits"].masked_fill(masked, value), targets, dy) for value in (-torch.inf, -6e4)
    )
    for what, y, x in zip(("logprob", "entropy", "dlogits"), found, expected):
        assert_same_bits(y, x, what) if y.dim() == 1 else assert_same_bits(y[:, ~masked], x[:, ~masked], what)
    assert found[0].isfinite().all() and not found[2][:, masked].any()
    assert bool((found[3][:, masked] == -torch.inf).all()) and found[4][:, ~masked].isfinite().all()


# Bad input: one sentence that names the op, the argument, its value and what is allowed

X, W, BIAS, NORM = (
    numbers((5, 32), torch.bfloat16),
    numbers((24, 32), torch.bfloat16),
    numbers((24,), torch.bfloat16),
    (numbers((32,), torch.bfloat16)),
)
T = torch.tensor([1, 0, 23, 7, 7])


def put(t: torch.Tensor, at: int, value: float) -> torch.Tensor:
    t = t.clone()
    t[at] = value
    return t


def within(layout: TokenLayout, call):
    with layout:
        return call()


NAMED = {  # op: (call, its parameter, the parameter's name)
    "linear": (lambda w: bi.linear(X, w), W, "weight"),
    "linear bias": (lambda b: bi.linear(X, W, b), BIAS, "bias"),
    "matmul": (lambda b: bi.matmul(X, b), W.t().contiguous(), "b"),
    "rms_norm": (lambda w: bi.rms_norm(X, w), NORM, "weight"),
    "qk_norm": (lambda w: bi.qk_norm(X[:, None], w), NORM, "weight"),
    "add_rms_norm": (lambda w: bi.add_rms_norm(X, X, w), NORM, "weight"),
    "embedding": (lambda w: bi.embedding(T, w), W, "weight"),
    "lm_head_logprob": (lambda w: bi.lm_head_logprob(X, w, T), W, "weight"),
}
LOGPROBS = {
    "token_logprob": lambda targets, **more: bi.token_logprob(bi.linear(X, W), targets, **more),
    "lm_head_logprob": lambda targets, **more: bi.lm_head_logprob(X, W, targets, **more),
}
LAYOUT = "TokenLayout: "

BAD_INPUT = [
    (lambda: bi.embedding(put(T, 2, 24), W), ValueError, "embedding: ids holds 24 at flat index 2 … 0 to 23"),
    (
        lambda: bi.embedding(put(T, 3, -1).reshape(1, 5), W),
        ValueError,
        "embedding: ids holds -1 at flat index 3 … 0 to 23",
    ),
    (lambda: bi.embedding(T.float(), W), TypeError, "embedding: ids has dtype torch.float32 … integers"),
    (lambda: bi.embedding(T > 3, W), TypeError, "embedding: ids has dtype torch.bool … integers"),
    (lambda: bi.embedding([1, 2], W), TypeError, "embedding: ids is a list … torch.Tensor"),
    (lambda: bi.embedding(T, NORM), ValueError, "embedding: weight has shape (32,) … (vocab, hidden)"),
    (
        lambda: bi.embedding(T, W.double()),
        TypeError,
        "embedding: weight has dtype float64 … supported are bf16, fp16, fp32",
    ),
    (lambda: bi.embedding(T, W, 24), ValueError, "embedding: padding_id is 24 … None or 0 to 23"),
    (lambda: bi.embedding(T, W, padding_id=-1), ValueError, "embedding: padding_id is -1 … None or 0 to 23"),
    (lambda: bi.embedding(T, W.to("meta")), ValueError, "embedding: weight is on meta … supported are cuda, and cpu"),
    *[
        row
        for name, call in LOGPROBS.items()
        for row in (
            (
                lambda call=call: call(put(T, 1, 24)),
                ValueError,
                f"{name}: targets holds 24 at flat index 1 … 0 to 23 or -100",
            ),
            (
                lambda call=call: call(put(T, 4, -2), ignore_index=-1),
                ValueError,
                f"{name}: targets holds -2 at flat index 4 … 0 to 23 or -1",
            ),
            (lambda call=call: call(T.float()), TypeError, f"{name}: targets has dtype torch.float32 … integers"),
            (lambda call=call: call(T[:3]), ValueError, f"{name}: targets has shape (3,) … (5,)"),
            (lambda call=call: call(T.to("meta")), ValueError, f"{name}: targets is on meta … cpu … one device"),
            *[
                (
                    lambda call=call, t=t: call(T, temperature=t),
                    (TypeError, ValueError),
                    f"{name}: temperature is {t!r} … number",
                )
                for t in (0, 0.0, -1.0, float("nan"), "1", None)
            ],
        )
    ],
    (
        lambda: bi.token_logprob(torch.zeros(0, 8), T[:0]),
        ValueError,
        "token_logprob: targets has shape (0,) … at least one token",
    ),
    (lambda: bi.token_logprob(torch.zeros(5, 0), T), ValueError, "token_logprob: logits has shape (5, 0) … (..., V)"),
    (lambda: bi.log_softmax(torch.zeros(5, 0)), ValueError, "log_softmax: logits has shape (5, 0) … (..., V)"),
    (lambda: bi.log_softmax(torch.tensor(1.0)), ValueError, "log_softmax: logits has shape () … (..., V)"),
    (
        lambda: bi.log_softmax(X.double()),
        TypeError,
        "log_softmax: logits has dtype float64 … supported are bf16, fp16, fp32",
    ),
    (
        lambda: bi.lm_head_logprob(X[:0], W, T[:0]),
        ValueError,
        "lm_head_logprob: targets has shape (0,) … at least one token",
    ),
    (
        lambda: bi.lm_head_logprob(X, W.t(), T),
        ValueError,
        "lm_head_logprob: hidden has shape (5, 32) … (32, 24) … (..., H) and (V, H)",
    ),
    (lambda: bi.lm_head_logprob(X, NORM, T), ValueError, "lm_head_logprob: hidden has shape (5, 32) … (32,) … (V, H)"),
    (
        lambda: bi.lm_head_logprob(X, W.half(), T),
        TypeError,
        "lm_head_logprob: weight has dtype torch.float16 … hidden has torch.bfloat16 … equal",
    ),
    (
        lambda: bi.lm_head_logprob(X, W.to("meta"), T),
        ValueError,
        "lm_head_logprob: weight is on meta … cpu … one device",
    ),
    (lambda: bi.lm_head_logprob(X, W, T, keep_bytes=-1), ValueError, "lm_head_logprob: keep_bytes is -1 … at least 0"),
    (
        lambda: bi.lm_head_logprob(X, W, T, keep_bytes=float("nan")),
        ValueError,
        "lm_head_logprob: keep_bytes is nan … at least 0",
    ),
    (
        lambda: bi.lm_head_logprob(X, W, T, keep_bytes="1 GB"),
        TypeError,
        "lm_head_logprob: keep_bytes is '1 GB' … number",
    ),
    (lambda: bi.rms_norm(X, NORM, "1e-6"), TypeError, "rms_norm: eps is '1e-6' … number"),
    (lambda: bi.add_rms_norm(X, X, NORM, eps=None), TypeError, "add_rms_norm: eps is None … number"),
    (lambda: bi.rms_norm(X, NORM[:8]), ValueError, "rms_norm: weight has shape (8,) … (32,)"),
    (lambda: bi.rms_norm(X, W), ValueError, "rms_norm: weight has shape (24, 32) … (32,)"),
    (lambda: bi.qk_norm(NORM, NORM), ValueError, "qk_norm: x has shape (32,) … (..., heads, head_dim)"),
    (
        lambda: bi.rms_norm(X[:, :0], NORM[:0]),
        ValueError,
        f"rms_norm: the last dimension of x is 0 … 1 to {norm.WIDEST}",
    ),
    (
        lambda: bi.rms_norm(torch.zeros(1, norm.WIDEST + 1), torch.zeros(norm.WIDEST + 1)),
        ValueError,
        f"rms_norm: the last dimension of x is {norm.WIDEST + 1} … 1 to {norm.WIDEST}",
    ),
    (lambda: bi.add_rms_norm(X, X[:2], NORM), ValueError, "add_rms_norm: residual has shape (2, 32) … (5, 32)"),
    (
        lambda: bi.add_rms_norm(X, X.float(), NORM),
        TypeError,
        "add_rms_norm: residual has dtype torch.float32 … x has torch.bfloat16",
    ),
    (lambda: bi.add_rms_norm(X, X.to("meta"), NORM), ValueError, "add_rms_norm: residual is on meta … cpu"),
    (lambda: bi.rms_norm(X, NORM.to("meta")), ValueError, "rms_norm: weight is on meta … cpu"),
    *[
        row
        for name, (call, parameter, argument) in NAMED.items()
        for row in (
            (
                lambda call=call, p=parameter: call(trained(p, main_grad=torch.zeros_like(p))),
                TypeError,
                f"{name.split()[0]}: {argument}.main_grad has dtype torch.bfloat16 … torch.float32",
            ),
            (
                lambda call=call, p=parameter: call(trained(p, main_grad=[0.0])),
                TypeError,
                f"{name.split()[0]}: {argument}.main_grad has type list … torch.float32",
            ),
            (
                lambda call=call, p=parameter: call(trained(p, main_grad=torch.zeros(3))),
                ValueError,
                f"{argument}.main_grad has shape (3,) on cpu … {tuple(parameter.shape)} on cpu as {argument}",
            ),
            (
                lambda call=call, p=parameter: call(trained(p, main_grad=torch.zeros(p.shape, device="meta"))),
                ValueError,
                f"{name.split()[0]}: {argument}.main_grad … on meta … on cpu",
            ),
            (
                lambda call=call, p=parameter: call(trained(p, main_grad=torch.zeros(*p.shape, 2)[..., 0])),
                ValueError,
                f"{name.split()[0]}: {argument}.main_grad … contiguous",
            ),
        )
    ],
    (
        lambda: bi.embedding(T, trained(W, embedding_main_grad=torch.zeros_like(W))),
        TypeError,
        "embedding: weight.embedding_main_grad has dtype torch.bfloat16 … torch.float32",
    ),
    *[
        (
            lambda call=call, p=parameter: within(TokenLayout.packed([0, 2, 6]), lambda: call(trained(p))),
            ValueError,
            f"{name.split()[0]}:  …  has 5 tokens … 6 rows",
        )
        for name, (call, parameter, _) in NAMED.items()
    ],
    (
        lambda: TokenLayout.packed(torch.tensor([0, 4, 2])),
        ValueError,
        f"{LAYOUT}cu_seqlens is [0, 4, 2] … start at 0, never decrease",
    ),
    (lambda: TokenLayout.packed([1, 4]), ValueError, f"{LAYOUT}cu_seqlens is [1, 4] … start at 0"),
    (lambda: TokenLayout.packed([]), ValueError, f"{LAYOUT}cu_seqlens is [] … start at 0"),
    (lambda: TokenLayout.packed([0]), ValueError, f"{LAYOUT}cu_seqlens is [0] … never decrease, and end"),
    (
        lambda: TokenLayout.packed(torch.tensor([0.0, 4.0])),
        ValueError,
        f"{LAYOUT}cu_seqlens has shape (2,) … torch.float32 … integers",
    ),
    (
        lambda: TokenLayout.packed(torch.tensor([[0, 4]])),
        ValueError,
        f"{LAYOUT}cu_seqlens has shape (1, 2) … one dimension",
    ),
    (
        lambda: TokenLayout([0, 3], [4, 2], 8),
        ValueError,
        f"{LAYOUT}sequences start at [0, 3] with lengths [4, 2] … 8 rows, fewer than 2**31, and not to overlap",
    ),
    (lambda: TokenLayout([0, 6], [4, 3], 8), ValueError, " … ".join([LAYOUT, "[0, 6]", "[4, 3]", "8 rows"])),
    (lambda: TokenLayout([-1], [2], 8), ValueError, " … ".join([LAYOUT, "[-1]", "8 rows"])),
    (lambda: TokenLayout([0, 4], [3, -2], 8), ValueError, " … ".join([LAYOUT, "[3, -2]", "8 rows"])),
    (lambda: TokenLayout.padded([], 8), ValueError, f"{LAYOUT}lengths is empty … at least one sequence"),
    (lambda: TokenLayout.padded(torch.tensor([3, 9]), 8), ValueError, f"{LAYOUT}lengths holds 9 … at most the width 8"),
    (lambda: TokenLayout.packed([0, 2, 5], order=[1, 1]), ValueError, f"{LAYOUT}order is [1, 1] … 2 different numbers"),
    (lambda: TokenLayout.packed([0, 2, 5], order=[0]), ValueError, f"{LAYOUT}order is [0] … 2 different"),
    *[
        (lambda i=i: bi.embedding(T, trained(W), i), TypeError, f"embedding: padding_id is {i!r} … None or")
        for i in ("3", 2.5)
    ],
    *[
        (lambda call=call, i=i: call(T, ignore_index=i), TypeError, f"{name}: ignore_index is {i!r} … integer")
        for name, call in LOGPROBS.items()
        for i in (None, "x", 2.5)
    ],
    (lambda: TokenLayout([0, 5], [5], 10), ValueError, " … ".join([LAYOUT, "[0, 5]", "[5]"])),
    (lambda: TokenLayout([0], [5, 3], 10), ValueError, " … ".join([LAYOUT, "[0]", "[5, 3]"])),
    (lambda: TokenLayout.padded(torch.tensor([[1, 2]]), 4), ValueError, f"{LAYOUT}lengths … (1, 2)"),
    (lambda: TokenLayout.padded([1.5, 2.0], 4), (TypeError, ValueError), f"{LAYOUT}lengths … 1.5 … integers"),
    (lambda: TokenLayout.packed([0, 2.5, 5]), (TypeError, ValueError), f"{LAYOUT}cu_seqlens … 2.5 … integers"),
    (
        lambda: TokenLayout.packed(torch.tensor([False, True])),
        ValueError,
        f"{LAYOUT}cu_seqlens … torch.bool … integers",
    ),
    (lambda: TokenLayout.packed(5), TypeError, f"{LAYOUT}cu_seqlens is 5 … integers"),
    (lambda: TokenLayout.packed([0, 2, 5], order="ab"), (TypeError, ValueError), f"{LAYOUT}order is 'ab'"),
]


@pytest.mark.parametrize("call, error, words", BAD_INPUT, ids=[row[-1] for row in BAD_INPUT])
def test_bad_input_is_one_clear_sentence(call, error, words):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 250, message
    assert all(word in message for word in words.split(" … ")), message


@pytest.mark.parametrize("name", LOGPROBS)
def test_tokens_that_are_all_ignored_are_refused_only_where_a_gradient_is_wanted(name):
    ignored = torch.full((5,), -100)
    hidden, weight = X.clone(), trained(W)
    call = {
        "token_logprob": lambda: bi.token_logprob(bi.linear(hidden, weight), ignored),
        "lm_head_logprob": lambda: bi.lm_head_logprob(hidden, weight, ignored),
    }[name]
    with pytest.raises(
        ValueError, match=f"^{name}: targets holds nothing but ignore_index -100, expected at least one"
    ):
        call()
    with torch.no_grad():
        for y in call():
            assert_same_bits(y, torch.zeros(5))


def test_a_frozen_parameter_may_have_any_main_grad():
    for call, parameter, _ in NAMED.values():
        frozen = parameter.clone()
        frozen.main_grad = "none of the op's business"
        call(frozen)


@EVERY_DTYPE
@pytest.mark.parametrize("name", ["linear", "matmul", "rms_norm", "qk_norm", "add_rms_norm", "embedding"])
def test_no_rows_give_no_rows_and_a_gradient_of_zero(name, dtype):
    function, tokens, parameters, constants = CALLS[name]
    for lead in ((0,), (3, 0), (0, 3)):
        given = {k: torch.zeros(*lead, *shape, dtype=dtype if shape else torch.long) for k, shape in tokens.items()}
        given = {k: t.requires_grad_(t.is_floating_point()) for k, t in given.items()}
        for main_grad in (False, True):
            weights = {k: trained(numbers(shape, dtype)) for k, shape in parameters.items()}
            if main_grad:
                for t in weights.values():
                    t.main_grad = torch.full_like(t, 3.0, dtype=torch.float32)
            y = function(**given, **weights, **constants)
            y = [y] if isinstance(y, torch.Tensor) else y
            assert all(t.shape[: len(lead)] == lead and t.dtype == dtype for t in y)
            torch.autograd.backward(y, [torch.zeros_like(t) for t in y])
            for k, t in weights.items():
                if main_grad:
                    assert_same_bits(t.main_grad, torch.full_like(t.main_grad, 3.0), k)
                else:
                    assert_same_bits(t.grad, torch.zeros_like(t), k)


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


def test_an_id_beyond_32_bits_reaches_no_row():
    """Nobody checks the ids of a captured graph."""
    dy, ids = torch.ones(2, 40), torch.tensor([2**32 + 3, 3])
    embed.fold_rows(dy, ids, layout_for("embedding", (2,)), None, found := torch.zeros(8, 40), False)
    assert (found[3] == 1).all() and found.sum() == 40
