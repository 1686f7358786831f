"""The status matrix: op × dtype, and in each cell the properties that do not pass."""

from collections.abc import Iterable

from bi_kernels.audit.axes import BITS, Side
from bi_kernels.audit.findings import LOCALISER, PASS, grouped, worst_of
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.markdown import MARK, table
from bi_kernels.contract import DTYPES

RELATION = {"forward invariance": "invariance", "forward accuracy": "accuracy"} | {
    name: name
    for name in ("gradient invariance", "gradient accuracy", "determinism", "atomics-free", "parity", "contract")
}
COUNTS_AS = {Side.TRAINED: "gradient invariance", LOCALISER: "invariance"}  # relations without a column of their own
OTHER = "other dtypes"


def cells(rows: Iterable[dict]) -> dict[str, dict[str, dict[str, str]]]:
    """Returns {op: {property: {dtype: the worst verdict}}}; a property without a verdict has no dtype."""
    found = {}
    asked = ({**r, "relation": COUNTS_AS.get(r["relation"], r["relation"])} for r in rows)
    judged = (r for r in asked if r["op"] and r["relation"] in RELATION.values() and not r["control"])
    for op, mine in grouped(judged, lambda r: r["op"]).items():
        told = [(r["relation"], d, r) for r in mine for d in (DTYPES if r["dtype"] == "all" else [r["dtype"]])]
        dtypes, found[op] = dict.fromkeys(d for _, d, _ in told), {}
        for column, relation in RELATION.items():
            of = grouped((t for t in told if t[0] == relation), lambda t: t[1])
            of_dtype = {d: [r for *_, r in of[d]] for d in of}
            found[op][column] = {d: worst_of({r["verdict"] for r in of_dtype[d]}) for d in dtypes if d in of_dtype}
    return found


def matrix(rows: Iterable[dict]) -> str:
    """Returns the status matrix of some verdicts as a table, '' where no op was judged."""
    lines = []
    of_bits = lambda names: any(RELATION[name] in BITS for name in names)
    for op, properties in cells(rows).items():
        told = [
            (d if d in DTYPES else OTHER, verdict, name) for name, of in properties.items() for d, verdict in of.items()
        ]
        of_dtype = grouped(told, lambda t: t[0])
        line = {"op": escape.text(op)}
        for dtype in (*DTYPES, OTHER):
            verdicts = grouped(of_dtype.get(dtype, ()), lambda t: t[1])
            wrong = [f"{MARK[v]} {', '.join(dict.fromkeys(t[2] for t in verdicts[v]))}" for v in verdicts if v != PASS]
            passed = [t[2] for t in verdicts.get(PASS, ())]
            named = f" {', '.join(passed)} alone" * (of_bits({t[2] for t in told}) and not of_bits(passed))
            line[dtype] = "; ".join(wrong) or (f"{MARK[PASS]}{named}" if verdicts else MARK[""])
        lines.append(line)
    return table(lines) if lines else ""
