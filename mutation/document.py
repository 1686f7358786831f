"""The document of a run of mutants: who was killed by what, who survived with what diff, and the rate."""

import json
from collections import Counter
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path

import matplotlib.pyplot as plt

from bi_kernels.audit.findings import grouped
from bi_kernels.audit.index.report import promised
from bi_kernels.audit.report import escape, tables
from bi_kernels.audit.report.markdown import table
from mutation import plan
from mutation.operators import Mutant
from mutation.rates import EXPLAINED, FILE, KILLED, SURVIVED, made_by_hand, rate, told
from mutation.reach import package

BUT = "in the file of equivalents, but"


def share(found: Sequence[dict]) -> str:
    """Returns the rate as a table shows it: – where all of them are explained."""
    return f"{rate(found):.1%}" if any(f["verdict"] != EXPLAINED for f in found) else "–"


def counts(found: Sequence[dict]) -> dict[str, int]:
    number = Counter(f["verdict"] for f in found)
    return {"mutants": len(found), **{v: number[v] for v in (KILLED, EXPLAINED, SURVIVED)}}


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
        lines.append({column: value, **counts(mine), "kill rate": share(mine)})
    return table(lines)


def killers(found: Sequence[dict]) -> str:
    """Returns a table of the questions that killed first."""
    number = Counter((f["relation"], f["layout"].split(":")[0]) for f in found if f["verdict"] == KILLED)
    lines = [{"relation": r, "layout": layout or "–", "mutants killed": n} for (r, layout), n in number.most_common()]
    return table(lines) if lines else "None."


def title(found: Sequence[dict]) -> str:
    """Returns the figure's title."""
    killed = sum(f["verdict"] == KILLED for f in found)
    return f"What killed {killed} of {len(found)} mutants first, by file; the others are explained or survived"


def figure(found: Sequence[dict]) -> plt.Figure:
    """Draws, by file, how many mutants each relation killed first, and how many are explained or survived."""
    relations = [r for r, _ in Counter(f["relation"] for f in found if f["verdict"] == KILLED).most_common()]
    kinds = [*relations, EXPLAINED, SURVIVED]
    files = sorted({f["file"] for f in found})
    fig, ax = plt.subplots(figsize=(8.5, 1.2 + 0.28 * len(files)))
    left = [0] * len(files)
    colors = dict(zip(relations, plt.get_cmap("Blues_r")([i / (len(relations) + 1) for i in range(len(relations))])))
    colors |= {EXPLAINED: "#dddddd", SURVIVED: "#D55E00"}
    for kind in kinds:
        value = lambda f: f["relation"] if f["verdict"] == KILLED else f["verdict"]
        widths = [sum(f["file"] == file and value(f) == kind for f in found) for file in files]
        if any(widths):
            ax.barh(files, widths, left=left, color=colors[kind], label=kind, edgecolor="white", linewidth=0.5)
        left = [a + b for a, b in zip(left, widths)]
    ax.invert_yaxis()
    ax.set(xlabel="mutants", title=title(found))
    ax.legend(edgecolor="none", fontsize=7.5, loc="upper left", bbox_to_anchor=(1, 1))
    fig.tight_layout()
    return fig


def settle(found: Sequence[dict], entries: Sequence[plan.Equivalent], of: dict[str, Mutant], device: str) -> list[str]:
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


def population(mutants: Sequence[Mutant], names: Sequence[str]) -> dict:
    """Returns of which mutants a run's are: how many there are of the audits named (of all where none is), made by hand
    and by an operator, and in which files."""
    by_hand = sum(made_by_hand(vars(m)) for m in mutants)
    files = dict(Counter(m.file for m in mutants))
    return {"audits": [*names], "hand-made": by_hand, "generated": len(mutants) - by_hand, "files": files}


def left_alone(found: Sequence[dict], there: dict) -> str:
    """Says of which mutants a run's are, and in which files it broke nothing; there: as `population` returns it."""
    names = there["audits"]
    whose = f"the audits named ({', '.join(names)})" if names else "all audits"
    left = {file: count for file, count in there["files"].items() if file not in {f["file"] for f in found}}
    files, more = len(there["files"]), sum(left.values())
    said = (
        f"In {len(left)} of {files} files, which hold {more:,} mutants, nothing was broken: {', '.join(left)}."
        if left
        else f"In each of the {files} files something was broken."
    )
    return f"There are {there['hand-made'] + there['generated']:,} mutants of {whose}. {said}"


def record(folder: Path, found: Sequence[dict], of: dict[str, Mutant], made: dict, there: dict) -> None:
    """Leaves in a folder what a run found: mutants.json, with the diff of each mutant that was not killed;
    population.json; provenance.json. of: the mutants by id."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = [{k: v for k, v in f.items() if k != "made"} for f in found]
    shown = [f if f["verdict"] == KILLED else f | {"diff": diff(of[f["id"]])} for f in kept]
    text = ",\n".join(json.dumps(f, ensure_ascii=False) for f in shown)
    (folder / "mutants.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")
    for name, said in ((FILE, there), ("provenance.json", made)):
        (folder / name).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def write(folder: Path) -> None:
    """Writes the report, README.md and its figure, from what a run left in a folder."""
    names = "mutants.json", FILE, "provenance.json"
    found, there, made = (json.loads((folder / name).read_text(encoding="utf-8")) for name in names)
    figure(found).savefig(folder / "mutants.png", bbox_inches="tight")
    plt.close("all")
    parts = [
        "# Mutants: which bugs of our own kernels do the audits see?",
        f"**{told(folder, found)}** {left_alone(found, there)}",
        "One place of a kernel or a launcher is broken at a time, by an operator or by hand. Each mutant runs in a "
        "process of its own, which is asked most of what their own audits, that of gradients and that of drawn cases "
        "ask of the ops of its file and, where these are fewer than four, of others that reach it, until something "
        "needs a fix: in fp32, of attention in bf16 too, else in bf16 what kills most, of no op in fp16; most of it "
        "at tiny sizes; and, once it is killed, with two more seeds: what not all three show is not caught. Not "
        "asked: whole models, the static audit, that of dtypes, GEMM's sweep in CUDA graphs and compiled and its rows"
        " beyond 4,096, attention's late copies. A "
        "survivor is a question to add, or stands in the file of equivalents with the reason why nothing that is "
        "promised changes there; a mutant of that file that is killed fails the run. Left alone is most of what the "
        "contract calls free (GEMM's tiles and their choice, warps and stages of a launch), and what no audit of bits "
        "is about (checks of arguments, texts). `mutants.json` says of each what became of it, and which question "
        "killed it. An interval is Wilson's, as of a random sample; generated mutants are drawn function by function.",
        tables.facts(made).data,
        f"![{title(found)}](mutants.png)",
        f"## By operator\n\n{by(found, 'operator')}",
        f"## By file\n\n{by(found, 'file')}",
        f"## Which question killed first\n\n{killers(found)}",
    ]
    if not_held := [f"- {escape.text(f['not_held'])}" for f in found if "not_held" in f]:
        parts.append("## Entries of the file of equivalents that do not hold\n\n" + "\n".join(not_held))
    for verdict, name in ((SURVIVED, "Survivors"), (EXPLAINED, "Explained")):
        mine = [f for f in found if f["verdict"] == verdict]
        shown = [
            f"### {f['file']}, line {f['line']}: {f['operator']}\n\n"
            + "".join(f"{f[k]}\n\n" for k in ("reason", "detail") if f.get(k))
            + f"```diff\n{f['diff']}\n```"
            for f in mine
        ]
        parts.append(f"## {name}\n\n" + ("\n\n".join(shown) or "None."))
    parts.append(promised(folder))
    (folder / "README.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
