"""What the localiser found, for people and for programs."""

from collections import Counter
from dataclasses import dataclass, field

from bi_kernels.audit.evidence import escape
from bi_kernels.audit.localiser.cause import PARAMETER, Cause


@dataclass
class Report:
    """The ops that drift by themselves, the first one first. Shows itself as Markdown in Jupyter and as text elsewhere.

    layouts: what was compared; events: ops that ran in one call; unaligned: tensors that no token could be found in;
    by_op: how many of these each op wrote; overhead: time of a watched step over that of a plain one, the larger of
    the layouts'; digest_share: bytes of digests over bytes of activations; complete: whether the last round found
    nothing new; output: whether what the model returned was compared.
    """

    model: str
    layouts: tuple[str, ...]
    causes: list[Cause] = field(default_factory=list)
    events: int = 0
    compared: int = 0
    by_op: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    overhead: float = float("nan")
    digest_share: float = float("nan")
    complete: bool = True
    output: bool = True
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def unaligned(self) -> int:
        return self.by_op.total()

    @property
    def first(self) -> Cause | None:
        return self.causes[0] if self.causes else None

    @property
    def passed(self) -> bool:
        """Tells whether nothing drifts, the model's output included."""
        return not self.causes and self.output

    @property
    def _found(self) -> str:
        if self.causes:
            return f"{len(self.causes)} op{'s drift' if len(self.causes) > 1 else ' drifts'}"
        return "nothing drifts" if self.output else "nothing drifts before the model's output, which was not compared"

    def rows(self) -> list[dict]:
        """Returns a line a cause, of strings and numbers."""
        return [
            {
                "direction": c.direction,
                "module": c.path or "(the model)",
                "op": c.op,
                "source": c.source,
                "parameter": c.parameter,
                "layouts": f"{c.layouts[0]} against {c.layouts[1]}",
                "tokens": f"{c.tokens} of {c.compared}" if c.direction != PARAMETER else "–",
                "drift": str(c.drift) if c.drift else "–",
                "reproducer": c.script.name if c.script else "–",
            }
            for c in self.causes
        ]

    def markdown(self) -> str:
        between = " and ".join(self.layouts)
        lines = [f"### {self.model}, {between}: {self._found}", "", *self.warnings]
        if not self.output:
            lines.append("It holds no dimension of tokens or samples: return a value a token, or a loss that does.\n")
        if self.causes:
            rows = self.rows()
            head = [k for k in rows[0] if any(r[k] not in ("", "–") for r in rows)]
            lines += ["| " + " | ".join(head) + " |", "|" + ":--|" * len(head)]
            cell = lambda text: escape.text(text).replace("|", "\\|")
            lines += ["| " + " | ".join(cell(r[k]) for k in head) + " |" for r in rows] + [""]
        lines.append(
            f"{self.events} ops a call, {self.compared} tensors of {self.tokens} tokens compared, {self.unaligned} "
            "without tokens that could be found."
        )
        if self.by_op:
            lines.append(
                "Those were written by " + ", ".join(f"{op} ({n})" for op, n in self.by_op.most_common()) + "."
            )
        if self.overhead == self.overhead:  # of recordings it is not known
            lines.append(
                f"A watched step took {self.overhead:.2g} times a plain one; digests have {self.digest_share:.2%} "
                "of the activations' bytes."
            )
        if not self.complete:
            lines.append("There may be more: the rounds were over while new ones were found.")
        return "\n".join(lines + self.notes)

    _repr_markdown_ = markdown
    __repr__ = markdown
