"""Gradients of the elementwise ops and RoPE, as a real backward() leaves them: within the contract's bound, the same
bits however the rows come, and only where they are asked for."""

import pytest
import torch
from conftest import assert_same_bits

import bi_kernels
from bi_kernels import contract
from bi_kernels.audit.inputs import draw, generator
from bi_kernels.contract import DTYPES
from bi_kernels.reference_gradients import gradient
from bi_kernels.tokens import TokenLayout

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
FINITE_KINDS = ("normal", "wide", "signed_zeros", "subnormal")
ROWS, COLUMNS, FACTOR = 70, 96, 0.3
TABLE = bi_kernels.rope_table(512, 16)
POSITIONS = torch.cat((torch.arange(40), torch.arange(29), torch.tensor([511])))
MASK = torch.rand(ROWS, COLUMNS, generator=generator("cpu", "mask")) < 0.3
MATRIX = (ROWS, COLUMNS)

# name: (row of the contract, function of the reference, {input: shape}, constants)
CALLS = {
    "silu": ("silu", "silu", {"x": MATRIX}, {}),
    "gelu": ("gelu", "gelu", {"x": MATRIX}, {}),
    "gelu_tanh": ("gelu_tanh", "gelu", {"x": MATRIX}, {"approximate": "tanh"}),
    "swiglu": ("swiglu", "swiglu", {"gate": MATRIX, "up": MATRIX}, {}),
    "geglu": ("geglu", "geglu", {"gate": MATRIX, "up": MATRIX}, {}),
    "geglu_tanh": ("geglu_tanh", "geglu", {"gate": MATRIX, "up": MATRIX}, {"approximate": "tanh"}),
    "clamped_swiglu": ("clamped_swiglu", "clamped_swiglu", {"gate": MATRIX, "up": MATRIX}, {}),
    "soft_cap": ("soft_cap", "soft_cap", {"x": MATRIX}, {"cap": 30.0}),
    "add": ("add", "add", {"x": MATRIX, "residual": MATRIX}, {}),
    "scale": ("scale", "scale", {"x": MATRIX}, {"factor": FACTOR}),
    "bias_add": ("bias_add", "bias_add", {"x": MATRIX, "bias": (COLUMNS,)}, {}),
    "mask_fill": ("mask_fill", "mask_fill", {"x": MATRIX}, {"mask": MASK, "value": -1e4}),
    "cast_bf16": ("cast", "cast", {"x": MATRIX}, {"dtype": torch.bfloat16}),
    "cast_fp16": ("cast", "cast", {"x": MATRIX}, {"dtype": torch.float16}),
    "cast_fp32": ("cast", "cast", {"x": MATRIX}, {"dtype": torch.float32}),
    "rope": ("rope", "rope", {"x": (ROWS, 3, 16)}, {"table": TABLE, "positions": POSITIONS}),
    "rope_interleaved": (
        "rope",
        "rope",
        {"x": (ROWS, 3, 16)},
        {"table": TABLE, "positions": POSITIONS, "interleaved": True},
    ),
    "rope_partial": ("rope", "rope", {"x": (ROWS, 3, 22)}, {"table": TABLE, "positions": POSITIONS}),
}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "soft_cap")
EVERY_OP = pytest.mark.parametrize("name", CALLS)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, kind: str = "normal", seed: object = 0) -> torch.Tensor:
    return draw(kind, shape, dtype, generator("cpu", seed, *shape, dtype, kind))


def arguments(name: str, dtype: torch.dtype, kind: str = "normal") -> dict[str, torch.Tensor]:
    return {k: numbers(shape, dtype, kind, k) for k, shape in CALLS[name][2].items()}


def upstream(name: str, dtype: torch.dtype, kind: str = "normal") -> torch.Tensor:
    return numbers(next(iter(CALLS[name][2].values())), CALLS[name][3].get("dtype", dtype), kind, "dy")


def gradients(
    name: str, given: dict[str, torch.Tensor], dy: torch.Tensor, wanted: tuple[str, ...] = (), **constants
) -> dict[str, torch.Tensor | None]:
    """What backward() leaves in `.grad` of every input, or of those wanted."""
    leaves = {k: t.detach().requires_grad_(not wanted or k in wanted) for k, t in given.items()}
    getattr(bi_kernels, CALLS[name][1])(**leaves, **CALLS[name][3] | constants).backward(dy)
    return {k: t.grad for k, t in leaves.items()}


def assert_within(name: str, given: dict[str, torch.Tensor], dy: torch.Tensor, found: dict[str, torch.Tensor]) -> None:
    row, function, _, constants = CALLS[name]
    for k, expected in gradient(function, given, constants, dy).items():
        y, dtype = found[k], given[k].dtype
        assert y.dtype == dtype and y.shape == given[k].shape
        limit = contract.bound(row, dtype, *expected, gradient=k)
        beyond = (expected.exact.abs() + limit >= torch.finfo(dtype).max) & (y == expected.exact.sign() * torch.inf)
        wrong = (~((y.double() - expected.exact).abs() <= limit) & ~beyond).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            at_that = [t[at[-t.dim() :]].item() for t in given.values()]
            raise AssertionError(
                f"{name} {k} {dtype}: {len(wrong)} of {y.numel()} exceed the bound, first at {at}: "
                f"{y[at]} instead of {expected.exact[at]}, given {at_that}"
            )


# Accuracy


@EVERY_DTYPE
@EVERY_OP
@pytest.mark.parametrize("kind", FINITE_KINDS)
def test_gradients_are_within_the_bound(name, kind, dtype):
    given, dy = arguments(name, dtype, kind), upstream(name, dtype, kind)
    assert_within(name, given, dy, gradients(name, given, dy))


@EVERY_DTYPE
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_within_the_bound_for_every_finite_number(name, dtype):
    x = (
        torch.arange(-(2**15), 2**15, dtype=torch.int16)
        .view(torch.bfloat16 if dtype == torch.float32 else dtype)
        .to(dtype)
    )
    if dtype == torch.float32:
        random = torch.randint(-(2**31), 2**31, (2**16,), generator=generator("cpu", "bits")).int().view(dtype)
        x = torch.cat((x, random, torch.linspace(-110, 110, 50_001)))
    x = x[x.isfinite()]
    given = {k: x if i == 0 else numbers(x.shape, dtype, seed=k) for i, k in enumerate(CALLS[name][2])}
    dy = numbers(x.shape, dtype, seed="dy")
    assert_within(name, given, dy, gradients(name, given, dy))


@EVERY_DTYPE
@pytest.mark.parametrize("name", [*ACTIVATIONS, "add", "scale", "bias_add", "cast_fp32"])
def test_nonfinite_numbers_give_what_fp64_gives(name, dtype):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    specials = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    special = lambda t: torch.where(t.isfinite(), 0.0, t.double().nan_to_num(nan=9.0, posinf=1.0, neginf=-1.0))
    exact = lambda every: {
        k: g.exact
        for k, g in gradient(CALLS[name][1], {k: every[k] for k in given}, CALLS[name][3], every["dy"]).items()
    }
    for changed in (*given, "dy"):
        every = given | {"dy": dy.clone()}
        every[changed].view(-1)[:5] = specials.to(every[changed].dtype)
        found = gradients(name, {k: every[k] for k in given}, every["dy"])
        expected = exact(every)
        clamps = name == "clamped_swiglu"
        if changed == "dy" or changed == "up" and not clamps:
            # a factor of dx: autograd's inf · p + inf · q may be NaN where inf · (p + q) is not
            unit = exact(every | {changed: torch.ones_like(dy)})
            expected |= {
                k: torch.where((g == 0) & clamps, expected[k], g * every[changed].double())
                for k, g in unit.items()
                if k not in (changed, "bias")
            }
        for k, y in found.items():
            wrong = (special(y) != special(expected[k])).nonzero()
            assert not len(wrong), f"{changed}: {len(wrong)} of {k} differ, first {y[tuple(wrong[0])]}"


@EVERY_DTYPE
def test_clamped_swiglu_passes_gradients_through_where_torch_clamp_does(dtype):
    beyond = torch.finfo(dtype).eps
    at = torch.tensor([-7 - 8 * beyond, -7, -1, 0, 7, 7 + 8 * beyond, torch.inf, torch.nan], dtype=dtype)
    gate, up = at.repeat(8), at.repeat_interleave(8)
    found = bi_kernels.clamped_swiglu(gate.requires_grad_(), up.requires_grad_())
    found.sum().backward()
    ours, stock = (gate.grad, up.grad), [t.detach().double().requires_grad_() for t in (gate, up)]
    y = (stock[1].clamp(-7, 7) + 1) * (g := stock[0].clamp(max=7)) * torch.sigmoid(1.702 * g)
    y.sum().backward()
    assert found.isnan().equal(y.isnan())
    for mine, other in zip(ours, stock):
        assert (mine == 0).equal(other.grad == 0) and mine.isnan().equal(other.grad.isnan())


# What is copied, or is one IEEE operation, has the bits of it


@EVERY_DTYPE
def test_add_and_bias_add_pass_every_bit_of_dy(dtype):
    dy = every_bit_pattern(dtype).view(256, -1)
    given = {"x": torch.zeros_like(dy), "residual": torch.zeros_like(dy)}
    for k, found in gradients("add", given, dy).items():
        assert_same_bits(found, dy, k)
    given = {"x": torch.zeros_like(dy), "bias": torch.zeros_like(dy[0])}
    assert_same_bits(gradients("bias_add", given, dy, wanted=("x",))["x"], dy)


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(256, 256), (1, 256), (256, 1), (256,)])
def test_mask_fill_passes_every_bit_of_dy_and_plus_zero_where_masked(shape, dtype):
    dy = every_bit_pattern(dtype).view(256, 256)
    mask = torch.rand(shape, generator=generator("cpu", "mask", shape)) < 0.5
    found = gradients("mask_fill", {"x": torch.zeros_like(dy)}, dy, mask=mask)["x"]
    whole = mask.expand_as(dy)
    assert_same_bits(found[~whole], dy[~whole], "kept")
    assert_same_bits(found[whole], torch.zeros_like(dy)[whole], "masked")


def every_bit_pattern(dtype: torch.dtype) -> torch.Tensor:
    """2^16 numbers: NaN with their payloads, infinities, subnormals, both zeros."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    return (bits.int() * 65537 if dtype == torch.float32 else bits).view(dtype)


@EVERY_DTYPE
@pytest.mark.parametrize("factor", [FACTOR, 1 / 3, -0.0, 2.0**-133 / 3])
def test_scale_rounds_the_factor_to_fp32_first(factor, dtype):
    dy = numbers(MATRIX, dtype, "wide")
    found = gradients("scale", {"x": torch.zeros_like(dy)}, dy, factor=factor)["x"]
    assert_same_bits(found, (dy.float() * torch.tensor(factor, dtype=torch.float32)).to(dtype))


@EVERY_DTYPE
@pytest.mark.parametrize("target", DTYPES.values(), ids=DTYPES)
def test_cast_casts_dy_back(dtype, target):
    dy = every_bit_pattern(target)
    dy = dy[~dy.isnan()]
    found = gradients("cast_bf16", {"x": torch.zeros_like(dy, dtype=dtype)}, dy, dtype=target)["x"]
    assert_same_bits(found, dy.to(dtype))


@EVERY_DTYPE
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_of_rope_is_rope_by_the_opposite_angle(interleaved, dtype):
    dy = numbers((ROWS, 3, 16), dtype)
    found = gradients("rope", {"x": torch.zeros_like(dy)}, dy, interleaved=interleaved)["x"]
    opposite = bi_kernels.RopeTable(TABLE.cos, 0 - TABLE.sin)
    assert_same_bits(found, bi_kernels.rope(dy, opposite, POSITIONS, interleaved=interleaved))


def test_rope_gives_no_gradient_to_its_table_and_nan_outside_it():
    x, table = torch.ones(3, 2, 16, requires_grad=True), bi_kernels.rope_table(8, 16)
    table.cos.requires_grad_()
    bi_kernels.rope(x, table, torch.tensor([0, 8, 7])).sum().backward()
    assert table.cos.grad is None and x.grad[1].isnan().all() and x.grad[[0, 2]].isfinite().all()
    bi_kernels.rope(x.detach(), table, torch.tensor([0, 1, 2])).sum().backward()
    assert table.cos.grad is None


# What may not change a bit


@EVERY_DTYPE
@EVERY_OP
def test_a_row_has_the_same_gradient_at_every_row_count(name, dtype):
    given, dy = arguments(name, dtype, "wide"), upstream(name, dtype, "wide")
    whole = gradients(name, given, dy)
    per_row = lambda t: isinstance(t, torch.Tensor) and t.dim() > 0 and len(t) == ROWS
    for m in (1, 7, 16, 17, 33, 64):
        part = {k: t[:m] if per_row(t) else t for k, t in given.items()}
        constants = {k: t[:m] for k, t in CALLS[name][3].items() if per_row(t)}
        for k, found in gradients(name, part, dy[:m], **constants).items():
            if per_row(given[k]):
                assert_same_bits(found, whole[k][:m], f"{k}, M = {m}")


VIEWS = {
    "expanded": lambda t: t[:1, ..., :1].expand_as(t),
    "transposed": lambda t: t.mT.contiguous().mT,
    "strided": lambda t: torch.stack((t, torch.full_like(t, torch.nan)), -1)[..., 0],
    "misaligned": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
}


@EVERY_OP
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_gives_the_bits_of_its_copy(view, name, dtype=torch.bfloat16):
    given, dy = arguments(name, dtype), VIEWS[view](upstream(name, dtype))
    expected = gradients(name, given, dy.clone(memory_format=torch.contiguous_format))
    for k, found in gradients(name, given, dy).items():
        assert_same_bits(found, expected[k], f"{k}, dy {view}")
    for k in given:
        t = VIEWS[view](given[k][None])[0] if given[k].dim() == 1 else VIEWS[view](given[k])
        expected = gradients(name, given | {k: t.clone(memory_format=torch.contiguous_format)}, dy)
        for other, found in gradients(name, given | {k: t}, dy).items():
            assert_same_bits(found, expected[other], f"{other}, {k} {view}")


@EVERY_DTYPE
@pytest.mark.parametrize("name", ["swiglu", "geglu", "clamped_swiglu", "add", "bias_add"])
def test_only_the_gradients_asked_for_are_computed_and_have_the_same_bits(name, dtype):
    given, dy = arguments(name, dtype), upstream(name, dtype)
    both = gradients(name, given, dy)
    for k in given:
        alone = gradients(name, given, dy, wanted=(k,))
        assert_same_bits(alone.pop(k), both[k], k)
        assert list(alone.values()) == [None]


@pytest.mark.parametrize("lead", [(), (0,), (3, 0), (2, 35)])
@EVERY_OP
def test_any_rank_and_no_rows_at_all(name, lead):
    features = next(iter(CALLS[name][2].values()))[1:]
    given = {
        k: numbers(shape if len(shape) == 1 else (*lead, *features), torch.float32, seed=k)
        for k, shape in CALLS[name][2].items()
    }
    constants = {"mask": torch.zeros(1, dtype=torch.bool), "positions": torch.zeros(lead, dtype=torch.long)}
    constants = {k: t for k, t in constants.items() if k in CALLS[name][3]}
    dy = torch.ones(*lead, *features, dtype=CALLS[name][3].get("dtype", torch.float32))
    for k, found in gradients(name, given, dy, **constants).items():
        assert found.shape == given[k].shape and found.isfinite().all()


# The bias: a fold over tokens


def bias_gradient(calls, layouts, dtype, main_grad: bool = True) -> torch.Tensor:
    bias = torch.zeros(COLUMNS, dtype=dtype, requires_grad=True)
    if main_grad:
        bias.main_grad = torch.zeros(COLUMNS)
    for dy, layout in zip(calls, layouts):
        with layout:
            y = bi_kernels.bias_add(torch.zeros_like(dy), bias)
        y.backward(dy)
    assert not main_grad or bias.grad is None
    return bias.main_grad if main_grad else bias.grad


@EVERY_DTYPE
def test_the_bias_gradient_does_not_depend_on_layout_or_split(dtype):
    lengths = (5, 33, 1, 17)
    samples = numbers((sum(lengths), COLUMNS), dtype, "cancelling").split(lengths)
    packed = TokenLayout.packed([0, 5, 38, 39, 56])
    expected = bias_gradient([torch.cat(samples)], [packed], dtype)
    each = bias_gradient(samples, [TokenLayout([0], [n], n) for n in lengths], dtype)
    assert_same_bits(each, expected, "a sample a call")
    for left in (False, True):
        padded = torch.full((4, 40, COLUMNS), torch.nan, dtype=dtype)
        for row, sample in zip(padded, samples):
            row[-len(sample) :] = sample if left else row[-len(sample) :]
            row[: len(sample)] = row[: len(sample)] if left else sample
        layout = TokenLayout.padded(lengths, 40, left=left)
        assert_same_bits(bias_gradient([padded], [layout], dtype), expected, f"padded, left {left}")
    permuted = torch.cat([samples[i] for i in (2, 0, 3, 1)])
    layout = TokenLayout.packed([0, 1, 6, 23, 56], order=[2, 0, 3, 1])
    assert_same_bits(bias_gradient([permuted], [layout], dtype), expected, "permuted")
    rounded = bias_gradient([torch.cat(samples)], [packed], dtype, main_grad=False)
    assert_same_bits(rounded, expected.to(dtype), ".grad is the fold rounded once")
    found = gradient(
        "bias_add",
        {"x": torch.cat(samples), "bias": torch.zeros(COLUMNS, dtype=dtype)},
        {},
        torch.cat(samples),
        lengths,
    )["bias"]
    limit = contract.bound("bias_add", torch.float32, *found, gradient="bias", inputs=dtype)
    assert ((expected.double() - found.exact).abs() <= limit).all()


def test_what_the_bias_gradient_cannot_use_is_refused_at_the_call():
    x, bias = torch.zeros(5, 8), torch.zeros(8, requires_grad=True)
    bias.main_grad = torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="^bias_add: bias.main_grad has dtype torch.bfloat16, expected torch.float32$"):
        bi_kernels.bias_add(x, bias)
    del bias.main_grad
    with TokenLayout.packed([0, 3]):
        with pytest.raises(ValueError, match="^bias_add: x has 5 tokens"):
            bi_kernels.bias_add(x, bias)
        bi_kernels.bias_add(x, bias.detach())  # no gradient, no layout


def test_a_second_derivative_is_refused():
    x, dy = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad(bi_kernels.silu(x), x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
