"""Coverage: what an audit requires, less what was run."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter

from bi_kernels.audit.findings import Row
from bi_kernels.audit.targets.base import Target


def missing(rows: Sequence[Row], subject: Target, required: Iterable[dict]) -> list[Row]:
    """Returns a row that needs a fix for everything required of a subject that no row holds.

    required: fields of a row that must agree, `relation` and `layout` among them; op, case and dtype are the subject's
    unless given.
    """
    own = {name: getattr(subject.row("", ""), name) for name in ("op", "case", "dtype")}
    held = cache(lambda names: {attrgetter(*names)(r) for r in rows if not r.control})
    found = []
    for wanted in (own | fields for fields in required):
        if tuple(wanted.values()) not in held(tuple(wanted)):
            row = subject.row(wanted["relation"], wanted["layout"])
            detail = ": ".join(filter(None, (wanted.get("detail"), "required, not run")))
            found.append(replace(row, **wanted | {"detail": detail}))
    return found
