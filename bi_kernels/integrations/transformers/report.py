"""What became of every module and every parameter of a model."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """Each module of the model, by its name, is in exactly one of replaced, left and containers, and each parameter in
    one of folded and others.

    replaced: by what; left: why; containers: modules whose own arithmetic is elementwise, or none. folded: parameters
    whose gradients have the same bits for every split of a step; others: why not.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)
    folded: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} modules replaced, {len(self.left)} left, {len(self.containers)} containers"]
        lines += [f"  {count} × {what}" for what, count in Counter(self.replaced.values()).items()]
        lines += [f"  left: {name or 'the model'}: {why}" for name, why in self.left.items()]
        lines.append(f"{len(self.folded)} parameters folded, {len(self.others)} others")
        lines += [f"  {name}: {why}" for name, why in self.others.items()]
        return "\n".join(lines)
