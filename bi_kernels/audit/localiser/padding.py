"""Tells whether a model reads padding because it is given no attention mask: that drift is the caller's."""

import inspect
from collections.abc import Callable

from torch import nn

from bi_kernels.audit.localiser.compare import Comparison
from bi_kernels.audit.localiser.tracing.layouts import MASK, Plan
from bi_kernels.audit.localiser.tracing.run import freeze, step


def warning(model: nn.Module | Callable, name: str, plans: dict[str, Callable[[], Plan]], seed: int) -> str:
    """Returns the sentence on a model whose results of real tokens change with the numbers in the padding; "" for any
    other, and for one that is given a mask. plans: makes the plan of each layout, by name."""
    padded = [layout for layout, make in plans.items() if make().other_padding]
    plan = plans[padded[0]]() if padded else None
    if plan is None or plan.masks:
        return ""
    runs = (step(model, one, None, False, seed) for one in (plan, Plan(plan.layout, plan.tokens, plan.other_padding)))
    pairs = Comparison(*map(freeze, runs)).outputs()
    if not any(pair is not None and pair.differs.any() for pair in pairs):
        return ""
    masks = _masks(model)
    why = f"the batch holds no {masks[0]}, which {name} takes" if masks else f"it takes no argument such as {MASK}"
    layouts = f"layout{'s' * (len(padded) > 1)} {' and '.join(padded)}"
    return f"{name} reads padding because {why}: drift in {layouts} is the caller's."


def _masks(model: nn.Module | Callable) -> list[str]:
    """Names the arguments of a model that are masks."""
    try:
        names = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters
    except (TypeError, ValueError):  # not a Python function
        return []
    return [name for name in names if "mask" in name]
