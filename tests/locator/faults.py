"""Faults planted in models, each in one op: the localiser must name that op, and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from locator import invariant as exact
from locator import ops
from locator.hosts import User, decoder, floats, ids, qwen3

import bi_kernels

FORWARD, BACKWARD, PARAMETER = "forward", "backward", "parameter gradient"
HEAD = partial(exact.lm_head_logprob, head=ops.spread_backward_in_halves)
COMPILED = torch.compile(ops.compiled_swiglu, backend="aot_eager")
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


def planted(name: str, direction: str, op: str = SUM, module: str = LAYER, loss=None, **made) -> Fault:
    """Returns a fault in a decoder of invariant ops; made: which are replaced, and the decoder's options."""
    return Fault(
        name, lambda device: (decoder(device, **made), ids(device), *([loss] if loss else [])), module, op, direction
    )


def rounded(name: str, op: str, ours=exact) -> Fault:
    """Returns a fault in the gradient of an op of `ours`."""
    change = lambda *x: ops.rounded_gradient(getattr(ours, op)(*x))
    return planted(name, BACKWARD, "*aten._to_copy*", ops=ours, **{op: change})


def attention(core: Callable) -> Callable:
    return partial(exact.attention, core=core)


def in_user(name: str, direction: str, op: str, function: Callable) -> Fault:
    return Fault(name, lambda device: (User(function), floats(device)), "inner.1", op, direction)


def in_qwen3(name: str, direction: str, where: str, change: Callable) -> Fault:
    return Fault(name, lambda device: qwen3(device, where, change), f"model.layers.*.{where}", SUM, direction)


FAULTS = (
    planted("linear that splits K for few rows", FORWARD, linear=ops.few_rows_in_halves),
    planted("linear whose dX splits the sum for many rows", BACKWARD, linear=ops.spread_backward_in_halves),
    planted("linear whose dW splits the tokens", PARAMETER, linear=partial(exact.linear, fold=ops.fold_in_parts)),
    planted("dbias over all tokens of a call", PARAMETER, linear=ops.linear_with_bias, biased=True),
    planted(
        "norm whose dweight sums a call's tokens at once",
        PARAMETER,
        rms_norm=partial(exact.rms_norm, fold=ops.fold_as_one),
    ),
    planted("attention that splits the keys of long sequences", FORWARD, attention=attention(ops.split_by_length)),
    planted("softmax whose sum splits in a batch", FORWARD, attention=attention(ops.softmax_by_batch)),
    planted(
        "attention whose dv splits the queries of long sequences", BACKWARD, attention=attention(ops.backward_by_length)
    ),
    planted("RoPE by row", FORWARD, "*aten.index.Tensor*", rope=ops.rope_by_row),
    rounded("RoPE whose gradient is rounded in large calls", "rope"),
    planted("residual rounded to bf16 in large calls", FORWARD, "*aten._to_copy*", add_rms_norm=ops.residual_downcast),
    planted("swiglu with another backward for many rows", BACKWARD, "*aten.*", swiglu=ops.swiglu_backward),
    planted("dropout without a counter", FORWARD, "*aten.*", swiglu=ops.swiglu_with_dropout),
    planted("update in place through a view", FORWARD, "*aten.mul*", swiglu=ops.swiglu_through_a_view),
    planted(
        "checkpointed op that is another when recomputed",
        BACKWARD,
        "*aten.mul.Tensor*",
        swiglu=ops.swiglu_otherwise_when_recomputed,
        checkpointing=True,
    ),
    planted(
        "embedding whose gradient is added in another order",
        PARAMETER,
        "*aten.*",
        "",
        embedding=partial(exact.embedding, fold=ops.fold_reversed),
    ),
    planted("LM head in chunks for many rows", FORWARD, module="", lm_head_logprob=ops.chunked_head),
    planted("loss over the call's own tokens", FORWARD, "aten.div.Tensor", "", loss=ops.local_denominator),
    planted("compiled op that is another for many rows", FORWARD, "*compiled aten.mul*", swiglu=COMPILED),
    in_user("reduction over the batch in a user's module", FORWARD, "*aten.div.Tensor", ops.share_of_the_largest),
    in_user("cumsum that runs on from sample to sample", FORWARD, "aten.cumsum*", ops.cumsum_over_the_batch),
    in_user("16-bit product under autocast for many rows", FORWARD, "*aten._to_copy*", ops.autocast_when_many),
    in_user("autograd.Function with another backward", BACKWARD, "*aten.*", ops.reciprocal),
    in_user("Triton kernel whose tile follows the rows", FORWARD, "_row_mean_kernel", ops.row_mean),
    planted(
        "our linear with K in halves for few rows", FORWARD, "*_gemm_kernel*", ops=bi_kernels, linear=ops.ours_in_halves
    ),
    planted(
        "our swiglu with a rounded gradient",
        BACKWARD,
        "*aten._to_copy*",
        ops=bi_kernels,
        swiglu=ops.ours_rounded_backward,
    ),
    in_qwen3("Transformers' down_proj in halves for few rows", FORWARD, "mlp.down_proj", ops.few_rows_in_halves),
    in_qwen3("Transformers' q_proj whose dX splits the sum", BACKWARD, "self_attn.q_proj", ops.backward_in_halves),
    planted("LM head whose dX splits the vocabulary", BACKWARD, module="", lm_head_logprob=HEAD),
    rounded("QK-norm whose gradient is rounded in large calls", "qk_norm"),
    rounded("our RoPE whose gradient is rounded in large calls", "rope", bi_kernels),
    planted(
        "linear whose dW takes the tokens backwards",
        PARAMETER,
        "*aten.flip*",
        linear=partial(exact.linear, fold=ops.fold_reversed),
    ),
)
