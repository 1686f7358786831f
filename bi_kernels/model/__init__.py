"""A decoder of this package's ops, to read and to copy: its cache, its generate loop, its loss"""

from bi_kernels.model.cache import Cache, Rows, packed, padded
from bi_kernels.model.decoder import CONFIGS, Config, Decoder
from bi_kernels.model.generate import Generated, generate, policy_loss, score

__all__ = [
    "CONFIGS",
    "Cache",
    "Config",
    "Decoder",
    "Generated",
    "Rows",
    "generate",
    "packed",
    "padded",
    "policy_loss",
    "score",
]
