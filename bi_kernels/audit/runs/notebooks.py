"""Finds the notebooks, and the helpers next to some of them, which only a checkout has."""

import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
WITH_HELPERS = ("zoo", "recipes", "world")  # audits whose notebook imports from notebooks/helpers


def folder() -> Path | None:
    """Returns the folder of the notebooks: in an installed package, or next to the package in a checkout."""
    return next((d for d in (PACKAGE / "notebooks", PACKAGE.parent / "notebooks") if d.is_dir()), None)


def find_helpers(audit: str) -> None:
    """Puts the notebooks' folder on sys.path if the audit's notebook imports from `helpers`, so that it does so from
    any folder and in any process. Raises ValueError where the package was installed without them."""
    if audit not in WITH_HELPERS:
        return
    found = folder()
    if not found or not (found / "helpers").is_dir():
        raise ValueError(f"{audit} needs a checkout of bi-kernels, installed with pip install --editable")
    sys.path[:0] = [path for path in (str(found), str(found.parent)) if path not in sys.path]  # benchmarks, too
