"""The status matrix: op × relation, and in each cell the verdict of every dtype that was judged."""

from collections.abc import Iterable

from bi_kernels.audit.axes import Side
from bi_kernels.audit.findings import LOCALISER, grouped, worst_of
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.markdown import MARK, table
from bi_kernels.contract import DTYPES

RELATION = {"forward invariance": "invariance", "forward accuracy": "accuracy"} | {
    name: name
    for name in ("gradient invariance", "gradient accuracy", "determinism", "atomics-free", "parity", "contract")
}
COUNTS_AS = {Side.TRAINED: "gradient invariance", LOCALISER: "invariance"}  # relations without a column of their own


def cells(rows: Iterable[dict]) -> dict[str, dict[str, dict[str, str]]]:
    """Returns {op: {column: {dtype: the worst verdict}}}; a column without a verdict has no dtype."""
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
    """Returns the status matrix of some verdicts as a table: the dtypes of each mark."""
    lines = []
    for op, columns in cells(rows).items():
        line = {"op": escape.text(op)}
        for column, of_dtype in columns.items():
            marked = grouped(of_dtype, lambda d: MARK[of_dtype[d]])
            said = (f"{mark} {len(d)} dtypes" if len(d) > 3 else f"{mark} {' '.join(d)}" for mark, d in marked.items())
            line[column] = " ".join(said) or MARK[""]
        lines.append(line)
    return table(lines) + "\n"
