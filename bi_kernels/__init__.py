"""Triton kernels whose result for a token does not depend on what else is in the batch.

Importing the package does no work; an op's module is loaded when the op is first named. It needs torch and triton; with
TRITON_INTERPRET=1 the kernels run on a CPU, on Triton's interpreter, which needs the extra `interpreter`.
"""

import importlib

from bi_kernels.extras import extra

_HOLDS = {
    "ops.activations": ("silu", "gelu", "swiglu", "geglu", "clamped_swiglu", "gated", "soft_cap"),
    "ops.elementwise": ("add", "scale", "bias_add", "mask_fill", "cast"),
    "ops.rope": ("rope", "rope_table", "RopeTable", "packed_positions"),
    "ops.gemm.gemm": ("linear", "matmul"),
    "ops.norm": ("rms_norm", "qk_norm", "add_rms_norm"),
    "ops.layer_norm": ("layer_norm",),
    "ops.rows": ("row_sum", "softmax"),
    "ops.parameter_fold": ("scaled", "shifted"),
    "ops.embedding": ("embedding",),
    "ops.lm_head": ("lm_head_logprob",),
    "ops.logprob": ("token_logprob", "log_softmax"),
    "ops.grouped.grouped_linear": ("grouped_linear", "routed_linear", "routed_sum"),
    "ops.grouped.groups": ("group_by_expert", "Groups"),
    "ops.grouped.rows": ("dispatch", "combine"),
    "ops.grouped.top_k": ("top_k",),
    "ops.attention.attention": ("attention",),
    "mode.mode": ("batch_invariant_mode",),
    "tokens": ("TokenLayout",),
    "grads": ("MainGrads",),
    "parallel.tensor": ("ExpertParallel", "TensorParallel"),
}
_MODULE = {name: module for module, names in _HOLDS.items() for name in names}
__all__ = list(_MODULE)


def __getattr__(name: str):
    """Loads an op; one that is not listed has a file of its own name in ops/."""
    module = f"{__name__}.{_MODULE.get(name, f'ops.{name}')}"
    try:
        with extra("interpreter"):  # which alone needs more than torch and triton
            found = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if getattr(error, "name", "") not in (module, name):
            raise  # what the op itself could not import
        raise AttributeError(f"module 'bi_kernels' has no attribute {name!r}") from None
    globals()[name] = found
    return found


def __dir__():
    return sorted([*globals(), *_MODULE])
