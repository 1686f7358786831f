"""Tensors and arguments that kernels cannot read, and mistakes that everybody makes: right, or one sentence."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import assert_same_bits
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import bi_kernels as bi
from bi_kernels.ops import elementwise


def drawn(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


X, W, V = drawn(4, 32), drawn(16, 32), drawn(32)
CALLS = {  # of an op, by x
    "linear": lambda x: bi.linear(x, W.to(x.dtype)),
    "rms_norm": lambda x: bi.rms_norm(x, V.to(x.dtype)),
    "layer_norm": lambda x: bi.layer_norm(x, V.to(x.dtype)),
    "scaled": lambda x: bi.scaled(x, V.to(x.dtype)),
    "swiglu": lambda x: bi.swiglu(x, X.to(x.dtype)),
    "row_sum": bi.row_sum,
    "softmax": bi.softmax,
    "log_softmax": bi.log_softmax,
    "token_logprob": lambda x: bi.token_logprob(x, torch.arange(4))[0],
}
KINDS: dict[str, tuple[Callable, str]] = {  # of an x; what is said of it
    "negated": (torch._neg_view, r"is a view that is negated when it is read, expected \w+\.resolve_neg\(\)"),
    "sparse": (torch.Tensor.to_sparse, r"has layout torch.sparse_coo, expected torch.strided"),
    "csr": (torch.Tensor.to_sparse_csr, r"has layout torch.sparse_csr, expected torch.strided"),
    "mkldnn": (lambda x: x.float().to_mkldnn(), r"has layout torch._mkldnn, expected torch.strided"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), "is nested, expected a tensor of one shape"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", CALLS)
def test_numbers_that_do_not_stand_in_memory_are_refused_by_name(op, kind):
    CALLS[op](X)  # the same shape passed before
    make, said = KINDS[kind]
    with pytest.raises(TypeError, match=rf"^{op}: (x|logits|gate) {said}"):
        CALLS[op](make(X))


@pytest.mark.parametrize("op", CALLS)
def test_fake_tensors_have_the_shape_that_comes(op):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = CALLS[op](mode.from_tensor(X))
    assert found.shape == CALLS[op](X).shape and found.dtype == CALLS[op](X).dtype


@pytest.mark.filterwarnings("error")
def test_a_backward_of_fake_tensors_launches_nothing():
    """As torch.compile traces it, whose first tracers do not say that they do."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        dx = elementwise._elementwise.raw("scale", mode.from_tensor(X), None, 0.5, X.dtype)
    assert isinstance(dx, FakeTensor) and dx.shape == X.shape


def test_fake_tensors_that_require_a_gradient_are_one_sentence():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(X).requires_grad_()
        with pytest.raises(NotImplementedError, match="^bi_kernels: an op was called with fake tensors t"):
            bi.linear(x, W)


@pytest.mark.parametrize("op", CALLS)
def test_forward_mode_and_func_transforms_are_one_sentence(op):
    def tangent() -> torch.Tensor:
        with forward_ad.dual_level():
            return CALLS[op](forward_ad.make_dual(X, torch.ones_like(X)))

    for call in (
        tangent,
        lambda: torch.func.grad(lambda x: CALLS[op](x).float().sum())(X),
        lambda: torch.func.vmap(CALLS[op])(X[None]),
        lambda: torch.func.jvp(CALLS[op], (X,), (X,)),
    ):
        with pytest.raises(
            NotImplementedError, match="^bi_kernels: torch.func transforms and forward-mode differentiation are n"
        ):
            call()
    with forward_ad.dual_level():  # without a tangent there is nothing to lose
        assert_same_bits(CALLS[op](X), CALLS[op](X))


def test_a_subclass_that_hides_its_numbers_is_refused(tmp_path):
    from torch.distributed.tensor import DTensor, Replicate

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        with pytest.raises(TypeError, match=r"^linear: x is a DTensor, expected x\.to_local\(\)$"):
            bi.linear(DTensor.from_local(X, mesh, [Replicate()]), W)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_ids_do_not_wrap(dtype):
    """−100 is 156 in 8 bits without a sign, and 256 is 0."""
    ids = torch.tensor([1, 127 if dtype == torch.int8 else 156])
    logits, table, hidden = drawn(2, 256), drawn(256, 32), drawn(2, 32)
    assert_same_bits(bi.token_logprob(logits, ids.to(dtype))[0], bi.token_logprob(logits, ids)[0])
    assert_same_bits(bi.lm_head_logprob(hidden, table, ids.to(dtype))[0], bi.lm_head_logprob(hidden, table, ids)[0])
    assert_same_bits(bi.embedding(ids.to(dtype), table), table[ids])
    assert bi.token_logprob(logits, ids.to(dtype))[0].all()


Q = drawn(1, 8, 2, 16)
L, G = bi.TokenLayout, bi.MainGrads
ENDS = torch.tensor([0, 3, 8])
TOKENS, HUGE = drawn(8, 2, 16), 10**5000
FP32 = "expected a number of fp32, from 2**-126 to 2**128"
REFUSED = {
    "add_rms_norm: residual is a NoneType, expected a torch.Tensor": lambda: bi.add_rms_norm(X, None, V),
    "rms_norm: eps is nan, expected a number from 0 on": lambda: bi.rms_norm(X, V, float("nan")),
    "rms_norm: eps is -1.0, expected a number from 0 on": lambda: bi.rms_norm(X, V, -1.0),
    "rms_norm: eps is an integer of 401 digits, expected a number": lambda: bi.rms_norm(X, V, 10**400),
    f"rms_norm: eps is {2.0**-1000}, {FP32}": lambda: bi.rms_norm(X, V, 2.0**-1000),
    "rms_norm: eps is True, expected a number": lambda: bi.rms_norm(X, V, True),
    "attention: scale is an integer of 401 digits, expected a number": lambda: bi.attention(Q, Q, Q, scale=10**400),
    f"attention: scale is 1e+300, {FP32}": lambda: bi.attention(Q, Q, Q, scale=1e300),
    "attention: window is an integer of 5001 digits and causal is True, expected at least 1, and causal": lambda: (
        bi.attention(Q, Q, Q, window=-HUGE)
    ),
    "attention: q has heads of width 300, expected 1 to 256": lambda: bi.attention(*[drawn(1, 2, 1, 300)] * 3),
    "attention: causal is 'no', expected True or False": lambda: bi.attention(Q, Q, Q, causal="no"),
    "attention: left_padded is 1, expected True or False": lambda: bi.attention(Q, Q, Q, left_padded=1),
    "attention: cu_seqlens is given with cu_seqlens_q or cu_seqlens_k, expected it alone, for both": lambda: (
        bi.attention(TOKENS, TOKENS, TOKENS, cu_seqlens=ENDS, cu_seqlens_q=ENDS)
    ),
    "token_logprob: temperature is nan, expected a positive number": lambda: bi.token_logprob(
        X, torch.arange(4), temperature=float("nan")
    ),
    f"token_logprob: 1 / temperature is inf, {FP32}": lambda: bi.token_logprob(X, torch.arange(4), 2.0**-1074),
    "token_logprob: ignore_index is 9223372036854775808, expected an integer of 64 bits": lambda: bi.token_logprob(
        X, torch.arange(4), ignore_index=2**63
    ),
    "lm_head_logprob: hidden is a list, expected a torch.Tensor": lambda: bi.lm_head_logprob([X], W, torch.arange(4)),
    "embedding: padding_id is an integer of 5001 digits, expected None or 0 to 15": lambda: bi.embedding(
        torch.arange(4), W, HUGE
    ),
    "gelu: approximate is a Tensor of torch.float32, expected 'none' or 'tanh'": lambda: bi.gelu(X, torch.ones(3, 3)),
    "cast: dtype is array([[0.], [0.]]); supported are bf16, fp16, fp32": lambda: bi.cast(X, np.zeros((2, 1))),
    "rope_table: head_dim is '16', expected an integer": lambda: bi.rope_table(4, "16"),
    "rope_table: positions is 2.5, expected an integer": lambda: bi.rope_table(2.5, 16),
    "rope_table: theta is nan, expected a positive number": lambda: bi.rope_table(4, 16, float("nan")),
    "rope_table: device is 'gpu', expected one of torch's": lambda: bi.rope_table(4, 16, device="gpu"),
    "packed_positions: cu_seqlens is a list, expected a torch.Tensor": lambda: bi.packed_positions([0, 3], 3),
    "packed_positions: tokens is 3.0, expected an integer": lambda: bi.packed_positions(ENDS, 3.0),
    "packed_positions: cu_seqlens is a Tensor on meta without numbers, expected some": lambda: bi.packed_positions(
        ENDS.to("meta"), 8
    ),
    "TokenLayout: rows is 2.5, expected an integer": lambda: L([0], [2], 2.5),
    "TokenLayout: width is [5], expected an integer": lambda: L.padded([3], [5]),
    "TokenLayout: left is 1, expected True or False": lambda: L.padded([3], 5, 1),
    "TokenLayout: order is a list that holds an integer of thousands of digits, expected 2 different numbers, one a "
    "sequence": lambda: L([0, 1], [1, 1], 2, [HUGE, HUGE]),
    "TokenLayout: cu_seqlens ends at 4294967296, expected fewer than 2**31 rows": lambda: L.packed([0, 2**32]),
    "TokenLayout: cu_seqlens has layout torch.sparse_coo, expected torch.strided, as cu_seqlens.to_dense() has": (
        lambda: L.packed(ENDS.to_sparse())
    ),
    "MainGrads: tied holds 'w', expected a parameter": lambda: G([parameter()], tied=["w"]),
    "MainGrads: world is 3, expected a process group, or None": lambda: G([parameter()], world=3),
    "MainGrads: sharded is 'no', expected True or False": lambda: G([parameter()], sharded="no"),
    "MainGrads: parameter 0 cannot be written to in place, expected a module's parameter": lambda: G(
        [torch.nn.Parameter(V[:1].expand(8, 1))]
    ),
    "MainGrads: group is 0.0, expected an integer": lambda: G([parameter()]).close(0.0),
    "MainGrads: the state's masters are [], expected fp32 tensors of [(16, 32)]": lambda: loaded(masters=[]),
    "MainGrads: parameters were given in inference_mode, expected a call outside of it": lambda: torch.inference_mode()(
        G
    )([parameter()]),
    "bi_kernels: an op that needs a gradient got tensors made in inference_mode; pass their clones": (
        lambda: bi.linear(X.clone().requires_grad_(), torch.inference_mode()(W.clone)())
    ),
}


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(W.clone())


def loaded(**other) -> None:
    grads = G([parameter()])
    grads.load_state_dict(grads.state_dict() | other)


@pytest.mark.parametrize("said", REFUSED)
def test_odd_arguments_are_one_sentence(said):
    with pytest.raises((TypeError, ValueError)) as error:
        REFUSED[said]()
    assert str(error.value) == said


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64])
def test_integers_of_any_kind_say_where_tokens_lie(dtype):
    lengths, pages = torch.tensor([3, 2]), torch.tensor([[1], [0]])
    call = lambda *where: bi.attention(Q2, CACHE, CACHE, lengths_k=where[0], block_table=where[1])[0]
    assert_same_bits(call(lengths.to(dtype), pages.to(dtype)), call(lengths, pages))
    assert bi.packed_positions(ENDS.to(dtype), 8).equal(bi.packed_positions(ENDS, 8))


Q2, CACHE = drawn(2, 1, 2, 16), drawn(2, 4, 2, 16)


def test_fake_tensors_beside_others_are_one_sentence():
    """A kernel would read what a fake tensor calls its address."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch.tensor([[1], [0]]))
    lengths = torch.tensor([3, 2])
    with pytest.raises(TypeError, match="^attention: block_table is a fake tensor and q is none, expected "):
        bi.attention(Q2, CACHE, CACHE, lengths_k=lengths, block_table=fake)
    with FakeTensorMode() as mode, pytest.raises(TypeError, match="^linear: x is a fake tensor and weight is none, "):
        bi.linear(mode.from_tensor(X), W)


def test_heads_of_none_have_a_gradient_of_zero():
    x, w = drawn(5, 0, 16).requires_grad_(), drawn(16).requires_grad_()
    bi.qk_norm(x, w).sum().backward()
    assert x.grad.shape == (5, 0, 16) and not w.grad.any()


def test_a_buffer_that_is_read_negated_is_refused():
    w = parameter()
    w.main_grad = torch._neg_view(torch.zeros(16, 32))
    with pytest.raises(
        TypeError, match="^linear: weight.main_grad is a view that is negated when it is read, expected"
    ):
        bi.linear(X, w).sum().backward()


def test_a_default_device_moves_no_layout_and_no_table():
    with torch.device("meta"):
        layout, table = bi.TokenLayout.packed([0, 3, 8]), bi.rope_table(4, 16)
    assert layout.slots.equal(bi.TokenLayout.packed([0, 3, 8]).slots) and table.cos.equal(bi.rope_table(4, 16).cos)


def test_wide_rows_of_padding_take_no_memory():
    assert bi.TokenLayout.padded([3, 4], 2**29).slots.numel() == 32


def test_a_parameter_is_tied_once():
    p = parameter()
    grads = bi.MainGrads([p], tied=[p, p])
    grads.release()
    assert not hasattr(p, "main_grad") and not hasattr(p, "embedding_main_grad")


@pytest.mark.parametrize("groups", [1, 2])
def test_parameters_of_no_numbers_have_a_step(groups):
    grads = bi.MainGrads([torch.nn.Parameter(torch.zeros(0, 4))], groups=groups)
    for group in grads.mine:
        grads.close(group)
    grads.join()
    assert grads.masters[0].shape == (0, 4)
    grads.finish()


def test_a_state_of_other_shapes_changes_nothing():
    """A row would be spread over the whole weight."""
    p = parameter()
    grads = bi.MainGrads([p])
    with pytest.raises(ValueError, match="^MainGrads: the state's masters are "):
        grads.load_state_dict(grads.state_dict() | {"masters": [torch.ones(32)]})
    assert p.equal(W)


def test_the_same_sequences_by_either_name():
    for q in (TOKENS, TOKENS.clone().requires_grad_()):
        expected = bi.attention(q, q, q, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)
        for a, b in zip(bi.attention(q, q, q, cu_seqlens=ENDS), expected):
            assert_same_bits(a, b)
    padded = bi.TokenLayout.padded
    assert padded([3, 4], 5, left_padded=True).slots.equal(padded([3, 4], 5, left=True).slots)


def test_a_layout_of_other_tokens_names_the_argument():
    w = parameter()
    with bi.TokenLayout.packed([0, 9]):
        for op, call in {
            "embedding: ids": lambda: bi.embedding(torch.arange(4), w),
            "lm_head_logprob: hidden": lambda: bi.lm_head_logprob(X, w, torch.arange(4)),
            "matmul: a": lambda: bi.matmul(drawn(4, 16), w),
        }.items():
            with pytest.raises(ValueError, match=f"^{op} has 4 tokens, shape"):
                call()


def test_a_compiled_log_softmax_takes_a_transposed_input():
    logits = drawn(8, 4).t()
    assert_same_bits(torch.compile(bi.log_softmax)(logits), bi.log_softmax(logits))


# Mistakes that everybody makes


def warned(call: Callable) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in found]


def test_a_second_micro_batch_without_a_layout_is_noticed():
    p = torch.nn.Parameter(W.clone())
    grads = bi.MainGrads([p])
    step = lambda: bi.linear(X, p).float().sum().backward()
    assert warned(step) == []
    (said,) = warned(step)
    assert said.startswith("linear: another micro-batch of (tokens, features) without a token layout")
    with bi.TokenLayout.packed([0, 4]):
        assert warned(step) == [], "somebody told that it is one sequence"
    grads.drop()
    assert warned(step) == [], "a step of one micro-batch"
    assert warned(lambda: bi.linear(X[None], p).float().sum().backward()) == [], "a batch of whole sequences says so"


def test_what_is_computed_again_after_its_layout_needs_none_in_a_second_micro_batch():
    p = torch.nn.Parameter(W.clone())
    found = []
    for again in (False, True):
        grads, x = bi.MainGrads([p]), X.clone().requires_grad_()
        for _ in range(2):
            with bi.TokenLayout.packed([0, 4]):
                y = checkpoint(lambda x: bi.linear(x, p), x, use_reentrant=False) if again else bi.linear(x, p)
            assert warned(y.float().square().sum().backward) == []
        found.append(p.main_grad.clone())
        grads.release()
    assert_same_bits(*found)


def test_a_layout_that_disagrees_with_attentions_sequences_is_noticed():
    q = drawn(8, 2, 16).requires_grad_()
    ends = torch.tensor([0, 4, 8], dtype=torch.int32)
    with bi.TokenLayout.packed([0, 3, 8]):
        (said,) = warned(lambda: bi.attention(q, q, q, cu_seqlens_q=ends))
    assert said == (
        "attention: cu_seqlens_q holds sequences of lengths [4, 4], but the token layout has sequences of lengths "
        "[3, 5], by which parameters' gradients are added; expected the layout of this very call"
    )
    with bi.TokenLayout.packed(ends):
        assert warned(lambda: bi.attention(q, q, q, cu_seqlens_q=ends)) == []
    padded, lengths = drawn(2, 4, 2, 16).requires_grad_(), torch.tensor([3, 4])
    call = lambda left: bi.attention(padded, padded, padded, lengths_q=lengths, lengths_k=lengths, left_padded=left)
    for left in (False, True):
        with bi.TokenLayout.padded(lengths, 4, left=left):
            assert warned(lambda left=left: call(left)) == []
            (said,) = warned(lambda left=left: call(not left))
            assert "but the token layout has sequences in other places, by which" in said


def test_rms_norm_over_heads_is_told_of_qk_norm():
    x, w = drawn(6, 2, 16).requires_grad_(), drawn(16).requires_grad_()
    with bi.TokenLayout.packed([0, 6]), pytest.raises(ValueError, match=r"; for \(…, heads, D\) use qk_norm$"):
        bi.rms_norm(x, w)
