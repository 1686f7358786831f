"""Finds the notebooks, and puts the helpers next to them on sys.path."""

import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2]


def folder() -> Path | None:
    """Returns the folder of the notebooks: in an installed package, or next to the package in a checkout."""
    return next((d for d in (PACKAGE / "notebooks", PACKAGE.parent / "notebooks") if d.is_dir()), None)


def find_helpers() -> None:
    """Puts the notebooks' folder on sys.path, so that `helpers` is found from any folder and in any process, and the
    checkout, for `benchmarks`."""
    if found := folder():
        sys.path[:0] = [path for path in (str(found), str(found.parent)) if path not in sys.path]
