"""Triton kernels whose result for a token does not depend on what else is in the batch.

Importing the package does no work; an op's module is loaded when the op is first named. With TRITON_INTERPRET=1 the
kernels run on a CPU, on Triton's interpreter as `bi_kernels.interpreter` mends it.
"""

import importlib

_OPS = {
    "silu": "ops.elementwise",
    "gelu": "ops.elementwise",
    "swiglu": "ops.elementwise",
    "add": "ops.elementwise",
    "scale": "ops.elementwise",
    "bias_add": "ops.elementwise",
    "mask_fill": "ops.elementwise",
    "cast": "ops.elementwise",
    "rope": "ops.rope",
    "rope_table": "ops.rope",
    "RopeTable": "ops.rope",
    "packed_positions": "ops.rope",
    "linear": "ops.gemm",
    "matmul": "ops.gemm",
    "rms_norm": "ops.norm",
    "qk_norm": "ops.norm",
    "add_rms_norm": "ops.norm",
    "embedding": "ops.embedding",
    "lm_head_logprob": "ops.lm_head",
    "token_logprob": "ops.logprob",
    "log_softmax": "ops.logprob",
    "attention": "ops.attention.attention",
    "TokenLayout": "tokens",
    "MainGrads": "grads",
}
__all__ = list(_OPS)


def __getattr__(name: str):
    if name not in _OPS:
        raise AttributeError(f"module 'bi_kernels' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f"bi_kernels.{_OPS[name]}"), name)
    return found


def __dir__():
    return sorted([*globals(), *_OPS])
