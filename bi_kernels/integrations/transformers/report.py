"""What `apply` did to a model, and whether the model keeps its bits now."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from bi_kernels.integrations.transformers.check import Check

LISTED = 10  # lines of a group, so that a report has at most 40
ROLES = {  # what a class is called in the first line, by what its name holds; others go by the name itself
    "attention": "attention",
    "expert|moe(block)?$": "experts",
    "router|gate": "the router",
    "rmsnorm": "RMSNorm",
    "layernorm": "LayerNorm",
    "(?<!rotary)embedding": "the embedding",
    "dropout": "dropout",
}
OWN_CODE = {  # named only where nothing above is left: they mostly call their parts, and add up little themselves
    "rotary": "RoPE",
    "mlp": "the MLP",
    "layer$|block$": "the decoder layer's own code",
    "forcausallm$|model$": "the model's own code",
}


@dataclass
class Report:
    """What became of each module and parameter, by name, and whether the whole model keeps its bits.

    replaced: by which op; left: modules that PyTorch still computes, and why; containers: modules that compute nothing
    that depends on the batch. folded: parameters whose gradients are split-invariant; others: why not. kinds: each
    module's class. checks: what `apply(model, check=True)` compared, empty without it.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)
    folded: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's result has the same bits whatever else is in the batch."""
        return not self.left and not any(c.fails for c in self.checks if not c.gradient)

    @property
    def split_invariant(self) -> bool:
        """Whether a step's gradients have the same bits however it is cut into micro-batches, between sequences."""
        return self.batch_invariant and not self.others and not any(c.fails for c in self.checks)

    @property
    def verdict(self) -> list[str]:
        """The two lines that answer: is the model batch-invariant, and is its step split-invariant?"""
        drift = {c.gradient: str(c) for c in reversed(self.checks) if c.fails}
        why = "" if not self.left else f"{self._roles()} still PyTorch's."
        why = why or f"The check found a difference: {drift.get(False)}."
        others = f"PyTorch adds up the gradients of {len(self.others)} of {self._parameters} parameters."
        split = others if self.others else f"The check found a difference: {drift.get(True)}."
        split = split if self.batch_invariant or self.others else "Each micro-batch is a batch of its own."
        return [
            f"Batch-invariant: {'yes' if self.batch_invariant else f'NO. {why}'}",
            f"Split-invariant: {'yes' if self.split_invariant else f'NO. {split}'}",
        ]

    @property
    def _parameters(self) -> int:
        return len(self.folded) + len(self.others)

    def _roles(self) -> str:
        """Names what is left, each role once: "Attention, experts and RMSNorm are"."""
        called = {_role(self.kinds[name]) for name in self.left}
        found = [role for role in ROLES.values() if role in called]
        found += sorted(called - {*ROLES.values(), *OWN_CODE.values()})
        found = found or [role for role in OWN_CODE.values() if role in called]
        listed = found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"
        return f"{listed[0].upper()}{listed[1:]} {'is' if len(found) == 1 and found[0] != 'experts' else 'are'}"

    def __str__(self) -> str:
        lines = list(self.verdict)
        if self.checks:
            passed = sum(not c.fails for c in self.checks)
            lines.append(f"Checked by bits: {passed} of {len(self.checks)} comparisons agree")
            lines += [f"  {c}" for c in self.checks if c.fails]
            if self.left and passed == len(self.checks):
                lines.append("  Three short sequences agree; other sizes may not, because of what is left to PyTorch.")
        lines += _grouped("Replaced", ((self.kinds[n], n, what) for n, what in self.replaced.items()))
        lines += _grouped("Left to PyTorch", ((self.kinds[n], n, why) for n, why in self.left.items()))
        lines += _grouped("Gradients left to PyTorch", ((_pattern(n), n, why) for n, why in self.others.items()))
        return "\n".join(lines)


def _role(kind: str) -> str:
    return next((role for k, role in (ROLES | OWN_CODE).items() if re.search(k, kind.lower())), kind)


def _pattern(name: str) -> str:
    """Returns a name with `*` for the number of a layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) or "the model"


def _grouped(title: str, items: Iterable[tuple[str, str, str]]) -> list[str]:
    """Returns a line for each group of (group, name, text) with one group and text: how many, and the text."""
    found: dict[tuple[str, str], list[str]] = {}
    for group, name, text in items:
        found.setdefault((group, text), []).append(name)
    if not found:
        return []
    width = max(len(group) for group, _ in found)
    lines = [f"  {len(names):4} × {group:{width}}  {text}" for (group, text), names in found.items()]
    more = [f"  and {len(lines) - LISTED + 1} kinds more"] if len(lines) > LISTED else []
    return [f"{title}:", *(lines[: LISTED - 1] + more if more else lines)]
