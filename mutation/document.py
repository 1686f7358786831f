"""The report of a run of mutants: which checks killed them, who survived with what diff, and the rates."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from bi_kernels.audit.findings import grouped
from bi_kernels.audit.index.picture import png
from bi_kernels.audit.index.report import promised
from bi_kernels.audit.report import escape, tables
from bi_kernels.audit.report.markdown import folded, table
from bi_kernels.contract import CONTRACT
from mutation import plan
from mutation.operators import HAND_MADE, Mutant
from mutation.reach import package

GOAL: float = CONTRACT["mutants"]["kill_rate"]
METHOD = """One place of a kernel or a launcher is broken at a time, by an operator or by hand. Each mutant runs in its
own process and is asked most of what the audits of its ops ask, until one check needs a fix.

- Of an op: everything in fp32, what kills most in bf16, nothing in fp16; most of it at tiny sizes. `attention`
  itself, but none of its variants, is asked everything in bf16 too.
- Where the ops of a file are fewer than four, others that reach it are asked as well.
- Kernels for sm_90 are asked in bf16, at sizes that reach them: attention of ragged and long samples, in one call,
  alone, padded, in chunks and decoded; GEMM's rings and cuBLASLt's products against Triton's, bit by bit.
- On a GPU, attention is asked these sizes instead of drawn cases, and few of its experiments.
- Experts, `batch_invariant_mode` and the adapter of Transformers are asked by small models.
- A mutant counts as killed if every seed of the run kills it. Some kills are no comparison: *time* is no answer in
  time, *raised* an exception, *crashed* the end of the process.
- Not asked: larger models, the static audit, that of dtypes, GEMM's sweep in CUDA graphs and compiled, and its rows
  beyond 4,096. Kernels for sm_90 do not run on the interpreter, which sees reads beyond a tensor.

A survivor is a question to add, or stands in the file of equivalents with the reason why nothing that is promised
changes there; a mutant of that file that is killed fails the run. Left alone is most of what the contract calls free
(GEMM's tiles and their choice, warps and stages of a launch), and what no audit of bits is about (checks of arguments,
texts). `mutants.json` says of each what became of it, and which question killed it. An interval is Wilson's, as of a
random sample; generated mutants are drawn function by function."""
EXPLAINED, KILLED, SURVIVED = "explained", "killed", "survived"
POPULATION = "population.json"  # how many mutants there are, by kind and file
BUT = "in the file of equivalents, but"
Z = 1.959964  # the normal distribution's 97.5 % quantile


def interval(killed: int, judged: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a rate: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927), 209–212, equation 4."""
    middle, spread = killed + Z**2 / 2, Z * math.sqrt(killed * (judged - killed) / judged + Z**2 / 4)
    return max(0.0, (middle - spread) / (judged + Z**2)), min(1.0, (middle + spread) / (judged + Z**2))


def counts(found: Sequence[dict]) -> dict[str, int]:
    number = Counter(f["verdict"] for f in found)
    return {"mutants": len(found), **{v: number[v] for v in (KILLED, EXPLAINED, SURVIVED)}}


def rate(found: Sequence[dict]) -> float:
    """Returns the share of killed mutants among those that nobody explained."""
    n = counts(found)
    return n[KILLED] / (n["mutants"] - n[EXPLAINED]) if n["mutants"] > n[EXPLAINED] else 1.0


def of_kind(found: Sequence[dict], kind: str, there: dict) -> str:
    """Returns the sentence on the mutants of a kind, "hand-made" or "generated". there: the population, or {}."""
    mine = [f for f in found if f["operator"].startswith(HAND_MADE) == (kind == "hand-made")]
    n = counts(mine)
    judged, killed = n["mutants"] - n[EXPLAINED], n[KILLED]
    sample = f"{len(mine):,}{f' of {there[kind]:,}' if there else ''} judged"
    sample += f", {n[EXPLAINED]} of them explained" * bool(n[EXPLAINED])
    if not judged:
        return f"{kind.capitalize()} mutants: no rate ({sample})."
    low, high = interval(killed, judged)
    share = f"{killed / judged:.1%}, 95% interval {low:.1%} to {high:.1%}"
    return f"{kind.capitalize()} mutants: {killed} of {judged} killed ({share}; {sample})."


def summary(found: Sequence[dict], there: dict) -> str:
    """Says how many mutants of each kind were killed, how many survived, and whether the goal is met."""
    met = "met" if rate(found) >= GOAL else "not met"
    goal = f"The goal, {GOAL:.0%} of both kinds together, is {met} ({rate(found):.1%})."
    kinds = (of_kind(found, kind, there) for kind in ("hand-made", "generated"))
    return " ".join([*kinds, f"{counts(found)[SURVIVED]} survived.", goal])


def diff(m: Mutant) -> str:
    """Returns the unified diff of a mutant, without what stands at the end of the file for it."""
    text = (package() / m.file).read_text(encoding="utf-8")
    changed = text[: m.start] + m.text + text[m.end :]
    lines = unified_diff(text.splitlines(), changed.splitlines(), m.file, m.file, n=1, lineterm="")
    return "\n".join(lines)


def by(found: Sequence[dict], column: str) -> str:
    """Returns a table of a column's values: how many mutants, and what became of them."""
    lines = []
    for value, mine in sorted(grouped(found, lambda f: f[column].split(":")[0]).items()):
        n = counts(mine)
        share = f"{rate(mine):.1%}" if n["mutants"] > n[EXPLAINED] else "–"
        lines.append({column: value, **n, "kill rate": share})
    return table(lines)


def killers(found: Sequence[dict]) -> str:
    """Returns a table of the checks that killed first."""
    number = Counter((f["relation"], f["layout"].split(":")[0]) for f in found if f["verdict"] == KILLED)
    lines = [{"relation": r, "layout": layout or "–", "mutants killed": n} for (r, layout), n in number.most_common()]
    return table(lines) if lines else "None."


def title(found: Sequence[dict]) -> str:
    killed = counts(found)[KILLED]
    return f"What killed {killed} of {len(found)} mutants first, by file; the others are explained or survived"


def figure(found: Sequence[dict]) -> plt.Figure:
    """Draws, by file, how many mutants each relation killed first, and how many are explained or survived."""
    ends = pd.Series([f["relation"] if f["verdict"] == KILLED else f["verdict"] for f in found], name="")
    number = pd.crosstab(pd.Series([f["file"] for f in found], name=""), ends)
    relations = number.drop(columns=[EXPLAINED, SURVIVED], errors="ignore").sum().sort_values(ascending=False).index
    blues = plt.get_cmap("Blues_r")([i / (len(relations) + 1) for i in range(len(relations))])
    colors = dict(zip(relations, blues)) | {EXPLAINED: "#dddddd", SURVIVED: "#D55E00"}
    fig, ax = plt.subplots(figsize=(8.5, 1.2 + 0.28 * len(number)))
    number = number[[kind for kind in colors if kind in number]]
    number.plot.barh(stacked=True, ax=ax, color=colors, width=0.8, edgecolor="white", linewidth=0.5)
    ax.invert_yaxis()
    ax.set(xlabel="mutants", title=title(found))
    ax.legend(edgecolor="none", fontsize=7.5, loc="upper left", bbox_to_anchor=(1, 1))
    fig.tight_layout()
    return fig


def check_equivalents(
    found: Sequence[dict], entries: Sequence[plan.Equivalent], of: dict[str, Mutant], device: str
) -> list[str]:
    """Sets the verdict of survivors that an entry of the file of equivalents explains, with its reason; returns what is
    wrong: other survivors, and entries that do not hold. of: the mutants by id."""
    wrong = []
    for f in found:
        reason = plan.explained(of[f["id"]], entries, device)
        place = f"{f['file']}, line {f['line']}, {f['operator']}: {f['before']!r} becomes {f['text']!r}"
        if reason and (f["verdict"] == KILLED or f.get("detail")):  # a detail: killed with one seed only
            killed = f"killed by {f['relation']} {f['layout']} of {f.get('op', '?')}" * (f["verdict"] == KILLED)
            f["not_held"] = f"{place}: {BUT} {killed or f['detail']}"
            wrong.append(f["not_held"])
        elif reason:
            f |= {"verdict": EXPLAINED, "reason": reason}
        elif f["verdict"] == SURVIVED:
            wrong.append(f"{place}: survived")
    return wrong


def population(mutants: Sequence[Mutant], names: Sequence[str], patterns: str = "") -> dict:
    """Returns how many mutants there are to draw from: by hand, generated, and in each file; and how they are judged.
    names: of the audits; patterns: of files."""
    by_hand = sum(m.operator.startswith(HAND_MADE) for m in mutants)
    number = {"hand-made": by_hand, "generated": len(mutants) - by_hand}
    found = {"audits": [*names], **number, "files": dict(Counter(m.file for m in mutants)), "method": METHOD}
    return found | ({"patterns": patterns} if patterns else {})


def left_alone(found: Sequence[dict], there: dict) -> str:
    """Says how many mutants there are, and in which files a run broke nothing; there: from `population`."""
    names = there["audits"]
    whose = f"the audits named ({', '.join(names)})" if names else "all audits"
    patterns = [f"`{pattern}`" for pattern in there.get("patterns", "").split(",") if pattern]
    whose += f" in files that match {', '.join(patterns)}" if patterns else ""
    left = {file: count for file, count in there["files"].items() if file not in {f["file"] for f in found}}
    files, more = len(there["files"]), sum(left.values())
    said = (
        f"In {len(left)} of {files} files, which hold {more:,} mutants, nothing was broken: {', '.join(left)}."
        if left
        else f"In each of the {files} files something was broken."
    )
    return f"There are {there['hand-made'] + there['generated']:,} mutants of {whose}. {said}"


def record(folder: Path, found: Sequence[dict], of: dict[str, Mutant], made: dict, there: dict) -> None:
    """Writes mutants.json (with the diff of each that was not killed), population.json and provenance.json."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = [{k: v for k, v in f.items() if k != "made"} for f in found]
    shown = [f if f["verdict"] == KILLED else f | {"diff": diff(of[f["id"]])} for f in kept]
    text = ",\n".join(json.dumps(f, ensure_ascii=False) for f in shown)
    (folder / "mutants.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")
    for name, said in ((POPULATION, there), ("provenance.json", made)):
        (folder / name).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def survivors(found: Sequence[dict]) -> str:
    """Returns a line a survivor: where it is, its edit, and the seconds that each stage of what was asked took."""
    place = "{file}:{line} {function}, {operator}: {before!r} -> {text!r}".format_map
    took = lambda f: ", ".join(f"{stage} {s}" for stage, s in f.get("took", {}).items())
    return "".join(f"{place(f)} | {f.get('detail') or took(f)}\n" for f in found if f["verdict"] == SURVIVED)


def write(folder: Path) -> None:
    """Writes the report, README.md and its figure, from what a run left in a folder."""
    names = "mutants.json", POPULATION, "provenance.json"
    found, there, made = (json.loads((folder / name).read_text(encoding="utf-8")) for name in names)
    (folder / "mutants.png").write_bytes(png(figure(found)))
    plt.close("all")
    edits = lambda mine: "\n\n".join(map(_edit, mine)) or "None."
    reasons = grouped((f for f in found if f["verdict"] == EXPLAINED), lambda f: f["reason"])
    explained = [folded(f"{escape.text(reason)}: {len(mine)}", edits(mine)) for reason, mine in reasons.items()]
    parts = [
        "# Mutants: which bugs of our own kernels do the audits see?",
        f"**{summary(found, there)}** {left_alone(found, there)}",
        f"![{title(found)}](mutants.png)",
        f"## Survivors\n\n{edits([f for f in found if f['verdict'] == SURVIVED])}",
    ]
    if not_held := [f"- {escape.text(f['not_held'])}" for f in found if "not_held" in f]:
        parts.append("## Entries of the file of equivalents that do not hold\n\n" + "\n".join(not_held))
    parts += [
        f"## How\n\n{there['method']}",
        f"## By operator\n\n{by(found, 'operator')}",
        f"## By file\n\n{by(found, 'file')}",
        f"## Which question killed first\n\n{killers(found)}",
        "## Explained\n\n" + ("\n".join(explained) or "None."),
        f"## Provenance\n\n{tables.facts(made).data}",
        promised(folder),
    ]
    (folder / "README.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _edit(f: dict) -> str:
    """Returns the heading and the diff of a mutant, and with how many seeds it survived."""
    said = f"{f['detail']}\n\n" if f.get("detail") else ""
    return f"### {f['file']}, line {f['line']}: {f['operator']}\n\n{said}```diff\n{f['diff']}\n```"
