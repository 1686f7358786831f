"""What the localiser found, for people and for programs."""

import shlex
import textwrap
from collections import Counter
from dataclasses import dataclass, field

from bi_kernels.audit.localiser.compare import PARAMETER, Cause
from bi_kernels.audit.report import escape

WIDTH = 100  # columns of a terminal


@dataclass
class Report:
    """The ops that drift by themselves, the first one first. Shows itself as Markdown in Jupyter and as text elsewhere.

    layouts: what was compared; events: ops that ran in one call; unaligned: tensors that no token could be found in;
    by_op: how many of these each op wrote; overhead: time of a traced step over that of a plain one, the larger of
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
    def verdict(self) -> str:
        """Returns the first sentences: how many ops drift, and which is the first."""
        if self.causes:
            count = f"{len(self.causes)} op{'s drift' if len(self.causes) > 1 else ' drifts'}"
            return f"{count if self.complete else f'At least {count}'}. First: {_where(self.first)}."
        return "Nothing drifts." if self.output else "Nothing drifts before the model's output, which was not compared."

    @property
    def remarks(self) -> list[str]:
        """Returns the sentences that follow the verdict: what it may mean."""
        lost = "The output holds no dimension of tokens or samples: return a value a token, or a loss that does."
        return [*self.warnings, *[lost] * (not self.output)]

    @property
    def counts(self) -> list[str]:
        """Returns the sentences on what was compared, and on its cost."""
        written = ", ".join(f"{op} ({n})" for op, n in self.by_op.most_common())
        lost = f"{self.unaligned} had no tokens that could be found{f': {written}' * bool(written)}."
        cost = f"A traced step took {self.overhead:.2g} times a plain one; digests have {self.digest_share:.2%} "
        more = "The last round still found new ones. To find the rest, raise rounds."
        return [
            f"{self.events} ops a call, {self.compared} tensors of {self.tokens} tokens compared; {lost}",
            *[f"{cost}of the activations' bytes."] * (self.overhead == self.overhead),  # NaN for recordings
            *[more] * (not self.complete),
            *self.notes,
        ]

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

    def text(self) -> str:
        """Returns the report for a terminal: the verdict, what it may mean, each op, what was compared. Lines have at
        most 100 letters, but for a command that is to be pasted."""
        parts = [self.verdict, *self.remarks, ""]
        for number, c in enumerate(self.causes, 1):
            tokens = f"{c.tokens} of {c.compared} tokens differ" * (c.direction != PARAMETER)
            drift = "; ".join(filter(None, (tokens, str(c.drift or ""))))
            parts += [f"{number}. {_where(c)}", f"   {c.layouts[0]} against {c.layouts[1]}: {drift}".rstrip(": ")]
            parts += [f"   python {shlex.quote(str(c.script))}"] * bool(c.script)
        between = f"{self.model}, {' and '.join(self.layouts)}: {self.counts[0]}"
        parts += [""] * bool(self.causes) + [between, *self.counts[1:]]
        return "\n".join(map(_wrapped, parts))

    __repr__ = text

    def markdown(self) -> str:
        """Returns the report for Jupyter."""
        between = " and ".join(self.layouts)
        lines = [f"### {self.model}, {between}", "", f"**{escape.text(self.verdict)}**", ""]
        lines += [line for remark in self.remarks for line in (escape.text(remark), "")]
        if self.causes:
            rows = self.rows()
            head = [k for k in rows[0] if any(r[k] not in ("", "–") for r in rows)]
            lines += ["| " + " | ".join(head) + " |", "|" + ":--|" * len(head)]
            cell = lambda text: escape.text(text).replace("|", "\\|")
            lines += ["| " + " | ".join(cell(r[k]) for k in head) + " |" for r in rows] + [""]
        return "\n".join([*lines, *map(escape.text, self.counts)])

    _repr_markdown_ = markdown


def _where(c: Cause) -> str:
    """Names an op that drifts, its direction, its module and its line."""
    direction = f"{c.direction}{f' of {c.parameter}' * bool(c.parameter)}"
    return ", ".join(filter(None, (f"{c.op} ({direction})", f"module {c.path}" * bool(c.path), c.source)))


def _wrapped(part: str) -> str:
    """Returns a line of text as lines of at most WIDTH letters, each indented as the first; a command stays whole."""
    indent = part[: len(part) - len(part.lstrip(" "))]
    line, indents = indent + escape.line(part), indent or "   " * part[:1].isdigit()
    command = line.lstrip().startswith("python ")
    return line if command else textwrap.fill(line, WIDTH, subsequent_indent=indents, break_on_hyphens=False)
