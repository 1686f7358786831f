"""Sums up where each recipe drifts and what it costs: sentences and tables, made of `recipes.json`."""

import statistics
from collections.abc import Iterable

from helpers.recipes.products import BOTH, DIRECTIONS, ON_A_CPU, OURS, PLAIN, STARVED, THEIRS, UNSPLIT

FILE = "recipes.json"
STOCK_ON_A_CPU = "On a CPU torch's linear is not cuBLAS's, and no recipe reaches it: nothing is said here about cuBLAS."
WORD = {"forward": "forward", "dX": "in dX"}
SHORT = {
    PLAIN.name: "plain cuBLAS",
    STARVED.name: "cuBLAS with little workspace",
    UNSPLIT.name: "cuBLASLt that torch tells not to split K",
    BOTH.name: "cuBLASLt with both, as vLLM's batch-invariant mode has them on Hopper,",
    OURS.name: "`bi_kernels.linear`",
}


NAME = {  # in a finding
    STARVED.name: "a small workspace",
    UNSPLIT.name: "cuBLASLt without a split",
    BOTH.name: "both together",
}


def collected(cells: Iterable[dict]) -> dict:
    """Returns, by direction and case, how many row counts were asked, {M: [elements that differ, of]} of those that
    drift, {M: ms}, and why others have none."""
    empty = lambda: {direction: {} for direction in DIRECTIONS}
    found = {"asked": empty(), "drifts": empty(), "ms": empty(), "why": []}
    for cell in cells:
        of = lambda kind: found[kind][cell["direction"]]
        case, m = cell["case"], str(cell.get("M"))
        if "why" in cell:
            found["why"].append(f"{case}, {cell['direction']}: {cell['why']}")
        elif "ms" in cell:
            of("ms").setdefault(case, {})[m] = cell["ms"]
        else:
            of("asked")[case] = of("asked").get(case, 0) + 1
            if cell["drift"].mismatches:
                of("drifts").setdefault(case, {})[m] = [cell["drift"].mismatches, cell["drift"].elements]
    return found


def counts(found: dict, direction: str) -> list[int]:
    """Returns the row counts at which a recipe drifts at any shape."""
    return sorted({int(m) for of_case in found["drifts"][direction].values() for m in of_case})


def where(found: dict, direction: str) -> str:
    """Says up to which M a recipe drifts in a direction, and at how many of the shapes."""
    asked, drifting = found["asked"][direction], counts(found, direction)
    if not asked:
        return "not measured"
    if not drifting:
        return "at no M asked"
    return f"{_upto(drifting)}, {len(found['drifts'][direction])} of {len(asked)} shapes"


def _upto(drifting: list[int]) -> str:
    return f"up to M = {drifting[-1]}" if drifting != [1] else "at M = 1 alone"


def ratios(found: dict, plain: dict, direction: str) -> dict[tuple[str, int], float]:
    """Returns the times of a recipe over plain cuBLAS's, by case and M."""
    theirs = plain["ms"][direction]
    mine = ((case, m, ms) for case, of_case in found["ms"][direction].items() for m, ms in of_case.items())
    return {(case, int(m)): ms / theirs[case][m] for case, m, ms in mine if m in theirs.get(case, {})}


def _costs(found: dict, plain: dict) -> dict[tuple[str, str, int], float]:
    return {(d, *at): ratio for d in DIRECTIONS for at, ratio in ratios(found, plain, d).items()}


def cost(found: dict, plain: dict) -> str:
    """Says what a recipe costs beside plain cuBLAS, over both directions; '' where nothing was timed."""
    if not (every := _costs(found, plain)):
        return ""
    direction, case, m = max(every, key=every.get)
    most = f"at most {every[direction, case, m]:.2f} ({case}, {direction}, M = {m})"
    return f"{statistics.geometric_mean(every.values()):.2f} times plain cuBLAS's in the geometric mean, {most}"


def table(document: dict) -> list[dict]:
    """Returns a line a recipe: what it does, where it drifts, what it costs, and the script that shows it."""
    every = document["recipes"]
    return [
        {
            "recipe": name,
            "what": found["what"],
            **{f"{d} drifts": where(found, d) for d in DIRECTIONS},
            "time": cost(found, every.get(PLAIN.name, found)) or "–" if name != PLAIN.name else "1",
            "shown by": f"`{found['script']}`: {found['shown']}" if "script" in found else "–",
            "not measured": "; ".join(found["why"][:2]) or "–",
        }
        for name, found in every.items()
    ]


def by_case(document: dict) -> list[dict]:
    """Returns a line a shape: at which M each recipe drifts."""
    lines = []
    for case, (n, k) in document["shapes"].items():
        line = {"layer": case, "N × K": f"{n} × {k}"}
        for name, found in document["recipes"].items():
            for direction in DIRECTIONS:
                drifting = found["drifts"][direction].get(case, {})
                asked = case in found["asked"][direction]
                line[f"{name}, {direction}"] = spans(map(int, drifting), document["rows"]) if asked else "not measured"
        lines.append(line)
    return lines


def spans(drifting: Iterable[int], rows: list[int]) -> str:
    """Names row counts; those that follow each other among the rows asked, by the first and the last."""
    parts: list[list[int]] = []
    for m in sorted(drifting):
        if parts and rows.index(m) == rows.index(parts[-1][-1]) + 1:
            parts[-1].append(m)
        else:
            parts.append([m])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts) or "none"


def finding(document: dict) -> str:
    """Says in short sentences which cuBLAS settings still drift, and up to which M; our kernels are another matter."""
    every = {name: found for name, found in document["recipes"].items() if name != OURS.name}
    if ON_A_CPU.name in every:
        reach = _reach(every[ON_A_CPU.name]) or "at no M asked"
        return f"Nothing is said about cuBLAS, which no CPU runs: {ON_A_CPU.name} drifts {reach}."
    plain = every.pop(PLAIN.name, None)
    measured = {name: found for name, found in every.items() if all(found["asked"].values())}
    if not measured:
        return "No cuBLAS setting was measured."
    bad = [f"{NAME[name]} {_reach(found)}" for name, found in measured.items() if drifting_in(found)]
    good = [NAME[name] for name, found in measured.items() if not drifting_in(found)]
    lost = [NAME[name] for name in every if name not in measured]
    said = [f"{len(bad)} of {len(measured)} cuBLAS settings still drift with M{': ' * bool(bad)}{', '.join(bad)}."]
    said += [f"No drift at any M asked: {', '.join(good)}."] * bool(good)
    said += [f"Not measured: {', '.join(lost)}."] * bool(lost)
    if plain and all(plain["asked"].values()):
        said += [f"Without a setting, cuBLAS drifts {_reach(plain) or 'at no M asked'}."]
    return " ".join(said)


def _reach(found: dict) -> str:
    """Says up to which M something drifts in either direction, '' where it does not."""
    drifting = sorted({m for direction in DIRECTIONS for m in counts(found, direction)})
    return f"{'up to' if drifting != [1] else 'at'} M = {drifting[-1]}" if drifting else ""


def drifting_in(found: dict) -> list[str]:
    """Returns the directions in which a recipe drifts."""
    return [direction for direction in DIRECTIONS if counts(found, direction)]


def _clause(found: dict) -> str:
    """Says as the end of a sentence where a recipe drifts."""
    if not all(found["asked"].values()):
        return "was not measured"
    here = {d: f"{WORD[d]} {_upto(counts(found, d))}" for d in drifting_in(found)}
    if not here:
        return "drifts at no M asked"
    if len(here) == len(DIRECTIONS) and len({_upto(counts(found, d)) for d in here}) == 1:
        return f"drifts {_upto(counts(found, 'dX'))}, forward and in dX"
    return f"drifts {' and '.join(here.values())}" + "".join(f", and not {WORD[d]}" for d in WORD if d not in here)


def sentence(document: dict) -> str:
    """Says in one sentence, which is the README's, what each recipe comes to."""
    every, parts = document["recipes"], []
    for recipe in (*THEIRS, OURS):
        if found := every.get(recipe.name):
            most = max(_costs(found, every[PLAIN.name]).values(), default=0) if PLAIN.name in every else 0
            paid = f", at up to {most:.2f} times plain cuBLAS's time" if most and recipe in THEIRS[1:] else ""
            parts.append(f"{SHORT[recipe.name]} {_clause(found)}{paid}")
    rows = document["rows"]
    where = f"On an {document['device']} (torch {document['torch'].partition('+')[0]}, {document['dtype']})"
    asked = f"{len(document['shapes'])} linear layers at M = {rows[0]} to {rows[-1]}, forward and dX"
    against = f"held against the bits of the same rows in a call of {document['largest']}"
    timed = {m for found in every.values() for way in found["ms"].values() for times in way.values() for m in times}
    return f"{where}, {asked}, {against}{f', and timed at {len(timed)} M' * bool(timed)}: {'; '.join(parts)}."
