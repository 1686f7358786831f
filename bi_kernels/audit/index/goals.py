"""Says in a sentence how many of a report's goals are met."""

import json
from collections.abc import Sequence
from pathlib import Path

FILE = "goals.json"
MET, MISSED = "✔", "✘"


def number(value: float) -> str:
    """Returns a number as people read it: 0.981, 23.4, 655."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def bar(goal: dict) -> str:
    sign, value = ("≥", goal["least"]) if "least" in goal else ("≤", goal["most"])
    return f"{sign} {value:g}" + (f" (aim {goal['aim']:g})" if "aim" in goal else "")


def read_summary(folder: Path) -> str:
    """Returns the summary of a report's goals, '' where it has none."""
    path = folder / FILE
    return summary(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else ""


def summary(found: Sequence[dict]) -> str:
    """Says how many goals are met, how many are not, and how many are not known."""
    met, missed, unknown = ([f for f in found if f["met"] is word] for word in (True, False, None))
    if len(unknown) == len(found):
        return f"None of {len(found)} goals was measured: that needs a CUDA GPU, and shapes that are not tiny."
    said = f"{MET} {len(met)} of {len(found)} goals met"
    said += f", {MISSED} {len(missed)} missed" if missed else ", none missed"
    said += f", {len(unknown)} not measured in this run." if unknown else "."
    if far := max((f for f in missed if f.get("reached")), key=_times_missed, default=None):
        goal = bar(far["goal"]).partition(" (")[0]  # without what is aimed at
        said += f" Farthest from its goal: {far['what']}, {number(far['reached'])} (goal {goal})."
    return said


def _times_missed(missed: dict) -> float:
    """Returns the factor by which a goal is missed."""
    goal, reached = missed["goal"], missed["reached"]
    return goal["least"] / reached if "least" in goal else reached / goal["most"]
