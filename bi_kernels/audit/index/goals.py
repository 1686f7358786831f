"""Says in a sentence how a report's measurements compare with their goals: as sizes, gains and losses alike."""

import json
from collections.abc import Sequence
from pathlib import Path

FILE = "goals.json"
MET, MISSED = "✔", "✘"
UNITS = {"ratio": " × the peer's speed", "times": " × the peer's time"}
NAMED = 3  # gains, and losses, that a sentence has room for
NOTABLE = 1.01  # times as fast as a peer, from where on it is told as a gain


def number(value: float) -> str:
    """Returns a number as people read it: 0.981, 23.4, 655."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def bar(goal: dict) -> str:
    sign, value = ("≥", goal["least"]) if "least" in goal else ("≤", goal["most"])
    return f"{sign} {value:g}"


def read(folder: Path) -> list[dict]:
    """Returns a report's goals, as `evaluate` made them; none where it has no file of them."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def counted(found: Sequence[dict]) -> str:
    """Says how many goals are met, '' without goals."""
    judged = [f for f in found if f["met"] is not None]
    if not judged:
        return "no goal was measured" if found else ""
    return f"{sum(f['met'] for f in judged)} of {len(judged)} goals met"


def summary(found: Sequence[dict]) -> str:
    """Says what is fastest beside its peer, what is farthest from its goal, both as sizes, and how many goals are met;
    '' without goals."""
    unknown = sum(f["met"] is None for f in found)
    if unknown == len(found):
        none = f"None of {unknown} goals was measured: that needs a CUDA GPU, and shapes that are not tiny."
        return none if found else ""
    known = [f for f in found if f.get("reached")]
    ahead = [f for f in known if _gain(f) >= NOTABLE]
    missed = [f for f in known if not f["met"]]
    of_goal = lambda f: f"{_size(f)} (goal {bar(f['goal'])})"
    said = _named("Largest gain among the goals", sorted(ahead, key=_gain, reverse=True), _size)
    said += _named("Farthest from its goal", sorted(missed, key=_times_missed, reverse=True), of_goal)
    said += f"{MISSED if any(f['met'] is False for f in found) else MET} {counted(found)}"
    return said + (f", {unknown} not measured in this run." if unknown else ".")


def _named(head: str, found: Sequence[dict], text) -> str:
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{head}: {'; '.join(map(text, found[:NAMED]))}{more}. " if found else ""


def _size(measured: dict) -> str:
    return f"{measured['what']}, {number(measured['reached'])}{UNITS.get(measured['goal'].get('value'), '')}"


def _gain(measured: dict) -> float:
    """Returns by which factor we are faster than a peer; 0 of what has none."""
    kind, reached = measured["goal"].get("value"), measured["reached"]
    return reached if kind == "ratio" else 1 / reached if kind == "times" else 0.0


def _times_missed(missed: dict) -> float:
    """Returns the factor by which a goal is missed."""
    goal, reached = missed["goal"], missed["reached"]
    return goal["least"] / reached if "least" in goal else reached / goal["most"]
