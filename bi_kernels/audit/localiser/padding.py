"""Says whether a model reads padding because it is given no attention mask: what drifts then is the caller's."""

import inspect
from collections.abc import Callable, Sequence

from torch import nn

from bi_kernels.audit.localiser.compare import Comparison
from bi_kernels.audit.localiser.watched.plans import MASK, Plan
from bi_kernels.audit.localiser.watched.step import freeze, step


def said(model: nn.Module | Callable, name: str, plans: dict[str, Callable[[], Plan]], seed: int) -> str:
    """Returns the sentence on a model whose results of real tokens change with the numbers in the padding, '' of any
    other, and of one that is given a mask. plans: makes the plan of each layout, by name."""
    padded = [layout for layout, make in plans.items() if make().other_padding]
    if not padded:
        return ""
    plan = plans[padded[0]]()
    asked, given = _masks(model), plan.masks
    if given:
        return ""
    other = Plan(plan.layout, plan.tokens, plan.other_padding)
    if not _differs(*(freeze(step(model, one, None, False, seed)) for one in (plan, other))):
        return ""
    why = f"the batch holds no {asked[0]}, which {name} takes" if asked else f"it takes no argument such as {MASK}"
    return f"{name} reads padding because {why}: drift in {_listed(padded)} is the caller's."


def _masks(model: nn.Module | Callable) -> list[str]:
    """Names the arguments of a model that are masks."""
    try:
        names = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters
    except (TypeError, ValueError):  # of what is no function of Python's
        return []
    return [name for name in names if "mask" in name]


def _differs(a, b) -> bool:
    comparison = Comparison(a, b)
    return any(pair is not None and pair.differs.any() for pair in comparison.outputs())


def _listed(layouts: Sequence[str]) -> str:
    return f"layout{'s' * (len(layouts) > 1)} {' and '.join(layouts)}"
