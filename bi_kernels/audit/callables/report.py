"""The report on one callable."""

from dataclasses import dataclass, field
from pathlib import Path

from bi_kernels.audit.callables.target import Target
from bi_kernels.audit.evidence import tables
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, UNSUPPORTED, Row


@dataclass
class Report:
    """The verdict of one callable with its evidence; shows itself as Markdown in Jupyter and as text elsewhere."""

    name: str
    rows: list[Row]
    read: str  # how the inputs were read
    notes: list[str] = field(default_factory=list)
    repro: Path | None = None
    target: Target | None = None

    @property
    def verdict(self) -> str:
        found = {r.verdict for r in self.rows}
        return NEEDS_FIX if NEEDS_FIX in found else PASS if PASS in found else UNSUPPORTED

    @property
    def passed(self) -> bool:
        return self.verdict == PASS

    def markdown(self) -> str:
        parts = [f"### {self.name}: {tables.MARK[self.verdict]}", self.read, *self.notes, tables.by_op(self.rows).data]
        if not self.passed:
            parts.append(tables.drifts(self.rows).data)
        if self.repro:
            parts.append(f"Reproduce with `python {self.repro}`.")
        return "\n\n".join(parts)

    _repr_markdown_ = markdown
    __repr__ = markdown
