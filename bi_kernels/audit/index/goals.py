"""Compares measurements with the contract's goals."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

FILE = "goals.json"
MET, MISSED, UNKNOWN = "✔", "✘", "–"
TAKES = {"geometric mean": statistics.geometric_mean, "smallest": min, "largest": max}


def evaluate(records: Sequence[dict], goals: Sequence[dict]) -> list[dict]:
    """Returns each goal with the value reached, the number of measurements, the worst of them, and whether it is met:
    None where nothing was measured."""
    found = []
    for goal in goals:
        mine = [r for r in records if goal["of"].items() <= r.items() and r.get(goal["value"]) is not None]
        line = {"what": goal["what"], "goal": goal, "count": len(mine), "reached": None, "met": None, "worst": ""}
        if mine:
            reached = TAKES[goal["take"]]([r[goal["value"]] for r in mine])
            least = "least" in goal
            worst = (min if least else max)(mine, key=lambda r: r[goal["value"]])
            met = reached >= goal["least"] if least else reached <= goal["most"]
            line |= {"reached": reached, "met": met, "worst": label(worst)}
        found.append(line)
    return found


def label(record: dict) -> str:
    """Names a measurement as a table does."""
    sizes = "".join(f", {k} {record[k]}" for k in ("M", "tokens") if k in record and k not in record["case"])
    return f"{record['op']}, {record['case']}{sizes}"


def number(value: float) -> str:
    """Returns a number as people read it: 0.981, 23.4, 655."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def bar(goal: dict) -> str:
    sign, value = ("≥", goal["least"]) if "least" in goal else ("≤", goal["most"])
    return f"{sign} {value:g}" + (f" (aim {goal['aim']:g})" if "aim" in goal else "")


def lines(found: Sequence[dict]) -> list[dict]:
    """Returns the lines of a table of goals."""
    mark = {True: MET, False: MISSED, None: UNKNOWN}
    return [
        {
            "": mark[f["met"]],
            "what": f["what"],
            "goal": bar(f["goal"]),
            "reached": UNKNOWN if f["reached"] is None else number(f["reached"]),
            "measurements": f["count"],
            "the worst of them": f["worst"] or UNKNOWN,
        }
        for f in found
    ]


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
