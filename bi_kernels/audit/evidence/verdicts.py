"""The rows of a document on disk, its verdicts.json."""

import json
from pathlib import Path


def write_rows(path: Path, rows: list[dict]) -> None:
    """Whole or not at all: an interrupted audit keeps what it had."""
    text = ",\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    fresh.replace(path)


def read_rows(folder: Path) -> list[dict]:
    """The verdicts of one document; none if it has none, or if they were cut short."""
    try:
        return json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
