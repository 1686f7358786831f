"""Triton kernels whose result for a token does not depend on what else is in the batch.

Importing the package does no work; an op's module is loaded when the op is first named. With TRITON_INTERPRET=1 the
kernels run on a CPU, on Triton's interpreter as `bi_kernels.interpreter` mends it.
"""

import importlib

_OPS = {
    "silu": "elementwise", "gelu": "elementwise", "swiglu": "elementwise", "add": "elementwise",
    "scale": "elementwise", "bias_add": "elementwise", "mask_fill": "elementwise", "cast": "elementwise",
    "rope": "rotary", "rope_table": "rotary", "RopeTable": "rotary", "packed_positions": "rotary",
    "linear": "gemm", "matmul": "gemm",
    "rms_norm": "norm", "qk_norm": "norm", "add_rms_norm": "norm", "embedding": "embed",
    "lm_head_logprob": "lm_head", "token_logprob": "logprob", "log_softmax": "logprob",
    "attention": "attend",
    "TokenLayout": "tokens", "MainGrads": "grads",
}
__all__ = list(_OPS)


def __getattr__(name: str):
    if name not in _OPS:
        raise AttributeError(f"module 'bi_kernels' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f"bi_kernels.{_OPS[name]}"), name)
    return found


def __dir__():
    return sorted([*globals(), *_OPS])
