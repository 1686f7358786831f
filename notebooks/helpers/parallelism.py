"""Shows the audit of parallelism: one hash a configuration, how much differs, the first op that does, and the goals."""

import json

import numpy as np

from bi_kernels.audit.axes import Side
from bi_kernels.audit.findings import Row
from bi_kernels.audit.index import goals
from bi_kernels.audit.report import tables as show
from bi_kernels.audit.report.markdown import Markdown
from bi_kernels.audit.targets.distributed.step import PARALLEL_CONFIGS, case
from helpers.figures import plt  # in the style of all that is drawn

COLUMNS = {"invariance": "logprobs", "parity": "decode", "gradient invariance": "gradients", Side.TRAINED: "weights"}
RANKS = {config.name: config.ranks for config in PARALLEL_CONFIGS}


def hashes(session) -> list[dict]:
    """Returns a line for each configuration: the one SHA-256 of its logprobs, gradients and weights."""
    return [{"world": c.name, "ranks": c.ranks, "SHA-256": e.digest()} for c, e in session.evidence.items()]


def conclusion(session) -> str:
    """Says how many configurations end in the hash of one rank."""
    alone = {c: e.digest() for c, e in session.evidence.items() if c == c.alone}
    several = {c: e.digest() for c, e in session.evidence.items() if c != c.alone}
    same = sum(alone.get(c.alone) == digest for c, digest in several.items())
    ranks = max((c.ranks for c in several), default=1)
    return f"{same} of {len(several)} ways to use up to {ranks} ranks end in the hash of one rank."


def first_divergence(one: list[dict], ranks: list[list[dict]]) -> tuple[str, int] | None:
    """Returns the first op of which a rank has other bits than one rank alone, and how many outputs came before it, all
    of which agree; None if there is none."""
    counts = {len(records) for records in ranks}
    if counts != {len(one)} and min(counts, default=0) >= len(one):
        return "the number of outputs", len(one)
    for number, expected in enumerate(one):
        for rank, records in enumerate(ranks):
            if number >= len(records) or not _agree(records[number], expected, rank):
                return expected["op"], number
    return None


def _agree(found: dict, expected: dict, rank: int) -> bool:
    if found["op"] != expected["op"]:
        return False
    if found["columns"] == expected["columns"]:
        return found["whole"] == expected["whole"]
    part = found["part"]
    return part == expected["whole"][rank * len(part) : (rank + 1) * len(part)]


def first_divergences(session) -> list[dict]:
    """Returns a line for each configuration and control that cuts weights: the first op whose output differs from one
    rank's, and how many outputs before it agree."""
    alone = {c: e.ops for c, e in session.evidence.items() if c == c.alone}
    lines = [("ours", e) for c, e in session.evidence.items() if c.dp == 1 < c.tp and not c.tokens]
    lines += [(name, evidence) for name, evidence in session.broken.items() if evidence.ops]
    found = []
    for who, mine in lines:
        one = alone.get(mine.config.alone, [])
        where = first_divergence(one[0], mine.ops) if one and mine.ops else ("nothing was left", 0)
        op, before = where or ("none", len(one[0]))
        line = {"who": who, "world": mine.config.name, "first op that differs": op, "outputs before it": before}
        found.append(line)
    return found


def judged_costs(session) -> list[tuple[dict, float, float | None]]:
    """Returns each measurement, our time over that of the usual way, and the largest that its goal allows, if it has
    one."""
    goal = {(g["what"], g["ranks"]): g["most"] for g in case(session.parameters["shapes"])["timed"]["goals"]}
    found = []
    for cost in session.costs:
        ours, usual = cost["ms"].values()
        found.append((cost, ours / usual, goal.get((cost["what"], RANKS[cost["world"]]))))
    return found


def costs(session):
    """Returns a table of the measurements next to the usual ways, or why there is none; leaves which goals are met in a
    file, for the report's first sentence and the index."""
    if not session.costs:
        asked = session.timed and session.parameters["nproc"] > 1
        none = "Nothing is timed: that takes two GPUs, and shapes that are not tiny."
        return Markdown("No measurement ended; the verdicts say why." if asked else none)
    if session.out:
        (session.out / goals.FILE).write_text(json.dumps(goals_met(session), indent=1) + "\n", encoding="utf-8")
    return show.table(cost_lines(session))


def cost_lines(session) -> list[dict]:
    """Returns a line for each measurement: milliseconds of ours and of the usual way, ours over theirs, and the goal."""
    found = []
    for cost, times, most in judged_costs(session):
        (_, ours), (usual, theirs) = cost["ms"].items()
        goal = f"{'✔' if times <= most else '✘'} {most} at most" if most else ""
        line = {"world": cost["world"], "what": cost["what"], "of": cost["case"], "ours, ms": f"{ours:.3g}"}
        found.append(line | {"the usual way": usual, "ms": f"{theirs:.3g}", "times": f"{times:.2f}", "goal": goal})
    return found


def goals_met(session) -> list[dict]:
    """Returns each measurement with a goal, as `goals.summary` takes them, and for each goal without one met: None."""
    left = {(g["what"], g["ranks"]) for g in case(session.parameters["shapes"])["timed"]["goals"]}
    found = []
    for cost, times, most in judged_costs(session):
        if most:
            left.discard((cost["what"], RANKS[cost["world"]]))
            what = f"{cost['what']}, {RANKS[cost['world']]} ranks: {cost['case']}"
            goal = {"value": "times", "most": most}
            found.append({"what": what, "goal": goal, "reached": times, "met": times <= most})
    return found + [{"what": f"{what}, {ranks} ranks", "met": None} for what, ranks in sorted(left)]


def draw(rows: list[Row]):
    """Draws a line for each configuration or control, a column for each kind of result, and in each cell how many differ
    of how many; hatched where nothing was asked."""
    rows = [r for r in rows if r.relation in COLUMNS and (r.control or r.against == "one rank")]
    lines = list(dict.fromkeys((r.candidate if r.control else "ours", r.layout) for r in rows))
    share = np.full((len(lines), len(COLUMNS)), np.nan)
    said = {}
    for r in rows:
        at = lines.index((r.candidate if r.control else "ours", r.layout)), list(COLUMNS).index(r.relation)
        if r.elements:
            share[at] = r.mismatches / r.elements
            said[at] = f"{r.mismatches} of {r.elements}"
        else:
            said[at] = "no result"
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(lines) + 1.4), layout="constrained")
    axes.patch.set(hatch="///", edgecolor="#9a9a9a", facecolor="none")
    shade = np.where(share > 0, 0.2 + 0.8 * share, share)  # one that differs does not look like none
    axes.imshow(np.ma.masked_invalid(shade), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (y, x), text in said.items():
        dark = not np.isnan(share[y, x]) and share[y, x] > 0.5
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color="white" if dark else "black")
    axes.set_xticks(range(len(COLUMNS)), COLUMNS.values())
    axes.set_yticks(range(len(lines)), [f"{world}" if who == "ours" else f"{who}, {world}" for who, world in lines])
    judged = [r for r in rows if not r.control]
    wrong, asked = sum(bool(r.mismatches) or r.mismatches is None for r in judged), len(judged)
    axes.set_title(
        f"Every world has one rank's bits ({asked} comparisons)"
        if not wrong
        else f"{wrong} of {asked} comparisons differ",
        loc="left",
    )
    axes.set_xlabel("differ from one rank, of how many; hatched: not asked", fontsize=9, loc="left")
    plt.close(figure)
    return figure
