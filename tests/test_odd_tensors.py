"""Tensors and arguments that kernels cannot read, and mistakes that everybody makes: right, or one sentence."""

import warnings
from collections.abc import Callable

import pytest
import torch
from conftest import assert_same_bits
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import bi_kernels as bi


def drawn(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


X, W, V = drawn(4, 32), drawn(16, 32), drawn(32)
CALLS = {  # of an op, by x
    "linear": lambda x: bi.linear(x, W.to(x.dtype)),
    "rms_norm": lambda x: bi.rms_norm(x, V.to(x.dtype)),
    "swiglu": lambda x: bi.swiglu(x, X.to(x.dtype)),
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
            NotImplementedError, match="^bi_kernels: an op was called inside a torch.func transform or w"
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
REFUSED = {
    "add_rms_norm: residual is a NoneType, expected a torch.Tensor": lambda: bi.add_rms_norm(X, None, V),
    "rms_norm: eps is nan, expected a number from 0 on": lambda: bi.rms_norm(X, V, float("nan")),
    "rms_norm: eps is -1.0, expected a number from 0 on": lambda: bi.rms_norm(X, V, -1.0),
    "rms_norm: eps is an integer of 401 digits, expected a number": lambda: bi.rms_norm(X, V, 10**400),
    "attention: scale is an integer of 401 digits, expected a number": lambda: bi.attention(Q, Q, Q, scale=10**400),
    "attention: causal is 'no', expected True or False": lambda: bi.attention(Q, Q, Q, causal="no"),
    "attention: left_padded is 1, expected True or False": lambda: bi.attention(Q, Q, Q, left_padded=1),
    "token_logprob: temperature is nan, expected a positive number": lambda: bi.token_logprob(
        X, torch.arange(4), temperature=float("nan")
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_odd_arguments_are_one_sentence(said):
    with pytest.raises((TypeError, ValueError)) as error:
        REFUSED[said]()
    assert str(error.value) == said


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
    grads.finish()
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
