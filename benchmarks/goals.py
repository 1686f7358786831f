"""Compares measurements with the contract's goals."""

import statistics
from collections.abc import Sequence

from bi_kernels.audit.index.goals import MET, MISSED, bar, number

UNKNOWN = "–"
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
