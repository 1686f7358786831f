"""Faults planted in models, each in one op: the localiser must name that op, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from locator import invariant as exact
from locator.hosts import User, decoder, floats, ids, qwen3
from locator.ops import (
    BACKWARD,
    FORWARD,
    PARAMETER,
    LinearBackwardInHalves,
    Reciprocal,
    RoundedGradient,
    SwigluBackward,
    attention_backward_by_length,
    attention_softmax_by_batch,
    attention_split_by_length,
    attention_with,
    autocast_when_many,
    chunked_head,
    compiled_swiglu,
    cumsum_over_the_batch,
    few_rows_in_halves,
    fold_as_one,
    fold_in_parts,
    fold_reversed,
    head_backward_in_halves,
    linear_in_halves_for_few_rows,
    linear_with_bias,
    local_denominator,
    ours_in_halves,
    ours_rounded_backward,
    residual_downcast,
    rope_by_row,
    row_mean,
    swiglu_otherwise_when_recomputed,
    swiglu_through_a_view,
    swiglu_with_dropout,
)

import bi_kernels

SUM = "*bi_kernels_audit.total*"
LAYER = "layers.*"


@dataclass(frozen=True)
class Fault:
    """build(device) returns (model, batch) or (model, batch, loss). module, op: patterns of what must be named."""

    name: str
    build: Callable
    module: str
    op: str
    direction: str
    layouts: Sequence[str] = ("batch", "singles")


def planted(name: str, direction: str, op: str = SUM, module: str = LAYER, loss=None, **made) -> Fault:
    """Returns a fault in a decoder of invariant ops; made: which are replaced, and the decoder's options."""
    return Fault(
        name, lambda device: (decoder(device, **made), ids(device), *([loss] if loss else [])), module, op, direction
    )


def in_user(name: str, direction: str, op: str, function: Callable) -> Fault:
    return Fault(name, lambda device: (User(function), floats(device)), "inner.1", op, direction)


def in_qwen3(name: str, direction: str, where: str, change: Callable) -> Fault:
    return Fault(name, lambda device: qwen3(device, where, change), f"model.layers.*.{where}", SUM, direction)


def linear_backward_in_halves(x, w, b=None):
    return LinearBackwardInHalves.apply(x, exact.spread(w, x.shape[:-1]))


FAULTS = (
    planted("linear that splits K for few rows", FORWARD, linear=linear_in_halves_for_few_rows),
    planted("linear whose dX splits the sum for many rows", BACKWARD, linear=linear_backward_in_halves),
    planted(
        "linear whose dW splits the tokens", PARAMETER, linear=lambda x, w, b=None: exact.linear(x, w, b, fold_in_parts)
    ),
    planted("dbias over all tokens of a call", PARAMETER, linear=linear_with_bias, biased=True),
    planted(
        "norm whose dweight sums a call's tokens at once",
        PARAMETER,
        rms_norm=lambda x, w, eps: exact.rms_norm(x, w, eps, fold_as_one),
    ),
    planted(
        "attention that splits the keys of long sequences", FORWARD, attention=attention_with(attention_split_by_length)
    ),
    planted("softmax whose sum splits in a batch", FORWARD, attention=attention_with(attention_softmax_by_batch)),
    planted(
        "attention whose dv splits the queries of long sequences",
        BACKWARD,
        attention=attention_with(attention_backward_by_length),
    ),
    planted("RoPE by row", FORWARD, "*aten.index.Tensor*", rope=rope_by_row),
    planted(
        "RoPE whose gradient is rounded in large calls",
        BACKWARD,
        "*aten._to_copy*",
        rope=lambda x, table, at: RoundedGradient.apply(exact.rope(x, table, at)),
    ),
    planted("residual rounded to bf16 in large calls", FORWARD, "*aten._to_copy*", add_rms_norm=residual_downcast),
    planted("swiglu with another backward for many rows", BACKWARD, "*aten.*", swiglu=SwigluBackward.apply),
    planted("dropout without a counter", FORWARD, "*aten.*", swiglu=swiglu_with_dropout),
    planted("update in place through a view", FORWARD, "*aten.mul*", swiglu=swiglu_through_a_view),
    planted(
        "checkpointed op that is another when recomputed",
        BACKWARD,
        "*aten.mul.Tensor*",
        swiglu=swiglu_otherwise_when_recomputed,
        checkpointing=True,
    ),
    planted(
        "embedding whose gradient is added in another order",
        PARAMETER,
        "*aten.*",
        "",
        embedding=lambda i, w: exact.embedding(i, w, fold_reversed),
    ),
    planted("LM head in chunks for many rows", FORWARD, module="", lm_head_logprob=chunked_head),
    planted("loss over the call's own tokens", FORWARD, "aten.div.Tensor", "", loss=local_denominator),
    planted(
        "compiled op that is another for many rows",
        FORWARD,
        "*compiled aten.mul*",
        swiglu=torch.compile(compiled_swiglu, backend="aot_eager"),
    ),
    in_user(
        "reduction over the batch in a user's module",
        FORWARD,
        "*aten.div.Tensor",
        lambda x: x / x.detach().abs().amax(),
    ),
    in_user("cumsum that runs on from sample to sample", FORWARD, "aten.cumsum*", cumsum_over_the_batch),
    in_user("16-bit product under autocast for many rows", FORWARD, "*aten._to_copy*", autocast_when_many),
    in_user("autograd.Function with another backward", BACKWARD, "*aten.*", Reciprocal.apply),
    in_user("Triton kernel whose tile follows the rows", FORWARD, "_row_mean_kernel", lambda x: row_mean(x.detach())),
    planted(
        "our linear with K in halves for few rows", FORWARD, "*_gemm_kernel*", ops=bi_kernels, linear=ours_in_halves
    ),
    planted(
        "our swiglu with a rounded gradient", BACKWARD, "*aten._to_copy*", ops=bi_kernels, swiglu=ours_rounded_backward
    ),
    in_qwen3("Transformers' down_proj in halves for few rows", FORWARD, "mlp.down_proj", few_rows_in_halves),
    in_qwen3(
        "Transformers' q_proj whose dX splits the sum",
        BACKWARD,
        "self_attn.q_proj",
        lambda x, w: LinearBackwardInHalves.apply(x, w.expand(*x.shape[:-1], *w.shape)),
    ),
    planted(
        "LM head whose dX splits the vocabulary",
        BACKWARD,
        module="",
        lm_head_logprob=lambda x, w, targets, t: exact.lm_head_logprob(x, w, targets, t, head_backward_in_halves),
    ),
    planted(
        "QK-norm whose gradient is rounded in large calls",
        BACKWARD,
        "*aten._to_copy*",
        qk_norm=lambda x, w, eps: RoundedGradient.apply(exact.qk_norm(x, w, eps)),
    ),
    planted(
        "our RoPE whose gradient is rounded in large calls",
        BACKWARD,
        "*aten._to_copy*",
        ops=bi_kernels,
        rope=lambda x, table, at: RoundedGradient.apply(bi_kernels.rope(x, table, at)),
    ),
    planted(
        "linear whose dW takes the tokens backwards",
        PARAMETER,
        "*aten.flip*",
        linear=lambda x, w, b=None: exact.linear(x, w, b, fold_reversed),
    ),
)
