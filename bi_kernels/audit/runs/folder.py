"""The folder of a run: who writes it, what is built in it, and which of its documents need not be made again.

A document is built beside its place and moved there whole, so an interrupted run leaves the finished ones intact; what
an unfinished one had recorded stays beside it, hidden.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bi_kernels.audit import kernels
from bi_kernels.audit.findings import NEEDS_FIX, TITLE, VERDICTS, Row, checked_rows, read_rows, rows_file, write_rows

RUNS, PUBLISHED = "runs", "audits"  # where documents are written unless told, and where they are committed
ROOM = 2**20  # bytes that a document may take


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
        theirs = any(folder.iterdir()) and not rows_file(folder) if folder.is_dir() else folder.exists()
        if theirs:
            raise ValueError(f"{option} is {str(out)!r}, where {name} is something that no audit wrote; name another")


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


def place(built: Path, folder: Path) -> None:
    """Moves a report that was built into its place."""
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
    files = [file for path in sorted(out.glob("[!.]*/")) if (file := rows_file(path))]
    rows = [row for file in files for row in checked_rows(file)]
    write_rows(out / VERDICTS, rows)
    return rows


def stands(folder: Path, parameters: dict) -> bool:
    """Tells whether a report was made by these kernels, parameters and versions, and ran to its end. Of another
    candidate than this package none stands: its sources are not known."""
    try:
        made = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    now = {"kernels": kernels.digest(), "parameters": ", ".join(f"{k}={v}" for k, v in parameters.items())}
    now |= {"torch": versions["torch"], "Triton": versions["triton"], "Python": platform.python_version()}
    ours = parameters.get("candidate", "bi_kernels") == "bi_kernels"
    return ours and now.items() <= made.items() and all(row["op"] for row in read_rows(folder))


def stopped(audit: str, why: str, candidate: str = "") -> dict:
    """Returns the row of an audit that did not run to its end; it names neither an op nor a relation."""
    return Row(audit, "", "", candidate, "", "", "", "", "", "", 0, NEEDS_FIX, detail=why).json()
