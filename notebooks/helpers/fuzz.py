"""Judges cases drawn by seed, of every op: a row an op, dtype and question, and one a case that needs a fix."""

import math
from dataclasses import replace

import matplotlib.pyplot as plt

from bi_kernels.audit import parallel
from bi_kernels.audit.controls.run import groups, judge_control
from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED, Row, grouped
from bi_kernels.audit.fuzz.cases import FINITE, RANDOM, Case, draw
from bi_kernels.audit.fuzz.checks import QUESTIONS, judge
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.report import tables
from bi_kernels.audit.report.markdown import Markdown
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.contract import DTYPES, dtype_name
from helpers.coverage import missing

AT_ONCE = 256, 6  # cases that one process is given, which compiles their kernels first; and of attention
SHOWN = 3  # cases of one op, dtype and question that have a row of their own
DRAWN = "drawn"

Seen = tuple[str, str, int, int, bool]  # op, population, tokens, largest dimension, whether all passed


def judge_cases(session) -> tuple[list[Row], list[Seen]]:
    """Judges `cases` cases of every op and dtype, from number `first` on; records and returns the rows, and what was
    drawn."""
    first, count = session.parameters["first"], session.parameters["cases"]
    subjects = [s for s in session.make() if s.problem.case == next(iter(s.problem.op.cases("tiny")))]
    parts = {number: _parts(s.problem, first, count) for number, s in enumerate(subjects)}
    # attention's compile longest and the LM head's take most, so they begin
    longest = [n for n, s in enumerate(subjects) if s.problem.op.cache or s.problem.op.name == "lm_head_logprob"]
    parallel.ahead(session, judge_some, [part for n in longest for part in parts[n]])
    judged = parallel.each(session, judge_some, [part for several in parts.values() for part in several])
    parallel.ahead(session, judge_control, groups(session))
    rows, seen = [], []
    for number, subject in enumerate(subjects):
        found, drawn = (sum(part, []) for part in zip(*(next(judged) for _ in parts[number])))
        found = summed(found)
        if not session.quick and any(r.verdict != UNSUPPORTED for r in found):
            found += missing(
                found, subject, [{"relation": relation, "layout": layout} for relation, layout in QUESTIONS]
            )
        session.add(found)
        rows, seen = rows + found, seen + drawn
    return rows, seen


def _parts(p: OpConfig, first: int, count: int) -> list[tuple[str, str, int, int]]:
    """Returns the parts in which cases of one op and dtype are judged: whose they are, the first and the end."""
    fewer = max(math.ceil(count * RANDOM[p.device.type]["attention"]), min(count, len(FINITE)))  # each kind of inputs
    end = first + (fewer if p.op.cache else count)
    most = AT_ONCE[bool(p.op.cache)]
    return [(p.op.name, dtype_name(p.dtype), n, min(n + most, end)) for n in range(first, end, most)]


def judge_some(session, item: tuple[str, str, int, int]) -> tuple[list[Row], list[Seen]]:
    """Judges some cases of one op and dtype."""
    op, dtype, first, end = item
    rows, seen = [], []
    for number in range(first, end):
        case = drawn(session, op, dtype, number)
        found = judge(case)
        sizes = case.subject.problem.sizes
        passed = all(r.verdict == PASS for r in found)
        seen.append((op, case.population, sum(case.subject.lengths), max(sizes.values(), default=1), passed))
        rows += found
    return rows, seen


def drawn(session, op: str, dtype: str, number: int) -> Case:
    """Returns case `number` of an op of the session's candidate."""
    p = session.parameters
    this = f"{session.command.partition(' -p first')[0].partition(' -p cases')[0]} -p first {number} -p cases 1"
    one = this if "--dtype" in this else f"{this} --dtype {dtype}"
    command = one if p["op"] else f"{one} -p op {op}"
    function = session.candidate.functions[op]
    said = session.candidate.spec, session.device_label, command
    return draw(OPS[op], function, number, DTYPES[dtype], session.device, p["seed"], *said)


def summed(rows: list[Row]) -> list[Row]:
    """Returns a row a question for the cases that passed, and those of up to SHOWN cases that did not."""
    found = []
    for mine in grouped(rows, lambda r: (r.relation, r.layout, r.tensor)).values():
        good, bad = ([r for r in mine if (r.verdict == NEEDS_FIX) is wrong] for wrong in (False, True))
        found += bad[:SHOWN]
        if good:
            shares = [float(r.threshold_share) for r in good if r.threshold_share is not None]
            found.append(
                replace(
                    good[0],
                    inputs=DRAWN,
                    rows=max(r.rows for r in good),
                    elements=sum(r.elements or 0 for r in good),
                    detail=f"{len(good)} cases" + f", {len(bad)} more need a fix" * bool(bad),
                    threshold_share=max(shares) if shares else None,
                    against="packed" if good[0].relation.endswith("invariance") else "fp64",
                )
            )
    return found


def populations(seen: list[Seen]) -> Markdown:
    """Returns the table of cases by population: how many there are, and how many tokens they have."""
    lines = [
        {
            "samples": name,
            "cases": len(mine),
            "ops": len({s[0] for s in mine}),
            "tokens": f"{_range([s[2] for s in mine])}",
        }
        for name, mine in sorted(grouped(seen, lambda s: s[1]).items())
    ]
    return tables.table(lines)


def _range(numbers: list[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}"


def figure(seen: list[Seen]) -> plt.Figure:
    """Draws the cases by their tokens and their widest dimension; those that need a fix stand out."""
    fig, ax = plt.subplots(figsize=(8.5, 4.2))
    for passed, color, size, name in ((True, "#0072B2", 8, "passed"), (False, "#D55E00", 40, "needs a fix")):
        mine = [s for s in seen if s[4] is passed]
        if mine:
            ax.scatter(
                [s[2] for s in mine], [s[3] for s in mine], s=size, color=color, alpha=0.5, label=name, linewidths=0
            )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    wrong, most = sum(not s[4] for s in seen), max(s[2] for s in seen)
    what = f"{len(seen):,} drawn cases of {len({s[0] for s in seen})} ops"
    title = f"{what}: {wrong or 'none'} need{'s' * (wrong < 2)} a fix"
    ax.set(xlabel="tokens of the call", ylabel="largest dimension", title=title, xlim=(0.7, 1.4 * most))
    ax.legend(edgecolor="none", fontsize=8)
    fig.tight_layout()
    return fig
