"""Judges cases drawn by seed, of every op: a row an op, dtype and question, and one a case that needs a fix."""

import math
from collections.abc import Sequence
from dataclasses import replace

import matplotlib.pyplot as plt

from bi_kernels.audit import executor, parallel
from bi_kernels.audit.controls.run import groups, judge_control
from bi_kernels.audit.findings import NEEDS_FIX, PASS, UNSUPPORTED, Row, grouped, sentence
from bi_kernels.audit.fuzz.cases import RANDOM, ROUND, Case, draw, pool_entry
from bi_kernels.audit.fuzz.checks import QUESTIONS, judge
from bi_kernels.audit.parameters import command
from bi_kernels.audit.progress import Voice
from bi_kernels.audit.registry import OPS
from bi_kernels.audit.report import tables
from bi_kernels.audit.report.markdown import Markdown
from bi_kernels.audit.static import variants
from bi_kernels.audit.static.verdict import EVERY
from bi_kernels.audit.targets.op import OpUnderTest
from bi_kernels.audit.targets.op_config import OpConfig
from bi_kernels.contract import DTYPES, dtype_name
from helpers.coverage import missing

AT_ONCE = 256  # cases that one process is given
SHOWN = 3  # cases of one op, dtype and question that have a row of their own
DRAWN = "drawn"
SERVED = 1000  # calls of a server, and of a trainer

Part = tuple[str, str, tuple[int, ...]]  # op, dtype, numbers of cases
Seen = tuple[str, str, int, int, bool]  # op, population, tokens, largest dimension, whether all passed


def judge_cases(session) -> tuple[list[Row], list[Seen]]:
    """Judges `cases` cases of every op and dtype, or `total` of all together, from number `first` on; records and
    returns the rows, and what was drawn."""
    subjects = [s for s in session.make() if s.problem.case == next(iter(s.problem.op.cases("tiny")))]
    first, count, total = (session.parameters[name] for name in ("first", "cases", "total"))
    count = math.ceil(total / len(subjects)) or count or RANDOM[session.device.type]["cases"]
    numbers = range(first, first + count)
    parts = _in_turn(subjects, numbers)
    parallel.ahead(session, judge_some, parts)
    parallel.ahead(session, judge_control, groups(session))
    if session.on_gpu and session.candidate.spec == "bi_kernels":
        session.begun[served] = executor.begin(f"{variants.__name__}:served", "cuda", SERVED)
    found: dict[tuple[str, str], tuple[list[Row], list[Seen]]] = {}
    for part in Voice(session.audit, len(parts), quiet=not session.on_gpu).steps(parts):
        for known, new in zip(found.setdefault(part[:2], ([], [])), _judged(session, part)):
            known += new
    rows, seen = [], []
    for subject in subjects:
        p = subject.problem
        mine, drawn = found[p.op.name, dtype_name(p.dtype)]
        mine = summed(mine)
        full = sum(not number % RANDOM[p.device.type]["full"] for number in _drawn_of(p, numbers))
        if full >= ROUND and any(r.verdict != UNSUPPORTED for r in mine):
            mine += missing(mine, subject, [{"relation": relation, "layout": layout} for relation, layout in QUESTIONS])
        session.add(mine)
        rows, seen = rows + mine, seen + drawn
    return rows, seen


def _drawn_of(p: OpConfig, numbers: range) -> range:
    """Returns the numbers of an op's cases; half of them on the interpreter of a variant, and of fp16 beside bf16."""
    less = p.device.type == "cpu" and (p.op.variant_of or p.brief)
    return numbers[: max(1, len(numbers) // 2)] if less else numbers


def _in_turn(subjects: Sequence[OpUnderTest], numbers: range) -> list[Part]:
    """Returns the parts in which cases are judged: those of an op and dtype with the same widths, whose kernels one
    process compiles.

    Attention's take longest to compile and the LM head's most memory, so they begin; parts that share some kernels are
    far apart.
    """
    found = []
    for subject in reversed(subjects):
        p = subject.problem
        entries = grouped(_drawn_of(p, numbers), lambda n: pool_entry(n, p.op, p.device.type) or 0)
        for entry, mine in entries.items():
            last = not p.op.cache, p.op.name != "lm_head_logprob", bool(p.op.variant_of), entry
            for at in range(0, len(mine), AT_ONCE):
                found.append((last, (p.op.name, dtype_name(p.dtype), tuple(mine[at : at + AT_ONCE]))))
    return [part for _, part in sorted(found, key=lambda one: one[0])]


def _judged(session, part: Part) -> tuple[list[Row], list[Seen]]:
    """Returns what was found in a part. Where its process ends, each case is judged by itself."""
    op, dtype, numbers = part
    try:
        return next(parallel.each(session, judge_some, [part]))
    except RuntimeError as error:
        if len(numbers) == 1:
            return _raised(session, op, dtype, numbers[0], error)
    alone = [(op, dtype, (n,)) for n in numbers]
    parallel.ahead(session, judge_some, alone)
    rows, seen = zip(*(_judged(session, one) for one in alone))
    return sum(rows, []), sum(seen, [])


def _raised(session, op: str, dtype: str, number: int, error: Exception) -> tuple[list[Row], list[Seen]]:
    """Returns the row of a case that raised, or ended its process."""
    subject = session.subject(op, dtype, session.candidate.functions[op], session.candidate.spec)
    subject.command = _command(session, op, dtype, number)
    row = subject.row("invariance", "packed", against="packed", detail=f"case {number}: {sentence(error)}")
    return [row], [(op, "not drawn", 1, 1, False)]


def judge_some(session, part: Part) -> tuple[list[Row], list[Seen]]:
    """Judges some cases of one op and dtype."""
    op, dtype, numbers = part
    rows, seen = [], []
    for number in numbers:
        try:
            case = drawn(session, op, dtype, number)
            found = judge(case)
        except Exception as error:  # the others are judged all the same
            found, nothing = _raised(session, op, dtype, number, error)
            seen += nothing
        else:
            sizes = case.subject.problem.sizes
            passed = all(r.verdict == PASS for r in found)
            seen.append((op, case.population, sum(case.subject.lengths), max(sizes.values(), default=1), passed))
        rows += found
    return rows, seen


def drawn(session, op: str, dtype: str, number: int) -> Case:
    """Returns case `number` of an op of the session's candidate."""
    function = session.candidate.functions[op]
    said = session.candidate.spec, session.device_label, _command(session, op, dtype, number)
    return draw(OPS[op], function, number, DTYPES[dtype], session.device, session.parameters["seed"], *said)


def _command(session, op: str, dtype: str, number: int) -> str:
    """Returns the command that judges one case."""
    one = {"op": session.parameters["op"] or op, "dtype": dtype, "first": number, "cases": 1, "total": 0}
    return command(session.audit, session.parameters | one)


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


def served(session) -> list[Row]:
    """Records and returns the rows of the variants that one model's server and its trainer compile, with the numbers
    of each kernel; on a GPU."""
    found, why, rows = {}, "", []
    try:
        found = session.begun.pop(served).result()
    except executor.Died as died:
        why = f"; {sentence(died)}"
    most = RANDOM["variants"]
    for who in variants.KINDS:
        mine = sorted(found.get(who, {}).items(), key=lambda one: -one[1])
        count = sum(n for _, n in mine)
        said = f"{count} variants compiled in {SERVED:,} calls of a {who}, at most {most} allowed{why}"
        label = session.audit, EVERY, "", "bi_kernels", "bf16", session.device_name, "variants", f"a {who}", "", "", 0
        row = Row(*label, verdict=PASS if 0 < count <= most else NEEDS_FIX, repro=session.command)
        row.detail = f"{said}: {', '.join(f'{kernel} {n}' for kernel, n in mine)}"
        row.mismatches, row.elements = max(0, count - most), count
        rows.append(row)
    session.add(rows)
    return rows


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
