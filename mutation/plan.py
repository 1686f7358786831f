"""Which mutants a run judges: systematic ones and hand-made ones, a sample of them by seed, and those explained."""

import ast
import random
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import bi_kernels
from bi_kernels.audit.findings import grouped
from bi_kernels.audit.registry import OPS
from mutation.operators import HAND_MADE, Mutant, mutants
from mutation.reach import defined, on_hopper, ops_for, package, sources

HERE = Path(__file__).parent
EQUIVALENTS = HERE / "equivalents.toml"


@dataclass(frozen=True)
class Equivalent:
    """An entry of the file of equivalents: mutants that change nothing that is promised, and why."""

    reason: str
    file: str = "*"  # a pattern
    function: str | list[str] = "*"  # a pattern, or several
    before: str = ""  # the lines as they stand, stripped; nothing: every line of the function
    text: str | list[str] = ""  # what they become there, or several; nothing: whatever they become
    operator: str = ""
    number: int = -1  # among equal ones of a line; −1: each of them
    taken: str = ""  # a regular expression of what they replace
    line: str = ""  # a regular expression of the lines as they stand, for those that one reason explains
    device: str = ""  # where it holds, cpu or cuda; nothing: on both

    def holds(self, m: Mutant) -> bool:
        each = lambda told: [told] if isinstance(told, str) else told
        same = fnmatch(m.file, self.file) and self.before in ("", m.before)
        same = same and any(fnmatch(m.function, function) for function in each(self.function))
        same = same and (not self.line or bool(re.fullmatch(self.line, m.before, re.DOTALL)))
        same = same and (not self.taken or bool(re.fullmatch(self.taken, m.taken, re.DOTALL)))
        same = same and not {"", m.text}.isdisjoint(each(self.text)) and self.operator in ("", m.operator)
        return same and self.number in (-1, m.number)


def every() -> list[Mutant]:
    """Returns all mutants that some op of the registry reaches."""
    found = []
    for path in sources():
        file = path.relative_to(package()).as_posix()
        found += mutants(file, path.read_text(encoding="utf-8"), frozenset(bi_kernels.__all__))
    return [m for m in [*hand_made(), *found] if ops_for(m.file, m.function)]


def hand_made(path: Path = HERE / "hand_made.toml") -> list[Mutant]:
    """Returns the mutants of hand_made.toml. Raises ValueError where the text to be edited stands there otherwise than
    once."""
    found, tree = [], cache(ast.parse)
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        file, old, new = entry["file"], entry["old"], entry["new"]
        text = (package() / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{path.name}: {old!r} stands {text.count(old)} times in {file}, expected once")
        start = text.index(old)
        line = text.count("\n", 0, start) + 1
        around = next(n for n in tree(text).body if n.end_lineno >= line)
        before, operator = " ".join(old.split()), HAND_MADE + entry["name"]
        at, device = (line, start, start + len(old), new, before), entry.get("device", "")
        found.append(Mutant(file, defined(around)[0], operator, *at, device=device, taken=old))
    return found


def equivalents(path: Path = EQUIVALENTS) -> list[Equivalent]:
    return [Equivalent(**e) for e in tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])]


def explained(m: Mutant, entries: Sequence[Equivalent], device: str) -> str:
    """Returns why a mutant changes nothing on a kind of device, '' where nobody says so."""
    return next((e.reason for e in entries if e.device in ("", device) and e.holds(m)), "")


def stale(found: Sequence[Mutant], entries: Sequence[Equivalent]) -> list[Equivalent]:
    """Returns the entries that no mutant answers to."""
    return [e for e in entries if not any(e.holds(m) for m in found)]


def of_audits(found: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Returns the mutants that are judged by an op of the audits named; all where none is."""
    audit = lambda op: OPS[op].audit if op in OPS else op
    return [m for m in found if not names or any(audit(op) in names for op in ops_for(m.file, m.function))]


def of_device(found: Sequence[Mutant], device: str) -> list[Mutant]:
    """Returns the mutants that a kind of device can show: on a CPU, none of what sm_90 alone runs."""
    return [m for m in found if device == "cuda" or not (on_hopper(m.file) or m.device == "cuda")]


def of_files(found: Sequence[Mutant], patterns: str) -> list[Mutant]:
    """Returns the mutants of files below the package that a pattern matches, with "," between patterns; all for none.
    Raises ValueError for a pattern that matches none."""
    wanted = [p for p in patterns.split(",") if p]
    for pattern in wanted:
        if not any(fnmatch(m.file, pattern) for m in found):
            raise ValueError(f"--files is {patterns!r}, and {pattern!r} matches no file that has mutants")
    return [m for m in found if not wanted or any(fnmatch(m.file, p) for p in wanted)]


def sampled(found: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Returns so many mutants: hand-made ones first, then function by function in turn, both at random."""
    rng, turns = random.Random(seed), []
    for mine in grouped(found, lambda m: (m.file, m.function)).values():
        mine = sorted(mine, key=lambda m: m.id)
        rng.shuffle(mine)
        turns.append(sorted(mine, key=lambda m: not m.operator.startswith(HAND_MADE)))
    random.Random(seed).shuffle(turns)  # else a small sample would be of the first files
    chosen = [
        m for round_ in range(max(map(len, turns), default=0)) for mine in turns for m in mine[round_ : round_ + 1]
    ]
    first = [m for m in found if m.operator.startswith(HAND_MADE)]
    return list(dict.fromkeys([*first, *chosen]))[: count or None]
