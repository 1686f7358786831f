"""The generated index: which documents there are, what they say, and the status matrix over all of them."""

import json
from collections.abc import Collection
from pathlib import Path

import pandas as pd

RELATION = {
    "forward invariance": "invariance",
    "forward accuracy": "accuracy",
    "gradient invariance": "gradient invariance",
    "gradient accuracy": "gradient accuracy",
    "determinism": "determinism",
    "atomics-free": "atomics-free",
    "parity": "parity",
    "contract": "contract",
}
MARK = {"pass": "✅", "needs-fix": "❌", "unsupported": "⬜", "": "–"}


def _worst(verdicts: Collection[str]) -> str:
    return next((v for v in ("needs-fix", "unsupported", "pass") if v in verdicts), "")


def table(lines: list[dict]) -> str:
    """Returns a Markdown table, a column a key."""
    return pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True)


def matrix(rows: list[dict]) -> str:
    """Returns the status matrix of some verdicts: op × relation, the dtypes of each mark."""
    verdicts: dict[str, dict[str, dict[str, set]]] = {}  # by op, relation and dtype
    for r in rows:
        if r["op"] and r["relation"] in RELATION.values():
            of_relation = verdicts.setdefault(r["op"], {}).setdefault(r["relation"], {})
            of_relation.setdefault(r["dtype"], set()).add(r["verdict"])
    lines = []
    for op, of_relation in verdicts.items():
        dtypes = dict.fromkeys(r["dtype"] for r in rows if r["op"] == op and r["relation"] in of_relation)
        line = {"op": op}
        for column, relation in RELATION.items():
            found: dict[str, list[str]] = {}
            for dtype in (d for d in dtypes if d in of_relation.get(relation, {})):
                found.setdefault(_worst(of_relation[relation][dtype]), []).append(dtype)
            said = (
                f"{MARK[v]} {len(d)} dtypes" if len(d) > 3 else f"{MARK[v]} {' '.join(d)}" for v, d in found.items()
            )
            line[column] = " ".join(said) or MARK[""]
        lines.append(line)
    return table(lines) + "\n"


def report(folder: Path) -> str:
    """Returns the text of folder/README.md, made from every verdicts.json below it."""
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
        rows = json.loads((path / "verdicts.json").read_text(encoding="utf-8"))
        known = path / "provenance.json"  # not there if the notebook stopped before it
        made = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
        mine = [r for r in rows if not r["control"]]
        controls = [r for r in rows if r["control"]]
        verdict = _worst([r["verdict"] for r in mine] + ["needs-fix" for r in controls if not r["caught"]])
        where = path.relative_to(folder).as_posix()
        listing.append(
            {
                "document": f"[{where}]({where}/README.md)",
                "device": made.get("device", "–"),
                "candidate": next((r["candidate"] for r in mine), ""),
                "verdict": f"{MARK[verdict]} {verdict}",
                "checks": f"{len(mine):,}",
                "elements compared": f"{sum(r['elements'] or 0 for r in mine):,}",
                "controls caught": f"{sum(bool(r['caught']) for r in controls)} of {len(controls)}",
                "evidence": f"[verdicts]({where}/verdicts.json), [notebook]({where}/notebook.ipynb)",
                "commit": made.get("commit", "–"),
                "command": made.get("command", "–"),
            }
        )
        groups.setdefault(path.parent, []).extend(mine)
    for place, rows in groups.items():
        if any(r["relation"] in RELATION.values() for r in rows):
            parts.append(
                f"### {place.relative_to(folder).as_posix() if place != folder else folder.name}\n\n{matrix(rows)}"
            )
    missing = "" if listing else "\nNo document here yet.\n"
    return (
        "# Audits\n\nWritten by `bi-audit report` from the verdicts beside it. ✅ pass, ❌ needs-fix, ⬜ unsupported, "
        "– not judged here. A verdict from the interpreter is no statement about a GPU.\n\n## Documents\n\n"
        + (table(listing) if listing else "")
        + missing
        + "\n\n## Status matrix\n\n"
        + "\n".join(parts)
    ).rstrip() + "\n"
