"""Reads, compares and merges the digests of a candidate's bits that `bi-audit digest` writes.

golden.py holds the bits that our own ops must give.
"""

import json
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

KEY = ("architecture", "candidate", "shapes", "op", "case", "dtype", "what", "seed")
key = itemgetter(*KEY)
VERSIONS = ("torch", "Triton", "CUDA", "driver", "numpy", "bi-kernels", "candidate's code")


def read(file: Path) -> list[dict]:
    """Returns the digests in a file. Raises ValueError in one sentence if it holds something else."""
    with suppress(OSError, ValueError, TypeError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, list) and all({*KEY, "sha256"} <= set(r) for r in found):
            return found
    raise ValueError(f"{str(file)!r} holds no digests, expected a file that `bi-audit digest` wrote")


def changes(recorded: list[dict], found: list[dict], problems: list[str], file: Path) -> list[str]:
    """Returns warnings: the problems, and a line for each op whose bits changed, with the versions that changed."""
    before = {key(r): r for r in recorded}
    unknown = [r for r in found if key(r) not in before]
    moved = [(before[key(r)], r) for r in found if key(r) in before and before[key(r)]["sha256"] != r["sha256"]]
    warnings = list(problems)
    for op in dict.fromkeys(r["op"] for _, r in moved):
        pairs = [(old, r) for old, r in moved if r["op"] == op]
        since = {k: f"{k} {old.get(k)} → {r[k]}" for old, r in pairs for k in VERSIONS if old.get(k) != r[k]}
        which = ", ".join(spoken(r["case"], r["dtype"], r["what"]) for _, r in pairs)
        why = ", ".join(since.values()) or "no version that is recorded"
        where = pairs[0][1]["architecture"]
        warnings.append(f"{op}: other bits on {where} than {file} holds ({which}); changed since: {why}")
    if unknown:
        r = unknown[0]
        warnings.append(
            f"digests: {file} holds {len(found) - len(unknown)} of {len(found)} that were computed, and not "
            f"{spoken(r['op'], r['case'], r['dtype'], r['what'])} of {r['candidate']} on {r['architecture']}; "
            "record them with `bi-audit digest`"
        )
    return warnings


def spoken(*words: str) -> str:
    return " ".join(filter(None, words))


def merged(recorded: list[dict], found: list[dict]) -> list[dict]:
    """Returns both in a fixed order; a new digest replaces the recorded one."""
    return sorted({key(r): r for r in (*recorded, *found)}.values(), key=lambda r: str(key(r)))
