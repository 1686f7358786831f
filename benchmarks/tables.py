"""The tables of the benchmark's notebook, as lines of columns, and its measurements held against the goals."""

import statistics
from collections.abc import Callable, Sequence

import pandas as pd

from bi_kernels.audit.findings import grouped
from bi_kernels.audit.index.goals import MET, MISSED, bar, number

UNKNOWN = "–"
TAKES = {"geometric mean": statistics.geometric_mean, "smallest": min, "largest": max}
MARKS = {"Triton": "ᵗ", "Gluon": "ᵍ"}  # of a cell, by what computed it
SLOWEST = 12  # cells listed


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


def of_goals(found: Sequence[dict]) -> list[dict]:
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
            "why": f["goal"]["why"],
        }
        for f in found
    ]


def _spread(spread: Sequence[float]) -> str:
    """Returns a median and half the distance of its quartiles; benchmark.jsonl has all three."""
    median, low, high = spread
    return f"{median:.3g} ±{(high - low) / 2 / median:.0%}"


def by_shape(records: Sequence[dict], column: str = "M") -> list[dict]:
    """Returns ratios to the peer, a line a layer and a column a number of rows, marked where cuBLASLt is not the
    path."""
    cell = lambda r: f"{r['ratio']:.2f}{MARKS.get(r['path'].partition(' ')[0], '')}" if "ratio" in r else UNKNOWN
    return [
        {"layer": case, "N": mine[0]["N"], "K": mine[0]["K"]}
        | ({} if direction == "forward" else {"": direction})
        | {f"{column} {r[column]}": cell(r) for r in mine}
        for (case, direction), mine in grouped(records, lambda r: (r["case"], r["direction"])).items()
    ]


def summed(records: Sequence[dict], key: Callable[[dict], str], title: str) -> list[dict]:
    """Returns the number of ratios, their geometric mean and the smallest, and the mean of wall times', by `key`."""
    found = []
    for name, mine in grouped((r for r in records if "ratio" in r), key).items():
        worst = min(mine, key=lambda r: r["ratio"])
        mean = number(statistics.geometric_mean(r["ratio"] for r in mine))
        line = {title: name, "measurements": len(mine), "geometric mean": mean, "smallest": number(worst["ratio"])}
        walls = [(r["wall µs"].get(r["against"]), r["wall µs"].get(r["who"])) for r in mine if "wall µs" in r]
        if walls := [theirs[0] / ours[0] for theirs, ours in walls if theirs and ours]:
            line["wall, geometric mean"] = number(statistics.geometric_mean(walls))
        found.append(line | {"where": label(worst)})
    return found


def by_family(records: Sequence[dict]) -> list[dict]:
    """Returns `summed` by family; a layer that several families share counts for each."""
    each = [r | {"family": family} for r in records for family in r["families"]]
    return summed(each, lambda r: r["family"], "family")


def refused(records: Sequence[dict]) -> list[dict]:
    """Returns the peers that raised, in how many measurements, and their first error."""
    errors = [(r, name, text) for r in records for name, text in r.get("errors", {}).items()]
    return [
        {"group": group, "peer": name, "measurements": len(mine)}
        | {"of": ", ".join(dict.fromkeys(r["case"] for r, *_ in mine)), "said": mine[0][2]}
        for (group, name), mine in grouped(errors, lambda e: (e[0]["group"], e[1])).items()
    ]


def against(records: Sequence[dict], peer: str) -> list[dict]:
    """Returns the measurements that a peer is in, with the ratio to that one."""
    mine = [r for r in records if peer in r.get("ms", {})]
    return [r | {"against": peer, "ratio": r["ms"][peer][0] / r["ms"][r["who"]][0]} for r in mine]


def everybody(records: Sequence[dict]) -> list[dict]:
    """Returns a line a measurement: everybody's time on the device, or on the CPU of an eager call; the wall time of
    ours and of the peer; our ratio and rates."""
    found = []
    for r in records:
        line = {"what": label(r), "direction": r["direction"]} | {k: r[k] for k in ("N", "K", "path") if k in r}
        unit, walls = next(k for k in ("ms", "CPU µs") if k in r), r.get("wall µs", {})
        line |= {f"{'ours' if name == r['who'] else name}, {unit}": _spread(times) for name, times in r[unit].items()}
        both = [f"{walls[name][0]:.0f}" for name in (r["who"], r.get("against")) if name in walls]
        line["wall µs, ours and the peer's"] = ", ".join(both)
        if "against" in r:
            line["ratio"] = f"{number(1 / r['times'])} of {r['against']}"
        rates = ("TFLOP/s",) if "path" in r else ("TB/s", "of limit", "TFLOP/s")
        found.append(line | {k: number(r[k]) for k in rates if r.get(k) is not None})
    return pd.DataFrame(found).fillna(UNKNOWN).to_dict("records")


def slowest(records: Sequence[dict]) -> list[dict]:
    """Returns `everybody` for the cells with the smallest ratios."""
    return everybody(sorted((r for r in records if "ratio" in r), key=lambda r: r["ratio"])[:SLOWEST])


def decode(records: Sequence[dict], value: str) -> dict[str, dict[str, float]]:
    """Returns the cells of decode's grid for a heat map: a line a kind of cache, a column a batch and its keys."""
    short = lambda n: f"{n // 1024}k" if n >= 1024 else str(n)
    found: dict = {}
    for r in sorted(records, key=lambda r: (r["batch"], r["keys"])):
        line = f"{r['grouping']}, D {r['head_dim']}, {r['direction']}"
        found.setdefault(line, {})[f"{r['batch']} × {short(r['keys'])}"] = r.get(value, float("nan"))
    return dict(sorted(found.items()))


def counts(records: Sequence[dict], whole: Callable[[str], int]) -> list[dict]:
    """Returns how many measurements each group has, and has in the whole grid, and what computed its products."""
    unique = lambda mine, key: ", ".join(dict.fromkeys(r[key] for r in mine if key in r))
    return [
        {"group": group, "ops": unique(mine, "op"), "measurements": len(mine)}
        | {"of the whole grid": whole(group), "products by": unique(mine, "path") or UNKNOWN}
        for group, mine in grouped((r for r in records if "op" in r), lambda r: r["group"]).items()
    ]


def counters(records: Sequence[dict]) -> list[dict]:
    """Returns a line a kernel of the hardware's counters."""
    show = lambda value: value if isinstance(value, str) else UNKNOWN if value is None else number(value)
    line = lambda group, case, kernel, **values: {"of": case, "kernel": kernel[:40]} | values
    return [line(**{k: show(v) for k, v in r.items()}) for r in records]
