"""Peers written in CuTe, timed where they are installed: FlashAttention 4 and QuACK. No goal is held against them.

Sources: the packages flash-attn-4 and quack-kernels.
"""

import contextlib
from collections.abc import Callable

from torch import Tensor

FA4, QUACK = "FA4", "QuACK"
NAMES = FA4, QUACK


def attention(num_splits: int = 1) -> dict[str, Callable]:
    """Returns causal attention of q, k and v (batch, tokens, heads, D) by name; num_splits: 0 for its own choice."""
    found = {}
    with contextlib.suppress(ImportError):
        from flash_attn.cute import flash_attn_func  # noqa: PLC0415 (it may be installed, as those below)

        def fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flash_attn_func(q, k, v, causal=True, num_splits=num_splits)
            return out[0] if isinstance(out, tuple) else out

        found[FA4] = fa4
    return found


def rms_norm() -> dict[str, Callable]:
    """Returns RMSNorm of x and its weight by name."""
    found = {}
    with contextlib.suppress(ImportError):
        from quack import rmsnorm  # noqa: PLC0415

        found[QUACK] = lambda x, weight: rmsnorm(x, weight)
    return found


def logprob() -> dict[str, Callable]:
    """Returns the targets' logprobs (tokens,), of hidden states (tokens, hidden) and a vocabulary, by name."""
    found = {}
    with contextlib.suppress(ImportError):
        from quack.linear_cross_entropy import linear_cross_entropy_func  # noqa: PLC0415

        found[QUACK] = lambda hidden, weight, targets: (
            -linear_cross_entropy_func(hidden, weight, None, targets, reduction="none"),
        )
    return found
