"""Reads, compares and merges digests of a candidate's bits, which a user keeps: if they change, some version did.

Golden digests (golden.py) say what our ops must give; these say what anybody's candidate gave, forward and backward, on
inputs that come from integers by exact arithmetic.
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
    """Returns the warnings: one an op whose bits are not those recorded, naming the versions that changed."""
    before = {key(r): r for r in recorded}
    moved: dict[str, list[tuple[dict, dict]]] = {}
    unknown = []
    for r in found:
        old = before.get(key(r))
        if old is None:
            unknown.append(r)
        elif old["sha256"] != r["sha256"]:
            moved.setdefault(r["op"], []).append((old, r))
    warnings = list(problems)
    for op, pairs in moved.items():
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
    """Returns both, in a fixed order; a digest that was computed again replaces the one recorded."""
    return sorted({key(r): r for r in (*recorded, *found)}.values(), key=lambda r: str(key(r)))
