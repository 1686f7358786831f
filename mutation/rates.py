"""How many mutants a run killed: those made by hand and those generated apart, each with its interval."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bi_kernels.contract import CONTRACT

GOAL: float = CONTRACT["mutants"]["kill_rate"]
EXPLAINED, KILLED, SURVIVED = "explained", "killed", "survived"
HAND_MADE = "hand-made: "  # how the operator of a mutant begins that was made by hand
KINDS = {"hand-made": True, "generated": False}
FILE = "population.json"  # in a report's folder: how many mutants there are, by kind and file
NORMAL = 1.959964  # the normal distribution's 97.5 % quantile


def interval(killed: int, judged: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a rate: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209–212, equation 4."""
    z = NORMAL**2
    middle, spread = killed + z / 2, NORMAL * math.sqrt(killed * (judged - killed) / judged + z / 4)
    return max(0.0, (middle - spread) / (judged + z)), min(1.0, (middle + spread) / (judged + z))


def made_by_hand(mutant: dict) -> bool:
    return mutant["operator"].startswith(HAND_MADE)


def counted(found: Sequence[dict]) -> list[dict]:
    """Returns the mutants that a rate is of: those that nobody explained."""
    return [f for f in found if f["verdict"] != EXPLAINED]


def rate(found: Sequence[dict]) -> float:
    """Returns the share of killed mutants among those that nobody explained."""
    judged = counted(found)
    return sum(f["verdict"] == KILLED for f in judged) / len(judged) if judged else 1.0


def of_kind(found: Sequence[dict], kind: str, there: dict) -> str:
    """Returns the sentence on the mutants of a kind. there: the population, {} where it was not recorded."""
    mine = [f for f in found if made_by_hand(f) is KINDS[kind]]
    judged, sample = counted(mine), f"{len(mine):,} of {there[kind]:,} judged" if there else f"{len(mine):,} judged"
    explained = f", {len(mine) - len(judged)} of them explained" * (len(mine) > len(judged))
    if not judged:
        return f"{kind.capitalize()} mutants: no rate ({sample}{explained})."
    killed = sum(f["verdict"] == KILLED for f in judged)
    low, high = interval(killed, len(judged))
    share = f"{killed / len(judged):.1%}, 95% interval {low:.1%} to {high:.1%}"
    return f"{kind.capitalize()} mutants: {killed} of {len(judged)} killed ({share}; {sample}{explained})."


def sentences(found: Sequence[dict], there: dict) -> str:
    """Says of each kind how many mutants were killed, how many survived, and whether the goal is met."""
    number = Counter(f["verdict"] for f in found)
    met = "met" if rate(found) >= GOAL else "not met"
    goal = f"The goal, {GOAL:.0%} of both kinds together, is {met} ({rate(found):.1%})."
    return " ".join([*(of_kind(found, kind, there) for kind in KINDS), f"{number[SURVIVED]} survived.", goal])


def told(folder: Path, found: Sequence[dict]) -> str:
    """Returns the sentences on the mutants of a report's folder."""
    file = folder / FILE
    return sentences(found, json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})
