"""Markdown that documents are made of: tables, and what is folded away."""

import pandas as pd

from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, UNSUPPORTED

MARK = {PASS: "✅", NEEDS_FIX: "❌", UNSUPPORTED: "⬜", "": "–"}


def table(lines: list[dict]) -> str:
    """Returns a Markdown table, a column a key."""
    inside = lambda cell: cell.replace("|", r"\|") if isinstance(cell, str) else cell  # it would end the cell
    return pd.DataFrame(lines).rename(columns=inside).map(inside).to_markdown(index=False, disable_numparse=True)


def folded(title: str, body: str) -> str:
    """Returns a body that stands under its title once a reader unfolds it."""
    return f"<details><summary>{title}</summary>\n\n{body.strip()}\n\n</details>\n"
