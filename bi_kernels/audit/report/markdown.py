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
    """Returns a Markdown table, a column a key; lines: dicts, or a DataFrame.

    One of more columns than `most` is in parts of about the same width, each with the first columns that tell its lines
    apart; where these do not, the last share one.
    """
    lines = lines.to_dict("records") if hasattr(lines, "to_dict") else lines
    inside = lambda cell: cell.replace("|", r"\|") if isinstance(cell, str) else cell  # it would end the cell
    lines = [{inside(k): inside(v) for k, v in line.items()} for line in lines]
    names = list(dict.fromkeys(name for line in lines for name in line))
    if len(names) <= most:
        return _piped(lines)
    apart = lambda n: len({tuple(str(line.get(k)) for k in names[:n]) for line in lines}) == len(lines)
    if keys := next(filter(apart, range(1, most - 1)), 0):
        rest = len(names) - keys
        width = -(-rest // -(-rest // (most - keys)))
        parts = [[*names[:keys], *names[start : start + width]] for start in range(keys, len(names), width)]
        return "\n\n".join(_piped([{k: line.get(k, "") for k in part} for line in lines]) for part in parts)
    rest = names[most - 1 :]
    together = lambda line: " · ".join(str(line.get(name, MARK[""])) for name in rest)
    lines = [{k: line.get(k, "") for k in names[: most - 1]} | {" · ".join(rest): together(line)} for line in lines]
    return _piped(lines)


def _piped(lines: list[dict]) -> str:
    return tabulate(lines, headers="keys", tablefmt="pipe", disable_numparse=True)


def folded(title: str, body: str) -> str:
    """Returns a body that stands under its title once a reader unfolds it."""
    return f"<details><summary>{title}</summary>\n\n{body.strip()}\n\n</details>\n"
