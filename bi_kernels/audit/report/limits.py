"""The link from a document to the page that says what is promised, and where."""

import os
from pathlib import Path

LIMITS, OURS = Path("docs", "limits.md"), Path("bi_kernels", "contract.toml")  # of a checkout


def promised(folder: Path) -> str:
    """Returns the link from a folder of a checkout to what is promised, and where; '' of any other folder."""
    folder = folder.resolve()
    for root in folder.parents:
        if (root / LIMITS).is_file() and (root / OURS).is_file():
            return f"[What is promised, and where]({Path(os.path.relpath(root / LIMITS, folder)).as_posix()})."
    return ""
