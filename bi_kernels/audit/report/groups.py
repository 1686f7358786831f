"""Rows that need a fix in few lines: one for each side and kind, over all layouts, row counts and inputs."""

import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from bi_kernels.audit.axes import RANK, Kind, by_kind
from bi_kernels.audit.findings import NEEDS_FIX, Row, grouped, values_of
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.sentences import raised_by
from bi_kernels.audit.report.sizes import sizes

WIDTH, GAP = 100, "  "  # columns of a terminal, and what is between those of a table
LINES = 8  # of a table on it, each of two lines at most
NAMED = 4  # layouts, row counts, inputs or tensors in a cell
COLUMNS = {"": 16, "where": 26, "checks": 8, "inputs": 10, "differ": 14, "max rel": 8, "ULP": 6}  # their widths there


def counts(numbers: Iterable[int]) -> str:
    """Names row counts: all of a few, else the first ones, the last one and how many they are."""
    found = [f"{n:,}" for n in sorted(set(numbers))]
    if len(found) <= 2 * NAMED:
        return ", ".join(found)
    return f"{', '.join(found[:NAMED])} … {found[-1]} ({len(found)} counts)"


def where(rows: Sequence[dict], most: int = NAMED) -> str:
    """Names the row counts and the layouts of some rows."""
    is_count = lambda r: r["layout"].partition(":")[0] == "rows"
    numbers = {r["rows"] for r in rows if is_count(r)} - {0}
    others = list(dict.fromkeys(r["layout"] for r in rows if not is_count(r) and r["layout"]))
    more = [f"{len(others) - most} more layout{'s' * (len(others) > most + 1)}"] * (len(others) > most)
    return "; ".join([f"M = {counts(numbers)}"] * bool(numbers) + others[:most] + more)


def listed(values: Iterable[str], most: int = NAMED) -> str:
    """Names a few of some values."""
    found = list(dict.fromkeys(filter(None, values)))
    return ", ".join(found[:most]) + " …" * (len(found) > most)


def _furthest(rows: Sequence[dict]) -> dict | None:
    """Returns the row of which the largest share differs; None where nothing was counted."""
    counted = [r for r in rows if r["mismatches"] and r["elements"] and r["relation"] != "atomics-free"]
    return max(counted, key=lambda r: (r["mismatches"] / r["elements"], r["elements"]), default=None)


def differ(rows: Sequence[dict]) -> str:
    """Returns the count of the row of which the largest share differs, '' where nothing was counted."""
    r = _furthest(rows)
    return f"{r['mismatches']:,} of {r['elements']:,}" if r else ""


def group_rows(rows: Iterable[Row | dict]) -> list[dict]:
    """Returns a line for each side and kind of what needs a fix, by op and dtype; under "row" is the one of which the
    largest share differs, of those that a command shows, and under "shows" its numbers where they are not the line's.

    What raised has a line for each error, and a relation that compares no bits one of its own.
    """
    every = [r for r in map(values_of, rows) if not r["control"]]
    lines = []
    for _, of_op in grouped(every, lambda r: (r["op"], r["case"], r["dtype"])).items():
        found = by_kind(of_op)
        for side, kind in sorted(found, key=lambda at: RANK.index(at[1]) >= RANK.index(Kind.ATOMICS)):
            said = raised_by if kind in (Kind.ERROR, Kind.OTHER, Kind.ATOMICS) else lambda r: ""
            bad = [r for r in found[side, kind] if r["verdict"] == NEEDS_FIX]
            for detail, mine in grouped(bad, said).items():
                lines.append(_line(side, kind, mine, len(found[side, kind]), detail))
    return lines


def _line(side: str, kind: str, mine: list[dict], asked: int, detail: str) -> dict:
    shown = _furthest([r for r in mine if r["repro"]]) or _furthest(mine)
    shown = shown or min(mine, key=lambda r: (not r["mismatches"], not r["repro"], r["rows"] or 0))
    tensor = Counter(r["tensor"] for r in mine if r["mismatches"] and r["tensor"])  # the first that differs of a row
    tensors = listed((f"{t} in {n}" if len(tensor) > 1 else t for t, n in tensor.most_common()), 2)
    worst = _furthest(mine)
    found, own = ({"differ": differ(some)} | sizes(some) for some in (mine, [shown]))
    says = dict.fromkeys((Kind.ACCURACY, Kind.ATOMICS, Kind.OTHER), shown["relation"])
    says |= {Kind.ERROR: Kind.ERROR}
    return {
        "": says.get(kind, side),
        "tensors": "" if tensors == "out" or kind == Kind.ATOMICS else tensors,
        "where": "" if kind == Kind.ATOMICS else where(mine),
        "checks": f"{len(mine)}" if kind == Kind.ERROR else f"{len(mine)} of {asked}",
        "inputs": listed(r["inputs"] for r in mine),
        **found,
        "shows": "" if own == found else f"{own['differ'] or '–'}; {own['max abs']}, {own['max rel']}, {own['ULP']}",
        "detail": detail,
        "harm": worst["mismatches"] / worst["elements"] if worst else 0.0,
        "row": shown,
    }


def terminal(lines: Sequence[dict], rest: str = "") -> str:
    """Returns lines of `condensed` as a table for a terminal, WIDTH columns wide; rest: where to look for those that
    are left out."""
    shown = lines[: LINES - (len(lines) > LINES)]
    found = [_columns({k: k for k in COLUMNS}, COLUMNS)] if any(not line["detail"] for line in shown) else []
    for line in shown:
        place = ": ".join(filter(None, (line["tensors"], line["where"], line["detail"])))
        widths = COLUMNS if not line["detail"] else {"": COLUMNS[""], "where": WIDTH - COLUMNS[""] - len(GAP)}
        found.append(_columns(line | {"where": place}, widths))
    left = len(lines) - len(shown)
    more = [f"{left} more line{'s' * (left > 1)}{rest}"] * (left > 0)
    return "\n".join([*found, *more])


def _columns(cells: dict, widths: dict[str, int]) -> str:
    """Returns cells beside each other, each in at most two lines."""
    wrapped = lambda k, width: textwrap.wrap(escape.line(cells[k]), width, max_lines=2, placeholder=" …") or [""]
    made = zip_longest(*(wrapped(k, width) for k, width in widths.items()), fillvalue="")
    return "\n".join(GAP.join(map(str.ljust, row, widths.values())).rstrip() for row in made)


def remaining() -> str:
    """Says where every row stands, '' where none are written: `bi-audit` names the folder of a document."""
    return "; every row is in the verdicts beside this report" if os.environ.get("BI_AUDIT_OUT") else ""


def wrapped(text: str, indent: str = "", before: int = 0) -> str:
    """Returns a text in lines of a terminal, of which the first has so many columns before it."""
    given = " " * before
    return textwrap.fill(text, WIDTH, initial_indent=given, subsequent_indent=indent, break_on_hyphens=False)[before:]
