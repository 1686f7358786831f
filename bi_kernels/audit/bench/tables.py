"""The tables of the performance notebook: what was measured, by shape."""

import statistics
from collections.abc import Callable, Sequence

from bi_kernels.audit.bench.goals import UNKNOWN, named, number
from bi_kernels.audit.evidence.verdicts import grouped

MARKS = {"Triton": "ᵗ", "Gluon": "ᵍ"}  # of a cell, by what computed it
SLOWEST = 12  # cells listed


def _ms(spread: Sequence[float]) -> str:
    """Returns a median, in milliseconds, and half of what its quartiles are apart; benchmark.jsonl has all three."""
    median, low, high = spread
    return f"{median:.3g} ±{(high - low) / 2 / median:.0%}"


def _cell(record: dict) -> str:
    if "ratio" not in record:
        return UNKNOWN
    return f"{record['ratio']:.2f}{MARKS.get(record['path'].partition(' ')[0], '')}"


def by_shape(records: Sequence[dict], column: str = "M") -> list[dict]:
    """Returns ratios to the peer, a line a layer and a column a number of rows, marked where cuBLASLt is not the
    path."""
    found = []
    for (case, direction), mine in grouped(records, lambda r: (r["case"], r["direction"])).items():
        first = mine[0]
        line = {"layer": case, "N": first["N"], "K": first["K"]}
        line |= {} if direction == "forward" else {"": direction}
        found.append(line | {f"{column} {r[column]}": _cell(r) for r in mine})
    return found


def summed(records: Sequence[dict], key: Callable[[dict], str], title: str, value: str = "ratio") -> list[dict]:
    """Returns the geometric mean, the smallest and the number of ratios, by what `key` says of a measurement; and the
    mean of those of wall times."""
    found = []
    for name, mine in grouped((r for r in records if value in r), key).items():
        values = [r[value] for r in mine]
        mean = number(statistics.geometric_mean(values))
        worst = min(mine, key=lambda r: r[value])
        line = {title: name, "measurements": len(mine), "geometric mean": mean, "smallest": number(min(values))}
        if walls := [x for x in map(_walls, mine) if x]:
            line["wall, geometric mean"] = number(statistics.geometric_mean(walls))
        found.append(line | {"where": named(worst)})
    return found


def _walls(record: dict) -> float | None:
    """Returns the ratio of the times that a user sees, where both are known."""
    walls = record.get("wall µs", {})
    ours, theirs = walls.get(record["who"]), walls.get(record["against"])
    return theirs[0] / ours[0] if ours and theirs else None


def refused(records: Sequence[dict]) -> list[dict]:
    """Returns the peers that could not compute something, what they said first, and in how many measurements."""
    cases = lambda mine: ", ".join(dict.fromkeys(r["case"] for r, _, _ in mine))
    errors = [(r, name, text) for r in records for name, text in r.get("errors", {}).items()]
    return [
        {"group": group, "peer": name, "measurements": len(mine), "of": cases(mine), "said": mine[0][2]}
        for (group, name), mine in grouped(errors, lambda e: (e[0]["group"], e[1])).items()
    ]


def by_family(records: Sequence[dict]) -> list[dict]:
    """Returns `summed` by family; a layer that several families share counts for each."""
    each = [r | {"family": family} for r in records for family in r["families"]]
    return summed(each, lambda r: r["family"], "family")


def slowest(records: Sequence[dict]) -> list[dict]:
    """Returns the cells with the smallest ratios, with both times."""
    mine = sorted((r for r in records if "ratio" in r), key=lambda r: r["ratio"])[:SLOWEST]
    return [
        {
            "what": named(r),
            "direction": r["direction"],
            "N": r["N"],
            "K": r["K"],
            "path": r["path"],
            "ratio": number(r["ratio"]),
            "ms": _ms(r["ms"][r["who"]]),
            "peer": r["against"],
            "its ms": _ms(r["ms"][r["against"]]),
        }
        for r in mine
    ]


def against(records: Sequence[dict], peer: str) -> list[dict]:
    """Returns the measurements that a peer is in, with the ratio to that one."""
    mine = [r for r in records if peer in r.get("ms", {})]
    return [r | {"against": peer, "ratio": r["ms"][peer][0] / r["ms"][r["who"]][0]} for r in mine]


def starved(records: Sequence[dict], peer: str) -> list[dict]:
    """Returns ratios of the time of cuBLAS that was left no workspace, by layer and rows."""
    return [
        {"layer": case} | {f"M {r['M']}": number(r["ratio"]) for r in found}
        for case, found in grouped(against(records, peer), lambda r: r["case"]).items()
    ]


def everybody(records: Sequence[dict]) -> list[dict]:
    """Returns a line a measurement: milliseconds on the device of everybody, the time that a user sees, and rates."""
    found = []
    for r in records:
        line = {"op": r["op"], "case": r["case"], "direction": r["direction"]}
        unit = "ms" if "ms" in r else "operators"
        line |= {("ours" if name == r["who"] else name): _ms(times) for name, times in r[unit].items()}
        if walls := r.get("wall µs"):
            line["ours, wall µs"] = f"{walls[r['who']][0]:.0f}"
        line |= {"ratio": f"{number(r['ratio'])} of {r['against']}"} if "ratio" in r else {}
        line |= {k: number(r[k]) for k in ("TB/s", "of limit", "TFLOP/s") if r.get(k) is not None}
        found.append(line)
    columns = dict.fromkeys(k for line in found for k in line)
    return [{k: line.get(k, UNKNOWN) for k in columns} for line in found]


def decode(records: Sequence[dict], value: str) -> dict[str, dict[str, float]]:
    """Returns the cells of decode's grid for a heat map: a line a kind of cache, a column a batch and its keys."""
    short = lambda n: f"{n // 1024}k" if n >= 1024 else str(n)
    found: dict = {}
    for r in sorted(records, key=lambda r: (r["batch"], r["keys"])):
        line = f"{r['grouping']}, D {r['head_dim']}, {r['direction']}"
        found.setdefault(line, {})[f"{r['batch']} × {short(r['keys'])}"] = r.get(value, float("nan"))
    return dict(sorted(found.items()))


def calls(records: Sequence[dict]) -> list[dict]:
    """Returns what eager calls cost the CPU, ours and stock's, until they return and until the device has ended."""
    return [
        {
            "op": r["op"],
            "of": r["case"],
            "µs of the CPU": number(r["cpu_us"]),
            "stock": number(r["stock_us"]),
            "times": number(r["times"]),
            "quartiles": "{1:.1f}–{2:.1f}".format(*r["CPU µs"][r["who"]]),
            "wall µs": number(r["wall µs"][r["who"]][0]),
            "stock, wall µs": number(r["wall µs"][r["against"]][0]),
        }
        for r in records
        if "cpu_us" in r
    ]


def counts(records: Sequence[dict], whole: Callable[[str], int]) -> list[dict]:
    """Returns how many measurements each group has, and has in the whole grid, and what they ran."""
    found = []
    for group, mine in grouped((r for r in records if "op" in r), lambda r: r["group"]).items():
        paths = ", ".join(dict.fromkeys(r["path"] for r in mine if "path" in r))
        ops = ", ".join(dict.fromkeys(r["op"] for r in mine))
        found.append({"group": group, "ops": ops, "measurements": len(mine)})
        found[-1] |= {"of the whole grid": whole(group), "products by": paths or UNKNOWN}
    return found


def counters(records: Sequence[dict]) -> list[dict]:
    """Returns a line a kernel of what the hardware's counters say."""
    left_out = ("group", "case", "kernel", "waits for")
    show = lambda value: UNKNOWN if value is None else number(value)
    return [
        {"of": r["case"], "kernel": r["kernel"][:40]}
        | {k: show(v) for k, v in r.items() if k not in left_out}
        | {"waits for": r["waits for"]}
        for r in records
    ]
