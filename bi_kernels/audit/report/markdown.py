"""Markdown that documents are made of: tables, and what is folded away."""

from tabulate import tabulate

from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED

try:
    from IPython.display import Markdown
except ModuleNotFoundError:  # outside of notebooks, as for `bi-audit mutate`, nothing is shown

    class Markdown:
        def __init__(self, data: str):
            self.data = data


MARK = {PASS: "✅", NEEDS_FIX: "❌", UNSUPPORTED: "⬜", "": "–"}


def table(lines, most: int = 6) -> str:
    """Returns a Markdown table, a column a key; lines: dicts, or a DataFrame. Columns beyond `most` share one."""
    lines = lines.to_dict("records") if hasattr(lines, "to_dict") else lines
    inside = lambda cell: cell.replace("|", r"\|") if isinstance(cell, str) else cell  # it would end the cell
    lines = [{inside(k): inside(v) for k, v in line.items()} for line in lines]
    names = list(dict.fromkeys(name for line in lines for name in line))
    if rest := names[most - 1 :] if len(names) > most else []:
        together = lambda line: " · ".join(str(line.get(name, MARK[""])) for name in rest)
        lines = [{k: line.get(k, "") for k in names[: most - 1]} | {" · ".join(rest): together(line)} for line in lines]
    return tabulate(lines, headers="keys", tablefmt="pipe", disable_numparse=True)


def folded(title: str, body: str) -> str:
    """Returns a body that stands under its title once a reader unfolds it."""
    return f"<details><summary>{title}</summary>\n\n{body.strip()}\n\n</details>\n"
