"""How far some rows are off, at most: what sentences and tables both show."""

from collections.abc import Collection, Iterable

STEPS = 100_000  # ULP up to which they are counted; beyond, the relative difference says more


def number(rows: Iterable[dict], name: str) -> float | None:
    """Returns the largest of a number over some rows, None where none of them has it."""
    return max((float(r[name]) for r in rows if r.get(name) is not None), default=None)


def share_of(rows: Collection[dict]) -> str:
    """Returns the largest share of the bound in three digits, in more where they would make it 1; '' where nothing was
    held against one."""
    share = number(rows, "threshold_share")
    within = share is not None and share < 1
    return "" if share is None else next(s for n in range(3, 18) if (s := f"{share:.{n}g}") != "1" or not within)


def steps(rows: Collection[dict]) -> str:
    """Returns the largest distance in ULP, '' where that counts nothing: see `drift.compare`."""
    found = number(rows, "max_ulp")
    return f"{int(found):,}" if found and found < STEPS else ""


def sizes(rows: Collection[dict]) -> dict[str, str]:
    """Returns how far some rows are off at most, "–" where that counts nothing; a sentence and a table both show
    these."""
    most, relative, share = (number(rows, name) for name in ("max_abs", "max_rel", "threshold_share"))
    return {
        "max abs": "–" if most is None else f"{most:.3g}",
        "max rel": "–"
        if share is None and not relative
        else f"{relative:.2g}"
        if share is None
        else f"{share_of(rows)} × bound",
        "ULP": steps(rows) or "–",
    }


def size(rows: Collection[dict]) -> str:
    """Says in a word how far some rows are off: the share of the contract's bound, ULP, or the relative difference."""
    found = sizes(rows)
    if share_of(rows):
        return found["max rel"].replace("× bound", "× the bound")
    return f"{found['ULP']} ULP" if steps(rows) else f"{found['max rel']} relative" if found["max rel"] != "–" else "–"


def in_words(rows: list[dict], where: str = "") -> str:
    """Says how far bits are off: in ULP, else relative to the larger one. where: for which the number holds."""
    found, most, relative = sizes(rows), number(rows, "max_abs"), number(rows, "max_rel")
    if most is None:
        return ""
    if most == float("inf"):
        return ", up to NaN or Inf"
    if not most:
        ulp = number(rows, "max_ulp")
        return ", in the sign of zeros" if ulp == 0 and all(r["first_index"] for r in rows if r["mismatches"]) else ""
    if steps(rows):
        return f",{where} by at most {found['ULP']} ULP"
    if relative and relative > 1:
        return ", even in its sign"
    return (
        f",{where} by up to {found['max rel']} of the larger number"
        if relative
        else f",{where} by up to {found['max abs']}"
    )
