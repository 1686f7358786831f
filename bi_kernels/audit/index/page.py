"""The generated index: what every report below a folder was asked and found, and the status matrix over them."""

import importlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bi_kernels.audit import kernels
from bi_kernels.audit.findings import PACKED, PASS, TITLE, VERDICTS, checked_rows, grouped, needs_fix, rows_file
from bi_kernels.audit.index import report as reports
from bi_kernels.audit.index.matrix import RELATION, cells, matrix
from bi_kernels.audit.index.report import PAGE
from bi_kernels.audit.parameters import CHECKOUT
from bi_kernels.audit.report import escape
from bi_kernels.audit.report.markdown import MARK, folded, table
from bi_kernels.audit.report.sentences import headline
from bi_kernels.audit.runs.runner import audits
from bi_kernels.contract import CONTRACT

PICTURE = "status.svg"
OURS = {"bi_kernels"}  # candidates
MUTANTS = "mutants.json"  # what `bi-audit mutate` leaves
OLDER = "older kernels"  # of a report, where the kernels or the contract here are others than those it was made of


@dataclass
class Document:
    """What an audit, or `bi-audit mutate`, left in a folder."""

    path: Path
    rows: list[dict]  # its verdicts; none of mutants
    made: dict  # its provenance; empty if the notebook stopped before it

    @property
    def mutants(self) -> bool:
        return not rows_file(self.path)

    @cached_property
    def verdict(self) -> str:
        return "" if self.mutants else reports.verdict(self.path, self.rows)

    @cached_property
    def candidates(self) -> set[str]:
        """Whose ops it judges, controls aside."""
        return {r["candidate"] for r in self.rows if not r["control"]} - {""}

    @property
    def ours(self) -> bool:
        """Tells whether it judges this package's kernels on a device that bits are promised on."""
        return self.candidates == OURS and self.made.get("architecture") in CONTRACT["architectures"]["promised"]

    def older(self, here: str) -> bool:
        """Tells whether it is of other kernels than those of a digest, or of another contract."""
        return bool(self.made) and self.made.get("kernels") != here

    def line(self, folder: Path, here: str, titles: dict[str, str]) -> dict:
        """Returns its line in the index: what was asked and found, by how many checks, when, of which commit, and
        whether of older kernels than `here`; titles: of the audits, by name."""
        page, name = self.path / PAGE, self.path.name
        asked = titles.get(name, "").partition(": ")[2]
        if self.mutants:
            lines = (page.read_text(encoding="utf-8") if page.exists() else "").splitlines() or [""]
            asked = lines[0].partition(": ")[2]
            found = next((line.split("**")[1] for line in lines if line.startswith("**")), "")
            counts = [MARK[""]] * 3
        else:
            mark = MARK[self.verdict] if self.verdict else ""
            said = reports.conclusion(self.path), mark, reports.finding(self.path, self.rows)
            found = " ".join(filter(None, said))
            counts = reports.counts(self.rows)
        made = [self.made.get("date", MARK[""]), self.made.get("commit", MARK[""])[:8], *[OLDER] * self.older(here)]
        return {
            "report": escape.link(name, page.relative_to(folder).as_posix()),
            "question": f"{asked[:1].upper()}{asked[1:]}",
            "found": found,
            **dict(zip(("checks", "to fix", "controls caught"), counts, strict=True)),
            "made": ", ".join(made),
        }


def _read(path: Path, kind: type):
    """Returns what a document has in a file. Raises ValueError where that is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, kind):
        raise ValueError(f"{path} is not what an audit wrote there; remove its folder, or run the audit again")
    return found


def documents(folder: Path) -> dict[Path, list[Document]]:
    """Returns the documents below a folder by the folder that each is in: those of GPUs that bits are promised on come
    first, those of the interpreter last. Raises ValueError for a file that no audit wrote."""
    found = []
    places = {path.parent for name in (VERDICTS, PACKED, MUTANTS) for path in folder.rglob(name)}
    for place in sorted(places - {folder}):
        made, file = place / "provenance.json", rows_file(place)
        if any(part.startswith(".") for part in place.relative_to(folder).parts):
            continue
        if file and any(map(rows_file, place.glob("*/"))):
            continue  # the rows of the documents below it once more
        if (place / MUTANTS).exists():
            _read(place / MUTANTS, list)
        rows = checked_rows(file) if file else []
        found.append(Document(place, rows, _read(made, dict) if made.exists() else {}))
    places = grouped(found, lambda d: d.path.parent)
    return dict(sorted(places.items(), key=lambda item: _rank(*item)))


def _rank(place: Path, found: Sequence[Document]) -> tuple:
    told = {d.made.get("architecture", "").partition(" ")[0] for d in found}
    theirs = any(d.mutants or not d.candidates <= OURS for d in found)
    return not told & {*CONTRACT["architectures"]["promised"]}, "interpreter" in told, theirs, -len(found), place


def lead(found: Sequence[Document], here: str) -> str:
    """Says in a sentence what the reports on this package's kernels found, where bits are promised; '' of none."""
    mine = [d for d in found if d.ours]
    if not mine:
        return ""
    devices = escape.text(", ".join(dict.fromkeys(d.made["device"] for d in mine)))
    rows, older = [r for d in mine for r in d.rows], sum(d.older(here) for d in mine)
    said = re.sub(r"; refused as the contract says: [^;]*", "", headline(rows))
    said = re.sub(r"(every bit agrees) in [^;]*", r"\1", said)  # how many elements, each report says
    missed = "a control was missed; " if any(r["control"] for r in needs_fix(rows)) else ""
    aged = f" {older} of {len(mine)} {'is' if older == 1 else 'are'} of {OLDER} than those here." * bool(older)
    count = f"{len(mine)} report{'s' * (len(mine) > 1)}"
    return f"**{devices}, {count}: {missed}{said[:1].lower()}{said[1:]}.** {reports.counted(rows)}.{aged}"


def _sum(found: Sequence[Document]) -> str:
    """Says on which device the documents of a folder were made, and how many pass."""
    verdicts = [d.verdict for d in found if d.verdict]
    devices = ", ".join(dict.fromkeys(d.made.get("device", "unknown device") for d in found))
    where = reports.ON_INTERPRETER if devices == "interpreter" else f"{escape.text(devices)}."
    rest = len(found) - len(verdicts)
    goals = f"; {rest} more {'has' if rest == 1 else 'have'} goals and no verdict" * bool(rest)
    return f"{where} {verdicts.count(PASS)} of {len(verdicts)} pass{goals}." if verdicts else where


def _name(folder: Path, place: Path, found: Sequence[Document]) -> str:
    """Names a folder of documents, and whose ops they judge where these are not this package's."""
    name = place.relative_to(folder).as_posix() if place != folder else folder.name
    whose = {reports.subject(d.rows) for d in found if not d.mutants}
    return f"{name}: {whose.pop()}" if len(whose) == 1 and any(whose) else name


def report(folder: Path, every: dict[Path, list[Document]] | None = None) -> dict[str, str]:
    """Returns the files of a folder's index by name, made of every document below it, or of those given; the picture is
    of two folders and more. Raises ValueError for a file there that no audit wrote."""
    here, places, rows, files = kernels.digest(), [], {}, {}
    every = documents(folder) if every is None else every
    titles = {name: audit.title for name, audit in audits().items()}
    for place, found in every.items():
        name = _name(folder, place, found)
        places.append({"name": name, "sum": _sum(found), "findings": [d.line(folder, here, titles) for d in found]})
        rows[name] = [r for d in found for r in d.rows]
    status = {name: found for name in rows if (found := cells(rows[name]))}
    if len(status) > 1:
        from bi_kernels.audit.index.picture import draw  # noqa: PLC0415 (the library that draws takes half a second)

        title = f"{len(RELATION)} properties of every op, by device and shapes: how many of the dtypes asked pass"
        files[PICTURE] = draw(status, title)
    text = reports.render(
        "index.md.jinja",
        title=TITLE,
        older=OLDER,
        promised=f"{reports.reading(folder)} {reports.promised(folder)}".strip(),
        lead=lead([d for found in every.values() for d in found], here),
        picture=PICTURE if files else "",
        places=places,
        matrices={name: rows[name] for name in status},
        table=table,
        folded=folded,
        matrix=matrix,
    )
    return files | {PAGE: text}


def write(folder: Path) -> None:
    """Writes the index of a folder, and of each folder of documents below it."""
    every = documents(folder)
    for place in dict.fromkeys((folder, *(p for p, found in every.items() if not found[0].mutants))):
        for name, text in report(place, {p: found for p, found in every.items() if p.is_relative_to(place)}).items():
            (place / name).write_text(text, encoding="utf-8")


def write_anew(folder: Path) -> None:
    """Writes every report below a folder that has its notebook anew, and the indexes; of mutants in a checkout alone,
    which has what writes them. Raises ValueError for a file there that no audit wrote."""
    for d in (d for found in documents(folder).values() for d in found):
        if not d.mutants:
            reports.write(d.path)
        elif (d.path / "population.json").is_file() and (CHECKOUT / "mutation").is_dir():
            sys.path.insert(0, str(CHECKOUT))
            importlib.import_module("mutation.document").write(d.path)
    write(folder)
