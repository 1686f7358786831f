"""Coverage: what an audit requires, less what was run."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bi_kernels.audit.evidence.verdicts import Judged, Row


def missing(rows: Sequence[Row], subject: Judged, required: Iterable[dict]) -> list[Row]:
    """Returns a row that needs a fix for everything required of a subject that no row holds.

    required: fields of a row that must agree, `relation` and `layout` among them; op, case and dtype are the subject's
    unless given.
    """
    own = {name: getattr(subject.row("", ""), name) for name in ("op", "case", "dtype")}
    seen: dict[tuple[str, ...], set[tuple]] = {}
    found = []
    for wanted in (own | fields for fields in required):
        names = tuple(wanted)
        if names not in seen:
            seen[names] = {tuple(getattr(r, name) for name in names) for r in rows if not r.control}
        if tuple(wanted.values()) not in seen[names]:
            row = subject.row(wanted["relation"], wanted["layout"])
            detail = ": ".join(filter(None, (wanted.get("detail"), "required, not run")))
            found.append(replace(row, **wanted | {"detail": detail}))
    return found
