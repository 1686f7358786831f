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


@dataclass(frozen=True)
class Fault:
    """build(device) returns (model, batch) or (model, batch, loss). module, op: patterns of what must be named."""

    name: str
    build: Callable
    module: str
    op: str
    direction: str
    layouts: Sequence[str] = ("batch", "singles")
    needs: str = ""  # a package, or "triton" where it runs on a GPU or the interpreter


def planted(name: str, module: str, op: str, direction: str, loss=None, layouts=("batch", "singles"), **made) -> Fault:
    """Returns a fault in a decoder of invariant ops; made: which are replaced, and the decoder's options."""
    build = lambda device: (decoder(device, **made), ids(device), *([loss] if loss else []))
    return Fault(name, build, module, op, direction, layouts)


def in_user(name: str, op: str, direction: str, function: Callable, needs: str = "", rows=floats) -> Fault:
    return Fault(name, lambda device: (User(function), rows(device)), "inner.1", op, direction, needs=needs)


def in_qwen3(name: str, where: str, direction: str, change: Callable) -> Fault:
    build = lambda device: qwen3(device, where, change)
    return Fault(name, build, f"model.layers.*.{where}", SUM, direction, needs="transformers")


LAYER = "layers.*"
FAULTS = (
    planted("linear that splits K for few rows", LAYER, SUM, FORWARD, linear=linear_in_halves_for_few_rows),
    planted(
        "linear whose dX splits the sum for many rows",
        LAYER,
        SUM,
        BACKWARD,
        linear=lambda x, w, b=None: LinearBackwardInHalves.apply(x, exact.spread(w, x.shape[:-1])),
    ),
    planted(
        "linear whose dW splits the tokens",
        LAYER,
        SUM,
        PARAMETER,
        linear=lambda x, w, b=None: exact.linear(x, w, b, fold_in_parts),
    ),
    planted("dbias over all tokens of a call", LAYER, SUM, PARAMETER, linear=linear_with_bias, biased=True),
    planted(
        "norm whose dweight sums a call's tokens at once",
        LAYER,
        SUM,
        PARAMETER,
        rms_norm=lambda x, w, eps: exact.rms_norm(x, w, eps, fold_as_one),
    ),
    planted(
        "attention that splits the keys of long sequences",
        LAYER,
        SUM,
        FORWARD,
        attention=attention_with(attention_split_by_length),
    ),
    planted(
        "softmax whose sum splits in a batch", LAYER, SUM, FORWARD, attention=attention_with(attention_softmax_by_batch)
    ),
    planted(
        "attention whose dv splits the queries of long sequences",
        LAYER,
        SUM,
        BACKWARD,
        attention=attention_with(attention_backward_by_length),
    ),
    planted("RoPE by row", LAYER, "*aten.index.Tensor*", FORWARD, rope=rope_by_row),
    planted(
        "RoPE whose gradient is rounded in large calls",
        LAYER,
        "*aten._to_copy*",
        BACKWARD,
        rope=lambda x, table, at: RoundedGradient.apply(exact.rope(x, table, at)),
    ),
    planted(
        "residual rounded to bf16 in large calls",
        LAYER,
        "*aten._to_copy*",
        FORWARD,
        add_rms_norm=lambda x, r, w, eps: residual_downcast(x, r, w, eps),
    ),
    planted("swiglu with another backward for many rows", LAYER, "*aten.*", BACKWARD, swiglu=SwigluBackward.apply),
    planted("dropout without a counter", LAYER, "*aten.*", FORWARD, swiglu=swiglu_with_dropout),
    planted("update in place through a view", LAYER, "*aten.mul*", FORWARD, swiglu=swiglu_through_a_view),
    planted(
        "checkpointed op that is another when recomputed",
        LAYER,
        "*aten.mul.Tensor*",
        BACKWARD,
        swiglu=swiglu_otherwise_when_recomputed,
        checkpointing=True,
    ),
    planted(
        "embedding whose gradient is added in another order",
        "",
        "*aten.*",
        PARAMETER,
        embedding=lambda i, w: exact.embedding(i, w, fold_reversed),
    ),
    planted("LM head in chunks for many rows", "", SUM, FORWARD, lm_head_logprob=chunked_head),
    planted("loss over the call's own tokens", "", "aten.div.Tensor", FORWARD, loss=local_denominator),
    planted(
        "compiled op that is another for many rows",
        LAYER,
        "*compiled aten.mul*",
        FORWARD,
        swiglu=torch.compile(compiled_swiglu, backend="aot_eager"),
    ),
    in_user(
        "reduction over the batch in a user's module",
        "*aten.div.Tensor",
        FORWARD,
        lambda x: x / x.detach().abs().amax(),
    ),
    in_user("cumsum that runs on from sample to sample", "aten.cumsum*", FORWARD, cumsum_over_the_batch),
    in_user("16-bit product under autocast for many rows", "*aten._to_copy*", FORWARD, autocast_when_many),
    in_user("autograd.Function with another backward", "*aten.*", BACKWARD, Reciprocal.apply),
    in_user("Triton kernel whose tile follows the rows", "_row_mean_kernel", FORWARD, lambda x: row_mean(x.detach())),
    planted(
        "our linear with K in halves for few rows",
        LAYER,
        "*_gemm_kernel*",
        FORWARD,
        ops=bi_kernels,
        linear=ours_in_halves,
    ),
    planted(
        "our swiglu with a rounded gradient",
        LAYER,
        "*aten._to_copy*",
        BACKWARD,
        ops=bi_kernels,
        swiglu=ours_rounded_backward,
    ),
    in_qwen3("Transformers' down_proj in halves for few rows", "mlp.down_proj", FORWARD, few_rows_in_halves),
    in_qwen3(
        "Transformers' q_proj whose dX splits the sum",
        "self_attn.q_proj",
        BACKWARD,
        lambda x, w: LinearBackwardInHalves.apply(x, w.expand(*x.shape[:-1], *w.shape)),
    ),
    planted(
        "LM head whose dX splits the vocabulary",
        "",
        SUM,
        BACKWARD,
        lm_head_logprob=lambda x, w, targets, t: exact.lm_head_logprob(x, w, targets, t, head_backward_in_halves),
    ),
    planted(
        "QK-norm whose gradient is rounded in large calls",
        LAYER,
        "*aten._to_copy*",
        BACKWARD,
        qk_norm=lambda x, w, eps: RoundedGradient.apply(exact.qk_norm(x, w, eps)),
    ),
    planted(
        "our RoPE whose gradient is rounded in large calls",
        LAYER,
        "*aten._to_copy*",
        BACKWARD,
        ops=bi_kernels,
        rope=lambda x, table, at: RoundedGradient.apply(bi_kernels.rope(x, table, at)),
    ),
    planted(
        "linear whose dW takes the tokens backwards",
        LAYER,
        "*aten.flip*",
        PARAMETER,
        linear=lambda x, w, b=None: exact.linear(x, w, b, fold_reversed),
    ),
)
