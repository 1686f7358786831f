"""The generated index: which documents there are, what they say, and the status matrix over all of them."""

import json
from pathlib import Path

import pandas as pd

from bi_kernels.audit.evidence import escape, sources
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, TITLE, UNSUPPORTED, checked_rows, grouped, worst_of

RELATION = {"forward invariance": "invariance", "forward accuracy": "accuracy"} | {
    name: name
    for name in ("gradient invariance", "gradient accuracy", "determinism", "atomics-free", "parity", "contract")
}
MARK = {PASS: "✅", NEEDS_FIX: "❌", UNSUPPORTED: "⬜", "": "–"}


def table(lines: list[dict]) -> str:
    """Returns a Markdown table, a column a key."""
    inside = lambda cell: cell.replace("|", r"\|") if isinstance(cell, str) else cell  # it would end the cell
    return pd.DataFrame(lines).rename(columns=inside).map(inside).to_markdown(index=False, disable_numparse=True)


def matrix(rows: list[dict]) -> str:
    """Returns the status matrix of some verdicts: op × relation, the dtypes of each mark."""
    lines = []
    judged = (r for r in rows if r["op"] and r["relation"] in RELATION.values())
    for op, mine in grouped(judged, lambda r: r["op"]).items():
        dtypes, line = dict.fromkeys(r["dtype"] for r in mine), {"op": escape.text(op)}
        for column, relation in RELATION.items():
            of_dtype = grouped((r for r in mine if r["relation"] == relation), lambda r: r["dtype"])
            marked = grouped(
                (d for d in dtypes if d in of_dtype), lambda d: MARK[worst_of({r["verdict"] for r in of_dtype[d]})]
            )
            said = (f"{mark} {len(d)} dtypes" if len(d) > 3 else f"{mark} {' '.join(d)}" for mark, d in marked.items())
            line[column] = " ".join(said) or MARK[""]
        lines.append(line)
    return table(lines) + "\n"


def _mutants(folder: Path) -> str:
    """Returns the kill rates of the documents of `bi-audit mutate` below a folder, '' where there is none."""
    lines = []
    for path in sorted(folder.rglob("mutants.json")):
        found, made = _record(path, list), _record(path.with_name("provenance.json"))
        number = {v: sum(f["verdict"] == v for f in found) for v in ("killed", "explained", "survived")}
        where = path.parent.relative_to(folder).as_posix()
        judged = number["killed"] + number["survived"]
        line = {
            "document": escape.link(where, f"{where}/README.md"),
            "device": made["device"],
            "mutants": len(found),
        } | number
        line |= {"kill rate": f"{number['killed'] / judged:.2%}" if judged else "–"}
        lines.append(line | {"commit": made["commit"], "command": made["command"]})
    said = "Bugs planted in our own kernels: how many the audits catch, of those that nobody explained away.\n\n"
    return f"\n\n## Mutants\n\n{said}{table(lines)}" if lines else ""


def _record(path: Path, kind: type = dict):
    """Returns what a document has in a file. Raises ValueError where that is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, kind):
        raise ValueError(f"{path} is not what an audit wrote there; remove its folder, or run the audit again")
    return found


def report(folder: Path) -> str:
    """Returns the text of folder/README.md, made from every verdicts.json below it. Raises ValueError for a file there
    that no audit wrote."""
    documents = sorted(
        p.parent
        for p in folder.rglob("verdicts.json")
        if not list(p.parent.glob("*/verdicts.json"))
        and p.parent != folder
        and not any(part.startswith(".") for part in p.relative_to(folder).parts)
    )
    listing, parts = [], []
    groups: dict[Path, list] = {}
    for path in documents:
        rows, known = checked_rows(path / "verdicts.json"), path / "provenance.json"
        made = _record(known) if known.exists() else {}  # not there if the notebook stopped before it
        judged = _record(path / sources.FILE) if (path / sources.FILE).exists() else {}
        mine = [r for r in rows if not r["control"]]
        controls = [r for r in rows if r["control"]]
        caught = [r for r in controls if r["caught"]]
        verdict = NEEDS_FIX if len(caught) < len(controls) else worst_of({r["verdict"] for r in mine})
        where = path.relative_to(folder).as_posix()
        listing.append(
            {
                "document": escape.link(where, f"{where}/README.md"),
                "device": made.get("device", "–"),
                "candidate": escape.text(next((r["candidate"] for r in mine), "")),
                "verdict": f"{MARK[verdict]} {verdict}",
                "checks": f"{len(mine):,}",
                "elements compared": f"{sum(r['elements'] or 0 for r in mine):,}",
                "controls caught": f"{len(caught)} of {len(controls)}",
                "evidence": ", ".join(
                    escape.link(name, f"{where}/{file}")
                    for name, file in (("verdicts", "verdicts.json"), ("notebook", "notebook.ipynb"))
                ),
                "sources": sources.status(judged, made.get("commit", "")),
                "commit": made.get("commit", "–"),
                "command": made.get("command", "–"),
            }
        )
        groups.setdefault(path.parent, []).extend(mine)
    for place, rows in groups.items():
        if any(r["relation"] in RELATION.values() for r in rows):
            name = place.relative_to(folder).as_posix() if place != folder else folder.name
            parts.append(f"### {name}\n\n{matrix(rows)}")
    return (
        TITLE + " from the verdicts beside it. ✅ pass, ❌ needs-fix, ⬜ unsupported, "
        "– not judged here. A verdict from the interpreter is no statement about a GPU.\n\n## Documents\n\n"
        + (table(listing) if listing else "\nNo document here yet.\n")
        + _mutants(folder)
        + "\n\n## Status matrix\n\n"
        + "\n".join(parts)
    ).rstrip() + "\n"
