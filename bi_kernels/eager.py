"""What torch.compile leaves alone. A module of its own: torch._dynamo takes as long to import as torch does, and only
who compiles needs it."""

from collections.abc import Callable

import torch


@torch.compiler.disable
def in_eager(differentiable: Callable, *args) -> torch.Tensor:
    """Calls an autograd function between two compiled parts."""
    return differentiable(*args)
