"""Judges cases drawn by seed, of every op: a row an op, dtype and question, and one a case that needs a fix."""

from collections.abc import Iterator
from dataclasses import replace
from math import log2

import matplotlib.pyplot as plt

from bi_kernels.audit import parallel
from bi_kernels.audit.evidence.coverage import missing
from bi_kernels.audit.evidence.verdicts import NEEDS_FIX, PASS, Row, grouped
from bi_kernels.audit.problem.drawn_cases import Case, draw
from bi_kernels.audit.problem.subject import Subject
from bi_kernels.audit.relations.drawn import QUESTIONS, judge
from bi_kernels.contract import DTYPES, dtype_name

AT_ONCE = 16  # cases that one process is given
SHOWN = 3  # cases of one op, dtype and question that have a row of their own
DRAWN = "drawn"

Seen = tuple[str, str, int, int, bool]  # op, population, tokens, elements of the widest token, whether all passed


def judge_cases(session) -> tuple[list[Row], list[Seen]]:
    """Judges `cases` cases of every op and dtype, from number `first` on; records and returns the rows, and what was
    drawn."""
    first, count = session.parameters["first"], session.parameters["cases"]
    subjects = [s for s in session.make() if s.problem.case == next(iter(s.problem.op.cases("tiny")))]
    whose = [(s.problem.op.name, dtype_name(s.problem.dtype)) for s in subjects]
    items = [(*w, n) for n in range(first, first + count, AT_ONCE) for w in whose]
    rows, seen = [], []
    for found, drawn in parallel.each(session, judge_some, items, first + count):
        rows += found
        seen += drawn
    rows = [r for (op, dtype) in whose for r in summed([r for r in rows if (r.op, r.dtype) == (op, dtype)])]
    rows += [r for s in subjects for r in missing(rows, s, required(s))]
    session.add(rows)
    return rows, seen


def judge_some(session, item: tuple[str, str, int], end: int) -> tuple[list[Row], list[Seen]]:
    """Judges up to AT_ONCE cases of one op and dtype."""
    op, dtype, first = item
    rows, seen = [], []
    for number in range(first, min(first + AT_ONCE, end)):
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
    return draw(session.problem(op, "", dtype).op, function, number, DTYPES[dtype], session.device, p["seed"], *said)


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


def required(s: Subject) -> Iterator[dict]:
    """Yields what a few cases of every op hold."""
    yield from ({"relation": relation, "layout": layout} for relation, layout in QUESTIONS)


def figure(seen: list[Seen]) -> plt.Figure:
    """Draws the cases by their tokens and their widest dimension; those that need a fix stand out."""
    fig, ax = plt.subplots(figsize=(8.5, 4.2))
    for passed, color, size, name in ((True, "#0072B2", 5, "passed"), (False, "#D55E00", 40, "needs a fix")):
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
    ax.set(xlabel="tokens of the call", ylabel="largest dimension", title=title, xlim=(0.7, 2 ** (log2(most) + 0.5)))
    ax.legend(edgecolor="none", fontsize=8)
    fig.tight_layout()
    return fig
