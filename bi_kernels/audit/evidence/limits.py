"""The link from a document to the page that says what is promised, and where."""

import os
from pathlib import Path

LIMITS = Path(__file__).parents[3] / "docs" / "limits.md"  # of a checkout; a wheel has none


def promised(folder: Path) -> str:
    """Returns the link from a folder of a checkout to what is promised, and where; '' of any other folder."""
    if not LIMITS.is_file() or not folder.resolve().is_relative_to(LIMITS.parents[1]):
        return ""
    target = Path(os.path.relpath(LIMITS, folder.resolve())).as_posix()
    return f"[What is promised, and where]({target})."
