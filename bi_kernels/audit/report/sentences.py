"""Says in a sentence or two what the rows of an op show, of what kind it is first; made of the rows alone."""

import re
from collections.abc import Collection, Iterable, Sequence
from textwrap import shorten

from bi_kernels.audit.axes import BITS, HASH, INVARIANCES, RANK, SIDES, WHOLE, Kind, Side, by_kind, side
from bi_kernels.audit.findings import (
    LATE,
    NEEDS_FIX,
    PASS,
    PRECONDITION,
    UNSUPPORTED,
    Row,
    grouped,
    needs_fix,
    values_of,
)
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.sizes import in_words, share_of

NAMED = 3  # layouts, or row counts, in a sentence
LISTED = 8  # row counts that a sentence lists
LONGEST = 160  # characters of what comes from outside
WHICH = " in the runs asked"
RAISED = re.compile(r"\b\w*(?:Error|Exception|Interrupt|Exit)\b:?.*", re.S)
FOLLOWS = {  # kinds that come of another one, so that they are no second finding
    Kind.NEIGHBOURS: (Kind.COUNT, Kind.PLACE, Kind.PADDING, Kind.CACHE, Kind.LAYOUT),
    Kind.COUNT: (Kind.PADDING, Kind.CACHE, Kind.LAYOUT),
    Kind.PLACE: (Kind.PADDING, Kind.CACHE, Kind.LAYOUT),
}
ALONE = {  # what a result depends on, by kind
    Kind.PLACE: "a row's result depends on its place in the batch",
    Kind.PADDING: "a row's result depends on the padding beside it",
    Kind.CACHE: "a row's result is another one decoded, or prefilled in chunks",
    Kind.MODE: "the result depends on the mode of the call",
    Kind.HISTORY: "the result depends on the calls before",
    Kind.KEPT: "a later call writes into what an earlier one made",
    Kind.MEMORY: "the result depends on where the inputs lie in memory",
    Kind.DEMAND: "the result depends on what is asked of the backward",
    Kind.LAYOUT: "a row's result depends on the layout of the call",
}
OF_GRADIENTS = {
    Kind.NEIGHBOURS: "depend on the values of a row's neighbours",
    Kind.PLACE: "change with the order of the rows",
    Kind.PADDING: "change with the padding",
    Kind.CACHE: "change with the layout of the call",
    Kind.MODE: "depend on the mode of the call",
    Kind.HISTORY: "depend on the calls before",
    Kind.KEPT: "change with a call between forward and backward",
    Kind.MEMORY: "depend on where tensors lie in memory",
    Kind.DEMAND: "depend on what is asked of the backward",
    Kind.LAYOUT: "change with the layout of the call",
}
COUNTED = "a row's result depends on how many rows are in the call"
WHOLES = Side.FORWARD, Side.CALL  # sides of which a sentence says "the result"
TOLD = {  # sides of what passes, by the word for it
    Side.FORWARD: {*WHOLES},
    Side.GRADIENT: {Side.CALL, Side.INPUT, Side.WEIGHT, Side.GRADIENT},
    Side.TRAINED: {Side.TRAINED},
}
SAY_WHERE = Kind.PADDING, Kind.CACHE, Kind.MODE, Kind.HISTORY, Kind.KEPT, Kind.MEMORY, Kind.DEMAND, Kind.LAYOUT


def answer(rows: Iterable[Row | dict]) -> str:
    """Returns what the rows of one op show, without the last full stop: the most basic cause of what differs, and at
    most one more finding; of a pass, what was asked and agreed."""
    every = [r for r in map(values_of, rows) if not r["control"]]
    bad = {
        at: wrong for at, mine in by_kind(every).items() if (wrong := [r for r in mine if r["verdict"] == NEEDS_FIX])
    }
    if not bad:
        return _passed(every)
    lead, *others = sorted(bad, key=lambda at: _rank(*at))
    passing = {side(r) for r in every if r["verdict"] == PASS and r["relation"] in INVARIANCES}
    said = _finding(*lead, bad, every)
    unmoved = [s for s in (Side.FORWARD, Side.INPUT) if s in passing and not any(whose == s for whose, _ in bad)]
    if lead[0] not in WHOLES and lead[1] not in (Kind.RANDOM, Kind.ACCURACY, Kind.ERROR) and unmoved:
        said += f"; {' and '.join(unmoved)} {'do' if unmoved != [Side.FORWARD] else 'does'} not"
    if lead[1] in (Kind.RANDOM, Kind.BEFORE):
        return said
    follows = (*FOLLOWS.get(lead[1], ()), *[Kind.PLACE] * (lead[0] in (Side.WEIGHT, Side.GRADIENT)))
    shared = lambda whose: whose in (Side.WEIGHT, Side.GRADIENT) and whose != lead[0]  # their sums are another matter
    further = [at for at in others if shared(at[0]) or at[1] not in (lead[1], *follows)]
    more = [found for at in further if (found := _finding(*at, bad, every, short=True)) not in said]
    return f"{said}. Also, {more[0]}" if more else said


def headline(rows: Iterable[Row | dict]) -> str:
    """Returns the sentence on the rows of several ops: how many need a fix, and that on the first with the most basic
    cause."""
    every = [r for r in map(values_of, rows) if not r["control"]]
    ops = grouped((r for r in every if r["op"]), lambda r: (r["op"], r["case"], r["dtype"]))
    bad = [op for op, mine in ops.items() if any(r["verdict"] == NEEDS_FIX for r in mine)]
    if stopped := [r["detail"] for r in every if not r["op"] and r["verdict"] == NEEDS_FIX]:
        return escape.line(stopped[0])[:LONGEST]
    if not bad:
        return _passed(every)
    judged = [op for op, mine in ops.items() if any(r["verdict"] != UNSUPPORTED for r in mine)]
    each = " (each op in each case and dtype)" * any(case or dtype for _, case, dtype in ops)
    many = f"{len(bad)} of {len(judged)} need a fix{each}, for example " if len(bad) > 1 else ""
    wrong = {op: by_kind(r for r in ops[op]) for op in bad}
    causes = {op: [_rank(*at) for at, mine in kinds.items() if needs_fix(mine)] for op, kinds in wrong.items()}
    told = min(bad, key=lambda op: min(causes[op]))
    return f"{many}{' '.join(filter(None, told))}: {answer(ops[told])}"


def _rank(whose: str, kind: str) -> tuple:
    """Orders findings: what is not deterministic, the forward by its cause, inputs' gradients, weights', the rest."""
    late = kind in (Kind.ATOMICS, Kind.ACCURACY, Kind.OTHER, Kind.ERROR)
    return kind != Kind.RANDOM, kind != Kind.BEFORE, late, SIDES.index(whose) * (not late), RANK.index(kind)


def _finding(whose: str, kind: str, bad: dict, every: list[dict], short: bool = False) -> str:
    """Says one finding of `bad`; short: without how far the bits are off."""
    rows = bad[whose, kind]
    first = rows[0]
    if kind == Kind.RANDOM:
        random = all(r["detail"].startswith("random:") for r in rows)
        again = f"{_again(whose, rows)} not deterministic: the same call gives other bits"
        drawn = "it draws random numbers: other bits in every call, unless seeded before it"
        return drawn if random else again + _sizes(whose, kind, bad, WHICH)
    if kind == Kind.BEFORE:
        said = "the result depends on the calls before: the same one gives other bits after others"
        return said + _sizes(whose, kind, bad)
    if kind == Kind.ATOMICS:
        found = shorten(escape.line(first["detail"]), LONGEST, placeholder=" …")
        return f"its source may change the order of a sum: {found}"
    if kind == Kind.ACCURACY:
        share = f", {share_of(rows)} × the bound" if share_of(rows) else ""
        return f"{'results are' if whose in WHOLES else 'gradients are'} less accurate than allowed{share}"
    if kind == Kind.ERROR:
        return _raised(rows)
    if kind == Kind.OTHER:
        what = f"{first['relation']} needs a fix"
        if first["relation"] == PRECONDITION:  # its detail is a hash
            return f"{what}: {escape.line(first['tensor'])}, {first['mismatches']} of {first['elements']}"
        return f"{what}: {escape.line(first['detail'])[:LONGEST]}" if first["detail"] else what
    where = f" ({names(rows)})" if kind in SAY_WHERE else ""
    if whose in WHOLES:
        named = {Kind.NEIGHBOURS: lambda: _who(rows), Kind.COUNT: lambda: COUNTED}
        said = named[kind]() if kind in named else ALONE[kind] + where
    else:
        order = " and the order of the rows" * ((whose, Kind.PLACE) in bad)
        split = f"change with the split into micro-batches{order}"
        count = "depend on how many rows are in the call" if whose == Side.INPUT else split
        tensors = list(dict.fromkeys(r["tensor"] for r in rows))
        listed = f" ({escape.line(', '.join(tensors[:NAMED]))}{' …' * (len(tensors) > NAMED)})"
        said = f"{whose}{listed} {count if kind == Kind.COUNT else OF_GRADIENTS[kind] + where}"
    counts = _counted(rows, every) if whose in WHOLES and kind == Kind.COUNT else ""
    return said if short else said + _sizes(whose, kind, bad) + counts


def _sizes(whose: str, kind: str, bad: dict, where: str = "") -> str:
    """Says how far the bits of a finding are off; of results, and of input gradients that differ for the same cause."""
    own, theirs = (in_words(bad.get((side, kind), []), where) for side in (whose, Side.INPUT))
    if whose != Side.FORWARD or not theirs:
        return own
    return f"{own}, input gradients too" if own == theirs else f"{own}, input gradients{theirs.removeprefix(',')}"


def _again(whose: str, rows: list[dict]) -> str:
    """Names what differs when a call is repeated: all of it, or its gradients."""
    tensors = ", ".join(dict.fromkeys(r["tensor"] for r in rows))
    return "it is" if whose in WHOLES else f"{whose} ({escape.line(tensors)}) are"


def _who(rows: list[dict]) -> str:
    """Says which row depends on its neighbours, where it is a single one."""
    plain = [r for r in rows if r["against"] == WHOLE and r["rows"] and r["elements"] and r["first_index"]]
    alone = all(r["mismatches"] <= r["elements"] // r["rows"] for r in plain)
    found = {r["first_index"][0] for r in plain}
    who = f"row {found.pop()}" if plain and alone and len(found) == 1 else "a row's result"
    return f"{who} depends on the values of its neighbours"


def _counted(rows: list[dict], every: list[dict]) -> str:
    """Names the numbers of rows of which calls differ, and those that agree, after what they belong to."""
    kinds = {r["inputs"] for r in rows if in_each_call(r)}
    asked = [r for r in every if r["relation"] == "invariance" and r["inputs"] in kinds and in_each_call(r)]
    asked = [r for r in asked if r["mismatches"] is not None]
    differ = {in_each_call(r) for r in asked if r["verdict"] == NEEDS_FIX}
    agree = {in_each_call(r) for r in asked} - differ
    whole = WHOLE if all(r["against"] == WHOLE for r in asked) else "the largest call"
    if not differ:
        return f" ({names(rows)})"
    said = f": calls of {enumerated(differ)} row{'s' * (differ != {1})} differ from {whole}"
    if not agree:
        return said
    if min(differ) > max(agree):
        return f"{said}; {max(agree)} {'and fewer agree' if max(agree) > 1 else 'agrees'}"
    if max(differ) < min(agree):
        return f"{said}; {min(agree)} and more agree"
    return f"{said}; {enumerated(agree)} agree{'s' * (len(agree) == 1)}"


def enumerated(numbers: Collection[int]) -> str:
    """Lists numbers in words; of many the first ones and the last one."""
    found = [f"{n:,}" for n in sorted(numbers)]
    if len(found) > LISTED:
        found = [*found[: LISTED - 2], "…", found[-1]]
    return " and ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def in_each_call(r: dict) -> int:
    """Returns how many rows each call of a layout has, 0 where that is not what it is about."""
    return 1 if r["layout"] == "singles" else r["rows"] if r["layout"].partition(":")[0] == "rows" else 0


def _raised(rows: list[dict]) -> str:
    """Says what raised, or is missing, and where."""
    what, mine = next(iter(grouped(rows, _without_numbers).items()))
    what = raised_by(mine[0])
    raised = any(RAISED.search(r["detail"]) for r in mine)
    counts = sorted({in_each_call(r) for r in mine if r["relation"] == "invariance"} - {0})
    place = f"calls of {enumerated(counts)} row{'s' * (counts != [1])}" if counts else names(mine)
    return f"{f'it raises in {place}' if raised else place}: {what[:LONGEST]}"


def _without_numbers(r: dict) -> str:
    """Returns the same for the same error of another size."""
    return re.sub(r"\d+", "#", raised_by(r))


def raised_by(r: dict) -> str:
    """Returns what a row says was raised; all that it says, where nothing was."""
    return escape.line(found[0] if (found := RAISED.search(r["detail"])) else r["detail"])


def _passed(every: list[dict]) -> str:
    """Says what was asked and agreed, or that nothing could be."""
    good = [r for r in every if r["verdict"] == PASS]
    every_refused = [r for r in every if r["verdict"] == UNSUPPORTED]
    wanted = sorted({r["dtype"] for r in every_refused if r["relation"] == "contract"})  # which was judged, and by that
    refused = [r for r in every_refused if r["relation"] != "contract"]
    if not good:
        why = next((r["detail"] for r in every_refused if r["detail"]), "nothing was asked")
        return f"it could not be judged: {escape.line(why)[:LONGEST]}"
    compared = [r for r in good if r["relation"] in BITS and r["elements"]]
    sides = {side(r) for r in compared}
    listed = ", ".join(told for told, of in TOLD.items() if sides & of)
    units = grouped(compared, lambda r: HASH if r["tensor"].startswith(HASH) else "elements")
    of = " and ".join(f"{sum(r['elements'] for r in mine):,} {unit}" for unit, mine in units.items())
    parts = [f"every bit agrees in {of} ({listed})"] if compared else []
    shares = share_of(good)
    parts += [f"errors are at most {shares} × the bound"] if shares else []
    parts += ["nothing that was checked needs a fix"] if not parts else []
    parts += [f"refused as the contract says: {', '.join(wanted)}"] if wanted else []
    late = [r["detail"].rpartition(": ") for r in refused if r["layout"] == LATE]  # what had no time, and why
    named = [*(_not_judged(r) for r in refused if r["layout"] != LATE), *(what for what, _, _ in late)]
    what = escape.line(", ".join(dict.fromkeys(named)))[:LONGEST]
    why = "".join(f": {told}" for told in dict.fromkeys(told for _, _, told in late))
    return "; ".join([*parts, *[f"not judged: {what}{why}"] * bool(refused)])


def _not_judged(r: dict) -> str:
    return r["relation"] if r["relation"] == "atomics-free" else r["layout"] or f"{r['relation']} of {r['op']}"


def names(rows: Sequence[dict]) -> str:
    """Names the layouts of some rows, a few of them."""
    found = list(dict.fromkeys(escape.line(r["layout"]) or r["relation"] for r in rows))
    return ", ".join(found[:NAMED]) + f" and {len(found) - NAMED} more" * (len(found) > NAMED)
