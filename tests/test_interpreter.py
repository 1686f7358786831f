"""The interpreter gives the bits that an H200 (sm_90) gave, or raises.

golden/interpreter_sm90.npz holds what the GPU answered, as tools/record_golden.py recorded it.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import TensorHandle

from bi_kernels import interpreter
from bi_kernels.interpreter import formats, launch, tensor_core, tensors

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from record_golden import BINARY, TERNARY, bits, cast, elementwise

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="needs TRITON_INTERPRET=1")
interpreter.install()

GOLDEN = dict(np.load(Path(__file__).parent / "golden" / "interpreter_sm90.npz"))


def keys(*prefixes: str) -> list[str]:
    """The keys of what the GPU answered: everything but the inputs."""
    return [k for k in GOLDEN if k.startswith(prefixes) and k.split("/")[-1] not in ("a", "b", "c")]


def golden(key: str, dtype: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[key]).view(getattr(torch, dtype))


def assert_bits(actual: torch.Tensor, expected, *inputs: torch.Tensor):
    actual, expected = bits(actual).ravel(), np.asarray(expected).ravel()
    wrong = np.flatnonzero(actual != expected)
    size = 8 * actual.itemsize
    hex_ = lambda x: f"{int(x) % 2**size:#x}"
    at = wrong[:5]
    assert not len(wrong), (
        f"{len(wrong)} of {len(actual)} differ: {[hex_(x) for x in actual[at]]} instead of "
        f"{[hex_(x) for x in expected[at]]}, inputs {[t.ravel()[at].tolist() for t in inputs]}"
    )


@triton.jit
def dot(a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
    at = tl.program_id(0) * M * N + m[:, None] * N + n[None, :]
    acc = tl.load(c + at)
    for start in range(0, K, STEP):
        x = tl.load(a + tl.program_id(0) * M * K + m[:, None] * K + (start + k)[None, :])
        y = tl.load(b + tl.program_id(0) * K * N + (start + k)[:, None] * N + n[None, :])
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    tl.store(out + at, acc)


def run_dot(a, b, c, step=None, precision=None):
    out = torch.empty_like(c)
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    dot[(c.numel() // (M * N),)](a, b, c, out, M=M, N=N, K=K, STEP=step or K, PRECISION=precision)
    return out


@triton.jit
def others(a, b, c, out, n, OP: tl.constexpr):
    """Operations that the recorder's `elementwise` lacks."""
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    x, y = tl.load(a + at, mask=at < n), tl.load(b + at, mask=at < n)
    if OP == "less":
        r = tl.where(x < y, 1.0, 0.0).to(x.dtype)
    elif OP == "constant":
        r = x * 0 + 1.7
    elif OP == "sum":
        r = tl.sum(x)
    elif OP == "max":
        r = x * 0 + tl.max(x).to(x.dtype)
    elif OP == "cumsum":
        r = tl.associative_scan(x, 0, _add)
    elif OP == "exp":
        r = tl.exp(x)
    elif OP == "atomic_add":
        r = tl.atomic_add(out + at, x)
    elif OP == "fp8":
        r = x.to(tl.float8e5)
    tl.store(out + at, r, mask=at < n)


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def store(a, out, n):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(out + at, tl.load(a + at, mask=at < n), mask=at < n)


def run_elementwise(op, a, b=None, c=None):
    out = torch.empty_like(a)
    kernel = elementwise if op in (*BINARY, *TERNARY) else others
    kernel[(triton.cdiv(a.numel(), 256),)](a, a if b is None else b, a if c is None else c, out, a.numel(), OP=op)
    return out


def run_cast(a, dtype, rounding=None):
    out = torch.empty(a.shape, dtype=dtype)
    cast[(triton.cdiv(a.numel(), 256),)](a, out, a.numel(), ROUNDING=rounding)
    return out


def run_mma(key: str) -> tuple[torch.Tensor, np.ndarray]:
    _, dtype, family, _ = key.split("/")
    a, b, c = (golden(f"mma/{dtype}/{family}/{t}", d) for t, d in (("a", dtype), ("b", dtype), ("c", "float32")))
    return run_dot(a, b, c), GOLDEN[key]


@pytest.mark.parametrize("key", keys("mma/"))
def test_dot_is_the_tensor_core(key):
    actual, expected = run_mma(key)
    assert_bits(actual, expected)


@pytest.mark.parametrize(
    "name, value",
    [
        ("SLAB", 8),
        ("SLAB", 4),
        ("FRACTION", 24),
        ("FRACTION", 26),
        ("LOWEST_E", -132),
        ("LOWEST_E", -134),
        ("LOWEST_E", -300),
        ("BELOW", 0),  # rounds to nearest
        ("canonical", lambda x: x),
    ],
)
def test_a_wrong_model_of_the_tensor_core_is_caught(monkeypatch, name, value):
    monkeypatch.setattr(tensor_core, name, value)
    assert any((bits(actual) != expected).any() for actual, expected in map(run_mma, keys("mma/")))


def test_a_subnormal_operand_has_its_formats_lowest_exponent(monkeypatch):
    mma = tensor_core.mma
    monkeypatch.setattr(tensor_core, "mma", lambda a, b, c, lowest: mma(a, b, c, lowest - 1))
    assert any((bits(actual) != expected).any() for actual, expected in map(run_mma, keys("mma/")))


def test_a_slab_of_zeros_beside_an_infinity_is_not_left_out():
    zeros, c = np.zeros((16, 16), np.float32), np.ones((16, 16), np.float32)
    infinite = np.where(np.eye(16, dtype=bool), np.float32(np.inf), np.float32(1))
    for a, b in ((zeros, infinite), (infinite, zeros)):
        assert (tensor_core.mma(a, b, c, -126).view(np.int32) == 0x7FFFFFFF).all()
    assert (tensor_core.mma(zeros, zeros + 1, c, -126) == c).all()


def test_a_narrow_dot_is_columns_of_a_wide_one():
    g = np.random.default_rng(0)
    a, b, c = (g.standard_normal(s).astype(np.float16).astype(np.float32) for s in ((128, 48), (48, 64), (128, 64)))
    wide = tensor_core.mma(a, b, c, -14)
    assert tensor_core.WIDE > 8 and len(a) > tensor_core.WIDE, "it is computed transposed"
    narrow = tensor_core.mma(a, b[:, :8], c[:, :8], -14)
    assert narrow.flags.c_contiguous and (narrow == wide[:, :8]).all()


@pytest.mark.parametrize("key", keys("dot_fp32/"))
def test_fp32_dot_is_a_chain_of_fmas(key):
    a, b, c = (golden(key.replace("out", t), "float32") for t in "abc")
    assert_bits(run_dot(a, b, c, precision="ieee"), GOLDEN[key])


def test_an_fma_rounds_once(monkeypatch):
    x, y, c = np.float32([[1 + 2.0**-23]]), np.float32([[2.0**-24 - 2.0**-47]]), np.float32([[1 + 2.0**-23]])
    dot = lambda: tensor_core.fma_dot(x.repeat(3, 0), y.repeat(9, 1), c.repeat(3, 0).repeat(9, 1))
    assert (dot() == c).all(), "2^-70 below the middle of c and the next number"
    tiny = np.float32([[2.0**-100]]), np.float32([[2.0**-30 * (1 + 2.0**-23)]]), np.float32([[2.0**-126]])
    assert (tensor_core.fma_dot(*tiny) == np.float32(2.0**-126 + 2.0**-130)).all()
    assert (tensor_core.fma_dot(np.float32([[0.0]]), y, np.float32([[-0.0]])).view(np.int32) == 0).all(), "−0 + 0 = +0"
    twice = lambda a, b, out: np.copyto(out, a.astype(np.float64) * b + out, casting="same_kind")
    monkeypatch.setattr(tensor_core, "_fmas", twice)
    assert (dot() == 1 + 2.0**-22).all(), "rounded to fp64, and then to even"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_order_of_slabs_matters(dtype):
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(32, 64, generator=g).to(dtype), torch.randn(64, 32, generator=g).to(dtype)
    c = torch.randn(32, 32, generator=g)
    whole = run_dot(a, b, c)
    assert_bits(run_dot(a, b, c, step=16), bits(whole))
    inside = torch.cat([16 * s + torch.randperm(16, generator=g) for s in range(4)])
    assert_bits(run_dot(a[:, inside].contiguous(), b[inside].contiguous(), c), bits(whole))
    across = torch.arange(64).roll(8)
    assert (bits(run_dot(a[:, across].contiguous(), b[across].contiguous(), c)) != bits(whole)).any()


def test_padding_with_zeros_changes_nothing():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(32, 24, generator=g), torch.randn(24, 32, generator=g)
    a, b, c = a.bfloat16(), b.bfloat16(), torch.randn(32, 32, generator=g)
    want = tensor_core.mma(a.float().numpy(), b.float().numpy(), c.numpy(), -126)
    a, b = torch.nn.functional.pad(a, (0, 8)), torch.nn.functional.pad(b, (0, 0, 0, 8))
    assert_bits(run_dot(a, b, c), want.view(np.int32))
    a[3:], b[:, 5] = 0, -0.0
    out = run_dot(a, b, c)
    assert_bits(out[:3, :5], want.view(np.int32)[:3, :5])
    assert_bits(out[3:], bits(c[3:]))
    a[:, :16], b[16:] = 0, 0
    assert_bits(run_dot(a, b, c), bits(c))


@triton.jit
def batched_dot(a, b, out, ACC: tl.constexpr):
    s, i = tl.arange(0, 2), tl.arange(0, 16)
    at = s[:, None, None] * 256 + i[None, :, None] * 16 + i[None, None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), out_dtype=ACC))


def test_batched_dot_is_a_dot_for_each():
    a, b = torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(2, 16, 16)
    batched_dot[(1,)](a, b, out, ACC=tl.float32)
    assert_bits(out, bits(run_dot(a, b, torch.zeros(2, 16, 16))))


@pytest.mark.parametrize("key", keys("binary/", "ternary/"))
def test_arithmetic(key):
    group, dtype, op = key.split("/")
    inputs = [golden(f"{group}/{dtype}/{t}", dtype) for t in ("ab" if group == "binary" else "abc")]
    assert_bits(run_elementwise(op, *inputs), GOLDEN[key], *inputs)


@pytest.mark.parametrize("key", keys("cast/"))
def test_casts(key):
    _, source, target, _ = key.split("/")
    target, _, rounding = target.partition("_")
    a = golden(key.replace("/out", "/a"), source)
    assert_bits(run_cast(a, getattr(torch, target), rounding or None), GOLDEN[key], a)
    if not rounding:
        implicit = torch.empty(a.shape, dtype=getattr(torch, target))
        store[(triton.cdiv(a.numel(), 256),)](a, implicit, a.numel())
        assert_bits(implicit, GOLDEN[key], a)


def test_rounding_to_bf16_around_every_tie():
    top = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    around = top + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    x = torch.from_numpy(around.ravel().view(np.float32))
    x = x[~x.isnan()]
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    store[(triton.cdiv(x.numel(), 256),)](x, out, x.numel())
    assert_bits(out, bits(x.bfloat16()), x)


def test_sum_makes_the_nan_of_the_gpu():
    payload = torch.tensor([0x7F800001, 0], dtype=torch.int32).view(torch.float32)
    for x in payload, torch.tensor([float("inf"), -float("inf")]):
        assert_bits(run_elementwise("sum", x), [0x7FFFFFFF, 0x7FFFFFFF], x)


def test_bf16_comparison_constant_maximum_and_clamp():
    x = torch.tensor([-2.0, 1.0, -0.0, float("nan"), 3.0, -1.0, -3.0, 0.5]).bfloat16()
    y = torch.tensor([-1.0, -1.0, 0.0, 1.0, float("inf"), -1.0, 2.0, 0.75]).bfloat16()
    assert_bits(run_elementwise("less", x, y), bits((x < y).bfloat16()))
    y = y[:3]
    assert_bits(run_elementwise("constant", y), bits(torch.full_like(y, 1.7)))
    assert_bits(run_elementwise("max", y), bits(torch.full_like(y, 0.0)))
    low, high = torch.full_like(x, -1.5), torch.full_like(x, 1.5)
    clamped = x.clamp(-1.5, 1.5)
    assert_bits(run_elementwise("clamp_nan", x, low, high).nan_to_num(9.0), bits(clamped.nan_to_num(9.0)))
    assert_bits(run_elementwise("clamp", x, low, high), bits(clamped.nan_to_num(-1.5)))


@given(st.data())
def test_memory_is_read_and_written_as_by_stock_triton(data):
    dtype = data.draw(st.sampled_from([tl.bfloat16, tl.float32, tl.int1, tl.int64]))
    element = stock._get_np_dtype(dtype)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    memory = rng.integers(0, 2 if dtype is tl.int1 else 255, 600).astype(element)
    skew = data.draw(st.sampled_from([0, 0, 1]))  # 1: one pointer is not aligned
    at = rng.integers(0, 590, (16, 32)) * element.itemsize
    at[3, 4] += skew
    pointers = TensorHandle(memory.ctypes.data + at.astype(np.uint64), tl.pointer_type(dtype))
    mask = TensorHandle(rng.random(at.shape) < data.draw(st.sampled_from([0, 0.5, 1])), tl.int1)
    pointers.data[~mask.data] = data.draw(st.sampled_from([0, 2**63]))  # nobody's memory
    other = data.draw(st.sampled_from([None, TensorHandle(np.ones(at.shape, element), dtype)]))
    ours, theirs = stock.interpreter_builder, stock.InterpreterBuilder()
    loaded = [b.create_masked_load(pointers, mask, other, None, None, False) for b in (ours, theirs)]
    assert loaded[0].data.tobytes() == loaded[1].data.tobytes() and loaded[0].dtype == loaded[1].dtype
    value, before = TensorHandle(rng.permutation(loaded[1].data.ravel()).reshape(at.shape), dtype), memory.copy()
    written = []
    for each in ours, theirs:
        memory[:] = before
        each.create_masked_store(pointers, value, mask, None, None)
        written.append(memory.tobytes())
    assert written[0] == written[1]


@given(
    st.tuples(st.integers(1, 20), st.integers(1, 40)),
    st.tuples(st.integers(-20, 24), st.sampled_from(range(-32, 48, 8))),
    st.sampled_from([tl.bfloat16, tl.float32]),
)
def test_a_descriptor_reads_and_writes_what_is_inside_as_by_stock_triton(shape, offsets, dtype):
    element = stock._get_np_dtype(dtype)
    memory = np.arange(20 * 48, dtype=element)
    integers = lambda ns, t: [TensorHandle(np.array([n]), t) for n in ns]
    base = TensorHandle(np.array([memory.ctypes.data], np.uint64), tl.pointer_type(dtype))
    zero = ir.PADDING_OPTION.PAD_ZERO
    at = integers(offsets, tl.int64)
    ours, theirs = stock.interpreter_builder, stock.InterpreterBuilder()
    tiles, written = [], []
    for each in ours, theirs:
        memory[:] = np.arange(20 * 48)
        desc = stock.TensorDescHandle(base, integers(shape, tl.int64), integers((48, 1), tl.int64), [16, 16], zero)
        tiles.append(each.create_descriptor_load(desc, at, None, None).data.tobytes())
        each.create_descriptor_store(desc, TensorHandle(np.full((16, 16), 7, element), dtype), at)
        written.append(memory.tobytes())
    assert tiles[0] == tiles[1] and written[0] == written[1]


BF16, FP32 = torch.ones(256, dtype=torch.bfloat16), torch.ones(256)


@pytest.mark.parametrize(
    "refused, reason",
    [
        (lambda: run_elementwise("sum", BF16), "reduction or scan of bf16 .* cast to fp32 first"),
        (lambda: run_elementwise("cumsum", BF16), "reduction or scan of bf16 .* cast to fp32 first"),
        (lambda: run_elementwise("atomic_add", BF16), "atomic operation on bf16 .* cast to fp32 first"),
        (lambda: run_elementwise("exp", BF16), "Expected dtype .* but got bf16"),
        (lambda: run_elementwise("fp8", FP32), "a cast to fp8e5 is not supported"),
        (lambda: run_cast(FP32.double(), torch.bfloat16, "rtz"), "a cast from fp64 to bf16 toward zero"),
        (lambda: run_dot(*FP32.view(1, 16, 16).expand(3, 16, 16).contiguous()), 'pass input_precision="ieee"'),
        (
            lambda: batched_dot[(1,)](*torch.ones(3, 2, 16, 16).half(), ACC=tl.float16),
            "accumulates in fp32, not in fp16",
        ),
    ],
    ids=lambda x: x.split(" .*")[0] if isinstance(x, str) else "",
)
def test_what_is_not_right_raises(refused, reason):
    with pytest.raises(InterpreterError, match=reason):
        refused()


def test_install_is_idempotent_and_leaves_triton_language_alone():
    before = dict(vars(stock))
    interpreter.install()
    assert dict(vars(stock)) == before
    run_elementwise("add", BF16)
    assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.to)


def test_install_refuses_other_versions(monkeypatch):
    monkeypatch.setattr(stock.interpreter_builder, "__class__", stock.InterpreterBuilder)
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    with pytest.raises(RuntimeError, match="checked with 3.7.1, but this is Triton 3.9.0"):
        interpreter.install()
    assert type(stock.interpreter_builder) is stock.InterpreterBuilder


@triton.jit
def _printed_kernel(x):
    print(tl.load(x + tl.arange(0, 2)))


def test_a_bf16_tile_is_shown_as_its_numbers(capsys):
    _printed_kernel[(1,)](torch.tensor([0.5, -2.0], dtype=torch.bfloat16))
    assert capsys.readouterr().out == "[ 0.5 -2. ] bf16\n"


def _operands() -> dict[str, object]:
    """Tensors of every dtype and shape that an operator may meet, made inside a kernel's language, and numbers."""
    rng, made = np.random.default_rng(0), {}
    hard = [0.0, -0.0, np.nan, np.inf, -np.inf, 3e38, -3e38, 2.0**-149]
    for dtype in (tl.float32, tl.float16, tl.bfloat16, tl.int1, tl.int32, tl.int64, tl.uint8):
        for shape in ((), (8,), (1,), (8, 1), (1, 8), (8, 8)):
            n = int(np.prod(shape)) or 1
            values = rng.permutation(np.resize(hard + [1.5, -7.25, 100.0, 2.0**20], n + 3))[:n]
            if not dtype.is_floating():
                values = rng.integers(0, 2 if dtype == tl.int1 else 200, n)
            if dtype == tl.bfloat16:
                data = formats.to_bf16(values.astype(np.float32))
            else:
                with np.errstate(over="ignore"):
                    data = values.astype(stock._get_np_dtype(dtype))
            data = data.reshape(shape or (1,))
            kind = tl.block_type(dtype, list(shape)) if shape else dtype
            made[f"{dtype}{list(shape)}"] = tl.tensor(TensorHandle(data, dtype), kind)
    pointers = np.uint64(2**40) + 4 * np.arange(8, dtype=np.uint64)
    kind = tl.pointer_type(tl.float32)
    made["pointers"] = tl.tensor(TensorHandle(pointers, kind), tl.block_type(kind, [8]))
    made["pointer"] = tl.tensor(TensorHandle(pointers[:1], kind), kind)
    return made | {
        repr(x): x for x in (0, 3, -1, 2**31, 0.0, -0.0, 0.1, 2.0**-140, 2.0**900, float("nan"), True, False)
    }


def _told(operator, *operands):
    """What an operator answers, down to the bits, or that it raised."""
    try:
        out = operator(*operands)
    except Exception as error:
        return type(error)
    data = out.handle.data
    return str(out.type), str(out.dtype), [str(n) for n in out.shape], data.shape, data.dtype, data.tobytes()


@pytest.mark.parametrize("name", [*tensors.OPERATORS, "__getitem__"])
def test_the_short_way_of_an_operator_answers_what_triton_does(name):
    operands, answered = _operands(), 0
    general, short = next((out, into) for owner, n, out, into in launch._patches() if n == name)
    indices = ((slice(None), None), (None, slice(None)), (None,), (slice(None), slice(None)), (slice(None), None, None))
    others = {repr(i): i for i in indices} if name == "__getitem__" else operands
    with launch._language():
        for a, x in operands.items():
            for b, y in others.items():
                if isinstance(x, tl.tensor):
                    told = _told(short, x, y)
                    assert told == _told(general, x, y), (a, name, b)
                    answered += not isinstance(told, type)
    assert answered > 100, "nearly all that was asked raised"


def test_a_short_way_that_errs_is_seen():
    short = tensors.short_operator(tl.tensor.__add__, np.subtract, tensors.NUMBERS)
    x = tl.tensor(TensorHandle(np.ones(8, np.float32), tl.float32), tl.block_type(tl.float32, [8]))
    with launch._language():
        assert _told(short, x, x) != _told(tl.tensor.__add__, x, x)
