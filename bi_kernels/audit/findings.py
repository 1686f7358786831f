"""Verdicts: the rows of an audit, what a row that raised says, the one filter of those that need a fix, and their
file."""

import json
import lzma
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path

from bi_kernels.audit.kernel_error import kernel_error

PASS, NEEDS_FIX, UNSUPPORTED = "pass", "needs-fix", "unsupported"
INVARIANCE, ACCURACY, DETERMINISM = "gradient invariance", "gradient accuracy", "determinism"  # relations
PRECONDITION = "precondition"  # relation of a row that compares no bits, and without which others say nothing
NOT_RUN = "required, not run"
LATE = "not run"  # layout of a row of what a budget left no time for
LOCALISER = "localiser"  # relation of a row that says whether it names an op
FINDING = "finding.txt"  # what an audit found out, in plain sentences with which its report begins
VERDICTS, PACKED = "verdicts.json", "verdicts.json.xz"  # the rows of a document; the same, as they are committed
TITLE = "# Audits\n\nWritten by `bi-audit report`"  # how an index of documents begins


@dataclass
class Row:
    """One verdict with its evidence: a line of verdicts.json."""

    audit: str
    op: str
    case: str  # the shape at which an op is audited that has several
    candidate: str
    dtype: str
    device: str  # a GPU's name, "interpreter", or "cpu" for stock operators there
    relation: str
    layout: str
    against: str  # what it is compared with
    inputs: str  # their family
    rows: int  # tokens, or samples, of the call
    verdict: str
    mismatches: int | None = None  # None where nothing could be compared
    elements: int | None = None
    max_abs: float | str | None = None
    max_rel: float | str | None = None
    max_ulp: int | str | None = None
    tensor: str = "out"
    side: str = ""  # whose bits: one of kinds.Side
    axes: list[str] = field(default_factory=list)  # what differs between the two calls: of kinds.Kind
    first_index: list[int] | None = None
    first_failing_op: str | None = None
    threshold_share: float | str | None = None  # of the contract's bound
    detail: str = ""
    repro: str = ""  # the command that shows it
    control: bool = False  # of a candidate that is broken on purpose
    caught: bool | None = None  # of a control

    def json(self) -> dict:
        """Returns the fields as JSON values."""
        return asdict(self)

    def as_control(self) -> "Row":
        """Returns this row as that of a candidate broken on purpose: caught by drifting, not by an error."""
        return replace(self, control=True, caught=self.verdict == NEEDS_FIX and bool(self.mismatches))


def sentence(error: BaseException) -> str:
    """Returns an error in one line without object addresses: of a Triton kernel its last sentence and the kernel's
    line, of any other its first line, and the next one behind a colon."""
    found = kernel_error(error)
    first, *more = filter(None, map(str.strip, f"{type(error).__name__}: {error}".splitlines()))
    said = found.sentence if found else " ".join([first, *more[: first.endswith(":")]]).rstrip(": ")
    return re.sub(r" at 0x[0-9a-f]+", "", said)[:300]


def values_of(row: Row | dict) -> dict:
    """Returns what a row says, by name."""
    return row if isinstance(row, dict) else vars(row)


def needs_fix(rows: Iterable[Row | dict]) -> list:
    """Returns the rows that need a fix, and the controls that were missed."""
    wrong = lambda said: not said["caught"] if said["control"] else said["verdict"] == NEEDS_FIX
    return [row for row in rows if wrong(values_of(row))]


def control_row(name: str, rows: Sequence[Row]) -> Row:
    """Returns the row that stands for a candidate broken on purpose: the first that needs a fix, if any does."""
    return replace((needs_fix(rows) or rows)[0], candidate=name).as_control()


def late(rows: Iterable[Row | dict]) -> list:
    """Returns the rows of what a budget left no time for."""
    return [row for row in rows if values_of(row)["layout"] == LATE]


def verdict_of(rows: Collection[Row | dict]) -> str:
    """Returns the one word of an audit: pass if something was judged, nothing needs a fix, and there were controls, all
    caught; unsupported if all that was asked was refused, or time was up, and no control missed."""
    judged = {said["verdict"] for said in map(values_of, rows) if not said["control"]}
    if needs_fix(rows):
        return NEEDS_FIX
    if judged == {UNSUPPORTED} or late(rows):
        return UNSUPPORTED
    return PASS if PASS in judged and any(values_of(row)["control"] for row in rows) else NEEDS_FIX


def worst_of(verdicts: Collection[str]) -> str:
    """Returns needs-fix if any is, else unsupported if any is, else pass; '' if there is none."""
    return next((v for v in (NEEDS_FIX, UNSUPPORTED, PASS) if v in verdicts), "")


def grouped(items: Iterable, key: Callable) -> dict:
    """Returns {key(item): its items}, both in the order in which they come."""
    groups: dict = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def up_to_a_drift(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows as they come, up to the first whose elements differ."""
    found = []
    for row in rows:
        found.append(row)
        if row.mismatches:
            break
    return found


def write_rows(path: Path, rows: list[dict]) -> None:
    """Writes rows whole or not at all: an interrupted audit keeps what it had."""
    text = ",\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    part = path.with_name(f".{path.name}")
    part.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    part.replace(path)


def pack(path: Path) -> None:
    """Compresses a file of JSON, which pandas.read_json opens as before; the same input gives the same bytes."""
    path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()


def rows_file(folder: Path) -> Path | None:
    """Returns the file of a document's verdicts, None where it has none."""
    return next((path for name in (VERDICTS, PACKED) if (path := folder / name).is_file()), None)


def _loaded(path: Path):
    data = path.read_bytes()
    return json.loads(lzma.decompress(data) if path.name == PACKED else data)


def read_rows(folder: Path) -> list[dict]:
    """Reads the verdicts of one document; none if it has none, or if they were cut short."""
    try:
        return _loaded(path) if (path := rows_file(folder)) else []
    except (OSError, ValueError, lzma.LZMAError):
        return []


def checked_rows(path: Path) -> list[dict]:
    """Reads a file of verdicts. Raises ValueError for a file that is something else."""
    try:
        rows = _loaded(path)
    except (ValueError, lzma.LZMAError):
        raise ValueError(f"{path} holds no JSON, expected the verdicts of an audit") from None
    later = {f.name: f.default for f in fields(Row) if f.default is not MISSING} | {"axes": []}  # new to older reports
    expected = {f.name for f in fields(Row)} - later.keys()
    if not isinstance(rows, list) or any(not isinstance(r, dict) or not expected <= r.keys() for r in rows):
        raise ValueError(f"{path} holds other JSON, expected the verdicts of an audit")
    return [later | row for row in rows]
