"""Reads, compares and merges digests of a candidate's bits, which a user keeps: if they change, some version did.

Golden digests (golden.py) say what our ops must give; these say what anybody's candidate gave, forward and backward, on
inputs that come from integers by exact arithmetic.
"""

import json
from pathlib import Path

KEY = ("architecture", "candidate", "shapes", "op", "case", "dtype", "what", "seed")
VERSIONS = ("torch", "Triton", "CUDA", "driver", "numpy", "bi-kernels", "candidate's code")


def read(file: Path) -> list[dict]:
    """Returns the digests in a file. Raises ValueError in one sentence if it holds something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, list) and all({*KEY, "sha256"} <= set(r) for r in found):
            return found
    except (OSError, ValueError, TypeError):
        pass
    raise ValueError(f"{str(file)!r} holds no digests, expected a file that `bi-audit digest` wrote")


def changes(recorded: list[dict], found: list[dict], problems: list[str], file: Path) -> list[str]:
    """Returns the warnings: one an op whose bits are not those recorded, naming the versions that changed."""
    key = lambda r: tuple(r[k] for k in KEY)
    known = {key(r): r for r in recorded}
    moved: dict[str, list[dict]] = {}
    for r in found:
        if key(r) in known and known[key(r)]["sha256"] != r["sha256"]:
            moved.setdefault(r["op"], []).append(r)
    warnings = list(problems)
    for op, rows in moved.items():
        since = {k: (known[key(r)].get(k), r[k]) for r in rows for k in VERSIONS if known[key(r)].get(k) != r[k]}
        which = ", ".join(" ".join(filter(None, (r["case"], r["dtype"], r["what"]))) for r in rows)
        why = ", ".join(f"{k} {old} → {new}" for k, (old, new) in since.items()) or "no version that is recorded"
        warnings.append(
            f"{op}: other bits on {rows[0]['architecture']} than {file} holds ({which}); changed since: {why}"
        )
    unknown = [r for r in found if key(r) not in known]
    if unknown:
        r = unknown[0]
        warnings.append(
            f"digests: {file} holds {len(found) - len(unknown)} of {len(found)} that were computed, and not "
            f"{' '.join(filter(None, (r['op'], r['case'], r['dtype'], r['what'])))} of {r['candidate']} on "
            f"{r['architecture']}; record them with `bi-audit digest`"
        )
    return warnings


def merged(recorded: list[dict], found: list[dict]) -> list[dict]:
    """Returns both, in a fixed order; a digest that was computed again replaces the one recorded."""
    by_key = {tuple(r[k] for k in KEY): r for r in (*recorded, *found)}
    return [by_key[k] for k in sorted(by_key, key=str)]
