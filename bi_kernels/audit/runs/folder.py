"""The folder of a run: who writes it, what is built in it, and which of its documents need not be made again.

A document is built beside its place and moved there whole, so an interrupted run leaves the finished ones intact; what
an unfinished one had recorded stays beside it, hidden.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from bi_kernels.audit.findings import NEEDS_FIX, TITLE, Row, checked_rows, read_rows, write_rows

RUNS, PUBLISHED = "runs", "audits"  # where documents are written unless told, and where they are committed
FINISHED = ".finished"  # in a document that ran to its end: its fingerprint
ROOM = 2**20  # bytes that a document may take
PACKAGE = Path(__file__).parents[2]
SOURCES = ".py", ".toml", ".json"


def ignored() -> Path:
    """Returns the folder of runs, which git ignores."""
    folder = Path(RUNS)
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds a folder against another run, and leaves none where nothing was written. Raises ValueError where there is
    another run."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--out is {str(out)!r}, which another bi-audit is writing; wait for it, or name another folder"
            ) from None
        try:
            yield
        finally:
            if [path.name for path in out.iterdir()] == [".lock"]:
                (out / ".lock").unlink()
                out.rmdir()


def refuse_foreign(out: Path, names: list[str], option: str = "--out") -> None:
    """Raises ValueError where something that no run wrote stands where a run would write."""
    index = out / "README.md"
    if index.is_file() and not index.read_text(encoding="utf-8", errors="replace").startswith(TITLE):
        raise ValueError(f"{option} is {str(out)!r}, whose README.md no run of audits wrote; name another folder")
    for name in names:
        folder = out / name
        if not folder.is_dir() and folder.exists() or folder.is_dir() and any(folder.iterdir()) and not _ours(folder):
            raise ValueError(f"{option} is {str(out)!r}, where {name} is something that no audit wrote; name another")


def _ours(folder: Path) -> bool:
    return (folder / "verdicts.json").is_file()


def building(out: Path, name: str) -> Path:
    """Returns where this process builds a document of `out`; whoever was killed builds somewhere else."""
    return out / f".{name}.{os.getpid()}.partial"


def check_room(out: Path) -> None:
    """Raises OSError where nothing can be written any more, as on a full disk: an audit that stopped then says
    nothing."""
    with tempfile.TemporaryFile(dir=out) as file:
        file.write(bytes(ROOM))


def clear(out: Path) -> None:
    """Removes what killed runs were building, and this one."""
    for partial in out.glob(".*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def place(built: Path, folder: Path, made_of: str) -> None:
    """Moves a document that was built into its place. made_of: its fingerprint, '' where it did not run to its end."""
    if made_of:
        (built / FINISHED).write_text(made_of, encoding="utf-8")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    built.rename(folder)
    for done in (old, _interrupted(folder)):
        shutil.rmtree(done, ignore_errors=True)


def keep(built: Path, folder: Path) -> Path | None:
    """Keeps what an interrupted audit had recorded, hidden beside its document; returns where, if there is any."""
    kept = _interrupted(folder) if read_rows(built) else None
    if kept:
        shutil.rmtree(kept, ignore_errors=True)
        built.rename(kept)
    return kept


def _interrupted(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.interrupted")


def collect(out: Path) -> list[dict]:
    """Returns the rows of every document in a folder, also written to its verdicts.json."""
    rows = [row for path in sorted(out.glob("[!.]*/verdicts.json")) for row in checked_rows(path)]
    write_rows(out / "verdicts.json", rows)
    return rows


def fingerprint(notebook: Path, parameters: dict) -> str:
    """Returns a digest of what a document is made of: this package and a checkout's benchmarks, its notebook and the
    helpers next to it, the parameters, the candidate's own file, and the versions of torch, Triton and Python."""
    seen = hashlib.sha256(repr(sorted(parameters.items())).encode())
    seen.update(repr([platform.python_version(), *map(importlib.metadata.version, ("torch", "triton"))]).encode())
    every = [*PACKAGE.rglob("*"), *(PACKAGE.parent / "benchmarks").rglob("*")]
    files = [path for path in sorted(every) if path.suffix in SOURCES]
    files += sorted(notebook.parent.glob("helpers/**/*.py"))
    for path in [*files, notebook, *filter(None, map(_file, (parameters.get(k) for k in ("candidate", "inputs"))))]:
        seen.update(path.name.encode() + path.read_bytes())
    return seen.hexdigest()


def _file(spec: str | None) -> Path | None:
    """Returns the file that a candidate is in, None where it is not found; imports nothing."""
    place = str(spec or "").rpartition(":")[0]
    if Path(place).is_file():
        return Path(place)
    found, within = None, None
    for i in range(1, len(parts := place.split(".")) + 1):
        found = PathFinder.find_spec(".".join(parts[:i]), within)
        within = found and found.submodule_search_locations
    return Path(found.origin) if found and found.has_location else None


def finished(folder: Path) -> str:
    """Returns the fingerprint of a document that ran to its end on this machine, '' of any other."""
    file = folder / FINISHED
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def stopped(audit: str, why: str, candidate: str = "") -> dict:
    """Returns the row of an audit that did not run to its end; it names neither an op nor a relation."""
    return Row(audit, "", "", candidate, "", "", "", "", "", "", 0, NEEDS_FIX, detail=why).json()
