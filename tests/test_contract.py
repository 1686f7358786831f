"""contract.toml is whole, its bounds bite, and no tolerance stands anywhere else."""

import inspect
import io
import json
import math
import re
import tokenize
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_within, committed, under_test
from hypothesis import given, settings
from hypothesis import strategies as st

import bi_kernels
from bi_kernels import contract, reference
from bi_kernels.audit.controls.forward import bf16_accumulation
from bi_kernels.audit.inputs import KINDS, draw, draw_integers, generator
from bi_kernels.audit.layouts import layouts
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.targets.op_config import joined
from bi_kernels.contract import CONTRACT, DTYPES, SHAPES, SWEEP
from bi_kernels.ops.attention.schedule import SCHEDULE
from bi_kernels.reference_attention import changes
from bi_kernels.reference_gradients import gradient

ROOT = Path(__file__).parents[1]
ROWS = {op.name: op.row or op.name for op in OPS.values()}


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_row_with_its_derivation(op):
    row = CONTRACT["ops"][ROWS[op]]
    assert all(row[field].strip() for field in ("S", "rounding", "fma", "derivation")), row
    for dtype in DTYPES.values():
        factors = [contract.factor(ROWS[op], dtype, n) for n in (1, 16, 17, 4096)]
        assert factors == sorted(factors) and factors[0] >= 0 and factors[-1] < 1, "a longer sum errs no less"


@pytest.mark.parametrize("op", OPS)
def test_every_input_with_a_gradient_has_a_row_with_its_derivation(op):
    inputs = OPS[op].tokens | OPS[op].shared
    for name in [name for name, dims in inputs.items() if not dims.endswith((":bool", ":id"))]:
        row = contract.row(ROWS[op], name)
        assert row["S"].strip() and row["derivation"].strip(), name
        for dtype in DTYPES.values():
            lengths = [{"n": n, "features": 128, "heads": 8} for n in (1, 16, 17, 4096)]
            factors = [contract.factor(ROWS[op], dtype, n, name) for n in lengths]
            assert factors == sorted(factors) and factors[0] >= 0 and factors[-1] < 1, "a longer sum errs no less"


def test_every_row_has_an_op_and_every_op_a_reference():
    assert set(CONTRACT["ops"]) == set(ROWS.values())
    assert all(hasattr(reference, op.function or op.name) for op in OPS.values())


def test_dtypes():
    assert list(DTYPES) == ["bf16", "fp16", "fp32"] and CONTRACT["dtypes"]["mandatory"] == ["bf16"]
    for name, dtype in DTYPES.items():
        info, row = torch.finfo(dtype), CONTRACT["dtypes"][name]
        assert 2.0 ** -row["p"] == info.eps / 2 and contract.evaluate(row["tiny"]) == info.tiny * info.eps / 2
        assert contract.dtype_name(dtype) == name


# Row counts, layouts and inputs at which drifts were seen in the field: required, whatever else the file holds


def test_the_sweep_crosses_every_threshold():
    around = {m for power in (8, 16, 32, 64, 128, 256, 512) for m in (power - 1, power, power + 1)}
    assert set(SWEEP["rows"]) >= around | {1, 2, 3, 44, 45, 1024, 2048, 2049, 4096}
    assert set(contract.rows(SWEEP["interpreter_rows"])) >= {m for m in SWEEP["rows"] if m <= 257}
    assert set(SWEEP["chunks"]) >= {1, 7, 16, 64, 100} and SWEEP["runs"] >= 10
    assert set(KINDS) >= {"normal", "wide", "cancelling", "signed_zeros", "subnormal", "nonfinite"}
    assert {
        *["singles", "batch", "left_padded", "packed", "permuted", "chunked", "decode", "micro_batches", "neighbours"]
    } <= {*SWEEP["layouts"]}


@pytest.mark.parametrize("shapes", SHAPES)
def test_every_layout_of_the_contract_is_built(shapes):
    assert {name.split(":")[0] for name in layouts(SHAPES[shapes]["lengths"])} == set(SWEEP["layouts"])


def test_eps_is_the_contract_s():
    for op in (bi_kernels.rms_norm, bi_kernels.qk_norm, bi_kernels.add_rms_norm, reference.rms_norm):
        assert inspect.signature(op).parameters["eps"].default == contract.EPS


def test_the_blocks_of_attention_are_the_contract_s():
    blocks = SCHEDULE.block, SCHEDULE.split
    assert blocks == tuple(CONTRACT["arithmetic"][f"attention_{name}"] for name in ("block", "split"))


def test_a_gradient_in_main_grad_has_the_rounding_of_fp32_and_the_sum_of_its_inputs():
    exact, magnitude = torch.ones(1, dtype=torch.float64), torch.full((1,), 64.0, dtype=torch.float64)
    limit = lambda dtype, inputs: float(contract.bound("linear", dtype, exact, magnitude, 256, "weight", inputs))
    c = contract.factor("linear", torch.bfloat16, 256, "weight")
    assert c * 64 < limit(torch.float32, torch.bfloat16) < limit(torch.bfloat16, torch.bfloat16)
    assert limit(torch.float32, torch.bfloat16) != limit(torch.float32, torch.float32)


# The bound of a product

sizes = dict(m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 300), seed=st.integers(0, 2**30))


def product(m, n, k, seed, dtype, kind="normal"):
    g = generator("cpu", seed)
    return draw(kind, (m, k), dtype, g), draw(kind, (n, k), dtype, g, shared=True)


@given(**sizes, dtype=st.sampled_from(list(DTYPES.values())), kind=st.sampled_from(KINDS[:-1]))
def test_an_exact_product_rounded_once_is_within_the_bound(m, n, k, seed, dtype, kind):
    exact, magnitude = reference.linear(*product(m, n, k, seed, dtype, kind))
    assert_within("linear", exact.to(dtype), (exact, magnitude), k)


EVERY_K = sorted({k for shapes in SHAPES for _, k in contract.linears(shapes).values()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", EVERY_K)
def test_no_sum_of_integers_rounds_and_every_rounding_on_the_way_is_four_times_the_bound(k, dtype):
    """Whatever the order: all magnitudes together are held by fp32."""
    g = generator("cpu", k, dtype)
    x, w = (draw_integers((16, k), DTYPES[dtype], g, shared) for shared in (False, True))
    exact, magnitude = reference.linear(x, w)
    assert magnitude.max() <= SWEEP["integers"]["sums"] <= 2**24
    assert_within("linear", exact.to(x.dtype), (exact, 0 * magnitude), k)
    limit = contract.bound("linear", x.dtype, exact, 0 * magnitude, k)
    first, second = (F.linear(a.double(), b.double()) for a, b in zip(x.chunk(2, -1), w.chunk(2, -1)))
    wrong = {"half": (first.bfloat16().double() + second).to(x.dtype)}
    if dtype == "fp32":
        short = lambda t: ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()
        wrong |= {"TF32": F.linear(short(x), short(w)).float()}
    for name, y in wrong.items():
        assert ((y.double() - exact).abs() / limit).max() >= 4, name


@given(
    m=st.integers(8, 40),
    n=st.integers(8, 40),
    slabs=st.integers(8, 40),
    seed=sizes["seed"],
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_bf16_accumulation_exceeds_the_bound(m, n, slabs, seed, dtype):
    x, w = product(m, n, 16 * slabs, seed, dtype)
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_within("linear", bf16_accumulation(x, w), reference.linear(x, w), 16 * slabs)


@given(
    **sizes | {"m": st.integers(8, 40), "n": st.integers(8, 40)}, short=st.sampled_from((torch.bfloat16, torch.float16))
)
def test_a_product_rounded_to_16_bits_exceeds_the_bound_of_fp32(m, n, k, seed, short):
    exact, magnitude = reference.linear(*product(m, n, k, seed, torch.float32))
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_within("linear", exact.to(short).float(), (exact, magnitude), k)


# Every op and its gradients, computed plainly in fp32 with the contract's roundings

TOKENS, LENGTHS, HEAD_DIM = 37, [5, 32], SHAPES["tiny"]["head_dim"]


def rotated(x, table, positions, interleaved=False):
    cos, sin = (t[positions][:, None] for t in table)
    x1, x2 = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    join = (lambda a, b: torch.stack((a, b), -1).flatten(-2)) if interleaved else (lambda a, b: torch.cat((a, b), -1))
    return join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)


def normed(x, weight, eps=contract.EPS):
    return x * (1 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)) * weight


def selected(logits, targets, temperature=1.0, ignore_index=-100):
    z = logits * torch.tensor(1 / temperature, dtype=torch.float32)
    lse, ignored, e = z.logsumexp(-1), targets == ignore_index, (z - z.detach().amax(-1, keepdim=True)).exp()
    logprob = z.gather(-1, targets.masked_fill(ignored, 0)[:, None])[:, 0] - lse
    entropy = lse - (e * z).sum(-1) / e.sum(-1)
    return logprob.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


def rounded(x, dtype):
    """x in `dtype`, and its gradient too, both back in fp32."""
    return x.to(dtype).float()


def sum_and_norm(x, residual, weight, dtype, eps):
    h = rounded(x + residual, dtype)
    return normed(h, weight, eps), h


def attended(q, k, v, sinks=None, *, lengths, dtype, window=None, chunk=None, soft_cap=None):
    """Causal; the probabilities, for the product with v, and the gradient of the scores are rounded to `dtype`."""
    every = []
    for q, k, v in zip(*(t.split(lengths) for t in (q, k, v))):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        back = torch.arange(len(q))[:, None] - torch.arange(len(q))
        s = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        s.register_hook(lambda g: rounded(g, dtype))
        if soft_cap is not None:
            s = soft_cap * torch.tanh(s / soft_cap)
        at = torch.arange(len(q)) // (chunk or len(q))
        s = s.masked_fill((back < 0) | (back >= (window or len(q))) | (at[:, None] != at), -torch.inf)
        if sinks is not None:  # a last key, without a value
            s = torch.cat([s, sinks.float()[:, None, None].expand(-1, len(q), 1)], -1)
        p = s.softmax(-1)
        p = (p + (rounded(p, dtype) - p).detach())[..., : len(k)]
        every.append((torch.einsum("hqk,khd->qhd", p, v), s.logsumexp(-1).T))
    return tuple(map(torch.cat, zip(*every)))


def clamped(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def capped(x, cap):
    """By 2t / (1 + exp(-2|t|)) of expm1, for tanh's own gradient cancels where it saturates."""
    t = (x / cap).abs()
    near = torch.where(t < 1, t, 0.0)
    e = torch.exp(-2 * t)
    return cap * x.sign() * torch.where(t < 1, -torch.expm1(-2 * near) / (1 + torch.exp(-2 * near)), (1 - e) / (1 + e))


PLAIN = {  # op: the op in plain fp32 torch
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))),
    "gelu_tanh": F.gelu,
    "swiglu": lambda gate, up: gate * torch.sigmoid(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu_tanh": lambda gate, up, approximate: F.gelu(gate, approximate=approximate) * up,
    "clamped_swiglu": clamped,
    "soft_cap": capped,
    "add": lambda x, residual: x + residual,
    "scale": lambda x, factor: x * torch.tensor(factor),
    "bias_add": lambda x, bias: x + bias,
    "mask_fill": lambda x, mask, value: x.masked_fill(mask, value),
    "cast": lambda x, dtype: x,
    "rope": rotated,
    "rope_interleaved": rotated,
    "rope_partial": lambda x, **told: torch.cat((rotated(x[..., :8], **told), x[..., 8:]), -1),
    "rope_scaled": lambda x, scaling, **told: rotated(x, **told),
    "linear": lambda x, weight: F.linear(x, weight),
    "linear_bias": lambda x, weight, bias: F.linear(x, weight, bias),
    "matmul": lambda a, b: a @ b,
    "routed_linear": lambda x, experts, weight: (x[:, None] @ weight[experts].mT)[:, 0],
    "routed_linear_bias": lambda x, experts, weight, bias: (x[:, None] @ weight[experts].mT)[:, 0] + bias[experts],
    "routed_sum": lambda y, weights, experts: torch.einsum("tkh,tk->th", y, weights),
    "rms_norm": normed,
    "qk_norm": normed,
    "rms_norm_offset": lambda x, weight, eps, offset: normed(x, offset + weight, eps),
    "layer_norm": lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
    "layer_norm_heads": lambda x, weight, bias, eps, heads: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
    "row_sum": lambda x, scale: x.sum(-1) * scale,
    "softmax": lambda x: x.softmax(-1),
    "scaled": lambda x, weight: x * weight,
    "scaled_heads": lambda x, weight: x * weight,
    "shifted": lambda x, weight: x + weight,
    "add_rms_norm": sum_and_norm,
    "embedding": lambda ids, weight, padding_id: F.embedding(ids, weight, padding_id),
    "token_logprob": selected,
    "log_softmax": lambda logits: logits.log_softmax(-1),
    "lm_head_logprob": lambda hidden, weight, dtype, **told: selected(rounded(F.linear(hidden, weight), dtype), **told),
    "attention": attended,
    **{name: attended for name in OPS if OPS[name].row == "attention"},
}
ATTENTION = tuple(name for name in OPS if OPS[name].row == "attention")
ROUNDS_BETWEEN = ("add_rms_norm", "lm_head_logprob", *ATTENTION)  # to the storage dtype


def worst(y: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor) -> float:
    """The largest error as a share of the bound; infinity is right where it reaches beyond the dtype, as NaN for
    NaN."""
    right = (exact.abs() + limit >= torch.finfo(y.dtype).max) & (y == exact.sign() * torch.inf)
    right |= y.isnan() & exact.isnan()
    return float(torch.where(right, 0.0, (y.double() - exact).abs() / limit).nan_to_num(torch.inf).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "wide"])
@pytest.mark.parametrize("op", OPS)
def test_plain_fp32_is_within_every_bound(op, kind, dtype):
    p, at = under_test(op, dtype).problem, torch.arange(TOKENS)
    tokens, shared = p.inputs(kind, TOKENS)
    given, constants, lengths = tokens | shared, p.constants(TOKENS), LENGTHS if p.op.cache else [TOKENS]
    leaves = {k: t.float().clone().requires_grad_() if t.is_floating_point() else t for k, t in given.items()}
    told = constants | p.where(at) | ({"lengths": lengths} if p.op.cache else {})
    plain = PLAIN[op](**leaves, **told | ({"dtype": p.dtype} if op in ROUNDS_BETWEEN else {}))
    plain, dtypes = plain if isinstance(plain, tuple) else (plain,), [*p.returned.values()]
    outputs = [y.detach().to(dtypes[min(i, len(dtypes) - 1)]) for i, y in enumerate(plain)]
    every = joined(outputs[0] if len(outputs) == 1 else outputs)
    found = (every, *p.reference(tokens, shared, constants, at, lengths))
    for y, exact, magnitude in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in found), strict=True):
        limit = contract.bound(p.contract_row, y.dtype, exact, magnitude, p.reduction, inputs=p.dtype)
        assert worst(y, exact, limit) <= 1
    g = generator("cpu", op, "dy", dtype, kind)
    upstream = [draw(kind if y.dtype == p.dtype else "normal", y.shape, y.dtype, g) for y in outputs]
    torch.autograd.backward(plain, [t.float() for t in upstream])
    wanted = gradient(p.op.function or op, given, constants | p.where(at), upstream, lengths)
    for name, expected in wanted.items():
        for out in {given[name].dtype} | ({torch.float32} if name in shared else set()):  # .grad, and main_grad
            limit = contract.bound(p.contract_row, out, *expected, gradient=name, inputs=p.dtype)
            assert worst(leaves[name].grad.to(out), expected.exact, limit) <= 1, name


# What accumulates in bf16 exceeds the bound


def folded_in_bf16(terms: torch.Tensor) -> torch.Tensor:
    """Σ over the first dimension, every partial sum rounded to bf16, slabs of 16 exact."""
    total = torch.zeros_like(terms[0])
    for slab in terms.split(16):
        total = (total + slab.double().sum(0).float()).bfloat16().float()
    return total


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=["grad", "main_grad"])
@pytest.mark.parametrize(
    "op, name",
    [
        ("linear", "weight"),
        ("linear", "bias"),
        ("linear", "x"),
        ("bias_add", "bias"),
        ("rms_norm", "weight"),
        ("qk_norm", "weight"),
        ("add_rms_norm", "weight"),
        ("embedding", "weight"),
    ],
)
def test_gradients_accumulated_in_bf16_exceed_the_bound(op, name, out, tokens=300, wide=300, narrow=8):
    g, dtype = generator("cpu", op), torch.bfloat16
    draws = lambda *shape: torch.randn(shape, generator=g).to(dtype)
    features = (4, HEAD_DIM) if op == "qk_norm" else (narrow,)
    given, upstream = {"x": draws(tokens, *features), "weight": draws(features[-1])}, draws(tokens, *features)
    normal = lambda x: reference.normalise(x.double(), contract.EPS)[0].float()
    if op == "linear":
        given, upstream = (
            {"x": draws(tokens, narrow), "weight": draws(wide, narrow), "bias": draws(wide)},
            draws(tokens, wide),
        )
        outer = lambda a, b: a[:, :, None].float() * b[:, None].float()
        terms = {
            "weight": outer(upstream, given["x"]),
            "bias": upstream.float(),
            "x": outer(upstream.T, given["weight"]),
        }[name]
    elif op == "bias_add":
        given = {"x": given["x"], "bias": given["weight"]}
        terms = upstream.float()
    elif op == "embedding":
        given = {"ids": torch.zeros(tokens, dtype=torch.long), "weight": draws(1, narrow)}
        terms = upstream[:, None].float()
    elif op == "add_rms_norm":
        given["residual"] = draws(tokens, narrow)
        terms = upstream.float() * normal(given["x"] + given["residual"])
        upstream = (upstream, None)
    else:
        terms = (upstream.float() * normal(given["x"])).reshape(-1, features[-1])
    expected = gradient(op, given, {}, upstream)[name]
    limit = contract.bound(op.replace("qk", "rms"), out, *expected, gradient=name, inputs=dtype)
    assert worst(terms.double().sum(0).float().to(out), expected.exact, limit) <= 1, "the sum itself is within"
    assert worst(folded_in_bf16(terms).to(out), expected.exact, limit) > 1


def test_attention_whose_values_are_summed_in_bf16_exceeds_the_bound(tokens=400):
    g = generator("cpu", "attention")
    q, k, v = (torch.randn(tokens, 1, HEAD_DIM, generator=g).bfloat16() for _ in range(3))
    q *= 4
    exact, magnitude = reference.attention(q, k, v, lengths=[tokens])[0]
    limit = contract.bound("attention", torch.bfloat16, exact, magnitude, inputs=torch.bfloat16)
    s = (q[:, 0].float() @ k[:, 0].float().T * HEAD_DIM**-0.5).masked_fill(
        ~torch.ones(tokens, tokens).tril().bool(), -torch.inf
    )
    terms = rounded(s.softmax(-1), torch.bfloat16).T[:, :, None, None] * v[:, None].float()
    assert worst(terms.sum(0).bfloat16(), exact, limit) <= 1 < worst(folded_in_bf16(terms).bfloat16(), exact, limit)


@pytest.mark.parametrize("wrong", ["no", "logits accumulated in bf16", "logsumexp in bf16"])
def test_logprobs_that_accumulate_in_bf16_exceed_the_bound(wrong, hidden=512):
    g = generator("cpu", "logprob")
    h, targets = torch.randn(128, hidden, generator=g).bfloat16(), torch.randint(0, 300, (128,), generator=g)
    w = (2 * hidden**-0.5 * torch.randn(300, hidden, generator=g)).bfloat16()
    logits = bf16_accumulation(h, w) if "logits" in wrong else rounded(F.linear(h.float(), w.float()), torch.bfloat16)
    z = logits.float()
    lse = z.logsumexp(-1).bfloat16().float() if "logsumexp" in wrong else z.logsumexp(-1)
    logprob = z.gather(-1, targets[:, None])[:, 0] - lse
    (exact, magnitude), _ = reference.lm_head_logprob(h, w, targets)
    limit = contract.bound("lm_head_logprob", torch.float32, exact, magnitude, inputs=torch.bfloat16)
    found = worst(logprob, exact, limit)
    assert (found > 1) == (wrong != "no"), found
    (exact, magnitude), _ = reference.token_logprob(logits, targets)
    limit = contract.bound("token_logprob", torch.float32, exact, magnitude, inputs=torch.bfloat16)
    assert (worst(logprob, exact, limit) > 1) == ("logsumexp" in wrong)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**30),
    largest=st.sampled_from([2.0**-20, 2.0**-8, 0.5, 4]),
    spread=st.sampled_from([0.3, 3, 30]),
)
def test_no_error_of_the_logits_moves_logprobs_and_entropy_by_more_than_s_says(seed, largest, spread):
    g = torch.Generator().manual_seed(seed)
    z, d = (torch.randn(8, 40, generator=g, dtype=torch.float64) * s for s in (spread, largest))
    each, _, of_entropy = reference.logprob_errors(z, d.abs())
    targets = torch.arange(8)
    signs = [
        d,
        -d,
        d.abs() * torch.where(torch.arange(40) == targets[:, None], 1, -1),
        d.abs() * torch.where(torch.arange(40) == targets[:, None], -1, 1),
    ]
    entropy = lambda logp: -(logp.exp() * logp).sum(-1, keepdim=True)
    logp = reference.log_probabilities(z)
    for change in signs:
        moved = reference.log_probabilities(z + change)
        assert ((moved - logp).abs() <= each).all()
        assert ((entropy(moved) - entropy(logp)).abs() <= of_entropy).all()
        assert ((moved.exp() - logp.exp()).abs() <= reference.probability_errors(logp, each)).all()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**30), largest=st.sampled_from([2.0**-8, 4, 30]), spread=st.sampled_from([0.3, 3, 30]))
def test_no_error_of_the_scores_moves_attention_s_probabilities_by_more_than_s_says(seed, largest, spread):
    g = torch.Generator().manual_seed(seed)
    z, d = (torch.randn(40, 40, generator=g, dtype=torch.float64) * s for s in (spread, largest))
    for own in (torch.eye(40), torch.zeros(40, 40), F.one_hot(z.argmax(-1), 40)):
        for change in (d.abs() * (1 - 2 * own), d.abs() * (2 * own - 1), d):
            logp, moved = z.log_softmax(-1), (z + change).log_softmax(-1)
            every = changes(logp, d.abs(), d.abs())
            assert ((moved - logp).abs() <= every + 2.0**-40).all()
            lse = (z + change).logsumexp(-1, keepdim=True) - z.logsumexp(-1, keepdim=True)
            assert ((change - lse).abs() <= changes(logp, d.abs() + 2.0**-24, d.abs()) + 2.0**-40).all()


# No tolerance anywhere else


def sources():
    for path in committed("bi_kernels/**/*.py", "benchmarks/*.py", "mutation/*.py", "tests/*.py", "tools/*.py"):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in committed("notebooks/*.ipynb"):
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "code":
                lines = "".join(cell["source"]).splitlines()
                yield (
                    f"{path.name}, cell {number}",
                    "\n".join("" if line.startswith(("%", "!")) else line for line in lines),
                )


NAMES = ["atol", "rtol", "rel_tol", "abs_tol", "approx", "allclose", "isclose", "assert_close", "assert_allclose"]


def tolerances(source: str) -> list[str]:
    """What a tolerance looks like: a name such as rtol, or 1e-3; but not eps=1e-6, which another test compares."""
    tokens = tokenize.generate_tokens(io.StringIO(re.sub(r"\beps(: float)? ?= ?\d[\d.]*e-\d+", "eps", source)).readline)
    kinds = {tokenize.NAME: NAMES.__contains__, tokenize.NUMBER: lambda text: "e-" in text}
    return [t.string for t in tokens if t.type in kinds and kinds[t.type](t.string)]


def test_no_tolerance_stands_outside_the_contract():
    assert not {where: found for where, source in sources() if (found := tolerances(source))}
    assert tolerances("torch.testing.assert_close(a, b, rtol=1e-3)") == ["assert_close", "rtol", "1e-3"], "blind"


@pytest.mark.parametrize("op, more", [("log_softmax", {}), ("token_logprob", {"targets": torch.tensor([0, 1])})])
def test_logits_of_minus_infinity_leave_every_bound_a_number(op, more):
    logits = torch.tensor([[0.0, -torch.inf, 3.0], [1.0, -torch.inf, -torch.inf]])
    for y, magnitude in (
        (getattr(reference, op)(logits, **more),) if op == "log_softmax" else getattr(reference, op)(logits, **more)
    ):
        assert not y.isnan().any() and not magnitude.isnan().any()
