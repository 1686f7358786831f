"""A GPU that no longer answers a process, since an illegal access say: the check that did it keeps its row, and the
part of an audit that it belongs to is judged again by another process, without it."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

Row = TypeVar("Row")  # that of verdicts.py, which needs this module

MOST = 8  # checks that may lose their process before no further one of the same part is asked
_rows: dict | None = None  # of the checks that lost a process; None where no other would go on
_asked: Counter = Counter()
_over = False  # the last check that may be lost is reached


class UsageError(ValueError):
    """Raised for a command that is wrong: one sentence, and exit status 2."""


class CannotJudge(ValueError):
    """Raised for what an audit is told and cannot judge, before anything was judged; one sentence."""


class Lost(BaseException):
    """Raised after a check that lost the process its GPU; no handler of a candidate's errors catches it.

    row: what the check's row says, under its `key`.
    """

    def __init__(self, key: str, row: Row):
        super().__init__(key, row)
        self.key, self.row = key, row


@contextmanager
def going_on(rows: dict[str, Row]) -> Iterator[None]:
    """Has a part of an audit end with Lost where it loses the GPU; rows: of the checks that did so before."""
    global _rows, _over
    _rows, _over = rows, False
    _asked.clear()
    try:
        yield
    finally:
        _rows = None


def answers() -> bool:
    """Tells whether the GPU still answers this process; where none is in use, there is none to lose."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if not (cuda and cuda.is_initialized()):
        return True
    try:
        cuda.synchronize()
    except RuntimeError:
        return False
    return True


def settled() -> None:
    """Waits for the GPU, where one is in use: what went wrong there is raised in the check that did it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda and cuda.is_initialized():
        cuda.synchronize()


def key(row: Row) -> str:
    """Names a check by the row that it would have, and by how many had the same before it; '' where no other process
    would go on."""
    if _rows is None:
        return ""
    name = repr(row)
    _asked[name] += 1
    return f"{_asked[name]} {name}"


def instead(name: str, row: Row) -> Row | None:
    """Returns the row of a check that is not asked: it lost a process before, or stands behind the last that may be
    lost."""
    global _over
    if not _rows:
        return None
    _over |= len(_rows) >= MOST and name == [*_rows][-1]
    unasked = replace(row, detail=f"not asked: before it the GPU stopped answering {MOST} times") if _over else None
    return _rows.get(name) or unasked


def raised(name: str, row: Row) -> Row:
    """Returns the row of a check that raised. Raises Lost where the GPU no longer answers, and another process can go
    on."""
    if _rows is None or answers():
        return row
    raise Lost(name, replace(row, detail=f"{row.detail}; the GPU no longer answered this process"))
