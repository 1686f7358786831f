"""The report on one callable."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED, Row, late
from bi_kernels.audit.report import escape, tables
from bi_kernels.audit.report.groups import group_rows, remaining, terminal, wrapped
from bi_kernels.audit.report.sentences import answer
from bi_kernels.audit.reproduce.script import named
from bi_kernels.audit.targets.any_callable import CallableTarget


@dataclass
class Report:
    """The verdict of one callable with its evidence, the answer first; shows itself as Markdown in Jupyter and as plain
    text elsewhere."""

    name: str
    rows: list[Row]
    read: str  # how the inputs were read
    notes: list[str] = field(default_factory=list)
    repro: Path | None = None
    target: CallableTarget | None = None

    @property
    def verdict(self) -> str:
        found = {r.verdict for r in self.rows}
        passes = PASS in found and not late(self.rows)
        return NEEDS_FIX if NEEDS_FIX in found else PASS if passes else UNSUPPORTED

    @property
    def passed(self) -> bool:
        return self.verdict == PASS

    @property
    def answer(self) -> str:
        """Says in one sentence what the rows show."""
        return answer(self.rows)

    @property
    def command(self) -> str:
        """Returns the command that shows the first drift that a script shows, '' where none does."""
        return shlex.join(["python", named(self.repro)]) if self.repro else ""

    def markdown(self) -> str:
        """Returns the report as a document has it."""
        said = escape.text(f"{self.name}: {self.answer}")
        parts = [f"**{tables.MARK[self.verdict]}: {said}.**", *map(escape.text, (self.read, *self.notes))]
        parts.append(tables.by_op(self.rows).data)
        if not self.passed:
            parts.append(tables.drifts(self.rows).data)
        if self.repro:
            where = " in this document's folder" * bool(remaining())
            parts.append(f"Reproduce with {escape.code(self.command)}{where}.")
        return "\n\n".join(parts)

    def text(self) -> str:
        """Returns the report as a terminal shows it, in lines of 100 columns; only a command may be longer."""
        said = [f"{self.verdict}  {self.name}: {self.answer}.", self.read, *self.notes]
        lines = [wrapped(escape.line(x), "    ") for x in said]
        if wrong := [r for r in self.rows if r.verdict == NEEDS_FIX]:
            lines += ["", f"{len(wrong)} of {len(self.rows)} checks need{'s' * (len(wrong) == 1)} a fix{remaining()}:"]
            lines.append(terminal(group_rows(self.rows), remaining()))
        if self.repro:
            lines += ["", "Reproduce with", f"    {self.command}"]
        return "\n".join(lines)

    _repr_markdown_ = markdown
    __repr__ = text
