"""contract.toml is whole, its bounds bite, and no tolerance stands anywhere else."""

import ast
import json
from pathlib import Path

import pytest
import torch
from conftest import assert_within
from hypothesis import given
from hypothesis import strategies as st

from bi_kernels import contract, reference
from bi_kernels.audit.controls import bf16_accumulation
from bi_kernels.audit.inputs import KINDS, draw, generator
from bi_kernels.audit.layouts import layouts
from bi_kernels.audit.ops import OPS
from bi_kernels.contract import CONTRACT, DTYPES, SHAPES, SWEEP

ROOT = Path(__file__).parents[1]
ROWS = {op.name: op.row or op.name for op in OPS.values()}


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_row_with_its_derivation(op):
    row = CONTRACT["ops"][ROWS[op]]
    assert all(row[field].strip() for field in ("S", "rounding", "fma", "derivation")), row
    for dtype in DTYPES:
        factors = [contract.evaluate(row["c"].get(dtype, row["c"].get("any")), n=n) for n in (1, 16, 17, 4096)]
        assert factors == sorted(factors) and factors[0] >= 0 and factors[-1] < 1, "a longer sum errs no less"


def test_every_row_has_an_op_and_every_op_a_reference():
    assert set(CONTRACT["ops"]) == set(ROWS.values())
    assert all(hasattr(reference, op.function or op.name) for op in OPS.values())


def test_dtypes():
    assert list(DTYPES) == ["bf16", "fp16", "fp32"] and CONTRACT["dtypes"]["mandatory"] == ["bf16"]
    for name, dtype in DTYPES.items():
        info, row = torch.finfo(dtype), CONTRACT["dtypes"][name]
        assert 2.0**-row["p"] == info.eps / 2 and contract.evaluate(row["tiny"]) == info.tiny * info.eps / 2
        assert contract.dtype_name(dtype) == name


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float64, torch.int32, torch.complex64, torch.bool])
def test_any_other_dtype_is_refused_by_name(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"^an_op: x has dtype {name}; supported are bf16, fp16, fp32$"):
        contract.check_dtype("an_op", "x", torch.zeros(1, dtype=dtype))


# Row counts, layouts and inputs at which drifts were seen in the field: required, whatever else the file holds

def test_the_sweep_crosses_every_threshold():
    assert set(SWEEP["rows"]) >= {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 44, 45, 63, 64, 65, 127, 128, 129, 255, 256, 257,
                                  511, 512, 513, 1024, 2048, 2049, 4096}
    assert set(contract.rows(SWEEP["interpreter_rows"])) >= {m for m in SWEEP["rows"] if m <= 257}
    assert set(SWEEP["chunks"]) >= {1, 7, 16, 64, 100} and SWEEP["runs"] >= 10
    assert set(KINDS) >= {"normal", "wide", "cancelling", "signed_zeros", "subnormal", "nonfinite"}
    assert set(SWEEP["layouts"]) >= {"singles", "batch", "left_padded", "packed", "permuted", "chunked", "decode",
                                     "micro_batches", "neighbours"}


@pytest.mark.parametrize("shapes", SHAPES)
def test_every_layout_of_the_contract_is_built(shapes):
    assert {name.split(":")[0] for name in layouts(SHAPES[shapes]["lengths"])} == set(SWEEP["layouts"])


@pytest.mark.parametrize("shapes, hidden, heads, kv_heads, head_dim, mlp, vocab", [
    ("qwen3-8b", 4096, 32, 8, 128, 12288, 151936), ("llama3-8b", 4096, 32, 8, 128, 14336, 128256)])
def test_the_models_shapes(shapes, hidden, heads, kv_heads, head_dim, mlp, vocab):
    expected = dict(hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp=mlp, vocab=vocab)
    assert SHAPES[shapes] == expected | {"lengths": SHAPES[shapes]["lengths"]}
    assert contract.linears(shapes) == {"qkv": (6144, hidden), "o": (hidden, 4096), "gate_up": (2 * mlp, hidden),
                                        "down": (hidden, mlp), "lm_head": (vocab, hidden)}


# The bound of a product

sizes = dict(m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 300), seed=st.integers(0, 2**30))


def product(m, n, k, seed, dtype, kind="normal"):
    g = generator("cpu", seed)
    return draw(kind, (m, k), dtype, g), draw(kind, (n, k), dtype, g, shared=True)


@given(**sizes, dtype=st.sampled_from(list(DTYPES.values())), kind=st.sampled_from(KINDS[:-1]))
def test_an_exact_product_rounded_once_is_within_the_bound(m, n, k, seed, dtype, kind):
    exact, magnitude = reference.linear(*product(m, n, k, seed, dtype, kind))
    assert_within("linear", exact.to(dtype), (exact, magnitude), k)


@given(m=st.integers(8, 40), n=st.integers(8, 40), slabs=st.integers(8, 40), seed=sizes["seed"],
       dtype=st.sampled_from(list(DTYPES.values())))
def test_bf16_accumulation_exceeds_the_bound(m, n, slabs, seed, dtype):
    x, w = product(m, n, 16 * slabs, seed, dtype)
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_within("linear", bf16_accumulation(x, w), reference.linear(x, w), 16 * slabs)


@given(**sizes | {"m": st.integers(8, 40), "n": st.integers(8, 40)}, short=st.sampled_from((torch.bfloat16, torch.float16)))
def test_a_product_rounded_to_16_bits_exceeds_the_bound_of_fp32(m, n, k, seed, short):
    exact, magnitude = reference.linear(*product(m, n, k, seed, torch.float32))
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_within("linear", exact.to(short).float(), (exact, magnitude), k)


# No tolerance anywhere else

def sources():
    for path in sorted([*ROOT.glob("bi_kernels/**/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("tools/*.py")]):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "code":
                lines = "".join(cell["source"]).splitlines()
                yield f"{path.name}, cell {number}", "\n".join("" if line.startswith(("%", "!")) else line for line in lines)


def tolerances(source: str) -> list[str]:
    """What a tolerance looks like: an argument or name atol or rtol, a comparison that has a default one, 1e-3."""
    found = []
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "attr", None) or getattr(node, "arg", None) or getattr(node, "id", None)
        if name in ("atol", "rtol", "rel_tol", "abs_tol", "approx", "allclose", "isclose", "assert_close", "assert_allclose"):
            found.append(name)
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and "e-" in ast.get_source_segment(source, node):
            found.append(ast.get_source_segment(source, node))
    return found


def test_no_tolerance_stands_outside_the_contract():
    assert not {where: found for where, source in sources() if (found := tolerances(source))}
    assert tolerances("torch.testing.assert_close(a, b, rtol=1e-3)") == ["assert_close", "rtol", "1e-3"], "blind"
