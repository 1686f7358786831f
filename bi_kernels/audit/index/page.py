"""The generated index: what every report below a folder was asked and found, and the status matrix over them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bi_kernels.audit import kernels
from bi_kernels.audit.evidence import escape
from bi_kernels.audit.evidence.kinds import compares_bits
from bi_kernels.audit.evidence.limits import promised
from bi_kernels.audit.evidence.markdown import MARK, folded, table
from bi_kernels.audit.evidence.verdicts import PASS, TITLE, checked_rows, grouped, verdict_of
from bi_kernels.audit.index import goals
from bi_kernels.audit.index import report as reports
from bi_kernels.audit.index.matrix import RELATION, cells, matrix
from bi_kernels.audit.index.report import PAGE, lead
from bi_kernels.audit.mutants import rates
from bi_kernels.contract import CONTRACT

PICTURE = "status.svg"
OLDER = "older kernels"  # of a report, where the kernels or the contract here are others than those it was made of
ASKED = "Bugs planted in our own kernels: how many do the audits catch?"


@dataclass
class Document:
    """What an audit, or `bi-audit mutate`, left in a folder."""

    path: Path
    rows: list[dict]  # its verdicts; of mutants, what came of each
    made: dict  # its provenance; empty if the notebook stopped before it

    @property
    def mutants(self) -> bool:
        return not (self.path / "verdicts.json").exists()

    @property
    def verdict(self) -> str:
        """Returns the word; '' of mutants, and of a benchmark, whose goals are no verdict."""
        word = "" if self.mutants else verdict_of(self.rows)
        return "" if word == PASS and (self.path / goals.FILE).exists() and not compares_bits(self.rows) else word

    @property
    def title(self) -> str:
        """Returns what was asked: the document's heading."""
        text = self.path / PAGE
        first = next(iter(text.read_text(encoding="utf-8").splitlines()), "") if text.exists() else ""
        return ASKED if self.mutants else first.lstrip("# ") or self.path.name

    @property
    def found(self) -> str:
        """Returns the sentence on its rows."""
        if self.mutants:
            return rates.told(self.path, self.rows)
        said = lead(self.path, self.rows)
        verdict = f"{MARK[self.verdict]} {said.verdict}".strip() if said.verdict else ""
        return " ".join(filter(None, (said.finding, verdict, said.goals)))


def _read(path: Path, kind: type = dict):
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
    for path in sorted([*folder.rglob("verdicts.json"), *folder.rglob("mutants.json")]):
        place = path.parent
        if place == folder or any(part.startswith(".") for part in place.relative_to(folder).parts):
            continue
        if path.name == "verdicts.json" and list(place.glob("*/verdicts.json")):
            continue  # the rows of the documents below it once more
        rows = checked_rows(path) if path.name == "verdicts.json" else _read(path, list)
        made = place / "provenance.json"
        found.append(Document(place, rows, _read(made) if made.exists() else {}))
    places = grouped(found, lambda d: d.path.parent)
    return dict(sorted(places.items(), key=lambda item: _rank(*item)))


def _rank(place: Path, found: Sequence[Document]) -> tuple:
    told = {d.made.get("architecture", "").partition(" ")[0] for d in found}
    ours = lambda d: not d.mutants and {r["candidate"] for r in d.rows if not r["control"]} <= {"bi_kernels"}
    theirs = not all(map(ours, found))
    return not told & {*CONTRACT["architectures"]["promised"]}, "interpreter" in told, theirs, -len(found), place


def _findings(folder: Path, found: Sequence[Document]) -> str:
    """Returns a line a document: what was asked and found, when, and whether of older kernels than those here."""
    here = kernels.digest()
    older = lambda made: [OLDER] * (bool(made) and made.get("kernels") != here)
    return table(
        [
            {
                "document": escape.link(d.path.name, f"{d.path.relative_to(folder).as_posix()}/{PAGE}"),
                "what was asked": d.title,
                "what was found": d.found,
                "date": ", ".join([d.made.get("date", MARK[""]), *older(d.made)]),
            }
            for d in found
        ]
    )


def _sum(found: Sequence[Document]) -> str:
    """Says on which device the documents of a folder were made, and how many pass."""
    judged = [d for d in found if d.verdict]
    devices = ", ".join(dict.fromkeys(d.made.get("device", "unknown device") for d in found))
    good = sum(d.verdict == PASS for d in judged)
    where = reports.ON_INTERPRETER if devices == "interpreter" else f"{escape.text(devices)}."
    return f"{where} {f'{good} of {len(judged)} pass.' * bool(judged)}".strip()


def _made(folder: Path, found: Sequence[Document]) -> str:
    """Returns of what each document is made: checks, controls, commit and command."""
    lines = []
    for d in found:
        mine, controls = ([r for r in d.rows if r["control"] is is_one] for is_one in (False, True))
        where = d.path.relative_to(folder).as_posix()
        lines.append(
            {
                "document": escape.link(where, f"{where}/{PAGE}"),
                "verdicts": f"{len(mine):,}",
                "controls caught": f"{sum(bool(r['caught']) for r in controls)} of {len(controls)}",
                "evidence": ", ".join(
                    escape.link(name, f"{where}/{file}")
                    for name, file in (("verdicts.json", "verdicts.json"), ("notebook", "notebook.ipynb"))
                ),
                "commit": d.made.get("commit", MARK[""]),
                "command": d.made.get("command", MARK[""]),
            }
        )
    return table(lines)


def _name(folder: Path, place: Path, found: Sequence[Document]) -> str:
    """Names a folder of documents, and whose ops they judge where these are not this package's."""
    name = place.relative_to(folder).as_posix() if place != folder else folder.name
    whose = {reports.subject(d.rows) for d in found if not d.mutants}
    return f"{name}: {whose.pop()}" if len(whose) == 1 and any(whose) else name


def report(folder: Path) -> dict[str, str]:
    """Returns the files of a folder's index by name, made of every document below it; the picture is of two folders and
    more. Raises ValueError for a file there that no audit wrote."""
    places = documents(folder)
    named = {place: _name(folder, place, found) for place, found in places.items()}
    judged = [d for found in places.values() for d in found if not d.mutants]
    by_place = {named[place]: [r for d in found if not d.mutants for r in d.rows] for place, found in places.items()}
    status = {name: found for name, rows in by_place.items() if (found := cells(rows))}
    files, parts = {}, []
    if len(status) > 1:
        from bi_kernels.audit.index.picture import draw  # noqa: PLC0415 (the library that draws takes half a second)

        title = f"{len(RELATION)} properties of every op, by device and shapes: how many of the dtypes asked pass"
        files[PICTURE] = draw(status, title)
        parts.append(f"![For every op, property and device: how many of the dtypes asked pass]({PICTURE})")
    for place, found in places.items():
        parts.append(f"### {named[place]}\n\n{_sum(found)}\n\n{_findings(folder, found)}")
    if judged:
        parts.append("## In detail")
        parts.append(folded("Verdicts, controls, commits and commands", _made(folder, judged)))
    parts += [folded(f"{name}: op × relation", matrix(by_place[name])) for name in status]
    head = (
        f"{TITLE} from the verdicts beside it. ✅ pass, ❌ needs-fix, ⬜ unsupported, – not judged here. A verdict of "
        f"the interpreter is no statement about a GPU. *{OLDER.capitalize()}*: the kernels or the contract have "
        f"changed since the report was made. {promised(folder)}"
    )
    body = "\n\n".join(["## Findings", *parts] if places else ["## Findings", "No document here yet."])
    return files | {PAGE: f"{head.rstrip()}\n\n{body.rstrip()}\n"}


def write(folder: Path) -> None:
    """Writes the index of a folder, and of each folder of documents below it."""
    for place in dict.fromkeys((folder, *(p for p, found in documents(folder).items() if not found[0].mutants))):
        for name, text in report(place).items():
            (place / name).write_text(text, encoding="utf-8")


def write_anew(folder: Path) -> None:
    """Writes every report below a folder from its own evidence, and the indexes. Raises ValueError for a file there
    that no audit wrote."""
    for d in (d for found in documents(folder).values() for d in found):
        if not d.mutants:
            reports.write(d.path)
        elif (d.path / rates.FILE).is_file():  # else of before it was recorded
            from bi_kernels.audit.mutants import document  # noqa: PLC0415 (it imports triton)

            document.write(d.path)
    write(folder)
